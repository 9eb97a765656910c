"""A bookie's server: accepts clients on one address, and gives their requests to a handler.

Each client's connection speaks v2 or v3 as the client does. The parts below: `flow.py`, `handler.py` (the bookie's
side), `backpressure.py` (bounds and deadlines). Source: BookieNettyServer, BookieRequestHandler, PacketProcessorBase.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import operator
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

from bkctl.errors import BkctlError, IllegalOperation, Unauthorized
from bkctl.protocol import flow, v2, v3
from bkctl.protocol.acceptor import Acceptor, claim_port, release
from bkctl.protocol.backpressure import DEFAULT_LIMITS, UNFINISHED_BYTES_MIN, RequestSlots, ServerLimits
from bkctl.protocol.flow import TLS_PIECE_BYTES, ControlledConnection, ServerState
from bkctl.protocol.handler import ReadRunResponder, RequestHandler, Responder, RunHandler
from bkctl.protocol.messages import (
    AUTH_DISABLED_PLUGIN,
    AddRequest,
    AuthMessage,
    AuthResponse,
    BareResponse,
    ReadRequest,
    Request,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    Status,
    WriteLacRequest,
    refusal,
    scope_of,
    status_of,
)
from bkctl.protocol.runs import AddRun, take_requests

#: Pieces of input below this size are gathered for so many seconds while so many bytes of requests are in flight.
GATHERED_BYTES_MAX: Final = 1 << 14
GATHER_IN_FLIGHT_BYTES_MIN: Final = 1 << 16
GATHER_S: Final = 0.0003
#: Bytes that a request counts in flight unless it is of `_WITH_BODY`, which count their frames: the bookie keeps this
#: little of it, however large its frame is.
BODILESS_REQUEST_BYTES: Final = 32
#: The largest frame before TLS where TLS is required: START_TLS takes some 20 bytes, an authentication before it more.
PLAIN_FRAME_BYTES_MAX: Final = 1 << 12
#: A client that broke the protocol has this long to read the answers to its earlier requests.
BROKEN_GRACE_S: Final = 5.0

_T = TypeVar("_T")
_R = TypeVar("_R")

log: Final = logging.getLogger("bkctl.protocol")

_OWN_REQUESTS: Final = frozenset({AuthMessage, StartTlsRequest})
_WITH_BODY: Final = frozenset({AddRequest, WriteLacRequest})
_NO_AUTH: Final = AuthResponse(Status.EOK, AUTH_DISABLED_PLUGIN, b"")


class _TlsOnly:
    """The handler of clients that have not begun TLS where it is required."""

    def handle(self, request: Request, respond: Responder) -> None:
        raise Unauthorized("This bookie requires TLS")


class ServedConnection(ControlledConnection):
    """A bookie's end of one connection. It speaks v3 until the first frame of another form, and v2 from then on."""

    def __init__(self, server: ServerState) -> None:
        super().__init__(server)
        self._handler: RequestHandler = server.handler
        if self._is_shut:
            self._handler = _TlsOnly()
            self._body_size_max = min(self._body_size_max, PLAIN_FRAME_BYTES_MAX - 4)
        self._is_v2 = False
        self._grace: asyncio.TimerHandle | None = None  # of a client that broke the protocol
        self._gathering: asyncio.TimerHandle | None = None  # until what was gathered is processed

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._grace, self._gathering):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # Requests.

    def buffer_updated(self, nbytes: int) -> None:
        """Process what arrived; from a client with many adds in flight, gather small pieces for a moment before.

        Where the bookie is as fast as the client, requests arrive one by one, and each took a pass of its own, and its
        answer a write. An add waits for the journal's sync, which takes longer.
        """
        if nbytes >= GATHERED_BYTES_MAX or self._in_flight_size < GATHER_IN_FLIGHT_BYTES_MIN or self._halted:
            super().buffer_updated(nbytes)
            return
        self._end += nbytes
        if self._gathering is None:
            self._gathering = self._loop.call_later(GATHER_S, self._gathered)

    def _gathered(self) -> None:
        self._gathering = None
        if self._start != self._end and not self._halted:
            self._parse()

    def _parse(self) -> None:
        start, had = self._start, self._end - self._start
        super()._parse()
        server = self._server
        unfinished = self._end - self._start
        self._deadlines.received(
            server.now_s,
            is_whole=had > 0 and (not unfinished or self._start != start),
            is_unfinished=unfinished > 0,
            is_served=not self._is_shut,
        )
        if self.frame_size or unfinished > UNFINISHED_BYTES_MIN:
            server.unfinished.update(self, 0 if self._halted else self._held_bytes, is_new=self._start != start)
        server.in_flight.count(self)

    def _take_frames(self, buffer: memoryview, at: int, end: int) -> int:
        if not hasattr(self._handler, "handle_adds"):
            return at
        handler = cast("RunHandler", self._handler)
        room = flow.IN_FLIGHT_REQUESTS_MAX - self._in_flight
        adds_max = min(handler.adds_at_once(), room)
        is_v2 = self._is_v2
        found = take_requests(buffer, at, end, self._body_size_max, adds_max, room, is_v2=is_v2)
        if found is None:
            return at
        self._start, adds, reads = found
        if adds:
            answer = functools.partial(self._answer_adds, is_v2)
            self._serve(handler.handle_adds, adds, answer, operator.call, *_extent_of(adds))
        if reads:
            respond = ReadRunResponder(self, self._settle_reads, is_v2)
            for run in reads:
                count = len(run[1])
                size = count * BODILESS_REQUEST_BYTES
                self._serve(handler.handle_reads, run, respond, ReadRunResponder.refuse, count, size)
        return found[0]

    def _serve(
        self,
        handle: Callable[[_T, _R], None],
        requests: _T,
        respond: _R,
        refuse: Callable[[_R, _T, Status], None],
        count: int,
        size: int,
    ) -> None:
        """Have `handle` serve `count` requests of `size` bytes; halt when too many are in flight.

        `refuse` answers them where `handle` raises.
        """
        self._take_on(count, size)
        in_flight = self._in_flight
        try:
            handle(requests, respond)
        except BkctlError as error:
            refuse(respond, requests, status_of(error))
        except Exception:
            if self._in_flight == in_flight:  # unanswered, so they would stay in flight for ever
                refuse(respond, requests, Status.EIO)
            self.abort()
            raise

    def _frame(self, buffer: memoryview, at: int, end: int) -> None:
        request: Request | None
        if not self._is_v2:
            call = v3.decode_request(buffer, at, end)
            if call is not None:
                header, request = call
                if request is None or header.version != v3.VERSION or type(request) in _OWN_REQUESTS:
                    self._answer_itself(header, request)
                else:
                    size = _kept_bytes(request, end - at)
                    respond = Responder(_answer, self, header, scope_of(request), size)
                    self._dispatch(request, respond, size)
                return
            self._is_v2 = True
        head, request = v2.decode_request(buffer, at, end)
        if isinstance(request, AuthMessage):
            self._queued(v2.encode_response(head, _NO_AUTH, self._out))
        elif head >> 24 > v2.VERSION:
            self._queued(v2.encode_response(head, refusal(request, Status.EBADVERSION), self._out))
        else:
            size = _kept_bytes(request, end - at)
            self._dispatch(request, Responder(_answer, self, head, 0, size), size)

    def _dispatch(self, request: Request, respond: Responder, size: int) -> None:
        self._serve(self._handler.handle, request, respond, _refuse, 1, size)

    def _answer_itself(self, header: v3.Header, request: Request | None) -> None:
        """Answer a v3 request that does not go to the bookie: authentication, START_TLS, and unknown ones."""
        response: Response
        if header.version != v3.VERSION:
            response = BareResponse(Status.EBADVERSION) if request is None else refusal(request, Status.EBADVERSION)
        elif isinstance(request, AuthMessage):
            response = _NO_AUTH
        elif isinstance(request, StartTlsRequest) and self._may_begin_tls:
            self._queued(v3.encode_response(header, StartTlsResponse(Status.EOK), 0, self._out))
            self._flush()
            self.halt()
            assert self._transport is not None
            self._handshake = self._loop.create_task(self._shake_hands(self._transport))
            return
        else:
            response = BareResponse(Status.EBADREQ)
        scope_id = 0 if request is None else scope_of(request)
        self._queued(v3.encode_response(header, response, scope_id, self._out))

    @property
    def _may_begin_tls(self) -> bool:
        """Return whether TLS is offered, and neither requests nor answers in clear text are under way.

        A transport that is full of clear text would tell TLS that it has room again, and not this connection.
        """
        if self._transport is None or self._server.tls is None or self._is_secure or self._handshake or self._in_flight:
            return False
        return self._out_size + self._transport.get_write_buffer_size() <= PLAIN_FRAME_BYTES_MAX

    async def _shake_hands(self, plain: asyncio.Transport) -> None:
        """Serve the client under TLS; close the connection after a failed handshake."""
        assert self._server.tls is not None
        if self._start != self._end:
            # Requests in clear text behind START_TLS would be taken for authenticated ones.
            plain.abort()
            return
        try:
            transport = await self._loop.start_tls(
                plain, self, self._server.tls, server_side=True,
                ssl_handshake_timeout=self._server.limits.tls_handshake_ms / 1000,
            )  # fmt: skip
        except OSError as error:
            release(error)
            transport = None
        if transport is None or transport.is_closing():
            self._server.ended["handshake"] += 1
            self.abort()
            return
        self._is_secure, self._handshake = True, None
        self._socket = self._transport
        self._use(transport)
        transport.set_write_buffer_limits(high=TLS_PIECE_BYTES)
        self._is_shut = False
        self._body_size_max = self._server.limits.frame_size_bytes - 4
        self._deadlines.restart(self._server.now_s)
        self._handler = self._server.handler
        self._continue()

    # Answers.

    def answer(self, header: v3.Header | int, scope_id: int, size: int, response: Response) -> None:
        """Send `response` to a request of `size` bytes with `header`; a Responder has these arguments."""
        self._in_flight -= 1
        self._in_flight_size -= size
        if self.is_lost:
            self._server.in_flight.count(self)
            return
        try:
            if isinstance(header, int):
                written = v2.encode_response(header, response, self._out)
            else:
                written = v3.encode_response(header, response, scope_id, self._out)
        except Exception as error:
            if isinstance(header, int) and isinstance(error, IllegalOperation):
                self._broken(error.message)
            else:
                log.exception("An answer %s cannot be sent: its connection is closed", type(response).__name__)
                self.abort()
                self._server.in_flight.count(self)
            return
        self._queued(written)
        if self._halted:
            self.unblock()

    def _answer_adds(self, is_v2: bool, adds: Sequence[AddRun], status: Status) -> None:
        if status is Status.EOK:
            answers = [run[6] for run in adds]
        else:
            answers = [run.refusals(status, is_v2=is_v2) for run in adds]
        self._settle(*_extent_of(adds), b"".join(answers))

    def _settle_reads(self, count: int, answers: bytes) -> None:
        """Send the answers to `count` reads of a run."""
        self._settle(count, count * BODILESS_REQUEST_BYTES, answers)

    def _settle(self, count: int, size: int, answers: bytes) -> None:
        """Send the answers to `count` requests of `size` bytes."""
        self._in_flight -= count
        self._in_flight_size -= size
        if self.is_lost:
            self._server.in_flight.count(self)
            return
        self._out.append(answers)
        self._queued(len(answers))
        if self._halted:
            self.unblock()

    # Life.

    def _broken(self, problem: str) -> None:
        self._server.ended["plaintext" if self._is_shut else "protocol"] += 1
        self._finishing = True
        self._close()
        self._grace = self._loop.call_later(BROKEN_GRACE_S, self.abort)


