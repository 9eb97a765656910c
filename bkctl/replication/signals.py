"""Waiting in an event loop for what the threads of a metadata store tell, ending what waits, and asking together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from bkctl.client.bookies import fail, in_thread
from bkctl.errors import BkctlError

T = TypeVar("T")
R = TypeVar("R")

#: Things that are asked for in one call.
TOGETHER_COUNT_MAX: Final = 256


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
        # Not wait_for: Python 3.11's loses a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._event.wait()


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


class Together(Generic[T, R]):
    """What many tasks ask a metadata store for, one thing each, in few calls: all that wait go into the next one.

    `call` runs in a thread, one call at a time; it returns what becomes of each thing, errors in their places. Belongs
    to the event loop that runs when it is first called.
    """

    def __init__(self, call: Callable[[list[T]], Sequence[R | BkctlError]]) -> None:
        self._call = call
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._calling: asyncio.Task[None] | None = None

    def __call__(self, item: T) -> asyncio.Future[R]:
        """The future of what becomes of `item`; it fails with the item's error, or with that of the whole call."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._calling is None:
            self._calling = asyncio.create_task(self._call_for_all())
        return future

    async def _call_for_all(self) -> None:
        some: list[tuple[T, asyncio.Future[R]]] = []
        try:
            while self._waiting:
                some, self._waiting = self._waiting[:TOGETHER_COUNT_MAX], self._waiting[TOGETHER_COUNT_MAX:]
                asked = in_thread(self._call, [item for item, _ in some])
                answer = (await asyncio.gather(asked, return_exceptions=True))[0]
                results = [answer] * len(some) if isinstance(answer, BaseException) else answer
                for (_, future), result in zip(some, results, strict=True):
                    if isinstance(result, BaseException):
                        fail(future, result)
                    elif not future.done():
                        future.set_result(result)
                some = []
        finally:
            self._calling = None
            for _, future in (*some, *self._waiting):  # cancelled: nobody may wait for ever
                future.cancel()
            self._waiting = []
