"""`bkctl pipeline garbage`: dead bytes in all bookies' entry logs, and orphaned ledgers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.errors import BkctlError, Corrupt

from ..entrylog.garbage import ThresholdOptions, thresholds_of
from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run, command, group
from ..kit.texts import GREEN, counted, size_text
from .columns import BOOKIE, BOOKIES, FILE, LEDGER, LOG, LOGS, SIZE
from .common import (
    Places,
    SparkOptions,
    by_option,
    check_cluster,
    connection_options,
    read_bookies,
    read_job,
)
from .page import Bar, Section, Tables, bars, table, top_rows
from .results import raise_problems, sums_of, write_pages  # _problems, write_pages
from .saves import SaveOption, check_saves, frame_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies

app = group()


def _ratio(value: float) -> str:
    return f"{value:.1%}"


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
        Column("ALIVE", "aliveCount", "aliveCount", Kind.INTEGER),
        Column("DEAD", "deadCount", "deadCount", Kind.INTEGER),
        Column("UNKNOWN", "unknownCount", "unknownCount", Kind.INTEGER),
        *_USE,
        Column("USAGE", "usage", "usage", Kind.INTEGER, text=_ratio),
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


@command(app, "garbage", connects=True, examples=("bkctl pipeline garbage --by bookie",))
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
    check_saves(saves, GARBAGE_COLUMNS[by])
    connection = connection_options(run)
    bookies = read_bookies(run, places)
    limits = thresholds_of(run, thresholds)
    check_cluster(run)
    with read_job(run, spark, "garbage", saves, GARBAGE_COLUMNS[by]) as session:
        found = GarbageResult(session, bookies, connection, limits)
        frame_rows(run, found.rows(by), GARBAGE_COLUMNS[by], saves)
        run.note(f"bkctl: {found.summary()}")
        write_pages(run, saves, "Garbage", found.sections, bookies)
        problems = found.problems()
    raise_problems(run, problems)


class GarbageResult:
    """The garbage of some bookies, read once for rows and page."""

    def __init__(self, session: SparkSession, bookies: Bookies, connection: dict[str, str], thresholds: Any) -> None:
        from bkctl.spark.jobs.garbage import garbage_shares, uses

        self._shares = garbage_shares(session, bookies, connection).persist()
        self._uses = uses(self._shares, thresholds).persist()

    def rows(self, by: GarbageBy) -> DataFrame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.garbage import by_bookie, orphans

        if by is GarbageBy.LEDGER:
            return orphans(self._shares)
        return by_bookie(self._uses) if by is GarbageBy.BOOKIE else self._uses

    def summary(self) -> str:
        """Return the totals in one line."""
        sums = sums_of(self.rows(GarbageBy.BOOKIE).collect())
        orphans = counted(self.rows(GarbageBy.LEDGER).count(), "orphaned ledger", "orphaned ledgers")
        return (
            f"{size_text(sums.of('totalSize'))} of entries in {counted(sums.of('logCount'), 'log', 'logs')}, "
            f"{size_text(sums.of('garbageSize'))} garbage of {orphans}; "
            f"compaction of {counted(sums.of('compactedCount'), 'log', 'logs')} frees "
            f"{size_text(sums.of('reclaimableSize'))}, rewriting "
            f"{size_text(sums.of('rewrittenSize'))}"
        )

    def problems(self) -> list[BkctlError]:
        """Return why logs are incomplete or ledgers of unknown state."""
        from bkctl.spark import functions as F
        from bkctl.spark.failures import error_named

        damaged = self._shares.filter(F.col("reason").isNotNull()).select("reason").distinct().collect()
        unknown = (
            self._shares.filter(F.col("problem").isNotNull()).select("problem", "problemType").distinct().collect()
        )
        found: list[BkctlError] = [Corrupt(row.reason) for row in damaged]
        return found + [error_named(row.problemType, row.problem) or BkctlError(row.problem) for row in unknown]

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        return _sections({by.value: (self.rows(by), GARBAGE_COLUMNS[by]) for by in GarbageBy}, self.summary())


def _sections(tables: Tables, summary: str) -> list[Section]:
    """Return the section for `tables`, which the words of --by name."""
    names = (("remaining", "remainingSize"), ("garbage", "garbageSize"))

    def parts(row: Any) -> dict[str, int]:
        return {name: getattr(row, column) for name, column in names}

    bookies = [Bar(row.bookieId, parts(row)) for row in top_rows(tables["bookie"][0])]
    logs = [Bar(f"{row.bookieId} {_log_text(row)}", parts(row)) for row in top_rows(tables["entrylog"][0])]
    blocks = [
        bars("Remaining and dead bytes by bookie", bookies),
        table(*tables["bookie"]),
        bars("Logs with the most garbage", [each for each in logs if each.parts["garbage"]]),
        table(*tables["entrylog"]),
        "<h3>Orphaned ledgers</h3>",
        table(*tables["ledger"]),
    ]
    return [Section("Garbage", summary, blocks)]


def _log_text(row: Any) -> str:
    return ("scoped/" if row.scoped else "") + (Path(row.file).name if row.logIdHex is None else f"{row.logIdHex}.log")
