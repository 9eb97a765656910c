"""The pool's knowledge of bookies beyond connections: errors, free space, nearness, and bookies that left."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from client.fakes import Fault, turns

from bkctl.config import ClientConfig
from bkctl.errors import NotEnoughBookies, Unsupported
from bkctl.metadata.admin.health import DISABLE_HEALTH_CHECK
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.store import NEW
from bkctl.protocol.messages import AddRequest, BookieInfoRequest, ReadRequest, Status
from bkctl.replication.replicator import TargetChooser

REGIONS = "org.apache.bookkeeper.client.RegionAwareEnsemblePlacementPolicy"


async def test_bookies_with_many_errors_are_in_quarantine(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.client.bookies.SUSPECT_S", -1.0)
    now = [100.0]
    monkeypatch.setattr("bkctl.client.bookies.time.monotonic", lambda: now[0])
    config = ClientConfig(
        bookie_health_check_enabled=True, bookie_error_threshold_per_interval=3, bookie_quarantine_time_seconds=500
    )
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        channel = client.pool.channel("b0")
        for _ in range(2):
            channel.failed()
        now[0] += 60  # Another interval.
        for _ in range(2):
            channel.failed()
        channel.failed(connecting=True)  # Does not count.
        assert not client.pool.suspects()
        channel.failed()
        assert client.pool.suspects() == {"b0"}
        for _ in range(5):
            writer = await client.create_ledger(ensemble_size=2)
            assert "b0" not in writer.metadata.last_fragment.bookies
        await client.create_ledger(ensemble_size=3)  # Where others do not suffice, it is chosen still.
        now[0] += 501
        assert not client.pool.suspects()


async def test_the_store_can_end_every_quarantine(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.client.bookies.SUSPECT_S", -1.0)
    config = ClientConfig(bookie_health_check_enabled=True, bookie_error_threshold_per_interval=1)
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        client.pool.channel("b0").failed()
        assert client.pool.suspects() == {"b0"}
        cluster.cluster.store.put(DISABLE_HEALTH_CHECK, b"", NEW)
        client.pool.registered()
        assert not client.pool.suspects()
    for off in (ClientConfig(), ClientConfig(bookie_health_check_enabled=True, bookie_quarantine_ratio=0.0)):
        async with fake_cluster(1) as cluster, cluster.client(config=off) as client:
            for _ in range(200):
                client.pool.channel("b0").failed()
            assert not client.pool.suspects()


async def test_bookies_that_left_lately_are_the_last_choice(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bkctl.client.bookies.time.monotonic", lambda: now[0])
    config = ClientConfig(network_topology_stabilize_period_seconds=10)
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        await client.create_ledger(ensemble_size=3)
        every = cluster.cluster.bookies.list()
        left = {"b0"}
        monkeypatch.setattr(
            cluster.cluster.bookies, "list", lambda **_: [each for each in every if each.bookie_id not in left]
        )
        now[0] += 5
        for _ in range(5):
            writer = await client.create_ledger(ensemble_size=2)
            assert "b0" not in writer.metadata.last_fragment.bookies
        assert client.pool.suspects() == {"b0"}
        await client.create_ledger(ensemble_size=3)
        now[0] += 6
        with pytest.raises(NotEnoughBookies):
            await client.create_ledger(ensemble_size=3)
        assert not client.pool.suspects()


async def test_free_space_weighs_bookies(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.client.bookies.WEIGH_S", 0.5)
    config = ClientConfig(
        disk_weight_based_placement_enabled=True, bookie_max_weight_multiple_for_weight_based_placement=0
    )
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        free = {"b0": 1 << 30, "b1": 1000, "b2": 0}
        for bookie in cluster.bookies:
            bookie.free_bytes = free[bookie.bookie_id]
        silent = await cluster.add_bookie()
        silent.fault = lambda request: Fault.SILENCE if isinstance(request, BookieInfoRequest) else None
        chosen: Counter[str] = Counter()
        for _ in range(10):
            writer = await client.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
            chosen.update(writer.metadata.last_fragment.bookies)
        assert chosen["b0"] >= 9
        assert client.pool.placement(client.pool.registered()).weights == {**free, silent.bookie_id: 0}
        asked = [sum(isinstance(each, BookieInfoRequest) for each in bookie.received) for bookie in cluster.bookies]
        assert asked == [1] * 4


async def test_reads_ask_the_own_region_first(fake_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: TestRegionAwareEnsemblePlacementPolicy.testBasicReorderReadSequenceWithLocalRegion."""
    monkeypatch.setattr("bkctl.client.bookies._local_id", lambda **_: "me:0")
    async with fake_cluster(9) as cluster, cluster.client() as plain:
        racks = BookieRacks(cluster.cluster)
        for at in range(9):
            racks.set([f"b{at}"], f"/region{at % 3}/r{at // 3}")
        racks.set(["me:0"], "/region2/r1")
        writer = await plain.create_ledger(ensemble_size=9, write_quorum_size=9, ack_quorum_size=9)
        for at in range(4):
            await writer.add(b"%d" % at)
        await writer.close()
        ensemble = writer.metadata.last_fragment.bookies
        assert plain.pool.reading_order(ensemble, (3, 4, 5)) == (3, 4, 5)
        async with cluster.client(config=ClientConfig(ensemble_placement_policy=REGIONS)) as client:
            reader = await client.open_ledger(writer.ledger_id)
            order = client.pool.reading_order(ensemble, range(9))
            assert sorted(order) == list(range(9))
            near = [int(ensemble[index][1:]) % 3 == 2 for index in order]
            assert near == [True, True, False, True, False, False, False, False, False]
            for bookie in cluster.bookies:
                bookie.received.clear()
            assert [entry.payload async for entry in reader.read(0, 3)] == [b"0", b"1", b"2", b"3"]
            asked = {
                bookie.bookie_id
                for bookie in cluster.bookies
                if any(isinstance(each, ReadRequest) for each in bookie.received)
            }
            assert asked
            assert {int(bookie_id[1:]) % 3 for bookie_id in asked} == {2}
        off = ClientConfig(ensemble_placement_policy=REGIONS, reorder_read_sequence_enabled=False)
        async with cluster.client(config=off) as client:
            await client.open_ledger(writer.ledger_id)
            assert client.pool.reading_order(ensemble, (3, 4, 5)) == (3, 4, 5)


