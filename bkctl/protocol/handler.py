"""The interface between a server and the bookie behind it: request handlers, and responders to answer through."""

from __future__ import annotations

import asyncio
import functools
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from bkctl.protocol.messages import BytesLike, Request, Response, Status

if TYPE_CHECKING:
    from bkctl.protocol.backpressure import ClientConnection
    from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun


class Responder(functools.partial[None]):
    """Sends the one answer to a request. Call it once with the response, at any time, from the event loop's thread.

    Calling it raises nothing. A partial call of `ServedConnection.answer`, because each request needs one and that is
    the cheapest: connection, the request's header (v3's, or v2's as a number), scope to echo in v3, size in bytes.
    """

    __slots__ = ()

    @property
    def connection(self) -> ClientConnection:
        """The client's connection."""
        return cast("ClientConnection", self.args[0])

    @property
    def is_lost(self) -> bool:
        """True once the client's connection is closed; any thread may ask."""
        return self.connection.is_lost

    @property
    def is_congested(self) -> bool:
        """True while the client, or clients together, read their answers more slowly than they come."""
        return self.connection.is_congested or self.connection.lacks_memory

    @property
    def carries_lac(self) -> bool:
        """True if answers to reads carry the bookie's LAC, which v2's do not."""
        return not isinstance(self.args[1], int)

    @property
    def on_lost(self) -> dict[Callable[[], None], None]:
        """Callbacks (the keys) to run once when the connection is lost. Callers add and remove them."""
        return self.connection.on_lost

    def read(self, start: Callable[[], asyncio.Future[Any]]) -> bool:
        """Have `start` begin a read of the disk, now or when its answer finds room in memory.

        `start` returns the future of the read, and has arranged for the answer. It is never called once the connection
        is lost. Connections take turns, and at most READS_IN_PROGRESS_MAX reads are in progress. None begins while the
        client is behind with its answers, or unread answers to all clients fill their memory. Returns False without
        any effect when too many reads wait already (`ServerLimits.reads_waiting`).
        """
        return self.connection.reads.add(self, start)

    def observed(self, observe: Callable[[Response], None]) -> Responder:
        """Return a responder to the same request that passes the response to `observe` before it is sent."""

        def answer(*call: Any) -> None:
            observe(call[-1])
            self(call[-1])

        return Responder(answer, *self.args[:4])


class ReadRunResponder:
    """Sends the answers to runs of reads, part by part in any order. Every read of the runs gets one answer.

    Call it from the event loop's thread, at any time; its methods raise nothing.
    """

    __slots__ = ("_connection", "_is_v2", "_settle")

    def __init__(self, connection: ClientConnection, settle: Callable[[int, bytes], None], is_v2: bool) -> None:
        """`settle` sends the answers to as many reads."""
        self._connection = connection
        self._settle = settle
        self._is_v2 = is_v2

    def answer(self, reads: ReadRun, bodies: Sequence[BytesLike], max_lac: int | None) -> None:
        """Answer `reads` with their entries, and with the bookie's LAC in v3."""
        connection = self._connection
        # Encoded only while the client is there.
        frames = b"" if connection.is_lost else reads.answers(bodies, max_lac, is_v2=self._is_v2)
        self._settle(len(reads.entry_ids), frames)

    def refuse(self, reads: ReadRun, status: Status) -> None:
        """Answer `reads` with `status`."""
        self._settle(len(reads.entry_ids), reads.refusals(status, is_v2=self._is_v2))

    @property
    def is_congested(self) -> bool:
        """True while the client, or clients together, read their answers more slowly than they come."""
        return self._connection.is_congested or self._connection.lacks_memory

    @property
    def carries_lac(self) -> bool:
        """True if answers to reads carry the bookie's LAC, which v2's do not."""
        return not self._is_v2

    @property
    def is_lost(self) -> bool:
        """True once the client's connection is closed; any thread may ask."""
        return self._connection.is_lost

    @property
    def room(self) -> int:
        """Requests that may still wait for the disk; see `read`."""
        return self._connection.reads.room

    def read(self, count: int, start: Callable[[], asyncio.Future[Any]]) -> bool:
        """Have `start` begin a read of the disk for `count` requests, at most `room`; see Responder.read."""
        return self._connection.reads.add(lambda _: self._settle(count, b""), start, count)


class RequestHandler(typing.Protocol):
    """A bookie as a BookieServer needs it."""

    def handle(self, request: Request, respond: Responder) -> None:
        """Serve one request, and call `respond` exactly once, now or later, from the loop's thread.

        The server itself answers authentication, START_TLS, and requests that the protocol refuses. A BkctlError
        raised here is answered with its status (EIO when it has none). Any other exception is answered EIO, ends the
        connection and goes to the loop's exception handler.
        """


class RunHandler(RequestHandler, typing.Protocol):
    """A handler that takes many adds and many reads at once."""

    def handle_adds(self, adds: Sequence[AddRun], answer: AnswerAdds) -> None:
        """Serve runs of adds, and call `answer` once for each of them, alone or with others. Raises as `handle` does.

        When it raises, it has answered none of them.
        """

    def adds_at_once(self) -> int:
        """Return the largest number of adds that `handle_adds` may get now; 1 or more."""

    def handle_reads(self, reads: ReadRun, respond: ReadRunResponder) -> None:
        """Serve a run of plain reads. Raises as `handle` does, and then has answered none of them."""
