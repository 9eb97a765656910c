"""The load of the bookies in the last hour, read while somebody looks at the console."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError
from bkctl.http.bookie_load import BookieLoad, ClusterLoad, LoadWatch

if TYPE_CHECKING:
    from bkctl.http.gateway import Upstream
    from bkctl.http.service import Service

log: Final = logging.getLogger("bkctl.http")

INTERVAL_S: Final = 30.0
LOOKS_MAX: Final = 120
#: Without a page view for so long, the bookies are not asked any more.
IDLE_S: Final = 3600.0
WAIT_S: Final = 5.0


class LoadAt(NamedTuple):
    """The load at one time, in milliseconds since 1970."""

    at_ms: int
    load: ClusterLoad


class LoadHistory:
    """The looks of the last hour, the oldest first; `problem` says why the last one failed."""

    def __init__(self, service: Service, upstream: Upstream) -> None:
        self.looks: deque[LoadAt] = deque(maxlen=LOOKS_MAX)
        self.problem: str | None = None
        self._service = service
        self._upstream = upstream
        self._viewed_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the load from now on, for as long as pages are viewed."""
        self._viewed_s = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def last(self) -> ClusterLoad | None:
        """The newest load, None before the first."""
        return self.looks[-1].load if self.looks else None

    def total(self, number: Callable[[BookieLoad], float | None]) -> list[float | None]:
        """Return the sum of a number of all bookies, at each look; None where no bookie has it."""
        return [_sum([number(each) for each in look.load.bookies]) for look in list(self.looks)]

    def of_bookie(self, bookie_id: str, number: Callable[[BookieLoad], float | None]) -> list[float | None]:
        """Return a number of one bookie, at each look."""
        return [_sum([number(each) for each in look.load.bookies if each.bookie.bookie_id == bookie_id])
                for look in list(self.looks)]  # fmt: skip

    async def _run(self) -> None:
        def host_of(bookie_id: str) -> str | None:
            address = self._service.addresses.get(bookie_id)
            return None if address is None else address[0]

        watch: LoadWatch | None = None
        while time.monotonic() - self._viewed_s < IDLE_S:
            try:
                if watch is None:
                    client_of = partial(self._upstream.client, timeout_s=WAIT_S)
                    watch = LoadWatch(await self._service.cluster(), client_of, WAIT_S, host_of)
                load = await asyncio.to_thread(watch.look)
                self.looks.append(LoadAt(int(time.time() * 1000), load))
                self.problem = None
            except BkctlError as error:
                self.problem = error.message
            # The first rates need a second look.
            await asyncio.sleep(INTERVAL_S if len(self.looks) > 1 else 2.0)
        self.looks.clear()


def _sum(numbers: list[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None
