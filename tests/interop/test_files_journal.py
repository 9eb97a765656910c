"""Journals, last marks and small files of Apache's bookies: running, at one moment, stopped, and of every version."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import apache_shell, golden
from support.command_line import CommandLine
from support.golden import GoldenJournals
from support.servers import (
    BOOKIE_NUMBERS,
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    ApacheCluster,
    Java,
    ZooKeeperServer,
    format_cluster,
    wait_for,
    write_conf,
    write_ledgers,
)

from bkctl.files.directories import BookieDirectories, BookieFile, FileKind
from bkctl.files.status import read_detail

Rows = list[dict[str, Any]]


def cli(*arguments: object) -> Rows:
    return CommandLine(None)(*arguments, "-o", "ndjson").rows


def told(rows: Rows) -> Rows:
    """Of each record what Apache's shell tells too."""
    found = []
    for row in rows:
        kept = {name: row[name] for name in ("type", "ledgerId", "entryId", "offset", "recordSize")}
        if row["type"] == "entry":
            kept["lastAddConfirmed"] = row["lastAddConfirmed"]
        elif row["type"] == "ledgerKey":
            kept["masterKey"] = base64.b64decode(row["masterKey"]).hex()
        found.append(kept)
    return found


def journals_in(directory: Path) -> list[Path]:
    return sorted((directory / "current").glob("*.txn"), key=lambda path: int(path.stem, 16))


