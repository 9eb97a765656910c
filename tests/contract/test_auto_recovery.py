"""Auto-recovery as a whole on every metadata store: elected, healing, killed, cut off, and beginning again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client.fakes import FakeCluster
from contract.test_outage import end_session
from replication.recovering import CONFIG, bookies_of, eventually, lose, running, write
from support.waiting import LIMIT_S

from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AuditorElection, AutoRecoveryState, LedgerLocks
from bkctl.protocol.messages import AddRequest
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.daemon import AutoRecovery, AutoRecoveryThread


@pytest.fixture(params=["sqlite", "zookeeper", "etcd", "hbase"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    if request.param == "sqlite":
        uri = f"sqlite://{tmp_path / 'metadata.db'}"
    else:
        server = request.getfixturevalue(request.param)
        uri = server.metadata_uri(server.new_root())
    with open_cluster(uri, session_timeout_s=20, create=True) as opened:
        yield opened


@contextlib.asynccontextmanager
async def fakes_on(cluster: Cluster, count: int) -> Any:
    fakes = FakeCluster(cluster)
    try:
        for _ in range(count):
            await fakes.add_bookie()
        yield fakes
    finally:
        for bookie in fakes.bookies:
            await bookie.stop()


@contextlib.asynccontextmanager
async def another(uri: str, name: str, *, session_timeout_s: float = 20, **options: Any) -> Any:
    """An auto-recovery with a store session of its own, running for the time of a block."""
    opened = await asyncio.to_thread(open_cluster, uri, session_timeout_s=session_timeout_s)
    try:
        made = AutoRecovery(opened, CONFIG, name, **options)
        async with running(made.run()):
            yield made, opened
    finally:
        await asyncio.to_thread(opened.close)


async def assert_whole(client: Any, ledgers: Any) -> None:
    for ledger in ledgers:
        check = await LedgerChecker(client).check(ledger, every_entry=True)
        assert (check.fragments, check.problem) == ((), None)


async def test_lost_bookies_are_replicated_in_every_scope_across_auditors(cluster: Cluster) -> None:
    state = AutoRecoveryState(cluster.store)
    async with fakes_on(cluster, 5) as fakes, fakes.client() as client, contextlib.AsyncExitStack() as rest:
        ledgers = [(await write(client, 20, scope_id=scope_id)).ledger for scope_id in (0, 0, 7, 7, 1 << 63)]
        first = contextlib.AsyncExitStack()
        await first.enter_async_context(another(cluster.uri, "first:1"))
        await eventually(
            lambda: state.election.auditor() == state.election.auditor(scoped=True) == "first:1", "the first one"
        )
        await rest.enter_async_context(another(cluster.uri, "second:1"))

        def healed(bookie_id: str) -> bool:
            found = [each for _, each in cluster.ledgers.read_many(ledgers)]
            named = {name for each in found for part in each.metadata.ensembles for name in part.bookies}
            return bookie_id not in named and not state.marks.has_marks() and not list(state.locks.list())

        await lose(fakes, fakes.bookies[0])
        await eventually(lambda: healed("b0"), "the first loss is healed")
        await assert_whole(client, ledgers)
        await first.aclose()
        await eventually(
            lambda: state.election.auditor() == state.election.auditor(scoped=True) == "second:1", "the second one"
        )
        await lose(fakes, fakes.bookies[1])
        await eventually(lambda: healed("b1"), "the second loss is healed")
        await assert_whole(client, ledgers)
    assert state.election.votes() == state.election.votes(scoped=True) == ()


async def test_lost_session_ends_the_auditors_term(zookeeper: Any) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    cluster = await asyncio.to_thread(open_cluster, uri, create=True)
    state = AutoRecoveryState(cluster.store)
    async with fakes_on(cluster, 4) as fakes, fakes.client() as client:
        ledger = (await write(client, 10, scope_id=7)).ledger
        async with another(uri, "only:1") as (only, opened):
            await eventually(lambda: state.election.auditor(scoped=True) == "only:1", "it is elected")
            votes = state.election.vote_paths(scoped=True)
            lock = await asyncio.to_thread(LedgerLocks(opened.store).lock, ledger, "only:1")
            await asyncio.to_thread(end_session, opened.store)
            await eventually(lambda: not lock.is_held(), "its locks are gone")
            await eventually(
                lambda: state.election.vote_paths(scoped=True) not in (votes, ()), "it voted again, by another vote"
            )
            assert len(state.election.vote_paths(scoped=True)) == 1
            assert not lock.is_held()
            lost = bookies_of(fakes, ledger)[0]
            await lose(fakes, lost)
            await eventually(
                lambda: (
                    not state.marks.has_marks()
                    and lost.bookie_id not in cluster.ledgers.read(ledger).metadata.last_fragment.bookies
                ),
                "and heals",
            )
            await eventually(lambda: only.auditor_stats[True].audit_count, "by an audit of its own")
        await assert_whole(client, [ledger])
    await asyncio.to_thread(cluster.close)


async def test_outage_longer_than_the_session_only_interrupts_auto_recovery(zookeeper_server: Any) -> None:
    server = zookeeper_server()
    uri = server.metadata_uri()
    cluster = await asyncio.to_thread(open_cluster, uri, session_timeout_s=4, create=True)
    state = AutoRecoveryState(cluster.store)
    async with fakes_on(cluster, 4) as fakes, fakes.client() as client:
        ledger = (await write(client, 10)).ledger
        async with another(uri, "only:1", session_timeout_s=4):
            await eventually(lambda: state.election.auditor() == "only:1", "it is elected")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await eventually(lambda: len(fakes.cluster.bookies.list(False)) == 4, "bookies are registered again")
            lost = bookies_of(fakes, ledger)[0]
            await lose(fakes, lost)
            await eventually(
                lambda: (
                    lost.bookie_id not in cluster.ledgers.read(ledger).metadata.last_fragment.bookies
                    and not state.marks.has_marks()
                ),
                "it heals again",
            )
    await asyncio.to_thread(cluster.close)


async def test_next_process_finishes_a_killed_copy_and_stops_on_sigterm(
    tmp_path: Path,
) -> None:
    def process(name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bkctl", "autorecovery", "run", "-u", uri, "--id", name, *options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BKCTL_")}
        with (tmp_path / f"{name.partition(':')[0]}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    uri = f"sqlite://{tmp_path / 'metadata.db'}"

    with open_cluster(uri, create=True) as cluster:
        state = AutoRecoveryState(cluster.store)
        async with fakes_on(cluster, 4) as fakes, fakes.client() as client:
            ledger = (await write(client, 60, scope_id=7)).ledger
            copying = asyncio.Event()

            def stall(request: Any) -> bool:
                if isinstance(request, AddRequest) and request.entry_id > 40:
                    copying.set()
                    return True
                return False

            for bookie in fakes.bookies:
                bookie.hold = stall
            dies = process("dies:1", "--scopes-only")
            try:
                await lose(fakes, bookies_of(fakes, ledger)[0])
                await asyncio.wait_for(copying.wait(), LIMIT_S)
                assert [(lock.ledger, lock.owner) for lock in state.locks.list()] == [(ledger, "dies:1")]
                assert (state.election.votes(), state.election.votes(scoped=True)) == ((), ("dies:1",))
            finally:
                dies.kill()
                await asyncio.to_thread(dies.wait)
            for bookie in fakes.bookies:
                bookie.hold = lambda request: False
            finishes = process("finishes:1")
            try:
                await eventually(
                    lambda: not state.marks.has_marks() and state.election.was_held(), "the next one finishes"
                )
                await eventually(lambda: state.election.auditor() == "finishes:1", "it is the auditor")
                await assert_whole(client, [ledger])
            finally:
                finishes.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(finishes.wait, LIMIT_S) == 0, (tmp_path / "finishes.log").read_text()
            assert (state.election.votes(), state.election.votes(scoped=True), list(state.locks.list())) == ((), (), [])


def test_auto_recovery_beside_a_bookie_waits_for_the_store(tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    thread = AutoRecoveryThread(CONFIG.with_changes(metadata_service_uri=uri), "bookie:1")
    thread.stop()  # before it began
    thread.start()
    try:
        with open_cluster(uri, create=True) as cluster:
            election = AuditorElection(cluster.store)
            asyncio.run(eventually(lambda: election.auditor() == "bookie:1", "it begins when there is a cluster"))

            def values() -> dict[str, float]:
                return {each.name: each.value for each in thread.samples() if each.labels.get("scopes") != "other"}

            asyncio.run(eventually(lambda: values()["auditor_elected"] == 1, "and counts"))
            assert values()["replication_worker_NUM_ENTRIES_WRITTEN"] == 0
            thread.stop()
            assert election.votes() == ()
    finally:
        thread.stop()
