"""The progress of moving ledgers off bookies: on the terminal, until a deadline, as text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import TimedOut

from ..kit.activity import Activity
from ..kit.command import Run
from ..kit.texts import counted, size_text, time_text

if TYPE_CHECKING:
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.holdings import MovePlan, MoveProgress

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
