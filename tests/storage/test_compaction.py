"""Compaction: logs shrink to what is alive, nothing that is alive is lost, whatever the moment of a crash."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.journals import flush_journals
from support.simulated_disk import Fault, SimulatedCrash, SimulatedFiles

from bkctl import pace
from bkctl.checks.check import IndexCheck
from bkctl.checks.findings import FindingKind
from bkctl.checks.log_check import check_entry_logs
from bkctl.config import BookieConfig
from bkctl.disk import DiskUsage, Files
from bkctl.errors import BkctlError, EntryNotFound, LedgerNotFound, ReadOnlyBookie
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import compaction_of, file_name
from bkctl.formats.index import index_path
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.compaction import (
    FORCED_SPARE_BYTES,
    SPARE_BYTES,
    CompactionStopped,
    EntryLogCompactor,
    UnreadableEntryLog,
)
from bkctl.storage.entry_log_metadata import EntryLogMetadata, EntryLogMetadataMap
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.sorted_ledger_storage import SortedLedgerStorage
from bkctl.storage.location_reader import LocationReader

STORAGE_CLASSES = {
    "interleaved": "org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
    "sorted": "org.apache.bookkeeper.bookie.SortedLedgerStorage",
    "db": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
}
ALIVE = [LedgerId(0, 1), LedgerId(7, 1), LedgerId(9, 4)]
#: In DbLedgerStorage a directory has its share of the ledgers: each has dead ones beside those that are alive.
DEAD = [LedgerId(0, 3), LedgerId(7, 3), LedgerId(9, 2)]
ENTRIES = 30
#: Every one of so many steps is a crash; all storage classes together are stopped at each.
STRIDE = int(os.environ.get("BKCTL_TEST_STRIDE", "9"))
#: Enough for two logs of either kind.
CRASH_ENTRIES = 12


def config_for(root: Path, storage_class: str = "interleaved", **changes: Any) -> BookieConfig:
    return BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers-0"), str(root / "ledgers-1")),
        ledger_storage_class=STORAGE_CLASSES[storage_class],
        journal_pre_alloc_size_mb=0,
        journal_max_backups=0,
        log_size_limit=4 * 1024,
        page_size=64,
        compaction_rate=1_000_000_000,
        compaction_max_outstanding_requests=7,
    ).with_changes(**changes)


def open_storage(config: BookieConfig, files: Files | None = None, clock: int = 0x1000) -> BookieStorage:
    times = iter(range(clock, clock + 0x1000))
    storage = BookieStorage(config, files=files, clock_ms=lambda: next(times), chance=random.Random(1))
    storage.open()
    return storage


def body_of(ledger: LedgerId, entry_id: int, lac: int | None = None) -> bytes:
    payload = b"%d of %d " % (entry_id, ledger.ledger_id) * 20
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    return by.seal(entry_id, entry_id - 1 if lac is None else lac, len(payload) * (entry_id + 1), payload) + payload


def key_of(ledger: LedgerId) -> bytes:
    return DigestManager(ledger, DigestType.CRC32C, b"secret").master_key


def add(storage: BookieStorage, ledger: LedgerId, entry_id: int, body: bytes | None = None) -> None:
    storage.add(ledger, entry_id, key_of(ledger), body or body_of(ledger, entry_id), None)


def fill(storage: BookieStorage, entry_count: int = ENTRIES) -> None:
    """Entries of all ledgers, mixed over several logs of both kinds, and nothing left for a replay."""
    for entry_id in range(entry_count):
        for ledger in (*ALIVE, *DEAD):
            add(storage, ledger, entry_id)
        if entry_id % 3 == 2:  # so that storages which sort the entries mix the ledgers too
            flush_journals(storage)
            storage.run_checkpoint()


def delete_dead(storage: BookieStorage) -> None:
    for ledger in DEAD:
        storage.delete_ledger(ledger)
    storage.run_checkpoint()


def logs_of(storage: BookieStorage) -> EntryLogMetadataMap:
    logs = EntryLogMetadataMap(storage.ledgers.entry_loggers, storage.ledgers)
    logs.extract(_no_problem)
    existing = set(storage.ledgers.ledger_ids())
    for each in logs:
        each.keep(existing)
    return logs


def _no_problem(path: Path, error: BkctlError) -> None:
    raise AssertionError(f"{path}: {error}")


def compactor_for(
    storage: BookieStorage,
    transactional: bool = False,
    checkpoint: Callable[[], None] | None = None,
    removed: Callable[[EntryLogMetadata], None] = lambda log: None,
) -> EntryLogCompactor:
    return EntryLogCompactor(
        storage.config.with_changes(use_transactional_compaction=transactional),
        storage.ledgers,
        storage.files,
        checkpoint=checkpoint or storage.run_checkpoint,
        stopped=threading.Event(),
        removed=removed,
    )


def compact(storage: BookieStorage, transactional: bool = False, **options: Any) -> list[Path]:
    """Compact every log with garbage; the logs that were removed."""
    gone: list[Path] = []
    compactor = compactor_for(storage, transactional, removed=lambda log: gone.append(log.path), **options)
    for log in logs_of(storage):
        if log.usage() < 1:
            compactor.compact(log)
    compactor.flush()
    return gone


def entry_logs(root: Path) -> list[Path]:
    return sorted([*root.glob("ledgers-*/current/*.log"), *root.glob("ledgers-*/current/scoped/*.log")])


def stored(root: Path) -> list[tuple[LedgerId, int]]:
    """Every entry in every log, where each has to stand in the logs of its own id space."""
    found = []
    for path in entry_logs(root):
        with EntryLogReader.open(path) as reader:
            assert reader.header is not None
            for record in reader.records():
                assert record.ledger.is_scoped == (path.parent.name == "scoped") == (reader.header.version == 2)
                found.append((record.ledger, record.entry_id))
    return found


def check_alive(storage: BookieStorage, entry_count: int = ENTRIES) -> None:
    for ledger in ALIVE:
        for entry_id in range(entry_count):
            assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id), (ledger, entry_id)


@pytest.fixture(params=STORAGE_CLASSES)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BookieStorage]:
    opened = open_storage(config_for(tmp_path, request.param), SimulatedFiles(tmp_path))
    fill(opened)
    yield opened
    opened.close()


@pytest.mark.parametrize("transactional", [False, True])
def test_compaction_shrinks_logs_to_live_entries(storage: BookieStorage, tmp_path: Path, transactional: bool) -> None:
    delete_dead(storage)
    before = {each.path: each for each in logs_of(storage) if each.usage() < 1}
    assert {each.logger.version for each in before.values()} == {1, 2}
    in_use = set(entry_logs(tmp_path)) - {each.path for each in logs_of(storage)}
    assert sorted(compact(storage, transactional)) == sorted(before)
    assert not any(path.exists() for path in before)
    assert all(path.exists() for path in in_use), "the logs in use are left alone"
    check_alive(storage)
    logs = list(logs_of(storage))
    assert all(each.usage() == 1.0 for each in logs)
    kept = [each for log in logs for each in _entries(log.path)]
    assert len(kept) == len(set(kept)), "no entry is in two logs"
    assert not {ledger for ledger, _ in kept} & set(DEAD)
    stored(tmp_path)
    new = {each.path for each in logs} - in_use
    assert all(path.stat().st_size <= storage.config.log_size_limit + 4096 for path in new)
    if not transactional and len({each.logger for each in before.values()}) == 2:
        assert len(new) < len(before), "several logs become one"
    assert compact(storage, transactional) == []


def _entries(path: Path) -> list[tuple[LedgerId, int]]:
    with EntryLogReader.open(path) as reader:
        return [(record.ledger, record.entry_id) for record in reader.records()]


@pytest.fixture(params=STORAGE_CLASSES)
def killed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[BookieConfig, list[Path]]:
    """A bookie that is down, and its logs that have no ledgers map, of both kinds: it was killed when it wrote them."""
    config = config_for(tmp_path, request.param, log_size_limit=1 << 20)
    storage = open_storage(config)
    fill(storage)
    delete_dead(storage)
    storage.close()
    open_logs = []
    for path in entry_logs(tmp_path):
        with EntryLogReader.open(path) as reader:
            if reader.header is not None and not reader.header.has_map and any(reader.records()):
                open_logs.append(path)
    assert {path.parent.name for path in open_logs} == {"current", "scoped"}
    return config, open_logs


@pytest.mark.parametrize("zeros", [0, 70_000], ids=["at the end", "before zeros"])
def test_a_cut_record_whose_payload_holds_records_pins_no_log(
    killed: tuple[BookieConfig, list[Path]], tmp_path: Path, zeros: int
) -> None:
    config, open_logs = killed
    for path in open_logs:
        ledger = DEAD[0] if path.parent.name == "current" else DEAD[1]
        by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        payload = b"payload" + path.read_bytes()[1024:].rstrip(b"\0")
        body = by.seal(ENTRIES, 0, 0, payload) + payload + bytes(4)
        size = len(body) if zeros else len(body) + 5000
        path.write_bytes(path.read_bytes().rstrip(b"\0") + struct.pack(">i", size) + body + bytes(zeros))
    index_dirs = [Path(each) for each in config.ledger_directories]
    assert [check.error for check in check_entry_logs(open_logs, index_dirs=index_dirs)] == [None] * len(open_logs)
    check = IndexCheck(BookieDirectories([], config.ledger_directories, index_dirs))
    assert FindingKind.LOG_DAMAGED not in {finding.kind for finding in check.findings()}
    storage = open_storage(config, clock=0x3000)
    assert set(open_logs) <= set(compact(storage))
    check_alive(storage)
    storage.close()


def test_a_log_stays_where_the_index_points_into_a_record_of_a_wrong_size(
    killed: tuple[BookieConfig, list[Path]],
) -> None:
    config, open_logs = killed
    for path in open_logs:
        data = bytearray(path.read_bytes())
        data[1024:1028] = struct.pack(">i", 1 << 20)
        path.write_bytes(data)
    index_dirs = [Path(each) for each in config.ledger_directories]
    for check in check_entry_logs(open_logs, index_dirs=index_dirs):
        assert "with an indexed entry at byte" in str(check.error)
    storage = open_storage(config, clock=0x3000)
    found: list[Path] = []
    EntryLogMetadataMap(storage.ledgers.entry_loggers, storage.ledgers).extract(lambda path, error: found.append(path))
    assert sorted(found) == sorted(open_logs)
    storage.close()


@pytest.mark.parametrize("change", ["more", "reordered"])
def test_compaction_keeps_ledgers_that_their_directory_hides(tmp_path: Path, change: str) -> None:
    """Apache's bookie starts with directories added or reordered, though its DbLedgerStorage loses sight of ledgers."""
    config = config_for(tmp_path, "db")
    before = config.ledger_directories
    storage = open_storage(config)
    fill(storage)
    delete_dead(storage)
    storage.close()
    after = before[::-1] if change == "reordered" else (*before, str(tmp_path / "ledgers-2"))
    storage = open_storage(config.with_changes(ledger_directories=after), clock=0x3000)
    assert storage.get(ALIVE[1]) is None
    assert compact(storage)
    storage.close()
    storage = open_storage(config, clock=0x5000)
    check_alive(storage)
    storage.close()


