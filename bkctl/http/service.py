"""The objects that endpoints use: a cluster, opened when first needed, and on a bookie's own server that bookie."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bkctl.client.bookies import DEFAULT_CONFIG
from bkctl.client.ledger import BookKeeper
from bkctl.errors import BkctlError, TimedOut
from bkctl.http.server_url import bookie_url
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.departure import BLOCKING_RESULTS, Decommission
from bkctl.replication.holdings import plan_move
from bkctl.tasks import cancel_and_wait, drop_error

if TYPE_CHECKING:
    import ssl

    from bkctl.bookie.bookie import Bookie
    from bkctl.config import ClientConfig
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.replication.stats import Sample

T = TypeVar("T")

log: Final = logging.getLogger("bkctl.http")

#: The longest wait for a bookie's event loop.
BOOKIE_TIMEOUT_S: Final = 30.0


class ServiceUnavailable(BkctlError):
    """The request cannot be served now; a later one may succeed."""


@dataclass(eq=False)
class BookieProxy:
    """A proxy of a bookie in this process: calls run in the bookie's own event loop, and no thread waits for them."""

    bookie: Bookie
    loop: asyncio.AbstractEventLoop

    @property
    def bookie_id(self) -> str:
        """The bookie's id."""
        return self.bookie.bookie_id

    async def ask(self, question: Callable[[Bookie], T]) -> T:
        """Return the result of a short function, called in the bookie's event loop. Raise its errors, and TimedOut."""

        async def answer(bookie: Bookie) -> T:
            return question(bookie)

        return await self.do(answer)

    async def do(self, work: Callable[[Bookie], Coroutine[Any, Any, T]]) -> T:
        """Return the result of asynchronous work in the bookie's event loop. Raise its errors, and TimedOut."""
        coroutine = work(self.bookie)
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # the loop is closed: the bookie has stopped
            coroutine.close()
            raise TimedOut(f"Bookie {self.bookie_id} is stopping") from None
        try:
            async with asyncio.timeout(BOOKIE_TIMEOUT_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise TimedOut(f"Bookie {self.bookie_id} did not answer within {BOOKIE_TIMEOUT_S:g} s") from error


@dataclass(eq=False)
class Service:
    """A cluster's metadata and a client, opened when first needed, and the bookie of a bookie's own server.

    `tls`, `addresses` and `config` are as for BookKeeper. The service belongs to the event loop that uses it.
    """

    metadata_uri: str
    security: StoreSecurity = NO_SECURITY
    timeout_s: float = 30.0
    tls: ssl.SSLContext | None = None
    addresses: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    local_bookie: BookieProxy | None = None
    #: The metrics of auto-recovery, on the server of a process without a bookie.
    samples: Callable[[], Iterable[Sample]] | None = None
    config: ClientConfig = DEFAULT_CONFIG
    #: Held during a sanity test: only one runs at a time.
    sanity: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Opens the cluster for all requests, whichever of them is cancelled; None before, and after a failure.
    _opening: asyncio.Task[Cluster] | None = None
    _bookkeeper: BookKeeper | None = None
    _background: asyncio.Task[None] | None = None

    @property
    def has_bookie(self) -> bool:
        """True on a bookie's own server, and on auto-recovery's."""
        return self.local_bookie is not None or self.samples is not None

    @property
    def bookie(self) -> BookieProxy:
        """The bookie of this server."""
        assert self.local_bookie is not None
        return self.local_bookie

    async def cluster(self) -> Cluster:
        """Return the cluster's metadata. Raise as `open_cluster`."""
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            drop_error(self._opening)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Cluster:
        try:
            return await asyncio.to_thread(
                open_cluster, self.metadata_uri, timeout_s=self.timeout_s, security=self.security
            )
        except BaseException:
            self._opening = None  # the next request tries again
            raise

    def url_of(self, bookie: RegisteredBookie) -> str:
        """Return the URL of a bookie's HTTP server. Blocks. Raise as `bookie_url`."""
        address = self.addresses.get(bookie.bookie_id)
        return bookie_url(bookie, None if address is None else address[0])

    async def bookkeeper(self) -> BookKeeper:
        """Return the client of the cluster. Raise as `open_cluster`."""
        cluster = await self.cluster()
        if self._bookkeeper is None:
            self._bookkeeper = self.client(cluster)
        return self._bookkeeper

    def client(self, cluster: Cluster, only: list[str] | None = None) -> BookKeeper:
        """Return a new client, which writes to the bookies `only` if given; the caller closes it."""
        return BookKeeper(
            cluster, timeout_s=self.timeout_s, tls=self.tls, addresses=self.addresses, only=only,
            config=self.config,
        )  # fmt: skip

    def in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run long work. Raise ServiceUnavailable while other background work runs."""
        if self._background is not None and not self._background.done():
            raise ServiceUnavailable("Another background request is still running", hint="try again later")

        async def run() -> None:
            try:
                await work()
            except (BkctlError, OSError) as error:
                log.warning("Background work failed: %s", error)
            except Exception:
                log.exception("Background work failed")

        self._background = asyncio.get_running_loop().create_task(run())

    def recover_in_background(self, bookies: Collection[str], *, delete_cookie: bool) -> None:
        """Copy all that these bookies hold to others, and log the result. Raise as `in_background`."""

        async def work(bookkeeper: BookKeeper) -> None:
            plan = await asyncio.to_thread(plan_move, bookkeeper.cluster, bookies)
            mover = BookieMover(bookkeeper, bookies, plan)
            names = ", ".join(bookies)
            log.info("Recovering %s: %d ledgers", names, len(plan.ledgers))
            failed = 0
            async with aclosing(mover.move(plan.ledgers)) as moves:
                async for move in moves:
                    if move.problem is not None:
                        failed += 1
                        log.warning("Ledger %s is not recovered (%s): %s", move.ledger, move.outcome, move.problem)
            left = len(await mover.left())
            if delete_cookie and not left:
                await mover.delete_cookies()
            log.info("Recovered %s: %d ledgers failed, %d still have entries there", names, failed, left)

        self._with_client(work)

    def decommission_in_background(self, bookie_id: str, *, delete_cookie: bool) -> None:
        """Decommission a stopped bookie, and log the result. Raise as `in_background`."""

        async def work(bookkeeper: BookKeeper) -> None:
            plan = await asyncio.to_thread(plan_move, bookkeeper.cluster, [bookie_id])
            departure = Decommission(bookkeeper, bookie_id, plan, keep_cookie=not delete_cookie)
            log.info("Decommissioning %s: %d ledgers", bookie_id, len(plan.ledgers))
            async with aclosing(departure.run()) as steps:
                async for step in steps:
                    if step.result in BLOCKING_RESULTS:
                        where = f"ledger {step.ledger}: " if step.ledger is not None else ""
                        log.warning("Decommissioning %s: %s%s", bookie_id, where, step.message)
            log.info("Decommissioning %s has ended", bookie_id)

        self._with_client(work)

    def _with_client(self, work: Callable[[BookKeeper], Awaitable[None]]) -> None:

        async def run() -> None:
            async with self.client(await self.cluster()) as bookkeeper:
                await work(bookkeeper)

        self.in_background(run)

    async def close(self) -> None:
        """Cancel background work, and close the client and the cluster."""
        if self._background is not None:
            await cancel_and_wait(self._background)
        if self._bookkeeper is not None:
            await self._bookkeeper.close()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._opening is not None:
            await asyncio.to_thread(self._opening.result().close)
        self._bookkeeper = self._opening = None


async def next_of(items: Iterator[T], count: int) -> list[T]:
    """Return the next `count` items of an iterator that blocks, read in a thread; fewer at its end."""
    return await asyncio.to_thread(lambda: list(islice(items, count)))
