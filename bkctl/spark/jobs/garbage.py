"""The job `garbage`: a cluster's entry logs against its metadata, as every bookie's garbage collection compares them.

Dead bytes by log, what compaction frees, and the ledgers that nobody knows any more. What is dead is decided as for one
bookie (`metadata.liveness`): the store says so after the logs were read, and of scopes only where it has the right to.
Source: ScanAndCompareGarbageCollector, GarbageCollectorThread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from bkctl.checks.garbage import LedgerUse, LogUse, Thresholds
from bkctl.errors import BkctlError, NotFound, Unreachable
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.listing import log_contents
from bkctl.formats.entry_log import log_id_of
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.ids import LedgerId
from bkctl.metadata.liveness import Liveness
from bkctl.model import LedgerLiveness
from bkctl.spark.jobs.bookies import check_clusters, open_store
from bkctl.spark.jobs.inventory import NAME, with_ledger_ids

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles

_CONTENTS: Final = (
    "bookieId string, file string, logId bigint, scoped boolean, ledgerQualifiedName string, size bigint, "
    "fromLedgersMap boolean, complete boolean, reason string"
)
_STATES: Final = "ledgerQualifiedName string, state string, problem string, problemCode int"
_USES: Final = (
    "bookieId string, logId bigint, logIdHex string, scoped boolean, aliveCount bigint, deadCount bigint, "
    "unknownCount bigint, totalSize bigint, remainingSize bigint, garbageSize bigint, usage double, compaction string, "
    "reclaimableSize bigint, rewrittenSize bigint, fromLedgersMap boolean, complete boolean, file string, reason string"
)
_USUAL: Final = Thresholds()
#: Ledgers that one question to the metadata store is about.
_QUESTION_ROWS: Final = 10_000


def arrow_schema(schema: str) -> pa.Schema:
    """A schema of Spark's as Arrow has it; made on the driver, since tasks cannot read Spark's words."""
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import StructType

    return to_arrow_schema(cast("StructType", StructType.fromDDL(schema)))


def in_tasks(spark: SparkSession, items: Sequence[Any], function: Any, schema: str) -> DataFrame:
    """The rows (dicts) that `function` yields of each of `items`, one task an item; all are plain, picklable values."""
    count, arrow = len(items), arrow_schema(schema)

    def of_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                rows = list(function(items[number]))
                yield pa.RecordBatch.from_pylist(rows, schema=arrow)

    return spark.range(0, count, 1, max(count, 1)).mapInArrow(of_batches, schema)


def log_shares(spark: SparkSession, bookies: Sequence[BookieFiles]) -> DataFrame:
    """The ledgers of each log and their bytes, from its ledgers map, else by a scan.

    A log without ledgers has one row, whose ledger is null. `reason` says what is wrong with a log; where it is not
    `complete`, what stands before is counted. Logs that a bookie deletes meanwhile are left out. Raises NotFound where
    the bookies have no entry log.
    """
    logs = [(bookie.bookie_id, path) for bookie in bookies for path in bookie.entry_logs()]
    if not logs:
        raise NotFound("The bookies given have no entry logs")
    return in_tasks(spark, logs, _contents, _CONTENTS)


def _contents(log: tuple[str, str]) -> Iterator[dict[str, Any]]:
    bookie_id, name = log
    path = Path(name)
    row: dict[str, Any] = {
        "bookieId": bookie_id, "file": name, "logId": log_id_of(path.name),
        "scoped": path.parent.name == SCOPED_DIRECTORY, NAME: None, "size": 0, "fromLedgersMap": False,
        "complete": False, "reason": None,
    }  # fmt: skip
    try:
        with EntryLogReader.open(path) as reader:
            found = log_contents(reader)
    except NotFound:
        return
    except BkctlError as error:
        yield row | {"reason": str(error)}
        return
    row |= {"fromLedgersMap": found.from_map, "complete": found.complete}
    row["reason"] = None if found.error is None else str(found.error)
    if not found.sizes:
        yield row
    for ledger, size in found.sizes.items():
        yield row | {NAME: ledger.qualified_name, "size": size}


def ledger_states(ledgers: DataFrame, connection: Mapping[str, str]) -> DataFrame:
    """Whether each ledger in the column ledgerQualifiedName is alive, dead or unknown; then `problem` may say why.

    `problemCode` is the exit code that this stands for. A store that cannot be reached fails the job (Unreachable).
    `ledgers` must come of files, so that they are read before the metadata store is asked: what is created later is not
    taken for dead.
    """

    def ask(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        with open_store(connection) as cluster:
            liveness = Liveness(cluster.ledgers)
            for batch in batches:
                for part in range(0, batch.num_rows, _QUESTION_ROWS):
                    names = batch.column(0).slice(part, _QUESTION_ROWS).to_pylist()
                    by_name = {name: LedgerId.from_value(int(name, 16)) for name in names}
                    states = liveness.states(by_name.values())
                    for problem in liveness.problems:
                        if isinstance(problem, Unreachable):
                            raise problem
                    why = next(((str(each), each.exit_code) for each in liveness.problems), (None, None))
                    found = [states[by_name[name]] for name in names]
                    reasons = [why if each is LedgerLiveness.UNKNOWN else (None, None) for each in found]
                    yield pa.RecordBatch.from_arrays(
                        [
                            pa.array(names, pa.string()),
                            pa.array([each.value for each in found], pa.string()),
                            pa.array([text for text, _ in reasons], pa.string()),
                            pa.array([code for _, code in reasons], pa.int32()),
                        ],
                        names=[NAME, "state", "problem", "problemCode"],
                    )

    return ledgers.select(NAME).dropna().distinct().mapInArrow(ask, _STATES)


def garbage_shares(spark: SparkSession, bookies: Sequence[BookieFiles], connection: Mapping[str, str]) -> DataFrame:
    """`log_shares` with `state` (alive, dead, unknown; null for a log without ledgers) and `problem` of each ledger.

    Raises Conflict where a bookie belongs to another cluster.
    """
    from pyspark.sql import functions as F

    check_clusters(bookies, connection)
    # Kept, or the logs would be read once for the question and again for the answer, and say something else then.
    shares = log_shares(spark, bookies).persist()
    found = shares.join(ledger_states(shares, connection), NAME, "left")
    unknown = F.when(F.col(NAME).isNotNull(), LedgerLiveness.UNKNOWN.value)
    return found.withColumn("state", F.coalesce("state", unknown))


def uses(shares: DataFrame, thresholds: Thresholds = _USUAL) -> DataFrame:
    """What is left of each log of `garbage_shares`, and what compaction does about it; most garbage first.

    As `bkctl entrylog garbage` says it: `compaction` is delete, minor, major or null; `reclaimableSize` what that
    frees, `rewrittenSize` what it copies.
    """
    from pyspark.sql import functions as F

    def of(state: LedgerLiveness) -> tuple[Any, Any]:
        is_state = F.col("state") == state.value
        count = F.count(F.when(is_state, 1)).alias(f"{state.value}Count")
        return count, F.sum(F.when(is_state, F.col("size")).otherwise(0)).alias(f"{state.value}Size")

    columns = [column for state in LedgerLiveness for column in of(state)]
    reasons = F.first("reason", ignorenulls=True).alias("reason")
    logs = shares.groupBy("bookieId", "file", "logId", "scoped", "fromLedgersMap", "complete").agg(*columns, reasons)

    arrow = arrow_schema(_USES)

    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for batch in batches:
            rows = [_judge(row, thresholds) for row in batch.to_pylist()]
            yield pa.RecordBatch.from_pylist(rows, schema=arrow)

    return logs.mapInArrow(judge, _USES).orderBy(F.desc("garbageSize"), "bookieId", "scoped", "logId", "file")


def _judge(row: dict[str, Any], thresholds: Thresholds) -> dict[str, Any]:
    """One log's row, with what a bookie would do about it."""
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


def by_bookie(uses: DataFrame) -> DataFrame:
    """The sums of `uses` for each bookie, most garbage first."""
    from pyspark.sql import functions as F

    names = ("totalSize", "remainingSize", "garbageSize", "reclaimableSize", "rewrittenSize")
    logs = F.count("*").alias("logCount")
    compacted = F.count("compaction").alias("compactedCount")
    return uses.groupBy("bookieId").agg(logs, compacted, *(F.sum(name).alias(name) for name in names)).orderBy(
        F.desc("garbageSize"), "bookieId"
    )  # fmt: skip


def orphans(shares: DataFrame) -> DataFrame:
    """The ledgers in `garbage_shares` that the metadata store does not know: their bytes, bookies and logs."""
    from pyspark.sql import functions as F

    dead = shares.filter(F.col("state") == LedgerLiveness.DEAD.value)
    found = dead.groupBy(NAME).agg(
        F.countDistinct("bookieId").alias("bookieCount"),
        F.countDistinct("file").alias("logCount"),
        F.sum("size").alias("size"),
    )
    return with_ledger_ids(found).orderBy(F.desc("size"), NAME)
