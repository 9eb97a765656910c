"""Cases of BookKeeper's own client tests, for our client beside our bookies, Apache's, and both mixed.

Source of the cases: TestFencing, LedgerRecoveryTest, LedgerRecovery2Test, TestPiggybackLAC, DeferredSyncTest,
BookieWriteLedgerTest, TestDelayEnsembleChange, TestSpeculativeRead, TestBatchedRead, ListLedgersTest.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from support.mixed_clusters import KINDS, SomeCluster
from support.servers import Java, ZooKeeperServer

from bkctl import BookKeeper, WriteFlag, WriteHandle
from bkctl.client.verify import ReplicaState, verify_entries
from bkctl.errors import (
    BookieUnavailable,
    DuplicateEntryId,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    Unauthorized,
    Unreachable,
    UsageError,
)
from bkctl.ids import LedgerId
from bkctl.protocol.messages import Protocol

pytestmark = pytest.mark.java

#: Three bookies have each entry, two acknowledge it.
THREE: dict[str, Any] = {"ensemble_size": 3, "write_quorum_size": 3, "ack_quorum_size": 2}
#: Long enough for bookies that are up, beside busy loops; short enough to wait for those that are suspended.
SHORT_S = 4.0


@pytest.fixture(scope="module", params=KINDS)
def _bookies(
    request: pytest.FixtureRequest, java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SomeCluster]:
    cluster = SomeCluster(
        request.param, java, zookeeper, tmp_path_factory.mktemp(request.param), {"zkTimeout": 2000}
    )  # fmt: skip
    yield cluster
    cluster.kill()


@pytest.fixture
def bookies(_bookies: SomeCluster) -> SomeCluster:
    """Four bookies of one kind, all up; shared by the tests of this module."""
    _bookies.ensure_up()
    return _bookies


@pytest.fixture
async def client(bookies: SomeCluster) -> AsyncIterator[BookKeeper]:
    async with BookKeeper(bookies.metadata_uri) as client:
        yield client


def payload(entry_id: int) -> bytes:
    return b"%d " % entry_id * (1 + entry_id % 50)


async def add(writer: WriteHandle, count: int) -> None:
    """Add entries and wait until all are acknowledged."""
    first = writer.last_add_pushed + 1
    await asyncio.gather(*(writer.add(payload(entry_id)) for entry_id in range(first, first + count)))


async def check_whole(client: BookKeeper, ledger: LedgerId, last: int) -> None:
    """The closed ledger ends at `last`; each entry reads as written, and is whole on an ack quorum at least.

    A bookie that is slower than the others may have been fenced before their entries came to it.
    """
    reader = await client.open_ledger(ledger)
    assert reader.is_closed
    assert reader.last_add_confirmed == last
    found = [(entry.entry_id, entry.payload) async for entry in reader.read()]
    assert found == [(entry_id, payload(entry_id)) for entry_id in range(last + 1)]
    assert reader.length == sum(len(payload(entry_id)) for entry_id in range(last + 1))
    async for check in verify_entries(reader):
        states = [replica.state for replica in check.replicas]
        assert states.count(ReplicaState.OK) >= reader.metadata.ack_quorum_size, check
        assert set(states) <= {ReplicaState.OK, ReplicaState.MISSING}, check


# --- fencing ---------------------------------------------------------------------------------------------------------


async def test_only_an_opener_with_recovery_fences(client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE)
    await add(writer, 20)
    reader = await client.open_ledger(writer.ledger)
    assert not reader.is_closed
    await add(writer, 20)
    taken = await client.open_ledger(writer.ledger, recovery=True)
    assert taken.last_add_confirmed == 39
    with pytest.raises(LedgerFenced):
        await writer.add(payload(40))
    await check_whole(client, writer.ledger, 39)


async def test_openers_that_race_agree_on_the_end_of_a_busy_ledger(bookies: SomeCluster, client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE)
    await add(writer, 10)

    async def write() -> None:
        while True:
            await add(writer, 5)

    writing = asyncio.create_task(write())
    async with BookKeeper(bookies.metadata_uri) as other:
        openers = [(client, other)[number % 2].open_ledger(writer.ledger, recovery=True) for number in range(6)]
        readers = await asyncio.gather(*openers)
    with pytest.raises(LedgerFenced):
        await writing
    ends = {(reader.last_add_confirmed, reader.length) for reader in readers}
    assert len(ends) == 1
    assert readers[0].last_add_confirmed >= writer.last_add_confirmed
    await check_whole(client, writer.ledger, readers[0].last_add_confirmed)


async def test_a_wrong_password_fences_nothing(client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE, password=b"right")
    await add(writer, 5)
    with pytest.raises(Unauthorized):
        await client.open_ledger(writer.ledger, password=b"wrong", recovery=True)
    await add(writer, 5)
    await writer.close()
    assert writer.metadata.last_entry_id == 9


async def test_bookies_remember_a_fence_when_killed(bookies: SomeCluster, client: BookKeeper) -> None:
    writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
    await add(writer, 10)
    ensemble = writer.metadata.last_fragment.bookies
    await client.open_ledger(writer.ledger, recovery=True)
    for bookie_id in ensemble:
        bookies.by_id(bookie_id).kill()
    await asyncio.to_thread(bookies.ensure_up)
    with pytest.raises(LedgerFenced):
        await writer.add(payload(10))
    await check_whole(client, writer.ledger, 9)


SLEEPER = """
import asyncio, sys
from bkctl import BookKeeper

