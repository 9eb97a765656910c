"""`bkctl bookies recover`, and what moves of ledgers off bookies share: options, progress, texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import TEXTS, Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, Conflict, NotFound, TimedOut, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, rows_of
from ..kit.job import Activity
from ..kit.ledger_options import LEDGERS_BY_OPTION, scope_option
from ..kit.options import CopyPace, combined, duration_option, flag, watch_option
from ..kit.output import RowWriter
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text, time_text
from .members import ManyBookies, bookie_ids

if TYPE_CHECKING:
    from bkctl.formats.metadata import LedgerState
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.pace import Pace
    from bkctl.replication.fragments import LedgerFragment
    from bkctl.replication.holdings import LedgerMove, MoveOutcome, MovePlan, MoveProgress, PlannedFragment
    from bkctl.replication.resume import ResumeFile

app = group()


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


def progress_text(progress: MoveProgress) -> str:
    """Return the rate of the work, and the estimated remaining time."""
    text = _speed_text(progress)
    left_s = progress.left_s
    return text if left_s is None else f"{text}, about {time_text(left_s)} left"


@asynccontextmanager
async def repeating(seconds: float, act: Callable[[], object]) -> AsyncIterator[None]:
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


@asynccontextmanager
async def shown_progress(activity: Activity, progress: MoveProgress) -> AsyncIterator[None]:
    """Update the line of progress on the terminal while the work runs."""
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
        async with repeating(_REFRESH_S, update):
            yield
    finally:
        update()


@asynccontextmanager
async def within(deadline_s: float | None, what: str) -> AsyncIterator[None]:
    """End the block at the deadline, and raise TimedOut."""
    import asyncio

    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise TimedOut(
            f"{what} is not finished after {time_text(deadline_s or 0)}", hint="run it again to continue"
        ) from error


def entry_spans(spans: Any) -> list[dict[str, int]] | None:
    return [
        {"firstEntryId": first, "lastEntryId": last, "entryCount": entry_count} for first, last, entry_count in spans
    ] or None


UNREADABLE_ENTRIES: Final = Column(
    None, "unreadableEntries", lambda row: entry_spans(row.unreadable), Kind.NESTED, optional=True
)


def ledger_width(plan: MovePlan) -> int:
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
        unreadable=None if plan is None else entry_spans(plan.unreadable),
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


def move_columns(plan: MovePlan) -> Columns:
    """Return columns as wide as later rows will need, since each moved ledger is printed at once."""
    from bkctl.replication.holdings import MoveOutcome

    return Columns(
        Column("LEDGER".ljust(ledger_width(plan)), "ledger", "ledger", Kind.LEDGER),
        Column("STATE".ljust(len("IN_RECOVERY")), "state", lambda row: row.state and row.state.name),
        Column(
            "OUTCOME".ljust(max(map(len, MoveOutcome))), "outcome", "outcome",
            style={"moved": GREEN, "gone": GREEN, "open": YELLOW, "unrecoverable": RED, "failed": RED},
        ),
        *fields(Kind.INTEGER, fragmentCount="FRAGMENTS", entryCount="ENTRIES"),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
        UNREADABLE_ENTRIES,
        Column("PROBLEM", "problem", "problem"),
        key="ledger",
    )  # fmt: skip


def _columns_of_any_plan() -> Columns:
    from bkctl.replication.holdings import MovePlan

    return move_columns(MovePlan())


_PRINTED: Final = rows_of(fragment_columns((), planned=False), fragment_columns((), planned=True), _columns_of_any_plan)


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
        flag("--resume FILE", "Record finished ledgers in this file, and skip those that an earlier run recorded."),
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
        _show_plan(run, names, ledgers or None, skip_open, skip_unrecoverable)
    else:
        recovery = _Recovery(run, names, pace, skip_open, skip_unrecoverable, delete_cookie)
        recovery.run(recovery.plan(ledgers or None), resume, deadline)


@dataclass
class _Recovery:
    """One run of the command that changes something: its settings, and what became of the ledgers."""

    _run: Run
    _names: Sequence[str]
    _pace: Pace
    _skip_open: bool
    _skip_unrecoverable: bool
    _delete_cookie: bool
    _outcomes: Counter[MoveOutcome] = field(default_factory=Counter)
    _skipped: set[LedgerId] = field(default_factory=set)
    #: Ledgers with entries on bookies that keep their cookies.
    _kept_count: int = 0
    _notes: list[str] = field(default_factory=list)

    def plan(self, ids: list[LedgerId] | None) -> MovePlan:
        """Return the ledgers to move, once the user agrees."""
        from bkctl.replication.holdings import check_scopes_known, plan_move

        names, cluster = self._names, self._run.cluster
        with self._run.job.working("Looking at the ledgers"):
            plan = plan_move(cluster, names, ids)
        up = [each for each in cluster.bookies.list(include_down=False) if each.bookie_id in names]
        if up and self._delete_cookie:
            raise Conflict(
                f"Bookie {up[0].bookie_id} is registered ({up[0].state}), and needs its cookie",
                hint="stop it first, or leave --delete-cookie out",
            )
        if self._delete_cookie:
            check_scopes_known(cluster)
        for name in () if plan.ledgers or plan.damaged else names:
            if cluster.bookies.get(name) is None:  # It may be misspelt.
                raise NotFound(f"No bookie {name}, and no ledger names it", hint="'bkctl bookies list' shows them")
        if plan.ledgers or self._delete_cookie:
            self._run.consent.confirm(
                loss_text(plan, names, up, skip_open=self._skip_open, delete_cookie=self._delete_cookie)
            )
        return plan

    def run(self, plan: MovePlan, resume: Path | None, deadline_s: float | None) -> None:
        """Move the ledgers, and report what became of them."""
        from bkctl.replication.resume import ResumeFile

        run, instance_id = self._run, self._run.cluster.instance_id()
        file = nullcontext() if resume is None else ResumeFile(resume, instance_id=instance_id, bookies=self._names)
        with (
            file as done,
            run.recorded() as recorded,
            run.job.working(
                "Recovering", total=len(plan.ledgers) or None, unit="ledgers", pace=self._pace,
                left="moved ledgers stay moved: run the command again to continue",
            ) as activity,
        ):  # fmt: skip
            if done is not None and done.done:
                run.out.note(f"{resume}: {counted(len(done.done), 'ledger was', 'ledgers were')} done before")
            with run.out.rows(move_columns(plan)) as rows:
                run.job.complete(self._move(recorded, plan, done, activity, rows, deadline_s))
        run.out.note(*self._notes)
        self._report(plan)

    async def _move(
        self, cluster: Cluster, plan: MovePlan, done: ResumeFile | None, activity: Activity, writer: RowWriter,
        deadline_s: float | None,
    ) -> None:  # fmt: skip
        from bkctl.replication.bookie_mover import BookieMover
        from bkctl.replication.holdings import MoveOutcome

        run, outcomes = self._run, self._outcomes
        async with within(deadline_s, "The recovery"), run.access.bookkeeper(cluster) as bookkeeper:
            mover = BookieMover(
                bookkeeper, self._names, plan, pace=self._pace, skip_open=self._skip_open, note=run.out.note
            )
            async with (
                shown_progress(activity, mover.progress),
                aclosing(mover.move(plan.ledgers, resume=done)) as moves,
            ):
                async for move in moves:
                    writer.row(move)
                    outcomes[move.outcome] += 1
                    if move.outcome is MoveOutcome.UNRECOVERABLE and self._skip_unrecoverable:
                        self._skipped.add(move.ledger)
            progress, moved_count = mover.progress, outcomes[MoveOutcome.MOVED]
            self._notes = [
                f"{moved_count:,} of {counted(len(plan.ledgers), 'ledger')} moved: "
                f"{counted(progress.entry_count, 'entry')}, {size_text(progress.size_bytes)}, "
                f"in {time_text(progress.elapsed_s)}"
            ]
            if self._delete_cookie:
                self._kept_count = len({ledger for ledger, _ in await mover.left()} - self._skipped)
                if not self._kept_count:
                    self._notes += [f"The cookie of {name} is deleted" for name in await mover.delete_cookies()]

    def _report(self, plan: MovePlan) -> None:
        """Report the ledgers that were not moved, and the cookies that stay, as findings."""
        from bkctl.replication.holdings import MoveOutcome

        out, kept = self._run.out, self._kept_count
        out.error(*(f"Ledger {ledger} was skipped: {problem}" for ledger, problem in plan.damaged.items()))
        unrecoverable = self._outcomes[MoveOutcome.UNRECOVERABLE] - len(self._skipped)
        failed = self._outcomes[MoveOutcome.FAILED] + len(plan.damaged)
        failed += 0 if self._skip_open else self._outcomes[MoveOutcome.OPEN]
        problems = []
        if unrecoverable:
            problems.append(f"{counted(unrecoverable, 'ledger is', 'ledgers are')} unrecoverable")
        if failed:
            problems.append(f"{counted(failed, 'ledger')} could not be moved")
        if kept:
            problems.append(
                f"the {'cookie stays' if len(self._names) == 1 else 'cookies stay'}, for "
                f"{counted(kept, 'ledger')} still {'has' if kept == 1 else 'have'} entries there"
            )
        text = "; ".join(problems)
        out.finish_with(len(problems), f"finding: {text}", f"findings: {text}")


def _show_held(run: Run, names: Sequence[str], ids: list[LedgerId] | None) -> None:
    from bkctl.replication.holdings import ledgers_on

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

    with run.job.working("Looking at the ledgers"):
        run.out.render(rows(), fragment_columns(names, planned=False))
    run.out.note(f"{counted(count, 'ledger')} on {', '.join(names)}" + (" (marked *)" if count else ""))
    run.out.finish_with(
        damaged, "ledger on them has metadata that cannot be read", "ledgers on them have metadata that cannot be read"
    )


def _show_plan(run: Run, names: Sequence[str], ids: list[LedgerId] | None, skip_open: bool, skip: bool) -> None:
    from bkctl.replication.bookie_mover import BookieMover
    from bkctl.replication.holdings import MoveOutcome, PlannedFragment

    count = problem_count = 0

    last = last_problem = None  # The fragments of a ledger come together.

    def take(each: PlannedFragment | LedgerMove) -> None:
        nonlocal count, problem_count, last, last_problem
        row = (
            _row(each.held.ledger, each.held.metadata.state, each.fragment, plan=each, problem=each.problem)
            if isinstance(each, PlannedFragment)
            else _row(each.ledger, each.state, None, problem=each.problem)
        )
        writer.row(row)
        count += row.ledger != last
        last = row.ledger
        passed_over = skip and isinstance(each, PlannedFragment) and each.unreadable and each.lost
        asked_for = skip_open and not isinstance(each, PlannedFragment) and each.outcome is MoveOutcome.OPEN
        if row.problem is not None and not passed_over and not asked_for:
            problem_count += row.ledger != last_problem
            last_problem = row.ledger

    with run.job.working("Asking the bookies"), run.out.rows(fragment_columns(names, planned=True)) as writer:
        run.job.take_each(
            run.access.bookkeeper(run.cluster),
            lambda bookkeeper: BookieMover(bookkeeper, names, skip_open=skip_open).planned(ids), take,
        )  # fmt: skip
    run.out.note(f"{counted(count, 'ledger')} on {', '.join(names)}")
    run.out.finish_with(problem_count, "ledger could not be moved", "ledgers could not be moved")
