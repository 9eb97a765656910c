"""Entries written and read in runs: a failure inside a run harms no other entry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from client.fakes import FakeBookie, Fault

from bkctl.errors import DigestMismatch, LedgerFenced, NotEnoughBookies, UsageError
from bkctl.formats.metadata import LedgerState
from bkctl.protocol import runs as protocol_runs
from bkctl.protocol.messages import AddRequest, Protocol, ReadRequest, Status

PAYLOADS = [b"entry %d " % number * (number % 7) for number in range(400)]
KINDS = [(Protocol.V2, 0), (Protocol.V3, 0), (Protocol.V3, 7)]


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.compiled), "plain"])
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the compiled loops, and without."""
    if request.param == "plain":
        monkeypatch.setattr(protocol_runs, "compiled", None)
    elif protocol_runs.compiled is None:
        pytest.skip("bkctl was installed without a C compiler")


async def read_all(client: Any, writer: Any) -> list[bytes]:
    reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=writer.scope_id)
    found: list[bytes] = []
    await take_runs(reader, found)
    return found


async def take_runs(reader: Any, found: list[bytes]) -> None:
    """Append the payloads of all entries to `found`, until one cannot be read."""
    async for run in reader.read_runs(0, reader.last_add_confirmed):
        assert [entry.entry_id for entry in run] == list(range(len(found), len(found) + len(run)))
        found.extend(entry.payload for entry in run)


def reads_at(bookie: FakeBookie) -> list[int]:
    """The entries that clients asked a bookie for."""
    return [request.entry_id for request in bookie.received if isinstance(request, ReadRequest)]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("protocol", "scope_id"), KINDS)
async def test_entries_of_runs_are_those_of_single_adds(
    fake_cluster: Callable[..., Any], protocol: Protocol, scope_id: int
) -> None:
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        await writer.add_all(PAYLOADS[:100])
        assert await writer.add(PAYLOADS[100]) == 100
        await writer.add_all([])
        await writer.add_all([memoryview(payload) for payload in PAYLOADS[101:]])
        await writer.flush()
        assert (writer.last_add_confirmed, writer.pending_count) == (len(PAYLOADS) - 1, 0)
        assert writer.length == sum(map(len, PAYLOADS))
        await writer.close()
        assert cluster.metadata(writer.ledger).length == sum(map(len, PAYLOADS))
        assert await read_all(client, writer) == PAYLOADS
        for position, bookie_id in enumerate(cluster.metadata(writer.ledger).ensembles[0].bookies):
            stored = cluster.bookie(bookie_id).entries(writer.ledger)
            assert set(stored) == {entry for entry in range(len(PAYLOADS)) if (position - entry) % 3 < 2}


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("protocol", "scope_id"), KINDS)
@pytest.mark.parametrize("kind", ["refuses", "disconnects", "dies"])
async def test_bookie_that_fails_inside_a_run_is_replaced(
    fake_cluster: Callable[..., Any], protocol: Protocol, scope_id: int, kind: str
) -> None:
    async with fake_cluster(5) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        bad = cluster.bookie(writer.metadata.ensembles[0].bookies[1])
        stopped: list[asyncio.Task[None]] = []

        def fault(request: Any) -> Status | Fault | None:
            if not isinstance(request, AddRequest) or request.entry_id < 150:
                return None
            if kind == "refuses":
                return Status.EIO
            if kind == "dies" and not stopped:
                cluster.unregister(bad)
                stopped.append(asyncio.create_task(bad.stop()))
            return Fault.DISCONNECT

        bad.fault = fault
        await writer.add_all(PAYLOADS[:100])
        await writer.flush()
        await writer.add_all(PAYLOADS[100:])
        await writer.close()
        await asyncio.gather(*stopped)
        fragments = writer.metadata.ensembles
        assert len(fragments) == 2
        assert 100 <= fragments[1].first_entry_id <= 151
        assert bad.bookie_id not in fragments[1].bookies
        assert await read_all(client, writer) == PAYLOADS


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("protocol", Protocol)
async def test_fence_inside_a_run_ends_the_writes(fake_cluster: Callable[..., Any], protocol: Protocol) -> None:
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger_adv()
        for bookie in cluster.bookies:
            bookie.fault = lambda request: (
                Status.EFENCED if isinstance(request, AddRequest) and request.entry_id >= 150 else None
            )
        await writer.add_all(PAYLOADS)
        with pytest.raises(LedgerFenced):
            await writer.flush()
        with pytest.raises(LedgerFenced):
            await writer.add_all([b"more"])
        assert writer.last_add_confirmed <= 149
        assert writer.pending_count == 0
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN


async def test_run_without_spare_bookies_closes_the_ledger_where_it_is_acknowledged(
    fake_cluster: Callable[..., Any],
) -> None:
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv()
        cluster.bookies[0].fault = lambda request: (
            Status.EIO if isinstance(request, AddRequest) and request.entry_id >= 150 else None
        )
        await writer.add_all(PAYLOADS[:100])
        await writer.flush()
        await writer.add_all(PAYLOADS[100:])
        with pytest.raises(NotEnoughBookies):
            await writer.flush()
        with pytest.raises(NotEnoughBookies):
            await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert metadata.state is LedgerState.CLOSED
        assert 99 <= metadata.last_entry_id <= 151
        assert await read_all(client, writer) == PAYLOADS[: metadata.last_entry_id + 1]


async def test_runs_wait_while_too_much_is_in_flight(
    fake_cluster: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.client.writer.THROTTLE_COUNT", 10)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for bookie in cluster.bookies:
            bookie.hold = lambda request: isinstance(request, AddRequest)
        writing = asyncio.create_task(writer.add_all(PAYLOADS))
        while sum(len(bookie.held) for bookie in cluster.bookies) < 20:
            await asyncio.sleep(0.001)
        assert (writer.pending_count, writing.done()) == (10, False)
        for bookie in cluster.bookies:
            bookie.release()
        await writing
        await writer.close()
        assert await read_all(client, writer) == PAYLOADS


async def test_oversized_payload_stops_a_run_behind_the_entries_before_it(fake_cluster: Callable[..., Any]) -> None:
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        with pytest.raises(UsageError):
            await writer.add_all([b"a", b"b", bytes(5 << 20), b"c"])
        await writer.add_all([b"d"])
        await writer.close()
        assert await read_all(client, writer) == [b"a", b"b", b"d"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("protocol", "scope_id"), KINDS)
@pytest.mark.parametrize("kind", ["damaged", "missing", "other entry", "refused"])
async def test_failed_entry_of_a_run_alone_is_read_from_the_next_replica(
    fake_cluster: Callable[..., Any], protocol: Protocol, scope_id: int, kind: str
) -> None:
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        await writer.add_all(PAYLOADS)
        await writer.close()
        bookies = [cluster.bookie(bookie_id) for bookie_id in writer.metadata.ensembles[0].bookies]
        bad, spare = bookies[200 % 3], bookies[201 % 3]
        stored = bad.ledgers[writer.ledger].entries
        if kind == "damaged":
            stored[200] = stored[200][:-1] + bytes([stored[200][-1] ^ 1])
        elif kind == "missing":
            del stored[200]
        elif kind == "other entry":
            stored[200] = stored[203]
        else:
            bad.fault = lambda request: Status.EIO if getattr(request, "entry_id", None) == 200 else None
        assert await read_all(client, writer) == PAYLOADS
        assert 200 in reads_at(spare)
        others = [entry_id for entry_id in reads_at(spare) if entry_id >= 0 and entry_id % 3 != 201 % 3]
        assert others == [200]


async def test_entries_before_an_unreadable_one_come_first(fake_cluster: Callable[..., Any]) -> None:
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.add_all(PAYLOADS)
        await writer.close()
        for bookie in cluster.bookies:
            stored = bookie.ledgers[writer.ledger].entries
            if 200 in stored:
                stored[200] = stored[200][:-1] + bytes([stored[200][-1] ^ 1])
        reader = await client.open_ledger(writer.ledger_id)
        found: list[bytes] = []
        with pytest.raises(DigestMismatch, match="Entry 200 "):
            await take_runs(reader, found)
        assert found == PAYLOADS[:200]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("kind", ["dies", "falls silent"])
async def test_bookie_that_fails_while_a_run_is_read_harms_no_entry(
    fake_cluster: Callable[..., Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.config.ClientConfig.speculative_read_s", lambda *_: 0.1)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.add_all(PAYLOADS)
        await writer.close()
        bad = cluster.bookie(writer.metadata.ensembles[0].bookies[0])
        bad.fault = lambda request: (
            None
            if not isinstance(request, ReadRequest) or request.entry_id < 150
            else Fault.DISCONNECT if kind == "dies" else Fault.SILENCE
        )  # fmt: skip
        assert await read_all(client, writer) == PAYLOADS


async def test_runs_of_large_entries_are_bounded_by_their_bytes(fake_cluster: Callable[..., Any]) -> None:
    payloads = [bytes([number]) * (300 << 10) for number in range(20)]
    async with fake_cluster(1) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        await writer.add_all(payloads)
        await writer.close()
        reader = await client.open_ledger(writer.ledger_id)
        runs = [run async for run in reader.read_runs(0, 19)]
        assert [entry.payload for run in runs for entry in run] == payloads
        assert max(map(len, runs)) <= 4