@contextmanager
def paused(bookie: ApacheBookie) -> Iterator[None]:
    """A bookie that stands still between two of its instructions."""
    os.killpg(bookie.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(bookie.pid, signal.SIGCONT)


def compare_with_shell(java: Java, conf: Path, journal_dir: Path) -> int:
    """Journals and last marks of the bookie that `conf` describes, row for row; how many records there are."""
    marks = [(row["journalId"], row["offset"]) for row in cli("journal", "lastmark", "--conf", conf)]
    assert marks == apache_shell.last_marks(java.shell(conf, "lastmark").stdout)
    count = 0
    for path in journals_in(journal_dir)[-2:]:
        text = java.shell(conf, "readjournal", path).stdout
        rows = apache_shell.records(text)
        assert told(cli("journal", "read", path, "--show-secrets")) == rows
        assert apache_shell.journal_version(text) in (None, cli("journal", "verify", path)[0]["version"])
        count += len(rows)
    return count


@pytest.mark.java
@pytest.mark.parametrize("number", BOOKIE_NUMBERS)
def test_a_running_bookie_what_it_was_at_one_moment_and_when_it_stopped(
    number: int, apache_cluster: ApacheCluster, apache_ledgers: Rows, java: Java, tmp_path: Path
) -> None:
    bookie = apache_cluster.bookies[number]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(
            write_ledgers, java, apache_cluster.metadata_uri, "v3", salt=500 + number, small=True
        )  # fmt: skip
        counts = []
        while len(counts) < 2 or (not writing.done() and len(counts) < 5):
            # A running bookie is read without an error, whatever it does meanwhile.
            verified = cli("journal", "verify", "--conf", bookie.conf)
            assert {row["state"] for row in verified} <= {"endOfFile", "zeros", "torn"}
            assert not [row for row in verified if row["problem"]]
            counts.append(len(cli("journal", "read", "--conf", bookie.conf)))
            assert cli("journal", "stats", "--conf", bookie.conf)
            assert cli("journal", "lastmark", "--conf", bookie.conf)
            assert cli("bookie", "files", "--conf", bookie.conf)
        assert counts[-1] > 0
        writing.result()
        with paused(bookie):
            shutil.copytree(bookie.journal_dir, tmp_path / "journal")
            shutil.copytree(bookie.ledger_dir, tmp_path / "ledgers")
            live = told(cli("journal", "read", "--conf", bookie.conf, "--show-secrets"))
    settings = bookie.settings | {"journalDirectory": tmp_path / "journal", "ledgerDirectories": tmp_path / "ledgers"}
    conf = write_conf(tmp_path / "bk_server.conf", settings)
    assert told(cli("journal", "read", "--conf", conf, "--show-secrets")) == live
    assert compare_with_shell(java, conf, tmp_path / "journal") > 0

    bookie.stop()
    try:
        assert compare_with_shell(java, bookie.conf, bookie.journal_dir) > 0
        assert not [row for row in cli("journal", "verify", "--conf", bookie.conf) if row["problem"]]
    finally:
        apache_cluster.ensure_up()


@pytest.mark.parametrize("journals", golden.journals(), ids=str)
def test_journals_of_every_version_by_the_commands(journals: GoldenJournals) -> None:
    reused = journals.name == "reused"
    for path, (version, expected) in journals.journals.items():
        answer = CommandLine(None)("journal", "read", path, "--show-secrets", "-o", "ndjson")
        assert answer.code == (7 if reused else 0)
        assert told([json.loads(line) for line in answer.out.splitlines()]) == expected
        stats = CommandLine(None)("journal", "stats", path, "-o", "ndjson")
        (row,) = map(json.loads, stats.out.splitlines())
        assert (row["version"], row["recordCount"]) == (version, len(expected))
        assert row["ledgerCount"] == len({each["ledgerId"] for each in expected})
    directories = [option for each in journals.ledger_dirs for option in ("--dir", each)]
    if any(journal_id for journal_id, _ in journals.last_marks):
        rows = cli("journal", "lastmark", *directories)
        assert [(row["journalId"], row["offset"]) for row in rows] == journals.last_marks


# --- every file that a bookie leaves ---------------------------------------------------------------------------------

COLLECTING: dict[str, object] = {
    "logSizeLimit": 40_000,
    "flushInterval": 300,
    "gcWaitTime": 1000,
    "minorCompactionInterval": 1,
    "majorCompactionInterval": 2,
    "minorCompactionThreshold": 0.5,
    "majorCompactionThreshold": 0.8,
    "persistBookieStatusEnabled": "true",
    "gcEntryLogMetadataCacheEnabled": "true",
}


def several(directory: Path, **kinds: int) -> dict[str, object]:
    """Settings with so many directories of each kind."""
    return {
        f"{kind}Directories": ",".join(str(directory / f"{kind}-{number}") for number in range(count))
        for kind, count in kinds.items()
    }


@pytest.mark.java
def test_no_file_that_a_bookie_ever_has_is_unknown(zookeeper: ZooKeeperServer, java: Java, tmp_path: Path) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    kinds: list[tuple[str, dict[str, object]]] = [
        (SORTED, {"entryLogPerLedgerEnabled": "true", **several(tmp_path / "0", journal=2, ledger=2, index=2)}),
        (INTERLEAVED, {"useTransactionalCompaction": "true", "journalFormatVersionToWrite": 4,
                       "fileInfoFormatVersionToWrite": 0, **several(tmp_path / "1", ledger=2)}),
        (DB, {"useTransactionalCompaction": "true", **several(tmp_path / "2", ledger=2, index=2)}),
    ]  # fmt: skip
    bookies = [
        ApacheBookie(java, uri, tmp_path / str(number), storage, settings=COLLECTING | settings)
        for number, (storage, settings) in enumerate(kinds)
    ]
    seen: dict[Path, BookieFile] = {}
    stopped = threading.Event()
    problems: list[BaseException] = []

    def look() -> None:
        for bookie in bookies:
            directories = {
                Path(each)
                for name, value in bookie.settings.items()
                if name.endswith(("Directory", "Directories"))
                for each in str(value).split(",")
            }
            for file in BookieDirectories.at(*filter(Path.is_dir, directories)).files():
                seen[file.path] = file

    def watch() -> None:
        try:
            while not stopped.wait(0.02):
                look()
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    try:
        for bookie in bookies:
            bookie.launch()
        for bookie in bookies:
            bookie.wait_ready()
        watcher = threading.Thread(target=watch)
        watcher.start()
        written = write_ledgers(java, uri, "v2", small=True)
        command = CommandLine(uri)
        doomed = [ledger["ledgerId"] for ledger in written if not ledger["deleted"]][1:]
        assert command("ledger", "delete", *doomed, "--yes").code == 0
        logs = {path for path, file in list(seen.items()) if file.kind is FileKind.ENTRY_LOG}
        wait_for(lambda: not all(path.exists() for path in logs), "an entry log collected")
        for bookie in bookies:
            bookie.stop()
        stopped.set()
        watcher.join()
    finally:
        stopped.set()
        for bookie in bookies:
            bookie.kill()
    assert problems == []
    look()
    unknown = [path for path, file in seen.items() if file.kind is FileKind.UNKNOWN]
    assert unknown == []
    assert {file.kind for file in seen.values()} >= {
        FileKind.JOURNAL, FileKind.ENTRY_LOG, FileKind.INDEX, FileKind.ROCKSDB, FileKind.COOKIE, FileKind.LAST_MARK,
        FileKind.LAST_ID, FileKind.DIRTY,
    }  # fmt: skip
    marks = {file.path.name for file in seen.values() if file.kind is FileKind.LAST_MARK}
    assert marks >= {"lastMark", "lastMark.0", "lastMark.1"}
    left = [file for file in seen.values() if file.path.exists()]
    cookies = {str((read_detail(file) or {})["bookieId"]) for file in left if file.kind is FileKind.COOKIE}
    assert cookies == {bookie.bookie_id for bookie in bookies}
    for file in left:
        detail = read_detail(file)
        assert detail or file.kind in (FileKind.INDEX, FileKind.ROCKSDB), file
