"""Group commit: the adds of a turn of the event loop on their way to the disks, and their answers on the way back.

The loop fills the batch of each journal (`JournalCommits`), and queues it at the end of its turn; the journal's thread
writes and syncs the batches that wait as one group; the loop answers each of them. Sealed entries go to the thread of
entry logs, due checkpoints begin, and adds wait while the disks are behind. Source: Journal (QueueEntry,
ForceWriteRequest, its thread), SyncThread, SortedLedgerStorage (whose memory table holds adds back).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Iterable
from queue import Empty, Queue
from typing import Final

from bkctl.bookie.checkpoints import CheckpointRunner, Worker
from bkctl.bookie.disk_space import DiskSpaceMonitor
from bkctl.bookie.metrics import BookieMetrics, JournalMetrics
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, disk_failure
from bkctl.errors import BkctlError, TooManyRequests
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.journal_writer import Done, JournalBatch, JournalCommits, JournalWriter

log: Final = logging.getLogger("bkctl.bookie")

#: A group that takes longer to write and sync is logged, because clients that wait for it time out.
SLOW_GROUP_S: Final = 5.0
#: A slow journal is logged once in this time.
SLOW_GROUP_LOG_S: Final = 60.0


class JournalThread:
    """The thread of one journal, from its creation in the event loop to `stop`: commits what `flush` queues.

    The thread closes a group by its size in bytes or entries, by the time since its first batch, or, with
    journalFlushWhenQueueEmpty, when no batch waits. A disk that is slow, or hangs, is logged.
    """

    def __init__(self, owner: GroupCommit, commits: JournalCommits, config: BookieConfig) -> None:
        self._owner = owner
        self.commits = commits
        self.metrics = JournalMetrics()
        self._loop = asyncio.get_running_loop()
        self._size_enough = config.journal_buffered_writes_threshold
        self._count_enough = config.journal_buffered_entries_threshold or sys.maxsize
        self._wait_s = 0.0 if config.journal_flush_when_queue_empty else config.journal_max_group_wait_msec / 1000
        #: Entries queued and not settled yet.
        self.waiting = 0
        self._waiting_max = config.journal_queue_size
        #: Start of the group that is being written (monotonic clock); None between groups.
        self._began_s: float | None = None
        self._logged_s = -math.inf
        self._queue: Queue[JournalBatch | None] = Queue()  # SimpleQueue.get(timeout) of CPython 3.11 and 3.12 may hang
        self._thread = threading.Thread(target=self._run, name=f"journal-{commits.number}", daemon=True)
        self._thread.start()
        self._look()

    def stop(self) -> None:
        """Return when everything queued is on disk, or failed; in another thread than the event loop's."""
        self._queue.put(None)
        self._thread.join()

    @property
    def is_full(self) -> bool:
        """True if journalQueueSize entries wait or more."""
        return self.waiting >= self._waiting_max

    @property
    def is_writing(self) -> bool:
        """True while a group is written and synced."""
        return self._began_s is not None

    def flush(self) -> None:
        """Queue the gathered batch for the thread."""
        batch = self.commits.take_batch()
        if batch is not None:
            self.waiting += batch.count
            batch.put_s = time.monotonic()
            self._queue.put(batch)

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._owner.thread_died, error)
            raise

    def _write_next(self) -> bool:
        """Write the next group, and keep nothing of it; return False behind the last one."""
        get = self._queue.get
        batch = get()
        if batch is None:
            return False
        batches = [batch]
        size, count = batch.size, batch.count
        deadline = time.monotonic() + self._wait_s
        while size <= self._size_enough and count <= self._count_enough:
            try:
                remaining = deadline - time.monotonic()
                batch = get(timeout=remaining) if remaining > 0 else self._queue.get_nowait()
            except Empty:
                break
            if batch is None:
                break
            batches.append(batch)
            size += batch.size
            count += batch.count
        self._write_group(batches)
        return batch is not None

    def _write_group(self, batches: list[JournalBatch]) -> None:
        owner, error = self._owner, None
        report = self._loop.call_soon_threadsafe
        # Adds may wait for no sync.
        written = (lambda: report(owner.written, batches)) if any(batch.written for batch in batches) else None
        began_s = self._began_s = time.monotonic()
        try:
            self.commits.commit(*batches, written=written)
        except Exception as failure:  # noqa: BLE001 - reported: the adds of the group are answered
            error = disk_failure(failure)
        took_s = time.monotonic() - began_s
        self._began_s = None
        if took_s > SLOW_GROUP_S:
            self._log_slow("took", took_s)
        report(owner.committed, self, batches, began_s, took_s, error)

    def _look(self) -> None:
        """Log a group that the disk does not finish, now and again until the thread ends; in the loop."""
        began_s = self._began_s
        if began_s is not None and (passed_s := time.monotonic() - began_s) > SLOW_GROUP_S:
            self._log_slow("is not done after", passed_s)
        if self._thread.is_alive():
            self._loop.call_later(SLOW_GROUP_S, self._look)

    def _log_slow(self, outcome: str, seconds: float) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= SLOW_GROUP_LOG_S:
            self._logged_s = now_s
            log.warning(
                "A write and sync of journal %s %s %.1f s: adds wait for it, and clients may time out. Check its disk "
                "for errors and for other load", self.commits.journal.directory, outcome, seconds,
            )  # fmt: skip


