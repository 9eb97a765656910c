"""The records in all bookies' entry logs, indexes and journals as DataFrames, and rows that tasks make."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, FileKind
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.journals import files_after_marks
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, FrameT, JobSession, SessionOf, functions_of
from bkctl.spark.facts.frames import Facts
from bkctl.spark.sources.columns import DAMAGE, arrow_schema
from bkctl.spark.sources.places import bookie_id_at

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import BookieFiles, Bookies

QUALIFIED_NAME: Final = "ledgerQualifiedName"
#: One entry on one bookie.
REPLICA: Final = ("bookieId", QUALIFIED_NAME, "entryId")
_SLOTS_MAX: Final = 10_000


@dataclass(frozen=True)
class KeptFrames:
    """The results of a job, and the DataFrames that the engine keeps for them until `release`."""

    _persisted: tuple[Frame, ...]

    def release(self) -> None:
        """Free the memory of the kept DataFrames."""
        for frame in self._persisted:
            frame.unpersist()


def frame_of(spark: SessionOf[FrameT], rows: Iterable[Mapping[str, Any]], schema: str) -> FrameT:
    """Return rows of this process as a Frame; unlike `createDataFrame` of a list, it takes no job of tasks."""
    return spark.createDataFrame(pa.Table.from_pylist(list(rows), schema=arrow_schema(schema)), schema)


def task_slots(spark: JobSession) -> int:
    """Return how many tasks run at a time, Spark's default parallelism."""
    session: Any = spark
    if hasattr(session, "sparkContext"):
        return int(session.sparkContext.defaultParallelism)
    # A client of Spark Connect has no context. By default a range has as many partitions.
    from pyspark.sql.functions import spark_partition_id

    return int(session.range(_SLOTS_MAX).select(spark_partition_id()).distinct().count())


def map_rows(
    frame: Frame, function: Callable[[Iterator[list[dict[str, Any]]]], Iterable[list[dict[str, Any]]]], schema: str
) -> Frame:
    """Return the rows that `function` makes of `frame` in tasks, batch by batch."""
    arrow = arrow_schema(schema)

    def mapped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in function(batch.to_pylist() for batch in batches):
            yield pa.RecordBatch.from_pylist(rows, schema=arrow)

    return frame.mapInArrow(mapped, schema)


def rows_in_tasks(
    spark: JobSession, items: Sequence[Any], function: Callable[[Any], Iterable[dict[str, Any]]], schema: str
) -> Frame:
    """Return the rows that `function` yields for each item, one task an item; items are plain values."""
    numbers = spark.range(0, len(items), 1, max(len(items), 1))
    return map_rows(
        numbers, lambda batches: (list(function(items[row["id"]])) for rows in batches for row in rows), schema
    )


def with_ledger_ids(frame: Frame) -> Frame:
    """Return `frame` with ledgerScopeId and ledgerId, computed from ledgerQualifiedName, as its first columns."""
    F = functions_of(frame)
    scope_id = F.conv(F.substring(QUALIFIED_NAME, 1, 16), 16, 10).alias("ledgerScopeId")
    ledger_id = F.conv(F.substring(QUALIFIED_NAME, 17, 16), 16, 10).alias("ledgerId")
    return frame.select(
        scope_id, ledger_id, QUALIFIED_NAME, *(name for name in frame.columns if name != QUALIFIED_NAME)
    )


# --- borders of large files -------------------------------------------------------------------------------------------

#: Bytes between two borders.
PART_SIZE_BYTES: Final = 128 << 20
_BORDERS: Final = "file string, offset bigint"


def borders(spark: JobSession, files: Iterable[BookieFile], size_bytes: int = PART_SIZE_BYTES) -> dict[str, str]:
    """Return the option `borders` for entry logs or journals; no option where there are files for all cores.

    A file of less than two parts of `size_bytes` is not cut. Finding borders reads a file once more.
    """
    found = list(files)
    large = [(str(file.path), file.kind is FileKind.JOURNAL) for file in found if file.size >= 2 * size_bytes]
    if not large or len(found) >= task_slots(spark):
        return {}
    offsets: dict[str, list[int]] = {}
    for row in rows_in_tasks(spark, large, partial(find_borders, size_bytes), _BORDERS).collect():
        offsets.setdefault(row.file, []).append(row.offset)
    return {"borders": json.dumps({file: sorted(of_file) for file, of_file in offsets.items()})} if offsets else {}


def find_borders(size_bytes: int, file: tuple[str, bool]) -> Iterator[dict[str, Any]]:
    """Yield the borders of a file: records at least `size_bytes` apart, up to its first damage."""
    path, is_journal = file
    try:
        with JournalReader.open(path) if is_journal else EntryLogReader.open(path) as reader:
            border = None
            for batch in reader.batches():
                offsets = batch.offsets
                border = offsets[0] + size_bytes if border is None else border
                for offset in offsets if offsets[-1] >= border else ():
                    if offset >= border:
                        yield {"file": path, "offset": offset}
                        border = offset + size_bytes
    except BkctlError:
        return  # The task that reads the last part reports the damage.


# --- records ----------------------------------------------------------------------------------------------------------


