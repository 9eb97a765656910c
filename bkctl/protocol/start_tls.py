"""START_TLS on a bookie's end: the move of one served connection from clear text to TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import TypeAlias

from bkctl.protocol.acceptor import release
from bkctl.protocol.framing import FramedProtocol

#: Called with the transport under TLS; with None after a failed handshake.
HandshakeEnd: TypeAlias = Callable[[asyncio.Transport | None], None]


class TlsUpgrade:
    """The TLS of one connection: not offered without a `context`, then possible once."""

    __slots__ = ("_context", "_handshake_timeout_s", "_is_secure", "_task")

    def __init__(self, context: ssl.SSLContext | None, handshake_timeout_ms: int) -> None:
        self._context = context
        self._handshake_timeout_s = handshake_timeout_ms / 1000
        self._is_secure = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_possible(self) -> bool:
        """True if the connection can still begin TLS."""
        return self._context is not None and not self._is_secure and self._task is None

    @property
    def is_running(self) -> bool:
        """True during the handshake, and after a failed one."""
        return self._task is not None

    def begin(self, connection: FramedProtocol, transport: asyncio.Transport, end: HandshakeEnd) -> None:
        """Shake hands on the connection's `transport` in the background, and then call `end`."""
        self._task = asyncio.get_running_loop().create_task(self._run(connection, transport, end))

    async def _run(self, connection: FramedProtocol, transport: asyncio.Transport, end: HandshakeEnd) -> None:
        assert self._context is not None
        if connection.has_input:
            # Requests in clear text behind START_TLS would be taken for authenticated ones.
            transport.abort()
            return
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, connection, self._context, server_side=True, ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:
            release(error)
            secured = None
        if secured is None or secured.is_closing():
            end(None)
            return
        self._is_secure = True
        self._task = None
        end(secured)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def forget(self) -> None:
        """Drop the handshake of a lost connection, whose error would keep the connection in a cycle."""
        self._task = None
