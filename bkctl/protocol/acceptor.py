"""Accepts connections up to a bound, before their TLS handshakes, and waits where the process has no descriptors left.

The event loops' own servers accept without a bound, log a traceback for each connection that finds no descriptor, and
wait a minute for a handshake. Source: BookieNettyServer, NioEventLoop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import resource
import socket
import ssl
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

#: Longest TLS handshake. Source: Netty's SslHandler.
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
#: Connections accepted in one turn of the event loop, so that open connections get their turn, too.
ACCEPTS_AT_ONCE: Final = 64
BACKLOG: Final = 1024
#: One in so many places may have a connection that ends and the one that takes its place at the same time.
_LEAVING_SHARE: Final = 32
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


class ClientProtocol(Protocol):
    """An asyncio protocol that serves one client."""

    @property
    def is_mute(self) -> bool:
        """Return True until the client has sent a whole request."""

    def abort(self) -> None:
        """Close the connection at once."""


async def claim_port(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of `host` ("": all, of IPv6 too); port 0 picks a free one. Raises OSError.

    Nothing listens yet, so clients are refused; until then no other server gets the port, unless connections of an
    earlier server linger there (TIME_WAIT): Linux lets a second one in beside such a socket, but not beside a listener.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    claimed: list[socket.socket] = []
    try:
        for family, kind, number, _, address in dict.fromkeys(found):
            if not host and family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            listener = socket.socket(family, kind, number)
            claimed.append(listener)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            with contextlib.suppress(OSError):
                listener.bind(address)
                continue
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except BaseException:
        for listener in claimed:
            listener.close()
        raise
    return claimed


class Acceptor:
    """Listens on bound sockets, accepts connections and hands each to a protocol that `serve` creates.

    At most `connections_max` (0: any number) sockets are open at once, those in a TLS handshake included: one more
    takes the place of the oldest mute one, whose socket may close a moment later, and is closed as it is accepted where
    none is mute. `tls` encrypts from the
    first byte; a handshake ends after `handshake_timeout_s`. `ended` counts, by reason, connections that ended for
    another reason than a client's wish: `connections` (over the bound, mute ones that made room included),
    `descriptors` (attempts to accept without a free descriptor) and `handshake`.
    `close` and `wait_closed` work as asyncio.Server's.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        serve: Callable[[], ClientProtocol],
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
        #: Connections that `_make_room` ended, with sockets still open: the descriptors above the bound.
        self._leaving: set[_Accepted] = set()
        self._leaving_max = max(1, connections_max // _LEAVING_SHARE)
        self._is_crowded = False
        self._is_exhausted = False
        self._pause: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Open connections, the oldest first, without those that `_make_room` found not to be mute.
        self._newcomers: OrderedDict[_Accepted, tuple[asyncio.Task[None], ClientProtocol]] = OrderedDict()
        for listener in self._listeners:
            listener.setblocking(False)
            # Before `listen`, for the next server: connections that linger have the option from their listener.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.listen(BACKLOG)
        self._resume()

    @classmethod
    async def listen(
        cls,
        host: str,
        port: int,
        serve: Callable[[], ClientProtocol],
        *,
        connections_max: int,
        ended: Counter[str],
        claimed: Sequence[socket.socket] = (),
    ) -> Acceptor:
        """Accept connections on `claimed` sockets, or as `claim_port` claims them. Raises OSError."""
        listeners = claimed or await claim_port(host, port)
        try:
            return cls(listeners, serve, connections_max=connections_max, ended=ended)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise

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
            if len(self._leaving) >= self._leaving_max:
                return  # the next turn, once their sockets are closed
            try:
                plain, _ = listener.accept()
            except OSError as error:
                # Linux also reports errors of the waiting connection itself; the next turn accepts the next one.
                if error.errno in _EXHAUSTED:
                    self._wait_for_descriptors(error)
                return
            self._is_exhausted = False
            if self._connections_max and self.open - len(self._leaving) >= self._connections_max:
                self._count_surplus()
                if not self._make_room():
                    plain.close()
                    continue
            accepted = _Accepted(plain.family, plain.type, plain.proto, fileno=plain.detach())
            accepted.setblocking(False)
            accepted.on_closed = functools.partial(self._closed, accepted)
            self.open += 1
            client = self._serve()
            task = self._loop.create_task(self._begin(accepted, client))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._begun, accepted))
            self._newcomers[accepted] = task, client

    async def _begin(self, accepted: _Accepted, client: ClientProtocol) -> None:
        """Connect `accepted` with `client`, after the TLS handshake where there is one."""
        try:
            protocol = cast("asyncio.BaseProtocol", client)
            await self._loop.connect_accepted_socket(lambda: protocol, accepted, **self._tls)
        except OSError as error:
            self.ended["handshake"] += 1
            log.debug("A client's connection ended before it was served: %s", error)
            accepted.close()
            release(error)
        except BaseException:
            accepted.close()
            raise

    def _begun(self, accepted: _Accepted, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # perhaps before its first step
            accepted.close()

    def _make_room(self) -> bool:
        """End the oldest connection whose client has sent no whole request; return False if there is none."""
        while self._newcomers:
            accepted, (task, client) = self._newcomers.popitem(last=False)
            if not task.done() or client.is_mute:
                self._leaving.add(accepted)
                if not task.cancel():
                    client.abort()
                return True
        return False

    def _closed(self, accepted: _Accepted) -> None:
        self.open -= 1
        self._newcomers.pop(accepted, None)
        self._leaving.discard(accepted)
        self._is_crowded = self._is_crowded and self.open * 10 > self._connections_max * 9

    def _count_surplus(self) -> None:
        self.ended["connections"] += 1
        if not self._is_crowded:
            log.warning(
                "Port %d has %d clients, as many as it serves: further ones take the places of clients that sent no "
                "request, or are turned away", self.port, self.open,
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
