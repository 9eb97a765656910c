"""Ledger index files read offline; Apache's own are in test_entry_log."""

from __future__ import annotations

import os
import struct
import threading

import pytest

from bkctl.errors import CorruptRecord, NotFound, TruncatedRecord
from bkctl.files.index import LedgerIndexReader
from bkctl.files.windows import WINDOW_SIZE_BYTES
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.index import index_path, slot_offset, write_header
from bkctl.ids import LedgerId

KEY = master_key(b"")
LEDGER = LedgerId(0, 0x1234)


@pytest.fixture
def index(tmp_path):
    """Open an index file of the given bytes, where a ledger's stands."""

    def index(data: bytes, ledger: LedgerId = LEDGER) -> LedgerIndexReader:
        path = tmp_path / index_path(ledger)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return LedgerIndexReader.open(path)

    return index


def slots(*locations: int) -> bytes:
    return struct.pack(f">{len(locations)}q", *locations)


@pytest.mark.parametrize("ledger", [LedgerId(0, 0x1234), LedgerId(7, 1)])
@pytest.mark.parametrize("version", [0, 1])
def test_an_index_file_returns_header_and_locations(index, ledger, version):
    packet = DigestManager(ledger, DigestType.CRC32C).seal_lac(3)
    header = write_header(KEY, fenced=True, explicit_lac=packet if version else None, version=version)
    reader = index(header + slots(0x404, 0, 0x500) + bytes(8192 - 24), ledger)
    assert reader.ledger == ledger
    assert (reader.header.master_key, reader.header.fenced, reader.header.version) == (KEY, True, version)
    assert reader.header.explicit_lac == (packet if version else None)
    assert (reader.slot_count, reader.last_entry_id) == (1024, 2)
    assert list(reader.locations()) == [(0, 0x404), (2, 0x500)]
    assert [(first, [*page]) for first, page in reader.pages()] == [(0, [0x404, 0, 0x500, *[0] * 1021])]
    assert [(first, [*page]) for first, page in reader.pages(1, 3)] == [(1, [0, 0x500])]
    assert [reader.location_of(entry_id) for entry_id in (-1, 0, 1, 2, 1023, 1024, 2**63)] == [
        0, 0x404, 0, 0x500, 0, 0, 0
    ]  # fmt: skip


def test_a_header_alone_and_a_part_of_a_slot(index):
    for tail, count in ((b"", 0), (b"\1" * 7, 0), (slots(5) + b"\1\1", 1)):
        reader = index(write_header(KEY) + tail)
        counts = reader.slot_count, len(list(reader.locations())), sum(len(page) for _, page in reader.pages())
        assert counts == (count, count, count)
        assert reader.last_entry_id == count - 1
    short = index(write_header(KEY)[:40])
    assert (short.slot_count, list(short.locations()), short.last_entry_id) == (0, [], -1)


def test_sparse_files_are_read_without_their_holes(index):
    path = index(write_header(KEY)).path
    last = 1 << 34
    with path.open("r+b") as file:
        file.seek(slot_offset(5))
        file.write(slots(0x404))
        file.seek(slot_offset(last))
        file.write(slots(0x999))
    assert os.stat(path).st_blocks < 1000
    with LedgerIndexReader.open(path) as reader:
        assert list(reader.locations()) == [(5, 0x404), (last, 0x999)]
        assert [location for _, page in reader.pages(6) for location in page if location] == [0x999]
        assert reader.last_entry_id == last


def test_more_slots_than_a_window(index):
    count = 2 * WINDOW_SIZE_BYTES // 8 + 77
    locations = [number % 3 for number in range(count)]
    reader = index(write_header(KEY) + slots(*locations))
    assert [location for _, page in reader.pages() for location in page] == locations
    present = [(number, location) for number, location in enumerate(locations) if location]
    assert list(reader.locations()) == present
    assert reader.last_entry_id == present[-1][0]


def test_other_files_do_not_open_as_indexes(index, tmp_path):
    with pytest.raises(CorruptRecord, match=r"1234\.idx: .*BKLE"):
        index(bytes(2000))
    with pytest.raises(TruncatedRecord, match=r"1234\.idx: "):
        index(b"")
    with pytest.raises(NotFound):
        LedgerIndexReader.open(tmp_path / "none.idx")


def test_an_index_outside_its_place_has_no_ledger(tmp_path):
    (tmp_path / "copy.idx").write_bytes(write_header(KEY))
    assert LedgerIndexReader.open(tmp_path / "copy.idx").ledger is None


def test_header_of_a_new_empty_file_is_awaited(tmp_path):
    """A running bookie creates an index file before it writes the header; a real one was read in between."""
    path = tmp_path / "new.idx"
    path.touch()
    writer = threading.Timer(0.1, path.write_bytes, [write_header(KEY)])
    writer.start()
    try:
        assert LedgerIndexReader.open(path).header.master_key == KEY
    finally:
        writer.join()
