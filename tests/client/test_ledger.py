"""The client against fake bookies: what it writes, reads, refuses, and does when bookies fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading

import pytest
from client.fakes import FakeLedger, Fault, turns
from support.waiting import LIMIT_S

from bkctl.config import ClientConfig
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    DigestMismatch,
    DuplicateEntryId,
    EntryNotFound,
    IllegalOperation,
    LedgerClosed,
    LedgerExists,
    LedgerFenced,
    LedgerNotFound,
    MetadataVersionConflict,
    NotEnoughBookies,
    ProtocolError,
    TimedOut,
    Unauthorized,
    UsageError,
)
from bkctl.formats.entry import DigestManager, DigestType, read_entry_header
from bkctl.formats.metadata import Fragment, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.store import RACKS
from bkctl.protocol.messages import (
    AddRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    ReadResponse,
    Status,
    WriteLacRequest,
)

PAYLOADS = [b"", b"a", b"hello", bytes(1000), *(f"entry {i}".encode() * i for i in range(4, 60))]


async def collect(entries):
    return [entry async for entry in entries]


async def collect_until(error, entries, match=None):
    """The entries before the one at which `entries` raises `error`."""
    got = []
    with pytest.raises(error, match=match):
        await _extend(got, entries)
    return got


async def _extend(got, entries):
    async for entry in entries:
        got.append(entry)


async def write(client, payloads=PAYLOADS, **options):
    options = {"ledger_scope_id": 0, **options}
    writer = await client.create_ledger_adv(**options)
    for payload in payloads:
        await writer.ready()
        writer.add(payload)
    await writer.close()
    return writer


@pytest.mark.parametrize("digest_type", list(DigestType))
@pytest.mark.parametrize(("protocol", "scope_id"), [(Protocol.V2, 0), (Protocol.V3, 0), (Protocol.V3, 7)])
async def test_written_entries_are_read_back(fake_cluster, digest_type, protocol, scope_id):
    async with fake_cluster(4) as cluster, cluster.client(protocol=protocol) as client:
        writer = await write(
            client,
            digest_type=digest_type,
            password=b"secret",
            ledger_scope_id=scope_id,
            ensemble_size=4,
            write_quorum_size=3,
            ack_quorum_size=2,
            custom_metadata={"application": b"test"},
        )
        assert (writer.scope_id, writer.is_closed) == (scope_id, True)
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, password=b"secret")
        assert reader.last_add_confirmed == len(PAYLOADS) - 1
        assert reader.length == sum(map(len, PAYLOADS))
        entries = await collect(reader.read(0, reader.last_add_confirmed))
        assert [entry.payload for entry in entries] == PAYLOADS
        assert [entry.entry_id for entry in entries] == list(range(len(PAYLOADS)))
        assert {entry.format_version for entry in entries} == {2 if scope_id else 1}
        assert [entry.length for entry in entries] == list(itertools.accumulate(map(len, PAYLOADS)))
        assert [entry.payload for entry in await collect(reader.read(7, 9, verify=False))] == PAYLOADS[7:10]
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.password, metadata.digest_type) == (b"secret", digest_type)
        assert metadata.custom_metadata == {"application": b"test"}
        for position, bookie_id in enumerate(metadata.ensembles[0].bookies):
            held = cluster.bookie(bookie_id).ledgers[writer.ledger].entries
            assert set(held) == {e for e in range(len(PAYLOADS)) if (position - e) % 4 < 3}
        await client.delete_ledger(writer.ledger_id, ledger_scope_id=scope_id)
        with pytest.raises(LedgerNotFound):
            await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id)


async def test_entry_bytes_are_the_digest_managers(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client() as client:
        sizes = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}
        writer = await client.create_ledger(**sizes, digest_type=DigestType.HMAC, password=b"pw")
        assert await writer.add(b"hello") == 0
        assert await writer.add(memoryview(b"world!")) == 1
        digest = DigestManager(writer.ledger, DigestType.HMAC, b"pw")
        held = cluster.bookies[0].ledgers[writer.ledger]
        assert held.master_key == digest.master_key
        assert held.entries[0] == digest.seal(0, -1, 5, b"hello") + b"hello"
        assert held.entries[1] == digest.seal(1, 0, 11, b"world!") + b"world!"


async def test_same_ledger_id_in_two_scopes_never_mixes(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        for scope_id in (0, 7, 2**64 - 1):
            await write(client, [b"of scope %d" % scope_id], ledger_id=5, ledger_scope_id=scope_id)
        for scope_id in (0, 7, 2**64 - 1):
            reader = await client.open_ledger(5, ledger_scope_id=scope_id)
            assert [e.payload async for e in reader.read(0, 0)] == [b"of scope %d" % scope_id]
        await client.delete_ledger(5, ledger_scope_id=7)
        assert (await client.open_ledger(5)).last_add_confirmed == 0
        assert (await client.open_ledger(5, ledger_scope_id=2**64 - 1)).last_add_confirmed == 0


async def test_ids_are_generated_or_given_and_never_taken_twice(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        first, second = await client.create_ledger(), await client.create_ledger()
        assert first.scope_id == second.scope_id == 0
        assert first.ledger_id != second.ledger_id
        scoped = await client.create_ledger_adv(ledger_scope_id=9)
        assert scoped.scope_id == 9
        given = await client.create_ledger_adv(2**64 - 1, ledger_scope_id=9)
        assert given.ledger == LedgerId(9, 2**64 - 1)
        with pytest.raises(LedgerExists):
            await client.create_ledger_adv(2**64 - 1, ledger_scope_id=9)
        with pytest.raises(UsageError):
            await client.create_ledger_adv(2**63)
        with pytest.raises(UsageError):
            await client.create_ledger(ensemble_size=2, write_quorum_size=3)
        with pytest.raises(UsageError):
            await client.create_ledger(ack_quorum_size=0)
        with pytest.raises(NotEnoughBookies):
            await client.create_ledger(ensemble_size=4)


async def test_the_last_id_of_scope_0_is_refused_where_apache_bookies_would_delete_everything(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        handle = await client.create_ledger_adv(2**63 - 1)
        assert handle.ledger_id == 2**63 - 1
        await client.delete_ledger(2**63 - 1)
        await cluster.add_bookie(scopes=False)
        with pytest.raises(UsageError, match="delete every ledger"):
            await client.create_ledger_adv(2**63 - 1)
        await client.create_ledger_adv(2**63 - 1, ledger_scope_id=1)


@pytest.mark.parametrize("cancellation_count", [1, 3])
async def test_cancelled_creation_leaves_no_ledger(fake_cluster, monkeypatch, cancellation_count):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = cluster.cluster.ledgers
        is_created, may_return = threading.Event(), threading.Event()
        create = ledgers.create

        def create_slowly(*arguments):
            version = create(*arguments)
            is_created.set()
            may_return.wait(LIMIT_S)
            return version

        monkeypatch.setattr(ledgers, "create", create_slowly)
        creating = asyncio.create_task(client.create_ledger())
        await asyncio.to_thread(is_created.wait, LIMIT_S)
        for _ in range(cancellation_count):
            creating.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        may_return.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert list(ledgers.ledgers(None)) == []


async def test_v2_refuses_a_scope_before_a_byte_is_sent(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client(protocol=Protocol.V2) as client:
        for attempt in (
            client.create_ledger_adv(1, ledger_scope_id=7),
            client.open_ledger(1, ledger_scope_id=7),
            client.delete_ledger(1, ledger_scope_id=7),
        ):
            with pytest.raises(IllegalOperation):
                await attempt
        assert list(cluster.cluster.ledgers.ledgers(None)) == []
        assert all(not bookie.received for bookie in cluster.bookies)


async def test_open_checks_the_password(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, password=b"right")
        with pytest.raises(Unauthorized):
            await client.open_ledger(writer.ledger_id, password=b"wrong")
        with pytest.raises(Unauthorized):
            await client.open_ledger(writer.ledger_id)
        reader = await client.open_ledger(writer.ledger_id, password=None)
        assert len(await collect(reader.read(0, reader.last_add_confirmed))) == len(PAYLOADS)


async def test_reads_beyond_the_last_add_confirmed_are_refused_unless_asked_for(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for payload in (b"one", b"two", b"three"):
            await writer.add(payload)
        reader = await client.open_ledger(writer.ledger_id)
        assert reader.last_add_confirmed == 1
        assert not reader.is_closed
        with pytest.raises(UsageError):
            reader.read(0, 2)
        with pytest.raises(UsageError):
            reader.read(1, 0)
        assert [e.payload async for e in reader.read_unconfirmed(0, 2)] == [b"one", b"two", b"three"]
        got = await collect_until(EntryNotFound, reader.read_unconfirmed(1, 9))
        assert [entry.payload for entry in got] == [b"two", b"three"]
        await writer.write_lac()
        assert await reader.wait_for_lac(1, 5) == 2
        await writer.close()
        assert await reader.wait_for_lac(2, 5) == 2
        assert reader.is_closed


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_explicit_lac_alone_is_seen(fake_cluster, protocol):
    """A bookie with an explicit LAC and no entry answers EIO, and gives the LAC."""

    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=1, ack_quorum_size=1)
        await writer.add(b"only on the first")
        for bookie in cluster.bookies:
            bookie._WriteLacRequest(
                WriteLacRequest(writer.ledger, 0, b"", writer._access.digest.seal_lac(0)), lambda _: None
            )
        reader = await client.open_ledger(writer.ledger_id)
        assert reader.last_add_confirmed == (0 if protocol is Protocol.V3 else -1)


async def test_explicit_lac_goes_over_v3_in_v2_mode(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client(protocol=Protocol.V2) as client:
        writer = await client.create_ledger()
        await writer.add(b"x")
        await writer.write_lac()
        assert sum(isinstance(r, WriteLacRequest) for b in cluster.bookies for r in b.received) == 2
        with pytest.raises(IllegalOperation):
            await writer.force()


async def test_force_asks_every_bookie(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.add(b"x")
        await writer.force()
        cluster.bookies[1].fault = lambda request: Status.EIO
        with pytest.raises(Exception, match="EIO"):
            await writer.force()


async def test_adds_complete_in_order_whatever_order_the_bookies_answer_in(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        chance = random.Random(5)
        for bookie in cluster.bookies:
            bookie.hold = lambda request: isinstance(request, AddRequest)
        done: list[int] = []
        futures = [writer.add(b"%d" % i) for i in range(50)]
        for future in futures:
            future.add_done_callback(lambda f: done.append(f.result()))
        while sum(len(bookie.held) for bookie in cluster.bookies) < 100:
            await asyncio.sleep(0.001)
        assert not done
        for bookie in cluster.bookies:
            chance.shuffle(bookie.held)
            bookie.release()
        assert await asyncio.gather(*futures) == list(range(50))
        assert done == list(range(50))
        assert writer.last_add_confirmed == 49


async def test_ready_waits_while_too_much_is_in_flight(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.client.writer.THROTTLE_COUNT", 10)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for bookie in cluster.bookies:
            bookie.hold = lambda request: isinstance(request, AddRequest)
        for _ in range(10):
            await writer.ready()
            writer.add(b"x")
        waiting = asyncio.create_task(writer.ready())
        while not cluster.bookies[0].held:
            await asyncio.sleep(0.001)
        assert not waiting.done()
        for bookie in cluster.bookies:
            bookie.release()
            bookie.hold = lambda request: False
        await waiting
        assert writer.pending_count <= 5


async def test_caller_chosen_entry_ids(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(77)
        later = writer.add(b"second", entry_id=1)
        await asyncio.sleep(0.05)
        assert not later.done()
        with pytest.raises(DuplicateEntryId):
            writer.add(b"again", entry_id=1)
        assert await writer.add(b"first", entry_id=0) == 0
        assert await later == 1
        with pytest.raises(DuplicateEntryId):
            writer.add(b"again", entry_id=0)
        plain = await client.create_ledger()
        with pytest.raises(IllegalOperation):
            plain.add(b"x", entry_id=0)


async def test_gap_in_caller_entry_ids_does_not_block(fake_cluster, monkeypatch):
    monkeypatch.setattr("bkctl.client.writer.THROTTLE_COUNT", 5)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(78)
        await writer.add(b"ab", entry_id=0)
        beyond = [writer.add(b"cd", entry_id=entry_id) for entry_id in range(2, 12)]
        await writer.ready()
        await writer.flush()
        await writer.close()
        for future in beyond:
            with pytest.raises(LedgerClosed):
                await future
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.last_entry_id, metadata.length) == (0, 2)


@pytest.mark.parametrize("count", [7, 5])
async def test_run_behind_gap_in_caller_entry_ids_is_sent(fake_cluster, monkeypatch, count):
    monkeypatch.setattr("bkctl.client.writer.THROTTLE_COUNT", 5)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger_adv(79)
        for entry_id in range(1, 1 + count):
            writer.add(b"ab", entry_id=entry_id)
        await writer.add_all([b"cd", b"ef"])
        assert writer.pending_count == count + 2
        assert await writer.add(b"first", entry_id=0) == 0
        await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.last_entry_id, metadata.length) == (count + 2, 5 + 2 * (count + 2))


async def test_closed_client_fails_adds_in_flight_and_leaves_ledger_open(fake_cluster):
    async with fake_cluster(5) as cluster:
        async with cluster.client() as client:
            writer = await client.create_ledger()
            await writer.add(b"0")
            for bookie in cluster.bookies:
                bookie.hold = lambda request: True
            futures = [writer.add(b"x") for _ in range(3)]
            await asyncio.sleep(0.02)
        for future in futures:
            with pytest.raises(BookieUnavailable):
                await future
        with pytest.raises(BookieUnavailable):
            await writer.ready()
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.state, metadata.ensembles) == (LedgerState.OPEN, writer.metadata.ensembles)


async def test_entry_larger_than_frame_is_refused_and_ledger_stays_writable(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        with pytest.raises(UsageError):
            writer.add(bytes(5 * 1024 * 1024))
        largest = bytes(5 * 1024 * 1024 - 400)
        assert await writer.add(largest) == 0
        await writer.close()
        reader = await client.open_ledger(writer.ledger_id)
        assert [e.payload async for e in reader.read(0, 0)] == [largest]


# Reads and failing replicas.


@pytest.mark.parametrize(
    "kind", ["EIO", "ENOENTRY", "ENOLEDGER", "disconnect", "down", "digest", "other entry", "silence"]
)
async def test_reads_fall_back_to_the_next_replica(fake_cluster, kind, monkeypatch):
    monkeypatch.setattr("bkctl.config.ClientConfig.speculative_read_s", lambda *_: 0.1)

    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client)
        bad = cluster.bookies[1]
        if kind == "down":
            await bad.stop()
        elif kind == "digest":
            bad.damage = lambda entry: entry[:-1] + bytes([entry[-1] ^ 1])
        elif kind == "other entry":
            bad.damage = lambda entry: bad.ledgers[writer.ledger].entries[max(bad.ledgers[writer.ledger].entries)]
        else:
            fault = {"disconnect": Fault.DISCONNECT, "silence": Fault.SILENCE}.get(kind) or Status[kind]
            bad.fault = lambda request: fault if isinstance(request, ReadRequest) else None
        reader = await client.open_ledger(writer.ledger_id)
        entries = await collect(reader.read(0, reader.last_add_confirmed))
        assert [entry.payload for entry in entries] == PAYLOADS


async def test_read_continues_on_the_bookies_that_replaced_lost_ones(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        writer = await write(client, ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        reader = await client.open_ledger(writer.ledger_id)
        found = cluster.cluster.ledgers.read(writer.ledger)
        old = found.metadata.last_fragment.bookies
        entries = {**cluster.bookie(old[0]).entries(writer.ledger), **cluster.bookie(old[1]).entries(writer.ledger)}
        new = [bookie.bookie_id for bookie in cluster.bookies if bookie.bookie_id not in old]
        for bookie_id in new:
            cluster.bookie(bookie_id).ledgers[writer.ledger] = FakeLedger()
            cluster.bookie(bookie_id).ledgers[writer.ledger].entries.update(entries)
        for bookie_id in old:
            await cluster.bookie(bookie_id).stop()
        fragments = (Fragment(0, (new[0], old[1])), Fragment(20, (new[1], new[0])), Fragment(41, (new[2], new[1])))
        moved = found.metadata._replace(ensembles=fragments)
        version = cluster.cluster.ledgers.write(writer.ledger, moved, found.version)
        got = await collect_until(BookieUnavailable, reader.read(0, reader.last_add_confirmed))
        assert [entry.payload for entry in got] == PAYLOADS[:1]
        moved = moved._replace(ensembles=(Fragment(0, tuple(new[:2])), *fragments[1:]))
        cluster.cluster.ledgers.write(writer.ledger, moved, version)
        assert [entry.payload async for entry in reader.read(0, reader.last_add_confirmed)] == PAYLOADS


async def test_unreadable_entry_error_names_replicas_after_earlier_entries(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client)
        bookies = cluster.metadata(writer.ledger).ensembles[0].bookies
        cluster.bookie(bookies[20 % 3]).ledgers[writer.ledger].entries.pop(20)
        second = cluster.bookie(bookies[21 % 3])
        second.damage = lambda entry: entry[:-1] + b"\xff"
        reader = await client.open_ledger(writer.ledger_id)
        names = f"Entry 20.*{bookies[2]}.*{bookies[0]}"
        got = await collect_until(DigestMismatch, reader.read(0, 30), match=names)
        assert [entry.entry_id for entry in got] == list(range(20))
        cluster.bookie(bookies[21 % 3]).ledgers[writer.ledger].entries.pop(20)
        with pytest.raises(EntryNotFound):
            await collect(reader.read(20, 20))
        with pytest.raises(EntryNotFound):
            await reader.read_from(bookies[2], 20)
        with pytest.raises(DigestMismatch):
            await reader.read_from(bookies[0], 21)


async def test_a_bookie_that_never_answers_ends_in_a_timeout(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client() as patient, cluster.client(timeout_s=0.3) as client:
        sizes = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}
        writer = await write(patient, **sizes)
        cluster.bookies[0].fault = lambda request: Fault.SILENCE
        reader = await client.open_ledger(writer.ledger_id)
        with pytest.raises(TimedOut):
            await collect(reader.read(0, 5))
        stuck = await client.create_ledger(**sizes)
        with pytest.raises(NotEnoughBookies):
            await stuck.add(b"x")
        with pytest.raises(NotEnoughBookies):
            await stuck.close()
        assert cluster.metadata(stuck.ledger).is_closed
        other = await client.create_ledger(**sizes)
        with pytest.raises(TimedOut):
            await client.open_ledger(other.ledger_id, recovery=True)


async def test_a_bookie_that_is_nowhere_fails_at_once_and_is_tried_again_later(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client() as client:
        writer = await write(client, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        bookie = cluster.bookies[0]
        await bookie.stop()
        reader = await client.open_ledger(writer.ledger_id)
        for _ in range(3):
            with pytest.raises(BookieUnavailable):
                await collect(reader.read(0, 50))
        await bookie.start()
        async with asyncio.timeout(LIMIT_S):  # else it never connected again
            while True:
                try:
                    assert len(await collect(reader.read(0, 50))) == 51
                    break
                except BookieUnavailable:
                    await asyncio.sleep(0.05)


async def test_address_of_a_bookie_can_be_overridden(fake_cluster):
    async with fake_cluster(1) as cluster:
        async with cluster.client() as client:
            writer = await write(client, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        bookie = cluster.bookies[0]
        cluster.unregister(bookie)
        async with cluster.client() as client:
            reader = await client.open_ledger(writer.ledger_id)
            with pytest.raises(BookieUnavailable, match="bookie-address b0="):
                await collect(reader.read(0, 0))
        async with cluster.client(addresses={"b0": ("127.0.0.1", bookie.port)}) as client:
            reader = await client.open_ledger(writer.ledger_id)
            assert len(await collect(reader.read(0, 50))) == 51


# Writes and failing bookies.


@pytest.mark.parametrize("kind", ["EIO", "EREADONLY", "ETOOMANYREQUESTS", "disconnect", "down", "silence", "EBADREQ"])
@pytest.mark.parametrize("scope_id", [0, 7])
async def test_a_bookie_that_fails_is_replaced_and_nothing_is_lost(fake_cluster, kind, scope_id):
    timeout_s = 2 if kind == "silence" else LIMIT_S
    async with fake_cluster(5) as cluster, cluster.client(timeout_s=timeout_s) as client:
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id)
        before = writer.metadata.last_fragment.bookies
        bad = cluster.bookie(before[1])
        for i in range(20):
            await writer.add(b"%d" % i)
        if kind == "down":
            await bad.stop()
        else:
            fault = {"disconnect": Fault.DISCONNECT, "silence": Fault.SILENCE}.get(kind) or Status[kind]
            bad.fault = lambda request: fault if isinstance(request, AddRequest) else None
        futures = [writer.add(b"%d" % i) for i in range(20, 100)]
        assert await asyncio.gather(*futures) == list(range(20, 100))
        await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert metadata.last_entry_id == 99
        assert metadata.ensembles[0].first_entry_id == 0
        assert len(metadata.ensembles) == 2
        # Entry 20 is not on the bookie that fails, so it may be acknowledged before the change.
        assert metadata.ensembles[1].first_entry_id in (20, 21)
        after = metadata.last_fragment.bookies
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
        assert bad.bookie_id not in after
        for entry_id in range(21, 100):
            for index in (entry_id % 3, (entry_id + 1) % 3):
                assert entry_id in cluster.bookie(after[index]).ledgers[writer.ledger].entries
        bad.fault = lambda request: None
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id)
        if kind == "down":
            assert len(await collect(reader.read(20, 99))) == 80
        else:
            assert [e.payload async for e in reader.read(0, 99)] == [b"%d" % i for i in range(100)]


async def test_a_failure_before_the_first_entry_replaces_the_first_fragment(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        bad = cluster.bookie(writer.metadata.last_fragment.bookies[0])
        await bad.stop()
        await writer.add(b"x")
        await writer.close()
        (fragment,) = cluster.metadata(writer.ledger).ensembles
        assert fragment.first_entry_id == 0
        assert bad.bookie_id not in fragment.bookies


async def test_several_bookies_fail_one_after_the_other(fake_cluster):
    async with fake_cluster(8) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=4, write_quorum_size=3, ack_quorum_size=2)
        chance = random.Random(11)
        expected = []
        for round_ in range(4):
            for i in range(50):
                writer.add(b"%d.%d" % (round_, i))
                expected.append(b"%d.%d" % (round_, i))
                if i == 25:
                    await asyncio.sleep(0.002 * chance.random())
                    await cluster.bookie(chance.choice(writer.metadata.last_fragment.bookies)).stop()
            await writer.flush()
        await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert metadata.last_entry_id == 199
        assert metadata.length == sum(map(len, expected))
        assert len(metadata.ensembles) >= 2
        for bookie in cluster.bookies:
            await bookie.stop()
            await bookie.start()
        async with cluster.client() as fresh:
            reader = await fresh.open_ledger(writer.ledger_id)
            assert [e.payload async for e in reader.read(0, 199)] == expected


async def test_a_slow_third_replica_that_fails_later_is_replaced_with_the_next_add(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=2)
        slow = cluster.bookie(writer.metadata.last_fragment.bookies[2])
        slow.hold = lambda request: isinstance(request, AddRequest)
        assert await writer.add(b"0") == 0
        while not slow.held:
            await asyncio.sleep(0.001)
        slow.fault = lambda request: Status.EIO
        slow.release()
        await turns()
        assert len(writer.metadata.ensembles) == 1
        assert await writer.add(b"1") == 1
        await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert slow.bookie_id not in metadata.last_fragment.bookies
        assert metadata.last_entry_id == 1


def put_in_racks(cluster, **racks):
    """Store the racks of bookies: `r1="b0 b1"`."""
    for rack, names in racks.items():
        BookieRacks(cluster.cluster).set(names.split(), rack)


def racks_in(cluster, ledger):
    """The racks of the ledger's last ensemble."""
    stored = {each.bookie_id: each.rack for each in BookieRacks(cluster.cluster).all()}
    return [stored[bookie_id] for bookie_id in cluster.metadata(ledger).last_fragment.bookies]


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_new_ensembles_and_replacements_are_in_several_racks(fake_cluster, scope_id):
    async with fake_cluster(8) as cluster, cluster.client() as client:
        put_in_racks(cluster, r1="b0 b1 b2 b3 b4 b5", r2="b6 b7")
        for _ in range(8):
            writer = await client.create_ledger_adv(ledger_scope_id=scope_id, ensemble_size=2)
            assert sorted(racks_in(cluster, writer.ledger)) == ["/r1", "/r2"]
        await writer.add(b"0")
        lost = racks_in(cluster, writer.ledger).index("/r2")
        await cluster.bookie(writer.metadata.last_fragment.bookies[lost]).stop()
        await writer.add(b"1")
        await writer.close()
        assert len(cluster.metadata(writer.ledger).ensembles) == 2
        assert sorted(racks_in(cluster, writer.ledger)) == ["/r1", "/r2"]


