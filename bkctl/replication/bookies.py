"""Bookies that are lost or leave: all that they hold, in every scope, is copied to others.

`BookieMover` is what recover, decommission and drain have in common: which ledgers are concerned, what keeps them from
being moved, and moving them, several at once. Source: BookKeeperAdmin.recoverBookieData, RecoverCommand.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from bkctl.client.bookies import in_order, in_thread
from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    Conflict,
    Corrupt,
    LedgerLengthUnknown,
    LedgerNotFound,
    LedgerRecoveryFailed,
    MetadataVersionConflict,
    NotEnoughBookies,
    NotFound,
    TimedOut,
    Unreachable,
)
from bkctl.formats.metadata import LedgerState
from bkctl.metadata.cluster import COOKIES
from bkctl.metadata.underreplication import LedgerUnderreplicationManager
from bkctl.replication.checker import EntrySpan, LedgerChecker, LedgerFragment
from bkctl.replication.holdings import HeldFragment, HeldLedger, Replacements, ledgers_on
from bkctl.replication.replicator import UNREADABLE_NAMED_MAX, LedgerFragmentReplicator, Outcome, Throttle
from bkctl.replication.signals import Together, ended, finished

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.reader import LedgerAccess
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim
    from bkctl.replication.placement import Topology
    from bkctl.replication.replicator import LedgerReplication
    from bkctl.replication.resume import ResumeFile

T = TypeVar("T")

#: Ledgers that are moved at once: so many wait for the metadata store together.
CONCURRENCY: Final = 512
#: Ledgers of which bookies are asked at once what they have.
PROBES_AT_ONCE: Final = 32
#: Metadata that is read in one go.
_BATCH_COUNT: Final = 500
#: How long a ledger that another worker has locked is left to it. A worker may keep a lock long after it gave up, and
#: as long as it does, its lock keeps the bookies' garbage collection away from the copies as ours would.
LOCK_PATIENCE_S: Final = 15.0
_LOCK_POLL_S: Final = 0.5
#: How often a ledger is looked at again whose ensembles others changed meanwhile.
_ATTEMPT_COUNT_MAX: Final = 3


# --- what is moved --------------------------------------------------------------------------------------------------


class MoveOutcome(StrEnum):
    """What became of one ledger."""

    #: Nothing of it is on the leaving bookies any more.
    MOVED = "moved"
    #: There was nothing to do: it was deleted, or others moved it.
    GONE = "gone"
    #: A writer may be adding to it, and it was to be left alone then.
    OPEN = "open"
    #: Entries of it are nowhere to be read, or it cannot be decided where it ends.
    UNRECOVERABLE = "unrecoverable"
    #: It could not be copied; another try may do.
    FAILED = "failed"


class LedgerMove(NamedTuple):
    """One ledger that was moved, or was not: `problem` says why, `unreadable` which entries no replica gives.

    `entry_count` and `size_bytes` are what was copied, `fragment_count` the fragments whose bookies were replaced.
    """

    ledger: LedgerId
    outcome: MoveOutcome
    state: LedgerState | None = None
    fragment_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    unreadable: tuple[EntrySpan, ...] = ()
    problem: str | None = None


class PlannedFragment(NamedTuple):
    """What a dry run says of one fragment.

    `targets` are the bookies that would come in, by ensemble index; empty where that cannot be: `problem` says why.
    `closes`: its ledger would be fenced and closed first. `unreadable` are entries that no bookie which is up has.
    """

    held: HeldLedger
    fragment: HeldFragment
    targets: dict[int, str]
    closes: bool
    problem: str | None
    unreadable: tuple[EntrySpan, ...]

    @property
    def new_ensemble(self) -> tuple[str, ...]:
        """The ensemble as it would be."""
        return tuple(self.targets.get(index, each) for index, each in enumerate(self.fragment.ensemble))


@dataclass
class MovePlan:
    """What has to be moved, by the metadata alone. Memory: an id for each ledger.

    `ledgers` are in ascending order, those that only name the bookies and hold nothing on them included. Entries and
    bytes are of closed ledgers, replicas counted. `crowded` are those of `ledgers` for which there are too few other
    bookies, `damaged` those whose metadata names the bookies and cannot be read, each with the reason; `marked` those
    that auto-recovery has marked for the bookies.
    """

    ledgers: list[LedgerId] = field(default_factory=list)
    scopes: Counter[int] = field(default_factory=Counter)
    open_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    crowded: dict[LedgerId, str] = field(default_factory=dict)
    damaged: dict[LedgerId, str] = field(default_factory=dict)
    marked: set[LedgerId] = field(default_factory=set)


def plan_move(cluster: Cluster, leaving: Collection[str], ids: Iterable[LedgerId] | None = None) -> MovePlan:
    """What of all ledgers, or of `ids`, is on `leaving`, by the metadata. Blocks.

    Raises LedgerNotFound for one of `ids` that is not there, UsageError for what is no bookie id, and what the store
    raises.
    """
    plan = MovePlan()
    leaving = frozenset(leaving)
    manager = LedgerUnderreplicationManager(cluster.store)
    mark_of = manager.beside() if ids is None else manager.get
    replacements = Replacements(cluster.bookies.list(include_down=False), leaving)
    for ledger, held in ledgers_on(cluster, leaving, ids):
        if isinstance(held, BkctlError):
            if ids is not None and isinstance(held, LedgerNotFound):
                raise held
            plan.damaged[ledger] = held.message
            continue
        plan.ledgers.append(ledger)
        plan.scopes[ledger.scope_id] += 1
        plan.open_count += not held.metadata.is_closed
        plan.entry_count += held.entry_count
        plan.size_bytes += held.size_bytes
        with contextlib.suppress(Corrupt):
            mark = mark_of(ledger)
            if mark is not None and not leaving.isdisjoint(mark.missing_replicas):
                plan.marked.add(ledger)
        if problem := replacements.problem(held):
            plan.crowded[ledger] = problem
    return plan


def check_scopes_known(cluster: Cluster) -> None:
    """Raises Conflict when the ledgers of the scopes are of a cluster that was formatted away: no listing shows them,
    so any bookie may hold some, and needs its cookie. Blocks."""
    if cluster.ledgers.scopes_state() == "foreign":
        raise Conflict(
            "The scoped ledgers belong to a cluster that was formatted away: what they have there is not known",
            hint="'bkctl metadata orphans' shows them; remove them first, or keep the cookie",
        )


class MoveProgress:
    """How far a move is; grows as it goes. Times in seconds."""

    def __init__(self, plan: MovePlan) -> None:
        self.plan = plan
        self.ledger_count = 0
        self.entry_count = 0
        self.size_bytes = 0
        #: Ledgers that others have locked, and that are tried again later.
        self.locked_count = 0
        self._began = time.monotonic()

    def copied(self, entry_count: int, size_bytes: int) -> None:
        """Note that entries were copied."""
        self.entry_count += entry_count
        self.size_bytes += size_bytes

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return max(time.monotonic() - self._began, 1e-6)

    @property
    def bytes_per_s(self) -> float:
        """Bytes copied a second, from the beginning on."""
        return self.size_bytes / self.elapsed_s

    @property
    def share(self) -> float:
        """How much of it is done, from 0 to 1; a ledger counts as much as one of its entries."""
        total = len(self.plan.ledgers) + self.plan.entry_count
        done = self.ledger_count + min(self.entry_count, self.plan.entry_count)
        return 1.0 if self.ledger_count >= len(self.plan.ledgers) else done / total

    @property
    def left_s(self) -> float | None:
        """About how long it will take; None while nothing is known."""
        share = self.share
        if share < 1 and self.plan.entry_count and not self.entry_count:
            return None  # Ledgers that cannot be moved are through at once, and say nothing of the others.
        return self.elapsed_s * (1 - share) / share if share > 0 else None


class BookieMover:
    """Copies what the bookies `leaving` hold to others, and puts those in their place in the metadata.

    `rate` bounds the bytes copied a second, all ledgers together. `skip_open` leaves ledgers alone that are OPEN; with
    `fence` False only their last fragment, if a writer may add to it there, else such a ledger is fenced and closed
    first. `locks`: take the locks of auto-recovery, so that its workers and this one do not do the same work at once,
    and no bookie takes the copies on it for garbage before the metadata names it (removeOverReplicatedledgers).
    `topology` tells racks, `plan` is what `progress` counts against, `note` is told what it waits for. It belongs to
    the event loop of `bookkeeper`.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        leaving: Collection[str],
        plan: MovePlan | None = None,
        *,
        rate: int | None = None,
        skip_open: bool = False,
        fence: bool = True,
        locks: bool = True,
        topology: Topology | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self.leaving = frozenset(leaving)
        self.progress = MoveProgress(plan or MovePlan())
        self._cluster = bookkeeper.cluster
        self._skip_open, self._fence, self._locks = skip_open, fence, locks
        self._note = note
        self._has_told_waiting = False
        self._manager = LedgerUnderreplicationManager(self._cluster.store)
        owner = f"{os.uname().nodename}:{os.getpid()}"
        self._lock: Together[LedgerId, Claim] = Together(lambda some: self._manager.lock_many(some, owner))
        self._unlock: Together[LedgerId, None] = Together(self._unlock_many)
        self._checker = LedgerChecker(bookkeeper)
        self._replicator = LedgerFragmentReplicator(
            bookkeeper,
            checker=self._checker,
            throttle=None if rate is None else Throttle(bytes_per_s=rate),
            topology=topology,
            progress=lambda entries, size: self.progress.copied(entries, size),
        )

    async def held(
        self, ids: Iterable[LedgerId] | None = None, *, doubtful: bool = False
    ) -> AsyncGenerator[tuple[LedgerId, HeldLedger | BkctlError], None]:
        """The ledgers that name the leaving bookies, as `ledgers_on`; the metadata is read in a thread."""
        found = ledgers_on(self._cluster, self.leaving, ids, doubtful=doubtful)
        while batch := await _next_of(found):
            for each in batch:
                yield each

    async def planned(
        self, ids: Iterable[LedgerId] | None = None
    ) -> AsyncGenerator[PlannedFragment | LedgerMove, None]:
        """What `move` would do, fragment by fragment; changes nothing. The bookies are asked which entries they have.

        A ledger that cannot be looked at comes as a LedgerMove that says why.
        """
        up = {each.bookie_id for each in await self.registered()}

        async def look(ledger: LedgerId, held: HeldLedger | BkctlError) -> list[PlannedFragment | LedgerMove]:
            if isinstance(held, BkctlError):
                if ids is not None and isinstance(held, LedgerNotFound):
                    raise held
                return [LedgerMove(ledger, MoveOutcome.FAILED, problem=held.message)]
            if self._skip_open and held.metadata.state is LedgerState.OPEN:
                return [_left_open(held)]
            return await self._planned(held, up)

        async with contextlib.aclosing(self.held_by(look, ids)) as planned:
            async for rows in planned:
                for row in rows:
                    yield row

    async def held_by(
        self,
        look: Callable[[LedgerId, HeldLedger | BkctlError], Awaitable[T]],
        ids: Iterable[LedgerId] | None = None,
    ) -> AsyncGenerator[T, None]:
        """What `look` says of each ledger of `held`, in order; several are looked at at once."""
        async with contextlib.aclosing(self.held(ids)) as ledgers:
            looks = in_order(ledgers, lambda each: look(*each), lambda: PROBES_AT_ONCE)
            async with contextlib.aclosing(looks):
                async for _, found in looks:
                    yield found

    async def unreadable(self, held: HeldLedger, up: Collection[str]) -> dict[int, tuple[EntrySpan, ...]]:
        """By fragment's first entry: the entries that should be on the leaving bookies and that no bookie of `up` has.

        The bookies say themselves what they have. Those that do not know that request must give the first and the last
        entry that they should have, and if they do not, all are read. Of a fragment that grows, nothing is said.
        """
        access = self.bookkeeper.access(held.ledger, held.found)
        asked = sorted({each for fragment in held.fragments for each in fragment.ensemble if each in up})
        lists = dict(zip(asked, await asyncio.gather(*(self._listed(access, each) for each in asked)), strict=True))
        found = {}
        for fragment in held.fragments:
            if fragment.last_entry_id is None:
                continue
            has: dict[str, Container[int]] = {}
            for index, bookie_id in enumerate(fragment.ensemble):
                if bookie_id in lists:
                    listed = lists[bookie_id]
                    has[bookie_id] = await self._read(access, fragment, index) if listed is None else listed
            spans = await in_thread(_lacking, held, fragment, has)
            if spans:
                found[fragment.first_entry_id] = spans
        return found

    async def _listed(self, access: LedgerAccess, bookie_id: str) -> Container[int] | None:
        """What the bookie says that it has of the ledger; None where it cannot say.

        Apache's bookies with DbLedgerStorage leave that request without any answer.
        """
        try:
            return await self._checker.listed(access, bookie_id)
        except BookieUnavailable:
            return ()
        except BkctlError:
            return None

    async def _read(self, access: LedgerAccess, held: HeldFragment, index: int) -> Container[int]:
        """Which entries of the fragment the bookie at ensemble index `index` gives; those between its first and its
        last one are believed to be there if these are."""
        assert held.last_entry_id is not None
        fragment = LedgerFragment(
            access.ledger, held.first_entry_id, held.last_entry_id, held.ensemble, True, access.schedule
        )
        ends = fragment.first_and_last_of(index)
        if ends is None:
            return ()
        channel = access.pool.channel(held.ensemble[index])
        if not any(await asyncio.gather(*(self._checker.read(access, channel, each) for each in set(ends)))):
            return range(ends[0], ends[1] + 1)
        there: set[int] = set()
        entries = fragment.entries_of(index)
        while some := list(islice(entries, _BATCH_COUNT)):
            errors = await asyncio.gather(*(self._checker.read(access, channel, each) for each in some))
            there.update(each for each, error in zip(some, errors, strict=True) if error is None)
            if any(isinstance(error, BookieUnavailable) for error in errors):
                break
        return there

    async def move(
        self, ids: Iterable[LedgerId], *, resume: ResumeFile | None = None
    ) -> AsyncGenerator[LedgerMove, None]:
        """Move these ledgers, several at once, and yield what became of each as it is done.

        With a `resume` file those that it names are passed over, and those that are done are noted there.
        Raises what the metadata store raises; what goes wrong with one ledger is in its row.
        """
        waiting = iter(ids)
        read: deque[tuple[LedgerId, VersionedMetadata | BkctlError]] = deque()
        #: Ledgers that others have locked, and since when they are waited for.
        locked: deque[tuple[LedgerId, float]] = deque()
        tasks: dict[asyncio.Task[LedgerMove | None], tuple[LedgerId, float]] = {}
        done: asyncio.Queue[asyncio.Task[LedgerMove | None]] = asyncio.Queue()

        def begin(ledger: LedgerId, since: float, found: VersionedMetadata | None = None) -> None:
            task = asyncio.create_task(self._locked(ledger, found, patient=time.monotonic() < since + LOCK_PATIENCE_S))
            tasks[task] = ledger, since
            task.add_done_callback(done.put_nowait)

        def next_ids() -> Iterator[LedgerId]:
            for ledger in waiting:
                if resume is None or ledger not in resume.done:
                    yield ledger
                else:
                    self.progress.ledger_count += 1

        def read_next() -> asyncio.Task[list[tuple[LedgerId, VersionedMetadata | BkctlError]]]:
            some = list(islice(next_ids(), CONCURRENCY))
            return asyncio.create_task(in_thread(lambda: list(self._cluster.ledgers.read_many(some))))

        ahead = read_next()
        try:
            idle = False
            while True:
                while locked and len(tasks) < CONCURRENCY and (idle or _waits_s(locked[0]) <= 0):
                    begin(*locked.popleft())
                idle = False
                while len(tasks) < CONCURRENCY:
                    if not read:
                        read.extend(await ahead)
                        if not read:
                            break
                        ahead = read_next()
                    ledger, found = read.popleft()
                    begin(ledger, time.monotonic(), None if isinstance(found, BkctlError) else found)
                self.progress.locked_count = len(locked)
                if not tasks and not locked:
                    return
                if not tasks:
                    self._tell_waiting([ledger for ledger, _ in locked])
                # With nothing else to do they are tried more often.
                limit_s = None if not locked else max(_waits_s(locked[0]), 0.0) if tasks else _LOCK_POLL_S
                try:
                    async with asyncio.timeout(limit_s):
                        task = await done.get()
                except TimeoutError:
                    idle = not tasks
                    continue
                place = tasks.pop(task)
                row = task.result()
                if row is None:
                    locked.append(place)
                    continue
                self.progress.ledger_count += 1
                if resume is not None and row.outcome in (MoveOutcome.MOVED, MoveOutcome.GONE):
                    resume.record(row.ledger, row.entry_count, row.size_bytes)
                yield row
        finally:
            await ended(ahead, *tasks)

    def _tell_waiting(self, locked: Sequence[LedgerId]) -> None:
        """Say once that nothing is left but what others have locked."""
        if not self._has_told_waiting:
            self._has_told_waiting = True
            named = ", ".join(map(str, locked[:5])) + (f" and {len(locked) - 5:,} more" if len(locked) > 5 else "")
            self._note(
                f"{'Ledger' if len(locked) == 1 else 'Ledgers'} {named}: locked by others, as auto-recovery's workers "
                f"do; waiting up to {LOCK_PATIENCE_S:g} s for them"
            )

    async def left(self) -> list[tuple[LedgerId, BkctlError | None]]:
        """The ledgers of every scope that still have entries on the leaving bookies, or may have: those whose metadata
        cannot be read, with the error."""
        left: list[tuple[LedgerId, BkctlError | None]] = []
        async with contextlib.aclosing(self.held(doubtful=True)) as ledgers:
            async for ledger, held in ledgers:
                if isinstance(held, BkctlError):
                    left.append((ledger, held))
                elif held.holds_entries:
                    left.append((ledger, None))
        return left

    async def delete_cookies(self) -> tuple[str, ...]:
        """Delete the cookies of the leaving bookies; which of them had one.

        Raises Conflict when one of them is registered: it needs its cookie to start again; and when the ledgers of the
        scopes are of a cluster that was formatted away: no listing shows them, so they may be there.
        """
        return await in_thread(self._delete_cookies)

    async def registered(self) -> list[RegisteredBookie]:
        """The bookies that are up."""
        return await in_thread(self._cluster.bookies.list, False)

    def _delete_cookies(self) -> tuple[str, ...]:
        deleted = []
        check_scopes_known(self._cluster)
        up = {each.bookie_id for each in self._cluster.bookies.list(include_down=False)}
        for bookie_id in sorted(self.leaving):
            if bookie_id in up:
                raise Conflict(f"Bookie {bookie_id} is up, and needs its cookie", hint="stop it first")
            found = self._cluster.store.get(f"{COOKIES}/{bookie_id}")
            if found is not None:
                self._cluster.cookies.remove(bookie_id, found.version)
                deleted.append(bookie_id)
        return tuple(deleted)

    async def _planned(self, held: HeldLedger, up: Collection[str]) -> list[PlannedFragment | LedgerMove]:
        closes = held.grows and self._fence
        try:
            check = await self._checker.on_bookies(held.ledger, self.leaving, held.found)
            unreadable = await self.unreadable(held, up)
        except BkctlError as error:
            return [LedgerMove(held.ledger, MoveOutcome.FAILED, held.metadata.state, problem=error.message)]
        checked = {each.first_entry_id: each for each in check.fragments}
        planned: list[PlannedFragment | LedgerMove] = []
        for fragment in held.fragments:
            if fragment.last_entry_id is None and not closes:
                planned.append(_left_open(held))
                continue
            targets: dict[int, str] = {}
            spans = unreadable.get(fragment.first_entry_id, ())
            problem = f"No bookie has {spans_text(spans)}" if spans else None
            try:
                if (found := checked.get(fragment.first_entry_id)) is not None:
                    targets = dict(await self._replicator.targets(check, found, exclude=self.leaving))
            except NotEnoughBookies as error:
                if fragment.entry_count != 0:
                    problem = error.message
            planned.append(PlannedFragment(held, fragment, targets, closes, problem, spans))
        return planned

    async def _locked(self, ledger: LedgerId, found: VersionedMetadata | None, *, patient: bool) -> LedgerMove | None:
        """Move the ledger; None while somebody else has it locked and is given time for it."""
        if not self._locks:
            return await self._move(ledger, found)
        theirs = False
        try:
            lock: Claim | None = None
            try:
                lock = await finished(self._lock(ledger))
            except Conflict:
                theirs = True
                if patient:
                    return None
            return await self._move(ledger, found, lock)
        finally:
            if not theirs:
                await finished(self._unlock(ledger))

    async def _move(
        self, ledger: LedgerId, found: VersionedMetadata | None = None, lock: Claim | None = None
    ) -> LedgerMove:
        state = None
        try:
            for _ in range(_ATTEMPT_COUNT_MAX):
                if found is None:
                    found = await in_thread(self._cluster.ledgers.read, ledger)
                state = state or found.metadata.state
                if self._skip_open and found.metadata.state is LedgerState.OPEN:
                    return LedgerMove(ledger, MoveOutcome.OPEN, state, problem="It is open")
                done = await self._replicator.replicate_ledger(
                    ledger, found, bookies=self.leaving, fence=self._fence, exclude=self.leaving,
                    lock=lock,
                )  # fmt: skip
                found = None
                if not any(each.outcome is Outcome.SUPERSEDED for each in done.fragments):
                    break
        except LedgerNotFound:
            return LedgerMove(ledger, MoveOutcome.GONE)
        except NotEnoughBookies as error:
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        except LedgerLengthUnknown as error:
            return LedgerMove(ledger, MoveOutcome.UNRECOVERABLE, state, problem=str(error))
        except (LedgerRecoveryFailed, BookieUnavailable) as error:
            # Nobody can say where it ends.
            return LedgerMove(ledger, MoveOutcome.UNRECOVERABLE, state, problem=error.message)
        except TimedOut as error:
            await in_thread(self._cluster.instance_id)  # Raises when it is the store that is silent.
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        except Unreachable:
            raise
        except BkctlError as error:
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        moved = _move_of(ledger, state, done)
        if moved.outcome is MoveOutcome.MOVED and ledger in self.progress.plan.marked:
            await in_thread(self._unmark, ledger)
        return moved

    def _unlock_many(self, ledgers: list[LedgerId]) -> list[None]:
        self._manager.unlock_many(ledgers)
        return [None] * len(ledgers)

    def _unmark(self, ledger: LedgerId) -> None:
        """Take the mark away where it is for the leaving bookies only; else a worker looks after the others."""
        with contextlib.suppress(NotFound, MetadataVersionConflict, Corrupt):
            mark = self._manager.get(ledger)
            if mark is not None and self.leaving.issuperset(mark.missing_replicas):
                self._manager.unmark(ledger, mark.version)


