"""Entry logs read offline: both loggers' files, every damage, and Apache's own."""

from __future__ import annotations

import base64
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import golden

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, EntryNotFound, TruncatedRecord, Unsupported
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.files.listing import log_contents
from bkctl.files.scan import RecordBatch
from bkctl.files.windows import WINDOW_SIZE_BYTES
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import pack_location, unpack_location, write_header, write_ledgers_map
from bkctl.formats.metadata import LedgerMetadata
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

LEDGERS = (LedgerId(0, 1), LedgerId(0, 2**62))
SCOPED = (LedgerId(7, 1), LedgerId(2**64 - 1, 2**64 - 1))


def entry(entry_id: int, payload: bytes = b"hello", ledger: LedgerId = LEDGERS[0]) -> bytes:
    sealed = DigestManager(ledger, DigestType.CRC32).seal(
        entry_id, entry_id - 1, (entry_id + 1) * len(payload), payload
    )
    return struct.pack(">i", len(sealed) + len(payload)) + sealed + payload


def closed_log(records: list[bytes], sizes: dict[LedgerId, int], version: int = 1, start: int = 1024) -> bytes:
    at = start + sum(map(len, records))
    header = write_header(version, at, len(sizes))
    return header + bytes(start - 1024) + b"".join(records) + b"".join(write_ledgers_map(sizes, version))


@pytest.fixture
def open_log(tmp_path):
    """Open an entry log of the given bytes."""

    def open_log(data: bytes) -> EntryLogReader:
        path = tmp_path / "1f.log"
        path.write_bytes(data)
        return EntryLogReader.open(path)

    return open_log


def read(reader: EntryLogReader, **options):
    rows, error = [], None
    try:
        rows.extend(reader.records(**options))
    except BkctlError as caught:
        error = caught
    return rows, error


