"""Garbage collection: ledgers that were deleted leave this bookie, and then their entries leave the entry logs.

A round deletes, first, what the metadata store says is no more; the entry logs follow: one in which no ledger is left
is removed, and what is alive in one with much garbage is written again elsewhere (`bkctl.storage.compaction`).
That a ledger is not in the index proves nothing, for the index may be lost: before a log goes, the metadata store is
asked about its ledgers that the index does not have. Apache's bookie does not ask.
Source: GarbageCollectorThread, ScanAndCompareGarbageCollector, GarbageCollectorStats; BP-35 for scopes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, ReadOnlyBookie, Unsupported, UsageError
from bkctl.formats.metadata import LedgerMetadata
from bkctl.formats.metadata import LedgerState as MetadataState
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.liveness import Liveness
from bkctl.metadata.underreplication import LedgerUnderreplicationManager
from bkctl.model import LedgerLiveness
from bkctl.storage.compaction import CompactionStopped, EntryLogCompactor, Throttler, TransactionalEntryLogCompactor
from bkctl.storage.entry_log_metadata import EntryLogMetadata, EntryLogMetadataMap
from bkctl.storage.ledger.ledger_storage import LedgerStorage

log: Final = logging.getLogger("bkctl.bookie")

#: Ledgers that are read again, and deleted, together.
BATCH_SIZE: Final = 100
#: Classes of usage in which entry logs are counted. Source: ENTRY_LOG_USAGE_SEGMENT_COUNT.
USAGE_BUCKETS: Final = 10


class NoSpaceForCheckpoint(BkctlError):
    """A checkpoint failed for want of space; what it would have written waits in memory and journal."""


class GarbageCollectionStatus(NamedTuple):
    """What the collector does and did; times in ms since 1970, from the bookie's start on. Source: Apache's class."""

    force_compacting: bool
    major_compacting: bool
    minor_compacting: bool
    last_major_compaction_time: int
    last_minor_compaction_time: int
    last_entry_location_compaction_time: int
    major_compaction_counter: int
    minor_compaction_counter: int
    entry_location_compaction_counter: int


@dataclass(slots=True)
class GarbageCollectorStats:
    """Counters since the start, and gauges of the last round; written by the collector, read by anybody."""

    rounds: int = 0
    failed_rounds: int = 0
    deleted_ledgers: int = 0
    deleted_scoped_ledgers: int = 0
    deleted_overreplicated_ledgers: int = 0
    major_compactions: int = 0
    minor_compactions: int = 0
    entry_location_compactions: int = 0
    reclaimed_by_deletion_bytes: int = 0
    reclaimed_by_compaction_bytes: int = 0
    failed_to_delete: int = 0
    compacted_entries: int = 0
    active_ledgers: int = 0
    active_entry_logs: int = 0
    active_entry_log_bytes: int = 0
    entry_log_bytes: int = 0
    #: Of the last compaction: logs compacted by logs there were.
    compact_ratio: float = 0.0
    #: Logs by usage, in tenths.
    usage_buckets: list[int] = field(default_factory=lambda: [0] * USAGE_BUCKETS)
    #: Why scoped ledgers were not collected in the last round; "" when they were.
    scoped_held_back: str = ""
    #: Ledgers that exist, name this bookie and have entries here, and are not in its index, as far as the last round
    #: had to ask: their entry logs stay.
    unindexed_ledgers: int = 0


class _Force(NamedTuple):
    """One round that was asked for. `major`, `minor` None: as compaction is suspended or not."""

    major: bool | None
    minor: bool | None
    accept_scoped_deletes: bool


def check_compaction_settings(config: BookieConfig) -> None:
    """Raises UsageError for settings with which Apache's bookie does not start. Source: GarbageCollectorThread."""
    where = config.conf_path or "The configuration"
    too_short = f"is shorter than gcWaitTime, {config.gc_wait_time} ms"
    for name, threshold, interval in (
        ("minor", config.minor_compaction_threshold, config.minor_compaction_interval),
        ("major", config.major_compaction_threshold, config.major_compaction_interval),
    ):
        if threshold > 0 and 0 < interval * 1000 < config.gc_wait_time:
            raise UsageError(f"{where}: {name}CompactionInterval of {interval} s {too_short}")
    interval = config.entry_location_compaction_interval
    if 0 < interval * 1000 < config.gc_wait_time:
        raise UsageError(f"{where}: entryLocationCompactionInterval of {interval} s {too_short}")
    if not _is_enabled(config.minor_compaction_threshold, config.minor_compaction_interval):
        return
    if not _is_enabled(config.major_compaction_threshold, config.major_compaction_interval):
        return
    if config.minor_compaction_threshold >= config.major_compaction_threshold:
        raise UsageError(
            f"{where}: minorCompactionThreshold {config.minor_compaction_threshold} is not below "
            f"majorCompactionThreshold {config.major_compaction_threshold}"
        )
    if config.minor_compaction_interval >= config.major_compaction_interval:
        raise UsageError(
            f"{where}: minorCompactionInterval {config.minor_compaction_interval} s is not below "
            f"majorCompactionInterval {config.major_compaction_interval} s"
        )


