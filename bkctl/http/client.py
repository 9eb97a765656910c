"""A bookie's HTTP server as its client sees it: one exchange (`ApiClient`), and its endpoints as typed calls.

`BookieApi` speaks to Apache's bookies and to ours alike. Apache's server (VertxHttpServer, HttpRouter) says booleans as
strings here and there, most texts as a JSON string without a content type, and 404 for a method that it does not know;
what it says comes out as typed values, and an answer of another shape is a ProtocolError.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import json
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from bkctl.errors import (
    BadRequest,
    BkctlError,
    BookieUnavailable,
    Conflict,
    NotFound,
    ProtocolError,
    TimedOut,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    Unsupported,
    UsageError,
)

if TYPE_CHECKING:
    from bkctl.metadata.cluster import RegisteredBookie

T = TypeVar("T")

API_PREFIX: Final = "/api/v1"
#: The parameter by which a gateway of bkctl knows the bookie.
BOOKIE_PARAMETER: Final = "bookie"
#: An answer that is kept in memory is at most as large: metrics of a large bookie are some MiB.
ANSWER_SIZE_BYTES_MAX: Final = 32 << 20
#: JSON takes many times its size once it is read; what the endpoints below answer is small.
JSON_SIZE_BYTES_MAX: Final = 4 << 20
#: However steadily it drips, an answer that is kept in memory must be there after so many timeouts.
ANSWER_TIMEOUTS_MAX: Final = 4
MESSAGE_LENGTH_MAX: Final = 300
TOKEN_HINT: Final = (
    "set BKCTL_API_TOKEN to the token of that server, or give a certificate with --tls-cert; a token goes to a "
    "registered address only over https with --tls-ca, to any address that --bookie-url gives"
)

_WILDCARDS: Final = ("", "0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0")
_CHUNK_SIZE_BYTES: Final = 1 << 16
_UNSAFE_IN_PATH: Final = re.compile(r"[\x00-\x20\x7f]")
_NO_TOKEN: Final = re.compile(r"[^\x21-\x7e]")


# --- where ----------------------------------------------------------------------------------------------------------


class ServerUrl(NamedTuple):
    """Where an HTTP server is; `prefix` stands before every path, and does not end in a slash."""

    tls: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """`http[s]://HOST[:PORT][/PREFIX]`, or `HOST:PORT` for http. Raises UsageError."""
        hint = "give http://HOST:PORT or https://HOST:PORT"
        try:
            parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UsageError(f"URL {text!r}: {error}", hint=hint) from error
        if parts.scheme not in ("http", "https") or not host or port == 0 or _UNSAFE_IN_PATH.search(text):
            raise UsageError(f"URL {text!r}: not the URL of an HTTP server", hint=hint)
        if parts.query or parts.fragment:
            raise UsageError(f"URL {text!r}: has a query or a fragment", hint=hint)
        if parts.username is not None or parts.password is not None:
            raise UsageError("The URL of an HTTP server with a user in it", hint="give a token as BKCTL_API_TOKEN")
        tls = parts.scheme == "https"
        return cls(tls, host, port or (443 if tls else 80), parts.path.rstrip("/"))

    @property
    def is_loopback(self) -> bool:
        """Whether the host is `localhost` or a loopback address; a name that only begins like one is not."""
        return self.host == "localhost" or _is_loopback_address(self.host)

    @property
    def is_private(self) -> bool:
        """Whether no one reads along: TLS, or a server on this machine."""
        return self.tls or self.is_loopback

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_for_registered(url: str, token: str | None, *, has_authorities: bool) -> str | None:
    """Return `token` where it may go to a server that the metadata store names, else None.

    Whoever writes to the metadata store chooses that URL. The token goes to loopback, and over TLS to a server whose
    certificate authorities that the user named signed (`has_authorities`); the system's authorities sign for anyone.
    """
    server = ServerUrl.parse(url)
    return token if server.is_loopback or (server.tls and has_authorities) else None


def bookie_url(bookie: RegisteredBookie, host: str | None = None) -> str:
    """The URL of a bookie's HTTP server, from the endpoints that it registered.

    `host` stands in for the registered one. A server that listens on every address registers that address, which leads
    nowhere: the host of the bookie's own address then.
    Raises NotFound for a bookie without HTTP server, BookieUnavailable for one that is down or serves HTTP on another
    machine's loopback address.
    """
    from bkctl.metadata.cluster import HTTP_ENDPOINT_ID

    if bookie.state == "down":
        raise BookieUnavailable(f"Bookie {bookie.bookie_id} is down", hint="'bkctl bookies list' shows who is up")
    endpoints = bookie.info.endpoints if bookie.info is not None else ()
    found = next((each for each in endpoints if each.id == HTTP_ENDPOINT_ID), None) or next(
        (each for each in endpoints if each.protocol in ("http", "https")), None
    )
    if found is None:
        raise NotFound(
            f"Bookie {bookie.bookie_id} registered no HTTP server",
            hint="start it with httpServerEnabled=true, or say where it is with --bookie-url",
        )
    host = host or found.host
    address = bookie.address
    if _is_loopback_address(host.strip("[]")) and address is not None and is_of_another_machine(address[0]):
        raise BookieUnavailable(
            f"The HTTP server of bookie {bookie.bookie_id} is open to its own machine only ({address[0]})",
            hint="run the command there, or set httpServerHost and httpServerTokenFile in its configuration",
        )
    if host in _WILDCARDS:
        if address is None:
            raise NotFound(
                f"Bookie {bookie.bookie_id} registered no address of its HTTP server, only port {found.port}",
                hint="say where it is with --bookie-url",
            )
        host = address[0]
    return str(ServerUrl(found.protocol == "https", host.strip("[]"), found.port, ""))


def is_of_another_machine(host: str) -> bool:
    """Return whether `host` is known to be another machine: no socket can be bound to its address here."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):
        return False
    try:
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError:
        return True
    return False


