"""SortedLedgerStorage: what is in the memtable, what order it has in the logs, and what happens at its limits."""

from __future__ import annotations

import errno
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.journals import flush_journals
from support.servers import INTERLEAVED, SORTED
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BookieIOError, EntryNotFound, LedgerNotFound, Unsupported
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.availability import Availability
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.index import HEADER_SIZE
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.entry_reader import ENTRY_OVERHEAD_BYTES, EntryMemTable
from bkctl.storage.ledger.index_persistence import IndexedHandle
from bkctl.storage.ledger.sorted_ledger_storage import SortedLedgerStorage

PLAIN, SCOPED = LedgerId(0, 0x1234), LedgerId(7, 0x1234)
OTHER = LedgerId(0, 9)
KEY = DigestManager(PLAIN, DigestType.CRC32C, b"secret").master_key


def open_storage(root: Path, files: Files | None = None, **changes: Any) -> BookieStorage:
    config = BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "a"), str(root / "b")),
        journal_pre_alloc_size_mb=0,
        page_size=64,
        ledger_storage_class=SORTED,
    ).with_changes(**changes)
    storage = BookieStorage(config, files=files)
    storage.open()
    return storage


def body_of(ledger: LedgerId, entry_id: int, size: int = 100) -> bytes:
    digests = DigestManager(ledger, DigestType.CRC32C, b"secret")
    return digests.seal(entry_id, entry_id - 1, size * (entry_id + 1), bytes(size)) + bytes(size)


def add(storage: BookieStorage, ledger: LedgerId, *entry_ids: int, size: int = 100) -> None:
    for entry_id in entry_ids:
        storage.add(ledger, entry_id, KEY, body_of(ledger, entry_id, size), None)


def logged(root: Path) -> list[tuple[str, LedgerId, int]]:
    """(directory, ledger, entry id) of every entry in the logs, in their order."""
    found = []
    for path in sorted(root.rglob("*.log"), key=lambda path: (path.parent.name, int(path.stem, 16))):
        with EntryLogReader.open(path) as reader:
            found += [
                (path.parent.name, record.ledger, record.entry_id)
                for record in reader.records()
                if record.type is RecordType.ENTRY
            ]
    return found


def stored(storage: BookieStorage, ledger: LedgerId) -> list[int]:
    handle = storage.get(ledger)
    assert handle is not None
    found = list(Availability.parse(storage.availability(handle)()))
    for entry_id in found:
        assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
    return found


def test_memtable_keeps_the_newest_copy(tmp_path: Path) -> None:
    table = EntryMemTable()
    one, other = (IndexedHandle(ledger, KEY, tmp_path) for ledger in (SCOPED, PLAIN))
    for handle, entry_id in ((one, 3), (other, 9), (one, 1), (other, 1)):
        table.add(handle, [entry_id], [b"old"], 3)
    assert table.size == 4 * (3 + ENTRY_OVERHEAD_BYTES)
    assert table.snapshot()
    assert not table.snapshot()
    table.add(one, [3], [b"newer"], 5)
    assert table.snapshots[0].ledgers == {one: {1: b"old", 3: b"old"}, other: {1: b"old", 9: b"old"}}
    assert (table.find(one, 3), table.find(one, 1), table.find(other, 3)) == (b"newer", b"old", None)
    assert table.entry_ids(one) == {1, 3}
    table.drop(table.snapshots[0])
    assert (table.find(one, 3), table.find(one, 1)) == (b"newer", None)
    assert table.holds(one)
    assert not table.holds(other)
    assert table.size == 5 + ENTRY_OVERHEAD_BYTES


def test_no_snapshot_is_lost_while_another_thread_drops_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A lost one would never be written, and the next mark would pass its acknowledged entries."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    table = EntryMemTable()
    handle = IndexedHandle(PLAIN, KEY, tmp_path)
    count = 2000
    seen: set[int] = set()
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set() or table.snapshots:
            for snapshot in table.snapshots:
                seen.update(snapshot.ledgers[handle])
                table.drop(snapshot)

    with ThreadPoolExecutor(1) as pool:
        dropping = pool.submit(drop)
        for entry_id in range(count):
            table.add(handle, [entry_id], [b"entry"], 5)
            table.snapshot()
        is_over.set()
        dropping.result()
    assert len(seen) == count


