"""Collection of entry logs: those without a ledger of the bookie are removed, those with much garbage are compacted.

`CompactionSchedule` has the intervals, thresholds, suspension and forced rounds.
A ledger that is not in the index may still be alive, because the index may be lost: see UnindexedLedgers.
Source: GarbageCollectorThread.doGcEntryLogs, doCompactEntryLogs.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.bookie.checkpoints import NoSpaceForCheckpoint
from bkctl.bookie.collector_metadata import USAGE_BUCKETS, CollectorMetadata, UnindexedLedgers
from bkctl.columns import some_of
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, UsageError, on_error
from bkctl.ids import LedgerIdSet
from bkctl.storage.compaction import CompactionStopped, EntryLogCompactor, UnreadableEntryLog
from bkctl.storage.entry_log_metadata import EntryLogMetadata, EntryLogMetadataMap
from bkctl.storage.ledger.ledger_storage import LedgerStorage

MAJOR: Final = "major"
MINOR: Final = "minor"


class ForcedRound(NamedTuple):
    """A round of garbage collection that an operator asked for.

    `major` and `minor` None: with such a compaction unless it is suspended.
    """

    major: bool | None = None
    minor: bool | None = None
    accept_scoped_deletes: bool = False


class CompactionSettings(NamedTuple):
    """The settings of one kind of compaction. A threshold is a usage from 0 to 1, an interval is in seconds."""

    threshold: float
    interval: int
    time_max_ms: int

    @classmethod
    def of(cls, config: BookieConfig, kind: str) -> CompactionSettings:
        """Return the settings of major or minor compaction."""
        names = ("threshold", "interval", "max_time_millis")
        return cls(*(getattr(config, f"{kind}_compaction_{name}") for name in names))

    @property
    def is_enabled(self) -> bool:
        """True if compactions of this kind run by themselves."""
        return self.threshold > 0 and self.interval > 0


def check_compaction_settings(config: BookieConfig) -> None:
    """Raise UsageError for settings with which Apache's bookie does not start. Source: GarbageCollectorThread."""
    where = config.conf_path or "The configuration"
    too_short = f"is shorter than gcWaitTime, {config.gc_wait_time} ms"
    minor, major = CompactionSettings.of(config, MINOR), CompactionSettings.of(config, MAJOR)
    for name, settings in ((MINOR, minor), (MAJOR, major)):
        if settings.threshold > 0 and 0 < settings.interval * 1000 < config.gc_wait_time:
            raise UsageError(f"{where}: {name}CompactionInterval of {settings.interval} s {too_short}")
    interval = config.entry_location_compaction_interval
    if 0 < interval * 1000 < config.gc_wait_time:
        raise UsageError(f"{where}: entryLocationCompactionInterval of {interval} s {too_short}")
    if not minor.is_enabled or not major.is_enabled:
        return
    for name, low, high, unit in (
        ("Threshold", minor.threshold, major.threshold, ""),
        ("Interval", minor.interval, major.interval, " s"),
    ):
        if low >= high:
            raise UsageError(
                f"{where}: minorCompaction{name} {low}{unit} is not below majorCompaction{name} {high}{unit}"
            )


