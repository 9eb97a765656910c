"""`bookkeeper.index`: the entries in bookies' indexes of any storage class, as `bkctl bookie index show` prints them.

A row is an entry and its location. With the option `rows` = `ledgers` a row is a ledger, its index header, and the
number of its entries. Options: `path` (index files, databases of DbLedgerStorage, directories of bookies, patterns),
`rows`, `mode`, `columns`, `ledger`, `ledgerScopeId`, `maxPartitionBytes`.

A partition is a group of index files, a range of the slots of a large file, or a range of the ledgers of a database;
together they are the whole index. A file must be at least as long as it was when the plan was made. A database is read
as it is when its task starts, since a running bookie changes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain, islice, pairwise, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.files.windows import FileReader
from bkctl.formats.entry import read_lac_header
from bkctl.formats.index import (
    HEADER_SIZE,
    SLOT_SIZE,
    IndexHeader,
    LedgerData,
    ledger_of_index_path,
    location_key,
    read_location,
    read_location_key,
)  # fmt: skip
from bkctl.formats.names import DATABASE_NAMES, ROCKSDB_NAMES
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import LedgerColumns, damage_of, damage_row, ledger_values, table_of
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions, all_of, ids_by_scope, mask_of_ledgers
from bkctl.spark.sources.places import bookie_id_at, local_paths, unseen
from bkctl.spark.sources.readers import QUERY_OPTIONS, InputPartition, TableSource
from bkctl.spark.sources.records import BATCH_ROWS

#: Index files of one partition at most.
_FILES_MAX: Final = 1000
#: 2 million slots of index files.
PARTITION_SIZE_BYTES: Final = 16 << 20
#: Entries of small index files in one batch.
_ROWS_GATHERED: Final = 8192
_OF_FILE: Final = ("file", "scoped", "bookieId")


class IndexRowKind(StrEnum):
    """Kinds of rows of the source; the values are the words of its option `rows`."""

    ENTRIES = "entries"
    LEDGERS = "ledgers"


#: The default columns of each kind of rows, and those on request.
_COLUMNS: Final = {
    IndexRowKind.ENTRIES: ((*LEDGER_COLUMNS, "entryId", "logId", "logIdHex", "offset", "location", *_OF_FILE), ()),
    IndexRowKind.LEDGERS: (
        (*LEDGER_COLUMNS, "fenced", "explicitLac", "entryCount", "lastEntryId", *_OF_FILE), ("masterKey",),
    ),
}  # fmt: skip


# --- the plan ---------------------------------------------------------------------------------------------------------


class Slots(NamedTuple):
    """The slots `first` to `end` (excluded) of an index file that had `size_bytes` when the plan was made."""

    path: str
    ledger: LedgerId
    bookie_id: str | None
    first: int
    end: int
    size_bytes: int


@dataclass
class IndexFileGroup(InputPartition):
    """Some index files, or a part of one."""

    slots: list[Slots]


@dataclass
class DatabaseRange(InputPartition):
    """The locations with keys from `first` (None: the lowest) to `end` (excluded; None: all) in a pair of databases."""

    directory: str
    scoped: bool
    bookie_id: str | None
    first: bytes | None = None
    end: bytes | None = None

    def path(self, name: str) -> Path:
        """Return the path of the database `ledgers` or `locations`."""
        return Path(self.directory) / (f"scoped-{name}" if self.scoped else name)

    def entries(self, conditions: Conditions) -> Iterator[IndexedEntries]:
        """Yield the entries of accepted ledgers, batch by batch; entry ids outside the conditions may be among them.

        Entries of ledgers that the database of ledgers lacks wait for garbage collection, and are left out.
        """
        with self._open(conditions) as (ledgers, _, locations):
            if conditions.about_ledgers:
                first, last = conditions.entry_range()
                for ledger in ledgers if first <= last else ():
                    begin, end = location_key(ledger, first), location_key(ledger, last) + b"\0"
                    for items in locations.batches(begin, end, count=BATCH_ROWS):
                        yield _entries_of(items, self)
                return
            wanted = ids_by_scope(ledgers)
            for items in locations.batches(self.first or b"", self.end, count=BATCH_ROWS):
                entries = _entries_of(items, self)
                mask = mask_of_ledgers(wanted, entries.scope_ids, entries.ledger_ids)
                yield entries if mask.all() else entries.select(mask)

    def ledgers(self, conditions: Conditions) -> Iterator[dict[str, Any]]:
        """Yield the rows of the accepted ledgers."""
        with self._open(conditions) as (ledgers, database, locations):
            for ledger in ledgers:
                if (data := database.get(ledger)) is not None:
                    count = sum(len(items) for items in locations.batches_of(ledger))
                    yield ledger_row(ledger, data, count, locations.last_entry_id(ledger))

    @contextmanager
    def _open(self, conditions: Conditions) -> Iterator[tuple[list[LedgerId], LedgersDatabase, LocationsDatabase]]:
        """Yield the accepted ledgers and the open databases; a ledger that a border cuts is in the ranges beside it."""
        size = 16 if self.scoped else 8

        def ledger_at(key: bytes | None) -> LedgerId | None:
            return None if key is None else LedgerId.from_value(int.from_bytes(key[:size].ljust(size, b"\0"), "big"))

        first, end = ledger_at(self.first), ledger_at(self.end)
        is_cut = self.end is not None and len(self.end) > size
        with (
            LedgersDatabase.open(self.path("ledgers"), scoped=self.scoped) as database,
            LocationsDatabase.open(self.path("locations"), scoped=self.scoped) as locations,
        ):
            listed = database.ledger_ids(first if first is not None and first.is_scoped == self.scoped else None)
            before_end = takewhile(lambda each: end is None or each < end or (is_cut and each == end), listed)
            yield list(filter(conditions.accepts_ledger, before_end)), database, locations


def _part_starts(extents: Iterable[tuple[int, int]], step: int) -> Iterator[int]:
    """Yield the first slots of all parts but the first: each has `step` slots outside of the file's holes, or fewer."""
    filled = 0
    for begin, end in extents:
        slot, slot_end = (begin - HEADER_SIZE) // SLOT_SIZE, -(-(end - HEADER_SIZE) // SLOT_SIZE)
        while slot < slot_end:
            if filled == step:
                yield slot
                filled = 0
            taken = min(step - filled, slot_end - slot)
            slot, filled = slot + taken, filled + taken


