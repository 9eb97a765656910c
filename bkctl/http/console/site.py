"""The console of a gateway: read-only pages for a browser, rendered from the templates in this package.

A visitor signs in with the gateway's token, full or read-only, or by a link that works once, and keeps a session in a
cookie that scripts and other sites cannot use. No page changes anything, shows a password, or loads from another host.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.http.console.pages import PAGES, LoadHistory, Sources
from bkctl.http.console.templates import templates
from bkctl.http.gateway import Upstream
from bkctl.http.service import Service

ROOT: Final = "/console"
SESSION_S: Final = 12 * 3600
SESSIONS_MAX: Final = 256
#: A wrong token costs its sender this time.
WRONG_TOKEN_S: Final = 0.5
_ASSETS: Final[Mapping[str, str]] = {"console.css": "text/css", "console.js": "text/javascript"}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "X-Frame-Options": "DENY",
}


class Console:
    """The pages under `/console`. `tokens` open it; without any it is open to every client that reaches it.

    `link_key` opens it once, as `/console/enter?key=…`.
    """

    def __init__(
        self, service: Service, upstream: Upstream, *, tokens: Iterable[str | None] = (), link_key: str | None = None
    ) -> None:
        self.service = service
        self.history = LoadHistory(service, upstream)
        self._tokens = [token.encode() for token in tokens if token]
        self._link_key = link_key
        #: Session → the monotonic time of its end, the oldest first.
        self._sessions: dict[str, float] = {}
        self._assets = {name: (files("bkctl.http.console") / name).read_bytes() for name in _ASSETS}
        self._templates = templates()

    def owns(self, path: str) -> bool:
        """Return True for the paths of the console."""
        return path == "/" or path == ROOT or path.startswith(f"{ROOT}/")

    async def answer(self, request: Request, body: bytes) -> Response:
        """Answer a request for one of the console's paths; errors are pages, too."""
        path, method = request.scope["path"], request.method
        name = path.removeprefix(ROOT).strip("/")
        if method not in ("GET", "HEAD") and not (method == "POST" and name in ("login", "logout")):
            return self._refuse(405, f"{method} is not allowed here", allow="GET, HEAD")
        if name in _ASSETS:
            return Response(self._assets[name], media_type=_ASSETS[name], headers={"Cache-Control": "max-age=300"})
        if name == "enter":
            return self._enter(request)
        if name == "login":
            return await self._sign_in(request, body)
        if name == "logout" and method == "POST":
            self._sessions.pop(request.cookies.get(_cookie(request), ""), None)
            return _to(request, "login")
        if not self._is_open(request):
            return _to(request, "login", after=name) if method == "GET" else _to(request, "login")
        if path != f"{ROOT}/" and not name:
            return _to(request, "")
        return await self._show(request, name)

    async def close(self) -> None:
        """End the reading of the bookies' load."""
        await self.history.close()

    async def _show(self, request: Request, name: str) -> Response:
        first, _, rest = name.partition("/")
        page = PAGES.get(first)
        try:
            if page is None or bool(rest) != page.takes_subject:
                raise NotFound(f"No page {name!r}", hint="the navigation has all pages")
            self.history.begin()
            cluster: Any = None if page.is_of_loads else await self.service.cluster()
            of = Sources(cluster, self.history, rest, dict(request.query_params))
            values = await asyncio.to_thread(page.read, of)
        except BkctlError as error:
            status = 404 if isinstance(error, NotFound) else 400 if isinstance(error, UsageError) else 503
            return self._refuse(status, error.message, error.hint, here=first)
        if isinstance(values, str):  # the name of another page
            return _to(request, values)
        return self._page(page.template, 200, here=first, **values)

    def _refuse(
        self, status: int, message: str, hint: str | None = None, here: str | None = None, allow: str | None = None
    ) -> Response:
        values = {"title": f"{status} {HTTPStatus(status).phrase}", "message": message, "hint": hint, "here": here}
        answer = self._page("error.html", status, **values)
        if allow is not None:
            answer.headers["Allow"] = allow
        return answer

    def _page(self, template: str, status: int, **values: Any) -> Response:
        values = {"here": None, "root": ROOT, "signed_in": bool(self._tokens), "history": self.history, **values}
        text = self._templates.get_template(template).render(values)
        data = text.encode("utf-8", "replace")  # Names of nodes may hold half a surrogate pair.
        return Response(data, status, headers=_HEADERS, media_type="text/html; charset=utf-8")

    def _is_open(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if not self._tokens or (scheme.lower() == "bearer" and self._knows(given.strip())):
            return True
        return self._sessions.get(request.cookies.get(_cookie(request), ""), 0.0) > time.monotonic()

    def _knows(self, token: str) -> bool:
        given = token.encode("utf-8", "replace")
        return sum(hmac.compare_digest(given, each) for each in self._tokens) > 0

    def _enter(self, request: Request) -> Response:
        key, given = self._link_key, request.query_params.get("key", "")
        if key is None or not hmac.compare_digest(given.encode("utf-8", "replace"), key.encode()):
            hint = "a link works once: run 'bkctl console' again, or sign in with the token"
            return self._refuse(403, "The link was used, or is not of this console", hint)
        self._link_key = None
        return self._opened(request, "")

    async def _sign_in(self, request: Request, body: bytes) -> Response:
        after = request.query_params.get("after", "")
        if request.method != "POST":
            return self._page("login.html", 200, after=after, is_wrong=False)
        try:
            given = parse_qs(body.decode("utf-8", "replace"), max_num_fields=8).get("token", [""])[0]
        except ValueError:  # more fields than the page has
            given = ""
        if not self._knows(given.strip()):
            await asyncio.sleep(WRONG_TOKEN_S)
            return self._page("login.html", 401, after=after, is_wrong=True)
        return self._opened(request, after)

    def _opened(self, request: Request, name: str) -> Response:
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(32)
        self._sessions[session] = time.monotonic() + SESSION_S
        answer = _to(request, name)
        answer.set_cookie(
            _cookie(request), session, max_age=SESSION_S, path=ROOT, httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer


def _cookie(request: Request) -> str:
    """Return the cookie's name: browsers send the cookies of one host to each of its ports."""
    return f"bkctl_{(request.scope.get('server') or ('', 0))[1]}"


def _to(request: Request, name: str, *, after: str = "") -> Response:
    """Return a redirect to a page of the console, which `name` cannot leave."""
    query = f"?after={quote(after, safe='')}" if after else ""
    return RedirectResponse(f"{ROOT}/{quote(name.lstrip('/'))}{query}", 303, headers=_HEADERS)
