"""The shared part of the sources of entry logs and journals: from files to ranges, from ranges to Arrow batches.

The planner takes the size, the time and the header of each file. A task reads one file up to the planned size, or a
part between two `borders`. A file that shrank or was replaced between plan and read is an error, never another answer.
Records that a running bookie appends meanwhile are not part of the answer. A payload is never taken for a record,
because records are not searched for: each follows the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.files.scan import RecordBatch
from bkctl.files.windows import FileReader
from bkctl.formats.record import RecordType
from bkctl.spark.schemas import arrow_schema_of
from bkctl.spark.sources.bases import InputPartition
from bkctl.spark.sources.columns import damage_row, where_and_why
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.options import SourceOptions
from bkctl.spark.sources.places import Place, unseen
from bkctl.spark.sources.pushdown import QUERY_OPTIONS, PathReader
from bkctl.spark.sources.ranges import FileState, Range, end_of, ranges_of
from bkctl.spark.sources.record_rows import BODY_COLUMNS, LedgerSums, RecordRows
from bkctl.spark.sources.selection import Selection

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Plans to try where a listed file is deleted while the plan is made.
_PLANS_MAX: Final = 5
_PLANNERS_MAX: Final = 4

_COMMON_COLUMNS: Final = (
    "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "entryId", "lastAddConfirmed", "length", "size",
    "formatVersion",
)  # fmt: skip
_PLACE_COLUMNS: Final = ("file", "scoped", "bookieId")


class RecordRowKind(StrEnum):
    """Kinds of rows of a source of records; the values are the words of its option `rows`."""

    RECORDS = "records"
    #: A ledger's share of one partition; a ledger's total is the sum of its rows.
    LEDGERS = "ledgers"


class RecordReader(PathReader):
    """Plans and reads the files of one source; a subclass opens one kind of file."""

    #: The column of the file's id: `logId` or `journalId`.
    id_name: str
    options = (*QUERY_OPTIONS, "rows", "digestType", "types", "borders")
    #: A running bookie writes into space that is allocated ahead.
    is_written_in_place = False
    on_request: tuple[str, ...] = ("payload", "record", "digestType", "digest")

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._digest_type = options.digest_type()
        self._borders = options.offsets("borders")
        self._rows = options.choice("rows", RecordRowKind.RECORDS)
        self._types = self._record_types(options)
        self.texts = ("type", "file", f"{self.id_name}Hex", "bookieId")
        self.integers = ("entryId", "offset", self.id_name)
        of_ledgers = LEDGER_COLUMNS if self._types is None else ()
        self.never_null = (
            "entryId", "offset", "recordSize", "type", "file", "formatVersion", "scoped", "entryCount", *of_ledgers,
        )  # fmt: skip

    @classmethod
    def columns(cls, options: SourceOptions) -> tuple[Sequence[str], Sequence[str]]:
        """Return the columns; of records the default ones are the same as of the command that reads such files."""
        of_file = (cls.id_name, f"{cls.id_name}Hex")
        if options.choice("rows", RecordRowKind.RECORDS) is RecordRowKind.LEDGERS:
            return (*LEDGER_COLUMNS, "entryCount", "size", *of_file, *_PLACE_COLUMNS), ()
        return (*_COMMON_COLUMNS, *of_file, "offset", "recordSize", "type", *_PLACE_COLUMNS), cls.on_request

    # Subclasses implement:

    def list_places(self) -> list[Place]:
        """Return the files to read. Raises as `resolve` does."""
        raise AssertionError

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        """Yield the records that begin from byte `start` (0: the first) to byte `end` (None: all), unselected ones too.

        Without `content` bodies may be cut short. Raises the error of damage.
        """
        raise AssertionError

    # Spark calls:

    def partitions(self) -> list[InputPartition]:
        """Return the ranges, in the order of the files.

        Raises the first file's error in mode failfast, and Conflict where files vanish during every attempt to plan.
        """
        for _ in range(_PLANS_MAX):
            places = [place for place in self.list_places() if self._wants_file(place)]
            try:
                with ThreadPoolExecutor(min(_PLANNERS_MAX, len(places)) or 1) as planners:
                    return [part for ranges in planners.map(self._plan, places) for part in ranges]
            except _Vanished as error:
                # Compaction moved its entries to a log that may not have been listed: list again.
                gone = error.args[0]
        raise Conflict(
            f"{gone} was deleted while it was read", hint="the bookie deletes many files now; try again later"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the selected rows of one range, then in mode permissive a row for the damage behind it.

        Raises the error of damage in mode failfast, Conflict if the file differs from the plan, NotFound if it was
        deleted or this machine does not see it.
        """
        if isinstance(partition, Range):
            return self._read(partition)
        return iter(())

    def _record_types(self, options: SourceOptions) -> frozenset[str] | None:
        types = frozenset(options.words("types"))
        known = [kind.value for kind in RecordType]
        for name in types:
            if name not in known:
                raise UsageError(f"{self.source}: option types {name!r}: one of {', '.join(RecordType)} is needed")
        return types or None

    def _constants(self, place: Place) -> dict[str, Any]:
        file_id = place.file_id
        return {
            self.id_name: file_id,
            f"{self.id_name}Hex": None if file_id is None else f"{file_id:x}",
            "file": place.path,
            "scoped": place.scoped,
            "bookieId": place.bookie_id,
        }

    def _wants_file(self, place: Place) -> bool:
        return all(self._conditions.accepts(name, value) for name, value in self._constants(place).items())

    def _rows_of(self, place: Place) -> RecordRows | LedgerSums:
        schema, constants = arrow_schema_of(self._struct), self._constants(place)
        selection = Selection(self._conditions, self._types)
        if self._rows is RecordRowKind.LEDGERS:
            return LedgerSums(schema, constants, selection)
        return RecordRows(schema, constants, selection, self._digest_type)

    def _plan(self, place: Place) -> list[Range]:
        try:
            return ranges_of(place, FileState.of(place.path), self._borders.get(place.path, ()))
        except NotFound as error:
            if place.found:
                raise _Vanished(place.path) from error
            raise
        except UsageError:
            raise
        except BkctlError as error:
            return [Range(place, FileState(0, 0, b""), damage=self._damage(error))]

    def _damage(self, error: BkctlError) -> tuple[int | None, str]:
        self._mode.check(error)
        return where_and_why(error)

    def _read(self, part: Range) -> Iterator[pa.RecordBatch]:
        rows = self._rows_of(part.place)
        damages = [] if part.damage is None else [part.damage]
        if not damages:
            yield from rows.of(self._up_to_damage(part, damages))
        for offset, reason in damages:
            yield damage_row(rows.schema, part.place.path, offset, reason, **self._constants(part.place))

    def _up_to_damage(self, part: Range, damages: list[tuple[int | None, str]]) -> Iterator[RecordBatch]:
        """Yield the records of a range; in mode permissive add the damage that ends them to `damages`."""
        try:
            yield from self._planned_records(part, content=any(name in BODY_COLUMNS for name in self._struct.names))
        except UsageError:
            raise
        except BkctlError as error:
            damages.append(self._damage(error))

    def _planned_records(self, part: Range, *, content: bool) -> Iterator[RecordBatch]:
        """Yield the records of a range that were whole when the plan was made."""
        path = part.place.path
        try:
            with FileReader(path) as file:
                planned_end = part.state.end_in(file, is_written_in_place=self.is_written_in_place)
            for batch in self.read_range(path, part.start, part.end or planned_end, content=content):
                if end_of(batch) > part.state.size_bytes:
                    batch = batch.first(len(batch) - 1)
                if len(batch):
                    yield batch
        except NotFound as error:
            raise unseen(path) from error


class _Vanished(Exception):
    """A listed file was deleted; its argument is the path."""
