"""The command line in this process: what it prints, and its exit code. All JSON is held to its schema."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
from commands_reference import ERROR_SCHEMA, command_schema, read_pages

from bkctl.bookie.local import LocalCluster
from bkctl.commands.kit.command import Declaration
from bkctl.commands.main import GROUPS, run
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster

BOOKIES = ("b0:3181", "b1:3181", "b2:3181")


class Result(NamedTuple):
    """The result of one command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The objects of an ndjson output."""
        return [json.loads(line) for line in self.out.splitlines()]


Cli = Callable[..., Result]


def applied(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a dry run, as the run itself prints them."""
    return [{**row, "applied": True} for row in rows]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("BKCTL_") and name != "BKCTL_TIMEOUT"]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Without buffers, errors of stdout come earlier than operators see them.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        _check_schemas([str(argument) for argument in arguments], out, err)
        return Result(code, out, err)

    return call


@cache
def _declarations() -> dict[str, Declaration]:
    """Return the declarations of the commands that print rows or an object."""
    declared = {page.name: page.declaration for page in read_pages().commands}
    return {name: found for name, found in declared.items() if found is not None and found.prints}


def _check_schemas(words: list[str], out: str, err: str) -> None:
    """Fail unless the JSON that a command line printed has the form that its schema describes."""
    form = next((form for option, form in pairwise(words) if option in ("-o", "--output")), None)
    if form not in ("json", "ndjson"):
        return
    for line in err.splitlines():
        if line.startswith('{"error"'):
            jsonschema_rs.validate(ERROR_SCHEMA, json.loads(line))
    declared = _declarations()
    at = next((at for at, word in enumerate(words) if word in GROUPS or word in declared), 0)
    name = next((name for count in (3, 2, 1) if (name := " ".join(words[at : at + count])) in declared), None)
    if name is None or not out.startswith(("{", "[")) or {"--columns", "--help", "-"} & set(words):
        return
    schema = command_schema(declared[name], name)
    if form == "ndjson":
        schema = {"$ref": "#/$defs/row", "$defs": schema["$defs"]}
    validator = jsonschema_rs.validator_for(schema)
    for document in out.splitlines() if form == "ndjson" else [out]:
        found = json.loads(document)
        error = next(validator.iter_errors(found), None)
        assert error is None, f"{name} does not fit docs/schemas/{name.replace(' ', '-')}.json: {error}"
        for row in found if isinstance(found, list) else [found]:
            if declared[name].has_dry_run and not row.get("removed"):
                assert row.get("applied", True) is ("--dry-run" not in words), f"{name}: {row}"
                assert "applied" in row or "--dry-run" not in words, f"{name}: {row}"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A SQLite store with a closed and an open ledger, one of scope 7, two bookies, and the cookie of a third."""
    uri = f"sqlite://{tmp_path}/m.db"
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    with open_cluster(uri, create=True) as cluster:
        closed = LedgerMetadata(
            3, 2, 2, DigestType.CRC32C, b"", (Fragment(0, BOOKIES),), LedgerState.CLOSED, 10, 3, 1755770000123,
            {"application": b"pulsar", "component": b"managed-ledger", "pulsar/managed-ledger": b"t"},
        )  # fmt: skip
        cluster.ledgers.create(LedgerId(0, 5), closed)
        cluster.ledgers.create(
            LedgerId(0, 6), LedgerMetadata(1, 1, 1, DigestType.HMAC, b"secret", (Fragment(0, BOOKIES[:1]),))
        )
        cluster.ledgers.create(LedgerId(7, 5), closed)
        info = BookieServiceInfo(
            (
                BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc"),
                BookieEndpoint("httpserver", 8080, "10.0.0.1", "http"),
            ),
            {"ledgerScopes": "1"},
        )
        cluster.bookies.register(BOOKIES[0], info)
        cluster.bookies.register(BOOKIES[1], BookieServiceInfo(), read_only=True)
        cluster.cookies.write(BOOKIES[2], Cookie(BOOKIES[2], ("/j",), ("/l",)), -1)
        yield cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three bookies of our own, over SQLite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        local = LocalCluster(tmp_path_factory.mktemp("cluster"))
        local.up(3)
        try:
            yield local
        finally:
            local.down()