def test_compaction_skips_rewritten_entries(storage: BookieStorage, tmp_path: Path) -> None:
    ledger = ALIVE[0]
    newer = {entry_id: body_of(ledger, entry_id, lac=entry_id) for entry_id in (0, 5)}
    for entry_id, body in newer.items():
        add(storage, ledger, entry_id, body)
    storage.run_checkpoint()
    delete_dead(storage)
    compact(storage)
    for entry_id, body in newer.items():
        assert bytes(storage.read_entry(ledger, entry_id)) == body
    kept = stored(tmp_path)
    assert [kept.count((ledger, entry_id)) for entry_id in (0, 1, 5)] == [1, 1, 1]


def test_dead_log_leaves_no_compacted_log(storage: BookieStorage, tmp_path: Path) -> None:
    for ledger in (*ALIVE, *DEAD):
        for entry_id in range(ENTRIES):
            add(storage, ledger, entry_id)
    storage.run_checkpoint()
    before = set(entry_logs(tmp_path))
    old = [each for each in logs_of(storage) if not any(storage.ledgers.index_of(each.logger).live(_rows(each)))]
    assert len(old) > 2
    compactor = compactor_for(storage)
    for each in old:
        compactor.compact(each)
    compactor.flush()
    assert before - set(entry_logs(tmp_path)) == {each.path for each in old}
    assert set(entry_logs(tmp_path)) < before
    check_alive(storage)


