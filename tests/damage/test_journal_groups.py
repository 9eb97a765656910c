"""Damage of every byte that matters of a journal's last three groups, which were synced and acknowledged.

A damaged byte is harmless, or the journal is refused, or what is missing is of the last group: only that one can be
what a crash left. Records have no checksum, so damage of an entry's own bytes is left to the entry's digest.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.long_runs import IS_LONG
from support.servers import DB, INTERLEAVED, SORTED

from bkctl.checks.journal_check import check_journal
from bkctl.config import BookieConfig
from bkctl.disk import SECTOR_SIZE_BYTES, Files
from bkctl.errors import BkctlError, Corrupt
from bkctl.files.journal import JournalReader
from bkctl.files.scan import ScanState
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import Record, RecordType, record_of
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.journal_writer import JournalWriter

#: Ledger id, entry id, last add confirmed and length, before the digest.
ENTRY_HEADER_SIZE = 32
LEDGERS = (LedgerId(0, 5), LedgerId(7, 5), LedgerId(0, 0x1234_5678_9ABC))
#: The shapes of groups: payload sizes of entries; None ends the group at the alignment without padding.
SHAPES: dict[str, tuple[int | None, ...]] = {
    "small": (20,),
    "one sector": (100, 100, 100),
    "several sectors": (300, 10, 700, 0, 0, 30, 400),
    "aligned": (90, None),
    "zeros": (-600, -40, -500),
}
ORDERS = [
    ("small", "one sector", "several sectors"),
    ("several sectors", "small", "small"),
    ("aligned", "several sectors", "one sector"),
    ("one sector", "aligned", "aligned"),
    ("zeros", "small", "zeros"),
    ("aligned", "zeros", "several sectors"),
]


class Journal(NamedTuple):
    """A journal's bytes, its records, where each group begins, and where the last one ends."""

    data: bytes
    records: list[Record]
    groups: list[int]
    end: int

    def record_at(self, at: int) -> Record | None:
        """The record that byte `at` is of; None in the padding."""
        return next((each for each in self.records if each.offset <= at < each.offset + 4 + each.record_size), None)

    def overlapped(self, first: int, last: int) -> set[int]:
        """Offsets of the records with bytes from `first` on and before `last`."""
        return {
            each.offset for each in self.records if each.offset < last and first < each.offset + 4 + each.record_size
        }


def write_journal(root: Path, shapes: tuple[str, ...], *, allocation_size: int = 1 << 16) -> tuple[Path, Journal]:
    """Write a journal by the bookie's own writer: a group with the ledgers' keys, two groups more, then `shapes`."""
    chance = random.Random(repr(shapes))
    next_ids = dict.fromkeys(LEDGERS, 0)
    lengths = dict.fromkeys(LEDGERS, 10_000)
    writer = JournalWriter(root, Files(), BookieConfig(), clock_ms=lambda: 0x1000, scoped=True)
    writer.allocation_size = allocation_size
    writer.open()

    def entry(size: int, ledger: LedgerId | None = None) -> bytes:
        ledger = ledger or chance.choice(LEDGERS)
        payload = bytes(-size) if size < 0 else chance.randbytes(size)
        entry_id, next_ids[ledger] = next_ids[ledger], next_ids[ledger] + 1
        lengths[ledger] += len(payload)
        by = DigestManager(ledger, DigestType.CRC32C, b"secret")
        return record_of(by.seal(entry_id, entry_id - 1, lengths[ledger], payload) + payload)

    def commit(records: list[bytes]) -> int:
        start = writer.mark.offset
        writer.commit(records, sum(map(len, records)), scoped=True)
        return start

    keys = [
        journal.ledger_key_record(each, DigestManager(each, DigestType.CRC32C, b"secret").master_key)
        for each in LEDGERS
    ]
    commit([*keys, *(entry(50, each) for each in LEDGERS)])
    commit([entry(400), entry(200)])
    groups = []
    for shape in shapes:
        records: list[bytes] = []
        for size in SHAPES[shape]:
            if size is None:
                room = -(writer.mark.offset + sum(map(len, records))) % SECTOR_SIZE_BYTES
                records.append(entry(room - len(record_of(bytes(36))), LEDGERS[0]))
            else:
                records.append(entry(size))
        groups.append(commit(records))
    end = writer.mark.offset
    writer.close()
    (path,) = root.glob("*.txn")
    with JournalReader.open(path) as reader:
        found = list(reader.records())
        assert reader.end is (ScanState.ZEROS if allocation_size else ScanState.END_OF_FILE)
    return path, Journal(path.read_bytes(), found, groups, end)


