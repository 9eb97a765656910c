"""`bookkeeper.journal`: the records of journals, as `bkctl journal read` prints them.

Options are the same as of `bookkeeper.entrylog`. `masterKey` is a column on request, and a secret. A journal may end
inside a record, as when its bookie stopped; a replay ignores that record, and so does this source. Any other end is
damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bkctl.errors import BkctlError, CorruptRecord
from bkctl.files.journal import JournalReader
from bkctl.files.scan import RecordBatch
from bkctl.formats.journal import journal_id_of
from bkctl.formats.record import RecordType
from bkctl.spark.sources.places import Place, resolve
from bkctl.spark.sources.ranges import Range, RangePlanner, end_of
from bkctl.spark.sources.records import RecordReader, RecordSource


class JournalRecords(RecordReader):
    """Plans and reads journals."""

    id_name = "journalId"
    source = "bookkeeper.journal"
    on_request = (*RecordReader.on_request, "masterKey")

    def list_places(self) -> list[Place]:
        return resolve(self._paths, lambda directories: directories.journals(), journal_id_of)

    def plan_file(self, place: Place, planner: Callable[[int, int], RangePlanner]) -> list[Range]:
        with JournalReader.open(place.path) as reader:
            ranges = planner(reader.header_size, reader.version)
            try:
                for batch in reader.batches(padding=self._wants_padding()):
                    ranges.add(batch)
            except BkctlError as error:
                return ranges.finish(self._damage(error))
            return ranges.finish()

    def read_range(self, part: Range, *, content: bool) -> Iterator[RecordBatch]:
        with JournalReader.open(part.place.path) as reader:
            if reader.version != part.version:
                raise CorruptRecord(f"Version was {part.version}, now {reader.version}", offset=4, where=reader.name)
            for batch in reader.batches(part.start, part.end, padding=self._wants_padding()):
                yield batch
                # The planner has checked the bytes behind the range.
                if end_of(batch) >= part.end:
                    return

    def _wants_padding(self) -> bool:
        return self._types is not None and RecordType.PADDING.value in self._types


class JournalSource(RecordSource):
    """The records of journals. See the module."""

    records = JournalRecords
