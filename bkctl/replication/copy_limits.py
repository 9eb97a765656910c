"""Bounds of replication: entries on their way at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from bkctl.client.reader import WINDOW_BYTES

#: Entries of a fragment on their way at once. Apache's rereplicationEntryBatchSize (10) serves the same purpose.
BATCH_SIZE: Final = 100
#: Fragments whose entries are on their way at once, and the approximate bytes of those entries together.
COPIES_AT_ONCE: Final = 64
WINDOWS_BYTES: Final = 256 << 20


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
