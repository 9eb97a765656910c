"""Entries and digests by literal bytes, and that nothing but our errors comes out of damaged ones."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, DigestMismatch, TruncatedRecord, Unsupported, UsageError
from bkctl.formats.entry import DigestManager, DigestType, master_key, read_entry_header, read_lac_header, read_ledger
from bkctl.ids import LedgerId

V1, V2 = LedgerId(0, 1), LedgerId(7, 1)
PASSWORD = b"testPasswd"
HEADER_V1 = bytes.fromhex("0000000000000001 0000000000000000 ffffffffffffffff 0000000000000005")
HEADER_V2 = bytes.fromhex("0000000000000007 0000000000000001 0000000000000000 ffffffffffffffff 0000000000000005")
#: ledger, digest type, bytes before the digest, digest of the entry `hello`
ENTRIES = [
    (V1, DigestType.CRC32, HEADER_V1, "0000000030a56872"),
    (V1, DigestType.CRC32C, HEADER_V1, "e3a5f74d"),
    (V1, DigestType.HMAC, HEADER_V1, "1fc10b7ef25ddc35686904654653862deb5d2933"),
    (V1, DigestType.DUMMY, HEADER_V1, ""),
    (V2, DigestType.CRC32, b"\xa1" + HEADER_V2, "00000000d69b2b4d"),
    (V2, DigestType.CRC32C, b"\xa3" + HEADER_V2, "798f8b57"),
    (V2, DigestType.HMAC, b"\xa2" + HEADER_V2, "fb6ca77e1566d44123d5a8296b6d15d81d8eeae6"),
    (V2, DigestType.DUMMY, b"\xa4" + HEADER_V2, ""),
]
LAC_V1 = "0000000000000001 0000000000000007"
LAC_PACKETS = [
    (V1, DigestType.CRC32, LAC_V1 + "0000000065a4cab5"),
    (V1, DigestType.CRC32C, LAC_V1 + "62842849"),
    (V1, DigestType.HMAC, LAC_V1 + "468f360d819a65cefd05a2636880c103b3c774aa"),
    (V1, DigestType.DUMMY, LAC_V1),
    (V2, DigestType.CRC32C, "a3 0000000000000007 0000000000000001 0000000000000007 5ca90d3a"),
]
ledgers = st.one_of(
    st.builds(LedgerId, st.just(0), st.integers(0, 2**63 - 1)),
    st.builds(LedgerId, st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
longs = st.integers(-(2**63), 2**63 - 1)


def test_master_keys_match_apache():
    assert master_key(b"").hex() == "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    assert master_key(PASSWORD).hex() == "2e2a69d870796fe05c0e77c52a29ce5e4222b758"


@pytest.mark.parametrize(("ledger", "digest_type", "header", "digest"), ENTRIES)
def test_sealed_entries_match_the_format(ledger, digest_type, header, digest):
    manager = DigestManager(ledger, digest_type, PASSWORD)
    sealed = manager.seal(0, -1, 5, b"hello")
    assert sealed == header + bytes.fromhex(digest)
    assert manager.overhead_size == len(sealed)
    entry = manager.open(sealed + b"hello", 0)
    assert (entry.entry_id, entry.last_add_confirmed, entry.length, bytes(entry.payload)) == (0, -1, 5, b"hello")


@pytest.mark.parametrize(("ledger", "digest_type", "packet"), LAC_PACKETS)
def test_lac_packets_match_the_format(ledger, digest_type, packet):
    manager = DigestManager(ledger, digest_type, PASSWORD)
    assert manager.seal_lac(7) == bytes.fromhex(packet)
    assert manager.open_lac(bytes.fromhex(packet)) == 7
    header = read_lac_header(bytes.fromhex(packet))
    assert (header.ledger, header.last_add_confirmed) == (ledger, 7)
    assert (header.format_version, header.size) == ((2, 25) if ledger.is_scoped else (1, 16))


def test_reads_entry_headers():
    v1 = read_entry_header(b"xx" + HEADER_V1, 2)
    assert v1 == (V1, 0, -1, 5, 1, None, 32)
    v2 = read_entry_header(b"\xa3" + HEADER_V2)
    assert v2 == (V2, 0, -1, 5, 2, DigestType.CRC32C, 41)
    assert read_entry_header(b"\xa0" + HEADER_V2).digest_type is None
    assert read_ledger(HEADER_V1) == (V1, 8)
    assert read_ledger(b"\xa3" + HEADER_V2) == (V2, 17)


@pytest.mark.parametrize("flags", [0x80, 0x90, 0xB3, 0xC0, 0xF3, 0xFF, 0xA5, 0xAF])
def test_refuses_other_entry_versions(flags):
    for read in (read_entry_header, read_lac_header, read_ledger):
        with pytest.raises(Unsupported, match=f"{flags:#04x} at byte 0"):
            read(bytes([flags]) + bytes(60))


def test_short_headers_are_truncated():
    for read, data in (
        (read_entry_header, HEADER_V1[:31]),
        (read_entry_header, b"\xa1" + HEADER_V2[:39]),
        (read_lac_header, HEADER_V1[:15]),
        (read_lac_header, b"\xa1" + HEADER_V2[:23]),
        (read_ledger, HEADER_V1[:7]),
        (read_ledger, b"\xa1" + HEADER_V2[:15]),
        (read_ledger, b""),
    ):
        with pytest.raises(TruncatedRecord):
            read(data)


@pytest.mark.parametrize("ledger", [V1, V2])
@pytest.mark.parametrize("digest_type", list(DigestType))
def test_refuses_entries_of_other_ids(ledger, digest_type):
    manager = DigestManager(ledger, digest_type, PASSWORD)
    blob = manager.seal(3, 1, 5, b"hello") + b"hello"
    assert manager.open(blob, None).entry_id == 3
    with pytest.raises(DigestMismatch, match="got entry 3 instead of entry 4"):
        manager.open(blob, 4)
    for other in (LedgerId(ledger.scope_id, 2), LedgerId(9, 1), LedgerId(0, 3)):
        with pytest.raises(DigestMismatch):
            DigestManager(other, digest_type, PASSWORD).open(blob, 3)
        with pytest.raises(DigestMismatch):
            DigestManager(other, digest_type, PASSWORD).open_lac(manager.seal_lac(1))
    with pytest.raises(DigestMismatch, match="bytes"):
        manager.open(blob[: manager.overhead_size - 1], 3)
    with pytest.raises(DigestMismatch):
        manager.open(b"", None)
    with pytest.raises(DigestMismatch, match="bytes"):
        manager.open_lac(manager.seal_lac(1)[:-1])


def test_a_wrong_password_or_digest_type_does_not_match():
    blob = DigestManager(V1, DigestType.HMAC, PASSWORD).seal(0, -1, 5, b"hello") + b"hello"
    for manager in (DigestManager(V1, DigestType.HMAC, b"other"), DigestManager(V1, DigestType.CRC32, PASSWORD)):
        with pytest.raises(DigestMismatch, match="does not match"):
            manager.open(blob, 0)
    scoped = DigestManager(V2, DigestType.CRC32C).seal(0, -1, 5, b"hello") + b"hello"
    with pytest.raises(DigestMismatch, match="another digest type"):
        DigestManager(V2, DigestType.CRC32).open(scoped, 0)


@pytest.mark.parametrize("digest_type", [DigestType.CRC32, DigestType.CRC32C, DigestType.HMAC])
@pytest.mark.parametrize("ledger", [V1, V2])
def test_detects_every_flipped_bit(ledger, digest_type):
    manager = DigestManager(ledger, digest_type, PASSWORD)
    blob = manager.seal(3, 1, 5, b"hello") + b"hello"
    for bit in range(len(blob) * 8):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DigestMismatch):
            manager.open(damaged, 3)


@given(
    ledgers,
    st.sampled_from(DigestType),
    longs,
    longs,
    longs,
    st.binary(max_size=200),
    st.sampled_from((bytes, bytearray, memoryview)),
)
def test_sealed_entries_open(ledger, digest_type, entry_id, lac, length, payload, kind):
    manager = DigestManager(ledger, digest_type, PASSWORD)
    blob = manager.seal(entry_id, lac, length, kind(payload)) + payload
    entry = manager.open(kind(blob), entry_id)
    assert entry[:3] == (entry_id, lac, length)
    assert entry.payload == payload
    header = read_entry_header(kind(blob))
    assert header[:4] == (ledger, entry_id, lac, length)
    assert blob[manager.overhead_size :] == blob[header.size + digest_type.code_length :] == payload
    assert manager.open_lac(manager.seal_lac(lac)) == lac


@given(ledgers, st.sampled_from(DigestType), st.binary(max_size=80), st.booleans())
def test_any_bytes_raise_only_declared_errors(ledger, digest_type, data, scoped):
    manager = DigestManager(ledger, digest_type)
    for blob in (data, b"\xa3" + data, manager.seal(0, 0, 0, b"")[:-1] + data):
        for read in (
            read_entry_header,
            read_lac_header,
            read_ledger,
            manager.open_lac,
            lambda b: manager.open(b, None),
        ):
            with contextlib.suppress(BkctlError):
                read(blob)


def test_parses_digest_type_names():
    assert DigestType.parse("mac") is DigestType.parse("HMAC") is DigestType.HMAC
    assert DigestType.parse(" crc32c ") is DigestType.CRC32C
    assert [each.code_length for each in DigestType] == [8, 20, 4, 0]
    with pytest.raises(UsageError, match="md5"):
        DigestType.parse("md5")


def test_refuses_scope_0_ids_of_2_63_or_more():
    with pytest.raises(UsageError):
        DigestManager(LedgerId(0, 2**63), DigestType.CRC32)
    DigestManager(LedgerId(1, 2**63), DigestType.CRC32)