def test_writes_sorted_entries_to_plain_and_scoped_logs(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    other = LedgerId(0, 5)
    for entry_id in (3, 0, 20, 1):
        for ledger in (PLAIN, SCOPED, other):
            add(storage, ledger, entry_id)
    assert not storage.seal_entries(), "nothing is written before the limit"
    assert not list(tmp_path.rglob("*.log"))
    for ledger in (PLAIN, SCOPED, other):
        assert stored(storage, ledger) == [0, 1, 3, 20]
    storage.run_checkpoint()
    in_order = [("current", ledger, entry_id) for ledger in (other, PLAIN) for entry_id in (0, 1, 3, 20)]
    in_order += [("scoped", SCOPED, entry_id) for entry_id in (0, 1, 3, 20)]
    assert logged(tmp_path) == in_order
    assert storage.ledgers.unwritten_bytes == 0
    add(storage, PLAIN, 2)
    assert stored(storage, PLAIN) == [0, 1, 2, 3, 20], "from memory and the index"


def test_full_memtable_is_written_before_a_checkpoint(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, skip_list_size_limit=20_000)
    entry_id = 0
    while not storage.seal_entries():
        add(storage, PLAIN, entry_id)
        entry_id += 1
        assert storage.ledgers.unwritten_bytes < 21_000
    add(storage, PLAIN, entry_id)
    storage.write_entries()
    assert logged(tmp_path) == [("current", PLAIN, each) for each in range(entry_id)]
    assert stored(storage, PLAIN) == list(range(entry_id + 1))
    assert not list(tmp_path.rglob("*.idx")), "no index file points to what is not synced"
    storage.run_checkpoint()
    again = open_storage(tmp_path)
    assert stored(again, PLAIN) == list(range(entry_id + 1))


def test_writing_entries_writes_full_index_pages(tmp_path: Path) -> None:
    """The page limit is a hard one: what waits is flushed, behind the logs, when the next page would be too many."""
    storage = open_storage(tmp_path, page_limit=8)
    ledgers = [LedgerId(each % 2, each) for each in range(40)]
    for ledger in ledgers:
        add(storage, ledger, 0, 100)
    assert isinstance(storage.ledgers, SortedLedgerStorage)
    storage.seal_entries(1)
    storage.write_entries()
    assert len(storage.ledgers.pages) <= 8
    assert len(list(tmp_path.rglob("*.idx"))) > 30
    for ledger in ledgers:
        assert stored(storage, ledger) == [0, 100]
    assert len(storage.ledgers.pages) <= 8
    storage.run_checkpoint()
    again = open_storage(tmp_path)
    assert again.replayed == (0, 0)
    for ledger in ledgers:
        assert stored(again, ledger) == [0, 100]


def with_an_unreadable_page(root: Path, **changes: Any) -> tuple[BookieStorage, SimulatedFiles]:
    """A storage whose index of PLAIN has a page that is not in memory, and that the disk does not read."""
    first = open_storage(root)
    add(first, PLAIN, 0, 1, 2)
    flush_journals(first)
    first.close()
    files = SimulatedFiles(root)
    storage = open_storage(root, files, **changes)
    assert storage.get(PLAIN) is not None
    files.bad_bytes["1234.idx"] = HEADER_SIZE
    return storage, files


def test_unreadable_index_page_keeps_only_its_ledger_in_memory_and_journal(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    storage, files = with_an_unreadable_page(tmp_path / "work")
    newer = DigestManager(PLAIN, DigestType.CRC32C, b"secret").seal(3, 0, 400, b"newer") + b"newer"
    add(storage, PLAIN, 3, 4, 9)
    assert storage.seal_entries(1)
    storage.add(PLAIN, 3, KEY, newer, None, True)
    add(storage, OTHER, 0, 1)
    flush_journals(storage)
    marks = [path.read_bytes() for path in sorted((tmp_path / "work").rglob("lastMark"))]
    for entry_id in (2, 3):
        storage.seal_entries(1)
        storage.write_entries()
        storage.run_checkpoint()
        assert storage.ledgers.unwritten == {PLAIN}
        with pytest.raises(BookieIOError, match="the disk fails at byte 1024"):
            add(storage, PLAIN, 5)
        add(storage, OTHER, entry_id)
        flush_journals(storage)
        assert bytes(storage.read_entry(PLAIN, 3)) == newer
        assert bytes(storage.read_entry(PLAIN, 9)) == body_of(PLAIN, 9)
        assert stored(storage, OTHER) == [*range(entry_id + 1)]
        assert [path.read_bytes() for path in sorted((tmp_path / "work").rglob("lastMark"))] == marks
        again = open_storage(files.crash(tmp_path / "image"))
        assert bytes(again.read_entry(PLAIN, 3)) == newer
        for other_id in (0, 1, 2, 4, 9):
            assert bytes(again.read_entry(PLAIN, other_id)) == body_of(PLAIN, other_id)
        assert stored(again, OTHER) == [*range(entry_id + 1)]
    assert logged(tmp_path / "work").count(("current", PLAIN, 3)) == 0, "each try would leave garbage"
    files.bad_bytes.clear()
    storage.run_checkpoint()
    assert not storage.ledgers.table.snapshots
    add(storage, PLAIN, 5)
    flush_journals(storage)
    storage.run_checkpoint()
    last = open_storage(files.crash(tmp_path / "image"))
    assert last.replayed == (0, 0)
    assert bytes(last.read_entry(PLAIN, 3)) == newer, "the order of its copies is kept"
    assert bytes(last.read_entry(PLAIN, 5)) == body_of(PLAIN, 5)


def test_deleted_ledger_leaves_memory_though_its_index_page_is_unreadable(tmp_path: Path) -> None:
    storage, _ = with_an_unreadable_page(tmp_path)
    add(storage, PLAIN, 3)
    flush_journals(storage)
    storage.run_checkpoint()
    assert storage.ledgers.unwritten == {PLAIN}
    storage.delete_ledger(PLAIN)
    storage.run_checkpoint()
    assert not storage.ledgers.unwritten
    assert storage.ledgers.unwritten_bytes == 0


def test_entries_that_wait_for_unreadable_index_pages_have_a_bound(tmp_path: Path) -> None:
    storage, _ = with_an_unreadable_page(tmp_path, skip_list_size_limit=1000)
    add(storage, PLAIN, *range(3, 8), size=300)
    with pytest.raises(BookieIOError, match="index of entries of"):
        storage.run_checkpoint()


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED])
def test_open_log_leaves_a_full_disk(tmp_path: Path, storage_class: str) -> None:
    """ENOSPC in the log that is written, although the disk said nothing of it before: nothing is refused or lost."""
    files = SimulatedFiles(tmp_path)
    storage = open_storage(tmp_path, files, ledger_storage_class=storage_class)
    storage.ledgers.set_writable([0], [0, 1])
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0)
    storage.run_checkpoint()
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 1, 2)
    storage.ledgers.set_writable([0, 1], [0, 1])
    files.faults.append(Fault("write", "/a/current/", errno.ENOSPC, times=10_000))
    storage.seal_entries(1)
    storage.write_entries()
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 3)
        assert stored(storage, ledger) == [0, 1, 2, 3]
    files.faults.clear()
    storage.run_checkpoint()
    image = files.crash(tmp_path / "image")
    again = open_storage(image, ledger_storage_class=storage_class)
    for ledger in (PLAIN, SCOPED):
        assert stored(again, ledger) == [0, 1, 2, 3]
    assert {path.relative_to(image).parts[0] for path in image.rglob("*.log")} == {"a", "b"}


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED])
def test_first_scoped_entry_leaves_a_disk_too_full_for_its_directory(tmp_path: Path, storage_class: str) -> None:
    files = SimulatedFiles(tmp_path)
    storage = open_storage(tmp_path, files, ledger_storage_class=storage_class)
    storage.ledgers.set_writable([0], [0, 1])
    add(storage, SCOPED, 0)
    storage.seal_entries(1)
    files.faults.append(Fault("directory", "/a/current/scoped", errno.ENOSPC, times=100))
    with pytest.raises(OSError, match="No space"):
        storage.write_entries()
    storage.ledgers.set_writable([0, 1], [0, 1])
    storage.write_entries()
    assert stored(storage, SCOPED) == [0]
    storage.run_checkpoint()
    again = open_storage(files.crash(tmp_path / "image"), ledger_storage_class=storage_class)
    assert stored(again, SCOPED) == [0]


