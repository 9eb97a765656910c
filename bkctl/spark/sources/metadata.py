"""`bookkeeper.metadata`: ledgers with their metadata, one row a ledger, as `bkctl ledger show` prints them.

    spark.read.format("bookkeeper.metadata").option("metadataUri", "zk://host:2181/ledgers").load()
    spark.read.format("bookkeeper.metadata").load("metadata.ndjson")       what `bkctl metadata export` wrote

A live store is cut into adjacent ranges of ledger ids, so a ledger that exists all the time is one row. A ledger
that is created or deleted meanwhile may be missing. No column has a ledger's password.

In mode permissive an unreadable ledger is a row with `damage`. A broken line of an export does not say which ledger it
describes: its row has null ids. The options `ledger` and `ledgerScopeId` keep that row; a filter drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from bkctl.columns import LEDGER_FIELDS, Column, Kind
from bkctl.errors import BkctlError, LedgerNotFound, UsageError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata import ledger_columns
from bkctl.metadata.admin.dump.sources import ExportFile, ExportSection
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledger_columns import LedgerRow, ledger_row
from bkctl.metadata.ledgers import RANGE_SIZE, VersionedMetadata
from bkctl.spark.sources.columns import DAMAGE, damage_of, ledger_values
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.options import CONNECTION_OPTIONS, ClusterOptions
from bkctl.spark.sources.readers import QUERY_OPTIONS, InputPartition, TableSource

NAME: Final = "bookkeeper.metadata"
SECTION_SIZE_BYTES_DEFAULT: Final = 32 << 20
BATCH_ROWS: Final = 2048

#: Columns whose values Spark has in another form than JSON.
_OTHER_FORMS: Final[Mapping[str, Callable[[LedgerRow], Any]]] = {
    "ledgerScopeId": lambda row: row.ledger.scope_id,
    "ledgerId": lambda row: row.ledger.ledger_id,
    "ledgerQualifiedName": lambda row: row.ledger.qualified_name,
    "customMetadata": lambda row: sorted(row.metadata.custom_metadata.items()),
    "ensembles": lambda row: [
        {"firstEntryId": fragment.first_entry_id, "bookies": fragment.bookies} for fragment in row.metadata.ensembles
    ],
    "pulsar": lambda row: None if row.pulsar is None else list(row.pulsar.items()),
}


def _getter(column: Column) -> Callable[[LedgerRow], Any]:
    get = _OTHER_FORMS.get(column.name) or column.getter()

    def microseconds(row: LedgerRow) -> int | None:
        time_ms = get(row)
        return None if time_ms is None or time_ms < 0 else time_ms * 1000

    return microseconds if column.kind is Kind.TIME else get


#: Column → its value for a ledger: the columns of every other form of a ledger.
COLUMNS: Final[Mapping[str, Callable[[LedgerRow], Any]]] = {
    **{name: _OTHER_FORMS[name] for name in LEDGER_FIELDS},
    **{
        column.name: _getter(column)
        for column in ledger_columns.LEDGER_COLUMNS.columns
        if column.kind is not Kind.LEDGER
    },
}


class LedgerIds(NamedTuple):
    """A partition: all existing ledgers from `first` to `last`, both included, as unsigned 128-bit numbers."""

    first: int
    last: int


#: Values of partitions: a range of ledgers, ledgers by their 128-bit numbers, a section of an export, a row of damage.
_Part = LedgerIds | list[int] | ExportSection | dict[str, Any] | None


class MetadataSource(TableSource):
    """The data source; see the module.

    Options: `mode`, `columns`, `ledger`, `ledgerScopeId` (default: every scope); for a live store the connection's (see
    ClusterOptions) and `ledgersPerPartition`; for an export `maxPartitionBytes`.
    """

    source = NAME
    known = (*CONNECTION_OPTIONS, *QUERY_OPTIONS, "ledgersPerPartition", "maxPartitionBytes")
    never_null = LEDGER_COLUMNS

    columns = tuple(COLUMNS)

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        checked = self.checked
        self._export = checked.text("path")
        if (checked.text("metadataUri") is None) == (self._export is None):
            raise UsageError(f"{NAME} needs either the option metadataUri or the path of an export")
        self._cluster = None if self._export is not None else ClusterOptions(checked)
        self._range_size = checked.integer("ledgersPerPartition", RANGE_SIZE, 1)
        self._section_size = checked.size_bytes("maxPartitionBytes", SECTION_SIZE_BYTES_DEFAULT)
        self._named = self._conditions.ledgers is not None

    # --- planning -----------------------------------------------------------------------------------------------

    def partitions(self) -> list[InputPartition]:
        """Return ranges of a live store's ledgers, or sections of an export. Raises the errors of reading them."""
        if self._cluster is None:
            with self._export_file() as file:
                sections, problem = file.sections(self._section_size)
            damages = [] if problem is None else [self._damage(problem)]
            return [*map(InputPartition, [*sections, *damages])]
        size, wanted = self._range_size, self._conditions.wanted_ledgers()
        if wanted is not None:
            numbers = [ledger.value for ledger in wanted]
            cuts = range(0, len(numbers), size)
            return [InputPartition(numbers[at : at + size]) for at in cuts]
        scopes = self._conditions.ids_of("ledgerScopeId")
        with self._cluster.open() as cluster:
            return [
                InputPartition(LedgerIds(each.first.value, each.last.value))
                for scope_id in ([None] if scopes is None else sorted(scopes))
                for each in cluster.ledgers.ranges(scope_id, size=size)
                if each.ledgers
            ]

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition. Raises errors of the store, and in mode failfast of a ledger."""
        rows = self._rows(partition.value)
        while batch := list(islice(rows, BATCH_ROWS)):
            arrays = [pa.array([_value(field.name, row) for row in batch], field.type) for field in self._schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _rows(self, part: _Part) -> Iterator[LedgerRow | dict[str, Any]]:
        """Yield a row for each ledger, and a dictionary for damage."""
        if isinstance(part, dict):
            yield part
        elif isinstance(part, ExportSection):
            yield from self._rows_of_export(part)
        elif part is not None and self._cluster is not None:  # Spark adds a partition of its own to an empty list.
            with self._cluster.open() as cluster:
                for ledger, found in cluster.ledgers.read_many(self._ids(cluster, part)):
                    if not isinstance(found, BkctlError):
                        yield ledger_row(ledger, found)
                    # Others were deleted since they were listed, or only a filter names them.
                    elif not isinstance(found, LedgerNotFound) or (self._named and isinstance(part, list)):
                        yield self._damage(found, ledger)

    def _ids(self, cluster: Cluster, part: LedgerIds | list[int]) -> Iterator[LedgerId]:
        if isinstance(part, list):
            return map(LedgerId.from_value, part)
        first, last = map(LedgerId.from_value, part)
        scope_id = first.scope_id if first.scope_id == last.scope_id else None
        after = LedgerId.from_value(first.value - 1) if first.value else None
        listed = takewhile(lambda ledger: ledger <= last, cluster.ledgers.ledgers(scope_id, after))
        return filter(self._conditions.accepts_ledger, listed)

    def _rows_of_export(self, section: ExportSection) -> Iterator[LedgerRow | dict[str, Any]]:
        with self._export_file() as file:
            for at, record in file.section(section):
                if isinstance(record, BkctlError):
                    yield self._damage(record)
                    continue
                if record.kind != "ledger":
                    continue
                ledger = LedgerId.from_value(int(record.key, 16))
                if not self._conditions.accepts_ledger(ledger):
                    continue
                try:
                    metadata = LedgerMetadata.parse(record.value, f"{self._export}: ledger {ledger} at byte {at}")
                except BkctlError as error:
                    yield self._damage(error, ledger, at)
                else:
                    ctime_ms = record.ctime_ms if metadata.ctime_ms is None else metadata.ctime_ms
                    yield ledger_row(ledger, VersionedMetadata(metadata, 0, ctime_ms))

    def _export_file(self) -> closing[ExportFile]:
        return closing(ExportFile(Path(self._export or "")))

    def _damage(self, error: BkctlError, ledger: LedgerId | None = None, offset: int | None = None) -> dict[str, Any]:
        """Return the row of damage. Raises it in mode failfast."""
        self._mode.check(error)
        ids = {} if ledger is None else ledger_values(ledger)
        return {**ids, DAMAGE: damage_of(error, self._export, offset)}


def _value(column: str, row: LedgerRow | dict[str, Any]) -> Any:
    if isinstance(row, dict):
        return row.get(column)
    return None if column == DAMAGE else COLUMNS[column](row)