# --- one exchange ---------------------------------------------------------------------------------------------------


class ApiResponse(NamedTuple):
    """An answer in whole. `content_type` is as it was sent, None without one (Apache's server mostly sends none)."""

    status: int
    content_type: str | None
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are no UTF-8 as U+FFFD."""
        return self.body.decode("utf-8", "replace")


class ApiAnswer:
    """An answer whose body is still to come; for the block of `ApiClient.exchange`."""

    def __init__(self, client: ApiClient, response: http.client.HTTPResponse, sock: _Patient | None) -> None:
        self._client, self._response, self._sock = client, response, sock
        self.status = response.status
        self.content_type = response.getheader("Content-Type")
        #: Where a redirect leads.
        self.location = response.getheader("Location")

    def chunks(self, size_max: int) -> Iterator[bytes]:
        """The body, piece by piece. Raises ProtocolError when it is larger than `size_max` bytes, Unreachable when it
        ends before its end."""
        client, expected, size = self._client, self._response.length, 0
        if expected is not None and expected > size_max:
            raise client.too_large(size_max, f"{expected:,} bytes, ")
        while True:
            if self._sock is not None:
                self._sock.renew()
            with client.translated():
                piece = self._response.read(min(_CHUNK_SIZE_BYTES, size_max + 1))
            size += len(piece)
            if size > size_max:
                raise client.too_large(size_max)
            if not piece:
                break
            yield piece
        if expected is not None and size < expected:
            raise Unreachable(f"{client.url}: the answer ended after {size:,} of {expected:,} bytes")

    def response(self, size_max: int = ANSWER_SIZE_BYTES_MAX) -> ApiResponse:
        """The answer in whole."""
        return ApiResponse(self.status, self.content_type, b"".join(self.chunks(size_max)))


class ApiClient:
    """An HTTP server of a bookie, or of a gateway to bookies. Each request has a connection of its own.

    `timeout_s` is the longest wait without progress. `token` goes along as a bearer token; a server on this machine
    that made a token for this user gets that one. `tls` is the context for an `https` URL (None: the system's
    authorities). Redirects are not followed, so that the token goes nowhere else. For a URL that the metadata store
    names, the caller passes `token_for_registered`.
    """

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 30.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.server = ServerUrl.parse(url)
        self.url = str(self.server)
        self.timeout_s = timeout_s
        if token is not None and (not token or _NO_TOKEN.search(token)):
            raise UsageError("The token of the HTTP server is empty, or has spaces or control characters in it")
        self.token = token
        self._tls = tls

    def request(self, method: str, path: str, query: Mapping[str, str] = {}, body: bytes | None = None) -> ApiResponse:
        """One exchange, whatever the status of the answer.

        Raises Unreachable, TimedOut, and ProtocolError for what is no HTTP or larger than ANSWER_SIZE_BYTES_MAX.
        """
        with self.exchange(method, path, query, body) as answer:
            return answer.response()

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        *,
        size_max: int = ANSWER_SIZE_BYTES_MAX,
    ) -> ApiResponse:
        """As `request`; raises `error_of` for any status but 2xx."""
        with self.exchange(method, path, query, body) as answer:
            if not 200 <= answer.status < 300:
                raise self.error_of(answer, method, path)
            return answer.response(size_max)

    @contextmanager
    def exchange(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        *,
        streams: bool = False,
    ) -> Iterator[ApiAnswer]:
        """Send a request, and give the answer with its body still to be read.

        It is over after ANSWER_TIMEOUTS_MAX timeouts; where it `streams`, every 64 KiB of it may take that long.
        Raises as `request`.
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
            # Not the connection's own: its waits count from the last byte, however few those are.
            connection.sock = patient = _Patient(sock, self.timeout_s)
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
        """The path as it goes over the wire: with the URL's prefix, the query, and what needs it quoted.

        Raises UsageError for a path that does not begin with a slash or has spaces or control characters.
        """
        if not path.startswith("/") or _UNSAFE_IN_PATH.search(path) or "#" in path:
            raise UsageError(f"Path {path!r}: not a path of an HTTP server", hint="give /api/v1/… and no spaces")
        quoted = urllib.parse.quote(self.server.prefix + path, safe="/%:@!$&'()*+,;=~?-._")
        if not query:
            return quoted
        return f"{quoted}{'&' if '?' in quoted else '?'}{urllib.parse.urlencode(query)}"

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        server = self.server
        with self.translated():
            sock = socket.create_connection((server.host, server.port), self.timeout_s)
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
        """Turn what sockets and http.client raise into errors of the tree."""
        no_http = "it may want a certificate: --tls-cert" if self.server.tls else "it may want TLS: try https://"
        try:
            yield
        except TimeoutError as error:
            raise TimedOut(
                f"{self.url}: no progress within {self.timeout_s:g} s", hint="--timeout allows longer waits"
            ) from error
        except ssl.SSLError as error:
            reason = getattr(error, "verify_message", None) or error.reason or error.strerror or str(error)
            raise Unreachable(
                f"{self.url} and this client do not agree on TLS: {reason.rstrip('.')}",
                hint="--tls-ca names the authorities that sign its certificate, --tls-cert ours",
            ) from error
        except http.client.IncompleteRead as error:
            raise Unreachable(f"{self.url}: the answer ended before its end") from error
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            raise Unreachable(f"{self.url} closed the connection without an answer", hint=no_http) from error
        except (http.client.HTTPException, ValueError) as error:
            if isinstance(error, UnicodeError):  # what a host name can be
                raise Unreachable(f"{self.url} cannot be reached: {error}") from error
            raise ProtocolError(
                f"{self.url} answered what is no HTTP ({type(error).__name__})", hint=no_http
            ) from error
        except OSError as error:
            raise Unreachable(
                f"{self.url} cannot be reached: {error.strerror or error}",
                hint="is its HTTP server on (httpServerEnabled=true)? --bookie-url says where else it is",
            ) from error

    def too_large(self, size_max: int, size: str = "") -> ProtocolError:
        """The error for an answer that is larger than it may be."""
        return ProtocolError(f"{self.url}: the answer is too large: {size}more than {size_max:,} bytes")

    def error_of(self, answer: ApiAnswer, method: str, path: str) -> BkctlError:
        """What an answer with another status than 2xx means, with the server's own words."""
        status = answer.status
        what = f"{self.url}: {method} {path}"
        if 300 <= status < 400:
            where = f" to {_shortened(answer.location)}" if answer.location else ""
            return BkctlError(
                f"{what} is redirected{where} ({status})",
                hint="redirects are not followed; give the right --bookie-url",
            )
        try:
            response = answer.response(_CHUNK_SIZE_BYTES)
        except BkctlError:
            response = ApiResponse(status, None, b"")
        message, hint = _server_message(response)
        said = f"{what}: {message} ({status})" if message else f"{what} failed with status {status}"
        if status in (401, 403):
            return Unauthorized(said, hint=TOKEN_HINT if status == 401 else hint or TOKEN_HINT)
        if status == 404 and "html" in (response.content_type or ""):
            return Unsupported(
                f"{self.url} has no {path.partition('?')[0]}",
                hint="the bookie's release lacks it, or this is no bookie",
            )
        return _ERRORS.get(status, Unreachable if status == 504 else BkctlError)(said, hint=hint)


