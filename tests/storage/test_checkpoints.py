"""Failures between the steps of a checkpoint, of a group commit and of a replay, and their limits."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from support.journals import flush_journals, settle
from support.servers import INTERLEAVED, SORTED
from support.simulated_disk import Fault, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.disk import Files, StorageFile
from bkctl.errors import BadRequest, BookieIOError, Corrupt
from bkctl.files.entry_log import EntryLogReader
from bkctl.formats import journal as journal_formats
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.index import HEADER_SIZE, write_header
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.entry_logger import Move

SETTINGS: dict[str, Any] = {}
Bodies = dict[tuple[LedgerId, int], bytes]


@pytest.fixture(params=[SORTED, INTERLEAVED], ids=["sorted", "interleaved"], autouse=True)
def storage_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test once for each storage class with index files."""
    monkeypatch.setitem(SETTINGS, "ledger_storage_class", request.param)


def open_storage(
    root: Path,
    files: Files | None = None,
    log_size_limit: int = 1 << 20,
    ledgers: tuple[str, ...] = ("ledgers",),
    page_limit: int = 16,
) -> BookieStorage:
    config = BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=tuple(str(root / each) for each in ledgers),
        journal_pre_alloc_size_mb=0,
        page_size=64,
        page_limit=page_limit,
        log_size_limit=log_size_limit,
        entry_log_file_preallocation_enabled=False,
    ).with_changes(**SETTINGS)
    storage = BookieStorage(config, files=files)
    storage.open()
    return storage


def add(storage: BookieStorage, ledger_id: int | LedgerId, entry_id: int, *, recovery: bool = False) -> bytes:
    ledger = ledger_id if isinstance(ledger_id, LedgerId) else LedgerId(0, ledger_id)
    digests = DigestManager(ledger, DigestType.CRC32C, b"secret")
    payload = f"entry {entry_id} of {ledger_id}".encode()
    body = digests.seal(entry_id, entry_id - 1, 100 * (entry_id + 1), payload) + payload
    storage.add(ledger, entry_id, digests.master_key, body, None, recovery)
    return body


def stored(storage: BookieStorage, ledger_id: int, entry_id: int) -> bytes:
    return bytes(storage.read_entry(LedgerId(0, ledger_id), entry_id))


def test_entries_added_while_a_checkpoint_writes_many_pages_are_kept(tmp_path: Path) -> None:
    """Pages that are being written stay in memory, and must not push out the one that an entry just went to."""
    storage = open_storage(tmp_path)
    for ledger_id in range(8):
        add(storage, ledger_id, 0)
    checkpoint = storage.checkpoints.begin()
    assert checkpoint is not None
    first = add(storage, 100, 0)
    second = add(storage, 100, 8)  # the next page
    flush_journals(storage)
    assert (stored(storage, 100, 0), stored(storage, 100, 8)) == (first, second)
    storage.checkpoints.write(checkpoint)
    storage.checkpoints.end(checkpoint, written=True)
    storage.run_checkpoint()
    again = open_storage(tmp_path)
    assert again.replayed == (0, 0)
    assert (stored(again, 100, 0), stored(again, 100, 8)) == (first, second)