@pytest.mark.parametrize("reorders", [True, False])
async def test_reads_pass_over_bookies_that_failed_unless_reordering_is_off(fake_cluster: Any, reorders: bool) -> None:
    config = ClientConfig(reorder_read_sequence_enabled=reorders)
    async with fake_cluster(2) as cluster, cluster.client(config=config) as client:
        writer = await client.create_ledger(ensemble_size=2)
        for at in range(20):
            await writer.add(b"%d" % at)
        await writer.close()
        bad = cluster.bookies[0]
        bad.fault = lambda request: Status.EIO if isinstance(request, ReadRequest) else None
        client.pool.channel(bad.bookie_id).failed()
        bad.received.clear()
        reader = await client.open_ledger(writer.ledger_id)
        assert len([entry async for entry in reader.read(0, 19)]) == 20
        assert any(isinstance(each, ReadRequest) for each in bad.received) is not reorders


@pytest.mark.parametrize("quorum", [3, 2])
async def test_sticky_reads_go_to_one_bookie_where_it_has_all_entries(fake_cluster: Any, quorum: int) -> None:
    """Source: BookieStickyReadsTest."""
    async with fake_cluster(3) as cluster, cluster.client(config=ClientConfig(sticky_reads_enabled=True)) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=quorum)
        await writer.add_all([b"%d" % at for at in range(30)])
        await writer.close()

        async def asked() -> set[str]:
            for bookie in cluster.bookies:
                bookie.received.clear()
            assert len([entry async for entry in reader.read()]) == 30
            return {
                each.bookie_id for each in cluster.bookies if any(isinstance(r, ReadRequest) for r in each.received)
            }

        reader = await client.open_ledger(writer.ledger_id)
        first = await asked()
        assert len(first) == (1 if quorum == 3 else 3)
        assert await asked() == first
        client.pool.channel(min(first)).failed()  # another one is read from
        assert not (again := await asked()) & {min(first)}
        assert len(again) == (1 if quorum == 3 else 2)


async def test_entries_are_acknowledged_once_they_are_in_enough_racks(fake_cluster: Any) -> None:
    config = ClientConfig(enforce_min_num_fault_domains_for_write=True)
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        BookieRacks(cluster.cluster).set(["b0", "b1"], "/r1")
        BookieRacks(cluster.cluster).set(["b2"], "/r2")
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
        other = cluster.bookie("b2")
        other.hold = lambda request: isinstance(request, AddRequest)
        adding = writer.add(b"x")
        await turns()
        assert [len(cluster.bookie(name).entries(writer.ledger)) for name in ("b0", "b1")] == [1, 1]
        assert not adding.done()
        other.release()
        assert await adding == 0
        await writer.close()


async def test_entries_that_no_bookie_can_take_to_another_rack_end_the_writer(fake_cluster: Any) -> None:
    config = ClientConfig(enforce_min_num_fault_domains_for_write=True)
    async with fake_cluster(2) as cluster, cluster.client(config=config) as client:
        BookieRacks(cluster.cluster).set(["b0", "b1"], "/r1")
        writer = await client.create_ledger(ensemble_size=2)
        with pytest.raises(NotEnoughBookies, match="in /r1 only; 2 are needed"):
            await writer.add(b"x")


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_an_unsupported_policy_is_refused_where_bookies_are_chosen(fake_cluster: Any, scope_id: int) -> None:
    config = ClientConfig(ensemble_placement_policy="com.acme.Policy")
    async with fake_cluster(4) as cluster, cluster.client() as plain, cluster.client(config=config) as client:
        writer = await plain.create_ledger_adv(ledger_scope_id=scope_id)
        await writer.add(b"x")
        with pytest.raises(Unsupported, match=r"ensemblePlacementPolicy=com\.acme\.Policy"):
            await client.create_ledger_adv(ledger_scope_id=scope_id)
        with pytest.raises(Unsupported, match=r"com\.acme\.Policy"):
            TargetChooser(client)
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, recovery=True)
        assert [entry.payload async for entry in reader.read(0, 0)] == [b"x"]