_ERRORS: Final[Mapping[int, type[BkctlError]]] = {
    400: BadRequest,
    404: NotFound,
    405: Unsupported,
    409: Conflict,
    412: Conflict,
    413: BadRequest,
    422: BadRequest,
    429: TooManyRequests,
    501: Unsupported,
    503: Unreachable,
}


def _server_message(response: ApiResponse) -> tuple[str, str | None]:
    """What a server says of a failure, and its hint: a JSON object of ours, a JSON string, plain text, or HTML."""
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
    return _shortened(text), None if hint is None else _shortened(hint)


def _shortened(text: str) -> str:
    text = " ".join(text.split()).rstrip(".")
    return text if len(text) <= MESSAGE_LENGTH_MAX else text[: MESSAGE_LENGTH_MAX - 1] + "…"


def _token_of_peer(sock: socket.socket) -> str | None:
    """The token that the server behind `sock` made for this user, where it is one on this machine."""
    try:
        address, port = sock.getpeername()[:2]
    except OSError:
        return None
    if not _is_loopback_address(address):
        return None
    from bkctl.http.local_token import find_local_token

    return find_local_token(address, port)


class _Patient:
    """A socket as http.client uses it: a wait ends after `timeout_s`, and the last one after some of those."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock, self._timeout_s = sock, timeout_s
        self.renew()

    def renew(self) -> None:
        """Wait ANSWER_TIMEOUTS_MAX timeouts more in all, from now on."""
        self._limit = time.monotonic() + self._timeout_s * ANSWER_TIMEOUTS_MAX

    def patience(self) -> float:
        """Seconds that the next wait may take. Raises TimeoutError when there are none."""
        left = self._limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("The answer takes too long")
        return min(self._timeout_s, left)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self.patience())
        self._sock.sendall(data)

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        self._sock.settimeout(self.patience())
        return self._sock.recv_into(buffer)

    def makefile(self, *_: Any) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self), _CHUNK_SIZE_BYTES)

    def close(self) -> None:
        """The socket is closed by who opened it."""


class _Incoming(io.RawIOBase):
    def __init__(self, sock: _Patient) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.recv_into(buffer)


# --- the endpoints --------------------------------------------------------------------------------------------------


class BookieState(NamedTuple):
    """What a bookie says of itself. Source: BookieStateService.BookieState."""

    running: bool
    read_only: bool
    shutting_down: bool
    available_for_high_priority_writes: bool


class DiskSpace(NamedTuple):
    """The space on a bookie's ledger disks in bytes. Source: BookieInfoService.BookieInfo."""

    free: int
    total: int

    @property
    def used(self) -> int:
        """Bytes that are taken, by whomever."""
        return self.total - self.free

    @property
    def used_percent(self) -> float:
        """The share that is taken, in percent."""
        return 100.0 * self.used / self.total if self.total > 0 else 0.0


