"""The entries that metadata promises, on each bookie of their ensembles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from bkctl.ids import LedgerId
from bkctl.spark.jobs.bookie_records import ledger_options
from bkctl.spark.jobs.entry_problems import REPLICA
from bkctl.spark.jobs.frames import QUALIFIED_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies

#: Entry ids that one row of the plan unfolds into: limits the arrays that a large ledger makes.
_CHUNK: Final = 8192


def read_metadata(
    spark: SparkSession, connection: Mapping[str, str], ledger: LedgerId | None, scope_id: int | None
) -> DataFrame:
    """Return the metadata of a ledger, of a scope, or of all ledgers."""
    columns = (
        QUALIFIED_NAME, "state", "ensembleSize", "writeQuorumSize", "digestType", "lastEntryId", "ensembles",
    )  # fmt: skip
    chosen = {**ledger_options(ledger, scope_id), **connection, "columns": ",".join(columns)}
    return spark.read.format("bookkeeper.metadata").options(**chosen).load()


def promised_entries(
    spark: SparkSession, bookies: Bookies, metadata: DataFrame, held: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Return the promised replicas on `bookies`, and the other bookies that ensembles name with their ledger counts.

    `held` gives the last entries of ledgers that are not closed.
    """
    from pyspark.sql import functions as F

    fragments = _fragments(_with_last_entry(metadata, held)).filter("first <= last")
    given = spark.createDataFrame([(bookie.bookie_id, True) for bookie in bookies], "bookieId string, given boolean")
    entries = _replicas(fragments)
    promised = entries.join(F.broadcast(given), "bookieId", "left_semi").withColumn("promised", F.lit(True))
    named = fragments.select(QUALIFIED_NAME, F.explode("bookies").alias("bookieId"))
    absent = named.join(F.broadcast(given), "bookieId", "left_anti")
    ledger_count = F.countDistinct(QUALIFIED_NAME).alias("ledgerCount")
    return promised, absent.groupBy("bookieId").agg(ledger_count).orderBy("bookieId")


def _with_last_entry(metadata: DataFrame, held: DataFrame) -> DataFrame:
    """Return the ledgers with `last`, their last promised entry; an open ledger without entries has no row."""
    from pyspark.sql import functions as F

    is_open = F.col("state") != "CLOSED"
    of_open = held.join(metadata.filter(is_open).select(QUALIFIED_NAME), QUALIFIED_NAME, "left_semi")
    # A damaged entry must not decide how far its ledger goes; entries whose digest cannot be checked here have to.
    confirmed = of_open.groupBy(QUALIFIED_NAME).agg(F.coalesce(F.max("checkedLac"), F.max("anyLac")).alias("last"))
    open_ledgers = metadata.filter(is_open).join(confirmed, QUALIFIED_NAME)
    return metadata.filter(~is_open).withColumn("last", F.col("lastEntryId")).unionByName(open_ledgers)


def _fragments(ledgers: DataFrame) -> DataFrame:
    """Return one row a fragment: its entries `first` to `last`, and its bookies."""
    from pyspark.sql import functions as F

    def fragment(ensemble: Column, index: Column) -> Column:
        next_first = F.get("ensembles", index + 1)["firstEntryId"]
        return F.struct(
            ensemble["firstEntryId"].alias("first"),
            F.least(F.coalesce(next_first - 1, "last"), "last").alias("last"),
            ensemble["bookies"].alias("bookies"),
        )

    sizes = (QUALIFIED_NAME, "ensembleSize", "writeQuorumSize")
    fragments = ledgers.select(*sizes, F.explode(F.transform("ensembles", fragment)).alias("fragment"))
    return fragments.select(*sizes, "fragment.*")


def _replicas(fragments: DataFrame) -> DataFrame:
    """Return one row for each entry and each bookie of its write set (RoundRobinDistributionSchedule)."""
    from pyspark.sql import functions as F

    chunks = F.sequence("first", "last", F.lit(_CHUNK).cast("bigint"))
    entry_ids = F.sequence("chunk", F.least(F.col("chunk") + (_CHUNK - 1), "last"))
    copies = F.sequence(F.lit(0), F.col("writeQuorumSize") - 1)
    index = F.pmod(F.col("entryId") + F.col("copy"), "ensembleSize").cast("int")
    return (
        fragments.withColumn("chunk", F.explode(chunks))
        .withColumn("entryId", F.explode(entry_ids))
        .withColumn("copy", F.explode(copies))
        .withColumn("bookieId", F.get("bookies", index))
        .select(*REPLICA)
    )
