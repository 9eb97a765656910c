"""Long polls: reads that wait for a ledger's last add confirmed to advance. Source: LongPollReadEntryProcessorV3."""

from __future__ import annotations

import asyncio
import functools
import typing
from typing import Final

from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import ReadRequest, Status, refusal
from bkctl.storage.ledger.ledger_handle import LedgerHandle

LONG_POLL_MS_MAX: Final = 3_600_000
#: Long polls of all clients that wait at once; the next ones are answered as if their time was over.
LONG_POLLS_MAX: Final = 50_000


class FinishPoll(typing.Protocol):
    """Answers a long poll whose wait is over; `updated`: because the LAC of `handle` advanced."""

    def __call__(self, handle: LedgerHandle, request: ReadRequest, respond: Responder, *, updated: bool) -> None: ...


class LongPolls:
    """The long polls of a bookie that wait."""

    def __init__(self, finish: FinishPoll) -> None:
        self.answer = finish
        self.waiting: dict[LongPoll, None] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def wait(self, handle: LedgerHandle, request: ReadRequest, respond: Responder) -> bool:
        """Answer `request` once the LAC of `handle` passes the reader's, the ledger is fenced, or the time is over.

        A poll ends with its client's connection. Return False, and do nothing, when the client is lost or
        LONG_POLLS_MAX wait already.
        """
        if respond.is_lost or len(self.waiting) >= LONG_POLLS_MAX:
            return False
        self.waiting[LongPoll(self, handle, request, respond)] = None
        return True

    def finish(self) -> None:
        """Answer all of them now."""
        for poll in list(self.waiting):
            poll.finish(updated=False)


class LongPoll:
    """One long poll, from its creation until it is answered."""

    def __init__(self, polls: LongPolls, handle: LedgerHandle, request: ReadRequest, respond: Responder) -> None:
        self._polls = polls
        self._handle = handle
        self._request = request
        self._respond = respond
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._on_lost = respond.on_lost
        self._on_lost[self._abandon] = None
        timeout_s = min(request.timeout_ms or 0, LONG_POLL_MS_MAX) / 1000
        self._timer = self._loop.call_later(timeout_s, functools.partial(self.finish, updated=False))
        assert request.previous_lac is not None
        self._previous = request.previous_lac
        self._watcher = handle.watch(self._previous, functools.partial(self._loop.call_soon, self._look))

    def _look(self) -> None:
        handle = self._handle
        self.finish(updated=handle.lac > self._previous and not handle.deleted)

    def _abandon(self) -> None:
        if self._end():
            self._respond(refusal(self._request, Status.EIO))

    def _end(self) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self._timer.cancel()
        self._on_lost.pop(self._abandon, None)
        self._polls.waiting.pop(self)
        self._handle.unwatch(self._watcher)
        return True

    def finish(self, *, updated: bool) -> None:
        """Answer now, unless it is answered; `updated`: because the LAC advanced."""
        if self._end():
            self._polls.answer(self._handle, self._request, self._respond, updated=updated)
