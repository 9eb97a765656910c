"""The memory of a bookie: clients that write faster than its disk, never take their answers, or come and go."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.lifetimes import Lifetimes, count_of, without_cycle_collector
from support.own_bookies import OwnBookie
from support.served_bookies import add as small_add
from support.served_bookies import connected, digests, on_a_bookie, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import v2
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadRequest,
    Request,
    Status,
    WriteLacRequest,
)
from bkctl.protocol.server import ServedConnection

MEBIBYTE = 1 << 20
SIZE_BYTES = 100 * 1024
CLIENTS = 4
#: The bytes that each of them sends as fast as the bookie accepts them.
COUNT = 500
SETTINGS = {
    "journalMaxMemorySizeMb": 16,
    "skipListSizeLimit": 4 * MEBIBYTE,
    "dbStorage_writeCacheMaxSizeMb": 8,
    "dbStorage_readAheadCacheMaxSizeMb": 8,
    "journalMaxSizeMB": 64,
    "logSizeLimit": 64 * MEBIBYTE,
    "flushInterval": 500,
}
#: Above what it has at start: requests in flight, twice over while they are written, the caches, some for each client.
WRITTEN_BYTES_MAX = (2 * 16 + 2 * 8 + 2 * CLIENTS + 40) * MEBIBYTE
#: And the reads that are begun, and their answers on the way.
READ_BYTES_MAX = WRITTEN_BYTES_MAX + 64 * MEBIBYTE
SLOW_BOOKIE = """
import sys, time
from bkctl.disk import StorageFile
sync = StorageFile.sync
def slow_sync(self):
    time.sleep(0.15)
    sync(self)
StorageFile.sync = slow_sync
from bkctl.commands.main import main
main()
"""


class SlowBookie(OwnBookie):
    """A bookie whose every sync takes a while longer."""

    def _arguments(self) -> list[str]:
        return [sys.executable, "-c", SLOW_BOOKIE, "bookie", "start", "--conf", str(self.conf)]


@pytest.fixture(params=[SORTED, DB], ids=["sorted", "db"])
def slow_bookie(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[SlowBookie]:
    bookie = SlowBookie(cluster.uri, tmp_path / "slow", storage=request.param, settings=SETTINGS)
    bookie.start()
    yield bookie
    bookie.kill()


def memory_bytes(bookie: OwnBookie, name: str) -> int:
    """`VmRSS`, what it has now, or `VmHWM`, the most that it had."""
    for line in Path(f"/proc/{bookie.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def frames(requests: Iterator[Request] | list[Request]) -> bytes:
    out: list[Any] = []
    for request in requests:
        v2.encode_request(request, out)
    return b"".join(out)


def add(ledger: LedgerId, entry_id: int) -> AddRequest:
    by = DigestManager(ledger, DigestType.DUMMY)
    payload = bytes(SIZE_BYTES)
    return AddRequest(ledger, entry_id, by.master_key, by.seal(entry_id, entry_id - 1, 0, payload) + payload)


async def write_without_pause(bookie: OwnBookie, ledger: LedgerId) -> None:
    """Send every add without waiting for an answer; the answers are taken beside it."""
    reader, writer = await asyncio.open_connection(*bookie.address)

    async def take() -> None:
        for _ in range(COUNT):
            size = int.from_bytes(await reader.readexactly(4))
            await reader.readexactly(size)

    answers = asyncio.create_task(take())
    for entry_id in range(COUNT):
        writer.write(frames([add(ledger, entry_id)]))
        await writer.drain()
    await answers
    writer.close()


async def ask_and_never_read(bookie: OwnBookie, ledger: LedgerId) -> Callable[[], None]:
    """Ask for all entries of the ledger; returns what ends the connection."""
    _, writer = await asyncio.open_connection(*bookie.address, limit=1)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(frames([ReadRequest(ledger, entry_id) for entry_id in range(COUNT)]))
    await writer.drain()
    return writer.transport.abort


def test_memory_is_bounded_whatever_clients_do(slow_bookie: SlowBookie) -> None:
    bookie = slow_bookie
    ledgers = [LedgerId(0, 1 + number) for number in range(CLIENTS)]
    at_start = memory_bytes(bookie, "VmRSS")

    def grown() -> int:
        return memory_bytes(bookie, "VmHWM") - at_start

    async def body() -> None:
        await asyncio.gather(*(write_without_pause(bookie, ledger) for ledger in ledgers))
        print(f"{CLIENTS * COUNT * SIZE_BYTES / MEBIBYTE:.0f} MiB written: {grown() / MEBIBYTE:.0f} MiB more memory")
        assert grown() < WRITTEN_BYTES_MAX < CLIENTS * COUNT * SIZE_BYTES // 2

        with contextlib.ExitStack() as stack:
            for ledger in ledgers:
                stack.callback(await ask_and_never_read(bookie, ledger))
            # Meanwhile somebody else is served, and is answered after them.
            connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, protocol=Protocol.V3)
            for entry_id in range(200):
                response = await connection.send(ReadRequest(ledgers[0], entry_id))
                assert response.status is Status.EOK
            assert (await connection.send(add(LedgerId(0, 99), 0))).status is Status.EOK
            connection.close()
            print(f"{CLIENTS} clients that do not read: {grown() / MEBIBYTE:.0f} MiB more memory")
            assert grown() < READ_BYTES_MAX < CLIENTS * COUNT * SIZE_BYTES

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_lost_clients_and_failed_reads_are_freed_at_once(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, protocol: Protocol, storage: str
) -> None:
    """A bookie looks for cycles seldom: the entries of a read, or a connection with TLS, would wait for that."""
    ledger, absent = LedgerId(0, 5), LedgerId(0, 6)
    key = digests(ledger).master_key
    requests: list[Request] = [
        small_add(ledger, 200),
        *(ReadRequest(ledger, entry_id) for entry_id in (0, 50, 51, 100, 52, 101, LAST_ENTRY)),
        ReadRequest(absent, 0),
        ReadRequest(ledger, 50, key, fence=True),
    ]
    if protocol is Protocol.V3:
        requests += [
            ReadRequest(ledger, LAST_ENTRY, previous_lac=300, timeout_ms=3_600_000, piggyback=True),
            ReadRequest(absent, LAST_ENTRY, previous_lac=300, timeout_ms=3_600_000, piggyback=True),
            WriteLacRequest(ledger, 0, key, digests(ledger).seal_lac(0)),
            ListEntriesRequest(ledger),
            ForceLedgerRequest(ledger),
        ]

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        added = [small_add(ledger, entry_id) for entry_id in (0, 100, 101)]
        assert await statuses(connection, *added) == [Status.EOK] * 3
        await bookie.checkpoint()
        made = Lifetimes(ServedConnection, monkeypatch)
        with without_cycle_collector():
            for waits in (True, False):
                async with connected(bookie, protocol) as client:
                    sent = [client.send(request) for request in requests]
                    for future in sent:
                        future.add_done_callback(lambda done: done.exception())
                    if waits:
                        await asyncio.gather(*sent[:9])
                    sent.clear()
            async with asyncio.timeout(LIMIT_S):
                while made.alive or count_of("EntryNotFound") or bookie.server.in_flight.bytes:
                    await asyncio.sleep(0.01)
        assert len(made.made) == 2
        assert not len(bookie.processor.polls)

    on_a_bookie(tmp_path, cluster, body, protocol, ledger_storage_class=storage)
