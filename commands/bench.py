"""`bkctl bench`: the rate and latency of adds and reads on a cluster."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError

from .kit import options
from .kit.columns import Output, PlainRow, fields
from .kit.command import Run, command, group, rows_of
from .kit.ledger_options import NewLedger, scope_option
from .kit.terminal import terminal_width
from .kit.texts import CYAN, RESET, counted
from .kit.values import refuse_both
from .ledger.entries import create_ledger

if TYPE_CHECKING:
    from bkctl.client.benchmark import Latencies, Load, LoadResult
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.read_handle import ReadHandle
    from bkctl.client.write_handle import WriteHandle
    from bkctl.ids import LedgerId

    from .kit.job import Activity

app = group()

#: Custom metadata of temporary ledgers, which finds the ones that a killed benchmark left.
MARK = {"application": b"bkctl-bench"}
#: Cells of the longest bar of the histogram, and of the rest of its line.
_BAR_WIDTH, _LINE_WIDTH = 40, 28


class Benchmark(NamedTuple):
    """The ledgers of a benchmark, the bytes of their entries, and the load."""

    ledger_count: int
    entry_size: int
    scope_id: int | None
    shape: options.LedgerShape
    load: Load
    protocol: Any
    in_random_order: bool = False


def _latency(title: str | None, name: str, percent: float) -> Column:
    def value(row: PlainRow) -> Any:
        return round(row.result.latencies.percentile_s(percent) * 1000, 3)

    return Column(title, name, value, Kind.INTEGER, text=_ms)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:,.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _histogram(row: PlainRow) -> list[dict[str, Any]]:
    return [
        {"upToMilliseconds": round(upper / 1000, 3), "count": count}
        for upper, count in row.result.latencies.buckets()
    ]  # fmt: skip


#: Columns of one operation of a benchmark: how it was run, and what came out.
BENCH_COLUMNS = Columns(
    Column("OPERATION", "operation", "operation"),
    Column("ENTRIES", "entryCount", "result.entry_count", Kind.INTEGER),
    Column("RATE", "entriesPerSecond", lambda row: round(row.result.entries_per_s), Kind.INTEGER,
           text=lambda rate: f"{rate:,}/s"),
    Column("MiB/S", "mebibytesPerSecond", lambda row: round(row.result.bytes_per_s / (1 << 20), 3), Kind.INTEGER,
           text=lambda rate: f"{rate:,.1f}"),
    _latency("P50", "p50Milliseconds", 50),
    _latency("P95", "p95Milliseconds", 95),
    _latency("P99", "p99Milliseconds", 99),
    _latency("P99.9", "p999Milliseconds", 99.9),
    _latency("MAX", "maxMilliseconds", 100),
    Column(None, "seconds", lambda row: round(row.result.elapsed_s, 3), Kind.INTEGER),
    Column(None, "entrySize", "bench.entry_size", Kind.SIZE),
    Column(None, "ledgerCount", "bench.ledger_count", Kind.INTEGER),
    *fields(Kind.INTEGER, "bench.load.", batchCount=None, inFlightCount=None),
    Column(None, "rateLimit", "bench.load.entries_per_s", Kind.INTEGER),
    *fields(Kind.INTEGER, "bench.shape.", ensembleSize=None, writeQuorumSize=None, ackQuorumSize=None),
    Column(None, "digestType", lambda row: row.bench.shape.digest_type.name),
    Column(None, "batches", "result.latencies.count", Kind.INTEGER),
    Column(None, "histogram", _histogram, Kind.NESTED),
    key="operation",
)  # fmt: skip


def _load(entry_count: int | None, *settings: Any) -> Load:
    from bkctl.client.benchmark import Load

    return Load(10_000 if entry_count is None else entry_count, *settings)


def _load_of_adds(entry_count: int | None, duration_s: float | None, *settings: Any) -> Load:
    refuse_both("--entries", entry_count, "--duration", duration_s)
    return _load(entry_count, duration_s, *settings)


def _options(load: Callable[..., Load], *more: Any) -> options.Composite:
    return options.combined(
        Benchmark,
        options.count_option("--ledgers", "Ledgers to use at the same time.", default=1),
        options.size_option("--size", "Bytes of an entry.", default="1KiB"),
        scope_option("Scope of the ledgers (default 0)."),
        options.LedgerShape,
        options.combined(
            load,
            options.count_option("--entries", "Entries in all ledgers together (default 10000)."),
            options.duration_option("--duration", "Run for this long, instead of for --entries."),
            options.count_option("--batch", "Entries to add or read at once; a latency is a batch's.", default=10),
            options.count_option("--in-flight", "Batches in flight for each ledger.", default=10),
            options.count_option("--rate", "At most this many entries a second."),
        ),
        options.ProtocolOption,
        *more,
    )


Adds = Annotated[Benchmark, _options(_load_of_adds)]
Reads = Annotated[
    Benchmark, _options(_load, options.option("--random", "Read at random positions instead of in order.", bool, False))
]


@command(app, "adds", connects=True, changes=True, prints=rows_of(BENCH_COLUMNS))
def adds(run: Run, bench: Adds) -> None:
    """Measure adds to temporary ledgers.

    Adds random entries, batch by batch, and deletes the ledgers. Prints the rate, percentiles of the time until a batch
    is acknowledged, and on a terminal a histogram. With --rate, the time counts from when a batch is due.

    $ bkctl bench adds
    $ bkctl bench adds --duration 5s --rate 500 --batch 1
    """
    _measure(run, bench, "adds")


@command(app, "reads", connects=True, changes=True, prints=rows_of(BENCH_COLUMNS))
def reads(run: Run, bench: Reads) -> None:
    """Measure reads from temporary ledgers.

    Writes --entries entries first, which is not measured, reads them batch by batch, and deletes the ledgers. With
    --duration, starts again after the last entry. Prints what 'bench adds' prints.

    $ bkctl bench reads
    $ bkctl bench reads --random --batch 1 --ledgers 4
    """
    _measure(run, bench, "reads")


@command(app, "mixed", connects=True, changes=True, prints=rows_of(BENCH_COLUMNS))
def mixed(run: Run, bench: Reads) -> None:
    """Measure adds and reads at the same time.

    Reads ledgers written before, as 'bench reads' does, while other ledgers are written as 'bench adds' does: --entries
    and --rate count for each of the two. Deletes the ledgers, and prints a row for adds and one for reads.

    $ bkctl bench mixed
    $ bkctl bench mixed --duration 5s --ledgers 2 -o json
    """
    _measure(run, bench, "adds", "reads")


def _measure(run: Run, bench: Benchmark, *operations: str) -> None:
    from bkctl.client.streams import check_entry_size

    check_entry_size(bench.entry_size, "--size")
    with run.job.working("Measuring", unit="entries") as activity:
        results = run.job.complete(_apply(run, bench, operations, activity))
    rows = [
        PlainRow(operation=name, result=result, bench=bench) for name, result in zip(operations, results, strict=True)
    ]
    run.out.render(rows, BENCH_COLUMNS)
    if run.out.output in (Output.TABLE, Output.WIDE) and sys.stdout.isatty():
        for row in rows:
            run.out.text(histogram_text(row.operation, row.result.latencies, color=run.out.color))


async def _apply(run: Run, bench: Benchmark, operations: Sequence[str], activity: Activity) -> list[LoadResult]:
    from bkctl.client.benchmark import add_entries, read_entries
    from bkctl.tasks import run_together

    load = bench.load
    async with run.access.bookkeeper(run.cluster, bench.protocol) as client, temporary_ledgers(run, client) as made:
        readers = await _written(client, made, bench) if "reads" in operations else []
        writers = await _create(client, made, bench) if "adds" in operations else []
        activity.update(0, load.entry_count * len(operations) if load.duration_s is None else None)
        loads = {
            "adds": lambda: add_entries(writers, bench.entry_size, load, activity.advance),
            "reads": lambda: read_entries(readers, load, activity.advance, in_random_order=bench.in_random_order),
        }
        return await run_together(loads[operation]() for operation in operations)


@contextlib.asynccontextmanager
async def temporary_ledgers(run: Run, bookkeeper: BookKeeper) -> AsyncIterator[list[LedgerId]]:
    """Yield a list for the ledgers that the block creates, and delete them at its end, also after an interrupt."""
    from bkctl.client.trials import not_deleted
    from bkctl.tasks import run_to_end

    made: list[LedgerId] = []

    async def delete() -> None:
        left: list[str] = []
        for ledger in made:
            try:
                await bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
            except BkctlError as error:
                left.append(not_deleted(ledger, error))
        if len(made) > len(left):
            run.out.note(f"Deleted {counted(len(made) - len(left), 'temporary ledger')}")
        run.out.error(*left)

    try:
        yield made
    finally:
        await run_to_end(delete())


async def _create(bookkeeper: BookKeeper, made: list[LedgerId], bench: Benchmark) -> list[WriteHandle]:
    writers = []
    for _ in range(bench.ledger_count):
        writers.append(await create_ledger(bookkeeper, NewLedger(None, bench.scope_id or 0), bench.shape, b"", MARK))
        made.append(writers[-1].ledger)
    return writers


async def _written(bookkeeper: BookKeeper, made: list[LedgerId], bench: Benchmark) -> list[ReadHandle]:
    """Return closed ledgers that hold the entries of the load, at least one each, opened for reading."""
    from bkctl.client.benchmark import add_entries

    share = -(-bench.load.entry_count // bench.ledger_count)
    load = bench.load._replace(entry_count=share, duration_s=None, entries_per_s=None)
    found = []
    for writer in await _create(bookkeeper, made, bench):
        await add_entries([writer], bench.entry_size, load)
        await writer.close()
        found.append(await bookkeeper.open_ledger(writer.ledger_id, ledger_scope_id=writer.scope_id))
    return found


def _step(microseconds: int) -> int:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below `microseconds`."""
    steps: Iterator[int] = (step * 10**power for power in count() for step in (1, 2, 5))
    return next(step for step in steps if microseconds <= step)


def histogram_text(title: str, latencies: Latencies, *, color: bool) -> str:
    """Return the histogram of the latencies of batches, one line for each step of 1, 2 and 5."""
    steps = [
        (step, sum(count for _, count in buckets))
        for step, buckets in groupby(latencies.buckets(), lambda bucket: _step(bucket[0]))
    ]
    most = max((count for _, count in steps), default=0)
    width = max(min(_BAR_WIDTH, terminal_width() - _LINE_WIDTH), 1)
    lines = [f"\nLatency of {title}, in batches:"]
    for step, size in steps:
        bar = "█" * max(round(size / most * width), 1)
        shown = f"{CYAN}{bar}{RESET}" if color else bar
        lines.append(f"  up to {_ms(step / 1000):>8}  {shown}{' ' * (width - len(bar))}  {size:,}")
    return "\n".join(lines) + "\n"
