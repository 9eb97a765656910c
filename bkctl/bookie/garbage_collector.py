"""Garbage collection: deleted ledgers leave a bookie, and then their entries leave the entry logs.

A round deletes ledgers, removes and compacts entry logs (`entry_log_collection`), as often as its schedule says.
Source: GarbageCollectorThread, ScanAndCompareGarbageCollector with verifyMetadataOnGC; BP-35 for scopes.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bkctl.bookie.collector_metadata import (
    CollectorMetadata,
    GarbageCollectionStatus,
    GarbageCollectorStats,
    UnindexedLedgers,
)
from bkctl.bookie.entry_log_collection import MAJOR, MINOR, CompactionSchedule, EntryLogCollector, ForcedRound
from bkctl.columns import some_of
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, Unsupported
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId, LedgerIdSet
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.underreplication import LedgerLocks
from bkctl.model import LedgerLiveness
from bkctl.storage.compaction import CompactionStopped
from bkctl.storage.ledger.ledger_storage import LedgerStorage

log: Final = logging.getLogger("bkctl.bookie")


@dataclass(eq=False)
class ScanAndCompareGarbageCollector:
    """Deletes the ledgers of this bookie that the metadata store says do not exist, and never by guess.

    `_delete_from_storage` deletes ledgers from the bookie's storage and returns how many were there. For one thread.
    """

    _metadata: CollectorMetadata
    _storage: LedgerStorage[Any]
    _unindexed: UnindexedLedgers
    _delete_from_storage: Callable[[Sequence[LedgerId]], int]
    _clock_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._last_overreplicated_ms = self._clock_ms()
        self._locks = LedgerLocks(self._metadata.cluster.store)

    def collect(self, *, accept_scoped_deletes: bool = False) -> None:
        """Delete over-replicated ledgers where that is due, then the ledgers that no longer exist.

        The bookie's ledgers are listed before the metadata, and the metadata of a candidate is read again right before
        its deletion: a ledger that is created meanwhile is never deleted. Scoped ledgers are deleted after the whole
        listing succeeded, and not where so many would go that the metadata may be at fault, unless
        `accept_scoped_deletes`. Raises BkctlError, which ends the round.
        """
        metadata, stats = self._metadata, self._metadata.stats
        stats.scoped_held_back = "the round did not come so far"
        local = LedgerIdSet(self._storage.ledger_ids())
        stats.active_ledgers = len(local)
        metadata.check_cluster()
        wait_ms = metadata.config.gc_overreplicated_ledger_wait_time
        if 0 < wait_ms < self._clock_ms() - self._last_overreplicated_ms:
            removed = self._collect_overreplicated(local)
            local = LedgerIdSet(ledger for ledger in local if ledger not in removed)
            self._last_overreplicated_ms = self._clock_ms()
        scoped_count = len(local) - bisect_left(local, LedgerId(1, 0))
        scoped_listed = False
        scoped: list[LedgerId] = []
        for listed in metadata.cluster.ledgers.ranges(None):
            metadata.check_running()
            candidates = _missing(local, listed.first, listed.last, listed.ledgers)
            plain = [ledger for ledger in candidates if not ledger.is_scoped]
            scoped += candidates[len(plain) :]
            scoped_listed = listed.last.is_scoped
            self._collect(plain)
        stats.scoped_held_back = self._reason_to_hold_back(scoped, scoped_count, scoped_listed, accept_scoped_deletes)
        if not stats.scoped_held_back and scoped_listed:
            self._collect(scoped)
        elif scoped or stats.scoped_held_back:
            log.warning("No scoped ledger is collected: %s", stats.scoped_held_back)
        stats.active_ledgers = len(local)

    def _reason_to_hold_back(self, candidates: list[LedgerId], count: int, listed: bool, accepted: bool) -> str:
        """Return why none of `count` scoped ledgers may be deleted although metadata lacks `candidates`; "" if fine."""
        metadata, config = self._metadata, self._metadata.config
        if not listed:
            return f"{metadata.cluster.store.name} has no scopes tree of this cluster" if count else ""
        if metadata.cluster.instance_id() != metadata.instance_id:
            return "the bookie's cookie does not name this cluster"
        if accepted or len(candidates) < config.gc_scoped_delete_count_min:
            return ""
        if len(candidates) <= config.gc_scoped_delete_ratio_max * count:
            return ""
        reason = f"{len(candidates)} of {count} scoped ledgers would be deleted"
        log.error(
            "Garbage collection deletes no scoped ledger: %s. If all those were deleted on purpose, let one round "
            "pass with 'bkctl bookie gc --accept-scoped-deletes'",
            reason,
        )
        return reason

    def _collect(self, candidates: list[LedgerId]) -> None:
        """Delete the candidates that still do not exist when each is looked up."""
        for batch in self._metadata.batches(candidates):
            states = self._metadata.states(batch, "Garbage collection keeps ledgers")
            dead = [ledger for ledger in batch if states[ledger] is LedgerLiveness.DEAD]
            if dead:
                self._metadata.check_cluster()
                self._delete(dead)

    def _delete(self, ledgers: Sequence[LedgerId]) -> int:
        stats = self._metadata.stats
        count = self._delete_from_storage(ledgers)
        self._unindexed.add_deleted(ledgers)
        stats.deleted_ledgers += count
        stats.deleted_scoped_ledgers += sum(ledger.is_scoped for ledger in ledgers)
        log.info("Deleted %d ledgers whose metadata is gone or names other bookies: %s", count, some_of(ledgers, 10))
        return count

    def _collect_overreplicated(self, local: Iterable[LedgerId]) -> set[LedgerId]:
        """Delete the closed ledgers whose metadata names other bookies only; return them.

        Source: removeOverReplicatedledgers.
        """
        # Locks that an outage kept the last round from releasing.
        self._locks.unlock_all()
        removed: set[LedgerId] = set()
        for batch in self._metadata.batches(local):
            for ledger, found in list(self._metadata.cluster.ledgers.read_many(batch)):
                if not isinstance(found, BkctlError) and self._is_elsewhere(found.metadata):
                    removed.update(self._delete_overreplicated(ledger))
        return removed

    def _delete_overreplicated(self, ledger: LedgerId) -> list[LedgerId]:
        """Delete a ledger under its under-replication lock, so that no worker replicates it to this bookie meanwhile.

        Return it, or nothing where another has the lock or the metadata changed.
        """
        if self._locks.get(ledger) is not None:
            return []
        try:
            self._locks.lock(ledger, self._metadata.bookie_id)
        except Conflict:
            return []
        try:
            if self._is_elsewhere(self._metadata.cluster.ledgers.read(ledger).metadata):
                self._metadata.check_cluster()
                self._metadata.stats.deleted_overreplicated_ledgers += self._delete([ledger])
                return [ledger]
        except (LedgerNotFound, Corrupt, Unsupported) as error:
            log.warning("Ledger %s is not collected as over-replicated: %s", ledger, error)
        finally:
            self._locks.unlock(ledger)
        return []

    def _is_elsewhere(self, metadata: LedgerMetadata) -> bool:
        """Return whether the ledger is closed, so that its ensembles are final, and this bookie is in none."""
        return metadata.state is LedgerState.CLOSED and not self._metadata.names_bookie(metadata)


def _missing(local: LedgerIdSet, first: LedgerId, last: LedgerId, present: Iterable[LedgerId]) -> list[LedgerId]:
    """Return the ledgers of `local` from `first` to `last` that are not `present`."""
    found = set(present)
    return [ledger for ledger in local.between(first, last) if ledger not in found]


class GarbageCollectorThread:
    """Runs garbage collection every `gcWaitTime`, and when an operator forces it.

    `delete` deletes ledgers from the bookie's storage and returns how many were there. `checkpoint` returns when a
    checkpoint that began after its call is on disk (NoSpaceForCheckpoint: it has to wait). Both wait for the event
    loop, and raise BkctlError or OSError when the bookie gives up.
    """

    def __init__(
        self,
        config: BookieConfig,
        storage: LedgerStorage[Any],
        cluster: Cluster,
        *,
        bookie_id: str,
        instance_id: str,
        delete: Callable[[Sequence[LedgerId]], int],
        checkpoint: Callable[[], None],
        files: Files | None = None,
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
    ) -> None:
        self.stats = GarbageCollectorStats()
        self._config = config
        self._storage = storage
        self._clock_ms = clock_ms
        self._stopped = threading.Event()
        schedule = self._schedule = CompactionSchedule(config, clock_ms)
        self.suspend, self.resume, self.is_suspended = schedule.suspend, schedule.resume, schedule.is_suspended
        self.suspended_by_disks = schedule.suspended_by_disks
        metadata = CollectorMetadata(
            config, cluster, bookie_id=bookie_id, instance_id=instance_id, stats=self.stats, stopped=self._stopped
        )
        self.unindexed = UnindexedLedgers(metadata)
        self._ledgers = ScanAndCompareGarbageCollector(metadata, storage, self.unindexed, delete, clock_ms)
        self._logs = EntryLogCollector(
            metadata,
            storage,
            self.unindexed,
            files or Files(),
            checkpoint=checkpoint,
            clock_ms=clock_ms,
        )
        self._changed = threading.Condition()
        self._forced: ForcedRound | None = None
        self._thread: threading.Thread | None = None

    # --- control: any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the first round comes after `gcWaitTime`."""
        self._thread = threading.Thread(target=self._run, name="garbage-collector", daemon=True)
        self._thread.start()

    def use(self, config: BookieConfig) -> None:
        """Take thresholds and intervals of compaction from `config` from the next round on."""
        self._config = config
        self._schedule.use(config)

    def cancel(self) -> None:
        """End the round under way soon, and begin no other."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Cancel, and return when the thread ended. Not for the event loop's thread: a round may wait for the loop."""
        self.cancel()
        if self._thread is not None:
            self._thread.join()

    def force(
        self, major: bool | None = None, minor: bool | None = None, *, accept_scoped_deletes: bool = False
    ) -> bool:
        """Run a round now, with or without major and minor compaction (None: unless it is suspended).

        Return False, and change nothing, when a forced round is under way or waits. Source: enableForceGC.
        """
        with self._changed:
            if self._forced is not None or self._stopped.is_set():
                return False
            self._forced = ForcedRound(major, minor, accept_scoped_deletes)
            self._changed.notify_all()
        log.info("Garbage collection is forced")
        return True

    def compact_locations(self, paths: Collection[str] = ()) -> None:
        """Compact the databases of entry locations at `paths`, all without `paths`, until `cancel`; for any thread.

        Raises OSError.
        """
        for index in self._storage.location_indexes:
            index.compact(paths, lambda: not self._stopped.is_set())

    @property
    def is_in_force_gc(self) -> bool:
        """True if a forced round is under way, or about to begin."""
        return self._forced is not None

    def disks_are(self, *, full: bool, almost_full: bool) -> None:
        """Suspend compaction while a ledger directory is above a threshold.

        With isForceGCAllowWhenNoSpace force it instead. Source: InterleavedLedgerStorage.getLedgerDirsListener.
        """
        if not self._config.is_force_gc_allow_when_no_space:
            self._schedule.suspend_for_disks(full=full, almost_full=almost_full)
        elif full or almost_full:
            self.force()

    def statuses(self) -> list[GarbageCollectionStatus]:
        """Return the state of each collector; ours is one for all directories."""
        stats, schedule = self.stats, self._schedule
        epoch_ms = time.time_ns() // 1_000_000 - self._clock_ms()
        return [
            GarbageCollectionStatus(
                self.is_in_force_gc,
                self._logs.compacting == MAJOR,
                self._logs.compacting == MINOR,
                epoch_ms + schedule.last_ms[MAJOR],
                epoch_ms + schedule.last_ms[MINOR],
                epoch_ms + schedule.last_locations_ms,
                stats.major_compactions,
                stats.minor_compactions,
                stats.entry_location_compactions,
            )
        ]

    # --- rounds: the collector's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = self._config.gc_wait_time / 1000
        due_s = time.monotonic() + wait_s
        while True:
            forced = self._wait_for_round(due_s)
            if self._stopped.is_set():
                return
            try:
                self.run_round(forced)
            except CompactionStopped:
                return
            except Exception:  # a fault of ours must not end collection: the disks would fill up
                self.stats.failed_rounds += 1
                log.exception("Garbage collection failed")
            if forced is not None:
                self._forced = None
            due_s = time.monotonic() + wait_s

    def _wait_for_round(self, due_s: float) -> ForcedRound | None:
        """Wait until `due_s`, a stop or a forced round, which is returned."""
        with self._changed:
            while self._forced is None and not self._stopped.is_set():
                remaining_s = due_s - time.monotonic()
                if remaining_s <= 0:
                    break
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return self._forced

    def run_round(self, forced: ForcedRound | None = None) -> None:
        """Delete ledgers, remove logs without ledgers, compact. Source: GarbageCollectorThread.runWithFlags."""
        accept = forced is not None and forced.accept_scoped_deletes
        self.unindexed.begin_round()
        self.stats.problem = ""
        before_bytes = self.stats.reclaimed_bytes
        failed = not self._succeeds("delete ledgers", lambda: self._ledgers.collect(accept_scoped_deletes=accept))
        # Logs are collected in any case: ledgers that earlier rounds deleted leave garbage too.
        if self._succeeds("find the ledgers of entry logs", self._logs.find_ledgers):
            failed |= not self._succeeds("collect entry logs", self._logs.collect)
            failed |= not self._succeeds("compact", lambda: self._compact_if_due(forced))
            self.unindexed.report()
        else:
            failed = True
        full = self._schedule.suspended_by_disks()
        if forced is not None and full and self.stats.reclaimed_bytes == before_bytes:
            self.stats.note_problem(f"it freed no entry log; {full}")
        self.stats.rounds += 1
        self.stats.failed_rounds += failed

    def _succeeds(self, name: str, step: Callable[[], None]) -> bool:
        """Run `step`; return False, and log the error, for a failure that the next round may not have."""
        try:
            step()
        except CompactionStopped:
            raise
        except (BkctlError, OSError) as error:
            if self._stopped.is_set():
                raise CompactionStopped("The bookie stops") from error
            log.warning("Garbage collection could not %s: %s", name, error)
            self.stats.note_problem(f"it could not {name}: {error}")
            return False
        return True

    def _compact_if_due(self, forced: ForcedRound | None) -> None:
        schedule, stats = self._schedule, self.stats
        are_locations_due = schedule.are_locations_due
        kind = schedule.due(forced)
        if kind is not None:
            try:
                self._logs.compact(kind, self._config)
            finally:
                schedule.compacted(kind)
                if kind == MAJOR:
                    stats.major_compactions += 1
                else:
                    stats.minor_compactions += 1
        if are_locations_due:
            self.compact_locations()
            schedule.locations_compacted()
            stats.entry_location_compactions += 1