def test_entries_with_a_wrong_ledger_length_do_not_end_the_log(open_log):
    """Any client can send such, and the log would never be compacted."""
    records = []
    for number in range(6):
        payload = bytes((1,)) * (WINDOW_SIZE_BYTES // 2 + 100)
        sealed = DigestManager(LEDGERS[0], DigestType.CRC32).seal(number, number - 1, 1, payload)
        records.append(struct.pack(">i", len(sealed) + len(payload)) + sealed + payload)
    whole = closed_log(records, {LEDGERS[0]: sum(map(len, records))})
    for data in (whole, whole + bytes(4096), write_header(1) + b"".join(records)):
        rows, error = read(open_log(data))
        assert error is None
        assert [row.entry_id for row in rows if row.type is RecordType.ENTRY] == list(range(6))
    short = bytearray(whole)
    struct.pack_into(">i", short, 1024 + len(records[0]), len(records[1]))
    rows, error = read(open_log(bytes(short)))
    assert isinstance(error, CorruptRecord)
    assert [row.entry_id for row in rows] == [0]


def ids(rows):
    return [(row.type.value, row.entry_id) for row in rows]


@pytest.mark.parametrize(("version", "ledgers"), [(0, LEDGERS), (1, LEDGERS), (2, SCOPED)])
def test_a_log_of_every_version(open_log, version, ledgers):
    records = [entry(number, bytes(number), ledger) for number in range(20) for ledger in ledgers]
    reader = open_log(write_header(version) + b"".join(records))
    rows, error = read(reader)
    assert error is None
    assert reader.log_id == 0x1F
    assert [(row.entry_id, row.ledger) for row in rows] == [(n, ledger) for n in range(20) for ledger in ledgers]
    assert [row.offset for row in rows] == [1024 + sum(map(len, records[:n])) for n in range(40)]
    assert all(row.payload(DigestType.CRC32) == bytes(row.entry_id) for row in rows)
    assert {row.format_version for row in rows} == {2 if version == 2 else 1}
    assert reader.ledgers_map() is None
    sizes = {ledger: sum(len(entry(n, bytes(n), ledger)) for n in range(20)) for ledger in ledgers}
    assert log_contents(reader).sizes == sizes
    assert reader.scan_ledgers() == (sizes, None)
    for row in rows:
        assert reader.entry_at(row.offset + 4) == row
    part, _ = read(reader, start=rows[3].offset, end=rows[5].offset)
    assert part == rows[3:5]


@pytest.mark.parametrize(("version", "ledgers"), [(1, LEDGERS), (2, SCOPED)])
def test_ledgers_of_a_closed_log_come_from_its_map(open_log, version, ledgers):
    sizes = {ledger: len(entry(0, ledger=ledger)) for ledger in ledgers}
    reader = open_log(closed_log([entry(0, ledger=ledger) for ledger in ledgers], sizes, version))
    assert reader.header is not None
    assert reader.header.ledgers_count == 2
    assert (reader.ledgers_map(), None) == (log_contents(reader).sizes, None) == reader.scan_ledgers() == (sizes, None)
    assert ids(read(reader)[0]) == [("entry", 0), ("entry", 0)]
    assert ids(read(reader, special=True)[0]) == [("entry", 0), ("entry", 0), ("ledgersMap", -2)]


def test_a_log_closed_without_entries_is_sound(open_log):
    reader = open_log(write_header(1, 1024, 0))
    assert (reader.ledgers_map(), None) == (log_contents(reader).sizes, None) == reader.scan_ledgers() == ({}, None)
    assert read(reader) == ([], None)
    for damaged in (write_header(1, 1024, 1), write_header(1, 1024, 0) + entry(0)):
        with pytest.raises(CorruptRecord):
            open_log(damaged).ledgers_map()


def test_log_with_entries_behind_its_ledgers_map_is_counted_by_a_scan(open_log):
    """Apache's SortedLedgerStorage wrote such logs when a checkpoint closed the log while its memtable was flushed."""
    data = closed_log([entry(0)], {LedgerId(0, 1): len(entry(0))}) + entry(1)
    reader = open_log(data)
    assert reader.ledgers_map() is None
    assert (log_contents(reader).sizes, None) == reader.scan_ledgers()
    assert sum(log_contents(reader).sizes.values()) == len(entry(0)) + len(entry(1))


def test_log_whose_header_points_at_entries_before_its_ledgers_map_is_counted_by_a_scan(open_log):
    """Apache's SortedLedgerStorage wrote such a log: another thread added while it was closed."""
    sizes = {LedgerId(0, 1): len(entry(0))}
    late = [entry(number, bytes(200_000)) for number in (1, 2)]
    data = bytearray(closed_log([entry(0), *late], sizes))
    data[8:16] = struct.pack(">q", 1024 + len(entry(0)))
    reader = open_log(bytes(data))
    assert reader.ledgers_map() is None
    assert sum(log_contents(reader).sizes.values()) == len(entry(0)) + sum(map(len, late))


def test_a_ledgers_map_of_several_records(open_log):
    sizes = {LedgerId(0, number): number + 1 for number in range(25_000)}
    assert open_log(closed_log([entry(0)], sizes)).ledgers_map() == sizes


@pytest.mark.parametrize("ledgers", [1, 2, 40, 1000])
def test_a_ledgers_map_of_zeros_is_rejected(open_log, ledgers):
    """Garbage collection would delete the log, for it would not know of all ledgers in it."""
    records = [entry(0, ledger=LedgerId(0, 100 + number)) for number in range(ledgers)]
    sizes = {LedgerId(0, 100 + number): len(record) for number, record in enumerate(records)}
    data = closed_log(records, sizes)
    assert log_contents(open_log(data)).sizes == sizes
    first = 1024 + sum(map(len, records)) + 24
    last = max(first, len(data) - 512)
    for start, end in (
        (len(data) - 16, len(data)),
        (len(data) - 8, len(data)),
        (last, len(data)),
        (first, min(first + 512, len(data))),
    ):
        reader = open_log(data[:start] + bytes(end - start) + data[end:])
        with pytest.raises(CorruptRecord, match=r"1f\.log"):
            reader.ledgers_map()
        assert log_contents(reader).sizes == sizes


@pytest.mark.parametrize(
    "damage",
    [
        lambda data, at: data[:8] + struct.pack(">q", at + 1) + data[16:],
        lambda data, at: data[:8] + struct.pack(">q", 1 << 40) + data[16:],
        lambda data, at: data[:8] + struct.pack(">q", -5) + data[16:],
        lambda data, at: data[:16] + struct.pack(">i", 3) + data[20:],
        lambda data, at: data[:16] + struct.pack(">i", 0) + data[20:],
        lambda data, at: data[: at + 4] + b"\0" * 8 + data[at + 12 :],
        lambda data, at: data[: at + 20] + struct.pack(">i", 99) + data[at + 24 :],
        lambda data, at: data[:at] + struct.pack(">i", 0x7FFFFFFF) + data[at + 4 :],
    ],
)
def test_a_damaged_ledgers_map_is_found_and_the_log_counted_instead(open_log, damage):
    sizes = {LEDGERS[0]: len(entry(0))}
    data = closed_log([entry(0)], sizes)
    damaged = damage(data, 1024 + len(entry(0)))
    reader = open_log(damaged)
    with pytest.raises(CorruptRecord, match=r"1f\.log"):
        reader.ledgers_map()
    if damaged[1024 + len(entry(0)) :] == data[1024 + len(entry(0)) :]:
        assert log_contents(reader).sizes == sizes


def test_an_allocated_log_is_empty(open_log):
    reader = open_log(b"")
    assert reader.header is None
    assert (read(reader), log_contents(reader).sizes, reader.ledgers_map()) == (([], None), {}, None)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"BKLO", TruncatedRecord), (write_header()[:1023], TruncatedRecord), (bytes(1024), CorruptRecord),
        (b"BKLE" + bytes(2000), CorruptRecord), (b"BKLO\0\0\0\3" + bytes(1016), Unsupported),
    ],
)  # fmt: skip
def test_other_files_do_not_open_as_entry_logs(open_log, data, error):
    with pytest.raises(error, match=r"1f\.log: "):
        open_log(data)


