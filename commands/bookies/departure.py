"""`bkctl bookies recover`, `decommission`, `drain` and `ok-to-stop`: bookies that leave, and what moves off them."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from bkctl.columns import TEXTS, Column, Columns, Kind, some_of, value_at
from bkctl.errors import BkctlError, Conflict, TimedOut, Unreachable, UsageError
from bkctl.ids import LedgerId, LedgerIdSet, check_bookie_id

from ..kit.columns import Output, PlainRow, fields
from ..kit.command import Run, command, group, rows_of
from ..kit.job import Activity
from ..kit.ledger_options import LEDGERS_BY_OPTION, scope_option
from ..kit.options import CopyPace, WatchOption, combined, count_option, duration_option, flag, watch_option, word
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text, time_text
from ..kit.values import refuse_both
from .members import ManyBookies, OneBookie, bookie_ids, find_racks

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.formats.metadata import LedgerState
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.pace import Pace
    from bkctl.replication.departure import Decommission, Drain, Step
    from bkctl.replication.fragments import LedgerFragment
    from bkctl.replication.holdings import LedgerMove, MovePlan, MoveProgress, PlannedFragment

app = group()

T = TypeVar("T")


def _some_ledgers(texts: list[str] | None, scope: int | None) -> list[LedgerId]:
    if scope is not None and not texts:
        raise UsageError("--ledger-scope-id applies to --ledger, but no ledger is given", hint="add --ledger LEDGER")
    return list(dict.fromkeys(LedgerId.parse(text, scope) for text in texts or ()))


#: `--ledger`, repeatable; none given: an empty list.
LedgersByOption = Annotated[
    list[LedgerId], combined(_some_ledgers, LEDGERS_BY_OPTION, scope_option("Ledger scope id of a bare --ledger."))
]
#: `--watch` of commands that end by themselves.
ProgressOption = Annotated[
    float | None,
    watch_option("Print the progress instead of each ledger; --watch=SECONDS sets the interval (default 2)."),
]
Deadline = Annotated[
    float | None,
    duration_option(
        "--deadline", "Give up after this long (default: never; exit code 6). Ledgers that were moved stay moved."
    ),
]
SkipUnrecoverable = Annotated[
    bool,
    flag(
        "--skip-unrecoverable",
        "Report ledgers whose entries every other bookie answers to lack, without counting them as failures.",
    ),
]

#: Between two looks at how far the work is.
_REFRESH_S: Final = 0.2


def _speed_text(progress: MoveProgress) -> str:
    text = f"{size_text(int(progress.bytes_per_s))}/s"
    if progress.locked_count:
        text += f", {counted(progress.locked_count, 'ledger')} locked by others"
    return text


@asynccontextmanager
async def _repeating(seconds: float, act: Callable[[], object]) -> AsyncIterator[None]:
    """Call `act` at once, and again after each pause while the block runs. Raises its error at the end."""
    import asyncio

    async def repeat() -> None:
        while True:
            act()
            await asyncio.sleep(seconds)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(error, Exception):
            raise error


async def _take_moves(
    activity: Activity, progress: MoveProgress, moves: AsyncGenerator[T], take: Callable[[T], object]
) -> None:
    """Give each of `moves` to `take`, and update the line of progress on the terminal meanwhile."""
    total = progress.plan.entry_count
    if total:  # Else all are open or empty, and are counted themselves.
        activity.unit = "entries"

    def update() -> None:
        if total:
            activity.update(min(progress.entry_count, total), total)
        else:
            activity.update(progress.ledger_count, len(progress.plan.ledgers))
        activity.remark = _speed_text(progress)

    try:
        async with _repeating(_REFRESH_S, update), aclosing(moves) as found:
            async for move in found:
                take(move)
    finally:
        update()


@asynccontextmanager
async def _within(deadline_s: float | None, what: str, left: str = "run it again to continue") -> AsyncIterator[None]:
    """End the block at the deadline, and raise TimedOut."""
    import asyncio

    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise TimedOut(f"{what} is not finished after {time_text(deadline_s or 0)}", hint=left) from error


def _entry_spans(spans: Any) -> list[dict[str, int]] | None:
    return [
        {"firstEntryId": first, "lastEntryId": last, "entryCount": entry_count} for first, last, entry_count in spans
    ] or None


_UNREADABLE: Final = Column(
    None, "unreadableEntries", lambda row: _entry_spans(row.unreadable), Kind.NESTED, optional=True
)


def _ledger_width(plan: MovePlan) -> int:
    """Return the width of the plan's ledger names in a table; the names of scoped ledgers are longer, and come last."""
    last = [plan.ledgers[-1]] if plan.ledgers else []
    return max((len(str(each)) for each in (*last, *plan.damaged)), default=0)


