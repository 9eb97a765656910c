"""A replication worker on marked ledgers: replicates, waits, fences, gives up, leaves alone."""

from __future__ import annotations

import asyncio
import threading

import pytest
from replication.recovering import CONFIG, bookies_of, come_back, eventually, lose, running, state_of, write
from support.waiting import LIMIT_S

from bkctl.client.placement import PlacementRules
from bkctl.config import BookieConfig
from bkctl.errors import Conflict, LedgerFenced, Unreachable
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.underreplication import LedgerLocks, LedgerMarks, ReplicationFailures, mark_path
from bkctl.protocol.messages import AddRequest, ReadRequest, Status
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.worker import LedgerOutcome, ReplicationWorker, retry_delay_ms

NEVER_MS = 3_600_000


async def is_whole(client, ledger):
    check = await LedgerChecker(client).check(ledger, every_entry=True)
    return check.fragments == () and check.problem is None


async def lost_ledger(cluster, client, count=20, **options):
    """A ledger one of whose bookies is lost, and marked for it; the ledger and the bookie."""
    writer = await write(client, count, **options)
    lost = bookies_of(cluster, writer.ledger)[0]
    await lose(cluster, lost)
    state_of(cluster).marks.add(writer.ledger, [lost.bookie_id])
    return writer.ledger, lost


def test_delays_of_retries_double_up_to_the_grace_period():
    assert [retry_delay_ms(300_000, count) for count in range(7)] == [
        9375, 18_750, 37_500, 75_000, 150_000, 300_000, 300_000,
    ]  # fmt: skip
    assert retry_delay_ms(0, 3) == 0


@pytest.mark.parametrize("scopes", [(False,), (True,), (False, True)], ids=["scope 0", "scopes", "both"])
async def test_marked_ledgers_of_its_scopes_are_replicated_and_unmarked(fake_cluster, scopes):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = [(await write(client, 20, scope_id=scope_id)).ledger for scope_id in (0, 0, 7, 7, 1 << 63)]
        mine = [ledger for ledger in ledgers if ledger.is_scoped in scopes]
        lost = bookies_of(cluster, mine[0])[0]
        await lose(cluster, lost)
        for ledger in ledgers:
            state_of(cluster).marks.add(ledger, [lost.bookie_id])
        worker = ReplicationWorker(client, CONFIG, "worker", scopes=scopes)
        async with running(worker.run()):
            state = state_of(cluster)
            await eventually(lambda: not any(state.marks.get(each) for each in mine), "all are unmarked")
            await eventually(lambda: not list(state.locks.list()), "no lock is left")
        for ledger in mine:
            assert await is_whole(client, ledger)
        assert {each for each, _ in state.marks.list(None)} == set(ledgers) - set(mine)
        assert worker.stats.num_entries_written > 0


