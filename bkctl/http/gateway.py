"""The gateway's way to one bookie: a request with `?bookie=ID` goes on to the HTTP server that it registered."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from bkctl.errors import NotFound, UsageError
from bkctl.http.client import BOOKIE_PARAMETER as BOOKIE
from bkctl.http.client import ApiClient, bookie_url
from bkctl.http.service import Service


@dataclass(frozen=True, slots=True)
class PassedOn:
    """How the bookies' servers are reached: the token that they want, and TLS for those that registered https."""

    token: str | None = None
    tls: ssl.SSLContext | None = None
    timeout_s: float = 30.0


async def forward(service: Service, passed_on: PassedOn, request: Request, body: bytes) -> Response:
    """What the bookie's server answers, its status too. Raises UsageError, NotFound, Unreachable."""
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
    client = ApiClient(url, token=passed_on.token, timeout_s=passed_on.timeout_s, tls=passed_on.tls)
    query = {name: value for name, value in request.query_params.items() if name != BOOKIE}
    method = "GET" if request.method == "HEAD" else request.method
    answer = await asyncio.to_thread(client.request, method, path, query, body or None)
    return Response(answer.body, answer.status, media_type=answer.content_type)
