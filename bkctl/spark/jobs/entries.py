"""The entries that bookies' files hold, and those that metadata promises on bookies of their ensembles, as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import reduce
from typing import TYPE_CHECKING

from bkctl.errors import NotFound
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, FrameColumn, Functions, JobSession, functions_of
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, index_entries, journal_entries, ledger_options, log_records
from bkctl.spark.jobs.entry_blocks import BLOCK_BITS, INDEX, JOURNAL, LOG, PROMISE, fold
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import Bookies

# --- held: copies in entry logs, places in indexes, records in journals -----------------------------------------------


def held_entries(
    spark: JobSession,
    bookies: Bookies,
    ledger: LedgerId | None,
    scope_id: int | None,
    *,
    indexes: bool = True,
    journaled: Frame | None = None,
) -> Frame:
    """Return the entries in the files of each bookie as `entry_blocks.BLOCKS`, and a row for each damage.

    With `journaled`, a result of `journaled_entries` without digests, these entries and the ones of their ledgers in
    logs and indexes, without digests. Raises NotFound if the bookies have no files.
    """
    F = functions_of(spark)
    options = ledger_options(ledger, scope_id)
    of, digest = None, ["digest"]
    if journaled is None:
        journaled = journaled_entries(spark, bookies, ledger, scope_id)
    else:
        of, digest = journaled.select("bookieId", QUALIFIED_NAME).dropna().distinct(), []
    found = [journaled]
    with suppress(NotFound):  # These bookies have not written an entry log yet.
        names = ["recordSize", "lastAddConfirmed", *digest]
        wanted = [QUALIFIED_NAME, "entryId", "logId", "offset", *names]
        records = log_records(spark, bookies, wanted, **options)
        given = {name: F.col(name) for name in ("file", *names)}
        found.append(fold(_of_ledgers(records, of), LOG, "logId", **given))
    places = index_entries(spark, bookies, **options) if indexes else None
    if places is not None:
        found.append(fold(_of_ledgers(places, of), INDEX, "logId"))
    blocks = [each for each in found if each is not None]
    if not blocks:
        raise NotFound("The bookies given have no files to look at")
    return reduce(lambda left, right: left.unionByName(right), blocks)


def journaled_entries(
    spark: JobSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool = True
) -> Frame | None:
    """Return the entries in the journals of each bookie as `entry_blocks.BLOCKS`; None without a journal."""
    F = functions_of(spark)
    wanted = ["lastAddConfirmed", "digest"] if digests else ["lastAddConfirmed"]
    entries = journal_entries(spark, bookies, wanted, **ledger_options(ledger, scope_id))
    if entries is None:
        return None
    given = {name: F.col(name) for name in ("file", "recordSize", "replayed", "digest") if name in entries.columns}
    lac = F.when(F.col("replayed"), F.col("lastAddConfirmed"))
    return fold(entries, JOURNAL, "journalId", **given, lastAddConfirmed=lac)


def shares_of(held: Frame) -> Frame:
    """Return the share of each ledger in each log of `held_entries`, as `inventory.shares` does."""
    F = functions_of(held)
    sums = [F.sum(name).alias(name) for name in ("entryCount", "size")]
    counted = held.filter(F.col("source") == LOG).groupBy("bookieId", "file", QUALIFIED_NAME).agg(*sums)
    counted = counted.withColumn(DAMAGE, F.lit(None).cast(TYPES[DAMAGE]))
    return counted.unionByName(log_damages(held), allowMissingColumns=True).fillna(0, ["entryCount", "size"])


def log_damages(held: Frame) -> Frame:
    """Return the damages of entry logs in `held_entries`: bookieId, file, damage."""
    F = functions_of(held)
    file = F.col(DAMAGE)["file"]
    return damages(held).withColumn("file", file).filter(file.endswith(".log"))


def damages(held: Frame) -> Frame:
    """Return the damages of files in `held_entries`: bookieId, damage."""
    F = functions_of(held)
    return held.filter(F.col(DAMAGE).isNotNull()).select("bookieId", DAMAGE).distinct()


def _of_ledgers(rows: Frame, ledgers: Frame | None) -> Frame:
    """Return the rows of `ledgers` (bookieId, ledger), and the rows of damage."""
    F = functions_of(rows)
    if ledgers is None:
        return rows
    wanted = F.broadcast(ledgers.withColumn("isWanted", F.lit(True)))
    found = rows.join(wanted, ["bookieId", QUALIFIED_NAME], "left")
    return found.filter(F.col("isWanted").isNotNull() | F.col(DAMAGE).isNotNull()).drop("isWanted")


# --- promised ---------------------------------------------------------------------------------------------------------


def read_metadata(
    spark: JobSession, connection: Mapping[str, str], ledger: LedgerId | None, scope_id: int | None
) -> Frame:
    """Return the metadata of a ledger, of a scope, or of all ledgers."""
    columns = (
        QUALIFIED_NAME, "state", "ensembleSize", "writeQuorumSize", "digestType", "lastEntryId", "ensembles",
    )  # fmt: skip
    chosen = {**ledger_options(ledger, scope_id), **connection, "columns": ",".join(columns)}
    return spark.read.format("bookkeeper.metadata").options(**chosen).load()


def fragments_of(metadata: Frame, held: Frame) -> Frame:
    """Return one row a fragment with entries: `first` and `last` entry, `bookies`, and the ledger's sizes.

    `held` gives the last entries of ledgers that are not closed; such a ledger without entries has no row.
    """
    F = functions_of(metadata)

    def fragment(ensemble: FrameColumn, index: FrameColumn) -> FrameColumn:
        next_first = F.get("ensembles", index + 1)["firstEntryId"]
        return F.struct(
            ensemble["firstEntryId"].alias("first"),
            F.least(F.coalesce(next_first - 1, "last"), "last").alias("last"),
            ensemble["bookies"].alias("bookies"),
        )

    sizes = (QUALIFIED_NAME, "ensembleSize", "writeQuorumSize")
    fragments = F.explode(F.transform("ensembles", fragment)).alias("fragment")
    is_open = F.col("state") != "CLOSED"
    of_open = held.join(metadata.filter(is_open).select(QUALIFIED_NAME), QUALIFIED_NAME, "left_semi")
    # A damaged entry must not decide how far its ledger goes; entries whose digest cannot be checked here have to.
    checked = F.max(F.when(F.col("digest").isNotNull(), F.col("lac")))
    confirmed = of_open.groupBy(QUALIFIED_NAME).agg(F.coalesce(checked, F.max("lac")).alias("last"))
    open_ledgers = metadata.filter(is_open).join(confirmed, QUALIFIED_NAME)
    ledgers = metadata.filter(~is_open).withColumn("last", F.col("lastEntryId")).unionByName(open_ledgers)
    return ledgers.select(*sizes, fragments).select(*sizes, "fragment.*").filter("first <= last")


def promised_blocks(fragments: Frame, bookies: Bookies) -> Frame:
    """Return the blocks of entries that each of `bookies` should have, as `entry_blocks.unfold` takes them."""
    F = functions_of(fragments)
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


def absent_bookies(fragments: Frame, bookies: Bookies) -> Frame:
    """Return the bookies that ensembles name and that are not among `bookies`, with their ledger counts."""
    F = functions_of(fragments)
    given = [bookie.bookie_id for bookie in bookies]
    named = fragments.select(QUALIFIED_NAME, F.explode("bookies").alias("bookieId"))
    ledger_count = F.count_distinct(QUALIFIED_NAME).alias("ledgerCount")
    return named.filter(~F.col("bookieId").isin(given)).groupBy("bookieId").agg(ledger_count).orderBy("bookieId")


def promise_counts(fragments: Frame, bookies: Bookies) -> Frame:
    """Return one row with ledgerCount, entryCount and replicaCount of the replicas on `bookies`; unfolds no entry.

    Entries of a fragment whose ids have the same remainder by the ensemble's size are on the same bookies.
    """
    F = functions_of(fragments)
    remainder = F.explode(F.sequence(F.lit(0), F.col("ensembleSize") - 1))
    by_remainder = fragments.withColumn("remainder", remainder)
    up_to_last = F.floor((F.col("last") - F.col("remainder")) / F.col("ensembleSize"))
    before_first = F.floor((F.col("first") - 1 - F.col("remainder")) / F.col("ensembleSize"))
    counted = by_remainder.select(
        QUALIFIED_NAME,
        (up_to_last - before_first).alias("entries"),
        _holder_count(F, F.col("remainder"), bookies).alias("holders"),
    ).filter("entries > 0 AND holders > 0")
    replicas = F.sum(F.col("entries") * F.col("holders"))
    return counted.agg(
        F.count_distinct(QUALIFIED_NAME).alias("ledgerCount"),
        F.coalesce(F.sum("entries"), F.lit(0)).alias("entryCount"),
        F.coalesce(replicas, F.lit(0)).alias("replicaCount"),
    )


def with_holder_count(entries: Frame, fragments: Frame, bookies: Bookies) -> Frame:
    """Return distinct promised `entries` (ledger, entry id) with two counts of the bookies that should have the entry.

    holderCount: those among `bookies`; writeQuorumSize: all.
    """
    F = functions_of(entries)
    found = entries.join(fragments, QUALIFIED_NAME).filter("entryId BETWEEN first AND last")
    holder_count = _holder_count(F, F.col("entryId"), bookies).alias("holderCount")
    return found.select(QUALIFIED_NAME, "entryId", holder_count, "writeQuorumSize")


def _holder_count(F: Functions, entry_id: FrameColumn, bookies: Bookies) -> FrameColumn:
    """Return the number of `bookies` in the write set (RoundRobinDistributionSchedule) of an entry of a fragment."""
    given = [bookie.bookie_id for bookie in bookies]
    copies = F.sequence(F.lit(0), F.col("writeQuorumSize") - 1)
    write_set = F.transform(copies, lambda copy: F.get("bookies", F.pmod(entry_id + copy, "ensembleSize").cast("int")))
    return F.size(F.filter(write_set, lambda bookie_id: bookie_id.isin(given)))
