"""The departure of a bookie: steps, checks and passes, of a stopped bookie (decommission) and a serving one (drain)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple

from bkctl.client.disk_space import disk_space
from bkctl.client.ledger import BookKeeper
from bkctl.columns import counted, size_text, some_of
from bkctl.errors import BkctlError, Conflict, NotEnoughBookies, NotFound, TimedOut
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.pace import Pace
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.fragments import EntrySpan, spans_text
from bkctl.replication.holdings import HeldLedger, LedgerMove, MovePlan, Replacements, check_scopes_known
from bkctl.replication.marking import mark_ledgers

OPEN_ADVICE: Final = "its writer leaves the bookie with its next entry; 'bkctl ledger recover' closes it"
UNRECOVERABLE_ADVICE: Final = "start a bookie that has them; or give them up with --skip-unrecoverable"


class StepKind(StrEnum):
    """The subject of a step."""

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
    """The result of a step; a ledger's result may be any MoveOutcome."""

    OK = "ok"
    WARNING = "warning"
    #: The departure cannot continue, or the ledger stays on the bookie.
    BLOCKED = "blocked"
    MOVED = "moved"
    GONE = "gone"
    OPEN = "open"
    UNRECOVERABLE = "unrecoverable"
    #: Unrecoverable, and skipped at the caller's request.
    SKIPPED = "skipped"
    FAILED = "failed"
    DELETED = "deleted"
    KEPT = "kept"


#: The largest share of the free space on the other bookies that a move should need.
SPACE_SHARE_MAX: Final = 0.8
#: The number of passes over the ledgers, to find those that came to the bookie meanwhile.
PASS_COUNT_MAX: Final = 3
#: Results that prevent the departure of a bookie.
BLOCKING_RESULTS: Final = frozenset((StepResult.BLOCKED, StepResult.OPEN, StepResult.UNRECOVERABLE, StepResult.FAILED))


class Step(NamedTuple):
    """A finding or an action. `advice` says what to do about a finding.

    A step about a ledger has its id, the copied entries and bytes, and the entries that no replica returns.
    """

    kind: StepKind
    result: StepResult
    message: str
    advice: str | None = None
    ledger: LedgerId | None = None
    entry_count: int | None = None
    size_bytes: int | None = None
    unreadable: tuple[EntrySpan, ...] = ()


