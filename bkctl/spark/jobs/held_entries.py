"""The entries that bookies' files hold, as blocks: copies in entry logs, places in indexes, records in journals."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from bkctl.errors import NotFound
from bkctl.ids import LedgerId
from bkctl.spark import functions as F
from bkctl.spark.jobs.bookie_records import index_entries, journal_entries, log_records
from bkctl.spark.jobs.entry_blocks import INDEX, JOURNAL, LOG, fold
from bkctl.spark.jobs.frames import QUALIFIED_NAME
from bkctl.spark.jobs.verdicts import Problem
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies


def held_entries(
    spark: SparkSession,
    bookies: Bookies,
    ledger: LedgerId | None,
    scope_id: int | None,
    *,
    indexes: bool = True,
) -> DataFrame:
    """Return the entries in the files of each bookie as `entry_blocks.BLOCKS`, and a row for each damage.

    Raises NotFound if the bookies have no files.
    """
    return _union(
        _logged(spark, bookies, ledger, scope_id, digests=True),
        _indexed(spark, bookies, ledger, scope_id) if indexes else None,
        journaled_entries(spark, bookies, ledger, scope_id, digests=True),
    )


def journaled_entries(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool
) -> DataFrame | None:
    """Return the entries in the journals of each bookie as `entry_blocks.BLOCKS`; None without a journal."""
    wanted = ["lastAddConfirmed", "digest"] if digests else ["lastAddConfirmed"]
    entries = journal_entries(spark, bookies, wanted, ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    given = {name: F.col(name) for name in ("file", "recordSize", "replayed", "digest") if name in entries.columns}
    lac = F.when(F.col("replayed"), F.col("lastAddConfirmed"))
    return fold(entries, JOURNAL, "journalId", **given, lastAddConfirmed=lac)


def held_of_journaled(
    spark: SparkSession, bookies: Bookies, journaled: DataFrame, ledger: LedgerId | None, scope_id: int | None
) -> DataFrame:
    """Return `journaled` entries, and the entries of their ledgers in logs and indexes, without digests; damages too.

    The result is as that of `held_entries`.
    """
    ledgers = journaled.select("bookieId", QUALIFIED_NAME).dropna().distinct()
    return _union(
        journaled,
        _logged(spark, bookies, ledger, scope_id, digests=False, of=ledgers),
        _indexed(spark, bookies, ledger, scope_id, of=ledgers),
    )


def shares_of(held: DataFrame) -> DataFrame:
    """Return the share of each ledger in each log of `held_entries`, as `inventory.shares` does."""
    sums = [F.sum(name).alias(name) for name in ("entryCount", "size")]
    counted = held.filter(F.col("source") == LOG).groupBy("bookieId", "file", QUALIFIED_NAME).agg(*sums)
    counted = counted.withColumn(DAMAGE, F.lit(None).cast(TYPES[DAMAGE]))
    return counted.unionByName(log_damages(held), allowMissingColumns=True).fillna(0, ["entryCount", "size"])


def log_damages(held: DataFrame) -> DataFrame:
    """Return the damages of entry logs in `held_entries`: bookieId, file, damage."""
    file = F.col(DAMAGE)["file"]
    return _damages(held).withColumn("file", file).filter(file.endswith(".log"))


def unreadable_files(held: DataFrame) -> DataFrame:
    """Return the damages in `held_entries` as findings without a ledger."""
    return _damages(held).select(
        "bookieId",
        F.lit(Problem.UNREADABLE.value).alias("problem"),
        F.col(f"{DAMAGE}.file").alias("file"),
        F.col(f"{DAMAGE}.offset").alias("offset"),
        F.col(f"{DAMAGE}.reason").alias("detail"),
    )


def _union(*blocks: DataFrame | None) -> DataFrame:
    found = [each for each in blocks if each is not None]
    if not found:
        raise NotFound("The bookies given have no files to look at")
    return reduce(lambda left, right: left.unionByName(right), found)


def _damages(held: DataFrame) -> DataFrame:
    return held.filter(F.col(DAMAGE).isNotNull()).select("bookieId", DAMAGE).distinct()


def _logged(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool,
    of: DataFrame | None = None,
) -> DataFrame | None:  # fmt: skip
    wanted = [QUALIFIED_NAME, "entryId", "logId", "offset", "recordSize", "lastAddConfirmed"]
    names = ["file", "recordSize", "lastAddConfirmed", *(["digest"] if digests else [])]
    try:
        records = log_records(
            spark, bookies, [*wanted, "digest"] if digests else wanted, ledger=ledger, scope_id=scope_id
        )
    except NotFound:
        return None  # These bookies have not written an entry log yet.
    return fold(_of_ledgers(records, of), LOG, "logId", **{name: F.col(name) for name in names})


def _indexed(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, of: DataFrame | None = None
) -> DataFrame | None:
    entries = index_entries(spark, bookies, ledger=ledger, scope_id=scope_id)
    return None if entries is None else fold(_of_ledgers(entries, of), INDEX, "logId")


def _of_ledgers(rows: DataFrame, ledgers: DataFrame | None) -> DataFrame:
    """Return the rows of `ledgers` (bookieId, ledger), and the rows of damage."""
    if ledgers is None:
        return rows
    wanted = F.broadcast(ledgers.withColumn("isWanted", F.lit(True)))
    found = rows.join(wanted, ["bookieId", QUALIFIED_NAME], "left")
    return found.filter(F.col("isWanted").isNotNull() | F.col(DAMAGE).isNotNull()).drop("isWanted")
