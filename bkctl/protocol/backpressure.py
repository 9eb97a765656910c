"""Limits and back-pressure of a bookie's server: deadlines, requests in flight or unfinished, reads, unread answers.

A request over a bound waits in its client: its connection is not read until there is room. So memory is bounded by
`ServerLimits`, whatever clients send, and however slowly they read their answers.
Source: BookieRequestProcessor (onAddRequestStart, onReadRequestStart), PacketProcessorBase.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import typing
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    AddRequest,
    BareResponse,
    BatchReadRequest,
    ReadRequest,
    Response,
    Status,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of a BookieServer; 0 means unlimited unless stated otherwise.

    Clients beyond `connections` are disconnected as they are accepted. A connection that would exceed
    `in_flight_bytes` (over all connections), `adds_in_progress` or `reads_in_progress` (as well) is not read until
    there is room; reads of clients that are behind with reading do not count. When unfinished requests of more than
    UNFINISHED_BYTES_MIN hold more than `unfinished_bytes` (over all connections), only the connection with the oldest
    of them is read, and one without progress is closed. While clients that are behind with reading hold `unread_bytes`
    of answers or more, no reads of entries begin, and a client that reads too little is disconnected.

    Deadlines, in milliseconds: a connection is closed when its first request has not arrived within `first_request_ms`
    (START_TLS does not count, nor do requests that `requires_tls` refuses), when a request has begun and its rest does
    not arrive within `request_ms`, when the TLS handshake takes longer than `tls_handshake_ms`, and after `idle_ms`
    without a request while no answer is due. Time in which the bookie itself does not read does not count.

    Reads that wait for a disk beyond `reads_waiting` are refused with ETOOMANYREQUESTS; reads of clients that are
    behind with reading do not count. A client that takes no answer for `backpressure_wait_ms` (negative: unlimited) is
    disconnected, or with `closes_on_backpressure` False loses the answers until it reads again.

    Source: nettyMaxFrameSizeBytes, journalMaxMemorySizeMb, maxAddsInProgressLimit, maxReadsInProgressLimit,
    maxPendingReadRequestsPerThread, waitTimeoutOnResponseBackpressureMs, closeChannelOnResponseTimeout,
    serverSockKeepalive, serverTcpKeepIdle, serverTcpKeepIntvl, serverTcpKeepCnt (seconds; negative: the system's).
    """

    connections: int = 0
    frame_size_bytes: int = FRAME_SIZE_BYTES_MAX
    in_flight_bytes: int = 256 << 20
    unfinished_bytes: int = 256 << 20
    unread_bytes: int = 256 << 20
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


class Deadlines:
    """Times since which a bookie waits for its client. Time in which the bookie does not read is excused."""

    __slots__ = ("_first_since_s", "_heard_s", "_limits", "_unfinished_since_s")

    def __init__(self, limits: ServerLimits, now_s: float) -> None:
        self._limits = limits
        self._first_since_s: float | None = now_s  # None: the first request has arrived
        self._unfinished_since_s: float | None = None
        self._heard_s = now_s

    @property
    def awaits_first(self) -> bool:
        """True until the first request has arrived."""
        return self._first_since_s is not None

    def restart(self, now_s: float) -> None:
        """Restart the wait for the first request, because TLS begins."""
        self._first_since_s = now_s

    def received(self, now_s: float, *, is_whole: bool, is_unfinished: bool, is_served: bool) -> None:
        """Record input: whether it completed a request, left one unfinished, and counts as the first one."""
        if is_whole:
            self._unfinished_since_s = now_s if is_unfinished else None
            if is_served:
                self._first_since_s = None
        elif is_unfinished and self._unfinished_since_s is None:
            self._unfinished_since_s = now_s
        self._heard_s = now_s

    def excuse(self, now_s: float) -> None:
        """Restart the waits for input, because the bookie did not read."""
        self._heard_s = now_s
        if self._unfinished_since_s is not None:
            self._unfinished_since_s = now_s

    def missed(self, now_s: float, unfinished_bytes: int, *, is_shut: bool, is_busy: bool) -> tuple[str, str] | None:
        """Return the reason (a key of `BookieServer.ended`) and description of a missed deadline; None without one.

        `is_shut`: nothing is served before TLS. `is_busy`: the client waits for answers, or has answers to read.
        """
        limits = self._limits
        if _is_past(self._first_since_s, limits.first_request_ms, now_s):
            missed = "did not begin TLS" if is_shut else "sent no whole request"
            return "mute", f"{missed} within {limits.first_request_ms} ms"
        if _is_past(self._unfinished_since_s, limits.request_ms, now_s):
            return "unfinished", f"sent {unfinished_bytes} bytes of a request and no more within {limits.request_ms} ms"
        if is_busy:
            self._heard_s = now_s
        elif _is_past(self._heard_s, limits.idle_ms, now_s):
            return "idle", f"sent nothing for {limits.idle_ms} ms"
        return None


