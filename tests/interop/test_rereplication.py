"""A bookie of four is lost for good: afterwards every replica of every ledger is whole again, and Apache reads all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.own_cluster import OwnCluster, start_all
from support.servers import (
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    Java,
    ZooKeeperServer,
    format_cluster,
    read_ledgers,
    wait_for,
    write_ledgers,
)

from bkctl.client.ledger import BookKeeper
from bkctl.client.verify import Verification
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.replication.fragments import FaultReason
from bkctl.replication.replicator import LedgerFragmentReplicator, LedgerReplication, Outcome

STORAGES = (SORTED, INTERLEAVED, DB, SORTED)
#: Ensemble size, write quorum, ack quorum.
SHAPES = ((2, 2, 2), (3, 2, 2), (3, 3, 2), (3, 2, 1))


async def write(client: BookKeeper, scope_id: int, count: int, shape: tuple[int, int, int], close: bool) -> LedgerId:
    ensemble_size, write_quorum_size, ack_quorum_size = shape
    writer = await client.create_ledger_adv(
        ledger_scope_id=scope_id, password=b"pw", ensemble_size=ensemble_size, write_quorum_size=write_quorum_size,
        ack_quorum_size=ack_quorum_size,
    )  # fmt: skip
    for entry_id in range(count):
        await writer.ready()
        writer.add(b"%d of " % entry_id + str(writer.ledger).encode() * (entry_id % 50))
    await writer.flush()
    await writer.force()  # all of the write quorum have every entry, and not only the ack quorum
    if close:
        await writer.close()
    return writer.ledger


async def write_all(cluster: Cluster, scope_ids: tuple[int, ...], doomed: str) -> tuple[list[LedgerId], list[LedgerId]]:
    """Ledgers of every shape, closed, open and empty; and those whose only copy is on the bookie `doomed`."""
    async with BookKeeper(cluster) as client:
        ledgers = [
            await write(client, scope_id, count, shape, close)
            for scope_id in scope_ids
            for shape in SHAPES
            for count, close in ((30, True), (30, False), (0, True))
            # With an ack quorum of 1, any entry of the lost bookie may be acknowledged: such a ledger cannot be closed.
            if close or shape[2] > 1
        ]
        ledgers += [await write(client, scope_id, 1500, (3, 2, 2), True) for scope_id in scope_ids]
    async with BookKeeper(cluster, only={doomed}) as client:
        lost = [await write(client, scope_id, 5, (1, 1, 1), True) for scope_id in scope_ids]
    return ledgers, lost


async def replicate_all(cluster: Cluster, ledgers: list[LedgerId]) -> dict[LedgerId, LedgerReplication]:
    async with BookKeeper(cluster) as client:
        replicator = LedgerFragmentReplicator(client)
        return {ledger: await replicator.replicate_ledger(ledger) for ledger in ledgers}


async def problems_of(cluster: Cluster, ledgers: list[LedgerId]) -> list[Any]:
    """Return the findings of an entry-for-entry check of every replica."""
    found: list[Any] = []
    async with BookKeeper(cluster) as client:
        for ledger in ledgers:
            handle = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None)
            async with handle:
                found += [(ledger, each) async for each in Verification(handle).findings()]
    return found


def bookies_of(cluster: Cluster, ledger: LedgerId) -> set[str]:
    return {each for fragment in cluster.ledgers.read(ledger).metadata.ensembles for each in fragment.bookies}


def lose(cluster: Cluster, bookie: Any) -> None:
    """End a bookie, and wait until its registration is gone."""
    bookie.stop()

    def gone() -> bool:
        found = cluster.bookies.get(bookie.bookie_id)
        return found is None or found.state == "down"

    wait_for(gone, f"the end of {bookie.bookie_id}'s registration")


def heal(cluster: Cluster, ledgers: list[LedgerId], lost: list[LedgerId], dead: str) -> None:
    """Replicate everything, and check each replica of what can be saved; what cannot is named, and nothing else."""
    affected = [ledger for ledger in ledgers if dead in bookies_of(cluster, ledger)]
    assert affected, "the dead bookie had nothing"
    results = asyncio.run(replicate_all(cluster, [*ledgers, *lost]))
    for ledger in ledgers:
        assert results[ledger].done, (ledger, results[ledger])
        assert dead not in bookies_of(cluster, ledger)
        if ledger in affected:
            assert cluster.ledgers.read(ledger).metadata.state is LedgerState.CLOSED
    for ledger in lost:
        result = results[ledger]
        assert not result.done
        assert [each.outcome for each in result.fragments] == [Outcome.UNRECOVERABLE]
        assert [each[:3] for each in result.unreadable] == [(0, 4, 5)]
        assert bookies_of(cluster, ledger) == {dead}
        assert [fault.reason for fault in result.check.fragments[0].faults] == [FaultReason.GONE]
    assert asyncio.run(problems_of(cluster, ledgers)) == []


def contents(ledger: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The entries of a ledger as the Java programs print them."""
    return [(entry["entryId"], entry["sha256"], entry["length"]) for entry in ledger["entries"]]