class CompactionSchedule:
    """Decides which compactions a round has. Any thread may suspend them; the collector's thread asks what is due.

    Times are in ms of `clock_ms`, which is never set back, and begin with the schedule's creation.
    """

    def __init__(self, config: BookieConfig, clock_ms: Callable[[], int]) -> None:
        self._config = config
        self._clock_ms = clock_ms
        self._suspended: set[str] = set()
        self._suspended_by_disks: set[str] = set()
        now_ms = clock_ms()
        self.last_ms = {MAJOR: now_ms, MINOR: now_ms}
        self.last_locations_ms = now_ms
        self._locations_delay_ms = self._new_locations_delay()

    def use(self, config: BookieConfig) -> None:
        """Take thresholds and intervals from `config` from now on."""
        self._config = config

    def suspend(self, kind: str) -> None:
        """Begin no compaction of a kind until `resume`."""
        self._suspended.add(kind)

    def resume(self, kind: str) -> None:
        """Allow compactions of a kind again."""
        self._suspended.discard(kind)

    def suspend_for_disks(self, *, full: bool, almost_full: bool) -> None:
        """Suspend compaction, major first, while ledger directories are full: it needs space before it frees some."""
        self._suspended_by_disks = {MAJOR, MINOR} if full else {MAJOR} if almost_full else set()

    def is_suspended(self, kind: str) -> bool:
        """Return whether an operator or full disks suspend compactions of a kind."""
        return kind in self._suspended or kind in self._suspended_by_disks

    def suspended_by_disks(self) -> str:
        """Return why and how full disks suspend compaction; "" if they do not."""
        if not self._suspended_by_disks:
            return ""
        kinds = " and ".join(kind for kind in (MAJOR, MINOR) if kind in self._suspended_by_disks)
        limit = "diskUsageThreshold" if MINOR in self._suspended_by_disks else "diskUsageWarnThreshold"
        return f"{kinds} compaction is suspended while ledger directories are above {limit}"

    def due(self, forced: ForcedRound | None) -> str | None:
        """Return the kind of compaction that is due now: MAJOR, MINOR or None."""
        now_ms = self._clock_ms()
        return next((kind for kind in (MAJOR, MINOR) if self._is_due(kind, forced, now_ms)), None)

    def _is_due(self, kind: str, forced: ForcedRound | None, now_ms: int) -> bool:
        settings = CompactionSettings.of(self._config, kind)
        wanted = None if forced is None else forced.major if kind == MAJOR else forced.minor
        if wanted is False or (wanted is None and self.is_suspended(kind)):
            return False
        if forced is not None:
            return settings.is_enabled or (self._config.force_allow_compaction and 0 < settings.threshold < 1)
        return settings.is_enabled and now_ms - self.last_ms[kind] > settings.interval * 1000

    def compacted(self, kind: str) -> None:
        """Count the intervals from now: a major compaction includes a minor one."""
        self.last_ms[MINOR] = self._clock_ms()
        if kind == MAJOR:
            self.last_ms[MAJOR] = self.last_ms[MINOR]

    @property
    def are_locations_due(self) -> bool:
        """True if the databases of entry locations are to be compacted now."""
        interval_ms = self._config.entry_location_compaction_interval * 1000
        passed_ms = self._clock_ms() - self.last_locations_ms
        return interval_ms > 0 and passed_ms > interval_ms + self._locations_delay_ms

    def locations_compacted(self) -> None:
        """Count the interval of entry locations from now."""
        self.last_locations_ms = self._clock_ms()
        self._locations_delay_ms = self._new_locations_delay()

    def _new_locations_delay(self) -> int:
        """Return a random delay: bookies that started together do not all compact their databases at once."""
        interval_ms = self._config.entry_location_compaction_interval * 1000
        return random.randrange(interval_ms) if interval_ms > 0 else 0


log: Final = logging.getLogger("bkctl.bookie")


