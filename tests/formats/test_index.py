"""Headers and paths of index files, keys and values of DbLedgerStorage, by literal bytes."""

from __future__ import annotations

import contextlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, TruncatedRecord, Unsupported, UsageError
from bkctl.formats import index
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import LedgerData
from bkctl.ids import LedgerId

KEY = master_key(b"")
PACKET = DigestManager(LedgerId(0, 1), DigestType.CRC32C).seal_lac(7)
FIXED = b"BKLE" + bytes.fromhex("00000001 00000014") + KEY


def test_headers():
    assert index.write_header(KEY) == FIXED + bytes(1024 - len(FIXED))
    fenced = index.write_header(KEY, fenced=True, explicit_lac=PACKET)
    assert fenced == (FIXED + bytes.fromhex("00000001 00000014") + PACKET).ljust(1024, b"\0")
    header = index.read_header(fenced)
    assert (header.version, header.master_key, header.fenced, header.explicit_lac) == (1, KEY, True, PACKET)
    old = index.write_header(KEY, fenced=True, version=0)
    assert old == (b"BKLE" + bytes.fromhex("00000000 00000014") + KEY + b"\0\0\0\1").ljust(1024, b"\0")
    assert index.read_header(old) == (0, KEY, 1, None)
    assert index.read_header(old[:36]) == (0, KEY, 1, None)


def test_damaged_headers():
    good = index.write_header(KEY, explicit_lac=PACKET)
    for data, error, problem in (
        (b"BKLO" + good[4:], CorruptRecord, "BKLE"),
        (good[:4] + b"\0\0\0\2" + good[8:], Unsupported, "version 2"),
        (good[:8] + b"\xff\xff\xff\xff" + good[12:], CorruptRecord, "-1 bytes of master key at byte 8"),
        (good[:8] + b"\x7f\xff\xff\xff" + good[12:], CorruptRecord, "2147483647 bytes of master key"),
        (good[:36] + b"\0\0\0\x0f" + good[40:], CorruptRecord, "15 bytes of explicit LAC at byte 36"),
        (good[:36] + b"\x7f\xff\xff\xff" + good[40:], CorruptRecord, "2147483647 bytes of explicit LAC"),
        (good[:11], TruncatedRecord, "11 are there"),
        (good[:39], TruncatedRecord, "39 are there"),
        (good[:59], TruncatedRecord, "needs 20 bytes, 19 are there"),
        (b"", TruncatedRecord, "0 are there"),
    ):
        with pytest.raises(error, match=f"^1.idx: .*{problem}"):
            index.read_header(data, "1.idx")
    with pytest.raises(UsageError):
        index.write_header(bytes(1020))


@given(st.binary(max_size=80))
def test_any_header_raises_only_declared_errors(data):
    for start in (b"", b"BKLE\0\0\0\0", b"BKLE\0\0\0\1\0\0\0\x14" + KEY):
        with contextlib.suppress(BkctlError):
            index.read_header(start + data)


@pytest.mark.parametrize(
    ("ledger", "path"),
    [
        (LedgerId(0, 0), "0/0/0.idx"),
        (LedgerId(0, 0x1234), "12/34/1234.idx"),
        (LedgerId(0, 0x6B00FE09), "fe/9/6b00fe09.idx"),
        (LedgerId(0, 2**63 - 1), "ff/ff/7fffffffffffffff.idx"),
        (LedgerId(7, 1), "00000000/00000007/00000000/00000001.idx"),
    ],
)
def test_paths(ledger, path):
    assert index.index_path(ledger) == path
    assert index.ledger_of_index_path(path) == ledger
    assert index.ledger_of_index_path(f"/data/current/{path}") == ledger


@pytest.mark.parametrize(
    "path",
    ["0/1/0.idx", "0/0/0.idx.rloc", "0.idx", "12/34/01234.idx", "00/00/0.idx", "00000000/00000007/00000001.idx",
     "00000000/00000000/00000000/00000001.idx", "0/0/x.idx"],
)  # fmt: skip
def test_rejects_other_paths(path):
    assert index.ledger_of_index_path(path) is None


@given(st.builds(LedgerId, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), st.integers(0, 2**63 - 1))
def test_paths_and_keys_round_trip(ledger, entry_id):
    assert index.ledger_of_index_path(index.index_path(ledger)) == ledger
    key = index.location_key(ledger, entry_id)
    assert len(key) == (24 if ledger.is_scoped else 16)
    assert index.read_location_key(key, scoped=ledger.is_scoped) == (ledger, entry_id)
    if ledger.is_scoped or ledger.ledger_id < 2**63:
        assert index.read_ledger_key(index.ledger_key(ledger), scoped=ledger.is_scoped) == ledger


def test_keys_and_values_match_the_format():
    assert index.ledger_key(LedgerId(0, 5)) == bytes.fromhex("0000000000000005")
    assert index.ledger_key(LedgerId(7, 5)) == bytes.fromhex("0000000000000007 0000000000000005")
    assert index.location_key(LedgerId(0, 5), 9) == bytes.fromhex("0000000000000005 0000000000000009")
    assert index.write_location(0x1_0000_0404) == bytes.fromhex("0000000100000404")
    assert index.read_location(bytes.fromhex("0000000100000404")) == 0x1_0000_0404
    # The keys after Apache's rebuild of the ledgers index, and the storage flags.
    assert index.read_ledger_key(bytes.fromhex("0000000000000005 0000000000000000")) == LedgerId(0, 5)
    assert index.read_ledger_key(bytes.fromhex("ffffffffffff1103")) is None
    assert index.STORAGE_FLAGS_LEDGER_ID & (1 << 64) - 1 == 0xFFFFFFFFFFFF1103
    for read, data in (
        (index.read_ledger_key, bytes(9)),
        (lambda key: index.read_ledger_key(key, scoped=True), bytes(8)),
        (index.read_location_key, bytes(8)),
        (index.read_location, bytes(7)),
    ):
        with pytest.raises(Corrupt):
            read(data)


def test_ledger_data():
    data = LedgerData(exists=True, fenced=False, master_key=KEY)
    assert data.serialize() == bytes.fromhex("0801 1000 1a14") + KEY
    assert LedgerData.parse(data.serialize()) == data
    full = LedgerData(exists=True, fenced=True, master_key=b"", explicit_lac=PACKET, limbo=True)
    assert full.serialize() == bytes.fromhex("0801 1001 1a00 2214") + PACKET + bytes.fromhex("2801")
    assert LedgerData.parse(full.serialize()) == full
    for damaged in (b"", b"\x08\x01", data.serialize()[:-1], b"\xff"):
        with pytest.raises(Corrupt, match=r"^ledgers: "):
            LedgerData.parse(damaged, "ledgers")
    assert KEY.hex() not in repr(data)


@pytest.mark.parametrize("scope_id", [0, 7, (1 << 64) - 1])
def test_batched_keys_and_values_match_single_ones(scope_id: int) -> None:
    runs = [(LedgerId(scope_id, 0), 2), (LedgerId(scope_id, 5), 0), (LedgerId(scope_id, (1 << 63) - 1), 3)]
    entry_ids, locations = [0, (1 << 63) - 1, 7, 1, 8], [1 << 32 | 1028, 0, (1 << 63) - 1, 2, 3]
    ledgers = [ledger for ledger, count in runs for _ in range(count)]
    keys = index.location_keys(runs, array("q", entry_ids), scoped=scope_id != 0)
    assert keys == [index.location_key(*each) for each in zip(ledgers, entry_ids, strict=True)]
    assert index.location_values(array("q", locations)) == [index.write_location(each) for each in locations]