def loss_text(
    plan: MovePlan, names: Sequence[str], up: Sequence[RegisteredBookie], *, skip_open: bool, delete_cookie: bool
) -> str:
    text = f"{counted(len(plan.ledgers), 'ledger')} on {', '.join(names)} would be copied to other bookies"
    if plan.size_bytes:
        text += f", about {size_text(plan.size_bytes)}"
    if plan.crowded:
        text += f"; {len(plan.crowded):,} of them cannot be moved, since too few other bookies are writable"
    if plan.open_count and not skip_open:
        text += f"; of {plan.open_count:,} that are not closed, those with an end there would be closed"
    if up:
        text += f"; {', '.join(each.bookie_id for each in up)} {'is' if len(up) == 1 else 'are'} up"
    if delete_cookie:
        text += f"; {'its cookie' if len(names) == 1 else 'their cookies'} would be deleted"
    return text


def _row(
    ledger: LedgerId, state: LedgerState | None, fragment: LedgerFragment | None, *,
    plan: PlannedFragment | None = None, problem: str | None = None,
) -> PlainRow:  # fmt: skip
    """Return a fragment on the bookies, for --query and --dry-run; no fragment: metadata that is unreadable."""
    return PlainRow(
        ledger=ledger, state=state and state.name, fragment=fragment, plan=plan, problem=problem,
        last_entry_id=fragment.last_entry_id if fragment is not None and fragment.closed else None,
        new_ensemble=plan.new_ensemble if plan is not None and plan.targets else None,
        unreadable=None if plan is None else _entry_spans(plan.unreadable),
    )  # fmt: skip


def fragment_columns(bookies: Sequence[str], *, planned: bool) -> Columns:
    """Return the columns of `--query`, or with `planned` of `--dry-run`; ensembles mark the names of the bookies."""

    def marked(ensemble: Sequence[str]) -> str:
        return ", ".join(f"{each}*" if each in bookies else each for each in ensemble)

    columns = [
        Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
        Column("STATE", "state", "state", spare=1),
        Column("FIRST ENTRY", "firstEntryId", value_at("fragment.first_entry_id"), Kind.INTEGER),
        Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER),
        Column("REPLICAS", "entryCount", value_at("fragment.held_count"), Kind.INTEGER),
        Column("ENSEMBLE", "ensemble", value_at("fragment.ensemble"), Kind.NESTED, shape=TEXTS, text=marked),
        Column(None, "bookies", value_at("fragment.bookies"), Kind.NESTED, shape=TEXTS),
    ]
    if planned:
        columns += [
            Column("NEW ENSEMBLE", "newEnsemble", "new_ensemble", Kind.NESTED, shape=TEXTS, text=", ".join),
            Column("CLOSED FIRST", "closesLedger", value_at("plan.closes"), Kind.BOOLEAN, style={"yes": YELLOW}),
            Column(None, "unreadableEntries", "unreadable", Kind.NESTED, optional=True),
        ]
    return Columns(*columns, Column("PROBLEM", "problem", "problem"), key="ledger")


def move_columns(plan: MovePlan | None = None) -> Columns:
    """Return columns as wide as later rows will need, since each moved ledger is printed at once."""
    from bkctl.replication.holdings import MoveOutcome

    return Columns(
        Column("LEDGER".ljust(_ledger_width(plan) if plan is not None else 0), "ledger", "ledger", Kind.LEDGER),
        Column("STATE".ljust(len("IN_RECOVERY")), "state", lambda row: row.state and row.state.name),
        Column(
            "OUTCOME".ljust(max(map(len, MoveOutcome))), "outcome", "outcome",
            style={"moved": GREEN, "gone": GREEN, "open": YELLOW, "unrecoverable": RED, "failed": RED},
        ),
        *fields(Kind.INTEGER, fragmentCount="FRAGMENTS", entryCount="ENTRIES"),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
        _UNREADABLE,
        Column("PROBLEM", "problem", "problem"),
        key="ledger",
    )  # fmt: skip


_PRINTED: Final = rows_of(fragment_columns((), planned=False), fragment_columns((), planned=True), move_columns)


