"""Fragments that a check calls bad, with bookies and reasons."""

from __future__ import annotations

import random

import pytest
from replication.recovering import bookies_of

from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.protocol.messages import ReadRequest, Status
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.fragments import EntrySpan, FaultReason


async def write(client, count, *, scope_id=0, close=True, **shape):
    writer = await client.create_ledger_adv(
        ledger_scope_id=scope_id, **{"ensemble_size": 3, "write_quorum_size": 2, "ack_quorum_size": 2, **shape}
    )
    for entry_id in range(count):
        await writer.add(b"%d" % entry_id)
    await writer.force()  # all of the write quorum have every entry, and not only the ack quorum
    if close:
        await writer.close()
    return writer


def reads_of(bookie):
    return sorted(each.entry_id for each in bookie.received if isinstance(each, ReadRequest) and each.entry_id >= 0)


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_healthy_ledger_has_no_bad_fragment(fake_cluster, scope_id):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 12, scope_id=scope_id)
        checker = LedgerChecker(client)
        for options in ({}, {"percentage": 50}, {"every_entry": True}):
            check = await checker.check(writer.ledger, **options)
            assert check.fragments == ()
            assert check.last_add_confirmed == 11
            assert not check.needs_recovery
        assert (await checker.check(LedgerId(scope_id, writer.ledger_id))).metadata.is_closed


async def test_check_reads_first_and_last_entry_of_each_bookie(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 8)
        held = bookies_of(cluster, writer.ledger)
        for bookie in held:
            bookie.received.clear()
        assert (await LedgerChecker(client).check(writer.ledger)).fragments == ()
        # E=3, Wq=2: entry e is on e % 3 and (e + 1) % 3
        assert [reads_of(bookie) for bookie in held] == [[0, 6], [0, 7], [1, 7]]


