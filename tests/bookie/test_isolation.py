"""Faults that stay where they are: with one request, one ledger, one group; and a stop that always ends."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from bookie.test_bookie import add, config_for, connected, digests, on_a_bookie, serving, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.disk import Files, StorageFile
from bkctl.errors import AlreadyExists, BadRequest, BkctlError, Corrupt, NotFound, UnknownLedgerState, Unsupported
from bkctl.ids import LedgerId
from bkctl.metadata.backends.sqlite import SqliteStore, _end_session
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import ForceLedgerRequest, Protocol, ReadRequest, Status, WriteLacRequest

PLAIN, OTHER, SCOPED = LedgerId(0, 5), LedgerId(0, 6), LedgerId(7, 5)
STORAGES = pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])


def in_flight(bookie: Bookie) -> int:
    return bookie.server.in_flight.bytes + sum(each._in_flight for each in bookie.server.connections)


@STORAGES
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
@pytest.mark.parametrize("journals", [1, 3])
def test_requests_taken_in_one_pass_are_refused_alone(
    tmp_path: Path, cluster: Cluster, storage: str, protocol: Protocol, journals: int
) -> None:
    """Adds and reads of many ledgers arrive together: of a fenced one, with a wrong key, of a missing entry."""
    ledgers = [LedgerId(0, number) for number in range(1, 8)]
    fenced, keyed = ledgers[2], ledgers[3]
    directories = tuple(str(tmp_path / f"j{number}") for number in range(journals))

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert set(await statuses(connection, *(add(each, 0) for each in ledgers))) == {Status.EOK}
        fence = ReadRequest(fenced, 0, digests(fenced).master_key, fence=True)
        assert await statuses(connection, fence) == [Status.EOK]
        requests: list[Any] = []
        expected: list[Status] = []
        for entry_id in (1, 2):
            for ledger in ledgers:
                refused = Status.EFENCED if ledger == fenced else Status.EUA if ledger == keyed else Status.EOK
                key = bytes(20) if ledger == keyed else digests(ledger).master_key
                requests += [add(ledger, entry_id, master_key=key), ReadRequest(ledger, 0), ReadRequest(ledger, 9)]
                expected += [refused, Status.EOK, Status.ENOENTRY]
        assert await asyncio.wait_for(statuses(connection, *requests), LIMIT_S) == expected
        assert in_flight(bookie) == 0
        reads = [ReadRequest(ledger, 2) for ledger in ledgers]
        assert await statuses(connection, *reads) == [
            Status.ENOENTRY if ledger in (fenced, keyed) else Status.EOK for ledger in ledgers
        ]

    on_a_bookie(tmp_path, cluster, body, protocol, ledger_storage_class=storage, journal_directories=directories)


# --- master keys -----------------------------------------------------------------------------------------------------


@STORAGES
@pytest.mark.parametrize("size", [0, 1, 19, 21, 1000, 1120, 1 << 20])
def test_master_key_that_is_not_20_bytes_is_refused_at_every_entry_point(
    tmp_path: Path, cluster: Cluster, storage: str, size: int
) -> None:
    key = b"k" * size

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in (PLAIN, SCOPED):
            lac = digests(ledger).seal_lac(0)
            for request in (
                add(ledger, 0, master_key=key),
                add(ledger, 0, master_key=key, recovery_add=True),
                add(ledger, 0, master_key=key, deferred_sync=True),
                ReadRequest(ledger, 0, key, fence=True),
                WriteLacRequest(ledger, 0, key, lac),
            ):
                assert (await connection.send(request)).status is Status.EBADREQ
            assert ledger not in bookie.storage.ledgers.handles
            assert (await connection.send(ReadRequest(ledger, 0))).status is Status.ENOLEDGER
        assert await statuses(connection, add(OTHER, 0)) == [Status.EOK]
        await bookie.checkpoint()
        assert bookie.failure is None
        assert in_flight(bookie) == 0

    on_a_bookie(tmp_path, cluster, body, ledger_storage_class=storage)
    journals = b"".join(path.read_bytes() for path in tmp_path.rglob("*.txn"))
    assert b"k" * 100 not in journals


@STORAGES
def test_bookie_starts_with_a_journal_that_holds_long_master_keys(
    tmp_path: Path, cluster: Cluster, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As earlier releases wrote it; 60 of them of 4 MB once filled the memory."""
    config = config_for(tmp_path, ledger_storage_class=storage)
    keys = {LedgerId(0, 100 + number): bytes([65 + number]) * 1_000_000 for number in range(5)}

    async def write() -> None:
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        async with connected(bookie) as connection:
            assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
            monkeypatch.setattr("bkctl.storage.open_ledgers.MASTER_KEY_SIZE", 1_000_000)
            answers = await statuses(connection, *(add(ledger, 0, master_key=key) for ledger, key in keys.items()))
            assert set(answers) == {Status.EOK}
            monkeypatch.undo()
        bookie.state_manager.fail(BkctlError("killed"))
        await bookie.stop()

    async def read() -> None:
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            assert bookie.failure is None
            for ledger in (PLAIN, *keys):
                response = await connection.send(ReadRequest(ledger, 0))
                assert bytes(response.body) == add(ledger, 0).body
            assert await statuses(connection, add(PLAIN, 1)) == [Status.EOK]
            assert all(bookie.storage.ledgers.handles[ledger].master_key == b"" for ledger in keys)

    asyncio.run(write())
    for _ in range(2):
        asyncio.run(read())


