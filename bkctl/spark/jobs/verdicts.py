"""Promised entries against held ones: a verdict for each replica, and the records to read for those in doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bkctl.formats.entry import DigestType
from bkctl.spark.jobs.entry_problems import REPLICA, Problem
from bkctl.spark.jobs.frames import QUALIFIED_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INTACT: Final = "intact"
#: Columns cannot decide: the first of `looks` does.
IN_DOUBT: Final = "look"


def judge_replicas(promised: DataFrame, held: DataFrame, ledgers: DataFrame, *, indexes: bool) -> DataFrame:
    """Return each replica that is promised or held, of existing `ledgers`, with `verdict`, `served` and `looks`.

    `verdict` of a promised replica is INTACT, IN_DOUBT, missing or notIndexed, else null. `served` is the copy that the
    bookie serves; without `indexes`, any copy that an index might name. `looks` are the records to read where the
    verdict is IN_DOUBT.
    """
    from pyspark.sql import functions as F

    rows = promised.join(held.filter(F.col(QUALIFIED_NAME).isNotNull()), list(REPLICA), "full_outer")
    rows = rows.withColumn("promised", F.coalesce("promised", F.lit(False))).join(ledgers, QUALIFIED_NAME, "inner")
    rows = _with_served_copy(rows, indexes=indexes).withColumn("verdict", _verdict())
    return rows.withColumn("looks", F.when(F.col("verdict") == IN_DOUBT, F.concat(_deciding_look(), _other_looks())))


def _with_served_copy(rows: DataFrame, *, indexes: bool) -> DataFrame:
    from pyspark.sql import functions as F

    def is_at_place(copy: Column) -> Column:
        return (copy["logId"] == F.col("place.logId")) & (copy["offset"] == F.col("place.offset"))

    if indexes:
        return rows.withColumn("served", F.get(F.filter("copies", is_at_place), F.lit(0)))
    rows = rows.withColumn("served", F.array_max("copies"))
    place = F.struct("served.logId", "served.offset")
    return rows.withColumn("place", F.when(F.col("served").isNotNull(), place))


def _verdict() -> Column:
    from pyspark.sql import functions as F

    served, journaled = F.col("served"), F.col("journaled")
    return (
        F.when(~F.col("promised"), None)
        .when(served.isNotNull() & _matches(served), INTACT)
        .when(F.col("place").isNotNull(), IN_DOUBT)
        .when(journaled.isNotNull() & _matches(journaled), INTACT)
        .when(journaled.isNotNull(), IN_DOUBT)
        .when(F.size("copies") > 0, Problem.NOT_INDEXED.value)
        .otherwise(Problem.MISSING.value)
    )


def _matches(record: Column) -> Column:
    """Return whether `record` matches its ledger's digest type, or has no digest to check."""
    from pyspark.sql import functions as F

    digest_type = F.col("digestType")
    return (
        digest_type.isNull() | (digest_type == DigestType.DUMMY.name) | record["digest"].eqNullSafe(digest_type)
    )  # fmt: skip


def _deciding_look() -> Column:
    """Return the look that decides about a replica in doubt, in an array."""
    from pyspark.sql import functions as F

    served, place = F.col("served"), F.col("place")
    return F.array(
        F.when(served.isNotNull(), _look("log", served, decides=True))
        .when(place.isNotNull(), _look("place", place, decides=True))
        .otherwise(_look("journal", F.col("journaled"), decides=True))
    )


def _other_looks() -> Column:
    """Return the copies to check by their records: copies that are not served, and whose columns do not match."""
    from pyspark.sql import functions as F

    def is_doubtful(copy: Column) -> Column:
        is_served = F.col("promised") & copy.eqNullSafe(F.col("served"))
        return ~is_served & ~_matches(copy)

    return F.transform(F.filter("copies", is_doubtful), lambda copy: _look("log", copy, decides=False))


def _look(kind: str, record: Column, *, decides: bool) -> Column:
    """Return one look: at a `log` by its file, at a `place` by log id (its file is unknown), or at a `journal`."""
    from pyspark.sql import functions as F

    return F.struct(
        F.lit(kind).alias("kind"),
        (F.lit(None).cast("string") if kind == "place" else record["file"]).alias("file"),
        (F.lit(None).cast("bigint") if kind == "journal" else record["logId"]).alias("logId"),
        record["offset"].alias("offset"),
        F.lit(decides).alias("decides"),
    )
