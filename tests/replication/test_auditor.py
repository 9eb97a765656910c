"""Who is elected auditor, when it acts upon lost bookies, and what it marks."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from replication.recovering import CONFIG, bookies_of, come_back, eventually, lose, running, write

from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AuditorCheck, LedgerUnderreplicationManager, mark_path
from bkctl.replication.auditor import (
    Auditor,
    AuditorElector,
    Decision,
    LostBookies,
    MarkProgress,
    audit_bookies,
    first_delay_s,
    mark_ledgers,
)

HOUR_S = 3600


def manager_of(cluster):
    return LedgerUnderreplicationManager(cluster.cluster.store)


def marks(cluster):
    return {ledger: set(mark.missing_replicas) for ledger, mark in manager_of(cluster).list(None)}


# --- when ------------------------------------------------------------------------------------------------------------


def test_without_a_delay_every_loss_is_audited_at_once():
    lost = LostBookies({"a", "b", "c"}, 0)
    assert lost.bookies_changed({"a", "b", "c"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a", "b"}, 0) is Decision.AUDIT
    assert lost.bookies_changed({"a", "b"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a", "b", "d"}, 0) is Decision.NOTHING
    assert lost.bookies_changed({"a"}, 0) is Decision.AUDIT
    assert not lost.is_pending


def test_one_lost_bookie_is_waited_for_and_cancels_when_it_returns():
    lost = LostBookies({"a", "b", "c"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.NOTHING
    assert (lost.is_pending, lost.waiting) == (True, {"c"})
    assert lost.bookies_changed({"a", "b", "c"}, 60) is Decision.CANCEL
    assert (lost.is_pending, lost.delayed_count, lost.cancelled_count) == (False, 1, 1)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    lost.delay_over()
    assert not lost.is_pending
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.NOTHING


def test_several_lost_bookies_are_not_waited_for():
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert lost.bookies_changed({"a", "b", "c"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT
    assert not lost.is_pending
    # One returns in the moment in which another one goes.
    lost = LostBookies({"a", "b", "c"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60) is Decision.AUDIT_LATER
    assert lost.bookies_changed({"a", "c"}, 60) is Decision.AUDIT_LATER
    assert lost.waiting == {"b"}


def test_writing_the_delay_again_or_zero_means_now_and_another_delay_begins_anew():
    lost = LostBookies({"a", "b"}, 60)
    assert lost.delay_written(60) is Decision.AUDIT
    assert lost.delay_written(120) is Decision.NOTHING
    assert lost.bookies_changed({"a"}, 120) is Decision.AUDIT_LATER
    assert lost.delay_written(30) is Decision.AUDIT_LATER
    assert (lost.is_pending, lost.delayed_count, lost.cancelled_count) == (True, 2, 1)
    assert lost.delay_written(0) is Decision.AUDIT
    assert not lost.is_pending
    assert lost.bookies_changed({"a"}, 0) is Decision.NOTHING


def test_a_check_that_ran_is_due_when_its_interval_is_over():
    now_ms = 1_700_000_000_000
    assert first_delay_s(100, None, now_ms) == 0
    assert first_delay_s(100, now_ms - 40_000, now_ms) == 60
    assert first_delay_s(100, now_ms - 400_000, now_ms) == 0
    assert first_delay_s(100, now_ms + 400_000, now_ms) == 100


# --- what ------------------------------------------------------------------------------------------------------------


async def test_ledgers_on_given_bookies_are_marked_by_scope_with_progress(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        written = [(await write(client, 2, scope_id=scope_id)).ledger for scope_id in (0, 0, 7, 7, 8)]
        named = {each: {b.bookie_id for b in bookies_of(cluster, each)} for each in written}
        expected = {each: bookies & {"b1", "b2"} for each, bookies in named.items()}
        told = []

        def mark(**options):
            return list(mark_ledgers(cluster.cluster, ["b1", "b2"], progress=told.append, **options))

        tried = await asyncio.to_thread(mark, dry_run=True)
        assert {each.ledger: set(each.bookies) for each in tried} == expected
        assert all(each.changed for each in tried)
        assert marks(cluster) == {}
        of_seven = await asyncio.to_thread(mark, scope_id=7)
        assert [each.ledger for each in of_seven] == sorted(each for each in written if each.scope_id == 7)
        assert told[-1] == MarkProgress(2, 2, 2)
        every = await asyncio.to_thread(mark)
        assert [each.ledger for each in every if not each.changed] == [each.ledger for each in of_seven]
        assert told[-1] == MarkProgress(5, 5, 3)
        assert marks(cluster) == expected
        assert list(mark_ledgers(cluster.cluster, ["nobody"])) == []


@pytest.mark.parametrize("scoped", [False, True], ids=["scope 0", "scopes"])
async def test_an_audit_marks_its_scopes_for_every_bookie_that_is_gone(fake_cluster, scoped):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        written = [(await write(client, 2, scope_id=scope_id)).ledger for scope_id in (0, 0, 7, 8) for _ in range(3)]
        gone = cluster.bookies[:2]
        for bookie in gone:
            await lose(cluster, bookie)
        ids = {bookie.bookie_id for bookie in gone}
        counts = await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=scoped)
        expected = {}
        for ledger in written:
            lost = {each.bookie_id for each in bookies_of(cluster, ledger)} & ids
            if lost and ledger.is_scoped == scoped:
                expected[ledger] = lost
        assert marks(cluster) == expected
        assert counts == {each: sum(each in lost for lost in expected.values()) for each in ids}
        # Switched off before the first step: nothing.
        assert audit_bookies(cluster.cluster, scoped=scoped, goes_on=lambda: False).total() == 0


async def test_a_bookie_without_scopes_is_gone_for_the_scopes_alone(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        plain, scoped = await write(client, 2), await write(client, 2, scope_id=7)
        for bookie in cluster.bookies:
            cluster.register(bookie, scopes=bookie is not bookies_of(cluster, scoped.ledger)[0])
        for each in (False, True):
            await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=each)
        assert marks(cluster) == {scoped.ledger: {bookies_of(cluster, scoped.ledger)[0].bookie_id}}
        assert plain.ledger not in marks(cluster)


async def test_a_damaged_mark_keeps_no_other_ledger_from_being_marked(fake_cluster, caplog):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = sorted([(await write(client, 1, ensemble_size=4)).ledger for _ in range(3)])
        manager = manager_of(cluster)
        manager.prepare()
        cluster.cluster.store.put(mark_path(ledgers[0]), b"\xff no mark", NEW)
        await lose(cluster, cluster.bookies[0])
        counts = await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=False)
        assert counts == {"b0": 2}
        assert {each: manager.get(each).missing_replicas for each in ledgers[1:]} == dict.fromkeys(ledgers[1:], ("b0",))
        assert f"Ledger {ledgers[0]} cannot be marked" in caplog.text
        with pytest.raises(UsageError):
            list(mark_ledgers(cluster.cluster, ["no bookie"]))


async def test_the_auditor_marks_what_was_lost_before_it_began_and_while_it_runs(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledgers = [(await write(client, 3, ensemble_size=5)).ledger for _ in range(2)]
        await lose(cluster, cluster.bookies[0])
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: marks(cluster) == {each: {"b0"} for each in ledgers}, "lost before")
            await lose(cluster, cluster.bookies[1])
            await eventually(lambda: marks(cluster) == {each: {"b0", "b1"} for each in ledgers}, "lost meanwhile")


async def test_with_a_delay_the_auditor_waits_until_it_is_told_to_audit(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=5)).ledger
        manager = manager_of(cluster)
        manager.set_lost_bookie_recovery_delay_s(HOUR_S)
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            await lose(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed, "the delay runs")
            await come_back(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_delayed_bookie_audits_cancelled, "it came back")
            await lose(cluster, cluster.bookies[0])
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed == 2, "the delay runs again")
            assert marks(cluster) == {}
            manager.set_lost_bookie_recovery_delay_s(2 * HOUR_S)
            await eventually(lambda: auditor.stats.num_bookie_audits_delayed == 3, "and anew")
            assert marks(cluster) == {}
            manager.set_lost_bookie_recovery_delay_s(2 * HOUR_S)
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "audited as it was asked to")


async def test_two_lost_bookies_are_audited_in_spite_of_the_delay_and_one_when_it_is_over(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=5, scope_id=7)).ledger
        manager_of(cluster).set_lost_bookie_recovery_delay_s(HOUR_S)
        auditor = Auditor(client, CONFIG, scoped=True)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            for bookie in cluster.bookies[:2]:
                await lose(cluster, bookie)
            await eventually(lambda: marks(cluster) == {ledger: {"b0", "b1"}}, "both at once")
            manager_of(cluster).set_lost_bookie_recovery_delay_s(1)
            await lose(cluster, cluster.bookies[2])
            await eventually(lambda: marks(cluster) == {ledger: {"b0", "b1", "b2"}}, "after the delay")


async def test_while_auto_recovery_is_disabled_nothing_is_marked_and_then_all(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=4)).ledger
        manager = manager_of(cluster)
        auditor = Auditor(client, CONFIG, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.audit_count, "it looked once")
            manager.disable()
            await lose(cluster, cluster.bookies[0])
            await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=False, goes_on=manager.is_enabled)
            assert marks(cluster) == {}
            manager.enable()
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "once it is enabled")


async def test_an_audit_that_is_switched_off_in_the_middle_is_done_again(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 3, ensemble_size=4)).ledger
        auditor = Auditor(client, CONFIG, scoped=False)
        manager = manager_of(cluster)
        await lose(cluster, cluster.bookies[0])

        asked = []

        def is_enabled():
            asked.append(None)
            if len(asked) == 2:  # by the audit, before its first step
                manager.disable()
            return manager.is_enabled()

        auditor._manager = manager_of(cluster)
        auditor._manager.is_enabled = is_enabled
        async with running(auditor.run()):
            await eventually(lambda: len(asked) >= 2 and not manager.is_enabled(), "switched off")
            assert marks(cluster) == {}
            manager.enable()
            await eventually(lambda: marks(cluster) == {ledger: {"b0"}}, "done again")


async def test_the_check_of_all_ledgers_marks_what_lacks_entries_and_is_noted(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        whole, bad, scoped = [await write(client, 9, scope_id=scope_id) for scope_id in (0, 0, 7)]
        for ledger in (bad.ledger, scoped.ledger):
            del bookies_of(cluster, ledger)[0].ledgers[ledger]
        expected = {bookies_of(cluster, bad.ledger)[0].bookie_id}
        manager = manager_of(cluster)
        config = CONFIG.with_changes(auditor_periodic_check_interval=HOUR_S)
        auditor = Auditor(client, config, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: manager.check_ctime_ms(AuditorCheck.ALL_LEDGERS), "the check is over")
        assert marks(cluster) == {bad.ledger: expected}
        assert auditor.stats.num_ledgers_checked == 2
        assert manager.check_ctime_ms(AuditorCheck.ALL_LEDGERS, scoped=True) is None
        # Who begins again keeps to the schedule: the next check is an hour away.
        manager.unmark(bad.ledger)
        again = Auditor(client, config, scoped=False)
        async with running(again.run()):
            await eventually(lambda: again.stats.audit_count, "it looked for bookies")
            await again._step()
        assert marks(cluster) == {}
        assert again.stats.num_ledgers_checked == 0
        assert whole.ledger not in marks(cluster)
        of_scopes = Auditor(client, config, scoped=True)
        async with running(of_scopes.run()):
            await eventually(lambda: scoped.ledger in marks(cluster), "the scopes have their own schedule")


async def test_periodic_checks_are_skipped_while_a_lost_bookie_is_waited_for(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await write(client, 3, ensemble_size=4)
        manager = manager_of(cluster)
        manager.set_lost_bookie_recovery_delay_s(HOUR_S)
        await lose(cluster, cluster.bookies[0])
        cluster.cluster.store.put("cookies/b0", b"", None)
        config = CONFIG.with_changes(auditor_periodic_check_interval=HOUR_S)
        auditor = Auditor(client, config, scoped=False)
        async with running(auditor.run()):
            await eventually(lambda: auditor.stats.num_skipping_check_task_times == 2, "both are skipped")
        assert marks(cluster) == {}
        assert manager.check_ctime_ms(AuditorCheck.ALL_LEDGERS) is None


async def test_checks_count_entries_that_lack_replicas_and_old_marks_and_mark_nothing(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.replication.auditor.PART_COUNT", 2)

    async with fake_cluster(3) as cluster, cluster.client() as client:
        shape = {"write_quorum_size": 3, "ack_quorum_size": 2}
        ledgers = [(await write(client, 4, **shape)).ledger for _ in range(4)]
        for ledger, count in zip(ledgers, range(4), strict=True):
            for bookie in cluster.bookies[:count]:
                del bookie.ledgers[ledger].entries[2]
        old = LedgerId(0, 1 << 40)
        manager_of(cluster).mark(old, ["b0"], now_ms=1)
        config = CONFIG.with_changes(underreplicated_ledger_recovery_grace_period=60)
        auditor = Auditor(client, config, scoped=False)
        await auditor.check_replicas()
        await auditor.check_placement_policy()
        stats = auditor.stats
        assert (
            stats.num_ledgers_having_less_than_wq_replicas_of_an_entry,
            stats.num_ledgers_having_less_than_aq_replicas_of_an_entry,
            stats.num_ledgers_having_no_replica_of_an_entry,
            stats.num_underreplicated_ledgers_elapsed_recovery_grace_period,
            stats.num_ledgers_not_adhering_to_placement_policy,
        ) == (1, 1, 1, 1, 0)
        assert set(marks(cluster)) == {old}
        manager = manager_of(cluster)
        assert manager.check_ctime_ms(AuditorCheck.REPLICAS) is not None
        assert manager.check_ctime_ms(AuditorCheck.PLACEMENT_POLICY) is not None


def test_replicas_in_one_rack_are_counted_where_racks_are_known(fake_cluster, run):
    class Racks:
        def __init__(self, racks):
            self._racks = racks

        def racks(self, bookies):
            return self._racks

    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client() as client:
            for _ in range(2):
                await write(client, 4)
            for racks, count in (
                ({"b0": "/a", "b1": "/a", "b2": "/b"}, 2),
                ({"b0": "/a", "b1": "/c", "b2": "/b"}, 0),
                ({}, 0),
            ):
                auditor = Auditor(client, CONFIG, scoped=False, topology=Racks(racks))
                await auditor.check_placement_policy()
                assert auditor.stats.num_ledgers_not_adhering_to_placement_policy == count

    run(scenario())


# --- who -------------------------------------------------------------------------------------------------------------


class Candidate:
    """An elector with a store session of its own."""

    def __init__(self, uri, name, *, scoped=False):
        self.cluster = open_cluster(uri)
        self.terms = 0
        self.ended = 0
        self.elector = AuditorElector(
            LedgerUnderreplicationManager(self.cluster.store), name, self._audit, scoped=scoped, back_off_s=0.05
        )

    async def _audit(self):
        self.terms += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.ended += 1


async def test_one_is_elected_and_the_next_one_when_it_goes(fake_cluster):
    async with fake_cluster(0) as cluster, contextlib.AsyncExitStack() as stack:
        uri = cluster.cluster.uri
        first, second, scoped = Candidate(uri, "a:1"), Candidate(uri, "b:2"), Candidate(uri, "b:2", scoped=True)
        manager = manager_of(cluster)
        leading = asyncio.ensure_future(first.elector.run())
        await eventually(lambda: first.elector.elected, "the first one is elected")
        await stack.enter_async_context(running(second.elector.run()))
        await stack.enter_async_context(running(scoped.elector.run()))
        await eventually(lambda: scoped.elector.elected, "elections of scopes are their own")
        await eventually(lambda: manager.votes() == ("a:1", "b:2"), "both votes are cast")
        assert (second.elector.elected, second.terms) == (False, 0)
        leading.cancel()
        await asyncio.wait([leading])
        await eventually(lambda: second.elector.elected, "the second one follows")
        assert (manager.votes(), first.ended, first.elector.elected) == (("b:2",), 1, False)
        assert cluster.cluster.store.get("underreplication/auditorelection").value == b'bookieId: "b:2"\n'
        for each in (first, second, scoped):
            stack.callback(each.cluster.close)


async def test_who_loses_the_vote_stops_auditing_and_votes_again(fake_cluster):
    async with fake_cluster(0) as cluster:
        first, second = (Candidate(cluster.cluster.uri, name) for name in ("a:1", "b:2"))
        manager = manager_of(cluster)
        async with running(first.elector.run()), running(second.elector.run()):
            await eventually(lambda: len(manager.votes()) == 2, "both votes are cast")
            await eventually(lambda: first.elector.elected or second.elector.elected, "one is elected")
            loser, winner = (first, second) if first.elector.elected else (second, first)
            cluster.cluster.store.delete(manager.vote_paths()[0])  # as the end of a session does
            await eventually(lambda: winner.elector.elected and loser.ended == 1, "the other one takes over")
            await eventually(lambda: len(manager.votes()) == 2, "it votes again, and waits")
            assert (loser.elector.elected, loser.terms, winner.terms) == (False, 1, 1)
        first.cluster.close()
        second.cluster.close()
        assert manager.votes() == ()


async def test_a_vote_that_vanishes_while_it_waits_is_cast_again(fake_cluster):
    async with fake_cluster(0) as cluster:
        manager = manager_of(cluster)
        other = manager.vote("apache:1")
        candidate = Candidate(cluster.cluster.uri, "b:2")
        async with running(candidate.elector.run()):
            await eventually(lambda: len(manager.votes()) == 2, "its vote is cast")
            cluster.cluster.store.delete(manager.vote_paths()[1])
            await eventually(lambda: candidate.elector.attempt_count == 2, "it votes again")
            other.release()
            await eventually(lambda: candidate.elector.elected, "and is elected")
        candidate.cluster.close()
