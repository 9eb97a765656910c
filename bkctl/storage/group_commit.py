"""Group commit: one journal's way from records in memory to records on disk.

The event loop fills the journal's batch, and queues it; the journal's thread writes and syncs the batches that wait as
one group; the event loop settles each of them. Source: Journal (QueueEntry, ForceWriteRequest, its thread).
"""

from __future__ import annotations

import functools
import logging
import math
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.config import BookieConfig
from bkctl.disk import disk_failure
from bkctl.ids import LedgerId
from bkctl.storage.journal_writer import JournalWriter
from bkctl.storage.ledger.ledger_handle import LedgerHandle

if TYPE_CHECKING:
    import asyncio

log: Final = logging.getLogger("bkctl.bookie")

#: A group that takes longer to write and sync is logged, because clients that wait for it time out.
SLOW_GROUP_S: Final = 5.0
#: A slow journal is logged once in this time.
SLOW_GROUP_LOG_S: Final = 60.0

#: Called with None when a batch is on disk, or with the error that lost it.
Done = Callable[[BaseException | None], None]


class JournalBatch:
    """Records on their way to one journal, and the callers that wait for them.

    `tokens` belong to the callers: one for the entries of each add, `count` entries in all. `calls` get the outcome
    once it is known. `written` get it earlier: once the system has the batch, synced or not.
    """

    __slots__ = ("calls", "count", "epoch", "put_s", "records", "scoped", "size", "tokens", "written")

    def __init__(self, epoch: int = 0) -> None:
        #: Batches of one epoch depend on each other: if one fails, so do those behind it.
        self.epoch = epoch
        self.records: list[bytes] = []
        #: Bytes of the records, and how many of them are entries.
        self.size = 0
        self.count = 0
        #: The time at which the batch was queued for its journal (monotonic clock).
        self.put_s = 0.0
        self.scoped = False
        self.tokens: list[Any] = []
        self.calls: list[Done] = []
        self.written: list[Done] = []

    def append(self, ledger: LedgerId, record: bytes) -> None:
        """Append a record that is not an entry."""
        self.records.append(record)
        self.size += len(record)
        self.scoped = self.scoped or ledger.is_scoped

    def tell_written(self, error: BaseException | None) -> None:
        """Call `written`, once."""
        written, self.written = self.written, []
        for done in written:
            _call(done, error)


def _call(done: Done, error: BaseException | None) -> None:
    """Call `done`, and log its exception: the other callers of the group must still get their outcome."""
    try:
        done(error)
    except Exception:
        log.exception("A caller of the journal failed when its group was settled")


class CommittedGroup(NamedTuple):
    """Batches that were written and synced as one, or failed with `error`; how long the first waited, and all took."""

    batches: list[JournalBatch]
    size: int
    entry_count: int
    waited_s: float
    took_s: float
    error: OSError | None


class CommitListener(typing.Protocol):
    """The receiver of a journal's outcomes, in the event loop."""

    def written(self, batches: list[JournalBatch]) -> None:
        """Hear that the system has these batches, some of whose callers do not wait for the sync."""

    def committed(self, commits: GroupCommit, group: CommittedGroup) -> None:
        """Hear of a group's outcome, and `settle` its batches."""

    def thread_died(self, error: BaseException) -> None:
        """Hear that the journal's thread ended with `error`."""


