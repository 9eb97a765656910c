"""A bookie whose disks are behind, or fail beside the requests: it continues, or gives up and says so."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie import reads
from bkctl.bookie.bookie import Bookie
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.disk import DiskUsage, Files, StorageFile
from bkctl.errors import BookieUnavailable
from bkctl.formats.entry import ENTRY_V1
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import backpressure, framing, v2
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadRequest,
    Status,
)

HOUR_MS = 3_600_000


def bookie_of(cluster: Cluster, directory: Path, files: Files | None = None, **settings: Any) -> Bookie:
    config = BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(directory / "journal"),),
        ledger_directories=(str(directory / "ledgers"),),
        journal_pre_alloc_size_mb=1,
        disk_usage_threshold=1.0,
        **{"flush_interval": HOUR_MS, "disk_check_interval": HOUR_MS, **settings},
    )
    return Bookie(config, cluster=cluster, files=files)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB])
async def test_held_adds_continue_without_another_request_or_checkpoint(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    bookie = bookie_of(cluster, tmp_path, ledger_storage_class=storage)
    monkeypatch.setattr(bookie.storage.ledgers, "unwritten_bytes_max", 0)
    await bookie.start()
    async with BookKeeper(cluster) as bookkeeper:
        writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        for entry_id in range(3):
            assert await asyncio.wait_for(writer.add(b"entry"), LIMIT_S) == entry_id
        await writer.close()
    await bookie.stop()


async def test_client_that_does_not_read_has_few_answers_in_memory(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "READS_IN_PROGRESS_MAX", 4)
    count, payload = 200, bytes(200_000)

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    async with BookKeeper(cluster) as bookkeeper:
        writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        await asyncio.gather(*(writer.add(payload) for _ in range(count)))
    read, reads = bookie.storage.read, []
    monkeypatch.setattr(bookie.storage, "find", lambda *_: None)
    monkeypatch.setattr(bookie.storage, "read", lambda *entry: (reads.append(entry), read(*entry))[1])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    client.connect(bookie.address)
    reader, stream = await asyncio.open_connection(sock=client)
    for entry_id in range(count):
        out: list[Any] = []
        v2.encode_request(ReadRequest(writer.ledger, entry_id), out)
        stream.writelines(out)
    seen, unchanged = -1, 0
    while unchanged < 10:
        unchanged = unchanged + 1 if reads and seen == len(reads) else 0
        seen = len(reads)
        await asyncio.sleep(0.05)
    assert seen < count // 2  # the kernel holds some megabytes
    for _ in range(count):
        size = int.from_bytes(await reader.readexactly(4))
        assert len(await reader.readexactly(size)) > len(payload)
    stream.close()
    await bookie.stop()


class BrokenDisk(Files):
    """A disk that no longer says how full it is."""

    is_broken = False

    def disk_usage(self, path: Path) -> DiskUsage:
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return super().disk_usage(path)


async def test_bookie_that_cannot_look_after_its_disks_gives_up(cluster: Cluster, tmp_path: Path) -> None:
    files = BrokenDisk()
    bookie = bookie_of(cluster, tmp_path, files, disk_check_interval=10)
    await bookie.start()
    files.is_broken = True
    await asyncio.wait_for(bookie.stopped.wait(), LIMIT_S)
    assert "Input/output error" in str(bookie.failure)
    await bookie.stop()


class ThreadEnd(BaseException):
    """Ends a thread, as nothing that is an Exception does."""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("commits.commit", ThreadEnd),  # a group that fails is answered, and the journal continues
        *((method, kind) for method in ("write_entries", "checkpoints.write") for kind in (RuntimeError, ThreadEnd)),
    ],
)
# The thread's own traceback is to be seen, by whoever runs the bookie.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_bookie_gives_up_when_one_of_its_threads_dies(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, kind: type[BaseException]
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise kind(f"a defect in {method}")

    bookie = bookie_of(cluster, tmp_path, flush_interval=10)
    monkeypatch.setattr(bookie.storage.ledgers, "unwritten_bytes_max", 0)
    await bookie.start()
    parts = {"commits": bookie.storage.commits[0], "checkpoints": bookie.storage.checkpoints}
    part, _, name = method.rpartition(".")
    monkeypatch.setattr(parts.get(part, bookie.storage), name, defect)
    async with BookKeeper(cluster) as bookkeeper:
        writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        writer.add(b"entry")
        await asyncio.wait_for(bookie.stopped.wait(), LIMIT_S)
        assert f"a defect in {method}" in str(bookie.failure)
        await bookie.stop()


# The thread's own traceback is to be seen, by whoever runs the bookie.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("stops", [False, True], ids=["at work", "while it stops"])
async def test_requests_to_a_failed_bookie_end(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    monkeypatch.setattr("bkctl.bookie.bookie.STOP_GRACE_S", 600.0)
    entered, go_on = threading.Event(), threading.Event()

    def defect(*_: object, **__: object) -> None:
        entered.set()
        go_on.wait(LIMIT_S)
        raise ThreadEnd("a defect")

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    monkeypatch.setattr(bookie.storage.commits[0], "commit", defect)
    client = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, timeout_s=600)
    fence = client.send(ReadRequest(LedgerId(0, 1), -1, bytes(20), fence=True))
    await asyncio.to_thread(entered.wait, LIMIT_S)
    stopping = asyncio.create_task(bookie.stop()) if stops else None
    await asyncio.sleep(0.1)
    go_on.set()
    with pytest.raises(BookieUnavailable):
        await asyncio.wait_for(fence, LIMIT_S)
    await asyncio.wait_for(stopping or bookie.stop(), LIMIT_S)
    assert "a defect" in str(bookie.failure)


async def test_bookie_that_turns_read_only_and_back_while_the_store_is_slow_stays_registered(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    plain_delete = cluster.store.delete

    def delete(path: str, *arguments: Any, **named: Any) -> None:
        slow.wait(1)
        plain_delete(path, *arguments, **named)

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    monkeypatch.setattr(cluster.store, "delete", delete)
    moves = []
    for read_only in (True, False):
        bookie.state_manager.read_only = read_only
        moves.append(asyncio.create_task(bookie.registration.update()))
        await asyncio.sleep(0.3)
    await asyncio.gather(*moves)
    slow.set()
    found = cluster.bookies.get(bookie.bookie_id)
    assert found is not None
    assert found.state == "rw"
    await bookie.stop()


async def test_stop_during_a_registration_leaves_no_ghost(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster is the caller's, so that no session ends with the bookie."""
    entered, go_on, left = (threading.Event() for _ in range(3))
    plain_register = cluster.bookies.register

    def register(*arguments: Any, **named: Any) -> None:
        entered.set()
        go_on.wait(LIMIT_S)
        plain_register(*arguments, **named)
        left.set()

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    monkeypatch.setattr(cluster.bookies, "register", register)
    bookie.state_manager.read_only = True
    bookie.registration.update_soon()
    await asyncio.to_thread(entered.wait, LIMIT_S)
    stopping = asyncio.create_task(bookie.stop())
    await asyncio.sleep(0.3)
    go_on.set()
    await stopping
    await asyncio.to_thread(left.wait, LIMIT_S)
    found = cluster.bookies.get(bookie.bookie_id)
    assert found is not None
    assert found.state == "down"


