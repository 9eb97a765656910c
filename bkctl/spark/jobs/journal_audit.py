"""The job `journal-audit`: records of all bookies' journals that nothing else holds.

It reports the records that a crash now would replay, the records behind a torn or damaged end, which no replay reaches,
and the entries that no entry log of their bookie has. Source: Journal.replay, LastLogMark; `files.journals` checks the
journals of one bookie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.checks.journal_check import check_journals
from bkctl.errors import Corrupt, NotFound, Unsupported
from bkctl.files.journal import JournalReader
from bkctl.files.scan import ScanState
from bkctl.formats.names import COOKIE_NAME
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, JobSession, functions_of
from bkctl.spark.facts.frames import Facts
from bkctl.spark.facts.tables import spark_schema
from bkctl.spark.jobs.bookie_records import (
    QUALIFIED_NAME,
    REPLICA,
    KeptFrames,
    frame_of,
    replay_starts,
    rows_in_tasks,
    with_ledger_ids,
)
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.jobs.entries import held_entries, journaled_entries, log_damages, unfold
from bkctl.spark.jobs.garbage import ledger_states
from bkctl.spark.jobs.integrity import look_again, look_at
from bkctl.spark.sources.columns import DAMAGE
from bkctl.spark.sources.places import unseen

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import BookieFiles, Bookies


class Logged(StrEnum):
    """Answers to the question if an entry log has a journaled entry; the values are the words of every output."""

    NO = "no"
    #: A log of the bookie cannot be read to its end, and the entry may stand behind that.
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class JournalAudit(KeptFrames):
    """The findings, as DataFrames that Spark keeps until `release`.

    `journals`: the rows of `checks` with unloggedCount, the number of entries that no entry log of the bookie holds,
    and unknownCount, the number of entries that may be behind damage in a log.
    `unlogged`: these entries: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, logged, replayed, state,
    journalId, offset, recordSize, file.
    """

    journals: Frame
    unlogged: Frame


_UNLOGGED: Final = (
    "bookieId string, ledgerQualifiedName string, entryId bigint, logged string, replayed boolean, journalId bigint, "
    "offset bigint, file string, recordSize bigint, state string, ledgerScopeId string, ledgerId string"
)


def audit(
    spark: JobSession,
    bookies: Bookies,
    connection: Mapping[str, str] | None = None,
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
    held: Frame | None = None,
) -> JournalAudit:
    """Check all journals of the bookies, and search their entry logs for the journals' entries.

    `ledger` and `scope_id` limit the entries, not the `checks` of files. A damaged file counts up to the damage. With
    `connection` (the options of `bookkeeper.metadata`) the entries have the state of their ledgers. Raises Conflict if
    a bookie belongs to another cluster. `held` is a result of `held_entries` to use.
    """
    F = functions_of(spark)
    if connection is not None:
        check_clusters(bookies, connection)
    persisted = []
    if held is None:
        journaled = journaled_entries(spark, bookies, ledger, scope_id, digests=False)
        if journaled is not None:
            persisted.append(journaled.persist())
            held = held_entries(spark, bookies, ledger, scope_id, journaled=journaled).persist()
            persisted.append(held)
    entries = (frame_of(spark, [], _UNLOGGED) if held is None else unlogged(held, bookies, connection)).persist()
    names = {Logged.NO: "unloggedCount", Logged.UNKNOWN: "unknownCount"}
    counts = [F.count(F.when(F.col("logged") == word.value, 1)).alias(name) for word, name in names.items()]
    counted = entries.groupBy("bookieId", "file").agg(*counts)
    journals = checks(spark, bookies).join(counted, ["bookieId", "file"], "left").fillna(0, [*names.values()])
    journals = journals.orderBy("bookieId", "file").persist()
    return JournalAudit((journals, entries, *persisted), journals, entries)


def checks(spark: JobSession, bookies: Bookies) -> Frame:
    """Return one row for each journal file, missing ones too, as `bkctl journal verify` prints it; one task a bookie.

    A start of the bookie replays the file from byte `replayFrom` (null: not at all); the other `replay…` columns count
    the replayed records. No replay reaches records behind a torn or damaged end (`sizeBehind`, `recordsBehind`).
    """
    if isinstance(bookies, Facts):
        return bookies.table(spark, "journals").drop("part")
    return rows_in_tasks(spark, list(bookies), check_rows, spark_schema("journals")).drop("part")


def check_rows(bookie: BookieFiles) -> Iterator[dict[str, Any]]:
    """Yield the rows of `checks` for one bookie."""
    for directory in (*bookie.journal_dirs, *bookie.ledger_dirs):
        if not Path(directory).is_dir():
            raise unseen(Path(directory, COOKIE_NAME))
    starts = replay_starts(bookie)
    for check in check_journals(bookie.directories):
        start, journal_id, behind = starts.get(str(check.path)), check.journal_id, check.behind
        row = {
            "bookieId": bookie.bookie_id, "file": str(check.path), "journalId": journal_id,
            "journalIdHex": None if journal_id is None else f"{journal_id:x}", "version": check.version,
            "state": check.state.value, "size": check.size_bytes, "goodEnd": check.good_end, "mark": check.mark,
            "recordCount": check.record_count, "entryCount": check.entry_count,
            "replayRecordCount": 0, "replayEntryCount": 0, "replaySize": 0, "sizeBehind": behind.size_bytes,
            "recordsBehind": behind.record_count, "entriesBehind": behind.entry_count, "resumesAt": behind.resumes_at,
            "problem": check.problem, "damaged": check.error is not None,
        }  # fmt: skip
        if start is not None and check.state not in (ScanState.MISSING, ScanState.UNREADABLE):
            row |= {"replayFrom": start, **_replay(check.path, start)}
        yield row


def _replay(path: Path, start: int) -> dict[str, int]:
    records = entries = size = 0
    with suppress(Corrupt, Unsupported, NotFound), JournalReader.open(path) as reader:
        for batch in reader.batches(start):
            records += len(batch)
            size += sum(batch.sizes) + 4 * len(batch)
            if batch.type is RecordType.ENTRY:
                entries += len(batch)
    return {"replayRecordCount": records, "replayEntryCount": entries, "replaySize": size}


def unlogged(held: Frame, bookies: Bookies, connection: Mapping[str, str] | None = None) -> Frame:
    """Return one row for each journaled entry that is not found in an entry log: its last record in a journal.

    Entries are looked up as `integrity` does: in the logs up to their first damage, then by the index behind it.
    `logged` is `no`, or `unknown` if a log of the bookie cannot be read to its end and no index names the entry.
    `replayed` entries reach an entry log at the next checkpoint or start. The others do not: their ledgers were
    deleted, or the bookie lost the entries. With `connection`, `state` tells these apart (alive, dead, unknown). `held`
    is a result of `held_entries`.
    """
    F = functions_of(held)
    unread = log_damages(held).select("bookieId").distinct()
    blocks = held.filter(F.col(QUALIFIED_NAME).isNotNull()).drop(DAMAGE, "size", "lac")
    absent = unfold(blocks.withColumn("matches", F.lit(True)), lambda ids: ids.recorded & ~ids.logged)
    # Behind damage in a log the index may find the entry.
    places = absent.filter(F.col("place").isNotNull()).select(
        *REPLICA, F.lit(True).alias("promised"), F.lit(None).cast("string").alias("digestType"),
        F.array(look_at(F, "place", F.col("place"), decides=True)).alias("looks"),
    )  # fmt: skip
    indexed = look_again(places, bookies, {}).filter(F.col("problem").isNull())
    found = absent.join(indexed, list(REPLICA), "left_anti")
    found = found.join(F.broadcast(unread.withColumn("unread", F.lit(True))), "bookieId", "left")
    is_unknown = F.col("unread").isNotNull() & F.col("place").isNull()
    logged = F.when(is_unknown, Logged.UNKNOWN.value).otherwise(Logged.NO.value).alias("logged")
    found = found.select(*REPLICA, logged, "recorded.*")
    if connection is not None:
        # A replayed entry is not a finding, whatever the state of its ledger.
        lost = found.filter(~F.col("replayed"))
        found = found.join(ledger_states(lost, connection).select(QUALIFIED_NAME, "state"), QUALIFIED_NAME, "left")
    else:
        found = found.withColumn("state", F.lit(None).cast("string"))
    return with_ledger_ids(found).orderBy("bookieId", QUALIFIED_NAME, "entryId")