class GroupCommit:
    """The batches of journal `number` of a bookie; `batch` gathers records now. `handles` are the ledgers in memory.

    Between `start` and `stop` a thread commits what `flush` queues. It closes a group by its size in bytes or entries,
    by the time since its first batch, or, with journalFlushWhenQueueEmpty, when no batch waits. A disk that is slow, or
    hangs, is logged.
    """

    def __init__(
        self, journals: Sequence[JournalWriter], number: int, handles: Mapping[LedgerId, LedgerHandle]
    ) -> None:
        self._journals = journals
        self.number = number
        self._handles = handles
        self.batch = JournalBatch()
        self._failed_epoch = -1
        #: Entries queued and not reported yet.
        self.waiting = 0
        self._waiting_max = sys.maxsize
        self._thread: threading.Thread | None = None
        #: Start of the group that is being written (monotonic clock); None between groups.
        self._began_s: float | None = None
        self._logged_s = -math.inf

    @property
    def journal(self) -> JournalWriter:
        """The journal's files, once the storage is open."""
        return self._journals[self.number]

    # --- gather, commit, settle --------------------------------------------------------------------------------------

    def take_batch(self) -> JournalBatch | None:
        """Return the gathered batch, for `commit` and then `settle`; None for an empty one."""
        batch = self.batch
        if not batch.tokens and not batch.calls and not batch.size:
            return None  # callers in `written` wait for an entry, which has a token
        self.batch = JournalBatch(batch.epoch)
        return batch

    def commit(self, batch: JournalBatch, *more: JournalBatch, written: Callable[[], object] | None = None) -> None:
        """Write batches as one group, in the order of `take_batch`; return once they are on disk.

        Calls `written` before the sync. Raises OSError: the batches fail, and so do all taken before `settle`.
        """
        # Grouped behind a batch that fails, one of a later epoch fails too, and so do those that depend on it.
        last_epoch = max(batch.epoch, *(other.epoch for other in more)) if more else batch.epoch
        if batch.epoch <= self._failed_epoch:
            self._failed_epoch = last_epoch
            raise OSError(f"An earlier group of journal {self.journal.directory} failed")
        records, size, scoped = batch.records, batch.size, batch.scoped
        for other in more:
            records += other.records
            size += other.size
            scoped = scoped or other.scoped
        try:
            self.journal.commit(records, size, scoped=scoped, written=written)
        except Exception:
            self._failed_epoch = last_epoch
            raise

    def settle(self, batch: JournalBatch, error: OSError | None) -> JournalBatch | None:
        """Report the outcome of `commit` to the batch's `calls`; the caller reports it to the `tokens`.

        After a failure the batch gathered meanwhile fails too, since its records depend on the lost ones (a ledger
        key): its calls get the error, and it is returned for its tokens.
        """
        doomed = None
        if error is not None and batch.epoch == self.batch.epoch:
            doomed = self.batch
            self.batch = JournalBatch(batch.epoch + 1)
            for handle in self._handles.values():
                if handle.journal == self.number:
                    handle.key_recorded = False
                    handle.fence_recorded = False
        for settled in (batch,) if doomed is None else (batch, doomed):
            settled.tell_written(error)
            for done in settled.calls:
                _call(done, error)
        return doomed

    # --- the thread --------------------------------------------------------------------------------------------------

    def start(self, config: BookieConfig, listener: CommitListener, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread, which reports to `listener` in `loop`."""
        self._listener = listener
        self._loop = loop
        self._size_enough = config.journal_buffered_writes_threshold
        self._count_enough = config.journal_buffered_entries_threshold or sys.maxsize
        waits = not config.journal_flush_when_queue_empty
        self._wait_s = config.journal_max_group_wait_msec / 1000 if waits else 0.0
        self._waiting_max = config.journal_queue_size
        self._queue: Queue[JournalBatch | None] = Queue()  # SimpleQueue.get(timeout) of CPython 3.11 and 3.12 may hang
        self._thread = threading.Thread(target=self._run, name=f"journal-{self.number}", daemon=True)
        self._thread.start()
        self._look()

    def stop(self) -> None:
        """Return when everything queued is on disk, or failed; in another thread than the event loop's."""
        if self._thread is not None:
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
        batch = self.take_batch()
        if batch is not None:
            self.waiting += batch.count
            batch.put_s = time.monotonic()
            self._queue.put(batch)

    def _run(self) -> None:
        try:
            while self._write_next():
                pass
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._listener.thread_died, error)
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
        self._write_group(batches, size, count)
        return batch is not None

    def _write_group(self, batches: list[JournalBatch], size: int, count: int) -> None:
        error = None
        began_s = self._began_s = time.monotonic()
        try:
            self.commit(*batches, written=self._written(batches))
        except Exception as failure:  # noqa: BLE001 - reported: the adds of the group are answered
            error = disk_failure(failure)
        took_s = time.monotonic() - began_s
        self._began_s = None
        if took_s > SLOW_GROUP_S:
            self._log_slow("took", took_s)
        group = CommittedGroup(batches, size, count, began_s - batches[0].put_s, took_s, error)
        self._loop.call_soon_threadsafe(self._report, group)

    def _written(self, batches: list[JournalBatch]) -> Callable[[], object] | None:
        """Return the report between writing and syncing; None unless an add of the group waits for it."""
        if not any(batch.written for batch in batches):
            return None
        return functools.partial(self._loop.call_soon_threadsafe, self._listener.written, batches)

    def _report(self, group: CommittedGroup) -> None:
        self.waiting -= group.entry_count
        self._listener.committed(self, group)

    def _look(self) -> None:
        """Log a group that the disk does not finish, now and again until the thread ends; in the loop."""
        began_s = self._began_s
        if began_s is not None and (passed_s := time.monotonic() - began_s) > SLOW_GROUP_S:
            self._log_slow("is not done after", passed_s)
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_later(SLOW_GROUP_S, self._look)

    def _log_slow(self, outcome: str, seconds: float) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= SLOW_GROUP_LOG_S:
            self._logged_s = now_s
            log.warning(
                "A write and sync of journal %s %s %.1f s: adds wait for it, and clients may time out. Check its disk "
                "for errors and for other load", self.journal.directory, outcome, seconds,
            )  # fmt: skip
