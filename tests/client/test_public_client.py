"""The client as programs use it: ids in every form, listings, watches, batches, deferred sync, misuse."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import uuid

import pytest
from client.fakes import Fault, turns
from support.waiting import LIMIT_S

from bkctl import BookKeeper, DigestType, LedgerId, LedgerState, Protocol, WriteFlag
from bkctl.client import writer as writing
from bkctl.client.bookies import BACK_OFF_S_MIN
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    DuplicateEntryId,
    IllegalOperation,
    LedgerClosed,
    LedgerFenced,
    LedgerNotFound,
    TooManyPending,
    Unauthorized,
    UsageError,
)
from bkctl.protocol.connection import SCOPE_PROBE
from bkctl.protocol.messages import (
    AddRequest,
    BatchReadRequest,
    ForceLedgerRequest,
    ReadLacRequest,
    ReadRequest,
    Status,
    WriteLacRequest,
)

BOTH_SCOPES = pytest.mark.parametrize("scope_id", [0, 7])


async def payloads(entries):
    return [entry.payload async for entry in entries]


# Ids.


async def test_ids_are_numbers_ledger_ids_or_uuids(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        number = uuid.UUID("00000000-0000-0007-0000-000000000005")
        async with await client.create_ledger_adv(number) as writer:
            assert (writer.ledger, writer.scope_id, writer.ledger_id) == (LedgerId(7, 5), 7, 5)
            await writer.add(b"a")
        for given in ({"ledger_id": 5, "ledger_scope_id": 7}, {"ledger_id": LedgerId(7, 5)}, {"ledger_id": number},
                      {"ledger_id": number, "ledger_scope_id": 7}):  # fmt: skip
            reader = await client.open_ledger(**given)
            assert await payloads(reader.read()) == [b"a"]
            assert (await client.get_ledger_metadata(**given)).state is LedgerState.CLOSED
        with pytest.raises(LedgerNotFound):
            await client.open_ledger(5)
        with pytest.raises(UsageError, match="scope 7, not in scope 3"):
            await client.open_ledger(number, ledger_scope_id=3)
        await client.delete_ledger(number)
        with pytest.raises(LedgerNotFound):
            await client.get_ledger_metadata(number)


@pytest.mark.parametrize("given", [-1, 1 << 64, "12", None, 1.5])
async def test_ids_out_of_range_and_of_other_types_are_refused(fake_cluster, given):
    async with fake_cluster(1) as cluster, cluster.client() as client:
        with pytest.raises(UsageError):
            await client.open_ledger(given)
        if given is not None:
            with pytest.raises(UsageError):
                await client.create_ledger_adv(given, ledger_scope_id=1)


async def test_a_uuid_is_refused_by_protocol_v2(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client(protocol=2) as client:
        assert client.protocol is Protocol.V2
        with pytest.raises(IllegalOperation, match="v2"):
            await client.create_ledger_adv(uuid.uuid4())


# Listings and watches.


async def test_ledgers_of_one_scope_or_all_are_listed(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ids = [LedgerId(0, 3), LedgerId(7, 1), LedgerId(7, 2)]
        for ledger in reversed(ids):
            await (await client.create_ledger_adv(ledger)).close()
        assert [each async for each in client.list_ledgers()] == ids[:1]
        assert [each async for each in client.list_ledgers(ledger_scope_id=7)] == ids[1:]
        assert [each async for each in client.list_ledgers(ledger_scope_id=None)] == ids


@BOTH_SCOPES
async def test_a_watch_yields_changes_and_ends_with_the_ledger(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        metadata = client.watch_ledger_metadata(writer.ledger)
        assert (await anext(metadata)).state is LedgerState.OPEN
        await writer.close()
        async with asyncio.timeout(LIMIT_S):
            assert (await anext(metadata)).state is LedgerState.CLOSED
            await client.delete_ledger(writer.ledger)
            with pytest.raises(LedgerNotFound):
                await anext(metadata)


async def test_a_watch_that_is_left_is_cancelled(fake_cluster, monkeypatch):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers, cancelled = cluster.cluster.ledgers, []
        watch = ledgers.watch

        def counted(*arguments):
            cancel = watch(*arguments)
            return lambda: (cancel(), cancelled.append(1))

        monkeypatch.setattr(ledgers, "watch", counted)
        writer = await client.create_ledger()
        async with contextlib.aclosing(client.watch_ledger_metadata(writer.ledger)) as metadata:
            await anext(metadata)
        waiting = asyncio.create_task(anext(client.watch_ledger_metadata(LedgerId(0, 99))))
        with pytest.raises(LedgerNotFound):
            await waiting
        assert cancelled == [1, 1]


# Reads.


@BOTH_SCOPES
async def test_reads_without_a_range_give_all_confirmed_entries(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        assert await payloads(writer.read()) == []
        for payload in (b"", bytearray(b"b"), memoryview(b"c")):
            await writer.add(payload)
        assert await payloads(writer.read()) == [b"", b"b", b"c"]
        assert await payloads(writer.read(2)) == [b"c"]
        assert await payloads(writer.read(3)) == []
        with pytest.raises(UsageError, match="beyond its last add confirmed"):
            writer.read(4)
        with pytest.raises(UsageError):
            writer.read(2, 1)
        reader = await client.open_ledger(writer.ledger)
        assert reader.last_add_confirmed == 1
        await writer.write_lac()
        assert await reader.read_last_add_confirmed() == reader.last_add_confirmed == 2
        await writer.close()
        assert await payloads(reader.read()) == [b"", b"b", b"c"]


@pytest.mark.parametrize(
    ("protocol", "scope_id", "write_quorum_size", "in_batches"),
    [(2, 0, 3, True), (2, 0, 2, False), (3, 0, 3, False), (3, 7, 3, False)],
)
async def test_batch_reads_give_entries_up_to_a_count_or_size(
    fake_cluster, protocol, scope_id, write_quorum_size, in_batches
):
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id, write_quorum_size=write_quorum_size)
        written = [b"%d" % number * 500 for number in range(10)]
        await writer.add_all(written)
        await writer.close()
        reader = await client.open_ledger(writer.ledger)
        for first, count in ((0, 4), (3, 1), (8, 99)):
            batch = await reader.batch_read(first, count)
            assert [(e.entry_id, e.payload) for e in batch] == [*enumerate(written)][first : first + count]
        assert 1 <= len(await reader.batch_read(0, 10, 1200)) < 10
        assert len(await reader.batch_read(0, 10, 1)) == 1
        with pytest.raises(UsageError):
            await reader.batch_read(10, 1)
        with pytest.raises(UsageError):
            await reader.batch_read(0, 0)
        received = [type(request) for bookie in cluster.bookies for request in bookie.received]
        assert (BatchReadRequest in received, ReadRequest in received) == (in_batches, not in_batches)


@pytest.mark.parametrize("fault", [Fault.DISCONNECT, Status.EIO, "damage", "later damage"])
async def test_a_batch_that_one_bookie_fails_comes_from_another(fake_cluster, fault):
    """Apache's bookies before 4.17 close a connection with a batch read: then entries are read one by one."""
    async with fake_cluster(3) as cluster, cluster.client(protocol=2) as client:
        writer = await client.create_ledger(write_quorum_size=3)
        await writer.add_all([b"0", b"1", b"2"])
        await writer.close()
        bookie = cluster.bookie(writer.metadata.last_fragment.bookies[0])
        if isinstance(fault, str):
            bookie.damage = lambda body: body[:-1] + b"?" if fault == "damage" or body.endswith(b"1") else body
        else:
            bookie.fault = lambda request: fault if type(request) is BatchReadRequest else None
        reader = await client.open_ledger(writer.ledger)
        got = [entry.payload for entry in await reader.batch_read(0, 3)]
        assert got == ([b"0"] if fault == "later damage" else [b"0", b"1", b"2"])


