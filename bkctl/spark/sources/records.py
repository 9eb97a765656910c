"""The sources of records, `bookkeeper.entrylog` and `bookkeeper.journal`: from files to ranges, from ranges to Arrow.

With the option `rows` = `ledgers` a row is a ledger's share of one partition: the number of its entries, and their
bytes with size fields, as a bookie counts them. The sum of its rows is what `bkctl entrylog show` prints. Sums cost
little more than reading the files.

Options: `path` (files, directories of bookies, patterns), `mode`, `columns`, `ledger`, `ledgerScopeId`, `types`
(default: all but padding and ledgersMap), `digestType` (of ledgers of scope 0, whose records do not name it: without it
their `size` and `payload` are null), `borders` (JSON: offsets of records at which a file is cut into partitions).

The planner takes the size, the time and the header of each file. A task reads one file up to the planned size, or a
part between two `borders`. A file that shrank or was replaced between plan and read is an error, never another answer.
Records that a running bookie appends meanwhile are not part of the answer. A payload is never taken for a record,
because records are not searched for: each follows the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.errors import BkctlError, Conflict, CorruptRecord, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.listing import FILLER_TYPES
from bkctl.files.scan import RecordBatch
from bkctl.files.windows import FileReader
from bkctl.formats.entry import (
    HEADER_SIZE_V1,
    HEADER_SIZE_V2,
    OVERHEAD_SIZE_MAX,
    DigestType,
    digest_function,
)
from bkctl.formats.entry_log import HEADER_SIZE, content_id_of
from bkctl.formats.journal import journal_id_of
from bkctl.formats.record import NO_LEDGER, RECORD_SIZE, RECORD_SIZE_BYTES_MAX, Record, RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.columns import DAMAGE, LedgerColumns, damage_of, damage_row, table_of
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions, all_of
from bkctl.spark.sources.options import Mode
from bkctl.spark.sources.places import Place, resolve, unseen
from bkctl.spark.sources.readers import QUERY_OPTIONS, InputPartition, TableSource


def fields_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """Return the header fields of the plain entries in `batch`, one row an entry."""
    width = 5 if batch.format_version == 1 else 7
    fields = batch.fields
    if isinstance(fields, memoryview):
        return np.frombuffer(fields, np.int64).reshape(-1, width)
    try:
        found = np.array(fields, np.int64)
    except OverflowError:
        # Without the compiled loop, ids of 2^63 and more are not wrapped yet.
        found = np.array([to_signed(value) for value in fields], np.int64)
    return found.reshape(-1, width)


def ids_of(
    fields: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint64] | None, npt.NDArray[np.uint64]]:
    """Return the scope ids (None: all 0) and ledger ids in the rows of `fields_of`."""
    ledger_ids = np.ascontiguousarray(fields[:, -4]).view(np.uint64)
    return (None if fields.shape[1] == 5 else np.ascontiguousarray(fields[:, 2]).view(np.uint64)), ledger_ids


#: Types of the records that are selected without the option `types`.
DATA_TYPES: Final = frozenset(each.value for each in RecordType if each not in FILLER_TYPES)


def wants(conditions: Conditions, record: Record) -> bool:
    """Return whether a record meets the conditions, among them those on its `type`."""
    if conditions.about_ledgers and (record.ledger is NO_LEDGER or not conditions.accepts_ledger(record.ledger)):
        return False
    values = {"type": record.type.value, "entryId": record.entry_id, "offset": record.offset}
    return all(conditions.accepts(*each) for each in values.items())


def wanted_entries(conditions: Conditions, batch: RecordBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the header fields and the begins in their window of the plain entries that meet the conditions."""
    fields, begins = fields_of(batch), np.asarray(batch.begins, np.int64)
    if not conditions.accepts("type", RecordType.ENTRY.value):
        return fields[:0], begins[:0]
    mask = all_of(
        (
            conditions.ledger_mask(*ids_of(fields)) if conditions.about_ledgers else None,
            conditions.mask("entryId", fields[:, -3]),
            conditions.mask("offset", begins + batch.window_offset),
        )
    )
    return (fields, begins) if mask is None or mask.all() else (fields[mask], begins[mask])