def _is_past(since_s: float | None, limit_ms: int, now_s: float) -> bool:
    return since_s is not None and 0 < limit_ms < (now_s - since_s) * 1000


#: Reads that a bookie's disks work on at once, for all connections: each may give as many bytes as a frame holds.
READS_IN_PROGRESS_MAX: Final = 32
#: An unfinished request counts against `ServerLimits.unfinished_bytes` from this size on: every connection's buffer
#: holds as much.
UNFINISHED_BYTES_MIN: Final = 1 << 12
#: While other connections wait for room, an unfinished request has this long to arrive, and a client to make progress
#: with its unread answers: to read one of PROGRESS_PARTS parts of them, and at least PROGRESS_BYTES_MIN.
STALLED_FRAME_S: Final = 5.0
PROGRESS_PARTS: Final = 16
PROGRESS_BYTES_MIN: Final = 1 << 16

log: Final = logging.getLogger("bkctl.protocol")


class ClientConnection(typing.Protocol):
    """A client's connection as these bounds and request handlers see it; `flow.py` has it."""

    is_lost: bool
    is_congested: bool
    frame_size: int
    reads: ReadQueue
    on_lost: dict[Callable[[], None], None]

    @property
    def unsent_bytes(self) -> int: ...
    @property
    def is_held_back(self) -> bool: ...
    @property
    def lacks_memory(self) -> bool: ...
    def uncounted(self) -> int: ...
    def halt(self) -> None: ...
    def unblock(self) -> None: ...
    def abort(self) -> None: ...


