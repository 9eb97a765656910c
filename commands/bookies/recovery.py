"""The commands of `bkctl bookies` for bookies that are lost or leave: recover, decommission, drain, ok-to-stop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from bkctl.errors import BkctlError, Conflict, NotFound, TimedOut, UsageError
from bkctl.ids import LedgerId, check_bookie_id, parse_scope_id

from ..kit.command import Run, command, group
from ..kit.ledger_options import SOME_LEDGERS
from ..kit.options import (
    ByteRate,
    Composite,
    DryRun,
    WatchOption,
    count_option,
    duration_option,
    parameter,
    watch_option,
)
from ..kit.output import GREEN, RED, YELLOW, Activity, Column, Columns, Kind, Output, RowWriter, size_text

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.replication.bookies import LedgerMove, MovePlan, MoveProgress, PlannedFragment
    from bkctl.replication.departure import Decommission, Drain, Step
    from bkctl.replication.holdings import HeldFragment, HeldLedger, StopProblem
    from bkctl.replication.placement import Topology

app = group()

_GC_THRESHOLDS: Final = (20_000, 20, 100)
#: Between two looks at how far the work is.
_REFRESH_S: Final = 0.2


# --- options --------------------------------------------------------------------------------------------------------


def _some_ledgers(values: Mapping[str, Any]) -> list[LedgerId]:
    scope = None if values["ledger_scope_id"] is None else parse_scope_id(values["ledger_scope_id"])
    texts = values["some_ledgers"] or []
    if scope is not None and not texts:
        raise UsageError("--ledger-scope-id is for --ledger, and no ledger is given", hint="add --ledger LEDGER")
    return list(dict.fromkeys(LedgerId.parse(text, scope) for text in texts))


#: `--ledger`, repeatable; none given: an empty list.
SomeLedgers = Annotated[
    list[LedgerId],
    Composite(
        (
            SOME_LEDGERS,
            parameter(
                "ledger_scope_id",
                Annotated[
                    str, typer.Option("--ledger-scope-id", metavar="SCOPE", help="Ledger scope id of a bare --ledger.")
                ],
            ),
        ),
        _some_ledgers,
    ),
]


#: `--watch` of what comes to an end by itself.
ProgressOption = Annotated[
    float | None,
    watch_option("Print how far it is instead of each ledger that is moved; --watch=SECONDS so often (default 2)."),
]
SomeBookies = Annotated[list[str], typer.Argument(metavar="BOOKIE", help="The bookies.")]
OneBookie = Annotated[str, typer.Argument(metavar="BOOKIE", help="The bookie.")]
Deadline = Annotated[
    float | None,
    duration_option("--deadline", "Give up after this long (default: never; exit code 6). What was moved stays moved."),
]
SkipUnrecoverable = Annotated[
    bool,
    typer.Option(
        "--skip-unrecoverable", help="Name ledgers with entries that no bookie has, and go on as if all were well."
    ),
]


def _names(texts: Sequence[str]) -> list[str]:
    """The bookies that were named; Apache's shell takes them with commas between, so these may be too."""
    names = dict.fromkeys(name for text in texts for name in text.split(",") if name)
    if not names:
        raise UsageError("No bookie is named", hint="'bkctl bookies list' shows them")
    return [check_bookie_id(name) for name in names]


def _topology(run: Run) -> Topology | None:
    """The racks of bookies, where --conf names a script that tells them."""
    from bkctl.config import read_properties
    from bkctl.replication.placement import Topology

    script = None if run.conf is None else read_properties(run.conf).get("networkTopologyScriptFileName")
    return Topology(script) if script else None


# --- what goes on ---------------------------------------------------------------------------------------------------


