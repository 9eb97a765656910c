"""DbLedgerStorage: what is in memory and what in the databases, around flushes, failures, deletions and restarts."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.golden import VERSIONS, GoldenBookie
from support.journals import flush_journals
from support.servers import DB
from support.simulated_disk import Fault, SimulatedFiles
from support.waiting import LIMIT_S

from bkctl.checks.check import IndexCheck
from bkctl.config import BookieConfig
from bkctl.disk import Files, StorageFile
from bkctl.errors import (
    BkctlError,
    Corrupt,
    DirectoryInUse,
    EntryNotFound,
    LedgerNotFound,
    UnknownLedgerState,
    UsageError,
)
from bkctl.files.directories import BookieDirectories
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import unpack_location
from bkctl.formats.index import NEEDS_INTEGRITY_CHECK, LedgerData
from bkctl.formats.layout import Buffer
from bkctl.formats.record import record_of
from bkctl.ids import U64_MAX, LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.db_indexes import EntryLocationIndex
from bkctl.storage.ledger.db_ledger_storage import DbLedgerHandle, DbLedgerStorage
from bkctl.storage.ledger.ledger_handle import always

PLAIN, SCOPED = LedgerId(0, 4), LedgerId(7, 4)


def config_of(root: Path, directories: int = 1, **changes: Any) -> BookieConfig:
    return BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=tuple(str(root / f"ledgers-{number}") for number in range(directories)),
        journal_pre_alloc_size_mb=0,
        ledger_storage_class=DB,
        **changes,
    )


def open_storage(root: Path, files: Files | None = None, directories: int = 1, **changes: Any) -> BookieStorage:
    storage = BookieStorage(config_of(root, directories, **changes), files=files)
    storage.open()
    return storage


def abandon(storage: BookieStorage) -> None:
    """Close the databases as the end of the process does, without a flush of memory."""
    storage.ledgers.close()


@contextlib.contextmanager
def storage_without_locations(handle: DbLedgerHandle) -> Iterator[None]:
    """Let every look-up in the locations of the ledger's directory fail the test: RocksDB has nothing in memory."""
    directory = handle.index
    locations = directory.locations
    directory.locations = SimpleNamespace(  # type: ignore[assignment]
        cached_location=lambda *_: 0, cached=locations.cached, cache=locations.cache
    )
    yield
    directory.locations = locations


def digests_of(ledger: LedgerId) -> DigestManager:
    return DigestManager(ledger, DigestType.CRC32C, b"secret")


def body_of(ledger: LedgerId, entry_id: int, size: int = 20) -> bytes:
    payload = bytes([entry_id % 251]) * size
    return digests_of(ledger).seal(entry_id, entry_id - 1, size * (entry_id + 1), payload) + payload


def keep(storage: BookieStorage, handle: Any, entry_id: int, body: bytes) -> None:
    record = record_of(body)
    storage.ledgers.table.add(handle, [entry_id], [record], len(record))


def add(storage: BookieStorage, ledger: LedgerId, *entry_ids: int, size: int = 20) -> None:
    for entry_id in entry_ids:
        storage.add(ledger, entry_id, digests_of(ledger).master_key, body_of(ledger, entry_id, size), None)


def entry_ids(storage: BookieStorage, ledger: LedgerId) -> list[int]:
    handle = storage.get(ledger)
    assert handle is not None
    return list(storage.ledgers.reader.entry_ids(handle)())


def locations(root: Path, ledger: LedgerId, directory: int = 0) -> dict[int, int]:
    """Return the rows in the databases of a closed storage."""
    name = "scoped-locations" if ledger.is_scoped else "locations"
    with LocationsDatabase.open(root / f"ledgers-{directory}" / "current" / name) as database:
        return {entry_id: location for _, entry_id, location in database.locations(ledger)}


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED, LedgerId(U64_MAX, U64_MAX)], ids=repr)
def test_entries_are_readable_in_every_state(tmp_path: Path, ledger: LedgerId) -> None:
    storage = open_storage(tmp_path)

    def expect(*ids: int) -> None:
        handle = storage.get(ledger)
        assert handle is not None
        assert handle.last_entry == max(ids)
        assert entry_ids(storage, ledger) == sorted(ids)
        for entry_id in range(12):
            assert storage.ledgers.reader.has(handle, entry_id) == (entry_id in ids)
            if entry_id in ids:
                assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
            else:
                with pytest.raises(EntryNotFound):
                    storage.ledgers.reader.read(handle, entry_id)
        assert bytes(storage.read_entry(ledger, -1)) == body_of(ledger, max(ids))

    add(storage, ledger, 3, 0, 5)
    expect(0, 3, 5)
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    add(storage, ledger, 1, 9)
    expect(0, 1, 3, 5, 9)
    storage.checkpoints.write(checkpoint)
    expect(0, 1, 3, 5, 9)
    storage.checkpoints.end(checkpoint, written=True)
    expect(0, 1, 3, 5, 9)
    storage.run_checkpoint()
    assert storage.ledgers.unwritten_bytes == 0
    expect(0, 1, 3, 5, 9)
    add(storage, ledger, 2)
    expect(0, 1, 2, 3, 5, 9)
    storage.close()
    assert locations(tmp_path, ledger).keys() == {0, 1, 2, 3, 5, 9}

    storage = open_storage(tmp_path)
    assert storage.replayed == (0, 0)
    expect(0, 1, 2, 3, 5, 9)
    assert list(storage.ledgers.ledger_ids()) == [ledger]
    storage.close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_entries_before_others_of_their_page_may_be_written_later(tmp_path: Path, ledger: LedgerId) -> None:
    storage = open_storage(tmp_path)
    for ids in (range(10, 16), range(5)):
        add(storage, ledger, *ids)
        flush_journals(storage)
        storage.run_checkpoint()
    handle = storage.get(ledger)
    assert handle is not None
    for entry_id in (*range(10, 16), *range(5)):
        assert bytes(storage.read(handle, entry_id)) == body_of(ledger, entry_id)
        assert storage.ledgers.reader.has(handle, entry_id)
    storage.close()


