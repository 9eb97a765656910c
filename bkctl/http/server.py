"""The HTTP server: its address, tokens and TLS, and uvicorn in a thread with its own event loop.

Clients are not trusted: connections, idle and stalled times are bounded. The bookie's work and the API's do not wait
for each other. A server without a token or client certificates serves more than probes on loopback only, and creates a
token for this user's commands. TLS uses PEM files under Apache's keys: `httpServerKeyStorePath` has the private key and
the certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bkctl.bookie.network import client_tls_context
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError
from bkctl.http.app import REQUESTS_MAX, Api
from bkctl.http.endpoints import JSON, json_text
from bkctl.http.gateway import Upstream
from bkctl.http.local_token import LocalToken, token_path
from bkctl.http.server_settings import HttpSettings
from bkctl.http.server_url import LOOPBACK, WILDCARDS
from bkctl.http.service import BookieProxy, Service
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.protocol.acceptor import Acceptor, release, share_of_descriptors

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie
    from bkctl.replication.stats import Sample

log: Final = logging.getLogger("bkctl.http")

HEAD_SIZE_BYTES_MAX: Final = 32 << 10
STOP_TIMEOUT_S: Final = 5
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
        """True while the client has no whole request that waits for its answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

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
            (b"x-content-type-options", b"nosniff"),
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


class HttpServer:
    """One HTTP server: `bind` listens, `start` serves in a thread, `stop` ends the thread."""

    def __init__(self, settings: HttpSettings) -> None:
        self.settings = settings
        self.address = (settings.host, settings.port)
        self._socket: socket.socket | None = None
        #: The token that the server created, if it was given none.
        self._local_token: LocalToken | None = None
        #: Connections that the server ended, by reason; see Acceptor.
        self.ended: Counter[str] = Counter()
        self._server: BoundedServer | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def bind(self) -> int:
        """Listen without accepting yet; return the port. Raise BkctlError if the address is in use or unavailable."""
        host, port = self.settings.host.strip("[]") or "0.0.0.0", self.settings.port
        try:
            # A wildcard means the addresses of IPv6 and IPv4, as for Apache's server, where the system has both.
            found = "::" if host in WILDCARDS and socket.has_dualstack_ipv6() else host
            family, kind, number, _, address = socket.getaddrinfo(found, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, number)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if found == "::":
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(address)
            if not self.settings.authenticates:  # before clients can connect
                name, number = self._socket.getsockname()[:2]
                self._make_token(LOOPBACK if name in WILDCARDS else name, number)
            self._socket.listen(128)
        except OSError as error:
            self._close_socket()
            raise BkctlError(
                f"The HTTP server cannot listen on {host}:{port}: {error.strerror}",
                hint="another server has the port (httpServerPort), or the address is not this machine's",
            ) from error
        self.address = (self.settings.host, self._socket.getsockname()[1])
        return self.address[1]

    def _make_token(self, address: str, port: int) -> None:
        """Create a token that requests need and this user's commands find."""
        try:
            self._local_token = LocalToken(address, port)
        except OSError as error:
            log.warning(
                "The HTTP server cannot keep a token in %s (%s), and answers probes only: set httpServerTokenFile",
                token_path(address, port), error.strerror or error,
            )  # fmt: skip

    @property
    def token_file(self) -> Path | None:
        """The file of the token that the server created; None if it was given one."""
        return None if self._local_token is None else self._local_token.path

    def start(
        self, make_service: Callable[[], Service], *, upstream: Upstream | None = None, link_key: str | None = None
    ) -> None:
        """Serve in a new thread with the service that `make_service` returns there; a gateway needs `upstream`.

        `link_key` opens a gateway's console once. The method returns before connections are accepted.
        """
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(make_service(), upstream, link_key)), name="http", daemon=True
        )
        self._thread.start()
        log.info("HTTP server on %s:%d", *self.address)
        if self.token_file is not None:
            log.info("The token of the HTTP server is in %s", self.token_file)

    async def _serve(self, service: Service, upstream: Upstream | None, link_key: str | None) -> None:
        assert self._socket is not None
        settings, made = self.settings, self._local_token
        token, hint = settings.token, f"the token is in {settings.token_source}"
        if not settings.authenticates:
            token = secrets.token_urlsafe(32) if made is None else made.text
            hint = "" if made is None else f"the token for loopback addresses is in {made.path}; "
            hint += "other machines need a token that the server is given (httpServerTokenFile, --token-file)"
        console = None
        if upstream is not None and find_spec("jinja2") is not None:  # A bookie has none.
            from bkctl.http.console.site import Console

            console = Console(service, upstream, tokens=(token, settings.read_only_token), link_key=link_key)
        api = Api(
            service, token=token, read_only_token=settings.read_only_token, is_local=not settings.authenticates,
            upstream=upstream, open_probes=settings.open_probes, token_hint=hint, console=console,
        )  # fmt: skip
        # A thread for each request: those that wait for a disk or a store leave room for the others.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="http"))
        server = self._server = BoundedServer(self._config(api), self.ended)
        if self._stopping:
            return
        try:
            await server.serve(sockets=[self._socket])
        finally:
            if console is not None:
                await console.close()
            await service.close()

    def _config(self, api: Api) -> uvicorn.Config:
        config = uvicorn.Config(
            api,
            loop="asyncio",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            h11_max_incomplete_event_size=HEAD_SIZE_BYTES_MAX,
        )
        config.load()
        config.ssl = self.settings.tls  # uvicorn creates no context of its own
        return config

    def stop(self) -> None:
        """Finish the current requests and end the thread; without a thread, only close the socket."""
        self._stopping = True
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S + 5)
            self._thread = None
        self._close_socket()

    def _close_socket(self) -> None:
        if self._local_token is not None:
            self._local_token.close()
            self._local_token = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve_recovery(config: BookieConfig, samples: Callable[[], Iterable[Sample]]) -> HttpServer:
    """Serve `/heartbeat` and `/metrics` of an auto-recovery without a bookie. Raise UsageError, BkctlError."""
    server = HttpServer(HttpSettings.of(config))
    server.bind()
    server.start(lambda: Service("", samples=samples))
    return server


class BookieHttpServer(HttpServer):
    """A bookie's own HTTP server, created before the bookie starts, so that the bookie can register its port."""

    def __init__(self, config: BookieConfig) -> None:
        """Listen on the address in `config`. Raise UsageError, BkctlError."""
        super().__init__(HttpSettings.of(config))
        port = self.bind()
        #: The configuration with the actual address and port.
        self.config = config.with_changes(http_server_host=self.settings.host, http_server_port=port)

    def serve(self, bookie: Bookie, security: StoreSecurity = NO_SECURITY) -> None:
        """Serve for the bookie; call this in the bookie's event loop. Raise BkctlError."""
        config = bookie.config
        uri = config.metadata_service_uri
        assert uri is not None
        tls = client_tls_context(config)
        timeout_s = config.zk_timeout / 1000 * 3
        bookie.metrics.ended_connections["http"] = self.ended
        bookie.metrics.certificates["http"] = self.settings.tls
        local = BookieProxy(bookie, asyncio.get_running_loop())
        self.start(
            lambda: Service(uri, security=security, timeout_s=timeout_s, tls=tls, local_bookie=local, config=config)
        )
