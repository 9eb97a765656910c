"""What the sources of entry logs and journals have in common: from files to exact ranges, from records to Arrow.

The planner reads each file once, hops from size field to size field, and cuts it behind whole records: each range comes
with the number of its records and a fingerprint of their headers. A task reads its range and must find just that, so
no file that shrank, grew in the middle or was replaced between plan and read gives another answer than an error.
What a running bookie appends meanwhile is not part of the answer. No payload is ever taken for records, because
nobody looks for records: they follow each other from the first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from pyspark.sql.datasource import DataSourceReader, InputPartition

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.formats.entry import (
    FLAGS_V2,
    HEADER_SIZE_V1,
    HEADER_SIZE_V2,
    DigestType,
    digest_function,
    read_lac_header,
)
from bkctl.formats.metadata import Cookie
from bkctl.formats.record import NO_LEDGER, Record, RecordType
from bkctl.ids import U64_MAX, to_signed
from bkctl.spark.columns import DAMAGE, LedgerColumns, check_schema, constant, damage_row, ddl, where_and_why
from bkctl.spark.filters import LEDGER_COLUMNS, Conditions
from bkctl.spark.options import Mode, SourceOptions
from bkctl.storage.directories import COOKIE_NAME, BookieDirectories, BookieFile
from bkctl.storage.listing import FILLER_TYPES
from bkctl.storage.scan import RecordBatch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

OPTIONS: Final = ("mode", "columns", "ledger", "ledgerScopeId", "digestType", "types", "maxPartitionBytes")
PARTITION_SIZE_BYTES: Final = 128 << 20
#: Rows of one Arrow batch, about; and records that are too few to be worth columns of their own.
BATCH_ROWS: Final = 32_768
_FEW: Final = 8
#: How often the files are listed anew where one goes away while the plan is made.
_PLANS_MAX: Final = 5
_PLANNERS_MAX: Final = 4

_COMMON: Final = (
    "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "entryId", "lastAddConfirmed", "length", "size",
    "formatVersion",
)  # fmt: skip
_PLACE: Final = ("offset", "recordSize", "type", "file", "scoped", "bookieId")
#: Columns that are made of the records themselves, not of their headers.
_OF_CONTENT: Final = frozenset(("payload", "record", "digest"))
_TRIED: Final = (DigestType.CRC32C, DigestType.CRC32)


# --- which files ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A file to read: its path, the id that its name says, whether it holds scoped ledgers, whose it is."""

    path: str
    file_id: int | None
    scoped: bool
    bookie_id: str | None
    #: Nobody named it: it was found in a directory or by a pattern, and may go away.
    found: bool


def resolve(
    texts: Iterable[str],
    files_in: Callable[[BookieDirectories], Iterable[BookieFile]],
    id_of: Callable[[str], int | None],
) -> list[Place]:
    """The files that paths, patterns and directories of bookies name, in that order, each once.

    `files_in` says which files of a bookie's directories are meant, `id_of` which id a file's name says. Raises
    NotFound for a path or pattern that fits nothing, and for a directory in which nothing is a bookie's; UsageError for
    a URI of anything but files.
    """
    places: dict[Path, Place] = {}
    cookies: dict[Path, str | None] = {}

    def add(path: Path, file_id: int | None, scoped: bool, found: bool) -> None:
        home = path.parent.parent if scoped else path.parent
        if home not in cookies:
            cookies[home] = bookie_id_at(home)
        places.setdefault(path.resolve(), Place(str(path), file_id, scoped, cookies[home], found))

    for text in texts:
        for path, exact in local_paths(text):
            if path.is_dir():
                for file in files_in(BookieDirectories.at(path).of_a_bookie()):
                    add(file.path, cast("int | None", file.id), file.scoped, True)
            elif exact or id_of(path.name) is not None:
                add(path, id_of(path.name), path.parent.name == "scoped", not exact)
    return list(places.values())