def read(path: Path) -> tuple[list[Record], BkctlError | None, ScanState]:
    """Read the journal in both ways and by `verify`, which must agree."""
    rows: list[Record] = []
    error = batches_error = None
    with JournalReader.open(path) as reader:
        try:
            rows.extend(reader.records())
        except BkctlError as caught:
            error = caught
        position, end = reader.position, reader.end
        offsets: list[int] = []
        try:
            for batch in reader.batches():
                offsets += batch.offsets
        except BkctlError as caught:
            batches_error = caught
        assert (offsets, str(batches_error)) == ([each.offset for each in rows], str(error))
        assert (reader.position, reader.end) == (position, end)
    check = check_journal(path)
    assert check is not None
    assert (check.good_end, check.state, str(check.error)) == (position, end, str(error))
    return rows, error, end


def check_outcome(path: Path, whole: Journal, first: int, last: int) -> str:
    """Read a journal of which the bytes from `first` on and before `last` were damaged; return what came out."""
    rows, error, end = read(path)
    if error is not None:
        assert isinstance(error, Corrupt) or error.exit_code == 8
        return "refused"
    assert end is not ScanState.DAMAGED
    found = {each.offset: each for each in rows}
    own = whole.overlapped(first, last)
    missing = []
    for record in whole.records:
        row = found.pop(record.offset, None)
        if row is None:
            missing.append(record.offset)
        elif record.offset not in own:
            assert row == record
    # A start refuses an entry of zeros, see below, and leaves out what is of no ledger.
    for row in found.values():
        assert not any(row.body) or (row.offset > whole.groups[-1] and row.ledger not in LEDGERS), "a wrong record"
    assert all(each >= whole.groups[-1] for each in missing), f"acknowledged records at {missing} are missing"
    return "dropped" if missing else "harmless"


def every_byte(whole: Journal) -> Iterator[tuple[int, int, bytes]]:
    """Yield damage: where it begins and ends, and the bytes to write there. Of payloads every ninth byte is damaged."""
    data = whole.data
    payloads = {
        at
        for each in whole.records
        for at in range(each.offset + 4 + ENTRY_HEADER_SIZE + 4, each.offset + 4 + each.record_size - 1)
        if each.type is RecordType.ENTRY and at % 9
    }
    for at in range(whole.groups[0], whole.end):
        if at in payloads:
            continue
        flips = {data[at] ^ 0xFF, data[at] ^ 0x80, 0} - {data[at]}
        yield from ((at, at + 1, bytes((value,))) for value in sorted(flips))


def every_sector(whole: Journal) -> Iterator[tuple[int, int, bytes]]:
    """Yield runs of sectors of zeros. One that ends inside the last group leaves what a crash of one group leaves."""
    for count in (1, 2, 3):
        for first in range(whole.groups[0], whole.end, SECTOR_SIZE_BYTES):
            last = min(first + count * SECTOR_SIZE_BYTES, whole.end)
            if first >= whole.groups[-1] or last <= whole.groups[-1]:
                yield first, last, bytes(last - first)


