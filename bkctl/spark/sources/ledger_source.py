"""The data source `bookkeeper.ledger`: a table (`ledgers`), a stream (`ledger_stream`), and sinks of both.

spark.read.format("bookkeeper.ledger").options(metadataUri="zk://host:2181/ledgers", ledgerScopeId="7").load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bkctl.spark.sources.ledger_sink import LedgerWriter
from bkctl.spark.sources.ledger_stream import LedgerStreamReader
from bkctl.spark.sources.ledger_stream_sink import LedgerStreamWriter
from bkctl.spark.sources.ledgers import LedgerTable

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class LedgerSource(LedgerTable):
    """The data source; LedgerStreamReader, LedgerWriter and LedgerStreamWriter have the options of stream and sinks.

    Options of the table: the connection's (see ClusterOptions); `ledger` (one or more), `ledgersFile` (on the driver,
    one a line) and `ledgerScopeId` (default: every ledger of every scope); `customMetadata` (KEY=VALUE: only ledgers
    that have it); `columns`, `mode`; `entriesPerPartition` and `maxPartitionBytes`; `failOnDataLoss` (true: a ledger
    that is deleted before it was read to its end fails the query; false: it is skipped from there on).
    """

    def streamReader(self, schema: StructType) -> LedgerStreamReader:
        return LedgerStreamReader(self.reader(schema))

    def writer(self, schema: StructType, overwrite: bool) -> LedgerWriter:
        """Return the sink of one write; `overwrite` may replace the file that `names` names, never a ledger."""
        return LedgerWriter(self, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> LedgerStreamWriter:
        """Return the sink of a stream, for the output modes append and update."""
        return LedgerStreamWriter(self, schema, overwrite)