async def test_recovery_replaces_bookies_by_their_racks(fake_cluster):
    async with fake_cluster(8) as cluster, cluster.client() as client, cluster.client() as other:
        put_in_racks(cluster, r1="b0 b1 b2 b3 b4", r2="b5 b6", r3="b7")
        writer = await client.create_ledger(ensemble_size=3, write_quorum_size=3, ack_quorum_size=3)
        for _ in range(3):
            await writer.add(b"x")
        lost = cluster.bookie(writer.metadata.last_fragment.bookies[racks_in(cluster, writer.ledger).index("/r2")])
        await lost.stop()
        await other.open_ledger(writer.ledger.ledger_id, recovery=True)
        ensembles = cluster.metadata(writer.ledger).ensembles
        assert lost.bookie_id not in ensembles[-1].bookies
        assert sorted(racks_in(cluster, writer.ledger)) == ["/r1", "/r2", "/r3"]


async def test_racks_are_read_once_for_many_ledgers(fake_cluster, monkeypatch):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        reads = []
        get = cluster.cluster.store.get
        monkeypatch.setattr(cluster.cluster.store, "get", lambda path: (reads.append(path), get(path))[1])
        monkeypatch.setattr("bkctl.metadata.racks.RACKS_AGE_S", 3600.0)
        for _ in range(5):
            await client.create_ledger()
        assert reads.count(RACKS) == 1


