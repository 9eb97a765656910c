"""`bkctl bookies recover`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.columns import TEXTS, Column, Columns, Kind
from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.ids import LedgerId

from ..kit.command import Run, command, group
from ..kit.documents import rows_of
from ..kit.options import (
    CopyPace,
    DryRun,
    UndoOption,
)
from ..kit.output import RowWriter
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text, time_text
from .progress import entry_spans, ledger_width, loss_text, run_within, shown_progress
from .selection import Deadline, LedgersByOption, ManyBookies, SkipUnrecoverable, bookie_ids

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.replication.holdings import HeldFragment, HeldLedger
    from bkctl.replication.move_plan import LedgerMove, MovePlan, MoveProgress, PlannedFragment

app = group()


class FragmentRow(NamedTuple):
    """A fragment on the bookies, for --query and --dry-run.

    A ledger without readable metadata has None in all fields but `ledger` and `problem`.
    """

    ledger: LedgerId
    state: str | None = None
    first_entry_id: int | None = None
    last_entry_id: int | None = None
    ensemble: tuple[str, ...] | None = None
    bookies: tuple[str, ...] | None = None
    entry_count: int | None = None
    new_ensemble: tuple[str, ...] | None = None
    closes: bool | None = None
    unreadable: Any = ()
    problem: str | None = None


def fragment_columns(bookies: Sequence[str], *, planned: bool) -> Columns:
    """Return the columns of `--query`, or with `planned` of `--dry-run`; ensembles mark the names of the bookies."""

    def marked(ensemble: Sequence[str]) -> str:
        return ", ".join(f"{each}*" if each in bookies else each for each in ensemble)

    columns = [
        Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
        Column("STATE", "state", "state", spare=1),
        Column("FIRST ENTRY", "firstEntryId", "first_entry_id", Kind.INTEGER),
        Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER),
        Column("REPLICAS", "entryCount", "entry_count", Kind.INTEGER),
        Column("ENSEMBLE", "ensemble", "ensemble", Kind.NESTED, shape=TEXTS, text=marked),
        Column(None, "bookies", "bookies", Kind.NESTED, shape=TEXTS),
    ]
    if planned:
        columns += [
            Column("NEW ENSEMBLE", "newEnsemble", "new_ensemble", Kind.NESTED, shape=TEXTS, text=", ".join),
            Column("CLOSED FIRST", "closesLedger", "closes", Kind.BOOLEAN, style={"yes": YELLOW}),
            Column(None, "unreadableEntries", lambda row: entry_spans(row.unreadable), Kind.NESTED, optional=True),
        ]
    return Columns(*columns, Column("PROBLEM", "problem", "problem"), key="ledger")


def _held_row(held: HeldLedger, fragment: HeldFragment, **more: Any) -> FragmentRow:
    return FragmentRow(
        held.ledger, held.metadata.state.name, fragment.first_entry_id, fragment.last_entry_id, fragment.ensemble,
        fragment.bookies, fragment.entry_count, **more,
    )  # fmt: skip


def _planned_row(planned: PlannedFragment | LedgerMove) -> FragmentRow:
    from bkctl.replication.move_plan import PlannedFragment

    if not isinstance(planned, PlannedFragment):
        state = None if planned.state is None else planned.state.name
        return FragmentRow(planned.ledger, state, problem=planned.problem)
    return _held_row(
        planned.held, planned.fragment, new_ensemble=planned.new_ensemble if planned.targets else None,
        closes=planned.closes, unreadable=planned.unreadable, problem=planned.problem,
    )  # fmt: skip


def _moved_columns() -> Columns:
    from bkctl.replication.move_plan import MovePlan

    return move_columns(MovePlan())


def move_columns(plan: MovePlan) -> Columns:
    """Return columns as wide as later rows will need, since each moved ledger is printed at once."""
    from bkctl.replication.move_plan import MoveOutcome

    return Columns(
        Column("LEDGER".ljust(ledger_width(plan)), "ledger", "ledger", Kind.LEDGER),
        Column("STATE".ljust(len("IN_RECOVERY")), "state", lambda row: row.state and row.state.name),
        Column(
            "OUTCOME".ljust(max(map(len, MoveOutcome))), "outcome", "outcome",
            style={"moved": GREEN, "gone": GREEN, "open": YELLOW, "unrecoverable": RED, "failed": RED},
        ),
        Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
        Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
        Column("SIZE".rjust(9), "size", "size_bytes", Kind.SIZE),
        Column(None, "unreadableEntries", lambda row: entry_spans(row.unreadable), Kind.NESTED, optional=True),
        Column("PROBLEM", "problem", "problem"),
        key="ledger",
    )  # fmt: skip


@command(
    app,
    "recover",
    connects=True,
    asks=True,
    changes=True,
    unless="query",
    prints=rows_of(
        lambda: fragment_columns((), planned=False), lambda: fragment_columns((), planned=True), _moved_columns
    ),
    examples=(
        "bkctl bookies recover 10.0.0.1:3181 --query",
        "bkctl bookies recover 10.0.0.1:3181 --dry-run",
    ),
)
def recover(
    run: Run,
    bookies: ManyBookies,
    ledgers: LedgersByOption,
    pace: CopyPace,
    deadline: Deadline,
    query: Annotated[
        bool, typer.Option("--query", help="Only show the ledgers on the bookies, from the metadata.")
    ] = False,
    skip_open: Annotated[bool, typer.Option("--skip-open", help="Skip ledgers that are OPEN.")] = False,
    skip_unrecoverable: SkipUnrecoverable = False,
    delete_cookie: Annotated[
        bool,
        typer.Option("--delete-cookie", help="Delete the bookies' cookies once they hold no entries of any scope."),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="FILE",
            help="Record finished ledgers in this file, and skip those that an earlier run recorded.",
        ),
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Copy the ledgers of lost bookies to other bookies.

    Copies from the remaining replicas, for ledgers of every scope. Needs no auto-recovery. Ledgers that are not closed
    and have a lost bookie in their last ensemble are fenced and closed first: their writers can add no more. A writer
    that left the lost bookies is not fenced; entries there that are not confirmed yet stay, and are reported. A ledger
    with entries that no bookie has is reported with them and left unchanged; all others are moved. It is unrecoverable
    only if every other bookie that should have them answers, and lacks them. Exit code 3 if any ledger was
    unrecoverable or failed, or stays. --dry-run shows each fragment with the ensemble that it would get, and asks the
    bookies which entries they have.
    """
    names = bookie_ids(bookies)
    if query and (dry_run or delete_cookie or resume is not None):
        raise UsageError(
            "--query changes nothing, so --dry-run, --delete-cookie and --resume do not apply", hint="drop one of them"
        )
    with run.access.cluster() as cluster:
        if query:
            _show_held(run, cluster, names, ledgers or None)
            return
        if dry_run:
            _show_plan(run, cluster, names, ledgers or None, skip_open, skip_unrecoverable)
            return
        from bkctl.replication.bookie_mover import BookieMover
        from bkctl.replication.move_plan import MoveOutcome, check_scopes_known, plan_move
        from bkctl.replication.resume import ResumeFile

        with run.job.working("Looking at the ledgers"):
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
            run.consent.confirm(loss_text(plan, names, up, skip_open=skip_open, delete_cookie=delete_cookie))
        outcomes: dict[MoveOutcome, int] = dict.fromkeys(MoveOutcome, 0)
        skipped: set[LedgerId] = set()
        kept = 0
        notes: list[str] = []

        async def work(writer: RowWriter) -> None:
            nonlocal kept
            async with run.access.bookkeeper(recorded) as bookkeeper:
                mover = BookieMover(bookkeeper, names, plan, pace=pace, skip_open=skip_open, note=run.out.note)
                async with (
                    shown_progress(activity, mover.progress),
                    aclosing(mover.move(plan.ledgers, resume=done)) as moves,
                ):
                    async for move in moves:
                        writer.row(move)
                        outcomes[move.outcome] += 1
                        if move.outcome is MoveOutcome.UNRECOVERABLE and skip_unrecoverable:
                            skipped.add(move.ledger)
                if delete_cookie:
                    kept = len({ledger for ledger, _ in await mover.left()} - skipped)
                    if not kept:
                        notes.extend(f"The cookie of {name} is deleted" for name in await mover.delete_cookies())
                notes.insert(0, _moved_text(outcomes[MoveOutcome.MOVED], mover.progress))

        file = nullcontext() if resume is None else ResumeFile(resume, instance_id=cluster.instance_id(), bookies=names)
        with (
            file as done,
            run.consent.recorded(cluster, undo) as recorded,
            run.job.working(
                "Recovering", total=len(plan.ledgers) or None, unit="ledgers", pace=pace,
                left="moved ledgers stay moved: run the command again to continue",
            ) as activity,
        ):  # fmt: skip
            if done is not None and done.done:
                run.out.note(f"{resume}: {counted(len(done.done), 'ledger was', 'ledgers were')} done before")
            with run.out.rows(move_columns(plan)) as rows:
                run_within(run, work(rows), deadline, "The recovery")
        for note in notes:
            run.out.note(note)
        unrecoverable = outcomes[MoveOutcome.UNRECOVERABLE] - len(skipped)
        failed = outcomes[MoveOutcome.FAILED] + (0 if skip_open else outcomes[MoveOutcome.OPEN])
        _finish(run, plan, unrecoverable, failed, kept, len(names))


