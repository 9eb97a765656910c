"""Our bookie in the test's own process, and requests to it over its port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from bkctl.bookie.bookie import Bookie
from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import AddRequest, Protocol, Status

PLAIN = LedgerId(0, 5)
SCOPED = LedgerId(7, 5)
PAYLOAD = b"payload"


def config_for(root: Path, **changes: Any) -> BookieConfig:
    return BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(root / "journal"),),
        ledger_directories=(str(root / "ledgers"),),
        journal_pre_alloc_size_mb=1,
        disk_usage_threshold=1.0,
    ).with_changes(**changes)


@contextlib.asynccontextmanager
async def serving(config: BookieConfig, cluster: Cluster, files: Files | None = None) -> AsyncIterator[Bookie]:
    bookie = Bookie(config, cluster=cluster, files=files)
    await bookie.start()
    try:
        yield bookie
    finally:
        await bookie.stop()


@contextlib.asynccontextmanager
async def connected(bookie: Bookie, protocol: Protocol = Protocol.V3) -> AsyncIterator[BookieConnection]:
    connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, protocol=protocol)
    if protocol is Protocol.V3:
        assert await connection.supports_scopes()
    try:
        yield connection
    finally:
        connection.close()
        await connection.wait_closed()


def on_a_bookie(
    tmp_path: Path,
    cluster: Cluster,
    body: Callable[[Bookie, BookieConnection], Coroutine[Any, Any, None]],
    protocol: Protocol = Protocol.V3,
    files: Files | None = None,
    **changes: Any,
) -> None:
    async def run() -> None:
        async with (
            serving(config_for(tmp_path, **changes), cluster, files) as bookie,
            connected(bookie, protocol) as connection,
        ):
            await body(bookie, connection)

    asyncio.run(run())


def digests(ledger: LedgerId, password: bytes = b"secret") -> DigestManager:
    return DigestManager(ledger, DigestType.CRC32C, password)


def add(ledger: LedgerId, entry_id: int, lac: int | None = None, **changes: Any) -> AddRequest:
    by = digests(ledger)
    length = len(PAYLOAD) * (entry_id + 1)
    body = by.seal(entry_id, entry_id - 1 if lac is None else lac, length, PAYLOAD) + PAYLOAD
    return AddRequest(ledger, entry_id, by.master_key, body)._replace(**changes)


async def statuses(connection: BookieConnection, *requests: Any) -> list[Status]:
    return [response.status for response in await asyncio.gather(*map(connection.send, requests))]
