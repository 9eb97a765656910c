"""The data source `bookkeeper.ledger`: a table (`ledgers`), a stream (`ledger_stream`) and a sink (`ledger_sink`).

spark.read.format("bookkeeper.ledger").options(metadataUri="zk://host:2181/ledgers", ledgerScopeId="7").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSource

from bkctl.errors import UsageError
from bkctl.spark.sources.columns import DAMAGE, ddl
from bkctl.spark.sources.connection import CONNECTION_OPTIONS
from bkctl.spark.sources.ledger_sink import LedgerWriter
from bkctl.spark.sources.ledger_stream import LedgerStreamReader
from bkctl.spark.sources.ledgers import COLUMNS, NAME, LedgerQuerySettings, LedgerReader
from bkctl.spark.sources.options import Mode, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_OPTIONS: Final = (
    *CONNECTION_OPTIONS, "mode", "columns", "ledger", "ledgersFile", "ledgerScopeId", "customMetadata",
    "entriesPerPartition", "maxPartitionBytes",
    # the stream's
    "startingOffsets", "maxEntriesPerTrigger", "maxBytesPerTrigger", "failOnDataLoss",
    # the sink's
    "names", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "digestType", "ledgerPasswordFile",
    "ledgerPasswordEnv",
)  # fmt: skip


class LedgerSource(DataSource):
    """The data source; see the module, `ledger_stream` and `ledger_sink` for their options.

    Of the table: the connection's (see ClusterOptions); `ledger` (one or more), `ledgersFile` (on the driver, one a
    line) and `ledgerScopeId`, default: every ledger of every scope; `customMetadata` (KEY=VALUE, ledgers that have
    it); `columns`, `mode`; `entriesPerPartition` and `maxPartitionBytes`.
    """

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._checked = SourceOptions(NAME, options, _OPTIONS)
        if self._checked.text("path") is not None or self._checked.text("paths") is not None:
            raise UsageError(f"{NAME} takes no path", hint="name the cluster by metadataUri")
        self._settings = LedgerQuerySettings(self._checked)

    @classmethod
    def name(cls) -> str:
        """The name for `format()`."""
        return NAME

    def schema(self) -> str:
        """The columns asked for, and `damage` in `mode` permissive."""
        permissive = self._settings.mode is Mode.PERMISSIVE
        return ddl([*self._checked.columns(COLUMNS), *([DAMAGE] if permissive else [])])

    def reader(self, schema: StructType) -> LedgerReader:
        """The reader of one query."""
        return LedgerReader(self._settings, schema)

    def streamReader(self, schema: StructType) -> LedgerStreamReader:
        """The reader of a stream."""
        return LedgerStreamReader(self._checked, self._settings, schema)

    def writer(self, schema: StructType, overwrite: bool) -> LedgerWriter:
        """The sink of one write; `overwrite` lets it replace the file that `names` names, never a ledger."""
        return LedgerWriter(self._checked, self._settings, schema, overwrite)