# Adds.


async def test_a_loop_that_never_waits_is_refused_before_memory_ends(fake_cluster, monkeypatch):
    monkeypatch.setattr(writing, "THROTTLE_COUNT", 50)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv()
        futures = []
        with pytest.raises(TooManyPending, match="100 adds in flight"):
            futures.extend(writer.add(b"a") for _ in range(1000))
        assert writer.pending_count == 100
        await writer.ready()
        assert writer.pending_count < 50
        await writer.flush()
        assert await writer.add(b"b") == 100

        # A hundred tasks that wait do not overrun it together.
        async def add():
            for _ in range(5):
                await writer.ready()
                assert writer.pending_count < 50
                await writer.add(b"c")

        await asyncio.gather(*(add() for _ in range(100)))
        # The entry that others wait for is always accepted.
        for entry_id in range(602, 702):
            writer.add(b"", entry_id=entry_id)
        with pytest.raises(TooManyPending):
            writer.add(b"", entry_id=702)
        writer.add(b"", entry_id=601)
        await writer.flush()
        await writer.close()
        assert writer.metadata.last_entry_id == 701


@BOTH_SCOPES
async def test_a_cancelled_add_leaves_nothing_pending(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        for bookie in cluster.bookies:
            bookie.hold = lambda request: type(request) is AddRequest
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.add(b"cancelled"), 0.05)
        for bookie in cluster.bookies:
            bookie.release()
        assert await writer.add(b"next") == 1
        assert writer.pending_count == 0
        await writer.close()
        assert await payloads(writer.read()) == [b"cancelled", b"next"]


