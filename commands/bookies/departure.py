"""`bkctl bookies decommission`, `drain` and `ok-to-stop`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import aclosing, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import TEXTS, Column, Columns, Kind
from bkctl.errors import Conflict
from bkctl.ids import check_bookie_id

from ..kit.columns import Output, PlainRow, fields
from ..kit.command import Run, command, group, rows_of
from ..kit.options import CopyPace, WatchOption, count_option, flag, word
from ..kit.texts import GREEN, RED, YELLOW, counted
from ..kit.values import refuse_both
from .members import OneBookie, bookie_ids, find_racks
from .recover import (
    UNREADABLE_ENTRIES,
    Deadline,
    ProgressOption,
    SkipUnrecoverable,
    ledger_width,
    loss_text,
    progress_text,
    repeating,
    shown_progress,
    within,
)

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.pace import Pace
    from bkctl.replication.departure import Decommission, Drain, Step
    from bkctl.replication.holdings import MovePlan, MoveProgress

app = group()


def _moving(progress: MoveProgress) -> PlainRow:
    """Return the progress of a decommission or a drain: a row of --watch, beside the steps."""
    total = len(progress.plan.ledgers)
    message = f"{progress.ledger_count:,} of {counted(total, 'ledger')}, {100 * progress.share:.0f}%, "
    return PlainRow(
        kind="progress", result="moving", message=message + progress_text(progress), advice=None, ledger=None,
        unreadable=(), entry_count=progress.entry_count, size_bytes=progress.size_bytes,
        ledgersDone=progress.ledger_count, ledgersToMove=total, bytesPerSecond=int(progress.bytes_per_s),
        secondsLeft=None if progress.left_s is None else round(progress.left_s),
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
    UNREADABLE_ENTRIES,
    *(
        Column(None, name, lambda row, name=name: getattr(row, name, None), Kind.INTEGER, optional=True)
        for name in ("ledgersDone", "ledgersToMove", "bytesPerSecond", "secondsLeft")
    ),
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
        width = max(_STEP_WIDTH, ledger_width(plan))
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
    with run.job.working("Looking at the ledgers"):
        plan = plan_move(run.cluster, [bookie])
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
            async with within(deadline_s, what), run.access.bookkeeper(recorded) as bookkeeper:
                departure = create(bookkeeper, bookie, plan, pace=pace, note=run.out.note)
                progress = departure.mover.progress
                said = nullcontext() if watch_s is None else repeating(watch_s, lambda: print_step(_moving(progress)))
                async with shown_progress(activity, progress), aclosing(departure.run()) as found, said:
                    async for step in found:
                        take(step)

        with run.job.working("Asking the bookies"):
            stays = run.job.ask(run.access.bookkeeper(run.cluster), look) or run.dry_run
        if not stays:
            run.consent.confirm(texts.question(plan))
            finding_count = 0
            if create is Drain:
                left = f"{bookie} may be read-only: run the command again to continue, or {_to_go_back(bookie)}"
                with run.job.working(f"Making {bookie} read-only", left=left):
                    take(run.job.ask(run.access.bookkeeper(run.cluster), set_read_only))
            total = len(plan.ledgers) or None
            with (
                run.recorded() as recorded,
                run.job.working(texts.doing, total=total, unit="ledgers", pace=pace, left=texts.left) as activity,
            ):
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
    """Make the bookie read-only over its HTTP server."""
    from bkctl.http.bookie_client import BookieApi
    from bkctl.http.server_url import bookie_url

    name = bookie.bookie_id
    url = bookie_url(bookie, run.access.bookie_host(name))
    if not BookieApi(run.access.http_client(url, is_registered=True)).set_read_only(True):
        raise Conflict(f"Bookie {name} is still writable", hint="start it again with forceReadOnlyBookie=true")


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
    Replicas on bookies that are down, or marked as missing by auto-recovery, do not count. Exit code 3 if there are any
    such ledgers.

    With --max, adds bookies as long as every ledger stays as required and one writable bookie remains: the steps of a
    rolling restart. If the given bookies may not stop, shows the risks.

    $ bkctl bookies ok-to-stop 10.0.0.1:3181
    $ bkctl bookies ok-to-stop 10.0.0.1:3181 --for-good
    $ bkctl bookies ok-to-stop --max -o id
    """
    from bkctl.replication.holdings import StopCheck

    refuse_both("--max", largest, "--watch", watch)
    names = bookie_ids(bookies or ()) if bookies or not largest else []
    restarts = not for_good and min_replicas is None
    check = StopCheck(run.cluster, names, replica_count_min=min_replicas, restarts=restarts)
    if largest and _show_together(run, names, 1 if restarts else min_replicas):
        return
    if watch is not None:
        run.out.watch(
            watch, check.problems, RISK_COLUMNS, subscribe=run.cluster.bookies.watch,
            key=attrgetter("ledger", "risk", "first_entry_id"),
        )  # fmt: skip
    with run.job.working("Looking at the ledgers"):
        count = run.out.render(check.problems(), RISK_COLUMNS, findings=True)
    who = names[0] if len(names) == 1 else f"These {len(names)} bookies"
    if not count:
        run.out.note(f"{who} may {'restart' if restarts else 'stop'}; {_remaining_text(run, names)}")
    if check.under_quorum:
        run.out.note(
            f"Not for good: {counted(len(check.under_quorum), 'ledger')} would have fewer replicas than the "
            "ack quorum; --for-good lists them, and 'bkctl bookies drain' copies them first"
        )
    run.out.finish_with(count, f"finding: {who} may not stop now", f"findings: {who} may not stop now")


def _remaining_text(run: Run, leaving: Collection[str]) -> str:
    """Return the state of the cluster without the bookies `leaving`."""
    up = run.cluster.bookies.list(include_down=False)
    left = sum(each.state == "rw" and each.bookie_id not in leaving for each in up)
    return f"{counted(left, 'writable bookie')} would remain, and ledgers with larger ensembles could not be created"


def _show_together(run: Run, names: list[str], replica_count_min: int | None) -> bool:
    """Print the largest set with `names` in it that may stop; False if they may not, which needs their risks.

    Raises FindingsError if no name is given, and no bookie may stop.
    """
    from bkctl.replication.holdings import StopSets

    bookies = run.cluster.bookies.list()
    racks = find_racks(run, bookies)
    with run.job.working("Looking at the ledgers"):
        found = StopSets(run.cluster, replica_count_min=replica_count_min).largest(names, racks)
    if names and not found:
        return False
    rows = (PlainRow(bookie_id=name, rack=racks.get(name), given=name in names) for name in found)
    run.out.render(rows, TOGETHER_COLUMNS, findings=True)
    run.out.finish_with(not found, "finding: no bookie may stop now", "")
    together = f"{counted(len(found), 'bookie')} may stop together, and no other one with them"
    run.out.note(f"{together}; {_remaining_text(run, found)}")
    return True