def test_flush_sorts_entries_by_ledger_and_id(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for entry_id in (2, 0, 1):
        for ledger_id in (9, 3, 5):
            add(storage, LedgerId(0, ledger_id), entry_id)
    storage.close()
    by_ledger = [locations(tmp_path, LedgerId(0, ledger_id)) for ledger_id in (3, 5, 9)]
    places = [each[entry_id] for each in by_ledger for entry_id in range(3)]
    assert places == sorted(places)


def test_128_bit_id_selects_the_directory(tmp_path: Path) -> None:
    ledgers = [LedgerId(0, 3), LedgerId(0, 4), LedgerId(1, 0), LedgerId(1, 1), LedgerId(U64_MAX, U64_MAX)]
    storage = open_storage(tmp_path, directories=3, index_directories=tuple(str(tmp_path / f"i{n}") for n in range(3)))
    for ledger in ledgers:
        add(storage, ledger, 0)
    assert list(storage.ledgers.ledger_ids()) == sorted(ledgers)
    storage.run_checkpoint()
    assert list(storage.ledgers.ledger_ids()) == sorted(ledgers)
    assert list(storage.ledgers.ledger_ids(1)) == [LedgerId(1, 0), LedgerId(1, 1)]
    assert list(storage.ledgers.ledger_ids(U64_MAX)) == [LedgerId(U64_MAX, U64_MAX)]
    storage.close()
    for number in range(3):
        here = [ledger for ledger in ledgers if ledger.value % 3 == number]
        current = tmp_path / f"i{number}" / "current"
        found: list[LedgerId] = []
        for name in ("ledgers", "scoped-ledgers"):
            if (current / name).exists():
                with LedgersDatabase.open(current / name) as database:
                    found += database.ledger_ids()
        assert found == sorted(here)
        logs = tmp_path / f"ledgers-{number}" / "current"
        assert bool(list(logs.glob("*.log"))) == any(not ledger.is_scoped for ledger in here)
        assert bool(list(logs.glob("scoped/*.log"))) == any(ledger.is_scoped for ledger in here)


@pytest.mark.parametrize("change", ["added", "removed", "reordered"])
def test_ledgers_that_reads_do_not_find_are_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """Apache's bookie, and ours once, took other directories while there were ledgers."""
    ledgers = [LedgerId(scope_id, ledger_id) for scope_id in (0, 7) for ledger_id in range(6)]
    first = config_of(tmp_path, 3)
    dirs = first.ledger_directories
    later = {
        "added": (*dirs, str(tmp_path / "more")),
        "removed": (dirs[0], dirs[2]),
        "reordered": (dirs[0], dirs[2], dirs[1]),
    }
    storage = open_storage(tmp_path, directories=3)
    for ledger in ledgers:
        add(storage, ledger, 0)
    storage.close()
    storage = open_storage(tmp_path, directories=3)
    for ledger in ledgers:
        assert storage.get(ledger) is not None
    storage.close()
    assert not caplog.records
    storage = BookieStorage(first.with_changes(ledger_directories=later[change]))
    storage.open()
    present = set(storage.ledgers.ledger_ids())
    lost = {ledger for ledger in present if storage.get(ledger) is None}
    storage.close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    count, example, here, expected = cast("tuple[int, LedgerId, Path, Path]", record.args)
    assert count == len(lost) > 0
    assert example in lost
    assert here == tmp_path / f"ledgers-{example.value % 3}" / "current"
    assert expected == Path(later[change][example.value % len(later[change])]) / "current"


def test_a_directory_that_lost_its_databases_stops_the_start(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, directories=2)
    add(storage, LedgerId(0, 2), 0)
    storage.close()
    current = [tmp_path / f"ledgers-{number}" / "current" for number in range(2)]
    for each in (current[1], current[0]):
        for name in ("ledgers", "locations"):
            (each / name).rename(tmp_path / name)
        if each == current[1]:  # without entries: the last start was killed
            open_storage(tmp_path, directories=2).close()
        else:
            with pytest.raises(Corrupt, match=r"ledgers-0/current has entries, but .*'bkctl bookie index rebuild"):
                open_storage(tmp_path, directories=2)
        for name in ("ledgers", "locations"):
            shutil.rmtree(each / name, ignore_errors=True)
            (tmp_path / name).rename(each / name)
    storage = open_storage(tmp_path, directories=2)
    assert entry_ids(storage, LedgerId(0, 2)) == [0]
    storage.close()


def test_each_ledger_directory_has_an_index_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="index directory for each of 2"):
        DbLedgerStorage(config_of(tmp_path, 2, index_directories=(str(tmp_path / "one"),)), Files())