@pytest.mark.parametrize("tail", [b"", bytes(3), bytes(5000), entry(9)[:-1], entry(9)[:3], entry(9)[:14]])
def test_a_log_ends_where_the_bookie_stopped_writing(open_log, tail):
    rows, error = read(open_log(write_header() + entry(0) + tail))
    assert (ids(rows), error) == ([("entry", 0)], None)


@pytest.mark.parametrize("keep", [0, 3, 40, 56])
def test_a_closed_log_that_was_cut_is_damaged(open_log, keep):
    data = closed_log([entry(0), entry(1), entry(2)], {LEDGERS[0]: 3 * len(entry(0))})
    rows, error = read(open_log(data[: 1024 + len(entry(0)) + keep]))
    assert ids(rows[:1]) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert f"ledgers map at byte {1024 + 3 * len(entry(0))}" in str(error)


@pytest.mark.parametrize(
    ("length", "problem"),
    [(0, "a hole"), (-1, "length -1"), (1, "too short"), (15, "too short"), (0x7FFFFFFF, "length 2147483647"),
     (0x10000001, "length 268435457"), (2000, "length 2000"), (-0x0F0F0F10, "length -252645136")],
)  # fmt: skip
def test_a_damaged_length_ends_the_scan_with_one_error(open_log, length, problem):
    at = 1024 + len(entry(0))
    data = bytearray(write_header() + entry(0) + entry(1) + entry(2))
    struct.pack_into(">i", data, at, length)
    reader = open_log(bytes(data))
    rows, error = read(reader)
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert problem in str(error)
    assert f"at byte {at}" in str(error)
    assert isinstance(reader.scan_ledgers()[1], CorruptRecord)