async def test_enforced_racks_refuse_new_ledgers(fake_cluster):
    config = ClientConfig(enforce_min_num_racks_per_write_quorum=True)
    async with fake_cluster(3) as cluster, cluster.client(config=config) as client:
        put_in_racks(cluster, r1="b0 b1 b2")
        with pytest.raises(NotEnoughBookies, match="2 racks"):
            await client.create_ledger()


async def test_without_a_spare_bookie_the_ledger_is_closed_where_it_is_acknowledged(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for i in range(10):
            await writer.add(b"%d" % i)
        bad = cluster.bookies[0]
        await bad.stop()
        futures = [writer.add(b"x") for _ in range(10)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        # Entries on the two other bookies may be acknowledged before the loss of this one is known.
        failed = [result for result in results if isinstance(result, NotEnoughBookies)]
        last = 9 + len(results) - len(failed)
        assert results == [*range(10, last + 1), *failed]
        assert failed
        with pytest.raises(NotEnoughBookies, match=bad.bookie_id):
            writer.add(b"x")
        with pytest.raises(NotEnoughBookies):
            await writer.ready()
        with pytest.raises(NotEnoughBookies):
            await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, last, last + 1)


async def test_unexpected_error_of_an_ensemble_change_is_named(fake_cluster, monkeypatch):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        monkeypatch.setattr("bkctl.client.writer.update_metadata", {}.__getitem__)
        await cluster.bookie(writer.metadata.last_fragment.bookies[0]).stop()
        with pytest.raises(BkctlError, match=r"Changing the ensemble of ledger \d+ failed: TypeError"):
            await writer.add(b"x")


async def test_bookies_that_all_refuse_end_the_writes(fake_cluster):
    async with fake_cluster(9) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for bookie in cluster.bookies:
            bookie.fault = lambda request: Status.EREADONLY if isinstance(request, AddRequest) else None
        with pytest.raises(NotEnoughBookies):
            await writer.add(b"x")


async def test_a_wrong_master_key_ends_the_writes(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        cluster.bookies[0].fault = lambda request: Status.EUA
        with pytest.raises(Unauthorized):
            await asyncio.gather(*(writer.add(b"x") for _ in range(3)))


# Closing.


async def test_close_waits_for_adds_in_flight_and_second_close_does_nothing(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        async with await client.create_ledger() as writer:
            futures = [writer.add(b"%d" % i) for i in range(100)]
        assert await asyncio.gather(*futures) == list(range(100))
        await writer.close()
        with pytest.raises(LedgerClosed):
            writer.add(b"x")
        empty = await client.create_ledger()
        await empty.close()
        metadata = cluster.metadata(empty.ledger)
        assert (metadata.last_entry_id, metadata.length) == (-1, 0)
        assert (await client.open_ledger(empty.ledger_id)).last_add_confirmed == -1


@pytest.mark.parametrize("cancelled_in", ["adds in flight", "metadata"])
async def test_a_cancelled_close_is_raised_once_the_ledger_is_closed(fake_cluster, monkeypatch, cancelled_in):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = cluster.cluster.ledgers
        is_writing, may_write = threading.Event(), threading.Event()
        write = ledgers.write

        def write_slowly(*arguments):
            is_writing.set()
            may_write.wait(LIMIT_S)
            return write(*arguments)

        monkeypatch.setattr(ledgers, "write", write_slowly)
        writer = await client.create_ledger()

        async def fill():
            async with writer:
                writer.add(b"ab")

        if cancelled_in == "adds in flight":
            for bookie in cluster.bookies:
                bookie.hold = lambda request: True
        filling = asyncio.create_task(fill())
        if cancelled_in == "metadata":
            await asyncio.to_thread(is_writing.wait, LIMIT_S)
        for _ in range(3):
            await turns()
            filling.cancel()
        for bookie in cluster.bookies:
            bookie.release()
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await filling
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.state, metadata.last_entry_id, writer.is_closed) == (LedgerState.CLOSED, 0, True)


@pytest.mark.parametrize("state", ["closed alike", "closed elsewhere", "in recovery"])
async def test_close_meets_another_client(fake_cluster, state):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        for _ in range(5):
            await writer.add(b"ab")
        found = cluster.cluster.ledgers.read(writer.ledger)
        last = 3 if state == "closed elsewhere" else 4
        changed = found.metadata._replace(state=LedgerState.CLOSED, last_entry_id=last, length=2 * last + 2)
        if state == "in recovery":
            changed = found.metadata._replace(state=LedgerState.IN_RECOVERY)
        cluster.cluster.ledgers.write(writer.ledger, changed, found.version)
        if state == "closed elsewhere":
            with pytest.raises(MetadataVersionConflict):
                await writer.close()
        else:
            await writer.close()
        metadata = cluster.metadata(writer.ledger)
        assert (metadata.state, metadata.last_entry_id) == (LedgerState.CLOSED, last)


async def test_an_ensemble_change_meets_a_recovery(fake_cluster):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        for state, error in ((LedgerState.IN_RECOVERY, LedgerFenced), (LedgerState.CLOSED, LedgerClosed)):
            writer = await client.create_ledger()
            await writer.add(b"x")
            found = cluster.cluster.ledgers.read(writer.ledger)
            cluster.cluster.ledgers.write(writer.ledger, found.metadata._replace(state=state), found.version)
            bad = cluster.bookie(writer.metadata.last_fragment.bookies[1])
            bad.fault = lambda request: Status.EIO if isinstance(request, AddRequest) else None
            with pytest.raises(error):
                await asyncio.gather(*(writer.add(b"y") for _ in range(5)))
            with pytest.raises(error):
                await writer.close()
            assert cluster.metadata(writer.ledger).state is state
            bad.fault = lambda request: None


# Tails.


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_a_tail_sees_entries_the_explicit_lac_and_the_close(fake_cluster, protocol):
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        writer = await client.create_ledger()
        reader = await client.open_ledger(writer.ledger_id)
        assert reader.last_add_confirmed == -1
        assert await reader.wait_for_lac(-1, 0.05) == -1
        got = []

        async def tail():
            while True:
                lac = await reader.wait_for_lac(len(got) - 1, 10)
                if len(got) <= lac:
                    got.extend([e.payload async for e in reader.read(len(got), lac)])
                elif reader.is_closed:
                    return

        task = asyncio.create_task(tail())
        for i in range(10):
            await writer.add(b"%d" % i)
            await writer.write_lac()
            while len(got) <= i:
                await asyncio.sleep(0.005)
        await writer.add(b"last")
        await writer.close()
        await task
        assert got == [*(b"%d" % i for i in range(10)), b"last"]
        await reader.close()


async def test_a_tail_of_a_deleted_ledger_ends(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        async with await client.open_ledger(writer.ledger_id) as reader:
            waiting = asyncio.create_task(reader.wait_for_lac(-1, 20))
            await asyncio.sleep(0.1)
            await client.delete_ledger(writer.ledger_id)
            with pytest.raises(LedgerNotFound):
                await waiting


@pytest.mark.parametrize(("count", "is_cancelled"), [(1, True), (2, False)], ids=["cancelled", "two at once"])
async def test_a_tail_leaves_no_watch(fake_cluster, monkeypatch, count, is_cancelled):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = cluster.cluster.ledgers
        watch, watched, cancelled = ledgers.watch, [], []
        is_watching, may_return = threading.Event(), threading.Event()

        def watch_slowly(*arguments):
            cancel = watch(*arguments)
            number = len(watched)
            watched.append(number)
            is_watching.set()
            may_return.wait(LIMIT_S)
            return lambda: (cancel(), cancelled.append(number))

        monkeypatch.setattr(ledgers, "watch", watch_slowly)
        writer = await client.create_ledger()
        async with await client.open_ledger(writer.ledger_id) as reader:
            waiting = [asyncio.create_task(reader.wait_for_lac(-1, 0)) for _ in range(count)]
            assert await asyncio.to_thread(is_watching.wait, LIMIT_S)
            if is_cancelled:
                waiting[0].cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            may_return.set()
            await asyncio.wait(waiting, timeout=LIMIT_S)
            assert [each.cancelled() for each in waiting] == [is_cancelled] * count
        assert watched == cancelled == [0]


async def test_a_tail_follows_the_ensemble(fake_cluster):
    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await writer.add(b"0")
        async with await client.open_ledger(writer.ledger_id) as reader:
            first = writer.metadata.last_fragment.bookies
            waiting = asyncio.create_task(reader.wait_for_lac(2, 20))
            await asyncio.sleep(0.05)
            for bookie_id in first:
                await cluster.bookie(bookie_id).stop()
            for i in range(1, 5):
                await writer.add(b"%d" % i)
            assert not set(first) & set(writer.metadata.last_fragment.bookies)
            assert await waiting >= 3


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_entry_of_a_long_poll_is_used_only_if_intact(fake_cluster, monkeypatch, is_damaged):
    """Any bookie of the ensemble may answer a long poll, also with an entry of which it has no replica."""

    def answer(request, respond):
        entry = owner.entries(writer.ledger)[0]
        body = entry[:-1] + b"?" if is_damaged else entry
        respond(ReadResponse(Status.EOK, request.ledger, 0, body, 0))

    async with fake_cluster(2) as cluster, cluster.client() as client:
        writer = await client.create_ledger(ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        owner, other = map(cluster.bookie, writer.metadata.last_fragment.bookies)
        monkeypatch.setattr(other, "_ReadRequest", answer)
        async with await client.open_ledger(writer.ledger_id) as reader:
            await writer.add(b"sound")
            assert await reader.wait_for_lac(-1, LIMIT_S) == 0
            assert [entry.payload for entry in await collect(reader.read(0, 0))] == [b"sound"]
        reads = [request for request in owner.received if type(request) is ReadRequest and request.entry_id == 0]
        assert len(reads) == is_damaged
        assert not client.pool.suspects()


async def test_a_tail_reads_entries_of_an_ensemble_before_its_watch_reports_it(fake_cluster, monkeypatch):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        monkeypatch.setattr(cluster.cluster.ledgers, "watch", lambda *_: lambda: None)
        writer = await client.create_ledger(ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        for i in range(2):
            await writer.add(b"%d" % i)
        async with await client.open_ledger(writer.ledger_id) as reader:
            await cluster.bookie(writer.metadata.last_fragment.bookies[0]).stop()
            for i in range(2, 6):
                await writer.add(b"%d" % i)
            await writer.write_lac()
            async with contextlib.aclosing(reader.tail(2)) as entries:
                assert [(await anext(entries)).payload for _ in range(4)] == [b"2", b"3", b"4", b"5"]


async def test_a_late_answer_of_the_store_does_not_undo_an_ensemble_change(fake_cluster, monkeypatch):
    """A read looks for its entry in the metadata while the writer changes the ensemble."""

    def read_late(ledger):
        found = read(ledger)
        has_read.set()
        may_answer.wait(LIMIT_S)
        return found

    async with fake_cluster(3) as cluster, cluster.client() as client:
        ledgers = cluster.cluster.ledgers
        read, has_read, may_answer = ledgers.read, threading.Event(), threading.Event()
        writer = await client.create_ledger(ensemble_size=2, write_quorum_size=1, ack_quorum_size=1)
        for i in range(4):
            await writer.add(b"%d" % i)
        failing = cluster.bookie(writer.metadata.last_fragment.bookies[0])
        failing.fault = lambda request: Status.EIO
        monkeypatch.setattr(ledgers, "read", read_late)
        reading = asyncio.create_task(collect(writer.read(0, 0)))
        assert await asyncio.to_thread(has_read.wait, LIMIT_S)
        for i in range(4, 8):
            await writer.add(b"%d" % i)
        may_answer.set()
        with pytest.raises(BkctlError, match="EIO"):
            await reading
        monkeypatch.undo()
        failing.fault = lambda request: None
        await writer.close()
        assert [each.first_entry_id for each in cluster.metadata(writer.ledger).ensembles] == [0, 4]
        reader = await client.open_ledger(writer.ledger_id)
        assert [entry.payload for entry in await collect(reader.read(0, 7))] == [b"%d" % i for i in range(8)]


# Scopes and bookies without them.


async def test_a_scoped_ledger_avoids_bookies_that_did_not_register_scopes(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        apache = await cluster.add_bookie(scopes=False)
        for _ in range(10):
            writer = await write(client, ledger_scope_id=7)
            assert apache.bookie_id not in cluster.metadata(writer.ledger).ensembles[0].bookies
        with pytest.raises(NotEnoughBookies, match=f"without ledger scopes: {apache.bookie_id}"):
            await client.create_ledger_adv(ledger_scope_id=7, ensemble_size=4)
        assert (await client.create_ledger(ensemble_size=4)).metadata.ensemble_size == 4
        assert all(type(request) is not AddRequest or not request.ledger.scope_id for request in apache.received)


@pytest.mark.parametrize("lies", [False, True])
async def test_a_replica_without_scopes_is_unavailable_never_empty(fake_cluster, lies):
    """Lock 2: it registered scopes, and does not serve them (another bookie came up under its name)."""

    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await write(client, ledger_scope_id=7, ensemble_size=2)
        impostor = cluster.bookie(cluster.metadata(writer.ledger).ensembles[0].bookies[0])
        if lies:
            impostor.lies = True
        else:
            impostor.scopes = False
        await impostor.stop()
        await impostor.start()
        impostor.received.clear()
        async with cluster.client() as fresh:
            reader = await fresh.open_ledger(writer.ledger_id, ledger_scope_id=7)
            entries = await collect(reader.read(0, reader.last_add_confirmed))
            assert [entry.payload for entry in entries] == PAYLOADS
            with pytest.raises((BookieUnavailable, ProtocolError)):
                await reader.read_from(impostor.bookie_id, 0)
            if not lies:
                assert {type(request) for request in impostor.received} == {ReadLacRequest}


@pytest.mark.parametrize("lies", [False, True])
async def test_writes_change_the_ensemble_away_from_a_bookie_without_scopes(fake_cluster, lies):
    async with fake_cluster(2) as cluster, cluster.client() as client:
        impostor = await cluster.add_bookie(scopes=lies, lies=lies, registers_scopes=True)
        for _ in range(30):
            writer = await client.create_ledger_adv(ledger_scope_id=7, ensemble_size=2)
            if impostor.bookie_id in writer.metadata.last_fragment.bookies:
                break
        assert await asyncio.gather(*(writer.add(b"%d" % i) for i in range(10))) == list(range(10))
        await writer.close()
        assert impostor.bookie_id not in cluster.metadata(writer.ledger).last_fragment.bookies
        if not lies:
            assert not any(isinstance(request, AddRequest) for request in impostor.received)


async def test_fencing_a_scoped_ledger_never_touches_the_ledger_of_scope_0(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        plain = await client.create_ledger_adv(5, write_quorum_size=3)
        await plain.add(b"x")
        scoped = await client.create_ledger_adv(5, ledger_scope_id=7)
        assert await asyncio.gather(*(scoped.add(b"%d" % i) for i in range(9))) == list(range(9))
        apache = cluster.bookies[0]
        await cluster.add_bookie()
        apache.scopes = False
        await apache.stop()
        await apache.start()
        reader = await client.open_ledger(5, ledger_scope_id=7, recovery=True)
        assert reader.last_add_confirmed == 8
        assert [e.payload async for e in reader.read(0, 8)] == [b"%d" % i for i in range(9)]
        assert not apache.ledgers[plain.ledger].fenced
        assert await plain.add(b"still open") == 1


async def test_entries_cost_nine_bytes_more_in_a_scope(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        sizes = []
        for scope_id in (0, 7):
            writer = await write(client, ledger_scope_id=scope_id)
            entries = {}
            for bookie in cluster.bookies:
                entries |= bookie.ledgers[writer.ledger].entries
            assert {read_entry_header(entry).ledger for entry in entries.values()} == {writer.ledger}
            sizes.append([len(entries[i]) for i in range(len(PAYLOADS))])
        assert [scoped - plain for plain, scoped in zip(*sizes, strict=True)] == [9] * len(PAYLOADS)