@BOTH_SCOPES
async def test_deferred_sync_confirms_what_is_forced(fake_cluster, scope_id):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id, write_flags=WriteFlag.DEFERRED_SYNC)
        for number in range(4):
            assert await writer.add(b"%d" % number) == number
        assert (writer.last_add_confirmed, writer.last_add_pushed) == (-1, 3)
        assert await payloads(writer.read()) == []
        await writer.force()
        assert writer.last_add_confirmed == 3
        await writer.add(b"4")
        await writer.close()
        assert (writer.metadata.last_entry_id, writer.metadata.length) == (4, 5)
        adds = [r for bookie in cluster.bookies for r in bookie.received if type(r) is AddRequest]
        assert all(add.deferred_sync for add in adds)
        assert sum(type(r) is ForceLedgerRequest for bookie in cluster.bookies for r in bookie.received) == 6


async def test_deferred_sync_closes_without_entries_that_cannot_be_forced(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger(write_flags=WriteFlag.DEFERRED_SYNC)
        await writer.add(b"forced")
        await writer.force()
        await writer.add(b"lost")
        cluster.bookies[1].fault = lambda request: Status.EIO if type(request) is ForceLedgerRequest else None
        with pytest.raises(BkctlError, match="Force of ledger"):
            await writer.close()
        metadata = await client.get_ledger_metadata(writer.ledger)
        assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, 0, 6)


async def test_deferred_sync_does_not_move_to_another_bookie(fake_cluster):
    """The next bookie could not sync what the failed one acknowledged. Source: LedgerHandle.handleBookieFailure."""
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger(write_flags=WriteFlag.DEFERRED_SYNC)
        await writer.add(b"a")
        await writer.force()
        await cluster.bookie(writer.metadata.last_fragment.bookies[1]).stop()
        with pytest.raises(BookieUnavailable, match="deferred sync"):
            await asyncio.gather(writer.add(b"b"), writer.add(b"c"), writer.add(b"d"))
        with pytest.raises(BookieUnavailable, match="deferred sync"):
            await writer.close()
        assert len(cluster.metadata(writer.ledger).ensembles) == 1
        assert cluster.metadata(writer.ledger).last_entry_id == 0


async def test_deferred_sync_does_not_confirm_what_a_restart_may_have_lost(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=2, write_flags=WriteFlag.DEFERRED_SYNC)
        bookie = cluster.bookie(writer.metadata.last_fragment.bookies[1])

        async def restart():
            await bookie.stop()
            await bookie.start()
            await turns()

        await writer.add(b"forced")
        await writer.force()
        await restart()
        await writer.add(b"forced")
        await writer.force()
        assert writer.last_add_confirmed == 1
        await writer.add(b"lost")
        await restart()
        for _ in range(2):
            with pytest.raises(BookieUnavailable, match="restart"):
                await writer.force()
        with pytest.raises(BookieUnavailable, match="restart"):
            await writer.close()
        assert cluster.metadata(writer.ledger).last_entry_id == 1


async def test_a_connection_lost_while_it_is_asked_for_scopes_may_have_lost_entries(fake_cluster):
    def restart(request):
        if getattr(request, "ledger", None) != SCOPE_PROBE:
            return None
        bookie.fault = lambda request: None
        bookie.ledgers.clear()
        return Fault.DISCONNECT

    async with fake_cluster(1) as cluster, cluster.client() as client:
        bookie = cluster.bookies[0]
        writer = await client.create_ledger(
            ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, write_flags=WriteFlag.DEFERRED_SYNC
        )
        for _ in range(5):
            await writer.add(b"lost")
        bookie.fault = restart
        with pytest.raises(BookieUnavailable):
            await client.pool.channel("b0").send(ReadLacRequest(LedgerId(7, 1)), scoped=True)
        await asyncio.sleep(BACK_OFF_S_MIN)
        with pytest.raises(BookieUnavailable, match="restart"):
            await writer.force()


async def test_all_waiters_of_a_handle_go_on_with_changed_metadata(fake_cluster):
    async with fake_cluster(2) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=2)
        await writer.add(b"a")
        reader = await client.open_ledger(writer.ledger)

        async def all_ask():
            async with asyncio.timeout(LIMIT_S):
                while any(sum(r.previous_lac is not None for r in b.received if type(r) is ReadRequest) < 2
                          for b in cluster.bookies):  # fmt: skip
                    await turns()
            await turns()
            for bookie in cluster.bookies:
                bookie.received.clear()

        waiting = [asyncio.create_task(reader.wait_for_lac(0, LIMIT_S)) for _ in range(2)]
        await all_ask()
        found = cluster.cluster.ledgers.read(writer.ledger)
        changed = found.metadata._replace(custom_metadata={"a": b"b"})
        cluster.cluster.ledgers.write(writer.ledger, changed, found.version)
        await all_ask()
        await writer.close()
        assert await asyncio.gather(*waiting) == [0, 0]
        await reader.close()


