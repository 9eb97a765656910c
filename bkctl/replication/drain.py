"""Moves all that a serving bookie holds to other bookies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from bkctl.errors import Conflict, NotFound, TimedOut
from bkctl.replication.departure import OPEN_ADVICE, Departure, Step, StepKind, StepResult, counted

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie

_POLL_S: Final = 0.1


class Drain(Departure):
    """The drain of a serving bookie: `check`, `set_read_only`, then `run`; the bookie may be stopped afterwards.

    Moved ledgers stay moved: another drain continues with the rest.
    """

    fence = False
    advice: ClassVar = {StepResult.OPEN: OPEN_ADVICE}

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield the obstacles to the drain, and change nothing.

        Raise Conflict for a bookie that is down, NotFound for an unknown bookie.
        """
        found = await self._up()
        if found.state == "ro":
            yield Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only")
        elif found.http_endpoint is None:
            self.forbidden = True
            yield Step(
                StepKind.READ_ONLY, StepResult.BLOCKED,
                f"{self.bookie_id} is writable, and has no HTTP server that could make it read-only",
                "start it again with httpServerEnabled=true or forceReadOnlyBookie=true, then drain it",
            )  # fmt: skip
        else:
            yield Step(
                StepKind.READ_ONLY, StepResult.WARNING, f"{self.bookie_id} is writable; it will become read-only"
            )
        async for step in self.capacity():
            yield step
        async for step in self.obstacles(probe=probe):
            yield step

    async def set_read_only(self, switch: Callable[[RegisteredBookie], None], timeout_s: float) -> Step:
        """Make a writable bookie read-only by `switch`, which may block, and wait until it has registered as read-only.

        Raise TimedOut, and errors of `switch`.
        """
        found = await self._up()
        if found.state == "ro":
            return Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only already")
        await asyncio.to_thread(switch, found)
        deadline = time.monotonic() + timeout_s
        while (await self._up()).state != "ro":
            if time.monotonic() > deadline:
                raise TimedOut(f"Bookie {self.bookie_id} did not register as read-only within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
        return Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} accepts no more entries, and serves reads")

    async def _finish(self, left: Sequence[LedgerId]) -> Step:
        if left:
            return Step(
                StepKind.LEDGERS, StepResult.BLOCKED,
                f"{counted(len(left), 'ledger')} {'is' if len(left) == 1 else 'are'} left on {self.bookie_id}",
                f"remove the obstacles and run it again; moved ledgers stay moved, and {self.bookie_id} read-only "
                f"until 'bkctl bookie readonly off --bookie {self.bookie_id}'",
            )  # fmt: skip
        return Step(
            StepKind.LEDGERS, StepResult.OK, f"Nothing is left on {self.bookie_id}",
            f"stop it; 'bkctl bookies decommission {self.bookie_id}' then deletes its cookie",
        )  # fmt: skip

    async def _up(self) -> RegisteredBookie:
        found = await asyncio.to_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None:
            raise NotFound(f"No bookie {self.bookie_id}", hint="'bkctl bookies list' shows them")
        if found.state == "down":
            raise Conflict(
                f"Bookie {self.bookie_id} is down, so it cannot be drained",
                hint=f"'bkctl bookies decommission {self.bookie_id}' copies its ledgers from their other replicas",
            )
        return found
