"""Copies to other bookies, the swap in the metadata, and what is left when somebody dies in between."""

from __future__ import annotations

import asyncio

import pytest
from client.fakes import Fault, turns
from replication.recovering import bookies_of, lose
from support.waiting import LIMIT_S

from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    LedgerFenced,
    LedgerNotFound,
    NotEnoughBookies,
    UnclosedFragment,
    Unreachable,
)
from bkctl.formats.metadata import LedgerState
from bkctl.protocol.messages import AddRequest, ListEntriesRequest, ReadRequest, Status
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.fragments import FaultReason
from bkctl.replication.holdings import plan_move
from bkctl.replication.replicator import LedgerFragmentReplicator, Outcome


async def write(client, count, *, scope_id=0, close=True, size=0, **shape):
    writer = await client.create_ledger_adv(
        ledger_scope_id=scope_id,
        **{"ensemble_size": 3, "write_quorum_size": 2, "ack_quorum_size": 2, "password": b"secret", **shape},
    )
    for entry_id in range(count):
        await writer.ready()
        writer.add(b"%d" % entry_id + bytes(size))
    await writer.flush()
    await writer.force()  # all of the write quorum have every entry, and not only the ack quorum
    if close:
        await writer.close()
    return writer


def ensembles(cluster, ledger):
    return [each.bookies for each in cluster.metadata(ledger).ensembles]


async def assert_whole(client, ledger, count):
    """Every replica of every entry, as every other client reads them."""
    check = await LedgerChecker(client).check(ledger, every_entry=True)
    assert check.fragments == ()
    reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"secret")
    assert reader.last_add_confirmed == count - 1
    if count:
        assert [each.entry_id async for each in reader.read(0, count - 1)] == list(range(count))


def adds_of(bookie):
    return [each for each in bookie.received if isinstance(each, AddRequest)]


def reads_of(bookie):
    return [each for each in bookie.received if isinstance(each, ReadRequest)]


@pytest.mark.parametrize("scope_id", [0, 7])
@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 2, 2), (3, 3, 2), (4, 2, 1)], ids=str)
async def test_replacement_holds_exactly_its_entries(fake_cluster, scope_id, shape):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        sizes = dict(zip(("ensemble_size", "write_quorum_size", "ack_quorum_size"), shape, strict=True))
        writer = await write(client, 50, scope_id=scope_id, **sizes)
        before = bookies_of(cluster, writer.ledger)
        lost = before[1]
        wanted = dict(lost.ledgers[writer.ledger].entries)
        await lose(cluster, lost)
        told = []
        replicator = LedgerFragmentReplicator(client, progress=lambda count, size: told.append((count, size)))
        result = await replicator.replicate_ledger(writer.ledger)
        assert result.done
        (fragment,) = result.fragments
        assert fragment.outcome is Outcome.REPLICATED
        after = bookies_of(cluster, writer.ledger)
        assert [old is new for old, new in zip(before, after, strict=True)] == [at != 1 for at in range(shape[0])]
        assert fragment.replaced == {lost.bookie_id: after[1].bookie_id}
        assert after[1].ledgers[writer.ledger].entries == wanted  # to the byte
        assert fragment.entry_count == len(wanted)
        assert fragment.size_bytes == sum(map(len, wanted.values()))
        assert [sum(column) for column in zip(*told, strict=True)] == [fragment.entry_count, fragment.size_bytes]
        assert all(each.recovery_add for each in adds_of(after[1]))
        assert cluster.metadata(writer.ledger).state is LedgerState.CLOSED
        await assert_whole(client, writer.ledger, 50)


async def test_two_lost_bookies_are_replaced_in_one_swap(fake_cluster):
    async with fake_cluster(7) as cluster, cluster.client() as client:
        writer = await write(client, 30, ensemble_size=5, write_quorum_size=3)
        lost = bookies_of(cluster, writer.ledger)[1:3]
        for bookie in lost:
            await lose(cluster, bookie)
        version = cluster.cluster.ledgers.read(writer.ledger).version
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert set(result.fragments[0].replaced) == {bookie.bookie_id for bookie in lost}
        assert cluster.cluster.ledgers.read(writer.ledger).version == version + 1
        await assert_whole(client, writer.ledger, 30)


