"""One HTTP exchange with a bookie's or gateway's server: connection, token, TLS, bounds and errors."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from bkctl import errors
from bkctl.http.server_url import UNSAFE_IN_PATH, ServerUrl, is_loopback_address

#: An answer that is kept in memory must be complete after so many timeouts, however steadily it arrives.
ANSWER_TIMEOUTS_MAX: Final = 4

CHUNK_SIZE_BYTES: Final = 1 << 16


class PatientSocket(io.RawIOBase):
    """A socket as http.client uses it: one wait lasts at most `timeout_s`, all waits ANSWER_TIMEOUTS_MAX as long."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self.renew()

    def renew(self) -> None:
        """Allow ANSWER_TIMEOUTS_MAX timeouts in all from now on."""
        self._limit = time.monotonic() + self._timeout_s * ANSWER_TIMEOUTS_MAX

    def patience(self) -> float:
        """Return the seconds that the next wait may take. Raise TimeoutError if none are left."""
        left = self._limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("The answer takes too long")
        return min(self._timeout_s, left)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self.patience())
        self._sock.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self.patience())
        return self._sock.recv_into(buffer)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(self, CHUNK_SIZE_BYTES)

    def close(self) -> None:
        """Do nothing: the opener of the socket closes it."""


#: The largest answer that is kept in memory; the metrics of a large bookie take some MiB.
ANSWER_SIZE_BYTES_MAX: Final = 32 << 20
MESSAGE_LENGTH_MAX: Final = 300
TOKEN_HINT: Final = (
    "set BKCTL_API_TOKEN to the token of that server, or give a certificate with --tls-cert; a token goes to a "
    "registered address only over https with --tls-ca, to any address that --bookie-url gives"
)

_NO_TOKEN: Final = re.compile(r"[^\x21-\x7e]")