async def test_percentage_bounds_sampled_entries(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client() as client:
        writer = await write(client, 100, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        bookie = cluster.bookies[0]
        checker = LedgerChecker(client, rng=random.Random(1))
        counts = []
        for percentage in (0, 10, 50, 100):
            bookie.received.clear()
            assert (await checker.check(writer.ledger, percentage=percentage)).fragments == ()
            counts.append(len(reads_of(bookie)))
            assert {0, 99} <= set(reads_of(bookie))
        assert counts[0] == 2
        assert 2 < counts[1] <= 12 < counts[2] < 60
        assert counts[3] == 100
        with pytest.raises(UsageError):
            await checker.check(writer.ledger, percentage=101)


async def test_metadata_that_promises_endless_entries_ends_a_check(fake_cluster, monkeypatch):
    """Whoever closes a ledger writes its last entry into the metadata, and the auditor checks all ledgers."""
    monkeypatch.setattr("bkctl.replication.checker.UNREADABLE_NAMED_MAX", 500)
    async with fake_cluster(1) as cluster, cluster.client() as client:
        writer = await write(client, 10, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        ledgers = client.cluster.ledgers
        found = ledgers.read(writer.ledger)
        ledgers.write(writer.ledger, found.metadata._replace(last_entry_id=(1 << 62) - 1), found.version)
        for options, count_max in (({"percentage": 50}, 200), ({"every_entry": True}, 800)):
            cluster.bookies[0].received.clear()
            (fragment,) = (await LedgerChecker(client).check(writer.ledger, **options)).fragments
            (fault,) = fragment.faults
            assert (fault.reason, fault.missing, fault.entry_count) == (FaultReason.NO_ENTRY, None, 1 << 62)
            assert len(reads_of(cluster.bookies[0])) < count_max


async def test_faults_have_distinct_reasons(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await write(client, 30, ensemble_size=6, write_quorum_size=3)
        held = bookies_of(cluster, writer.ledger)
        cluster.unregister(held[0])
        held[1].ledgers.clear()
        held[2].ledgers[writer.ledger].entries.pop(0)
        held[3].damage = lambda entry: entry[:-1] + bytes([entry[-1] ^ 1])
        await held[4].stop()
        check = await LedgerChecker(client).check(writer.ledger)
        (fragment,) = check.fragments
        found = {fault.ensemble_index: fault for fault in fragment.faults}
        assert {index: fault.reason for index, fault in found.items()} == {
            0: FaultReason.GONE,
            1: FaultReason.NO_LEDGER,
            2: FaultReason.NO_ENTRY,
            3: FaultReason.DAMAGED,
            4: FaultReason.UNAVAILABLE,
        }
        assert fragment.bookies == tuple(bookie.bookie_id for bookie in held[:5])
        assert {fault.entry_count for fault in fragment.faults} == {15}
        assert fragment.closed
        assert (fragment.first_entry_id, fragment.last_entry_id) == (0, 29)


async def test_silent_bookie_is_timed_out(fake_cluster):
    from client.fakes import Fault

    async with fake_cluster(3) as cluster, cluster.client() as client, cluster.client(timeout_s=0.2) as hasty:
        writer = await write(client, 3)
        silent = bookies_of(cluster, writer.ledger)[1]
        silent.fault = lambda request: Fault.SILENCE
        check = await LedgerChecker(hasty).check(writer.ledger, every_entry=True)
        (fragment,) = check.fragments
        fault = next(fault for fault in fragment.faults if fault.bookie_id == silent.bookie_id)
        assert (fault.reason, fault.missing) == (FaultReason.TIMED_OUT, None)


async def test_disk_failure_is_not_a_missing_entry(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 3)
        failing = bookies_of(cluster, writer.ledger)[2]
        for status in (Status.EIO, Status.EUNKNOWNLEDGERSTATE, Status.ETOOMANYREQUESTS):
            failing.fault = lambda request, status=status: status
            (fragment,) = (await LedgerChecker(client).check(writer.ledger, every_entry=True)).fragments
            assert [(each.reason, each.missing) for each in fragment.faults] == [(FaultReason.UNAVAILABLE, None)]


async def test_every_entry_check_lists_missing_entries(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 300)
        held = bookies_of(cluster, writer.ledger)
        first, second, third = (bookie.ledgers[writer.ledger].entries for bookie in held)
        for entry_id in (2, 3, 5, 99, 102):  # of index 0, which has 0, 2, 3, 5, 6, …
            del first[entry_id]
        second[7] = second[10]  # another entry than asked for
        (fragment,) = (await LedgerChecker(client).check(writer.ledger, every_entry=True)).fragments
        at_first, at_second = fragment.faults
        assert at_first.missing == (EntrySpan(2, 5, 3), EntrySpan(99, 99, 1), EntrySpan(102, 102, 1))
        assert at_first.reason is FaultReason.NO_ENTRY
        assert at_second.missing == (EntrySpan(7, 7, 1),)
        assert at_second.reason is FaultReason.DAMAGED
        assert len(third) == 200
        # The ends are there, so probes see nothing.
        assert (await LedgerChecker(client).check(writer.ledger)).fragments == ()


async def test_empty_closed_ledger_is_bad_for_gone_bookies_only(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 0)
        checker = LedgerChecker(client)
        assert (await checker.check(writer.ledger, every_entry=True)).fragments == ()
        gone = bookies_of(cluster, writer.ledger)[1]
        cluster.unregister(gone)
        (fragment,) = (await checker.check(writer.ledger)).fragments
        assert fragment.bookies == (gone.bookie_id,)
        assert fragment.faults[0].entry_count == 0
        assert fragment.closed


async def test_check_finds_lost_single_entry_of_closed_ledger(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 1)
        for bookie in cluster.bookies:
            bookie.ledgers.clear()
        (fragment,) = (await LedgerChecker(client).check(writer.ledger)).fragments
        assert [fault.reason for fault in fragment.faults] == [FaultReason.NO_LEDGER] * 2


async def test_the_last_fragment_of_an_open_ledger_may_have_no_entry(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 0, close=False)
        checker = LedgerChecker(client)
        check = await checker.check(writer.ledger)
        assert (check.fragments, check.last_add_confirmed, check.needs_recovery) == ((), -1, False)
        # A bookie of the first entry's write set that is gone may have had it.
        gone = bookies_of(cluster, writer.ledger)[0]
        cluster.unregister(gone)
        check = await checker.check(writer.ledger)
        (fragment,) = check.fragments
        assert not fragment.closed
        assert gone.bookie_id in fragment.bookies
        assert check.gone_at_end == (gone.bookie_id,)
        assert check.needs_recovery
        await writer.close()


async def test_empty_open_fragment_is_left_to_its_writer(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 0, close=False)
        gone = bookies_of(cluster, writer.ledger)[2]
        cluster.unregister(gone)
        check = await LedgerChecker(client).check(writer.ledger)
        assert check.fragments == ()
        assert check.gone_at_end == (gone.bookie_id,)
        assert check.needs_recovery  # after the grace period, as isLastSegmentOpenAndMissingBookies
        await writer.close()


async def test_an_open_ledger_is_checked_up_to_its_last_add_confirmed(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 10, close=False)
        await writer.write_lac()
        checker = LedgerChecker(client)
        assert (await checker.check(writer.ledger, every_entry=True)).fragments == ()
        held = bookies_of(cluster, writer.ledger)
        del held[0].ledgers[writer.ledger].entries[3]
        check = await checker.check(writer.ledger, every_entry=True)
        (fragment,) = check.fragments
        assert (check.last_add_confirmed, fragment.last_entry_id, fragment.closed) == (9, 9, False)
        assert fragment.faults[0].missing == (EntrySpan(3, 3, 1),)
        assert check.needs_recovery
        await writer.close()


async def test_earlier_fragment_closes_once_confirmed(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, 10, close=False)
        lost = bookies_of(cluster, writer.ledger)[1]  # of entry 10's write set
        await lost.stop()
        cluster.unregister(lost)
        for entry_id in range(10, 20):
            await writer.add(b"%d" % entry_id)
        assert len(cluster.metadata(writer.ledger).ensembles) == 2
        await writer.write_lac()
        check = await LedgerChecker(client).check(writer.ledger)
        (fragment,) = check.fragments
        assert (fragment.first_entry_id, fragment.last_entry_id, fragment.closed) == (0, 9, True)
        assert fragment.bookies == (lost.bookie_id,)
        assert not check.needs_recovery
        # Without the explicit LAC a reader in v2 sees one entry less, and so does not take it for closed.
        for bookie in cluster.bookies:
            if writer.ledger in bookie.ledgers:
                bookie.ledgers[writer.ledger].lac_packet = None
                for entry_id in range(11, 20):
                    bookie.ledgers[writer.ledger].entries.pop(entry_id, None)
        check = await LedgerChecker(client).check(writer.ledger)
        assert check.last_add_confirmed == 9
        for bookie in cluster.bookies:
            if writer.ledger in bookie.ledgers:
                bookie.ledgers[writer.ledger].entries.pop(10, None)
        check = await LedgerChecker(client).check(writer.ledger)
        assert check.last_add_confirmed == 8
        assert [fragment.closed for fragment in check.fragments if fragment.first_entry_id == 0] == [False]
        assert check.needs_recovery


async def test_check_reports_unknown_last_add_confirmed(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 4, close=False, ensemble_size=2)
        for bookie in bookies_of(cluster, writer.ledger):
            await bookie.stop()
            cluster.unregister(bookie)
        check = await LedgerChecker(client).check(writer.ledger)
        assert check.problem is not None
        assert check.last_add_confirmed == -1
        assert set(check.gone_at_end) == set(cluster.metadata(writer.ledger).ensembles[0].bookies)
        assert [fault.reason for fault in check.fragments[0].faults] == [FaultReason.GONE] * 2
        assert check.needs_recovery


async def test_on_bookies_reads_no_entry(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 9)
        held = bookies_of(cluster, writer.ledger)
        other = next(bookie for bookie in cluster.bookies if bookie not in held)
        for bookie in cluster.bookies:
            bookie.received.clear()
        checker = LedgerChecker(client)
        check = await checker.on_bookies(writer.ledger, {held[1].bookie_id, other.bookie_id})
        (fragment,) = check.fragments
        assert [(each.ensemble_index, each.reason, each.entry_count) for each in fragment.faults] == [
            (1, FaultReason.GIVEN, 6)
        ]
        assert (await checker.on_bookies(writer.ledger, {other.bookie_id})).fragments == ()
        assert not any(bookie.received for bookie in cluster.bookies)
