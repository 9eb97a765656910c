"""Headers, padding, special records and marks of the journal, by literal bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import BkctlError, CorruptRecord, Unsupported, UsageError
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.journal import LogMark
from bkctl.ids import LedgerId

V1, V2 = LedgerId(0, 1), LedgerId(7, 1)
KEY = master_key(b"")


@pytest.mark.parametrize(("version", "size"), [(2, 8), (3, 8), (4, 8), (5, 512), (6, 512), (7, 512)])
def test_headers(version, size):
    header = journal.write_header(version)
    assert header == b"BKLG" + bytes((0, 0, 0, version)) + bytes(size - 8)
    assert journal.read_header(header) == version
    assert journal.header_size(version) == size


def test_files_without_magic_are_version_1():
    for start in (b"", b"BKLG\0\0\0", b"\0\0\0\x30\0\0\0\0\0\0"):
        assert journal.read_header(start) == 1
    assert journal.header_size(1) == 0


@pytest.mark.parametrize("version", [8, 0, -1, 2**31 - 1])
def test_other_versions_are_unsupported(version):
    with pytest.raises(Unsupported, match=f"1.txn: Journal has version {version}"):
        journal.read_header(b"BKLG" + version.to_bytes(4, "big", signed=True), "1.txn")
    with pytest.raises(UsageError):
        journal.write_header(version)


def test_special_records_match_the_format():
    assert journal.ledger_key_record(V1, KEY) == bytes.fromhex(
        "00000028 0000000000000001 fffffffffffff000 00000014 850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    )
    assert journal.ledger_key_record(V2, KEY) == bytes.fromhex(
        "00000031 a0 0000000000000007 0000000000000001 fffffffffffff000 00000014"
        "850bf1071c5e3d8c24235676f8816ae0cbe2f14f"
    )
    assert journal.fence_record(V1) == bytes.fromhex("00000010 0000000000000001 ffffffffffffe000")
    assert journal.fence_record(V2) == bytes.fromhex("00000019 a0 0000000000000007 0000000000000001 ffffffffffffe000")
    packet = DigestManager(V1, DigestType.CRC32C).seal_lac(7)
    assert journal.explicit_lac_record(V1, packet) == bytes.fromhex(
        "00000028 0000000000000001 ffffffffffff8000 00000014 0000000000000001 0000000000000007 62842849"
    )
    packet = DigestManager(V2, DigestType.CRC32C).seal_lac(7)
    assert journal.explicit_lac_record(V2, packet) == bytes.fromhex(
        "0000003a a0 0000000000000007 0000000000000001 ffffffffffff8000 0000001d"
        "a3 0000000000000007 0000000000000001 0000000000000007 5ca90d3a"
    )


@pytest.mark.parametrize(
    ("position", "padding"),
    [
        (512, b""),
        (1004, bytes.fromhex("ffffff00 0000000c") + bytes(12)),
        (1016, bytes.fromhex("ffffff00 00000000")),
        (1017, bytes.fromhex("ffffff00 000001ff") + bytes(511)),
        (1023, bytes.fromhex("ffffff00 000001f9") + bytes(505)),
        (513, bytes.fromhex("ffffff00 000001f7") + bytes(503)),
    ],
)
def test_padding_ends_at_a_multiple_of_the_alignment(position, padding):
    assert journal.write_padding(position) == padding
    assert (position + len(padding)) % 512 == 0


@given(st.integers(0, 1 << 40), st.sampled_from([512, 1024, 4096]))
def test_padding_is_never_longer_than_needed(position, alignment):
    padding = journal.write_padding(position, alignment)
    assert (position + len(padding)) % alignment == 0
    assert len(padding) < alignment + 8


def test_marks():
    mark = LogMark(0x18C2F, 512)
    assert mark.serialize() == bytes.fromhex("0000000000018c2f 0000000000000200")
    assert LogMark.parse(mark.serialize()) == mark
    assert LogMark(1, 900) < LogMark(2, 0) < LogMark(2, 1)
    for damaged in (b"", bytes(15), bytes(17), b"\xff" * 16):
        with pytest.raises(CorruptRecord, match="lastMark"):
            LogMark.parse(damaged, "lastMark")
    assert journal.last_mark_name() == "lastMark"
    assert journal.last_mark_name(1, 2) == "lastMark.1"


def test_file_names():
    assert journal.file_name(0x1A1FC406BA8) == "1a1fc406ba8.txn"
    assert journal.journal_id_of("1a1fc406ba8.txn") == 0x1A1FC406BA8
    for name in ("x.txn", "1.log", ".txn", "1.txn.bak", "11111111111111111.txn"):
        assert journal.journal_id_of(name) is None


@given(st.binary(max_size=20))
def test_any_bytes_raise_only_declared_errors(data):
    for read in (journal.read_header, LogMark.parse):
        for each in (data, b"BKLG" + data):
            try:
                read(each)
            except BkctlError:
                continue