# --- continuations ---------------------------------------------------------------------------------------------------

ERRORS: list[tuple[Exception, Status]] = [
    (UnknownLedgerState("limbo"), Status.EUNKNOWNLEDGERSTATE),
    (Unsupported("a flags byte 0xFF"), Status.EIO),
    (Corrupt("damage"), Status.EIO),
    (OSError(errno.EIO, "a disk"), Status.EIO),
    (RuntimeError("a defect"), Status.EIO),
]


@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda each: type(each).__name__)
def test_fencing_read_that_fails_after_the_commit_leaves_its_group_answered(
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    protocol: Protocol,
    error: Exception,
    status: Status,
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, add(PLAIN, 0), add(OTHER, 0)) == [Status.EOK] * 2
        find = bookie.storage.find

        def failing(handle: Any, entry_id: int) -> Any:
            if handle.ledger == PLAIN:
                raise error
            return find(handle, entry_id)

        monkeypatch.setattr(bookie.storage, "find", failing)
        fence = ReadRequest(PLAIN, 0, digests(PLAIN).master_key, fence=True)
        found = await asyncio.wait_for(
            statuses(connection, add(OTHER, 1), fence, add(OTHER, 2), fence, add(OTHER, 3)), LIMIT_S
        )
        assert found == [Status.EOK, status, Status.EOK, status, Status.EOK]
        assert in_flight(bookie) == 0
        assert bookie.metrics.unexpected_errors == (2 if isinstance(error, RuntimeError) else 0)
        assert bookie.failure is None

    on_a_bookie(tmp_path, cluster, body, protocol)


@STORAGES
def test_flipped_byte_of_an_entry_stays_with_its_ledger(tmp_path: Path, cluster: Cluster, storage: str) -> None:
    config = config_for(tmp_path, ledger_storage_class=storage)

    async def write() -> None:
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            assert await statuses(connection, add(PLAIN, 0), add(OTHER, 0)) == [Status.EOK] * 2

    async def read() -> None:
        async with serving(config, cluster) as bookie, connected(bookie) as connection:
            fence = ReadRequest(PLAIN, 0, digests(PLAIN).master_key, fence=True)
            found = await asyncio.wait_for(statuses(connection, add(OTHER, 1), fence, add(OTHER, 2)), LIMIT_S)
            assert found == [Status.EOK, Status.EIO, Status.EOK]
            assert in_flight(bookie) == 0

    asyncio.run(write())
    (log,) = tmp_path.rglob("0.log")
    data = bytearray(log.read_bytes())
    at = data.index(add(PLAIN, 0).body)
    data[at] = 0xFF
    log.write_bytes(data)
    asyncio.run(read())