async def test_empty_closed_ledger_changes_metadata_only(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 0)
        lost = bookies_of(cluster, writer.ledger)[0]
        await lose(cluster, lost)
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert result.done
        assert result.fragments[0].entry_count == 0
        assert lost.bookie_id not in ensembles(cluster, writer.ledger)[0]
        await assert_whole(client, writer.ledger, 0)


async def test_named_bookies_are_replaced_while_they_serve(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 20, ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        leaving = {bookie.bookie_id for bookie in bookies_of(cluster, writer.ledger)}
        spare = {bookie.bookie_id for bookie in cluster.bookies} - leaving
        leaving.add(spare.pop())
        # Each entry's only copy is on a bookie that leaves.
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger, bookies=leaving)
        assert result.done
        assert set(ensembles(cluster, writer.ledger)[0]) == spare
        await assert_whole(client, writer.ledger, 20)


async def test_open_ledger_is_fenced_or_left_alone(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client, cluster.client() as other:
        writer = await write(client, 10, close=False)
        lost = bookies_of(cluster, writer.ledger)[1]
        await lose(cluster, lost)
        replicator = LedgerFragmentReplicator(other)
        result = await replicator.replicate_ledger(writer.ledger, fence=False)
        assert (result.left_open, result.done, result.fragments) == (True, False, ())
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
        check = await replicator.checker.check(writer.ledger)
        with pytest.raises(UnclosedFragment):
            await replicator.replicate(check, check.fragments[0])
        result = await replicator.replicate_ledger(writer.ledger)
        assert result.done
        assert cluster.metadata(writer.ledger).state is LedgerState.CLOSED
        assert lost.bookie_id not in {each for names in ensembles(cluster, writer.ledger) for each in names}
        with pytest.raises(LedgerFenced):
            await writer.add(b"too late")
        await assert_whole(other, writer.ledger, 10)


async def test_closed_fragment_is_replicated_beside_active_writer(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client, cluster.client() as other:
        writer = await write(client, 10, close=False)
        lost = bookies_of(cluster, writer.ledger)[1]
        await lose(cluster, lost)
        for entry_id in range(10, 20):
            await writer.add(b"%d" % entry_id)
        await writer.write_lac()
        result = await LedgerFragmentReplicator(other).replicate_ledger(writer.ledger)
        assert result.done
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
        assert lost.bookie_id not in {each for names in ensembles(cluster, writer.ledger) for each in names}
        # The writer, whose metadata is old by now, changes its ensemble again and closes.
        second = bookies_of(cluster, writer.ledger, 1)[0]
        spare = await cluster.add_bookie()
        await lose(cluster, second)
        for entry_id in range(20, 30):
            await writer.add(b"%d" % entry_id)
        await writer.close()
        assert lost.bookie_id not in {each for names in ensembles(cluster, writer.ledger) for each in names}
        assert spare.bookie_id
        assert (await LedgerFragmentReplicator(other).replicate_ledger(writer.ledger)).done
        await assert_whole(other, writer.ledger, 30)


async def test_unreadable_entries_are_named_and_nothing_changes(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 40)
        held = bookies_of(cluster, writer.ledger)
        before = ensembles(cluster, writer.ledger)
        for entry_id in (1, 7, 10, 13, 31):  # on the indexes 1 and 2
            del held[1].ledgers[writer.ledger].entries[entry_id]
            del held[2].ledgers[writer.ledger].entries[entry_id]
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert not result.done
        assert result.fragments[0].outcome is Outcome.UNRECOVERABLE
        assert [(each.first_entry_id, each.last_entry_id, each.entry_count) for each in result.unreadable] == [
            (1, 1, 1), (7, 7, 1), (10, 10, 1), (13, 13, 1), (31, 31, 1)
        ]  # fmt: skip
        assert all(each.lost for each in result.unreadable)
        assert held[1].bookie_id in str(result.unreadable[0])
        assert ensembles(cluster, writer.ledger) == before
        fragment, check = result.check.fragments[0], result.check
        again = await LedgerFragmentReplicator(client).unreadable(check, fragment, [31, 30, 7])
        assert [each.first_entry_id for each in again] == [7, 31]


async def test_entries_of_gone_bookies_are_unreadable_but_not_lost(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 10, ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        gone = bookies_of(cluster, writer.ledger)[0]
        await lose(cluster, gone)
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        (unreadable,) = result.unreadable
        assert unreadable[:3] == (0, 8, 5)  # the even ones
        assert not unreadable.lost
        assert [bookie_id for bookie_id, _ in unreadable.problems] == [gone.bookie_id]
        await gone.start()
        cluster.register(gone)
        async with cluster.client() as other:
            assert (await LedgerFragmentReplicator(other).replicate_ledger(writer.ledger)).fragments == ()
            check = await LedgerChecker(other).on_bookies(writer.ledger, {gone.bookie_id})
            assert await LedgerFragmentReplicator(other).unreadable(check, check.fragments[0], range(10)) == []


async def test_a_damaged_replica_is_never_copied(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 30, ensemble_size=3, write_quorum_size=3)
        held = bookies_of(cluster, writer.ledger)
        good = dict(held[2].ledgers[writer.ledger].entries)
        held[0].damage = lambda entry: entry[:-1] + bytes([entry[-1] ^ 1])
        await lose(cluster, held[1])
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert result.done
        for bookie in bookies_of(cluster, writer.ledger):
            assert bookie.ledgers[writer.ledger].entries == good
        await assert_whole(client, writer.ledger, 30)


async def test_bookie_without_replacement_gets_its_entries_back(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 30)
        held = bookies_of(cluster, writer.ledger)
        whole = dict(held[0].ledgers[writer.ledger].entries)
        for entry_id in (2, 3, 12):
            del held[0].ledgers[writer.ledger].entries[entry_id]
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger, every_entry=True)
        (fragment,) = check.fragments
        assert await replicator.targets(fragment) == {0: held[0].bookie_id}
        result = await replicator.replicate(check, fragment)
        assert result.outcome is Outcome.REPAIRED
        assert (result.replaced, result.repaired, result.entry_count) == ({}, (held[0].bookie_id,), 3)
        assert held[0].ledgers[writer.ledger].entries == whole
        await assert_whole(client, writer.ledger, 30)
        # Another bookie comes: then as Apache's worker.
        held[0].ledgers.clear()
        await cluster.add_bookie()
        check = await replicator.checker.check(writer.ledger)
        (fragment,) = check.fragments
        assert await replicator.targets(fragment) == {0: "b3"}


async def test_gone_bookie_gets_the_only_replacement(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 30, write_quorum_size=3)
        held = bookies_of(cluster, writer.ledger)
        await lose(cluster, held[2])
        held[0].ledgers.clear()
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert result.done
        assert set(result.fragments[0].replaced) == {held[2].bookie_id}
        assert result.fragments[0].repaired == (held[0].bookie_id,)
        await assert_whole(client, writer.ledger, 30)


async def test_too_few_bookies_change_nothing(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 10)
        before = ensembles(cluster, writer.ledger)
        await lose(cluster, bookies_of(cluster, writer.ledger)[0])
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert [type(error) for _, error in result.errors] == [NotEnoughBookies]
        assert not result.done
        assert ensembles(cluster, writer.ledger) == before


async def test_a_scoped_ledger_never_goes_to_a_bookie_without_scopes(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        plain = await cluster.add_bookie(scopes=False)
        scoped = await write(client, 10, scope_id=7)
        unscoped = await write(client, 10, ensemble_size=4)
        lost = bookies_of(cluster, scoped.ledger)[0]
        await lose(cluster, lost)
        replicator = LedgerFragmentReplicator(client)
        result = await replicator.replicate_ledger(scoped.ledger)
        assert [type(error) for _, error in result.errors] == [NotEnoughBookies]
        assert "without ledger scopes" in str(result.errors[0][1])
        assert scoped.ledger not in plain.ledgers
        assert unscoped.ledger in plain.ledgers


async def test_failing_target_is_replaced(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 30)
        lost = bookies_of(cluster, writer.ledger)[1]
        await lose(cluster, lost)
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger)
        (fragment,) = check.fragments
        (first,) = (await replicator.targets(fragment)).values()
        cluster.bookie(first).fault = lambda request: Status.EREADONLY if isinstance(request, AddRequest) else None
        result = await replicator.replicate(check, fragment)
        assert result.outcome is Outcome.REPLICATED
        assert first not in result.replaced.values()
        await assert_whole(client, writer.ledger, 30)


async def test_failing_given_target_is_the_error(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 30)
        await lose(cluster, bookies_of(cluster, writer.ledger)[1])
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger)
        before = ensembles(cluster, writer.ledger)
        spare = next(each for each in cluster.bookies if each.bookie_id not in before[0])
        await spare.stop()
        with pytest.raises(BookieUnavailable, match=f"{spare.bookie_id} does not take entry"):
            await replicator.replicate(check, check.fragments[0], targets={1: spare.bookie_id})
        assert ensembles(cluster, writer.ledger) == before


async def test_silent_replica_does_not_delay_the_copy(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.config.ClientConfig.speculative_read_s", lambda *_: 0.05)
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 20, write_quorum_size=3)
        held = bookies_of(cluster, writer.ledger)
        check = await LedgerChecker(client).on_bookies(writer.ledger, {held[2].bookie_id})
        for bookie in held[1:]:
            bookie.fault = lambda request: Fault.SILENCE if isinstance(request, ReadRequest) else None
        result = await LedgerFragmentReplicator(client).replicate(check, check.fragments[0])
        assert result.outcome is Outcome.REPLICATED
        for bookie in held:
            bookie.fault = lambda request: None
        await assert_whole(client, writer.ledger, 20)


class Died(Exception):
    """The worker."""


STEPS = ["chosen", "add 1", "add 60", "add 149", "before the swap", "after the swap"]


@pytest.mark.parametrize("step", STEPS)
async def test_second_worker_finishes_after_crash_at_any_step(fake_cluster, monkeypatch, step):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await write(client, 150, ensemble_size=2)
        before = ensembles(cluster, writer.ledger)
        await lose(cluster, bookies_of(cluster, writer.ledger)[1])
        replicator = LedgerFragmentReplicator(client, batch_size=7)
        check = await replicator.checker.check(writer.ledger)
        (fragment,) = check.fragments
        (target,) = (await replicator.targets(fragment)).values()
        ledgers = client.cluster.ledgers
        real = ledgers.write_many

        def die(*_):
            raise Died

        def write_and_die(*arguments):
            real(*arguments)
            raise Died

        written = 0

        def count(entries, size):
            nonlocal written
            written += entries
            if step == f"add {written}":
                raise Died

        dying = LedgerFragmentReplicator(client, batch_size=7, progress=count)
        with monkeypatch.context() as patch:
            if step == "chosen":
                patch.setattr("bkctl.replication.fragment_copy.FragmentCopy._copy", die)
            elif step == "before the swap":
                patch.setattr(ledgers, "write_many", die)
            elif step == "after the swap":
                patch.setattr(ledgers, "write_many", write_and_die)
            with pytest.raises(Died):
                await dying.replicate(check, fragment)
        if step != "after the swap":
            assert ensembles(cluster, writer.ledger) == before
        async with cluster.client() as second:
            result = await LedgerFragmentReplicator(second).replicate_ledger(writer.ledger)
            assert result.done
            if step == "after the swap":
                assert result.fragments == ()
            else:
                assert set(result.fragments[0].replaced.values()) == {target}
                assert result.fragments[0].entry_count == 150
            await assert_whole(second, writer.ledger, 150)


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_entries_of_a_deleted_ledger_of_the_same_id_are_overwritten(fake_cluster, scope_id):
    shape = {"ledger_id": 700, "ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1, "scope_id": scope_id}
    async with fake_cluster(2) as cluster, cluster.client() as client:
        async with cluster.client(only=["b1"]) as writing:
            await write(writing, 120, size=3, **shape)
            await writing.delete_ledger(700, ledger_scope_id=scope_id)
        async with cluster.client(only=["b0"]) as writing:
            ledger = (await write(writing, 120, **shape)).ledger
        new = dict(cluster.bookie("b0").entries(ledger))
        assert cluster.bookie("b1").entries(ledger) != new
        assert (await LedgerFragmentReplicator(client).replicate_ledger(ledger, bookies={"b0"})).done
        assert cluster.bookie("b1").entries(ledger) == new


async def lacking_bookie(cluster, client):
    """Write a ledger that one of two bookies lacks but for entries 5, 6 and 8, of which 5 is right; check it."""
    writer = await write(client, 120, ensemble_size=2)
    whole, lacking = (bookie.entries(writer.ledger) for bookie in bookies_of(cluster, writer.ledger))
    lacking.clear()
    lacking.update({5: whole[5], 6: whole[7], 8: whole[8][:-1]})
    return await LedgerChecker(client).check(writer.ledger), whole, lacking


async def test_listed_entries_are_read_before_they_count(fake_cluster):
    async with fake_cluster(2) as cluster, cluster.client() as client:
        check, whole, lacking = await lacking_bookie(cluster, client)
        result = await LedgerFragmentReplicator(client).replicate(check, check.fragments[0])
        assert (result.outcome, result.entry_count, lacking) == (Outcome.REPAIRED, 119, whole)


async def test_a_bookie_that_cannot_list_its_entries_gets_all_of_them(fake_cluster):
    async with fake_cluster(2) as cluster, cluster.client() as client:
        check, whole, lacking = await lacking_bookie(cluster, client)
        for bookie in cluster.bookies:
            bookie.fault = lambda request: Status.EBADREQ if isinstance(request, ListEntriesRequest) else None
        result = await LedgerFragmentReplicator(client).replicate(check, check.fragments[0])
        assert (result.outcome, result.entry_count, lacking) == (Outcome.REPAIRED, 120, whole)


async def test_mute_bookie_is_asked_once_for_its_entries(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.replication.replica_reads.LIST_TIMEOUT_S", 0.1)
    async with fake_cluster(2) as cluster, cluster.client() as client:
        checks = [(await lacking_bookie(cluster, client))[0] for _ in range(3)]
        # As Apache's with DbLedgerStorage.
        for bookie in cluster.bookies:
            bookie.fault = lambda request: Fault.SILENCE if isinstance(request, ListEntriesRequest) else None
        replicator = LedgerFragmentReplicator(client)
        for check in checks:
            assert (await replicator.replicate(check, check.fragments[0])).outcome is Outcome.REPAIRED
        for bookie in cluster.bookies:
            lacks = any(bookie.bookie_id in check.fragments[0].bookies for check in checks)
            assert sum(isinstance(request, ListEntriesRequest) for request in bookie.received) == lacks


async def test_search_for_unreadable_entries_is_bounded(fake_cluster, monkeypatch):
    for module in ("fragment_copy", "replica_reads"):
        monkeypatch.setattr(f"bkctl.replication.{module}.UNREADABLE_NAMED_MAX", 50)

    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 20)
        lost = bookies_of(cluster, writer.ledger)[0]
        ledgers = cluster.cluster.ledgers
        found = ledgers.read(writer.ledger)
        ledgers.write(writer.ledger, found.metadata._replace(last_entry_id=(1 << 63) - 1), found.version)
        await lose(cluster, lost)
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        (fragment,) = result.fragments
        assert fragment.outcome is Outcome.UNRECOVERABLE
        assert sum(each.entry_count for each in fragment.unreadable) == 50
        assert fragment.unreadable[0].first_entry_id >= 20
        assert ensembles(cluster, writer.ledger) == [each.bookies for each in found.metadata.ensembles]
        plan = plan_move(cluster.cluster, [lost.bookie_id])
        planned = [each async for each in BookieMover(client, [lost.bookie_id], plan).planned()]
        assert sum(each.entry_count for each in planned[0].unreadable) == 50


async def test_concurrent_swap_is_superseded(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await write(client, 20)
        held = bookies_of(cluster, writer.ledger)
        await lose(cluster, held[0])
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger)
        (fragment,) = check.fragments
        spares = [each.bookie_id for each in cluster.bookies if each not in held]
        first = await replicator.replicate(check, fragment, targets={0: spares[0]})
        assert first.replaced == {held[0].bookie_id: spares[0]}
        version = cluster.cluster.ledgers.read(writer.ledger).version
        second = await replicator.replicate(check, fragment, targets={0: spares[1]})
        assert (second.outcome, second.replaced) == (Outcome.SUPERSEDED, {})
        assert cluster.cluster.ledgers.read(writer.ledger).version == version
        # A bookie that came into the ensemble elsewhere does not come in twice.
        stale = await replicator.checker.on_bookies(writer.ledger, {held[1].bookie_id})
        await replicator.replicate(stale, stale.fragments[0], targets={1: spares[2]})
        other = await replicator.checker.on_bookies(writer.ledger, {held[2].bookie_id}, stale.versioned)
        third = await replicator.replicate(other, other.fragments[0], targets={2: spares[2]})
        assert third.outcome is Outcome.SUPERSEDED
        # Of two, one was replaced by somebody else meanwhile: the other one is now.
        both = await replicator.checker.on_bookies(
            writer.ledger, {held[0].bookie_id, held[2].bookie_id}, check.versioned
        )
        partly = await replicator.replicate(both, both.fragments[0], targets={0: spares[2], 2: spares[1]})
        assert (partly.outcome, partly.replaced) == (Outcome.SUPERSEDED, {held[2].bookie_id: spares[1]})
        assert len(set(ensembles(cluster, writer.ledger)[0])) == 3
        await assert_whole(client, writer.ledger, 20)


@pytest.mark.parametrize("change", [{}, {"password": b"another"}, {"last_entry_id": 29}], ids=str)
async def test_recreated_ledger_is_not_swapped(fake_cluster, change):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 20)
        await lose(cluster, bookies_of(cluster, writer.ledger)[0])
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger)
        ledgers, versions = cluster.cluster.ledgers, []

        def create_again(request):
            # Deleted and created again on the same bookies, or longer than it was, while entries are copied.
            if isinstance(request, AddRequest) and not versions:
                other = check.metadata._replace(**change)
                if "last_entry_id" in change:
                    versions.append(ledgers.write(writer.ledger, other, check.versioned.version))
                else:
                    ledgers.remove(writer.ledger)
                    versions.append(ledgers.create(writer.ledger, other))

        for bookie in cluster.bookies:
            bookie.fault = create_again
        result = await replicator.replicate(check, check.fragments[0])
        assert (result.outcome, result.replaced) == (Outcome.SUPERSEDED, {})
        found = ledgers.read(writer.ledger)
        assert found.version == versions[0]
        assert found.metadata.ensembles == check.metadata.ensembles


