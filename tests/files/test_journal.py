"""Journals read offline: every version, every damage, and Apache's own files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from bkctl.errors import BkctlError, CorruptRecord, NotFound, Unsupported, UsageError
from bkctl.files.journal import JournalReader, read_last_mark
from bkctl.files.windows import WINDOW_SIZE_BYTES
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.journal import LogMark, write_header, write_padding, write_seal
from bkctl.formats.record import FORCE_LEDGER_ENTRY_ID, NO_LEDGER, RecordType, record_of, write_ids
from bkctl.ids import LedgerId

V1, V2 = LedgerId(0, 1), LedgerId(7, 1)
KEY = master_key(b"")
#: The record that Apache's bookie queues to sync a ledger's entries; its journals have none.
FORCE_LEDGER = record_of(write_ids(V1, FORCE_LEDGER_ENTRY_ID))


def entry(entry_id: int, payload: bytes = b"hello", ledger: LedgerId = V1) -> bytes:
    manager = DigestManager(ledger, DigestType.CRC32C)
    return record_of(manager.seal(entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload) + payload)


def flushed(data: bytes, *records: bytes) -> bytes:
    data += b"".join(records)
    return data + write_padding(len(data))


TAG = b"\x9e tag-8 \0"


def sealed(data, *records):
    """Append a group as our bookie writes it."""
    end = len(data) + sum(map(len, records))
    return data + b"".join(records) + write_seal(len(data), end, TAG)


@pytest.fixture
def read(tmp_path):
    """Read a journal of the given bytes to its end: rows, and the error that ended it, if one did."""

    def read(data: bytes, start: int = 0, *, padding: bool = False):
        path = tmp_path / "1f.txn"
        path.write_bytes(data)
        rows, error = [], None
        with JournalReader.open(path) as reader:
            try:
                rows.extend(reader.records(start, padding=padding))
            except BkctlError as caught:
                error = caught
            return rows, error, reader.position

    return read


def ids(rows):
    return [(row.type.value, row.entry_id) for row in rows]


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6, 7])
def test_every_version_is_read(read, version):
    header = write_header(version) if version > 1 else b""
    rows, error, position = read(header + entry(0) + entry(1))
    assert error is None
    assert ids(rows) == [("entry", 0), ("entry", 1)]
    assert [row.offset for row in rows] == [len(header), len(header) + len(entry(0))]
    assert rows[0].record_size == len(entry(0)) - 4
    assert rows[1].payload(DigestType.CRC32C) == b"hello"
    assert position == len(header) + 2 * len(entry(0))


def test_every_kind_of_record_is_read(read):
    packet = DigestManager(V1, DigestType.CRC32).seal_lac(3)
    data = flushed(write_header(7), journal.ledger_key_record(V1, KEY), entry(0), journal.fence_record(V1))
    first_padding = len(data.rstrip(b"\0"))
    data = flushed(data, journal.explicit_lac_record(V1, packet), FORCE_LEDGER)
    data = flushed(data, journal.ledger_key_record(V2, KEY), entry(0, ledger=V2), journal.fence_record(V2))
    rows, error, _ = read(data)
    assert error is None
    assert [(row.type.value, row.ledger, row.format_version) for row in rows] == [
        ("ledgerKey", V1, 1), ("entry", V1, 1), ("fence", V1, 1), ("explicitLac", V1, 1), ("forceLedger", V1, 1),
        ("ledgerKey", V2, 2), ("entry", V2, 2), ("fence", V2, 2),
    ]  # fmt: skip
    assert rows[0].special_payload == rows[5].special_payload == KEY
    assert rows[3].special_payload == packet
    assert first_padding > 0
    padded, _, _ = read(data, padding=True)
    paddings = [row for row in padded if row.type is RecordType.PADDING]
    assert [(row.ledger, (row.offset + 8 + row.record_size) % 512) for row in paddings] == [(NO_LEDGER, 0)] * 3
    assert [row for row in padded if row.type is not RecordType.PADDING] == rows


def test_reading_starts_where_a_mark_points(read):
    data = flushed(write_header(6), entry(0), entry(1))
    rows, _, position = read(flushed(data, entry(2)), start=len(data))
    assert ids(rows) == [("entry", 2)]
    assert position == len(data) + 512
    assert read(data, start=1 << 40) == ([], None, 1 << 40)
    assert read(data, start=2**64)[1] is not None


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        bytes(3),
        bytes(4096),
        entry(9)[:-1],
        entry(9)[:3],
        entry(9)[:8],
        b"\xff\xff\xff\x00",
        b"\xff\xff\xff\x00\x00\x00\x01",
        b"\xff\xff\xff\x00\x00\x00\x01\x00\x00\x00",
        entry(9)[:4] + bytes(6000),
    ],
)
def test_a_journal_ends_where_the_bookie_stopped_writing(read, tail):
    rows, error, position = read(write_header(6) + entry(0) + tail)
    assert error is None
    assert ids(rows) == [("entry", 0)]
    assert position == 512 + len(entry(0))


@pytest.mark.parametrize("header", [b"", b"BKLG", write_header(6)[:8], write_header(6)[:300], write_header(6)])
def test_journals_without_records(read, header):
    assert read(header)[:2] == ([], None)


GOOD = sealed(sealed(write_header(6, TAG), entry(0), entry(1)), entry(2), entry(3))
LENGTH_AT = 512 + len(entry(0))


@pytest.mark.parametrize(
    ("length", "problem"),
    [
        (0, "a hole"),
        (-1, "length -1"),
        (-0x101, "length -257"),
        (1, "too short"),
        (15, "too short"),
        (0x7FFFFFFF, "length 2147483647"),
        (0x30000000, "length 805306368"),
        (0x00800000, "length 8388608"),
        (2000, "length 2000"),
    ],
)
def test_a_damaged_length_ends_the_scan_with_one_error(read, length, problem):
    damaged = bytearray(GOOD)
    struct.pack_into(">i", damaged, LENGTH_AT, length)
    rows, error, position = read(bytes(damaged))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert problem in str(error)
    assert f"1f.txn: {error.problem} at byte {LENGTH_AT}" in str(error)
    assert (error.offset, position) == (LENGTH_AT, LENGTH_AT)


def test_a_length_beyond_the_end_is_damage_when_records_follow(read):
    # The ledger is large enough for the length, so only what follows can tell.
    data = sealed(write_header(6, TAG), entry(0, bytes(700)))
    start = len(data)
    data = sealed(data, entry(1000, bytes(700)), entry(1001, b"x"))
    torn = data[: start + 700]
    assert read(torn)[:2] == (read(data[:start])[0], None)
    whole = sealed(data, entry(1002), entry(1003))
    damaged = bytearray(whole)
    struct.pack_into(">i", damaged, start, 100_000)
    rows, error, _ = read(bytes(damaged))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert error.offset == start


@pytest.mark.parametrize("count", [-1, -(2**31), 2**31 - 1])
def test_damaged_padding(read, count):
    data = write_header(6) + entry(0)
    rows, error, _ = read(data + struct.pack(">ii", -0x100, count) + bytes(600))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert f"length {count} at byte {len(data)}" in str(error)


@pytest.mark.parametrize("lost", [b"", bytes(512)], ids=["cut", "zeros"])
@pytest.mark.parametrize("behind", range(6))
def test_payload_that_ends_like_padding_ends_a_journal_whose_padding_was_lost(read, behind, lost):
    """A client chooses the last bytes of its entries, and a start must not fail for them."""
    payload = b"x" * 30 + struct.pack(">i", journal.PADDING_MASK) + bytes(behind)
    data = flushed(write_header(6), entry(0)) + entry(1, payload)
    rows, error, position = read(data + lost)
    assert error is None
    assert [row.entry_id for row in rows] == [0, 1]
    assert position == len(data)


def test_padding_before_version_5_is_a_negative_length(read):
    _, error, _ = read(write_header(4) + entry(0) + struct.pack(">ii", -0x100, 0) + entry(1))
    assert isinstance(error, CorruptRecord)


def test_records_within_padding_are_skipped(read):
    data = write_header(6) + entry(0)
    padding = write_padding(len(data))
    damaged = padding[:8] + b"\xff" * (len(padding) - 8)
    rows, error, _ = read(data + damaged + entry(1))
    assert (ids(rows), error) == ([("entry", 0), ("entry", 1)], None)


def test_padding_that_hides_a_group_is_damage(read):
    data = flushed(write_header(6), entry(0))
    rows, error, _ = read(data)
    padding_at = rows[0].offset + 4 + rows[0].record_size
    whole = flushed(flushed(data, entry(1)), entry(2)) + bytes(70_000)
    for extra in (512, 1024, 65_536, 13, -13):
        damaged = bytearray(whole)
        (count,) = struct.unpack_from(">i", whole, padding_at + 4)
        struct.pack_into(">i", damaged, padding_at + 4, count + extra)
        rows, error, _ = read(bytes(damaged))
        assert ids(rows) == [("entry", 0)]
        assert isinstance(error, CorruptRecord)


def test_scoped_records_need_version_7(read):
    rows, error, _ = read(write_header(6) + entry(0) + entry(1, ledger=V2))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    rows, error, _ = read(write_header(7) + entry(0) + b"\0\0\0\x40\xb0" + bytes(63))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, Unsupported)


@pytest.mark.parametrize("version", [0, 8, -1])
def test_other_versions_do_not_open(tmp_path, version):
    path = tmp_path / "1.txn"
    path.write_bytes(b"BKLG" + struct.pack(">i", version) + bytes(504))
    with pytest.raises(Unsupported, match=r"1\.txn"):
        JournalReader.open(path)


def test_missing_and_irregular_files_do_not_open(tmp_path):
    with pytest.raises(NotFound):
        JournalReader.open(tmp_path / "1.txn")
    with pytest.raises(UsageError, match="directory"):
        JournalReader.open(tmp_path)
    os.mkfifo(tmp_path / "2.txn")
    with pytest.raises(UsageError, match="not a regular file"):
        JournalReader.open(tmp_path / "2.txn")
    with pytest.raises(UsageError):
        JournalReader.open("a\0b")


def test_records_larger_than_a_window_and_at_its_edges(read):
    payloads = [bytes((1,)) * size for size in (WINDOW_SIZE_BYTES - 700, 3, 3 * WINDOW_SIZE_BYTES, 0, 5)]
    data = flushed(write_header(6), *(entry(number, payload) for number, payload in enumerate(payloads)))
    for shift in range(0, 520, 40):
        rows, error, _ = read(flushed(data, entry(9, bytes(shift)), entry(10)))
        assert error is None
        assert [row.payload(DigestType.CRC32C) for row in rows] == [*payloads, bytes(shift), b"hello"]


def test_entries_with_a_wrong_ledger_length_do_not_end_the_journal(read):
    """Any client can send such, and no restart may fail for it."""

    def lying(entry_id: int, size: int) -> bytes:
        manager = DigestManager(V1, DigestType.CRC32C)
        payload = bytes((1,)) * size
        return record_of(manager.seal(entry_id, entry_id - 1, 1, payload) + payload)

    size = WINDOW_SIZE_BYTES // 2 + 100
    data = write_header(6)
    for number in range(5):
        data = flushed(data, lying(2 * number, size), lying(2 * number + 1, size))
    aligned = lying(10, WINDOW_SIZE_BYTES + -(len(data) + len(lying(10, WINDOW_SIZE_BYTES))) % 512)
    for end in (b"", flushed(b"", aligned), aligned, aligned + bytes(4096)):
        rows, error, _ = read(data + end)
        assert error is None
        assert [row.entry_id for row in rows] == list(range(11 if end else 10))


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=6), st.booleans())
def test_any_bytes_raise_only_our_errors(tmp_path_factory, at, data, cut):
    path = tmp_path_factory.getbasetemp() / "hypothesis.txn"
    damaged = GOOD[:at] + data + (b"" if cut else GOOD[at + len(data) :])
    path.write_bytes(damaged)
    whole = {(512, "entry", 0), (LENGTH_AT, "entry", 1)}
    seen = set()
    try:
        with JournalReader.open(path) as reader:
            for row in reader.records(padding=True):
                seen.add((row.offset, row.type.value, row.entry_id))
    except BkctlError as error:
        seen.add(str(error))
    if at >= LENGTH_AT + len(entry(1)):
        assert whole <= seen


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_journals_give_the_rows_of_apaches_shell(bookie):
    assert bookie.journals
    for path, (version, expected) in bookie.journals.items():
        with JournalReader.open(path) as reader:
            rows = list(reader.records())
            assert version in (None, reader.version)
            assert reader.journal_id == int(path.stem, 16)
            assert reader.position % 512 == 0
        assert len(rows) == len(expected)
        for row, answer in zip(rows, expected, strict=True):
            assert row.type.value == answer["type"]
            assert (str(row.ledger.ledger_id), row.entry_id) == (answer["ledgerId"], answer["entryId"])
            assert (row.offset, row.record_size) == (answer["offset"], answer["recordSize"])
            if "lastAddConfirmed" in answer:
                assert row.last_add_confirmed == answer["lastAddConfirmed"]
            if "masterKey" in answer:
                assert row.special_payload.hex() == answer["masterKey"]


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_last_marks_match_apaches_shell(bookie):
    assert read_last_mark([bookie.ledger_dir]) == bookie.last_mark
    assert read_last_mark([bookie.ledger_dir / "current"]) == bookie.last_mark


def test_the_highest_readable_mark_counts(tmp_path):
    dirs = [tmp_path / name for name in "abcd"]
    for directory, data in zip(dirs, (LogMark(3, 9), LogMark(4, 1), b"short", None), strict=True):
        (directory / "current").mkdir(parents=True)
        if data is not None:
            data = data if isinstance(data, bytes) else data.serialize()
            (directory / "current" / "lastMark.1").write_bytes(data)
    assert read_last_mark(dirs, 1, 2) == LogMark(4, 1)
    assert read_last_mark(dirs, 0, 2) == read_last_mark(dirs) == read_last_mark([Path("missing")]) == LogMark(0, 0)


def columns(batches):
    """The rows of batches, as `fields` gives them."""
    rows = []
    for batch in batches:
        kinds = [batch.type] * len(batch)
        bodies = [b""] if kinds[0] is RecordType.PADDING else batch.bodies()
        rows += zip(
            kinds, batch.ledgers, batch.entry_ids, batch.offsets, batch.sizes, batch.last_add_confirmed, batch.lengths,
            bodies, strict=True,
        )  # fmt: skip
    return rows


def fields(records):
    return [
        (each.type, each.ledger, each.entry_id, each.offset, each.record_size, each.last_add_confirmed, each.length,
         each.body)
        for each in records
    ]  # fmt: skip


def outcome(path, make):
    """Return the rows that `make` reads of the journal, the error that ended it, and the end that was reported."""
    rows, error = [], None
    with JournalReader.open(path) as reader:
        try:
            rows.extend(make(reader))
        except BkctlError as caught:
            error = str(caught)
        return rows, error, reader.position, reader.end


def check_batches(path):
    for padding in (False, True):
        records = outcome(path, lambda reader, padding=padding: reader.records(padding=padding))
        batches = outcome(path, lambda reader, padding=padding: reader.batches(padding=padding))
        assert columns(batches[0]) == fields(records[0])
        assert batches[1:] == records[1:]


ALL = [path for each in [*golden.journals(), *golden.bookies()] for path in each.journals]


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parts[-5]}-{path.parts[-4]}-{path.name}")
def test_batches_have_the_same_records(path):
    check_batches(path)


def test_batches_of_both_formats_up_to_a_byte(tmp_path):
    data = flushed(write_header(7), *(entry(number, ledger=(V1, V2)[number // 3 % 2]) for number in range(12)))
    data = flushed(data, journal.ledger_key_record(V2, KEY), entry(12, ledger=V2), journal.fence_record(V1), entry(12))
    path = tmp_path / "1.txn"
    path.write_bytes(data + record_of(bytes(40)) + bytes(100))
    check_batches(path)
    with JournalReader.open(path) as reader:
        offsets = [record.offset for record in reader.records()]
        for start, end in ((0, offsets[5]), (offsets[4], offsets[4] + 1), (offsets[2], 1 << 40), (offsets[3], 600)):
            expected = [record for record in reader.records(start) if record.offset < end]
            assert columns(reader.batches(start, end)) == fields(expected)


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=6), st.booleans())
def test_batches_of_any_bytes_are_the_records(tmp_path_factory, at, data, cut):
    path = tmp_path_factory.getbasetemp() / "batches.txn"
    path.write_bytes(GOOD[:at] + data + (b"" if cut else GOOD[at + len(data) :]))
    try:
        JournalReader.open(path).close()
    except Unsupported:
        return
    check_batches(path)


@pytest.mark.parametrize("path", ALL, ids=lambda path: f"{path.parts[-5]}-{path.parts[-4]}-{path.name}")
def test_look_behind_finds_every_record_of_a_journal(path):
    with JournalReader.open(path) as reader:
        rows = []
        try:
            rows.extend(reader.records())
        except CorruptRecord:
            return  # a reused file: what stands behind is the test of the damage matrix
        behind = reader.look_behind(0)
    assert behind.record_count == len(rows)
    assert behind.entry_count == sum(row.type is RecordType.ENTRY for row in rows)
    assert behind.resumes_at == (rows[0].offset if rows else None)


def test_reading_a_journal_while_a_bookie_writes_it(tmp_path, monkeypatch):
    data = flushed(write_header(6), entry(0), entry(1))
    path = tmp_path / "1.txn"
    path.write_bytes(data + bytes(4096))
    looked = JournalReader.next_data

    def write_and_look(self, at):
        more = flushed(data, entry(2), entry(3))[len(data) :]
        with path.open("r+b") as file:
            file.seek(len(data))
            file.write(more)
        return looked(self, at)

    monkeypatch.setattr(JournalReader, "next_data", write_and_look)
    with JournalReader.open(path) as reader:
        assert [record.entry_id for record in reader.records()] == [0, 1, 2, 3]
        assert sum(map(len, reader.batches())) == 4