def test_entries_stay_in_memory_when_all_disks_are_full(tmp_path: Path) -> None:
    files = SimulatedFiles(tmp_path)
    storage = open_storage(tmp_path, files)
    add(storage, PLAIN, 0, 1)
    storage.seal_entries(1)
    files.faults.append(Fault("write", ".log", errno.ENOSPC, times=10_000))
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            storage.write_entries()
    assert stored(storage, PLAIN) == [0, 1]
    files.faults.clear()
    storage.run_checkpoint()
    assert [entry_id for _, _, entry_id in logged(tmp_path)] == [0, 1]
    assert stored(open_storage(files.crash(tmp_path / "image")), PLAIN) == [0, 1]


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED])
def test_moves_during_a_flush_are_kept(tmp_path: Path, storage_class: str) -> None:
    storage = open_storage(tmp_path, ledger_storage_class=storage_class)
    ledgers = storage.ledgers
    add(storage, PLAIN, 0, 1)
    storage.run_checkpoint()
    old = ledgers.pages.location(PLAIN, 0)
    logger = ledgers.entry_loggers[0]
    log = logger.open_compaction_log()
    new = log.add(PLAIN, body_of(PLAIN, 0))
    log.finish()
    add(storage, PLAIN, 2)
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    moves = [Move(ledger, entry_id, old, new) for ledger, entry_id in ((PLAIN, 0), (PLAIN, 1), (OTHER, 0))]
    ledgers.index_of(logger).move(moves)
    assert ledgers.index_of(logger).live([(PLAIN, 0, new)]) == [True]
    assert ledgers.index_of(logger).live([(PLAIN, 0, old), (PLAIN, 0, new), (PLAIN, 1, new)]) == [False, True, False]
    storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=True)
    storage.run_checkpoint()
    again = open_storage(tmp_path, ledger_storage_class=storage_class)
    (logger, _) = again.ledgers.entry_loggers
    assert again.ledgers.index_of(logger).live([(PLAIN, 0, new)]) == [True]
    logger.remove_log(old >> 32)
    assert bytes(again.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED])
