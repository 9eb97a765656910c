"""The bytes that a bookie's storage writes, held against the readers and against counts worked out by hand."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.journals import flush_journals
from support.servers import DB, INTERLEAVED, SORTED
from support.simulated_disk import SimulatedCrash, SimulatedFiles

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import (
    BadRequest,
    Conflict,
    Corrupt,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    Unsupported,
    UsageError,
)
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.files.journal import JournalReader
from bkctl.files.rocksdb import LedgersDatabase
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.index import LedgerData, index_path
from bkctl.formats.names import CONVERSION_NAME
from bkctl.formats.record import RecordType, record_of
from bkctl.ids import LedgerId
from bkctl.storage import open_ledgers
from bkctl.storage.bookie_storage import BookieStorage, check_index
from bkctl.storage.ledger import index_persistence

PLAIN, SCOPED = LedgerId(0, 0x1234), LedgerId(7, 0x1234)
SETTINGS: dict[str, Any] = {}


@pytest.fixture(params=[SORTED, INTERLEAVED], ids=["sorted", "interleaved"], autouse=True)
def storage_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test once for each storage class with index files."""
    monkeypatch.setitem(SETTINGS, "ledger_storage_class", request.param)


def config_for(root: Path, **changes: Any) -> BookieConfig:
    return BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers"),),
        journal_pre_alloc_size_mb=1,
        entry_log_file_preallocation_enabled=False,
    ).with_changes(**SETTINGS | changes)


def open_storage(root: Path, **changes: Any) -> BookieStorage:
    clock = iter(range(0x1000, 0x100000))
    storage = BookieStorage(config_for(root, **changes), clock_ms=lambda: next(clock), chance=random.Random(1))
    storage.open()
    return storage


def body_of(ledger: LedgerId, entry_id: int, payload: bytes = b"hello", lac: int | None = None) -> bytes:
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    return by.seal(entry_id, entry_id - 1 if lac is None else lac, len(payload) * (entry_id + 1), payload) + payload


def key_of(ledger: LedgerId) -> bytes:
    return DigestManager(ledger, DigestType.CRC32C, b"secret").master_key


def add(storage: BookieStorage, ledger: LedgerId, *entry_ids: int, payload: bytes = b"hello") -> None:
    for entry_id in entry_ids:
        storage.add(ledger, entry_id, key_of(ledger), body_of(ledger, entry_id, payload), None)


def records_of(root: Path) -> list[tuple[int, Any]]:
    """(version of the file, record) over all journals, in order; padding too."""
    found = []
    for path in sorted((root / "journal" / "current").rglob("*.txn"), key=lambda path: int(path.stem, 16)):
        with JournalReader.open(path) as reader:
            found += [(reader.version, record) for record in reader.records(padding=True)]
    return found


def test_journal_of_one_ledger_byte_for_byte(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0, 1)
    flush_journals(storage)
    add(storage, PLAIN, 2)
    storage.fence(PLAIN, key_of(PLAIN), lambda error: None)
    flush_journals(storage)
    key = key_of(PLAIN)
    ids = PLAIN.ledger_id.to_bytes(8, "big")
    first = struct.pack(">i8sqi20s", 40, ids, -0x1000, 20, key)
    for entry_id in (0, 1):
        body = body_of(PLAIN, entry_id)
        first += struct.pack(">i", len(body)) + body
    (path,) = (tmp_path / "journal" / "current").glob("*.txn")
    data = path.read_bytes()
    first += struct.pack(">ii", -0x100, 512 - len(first) - 8) + bytes(512 - len(first) - 8)
    body = body_of(PLAIN, 2)
    second = struct.pack(">i", len(body)) + body + struct.pack(">i8sq", 16, ids, -0x2000)
    second += struct.pack(">ii", -0x100, 512 - len(second) - 8) + bytes(512 - len(second) - 8)
    assert path.name == "1001.txn"
    assert data[:512] == b"BKLG" + struct.pack(">i", 6) + bytes(504)
    assert data[512:1536] == first + second
    assert data[1536:] == bytes((1 << 20) + 512 - 1536), "one step of preallocation"