async def test_finished_registrations_leave_no_tasks(cluster: Cluster, tmp_path: Path) -> None:
    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    before = len(bookie.registration.tasks)
    for _ in range(20):
        bookie.registration.update_soon()
    async with asyncio.timeout(LIMIT_S):
        while len(bookie.registration.tasks) > before:
            await asyncio.sleep(0.01)
    await bookie.stop()


class SlowDisk(Files):
    """Every sync, and every write to an entry log, takes its time."""

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        file = super().open(path, create=create)
        return _SlowFile(file.path, os.dup(file.fd))


class _SlowFile(StorageFile):
    __slots__ = ()

    def sync(self) -> None:
        time.sleep(0.05)
        super().sync()

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        if self.path.suffix == ".log":
            time.sleep(0.05)
        return super().write(offset, buffers)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def v2_adds(ledger_id: int, count: int, size: int) -> tuple[bytes, bytes]:
    """Frames that add to `ledger_id` with empty bodies behind the header, of entry 0; and where to put the entry id."""
    body = ENTRY_V1.pack(ledger_id, 0, -1, size) + bytes(size)
    out: list[Any] = []
    v2.encode_request(AddRequest(LedgerId(0, ledger_id), 0, bytes(20), body), out)
    return b"".join(map(bytes, out)), ENTRY_V1.pack(ledger_id, 0, -1, size)


