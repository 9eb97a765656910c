"""`bookkeeper.journal`: the records of journals, as `bkctl journal read` prints them.

Options: those of `bookkeeper.entrylog`. `masterKey` is a column on request, and a secret. A record that was cut short
when the bookie stopped ends a journal quietly, as for a bookie that replays it; more than that is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from bkctl.errors import BkctlError, CorruptRecord
from bkctl.formats.journal import journal_id_of
from bkctl.formats.record import RecordType
from bkctl.spark.options import SourceOptions
from bkctl.spark.places import Place, resolve
from bkctl.spark.records import OPTIONS, Range, RangePlanner, RecordReader, end_of
from bkctl.storage.journal import JournalReader
from bkctl.storage.scan import RecordBatch

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class JournalSource(DataSource):
    """The records of journals. See the module."""

    @classmethod
    def name(cls) -> str:
        """The name for `spark.read.format`."""
        return "bookkeeper.journal"

    def schema(self) -> str:
        """The columns that are asked for. Raises UsageError for options that make no sense."""
        return JournalRecords.ddl(self._parsed())

    def reader(self, schema: StructType) -> JournalRecords:
        """The reader of the columns of `schema`."""
        return JournalRecords(self._parsed(), schema)

    def _parsed(self) -> SourceOptions:
        return SourceOptions(self.name(), self.options, OPTIONS)


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
                # What stands behind was the planner's business.
                if end_of(batch) >= part.end:
                    return

    def _wants_padding(self) -> bool:
        return self._types is not None and RecordType.PADDING.value in self._types