class RequestsInFlight:
    """Bytes of unanswered requests over all connections. Connections above the limit wait for half of it to be free."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._waiting: dict[ClientConnection, None] = {}

    def count(self, connection: ClientConnection) -> None:
        """Add what came into flight on `connection` since the last call, once for many requests.

        Halts the connection when all have too much. A lost connection counts on until its requests are answered: they
        are still in memory.
        """
        change = connection.uncounted()
        self.bytes += change
        if change > 0:
            self.must_wait(connection)
        elif change < 0 and self._waiting and self.bytes <= self._bytes_max // 2:
            waiting, self._waiting = self._waiting, {}
            for waiter in waiting:
                waiter.unblock()

    def forget(self, connection: ClientConnection) -> None:
        """Let a lost connection wait no longer."""
        self._waiting.pop(connection, None)

    def must_wait(self, connection: ClientConnection) -> bool:
        """Return True, and halt `connection`, if it may take no requests until others are answered."""
        if self.bytes < self._bytes_max:
            return False
        connection.halt()
        self._waiting[connection] = None
        return True


class UnfinishedRequests:
    """Requests that clients sent a part of, and the memory that those parts hold over all connections."""

    def __init__(self, bytes_max: int, ended: Counter[str]) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._ended = ended
        #: Bytes of each connection's unfinished request and its start, the oldest first.
        self._frames: dict[ClientConnection, tuple[int, float]] = {}
        self._halted: dict[ClientConnection, None] = {}

    def update(self, connection: ClientConnection, size: int, *, is_new: bool = False) -> None:
        """Record that `connection` holds `size` bytes (0: none) of an unfinished request; `is_new` restarts its clock.

        Above the limit the connection is halted unless no other one is read, and stalled connections are closed.
        """
        before, since_s = self._frames.get(connection, (0, 0.0))
        if is_new or not size:
            self._frames.pop(connection, None)
            self._halted.pop(connection, None)
        if size:
            is_same = before and not is_new
            self._frames[connection] = size, since_s if is_same else time.monotonic()
        connection.frame_size = size
        self.bytes += size - before
        if size <= before:
            self.resume()
        elif self._is_over:
            self.end_stalled()
            readable = len(self._frames) - len(self._halted) - 1
            if self._is_over and readable > 0 and connection in self._frames:
                self._halted[connection] = None
                connection.halt()

    def is_halted(self, connection: ClientConnection) -> bool:
        """Return True if `connection` is not read because unfinished requests hold too many bytes."""
        return connection in self._halted

    @property
    def _is_over(self) -> bool:
        return 0 < self._bytes_max < self.bytes

    def look(self) -> None:
        """Close stalled connections and resume halted ones, as far as there is need and room."""
        if self._halted:
            self.end_stalled()
            self.resume()

    def resume(self) -> None:
        """Resume halted connections, longest waiting first: as many as the limit allows, and at least one."""
        while self._halted and (not self._is_over or len(self._halted) == len(self._frames)):
            connection = next(iter(self._halted))
            del self._halted[connection]
            size, _ = self._frames.pop(connection)
            self._frames[connection] = size, time.monotonic()
            connection.unblock()

    def end_stalled(self) -> None:
        """Close connections whose requests do not arrive, the oldest first, until there is room."""
        oldest_s = time.monotonic() - STALLED_FRAME_S
        for connection, (size, since_s) in list(self._frames.items()):
            if not self._is_over:
                return
            if since_s <= oldest_s and connection in self._frames and not connection.is_held_back:
                log.warning(
                    "Disconnected a client that stopped after %d bytes of a request: unfinished requests hold %d "
                    "bytes, and other clients wait", size, self.bytes,
                )  # fmt: skip
                self._ended["stalled"] += 1
                self.update(connection, 0)
                connection.abort()


class UnreadAnswers:
    """Answers that clients do not read, of all connections that are behind with reading, and the memory they hold."""

    def __init__(self, bytes_max: int, ended: Counter[str]) -> None:
        self.bytes = 0
        #: True if no more answers with entries may be prepared.
        self.is_full = False
        self._bytes_max = bytes_max
        self._ended = ended
        #: Of each connection: its bytes now, and bytes and time when its client last made progress.
        self._held: dict[ClientConnection, tuple[int, int, float]] = {}

    def update(self, connection: ClientConnection, size: int) -> None:
        """Record that `connection` holds `size` bytes of answers; 0: it caught up, or is lost."""
        before, progress_size, progress_s = self._held.pop(connection, (0, 0, 0.0))
        if size:
            if not before or size <= progress_size - max(PROGRESS_BYTES_MIN, progress_size // PROGRESS_PARTS):
                progress_size, progress_s = size, time.monotonic()
            self._held[connection] = size, max(size, progress_size), progress_s
        self.bytes += size - before
        self.is_full = 0 < self._bytes_max <= self.bytes

    def look(self) -> None:
        """Close connections without progress for STALLED_FRAME_S, the largest first, until there is room."""
        if not self.is_full:
            return
        for connection in list(self._held):
            self.update(connection, connection.unsent_bytes)
        stalled_s = time.monotonic() - STALLED_FRAME_S
        for connection, (size, _, progress_s) in sorted(self._held.items(), key=itemgetter(1), reverse=True):
            if not self.is_full:
                return
            if progress_s <= stalled_s:
                log.warning(
                    "Disconnected a client that reads too little of %d bytes of answers: unread answers hold %d bytes, "
                    "and other clients wait", size, self.bytes,
                )  # fmt: skip
                self._ended["unread"] += 1
                self.update(connection, 0)
                connection.abort()


class ReadTurns:
    """The reads of all connections: those that wait, at most `count_max` (0: unlimited), and whose turn is next."""

    def __init__(self, count_max: int, unread: UnreadAnswers) -> None:
        #: Reads in `_queues`. Reads of a client that is behind wait for the client, not for a turn, and do not count.
        self.count = 0
        self.count_max = count_max
        self.in_progress_count = 0
        self._unread = unread
        #: Queues (the keys) with reads that may begin, in the order of their turns.
        self._queues: dict[ReadQueue, None] = {}

    @property
    def room(self) -> int:
        """Return how many more reads may wait."""
        return max(0, self.count_max - self.count) if self.count_max else sys.maxsize

    def add(self, queue: ReadQueue, count: int = 0) -> None:
        """Give `queue`, to which `count` reads came, a turn behind the others, unless it waits for one."""
        if queue in self._queues:
            self.count += count
        else:
            self._insert(queue)
        self.begin()

    def _insert(self, queue: ReadQueue) -> None:
        self._queues[queue] = None
        self.count += queue.count

    def drop(self, queue: ReadQueue) -> None:
        """Take `queue` out of the turns: it is the next one's, or its connection is lost."""
        if queue in self._queues:
            del self._queues[queue]
            self.count -= queue.count

    def begin(self) -> None:
        """Begin one read of each queue in turn, as far as there is room."""
        while self._queues and self.in_progress_count < READS_IN_PROGRESS_MAX and not self._unread.is_full:
            queue = next(iter(self._queues))
            self.drop(queue)
            if queue.begin_one():
                self._insert(queue)