def test_plain_ledgers_use_only_apaches_databases(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    assert not storage.ledgers.has_scoped_ledgers()
    storage.close()
    current = tmp_path / "ledgers-0" / "current"
    assert {path.name for path in current.iterdir() if path.is_dir()} == {"ledgers", "locations"}
    assert not list(current.rglob("rocksdict*"))
    storage = open_storage(tmp_path)
    add(storage, SCOPED, 0)
    storage.close()
    assert open_storage(tmp_path).ledgers.has_scoped_ledgers()


def test_fences_explicit_lacs_and_keys_outlive_a_restart(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for ledger in (PLAIN, SCOPED):
        digests = digests_of(ledger)
        storage.fence(ledger, digests.master_key, lambda error: None)
        storage.write_lac(ledger, digests.master_key, digests.seal_lac(8), lambda error: None)
    storage.close()
    storage = open_storage(tmp_path)
    assert storage.replayed == (0, 0)
    for ledger in (PLAIN, SCOPED):
        handle = storage.get(ledger)
        assert handle is not None
        assert (handle.fenced, handle.last_entry) == (True, -1)
        assert handle.explicit_lac == digests_of(ledger).seal_lac(8)
        assert handle.master_key == digests_of(ledger).master_key
        assert storage.read_lac(handle) == 8
        with pytest.raises(EntryNotFound):
            storage.read_entry(ledger, -1)
    storage.close()


def test_keeps_the_state_of_apaches_integrity_check(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    storage.close()
    ledgers = tmp_path / "ledgers-0" / "current" / "ledgers"
    with LedgersDatabase.edit(ledgers) as database:
        database.put(PLAIN, LedgerData(True, False, digests_of(PLAIN).master_key, limbo=True))
        database.put(LedgerId(0, 5), LedgerData(True, False, bytes(20)))
    storage = open_storage(tmp_path)
    assert bytes(storage.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
    for entry_id in (1, -1):
        with pytest.raises(UnknownLedgerState):
            storage.read_entry(PLAIN, entry_id)
    with pytest.raises(UnknownLedgerState):
        storage.read_lac(storage.get(PLAIN))
    with pytest.raises(UnknownLedgerState):  # its fence may be lost
        add(storage, PLAIN, 1)
    storage.fence(PLAIN, digests_of(PLAIN).master_key, lambda error: None)
    add(storage, LedgerId(0, 5), 0)  # a key of zeros belongs to no writer
    storage.close()
    with LedgersDatabase.open(ledgers) as database:
        assert database.get(PLAIN) == LedgerData(True, True, digests_of(PLAIN).master_key, limbo=True)
        assert database.get(LedgerId(0, 5)) == LedgerData(True, False, digests_of(LedgerId(0, 5)).master_key)


@pytest.mark.parametrize("directories", [1, 2])
def test_unfinished_integrity_check_turns_not_found_into_unknown(tmp_path: Path, directories: int) -> None:
    storage = open_storage(tmp_path, directories=directories)
    ledgers = [PLAIN, LedgerId(0, PLAIN.ledger_id + 1), SCOPED]
    for ledger in ledgers:
        add(storage, ledger, 0)
    storage.close()
    with LedgersDatabase.edit(tmp_path / "ledgers-0" / "current" / "ledgers") as database:
        database.put_storage_flags(NEEDS_INTEGRITY_CHECK)
    storage = open_storage(tmp_path, directories=directories)
    for ledger in ledgers:
        assert bytes(storage.read_entry(ledger, 0)) == body_of(ledger, 0)
        with pytest.raises(UnknownLedgerState):
            storage.read_entry(ledger, 1)
        with pytest.raises(UnknownLedgerState):
            add(storage, ledger, 1)
    with pytest.raises(UnknownLedgerState):
        storage.read_entry(LedgerId(0, 999), 0)
    with pytest.raises(UnknownLedgerState):
        add(storage, LedgerId(0, 999), 0)
    storage.close()
    with LedgersDatabase.open(tmp_path / "ledgers-0" / "current" / "ledgers") as database:
        assert database.storage_flags() == NEEDS_INTEGRITY_CHECK
        assert {data.limbo for _, data in database.ledgers()} == {None}


# --- deletion --------------------------------------------------------------------------------------------------------


def test_replaced_entries_of_a_deleted_ledger_leave_memory(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for _ in range(3):
        storage.add(PLAIN, 0, digests_of(PLAIN).master_key, body_of(PLAIN, 0), None, True)
    storage.delete_ledger(PLAIN)
    assert storage.ledgers.unwritten_bytes == 0  # Else a bookie waits for a flush that has nothing to write.
    storage.close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_flush_removes_deleted_ledgers_from_the_databases(tmp_path: Path, ledger: LedgerId) -> None:
    storage = open_storage(tmp_path)
    others = [LedgerId(ledger.scope_id, 3), LedgerId(ledger.scope_id, 5)]
    for each in (ledger, *others):
        add(storage, each, 0, 1)
    storage.run_checkpoint()
    add(storage, ledger, 2)
    storage.delete_ledger(ledger)
    assert storage.get(ledger) is None
    assert list(storage.ledgers.ledger_ids()) == others
    assert storage.ledgers.unwritten_bytes == 0
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    assert storage.get(ledger) is None
    storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=True)
    assert storage.get(ledger) is None
    assert list(storage.ledgers.ledger_ids()) == others
    storage.close()
    assert locations(tmp_path, ledger) == {}
    assert all(locations(tmp_path, each).keys() == {0, 1} for each in others)


@pytest.mark.parametrize("batch", [1, 2, 10_000])
def test_recreated_ledger_has_no_old_entries(tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.storage.ledger.db_indexes.BATCH_OPERATIONS", batch)
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0, 1, 2)
    storage.run_checkpoint()
    assert bytes(storage.read_entry(PLAIN, 1)) == body_of(PLAIN, 1)  # and the rest is read ahead
    add(storage, PLAIN, 3)
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    storage.ledgers.delete_ledger(storage.get(PLAIN))
    handle = storage.ledgers.load(PLAIN)
    storage.ledgers.create(handle, b"another key")
    keep(storage, handle, 2, body_of(PLAIN, 2, 99))
    keep(storage, handle, 4, body_of(PLAIN, 4))

    def expect() -> None:
        assert [each for each in range(6) if storage.ledgers.reader.has(handle, each)] == [2, 4]
        assert entry_ids(storage, PLAIN) == [2, 4]
        assert bytes(storage.ledgers.reader.read(handle, 2)) == body_of(PLAIN, 2, 99)
        for absent in (0, 1, 3):
            with pytest.raises(EntryNotFound):
                storage.ledgers.reader.read(handle, absent)

    expect()
    storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=True)
    expect()
    storage.run_checkpoint()
    expect()
    assert list(storage.ledgers.ledger_ids()) == [PLAIN]
    abandon(storage)
    assert locations(tmp_path, PLAIN).keys() == {2, 4}


def test_start_removes_leftovers_of_a_deletion(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    ledgers = [LedgerId(scope_id, ledger_id) for scope_id in (0, 7) for ledger_id in range(5)]
    for ledger in ledgers:
        add(storage, ledger, 0, 1)
    storage.close()
    current = tmp_path / "ledgers-0" / "current"
    gone = [ledger for ledger in ledgers if ledger.ledger_id in (0, 3, 4)]
    for name in ("ledgers", "scoped-ledgers"):
        with LedgersDatabase.edit(current / name) as database:
            database.write(database.batch_of({}, [ledger for ledger in gone if ledger.is_scoped == database.scoped]))
    open_storage(tmp_path).close()
    for ledger in ledgers:
        assert locations(tmp_path, ledger).keys() == (set() if ledger in gone else {0, 1})


# --- flushes that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "path"), [("sync", "locations"), ("sync", "current/ledgers"), ("write", ".log")])
def test_next_flush_completes_a_failed_one(tmp_path: Path, kind: str, path: str) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = open_storage(root, files)
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0, 1)
    flush_journals(storage)
    before = storage.ledgers.unwritten_bytes
    files.faults.append(Fault(kind, path, errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        storage.run_checkpoint()
    assert not files.faults
    assert storage.ledgers.unwritten_bytes == before
    if kind == "sync":
        with pytest.raises(OSError, match="not in the index yet"):
            storage.ledgers.indexes[0].live([(PLAIN, 0, 1 << 32 | 1028)])
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 1, 2)
        assert entry_ids(storage, ledger) == [0, 1, 2]
        for entry_id in range(3):
            assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
    storage.run_checkpoint()
    assert storage.ledgers.unwritten_bytes == 0
    image = files.crash(tmp_path / "image")
    abandon(storage)
    again = open_storage(image)
    for ledger in (PLAIN, SCOPED):
        assert entry_ids(again, ledger) == [0, 1, 2]
        for entry_id in range(3):
            assert bytes(again.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
    again.close()


def test_reopens_a_database_once_the_disk_has_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB takes no write after one that failed."""
    root = tmp_path / "disk"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = open_storage(root, files)
    add(storage, PLAIN, 0)
    storage.run_checkpoint()
    assert isinstance(storage.ledgers, DbLedgerStorage)
    index = storage.ledgers.directories[0].locations
    broken = index._databases[False]

    def refuse(batch: Any, *, sync: bool) -> None:
        raise BkctlError(f"cannot be written: IO error: {os.strerror(errno.ENOSPC)}")

    monkeypatch.setattr(broken, "write", refuse)
    add(storage, PLAIN, 1)
    for space in (None, 0, 0):
        files.capacity_bytes = space
        with pytest.raises(OSError, match="No space left"):
            storage.run_checkpoint()
        assert index._databases[False] is broken, "there is no space to open it"
        assert [bytes(storage.read_entry(PLAIN, each)) for each in (0, 1)] == [body_of(PLAIN, each) for each in (0, 1)]
    files.capacity_bytes = None
    reader = index.entry_ids(PLAIN)
    assert next(reader) == 0
    with pytest.raises(OSError, match="is in use") as caught:
        storage.run_checkpoint()
    assert caught.value.errno == errno.ENOSPC, "the bookie tries again"
    assert index.locations([(PLAIN, 0), (PLAIN, 1)])[0] == index.location(PLAIN, 0) != 0
    assert list(index.entry_ids(PLAIN)) == [0]
    assert list(reader) == []
    storage.run_checkpoint()
    assert index._databases[False] is not broken
    assert [bytes(storage.read_entry(PLAIN, each)) for each in (0, 1)] == [body_of(PLAIN, each) for each in (0, 1)]
    storage.close()
    assert locations(root, PLAIN).keys() == {0, 1}


def test_full_write_cache_makes_a_flush_due(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, directories=2, db_storage_write_cache_max_size_mb=1)
    entry_id = 0
    while not storage.ledgers.is_flush_due:
        add(storage, PLAIN, entry_id, size=10_000)
        entry_id += 1
    assert 1 << 17 < storage.ledgers.unwritten_bytes <= storage.ledgers.unwritten_bytes_max == 1 << 20
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    assert not storage.ledgers.is_flush_due
    taken = storage.ledgers.unwritten_bytes
    add(storage, PLAIN, entry_id, size=10_000)
    assert storage.ledgers.unwritten_bytes > taken, "what is being flushed is in memory still"
    storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=True)
    assert storage.ledgers.unwritten_bytes < taken
    storage.close()


def test_evicts_surplus_handles(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, open_file_limit=3)
    for ledger_id in range(10):
        add(storage, LedgerId(0, ledger_id), 0)
    assert len(storage.ledgers.handles) == 10, "the disk does not know them"
    storage.run_checkpoint()
    assert len(storage.ledgers.handles) == 3
    for ledger_id in range(10):
        assert bytes(storage.read_entry(LedgerId(0, ledger_id), 0)) == body_of(LedgerId(0, ledger_id), 0)
    storage.close()


# --- reads -----------------------------------------------------------------------------------------------------------


def test_reads_ahead_for_sequential_reads_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StorageFile, "read_cached", lambda *_: None)  # entries that the page cache has need no cache
    storage = open_storage(tmp_path, db_storage_read_ahead_cache_batch_size=10)
    add(storage, PLAIN, *range(40))
    add(storage, LedgerId(0, 5), *range(40))
    storage.run_checkpoint()
    handle = storage.get(PLAIN)

    def in_memory() -> list[int]:
        return [entry_id for entry_id in range(40) if storage.find(handle, entry_id) is not None]

    assert in_memory() == []
    storage.read(handle, 30)
    assert in_memory() == []
    storage.read(handle, 31)
    assert in_memory() == [*range(32, 40)], "up to the ledger's end"
    for entry_id in range(40):
        assert bytes(storage.read(handle, entry_id)) == body_of(PLAIN, entry_id)
    storage.read(handle, 1)
    storage.close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_finds_neighbours_of_read_entries_in_the_page_cache(
    tmp_path: Path, ledger: LedgerId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop needs neither a thread nor the database for entries whose locations were looked up."""
    storage = open_storage(tmp_path)
    add(storage, ledger, *range(0, 40, 2))
    storage.run_checkpoint()
    handle = storage.get(ledger)
    assert isinstance(handle, DbLedgerHandle)
    monkeypatch.setattr(handle.index.locations, "cached_location", lambda *_: 0)
    assert storage.find(handle, 20) is None
    storage.read(handle, 20)
    with storage_without_locations(handle):
        found = {entry_id: storage.find(handle, entry_id) for entry_id in range(39)}
        assert {entry_id for entry_id, body in found.items() if body is not None} == set(range(16, 32, 2))
        assert all(bytes(body) == body_of(ledger, entry_id) for entry_id, body in found.items() if body is not None)
    storage.read_all(handle, [0, 2], 1 << 20)  # runs look further ahead
    with storage_without_locations(handle):
        assert None not in storage.find_all(handle, range(0, 39, 2), 1 << 20)
        assert storage.find_all(handle, [1, 2, 3], 1 << 20)[::2] == [None, None]
    storage.close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_finds_single_entries_whose_locations_rocksdb_has_in_memory(tmp_path: Path, ledger: LedgerId) -> None:
    storage = open_storage(tmp_path)
    add(storage, ledger, *range(0, 40, 2))
    storage.close()
    storage = open_storage(tmp_path)
    handle = storage.get(ledger)
    assert isinstance(handle, DbLedgerHandle)
    assert storage.find(handle, 20) is None, "its table was not read yet"
    assert bytes(storage.read(handle, 38)) == body_of(ledger, 38)
    assert bytes(storage.find(handle, 4) or b"") == body_of(ledger, 4)
    assert storage.find(handle, 5) is None
    storage.ledgers.delete_ledger(handle)
    handle = storage.ledgers.load(ledger)
    storage.ledgers.create(handle, b"another key")
    keep(storage, handle, 38, body_of(ledger, 38, 99))
    assert storage.ledgers.reader.find(handle, 4) is None, "the next flush deletes it"
    storage.close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_a_tailing_reader_finds_flushed_entries_without_the_database(tmp_path: Path, ledger: LedgerId) -> None:
    other = LedgerId(ledger.scope_id, 77)

    def opened() -> None:
        """Have the log open, as it is once any entry of it was read."""
        storage.read(storage.get(other), 0)

    storage = open_storage(tmp_path)
    for first, end in ((0, 19), (19, 25), (25, 52)):
        add(storage, ledger, *range(first, end))
        add(storage, other, 0)
        storage.run_checkpoint()
    opened()
    handle = storage.get(ledger)
    assert isinstance(handle, DbLedgerHandle)
    with storage_without_locations(handle):
        found = storage.find_all(handle, range(52), 1 << 20)
        assert [bytes(body or b"") for body in found] == [body_of(ledger, entry_id) for entry_id in range(52)]
    digests = digests_of(ledger)
    copies = {entry_id: digests.seal(entry_id, entry_id - 1, 40, b"\1" * 9) + b"\1" * 9 for entry_id in (30, 31, 32)}
    for entry_id, copy in copies.items():
        storage.add(ledger, entry_id, digests.master_key, copy, None)
    storage.run_checkpoint()
    with storage_without_locations(handle):
        assert [bytes(body or b"") for body in storage.find_all(handle, range(29, 34), 1 << 20)] == [
            copies.get(entry_id, body_of(ledger, entry_id)) for entry_id in range(29, 34)
        ]
    storage.close()
    storage = open_storage(tmp_path)
    add(storage, ledger, *range(52, 90))
    add(storage, other, 0)
    storage.run_checkpoint()
    opened()
    handle = storage.get(ledger)
    assert isinstance(handle, DbLedgerHandle)
    with storage_without_locations(handle):  # the database knows more of the first page
        found = storage.find_all(handle, (51, 52, 63, 64, 89), 1 << 20)
        assert [body is None for body in found] == [True, True, True, False, False]
    expected = [copies.get(entry_id, body_of(ledger, entry_id)) for entry_id in range(90)]
    assert [bytes(cast("Buffer", body)) for body in storage.read_all(handle, range(90), 1 << 20)] == expected
    storage.close()


def test_locations_of_a_ledger_deleted_during_its_flush_are_forgotten(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, *range(40))
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    real = EntryLocationIndex.write

    def write(self: EntryLocationIndex, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        storage.delete_ledger(PLAIN)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EntryLocationIndex, "write", write)
        with contextlib.suppress(LedgerNotFound):  # it is written for each kind of ledgers
            storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=False)
    add(storage, PLAIN, 3, 39)
    storage.run_checkpoint()
    handle = storage.get(PLAIN)
    assert handle is not None
    found = storage.read_all(handle, range(40), 1 << 20)
    assert [entry_id for entry_id, body in enumerate(found) if not isinstance(body, Exception)] == [3, 39]
    storage.close()


def test_locations_looked_up_before_a_flush_are_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread looks an entry up, a flush writes a newer copy of it, and then the thread caches what it found."""
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0, 1, 2)
    add(storage, LedgerId(0, 5), 0)  # so that nothing of the ledger is read ahead
    storage.run_checkpoint()
    handle = storage.get(PLAIN)
    assert isinstance(handle, DbLedgerHandle)
    handle.index.discard_cached(PLAIN)
    digests = digests_of(PLAIN)
    copy = digests.seal(0, -1, 40, b"\1" * 20) + b"\1" * 20
    real = EntryLocationIndex.locations_of

    def slow(self: EntryLocationIndex, ledger: LedgerId, entry_ids: array[int]) -> array[int]:
        found = real(self, ledger, entry_ids)
        storage.add(PLAIN, 0, digests.master_key, copy, None)
        storage.run_checkpoint()
        return found

    monkeypatch.setattr(EntryLocationIndex, "locations_of", slow)
    assert bytes(storage.read(handle, 2)) == body_of(PLAIN, 2)
    monkeypatch.undo()
    assert bytes(storage.read(handle, 0)) == copy
    assert bytes(storage.find(handle, 0) or b"") == copy
    storage.close()


def test_a_recreated_ledger_does_not_find_entries_of_the_deleted_one(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0, 1, 2)
    storage.run_checkpoint()
    deleted = storage.get(PLAIN)
    storage.read(deleted, 1)
    assert storage.find(deleted, 0) is not None
    storage.delete_ledger(PLAIN)
    with contextlib.suppress(BkctlError):
        storage.read(deleted, 0)  # in a thread that began before
    add(storage, PLAIN, 2)
    handle = storage.get(PLAIN)
    for _ in range(2):
        assert storage.find_all(handle, [0, 1, 2], 1 << 20)[:2] == [None, None]
        with pytest.raises(EntryNotFound):
            storage.read(handle, 0)
        storage.run_checkpoint()
    storage.close()


def test_the_newest_copy_of_an_entry_is_read(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0, 1, 2)
    storage.run_checkpoint()
    storage.read_entry(PLAIN, 0)  # and the others ahead
    digests = digests_of(PLAIN)
    copy = digests.seal(1, -1, 40, b"\1" * 20) + b"\1" * 20
    storage.add(PLAIN, 1, digests.master_key, copy, None)
    assert bytes(storage.read_entry(PLAIN, 1)) == copy != body_of(PLAIN, 1)
    storage.run_checkpoint()
    assert bytes(storage.read_entry(PLAIN, 1)) == copy
    storage.close()


# --- garbage collection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=repr)
def test_reads_moved_entries(tmp_path: Path, ledger: LedgerId) -> None:
    storage = open_storage(tmp_path, directories=2)
    other = LedgerId(ledger.scope_id, ledger.ledger_id + 1)
    add(storage, ledger, 0, 1, 2)
    add(storage, other, 0)
    storage.run_checkpoint()
    assert isinstance(storage.ledgers, DbLedgerStorage)
    directory = storage.ledgers.directories[ledger.value % 2]
    old = {entry_id: directory.locations.location(ledger, entry_id) for entry_id in range(3)}
    logger = directory.logger_of(ledger)
    log = logger.open_compaction_log()
    new = {entry_id: log.add(ledger, body_of(ledger, entry_id)) for entry_id in (0, 1)}
    log.finish()
    moves = [Move(ledger, 0, old[0], new[0]), Move(ledger, 1, old[1] + 1, new[1]), Move(other, 7, 1 << 33, new[0])]
    storage.ledgers.index_of(logger).move(moves)
    asked = [(ledger, 0, new[0]), (ledger, 0, old[0]), (ledger, 1, old[1]), (ledger, 2, old[2]), (other, 7, new[0])]
    assert storage.ledgers.index_of(logger).live(asked) == [True, False, True, True, False]
    assert storage.ledgers.index_of(logger).live([(ledger, 1, old[1]), (ledger, 1, new[1])]) == [True, False]
    for entry_id in range(3):
        assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
    storage.close()
    moved = locations(tmp_path, ledger, ledger.value % 2)
    assert moved == {0: new[0], 1: old[1], 2: old[2]}
    assert unpack_location(new[0])[0] != unpack_location(old[0])[0]


def test_read_retries_when_compaction_moves_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    storage.run_checkpoint()
    add(storage, LedgerId(0, 5), 0)  # the log continues
    assert isinstance(storage.ledgers, DbLedgerStorage)
    (directory,) = storage.ledgers.directories
    monkeypatch.setattr(directory.locations, "cached_location", lambda *_: 0)
    old = directory.locations.location(PLAIN, 0)
    read = directory.loggers[0].read

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(directory.loggers[0], "read", read)
        log = directory.loggers[0].open_compaction_log()
        new = log.add(PLAIN, body_of(PLAIN, 0))
        log.finish()
        storage.ledgers.index_of(directory.loggers[0]).move([Move(PLAIN, 0, old, new)])
        raise FileNotFoundError(errno.ENOENT, "No such file", "0.log")

    monkeypatch.setattr(directory.loggers[0], "read", overtaken)
    assert bytes(storage.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)

    def gone(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "No such file", "0.log")

    monkeypatch.setattr(directory.loggers[0], "read", gone)
    monkeypatch.setattr(directory.loggers[0], "read_run", lambda *_, **options: [None])
    with pytest.raises(FileNotFoundError):
        storage.read_entry(PLAIN, 0)
    monkeypatch.undo()
    storage.close()


def test_compacts_location_databases_on_request(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, *range(2000))
    add(storage, SCOPED, 0)
    storage.close()
    storage = open_storage(tmp_path)
    storage.delete_ledger(PLAIN)
    storage.run_checkpoint()
    current = tmp_path / "ledgers-0" / "current"
    plain, scoped = current / "locations", current / "scoped-locations"
    (index,) = storage.ledgers.location_indexes
    assert index.compactions() == [(str(plain), False), (str(scoped), False)]

    def size() -> int:
        return sum(path.stat().st_size for path in plain.glob("*.sst"))

    before = size()
    index.compact([str(scoped)], always)
    assert size() == before > 0
    index.compact((), always)
    assert size() < before
    storage.close()


def test_compaction_of_locations_ends_early_and_close_waits_for_it(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    storage.close()
    storage = open_storage(tmp_path)
    is_asked, may_end = threading.Event(), threading.Event()

    def is_wanted() -> bool:
        is_asked.set()
        assert may_end.wait(LIMIT_S)
        return False

    with ThreadPoolExecutor(2) as threads:
        try:
            compaction = threads.submit(storage.ledgers.location_indexes[0].compact, (), is_wanted)
            assert is_asked.wait(LIMIT_S)
            assert any(is_running for _, is_running in storage.ledgers.location_indexes[0].compactions())
            closing = threads.submit(storage.close)
            with pytest.raises(TimeoutError):
                closing.result(0.1)
        finally:
            may_end.set()
        compaction.result(LIMIT_S)
        closing.result(LIMIT_S)


# --- damage ----------------------------------------------------------------------------------------------------------


def append_garbage(current: Path) -> None:
    (manifest,) = (current / "locations").glob("MANIFEST-*")
    with manifest.open("ab") as file:
        file.write(b"\x17\x2a\x80\xff" * 20_000)  # RocksDB would never end to read it


def cut_current(current: Path) -> None:
    (current / "ledgers" / "CURRENT").write_bytes(b"MANI")


def lose_ledgers(current: Path) -> None:
    shutil.rmtree(current / "ledgers")


def lose_scoped_locations(current: Path) -> None:
    shutil.rmtree(current / "scoped-locations")


def lose_a_table(current: Path) -> None:
    for path in (current / "locations").glob("*.sst"):
        path.unlink()


@pytest.mark.parametrize("damage", [append_garbage, cut_current, lose_ledgers, lose_scoped_locations, lose_a_table])
def test_damaged_database_stops_the_start_with_one_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    add(storage, SCOPED, 0)
    storage.close()
    current = tmp_path / "ledgers-0" / "current"
    shutil.copytree(current, tmp_path / "whole")
    damage(current)
    for _ in range(2):
        with pytest.raises(
            Corrupt,
            match=r"ledgers-0/current/\S*(ledgers|locations).*'bkctl bookie index rebuild --ledgers --locations'",
        ):
            open_storage(tmp_path)
    shutil.rmtree(current)
    shutil.copytree(tmp_path / "whole", current)
    storage = open_storage(tmp_path)  # the databases are not locked
    assert bytes(storage.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
    storage.close()


@pytest.mark.parametrize("damage", ["begun", "flipped"])
def test_only_the_end_of_a_write_ahead_log_may_be_torn(tmp_path: Path, damage: str) -> None:
    storage = open_storage(tmp_path / "running")
    for entry_id in range(3):
        add(storage, PLAIN, entry_id)
        storage.run_checkpoint()
    shutil.copytree(tmp_path / "running", tmp_path / "killed")
    storage.close()
    (log,) = (tmp_path / "killed" / "ledgers-0" / "current" / "locations").glob("*.log")
    data = bytearray(log.read_bytes())
    if damage == "begun":
        log.write_bytes(data + data[:30])
        storage = open_storage(tmp_path / "killed")
        assert entry_ids(storage, PLAIN) == [0, 1, 2]
        storage.close()
    else:
        data[20] ^= 1
        log.write_bytes(data)
        with pytest.raises(Corrupt, match=r"current/locations.*'bkctl bookie index rebuild --ledgers --locations'"):
            open_storage(tmp_path / "killed")


def test_second_process_cannot_open_the_directory(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    script = (
        "import sys; from pathlib import Path; from bkctl.config import BookieConfig\n"
        "from bkctl.storage.ledger.db_ledger_storage import DbLedgerStorage; from bkctl.disk import Files\n"
        "DbLedgerStorage(BookieConfig(ledger_directories=(sys.argv[1],)), Files()).open()\n"
    )
    directory = str(tmp_path / "ledgers-0")
    run = subprocess.run([sys.executable, "-c", script, directory], capture_output=True, text=True, timeout=LIMIT_S)
    assert DirectoryInUse.__name__ in run.stderr.splitlines()[-1]
    storage.close()


# --- beside Apache's -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_serves_the_directories_of_apaches_bookie(tmp_path: Path, version: str) -> None:
    """Its last entries are in its journal only. Afterwards ours are beside them."""
    bookie = GoldenBookie(version, "db")
    root = tmp_path / "bookie"
    shutil.copytree(bookie.directory, root)
    directories = {"journal_directories": (str(root / "journal"),), "ledger_directories": (str(root / "ledgers"),)}
    storage = BookieStorage(config_of(root).with_changes(**directories))
    storage.open()
    expected = {LedgerId(0, int(ledger)): set(index["locations"]) for ledger, index in bookie.indexes.items()}
    in_journals = 0
    for _, rows in bookie.journals.values():
        for row in rows:
            ledger = LedgerId(0, int(row["ledgerId"]))
            if row["type"] == "entry" and ledger in expected:
                in_journals += row["entryId"] not in expected[ledger]
                expected[ledger].add(row["entryId"])
    assert sum(map(len, expected.values())) > 10
    for ledger, ids in expected.items():
        assert set(entry_ids(storage, ledger)) == ids
        for entry_id in ids:
            assert int.from_bytes(bytes(storage.read_entry(ledger, entry_id))[8:16], "big") == entry_id
    add(storage, LedgerId(7, 1), 0)
    storage.close()
    check = IndexCheck(BookieDirectories([root / "journal"], [root / "ledgers"]))
    assert [each for each in check.findings() if each.is_problem] == []
    assert check.counts.errors == []