class GroupCommit:
    """The group commits of one bookie: its journals' threads, between `start` and `stop`, and the turns of its loop.

    Everything but the threads happens in the event loop.
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
        #: From `start` on.
        self.journals: list[JournalThread] = []
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
        self.journals = [JournalThread(self, commits, self._state.config) for commits in self._storage.commits]
        self.is_running = True
        self._entries = Worker("entries", self._state.thread_died)
        self.checkpoints.start()

    def stop(self) -> None:
        """Return when everything handed over is on disk, or failed; in another thread than the event loop's."""
        self.is_running = False
        for journal in self.journals:
            journal.stop()
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
        for journal in self.journals if self.is_running else ():
            if journal.is_full and not state.is_stopping:
                self._waits_for_journals = True
            else:
                journal.flush()
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
    def pending_adds(self) -> int:
        """The adds that no journal's queue has yet."""
        return sum(commits.batch.count for commits in self._storage.commits)

    def adds_at_once(self) -> int:
        """Return how many adds may come in one run; 1 or more. Those that wait for the disks have a bound."""
        if self.is_behind:
            return max(1, self._pending_adds_max - self.pending_adds)
        return sys.maxsize

    def check_pending(self) -> None:
        """Raise TooManyRequests when as many adds wait as maxPendingAddRequestsPerThread allows."""
        if self.pending_adds >= self._pending_adds_max:
            raise TooManyRequests(
                f"Bookie {self._state.bookie_id} cannot write as fast as clients add: its disks are behind"
            )

    # --- from the threads to the loop ---------------------------------------------------------------------------------

    def written(self, batches: list[JournalBatch]) -> None:
        """Answer the adds of a group that wait for no sync (deferred sync): the system has the batches."""
        for batch in batches:
            written, batch.written = batch.written, []
            self._answer(written, None)

    def committed(
        self, journal: JournalThread, batches: list[JournalBatch], began_s: float, took_s: float, error: OSError | None
    ) -> None:
        """Answer a group of `journal`: it is on disk, or failed with `error`."""
        now_s = time.monotonic()
        journal.waiting -= sum(batch.count for batch in batches)
        journal.metrics.group_settled(batches, began_s, took_s, now_s, ok=error is None)
        for batch in batches:
            self._metrics.adds_settled(batch.count, batch.size, now_s - batch.put_s, ok=error is None)
            self._answer(journal.commits.settle(batch, error), error)
        if error is not None:
            self._journal_failed(journal.commits.journal, error)
        if self._waits_for_journals:
            self.flush_soon()

    def _answer(self, calls: Iterable[Done], error: OSError | None) -> None:
        """Call all of `calls`; one that fails is logged, and the next ones are called all the same."""
        for call in calls:
            try:
                call(error)
            except Exception as fault:  # noqa: BLE001 - logged and counted
                self._metrics.note_unexpected("An answer", fault)

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
