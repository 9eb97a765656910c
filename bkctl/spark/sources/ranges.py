"""Ranges of one file of records: cut by the planner behind whole records, found again exactly by the task.

A range comes with the number of its records and a fingerprint of their headers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from google_crc32c import extend
from pyspark.sql.datasource import InputPartition

from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import FLAGS_V2
from bkctl.formats.record import RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.places import Place
from bkctl.spark.sources.selection import fields_of


@dataclass
class Range(InputPartition):
    """A range of one file that begins and ends between records, and the `count` and `fingerprint` of its records.

    `damage` (offset, reason) is the damage that the planner met behind the range; a range may hold nothing else.
    """

    place: Place
    start: int
    end: int
    version: int
    count: int = 0
    fingerprint: int = 0
    wanted_count: int = 0
    damage: tuple[int | None, str] | None = None


class RangePlanner:
    """Cuts one file into ranges, record batch by record batch; `wanted` counts the records of a batch to read."""

    def __init__(self, place: Place, start: int, version: int, size_bytes: int, wanted: Callable[[RecordBatch], int]):
        self._place, self._version, self._size_bytes, self._wanted = place, version, size_bytes, wanted
        self._ranges: list[Range] = []
        self._current = Range(place, start, start, version)

    def add(self, batch: RecordBatch) -> None:
        """Add the next records to the current range; close the range where it is full."""
        while len(batch):
            current = self._current
            if not current.count:
                current.start = batch.window_offset + batch.begins[0]
            # A record that begins a whole range's size behind the start belongs to the next range.
            taken = bisect_left(batch.begins, current.start + self._size_bytes - batch.window_offset) or 1
            rest = batch.part(taken, len(batch)) if taken < len(batch) else None
            if rest is not None:
                batch = batch.first(taken)
            current.end = end_of(batch)
            current.count += len(batch)
            current.fingerprint = fingerprint_of(batch, current.fingerprint)
            current.wanted_count += self._wanted(batch)
            if rest is not None or current.end - current.start >= self._size_bytes:
                self._close()
            if rest is None:
                return
            batch = rest

    def finish(self, damage: tuple[int | None, str] | None = None) -> list[Range]:
        """Return the ranges that have wanted records; the last also has the `damage` behind it."""
        if damage is not None:
            self._current.damage = damage
        self._close()
        return self._ranges

    def _close(self) -> None:
        current = self._current
        if current.wanted_count or current.damage is not None:
            self._ranges.append(current)
        self._current = Range(self._place, current.end, current.end, self._version)


def fingerprint_of(batch: RecordBatch, before: int = 0) -> int:
    """Return the CRC32C of the header fields of all records, continued from the fingerprint `before`.

    Other records, or another order of them, give another number. The size of batches makes no difference.
    """
    record = batch.record
    if record is None:
        fields = batch.fields
        return int(extend(before, (fields if isinstance(fields, memoryview) else fields_of(batch)).tobytes()))
    ids = [record.ledger.ledger_id, record.entry_id, record.last_add_confirmed or 0, record.length or 0]
    if record.format_version == 2:
        ids[:0] = [FLAGS_V2 | (record.digest_type or 0), record.ledger.scope_id]
    return int(extend(before, array("q", [record.record_size, *map(to_signed, ids)]).tobytes()))


def end_of(batch: RecordBatch) -> int:
    """Return the file offset behind the last record of `batch`."""
    record = batch.record
    if record is not None:
        # Padding of a journal has a second size field.
        head = 8 if record.type is RecordType.PADDING and not record.body else 4
        return record.offset + head + record.record_size
    width = 5 if batch.format_version == 1 else 7
    return batch.window_offset + batch.begins[-1] + 4 + batch.fields[-width]
