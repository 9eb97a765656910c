"""A bookie's server: accepts clients on one address, and gives their requests to a handler.

The parts: `served_connection.py` (one client) over `flow.py`, `handler.py` (the bookie's side), `backpressure.py` and
`limits.py` (bounds and deadlines). Source: BookieNettyServer.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final

from bkctl.protocol.acceptor import Acceptor, claim_port
from bkctl.protocol.flow import ServerState
from bkctl.protocol.handler import RequestHandler
from bkctl.protocol.limits import DEFAULT_LIMITS, ServerLimits
from bkctl.protocol.served_connection import LimitedConnection, ServedConnection

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