class BookieSanity(NamedTuple):
    """How a bookie's test of itself went. Source: BookieSanityService.BookieSanity."""

    passed: bool
    read_only: bool


class Readiness(NamedTuple):
    """Whether a bookie serves, and what it said. Source: BookieIsReadyService."""

    ready: bool
    message: str


class CollectorStatus(NamedTuple):
    """One garbage collector of a bookie; DbLedgerStorage has one for each ledger directory.

    Times are milliseconds since 1970: of the last round, or of the bookie's start before the first.
    Source: GarbageCollectionStatus.
    """

    force_compacting: bool
    major_compacting: bool
    minor_compacting: bool
    last_major_compaction_time: int
    last_minor_compaction_time: int
    last_entry_location_compaction_time: int
    major_compaction_counter: int
    minor_compaction_counter: int
    entry_location_compaction_counter: int
    #: Why the last round kept ledgers of scopes ≠ 0 although they are deleted, as it seems; only a bookie of ours does.
    scoped_deletes_held_back: str | None = None


class GarbageCollection(NamedTuple):
    """The garbage collection of a bookie; what is suspended is None where the bookie's release cannot suspend."""

    in_force_gc: bool
    major_suspended: bool | None
    minor_suspended: bool | None
    collectors: tuple[CollectorStatus, ...]


