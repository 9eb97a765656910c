"""Entries that wait for their turn: memory is bounded when bookies send more than metadata or earlier entries say."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from client.fakes import FakeCluster, turns
from support.waiting import LIMIT_S

from bkctl.client import bookies, reader, verify
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.verify import Verification, read_replica
from bkctl.protocol.messages import ReadRequest, ReadResponse

SIZE_BYTES = 10_000
COUNT = 200
ROOM_BYTES = 20 * SIZE_BYTES


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (reader, "WAITING_BYTES_MAX"),
        (verify, "WAITING_BYTES_MAX"),
        (bookies, "RECOVERY_BYTES_MAX"),
    ):
        monkeypatch.setattr(module, name, ROOM_BYTES, raising=False)


def payload(entry_id: int) -> bytes:
    return entry_id.to_bytes(4, "big") * (SIZE_BYTES // 4)


def waiting_bytes() -> int:
    """The bytes of all entries that came from bookies and are still in memory, beside those that the fakes keep."""
    gc.collect()
    found = gc.get_objects()
    bodies = {id(each.body): len(each.body or b"") for each in found if type(each) is ReadResponse}
    payloads = {id(each.payload): len(each.payload) for each in found if type(each) is reader.LedgerEntry}
    return sum((bodies | payloads).values())


async def ledger_of_small_entries(cluster: FakeCluster, client: BookKeeper, bookie_count: int) -> ReadHandle:
    """A ledger whose metadata says that its entries have one byte each."""
    writer = await client.create_ledger_adv(
        1, ensemble_size=bookie_count, write_quorum_size=bookie_count, ack_quorum_size=bookie_count
    )
    async with writer:
        await writer.add_all([payload(entry_id) for entry_id in range(COUNT)])
    found = cluster.cluster.ledgers.read(writer.ledger)
    cluster.cluster.ledgers.write(writer.ledger, found.metadata._replace(length=COUNT), found.version)
    return await client.open_ledger(1)


async def while_held(cluster: FakeCluster, count: int, work: asyncio.Task[Any]) -> Any:
    """Let bookies hold back their first entry, and check the memory once the others came. Return the end of `work`."""
    await asyncio.wait_for(read_count(cluster, count), LIMIT_S)
    await turns()
    assert waiting_bytes() <= ROOM_BYTES + 2 * SIZE_BYTES
    for bookie in cluster.bookies:
        bookie.release()
    return await asyncio.wait_for(work, LIMIT_S)


async def read_count(cluster: FakeCluster, count: int) -> None:
    while sum(isinstance(request, ReadRequest) for bookie in cluster.bookies for request in bookie.received) < count:
        await asyncio.sleep(0.001)


def hold_first_reads(cluster: FakeCluster) -> None:
    for bookie in cluster.bookies:
        bookie.received.clear()
        bookie.hold = lambda request: isinstance(request, ReadRequest) and request.entry_id == 0


async def test_range_of_larger_entries_than_expected_is_read_in_bounded_memory(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.config.ClientConfig.speculative_read_s", lambda *_: LIMIT_S)
    async with fake_cluster(2) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        handle = await ledger_of_small_entries(cluster, client, 2)
        hold_first_reads(cluster)

        async def read() -> list[bytes]:
            return [entry.payload async for entry in handle.read(0, COUNT - 1)]

        found = await while_held(cluster, COUNT, asyncio.create_task(read()))
        assert found == [payload(entry_id) for entry_id in range(COUNT)]


async def test_dropped_answers_of_a_bookie_with_damage_are_read_elsewhere(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.config.ClientConfig.speculative_read_s", lambda *_: 0.05)
    async with fake_cluster(2) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        handle = await ledger_of_small_entries(cluster, client, 2)
        liar = cluster.bookies[0]
        liar.damage = lambda entry: bytes(len(entry))
        liar.hold = lambda request: isinstance(request, ReadRequest) and request.entry_id == 0
        found = [entry.payload async for entry in handle.read(0, COUNT - 1)]
        assert found == [payload(entry_id) for entry_id in range(COUNT)]


async def test_larger_entries_than_expected_are_verified_in_bounded_memory(fake_cluster):
    async with fake_cluster(2) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        handle = await ledger_of_small_entries(cluster, client, 2)
        hold_first_reads(cluster)

        async def check() -> list[Any]:
            return [finding async for finding in Verification(handle).findings()]

        (finding,) = await while_held(cluster, 2 * COUNT, asyncio.create_task(check()))
        assert finding.problem == "length"


async def test_replicas_of_larger_entries_than_expected_are_read_in_bounded_memory(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        handle = await ledger_of_small_entries(cluster, client, 1)
        hold_first_reads(cluster)

        async def read() -> list[bytes]:
            return [entry.payload async for entry in read_replica(handle, "b0", 0, COUNT - 1)]

        found = await while_held(cluster, COUNT, asyncio.create_task(read()))
        assert found == [payload(entry_id) for entry_id in range(COUNT)]


async def test_recoveries_read_ahead_in_bounded_memory(fake_cluster):
    ledgers = range(10)
    async with fake_cluster(1) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        for ledger_id in ledgers:
            writer = await client.create_ledger_adv(ledger_id, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            # Sent at once, so no entry says that another one is confirmed.
            await writer.add_all([payload(entry_id) for entry_id in range(10)])
            await writer.flush()
        hold_first_reads(cluster)
        opening = asyncio.gather(*(client.open_ledger(ledger_id, recovery=True) for ledger_id in ledgers))
        handles = await while_held(cluster, 10 * len(ledgers), asyncio.ensure_future(opening))
        assert [handle.last_add_confirmed for handle in handles] == [9] * len(ledgers)
