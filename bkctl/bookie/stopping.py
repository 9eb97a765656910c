"""A stop that ends in bounded time, whatever hangs."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from bkctl.bookie.state_manager import BookieStateManager
from bkctl.tasks import drop_error

log: Final = logging.getLogger("bkctl.bookie")


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