@dataclass(eq=False)
class Departure(ABC):
    """The departure of one bookie, whose ledgers move to other bookies. `plan` is the result of `plan_move` for it.

    `skip_unrecoverable`: unrecoverable ledgers do not block. `pace` and `note` are BookieMover's.
    """

    #: Open ledgers are fenced, closed and moved; otherwise they stay.
    fence: ClassVar[bool] = True
    #: The advice for results of moves.
    advice: ClassVar[Mapping[StepResult, str]] = {}
    #: The kinds of blocked steps that forbid all moves.
    forbidding: ClassVar[Collection[StepKind]] = ()

    bookkeeper: BookKeeper
    bookie_id: str
    plan: MovePlan
    skip_unrecoverable: bool = False
    pace: Pace | None = None
    note: Callable[[str], None] = lambda _: None
    _skipped: set[LedgerId] = field(default_factory=set)
    #: True after a check found that nothing may be moved.
    forbidden: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.mover = BookieMover(
            self.bookkeeper, [self.bookie_id], self.plan, pace=self.pace, fence=self.fence, note=self.note
        )
        self._cluster = self.bookkeeper.cluster

    async def check(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield the obstacles to the departure, and change nothing.

        With `probe`, bookies are asked which entries they have, ledger by ledger. Raise as `preconditions`, and errors
        of the store.
        """
        for steps in (self.preconditions(), self.capacity(), self.obstacles(probe=probe)):
            async for step in steps:
                self.forbidden |= step.result is StepResult.BLOCKED and step.kind in self.forbidding
                yield step

    @abstractmethod
    def preconditions(self) -> AsyncGenerator[Step, None]:
        """Yield a step for each condition that the bookie and the cluster must meet."""

    async def run(self) -> AsyncGenerator[Step, None]:
        """Move all that is on the bookie; yield a step for each ledger, and one for the end."""
        ids: Iterable[LedgerId] = self.plan.ledgers
        for _ in range(PASS_COUNT_MAX):
            is_blocked = False
            async with contextlib.aclosing(self.mover.move(ids)) as moves:
                async for move in moves:
                    step = self._step(move)
                    is_blocked |= step.result in BLOCKING_RESULTS
                    yield step
            left = [ledger for ledger, _ in await self.mover.left() if ledger not in self._skipped]
            if is_blocked or not left:
                break
            ids = left
        yield await self._finish(left)

    def _step(self, move: LedgerMove) -> Step:
        result = StepResult(move.outcome.value)
        advice = self.advice.get(result)
        if result is StepResult.UNRECOVERABLE and self.skip_unrecoverable:
            self._skipped.add(move.ledger)
            result, advice = StepResult.SKIPPED, None
        if move.problem is not None:
            message = move.problem
        elif result is StepResult.GONE:
            message = "Another worker moved it, or it was deleted"
        else:
            message = f"Copied, in {counted(move.fragment_count, 'fragment')}"
        return Step(
            StepKind.LEDGER, result, message, advice, move.ledger, move.entry_count, move.size_bytes, move.unreadable
        )

    @abstractmethod
    async def _finish(self, left: Sequence[LedgerId]) -> Step:
        """End the departure; `left` are the ledgers that still have entries on the bookie, in order."""

    async def capacity(self) -> AsyncGenerator[Step, None]:
        """Yield two steps: enough writable bookies, and enough space on them."""
        plan = self.plan
        registered = await self.mover.registered()
        writable = Replacements(registered, self.mover.leaving).writable
        scoped_count = sum(bookie.ledger_scopes for bookie in writable)
        text = f"{counted(len(writable), 'bookie')} writable"
        if True in plan.kinds:
            text += f", {scoped_count:,} of them for ledger scopes"
        if plan.silent:
            text += f"; no answer from {some_of(plan.silent)}"
        if plan.crowded:
            text += f"; not enough for {counted(len(plan.crowded), 'ledger')}"
            yield Step(StepKind.BOOKIES, StepResult.BLOCKED, text, "start more bookies")
        else:
            result, advice = StepResult.OK, None
            if plan.silent:
                result, advice = StepResult.WARNING, "'bkctl cluster health' says why they do not answer"
            yield Step(StepKind.BOOKIES, result, f"{text}: as many as every ensemble needs", advice)
        yield await self._space(writable)

    async def _space(self, writable: list[RegisteredBookie]) -> Step:
        free, silent = 0, []
        async for space in disk_space(self.mover.bookkeeper, writable):
            if space.error is not None or space.free is None:
                silent.append(space.bookie.bookie_id)
            else:
                free += space.free
        needed = self.plan.size_bytes
        answered = counted(len(writable) - len(silent), "bookie")
        text = f"About {size_text(needed)} to copy, {size_text(free)} free on {answered}"
        if silent:
            text += f"; no answer from {', '.join(silent)}"
        if needed > free and writable and not silent:
            return Step(StepKind.SPACE, StepResult.BLOCKED, text, "add disks or bookies, or delete ledgers")
        if silent or needed > free * SPACE_SHARE_MAX:
            return Step(StepKind.SPACE, StepResult.WARNING, text, "look at 'bkctl bookies usage'")
        return Step(StepKind.SPACE, StepResult.OK, text)

    async def obstacles(self, *, probe: bool) -> AsyncGenerator[Step, None]:
        """Yield a step for each ledger that cannot be moved, and at last the total of what there is to move.

        Only with `probe`, bookies are asked which entries they have.
        """
        plan = self.plan
        count = len(plan.damaged) if probe else len(plan.crowded) + len(plan.damaged)
        for ledger, problem in plan.damaged.items():
            yield Step(
                StepKind.LEDGER, StepResult.BLOCKED, problem, "restore its metadata, or delete the ledger", ledger
            )  # fmt: skip
        if probe:
            up = {bookie.bookie_id for bookie in await self.mover.registered()}

            async def look(_: LedgerId, held: HeldLedger | BkctlError) -> Step | None:
                return None if isinstance(held, BkctlError) else await self._obstacle(held, up)

            async with contextlib.aclosing(self.mover.held_by(look, plan.ledgers)) as steps:
                async for step in steps:
                    if step is not None:
                        count += step.result is not StepResult.SKIPPED
                        yield step
        text = f"{counted(len(plan.ledgers), 'ledger')} to move"
        if plan.scope_count > 1:
            text += f", in {plan.scope_count:,} scopes"
        if plan.open_count:
            text += f", {plan.open_count:,} not closed"
        if count:
            text += f"; {counted(count, 'ledger')} cannot be moved"
        yield Step(StepKind.LEDGERS, StepResult.BLOCKED if count else StepResult.OK, text)

    async def _obstacle(self, held: HeldLedger, up: set[str]) -> Step | None:
        if held.grows and not self.fence:
            return Step(StepKind.LEDGER, StepResult.OPEN, "A writer may be adding to it", OPEN_ADVICE, held.ledger)
        try:
            for fragment in held.fragments:
                if fragment.held_count != 0:
                    await self.mover.replicator.targets(fragment, exclude=self.mover.unfit)
        except NotEnoughBookies as error:
            return Step(StepKind.LEDGER, StepResult.BLOCKED, error.message, error.hint, held.ledger)
        unreadable = await self.mover.lost_entries.find(held, up)
        if (problem := await self.mover.open_problem(held, up)) is not None:
            return Step(StepKind.LEDGER, StepResult.BLOCKED, problem, "start its bookies", held.ledger)
        spans = tuple(span for first in sorted(unreadable) for span in unreadable[first].spans)
        if not spans:
            return None
        others = dict.fromkeys(
            bookie_id if bookie_id in up else f"{bookie_id} (down)"
            for fragment in held.fragments
            for bookie_id in fragment.ensemble
            if bookie_id not in self.mover.leaving
        )
        where = f"; its other replicas were on {', '.join(others)}" if others else "; it has no other replicas"
        where += self.mover.lost_entries.silent_text(
            dict.fromkeys(bookie_id for fragment in held.fragments for bookie_id in fragment.ensemble)
        )
        result = StepResult.BLOCKED
        advice: str | None = "start the bookies that may have them"
        if all(entries.lost for entries in unreadable.values()):
            advice = UNRECOVERABLE_ADVICE
            if self.skip_unrecoverable:
                result, advice = StepResult.SKIPPED, None
        return Step(
            StepKind.LEDGER, result, f"No bookie that is up has {spans_text(spans)}{where}", advice, held.ledger,
            unreadable=spans,
        )  # fmt: skip


@dataclass(eq=False)
class Decommission(Departure):
    """The decommission of a stopped bookie: `check`, then `run`.

    `skip_unrecoverable` names and skips ledgers with unreadable entries; auto-recovery keeps their marks, as Apache's
    does, and retries until they are unmarked. `keep_cookie` keeps the cookie at the end.
    """

    advice: ClassVar = {StepResult.UNRECOVERABLE: UNRECOVERABLE_ADVICE}
    forbidding: ClassVar = (StepKind.STOPPED, StepKind.AUTO_RECOVERY, StepKind.COOKIE, StepKind.SPACE)

    keep_cookie: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state = AutoRecoveryState(self._cluster.store)

    async def preconditions(self) -> AsyncGenerator[Step, None]:
        """Raise NotFound for a bookie that is neither registered nor named by a ledger."""
        found = await asyncio.to_thread(self._cluster.bookies.get, self.bookie_id)
        if found is None and not self.plan.ledgers and not self.plan.damaged:
            raise NotFound(
                f"No bookie {self.bookie_id}, and no ledger names it: it was decommissioned, or never belonged "
                "to this cluster",
                hint="'bkctl bookies list' shows them",
            )
        if found is not None and found.state != "down":
            yield Step(
                StepKind.STOPPED, StepResult.BLOCKED, f"{self.bookie_id} is registered ({found.state})",
                f"stop it first; 'bkctl bookies drain {self.bookie_id}' moves its ledgers while it serves",
            )  # fmt: skip
        else:
            yield Step(StepKind.STOPPED, StepResult.OK, f"{self.bookie_id} is not registered")
        if await asyncio.to_thread(self._state.settings.is_enabled):
            yield Step(StepKind.AUTO_RECOVERY, StepResult.OK, "Auto-recovery is on")
        else:
            yield Step(
                StepKind.AUTO_RECOVERY, StepResult.BLOCKED, "Auto-recovery is disabled, so nothing is to be moved now",
                "'bkctl autorecovery enable'; 'bkctl bookies recover' works without",
            )  # fmt: skip
        if not self.keep_cookie:
            try:
                await asyncio.to_thread(check_scopes_known, self._cluster)
            except Conflict as error:
                yield Step(StepKind.COOKIE, StepResult.BLOCKED, error.message, error.hint)
        yield await self._auditor()

    async def _finish(self, left: Sequence[LedgerId]) -> Step:
        given_up = f"; {counted(len(self._skipped), 'ledger')} given up" if self._skipped else ""
        if left:
            return Step(
                StepKind.COOKIE, StepResult.BLOCKED,
                f"The cookie stays: {counted(len(left), 'ledger')} still {'has' if len(left) == 1 else 'have'} entries "
                f"on {self.bookie_id}: {some_of(left)}",
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


_POLL_S: Final = 0.1


class Drain(Departure):
    """The drain of a serving bookie: `check`, `set_read_only`, then `run`; the bookie may be stopped afterwards.

    Moved ledgers stay moved: another drain continues with the rest.
    """

    fence = False
    advice: ClassVar = {StepResult.OPEN: OPEN_ADVICE}
    forbidding: ClassVar = (StepKind.READ_ONLY,)

    async def preconditions(self) -> AsyncGenerator[Step, None]:
        """Raise Conflict for a bookie that is down, NotFound for an unknown bookie."""
        found = await self._up()
        if found.state == "ro":
            yield Step(StepKind.READ_ONLY, StepResult.OK, f"{self.bookie_id} is read-only")
        elif found.http_endpoint is None:
            yield Step(
                StepKind.READ_ONLY, StepResult.BLOCKED,
                f"{self.bookie_id} is writable, and has no HTTP server that could make it read-only",
                "start it again with httpServerEnabled=true or forceReadOnlyBookie=true, then drain it",
            )  # fmt: skip
        else:
            yield Step(
                StepKind.READ_ONLY, StepResult.WARNING, f"{self.bookie_id} is writable; it will become read-only"
            )

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
        found = await asyncio.to_thread(self._cluster.bookies.get, self.bookie_id)
        if found is not None and found.state == "rw":
            return Step(
                StepKind.READ_ONLY, StepResult.BLOCKED, f"{self.bookie_id} is writable again, and takes new ledgers",
                "run it again, which makes it read-only; moved ledgers stay moved",
            )  # fmt: skip
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