def every_length(whole: Journal) -> Iterator[tuple[int, int, bytes]]:
    """Yield sizes that no record has: the size fields of all records and paddings, replaced."""
    fields = {each.offset for each in whole.records} | {each.offset + 4 + each.record_size for each in whole.records}
    for at in sorted(each for each in fields if whole.groups[0] <= each < whole.end):
        for size in (-7, -0x100, -(2**31), 0, 1, 15, 16, 60, 600, 1500, 5000, 0xFFFF, 60_000, 1 << 24, 2**31 - 1):
            value = struct.pack(">i", size)
            if value != whole.data[at : at + 4]:
                yield at, at + 4, value


@pytest.mark.parametrize("shapes", ORDERS if IS_LONG else ORDERS[2:5], ids=" then ".join)
def test_damage_of_a_synced_group_does_not_end_a_journal(tmp_path: Path, shapes: tuple[str, ...]) -> None:
    allocation_size = 1 << 16 if ORDERS.index(shapes) % 2 else 0
    path, whole = write_journal(tmp_path, shapes, allocation_size=allocation_size)
    outcomes: set[str] = set()
    with path.open("r+b", buffering=0) as file:
        for first, last, value in itertools.chain(every_byte(whole), every_sector(whole), every_length(whole)):
            file.seek(first)
            file.write(value)
            try:
                outcomes.add(check_outcome(path, whole, first, last))
            except AssertionError as error:
                error.add_note(f"bytes {first} to {last} were {whole.data[first:last][:8]!r}, now {value[:8]!r}")
                raise
            file.seek(first)
            file.write(whole.data[first:last])
    assert {"harmless", "refused"} <= outcomes


@pytest.mark.parametrize("shapes", ORDERS[:2], ids=" then ".join)
def test_truncated_journal_gives_the_records_before_the_cut(tmp_path: Path, shapes: tuple[str, ...]) -> None:
    """A crash before the later groups were written leaves the same bytes."""
    path, whole = write_journal(tmp_path, shapes, allocation_size=0)
    for length in range(whole.end - 1, whole.groups[0] - 1, -1):
        with path.open("r+b") as file:
            file.truncate(length)
        rows, error, end = read(path)
        assert error is None, f"cut to {length} bytes"
        assert rows == [each for each in whole.records if each.offset + 4 + each.record_size <= length]
        assert end is not ScanState.DAMAGED


@pytest.mark.parametrize("shapes", ORDERS, ids=" then ".join)
def test_any_sectors_of_the_last_group_may_be_lost(tmp_path: Path, shapes: tuple[str, ...]) -> None:
    """Acknowledged records are all there, unless the rest can be a group of its own: then the journal is refused."""
    path, whole = write_journal(tmp_path, shapes)
    sectors = list(range(whole.groups[-1], whole.end, SECTOR_SIZE_BYTES))
    refused = 0
    for lost in itertools.product((False, True), repeat=len(sectors)):
        data = bytearray(whole.data)
        for at, is_lost in zip(sectors, lost, strict=True):
            if is_lost:
                data[at : at + SECTOR_SIZE_BYTES] = bytes(SECTOR_SIZE_BYTES)
        path.write_bytes(data)
        rows, error, _ = read(path)
        refused += error is not None
        before = [each for each in whole.records if each.offset < whole.groups[-1]]
        assert rows[: len(before)] == before
    assert refused == 0


# --- what a bookie does ---------------------------------------------------------------------------------------------


def config_for(root: Path, ledger_storage_class: str = INTERLEAVED, **changes: object) -> BookieConfig:
    return BookieConfig(
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers"),),
        journal_pre_alloc_size_mb=0,
        entry_log_file_preallocation_enabled=False,
        ledger_storage_class=ledger_storage_class,
    ).with_changes(**changes)


def start(root: Path, **changes: object) -> BookieStorage:
    storage = BookieStorage(config_for(root, **changes))
    storage.open()
    return storage


def prepare(root: Path, shapes: tuple[str, ...]) -> tuple[Path, Journal]:
    current = root / "journal" / "current"
    current.mkdir(parents=True)
    return write_journal(current, shapes)


