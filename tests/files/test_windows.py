"""Files on a disk that fails: what stands before the lost bytes is read, and they are damage, not the end."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support import golden

from bkctl.checks.check import IndexCheck
from bkctl.checks.journal_check import check_journal
from bkctl.checks.log_check import check_entry_log
from bkctl.errors import Corrupt
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.windows import WINDOW_SIZE_BYTES, FileReader


def test_a_window_ends_before_lost_bytes(tmp_path: Path, lose) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 16384)
    with FileReader(path) as file:
        whole = file.window(0)
        lose(path, 100_000)
        part = file.window(0)
        assert whole.startswith(part)
        assert len(part) >= 512
        with pytest.raises(Corrupt, match="file: the disk fails at byte 0"):
            file.window(0, 100_001)
        with pytest.raises(Corrupt, match="the disk fails"):
            file.window(100_000)
        assert len(file.window(100_512)) == WINDOW_SIZE_BYTES


@pytest.mark.parametrize("reader", [EntryLogReader, JournalReader])
def test_records_before_lost_bytes_are_read(reader, lose) -> None:
    bookie = next(one for one in golden.bookies() if one.name == "sorted")
    kind, directory = ("*.log", bookie.ledger_dir) if reader is EntryLogReader else ("*.txn", bookie.journal_dir)
    path = max(directory.rglob(kind), key=lambda each: each.stat().st_size)
    with reader.open(path) as file:
        ends = [record.offset + 4 + record.record_size for record in file.records()]
    offset = ends[len(ends) // 2]
    lose(path, offset)
    read: list[int] = []
    with reader.open(path) as file:
        found = (record.offset + 4 + record.record_size for record in file.records())
        with pytest.raises(Corrupt, match="the disk fails"):
            read.extend(found)
    assert read == ends[: len(read)]
    assert len(read) >= sum(1 for end in ends if end <= offset - 512)


def test_a_check_continues_after_a_lost_index(tmp_path: Path, lose) -> None:
    bookie = next(one for one in golden.bookies() if one.name == "sorted")
    directories = BookieDirectories.at(bookie.ledger_dir)
    lose(bookie.ledger_dir / "current/0/3/3.idx", 1024)
    check = IndexCheck(directories)
    assert {finding.kind.value for finding in check.findings()} <= {"unindexed"}
    assert check.counts.error_count == 1
    assert check.counts.ledgers > 1


def test_a_check_reports_a_partly_lost_log_once(lose) -> None:
    bookie = next(one for one in golden.bookies() if one.name == "sorted")
    path = max(bookie.ledger_dir.rglob("*.log"), key=lambda each: each.stat().st_size)
    with EntryLogReader.open(path) as file:
        starts = [record.offset for record in file.records()]
    lose(path, starts[len(starts) // 3])
    check = IndexCheck(BookieDirectories.at(bookie.ledger_dir))
    (finding,) = (each for each in check.findings() if each.is_problem)
    assert finding.kind.value == "logDamaged"
    assert "the disk fails" in finding.reason
    assert "that the index has there are lost" in finding.reason


@pytest.mark.parametrize("reader", [EntryLogReader, JournalReader])
def test_records_behind_lost_bytes_are_counted(reader, lose) -> None:
    bookie = next(one for one in golden.bookies() if one.name == "sorted")
    kind, directory = ("*.log", bookie.ledger_dir) if reader is EntryLogReader else ("*.txn", bookie.journal_dir)
    path = max(directory.rglob(kind), key=lambda each: each.stat().st_size)
    with reader.open(path) as file:
        starts = [record.offset for record in file.records()]
    offset = starts[len(starts) // 3]
    lose(path, offset)
    if reader is EntryLogReader:
        check = check_entry_log(path)
        assert check is not None
        found, state = check.behind.entry_count, check.state.value
    else:
        journal = check_journal(path)
        assert journal is not None
        found, state = journal.behind.record_count, journal.state.value
    assert state == "damaged"
    # The jump ends at a sector's border.
    surely, possibly = (sum(start >= offset + lost for start in starts) for lost in (1024, 512))
    assert 10 < surely - 1 <= found <= possibly


def test_a_failed_disk_ends_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.truncate(path, 1 << 40)
    reads = []

    def failing(fd: int, size: int, at: int) -> bytes:
        reads.append(at)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", failing)
    with FileReader(path) as file:
        at, window = file.next_window(700)
    assert window == b""
    assert at > WINDOW_SIZE_BYTES
    assert len(reads) < 100
