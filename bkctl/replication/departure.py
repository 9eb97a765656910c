"""The departure of a bookie: the steps, checks and passes that decommission and drain share."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from bkctl.client.disk_space import disk_space
from bkctl.errors import BkctlError
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.fragments import EntrySpan, spans_text
from bkctl.replication.holdings import HeldLedger, Replacements
from bkctl.replication.move_plan import LedgerMove, MovePlan

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.pace import Pace

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
        """Return the step for the result of one ledger's move."""
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
        if plan.crowded:
            text += f"; not enough for {counted(len(plan.crowded), 'ledger')}"
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
        answered = counted(len(writable) - len(silent), "bookie")
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
        text = f"{counted(len(plan.ledgers), 'ledger')} to move"
        if plan.scope_count > 1:
            text += f", in {plan.scope_count:,} scopes"
        if plan.open_count:
            text += f", {plan.open_count:,} not closed"
        if blocked_count:
            text += f"; {counted(blocked_count, 'ledger')} cannot be moved"
        return Step(StepKind.LEDGERS, StepResult.BLOCKED if blocked_count else StepResult.OK, text)

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
            registered = await self.mover.registered()
            up = {bookie.bookie_id for bookie in registered}
            replacements = Replacements(registered, self.mover.leaving)

            async def look(ledger: LedgerId, held: HeldLedger | BkctlError) -> Step | None:
                if isinstance(held, BkctlError):
                    return None
                if (problem := replacements.problem(held)) is not None:
                    return Step(StepKind.LEDGER, StepResult.BLOCKED, problem, "start more bookies", ledger)
                return await self._obstacle(held, up)

            async with contextlib.aclosing(self.mover.held_by(look, plan.ledgers)) as steps:
                async for step in steps:
                    if step is not None:
                        count += step.result is not StepResult.SKIPPED
                        yield step
        yield self._summary(count)

    async def _obstacle(self, held: HeldLedger, up: set[str]) -> Step | None:
        if held.grows and not self.fence:
            return Step(StepKind.LEDGER, StepResult.OPEN, "A writer may be adding to it", OPEN_ADVICE, held.ledger)
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


def counted(count: int, noun: str) -> str:
    """Return `1 ledger`, `2 ledgers`."""
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def amount_text(size_bytes: int) -> str:
    value, unit = float(size_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
