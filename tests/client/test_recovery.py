"""Recovery: where a ledger ends, what is made safe, and what several clients do at once."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from client.fakes import FakeLedger, Fault
from support.waiting import LIMIT_S

from bkctl.client.ensemble import with_fragment
from bkctl.client.recovery import RecoveryLoss
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import (
    BkctlError,
    LedgerFenced,
    LedgerLengthUnknown,
    LedgerRecoveryFailed,
    NotEnoughBookies,
    ProtocolError,
    TimedOut,
    Unauthorized,
)
from bkctl.formats.entry import read_entry_header
from bkctl.formats.metadata import LedgerState
from bkctl.protocol.messages import AddRequest, ForceLedgerRequest, Protocol, ReadRequest, Status


async def collect(entries):
    return [entry async for entry in entries]


async def open_ledger_of(client, payloads, **options):
    """A ledger whose writer went away after `payloads`."""
    writer = await client.create_ledger_adv(**options)
    for payload in payloads:
        await writer.add(payload)
    return writer


@pytest.mark.parametrize(("protocol", "scope_id"), [(Protocol.V2, 0), (Protocol.V3, 0), (Protocol.V3, 7)])
@pytest.mark.parametrize("count", [0, 1, 2, 30])
async def test_a_ledger_left_open_is_fenced_and_closed_at_its_last_entry(fake_cluster, protocol, scope_id, count):
    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        payloads = [b"entry %d" % i for i in range(count)]
        writer = await open_ledger_of(client, payloads, ledger_scope_id=scope_id, password=b"pw")
        reader = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, password=b"pw", recovery=True)
        assert reader.is_closed
        assert (reader.last_add_confirmed, reader.length) == (count - 1, sum(map(len, payloads)))
        metadata = cluster.metadata(writer.ledger)
        assert metadata.state is LedgerState.CLOSED
        assert (metadata.last_entry_id, metadata.length) == (count - 1, sum(map(len, payloads)))
        if count:
            assert [e.payload async for e in reader.read(0, count - 1)] == payloads
        with pytest.raises(LedgerFenced):
            await asyncio.gather(*(writer.add(b"x") for _ in range(3)))
        again = await client.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, password=None, recovery=True)
        assert again.last_add_confirmed == count - 1


async def test_flags_of_recovery(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1"])
        for bookie in cluster.bookies:
            bookie.received.clear()
        await client.open_ledger(writer.ledger_id, recovery=True)
        received = [request for bookie in cluster.bookies for request in bookie.received]
        key = writer._access.digest.master_key
        reads = [request for request in received if isinstance(request, ReadRequest)]
        first = [request for request in reads if request.entry_id == -1]
        assert len(first) == 3
        assert all(request.fence and request.master_key == key and not request.high_priority for request in first)
        later = [request for request in reads if request.fence and request.entry_id >= 1]
        assert later
        assert all(request.high_priority and request.master_key == key for request in later)
        adds = [request for request in received if isinstance(request, AddRequest)]
        assert {request.entry_id for request in adds} == {1}
        assert all(request.recovery_add and request.high_priority for request in adds)


async def test_entries_that_a_recovery_adds_again_confirm_no_more_than_before(fake_cluster):
    """Another recovery may end the ledger before them if this one fails, and a tail may have read what they confirm."""
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await client.create_ledger()
        await asyncio.gather(*(writer.add(b"%d" % number) for number in range(400)))
        for bookie in cluster.bookies:
            bookie.received.clear()
        await client.open_ledger(writer.ledger_id, recovery=True)
        adds = [each for bookie in cluster.bookies for each in bookie.received if isinstance(each, AddRequest)]
        assert {add.entry_id for add in adds} == set(range(400))
        assert {read_entry_header(bytes(add.body)).last_add_confirmed for add in adds} == {-1}


@pytest.mark.parametrize("fault", [Status.EIO, Fault.SILENCE])
async def test_a_handle_that_adds_again_needs_no_force_to_close(fake_cluster, fault):
    """An unfinished copy is resumed so; a bookie beyond the ack quorum may be ill."""
    async with fake_cluster(3) as cluster, cluster.client() as client:
        first = await client.create_ledger_adv(5, ledger_scope_id=7)
        await asyncio.gather(*(first.add(b"%d." % number) for number in range(4)))
        cluster.bookies[2].fault = lambda request: fault if type(request) is ForceLedgerRequest else None
        async with cluster.client(timeout_s=1) as other:
            access = other.access(first.ledger, cluster.cluster.ledgers.read(first.ledger))
            async with WriteHandle(access, own_entry_ids=False, recovery=True) as resumed:
                await asyncio.gather(*(resumed.add(b"%d." % number) for number in range(10)))
                assert resumed.last_add_confirmed == 9
        metadata = cluster.metadata(first.ledger)
        assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, 9, 20)
        assert not any(type(request) is ForceLedgerRequest for bookie in cluster.bookies for request in bookie.received)


async def test_an_entry_on_one_bookie_only_is_made_safe_or_dropped_never_halved(fake_cluster):
    """Wq 3, Aq 2: an entry on one bookie may be kept or not; one on two must be kept."""

    async with fake_cluster(3) as cluster, cluster.client() as client:
        for held_count in (1, 2):
            writer = await open_ledger_of(client, [b"0", b"1"], write_quorum_size=3)
            bookies = [cluster.bookie(each) for each in writer.metadata.last_fragment.bookies]
            while any(len(bookie.entries(writer.ledger)) < 2 for bookie in bookies):
                await asyncio.sleep(0.001)
            for bookie in bookies[held_count:]:
                bookie.ledgers[writer.ledger].entries.pop(1, None)
            reader = await client.open_ledger(writer.ledger_id, recovery=True)
            if held_count == 2:
                assert reader.last_add_confirmed == 1
            assert reader.length == reader.last_add_confirmed + 1
            for entry_id in range(reader.last_add_confirmed + 1):
                count = sum(entry_id in bookie.ledgers[writer.ledger].entries for bookie in bookies)
                assert count >= 2


async def test_the_end_needs_enough_bookies_that_lack_the_entry(fake_cluster):
    """Wq 3, Aq 2: two must report the entry as absent. EIO and UNKNOWNLEDGERSTATE do not count."""

    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1"], write_quorum_size=3)
        unsure = cluster.bookies[:2]
        for bookie in unsure:
            bookie.fault = lambda request: (
                Status.EUNKNOWNLEDGERSTATE if isinstance(request, ReadRequest) and request.entry_id > 1 else None
            )
        with pytest.raises(LedgerRecoveryFailed, match="entry 2"):
            await client.open_ledger(writer.ledger_id, recovery=True)
        assert cluster.metadata(writer.ledger).state is LedgerState.IN_RECOVERY
        for bookie in unsure:
            bookie.fault = lambda request: None
        reader = await client.open_ledger(writer.ledger_id, recovery=True)
        assert reader.last_add_confirmed == 1


async def test_too_few_answers_to_fence_leave_the_ledger_in_recovery(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1", b"2"])
        await cluster.bookies[0].stop()
        await cluster.bookies[1].stop()
        with pytest.raises(LedgerRecoveryFailed):
            await client.open_ledger(writer.ledger_id, recovery=True)
        await cluster.bookies[0].start()
        await cluster.bookies[1].start()
        cluster.bookies[0].fault = cluster.bookies[1].fault = lambda request: Fault.SILENCE
        async with cluster.client(timeout_s=0.5) as fresh:
            with pytest.raises(TimedOut):
                await fresh.open_ledger(writer.ledger_id, recovery=True)
        cluster.bookies[0].fault = cluster.bookies[1].fault = lambda request: None
        assert cluster.metadata(writer.ledger).state is LedgerState.IN_RECOVERY
        async with cluster.client() as fresh:
            assert (await fresh.open_ledger(writer.ledger_id, recovery=True)).last_add_confirmed == 2


async def test_a_wrong_key_is_passed_on(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0"], password=b"pw")
        for bookie in cluster.bookies:
            bookie.fault = lambda request: Status.EUA if getattr(request, "fence", False) else None
        with pytest.raises(Unauthorized):
            await client.open_ledger(writer.ledger_id, password=b"pw", recovery=True)


@pytest.mark.parametrize("scope_id", [0, 7])
async def test_a_dead_bookie_is_replaced_where_entries_are_added_again(fake_cluster, scope_id):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        payloads = [b"%d" % i for i in range(21)]
        writer = await client.create_ledger_adv(ledger_scope_id=scope_id, ensemble_size=3)
        await writer.add(payloads[0])
        await asyncio.gather(*(writer.add(payload) for payload in payloads[1:]))
        dead = writer.metadata.last_fragment.bookies[2]
        await cluster.bookie(dead).stop()
        async with cluster.client() as fresh:
            reader = await fresh.open_ledger(writer.ledger_id, ledger_scope_id=scope_id, recovery=True)
            assert reader.last_add_confirmed == 20
            assert [e.payload async for e in reader.read(0, 20)] == payloads
        metadata = cluster.metadata(writer.ledger)
        assert dead not in metadata.last_fragment.bookies
        for entry_id in range(metadata.last_fragment.first_entry_id, 21):
            for index in (entry_id % 3, (entry_id + 1) % 3):
                holder = cluster.bookie(metadata.last_fragment.bookies[index])
                assert entry_id in holder.ledgers[writer.ledger].entries


async def test_without_a_spare_bookie_recovery_fails_and_writes_no_fragment(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1", b"2"])
        await cluster.bookie(writer.metadata.last_fragment.bookies[2]).stop()
        async with cluster.client() as fresh:
            with pytest.raises(LedgerRecoveryFailed) as caught:
                await fresh.open_ledger(writer.ledger_id, recovery=True)
        assert isinstance(caught.value.__cause__, NotEnoughBookies)
        metadata = cluster.metadata(writer.ledger)
        assert metadata.state is LedgerState.IN_RECOVERY
        assert metadata.ensembles == writer.metadata.ensembles


async def test_entries_keep_their_id_length_and_payload(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        payloads = [b"x" * size for size in (5, 0, 100, 1)]
        writer = await client.create_ledger()
        await asyncio.gather(*(writer.add(payload) for payload in payloads))
        await client.open_ledger(writer.ledger_id, recovery=True)
        lengths = list(itertools.accumulate(map(len, payloads)))
        for bookie in cluster.bookies:
            for entry_id, entry in bookie.ledgers[writer.ledger].entries.items():
                header = read_entry_header(entry)
                assert (header.entry_id, header.length) == (entry_id, lengths[entry_id])
                assert header.last_add_confirmed < entry_id


async def test_an_empty_last_fragment_ends_at_the_fragment_before_with_its_length(fake_cluster):
    """The writer changed the ensemble and died before it added anything there."""

    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"abc", b"defg"])
        found = cluster.cluster.ledgers.read(writer.ledger)
        used = found.metadata.last_fragment.bookies
        spare = tuple(each.bookie_id for each in cluster.bookies if each.bookie_id not in used)
        cluster.cluster.ledgers.write(writer.ledger, with_fragment(found.metadata, 2, spare), found.version)
        reader = await client.open_ledger(writer.ledger_id, recovery=True)
        assert (reader.last_add_confirmed, reader.length) == (1, 7)


async def test_recovery_never_guesses_unknown_length(fake_cluster):
    """The last add confirmed is known, but its entry, which has the ledger's length, cannot be read for now."""

    async with fake_cluster(6) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"abc", b"defg"])
        found = cluster.cluster.ledgers.read(writer.ledger)
        used = [each for each in cluster.bookies if each.bookie_id in found.metadata.last_fragment.bookies]
        spare = tuple(each.bookie_id for each in cluster.bookies if each not in used)
        cluster.cluster.ledgers.write(writer.ledger, with_fragment(found.metadata, 2, spare), found.version)
        for bookie in used:
            bookie.fault = lambda request: Status.EIO if isinstance(request, ReadRequest) else None
        with pytest.raises(LedgerRecoveryFailed, match=r"(?i)entry 1 "):
            await client.open_ledger(writer.ledger_id, recovery=True)
        assert cluster.metadata(writer.ledger).state is LedgerState.IN_RECOVERY
        for bookie in used:
            bookie.fault = lambda request: None
        reader = await client.open_ledger(writer.ledger_id, recovery=True)
        assert (reader.last_add_confirmed, reader.length) == (1, 7)


