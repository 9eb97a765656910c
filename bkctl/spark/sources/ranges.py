"""Parts of files of records: planned from a file's size, time and header alone, read by a task without other records.

A part begins at the header or at a border, which is the offset of a record (`jobs.borders` finds borders).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from bkctl.errors import Conflict
from bkctl.files.scan import RecordBatch
from bkctl.files.windows import FileReader
from bkctl.formats.record import RecordType
from bkctl.spark.sources.bases import InputPartition
from bkctl.spark.sources.places import Place

#: Bytes of a header that never change: the magic and the version.
_HEADER_SIZE: Final = 8


class FileState(NamedTuple):
    """A file when the plan was made: its size, its modification time and the start of its header."""

    size_bytes: int
    mtime_ns: int
    header: bytes

    @classmethod
    def of(cls, path: str) -> FileState:
        """Return the present state of a file. Raises as FileReader does."""
        with FileReader(path) as reader:
            stat = reader.stat()
            return cls(stat.st_size, stat.st_mtime_ns, reader.read(0, _HEADER_SIZE))

    def end_in(self, reader: FileReader, *, is_written_in_place: bool = False) -> int | None:
        """Return the byte at which a task stops: the planned size, or None if the file has this size still.

        Raises Conflict if the file shrank, was replaced or, unless it `is_written_in_place`, was overwritten.
        """
        stat = reader.stat()
        is_overwritten = stat.st_mtime_ns != self.mtime_ns and not is_written_in_place
        if (
            stat.st_size < self.size_bytes
            or reader.read(0, len(self.header)) != self.header
            or (stat.st_size == self.size_bytes and is_overwritten)
        ):
            raise Conflict(f"{reader.name} changed after the plan was made", hint="run again")
        return None if stat.st_size == self.size_bytes else self.size_bytes


@dataclass
class Range(InputPartition):
    """The records of one file from byte `start` (0: the first) up to byte `end` (None: up to the file's end).

    `state` is the file's when the plan was made. Only the last range of a file has damage.
    """

    place: Place
    state: FileState
    start: int = 0
    end: int | None = None
    damage: tuple[int | None, str] | None = None


def ranges_of(place: Place, state: FileState, borders: Sequence[int]) -> list[Range]:
    """Return the ranges of a file between these borders, which are offsets of records."""
    return [Range(place, state, start or 0, end) for start, end in pairwise((None, *borders, None))]


def end_of(batch: RecordBatch) -> int:
    """Return the file offset behind the last record of `batch`."""
    record = batch.record
    if record is not None:
        # Padding of a journal has a second size field.
        head = 8 if record.type is RecordType.PADDING and not record.body else 4
        return record.offset + head + record.record_size
    width = 5 if batch.format_version == 1 else 7
    return batch.window_offset + batch.begins[-1] + 4 + batch.fields[-width]
