"""The bookie's end of its TCP connections: v2 and v3 as the client speaks, START_TLS, bounds on what is in flight.

What a bookie cannot take waits in its client: a connection over a bound is not read any more until there is room. So
memory is bounded by `ServerLimits`, whatever clients send, and however slowly they read their answers.
Source: BookieNettyServer, BookieRequestHandler, BookieRequestProcessor, PacketProcessorBase.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import time
import typing
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from bkctl.errors import BkctlError, IllegalOperation, Unauthorized
from bkctl.protocol import v2, v3
from bkctl.protocol.acceptor import Acceptor, release
from bkctl.protocol.add_runs import AddRun, AnswerAdds, refusals, take_run
from bkctl.protocol.connection import FramedProtocol, scope_of
from bkctl.protocol.messages import (
    AUTH_DISABLED_PLUGIN,
    FRAME_SIZE_BYTES_MAX,
    AddRequest,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BatchReadRequest,
    ReadRequest,
    Request,
    Respond,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    Status,
    refusal,
)

#: Requests, and bytes of requests, of one connection that a bookie works on before it stops reading more.
IN_FLIGHT_REQUESTS_MAX: Final = 10_000
IN_FLIGHT_BYTES_MAX: Final = 64 << 20
#: Reads of one connection that a bookie's disks work on at once: each may give as many bytes as a frame holds.
READS_IN_PROGRESS_MAX: Final = 32
log: Final = logging.getLogger("bkctl.protocol")

#: An unfinished request counts against `ServerLimits.unfinished_bytes` from this size on: every connection's buffer
#: holds as much.
UNFINISHED_BYTES_MIN: Final = 1 << 12
#: While others wait for room, an unfinished request gets so long to arrive.
STALLED_FRAME_S: Final = 5.0
#: How often the server looks at its connections: for deadlines, and for buffers that are larger than they need to be.
STALL_CHECK_S: Final = 1.0
#: The largest frame before TLS where TLS is required: START_TLS takes some 20 bytes, an authentication before it more.
PLAIN_FRAME_BYTES_MAX: Final = 1 << 12

#: A client that broke the protocol gets so long to take the answers before.
BROKEN_GRACE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a BookieServer takes; 0 is no limit, where nothing else is said.

    Clients beyond `connections` are turned away as they are accepted. A connection that would pass `in_flight_bytes`
    (of all connections together), `adds_in_progress` or `reads_in_progress` (as well) is not read until there is room.
    While unfinished requests of more than UNFINISHED_BYTES_MIN hold more than `unfinished_bytes` (of all connections),
    all but the oldest of them wait in their clients, and one that makes no progress loses its connection.

    Deadlines, in milliseconds: a connection ends when its first request has not arrived within `first_request_ms`
    (START_TLS does not count as one, nor does what is refused before it with `requires_tls`), when a request has begun
    and the rest of it does not arrive within `request_ms`, when TLS is not agreed within `tls_handshake_ms`, and after
    `idle_ms` without a request while no answer is due. Time in which the bookie itself does not read does not count.

    Reads that wait for a disk beyond `reads_waiting` are refused with ETOOMANYREQUESTS. A client that takes no answer
    for `backpressure_wait_ms` (negative: for ever) loses its connection, or with `closes_on_backpressure` False the
    answers until it reads again.

    Source: nettyMaxFrameSizeBytes, journalMaxMemorySizeMb, maxAddsInProgressLimit, maxReadsInProgressLimit,
    maxPendingReadRequestsPerThread, waitTimeoutOnResponseBackpressureMs, closeChannelOnResponseTimeout,
    serverSockKeepalive, serverTcpKeepIdle, serverTcpKeepIntvl, serverTcpKeepCnt (seconds; negative: the system's).
    """

    connections: int = 0
    frame_size_bytes: int = FRAME_SIZE_BYTES_MAX
    in_flight_bytes: int = 256 << 20
    unfinished_bytes: int = 256 << 20
    first_request_ms: int = 60_000
    request_ms: int = 60_000
    idle_ms: int = 0
    tls_handshake_ms: int = 10_000
    adds_in_progress: int = 0
    reads_in_progress: int = 0
    reads_waiting: int = 0
    backpressure_wait_ms: int = -1
    closes_on_backpressure: bool = False
    keepalive: bool = True
    keepalive_idle_s: int = -1
    keepalive_interval_s: int = -1
    keepalive_count: int = -1


