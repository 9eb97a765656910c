"""The job `journal-audit`: what all bookies' journals hold that nothing else does.

What a crash now would replay; what lies behind a torn or damaged end, where no replay comes; entries that no entry log
of their bookie has. Source: Journal.replay, LastLogMark; `storage.journals` for one bookie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.journal import JournalReader
from bkctl.files.journal_check import JournalCheck, JournalState, check_journals
from bkctl.files.journals import files_after_marks
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.jobs.garbage import in_tasks, ledger_states
from bkctl.spark.jobs.inventory import NAME, log_records, of_ledgers, with_bookie, with_ledger_ids
from bkctl.spark.sources.columns import DAMAGE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles


class JournalAudit(NamedTuple):
    """What was found, as DataFrames that Spark keeps.

    `journals` are `checks` with unloggedCount, the entries of each that no entry log of the bookie holds; `unlogged`
    those entries: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, replayed, state, journalId, offset,
    recordSize, file.
    """

    journals: DataFrame
    unlogged: DataFrame

    def release(self) -> None:
        """Give back what Spark keeps for these DataFrames."""
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
    bookies: Sequence[BookieFiles],
    connection: Mapping[str, str] | None = None,
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> JournalAudit:
    """Look at all journals of the bookies, and for their entries in the entry logs.

    With `connection` (the options of `bookkeeper.metadata`) it is known which of those ledgers are alive. The filters
    are of entries; `checks` are of whole files. A file that ends in damage counts as far as it is good. Raises Conflict
    where a bookie belongs to another cluster.
    """
    from pyspark.sql import functions as F

    if connection is not None:
        check_clusters(bookies, connection)
    found = unlogged(spark, bookies, connection, ledger=ledger, scope_id=scope_id)
    entries = (spark.createDataFrame([], _UNLOGGED) if found is None else found).persist()
    counts = entries.groupBy("file").agg(F.count("*").alias("unloggedCount"))
    journals = checks(spark, bookies).join(counts, "file", "left").fillna(0, ["unloggedCount"])
    return JournalAudit(journals.orderBy("bookieId", "file").persist(), entries)


def replay_starts(bookie: BookieFiles) -> dict[str, int]:
    """The journal files that a start of the bookie replays → the byte to begin at (0: the file's beginning).

    Without any last mark that counts, all of every journal. Raises UsageError where several marks might count for one.
    """
    paths = [Path(each) for each in bookie.journals()]
    try:
        starts = files_after_marks(bookie.directories, paths)
    except UsageError:
        raise
    except BkctlError:
        starts = {path: 0 for path in paths if path.parent.name != SCOPED_DIRECTORY}
    return {str(path): start for path, start in starts.items()}


def checks(spark: SparkSession, bookies: Sequence[BookieFiles]) -> DataFrame:
    """A row for each journal file, and for each that is missing, as `bkctl journal verify` says it.

    `replayFrom` is where a start of the bookie begins to replay it (null: not at all), the `replay…` columns what that
    is. What lies behind the end of a torn or damaged journal (`sizeBehind`, `recordsBehind`) is in no replay. One task
    a bookie.
    """
    return in_tasks(spark, list(bookies), _check, _CHECKS)


def _check(bookie: BookieFiles) -> Iterator[dict[str, Any]]:
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


def journal_entries(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    columns: Sequence[str] = (),
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> DataFrame | None:
    """The entries in all journals: where they stand, whose they are, and whether they are `replayed`.

    `replayed`: a start of the bookie takes it from there, so that the bookie has it whatever its entry logs lack. An
    entry counts as often as it stands there. `columns` of `bookkeeper.journal` come too. None without any journal.
    """
    from pyspark.sql import functions as F

    places: dict[str, str] = {}
    starts: list[tuple[str, int | None]] = []
    for bookie in bookies:
        replayed_from = replay_starts(bookie)
        starts += [(path, replayed_from.get(path)) for path in bookie.journals()]
        places |= {each: bookie.bookie_id for each in bookie.journal_dirs if BookieDirectories([each]).journals()}
    if not places:
        return None
    wanted = dict.fromkeys(["file", "bookieId", "journalId", "offset", "recordSize", NAME, "entryId", *columns])
    chosen = {
        **of_ledgers(ledger, scope_id),
        "columns": ",".join(wanted),
        "mode": "permissive",
        "types": RecordType.ENTRY.value,
    }
    records = spark.read.format("bookkeeper.journal").options(**chosen).load(list(places))
    entries = with_bookie(records.filter(F.col(DAMAGE).isNull()).drop(DAMAGE), places)
    known = spark.createDataFrame([(*each, True) for each in starts], "file string, start bigint, known boolean")
    # A journal that the bookie began meanwhile is behind every mark.
    replayed = F.coalesce(F.col("offset") >= F.col("start"), F.col("known").isNull())
    return entries.join(F.broadcast(known), "file", "left").withColumn("replayed", replayed).drop("start", "known")


def unlogged(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    connection: Mapping[str, str] | None = None,
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> DataFrame | None:
    """The entries in journals that no entry log of their bookie holds, one row each: where a journal has it last.

    Those that are `replayed` wait for the next checkpoint, or for a start; the others come back by neither: their
    ledgers were deleted, or they are lost to this bookie. With `connection` `state` says which (alive, dead, unknown).
    None without any journal.
    """
    from pyspark.sql import functions as F

    entries = journal_entries(spark, bookies, ledger=ledger, scope_id=scope_id)
    if entries is None:
        return None
    key = ("bookieId", NAME, "entryId")
    try:
        records = log_records(spark, bookies, [NAME, "entryId"], ledger=ledger, scope_id=scope_id)
        held = records.filter(F.col(DAMAGE).isNull()).select(*key)
        entries = entries.join(held, list(key), "left_anti")
    except NotFound:
        pass  # A bookie that has written no entry log yet.
    last = F.max(F.struct("replayed", "journalId", "offset", "file", "recordSize")).alias("last")
    found = entries.groupBy(*key).agg(last).select(*key, "last.*")
    if connection is not None:
        # What is replayed needs no metadata to be in order.
        asked = found.filter(~F.col("replayed"))
        found = found.join(ledger_states(asked, connection).select(NAME, "state"), NAME, "left")
    else:
        found = found.withColumn("state", F.lit(None).cast("string"))
    return with_ledger_ids(found).orderBy("bookieId", NAME, "entryId")
