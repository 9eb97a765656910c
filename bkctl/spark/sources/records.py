"""What the sources of entry logs and journals have in common: from files to exact ranges, from records to Arrow.

The planner reads each file once, hops from size field to size field, and cuts it behind whole records: each range comes
with the number of its records and a fingerprint of their headers. A task reads its range and must find just that, so
no file that shrank, grew in the middle or was replaced between plan and read gives another answer than an error.
What a running bookie appends meanwhile is not part of the answer. No payload is ever taken for records, because
nobody looks for records: they follow each other from the first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from google_crc32c import extend
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.listing import FILLER_TYPES
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import FLAGS_V2
from bkctl.formats.record import RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.columns import DAMAGE, check_schema, damage_row, ddl, where_and_why
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions
from bkctl.spark.sources.options import Mode, SourceOptions
from bkctl.spark.sources.places import Place
from bkctl.spark.sources.record_rows import OF_CONTENT, LedgerSums, RecordRows, Selection, fields_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

OPTIONS: Final = ("rows", "mode", "columns", "ledger", "ledgerScopeId", "digestType", "types", "maxPartitionBytes")
PARTITION_SIZE_BYTES: Final = 128 << 20
#: How often the files are listed anew where one goes away while the plan is made.
_PLANS_MAX: Final = 5
_PLANNERS_MAX: Final = 4

_COMMON: Final = (
    "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "entryId", "lastAddConfirmed", "length", "size",
    "formatVersion",
)  # fmt: skip
_PLACE: Final = ("file", "scoped", "bookieId")


class Rows(StrEnum):
    """What a row is; the values are the words of the option `rows`."""

    RECORDS = "records"
    #: A ledger's share of one partition, so several rows of a ledger are to be added up.
    LEDGERS = "ledgers"


# --- plan -----------------------------------------------------------------------------------------------------------


@dataclass
class Range(InputPartition):
    """A range of one file, from a record's first byte to behind another's last, and what must be in it.

    `damage` (offset, reason) is what the planner met behind it. A range without records may say just that.
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
    """Cuts one file into ranges, as its records come."""

    def __init__(self, place: Place, start: int, version: int, size_bytes: int, wanted: Callable[[RecordBatch], int]):
        self._place, self._version, self._size_bytes, self._wanted = place, version, size_bytes, wanted
        self._ranges: list[Range] = []
        self._current = Range(place, start, start, version)

    def add(self, batch: RecordBatch) -> None:
        """Take the next records."""
        while len(batch):
            current = self._current
            if not current.count:
                current.start = batch.window_offset + batch.begins[0]
            # The first record that begins so far behind belongs to the next range.
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
        """The ranges that have rows; the last says what is wrong behind it."""
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
    """A number that differs where other records stand there, or the same ones in another order: the CRC32C of all their
    header fields, behind the records whose fingerprint is `before`. How they come in batches makes no difference.
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
    """The offset behind the last record."""
    record = batch.record
    if record is not None:
        # Padding of a journal has two fields before it, and its first byte is behind them.
        head = 8 if record.type is RecordType.PADDING and not record.body else 4
        return record.offset + head + record.record_size
    width = 5 if batch.format_version == 1 else 7
    return batch.window_offset + batch.begins[-1] + 4 + batch.fields[-width]


# --- the reader -----------------------------------------------------------------------------------------------------


class RecordReader(DataSourceReader):
    """Plans and reads the files of one source; subclasses say how one file is opened."""

    #: The column of the file's id: `logId` or `journalId`.
    id_name: str
    source: str
    on_request: tuple[str, ...] = ("payload", "record", "digestType", "digest")

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._paths = options.paths()
        self._mode = options.mode()
        self._digest_type = options.digest_type()
        self._size_bytes = options.size_bytes("maxPartitionBytes", PARTITION_SIZE_BYTES)
        self._rows = options.choice("rows", Rows.RECORDS)
        self._types = self._record_types()
        self._struct = schema
        self._conditions = Conditions.of(options)
        check_schema(self.source, schema, (*self.columns(options), *self.columns_on_request(options), DAMAGE))

    @classmethod
    def columns(cls, options: SourceOptions) -> tuple[str, ...]:
        """The columns that come without asking: of records those of the command that reads such files."""
        of_file = (cls.id_name, f"{cls.id_name}Hex")
        if options.choice("rows", Rows.RECORDS) is Rows.LEDGERS:
            return (*LEDGER_COLUMNS, "entryCount", "size", *of_file, *_PLACE)
        return (*_COMMON, *of_file, "offset", "recordSize", "type", *_PLACE)

    @classmethod
    def columns_on_request(cls, options: SourceOptions) -> tuple[str, ...]:
        """The columns that come when they are named."""
        return () if options.choice("rows", Rows.RECORDS) is Rows.LEDGERS else cls.on_request

    @classmethod
    def ddl(cls, options: SourceOptions) -> str:
        """The schema that the options ask for."""
        columns = options.columns(cls.columns(options), cls.columns_on_request(options))
        if options.mode() is Mode.PERMISSIVE:
            columns.append(DAMAGE)
        return ddl(columns)

    # What subclasses say.

    def list_places(self) -> list[Place]:
        """The files to read. Raises as `resolve` does."""
        raise AssertionError

    def plan_file(self, place: Place, planner: Callable[[int, int], RangePlanner]) -> list[Range]:
        """Give all records of a file to a `planner(start, version)`; in mode permissive damage ends the last range."""
        raise AssertionError

    def read_range(self, part: Range, *, content: bool) -> Iterator[RecordBatch]:
        """Yield the records from `part.start` to `part.end`, also those that nobody wants; without `content` their
        bodies may be cut short. What is not as it was planned ends it, or raises Corrupt."""
        raise AssertionError

    # What Spark calls.

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what says which ledgers, entries, types, offsets or files are wanted; return what is left to Spark."""
        names = (*LEDGER_COLUMNS, "type", "file", f"{self.id_name}Hex", "bookieId")
        of_ledgers = LEDGER_COLUMNS if self._types is None else ()
        never_null = (
            "entryId", "offset", "recordSize", "type", "file", "formatVersion", "scoped", "entryCount", *of_ledgers,
        )  # fmt: skip
        numbers = ("entryId", "offset", self.id_name)
        return self._conditions.push(filters, names, numbers, never_null, permissive=self._mode is Mode.PERMISSIVE)

    def partitions(self) -> list[InputPartition]:
        """The ranges, in the order of the files. Raises what is wrong with the first file, in mode failfast.

        Raises Conflict where files go away again and again while the plan is made.
        """
        for _ in range(_PLANS_MAX):
            places = [place for place in self.list_places() if self._wants_file(place)]
            try:
                with ThreadPoolExecutor(min(_PLANNERS_MAX, len(places)) or 1) as planners:
                    planned = planners.map(self._plan, places)
                    return [part for ranges in planned for part in ranges]
            except _Vanished as error:
                # What was compacted stands in a log that was not listed.
                gone = error.place.path
        raise Conflict(f"{gone} went away while it was read", hint="the bookie deletes many files now; try again later")

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The wanted rows of one range; then in mode permissive what is wrong behind it.

        Raises Conflict where the range is not what was planned, NotFound where the file is gone.
        """
        if isinstance(partition, Range):
            return self._read(partition)
        return iter(())

    def _record_types(self) -> frozenset[str] | None:
        types = frozenset(self._options.words("types"))
        for each in types:
            if each not in [known.value for known in RecordType]:
                raise UsageError(f"{self.source}: option types {each!r}: one of {', '.join(RecordType)} is needed")
        return types or None

    def wants_fillers(self) -> bool:
        """Whether padding or ledgers maps were asked for."""
        return self._types is not None and any(each.value in self._types for each in FILLER_TYPES)

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
        from pyspark.sql.pandas.types import to_arrow_schema

        schema, constants = to_arrow_schema(self._struct), self._constants(place)
        if self._rows is Rows.LEDGERS:
            return LedgerSums(schema, constants, self._selection())
        return RecordRows(schema, constants, self._selection(), self._digest_type)

    def _selection(self) -> Selection:
        return Selection(self._conditions, self._types)

    def _plan(self, place: Place) -> list[Range]:
        def planner(start: int, version: int) -> RangePlanner:
            return RangePlanner(place, start, version, self._size_bytes, self._selection().count)

        try:
            return self.plan_file(place, planner)
        except NotFound as error:
            if place.found:
                raise _Vanished(place) from error
            raise
        except UsageError:
            raise
        except BkctlError as error:
            return planner(0, 0).finish(self._damage(error))

    def _damage(self, error: BkctlError) -> tuple[int | None, str]:
        """What a row says of the error. Raises it in mode failfast."""
        if self._mode is Mode.FAILFAST:
            raise error
        return where_and_why(error)

    def _read(self, part: Range) -> Iterator[pa.RecordBatch]:
        rows = self._rows_of(part.place)
        damage = [part.damage] if part.damage else []
        try:
            yield from rows.of(self._checked(part, content=any(name in OF_CONTENT for name in self._struct.names)))
        except UsageError:
            raise
        except BkctlError as error:
            damage.insert(0, self._damage(error))
        for offset, reason in damage:
            yield damage_row(rows.schema, part.place.path, offset, reason, **self._constants(part.place))

    def _checked(self, part: Range, *, content: bool) -> Iterator[RecordBatch]:
        """The records of a range. Raises Conflict at its end where they are not those that were planned."""
        if not part.count:
            return
        end, count, fingerprint = part.start, 0, 0
        try:
            for batch in self.read_range(part, content=content):
                end, count = end_of(batch), count + len(batch)
                fingerprint = fingerprint_of(batch, fingerprint)
                if count > part.count:
                    break
                yield batch
        except NotFound as error:
            raise NotFound(
                f"{part.place.path} went away after the plan was made",
                hint="a bookie compacted or deleted it: what lived in it is elsewhere now; run again",
            ) from error
        except (Corrupt, Unsupported) as error:
            raise Conflict(f"{part.place.path} changed after the plan was made: {error}", hint="run again") from error
        if (end, count, fingerprint) != (part.end, part.count, part.fingerprint):
            raise Conflict(
                f"{part.place.path} changed after the plan was made: from byte {part.start} to {part.end} there were "
                f"{part.count} records, now {count} to {end}" + ("" if count != part.count else " with other headers"),
                hint="run again",
            )


class RecordSource(DataSource):
    """The data source of what `records` reads."""

    records: ClassVar[type[RecordReader]]

    @classmethod
    def name(cls) -> str:
        """The name for `spark.read.format`."""
        return cls.records.source

    def schema(self) -> str:
        """The columns that are asked for. Raises UsageError for options that make no sense."""
        return self.records.ddl(self._parsed())

    def reader(self, schema: StructType) -> RecordReader:
        """The reader of the columns of `schema`."""
        return self.records(self._parsed(), schema)

    def _parsed(self) -> SourceOptions:
        return SourceOptions(self.name(), self.options, OPTIONS)


class _Vanished(Exception):
    """A file that was listed is gone."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.path)
        self.place = place
