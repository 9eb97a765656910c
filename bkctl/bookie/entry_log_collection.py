"""Collection of entry logs: those without a ledger of the bookie are removed, those with much garbage are compacted.

A ledger that is not in the index may still be alive, because the index may be lost: see UnindexedLedgers.
Source: GarbageCollectorThread.doGcEntryLogs, doCompactEntryLogs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bkctl.bookie.checkpoints import NoSpaceForCheckpoint
from bkctl.bookie.collector_metadata import CollectorMetadata, UnindexedLedgers
from bkctl.bookie.collector_stats import USAGE_BUCKETS
from bkctl.bookie.compaction_schedule import CompactionSettings
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError
from bkctl.storage.compaction import CompactionStopped, EntryLogCompactor, Throttler, UnreadableEntryLog
from bkctl.storage.entry_log_metadata import EntryLogMetadata, EntryLogMetadataMap, SortedLedgers
from bkctl.storage.ledger.ledger_storage import LedgerStorage

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
            throttler=Throttler(config, metadata.stopped),
            removed=self._remove_compacted,
        )
        self._compacted_count = 0
        #: The kind of compaction under way, or "".
        self.compacting = ""

    def find_ledgers(self) -> None:
        """Find out which ledgers have entries in which log, and which of those the index knows."""
        self._logs.extract(_log_damage)
        # Listed after the logs: every ledger with entries in one of them is here, unless it was deleted.
        indexed = SortedLedgers(self._storage.ledger_ids())
        for entry_log in self._logs:
            entry_log.keep(indexed)

    def _forget_garbage(self, logs: Sequence[EntryLogMetadata]) -> None:
        """Drop the garbage from the unindexed ledgers of these logs; ledgers that may be alive stay `unindexed`."""
        garbage = self._unindexed.garbage_of({ledger for entry_log in logs for ledger in entry_log.unindexed})
        for entry_log in logs:
            entry_log.forget(garbage)

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
            entry_log.logger.remove_log(entry_log.log_id)
        except OSError as error:
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
            self._checkpoint()
            self._compact_logs(candidates, settings.time_max_ms)
            compactor.flush()
        except BaseException:
            compactor.abort()
            raise
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
