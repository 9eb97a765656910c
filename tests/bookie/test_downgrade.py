"""`bkctl bookie downgrade` after a crash: Apache's bookies start on the directories, and no scope loses anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.servers import DB, INTERLEAVED, SORTED, ApacheBookie, Java, read_ledgers, wait_for, write_ledgers

from bkctl.files.directories import BookieDirectories
from bkctl.files.journal import JournalReader
from bkctl.formats.journal import VERSION_SCOPED
from bkctl.metadata.cluster import open_cluster

LINES = [f"line {number}".encode() for number in range(40)]
PLACEMENT = ("--ensemble-size", 3, "--write-quorum", 2, "--ack-quorum", 2)


def versions(directory: Path) -> set[int]:
    found = set()
    for file in BookieDirectories([directory]).journals():
        if not file.scoped:
            with JournalReader.open(file.path) as reader:
                found.add(reader.version)
    return found


def expect_all(java: Java, uri: str, protocol: str, ledgers: list[dict[str, Any]]) -> None:
    """Apache's client reads every closed ledger, byte for byte as it wrote it."""
    there = [ledger for ledger in ledgers if not ledger["deleted"] and ledger["state"] == "CLOSED"]
    assert len(there) > 10
    for expected, found in zip(there, read_ledgers(java, uri, protocol, there), strict=True):
        entries = [{name: entry[name] for name in entry if name != "lastAddConfirmed"} for entry in expected["entries"]]
        assert found["entries"] == entries, expected["name"]


@pytest.mark.java
def test_after_a_crash_and_a_downgrade_apaches_bookies_serve_scope_0_and_ours_all(
    zookeeper_uri: str,
    own_bookie: Callable[..., OwnBookie],
    apache_bookie: Callable[..., ApacheBookie],
    java: Java,
    tmp_path: Path,
) -> None:
    two = {"journalDirectories": f"{tmp_path / 'journal-a'},{tmp_path / 'journal-b'}"}
    ours = [
        own_bookie(zookeeper_uri, storage=storage, settings=settings)
        for storage, settings in ((SORTED, two), (INTERLEAVED, {}), (DB, {}))
    ]
    for bookie in ours:
        bookie.launch()
    for bookie in ours:
        bookie.wait_ready()
    cli = CommandLine(zookeeper_uri)
    plain = write_ledgers(java, zookeeper_uri, "v3", small=True)
    (tmp_path / "lines").write_bytes(b"\n".join(LINES) + b"\n")
    scoped = [
        cli("ledger", "write", tmp_path / "lines", *options, *PLACEMENT, "-o", "id").ids[0]
        for options in (("--ledger-scope-id", 7), ("--uuid",), ("--ledger-scope-id", 2**64 - 1))
    ]
    for bookie in ours:
        bookie.kill()

    for bookie in ours:
        before = cli("journal", "read", "--conf", bookie.conf, "--after-lastmark", "-o", "id").ids
        planned = cli("bookie", "downgrade", "--conf", bookie.conf, "--dry-run", "-o", "ndjson").rows
        assert sum(row["recordCount"] for row in planned) == len(before)
        assert all(row["lastMarkJournalId"] is None for row in planned)
        rows = cli("bookie", "downgrade", "--conf", bookie.conf, "-o", "ndjson").rows
        assert [row["journalIds"] for row in rows] == [row["journalIds"] for row in planned]
        assert all(row["lastMarkOffset"] == 512 for row in rows)
        assert len(rows) == (2 if bookie is ours[0] else 1)
        for row in rows:
            assert VERSION_SCOPED not in versions(Path(row["directory"]))
        assert cli("journal", "read", "--conf", bookie.conf, "--after-lastmark", "-o", "id").ids == []
        assert cli("journal", "verify", "--conf", bookie.conf).code == 0
        given = ["--conf", bookie.conf]
        if bookie is not ours[0]:
            given = ["--dir", bookie.journal_dir, "--dir", bookie.ledger_dir]
        again = cli("bookie", "downgrade", *given, "-o", "ndjson")
        assert (again.code, [row["journalIds"] for row in again.rows]) == (0, [[]] * len(rows))
        assert "Nothing to do" in again.err

    with open_cluster(zookeeper_uri) as cluster:
        wait_for(lambda: not cluster.bookies.list(include_down=False), "the killed bookies' sessions over")
    theirs = [
        apache_bookie(
            zookeeper_uri, str(bookie.settings["ledgerStorageClass"]), port=bookie.port,
            settings={
                name: bookie.settings[name]
                for name in ("journalDirectory", "journalDirectories", "ledgerDirectories") if name in bookie.settings
            },
        )
        for bookie in ours
    ]  # fmt: skip
    for each in theirs:
        each.launch()
    for each in theirs:
        each.wait_ready()
    expect_all(java, zookeeper_uri, "v3", plain)
    for each in theirs:
        each.stop()

    for bookie in ours:
        bookie.launch()
    for bookie in ours:
        bookie.wait_ready()
    expect_all(java, zookeeper_uri, "v2", plain)
    for ledger in scoped:
        answer = cli("ledger", "read", ledger, "--format", "raw")
        assert (answer.code, answer.out) == (0, b"".join(LINES))


def test_downgrade_refuses_running_bookies_and_foreign_directories(
    cluster_uri: str, own_bookie: Callable[..., OwnBookie], tmp_path: Path
) -> None:
    bookie = own_bookie(cluster_uri)
    cli = CommandLine(None)
    assert cli("bookie", "downgrade", "--conf", bookie.conf).code == 4
    bookie.start()
    answer = cli("bookie", "downgrade", "--conf", bookie.conf)
    assert (answer.code, f"process {bookie.pid}" in answer.problem) == (5, True)
    bookie.stop()
    assert cli("bookie", "downgrade", "--conf", bookie.conf).code == 0
    assert cli("bookie", "downgrade", "--dir", bookie.journal_dir, "--dir", bookie.ledger_dir).code == 0
    (bookie.ledger_dir / "current" / "locations").mkdir()
    answer = cli("bookie", "downgrade", "--conf", bookie.conf)
    assert (answer.code, "DbLedgerStorage" in answer.problem) == (2, True)
    shutil.rmtree(bookie.ledger_dir)
    assert "disks" in cli("bookie", "downgrade", "--conf", bookie.conf).problem


@pytest.fixture
def cluster_uri(tmp_path: Path) -> str:
    """The metadata URI of a new cluster in SQLite."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True):
        return uri