class ApiResponse(NamedTuple):
    """A complete answer. `content_type` is None if the server sent none, as Apache's mostly does."""

    status: int
    content_type: str | None
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; invalid UTF-8 becomes U+FFFD."""
        return self.body.decode("utf-8", "replace")


class ApiAnswer:
    """An answer whose body is not yet read; valid in the block of `ApiClient.exchange`."""

    def __init__(self, client: ApiClient, response: http.client.HTTPResponse, sock: PatientSocket | None) -> None:
        self._client, self._response, self._sock = client, response, sock
        self.status = response.status
        self.content_type = response.getheader("Content-Type")
        #: The target of a redirect.
        self.location = response.getheader("Location")

    def chunks(self, size_max: int) -> Iterator[bytes]:
        """Yield the body piece by piece.

        Raise ProtocolError if it is larger than `size_max` bytes, Unreachable if it is shorter than Content-Length.
        """
        client, expected, size = self._client, self._response.length, 0
        if expected is not None and expected > size_max:
            raise client.too_large(size_max, f"{expected:,} bytes, ")
        while True:
            if self._sock is not None:
                self._sock.renew()
            with client.translated():
                piece = self._response.read(min(CHUNK_SIZE_BYTES, size_max + 1))
            size += len(piece)
            if size > size_max:
                raise client.too_large(size_max)
            if not piece:
                break
            yield piece
        if expected is not None and size < expected:
            raise errors.Unreachable(f"{client.url}: the answer ended after {size:,} of {expected:,} bytes")

    def response(self, size_max: int = ANSWER_SIZE_BYTES_MAX) -> ApiResponse:
        """Read the body and return the complete answer. Raise as `chunks`."""
        return ApiResponse(self.status, self.content_type, b"".join(self.chunks(size_max)))


class ApiClient:
    """A client of a bookie's or a gateway's HTTP server. Each request has its own connection.

    `timeout_s` is the longest wait without progress, `connect_timeout_s` that for a connection (None: `timeout_s`).
    `token` is sent as a bearer token; a server on this machine that created a token for this user gets that one
    instead. `tls` is the context for an `https` URL (None: the system's authorities). Redirects are not followed, so
    that no other server gets the token. For a URL from the metadata store, callers pass the token through
    `token_for_registered`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.server = ServerUrl.parse(url)
        self.url = str(self.server)
        self.timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        if token is not None and (not token or _NO_TOKEN.search(token)):
            raise errors.UsageError("The token of the HTTP server is empty, or contains spaces or control characters")
        self.token = token
        self._tls = tls

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        *,
        size_max: int = ANSWER_SIZE_BYTES_MAX,
    ) -> ApiResponse:
        """Send a request and return the answer. Raise as `exchange`, and `error_of` for a status other than 2xx."""
        with self.exchange(method, path, query, body) as answer:
            if not 200 <= answer.status < 300:
                raise self.error_of(answer, method, path)
            return answer.response(size_max)

    @contextmanager
    def exchange(
        self, method: str, path: str, query: Mapping[str, str] = {}, body: bytes | None = None, *, streams: bool = False
    ) -> Iterator[ApiAnswer]:
        """Send a request, and provide the answer before its body is read.

        The exchange ends after ANSWER_TIMEOUTS_MAX timeouts; with `streams`, every 64 KiB may take that long.
        Raise Unreachable, TimedOut, and ProtocolError for an answer that is not HTTP.
        """
        target = self.target(path, query)
        headers = {"Accept": "*/*", "Connection": "close", "User-Agent": "bkctl"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(self.server.host, self.server.port)
        with self._connected() as sock:
            token = _token_of_peer(sock) or self.token
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            # Replaces the connection's own socket, whose waits would restart with every byte.
            connection.sock = patient = PatientSocket(sock, self.timeout_s)
            response = None
            try:
                with self.translated():
                    connection.request(method, target, body=body, headers=headers)
                    response = connection.getresponse()
                yield ApiAnswer(self, response, patient if streams else None)
            finally:
                if response is not None:
                    response.close()
                connection.close()

    def target(self, path: str, query: Mapping[str, str] = {}) -> str:
        """Return the request target: the URL's prefix, the quoted path, and the query.

        Raise UsageError for a path that does not begin with a slash, or contains spaces or control characters.
        """
        if not path.startswith("/") or UNSAFE_IN_PATH.search(path) or "#" in path:
            raise errors.UsageError(f"Path {path!r}: not a path of an HTTP server", hint="give /api/v1/… and no spaces")
        quoted = urllib.parse.quote(self.server.prefix + path, safe="/%:@!$&'()*+,;=~?-._")
        if not query:
            return quoted
        return f"{quoted}{'&' if '?' in quoted else '?'}{urllib.parse.urlencode(query)}"

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        server = self.server
        with self.translated():
            try:
                sock = socket.create_connection((server.host, server.port), self._connect_timeout_s)
            except TimeoutError as error:
                raise errors.TimedOut(
                    f"{self.url}: no connection within {self._connect_timeout_s:g} s",
                    hint="--connect-timeout allows longer waits",
                ) from error
        try:
            if server.tls:
                from bkctl.metadata.store import client_tls

                context = self._tls if self._tls is not None else client_tls()
                with self.translated():
                    sock = context.wrap_socket(sock, server_hostname=server.host)
            yield sock
        finally:
            sock.close()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Turn errors of sockets and http.client into BkctlErrors."""
        hint = "it may want a certificate: --tls-cert" if self.server.tls else "it may want TLS: try https://"
        try:
            yield
        except TimeoutError as error:
            raise errors.TimedOut(
                f"{self.url}: no progress within {self.timeout_s:g} s", hint="--timeout allows longer waits"
            ) from error
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", None) or error.reason or error.strerror or str(error)
            raise errors.Unreachable(
                f"{self.url} and this client do not agree on TLS: {reason.rstrip('.')}",
                hint="--tls-ca names the authorities that sign its certificate, --tls-cert ours",
            ) from error
        except http.client.IncompleteRead as error:
            raise errors.Unreachable(f"{self.url}: the connection closed before the answer was complete") from error
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            raise errors.Unreachable(f"{self.url} closed the connection without an answer", hint=hint) from error
        except (http.client.HTTPException, ValueError) as error:
            if isinstance(error, UnicodeError):  # an invalid host name
                raise errors.Unreachable(f"{self.url} cannot be reached: {error}") from error
            raise errors.ProtocolError(
                f"{self.url}: the answer is not HTTP ({type(error).__name__})", hint=hint
            ) from error
        except OSError as error:
            raise errors.Unreachable(
                f"{self.url} cannot be reached: {error.strerror or error}",
                hint="check httpServerEnabled=true, or give its URL with --bookie-url",
            ) from error

    def too_large(self, size_max: int, size: str = "") -> errors.ProtocolError:
        """Return the error for an answer of more than `size_max` bytes."""
        return errors.ProtocolError(f"{self.url}: the answer is too large: {size}more than {size_max:,} bytes")

    def error_of(self, answer: ApiAnswer, method: str, path: str) -> errors.BkctlError:
        """Return the error for an answer with a status other than 2xx, with the server's message."""
        status = answer.status
        what = f"{self.url}: {method} {path}"
        if 300 <= status < 400:
            where = f" to {shortened(answer.location)}" if answer.location else ""
            return errors.BkctlError(
                f"{what} is redirected{where} ({status})",
                hint="redirects are not followed; give the right --bookie-url",
            )
        try:
            response = answer.response(CHUNK_SIZE_BYTES)
        except errors.BkctlError:
            response = ApiResponse(status, None, b"")
        message, hint = server_message(response)
        text = f"{what}: {message} ({status})" if message else f"{what} failed with status {status}"
        if status in (401, 403):
            hints = (hint, TOKEN_HINT if status == 401 or hint is None else None)
            return errors.Unauthorized(text, hint="; ".join(filter(None, hints)))
        if status == 404 and "html" in (response.content_type or ""):
            return errors.Unsupported(
                f"{self.url} has no {path.partition('?')[0]}",
                hint="the bookie's release lacks it, or this is not a bookie",
            )
        return _ERRORS.get(status, errors.Unreachable if status == 504 else errors.BkctlError)(text, hint=hint)


_ERRORS: Final[Mapping[int, type[errors.BkctlError]]] = {
    400: errors.BadRequest,
    404: errors.NotFound,
    405: errors.Unsupported,
    409: errors.Conflict,
    412: errors.Conflict,
    413: errors.BadRequest,
    422: errors.BadRequest,
    429: errors.TooManyRequests,
    501: errors.Unsupported,
    503: errors.Unreachable,
}


def server_message(response: ApiResponse) -> tuple[str, str | None]:
    """Return the message and the hint of an error answer: a JSON object of ours, a JSON string, plain text, or HTML."""
    text, hint = response.text, None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, str):
        text = document
    elif isinstance(document, dict):
        given = document.get("error") or document.get("message") or document.get("detail")
        text = given if isinstance(given, str) else text
        hint = document["hint"] if isinstance(document.get("hint"), str) else None
    elif "html" in (response.content_type or ""):
        text = re.sub(r"<[^<>]*>", " ", text)
    return shortened(text), None if hint is None else shortened(hint)


def shortened(text: str) -> str:
    """Return the text in one line of at most MESSAGE_LENGTH_MAX characters, for a message."""
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MESSAGE_LENGTH_MAX else text[: MESSAGE_LENGTH_MAX - 1] + "…"


def _token_of_peer(sock: socket.socket) -> str | None:
    """Return the token that the server behind `sock` created for this user; None for a server of another machine."""
    try:
        address, port = sock.getpeername()[:2]
    except OSError:
        return None
    if not is_loopback_address(address):
        return None
    from bkctl.http.local_token import find_local_token

    return find_local_token(address, port)
