"""Bookies that go for good: `Decommission` of one that is stopped, `Drain` of one that still serves.

Both say step by step what they find and do. Source: BookKeeperAdmin.decommissionBookie, DecommissionCommand. Other than
Apache's, they see every scope, copy ledgers themselves beside auto-recovery's workers, say what blocks them, and never
delete a cookie while entries are left on the bookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.client.bookies import in_thread
from bkctl.client.disk_space import disk_space
from bkctl.errors import BkctlError, Conflict, NotFound, TimedOut
from bkctl.metadata.underreplication import LedgerUnderreplicationManager
from bkctl.replication.auditor import mark_ledgers
from bkctl.replication.bookies import BookieMover, LedgerMove, MoveOutcome, MovePlan, check_scopes_known, spans_text
from bkctl.replication.checker import EntrySpan
from bkctl.replication.holdings import HeldLedger, Replacements

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.placement import Topology

#: Of the free space on the other bookies, no more than this should be needed.
SPACE_SHARE_MAX: Final = 0.8
#: How often all is looked through again for what came to the bookie meanwhile.
PASS_COUNT_MAX: Final = 3
_POLL_S: Final = 0.1


class StepKind(StrEnum):
    """What a step is about."""

    STOPPED = "stopped"
    READ_ONLY = "read-only"
    AUTO_RECOVERY = "auto-recovery"
    AUDITOR = "auditor"
    BOOKIES = "bookies"
    SPACE = "space"
    LEDGERS = "ledgers"
    LEDGER = "ledger"
    COOKIE = "cookie"


class StepResult(StrEnum):
    """How a step came out; those of a ledger are also those of MoveOutcome."""

    OK = "ok"
    WARNING = "warning"
    #: It stands against it: what is to follow is not done, or the ledger stays.
    BLOCKED = "blocked"
    MOVED = "moved"
    GONE = "gone"
    OPEN = "open"
    UNRECOVERABLE = "unrecoverable"
    #: As unrecoverable, and passed over as it was asked for.
    SKIPPED = "skipped"
    FAILED = "failed"
    DELETED = "deleted"
    KEPT = "kept"


#: Results that keep a bookie from being finished with.
STANDING_AGAINST: Final = frozenset((StepResult.BLOCKED, StepResult.OPEN, StepResult.UNRECOVERABLE, StepResult.FAILED))


class Step(NamedTuple):
    """One thing that was found or done. `advice` says what helps, where something does.

    A step about a ledger has its id, what was copied of it, and the entries that no replica gives.
    """

    kind: StepKind
    result: StepResult
    message: str
    advice: str | None = None
    ledger: LedgerId | None = None
    entry_count: int | None = None
    size_bytes: int | None = None
    unreadable: tuple[EntrySpan, ...] = ()


class _Departure:
    """What decommission and drain have in common."""

    def __init__(self, mover: BookieMover, bookie_id: str, *, skip_unrecoverable: bool = False) -> None:
        self.mover = mover
        self.bookie_id = bookie_id
        self.skip_unrecoverable = skip_unrecoverable
        self._bookkeeper = mover.bookkeeper
        self._cluster = mover.bookkeeper.cluster

    @property
    def plan(self) -> MovePlan:
        """What there is to move."""
        return self.mover.progress.plan

    async def _room(self) -> AsyncGenerator[Step, None]:
        """Whether there are bookies for everything, and space on them."""
        plan = self.plan
        registered = await self.mover.registered()
        writable = Replacements(registered, self.mover.leaving).writable
        scoped_count = sum(each.ledger_scopes for each in writable)
        with_scopes = any(plan.scopes[scope] for scope in plan.scopes if scope)
        text = f"{_bookies(len(writable))} writable"
        if with_scopes:
            text += f", {scoped_count:,} of them for ledger scopes"
        if plan.crowded:
            text += f"; not enough for {_ledgers(len(plan.crowded))}"
            yield Step(StepKind.BOOKIES, StepResult.BLOCKED, text, "start more bookies")
        else:
            yield Step(StepKind.BOOKIES, StepResult.OK, f"{text}: enough for every ensemble")
        yield await self._space(writable)

    async def _space(self, writable: list[RegisteredBookie]) -> Step:
        free, silent = 0, []
        async for space in disk_space(self._bookkeeper, writable):
            if space.error is not None or space.free is None:
                silent.append(space.bookie.bookie_id)
            else:
                free += space.free
        needed = self.plan.size_bytes
        text = f"About {_amount(needed)} to copy, {_amount(free)} free on {_bookies(len(writable) - len(silent))}"
        if silent:
            text += f"; no answer from {', '.join(silent)}"
        if needed > free and writable and not silent:
            return Step(StepKind.SPACE, StepResult.BLOCKED, text, "add disks or bookies, or delete ledgers")
        if silent or needed > free * SPACE_SHARE_MAX:
            return Step(StepKind.SPACE, StepResult.WARNING, text, "look at 'bkctl bookies usage'")
        return Step(StepKind.SPACE, StepResult.OK, text)

    def _summary(self, blocked_count: int) -> Step:
        plan = self.plan
        text = f"{_ledgers(len(plan.ledgers))} to move"
        if len(plan.scopes) > 1:
            text += f", in {len(plan.scopes):,} scopes"
        if plan.open_count:
            text += f", {plan.open_count:,} not closed"
        if blocked_count:
            text += f"; {_ledgers(blocked_count)} cannot be moved"
        return Step(StepKind.LEDGERS, StepResult.BLOCKED if blocked_count else StepResult.OK, text)

    async def _obstacles(self, *, probe: bool, open_stays: bool) -> AsyncGenerator[Step, None]:
        """How much there is to move, and with `probe` before that what keeps ledgers from being moved, one by one:
        the bookies are asked which entries they have."""
        plan = self.plan
        count = len(plan.crowded) + len(plan.damaged)
        for ledger, problem in plan.damaged.items():
            yield Step(
                StepKind.LEDGER, StepResult.BLOCKED, problem, "restore its metadata, or delete the ledger", ledger
            )  # fmt: skip
        if probe:
            for ledger, problem in plan.crowded.items():
                yield Step(StepKind.LEDGER, StepResult.BLOCKED, problem, "start more bookies", ledger)
            up = {each.bookie_id for each in await self.mover.registered()}

            async def look(ledger: LedgerId, held: HeldLedger | BkctlError) -> Step | None:
                if isinstance(held, BkctlError) or ledger in plan.crowded:
                    return None
                return await self._obstacle(held, up, open_stays)

            async with contextlib.aclosing(self.mover.held_by(look, plan.ledgers)) as steps:
                async for step in steps:
                    if step is not None:
                        count += step.result is not StepResult.SKIPPED
                        yield step
        yield self._summary(count)

    async def _obstacle(self, held: HeldLedger, up: set[str], open_stays: bool) -> Step | None:
        if held.grows and open_stays:
            return Step(StepKind.LEDGER, StepResult.OPEN, "A writer may be adding to it", _OPEN_ADVICE, held.ledger)
        unreadable = await self.mover.unreadable(held, up)
        spans = tuple(span for first in sorted(unreadable) for span in unreadable[first])
        if not spans:
            return None
        others = dict.fromkeys(
            f"{each} (down)" if each not in up else each
            for fragment in held.fragments
            for each in fragment.ensemble
            if each not in self.mover.leaving
        )
        where = f"; its other replicas were on {', '.join(others)}" if others else "; it has no other replicas"
        result, advice = (
            (StepResult.SKIPPED, None) if self.skip_unrecoverable else (StepResult.BLOCKED, _UNRECOVERABLE_ADVICE)
        )
        return Step(
            StepKind.LEDGER, result, f"No bookie that is up has {spans_text(spans)}{where}", advice, held.ledger,
            unreadable=spans,
        )  # fmt: skip


_OPEN_ADVICE: Final = "its writer leaves the bookie with its next entry; 'bkctl ledger recover' closes it"
_UNRECOVERABLE_ADVICE: Final = "start a bookie that has them; or give them up with --skip-unrecoverable"


class Decommission(_Departure):
    """Takes a bookie that is stopped out of the cluster for good.

    `check`, then `run`; `plan` is what `plan_move` found on it. `skip_unrecoverable`: ledgers of which entries are
    nowhere to be read are named and passed over; auto-recovery keeps its marks of them, as Apache's does, and goes on
    trying until they are unmarked. `keep_cookie`: it is not deleted at the end. `rate`, `topology` and `note` as
    BookieMover's.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        bookie_id: str,
        plan: MovePlan,
        *,
        skip_unrecoverable: bool = False,
        keep_cookie: bool = False,
        rate: int | None = None,
        topology: Topology | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        mover = BookieMover(bookkeeper, [bookie_id], plan, rate=rate, topology=topology, note=note)
        super().__init__(mover, bookie_id, skip_unrecoverable=skip_unrecoverable)
        self._keep_cookie = keep_cookie
        self._manager = LedgerUnderreplicationManager(self._cluster.store)
        self._skipped: set[LedgerId] = set()
        #: Whether a check came out so that nothing may be moved.
        self.forbidden = False

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Look whether it can be done, and what stands against it; changes nothing.

        With `probe` the bookies are asked which entries they have, ledger by ledger. Raises NotFound for a bookie that
        nothing names, and what the store raises.
        """
        found = await in_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None and not self.plan.ledgers and not self.plan.damaged:
            raise NotFound(
                f"No bookie {self.bookie_id}, and no ledger names it: it is decommissioned already, or was never here",
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
        if await in_thread(self._manager.is_enabled):
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
        async for step in self._room():
            self.forbidden |= step.kind is StepKind.SPACE and step.result is StepResult.BLOCKED
            yield step
        async for step in self._obstacles(probe=probe, open_stays=False):
            yield step

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move what is on the bookie, and then delete its cookie; a step for each ledger, and one for the cookie.

        The cookie stays while entries are left on the bookie in any scope, unless those are exactly ledgers that were
        skipped as unrecoverable. Raises Conflict when the bookie is registered.
        """
        await self._check_stopped()
        await self._mark()
        ids = list(self.plan.ledgers)
        for _ in range(PASS_COUNT_MAX):
            stands = False
            async with contextlib.aclosing(self.mover.move(ids)) as moves:
                async for move in moves:
                    step = self._step(move)
                    stands |= step.result in STANDING_AGAINST
                    yield step
            left = dict(await self.mover.left())
            more = left.keys() - self._skipped
            if stands or not more:
                break
            ids = sorted(more)
        given_up = f"; {_ledgers(len(self._skipped))} given up" if self._skipped else ""
        if more:
            named = ", ".join(map(str, sorted(more)[:5])) + (f" and {len(more) - 5:,} more" if len(more) > 5 else "")
            yield Step(
                StepKind.COOKIE, StepResult.BLOCKED,
                f"The cookie stays: {_ledgers(len(more))} {'still has' if len(more) == 1 else 'still have'} entries on "
                f"{self.bookie_id}: {named}",
                "remove what blocks them, and run it again; what was moved stays moved",
            )  # fmt: skip
        elif self._keep_cookie:
            yield Step(StepKind.COOKIE, StepResult.KEPT, f"The cookie of {self.bookie_id} was to be kept{given_up}")
        elif await self.mover.delete_cookies():
            yield Step(StepKind.COOKIE, StepResult.DELETED, f"The cookie of {self.bookie_id} is deleted{given_up}")
        else:
            yield Step(StepKind.COOKIE, StepResult.OK, f"{self.bookie_id} has no cookie")

    async def _check_stopped(self) -> None:
        found = await in_thread(self._cluster.bookies.get, self.bookie_id)
        if found is not None and found.state != "down":
            raise Conflict(
                f"Bookie {self.bookie_id} is registered ({found.state}), so it is not stopped",
                hint=f"stop it first; 'bkctl bookies drain {self.bookie_id}' moves its ledgers while it serves",
            )

    async def _auditor(self) -> Step:
        kinds = {bool(scope) for scope in self.plan.scopes} or {False}
        missing = [
            "the other scopes" if scoped else "scope 0"
            for scoped in sorted(kinds)
            if await in_thread(lambda scoped=scoped: self._manager.auditor(scoped=scoped)) is None
        ]
        if missing:
            return Step(
                StepKind.AUDITOR, StepResult.WARNING,
                f"No auditor is elected for {' and '.join(missing)}: this command moves those ledgers alone",
                "'bkctl autorecovery run' on some hosts would help",
            )  # fmt: skip
        return Step(StepKind.AUDITOR, StepResult.OK, "An auditor is elected")

    async def _mark(self) -> None:
        """Mark the ledgers where there are workers to help; where there are none, marks would only be left over."""

        def mark() -> None:
            if self._manager.auditor(scoped=True) is not None:
                scope_id = None
            elif self._manager.auditor() is not None:
                scope_id = 0
            else:
                return
            for marked in mark_ledgers(self._cluster, [self.bookie_id], scope_id=scope_id):
                self.plan.marked.add(marked.ledger)

        await in_thread(mark)

    def _step(self, move: LedgerMove) -> Step:
        result = StepResult(move.outcome.value)
        advice = None
        if move.outcome is MoveOutcome.UNRECOVERABLE:
            advice = _UNRECOVERABLE_ADVICE
            if self.skip_unrecoverable:
                self._skipped.add(move.ledger)
                result, advice = StepResult.SKIPPED, None
        return _ledger_step(move, result, advice)