DEFAULT_LIMITS: Final = ServerLimits()


class RequestHandler(typing.Protocol):
    """What a BookieServer serves: the bookie."""

    def handle(self, request: Request, respond: Respond) -> None:
        """Take one request, and see that `respond` is called exactly once, now or later, from the loop's thread.

        Never given: authentication, START_TLS, and what the protocol itself refuses. A BkctlError raised here is
        answered with its status (EIO when it has none); any other exception is answered EIO, ends the connection and
        goes to the loop's exception handler. `respond` itself raises nothing.
        """


class AddRunHandler(RequestHandler, typing.Protocol):
    """A handler that takes many adds at once."""

    def handle_adds(self, adds: AddRun, answer: AnswerAdds) -> None:
        """`handle` for a run of adds: `answer` is called once for all of them. Raises as `handle` does."""

    def adds_at_once(self) -> int:
        """How many adds a run may have now; 1 or more."""


class _TlsOnly:
    """Serves clients that have not begun TLS, where they must."""

    def handle(self, request: Request, respond: Respond) -> None:
        raise Unauthorized("This bookie serves no client without TLS")


class _ServedConnection(FramedProtocol):
    """A bookie's end of one connection. It speaks v3 until the first frame that is none, and v2 from then on."""

    def __init__(self, server: BookieServer) -> None:
        super().__init__(server.limits.frame_size_bytes)
        self._server = server
        self._handler: RequestHandler = server.handler
        self._is_shut = server.requires_tls  # nothing is served before TLS
        if self._is_shut:
            self._handler = _TlsOnly()
            self._body_size_max = min(self._body_size_max, PLAIN_FRAME_BYTES_MAX - 4)
        self._is_v2 = False
        self._secure = False
        self._upgrade: asyncio.Task[None] | None = None
        self._in_flight = 0
        self._in_flight_size = 0
        self._counted = 0  # bytes of the requests in flight that the server knows of
        self._reads: deque[tuple[Respond, Callable[[], asyncio.Future[Any]]]] = deque()  # not begun yet
        self._reads_in_progress = 0
        self._impatience: asyncio.TimerHandle | None = None
        self._drops_answers = False
        #: Called once when the connection is lost.
        self.on_lost: dict[Callable[[], None], None] = {}
        self._finishing = False
        self._continue_due = False
        #: Bytes that the server counts for an unfinished request.
        self.frame_size = 0
        # The server's clock: since when the first request is waited for (None: it came), since when an unfinished
        # request is, and when bytes came last.
        self._mute_since_s: float | None = server.now_s
        self._unfinished_since_s: float | None = None
        self._heard_s = server.now_s
        self._buffer_seen = 0  # the id of the buffer at the last look
        self._take_frames = self._adds_of(self._handler)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        found = transport.get_extra_info("socket")
        if found is not None and self._server.limits.keepalive:
            _keep_alive(found, self._server.limits)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gone.done():
            return
        super().connection_lost(exc)
        self._take_frames = None
        if self._impatience is not None:
            self._impatience.cancel()
        self._server.lost(self)
        self._server.reads_waiting -= len(self._reads)
        while self._reads:
            self._reads.popleft()[0](BareResponse(Status.EIO))  # nobody hears it, but it is in flight no more
        while self.on_lost:
            self.on_lost.popitem()[0]()

    # Requests.

    def _parse(self) -> None:
        start, had = self._start, self._end - self._start
        super()._parse()
        server = self._server
        unfinished = self._end - self._start
        if had and (not unfinished or self._start != start):  # at least one request was whole
            self._unfinished_since_s = server.now_s if unfinished else None
            if not self._is_shut:
                self._mute_since_s = None
        elif unfinished and self._unfinished_since_s is None:
            self._unfinished_since_s = server.now_s
        self._heard_s = server.now_s
        if self.frame_size or unfinished > UNFINISHED_BYTES_MIN:
            server.note_frame(self, 0 if self._halted else self._held_bytes, is_new=self._start != start)
        server.count(self)

    @property
    def _held_bytes(self) -> int:
        """Return the bytes that the buffer holds for an unfinished request; 0 for few enough.

        Room that a fast client was given ahead does not count: `look` takes it back where it stays empty.
        """
        unfinished = self._end - self._start
        return min(len(self._buffer), 4 * unfinished) if unfinished > UNFINISHED_BYTES_MIN else 0

    def _adds_of(self, handler: RequestHandler) -> Callable[[memoryview, int, int], int] | None:
        """What takes adds in runs, where `handler` does."""
        if not hasattr(handler, "handle_adds"):
            return None
        return functools.partial(self._take_adds, cast("AddRunHandler", handler))

    def _take_adds(self, handler: AddRunHandler, buffer: memoryview, at: int, end: int) -> int:
        """Have `handler` serve the run of adds that begins at byte `at`, if one does; returns where it ends."""
        most = min(handler.adds_at_once(), IN_FLIGHT_REQUESTS_MAX - self._in_flight)
        found = take_run(buffer, at, end, self._body_size_max, most, is_v2=self._is_v2)
        if found is None:
            return at
        stop, adds = found
        size = stop - at
        self._start = stop
        self._begin(len(adds.records), size)
        in_flight = self._in_flight
        answer = functools.partial(self._answer_adds, adds, self._is_v2, size)
        try:
            handler.handle_adds(adds, answer)
        except BkctlError as error:
            answer(status_of(error))
        except Exception:
            if self._in_flight == in_flight:  # not answered yet, so it would be in flight for ever
                answer(Status.EIO)
            self.abort()
            raise
        return stop

    def _begin(self, count: int, size: int) -> None:
        """Take note of `count` more requests of `size` bytes."""
        self._in_flight += count
        self._in_flight_size += size
        if self._in_flight >= IN_FLIGHT_REQUESTS_MAX or self._in_flight_size >= IN_FLIGHT_BYTES_MAX:
            self.halt()

    def _frame(self, buffer: memoryview, at: int, end: int) -> None:
        size = end - at
        respond: Respond
        request: Request | None
        if not self._is_v2:
            call = v3.decode_request(buffer, at, end)
            if call is not None:
                header, request = call
                if request is None or header.version != v3.VERSION or type(request) in _OWN_REQUESTS:
                    self._answer_call(header, request)
                    return
                respond = functools.partial(self._respond_call, header, scope_of(request), size)
                self._dispatch(request, respond, size)
                return
            self._is_v2 = True
        head, request = v2.decode_request(buffer, at, end)
        if isinstance(request, AuthMessage):
            self._queued(v2.encode_response(head, _NO_AUTH, self._out))
        elif head >> 24 > v2.VERSION:
            self._queued(v2.encode_response(head, refusal(request, Status.EBADVERSION), self._out))
        else:
            self._dispatch(request, functools.partial(self._respond_packet, head, size), size)

    def _dispatch(self, request: Request, respond: Respond, size: int) -> None:
        self._begin(1, size)
        in_flight = self._in_flight
        try:
            self._handler.handle(request, respond)
        except BkctlError as error:
            respond(refusal(request, status_of(error)))
        except Exception:
            if self._in_flight == in_flight:
                respond(refusal(request, Status.EIO))
            self.abort()
            raise

    def _answer_call(self, header: v3.Header, request: Request | None) -> None:
        """Answer a v3 request that is none of the bookie's business."""
        response: Response
        if header.version != v3.VERSION:
            response = BareResponse(Status.EBADVERSION) if request is None else refusal(request, Status.EBADVERSION)
        elif isinstance(request, AuthMessage):
            response = _NO_AUTH
        elif isinstance(request, StartTlsRequest) and self._may_upgrade():
            self._queued(v3.encode_response(header, StartTlsResponse(Status.EOK), 0, self._out))
            self._flush()
            self.halt()
            self._upgrade = self._loop.create_task(self._start_tls())
            return
        else:
            response = BareResponse(Status.EBADREQ)
        scope_id = 0 if request is None else scope_of(request)
        self._queued(v3.encode_response(header, response, scope_id, self._out))

    def _may_upgrade(self) -> bool:
        return self._server.tls is not None and not self._secure and self._upgrade is None and not self._in_flight

    async def _start_tls(self) -> None:
        assert self._transport is not None
        assert self._server.tls is not None
        if self._start != self._end:
            # Requests in clear behind START_TLS would be taken for authenticated ones.
            self._transport.abort()
            return
        try:
            transport = await self._loop.start_tls(
                self._transport,
                self,
                self._server.tls,
                server_side=True,
                ssl_handshake_timeout=self._server.limits.tls_handshake_ms / 1000,
            )
        except OSError as error:
            release(error)
            transport = None
        if transport is None or transport.is_closing():
            self._server.ended["handshake"] += 1
            self.abort()
            return
        self._use(transport)
        self._secure = True
        self._is_shut = False
        self._body_size_max = self._server.limits.frame_size_bytes - 4
        self._mute_since_s = self._server.now_s
        self._handler = self._server.handler
        self._take_frames = self._adds_of(self._handler)
        self._upgrade = None
        self._continue()

    # Answers.

    def _respond_packet(self, head: int, size: int, response: Response) -> None:
        self._in_flight -= 1
        self._in_flight_size -= size
        if self._lost:
            self._server.count(self)
            return
        try:
            written = v2.encode_response(head, response, self._out)
        except IllegalOperation as error:
            self._broken(error.message)
            return
        except Exception:  # noqa: BLE001 - logged
            self._cannot_answer(response)
            return
        self._queued(written)
        if self._halted:
            self.unblock()

    def _respond_call(self, header: v3.Header, scope_id: int, size: int, response: Response) -> None:
        self._in_flight -= 1
        self._in_flight_size -= size
        if self._lost:
            self._server.count(self)
            return
        try:
            written = v3.encode_response(header, response, scope_id, self._out)
        except Exception:  # noqa: BLE001 - logged
            self._cannot_answer(response)
            return
        self._queued(written)
        if self._halted:
            self.unblock()

    def _cannot_answer(self, response: Response) -> None:
        """End the connection, and none but this one, for an answer that has no form in its protocol."""
        log.exception("An answer %s cannot be sent: its connection is closed", type(response).__name__)
        self.abort()
        self._server.count(self)

    def _answer_adds(self, adds: AddRun, is_v2: bool, size: int, status: Status) -> None:
        self._in_flight -= len(adds.records)
        self._in_flight_size -= size
        if self._lost:
            self._server.count(self)
            return
        answers = adds.answers
        if status is not Status.EOK:
            answers = refusals(adds, status, is_v2=is_v2)
        self._out.append(answers)
        self._queued(len(answers))
        if self._halted:
            self.unblock()

    def respond_timed(
        self, observe: Callable[[float, bool], None], began_s: float, respond: Respond, response: Response
    ) -> None:
        """See BookieServer.timed."""
        observe(time.monotonic() - began_s, response.status is Status.EOK)
        respond(response)

    def _flush(self) -> None:
        if self._drops_answers:
            self._out.clear()
            self._out_size = 0
        super()._flush()
        self._server.count(self)

    # Back-pressure: reads begin while their answers find room, and a halted connection neither reads nor parses.

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is read for our own reasons: the client takes its answers."""
        return self._halted and not self._write_paused

    @property
    def is_lost(self) -> bool:
        """Whether the connection is closed."""
        return self._lost

    @property
    def is_v2(self) -> bool:
        """Whether the client speaks v2."""
        return self._is_v2

    @property
    def is_congested(self) -> bool:
        """Whether the client takes its answers slower than they come."""
        return self._write_paused

    def read(self, respond: Respond, start: Callable[[], asyncio.Future[Any]]) -> None:
        """See BookieServer.read."""
        self._reads.append((respond, start))
        self._server.reads_waiting += 1
        self._begin_reads()

    def _begin_reads(self) -> None:
        while self._reads and self._reads_in_progress < READS_IN_PROGRESS_MAX and not self._write_paused:
            self._reads_in_progress += 1
            self._server.reads_waiting -= 1
            self._reads.popleft()[1]().add_done_callback(self._read_over)

    def _read_over(self, _: asyncio.Future[Any]) -> None:
        self._reads_in_progress -= 1
        self._begin_reads()

    def halt(self) -> None:
        """Take no more requests for now."""
        if not self._halted:
            self._halted = True
            if self._transport is not None:
                self._transport.pause_reading()

    def unblock(self) -> None:
        """Continue soon, when what halted the connection is over."""
        if self._finishing:
            if not self._in_flight:
                self._close()
        elif not self._continue_due:
            self._continue_due = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._continue_due = False
        if not self._halted or self._lost or self._finishing or self._write_paused or self._upgrade is not None:
            return
        if self._in_flight > IN_FLIGHT_REQUESTS_MAX // 2 or self._in_flight_size > IN_FLIGHT_BYTES_MAX // 2:
            return
        if self._server.has_to_wait(self) or self._server.frame_waits(self):
            return
        self._halted = False
        self._parse()
        if not self._halted and self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.halt()
        wait_ms = self._server.limits.backpressure_wait_ms
        if wait_ms >= 0 and self._impatience is None:
            self._impatience = self._loop.call_later(wait_ms / 1000, self._lose_patience)

    def _lose_patience(self) -> None:
        """The client took nothing for too long. Source: PacketProcessorBase.sendResponse."""
        self._impatience = None
        if self._server.limits.closes_on_backpressure:
            self.abort()
        else:
            self._drops_answers = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drops_answers = False
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
        self._begin_reads()
        self.unblock()

    # Life.

    def look(self, now_s: float) -> None:
        """Free room that the client does not fill, and close a connection that is past a deadline."""
        if self._upgrade is not None or self._lost or self._finishing:
            return
        self._trim()
        limits = self._server.limits
        if self._halted:
            # What does not arrive is not the client's fault now.
            self._heard_s = now_s
            if self._unfinished_since_s is not None:
                self._unfinished_since_s = now_s
        elif self._mute_since_s is not None and 0 < limits.first_request_ms < (now_s - self._mute_since_s) * 1000:
            missed = "did not begin TLS" if self._is_shut else "sent no whole request"
            self._end_for("mute", f"{missed} within {limits.first_request_ms} ms")
        elif (
            self._unfinished_since_s is not None
            and 0 < limits.request_ms < (now_s - self._unfinished_since_s) * 1000
        ):  # fmt: skip
            problem = f"sent {self._end - self._start} bytes of a request and no more within {limits.request_ms} ms"
            self._end_for("unfinished", problem)
        elif self._in_flight or self._write_paused:
            self._heard_s = now_s
        elif 0 < limits.idle_ms < (now_s - self._heard_s) * 1000:
            self._end_for("idle", f"sent nothing for {limits.idle_ms} ms")

    def _trim(self) -> None:
        """Take a smaller buffer where the client has not filled this one since the last look."""
        present = self._end - self._start
        if id(self._buffer) != self._buffer_seen or len(self._buffer) <= 2 * (present + UNFINISHED_BYTES_MIN):
            self._buffer_seen = id(self._buffer)
            return
        fresh = memoryview(bytearray(present + UNFINISHED_BYTES_MIN if present else 0))
        fresh[:present] = self._buffer[self._start : self._end]
        self._buffer, self._start, self._end, self._is_viewed = fresh, 0, present, False
        self._chunk_size = UNFINISHED_BYTES_MIN
        if self.frame_size:
            self._server.note_frame(self, self._held_bytes)

    def _end_for(self, reason: str, problem: str) -> None:
        assert self._transport is not None
        self._server.ended[reason] += 1
        log.warning("The client at %s is disconnected: it %s", self._transport.get_extra_info("peername"), problem)
        self.abort()

    def _broken(self, problem: str) -> None:
        self._server.ended["plaintext" if self._is_shut else "protocol"] += 1
        self._finishing = True
        self._close()
        self._loop.call_later(BROKEN_GRACE_S, self.abort)

    def finish(self) -> None:
        """Read no more, answer what was read, then close."""
        self._finishing = True
        self.halt()
        if not self._in_flight:
            self._close()

    def _close(self) -> None:
        self._halted = True
        self._flush()
        self._lost = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        if self._upgrade is not None:
            # The transport tells TLS's own protocol in a handshake, which may not tell us.
            self._upgrade.cancel()
            self._loop.call_soon(self.connection_lost, None)

    async def wait_closed(self) -> None:
        """Wait until the socket is closed."""
        await asyncio.shield(self._gone)

    def uncounted(self) -> int:
        """How many bytes more are in flight than at the last call."""
        change = self._in_flight_size - self._counted
        self._counted = self._in_flight_size
        return change


class _Slots:
    """So many requests of a kind may be in progress; and the connections that wait for a slot."""

    __slots__ = ("free", "waiting")

    def __init__(self, count: int) -> None:
        self.free = count
        self.waiting: dict[_LimitedConnection, None] = {}


class _LimitedConnection(_ServedConnection):
    """A connection of a server that bounds the adds or reads in progress: with its next request, all of it waits.

    Source: BookieRequestProcessor.onAddRequestStart, which switches a channel's autoRead off.
    """

    def __init__(self, server: BookieServer) -> None:
        super().__init__(server)
        self._next: tuple[Request, Respond, int] | None = None

    def _dispatch(self, request: Request, respond: Respond, size: int) -> None:
        slots = self._server.slots.get(type(request))
        if slots is None:
            super()._dispatch(request, respond, size)
        elif slots.free > 0:
            slots.free -= 1
            super()._dispatch(request, functools.partial(self._release, slots, respond), size)
        else:
            self._next = (request, respond, size)
            slots.waiting[self] = None
            self.halt()

    def _adds_of(self, handler: RequestHandler) -> None:
        return None  # each add waits for a slot of its own

    def _release(self, slots: _Slots, respond: Respond, response: Response) -> None:
        slots.free += 1
        waiting, slots.waiting = slots.waiting, {}
        for each in waiting:
            each.unblock()
        respond(response)

    def _parse(self) -> None:
        if self._next is not None:
            waiting, self._next = self._next, None
            self._dispatch(*waiting)
            if self._halted:
                return
        super()._parse()


def _keep_alive(connected: socket.socket, limits: ServerLimits) -> None:
    """Have the system find out about clients that are gone without a word."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", limits.keepalive_idle_s),
        ("TCP_KEEPINTVL", limits.keepalive_interval_s),
        ("TCP_KEEPCNT", limits.keepalive_count),
    ):
        if value > 0 and hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def status_of(error: BaseException) -> Status:
    """Return the status that tells a client of `error`; EIO for one that no status stands for."""
    return Status.EIO if not isinstance(error, BkctlError) or error.v3_code is None else Status(error.v3_code)


