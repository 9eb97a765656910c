"""The entries that bookies' files hold: copies in entry logs, places in indexes, records in journals."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Final

from bkctl.errors import NotFound
from bkctl.ids import LedgerId
from bkctl.spark.jobs.bookie_records import index_entries, journal_entries, log_records
from bkctl.spark.jobs.entry_problems import REPLICA, Problem
from bkctl.spark.jobs.frames import QUALIFIED_NAME
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies

#: Columns of one record or place of an entry; each row has one of copy, place and journaled, or damage.
_TRACE: Final = {
    "copy": "struct<file:string,logId:bigint,offset:bigint,digest:string>",
    "place": "struct<logId:bigint,offset:bigint>",
    "journaled": "struct<file:string,offset:bigint,digest:string>",
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
    indexes: bool,
) -> DataFrame:
    """Return one row for each entry in the files of each bookie; rows without a ledger hold a bookie's `damages`.

    `copies` are its records in entry logs, `place` its location in the index, `journaled` its record in a journal that
    a start replays. `checkedLac` is the highest last add confirmed of records whose digest matched, `anyLac` of all.
    Raises NotFound if the bookies have no files.
    """
    from pyspark.sql import functions as F

    traces = [_logged(spark, bookies, ledger, scope_id), _journaled(spark, bookies, ledger, scope_id)]
    if indexes:
        traces.insert(1, _indexed(spark, bookies, ledger, scope_id))
    found = [trace for trace in traces if trace is not None]
    if not found:
        raise NotFound("The bookies given have no files to look at")
    union = reduce(lambda left, right: left.unionByName(right), found)
    return union.groupBy(*REPLICA).agg(
        F.collect_list("copy").alias("copies"),
        F.max("place").alias("place"),
        F.max("journaled").alias("journaled"),
        F.max(F.when(F.col("checked"), F.col("lac"))).alias("checkedLac"),
        F.max("lac").alias("anyLac"),
        F.collect_set(DAMAGE).alias("damages"),
    )


def unreadable_files(held: DataFrame) -> DataFrame:
    """Return the damages in `held_entries` as findings without a ledger."""
    from pyspark.sql import functions as F

    return held.select("bookieId", F.explode("damages").alias(DAMAGE)).select(
        "bookieId",
        F.lit(Problem.UNREADABLE.value).alias("problem"),
        F.col(f"{DAMAGE}.file").alias("file"),
        F.col(f"{DAMAGE}.offset").alias("offset"),
        F.col(f"{DAMAGE}.reason").alias("detail"),
    )


def _trace(frame: DataFrame, **values: Column) -> DataFrame:
    """Return `frame` with REPLICA and the columns of _TRACE: `values`, else null."""
    from pyspark.sql import functions as F

    rest = [F.lit(None).cast(kind).alias(name) for name, kind in _TRACE.items() if name not in values]
    return frame.select(*REPLICA, *(column.alias(name) for name, column in values.items()), *rest)


def _confirmed() -> dict[str, Column]:
    """Return the last add confirmed that a record may vouch for, and whether the record's digest matches.

    No entry confirms itself, so a damaged one with a digest that cannot be checked here (HMAC, DUMMY) promises nothing
    beyond itself.
    """
    from pyspark.sql import functions as F

    lac = F.least("lastAddConfirmed", F.col("entryId") - 1)
    return {"lac": lac, "checked": F.col("digest").isNotNull()}


def _logged(spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None) -> DataFrame | None:
    from pyspark.sql import functions as F

    wanted = [QUALIFIED_NAME, "entryId", "logId", "offset", "digest", "lastAddConfirmed"]
    try:
        records = log_records(spark, bookies, wanted, ledger=ledger, scope_id=scope_id)
    except NotFound:
        return None  # These bookies have not written an entry log yet.
    copy = F.when(F.col(DAMAGE).isNull(), F.struct("file", "logId", "offset", "digest"))
    return _trace(records, copy=copy, **_confirmed(), damage=F.col(DAMAGE))


def _indexed(spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None) -> DataFrame:
    from pyspark.sql import functions as F

    entries = index_entries(spark, bookies, ledger=ledger, scope_id=scope_id)
    place = F.when(F.col(DAMAGE).isNull(), F.struct("logId", "offset"))
    return _trace(entries, place=place, damage=F.col(DAMAGE))


def _journaled(
    spark: SparkSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None
) -> DataFrame | None:
    from pyspark.sql import functions as F

    entries = journal_entries(spark, bookies, ["digest", "lastAddConfirmed"], ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    return _trace(entries.filter("replayed"), journaled=F.struct("file", "offset", "digest"), **_confirmed())