async def test_swap_retries_after_metadata_conflict(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await write(client, 20)
        held = bookies_of(cluster, writer.ledger)
        replicator = LedgerFragmentReplicator(client)
        checks = [await replicator.checker.on_bookies(writer.ledger, {each.bookie_id}) for each in held]
        spares = [each.bookie_id for each in cluster.bookies if each not in held]
        results = await asyncio.gather(
            *(
                replicator.replicate(check, check.fragments[0], targets={at: spares[at]})
                for at, check in enumerate(checks)
            )
        )
        assert [each.outcome for each in results] == [Outcome.REPLICATED] * 3
        assert ensembles(cluster, writer.ledger) == [tuple(spares)]
        await assert_whole(client, writer.ledger, 20)


async def test_deleted_ledger_is_not_unrecoverable(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 20)
        await lose(cluster, bookies_of(cluster, writer.ledger)[0])
        replicator = LedgerFragmentReplicator(client)
        check = await replicator.checker.check(writer.ledger)
        await client.delete_ledger(writer.ledger_id)
        with pytest.raises(LedgerNotFound):
            await replicator.replicate(check, check.fragments[0])
        for bookie in cluster.bookies:
            bookie.ledgers.clear()
        with pytest.raises(LedgerNotFound):
            await replicator.replicate(check, check.fragments[0])
        with pytest.raises(LedgerNotFound):
            await replicator.replicate_ledger(writer.ledger)


async def test_store_failure_at_swap_is_the_fragments_error(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 5)
        await lose(cluster, bookies_of(cluster, writer.ledger)[0])

        def fail(*_):
            raise Unreachable("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(client.cluster.ledgers, "write_many", fail)
            result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        assert [type(error) for _, error in result.errors] == [Unreachable]
        assert (await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)).done


async def test_memory_and_requests_in_flight_are_bounded(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 200, ensemble_size=2)
        held = bookies_of(cluster, writer.ledger)
        await lose(cluster, held[1])
        replicator = LedgerFragmentReplicator(client, batch_size=8)
        check = await replicator.checker.check(writer.ledger)
        for bookie in cluster.bookies:
            bookie.hold = lambda request: isinstance(request, AddRequest)
        replicating = asyncio.ensure_future(replicator.replicate(check, check.fragments[0]))
        taker = None
        while taker is None or not replicating.done():
            await asyncio.sleep(0.01)
            taker = taker or next((each for each in cluster.bookies if each.held), None)
            if taker is not None:
                assert len(taker.held) <= 8
                taken, taker.held = taker.held, []
                for request, respond in taken:
                    taker._AddRequest(request, respond)
        assert (await replicating).entry_count == 200


async def test_entries_that_wait_for_targets_are_bounded_in_bytes(fake_cluster, monkeypatch):
    size = 10_000
    monkeypatch.setattr("bkctl.replication.fragment_copy.WAITING_BYTES_MAX", 6 * size, raising=False)
    monkeypatch.setattr("bkctl.replication.fragment_copy.READ_AGAIN_COUNT", 2, raising=False)
    async with fake_cluster(4) as cluster, cluster.client(timeout_s=LIMIT_S) as client:
        writer = await write(client, 200, ensemble_size=2, size=size)
        await lose(cluster, bookies_of(cluster, writer.ledger)[1])
        replicator = LedgerFragmentReplicator(client, batch_size=100)
        check = await replicator.checker.check(writer.ledger)
        for bookie in cluster.bookies:
            bookie.received.clear()
            bookie.hold = lambda request: isinstance(request, AddRequest)
        replicating = asyncio.ensure_future(replicator.replicate(check, check.fragments[0]))
        while sum(map(len, map(reads_of, cluster.bookies))) < 16:
            await asyncio.sleep(0.001)
        await turns()
        (target,) = (each for each in cluster.bookies if each.held)
        assert len(target.held) <= 5 + 2
        target.release()
        assert (await replicating).entry_count == 200
        await assert_whole(client, writer.ledger, 200)


async def test_recoveries_at_once_are_bounded(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.replication.replicator.RECOVERIES_AT_ONCE", 2)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = [(await client.create_ledger()).ledger for _ in range(6)]
        running: set[object] = set()
        counts = []
        open_ledger = client.open_ledger

        async def open_counted(ledger_id, **options):
            running.add(ledger_id)
            counts.append(len(running))
            handle = await open_ledger(ledger_id, **options)
            running.remove(ledger_id)
            return handle

        monkeypatch.setattr(client, "open_ledger", open_counted)
        replicator = LedgerFragmentReplicator(client)
        await asyncio.gather(*map(replicator.recover, ledgers))
        assert max(counts) == 2
        assert all(cluster.metadata(ledger).is_closed for ledger in ledgers)


async def test_unreadable_entries_name_errors_by_bookie(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await write(client, 3, write_quorum_size=3)
        held = bookies_of(cluster, writer.ledger)
        for bookie in held:
            bookie.fault = lambda request: Status.EIO if isinstance(request, ReadRequest) else None
        result = await LedgerFragmentReplicator(client).replicate_ledger(writer.ledger)
        (unreadable,) = result.unreadable
        assert unreadable.entry_count == 3
        assert {bookie_id for bookie_id, _ in unreadable.problems} == {each.bookie_id for each in held}
        assert not unreadable.lost
        assert all(isinstance(error, BkctlError) for _, error in unreadable.problems)
        assert {each.reason for each in result.check.fragments[0].faults} == {FaultReason.UNAVAILABLE}