class Metric(NamedTuple):
    """One sample. `type` is counter, gauge, summary, histogram or untyped."""

    name: str
    labels: Mapping[str, str]
    value: float
    type: str


class BookieApi:
    """The endpoints of one bookie's HTTP server. Every call raises what `ApiClient.call` does, and ProtocolError for
    an answer of another shape than the endpoint's. `bookie_id` tells a gateway which bookie is meant; a bookie's own
    server passes over it. Source: org.apache.bookkeeper.server.http.service."""

    def __init__(self, client: ApiClient, bookie_id: str | None = None) -> None:
        self.client = client
        #: What every request has in its query.
        self.query: Mapping[str, str] = {} if bookie_id is None else {BOOKIE_PARAMETER: bookie_id}

    def state(self) -> BookieState:
        """Whether it runs, takes writes, stops."""
        fields = self._object("GET", "/bookie/state")
        return BookieState(
            fields.boolean("running"),
            fields.boolean("readOnly"),
            fields.boolean("shuttingDown"),
            fields.boolean("availableForHighPriorityWrites"),
        )

    def readiness(self) -> Readiness:
        """Whether it serves: it is past its start, and does not stop. A bookie that says no is no error."""
        path = f"{API_PREFIX}/bookie/is_ready"
        with self.client.exchange("GET", path, self.query) as answer:
            if answer.status not in (200, 503):
                raise self.client.error_of(answer, "GET", path)
            message, _ = _server_message(answer.response())
            return Readiness(answer.status == 200, message)

    def read_only(self) -> bool:
        """Whether it takes no writes."""
        return self._object("GET", "/bookie/state/readonly").boolean("readOnly")

    def set_read_only(self, wanted: bool) -> bool:
        """Have it take no writes, or take them again; how it is then.

        Raises BadRequest where it is read-only by its configuration, or that forbids it.
        """
        return self._object("PUT", "/bookie/state/readonly", {"readOnly": wanted}).boolean("readOnly")

    def space(self) -> DiskSpace:
        """The space on its ledger disks."""
        fields = self._object("GET", "/bookie/info")
        return DiskSpace(fields.integer("freeSpace"), fields.integer("totalSpace"))

    def sanity(self) -> BookieSanity:
        """Have it write, read and delete a ledger on itself."""
        fields = self._object("GET", "/bookie/sanity")
        return BookieSanity(fields.boolean("passed"), fields.boolean("readOnly"))

    def garbage_collection(self) -> GarbageCollection:
        """How its garbage collection stands."""
        forced = self._object("GET", "/bookie/gc").boolean("is_in_force_gc")
        major: bool | None
        minor: bool | None
        try:
            suspended = self._object("GET", "/bookie/gc/suspend_compaction")
        except (NotFound, Unsupported):
            major = minor = None
        else:
            major, minor = suspended.boolean("isMajorGcSuspended"), suspended.boolean("isMinorGcSuspended")
        return GarbageCollection(forced, major, minor, tuple(self._collectors()))

    def _collectors(self) -> Iterator[CollectorStatus]:
        document, what = self._json("GET", "/bookie/gc_details")
        if not isinstance(document, list):
            raise _unexpected(what, "no list", document)
        for item in document:
            fields = _Fields(item, what)
            yield CollectorStatus(
                fields.boolean("forceCompacting"),
                fields.boolean("majorCompacting"),
                fields.boolean("minorCompacting"),
                fields.integer("lastMajorCompactionTime"),
                fields.integer("lastMinorCompactionTime"),
                fields.integer("lastEntryLocationCompactionTime", 0),
                fields.integer("majorCompactionCounter"),
                fields.integer("minorCompactionCounter"),
                fields.integer("entryLocationCompactionCounter", 0),
                fields.text("scopedDeletesHeldBack", "") or None,
            )

    def force_garbage_collection(
        self, *, major: bool | None = None, minor: bool | None = None, accept_scoped_deletes: bool = False
    ) -> str:
        """Have it collect garbage now, with major and minor compaction as said (None: unless they are suspended).

        A round that was forced before and still runs is not followed by another. `accept_scoped_deletes` lets the round
        delete as many ledgers of scopes ≠ 0 as it finds deleted (a bookie of ours holds such a round back otherwise).
        Returns what the bookie said.
        """
        wanted = {"forceMajor": major, "forceMinor": minor, "acceptScopedDeletes": accept_scoped_deletes or None}
        given = {name: value for name, value in wanted.items() if value is not None}
        return self._text("PUT", "/bookie/gc", given or None)

    def suspend_compaction(self, *, major: bool, minor: bool) -> str:
        """Start no major or minor compaction from now on. Returns what the bookie said."""
        return self._text("PUT", "/bookie/gc/suspend_compaction", {"suspendMajor": major, "suspendMinor": minor})

    def resume_compaction(self, *, major: bool, minor: bool) -> str:
        """Start major or minor compactions again. Returns what the bookie said."""
        return self._text("PUT", "/bookie/gc/resume_compaction", {"resumeMajor": major, "resumeMinor": minor})

    def location_compactions(self) -> dict[str, bool]:
        """The databases of entry locations by path, and whether each is being compacted; empty without databases."""
        fields = self._object("GET", "/bookie/entry_location_compact")
        return {name: fields.boolean(name) for name in fields.names()}

    def compact_locations(self, paths: Sequence[str] = ()) -> str:
        """Have databases of entry locations compacted (none named: all). Returns what the bookie said.

        Raises BadRequest for a path that is none of them.
        """
        body = {"entryLocationRocksDBCompact": True, "entryLocations": ",".join(paths)}
        return self._text("PUT", "/bookie/entry_location_compact", body)

    def config(self) -> dict[str, Any]:
        """Its settings by name, as it has them now. Apache's bookies say only what was set, all as strings."""
        return self._object("GET", "/config/server_config").values

    def set_config(self, settings: Mapping[str, Any]) -> str:
        """Change settings in its memory; it forgets them when it stops. Returns what the bookie said."""
        return self._text("PUT", "/config/server_config", dict(settings))

    def metrics(self) -> str:
        """Its metrics in Prometheus' text format. Raises BkctlError where it has no provider of them."""
        try:
            return self.client.call("GET", "/metrics", self.query).text
        except BkctlError as error:
            if "stats provider" in error.message.lower():
                provider = "statsProviderClass=org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider"
                raise BkctlError(error.message, hint=f"start the bookie with {provider}") from error
            raise

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> _Fields:
        document, what = self._json(method, path, body)
        return _Fields(document, what)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[Any, str]:
        """The document of the answer, and what names it in messages."""
        response = self._call(method, path, body)
        what = f"{self.client.url}{API_PREFIX}{path}"
        try:
            return json.loads(response.body), what
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"{what} answered what is no JSON: {_shortened(response.text)[:60]!r}",
                hint="is this a bookie's server?",
            ) from error

    def _text(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        return _server_message(self._call(method, path, body))[0]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> ApiResponse:
        data = None if body is None else json.dumps(body).encode("ascii")
        return self.client.call(method, API_PREFIX + path, self.query, data, size_max=JSON_SIZE_BYTES_MAX)


class _Fields:
    """A JSON object of an answer, whose values must be of the kind that is asked for; `what` names it in messages."""

    def __init__(self, document: Any, what: str) -> None:
        if not isinstance(document, dict):
            raise _unexpected(what, "no object", document)
        self.values: dict[str, Any] = document
        self._what = what

    def names(self) -> list[str]:
        return list(self.values)

    def boolean(self, name: str) -> bool:
        """A boolean, also as the string that Apache's server makes of it here and there."""
        return self._typed(name, "boolean", lambda value: {"True": True, "False": False}[str(value).capitalize()])

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number. `default` stands in for one that older releases do not send."""
        if default is not None and name not in self.values:
            return default
        return self._typed(name, "whole number", _whole)

    def text(self, name: str, default: str) -> str:
        """A string; `default` stands in for one that is not sent."""
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise _unexpected(f"{self._what}: {name!r}", "no text", value)
        return value

    def _typed(self, name: str, kind: str, convert: Callable[[Any], T]) -> T:
        if name not in self.values:
            raise ProtocolError(f"{self._what} answered without {name!r}", hint="is this a bookie's server?")
        try:
            return convert(self.values[name])
        except (KeyError, ValueError) as error:
            raise _unexpected(f"{self._what}: {name!r}", f"no {kind}", self.values[name]) from error


def _whole(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value


def _unexpected(what: str, problem: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{what} is {problem}: {_shortened(repr(value))[:60]}", hint="is this a bookie's server?")


# --- metrics --------------------------------------------------------------------------------------------------------

_SAMPLE: Final = re.compile(
    r"([a-zA-Z_:][\w:.-]*)[ \t]*(?:\{(.*)\}[ \t]*|[ \t])([^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*", re.ASCII
)
_LABEL: Final = re.compile(r'[ \t]*([a-zA-Z_][\w.-]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)', re.ASCII)
_ESCAPE: Final = re.compile(r"\\(.)")


def parse_metrics(text: str, where: str = "") -> Iterator[Metric]:
    """The samples in Prometheus' text format 0.0.4, in order. Raises ProtocolError for a line that is none.

    Names and labels may have dots and dashes, which Apache's provider lets through.
    """
    at = f"{where}: " if where else ""
    types: dict[str, str] = {}
    for number, line in enumerate(io.StringIO(text), 1):
        line = line.strip()
        if not line:
            continue
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                types[words[2]] = words[3]
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError(line)
            value = float(match[3])
            labels = _labels(match[2] or "")
        except ValueError as error:
            raise ProtocolError(f"{at}line {number} is no metric: {_shortened(line)[:60]!r}") from error
        name = match[1]
        family = name if name in types else re.sub(r"_(?:bucket|count|sum)$", "", name)
        yield Metric(name, labels, value, types.get(family, "untyped"))


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError(text)
        labels[match[1]] = _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], match[2])
        at = match.end()
    return labels
