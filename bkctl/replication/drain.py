"""Moves all that a serving bookie holds to other bookies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Final

from bkctl.client.bookies import in_thread
from bkctl.errors import Conflict, NotFound, TimedOut
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.departure_checks import DepartureChecks
from bkctl.replication.departure_steps import (
    BLOCKING_RESULTS,
    OPEN_ADVICE,
    PASS_COUNT_MAX,
    Step,
    StepKind,
    StepResult,
    ledger_step,
    ledgers_text,
)
from bkctl.replication.move_plan import MovePlan

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.pace import Pace

_POLL_S: Final = 0.1


class Drain:
    """The drain of a serving bookie: `check`, `set_read_only`, then `run`; the bookie may be stopped afterwards.

    Moved ledgers stay moved: another drain continues with the rest.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        bookie_id: str,
        plan: MovePlan,
        *,
        pace: Pace | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.mover = BookieMover(bookkeeper, [bookie_id], plan, pace=pace, fence=False, note=note)
        self.bookie_id = bookie_id
        self._plan = plan
        self._checks = DepartureChecks(self.mover)
        self._cluster = bookkeeper.cluster

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield the obstacles to the drain, and change nothing.

        Raise Conflict for a bookie that is down, NotFound for an unknown bookie.
        """
        found = await self._up()
        if found.state == "ro":
            yield Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only")
        else:
            yield Step(
                StepKind.READ_ONLY, StepResult.WARNING, f"{self.bookie_id} is writable; it will become read-only"
            )
        async for step in self._checks.capacity():
            yield step
        async for step in self._checks.obstacles(probe=probe, open_stays=True):
            yield step

    async def set_read_only(self, switch: Callable[[RegisteredBookie], None], timeout_s: float) -> Step:
        """Make a writable bookie read-only by `switch`, which may block, and wait until it has registered as read-only.

        Raise TimedOut, and errors of `switch`.
        """
        found = await self._up()
        if found.state == "ro":
            return Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only already")
        await in_thread(switch, found)
        deadline = time.monotonic() + timeout_s
        while (await self._up()).state != "ro":
            if time.monotonic() > deadline:
                raise TimedOut(f"Bookie {self.bookie_id} did not register as read-only within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        return Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} accepts no more entries, and serves reads")

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move all that is on the bookie; yield a step for each ledger, and one for the ledgers left."""
        ids: Iterable[LedgerId] = self._plan.ledgers
        for _ in range(PASS_COUNT_MAX):
            is_blocked = False
            async with contextlib.aclosing(self.mover.move(ids)) as moves:
                async for move in moves:
                    result = StepResult(move.outcome.value)
                    is_blocked |= result in BLOCKING_RESULTS
                    yield ledger_step(move, result, OPEN_ADVICE if result is StepResult.OPEN else None)
            left = [ledger for ledger, _ in await self.mover.left()]
            if is_blocked or not left:
                break
            ids = left
        if left:
            yield Step(
                StepKind.LEDGERS, StepResult.BLOCKED,
                f"{ledgers_text(len(left))} {'is' if len(left) == 1 else 'are'} left on {self.bookie_id}",
                f"remove the obstacles and run it again; moved ledgers stay moved, and {self.bookie_id} read-only "
                f"until 'bkctl bookie readonly off --bookie {self.bookie_id}'",
            )  # fmt: skip
        else:
            yield Step(
                StepKind.LEDGERS, StepResult.OK, f"Nothing is left on {self.bookie_id}",
                f"stop it; 'bkctl bookies decommission {self.bookie_id}' then deletes its cookie",
            )  # fmt: skip

    async def _up(self) -> RegisteredBookie:
        found = await in_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None:
            raise NotFound(f"No bookie {self.bookie_id}", hint="'bkctl bookies list' shows them")
        if found.state == "down":
            raise Conflict(
                f"Bookie {self.bookie_id} is down, so it cannot be drained",
                hint=f"'bkctl bookies decommission {self.bookie_id}' copies its ledgers from their other replicas",
            )
        return found