def _check_known(cluster: Cluster, names: Sequence[str], plan: MovePlan) -> None:
    """Raise NotFound if neither a registration, a cookie nor a ledger names one of the bookies: it may be misspelt."""
    if plan.ledgers or plan.damaged:
        return
    for name in names:
        if cluster.bookies.get(name) is None:
            raise NotFound(f"No bookie {name}, and no ledger names it", hint="'bkctl bookies list' shows them")


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
                yield FragmentRow(ledger, problem=held.message)
            else:
                for fragment in held.fragments:
                    yield _held_row(held, fragment)

    with run.job.working("Looking at the ledgers"):
        run.out.render(rows(), fragment_columns(names, planned=False))
    run.out.note(f"{counted(count, 'ledger', 'ledgers')} on {', '.join(names)}" + (" (marked *)" if count else ""))
    run.out.finish_with(
        damaged, "ledger on them has metadata that cannot be read", "ledgers on them have metadata that cannot be read"
    )


def _show_plan(
    run: Run, cluster: Cluster, names: Sequence[str], ids: list[LedgerId] | None, skip_open: bool, skip: bool
) -> None:
    from bkctl.replication.bookie_mover import BookieMover
    from bkctl.replication.move_plan import MoveOutcome, PlannedFragment

    count = problem_count = 0

    async def work(writer: RowWriter) -> None:
        nonlocal count, problem_count
        last = last_problem = None  # The fragments of a ledger come together.
        async with run.access.bookkeeper(cluster) as bookkeeper:
            mover = BookieMover(bookkeeper, names, skip_open=skip_open)
            async with aclosing(mover.planned(ids)) as planned:
                async for each in planned:
                    row = _planned_row(each)
                    writer.row(row)
                    count += row.ledger != last
                    last = row.ledger
                    passed_over = skip and isinstance(each, PlannedFragment) and each.unreadable and each.lost
                    asked_for = skip_open and not isinstance(each, PlannedFragment) and each.outcome is MoveOutcome.OPEN
                    if row.problem is not None and not passed_over and not asked_for:
                        problem_count += row.ledger != last_problem
                        last_problem = row.ledger

    with run.job.working("Asking the bookies"), run.out.rows(fragment_columns(names, planned=True)) as rows:
        run.job.complete(work(rows))
    run.out.note(f"{counted(count, 'ledger', 'ledgers')} on {', '.join(names)}")
    run.out.finish_with(problem_count, "ledger could not be moved", "ledgers could not be moved")


