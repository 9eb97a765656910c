"""Removes a stopped bookie from the cluster. Source: BookKeeperAdmin.decommissionBookie, DecommissionCommand.

Unlike Apache's, this decommission covers every scope, copies ledgers itself beside auto-recovery's workers, reports
obstacles, and never deletes a cookie while the bookie has entries left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bkctl.errors import Conflict, NotFound
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.replication.departure import UNRECOVERABLE_ADVICE, Departure, Step, StepKind, StepResult, counted
from bkctl.replication.marking import mark_ledgers
from bkctl.replication.move_plan import check_scopes_known

if TYPE_CHECKING:
    from bkctl.ids import LedgerId


@dataclass(eq=False)
class Decommission(Departure):
    """The decommission of a stopped bookie: `check`, then `run`.

    `plan` is the result of `plan_move` for the bookie. `skip_unrecoverable` names and skips ledgers with unreadable
    entries; auto-recovery keeps their marks, as Apache's does, and retries until they are unmarked. `keep_cookie` keeps
    the cookie at the end. `pace` and `note` are BookieMover's.
    """

    advice: ClassVar = {StepResult.UNRECOVERABLE: UNRECOVERABLE_ADVICE}

    keep_cookie: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = AutoRecoveryState(self._cluster.store)

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield the obstacles to the decommission, and change nothing.

        With `probe`, bookies are asked which entries they have, ledger by ledger. Raise NotFound for a bookie that is
        neither registered nor named by a ledger, and errors of the store.
        """
        found = await asyncio.to_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None and not self.plan.ledgers and not self.plan.damaged:
            raise NotFound(
                f"No bookie {self.bookie_id}, and no ledger names it: it was decommissioned, or never belonged "
                "to this cluster",
                hint="'bkctl bookies list' shows them",
            )
        if found is not None and found.state != "down":
            self.forbidden = True
            yield Step(
                StepKind.STOPPED, StepResult.BLOCKED, f"{self.bookie_id} is registered ({found.state})",
                f"stop it first; 'bkctl bookies drain {self.bookie_id}' moves its ledgers while it serves",
            )  # fmt: skip
        else:
            yield Step(StepKind.STOPPED, StepResult.OK, f"{self.bookie_id} is not registered")
        if await asyncio.to_thread(self._state.settings.is_enabled):
            yield Step(StepKind.AUTO_RECOVERY, StepResult.OK, "Auto-recovery is on")
        else:
            self.forbidden = True
            yield Step(
                StepKind.AUTO_RECOVERY, StepResult.BLOCKED, "Auto-recovery is disabled, so nothing is to be moved now",
                "'bkctl autorecovery enable'; 'bkctl bookies recover' works without",
            )  # fmt: skip
        if not self.keep_cookie:
            try:
                await asyncio.to_thread(check_scopes_known, self._cluster)
            except Conflict as error:
                self.forbidden = True
                yield Step(StepKind.COOKIE, StepResult.BLOCKED, error.message, error.hint)
        yield await self._auditor()
        async for step in self.capacity():
            self.forbidden |= step.kind is StepKind.SPACE and step.result is StepResult.BLOCKED
            yield step
        async for step in self.obstacles(probe=probe):
            yield step

    async def _finish(self, left: Sequence[LedgerId]) -> Step:
        given_up = f"; {counted(len(self._skipped), 'ledger')} given up" if self._skipped else ""
        if left:
            named = ", ".join(map(str, left[:5])) + (f" and {len(left) - 5:,} more" if len(left) > 5 else "")
            return Step(
                StepKind.COOKIE, StepResult.BLOCKED,
                f"The cookie stays: {counted(len(left), 'ledger')} still {'has' if len(left) == 1 else 'have'} entries "
                f"on {self.bookie_id}: {named}",
                "remove the obstacles and run it again; moved ledgers stay moved",
            )  # fmt: skip
        if self.keep_cookie:
            return Step(StepKind.COOKIE, StepResult.KEPT, f"The cookie of {self.bookie_id} is kept{given_up}")
        if await self.mover.delete_cookies():
            return Step(StepKind.COOKIE, StepResult.DELETED, f"The cookie of {self.bookie_id} is deleted{given_up}")
        return Step(StepKind.COOKIE, StepResult.OK, f"{self.bookie_id} has no cookie")

    async def _auditor(self) -> Step:
        kinds = self.plan.kinds or {False}
        missing = [
            "the other scopes" if scoped else "scope 0"
            for scoped in sorted(kinds)
            if not await asyncio.to_thread(self._state.election.vote_paths, scoped=scoped)
        ]
        if missing:
            return Step(
                StepKind.AUDITOR, StepResult.WARNING,
                f"No auditor is elected for {' and '.join(missing)}: this command moves these ledgers without workers",
                "start 'bkctl autorecovery run' on other hosts to share the work",
            )  # fmt: skip
        return Step(StepKind.AUDITOR, StepResult.OK, "An auditor is elected")

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move all that is on the bookie, then delete its cookie; yield a step for each ledger and one for the cookie.

        The cookie stays while the bookie has entries left in any scope, except of ledgers that were skipped as
        unrecoverable. Raise Conflict if the bookie is registered.
        """
        found = await asyncio.to_thread(self._cluster.bookies.get, self.bookie_id)
        if found is not None and found.state != "down":
            raise Conflict(
                f"Bookie {self.bookie_id} is registered ({found.state}), so it is not stopped",
                hint=f"stop it first; 'bkctl bookies drain {self.bookie_id}' moves its ledgers while it serves",
            )
        await asyncio.to_thread(self._mark)
        async with contextlib.aclosing(super().run()) as steps:
            async for step in steps:
                yield step

    def _mark(self) -> None:
        """Mark the ledgers of scopes with an auditor, so that workers help; without workers, marks would remain."""
        if self._state.election.vote_paths(scoped=True):
            scope_id = None
        elif self._state.election.vote_paths():
            scope_id = 0
        else:
            return
        for marked in mark_ledgers(self._cluster, [self.bookie_id], scope_id=scope_id):
            self.plan.marked.add(marked.ledger)