@pytest.mark.parametrize("last_storage", [None, DB], ids=["", "db"])
def test_batched_adds_write_the_same_files_as_single_adds(tmp_path: Path, last_storage: str | None) -> None:
    chance = random.Random(5)
    # In any order, some of them twice, over pages of the index and entry logs; and alone.
    ids = [*range(150), 149, 7, *range(400, 380, -1), *(chance.randrange(500) for _ in range(60))]
    runs: list[tuple[LedgerId, list[tuple[int, bytes]]]] = []
    while ids:
        ledger = chance.choice((PLAIN, SCOPED, LedgerId(0, 5)))
        count = chance.choice((1, 2, 30))
        runs.append((ledger, [(each, bytes([each % 251]) * (each * 37 % 300)) for each in ids[:count]]))
        del ids[:count]
    found = []
    for name in ("alone", "at once"):
        root = tmp_path / name
        changes = {"log_size_limit": 6000, "page_size": 512} | (
            {"ledger_storage_class": last_storage} if last_storage else {}
        )
        storage = open_storage(root, **changes)
        expected: dict[tuple[LedgerId, int], bytes] = {}
        for number, (ledger, entries) in enumerate(runs):
            bodies = {entry_id: body_of(ledger, entry_id, payload) for entry_id, payload in entries}
            expected |= {(ledger, entry_id): body for entry_id, body in bodies.items()}
            if name == "alone":
                for entry_id, payload in entries:
                    storage.add(ledger, entry_id, key_of(ledger), body_of(ledger, entry_id, payload), None)
            else:
                records = [record_of(body_of(ledger, entry_id, payload)) for entry_id, payload in entries]
                entry_ids = [entry_id for entry_id, _ in entries]
                size = sum(map(len, records))
                storage.add_records(ledger, key_of(ledger), entry_ids, records, size, max(entry_ids) - 1, None)
                assert bytes(storage.read_entry(ledger, entry_ids[0])) == bodies[entry_ids[0]]
            if number % 5 == 0:
                flush_journals(storage)
            if number % 7 == 0:
                storage.run_checkpoint()
        flush_journals(storage)
        assert sum(commits.batch.count for commits in storage.commits) == 0
        handles = storage.ledgers.handles.values()
        lacs = {handle.ledger: max(handle.lac, storage.read_lac(handle)) for handle in handles}
        for (ledger, entry_id), body in expected.items():
            assert bytes(storage.read_entry(ledger, entry_id)) == body
        storage.close()
        kinds = ("*.txn", "*.log", "*.idx")
        files = {path.relative_to(root): path.read_bytes() for kind in kinds for path in root.rglob(kind)}
        # RocksDB's own logs of what it did have the time in them.
        found.append((lacs, {path: data for path, data in files.items() if "locations" not in str(path)}))
        again = open_storage(root, **changes)
        for (ledger, entry_id), body in expected.items():
            assert bytes(again.read_entry(ledger, entry_id)) == body
        again.close()
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


@pytest.mark.parametrize("size", [0, 1, 100, 469, 470, 471, 472, 473, 480, 5000])
def test_groups_end_on_the_alignment(tmp_path: Path, size: int) -> None:
    storage = open_storage(tmp_path)
    for entry_id in range(3):
        add(storage, PLAIN, entry_id, payload=bytes(size))
        flush_journals(storage)
        assert storage.journals[0].mark.offset % 512 == 0
    entries = [record for _, record in records_of(tmp_path) if record.type is RecordType.ENTRY]
    assert [record.entry_id for record in entries] == [0, 1, 2]
    assert [record.body for record in entries] == [body_of(PLAIN, each, bytes(size)) for each in range(3)]


