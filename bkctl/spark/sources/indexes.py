"""`bookkeeper.index`: the entries in bookies' indexes of any storage class, as `bkctl bookie index show` prints them.

A row is an entry and its location. With the option `rows` = `ledgers` a row is a ledger, its index header, and the
number of its entries. Options: `path` (index files, databases of DbLedgerStorage, directories of bookies, patterns),
`rows`, `mode`, `columns`, `ledger`, `ledgerScopeId`, `maxPartitionBytes`.

A partition is a group of index files, a range of the slots of a large file, or a range of the ledgers of a database;
together they are the whole index. A file must be at least as long as it was when the plan was made. A database is read
as it is when its task starts, since a running bookie changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.files.index import LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.spark.sources.columns import damage_row, where_and_why
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.index_plan import DamagedIndex, DatabaseRange, IndexFiles, IndexPlanner, Slots, group_files
from bkctl.spark.sources.index_rows import DatabaseReader, IndexedEntries, entry_rows, ledger_row, ledger_rows
from bkctl.spark.sources.options import SourceOptions
from bkctl.spark.sources.places import unseen
from bkctl.spark.sources.readers import QUERY_OPTIONS, InputPartition, QueryReader, TableSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

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


class IndexReader(QueryReader):
    """Plans and reads indexes."""

    source = "bookkeeper.index"
    options = (*QUERY_OPTIONS, "rows", "maxPartitionBytes")
    texts = ("file", "bookieId")

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._paths = options.paths()
        self._rows = options.choice("rows", IndexRowKind.ENTRIES)
        self._size_bytes = options.size_bytes("maxPartitionBytes", PARTITION_SIZE_BYTES)
        self.integers = ("entryId", "logId") if self._rows is IndexRowKind.ENTRIES else ()
        self.never_null = (*LEDGER_COLUMNS, "file", "scoped", *self.integers)

    @classmethod
    def columns(cls, options: SourceOptions) -> tuple[Sequence[str], Sequence[str]]:
        return _COLUMNS[options.choice("rows", IndexRowKind.ENTRIES)]

    def partitions(self) -> list[InputPartition]:
        """Return files in groups, large files in parts, and databases by their ledgers.

        Raises NotFound for a path that matches nothing and for a directory without files of a bookie; in mode failfast
        the error of a damaged database.
        """
        cuts_files = self._rows is IndexRowKind.ENTRIES
        planner = IndexPlanner(self._conditions, self._mode, self._size_bytes, cuts_files=cuts_files)
        return group_files(planner.parts(self._paths), self._size_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition; in mode permissive a row for each damaged file or database.

        Raises Conflict if a file is shorter than planned, NotFound if it was deleted.
        """
        if isinstance(partition, IndexFiles):
            gathered = _GatheredFiles()
            for slots in partition.slots:
                yield from self._permitting(slots.path, slots.bookie_id, self._read_file(slots, gathered))
            yield from self._rows_of(gathered)
        elif isinstance(partition, DatabaseRange):
            path = str(partition.path("locations"))
            yield from self._permitting(path, partition.bookie_id, self._read_databases(partition))
        elif isinstance(partition, DamagedIndex):
            bookie_id = partition.bookie_id
            yield damage_row(self._schema, partition.path, None, partition.reason, bookieId=bookie_id)

    def _permitting(
        self, path: str, bookie_id: str | None, rows: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        try:
            yield from rows
        except UsageError:
            raise
        except BkctlError as error:
            self._mode.check(error)
            yield damage_row(self._schema, path, *where_and_why(error), bookieId=bookie_id)

    def _read_file(self, slots: Slots, gathered: _GatheredFiles) -> Iterator[pa.RecordBatch]:
        """Add the file's entries to `gathered`, and yield the rows of all of them when they are many."""
        constants = {"file": slots.path, "scoped": slots.ledger.is_scoped, "bookieId": slots.bookie_id}
        try:
            reader = LedgerIndexReader.open(slots.path)
        except NotFound as error:
            current = Path(slots.path).parents[3 if slots.ledger.is_scoped else 2]
            raise unseen(slots.path, current) from error
        with reader:
            if self._rows is IndexRowKind.LEDGERS:
                count = sum(len(page) - page.count(0) for _, page in reader.pages())
                row = ledger_row(slots.ledger, reader.header, count, reader.last_entry_id)
                yield ledger_rows(self._schema, [row], constants)
            else:
                yield from self._slot_rows(slots, reader, gathered)
            if reader.size() < slots.size_bytes:
                raise Conflict(
                    f"{slots.path} was {slots.size_bytes} bytes long when the plan was made, now it has "
                    f"{reader.size()}", hint="run again",
                )  # fmt: skip

    def _slot_rows(
        self, slots: Slots, reader: LedgerIndexReader, gathered: _GatheredFiles
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        first, last = self._conditions.entry_range()
        for entry_id, page in reader.pages(max(first, slots.first), min(last + 1, slots.end)):
            locations = np.frombuffer(page, np.int64)
            filled = np.flatnonzero(locations)
            gathered.add(slots, filled + entry_id, locations[filled])
            if gathered.count >= _ROWS_GATHERED:
                yield from self._rows_of(gathered)

    def _rows_of(self, gathered: _GatheredFiles) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the gathered entries, and forget them."""
        if gathered.count:
            entries, files, constants = gathered.take()
            yield from entry_rows(self._schema, entries, self._conditions, constants, files)

    def _read_databases(self, part: DatabaseRange) -> Iterator[pa.RecordBatch]:
        path = part.path("locations")
        if not path.parent.is_dir():
            raise unseen(path)
        constants = {"file": str(path), "scoped": part.scoped, "bookieId": part.bookie_id}
        schema = self._schema
        with (
            LedgersDatabase.open(part.path("ledgers"), scoped=part.scoped) as ledgers,
            LocationsDatabase.open(path, scoped=part.scoped) as locations,
        ):
            reader = DatabaseReader(part, ledgers, locations, self._conditions)
            if self._rows is IndexRowKind.LEDGERS:
                for rows in reader.ledgers():
                    yield ledger_rows(schema, rows, constants)
            else:
                for entries in reader.entries():
                    yield from entry_rows(schema, entries, self._conditions, constants)


class IndexSource(TableSource):
    """The data source; see the module."""

    reads = IndexReader


class _GatheredFiles:
    """Entries of several index files: a batch for each of many small files would cost more than its rows."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[tuple[Slots, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    def add(self, slots: Slots, entry_ids: npt.NDArray[np.int64], locations: npt.NDArray[np.int64]) -> None:
        if len(entry_ids):
            self._parts.append((slots, entry_ids, locations))
            self.count += len(entry_ids)

    def take(self) -> tuple[IndexedEntries, npt.NDArray[np.int64], dict[str, list[Any]]]:
        """Return the entries, the number of the part of each, and columns of the parts; there must be entries."""
        parts, self._parts, self.count = self._parts, [], 0
        files = np.repeat(np.arange(len(parts)), [len(entry_ids) for _, entry_ids, _ in parts])
        ids = np.array([slots.ledger for slots, _, _ in parts], np.uint64)[files]
        entry_ids, locations = (np.concatenate([part[at] for part in parts]) for at in (1, 2))
        return (
            IndexedEntries(ids[:, 0], ids[:, 1], entry_ids, locations),
            files,
            {
                "file": [slots.path for slots, _, _ in parts],
                "scoped": [slots.ledger.is_scoped for slots, _, _ in parts],
                "bookieId": [slots.bookie_id for slots, _, _ in parts],
            },
        )