def test_group_fails_with_the_group_of_its_ledger_key(tmp_path: Path) -> None:
    root = tmp_path / "work"
    root.mkdir()
    files = SimulatedFiles(root)
    storage = open_storage(root, files)
    batches = []
    for ledger_id, entry_id in ((1, 0), (1, 1)):
        add(storage, ledger_id, entry_id)
        batches.append(storage.commits[0].take_batch())
    failed, behind = batches
    assert failed is not None
    assert behind is not None
    files.faults.append(Fault("write", ".txn", errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as failure:
        storage.commits[0].commit(failed)
    settle(storage.commits[0], failed, failure.value)
    for entry_id in (0, 1):  # the first batch has the ledger's key
        add(storage, 2, entry_id)
        batches.append(storage.commits[0].take_batch())
    with_key, without_key = batches[2:]
    assert with_key is not None
    assert without_key is not None
    with pytest.raises(OSError, match="earlier group"):
        storage.commits[0].commit(behind, with_key)
    with pytest.raises(OSError, match="earlier group"):
        storage.commits[0].commit(without_key)
    for batch in (behind, with_key, without_key):
        settle(storage.commits[0], batch, failure.value)
    body = add(storage, 2, 2)
    flush_journals(storage)
    image = files.crash(tmp_path / "image")
    assert stored(open_storage(image), 2, 2) == body


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_failed_entry_log_sync_fails_every_later_sync(tmp_path: Path, code: int) -> None:
    """The system may have dropped the data: a mark behind it would let go of the only copy, the journal's."""
    files = SimulatedFiles(tmp_path)
    storage = open_storage(tmp_path, files)
    add(storage, 1, 0)
    flush_journals(storage)
    mark = (tmp_path / "ledgers/current/lastMark").read_bytes()
    files.faults.append(Fault("sync", ".log", code))
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be synced") as failure:
            storage.run_checkpoint()
        assert failure.value.errno == errno.EIO
    assert (tmp_path / "ledgers/current/lastMark").read_bytes() == mark


MARK = "ledgers/current/lastMark"
ONE = LedgerId(0, 1)


def with_two_ledgers(root: Path, ledger: LedgerId = ONE, **changes: Any) -> tuple[BookieStorage, Any, Bodies]:
    """A storage with entries of `ledger` and of ledger 2, some in their indexes, some in the journal alone."""
    root.mkdir(exist_ok=True)
    files = SimulatedFiles(root)
    storage = open_storage(root, files, **changes)
    bodies: Bodies = {}
    for entry_ids in (range(5), range(5, 12)):
        for entry_id in entry_ids:
            for each in (ledger, LedgerId(0, 2)):
                bodies[each, entry_id] = add(storage, each, entry_id)
        flush_journals(storage)
        if entry_ids[0] == 0:
            storage.run_checkpoint()
    return storage, files, bodies


def missing(storage: BookieStorage, bodies: Bodies) -> list[tuple[LedgerId, int]]:
    return [key for key, body in bodies.items() if bytes(storage.read_entry(*key)) != body]


@pytest.mark.parametrize(("kind", "code"), [("write", errno.EIO), ("sync", errno.EIO), ("write", errno.EFBIG)], ids=str)
@pytest.mark.parametrize("ledger", [LedgerId(0, 1), LedgerId(7, 1)], ids=str)
def test_index_that_the_disk_refuses_stays_with_its_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, code: int, ledger: LedgerId
) -> None:
    storage, files, bodies = with_two_ledgers(tmp_path / "work", ledger)
    mark = (tmp_path / "work" / MARK).read_bytes()
    files.faults.append(Fault(kind, "1.idx", code, times=3))
    for round_number in range(3):
        storage.run_checkpoint()
        assert caplog.text.count(f"Ledger {ledger} accepts no entries") == 1
        assert storage.ledgers.unwritten == {ledger}
        for recovery in (False, True):
            with pytest.raises(BookieIOError, match="refuses the index"):
                add(storage, ledger, 12, recovery=recovery)
        bodies[LedgerId(0, 2), 12 + round_number] = add(storage, 2, 12 + round_number)
        flush_journals(storage)
        assert missing(storage, bodies) == [], "from memory and logs"
        assert (tmp_path / "work" / MARK).read_bytes() == mark, "the journal has the only copy of what the index lacks"
        for keep in (0.0, 0.5, 1.0):
            again = open_storage(files.crash(tmp_path / "image", keep=keep))
            assert missing(again, bodies) == []
    assert not files.faults
    storage.run_checkpoint()
    assert "accepts entries again" in caplog.text
    assert not storage.ledgers.unwritten
    bodies[ledger, 12] = add(storage, ledger, 12)
    flush_journals(storage)
    storage.run_checkpoint()
    again = open_storage(files.crash(tmp_path / "image"))
    assert again.replayed == (0, 0)
    assert missing(again, bodies) == []


@pytest.mark.parametrize("ledger", [LedgerId(0, 1), LedgerId(7, 1)], ids=str)
def test_close_keeps_the_journals_of_a_ledger_whose_index_the_disk_refuses(tmp_path: Path, ledger: LedgerId) -> None:
    storage, files, bodies = with_two_ledgers(tmp_path / "work", ledger)
    files.faults.append(Fault("write", "1.idx", errno.EIO, times=9))
    storage.close()
    assert files.faults
    image = files.crash(tmp_path / "image")
    assert list((image / "journal").rglob("*.txn"))
    again = open_storage(image)
    assert again.replayed[0] > 0
    assert missing(again, bodies) == []
    again.close()
    assert open_storage(image).replayed == (0, 0)


def test_deleted_ledger_holds_no_mark_though_the_disk_refuses_its_index(tmp_path: Path) -> None:
    storage, files, bodies = with_two_ledgers(tmp_path)
    files.faults.append(Fault("sync", "1.idx", errno.EIO, times=99))
    storage.run_checkpoint()
    storage.delete_ledger(LedgerId(0, 1))
    storage.run_checkpoint()
    assert not storage.ledgers.unwritten
    body = add(storage, 1, 0)
    flush_journals(storage)
    files.faults.clear()
    storage.run_checkpoint()
    again = open_storage(tmp_path)
    assert again.replayed == (0, 0)
    assert stored(again, 1, 0) == body
    del bodies[LedgerId(0, 1), 0]
    assert missing(again, {key: body for key, body in bodies.items() if key[0] != LedgerId(0, 1)}) == []


@pytest.mark.parametrize("path", ["disk.check", "2.idx", "0.log", "ledgers/current/000/000"])
def test_checkpoint_fails_where_more_fails_than_one_index(tmp_path: Path, path: str) -> None:
    """A disk that takes no writes at all, the second ledger of two at most, an entry log, a directory."""
    storage, files, bodies = with_two_ledgers(tmp_path / "work", page_limit=4)
    mark = (tmp_path / "work" / MARK).read_bytes()
    kinds = ("write", "sync") if path != "ledgers/current/000/000" else ("sync",)
    faults = [Fault("sync", "1.idx", errno.EIO, times=99)]
    faults += [Fault(kind, path, errno.EIO, times=99) for kind in kinds]
    files.faults += faults
    with pytest.raises(OSError, match=r"Input/output|cannot be synced"):
        storage.run_checkpoint()
    assert (tmp_path / "work" / MARK).read_bytes() == mark
    files.faults.clear()
    assert missing(open_storage(files.crash(tmp_path / "image")), bodies) == []


def test_replay_sets_aside_a_ledger_with_an_unreadable_index_page(tmp_path: Path) -> None:
    """The disk fails behind the header, and only later: what was not replayed must not count as absent."""
    _, files, bodies = with_two_ledgers(tmp_path / "work", page_limit=99)
    image = files.crash(tmp_path / "image")
    files = SimulatedFiles(image)
    files.bad_bytes["1.idx"] = HEADER_SIZE + 5
    again = open_storage(image, files)
    assert list(again.set_aside) == [LedgerId(0, 1)]
    files.bad_bytes.clear()
    for entry_id in (0, 7, 11):
        assert stored(again, 2, entry_id) == bodies[LedgerId(0, 2), entry_id]
        with pytest.raises(Corrupt, match="set aside"):
            stored(again, 1, entry_id)
    with pytest.raises(Corrupt, match="set aside"):
        add(again, 1, 12)
    again.close()
    assert missing(open_storage(image), bodies) == []


def test_entry_log_completed_during_a_sync_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are written while a checkpoint syncs."""
    storage = open_storage(tmp_path, log_size_limit=1024 + 250)
    bodies = [add(storage, 1, entry_id) for entry_id in range(5)]
    plain_sync = StorageFile.sync
    completed = []

    def sync(file: StorageFile) -> None:
        plain_sync(file)
        if file.path.name == "0.log" and not completed:
            completed.append(file.path)
            bodies.extend(add(storage, 1, entry_id) for entry_id in range(5, 10))
            storage.seal_entries(1)
            storage.write_entries()

    monkeypatch.setattr(StorageFile, "sync", sync)
    flush_journals(storage)
    for _ in range(2):
        checkpoint = storage.checkpoints.begin()
        assert checkpoint is not None
        storage.checkpoints.write(checkpoint)
        storage.checkpoints.end(checkpoint, written=True)
        flush_journals(storage)
    assert completed
    again = open_storage(tmp_path)
    assert [stored(again, 1, entry_id) for entry_id in range(10)] == bodies


@pytest.mark.parametrize("sealed", [False, True])
def test_next_entry_log_leaves_a_full_directory(tmp_path: Path, sealed: bool) -> None:
    directories = ("ledgers-0", "ledgers-1")
    storage = open_storage(tmp_path, ledgers=directories)
    logs = [tmp_path / each / "current" for each in directories]
    storage.ledgers.set_writable([0], [0, 1])
    bodies = [add(storage, 1, entry_id) for entry_id in range(3)]
    if sealed:
        storage.seal_entries(1)
        storage.write_entries()
        bodies.append(add(storage, 1, 3))
    storage.ledgers.set_writable([], [0, 1])  # no reason to roll: there is nowhere else
    bodies += [add(storage, 1, entry_id) for entry_id in range(len(bodies), 6)]
    storage.ledgers.set_writable([1], [0, 1])
    bodies.append(add(storage, 1, 6))
    flush_journals(storage)
    assert [stored(storage, 1, entry_id) for entry_id in range(7)] == bodies, "from memory"
    storage.run_checkpoint()
    found = {log.stem: log.parent for each in logs for log in each.glob("*.log")}
    in_logs = 3 if sealed else 0
    assert found == ({"0": logs[0], "1": logs[1]} if in_logs else {"0": logs[1]})
    if in_logs:
        with EntryLogReader.open(logs[0] / "0.log") as reader:
            assert reader.ledgers_map() == {LedgerId(0, 1): sum(len(body) + 4 for body in bodies[:in_logs])}
    again = open_storage(tmp_path, ledgers=directories)
    assert again.replayed == (0, 0)
    assert [stored(again, 1, entry_id) for entry_id in range(7)] == bodies


def test_replay_sets_aside_a_ledger_with_a_damaged_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Raised on, the damage could also pass for a torn group of the journal, and end the replay."""
    storage = open_storage(tmp_path)
    add(storage, 1, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    storage = open_storage(tmp_path)
    add(storage, 1, 1)
    waiting = stored(storage, 1, 1)
    body = add(storage, 2, 0)
    flush_journals(storage)
    (index,) = (tmp_path / "ledgers").rglob("1.idx")
    whole = index.read_bytes()
    index.write_bytes(whole[:8] + b"\xff\xff\xff\xff" + whole[12:])
    bodies = []
    for round_number in range(2):
        again = open_storage(tmp_path)
        assert list(again.set_aside) == [LedgerId(0, 1)]
        assert "Ledger 1 is set aside" in caplog.text
        assert stored(again, 2, 0) == body
        with pytest.raises(Corrupt):
            again.get(LedgerId(0, 1))
        bodies.append(add(again, 3, round_number))
        flush_journals(again)
        again.run_checkpoint()
        if round_number:
            again.close()
    index.write_bytes(whole)
    mended = open_storage(tmp_path)
    assert not mended.set_aside
    assert stored(mended, 1, 1) == waiting, "its records were still in the journal"
    assert [stored(mended, 3, entry_id) for entry_id in range(2)] == bodies
    mended.run_checkpoint()
    assert open_storage(tmp_path).replayed == (0, 0)


def test_compaction_moves_the_entries_of_a_ledger_whose_header_is_damaged(tmp_path: Path) -> None:
    """Else its log, and those that are compacted together with it, would be copied in each round and never go."""
    storage = open_storage(tmp_path)
    body = add(storage, 1, 0)
    other = add(storage, 2, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    (index,) = (tmp_path / "ledgers").rglob("1.idx")
    whole = index.read_bytes()
    index.write_bytes(b"XXXX" + whole[4:])
    again = open_storage(tmp_path)
    logger = again.ledgers.entry_loggers[0]
    log = logger.open_compaction_log()
    moves = []
    for ledger, copy in ((LedgerId(0, 1), body), (LedgerId(0, 2), other)):
        old = again.ledgers.pages.location(ledger, 0)
        moves.append(Move(ledger, 0, old, log.add(ledger, copy)))
    log.finish()
    again.ledgers.index_of(logger).move(moves)
    again.run_checkpoint()
    damaged = index.read_bytes()
    assert damaged[:1024] == b"XXXX" + whole[4:1024]
    index.write_bytes(whole[:4] + damaged[4:])
    (tmp_path / "ledgers/current/0.log").unlink()
    mended = open_storage(tmp_path)
    assert (stored(mended, 1, 0), stored(mended, 2, 0)) == (body, other)


def test_deleting_set_aside_ledgers_releases_the_journals(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, 1, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    add(storage, 1, 1)
    flush_journals(storage)
    (index,) = (tmp_path / "ledgers").rglob("1.idx")
    index.write_bytes(b"XXXX" + index.read_bytes()[4:])
    again = open_storage(tmp_path)
    mark = (tmp_path / "ledgers/current/lastMark").read_bytes()
    again.run_checkpoint()
    assert (tmp_path / "ledgers/current/lastMark").read_bytes() == mark
    again.delete_ledger(LedgerId(0, 1))
    again.run_checkpoint()
    last = open_storage(tmp_path)
    assert (last.set_aside, last.replayed) == ({}, (0, 0))


@pytest.mark.parametrize("key", [b"", b"k" * 3, b"k" * 21, b"k" * 1000, b"k" * 100_000], ids=len)
def test_replay_keeps_the_entries_of_a_ledger_whose_master_key_is_not_20_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: bytes
) -> None:
    """Earlier releases journaled such keys; an index file has no room for the long ones."""
    storage = open_storage(tmp_path)
    good = add(storage, 1, 0)
    ledger = LedgerId(0, 2)
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    body = by.seal(0, -1, 1, b"a") + b"a"
    journal = storage.commits[0].batch
    journal.records += [journal_formats.ledger_key_record(ledger, key), record_of(body)]
    journal.records.append(journal_formats.fence_record(ledger))
    journal.size = sum(map(len, journal.records))
    flush_journals(storage)
    again = open_storage(tmp_path)
    assert f"Ledger 2 has a master key of {len(key)} bytes" in caplog.text
    assert stored(again, 1, 0) == good
    assert stored(again, 2, 0) == body
    again = open_storage(tmp_path)
    assert stored(again, 2, 0) == body
    handle = again.get(ledger)
    assert handle is not None
    assert (handle.fenced, handle.master_key) == (True, b"")
    again.add(ledger, 1, by.master_key, by.seal(1, 0, 2, b"b") + b"b", None, True)
    assert handle.master_key == by.master_key, "the next writer's key binds it"


@pytest.mark.parametrize("key", [b"", b"k" * 19, b"k" * 21, b"k" * 5000], ids=len)
def test_refuses_master_keys_that_are_not_20_bytes(tmp_path: Path, key: bytes) -> None:
    storage = open_storage(tmp_path)
    for ledger in (LedgerId(0, 2), LedgerId(7, 2)):
        by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        with pytest.raises(BadRequest, match="master key"):
            storage.add(ledger, 0, key, by.seal(0, -1, 1, b"a") + b"a", None)
        with pytest.raises(BadRequest, match="master key"):
            storage.fence(ledger, key, lambda _: None)
        with pytest.raises(BadRequest, match="master key"):
            storage.write_lac(ledger, key, by.seal_lac(0), lambda _: None)
        assert storage.get(ledger) is None
    assert storage.commits[0].take_batch() is None


def test_an_index_file_with_a_long_master_key_is_served_and_written(tmp_path: Path) -> None:
    """Another bookie may have written it; the explicit LAC finds no room beside the key."""
    storage = open_storage(tmp_path)
    add(storage, 1, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    (index,) = (tmp_path / "ledgers").rglob("1.idx")
    key = b"k" * 1000
    index.write_bytes(write_header(key) + index.read_bytes()[1024:])
    again = open_storage(tmp_path)
    ledger = LedgerId(0, 1)
    by = DigestManager(ledger, DigestType.CRC32C)
    again.write_lac(ledger, key, by.seal_lac(0), lambda _: None)
    again.fence(ledger, key, lambda _: None)
    body = add(again, 2, 0)
    flush_journals(again)
    again.run_checkpoint()
    final = open_storage(tmp_path)
    handle = final.get(ledger)
    assert handle is not None
    assert (handle.fenced, handle.master_key, handle.explicit_lac) == (True, key, b"")
    assert stored(final, 2, 0) == body


@pytest.mark.parametrize("before_count", range(0, 40, 3))
def test_master_key_of_zeros_does_not_count_as_torn(tmp_path: Path, before_count: int) -> None:
    """Some clients' keys are not digests; here at several places of a sector, across its end too."""
    storage = open_storage(tmp_path)
    for entry_id in range(before_count):
        add(storage, 1, entry_id)
    ledger = LedgerId(0, 2)
    body = DigestManager(ledger, DigestType.CRC32C).seal(0, -1, 1, b"a") + b"a"
    storage.add(ledger, 0, bytes(20), body, None)
    flush_journals(storage)
    assert stored(open_storage(tmp_path), 2, 0) == body