def test_scoped_entry_takes_nine_bytes_more(tmp_path: Path) -> None:
    """In the journal and in the entry log; in the ledgers map and the key record, 8 and 9 bytes a ledger."""
    count, sizes = 200, {}
    for ledger in (PLAIN, SCOPED):
        root = tmp_path / str(ledger.scope_id)
        storage = open_storage(root)
        for entry_id in range(count):
            add(storage, ledger, entry_id, payload=bytes(entry_id * 7))
        flush_journals(storage)
        storage.run_checkpoint()
        in_journal = [record for _, record in records_of(root) if record.type is RecordType.ENTRY]
        assert len(in_journal) == count
        (path,) = (root / "ledgers" / "current").rglob("*.log")
        sizes[ledger] = (
            sum(4 + record.record_size for record in in_journal),
            path.stat().st_size,
            (root / "ledgers" / "current" / storage.get(ledger).index_path).stat().st_size,  # type: ignore[union-attr]
        )
    plain, scoped = sizes[PLAIN], sizes[SCOPED]
    assert scoped[0] - plain[0] == 9 * count
    assert scoped[1] - plain[1] == 9 * count
    assert scoped[2] == plain[2]


def test_rolled_entry_logs_have_a_ledgers_map_and_a_last_id(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, log_size_limit=4096)
    ledgers = [LedgerId(scope_id, ledger_id) for ledger_id in (1, 2) for scope_id in (0, 7, 8)]
    for entry_id in range(30):
        for ledger in ledgers:
            add(storage, ledger, entry_id, payload=bytes(100))
    storage.run_checkpoint()
    current = tmp_path / "ledgers" / "current"
    for directory, scoped, version in ((current, False, 1), (current / "scoped", True, 2)):
        paths = sorted(directory.glob("*.log"), key=lambda path: int(path.stem, 16))
        assert [path.stem for path in paths] == [f"{number:x}" for number in range(len(paths))]
        assert len(paths) > 1
        assert (directory / "lastId").read_text() == f"{len(paths) - 1:x}\n"
        for path in paths:
            with EntryLogReader.open(path) as reader:
                assert reader.header.version == version
                counted: dict[LedgerId, int] = {}
                for record in reader.records():
                    if record.type is RecordType.ENTRY:
                        counted[record.ledger] = counted.get(record.ledger, 0) + record.record_size + 4
                        assert record.ledger.is_scoped == scoped
                if path == paths[-1]:
                    assert reader.header.ledgers_map_offset == 0, "the log that is written has none"
                else:
                    assert reader.ledgers_map() == counted
                    assert reader.header.ledgers_count == len(counted)
                    assert path.stat().st_size <= 4096 + 4 + 20 + 24 * len(counted)


def test_entry_log_ids_are_never_reused(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    storage.close()
    current = tmp_path / "ledgers" / "current"
    (current / "1a.log").write_bytes(b"")
    (current / "lastId").write_text("1f\n")
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 1)
    storage.run_checkpoint()
    assert {path.name for path in current.glob("*.log")} == {"0.log", "1a.log", "20.log"}


def test_index_files_match_apache(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0, 1023, 5000)
        storage.write_lac(
            ledger, key_of(ledger), DigestManager(ledger, DigestType.CRC32C).seal_lac(3), lambda error: None
        )
        storage.fence(ledger, key_of(ledger), lambda error: None)
    header_only = LedgerId(0, 0x6B00FE09)
    storage.fence(header_only, key_of(header_only), lambda error: None)
    flush_journals(storage)
    storage.run_checkpoint()
    current = tmp_path / "ledgers" / "current"
    paths = {
        PLAIN: current / "12" / "34" / "1234.idx",
        SCOPED: current / "00000000" / "00000007" / "00000000" / "00001234.idx",
        header_only: current / "fe" / "9" / "6b00fe09.idx",
    }
    assert set(current.rglob("*.idx")) == set(paths.values())
    for ledger, path in paths.items():
        data = path.read_bytes()
        pages = 0 if ledger == header_only else 5
        assert len(data) == 1024 + 8192 * pages
        packet = b"" if ledger == header_only else DigestManager(ledger, DigestType.CRC32C).seal_lac(3)
        head = b"BKLE" + struct.pack(">ii20sii", 1, 20, key_of(ledger), 1, len(packet)) + packet
        assert data[:1024] == head.ljust(1024, b"\0")
        with LedgerIndexReader.open(path) as reader:
            found = {entry_id for entry_id, _ in reader.locations()}
        assert found == (set() if ledger == header_only else {0, 1023, 5000})


