"""Moves all that lost or leaving bookies hold, in every scope, to other bookies.

Recover, decommission and drain share `BookieMover`: it finds the ledgers, reports obstacles, and moves
several at once. Source: BookKeeperAdmin.recoverBookieData, RecoverCommand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from bkctl import errors
from bkctl.client.ledger import BookKeeper
from bkctl.columns import some_of
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import COOKIES, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import Claim
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.pace import Pace
from bkctl.replication.fragments import EntrySpan, spans_text
from bkctl.replication.holdings import (
    HeldLedger,
    LedgerMove,
    MoveOutcome,
    MovePlan,
    MoveProgress,
    PlannedFragment,
    bookies_up,
    check_scopes_known,
    is_covered,
    ledgers_on,
    left_open,
)
from bkctl.replication.replica_reads import LostEntryFinder, UnreadableSpans
from bkctl.replication.replicator import LedgerFragmentReplicator, LedgerReplication, Outcome
from bkctl.replication.resume import ResumeFile
from bkctl.replication.signals import BatchedCalls
from bkctl.tasks import cancel_and_wait, in_order, run_to_end

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
        self.cluster = bookkeeper.cluster
        self.skip_open, self.fence, self.note = skip_open, fence, note
        self.pace = pace or Pace()
        self.replicator = LedgerFragmentReplicator(bookkeeper, pace=self.pace, progress=self.progress.copied)
        self.lost_entries = LostEntryFinder(bookkeeper, self.replicator.checker.replicas)

    async def held(
        self, ids: Iterable[LedgerId] | None = None, *, doubtful: bool = False
    ) -> AsyncGenerator[tuple[LedgerId, HeldLedger | errors.BkctlError], None]:
        """Yield the ledgers that name the leaving bookies, as `ledgers_on`; a thread reads the metadata."""
        found = ledgers_on(self.cluster, self.leaving, ids, doubtful=doubtful)
        while batch := await asyncio.to_thread(lambda: list(islice(found, _BATCH_COUNT))):
            for ledger in batch:
                yield ledger

    async def held_by(
        self,
        look: Callable[[LedgerId, HeldLedger | errors.BkctlError], Awaitable[T]],
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

        async def look(ledger: LedgerId, held: HeldLedger | errors.BkctlError) -> list[PlannedFragment | LedgerMove]:
            if isinstance(held, errors.BkctlError):
                if ids is not None and isinstance(held, errors.LedgerNotFound):
                    raise held
                return [LedgerMove(ledger, MoveOutcome.FAILED, problem=held.message)]
            if self.skip_open and held.metadata.state is LedgerState.OPEN:
                return [left_open(held)]
            return await self._planned(held, up)

        async with contextlib.aclosing(self.held_by(look, ids)) as planned:
            async for rows in planned:
                for row in rows:
                    yield row

    async def _planned(self, held: HeldLedger, up: Collection[str]) -> list[PlannedFragment | LedgerMove]:
        closes = held.grows and self.fence
        try:
            unreadable = await self.lost_entries.find(held, up)
            open_problem = await self.open_problem(held, up)
        except errors.BkctlError as error:
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
                targets = await self.replicator.targets(fragment, exclude=self.unfit)
            except errors.NotEnoughBookies as error:
                if fragment.held_count != 0:
                    problem = error.message
            lost = lost and bool(targets) and open_problem is None
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
            if not self.fence or is_covered(schedule, ensemble, set(ensemble) - away):
                return None
            return f"It cannot be closed: too few of its last bookies answer (not {', '.join(sorted(away))})"
        check = await self.replicator.checker.on_bookies(held.ledger, self.leaving, held.found)
        if held.metadata.state is not LedgerState.OPEN or not check.needs_recovery:
            return None
        return "Its writer left these bookies, so it is not fenced, and its last entries there are not confirmed yet"

    async def move(
        self, ids: Iterable[LedgerId], *, resume: ResumeFile | None = None
    ) -> AsyncGenerator[LedgerMove, None]:
        """Move these ledgers, several at once, and yield the result of each as its move ends.

        Finished ones are recorded in `resume`. Raise errors of the store; a ledger's own error is in its result.
        """
        queue = MoveQueue(self, iter(ids))
        async with contextlib.aclosing(queue.results()) as results:
            async for result in results:
                self.progress.ledger_count += 1
                if resume is not None and result.outcome in (MoveOutcome.MOVED, MoveOutcome.GONE):
                    resume.record(result.ledger, result.entry_count, result.size_bytes)
                yield result

    async def left(self) -> list[tuple[LedgerId, errors.BkctlError | None]]:
        """Return the ledgers of every scope that still have entries on the leaving bookies.

        A ledger with unreadable metadata may have some; it comes with the error.
        """
        left: list[tuple[LedgerId, errors.BkctlError | None]] = []
        async with contextlib.aclosing(self.held(doubtful=True)) as ledgers:
            async for ledger, held in ledgers:
                if isinstance(held, errors.BkctlError):
                    left.append((ledger, held))
                elif held.holds_entries:
                    left.append((ledger, None))
        return left

    async def registered(self) -> list[RegisteredBookie]:
        return await asyncio.to_thread(bookies_up, self.cluster, self.progress.plan.silent)

    @property
    def unfit(self) -> frozenset[str]:
        """The bookies that a plan gives no entries: the leaving ones, and silent ones."""
        return self.leaving.union(self.progress.plan.silent)

    async def delete_cookies(self) -> tuple[str, ...]:
        """Delete the cookies of the leaving bookies; return the bookies that had one.

        Raise Conflict if one of them is registered, since it needs its cookie to restart, and as `check_scopes_known`.
        """

        def delete() -> tuple[str, ...]:
            deleted = []
            check_scopes_known(self.cluster)
            up = {bookie.bookie_id for bookie in self.cluster.bookies.list(include_down=False)}
            for bookie_id in sorted(self.leaving):
                if bookie_id in up:
                    raise errors.Conflict(f"Bookie {bookie_id} is up, and needs its cookie", hint="stop it first")
                found = self.cluster.store.get(f"{COOKIES}/{bookie_id}")
                if found is not None:
                    self.cluster.cookies.remove(bookie_id, found.version)
                    deleted.append(bookie_id)
            return tuple(deleted)

        return await asyncio.to_thread(delete)


# --- the moves of many ledgers -----------------------------------------------------------------------------------

#: Attempts to move a ledger whose ensembles other clients change meanwhile.
_ATTEMPT_COUNT_MAX: Final = 3
#: Ledgers that are moved at once; so many wait for the metadata store together.
CONCURRENCY: Final = 512
#: The time for which another worker keeps a locked ledger to itself; then its entries are copied ahead.
LOCK_PATIENCE_S: Final = 15.0
#: The time after which a ledger that stayed locked fails. A worker keeps the lock of a ledger that it could not
#: replicate for 5 minutes (lockReleaseOfFailedLedgerGracePeriod).
LOCK_WAIT_S_MAX: Final = 600.0
#: The pauses between tries for a lock grow from the first to the second.
_LOCK_POLL_S: Final = 0.5
_LOCK_POLL_S_MAX: Final = 5.0
#: The time between looks for a pause.
_PAUSE_POLL_S: Final = 1.0


class _Attempt(NamedTuple):
    """A ledger being moved or locked, the monotonic time of its next try, and that of its first.

    `is_ahead`: its entries are copied already, without the lock.
    """

    due_s: float
    ledger: LedgerId
    since_s: float
    is_ahead: bool = False


@dataclass(eq=False)
class MoveQueue:
    """Moves ledgers off the bookies `leaving`, up to CONCURRENCY at once, each under its auto-recovery lock.

        waiting → metadata read ahead → running → result
                                      ↖         ↙
                                        locked

    A ledger that another worker has locked is retried. A pause ends the moves that are running, so that no ledger stays
    locked, and repeats them afterwards. Fragments that were copied by then are not copied again.

    The mover's `note` gets a message when only locked ledgers are left.
    """

    mover: BookieMover
    waiting: Iterator[LedgerId]
    _read: deque[tuple[LedgerId, VersionedMetadata | errors.BkctlError | None]] = field(default_factory=deque)
    #: A heap: the ledger that is due first comes first.
    _locked: list[_Attempt] = field(default_factory=list)
    _running: dict[asyncio.Task[LedgerMove | None], _Attempt] = field(default_factory=dict)
    _ended: asyncio.Queue[asyncio.Task[LedgerMove | None]] = field(default_factory=asyncio.Queue)
    _has_reported: bool = False

    def __post_init__(self) -> None:
        self._state = AutoRecoveryState(self.mover.cluster.store)
        owner = f"{os.uname().nodename}:{os.getpid()}"
        self._lock: BatchedCalls[LedgerId, Claim] = BatchedCalls(lambda ids: self._state.locks.lock_many(ids, owner))
        self._unlock: BatchedCalls[LedgerId, None] = BatchedCalls(self._unlock_many)

    async def results(self) -> AsyncGenerator[LedgerMove, None]:
        """Yield the result of each ledger as its move ends. Raise errors of the store."""
        ahead = self._read_ahead()
        try:
            while True:
                if self.mover.pace.is_paused:
                    await self._pause()
                while self._locked and len(self._running) < CONCURRENCY and self._locked[0].due_s <= time.monotonic():
                    self._start(heappop(self._locked), None)
                while len(self._running) < CONCURRENCY:
                    if not self._read:
                        self._read.extend(await ahead)
                        if not self._read:
                            break
                        ahead = self._read_ahead()
                    ledger, found = self._read.popleft()
                    known = None if isinstance(found, errors.BkctlError) else found
                    now = time.monotonic()
                    self._start(_Attempt(now, ledger, now), known)
                self.mover.progress.locked_count = len(self._locked)
                if not self._running and not self._locked:
                    return
                result = await self._next_result()
                if result is not None:
                    yield result
        finally:
            await cancel_and_wait(ahead, *self._running)

    def _read_ahead(self) -> asyncio.Task[list[tuple[LedgerId, VersionedMetadata | errors.BkctlError]]]:
        batch = list(islice(self.waiting, CONCURRENCY))
        return asyncio.create_task(asyncio.to_thread(lambda: list(self.mover.cluster.ledgers.read_many(batch))))

    async def _pause(self) -> None:
        """End the running moves, and wait for the end of the pause; the moves without a result come first then."""
        began = time.monotonic()
        moves = dict(self._running)
        await cancel_and_wait(*moves)
        for task, attempt in reversed(moves.items()):
            if task.cancelled():
                del self._running[task]
                self._read.appendleft((attempt.ledger, None))
        await self.mover.pace.resumed()
        self.mover.progress.paused(time.monotonic() - began)

    def _start(self, attempt: _Attempt, found: VersionedMetadata | None) -> None:
        waited_s = time.monotonic() - attempt.since_s
        copies_ahead = waited_s >= LOCK_PATIENCE_S and not attempt.is_ahead
        is_last = attempt.is_ahead and waited_s >= LOCK_WAIT_S_MAX
        task = asyncio.ensure_future(self._move(attempt.ledger, found, copies_ahead=copies_ahead, is_last=is_last))
        self._running[task] = attempt._replace(is_ahead=attempt.is_ahead or copies_ahead)
        task.add_done_callback(self._ended.put_nowait)

    async def _next_result(self) -> LedgerMove | None:
        """Wait for the end of a move, at most until a locked ledger is due; return None if no ledger has a result."""
        if not self._running and not self._has_reported:
            self._has_reported = True
            locked = [attempt.ledger for attempt in self._locked]
            self.mover.note(
                f"{'Ledger' if len(locked) == 1 else 'Ledgers'} {some_of(locked)}: locked by other workers, such as "
                f"auto-recovery's; waiting up to {LOCK_WAIT_S_MAX / 60:g} min for them"
            )
        timeout_s = _PAUSE_POLL_S
        if self._locked and len(self._running) < CONCURRENCY:
            timeout_s = min(timeout_s, max(self._locked[0].due_s - time.monotonic(), 0.0))
        try:
            async with asyncio.timeout(timeout_s):
                task = await self._ended.get()
        except TimeoutError:
            return None
        if task.cancelled():  # By a pause.
            return None
        attempt = self._running.pop(task)
        result = task.result()
        if result is None:
            now = time.monotonic()
            pause_s = min(_LOCK_POLL_S + (now - attempt.since_s) / 4, _LOCK_POLL_S_MAX)
            heappush(self._locked, attempt._replace(due_s=now + pause_s))
        return result

    async def _move(
        self, ledger: LedgerId, found: VersionedMetadata | None, *, copies_ahead: bool, is_last: bool
    ) -> LedgerMove | None:
        """Move the ledger under its lock. Return None if another worker has it locked.

        With `copies_ahead`, entries of a locked ledger are copied then, so that the move under the lock has little left
        to do: it lists the targets again, since only the lock keeps bookies from collecting the copies. With `is_last`,
        a locked ledger has failed. `found` is its metadata (None: read now). Raise errors of the store.
        """
        is_locked_by_another = False
        try:
            try:
                lock = await run_to_end(self._lock(ledger))
            except errors.Conflict as error:
                is_locked_by_another = True
                if is_last:
                    problem = f"{error.message}, for too long; 'bkctl autorecovery status' shows the locks"
                    return LedgerMove(ledger, MoveOutcome.FAILED, problem=problem)
                if copies_ahead:
                    with contextlib.suppress(errors.BkctlError):  # The move under the lock meets it again.
                        mover = self.mover
                        await mover.replicator.copy_ahead(ledger, mover.leaving, skip_open=mover.skip_open)
                return None
            return await self._move_locked(ledger, found, lock)
        finally:
            if not is_locked_by_another:
                await run_to_end(self._unlock(ledger))

    async def _move_locked(self, ledger: LedgerId, found: VersionedMetadata | None, lock: Claim) -> LedgerMove:
        state, mover = None, self.mover
        try:
            for _ in range(_ATTEMPT_COUNT_MAX):
                if found is None:
                    found = await asyncio.to_thread(mover.cluster.ledgers.read, ledger)
                state = state or found.metadata.state
                if mover.skip_open and found.metadata.state is LedgerState.OPEN:
                    return LedgerMove(ledger, MoveOutcome.OPEN, state, problem="It is open")
                replication = await mover.replicator.replicate_ledger(
                    ledger, found, bookies=mover.leaving, fence=mover.fence, lock=lock
                )
                found = None
                if not any(fragment.outcome is Outcome.SUPERSEDED for fragment in replication.fragments):
                    break
        except errors.LedgerNotFound:
            return LedgerMove(ledger, MoveOutcome.GONE)
        except errors.BkctlError as error:
            if isinstance(error, errors.TimedOut):
                await asyncio.to_thread(mover.cluster.instance_id)  # Raises if the silent server is the store.
            elif isinstance(error, errors.Unreachable) and not isinstance(
                error, errors.LedgerRecoveryFailed | errors.BookieUnavailable
            ):
                raise
            problem = str(error) if isinstance(error, errors.LedgerLengthUnknown) else error.message
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=problem)
        moved = _result_of(ledger, state, replication, serves=not mover.fence)
        if moved.outcome is MoveOutcome.MOVED and ledger in mover.progress.plan.marked:
            await asyncio.to_thread(self._unmark, ledger)
        return moved

    def _unlock_many(self, ledgers: list[LedgerId]) -> list[None]:
        self._state.locks.unlock_many(ledgers)
        return [None] * len(ledgers)

    def _unmark(self, ledger: LedgerId) -> None:
        """Delete the ledger's mark if it names leaving bookies only; otherwise a worker replicates the other ones."""
        with contextlib.suppress(errors.NotFound, errors.MetadataVersionConflict, errors.Corrupt):
            mark = self._state.marks.get(ledger)
            if mark is not None and self.mover.leaving.issuperset(mark.missing_replicas):
                self._state.marks.remove(ledger, mark.version)