@command(app, "recover", asks=True, unless="query", undo=True, dry_run=True, prints=_PRINTED)
def recover(
    run: Run,
    bookies: ManyBookies,
    ledgers: LedgersByOption,
    pace: CopyPace,
    deadline: Deadline,
    query: Annotated[bool, flag("--query", "Only show the ledgers on the bookies, from the metadata.")] = False,
    skip_open: Annotated[bool, flag("--skip-open", "Skip ledgers that are OPEN.")] = False,
    skip_unrecoverable: SkipUnrecoverable = False,
    delete_cookie: Annotated[
        bool, flag("--delete-cookie", "Delete the bookies' cookies once they hold no entries of any scope.")
    ] = False,
    resume: Annotated[
        Path | None,
        flag("--resume FILE", "Record finished ledgers in this file, and count what earlier runs did."),
    ] = None,
) -> None:
    """Copy the ledgers of lost bookies to other bookies.

    Copies from the remaining replicas, for ledgers of every scope. Needs no auto-recovery. Ledgers that are not closed
    and have a lost bookie in their last ensemble are fenced and closed first: their writers can add no more. A writer
    that left the lost bookies is not fenced; entries there that are not confirmed yet stay, and are reported. A ledger
    with entries that no bookie has is reported with them and left unchanged; all others are moved. It is unrecoverable
    only if every other bookie that should have them answers, and lacks them. Exit code 3 if any ledger was
    unrecoverable or failed, or stays. --dry-run shows each fragment with the ensemble that it would get, and asks the
    bookies which entries they have.

    $ bkctl bookies recover 10.0.0.1:3181 --query
    $ bkctl bookies recover 10.0.0.1:3181 --dry-run
    """
    names = bookie_ids(bookies)
    if query and (run.dry_run or delete_cookie or resume is not None):
        raise UsageError(
            "--query changes nothing, so --dry-run, --delete-cookie and --resume do not apply", hint="drop one of them"
        )
    if query:
        _show_held(run, names, ledgers or None)
    elif run.dry_run:
        _registered(run, names, skip_open=skip_open, delete_cookie=delete_cookie)
        _show_plan(run, names, ledgers or None, skip_open, skip_unrecoverable)
    else:
        _recover(
            run, names, ledgers or None, resume, pace=pace, deadline_s=deadline, skip_open=skip_open,
            skip_unrecoverable=skip_unrecoverable, delete_cookie=delete_cookie,
        )  # fmt: skip


def _agreed_plan(
    run: Run, names: Sequence[str], ids: list[LedgerId] | None, *, skip_open: bool, delete_cookie: bool
) -> MovePlan:
    """Return the ledgers to move, once the user agrees."""
    from bkctl.replication.holdings import check_known, plan_move

    silent = _silent(run, names)
    with run.job.working("Looking at the ledgers"):
        plan = plan_move(run.cluster, names, ids, silent=silent)
    up = _registered(run, names, skip_open=skip_open, delete_cookie=delete_cookie)
    if not (plan.ledgers or plan.damaged):
        check_known(run.cluster, names)
    if plan.ledgers or delete_cookie:
        run.consent.confirm(loss_text(plan, names, up, skip_open=skip_open, delete_cookie=delete_cookie))
    return plan


def _registered(run: Run, names: Sequence[str], *, skip_open: bool, delete_cookie: bool) -> list[RegisteredBookie]:
    """Return the named bookies that are up. With `delete_cookie`, raise Conflict if a cookie must stay."""
    from bkctl.replication.holdings import check_scopes_known

    up = [each for each in run.cluster.bookies.list(include_down=False) if each.bookie_id in names]
    if up and delete_cookie:
        raise Conflict(
            f"Bookie {up[0].bookie_id} is registered ({up[0].state}), and needs its cookie",
            hint="stop it first, or leave --delete-cookie out",
        )
    if delete_cookie:
        check_scopes_known(run.cluster)
    for name in () if skip_open else (each.bookie_id for each in up):
        drain = f"'bkctl bookies drain {name}' moves ledgers without that"
        run.out.note(f"{name} is still up: running writers are fenced; {drain}")
    return up


