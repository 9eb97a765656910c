"""Limits of a bookie's server: connections, memory, requests in progress, deadlines and keep-alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bkctl.protocol.messages import FRAME_SIZE_BYTES_MAX


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
