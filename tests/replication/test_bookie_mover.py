"""Moving what bookies hold: everything that can be, in every scope, and what cannot be with its entries and why."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from client.fakes import Fault
from support.waiting import LIMIT_S

from bkctl.errors import Conflict, LedgerNotFound
from bkctl.formats.metadata import BookieServiceInfo, Cookie, Fragment, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerLocks, LedgerMarks, lock_path
from bkctl.pace import Pace
from bkctl.protocol.messages import AddRequest, ListEntriesRequest, ReadRequest
from bkctl.replication import bookie_mover
from bkctl.replication.bookie_mover import BookieMover
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.departure import Decommission, StepResult
from bkctl.replication.fragments import EntrySpan, spans_text
from bkctl.replication.holdings import LedgerMove, MoveOutcome, PlannedFragment, plan_move
from bkctl.replication.resume import ResumeFile

from .recovering import write

SCOPES = (0, 7, (1 << 64) - 1)


def lose(cluster, *names):
    """Bookies that are gone at once."""

    async def stop():
        for name in names:
            await cluster.bookie(name).stop()
            cluster.unregister(cluster.bookie(name))

    return stop()


def plan(cluster, *names, ids=None):
    return plan_move(cluster.cluster, names, ids)


async def move(cluster, client, *names, ids=None, resume=None, **options):
    """Move everything; the rows by ledger."""
    found = plan(cluster, *names, ids=ids)
    mover = BookieMover(client, names, found, **options)
    return {each.ledger: each async for each in mover.move(found.ledgers, resume=resume)}, mover


async def is_whole(client, ledger):
    check = await LedgerChecker(client).check(ledger, every_entry=True)
    return check.fragments == () and check.problem is None


def named(cluster, ledger):
    return {bookie for fragment in cluster.metadata(ledger).ensembles for bookie in fragment.bookies}


async def test_move_empties_lost_bookie_in_every_scope(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        ledgers = [(await write(client, count, scope_id=scope)).ledger for scope in SCOPES for count in (0, 1, 40)]
        ledgers += [
            (await write(client, 40, ensemble_size=2)).ledger,
            (await write(client, 40, write_quorum_size=3, ack_quorum_size=3, scope_id=7)).ledger,
        ]
        await lose(cluster, "b0")
        on_it = {each for each in ledgers if "b0" in named(cluster, each)}
        found = plan(cluster, "b0")
        assert set(found.ledgers) == on_it
        assert list(found.ledgers) == sorted(found.ledgers)
        assert (len(found.crowded), found.damaged, found.open_count) == (0, {}, 0)
        moved, mover = await move(cluster, client, "b0")
        assert {each.outcome for each in moved.values()} == {MoveOutcome.MOVED}
        assert set(moved) == on_it
        for ledger in ledgers:
            assert "b0" not in named(cluster, ledger)
            assert await is_whole(client, ledger)
        assert await mover.left() == []
        assert mover.progress.ledger_count == len(on_it)
        assert mover.progress.entry_count == sum(each.entry_count for each in moved.values()) > 0
        assert mover.progress.left_s == 0
        again, _ = await move(cluster, client, "b0")
        assert again == {}


async def test_move_of_several_bookies_closes_open_ledgers(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        shape = {"ensemble_size": 3, "write_quorum_size": 3, "ack_quorum_size": 3}
        writers = [await write(client, 10, close=False, scope_id=scope, **shape) for scope in SCOPES]
        bookies = named(cluster, writers[0].ledger)
        gone = sorted(bookies)[:1]
        await lose(cluster, *gone)
        before = {each.ledger: cluster.metadata(each.ledger) for each in writers}
        kept, _ = await move(cluster, client, *gone, skip_open=True)
        assert {each.outcome for each in kept.values()} == {MoveOutcome.OPEN}
        assert {each: cluster.metadata(each) for each in before} == before
        found = plan(cluster, *gone)
        assert found.open_count == len(found.ledgers) > 0
        moved, _ = await move(cluster, client, *gone)
        assert {each.outcome for each in moved.values()} == {MoveOutcome.MOVED}
        for ledger in moved:
            assert cluster.metadata(ledger).state is LedgerState.CLOSED
            assert cluster.metadata(ledger).last_entry_id == 9
            assert not named(cluster, ledger) & set(gone)
            assert await is_whole(client, ledger)


async def test_move_without_fencing_leaves_open_fragments(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 10, close=False, ensemble_size=2, scope_id=7)
        leaving = cluster.metadata(writer.ledger).ensembles[0].bookies[0]
        moved, mover = await move(cluster, client, leaving, fence=False)
        assert moved[writer.ledger].outcome is MoveOutcome.OPEN
        assert [ledger for ledger, _ in await mover.left()] == [writer.ledger]
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
        assert await writer.add(b"on") == 10
        await writer.close()
        moved, mover = await move(cluster, client, leaving, fence=False)
        assert moved[writer.ledger].outcome is MoveOutcome.MOVED
        assert await mover.left() == []
        assert await is_whole(client, writer.ledger)


async def test_move_names_lost_entries_and_moves_the_rest(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b3", "b4"]) as writing:
            good = await write(writing, 30, scope_id=7)
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            bad = await write(writing, 30)
        async with cluster.client(only=["b0"]) as writing:
            single = await write(
                writing, 5, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, scope_id=9
            )  # fmt: skip
        ensemble = cluster.metadata(bad.ledger).ensembles[0].bookies
        gone = ["b0", "b1"]
        await lose(cluster, *gone)
        before = cluster.metadata(bad.ledger)
        planned = [each async for each in BookieMover(client, gone).planned()]
        problems = {
            each.held.ledger: each.unreadable
            for each in planned
            if isinstance(each, PlannedFragment) and each.unreadable
        }
        # Two of three bookies are gone, so every third entry is, from the one that both have on.
        first = next(at for at in range(3) if {ensemble[at], ensemble[(at + 1) % 3]} <= set(gone))
        assert [each.first_entry_id for each in problems[bad.ledger]] == list(range(first, 30, 3))
        assert problems[single.ledger] == (EntrySpan(0, 4, 5),)
        assert cluster.metadata(bad.ledger) == before
        moved, mover = await move(cluster, client, *gone)
        row = moved[bad.ledger]
        assert row.outcome is MoveOutcome.UNRECOVERABLE
        assert [each.first_entry_id for each in row.unreadable] == list(range(first, 30, 3))
        assert f"entries {first}, {first + 3}, " in str(row.problem)
        assert ensemble[first] in str(row.problem)
        assert moved[single.ledger].outcome is MoveOutcome.UNRECOVERABLE
        assert cluster.metadata(bad.ledger) == before
        assert moved[good.ledger].outcome is MoveOutcome.MOVED
        assert await is_whole(client, good.ledger)
        assert {ledger for ledger, _ in await mover.left()} == {bad.ledger, single.ledger}


@pytest.mark.parametrize("silence", ["no answers", "no connections"])
@pytest.mark.parametrize("scope_id", [0, 7])
async def test_planned_asks_silent_bookies_for_few_of_their_ledgers(fake_cluster, monkeypatch, scope_id, silence):
    """Each entry of each ledger had a time-out of its own, and each open ledger one for its last add confirmed."""
    monkeypatch.setattr("bkctl.replication.bookie_mover.PROBES_AT_ONCE", 4)
    monkeypatch.setattr("bkctl.replication.replica_reads.LIST_TIMEOUT_S", 0.3)
    ledgers = {}
    async with fake_cluster(4) as cluster:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            for number in range(24):
                writer = await write(writing, 6, close=number % 3 > 0, scope_id=scope_id)
                ledgers[writer.ledger] = number % 3 > 0
        await lose(cluster, "b0")
        for name in ("b1", "b2"):
            bookie = cluster.bookie(name)
            bookie.received.clear()
            bookie.fault = lambda request: Fault.SILENCE
            if silence == "no connections":
                await bookie.stop()
        async with cluster.client(timeout_s=0.5) as client:
            planned = [each async for each in BookieMover(client, ["b0"]).planned()]
        for name in ("b1", "b2"):
            # Of the ledgers in work at once: a list, two reads; and a probe for scopes.
            assert len(cluster.bookie(name).received) <= 4 * 3 + 1
    assert {each.held.ledger for each in planned} == set(ledgers)
    closed = [each for each in planned if ledgers[each.held.ledger]]
    assert all(each.problem.startswith("No bookie that answers has entries ") for each in closed)
    if scope_id == 0 and silence == "no answers":
        assert closed[-1].problem.endswith("; b1, b2 give no answer")


async def test_planned_asks_a_bookie_on_that_fails_single_entries(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.replication.replica_reads.LIST_TIMEOUT_S", 0.3)
    async with fake_cluster(4, scopes=False) as cluster:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            ledgers = [(await write(writing, 12)).ledger for _ in range(3)]
        await lose(cluster, "b0")
        for name in ("b1", "b2"):
            cluster.bookie(name).fault = lambda request: (
                Fault.SILENCE
                if isinstance(request, ListEntriesRequest) or getattr(request, "entry_id", None) == 0
                else None
            )
        async with cluster.client(timeout_s=0.5) as client:
            planned = [each async for each in BookieMover(client, ["b0"]).planned()]
    assert [each.held.ledger for each in planned] == ledgers
    for each in planned:
        assert each.unreadable == ((EntrySpan(0, 0, 1),) if "b0" in each.fragment.ensemble[:2] else ())
        assert "no answer" not in str(each.problem)


async def test_plan_and_move_report_too_few_bookies(fake_cluster):
    async with fake_cluster(3, scopes=True) as cluster, cluster.client() as client:
        await cluster.add_bookie(scopes=False)
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            plain = await write(writing, 10)
        scoped = await write(client, 10, scope_id=7)
        await lose(cluster, "b0")
        found = plan(cluster, "b0")
        assert set(found.crowded) == {scoped.ledger}
        checks = Decommission(client, "b0", found)
        [step, total] = [each async for each in checks.obstacles(probe=True)]
        assert (step.ledger, step.result) == (scoped.ledger, StepResult.BLOCKED)
        assert "without ledger scopes" in step.message
        assert total.message.endswith("; 1 ledger cannot be moved")
        moved, _ = await move(cluster, client, "b0")
        assert moved[scoped.ledger].outcome is MoveOutcome.FAILED
        assert "b3" in str(moved[scoped.ledger].problem)
        assert moved[plain.ledger].outcome is MoveOutcome.MOVED


async def test_planned_names_targets_and_changes_nothing(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledger = (await write(client, 10, scope_id=7)).ledger
        opened = (await write(client, 10, close=False, write_quorum_size=3, ack_quorum_size=3)).ledger
        gone = sorted(named(cluster, ledger) & named(cluster, opened))[0]
        await lose(cluster, gone)
        others = {"b0", "b1", "b2", "b3"}
        before = {each: cluster.cluster.ledgers.read(each) for each in (ledger, opened)}
        planned = [each async for each in BookieMover(client, [gone]).planned()]
        assert all(isinstance(each, PlannedFragment) for each in planned)
        by_ledger = {each.held.ledger: each for each in planned}
        for each in (ledger, opened):
            old = before[each].metadata.ensembles[0].bookies
            [free] = others - set(old)
            assert by_ledger[each].new_ensemble == tuple(free if name == gone else name for name in old)
            assert by_ledger[each].problem is None
        assert [by_ledger[each].closes for each in (ledger, opened)] == [False, True]
        left = [each async for each in BookieMover(client, [gone], skip_open=True).planned()]
        assert [each.outcome for each in left if isinstance(each, LedgerMove)] == [MoveOutcome.OPEN]
        assert {each: cluster.cluster.ledgers.read(each) for each in (ledger, opened)} == before


async def test_move_of_named_ledgers_leaves_the_others(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1"]) as writing:
            first, second = [
                (await write(writing, 5, ensemble_size=2, scope_id=scope)).ledger for scope in (0, 7)
            ]  # fmt: skip
        await lose(cluster, "b0")
        moved, mover = await move(cluster, client, "b0", ids=[first])
        assert {each: row.outcome for each, row in moved.items()} == {first: MoveOutcome.MOVED}
        assert [ledger for ledger, _ in await mover.left()] == [second]
        with pytest.raises(LedgerNotFound):
            plan(cluster, "b0", ids=[LedgerId(7, 12345)])


async def test_a_ledger_that_is_deleted_meanwhile_is_gone(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 5, ensemble_size=2, scope_id=7)
        gone = sorted(named(cluster, writer.ledger))[0]
        await lose(cluster, gone)
        mover = BookieMover(client, [gone], plan(cluster, gone))
        await client.delete_ledger(writer.ledger_id, ledger_scope_id=7)
        rows = [each async for each in mover.move([writer.ledger])]
        assert [each.outcome for each in rows] == [MoveOutcome.GONE]


async def test_resumed_move_takes_the_ledgers_that_are_left_and_those_that_came_back(fake_cluster, tmp_path):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        gone = "b0"
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            ledgers = [
                (await write(writing, 5, scope_id=scope, write_quorum_size=3, ack_quorum_size=3)).ledger
                for scope in range(50)
            ]
        instance_id = cluster.cluster.instance_id()
        await lose(cluster, gone)

        def file():
            return ResumeFile(tmp_path / "resume", instance_id=instance_id, bookies=[gone])

        done = []
        with file() as resume:
            mover = BookieMover(client, [gone], plan(cluster, gone))
            moves = mover.move(mover.progress.plan.ledgers, resume=resume)
            async for each in moves:
                done.append(each.ledger)
                if len(done) == 3:
                    break
            await moves.aclose()
        first = done[0]
        found = cluster.cluster.ledgers.read(first)
        back = found.metadata._replace(ensembles=(Fragment(0, ("b0", "b1", "b2")),))
        cluster.cluster.ledgers.write(first, back, found.version)
        with file() as resume:
            assert resume.done >= set(done)
            noted = set(resume.done)
            assert resume.entry_count == 5 * len(noted)
            rest, mover = await move(cluster, client, gone, resume=resume)
        assert set(rest) & noted == {first}
        assert rest[first].outcome is MoveOutcome.MOVED
        assert await mover.left() == []
        for ledger in ledgers:
            assert await is_whole(client, ledger)


async def test_move_deletes_marks_for_lost_bookie_only(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1"]) as writing:
            ledgers = [(await write(writing, 5, ensemble_size=2, scope_id=scope)).ledger for scope in (0, 7)]
        marks = LedgerMarks(cluster.cluster.store)
        marks.add(ledgers[0], ["b0"])
        marks.add(ledgers[1], ["b0", "another"])
        await lose(cluster, "b0")
        moved, _ = await move(cluster, client, "b0")
        assert {each.outcome for each in moved.values()} == {MoveOutcome.MOVED}
        assert marks.get(ledgers[0]) is None
        assert marks.get(ledgers[1]) is not None


async def test_move_waits_for_locked_ledger(fake_cluster):
    notes: list[str] = []
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = [
            (await write(client, 5, write_quorum_size=3, ack_quorum_size=3, scope_id=scope)).ledger for scope in (0, 7)
        ]
        gone = sorted(named(cluster, ledgers[0]) & named(cluster, ledgers[1]))[0]
        await lose(cluster, gone)
        with open_cluster(cluster.cluster.uri) as other:
            locks = LedgerLocks(other.store)
            locks.lock(ledgers[0], "a worker")

            def note(text):
                notes.append(text)
                locks.unlock(ledgers[0])

            mover = BookieMover(client, [gone], plan(cluster, gone), note=note)
            rows = [row async for row in mover.move(mover.progress.plan.ledgers)]
        assert [each.ledger for each in rows] == [ledgers[1], ledgers[0]]
        assert {each.outcome for each in rows} == {MoveOutcome.MOVED}
        # It is said when nothing else is left to do, once.
        assert [text.startswith(f"Ledger {ledgers[0]}: locked by other workers") for text in notes] == [True]
        assert mover.progress.locked_count == 0
        assert list(LedgerLocks(cluster.cluster.store).list()) == []


@pytest.mark.parametrize("count", [5, 200])
@pytest.mark.parametrize("scope", [0, 7])
async def test_entries_copied_without_the_lock_are_listed_again_under_it(fake_cluster, monkeypatch, count, scope):
    """The target collects the copies as over-replicated as soon as the other worker lets go."""
    monkeypatch.setattr(bookie_mover, "LOCK_PATIENCE_S", 0.0)
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            ledger = (await write(writing, count, write_quorum_size=3, ack_quorum_size=3, scope_id=scope)).ledger
        await lose(cluster, "b0")
        target = cluster.bookie("b3")
        with open_cluster(cluster.cluster.uri) as other:
            locks = LedgerLocks(other.store)
            locks.lock(ledger, "a worker")
            collected = []

            def collect(request):
                held = target.entries(ledger)  # Entries come in any order.
                if isinstance(request, AddRequest) and len(held) == count - 1 and not collected:
                    collected.append(len(held))
                    held.clear()
                    locks.unlock(ledger)

            target.fault = collect
            rows, _ = await move(cluster, client, "b0")
        assert collected == [count - 1]
        assert rows[ledger].outcome is MoveOutcome.MOVED
        assert sorted(target.entries(ledger)) == list(range(count))
        assert await is_whole(client, ledger)


async def test_ledger_that_stays_locked_is_not_swapped(fake_cluster, monkeypatch):
    monkeypatch.setattr(bookie_mover, "LOCK_PATIENCE_S", 0.0)
    monkeypatch.setattr(bookie_mover, "LOCK_WAIT_S_MAX", 0.0)
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = [(await write(client, 3, scope_id=scope)).ledger for scope in (0, 7)]
        gone = sorted(named(cluster, ledgers[0]) & named(cluster, ledgers[1]))[0]
        await lose(cluster, gone)
        cluster.cluster.store.put(lock_path(ledgers[0]), b"\xff", NEW)
        before = cluster.metadata(ledgers[0])
        rows, _ = await move(cluster, client, gone)
        assert {ledger: rows[ledger].outcome for ledger in ledgers} == {
            ledgers[0]: MoveOutcome.FAILED, ledgers[1]: MoveOutcome.MOVED,
        }  # fmt: skip
        assert "being replicated" in rows[ledgers[0]].problem
        assert cluster.metadata(ledgers[0]) == before


@pytest.mark.parametrize("scope", [0, 7])
async def test_move_does_not_fence_a_writer_that_left_the_lost_bookie(fake_cluster, scope):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1"]) as writing:
            ledger = (await write(writing, 10, scope_id=scope, ensemble_size=2, close=False)).ledger
        # The writer changed its ensemble at entry 10, and no bookie knows a later last add confirmed yet.
        found = cluster.cluster.ledgers.read(ledger)
        old = found.metadata.ensembles[0].bookies
        moved_on = found.metadata._replace(ensembles=(Fragment(0, old), Fragment(10, ("b2", "b3"))))
        cluster.cluster.ledgers.write(ledger, moved_on, found.version)
        await lose(cluster, "b0")
        [planned] = [each async for each in BookieMover(client, ["b0"]).planned()]
        assert "is not fenced" in planned.problem
        rows, _ = await move(cluster, client, "b0")
        assert rows[ledger].outcome is MoveOutcome.OPEN
        assert "is not fenced" in rows[ledger].problem
        assert cluster.metadata(ledger).state is LedgerState.OPEN
        assert not any(bookie.ledgers[ledger].fenced for bookie in cluster.bookies if ledger in bookie.ledgers)


async def test_plan_names_open_ledgers_that_cannot_be_closed(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1"]) as writing:
            ledger = (await write(writing, 10, ensemble_size=2, close=False)).ledger
        await lose(cluster, "b0", "b1")
        [planned] = [each async for each in BookieMover(client, ["b0"]).planned()]
        assert (planned.held.ledger, planned.problem) == (
            ledger, "It cannot be closed: too few of its last bookies answer (not b0, b1)",
        )  # fmt: skip


async def test_move_swaps_nothing_after_losing_lock(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            ledger = (await write(writing, 5, scope_id=7)).ledger
        ledger_locks = LedgerLocks(cluster.cluster.store)
        before = cluster.cluster.ledgers.read(ledger)
        seen = []

        def lose_lock(request):
            # A bookie's garbage collection that has the lock now may take what was copied.
            if isinstance(request, AddRequest) and not seen:
                seen.extend(lock.ledger for lock in ledger_locks.list())
                cluster.cluster.store.delete(f"underreplication/scopes/locks/urL{ledger.qualified_name}")

        cluster.bookies[3].fault = lose_lock
        await lose(cluster, "b0")
        rows, _ = await move(cluster, client, "b0")
        assert seen == [ledger]
        assert rows[ledger].outcome is MoveOutcome.FAILED
        assert "lock" in rows[ledger].problem
        assert cluster.cluster.ledgers.read(ledger) == before
        rows, _ = await move(cluster, client, "b0")
        assert rows[ledger].outcome is MoveOutcome.MOVED
        assert await is_whole(client, ledger)
        assert list(ledger_locks.list()) == []


async def test_cancelled_move_releases_lock_being_taken(fake_cluster, monkeypatch):
    taking, go_on = threading.Event(), threading.Event()
    lock_many = LedgerLocks.lock_many

    def slowly(*arguments):
        taking.set()
        assert go_on.wait(LIMIT_S)
        return lock_many(*arguments)

    monkeypatch.setattr(LedgerLocks, "lock_many", slowly)

    async with fake_cluster(4) as cluster, cluster.client() as client:
        await write(client, 3, ensemble_size=4)
        task = asyncio.ensure_future(move(cluster, client, "b0"))
        assert await asyncio.to_thread(taking.wait, LIMIT_S)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert list(LedgerLocks(cluster.cluster.store).list()) == []


async def test_cancelled_move_keeps_lock_until_swap_is_written(fake_cluster, monkeypatch):
    writing, go_on, steps = threading.Event(), threading.Event(), []
    unlock_many = LedgerLocks.unlock_many

    def unlocked(*arguments):
        unlock_many(*arguments)
        steps.append("unlocked")

    monkeypatch.setattr(LedgerLocks, "unlock_many", unlocked)
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, 3, ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
        write_many = cluster.cluster.ledgers.write_many

        def slowly(*arguments):
            writing.set()
            assert go_on.wait(LIMIT_S)
            steps.append("written")
            return write_many(*arguments)

        monkeypatch.setattr(cluster.cluster.ledgers, "write_many", slowly)
        (lost, *_) = cluster.metadata(writer.ledger).ensembles[0].bookies
        task = asyncio.ensure_future(move(cluster, client, lost))
        assert await asyncio.to_thread(writing.wait, LIMIT_S)
        task.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert steps == ["written", "unlocked"]
        assert lost not in cluster.metadata(writer.ledger).ensembles[0].bookies


async def test_rate_bounds_all_moves_together(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            for scope in SCOPES:
                await write(writing, 5, write_quorum_size=3, ack_quorum_size=3, scope_id=scope)
        await lose(cluster, "b0")
        began = time.monotonic()
        _, mover = await move(cluster, client, "b0", pace=Pace(bytes_per_s=2000))
        # The first entry of all goes at once.
        assert mover.progress.entry_count == 15
        assert mover.progress.plan.size_bytes == mover.progress.size_bytes
        assert time.monotonic() - began >= (mover.progress.size_bytes - 200) / 2000 * 0.9


async def test_pause_releases_locks_and_resumed_moves_finish(fake_cluster):
    pace = Pace()
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            for scope in SCOPES:
                await write(writing, 5, write_quorum_size=3, ack_quorum_size=3, scope_id=scope)
        await lose(cluster, "b0")
        copying = asyncio.Event()

        def hold(request):
            if isinstance(request, AddRequest):
                copying.set()
                return True
            return False

        cluster.bookie("b3").hold = hold
        task = asyncio.ensure_future(move(cluster, client, "b0", pace=pace))
        await asyncio.wait_for(copying.wait(), LIMIT_S)
        locks = LedgerLocks(cluster.cluster.store)
        assert list(locks.list())
        pace.pause()
        while list(locks.list()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert list(locks.list()) == []
        assert not task.done()
        cluster.bookie("b3").release()
        pace.resume()
        rows, _ = await asyncio.wait_for(task, LIMIT_S)
        assert [(each.outcome, each.problem) for each in rows.values()] == [(MoveOutcome.MOVED, None)] * 3
        for ledger in rows:
            assert named(cluster, ledger) == {"b1", "b2", "b3"}
            assert await is_whole(client, ledger)
        assert list(locks.list()) == []


@pytest.mark.parametrize("keeps", [True, False])
async def test_resumed_moves_continue_where_the_pause_ended_them(fake_cluster, keeps):
    """Entries that the target got are neither read nor added again, unless the target collected them meanwhile."""
    pace, count, copied = Pace(), 60, 40
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            writer = await write(writing, count, write_quorum_size=3, ack_quorum_size=3)
        await lose(cluster, "b0")
        target = cluster.bookie("b3")
        target.hold = lambda request: isinstance(request, AddRequest) and request.entry_id >= copied
        task = asyncio.ensure_future(move(cluster, client, "b0", pace=pace))
        while len(target.entries(writer.ledger)) < copied or not target.held:
            await asyncio.sleep(0.01)
        # A later answer on the same connection: all before it have come.
        await client.pool.channel("b3").send(ReadRequest(writer.ledger, 0))
        await asyncio.sleep(0)
        pace.pause()
        while list(LedgerLocks(cluster.cluster.store).list()):
            await asyncio.sleep(0.01)
        if not keeps:
            target.entries(writer.ledger).clear()
        target.received.clear()
        target.held.clear()
        target.hold = lambda request: False
        pace.resume()
        rows, mover = await asyncio.wait_for(task, LIMIT_S)
        assert [each.outcome for each in rows.values()] == [MoveOutcome.MOVED]
        added = sorted(each.entry_id for each in target.received if isinstance(each, AddRequest))
        assert added == list(range(copied if keeps else 0, count))
        assert not any(isinstance(each, ReadRequest) for each in target.received)
        assert mover.progress.entry_count >= count
        assert await is_whole(client, writer.ledger)


async def test_delete_cookies_refuses_registered_bookies(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        cookies = cluster.cluster.cookies
        for name in ("b0", "b1"):
            cookies.write(name, Cookie(name, ("/j",), ("/l",), "i"), NEW)
        mover = BookieMover(client, ["b0", "b1", "b9"])
        with pytest.raises(Conflict, match="b0 is up"):
            await mover.delete_cookies()
        await lose(cluster, "b0", "b1")
        assert await mover.delete_cookies() == ("b0", "b1")
        assert cookies.list() == []


async def test_delete_cookies_refuses_foreign_scoped_ledgers(fake_cluster, monkeypatch):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        cookies = cluster.cluster.cookies
        cookies.write("b0", Cookie("b0", ("/j",), ("/l",), "i"), NEW)
        await lose(cluster, "b0")
        monkeypatch.setattr(cluster.cluster.ledgers, "scopes_state", lambda: "foreign")
        with pytest.raises(Conflict, match="are in no listing"):
            await BookieMover(client, ["b0"]).delete_cookies()
        assert cookies.list() == ["b0"]


async def test_cancelled_move_leaves_no_task_or_lock(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b1", "b2"]) as writing:
            for scope in range(6):
                await write(writing, 5, write_quorum_size=3, ack_quorum_size=3, scope_id=scope)
        await lose(cluster, "b0")
        for bookie in cluster.bookies[1:]:
            bookie.hold = lambda request: True
        found = plan(cluster, "b0")
        mover = BookieMover(client, ["b0"], found)

        async def work():
            async for _ in mover.move(found.ledgers):
                pass

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await work()
        for bookie in cluster.bookies[1:]:
            bookie.release()
        assert list(LedgerLocks(cluster.cluster.store).list()) == []
        moved, _ = await move(cluster, client, "b0")
        assert {each.outcome for each in moved.values()} == {MoveOutcome.MOVED}


def test_spans_text_shortens_long_lists():
    assert spans_text([EntrySpan(5, 5, 1)]) == "entry 5"
    assert spans_text([EntrySpan(0, 9, 10), EntrySpan(12, 20, 4)]) == "entries 0-9, 12-20 (4)"
    many = [EntrySpan(each, each, 1) for each in range(0, 80, 2)]
    assert spans_text(many) == "entries 0, 2, 4, 6, 8 and 35 more ranges"


async def test_plan_ignores_bookies_without_scopes_for_scoped_ledgers(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledger = (await write(client, 5, scope_id=7, write_quorum_size=3, ack_quorum_size=3)).ledger
        cluster.cluster.bookies.register("apache", BookieServiceInfo(()))
        await lose(cluster, "b0")
        assert ledger in plan(cluster, "b0").crowded


async def test_moves_go_to_other_racks(fake_cluster):
    async with fake_cluster(7) as cluster, cluster.client() as client:
        BookieRacks(cluster.cluster).set(["b0", "b1", "b2"], "/r1")
        BookieRacks(cluster.cluster).set(["b3", "b4", "b5", "b6"], "/r2")
        ledgers = [(await write(client, 5, ensemble_size=2)).ledger for _ in range(6)]
        assert all(len(named(cluster, each) & {"b0", "b1", "b2"}) == 1 for each in ledgers)
        await move(cluster, client, "b0", "b3")
        assert not any(named(cluster, each) & {"b0", "b3"} for each in ledgers)
        assert all(len(named(cluster, each) & {"b1", "b2"}) == 1 for each in ledgers)