_answer: Final = ServedConnection.answer


def _refuse(respond: Responder, request: Request, status: Status) -> None:
    respond(refusal(request, status))


def _extent_of(adds: Sequence[AddRun]) -> tuple[int, int]:
    """Return how many adds there are in runs, and the bytes that they count in flight."""
    if len(adds) == 1:
        return len(adds[0].records), adds[0].size
    return sum([len(run[3]) for run in adds]), sum([run[4] for run in adds])


class LimitedConnection(ServedConnection):
    """A connection of a server that bounds the adds or reads in progress: a request over the bound halts it.

    Reads give back their slots while the client is behind with its answers: they wait for the client. Source:
    BookieRequestProcessor.onAddRequestStart, which switches a channel's autoRead off.
    """

    def __init__(self, server: ServerState) -> None:
        super().__init__(server)
        self._next: tuple[Request, Responder, int] | None = None
        self._reads_in_progress = 0

    def _dispatch(self, request: Request, respond: Responder, size: int) -> None:
        slots = self._server.slots.get(type(request))
        if slots is None:
            super()._dispatch(request, respond, size)
        elif slots.free > 0:
            slots.free -= 1
            if type(request) is AddRequest:
                respond = respond.observed(lambda _: slots.release())
            else:
                self._reads_in_progress += 1
                respond = respond.observed(lambda _: self._read_answered(slots))
            super()._dispatch(request, respond, size)
        else:
            self._next = (request, respond, size)
            slots.waiting[self] = None
            self.halt()

    def _read_answered(self, slots: RequestSlots) -> None:
        self._reads_in_progress -= 1
        if not self.is_congested:
            slots.release()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reads_in_progress:
            self._server.slots[ReadRequest].release(self._reads_in_progress)

    def resume_writing(self) -> None:
        if self._reads_in_progress:
            self._server.slots[ReadRequest].free -= self._reads_in_progress
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._next = None

    def _take_frames(self, buffer: memoryview, at: int, end: int) -> int:
        return at  # each add and read waits for a slot of its own

    def _parse(self) -> None:
        if self._next is not None:
            waiting, self._next = self._next, None
            self._dispatch(*waiting)
            if self._halted:
                return
        super()._parse()


