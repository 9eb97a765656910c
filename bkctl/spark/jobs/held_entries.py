"""The entries that bookies' files hold: copies in entry logs, places in indexes, records in journals."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from bkctl.errors import NotFound
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.spark import functions as F
from bkctl.spark.jobs.bookie_records import index_entries, journal_entries, log_records
from bkctl.spark.jobs.entry_problems import REPLICA, Problem
from bkctl.spark.jobs.frames import QUALIFIED_NAME
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies

#: Columns of one record or place of an entry; each row has some of them, or damage. Structs begin with the numbers that
#: order them in time: the greatest is the newest.
_TRACE: Final = {
    "copy": "struct<logId:bigint,offset:bigint,file:string,digest:string,recordSize:bigint>",
    "place": "struct<logId:bigint,offset:bigint>",
    "journaled": "struct<journalId:bigint,offset:bigint,file:string,digest:string>",
    "recorded": "struct<replayed:boolean,journalId:bigint,offset:bigint,file:string,recordSize:bigint>",
    "lac": "bigint",
    "checked": "boolean",
    DAMAGE: TYPES[DAMAGE],
}


def held_entries(
    spark: SparkSession,
    bookies: Bookies,
    ledger: LedgerId | None,
    scope_id: int | None,
    *,
    indexes: bool = True,
    digests: bool = True,
) -> DataFrame:
    """Return one row for each entry in the files of each bookie; rows without a ledger hold a bookie's `damages`.

    `copies` are its records in entry logs, `place` its location in the index, `journaled` its last record that a start
    replays from a journal, `recorded` its last record in any journal. `checkedLac` is the highest last add confirmed
    of records whose digest matched, `anyLac` of all. Without `digests` no digest is checked. Raises NotFound if the
    bookies have no files.
    """
    traces = [
        _logged(spark, bookies, ledger, scope_id, digests=digests),
        _indexed(spark, bookies, ledger, scope_id) if indexes else None,
        _journaled(spark, bookies, ledger, scope_id, digests=digests),
    ]
    found = [trace for trace in traces if trace is not None]
    if not found:
        raise NotFound("The bookies given have no files to look at")
    union = reduce(lambda left, right: left.unionByName(right), found)
    return union.groupBy(*REPLICA).agg(
        F.collect_list("copy").alias("copies"),
        F.max("place").alias("place"),
        F.max("journaled").alias("journaled"),
        F.max("recorded").alias("recorded"),
        F.max(F.when(F.col("checked"), F.col("lac"))).alias("checkedLac"),
        F.max("lac").alias("anyLac"),
        F.collect_set(DAMAGE).alias("damages"),
    )


def shares_of(held: DataFrame) -> DataFrame:
    """Return the share of each ledger in each log of `held_entries`, as `inventory.shares` does."""
    copies = held.select("bookieId", QUALIFIED_NAME, F.explode("copies").alias("copy"))
    size = F.sum(F.col("copy.recordSize") + RECORD_SIZE.size).alias("size")
    counted = copies.groupBy("bookieId", F.col("copy.file").alias("file"), QUALIFIED_NAME).agg(
        F.count("*").alias("entryCount"), size
    )
    counted = counted.withColumn(DAMAGE, F.lit(None).cast(TYPES[DAMAGE]))
    return counted.unionByName(log_damages(held), allowMissingColumns=True).fillna(0, ["entryCount", "size"])


def log_damages(held: DataFrame) -> DataFrame:
    """Return the damages of entry logs in `held_entries`: bookieId, file, damage."""
    damages = held.select("bookieId", F.explode("damages").alias(DAMAGE))
    file = F.col(DAMAGE)["file"]
    return damages.withColumn("file", file).filter(file.endswith(".log"))


def unreadable_files(held: DataFrame) -> DataFrame:
    """Return the damages in `held_entries` as findings without a ledger."""
    return held.select("bookieId", F.explode("damages").alias(DAMAGE)).select(
        "bookieId",
        F.lit(Problem.UNREADABLE.value).alias("problem"),
        F.col(f"{DAMAGE}.file").alias("file"),
        F.col(f"{DAMAGE}.offset").alias("offset"),
        F.col(f"{DAMAGE}.reason").alias("detail"),
    )


def _trace(frame: DataFrame, **values: Column) -> DataFrame:
    """Return `frame` with REPLICA and the columns of _TRACE: `values`, else null."""
    rest = [F.lit(None).cast(kind).alias(name) for name, kind in _TRACE.items() if name not in values]
    return frame.select(*REPLICA, *(column.alias(name) for name, column in values.items()), *rest)


def _confirmed() -> dict[str, Column]:
    """Return the last add confirmed that a record may vouch for, and whether the record's digest matches.

    No entry confirms itself, so a damaged one with a digest that cannot be checked here (HMAC, DUMMY) promises nothing
    beyond itself.
    """
    lac = F.least("lastAddConfirmed", F.col("entryId") - 1)
    return {"lac": lac, "checked": F.col("digest").isNotNull()}


def _logged(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool
) -> DataFrame | None:
    wanted = [QUALIFIED_NAME, "entryId", "logId", "offset", "recordSize", "lastAddConfirmed"]
    try:
        records = log_records(
            spark, bookies, [*wanted, "digest"] if digests else wanted, ledger=ledger, scope_id=scope_id
        )
    except NotFound:
        return None  # These bookies have not written an entry log yet.
    records = _with_digest(records)
    copy = F.when(F.col(DAMAGE).isNull(), F.struct("logId", "offset", "file", "digest", "recordSize"))
    return _trace(records, copy=copy, **_confirmed(), damage=F.col(DAMAGE))


def _indexed(spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None) -> DataFrame | None:
    entries = index_entries(spark, bookies, ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    place = F.when(F.col(DAMAGE).isNull(), F.struct("logId", "offset"))
    return _trace(entries, place=place, damage=F.col(DAMAGE))


def _journaled(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool
) -> DataFrame | None:
    wanted = ["lastAddConfirmed", "digest"] if digests else ["lastAddConfirmed"]
    entries = journal_entries(spark, bookies, wanted, ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    journaled = F.when(F.col("replayed"), F.struct("journalId", "offset", "file", "digest"))
    recorded = F.struct("replayed", "journalId", "offset", "file", "recordSize")
    confirmed = {name: F.when(F.col("replayed"), column) for name, column in _confirmed().items()}
    return _trace(_with_digest(entries), journaled=journaled, recorded=recorded, **confirmed)


def _with_digest(records: DataFrame) -> DataFrame:
    """Return `records` with the column `digest`: null where no digest was checked."""
    return records if "digest" in records.columns else records.withColumn("digest", F.lit(None).cast("string"))
