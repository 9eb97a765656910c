"""Endpoints of a cluster's bookies."""

from __future__ import annotations

import asyncio
from decimal import ROUND_DOWN, Decimal
from typing import Final

from starlette.responses import Response

from bkctl.client.operations import disk_space
from bkctl.errors import NotFound
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
    Call,
    Endpoints,
    Kind,
    Value,
    json_answer,
    map_of,
    nullable,
    object_of,
)
from bkctl.metadata.admin.overview import cluster_info
from bkctl.metadata.cluster import Cluster, RegisteredBookie

ENDPOINTS: Final = Endpoints(of_bookie=False)


async def _registered(cluster: Cluster) -> list[RegisteredBookie]:
    return await asyncio.to_thread(cluster.bookies.list, include_down=False)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_bookies", "The registered bookies, writable ones or read-only ones.",
    values=(
        Value("type", "ro: those that are read-only; anything else: those that are writable."),
        Value("print_hostnames", "With the host that each is to be reached at.", Kind.BOOLEAN),
    ),
    answer=map_of(nullable("string")),
)  # fmt: skip
async def list_bookies(call: Call) -> Response:
    """Source: ListBookiesService."""
    state = "ro" if call.values.get("type") == "ro" else "rw"
    wants_host = call.values.get("print_hostnames", False)
    found = {}
    for bookie in await _registered(await call.service.cluster()):
        if bookie.state == state:
            found[bookie.bookie_id] = bookie.address[0] if wants_host and bookie.address else None
    return json_answer(found)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_bookie_info", "Free and total space of each registered bookie, as it says itself.",
    answer=map_of(STRING), errors={404: "No bookie answers"},
)  # fmt: skip
async def list_bookie_info(call: Call) -> Response:
    """Source: ListBookieInfoService."""
    bookkeeper = await call.service.bookkeeper()
    bookies = await _registered(bookkeeper.cluster)
    found = {}
    free_total = total_total = 0
    async for space in disk_space(bookkeeper, bookies):
        if space.error is None:
            free, total = space.free or 0, space.total or 0
            found[space.bookie.bookie_id] = f": {_space_text(free, total)},"
            free_total += free
            total_total += total
    if not found:
        raise NotFound("No bookie answers")
    return json_answer({**found, "ClusterInfo: ": _space_text(free_total, total_total)})


def _space_text(free: int, total: int) -> str:
    return f"{{Free: {free}{_readable(free)}, Total: {total}{_readable(total)}}}"


def _readable(size: int) -> str:
    """In thousands, three digits, rounded down, without zeros at the end; nothing below 1000."""
    value, unit = Decimal(size), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return ""
    text = f"{value.quantize(Decimal('0.001'), ROUND_DOWN):f}".rstrip("0").rstrip(".")
    return f"({text}{('', 'KB', 'MB', 'GB', 'TB')[unit]})"


@ENDPOINTS.get(
    f"{PREFIX}/bookie/cluster_info", "The cluster: its auditor, whether ledgers are under-replicated, bookies counted.",
    answer=object_of(
        auditorElected=BOOLEAN, auditorId=STRING, clusterUnderReplicated=BOOLEAN, ledgerReplicationEnabled=BOOLEAN,
        totalBookiesCount=INTEGER, writableBookiesCount=INTEGER, readonlyBookiesCount=INTEGER,
        unavailableBookiesCount=INTEGER, ledgerScopesBookiesCount=INTEGER,
    ),
)  # fmt: skip
async def show_cluster(call: Call) -> Response:
    """Source: ClusterInfoService."""
    info = await asyncio.to_thread(cluster_info, await call.service.cluster())
    return json_answer(
        {
            "auditorElected": info.auditor_elected,
            "auditorId": info.auditor_id or "",
            "clusterUnderReplicated": info.underreplicated,
            "ledgerReplicationEnabled": info.replication_enabled,
            "totalBookiesCount": info.bookie_count,
            "writableBookiesCount": info.writable_count,
            "readonlyBookiesCount": info.read_only_count,
            "unavailableBookiesCount": info.down_count,
            "ledgerScopesBookiesCount": info.scopes_count,
        }
    )