async def pour(port: int, ledger_id: int, count: int, size: int) -> list[int]:
    """Add `count` entries as fast as the socket takes them, and give the codes of the answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    frame, header = v2_adds(ledger_id, count, size)
    at = frame.index(header) + 8

    async def write() -> None:
        for entry_id in range(count):
            writer.write(frame[:at] + entry_id.to_bytes(8) + frame[at + 8 :])
            await writer.drain()

    writing = asyncio.create_task(write())
    codes = [int.from_bytes((await reader.readexactly(28))[8:12]) for _ in range(count)]
    await writing
    writer.close()
    return codes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_stays_bounded_when_clients_write_faster_than_the_disk(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.storage.ledger.sorted_ledger_storage.UNWRITTEN_BYTES_MAX", 8 << 20)
    clients, count, size = 4, 600, 64 << 10  # 150 MiB
    most = 0

    async def scenario() -> None:
        nonlocal most
        bookie = bookie_of(
            cluster,
            tmp_path,
            SlowDisk(),
            journal_max_memory_size_mb=8,
            ledger_storage_class="org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
        )
        await bookie.start()
        before = resident_bytes()
        pouring = asyncio.gather(*(pour(bookie.address[1], 1 + each, count, size) for each in range(clients)))
        while not pouring.done():
            most = max(most, resident_bytes() - before)
            # One receive buffer beyond the bound for each connection.
            assert bookie.server.in_flight.bytes <= (8 << 20) + clients * (512 << 10)
            # The excess over the bound of one turn of the loop, from all connections.
            assert bookie.storage.ledgers.unwritten_bytes <= (8 << 20) + (8 << 20) + clients * (512 << 10)
            await asyncio.sleep(0.01)
        assert {code for codes in await pouring for code in codes} == {0}
        await bookie.stop()

    asyncio.run(scenario())
    assert most < 100 << 20, "of the 150 MiB that were sent"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
async def test_memory_stays_bounded_when_a_client_never_reads_its_answers(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "WRITE_BUFFER_BYTES_MAX", 64 << 10)

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    frame, _ = v2_adds(1, 1, 100)
    out: list[Any] = []
    v2.encode_request(ReadRequest(LedgerId(0, 1), 0), out)
    writers = []
    before = 0
    for request in (frame * 100, b"".join(out) * 500):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(bookie.address)
        _, writer = await asyncio.open_connection(sock=client)
        writers.append(writer)
        for _ in range(100_000):
            writer.write(request)
            try:
                await asyncio.wait_for(writer.drain(), 1)
            except TimeoutError:
                break  # it is read no more
        else:
            pytest.fail("the bookie reads on")
        before = before or resident_bytes()
    assert resident_bytes() - before < 50 << 20
    assert await asyncio.wait_for(pour(bookie.address[1], 2, 100, 1000), LIMIT_S) == [0] * 100
    for writer in writers:
        writer.transport.abort()
    await bookie.stop()


async def test_adds_beyond_the_pending_limit_are_refused_and_earlier_ones_kept(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = threading.Event()

    bookie = bookie_of(cluster, tmp_path, journal_queue_size=10, max_pending_add_requests_per_thread=20)
    await bookie.start()
    commits = bookie.storage.commits[0]
    commit = commits.commit

    def slow(*batches: Any, **named: Any) -> None:
        blocked.wait(LIMIT_S)
        commit(*batches, **named)

    monkeypatch.setattr(commits, "commit", slow)
    client = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id)

    def add(entry_id: int, **flags: bool) -> asyncio.Future[Any]:
        body = ENTRY_V1.pack(5, entry_id, entry_id - 1, 1) + b"x"
        return client.send(AddRequest(LedgerId(0, 5), entry_id, bytes(20), body, **flags))

    async def turn() -> None:
        seen = bookie.server.in_flight.bytes
        await client.send(ReadRequest(LedgerId(0, 99), 0))
        assert bookie.server.in_flight.bytes >= seen

    kept = []
    for entry_id in range(10):
        kept.append(add(entry_id))
        await turn()  # so that each is a batch of its own: the journal's queue is full then
    kept += [add(entry_id) for entry_id in range(10, 30)]
    await turn()
    refused = [add(entry_id) for entry_id in range(30, 40)]
    kept.append(add(40, recovery_add=True, high_priority=True))
    assert {(await answer).status for answer in refused} == {Status.ETOOMANYREQUESTS}
    assert not any(answer.done() for answer in kept)
    blocked.set()
    assert {(await answer).status for answer in kept} == {Status.EOK}
    assert (await add(41)).status is Status.EOK
    client.close()
    await bookie.stop()


def test_deferred_add_is_answered_before_the_sync_and_force_after_it(cluster: Cluster, tmp_path: Path) -> None:
    may_sync, syncs = threading.Event(), threading.Event()

    class HeldJournal(Files):
        def open(self, path: Path, *, create: bool = False) -> StorageFile:
            file = super().open(path, create=create)
            return _HeldFile(file.path, os.dup(file.fd)) if path.suffix == ".txn" else file

    class _HeldFile(StorageFile):
        __slots__ = ()

        def sync(self) -> None:
            if bookies and bookies[0].started_ms:
                syncs.set()
                may_sync.wait(LIMIT_S)
            super().sync()

    bookies: list[Bookie] = []

    async def scenario() -> None:
        bookies.append(bookie_of(cluster, tmp_path, HeldJournal()))
        bookie = bookies[0]
        await bookie.start()
        client = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id)
        body = ENTRY_V1.pack(5, 0, -1, 1) + b"x"
        deferred = client.send(AddRequest(LedgerId(0, 5), 0, bytes(20), body, deferred_sync=True))
        assert (await deferred).status is Status.EOK
        force = client.send(ForceLedgerRequest(LedgerId(0, 5)))
        await client.send(ReadRequest(LedgerId(0, 5), 0))
        journal = max(bookie.storage.journal_directories[0].glob("*.txn"))
        assert body in journal.read_bytes()
        assert not force.done()
        may_sync.set()
        assert (await force).status is Status.EOK
        client.close()
        await bookie.stop()

    asyncio.run(scenario())
    assert syncs.is_set()


async def test_long_polls_are_bounded_in_number_and_end_with_their_clients(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LONG_POLLS_MAX", 5)

    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    poll = ReadRequest(LedgerId(0, 5), LAST_ENTRY, previous_lac=0, timeout_ms=HOUR_MS, piggyback=True)
    clients = [await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id) for _ in range(2)]
    body = ENTRY_V1.pack(5, 0, -1, 1) + b"x"
    assert (await clients[0].send(AddRequest(LedgerId(0, 5), 0, bytes(20), body))).status is Status.EOK
    waiting = [clients[0].send(poll) for _ in range(5)]
    beyond: Any = await clients[1].send(poll)
    assert (beyond.status, beyond.max_lac, beyond.body) == (Status.EOK, -1, None)
    assert not any(answer.done() for answer in waiting)
    for answer in waiting:
        answer.add_done_callback(lambda done: done.exception())
    clients[0].close()
    async with asyncio.timeout(LIMIT_S):
        while len(bookie.processor.polls):
            await asyncio.sleep(0.01)
    assert not bookie.storage.ledgers.handles[LedgerId(0, 5)].watchers
    again = clients[1].send(poll)
    await clients[1].send(ReadRequest(LedgerId(0, 5), 0))
    assert not again.done()
    await bookie.stop()
    answer = await again
    assert answer.status is Status.EOK, "a stop ends what waits"
    clients[1].close()


async def test_lists_of_entries_that_wait_for_their_turn_copy_nothing_yet(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 requests of 30 bytes made a copy each of the ids in memory, all of them in one turn of the loop."""
    monkeypatch.setattr(backpressure, "READS_IN_PROGRESS_MAX", 2)
    may_list, copies = threading.Event(), []
    bookie = bookie_of(cluster, tmp_path)
    await bookie.start()
    reader = bookie.storage.ledgers.reader
    entry_ids = reader.entry_ids

    def held(*arguments: Any) -> Any:
        copies.append(arguments)
        if len(copies) == 10:
            raise RuntimeError("a defect")
        list_ids = entry_ids(*arguments)
        return lambda: may_list.wait(LIMIT_S) and list_ids()

    monkeypatch.setattr(reader, "entry_ids", held)
    client = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id)
    kept, deleted = LedgerId(0, 5), LedgerId(0, 6)
    for ledger in (kept, deleted):
        body = ENTRY_V1.pack(ledger.ledger_id, 0, -1, 1) + b"x"
        assert (await client.send(AddRequest(ledger, 0, bytes(20), body))).status is Status.EOK
    listed = [client.send(ListEntriesRequest(ledger)) for ledger in [kept] * 20 + [deleted]]
    await client.send(ReadRequest(kept, 0))
    assert len(copies) == 2
    bookie.storage.delete_ledger(deleted)
    may_list.set()
    found = [(await answer).status for answer in listed]
    assert sorted(found) == [*[Status.EOK] * 19, Status.ENOLEDGER, Status.EIO]
    assert found[9] is Status.EIO, "alone"
    client.close()
    await bookie.stop()