@pytest.mark.parametrize(
    ("protocol", "scope_id", "silent"),
    [(Protocol.V2, 0, False), (Protocol.V3, 0, False), (Protocol.V3, 7, False), (Protocol.V3, 7, True)],
)
async def test_accept_loss_closes_a_ledger_whose_last_entry_no_bookie_gives(fake_cluster, protocol, scope_id, silent):
    """Entry 1 is on bookies that are gone, entry 0 is not, and the last fragment is empty."""

    async with fake_cluster(3) as cluster, cluster.client(protocol=protocol) as client:
        shape = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1, "ledger_scope_id": scope_id}
        writer = await open_ledger_of(client, [b"abc", b"defg"], **shape)
        ledgers, ledger = cluster.cluster.ledgers, writer.ledger
        found = ledgers.read(ledger)
        [first] = found.metadata.last_fragment.bookies
        lost, empty = [each for each in cluster.bookies if each.bookie_id != first]
        entries = cluster.bookie(first).ledgers[ledger].entries
        lost.ledgers[ledger] = FakeLedger()
        lost.ledgers[ledger].entries[1] = entries.pop(1)
        changed = with_fragment(with_fragment(found.metadata, 1, (lost.bookie_id,)), 2, (empty.bookie_id,))
        ledgers.write(ledger, changed, found.version)
        if silent:
            lost.fault = lambda request: Fault.SILENCE
        else:
            await lost.stop()
        options = {"ledger_scope_id": scope_id, "recovery": True}
        async with cluster.client(protocol=protocol, timeout_s=2.0 if silent else LIMIT_S) as client:
            versioned, loss = await client.find_recovery_loss(ledger)
            assert versioned.metadata.state is LedgerState.OPEN
            assert loss == RecoveryLoss(last_entry_id=1, readable_entry_id=0, length=3)
            assert cluster.metadata(ledger).state is LedgerState.OPEN
            assert not empty.ledgers.get(ledger), "looking fences nothing"
            with pytest.raises(LedgerLengthUnknown, match=f"'bkctl ledger recover {ledger} --accept-loss'"):
                await client.open_ledger(ledger.ledger_id, **options)
            assert cluster.metadata(ledger).state is LedgerState.IN_RECOVERY
            for other in (loss._replace(last_entry_id=0), loss._replace(readable_entry_id=1, length=7)):
                with pytest.raises(LedgerLengthUnknown):  # another loss than the one that was accepted
                    await client.open_ledger(ledger.ledger_id, accept_loss=other, **options)
            assert (await client.find_recovery_loss(ledger))[1] == loss
            reader = await client.open_ledger(ledger.ledger_id, accept_loss=loss, **options)
            assert (reader.last_add_confirmed, reader.length) == (1, 3)
            assert (await client.find_recovery_loss(ledger))[1] is None
        metadata = cluster.metadata(ledger)
        assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, 1, 3)
        # Nothing but the length is lost once the bookie is back.
        if silent:
            lost.fault = lambda request: None
        else:
            await lost.start()
            cluster.register(lost)
        async with cluster.client(protocol=protocol) as client:
            reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=scope_id)
            assert [entry.payload async for entry in reader.read(0, 1)] == [b"abc", b"defg"]


