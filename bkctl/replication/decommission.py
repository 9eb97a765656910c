"""Removes a stopped bookie from the cluster. Source: BookKeeperAdmin.decommissionBookie, DecommissionCommand.

Unlike Apache's, this decommission covers every scope, copies ledgers itself beside auto-recovery's workers, reports
obstacles, and never deletes a cookie while the bookie has entries left.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import TYPE_CHECKING

from bkctl.client.bookies import in_thread
from bkctl.errors import Conflict, NotFound
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.departure_checks import DepartureChecks
from bkctl.replication.departure_steps import (
    BLOCKING_RESULTS,
    PASS_COUNT_MAX,
    UNRECOVERABLE_ADVICE,
    Step,
    StepKind,
    StepResult,
    ledger_step,
    ledgers_text,
)
from bkctl.replication.marking import mark_ledgers
from bkctl.replication.move_plan import LedgerMove, MoveOutcome, MovePlan, check_scopes_known

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.ids import LedgerId
    from bkctl.pace import Pace


class Decommission:
    """The decommission of a stopped bookie: `check`, then `run`.

    `plan` is the result of `plan_move` for the bookie. `skip_unrecoverable` names and skips ledgers with unreadable
    entries; auto-recovery keeps their marks, as Apache's does, and retries until they are unmarked. `keep_cookie` keeps
    the cookie at the end. `pace` and `note` are BookieMover's.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        bookie_id: str,
        plan: MovePlan,
        *,
        skip_unrecoverable: bool = False,
        keep_cookie: bool = False,
        pace: Pace | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.mover = BookieMover(bookkeeper, [bookie_id], plan, pace=pace, note=note)
        self.bookie_id = bookie_id
        self.skip_unrecoverable = skip_unrecoverable
        self._plan = plan
        self._checks = DepartureChecks(self.mover, skip_unrecoverable=skip_unrecoverable)
        self._cluster = bookkeeper.cluster
        self._keep_cookie = keep_cookie
        self._state = AutoRecoveryState(self._cluster.store)
        self._skipped: set[LedgerId] = set()
        #: True after a check found that nothing may be moved.
        self.forbidden = False

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield the obstacles to the decommission, and change nothing.

        With `probe`, bookies are asked which entries they have, ledger by ledger. Raise NotFound for a bookie that is
        neither registered nor named by a ledger, and errors of the store.
        """
        found = await in_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None and not self._plan.ledgers and not self._plan.damaged:
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
        if await in_thread(self._state.settings.is_enabled):
            yield Step(StepKind.AUTO_RECOVERY, StepResult.OK, "Auto-recovery is on")
        else:
            self.forbidden = True
            yield Step(
                StepKind.AUTO_RECOVERY, StepResult.BLOCKED, "Auto-recovery is disabled, so nothing is to be moved now",
                "'bkctl autorecovery enable'; 'bkctl bookies recover' works without",
            )  # fmt: skip
        if not self._keep_cookie:
            try:
                await in_thread(check_scopes_known, self._cluster)
            except Conflict as error:
                self.forbidden = True
                yield Step(StepKind.COOKIE, StepResult.BLOCKED, error.message, error.hint)
        yield await self._auditor()
        async for step in self._checks.capacity():
            self.forbidden |= step.kind is StepKind.SPACE and step.result is StepResult.BLOCKED
            yield step
        async for step in self._checks.obstacles(probe=probe, open_stays=False):
            yield step

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move all that is on the bookie, then delete its cookie; yield a step for each ledger and one for the cookie.

        The cookie stays while the bookie has entries left in any scope, except of ledgers that were skipped as
        unrecoverable. Raise Conflict if the bookie is registered.
        """
        await self._check_stopped()
        await self._mark()
        ids: Iterable[LedgerId] = self._plan.ledgers
        for _ in range(PASS_COUNT_MAX):
            is_blocked = False
            async with contextlib.aclosing(self.mover.move(ids)) as moves:
                async for move in moves:
                    step = self._step(move)
                    is_blocked |= step.result in BLOCKING_RESULTS
                    yield step
            left = dict(await self.mover.left())
            more = left.keys() - self._skipped
            if is_blocked or not more:
                break
            ids = sorted(more)
        yield await self._finish_cookie(more)

    async def _finish_cookie(self, more: Collection[LedgerId]) -> Step:
        """Delete the cookie if nothing has to keep it; `more` are ledgers that still have entries on the bookie."""
        given_up = f"; {ledgers_text(len(self._skipped))} given up" if self._skipped else ""
        if more:
            named = ", ".join(map(str, sorted(more)[:5])) + (f" and {len(more) - 5:,} more" if len(more) > 5 else "")
            return Step(
                StepKind.COOKIE, StepResult.BLOCKED,
                f"The cookie stays: {ledgers_text(len(more))} still {'has' if len(more) == 1 else 'have'} entries on "
                f"{self.bookie_id}: {named}",
                "remove the obstacles and run it again; moved ledgers stay moved",
            )  # fmt: skip
        if self._keep_cookie:
            return Step(StepKind.COOKIE, StepResult.KEPT, f"The cookie of {self.bookie_id} is kept{given_up}")
        if await self.mover.delete_cookies():
            return Step(StepKind.COOKIE, StepResult.DELETED, f"The cookie of {self.bookie_id} is deleted{given_up}")
        return Step(StepKind.COOKIE, StepResult.OK, f"{self.bookie_id} has no cookie")

    async def _check_stopped(self) -> None:
        found = await in_thread(self._cluster.bookies.get, self.bookie_id)
        if found is not None and found.state != "down":
            raise Conflict(
                f"Bookie {self.bookie_id} is registered ({found.state}), so it is not stopped",
                hint=f"stop it first; 'bkctl bookies drain {self.bookie_id}' moves its ledgers while it serves",
            )

    async def _auditor(self) -> Step:
        kinds = self._plan.kinds or {False}
        missing = [
            "the other scopes" if scoped else "scope 0"
            for scoped in sorted(kinds)
            if await in_thread(lambda scoped=scoped: self._state.election.auditor(scoped=scoped)) is None
        ]
        if missing:
            return Step(
                StepKind.AUDITOR, StepResult.WARNING,
                f"No auditor is elected for {' and '.join(missing)}: this command moves these ledgers without workers",
                "start 'bkctl autorecovery run' on other hosts to share the work",
            )  # fmt: skip
        return Step(StepKind.AUDITOR, StepResult.OK, "An auditor is elected")

    async def _mark(self) -> None:
        """Mark the ledgers of scopes with an auditor, so that workers help; without workers, marks would remain."""

        def mark() -> None:
            if self._state.election.auditor(scoped=True) is not None:
                scope_id = None
            elif self._state.election.auditor() is not None:
                scope_id = 0
            else:
                return
            for marked in mark_ledgers(self._cluster, [self.bookie_id], scope_id=scope_id):
                self._plan.marked.add(marked.ledger)

        await in_thread(mark)

    def _step(self, move: LedgerMove) -> Step:
        result = StepResult(move.outcome.value)
        advice = None
        if move.outcome is MoveOutcome.UNRECOVERABLE:
            advice = UNRECOVERABLE_ADVICE
            if self.skip_unrecoverable:
                self._skipped.add(move.ledger)
                result, advice = StepResult.SKIPPED, None
        return ledger_step(move, result, advice)