class Drain(_Departure):
    """Moves all that a bookie holds while it still serves; it is read-only then, and may be stopped afterwards.

    `check`, then `set_read_only`, then `run`. What was moved stays moved: run again, it goes on with the rest.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        bookie_id: str,
        plan: MovePlan,
        *,
        rate: int | None = None,
        topology: Topology | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        mover = BookieMover(bookkeeper, [bookie_id], plan, rate=rate, fence=False, topology=topology, note=note)
        super().__init__(mover, bookie_id)

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Look whether it can be done, and what stands against it; changes nothing.

        Raises Conflict for a bookie that is down, NotFound for one that nothing names.
        """
        found = await self._up()
        if found.state == "ro":
            yield Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only")
        else:
            yield Step(
                StepKind.READ_ONLY, StepResult.WARNING, f"{self.bookie_id} takes writes; it will be made read-only"
            )
        async for step in self._room():
            yield step
        async for step in self._obstacles(probe=probe, open_stays=True):
            yield step

    async def set_read_only(self, switch: Callable[[RegisteredBookie], None], timeout_s: float) -> Step:
        """Have the bookie take no more entries, if it does, by `switch` (it blocks), and wait until it registered so.

        Raises what `switch` does, TimedOut.
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
        return Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} takes no more entries, and serves reads")

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move what is on the bookie; a step for each ledger, and one that says whether anything is left."""
        ids = self.plan.ledgers
        for _ in range(PASS_COUNT_MAX):
            stands = False
            async with contextlib.aclosing(self.mover.move(ids)) as moves:
                async for move in moves:
                    result = StepResult(move.outcome.value)
                    stands |= result in STANDING_AGAINST
                    yield _ledger_step(move, result, _OPEN_ADVICE if result is StepResult.OPEN else None)
            left = [ledger for ledger, _ in await self.mover.left()]
            if stands or not left:
                break
            ids = left
        if left:
            yield Step(
                StepKind.LEDGERS, StepResult.BLOCKED,
                f"{_ledgers(len(left))} {'is' if len(left) == 1 else 'are'} left on {self.bookie_id}",
                "run it again when what keeps them is gone; what was moved stays moved",
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


def _ledger_step(move: LedgerMove, result: StepResult, advice: str | None) -> Step:
    if move.problem is not None:
        message = move.problem
    elif result is StepResult.GONE:
        message = "Others moved it, or it was deleted"
    else:
        message = f"Copied, in {move.fragment_count:,} {'fragment' if move.fragment_count == 1 else 'fragments'}"
    return Step(
        StepKind.LEDGER, result, message, advice, move.ledger, move.entry_count, move.size_bytes, move.unreadable
    )


def _ledgers(count: int) -> str:
    return f"{count:,} {'ledger' if count == 1 else 'ledgers'}"


def _bookies(count: int) -> str:
    return f"{count:,} {'bookie' if count == 1 else 'bookies'}"


def _amount(size_bytes: int) -> str:
    value, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
