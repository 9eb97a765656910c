"""Accepts connections up to a bound, before their TLS handshakes, and waits where the process has no descriptors left.

The event loops' own servers accept without a bound, log a traceback for each connection that finds no descriptor, and
wait a minute for a handshake. Source: BookieNettyServer, NioEventLoop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

#: Longest TLS handshake. Source: Netty's SslHandler.
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
#: Connections accepted in one turn of the event loop, so that open connections get their turn, too.
ACCEPTS_AT_ONCE: Final = 64
BACKLOG: Final = 1024
#: Pause after accept failed for lack of resources.
ACCEPT_PAUSE_S: Final = 0.5
#: The process or the system has no resources for another socket.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log: Final = logging.getLogger("bkctl.protocol")


def share_of_descriptors(divisor: int, most: int) -> int:
    """Return the process's limit of open files divided by `divisor`, at least 1 and at most `most` (0: no bound)."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return most
    share = max(1, descriptors // divisor)
    return min(share, most) if most else share


def release(error: BaseException | None) -> None:
    """Free what the traceback of a failed handshake holds in a cycle: frames, transport, and 256 KiB of buffer.

    Python's cycle collector runs too seldom when clients fail on purpose.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__context__


class _Accepted(socket.socket):
    """A client's socket that reports once when its transport gives it up."""

    on_closed: Callable[[], None] | None = None

    def _report(self) -> None:
        report, self.on_closed = self.on_closed, None
        if report is not None:
            report()

    def close(self) -> None:
        super().close()
        self._report()

    def detach(self) -> int:
        self._report()  # uvloop closes the descriptor itself
        return super().detach()


class Acceptor:
    """Accepts connections on listening sockets and hands each to a protocol that `serve` creates.

    At most `connections_max` (0: any number) sockets are open at once, those in a TLS handshake included: further
    connections are closed as they are accepted. `tls` encrypts from the first byte; a handshake ends after
    `handshake_timeout_s`. `ended` counts, by reason, connections that ended for another reason than a client's wish:
    `connections` (over the bound), `descriptors` (attempts to accept without a free descriptor) and `handshake`.
    `close` and `wait_closed` work as asyncio.Server's.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        serve: Callable[[], asyncio.BaseProtocol],
        *,
        connections_max: int,
        ended: Counter[str],
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = TLS_HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._listeners = list(listeners)
        self._serve = serve
        self._connections_max = connections_max
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": handshake_timeout_s}
        self.ended = ended
        #: Sockets of clients that are open.
        self.open = 0
        self._is_crowded = False
        self._is_exhausted = False
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        for listener in self._listeners:
            listener.setblocking(False)
        self._resume()

    @classmethod
    async def listen(
        cls,
        host: str,
        port: int,
        serve: Callable[[], asyncio.BaseProtocol],
        *,
        connections_max: int,
        ended: Counter[str],
    ) -> Acceptor:
        """Accept connections on every address of `host`; port 0 picks a free one. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listeners: list[socket.socket] = []
        try:
            for family, kind, number, _, address in dict.fromkeys(found):
                listener = socket.socket(family, kind, number)
                listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(BACKLOG)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return cls(listeners, serve, connections_max=connections_max, ended=ended)

    @property
    def port(self) -> int:
        """Return the port of the first listening socket."""
        return int(self._listeners[0].getsockname()[1])

    def _resume(self) -> None:
        self._pause = None
        for listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                plain, _ = listener.accept()
            except OSError as error:
                # Linux also reports errors of the waiting connection itself; the next turn accepts the next one.
                if error.errno in _EXHAUSTED:
                    self._wait_for_descriptors(error)
                return
            self._is_exhausted = False
            if self._connections_max and self.open >= self._connections_max:
                plain.close()
                self._turn_away()
                continue
            accepted = _Accepted(plain.family, plain.type, plain.proto, fileno=plain.detach())
            accepted.setblocking(False)
            accepted.on_closed = self._closed
            self.open += 1
            task = self._loop.create_task(self._begin(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _begin(self, accepted: _Accepted) -> None:
        """Hand `accepted` to a protocol, after the TLS handshake where there is one."""
        try:
            await self._loop.connect_accepted_socket(self._serve, accepted, **self._tls)
        except OSError as error:
            self.ended["handshake"] += 1
            log.debug("A client's connection ended before it was served: %s", error)
            accepted.close()
            release(error)
        except BaseException:
            accepted.close()
            raise

    def _closed(self) -> None:
        self.open -= 1
        self._is_crowded = self._is_crowded and self.open * 10 > self._connections_max * 9

    def _turn_away(self) -> None:
        self.ended["connections"] += 1
        if not self._is_crowded:
            log.warning(
                "Port %d has %d clients, as many as it serves: more are turned away until some leave", self.port,
                self.open,
            )  # fmt: skip
        self._is_crowded = True

    def _wait_for_descriptors(self, error: OSError) -> None:
        self.ended["descriptors"] += 1
        if not self._is_exhausted:
            log.warning(
                "Port %d cannot accept connections: %s; they wait until files or connections are closed. Raise the "
                "limit of open files (ulimit -n)", self.port, error.strerror,
            )  # fmt: skip
        self._is_exhausted = True
        if self._pause is None:
            self._stop_accepting()
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def close(self) -> None:
        """Accept no more connections, and end connections that have not finished their handshake."""
        if self._pause is not None:
            self._pause.cancel()
        if not self._listeners:
            return
        self._stop_accepting()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes that `close` ended are over."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