@pytest.mark.parametrize("gap", [0, 3, 4, 20, 36, 40, 60, 64, 200])
def test_a_wrong_size_is_found_at_the_end_of_a_window(open_log, gap):
    """The record that reaches too far, and the bytes behind it that are none, are in two windows."""
    end = 1024 + WINDOW_SIZE_BYTES - gap
    damaged = end - 900
    records, at = [], 1024
    while damaged - at > 2100:
        records.append(entry(len(records), bytes(1000)))
        at += len(records[-1])
    records.append(entry(len(records), bytes(damaged - at - len(entry(0, b"")))))
    reaching = bytearray(entry(0, bytes(300), LEDGERS[1]))
    reaching[:4] = struct.pack(">i", end - damaged - 4)
    tail = entry(1, b"\xab" * 3000, LEDGERS[1])
    reader = open_log(write_header(1, 0, 0) + b"".join(records) + bytes(reaching) + tail)
    rows, error = read(reader)
    assert [row.entry_id for row in rows] == list(range(len(records)))
    assert isinstance(error, CorruptRecord)
    assert error.offset == damaged


def test_reads_at_offsets_without_an_entry_raise(open_log):
    reader = open_log(write_header() + entry(0) + entry(1))
    end = reader.size()
    for offset in (end + 4, end + 5000, 1 << 50):
        with pytest.raises(EntryNotFound):
            reader.entry_at(offset)
    for offset in (0, 4, 1024, 1027, 1030, end):
        with pytest.raises(Corrupt):
            reader.entry_at(offset)
    assert reader.entry_at(1028).entry_id == 0


def direct_log(*blocks: bytes) -> bytes:
    """A log of the direct I/O logger: each block padded with 0xF0, as each of its flushes is, then zeros."""
    filler = struct.pack(">iq", 3068, -1)
    data = (write_header() + filler).ljust(4096, b"\0")
    for block in blocks:
        data += block
        data += b"\xf0" * (-len(data) % 4096)
    return data + bytes(8192)


@pytest.mark.parametrize("last", [2000, 2001, 2002, 2003, 2004, 4096 - 60, 4096 - 61, 4096 - 63])
def test_logs_of_the_direct_logger(open_log, last):
    sizes = {LEDGERS[0]: 1}
    data = direct_log(
        entry(0) + entry(1, bytes(5000)), entry(2) + entry(3, bytes(last)), b"".join(write_ledgers_map(sizes))
    )
    reader = open_log(data)
    rows, error = read(reader)
    assert error is None
    assert (rows[0].entry_id, rows[0].offset) == (0, 4096)
    assert ids(rows) == [("entry", number) for number in range(4)]
    special, _ = read(reader, special=True)
    assert [row.type for row in special if row.type is not RecordType.ENTRY] == [
        RecordType.PADDING, RecordType.LEDGERS_MAP
    ]  # fmt: skip
    assert reader.scan_ledgers() == ({LEDGERS[0]: sum(row.record_size + 4 for row in rows)}, None)
    assert all(reader.entry_at(row.offset + 4) == row for row in rows)


def test_damaged_padding_of_the_direct_logger(open_log):
    data = bytearray(direct_log(entry(0), entry(1)))
    data[8100] = 0
    rows, error = read(open_log(bytes(data)))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)


def test_records_larger_than_a_window_and_at_its_edges(open_log):
    payloads = [bytes((1,)) * size for size in (WINDOW_SIZE_BYTES - 1200, 3, 3 * WINDOW_SIZE_BYTES, 0, 5)]
    start = b"".join(entry(number, payload) for number, payload in enumerate(payloads))
    for shift in range(0, 400, 17):
        reader = open_log(write_header() + entry(0, bytes(shift)) + start)
        rows, error = read(reader)
        assert error is None
        assert [row.payload(DigestType.CRC32) for row in rows] == [bytes(shift), *payloads]
        assert reader.scan_ledgers() == ({LEDGERS[0]: sum(row.record_size + 4 for row in rows)}, None)


def test_memory_stays_flat(tmp_path):
    path = tmp_path / "1.log"
    chunk = b"".join(entry(number, bytes(1000)) for number in range(1000))
    with path.open("wb") as file:
        file.write(write_header())
        for _ in range(32):
            file.write(chunk)
    with EntryLogReader.open(path) as reader:
        tracemalloc.start()
        count = sum(1 for _ in reader.records())
        sizes, _ = reader.scan_ledgers()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert count == 32_000
    assert sizes == {LEDGERS[0]: 32 * len(chunk)}
    assert peak < 4 * WINDOW_SIZE_BYTES