async def main():
    async with BookKeeper(sys.argv[1]) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
        acknowledged = 0
        try:
            while True:
                await writer.add(b"%d " % acknowledged * (1 + acknowledged % 50))
                acknowledged += 1
                if acknowledged == 20:
                    print(writer.ledger_id, flush=True)
        except Exception as error:
            print(type(error).__name__, acknowledged, flush=True)

asyncio.run(main())
"""


async def test_a_writer_that_sleeps_through_its_fencing_loses_nothing(bookies: SomeCluster, client: BookKeeper) -> None:
    command = [sys.executable, "-c", SLEEPER, bookies.metadata_uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            ledger_id = int(await asyncio.to_thread(writer.stdout.readline))
            os.kill(writer.pid, signal.SIGSTOP)
            reader = await client.open_ledger(ledger_id, recovery=True)
            os.kill(writer.pid, signal.SIGCONT)
            error, acknowledged = (await asyncio.to_thread(writer.stdout.readline)).split()
        finally:
            writer.kill()
    assert error == "LedgerFenced"
    assert reader.last_add_confirmed + 1 >= int(acknowledged) >= 20
    await check_whole(client, reader.ledger, reader.last_add_confirmed)


async def test_a_ledger_deleted_while_it_is_written_is_gone(client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE)
    await add(writer, 5)
    reader = await client.open_ledger(writer.ledger)
    await client.delete_ledger(writer.ledger)
    await add(writer, 5)  # bookies learn of it when they collect garbage
    with pytest.raises(LedgerNotFound):
        await writer.close()
    for recovery in (False, True):
        with pytest.raises(LedgerNotFound):
            await client.open_ledger(writer.ledger, recovery=recovery)
    with pytest.raises(LedgerNotFound):
        await client.delete_ledger(writer.ledger)
    with pytest.raises(LedgerNotFound):
        await anext(reader.tail(5_000))
    await reader.close()


async def test_fencing_and_deleting_race(client: BookKeeper) -> None:
    for _ in range(5):
        writer = await client.create_ledger(**THREE)
        await add(writer, 3)
        opened, deleted = await asyncio.gather(
            client.open_ledger(writer.ledger, recovery=True), client.delete_ledger(writer.ledger),
            return_exceptions=True,
        )  # fmt: skip
        assert deleted is None
        assert not isinstance(opened, BaseException) or isinstance(opened, LedgerNotFound), opened
        with pytest.raises(LedgerNotFound):
            await client.get_ledger_metadata(writer.ledger)


# --- recovery --------------------------------------------------------------------------------------------------------


async def test_empty_ledgers_are_recovered_and_recovered_again(client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE)
    for _ in range(2):
        reader = await client.open_ledger(writer.ledger, recovery=True)
        assert (reader.last_add_confirmed, reader.length, reader.is_closed) == (-1, 0, True)
        assert [entry async for entry in reader.read()] == []
    with pytest.raises(LedgerFenced):
        await writer.add(b"late")


async def test_recovery_beside_a_suspended_bookie_keeps_all_that_is_acknowledged(
    bookies: SomeCluster, client: BookKeeper
) -> None:
    writer = await client.create_ledger(**THREE)
    await add(writer, 50)
    with bookies.suspended(writer.metadata.last_fragment.bookies[1]):
        await add(writer, 20)
        async with BookKeeper(bookies.metadata_uri, timeout_s=SHORT_S) as other:
            reader = await other.open_ledger(writer.ledger, recovery=True)
    assert reader.last_add_confirmed == 69
    with pytest.raises(LedgerFenced):
        await writer.add(b"late")


async def test_recovery_with_too_few_bookies_fails_and_succeeds_later(bookies: SomeCluster, client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE)
    await add(writer, 10)
    with bookies.suspended(*writer.metadata.last_fragment.bookies[:2]):
        async with BookKeeper(bookies.metadata_uri, timeout_s=SHORT_S) as other:
            with pytest.raises(Unreachable):
                await other.open_ledger(writer.ledger, recovery=True)
        assert (await client.get_ledger_metadata(writer.ledger)).state.name == "IN_RECOVERY"
    await client.open_ledger(writer.ledger, recovery=True)
    await check_whole(client, writer.ledger, 9)


# --- writes and ensemble changes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [Protocol.V2, Protocol.V3], ids=["v2", "v3"])
async def test_a_batch_outlives_a_killed_bookie(bookies: SomeCluster, protocol: Protocol) -> None:
    async with BookKeeper(bookies.metadata_uri, protocol=protocol) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=2, ack_quorum_size=2)
        futures = [writer.add(payload(entry_id)) for entry_id in range(300)]
        await futures[50]
        bookies.by_id(writer.metadata.last_fragment.bookies[0]).kill()
        futures += [writer.add(payload(entry_id)) for entry_id in range(300, 600)]
        assert await asyncio.gather(*futures) == list(range(600))
        await writer.close()
        assert len(writer.metadata.ensembles) >= 2
        await asyncio.to_thread(bookies.ensure_up)
        reader = await client.open_ledger(writer.ledger)
        assert [entry.entry_id async for entry in reader.read()] == list(range(600))
        await check_whole(client, writer.ledger, 599)


async def test_a_suspended_bookie_beyond_the_ack_quorum_delays_no_writer(
    bookies: SomeCluster, client: BookKeeper
) -> None:
    writer = await client.create_ledger(**THREE)
    with bookies.suspended(writer.metadata.last_fragment.bookies[2]):
        await add(writer, 200)
        assert len(writer.metadata.ensembles) == 1
        assert writer.last_add_confirmed == 199
    await writer.close()
    assert writer.metadata.last_entry_id == 199


async def test_a_suspended_bookie_of_the_ack_quorum_is_replaced(bookies: SomeCluster) -> None:
    async with BookKeeper(bookies.metadata_uri, timeout_s=SHORT_S) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
        await add(writer, 10)
        slow = writer.metadata.last_fragment.bookies[1]
        with bookies.suspended(slow):
            await add(writer, 10)
            assert slow not in writer.metadata.last_fragment.bookies
            assert writer.metadata.last_fragment.first_entry_id == 10
        await writer.close()
    async with BookKeeper(bookies.metadata_uri) as client:
        await check_whole(client, writer.ledger, 19)


async def test_adds_out_of_order_with_a_gap_outlive_a_killed_bookie(bookies: SomeCluster, client: BookKeeper) -> None:
    writer = await client.create_ledger_adv(ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
    futures = {entry_id: writer.add(payload(entry_id), entry_id=entry_id) for entry_id in (3, 1, 6, 0, 5)}
    await futures[1]
    bookies.by_id(writer.metadata.last_fragment.bookies[1]).kill()
    with pytest.raises(DuplicateEntryId):
        writer.add(b"again", entry_id=0)
    with pytest.raises(DuplicateEntryId):
        writer.add(b"again", entry_id=5)
    futures[2] = writer.add(payload(2), entry_id=2)
    await futures[3]
    assert not futures[5].done()
    await writer.close()  # entry 4 never comes
    assert writer.metadata.last_entry_id == 3
    for entry_id in (5, 6):
        with pytest.raises(LedgerClosed):
            await futures[entry_id]
    await asyncio.to_thread(bookies.ensure_up)
    await check_whole(client, writer.ledger, 3)


# --- the last add confirmed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [Protocol.V2, Protocol.V3], ids=["v2", "v3"])
async def test_an_entry_carries_the_last_add_confirmed_before_it(bookies: SomeCluster, protocol: Protocol) -> None:
    async with BookKeeper(bookies.metadata_uri, protocol=protocol) as client:
        writer = await client.create_ledger(**THREE)
        for entry_id in range(10):
            await writer.add(payload(entry_id))
        reader = await client.open_ledger(writer.ledger)
        assert reader.last_add_confirmed == 8
        with pytest.raises(UsageError, match="beyond its last add confirmed"):
            reader.read(0, 9)
        assert [entry.payload async for entry in reader.read_unconfirmed(9, 9)] == [payload(9)]
        await writer.write_lac()
        if protocol is Protocol.V3:  # v2 cannot ask for it, as in Java's client; a wait is always over v3
            assert await reader.read_last_add_confirmed() == 9
        assert await reader.wait_for_lac(8, 300) == 9
        await writer.add(payload(10))
        await writer.close()
        assert await reader.wait_for_lac(9, 300) == 10
        await reader.close()


async def test_a_tail_follows_a_writer_over_a_killed_bookie_to_the_close(
    bookies: SomeCluster, client: BookKeeper
) -> None:
    writer = await client.create_ledger(ensemble_size=3, write_quorum_size=2, ack_quorum_size=2)

    async def write() -> None:
        for entry_id in range(60):
            await writer.add(payload(entry_id))
            if entry_id == 20:
                bookies.by_id(writer.metadata.last_fragment.bookies[1]).kill()
        await writer.close()

    writing = asyncio.create_task(write())
    async with await client.open_ledger(writer.ledger) as reader:
        found = [(entry.entry_id, entry.payload) async for entry in reader.tail()]
    await writing
    assert found == [(entry_id, payload(entry_id)) for entry_id in range(60)]


async def test_deferred_sync_confirms_nothing_before_a_force(bookies: SomeCluster, client: BookKeeper) -> None:
    writer = await client.create_ledger(**THREE, write_flags=WriteFlag.DEFERRED_SYNC)
    await add(writer, 10)
    assert (writer.last_add_pushed, writer.last_add_confirmed) == (9, -1)
    reader = await client.open_ledger(writer.ledger)
    assert reader.last_add_confirmed == -1
    await writer.force()
    assert writer.last_add_confirmed == 9
    await add(writer, 1)
    assert await reader.read_last_add_confirmed() == 9
    await writer.close()
    await check_whole(client, writer.ledger, 10)
    with pytest.raises(LedgerClosed):
        await writer.force()
    with pytest.raises(LedgerClosed):
        await writer.write_lac()


async def test_a_force_needs_each_bookie_of_the_ensemble(bookies: SomeCluster) -> None:
    async with BookKeeper(bookies.metadata_uri, timeout_s=SHORT_S) as client:
        writer = await client.create_ledger(**THREE, write_flags=WriteFlag.DEFERRED_SYNC)
        await add(writer, 5)
        with bookies.suspended(writer.metadata.last_fragment.bookies[2]):
            with pytest.raises(Unreachable):
                await writer.force()
            assert writer.last_add_confirmed == -1


# --- reads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "ensemble_size"), [(Protocol.V2, 2), (Protocol.V2, 3), (Protocol.V3, 3)], ids=["v2-2", "v2-3", "v3-3"]
)
async def test_batches_and_ranges_are_read_beside_a_dead_and_a_suspended_bookie(
    bookies: SomeCluster, protocol: Protocol, ensemble_size: int
) -> None:
    async with BookKeeper(bookies.metadata_uri, protocol=protocol, timeout_s=SHORT_S) as client:
        writer = await client.create_ledger(ensemble_size=ensemble_size, write_quorum_size=2, ack_quorum_size=2)
        await add(writer, 40)
        await writer.close()
        victim = writer.metadata.last_fragment.bookies[0]

        async def check() -> None:
            reader = await client.open_ledger(writer.ledger)
            assert [entry.entry_id async for entry in reader.read()] == list(range(40))
            batch = await reader.batch_read(5, 20)
            assert [(entry.entry_id, entry.payload) for entry in batch] == [(n, payload(n)) for n in range(5, 25)]
            assert len(await reader.batch_read(35, 20)) == 5

        with bookies.suspended(victim):
            await check()
        bookies.by_id(victim).kill()
        await check()


async def test_an_entry_without_a_replica_is_an_error_after_the_entries_before_it(
    bookies: SomeCluster, client: BookKeeper
) -> None:
    writer = await client.create_ledger(ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
    await add(writer, 10)
    await writer.close()
    bookies.by_id(writer.metadata.last_fragment.bookies[1]).kill()
    reader = await client.open_ledger(writer.ledger)
    entries = reader.read()
    assert (await anext(entries)).entry_id == 0
    with pytest.raises(BookieUnavailable):
        await anext(entries)


async def test_lists_of_ledgers_are_whole_while_ledgers_are_deleted(client: BookKeeper) -> None:
    kept, gone = [], []
    for number in range(20):
        async with await client.create_ledger(**THREE) as writer:
            (gone if number % 2 else kept).append(writer.ledger)
    listed = []
    async for ledger in client.list_ledgers():
        if gone:
            await client.delete_ledger(gone.pop())
        listed.append(ledger)
    assert set(kept) <= set(listed)
    assert len(set(listed)) == len(listed)
    for ledger in gone:
        await client.delete_ledger(ledger)
    assert set(kept) <= {ledger async for ledger in client.list_ledgers()}
