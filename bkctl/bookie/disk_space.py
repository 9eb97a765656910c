"""The space on a bookie's disks: read-only mode while there is none, and writes again once there is some.

Source: LedgerDirsMonitor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from bkctl.bookie.disk_watch import DiskState, DiskWatch
from bkctl.bookie.registration import RegistrationManager
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError
from bkctl.storage.bookie_storage import BookieStorage

if TYPE_CHECKING:
    from bkctl.bookie.garbage_collector import GarbageCollectorThread

log: Final = logging.getLogger("bkctl.bookie")


class DiskSpaceMonitor:
    """Tells ledger storage, garbage collector and the bookie's state how full the disks are; `start` first."""

    def __init__(
        self, files: Files, storage: BookieStorage, state: BookieStateManager, registration: RegistrationManager
    ) -> None:
        self._files = files
        self._storage = storage
        self._state = state
        self._registration = registration
        self.garbage_collector: GarbageCollectorThread | None = None

    def start(self) -> None:
        """Raise UsageError for thresholds that contradict each other."""
        storage = self._storage
        self._disks = DiskWatch(self._state.config, self._files, storage.ledger_directories, storage.index_directories)

    def use(self, config: BookieConfig) -> None:
        """Take the thresholds of `config` from now on. Raises UsageError, and changes nothing, as `start` does."""
        self._disks.use(config)

    def check(self) -> None:
        """Look at the disks in the calling thread. Raises OSError."""
        self._apply(self._disks.look())

    async def check_in_thread(self) -> None:
        """Look at the disks without holding the event loop. Raises OSError."""
        self._apply(await asyncio.to_thread(self._disks.look))

    def _apply(self, disks: DiskState) -> None:
        state = self._state
        self._storage.set_writable(disks.writable)
        self._storage.set_index_writable(disks.index_writable)
        state.has_room_for_recovery = disks.allows_high_priority
        state.disks_full = disks.full
        if self.garbage_collector is not None:
            self.garbage_collector.disks_are(full=disks.any_full, almost_full=disks.almost_full)
        if disks.full and not state.config.read_only_mode_enabled:
            state.fail(BkctlError(f"The disks of bookie {state.bookie_id} are full, and read-only mode is not enabled"))
        state.update()

    def run_out(self, problem: str) -> None:
        """Refuse writes after one failed for want of space; `problem` says which."""
        state = self._state
        if not state.lacks_space:
            log.warning("%s: bookie %s accepts no entries until there is space", problem, state.bookie_id)
        state.lacks_space = True
        self.check()
        self._registration.update_soon()

    def look_for_space(self) -> None:
        """Take writes again if the journals have space, after a checkpoint showed that ledger storage has."""
        if self._state.lacks_space:
            with contextlib.suppress(OSError):
                self._state.lacks_space = not self.journals_have_space()

    def journals_have_space(self) -> bool:
        """Return whether every journal directory has room for two files, and a descriptor is free. Raises OSError."""
        needed = 2 * self._state.config.journal_pre_alloc_size_mb * MEBIBYTE
        directories = self._storage.journal_directories
        has_space = all(self._files.disk_usage(directory).free > needed for directory in directories)
        return has_space and self._files.has_descriptors()
