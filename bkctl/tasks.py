"""asyncio tasks: many at once, their ends, errors without a receiver; signals that end a server, or wait for work."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def in_order(
    items: AsyncIterable[T] | Iterable[T], work: Callable[[T], Awaitable[R]], count_max: Callable[[], int]
) -> AsyncGenerator[tuple[T, R], None]:
    """Yield each item with the result of its `work`, in order, with up to `count_max()` items in work at once.

    When the generator is closed or a `work` raises, it cancels the work in progress and waits for its end.
    """
    window: deque[tuple[T, asyncio.Future[R]]] = deque()
    try:
        async for item in items if isinstance(items, AsyncIterable) else _asynchronous(items):
            window.append((item, asyncio.ensure_future(work(item))))
            while len(window) >= count_max():
                first, task = window.popleft()
                yield first, await task
        while window:
            first, task = window.popleft()
            yield first, await task
    finally:
        await cancel_and_wait(*(task for _, task in window))


async def _asynchronous(items: Iterable[T]) -> AsyncGenerator[T, None]:
    for item in items:
        yield item


async def run_together(works: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of `works`, which run at once; if one raises, cancel the others and wait for their ends.

    So does a cancellation, which is raised whatever the works raise then. Each work is cancelled once.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel_and_wait(*tasks)
    return [task.result() for task in tasks if task in ended]


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for their ends; their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_to_end(work: Awaitable[T]) -> T:
    """Return the result of `work`. Cancellations of the caller are raised after `work` has ended; its error is dropped.

    Without a cancellation, its error is raised.
    """
    task = asyncio.ensure_future(work)
    drop_error(task)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    return task.result()


def uninterrupted(work: Callable[..., T], *arguments: Any) -> T:
    """Return `work(*arguments)`, called in another thread; raise its error.

    Signals reach the main thread only: an interrupt of it is raised before `work` begins, or after `work` has ended.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as executor:
        # The executor waits for its thread only once the thread's start was not interrupted.
        executor.submit(int).result()
        return executor.submit(work, *arguments).result()


def drop_error(future: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the error of `future` as never retrieved: a cancelled caller does not retrieve it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


def fail(future: asyncio.Future[Any] | concurrent.futures.Future[Any], error: BaseException) -> None:
    """Fail `future` unless it is done, without asyncio's complaint when its exception is never retrieved."""
    if not future.done():
        future.set_exception(error)
        future.exception()


@contextmanager
def ended_by_signals(end: Callable[[], object]) -> Iterator[None]:
    """Call `end` in the main thread for SIGINT, SIGTERM and SIGHUP in the block, except for those that are ignored."""
    with signals_restored() as before:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, lambda *_: end())
        yield


@contextmanager
def signals_restored() -> Iterator[dict[signal.Signals, Any]]:
    """Yield the handlers of SIGINT, SIGTERM and SIGHUP, and restore them after the block, in the main thread."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