GOOD = closed_log([entry(n, ledger=ledger) for n in range(2) for ledger in LEDGERS], dict.fromkeys(LEDGERS, 114))


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=6), st.booleans())
def test_any_bytes_raise_only_our_errors(tmp_path_factory, at, data, cut):
    path = tmp_path_factory.getbasetemp() / "hypothesis.log"
    path.write_bytes(GOOD[:at] + data + (b"" if cut else GOOD[at + len(data) :]))
    seen = []
    for use in (lambda reader: seen.extend(reader.records(special=True)), EntryLogReader.ledgers_map,
                log_contents, lambda reader: reader.entry_at(at)):  # fmt: skip
        try:
            with EntryLogReader.open(path) as reader:
                use(reader)
        except BkctlError as error:
            seen.append(error)
    if at >= 1024 + len(entry(0)):
        assert seen[0].entry_id == 0


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_entry_logs_give_the_rows_of_apaches_shell(bookie):
    assert bookie.entry_logs
    for path, (expected, ledgers) in bookie.entry_logs.items():
        with EntryLogReader.open(path) as reader:
            rows = list(reader.records())
            assert reader.ledgers_map() in (None, reader.scan_ledgers()[0])
            assert {str(ledger.ledger_id): size for ledger, size in log_contents(reader).sizes.items()} == ledgers
            assert reader.log_id == int(path.stem, 16)
        assert len(rows) == len(expected)
        for row, answer in zip(rows, expected, strict=True):
            assert (row.type.value, row.ledger.scope_id) == (answer["type"], 0)
            assert (str(row.ledger.ledger_id), row.entry_id) == (answer["ledgerId"], answer["entryId"])
            assert (row.offset, row.record_size) == (answer["offset"], answer["recordSize"])
            assert row.last_add_confirmed == answer["lastAddConfirmed"]


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_entries_open_with_the_ledgers_own_digest(bookie):
    nodes = golden.zookeeper_nodes(bookie.version).values()
    passwords = {}
    for value in nodes:
        data = base64.b64decode(value)
        if data.startswith(b"BookieMetadataFormatVersion"):
            metadata = LedgerMetadata.parse(data)
            passwords[metadata.digest_type, metadata.password] = True
    opened = set()
    for path in bookie.entry_logs:
        for row in EntryLogReader.open(path).records():
            for digest_type, password in passwords:
                manager = DigestManager(row.ledger, digest_type, password)
                try:
                    entry = manager.open(row.body, row.entry_id)
                except Corrupt:
                    continue
                assert entry.payload == row.payload(digest_type)
                opened.add((digest_type, row.ledger, row.entry_id))
                break
            else:
                pytest.fail(f"{path}: entry {row.entry_id} of ledger {row.ledger} matches no digest")
    assert {digest_type for digest_type, _, _ in opened} == set(DigestType)


@pytest.mark.parametrize("bookie", golden.bookies(), ids=lambda bookie: f"{bookie.version}-{bookie.name}")
def test_apaches_indexes_match_apaches_shell(bookie):
    found = {}
    for file in BookieDirectories.at(bookie.ledger_dir).indexes():
        with LedgerIndexReader.open(file.path) as reader:
            assert reader.ledger == file.id
            answer = bookie.indexes[str(reader.ledger.ledger_id)]
            assert reader.header.master_key.hex() == answer["masterKey"]
            assert reader.header.fenced == answer["fenced"]
            locations = dict(reader.locations())
            assert reader.last_entry_id == max(locations, default=-1)
            found[str(reader.ledger.ledger_id)] = {key: unpack_location(value) for key, value in locations.items()}
    if bookie.storage_class.endswith("DbLedgerStorage"):
        assert not found
        return
    assert found == {ledger: answer["locations"] for ledger, answer in bookie.indexes.items()}
    logs = {log.log_id: log for log in map(EntryLogReader.open, bookie.entry_logs)}
    for ledger, locations in found.items():
        for entry_id, (log_id, offset) in locations.items():
            record = logs[log_id].entry_at(offset)
            assert (record.ledger, record.entry_id) == (LedgerId(0, int(ledger)), entry_id)
            assert pack_location(log_id, record.offset + 4) == pack_location(log_id, offset)