def _recover(
    run: Run, names: Sequence[str], ids: list[LedgerId] | None, resume: Path | None, *, pace: Pace,
    deadline_s: float | None, skip_open: bool, skip_unrecoverable: bool, delete_cookie: bool,
) -> None:  # fmt: skip
    """Move the ledgers once the user agrees. Ledgers that were not moved, and cookies that stay, are findings."""
    from bkctl.replication.bookie_mover import BookieMover
    from bkctl.replication.holdings import MoveOutcome
    from bkctl.replication.resume import ResumeFile

    plan = _agreed_plan(run, names, ids, skip_open=skip_open, delete_cookie=delete_cookie)
    outcomes, skipped = Counter[MoveOutcome](), set[LedgerId]()
    #: Ledgers with entries on bookies that keep their cookies.
    kept: set[LedgerId] = set()
    notes: list[str] = []

    def take(move: LedgerMove) -> None:
        writer.row(move)
        outcomes[move.outcome] += 1
        if move.outcome is MoveOutcome.UNRECOVERABLE and skip_unrecoverable:
            skipped.add(move.ledger)

    async def work() -> None:
        async with _within(deadline_s, "The recovery"), run.access.bookkeeper(run.recorded) as bookkeeper:
            mover = BookieMover(bookkeeper, names, plan, pace=pace, skip_open=skip_open, note=run.out.note)
            await _take_moves(activity, mover.progress, mover.move(plan.ledgers, resume=done), take)
            progress = mover.progress
            notes.append(
                f"{outcomes[MoveOutcome.MOVED]:,} of {counted(len(plan.ledgers), 'ledger')} moved: "
                f"{counted(progress.entry_count, 'entry')}, {size_text(progress.size_bytes)}, "
                f"in {time_text(progress.elapsed_s)}"
            )
            if delete_cookie:
                kept.update({ledger for ledger, _ in await mover.left()} - skipped)
                if not kept:
                    notes.extend([f"The cookie of {name} is deleted" for name in await mover.delete_cookies()])

    instance_id = run.cluster.instance_id()
    file = nullcontext() if resume is None else ResumeFile(resume, instance_id=instance_id, bookies=names)
    with (
        file as done,
        run.job.working(
            "Recovering", total=len(plan.ledgers) or None, unit="ledgers", pace=pace,
            left="moved ledgers stay moved: run the command again to continue",
        ) as activity,
    ):  # fmt: skip
        if done is not None and done.done:
            before = counted(len(done.done), "ledger was", "ledgers were")
            size = f"{counted(done.entry_count, 'entry')}, {size_text(done.size_bytes)}"
            again = sum(ledger in done.done for ledger in plan.ledgers)
            came = f"; {again:,} of them came back, and are moved again" if again else ""
            run.out.note(f"{resume}: {before} done before: {size}{came}")
        with run.out.rows(move_columns(plan)) as writer:
            run.job.complete(work())
    run.out.note(*notes)
    run.out.error(*(f"Ledger {ledger} was skipped: {problem}" for ledger, problem in plan.damaged.items()))
    unrecoverable = outcomes[MoveOutcome.UNRECOVERABLE] - len(skipped)
    failed = outcomes[MoveOutcome.FAILED] + len(plan.damaged) + (0 if skip_open else outcomes[MoveOutcome.OPEN])
    problems = []
    if unrecoverable:
        problems.append(f"{counted(unrecoverable, 'ledger is', 'ledgers are')} unrecoverable")
    if failed:
        problems.append(f"{counted(failed, 'ledger')} could not be moved")
    if kept:
        problems.append(
            f"the {'cookie stays' if len(names) == 1 else 'cookies stay'}, for "
            f"{counted(len(kept), 'ledger')} still {'has' if len(kept) == 1 else 'have'} entries there"
        )
    text = "; ".join(problems)
    run.out.finish_with(len(problems), f"finding: {text}", f"findings: {text}")


def _show_held(run: Run, names: Sequence[str], ids: list[LedgerId] | None) -> None:
    from bkctl.replication.holdings import check_known, ledgers_on

    count = damaged = 0

    def rows() -> Iterator[PlainRow]:
        nonlocal count, damaged
        for ledger, held in ledgers_on(run.cluster, names, ids):
            count += 1
            if isinstance(held, BkctlError):
                if ids is not None:
                    raise held
                damaged += 1
                yield _row(ledger, None, None, problem=held.message)
            else:
                yield from (_row(ledger, held.metadata.state, fragment) for fragment in held.fragments)
        if not count:
            check_known(run.cluster, names)

    with run.job.working("Looking at the ledgers"):
        run.out.render(rows(), fragment_columns(names, planned=False))
    run.out.note(f"{counted(count, 'ledger')} on {', '.join(names)}" + (" (marked *)" if count else ""))
    run.out.finish_with(
        damaged, "ledger on them has metadata that cannot be read", "ledgers on them have metadata that cannot be read"
    )


