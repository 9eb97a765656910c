"""`bookkeeper.index`: what bookies' indexes say, whatever the storage class, as `bkctl bookie index show` prints it.

A row is an entry and where it is; with the option `rows` = `ledgers` it is a ledger, what the index says of it, and how
many entries it has there. Options: `path` (index files, databases of DbLedgerStorage, directories of bookies,
patterns), `rows`, `mode`, `columns`, `ledger`, `ledgerScopeId`, `maxPartitionBytes`.

A partition is some index files, a range of the slots of a large one, or a range of the ledgers of a database, and
together they are all there is. A file must still be as long as it was when the plan was made. A database is read as
it is when its task starts: a running bookie changes it in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry import read_lac_header
from bkctl.formats.index import HEADER_SIZE, SLOT_SIZE, ledger_key, location_key, read_location, read_location_key
from bkctl.formats.names import ROCKSDB_NAMES
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import DAMAGE, LedgerColumns, check_schema, constant, damage_row, ddl, where_and_why
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions
from bkctl.spark.sources.options import Mode, SourceOptions
from bkctl.spark.sources.places import bookie_id_at, local_paths
from bkctl.spark.sources.record_rows import BATCH_ROWS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

OPTIONS: Final = ("rows", "mode", "columns", "ledger", "ledgerScopeId", "maxPartitionBytes")
#: Of index files 2 million slots.
PARTITION_SIZE_BYTES: Final = 16 << 20
_SOURCE: Final = "bookkeeper.index"
_PLACE: Final = ("file", "scoped", "bookieId")
_FILES_MAX: Final = 1000


class Rows(StrEnum):
    """What a row is; the values are the words of the option `rows`."""

    ENTRIES = "entries"
    LEDGERS = "ledgers"


_COLUMNS: Final = {
    Rows.ENTRIES: (*LEDGER_COLUMNS, "entryId", "logId", "logIdHex", "offset", "location", *_PLACE),
    Rows.LEDGERS: (*LEDGER_COLUMNS, "fenced", "explicitLac", "entryCount", "lastEntryId", *_PLACE),
}
_ON_REQUEST: Final[dict[Rows, tuple[str, ...]]] = {Rows.ENTRIES: (), Rows.LEDGERS: ("masterKey",)}


class Slots(NamedTuple):
    """The slots of an index file from `first` on and before `end`; the file had `size_bytes`."""

    path: str
    ledger: LedgerId
    bookie_id: str | None
    first: int
    end: int
    size_bytes: int


@dataclass
class IndexFiles(InputPartition):
    """Some index files, or a part of one."""

    slots: list[Slots]


@dataclass
class LedgerRange(InputPartition):
    """The ledgers of a pair of databases from `first` (None: the first) on and before `end` (None: to the last)."""

    directory: str
    scoped: bool
    bookie_id: str | None
    first: LedgerId | None
    end: LedgerId | None


@dataclass
class Damage(InputPartition):
    """What could not even be planned."""

    path: str
    reason: str


class IndexSource(DataSource):
    """What bookies' indexes say. See the module."""

    @classmethod
    def name(cls) -> str:
        """The name for `spark.read.format`."""
        return _SOURCE

    def schema(self) -> str:
        """The columns that are asked for. Raises UsageError for options that make no sense."""
        options = self._parsed()
        rows = options.choice("rows", Rows.ENTRIES)
        columns = options.columns(_COLUMNS[rows], _ON_REQUEST[rows])
        return ddl([*columns, DAMAGE] if options.mode() is Mode.PERMISSIVE else columns)

    def reader(self, schema: StructType) -> IndexReader:
        """The reader of the columns of `schema`."""
        return IndexReader(self._parsed(), schema)

    def _parsed(self) -> SourceOptions:
        return SourceOptions(_SOURCE, self.options, OPTIONS)