def ledger_options(ledger: LedgerId | None, scope_id: int | None) -> dict[str, str]:
    """Return the options that limit a source to a ledger or scope; a filter on its rows would drop rows of damage."""
    if ledger is not None:
        return {"ledger": ledger.qualified_name}
    return {} if scope_id is None else {"ledgerScopeId": str(scope_id)}


def log_records(spark: JobSession, bookies: Bookies, columns: Sequence[str], **options: str) -> Frame:
    """Return `columns`, file, bookieId and `damage` of all records in entry logs; `options` are the source's own.

    A damaged log has one row with `damage` and no ledger, behind the records before the damage. Raises NotFound if the
    bookies have no entry log.
    """
    if isinstance(bookies, Facts):
        return bookies.log_records(spark, columns, **options)
    owners = {directory: bookie.bookie_id for bookie in bookies for directory in bookie.ledger_dirs}
    logs = {directory: BookieDirectories((), [directory]).entry_logs() for directory in owners}
    directories = [directory for directory, files in logs.items() if files]
    if not directories:
        raise NotFound("The bookies given have no entry logs")
    cuts = borders(spark, chain.from_iterable(logs.values()))
    # Directories instead of files: a running bookie may delete some files.
    used = {directory: owners[directory] for directory in directories}
    return _scan(spark, "entrylog", used, columns, {**options, **cuts})


def _scan(
    spark: JobSession, source: str, owners: Mapping[str, str], columns: Iterable[str], options: Mapping[str, str]
) -> Frame:
    """Return file, bookieId, `columns` and `damage` of the files in the directories of `owners`, by their bookies.

    The source takes bookieId from cookies; this corrects it where a cookie is missing or names another bookie.
    """
    F = functions_of(spark)
    wanted = {"columns": ",".join(dict.fromkeys(["file", "bookieId", *columns])), "mode": "permissive"}
    records = spark.read.format(f"bookkeeper.{source}").options(**options, **wanted).load(list(owners))
    owner = F.col("bookieId")
    for directory, bookie_id in owners.items():
        if bookie_id_at(Path(directory)) != bookie_id:
            owner = F.when(F.col("file").startswith(f"{directory}/"), F.lit(bookie_id)).otherwise(owner)
    return records.withColumn("bookieId", owner)


def index_entries(spark: JobSession, bookies: Bookies, **options: str) -> Frame | None:
    """Return file, bookieId, ledger, entryId, logId, offset and `damage` of all entries in indexes.

    A damaged file has one row with `damage` and no ledger. None without an index directory.
    """
    if isinstance(bookies, Facts):
        return bookies.index_entries(spark, **options)
    owners = {directory: bookie.bookie_id for bookie in bookies for directory in bookie.index_dirs}
    if not owners:
        return None
    return _scan(spark, "index", owners, (QUALIFIED_NAME, "entryId", "logId", "offset"), options)


def replay_starts(bookie: BookieFiles) -> dict[str, int]:
    """Return the journal files that a start of the bookie replays → the byte where it begins (0: the whole file).

    Without a valid last mark, these are all files of every journal. Raises UsageError if several marks could apply to
    one journal.
    """
    paths = [Path(path) for path in bookie.journals()]
    try:
        starts = files_after_marks(bookie.directories, paths)
    except UsageError:
        raise
    except BkctlError:
        starts = {path: 0 for path in paths if path.parent.name != SCOPED_DIRECTORY}
    return {str(path): start for path, start in starts.items()}


def journal_entries(spark: JobSession, bookies: Bookies, columns: Sequence[str], **options: str) -> Frame | None:
    """Return every entry record in all journals, with `columns` of the source and `replayed`; None without a journal.

    `replayed`: a start of the bookie replays this record, so the bookie has the entry even if no entry log does. An
    entry that was written twice has two rows.
    """
    F = functions_of(spark)
    if isinstance(bookies, Facts):
        return bookies.journal_entries(spark, columns, **options)
    owners: dict[str, str] = {}
    files: list[BookieFile] = []
    starts: list[tuple[str, int | None]] = []
    for bookie in bookies:
        replayed_from = replay_starts(bookie)
        starts += [(path, replayed_from.get(path)) for path in bookie.journals()]
        for directory in bookie.journal_dirs:
            if journals := BookieDirectories([directory]).journals():
                owners[directory] = bookie.bookie_id
                files += journals
    if not owners:
        return None
    place = ("journalId", "offset", "recordSize", QUALIFIED_NAME, "entryId")
    chosen = {**options, **borders(spark, files), "types": RecordType.ENTRY.value}
    records = _scan(spark, "journal", owners, [*place, *columns], chosen)
    entries = records.filter(F.col(DAMAGE).isNull()).drop(DAMAGE)
    # A journal that the bookie created after the listing is behind every mark.
    skipped = [path for path, start in starts if start is None]
    parts = {path: start for path, start in starts if start}
    replayed = ~F.col("file").isin(skipped)
    if parts:
        start = F.element_at(F.create_map(*(F.lit(word) for part in parts.items() for word in part)), F.col("file"))
        replayed = F.when(F.col("file").isin([*parts]), F.col("offset") >= start).otherwise(replayed)
    return entries.withColumn("replayed", replayed)
