"""Bridges between an event loop and the threads of a metadata store: signals and watches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from bkctl.tasks import run_to_end

T = TypeVar("T")


class Signal:
    """An event that other threads set. It belongs to the event loop that runs when it is created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake the waiting tasks; any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """Reset the signal. Clear it before looking at the watched state, so that no change is missed."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Wait until the signal is set or the timeout has passed."""
        # Not wait_for: Python 3.11's loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._event.wait()


@contextlib.asynccontextmanager
async def opened(make: Callable[[], T], close: Callable[[T], None]) -> AsyncIterator[T]:
    """Provide what `make` returns for the duration of a block, and `close` it then; both run in threads.

    What `make` returns is closed too if the caller is cancelled meanwhile.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))

    async def end() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            await asyncio.to_thread(close, making.result())

    try:
        yield await asyncio.shield(making)
    finally:
        await run_to_end(end())


def watching(
    watch: Callable[..., Callable[[], None]], *arguments: Any, **options: Any
) -> contextlib.AbstractAsyncContextManager[object]:
    """Watch for the duration of a block: call `watch(*arguments)` in a thread, and its result to cancel the watch."""
    return opened(lambda: watch(*arguments, **options), lambda cancel: cancel())
