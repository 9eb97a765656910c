"""Decommission and drain: what stands against them is said, and a cookie stays as long as it is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bkctl.config import ClientConfig
from bkctl.errors import Conflict, NotFound
from bkctl.formats.metadata import BookieEndpoint, Cookie, Fragment, LedgerState
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import AutoRecoverySettings, AutoRecoveryState, LedgerMarks
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.departure import BLOCKING_RESULTS, Decommission, Drain, StepKind, StepResult
from bkctl.replication.holdings import plan_move

from .recovering import write


async def lost(cluster, name):
    await cluster.bookie(name).stop()
    cluster.unregister(cluster.bookie(name))


async def ledgers_on_b0(cluster, scopes=(0, 7), **shape):
    """One ledger a scope on b0, b1 and b2; all bookies get cookies."""
    for bookie in cluster.bookies:
        if bookie.bookie_id not in cluster.cluster.cookies.list():
            cluster.cluster.cookies.write(bookie.bookie_id, Cookie(bookie.bookie_id, ("/j",), ("/l",), "i"), NEW)
    async with cluster.client(only=["b0", "b1", "b2"]) as client:
        return [(await write(client, 30, scope_id=scope, **shape)).ledger for scope in scopes]


def decommission(cluster, client, name="b0", **options):
    return Decommission(client, name, plan_move(cluster.cluster, [name]), **options)


async def steps(found):
    return [each async for each in found]


def results(found):
    """The outcome of each kind of step; of ledgers by their ids."""
    return {each.ledger or each.kind: each.result for each in found}


async def is_whole(client, ledger):
    return (await LedgerChecker(client).check(ledger, every_entry=True)).fragments == ()


async def test_decommission_empties_bookie_and_deletes_cookie(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = await ledgers_on_b0(cluster, (0, 7, 1 << 63))
        await lost(cluster, "b0")
        departure = decommission(cluster, client)
        checked = results(await steps(departure.check(probe=True)))
        assert checked == {
            StepKind.STOPPED: StepResult.OK, StepKind.AUTO_RECOVERY: StepResult.OK,
            StepKind.AUDITOR: StepResult.WARNING, StepKind.BOOKIES: StepResult.OK, StepKind.SPACE: StepResult.OK,
            StepKind.LEDGERS: StepResult.OK,
        }  # fmt: skip
        assert not departure.forbidden
        done = results(await steps(departure.run()))
        assert done == dict.fromkeys(ledgers, StepResult.MOVED) | {StepKind.COOKIE: StepResult.DELETED}
        assert cluster.cluster.cookies.list() == ["b1", "b2", "b3"]
        for ledger in ledgers:
            assert await is_whole(client, ledger)
        # Without anybody who looks for marks there are none.
        assert list(LedgerMarks(cluster.cluster.store).list(None)) == []


async def test_decommission_keeps_cookie_on_request_and_accepts_missing_one(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await ledgers_on_b0(cluster)
        await lost(cluster, "b0")
        assert results(await steps(decommission(cluster, client, keep_cookie=True).run()))[StepKind.COOKIE] == "kept"
        assert "b0" in cluster.cluster.cookies.list()
        assert results(await steps(decommission(cluster, client).run())) == {StepKind.COOKIE: StepResult.DELETED}
        assert results(await steps(decommission(cluster, client).run())) == {StepKind.COOKIE: StepResult.OK}
        with pytest.raises(NotFound, match="it was decommissioned, or never belonged to this cluster"):
            await steps(decommission(cluster, client).check(probe=False))


async def test_registered_bookie_is_not_decommissioned(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = await ledgers_on_b0(cluster)
        before = [cluster.cluster.ledgers.read(each) for each in ledgers]
        departure = decommission(cluster, client)
        assert results(await steps(departure.check(probe=False)))[StepKind.STOPPED] is StepResult.BLOCKED
        assert departure.forbidden
        with pytest.raises(Conflict, match="registered"):
            await steps(departure.run())
        assert [cluster.cluster.ledgers.read(each) for each in ledgers] == before


async def test_decommission_check_reports_foreign_scopes(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await ledgers_on_b0(cluster)
        await lost(cluster, "b0")
        monkeypatch.setattr(cluster.cluster.ledgers, "scopes_state", lambda: "foreign")
        departure = decommission(cluster, client)
        (step,) = [each for each in await steps(departure.check(probe=False)) if each.kind is StepKind.COOKIE]
        assert (step.result, departure.forbidden) == (StepResult.BLOCKED, True)
        assert "are in no listing" in step.message
        # With the cookie nothing is lost.
        keeping = decommission(cluster, client, keep_cookie=True)
        assert StepKind.COOKIE not in results(await steps(keeping.check(probe=False)))
        assert not keeping.forbidden


async def test_decommission_check_refuses_disabled_auto_recovery(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await ledgers_on_b0(cluster)
        await lost(cluster, "b0")
        AutoRecoverySettings(cluster.cluster.store).disable()
        departure = decommission(cluster, client)
        assert results(await steps(departure.check(probe=False)))[StepKind.AUTO_RECOVERY] is StepResult.BLOCKED
        assert departure.forbidden


@pytest.mark.parametrize("scope", [0, 7])
async def test_unmovable_ledger_keeps_cookie_until_restored(fake_cluster, scope):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        [good] = await ledgers_on_b0(cluster, [9])
        async with cluster.client(only=["b0", "b3"]) as writing:
            bad = (await write(writing, 10, scope_id=scope, ensemble_size=2)).ledger
        await lost(cluster, "b0")
        kept = cluster.bookie("b3").ledgers.pop(bad)
        checked = await steps(decommission(cluster, client).check(probe=True))
        [obstacle] = [each for each in checked if each.ledger is not None]
        assert (obstacle.ledger, obstacle.result) == (bad, StepResult.BLOCKED)
        assert "entries 0-9" in obstacle.message
        assert "b3" in obstacle.message
        done = await steps(decommission(cluster, client).run())
        assert results(done) == {
            good: StepResult.MOVED, bad: StepResult.UNRECOVERABLE, StepKind.COOKIE: StepResult.BLOCKED,
        }  # fmt: skip
        [step] = [each for each in done if each.ledger == bad]
        assert [tuple(each) for each in step.unreadable] == [(0, 9, 10)]
        assert str(bad) in done[-1].message
        assert "b0" in cluster.cluster.cookies.list()
        cluster.bookie("b3").ledgers[bad] = kept
        assert results(await steps(decommission(cluster, client).run())) == {
            bad: StepResult.MOVED, StepKind.COOKIE: StepResult.DELETED,
        }  # fmt: skip
        assert await is_whole(client, bad)


async def test_skip_unrecoverable_skips_only_unrecoverable_ledgers(fake_cluster):
    from bkctl.protocol.messages import Status

    refuse = Status.EREADONLY

    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b3"]) as writing:
            bad = (await write(writing, 10, scope_id=7, ensemble_size=2)).ledger
            closed = (await write(writing, 10, ensemble_size=2)).ledger
        await ledgers_on_b0(cluster, ())
        await lost(cluster, "b0")
        del cluster.bookie("b3").ledgers[bad]
        checked = await steps(decommission(cluster, client, skip_unrecoverable=True).check(probe=True))
        assert results(checked)[bad] is StepResult.SKIPPED
        assert results(checked)[StepKind.LEDGERS] is StepResult.OK
        # One that cannot be copied for another reason is not given up.
        for name in ("b1", "b2"):
            cluster.bookie(name).fault = lambda request: (
                refuse if type(request).__name__ == "AddRequest" and request.ledger == closed else None
            )  # fmt: skip
        done = results(await steps(decommission(cluster, client, skip_unrecoverable=True).run()))
        assert done == {
            bad: StepResult.SKIPPED, closed: StepResult.FAILED, StepKind.COOKIE: StepResult.BLOCKED,
        }  # fmt: skip
        for name in ("b1", "b2"):
            cluster.bookie(name).fault = lambda request: None
        done = results(await steps(decommission(cluster, client, skip_unrecoverable=True).run()))
        assert done == {
            bad: StepResult.SKIPPED, closed: StepResult.MOVED, StepKind.COOKIE: StepResult.DELETED,
        }  # fmt: skip


async def test_ledger_with_lost_entries_and_another_obstacle_is_not_given_up(fake_cluster):
    """Its second fragment is whole, and finds no bookie to go to."""
    async with fake_cluster(4) as cluster, cluster.client() as client:
        [ledger] = await ledgers_on_b0(cluster, [7])
        found = cluster.cluster.ledgers.read(ledger)
        first, second = ("b0", "b1", "b2"), ("b0", "b3", "b2")
        for name in first[1:]:
            cluster.bookie(name).entries(ledger).clear()
        split = found.metadata._replace(ensembles=(Fragment(0, first), Fragment(6, second)))
        cluster.cluster.ledgers.write(ledger, split, found.version)
        cluster.cluster.bookies.register("b1", cluster.cluster.bookies.get("b1").info, read_only=True)
        await lost(cluster, "b0")
        departure = decommission(cluster, client, skip_unrecoverable=True)
        assert results(await steps(departure.check(probe=True)))[ledger] is StepResult.BLOCKED
        step, cookie = await steps(departure.run())
        assert (step.result, cookie.result) == (StepResult.FAILED, StepResult.BLOCKED)
        assert "No bookie gives entries 0-5 (4)" in step.message
        assert "writable bookie is needed, 0 are there" in step.message


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("scope", [0, 7])
async def test_ledger_whose_other_bookie_is_away_is_not_given_up(fake_cluster, scope, close):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        async with cluster.client(only=["b0", "b3"]) as writing:
            ledger = (await write(writing, 10, scope_id=scope, ensemble_size=2, close=close)).ledger
        await ledgers_on_b0(cluster, ())
        await lost(cluster, "b0")
        away = cluster.bookie("b3")
        await away.stop()
        for registered in (True, False):
            if not registered:
                cluster.unregister(away)
            checked = results(await steps(decommission(cluster, client, skip_unrecoverable=True).check(probe=True)))
            if close or not registered:
                assert checked[ledger] is StepResult.BLOCKED
            done = results(await steps(decommission(cluster, client, skip_unrecoverable=True).run()))
            assert done == {ledger: StepResult.FAILED, StepKind.COOKIE: StepResult.BLOCKED}
            assert "b0" in cluster.cluster.cookies.list()
        await away.start()
        cluster.register(away)
        async with cluster.client() as fresh:  # The other one pauses before it connects again.
            done = results(await steps(decommission(cluster, fresh, skip_unrecoverable=True).run()))
        assert done == {ledger: StepResult.MOVED, StepKind.COOKIE: StepResult.DELETED}


async def test_unreadable_metadata_keeps_cookie(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        [ledger] = await ledgers_on_b0(cluster, [0])
        await lost(cluster, "b0")
        path = cluster.cluster.ledgers.path(ledger)
        cluster.cluster.store.put(path, b"BookieMetadataFormatVersion\t3\nnonsense of b0", None)
        checked = await steps(decommission(cluster, client).check(probe=False))
        assert results(checked)[ledger] is StepResult.BLOCKED
        # The part that was cut off may have named it.
        for value in (b"BookieMetadataFormatVersion\t3\nnonsense of b0", b"BookieMetadataFormatVersion\t3\n", b""):
            cluster.cluster.store.put(path, value, None)
            done = await steps(decommission(cluster, client, skip_unrecoverable=True).run())
            assert results(done) == {ledger: StepResult.FAILED, StepKind.COOKIE: StepResult.BLOCKED}
            assert "b0" in cluster.cluster.cookies.list()


async def test_checks_report_too_few_bookies_and_little_space(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        [ledger] = await ledgers_on_b0(cluster, [7])
        await lost(cluster, "b0")
        departure = decommission(cluster, client)
        checked = results(await steps(departure.check(probe=True)))
        assert (checked[StepKind.BOOKIES], checked[ledger]) == (StepResult.BLOCKED, StepResult.BLOCKED)
        assert not departure.forbidden
        assert results(await steps(departure.run()))[StepKind.COOKIE] is StepResult.BLOCKED
        await cluster.add_bookie()
        for bookie in cluster.bookies:
            bookie.free_bytes = 10
        departure = decommission(cluster, client)
        checked = results(await steps(departure.check(probe=False)))
        assert (checked[StepKind.BOOKIES], checked[StepKind.SPACE]) == (StepResult.OK, StepResult.BLOCKED)
        assert departure.forbidden


async def test_decommission_marks_for_workers_and_leaves_no_mark(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        plain, _ = await ledgers_on_b0(cluster)
        await lost(cluster, "b0")
        state = AutoRecoveryState(cluster.cluster.store)
        vote = state.election.vote("b1")
        marked = []
        departure = decommission(cluster, client)
        begin = departure.mover.move

        def move(ids, **options):
            marked.extend(ledger for ledger, _ in state.marks.list(None))
            return begin(ids, **options)

        departure.mover.move = move
        assert {each.result for each in await steps(departure.run())} == {StepResult.MOVED, StepResult.DELETED}
        # The auditor of scope 0 is there, that of the scopes is not.
        assert marked == [plain]
        assert list(state.marks.list(None)) == []
        assert list(state.locks.list()) == []
        vote.release()


async def test_decommission_closes_and_moves_open_ledger(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        [ledger] = await ledgers_on_b0(cluster, [7], close=False)
        await lost(cluster, "b0")
        done = await steps(decommission(cluster, client).run())
        assert results(done)[ledger] is StepResult.MOVED
        assert cluster.metadata(ledger).state is LedgerState.CLOSED
        assert await is_whole(client, ledger)


async def test_drain_leaves_entries_of_active_writer(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        closed = await ledgers_on_b0(cluster)
        async with cluster.client(only=["b0", "b1"]) as writing:
            writer = await write(writing, 10, scope_id=7, close=False, ensemble_size=2)
            single = (
                await write(writing, 3, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, scope_id=3)
            ).ledger

            def drain():
                return Drain(client, "b0", plan_move(cluster.cluster, ["b0"]))

            checked = results(await steps(drain().check(probe=True)))
            assert (checked[StepKind.READ_ONLY], checked[writer.ledger]) == (StepResult.BLOCKED, StepResult.OPEN)
            registered = cluster.cluster.bookies.get("b0").info
            with_http = replace(registered, endpoints=(BookieEndpoint("httpserver", 9, "127.0.0.1", "http"),))
            cluster.cluster.bookies.register("b0", with_http)
            checked = results(await steps(drain().check(probe=True)))
            assert (checked[StepKind.READ_ONLY], checked[writer.ledger]) == (StepResult.WARNING, StepResult.OPEN)
            cluster.cluster.bookies.register("b0", registered)
            cluster.unregister(cluster.bookie("b0"))
            with pytest.raises(Conflict, match="down"):
                await steps(drain().check(probe=False))
            cluster.register(cluster.bookie("b0"))

            def switch(found):
                cluster.cluster.bookies.register(found.bookie_id, found.info, read_only=True)

            assert (await drain().set_read_only(switch, 30)).result is StepResult.OK
            assert cluster.cluster.bookies.get("b0").state == "ro"
            done = await steps(drain().run())
            expected = dict.fromkeys(closed, StepResult.MOVED) | {
                writer.ledger: StepResult.OPEN, StepKind.LEDGERS: StepResult.BLOCKED,
            }  # fmt: skip
            assert {key: value for key, value in results(done).items() if key != single} == expected
            assert "b0 read-only until 'bkctl bookie readonly off --bookie b0'" in (done[-1].advice or "")
            assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
            assert not cluster.bookie("b0").ledgers[writer.ledger].fenced
            await writer.close()
            rest = results(await steps(drain().run()))
            assert rest == {writer.ledger: StepResult.MOVED, StepKind.LEDGERS: StepResult.OK}
        # Nothing needs it any more.
        await lost(cluster, "b0")
        for ledger in [*closed, writer.ledger, single]:
            assert await is_whole(client, ledger)
        done = results(await steps(decommission(cluster, client).run()))
        assert done == {StepKind.COOKIE: StepResult.DELETED}


@pytest.mark.parametrize("moves", [True, False])
async def test_drain_of_a_bookie_that_became_writable_is_not_finished(fake_cluster, moves):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        await ledgers_on_b0(cluster, (0, 7) if moves else ())
        registered = cluster.cluster.bookies.get("b0").info
        cluster.cluster.bookies.register("b0", registered, read_only=True)
        drain = Drain(client, "b0", plan_move(cluster.cluster, ["b0"]))
        cluster.cluster.bookies.register("b0", registered)
        last = (await steps(drain.run()))[-1]
        assert (last.kind, last.result) == (StepKind.READ_ONLY, StepResult.BLOCKED)
        assert "b0 is writable again" in last.message


async def test_check_gives_no_entries_to_bookies_that_are_registered_and_silent(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        ledgers = await ledgers_on_b0(cluster)
        plan = plan_move(cluster.cluster, ["b0"], silent=["b3"])
        found = await steps(Drain(client, "b0", plan).check(probe=True))
        assert {results(found)[each] for each in (StepKind.BOOKIES, *ledgers)} == {StepResult.BLOCKED}
        (text,) = (each.message for each in found if each.kind is StepKind.BOOKIES)
        assert text == "2 bookies writable, 2 of them for ledger scopes; no answer from b3; not enough for 2 ledgers"


async def test_drained_bookie_that_goes_away_has_lost_nothing(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        [ledger] = await ledgers_on_b0(cluster, [7])
        for name in ("b1", "b2"):
            cluster.bookie(name).entries(ledger).clear()
        drain = Drain(client, "b0", plan_move(cluster.cluster, ["b0"]))
        await lost(cluster, "b0")
        assert results(await steps(drain.run()))[ledger] is StepResult.FAILED


@pytest.mark.parametrize("close", [True, False])
async def test_bookie_with_empty_ledgers_only_leaves_without_replacements(fake_cluster, close):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        await ledgers_on_b0(cluster, ())
        ledger = (await write(client, 0, scope_id=7, close=close)).ledger
        cluster.cluster.bookies.register("b0", cluster.cluster.bookies.get("b0").info, read_only=True)
        if close:
            drain = Drain(client, "b0", plan_move(cluster.cluster, ["b0"]))
            assert not BLOCKING_RESULTS.intersection(results(await steps(drain.check(probe=True))).values())
            assert results(await steps(drain.run())) == {ledger: StepResult.MOVED, StepKind.LEDGERS: StepResult.OK}
        await lost(cluster, "b0")
        done = results(await steps(decommission(cluster, client).run()))
        assert done == {ledger: StepResult.MOVED, StepKind.COOKIE: StepResult.DELETED}


async def test_check_knows_the_placement_policy(fake_cluster):
    config = ClientConfig(enforce_min_num_racks_per_write_quorum=True)
    async with fake_cluster(4) as cluster, cluster.client(config=config) as client:
        BookieRacks(cluster.cluster).set(["b0"], "/r2")
        BookieRacks(cluster.cluster).set(["b1", "b2", "b3"], "/r1")
        [ledger] = await ledgers_on_b0(cluster, [0])
        await lost(cluster, "b0")
        checked = results(await steps(decommission(cluster, client).check(probe=True)))
        assert (checked[ledger], checked[StepKind.LEDGERS]) == (StepResult.BLOCKED, StepResult.BLOCKED)
        assert results(await steps(decommission(cluster, client).run()))[ledger] is StepResult.FAILED


def test_blocking_results_are_the_failures():
    good = {StepResult.OK, StepResult.WARNING, StepResult.MOVED, StepResult.GONE, StepResult.SKIPPED}
    assert set(StepResult) - BLOCKING_RESULTS == good | {StepResult.DELETED, StepResult.KEPT}