async def test_marks_are_read_in_batches_to_the_last(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.replication.worker.STEP_COUNT", 2)

    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = [(await write(client, 1, scope_id=scope)).ledger for scope in (0, 7) for _ in range(5)]
        marks = LedgerMarks(cluster.cluster.store)
        for ledger in ledgers:
            marks.add(ledger, ["b0"])
        with open_cluster(cluster.cluster.uri) as other:
            # All of one step is somebody else's.
            others = sorted(ledgers)[:2]
            LedgerLocks(other.store).lock_many(others, "another")
            await ReplicationWorker(client, CONFIG, "worker").work_once()
            assert [ledger for ledger, _ in marks.list(None)] == others


async def test_locked_and_unmarked_ledgers_are_left_alone(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        worker = ReplicationWorker(client, CONFIG, "worker")
        with open_cluster(cluster.cluster.uri) as other:
            LedgerLocks(other.store).lock(ledger, "another")
            assert await worker.replicate(ledger) is LedgerOutcome.SKIPPED
            await worker.work_once()
            assert not await is_whole(client, ledger)
        assert await worker.replicate(LedgerId(0, 12345)) is LedgerOutcome.SKIPPED
        assert list(state_of(cluster).locks.list()) == []
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert await is_whole(client, ledger)


async def test_worker_pauses_while_auto_recovery_is_disabled(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        state = state_of(cluster)
        state.settings.disable()
        worker = ReplicationWorker(client, CONFIG, "worker")
        await worker.work_once()
        assert state.marks.get(ledger) is not None
        async with running(worker.run()):
            state.settings.enable()
            await eventually(lambda: state.marks.get(ledger) is None, "replicated once enabled")


async def test_deleted_and_healthy_ledgers_are_unmarked(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        whole, deleted = await write(client, 5), await write(client, 5, scope_id=7)
        marks = LedgerMarks(cluster.cluster.store)
        for writer in (whole, deleted):
            marks.add(writer.ledger, ["b0"])
        before = cluster.cluster.ledgers.read(whole.ledger)
        await client.delete_ledger(deleted.ledger_id, ledger_scope_id=7)
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert [await worker.replicate(each.ledger) for each in (whole, deleted)] == [LedgerOutcome.DONE] * 2
        assert list(marks.list(None)) == []
        assert cluster.cluster.ledgers.read(whole.ledger) == before


async def test_new_mark_is_kept(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        state = state_of(cluster)

        class Checker(LedgerChecker):
            async def check(self, *arguments, **options):
                found = await super().check(*arguments, **options)
                if not found.fragments:
                    state.marks.add(ledger, ["b-again"])
                return found

        monkeypatch.setattr("bkctl.replication.replicator.LedgerChecker", Checker)
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        mark = state.marks.get(ledger)
        assert mark is not None
        assert "b-again" in mark.missing_replicas
        assert list(state.locks.list()) == []


async def test_worker_without_lock_swaps_and_unmarks_nothing(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        marks = LedgerMarks(cluster.cluster.store)
        before = cluster.cluster.ledgers.read(ledger)
        others = []

        def lose_lock(request):
            # The session ends while entries are copied, and another worker takes the ledger.
            if isinstance(request, AddRequest) and not others:
                path = f"underreplication/locks/urL{ledger.ledger_id:010d}"
                cluster.cluster.store.delete(path)
                others.append(open_cluster(cluster.cluster.uri))
                others.append(LedgerLocks(others[0].store).lock(ledger, "another"))

        for bookie in cluster.bookies:
            bookie.fault = lose_lock
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.FAILED
        assert cluster.cluster.ledgers.read(ledger) == before
        assert marks.get(ledger) is not None
        assert others[1].is_held()
        others[0].close()
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert await is_whole(client, ledger)


async def test_lock_lost_before_unmarking_keeps_mark(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        marks = LedgerMarks(cluster.cluster.store)

        class Checker(LedgerChecker):
            async def check(self, *arguments, **options):
                found = await super().check(*arguments, **options)
                if not found.fragments:
                    cluster.cluster.store.delete(f"underreplication/locks/urL{ledger.ledger_id:010d}")
                return found

        monkeypatch.setattr("bkctl.replication.replicator.LedgerChecker", Checker)
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.FAILED
        assert marks.get(ledger) is not None


async def test_cancelled_attempt_leaves_no_lock(fake_cluster, monkeypatch):
    """An error of one ledger cancels the attempts at the others, whose locks may be on their way."""
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        is_taken, may_return = threading.Event(), threading.Event()
        lock = LedgerLocks.lock

        def lock_slowly(*arguments):
            claim = lock(*arguments)
            is_taken.set()
            may_return.wait(LIMIT_S)
            return claim

        monkeypatch.setattr(LedgerLocks, "lock", lock_slowly)
        worker = ReplicationWorker(client, CONFIG, "worker")
        attempt = asyncio.ensure_future(worker.replicate(ledger))
        await asyncio.to_thread(is_taken.wait, LIMIT_S)
        attempt.cancel()
        may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert list(state_of(cluster).locks.list()) == []
        assert await worker.replicate(ledger) is LedgerOutcome.DONE


async def test_worker_stops_while_the_store_is_away(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await lost_ledger(cluster, client)
        is_busy, never = asyncio.Event(), asyncio.Event()

        async def copy_for_hours(*_):
            is_busy.set()
            await never.wait()

        def unlock(*_):
            raise Unreachable("The store is away")

        monkeypatch.setattr(ReplicationWorker, "_replicate_locked", copy_for_hours)
        monkeypatch.setattr(LedgerLocks, "unlock", unlock)
        working = asyncio.ensure_future(ReplicationWorker(client, CONFIG, "worker").run())
        await is_busy.wait()
        working.cancel()
        await asyncio.wait([working], timeout=LIMIT_S)
        monkeypatch.undo()
        assert working.cancelled()


async def test_lock_that_the_store_kept_is_released_later(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        unlock, is_away = LedgerLocks.unlock, True

        def unlock_later(*arguments):
            if is_away:
                raise Unreachable("The store is away")
            unlock(*arguments)

        monkeypatch.setattr(LedgerLocks, "unlock", unlock_later)
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        state = state_of(cluster)
        assert [lock.ledger for lock in state.locks.list()] == [ledger]
        is_away = False
        await eventually(lambda: not list(state.locks.list()), "unlocked once the store is back")
        await eventually(lambda: not worker._deferred, "and free for another attempt")


@pytest.mark.parametrize("where", ["replicating", "fencing"])
async def test_unexpected_error_of_one_ledger_leaves_the_others_replicated_and_no_lock(
    fake_cluster, monkeypatch, caplog, where
):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        odd = await write(client, 5, close=where == "replicating")
        sound = await write(client, 5)
        await lose(cluster, bookies_of(cluster, odd.ledger)[0])
        state = state_of(cluster)
        check = LedgerChecker.check

        async def check_oddly(self, ledger, *arguments, **options):
            # The ledger that is to be fenced is checked for the second time then.
            seen.append(ledger)
            if ledger == odd.ledger and (where == "replicating" or seen.count(ledger) > 1):
                raise KeyError("odd")
            return await check(self, ledger, *arguments, **options)

        seen = []
        monkeypatch.setattr(LedgerChecker, "check", check_oddly)
        for each in (odd.ledger, sound.ledger):
            state.marks.add(each, ["b-lost"])
        worker = ReplicationWorker(client, CONFIG, "worker")
        async with running(worker.run()):
            await eventually(lambda: state.marks.get(sound.ledger) is None, "the other ledger is replicated")
            await eventually(lambda: "could not be replicated: 'odd'" in caplog.text, "the error is logged")
            await eventually(lambda: seen.count(odd.ledger) > 2, "the ledger was unlocked, and is tried again")
        assert "Traceback" in caplog.text
        assert state.marks.get(odd.ledger) is not None


async def test_deferred_ledger_is_not_retried_after_losing_lock(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        later = CONFIG.with_changes(lock_release_of_failed_ledger_grace_period=NEVER_MS)
        worker = ReplicationWorker(client, later, "worker")
        async with running(worker.run()):
            await eventually(lambda: worker._deferred, "it failed")
            cluster.cluster.store.delete(f"underreplication/locks/urL{ledger.ledger_id:010d}")
            assert await worker.replicate(ledger) is LedgerOutcome.SKIPPED
            assert list(state_of(cluster).locks.list()) == []


async def test_too_few_bookies_defer_and_retry_ledger(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        state = state_of(cluster)
        later = CONFIG.with_changes(lock_release_of_failed_ledger_grace_period=NEVER_MS)
        worker = ReplicationWorker(client, later, "worker")
        async with running(worker.run()):
            await eventually(lambda: worker.stats.num_defer_ledger_lock_release_of_failed_ledger, "it failed")
            assert [lock.ledger for lock in state.locks.list()] == [ledger]
            assert state.marks.get(ledger) is not None
        cluster.cluster.store.delete(f"underreplication/locks/urL{ledger.ledger_id:010d}")
        worker = ReplicationWorker(client, CONFIG, "worker")
        async with running(worker.run()):
            await eventually(lambda: worker.stats.num_defer_ledger_lock_release_of_failed_ledger > 1, "tried again")
            await cluster.add_bookie()
            await eventually(lambda: state.marks.get(ledger) is None, "replicated once there is a bookie")
            await eventually(lambda: not list(state.locks.list()), "and unlocked")
        assert await is_whole(client, ledger)


async def test_unreadable_entries_keep_mark_without_copying(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledger, lost = await lost_ledger(cluster, client, count=12)
        holders = bookies_of(cluster, ledger)
        other = (
            next(each for each in holders if each is not lost and 5 in each.ledgers[ledger].entries)
            if 5 in lost.ledgers[ledger].entries
            else None
        )
        entry_id = 5 if other is not None else 6
        other = other or next(each for each in holders if each is not lost and entry_id in each.ledgers[ledger].entries)
        assert entry_id in lost.ledgers[ledger].entries
        kept = other.ledgers[ledger].entries.pop(entry_id)
        marks = LedgerMarks(cluster.cluster.store)
        worker = ReplicationWorker(client, CONFIG, "worker")
        added = []
        for bookie in cluster.bookies:
            bookie.fault = lambda request: added.append(request) if isinstance(request, AddRequest) else None
        async with running(worker.run()):
            await eventually(lambda: worker.stats.num_entries_unable_to_read_for_replication, "one is unreadable")
            await eventually(lambda: worker.stats.num_defer_ledger_lock_release_of_failed_ledger > 1, "tried again")
            copied = len(added)
            tries = worker.stats.num_defer_ledger_lock_release_of_failed_ledger
            await eventually(
                lambda: worker.stats.num_defer_ledger_lock_release_of_failed_ledger > tries + 2, "and again"
            )
            assert len(added) == copied
            assert marks.get(ledger) is not None
            other.ledgers[ledger].entries[entry_id] = kept
            await eventually(lambda: marks.get(ledger) is None, "replicated once it can be read")
        assert await is_whole(client, ledger)


async def test_open_ledger_is_fenced_after_grace_period(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 10, scope_id=7, close=False)
        lost = bookies_of(cluster, writer.ledger)[0]
        await lose(cluster, lost)
        state = state_of(cluster)
        state.marks.add(writer.ledger, [lost.bookie_id])
        patient = CONFIG.with_changes(open_ledger_rereplication_grace_period=NEVER_MS)
        worker = ReplicationWorker(client, patient, "patient")
        async with running(worker.run()):
            await eventually(lambda: worker._deferred, "it waits for the writer")
            assert [lock.ledger for lock in state.locks.list()] == [writer.ledger]
            assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
        with pytest.raises(Conflict):
            state_of(cluster).locks.lock(writer.ledger, "other")
        cluster.cluster.store.delete(next(iter(cluster_locks(cluster))))
        worker = ReplicationWorker(client, CONFIG, "impatient")
        async with running(worker.run()):
            await eventually(lambda: state.marks.get(writer.ledger) is None, "fenced and replicated")
        assert cluster.metadata(writer.ledger).is_closed
        assert cluster.metadata(writer.ledger).last_entry_id == 9
        assert await is_whole(client, writer.ledger)
        with pytest.raises(LedgerFenced):
            await writer.add(b"too late")


async def test_failed_fence_is_published(fake_cluster, caplog):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 10, scope_id=7, close=False)
        for bookie in bookies_of(cluster, writer.ledger)[:2]:
            await lose(cluster, bookie)
            state_of(cluster).marks.add(writer.ledger, [bookie.bookie_id])
        failures = ReplicationFailures(cluster.cluster.store)

        def reason():
            failure = failures.get(writer.ledger)
            return "" if failure is None else failure.reason

        async with running(ReplicationWorker(client, CONFIG, "worker").run()):
            await eventually(lambda: "cannot be recovered" in reason(), "it says why it is not closed")
        assert "fencing and closing it" in caplog.text
        assert cluster.metadata(writer.ledger).state is not LedgerState.CLOSED


def cluster_locks(cluster):
    for place in ("underreplication/locks", "underreplication/scopes/locks"):
        for name in cluster.cluster.store.children(place) or ():
            yield f"{place}/{name}"


async def test_writer_that_replaced_the_bookie_is_not_fenced(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 10, close=False)
        lost = bookies_of(cluster, writer.ledger)[0]
        await lose(cluster, lost)
        for _ in range(6):
            await writer.add(b"more")
        marks = LedgerMarks(cluster.cluster.store)
        marks.add(writer.ledger, [lost.bookie_id])
        worker = ReplicationWorker(client, CONFIG, "worker")
        async with running(worker.run()):
            await eventually(lambda: marks.get(writer.ledger) is None, "its first fragment is replicated")
        assert not cluster.metadata(writer.ledger).is_closed
        assert await writer.add(b"still") == 16
        await writer.close()
        assert await is_whole(client, writer.ledger)


async def test_next_worker_finishes_after_crash(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client, count=30)
        copying = asyncio.Event()

        def stall(request):
            if isinstance(request, AddRequest) and request.entry_id > 10:
                copying.set()
                return True
            return False

        for bookie in cluster.bookies:
            bookie.hold = stall
        dead = open_cluster(cluster.cluster.uri)
        async with cluster.client() as dead_client:
            dead_client.cluster = dead
            async with running(ReplicationWorker(dead_client, CONFIG, "dies").run()):
                await asyncio.wait_for(copying.wait(), LIMIT_S)
        dead.close()
        for bookie in cluster.bookies:
            bookie.hold = lambda request: False
        async with running(ReplicationWorker(client, CONFIG, "next").run()):
            await eventually(lambda: state_of(cluster).marks.get(ledger) is None, "the next one finishes")
        assert await is_whole(client, ledger)


async def test_damaged_mark_is_skipped(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, _ = await lost_ledger(cluster, client)
        cluster.cluster.store.put(mark_path(LedgerId(0, 77)), b"\xff", None)
        worker = ReplicationWorker(client, CONFIG, "worker")
        await worker.work_once()
        marks = LedgerMarks(cluster.cluster.store)
        assert marks.get(ledger) is None
        assert [each for each, _ in marks.list(None)] == [LedgerId(0, 77)]


async def test_returned_bookie_needs_no_copies(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger, lost = await lost_ledger(cluster, client)
        await come_back(cluster, lost)
        added = []
        for bookie in cluster.bookies:
            bookie.fault = lambda request: added.append(request) if isinstance(request, AddRequest) else None
        worker = ReplicationWorker(client, CONFIG, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert added == []
        assert state_of(cluster).marks.get(ledger) is None


async def test_ledger_with_unknown_end_stays_marked(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 4, close=False)
        marks = LedgerMarks(cluster.cluster.store)
        marks.add(writer.ledger, ["b0"])
        for bookie in cluster.bookies:
            bookie.fault = lambda request: Status.EIO if not isinstance(request, (AddRequest, ReadRequest)) else None
        later = CONFIG.with_changes(lock_release_of_failed_ledger_grace_period=NEVER_MS)
        worker = ReplicationWorker(client, later, "worker")
        async with running(worker.run()):
            await eventually(lambda: worker.stats.num_defer_ledger_lock_release_of_failed_ledger, "it is put off")
            assert marks.get(writer.ledger) is not None


MENDING = CONFIG.with_changes(repaired_placement_policy_not_adhering_bookie_enabled=True)


async def misplaced_ledger(cluster, client, **options):
    """A marked ledger on two of b0, b1 and b2, which are in one rack; b3 and b4, which join now, are in another."""
    ledger = (await write(client, 30, ensemble_size=2, **options)).ledger
    BookieRacks(cluster.cluster).set(["b0", "b1", "b2"], "/r1")
    for _ in range(2):
        await cluster.add_bookie()
    BookieRacks(cluster.cluster).set(["b3", "b4"], "/r2")
    state_of(cluster).marks.add(ledger, ())
    return ledger


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_worker_moves_replicas_to_other_racks_where_that_is_enabled(fake_cluster, monkeypatch, scope_id):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger = await misplaced_ledger(cluster, client, scope_id=scope_id)
        before = cluster.metadata(ledger)
        assert await ReplicationWorker(client, CONFIG, "worker").replicate(ledger) is LedgerOutcome.DONE
        assert cluster.metadata(ledger) == before
        state_of(cluster).marks.add(ledger, ())
        worker = ReplicationWorker(client, MENDING, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert worker.stats.num_not_adhering_placement_ledgers_replicated == 1
        assert state_of(cluster).marks.get(ledger) is None
        after = cluster.metadata(ledger)
        assert len(set(after.ensembles[0].bookies) & {"b3", "b4"}) == 1
        assert await is_whole(client, ledger)


async def test_bookies_of_an_ensemble_change_places_where_no_others_are_left(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 30, ensemble_size=4)).ledger
        before = cluster.metadata(ledger).ensembles[0].bookies
        BookieRacks(cluster.cluster).set(before[:2], "/r1")
        BookieRacks(cluster.cluster).set(before[2:], "/r2")
        state_of(cluster).marks.add(ledger, ())
        assert await ReplicationWorker(client, MENDING, "worker").replicate(ledger) is LedgerOutcome.DONE
        after = cluster.metadata(ledger).ensembles[0].bookies
        assert sorted(after) == sorted(before)
        racks = ["/r1" if name in before[:2] else "/r2" for name in after]
        assert racks in (["/r1", "/r2"] * 2, ["/r2", "/r1"] * 2)
        assert sum(old != new for old, new in zip(before, after, strict=True)) == 2
        assert await is_whole(client, ledger)


async def test_ledgers_that_no_bookie_can_mend_are_unmarked_unchanged(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger = (await write(client, 5)).ledger
        BookieRacks(cluster.cluster).set(["b0", "b1", "b2"], "/r1")
        state_of(cluster).marks.add(ledger, ())
        before = cluster.metadata(ledger)
        worker = ReplicationWorker(client, MENDING, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert state_of(cluster).marks.get(ledger) is None
        assert cluster.metadata(ledger) == before
        assert worker.stats.num_not_adhering_placement_ledgers_replicated == 0


async def test_failed_move_to_another_rack_keeps_the_mark(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", -1)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger = await misplaced_ledger(cluster, client)
        for name in ("b3", "b4"):
            cluster.bookie(name).fault = lambda request: Status.EIO if isinstance(request, AddRequest) else None
        worker = ReplicationWorker(client, MENDING, "worker")
        assert await worker.replicate(ledger) is LedgerOutcome.LATER
        assert state_of(cluster).marks.get(ledger) is not None
        for name in ("b3", "b4"):
            cluster.bookie(name).fault = lambda request: None
        async with running(worker.run()):
            await eventually(lambda: state_of(cluster).marks.get(ledger) is None, "moved once the bookies work")
        assert set(cluster.metadata(ledger).ensembles[0].bookies) & {"b3", "b4"}
        assert await is_whole(client, ledger)


def test_rules_of_racks_come_from_the_bookies_configuration(tmp_path):
    conf = tmp_path / "bk_server.conf"
    assert PlacementRules.of(CONFIG) == PlacementRules()
    conf.write_text(
        "minNumRacksPerWriteQuorum=3\nenforceMinNumRacksPerWriteQuorum=true\nnetworkTopologyScriptFileName=/racks\n"
        "repairedPlacementPolicyNotAdheringBookieEnabled=true\n"
    )
    config = BookieConfig.load(conf)
    assert PlacementRules.of(config) == PlacementRules(3, is_enforced=True)
    assert config.network_topology_script_file_name == "/racks"
    assert config.repaired_placement_policy_not_adhering_bookie_enabled


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_every_entry_of_a_suspect_is_verified(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger = (await write(client, 9, scope_id=scope_id)).ledger
        suspect = bookies_of(cluster, ledger)[0]
        entries = suspect.ledgers[ledger].entries
        held = sorted(entries)
        middle = held[len(held) // 2]
        assert middle not in (held[0], held[-1])
        entries[middle] = entries[middle][:-1] + bytes([entries[middle][-1] ^ 1])
        worker, state = ReplicationWorker(client, CONFIG, "worker"), state_of(cluster)
        state.marks.add(ledger, [suspect.bookie_id])
        assert state.marks.add(ledger, [suspect.bookie_id], suspect=True)
        assert not state.marks.add(ledger, [suspect.bookie_id], suspect=True)
        assert state.marks.get(ledger).missing_replicas == (suspect.bookie_id,)
        assert not await is_whole(client, ledger)
        assert await worker.replicate(ledger) is LedgerOutcome.DONE
        assert await is_whole(client, ledger)