# --- single records ---------------------------------------------------------------------------------------------------

#: Digest types that need no password, in the order in which entries of format version 1 are checked.
_CHECKED_TYPES: Final = (DigestType.CRC32C, DigestType.CRC32)
#: Number in an entry of format version 2 → its digest type, if that needs no password.
_NAMED_TYPES: Final = {int(each): (each,) for each in DigestType if each is not DigestType.HMAC}


def digest_of(window: bytes, body: int, size: int, version: int) -> str | None:
    """Return the name of the digest type without password that an entry matches: of version 2 the type in it."""
    payload, end = body + (HEADER_SIZE_V1 if version == 1 else HEADER_SIZE_V2), body + size
    for digest_type in _CHECKED_TYPES if version == 1 else _NAMED_TYPES.get(window[body] & 0x0F, ()):
        at = payload + digest_type.code_length
        if at <= end and digest_function(digest_type)(window[body:payload], window[at:end]) == window[payload:at]:
            return digest_type.name
    return None


def _record_digest(record: Record) -> str | None:
    if record.type is not RecordType.ENTRY or record.length is None:
        return None
    return digest_of(record.body, 0, record.record_size, record.format_version)


#: Column → its value of a record; the digest type of version 1, where given, tells the payload's size.
VALUES: Final[dict[str, Callable[[Record, DigestType | None], Any]]] = {
    "ledgerScopeId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.scope_id,
    "ledgerId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.ledger_id,
    "ledgerQualifiedName": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.qualified_name,
    "entryId": lambda record, _: record.entry_id,
    "lastAddConfirmed": lambda record, _: record.lac,
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

# --- rows -------------------------------------------------------------------------------------------------------------

#: Rows of one Arrow batch, about.
BATCH_ROWS: Final = 32_768
#: Batches whose sums are kept apart.
_SUMS_MAX: Final = 256
#: Batches of fewer records are handled record by record.
_COLUMN_RECORDS_MIN: Final = 8

#: Columns that need the bodies of records; all others need the headers only.
BODY_COLUMNS: Final = frozenset(("payload", "record", "digest"))

#: Index of a column in a row of header fields; negative: from its end.
_FIELD_PLACES: Final = {"recordSize": 0, "entryId": -3, "lastAddConfirmed": -2, "length": -1}
_DIGEST_NAMES: Final = (None, *(digest_type.name for digest_type in DigestType))


class RecordRows:
    """Turns selected records into Arrow batches of `schema`; `constants` are the columns that a whole file shares.

    Plain entries stay columns from `RecordBatch` to Arrow, without a Python object for each, and are selected by their
    header fields. Other records, and batches of few entries, are handled one by one.
    """

    def __init__(
        self, schema: pa.Schema, constants: dict[str, Any], conditions: Conditions, digest_type: DigestType | None
    ) -> None:
        self.schema = schema
        self._constants, self._conditions, self._digest_type = constants, conditions, digest_type
        self._content = [name for name in schema.names if name in BODY_COLUMNS]
        self._fields: list[npt.NDArray[np.int64]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._contents: dict[str, pa.Array] = {}
        self._version = 1
        self._records: list[Record] = []
        self._count = 0

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these records, in order; keeps no window of a batch once it asks for the next batch."""
        for batch in batches:
            if _is_read_singly(batch):
                if self._fields:
                    yield self._flush()
                wanted = [record for record in batch.records() if wants(self._conditions, record)]
                self._records += wanted
                self._count += len(wanted)
            else:
                if self._records or (self._fields and self._version != batch.format_version):
                    yield self._flush()
                self._add(batch)
            # Bodies are of one window: rows with them do not wait for the next window.
            if self._count >= BATCH_ROWS or (self._content and self._count):
                yield self._flush()
        if self._count:
            yield self._flush()

    def _add(self, batch: RecordBatch) -> None:
        fields, begins = wanted_entries(self._conditions, batch)
        if not len(fields):
            return
        self._fields.append(fields)
        self._offsets.append(begins + batch.window_offset)
        self._version = batch.format_version
        self._count += len(fields)
        self._contents = {name: self._content_of(name, batch.window, fields, begins) for name in self._content}

    def _flush(self) -> pa.RecordBatch:
        names, constants, count = self.schema.names, self._constants, self._count
        if self._records:
            columns = {
                name: pa.array([VALUES[name](record, self._digest_type) for record in self._records], kind)
                for name, kind in zip(names, self.schema.types, strict=True)
                if name in VALUES
            }
        else:
            fields, offsets = (
                each[0] if len(each) == 1 else np.concatenate(each) for each in (self._fields, self._offsets)
            )
            columns = LedgerColumns(*ids_of(fields)).columns(self.schema) | self._contents
            numbers = {name: fields[:, place] for name, place in _FIELD_PLACES.items()} | {"offset": offsets}
            columns |= {name: pa.array(np.ascontiguousarray(numbers[name])) for name in names if name in numbers}
            if "size" in names and (overheads := self._overheads(fields)) is not None:
                sizes = fields[:, 0] - overheads
                columns["size"] = pa.array(sizes, mask=sizes < 0)
            if "digestType" in names and self._version == 2:
                columns["digestType"] = pa.array(_DIGEST_NAMES).take(pa.array(fields[:, 1] & 0x0F))
            constants = {**constants, "formatVersion": self._version, "type": RecordType.ENTRY.value}
        self._fields, self._offsets, self._records, self._count = [], [], [], 0
        (rows,) = table_of(self.schema, columns, count, constants).to_batches()
        return rows

    def _overheads(self, fields: npt.NDArray[np.int64]) -> Any:
        """Return the bytes before the payload of each entry; None if unknown (version 1 without a digest type)."""
        if self._version == 2:
            lengths = [0, *(each.code_length for each in DigestType)]
            return HEADER_SIZE_V2 + np.array(lengths, np.int64)[fields[:, 1] & 0x0F]
        return None if self._digest_type is None else HEADER_SIZE_V1 + self._digest_type.code_length

    def _content_of(
        self, name: str, window: bytes, fields: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> pa.Array:
        count = len(fields)
        if name == "digest":
            rows = zip(begins.tolist(), fields[:, 0].tolist(), strict=True)
            return pa.array([digest_of(window, begin + 4, size, self._version) for begin, size in rows], pa.string())
        overheads = 0 if name == "record" else self._overheads(fields)
        if overheads is None:
            return pa.nulls(count, pa.binary())
        # The array holds the bytes between the wanted parts as well: every second item, which `take` leaves out.
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


class LedgerSums:
    """Counts selected records, with the interface of RecordRows: one row a ledger, with its entries and their bytes.

    Bytes include size fields. Records without a ledger do not count.
    """

    def __init__(self, schema: pa.Schema, constants: dict[str, Any], conditions: Conditions) -> None:
        self.schema = schema
        self._constants, self._conditions = constants, conditions

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row a ledger of all these records, in order of scope and ledger id."""
        parts = [np.zeros((4, 0), np.uint64)]
        for batch in batches:
            parts.append(self._sums_of(batch))
            if len(parts) > _SUMS_MAX:
                parts = [_sums(*np.hstack(parts))]
        sums = _sums(*np.hstack(parts))
        sums = sums[:, np.lexsort((sums[1], sums[0]))]
        for first in range(0, sums.shape[1], BATCH_ROWS):
            scope_ids, ledger_ids, counts, sizes = sums[:, first : first + BATCH_ROWS]
            columns = LedgerColumns(scope_ids, ledger_ids).columns(self.schema)
            columns |= {"entryCount": pa.array(counts), "size": pa.array(sizes + counts * RECORD_SIZE.size)}
            yield from table_of(self.schema, columns, len(counts), self._constants).to_batches()

    def _sums_of(self, batch: RecordBatch) -> npt.NDArray[np.uint64]:
        if _is_read_singly(batch):
            wanted = (record for record in batch.records() if wants(self._conditions, record))
            rows = [(*record.ledger, 1, record.record_size) for record in wanted if record.ledger is not NO_LEDGER]
            return np.array(rows, np.uint64).reshape(-1, 4).T
        fields, _ = wanted_entries(self._conditions, batch)
        return _sums(*ids_of(fields), None, fields[:, 0])


def _sums(
    scope_ids: npt.NDArray[np.uint64] | None, ledger_ids: npt.NDArray[np.uint64],
    counts: npt.NDArray[Any] | None, sizes: npt.NDArray[Any],
) -> npt.NDArray[np.uint64]:  # fmt: skip
    """Return the distinct ledgers, a column each: scope id, ledger id, the sums of counts (None: 1 a row) and sizes."""
    rows, scope_ids, ledger_ids = LedgerColumns(scope_ids, ledger_ids).distinct
    sums = (np.bincount(rows.to_numpy(), each, len(ledger_ids)).astype(np.uint64) for each in (counts, sizes))
    return np.stack((scope_ids, ledger_ids, *sums))


def _is_read_singly(batch: RecordBatch) -> bool:
    """Return whether to handle the records of `batch` one by one, which plain entries without bodies do not allow."""
    return batch.record is not None or (len(batch) < _COLUMN_RECORDS_MIN and len(batch.window) > 0)


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

    `state` is the file's when the plan was made; None: it could not be read.
    """

    place: Place
    state: FileState | None = None
    start: int = 0
    end: int | None = None


def end_of(batch: RecordBatch) -> int:
    """Return the file offset behind the last record of `batch`."""
    record = batch.record
    if record is not None:
        # Padding of a journal has a second size field.
        head = 8 if record.type is RecordType.PADDING and not record.body else 4
        return record.offset + head + record.record_size
    width = 5 if batch.format_version == 1 else 7
    return batch.window_offset + batch.begins[-1] + 4 + batch.fields[-width]


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


class RecordSource(TableSource):
    """Plans and reads files of records; a subclass opens one kind of file."""

    #: The column of the file's id, `logId` or `journalId`; the files to read of a bookie, and the id in a file's name.
    id_name: str
    files_of: Callable[[BookieDirectories], Iterable[BookieFile]]
    id_of: Callable[[str], int | None]
    known = (*QUERY_OPTIONS, "rows", "digestType", "types", "borders")
    #: A running bookie writes into space that is allocated ahead.
    is_written_in_place = False
    on_request: Sequence[str] = ("payload", "record", "digestType", "digest")

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._digest_type = self.checked.digest_type()
        self._borders = self.checked.offsets("borders")
        self._rows = self.checked.choice("rows", RecordRowKind.RECORDS)
        self._types = frozenset(self.checked.words("types")) or None
        for name in self._types or ():
            if name not in [*RecordType]:
                raise UsageError(f"{self.source}: option types {name!r}: one of {', '.join(RecordType)} is needed")
        self._conditions.values["type"] = self._types or DATA_TYPES
        self.texts = ("type", "file", f"{self.id_name}Hex", "bookieId")
        self.integers = ("entryId", "offset", self.id_name)
        of_ledgers = LEDGER_COLUMNS if self._types is None else ()
        self.never_null = (
            "entryId", "offset", "recordSize", "type", "file", "formatVersion", "scoped", "entryCount", *of_ledgers,
        )  # fmt: skip
        of_file = (self.id_name, f"{self.id_name}Hex")
        if self._rows is RecordRowKind.LEDGERS:
            self.columns, self.on_request = (*LEDGER_COLUMNS, "entryCount", "size", *of_file, *_PLACE_COLUMNS), ()
        else:  # The same as of the command that reads such files.
            self.columns = (*_COMMON_COLUMNS, *of_file, "offset", "recordSize", "type", *_PLACE_COLUMNS)

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        """Yield the records that begin from byte `start` (0: the first) to byte `end` (None: all), unselected ones too.

        Subclasses implement it. Without `content` bodies may be cut short. Raises the error of damage.
        """
        raise AssertionError

    # Spark calls:

    def partitions(self) -> list[InputPartition]:
        """Return the ranges, in the order of the files. Raises Conflict if files vanish at every attempt to plan."""
        for _ in range(_PLANS_MAX):
            accepts = self._conditions.accepts
            listed = resolve(self.checked.paths(), self.files_of, self.id_of)
            places = [place for place in listed if all(accepts(*each) for each in self._constants(place).items())]
            with ThreadPoolExecutor(min(_PLANNERS_MAX, len(places)) or 1) as planners:
                planned = list(planners.map(self._plan, places))
            gone = next((place.path for place, ranges in zip(places, planned, strict=True) if ranges is None), None)
            if gone is None:
                return list(chain.from_iterable(ranges or () for ranges in planned))
            # Compaction moved its entries to a log that may not have been listed: list again.
        raise Conflict(
            f"{gone} was deleted while it was read", hint="the bookie deletes many files now; try again later"
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the selected rows of one range, then in mode permissive a row for the damage behind it.

        Raises the error of damage in mode failfast, Conflict if the file differs from the plan, NotFound if it was
        deleted or this machine does not see it.
        """
        # Spark adds a partition of its own to an empty list.
        if isinstance(partition, Range):
            place, damages = partition.place, list[dict[str, Any]]()
            schema, constants = self._schema, self._constants(place)
            rows: RecordRows | LedgerSums = LedgerSums(schema, constants, self._conditions)
            if self._rows is RecordRowKind.RECORDS:
                rows = RecordRows(schema, constants, self._conditions, self._digest_type)
            yield from rows.of(self._up_to_damage(partition, damages))
            for damage in damages:
                yield damage_row(schema, damage, **constants)

    def _constants(self, place: Place) -> dict[str, Any]:
        file_id = place.file_id
        return {
            self.id_name: file_id,
            f"{self.id_name}Hex": None if file_id is None else f"{file_id:x}",
            "file": place.path,
            "scoped": place.scoped,
            "bookieId": place.bookie_id,
        }

    def _plan(self, place: Place) -> list[Range] | None:
        """Return the ranges of a file; None if it was listed and deleted."""
        borders = (None, *self._borders.get(place.path, ()), None)
        try:
            state = FileState.of(place.path)
        except NotFound:
            if place.found:
                return None
            raise
        except UsageError:
            raise
        except BkctlError:
            return [Range(place)]  # The task that reads the file raises or reports this.
        return [Range(place, state, start or 0, end) for start, end in pairwise(borders)]

    def _up_to_damage(self, part: Range, damages: list[dict[str, Any]]) -> Iterator[RecordBatch]:
        """Yield the records of a range that were whole when the plan was made.

        In mode permissive add the damage that ends them to `damages`.
        """
        path, state, end = part.place.path, part.state, part.end
        content = any(name in BODY_COLUMNS for name in self._schema.names)
        try:
            if state is not None:
                with FileReader(path) as file:
                    planned_end = state.end_in(file, is_written_in_place=self.is_written_in_place)
                end = end or planned_end
            for batch in self.read_range(path, part.start, end, content=content):
                if state is not None and end_of(batch) > state.size_bytes:
                    batch = batch.first(len(batch) - 1)
                if len(batch):
                    yield batch
        except BkctlError as error:
            found = unseen(path) if isinstance(error, NotFound) else error
            # No mode permits that this machine does not see a file.
            (Mode.FAILFAST if isinstance(found, UsageError) else self._mode).check(found)
            damages.append(damage_of(found, path))


# --- entry logs -------------------------------------------------------------------------------------------------------

#: Average size from which reading single headers costs less than reading whole records.
_HOP_SIZE_BYTES: Final = 64 << 10
#: Records of one batch that are read by their headers.
_HOPS: Final = 1024
_OPEN_LOGS_MAX: Final = 64


class EntryLogSource(RecordSource):
    """The records of entry logs, as `bkctl entrylog read` prints them; or sums of each ledger.

    A log whose ledgers map names none of the wanted ledgers is not read, so its damage is unseen. Unfinished files of
    compactions in directories are skipped: their entries are in a log, too.
    """

    id_name = "logId"
    files_of = staticmethod(BookieDirectories.entry_logs)
    id_of = staticmethod(content_id_of)
    source = "bookkeeper.entrylog"

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        with EntryLogReader.open(path) as reader:
            sizes = None
            with suppress(CorruptRecord):
                sizes = reader.ledgers_map() if self._conditions.about_ledgers else None
            # A sound ledgers map without a wanted ledger: the log has no record to read.
            if sizes is None or any(map(self._conditions.accepts_ledger, sizes)):
                yield from _batches(reader, start, end, content=content)


class OpenLogs:
    """Readers of entry logs, of which the latest stay open until `close`."""

    def __init__(self) -> None:
        # A reader that the cache drops closes its file.
        self._open = lru_cache(_OPEN_LOGS_MAX)(EntryLogReader.open)

    def record_at(self, path: str, offset: int, *noted: type[BkctlError]) -> dict[str, Any]:
        """Return what stands at byte `offset` of a log: `ledgerQualifiedName`, `entryId` and `record`, or `problem`.

        A `problem` has a `detail`: the record is missing, or damaged by one of the errors to be `noted`.
        """
        try:
            found = self._open(path).entry_at(offset + 4)
        except NotFound as error:
            return {"file": path, "problem": "missing", "detail": str(error)}
        except noted as error:
            return {"file": path, "problem": "damaged", "detail": str(error)}
        return {
            "file": path, "ledgerQualifiedName": found.ledger.qualified_name, "entryId": found.entry_id,
            "record": found.body,
        }  # fmt: skip

    def close(self) -> None:
        """Close all of them."""
        self._open.cache_clear()


def _batches(reader: EntryLogReader, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
    """Yield the records of a log as `EntryLogReader.batches` does; without `content`, large bodies are not read."""
    at = max(start, HEADER_SIZE)
    while True:
        for batch in reader.batches(at, end, special=True):
            yield batch
            before, at = batch.window_offset + batch.begins[0], end_of(batch)
            if not content and batch.record is None and (at - before) // len(batch) >= _HOP_SIZE_BYTES:
                break
        else:
            return
        for headers in _headers(reader, at, end, batch.format_version):
            yield headers
            at = end_of(headers)


def _headers(reader: EntryLogReader, at: int, end: int | None, version: int) -> Iterator[RecordBatch]:
    """Yield plain entries by their headers alone, while they are large and sound."""
    layout, size_min = (_ROW_V1, HEADER_SIZE_V1) if version == 1 else (_ROW_V2, HEADER_SIZE_V2)
    file_end = reader.size()
    while True:
        start = at
        begins: list[int] = []
        fields: list[int] = []
        while at + layout.size <= file_end and (end is None or at < end) and len(begins) < _HOPS:
            head = reader.read(at, layout.size)
            if len(head) < layout.size:
                break
            row = layout.unpack(head)
            is_plain = head[4] < 0x80 if version == 1 else 0xA0 <= head[4] <= 0xA4
            size, entry_id, length = row[0], row[-3], row[-1]
            is_sound = size_min <= size <= min(RECORD_SIZE_BYTES_MAX, file_end - at - 4) and entry_id >= 0
            if not (is_plain and is_sound) or size - OVERHEAD_SIZE_MAX > max(length, 0):
                break
            begins.append(at - start)
            fields += row
            at += 4 + size
        if begins:
            yield RecordBatch(b"", start, begins, fields, version)
        if len(begins) < _HOPS or at - start < _HOPS * _HOP_SIZE_BYTES:
            return


_ROW_V1: Final = Struct(">iQqqq")
_ROW_V2: Final = Struct(">iBQQqqq")

# --- journals ---------------------------------------------------------------------------------------------------------


class JournalSource(RecordSource):
    """The records of journals, as `bkctl journal read` prints them.

    `masterKey` is a column on request, and a secret. A journal may end inside a record, as when its bookie stopped; a
    replay ignores that record, and so does this source. Any other end is damage.
    """

    id_name = "journalId"
    files_of = staticmethod(BookieDirectories.journals)
    id_of = staticmethod(journal_id_of)
    source = "bookkeeper.journal"
    is_written_in_place = True
    on_request = (*RecordSource.on_request, "masterKey")

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        with JournalReader.open(path) as reader:
            yield from reader.batches(start, end, padding=RecordType.PADDING.value in (self._types or ()))
