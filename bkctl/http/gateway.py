"""The gateway's way to one bookie: a request with `?bookie=ID` goes on to the HTTP server that it registered."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from bkctl.errors import NotFound, ProtocolError, UsageError
from bkctl.http.client import BOOKIE_PARAMETER as BOOKIE
from bkctl.http.client import ApiClient, ApiResponse, bookie_url, token_for_registered
from bkctl.http.endpoints import JSON, TEXT, Endpoint
from bkctl.http.service import Service


@dataclass(frozen=True, slots=True)
class PassedOn:
    """How the bookies' servers are reached: the token that they want, and TLS for those that registered https.

    `tls` holds the authorities that the user named. The token is never the gateway's own.
    """

    token: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    timeout_s: float = 30.0


async def forward(service: Service, passed_on: PassedOn, endpoint: Endpoint, request: Request, body: bytes) -> Response:
    """What the bookie's server answers, its status too; the content type is the endpoint's own.

    Raises UsageError, NotFound, Unreachable, and ProtocolError for a status that is no answer of a bookie's server.
    """
    path = request.scope["path"]
    bookie_id = request.query_params.get(BOOKIE)
    if bookie_id is None:
        raise UsageError(
            f"{path} is about one bookie, and none is named",
            hint=f"add ?{BOOKIE}=ID (of bkctl: --bookie ID); {BOOKIE} ids are in /api/v1/bookie/list_bookies",
        )
    cluster = await service.cluster()
    bookie = await asyncio.to_thread(cluster.bookies.get, bookie_id)
    if bookie is None:
        raise NotFound(f"There is no bookie {bookie_id}", hint="/api/v1/bookie/list_bookies lists them")
    address = service.addresses.get(bookie_id)
    url = bookie_url(bookie, None if address is None else address[0])
    token = token_for_registered(url, passed_on.token, has_authorities=passed_on.tls is not None)
    client = ApiClient(url, token=token, timeout_s=passed_on.timeout_s, tls=passed_on.tls)
    query = {name: value for name, value in request.query_params.items() if name != BOOKIE}
    method = "GET" if request.method == "HEAD" else request.method
    answer = await asyncio.to_thread(client.request, method, path, query, body or None)
    if answer.status in (401, 403):
        raise ProtocolError(
            f"The HTTP server of bookie {bookie_id} refuses the gateway ({answer.status})",
            hint="--bookie-token-file has its token; a token goes to loopback, or over https with --tls-ca",
        )
    if not (200 <= answer.status < 300 or 400 <= answer.status < 600):
        raise ProtocolError(f"The HTTP server of bookie {bookie_id} answered with status {answer.status}")
    return Response(answer.body, answer.status, media_type=_content_type(endpoint, answer))


def _content_type(endpoint: Endpoint, answer: ApiResponse) -> str:
    """The content type to pass an answer on with, whatever the bookie's server says of it."""
    if answer.status < 300 and isinstance(endpoint.answer, str):
        return endpoint.answer
    try:
        json.loads(answer.body)
    except (ValueError, RecursionError):
        return TEXT
    return JSON