def _is_enabled(threshold: float, interval: int) -> bool:
    return threshold > 0 and interval > 0


class ScanAndCompareGarbageCollector:
    """Deletes the ledgers of this bookie that the metadata store says do not exist, and never by guess.

    `instance_id` is the one in the bookie's cookie. `delete` deletes ledgers from the bookie's storage and returns how
    many were there. In one thread. Source: ScanAndCompareGarbageCollector with verifyMetadataOnGC; BP-35.
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
        stats: GarbageCollectorStats,
        stopped: threading.Event,
        clock_ms: Callable[[], int],
    ) -> None:
        self._config = config
        self._storage = storage
        self._cluster = cluster
        self._bookie_id = bookie_id
        self._instance_id = instance_id
        self._delete = delete
        self._stats = stats
        self._stopped = stopped
        self._clock_ms = clock_ms
        self._last_overreplicated_ms = clock_ms()
        #: What this round was told: ledgers that this bookie needs nothing of; others, and whether they are alive here.
        self._garbage: set[LedgerId] = set()
        self._spared: dict[LedgerId, bool] = {}

    def begin_round(self) -> None:
        """Forget what the last round was told."""
        self._garbage, self._spared = set(), {}

    def collect(self, *, accept_scoped_deletes: bool = False) -> None:
        """One round: over-replicated ledgers where it is time for them, then those that are no more.

        What is on this bookie is listed before the metadata, and a candidate's metadata is read again right before its
        deletion, so a ledger that is created meanwhile is never taken for a deleted one. Scoped ledgers are deleted
        after the whole listing succeeded, and not where so many would go that the metadata may be at fault:
        `accept_scoped_deletes` lets those go. Raises BkctlError, which ends the round.
        """
        stats = self._stats
        stats.scoped_held_back = "the round did not come so far"
        local = list(self._storage.ledger_ids())
        stats.active_ledgers = len(local)
        self._check_cluster()
        wait_ms = self._config.gc_overreplicated_ledger_wait_time
        if 0 < wait_ms < self._clock_ms() - self._last_overreplicated_ms:
            removed = self._collect_overreplicated(local)
            local = [ledger for ledger in local if ledger not in removed]
            self._last_overreplicated_ms = self._clock_ms()
        scoped_count = len(local) - bisect_left(local, LedgerId(1, 0))
        scoped_listed = False
        scoped: list[LedgerId] = []
        for found in self._cluster.ledgers.ranges(None):
            self._check_running()
            candidates = _missing(local, found.first, found.last, found.ledgers)
            plain = [ledger for ledger in candidates if not ledger.is_scoped]
            scoped += candidates[len(plain) :]
            scoped_listed = found.last.is_scoped
            self._collect(plain)
        self._collect_scoped(scoped, scoped_count, scoped_listed, accept_scoped_deletes)
        stats.active_ledgers = len(local)

    def _collect_scoped(self, candidates: list[LedgerId], count: int, listed: bool, accepted: bool) -> None:
        config, stats = self._config, self._stats
        stats.scoped_held_back = ""
        if not listed:
            if count:
                stats.scoped_held_back = f"{self._cluster.store.name} has no scopes tree of this cluster"
        elif self._cluster.instance_id() != self._instance_id:
            stats.scoped_held_back = "the bookie's cookie does not name this cluster"
        elif (
            len(candidates) >= config.gc_scoped_delete_count_min
            and len(candidates) > config.gc_scoped_delete_ratio_max * count
            and not accepted
        ):
            stats.scoped_held_back = f"{len(candidates)} of {count} scoped ledgers would be deleted"
            log.error(
                "Garbage collection deletes no scoped ledger: %s. If all those were deleted on purpose, let one round "
                "pass with 'bkctl bookie gc --accept-scoped-deletes'",
                stats.scoped_held_back,
            )
        else:
            self._collect(candidates)
            return
        if candidates or stats.scoped_held_back:
            log.warning("No scoped ledger is collected: %s", stats.scoped_held_back)

    def _collect(self, candidates: list[LedgerId]) -> None:
        """Delete those of the candidates that are still not there when asked for one by one."""
        for start in range(0, len(candidates), BATCH_SIZE):
            self._check_running()
            some = candidates[start : start + BATCH_SIZE]
            began = time.monotonic()
            liveness = Liveness(self._cluster.ledgers)
            states = liveness.states(some)
            for problem in liveness.problems:
                log.warning("Garbage collection leaves ledgers alone: %s", problem)
            dead = [ledger for ledger in some if states[ledger] is LedgerLiveness.DEAD]
            if dead:
                self._check_cluster()
                self._delete_now(dead)
            self._pause(len(some), began)

    def _delete_now(self, ledgers: Sequence[LedgerId]) -> int:
        count = self._delete(ledgers)
        self._garbage.update(ledgers)
        self._stats.deleted_ledgers += count
        self._stats.deleted_scoped_ledgers += sum(ledger.is_scoped for ledger in ledgers)
        log.info("Deleted %d ledgers whose metadata is gone or names other bookies: %s", count, _some(ledgers))
        return count

    # --- ledgers that the index does not have ------------------------------------------------------------------------

    def garbage_of(self, ledgers: Iterable[LedgerId]) -> set[LedgerId]:
        """Those of these ledgers, none of which is in the index, whose entries nobody reads from this bookie.

        They have no metadata, or it names other bookies only; what nobody can tell now is not among them. Each is asked
        for once in a round. What is asked for must have been in entry logs before the call.
        """
        asked = sorted(ledger for ledger in set(ledgers) if ledger not in self._garbage and ledger not in self._spared)
        try:
            for start in range(0, len(asked), BATCH_SIZE):
                self._check_running()
                if start == 0:
                    self._check_cluster()
                began = time.monotonic()
                some = asked[start : start + BATCH_SIZE]
                self._ask(some)
                self._pause(len(some), began)
        except CompactionStopped:
            raise
        except BkctlError as error:
            log.warning("Entry logs of ledgers that are not in the index stay: %s", error)
        return {ledger for ledger in ledgers if ledger in self._garbage}

    def _ask(self, ledgers: list[LedgerId]) -> None:
        liveness = Liveness(self._cluster.ledgers)
        states = liveness.states(ledgers)
        for problem in liveness.problems:
            log.warning("Entry logs of ledgers that are not in the index stay: %s", problem)
        for ledger, state in states.items():
            if state is LedgerLiveness.DEAD or (not ledger.is_scoped and ledger.ledger_id > I64_MAX):
                self._garbage.add(ledger)
            else:
                self._spared[ledger] = False
        alive = [ledger for ledger in ledgers if states[ledger] is LedgerLiveness.ALIVE]
        for ledger, found in self._cluster.ledgers.read_many(alive):
            if isinstance(found, LedgerNotFound):
                self._garbage.add(ledger)
            elif not isinstance(found, BkctlError):
                is_here = self._spared[ledger] = self._names_us(found.metadata)
                if not is_here:
                    self._garbage.add(ledger)

    def tell_unindexed(self) -> None:
        """Say which ledgers lost their index, as far as this round has asked."""
        lost = sorted(ledger for ledger, is_alive in self._spared.items() if is_alive)
        self._stats.unindexed_ledgers = len(lost)
        if lost:
            command = "rebuild" if self._config.ledger_storage == "db" else "regenerate"
            log.error(
                "%d ledgers exist and have entries on this bookie, and its index does not have them: %s. Their entry "
                "logs stay, and cannot be read. Was the index lost? 'bkctl bookie index %s' makes it anew",
                len(lost), _some(lost), command,
            )  # fmt: skip

    def _names_us(self, metadata: LedgerMetadata) -> bool:
        return any(self._bookie_id in fragment.bookies for fragment in metadata.ensembles)

    def _check_cluster(self) -> None:
        """Raises Conflict where the metadata is another cluster's than the bookie's: every ledger would look dead."""
        found = self._cluster.instance_id()
        if self._instance_id and found != self._instance_id:
            raise Conflict(
                f"{self._cluster.store.name} is the cluster {found or 'without instance id'} now, this bookie belongs "
                f"to {self._instance_id}: nothing is collected",
                hint="was the cluster formatted? Then this bookie's data has to go too",
            )

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise CompactionStopped("The bookie stops")

    def _pause(self, operation_count: int, began: float) -> None:
        """Keep to gcMetadataOpRateLimit."""
        due = operation_count / self._config.gc_metadata_op_rate_limit - (time.monotonic() - began)
        if due > 0:
            self._stopped.wait(due)

    # --- over-replicated ledgers -------------------------------------------------------------------------------------

    def _collect_overreplicated(self, local: list[LedgerId]) -> set[LedgerId]:
        """Delete the closed ledgers whose metadata names other bookies only; returns them.

        Each under its under-replication lock, so that nobody brings it back here meanwhile. Source:
        removeOverReplicatedledgers.
        """
        manager = self._cluster.ledgers
        underreplication = LedgerUnderreplicationManager(self._cluster.store)
        removed: set[LedgerId] = set()
        for start in range(0, len(local), BATCH_SIZE):
            self._check_running()
            began = time.monotonic()
            some = local[start : start + BATCH_SIZE]
            for ledger, found in list(manager.read_many(some)):
                if isinstance(found, BkctlError) or not self._is_elsewhere(found.metadata):
                    continue
                if underreplication.lock_owner(ledger) is not None:
                    continue
                try:
                    underreplication.lock(ledger, self._bookie_id)
                except Conflict:
                    continue
                try:
                    if self._is_elsewhere(manager.read(ledger).metadata):
                        self._check_cluster()
                        self._stats.deleted_overreplicated_ledgers += self._delete_now([ledger])
                        removed.add(ledger)
                except (LedgerNotFound, Corrupt, Unsupported) as error:
                    log.warning("Ledger %s is not collected as over-replicated: %s", ledger, error)
                finally:
                    underreplication.unlock(ledger)
            self._pause(len(some), began)
        return removed

    def _is_elsewhere(self, metadata: LedgerMetadata) -> bool:
        """Whether the ledger is closed, so that its ensembles stay as they are, and this bookie is in none of them."""
        return metadata.state is MetadataState.CLOSED and not self._names_us(metadata)


def _missing(local: list[LedgerId], first: LedgerId, last: LedgerId, present: Iterable[LedgerId]) -> list[LedgerId]:
    """The ledgers of `local` from `first` to `last` that are not `present`."""
    found = set(present)
    between = local[bisect_left(local, first) : bisect_right(local, last)]
    return [ledger for ledger in between if ledger not in found]


def _some(ledgers: Sequence[LedgerId]) -> str:
    shown = ", ".join(map(str, ledgers[:10]))
    return f"{shown}, …" if len(ledgers) > 10 else shown


class GarbageCollectorThread:
    """Runs garbage collection every `gcWaitTime`, and when it is asked to.

    `delete` and `checkpoint` are the bookie's: the first deletes ledgers from its storage and returns how many were
    there, the second returns when a checkpoint that began after its call is on disk (NoSpaceForCheckpoint: it has to
    wait); both wait for the event loop, and raise BkctlError or OSError when the bookie gives up. `run_round` does a
    round in the calling thread.
    Raises UsageError for settings with which Apache's bookie does not start.
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
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        chance: random.Random | None = None,
    ) -> None:
        check_compaction_settings(config)
        self.stats = GarbageCollectorStats()
        self._config = config
        self._storage = storage
        self._checkpoint = checkpoint
        self._clock_ms = clock_ms
        self._chance = chance or random.Random()
        self._stopped = threading.Event()
        self._collector = ScanAndCompareGarbageCollector(
            config,
            storage,
            cluster,
            bookie_id=bookie_id,
            instance_id=instance_id,
            delete=delete,
            stats=self.stats,
            stopped=self._stopped,
            clock_ms=clock_ms,
        )
        self._logs = EntryLogMetadataMap(storage.entry_loggers)
        kind = TransactionalEntryLogCompactor if config.use_transactional_compaction else EntryLogCompactor
        self._compactor = kind(
            config,
            storage,
            files or Files(),
            checkpoint=checkpoint,
            throttler=Throttler(config, self._stopped),
            removed=self._compacted,
        )
        self._compacted_count = 0
        self._changed = threading.Condition()
        self._forced: _Force | None = None
        self._suspended: set[str] = set()
        self._suspended_by_disks: set[str] = set()
        self._compacting = ""
        now = clock_ms()
        self._last_major_ms = self._last_minor_ms = self._last_locations_ms = now
        self._locations_delay_ms = self._new_locations_delay()
        self._thread: threading.Thread | None = None

    # --- control: any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the first round comes after `gcWaitTime`."""
        self._thread = threading.Thread(target=self._run, name="garbage-collector", daemon=True)
        self._thread.start()

    def use(self, config: BookieConfig) -> None:
        """Take thresholds and intervals of compaction from `config` from the next round on."""
        self._config = config

    def cancel(self) -> None:
        """Let what is under way end soon, and nothing new begin."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Return when nothing runs any more. Not in the event loop's thread: a round may wait for that."""
        self.cancel()
        if self._thread is not None:
            self._thread.join()

    def force(
        self, major: bool | None = None, minor: bool | None = None, *, accept_scoped_deletes: bool = False
    ) -> bool:
        """Let a round run now, with or without major and minor compaction (None: as they are suspended or not).

        Returns False when a forced round is under way or waits: that one goes on as it is. Source: enableForceGC.
        """
        with self._changed:
            if self._forced is not None or self._stopped.is_set():
                return False
            self._forced = _Force(major, minor, accept_scoped_deletes)
            self._changed.notify_all()
        log.info("Garbage collection is forced")
        return True

    @property
    def is_in_force_gc(self) -> bool:
        """Whether a forced round is under way, or about to begin."""
        return self._forced is not None

    def suspend_major(self) -> None:
        """Begin no major compaction until `resume_major`."""
        self._suspended.add("major")

    def resume_major(self) -> None:
        """Allow major compaction again."""
        self._suspended.discard("major")

    def suspend_minor(self) -> None:
        """Begin no minor compaction until `resume_minor`."""
        self._suspended.add("minor")

    def resume_minor(self) -> None:
        """Allow minor compaction again."""
        self._suspended.discard("minor")

    @property
    def is_major_suspended(self) -> bool:
        """Whether major compaction is suspended, by somebody or for full disks."""
        return "major" in self._suspended or "major" in self._suspended_by_disks

    @property
    def is_minor_suspended(self) -> bool:
        """Whether minor compaction is suspended, by somebody or for full disks."""
        return "minor" in self._suspended or "minor" in self._suspended_by_disks

    def disks_are(self, *, full: bool, almost_full: bool) -> None:
        """Take note of how the ledger directories are, above which threshold any of them is.

        Compaction needs space before it gives some back: it is suspended, major first, unless isForceGCAllowWhenNoSpace
        says that it is forced instead. Source: InterleavedLedgerStorage.getLedgerDirsListener.
        """
        if self._config.is_force_gc_allow_when_no_space:
            if full or almost_full:
                self.force()
            return
        self._suspended_by_disks = {"major", "minor"} if full else {"major"} if almost_full else set()

    def statuses(self) -> list[GarbageCollectionStatus]:
        """The state of each collector; ours is one for all directories."""
        stats = self.stats
        return [
            GarbageCollectionStatus(
                self.is_in_force_gc,
                self._compacting == "major",
                self._compacting == "minor",
                self._last_major_ms,
                self._last_minor_ms,
                self._last_locations_ms,
                stats.major_compactions,
                stats.minor_compactions,
                stats.entry_location_compactions,
            )
        ]

    # --- rounds: the collector's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = self._config.gc_wait_time / 1000
        due = time.monotonic() + wait_s
        while True:
            with self._changed:
                while self._forced is None and not self._stopped.is_set():
                    remaining = due - time.monotonic()
                    if remaining <= 0:
                        break
                    self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                forced = self._forced
            if self._stopped.is_set():
                return
            try:
                self._round(forced)
            except CompactionStopped:
                return
            except Exception:  # a mistake of ours must not end collection for good: the disks would fill up
                self.stats.failed_rounds += 1
                log.exception("Garbage collection failed")
            if forced is not None:
                self._forced = None
            due = time.monotonic() + wait_s

    def run_round(
        self,
        force: bool = False,
        major: bool | None = None,
        minor: bool | None = None,
        *,
        accept_scoped_deletes: bool = False,
    ) -> None:
        """A whole round in the calling thread, while `start` was not called."""
        self._round(_Force(major, minor, accept_scoped_deletes) if force else None)

    def _round(self, forced: _Force | None) -> None:
        """Ledgers, then logs without any, then compaction. Source: GarbageCollectorThread.runWithFlags."""
        accept = forced is not None and forced.accept_scoped_deletes
        self._collector.begin_round()
        failed = self._attempt("delete ledgers", lambda: self._collector.collect(accept_scoped_deletes=accept))
        # Which ledgers are here decides the rest, and deleted ones of earlier rounds leave garbage too.
        if self._attempt("find the ledgers of entry logs", self._look_at_logs):
            failed = True
        else:
            failed |= self._attempt("collect entry logs", self._collect_logs)
            failed |= self._attempt("compact", lambda: self._compact_if_due(forced))
            self._collector.tell_unindexed()
        self.stats.rounds += 1
        self.stats.failed_rounds += failed

    def _attempt(self, what: str, step: Callable[[], None]) -> bool:
        """Whether `step` failed; what a later round may do is said and left to that."""
        try:
            step()
        except CompactionStopped:
            raise
        except (BkctlError, OSError) as error:
            if self._stopped.is_set():
                raise CompactionStopped("The bookie stops") from error
            log.warning("Garbage collection could not %s: %s", what, error)
            return True
        return False

    def _look_at_logs(self) -> None:
        self._logs.extract(_log_damage)
        # Listed after the logs: whatever has entries in one of them is here, unless it was deleted.
        indexed = set(self._storage.ledger_ids())
        for each in self._logs:
            each.keep(indexed)

    def _forget_garbage(self, logs: Sequence[EntryLogMetadata]) -> None:
        """Ask about the ledgers of these logs that the index does not have: what may be alive stays `unindexed`."""
        garbage = self._collector.garbage_of({ledger for each in logs for ledger in each.unindexed})
        for each in logs:
            each.forget(garbage)

    def _collect_logs(self) -> None:
        """Remove the logs in which no ledger of this bookie is left."""
        stats = self.stats
        self._forget_garbage([each for each in self._logs if not each.ledgers])
        active_bytes = all_bytes = 0
        is_forgotten = False
        for each in list(self._logs):
            if self._stopped.is_set():
                raise CompactionStopped("The bookie stops")
            if each.ledgers or each.unindexed:
                active_bytes += each.remaining_size_bytes
                all_bytes += each.total_size_bytes
                continue
            if not is_forgotten:
                # The index of a deleted ledger leaves the disk before its logs: after a crash none points nowhere.
                # Where there is no space for that the logs go all the same, for nothing else would ever make some:
                # an index that a crash brings back is deleted again in the next round.
                try:
                    self._checkpoint()
                except NoSpaceForCheckpoint as error:
                    log.warning("%s; entry logs in which no ledger is left are removed before it", error)
                is_forgotten = True
            try:
                each.logger.remove_log(each.log_id)
            except OSError as error:
                stats.failed_to_delete += 1
                log.warning("Entry log %s cannot be removed: %s", each.path, error)
                continue
            log.info("Removed entry log %s, in which no ledger is left", each.path)
            self._logs.remove(each)
            stats.reclaimed_by_deletion_bytes += each.total_size_bytes
        stats.active_entry_logs = len(self._logs)
        stats.active_entry_log_bytes = active_bytes
        stats.entry_log_bytes = all_bytes

    def _compact_if_due(self, forced: _Force | None) -> None:
        config, now = self._config, self._clock_ms()
        if self._is_due("major", forced, now, self._last_major_ms):
            try:
                self._compact("major", config.major_compaction_threshold, config.major_compaction_max_time_millis)
            finally:
                self._last_major_ms = self._last_minor_ms = self._clock_ms()
                self.stats.major_compactions += 1
        elif self._is_due("minor", forced, now, self._last_minor_ms):
            try:
                self._compact("minor", config.minor_compaction_threshold, config.minor_compaction_max_time_millis)
            finally:
                self._last_minor_ms = self._clock_ms()
                self.stats.minor_compactions += 1
        interval_ms = config.entry_location_compaction_interval * 1000
        if interval_ms > 0 and now - self._last_locations_ms > interval_ms + self._locations_delay_ms:
            self._storage.compact_locations()
            self._last_locations_ms = self._clock_ms()
            self._locations_delay_ms = self._new_locations_delay()
            self.stats.entry_location_compactions += 1

    def _new_locations_delay(self) -> int:
        """Bookies that started together do not all compact their databases at once."""
        interval_ms = self._config.entry_location_compaction_interval * 1000
        return self._chance.randrange(interval_ms) if interval_ms > 0 else 0

    def _is_due(self, kind: str, forced: _Force | None, now: int, last: int) -> bool:
        config = self._config
        if kind == "major":
            threshold, interval = config.major_compaction_threshold, config.major_compaction_interval
            wanted, suspended = None if forced is None else forced.major, self.is_major_suspended
        else:
            threshold, interval = config.minor_compaction_threshold, config.minor_compaction_interval
            wanted, suspended = None if forced is None else forced.minor, self.is_minor_suspended
        if wanted is False or (wanted is None and suspended):
            return False
        enabled = _is_enabled(threshold, interval)
        if forced is not None:
            return enabled or (config.force_allow_compaction and 0 < threshold < 1)
        return enabled and now - last > interval * 1000

    def _compact(self, kind: str, threshold: float, time_max_ms: int) -> None:
        """Compact the logs whose usage is below `threshold`, the emptiest first, id space by id space."""
        stats, compactor = self.stats, self._compactor
        size_min = self._config.log_size_limit if self._config.use_target_entry_log_size_for_gc else 0
        buckets = [0] * USAGE_BUCKETS
        candidates: list[tuple[int, float, EntryLogMetadata]] = []
        loggers = list(self._storage.entry_loggers)
        for each in self._logs:
            usage = each.usage(size_min)
            buckets[min(int(usage * USAGE_BUCKETS), USAGE_BUCKETS - 1)] += 1
            if usage < threshold:
                candidates.append((loggers.index(each.logger), usage, each))
        stats.usage_buckets = buckets
        stats.compact_ratio = 0.0
        # What the index does not have would not be copied, and a log with something that may be alive has to stay.
        self._forget_garbage([each for _, _, each in candidates])
        candidates = [candidate for candidate in candidates if not candidate[2].unindexed]
        if not candidates:
            return
        log_count = len(self._logs)
        self._compacting, self._compacted_count = kind, 0
        copied = compactor.entry_count
        began_ms = self._clock_ms()
        try:
            # From here on the index knows every entry of these logs: what it does not point to is not needed.
            self._checkpoint()
            for _, _, each in sorted(candidates, key=lambda candidate: candidate[:2]):
                if 0 < time_max_ms <= self._clock_ms() - began_ms:
                    break
                try:
                    compactor.compact(each)
                except CompactionStopped:
                    raise
                except ReadOnlyBookie as error:
                    log.warning("Entry log %s is not compacted: %s", each.path, error)
                except BkctlError as error:
                    self._logs.leave_out(each.path)
                    _log_damage(each.path, error)
            compactor.flush()
        except BaseException:
            compactor.abort()
            raise
        finally:
            stats.compacted_entries += compactor.entry_count - copied
            stats.compact_ratio = self._compacted_count / log_count
            self._compacting = ""
            if self._compacted_count:
                log.info("Compacted %d of %d entry logs (%s)", self._compacted_count, log_count, kind)

    def _compacted(self, source: EntryLogMetadata) -> None:
        self._logs.remove(source)
        self._compacted_count += 1
        self.stats.reclaimed_by_compaction_bytes += source.total_size_bytes - source.remaining_size_bytes


def _log_damage(path: Path, error: BkctlError) -> None:
    log.warning("Entry log %s is left as it is, for it cannot be read to its end: %s", path, error)
