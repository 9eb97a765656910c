"""Moves all that lost or leaving bookies hold, in every scope, to other bookies.

Recover, decommission and drain share `BookieMover`: it finds the ledgers, reports obstacles, and moves
several at once. Source: BookKeeperAdmin.recoverBookieData, RecoverCommand.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeVar

from bkctl.errors import BkctlError, Conflict, LedgerNotFound, NotEnoughBookies
from bkctl.formats.metadata import LedgerState
from bkctl.metadata.cluster import COOKIES
from bkctl.pace import Pace
from bkctl.replication.fragments import spans_text
from bkctl.replication.holdings import HeldLedger, is_covered, ledgers_on
from bkctl.replication.lost_entries import LostEntryFinder, UnreadableSpans
from bkctl.replication.move_plan import (
    LedgerMove,
    MoveOutcome,
    MovePlan,
    MoveProgress,
    PlannedFragment,
    check_scopes_known,
    left_open,
)
from bkctl.replication.move_queue import MoveQueue
from bkctl.replication.replicator import LedgerFragmentReplicator
from bkctl.tasks import in_order

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.resume import ResumeFile

T = TypeVar("T")

#: Ledgers whose bookies are asked at once which entries they have.
PROBES_AT_ONCE: Final = 32
#: Ledgers whose metadata is read at once.
_BATCH_COUNT: Final = 500


class BookieMover:
    """Copies all that the bookies `leaving` hold to other bookies, and swaps the bookies in the metadata.

    `pace` bounds the bytes copied, of all ledgers together, and may pause the moves. `skip_open` leaves OPEN ledgers
    alone. `fence` False leaves only the last fragment of a ledger that a writer may add to; with `fence` such a ledger
    is fenced and closed first. The locks of auto-recovery are taken: its workers do not repeat the work, and no
    bookie collects the copies as garbage before the metadata names it (removeOverReplicatedledgers). `plan` is the
    total that `progress` counts against, `note` gets messages about waiting. The mover belongs to the event loop of
    `bookkeeper`.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        leaving: Collection[str],
        plan: MovePlan | None = None,
        *,
        pace: Pace | None = None,
        skip_open: bool = False,
        fence: bool = True,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self.leaving = frozenset(leaving)
        self.progress = MoveProgress(plan or MovePlan())
        self._cluster = bookkeeper.cluster
        self._skip_open, self._fence = skip_open, fence
        self._note = note
        self._pace = pace or Pace()
        self._replicator = LedgerFragmentReplicator(bookkeeper, pace=self._pace, progress=self.progress.copied)
        self.lost_entries = LostEntryFinder(bookkeeper, self._replicator.checker.replicas)

    async def held(
        self, ids: Iterable[LedgerId] | None = None, *, doubtful: bool = False
    ) -> AsyncGenerator[tuple[LedgerId, HeldLedger | BkctlError], None]:
        """Yield the ledgers that name the leaving bookies, as `ledgers_on`; a thread reads the metadata."""
        found = ledgers_on(self._cluster, self.leaving, ids, doubtful=doubtful)
        while batch := await asyncio.to_thread(lambda: list(islice(found, _BATCH_COUNT))):
            for ledger in batch:
                yield ledger

    async def held_by(
        self,
        look: Callable[[LedgerId, HeldLedger | BkctlError], Awaitable[T]],
        ids: Iterable[LedgerId] | None = None,
    ) -> AsyncGenerator[T, None]:
        """Yield the result of `look` for each ledger of `held`, in order; several looks run at once."""
        async with contextlib.aclosing(self.held(ids)) as ledgers:
            looks = in_order(ledgers, lambda ledger: look(*ledger), lambda: PROBES_AT_ONCE)
            async with contextlib.aclosing(looks):
                async for _, found in looks:
                    yield found

    async def planned(
        self, ids: Iterable[LedgerId] | None = None
    ) -> AsyncGenerator[PlannedFragment | LedgerMove, None]:
        """Yield a dry run of `move`, fragment by fragment, and change nothing. Bookies are asked for their entries.

        A ledger that cannot be planned yields a LedgerMove with the reason.
        """
        up = {bookie.bookie_id for bookie in await self.registered()}

        async def look(ledger: LedgerId, held: HeldLedger | BkctlError) -> list[PlannedFragment | LedgerMove]:
            if isinstance(held, BkctlError):
                if ids is not None and isinstance(held, LedgerNotFound):
                    raise held
                return [LedgerMove(ledger, MoveOutcome.FAILED, problem=held.message)]
            if self._skip_open and held.metadata.state is LedgerState.OPEN:
                return [left_open(held)]
            return await self._planned(held, up)

        async with contextlib.aclosing(self.held_by(look, ids)) as planned:
            async for rows in planned:
                for row in rows:
                    yield row

    async def _planned(self, held: HeldLedger, up: Collection[str]) -> list[PlannedFragment | LedgerMove]:
        closes = held.grows and self._fence
        try:
            unreadable = await self.lost_entries.find(held, up)
            open_problem = await self.open_problem(held, up)
        except BkctlError as error:
            return [LedgerMove(held.ledger, MoveOutcome.FAILED, held.metadata.state, problem=error.message)]
        planned: list[PlannedFragment | LedgerMove] = []
        for fragment in held.fragments:
            if not (fragment.closed or closes):
                planned.append(left_open(held))
                continue
            targets: dict[int, str] = {}
            spans, lost = unreadable.get(fragment.first_entry_id, UnreadableSpans())
            silent = self.lost_entries.silent_text(fragment.ensemble)
            problem = f"No bookie that answers has {spans_text(spans)}{silent}" if spans else open_problem
            try:
                targets = await self._replicator.targets(fragment, exclude=self.leaving)
            except NotEnoughBookies as error:
                if fragment.held_count != 0:
                    problem = error.message
            planned.append(PlannedFragment(held, fragment, targets, closes, problem, spans, lost))
        return planned

    async def open_problem(self, held: HeldLedger, up: Collection[str]) -> str | None:
        """Return why a ledger that is not closed could not be moved as a whole; None if it could, or is closed.

        To close it, bookies of its last ensemble must answer. Else the writer left these bookies: it is not fenced, and
        only entries that are confirmed can be moved.
        """
        if held.metadata.is_closed:
            return None
        if held.grows:
            schedule, ensemble = held.fragments[-1].schedule, held.fragments[-1].ensemble
            away = (set(ensemble) - set(up)) | set(self.lost_entries.silent(ensemble))
            if not self._fence or is_covered(schedule, ensemble, set(ensemble) - away):
                return None
            return f"It cannot be closed: too few of its last bookies answer (not {', '.join(sorted(away))})"
        check = await self._replicator.checker.on_bookies(held.ledger, self.leaving, held.found)
        if held.metadata.state is not LedgerState.OPEN or not check.needs_recovery:
            return None
        return "Its writer left these bookies, so it is not fenced, and its last entries there are not confirmed yet"

    async def move(
        self, ids: Iterable[LedgerId], *, resume: ResumeFile | None = None
    ) -> AsyncGenerator[LedgerMove, None]:
        """Move these ledgers, several at once, and yield the result of each as its move ends.

        Ledgers that the `resume` file names are skipped, and finished ones are recorded there. Raise errors of the
        store; a ledger's own error is in its result.
        """
        remaining = iter(ids) if resume is None else self._not_done(ids, resume)
        queue = MoveQueue(
            remaining, self._cluster, self._replicator, self.leaving, self.progress, self._pace, self._note,
            skip_open=self._skip_open, fence=self._fence,
        )  # fmt: skip
        async with contextlib.aclosing(queue.results()) as results:
            async for result in results:
                self.progress.ledger_count += 1
                if resume is not None and result.outcome in (MoveOutcome.MOVED, MoveOutcome.GONE):
                    resume.record(result.ledger, result.entry_count, result.size_bytes)
                yield result

    def _not_done(self, ids: Iterable[LedgerId], resume: ResumeFile) -> Iterator[LedgerId]:
        """Yield the ledgers that the resume file does not name, and count the other ones as done."""
        for ledger in ids:
            if ledger not in resume.done:
                yield ledger
            else:
                self.progress.ledger_count += 1

    async def left(self) -> list[tuple[LedgerId, BkctlError | None]]:
        """Return the ledgers of every scope that still have entries on the leaving bookies.

        A ledger with unreadable metadata may have some; it comes with the error.
        """
        left: list[tuple[LedgerId, BkctlError | None]] = []
        async with contextlib.aclosing(self.held(doubtful=True)) as ledgers:
            async for ledger, held in ledgers:
                if isinstance(held, BkctlError):
                    left.append((ledger, held))
                elif held.holds_entries:
                    left.append((ledger, None))
        return left

    async def registered(self) -> list[RegisteredBookie]:
        return await asyncio.to_thread(self._cluster.bookies.list, False)

    async def delete_cookies(self) -> tuple[str, ...]:
        """Delete the cookies of the leaving bookies; return the bookies that had one.

        Raise Conflict if one of them is registered, since it needs its cookie to restart, and as `check_scopes_known`.
        """

        def delete() -> tuple[str, ...]:
            deleted = []
            check_scopes_known(self._cluster)
            up = {bookie.bookie_id for bookie in self._cluster.bookies.list(include_down=False)}
            for bookie_id in sorted(self.leaving):
                if bookie_id in up:
                    raise Conflict(f"Bookie {bookie_id} is up, and needs its cookie", hint="stop it first")
                found = self._cluster.store.get(f"{COOKIES}/{bookie_id}")
                if found is not None:
                    self._cluster.cookies.remove(bookie_id, found.version)
                    deleted.append(bookie_id)
            return tuple(deleted)

        return await asyncio.to_thread(delete)
