"""The replication worker: locks marked ledgers and restores their replicas.

    mark → lock → check → copy and swap each fragment → check again → unmark, in the version that was read → unlock

Any number of workers, Apache's and ours, share the marks of scope 0; only ours use the marks of other scopes. If a
worker dies, its completed swaps remain, its locks end with its session, and another worker finishes. A worker whose
session is lost has lost its locks too, and neither swaps nor unmarks any more. Source: ReplicationWorker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final

from bkctl import errors
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.ids import LedgerId
from bkctl.metadata.store import Claim
from bkctl.metadata.underreplication import (
    AutoRecoveryState,
    ReplicationFailure,
    ReplicationFailures,
    UnderreplicatedLedger,
)
from bkctl.pace import Pace
from bkctl.replication.checker import LedgerCheck
from bkctl.replication.fragments import LedgerFragment
from bkctl.replication.replicator import (
    FragmentReplication,
    LedgerFragmentReplicator,
    LockLost,
    Outcome,
    misplaced_fragments,
)
from bkctl.replication.signals import Signal, watching
from bkctl.replication.stats import WorkerStats
from bkctl.tasks import cancel_and_wait, run_to_end, run_together

log: Final = logging.getLogger("bkctl.replication")

#: Marks that are read at once.
STEP_COUNT: Final = 10_000
#: Ledgers that one worker replicates at once.
LEDGERS_AT_ONCE: Final = 4
#: The longest delay until a mark that was added behind the current position is seen.
LOOK_AGAIN_S: Final = 5.0
#: The pause between two looks at the marks if there is nothing to do.
PAUSE_S: Final = 0.1
#: The delays of the first retries double up to lockReleaseOfFailedLedgerGracePeriod.
#: Source: ReplicationWorker.NUM_OF_EXPONENTIAL_BACKOFF_RETRIALS.
DOUBLINGS: Final = 5
#: Ledgers whose failures and unreadable entries are remembered.
FAILED_COUNT_MAX: Final = 2000
#: Unreadable entries of a ledger that are remembered, and tried before a fragment is copied again.
UNREADABLE_COUNT_MAX: Final = 100


class LedgerOutcome(Enum):
    """The outcome of one attempt to replicate a marked ledger."""

    #: The ledger is unmarked, or was deleted.
    DONE = "done"
    #: Another worker has the ledger locked, or its mark is gone.
    SKIPPED = "skipped"
    #: The ledger stays locked for a while; then a worker retries.
    LATER = "later"
    #: The ledger stays marked, for any worker.
    FAILED = "failed"


def retry_delay_ms(grace_period_ms: int, failure_count: int) -> int:
    """Return how long a ledger that failed `failure_count` times before stays locked.

    The delay doubles from a 32nd of the grace period to the grace period.
    Source: ReplicationWorker.deferLedgerLockReleaseOfFailedLedger.
    """
    if failure_count >= DOUBLINGS:
        return grace_period_ms
    return (grace_period_ms >> DOUBLINGS) << failure_count


@dataclass(eq=False)
class ReplicationWorker:
    """Replicates marked ledgers of scope 0, of the other scopes, or both, until `run` is cancelled.

    `name` identifies the worker in its locks. `scopes` has False for scope 0, True for the others. After `run`, locks
    may remain until the store is closed.
    """

    bookkeeper: BookKeeper
    config: BookieConfig
    name: str
    scopes: Collection[bool] = (False, True)
    stats: WorkerStats = field(default_factory=WorkerStats)
    _rng: random.Random = field(default_factory=random.Random)
    _deferred: dict[LedgerId, asyncio.Task[None]] = field(default_factory=dict)
    #: The failures of a ledger and its unreadable entries, most recent ledger last.
    _failed: OrderedDict[LedgerId, tuple[int, frozenset[int]]] = field(default_factory=OrderedDict)
    _damaged: set[LedgerId] = field(default_factory=set)
    #: The reasons for which attempts that run now do not restore all replicas.
    _reasons: dict[LedgerId, str] = field(default_factory=dict)
    _wake: Signal | None = None

    def __post_init__(self) -> None:
        self._state = AutoRecoveryState(self.bookkeeper.cluster.store)
        self._failures = ReplicationFailures(self.bookkeeper.cluster.store)
        self._replicator = LedgerFragmentReplicator(
            self.bookkeeper,
            batch_size=self.config.rereplication_entry_batch_size,
            pace=Pace(bytes_per_s=self.config.replication_rate_by_bytes),
            progress=self.stats.entries_written,
            was_read=self.stats.entry_read,
        )

    async def run(self) -> None:
        """Work until cancelled. Raise BkctlError if the worker cannot begin; later errors are logged."""
        self._wake = wake = Signal()
        try:
            async with contextlib.AsyncExitStack() as watches:
                for scoped in self.scopes:
                    await watches.enter_async_context(watching(self._state.marks.watch_work, wake.set, scoped=scoped))
                while True:
                    wake.clear()
                    try:
                        wait_s = await self.work_once()
                    except errors.BkctlError as error:
                        log.warning("Replication retries in %g s: %s", self._back_off_s, error)
                        wait_s = self._back_off_s
                        await asyncio.sleep(wait_s)
                    else:
                        if wait_s > 0:
                            # Our own locks wake us too.
                            await asyncio.sleep(min(wait_s, PAUSE_S))
                        await wake.wait(wait_s)
        finally:
            await cancel_and_wait(*self._deferred.values())

    @property
    def _back_off_s(self) -> float:
        return max(self.config.rw_rereplicate_backoff_ms / 1000, 0.01)

    async def work_once(self) -> float:
        """Try every marked ledger that is not locked, once; return the seconds until the next look.

        Raise Unreachable.
        """
        if not await asyncio.to_thread(self._state.settings.is_enabled):
            return LOOK_AGAIN_S
        steps = self._free_ledgers()
        queue: list[LedgerId] = []
        asking = asyncio.Lock()
        outcomes: Counter[LedgerOutcome] = Counter()

        async def next_ledger() -> LedgerId | None:
            async with asking:
                while not queue:
                    step = await run_to_end(asyncio.to_thread(next, steps, None))
                    if step is None:
                        return None
                    queue.extend(step)
                return queue.pop()

        async def replicate_next() -> None:
            while (ledger := await next_ledger()) is not None:
                if not await asyncio.to_thread(self._state.settings.is_enabled):
                    return
                outcomes[await self.replicate(ledger)] += 1

        await run_together(replicate_next() for _ in range(LEDGERS_AT_ONCE))
        if outcomes[LedgerOutcome.FAILED]:
            await asyncio.sleep(self._back_off_s)
        return 0.0 if outcomes[LedgerOutcome.DONE] else LOOK_AGAIN_S

    def _free_ledgers(self) -> Iterator[list[LedgerId]]:
        """Yield the marked ledgers without a lock, in batches and random order, so that workers seldom collide."""
        for scoped in self._rng.sample(tuple(self.scopes), len(self.scopes)):
            marked = self._state.marks.ids(scoped=scoped)
            while batch := list(islice(marked, STEP_COUNT)):
                locked = self._state.locks.ledgers()
                free = [ledger for ledger in batch if ledger not in locked]
                self._rng.shuffle(free)
                yield free

    async def replicate(self, ledger: LedgerId) -> LedgerOutcome:
        """Lock the ledger and restore its replicas, if it is marked and not locked. Raise Unreachable."""
        state = self._state
        if ledger in self._deferred:
            # The lock was lost before the deferred work ended.
            return LedgerOutcome.SKIPPED
        try:
            # Read first, so that no lock is created for a ledger that another worker has just finished.
            if await asyncio.to_thread(state.marks.get, ledger) is None:
                return LedgerOutcome.SKIPPED
            lock = await run_to_end(asyncio.to_thread(state.locks.lock, ledger, self.name))
        except asyncio.CancelledError:
            # The lock may have been taken before the cancellation.
            await run_to_end(self._unlock(ledger))
            raise
        except errors.Unreachable:
            raise
        except errors.Conflict:
            return LedgerOutcome.SKIPPED
        except errors.BkctlError as error:
            if ledger not in self._damaged:
                log.warning("The mark of ledger %s cannot be used: %s", ledger, error)
                self._damaged.add(ledger)
            return LedgerOutcome.SKIPPED
        outcome = LedgerOutcome.FAILED
        try:
            outcome = await self._replicate_locked(ledger, lock)
        except Exception as error:  # noqa: BLE001 - one ledger, which does not keep the others waiting
            if isinstance(error, LockLost | errors.NotEnoughBookies | errors.Unreachable):
                log.warning("Ledger %s is not replicated now: %s", ledger, error)
            else:
                _log_failure(ledger, error)
            self.stats.exceptions[type(error).__name__] += 1
            await self._publish(ledger, str(error) or type(error).__name__)
            if isinstance(error, errors.Unreachable):
                await asyncio.to_thread(self._state.settings.is_enabled)  # Raises if it is the store, not only bookies.
        finally:
            self._reasons.pop(ledger, None)
            if ledger not in self._deferred:
                await run_to_end(self._unlock(ledger))
            if outcome is not LedgerOutcome.SKIPPED:
                self.stats.rereplicate_count += 1
                self.stats.rereplicate_failed_count += outcome is not LedgerOutcome.DONE
        return outcome

    async def _replicate_locked(self, ledger: LedgerId, lock: Claim) -> LedgerOutcome:
        # Read under the lock: no other worker unmarks the ledger now, and a new mark has another version.
        mark = await asyncio.to_thread(self._state.marks.get, ledger)
        if mark is None:
            return LedgerOutcome.SKIPPED
        try:
            check = await self._look(ledger, mark.suspects)
            if not _is_healthy(check):
                if check.problem is not None:
                    log.warning("Ledger %s: %s", ledger, check.problem)
                    self._reasons[ledger] = str(check.problem)
                await self._replicate_fragments(check, lock)
                if check.needs_recovery:
                    # An active writer may replace the bookies by itself.
                    self._defer(ledger, self.config.open_ledger_rereplication_grace_period, partial(self._fence, lock))
                    return LedgerOutcome.LATER
                check = await self._look(ledger, mark.suspects)
                if _is_healthy(check):
                    log.info("Ledger %s is replicated", ledger)
            if _is_healthy(check) and await self._mend_placement(check, lock):
                await self._unmark(mark, lock)
                return LedgerOutcome.DONE
        except errors.LedgerNotFound:
            log.info("Ledger %s was deleted meanwhile", ledger)
            await self._unmark(mark, lock)
            return LedgerOutcome.DONE
        count, unreadable = self._failed.get(ledger, (0, frozenset()))
        self._remember_failure(ledger, count + 1, unreadable)
        delay_ms = retry_delay_ms(self.config.lock_release_of_failed_ledger_grace_period, count)
        log.warning("Ledger %s still lacks replicas: retrying in %g s", ledger, delay_ms / 1000)
        lacking = sorted({bookie_id for fragment in check.fragments for bookie_id in fragment.bookies})
        reason = self._reasons.get(ledger) or f"{', '.join(lacking) or 'its bookies'} still lack entries after the copy"
        await self._publish(ledger, reason, delay_ms)
        self.stats.num_defer_ledger_lock_release_of_failed_ledger += 1
        self._defer(ledger, delay_ms)
        return LedgerOutcome.LATER

    async def _look(self, ledger: LedgerId, suspects: Collection[str] = ()) -> LedgerCheck:
        percentage = self.config.auditor_ledger_verification_percentage
        return await self._replicator.checker.check(ledger, percentage=percentage, suspects=suspects)

    async def _replicate_fragments(self, check: LedgerCheck, lock: Claim) -> None:
        ledger, replicated = check.ledger, False
        for fragment in check.fragments:
            if not fragment.closed or await self._is_unreadable(check, fragment):
                continue
            result = await self._replicate_fragment(check, fragment, lock)
            if result is None:
                continue
            check = replace(check, versioned=result.versioned)
            if result.unreadable:
                self._record_unreadable(ledger, result)
            replicated = replicated or bool(result.replaced or result.repaired)
        self.stats.num_full_or_partial_ledgers_replicated += replicated

    async def _replicate_fragment(
        self, check: LedgerCheck, fragment: LedgerFragment, lock: Claim, targets: Mapping[int, str] | None = None
    ) -> FragmentReplication | None:
        """Return None after an error, which is logged: the next check finds the fragment again."""
        try:
            return await self._replicator.replicate(check, fragment, targets=targets, lock=lock)
        except (errors.LedgerNotFound, LockLost):
            raise
        except errors.BkctlError as error:
            log.warning("Ledger %s from entry %d: %s", check.ledger, fragment.first_entry_id, error)
            self._reasons[check.ledger] = str(error)
            self.stats.exceptions[type(error).__name__] += 1
            return None

    async def _mend_placement(self, check: LedgerCheck, lock: Claim) -> bool:
        """Move replicas of a closed ledger from write quorums in too few racks to other racks, if that is asked for.

        Return False if a fragment could not be moved now. A fragment that no usable bookies can mend stays as it is,
        until the auditor's next check (Apache's worker keeps retrying). Source:
        ReplicationWorker.getNeedRepairedPlacementNotAdheringFragments,
        BookKeeperAdmin.replaceNotAdheringPlacementPolicyBookie.
        """
        if not (self.config.repaired_placement_policy_not_adhering_bookie_enabled and check.metadata.is_closed):
            return True
        is_done, moved = True, False
        for fragment, targets in await misplaced_fragments(self.bookkeeper, check):
            if not targets:
                log.warning(
                    "Ledger %s from entry %d has entries in too few racks, and no writable bookies of other racks",
                    check.ledger, fragment.first_entry_id,
                )  # fmt: skip
                continue
            result = await self._replicate_fragment(check, fragment, lock, targets)
            if result is None:
                is_done = False
                continue
            check = replace(check, versioned=result.versioned)
            is_done = is_done and result.outcome is Outcome.REPLICATED
            if result.replaced:
                moved = True
                changes = ", ".join(f"{old} by {new}" for old, new in result.replaced.items())
                log.info("Ledger %s has more racks: replaced %s", check.ledger, changes)
        self.stats.num_not_adhering_placement_ledgers_replicated += moved
        return is_done

    def _record_unreadable(self, ledger: LedgerId, result: FragmentReplication) -> None:
        for span in result.unreadable:
            log.error("Ledger %s: %s", ledger, span)
            self._reasons[ledger] = str(span)
            self.stats.num_entries_unable_to_read_for_replication += span.entry_count
        count, known = self._failed.get(ledger, (0, frozenset()))
        first = (span.first_entry_id for span in result.unreadable)
        self._remember_failure(ledger, count, frozenset(sorted({*known, *first})[:UNREADABLE_COUNT_MAX]))

    async def _is_unreadable(self, check: LedgerCheck, fragment: LedgerFragment) -> bool:
        """Return True if a remembered unreadable entry of the fragment is still unreadable; copying would fail again.

        Source: ReplicationWorker.tryReadingFaultyEntries.
        """
        _, known = self._failed.get(check.ledger, (0, frozenset[int]()))
        first, last = fragment.first_entry_id, fragment.last_entry_id
        entry_ids = [entry_id for entry_id in known if first <= entry_id <= last]
        if not entry_ids:
            return False
        found = await self._replicator.unreadable(check, fragment, entry_ids)
        for span in found:
            log.error("Ledger %s: %s", check.ledger, span)
            self._reasons[check.ledger] = str(span)
        return bool(found)

    def _remember_failure(self, ledger: LedgerId, count: int, unreadable: frozenset[int]) -> None:
        self._failed[ledger] = (count, unreadable)
        self._failed.move_to_end(ledger)
        while len(self._failed) > FAILED_COUNT_MAX:
            self._failed.popitem(last=False)

    async def _publish(self, ledger: LedgerId, reason: str, delay_ms: int | None = None) -> None:
        """Publish why the ledger was not replicated, for operators. A store that refuses does not stop the work."""

        def publish() -> None:
            with contextlib.suppress(errors.BkctlError):
                present = self._failures.get(ledger)
                attempts = 1 if present is None else present.attempts + 1
                now_ms = time.time_ns() // 1_000_000
                retry_at_ms = None if delay_ms is None else now_ms + delay_ms
                self._failures.publish(ReplicationFailure(ledger, attempts, reason, self.name, now_ms, retry_at_ms))

        await asyncio.to_thread(publish)

    async def _unmark(self, mark: UnderreplicatedLedger, lock: Claim) -> None:
        """Delete the mark. One that changed meanwhile stays: a worker checks the ledger again."""

        def unmark() -> None:
            _check_held(lock, mark.ledger)
            with contextlib.suppress(errors.NotFound, errors.MetadataVersionConflict):
                self._state.marks.remove(mark.ledger, mark.version)
                self._failures.remove(mark.ledger)

        await asyncio.to_thread(unmark)
        self._failed.pop(mark.ledger, None)

    def _defer(
        self, ledger: LedgerId, delay_ms: int, then: Callable[[LedgerId], Awaitable[None]] | None = None
    ) -> None:
        """Keep the ledger locked for `delay_ms`, call `then`, and unlock it, retrying until the store accepts.

        The end of `run` ends this too; the lock remains then.
        """

        async def release() -> None:
            try:
                await asyncio.sleep(delay_ms / 1000)
                if then is not None:
                    await then(ledger)
            except Exception as error:  # noqa: BLE001 - one ledger, which is unlocked all the same
                _log_failure(ledger, error)
                await self._publish(ledger, str(error) or type(error).__name__)
            while not await self._is_unlocked(ledger):
                await asyncio.sleep(self._back_off_s)
            self._deferred.pop(ledger, None)
            if self._wake is not None:
                self._wake.set()

        self._deferred[ledger] = asyncio.ensure_future(release())

    async def _fence(self, lock: Claim, ledger: LedgerId) -> None:
        """Close a ledger whose writer did not replace the lost bookies within the grace period.

        Source: ReplicationWorker.deferLedgerLockRelease.
        """
        with contextlib.suppress(errors.LedgerNotFound):
            check = await self._look(ledger)
            if check.needs_recovery:
                await asyncio.to_thread(_check_held, lock, ledger)
                gone = ", ".join(check.gone_at_end)
                why = f"has lost {gone}" if gone else "bookies of its last fragment lack entries"
                log.warning("Ledger %s is open and %s: fencing and closing it", ledger, why)
                await self._replicator.recover(ledger)

    async def _unlock(self, ledger: LedgerId) -> None:
        """Unlock the ledger, in the background if the store refuses now: a lock excludes all workers while we live."""
        if not await self._is_unlocked(ledger):
            self._defer(ledger, self.config.rw_rereplicate_backoff_ms)

    async def _is_unlocked(self, ledger: LedgerId) -> bool:
        """Try once to unlock the ledger."""
        try:
            await asyncio.to_thread(self._state.locks.unlock, ledger)
        except Exception as error:  # noqa: BLE001 - a lock that stayed would exclude all workers
            log.warning("The lock of ledger %s is not released yet: %s", ledger, error)
            return False
        return True


def _log_failure(ledger: LedgerId, error: Exception) -> None:
    """Log why the ledger was not replicated; with a traceback if bkctl does not know the error."""
    unexpected = None if isinstance(error, errors.BkctlError) else error
    log.warning("Ledger %s could not be replicated: %s", ledger, error, exc_info=unexpected)


def _is_healthy(check: LedgerCheck) -> bool:
    return not check.fragments and not check.needs_recovery and check.problem is None


def _check_held(lock: Claim, ledger: LedgerId) -> None:
    """Raise LockLost if the lock is lost, and errors of the store."""
    if not lock.is_held():
        raise LockLost(ledger)
