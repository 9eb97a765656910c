"""Long polls: reads that wait for a ledger's last add confirmed to advance. Source: LongPollReadEntryProcessorV3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bkctl.protocol.messages import ReadRequest, Respond, Status, refusal
from bkctl.storage.ledger.ledger_storage import LedgerHandle

if TYPE_CHECKING:
    from bkctl.bookie.server import Bookie

LONG_POLL_MS_MAX: Final = 3_600_000
#: Long polls of all clients that wait at once; those beyond are answered as if their time was over.
LONG_POLLS_MAX: Final = 50_000


class LongPolls:
    """The long polls of a bookie that wait."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._waiting: dict[LongPoll, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, handle: LedgerHandle, request: ReadRequest, respond: Respond) -> bool:
        """Answer `request` once the LAC of `handle` passes the reader's, the ledger is fenced, or the time is over.

        A reader that is gone waits no more. False, and nothing is done, when too many wait already.
        """
        if len(self._waiting) >= LONG_POLLS_MAX:
            return False
        poll = LongPoll(self._bookie, handle, request, respond, self._waiting.pop)
        self._waiting[poll] = None
        return True

    def finish(self) -> None:
        """Answer all of them now."""
        for poll in list(self._waiting):
            poll.finish(updated=False)


class LongPoll:
    """One of them."""

    def __init__(
        self,
        bookie: Bookie,
        handle: LedgerHandle,
        request: ReadRequest,
        respond: Respond,
        over: Callable[[LongPoll], object],
    ) -> None:
        self._bookie = bookie
        self._handle = handle
        self._request = request
        self._respond = respond
        self._tell_over = over
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._on_lost = bookie.on_lost(respond)
        self._on_lost[self._abandon] = None
        timeout_s = min(request.timeout_ms or 0, LONG_POLL_MS_MAX) / 1000
        self._timer = self._loop.call_later(timeout_s, self._finish_late)
        handle.watchers[self._woken] = None

    def _woken(self) -> None:
        # A handle without watchers may be evicted, and what comes after that does not wake us.
        if not self._over:
            self._handle.watchers[self._woken] = None
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        previous = self._request.previous_lac
        assert previous is not None
        handle = self._handle
        if not self._over and (handle.lac > previous or handle.fenced or handle.deleted):
            self.finish(updated=handle.lac > previous and not handle.deleted)

    def _finish_late(self) -> None:
        self.finish(updated=False)

    def _abandon(self) -> None:
        if self._end():
            self._respond(refusal(self._request, Status.EIO))

    def _end(self) -> bool:
        if self._over:
            return False
        self._over = True
        self._timer.cancel()
        self._on_lost.pop(self._abandon, None)
        self._tell_over(self)
        self._handle.watchers.pop(self._woken, None)
        return True

    def finish(self, *, updated: bool) -> None:
        """Answer now."""
        if not self._end():
            return
        self._bookie.finish_poll(self._handle, self._request, self._respond, updated=updated)