async def test_deferred_sync_needs_protocol_v3(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client(protocol=Protocol.V2) as client:
        with pytest.raises(IllegalOperation, match="DEFERRED_SYNC"):
            await client.create_ledger(write_flags=WriteFlag.DEFERRED_SYNC)
        assert [each async for each in client.list_ledgers()] == []


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_the_last_add_confirmed_is_written_regularly(fake_cluster, protocol):
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol, explicit_lac_interval=5) as client:
        writer = await client.create_ledger()
        async with await client.open_ledger(writer.ledger) as reader, asyncio.timeout(LIMIT_S):
            await writer.add(b"a")
            assert await reader.wait_for_lac(-1, LIMIT_S) == 0
        await turns()
        assert sum(type(r) is WriteLacRequest for bookie in cluster.bookies for r in bookie.received) == 2
        await writer.close()


# Ends.


async def test_a_second_opener_fences_the_writer(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as first, cluster.client() as second:
        writer = await first.create_ledger_adv(ledger_scope_id=7, password=b"secret", digest_type=DigestType.HMAC)
        await writer.add(b"a")
        with pytest.raises(Unauthorized):
            await second.open_ledger(writer.ledger, password=b"wrong", recovery=True)
        assert await writer.add(b"b") == 1
        reader = await second.open_ledger(writer.ledger, password=b"secret", recovery=True)
        assert reader.is_closed
        assert await payloads(reader.read()) == [b"a", b"b"]
        with pytest.raises(LedgerFenced):
            await writer.add(b"c")
        with pytest.raises(LedgerFenced):
            await writer.close()


async def test_handles_and_clients_are_closed_twice_and_not_used_after(fake_cluster):
    async with fake_cluster(3) as cluster:
        client = cluster.client()
        writer = await client.create_ledger_adv()
        await writer.add(b"a")
        with pytest.raises(DuplicateEntryId):
            writer.add(b"a", entry_id=0)
        await writer.close()
        await writer.close()
        with pytest.raises(LedgerClosed):
            writer.add(b"b")
        with pytest.raises(LedgerClosed):
            await writer.add_all([b"b"])
        reader = await client.open_ledger(writer.ledger)
        await reader.close()
        await reader.close()
        await client.close()
        await client.close()
        for call in (client.create_ledger, lambda: client.open_ledger(0), lambda: anext(client.list_ledgers())):
            with pytest.raises(IllegalOperation, match="closed"):
                await call()
        with pytest.raises(BookieUnavailable, match="client is closed"):
            await payloads(reader.read())


async def test_an_entry_over_the_limit_of_frames_is_refused_and_changes_nothing(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        with pytest.raises(UsageError, match="does not fit"):
            writer.add(bytes(5 << 20))
        assert await writer.add(b"") == 0
        await writer.close()
        assert writer.metadata.length == 0


def test_a_client_of_a_uri_connects_and_closes_its_store(tmp_path, run):
    from bkctl.metadata.cluster import open_cluster

    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()

    async def use():
        client = BookKeeper(uri)
        with pytest.raises(IllegalOperation, match="async with"):
            await client.create_ledger()
        async with client:
            assert [each async for each in client.list_ledgers()] == []
            cluster = client.cluster
        with pytest.raises(IllegalOperation, match="closed"):
            await client.open_ledger(1)
        with pytest.raises(BkctlError):
            cluster.ledgers.read(LedgerId(0, 1))
        return client

    client = run(use())

    async def use_again():
        with pytest.raises(IllegalOperation):
            await client.open_ledger(1)
        async with BookKeeper("sqlite:///nowhere/at/all.db"):
            raise AssertionError

    with pytest.raises(BkctlError, match="nowhere"):
        run(use_again())


def test_another_event_loop_is_refused(fake_cluster, run):
    async def make():
        async with fake_cluster(3) as cluster:
            client = cluster.client()
            writer = await client.create_ledger()
            await writer.add(b"a")

            async def misuse():
                with pytest.raises(IllegalOperation, match="another event loop"):
                    await client.open_ledger(writer.ledger)
                with pytest.raises(IllegalOperation, match="another event loop"):
                    writer.add(b"b")
                with pytest.raises(IllegalOperation, match="another event loop"):
                    await writer.add_all([b"b"])

            await asyncio.to_thread(asyncio.run, misuse())
            await writer.close()
            await client.close()

    run(make())


def _use_in_child(client, results):
    async def use():
        try:
            await client.open_ledger(0)
        except IllegalOperation as error:
            results.put(str(error))

    asyncio.run(use())


async def test_a_client_of_before_a_fork_is_refused_in_the_child(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        await (await client.create_ledger()).close()
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=_use_in_child, args=(client, results))
        child.start()
        await asyncio.to_thread(child.join)
        assert "another event loop" in results.get()