async def test_a_loss_is_measured_in_each_write_set_of_each_fragment(fake_cluster):
    """Of six entries on three bookies (Wq 1), two bookies are down: every third entry can be read."""

    async with fake_cluster(6) as cluster, cluster.client() as client:
        shape = {"ensemble_size": 3, "write_quorum_size": 1, "ack_quorum_size": 1}
        for up_index, (readable, length) in enumerate([(3, 4), (4, 5), (5, 6), (-1, 0)]):
            writer = await open_ledger_of(client, [b"x"] * 6, **shape)
            found = cluster.cluster.ledgers.read(writer.ledger)
            used = found.metadata.last_fragment.bookies
            spare = tuple(each.bookie_id for each in cluster.bookies if each.bookie_id not in used)
            cluster.cluster.ledgers.write(writer.ledger, with_fragment(found.metadata, 6, spare), found.version)
            for index, bookie_id in enumerate(used):
                if index != up_index:
                    cluster.bookie(bookie_id).fault = lambda request: Status.EIO
            _, loss = await client.find_recovery_loss(writer.ledger)
            assert loss == (None if readable == 5 else RecoveryLoss(5, readable, length))
            for bookie in cluster.bookies:
                bookie.fault = lambda request: None


async def test_no_loss_is_offered_where_the_end_itself_is_not_known(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1", b"2"])
        cluster.bookies[0].fault = cluster.bookies[1].fault = lambda request: Status.EIO
        with pytest.raises(BkctlError, match="too few of its bookies answer"):
            await client.find_recovery_loss(writer.ledger)
        cluster.bookies[0].fault = cluster.bookies[1].fault = lambda request: None
        assert (await client.find_recovery_loss(writer.ledger))[1] is None
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN


async def test_many_recoveries_at_once_agree(fake_cluster):
    async with fake_cluster(5) as cluster, cluster.client() as client:
        for seed in range(5):
            chance = random.Random(seed)
            writer = await client.create_ledger(write_quorum_size=3)
            futures = [writer.add(b"%d" % i) for i in range(60)]
            await futures[30]
            clients = [cluster.client() for _ in range(4)]
            for bookie in cluster.bookies:
                bookie.fault = lambda request, chance=chance: (
                    Status.EIO
                    if isinstance(request, AddRequest) and request.recovery_add and chance.random() < 0.02
                    else None
                )
            opened = await asyncio.gather(
                *(each.open_ledger(writer.ledger_id, recovery=True) for each in clients), return_exceptions=True
            )
            for bookie in cluster.bookies:
                bookie.fault = lambda request: None
            opened = [each for each in opened if not isinstance(each, LedgerRecoveryFailed)]
            if not opened:
                opened = [await client.open_ledger(writer.ledger_id, recovery=True)]
            acknowledged = [f.result() for f in futures if f.done() and f.exception() is None]
            metadata = cluster.metadata(writer.ledger)
            assert metadata.state is LedgerState.CLOSED
            assert metadata.last_entry_id >= max(acknowledged) >= 30
            for reader in opened:
                assert reader.last_add_confirmed == metadata.last_entry_id
            entries = await collect(opened[0].read(0, metadata.last_entry_id))
            assert [entry.payload for entry in entries] == [b"%d" % i for i in range(metadata.last_entry_id + 1)]
            for each in clients:
                await each.close()


async def test_a_ledger_closed_meanwhile_by_another_stays_as_it_was_closed(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"0", b"1", b"2"])
        for bookie in cluster.bookies:
            bookie.hold = lambda request: isinstance(request, ReadRequest)
        opening = asyncio.create_task(client.open_ledger(writer.ledger_id, recovery=True))
        while not all(bookie.held for bookie in cluster.bookies):
            await asyncio.sleep(0.001)
        found = cluster.cluster.ledgers.read(writer.ledger)
        assert found.metadata.state is LedgerState.IN_RECOVERY
        changed = found.metadata._replace(state=LedgerState.CLOSED, last_entry_id=1, length=2)
        cluster.cluster.ledgers.write(writer.ledger, changed, found.version)
        for bookie in cluster.bookies:
            bookie.release()
        reader = await opening
        assert (reader.last_add_confirmed, reader.length) == (1, 2)