@pytest.fixture
def apache_four(java: Java, zookeeper: ZooKeeperServer, tmp_path: Any, apache_bookie: Any) -> Any:
    """Four of Apache's bookies, of every storage class, on a root of their own."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    bookies: list[ApacheBookie] = [apache_bookie(uri, storage) for storage in STORAGES]
    start_all(bookies)
    return uri, bookies


def test_a_lost_bookie_of_four_of_apaches_is_healed_and_java_reads_everything(java: Java, apache_four: Any) -> None:
    uri, bookies = apache_four
    dead = bookies[1]
    by_java = [one for one in write_ledgers(java, uri, "v3", small=True) if not one["deleted"]]
    with open_cluster(uri) as cluster:
        ours, lost = asyncio.run(write_all(cluster, (0,), dead.bookie_id))
        lose(cluster, dead)
        only_copy = {LedgerId.parse(one["ledgerId"]) for one in by_java if one["name"] == "one-bookie"}
        ledgers = [*ours, *(LedgerId.parse(one["ledgerId"]) for one in by_java)]
        gone = [each for each in ledgers if each in only_copy and bookies_of(cluster, each) == {dead.bookie_id}]
        heal(cluster, [each for each in ledgers if each not in gone], lost, dead.bookie_id)
        readable = [one for one in by_java if LedgerId.parse(one["ledgerId"]) not in gone]
        mine = [{"ledgerId": str(ledger), "digestType": "CRC32C", "password": "cHc="} for ledger in ours]
        answers = read_ledgers(java, uri, "v3", [*readable, *mine], recover=True)
        for known, seen in zip(readable, answers, strict=False):
            written = [(each["entryId"], each["sha256"], each["length"]) for each in known["entries"]]
            assert [(each["entryId"], each["sha256"], each["length"]) for each in seen["entries"]] == written, known[
                "name"
            ]
        for ledger, seen in zip(ours, answers[len(readable) :], strict=True):
            assert len(seen["entries"]) == cluster.ledgers.read(ledger).metadata.last_entry_id + 1
    cli = CommandLine(uri)
    assert cli("ledger", "verify", *ours).code == 0
    told = cli("ledger", "locate", lost[0], "--check", "-o", "ndjson")
    assert told.code == 3


@pytest.fixture(params=["zookeeper", "etcd", "hbase", "sqlite"])
def own_four(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[tuple[str, list[OwnBookie]]]:
    """Four of our bookies on each kind of metadata store."""
    if request.param == "sqlite":
        uri = f"sqlite://{tmp_path / 'metadata.db'}"
    else:
        server = request.getfixturevalue(request.param)
        uri = server.metadata_uri(server.new_root())
    open_cluster(uri, create=True).close()
    cluster = OwnCluster(uri, tmp_path, STORAGES)
    try:
        cluster.ensure_up()
        yield uri, cluster.bookies
    finally:
        cluster.kill()


def test_a_lost_bookie_of_four_of_ours_is_healed_in_every_scope(own_four: tuple[str, list[OwnBookie]]) -> None:
    uri, bookies = own_four
    dead = bookies[0]
    with open_cluster(uri) as cluster:
        ledgers, lost = asyncio.run(write_all(cluster, (0, 7), dead.bookie_id))
        lose(cluster, dead)
        heal(cluster, ledgers, lost, dead.bookie_id)
        # It comes back with its disk: what only it had is there again, and is brought away in time.
        dead.start()
        results = asyncio.run(replicate_all(cluster, lost))
        assert all(result.fragments == () for result in results.values())

        async def leave() -> list[LedgerReplication]:
            async with BookKeeper(cluster) as client:
                replicator = LedgerFragmentReplicator(client)
                return [await replicator.replicate_ledger(each, bookies={dead.bookie_id}) for each in lost]

        assert all(result.done for result in asyncio.run(leave()))
        assert not any(dead.bookie_id in bookies_of(cluster, ledger) for ledger in [*ledgers, *lost])
        assert asyncio.run(problems_of(cluster, lost)) == []
