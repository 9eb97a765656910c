"""Journals that a crash cut at any sector, whatever the clients wrote: each group before the cut is read, none refused.

What clients choose (payloads, ids, lengths, LACs) must not pass for damage, and a synced group that lost a sector is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.config import BookieConfig
from bkctl.disk import SECTOR_SIZE_BYTES, Files
from bkctl.errors import CorruptRecord
from bkctl.files.journal import JournalReader
from bkctl.files.scan import ScanState
from bkctl.formats import journal
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.record import Record, record_of
from bkctl.ids import LedgerId
from bkctl.storage.journal_writer import JournalWriter

LEDGERS = {5: LedgerId(0, 5), 6: LedgerId(0, 5), 7: LedgerId(9, 5)}
#: The payload sizes of entries, by group. 468 and 459 make records of exactly one sector.
SIZES: list[tuple[tuple[int, ...], ...]] = [
    ((3000, 20, 1500),),
    ((700,), (468, 468, 459, 459, 2000)),
    ((10, 5000), (472, 512), (1, 4096, 1)),
    ((0,), (2000, 2000), (976, 967, 976), (9000,)),
]
Filler = Callable[[int, int, random.Random], bytes]


def _records(ledger: LedgerId, first_id: int) -> bytes:
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    return b"".join(
        record_of(by.seal(first_id + number, first_id - 1, 1, b"copied") + b"copied") for number in range(2)
    )


def _group_at(position: int, first_id: int = 1000) -> bytes:
    """Whole records and padding, aligned for a payload that begins at file offset `position`."""
    records = _records(LEDGERS[6], first_id)
    return journal.write_padding(position) + records + journal.write_padding(len(records))


def zeros(size: int, _position: int, _chance: random.Random) -> bytes:
    return bytes(size)


def random_bytes(size: int, _position: int, chance: random.Random) -> bytes:
    return chance.randbytes(size)


def ends_in_zero(size: int, _position: int, chance: random.Random) -> bytes:
    return (chance.randbytes(max(0, size - 4)) + bytes(4))[:size]


def sparse(size: int, _position: int, chance: random.Random) -> bytes:
    return b"".join(chance.choice((bytes(520), chance.randbytes(504))) for _ in range(size // 500 + 1))[:size]


def padding(size: int, _position: int, _chance: random.Random) -> bytes:
    return (b"\xff\xff\xff\0\0\0\0\0\1" * size)[:size]


def empty_padding(size: int, _position: int, _chance: random.Random) -> bytes:
    return (b"\xff\xff\xff\0\0\0\0\0" * size)[:size]


def sizes_of_16(size: int, _position: int, _chance: random.Random) -> bytes:
    return (b"\0\0\0\x10" * size)[:size]


def copies(size: int, position: int, _chance: random.Random) -> bytes:
    """Records and padding at the very borders of the file, again and again."""
    once = _group_at(position)
    return (once + once[-SECTOR_SIZE_BYTES:] * (size // SECTOR_SIZE_BYTES))[:size]


def unaligned_copies(size: int, _position: int, _chance: random.Random) -> bytes:
    return (_group_at(0) * (size // 100 + 1))[:size]


def new_group_within(size: int, position: int, _chance: random.Random) -> bytes:
    """A group that no journal has, at a border, and other bytes behind it."""
    return (_group_at(position, 7000) + b"\xfe" * size)[:size]


def new_group_before_a_size(size: int, position: int, _chance: random.Random) -> bytes:
    """Such a group, and behind it the size of a record that the file's end would cut."""
    return (_group_at(position, 7000) + b"\x0f" * size)[:size]


def new_group_before_zeros(size: int, position: int, _chance: random.Random) -> bytes:
    """Such a group, and behind it a sector of zeros, as if the size of another group had been lost there."""
    return (_group_at(position, 7000) + bytes(1024) + b"\xfe" * size)[:size]


