"""The options of commands that move ledgers off bookies, and their progress: on the terminal, in time, as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from bkctl.errors import TimedOut, UsageError
from bkctl.ids import LedgerId, check_bookie_id

from ..kit.activity import Activity
from ..kit.command import Run
from ..kit.ledger_options import LEDGERS_BY_OPTION, scope_option
from ..kit.options import combined, duration_option, flag, watch_option
from ..kit.texts import counted, size_text, time_text

if TYPE_CHECKING:
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.move_plan import MovePlan, MoveProgress


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
ManyBookies = Annotated[list[str], typer.Argument(metavar="BOOKIE", help="The bookies.")]
OneBookie = Annotated[str, typer.Argument(metavar="BOOKIE", help="The bookie.")]
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


def bookie_ids(texts: Sequence[str]) -> list[str]:
    """Return the named bookies; commas separate several in one text, as in Apache's shell."""
    names = dict.fromkeys(name for text in texts for name in text.split(",") if name)
    if not names:
        raise UsageError("No bookie is named", hint="'bkctl bookies list' shows them")
    return [check_bookie_id(name) for name in names]


#: Between two looks at how far the work is.
_REFRESH_S: Final = 0.2


def _speed_text(progress: MoveProgress) -> str:
    text = f"{size_text(int(progress.bytes_per_s))}/s"
    if progress.locked_count:
        text += f", {counted(progress.locked_count, 'ledger', 'ledgers')} locked by others"
    return text


def progress_text(progress: MoveProgress) -> str:
    """Return the rate of the work, and the estimated remaining time."""
    text = _speed_text(progress)
    left_s = progress.left_s
    return text if left_s is None else f"{text}, about {time_text(left_s)} left"


@asynccontextmanager
async def shown_progress(activity: Activity, progress: MoveProgress) -> AsyncIterator[None]:
    """Update the line of progress on the terminal while the work runs."""
    import asyncio

    total = progress.plan.entry_count
    if total:  # Else all are open or empty, and are counted themselves.
        activity.unit = "entries"

    def update() -> None:
        if total:
            activity.update(min(progress.entry_count, total), total)
        else:
            activity.update(progress.ledger_count, len(progress.plan.ledgers))
        activity.remark = _speed_text(progress)

    async def refresh() -> None:
        while True:
            update()
            await asyncio.sleep(_REFRESH_S)

    task = asyncio.create_task(refresh())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        update()


def run_within(run: Run, work: Coroutine[Any, Any, None], deadline_s: float | None, what: str) -> None:
    """Run the work to its end. Raises TimedOut at the deadline."""
    import asyncio

    async def bounded() -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await work
        except TimeoutError as error:
            raise TimedOut(
                f"{what} is not finished after {time_text(deadline_s or 0)}", hint="run it again to continue"
            ) from error

    run.job.complete(bounded())


def entry_spans(spans: Any) -> list[dict[str, int]] | None:
    return [
        {"firstEntryId": first, "lastEntryId": last, "entryCount": entry_count} for first, last, entry_count in spans
    ] or None


def ledger_width(plan: MovePlan) -> int:
    """Return the width of the plan's ledger names in a table; the names of scoped ledgers are longer, and come last."""
    last = [plan.ledgers[-1]] if plan.ledgers else []
    return max((len(str(each)) for each in (*last, *plan.damaged)), default=0)


def loss_text(
    plan: MovePlan, names: Sequence[str], up: Sequence[RegisteredBookie], *, skip_open: bool, delete_cookie: bool
) -> str:
    text = f"{counted(len(plan.ledgers), 'ledger', 'ledgers')} on {', '.join(names)} would be copied to other bookies"
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
