"""Records of journals and entry logs by literal bytes."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, CorruptRecord, Unsupported
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import (
    NO_LEDGER,
    RecordType,
    contradicts_size,
    read_record,
    write_ids,
)
from bkctl.ids import LedgerId

V1, V2 = LedgerId(0, 1), LedgerId(7, 1)


def read(body: bytes):
    return read_record(b"xxxx" + body + b"yyyy", 4, len(body), 512, "file")


@pytest.mark.parametrize(("ledger", "version"), [(V1, 1), (V2, 2)])
def test_reads_an_entry(ledger, version):
    body = DigestManager(ledger, DigestType.CRC32C).seal(5, 3, 9, b"hello") + b"hello"
    record = read(body)
    assert record[:4] == (512, len(body), RecordType.ENTRY, ledger)
    assert (record.entry_id, record.last_add_confirmed, record.length) == (5, 3, 9)
    assert (record.format_version, record.body) == (version, body)
    assert record.payload(DigestType.CRC32C) == b"hello"
    assert record.payload_size(DigestType.CRC32C) == 5
    assert record.payload_size() == (5 if version == 2 else None)
    assert record.digest_type is (DigestType.CRC32C if version == 2 else None)


@pytest.mark.parametrize("ledger", [V1, V2])
@pytest.mark.parametrize(
    ("entry_id", "kind"),
    [
        (-0x1000, RecordType.LEDGER_KEY),
        (-0x2000, RecordType.FENCE),
        (-0x4000, RecordType.FORCE_LEDGER),
        (-0x8000, RecordType.EXPLICIT_LAC),
        (-1, RecordType.UNKNOWN),
        (-5, RecordType.UNKNOWN),
    ],
)
def test_reads_special_records(ledger, entry_id, kind):
    ids = write_ids(ledger, entry_id)
    assert len(ids) == (25 if ledger.is_scoped else 16)
    for body in (ids, ids + bytes(20)):
        record = read(body)
        assert (record.type, record.ledger, record.entry_id) == (kind, ledger, entry_id)
        assert (record.last_add_confirmed, record.length, record.digest_type) == (None, None, None)
        assert record.payload_size(DigestType.CRC32) is None


def test_the_first_byte_decides_before_any_id():
    # Bytes 8 to 15 of this scoped entry are scope and ledger bits that read as -0x1000 in V1.
    ledger = LedgerId(0xFF, 0xFFFF_FFFF_FFF0_0005)
    body = DigestManager(ledger, DigestType.CRC32).seal(0, -1, 0, b"")
    record = read(body)
    assert (record.type, record.ledger, record.entry_id) == (RecordType.ENTRY, ledger, 0)


def test_records_of_no_ledger():
    ledgers_map = read(b"\xff" * 8 + (-2).to_bytes(8, "big", signed=True) + bytes(4))
    assert (ledgers_map.type, ledgers_map.ledger, ledgers_map.entry_id) == (RecordType.LEDGERS_MAP, NO_LEDGER, -2)
    assert read(b"\xff" * 8 + bytes(3060)).type is RecordType.PADDING


@pytest.mark.parametrize("body", [b"", bytes(15), b"\xa0" + bytes(23)])
def test_bodies_too_short_for_their_ids_are_corrupt(body):
    with pytest.raises(CorruptRecord, match=r"file: .* at byte 512"):
        read(body)


@pytest.mark.parametrize("flags", [0x80, 0xB0, 0xFE, 0xFF, 0xA5])
def test_bodies_of_other_versions_are_unsupported(flags):
    with pytest.raises(Unsupported, match=r"file: .* at byte 512"):
        read(bytes((flags,)) + bytes(60))


def test_entries_shorter_than_their_header_have_no_payload():
    record = read(bytes(20))
    assert (record.type, record.last_add_confirmed, record.payload_size(DigestType.DUMMY)) == (
        RecordType.ENTRY, None, None
    )  # fmt: skip
    assert read(bytes(33)).payload_size(DigestType.CRC32) is None


@pytest.mark.parametrize("ledger", [V1, V2])
def test_special_payloads(ledger):
    ids = write_ids(ledger, -0x1000)
    for tail in (b"", b"xx"):
        assert read(ids + b"\0\0\0\3key" + tail).special_payload == b"key"
    for damaged in (ids, ids + b"\0\0\0", ids + b"\0\0\0\4key", ids + b"\xff\xff\xff\xffkey"):
        with pytest.raises(CorruptRecord):
            assert read(damaged).special_payload


def test_contradicts_size_of_an_entry_larger_than_its_ledger():
    body = DigestManager(V1, DigestType.CRC32).seal(5, 3, 1000, b"hello")
    assert not contradicts_size(body, 1052)
    assert contradicts_size(body, 1062)
    assert not contradicts_size(b"", 1 << 30)
    assert not contradicts_size(b"\x90" * 60, 1 << 30)


@given(st.binary(max_size=80), st.sampled_from([b"", b"\xa0", b"\xa3", b"\xff" * 8]))
def test_any_bytes_raise_only_declared_errors(data, start):
    with contextlib.suppress(BkctlError):
        record = read(start + data)
        assert record.body == start + data
        assert record.payload_size(DigestType.HMAC) is None or record.payload(DigestType.HMAC) is not None
        with contextlib.suppress(CorruptRecord):
            assert len(record.special_payload) < len(record.body)
