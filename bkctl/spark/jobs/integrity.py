"""The job `integrity`: the entries that metadata promises, against the files of the bookies that should have them.

An entry counts as present if a bookie that starts on these files serves it: a replay of the journal brings the entry (a
running bookie may not have written it to its logs yet), or its index points to a record in an entry log that is this
entry and matches its digest. Where neither is certain from columns alone, a second look reads the records. It also
checks the digests of copies that no index names.

Closed ledgers promise the entries that their metadata says. An open ledger promises entries up to the highest last add
confirmed in any of its entries. Source: LedgerChecker, ScanAndCompareGarbageCollector; DigestManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, JobSession, functions_of
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, REPLICA, KeptFrames, with_ledger_ids
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.jobs.entries import (
    absent_bookies,
    fragments_of,
    held_entries,
    promise_counts,
    promised_blocks,
    read_metadata,
    unreadable_files,
    with_holder_count,
)
from bkctl.spark.jobs.verdicts import Problem, judge_replicas, look_again

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import Bookies


@dataclass(frozen=True)
class Integrity(KeptFrames):
    """The findings as DataFrames, computed when they are used.

    `findings`: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, problem, ledgerState, file, offset (of
    the size field), detail, intactCount (bookies of the write set that serve the entry; 0: lost, None: unknown, as
    the files of a bookie of the write set were not given), writeQuorumSize.
    `unchecked`: bookies that ensembles name and whose files were not given: bookieId, ledgerCount.
    `checked`: one row: ledgerCount, replicaCount (one for each entry and bookie of its write set), entryCount.
    """

    findings: Frame
    unchecked: Frame
    checked: Frame


def integrity(
    spark: JobSession,
    bookies: Bookies,
    connection: Mapping[str, str],
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
    indexes: bool = True,
    held: Frame | None = None,
) -> Integrity:
    """Compare the promises of metadata with bookies' files; without `indexes`, with entry logs and journals only.

    `connection` has the options of `bookkeeper.metadata`. Metadata is read before the files, so that entries written
    meanwhile do not count as missing. `held` is a result of `held_entries` to use, not computed yet. Raises Conflict if
    a bookie belongs to another cluster.
    """
    F = functions_of(spark)
    check_clusters(bookies, connection)
    metadata = read_metadata(spark, connection, ledger, scope_id).persist()
    metadata.count()
    persisted = [metadata]
    if held is None:
        held = held_entries(spark, bookies, ledger, scope_id, indexes=indexes).persist()
        persisted.append(held)
    fragments = fragments_of(metadata, held).persist()
    ledgers = metadata.select(QUALIFIED_NAME, "digestType", F.col("state").alias("ledgerState"), "writeQuorumSize")
    # Replicas that agree end here: the rest is about the few others.
    doubtful = judge_replicas(promised_blocks(fragments, bookies), held, ledgers, indexes=indexes).persist()
    suspects = _absent(doubtful).unionByName(_decided(look_again(doubtful, bookies, connection))).persist()
    findings = _with_intact_count(suspects, fragments, bookies).join(ledgers.drop("digestType"), QUALIFIED_NAME)
    findings = with_ledger_ids(findings).unionByName(unreadable_files(held), allowMissingColumns=True).drop("promised")
    order = (QUALIFIED_NAME, "entryId", "bookieId", "file", "offset")
    return Integrity(
        (*persisted, fragments, doubtful, suspects),
        findings.orderBy(*order), absent_bookies(fragments, bookies), promise_counts(fragments, bookies),
    )  # fmt: skip


def _absent(judged: Frame) -> Frame:
    """Return the replicas that are missing or not indexed, with the newest copy in an entry log if there is one."""
    F = functions_of(judged)
    copy = F.array_max("copies")
    return judged.filter(F.col("verdict").isin(Problem.NOT_INDEXED.value, Problem.MISSING.value)).select(
        *REPLICA, "promised", F.col("verdict").alias("problem"), copy["file"].alias("file"),
        copy["offset"].alias("offset"), F.lit(None).cast("string").alias("detail"),
    )  # fmt: skip


def _decided(looked: Frame) -> Frame:
    """Return one row for each promised replica: without a problem if a look found it, else the problem in a log."""
    F = functions_of(looked)
    names = ("problem", "file", "offset", "detail")
    is_bad, is_journal = F.col("problem").isNotNull(), F.coalesce(F.col("file").endswith(".txn"), F.lit(False))
    best = F.min(F.struct(is_bad.alias("isBad"), is_journal.alias("isJournal"), *names)).alias("best")
    promised = looked.filter("promised").groupBy(*REPLICA, "promised").agg(best)
    return looked.filter("NOT promised").unionByName(
        promised.select(*REPLICA, "promised", *(f"best.{name}" for name in names))
    )


def _with_intact_count(suspects: Frame, fragments: Frame, bookies: Bookies) -> Frame:
    """Return the suspects with a problem, and how many promised replicas of their entries are intact."""
    F = functions_of(suspects)
    entry = [QUALIFIED_NAME, "entryId"]
    found = suspects.filter(F.col("problem").isNotNull())
    bad = found.groupBy(*entry).agg(F.count(F.when(F.col("promised"), 1)).alias("badCount"))
    holders = with_holder_count(bad.select(*entry), fragments, bookies)
    # Nobody knows whether a bookie that is not given has the entry.
    checked = F.when(F.col("holderCount") == F.col("writeQuorumSize"), F.col("holderCount") - F.col("badCount"))
    intact = F.when(F.col("holderCount").isNull(), F.lit(0)).otherwise(checked).alias("intactCount")
    counts = bad.join(holders, entry, "left").select(*entry, intact)
    return found.join(counts, entry)
