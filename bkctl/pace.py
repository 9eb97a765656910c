"""The pace of long work: bytes and steps a second, and pauses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    import threading

#: The longest sleep before the pace is read again, as it may have changed.
_LOOK_S: Final = 0.2


class Pace:
    """Bounds the bytes and steps of work a second (None: no limit), and pauses it.

    A step is an entry, a ledger or a record, whatever the work counts. Concurrent parts of the work share one pace.
    Limits and pauses may change while the work runs, from any thread, and apply within `_LOOK_S`. Source:
    LedgerFragmentReplicator.Throttler (replicationRateByBytes). `has_bytes` is False for work without bytes, whose
    rates are steps alone.
    """

    def __init__(
        self, *, bytes_per_s: float | None = None, steps_per_s: float | None = None, has_bytes: bool = True
    ) -> None:
        self.has_bytes = has_bytes
        self._is_paused = False
        #: Nothing to wait for, the fast way.
        self._is_free = True
        self._free_at = 0.0
        self._turns: asyncio.Lock | None = None
        self.limit(bytes_per_s=bytes_per_s, steps_per_s=steps_per_s)

    def limit(self, *, bytes_per_s: float | None = None, steps_per_s: float | None = None) -> None:
        """Replace both limits."""
        self.bytes_per_s = bytes_per_s if bytes_per_s is not None and bytes_per_s > 0 else None
        self.steps_per_s = steps_per_s if steps_per_s is not None and steps_per_s > 0 else None
        self._free_at = 0.0
        self._update()

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self._is_paused

    def pause(self) -> None:
        """Let the next steps wait for `resume`."""
        self._is_paused = True
        self._update()

    def resume(self) -> None:
        """Let the work continue."""
        self._is_paused = False
        self._update()

    def take(self, size_bytes: int = 0, steps: int = 1) -> None:
        """Count finished work, then sleep until the limits allow the total, and through a pause."""
        if self._is_free:
            return
        self._count(size_bytes, steps)
        while (left_s := self._left_s()) > 0:
            time.sleep(min(left_s, _LOOK_S))

    def begin(self, size_bytes: int = 0, steps: int = 1, *, stopped: threading.Event) -> None:
        """Wait as `acquire`, in a thread; `stopped` ends the wait."""
        while (left_s := self._left_s()) > 0 and not stopped.wait(min(left_s, _LOOK_S)):
            pass
        self._count(size_bytes, steps)

    async def acquire(self, size_bytes: int = 0, steps: int = 1) -> None:
        """Wait until work of that size may begin, in the order of the calls. Large work delays the work after it."""
        if self._is_free:
            return
        import asyncio

        if self._turns is None:
            self._turns = asyncio.Lock()
        async with self._turns:
            while (left_s := self._left_s()) > 0:
                await asyncio.sleep(min(left_s, _LOOK_S))
            self._count(size_bytes, steps)

    async def resumed(self) -> None:
        """Wait until the work is not paused."""
        import asyncio

        while self._is_paused:
            await asyncio.sleep(_LOOK_S)

    def _update(self) -> None:
        self._is_free = not self._is_paused and self.bytes_per_s is None and self.steps_per_s is None

    def _left_s(self) -> float:
        """Return the time to wait; a pause has no end yet."""
        return _LOOK_S if self._is_paused else self._free_at - time.monotonic()

    def _count(self, size_bytes: int, steps: int) -> None:
        cost_s = max(size_bytes / (self.bytes_per_s or float("inf")), steps / (self.steps_per_s or float("inf")))
        self._free_at = max(self._free_at, time.monotonic()) + cost_s
