"""The beginning of journal groups, entry-log writes and checkpoints, and adds that wait while the disks are behind.

Source: Journal, SyncThread, SortedLedgerStorage (whose memory table holds adds back while the disk is behind).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final

from bkctl.bookie.checkpoints import CheckpointRunner, Worker
from bkctl.bookie.disk_space import DiskSpaceMonitor
from bkctl.bookie.metrics import BookieMetrics, JournalMetrics
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.disk import NO_SPACE, disk_failure
from bkctl.errors import BkctlError, TooManyRequests
from bkctl.protocol.messages import Status
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.group_commit import CommittedGroup, GroupCommit, JournalBatch
from bkctl.storage.journal_writer import JournalWriter

log: Final = logging.getLogger("bkctl.bookie")


class CommitDispatcher:
    """Flushes the journals, hands sealed entries to the thread of entry logs, and begins due checkpoints.

    The threads run between `start` and `stop`; all else happens in the event loop.
    """

    def __init__(
        self, storage: BookieStorage, state: BookieStateManager, metrics: BookieMetrics, space: DiskSpaceMonitor
    ) -> None:
        self._storage = storage
        self._state = state
        self._metrics = metrics
        self._space = space
        self.thread_died = state.thread_died
        self.checkpoints = CheckpointRunner(storage, state, metrics, space, self.storage_failed, self._resume)
        self.is_running = False
        self._entries: Worker | None = None
        self._flush_due = False
        #: Ledger storage holds as much in memory as it may: adds wait until entries are written.
        self._waits_for_entries = False
        #: A journal's queue is full.
        self._waits_for_journals = False
        #: The disks are behind, for one of these reasons.
        self.is_behind = False
        config = state.config
        self._pending_adds_max = (
            config.num_add_worker_threads * config.max_pending_add_requests_per_thread or sys.maxsize
        )

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._metrics.journals = [JournalMetrics() for _ in self._storage.commits]
        for commits in self._storage.commits:
            commits.start(self._state.config, self, self._loop)
        self.is_running = True
        self._entries = Worker("entries", self._state.thread_died)
        self.checkpoints.start()

    def stop(self) -> None:
        """Return when everything handed over is on disk, or failed; in another thread than the event loop's."""
        self.is_running = False
        for commits in self._storage.commits:
            commits.stop()
        if self._entries is not None:
            self._entries.stop()
            self._entries = None
        self.checkpoints.stop()

    # --- from the loop to the threads --------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Run `flush` at the end of this turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand the adds of this turn of the loop to the journals' threads."""
        self._flush_due = False
        storage, state = self._storage, self._state
        ledgers = storage.ledgers
        is_full = ledgers.unwritten_bytes > ledgers.unwritten_bytes_max
        if is_full and not (state.is_stopping or state.lacks_space or state.failure):
            self._hold_back()
            return
        self._waits_for_journals = False
        for commits in storage.commits if self.is_running else ():
            if commits.is_full and not state.is_stopping:
                self._waits_for_journals = True
            else:
                commits.flush()
        self.is_behind = self._waits_for_entries or self._waits_for_journals
        if storage.seal_entries():
            self.write_entries_soon()
        if ledgers.is_flush_due and not self.checkpoints.is_running:
            self.checkpoints.begin()

    def _hold_back(self) -> None:
        """Keep unacknowledged adds, and with them their connections, waiting until entries are written.

        The writes under way may end before they see that, so one more is begun.
        """
        if self._waits_for_entries or self._entries is None:
            return
        self._waits_for_entries = self.is_behind = True
        if self._storage.ledgers.writes_ahead:
            self._storage.seal_entries(1)
            self.write_entries_soon()
        elif not self.checkpoints.is_running:
            self.checkpoints.begin()

    def write_entries_soon(self) -> None:
        """Have the thread of entry logs write what is sealed."""
        if self._entries is not None:
            self._entries.submit(self._write_entries)

    def _write_entries(self) -> None:
        try:
            self._storage.write_entries()
        except Exception as error:  # noqa: BLE001 - the bookie gives up, or has no space
            self._loop.call_soon_threadsafe(self.storage_failed, disk_failure(error))
        if self._waits_for_entries:
            self._loop.call_soon_threadsafe(self._resume)

    def _resume(self) -> None:
        if self._waits_for_entries:
            self._waits_for_entries = False
            self.is_behind = self._waits_for_journals
            self.flush_soon()

    # --- adds that wait while the disks are behind -------------------------------------------------------------------

    @property
    def _pending_adds(self) -> int:
        return sum(commits.batch.count for commits in self._storage.commits)

    def adds_at_once(self) -> int:
        """Return how many adds may come in one run; 1 or more. Those that wait for the disks have a bound."""
        if self.is_behind:
            return max(1, self._pending_adds_max - self._pending_adds)
        return sys.maxsize

    def check_pending(self) -> None:
        """Raise TooManyRequests when as many adds wait as maxPendingAddRequestsPerThread allows."""
        if self._pending_adds >= self._pending_adds_max:
            raise TooManyRequests(
                f"Bookie {self._state.bookie_id} cannot write as fast as clients add: its disks are behind"
            )

    # --- from the threads to the loop ---------------------------------------------------------------------------------

    def written(self, batches: list[JournalBatch]) -> None:
        """Answer the adds of a group that wait for no sync (deferred sync)."""
        for batch in batches:
            batch.tell_written(None)

    def committed(self, commits: GroupCommit, group: CommittedGroup) -> None:
        """Answer a journal's group: it is on disk, or failed."""
        now_s, error = time.monotonic(), group.error
        self._metrics.journals[commits.number].group_settled(group, now_s)
        for batch in group.batches:
            self._metrics.adds_settled(batch.count, batch.size, now_s - batch.put_s, ok=error is None)
            doomed = commits.settle(batch, error)
            self._answer(batch.tokens, Status.EOK if error is None else Status.EIO)
            if doomed is not None:
                self._answer(doomed.tokens, Status.EIO)
        if error is not None:
            self._journal_failed(commits.journal, error)
        if self._waits_for_journals:
            self.flush_soon()

    def _answer(self, answers: Iterable[Callable[[Status], object] | None], status: Status) -> None:
        """Call every answer with `status`; one that fails is logged, and the next ones are called all the same."""
        for answer in answers:
            if answer is not None:
                try:
                    answer(status)
                except Exception as error:  # noqa: BLE001 - logged and counted
                    self._metrics.note_unexpected("An answer", error)

    def _journal_failed(self, journal: JournalWriter, error: OSError) -> None:
        if journal.failed is not None:
            self._state.fail(BkctlError(f"Journal {journal.directory} failed: {journal.failed}"))
        elif error.errno in NO_SPACE:
            self._space.run_out(f"Journal {journal.directory} cannot grow ({error.strerror})")
        else:
            log.warning("Journal %s: %s", journal.directory, error)

    def storage_failed(self, error: OSError) -> None:
        """Wait for space, or give up, after ledger storage could not be written."""
        if error.errno in NO_SPACE:
            self._space.run_out(f"Ledger storage cannot grow ({error})")
        else:
            self._state.fail(BkctlError(f"Ledger storage of bookie {self._state.bookie_id} failed: {error}"))
