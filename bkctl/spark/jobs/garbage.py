"""The job `garbage`: a cluster's entry logs against its metadata, as every bookie's garbage collection compares them.

It counts dead bytes by log, the bytes that compaction frees, and orphaned ledgers. The same rules apply to one bookie
(`metadata.liveness`): a ledger is dead if the metadata store lacks it after the logs were read.
Source: ScanAndCompareGarbageCollector, GarbageCollectorThread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.checks.garbage import LedgerUse, LogUse, Thresholds
from bkctl.errors import BkctlError, NotFound, Unreachable
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.formats.entry_log import log_id_of
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.ids import LedgerId
from bkctl.metadata.liveness import Liveness
from bkctl.model import LedgerLiveness
from bkctl.spark.engine import Frame, JobSession, functions_of
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, map_rows, rows_in_tasks, with_ledger_ids
from bkctl.spark.jobs.bookies import check_clusters, open_store
from bkctl.spark.sources.places import unseen

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import Bookies

_STATES: Final = f"{QUALIFIED_NAME} string, state string, problem string, problemType string"
#: Ledgers in one question to the metadata store.
_QUESTION_ROWS: Final = 10_000


def ledger_states(ledgers: Frame, connection: Mapping[str, str]) -> Frame:
    """Return `state` (alive, dead, unknown) of each ledger in the column ledgerQualifiedName.

    `problem` says why a state is unknown, and `problemType` is the class of that error. The rows of `ledgers` must come
    from files: files are read before the store is asked, so a ledger created later never counts as dead. A store that
    cannot be reached fails the job (Unreachable).
    """

    def states_of(batches: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        with open_store(connection) as cluster:
            liveness = Liveness(cluster.ledgers)
            for rows in batches:
                for part in range(0, len(rows), _QUESTION_ROWS):
                    names = [row[QUALIFIED_NAME] for row in rows[part : part + _QUESTION_ROWS]]
                    states = liveness.states([LedgerId.from_value(int(name, 16)) for name in names])
                    for problem in liveness.problems:
                        if isinstance(problem, Unreachable):
                            raise problem
                    reasons = [{"problem": str(each), "problemType": type(each).__name__} for each in liveness.problems]
                    unknown = reasons[0] if reasons else {}
                    yield [
                        {
                            QUALIFIED_NAME: name, "state": state.value,
                            **(unknown if state is LedgerLiveness.UNKNOWN else {}),
                        }
                        for name, state in zip(names, states.values(), strict=True)
                    ]  # fmt: skip

    return map_rows(ledgers.select(QUALIFIED_NAME).dropna().distinct(), states_of, _STATES)


_CONTENTS: Final = (
    "bookieId string, file string, logId bigint, scoped boolean, ledgerQualifiedName string, size bigint, "
    "fromLedgersMap boolean, complete boolean, reason string"
)
_USES: Final = (
    "bookieId string, logId bigint, logIdHex string, scoped boolean, aliveCount bigint, deadCount bigint, "
    "unknownCount bigint, totalSize bigint, remainingSize bigint, garbageSize bigint, usage double, compaction string, "
    "reclaimableSize bigint, rewrittenSize bigint, fromLedgersMap boolean, complete boolean, file string, reason string"
)
_DEFAULT_THRESHOLDS: Final = Thresholds()


def log_shares(spark: JobSession, bookies: Bookies) -> Frame:
    """Return the ledgers of each log and their bytes, from its ledgers map, else by a scan.

    A log without ledgers has one row, whose ledger is null. `reason` describes damage of a log; a log that is not
    `complete` counts up to its damage. Logs that a bookie deletes meanwhile are left out. Raises NotFound if the
    bookies have no entry log.
    """
    if isinstance(bookies, Facts):
        return bookies.log_shares(spark)
    logs = [(bookie.bookie_id, path) for bookie in bookies for path in bookie.entry_logs()]
    if not logs:
        raise NotFound("The bookies given have no entry logs")
    return rows_in_tasks(spark, logs, log_rows, _CONTENTS)


def log_rows(log: tuple[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of `log_shares` for one log: its bookie and path."""
    bookie_id, name = log
    path = Path(name)
    row: dict[str, Any] = {
        "bookieId": bookie_id, "file": name, "logId": log_id_of(path.name),
        "scoped": path.parent.name == SCOPED_DIRECTORY, QUALIFIED_NAME: None, "size": 0, "fromLedgersMap": False,
        "complete": False, "reason": None,
    }  # fmt: skip
    try:
        with EntryLogReader.open(path) as reader:
            found = log_contents(reader)
    except NotFound:
        if not path.parent.is_dir():
            raise unseen(path) from None
        return
    except BkctlError as error:
        yield row | {"reason": str(error)}
        return
    row |= {"fromLedgersMap": found.from_map, "complete": found.complete}
    row["reason"] = None if found.error is None else str(found.error)
    if not found.sizes:
        yield row
    for ledger, size in found.sizes.items():
        yield row | {QUALIFIED_NAME: ledger.qualified_name, "size": size}


