"""Our client and Apache's over Apache's bookies: what one writes the other reads, recovers and fences."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from support.entries import described, read_all
from support.servers import ApacheCluster, Java, ZooKeeperServer, read_ledgers, wait_for, write_ledgers
from support.waiting import LIMIT_S

from bkctl import WriteFlag, sync
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.verify import ReplicaState, verify_entries
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import LedgerFenced, LedgerNotFound, NotEnoughBookies, Unauthorized
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerState
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.messages import Protocol

pytestmark = pytest.mark.releases

PROTOCOLS = [Protocol.V2, Protocol.V3]
SIZES = [0, 1, 2, 15, 100, 1024, 4095, 65536, 100_000, 5]


@pytest.fixture
def cluster(apache_cluster: ApacheCluster) -> Iterator[Cluster]:
    with open_cluster(apache_cluster.metadata_uri) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def _doomed(
    java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheCluster]:
    cluster = ApacheCluster(java, zookeeper, tmp_path_factory.mktemp("doomed"), root=zookeeper.new_root())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def doomed(_doomed: ApacheCluster) -> ApacheCluster:
    """Three Apache bookies to be killed.

    A killed one may keep entries in its logs that were never journaled; those that all tests share are to be healthy.
    """
    _doomed.ensure_up()
    return _doomed


def scenario(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 300))


def payload(entry_id: int, size: int) -> bytes:
    return (b"%d " % entry_id * (size // 2 + 1))[:size]


async def write_all(
    writer: WriteHandle, sizes: list[int], *, halt: int = -1, go_on: asyncio.Event | None = None
) -> list[dict[str, Any]]:
    """Add entries of these sizes; before entry `halt` wait for `go_on`."""
    expected, length = [], 0
    for entry_id, size in enumerate(sizes):
        if entry_id == halt and go_on is not None:
            await go_on.wait()
        data = payload(entry_id, size)
        length += size
        expected.append(described(entry_id, data, length))
        await writer.ready()
        writer.add(data)
    await writer.flush()
    return expected


def asked(writer: WriteHandle) -> dict[str, Any]:
    """The ledger as `read_ledgers` takes it."""
    metadata = writer.metadata
    assert metadata.digest_type is not None
    return {
        "ledgerId": str(writer.ledger_id),
        "digestType": metadata.digest_type.name,
        "password": base64.b64encode(metadata.password or b"").decode(),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_known_ledger_of_java_is_read_alike(
    cluster: Cluster, apache_ledgers: list[dict[str, Any]], protocol: Protocol
) -> None:
    async def body() -> None:
        async with BookKeeper(cluster, protocol=protocol) as client:
            for known in apache_ledgers:
                ledger_id, password = int(known["ledgerId"]), base64.b64decode(known["password"])
                if known["deleted"]:
                    with pytest.raises(LedgerNotFound):
                        await client.open_ledger(ledger_id, password=password)
                    continue
                reader = await client.open_ledger(ledger_id, password=password)
                last = known["lastAddConfirmed"]
                if protocol is Protocol.V3 and known["explicitLac"] is not None:
                    last = known["explicitLac"]
                    # Bookies that were started again have forgotten it when asked first (FileInfo.getExplicitLac).
                    while reader.last_add_confirmed < last:
                        reader = await client.open_ledger(ledger_id, password=password)
                assert reader.last_add_confirmed == last, known["name"]
                expected = [
                    {name: value for name, value in entry.items() if name != "lastAddConfirmed"}
                    for entry in known["entries"][: last + 1]
                ]
                assert await read_all(reader) == expected, known["name"]
                if password:
                    with pytest.raises(Unauthorized):
                        await client.open_ledger(ledger_id, password=b"wrong")
                async for check in verify_entries(reader):
                    assert check.ok, check

    scenario(body())


def test_java_reads_every_ledger_that_we_write(cluster: Cluster, apache_cluster: ApacheCluster, java: Java) -> None:
    async def body(protocol: Protocol, digest_type: DigestType) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with BookKeeper(cluster, protocol=protocol) as client:
            writer = await client.create_ledger(
                digest_type=digest_type, password=b"a password", custom_metadata={"application": b"test"}
            )
            expected = await write_all(writer, SIZES * 30)
            await writer.close()
            return asked(writer), expected

    written = [scenario(body(protocol, digest_type)) for protocol in PROTOCOLS for digest_type in DigestType]
    for reads in ("v2", "v3"):
        answers = read_ledgers(java, apache_cluster.metadata_uri, reads, [ledger for ledger, _ in written])
        for found, (_, expected) in zip(answers, written, strict=True):
            assert found["state"] == "CLOSED"
            assert found["lastAddConfirmed"] == len(expected) - 1
            assert found["entries"] == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_java_recovers_a_ledger_that_we_left_open_and_our_writer_is_fenced(
    cluster: Cluster, apache_cluster: ApacheCluster, java: Java, protocol: Protocol
) -> None:
    async def body() -> None:
        async with BookKeeper(cluster, protocol=protocol) as client:
            writer = await client.create_ledger(password=b"pw")
            expected = await write_all(writer, [10] * 50)
            (found,) = await asyncio.to_thread(
                read_ledgers, java, apache_cluster.metadata_uri, "v3", [asked(writer)], True
            )
            assert found["state"] == "CLOSED"
            assert found["entries"] == expected
            with pytest.raises(LedgerFenced):
                await asyncio.gather(*(writer.add(b"too late") for _ in range(3)))
            with pytest.raises(LedgerFenced):
                await writer.close()
            assert cluster.ledgers.read(writer.ledger).metadata.last_entry_id == 49

    scenario(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_we_recover_ledgers_that_java_left_open(
    cluster: Cluster, apache_cluster: ApacheCluster, java: Java, protocol: Protocol
) -> None:
    salt = 100 + protocol
    written = write_ledgers(java, apache_cluster.metadata_uri, "v3", salt=salt, small=True)
    left_open = [each for each in written if each["name"] in ("open", "open-explicit-lac")]
    assert len(left_open) == 2

    async def body() -> None:
        async with BookKeeper(cluster, protocol=protocol) as client:
            for known in left_open:
                reader = await client.open_ledger(int(known["ledgerId"]), password=None, recovery=True)
                assert reader.metadata.state is LedgerState.CLOSED
                assert reader.last_add_confirmed == len(known["entries"]) - 1
                assert reader.length == known["entries"][-1]["length"]
                async for check in verify_entries(reader):
                    assert check.ok, check

    scenario(body())
    for known, found in zip(left_open, read_ledgers(java, apache_cluster.metadata_uri, "v2", left_open), strict=True):
        assert found["state"] == "CLOSED"
        assert [entry["sha256"] for entry in found["entries"]] == [entry["sha256"] for entry in known["entries"]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_java_writer_in_full_flight_is_fenced(
    cluster: Cluster, apache_cluster: ApacheCluster, java: Java, protocol: Protocol
) -> None:
    before = set(cluster.ledgers.ledgers())
    arguments = (apache_cluster.metadata_uri, "v3", "add", "60s", 100, 3, 2, 2, 500)
    program = java.start("Bench", *arguments, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: set(cluster.ledgers.ledgers()) - before, "the writer's ledger")
        (ledger,) = set(cluster.ledgers.ledgers()) - before

        async def body() -> ReadHandle:
            async with BookKeeper(cluster, protocol=protocol) as client:
                tail = await client.open_ledger(ledger.ledger_id)
                confirmed = await tail.wait_for_lac(2000, LIMIT_S)
                await tail.close()
                reader = await client.open_ledger(ledger.ledger_id, recovery=True)
                assert reader.last_add_confirmed >= confirmed > 2000
                assert reader.length == 100 * (reader.last_add_confirmed + 1)
                count = 0
                async for check in verify_entries(reader):
                    assert check.ok, check
                    count += 1
                assert count == reader.last_add_confirmed + 1
                return reader

        reader = scenario(body())
        assert program.stderr is not None
        problem = next(line for line in program.stderr if "add: " in line).lower()
        assert "fenced" in problem or "closed" in problem
        metadata = cluster.ledgers.read(ledger).metadata
        assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, reader.last_add_confirmed)
    finally:
        java.end(program)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_killing_a_bookie_during_writes_loses_nothing_and_java_agrees(
    doomed: ApacheCluster, java: Java, protocol: Protocol
) -> None:
    async def body() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with BookKeeper(cluster, protocol=protocol) as client:
            writer = await client.create_ledger(ensemble_size=2, password=b"pw")
            victim = doomed.by_id(writer.metadata.ensembles[0].bookies[1])
            killed = asyncio.Event()
            writing = asyncio.create_task(
                write_all(writer, [i % 3000 for i in range(10_000)], halt=9_000, go_on=killed)
            )
            while writer.last_add_confirmed < 3000:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(victim.kill)
            killed.set()
            expected = await writing
            await writer.close()
            metadata = cluster.ledgers.read(writer.ledger).metadata
            assert len(metadata.ensembles) == 2
            assert victim.bookie_id not in metadata.last_fragment.bookies
            reader = await client.open_ledger(writer.ledger_id, password=b"pw")
            assert await read_all(reader) == expected
            unknown = 0
            async for check in verify_entries(reader):
                states = {replica.bookie_id: replica.state for replica in check.replicas}
                if victim.bookie_id in states:
                    assert states.pop(victim.bookie_id) is ReplicaState.UNAVAILABLE
                    unknown += 1
                assert set(states.values()) == {ReplicaState.OK}
            assert unknown == metadata.ensembles[1].first_entry_id
            return asked(writer), expected

    with open_cluster(doomed.metadata_uri) as cluster:
        ledger, expected = scenario(body())
    (found,) = read_ledgers(java, doomed.metadata_uri, "v3", [ledger])
    assert found["entries"] == expected


def test_recovery_replaces_a_dead_bookie(doomed: ApacheCluster, java: Java) -> None:
    async def body() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with BookKeeper(cluster) as client:
            writer = await client.create_ledger(ensemble_size=2)
            expected = await write_all(writer, [100] * 200)
            dead = writer.metadata.ensembles[0].bookies[0]
        await asyncio.to_thread(doomed.by_id(dead).kill)
        async with BookKeeper(cluster) as client:
            reader = await client.open_ledger(writer.ledger_id, recovery=True)
            assert reader.last_add_confirmed == 199
            assert dead not in reader.metadata.last_fragment.bookies
            assert await read_all(reader) == expected
        return asked(writer), expected

    with open_cluster(doomed.metadata_uri) as cluster:
        ledger, expected = scenario(body())
    (found,) = read_ledgers(java, doomed.metadata_uri, "v3", [ledger])
    assert found["entries"] == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_explicit_lac_and_deletion_are_seen_by_java(
    cluster: Cluster, apache_cluster: ApacheCluster, java: Java, protocol: Protocol
) -> None:
    async def body() -> None:
        async with BookKeeper(cluster, protocol=protocol) as client:
            writer = await client.create_ledger(password=b"pw")
            for entry_id in range(5):
                await writer.add(payload(entry_id, 10))
            tail = await client.open_ledger(writer.ledger_id, password=b"pw")
            assert tail.last_add_confirmed == 3
            await writer.write_lac()
            assert await tail.wait_for_lac(3, 20) == 4
            await tail.close()
            (found,) = await asyncio.to_thread(read_ledgers, java, apache_cluster.metadata_uri, "v3", [asked(writer)])
            assert (found["state"], found["lastAddConfirmed"]) == ("OPEN", 4)
            await client.delete_ledger(writer.ledger_id)
            (found,) = await asyncio.to_thread(read_ledgers, java, apache_cluster.metadata_uri, "v3", [asked(writer)])
            assert found["code"] in (-7, -25), json.dumps(found)

    scenario(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_programs_use_apaches_bookies_by_uri(apache_cluster: ApacheCluster, protocol: Protocol) -> None:
    """The public client: adds, a tail with a regular explicit LAC, batches, a watch, a fence, a deletion."""

    async def body() -> None:
        async with BookKeeper(apache_cluster.metadata_uri, protocol=protocol, explicit_lac_interval=20) as client:
            writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, password=b"secret")
            states = client.watch_ledger_metadata(writer.ledger)
            assert (await anext(states)).state is LedgerState.OPEN
            async with await client.open_ledger(writer.ledger, password=b"secret") as reader:
                tail = reader.tail()
                for number in range(3):
                    await writer.add(payload(number, 100))
                    assert (await anext(tail)).payload == payload(number, 100)
                await writer.add_all([payload(number, 1000) for number in range(3, 50)])
                await writer.flush()
                await tail.aclose()  # type: ignore[attr-defined]
            with pytest.raises(Unauthorized):
                await client.open_ledger(writer.ledger, password=b"wrong")
            reader = await client.open_ledger(writer.ledger, password=b"secret", recovery=True)
            with pytest.raises(LedgerFenced):
                await writer.add(b"late")
            assert (await anext(states)).state in (LedgerState.IN_RECOVERY, LedgerState.CLOSED)
            assert reader.last_add_confirmed == 49
            batch = await reader.batch_read(10, 20)
            assert [entry.payload for entry in batch] == [payload(number, 1000) for number in range(10, 30)]
            assert 1 <= len(await reader.batch_read(10, 40, 5000)) < 40
            assert writer.ledger in [each async for each in client.list_ledgers()]
            await client.delete_ledger(writer.ledger)
            with pytest.raises(LedgerNotFound):
                [state async for state in states]

    scenario(body())


def test_deferred_sync_is_forced_on_apaches_bookies(apache_cluster: ApacheCluster) -> None:
    with sync.BookKeeper(apache_cluster.metadata_uri) as client:
        writer = client.create_ledger(write_flags=WriteFlag.DEFERRED_SYNC)
        with writer:
            futures = [writer.add_async(payload(number, 500)) for number in range(1000)]
            assert futures[-1].result() == 999
            assert writer.last_add_confirmed == -1
            writer.force()
            assert writer.last_add_confirmed == 999
            writer.add(b"x")
        assert (writer.metadata.last_entry_id, writer.metadata.length) == (1000, 500_001)
        ids = [entry.entry_id for entry in client.open_ledger(writer.ledger).read()]
        assert ids == list(range(1001))


def test_a_scoped_ledger_finds_no_bookie_among_apaches(cluster: Cluster) -> None:
    async def body() -> None:
        async with BookKeeper(cluster) as client:
            with pytest.raises(NotEnoughBookies, match="without ledger scopes"):
                await client.create_ledger_adv(ledger_scope_id=7)

    scenario(body())
