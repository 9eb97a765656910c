"""Bridges between an event loop and the threads of a metadata store: signals, watches, and batches of calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from bkctl.errors import BkctlError
from bkctl.tasks import cancel_and_wait, fail, run_to_end

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

    async def wait(self, timeout_s: float, *ends: asyncio.Future[Any]) -> None:
        """Wait until the signal is set, one of `ends` is done, or the timeout has passed."""
        # Not wait_for: Python 3.11's loses a cancellation that comes together with the event.
        waiting = asyncio.ensure_future(self._event.wait())
        try:
            timeout = None if timeout_s == math.inf else max(timeout_s, 0.0)
            await asyncio.wait([waiting, *ends], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(waiting)


@contextlib.asynccontextmanager
async def opened(make: Callable[[], T], close: Callable[[T], None]) -> AsyncIterator[T]:
    """Provide what `make` returns for the duration of a block, and `close` it then; both run in threads.

    What `make` returns is closed too if the caller is cancelled meanwhile. The end of a session closes what the store
    does not take back now, so errors of `close` count for nothing.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))

    async def end() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            with contextlib.suppress(BkctlError):
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


R = TypeVar("R")

#: The largest number of items in one call.
BATCH_COUNT_MAX: Final = 256


class BatchedCalls(Generic[T, R]):
    """Collects the items of many tasks while a call runs, and passes all of them to the next call.

    `call` runs in a thread, one call at a time. It returns one result for each item, in order; a result may be an
    error. The object belongs to the event loop that runs when it is first called.
    """

    def __init__(self, call: Callable[[list[T]], Sequence[R | BkctlError]]) -> None:
        self._call = call
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._calling: asyncio.Task[None] | None = None

    def __call__(self, item: T) -> asyncio.Future[R]:
        """Return a future of the item's result. It fails with the item's error, or with the error of the call."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._calling is None:
            self._calling = asyncio.create_task(self._call_in_batches())
        return future

    async def _call_in_batches(self) -> None:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_COUNT_MAX], self._waiting[BATCH_COUNT_MAX:]
                calling = asyncio.to_thread(self._call, [item for item, _ in batch])
                outcome = (await asyncio.gather(calling, return_exceptions=True))[0]
                results = [outcome] * len(batch) if isinstance(outcome, BaseException) else outcome
                for (_, future), result in zip(batch, results, strict=True):
                    if isinstance(result, BaseException):
                        fail(future, result)
                    elif not future.done():
                        future.set_result(result)
                batch = []
        finally:
            self._calling = None
            for _, future in (*batch, *self._waiting):  # cancelled: no caller may wait for ever
                future.cancel()
            self._waiting = []
