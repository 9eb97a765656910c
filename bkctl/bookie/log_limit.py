"""A bound on the log of a server, whatever its clients do: so many records a minute of one place in the code."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

#: Records that one place in the code logs in STRETCH_S, by their least level; the rest is counted.
RECORDS_MAX: Final = {logging.WARNING: 10, logging.NOTSET: 1000}
STRETCH_S: Final = 60.0


class RepeatLimit(logging.Filter):
    """Drops records that one place logs too often; the next record that passes says how many were dropped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        #: By place: the time at which its stretch began, and the records since.
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is logged."""
        most = next(count for level, count in RECORDS_MAX.items() if record.levelno >= level)
        place, now_s = (record.pathname, record.lineno), self._clock()
        with self._lock:
            began_s, count = self._seen.get(place, (now_s, 0))
            dropped = 0
            if now_s - began_s >= STRETCH_S:
                dropped, began_s, count = max(0, count - most), now_s, 0
            self._seen[place] = began_s, count + 1
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more like this were not logged)", ()
        return count < most
