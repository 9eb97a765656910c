"""Waiting in an event loop for what the threads of a metadata store tell, and ending what waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any


class Signal:
    """An event that other threads set. Belongs to the event loop that runs when it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wake who waits; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    def clear(self) -> None:
        """To be called before looking at what the signal is about, so that no change is missed."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Until it is set, or the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), max(timeout_s, 0.0))


@contextlib.asynccontextmanager
async def watching(watch: Callable[..., Callable[[], None]], *arguments: Any, **options: Any) -> AsyncIterator[None]:
    """For the time of a block: `watch(*arguments)`, which gives what cancels it, in a thread."""
    beginning = asyncio.ensure_future(asyncio.to_thread(watch, *arguments, **options))
    try:
        await asyncio.shield(beginning)
        yield
    finally:
        await finished(_cancel(beginning))


async def _cancel(beginning: asyncio.Future[Callable[[], None]]) -> None:
    await asyncio.wait([beginning])
    if beginning.exception() is None:
        await asyncio.to_thread(beginning.result())


async def finished(work: Any) -> Any:
    """Wait for `work` to its end although we are cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they are over; what they raise is theirs."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
