"""The job `inventory`: bytes and entries of all bookies' entry logs per scope, ledger, application, bookie or log.

Every copy of an entry counts, with its size field, as a bookie counts (and `bkctl entrylog show`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import UsageError
from bkctl.formats.entry_log import log_id_of
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, FrameColumn, Functions, JobSession, functions_of
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, frame_of, ledger_options, log_records, with_ledger_ids
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.sources.columns import DAMAGE

if TYPE_CHECKING:
    from bkctl.files.directories import BookieFile
    from bkctl.spark.jobs.bookies import Bookies


_APPLICATION_COLUMNS: Final = ("application", "component", "managedLedger")


class Grouping(StrEnum):
    """Groupings of an inventory; the values are the words of the command's option `--by`."""

    BOOKIE = "bookie"
    ENTRY_LOG = "entrylog"
    SCOPE = "scope"
    LEDGER = "ledger"
    APPLICATION = "application"


def log_files(spark: JobSession, bookies: Bookies) -> Frame:
    """Return every entry log of the bookies: file, bookieId, logId, logIdHex, scoped, fileSize (bytes)."""
    if isinstance(bookies, Facts):
        return bookies.log_files(spark)
    rows = [log_row(bookie.bookie_id, log) for bookie in bookies for log in bookie.directories.entry_logs()]
    schema = "file string, bookieId string, logId bigint, logIdHex string, scoped boolean, fileSize bigint"
    return frame_of(spark, rows, schema)


def log_row(bookie_id: str, log: BookieFile) -> dict[str, Any]:
    """Return the row of `log_files` for one log."""
    log_id = log_id_of(log.path.name)
    return {
        "file": str(log.path), "bookieId": bookie_id, "logId": log_id,
        "logIdHex": None if log_id is None else f"{log_id:x}", "scoped": log.scoped, "fileSize": log.size,
    }  # fmt: skip


def shares(
    spark: JobSession, bookies: Bookies, *, ledger: LedgerId | None = None, scope_id: int | None = None
) -> Frame:
    """Return the share of each ledger in each log: bookieId, file, ledgerQualifiedName, damage, entryCount, size.

    A row of damage has no ledger and no entries. Tasks count while they read, so there are few rows for each log; every
    inventory is made of them, so `persist` them. Raises NotFound if the bookies have no entry log.
    """
    F = functions_of(spark)
    counts = ("entryCount", "size")
    options = ledger_options(ledger, scope_id)
    found = log_records(spark, bookies, [QUALIFIED_NAME, *counts], rows="ledgers", **options)
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in counts]
    return found.groupBy("bookieId", "file", QUALIFIED_NAME, DAMAGE).agg(*sums)


def damages(shares: Frame) -> Frame:
    """Return the damages among `shares`: bookieId, file, offset, reason."""
    F = functions_of(shares)
    found = shares.filter(F.col(DAMAGE).isNotNull())
    return found.select("bookieId", f"{DAMAGE}.file", f"{DAMAGE}.offset", f"{DAMAGE}.reason").distinct()


def totals(
    spark: JobSession, bookies: Bookies, shares: Frame, grouping: Grouping, connection: Mapping[str, str] | None = None
) -> Frame:
    """Return the sums of `shares`, one row for each bookie, log, scope, ledger or application, most bytes first.

    Applications come from ledgers' custom metadata in the store of `connection` (Pulsar's `application`, `component`
    and `managedLedger`). Raises UsageError if they need a `connection`, Conflict if it is another cluster's.
    """
    F = functions_of(spark)
    found = shares.filter(F.col(DAMAGE).isNull())
    ledgers = F.count_distinct(QUALIFIED_NAME).alias("ledgerCount")
    logs = F.count_distinct("bookieId", "file").alias("logCount")
    holders = F.count_distinct("bookieId").alias("bookieCount")
    match grouping:
        case Grouping.BOOKIE | Grouping.ENTRY_LOG:
            key = ["bookieId"] if grouping is Grouping.BOOKIE else ["bookieId", "file"]
            counted = found.groupBy(*key).agg(ledgers, *_sums(F))
            files = log_files(spark, bookies)
            if grouping is Grouping.BOOKIE:
                file_sums = F.count("*").alias("logCount"), F.sum("fileSize").alias("fileSize")
                files = files.groupBy("bookieId").agg(*file_sums)
            rows = files.join(counted, key, "left").fillna(0, ["ledgerCount", "entryCount", "size"])
            ties = [F.col(name) for name in ("bookieId", "file") if name in rows.columns]
        case Grouping.LEDGER:
            rows = with_ledger_ids(found.groupBy(QUALIFIED_NAME).agg(holders, logs, *_sums(F)))
            ties = [F.col(QUALIFIED_NAME)]
        case Grouping.SCOPE:
            scope = F.substring(QUALIFIED_NAME, 1, 16).alias("scope")
            counted = found.groupBy(scope).agg(ledgers, holders, logs, *_sums(F))
            rows = counted.select(F.conv("scope", 16, 10).alias("ledgerScopeId"), *counted.columns[1:])
            # Scope ids are decimal texts of any width.
            ties = [F.lpad("ledgerScopeId", 20, "0")]
        case Grouping.APPLICATION:
            if connection is None:
                problem = "Applications are known from a metadata store, and none is named"
                raise UsageError(problem, hint="add --metadata-uri")
            check_clusters(bookies, connection)
            counted = found.groupBy(QUALIFIED_NAME).agg(*_sums(F))
            of_ledgers = counted.join(applications(spark, connection), QUALIFIED_NAME, "left")
            rows = of_ledgers.groupBy(*_APPLICATION_COLUMNS).agg(F.count("*").alias("ledgerCount"), *_sums(F))
            ties = [F.col(name) for name in _APPLICATION_COLUMNS]
    return rows.orderBy(F.desc("size"), *ties)


def _sums(F: Functions) -> tuple[FrameColumn, FrameColumn]:
    return F.sum("entryCount").alias("entryCount"), F.sum("size").alias("size")


def applications(spark: JobSession, connection: Mapping[str, str]) -> Frame:
    """Return the application of each ledger: ledgerQualifiedName, application, component, managedLedger.

    They come from Pulsar's custom metadata; other writers may keep an `application` there.
    """
    F = functions_of(spark)
    options = {**connection, "columns": f"{QUALIFIED_NAME},pulsar,customMetadata"}
    metadata = spark.read.format("bookkeeper.metadata").options(**options).load()
    own = F.try_validate_utf8(F.col("customMetadata")["application"])
    return metadata.select(
        QUALIFIED_NAME,
        F.coalesce(F.col("pulsar")["application"], own).alias("application"),
        F.col("pulsar")["component"].alias("component"),
        F.col("pulsar")["managedLedger"].alias("managedLedger"),
    )
