"""Every entry from every replica: reports of intact, missing, damaged, different and unreachable ones."""

from __future__ import annotations

import pytest

from bkctl.client.verify import ReplicaState, Verification, verify_entries
from bkctl.errors import DigestMismatch
from bkctl.formats.metadata import Fragment


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_verify_reports_every_replica_of_every_entry(fake_cluster, scope_id):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(
            ledger_scope_id=scope_id, ensemble_size=4, write_quorum_size=3, ack_quorum_size=3
        )
        for i in range(300):
            await writer.ready()
            writer.add(b"%d" % i * (i % 7))
        await writer.close()
        names = cluster.metadata(writer.ledger).ensembles[0].bookies
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id)
        checks = [check async for check in verify_entries(reader)]
        assert [check.entry_id for check in checks] == list(range(300))
        for check in checks:
            assert check.ok
            assert [r.bookie_id for r in check.replicas] == [names[(check.entry_id + w) % 4] for w in range(3)]

        held = [cluster.bookie(name).ledgers[writer.ledger].entries for name in names]
        held[1].pop(5)
        held[2][6] = held[2][6][:-1] + bytes([held[2][6][-1] ^ 1])
        held[3][7] = held[3][11]
        cluster.bookie(names[1]).damage = lambda entry: b"\xff" + entry[1:] if entry is held[1][9] else entry
        digest = reader._access.digest
        held[0][8] = digest.seal(8, 7, 10_000, b"another") + b"another"
        found = {check.entry_id: check async for check in verify_entries(reader)}
        bad = {
            (entry_id, replica.bookie_id): (replica.state, type(replica.error))
            for entry_id, check in found.items()
            for replica in check.replicas
            if replica.state is not ReplicaState.OK
        }
        assert bad[5, names[1]][0] is ReplicaState.MISSING
        assert bad[6, names[2]] == (ReplicaState.DAMAGED, DigestMismatch)
        assert bad[7, names[3]] == (ReplicaState.DAMAGED, DigestMismatch)
        assert bad[9, names[1]] == (ReplicaState.DAMAGED, DigestMismatch)
        different = [name for (entry_id, name), (state, _) in bad.items() if entry_id == 8]
        assert len(different) == 2  # the first replica is the reference: who is right is not known
        assert {bad[8, name][0] for name in different} == {ReplicaState.DIFFERENT}
        assert set(found) == set(range(300))
        assert {entry_id for entry_id, _ in bad} == {5, 6, 7, 8, 9}

        await cluster.bookie(names[1]).stop()
        async for check in verify_entries(reader):
            states = {replica.bookie_id: replica.state for replica in check.replicas}
            assert states.pop(names[1], ReplicaState.UNAVAILABLE) is ReplicaState.UNAVAILABLE
            if check.entry_id > 9:
                assert set(states.values()) == {ReplicaState.OK}


async def test_an_empty_ledger_has_nothing_to_verify(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.close()
        reader = await client.open_ledger(writer.ledger_id)
        assert [check async for check in verify_entries(reader)] == []


async def test_fragments_are_followed(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for i in range(10):
            await writer.add(b"%d" % i)
        gone = cluster.bookie(writer.metadata.last_fragment.bookies[0])
        await gone.stop()
        for i in range(10):
            await writer.add(b"%d" % i)
        await writer.close()
        await gone.start()
        async with cluster.client() as fresh:
            reader = await fresh.open_ledger(writer.ledger_id)
            assert len(reader.metadata.ensembles) == 2
            assert all([check.ok async for check in verify_entries(reader)])


async def test_bookies_that_were_replaced_since_are_not_reported(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.add_all([b"%d" % i for i in range(300)])
        await writer.close()
        reader = await client.open_ledger(writer.ledger_id)
        found = cluster.cluster.ledgers.read(writer.ledger)
        old, *others = found.metadata.last_fragment.bookies
        (new,) = {bookie.bookie_id for bookie in cluster.bookies} - {old, *others}
        cluster.bookie(new).ledgers[writer.ledger] = cluster.bookie(old).ledgers[writer.ledger]
        await cluster.bookie(old).stop()
        moved = found.metadata._replace(ensembles=(Fragment(0, (new, *others)),))
        cluster.cluster.ledgers.write(writer.ledger, moved, found.version)
        checks = [check async for check in verify_entries(reader)]
        assert len(checks) == 300
        assert all(check.ok for check in checks)


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_neighbours_with_one_problem_are_one_finding(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(
            ledger_scope_id=scope_id, ensemble_size=3, write_quorum_size=2, ack_quorum_size=2
        )
        await writer.add_all([b"x"] * 30)
        await writer.close()
        names = cluster.metadata(writer.ledger).ensembles[0].bookies
        first, second = (cluster.bookie(name).ledgers[writer.ledger].entries for name in names[:2])
        for entry_id in [each for each in first if each < 10 or each > 25]:
            first.pop(entry_id)
        lost = sorted(second)[3]
        second.pop(lost)
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id)
        verification = Verification(reader)
        found = [(each.bookie_id, each.entries, each.entry_count) async for each in verification.findings()]
        assert sorted(found) == sorted([(names[0], "0-9", 7), (names[0], "26-29", 3), (names[1], str(lost), 1)])
        assert verification.finding_count == 3

        await cluster.bookie(names[2]).stop()
        down = [each async for each in Verification(reader).findings() if each.bookie_id == names[2]]
        assert [(each.problem, each.entry_count) for each in down] == [("unavailable", 20)]
        assert down[0].message.startswith("20 entries not checked")
