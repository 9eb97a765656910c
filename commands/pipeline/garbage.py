"""`bkctl pipeline garbage`: dead bytes in all bookies' entry logs, and orphaned ledgers."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Corrupt

from ..entrylog.garbage import ThresholdOptions, thresholds_of
from ..entrylog.logs import ratio_text
from ..kit.command import Run, command, group, rows_of
from ..kit.texts import GREEN, counted, size_text
from .columns import BOOKIE, BOOKIES, FILE, LEDGER, LOG, LOGS, SIZE, Sums, sums_of
from .common import Job, JobOptions, JobResult, Places, SparkOptions, by_option, show_result
from .page import Bar, Plot, Section, Table, table, top_rows
from .saves import SaveOption

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame

app = group()


class GarbageBy(StrEnum):
    """The words of `garbage --by`."""

    ENTRY_LOG = "entrylog"
    BOOKIE = "bookie"
    LEDGER = "ledger"


_USE = (
    Column("TOTAL", "totalSize", "totalSize", Kind.SIZE),
    Column("REMAINING", "remainingSize", "remainingSize", Kind.SIZE),
    Column("GARBAGE", "garbageSize", "garbageSize", Kind.SIZE),
)
GARBAGE_COLUMNS = {
    GarbageBy.ENTRY_LOG: Columns(
        BOOKIE,
        *LOG,
        Column("ALIVE", "aliveCount", "aliveCount", Kind.INTEGER, spare=1),
        Column("DEAD", "deadCount", "deadCount", Kind.INTEGER, spare=1),
        Column("UNKNOWN", "unknownCount", "unknownCount", Kind.INTEGER, spare=1),
        *_USE,
        Column("USAGE", "usage", "usage", Kind.INTEGER, text=ratio_text),
        Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
        Column(None, "reclaimableSize", "reclaimableSize", Kind.INTEGER),
        Column(None, "rewrittenSize", "rewrittenSize", Kind.INTEGER),
        Column(None, "fromLedgersMap", "fromLedgersMap", Kind.BOOLEAN),
        Column(None, "complete", "complete", Kind.BOOLEAN),
        FILE,
        key="file",
    ),
    GarbageBy.BOOKIE: Columns(
        BOOKIE,
        LOGS,
        Column("COMPACTED", "compactedCount", "compactedCount", Kind.INTEGER),
        *_USE,
        Column("FREED", "reclaimableSize", "reclaimableSize", Kind.SIZE),
        Column("REWRITTEN", "rewrittenSize", "rewrittenSize", Kind.SIZE),
        key="bookieId",
    ),
    GarbageBy.LEDGER: Columns(LEDGER, BOOKIES, LOGS, SIZE, key="ledger"),
}


@command(
    app,
    "garbage",
    connects=True,
    examples=("bkctl pipeline garbage --by bookie",),
    prints=rows_of(GARBAGE_COLUMNS),
)
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    spark: SparkOptions,
    places: Places,
    saves: SaveOption,
    by: Annotated[GarbageBy, by_option("A row for each entrylog, bookie, or orphaned ledger.")] = GarbageBy.ENTRY_LOG,
) -> None:
    """Show live and dead bytes in all bookies' entry logs.

    Also shows what compaction would free, and orphaned ledgers. Garbage: bytes of ledgers that no longer exist in the
    metadata store, as in 'entrylog garbage' for one bookie. Bytes of ledgers whose state is unknown remain. With --by
    ledger the rows are the dead ledgers.
    """
    options = JobOptions(run, spark, places, saves)
    limits = thresholds_of(run, thresholds)
    show_result(options, "garbage", by, GARBAGE_COLUMNS, partial(GarbageResult, thresholds=limits))


class GarbageResult(JobResult):
    """The garbage of some bookies, read once for rows and page."""

    def __init__(self, job: Job, *, thresholds: Any) -> None:
        from bkctl.spark.jobs.garbage import garbage_shares, uses

        assert job.connection is not None
        self._shares = garbage_shares(job.session, job.bookies, job.connection).persist()
        self._uses = uses(self._shares, thresholds).persist()

    def rows(self, by: GarbageBy) -> Frame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.garbage import by_bookie, orphans

        if by is GarbageBy.LEDGER:
            return orphans(self._shares)
        return by_bookie(self._uses) if by is GarbageBy.BOOKIE else self._uses

    def notes(self, shown: Sums) -> list[str]:
        """Return the totals in one line."""
        return [self.summary()]

    def summary(self) -> str:
        sums = sums_of(self.rows(GarbageBy.BOOKIE).collect())
        orphans = counted(self.rows(GarbageBy.LEDGER).count(), "orphaned ledger", "orphaned ledgers")
        return (
            f"{size_text(sums['totalSize'])} of entries in {counted(sums['logCount'], 'log', 'logs')}, "
            f"{size_text(sums['garbageSize'])} garbage of {orphans}; "
            f"compaction of {counted(sums['compactedCount'], 'log', 'logs')} frees "
            f"{size_text(sums['reclaimableSize'])}, rewriting "
            f"{size_text(sums['rewrittenSize'])}"
        )

    def problems(self) -> list[BkctlError]:
        """Return why logs are incomplete or ledgers of unknown state."""
        from bkctl.spark.failures import error_named

        damaged = self._shares.filter("reason IS NOT NULL").select("reason").distinct().collect()
        unknown = self._shares.filter("problem IS NOT NULL").select("problem", "problemType").distinct().collect()
        found: list[BkctlError] = [Corrupt(row.reason) for row in damaged]
        return found + [error_named(row.problemType, row.problem) or BkctlError(row.problem) for row in unknown]

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        tables = {by: (self.rows(by), GARBAGE_COLUMNS[by]) for by in GarbageBy}
        bookies, logs = tables[GarbageBy.BOOKIE], tables[GarbageBy.ENTRY_LOG]
        of_bookies = [Bar(row.bookieId, _parts(row)) for row in top_rows(bookies[0])]
        of_logs = [Bar(f"{row.bookieId} {_log_text(row)}", _parts(row)) for row in top_rows(logs[0])]
        blocks: list[Plot | Table] = [
            Plot("Remaining and dead bytes by bookie", of_bookies),
            table(*bookies),
            Plot("Logs with the most garbage", [each for each in of_logs if each.parts["garbage"]]),
            table(*logs),
            table(*tables[GarbageBy.LEDGER], title="Orphaned ledgers"),
        ]
        return [Section("Garbage", self.summary(), blocks)]


def _parts(row: Any) -> dict[str, int]:
    return {"remaining": row.remainingSize, "garbage": row.garbageSize}


def _log_text(row: Any) -> str:
    return ("scoped/" if row.scoped else "") + (Path(row.file).name if row.logIdHex is None else f"{row.logIdHex}.log")
