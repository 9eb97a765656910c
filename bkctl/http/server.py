"""Runs the HTTP server: its address, tokens and TLS, and uvicorn in a thread with its own event loop.

The bookie's work and the API's do not wait for each other. A server without a token or client certificates listens on
loopback only, and creates a token for this user's commands. TLS uses PEM files under Apache's keys:
`httpServerKeyStorePath` has the private key and the certificate.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, UsageError
from bkctl.http.app import Api
from bkctl.http.endpoints import JSON, json_text
from bkctl.http.gateway import Upstream
from bkctl.http.local_token import LocalToken, token_path
from bkctl.http.service import BookieProxy, Service
from bkctl.metadata.store import NO_SECURITY, StoreSecurity, client_tls, load_certificate
from bkctl.protocol.acceptor import Acceptor, share_of_descriptors

if TYPE_CHECKING:
    from bkctl.bookie.server import Bookie

log: Final = logging.getLogger("bkctl.http")

#: The longest wait for a connection's first request, and for the next one after an answer.
IDLE_TIMEOUT_S: Final = 20.0
#: A client that reads nothing of its answer for so long is disconnected.
STALL_TIMEOUT_S: Final = 40.0
#: Connections at once, TLS handshakes included; fewer if the process may open few files.
CONNECTIONS_MAX: Final = 256
LOOPBACK: Final = "127.0.0.1"
#: One in so many file descriptors of the process is for connections; the bookie's clients and files need the others.
DESCRIPTORS_SHARE: Final = 8
#: The longest TLS handshake.
HANDSHAKE_TIMEOUT_S: Final = 5.0
HEAD_SIZE_BYTES_MAX: Final = 32 << 10
STOP_TIMEOUT_S: Final = 5
TOKEN_SIZE_BYTES_MAX: Final = 4096
_LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The address of a server, and its access control: `token`, and client certificates if `tls` requires them.

    Clients with the `read_only_token` may read, but get no secrets.
    """

    host: str
    port: int
    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    read_only_token: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, config: BookieConfig) -> HttpSettings:
        """Return the settings of a bookie; without httpServerHost and authentication, it listens on loopback.

        Raise UsageError for unusable files, and for a server that would be open to everybody.
        """
        if config.http_server_token and config.http_server_token_file:
            raise UsageError("httpServerToken and httpServerTokenFile are both set", hint="keep the file")
        token = config.http_server_token
        if config.http_server_token_file:
            token = read_token(Path(config.http_server_token_file))
        tls = None
        if config.http_server_tls_enable:
            if not config.http_server_key_store_path:
                raise UsageError("httpServerTlsEnable needs httpServerKeyStorePath: a PEM file, key and certificate")
            tls = tls_context(
                config.http_server_key_store_path,
                config.http_server_key_store_password,
                config.http_server_trust_store_path,
            )
        read_only = config.http_server_read_only_token_file
        settings = cls(
            config.http_server_host or "0.0.0.0",
            config.http_server_port,
            token or None,
            tls,
            read_token(Path(read_only)) if read_only else None,
        )
        if config.http_server_host is None and not settings.authenticates:
            settings = replace(settings, host=LOOPBACK)
            log.warning(
                "httpServerHost is not set: the HTTP server listens on %s only; to open it, set httpServerHost=0.0.0.0 "
                "with httpServerTokenFile, or with TLS and httpServerTrustStorePath", LOOPBACK,
            )  # fmt: skip
        return settings.checked(
            "set httpServerHost=127.0.0.1, or httpServerTokenFile, or TLS with httpServerTrustStorePath"
        )

    def checked(self, hint: str) -> HttpSettings:
        """Return these settings.

        Raise UsageError with `hint` for a server beyond loopback without authentication, and for a read-only token
        without a different full token.
        """
        if self.read_only_token is not None and (self.token is None or self.token == self.read_only_token):
            raise UsageError("A read-only token needs a full token beside it", hint="give two different tokens")
        if not self.authenticates and not is_loopback(self.host):
            raise UsageError(
                f"The HTTP server on {self.host} would be open to everybody who reaches this machine", hint=hint
            )
        return self

    @property
    def authenticates(self) -> bool:
        """True if a client needs a token or a certificate."""
        return self.token is not None or (self.tls is not None and self.tls.verify_mode is ssl.CERT_REQUIRED)

    @property
    def protocol(self) -> str:
        """`http` or `https`."""
        return "http" if self.tls is None else "https"


