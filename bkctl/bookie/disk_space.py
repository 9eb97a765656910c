"""The space on a bookie's disks: the directories that take new files, and whether the bookie takes entries.

Source: LedgerDirsMonitor, LedgerDirsManager, DiskChecker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.bookie.registration import RegistrationManager
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.disk import DiskUsage, Files
from bkctl.errors import BkctlError, UsageError
from bkctl.storage.bookie_storage import BookieStorage

log: Final = logging.getLogger("bkctl.bookie")


class DiskState(NamedTuple):
    """The result of a look at the disks. Directories are given by their numbers in the configuration.

    `writable` and `index_writable` take new files: the directories below the threshold, else those with a minimum of
    space, if any. `full`: the bookie takes no entries, with `allows_high_priority` only recoveries' entries.
    """

    writable: list[int]
    index_writable: list[int]
    full: bool
    any_full: bool
    almost_full: bool
    allows_high_priority: bool


class DiskWatch:
    """Looks at a bookie's disks, and remembers which directories were full. Raises UsageError for its thresholds."""

    def __init__(
        self, config: BookieConfig, files: Files, ledger_directories: Sequence[Path], index_directories: Sequence[Path]
    ) -> None:
        self._ledgers = _Directories(files, ledger_directories)
        self._indexes = self._ledgers
        if list(index_directories) != list(ledger_directories):
            self._indexes = _Directories(files, index_directories)
        self.use(config)

    def use(self, config: BookieConfig) -> None:
        """Take the thresholds of `config` from now on. Raises UsageError where they contradict each other."""
        resume = config.disk_usage_lwm_threshold
        if resume is not None and resume > config.disk_usage_threshold:
            raise UsageError(
                f"diskUsageLwmThreshold {resume} is above diskUsageThreshold {config.disk_usage_threshold}",
                hint="a full disk is used again below the first; a disk counts as full above the second",
            )
        for_log = config.min_usable_size_for_entry_log_creation
        for_log = config.log_size_limit if for_log is None else for_log
        for_priority = config.min_usable_size_for_high_priority_writes
        self._for_log = for_log
        self._for_index = config.min_usable_size_for_index_file_creation
        self._for_priority = for_log if for_priority is None else for_priority
        self._any_full_is_enough = config.read_only_mode_on_any_disk_full_enabled
        for directories in (self._ledgers, self._indexes):
            directories.use(config)

    @property
    def not_full_count(self) -> int:
        """The number of ledger directories below the threshold. Source: LedgerDirsManager's writable directories."""
        return len(self._ledgers.writable)

    def look(self) -> DiskState:
        """Look at all disks. Raises OSError."""
        sets = (self._ledgers,) if self._indexes is self._ledgers else (self._ledgers, self._indexes)
        for directories in sets:
            directories.look()
        any_full = any(directories.any_full for directories in sets)
        return DiskState(
            self._ledgers.writable or self._ledgers.with_more_than(self._for_log),
            self._indexes.writable or self._indexes.with_more_than(self._for_index),
            any(not directories.writable for directories in sets) or (any_full and self._any_full_is_enough),
            any_full,
            any(directories.almost_full for directories in sets),
            all(directories.writable or directories.with_more_than(self._for_priority) for directories in sets),
        )


class _Directories:
    """Directories of one kind."""

    def __init__(self, files: Files, directories: Sequence[Path]) -> None:
        self._files = files
        self._directories = directories
        self._usages: list[DiskUsage] = []
        self.writable = list(range(len(directories)))
        self.almost_full = False

    def use(self, config: BookieConfig) -> None:
        resume = config.disk_usage_lwm_threshold
        self._threshold = config.disk_usage_threshold
        self._resume = self._threshold if resume is None else resume
        self._warn = config.disk_usage_warn_threshold

    @property
    def any_full(self) -> bool:
        return len(self.writable) < len(self._directories)

    def look(self) -> None:
        """Look at the disks: a directory is full above the threshold, and takes files again below it.

        Where all are full, they take files again once their disks together are used less than the low water mark.
        """
        usages = self._usages = [self._files.disk_usage(path) for path in self._directories]
        below = [number for number, usage in enumerate(usages) if usage.ratio <= self._threshold]
        writable = [number for number in below if number in self.writable]
        if writable or total_usage(usages).ratio < self._resume:
            writable = below
        almost_full = any(self._warn < usages[number].ratio for number in writable)
        for number, directory in enumerate(self._directories):
            if (number in writable) != (number in self.writable):
                state = "takes new files again" if number in writable else "is full and takes no new files"
                log.warning("Directory %s %s: %.1f %% are used", directory, state, usages[number].ratio * 100)
        if almost_full and not self.almost_full:
            log.warning(
                "Directories are almost full: %s", ", ".join(str(self._directories[number]) for number in writable)
            )
        self.writable, self.almost_full = writable, almost_full

    def with_more_than(self, size: int) -> list[int]:
        return [number for number, usage in enumerate(self._usages) if usage.free > size]


def total_usage(usages: Iterable[DiskUsage]) -> DiskUsage:
    """Return the sum of all disks, each counted once. Source: DiskChecker.getTotalDiskUsage."""
    disks = {usage.device: usage for usage in usages}
    return DiskUsage(sum(disk.total for disk in disks.values()), sum(disk.free for disk in disks.values()), 0)


class DiskSpaceMonitor:
    """Tells ledger storage, garbage collector and the bookie's state how full the disks are; `start` first."""

    def __init__(
        self, files: Files, storage: BookieStorage, state: BookieStateManager, registration: RegistrationManager
    ) -> None:
        self._files = files
        self._storage = storage
        self._state = state
        self._registration = registration
        self.disks_are: Callable[..., None] | None = None  # GarbageCollectorThread.disks_are

    def start(self) -> None:
        """Raise UsageError for thresholds that contradict each other."""
        storage = self._storage
        self.disks = DiskWatch(self._state.config, self._files, storage.ledger_directories, storage.index_directories)

    def check(self) -> None:
        """Look at the disks in the calling thread. Raises OSError."""
        self._apply(self.disks.look())

    async def check_in_thread(self) -> None:
        """Look at the disks without holding the event loop. Raises OSError."""
        self._apply(await asyncio.to_thread(self._look))

    def _look(self) -> DiskState:
        for directory in self._storage.journal_directories:
            self._files.disk_usage(directory)  # a start could not replay the journals of one that is gone
        return self.disks.look()

    def _apply(self, disks: DiskState) -> None:
        state = self._state
        self._storage.ledgers.set_writable(disks.writable, disks.index_writable)
        state.has_room_for_recovery = disks.allows_high_priority
        state.disks_full = disks.full
        if self.disks_are is not None:
            self.disks_are(full=disks.any_full, almost_full=disks.almost_full)
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