def _moved_text(moved_count: int, progress: MoveProgress) -> str:
    return (
        f"{moved_count:,} of {counted(len(progress.plan.ledgers), 'ledger', 'ledgers')} moved: "
        f"{counted(progress.entry_count, 'entry', 'entries')}, {size_text(progress.size_bytes)}, "
        f"in {time_text(progress.elapsed_s)}"
    )


def _finish(run: Run, plan: MovePlan, unrecoverable: int, failed: int, kept: int, bookie_count: int) -> None:
    """Report the findings of a recovery, from counts of ledgers; `kept` have entries on bookies that keep a cookie."""
    for ledger, problem in plan.damaged.items():
        run.out.error(f"Ledger {ledger} was skipped: {problem}")
    failed += len(plan.damaged)
    problems = []
    if unrecoverable:
        problems.append(f"{counted(unrecoverable, 'ledger is', 'ledgers are')} unrecoverable")
    if failed:
        problems.append(f"{counted(failed, 'ledger', 'ledgers')} could not be moved")
    if kept:
        problems.append(
            f"the {'cookie stays' if bookie_count == 1 else 'cookies stay'}, for {counted(kept, 'ledger', 'ledgers')} "
            f"still {'has' if kept == 1 else 'have'} entries there"
        )
    text = "; ".join(problems)
    run.out.finish_with(len(problems), f"finding: {text}", f"findings: {text}")
