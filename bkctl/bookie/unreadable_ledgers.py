"""The ledgers of which reads failed lately, for the disk or for damage, bounded in number."""

from __future__ import annotations

import errno
import time
from typing import Final

from bkctl.disk import NO_SPACE
from bkctl.errors import Corrupt
from bkctl.ids import LedgerId

#: Ledgers that are counted, and how long after the last failed read.
LEDGERS_MAX: Final = 1000
KEPT_S: Final = 24 * 3600.0

#: Errors of the system for want of something else than a sound disk.
_PASSING: Final = NO_SPACE | {errno.ENOMEM, errno.EINTR}


class UnreadableLedgers:
    """Counts ledgers whose entries or index could not be read. Belongs to the event loop."""

    def __init__(self) -> None:
        #: When a read failed last, the longest ago first.
        self._failed_s: dict[LedgerId, float] = {}

    def note(self, ledger: LedgerId, error: BaseException) -> None:
        """Count the ledger if `error`, of a read, is of the disk or of damage."""
        if isinstance(error, Corrupt) or (isinstance(error, OSError) and error.errno not in _PASSING):
            self._failed_s.pop(ledger, None)
            self._failed_s[ledger] = time.monotonic()
            if len(self._failed_s) > LEDGERS_MAX:
                del self._failed_s[next(iter(self._failed_s))]

    def discard(self, ledger: LedgerId) -> None:
        """Forget a ledger that was deleted."""
        self._failed_s.pop(ledger, None)

    def count(self) -> int:
        """Return the number of ledgers of which a read failed within KEPT_S, LEDGERS_MAX at most."""
        begin_s = time.monotonic() - KEPT_S
        while self._failed_s and self._failed_s[next(iter(self._failed_s))] < begin_s:
            del self._failed_s[next(iter(self._failed_s))]
        return len(self._failed_s)
