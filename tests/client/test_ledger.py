"""The client against fake bookies: what it writes, reads, refuses, and does when bookies fail."""

from __future__ import annotations

import asyncio
import random

import pytest
from client.fakes import Fault

from bkctl.errors import (
    BookieUnavailable,
    DigestMismatch,
    DuplicateEntryId,
    EntryNotFound,
    IllegalOperation,
    LedgerClosed,
    LedgerExists,
    LedgerFenced,
    LedgerNotFound,
    LedgerRecoveryFailed,
    MetadataVersionConflict,
    NotEnoughBookies,
    ProtocolError,
    TimedOut,
    Unauthorized,
    UsageError,
)
from bkctl.formats.entry import DigestManager, DigestType, read_entry_header
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.protocol.messages import AddRequest, Protocol, ReadLacRequest, ReadRequest, Status, WriteLacRequest

PAYLOADS = [b"", b"a", b"hello", bytes(1000), *(f"entry {i}".encode() * i for i in range(4, 60))]


async def collect(entries):
    return [entry async for entry in entries]


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
def test_what_is_written_is_read_back(fake_cluster, run, digest_type, protocol, scope_id):
    async def scenario():
        async with fake_cluster(4) as cluster, cluster.client(protocol=protocol) as client:
            writer = await write(
                client, digest_type=digest_type, password=b"secret", ledger_scope_id=scope_id, ensemble_size=4,
                write_quorum_size=3, ack_quorum_size=2, custom_metadata={"application": b"test"},
            )
            assert (writer.scope_id, writer.is_closed) == (scope_id, True)
            reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, password=b"secret")
            assert reader.last_add_confirmed == len(PAYLOADS) - 1
            assert reader.length == sum(map(len, PAYLOADS))
            entries = await collect(reader.read(0, reader.last_add_confirmed))
            assert [entry.payload for entry in entries] == PAYLOADS
            assert [entry.entry_id for entry in entries] == list(range(len(PAYLOADS)))
            assert {entry.format_version for entry in entries} == {2 if scope_id else 1}
            assert [entry.length for entry in entries] == [sum(map(len, PAYLOADS[: i + 1])) for i in range(len(PAYLOADS))]
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

    run(scenario())


def test_entry_bytes_are_the_digest_managers(fake_cluster, run):
    async def scenario():
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

    run(scenario())


def test_same_ledger_id_in_two_scopes_never_mixes(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client() as client:
            for scope_id in (0, 7, 2**64 - 1):
                await write(client, [b"of scope %d" % scope_id], ledger_id=5, ledger_scope_id=scope_id)
            for scope_id in (0, 7, 2**64 - 1):
                reader = await client.open_ledger(5, ledger_scope_id=scope_id)
                assert [e.payload async for e in reader.read(0, 0)] == [b"of scope %d" % scope_id]
            await client.delete_ledger(5, ledger_scope_id=7)
            assert (await client.open_ledger(5)).last_add_confirmed == 0
            assert (await client.open_ledger(5, ledger_scope_id=2**64 - 1)).last_add_confirmed == 0

    run(scenario())


def test_ids_are_generated_or_given_and_never_taken_twice(fake_cluster, run):
    async def scenario():
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

    run(scenario())


def test_v2_refuses_a_scope_before_a_byte_is_sent(fake_cluster, run):
    async def scenario():
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

    run(scenario())


def test_open_checks_password_and_digest_type(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client() as client:
            writer = await write(client, password=b"right")
            with pytest.raises(Unauthorized):
                await client.open_ledger(writer.ledger_id, password=b"wrong")
            with pytest.raises(Unauthorized):
                await client.open_ledger(writer.ledger_id)
            with pytest.raises(DigestMismatch):
                await client.open_ledger(writer.ledger_id, password=b"right", digest_type=DigestType.HMAC)
            reader = await client.open_ledger(writer.ledger_id, password=None)
            assert len(await collect(reader.read(0, reader.last_add_confirmed))) == len(PAYLOADS)

    run(scenario())


def test_reads_beyond_the_last_add_confirmed_are_refused_unless_asked_for(fake_cluster, run):
    async def scenario():
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
            got = []
            with pytest.raises(EntryNotFound):
                async for entry in reader.read_unconfirmed(1, 9):
                    got.append(entry.payload)
            assert got == [b"two", b"three"]
            await writer.write_lac()
            assert await reader.read_last_confirmed() == 2
            await writer.close()
            assert await reader.read_last_confirmed() == 2
            assert reader.is_closed

    run(scenario())


@pytest.mark.parametrize("protocol", list(Protocol))
def test_explicit_lac_alone_is_seen(fake_cluster, run, protocol):
    """A bookie with an explicit LAC and no entry answers EIO, and gives the LAC."""

    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
            writer = await client.create_ledger(ensemble_size=3, write_quorum_size=1, ack_quorum_size=1)
            await writer.add(b"only on the first")
            for bookie in cluster.bookies:
                bookie._WriteLacRequest(
                    WriteLacRequest(writer.ledger, 0, b"", writer._access.digest.seal_lac(0)), lambda _: None
                )
            reader = await client.open_ledger(writer.ledger_id)
            assert reader.last_add_confirmed == (0 if protocol is Protocol.V3 else -1)

    run(scenario())


def test_explicit_lac_goes_over_v3_in_v2_mode(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client(protocol=Protocol.V2) as client:
            writer = await client.create_ledger()
            await writer.add(b"x")
            await writer.write_lac()
            assert sum(isinstance(r, WriteLacRequest) for b in cluster.bookies for r in b.received) == 2
            with pytest.raises(IllegalOperation):
                await writer.force()

    run(scenario())


def test_force_asks_every_bookie(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client() as client:
            writer = await client.create_ledger()
            await writer.add(b"x")
            await writer.force()
            cluster.bookies[1].fault = lambda request: Status.EIO
            with pytest.raises(Exception, match="EIO"):
                await writer.force()

    run(scenario())


def test_adds_complete_in_order_whatever_order_the_bookies_answer_in(fake_cluster, run):
    async def scenario():
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

    run(scenario())


def test_ready_waits_while_too_much_is_in_flight(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client(throttle_count=10) as client:
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

    run(scenario())


def test_caller_chosen_entry_ids(fake_cluster, run):
    async def scenario():
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

    run(scenario())


def test_an_entry_larger_than_a_frame_is_refused_and_the_ledger_goes_on(fake_cluster, run):
    async def scenario():
        async with fake_cluster(3) as cluster, cluster.client() as client:
            writer = await client.create_ledger()
            with pytest.raises(UsageError):
                writer.add(bytes(5 * 1024 * 1024))
            largest = bytes(5 * 1024 * 1024 - 400)
            assert await writer.add(largest) == 0
            await writer.close()
            reader = await client.open_ledger(writer.ledger_id)
            assert [e.payload async for e in reader.read(0, 0)] == [largest]

    run(scenario())


# Reads and failing replicas.


@pytest.mark.parametrize("kind", ["EIO", "ENOENTRY", "ENOLEDGER", "disconnect", "down", "digest", "other entry", "silence"])
def test_reads_fall_back_to_the_next_replica(fake_cluster, run, kind, monkeypatch):
    monkeypatch.setattr("bkctl.client.reader.SPECULATIVE_READ_S", 0.1)

    async def scenario():
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

    run(scenario())