@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_unexpected_exception_of_a_handler_is_answered_logged_and_counted(
    tmp_path: Path,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: Protocol,
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        monkeypatch.setattr(bookie.storage, "add_records", defect)
        assert set(await asyncio.wait_for(statuses(connection, *(add(PLAIN, each) for each in range(9))), LIMIT_S)) == {
            Status.EIO
        }
        monkeypatch.undo()
        assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
        assert in_flight(bookie) == 0
        assert bookie.metrics.unexpected_errors > 0
        assert "a defect" in caplog.text

    on_a_bookie(tmp_path, cluster, body, protocol)


def test_exception_of_one_answer_leaves_the_other_answers(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        def defect(_: object) -> None:
            raise RuntimeError("a defect")

        assert await statuses(connection, add(OTHER, 1)) == [Status.EOK]
        added = connection.send(add(PLAIN, 0))
        body = add(OTHER, 0)
        bookie.storage.add(OTHER, 0, body.master_key, body.body, defect)
        bookie.storage.force(OTHER, defect)
        bookie.storage.when_written(OTHER, defect)
        bookie.commits.flush_soon()
        assert (await asyncio.wait_for(added, LIMIT_S)).status is Status.EOK
        assert in_flight(bookie) == 0

    on_a_bookie(tmp_path, cluster, body)


@STORAGES
def test_force_of_an_unreadable_ledger_has_one_answer(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    """Alone, and behind requests that wait for the ledger to be opened; as Apache's, which asks the journal alone."""

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        def unreadable(ledger: LedgerId) -> Any:
            raise Corrupt("damage")

        monkeypatch.setattr(bookie.storage.ledgers, "load", unreadable)
        force = ForceLedgerRequest(PLAIN)
        assert await statuses(connection, force) == [Status.EOK]
        found = await statuses(connection, add(PLAIN, 0), force, ReadRequest(PLAIN, 0), force)
        assert found == [Status.EIO, Status.EOK, Status.EIO, Status.EOK]
        assert in_flight(bookie) == 0

    on_a_bookie(tmp_path, cluster, body, ledger_storage_class=storage)


# --- stops -----------------------------------------------------------------------------------------------------------


def test_stop_leaves_the_list_of_bookies_before_it_writes(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[bool] = []

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
        plain = bookie.storage.close

        def close() -> None:
            found = cluster.bookies.get(bookie.bookie_id)
            listed.append(found is not None and found.state != "down")
            plain()

        monkeypatch.setattr(bookie.storage, "close", close)

    on_a_bookie(tmp_path, cluster, body)
    assert listed == [False]


def test_stopping_bookie_serves_until_it_has_left_the_list_of_bookies(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_leaving, may_leave = threading.Event(), threading.Event()
    listed: list[bool] = []

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        def is_listed() -> bool:
            found = cluster.bookies.get(bookie.bookie_id)
            return found is not None and found.state != "down"

        def unregister(bookie_id: str) -> None:
            is_leaving.set()
            assert may_leave.wait(LIMIT_S)
            plain_unregister(bookie_id)

        async def close(grace_s: float = 5.0) -> None:
            listed.append(is_listed())
            await plain_close(grace_s)

        plain_unregister, plain_close = cluster.bookies.unregister, bookie.server.close
        monkeypatch.setattr(cluster.bookies, "unregister", unregister)
        monkeypatch.setattr(bookie.server, "close", close)
        monkeypatch.setattr("bkctl.bookie.bookie.STOP_GRACE_S", 60.0)
        stopping = asyncio.create_task(bookie.stop())
        assert await asyncio.to_thread(is_leaving.wait, LIMIT_S)
        assert is_listed()
        assert await statuses(connection, add(PLAIN, 0), ReadRequest(PLAIN, 0)) == [Status.EOK] * 2
        may_leave.set()
        await stopping

    on_a_bookie(tmp_path, cluster, body)
    assert listed
    assert not any(listed)


class HangingFiles(Files):
    """Files whose syncs hang once `hangs` is cleared, until `go_on` is set."""

    def __init__(self) -> None:
        self.hangs, self.go_on = threading.Event(), threading.Event()

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        file = super().open(path, create=create)
        file.__class__ = _HangingFile
        _HangingFile.files = self
        return file


class _HangingFile(StorageFile):
    __slots__ = ()
    files: HangingFiles

    def sync(self) -> None:
        if self.files.hangs.is_set():
            self.files.go_on.wait(600)
        super().sync()


@pytest.mark.parametrize("when", ["at work", "as it stops"])
async def test_stop_ends_in_bounded_time_while_a_disk_hangs(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr("bkctl.bookie.bookie.STOP_S", 1.0)
    monkeypatch.setattr("bkctl.bookie.bookie.STOP_GRACE_S", 0.2)
    files = HangingFiles()

    bookie = Bookie(config_for(tmp_path), cluster=cluster, files=files)
    await bookie.start()
    async with connected(bookie) as connection:
        assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
        files.hangs.set()
        waiting = connection.send(add(PLAIN, 1)) if when == "at work" else None
        if waiting is not None:
            await asyncio.sleep(0.1)
        await asyncio.wait_for(bookie.stop(), LIMIT_S)
        assert bookie.failure is not None
        assert bookie.is_stuck
        if waiting is not None:
            with pytest.raises(BkctlError):
                await waiting
    files.go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("journal-", "stop-")):
            await asyncio.to_thread(thread.join, LIMIT_S)


@pytest.mark.parametrize(
    "method", ["checkpoints.begin", "checkpoints.write", "checkpoints.end", "write_entries", "close"]
)
@pytest.mark.parametrize("error", [OSError(errno.EIO, "a disk"), BadRequest("odd"), RuntimeError("a defect")], ids=repr)
def test_failed_task_ends_every_wait_for_it(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    async def run() -> None:
        bookie = Bookie(config_for(tmp_path), cluster=cluster)
        await bookie.start()
        async with connected(bookie) as connection:
            assert await statuses(connection, add(PLAIN, 0)) == [Status.EOK]
            *part, name = method.split(".")
            monkeypatch.setattr(getattr(bookie.storage, *part) if part else bookie.storage, name, fail)
            if method == "write_entries":
                bookie.commits.write_entries_soon()
            await asyncio.wait_for(bookie.checkpoint(), LIMIT_S)
            await asyncio.wait_for(bookie.stop(), LIMIT_S)
        assert bookie.failure is not None
        assert not bookie.is_stuck
        monkeypatch.undo()

    asyncio.run(run())

    async def again() -> None:
        async with serving(config_for(tmp_path), cluster) as bookie, connected(bookie) as connection:
            assert bytes((await connection.send(ReadRequest(PLAIN, 0))).body) == add(PLAIN, 0).body

    asyncio.run(again())


# --- registrations ---------------------------------------------------------------------------------------------------


def test_bookie_stops_when_another_process_holds_its_registration_after_a_lost_session(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = cluster.store
    assert isinstance(store, SqliteStore)

    async def run() -> None:
        bookie = Bookie(config_for(tmp_path, zk_timeout=500, disk_check_interval=50), cluster=cluster)
        await bookie.start()
        with open_cluster(f"sqlite://{store.file}") as other:
            await asyncio.to_thread(usurp, other, bookie)
            await asyncio.wait_for(bookie.stopped.wait(), LIMIT_S)
            assert isinstance(bookie.failure, AlreadyExists)
            assert "lost its session" in str(bookie.failure)
            assert "this bookie stops in" in caplog.text
            await asyncio.wait_for(bookie.stop(), LIMIT_S)
            found = other.bookies.get(bookie.bookie_id)
            assert found is not None
            assert found.state == "rw", "the other process keeps what it holds"

    def usurp(other: Cluster, bookie: Bookie) -> None:
        assert isinstance(store, SqliteStore)
        with store._lock:
            with store._transaction() as connection:
                assert store._session is not None
                _end_session(connection, store._session)
            other.bookies.register(bookie.bookie_id, bookie.service_info)

    asyncio.run(run())


def test_bookie_that_lost_its_cookie_with_its_session_stops_and_does_not_register(
    tmp_path: Path, cluster: Cluster
) -> None:
    """As a frozen one that was decommissioned meanwhile."""
    store = cluster.store
    assert isinstance(store, SqliteStore)

    async def run() -> None:
        bookie = Bookie(config_for(tmp_path, zk_timeout=500, disk_check_interval=50), cluster=cluster)
        await bookie.start()
        seen: list[object] = []
        with open_cluster(f"sqlite://{store.file}") as other:
            await asyncio.to_thread(decommission, other, bookie)
            async with asyncio.timeout(LIMIT_S):
                while not bookie.stopped.is_set():
                    seen.append(await asyncio.to_thread(other.bookies.get, bookie.bookie_id))
                    await asyncio.sleep(0.01)
        assert isinstance(bookie.failure, NotFound)
        assert "its cookie is gone: it was decommissioned" in str(bookie.failure)
        assert not any(seen)
        await asyncio.wait_for(bookie.stop(), LIMIT_S)

    def decommission(other: Cluster, bookie: Bookie) -> None:
        assert isinstance(store, SqliteStore)
        with store._lock:
            with store._transaction() as connection:
                assert store._session is not None
                _end_session(connection, store._session)
            other.cookies.remove(bookie.bookie_id, None)

    asyncio.run(run())


def test_bookie_that_registered_again_after_a_lost_session_continues(tmp_path: Path, cluster: Cluster) -> None:
    store = cluster.store
    assert isinstance(store, SqliteStore)

    def lose() -> None:
        assert isinstance(store, SqliteStore)
        with store._transaction() as connection:
            assert store._session is not None
            _end_session(connection, store._session)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        lose()
        async with asyncio.timeout(LIMIT_S):
            while (found := cluster.bookies.get(bookie.bookie_id)) is None or found.state != "rw":
                await asyncio.sleep(0.05)
        bookie.registration.check_usurper()
        assert bookie.failure is None

    on_a_bookie(tmp_path, cluster, body, zk_timeout=500, disk_check_interval=50)
