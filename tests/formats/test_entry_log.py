"""Headers, ledgers maps, locations and names of entry logs, by literal bytes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, CorruptRecord, TruncatedRecord, Unsupported
from bkctl.formats import entry_log
from bkctl.formats.entry_log import EntryLogHeader, read_ledgers_map, write_ledgers_map
from bkctl.ids import LedgerId


def test_headers():
    header = entry_log.write_header(1, 0x1234, 3)
    assert header == b"BKLO" + bytes.fromhex("00000001 0000000000001234 00000003") + bytes(1004)
    assert entry_log.read_header(header) == EntryLogHeader(b"BKLO", 1, 0x1234, 3)
    assert entry_log.write_header() == b"BKLO\0\0\0\1" + bytes(1016)
    assert entry_log.read_header(entry_log.write_header(2)).version == 2


def test_damaged_headers():
    with pytest.raises(TruncatedRecord, match=r"^0.log: "):
        entry_log.read_header(entry_log.write_header()[:1023], "0.log")
    with pytest.raises(CorruptRecord, match=r"^0.log: .*BKLO"):
        entry_log.read_header(b"BKLE" + bytes(1020), "0.log")
    for version in (3, -1):
        with pytest.raises(Unsupported, match=f"^0.log: .*version {version}"):
            entry_log.read_header(b"BKLO" + version.to_bytes(4, "big", signed=True) + bytes(1020), "0.log")


def test_ledgers_maps_have_their_bytes():
    (record,) = write_ledgers_map({LedgerId(0, 5): 100, LedgerId(0, 2**63 - 1): 7})
    assert record == bytes.fromhex(
        "00000034 ffffffffffffffff fffffffffffffffe 00000002"
        "0000000000000005 0000000000000064 7fffffffffffffff 0000000000000007"
    )
    assert read_ledgers_map(record[4:], 1) == [(LedgerId(0, 5), 100), (LedgerId(0, 2**63 - 1), 7)]
    (record,) = write_ledgers_map({LedgerId(7, 1): 100}, version=2)
    assert record == bytes.fromhex(
        "0000002c ffffffffffffffff fffffffffffffffe 00000001 0000000000000007 0000000000000001 0000000000000064"
    )
    assert read_ledgers_map(record[4:], 2) == [(LedgerId(7, 1), 100)]
    assert list(write_ledgers_map({})) == []


def test_large_ledgers_maps_take_several_records():
    sizes = {LedgerId(0, number): number for number in range(20_001)}
    records = list(write_ledgers_map(sizes))
    assert [len(record) for record in records] == [4 + 20 + 160_000, 4 + 20 + 160_000, 4 + 20 + 16]
    assert dict(item for record in records for item in read_ledgers_map(record[4:], 1)) == sizes


@pytest.mark.parametrize("position", [0, 7, 8, 15, 19])
def test_damaged_ledgers_maps(position):
    (record,) = write_ledgers_map({LedgerId(0, 5): 100})
    damaged = bytearray(record[4:])
    damaged[position] ^= 1
    with pytest.raises(CorruptRecord, match=r"^log: .* at byte 99"):
        read_ledgers_map(damaged, 1, 99, "log")
    for cut in (0, 19, 35):
        with pytest.raises(CorruptRecord):
            read_ledgers_map(record[4 : 4 + cut], 1)
    with pytest.raises(CorruptRecord):
        read_ledgers_map(record[4:], 2)


@given(st.binary(max_size=80), st.sampled_from([0, 1, 2]))
def test_any_bytes_raise_only_declared_errors(data, version):
    with contextlib.suppress(BkctlError):
        read_ledgers_map(bytes.fromhex("ffffffffffffffff fffffffffffffffe") + data, version)
    with contextlib.suppress(BkctlError):
        entry_log.read_header(b"BKLO" + data.ljust(1020, b"\0"))


LEDGER_IDS = st.integers(0, 2**64 - 1)
SIZES = st.integers(0, 2**63 - 1)


@given(st.dictionaries(LEDGER_IDS.filter(lambda number: number < 2**63), SIZES, min_size=1, max_size=50))
def test_ledgers_map_round_trips(sizes):
    expected = {LedgerId(0, ledger_id): size for ledger_id, size in sizes.items()}
    (record,) = write_ledgers_map(expected)
    assert len(record) == 4 + 20 + 16 * len(sizes)
    assert dict(read_ledgers_map(record[4:], 1)) == expected


@given(st.dictionaries(st.tuples(st.integers(1, 2**64 - 1), LEDGER_IDS), SIZES, min_size=1, max_size=50))
def test_scoped_ledgers_map_round_trips(sizes):
    expected = {LedgerId(*ids): size for ids, size in sizes.items()}
    (record,) = write_ledgers_map(expected, version=2)
    assert len(record) == 4 + 20 + 24 * len(sizes)
    assert dict(read_ledgers_map(record[4:], 2)) == expected


@given(st.integers(0, 2), st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1), st.binary(max_size=40))
def test_entry_log_header_round_trips(version, offset, count, rest):
    header = entry_log.write_header(version, offset, count)
    assert entry_log.read_header(header + rest) == EntryLogHeader(b"BKLO", version, offset, count)


@given(st.binary(max_size=200), st.integers(0, 2**31), st.sampled_from([0, 1, 2]))
def test_map_with_a_huge_count_allocates_nothing(data, count, version):
    body = bytes.fromhex("ffffffffffffffff fffffffffffffffe") + count.to_bytes(4, "big") + data
    with contextlib.suppress(CorruptRecord):
        assert len(read_ledgers_map(body, version)) == count <= 200


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1))
def test_location_round_trips(log_id, offset):
    assert entry_log.unpack_location(entry_log.pack_location(log_id, offset)) == (log_id, offset)


def test_locations():
    assert entry_log.pack_location(1, 0x404) == 0x0000_0001_0000_0404
    assert entry_log.unpack_location(0x0000_0001_0000_0404) == (1, 0x404)
    assert entry_log.unpack_location(entry_log.pack_location(2**31 - 1, 2**31)) == (2**31 - 1, 2**31)


def test_names_and_last_ids():
    assert entry_log.file_name(0x1F) == "1f.log"
    assert entry_log.log_id_of("1f.log") == 0x1F
    for name in ("1f.log.compacting", "x.log", "1.txn", "111111111.log"):
        assert entry_log.log_id_of(name) is None
    assert entry_log.write_last_id(31) == b"1f\n"
    assert entry_log.read_last_id(b"1f\n") == 31
    for unreadable in (b"", b"0\n", b"-1\n", b"x\n", b"\xff"):
        assert entry_log.read_last_id(unreadable) is None


def test_names_of_compactions():
    assert entry_log.compaction_of("1f.log.compacting") == (0x1F, None)
    assert entry_log.compaction_of("1f.log.a.compacted") == (0x1F, 0xA)
    for name in ("1f.log", "1f.compacting", "1f.log.compacted", "1f.log.a.b.compacted", "x.log.compacting", ""):
        assert entry_log.compaction_of(name) is None
    assert entry_log.content_id_of("1f.log") == 0x1F
    assert entry_log.content_id_of("20.log.1f.compacted") == 0x20
    assert entry_log.content_id_of("20.log.compacting") == 0x20
    assert entry_log.content_id_of("lastId") is None


@given(st.text(max_size=30) | st.from_regex(r"[0-9a-f]{1,9}\.log(\.[0-9a-f]{1,9})?(\.compact(ing|ed))?"))
def test_file_names_are_unambiguous(name):
    log, compaction = entry_log.log_id_of(name), entry_log.compaction_of(name)
    assert log is None or compaction is None
    if log is not None:
        assert entry_log.log_id_of(entry_log.file_name(log)) == log


@given(st.binary(max_size=40))
def test_any_last_id_parses_or_gives_none(data):
    found = entry_log.read_last_id(data)
    assert found is None or found > 0
    if found is not None and found < 2**31:
        assert entry_log.read_last_id(entry_log.write_last_id(found)) == found