def local_paths(text: str) -> Iterator[tuple[Path, bool]]:
    """Yield the paths that `text` names, in order, and whether it is the path itself and no pattern.

    Raises NotFound where a pattern fits nothing, UsageError for a URI of anything but files.
    """
    scheme, colon, rest = text.partition("://")
    if colon:
        if scheme != "file":
            raise UsageError(f"{text} is no path", hint="mount it: bookies' files are read as files")
        text = rest
    if not has_magic(text) or Path(text).exists():
        yield Path(text), True
        return
    found = sorted(glob(text, recursive=True, include_hidden=True))
    if not found:
        raise NotFound(f"Nothing fits {text}")
    for each in found:
        yield Path(each), False


def bookie_id_at(directory: Path) -> str | None:
    """Whose directory it is, as its cookie says; None without a readable one."""
    path = directory / COOKIE_NAME
    try:
        return Cookie.parse(path.read_bytes(), str(path)).bookie_id
    except (OSError, BkctlError):
        return None


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
            current.fingerprint = current.fingerprint + fingerprint_of(batch) & U64_MAX
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


def fields_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """The fields of plain entries, a row each."""
    import numpy as np

    width = 5 if batch.format_version == 1 else 7
    fields = batch.fields
    if isinstance(fields, memoryview):
        return np.frombuffer(fields, np.int64).reshape(-1, width)
    try:
        found = np.array(fields, np.int64)
    except OverflowError:
        # Python's own loop does not wrap ids of 2^63 and more.
        found = np.array([to_signed(value) for value in fields], np.int64)
    return found.reshape(-1, width)


def fingerprint_of(batch: RecordBatch) -> int:
    """A number that differs where other records stand there: the sum of all their header fields, modulo 2^64."""
    import numpy as np

    record = batch.record
    if record is None:
        return int(np.add.reduce(fields_of(batch), axis=None)) & U64_MAX
    flags = 0 if record.format_version == 1 else FLAGS_V2 | (record.digest_type or 0)
    ids = sum(record.ledger) + record.entry_id + (record.last_add_confirmed or 0) + (record.length or 0)
    return record.record_size + flags + ids & U64_MAX


def end_of(batch: RecordBatch) -> int:
    """The offset behind the last record."""
    record = batch.record
    if record is not None:
        # Padding of a journal has two fields before it, and its first byte is behind them.
        head = 8 if record.type is RecordType.PADDING and not record.body else 4
        return record.offset + head + record.record_size
    width = 5 if batch.format_version == 1 else 7
    return batch.window_offset + batch.begins[-1] + 4 + batch.fields[-width]


# --- rows -----------------------------------------------------------------------------------------------------------


