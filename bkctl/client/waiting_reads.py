"""Reads of single replicas ahead of the one that is wanted: their entries wait in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from bkctl.client.bookies import BookieChannel, WaitingBytes
from bkctl.client.reader import LedgerAccess
from bkctl.protocol.connection import FutureAnswer, Outcome
from bkctl.protocol.messages import ReadRequest, ReadResponse, Request, Response


class _WaitingAnswer(FutureAnswer):
    """Gives the answer of `channel` to a future: without the entry, if it has no room."""

    __slots__ = ("channel", "reads", "request")

    def __init__(self, reads: WaitingReads, channel: BookieChannel, request: ReadRequest) -> None:
        super().__init__()
        self.reads, self.channel, self.request = reads, channel, request

    def __call__(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        (outcome,), reads = outcomes, self.reads
        if type(outcome) is ReadResponse and outcome.body is not None:
            if reads.room.admit(size := len(outcome.body)):
                reads.sizes[self.future] = size
            else:
                reads.dropped[self.future] = self
                outcome = outcome._replace(body=None)
        super().__call__(requests, (outcome,))


class WaitingReads:
    """Reads whose answers wait for their turn, as far as `room` allows.

    Answers without room are dropped, and asked for again at their turn.
    """

    def __init__(self, access: LedgerAccess, room: WaitingBytes) -> None:
        self._access = access
        self.room = room
        self.sizes: dict[asyncio.Future[Response], int] = {}
        self.dropped: dict[asyncio.Future[Response], _WaitingAnswer] = {}

    def send(self, channel: BookieChannel, request: ReadRequest) -> asyncio.Future[Response]:
        """Send a read, and return the future for `take` or `outcome`."""
        answer = _WaitingAnswer(self, channel, request)
        channel.send_run((request,), answer, self._access.scoped)
        return answer.future

    def take(self, future: asyncio.Future[Response]) -> asyncio.Future[Response] | None:
        """Let the answer of a done future go at its turn; return the future of a second read if it was dropped."""
        dropped = self.dropped.get(future)
        self._forget(future)
        return None if dropped is None else dropped.channel.send(dropped.request, self._access.scoped)

    async def outcome(self, future: asyncio.Future[Response]) -> asyncio.Future[Response]:
        """Wait for a read whose turn has come, and return its done future."""
        if not future.done():
            await asyncio.wait([future])
        again = self.take(future)
        if again is None:
            return future
        await asyncio.wait([again])
        return again

    def abandon(self, futures: Iterable[asyncio.Future[Response]]) -> None:
        """Let answers go that are not needed, also those that are still to come."""
        for future in futures:
            future.add_done_callback(self._forget)

    def _forget(self, future: asyncio.Future[Response]) -> None:
        self.room.free(self.sizes.pop(future, 0))
        self.dropped.pop(future, None)
