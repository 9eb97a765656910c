"""Disks that hang: what needs them waits, in order, and adds to other ledgers do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.served_bookies import add, config_for, connected, digests, serving, statuses
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie import group_commit
from bkctl.bookie.reads import READ_THREADS
from bkctl.bookie.waiting_requests import OPEN_THREADS
from bkctl.disk import Files, StorageFile
from bkctl.formats.availability import Availability
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.messages import (
    LAST_ENTRY,
    BatchReadRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    Status,
    WriteLacRequest,
)
from bkctl.storage.ledger.db_indexes import EntryLocationIndex, LedgerMetadataIndex
from bkctl.storage.ledger.index_persistence import IndexPersistenceMgr

#: A disk that hangs in the event loop's thread comes back after so long, so that the test fails and does not hang.
GIVE_UP_S = LIMIT_S


@pytest.fixture(params=[SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def storage_class(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class HungDisk(Files):
    """Reads of files whose names end so, and looks into indexes if `of_indexes`, wait from `hang` to `free`."""

    def __init__(self) -> None:
        self.suffix = "?"
        self.of_indexes = False
        self.waiting = 0
        self._is_free = threading.Event()
        self._is_free.set()

    def hang(self, suffix: str, *, of_indexes: bool = False) -> None:
        self.suffix, self.of_indexes = suffix, of_indexes
        self._is_free.clear()

    def free(self) -> None:
        self._is_free.set()

    def wait(self) -> None:
        self.waiting += not self._is_free.is_set()
        assert self._is_free.wait(GIVE_UP_S), "a thread waits for a disk that hangs"

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        return self._slow(super().open(path, create=create))

    def open_to_read(self, path: Path) -> StorageFile:
        if path.suffix == self.suffix:
            self.wait()
        return self._slow(super().open_to_read(path))

    def _slow(self, file: StorageFile) -> StorageFile:
        slow = _HungFile(file.path, os.dup(file.fd))
        slow.disk = self
        return slow


class _HungFile(StorageFile):
    __slots__ = ("disk",)
    disk: HungDisk

    def read(self, offset: int, size: int) -> Buffer:
        if self.path.suffix == self.disk.suffix:
            self.disk.wait()
        return super().read(offset, size)

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        return None

    def sync(self) -> None:
        if self.path.suffix == self.disk.suffix == ".txn":
            self.disk.wait()
        super().sync()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    """A disk whose indexes can hang too: files of Sorted and Interleaved, and databases."""
    disk = HungDisk()

    def waits(owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def slow(*args: Any) -> Any:
            if disk.of_indexes:
                disk.wait()
            return inner(*args)

        monkeypatch.setattr(owner, name, slow)

    waits(IndexPersistenceMgr, "_find")
    waits(LedgerMetadataIndex, "get")
    waits(EntryLocationIndex, "location")
    waits(EntryLocationIndex, "last_entry_id")
    yield disk
    disk.free()


def run(storage_class: str, tmp_path: Path, cluster: Cluster, disk: HungDisk, first: Any, then: Any) -> None:
    """Let `first` fill a bookie, then start it again, so that no ledger is in memory, and let `then` have it."""
    config = config_for(tmp_path, ledger_storage_class=storage_class, flush_interval=3_600_000)

    async def scenario() -> None:
        async with serving(config, cluster, disk) as bookie, connected(bookie) as connection:
            await first(connection)
        async with serving(config, cluster, disk) as bookie:
            try:
                await then(bookie)
            finally:
                disk.free()

    asyncio.run(scenario())


@pytest.mark.parametrize("scope", [0, 7])
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_adds_continue_while_opening_other_ledgers_hangs(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, storage_class: str, protocol: Protocol, scope: int
) -> None:
    if scope and protocol is Protocol.V2:
        pytest.skip("v2 has no scopes")
    hot = LedgerId(scope, 1)
    cold = [LedgerId(scope, 100 + number) for number in range(3 * (OPEN_THREADS + READ_THREADS))]
    key = digests(hot).master_key

    async def first(connection: Any) -> None:
        for ledger in (hot, *cold):
            assert set(await statuses(connection, add(ledger, 0), add(ledger, 1))) == {Status.EOK}

    async def then(bookie: Any) -> None:
        async with connected(bookie, protocol) as hung, connected(bookie, protocol) as other:
            assert await statuses(other, add(hot, 2)) == [Status.EOK]
            assert (await other.send(ReadRequest(hot, 2))).status is Status.EOK  # and its LAC is known
            disk.hang(".idx", of_indexes=True)
            requests: list[Any] = []
            for number, ledger in enumerate(cold):
                requests.append(add(ledger, 2))
                requests.append(ReadRequest(ledger, number % 2))
                requests.append(ReadRequest(ledger, LAST_ENTRY, master_key=key, fence=True))
                if protocol is Protocol.V3:
                    requests.append(ListEntriesRequest(ledger))
                    requests.append(ReadLacRequest(ledger))
                    requests.append(ForceLedgerRequest(ledger))
                    requests.append(ReadRequest(ledger, LAST_ENTRY, previous_lac=-1, timeout_ms=1))
            slow = [asyncio.ensure_future(hung.send(each)) for each in requests]
            while disk.waiting < OPEN_THREADS:
                await asyncio.sleep(0.001)
            for entry_id in range(3, 100):
                assert await statuses(other, add(hot, entry_id)) == [Status.EOK]
                assert (await other.send(ReadRequest(hot, entry_id))).status is Status.EOK
            if protocol is Protocol.V3:
                assert (await other.send(ForceLedgerRequest(hot))).status is Status.EOK
            assert not any(each.done() for each in slow)
            disk.free()
            answers = await asyncio.gather(*slow)
            assert {each.status for each in answers} == {Status.EOK}
            for request, answer in zip(requests, answers, strict=True):
                if isinstance(request, ReadRequest) and request.fence:
                    assert bytes(answer.body) == add(request.ledger, 2).body  # the add before it came first
            assert set(await statuses(hung, *(add(ledger, 3) for ledger in cold))) == {Status.EFENCED}

    run(storage_class, tmp_path, cluster, disk, first, then)


@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_new_ledgers_are_created_while_reads_of_entries_hang(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, storage_class: str, protocol: Protocol
) -> None:
    cold = [LedgerId(0, 100 + number) for number in range(4 * READ_THREADS)]

    async def first(connection: Any) -> None:
        for ledger in cold:
            assert set(await statuses(connection, add(ledger, 0), add(ledger, 1))) == {Status.EOK}

    async def then(bookie: Any) -> None:
        async with connected(bookie, protocol) as hung, connected(bookie, protocol) as other:
            disk.hang(".log")
            requests: list[Any] = [ReadRequest(ledger, number % 2) for number, ledger in enumerate(cold)]
            if protocol is Protocol.V2:
                requests += [BatchReadRequest(ledger, 0, number, 2, 1 << 20) for number, ledger in enumerate(cold)]
            slow = [asyncio.ensure_future(hung.send(each)) for each in requests]
            while disk.waiting < READ_THREADS:
                await asyncio.sleep(0.001)
            for number in range(50):
                assert await statuses(other, add(LedgerId(0, 1000 + number), 0)) == [Status.EOK]
            assert set(await statuses(other, *(add(ledger, 2) for ledger in cold))) == {Status.EOK}
            assert not any(each.done() for each in slow)
            disk.free()
            assert {each.status for each in await asyncio.gather(*slow)} == {Status.EOK}

    run(storage_class, tmp_path, cluster, disk, first, then)


def test_deletion_keeps_its_place_among_the_requests_that_wait_for_the_ledger(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, storage_class: str
) -> None:
    ledger = LedgerId(7, 5)

    async def first(connection: Any) -> None:
        assert set(await statuses(connection, add(ledger, 0), add(ledger, 1))) == {Status.EOK}

    async def then(bookie: Any) -> None:
        async with connected(bookie) as connection:
            disk.hang(".idx", of_indexes=True)
            early = [asyncio.ensure_future(connection.send(each)) for each in (add(ledger, 2), ReadRequest(ledger, 2))]
            while not disk.waiting or len(bookie.processor.requests.by_ledger.get(ledger, ())) < 2:
                await asyncio.sleep(0.001)
            deletion = asyncio.ensure_future(bookie.processor.requests.delete_all([ledger]))
            await asyncio.sleep(0)
            late = []
            for each in (ReadRequest(ledger, 0), add(ledger, 7), ReadRequest(ledger, 7), ReadRequest(ledger, 1)):
                # One after the other: a pass over the buffer takes adds before reads.
                waiting = len(bookie.processor.requests.by_ledger[ledger])
                late.append(asyncio.ensure_future(connection.send(each)))
                while len(bookie.processor.requests.by_ledger[ledger]) == waiting:
                    await asyncio.sleep(0.001)
            disk.free()
            assert [each.status for each in await asyncio.gather(*early)] == [Status.EOK, Status.EOK]
            assert await deletion == 1
            assert [each.status for each in await asyncio.gather(*late)] == [
                Status.ENOLEDGER, Status.EOK, Status.EOK, Status.ENOENTRY,
            ]  # fmt: skip
            listed = await connection.send(ListEntriesRequest(ledger))
            assert list(Availability.parse(listed.availability)) == [7]
            assert not bookie.processor.requests.by_ledger

    run(storage_class, tmp_path, cluster, disk, first, then)


def test_stop_does_not_wait_for_requests_that_wait_for_a_ledger(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, storage_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.bookie.bookie.STOP_GRACE_S", 0.05)
    ledger = LedgerId(0, 5)

    async def first(connection: Any) -> None:
        assert set(await statuses(connection, add(ledger, 0), add(ledger, 1))) == {Status.EOK}

    async def then(bookie: Any) -> None:
        async with connected(bookie) as connection:
            disk.hang(".idx", of_indexes=True)
            sent = connection.send(add(ledger, 2))
            while not disk.waiting:
                await asyncio.sleep(0.001)
            stopping = asyncio.ensure_future(bookie.stop())
            while bookie.storage_is_open:
                await asyncio.sleep(0.001)
            disk.free()
            await stopping
            assert bookie.failure is None
            with contextlib.suppress(Exception):
                assert (await sent).status is not Status.EOK

    run(storage_class, tmp_path, cluster, disk, first, then)


def test_index_that_cannot_be_read_answers_all_that_wait_for_it(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, storage_class: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = LedgerId(0, 5)

    async def first(connection: Any) -> None:
        assert set(await statuses(connection, add(ledger, 0), add(ledger, 1))) == {Status.EOK}

    async def then(bookie: Any) -> None:
        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error")

        key = digests(ledger).master_key
        with monkeypatch.context() as broken:
            broken.setattr(IndexPersistenceMgr, "_find", fail)
            broken.setattr(LedgerMetadataIndex, "get", fail)
            async with connected(bookie) as connection:
                requests = [
                    add(ledger, 2), add(ledger, 3), ReadRequest(ledger, 0), ReadLacRequest(ledger),
                    ListEntriesRequest(ledger), ReadRequest(ledger, 0, master_key=key, fence=True),
                    ReadRequest(ledger, LAST_ENTRY, previous_lac=0, timeout_ms=50_000),
                    WriteLacRequest(ledger, 0, key, digests(ledger).seal_lac(0)),
                ]  # fmt: skip
                assert set(await statuses(connection, *requests)) == {Status.EIO}
                with pytest.raises(OSError, match="Input/output"):
                    await bookie.processor.requests.delete(ledger)
        async with connected(bookie) as connection:
            assert await statuses(connection, add(ledger, 2), ReadRequest(ledger, 0)) == [Status.EOK, Status.EOK]
            assert not bookie.processor.requests.by_ledger

    run(storage_class, tmp_path, cluster, disk, first, then)


# --- journals --------------------------------------------------------------------------------------------------------


def slow_journals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("A write and sync of journal")]


def test_journal_whose_disk_hangs_is_logged_while_clients_wait(
    tmp_path: Path, cluster: Cluster, disk: HungDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_commit, "SLOW_GROUP_S", 0.05)
    monkeypatch.setattr(group_commit, "SLOW_GROUP_LOG_S", 3600)

    async def main() -> None:
        async with serving(config_for(tmp_path), cluster, disk) as bookie, connected(bookie) as connection:
            caplog.clear()
            disk.hang(".txn")
            sent = connection.send(add(LedgerId(0, 5), 0))
            async with asyncio.timeout(GIVE_UP_S - 5):
                while not slow_journals(caplog):
                    await asyncio.sleep(0.01)
            assert not sent.done()
            disk.free()
            assert (await sent).status is Status.EOK

    asyncio.run(main())
    (message,) = slow_journals(caplog)
    assert f"{tmp_path}/journal/current is not done after" in message


def test_slow_group_of_a_journal_is_logged_once_a_minute(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_commit.JournalThread, "_look", lambda _: None)
    monkeypatch.setattr(group_commit, "SLOW_GROUP_S", 3600)

    async def main() -> None:
        async with serving(config_for(tmp_path), cluster) as bookie, connected(bookie) as connection:
            assert await statuses(connection, add(LedgerId(0, 5), 0)) == [Status.EOK]
            assert not slow_journals(caplog), "a fast one"
            monkeypatch.setattr(group_commit, "SLOW_GROUP_S", -1)
            monkeypatch.setattr(group_commit, "SLOW_GROUP_LOG_S", 3600)
            for _ in range(5):
                assert await statuses(connection, add(LedgerId(0, 5), 0)) == [Status.EOK]
            (message,) = slow_journals(caplog)
            assert f"{tmp_path}/journal/current took" in message
            monkeypatch.setattr(group_commit, "SLOW_GROUP_LOG_S", 0)
            assert await statuses(connection, add(LedgerId(0, 5), 0)) == [Status.EOK]
            assert len(slow_journals(caplog)) == 2

    asyncio.run(main())
