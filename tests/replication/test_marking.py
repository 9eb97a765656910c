"""Marks of ledgers on lost bookies."""

from __future__ import annotations

import asyncio
import math

import pytest
from replication.recovering import bookies_of, lose, marks, write

from bkctl.errors import UsageError
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks, UnderreplicationLayout, mark_path
from bkctl.replication.marking import LostBookies, audit_bookies, mark_ledgers


async def test_mark_ledgers_marks_by_scope(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        written = [(await write(client, 2, scope_id=scope_id)).ledger for scope_id in (0, 0, 7, 7, 8)]
        named = {each: {b.bookie_id for b in bookies_of(cluster, each)} for each in written}
        expected = {each: bookies & {"b1", "b2"} for each, bookies in named.items()}

        def mark(**options):
            return list(mark_ledgers(cluster.cluster, ["b1", "b2"], **options))

        of_seven = await asyncio.to_thread(mark, scope_id=7)
        assert [each.ledger for each in of_seven] == sorted(each for each in written if each.scope_id == 7)
        every = await asyncio.to_thread(mark)
        assert {each.ledger: set(each.bookies) for each in every} == expected
        assert marks(cluster) == expected
        assert list(mark_ledgers(cluster.cluster, ["nobody"])) == []


@pytest.mark.parametrize("scoped", [False, True], ids=["scope 0", "scopes"])
async def test_audit_marks_ledgers_of_lost_bookies_in_its_scopes(fake_cluster, scoped):
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
        assert audit_bookies(cluster.cluster, scoped=scoped, may_continue=lambda: False).total() == 0


async def test_bookie_without_scopes_is_lost_for_scoped_ledgers_only(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        plain, scoped = await write(client, 2), await write(client, 2, scope_id=7)
        for bookie in cluster.bookies:
            cluster.register(bookie, scopes=bookie is not bookies_of(cluster, scoped.ledger)[0])
        for each in (False, True):
            await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=each)
        assert marks(cluster) == {scoped.ledger: {bookies_of(cluster, scoped.ledger)[0].bookie_id}}
        assert plain.ledger not in marks(cluster)


async def test_audit_continues_after_damaged_mark(fake_cluster, caplog):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = sorted([(await write(client, 1, ensemble_size=4)).ledger for _ in range(3)])
        UnderreplicationLayout(cluster.cluster.store).prepare()
        cluster.cluster.store.put(mark_path(ledgers[0]), b"\xff no mark", NEW)
        await lose(cluster, cluster.bookies[0])
        counts = await asyncio.to_thread(audit_bookies, cluster.cluster, scoped=False)
        assert counts == {"b0": 2}
        get = LedgerMarks(cluster.cluster.store).get
        assert {each: get(each).missing_replicas for each in ledgers[1:]} == dict.fromkeys(ledgers[1:], ("b0",))
        assert f"Ledger {ledgers[0]} cannot be marked" in caplog.text
        with pytest.raises(UsageError):
            list(mark_ledgers(cluster.cluster, ["no bookie"]))


def test_loss_without_delay_is_audited_at_once():
    lost = LostBookies({"a", "b", "c"}, 0)
    assert not lost.bookies_changed({"a", "b", "c"}, 0, 10)
    assert lost.bookies_changed({"a", "b"}, 0, 10)
    assert not lost.bookies_changed({"a", "b"}, 0, 10)
    assert not lost.bookies_changed({"a", "b", "d"}, 0, 10)
    assert lost.bookies_changed({"a"}, 0, 10)
    assert (lost.waiting, lost.due_s) == (set(), math.inf)


def test_returning_bookie_cancels_delayed_audit():
    lost = LostBookies({"a", "b", "c"}, 60)
    assert not lost.bookies_changed({"a", "b"}, 60, 10)
    assert lost.due_s == 70
    assert not lost.bookies_changed({"a", "b"}, 60, 20)
    assert (lost.waiting, lost.due_s) == ({"c"}, 70)
    assert not lost.bookies_changed({"a", "b", "c"}, 60, 30)
    assert (lost.waiting, lost.due_s, lost.delayed_count, lost.cancelled_count) == (set(), math.inf, 1, 1)
    assert not lost.bookies_changed({"a", "b"}, 60, 40)
    assert not lost.is_due(99)
    assert lost.is_due(100)
    assert (lost.waiting, lost.due_s) == (set(), math.inf)
    assert not lost.bookies_changed({"a", "b"}, 60, 100)
    assert not lost.is_due(200)


def test_several_lost_bookies_are_audited_despite_delay():
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert lost.bookies_changed({"a", "b"}, 60, 10)
    lost = LostBookies({"a", "b", "c", "d"}, 60)
    assert not lost.bookies_changed({"a", "b", "c"}, 60, 10)
    assert lost.bookies_changed({"a", "b"}, 60, 20)
    assert (lost.waiting, lost.due_s) == (set(), math.inf)
    # One returns in the moment in which another one goes.
    lost = LostBookies({"a", "b", "c"}, 60)
    assert not lost.bookies_changed({"a", "b"}, 60, 10)
    assert not lost.bookies_changed({"a", "c"}, 60, 20)
    assert (lost.waiting, lost.due_s) == ({"b"}, 80)


def test_same_or_zero_delay_audits_now_and_new_delay_restarts():
    lost = LostBookies({"a", "b"}, 60)
    assert lost.delay_written(60, 10)
    assert not lost.delay_written(120, 10)
    assert lost.due_s == math.inf
    assert not lost.bookies_changed({"a"}, 120, 10)
    assert not lost.delay_written(30, 20)
    assert (lost.waiting, lost.due_s, lost.delayed_count, lost.cancelled_count) == ({"b"}, 50, 2, 1)
    assert lost.delay_written(0, 30)
    assert (lost.waiting, lost.due_s) == (set(), math.inf)
    assert not lost.bookies_changed({"a"}, 0, 40)
