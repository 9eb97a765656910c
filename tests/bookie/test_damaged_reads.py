"""Reads of what is damaged, lost, or far away: the bookie answers for it, and for it alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.served_bookies import PLAIN, SCOPED, add, config_for, connected, digests, on_a_bookie, serving, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.disk import Files, StorageFile
from bkctl.files.rocksdb import LedgersDatabase
from bkctl.formats.availability import Availability
from bkctl.formats.index import ENTRY_ID_MAX, NEEDS_INTEGRITY_CHECK
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    BatchReadRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    Status,
)
from bkctl.replication.replicator import LedgerFragmentReplicator, Outcome
from bkctl.storage.ledger.index_persistence import IndexPersistenceMgr


@pytest.fixture(params=[SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def storage_class(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def on_bookies(
    tmp_path: Path,
    cluster: Cluster,
    storage_class: str,
    first: Callable[[BookieConnection], Awaitable[None]],
    between: Callable[[Path], None],
    then: Callable[[Bookie, BookieConnection, BookieConnection], Awaitable[None]],
) -> None:
    """Let `first` fill a bookie, `between` change its stopped directory, and `then` ask it again over v3 and v2."""

    async def run() -> None:
        config = config_for(tmp_path, ledger_storage_class=storage_class)
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            await first(connection)
        between(tmp_path / "ledgers" / "current")
        async with (
            serving(config, cluster) as bookie,
            connected(bookie) as v3,
            connected(bookie, Protocol.V2) as v2,
        ):
            await then(bookie, v3, v2)

    asyncio.run(run())


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_damaged_last_entry_leaves_other_entries_readable(
    tmp_path: Path, cluster: Cluster, storage_class: str, ledger: LedgerId
) -> None:
    async def first(connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(ledger, number) for number in range(5)))) == {Status.EOK}

    def between(current: Path) -> None:
        body = add(ledger, 4).body
        logs = [path for path in current.rglob("*.log") if body in path.read_bytes()]
        assert len(logs) == 1
        data = logs[0].read_bytes()
        logs[0].write_bytes(data.replace(body, b"\xff" + body[1:]))

    async def then(bookie: Bookie, v3: BookieConnection, v2: BookieConnection) -> None:
        for _ in range(2):
            for connection in (v3, v2)[: 1 if ledger.is_scoped else 2]:
                for entry_id in range(4):
                    answer = await connection.send(ReadRequest(ledger, entry_id))
                    assert (answer.status, answer.max_lac) == (Status.EOK, None)
                    assert bytes(answer.body) == add(ledger, entry_id).body
                assert await statuses(connection, ReadRequest(ledger, 4), ReadRequest(ledger, LAST_ENTRY)) == [
                    Status.EIO, Status.EIO,
                ]  # fmt: skip
                key = digests(ledger).master_key
                fenced = await connection.send(ReadRequest(ledger, 3, master_key=key, fence=True))
                assert fenced.status is Status.EOK
        if not ledger.is_scoped:
            batch = await v2.send(BatchReadRequest(ledger, 0, 1, 0, 1 << 20))
            assert [bytes(body) for body in batch.bodies] == [add(ledger, number).body for number in range(4)]
        listed = await v3.send(ListEntriesRequest(ledger))
        assert list(Availability.parse(listed.availability)) == [0, 1, 2, 3, 4]
        poll = ReadRequest(ledger, LAST_ENTRY, previous_lac=0, timeout_ms=50_000)
        assert await statuses(v3, poll) == [Status.EIO]
        # The next entry says a LAC again.
        assert await statuses(v3, add(ledger, 5, recovery_add=True)) == [Status.EOK]
        answer = await v3.send(ReadRequest(ledger, 0))
        assert (answer.status, answer.max_lac) == (Status.EOK, 4)

    on_bookies(tmp_path, cluster, storage_class, first, between, then)


def test_ledgers_awaiting_an_integrity_check_give_no_negative_answer(tmp_path: Path, cluster: Cluster) -> None:
    async def first(connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(PLAIN, number) for number in range(3)))) == {Status.EOK}

    def between(current: Path) -> None:
        with LedgersDatabase.edit(current / "ledgers") as database:
            data = database.get(PLAIN)
            assert data is not None
            data = type(data)(data.exists, False, data.master_key, data.explicit_lac, True)
            database.put(PLAIN, data)

    async def then(bookie: Bookie, v3: BookieConnection, v2: BookieConnection) -> None:
        unknown = Status.EUNKNOWNLEDGERSTATE
        for connection in (v3, v2):
            answer = await connection.send(ReadRequest(PLAIN, 1))
            assert (answer.status, answer.max_lac) == (Status.EOK, None)
            assert await statuses(
                connection, ReadRequest(PLAIN, 3), ReadRequest(PLAIN, LAST_ENTRY), ReadRequest(LedgerId(0, 99), 0),
                add(PLAIN, 3),
            ) == [unknown, unknown, Status.ENOLEDGER, unknown]  # fmt: skip
        batches = [
            BatchReadRequest(PLAIN, first, number, 5, 1 << 20) for number, first in enumerate((1, 3, LAST_ENTRY))
        ]
        assert await statuses(v2, *batches) == [Status.EOK, unknown, unknown]
        poll = ReadRequest(PLAIN, LAST_ENTRY, previous_lac=0, timeout_ms=50_000)
        assert await statuses(v3, ReadLacRequest(PLAIN), ListEntriesRequest(PLAIN), poll) == [unknown] * 3
        key = digests(PLAIN).master_key
        for connection in (v3, v2):
            fences = [ReadRequest(PLAIN, number, master_key=key, fence=True) for number in (2, 3, LAST_ENTRY)]
            assert await statuses(connection, *fences) == [Status.EOK, unknown, unknown]
            assert await statuses(connection, add(PLAIN, 3), add(PLAIN, 2, recovery_add=True)) == [
                Status.EFENCED, Status.EOK,
            ]  # fmt: skip

    on_bookies(tmp_path, cluster, DB, first, between, then)


def test_unfinished_integrity_check_makes_a_bookie_read_only_and_its_negative_answers_unknown(
    tmp_path: Path, cluster: Cluster
) -> None:
    async def first(connection: BookieConnection) -> None:
        assert set(await statuses(connection, add(PLAIN, 0), add(SCOPED, 0))) == {Status.EOK}

    def between(current: Path) -> None:
        with LedgersDatabase.edit(current / "ledgers") as database:
            database.put_storage_flags(NEEDS_INTEGRITY_CHECK)

    async def then(bookie: Bookie, v3: BookieConnection, v2: BookieConnection) -> None:
        assert [(each.bookie_id, each.state) for each in cluster.bookies.list()] == [(bookie.bookie_id, "ro")]
        unknown = Status.EUNKNOWNLEDGERSTATE
        absent = LedgerId(0, 99)
        for connection in (v3, v2):
            assert await statuses(
                connection, ReadRequest(PLAIN, 0), ReadRequest(PLAIN, 1), ReadRequest(absent, 0), add(absent, 0),
            ) == [Status.EOK, unknown, unknown, Status.EREADONLY]  # fmt: skip
        assert await statuses(
            v3, ReadRequest(SCOPED, 0), ReadRequest(SCOPED, 1), ReadLacRequest(absent), ListEntriesRequest(absent),
        ) == [Status.EOK, unknown, unknown, unknown]  # fmt: skip

    on_bookies(tmp_path, cluster, DB, first, between, then)


@pytest.mark.parametrize("ledger", [PLAIN, SCOPED], ids=str)
def test_time_of_entry_lists_grows_with_entries_not_with_ids(
    tmp_path: Path, cluster: Cluster, storage_class: str, ledger: LedgerId
) -> None:
    ids = [0, 1, 5_000, 1 << 33, ENTRY_ID_MAX - 1, ENTRY_ID_MAX]

    async def listed(connection: BookieConnection) -> None:
        async with asyncio.timeout(LIMIT_S):
            answer = await connection.send(ListEntriesRequest(ledger))
        assert list(Availability.parse(answer.availability)) == ids
        last = await connection.send(ReadRequest(ledger, LAST_ENTRY))
        assert bytes(last.body) == add(ledger, ENTRY_ID_MAX, lac=0).body

    async def first(connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(ledger, each, lac=0) for each in ids))) == {Status.EOK}
        await listed(connection)

    async def then(bookie: Bookie, v3: BookieConnection, v2: BookieConnection) -> None:
        await listed(v3)
        assert await statuses(v3, ReadRequest(ledger, 7), ReadRequest(ledger, 1 << 20)) == [Status.ENOENTRY] * 2

    on_bookies(tmp_path, cluster, storage_class, first, lambda _: None, then)


def test_entry_list_ends_when_its_client_is_gone(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, pages = threading.Event(), threading.Event(), []
    inner = IndexPersistenceMgr.read_page

    def read_page(self: IndexPersistenceMgr, ledger: LedgerId, number: int) -> Any:
        begun.set()
        assert may_go_on.wait(LIMIT_S)
        pages.append(number)
        return inner(self, ledger, number)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for page in range(5):
            await statuses(connection, add(PLAIN, page * bookie.config.page_size // 8))
        await bookie.checkpoint()
        monkeypatch.setattr(IndexPersistenceMgr, "read_page", read_page)
        async with connected(bookie) as leaving:
            asking = leaving.send(ListEntriesRequest(PLAIN))
            assert await asyncio.to_thread(begun.wait, LIMIT_S)
        asking.cancel()
        while len(bookie.server.connections) > 1:
            await asyncio.sleep(0.001)
        may_go_on.set()
        await asyncio.to_thread(bookie.processor.reader.stop)
        assert pages == [0]

    on_a_bookie(tmp_path, cluster, body)


def test_recovery_add_is_answered_after_the_sync_although_it_asks_for_a_deferred_one(
    tmp_path: Path, cluster: Cluster
) -> None:
    may_sync = threading.Event()
    may_sync.set()

    class HeldJournal(Files):
        def open(self, path: Path, *, create: bool = False) -> StorageFile:
            file = super().open(path, create=create)
            return HeldFile(file.path, os.dup(file.fd)) if path.suffix == ".txn" else file

    class HeldFile(StorageFile):
        __slots__ = ()

        def sync(self) -> None:
            assert may_sync.wait(LIMIT_S)
            super().sync()

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        await statuses(connection, add(PLAIN, 0))
        may_sync.clear()
        try:
            recovery = connection.send(add(PLAIN, 1, recovery_add=True, deferred_sync=True))
            assert (await connection.send(add(PLAIN, 2, deferred_sync=True))).status is Status.EOK
            for _ in range(100):  # as many turns of the loop as an answer could take
                await asyncio.sleep(0)
            assert not recovery.done()
        finally:
            may_sync.set()
        assert (await recovery).status is Status.EOK
        assert (await connection.send(ForceLedgerRequest(PLAIN))).status is Status.EOK

    on_a_bookie(tmp_path, cluster, body, files=HeldJournal())


def test_replicator_reads_a_replica_whose_last_entry_is_damaged(
    tmp_path: Path, cluster: Cluster, storage_class: str
) -> None:
    """Entries 0 and 3 are on that replica alone, once another bookie is lost; entry 4 has a second replica."""
    configs = [config_for(tmp_path / str(number), ledger_storage_class=storage_class) for number in range(5)]
    by_id: dict[str, BookieConfig] = {}

    async def start(stack: contextlib.AsyncExitStack, *configs: BookieConfig) -> None:
        for config in configs:
            by_id[(await stack.enter_async_context(serving(config, cluster))).bookie_id] = config

    async def write() -> LedgerId:
        async with contextlib.AsyncExitStack() as stack:
            await start(stack, *configs[:3])
            client = await stack.enter_async_context(BookKeeper(cluster))
            writer = await client.create_ledger_adv(
                ensemble_size=3, write_quorum_size=2, ack_quorum_size=2, password=b"secret"
            )
            for number in range(5):
                writer.add(b"%d" % number)
            await writer.flush()
            await writer.force()
            await writer.close()
            return writer.ledger

    async def replicate(ledger: LedgerId, survivors: Sequence[str]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            await start(stack, *(by_id[each] for each in survivors), *configs[3:])
            client = await stack.enter_async_context(BookKeeper(cluster))
            result = await LedgerFragmentReplicator(client).replicate_ledger(ledger)
            assert {each.outcome for each in result.fragments} == {Outcome.REPLICATED}
            assert result.done
            reader = await client.open_ledger(ledger.ledger_id, password=b"secret")
            assert [bytes(entry.payload) async for entry in reader.read(0, 4)] == [b"%d" % each for each in range(5)]

    ledger = asyncio.run(write())
    _, damaged, other = cluster.ledgers.read(ledger).metadata.ensembles[0].bookies
    (log,) = Path(by_id[damaged].ledger_directories[0]).rglob("0.log")
    data = bytearray(log.read_bytes())
    data[data.index(struct.pack(">qq", ledger.ledger_id, 4))] = 0xFF
    log.write_bytes(data)
    asyncio.run(replicate(ledger, (damaged, other)))
