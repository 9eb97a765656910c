"""`bkctl entrylog active` and `bkctl entrylog garbage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from bkctl.checks.garbage import LogUse, Thresholds, log_uses
from bkctl.columns import TEXTS, Column, Columns, Kind
from bkctl.errors import UsageError
from bkctl.model import LedgerLiveness

from ..kit.columns import PlainRow, with_hex
from ..kit.command import Run, command, group, rows_of
from ..kit.options import Composite, combined, flag, option
from ..kit.records import DirOption, collect_errors
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text
from .listing import (
    AllOption,
    LogNames,
    LogOrder,
    SortOption,
    file_column,
    find_all_logs,
    is_scoped,
    log_key,
    log_order,
    open_liveness,
    ratio_text,
)

if TYPE_CHECKING:
    from pathlib import Path

    from bkctl.metadata.liveness import Liveness

app = group()


#: Live ledgers of a log whose topics are named.
TOPICS_MAX = 5
STATE_STYLE = {"alive": GREEN, "dead": RED, "unknown": YELLOW}


ACTIVE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger.ledger", Kind.LEDGER),
    Column("STATE", "state", "ledger.state", style=STATE_STYLE),
    Column("BYTES", "size", "ledger.size_bytes", Kind.INTEGER),
    Column("TOPIC", "topic", "topic", flexible=True, spare=1),
    *with_hex("LOG", "logId", "log.log_id"),
    Column("FROM MAP", "fromLedgersMap", "log.from_map", Kind.BOOLEAN),
    Column(None, "complete", "log.complete", Kind.BOOLEAN),
    file_column(lambda row: row.log.path),
    key="ledger",
)


@command(app, "active", connects=True, prints=rows_of(ACTIVE_COLUMNS))
def active(
    run: Run,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    states: Annotated[
        list[LedgerLiveness] | None, flag("--state STATE", "Only ledgers that are alive, dead or unknown; repeatable.")
    ] = None,
) -> None:
    """Show which ledgers in entry logs are alive.

    A ledger is dead if it does not exist in the metadata store. It is unknown if the store could not be read (exit code
    6, or that of the error), or has no scopes tree of this cluster.

    $ bkctl entrylog active --conf bk_server.conf --state dead
    """
    paths = find_all_logs(run, names, directories, every)
    wanted = set(states or LedgerLiveness)
    with open_liveness(run, paths) as liveness, run.job.working("Reading entry logs"):
        rows = (
            (use, each)
            for use in collect_errors(log_uses(paths, liveness.states), run.errors)
            for each in use.ledgers
            if each.state in wanted
        )
        named = liveness.with_topics(rows, lambda row: row[1].ledger)
        run.out.render(
            (PlainRow(log=log, ledger=ledger, topic=topic) for (log, ledger), topic in named), ACTIVE_COLUMNS
        )


def _use_row(use: LogUse, limits: Thresholds, liveness: Liveness) -> PlainRow:
    """Return the live and dead bytes of a log, the compaction that it needs, if one, and the bytes that this frees.

    The topics are those that keep the log: of its largest live ledgers; None where no ledger is Pulsar's.
    """
    alive = [each for each in use.ledgers if each.state is LedgerLiveness.ALIVE]
    largest = sorted(alive, key=lambda each: -each.size_bytes)[:TOPICS_MAX]
    topics = dict.fromkeys(topic for _, topic in liveness.with_topics(largest, lambda each: each.ledger) if topic)
    compaction, freed = use.compaction(limits), use.reclaimable_size_bytes(limits)
    return PlainRow(use=use, compaction=compaction, reclaimable_size_bytes=freed, topics=list(topics) or None)


def _count_column(state: LedgerLiveness) -> Column:
    def count(row: PlainRow) -> int:
        return sum(each.state is state for each in row.use.ledgers)

    return Column(state.upper(), f"{state}Count", count, Kind.INTEGER, spare=1)


GARBAGE_COLUMNS = Columns(
    *with_hex("LOG", "logId", "use.log_id"),
    Column("SCOPED", "scoped", lambda row: is_scoped(row.use.path), Kind.BOOLEAN),
    *map(_count_column, LedgerLiveness),
    Column("TOTAL", "totalSize", "use.total_size_bytes", Kind.SIZE),
    Column("REMAINING", "remainingSize", "use.remaining_size_bytes", Kind.SIZE),
    Column("GARBAGE", "garbageSize", "use.garbage_size_bytes", Kind.SIZE),
    Column("USAGE", "usage", "use.usage", Kind.INTEGER, text=ratio_text),
    Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
    Column("TOPICS", "topics", "topics", Kind.NESTED, detail=True, shape=TEXTS, text=", ".join),
    Column(None, "reclaimableSize", "reclaimable_size_bytes", Kind.INTEGER),
    Column(None, "fromLedgersMap", "use.from_map", Kind.BOOLEAN),
    Column(None, "complete", "use.complete", Kind.BOOLEAN),
    file_column(lambda row: row.use.path),
    key=Column("LOG", "logId", lambda row: log_key(row.use.path)),
)


def _threshold(kind: str, default: float) -> Composite:
    flag = f"--{kind}-threshold"

    def ratio(text: str) -> float:
        with suppress(ValueError):
            if 0 <= (value := float(text)) <= 1:
                return value
        raise UsageError(f"{flag} {text}: not a ratio from 0 to 1")

    help = f"Usage below which {kind} compaction rewrites a log (default: that of --conf, else {default})."
    return option(f"{flag} RATIO", help, parse=ratio)


ThresholdOptions = Annotated[
    tuple[float | None, float | None],
    combined(lambda *thresholds: thresholds, _threshold("minor", 0.2), _threshold("major", 0.8)),
]


@command(app, "garbage", connects=True, prints=rows_of(GARBAGE_COLUMNS))
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    sort: SortOption = LogOrder.GARBAGE,
) -> None:
    """Show the garbage in entry logs, and what compaction does.

    Garbage: bytes of ledgers that no longer exist in the metadata store; ledgers of unknown state count as remaining.
    COMPACTION: delete (no live entries), minor, major, or none. Totals follow on stderr.

    $ bkctl entrylog garbage --conf bk_server.conf
    """
    order = log_order(run, sort)
    paths = find_all_logs(run, names, directories, every)
    limits = thresholds_of(run, thresholds)
    sums = _GarbageTotals()
    rows: Iterable[PlainRow]
    with open_liveness(run, paths) as liveness, run.job.working("Reading entry logs"):
        uses = collect_errors(log_uses(paths, liveness.states), run.errors)
        rows = sums.watch(_use_row(use, limits, liveness) for use in uses)
        if order is not LogOrder.ID:
            rows = sorted(rows, key=_USE_KEYS[order])
        run.out.render(rows, GARBAGE_COLUMNS)
    if sums.count:
        run.out.note(str(sums))


def _modified(row: PlainRow) -> float:
    path: Path = row.use.path
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


_USE_KEYS: dict[LogOrder, Callable[[PlainRow], float]] = {
    LogOrder.SIZE: lambda row: -row.use.total_size_bytes,
    LogOrder.GARBAGE: lambda row: -row.use.garbage_size_bytes,
    LogOrder.AGE: _modified,
}


def thresholds_of(run: Run, given: tuple[float | None, float | None]) -> Thresholds:
    """Return the thresholds given as options, else the thresholds of --conf, else Apache's defaults."""
    minor, major = given
    usual = Thresholds()
    if run.access.conf is not None:
        config = run.access.config()
        usual = Thresholds(config.minor_compaction_threshold, config.major_compaction_threshold)
    return Thresholds(usual.minor if minor is None else minor, usual.major if major is None else major)


