"""`journal read`, `entrylog read`, `entrylog show` and `bookie index show` give the rows of Apache's shell."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import apache_shell, golden
from support.golden import GoldenBookie
from support.servers import BOOKIE_NUMBERS, DB, ApacheBookie, ApacheCluster, Java, offline_conf

Rows = list[dict[str, Any]]


def bkctl(*arguments: object) -> Rows:
    """The rows that a command prints as ndjson."""
    command = [sys.executable, "-m", "bkctl", *map(str, arguments), "-o", "ndjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def record_rows(rows: Rows) -> Rows:
    """Of each row what Apache's shell tells too; the rest must agree with itself."""
    found = []
    for row in rows:
        assert row["ledgerScopeId"] == "0"
        assert row["ledgerQualifiedName"] == f"{int(row['ledgerId']):032x}"
        assert row["formatVersion"] == 1
        kept = {name: row[name] for name in ("type", "ledgerId", "entryId", "offset", "recordSize")}
        if row["type"] == "entry":
            kept["lastAddConfirmed"] = row["lastAddConfirmed"]
        elif row["type"] == "ledgerKey":
            kept["masterKey"] = base64.b64decode(row["masterKey"]).hex()
        found.append(kept)
    return found


def locations(directory: Path, *ledger_ids: str) -> dict[str, dict[int, tuple[int, int]]]:
    """Ledger id → entry id → (log id, position as `apache_shell.locations` gives it)."""
    found: dict[str, dict[int, tuple[int, int]]] = {ledger_id: {} for ledger_id in ledger_ids}
    for row in bkctl("bookie", "index", "show", *ledger_ids, "--dir", directory):
        found[row["ledgerId"]][row["entryId"]] = (row["logId"], row["offset"] + 4)
    return found


# --- golden files: no server, no Java --------------------------------------------------------------------------------


@pytest.fixture(params=golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def bookie(request: pytest.FixtureRequest) -> GoldenBookie:
    assert isinstance(request.param, GoldenBookie)
    return request.param


def test_journal_read_on_golden_files(bookie: GoldenBookie) -> None:
    rows = bkctl("journal", "read", *bookie.journals, "--show-secrets")
    for path, (_, expected) in bookie.journals.items():
        assert record_rows([row for row in rows if row["file"] == str(path)]) == expected


def test_entrylog_read_and_show_on_golden_files(bookie: GoldenBookie) -> None:
    rows = bkctl("entrylog", "read", *bookie.entry_logs)
    sizes = bkctl("entrylog", "show", *bookie.entry_logs)
    for path, (expected, expected_sizes) in bookie.entry_logs.items():
        assert record_rows([row for row in rows if row["file"] == str(path)]) == expected
        assert {row["ledgerId"]: row["size"] for row in sizes if row["file"] == str(path)} == expected_sizes


def test_index_show_on_golden_files(bookie: GoldenBookie, tmp_path: Path) -> None:
    directory = tmp_path / "ledgers"
    shutil.copytree(bookie.ledger_dir, directory)
    expected = {ledger_id: answer["locations"] for ledger_id, answer in bookie.indexes.items()}
    assert len(expected) > 20
    assert locations(directory, *expected) == expected


def test_journal_lastmark_on_golden_files(bookie: GoldenBookie) -> None:
    (row,) = bkctl("journal", "lastmark", "--dir", bookie.ledger_dir)
    assert (row["journalId"], row["offset"]) == bookie.last_mark


# --- the bookies of the running test cluster, stopped for a moment ---------------------------------------------------


@pytest.fixture(params=BOOKIE_NUMBERS)
def stopped(
    request: pytest.FixtureRequest, apache_cluster: ApacheCluster, apache_ledgers: list[dict[str, Any]]
) -> Iterator[ApacheBookie]:
    """One bookie that has the known ledgers, down."""
    one = apache_cluster.bookies[request.param]
    one.stop()
    yield one
    apache_cluster.ensure_up()


@pytest.mark.releases
def test_commands_on_the_files_of_a_stopped_bookie(
    stopped: ApacheBookie, apache_ledgers: list[dict[str, Any]], java: Java, tmp_path: Path
) -> None:
    # Apache's shell may write (RocksDB), so it gets a copy, and we the originals.
    shutil.copytree(stopped.journal_dir, tmp_path / "journal")
    shutil.copytree(stopped.ledger_dir, tmp_path / "ledgers")
    conf = offline_conf(tmp_path / "bk_server.conf", tmp_path / "journal", tmp_path / "ledgers", stopped.storage)

    (mark,) = bkctl("journal", "lastmark", "--dir", stopped.ledger_dir)
    assert (mark["journalId"], mark["offset"]) == apache_shell.last_mark(java.shell(conf, "lastmark").stdout)

    journal = max((stopped.journal_dir / "current").glob("*.txn"), key=lambda path: path.stat().st_mtime)
    rows = apache_shell.records(java.shell(conf, "readjournal", tmp_path / "journal" / "current" / journal.name).stdout)
    assert record_rows(bkctl("journal", "read", journal, "--show-secrets")) == rows

    log = max((stopped.ledger_dir / "current").glob("*.log"), key=lambda path: path.stat().st_size)
    rows = apache_shell.records(java.shell(conf, "readlog", int(log.stem, 16)).stdout)
    assert len(rows) > 100
    assert record_rows(bkctl("entrylog", "read", log)) == rows
    sizes = {row["ledgerId"]: row["size"] for row in bkctl("entrylog", "show", log)}
    assert sizes == apache_shell.log_metadata(java.shell(conf, "readlogmetadata", log.name).stdout)

    names = {"closed-MAC", "many-entries", "id-near-2^63"}
    flag = [] if stopped.storage == DB else ["-m"]
    expected = {
        ledger["ledgerId"]: apache_shell.locations(java.shell(conf, "ledger", *flag, ledger["ledgerId"]).stdout)
        for ledger in apache_ledgers
        if ledger["name"] in names and ledger["protocol"] == "v3"
    }
    assert len(expected) == len(names)
    assert sum(map(len, expected.values())) > 1000
    assert locations(stopped.ledger_dir, *expected) == expected