def _crafted(ledger: LedgerId, entry_id: int, size: int, *, payload: bytes = b"", cut: int | None = None) -> bytes:
    """The record of an entry whose length field says 0; `cut`: the bytes of its body."""
    body = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, (1 << 60) - 1, 0, b"") + payload.ljust(size, b"\1")
    body = body[:cut]
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(("version", "ledger"), [(1, LEDGERS[0]), (2, SCOPED[0])])
def test_fields_of_clients_are_no_damage(open_log, version, ledger):
    """Length, LAC, entry id and payload, at the end of a log too: closed, cut, or before zeros."""
    inner = b"".join(entry(number, bytes(30), ledger) for number in range(4))
    short = 28 if version == 1 else 37
    records = [
        _crafted(ledger, 0, 200), _crafted(ledger, 1 << 50, 0), _crafted(ledger, (1 << 63) - 1, 100),
        _crafted(ledger, 3, 0, cut=short), _crafted(ledger, 4, 300, payload=inner), _crafted(ledger, 5, 100, cut=short),
        _crafted(ledger, 6, 300, payload=bytes(300)),
    ]  # fmt: skip
    ids = [0, 1 << 50, (1 << 63) - 1, 3, 4, 5, 6]
    for count in range(1, len(records) + 1):
        some = records[:count]
        size = sum(map(len, some))
        closed = write_header(version, 1024 + size, 1) + b"".join([*some, *write_ledgers_map({ledger: size}, version)])
        is_open = write_header(version) + b"".join(some)
        for data in (closed, is_open, is_open + bytes(5000)):
            reader = open_log(data)
            assert read(reader)[1] is None
            rows = [(row.entry_id, row.record_size) for row in reader.records()]
            assert rows == [(number, len(record) - 4) for number, record in zip(ids, some, strict=False)]
            assert reader.scan_ledgers() == ({ledger: size}, None)
        for missing in (1, 5, 60):
            if missing < len(some[-1]) - 4 and inner not in some[-1]:
                reader = open_log(is_open[:-missing])
                assert reader.scan_ledgers() == ({ledger: size - len(some[-1])} if some[:-1] else {}, None)


@pytest.mark.parametrize("size", [180, 1 << 20])
def test_damaged_size_of_a_crafted_entry_is_damage(open_log, size):
    records = [_crafted(LEDGERS[0], 0, 50), _crafted(LEDGERS[0], 1, 50), *(entry(number) for number in range(2, 9))]
    data = bytearray(write_header() + b"".join(records))
    at = 1024 + len(records[0])
    struct.pack_into(">i", data, at, size)
    rows, error = read(open_log(bytes(data)))
    assert ids(rows) == [("entry", 0)]
    assert isinstance(error, CorruptRecord)
    assert f"at byte {at}" in str(error)


@pytest.mark.parametrize(("version", "ledger"), [(1, LEDGERS[0]), (2, SCOPED[0])])
@pytest.mark.parametrize("is_short", [False, True], ids=["length 0", "short"])
def test_collector_takes_entries_of_any_fields_many_at_once(open_log, monkeypatch, version, ledger, is_short):
    """One at a time, a log of 1 GiB would take minutes."""
    cut = (24 if version == 1 else 33) + 4 if is_short else None
    records = [_crafted(ledger, number, 40, cut=cut) for number in range(20_000)]
    reader = open_log(write_header(version) + b"".join(records))
    singles = []
    of_record = RecordBatch.of_record
    monkeypatch.setattr(RecordBatch, "of_record", lambda *args: singles.append(args) or of_record(*args))
    assert reader.scan_ledgers() == ({ledger: sum(map(len, records))}, None)
    assert len(singles) <= 2
