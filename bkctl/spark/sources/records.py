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

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from struct import Struct
from typing import Any, Final, NamedTuple

import pyarrow as pa

from bkctl.errors import BkctlError, Conflict, CorruptRecord, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.scan import RecordBatch
from bkctl.files.windows import FileReader
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, OVERHEAD_SIZE_MAX
from bkctl.formats.entry_log import HEADER_SIZE, content_id_of
from bkctl.formats.journal import journal_id_of
from bkctl.formats.record import RECORD_SIZE_BYTES_MAX, RecordType
from bkctl.spark.sources.columns import damage_of, damage_row
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.options import Mode
from bkctl.spark.sources.places import Place, resolve, unseen
from bkctl.spark.sources.readers import QUERY_OPTIONS, InputPartition, TableSource
from bkctl.spark.sources.record_rows import BODY_COLUMNS, LedgerSums, RecordRows, Selection

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

    #: The column of the file's id: `logId` or `journalId`.
    id_name: str
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
        """Return the ranges, in the order of the files. Raises Conflict if files vanish at every attempt to plan."""
        for _ in range(_PLANS_MAX):
            accepts = self._conditions.accepts
            listed = self.list_places()
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
            selection = Selection(self._conditions, self._types)
            rows: RecordRows | LedgerSums = LedgerSums(schema, constants, selection)
            if self._rows is RecordRowKind.RECORDS:
                rows = RecordRows(schema, constants, selection, self._digest_type)
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
    source = "bookkeeper.entrylog"

    def list_places(self) -> list[Place]:
        return resolve(self.checked.paths(), BookieDirectories.entry_logs, content_id_of)

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
        self._readers: dict[str, EntryLogReader] = {}

    def reader(self, path: str) -> EntryLogReader:
        """Return the reader of a log. Raises as `EntryLogReader.open`."""
        reader = self._readers.get(path)
        if reader is None:
            if len(self._readers) >= _OPEN_LOGS_MAX:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[path] = EntryLogReader.open(path)
        return reader

    def record_at(self, path: str, offset: int, *noted: type[BkctlError]) -> dict[str, Any]:
        """Return what stands at byte `offset` of a log: `ledgerQualifiedName`, `entryId` and `record`, or `problem`.

        A `problem` has a `detail`: the record is missing, or damaged by one of the errors to be `noted`.
        """
        try:
            found = self.reader(path).entry_at(offset + 4)
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
        for reader in self._readers.values():
            reader.close()


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
    source = "bookkeeper.journal"
    is_written_in_place = True
    on_request = (*RecordSource.on_request, "masterKey")

    def list_places(self) -> list[Place]:
        return resolve(self.checked.paths(), BookieDirectories.journals, journal_id_of)

    def read_range(self, path: str, start: int, end: int | None, *, content: bool) -> Iterator[RecordBatch]:
        with JournalReader.open(path) as reader:
            yield from reader.batches(start, end, padding=RecordType.PADDING.value in (self._types or ()))