def garbage_shares(spark: JobSession, bookies: Bookies, connection: Mapping[str, str]) -> Frame:
    """Return `log_shares` with `state` (alive, dead, unknown; null for a log without ledgers) and `problem`.

    Raises Conflict if a bookie belongs to another cluster.
    """
    F = functions_of(spark)
    check_clusters(bookies, connection)
    # Persisted: otherwise Spark reads the logs once for the question and again for the answer, and they may change.
    shares = log_shares(spark, bookies).persist()
    found = shares.join(ledger_states(shares, connection), QUALIFIED_NAME, "left")
    unknown = F.when(F.col(QUALIFIED_NAME).isNotNull(), LedgerLiveness.UNKNOWN.value)
    return found.withColumn("state", F.coalesce("state", unknown))


def uses(shares: Frame, thresholds: Thresholds = _DEFAULT_THRESHOLDS) -> Frame:
    """Return live and dead bytes of each log of `garbage_shares`, and its compaction; most garbage first.

    As in `bkctl entrylog garbage`: `compaction` is delete, minor, major or null; it frees `reclaimableSize` bytes and
    copies `rewrittenSize` bytes.
    """
    F = functions_of(shares)

    def of(state: LedgerLiveness) -> tuple[Any, Any]:
        is_state = F.col("state") == state.value
        count = F.count(F.when(is_state, 1)).alias(f"{state.value}Count")
        return count, F.sum(F.when(is_state, F.col("size")).otherwise(0)).alias(f"{state.value}Size")

    columns = [column for state in LedgerLiveness for column in of(state)]
    reasons = F.first("reason", ignorenulls=True).alias("reason")
    logs = shares.groupBy("bookieId", "file", "logId", "scoped", "fromLedgersMap", "complete").agg(*columns, reasons)
    judged = map_rows(logs, lambda batches: ([_judge(row, thresholds) for row in rows] for rows in batches), _USES)
    return judged.orderBy(F.desc("garbageSize"), "bookieId", "scoped", "logId", "file")


def _judge(row: dict[str, Any], thresholds: Thresholds) -> dict[str, Any]:
    """Return the row of one log with the compaction that a bookie would run."""
    sums = [LedgerUse(LedgerId(0, 0), row[f"{state.value}Size"], state) for state in LedgerLiveness]
    use = LogUse(Path(row["file"]), row["logId"], sums, row["fromLedgersMap"], row["complete"], None)
    compaction = use.compaction(thresholds)
    return {
        **row,
        "logIdHex": None if row["logId"] is None else f"{row['logId']:x}",
        "totalSize": use.total_size_bytes,
        "remainingSize": use.remaining_size_bytes,
        "garbageSize": use.garbage_size_bytes,
        "usage": use.usage,
        "compaction": None if compaction is None else compaction.value,
        "reclaimableSize": use.reclaimable_size_bytes(thresholds),
        "rewrittenSize": use.remaining_size_bytes if compaction is not None else 0,
    }


def by_bookie(uses: Frame) -> Frame:
    """Return the sums of `uses` for each bookie, most garbage first."""
    F = functions_of(uses)
    names = ("totalSize", "remainingSize", "garbageSize", "reclaimableSize", "rewrittenSize")
    logs = F.count("*").alias("logCount")
    compacted = F.count("compaction").alias("compactedCount")
    return uses.groupBy("bookieId").agg(logs, compacted, *(F.sum(name).alias(name) for name in names)).orderBy(
        F.desc("garbageSize"), "bookieId"
    )  # fmt: skip


def orphans(shares: Frame) -> Frame:
    """Return the ledgers in `garbage_shares` that the metadata store lacks: their bytes, bookies and logs."""
    F = functions_of(shares)
    dead = shares.filter(F.col("state") == LedgerLiveness.DEAD.value)
    found = dead.groupBy(QUALIFIED_NAME).agg(
        F.count_distinct("bookieId").alias("bookieCount"),
        F.count_distinct("bookieId", "file").alias("logCount"),
        F.sum("size").alias("size"),
    )
    return with_ledger_ids(found).orderBy(F.desc("size"), QUALIFIED_NAME)
