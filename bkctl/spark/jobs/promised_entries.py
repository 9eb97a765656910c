"""The entries that metadata promises, on each bookie of their ensembles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bkctl.ids import LedgerId
from bkctl.spark import functions as F
from bkctl.spark.jobs.bookie_records import ledger_options
from bkctl.spark.jobs.entry_blocks import BLOCK_BITS, PROMISE
from bkctl.spark.jobs.frames import QUALIFIED_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies


def read_metadata(
    spark: SparkSession, connection: Mapping[str, str], ledger: LedgerId | None, scope_id: int | None
) -> DataFrame:
    """Return the metadata of a ledger, of a scope, or of all ledgers."""
    columns = (
        QUALIFIED_NAME, "state", "ensembleSize", "writeQuorumSize", "digestType", "lastEntryId", "ensembles",
    )  # fmt: skip
    chosen = {**ledger_options(ledger, scope_id), **connection, "columns": ",".join(columns)}
    return spark.read.format("bookkeeper.metadata").options(**chosen).load()


def fragments_of(metadata: DataFrame, held: DataFrame) -> DataFrame:
    """Return one row a fragment with entries: `first` and `last` entry, `bookies`, and the ledger's sizes.

    `held` gives the last entries of ledgers that are not closed.
    """

    def fragment(ensemble: Column, index: Column) -> Column:
        next_first = F.get("ensembles", index + 1)["firstEntryId"]
        return F.struct(
            ensemble["firstEntryId"].alias("first"),
            F.least(F.coalesce(next_first - 1, "last"), "last").alias("last"),
            ensemble["bookies"].alias("bookies"),
        )

    sizes = (QUALIFIED_NAME, "ensembleSize", "writeQuorumSize")
    fragments = F.explode(F.transform("ensembles", fragment)).alias("fragment")
    ledgers = _with_last_entry(metadata, held).select(*sizes, fragments)
    return ledgers.select(*sizes, "fragment.*").filter("first <= last")


def promised_blocks(fragments: DataFrame, bookies: Bookies) -> DataFrame:
    """Return the blocks of entries that each of `bookies` should have, as `entry_blocks.unfold` takes them."""
    given = [bookie.bookie_id for bookie in bookies]
    members = F.transform("bookies", lambda bookie, at: F.struct(bookie.alias("bookieId"), at.alias("position")))
    named = fragments.withColumn("member", F.explode(members))
    named = named.filter(F.col("member.bookieId").isin(given) & (F.col("member.position") < F.col("ensembleSize")))
    blocks = F.sequence(F.shiftright("first", BLOCK_BITS), F.shiftright("last", BLOCK_BITS))
    return named.withColumn("block", F.explode(blocks)).select(
        F.col("member.bookieId").alias("bookieId"), QUALIFIED_NAME, "block", F.lit(PROMISE).alias("source"),
        F.lit(0).cast("bigint").alias("entryCount"), "first", "last",
        *(F.col(name).cast("bigint").alias(name.rpartition(".")[2]) for name in
          ("member.position", "ensembleSize", "writeQuorumSize")),
    )  # fmt: skip


def absent_bookies(fragments: DataFrame, bookies: Bookies) -> DataFrame:
    """Return the bookies that ensembles name and that are not among `bookies`, with their ledger counts."""
    given = [bookie.bookie_id for bookie in bookies]
    named = fragments.select(QUALIFIED_NAME, F.explode("bookies").alias("bookieId"))
    ledger_count = F.count_distinct(QUALIFIED_NAME).alias("ledgerCount")
    return named.filter(~F.col("bookieId").isin(given)).groupBy("bookieId").agg(ledger_count).orderBy("bookieId")


def promise_counts(fragments: DataFrame, bookies: Bookies) -> DataFrame:
    """Return one row with ledgerCount, entryCount and replicaCount of the replicas on `bookies`; unfolds no entry.

    Entries of a fragment whose ids have the same remainder by the ensemble's size are on the same bookies.
    """
    remainder = F.explode(F.sequence(F.lit(0), F.col("ensembleSize") - 1))
    by_remainder = fragments.withColumn("remainder", remainder)
    up_to_last = F.floor((F.col("last") - F.col("remainder")) / F.col("ensembleSize"))
    before_first = F.floor((F.col("first") - 1 - F.col("remainder")) / F.col("ensembleSize"))
    counted = by_remainder.select(
        QUALIFIED_NAME,
        (up_to_last - before_first).alias("entries"),
        _holder_count(F.col("remainder"), bookies).alias("holders"),
    ).filter("entries > 0 AND holders > 0")
    replicas = F.sum(F.col("entries") * F.col("holders"))
    return counted.agg(
        F.count_distinct(QUALIFIED_NAME).alias("ledgerCount"),
        F.coalesce(F.sum("entries"), F.lit(0)).alias("entryCount"),
        F.coalesce(replicas, F.lit(0)).alias("replicaCount"),
    )


def with_holder_count(entries: DataFrame, fragments: DataFrame, bookies: Bookies) -> DataFrame:
    """Return distinct promised `entries` (ledger, entry id) with two counts of the bookies that should have the entry.

    holderCount: those among `bookies`; writeQuorumSize: all.
    """
    found = entries.join(fragments, QUALIFIED_NAME).filter("entryId BETWEEN first AND last")
    holder_count = _holder_count(F.col("entryId"), bookies).alias("holderCount")
    return found.select(QUALIFIED_NAME, "entryId", holder_count, "writeQuorumSize")


def _holder_count(entry_id: Column, bookies: Bookies) -> Column:
    """Return the number of `bookies` in the write set (RoundRobinDistributionSchedule) of an entry of a fragment."""
    given = [bookie.bookie_id for bookie in bookies]
    copies = F.sequence(F.lit(0), F.col("writeQuorumSize") - 1)
    write_set = F.transform(copies, lambda copy: F.get("bookies", F.pmod(entry_id + copy, "ensembleSize").cast("int")))
    return F.size(F.filter(write_set, lambda bookie_id: bookie_id.isin(given)))


def _with_last_entry(metadata: DataFrame, held: DataFrame) -> DataFrame:
    """Return the ledgers with `last`, their last promised entry; an open ledger without entries has no row."""
    is_open = F.col("state") != "CLOSED"
    of_open = held.join(metadata.filter(is_open).select(QUALIFIED_NAME), QUALIFIED_NAME, "left_semi")
    # A damaged entry must not decide how far its ledger goes; entries whose digest cannot be checked here have to.
    checked = F.max(F.when(F.col("digest").isNotNull(), F.col("lac")))
    confirmed = of_open.groupBy(QUALIFIED_NAME).agg(F.coalesce(checked, F.max("lac")).alias("last"))
    open_ledgers = metadata.filter(is_open).join(confirmed, QUALIFIED_NAME)
    return metadata.filter(~is_open).withColumn("last", F.col("lastEntryId")).unionByName(open_ledgers)
