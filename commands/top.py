"""`bkctl top`: the load of a whole cluster, live on a terminal or once for scripts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import UsageError

from .kit.columns import Output, PlainRow
from .kit.command import Run, command, group, rows_of
from .kit.options import duration_option, flag
from .kit.texts import GREEN, RED, YELLOW, milliseconds

if TYPE_CHECKING:
    from bkctl.http.bookie_load import ClusterLoad, LoadWatch

app = group()

INTERVAL_S_MIN: Final = 0.1


def _read(path: str) -> Callable[[PlainRow], Any]:
    """Return a function row → the value at `path` in the bookie's reading; None without a reading."""
    read = value_at(f"load.reading.{path}")

    def value(row: PlainRow) -> Any:
        found = read(row)
        return round(found, 3) if isinstance(found, float) else found

    return value


def _latency(title: str | None, name: str, path: str) -> Column:
    return Column(title, name, _read(path), Kind.INTEGER, text=lambda ms: f"{milliseconds(ms)} ms")


#: Columns of a bookie's load, and the number of the cluster's under-replicated ledgers.
LOAD_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "load.bookie.bookie_id"),
    Column("STATE", "state", "load.bookie.state", style={"rw": GREEN, "ro": YELLOW, "down": RED}),
    Column("ADDS/S", "addsPerSecond", "load.per_second.adds", Kind.INTEGER, text="{:,.0f}".format),
    Column("READS/S", "readsPerSecond", "load.per_second.reads", Kind.INTEGER, text="{:,.0f}".format),
    Column(None, "addedBytesPerSecond", "load.per_second.added_bytes", Kind.INTEGER),
    Column(None, "readBytesPerSecond", "load.per_second.read_bytes", Kind.INTEGER),
    _latency(None, "addP50Ms", "add.p50_ms"),
    _latency(None, "addP95Ms", "add.p95_ms"),
    _latency("ADD P99", "addP99Ms", "add.p99_ms"),
    _latency(None, "addP999Ms", "add.p999_ms"),
    _latency(None, "readP50Ms", "read.p50_ms"),
    _latency(None, "readP95Ms", "read.p95_ms"),
    _latency("READ P99", "readP99Ms", "read.p99_ms"),
    _latency(None, "readP999Ms", "read.p999_ms"),
    _latency(None, "journalSyncP50Ms", "journal_sync.p50_ms"),
    _latency("SYNC P99", "journalSyncP99Ms", "journal_sync.p99_ms"),
    _latency(None, "journalQueueP99Ms", "journal_queue.p99_ms"),
    Column(None, "journalBytesPerSecond", "load.per_second.journal_bytes", Kind.INTEGER),
    Column(None, "journalWaitingEntries", _read("journal_waiting"), Kind.INTEGER),
    Column(None, "totalSpace", _read("disk.total"), Kind.SIZE),
    Column(None, "freeSpace", _read("disk.free"), Kind.SIZE),
    Column("USED %", "usedPercent", _read("disk.used_percent"), Kind.INTEGER, text=lambda percent: f"{percent:.1f}%"),
    Column("GC", "garbageCollection", _read("collection"), Kind.WORD),
    Column(None, "majorCompactionCount", _read("major_compactions"), Kind.INTEGER),
    Column(None, "minorCompactionCount", _read("minor_compactions"), Kind.INTEGER),
    Column(None, "reclaimedBytes", _read("reclaimed_bytes"), Kind.SIZE),
    Column("LEDGERS", "ledgerCount", _read("ledger_count"), Kind.INTEGER),
    Column("UNDERREPLICATED", "underreplicatedCount", "load.underreplicated_count", Kind.INTEGER),
    Column(None, "clusterUnderreplicatedCount", "underreplicated_count", Kind.INTEGER),
    Column("PROBLEM", "problem", "load.problem"),
    key="bookieId",
    none="No bookies",
)


@command(app, "top", connects=True, prints=rows_of(LOAD_COLUMNS))
def top(
    run: Run,
    interval_s: Annotated[
        float, duration_option("--interval", "The time between two looks: 500ms, 2s, 1m.", default="2s")
    ],
    once: Annotated[bool, flag("--once", "Print the numbers of one interval, and end.")] = False,
) -> None:
    """Show the load of the whole cluster, live.

    Shows for each bookie: adds and reads a second, latency percentiles, journal, disks, garbage collection, ledgers in
    memory (LEDGERS: few after a start) and under-replicated ledgers. Reads /metrics and the REST API of every bookie's
    HTTP server, found by its registration. The problem of a bookie says why numbers are missing. Apache's bookies have
    metrics only with statsProviderClass=…PrometheusMetricsProvider. Percentiles cover the last minute. Of
    under-replicated ledgers, up to 1,000 are counted.

    Keys: arrows select a bookie, Enter opens its page, Escape goes back, s and S choose the column to sort by, r
    reverses the order, / filters, q quits. --once prints the same numbers for scripts: two looks, one interval apart;
    with --bundle the recorded ones.

    $ bkctl top
    $ bkctl top --once -o json
    $ bkctl top --once --sort addsPerSecond
    """
    if interval_s < INTERVAL_S_MIN:
        raise UsageError(f"--interval: must be {INTERVAL_S_MIN:g} s or more")
    if once:
        _print_load(run, _load(run, interval_s))
        return
    if run.access.bundle is not None:
        raise UsageError(f"{run.access.bundle} is a bundle, of one moment", hint="add --once")
    if run.out.given_output is not Output.TABLE:
        raise UsageError(f"'bkctl top' has no end, and -o {run.out.given_output} is for scripts", hint="add --once")
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise UsageError(
            "'bkctl top' draws on a terminal, and stdin or stdout is not one that it can draw on", hint="add --once"
        )
    from .top_screen import show_live

    run.cluster.layout()
    show_live(load_watch(run), interval_s=interval_s, color=run.out.color)


def _print_load(run: Run, load: ClusterLoad) -> None:
    count = load.underreplicated_count
    run.out.render([PlainRow(load=each, underreplicated_count=count) for each in load.bookies], LOAD_COLUMNS)
    if count and run.out.output in (Output.TABLE, Output.WIDE):
        run.out.note(f"{load.underreplication}: 'bkctl autorecovery list' shows them")
    elif load.not_audited:
        run.out.note(f"Replication was {load.not_audited}")


def _load(run: Run, interval_s: float) -> ClusterLoad:
    if run.bundled is not None:
        return run.bundled.load()
    watch = load_watch(run)
    with run.job.working("Asking the bookies"):
        watch.look()
        time.sleep(interval_s)
        return watch.look()


def load_watch(run: Run) -> LoadWatch:
    """Return the watch of the load, which asks the bookies for a few seconds."""
    from bkctl.http.bookie_load import LoadWatch

    return LoadWatch(run.cluster, run.access.metrics_api, run.access.metrics_wait_s)
