"""Writes of a journal: the order of syncs, the contents of the page cache, the reports in between."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.journals import flush_journals
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.disk import Files, StorageFile
from bkctl.errors import BookieIOError
from bkctl.files.journal import read_last_mark
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.journal import file_name, write_header
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.journal_writer import JournalWriter, journal_ids

LEDGER = LedgerId(0, 5)


class Recorded(Files):
    """Files that note what is done to them."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        file = super().open(path, create=create)
        return _RecordedFile(self, path, os.dup(file.fd))


class _RecordedFile(StorageFile):
    __slots__ = ("files",)

    def __init__(self, files: Recorded, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.files = files

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        self.files.steps.append("write")
        return super().write(offset, buffers)

    def sync(self) -> None:
        self.files.steps.append("sync")
        super().sync()

    def forget_cache(self, end: int) -> None:
        self.files.steps.append("forget")
        super().forget_cache(end)


def writer(directory: Path, files: Files, clock: list[int], *, scoped: bool = False, **settings: Any) -> JournalWriter:
    options: dict[str, Any] = {"journal_max_size_mb": 1, "journal_pre_alloc_size_mb": 0}
    config = BookieConfig(**(options | settings))
    journal = JournalWriter(
        directory, files, config, clock_ms=lambda: 1000, now_s=lambda: clock[0] / 1000, scoped=scoped
    )
    journal.open()
    return journal


def test_group_is_written_reported_then_synced(tmp_path: Path) -> None:
    files = Recorded()
    journal = writer(tmp_path, files, [0])
    files.steps.clear()
    journal.commit([b"x" * 100], 100, written=lambda: files.steps.append("told"))
    assert files.steps == ["write", "told", "sync"]
    files.steps.clear()
    journal.commit([], 0, written=lambda: files.steps.append("told"))
    assert files.steps == ["told"]


def test_unsynced_journal_is_synced_at_intervals_and_when_it_rolls(tmp_path: Path) -> None:
    files, clock = Recorded(), [5000]
    settings = {"journal_sync_data": False, "journal_page_cache_flush_interval_msec": 1000}
    journal = writer(tmp_path, files, clock, **settings)

    def commit() -> list[str]:
        files.steps.clear()
        journal.commit([b"x" * 100], 100)
        return list(files.steps)

    assert commit() == ["write", "sync"]
    clock[0] += 999
    assert commit() == ["write"]
    clock[0] += 1
    assert commit() == ["write", "sync"]
    first = journal.mark.journal_id
    while journal.mark.journal_id == first:
        steps = commit()
    assert steps.count("sync") == 2, "the new file's header, and the old file to its end"


def test_journal_leaves_the_page_cache_unless_configured_otherwise(tmp_path: Path) -> None:
    for forgets in (True, False):
        files = Recorded()
        directory = tmp_path / str(forgets)
        directory.mkdir()
        journal = writer(directory, files, [0], journal_pre_alloc_size_mb=1, journal_remove_from_page_cache=forgets)
        for _ in range(20):
            journal.commit([b"x" * 1000], 1000)
        assert ("forget" in files.steps) is forgets


def test_start_accepts_a_journal_without_its_unsynced_groups(tmp_path: Path) -> None:
    """The mark stays behind the last synced group: what a power failure takes after it is in ledger storage."""
    config = BookieConfig(
        journal_directories=(str(tmp_path / "journal"),),
        ledger_directories=(str(tmp_path / "ledgers"),),
        journal_sync_data=False,
        journal_pre_alloc_size_mb=1,
    )
    by = DigestManager(LEDGER, DigestType.CRC32C, b"")

    def body(entry_id: int) -> bytes:
        return by.seal(entry_id, entry_id - 1, entry_id + 1, b"x") + b"x"

    storage = BookieStorage(config)
    storage.open()
    for entry_id in range(10):
        storage.add(LEDGER, entry_id, by.master_key, body(entry_id), None)
        flush_journals(storage)
    storage.run_checkpoint()
    (path,) = (tmp_path / "journal" / "current").glob("*.txn")
    mark = read_last_mark([tmp_path / "ledgers"])
    assert mark.offset < path.stat().st_size
    os.truncate(path, mark.offset)
    storage = BookieStorage(config)
    storage.open()
    assert [bytes(storage.read_entry(LEDGER, entry_id)) for entry_id in range(10)] == list(map(body, range(10)))


@pytest.mark.parametrize("backups", [0, 1, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 5, 8])
def test_keeps_the_newest_old_journals(tmp_path: Path, backups: int, count: int) -> None:
    (tmp_path / "scoped").mkdir()
    for directory in (tmp_path, tmp_path / "scoped"):
        for journal_id in range(1, count + 1):
            (directory / file_name(journal_id)).write_bytes(write_header(6))
    journal = writer(tmp_path, Files(), [0x100], journal_max_backups=backups)
    journal.forget_before(journal.mark)
    kept = list(range(1, count + 1))[max(0, count - backups) :]
    assert journal_ids(tmp_path) == [*kept, journal.mark.journal_id]
    assert journal_ids(tmp_path / "scoped") == kept


def test_groups_without_scoped_records_are_padded_as_apache_pads_them(tmp_path: Path) -> None:
    journal = writer(tmp_path, Files(), [0])
    expected = b"BKLG" + struct.pack(">i", 6) + bytes(504)
    for size in (100, 512, 1024, 508, 504):
        journal.commit([b"x" * size], size)
        expected += b"x" * size
        gap = -len(expected) % 512
        gap += 512 if 0 < gap < 8 else 0
        expected += struct.pack(">ii", -0x100, gap - 8) + bytes(gap - 8) if gap else b""
        data = (tmp_path / file_name(journal.mark.journal_id)).read_bytes()
        assert data[: journal.mark.offset] == expected
        assert not any(data[journal.mark.offset :])


def test_every_group_of_version_7_ends_with_padding_that_seals_it(tmp_path: Path) -> None:
    journal = writer(tmp_path, Files(), [0], scoped=True)
    for size in (100, 512, 1024, 508, 504):
        start = journal.mark.offset
        journal.commit([b"x" * size], size)
        end = journal.mark.offset
        assert end % 512 == 0
        data = (tmp_path / file_name(journal.mark.journal_id)).read_bytes()
        padding, seal = data[start + size : end - 24], data[end - 24 : end]
        assert padding == (struct.pack(">ii", -0x100, len(padding) - 8) + bytes(len(padding) - 8) if padding else b"")
        tag = data[8:16]
        assert any(tag)
        assert not any(data[16:512])
        assert seal == struct.pack(">ii8sq", -0x100, 16, tag, start)


@pytest.mark.parametrize(
    ("code", "fails"),
    [(code, True) for code in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EIO)]
    + [(code, False) for code in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE)],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("scoped", [False, True])
