"""Deletion of ledgers from a running bookie: the garbage collector's thread asks, the event loop deletes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import WaitingRequests
from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, Unsupported
from bkctl.ids import LedgerId
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_handle import NeedsDisk

log: Final = logging.getLogger("bkctl.bookie")


class LedgerDeleter:
    """Deletes ledgers in the event loop that it was created in, each behind the requests that wait for it."""

    def __init__(self, storage: BookieStorage, state: BookieStateManager, requests: WaitingRequests) -> None:
        self._storage = storage
        self._state = state
        self._requests = requests
        self._loop = asyncio.get_running_loop()

    def delete_from_thread(self, ledgers: Sequence[LedgerId]) -> int:
        """Run `delete_all` from another thread than the event loop's."""
        return asyncio.run_coroutine_threadsafe(self.delete_all(ledgers), self._loop).result()

    async def delete_all(self, ledgers: Sequence[LedgerId]) -> int:
        """Delete ledgers, one a turn of the loop; return how many there were.

        A checkpoint may be under way: on a busy bookie one begins as soon as another ends. Raises the error that made
        the bookie give up.
        """
        count = 0
        for ledger in ledgers:
            if self._state.failure is not None:
                raise self._state.failure
            try:
                await self.delete(ledger)
                count += 1
            except LedgerNotFound:
                pass
            except (OSError, BkctlError) as error:
                log.warning("Ledger %s cannot be deleted: %s", ledger, error)
            await asyncio.sleep(0)
        return count

    def delete(self, ledger: LedgerId) -> asyncio.Future[None]:
        """Delete a ledger; the future raises LedgerNotFound, OSError or BkctlError."""
        deleted: asyncio.Future[None] = self._loop.create_future()

        def delete(error: BaseException | None = None) -> None:
            is_damaged = isinstance(error, Corrupt | Unsupported)
            try:
                if error is not None and not is_damaged:
                    raise error
                self._storage.delete_ledger(ledger, is_damaged=is_damaged)
            except NeedsDisk as need:
                self._requests.once_read(need, delete)
            except Exception as failure:  # noqa: BLE001 - raised by the future
                deleted.set_exception(failure)
            else:
                self._requests.unreadable.discard(ledger)
                deleted.set_result(None)

        waiting = self._requests.by_ledger.get(ledger)
        if waiting is not None:
            waiting.append(delete)
        else:
            delete()
        return deleted
