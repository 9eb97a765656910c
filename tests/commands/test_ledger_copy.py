"""`ledger copy`, and what `ledger locate` says of bookies that are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.bookie.local import LocalCluster
from bkctl.client.ledger import BookKeeper
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

from .conftest import Cli


@pytest.fixture(autouse=True)
def _connected(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)


@pytest.fixture
def written(cli: Cli, tmp_path: Path) -> Iterator[str]:
    """A ledger of 50 entries with a password and custom metadata; gone afterwards."""
    path = tmp_path / "content"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(50)))
    made = cli("ledger", "write", path, "-o", "id", "--password", "pw", "--custom-metadata", "k=v", "--uuid")
    assert made.code == 0, made.err
    yield made.out.strip()
    cli("ledger", "delete", made.out.strip(), "--yes")


def lines(cli: Cli, ledger: str, *arguments: object) -> str:
    read = cli("ledger", "read", ledger, "--body", "--format", "raw", "--password", "pw", *arguments)
    assert read.code == 0, read.err
    return read.out


def test_a_copy_is_the_ledger_under_another_name(cli: Cli, written: str) -> None:
    done = cli("ledger", "copy", written, "--to-scope", "0x77", "-o", "ndjson")
    assert done.code == 0, done.err
    (row,) = done.rows
    source = LedgerId.parse(written)
    assert row["ledgerQualifiedName"] == source.qualified_name
    assert row["copy"] == {
        "ledgerScopeId": "119",
        "ledgerId": str(source.ledger_id),
        "ledgerQualifiedName": LedgerId(0x77, source.ledger_id).qualified_name,
    }
    assert (row["entryCount"], row["sourceOpen"]) == (50, False)
    copy = row["copy"]["ledgerQualifiedName"]
    try:
        assert lines(cli, copy) == lines(cli, written)
        shown, original = (
            cli("ledger", "show", each, "-o", "ndjson", "--show-secrets").rows[0] for each in (copy, written)
        )
        own = {"ledgerScopeId", "ledgerQualifiedName", "ctime", "ensembles"}
        assert {key: shown[key] for key in shown.keys() - own} == {key: original[key] for key in original.keys() - own}
        assert cli("ledger", "verify", copy).code == 0
        assert cli("ledger", "copy", written, "--to-scope", "0x77").code == 5
    finally:
        assert cli("ledger", "delete", copy, "--yes").code == 0


def test_a_copy_goes_to_another_cluster_and_back(cli: Cli, written: str, tmp_path: Path, cluster: LocalCluster) -> None:
    other = LocalCluster(tmp_path / "other")
    other.up(1)
    try:
        refused = cli("ledger", "copy", written, "--to", other.metadata_uri)
        assert refused.code == 6, refused.err  # three bookies are wanted
        shape = ("--ensemble-size", 1, "--write-quorum", 1, "--ack-quorum", 1, "--digest-type", "CRC32")
        done = cli("ledger", "copy", written, "--to", other.metadata_uri, *shape, "-o", "id", "--rate", "50MB/s")
        assert (done.code, done.out.strip()) == (0, written), done.err
        there = ("-u", other.metadata_uri)
        assert lines(cli, written, *there) == lines(cli, written)
        back = cli(
            "ledger", "copy", written, *there, "--to", cluster.metadata_uri, "--new-id", "--to-scope", "8", "-o", "id"
        )
        assert back.code == 0, back.err
        assert lines(cli, back.out.strip()) == lines(cli, written)
        assert cli("ledger", "delete", back.out.strip(), "--yes").code == 0
        # Stop its only bookie: no bookie has the copy any more.
        other.down(other.bookies()[0].bookie_id)
        for arguments in (("--check",), ("--every-entry",), ("--entry", 3, "--check")):
            gone = cli("ledger", "locate", written, *there, *arguments, "-o", "ndjson")
            assert gone.code == 3
            assert [(row["bookieId"], row["answer"]) for row in gone.rows] == [(other.bookies()[0].bookie_id, "gone")]
            assert gone.rows[0].get("missing") is None
            assert "1 replica is not ok" in gone.err
    finally:
        other.down()


def test_refused_copy_is_reported_in_one_line(cli: Cli, written: str) -> None:
    for arguments, code in (
        ((written,), 2),
        ((written, "--to-scope", "x"), 2),
        ((written, "7:7", "--to-ledger-id", "5"), 2),
        ((written, "--new-id", "--to-ledger-id", "5"), 2),
        ((written, "--to-scope", "9", "--rate", "0"), 2),
        (("7:404", "--to-scope", "9"), 4),
    ):
        done = cli("ledger", "copy", *arguments)
        assert (done.code, done.out) == (code, ""), done.err
        assert len(done.err.splitlines()) == 1
    done = cli("ledger", "copy", "7:404", written, "--to-scope", "9", "--keep-going", "-o", "id")
    assert done.code == 3
    assert "1 ledger was not copied" in done.err
    (failure,) = [line for line in done.err.splitlines() if " was not copied: No ledger " in line]
    assert cli("ledger", "delete", done.out.strip(), "--yes").code == 0
    quiet = cli("-q", "ledger", "copy", "7:404", "--to-scope", "9", "--keep-going")
    assert (quiet.code, quiet.err.splitlines()[-2]) == (3, failure)


def test_an_open_ledger_is_copied_only_with_open_or_recover(cli: Cli, cluster: LocalCluster) -> None:
    async def leave_open() -> LedgerId:
        with open_cluster(cluster.metadata_uri) as opened:
            async with BookKeeper(opened) as client:
                writer = await client.create_ledger_adv(ledger_scope_id=7)
                for number in range(5):
                    await writer.add(b"%d" % number)
                await writer.write_lac()
                return writer.ledger

    ledger = str(asyncio.run(leave_open()))
    refused = cli("ledger", "copy", ledger, "--to-scope", "9")
    assert refused.code == 5
    assert "--recover" in refused.err
    done = cli("ledger", "copy", ledger, "--to-scope", "9", "--open", "-o", "ndjson")
    assert done.code == 0
    assert (done.rows[0]["entryCount"], done.rows[0]["sourceOpen"]) == (5, True)
    assert "its copy ends at entry 4" in done.err
    done = cli("ledger", "copy", ledger, "--to-scope", "10", "--recover")
    assert done.code == 0
    head, row = done.out.splitlines()
    assert head.split() == ["LEDGER", "COPY", "ENTRIES", "LENGTH", "SOURCE", "OPEN"]
    copy = LedgerId(10, LedgerId.parse(ledger).ledger_id).qualified_name
    assert row.split() == [ledger, copy, "5", "5", "B", "no"]
    for scope in ("7", "9", "10"):
        assert cli("ledger", "delete", f"{scope}:{LedgerId.parse(ledger).ledger_id}", "--yes").code == 0


def test_locate_asks_the_bookies(cli: Cli, written: str, cluster: LocalCluster) -> None:
    quiet = cli("ledger", "locate", written, "-o", "ndjson")
    assert quiet.code == 0
    assert "answer" not in quiet.rows[0]
    for arguments in (("--check",), ("--every-entry",), ("--check", "--entry", 7), ("--check", "--entry", 0x10)):
        done = cli("ledger", "locate", written, *arguments, "-o", "ndjson")
        assert done.code == 0, done.err
        assert [row["answer"] for row in done.rows] == ["ok"] * (2 if "--entry" in arguments else 3)
        assert all(row.get("missing", []) == [] for row in done.rows)
    assert cli("ledger", "locate", written, "--every-entry", "--entry", 3).code == 2
    table = cli("ledger", "locate", written, "--every-entry")
    assert [line.split()[-3:] for line in table.out.splitlines()[1:]] == [["ok", "-", "-"]] * 3


def test_missing_entries_read_as_spans() -> None:
    from bkctl.commands.ledger.listing import spans_text

    def span(first: int, last: int, count: int) -> dict[str, int]:
        return {"firstEntryId": first, "lastEntryId": last, "entryCount": count}

    assert spans_text([]) == "-"
    assert spans_text([span(3, 3, 1), span(5, 9, 4)]) == "3, 5-9 (4)"
    assert spans_text([span(at, at, 1) for at in range(7)]) == "0, 1, 2, 3, 4, 2 more"
