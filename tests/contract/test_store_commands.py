"""Commands that change metadata, over every store and every layout: what they change is undone byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import CommandLine

from bkctl.errors import NotFound
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

LEDGERS = [LedgerId(0, 5), LedgerId(0, 1 << 30), LedgerId(7, 5), LedgerId((1 << 64) - 1, (1 << 64) - 1)]


def metadata(ledger: LedgerId) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=2,
        write_quorum_size=2,
        ack_quorum_size=1,
        ensembles=(Fragment(0, ("a:1", "b:1")), Fragment(10, ("a:1", "c:1"))),
        state=LedgerState.CLOSED,
        length=100,
        last_entry_id=14,
        digest_type=DigestType.CRC32C,
        password=b"geheim",
        custom_metadata={"name": str(ledger).encode()},
    )


@pytest.fixture
def cli(cluster_uri: str) -> CommandLine:
    with open_cluster(cluster_uri, create=True) as cluster:
        for ledger in LEDGERS:
            cluster.ledgers.create(ledger, metadata(ledger))
    return CommandLine(cluster_uri)


def values(cli: CommandLine) -> dict[LedgerId, bytes]:
    with open_cluster(cli.settings["METADATA_URI"]) as cluster:
        paths = {ledger: cluster.ledgers.path(ledger) for ledger in cluster.ledgers.ledgers(None)}
        found = {ledger: cluster.store.get(path) for ledger, path in paths.items()}
    return {ledger: each.value for ledger, each in found.items() if each is not None}


def test_deleted_ledgers_are_restored_by_undo(cli: CommandLine, tmp_path: Path) -> None:
    before = values(cli)
    names = [str(ledger) for ledger in LEDGERS]
    assert cli("ledger", "list", "--all-scopes", "-o", "id").ids == names
    assert cli("ledger", "list", "--all-scopes", "--bookie", "c:1", "-o", "id").ids == names
    shown = cli("ledger", "show", *names, "-o", "ndjson").rows
    assert [row["ledgerQualifiedName"] for row in shown] == [ledger.qualified_name for ledger in LEDGERS]
    kept = ("--backup", tmp_path / "backup", "--undo", tmp_path / "undo")
    deleted = cli("ledger", "delete", *names, "--if-state", "CLOSED", *kept, "--yes", "-o", "id")
    assert deleted.ids == names
    assert values(cli) == {}
    assert cli("ledger", "show", names[2]).code == 4
    assert cli("metadata", "undo", tmp_path / "undo", "--yes").code == 0
    assert values(cli) == before
    # Undone twice does no harm; so does an import over what is there.
    assert {row["outcome"] for row in cli("metadata", "undo", tmp_path / "undo", "--yes", "-o", "ndjson").rows} == {
        "already"
    }
    assert cli("ledger", "delete", *names, "--yes", "--keep-going").code == 0
    restored = cli("metadata", "import", "-f", tmp_path / "backup", "--yes")
    assert restored.code == 0, restored.err
    assert values(cli) == before


def test_locate_lists_both_fragments(cli: CommandLine) -> None:
    rows = cli("ledger", "locate", str(LEDGERS[2]), "-o", "ndjson").rows
    assert [(row["firstEntryId"], row["lastEntryId"], row["bookieId"], row["entryCount"]) for row in rows] == [
        (0, 9, "a:1", 10), (0, 9, "b:1", 10), (10, 14, "a:1", 5), (10, 14, "c:1", 5),
    ]  # fmt: skip
    assert {row["state"] for row in rows} == {"down"}
    assert cli("ledger", "locate", str(LEDGERS[2]), "--entry", 11, "-o", "id").ids == ["c:1", "a:1"]


def test_cookies_are_created_renamed_and_restored_by_undo(cli: CommandLine, tmp_path: Path) -> None:
    cookie = Cookie("one:1", ("/j",), ("/l",), "i").serialize()
    file = tmp_path / "cookie"
    file.write_bytes(cookie)
    assert cli("cookie", "create", "one:1", "-f", file, "--undo", tmp_path / "1").code == 0
    assert cli("cookie", "create", "one:1", "-f", file).code == 5
    assert cli("cookie", "show", "one:1", "--format", "raw").out == cookie
    assert cli("cookie", "rename", "one:1", "two:2", "--yes", "--undo", tmp_path / "2").code == 0
    assert cli("cookie", "show", "two:2", "--format", "raw").out == cookie.replace(b"one:1", b"two:2")
    assert cli("bookies", "list", "--state", "down", "-o", "id").ids == ["two:2"]
    for undo, left in (("2", ["one:1"]), ("1", [])):
        assert cli("metadata", "undo", tmp_path / undo, "--yes").code == 0
        assert cli("cookie", "list", "-o", "id").ids == left


@pytest.mark.parametrize("place", ["writable", "read_only", "ledgers", "cookies"])
def test_missing_node_of_every_cluster_is_not_an_empty_one(cluster_uri: str, place: str) -> None:
    with open_cluster(cluster_uri, create=True) as cluster:
        path = getattr(cluster.places, place, place)
        if cluster.store.get(path) is None:
            return  # this kind of store creates it with the first ledger or cookie
        if place == "writable" and cluster.places.read_only.startswith(path):
            cluster.store.delete(cluster.places.read_only)
        cluster.store.delete(path)
        call = cluster.cookies.list if place == "cookies" else cluster.bookies.list
        with pytest.raises(NotFound):
            list(cluster.ledgers.ledgers(None)) if place == "ledgers" else call()
    command = ("ledger", "list") if place == "ledgers" else ("bookies", "list")
    assert CommandLine(cluster_uri)(*command).code == 4