class _GarbageTotals:
    """The totals of the rows of `garbage`."""

    def __init__(self) -> None:
        self.count = self.total = self.garbage = 0
        #: By compaction.
        self.logs, self.freed, self.rewritten = Counter[str](), Counter[str](), Counter[str]()

    def watch(self, rows: Iterable[PlainRow]) -> Iterator[PlainRow]:
        """Yield the rows, counted."""
        for row in rows:
            self.count += 1
            self.total += row.use.total_size_bytes
            self.garbage += row.use.garbage_size_bytes
            if row.compaction is not None:
                self.logs[row.compaction] += 1
                self.freed[row.compaction] += row.reclaimable_size_bytes
                self.rewritten[row.compaction] += row.use.remaining_size_bytes
            yield row

    def __str__(self) -> str:
        logs = counted(self.count, "log", "logs")
        parts = [f"{size_text(self.total)} of entries in {logs}, {size_text(self.garbage)} garbage"]
        for name, verb in (("delete", "deletion"), ("minor", "minor compaction"), ("major", "major compaction alone")):
            if name in self.logs:
                rewriting = f", rewriting {size_text(self.rewritten[name])}" if self.rewritten[name] else ""
                logs = counted(self.logs[name], "log", "logs")
                parts.append(f"{verb} of {logs} frees {size_text(self.freed[name])}{rewriting}")
        return "; ".join(parts)
