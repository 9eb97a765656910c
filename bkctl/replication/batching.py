"""Batches single requests of many tasks into few calls to a metadata store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from bkctl.errors import BkctlError
from bkctl.tasks import fail

T = TypeVar("T")
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