class ReadQueue:
    """Reads of the disk for one connection. They wait for their turns, and while the client is behind."""

    def __init__(self, connection: ClientConnection, turns: ReadTurns) -> None:
        #: Requests in the queue, of which a read may serve several.
        self.count = 0
        self._connection: ClientConnection | None = connection  # None: it is lost
        self._turns = turns
        self._queue: deque[tuple[Callable[[Response], None], Callable[[], asyncio.Future[Any]], int]] = deque()

    def add(
        self, respond: Callable[[Response], None], start: Callable[[], asyncio.Future[Any]], count: int = 1
    ) -> bool:
        """Queue a read for `count` requests; see Responder.read."""
        turns = self._turns
        if count > turns.room:
            return False
        if self._connection is None:
            respond(BareResponse(Status.EIO))
            return True
        self._queue.append((respond, start, count))
        self.count += count
        turns.add(self, count)
        return True

    @property
    def room(self) -> int:
        """Return how many more reads may wait, of all connections together."""
        return self._turns.room

    def begin(self) -> None:
        """Begin reads as far as there is room: the client caught up."""
        if self._queue:
            self._turns.add(self)
        else:
            self._turns.begin()

    def begin_one(self) -> bool:
        """Begin a read unless the client is behind; return whether another one may begin."""
        if not self._queue or self._connection is None or self._connection.is_congested:
            return False
        respond, start, count = self._queue.popleft()
        self.count -= count
        try:
            read = start()
        except Exception:
            log.exception("Disconnected a client whose read could not begin")
            self._connection.abort()
            self.abandon()
            respond(BareResponse(Status.EIO))
            return False
        self._turns.in_progress_count += 1
        read.add_done_callback(self._finished)
        return bool(self._queue)

    def _finished(self, _: asyncio.Future[Any]) -> None:
        self._turns.in_progress_count -= 1
        self._turns.begin()

    def abandon(self) -> None:
        """Drop the queued reads of a connection that is lost or aborted, and take their requests out of flight."""
        self._connection = None
        self._turns.drop(self)
        self.count = 0
        while self._queue:
            respond, _, _ = self._queue.popleft()
            respond(BareResponse(Status.EIO))
        self._turns.begin()


class RequestSlots:
    """The number of requests of a kind that may still begin, and the connections that wait for one to end."""

    __slots__ = ("free", "waiting")

    def __init__(self, count: int) -> None:
        #: Below 0 while reads continue whose client caught up: they gave their slots to others meanwhile.
        self.free = count
        self.waiting: dict[ClientConnection, None] = {}

    @staticmethod
    def of(limits: ServerLimits) -> dict[type, RequestSlots]:
        """Return the slots of each type of request that `limits` bounds."""
        slots: dict[type, RequestSlots] = {}
        if limits.adds_in_progress:
            slots[AddRequest] = RequestSlots(limits.adds_in_progress)
        if limits.reads_in_progress:
            slots[ReadRequest] = slots[BatchReadRequest] = RequestSlots(limits.reads_in_progress)
        return slots

    def release(self, count: int = 1) -> None:
        """Free the slots of `count` requests, and resume the connections that wait."""
        self.free += count
        waiting, self.waiting = self.waiting, {}
        for connection in waiting:
            connection.unblock()
