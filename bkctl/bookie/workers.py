"""A bookie's threads beside its event loop: one a journal, which writes groups of adds, and others that run tasks.

Source: Journal (its thread and ForceWriteThread), SyncThread.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, Queue, SimpleQueue
from typing import Final, Protocol

from bkctl.bookie.metrics import JournalMetrics
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.group_commit import JournalBatch

log: Final = logging.getLogger("bkctl.bookie")

#: A group that takes longer to write and sync is logged, because clients that wait for it time out.
SLOW_GROUP_S: Final = 5.0
#: A slow journal is logged once in this time.
SLOW_GROUP_LOG_S: Final = 60.0


def disk_failure(error: Exception) -> OSError:
    """Return `error` as the OSError that a failed write is reported as; log one that neither disk nor format raises."""
    if isinstance(error, OSError):
        return error
    if isinstance(error, BkctlError):
        return OSError(errno.EIO, str(error))
    log.error("A write failed with an unexpected error", exc_info=error)
    return OSError(errno.EIO, repr(error))


class Worker:
    """One thread that runs tasks in order.

    For a task that raises, `died` is called in the event loop. An Exception does not end the thread.
    """

    def __init__(self, name: str, died: Callable[[BaseException], None]) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._died = died
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` behind the tasks that were submitted before."""
        self._queue.put(task)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except BaseException as error:
                self._loop.call_soon_threadsafe(self._died, error)
                if not isinstance(error, Exception):
                    raise
                log.exception("A task of the thread %s failed", self._thread.name)

    def stop(self) -> None:
        """Return when everything submitted is done."""
        self._queue.put(None)
        self._thread.join()


class GroupListener(Protocol):
    """Hears of the groups of a journal's thread, in the event loop. All adds in a group are answered together."""

    def written(self, group: list[JournalBatch]) -> None: ...
    def committed(self, number: int, group: list[JournalBatch], error: OSError | None) -> None: ...
    def thread_died(self, error: BaseException) -> None: ...


class JournalThread:
    """Writes one journal: takes the batches that are there as one group, and reports them to the loop once on disk.

    A group is closed by its size in bytes or entries, by the time since its first batch, or, with
    journalFlushWhenQueueEmpty, when no batch waits. A disk that is slow, or hangs, is logged. Source: Journal.run.
    """

    def __init__(self, storage: BookieStorage, number: int, config: BookieConfig, listener: GroupListener) -> None:
        self._storage = storage
        self._number = number
        self._listener = listener
        self.metrics = JournalMetrics()
        self._queue: Queue[JournalBatch | None] = Queue()  # SimpleQueue.get(timeout) of CPython 3.11 and 3.12 may hang
        self._loop = asyncio.get_running_loop()
        self._size_enough = config.journal_buffered_writes_threshold
        self._count_enough = config.journal_buffered_entries_threshold or sys.maxsize
        waits = not config.journal_flush_when_queue_empty
        self._wait_s = config.journal_max_group_wait_msec / 1000 if waits else 0.0
        self._count_max = config.journal_queue_size
        self._count = 0
        #: Start of the group that is being written (monotonic clock); None between groups.
        self._began_s: float | None = None
        self._logged_s = -math.inf
        self._thread = threading.Thread(target=self._run, name=f"journal-{number}", daemon=True)
        self._thread.start()
        self._look()

    @property
    def is_full(self) -> bool:
        """True if journalQueueSize entries wait or more; in the loop."""
        return self._count >= self._count_max

    def put(self, batch: JournalBatch) -> None:
        """Queue `batch` for the thread. Called in the event loop."""
        self.metrics.waiting = self._count = self._count + batch.count
        batch.put_s = time.monotonic()
        self._queue.put(batch)

    def taken(self, batch: JournalBatch) -> None:
        """Stop counting `batch` as waiting: its outcome was reported. Called in the event loop."""
        self.metrics.waiting = self._count = self._count - batch.count

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
        group = [batch]
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
            group.append(batch)
            size += batch.size
            count += batch.count
        self._write_group(group, size, count)
        return batch is not None

    def _write_group(self, group: list[JournalBatch], size: int, count: int) -> None:
        error = None
        began = self._began_s = time.monotonic()
        self.metrics.queue.observe(began - group[0].put_s)
        try:
            self._storage.commit(self._number, *group, written=self._written(group))
        except Exception as failure:  # noqa: BLE001 - reported: the adds of the group are answered
            error = disk_failure(failure)
        took_s = time.monotonic() - began
        self._began_s = None
        if took_s > SLOW_GROUP_S:
            self._log_slow("took", took_s)
        self.metrics.group_written(count, size, took_s, ok=error is None)
        self._loop.call_soon_threadsafe(self._listener.committed, self._number, group, error)

    def _written(self, group: list[JournalBatch]) -> Callable[[], object] | None:
        """Return the report between writing and syncing; None unless an add of the group waits for it."""
        if not any(batch.written for batch in group):
            return None
        return functools.partial(self._loop.call_soon_threadsafe, self._listener.written, group)

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
                "for errors and for other load", self._storage.journals[self._number].directory, outcome, seconds,
            )  # fmt: skip

    def stop(self) -> None:
        """Return when everything put is on disk, or failed."""
        self._queue.put(None)
        self._thread.join()