# --- rows -------------------------------------------------------------------------------------------------------------


class IndexedEntries(NamedTuple):
    """Columns of entries in indexes, of one length: ids, locations, and the number of each entry's file."""

    scope_ids: npt.NDArray[np.uint64]
    ledger_ids: npt.NDArray[np.uint64]
    entry_ids: npt.NDArray[np.int64]
    locations: npt.NDArray[np.int64]
    files: npt.NDArray[np.int64]

    @classmethod
    def of_page(cls, ledger: LedgerId, first: int, page: array[int], file: int = 0) -> IndexedEntries:
        """Return the entries of a page of an index file, whose first slot is of entry `first`."""
        locations = np.frombuffer(page, np.int64)
        filled = np.flatnonzero(locations)
        scope_ids, ledger_ids = (np.full(len(filled), number, np.uint64) for number in ledger)
        return cls(scope_ids, ledger_ids, filled + first, locations[filled], np.full(len(filled), file))

    @classmethod
    def joined(cls, parts: Iterable[IndexedEntries]) -> IndexedEntries:
        """Return the entries of all `parts`, of which there must be one."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def select(self, wanted: npt.NDArray[Any]) -> IndexedEntries:
        """Return the entries of a mask, or of indices."""
        return IndexedEntries(*(column[wanted] for column in self))


def entry_rows(
    schema: pa.Schema, parts: Sequence[IndexedEntries], conditions: Conditions, files: Sequence[Mapping[str, Any]]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the entries that meet the `conditions`, if any; `files` are the columns of each file."""
    if not parts:
        return
    entries = parts[0] if len(parts) == 1 else IndexedEntries.joined(parts)
    log_ids = entries.locations >> 32 & 0xFFFFFFFF
    wanted = all_of((conditions.mask("entryId", entries.entry_ids), conditions.mask("logId", log_ids)))
    if wanted is not None:
        entries, log_ids = entries.select(wanted), log_ids[wanted]
    count = len(entries.entry_ids)
    if not count:
        return
    numbers = {
        "entryId": entries.entry_ids,
        "logId": log_ids,
        "offset": (entries.locations & 0xFFFFFFFF) - 4,
        "location": entries.locations,
    }
    columns = LedgerColumns(entries.scope_ids, entries.ledger_ids).columns(schema)
    columns |= {name: pa.array(np.ascontiguousarray(column)) for name, column in numbers.items()}
    if "logIdHex" in schema.names:
        logs = columns["logId"].dictionary_encode()
        columns["logIdHex"] = pa.array([f"{log_id:x}" for log_id in logs.dictionary.to_pylist()]).take(logs.indices)
    for name in _OF_FILE:
        if name in schema.names:
            values = pa.array([file[name] for file in files], schema.field(name).type)
            columns[name] = values.take(pa.array(entries.files))
    yield from table_of(schema, columns, count).to_batches()