def test_fence_writes_no_key_record_if_the_index_has_the_key(tmp_path: Path) -> None:
    """As Apache's: the key goes before a ledger's first entry of a run; a new ledger's also before its first fence."""
    storage = open_storage(tmp_path)
    storage.fence(PLAIN, key_of(PLAIN), lambda error: None)
    flush_journals(storage)
    assert [record.type for _, record in records_of(tmp_path)] == [
        RecordType.LEDGER_KEY,
        RecordType.FENCE,
        RecordType.PADDING,
    ]
    add_again = LedgerId(0, 9)
    add(storage, add_again, 0)
    storage.close()
    storage = open_storage(tmp_path)
    storage.fence(add_again, key_of(add_again), lambda error: None)
    flush_journals(storage)
    assert [record.type for _, record in records_of(tmp_path)][-2:] == [RecordType.FENCE, RecordType.PADDING]


def test_scoped_records_go_to_version_7_journals_only(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    flush_journals(storage)
    add(storage, SCOPED, 0)
    flush_journals(storage)
    add(storage, PLAIN, 1)
    flush_journals(storage)
    found = [(version, record.ledger, record.entry_id) for version, record in records_of(tmp_path)]
    assert (6, PLAIN, 0) in found
    assert (7, SCOPED, 0) in found
    assert (7, PLAIN, 1) in found, "once a bookie has scoped ledgers, its journals stay version 7"
    assert not any(version == 6 and ledger.is_scoped and entry_id >= 0 for version, ledger, entry_id in found)
    again = open_storage(tmp_path)
    add(again, PLAIN, 2)
    flush_journals(again)
    assert records_of(tmp_path)[-1][0] == 7


def test_checkpoint_deletes_rolled_journals(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, journal_max_size_mb=0, journal_max_backups=2)
    current = tmp_path / "journal" / "current"
    for entry_id in range(8):
        add(storage, PLAIN, entry_id)
        flush_journals(storage)
    ids = sorted(int(path.stem, 16) for path in current.glob("*.txn"))
    assert len(ids) == 9, "one of the start, and one a group"
    storage.run_checkpoint()
    assert sorted(int(path.stem, 16) for path in current.glob("*.txn")) == ids[-3:], "the mark's, and two before it"


def test_replay_restores_changes_since_the_last_checkpoint(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, journal_max_size_mb=0)
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0)
        flush_journals(storage)
    storage.run_checkpoint()
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 1, 2)
        flush_journals(storage)
    again = open_storage(tmp_path)
    assert again.replayed == (4, 0)
    for ledger in (PLAIN, SCOPED):
        assert [bytes(again.read_entry(ledger, each)) for each in range(3)] == [body_of(ledger, e) for e in range(3)]
        handle = again.get(ledger)
        assert handle is not None
        assert max(handle.lac, again.read_lac(handle)) == 1


