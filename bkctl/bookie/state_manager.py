"""The state that the parts of a bookie share: its settings, mode (writable or read-only), failure, and end.

Source: BookieStateManager, BookieStatus.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, ReadOnlyBookie, UsageError
from bkctl.formats.names import STATUS_NAME
from bkctl.formats.status import BookieMode, BookieStatus
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.tasks import drop_error

log: Final = logging.getLogger("bkctl.bookie")


class BookieStateManager:
    """Decides whether a bookie takes writes, and keeps that over restarts with persistBookieStatusEnabled.

    Other parts report what they see (`lacks_space`, `disks_full`) and call `update`, or `fail` when the bookie has to
    give up: `on_failure` is then called once. Only the event loop's thread changes the state.
    """

    def __init__(
        self, config: BookieConfig, files: Files, storage: BookieStorage, on_failure: Callable[[], None]
    ) -> None:
        self.config = config
        self.bookie_id = ""
        self.read_only = config.force_read_only_bookie
        self.failure: BkctlError | None = None
        #: Set by a stop that closes ledger storage: requests that wait are refused from then on.
        self.is_stopping = False
        #: A journal or ledger storage could not grow.
        self.lacks_space = False
        #: The usage of the disks is above the threshold.
        self.disks_full = False
        #: The disks have room for the adds of recoveries.
        self.has_room_for_recovery = True
        self._files = files
        self._storage = storage
        self._on_failure = on_failure
        self._is_manual = False
        self._status = BookieStatus(BookieMode.READ_WRITE, -1, False)

    @property
    def takes_high_priority_writes(self) -> bool:
        """True if a read-only bookie takes the adds of recoveries."""
        return self.has_room_for_recovery and not self.lacks_space

    def refuse_writes(self) -> ReadOnlyBookie:
        """Return the error that answers a write to a read-only bookie."""
        return ReadOnlyBookie(f"Bookie {self.bookie_id} is read-only")

    def fail(self, failure: BkctlError) -> None:
        """Give up for `failure`, unless the bookie did so before.

        Acknowledged entries are in the journal; only the next start can bring journal and ledger storage together.
        """
        if self.failure is None:
            log.error("%s", failure)
            self.failure = failure
            self.read_only = True
            self._on_failure()

    def thread_died(self, error: BaseException) -> None:
        """Give up, because requests would wait for ever for a thread that ended with `error`; in the event loop."""
        self.fail(BkctlError(f"A thread of bookie {self.bookie_id} died: {error!r}"))

    def set_manual(self, read_only: bool) -> None:
        """Set the mode that an operator asks for. Raises UsageError when the configuration forbids it."""
        if read_only and not self.config.read_only_mode_enabled:
            raise UsageError(f"Bookie {self.bookie_id} cannot become read-only: readOnlyModeEnabled is false")
        if not read_only and self.config.force_read_only_bookie:
            raise UsageError(f"Bookie {self.bookie_id} cannot become writable: forceReadOnlyBookie is true")
        self._is_manual = read_only
        self.update()

    def update(self) -> None:
        """Become read-only or writable, as settings, operator, disks and failure demand."""
        wanted = (
            self.config.force_read_only_bookie
            or self._is_manual
            or self._storage.ledgers.needs_integrity_check
            or self.disks_full
            or self.lacks_space
            or self.failure is not None
        )
        if wanted != self.read_only:
            log.info("Bookie %s is %s now", self.bookie_id, "read-only" if wanted else "writable")
            self.read_only = wanted
        if self._is_persistent:
            mode = BookieMode.READ_ONLY if wanted else BookieMode.READ_WRITE
            if (mode, self._is_manual) != (self._status.mode, bool(self._status.manual)):
                self._status = BookieStatus(mode, time.time_ns() // 1_000_000, self._is_manual)
                self._write_status()

    @property
    def _is_persistent(self) -> bool:
        return self.config.persist_bookie_status_enabled and not self.config.force_read_only_bookie

    def restore(self) -> None:
        """Read the latest BOOKIE_STATUS of an earlier run. Source: BookieStatus.readFromDirectories."""
        if not self._is_persistent:
            return
        for directory in self._storage.ledger_directories:
            path = directory / STATUS_NAME
            try:
                status = BookieStatus.parse(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except (OSError, BkctlError) as error:
                log.warning("The bookie's mode cannot be read: %s", error)
                continue
            if status.updated_ms > self._status.updated_ms:
                self._status = status
        self._is_manual = self._status.mode is BookieMode.READ_ONLY and self._status.manual is not False

    def _write_status(self) -> None:
        """Write BOOKIE_STATUS to every directory that takes it. Source: BookieStatus.writeToDirectories."""
        for directory in self._storage.ledger_directories:
            try:
                self._files.replace(directory / STATUS_NAME, self._status.serialize())
            except OSError as error:
                log.warning("The bookie's mode cannot be kept in %s: %s", directory, error)


class StopDeadline:
    """Runs the blocking steps of a stop in threads, until `by_s` (of time.monotonic) at most."""

    def __init__(self, state: BookieStateManager) -> None:
        self._state = state
        self.by_s = float("inf")
        #: A step hung: its thread is left behind, and the process has to end without it.
        self.is_stuck = False

    @property
    def remaining_s(self) -> float:
        """The seconds until the deadline; negative after it."""
        return self.by_s - time.monotonic()

    def shorten(self, seconds: float) -> None:
        """End the stop within `seconds` from now, or earlier."""
        self.by_s = min(self.by_s, time.monotonic() + seconds)

    async def run(self, name: str, step: Callable[[], object]) -> bool:
        """Run `step` in a thread; return True when it is done, False when it hangs past the deadline.

        Raises what `step` raises. The thread of a hung step stays: no thread can end another that a disk holds.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        drop_error(done)

        def run() -> None:
            end = functools.partial(done.set_result, None)
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised by the future
                end = functools.partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the deadline is over
                loop.call_soon_threadsafe(end)

        threading.Thread(target=run, name=f"stop-{name}", daemon=True).start()
        await asyncio.wait([done], timeout=max(1.0, self.remaining_s))
        if done.done():
            done.result()
            return True
        self.is_stuck = True
        log.error("Bookie %s stops without %s, which hangs", self._state.bookie_id, name)
        return False