def put(path: Path, whole: Journal, at: int, value: bytes) -> None:
    path.write_bytes(whole.data[:at] + value + whole.data[at + len(value) :])


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_start_refuses_a_nonsense_size_before_the_last_group(
    tmp_path: Path, storage_class: str, group: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = prepare(tmp_path, ORDERS[0])
    put(path, whole, whole.groups[group], struct.pack(">i", -7))
    problem = f"1001.txn: Record has length -7 at byte {whole.groups[group]}"
    with pytest.raises(Corrupt, match=f"{re.escape(problem)}.*acknowledged") as caught:
        start(tmp_path, ledger_storage_class=storage_class)
    assert "skipReplayJournalInvalidRecord=true" in str(caught.value.hint)
    storage = start(tmp_path, ledger_storage_class=storage_class, skip_replay_journal_invalid_record=True)
    assert storage.replayed[0] == sum(
        each.type is RecordType.ENTRY for each in whole.records if each.offset < whole.groups[group]
    )
    assert problem in caplog.text


def test_start_with_a_gap_names_the_setting_that_leaves_gaps(tmp_path: Path) -> None:
    path, whole = prepare(tmp_path, ORDERS[0])
    put(path, whole, whole.groups[1], bytes(SECTOR_SIZE_BYTES))
    with pytest.raises(Corrupt, match="a hole") as caught:
        start(tmp_path)
    assert "journalSyncData=false" in str(caught.value.hint)


def test_start_logs_the_dropped_incomplete_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, whole = prepare(tmp_path, ORDERS[0])
    put(path, whole, whole.groups[2], bytes(SECTOR_SIZE_BYTES))
    storage = start(tmp_path)
    expected = [each for each in whole.records if each.type is RecordType.ENTRY and each.offset < whole.groups[2]]
    assert [bytes(storage.read_entry(each.ledger, each.entry_id)) for each in expected] == [
        each.body for each in expected
    ]
    assert "1001.txn: dropped what follows byte" in caplog.text


def test_start_serves_an_entry_that_ends_like_padding(tmp_path: Path) -> None:
    path, whole = prepare(tmp_path, ORDERS[0])
    by = DigestManager(LEDGERS[0], DigestType.CRC32C, b"secret")
    payload = b"payload\xff\xff\xff\0"
    body = by.seal(10_000, 9_999, 1 << 20, payload) + payload
    path.write_bytes(path.read_bytes()[: whole.end] + record_of(body))
    storage = start(tmp_path)
    assert bytes(storage.read_entry(LEDGERS[0], 10_000)) == body
    storage.close()


def test_zeros_of_an_earlier_group_are_not_an_entry(tmp_path: Path) -> None:
    """A size that is 4 bytes too large makes an entry of the padding behind it."""
    path, whole = prepare(tmp_path, ORDERS[0])
    first = next(each for each in whole.records if each.offset == whole.groups[0])
    put(path, whole, first.offset, struct.pack(">i", first.record_size + 4))
    with pytest.raises(Corrupt, match="header of the entry is zeros"):
        start(tmp_path)


@pytest.mark.parametrize("shapes", ORDERS[::2], ids=" then ".join)
def test_a_start_serves_every_acknowledged_entry_or_refuses(tmp_path: Path, shapes: tuple[str, ...]) -> None:
    damage_path, whole = write_journal(tmp_path, shapes)
    chance = random.Random(1)
    damages = [*every_byte(whole), *every_sector(whole), *every_length(whole)]
    for number, (first, last, value) in enumerate(chance.sample(damages, 60)):
        current = tmp_path / str(number) / "journal" / "current"
        current.mkdir(parents=True)
        path = current / damage_path.name
        put(path, whole, first, value)
        try:
            storage = start(tmp_path / str(number))
        except BkctlError:
            continue
        own = whole.overlapped(first, last)
        for record in whole.records:
            if record.type is RecordType.ENTRY and record.offset < whole.groups[-1] and record.offset not in own:
                assert bytes(storage.read_entry(record.ledger, record.entry_id)) == record.body, (first, last, value)