def _kept_bytes(request: Request, frame_bytes: int) -> int:
    """Return what a request counts in flight."""
    return frame_bytes if type(request) in _WITH_BODY else BODILESS_REQUEST_BYTES


#: Interval at which the server looks at its connections, for deadlines and for buffers larger than they need to be.
STALL_CHECK_S: Final = 1.0


class BookieServer(ServerState):
    """Serves a bookie's requests on one address, in v2 or v3 as each client speaks.

    The server itself answers authentication (none is required), START_TLS (when `tls` is given; with `requires_tls`
    nothing is served before it), other protocol versions (EBADVERSION), and unknown v3 operations (EBADREQ). Bytes that
    are not a frame or not a request close their connection. A scope in a v3 request is echoed in the answer.
    """

    def __init__(
        self,
        handler: RequestHandler,
        *,
        tls: ssl.SSLContext | None = None,
        requires_tls: bool = False,
        limits: ServerLimits = DEFAULT_LIMITS,
    ) -> None:
        super().__init__(handler, tls, requires_tls, limits)
        self._next_look: asyncio.TimerHandle | None = None
        self._claimed: list[socket.socket] = []
        self._acceptor: Acceptor | None = None

    def _look(self) -> None:
        """Look at every connection, now and again after STALL_CHECK_S."""
        self._next_look = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._look)
        self.now_s += STALL_CHECK_S  # however late this look is
        self.unfinished.look()
        self.unread.look()
        self.reads.begin()
        for connection in list(self.connections):
            connection.look(self.now_s)

    async def claim(self, host: str, port: int = 0) -> None:
        """Take `host`:`port` (0: any free port) for `start`: clients are refused until then. Raises OSError."""
        self._claimed = await claim_port(host, port)

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on the address that was claimed, else on `host`:`port` (see `port`). Raises OSError as `claim`."""
        kind = LimitedConnection if self.slots else ServedConnection
        self._acceptor = await Acceptor.listen(
            host, port, lambda: kind(self), connections_max=self.limits.connections, ended=self.ended,
            claimed=self._claimed,
        )  # fmt: skip
        self._claimed = []
        self._next_look = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._look)

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._acceptor is not None
        return self._acceptor.port

    def abort(self) -> None:
        """Close every connection at once, with requests unanswered. The server continues to accept new ones."""
        for connection in list(self.connections):
            connection.abort()

    async def close(self, grace_s: float = 5.0) -> None:
        """Take no more requests, answer those in flight for at most `grace_s` seconds, then close all connections."""
        while self._claimed:
            self._claimed.pop().close()
        if self._acceptor is None:
            return
        self._acceptor.close()
        connections = list(self.connections)
        for connection in connections:
            connection.finish()
        if connections:
            closing = [asyncio.ensure_future(connection.wait_closed()) for connection in connections]
            _, late = await asyncio.wait(closing, timeout=grace_s)
            if late:
                for connection in connections:
                    connection.abort()
                await asyncio.wait(late)
        await self._acceptor.wait_closed()
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._acceptor = None
