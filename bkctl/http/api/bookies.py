"""Endpoints of a cluster's bookies."""

from __future__ import annotations

import asyncio
from decimal import ROUND_DOWN, Decimal
from typing import Final

from starlette.responses import Response

from bkctl.client.disk_space import disk_space
from bkctl.errors import NotFound
from bkctl.http.endpoints import (
    BOOLEAN,
    INTEGER,
    PREFIX,
    STRING,
    STRING_OR_NULL,
    ApiCall,
    Endpoints,
    Value,
    ValueKind,
    json_answer,
    map_of,
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
        Value("type", "ro: read-only bookies; anything else: writable ones."),
        Value("print_hostnames", "With the host of each bookie.", ValueKind.BOOLEAN),
    ),
    answer=map_of(STRING_OR_NULL),
)  # fmt: skip
async def list_bookies(call: ApiCall) -> Response:
    """List the bookies of one state. Source: ListBookiesService."""
    state = "ro" if call.values.get("type") == "ro" else "rw"
    wants_host = call.values.get("print_hostnames", False)
    found = {}
    for bookie in await _registered(await call.service.cluster()):
        if bookie.state == state:
            found[bookie.bookie_id] = bookie.address[0] if wants_host and bookie.address else None
    return json_answer(found)


@ENDPOINTS.get(
    f"{PREFIX}/bookie/list_bookie_info", "Free and total space of each registered bookie, as the bookie reports it.",
    answer=map_of(STRING), errors={404: "No bookie answers"},
)  # fmt: skip
async def list_bookie_info(call: ApiCall) -> Response:
    """Ask the bookies for their space. Source: ListBookieInfoService."""
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
    """Return the size in decimal units with up to three digits, rounded down; nothing below 1000."""
    value, unit = Decimal(size), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    if unit == 0:
        return ""
    text = f"{value.quantize(Decimal('0.001'), ROUND_DOWN):f}".rstrip("0").rstrip(".")
    return f"({text}{('', 'KB', 'MB', 'GB', 'TB')[unit]})"


@ENDPOINTS.get(
    f"{PREFIX}/bookie/cluster_info", "The cluster: its auditor, under-replication, and numbers of bookies.",
    answer=object_of(
        auditorElected=BOOLEAN, auditorId=STRING, clusterUnderReplicated=BOOLEAN, ledgerReplicationEnabled=BOOLEAN,
        totalBookiesCount=INTEGER, writableBookiesCount=INTEGER, readonlyBookiesCount=INTEGER,
        unavailableBookiesCount=INTEGER,
    ),
)  # fmt: skip
async def show_cluster(call: ApiCall) -> Response:
    """Return the state of the cluster, without a field that ClusterInfo lacks. Source: ClusterInfoService."""
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
        }
    )


@ENDPOINTS.get(
    f"{PREFIX}/bookie/ledger_scopes", "The number of registered bookies that know ledger scopes (BP-35).",
    answer=object_of(ledgerScopesBookiesCount=INTEGER),
)  # fmt: skip
async def ledger_scopes(call: ApiCall) -> Response:
    bookies = await _registered(await call.service.cluster())
    return json_answer({"ledgerScopesBookiesCount": sum(bookie.ledger_scopes for bookie in bookies)})
