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
