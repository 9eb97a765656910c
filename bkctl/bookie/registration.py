"""A bookie's registration in the metadata store: on the list of writable or of read-only bookies, or on neither.

Source: ZKRegistrationManager, BookieStateManager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from bkctl.bookie.state_manager import BookieStateManager
from bkctl.errors import AlreadyExists, BkctlError
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.metadata.cluster import Cluster
from bkctl.tasks import drop_error

log: Final = logging.getLogger("bkctl.bookie")

#: A bookie whose registration another process holds gives up after this many times zkTimeout.
USURPED_ZK_TIMEOUTS: Final = 2


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
        #: Moves in the background.
        self.tasks: set[asyncio.Task[None]] = set()

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
        """Register where the mode changed or a move failed, and give up where another process has the bookie id."""
        try:
            await self.update()
        except AlreadyExists as error:
            self._state.fail(error)
        except BkctlError as error:
            self._log_failure(error)
        self.check_usurper()

    def _log_failure(self, error: BkctlError) -> None:
        log.warning("Cannot register as %s: %s", "read-only" if self._state.read_only else "writable", error)

    async def _move(self) -> None:
        async with self._moving:  # two moves at once, there and back, could take the bookie off both lists
            wanted = self._state.read_only
            if (wanted != self._registered_read_only or self._is_move_unsure) and self._leaving is None:
                assert self._cluster is not None
                self._is_move_unsure = True
                register = self._cluster.bookies.register
                await asyncio.to_thread(register, self._state.bookie_id, self._service_info, wanted)
                self._registered_read_only = wanted
                self._is_move_unsure = False

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

    def check_usurper(self) -> None:
        """Give up when another process holds the registration for longer than an abandoned session lives.

        Source: ZKRegistrationManager.registerBookie, which waits for zkTimeout and then shuts the bookie down.
        """
        if self._cluster is None or self._registered_read_only is None:
            return
        bookie_id = self._state.bookie_id
        usurped_s = self._cluster.bookies.usurped_s(bookie_id, self._registered_read_only)
        limit_s = USURPED_ZK_TIMEOUTS * self._state.config.zk_timeout / 1000
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