def read_token(path: Path) -> str:
    """Return the token in a file, without surrounding white space. Raise UsageError."""
    try:
        with open(path, "rb") as file:
            data = file.read(TOKEN_SIZE_BYTES_MAX + 1)
        token = data.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the token in {path}: {error}") from error
    if not token or len(data) > TOKEN_SIZE_BYTES_MAX or any(char.isspace() for char in token):
        raise UsageError(f"{path} has no token: one word of at most {TOKEN_SIZE_BYTES_MAX} characters")
    return token


def tls_context(
    key_store: str, password: str | None, trust_store: str | None, key: str | None = None
) -> ssl.SSLContext:
    """Return a server's TLS settings from PEM files; with `trust_store`, clients need a certificate signed by it.

    `key` is the file of the private key if `key_store` does not contain it. Raise UsageError.
    """
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_certificate(context, key_store, key, password)
        if trust_store:
            context.load_verify_locations(trust_store)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"The TLS files of the HTTP server cannot be used: {error}", hint="give PEM files") from error
    return context


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 for untrusted clients: idle and stalled connections are aborted."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since_s = self.loop.time()
        self._left = 0
        self._looking = self.loop.call_later(_LOOK_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

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
        if self.transport.is_closing():
            return
        super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Send the error as JSON if no answer has begun, else abort; stop the handler of the current request."""
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


class _Server(uvicorn.Server):
    """uvicorn's server on an Acceptor, which counts connections from accept on, before their TLS handshakes."""

    def __init__(self, config: uvicorn.Config, ended: Counter[str]) -> None:
        super().__init__(config)
        self._ended = ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        config = self.config

        def serve() -> asyncio.Protocol:
            return _Protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

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
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def bind(self) -> int:
        """Listen without accepting yet; return the port. Raise BkctlError if the address is in use or unavailable."""
        host, port = self.settings.host.strip("[]") or "0.0.0.0", self.settings.port
        try:
            family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, number)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            if not self.settings.authenticates:  # before clients can connect
                self._make_token(*self._socket.getsockname()[:2])
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

    def start(self, make_service: Callable[[], Service], *, upstream: Upstream | None = None) -> None:
        """Serve in a new thread with the service that `make_service` returns there; a gateway needs `upstream`.

        The method returns before connections are accepted.
        """
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(make_service(), upstream)), name="http", daemon=True
        )
        self._thread.start()
        log.info("HTTP server on %s:%d", *self.address)
        if self.token_file is not None:
            log.info("The token of the HTTP server is in %s", self.token_file)

    async def _serve(self, service: Service, upstream: Upstream | None) -> None:
        assert self._socket is not None
        settings, made = self.settings, self._local_token
        token = settings.token
        if not settings.authenticates:
            token = secrets.token_urlsafe(32) if made is None else made.text
        api = Api(
            service, token=token, read_only_token=settings.read_only_token, is_local=not settings.authenticates,
            upstream=upstream,
        )  # fmt: skip
        server = self._server = _Server(self._config(api), self.ended)
        if self._stopping:
            return
        try:
            await server.serve(sockets=[self._socket])
        finally:
            await service.close()

    def _config(self, api: Api) -> uvicorn.Config:
        config = uvicorn.Config(
            api,
            loop="asyncio",
            http=_Protocol,
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


class BookieHttpServer:
    """A bookie's own HTTP server, created before the bookie starts, so that the bookie can register its port."""

    def __init__(self, config: BookieConfig) -> None:
        """Listen on the address in `config`. Raise UsageError, BkctlError."""
        self.server = HttpServer(HttpSettings.of(config))
        port = self.server.bind()
        #: The configuration with the actual address and port.
        self.config = config.with_changes(http_server_host=self.server.settings.host, http_server_port=port)

    def start(self, bookie: Bookie, security: StoreSecurity = NO_SECURITY) -> None:
        """Serve for the bookie; call this in the bookie's event loop. Raise BkctlError."""
        loop = asyncio.get_running_loop()
        config = bookie.config
        uri = config.metadata_service_uri
        assert uri is not None
        tls = None
        if config.tls_provider_factory_class and config.tls_trust_store:
            tls = client_tls(config.tls_trust_store, config.tls_certificate_path, config.tls_key_store)
        timeout_s = config.zk_timeout / 1000 * 3
        bookie.metrics.ended_connections["http"] = self.server.ended
        local = BookieProxy(bookie, loop)
        self.server.start(lambda: Service(uri, security=security, timeout_s=timeout_s, tls=tls, bookie=local))

    def stop(self) -> None:
        """Stop the server."""
        self.server.stop()
