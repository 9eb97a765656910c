"""uvicorn's server and protocol for untrusted clients: connections, idle and stalled times are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections import Counter
from typing import Any, Final, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bkctl.http.endpoints import JSON, json_text
from bkctl.protocol.acceptor import Acceptor, release, share_of_descriptors

log: Final = logging.getLogger("bkctl.http")

#: The longest wait for a connection's first request, and for the next one after an answer.
IDLE_TIMEOUT_S: Final = 20.0
#: A client that reads nothing of its answer for so long is disconnected.
STALL_TIMEOUT_S: Final = 40.0
_LOOK_S: Final = 5.0
_PIECE_SIZE_BYTES: Final = 1 << 10
#: Connections at once, TLS handshakes included; fewer if the process may open few files.
CONNECTIONS_MAX: Final = 256
#: One in so many file descriptors of the process is for connections; the bookie's clients and files need the others.
DESCRIPTORS_SHARE: Final = 8
#: The longest TLS handshake.
HANDSHAKE_TIMEOUT_S: Final = 5.0


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 for untrusted clients: idle and stalled connections are aborted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._left = 0
        self._looking = self.loop.call_later(_LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        self._unset_keepalive_if_required()  # uvicorn leaves the timer of a reset connection
        super().connection_lost(exc)

    @property
    def is_mute(self) -> bool:
        """True until the client has sent the whole head of a request."""
        return self.cycle is None

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _look(self) -> None:
        """Abort the connection if its client neither sends a request nor reads its answer."""
        now_s = self.loop.time()
        is_answering = self.cycle is not None and not self.cycle.response_complete
        left = self.transport.get_write_buffer_size()
        if (is_answering and not left) or left != self._left:
            self._since_s, self._left = now_s, left
        if now_s - self._since_s > (STALL_TIMEOUT_S if left else IDLE_TIMEOUT_S):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(_LOOK_S, self._look)

    def data_received(self, data: bytes) -> None:
        # h11 compares only incomplete heads with its limit: one that arrives whole in a large read would pass.
        for begin in range(0, len(data), _PIECE_SIZE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[begin : begin + _PIECE_SIZE_BYTES])

    def send_400_response(self, msg: str) -> None:
        """Send the error as JSON if no answer has begun, else abort; stop the handler of the current request."""
        self._refuse()
        release(sys.exc_info()[1])  # h11 raises its errors in a cycle with this connection

    def _refuse(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json_text({"error": "The request is not valid HTTP", "hint": None}).encode()
        headers = [
            (b"content-type", JSON.encode()), (b"content-length", b"%d" % len(body)), (b"connection", b"close"),
        ]  # fmt: skip
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class BoundedServer(uvicorn.Server):
    """uvicorn's server on an Acceptor, which counts connections from accept on, before their TLS handshakes."""

    def __init__(self, config: uvicorn.Config, ended: Counter[str]) -> None:
        super().__init__(config)
        self._ended = ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        config = self.config

        def serve() -> BoundedProtocol:
            return BoundedProtocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        acceptor = Acceptor(
            sockets or [],
            serve,
            connections_max=share_of_descriptors(DESCRIPTORS_SHARE, CONNECTIONS_MAX),
            ended=self._ended,
            tls=config.ssl,
            handshake_timeout_s=HANDSHAKE_TIMEOUT_S,
        )
        self.servers = [cast("Any", acceptor)]
        self.started = True