def _rows(log: EntryLogMetadata) -> list[tuple[LedgerId, int, int]]:
    with EntryLogReader.open(log.path) as reader:
        return [(record.ledger, record.entry_id, log.log_id << 32 | record.offset + 4) for record in reader.records()]


def test_compaction_keeps_concurrent_changes(storage: BookieStorage) -> None:
    """Entries written anew, and ledgers deleted, between the copy and the change of the index."""
    delete_dead(storage)
    renewed, deleted = ALIVE[0], ALIVE[1]
    newer = body_of(renewed, 3, lac=3)
    compactor = compactor_for(storage)
    for log in logs_of(storage):
        compactor.compact(log)
    add(storage, renewed, 3, newer)
    storage.delete_ledger(deleted)
    compactor.flush()
    assert bytes(storage.read_entry(renewed, 3)) == newer
    with pytest.raises(LedgerNotFound):
        storage.read_entry(deleted, 3)
    storage.run_checkpoint()
    assert bytes(storage.read_entry(renewed, 3)) == newer
    assert bytes(storage.read_entry(renewed, 4)) == body_of(renewed, 4)


def test_reader_with_an_old_handle_finds_moved_entries(storage: BookieStorage) -> None:
    handles = {ledger: storage.get(ledger) for ledger in ALIVE}
    delete_dead(storage)
    compact(storage)
    for ledger, handle in handles.items():
        assert handle is not None
        assert bytes(storage.read(handle, 3)) == body_of(ledger, 3)


