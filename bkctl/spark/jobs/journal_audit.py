"""The job `journal-audit`: records of all bookies' journals that nothing else holds.

It reports the records that a crash now would replay, the records behind a torn or damaged end, which no replay reaches,
and the entries that no entry log of their bookie has. Source: Journal.replay, LastLogMark; `files.journals` checks the
journals of one bookie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.errors import Corrupt, NotFound, Unsupported
from bkctl.files.journal import JournalReader
from bkctl.files.journal_check import JournalCheck, JournalState, check_journals
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookie_records import journal_entries, log_records, replay_starts
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.jobs.frames import QUALIFIED_NAME, rows_in_tasks, with_ledger_ids
from bkctl.spark.jobs.ledger_states import ledger_states
from bkctl.spark.sources.columns import DAMAGE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles, Bookies


class JournalAudit(NamedTuple):
    """The findings, as DataFrames that Spark keeps until `release`.

    `journals`: the rows of `checks` with unloggedCount, the number of entries that no entry log of the bookie holds.
    `unlogged`: these entries: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, replayed, state,
    journalId, offset, recordSize, file.
    """

    journals: DataFrame
    unlogged: DataFrame

    def release(self) -> None:
        """Free the memory that Spark keeps for these DataFrames."""
        self.journals.unpersist()
        self.unlogged.unpersist()


_UNLOGGED: Final = (
    "bookieId string, ledgerQualifiedName string, entryId bigint, replayed boolean, journalId bigint, offset bigint, "
    "file string, recordSize bigint, state string, ledgerScopeId string, ledgerId string"
)
_CHECKS: Final = (
    "bookieId string, journalId bigint, journalIdHex string, file string, version int, state string, size bigint, "
    "goodEnd bigint, mark bigint, replayFrom bigint, recordCount bigint, entryCount bigint, replayRecordCount bigint, "
    "replayEntryCount bigint, replaySize bigint, sizeBehind bigint, recordsBehind bigint, entriesBehind bigint, "
    "resumesAt bigint, problem string, damaged boolean"
)


def audit(
    spark: SparkSession,
    bookies: Bookies,
    connection: Mapping[str, str] | None = None,
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> JournalAudit:
    """Check all journals of the bookies, and search their entry logs for the journals' entries.

    `ledger` and `scope_id` limit the entries, not the `checks` of files. A damaged file counts up to the damage. With
    `connection` (the options of `bookkeeper.metadata`) the entries have the state of their ledgers. Raises Conflict if
    a bookie belongs to another cluster.
    """
    from pyspark.sql import functions as F

    if connection is not None:
        check_clusters(bookies, connection)
    found = unlogged(spark, bookies, connection, ledger=ledger, scope_id=scope_id)
    entries = (spark.createDataFrame([], _UNLOGGED) if found is None else found).persist()
    counts = entries.groupBy("bookieId", "file").agg(F.count("*").alias("unloggedCount"))
    journals = checks(spark, bookies).join(counts, ["bookieId", "file"], "left").fillna(0, ["unloggedCount"])
    return JournalAudit(journals.orderBy("bookieId", "file").persist(), entries)


def checks(spark: SparkSession, bookies: Bookies) -> DataFrame:
    """Return one row for each journal file, missing ones too, as `bkctl journal verify` prints it; one task a bookie.

    A start of the bookie replays the file from byte `replayFrom` (null: not at all); the other `replay…` columns count
    the replayed records. No replay reaches records behind a torn or damaged end (`sizeBehind`, `recordsBehind`).
    """
    if isinstance(bookies, Facts):
        return bookies.journal_checks(spark)
    return rows_in_tasks(spark, list(bookies), check_rows, _CHECKS)


def check_rows(bookie: BookieFiles) -> Iterator[dict[str, Any]]:
    """Yield the rows of `checks` for one bookie."""
    starts = replay_starts(bookie)
    for check in check_journals(bookie.directories):
        start = starts.get(str(check.path))
        row = _check_row(bookie.bookie_id, check)
        if start is not None and check.state not in (JournalState.MISSING, JournalState.UNREADABLE):
            row |= {"replayFrom": start, **_replay(check.path, start)}
        yield row


def _check_row(bookie_id: str, check: JournalCheck) -> dict[str, Any]:
    journal_id = check.journal_id
    return {
        "bookieId": bookie_id,
        "journalId": journal_id,
        "journalIdHex": None if journal_id is None else f"{journal_id:x}",
        "file": str(check.path),
        "version": check.version,
        "state": check.state.value,
        "size": check.size_bytes,
        "goodEnd": check.good_end,
        "mark": check.mark,
        "recordCount": check.record_count,
        "entryCount": check.entry_count,
        "replayRecordCount": 0,
        "replayEntryCount": 0,
        "replaySize": 0,
        "sizeBehind": check.behind.size_bytes,
        "recordsBehind": check.behind.record_count,
        "entriesBehind": check.behind.entry_count,
        "resumesAt": check.behind.resumes_at,
        "problem": check.problem,
        "damaged": check.error is not None,
    }


def _replay(path: Path, start: int) -> dict[str, int]:
    records = entries = size = 0
    with suppress(Corrupt, Unsupported, NotFound), JournalReader.open(path) as reader:
        for batch in reader.batches(start):
            records += len(batch)
            size += sum(batch.sizes) + 4 * len(batch)
            if batch.types is None or batch.types[0] is RecordType.ENTRY:
                entries += len(batch)
    return {"replayRecordCount": records, "replayEntryCount": entries, "replaySize": size}


def unlogged(
    spark: SparkSession,
    bookies: Bookies,
    connection: Mapping[str, str] | None = None,
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> DataFrame | None:
    """Return one row for each journaled entry that no entry log of its bookie holds: its last record in a journal.

    `replayed` entries reach an entry log at the next checkpoint or start. The others do not: their ledgers were
    deleted, or the bookie lost the entries. With `connection`, `state` tells these apart (alive, dead, unknown). None
    without a journal.
    """
    from pyspark.sql import functions as F

    entries = journal_entries(spark, bookies, ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    key = ("bookieId", QUALIFIED_NAME, "entryId")
    try:
        records = log_records(spark, bookies, [QUALIFIED_NAME, "entryId"], ledger=ledger, scope_id=scope_id)
        held = records.filter(F.col(DAMAGE).isNull()).select(*key)
        entries = entries.join(held, list(key), "left_anti")
    except NotFound:
        pass  # These bookies have not written an entry log yet.
    last = F.max(F.struct("replayed", "journalId", "offset", "file", "recordSize")).alias("last")
    found = entries.groupBy(*key).agg(last).select(*key, "last.*")
    if connection is not None:
        # A replayed entry is not a finding, whatever the state of its ledger.
        lost = found.filter(~F.col("replayed"))
        found = found.join(ledger_states(lost, connection).select(QUALIFIED_NAME, "state"), QUALIFIED_NAME, "left")
    else:
        found = found.withColumn("state", F.lit(None).cast("string"))
    return with_ledger_ids(found).orderBy("bookieId", QUALIFIED_NAME, "entryId")