def _move_of(ledger: LedgerId, before: LedgerState | None, done: LedgerReplication) -> LedgerMove:
    """The row of a ledger that was worked on, and was in the state `before`."""
    counts = (
        done.check.metadata.state,
        sum(bool(each.replaced) for each in done.fragments),
        sum(each.entry_count for each in done.fragments),
        sum(each.size_bytes for each in done.fragments),
    )
    if done.unreadable:
        spans = tuple(EntrySpan(each.first_entry_id, each.last_entry_id, each.entry_count) for each in done.unreadable)
        said = "; ".join(f"{bookie_id}: {error.message}" for bookie_id, error in done.unreadable[0].problems)
        problem = f"No bookie gives {spans_text(spans)} ({said})"
        return LedgerMove(ledger, MoveOutcome.UNRECOVERABLE, *counts, spans, problem)
    if done.errors:
        return LedgerMove(ledger, MoveOutcome.FAILED, *counts, problem=done.errors[0][1].message)
    if done.left_open:
        problem = "A writer may be adding to it; its last entries stay until it leaves the bookie, or is closed"
        return LedgerMove(ledger, MoveOutcome.OPEN, *counts, problem=problem)
    if not done.check.fragments:
        # Closing a ledger brings its last entries to other bookies; that may have been all.
        closed = before in (LedgerState.OPEN, LedgerState.IN_RECOVERY) and done.check.metadata.is_closed
        return LedgerMove(ledger, MoveOutcome.MOVED if closed else MoveOutcome.GONE, *counts)
    if not done.done:
        return LedgerMove(ledger, MoveOutcome.FAILED, *counts, problem="Others change its ensembles at the same time")
    return LedgerMove(ledger, MoveOutcome.MOVED, *counts)


