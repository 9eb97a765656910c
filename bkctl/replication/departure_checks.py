"""Checks before a departure: enough bookies, enough space, and ledgers that cannot be moved."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from bkctl.client.disk_space import disk_space
from bkctl.errors import BkctlError
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.departure_steps import (
    OPEN_ADVICE,
    UNRECOVERABLE_ADVICE,
    Step,
    StepKind,
    StepResult,
    bookies_text,
    ledgers_text,
)
from bkctl.replication.fragments import spans_text
from bkctl.replication.holdings import HeldLedger, Replacements

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie

#: The largest share of the free space on the other bookies that a move should need.
SPACE_SHARE_MAX: Final = 0.8


class DepartureChecks:
    """The checks that decommission and drain share. `skip_unrecoverable`: unrecoverable ledgers do not block."""

    def __init__(self, mover: BookieMover, *, skip_unrecoverable: bool = False) -> None:
        self.mover = mover
        self.skip_unrecoverable = skip_unrecoverable
        self.plan = mover.progress.plan

    async def capacity(self) -> AsyncGenerator[Step, None]:
        """Yield two steps: enough writable bookies, and enough space on them."""
        plan = self.plan
        registered = await self.mover.registered()
        writable = Replacements(registered, self.mover.leaving).writable
        scoped_count = sum(bookie.ledger_scopes for bookie in writable)
        text = f"{bookies_text(len(writable))} writable"
        if True in plan.kinds:
            text += f", {scoped_count:,} of them for ledger scopes"
        if plan.crowded:
            text += f"; not enough for {ledgers_text(len(plan.crowded))}"
            yield Step(StepKind.BOOKIES, StepResult.BLOCKED, text, "start more bookies")
        else:
            yield Step(StepKind.BOOKIES, StepResult.OK, f"{text}: enough for every ensemble")
        yield await self._space(writable)

    async def _space(self, writable: list[RegisteredBookie]) -> Step:
        free, silent = 0, []
        async for space in disk_space(self.mover.bookkeeper, writable):
            if space.error is not None or space.free is None:
                silent.append(space.bookie.bookie_id)
            else:
                free += space.free
        needed = self.plan.size_bytes
        answered = bookies_text(len(writable) - len(silent))
        text = f"About {amount_text(needed)} to copy, {amount_text(free)} free on {answered}"
        if silent:
            text += f"; no answer from {', '.join(silent)}"
        if needed > free and writable and not silent:
            return Step(StepKind.SPACE, StepResult.BLOCKED, text, "add disks or bookies, or delete ledgers")
        if silent or needed > free * SPACE_SHARE_MAX:
            return Step(StepKind.SPACE, StepResult.WARNING, text, "look at 'bkctl bookies usage'")
        return Step(StepKind.SPACE, StepResult.OK, text)

    def _summary(self, blocked_count: int) -> Step:
        plan = self.plan
        text = f"{ledgers_text(len(plan.ledgers))} to move"
        if plan.scope_count > 1:
            text += f", in {plan.scope_count:,} scopes"
        if plan.open_count:
            text += f", {plan.open_count:,} not closed"
        if blocked_count:
            text += f"; {ledgers_text(blocked_count)} cannot be moved"
        return Step(StepKind.LEDGERS, StepResult.BLOCKED if blocked_count else StepResult.OK, text)

    async def obstacles(self, *, probe: bool, open_stays: bool) -> AsyncGenerator[Step, None]:
        """Yield a step for each ledger that cannot be moved, and at last the total of what there is to move.

        Only with `probe`, bookies are asked which entries they have. `open_stays`: open ledgers cannot be moved.
        """
        plan = self.plan
        count = len(plan.damaged) if probe else len(plan.crowded) + len(plan.damaged)
        for ledger, problem in plan.damaged.items():
            yield Step(
                StepKind.LEDGER, StepResult.BLOCKED, problem, "restore its metadata, or delete the ledger", ledger
            )  # fmt: skip
        if probe:
            registered = await self.mover.registered()
            up = {bookie.bookie_id for bookie in registered}
            replacements = Replacements(registered, self.mover.leaving)

            async def look(ledger: LedgerId, held: HeldLedger | BkctlError) -> Step | None:
                if isinstance(held, BkctlError):
                    return None
                if (problem := replacements.problem(held)) is not None:
                    return Step(StepKind.LEDGER, StepResult.BLOCKED, problem, "start more bookies", ledger)
                return await self._obstacle(held, up, open_stays)

            async with contextlib.aclosing(self.mover.held_by(look, plan.ledgers)) as steps:
                async for step in steps:
                    if step is not None:
                        count += step.result is not StepResult.SKIPPED
                        yield step
        yield self._summary(count)

    async def _obstacle(self, held: HeldLedger, up: set[str], open_stays: bool) -> Step | None:
        if held.grows and open_stays:
            return Step(StepKind.LEDGER, StepResult.OPEN, "A writer may be adding to it", OPEN_ADVICE, held.ledger)
        unreadable = await self.mover.unreadable(held, up)
        spans = tuple(span for first in sorted(unreadable) for span in unreadable[first])
        if not spans:
            return None
        others = dict.fromkeys(
            bookie_id if bookie_id in up else f"{bookie_id} (down)"
            for fragment in held.fragments
            for bookie_id in fragment.ensemble
            if bookie_id not in self.mover.leaving
        )
        where = f"; its other replicas were on {', '.join(others)}" if others else "; it has no other replicas"
        where += self.mover.silent_text(
            dict.fromkeys(bookie_id for fragment in held.fragments for bookie_id in fragment.ensemble)
        )
        result, advice = (
            (StepResult.SKIPPED, None) if self.skip_unrecoverable else (StepResult.BLOCKED, UNRECOVERABLE_ADVICE)
        )
        return Step(
            StepKind.LEDGER, result, f"No bookie that is up has {spans_text(spans)}{where}", advice, held.ledger,
            unreadable=spans,
        )  # fmt: skip


def amount_text(size_bytes: int) -> str:
    value, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
