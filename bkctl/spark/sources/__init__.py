"""The data sources of bkctl, and `register(spark)`, which makes them known to a Spark session.

    spark.read.format("bookkeeper.entrylog").option("columns", "ledgerId,entryId,recordSize").load("/bookies/*/ledgers")

| source | rows |
| --- | --- |
| `bookkeeper.entrylog` | the records of entry logs, as `bkctl entrylog read` prints them |
| `bookkeeper.journal` | the records of journals, as `bkctl journal read` prints them |
| `bookkeeper.index` | the entries in bookies' indexes, as `bkctl bookie index show` prints them; their ledgers |
| `bookkeeper.metadata` | the ledgers of a metadata store or of an export of it, as `bkctl ledger show` prints them |
| `bookkeeper.ledger` | the entries of ledgers, read from their bookies; a stream that follows them; a sink |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Name of each source → its module of this package, and its class.
SOURCES: Final = {
    "bookkeeper.entrylog": ("records", "EntryLogSource"),
    "bookkeeper.journal": ("records", "JournalSource"),
    "bookkeeper.index": ("indexes", "IndexSource"),
    "bookkeeper.metadata": ("metadata", "MetadataSource"),
    "bookkeeper.ledger": ("ledger_source", "LedgerSource"),
}
#: Off by default in PySpark, which then refuses sources that take filters.
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"


def source_named(name: str) -> Any:
    """Return the class of a source."""
    module, kind = SOURCES[name]
    return getattr(import_module(f"{__name__}.{module}"), kind)


def register(spark: SparkSession) -> None:
    """Register all data sources of bkctl with `spark`, and let it push filters down to them on request.

    Where bkctl is installed beside PySpark, Spark finds the sources without this (`bkctl.spark.discovery`).
    """
    for name in SOURCES:
        spark.dataSource.register(source_named(name))
    spark.conf.set(PUSHDOWN, "true")
