"""Bounds of replication: bytes and entries a second, and entries on their way at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from bkctl.client.reader import WINDOW_BYTES

#: Entries of a fragment on their way at once. Apache's rereplicationEntryBatchSize (10) serves the same purpose.
BATCH_SIZE: Final = 100
#: Fragments whose entries are on their way at once, and the approximate bytes of those entries together.
COPIES_AT_ONCE: Final = 64
WINDOWS_BYTES: Final = 256 << 20


class Throttle:
    """Bounds the bytes and entries that replication writes a second (None: no limit).

    Concurrent copies share one throttle. Source: LedgerFragmentReplicator.Throttler (replicationRateByBytes).
    """

    def __init__(self, *, bytes_per_s: float | None = None, entries_per_s: float | None = None) -> None:
        self._byte_s = 1 / bytes_per_s if bytes_per_s is not None and bytes_per_s > 0 else 0.0
        self._entry_s = 1 / entries_per_s if entries_per_s is not None and entries_per_s > 0 else 0.0
        self._free_at = 0.0

    async def acquire(self, size_bytes: int) -> None:
        """Wait until an entry of that size may be written. A large entry delays the entries after it."""
        if not self._byte_s and not self._entry_s:
            return
        now = time.monotonic()
        starts_at = max(now, self._free_at)
        self._free_at = starts_at + max(size_bytes * self._byte_s, self._entry_s)
        if starts_at > now:
            await asyncio.sleep(starts_at - now)


class CopyWindow:
    """Bounds the entries on their way: `batch_size` and about 16 MiB of one fragment, about 256 MiB of all fragments.

    Entries of at most 64 fragments are on their way at once, and at least two entries of each.
    """

    def __init__(self, batch_size: int = BATCH_SIZE) -> None:
        self.batch_size = max(batch_size, 1)
        self._copying_count = 0
        self._permits = asyncio.Semaphore(COPIES_AT_ONCE)

    @contextlib.asynccontextmanager
    async def copying(self) -> AsyncIterator[None]:
        """Hold a permit while entries of a fragment are on their way; wait for one first."""
        async with self._permits:
            self._copying_count += 1
            try:
                yield
            finally:
                self._copying_count -= 1

    def entry_count(self, size_bytes: int) -> int:
        """Return how many entries of that size (0: unknown) one fragment may have on their way now."""
        window_bytes = min(WINDOW_BYTES, WINDOWS_BYTES // self._copying_count)
        return min(max(window_bytes // (size_bytes or WINDOW_BYTES // 16), 2), self.batch_size)
