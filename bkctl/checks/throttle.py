"""A limit on how fast a check reads."""

from __future__ import annotations

import time
from typing import Final, NamedTuple


class Rate(NamedTuple):
    """The highest bytes and entries a second; None is unlimited."""

    bytes_per_s: float | None = None
    entries_per_s: float | None = None


NO_LIMIT: Final = Rate()


class ReadThrottle:
    """Slows its caller down to a rate, counted from the first call of `take`."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._began: float | None = None
        self._bytes = self._entries = 0

    def take(self, size_bytes: int, entries: int) -> None:
        """Count `size_bytes` and `entries` as read, then sleep until the rate allows the total."""
        if self._rate == NO_LIMIT:
            return
        now = time.monotonic()
        began = self._began = now if self._began is None else self._began
        self._bytes += size_bytes
        self._entries += entries
        due = 0.0
        if self._rate.bytes_per_s:
            due = self._bytes / self._rate.bytes_per_s
        if self._rate.entries_per_s:
            due = max(due, self._entries / self._rate.entries_per_s)
        if began + due > now:
            time.sleep(began + due - now)
