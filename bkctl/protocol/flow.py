"""Flow control of a bookie's end of a connection: what it may hold, when it reads, and when it ends.

Source: BookieRequestProcessor, PacketProcessorBase.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from bkctl.protocol.backpressure import (
    UNFINISHED_BYTES_MIN,
    Deadlines,
    ReadQueue,
    ReadTurns,
    RequestsInFlight,
    RequestSlots,
    ServerLimits,
    UnfinishedRequests,
    UnreadAnswers,
)
from bkctl.protocol.framing import FramedProtocol
from bkctl.protocol.handler import RequestHandler

#: Requests, and bytes of requests, of one connection that a bookie works on before it stops reading more.
IN_FLIGHT_REQUESTS_MAX: Final = 10_000
IN_FLIGHT_BYTES_MAX: Final = 64 << 20
#: TLS is given as much at once, and no more until the socket takes it: it moves all that it has into the buffer of the
#: socket's transport, and counts none of that.
TLS_PIECE_BYTES: Final = 1 << 18

log: Final = logging.getLogger("bkctl.protocol")


class ServerState:
    """State that the connections of a server share."""

    def __init__(
        self, handler: RequestHandler, tls: ssl.SSLContext | None, requires_tls: bool, limits: ServerLimits
    ) -> None:
        self.handler = handler
        self.tls = tls
        self.requires_tls = requires_tls
        self.limits = limits
        self.connections: set[ControlledConnection] = set()
        #: Connections that were not ended by their clients, by reason: Acceptor's reasons; `mute`, `unfinished`, `idle`
        #: (deadlines), `stalled` and `unread` (other clients needed the room), `plaintext` (more than START_TLS needs
        #: where TLS is required), `protocol` (not a request of the protocol).
        self.ended: Counter[str] = Counter()
        #: Seconds that the server was at work, counted by its looks at the connections. Deadlines go by this clock:
        #: while the process stands still, no client can be late.
        self.now_s = 0.0
        self.in_flight = RequestsInFlight(limits.in_flight_bytes)
        self.unfinished = UnfinishedRequests(limits.unfinished_bytes, self.ended)
        self.unread = UnreadAnswers(limits.unread_bytes, self.ended)
        self.reads = ReadTurns(limits.reads_waiting, self.unread)
        self.slots = RequestSlots.of(limits)

    def lost(self, connection: ControlledConnection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        if connection.frame_size:
            self.unfinished.update(connection, 0)
        self.unread.update(connection, 0)
        self.in_flight.forget(connection)
        for slots in self.slots.values():
            slots.waiting.pop(connection, None)


class ControlledConnection(FramedProtocol):
    """A bookie's end of one connection, without its requests: a halted connection neither reads nor parses."""

    def __init__(self, server: ServerState) -> None:
        limits = server.limits
        super().__init__(limits.frame_size_bytes)
        self._server = server
        self._is_shut = server.requires_tls  # nothing is served before TLS
        self._is_secure = False
        self._handshake: asyncio.Task[None] | None = None  # stays after one that failed
        self._socket: asyncio.Transport | None = None  # below TLS; None without TLS
        self._held: deque[memoryview] = deque()  # answers that TLS has no room for
        self._held_size = 0
        self._deadlines = Deadlines(limits, server.now_s)
        #: Reads of the disk for this client.
        self.reads = ReadQueue(self, server.reads)
        self._in_flight = 0
        self._in_flight_size = 0
        self._counted = 0  # bytes of the requests in flight that the server knows of
        self._impatience: asyncio.TimerHandle | None = None
        self._drops_answers = False
        #: Callbacks (the keys) to run once when the connection is lost. Callers add and remove them.
        self.on_lost: dict[Callable[[], None], None] = {}
        self._finishing = False
        self._continue_due = False
        #: Bytes that the server counts for an unfinished request.
        self.frame_size = 0
        self._buffer_seen = 0  # the id of the buffer at the last look

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)
        connected = transport.get_extra_info("socket")
        if connected is not None and self._server.limits.keepalive:
            _keep_alive(connected, self._server.limits)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gone.done():
            return
        super().connection_lost(exc)
        self._socket = None
        self._held.clear()
        if self._impatience is not None:
            self._impatience.cancel()
        self._handshake = None  # its error would keep this connection in a cycle
        self._server.lost(self)
        self.reads.abandon()
        while self.on_lost:
            self.on_lost.popitem()[0]()

    @property
    def is_mute(self) -> bool:
        """True until the client has sent a whole request; where TLS is required, one after TLS began."""
        return self._deadlines.awaits_first

    @property
    def _held_bytes(self) -> int:
        """Return the bytes that the buffer holds for an unfinished request; 0 for few enough.

        Room that a fast client was given ahead does not count: `look` frees it where it stays empty.
        """
        unfinished = self._end - self._start
        return min(len(self._buffer), 4 * unfinished) if unfinished > UNFINISHED_BYTES_MIN else 0

    # Requests in flight.

    def _take_on(self, count: int, size: int) -> None:
        """Count `count` requests of `size` bytes in flight; halt when too many are."""
        self._in_flight += count
        self._in_flight_size += size
        if self._in_flight >= IN_FLIGHT_REQUESTS_MAX or self._in_flight_size >= IN_FLIGHT_BYTES_MAX:
            self.halt()

    def uncounted(self) -> int:
        """Return the bytes by which requests in flight grew since the last call; negative if they shrank."""
        change = self._in_flight_size - self._counted
        self._counted = self._in_flight_size
        return change

    # Answers.

    def _flush(self) -> None:
        if self._drops_answers:
            self._out.clear()
            self._out_size = 0
        super()._flush()
        if self.is_congested and not self.is_lost:
            self._server.unread.update(self, self.unsent_bytes)
        self._server.in_flight.count(self)

    def _write(self, transport: asyncio.Transport, out: bytes) -> None:
        if self._socket is None:
            transport.write(out)
            return
        self._held.append(memoryview(out))
        self._held_size += len(out)
        self._write_held(transport)

    def _write_held(self, transport: asyncio.Transport) -> None:
        """Send what waits for TLS, in pieces, as far as it has room."""
        while self._held and not self.is_congested and not transport.is_closing():
            chunk = self._held.popleft()
            piece, rest = chunk[:TLS_PIECE_BYTES], chunk[TLS_PIECE_BYTES:]
            if rest:
                self._held.appendleft(rest)
            self._held_size -= len(piece)
            transport.write(piece)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of answers that the client has not read; 0 unless it is behind."""
        if self._transport is None or not self.is_congested:
            return 0
        below = 0 if self._socket is None else self._socket.get_write_buffer_size()
        return self._held_size + self._transport.get_write_buffer_size() + below

    # Back-pressure.

    @property
    def is_held_back(self) -> bool:
        """True if the bookie does not read for its own reasons, while the client reads its answers."""
        return self._halted and not self.is_congested

    @property
    def lacks_memory(self) -> bool:
        """True while answers that clients do not read hold as much memory as they may."""
        return self._server.unread.is_full

    def halt(self) -> None:
        """Take no more requests for now."""
        if not self._halted:
            self._halted = True
            if self._transport is not None:
                self._transport.pause_reading()

    def unblock(self) -> None:
        """Continue soon, when the reason for the halt is over."""
        if self._finishing:
            if not self._in_flight:
                self._close()
        elif not self._continue_due:
            self._continue_due = True
            self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._continue_due = False
        if not self._halted or self.is_lost or self._finishing or self.is_congested or self._handshake is not None:
            return
        if self._in_flight > IN_FLIGHT_REQUESTS_MAX // 2 or self._in_flight_size > IN_FLIGHT_BYTES_MAX // 2:
            return
        if self._server.in_flight.must_wait(self) or self._server.unfinished.is_halted(self):
            return
        self._halted = False
        self._parse()
        if not self._halted and self._transport is not None:
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._server.unread.update(self, self.unsent_bytes)
        self.halt()
        wait_ms = self._server.limits.backpressure_wait_ms
        if wait_ms >= 0 and self._impatience is None:
            self._impatience = self._loop.call_later(wait_ms / 1000, self._lose_patience)

    def _lose_patience(self) -> None:
        """Give up on a client that reads no answers. Source: PacketProcessorBase.sendResponse."""
        self._impatience = None
        if self._server.limits.closes_on_backpressure:
            self.abort()
        else:
            self._drops_answers = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._server.unread.update(self, 0)
        self._drops_answers = False
        if self._impatience is not None:
            self._impatience.cancel()
            self._impatience = None
        if self._held and self._transport is not None:
            self._write_held(self._transport)
        if not self.is_congested:
            self.reads.begin()
            self.unblock()

    # Life.

    def look(self, now_s: float) -> None:
        """Free room that the client does not fill, and close a connection that is past a deadline."""
        if self._handshake is not None or self.is_lost or self._finishing:
            return
        self._trim()
        if self._halted:
            self._deadlines.excuse(now_s)
            return
        is_busy = self._in_flight > 0 or self.is_congested
        missed = self._deadlines.missed(now_s, self._end - self._start, is_shut=self._is_shut, is_busy=is_busy)
        if missed is not None:
            reason, problem = missed
            assert self._transport is not None
            self._server.ended[reason] += 1
            log.warning("The client at %s is disconnected: it %s", self._transport.get_extra_info("peername"), problem)
            self.abort()

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
            self._server.unfinished.update(self, self._held_bytes)

    def finish(self) -> None:
        """Read no more, answer the requests in flight, then close."""
        self._finishing = True
        self.halt()
        if not self._in_flight:
            self._close()

    def _close(self) -> None:
        self._halted = True
        self._flush()
        self.is_lost = True
        if self._transport is not None:
            if self._held:
                self._transport.writelines(self._held)
                self._held.clear()
                self._held_size = 0
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        if self._handshake is not None:
            # In a handshake the transport reports the loss to TLS's own protocol, which may not pass it on.
            self._handshake.cancel()
            self._loop.call_soon(self.connection_lost, None)


def _keep_alive(connected: socket.socket, limits: ServerLimits) -> None:
    """Have the system detect clients that are gone without closing their connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", limits.keepalive_idle_s),
        ("TCP_KEEPINTVL", limits.keepalive_interval_s),
        ("TCP_KEEPCNT", limits.keepalive_count),
    ):
        if value > 0 and hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