def test_roll_without_a_new_file_fails_the_journal_unless_space_is_missing(
    tmp_path: Path, code: int, fails: bool, scoped: bool
) -> None:
    class NoNewFiles(Files):
        is_refusing = False

        def open(self, path: Path, *, create: bool = False) -> StorageFile:
            if self.is_refusing:
                raise OSError(code, os.strerror(code), str(path))
            return super().open(path, create=create)

    files = NoNewFiles()
    journal = writer(tmp_path, files, [0])
    journal.commit([b"x" * (1 << 20)], 1 << 20, scoped=scoped)
    files.is_refusing = True
    with pytest.raises(OSError, match=r"\[Errno") as refused:
        journal.commit([b"y"], 1)
    assert refused.value.errno == code
    assert journal.failed is (refused.value if fails else None)
    files.is_refusing = False
    if fails:
        with pytest.raises(BookieIOError, match="failed before"):
            journal.commit([b"z"], 1)
    else:
        journal.commit([b"z"], 1)


def test_old_file_that_cannot_be_synced_at_a_roll_fails_the_journal(tmp_path: Path) -> None:
    files = SimulatedFiles(tmp_path)
    journal = writer(tmp_path, files, [0], journal_sync_data=False)
    for _ in range(2):
        journal.commit([b"x" * (1 << 20)], 1 << 20)
    files.faults.append(Fault("sync", ".txn", errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        journal.commit([b"y"], 1)
    assert journal.failed is not None


def test_clock_that_is_set_back_does_not_put_off_a_sync(tmp_path: Path) -> None:
    files, wall_ms, now_s = Recorded(), [1_000_000], [50.0]
    config = BookieConfig(journal_sync_data=False, journal_page_cache_flush_interval_msec=1000)
    journal = JournalWriter(tmp_path, files, config, clock_ms=lambda: wall_ms[0], now_s=lambda: now_s[0])
    journal.open()
    journal.commit([b"x"], 1)
    wall_ms[0] -= 900_000
    now_s[0] += 1
    files.steps.clear()
    journal.commit([b"x"], 1)
    assert files.steps == ["write", "sync"]
