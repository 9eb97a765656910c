"""A bookie's registration in the metadata store: on the list of writable or of read-only bookies, or on neither.

Source: ZKRegistrationManager, BookieStateManager.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from typing import Final

from bkctl.bookie.state_manager import BookieStateManager
from bkctl.errors import AlreadyExists, BkctlError, NotFound
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.metadata.cluster import Cluster
from bkctl.tasks import drop_error, run_to_end

log: Final = logging.getLogger("bkctl.bookie")

#: A bookie whose registration another process holds gives up after this many times zkTimeout.
USURPED_ZK_TIMEOUTS: Final = 2
#: Looks for the bookie's own registration within zkTimeout.
LOOKS_PER_ZK_TIMEOUT: Final = 3


class RegistrationManager:
    """Keeps a bookie on the list that fits its mode; `start` before anything else."""

    def __init__(self, state: BookieStateManager) -> None:
        self._state = state
        self._cluster: Cluster | None = None
        self._registered_read_only: bool | None = None
        #: The last move failed, or has not ended: the metadata store may have done it, or half of it.
        self._is_move_unsure = False
        self._is_usurped = False
        self._moving = asyncio.Lock()
        self._leaving: asyncio.Task[None] | None = None
        #: The last time that the metadata store showed the registration (monotonic clock); is its loss logged?
        self._seen_s = -math.inf
        self._is_lost = False
        #: Moves in the background.
        self.tasks: set[asyncio.Task[None]] = set()

    async def wait_until_free(self, cluster: Cluster) -> None:
        """Return once no other process has registered this bookie: at once, or when a dead one's session is over.

        Raises AlreadyExists while that process lives. Source: ZKRegistrationManager.checkRegNodeAndWaitExpired.
        """
        bookie_id = self._state.bookie_id
        wait = functools.partial(asyncio.to_thread, cluster.bookies.wait_until_free, bookie_id)
        try:
            await run_to_end(wait(wait_s=0))
        except AlreadyExists:
            log.info("Bookie %s is registered: waiting until that session is over, if its process died", bookie_id)
            await run_to_end(wait())

    def start(self, cluster: Cluster, service_info: BookieServiceInfo) -> None:
        """Register in `cluster` from now on, with these addresses and properties."""
        self._cluster = cluster
        self._service_info = service_info

    async def update(self) -> None:
        """Register as read-only or writable. A move that has begun ends although the caller is cancelled.

        Raises AlreadyExists when another bookie has the id, and other errors of the metadata store.
        """
        move = asyncio.get_running_loop().create_task(self._move())
        drop_error(move)
        await asyncio.shield(move)

    def update_soon(self) -> None:
        """Register in the background; a failure is logged."""
        task = asyncio.get_running_loop().create_task(self._try_update())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _try_update(self) -> None:
        try:
            await self.update()
        except BkctlError as error:
            self._log_failure(error)

    async def check(self) -> None:
        """Register where the mode changed or a move failed.

        Give up where another process has the bookie id, or the cookie went with the session.
        """
        try:
            await self.update()
            if await self._is_decommissioned():
                gone = f"Bookie {self._state.bookie_id} lost its session, and its cookie is gone: it was decommissioned"
                hint = "give it empty directories, or restore the cookie ('bkctl metadata undo'), and start it again"
                self._state.fail(NotFound(gone, hint=hint))
                return
        except AlreadyExists as error:
            self._state.fail(error)
        except BkctlError as error:
            self._log_failure(error)
        self.check_usurper()

    async def _is_decommissioned(self) -> bool:
        if self._cluster is None or self._registered_read_only is None:
            return False
        bookies, bookie_id = self._cluster.bookies, self._state.bookie_id
        if not bookies.usurped_s(bookie_id, self._registered_read_only):
            return False
        return await asyncio.to_thread(bookies.get, bookie_id) is None

    def _log_failure(self, error: BkctlError) -> None:
        log.warning("Cannot register as %s: %s", "read-only" if self._state.read_only else "writable", error)

    async def _move(self) -> None:
        async with self._moving:  # two moves at once, there and back, could take the bookie off both lists
            wanted = self._state.read_only
            if (wanted != self._registered_read_only or self._is_move_unsure) and self._leaving is None:
                assert self._cluster is not None
                self._is_move_unsure = True
                register = functools.partial(self._cluster.bookies.register, needs_cookie=True)
                await asyncio.to_thread(register, self._state.bookie_id, self._service_info, wanted)
                self._registered_read_only = wanted
                self._is_move_unsure = False
                self._seen_s = time.monotonic()

    async def leave(self, timeout_s: float) -> None:
        """Remove the registration of the bookie; return once it is gone, or after `timeout_s` seconds."""
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._leave())
            drop_error(self._leaving)
        await asyncio.wait([self._leaving], timeout=timeout_s)

    async def _leave(self) -> None:
        async with self._moving:  # a move under way would register the bookie again
            is_listed = self._registered_read_only is not None or self._is_move_unsure
            if self._cluster is not None and is_listed and not self._is_usurped:
                with contextlib.suppress(BkctlError):
                    await asyncio.to_thread(self._cluster.bookies.unregister, self._state.bookie_id)
                self._registered_read_only = None
                self._is_move_unsure = False

    # --- loss --------------------------------------------------------------------------------------------------------

    @property
    def lost_s(self) -> float:
        """Seconds since the metadata store last showed the registration; 0 while each look finds it."""
        return time.monotonic() - self._seen_s if self._is_lost else 0.0

    @property
    def is_over(self) -> bool:
        """True if the registration was not seen for zkTimeout: clients may have been told that the bookie left."""
        return time.monotonic() - self._seen_s > self._timeout_s

    @property
    def _timeout_s(self) -> float:
        return self._state.config.zk_timeout / 1000

    async def watch(self) -> None:
        """Look for the registration several times within zkTimeout, and log its loss and its return."""
        while True:
            began_s = time.monotonic()
            look = asyncio.ensure_future(asyncio.to_thread(self._is_registered))
            drop_error(look)
            # The store itself may wait for an answer for longer.
            await asyncio.wait([look], timeout=self._timeout_s / LOOKS_PER_ZK_TIMEOUT)
            if not look.done():
                self._note_loss("no answer")
                await asyncio.wait([look])
            problem = look.exception()
            if problem is not None:
                self._note_loss(str(problem) or repr(problem))
            elif look.result():
                self._note_return(began_s)
            else:
                self._note_loss("it is not there")
            await asyncio.sleep(self._timeout_s / LOOKS_PER_ZK_TIMEOUT)

    def _is_registered(self) -> bool:
        assert self._cluster is not None
        bookie = self._cluster.bookies.get(self._state.bookie_id)
        return bookie is not None and bookie.state != "down" and not self._is_usurped

    def _note_loss(self, problem: str) -> None:
        if not self._is_lost and self._leaving is None:
            self._is_lost = True
            log.error(
                "Bookie %s does not find its registration: %s. Clients that know its address are served, others may "
                "take it for lost; it registers again by itself", self._state.bookie_id, problem,
            )  # fmt: skip

    def _note_return(self, began_s: float) -> None:
        if self._is_lost:
            log.warning("Bookie %s is registered again, after %.0f s", self._state.bookie_id, self.lost_s)
            self._is_lost = False
        self._seen_s = began_s

    # --- another holder ----------------------------------------------------------------------------------------------

    def check_usurper(self) -> None:
        """Give up when another process holds the registration for longer than an abandoned session lives.

        Source: ZKRegistrationManager.registerBookie, which waits for zkTimeout and then shuts the bookie down.
        """
        if self._cluster is None or self._registered_read_only is None:
            return
        bookie_id = self._state.bookie_id
        usurped_s = self._cluster.bookies.usurped_s(bookie_id, self._registered_read_only)
        limit_s = USURPED_ZK_TIMEOUTS * self._timeout_s
        if usurped_s > limit_s:
            self._state.fail(
                AlreadyExists(
                    f"Bookie {bookie_id} lost its session, and another process holds its registration for more "
                    f"than {limit_s:g} s",
                    hint="stop that bookie, or give this one another id",
                )
            )
        elif usurped_s and not self._is_usurped:
            log.error(
                "Bookie %s lost its session, and another process holds its registration: this bookie stops in %g s",
                bookie_id, limit_s - usurped_s,
            )  # fmt: skip
        self._is_usurped = usurped_s > 0
