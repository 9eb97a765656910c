"""The REST API as an ASGI application: access, routing, checks of requests, and errors.

Concurrent requests, the size of a body, and the times for receiving a body, computing an answer and sending it are
bounded. Errors are answered as `{"error": …, "hint": …}`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from bkctl import errors
from bkctl.http import bookie_endpoints, cluster_endpoints
from bkctl.http.bookie_client import BOOKIE_PARAMETER
from bkctl.http.endpoints import TEXT, ApiCall, ApiEndpoint, document, error_answer
from bkctl.http.gateway import Upstream, forward
from bkctl.http.server_url import is_loopback_address
from bkctl.http.service import Service, ServiceUnavailable

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from bkctl.http.console.site import Console

log: Final = logging.getLogger("bkctl.http")

#: All endpoints: of one bookie, which a gateway forwards, and of a cluster.
ENDPOINTS: Final = (*bookie_endpoints.ENDPOINTS, *cluster_endpoints.ENDPOINTS)
#: Apache's server has no such limits.
REQUESTS_MAX: Final = 64
BODY_SIZE_BYTES_MAX: Final = 64 << 10
BODY_TIMEOUT_S: Final = 15.0
ANSWER_TIMEOUT_S: Final = 90.0
#: A gateway waits longer than the bookie by this time, so that the bookie's own error arrives: it says more.
FORWARD_TIMEOUT_S: Final = 5.0
#: The longest wait for a client to read the next piece of an answer.
SEND_TIMEOUT_S: Final = 30.0
OPENAPI_PATH: Final = "/openapi.json"
METRICS_PATH: Final = "/metrics"
#: The query value that requests passwords and tokens.
SHOW_SECRETS: Final = "show_secrets"
_CLOSE: Final = {"Connection": "close"}
_BROWSER_MARKS: Final = ("origin", "referer", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")

_STATUS: Final[tuple[tuple[type[errors.BkctlError], int], ...]] = (
    (errors.ProtocolError, 502),
    (errors.UsageError, 400),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.ReadOnlyBookie, 409),
    (ServiceUnavailable, 503),
    (errors.TooManyRequests, 503),
    (errors.TimedOut, 504),
    (errors.Unreachable, 503),
)


class Refused(Exception):
    """A request that is answered with `answer`, and ends its connection unless other `headers` are given."""

    def __init__(self, status: int, message: str, hint: str | None = None, headers: Mapping[str, str] = _CLOSE) -> None:
        self.answer = error_answer(status, message, hint, headers)


class Api:
    """The endpoints of a bookie's own server, or of a gateway if `service` has no bookie; few of auto-recovery's.

    Without `token`, every connected client has access. `read_only_token` gives access to endpoints that change nothing,
    without secrets. With `open_probes`, probes need neither, unless a gateway would forward them. `is_local`: any other
    request must come over loopback and name this machine as its host, which excludes web pages that reach it under
    another name. `token_hint` says where the token is, for clients without. `upstream` is for a gateway's requests to
    bookies, `console` has its pages. Requests of web pages of others are always refused.
    """

    def __init__(
        self,
        service: Service,
        *,
        token: str | None = None,
        read_only_token: str | None = None,
        is_local: bool = False,
        upstream: Upstream | None = None,
        open_probes: bool = True,
        token_hint: str = "",
        console: Console | None = None,
    ) -> None:
        self.service = service
        self._console = console
        self._token = None if token is None else token.encode()
        self._read_only_token = None if read_only_token is None else read_only_token.encode()
        self._hosts = {"localhost", socket.gethostname().lower()} if is_local else None
        self._upstream = upstream
        self._open_probes = open_probes
        self._token_hint = "; ".join(filter(None, ("send 'Authorization: Bearer TOKEN'", token_hint)))
        self._running_count = 0
        self.endpoints: tuple[ApiEndpoint, ...] = (
            ApiEndpoint(
                "GET", "/heartbeat", "Whether the server is there.", self._heartbeat, TEXT, any_method=True, probe=True
            ),
            ApiEndpoint("GET", OPENAPI_PATH, "This document.", self._document, {"type": "object"}),
            *(each for each in ENDPOINTS if service.samples is None or each.path == METRICS_PATH),
        )
        #: Path → method → endpoint.
        self._routes: dict[str, dict[str, ApiEndpoint]] = {}
        for each in self.endpoints:
            methods = ("GET", "PUT", "POST", "DELETE") if each.any_method else (each.method,)
            self._routes.setdefault(each.path, {}).update(dict.fromkeys(methods, each))

    async def _heartbeat(self, call: ApiCall) -> str:
        return "OK\n"

    async def _document(self, call: ApiCall) -> dict[str, Any]:
        is_gateway, needs_token = not call.service.has_bookie, self._token is not None
        return document(self.endpoints, gateway=is_gateway, needs_token=needs_token, open_probes=self._open_probes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request (ASGI)."""
        if scope["type"] != "http":
            return

        async def send_bounded(message: Message) -> None:
            """Send a part of the answer, and give up on a client that does not read it."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        try:
            request = Request(scope, receive)
            response = await self._answer(request)
            if request.method in ("PUT", "DELETE") and scope["path"] in self._routes and response.status_code != 401:
                who = request.client.host.removeprefix("::ffff:") if request.client is not None else "?"
                log.info("%s %s from %s: %d", request.method, scope["path"], who, response.status_code)
            await response(scope, receive, send_bounded)
        except ClientDisconnect:
            return
        except TimeoutError:
            log.info("%s: the client does not read its answer", scope["path"])
        except errors.BkctlError as error:  # after the answer has begun, which is cut short
            log.warning("%s: %s", scope["path"], error)
        except Exception:
            log.exception("%s: the answer is cut short", scope["path"])

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._checked(request)
        except Refused as error:
            return error.answer
        except errors.BkctlError as error:
            status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
            headers = {"Retry-After": "1"} if isinstance(error, ServiceUnavailable) else None
            return error_answer(status, error.message, error.hint, headers)
        except ClientDisconnect:
            raise
        except Exception as error:
            log.exception("%s %r", request.method, request.scope["path"])
            return error_answer(500, f"Internal error: {type(error).__name__}", "see the server's log")

    @asynccontextmanager
    async def _running(self, timeout_s: float, what: str = "answer") -> AsyncIterator[None]:
        """Count and time one request, whose body is here: one that its client holds back takes no other's place."""
        if self._running_count >= REQUESTS_MAX:
            raise Refused(503, "Too many requests at once", "try again later", {"Retry-After": "1"})
        self._running_count += 1
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise errors.TimedOut(f"The {what} took longer than {timeout_s:g} s") from error
        finally:
            self._running_count -= 1

    async def _checked(self, request: Request) -> Response:
        path = request.scope["path"]  # not that of `request.url`, which is parsed again
        if self._console is not None and self._console.owns(path):
            return await self._page(self._console, request)
        methods = self._routes.get(path) or self._routes.get(path.removesuffix("/"))
        endpoint = methods.get("GET" if request.method == "HEAD" else request.method) if methods else None
        has_full_access = self._token is None or hmac.compare_digest(_bearer_token(request), self._token)
        _check_page(request, endpoint)
        is_gateway = not self.service.has_bookie
        if not (endpoint and endpoint.is_open(open_probes=self._open_probes, gateway=is_gateway)):
            self._check_loopback(request)
            if not has_full_access:
                self._check_token(request, endpoint)
            self._check_host(request)
        if methods is None:
            raise Refused(404, f"Unknown path {path}", f"{OPENAPI_PATH} lists the endpoints", {})
        if endpoint is None:
            allowed = ", ".join(sorted(methods))
            raise Refused(405, f"{request.method} is not allowed here", f"use {allowed}", {"Allow": allowed})
        body = await _read_body(request)
        timeout_s = endpoint.timeout_s or ANSWER_TIMEOUT_S
        if self._is_forwarded(endpoint):
            timeout_s += FORWARD_TIMEOUT_S
        async with self._running(timeout_s):
            return await self._handled(endpoint, request, body, has_full_access)

    async def _page(self, console: Console, request: Request) -> Response:
        """Return a page of the console, which has its own sign-in. Links may lead to it from anywhere."""
        self._check_host(request)
        if request.method not in ("GET", "HEAD"):
            _check_page(request, None)
        self._check_loopback(request)
        body = await _read_body(request)
        async with self._running(ANSWER_TIMEOUT_S, "page"):
            return await console.answer(request, body)

    async def _handled(self, endpoint: ApiEndpoint, request: Request, body: bytes, sees_secrets: bool) -> Response:
        values = endpoint.parse_query(request.query_params.multi_items())
        is_forwarded = self._is_forwarded(endpoint)
        named, local = request.query_params.get(BOOKIE_PARAMETER), self.service.local_bookie
        if endpoint.of_bookie and local is not None and named not in (None, local.bookie_id):
            raise errors.NotFound(f"This is bookie {local.bookie_id}, not {named}", hint="ask the other's own server")
        # Apache's bookies behind a gateway mask nothing.
        has_secrets = values.get(SHOW_SECRETS) or (
            is_forwarded and any(value.name == SHOW_SECRETS for value in endpoint.values)
        )
        if has_secrets and not sees_secrets:
            raise Refused(403, "The token is read-only, without secrets", "send the full token")
        parsed = endpoint.body.parse(body) if endpoint.body is not None else {}
        if is_forwarded:
            assert self._upstream is not None
            return await forward(self.service, self._upstream, endpoint, request, body)
        return await endpoint.respond(ApiCall(self.service, values, parsed, sees_secrets))

    def _is_forwarded(self, endpoint: ApiEndpoint) -> bool:
        return endpoint.of_bookie and not self.service.has_bookie

    def _check_token(self, request: Request, endpoint: ApiEndpoint | None) -> None:
        """Refuse a request without the full token, unless the read-only token suffices."""
        reader = self._read_only_token
        if reader is None or not hmac.compare_digest(_bearer_token(request), reader):
            raise self._no_token()
        if endpoint is not None and not endpoint.only_reads:
            raise Refused(403, "The token is read-only", "send the full token")

    def _check_loopback(self, request: Request) -> None:
        """Refuse a request over anything but loopback addresses, if only this machine has access."""
        ends = (request.scope.get("client"), request.scope.get("server"))
        if self._hosts is not None and not all(end is not None and is_loopback_address(end[0]) for end in ends):
            raise self._no_token()

    def _no_token(self) -> Refused:
        headers = {"WWW-Authenticate": "Bearer", **_CLOSE}
        return Refused(401, "The token is missing or wrong", self._token_hint, headers)

    def _check_host(self, request: Request) -> None:
        if self._hosts is not None and not _is_one_of(request.headers.get("host", ""), self._hosts):
            raise Refused(403, "The request is for another host", "ask for localhost or an address")