def _show_plan(run: Run, names: Sequence[str], ids: list[LedgerId] | None, skip_open: bool, skip: bool) -> None:
    from bkctl.replication.bookie_mover import BookieMover
    from bkctl.replication.holdings import MoveOutcome, MovePlan, PlannedFragment, check_known

    plan = MovePlan(silent=_silent(run, names))
    found, unmovable = LedgerIdSet(), LedgerIdSet()

    def take(each: PlannedFragment | LedgerMove) -> None:
        if isinstance(each, PlannedFragment):
            row = _row(each.held.ledger, each.held.metadata.state, each.fragment, plan=each, problem=each.problem)
            is_expected = skip and each.unreadable and each.lost
        else:
            row = _row(each.ledger, each.state, None, problem=each.problem)
            is_expected = skip_open and each.outcome is MoveOutcome.OPEN
        writer.row(row)
        found.add(row.ledger)
        if row.problem is not None and not is_expected:
            unmovable.add(row.ledger)

    with run.job.working("Asking the bookies"), run.out.rows(fragment_columns(names, planned=True)) as writer:
        run.job.take_each(
            run.access.bookkeeper(run.cluster),
            lambda bookkeeper: BookieMover(bookkeeper, names, plan, skip_open=skip_open).planned(ids), take,
        )  # fmt: skip
        if not found:
            check_known(run.cluster, names)
    run.out.note(f"{counted(len(found), 'ledger')} on {', '.join(names)}")
    run.out.finish_with(len(unmovable), "ledger could not be moved", "ledgers could not be moved")


def _moving(progress: MoveProgress) -> PlainRow:
    """Return the progress of a decommission or a drain: a row of --watch, beside the steps."""
    total, left_s = len(progress.plan.ledgers), progress.left_s
    message = f"{progress.ledger_count:,} of {counted(total, 'ledger')}, {100 * progress.share:.0f}%, "
    message += _speed_text(progress) + ("" if left_s is None else f", about {time_text(left_s)} left")
    return PlainRow(
        kind="progress", result="moving", message=message, advice=None, ledger=None, unreadable=(),
        entry_count=progress.entry_count, size_bytes=progress.size_bytes, ledger_count=progress.ledger_count,
        ledgers_to_move=total, bytes_per_second=int(progress.bytes_per_s),
        seconds_left=None if left_s is None else round(left_s),
    )  # fmt: skip


_RESULT_STYLE: Final = (
    dict.fromkeys(("ok", "moved", "gone", "deleted", "moving"), GREEN)
    | dict.fromkeys(("warning", "open", "skipped", "kept"), YELLOW)
    | dict.fromkeys(("blocked", "unrecoverable", "failed"), RED)
)
_STEP_WIDTH: Final = len("auto-recovery")
_LEDGER: Final = Column("LEDGER", "ledger", "ledger", Kind.LEDGER)

#: The steps of a departure but for tables, which have one column for message and advice.
STEP_COLUMNS = Columns(
    Column("STEP", "step", "kind"),
    Column("RESULT", "result", "result"),
    _LEDGER,
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    _UNREADABLE,
    Column(None, "ledgersDone", lambda row: getattr(row, "ledger_count", None), Kind.INTEGER, optional=True),
    Column(None, "ledgersToMove", lambda row: getattr(row, "ledgers_to_move", None), Kind.INTEGER, optional=True),
    Column(None, "bytesPerSecond", lambda row: getattr(row, "bytes_per_second", None), Kind.INTEGER, optional=True),
    Column(None, "secondsLeft", lambda row: getattr(row, "seconds_left", None), Kind.INTEGER, optional=True),
    *fields(Kind.TEXT, message="WHAT", advice="ADVICE"),
    key=_LEDGER,
)


def _step_columns(run: Run, plan: MovePlan) -> Columns:
    """Return columns as wide as later rows will need, since each step is printed at once.

    In a table, steps of ledgers are named by the ledger.
    """
    result = Column("RESULT".ljust(_STEP_WIDTH), "result", "result", style=_RESULT_STYLE)
    counts = (
        Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
    )
    if run.out.output is Output.TABLE:
        width = max(_STEP_WIDTH, _ledger_width(plan))
        return Columns(
            Column("STEP".ljust(width), "step", lambda row: row.kind if row.ledger is None else str(row.ledger)),
            result, *counts,
            Column("WHAT", "message", lambda row: f"{row.message}; {row.advice}" if row.advice else row.message),
            key=_LEDGER,
        ).with_hidden(STEP_COLUMNS)  # fmt: skip
    return STEP_COLUMNS