def _result_of(
    ledger: LedgerId, before: LedgerState | None, replication: LedgerReplication, *, serves: bool
) -> LedgerMove:
    """Return the result for a ledger that was in the state `before`, and was replicated as `replication` says.

    With `serves` nothing is lost before the leaving bookies answer so, too.
    """
    check = replication.check
    outcome, problems = MoveOutcome.MOVED, [error.message for _, error in replication.errors[:1]]
    spans = tuple(EntrySpan(*entries[:3]) for entries in replication.unreadable)
    if replication.left_open:
        outcome = MoveOutcome.OPEN
        if check.fragments[-1].first_entry_id < check.metadata.last_fragment.first_entry_id:
            problems.append(
                f"Its writer left these bookies, so it is not fenced; entries {check.last_add_confirmed + 1} to "
                f"{check.fragments[-1].last_entry_id} stay until later ones are confirmed, or it is closed"
            )
        else:
            left = "its last entries stay until it leaves the bookie, or is closed"
            problems.append(f"A writer may be adding to it; {left}")
    elif not check.fragments:
        # Closing a ledger moves its last entries to other bookies; these may have been all.
        closed = before in (LedgerState.OPEN, LedgerState.IN_RECOVERY) and check.metadata.is_closed
        outcome = MoveOutcome.MOVED if closed else MoveOutcome.GONE
    elif any(fragment.outcome is Outcome.SUPERSEDED for fragment in replication.fragments):
        problems.append("Other processes change its ensembles at the same time")
    if replication.errors or (problems and not replication.left_open):
        outcome = MoveOutcome.FAILED
    if spans:
        silent = [each for each in replication.unreadable if not each.lost or (serves and not each.all_answered)]
        outcome = MoveOutcome.FAILED if silent or problems else MoveOutcome.UNRECOVERABLE
        now = " now" if silent else ""
        answers = (silent or replication.unreadable)[0].answers
        problems.insert(0, f"No bookie gives {spans_text(spans)}{now} ({answers})")
    return LedgerMove(
        ledger,
        outcome,
        check.metadata.state,
        sum(bool(fragment.replaced) for fragment in replication.fragments),
        sum(fragment.entry_count for fragment in replication.fragments),
        sum(fragment.size_bytes for fragment in replication.fragments),
        spans,
        "; ".join(problems) or None,
    )
