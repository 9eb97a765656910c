"""Copies of ledgers: the same entries under another name, whole or not there."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from client.fakes import FakeCluster
from support.waiting import LIMIT_S

from bkctl.errors import (
    Conflict,
    DigestMismatch,
    EntryNotFound,
    LedgerExists,
    LedgerNotFound,
    NotEnoughBookies,
    Unreachable,
    UsageError,
)
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.copy import COPY_OF, CopyShape, copy_ledger

CUSTOM = {"application": b"pulsar", "bytes": bytes(range(256))}


async def write(client, count, *, ledger_scope_id=0, close=True, **shape):
    writer = await client.create_ledger_adv(
        ledger_scope_id=ledger_scope_id, password=b"secret", custom_metadata=CUSTOM, **shape
    )
    for entry_id in range(count):
        await writer.ready()
        writer.add(b"%d" % entry_id * (entry_id % 5))
    await writer.flush()
    if close:
        await writer.close()
    return writer


async def payloads(client, ledger):
    reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"secret")
    if reader.last_add_confirmed < 0:
        return []
    return [entry.payload async for entry in reader.read(0, reader.last_add_confirmed)]


@pytest.fixture
def other_cluster(tmp_path):
    """A second cluster of fake bookies."""

    @asynccontextmanager
    async def start(count):
        with open_cluster(f"sqlite://{tmp_path / 'other.db'}", create=True) as cluster:
            fakes = FakeCluster(cluster)
            try:
                for _ in range(count):
                    await fakes.add_bookie()
                yield fakes
            finally:
                for bookie in fakes.bookies:
                    await bookie.stop()

    return start


def ledgers_of(cluster):
    return list(cluster.cluster.ledgers.ledgers(None))


@pytest.mark.parametrize(("scope_id", "to_scope_id"), [(0, 7), (7, 0), (7, 8)])
@pytest.mark.parametrize("count", [0, 120])
async def test_a_copy_in_another_scope_has_the_same_entries_password_and_custom_metadata(
    fake_cluster, scope_id, to_scope_id, count
):
    async with fake_cluster(4) as cluster, cluster.client() as client:
        shape = {"ensemble_size": 4, "write_quorum_size": 3, "ack_quorum_size": 3, "digest_type": DigestType.HMAC}
        writer = await write(client, count, ledger_scope_id=scope_id, **shape)
        told = []
        copied = await copy_ledger(
            client, client, writer.ledger, ledger_scope_id=to_scope_id, ledger_id=12, progress=told.append
        )
        assert copied.copy == LedgerId(to_scope_id, 12)
        assert (copied.entry_count, copied.source_open) == (count, False)
        assert sum(told) == 2 * count
        source, copy = cluster.metadata(writer.ledger), cluster.metadata(copied.copy)
        for name in ("password", "digest_type", "ensemble_size", "write_quorum_size", "ack_quorum_size", "length",
                     "last_entry_id", "state", "custom_metadata"):  # fmt: skip
            assert getattr(copy, name) == getattr(source, name), name
        assert await payloads(client, copied.copy) == await payloads(client, writer.ledger)
        assert (await LedgerChecker(client).check(copied.copy, every_entry=True)).fragments == ()


async def test_a_copy_in_another_cluster_may_keep_its_name_and_have_another_shape(fake_cluster, other_cluster):
    async with (
        fake_cluster(3) as cluster,
        other_cluster(2) as other,
        cluster.client() as client,
        other.client() as target,
    ):
        writer = await write(client, 30)
        with pytest.raises(NotEnoughBookies):
            await copy_ledger(client, target, writer.ledger)
        assert ledgers_of(other) == []
        shape = CopyShape(2, 2, 1, DigestType.CRC32)
        copied = await copy_ledger(client, target, writer.ledger, shape=shape)
        assert copied.copy == writer.ledger
        copy = other.metadata(copied.copy)
        assert (copy.ensemble_size, copy.ack_quorum_size, copy.digest_type) == (2, 1, DigestType.CRC32)
        assert await payloads(target, copied.copy) == await payloads(client, writer.ledger)
        with pytest.raises(LedgerExists):
            await copy_ledger(client, target, writer.ledger, shape=shape)
        assert await payloads(target, copied.copy) == await payloads(client, writer.ledger)
        generated = await copy_ledger(client, target, writer.ledger, shape=shape, new_id=True)
        assert generated.copy not in (copied.copy, writer.ledger)


async def test_contradictory_copies_are_refused(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 3)
        with pytest.raises(UsageError, match="cannot be copied to itself"):
            await copy_ledger(client, client, writer.ledger)
        with pytest.raises(UsageError):
            await copy_ledger(client, client, writer.ledger, ledger_id=5, new_id=True)
        with pytest.raises(UsageError):
            await copy_ledger(client, client, writer.ledger, ledger_id=5, shape=CopyShape(2, 3, 2))
        with pytest.raises(LedgerNotFound):
            await copy_ledger(client, client, LedgerId(3, 3), ledger_scope_id=4)
        assert ledgers_of(cluster) == [writer.ledger]


async def test_open_source_is_refused_closed_or_copied_to_last_confirmed(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client, cluster.client() as other:
        writer = await write(client, 10, close=False)
        await writer.write_lac()
        with pytest.raises(Conflict, match="would end at entry 9"):
            await copy_ledger(other, other, writer.ledger, ledger_scope_id=7)
        copied = await copy_ledger(other, other, writer.ledger, ledger_scope_id=7, allow_open=True)
        assert (copied.entry_count, copied.source_open) == (10, True)
        assert cluster.metadata(copied.copy).state is LedgerState.CLOSED
        assert cluster.metadata(writer.ledger).state is LedgerState.OPEN
        await writer.add(b"more")
        copied = await copy_ledger(other, other, writer.ledger, ledger_scope_id=8, recovery=True)
        assert (copied.entry_count, copied.source_open) == (11, False)
        assert cluster.metadata(writer.ledger).state is LedgerState.CLOSED


async def test_unreadable_source_leaves_no_copy(fake_cluster):
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 50)
        for bookie in cluster.bookies:
            bookie.ledgers[writer.ledger].entries.pop(40, None)
        with pytest.raises(EntryNotFound):
            await copy_ledger(client, client, writer.ledger, ledger_scope_id=7)
        for bookie in cluster.bookies:
            bookie.damage = lambda entry: entry[:-1] + bytes([entry[-1] ^ 1])
        with pytest.raises(DigestMismatch):
            await copy_ledger(client, client, writer.ledger, ledger_scope_id=7)
        assert ledgers_of(cluster) == [writer.ledger]


async def test_differing_copy_is_deleted(fake_cluster, monkeypatch):
    from bkctl.client.write_handle import WriteHandle
    from bkctl.errors import Corrupt

    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 50)
        real = WriteHandle.add

        monkeypatch.setattr(WriteHandle, "add", lambda self, payload: real(self, payload[::-1]))
        with pytest.raises(Corrupt, match="differs from its source"):
            await copy_ledger(client, client, writer.ledger, ledger_scope_id=7)
        assert ledgers_of(cluster) == [writer.ledger]


class Died(BaseException):
    """The process."""


async def test_interrupted_copy_is_replaced_and_other_ledgers_are_kept(fake_cluster, monkeypatch):
    from bkctl.replication import copy as module

    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 50)
        other = await write(client, 5)
        for step in ("entries", "mark"):
            with monkeypatch.context() as patch:
                patch.setattr(module, "_remove", lambda *_: False)
                if step == "mark":
                    patch.setattr(module, "update_metadata", die)
                with pytest.raises(Died):
                    await copy_ledger(
                        client, client, writer.ledger, ledger_scope_id=7, ledger_id=5,
                        progress=die if step == "entries" else lambda count: None,
                    )  # fmt: skip
            left = cluster.metadata(LedgerId(7, 5))
            assert COPY_OF in left.custom_metadata
            # Another ledger's copy does not take it for its own.
            with pytest.raises(LedgerExists):
                await copy_ledger(client, client, other.ledger, ledger_scope_id=7, ledger_id=5)
            copied = await copy_ledger(client, client, writer.ledger, ledger_scope_id=7, ledger_id=5)
            assert cluster.metadata(copied.copy).custom_metadata == CUSTOM
            assert await payloads(client, copied.copy) == await payloads(client, writer.ledger)
            await client.delete_ledger(5, ledger_scope_id=7)


@pytest.mark.parametrize("cancellation_count", [1, 3])
@pytest.mark.parametrize("step", ["before the mark is removed", "after it"])
async def test_copy_that_is_cancelled_in_its_last_step_is_removed(fake_cluster, monkeypatch, step, cancellation_count):
    from bkctl.replication import copy as module

    is_finishing, may_return = threading.Event(), threading.Event()
    update_metadata = module.update_metadata

    def update_slowly(*arguments):
        updated = update_metadata(*arguments) if step == "after it" else None
        is_finishing.set()
        may_return.wait(LIMIT_S)
        return updated or update_metadata(*arguments)

    monkeypatch.setattr(module, "update_metadata", update_slowly)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 5)
        copying = asyncio.create_task(copy_ledger(client, client, writer.ledger, ledger_scope_id=7))
        assert await asyncio.to_thread(is_finishing.wait, LIMIT_S)
        for _ in range(cancellation_count):
            copying.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        may_return.set()
        await asyncio.wait([copying], timeout=LIMIT_S)
        assert copying.cancelled()
        assert ledgers_of(cluster) == [writer.ledger]


async def test_interrupted_copy_that_cannot_be_removed_is_noted(fake_cluster, monkeypatch):
    def refuse(*_):
        raise Unreachable("The store is away")

    monkeypatch.setattr("bkctl.replication.copy._remove", refuse)
    async with fake_cluster(3) as cluster, cluster.client() as client:
        writer = await write(client, 5)
        notes = []
        with pytest.raises(Died):
            await copy_ledger(client, client, writer.ledger, new_id=True, progress=die, note=notes.append)
        [copy] = set(ledgers_of(cluster)) - {writer.ledger}
        assert notes == [
            f"Ledger {copy} is an unfinished copy that could not be removed (The store is away): 'bkctl ledger delete "
            f"{copy}' removes it"
        ]


def die(*_):
    raise Died