def _depart(
    run: Run, bookie: str, create: Callable[..., Decommission | Drain], texts: PlainRow,
    *, pace: Pace, deadline_s: float | None, watch_s: float | None,
) -> None:  # fmt: skip
    """Check a departure, which `create` returns for a BookKeeper, a bookie and a plan, and run it but in a dry run.

    Of its texts `left` describes the state that an interrupted one leaves.
    """
    from bkctl.replication.departure import BLOCKING_RESULTS, Drain, StepResult
    from bkctl.replication.holdings import plan_move

    check_bookie_id(bookie)
    silent = _silent(run, [bookie])
    with run.job.working("Looking at the ledgers"):
        plan = plan_move(run.cluster, [bookie], silent=silent)
    with run.out.rows(_step_columns(run, plan), live=True) as writer:
        finding_count = 0

        def print_step(step: Step | PlainRow) -> None:
            if run.out.output is not Output.ID or step.ledger is not None:
                writer.row(step)

        def take(step: Step) -> None:
            nonlocal finding_count
            finding_count += step.result in BLOCKING_RESULTS
            if watch_s is None or step.result not in (StepResult.MOVED, StepResult.GONE):
                print_step(step)  # Else progress stands for it.

        async def look(bookkeeper: BookKeeper) -> bool:
            departure = create(bookkeeper, bookie, plan)
            async with aclosing(departure.check(probe=run.dry_run)) as found:
                async for step in found:
                    take(step)
            return departure.forbidden

        async def set_read_only(bookkeeper: BookKeeper) -> Step:
            departure = Drain(bookkeeper, bookie, plan)
            return await departure.set_read_only(partial(_set_read_only, run), run.access.timeout_s)

        async def work() -> None:
            what = f"The {texts.noun} of {bookie}"
            async with _within(deadline_s, what, texts.left), run.access.bookkeeper(recorded) as bookkeeper:
                departure = create(bookkeeper, bookie, plan, pace=pace, note=run.out.note)
                progress = departure.mover.progress
                said = nullcontext() if watch_s is None else _repeating(watch_s, lambda: print_step(_moving(progress)))
                async with said:
                    await _take_moves(activity, progress, departure.run(), take)

        with run.job.working("Asking the bookies"):
            stays = run.job.ask(run.access.bookkeeper(run.cluster), look) or run.dry_run
        if not stays:
            run.consent.confirm(texts.question(plan))
            finding_count, recorded, total = 0, run.recorded, len(plan.ledgers) or None
            with run.job.working(texts.doing, total=total, unit="ledgers", pace=pace, left=texts.left) as activity:
                if create is Drain:
                    left = f"{bookie} may be read-only: run the command again to continue, or {_to_go_back(bookie)}"
                    with run.job.working(f"Making {bookie} read-only", left=left):
                        step = run.job.ask(run.access.bookkeeper(run.cluster), set_read_only)
                    take(step)
                run.job.complete(work())
    what = f"{bookie} {'cannot be' if stays else 'is not'} {texts.done}"
    run.out.finish_with(finding_count, f"finding: {what}", f"findings: {what}")


@command(app, "decommission", asks=True, undo=True, dry_run=True, prints=rows_of(STEP_COLUMNS))
def decommission(
    run: Run,
    bookie: OneBookie,
    pace: CopyPace,
    deadline: Deadline,
    watch: ProgressOption,
    skip_unrecoverable: SkipUnrecoverable = False,
    keep_cookie: Annotated[bool, flag("--keep-cookie", "Keep the bookie's cookie.")] = False,
) -> None:
    """Remove a stopped bookie from the cluster.

    Copies all that the bookie holds to other bookies, then deletes its cookie. First checks that the bookie is stopped,
    that auto-recovery is on with an auditor, and that the other bookies and their space suffice. The command itself
    copies ledgers of every scope from their other replicas, beside the workers of auto-recovery. Ledgers that cannot be
    moved are reported with the entries and the reason: exit code 3 then, the cookie stays, and the command can be run
    again. --skip-unrecoverable gives up the entries that are lost: every other bookie that should have them answers,
    and lacks them. Entries that cannot be read now, because a bookie is away, are never given up. Auto-recovery retries
    ledgers with lost entries until 'bkctl autorecovery unmark'. A ledger that another worker has locked waits for the
    lock, up to 10 minutes. --dry-run asks the bookies which entries they have, and reports what prevents the
    decommission.

    $ bkctl bookies decommission 10.0.0.1:3181 --dry-run
    """
    from bkctl.replication.departure import Decommission

    kept = "" if keep_cookie else ", and its cookie deleted"
    texts = PlainRow(
        noun="decommission", doing="Decommissioning", done="decommissioned",
        question=lambda plan: loss_text(plan, [bookie], (), skip_open=False, delete_cookie=False) + kept,
        left="moved ledgers stay moved: run the command again to continue, or start the bookie to go back, after "
        "'bkctl metadata undo' if its cookie is deleted",
    )  # fmt: skip
    create = partial(Decommission, skip_unrecoverable=skip_unrecoverable, keep_cookie=keep_cookie)
    _depart(run, bookie, create, texts, pace=pace, deadline_s=deadline, watch_s=watch)