def ledger_row(
    ledger: LedgerId, header: IndexHeader | LedgerData, entry_count: int, last_entry_id: int
) -> dict[str, Any]:
    """Return the columns of one ledger in an index."""
    lac = header.explicit_lac
    return {
        **ledger_values(ledger),
        "fenced": header.fenced,
        "explicitLac": None if lac is None else read_lac_header(lac).last_add_confirmed,
        "entryCount": entry_count,
        "lastEntryId": last_entry_id,
        "masterKey": header.master_key,
    }


def _entries_of(items: Sequence[tuple[bytes, bytes]], part: DatabaseRange) -> IndexedEntries:
    """Return items of a database of locations as columns. Raises Corrupt for a key or value that is not valid."""
    keys, values = zip(*items, strict=True)
    width = 24 if part.scoped else 16
    if set(map(len, keys)) != {width} or set(map(len, values)) != {SLOT_SIZE}:
        _raise_invalid(items, part)
    table = np.frombuffer(b"".join(keys), ">u8").reshape(len(keys), -1).astype(np.uint64)
    entry_ids = np.ascontiguousarray(table[:, -1]).view(np.int64)
    if int(entry_ids.min()) < 0:
        _raise_invalid(items, part)
    locations = np.frombuffer(b"".join(values), ">i8").astype(np.int64)
    ledger_ids = np.ascontiguousarray(table[:, -2])
    scope_ids = np.ascontiguousarray(table[:, 0]) if part.scoped else np.zeros(len(keys), np.uint64)
    return IndexedEntries(scope_ids, ledger_ids, entry_ids, locations, np.zeros(len(keys), np.int64))


def _raise_invalid(items: Iterable[tuple[bytes, bytes]], part: DatabaseRange) -> None:
    """Raise Corrupt for the first key or value that does not belong into a database of locations."""
    name = str(part.path("locations"))
    for key, value in items:
        read_location_key(key, name, scoped=part.scoped)
        read_location(value, name)
    raise Corrupt(f"{name}: a key or a value is of another size")


# --- the source -------------------------------------------------------------------------------------------------------