class IndexReader(DataSourceReader):
    """Plans and reads indexes."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._paths = options.paths()
        self._mode = options.mode()
        self._rows = options.choice("rows", Rows.ENTRIES)
        self._size_bytes = options.size_bytes("maxPartitionBytes", PARTITION_SIZE_BYTES)
        self._struct = schema
        self._conditions = Conditions.of(options)
        check_schema(_SOURCE, schema, (*_COLUMNS[self._rows], *_ON_REQUEST[self._rows], DAMAGE))

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what says which ledgers, entries, logs or files are wanted; return what is left to Spark."""
        texts = (*LEDGER_COLUMNS, "file", "bookieId")
        numbers = ("entryId", "logId") if self._rows is Rows.ENTRIES else ()
        never_null = (*LEDGER_COLUMNS, "file", "scoped", *numbers)
        return self._conditions.push(filters, texts, numbers, never_null, permissive=self._mode is Mode.PERMISSIVE)

    def partitions(self) -> list[InputPartition]:
        """Files in groups, large ones in parts, databases by their ledgers.

        Raises NotFound for a path that fits nothing, and for a directory in which nothing is a bookie's; in mode
        failfast what is wrong with a database.
        """
        found: list[InputPartition] = []
        group: list[Slots] = []
        group_size = 0
        for part in self._parts():
            if not isinstance(part, Slots):
                found.append(part)
                continue
            size = HEADER_SIZE + (part.end - part.first) * SLOT_SIZE
            if group and (group_size + size > self._size_bytes or len(group) >= _FILES_MAX):
                found.append(IndexFiles(group))
                group, group_size = [], 0
            group.append(part)
            group_size += size
        return [*found, IndexFiles(group)] if group else found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; in mode permissive a row for each file or database that is damaged.

        Raises Conflict where a file is shorter than it was, NotFound where it is gone.
        """
        if isinstance(partition, IndexFiles):
            for slots in partition.slots:
                yield from self._permitting(slots.path, self._read_file(slots))
        elif isinstance(partition, LedgerRange):
            yield from self._permitting(str(_path_of(partition, "locations")), self._read_databases(partition))
        elif isinstance(partition, Damage):
            yield damage_row(self._schema(), partition.path, None, partition.reason)

    # --- plan ---------------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Slots | LedgerRange | Damage]:
        seen: set[Path] = set()
        for text in self._paths:
            for path, exact in local_paths(text):
                if path.is_dir():
                    yield from self._parts_of_directory(path, seen)
                elif exact or path.name.endswith((".idx", f".idx{RELOCATION_SUFFIX}")):
                    yield from self._parts_of_file(path, seen)

    def _parts_of_directory(self, path: Path, seen: set[Path]) -> Iterator[Slots | LedgerRange | Damage]:
        if path.name in ROCKSDB_NAMES and (path / "CURRENT").is_file():
            yield from self._parts_of_database(path.parent, path.name.startswith("scoped-"), seen)
            return
        directories = BookieDirectories.at(path).of_a_bookie()
        with BookieIndexes(directories) as indexes:
            for file in indexes.files():
                yield from self._parts_of_file(file.path, seen)
        for file in directories.rocksdbs():
            if file.path.name in ("ledgers", "scoped-ledgers"):
                yield from self._parts_of_database(file.path.parent, file.scoped, seen)

    def _parts_of_file(self, path: Path, seen: set[Path]) -> Iterator[Slots | Damage]:
        if path.resolve() in seen:
            return
        seen.add(path.resolve())
        try:
            with LedgerIndexReader.open(path) as reader:
                ledger, count, size = reader.ledger, reader.slot_count, reader.size()
        except (NotFound, UsageError):
            raise
        except BkctlError as error:
            yield self._damage(path, error)
            return
        if ledger is None:
            raise UsageError(f"{path} is not where an index file stands", hint="its path says whose it is")
        bookie_id = next((found for home in list(path.parents)[2:5] if (found := bookie_id_at(home))), None)
        if not (
            self._conditions.accepts_ledger(ledger)
            and self._conditions.accepts("file", str(path))
            and self._conditions.accepts("bookieId", bookie_id)
        ):
            return
        step = max(1, self._size_bytes // SLOT_SIZE) if self._rows is Rows.ENTRIES else count
        for first in range(0, max(count, 1), max(step, 1)):
            yield Slots(str(path), ledger, bookie_id, first, min(first + step, count), size)

    def _parts_of_database(self, directory: Path, scoped: bool, seen: set[Path]) -> Iterator[LedgerRange | Damage]:
        prefix = "scoped-" if scoped else ""
        ledgers, locations = directory / f"{prefix}ledgers", directory / f"{prefix}locations"
        if locations.resolve() in seen:
            return
        seen.add(locations.resolve())
        bookie_id = bookie_id_at(directory)
        if not (self._conditions.accepts("file", str(locations)) and self._conditions.accepts("bookieId", bookie_id)):
            return
        try:
            with LedgersDatabase.open(ledgers, scoped=scoped) as database:
                ids = [ledger for ledger in database.ledger_ids() if self._conditions.accepts_ledger(ledger)]
            size = sum(each.stat().st_size for each in locations.iterdir() if each.suffix == ".sst")
        except OSError as error:
            yield self._damage(locations, Corrupt(f"{locations} cannot be read: {error.strerror or error}"))
            return
        except BkctlError as error:
            yield self._damage(ledgers, error)
            return
        if self._conditions.about_ledgers and not ids:
            return
        count = max(1, min(len(ids), -(-size // self._size_bytes)))
        borders = [None, *(ids[len(ids) * at // count] for at in range(1, count)), None]
        for first, end in pairwise(borders):
            yield LedgerRange(str(directory), scoped, bookie_id, first, end)

    def _damage(self, path: Path, error: BkctlError) -> Damage:
        if self._mode is Mode.FAILFAST:
            raise error
        return Damage(str(path), str(error))

    # --- read ---------------------------------------------------------------------------------------------------------

    def _permitting(self, path: str, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from rows
        except BkctlError as error:
            if self._mode is Mode.FAILFAST:
                raise
            yield damage_row(self._schema(), path, *where_and_why(error))

    def _read_file(self, slots: Slots) -> Iterator[pa.RecordBatch]:
        import numpy as np

        constants = {"file": slots.path, "scoped": slots.ledger.is_scoped, "bookieId": slots.bookie_id}
        first, last = self._conditions.entry_range()
        try:
            reader = LedgerIndexReader.open(slots.path)
        except NotFound as error:
            hint = "a bookie deleted the ledger, or took it elsewhere: run again"
            raise NotFound(f"{slots.path} went away after the plan was made", hint=hint) from error
        with reader:
            if self._rows is Rows.LEDGERS:
                count = sum(len(page) - page.count(0) for _, page in reader.pages())
                header, last_entry_id = reader.header, reader.last_entry_id
                row = (slots.ledger, header.fenced, header.explicit_lac, count, last_entry_id, header.master_key)
                yield self._ledger_rows([row], constants)
            else:
                for entry_id, page in reader.pages(max(first, slots.first), min(last + 1, slots.end)):
                    locations = np.frombuffer(page, np.int64)
                    here = np.flatnonzero(locations)
                    ledger_ids = np.full(len(here), slots.ledger.ledger_id, np.uint64)
                    scope_ids = np.full(len(here), slots.ledger.scope_id, np.uint64)
                    yield from self._entry_rows(scope_ids, ledger_ids, here + entry_id, locations[here], constants)
            if reader.size() < slots.size_bytes:
                raise Conflict(
                    f"{slots.path} was {slots.size_bytes} bytes long when the plan was made, now it has "
                    f"{reader.size()}", hint="run again",
                )  # fmt: skip

    def _read_databases(self, part: LedgerRange) -> Iterator[pa.RecordBatch]:
        path = _path_of(part, "locations")
        constants = {"file": str(path), "scoped": part.scoped, "bookieId": part.bookie_id}
        read = self._location_rows if self._rows is Rows.ENTRIES else self._rows_of_ledgers
        with (
            LedgersDatabase.open(_path_of(part, "ledgers"), scoped=part.scoped) as ledgers,
            LocationsDatabase.open(path, scoped=part.scoped) as locations,
        ):
            known = [each for each in ledgers.ledger_ids(part.first, part.end) if self._conditions.accepts_ledger(each)]
            yield from read(part, known, ledgers, locations, constants)

    def _location_rows(
        self, part: LedgerRange, known: list[LedgerId], ledgers: LedgersDatabase, locations: LocationsDatabase,
        constants: dict[str, Any],
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """The entries of the ledgers that the bookie has; what is left of others is for garbage collection."""
        if self._conditions.about_ledgers:
            first, last = self._conditions.entry_range()
            if first > last:
                return
            for ledger in known:
                begin, end = location_key(ledger, first), location_key(ledger, last) + b"\0"
                for items in locations.batches(begin, end, count=BATCH_ROWS):
                    yield from self._item_rows(items, part, None, constants)
            return
        begin = b"" if part.first is None else ledger_key(part.first)
        border = None if part.end is None else ledger_key(part.end)
        ids_by_scope = _ids_by_scope(known)
        for items in locations.batches(begin, border, count=BATCH_ROWS):
            yield from self._item_rows(items, part, ids_by_scope, constants)

    def _item_rows(
        self, items: list[tuple[bytes, bytes]], part: LedgerRange, known: dict[int, Any] | None,
        constants: dict[str, Any],
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """The rows of items of a database of locations; of those ledgers only that are `known`, by scope."""
        import numpy as np

        keys, values = zip(*items, strict=True)
        width = 24 if part.scoped else 16
        if set(map(len, keys)) != {width} or set(map(len, values)) != {SLOT_SIZE}:
            _raise_wrong(items, part)
        table = np.frombuffer(b"".join(keys), ">u8").reshape(len(keys), -1).astype(np.uint64)
        entry_ids = np.ascontiguousarray(table[:, -1]).view(np.int64)
        if int(entry_ids.min()) < 0:
            _raise_wrong(items, part)
        locations = np.frombuffer(b"".join(values), ">i8").astype(np.int64)
        ledger_ids = np.ascontiguousarray(table[:, -2])
        scope_ids = np.ascontiguousarray(table[:, 0]) if part.scoped else np.zeros(len(keys), np.uint64)
        if known is not None:
            mask = _among(known, scope_ids, ledger_ids)
            if not mask.all():
                scope_ids, ledger_ids = scope_ids[mask], ledger_ids[mask]
                entry_ids, locations = entry_ids[mask], locations[mask]
        yield from self._entry_rows(scope_ids, ledger_ids, entry_ids, locations, constants)

    def _rows_of_ledgers(
        self, part: LedgerRange, known: list[LedgerId], ledgers: LedgersDatabase, locations: LocationsDatabase,
        constants: dict[str, Any],
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        rows: list[_LedgerRow] = []
        for ledger in known:
            data = ledgers.get(ledger)
            if data is None:
                continue
            count = sum(len(items) for items in locations.batches_of(ledger))
            last = locations.last_entry_id(ledger)
            rows.append((ledger, data.fenced, data.explicit_lac, count, last, data.master_key))
            if len(rows) >= BATCH_ROWS:
                yield self._ledger_rows(rows, constants)
                rows = []
        if rows:
            yield self._ledger_rows(rows, constants)

    def _schema(self) -> pa.Schema:
        from pyspark.sql.pandas.types import to_arrow_schema

        return to_arrow_schema(self._struct)

    def _entry_rows(
        self, scope_ids: Any, ledger_ids: Any, entry_ids: Any, locations: Any, constants: dict[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        import numpy as np
        import pyarrow as pa

        log_ids = locations >> 32 & 0xFFFFFFFF
        masks = [self._conditions.number_mask("entryId", entry_ids), self._conditions.number_mask("logId", log_ids)]
        for mask in masks:
            if mask is not None:
                wanted = np.logical_and.reduce([each for each in masks if each is not None])
                scope_ids, ledger_ids, entry_ids = scope_ids[wanted], ledger_ids[wanted], entry_ids[wanted]
                locations, log_ids = locations[wanted], log_ids[wanted]
                break
        count = len(entry_ids)
        if not count:
            return
        ids = LedgerColumns(scope_ids, ledger_ids)
        numbers = {
            "entryId": entry_ids,
            "logId": log_ids,
            "offset": (locations & 0xFFFFFFFF) - 4,
            "location": locations,
        }
        schema = self._schema()
        arrays = []
        for field in schema:
            if field.name in LEDGER_COLUMNS:
                arrays.append(ids.column(field.name))
            elif field.name in numbers:
                arrays.append(pa.array(np.ascontiguousarray(numbers[field.name])))
            elif field.name == "logIdHex":
                logs = pa.array(log_ids).dictionary_encode()
                arrays.append(pa.array([f"{each:x}" for each in logs.dictionary.to_pylist()]).take(logs.indices))
            else:
                arrays.append(constant(constants.get(field.name), count, field.type))
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _ledger_rows(self, rows: Sequence[_LedgerRow], constants: dict[str, Any]) -> pa.RecordBatch:
        import pyarrow as pa

        values: dict[str, list[Any]] = {
            "ledgerScopeId": [str(row[0].scope_id) for row in rows],
            "ledgerId": [str(row[0].ledger_id) for row in rows],
            "ledgerQualifiedName": [row[0].qualified_name for row in rows],
            "fenced": [row[1] for row in rows],
            "explicitLac": [None if row[2] is None else read_lac_header(row[2]).last_add_confirmed for row in rows],
            "entryCount": [row[3] for row in rows],
            "lastEntryId": [row[4] for row in rows],
            "masterKey": [row[5] for row in rows],
        }
        schema = self._schema()
        arrays = [
            pa.array(values[field.name], field.type)
            if field.name in values
            else constant(constants.get(field.name), len(rows), field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


#: Ledger, fenced, explicit LAC packet, entries, last entry id, master key.
_LedgerRow = tuple[LedgerId, bool, bytes | None, int, int, bytes]


def _path_of(part: LedgerRange, name: str) -> Path:
    return Path(part.directory) / (f"scoped-{name}" if part.scoped else name)


def _ids_by_scope(ledgers: Iterable[LedgerId]) -> dict[int, Any]:
    """Scope id → ledger ids."""
    import numpy as np

    found: dict[int, list[int]] = {}
    for ledger in ledgers:
        found.setdefault(ledger.scope_id, []).append(ledger.ledger_id)
    return {scope_id: np.array(ids, np.uint64) for scope_id, ids in found.items()}


def _among(known: dict[int, Any], scope_ids: Any, ledger_ids: Any) -> Any:
    """Which of these rows are of ledgers that are known."""
    import numpy as np

    mask = np.zeros(len(ledger_ids), np.bool_)
    for scope_id in np.unique(scope_ids).tolist():
        if scope_id in known:
            mask |= (scope_ids == np.uint64(scope_id)) & np.isin(ledger_ids, known[scope_id])
    return mask


def _raise_wrong(items: list[tuple[bytes, bytes]], part: LedgerRange) -> None:
    """Raise Corrupt for the first key or value that is none of a database of locations."""
    name = str(_path_of(part, "locations"))
    for key, value in items:
        read_location_key(key, name, scoped=part.scoped)
        read_location(value, name)
    raise Corrupt(f"{name}: a key or a value is of another size")