class EntryLogCollector:
    """Removes and compacts the entry logs of one bookie, in one thread, which calls `find_ledgers` first in each round.

    `checkpoint` returns when a checkpoint that began after its call is on disk.
    """

    def __init__(
        self,
        metadata: CollectorMetadata,
        storage: LedgerStorage[Any],
        unindexed: UnindexedLedgers,
        files: Files,
        *,
        checkpoint: Callable[[], None],
        clock_ms: Callable[[], int],
    ) -> None:
        config = metadata.config
        self._metadata = metadata
        self._stats = metadata.stats
        self._storage = storage
        self._unindexed = unindexed
        self._checkpoint = checkpoint
        self._clock_ms = clock_ms
        self._logs = EntryLogMetadataMap(storage.entry_loggers, storage)
        self._compactor = EntryLogCompactor(
            config,
            storage,
            files,
            checkpoint=checkpoint,
            stopped=metadata.stopped,
            removed=self._remove_compacted,
        )
        self._indexed = LedgerIdSet()
        self._compacted_count = 0
        #: The kind of compaction under way, or "".
        self.compacting = ""

    def find_ledgers(self) -> None:
        """Find out which ledgers have entries in which log, and which of those the index knows."""
        self._logs.extract(_log_damage)
        # Listed after the logs: every ledger with entries in one of them is here, unless it was deleted.
        self._indexed = LedgerIdSet(self._storage.ledger_ids())
        for entry_log in self._logs:
            entry_log.keep(self._indexed)

    def _forget_garbage(self, logs: Sequence[EntryLogMetadata]) -> None:
        """Drop the garbage from the unindexed ledgers of these logs; ledgers that may be alive stay `unindexed`."""
        garbage = self._unindexed.garbage_of({ledger for entry_log in logs for ledger in entry_log.unindexed})
        for entry_log in logs:
            entry_log.forget(garbage)

    def _is_map_complete(self, entry_log: EntryLogMetadata) -> bool:
        """Return whether the ledgers map of a log has every ledger in it that is left; else use the log's records."""
        named = {*entry_log.ledgers, *entry_log.unindexed}
        self._logs.read_records(entry_log)
        entry_log.keep(self._indexed)
        self._forget_garbage([entry_log])
        hidden = sorted({*entry_log.ledgers, *entry_log.unindexed} - named)
        if hidden:
            log.error(
                "Entry log %s has entries of ledgers that its damaged ledgers map lacks: %s. The log stays",
                entry_log.path, some_of(hidden, 10),
            )  # fmt: skip
        return not hidden

    # --- logs without ledgers ----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Remove the logs in which no ledger of this bookie is left."""
        self._forget_garbage([entry_log for entry_log in self._logs if not entry_log.ledgers])
        removable = []
        active_bytes = all_bytes = 0
        for entry_log in self._logs:
            if entry_log.ledgers or entry_log.unindexed:
                active_bytes += entry_log.remaining_size_bytes
                all_bytes += entry_log.total_size_bytes
            else:
                removable.append(entry_log)
        self._metadata.check_running()
        if removable:
            self._write_deletions()
        for entry_log in removable:
            self._metadata.check_running()
            self._remove(entry_log)
        self._stats.active_entry_logs = len(self._logs)
        self._stats.active_entry_log_bytes = active_bytes
        self._stats.entry_log_bytes = all_bytes

    def _write_deletions(self) -> None:
        """Bring deletions of ledgers to disk before their logs go: after a crash no index points nowhere.

        Where a full disk prevents that, the logs go all the same, because nothing else would free space. An index that
        a crash brings back is deleted in the next round.
        """
        try:
            self._checkpoint()
        except NoSpaceForCheckpoint as error:
            log.warning("%s; entry logs in which no ledger is left are removed before it", error)

    def _remove(self, entry_log: EntryLogMetadata) -> None:
        try:
            if not self._is_map_complete(entry_log):
                return
            entry_log.logger.remove_log(entry_log.log_id)
        except CompactionStopped:
            raise
        except (BkctlError, OSError) as error:
            self._stats.failed_to_delete += 1
            log.warning("Entry log %s cannot be removed: %s", entry_log.path, error)
            return
        log.info("Removed entry log %s, in which no ledger is left", entry_log.path)
        self._logs.remove(entry_log)
        self._stats.reclaimed_by_deletion_bytes += entry_log.total_size_bytes

    # --- compaction --------------------------------------------------------------------------------------------------

    def compact(self, kind: str, config: BookieConfig) -> None:
        """Compact the logs whose usage is below the threshold, the emptiest first, id space by id space."""
        settings = CompactionSettings.of(config, kind)
        candidates = self._candidates(settings.threshold, config)
        if not candidates:
            return
        stats, compactor, log_count = self._stats, self._compactor, len(self._logs)
        self.compacting, self._compacted_count = kind, 0
        copied = compactor.entry_count
        try:
            # From here on the index knows every entry of these logs: entries that it does not point to are garbage.
            with on_error(compactor.abort):
                self._checkpoint()
                self._compact_logs(candidates, settings.time_max_ms)
                compactor.flush()
        finally:
            stats.compacted_entries += compactor.entry_count - copied
            stats.compact_ratio = self._compacted_count / log_count
            self.compacting = ""
            if self._compacted_count:
                log.info("Compacted %d of %d entry logs (%s)", self._compacted_count, log_count, kind)

    def _candidates(self, threshold: float, config: BookieConfig) -> list[EntryLogMetadata]:
        """Return the logs to compact, in order, and count all logs by usage."""
        size_min = config.log_size_limit if config.use_target_entry_log_size_for_gc else 0
        buckets = [0] * USAGE_BUCKETS
        found: list[tuple[int, float, EntryLogMetadata]] = []
        loggers = list(self._storage.entry_loggers)
        for entry_log in self._logs:
            usage = entry_log.usage(size_min)
            buckets[min(int(usage * USAGE_BUCKETS), USAGE_BUCKETS - 1)] += 1
            if usage < threshold:
                found.append((loggers.index(entry_log.logger), usage, entry_log))
        self._stats.usage_buckets = buckets
        self._stats.compact_ratio = 0.0
        candidates = [entry_log for _, _, entry_log in sorted(found, key=lambda candidate: candidate[:2])]
        # Compaction copies indexed entries only, so a log with unindexed ledgers that may be alive has to stay.
        self._forget_garbage(candidates)
        return [entry_log for entry_log in candidates if not entry_log.unindexed]

    def _compact_logs(self, logs: list[EntryLogMetadata], time_max_ms: int) -> None:
        began_ms = self._clock_ms()
        for entry_log in logs:
            if 0 < time_max_ms <= self._clock_ms() - began_ms:
                break
            try:
                if self._is_map_complete(entry_log):
                    self._compactor.compact(entry_log)
            except CompactionStopped:
                raise
            except UnreadableEntryLog as error:
                self._logs.leave_out(entry_log.path)
                _log_damage(entry_log.path, error)
                self._stats.note_problem(str(error))
            except BkctlError as error:
                self._stats.note_problem(str(error))
                log.warning("Entry log %s is not compacted in this round: %s", entry_log.path, error)

    def _remove_compacted(self, source: EntryLogMetadata) -> None:
        self._logs.remove(source)
        self._compacted_count += 1
        self._stats.reclaimed_by_compaction_bytes += source.total_size_bytes - source.remaining_size_bytes


def _log_damage(path: Path, error: BkctlError) -> None:
    log.warning("Entry log %s is left as it is, for it cannot be read to its end: %s", path, error)