def test_reader_retries_when_compaction_moves_the_entry(
    storage: BookieStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_dead(storage)
    storage.close()
    read, compacted = LocationReader.read, False

    def read_late(self: LocationReader, *arguments: Any, **options: Any) -> Any:
        nonlocal compacted
        if not compacted:
            compacted = True
            assert compact(reopened)
        return read(self, *arguments, **options)

    monkeypatch.setattr(LocationReader, "read", read_late)
    reopened = open_storage(storage.config, clock=0x9000)
    handle = reopened.get(ALIVE[1])
    assert handle is not None
    assert bytes(reopened.read(handle, 0)) == body_of(ALIVE[1], 0)
    assert compacted
    reopened.close()


@pytest.mark.parametrize("storage_class", STORAGE_CLASSES)
@pytest.mark.parametrize("moment", ["before the copies", "before the moves", "after the moves"])
def test_running_checkpoint_keeps_moved_locations(tmp_path: Path, storage_class: str, moment: str) -> None:
    files = SimulatedFiles(tmp_path)
    root = tmp_path / "bookie"
    config = config_for(root, storage_class, page_limit=1, open_file_limit=1)
    storage = open_storage(config, files)
    fill(storage)
    delete_dead(storage)
    in_flight: list[Any] = []
    added = iter(range(ENTRIES, 1 << 20))

    def begin() -> None:
        entry_id = next(added)
        for ledger in ALIVE:
            add(storage, ledger, entry_id)  # on the page of the last ones
        in_flight.append(storage.checkpoints.begin())
        assert in_flight[0] is not None

    def end() -> None:
        checkpoint = in_flight.pop()
        storage.checkpoints.write(checkpoint)
        storage.checkpoints.end(checkpoint, written=True)

    def whole_checkpoint() -> None:
        if in_flight:
            end()
        storage.run_checkpoint()

    if moment == "before the copies":
        begin()
    compactor = compactor_for(storage, checkpoint=whole_checkpoint)
    for log in logs_of(storage):
        compactor.compact(log)
    if moment == "before the moves":
        begin()
    if moment == "after the moves":
        for index in storage.ledgers.indexes:

            def move_and_begin(moves: Any, move: Callable[[Any], None] = index.move) -> None:
                move(moves)
                if not in_flight:
                    begin()

            index.move = move_and_begin  # type: ignore[method-assign]
    compactor.flush()
    assert not in_flight
    check_alive(storage)
    crashed = open_storage(config_for(files.crash(tmp_path / "after") / "bookie", storage_class), clock=0x9000)
    check_alive(crashed)
    crashed.close()


# --- crashes and failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage_class", "transactional"),
    [*((each, False) for each in STORAGE_CLASSES), ("interleaved", True)],
)
def test_crash_at_any_step_of_compaction_loses_no_entry(
    tmp_path: Path, storage_class: str, transactional: bool
) -> None:
    """Of what was not synced nothing, a part or everything is on the disk, in turn."""
    (tmp_path / "filled").mkdir()
    filled = open_storage(config_for(tmp_path / "filled", storage_class), SimulatedFiles(tmp_path / "filled"))
    fill(filled, CRASH_ENTRIES)
    delete_dead(filled)
    filled.close()
    step, crashed = -list(STORAGE_CLASSES).index(storage_class) % STRIDE, True
    while crashed:
        step += STRIDE
        base = tmp_path / f"{step}"
        shutil.copytree(tmp_path / "filled", base)
        files = SimulatedFiles(base, seed=step)
        storage = open_storage(config_for(base, storage_class), files, clock=0x9000)
        files.crash_at = files.operations + step
        try:
            compact(storage, transactional)
            crashed = False
        except SimulatedCrash:
            pass
        keep = (0.0, 0.5, 1.0)[step // STRIDE % 3]
        after = files.crash(tmp_path / f"{step}-crashed", keep=keep, tear=keep == 0.5)
        again = open_storage(config_for(after, storage_class), SimulatedFiles(after), clock=0x11000)
        check_alive(again, CRASH_ENTRIES)
        assert not [path for path in after.rglob("*") if compaction_of(path.name)], "left-overs are settled"
        if step // STRIDE % 4 == 0:
            compact(again, transactional)
            check_alive(again, CRASH_ENTRIES)
            assert all(log.usage() == 1.0 for log in logs_of(again))
        again.close()
        shutil.rmtree(base)
        shutil.rmtree(after)
    assert step > 10, "the crash came between the steps"


def test_start_settles_apaches_interrupted_compaction(storage: BookieStorage, tmp_path: Path) -> None:
    """`<id>.log.compacting` is unfinished; `<id>.log.<source>.compacted` is complete, linked to `<id>.log` or not."""
    plain = next(each for each in logs_of(storage) if each.logger.version == 1)
    storage.close()
    directory = plain.path.parent
    unfinished = directory / "50.log.compacting"
    unfinished.write_bytes(plain.path.read_bytes()[:2000])
    linked = directory / f"{file_name(plain.log_id)}.1f.compacted"
    linked.hardlink_to(plain.path)
    finished = directory / f"51.log.{plain.log_id:x}.compacted"
    finished.write_bytes(plain.path.read_bytes())
    again = open_storage(storage.config, clock=0x9000)
    assert not unfinished.exists()
    assert not linked.exists()
    assert not finished.exists()
    assert (directory / "51.log").exists()
    check_alive(again)
    delete_dead(again)
    compact(again)
    check_alive(again)
    assert not (directory / "51.log").exists(), "the index never pointed there"


@pytest.mark.parametrize("kind", ["write", "create", "rename", "sync"])
def test_failing_disk_leaves_logs_unchanged(tmp_path: Path, kind: str) -> None:
    files = SimulatedFiles(tmp_path)
    storage = open_storage(config_for(tmp_path / "bookie"), files)
    fill(storage)
    delete_dead(storage)
    before = set(entry_logs(tmp_path / "bookie"))
    files.faults.append(Fault(kind, ".log" if kind == "rename" else ".compacting", errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        compact(storage)
    assert not files.faults
    assert set(entry_logs(tmp_path / "bookie")) >= before
    assert not list(tmp_path.rglob("*.compacting"))
    check_alive(storage)
    compact(storage)
    check_alive(storage)


@pytest.mark.parametrize("storage_class", ["interleaved", "sorted"])
def test_compacted_log_stays_while_the_disk_refuses_an_index_that_points_to_it(
    tmp_path: Path, storage_class: str
) -> None:
    root = tmp_path / "bookie"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = open_storage(config_for(root, storage_class), files)
    fill(storage)
    delete_dead(storage)
    kept = {log.path for log in logs_of(storage) if ALIVE[0] in log.ledgers}
    files.faults.append(Fault("sync", index_path(ALIVE[0]), errno.EIO, times=1000))
    gone = set()
    for _ in range(2):
        gone.update(compact(storage))
        check_alive(storage)
        for keep in (0.0, 1.0):
            image = files.crash(tmp_path / "image", keep=keep)
            check_alive(open_storage(config_for(image, storage_class)))
    assert storage.ledgers.unwritten == {ALIVE[0]}
    assert gone
    assert kept.isdisjoint(gone)
    files.faults.clear()
    assert kept.issubset(compact(storage))
    check_alive(storage)
    check_alive(open_storage(config_for(files.crash(tmp_path / "image"), storage_class)))


def test_compaction_needs_free_space(storage: BookieStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    delete_dead(storage)
    before = [each.path for each in logs_of(storage)]
    log = next(iter(logs_of(storage)))
    enough = log.remaining_size_bytes + SPARE_BYTES
    monkeypatch.setattr(storage.files, "disk_usage", lambda path: DiskUsage(1 << 40, enough - 1, 1))
    with pytest.raises(ReadOnlyBookie, match="No directory has room"):
        compactor_for(storage).compact(log)
    assert all(path.exists() for path in before)
    monkeypatch.setattr(storage.files, "disk_usage", lambda path: DiskUsage(1 << 40, enough, 1))
    compactor = compactor_for(storage)
    compactor.compact(log)
    compactor.flush()
    assert not log.path.exists()
    check_alive(storage)


def test_forced_compaction_frees_a_disk_with_room_for_one_log(
    storage: BookieStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_dead(storage)
    logs = sorted(logs_of(storage), key=lambda log: log.remaining_size_bytes)
    directories = {log.path.parent for log in logs}

    def used() -> int:
        return sum(path.stat().st_size for each in directories for path in each.glob("*.log*"))

    def usage_of(_: Path) -> DiskUsage:
        return DiskUsage(1 << 40, capacity - used(), 1)

    room = logs[-1].remaining_size_bytes + FORCED_SPARE_BYTES
    storage.config = storage.config.with_changes(is_force_gc_allow_when_no_space=True)
    monkeypatch.setattr(storage.files, "disk_usage", usage_of)
    capacity = used() + room - 1
    with pytest.raises(ReadOnlyBookie, match=f": {room - 1} bytes are free"):
        compactor_for(storage).compact(logs[-1])
    capacity, fullest = used() + room, 0

    def checkpoint() -> None:
        nonlocal fullest
        fullest = max(fullest, used())
        storage.run_checkpoint()

    compactor = compactor_for(storage, checkpoint=checkpoint)
    for log in logs:
        compactor.compact(log)
    compactor.flush()
    assert len(logs) > 1
    assert not any(log.path.exists() for log in logs)
    assert 0 < fullest < capacity
    check_alive(storage)


def test_damaged_log_stays_after_compaction(storage: BookieStorage) -> None:
    delete_dead(storage)
    log = next(iter(logs_of(storage)))
    rows = _rows(log)
    middle = rows[len(rows) // 2][2] & 0xFFFFFFFF
    with log.path.open("r+b") as file:
        file.seek(middle - 4)
        file.write(b"\x7f\xff\xff\xff")
    compactor = compactor_for(storage)
    with pytest.raises(UnreadableEntryLog, match="length"):
        compactor.compact(log)
    compactor.flush()
    assert log.path.exists()
    for ledger, entry_id, _ in rows[: len(rows) // 2]:
        if ledger in ALIVE:
            assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)


def test_stop_ends_a_throttled_compaction(storage: BookieStorage, tmp_path: Path) -> None:
    delete_dead(storage)
    before = set(entry_logs(tmp_path))
    stopped = threading.Event()
    slow = storage.config.with_changes(compaction_rate_by_entries=1, log_size_limit=1 << 20)
    compactor = EntryLogCompactor(
        slow, storage.ledgers, storage.files,
        checkpoint=storage.run_checkpoint, stopped=stopped, removed=lambda log: None,
    )  # fmt: skip
    compactor._throttle(1000, 0)
    timer = threading.Timer(0.05, stopped.set)
    timer.start()
    with pytest.raises(CompactionStopped):
        compactor.compact(next(iter(logs_of(storage))))
    timer.join()
    assert set(entry_logs(tmp_path)) == before
    assert not list(tmp_path.rglob("*.compacting"))


@pytest.mark.parametrize(
    ("settings", "amounts"),
    [
        ({"compaction_rate_by_entries": 100}, (10, 0)),
        ({"compaction_rate": 100}, (10, 0)),
        ({"is_throttle_by_bytes": True, "compaction_rate_by_bytes": 10_000}, (0, 1000)),
    ],
    ids=["by entries", "by entries, the old name", "by bytes"],
)
def test_compaction_limits_entries_or_bytes(
    settings: dict[str, Any], amounts: tuple[int, int], storage: BookieStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten amounts of a tenth of a second each: the clock has to stand nine tenths later."""
    now = 5.0
    stopped = threading.Event()

    def wait(seconds: float | None = None) -> bool:
        nonlocal now
        now += seconds or 0.0
        return False

    stopped.wait = wait  # type: ignore[method-assign]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now))
    compactor = EntryLogCompactor(
        BookieConfig(**settings), storage.ledgers, storage.files,
        checkpoint=storage.run_checkpoint, stopped=stopped, removed=lambda log: None,
    )  # fmt: skip
    for _ in range(10):
        compactor._throttle(*amounts)
    assert now == pytest.approx(5.9)
    stopped.set()
    with pytest.raises(CompactionStopped):
        compactor._throttle(*amounts)


# --- what logs hold -------------------------------------------------------------------------------------------------


def test_metadata_covers_complete_logs_and_logs_left_by_a_stop(storage: BookieStorage, tmp_path: Path) -> None:
    logs = logs_of(storage)
    in_use = {path for path in set(entry_logs(tmp_path)) - {each.path for each in logs} if _entries(path)}
    assert in_use
    storage.close()
    again = open_storage(storage.config, clock=0x9000)
    found = {each.path: each for each in logs_of(again)}
    assert in_use <= found.keys(), "a log without a map is read from end to end"
    for path, each in found.items():
        counted = _entries(path)
        assert each.total_size_bytes == sum(4 + len(body_of(*entry)) for entry in counted)


def test_unreadable_log_is_reported_once_and_ignored(storage: BookieStorage) -> None:
    log = next(iter(logs_of(storage)))
    with log.path.open("r+b") as file:
        file.write(b"XXXX")
    problems: list[Path] = []
    logs = EntryLogMetadataMap(storage.ledgers.entry_loggers, storage.ledgers)
    for _ in range(2):
        logs.extract(lambda path, error: problems.append(path))
    assert problems == [log.path]
    assert log.path not in {each.path for each in logs}


def test_usage_counts_small_logs_by_the_target_size(storage: BookieStorage) -> None:
    log = max(logs_of(storage), key=lambda each: len(each.ledgers))
    assert log.usage() == log.usage(1 << 30) == 1.0, "a small log without garbage is no candidate"
    total, first = log.total_size_bytes, sorted(log.ledgers)[0]
    size = log.ledgers[first]
    log.keep({first})
    assert log.usage() == size / total
    assert log.usage(total * 2) == size / (total * 2)
    log.keep(set())
    assert (log.usage(), log.ledgers, log.remaining_size_bytes) == (0.0, {}, 0)


def test_lists_a_ledger_that_leaves_memory_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its entries would look like garbage."""
    storage = open_storage(config_for(tmp_path, open_file_limit=1), SimulatedFiles(tmp_path))
    assert isinstance(storage.ledgers, SortedLedgerStorage)
    walk = storage.ledgers.persistence.ledgers

    def walk_and_flush() -> set[int]:
        found = walk()
        storage.run_checkpoint()
        return found

    for ledger in ALIVE:
        add(storage, ledger, 0)
    flush_journals(storage)
    monkeypatch.setattr(storage.ledgers.persistence, "ledgers", walk_and_flush)
    assert list(storage.ledgers.ledger_ids()) == ALIVE
    assert len(storage.ledgers.handles) < len(ALIVE), "some left memory"
    storage.close()


@pytest.mark.parametrize("storage_class", ["interleaved", "sorted"])
def test_deletes_a_ledger_with_a_damaged_index(tmp_path: Path, storage_class: str) -> None:
    storage = open_storage(config_for(tmp_path, storage_class), SimulatedFiles(tmp_path))
    fill(storage)
    storage.close()
    for ledger in DEAD:
        (path,) = tmp_path.glob(f"ledgers-*/current/{index_path(ledger)}")
        path.write_bytes(b"rubbish!" * 200)
    again = open_storage(storage.config, SimulatedFiles(tmp_path), clock=0x9000)
    delete_dead(again)
    assert sorted(again.ledgers.ledger_ids()) == ALIVE
    assert compact(again)
    check_alive(again)
    again.close()


def test_missing_entry_stays_missing_after_compaction(storage: BookieStorage) -> None:
    delete_dead(storage)
    compact(storage)
    with pytest.raises(EntryNotFound):
        storage.read_entry(ALIVE[0], ENTRIES)


def test_index_pages_of_many_small_ledgers_use_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path, page_limit=16, log_size_limit=16 * 1024)
    storage = open_storage(config)
    assert isinstance(storage.ledgers, SortedLedgerStorage)
    pages = storage.ledgers.pages
    alive = [LedgerId(0, number) for number in range(10, 310, 3)]
    for ledger in alive:
        add(storage, ledger, 0)
        add(storage, DEAD[0], ledger.ledger_id)
        if ledger.ledger_id % 4 == 0:
            storage.run_checkpoint()
    storage.delete_ledger(DEAD[0])
    storage.run_checkpoint()
    most = 0
    move = storage.ledgers.index.move

    def move_and_look(moves: Iterable[Move]) -> None:
        nonlocal most
        move(moves)
        most = max(most, pages.changed_count)

    monkeypatch.setattr(storage.ledgers.index, "move", move_and_look)
    assert compact(storage)
    assert 4 <= most < 4 + config.compaction_max_outstanding_requests
    for ledger in alive:
        assert bytes(storage.read_entry(ledger, 0)) == body_of(ledger, 0)
    storage.close()