_OWN_REQUESTS: Final = frozenset({AuthMessage, StartTlsRequest})
_NO_AUTH: Final = AuthResponse(Status.EOK, AUTH_DISABLED_PLUGIN, b"")


def _connection_of(respond: Respond) -> _ServedConnection:
    """The connection that `respond` answers on: it is a partial of one of that one's methods."""
    return cast("_ServedConnection", cast("Any", respond).func.__self__)


class BookieServer:
    """Serves a bookie's requests on one address, v2 and v3 on each connection as its client speaks.

    It answers by itself what needs no bookie: authentication (none is required), START_TLS (when `tls` is given; with
    `requires_tls` nothing is served before it), other protocol versions (EBADVERSION), and v3 operations that do not
    exist (EBADREQ). Bytes that are no frame or no request close their connection. A scope in a v3 request is echoed in
    the answer.
    """

    def __init__(
        self,
        handler: RequestHandler,
        *,
        tls: ssl.SSLContext | None = None,
        requires_tls: bool = False,
        limits: ServerLimits = DEFAULT_LIMITS,
    ) -> None:
        self.handler = handler
        self.tls = tls
        self.requires_tls = requires_tls
        self.limits = limits
        self.connections: set[_ServedConnection] = set()
        #: Connections that ended for another reason than their clients' wish, by reason: those of Acceptor; `mute`,
        #: `unfinished`, `idle` (deadlines), `stalled` (others needed the room), `plaintext` (more than START_TLS needs
        #: where TLS is required), `protocol` (no request of the protocol).
        self.ended: Counter[str] = Counter()
        #: Seconds that the server was at work, counted by its looks at the connections. Their deadlines go by it: while
        #: the process stands still, no client can be late.
        self.now_s = 0.0
        #: Bytes of requests that are not answered yet, and reads that are not begun yet, over all connections.
        self.in_flight_bytes = 0
        self.reads_waiting = 0
        self.slots: dict[type, _Slots] = {}
        if limits.adds_in_progress:
            self.slots[AddRequest] = _Slots(limits.adds_in_progress)
        if limits.reads_in_progress:
            self.slots[ReadRequest] = self.slots[BatchReadRequest] = _Slots(limits.reads_in_progress)
        self._waiting: dict[_ServedConnection, None] = {}
        #: Bytes of unfinished requests; their connections, the oldest request first, each with
        #: its bytes and since when; and those of them that are not read.
        self.unfinished_bytes = 0
        self._frames: dict[_ServedConnection, tuple[int, float]] = {}
        self._frames_waiting: dict[_ServedConnection, None] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._server: Acceptor | None = None

    def lost(self, connection: _ServedConnection) -> None:
        """A connection is no more."""
        self.connections.discard(connection)
        if connection.frame_size:
            self.note_frame(connection, 0)

    def count(self, connection: _ServedConnection) -> None:
        """Take note of what is in flight on `connection` now, once for many requests; halt it when all have too much.

        A connection that is lost counts on until its requests are answered: they are in memory still.
        """
        change = connection.uncounted()
        if change > 0:
            self.in_flight_bytes += change
            self.has_to_wait(connection)
        elif change < 0:
            self.in_flight_bytes += change
            if self._waiting and self.in_flight_bytes <= self.limits.in_flight_bytes // 2:
                waiting, self._waiting = self._waiting, {}
                for each in waiting:
                    each.unblock()

    # Unfinished requests: what clients have sent of them is in memory.

    def note_frame(self, connection: _ServedConnection, size: int, *, is_new: bool = False) -> None:
        """Take note that `connection` holds `size` bytes of an unfinished request, one that `is_new`; 0: of none.

        Where all have too many, it is halted, unless no other one is read; and whose requests do not arrive are ended.
        """
        before, since = self._frames.get(connection, (0, 0.0))
        if is_new or not size:
            self._frames.pop(connection, None)
            self._frames_waiting.pop(connection, None)
        if size:
            is_same = before and not is_new
            self._frames[connection] = size, since if is_same else time.monotonic()
        connection.frame_size = size
        self.unfinished_bytes += size - before
        if size <= before:
            self._read_on()
        elif self._has_too_much:
            self._end_stalled()
            others = len(self._frames) - len(self._frames_waiting) - 1
            if self._has_too_much and others > 0 and connection in self._frames:
                self._frames_waiting[connection] = None
                connection.halt()

    def frame_waits(self, connection: _ServedConnection) -> bool:
        """Whether `connection` is not read because unfinished requests have too many bytes."""
        return connection in self._frames_waiting

    @property
    def _has_too_much(self) -> bool:
        return 0 < self.limits.unfinished_bytes < self.unfinished_bytes

    def _read_on(self) -> None:
        """Read on where there is room, and one in any case, who waits longest first."""
        while self._frames_waiting and (not self._has_too_much or len(self._frames_waiting) == len(self._frames)):
            connection = next(iter(self._frames_waiting))
            del self._frames_waiting[connection]
            size, _ = self._frames.pop(connection)
            self._frames[connection] = size, time.monotonic()
            connection.unblock()

    def _end_stalled(self) -> None:
        """End the connections whose requests do not arrive, the oldest first, until there is room."""
        oldest = time.monotonic() - STALLED_FRAME_S
        for connection, (size, since) in list(self._frames.items()):
            if not self._has_too_much:
                return
            if since <= oldest and connection in self._frames and not connection.is_held_back:
                log.warning(
                    "A client that sent %d bytes of a request and not the rest is disconnected: such requests have "
                    "%d bytes, and others wait", size, self.unfinished_bytes,
                )  # fmt: skip
                self.ended["stalled"] += 1
                self.note_frame(connection, 0)
                connection.abort()

    def _look(self) -> None:
        """Look at every connection, now and again after STALL_CHECK_S."""
        self._next_look = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._look)
        self.now_s += STALL_CHECK_S  # however late this look is
        if self._frames_waiting:
            self._end_stalled()
            self._read_on()
        for connection in list(self.connections):
            connection.look(self.now_s)

    def has_to_wait(self, connection: _ServedConnection) -> bool:
        """Whether `connection` may take no more requests until others are answered; it is halted then."""
        if self.in_flight_bytes < self.limits.in_flight_bytes:
            return False
        connection.halt()
        self._waiting[connection] = None
        return True

    def read(self, respond: Respond, start: Callable[[], asyncio.Future[Any]]) -> bool:
        """Have `start` begin a read of the disk, now or when its answer, which goes to `respond`, finds room in memory.

        `start` gives the future of what was read, and has seen to the answer when that is done. It is never called
        once the connection is lost. Bounded are the answers of one connection: at most READS_IN_PROGRESS_MAX are being
        read, and none begins while the client is behind with those that were given. False, and nothing is done, when
        too many wait already (`ServerLimits.reads_waiting`).
        """
        if self.limits.reads_waiting and self.reads_waiting >= self.limits.reads_waiting:
            return False
        _connection_of(respond).read(respond, start)
        return True

    def timed(self, respond: Respond, observe: Callable[[float, bool], None]) -> Respond:
        """`respond` for the same request; `observe` is told the seconds until the answer, and whether that is EOK."""
        return functools.partial(_connection_of(respond).respond_timed, observe, time.monotonic(), respond)

    def on_lost(self, respond: Respond) -> dict[Callable[[], None], None]:
        """What is called (the keys) once the connection is lost that `respond` answers on; put in and take out."""
        return _connection_of(respond).on_lost

    def carries_lac(self, respond: Respond) -> bool:
        """Whether answers to reads on the connection of `respond` say the bookie's LAC: those of v2 do not."""
        return not _connection_of(respond).is_v2

    def is_lost(self, respond: Respond) -> bool:
        """Whether nobody can hear `respond` any more; any thread may ask."""
        return _connection_of(respond).is_lost

    def is_congested(self, respond: Respond) -> bool:
        """Whether the client that `respond` answers takes its answers slower than they come."""
        return _connection_of(respond).is_congested

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on `host`:`port` (0: any free port, see `port`). Raises OSError when the address cannot be had."""
        kind = _LimitedConnection if self.slots else _ServedConnection
        self._server = await Acceptor.listen(
            host, port, lambda: kind(self), connections_max=self.limits.connections, ended=self.ended
        )
        self._next_look = asyncio.get_running_loop().call_later(STALL_CHECK_S, self._look)

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None
        return self._server.port

    def abort(self) -> None:
        """Close every connection at once, with requests unanswered; new ones are served."""
        for connection in list(self.connections):
            connection.abort()

    async def close(self, grace_s: float = 5.0) -> None:
        """Take no more requests, answer those that were read for at most `grace_s` seconds, then close all."""
        if self._server is None:
            return
        self._server.close()
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
        await self._server.wait_closed()
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        self._server = None