@command(app, "drain", asks=True, undo=True, dry_run=True, prints=rows_of(STEP_COLUMNS))
def drain(run: Run, bookie: OneBookie, pace: CopyPace, deadline: Deadline, watch: ProgressOption) -> None:
    """Move all that a running bookie holds to other bookies.

    The bookie can be stopped without risk afterwards. The command first makes it read-only over its HTTP server; a
    bookie without one must be started with forceReadOnlyBookie=true. It then copies every replica on the bookie, in
    every scope. A ledger that is being written stays until its writer leaves the bookie: exit code 3 then; run the
    command again to continue. The bookie stays read-only until 'bkctl bookie readonly off'.

    $ bkctl bookies drain 10.0.0.1:3181 --dry-run
    """
    from bkctl.replication.departure import Drain

    begin = f"{bookie} would take no more entries, and "
    texts = PlainRow(
        noun="drain", doing="Draining", done="drained",
        question=lambda plan: begin + loss_text(plan, [bookie], (), skip_open=True, delete_cookie=False),
        left=f"{bookie} stays read-only, and moved ledgers stay moved: run the command again to continue, or "
        + _to_go_back(bookie),
    )  # fmt: skip
    _depart(run, bookie, Drain, texts, pace=pace, deadline_s=deadline, watch_s=watch)


def _to_go_back(bookie: str) -> str:
    return f"'bkctl bookie readonly off --bookie {bookie}' to go back"


def _set_read_only(run: Run, bookie: RegisteredBookie) -> None:
    if not run.access.bookie_api(bookie).set_read_only(True):
        hint = "start it again with forceReadOnlyBookie=true"
        raise Conflict(f"Bookie {bookie.bookie_id} is still writable", hint=hint)


RISK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", lambda row: row.state and row.state.name, spare=2),
    Column(
        "RISK", "risk", "risk",
        style={"lost": RED, "unreadable": RED, "unrecoverable": RED, "unwritable": YELLOW, "under-quorum": YELLOW},
    ),
    Column("FIRST ENTRY", "firstEntryId", "first_entry_id", Kind.INTEGER, spare=1),
    Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER, spare=1),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER, spare=1),
    Column("REPLICAS LEFT", "replicasLeft", "replica_count", Kind.INTEGER),
    Column("NEEDED", "replicasNeeded", "replica_count_min", Kind.INTEGER),
    Column("ON", "bookies", lambda row: list(row.bookies), Kind.NESTED, shape=TEXTS, text=", ".join),
    Column("WHAT", "message", "message"),
    key="ledger",
)  # fmt: skip

#: Bookies of a set that may stop together; `given`: the user named it.
TOGETHER_COLUMNS = Columns(
    *fields(Kind.TEXT, bookieId="BOOKIE", rack="RACK"), Column("GIVEN", "given", "given", Kind.BOOLEAN), key="bookieId"
)


