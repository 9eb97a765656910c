"""The list of a ledger's entries in a bookie's response to GET_LIST_OF_ENTRIES_OF_LEDGER.

    version i32 (0) | group count i32 | 56 zero bytes | group count × group
    group: first sequence start i64 | last sequence start i64 | sequence size i32 | sequence period i32

A group has runs of `sequence size` consecutive entries; they start at first, first + period, …, last.
Source: AvailabilityOfEntriesOfLedger.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Final, NamedTuple

from bkctl.errors import CorruptRecord, Unsupported
from bkctl.formats.layout import Buffer, Layout

HEADER_SIZE: Final = 64
_INT_MAX = (1 << 31) - 1


class _Header(NamedTuple):
    version: Annotated[int, "i"]
    group_count: Annotated[int, "i"]


class SequenceGroup(NamedTuple):
    """Runs of entries at a regular distance; `sequence_period` is 0 for a single run."""

    first_sequence_start: Annotated[int, "q"]
    last_sequence_start: Annotated[int, "q"]
    sequence_size: Annotated[int, "i"]
    sequence_period: Annotated[int, "i"]


_HEADER: Final = Layout(_Header, size=HEADER_SIZE)
_GROUP: Final = Layout(SequenceGroup)


class Availability:
    """A set of entry ids; `in` and iteration (ascending within a group) never expand the groups in memory."""

    __slots__ = ("_starts", "groups")

    def __init__(self, groups: Iterable[SequenceGroup]) -> None:
        # Java keeps the groups in a map by first entry: the last of several with one first entry counts.
        by_start = {group.first_sequence_start: group for group in groups}
        self.groups: tuple[SequenceGroup, ...] = tuple(by_start[start] for start in sorted(by_start))
        self._starts = [group.first_sequence_start for group in self.groups]

    @classmethod
    def parse(cls, data: Buffer, where: str = "") -> Availability:
        """Return the set in a bookie's response.

        Raises TruncatedRecord, CorruptRecord (an impossible group), Unsupported (another version).
        """
        header = _HEADER.unpack_from(data, 0, where)
        if header.version > 0:
            at = f"{where}: " if where else ""
            raise Unsupported(f"{at}The list of a ledger's entries has version {header.version}, 0 is known")
        if header.group_count < 0:
            raise CorruptRecord(f"{header.group_count} sequence groups", offset=4, where=where)
        groups = []
        for index in range(header.group_count):
            offset = HEADER_SIZE + index * _GROUP.size
            group = _GROUP.unpack_from(data, offset, where)
            first, last, size, period = group
            if first < 0 or last < first or size < 0 or period < 0 or (period == 0) != (first == last):
                raise CorruptRecord(f"Impossible sequence group {tuple(group)}", offset=offset, where=where)
            groups.append(group)
        return cls(groups)

    def serialize(self) -> bytes:
        """Return the bytes that a bookie sends."""
        return _HEADER.pack(_Header(0, len(self.groups))) + b"".join(_GROUP.pack(group) for group in self.groups)

    def __contains__(self, entry_id: object) -> bool:
        if not isinstance(entry_id, int):
            return False
        index = bisect_right(self._starts, entry_id)
        if index == 0:
            return False
        first, last, size, period = self.groups[index - 1]
        if entry_id >= last + size:
            return False
        return (entry_id - first) % period < size if period else entry_id - first < size

    def __iter__(self) -> Iterator[int]:
        for first, last, size, period in self.groups:
            for start in range(first, last + 1, period or 1) if size else ():
                yield from range(start, start + size)

    def borders(self) -> Iterator[int]:
        """Yield the entry ids, present or not, at which a group starts or ends."""
        for first, last, size, _ in self.groups:
            yield first
            yield last + size

    def period_at(self, entry_id: int) -> int:
        """Return after how many entries `in` repeats itself from `entry_id` up to the next of `borders`."""
        index = bisect_right(self._starts, entry_id)
        if index == 0:
            return 1
        _, last, size, period = self.groups[index - 1]
        return period if entry_id < last + size and 0 < size < period else 1

    def count(self) -> int:
        """Return the number of entries in the set, as Java counts them."""
        return sum(((last - first) // period + 1 if period else 1) * size for first, last, size, period in self.groups)


def serialize(entry_ids: Iterable[int], pause: Callable[[], object] = lambda: None) -> bytes:
    """Return the bytes that a bookie sends for `entry_ids` (ascending), one group a run, as Java's writer does.

    Takes the memory of the result alone, and calls `pause` every 1024 entries.
    """
    out = bytearray(HEADER_SIZE)
    count, start, end = 0, 0, 0
    for number, entry_id in enumerate(itertools.chain(entry_ids, (-1,))):
        if not number & 0x3FF:
            pause()
        if start <= entry_id < end:
            continue
        if entry_id == end and start < end and end - start < _INT_MAX:
            end += 1
            continue
        if end > start:
            out += _GROUP.pack(SequenceGroup(start, start, end - start, 0))
            count += 1
        start, end = entry_id, entry_id + 1
    out[:8] = _HEADER.pack(_Header(0, count))[:8]
    return bytes(out)