def _time_text(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 90 else f"{hours:.1f} h"


def _progress_text(progress: MoveProgress) -> str:
    text = f"{size_text(int(progress.bytes_per_s))}/s"
    if progress.locked_count:
        text += f", {_counted(progress.locked_count, 'ledger', 'ledgers')} locked by others"
    left_s = progress.left_s
    return text if left_s is None else f"{text}, about {_time_text(left_s)} left"


@asynccontextmanager
async def _shown(activity: Activity, progress: MoveProgress) -> AsyncIterator[None]:
    """Keep the terminal's line about the work up to date."""
    import asyncio

    label = activity.label
    total = progress.plan.entry_count
    if total:  # Else all are open or empty, and are counted themselves.
        activity.unit = "entries"

    async def refresh() -> None:
        while True:
            if total:
                activity.update(min(progress.entry_count, total), total)
            else:
                activity.update(progress.ledger_count, len(progress.plan.ledgers))
            activity.label = f"{label}, {_progress_text(progress)}"
            await asyncio.sleep(_REFRESH_S)

    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _within(run: Run, work: Coroutine[Any, Any, None], deadline_s: float | None, what: str) -> None:
    """Run the work to its end, or until the deadline: TimedOut then."""
    import asyncio
    import gc

    async def bounded() -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await work
        except TimeoutError as error:
            raise TimedOut(
                f"{what} is not finished after {_time_text(deadline_s or 0)}", hint="run it again: it goes on"
            ) from error

    # Much is made and dropped for each ledger, and hardly anything of it in circles: looking for those less often takes
    # a tenth less time.
    thresholds = gc.get_threshold()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        run.complete(bounded())
    finally:
        gc.set_threshold(*thresholds)


def _entries(spans: Any) -> list[dict[str, int]] | None:
    return [
        {"firstEntryId": first, "lastEntryId": last, "entryCount": entry_count} for first, last, entry_count in spans
    ] or None


# --- recover --------------------------------------------------------------------------------------------------------


class FragmentRow(NamedTuple):
    """One fragment that is on the bookies, of --query and --dry-run; all but the ledger is None where that is all."""

    ledger: LedgerId
    state: str | None
    first_entry_id: int | None
    last_entry_id: int | None
    ensemble: tuple[str, ...] | None
    bookies: tuple[str, ...] | None
    entry_count: int | None
    new_ensemble: tuple[str, ...] | None = None
    closes: bool | None = None
    unreadable: Any = ()
    problem: str | None = None


def _fragment_columns(bookies: Sequence[str], *, planned: bool) -> Columns:
    """The columns of `--query`, and with `planned` those of `--dry-run`; the bookies' names are marked in ensembles."""

    def marked(ensemble: Sequence[str]) -> str:
        return ", ".join(f"{each}*" if each in bookies else each for each in ensemble)

    columns = [
        Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
        Column("STATE", "state", "state"),
        Column("FIRST ENTRY", "firstEntryId", "first_entry_id", Kind.INTEGER),
        Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER),
        Column("REPLICAS", "entryCount", "entry_count", Kind.INTEGER),
        Column("ENSEMBLE", "ensemble", "ensemble", Kind.NESTED, text=marked),
        Column(None, "bookies", "bookies", Kind.NESTED),
    ]
    if planned:
        columns += [
            Column("NEW ENSEMBLE", "newEnsemble", "new_ensemble", Kind.NESTED, text=", ".join),
            Column("CLOSED FIRST", "closesLedger", "closes", Kind.BOOLEAN, style={"yes": YELLOW}),
            Column(None, "unreadableEntries", lambda row: _entries(row.unreadable), Kind.NESTED, optional=True),
        ]
    return Columns(*columns, Column("PROBLEM", "problem", "problem"), key="ledger")


def _held_row(held: HeldLedger, fragment: HeldFragment, **more: Any) -> FragmentRow:
    return FragmentRow(
        held.ledger, held.metadata.state.name, fragment.first_entry_id, fragment.last_entry_id, fragment.ensemble,
        fragment.bookies, fragment.entry_count, **more,
    )  # fmt: skip


def _planned_row(planned: PlannedFragment | LedgerMove) -> FragmentRow:
    from bkctl.replication.bookies import PlannedFragment

    if not isinstance(planned, PlannedFragment):
        state = None if planned.state is None else planned.state.name
        return FragmentRow(planned.ledger, state, None, None, None, None, None, problem=planned.problem)
    return _held_row(
        planned.held, planned.fragment, new_ensemble=planned.new_ensemble if planned.targets else None,
        closes=planned.closes, unreadable=planned.unreadable, problem=planned.problem,
    )  # fmt: skip