class RecordRows:
    """Turns records into Arrow batches of the columns of `schema`; those that are not wanted are left out.

    `constants` are the columns that are the same for the whole file.
    """

    def __init__(
        self, schema: pa.Schema, constants: dict[str, Any], conditions: Conditions, types: Collection[str] | None,
        digest_type: DigestType | None,
    ) -> None:  # fmt: skip
        self.schema = schema
        self._constants, self._conditions = constants, conditions
        self._types, self._digest_type = types, digest_type
        self._content = [name for name in schema.names if name in _OF_CONTENT]
        self._fields: list[npt.NDArray[np.int64]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._contents: list[list[pa.Array]] = []
        self._version = 1
        self._records: list[Record] = []
        self._count = 0

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these records, in order. The window of a batch is not needed once the next is asked for."""
        for batch in batches:
            if batch.record is not None or len(batch) < _FEW:
                if self._fields:
                    yield self._flush()
                wanted = [record for record in batch.records() if self._wants(record)]
                self._records += wanted
                self._count += len(wanted)
            else:
                if self._records or (self._fields and self._version != batch.format_version):
                    yield self._flush()
                self._add(batch)
            if self._count >= BATCH_ROWS or (self._content and self._count):
                yield self._flush()
        if self._count:
            yield self._flush()

    def wanted_count(self, batch: RecordBatch) -> int:
        """How many of these records are wanted."""
        if batch.record is not None:
            return int(self._wants(batch.record))
        if not self._wants_entries():
            return 0
        mask = self._mask(batch, fields_of(batch)) if self._is_selective() else None
        return len(batch) if mask is None else int(mask.sum())

    def _is_selective(self) -> bool:
        conditions = self._conditions
        return bool(conditions.values or conditions.first or conditions.last or conditions.ledgers is not None)

    def _wants(self, record: Record) -> bool:
        conditions = self._conditions
        if record.type in FILLER_TYPES if self._types is None else record.type.value not in self._types:
            return False
        if conditions.about_ledgers and (record.ledger is NO_LEDGER or not conditions.accepts_ledger(record.ledger)):
            return False
        return (
            conditions.accepts("type", record.type.value)
            and conditions.accepts("entryId", record.entry_id)
            and conditions.accepts("offset", record.offset)
        )

    def _wants_entries(self) -> bool:
        name = RecordType.ENTRY.value
        return (self._types is None or name in self._types) and self._conditions.accepts("type", name)

    def _mask(self, batch: RecordBatch, fields: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        import numpy as np

        conditions = self._conditions
        scope_ids, ledger_ids = _ids_of(fields)
        masks = [
            conditions.ledger_mask(scope_ids, ledger_ids),
            conditions.number_mask("entryId", fields[:, -3]),
            conditions.number_mask("offset", _offsets_of(batch)),
        ]
        given = [mask for mask in masks if mask is not None]
        return np.logical_and.reduce(given) if given else None

    def _add(self, batch: RecordBatch) -> None:
        import numpy as np

        if not self._wants_entries():
            return
        fields, offsets, begins = fields_of(batch), _offsets_of(batch), np.asarray(batch.begins, np.int64)
        mask = self._mask(batch, fields) if self._is_selective() else None
        if mask is not None and not mask.all():
            fields, offsets, begins = fields[mask], offsets[mask], begins[mask]
        if not len(fields):
            return
        self._fields.append(fields)
        self._offsets.append(offsets)
        self._version = batch.format_version
        self._count += len(fields)
        if self._content:
            self._contents.append([self._content_of(name, batch.window, fields, begins) for name in self._content])

    def _flush(self) -> pa.RecordBatch:
        import numpy as np
        import pyarrow as pa

        if self._records:
            records, self._records = self._records, []
            arrays = [
                constant(self._constants[field.name], len(records), field.type)
                if field.name in self._constants
                else pa.array(self._value_of(field.name, records), field.type)
                for field in self.schema
            ]
        else:
            fields = self._fields[0] if len(self._fields) == 1 else np.concatenate(self._fields)
            offsets = self._offsets[0] if len(self._offsets) == 1 else np.concatenate(self._offsets)
            contents = {name: pa.concat_arrays(each) for name, each in zip(
                self._content, zip(*self._contents, strict=True), strict=False)}  # fmt: skip
            ids = LedgerColumns(*_ids_of(fields))
            arrays = [
                contents[field.name] if field.name in contents else self._column(field, fields, offsets, ids)
                for field in self.schema
            ]
        self._fields, self._offsets, self._contents, self._count = [], [], [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self, field: pa.Field, fields: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], ids: LedgerColumns
    ) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        name, count = field.name, len(fields)
        if name in self._constants:
            return constant(self._constants[name], count, field.type)
        if name in LEDGER_COLUMNS:
            return ids.column(name)
        if name in _NUMBERS:
            return pa.array(np.ascontiguousarray(fields[:, _NUMBERS[name]]))
        if name == "offset":
            return pa.array(offsets)
        if name == "size":
            overheads = self._overheads(fields)
            if overheads is None:
                return pa.nulls(count, field.type)
            sizes = fields[:, 0] - overheads
            return pa.array(sizes, mask=sizes < 0)
        if name == "digestType" and self._version == 2:
            return pa.array(_DIGEST_NAMES).take(pa.array(fields[:, 1] & 0x0F))
        value = {"formatVersion": self._version, "type": RecordType.ENTRY.value}.get(name)
        return constant(value, count, field.type)

    def _overheads(self, fields: npt.NDArray[np.int64]) -> Any:
        """Bytes before the payload of each entry; None where that is not known."""
        import numpy as np

        if self._version == 2:
            lengths = [0, *(each.code_length for each in DigestType)]
            return HEADER_SIZE_V2 + np.array(lengths, np.int64)[fields[:, 1] & 0x0F]
        return None if self._digest_type is None else HEADER_SIZE_V1 + self._digest_type.code_length

    def _content_of(
        self, name: str, window: bytes, fields: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        count = len(fields)
        if name == "digest":
            rows = zip(begins.tolist(), fields[:, 0].tolist(), strict=True)
            check = _digest_of_v1 if self._version == 1 else _digest_of_v2
            return pa.array([check(window, begin + 4, size) for begin, size in rows], pa.string())
        overheads = 0 if name == "record" else self._overheads(fields)
        if overheads is None:
            return pa.nulls(count, pa.binary())
        # All between the wanted parts stands in the array too, and is left out when those are taken.
        borders = np.empty((count, 2), np.int32)
        ends = begins + 4 + fields[:, 0]
        starts = np.minimum(begins + 4 + overheads, ends)
        borders[:, 0], borders[:, 1] = starts, ends
        parts = pa.BinaryArray.from_buffers(
            pa.binary(), 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(window)]
        )
        missing = fields[:, 0] < overheads
        chosen = pa.array(np.arange(0, 2 * count, 2, dtype=np.int64), mask=missing if missing.any() else None)
        return parts.take(chosen)

    def _value_of(self, name: str, records: Sequence[Record]) -> list[Any]:
        return [_VALUES[name](record, self._digest_type) for record in records]


#: Where the fields of a row are; negative: from its end.
_NUMBERS: Final = {"recordSize": 0, "entryId": -3, "lastAddConfirmed": -2, "length": -1}
_DIGEST_NAMES: Final = (None, *(each.name for each in DigestType))


def _ids_of(
    fields: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint64] | None, npt.NDArray[np.uint64]]:
    import numpy as np

    ledger_ids = np.ascontiguousarray(fields[:, -4]).view(np.uint64)
    return (None if fields.shape[1] == 5 else np.ascontiguousarray(fields[:, 2]).view(np.uint64)), ledger_ids


def _offsets_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    import numpy as np

    return np.asarray(batch.begins, np.int64) + batch.window_offset


def _digest_of_v1(window: bytes, body: int, size: int) -> str | None:
    """The name of the digest type that the entry matches; None where it is none of those that need no password."""
    payload = body + HEADER_SIZE_V1
    header = window[body:payload]
    end = body + size
    for digest_type in _TRIED:
        at = payload + digest_type.code_length
        if at <= end and digest_function(digest_type)(header, window[at:end]) == window[payload:at]:
            return digest_type.name
    return None


def _digest_of_v2(window: bytes, body: int, size: int) -> str | None:
    digest_type = _TYPES_BY_NUMBER.get(window[body] & 0x0F)
    if digest_type is None or digest_type is DigestType.HMAC:
        return None
    payload = body + HEADER_SIZE_V2
    at, end = payload + digest_type.code_length, body + size
    if at > end or digest_function(digest_type)(window[body:payload], window[at:end]) != window[payload:at]:
        return None
    return digest_type.name


_TYPES_BY_NUMBER: Final = {int(each): each for each in DigestType}


def _last_add_confirmed(record: Record) -> int | None:
    if record.type is not RecordType.EXPLICIT_LAC:
        return record.last_add_confirmed
    try:
        return read_lac_header(record.special_payload).last_add_confirmed
    except (Corrupt, Unsupported):
        return None


def _record_digest(record: Record) -> str | None:
    if record.type is not RecordType.ENTRY or record.length is None:
        return None
    check = _digest_of_v1 if record.format_version == 1 else _digest_of_v2
    return check(record.body, 0, record.record_size)


_VALUES: Final[dict[str, Callable[[Record, DigestType | None], Any]]] = {
    "ledgerScopeId": lambda record, _: None if record.ledger is NO_LEDGER else str(record.ledger.scope_id),
    "ledgerId": lambda record, _: None if record.ledger is NO_LEDGER else str(record.ledger.ledger_id),
    "ledgerQualifiedName": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.qualified_name,
    "entryId": lambda record, _: record.entry_id,
    "lastAddConfirmed": lambda record, _: _last_add_confirmed(record),
    "length": lambda record, _: record.length,
    "size": lambda record, digest_type: record.payload_size(digest_type),
    "formatVersion": lambda record, _: record.format_version,
    "offset": lambda record, _: record.offset,
    "recordSize": lambda record, _: record.record_size,
    "type": lambda record, _: record.type.value,
    "digestType": lambda record, _: None if record.digest_type is None else record.digest_type.name,
    "digest": lambda record, _: _record_digest(record),
    "payload": lambda record, digest_type: record.payload(digest_type),
    "record": lambda record, _: record.body,
    "masterKey": lambda record, _: record.special_payload if record.type is RecordType.LEDGER_KEY else None,
    DAMAGE: lambda record, _: None,
}


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
        self._types = self._record_types()
        self._struct = schema
        self._conditions = Conditions()
        if options.text("ledger") is not None:
            self._conditions.ledgers = frozenset(options.ledgers())
        elif (scope_id := options.scope_id()) is not None:
            self._conditions.values["ledgerScopeId"] = frozenset((str(scope_id),))
        check_schema(self.source, schema, (*self.default_columns(), *self.on_request, DAMAGE))

    @classmethod
    def default_columns(cls) -> tuple[str, ...]:
        """The columns that come without asking, those of the command that reads such files."""
        return (*_COMMON, cls.id_name, f"{cls.id_name}Hex", *_PLACE)

    @classmethod
    def ddl(cls, options: SourceOptions) -> str:
        """The schema that the options ask for."""
        columns = options.columns(cls.default_columns(), cls.on_request)
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
        never_null: tuple[str, ...] = ()
        if self._mode is Mode.FAILFAST:
            never_null = ("entryId", "offset", "recordSize", "type", "file", "formatVersion", "scoped")
            if self._types is None:
                never_null += LEDGER_COLUMNS
        left = list(self._conditions.push(filters, names, ("entryId", "offset", self.id_name), never_null))
        # Rows that tell of damage are null elsewhere: that no filter wants those is for Spark to say.
        return list(filters) if self._mode is Mode.PERMISSIVE else left

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

    def _rows(self, place: Place) -> RecordRows:
        from pyspark.sql.pandas.types import to_arrow_schema

        schema = to_arrow_schema(self._struct)
        return RecordRows(schema, self._constants(place), self._conditions, self._types, self._digest_type)

    def _plan(self, place: Place) -> list[Range]:
        rows = self._rows(place)

        def planner(start: int, version: int) -> RangePlanner:
            return RangePlanner(place, start, version, self._size_bytes, rows.wanted_count)

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
        rows = self._rows(part.place)
        damage = [part.damage] if part.damage else []
        try:
            yield from rows.of(self._checked(part, content=any(name in _OF_CONTENT for name in self._struct.names)))
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
                fingerprint = fingerprint + fingerprint_of(batch) & U64_MAX
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


class _Vanished(Exception):
    """A file that was listed is gone."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.path)
        self.place = place