def test_missing_marked_journal_stops_the_start(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    for path in (tmp_path / "journal" / "current").glob("*.txn"):
        path.unlink()
    with pytest.raises(Corrupt, match=r"is missing, but the last mark names it"):
        open_storage(tmp_path)


def test_journal_damage_stops_the_start_unless_configured_otherwise(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for entry_id in range(6):
        add(storage, PLAIN, entry_id)
        flush_journals(storage)
    (path,) = (tmp_path / "journal" / "current").glob("*.txn")
    data = bytearray(path.read_bytes())
    data[1024:1028] = struct.pack(">i", -7)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=f"{path.name}.*length -7 at byte 1024"):
        open_storage(tmp_path)
    storage = open_storage(tmp_path, skip_replay_journal_invalid_record=True)
    assert bytes(storage.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
    with pytest.raises(EntryNotFound):
        storage.read_entry(PLAIN, 5)


def test_replay_refuses_an_unknown_entry_format_and_says_what_to_do(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for entry_id in range(3):
        add(storage, PLAIN, entry_id)
        flush_journals(storage)
    (path,) = (tmp_path / "journal" / "current").glob("*.txn")
    data = bytearray(path.read_bytes())
    assert data[1028] == 0  # the first byte of entry 1
    data[1028] = 0xFF
    path.write_bytes(data)
    for skips in (False, True):
        with pytest.raises(Unsupported, match=f"{path.name}.*0xff.*entry format version 7") as refused:
            open_storage(tmp_path, skip_replay_journal_invalid_record=skips)
        assert "restore the file" in str(refused.value.hint)


def test_deleted_ledger_can_be_recreated(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0, 1)
    flush_journals(storage)
    storage.run_checkpoint()
    storage.delete_ledger(PLAIN)
    with pytest.raises(LedgerNotFound):
        storage.read_entry(PLAIN, 0)
    with pytest.raises(LedgerNotFound):
        storage.delete_ledger(PLAIN)
    assert bytes(storage.read_entry(SCOPED, 1)) == body_of(SCOPED, 1)
    assert list(storage.ledgers.ledger_ids()) == [SCOPED]
    add(storage, PLAIN, 1)
    storage.run_checkpoint()
    with pytest.raises(EntryNotFound):
        storage.read_entry(PLAIN, 0)
    assert bytes(storage.read_entry(PLAIN, 1)) == body_of(PLAIN, 1)


def test_fenced_and_deleted_ledger_refuses_writes_for_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, leap_ms = 1000.0, 0
    monkeypatch.setattr(open_ledgers, "time", SimpleNamespace(monotonic=lambda: now_s))
    storage = BookieStorage(config_for(tmp_path), clock_ms=lambda: 1_700_000_000_000 + leap_ms)
    storage.open()
    for ledger in (PLAIN, SCOPED):
        add(storage, ledger, 0)
        storage.fence(ledger, key_of(ledger), lambda _: None)
        flush_journals(storage)
        storage.run_checkpoint()
        storage.delete_ledger(ledger)
    day = 24 * 3600
    leap_ms = 365 * day * 1000  # the clock on the wall, set right
    for days in (0, 6, 6):  # each that is refused makes it a week again
        now_s += days * day
        for ledger in (PLAIN, SCOPED):
            for recovery in (False, True):
                with pytest.raises(LedgerFenced, match="deleted"):
                    storage.add(ledger, 1, key_of(ledger), body_of(ledger, 1), None, recovery)
            with pytest.raises(LedgerNotFound, match="deleted"):
                storage.fence(ledger, key_of(ledger), lambda _: None)
            by = DigestManager(ledger, DigestType.CRC32C, b"secret")
            with pytest.raises(LedgerNotFound, match="deleted"):
                storage.write_lac(ledger, key_of(ledger), by.seal_lac(0), lambda _: None)
            with pytest.raises(LedgerNotFound):
                storage.read_entry(ledger, 0)
    now_s += 8 * day
    add(storage, PLAIN, 0)
    assert bytes(storage.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
    add(storage, LedgerId(0, 99), 0)
    flush_journals(storage)
    storage.delete_ledger(LedgerId(0, 99))
    add(storage, LedgerId(0, 99), 0)  # it was not fenced


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
@pytest.mark.parametrize("changes", [{}, {"ledger_storage_class": DB}], ids=["files", "db"])
def test_entries_that_end_behind_their_lac_survive_a_crash(
    tmp_path: Path, ledger: LedgerId, changes: dict[str, Any]
) -> None:
    bodies = [body_of(ledger, rest)[: (33 if ledger.is_scoped else 24) + rest] for rest in range(8)]
    storage = open_storage(tmp_path / "first", **changes)
    for entry_id, body in enumerate(bodies):
        storage.add(ledger, entry_id, key_of(ledger), body, None)
    flush_journals(storage)
    for name in ("crashed", "crashed again"):
        shutil.copytree(tmp_path / "first", tmp_path / name)
        again = open_storage(tmp_path / name, **changes)
        assert [bytes(again.read_entry(ledger, entry_id)) for entry_id in range(8)] == bodies
        assert again.read_lac(again.get(ledger)) == 6
        again.close()
        storage.write_entries()
    with pytest.raises(BadRequest):
        storage.add(ledger, 9, key_of(ledger), body_of(ledger, 9)[: 32 if ledger.is_scoped else 23], None)


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
@pytest.mark.parametrize("lost", ["all", "first sector", "header"])
def test_index_without_its_start_is_corrupt_once_replay_is_over(tmp_path: Path, ledger: LedgerId, lost: str) -> None:
    storage = open_storage(tmp_path)
    add(storage, ledger, 0, 1)
    storage.fence(ledger, key_of(ledger), lambda _: None)
    flush_journals(storage)
    storage.close()
    path = tmp_path / "ledgers" / "current" / index_path(ledger)
    size = {"all": 0, "first sector": 512, "header": 1024}[lost]
    path.write_bytes(bytes(size) + path.read_bytes()[size:] if size else b"")
    storage = open_storage(tmp_path)
    requests: list[Callable[[], object]] = [
        lambda: storage.read_entry(ledger, 0),
        lambda: storage.get(ledger),
        lambda: add(storage, ledger, 2),
        lambda: storage.fence(ledger, key_of(ledger), lambda _: None),
        lambda: storage.write_lac(
            ledger, key_of(ledger), DigestManager(ledger, DigestType.CRC32C).seal_lac(0), lambda _: None
        ),
    ]
    for request in requests:
        with pytest.raises(Corrupt, match="start of the ledger's index is missing"):
            request()
    storage.delete_ledger(ledger)
    storage.run_checkpoint()
    assert not path.exists()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
@pytest.mark.parametrize("has_key", [True, False], ids=["key", "no key"])
def test_replay_restores_the_start_of_an_index_if_it_has_the_key(
    tmp_path: Path, ledger: LedgerId, has_key: bool
) -> None:
    storage = open_storage(tmp_path)
    add(storage, ledger, 0, 1)
    flush_journals(storage)
    storage.run_checkpoint()
    if has_key:
        storage._handles.clear()
    add(storage, ledger, 2)
    flush_journals(storage)
    path = tmp_path / "ledgers" / "current" / index_path(ledger)
    path.write_bytes(bytes(512) + path.read_bytes()[512:])
    storage = open_storage(tmp_path)
    if not has_key:
        with pytest.raises(Corrupt, match="set aside"):
            storage.get(ledger)
        return
    for _ in range(2):
        for entry_id in range(3):
            assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
        storage.close()
        storage = open_storage(tmp_path)


def test_deleted_scoped_ledgers_leave_no_directories(tmp_path: Path) -> None:
    current = tmp_path / "ledgers" / "current"

    def directories() -> int:
        return sum(path.is_dir() for path in current.rglob("*") if len(path.name) == 8)

    storage = open_storage(tmp_path)
    ledgers = [LedgerId(scope, number) for scope in (7, 1 << 40, 9) for number in (1, 2, 1 << 40)]
    for ledger in ledgers:
        add(storage, ledger, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    assert directories() > 0
    for ledger in ledgers[1:]:
        storage.delete_ledger(ledger)
    add(storage, ledgers[1], 0)  # in the directory of the ledger that remains
    add(storage, ledgers[-1], 0)  # in directories that go
    flush_journals(storage)
    storage.run_checkpoint()
    storage.close()
    storage = open_storage(tmp_path)
    for ledger in (ledgers[0], ledgers[1], ledgers[-1]):
        assert bytes(storage.read_entry(ledger, 0)) == body_of(ledger, 0)
        storage.delete_ledger(ledger)
    storage.run_checkpoint()
    assert directories() == 0
    storage.close()
    (current / "0000000a" / "0000000b" / "0000000c").mkdir(parents=True)
    (current / "0000000a" / "0000000d").mkdir()
    (current / "0000000e").mkdir()
    open_storage(tmp_path)
    assert directories() == 0


def test_empty_directories_that_a_start_does_not_reach_go_after_the_next_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start must not wait for a walk of millions of directories; collections list the ledgers anyway."""
    monkeypatch.setattr(index_persistence, "PRUNED_AT_START_MAX", 3)
    storage = open_storage(tmp_path)
    kept = LedgerId(7, 1)
    add(storage, kept, 0)
    flush_journals(storage)
    storage.close()
    current = tmp_path / "ledgers" / "current"
    for number in range(20):
        (current / f"{number:08x}" / "0000000b" / "0000000c").mkdir(parents=True)

    def left() -> int:
        return sum((current / f"{number:08x}").exists() for number in range(20))

    storage = open_storage(tmp_path)
    assert left() >= 17
    late = LedgerId(5 << 32, 1)  # below a directory that is empty now
    list(storage.ledgers.ledger_ids())
    add(storage, late, 0)
    flush_journals(storage)
    storage.run_checkpoint()
    assert left() == 2, "those of the two ledgers"
    storage.close()
    storage = open_storage(tmp_path)
    for ledger in (kept, late):
        assert bytes(storage.read_entry(ledger, 0)) == body_of(ledger, 0)
    storage.close()


def test_crash_while_directories_are_pruned_loses_no_other_ledger(tmp_path: Path) -> None:
    """The ledger that remains shares two directories with one that is deleted; a third is created beside them."""
    kept, deleted, created = LedgerId(7, 1), LedgerId(7, 1 << 40), LedgerId(7, 2 << 40)
    root = tmp_path / "disk"
    root.mkdir()
    for number in range(1, 200):
        shutil.rmtree(root)
        root.mkdir()
        files = SimulatedFiles(root, seed=number)
        storage = BookieStorage(config_for(root), files=files)
        storage.open()
        add(storage, kept, 0)
        add(storage, deleted, 0)
        flush_journals(storage)
        storage.run_checkpoint()
        files.crash_at = files.operations + number
        is_over = False
        with contextlib.suppress(SimulatedCrash):
            storage.delete_ledger(deleted)
            add(storage, created, 0)
            flush_journals(storage)
            storage.run_checkpoint()
            is_over = True
        after = BookieStorage(config_for(files.crash(tmp_path / "after", keep=0.5)))
        after.open()
        assert bytes(after.read_entry(kept, 0)) == body_of(kept, 0)
        if is_over:
            assert bytes(after.read_entry(created, 0)) == body_of(created, 0)
            assert not (tmp_path / "after" / "ledgers" / "current" / index_path(deleted)).parent.exists()
            return
        after.close()
    raise AssertionError("the checkpoint takes more operations")


def test_memory_stays_within_the_limits(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, page_limit=8, open_file_limit=10, page_size=64)
    ledgers = [LedgerId(each % 2, each) for each in range(60)]
    for entry_id in range(0, 80, 8):
        for ledger in ledgers:
            add(storage, ledger, entry_id)
        flush_journals(storage)
        storage.run_checkpoint()
    assert len(storage.ledgers.handles) <= 10
    for ledger in ledgers:
        for entry_id in range(0, 80, 8):
            assert bytes(storage.read_entry(ledger, entry_id)) == body_of(ledger, entry_id)
    assert len(storage.ledgers.pages) <= 8 + 1
    assert list(storage.ledgers.ledger_ids()) == sorted(ledgers)


def test_torn_first_index_header_is_rewritten(tmp_path: Path) -> None:
    """The files that Apache's bookie leaves when it dies while it creates an index file."""
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    flush_journals(storage)
    path = tmp_path / "ledgers" / "current" / "12" / "34" / "1234.idx"
    for content in (b"", bytes(1024), b"BKLE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        again = open_storage(tmp_path)
        assert bytes(again.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
        for mark in (tmp_path / "ledgers" / "current").glob("lastMark"):
            mark.unlink()


def test_finds_an_index_file_that_apache_was_moving(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    add(storage, PLAIN, 0)
    storage.close()
    path = tmp_path / "ledgers" / "current" / "12" / "34" / "1234.idx"
    path.rename(path.with_name("1234.idx.rloc"))
    again = open_storage(tmp_path)
    assert bytes(again.read_entry(PLAIN, 0)) == body_of(PLAIN, 0)
    assert path.exists()


def test_without_journal_data_only_special_records_are_journaled(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, journal_write_data=False)
    add(storage, PLAIN, 0)
    storage.fence(PLAIN, key_of(PLAIN), lambda error: None)
    flush_journals(storage)
    assert [record.type for _, record in records_of(tmp_path)][:2] == [RecordType.LEDGER_KEY, RecordType.FENCE]


def test_reads_from_memory_page_cache_and_disk_agree(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    for ledger in (PLAIN, SCOPED):
        for entry_id, size in enumerate((0, 10, 5000, 200_000, 3)):
            add(storage, ledger, entry_id, payload=bytes(size))
    handles = [storage.get(ledger) for ledger in (PLAIN, SCOPED)]
    for step in (lambda: None, storage.run_checkpoint):
        step()
        for handle in handles:
            assert handle is not None
            for entry_id, size in enumerate((0, 10, 5000, 200_000, 3)):
                expected = body_of(handle.ledger, entry_id, bytes(size))
                assert bytes(storage.read(handle, entry_id)) == expected
                found = storage.find(handle, entry_id)
                assert found is None or bytes(found) == expected


def test_files_lock_directories_and_replace_content_atomically(tmp_path: Path) -> None:
    files = Files()
    files.make_directory(tmp_path / "a" / "b")
    files.replace(tmp_path / "a" / "file", b"one")
    files.replace(tmp_path / "a" / "file", b"three")
    assert (tmp_path / "a" / "file").read_bytes() == b"three"
    assert [path.name for path in (tmp_path / "a").iterdir() if path.is_file()] == ["file"]
    with files.open(tmp_path / "a" / "file") as file:
        assert file.write(1, [b"x"] * 3000) == 3000
        assert file.size() == 3001
        assert bytes(file.read(0, 5000)) == b"t" + b"x" * 3000
        file.allocate(10_000)
        assert bytes(file.read(3001, 10_000)) == bytes(10_000 - 3001)


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_index_of_another_storage_class_stops_the_start(tmp_path: Path, ledger: LedgerId) -> None:
    """Without an index of its own a bookie would take all of its entry logs for garbage."""
    classes = [DB, SETTINGS["ledger_storage_class"]]
    for first, then in (classes, reversed(classes)):
        root = tmp_path / first.rpartition(".")[2]
        open_storage(root, ledger_storage_class=first).close()
        open_storage(root, ledger_storage_class=then).close()
        storage = open_storage(root, ledger_storage_class=first)
        add(storage, ledger, 0)
        storage.close()
        with pytest.raises(UsageError, match=then.rpartition(".")[2]):
            open_storage(root, ledger_storage_class=then)
        storage = open_storage(root, ledger_storage_class=first)
        assert bytes(storage.read_entry(ledger, 0)) == body_of(ledger, 0)
        storage.close()


def test_unfinished_conversion_stops_the_start(tmp_path: Path) -> None:
    open_storage(tmp_path).close()
    state = {"to": "db", "stamp": "20260101T000000Z", "fingerprint": "f", "counts": [[0, 0]]}
    path = tmp_path / "ledgers" / "current" / CONVERSION_NAME
    path.write_text(json.dumps({**state, "swapping": True}))
    with pytest.raises(Conflict, match="not finished"):
        open_storage(tmp_path)
    path.write_text(json.dumps({**state, "swapping": False}))
    open_storage(tmp_path).close()


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_entries_that_no_index_file_can_have_are_not_live(tmp_path: Path, ledger: LedgerId) -> None:
    """An entry log may have them, from DbLedgerStorage or by damage. Collection must go past them."""
    storage = BookieStorage(config_for(tmp_path))
    storage.open()
    add(storage, ledger, 0)
    storage.run_checkpoint()
    entries = [(ledger, entry_id, 2000) for entry_id in ((1 << 40), (1 << 63) - 1, -1, -5, -(1 << 63))]
    assert storage.ledgers.indexes[0].live(entries) == [False] * len(entries)
    storage.close()


def test_databases_in_one_directory_do_not_hide_index_files_in_another(tmp_path: Path) -> None:
    one, two = (tmp_path / name / "current" for name in ("l1", "l2"))
    one.mkdir(parents=True)
    with LedgersDatabase.create(one / "ledgers") as ledgers:
        ledgers.put(LedgerId(0, 1), LedgerData(True, False, bytes(20)))
    index = two / index_path(LedgerId(0, 2))
    index.parent.mkdir(parents=True)
    index.write_bytes(bytes(1024))
    config = BookieConfig(ledger_directories=(str(one.parent), str(two.parent)), ledger_storage_class=DB)
    with pytest.raises(UsageError, match=re.escape(f"{index} belongs to another storage class")):
        check_index(config)