def _move_columns(plan: MovePlan) -> Columns:
    """What is moved is printed as it comes: a table's widths are those that will be needed."""
    from bkctl.replication.bookies import MoveOutcome

    return Columns(
        Column("LEDGER".ljust(_ledger_width(plan)), "ledger", "ledger", Kind.LEDGER),
        Column("STATE".ljust(len("IN_RECOVERY")), "state", lambda row: row.state and row.state.name),
        Column(
            "OUTCOME".ljust(max(map(len, MoveOutcome))), "outcome", "outcome",
            style={"moved": GREEN, "gone": GREEN, "open": YELLOW, "unrecoverable": RED, "failed": RED},
        ),
        Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
        Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
        Column(None, "unreadableEntries", lambda row: _entries(row.unreadable), Kind.NESTED, optional=True),
        Column("PROBLEM", "problem", "problem"),
        key="ledger",
    )  # fmt: skip


def _ledger_width(plan: MovePlan) -> int:
    """How wide the names of its ledgers are in a table; those of scopes, which are longer, come last."""
    return max((len(str(each)) for each in (*plan.ledgers[-1:], *plan.damaged)), default=0)


@command(app, "recover", connects=True, asks=True, changes=True)
def recover(
    run: Run,
    bookies: SomeBookies,
    ledgers: SomeLedgers,
    rate: ByteRate,
    deadline: Deadline,
    query: Annotated[bool, typer.Option("--query", help="Only show what is on them, by the metadata.")] = False,
    skip_open: Annotated[bool, typer.Option("--skip-open", help="Leave ledgers alone that are OPEN.")] = False,
    skip_unrecoverable: SkipUnrecoverable = False,
    delete_cookie: Annotated[
        bool, typer.Option("--delete-cookie", help="Delete their cookies when nothing is left on them in any scope.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Note there what is done, and pass over what an earlier run noted; made if it is not there.",
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Copy what lost bookies hold to others, from its other replicas, for ledgers of every scope.

    Needs no auto-recovery. Ledgers that are not closed and have such a bookie in their last ensemble are fenced and
    closed first: their writers can add no more. A ledger of which entries are nowhere to be read is named, with them,
    and stays as it is; all others are moved nevertheless. Exit code 3: there were such, or some that failed.
    --dry-run shows each fragment with the ensemble that it would get, and asks the bookies which entries they have.
    """
    names = _names(bookies)
    if query and (dry_run or delete_cookie or resume is not None):
        raise UsageError("--query only shows", hint="drop it, or the other option")
    with run.cluster() as cluster:
        if query:
            _show_held(run, cluster, names, ledgers or None)
            return
        if dry_run:
            _show_plan(run, cluster, names, ledgers or None, skip_open, skip_unrecoverable)
            return
        from bkctl.replication.bookies import check_scopes_known, plan_move

        with run.working("Looking at the ledgers"):
            plan = plan_move(cluster, names, ledgers or None)
        up = [each for each in cluster.bookies.list(include_down=False) if each.bookie_id in names]
        if up and delete_cookie:
            raise Conflict(
                f"Bookie {up[0].bookie_id} is registered ({up[0].state}), and needs its cookie",
                hint="stop it first, or leave --delete-cookie out",
            )
        if delete_cookie:
            check_scopes_known(cluster)
        _check_known(cluster, names, plan)
        if plan.ledgers or delete_cookie:
            run.confirm(_loss(plan, names, up, skip_open=skip_open, delete_cookie=delete_cookie))
        _recover(run, cluster, names, plan, rate, deadline, skip_open, skip_unrecoverable, delete_cookie, resume)


def _check_known(cluster: Cluster, names: Sequence[str], plan: MovePlan) -> None:
    """Raises NotFound when nothing at all names one of the bookies: most likely it is misspelt."""
    if plan.ledgers or plan.damaged:
        return
    for name in names:
        if cluster.bookies.get(name) is None:
            raise NotFound(f"No bookie {name}, and no ledger names it", hint="'bkctl bookies list' shows them")


def _loss(
    plan: MovePlan, names: Sequence[str], up: Sequence[RegisteredBookie], *, skip_open: bool, delete_cookie: bool
) -> str:
    text = f"{_counted(len(plan.ledgers), 'ledger', 'ledgers')} on {', '.join(names)} would be copied to other bookies"
    if plan.size_bytes:
        text += f", about {size_text(plan.size_bytes)}"
    if plan.open_count and not skip_open:
        text += f"; of {plan.open_count:,} that are not closed, those with an end there would be closed"
    if up:
        text += f"; {', '.join(each.bookie_id for each in up)} {'is' if len(up) == 1 else 'are'} up"
    if delete_cookie:
        text += f"; {'its cookie' if len(names) == 1 else 'their cookies'} would be deleted"
    return text


def _show_held(run: Run, cluster: Cluster, names: Sequence[str], ids: list[LedgerId] | None) -> None:
    from bkctl.replication.holdings import ledgers_on

    count = damaged = 0

    def rows() -> Iterator[FragmentRow]:
        nonlocal count, damaged
        for ledger, held in ledgers_on(cluster, names, ids):
            count += 1
            if isinstance(held, BkctlError):
                if ids is not None:
                    raise held
                damaged += 1
                yield FragmentRow(ledger, None, None, None, None, None, None, problem=held.message)
            else:
                for fragment in held.fragments:
                    yield _held_row(held, fragment)

    with run.working("Looking at the ledgers"):
        run.render(rows(), _fragment_columns(names, planned=False))
    run.note(f"{_counted(count, 'ledger', 'ledgers')} on {', '.join(names)}" + (" (marked *)" if count else ""))
    run.finish_with(damaged, "ledgers name them in metadata that cannot be read")


def _show_plan(
    run: Run, cluster: Cluster, names: Sequence[str], ids: list[LedgerId] | None, skip_open: bool, skip: bool
) -> None:
    from bkctl.replication.bookies import BookieMover, MoveOutcome, PlannedFragment

    ledgers: set[LedgerId] = set()
    problems: set[LedgerId] = set()

    async def work(writer: RowWriter) -> None:
        async with run.bookkeeper(cluster) as bookkeeper:
            mover = BookieMover(bookkeeper, names, skip_open=skip_open, topology=_topology(run))
            async with aclosing(mover.planned(ids)) as planned:
                async for each in planned:
                    row = _planned_row(each)
                    writer.row(row)
                    ledgers.add(row.ledger)
                    passed_over = skip and isinstance(each, PlannedFragment) and each.unreadable
                    asked_for = not isinstance(each, PlannedFragment) and each.outcome is MoveOutcome.OPEN
                    if row.problem is not None and not passed_over and not asked_for:
                        problems.add(row.ledger)

    with run.working("Asking the bookies"), run.rows(_fragment_columns(names, planned=True)) as rows:
        run.complete(work(rows))
    run.note(f"{_counted(len(ledgers), 'ledger', 'ledgers')} on {', '.join(names)}; nothing was changed")
    run.finish_with(len(problems), "ledgers could not be moved" if len(problems) > 1 else "ledger could not be moved")


def _recover(
    run: Run,
    cluster: Cluster,
    names: Sequence[str],
    plan: MovePlan,
    rate: int | None,
    deadline_s: float | None,
    skip_open: bool,
    skip_unrecoverable: bool,
    delete_cookie: bool,
    resume: Path | None,
) -> None:
    from bkctl.replication.bookies import BookieMover, MoveOutcome
    from bkctl.replication.resume import ResumeFile

    outcomes: dict[MoveOutcome, int] = dict.fromkeys(MoveOutcome, 0)
    skipped: set[LedgerId] = set()
    kept = 0
    notes: list[str] = []

    async def work(writer: RowWriter) -> None:
        nonlocal kept
        async with run.bookkeeper(cluster) as bookkeeper:
            mover = BookieMover(
                bookkeeper, names, plan, rate=rate, skip_open=skip_open, topology=_topology(run), note=run.note
            )
            async with _shown(activity, mover.progress), aclosing(mover.move(plan.ledgers, resume=done)) as moves:
                async for move in moves:
                    writer.row(move)
                    outcomes[move.outcome] += 1
                    if move.outcome is MoveOutcome.UNRECOVERABLE and skip_unrecoverable:
                        skipped.add(move.ledger)
            if delete_cookie:
                kept = len({ledger for ledger, _ in await mover.left()} - skipped)
                if not kept:
                    notes.extend(f"The cookie of {name} is deleted" for name in await mover.delete_cookies())
            progress = mover.progress
            notes.insert(
                0,
                f"{outcomes[MoveOutcome.MOVED]:,} of {_counted(len(plan.ledgers), 'ledger', 'ledgers')} moved: "
                f"{_counted(progress.entry_count, 'entry', 'entries')}, {size_text(progress.size_bytes)}, "
                f"in {_time_text(progress.elapsed_s)}",
            )

    file = nullcontext() if resume is None else ResumeFile(resume, instance_id=cluster.instance_id(), bookies=names)
    with file as done, run.working("Recovering", total=len(plan.ledgers) or None, unit="ledgers") as activity:
        if done is not None and done.done:
            run.note(f"{resume}: {_counted(len(done.done), 'ledger was', 'ledgers were')} done before")
        with run.rows(_move_columns(plan)) as rows:
            _within(run, work(rows), deadline_s, "The recovery")
    for note in notes:
        run.note(note)
    for ledger, problem in plan.damaged.items():
        run.note(f"bkctl: Ledger {ledger} was passed over: {problem}")
    problems = []
    if outcomes[MoveOutcome.UNRECOVERABLE] > len(skipped):
        count = outcomes[MoveOutcome.UNRECOVERABLE] - len(skipped)
        problems.append(f"{_counted(count, 'ledger is', 'ledgers are')} unrecoverable")
    if outcomes[MoveOutcome.FAILED] or plan.damaged:
        count = outcomes[MoveOutcome.FAILED] + len(plan.damaged)
        problems.append(f"{_counted(count, 'ledger', 'ledgers')} could not be moved")
    if kept:
        problems.append(
            f"the {'cookie stays' if len(names) == 1 else 'cookies stay'}, for {_counted(kept, 'ledger', 'ledgers')} "
            f"still {'has' if kept == 1 else 'have'} entries there"
        )
    run.finish_with(len(problems), f"{'findings' if len(problems) > 1 else 'finding'}: {'; '.join(problems)}")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


# --- decommission, drain --------------------------------------------------------------------------------------------


class Moving(NamedTuple):
    """How far a decommission or a drain is: a row of --watch, beside the steps."""

    message: str
    entry_count: int
    size_bytes: int
    ledger_count: int
    ledgers_to_move: int
    bytes_per_second: int
    seconds_left: int | None
    kind: str = "progress"
    result: str = "moving"
    advice: str | None = None
    ledger: LedgerId | None = None
    unreadable: tuple[Any, ...] = ()


def _moving(progress: MoveProgress) -> Moving:
    total = len(progress.plan.ledgers)
    left_s = progress.left_s
    return Moving(
        f"{progress.ledger_count:,} of {_counted(total, 'ledger', 'ledgers')}, {100 * progress.share:.0f}%, "
        f"{_progress_text(progress)}",
        progress.entry_count, progress.size_bytes, progress.ledger_count, total, int(progress.bytes_per_s),
        None if left_s is None else round(left_s),
    )  # fmt: skip


def _of_progress(name: str) -> Any:
    return lambda row: getattr(row, name, None)


_RESULT_STYLE: Final = (
    dict.fromkeys(("ok", "moved", "gone", "deleted", "moving"), GREEN)
    | dict.fromkeys(("warning", "open", "skipped", "kept"), YELLOW)
    | dict.fromkeys(("blocked", "unrecoverable", "failed"), RED)
)
_STEP_WIDTH: Final = len("auto-recovery")
_LEDGER: Final = Column("LEDGER", "ledger", "ledger", Kind.LEDGER)


def _step_columns(run: Run, plan: MovePlan) -> Columns:
    """Steps are printed as they come, so a table's widths are those that will be needed."""
    step = Column("STEP".ljust(_STEP_WIDTH), "step", "kind")
    result = Column("RESULT".ljust(_STEP_WIDTH), "result", "result", style=_RESULT_STYLE)
    counts = (
        Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
    )
    if run.output is Output.TABLE:
        return Columns(
            step, result, Column("LEDGER".ljust(_ledger_width(plan)), "ledger", "ledger", Kind.LEDGER), *counts,
            Column("WHAT", "message", lambda row: f"{row.message}; {row.advice}" if row.advice else row.message),
            key=_LEDGER,
        )  # fmt: skip
    return Columns(
        step, result, _LEDGER, *counts,
        Column(None, "unreadableEntries", lambda row: _entries(row.unreadable), Kind.NESTED, optional=True),
        Column(None, "ledgersDone", _of_progress("ledger_count"), Kind.INTEGER, optional=True),
        Column(None, "ledgersToMove", _of_progress("ledgers_to_move"), Kind.INTEGER, optional=True),
        Column(None, "bytesPerSecond", _of_progress("bytes_per_second"), Kind.INTEGER, optional=True),
        Column(None, "secondsLeft", _of_progress("seconds_left"), Kind.INTEGER, optional=True),
        Column("WHAT", "message", "message"),
        Column("ADVICE", "advice", "advice"),
        key=_LEDGER,
    )  # fmt: skip


class _Steps:
    """Prints steps, and counts those that stand against it. `watched`: progress instead of what goes well."""

    def __init__(self, run: Run, writer: RowWriter, watch_s: float | None) -> None:
        self._run, self._writer, self._watch_s = run, writer, watch_s
        self.finding_count = 0

    def print(self, step: Step | Moving) -> None:
        if self._run.output is not Output.ID or step.ledger is not None:
            self._writer.row(step)

    def take(self, step: Step) -> None:
        from bkctl.replication.departure import STANDING_AGAINST, StepResult

        self.finding_count += step.result in STANDING_AGAINST
        if self._watch_s is None or step.result not in (StepResult.MOVED, StepResult.GONE):
            self.print(step)

    async def follow(self, steps: AsyncIterator[Step], progress: MoveProgress) -> None:
        """Print the steps as they come, and how far it is every so often."""
        import asyncio

        async def step_after() -> Step | None:
            return await anext(steps, None)

        due = time.monotonic()
        task = asyncio.create_task(step_after())
        try:
            while True:
                left_s = None if self._watch_s is None else max(due - time.monotonic(), 0)
                done, _ = await asyncio.wait([task], timeout=left_s)
                if done:
                    step = task.result()
                    if step is None:
                        return
                    self.take(step)
                    task = asyncio.create_task(step_after())
                else:
                    self.print(_moving(progress))
                    due = time.monotonic() + (self._watch_s or 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@contextmanager
def _steps(run: Run, plan: MovePlan, watch_s: float | None) -> Iterator[_Steps]:
    with run.rows(_step_columns(run, plan), live=True) as writer:
        yield _Steps(run, writer, watch_s)


async def _checked(departure: Decommission | Drain, steps: _Steps, *, probe: bool) -> None:
    async with aclosing(departure.check(probe=probe)) as found:
        async for step in found:
            steps.take(step)


def _plan(run: Run, cluster: Cluster, bookie: str) -> MovePlan:
    from bkctl.replication.bookies import plan_move

    with run.working("Looking at the ledgers"):
        return plan_move(cluster, [bookie])


@command(app, "decommission", connects=True, asks=True, changes=True)
def decommission(
    run: Run,
    bookie: OneBookie,
    rate: ByteRate,
    deadline: Deadline,
    watch: ProgressOption,
    skip_unrecoverable: SkipUnrecoverable = False,
    keep_cookie: Annotated[bool, typer.Option("--keep-cookie", help="Do not delete its cookie at the end.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Take a bookie that is stopped out of the cluster: copy all that it holds to others, then delete its cookie.

    Looks first whether it is stopped, auto-recovery is on, an auditor is there, and other bookies and space suffice.
    Ledgers of every scope are copied from their other replicas by this command itself, beside the workers of
    auto-recovery, if there are any. What cannot be moved is named, ledger by ledger, with the entries and why: exit
    code 3 then, the cookie stays, and the command may be run again once that is mended. --skip-unrecoverable gives up
    the entries that no bookie has; auto-recovery goes on trying for those ledgers until 'bkctl autorecovery unmark'.
    --dry-run asks the bookies which entries they have, and names what stands against it.
    """
    from bkctl.replication.departure import Decommission

    check_bookie_id(bookie)
    with run.cluster() as cluster:
        plan = _plan(run, cluster, bookie)
        with _steps(run, plan, watch) as steps:

            async def look() -> bool:
                async with run.bookkeeper(cluster) as bookkeeper:
                    departure = Decommission(
                        bookkeeper, bookie, plan, skip_unrecoverable=skip_unrecoverable, keep_cookie=keep_cookie
                    )
                    await _checked(departure, steps, probe=dry_run)
                    return departure.forbidden

            with run.working("Asking the bookies"):
                forbidden = run.complete(look())
            if not dry_run and not forbidden:
                kept = "" if keep_cookie else ", and its cookie deleted"
                run.confirm(f"{_loss(plan, [bookie], (), skip_open=False, delete_cookie=False)}{kept}")
                steps.finding_count = 0

                async def work() -> None:
                    async with run.bookkeeper(cluster) as bookkeeper:
                        departure = Decommission(
                            bookkeeper, bookie, plan, skip_unrecoverable=skip_unrecoverable, keep_cookie=keep_cookie,
                            rate=rate, topology=_topology(run), note=run.note,
                        )  # fmt: skip
                        progress = departure.mover.progress
                        async with _shown(activity, progress), aclosing(departure.run()) as found:
                            await steps.follow(found, progress)

                with run.working("Decommissioning", total=len(plan.ledgers) or None, unit="ledgers") as activity:
                    _within(run, work(), deadline, f"The decommission of {bookie}")
    what = f"{bookie} cannot be decommissioned" if dry_run or forbidden else f"{bookie} is not decommissioned"
    run.finish_with(steps.finding_count, f"{'findings' if steps.finding_count > 1 else 'finding'}: {what}")


@command(app, "drain", connects=True, asks=True, changes=True)
def drain(
    run: Run, bookie: OneBookie, rate: ByteRate, deadline: Deadline, watch: ProgressOption, dry_run: DryRun = False
) -> None:
    """Move all that a bookie holds to others while it still serves, so that it may be stopped without any risk.

    It is made read-only first, over its HTTP server; one that has none must be started with forceReadOnlyBookie=true.
    Then every replica on it is copied, in every scope, from it or from others. Ledgers that a writer is adding to stay
    until the writer leaves the bookie: exit code 3, and run it again. What was moved stays moved, so it goes on where
    it stopped. It stays read-only; 'bkctl bookie readonly off' ends that.
    """
    from bkctl.replication.departure import Drain

    check_bookie_id(bookie)
    with run.cluster() as cluster:
        plan = _plan(run, cluster, bookie)
        with _steps(run, plan, watch) as steps:

            async def look() -> None:
                async with run.bookkeeper(cluster) as bookkeeper:
                    await _checked(Drain(bookkeeper, bookie, plan), steps, probe=dry_run)

            with run.working("Asking the bookies"):
                run.complete(look())
            if not dry_run:
                run.confirm(
                    f"{bookie} would take no more entries, and "
                    + _loss(plan, [bookie], (), skip_open=True, delete_cookie=False)
                )
                steps.finding_count = 0

                async def work() -> None:
                    async with run.bookkeeper(cluster) as bookkeeper:
                        departure = Drain(
                            bookkeeper, bookie, plan, rate=rate, topology=_topology(run), note=run.note
                        )  # fmt: skip
                        steps.take(
                            await departure.set_read_only(lambda found: _set_read_only(run, found), run.timeout_s)
                        )
                        progress = departure.mover.progress
                        async with _shown(activity, progress), aclosing(departure.run()) as found:
                            await steps.follow(found, progress)

                with run.working("Draining", total=len(plan.ledgers) or None, unit="ledgers") as activity:
                    _within(run, work(), deadline, f"The drain of {bookie}")
    what = f"{bookie} cannot be drained" if dry_run else f"{bookie} is not drained"
    run.finish_with(steps.finding_count, f"{'findings' if steps.finding_count > 1 else 'finding'}: {what}")


def _set_read_only(run: Run, bookie: RegisteredBookie) -> None:
    """Have the bookie take no more entries, over its HTTP server."""
    from bkctl.http.client import BookieApi, bookie_url

    name = bookie.bookie_id
    try:
        url = bookie_url(bookie, run.bookie_addresses().get(name, (None, 0))[0])
    except NotFound as error:
        raise Conflict(
            f"Bookie {name} takes writes, and registered no HTTP server to be made read-only over",
            hint="start it again with httpServerEnabled=true or forceReadOnlyBookie=true, then drain it",
        ) from error
    if not BookieApi(run.http_client(url, is_registered=True)).set_read_only(True):
        raise Conflict(f"Bookie {name} is writable all the same", hint="start it again with forceReadOnlyBookie=true")


# --- ok-to-stop -----------------------------------------------------------------------------------------------------

RISK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", lambda row: row.state and row.state.name),
    Column(
        "RISK", "risk", "risk",
        style={"lost": RED, "unreadable": RED, "unwritable": YELLOW, "under-quorum": YELLOW},
    ),
    Column("FIRST ENTRY", "firstEntryId", "first_entry_id", Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("REPLICAS LEFT", "replicasLeft", "replica_count", Kind.INTEGER),
    Column("NEEDED", "replicasNeeded", "replica_count_min", Kind.INTEGER),
    Column("ON", "bookies", lambda row: list(row.bookies), Kind.NESTED, text=", ".join),
    Column("WHAT", "message", "message", flexible=True),
    key="ledger",
)  # fmt: skip


@command(app, "ok-to-stop", connects=True)
def ok_to_stop(
    run: Run,
    bookies: SomeBookies,
    watch: WatchOption,
    min_replicas: Annotated[
        int | None,
        count_option("--min-replicas", "Replicas of each entry that must stay (default: each ledger's ack quorum)."),
    ],
) -> None:
    """Say which ledgers would be lost, unwritable or under-replicated if these bookies stopped now. Exit code 3: some.

    By the metadata, for every scope: `lost` (no replica of some entries would be left), `under-quorum` (fewer replicas
    than the ledger's ack quorum, or --min-replicas), `unwritable` (its writer would find no bookie in their place).
    Replicas on bookies that are down, or that auto-recovery has marked as missing, do not count. For a short restart
    --min-replicas 1 is enough.
    """
    from bkctl.replication.holdings import ok_to_stop as problems_of

    names = _names(bookies)
    count = 0

    def look() -> Iterator[StopProblem]:
        nonlocal count
        count = 0
        for problem in problems_of(cluster, names, replica_count_min=min_replicas):
            count += 1
            yield problem

    with run.cluster() as cluster:
        for name in names:
            if cluster.bookies.get(name) is None:
                raise NotFound(f"No bookie {name}", hint="'bkctl bookies list' shows them")
        if watch is not None:
            run.watch(watch, look, RISK_COLUMNS, subscribe=cluster.bookies.watch)
        with run.working("Looking at the ledgers"):
            run.render(look(), RISK_COLUMNS)
        staying = sum(
            each.state == "rw" and each.bookie_id not in names for each in cluster.bookies.list(include_down=False)
        )
    who = f"{names[0]} may" if len(names) == 1 else f"These {len(names)} bookies may"
    left = _counted(staying, "writable bookie", "writable bookies")
    if not count:
        run.note(f"{who} stop; {left} would be left, and ledgers with larger ensembles could not be created")
    run.finish_with(count, f"{'findings' if count > 1 else 'finding'}: {who} not stop now")