@command(app, "ok-to-stop", connects=True, prints=rows_of(RISK_COLUMNS, TOGETHER_COLUMNS))
def show_stop_risks(
    run: Run,
    watch: WatchOption,
    min_replicas: Annotated[
        int | None,
        count_option("--min-replicas", "Replicas of each entry that must remain (default 1; --for-good: ack quorum)."),
    ],
    bookies: Annotated[list[str] | None, word("BOOKIE", "The bookies; with --max also none.")] = None,
    for_good: Annotated[
        bool, flag("--for-good", "Ask about bookies that would not return, rather than a restart.")
    ] = False,
    largest: Annotated[
        bool, flag("--max", "List the most bookies that may stop together with these, one rack's first.")
    ] = False,
) -> None:
    """Show which ledgers would suffer if bookies stopped now.

    Answers for a restart: every ledger must stay readable and writable. With --for-good also the ack quorum of replicas
    of each entry must remain. Reads the metadata of every scope. The risks: `lost` (no replica of some entries would
    remain), `unrecoverable` (a ledger that is not closed could be neither opened nor recovered: of each write set of
    its last ensemble, write quorum - ack quorum + 1 bookies must answer), `unwritable` (the writer would find no
    replacement), `under-quorum` (fewer replicas than --min-replicas, or than the ledger's ack quorum with --for-good).
    Asks the other registered bookies. Replicas on bookies that are down, that do not answer within 5 seconds, or that
    auto-recovery has marked as missing, do not count. Exit code 3 if there are any such ledgers.

    With --max, adds bookies as long as every ledger stays as required and one writable bookie remains: the steps of a
    rolling restart. If the given bookies may not stop, shows the risks.

    $ bkctl bookies ok-to-stop 10.0.0.1:3181
    $ bkctl bookies ok-to-stop 10.0.0.1:3181 --for-good
    $ bkctl bookies ok-to-stop --max -o id
    """
    from bkctl.replication.holdings import check_known, ok_to_stop

    refuse_both("--max", largest, "--watch", watch)
    names = bookie_ids(bookies or ()) if bookies or not largest else []
    restarts = not for_good and min_replicas is None
    check_known(run.cluster, names)
    under_quorum = set[LedgerId]() if restarts else None
    look = partial(ok_to_stop, run.cluster, names, replica_count_min=min_replicas, under_quorum=under_quorum)
    if watch is not None:
        note = cache(run.out.note)  # says each text once
        run.out.watch(
            watch, lambda: look(silent=_silent(run, names, note)), RISK_COLUMNS, subscribe=run.cluster.bookies.watch,
            key=attrgetter("ledger", "risk", "first_entry_id"),
        )  # fmt: skip
    silent = _silent(run, names)
    if largest and _show_together(run, names, 1 if restarts else min_replicas, silent):
        return
    with run.job.working("Looking at the ledgers"):
        count = run.out.render(look(silent=silent), RISK_COLUMNS, findings=True)
    who = names[0] if len(names) == 1 else f"These {len(names)} bookies"
    if not count:
        run.out.note(f"{who} may {'restart' if restarts else 'stop'}; {_remaining_text(run, names, silent)}")
    if under_quorum:
        run.out.note(
            f"Not for good: {counted(len(under_quorum), 'ledger')} would have fewer replicas than the "
            "ack quorum; --for-good lists them, and 'bkctl bookies drain' copies them first"
        )
    run.out.finish_with(count, f"finding: {who} may not stop now", f"findings: {who} may not stop now")


def _silent(run: Run, leaving: Collection[str], note: Callable[[str], None] | None = None) -> list[str]:
    """Return the registered bookies but `leaving` that do not answer, and note them. A bundle has none."""
    if run.bundled is not None:
        return []
    from bkctl.client.disk_space import WAIT_S, BookieSpace, disk_space
    from bkctl.replication.holdings import bookies_up

    found, ask = list[BookieSpace](), partial(disk_space, bookies=bookies_up(run.cluster, leaving), wait_s=WAIT_S)
    with run.job.working("Asking the bookies"):
        run.job.take_each(run.access.bookkeeper(run.cluster), ask, found.append)
    problems = {each.bookie.bookie_id: each.error.message for each in found if isinstance(each.error, Unreachable)}
    if problems:
        what = "registered bookie does not answer, and counts", "registered bookies do not answer, and count"
        (note or run.out.note)(f"{counted(len(problems), *what)} as down: {some_of([*problems.values()])}")
    return [*problems]


def _remaining_text(run: Run, leaving: Collection[str], silent: Collection[str]) -> str:
    """Return the state of the cluster without the bookies `leaving` and `silent`."""
    from bkctl.replication.holdings import bookies_up

    left = sum(each.state == "rw" for each in bookies_up(run.cluster, {*leaving, *silent}))
    return f"{counted(left, 'writable bookie')} would remain, and ledgers with larger ensembles could not be created"


def _show_together(run: Run, names: list[str], replica_count_min: int | None, silent: Collection[str]) -> bool:
    """Print the largest set with `names` in it that may stop; False if they may not, which needs their risks.

    Raises FindingsError if no name is given, and no bookie may stop.
    """
    from bkctl.replication.holdings import StopSets

    bookies = run.cluster.bookies.list()
    racks = find_racks(run, bookies)
    with run.job.working("Looking at the ledgers"):
        found = StopSets(run.cluster, replica_count_min=replica_count_min, silent=silent).largest(names, racks)
    if names and not found:
        return False
    rows = (PlainRow(bookie_id=name, rack=racks.get(name), given=name in names) for name in found)
    run.out.render(rows, TOGETHER_COLUMNS, findings=True)
    run.out.finish_with(not found, "finding: no bookie may stop now", "")
    together = f"{counted(len(found), 'bookie')} may stop together, and no other one with them"
    run.out.note(f"{together}; {_remaining_text(run, found, silent)}")
    return True
