"""The entry logger: which logs are whole, logs that go and come by compaction, disks that fill up under an open log."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.disk import Files, StorageFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import file_name
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move

LEDGER, OTHER = LedgerId(0, 5), LedgerId(0, 6)


def open_logger(root: Path, files: Files | None = None, **changes: Any) -> EntryLogger:
    directories = [root / "a", root / "b"]
    files = files or Files()
    for each in directories:
        files.make_directory(each)
    settings = {"scoped": False, "size_limit": 4096, "pick_directory": lambda: 0} | changes
    return EntryLogger(directories, files, **settings)


def body_of(ledger: LedgerId, entry_id: int, size: int = 100) -> bytes:
    digests = DigestManager(ledger, DigestType.CRC32C, b"secret")
    return digests.seal(entry_id, entry_id - 1, size * (entry_id + 1), bytes(size)) + bytes(size)


def add(logger: EntryLogger, ledger: LedgerId, entry_id: int, size: int = 100) -> int:
    (location,) = logger.add_all(ledger, [record_of(body_of(ledger, entry_id, size))])
    return location


def test_log_counts_as_flushed_once_complete_and_synced(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    for entry_id in range(60):
        add(logger, LEDGER, entry_id)
    assert logger.flushed_log_ids() == []
    logger.write()
    assert logger.flushed_log_ids() == []
    logger.sync()
    assert logger.flushed_log_ids() == logger.log_ids[:-1] == [0, 1]
    assert open_logger(tmp_path).flushed_log_ids() == [0, 1, 2], "nothing is added to what was there at the start"


def test_batched_adds_have_the_locations_of_single_adds(tmp_path: Path) -> None:
    sizes = [0, 100, 3000, 1, 2000, 9000, 5, 4096 - 1024 - 4, 4096 - 1024 - 4 - 36, 7]
    trees = []
    for name in ("one", "some", "all"):
        logger = open_logger(tmp_path / name)
        bodies = [body_of(LEDGER, entry_id, size) for entry_id, size in enumerate(sizes)]
        count = {"one": 1, "some": 4, "all": len(bodies)}[name]
        locations = []
        for start in range(0, len(bodies), count):
            locations += logger.add_all(LEDGER, [record_of(body) for body in bodies[start : start + count]])
        logger.write()
        for entry_id, location in enumerate(locations):
            assert logger.read(location, LEDGER, entry_id) == bodies[entry_id]
        trees.append({path.name: path.read_bytes() for path in (tmp_path / name / "a").iterdir()} | {"at": locations})
    assert trees[0] == trees[1] == trees[2]


def test_removed_log_does_not_free_its_id(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    for entry_id in range(2):
        location = add(logger, LEDGER, entry_id)
        logger.stay_in([1])
    logger.write()
    logger.sync()
    assert logger.read(location, LEDGER, 1) == body_of(LEDGER, 1)
    for log_id in (0, 1, 1):
        logger.remove_log(log_id)
    assert logger.log_ids == logger.flushed_log_ids() == []
    with pytest.raises(FileNotFoundError):
        logger.read(location, LEDGER, 1)
    with pytest.raises(FileNotFoundError):
        logger.path_of(1)
    assert add(open_logger(tmp_path), LEDGER, 2) >> 32 == 2


def test_compaction_log_counts_once_finished(tmp_path: Path) -> None:
    logger = open_logger(tmp_path)
    add(logger, LEDGER, 0)
    log = logger.open_compaction_log()
    locations = [log.add(ledger, body_of(ledger, entry_id)) for ledger in (LEDGER, OTHER) for entry_id in range(3)]
    assert add(logger, LEDGER, 1) >> 32 == 0, "the bookie's own log goes on"
    assert logger.log_ids == [0]
    assert log.log_id == 1
    path = tmp_path / "a" / "1.log"
    assert path.with_name("1.log.compacting").exists()
    log.finish()
    assert not path.with_name("1.log.compacting").exists()
    assert logger.flushed_log_ids() == [1]
    assert logger.path_of(1) == path
    size = 3 * (len(body_of(LEDGER, 0)) + 4)
    with EntryLogReader.open(path) as reader:
        assert reader.ledgers_map() == {LEDGER: size, OTHER: size}
    assert [logger.read(locations[3 + each], OTHER, each) for each in range(3)] == [
        body_of(OTHER, each) for each in range(3)
    ]
    dropped = logger.open_compaction_log()
    dropped.add(LEDGER, body_of(LEDGER, 9))
    dropped.abort()
    assert {each.name for each in path.parent.iterdir()} == {"1.log", "lastId"}
    assert (path.parent / "lastId").read_text() == "2\n"


def test_start_settles_an_interrupted_compaction(tmp_path: Path) -> None:
    """The index may already point into a finished log, whatever its name; into an unfinished one it never does."""
    logger = open_logger(tmp_path)
    log = logger.open_compaction_log()
    location = log.add(LEDGER, body_of(LEDGER, 0))
    log.finish()
    directory = tmp_path / "a"
    data = (directory / "0.log").read_bytes()
    (directory / "0.log").rename(directory / "0.log.1f.compacted")
    (directory / "2.log").write_bytes(data)
    (directory / "2.log.1e.compacted").write_bytes(data)
    (directory / "3.log.compacting").write_bytes(data[:1500])
    again = open_logger(tmp_path)
    assert {each.name for each in directory.iterdir()} == {"0.log", "2.log", "lastId"}
    assert again.read(location, LEDGER, 0) == body_of(LEDGER, 0)


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_entries_leave_a_full_disk(tmp_path: Path, written: bool, closed: bool) -> None:
    files = SimulatedFiles(tmp_path, short_writes=True)
    picked = [0]
    logger = open_logger(tmp_path, files, size_limit=1 << 20, pick_directory=lambda: picked[0], preallocates=True)
    locations = []
    if written:
        locations += [add(logger, LEDGER, entry_id) for entry_id in range(2)]
        logger.write()
    before = len(locations)
    locations += [add(logger, LEDGER, entry_id) for entry_id in range(before, before + 3)]
    locations.append(add(logger, LEDGER, before + 3))
    if closed:
        logger.stay_in([1])
    files.faults.append(Fault("write" if written else "create", "/a/0.log", errno.ENOSPC, times=99))
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            logger.write()
    assert not logger.relocate(lambda moves: None), "there is nowhere else"
    with pytest.raises(OSError, match="No space"):
        logger.write()
    picked[0] = 1
    told: list[Move] = []

    assert logger.relocate(told.extend)
    files.faults.clear()
    assert [(move.entry_id, move.old) for move in told] == list(enumerate(locations))[before:]
    locations[before:] = [move.new for move in told]
    locations.append(add(logger, LEDGER, before + 4))
    logger.write()
    logger.sync()
    image = open_logger(files.crash(tmp_path / "image"))
    for entry_id, location in enumerate(locations):
        assert logger.read(location, LEDGER, entry_id) == body_of(LEDGER, entry_id)
        assert image.read(location, LEDGER, entry_id) == body_of(LEDGER, entry_id)
        assert image.path_of(location >> 32).parent.name == ("a" if entry_id < before else "b")
    if written:
        assert 0 in logger.flushed_log_ids()
        with EntryLogReader.open(image.path_of(0)) as reader:
            assert len(list(reader.records())) == before
    else:
        assert not (tmp_path / "a" / file_name(0)).exists()


@pytest.mark.parametrize("code", [None, errno.EMFILE])
def test_entries_stay_where_the_last_write_found_space(tmp_path: Path, code: int | None) -> None:
    files = SimulatedFiles(tmp_path)
    picked = [0]
    logger = open_logger(tmp_path, files, pick_directory=lambda: picked[0])
    location = add(logger, LEDGER, 0)
    files.faults.append(Fault("create", "/a/0.log", errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        logger.write()
    if code is None:
        logger.write()
    else:
        files.faults.append(Fault("create", "/a/0.log", code))
        with pytest.raises(OSError, match="Too many open files"):
            logger.write()
    picked[0] = 1
    assert not logger.relocate(lambda moves: pytest.fail("no entry is stuck on a full disk"))
    assert add(logger, LEDGER, 1) >> 32 == location >> 32
    logger.stay_in([1])
    logger.write()
    logger.sync()
    assert logger.flushed_log_ids() == [0]
    assert logger.read(location, LEDGER, 0) == body_of(LEDGER, 0)


def test_preallocates_the_next_log_in_the_same_directory(tmp_path: Path) -> None:
    logger = open_logger(tmp_path, preallocates=True)
    for entry_id in range(60):
        add(logger, LEDGER, entry_id)
        logger.write()
    logger.sync()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["0.log", "1.log", "2.log", "3.log", "lastId"]
    assert (tmp_path / "a" / "lastId").read_text() == "3\n"
    assert logger.flushed_log_ids() == [0, 1]
    with EntryLogReader.open(tmp_path / "a" / "3.log") as reader:
        assert list(reader.records()) == []
    assert add(open_logger(tmp_path), LEDGER, 0) >> 32 == 4


@pytest.mark.parametrize("ledger", [LEDGER, LedgerId(7, 5), LedgerId((1 << 64) - 1, 5)], ids=repr)
def test_read_following_stops_at_another_ledger(tmp_path: Path, ledger: LedgerId) -> None:
    logger = open_logger(tmp_path, scoped=ledger.is_scoped, size_limit=1 << 20)
    other = LedgerId(ledger.scope_id, 6) if ledger.is_scoped else OTHER
    locations = [add(logger, ledger, entry_id) for entry_id in range(5)]
    add(logger, other, 0)
    add(logger, ledger, 5)
    logger.write()
    size = len(body_of(ledger, 0)) + 4

    def following(entry_id: int, size_max: int) -> list[tuple[int, bytes]]:
        found = logger.read_following(locations[entry_id], ledger, size_max=size_max)
        return [(each, bytes(body)) for each, body in found]

    assert following(1, 1 << 20) == [(each, body_of(ledger, each)) for each in (1, 2, 3, 4)]
    assert [each for each, _ in following(0, 3 * size)] == [0, 1, 2]
    assert [each for each, _ in following(0, 3 * size - 1)] == [0, 1]
    assert following(0, 0) == []
    assert logger.read_following(locations[0], other, size_max=1 << 20) == []
    end = locations[0] + 7 * size
    assert logger.read_following(end, ledger, size_max=1 << 20) == []


def test_failed_preallocation_does_not_fail_the_current_log(tmp_path: Path) -> None:
    files = SimulatedFiles(tmp_path)
    logger = open_logger(tmp_path, files, preallocates=True)
    location = add(logger, LEDGER, 0)
    files.faults = [Fault("write", "a/1.log", errno.ENOSPC)]
    logger.write()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["0.log", "lastId"]
    logger.sync()
    assert logger.log_ids == [0]
    assert logger.read(location, LEDGER, 0) == body_of(LEDGER, 0)


def test_late_reader_does_not_keep_a_removed_log_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files()
    logger = open_logger(tmp_path, files)
    location = add(logger, LEDGER, 0)
    logger.write()
    opened: list[weakref.ref[StorageFile]] = []

    class OpenFile(StorageFile):
        """One that weak references may name."""

    def open_and_remove(path: Path) -> StorageFile:
        file = OpenFile(path, os.open(path, os.O_RDONLY))
        opened.append(weakref.ref(file))
        logger.remove_log(0)
        return file

    monkeypatch.setattr(files, "open_to_read", open_and_remove)
    assert logger.read(location, LEDGER, 0) == body_of(LEDGER, 0)
    assert [each() for each in opened] == [None], "it is closed"


def test_short_read_following_result_keeps_little_memory(tmp_path: Path) -> None:
    logger = open_logger(tmp_path, size_limit=1 << 20)
    first = add(logger, LEDGER, 0)
    add(logger, OTHER, 0, size=1 << 16)
    logger.write()
    ((_, body),) = logger.read_following(first, LEDGER, size_max=1 << 16)
    assert body == body_of(LEDGER, 0)
    assert len(body.obj) < 1000