async def test_bookie_that_lost_scopes_does_not_vote_for_the_end(fake_cluster):
    """Its "no such entry" would be about scope 0; taken as an answer it would drop acknowledged entries."""

    async with fake_cluster(4) as cluster, cluster.client() as client:
        writer = await open_ledger_of(
            client, [b"0", b"1", b"2", b"3"], ledger_scope_id=7, ensemble_size=2, ack_quorum_size=1
        )
        first, second = (cluster.bookie(each) for each in writer.metadata.last_fragment.bookies)
        while any(3 not in each.entries(writer.ledger) for each in (first, second)):
            await asyncio.sleep(0.001)
        first.scopes = False
        await first.stop()
        await first.start()
        second.ledgers[writer.ledger].entries.pop(3)
        second.ledgers.setdefault(writer.ledger, FakeLedger())
        async with cluster.client() as fresh:
            # Wq − Aq + 1 = 2 bookies must lack entry 3; the second alone does.
            with pytest.raises(LedgerRecoveryFailed):
                await fresh.open_ledger(writer.ledger_id, ledger_scope_id=7, recovery=True)
        assert not any(getattr(request, "fence", False) for request in first.received)


@pytest.mark.parametrize("confirmed", [(1 << 63) - 1, (1 << 63) - 16, (1 << 62) + 1])
@pytest.mark.parametrize("explicit", [False, True])
async def test_impossible_last_add_confirmed_is_the_fault_of_its_bookie(fake_cluster, confirmed, explicit):
    async with fake_cluster(2) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"a", b"b"], ensemble_size=2, write_quorum_size=2, ack_quorum_size=1)
        await writer.force()
        digest = writer._access.digest
        liar = cluster.bookies[0]
        lied = liar.ledgers[writer.ledger]
        if explicit:
            lied.lac_packet = bytes(digest.seal_lac(confirmed))
        else:
            lied.entries[confirmed] = bytes(digest.seal(confirmed, confirmed, 9, b"c")) + b"c"
        # One answer is not enough here, whatever the other bookie says.
        with pytest.raises(ProtocolError, match=f"b0: Bookie b0 answered with .* {confirmed}"):
            await client.find_recovery_loss(writer.ledger)
        if not explicit:
            with pytest.raises(LedgerRecoveryFailed, match=f"impossible last add confirmed, {confirmed}"):
                await client.open_ledger(writer.ledger_id, recovery=True)
            assert cluster.metadata(writer.ledger).state is LedgerState.IN_RECOVERY


async def test_last_fragment_at_the_end_of_all_ids_is_refused(fake_cluster):
    async with fake_cluster(1) as cluster, cluster.client() as client:
        writer = await open_ledger_of(client, [b"a"], ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        found = cluster.cluster.ledgers.read(writer.ledger)
        moved = with_fragment(found.metadata, (1 << 63) - 1, found.metadata.last_fragment.bookies)
        cluster.cluster.ledgers.write(writer.ledger, moved, found.version)
        for opening in (
            client.find_recovery_loss(writer.ledger),
            client.open_ledger(writer.ledger_id, recovery=True),
        ):
            with pytest.raises(LedgerRecoveryFailed, match="begins at entry 9223372036854775807, which is impossible"):
                await opening