class IndexSource(TableSource):
    """The data source; see the module."""

    source = "bookkeeper.index"
    known = (*QUERY_OPTIONS, "rows", "maxPartitionBytes")
    texts = ("file", "bookieId")

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._rows = self.checked.choice("rows", IndexRowKind.ENTRIES)
        self._size_bytes = self.checked.size_bytes("maxPartitionBytes", PARTITION_SIZE_BYTES)
        self.columns, self.on_request = _COLUMNS[self._rows]
        self._cuts_files = self._rows is IndexRowKind.ENTRIES
        self.integers = ("entryId", "logId") if self._cuts_files else ()
        self.never_null = (*LEDGER_COLUMNS, "file", "scoped", *self.integers)

    # --- planning -----------------------------------------------------------------------------------------------

    def partitions(self) -> list[InputPartition]:
        """Return databases by their ledgers, large files in parts, and files in groups; each file and database once.

        Raises NotFound for a path that matches nothing and for a directory without files of a bookie.
        """
        planned: set[Path] = set()
        bookie_at = cache(bookie_id_at)
        found: list[InputPartition] = []
        group: list[Slots] = []
        group_size = 0
        for path, ledger, size in self._places():
            if (resolved := path.resolve()) in planned:
                continue
            planned.add(resolved)
            homes = [path.parent] if ledger is None else list(path.parents)[2:5]
            bookie_id = next((owner for home in homes if (owner := bookie_at(home))), None)
            if not (self._conditions.accepts("file", str(path)) and self._conditions.accepts("bookieId", bookie_id)):
                continue
            if ledger is None:
                found += self._ranges(path, bookie_id)
                continue
            for part in self._slots(path, ledger, size, bookie_id) if self._conditions.accepts_ledger(ledger) else ():
                part_size = HEADER_SIZE + (part.end - part.first) * SLOT_SIZE
                if group and (group_size + part_size > self._size_bytes or len(group) >= _FILES_MAX):
                    found.append(IndexFileGroup(group))
                    group, group_size = [], 0
                group.append(part)
                group_size += part_size
        return [*found, IndexFileGroup(group)] if group else found

    def _places(self) -> Iterator[tuple[Path, LedgerId | None, int]]:
        """Yield index files with their ledgers and sizes, and databases of locations, at the paths."""
        for path, exact in chain.from_iterable(map(local_paths, self.checked.paths())):
            if path.is_dir() and path.name in ROCKSDB_NAMES and (path / "CURRENT").is_file():
                yield _locations_beside(path), None, 0
            elif path.is_dir():
                directories = BookieDirectories.at(path).of_a_bookie()
                with BookieIndexes(directories) as indexes:
                    for file in indexes.files():
                        assert isinstance(file.id, LedgerId)
                        yield file.path, file.id, file.size
                for file in directories.rocksdbs():
                    if file.path.name in DATABASE_NAMES:
                        yield _locations_beside(file.path), None, 0
            elif exact or path.name.endswith((".idx", f".idx{RELOCATION_SUFFIX}")):
                with FileReader(path) as reader:
                    size = reader.size()
                ledger = ledger_of_index_path(str(path.absolute()).removesuffix(RELOCATION_SUFFIX))
                if ledger is None:
                    problem = f"{path} does not name its ledger"
                    raise UsageError(problem, hint="the path of an index file contains its ledger's id")
                yield path, ledger, size

    def _slots(self, path: Path, ledger: LedgerId, size: int, bookie_id: str | None) -> Iterator[Slots]:
        """Yield the parts of one file; only a file of more than one part is opened, and no slot is read."""
        count = max(0, size - HEADER_SIZE) // SLOT_SIZE
        starts: list[int] = []
        if self._cuts_files and size - HEADER_SIZE > self._size_bytes:
            # The task that reads the file reports its damage.
            with suppress(BkctlError), LedgerIndexReader.open(path) as reader:
                starts = list(_part_starts(reader.data(HEADER_SIZE), max(1, self._size_bytes // SLOT_SIZE)))
        for first, end in pairwise([0, *starts, count]):
            yield Slots(str(path), ledger, bookie_id, first, end, size)

    def _ranges(self, locations: Path, bookie_id: str | None) -> Iterator[DatabaseRange]:
        """Yield the parts of one database, between first keys of its tables, about `maxPartitionBytes` apart."""
        scoped = locations.name.startswith("scoped-")
        borders: list[bytes] = []
        if not self._conditions.about_ledgers:
            # The task that reads the database reports its damage.
            with suppress(BkctlError), LocationsDatabase.open(locations, scoped=scoped) as database:
                # Rows of ledgers need each ledger as a whole.
                key_size = None if self._cuts_files else 16 if scoped else 8
                count, last = 0, b""
                for key, item_count in database.tables():
                    border = key[:key_size]
                    if count * SLOT_SIZE >= self._size_bytes and border > last:
                        borders.append(border)
                        count, last = 0, border
                    count += item_count
        for first, end in pairwise([None, *borders, None]):
            yield DatabaseRange(str(locations.parent), scoped, bookie_id, first, end)

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition; in mode permissive a row for each damaged file or database.

        Raises Conflict if a file is shorter than planned, NotFound if it was deleted.
        """
        if isinstance(partition, IndexFileGroup):
            slots = partition.slots
            files = [_of_file(each.path, each.ledger.is_scoped, each.bookie_id) for each in slots]
            #: Entries of several files: a batch for each of many small files would cost more than its rows.
            gathered: list[IndexedEntries] = []
            count = 0
            for at, each in enumerate(slots):
                rows = self._read_file(each, files[at])
                for found in self._permitting(files[at], rows):
                    if isinstance(found, pa.RecordBatch):
                        yield found
                        continue
                    gathered.append(found._replace(files=found.files + at))
                    count += len(found.entry_ids)
                    if count >= _ROWS_GATHERED:
                        yield from entry_rows(self._schema, gathered, self._conditions, files)
                        gathered, count = [], 0
            yield from entry_rows(self._schema, gathered, self._conditions, files)
        elif isinstance(partition, DatabaseRange):
            of_file = _of_file(str(partition.path("locations")), partition.scoped, partition.bookie_id)
            yield from self._permitting(of_file, self._read_databases(partition, of_file))

    def _permitting(self, of_file: Mapping[str, Any], rows: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from rows
        except UsageError:
            raise
        except BkctlError as error:
            self._mode.check(error)
            yield damage_row(self._schema, damage_of(error, of_file["file"]), bookieId=of_file["bookieId"])

    def _read_file(self, slots: Slots, of_file: Mapping[str, Any]) -> Iterator[IndexedEntries | pa.RecordBatch]:
        """Yield the file's entries, or the row of its ledger."""
        try:
            reader = LedgerIndexReader.open(slots.path)
        except NotFound as error:
            current = Path(slots.path).parents[3 if slots.ledger.is_scoped else 2]
            raise unseen(slots.path, current) from error
        with reader:
            first, last = self._conditions.entry_range()
            if self._rows is IndexRowKind.LEDGERS:
                count = sum(len(page) - page.count(0) for _, page in reader.pages())
                row = ledger_row(slots.ledger, reader.header, count, reader.last_entry_id)
                yield pa.RecordBatch.from_pylist([{**of_file, **row}], schema=self._schema)
            else:
                for entry_id, page in reader.pages(max(first, slots.first), min(last + 1, slots.end)):
                    yield IndexedEntries.of_page(slots.ledger, entry_id, page)
            if reader.size() < slots.size_bytes:
                raise Conflict(
                    f"{slots.path} was {slots.size_bytes} bytes long when the plan was made, now it has "
                    f"{reader.size()}", hint="run again",
                )  # fmt: skip

    def _read_databases(self, part: DatabaseRange, of_file: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        path = part.path("locations")
        if not path.parent.is_dir():
            raise unseen(path)
        if self._rows is IndexRowKind.LEDGERS:
            rows = part.ledgers(self._conditions)
            while some := [{**of_file, **row} for row in islice(rows, BATCH_ROWS)]:
                yield pa.RecordBatch.from_pylist(some, schema=self._schema)
        else:
            for entries in part.entries(self._conditions):
                yield from entry_rows(self._schema, [entries], self._conditions, [of_file])


def _of_file(path: str, scoped: bool, bookie_id: str | None) -> dict[str, Any]:
    return dict(zip(_OF_FILE, (path, scoped, bookie_id), strict=True))


def _locations_beside(database: Path) -> Path:
    return database.with_name("scoped-locations" if database.name.startswith("scoped-") else "locations")
