"""`register(spark)`: bkctl's data sources, made known to a Spark session by one call.

    spark.read.format("bookkeeper.entrylog").option("columns", "ledgerId,entryId,recordSize").load("/bookies/*/ledgers")

| source | rows |
| --- | --- |
| `bookkeeper.entrylog` | the records of entry logs, as `bkctl entrylog read` prints them |
| `bookkeeper.journal` | the records of journals, as `bkctl journal read` prints them |
| `bookkeeper.index` | the entries that bookies' indexes know, as `bkctl bookie index show` prints them; their ledgers |
| `bookkeeper.metadata` | the ledgers of a metadata store or of an export of it, as `bkctl ledger show` prints them |
| `bookkeeper.ledger` | the entries of ledgers, read from their bookies; a stream that follows them; a sink |
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Final

from bkctl import errors
from bkctl.errors import BkctlError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Where the sources are: module of this package, and class.
SOURCES: Final = (
    ("entry_logs", "EntryLogSource"),
    ("journals", "JournalSource"),
    ("indexes", "IndexSource"),
    ("metadata", "MetadataSource"),
    ("ledger_source", "LedgerSource"),
)
#: PySpark leaves it off, and then refuses sources that take filters.
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"

_RAISED: Final = re.compile(r"^\s*(?:\S+: )?bkctl\.errors\.(\w+): (.*)$", re.MULTILINE)


def register(spark: SparkSession) -> None:
    """Make all of bkctl's data sources known to this session, and let it push filters down to them."""
    for module, name in SOURCES:
        spark.dataSource.register(getattr(import_module(f"{__name__}.{module}"), name))
    spark.conf.set(PUSHDOWN, "true")


def source_error(error: BaseException) -> BkctlError | None:
    """The error of a source or job of ours that made Spark fail, of its own class and with its own message.

    Spark tells of it by a Python traceback in the message of its own error. None where there is none of ours.
    """
    found = None
    for found in _RAISED.finditer(str(error)):  # noqa: B007 (the last counts: others are its causes)
        pass
    if found is None:
        return None
    kind = getattr(errors, found[1], None)
    if not (isinstance(kind, type) and issubclass(kind, BkctlError)):
        return None
    raised: BkctlError = BkctlError.__new__(kind)
    BkctlError.__init__(raised, found[2].strip())
    return raised
