"""Forwards a gateway's requests with `?bookie=ID` to the HTTP server that the bookie registered."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from bkctl.errors import NotFound, ProtocolError, UsageError
from bkctl.http.bookie_client import BOOKIE_PARAMETER
from bkctl.http.client import ApiClient, ApiResponse
from bkctl.http.endpoints import JSON, TEXT, ApiEndpoint
from bkctl.http.server_url import token_for_registered
from bkctl.http.service import Service, ServiceUnavailable

#: Requests under way to all bookies, and to one bookie: bookies that do not answer leave room for the others.
FORWARDS_MAX: Final = 64
FORWARDS_PER_BOOKIE_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Upstream:
    """The connection settings for the bookies' servers: their token, and TLS for the ones that registered https.

    `tls` has the authorities that the user named. The token is never the gateway's own.
    """

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    timeout_s: float = 30.0
    #: Own threads: requests that wait for a bookie do not take those for the metadata store.
    threads: ThreadPoolExecutor = field(
        default_factory=partial(ThreadPoolExecutor, FORWARDS_MAX, "gateway"), repr=False, compare=False
    )
    #: Requests under way by bookie id.
    exchanges: Mapping[str, set[Future[Any]]] = field(
        default_factory=lambda: defaultdict(set), repr=False, compare=False
    )

    def client(self, url: str, timeout_s: float, connect_timeout_s: float | None = None) -> ApiClient:
        """Return a client of the server that a bookie registered."""
        token = token_for_registered(url, self.token, has_authorities=self.tls is not None)
        return ApiClient(url, token=token, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, tls=self.tls)


async def forward(
    service: Service, upstream: Upstream, endpoint: ApiEndpoint, request: Request, body: bytes
) -> Response:
    """Return the answer of the bookie's server and its status, with the endpoint's content type.

    Raise UsageError, NotFound, Unreachable, ServiceUnavailable while FORWARDS_PER_BOOKIE_MAX requests wait for that
    bookie, and ProtocolError for a status that a bookie's server does not send.
    """
    path = request.scope["path"]
    bookie_id = request.query_params.get(BOOKIE_PARAMETER)
    if bookie_id is None:
        raise UsageError(
            f"{path} is about one bookie, and the request names none",
            hint="add ?bookie=ID (of bkctl: --bookie ID); bookie ids are in /api/v1/bookie/list_bookies",
        )
    cluster = await service.cluster()
    bookie = await asyncio.to_thread(cluster.bookies.get, bookie_id)
    if bookie is None:
        raise NotFound(f"Bookie {bookie_id} does not exist", hint="/api/v1/bookie/list_bookies lists the bookies")
    query = {name: value for name, value in request.query_params.items() if name != BOOKIE_PARAMETER}
    method = "GET" if request.method == "HEAD" else request.method
    exchanges = upstream.exchanges[bookie_id]
    if len(exchanges) >= FORWARDS_PER_BOOKIE_MAX:
        raise ServiceUnavailable(
            f"{FORWARDS_PER_BOOKIE_MAX} requests to bookie {bookie_id} wait for its HTTP server",
            hint="try again later; check that server, and the look-up of its name",
        )

    def ask() -> ApiResponse:
        timeout_s = max(upstream.timeout_s, endpoint.timeout_s or 0)
        client = upstream.client(service.url_of(bookie), timeout_s, upstream.timeout_s)
        with client.exchange(method, path, query, body or None) as answer:
            return answer.response()

    exchange = upstream.threads.submit(ask)
    exchanges.add(exchange)
    exchange.add_done_callback(exchanges.discard)
    answer = await asyncio.wrap_future(exchange)  # A timeout here does not end the request.
    if answer.status in (401, 403):
        raise ProtocolError(
            f"The HTTP server of bookie {bookie_id} refuses the gateway ({answer.status})",
            hint="--bookie-token-file has its token; a token goes to loopback, or over https with --tls-ca",
        )
    if not (200 <= answer.status < 300 or 400 <= answer.status < 600):
        raise ProtocolError(f"The HTTP server of bookie {bookie_id} answered with status {answer.status}")
    return Response(answer.body, answer.status, media_type=_content_type(endpoint, answer))


def _content_type(endpoint: ApiEndpoint, answer: ApiResponse) -> str:
    """Return the content type of a forwarded answer: the endpoint's, or JSON or text by the body."""
    if answer.status < 300 and isinstance(endpoint.answer, str):
        return endpoint.answer
    try:
        json.loads(answer.body)
    except (ValueError, RecursionError):
        return TEXT
    return JSON
