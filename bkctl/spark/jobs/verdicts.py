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
    index names; without `indexes`, the newest copy. `looks` are the records to read: the one that decides where the
    verdict is IN_DOUBT, and copies that no index names and whose columns do not match.
    """
    from pyspark.sql import functions as F

    rows = promised.join(held.filter(F.col(QUALIFIED_NAME).isNotNull()), list(REPLICA), "full_outer")
    rows = rows.withColumn("promised", F.coalesce("promised", F.lit(False))).join(ledgers, QUALIFIED_NAME, "inner")
    rows = _with_served_copy(rows, indexes=indexes).withColumn("verdict", _verdict())
    in_doubt = F.coalesce(F.col("verdict") == IN_DOUBT, F.lit(False))
    return rows.withColumn("looks", F.concat(F.filter(F.array(_deciding_look()), lambda _: in_doubt), _other_looks()))


def _with_served_copy(rows: DataFrame, *, indexes: bool) -> DataFrame:
    from pyspark.sql import functions as F

    def is_at_place(copy: Column) -> Column:
        return (copy["logId"] == F.col("place.logId")) & (copy["offset"] == F.col("place.offset"))

    rows = rows.withColumn("copies", F.coalesce("copies", F.array()))
    if indexes:
        return rows.withColumn("served", F.get(F.filter("copies", is_at_place), F.lit(0)))
    rows = rows.withColumn("served", F.array_max("copies"))
    place = F.struct("served.logId", "served.offset")
    return rows.withColumn("place", F.when(F.col("served").isNotNull(), place))


def _conditions() -> dict[str, Column]:
    """Return the named conditions of the table _VERDICTS."""
    from pyspark.sql import functions as F

    served, journaled = F.col("served"), F.col("journaled")
    return {
        "notPromised": ~F.col("promised"),
        "replayed": journaled.isNotNull() & _matches(journaled),
        "served": served.isNotNull() & _matches(served),
        "replayInDoubt": journaled.isNotNull(),
        "indexed": F.col("place").isNotNull(),
        "logged": F.size("copies") > 0,
    }


#: The first condition that a replica meets gives its verdict; a replica that meets none is missing. A replayed copy
#: comes first, since a start writes it to a new log and indexes it there.
_VERDICTS: Final[tuple[tuple[str, str | None], ...]] = (
    ("notPromised", None),
    ("replayed", INTACT),
    ("served", INTACT),
    ("replayInDoubt", IN_DOUBT),
    ("indexed", IN_DOUBT),
    ("logged", Problem.NOT_INDEXED.value),
)


def _verdict() -> Column:
    from pyspark.sql import functions as F

    conditions = _conditions()
    verdict = F.lit(Problem.MISSING.value)
    for name, value in reversed(_VERDICTS):
        verdict = F.when(conditions[name], F.lit(value)).otherwise(verdict)
    return verdict


def _matches(record: Column) -> Column:
    """Return whether `record` matches its ledger's digest type, or has no digest to check."""
    from pyspark.sql import functions as F

    digest_type = F.col("digestType")
    return (
        digest_type.isNull() | (digest_type == DigestType.DUMMY.name) | record["digest"].eqNullSafe(digest_type)
    )  # fmt: skip


def _deciding_look() -> Column:
    """Return the look that decides about a replica in doubt: at the replayed copy, then at the copy in a log."""
    from pyspark.sql import functions as F

    served, place, journaled = F.col("served"), F.col("place"), F.col("journaled")
    replay = F.when(journaled.isNotNull(), F.struct(journaled["file"], journaled["offset"]))
    return (
        F.when(served.isNotNull(), look_at(served["file"], served, replay, decides=True))
        .when(place.isNotNull(), look_at(None, place, replay, decides=True))
        .otherwise(look_at(None, None, replay, decides=True))
    )


def _other_looks() -> Column:
    """Return the copies to check by their records: copies that are not served, and whose columns do not match."""
    from pyspark.sql import functions as F

    def is_doubtful(copy: Column) -> Column:
        is_served = F.col("promised") & copy.eqNullSafe(F.col("served"))
        return ~is_served & ~_matches(copy)

    return F.transform(F.filter("copies", is_doubtful), lambda copy: look_at(copy["file"], copy, None, decides=False))


def look_at(file: Column | None, record: Column | None, replay: Column | None, *, decides: bool) -> Column:
    """Return one look: at a `replay` of a journal if there is one, then at a `record` in the log `file`.

    Without `file`, the log is known by its id only.
    """
    from pyspark.sql import functions as F

    def typed(column: Column | None, kind: str) -> Column:
        return F.lit(None).cast(kind) if column is None else column

    return F.struct(
        typed(file, "string").alias("file"),
        typed(None if record is None else record["logId"], "bigint").alias("logId"),
        typed(None if record is None else record["offset"], "bigint").alias("offset"),
        typed(replay, "struct<file:string,offset:bigint>").alias("replay"),
        F.lit(decides).alias("decides"),
    )