def _waits_s(locked: tuple[LedgerId, float]) -> float:
    """How long a ledger is still left to whom has it locked; `locked` has since when it is."""
    return locked[1] + LOCK_PATIENCE_S - time.monotonic()


def _left_open(held: HeldLedger) -> LedgerMove:
    return LedgerMove(held.ledger, MoveOutcome.OPEN, held.metadata.state, problem="It is open")


def _lacking(held: HeldLedger, fragment: HeldFragment, has: Mapping[str, Container[int]]) -> tuple[EntrySpan, ...]:
    """The entries of the fragment that should be on the leaving bookies, and that no bookie `has`; so many at most as
    a copy would name."""
    assert fragment.last_entry_id is not None
    schedule = RoundRobinDistributionSchedule.of(held.metadata)
    size = schedule.ensemble_size
    write_sets = [schedule.write_set(at) for at in range(size)]
    concerned = [any(index in fragment.indexes for index in write_set) for write_set in write_sets]
    spans: list[EntrySpan] = []
    together, count = False, 0
    for entry_id in range(fragment.first_entry_id, fragment.last_entry_id + 1):
        if not concerned[entry_id % size]:
            continue
        bookies = (fragment.ensemble[index] for index in write_sets[entry_id % size])
        there = any(entry_id in has[each] for each in bookies if each in has)
        count += not there
        if count > UNREADABLE_NAMED_MAX:
            break
        if there:
            together = False
        elif together:
            spans[-1] = EntrySpan(spans[-1].first_entry_id, entry_id, spans[-1].entry_count + 1)
        else:
            spans.append(EntrySpan(entry_id, entry_id, 1))
            together = True
    return tuple(spans)


def spans_text(spans: Collection[EntrySpan], count_max: int = 5) -> str:
    """Entries for a message: `entries 0-9 (4), 12`; a span that leaves entries of other bookies out has its count."""
    texts = []
    for first, last, count in islice(spans, count_max):
        text = str(first) if first == last else f"{first}-{last}"
        texts.append(text if count == last - first + 1 else f"{text} ({count:,})")
    total = sum(each.entry_count for each in spans)
    more = f" and {len(spans) - count_max:,} more ranges" if len(spans) > count_max else ""
    return f"{'entry' if total == 1 else 'entries'} {', '.join(texts)}{more}"


async def _next_of(items: Iterator[T]) -> list[T]:
    return await asyncio.to_thread(lambda: list(islice(items, _BATCH_COUNT)))
