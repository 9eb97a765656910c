"""Promised entries against held ones: a verdict for each replica, and the records to read for those in doubt."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Final

from bkctl.formats.entry import DigestType
from bkctl.spark import functions as F
from bkctl.spark.jobs.entry_blocks import Ids, unfold
from bkctl.spark.jobs.frames import QUALIFIED_NAME
from bkctl.spark.sources.columns import DAMAGE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from bkctl.spark.jobs.entry_blocks import Mask

INTACT: Final = "intact"
#: Columns cannot decide: the replica is intact if one of the deciding `looks` finds it.
IN_DOUBT: Final = "look"


class Problem(StrEnum):
    """Problems of a replica or file; the values are the words of every output."""

    #: The bookie has the entry nowhere, although metadata says that it should.
    MISSING = "missing"
    #: The bytes do not match the entry's digest, or cannot be read.
    DAMAGED = "damaged"
    #: An entry log has the entry, but the bookie's index does not, so the bookie does not serve it.
    NOT_INDEXED = "notIndexed"
    #: The index points to another entry.
    MISPLACED = "misplaced"
    #: A file ends in damage: entries behind the damage are found by the index alone, if at all.
    UNREADABLE = "unreadable"


def judge_replicas(promised: DataFrame, held: DataFrame, ledgers: DataFrame, *, indexes: bool) -> DataFrame:
    """Return each replica, of existing `ledgers`, that is not intact by columns, with `verdict`, `served` and `looks`.

    `promised` and `held` are blocks; what agrees in them is not unfolded. `verdict` of a promised replica is INTACT,
    IN_DOUBT, missing or notIndexed, else null. `served` is the copy that the index names; without `indexes`, the newest
    copy. `looks` are the records to read: those that decide where the verdict is IN_DOUBT, and copies that no index
    names and whose columns do not match.
    """
    of_ledgers = held.join(ledgers.select(QUALIFIED_NAME, "digestType"), QUALIFIED_NAME)
    of_ledgers = of_ledgers.withColumn("matches", _matches(F.col("digest"))).drop("digestType", DAMAGE, "size", "lac")
    blocks = promised.unionByName(of_ledgers, allowMissingColumns=True)
    rows = unfold(blocks, partial(_is_doubtful, indexes)).join(ledgers, QUALIFIED_NAME)
    rows = _with_served_copy(rows, indexes=indexes).withColumn("verdict", _verdict())
    in_doubt = F.coalesce(F.col("verdict") == IN_DOUBT, F.lit(False))
    deciding = F.filter(_deciding_looks(), lambda look: in_doubt & look.isNotNull())
    judged = rows.withColumn("looks", F.concat(deciding, _other_looks()))
    return judged.filter((F.col("verdict") != INTACT) | (F.size("looks") > 0))


def _is_doubtful(indexes: bool, ids: Ids) -> Mask:
    """Return the entries for which the table of verdicts says more than INTACT, or which have copies to look at."""
    return ids.mismatched | (ids.promised & ~(ids.replayed | (ids.served if indexes else ids.logged)))


def _with_served_copy(rows: DataFrame, *, indexes: bool) -> DataFrame:
    def is_at_place(copy: Column) -> Column:
        return (copy["logId"] == F.col("place.logId")) & (copy["offset"] == F.col("place.offset"))

    if indexes:
        return rows.withColumn("served", F.get(F.filter("copies", is_at_place), F.lit(0)))
    rows = rows.withColumn("served", F.array_max("copies"))
    place = F.struct("served.logId", "served.offset")
    return rows.withColumn("place", F.when(F.col("served").isNotNull(), place))


def _verdict() -> Column:
    """Return the verdict of the first condition that a replica meets, null for one that is not promised.

    A replayed copy comes first, since a start writes it to a new log and indexes it there.
    """
    served, journaled = F.col("served"), F.col("journaled")
    return (
        F.when(~F.col("promised"), None)
        .when(journaled.isNotNull() & _matches(journaled["digest"]), INTACT)
        .when(served.isNotNull() & _matches(served["digest"]), INTACT)
        .when(journaled.isNotNull(), IN_DOUBT)
        .when(F.col("place").isNotNull(), IN_DOUBT)
        .when(F.size("copies") > 0, Problem.NOT_INDEXED.value)
        .otherwise(Problem.MISSING.value)
    )


def _matches(digest: Column) -> Column:
    """Return whether a record's `digest` is its ledger's digest type, or the ledger has no digest to check."""
    digest_type = F.col("digestType")
    return digest_type.isNull() | (digest_type == DigestType.DUMMY.name) | digest.eqNullSafe(digest_type)


def _deciding_looks() -> Column:
    """Return the looks that decide about a replica in doubt: at the replayed copy, and at the copy in a log."""
    served, place, journaled = F.col("served"), F.col("place"), F.col("journaled")
    return F.array(
        F.when(journaled.isNotNull(), look_at("journal", journaled, decides=True)),
        F.when(served.isNotNull(), look_at("log", served, decides=True)).when(
            place.isNotNull(), look_at("place", place, decides=True)
        ),
    )


def _other_looks() -> Column:
    """Return the copies to check by their records: copies that are not served, and whose columns do not match."""

    def is_doubtful(copy: Column) -> Column:
        is_served = F.col("promised") & copy.eqNullSafe(F.col("served"))
        return ~is_served & ~_matches(copy["digest"])

    return F.transform(F.filter("copies", is_doubtful), lambda copy: look_at("log", copy, decides=False))


def look_at(kind: str, record: Column, *, decides: bool) -> Column:
    """Return one look: at a `log` by its file, at a `place` by log id (its file is unknown), or at a `journal`."""
    return F.struct(
        F.lit(kind).alias("kind"),
        (F.lit(None).cast("string") if kind == "place" else record["file"]).alias("file"),
        (F.lit(None).cast("bigint") if kind == "journal" else record["logId"]).alias("logId"),
        record["offset"].alias("offset"),
        F.lit(decides).alias("decides"),
    )
