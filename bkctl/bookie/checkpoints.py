"""Checkpoints: a thread of their own brings what is in the journals into ledger storage. Source: SyncThread."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

from bkctl.bookie.disk_space import DiskSpaceMonitor
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.disk import disk_failure
from bkctl.errors import BkctlError
from bkctl.storage.bookie_storage import BookieStorage, Checkpoint

log: Final = logging.getLogger("bkctl.bookie")


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


class NoSpaceForCheckpoint(BkctlError):
    """A checkpoint failed for want of space; its entries stay in memory and in the journal."""


@dataclass(eq=False)
class CheckpointRunner:
    """Runs one checkpoint at a time, between `start` and `stop`.

    `_failed` is called with the error of one that could not be written, `_ended` after each; both in the event loop.
    """

    _storage: BookieStorage
    _state: BookieStateManager
    _metrics: BookieMetrics
    _space: DiskSpaceMonitor
    _failed: Callable[[OSError], None]
    _ended: Callable[[], None]
    _worker: Worker | None = None
    #: True once the checkpoint under way is written, False if it failed or the bookie gave up.
    _running: asyncio.Future[bool] | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._worker = Worker("checkpoints", self._state.thread_died)

    def stop(self) -> None:
        """Return when the checkpoint under way is written, in another thread than the event loop's."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    @property
    def is_running(self) -> bool:
        """True if a checkpoint is under way."""
        return self._running is not None

    def abandon(self) -> None:
        """Let nothing wait for the checkpoint under way: the bookie gave up."""
        if self._running is not None and not self._running.done():
            self._running.set_result(False)

    async def run(self) -> None:
        """Bring everything that is in the journals into ledger storage, and wait for that."""
        if self._running is None:
            self.begin()
        await self.wait()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint under way ends, the bookie gives up, or `timeout_s` pass; True if it is written."""
        running = self._running
        if running is None:
            return True
        await asyncio.wait([running], timeout=timeout_s)
        return running.done() and running.result()

    def run_from_thread(self) -> None:
        """Return once a checkpoint that began after this call is on disk; for other threads than the event loop's.

        Raises NoSpaceForCheckpoint, and the error that made the bookie give up.
        """
        asyncio.run_coroutine_threadsafe(self._run_another(), self._loop).result()

    async def _run_another(self) -> None:
        await self.wait()
        if self._running is None:
            self.begin()
        is_written = await self.wait()
        if self._state.failure is not None:
            raise self._state.failure
        if not is_written:
            raise NoSpaceForCheckpoint(f"Bookie {self._state.bookie_id} has no space for a checkpoint")

    async def run_regularly(self) -> None:
        """Run a checkpoint every flushInterval."""
        while True:
            await asyncio.sleep(self._state.config.flush_interval / 1000)
            await self.run()

    def begin(self) -> None:
        """Begin a checkpoint where something changed; none may be under way."""
        if self._worker is None or self._state.failure is not None:
            return
        try:
            checkpoint = self._storage.checkpoints.begin()
        except Exception as error:  # noqa: BLE001 - the bookie gives up, or has no space
            self._failed(disk_failure(error))
            return
        if checkpoint is None:
            self._space.look_for_space()
            return
        running: asyncio.Future[bool] = self._loop.create_future()
        self._running = running
        began_s = time.monotonic()

        def write() -> None:
            error = None
            try:
                self._storage.checkpoints.write(checkpoint)
            except Exception as failure:  # noqa: BLE001 - the bookie gives up, or has no space
                error = disk_failure(failure)
            self._loop.call_soon_threadsafe(self._end, checkpoint, running, began_s, error)

        self._worker.submit(write)

    def _end(
        self, checkpoint: Checkpoint, running: asyncio.Future[bool], began_s: float, error: OSError | None
    ) -> None:
        self._metrics.flush.observe(time.monotonic() - began_s, ok=error is None)
        self._running = None
        try:
            self._storage.checkpoints.end(checkpoint, written=error is None)
            if error is not None:
                self._failed(error)
            else:
                self._space.look_for_space()
            self._ended()
        except Exception as failure:  # noqa: BLE001 - logged and counted
            self._metrics.note_unexpected("The end of a checkpoint", failure)
            self._state.fail(BkctlError(f"Bookie {self._state.bookie_id} cannot end a checkpoint: {failure!r}"))
        if not running.done():
            running.set_result(error is None and self._state.failure is None)