def test_ledger_deleted_during_a_flush_is_recreated_empty(tmp_path: Path, storage_class: str) -> None:
    storage = open_storage(tmp_path, ledger_storage_class=storage_class)
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0, 1)
    for flushed_before in (False, True):
        if flushed_before:
            add(storage, PLAIN, 2)
        checkpoint = storage.checkpoints.begin()
        assert checkpoint is not None
        storage.delete_ledger(PLAIN)
        if flushed_before:
            add(storage, PLAIN, 5)
        storage.checkpoints.write(checkpoint)
        storage.checkpoints.end(checkpoint, written=True)
        if not flushed_before:
            assert list(storage.ledgers.ledger_ids()) == [SCOPED]
            with pytest.raises(LedgerNotFound):
                storage.read_entry(PLAIN, 0)
            assert not list(tmp_path.rglob("1234.idx"))
    assert stored(storage, PLAIN) == [5]
    storage.run_checkpoint()
    assert list(storage.ledgers.ledger_ids(0)) == [PLAIN]
    assert stored(storage, PLAIN) == [5]
    again = open_storage(tmp_path, ledger_storage_class=storage_class)
    assert stored(again, SCOPED) == [0, 1]
    assert stored(again, PLAIN) == [5]


def test_readers_find_every_entry_during_flushes_and_moves(tmp_path: Path) -> None:
    """Event loop, entry thread, flush thread and readers at once, each in its role."""
    storage = open_storage(tmp_path, skip_list_size_limit=10_000, page_limit=32, log_size_limit=8192)
    ledgers = [LedgerId(each % 2, each) for each in range(12)]
    count = [0]
    stop = threading.Event()

    def read() -> None:
        known = count[0]
        for ledger in ledgers if known else ():
            handle = storage.ledgers.handles[ledger]
            for entry_id in range(0, known, max(1, known // 7)):
                assert bytes(storage.read(handle, entry_id)) == body_of(ledger, entry_id), (ledger, entry_id)
            with pytest.raises(EntryNotFound):
                storage.read(handle, 1 << 30)

    def repeat(work: Callable[[], None]) -> None:
        while not stop.is_set():
            work()

    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(repeat, work) for work in (read, read, storage.write_entries)]
        try:
            for entry_id in range(40):
                for ledger in ledgers:
                    add(storage, ledger, entry_id)
                count[0] = entry_id + 1
                storage.seal_entries()
                if entry_id % 10 == 7:
                    checkpoint = storage.checkpoints.begin()
                    assert checkpoint is not None
                    flush = threads.submit(storage.checkpoints.write, checkpoint)
                    add(storage, ledgers[0], entry_id)
                    flush.result()
                    storage.checkpoints.end(checkpoint, written=True)
        finally:
            stop.set()
        for other in others:
            other.result()
    storage.run_checkpoint()
    for ledger in ledgers:
        assert stored(storage, ledger) == list(range(40))


def test_refuses_entry_log_per_ledger(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="entry log for each ledger"):
        open_storage(tmp_path, entry_log_per_ledger_enabled=True)