def _check_page(request: Request, endpoint: ApiEndpoint | None) -> None:
    """Refuse a request that a browser sent for a web page of another server."""
    headers = request.headers
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    host = headers.get("host", "")
    is_foreign = origin is not None and origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower())
    if is_foreign or site not in (None, "none", "same-origin"):
        raise Refused(403, "Requests of web pages are refused", "ask with bkctl or curl")
    # Browsers without Sec-Fetch-Site all call themselves Mozilla.
    is_browser = headers.get("user-agent", "").startswith("Mozilla/") or any(name in headers for name in _BROWSER_MARKS)
    if endpoint is not None and endpoint.acts and is_browser:
        hint = "a link or a picture of a page could send it; ask with bkctl or curl"
        raise Refused(403, f"{endpoint.path} changes something, and a browser asks for it", hint)


def _bearer_token(request: Request) -> bytes:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""


def _is_one_of(host: str, names: set[str]) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    name = name.strip("[]").lower()
    if not name or name in names or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _read_body(request: Request) -> bytes:
    """Return the body. Refuse one that is too large or too slow."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > BODY_SIZE_BYTES_MAX:
                    raise Refused(413, f"The body has more than {BODY_SIZE_BYTES_MAX} bytes")
                parts.append(part)
    except TimeoutError:
        raise Refused(408, f"The body did not come within {BODY_TIMEOUT_S:g} s") from None
    return b"".join(parts)