def groups_at_every_border(size: int, position: int, _chance: random.Random) -> bytes:
    """Whole groups that no journal has, one a sector: whichever sector is the last one, a group ends there."""
    once, data = journal.write_padding(position), b""
    for entry_id in range(7000, 7001 + size // SECTOR_SIZE_BYTES):
        records = _records(LEDGERS[6], entry_id)
        data += records + journal.write_padding(len(records))
    return (once + data)[:size]


FILLERS: list[Filler] = [
    zeros, random_bytes, ends_in_zero, sparse, padding, empty_padding, sizes_of_16, copies, unaligned_copies,
    new_group_within, new_group_before_a_size, new_group_before_zeros, groups_at_every_border,
]  # fmt: skip


class Journal(NamedTuple):
    """A journal's bytes, its records, and where each group begins and the last one ends."""

    data: bytes
    records: list[Record]
    groups: list[int]
    end: int

    def before(self, at: int) -> list[Record]:
        """The records of the groups that end before byte `at`."""
        starts = [start for start, stop in zip(self.groups, [*self.groups[1:], self.end], strict=True) if stop > at]
        return [each for each in self.records if each.offset < min([*starts, self.end])]


def write(
    directory: Path, version: int, groups: tuple[tuple[int, ...], ...], filler: Filler, *, alignment: int = 512
) -> Journal:
    """Write a journal by the bookie's own writer; lengths and LACs are what no honest client sends."""
    ledger, chance = LEDGERS[version], random.Random(repr((version, groups, filler.__name__)))
    by = DigestManager(ledger, DigestType.CRC32C, b"secret")
    config = BookieConfig(journal_format_version_to_write=min(version, 6), journal_alignment_size=alignment)
    writer = JournalWriter(directory, Files(), config, clock_ms=lambda: 0x1000, scoped=version == 7)
    writer.allocation_size = 0
    writer.open()
    first = _records(LEDGERS[6], 1000)
    starts, entry_id = [writer.mark.offset], 0
    writer.commit([first], len(first))
    for number, sizes in enumerate(groups):
        starts.append(writer.mark.offset)
        records = [journal.ledger_key_record(ledger, by.master_key)] if number == 0 else []
        for size in sizes:
            position = writer.mark.offset + sum(map(len, records)) + 4 + len(by.seal(0, -1, 0, b""))
            payload = filler(size, position, chance)
            assert len(payload) == size
            lac, length = chance.choice(((entry_id - 1, 10_000), (1 << 60, 0), (-1, -5)))
            records.append(record_of(by.seal(entry_id, lac, length, payload) + payload))
            entry_id += 1
        writer.commit(records, sum(map(len, records)), scoped=version == 7)
    end = writer.mark.offset
    writer.close()
    (path,) = directory.glob("*.txn")
    data = path.read_bytes()
    found = read(path, data)[0]
    path.unlink()
    return Journal(data, found, starts, end)


def read(path: Path, data: bytes) -> tuple[list[Record], CorruptRecord | None, ScanState]:
    path.write_bytes(data)
    found: list[Record] = []
    with JournalReader.open(path) as reader:
        try:
            found.extend(reader.records())
        except CorruptRecord as error:
            return found, error, reader.end
        return found, None, reader.end


def cuts(whole: Journal) -> Iterator[tuple[int, bytes]]:
    """Yield each border, and what a crash there leaves: nothing more, or zeros that were allocated."""
    for cut in range(journal.HEADER_SIZE_V5, whole.end + 1, SECTOR_SIZE_BYTES):
        yield cut, whole.data[:cut]
        yield cut, whole.data[:cut] + bytes(whole.end - cut)
        yield cut, whole.data[:cut] + bytes(1 << 16)


@pytest.mark.parametrize("version", [5, 6, 7])
@pytest.mark.parametrize("groups", SIZES, ids=["one group", "two groups", "three groups", "four groups"])
@pytest.mark.parametrize("filler", FILLERS, ids=lambda filler: filler.__name__)
def test_a_journal_cut_at_any_sector_gives_every_group_before_the_cut(
    tmp_path: Path, version: int, groups: tuple[tuple[int, ...], ...], filler: Filler
) -> None:
    for alignment in (512, 4096):
        whole = write(tmp_path, version, groups, filler, alignment=alignment)
        for cut, data in cuts(whole):
            rows, error, end = read(tmp_path / "1001.txn", data)
            assert error is None, (alignment, cut, len(data))
            assert end is not ScanState.DAMAGED
            whole_records = [each for each in whole.records if each.offset + 4 + each.record_size <= cut]
            assert rows[: len(whole_records)] == whole_records, (alignment, cut, len(data))
            assert len(rows) <= len(whole_records) + 1
        (tmp_path / "1001.txn").unlink()


@given(st.data())
def test_any_payloads_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("cut")
    version = data.draw(st.sampled_from((5, 6, 7)))
    part = st.one_of(
        st.integers(1, 1100).map(bytes),
        st.sampled_from((b"\xff\xff\xff\0", b"\xff\xff\xff\0\0\0\0\0", b"\0\0\0\x20", bytes(512))),
        st.binary(max_size=40),
        st.integers(0, 511).map(_group_at),
    )
    groups = tuple(
        tuple(data.draw(st.lists(st.integers(0, 2500), min_size=1, max_size=4)))
        for _ in range(data.draw(st.integers(1, 4)))
    )

    def drawn(size: int, _position: int, _chance: random.Random) -> bytes:
        drawn = b"".join(data.draw(st.lists(part, min_size=1, max_size=6)))
        return ((drawn or b"x") * (size + 1))[:size]

    whole = write(directory, version, groups, drawn)
    cut = data.draw(st.integers(1, whole.end // SECTOR_SIZE_BYTES)) * SECTOR_SIZE_BYTES
    allocated = data.draw(st.sampled_from((0, whole.end - cut, 1 << 16)))
    rows, error, _ = read(directory / "1001.txn", whole.data[:cut] + bytes(allocated))
    assert error is None
    before = whole.before(cut)
    assert rows[: len(before)] == before


@pytest.mark.parametrize("version", [5, 6, 7])
@pytest.mark.parametrize("filler", FILLERS, ids=lambda filler: filler.__name__)
def test_a_synced_group_without_one_of_its_sectors_is_never_an_end(
    tmp_path: Path, version: int, filler: Filler
) -> None:
    """Of each group but the last; a sector of payload alone is left to the entry's digest."""
    groups = ((0,), (2000, 1000), (976, 967, 976), (30,))
    whole = write(tmp_path, version, groups, filler)
    refused = 0
    for at in range(whole.groups[0], whole.groups[-1], SECTOR_SIZE_BYTES):
        data = whole.data[:at] + bytes(SECTOR_SIZE_BYTES) + whole.data[at + SECTOR_SIZE_BYTES :]
        rows, error, _ = read(tmp_path / "1001.txn", data + bytes(4096))
        offsets = {each.offset for each in rows}
        is_whole = all(each.offset in offsets for each in whole.records)
        assert error is not None or is_whole, at
        refused += error is not None
        before = [each for each in whole.before(at) if each.offset + 4 + each.record_size <= at]
        assert rows[: len(before)] == before
    assert refused


@pytest.mark.parametrize("version", [5, 6, 7])
def test_a_size_that_reaches_over_later_groups_is_damage_where_groups_are_sealed(tmp_path: Path, version: int) -> None:
    """Without seals a payload cannot be told from groups: as for Apache's bookie, it is the last record."""
    for filler in FILLERS:
        (tmp_path / "1001.txn").unlink(missing_ok=True)
        whole = write(tmp_path, version, ((0,), (2000, 1000), (976, 967, 976), (30,)), filler)
        # The first record of the third group then ends in what was allocated, or behind the file's end.
        for size in (20_000, 40_000, 1 << 24):
            at = whole.groups[2]
            data = whole.data[:at] + size.to_bytes(4, "big") + whole.data[at + 4 :] + bytes(32_768)
            rows, error, _ = read(tmp_path / "1001.txn", data)
            before = whole.before(at)
            assert rows[: len(before)] == before
            if version < 7:
                assert error is None, (filler.__name__, size)
                continue
            assert error is not None, (filler.__name__, size)
            assert (error.offset, str(size) in str(error)) == (at, True)
