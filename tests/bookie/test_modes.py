"""Read-only and writable: what each does with requests, who may change it, and what a restart remembers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.descriptors import descriptors_used_up
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.config import BookieConfig
from bkctl.disk import DiskUsage, Files, StorageFile
from bkctl.errors import BkctlError, UsageError
from bkctl.files.journal import read_last_mark
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.layout import Buffer
from bkctl.formats.status import BookieMode, BookieStatus
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Status,
    WriteLacRequest,
)

PLAIN, SCOPED, NEW = LedgerId(0, 5), LedgerId(7, 5), LedgerId(0, 6)


class Disks(Files):
    """Disks that are as full as the test says."""

    used = 0.5

    def disk_usage(self, path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, int((1 - self.used) * (1 << 40)), 1)


def by(ledger: LedgerId) -> DigestManager:
    return DigestManager(ledger, DigestType.CRC32C, b"secret")


def add(ledger: LedgerId, entry_id: int, **changes: Any) -> AddRequest:
    body = by(ledger).seal(entry_id, entry_id - 1, 1, b"x") + b"x"
    return AddRequest(ledger, entry_id, by(ledger).master_key, body)._replace(**changes)


def on_a_bookie(
    tmp_path: Path,
    cluster: Cluster,
    body: Callable[[Bookie, BookieConnection], Coroutine[Any, Any, None]],
    files: Files | None = None,
    **settings: Any,
) -> None:
    config = BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(tmp_path / "journal"),),
        ledger_directories=(str(tmp_path / "a"), str(tmp_path / "b")),
        journal_pre_alloc_size_mb=1,
        **{"disk_check_interval": 20} | settings,
    )

    @contextlib.asynccontextmanager
    async def connected(bookie: Bookie) -> AsyncIterator[BookieConnection]:
        connection = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id)
        assert await connection.supports_scopes()
        yield connection
        connection.close()

    async def run() -> None:
        bookie = Bookie(config, cluster=cluster, files=files or Disks())
        await bookie.start()
        try:
            async with connected(bookie) as connection:
                await body(bookie, connection)
        finally:
            await bookie.stop()

    asyncio.run(run())


def registered(cluster: Cluster) -> list[str]:
    return [each.state for each in cluster.bookies.list()]


def status_files(tmp_path: Path) -> list[Path]:
    return [tmp_path / name / "current" / "BOOKIE_STATUS" for name in ("a", "b")]


def write_status(tmp_path: Path, name: str, text: bytes) -> None:
    path = tmp_path / name / "current" / "BOOKIE_STATUS"
    path.write_bytes(text)


async def nothing(bookie: Bookie, connection: BookieConnection) -> None:
    """Start and stop."""


def test_read_only_bookie_reads_fences_and_recovers_but_takes_nothing_new(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in (PLAIN, SCOPED):
            assert (await connection.send(add(ledger, 0))).status is Status.EOK
        assert bookie.state()["readOnly"] is False
        await bookie.set_read_only(True)
        assert await asyncio.to_thread(registered, cluster) == ["ro"]
        assert bookie.state() == {
            "running": True,
            "readOnly": True,
            "shuttingDown": False,
            "availableForHighPriorityWrites": True,
        }
        for ledger in (PLAIN, SCOPED):
            key = by(ledger).master_key
            expected = [
                (add(ledger, 1), Status.EREADONLY),
                (add(ledger, 1, recovery_add=True), Status.EREADONLY),
                (WriteLacRequest(ledger, 0, key, by(ledger).seal_lac(0)), Status.EREADONLY),
                (ReadRequest(ledger, 0), Status.EOK),
                (ReadRequest(ledger, LAST_ENTRY, previous_lac=0, timeout_ms=1), Status.EOK),
                (ReadRequest(ledger, LAST_ENTRY, key, fence=True), Status.EOK),
                (add(ledger, 1, high_priority=True), Status.EFENCED),
                (add(ledger, 1, recovery_add=True, high_priority=True), Status.EOK),
                (ReadLacRequest(ledger), Status.EOK),
                (ForceLedgerRequest(ledger), Status.EOK),
                (ListEntriesRequest(ledger), Status.EOK),
                (BookieInfoRequest(3), Status.EOK),
            ]
            for request, status in expected:
                assert (await connection.send(request)).status is status, request
        assert (await connection.send(ReadRequest(NEW, 0, by(NEW).master_key, fence=True))).status is Status.ENOENTRY
        await bookie.set_read_only(False)
        assert await asyncio.to_thread(registered, cluster) == ["rw"]
        assert (await connection.send(add(LedgerId(0, 9), 0))).status is Status.EOK

    on_a_bookie(tmp_path, cluster, body)
    assert not any(path.exists() for path in status_files(tmp_path)), "persistBookieStatusEnabled is off"


@pytest.mark.parametrize("persists", [True, False])
def test_restart_keeps_read_only_mode_with_persisted_status(tmp_path: Path, cluster: Cluster, persists: bool) -> None:
    async def become(bookie: Bookie, connection: BookieConnection) -> None:
        await bookie.set_read_only(True)

    async def still(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.read_only is persists
        assert await asyncio.to_thread(registered, cluster) == ["ro" if persists else "rw"]
        await bookie.set_read_only(False)

    async def no_more(bookie: Bookie, connection: BookieConnection) -> None:
        assert not bookie.read_only

    on_a_bookie(tmp_path, cluster, become, persist_bookie_status_enabled=persists)
    if persists:
        found = [BookieStatus.parse(path.read_bytes()) for path in status_files(tmp_path)]
        assert [(each.mode, each.manual) for each in found] == [(BookieMode.READ_ONLY, True)] * 2
    on_a_bookie(tmp_path, cluster, still, persist_bookie_status_enabled=persists)
    on_a_bookie(tmp_path, cluster, no_more, persist_bookie_status_enabled=persists)
    if persists:
        found = [BookieStatus.parse(path.read_bytes()) for path in status_files(tmp_path)]
        assert [(each.mode, each.manual) for each in found] == [(BookieMode.READ_WRITE, False)] * 2


@pytest.mark.parametrize(
    ("one", "other", "read_only"),
    [
        (b"1,READ_ONLY,1700000000000,true\n", None, True),
        (b"1,READ_ONLY,1700000000000\n", None, True),  # of a bookie before 4.17.3
        (b"1,READ_ONLY,1700000000000,false\n", None, False),  # for its disks, which have space now
        (b"1,READ_ONLY,1700000000000,true\n", b"1,READ_WRITE,1700000000001,false\n", False),
        (b"1,READ_WRITE,1700000000000,false\n", b"1,READ_ONLY,1700000000001,true\n", True),
        (b"1,READ_ONLY,1700000000000,true\n", b"2,anything\n", True),
        (b"", b"\xff\xff", False),
    ],
)
def test_latest_readable_status_counts(
    tmp_path: Path, cluster: Cluster, one: bytes, other: bytes | None, read_only: bool
) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.read_only is read_only

    on_a_bookie(tmp_path, cluster, nothing)
    write_status(tmp_path, "a", one)
    if other is not None:
        write_status(tmp_path, "b", other)
    on_a_bookie(tmp_path, cluster, body, persist_bookie_status_enabled=True)


def test_bookie_that_an_operator_made_read_only_stays_so_when_its_disks_have_space(
    tmp_path: Path, cluster: Cluster
) -> None:
    disks = Disks()

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        disks.used = 0.99
        while not bookie.read_only:
            await asyncio.sleep(0.01)
        await bookie.set_read_only(True)
        disks.used = 0.5
        while bookie.state_manager.disks_full:
            await asyncio.sleep(0.01)
        assert bookie.read_only
        disks.used = 0.99
        while not bookie.state_manager.disks_full:
            await asyncio.sleep(0.01)
        await bookie.set_read_only(False)
        assert bookie.read_only, "for its disks"
        disks.used = 0.5
        while bookie.read_only:
            await asyncio.sleep(0.01)

    on_a_bookie(tmp_path, cluster, body, disks, persist_bookie_status_enabled=True)


def test_operator_cannot_override_the_configured_mode(tmp_path: Path, cluster: Cluster) -> None:
    async def forced(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.read_only
        with pytest.raises(UsageError, match="forceReadOnlyBookie"):
            await bookie.set_read_only(False)
        assert (await connection.send(add(PLAIN, 0))).status is Status.EREADONLY

    async def never(bookie: Bookie, connection: BookieConnection) -> None:
        with pytest.raises(UsageError, match="readOnlyModeEnabled"):
            await bookie.set_read_only(True)
        assert not bookie.read_only

    on_a_bookie(tmp_path, cluster, forced, force_read_only_bookie=True, persist_bookie_status_enabled=True)
    assert not any(path.exists() for path in status_files(tmp_path))
    on_a_bookie(tmp_path, cluster, never, read_only_mode_enabled=False)


def test_changed_thresholds_of_disks_hold_at_once(tmp_path: Path, cluster: Cluster) -> None:
    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        for threshold, is_read_only in ((0.2, True), (0.95, False)):
            limits = {"disk_usage_threshold": threshold, "disk_usage_warn_threshold": threshold}
            bookie.reconfigure(bookie.config.with_changes(**limits))
            while bookie.read_only is not is_read_only:
                await asyncio.sleep(0.01)

    on_a_bookie(tmp_path, cluster, body, disk_check_interval=3_600_000)


def test_without_read_only_mode_a_bookie_with_full_disks_stops(tmp_path: Path, cluster: Cluster) -> None:
    disks = Disks()

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        disks.used = 0.99
        await asyncio.wait_for(bookie.stopped.wait(), LIMIT_S)
        assert "read-only mode is not enabled" in str(bookie.failure)

    on_a_bookie(tmp_path, cluster, body, disks, read_only_mode_enabled=False)


class FullFiles(Disks):
    """Files of which some cannot be written, for want of space."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.is_full = False

    def refuses(self, path: Path) -> bool:
        return self.is_full and any(each in str(path) for each in self.names)

    def disk_usage(self, path: Path) -> DiskUsage:
        return DiskUsage(1 << 40, 0 if self.refuses(path / "x.txn") else 1 << 39, 1)

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        file = super().open(path, create=create)
        return FullFile(self, path, os.dup(file.fd))


class FullFile(StorageFile):
    __slots__ = ("files",)

    def __init__(self, files: FullFiles, path: Path, fd: int) -> None:
        super().__init__(path, fd)
        self.files = files

    def write(self, offset: int, buffers: Sequence[Buffer]) -> int:
        if self.files.refuses(self.path):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        return super().write(offset, buffers)


@pytest.mark.parametrize("names", [("journal/current/",), ("lastMark",)], ids=["journal", "marks"])
def test_suddenly_full_disk_makes_a_bookie_read_only_until_there_is_space(
    tmp_path: Path, cluster: Cluster, names: tuple[str, ...]
) -> None:
    files = FullFiles(*names)

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(PLAIN, 0))).status is Status.EOK
        files.is_full = True
        first = await connection.send(add(PLAIN, 1))
        assert first.status is (Status.EIO if "journal" in names[0] else Status.EOK)
        await bookie.checkpoint()
        while await asyncio.to_thread(registered, cluster) != ["ro"]:
            await asyncio.sleep(0.01)
        assert (await connection.send(add(PLAIN, 2))).status is Status.EREADONLY
        high = add(PLAIN, 2, recovery_add=True, high_priority=True)
        assert (await connection.send(high)).status is Status.EREADONLY, "there is no space for it either"
        assert not bookie.state()["availableForHighPriorityWrites"]
        assert (await connection.send(ReadRequest(PLAIN, 0))).status is Status.EOK
        files.is_full = False
        while await asyncio.to_thread(registered, cluster) != ["rw"]:
            await asyncio.sleep(0.01)
        for entry_id in (1, 2):
            assert (await connection.send(add(PLAIN, entry_id))).status is Status.EOK

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        for entry_id in range(3):
            answer: Any = await connection.send(ReadRequest(PLAIN, entry_id))
            assert answer.body == add(PLAIN, entry_id).body

    on_a_bookie(tmp_path, cluster, body, files)
    on_a_bookie(tmp_path, cluster, read)


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_process_without_free_descriptors_is_read_only_until_files_are_closed(
    tmp_path: Path, cluster: Cluster, storage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[int] = []

    def large(entry_id: int) -> AddRequest:
        payload = entry_id.to_bytes(4, "big") * 100_000
        return AddRequest(
            PLAIN, entry_id, by(PLAIN).master_key, by(PLAIN).seal(entry_id, entry_id - 1, 1, payload) + payload
        )

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        async def write(entry_ids: range) -> list[Status]:
            answers = []
            for entry_id in entry_ids:  # one by one, so that the journals roll between them
                answers.append((await connection.send(large(entry_id))).status)
                if answers[-1] is Status.EOK:
                    kept.append(entry_id)
                else:
                    break
                await bookie.checkpoint()
            return answers

        assert set(await write(range(2))) == {Status.EOK}
        with descriptors_used_up():
            refused = await write(range(2, 200))
            assert refused[-1] in (Status.EIO, Status.EREADONLY)
            await bookie.checkpoint()
            assert bookie.failure is None
            assert any("Too many open files" in each.getMessage() for each in caplog.records)
        while bookie.read_only:
            await asyncio.sleep(0.01)
        assert set(await write(range(200, 210))) == {Status.EOK}

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        for entry_id in kept:
            answer: Any = await connection.send(ReadRequest(PLAIN, entry_id))
            assert answer.body == large(entry_id).body

    settings = {"ledger_storage_class": storage, "journal_max_size_mb": 1, "log_size_limit": 1 << 20}
    on_a_bookie(tmp_path, cluster, body, **settings)
    on_a_bookie(tmp_path, cluster, read, **settings)
    assert not [each.getMessage() for each in caplog.records if each.exc_info or each.levelno >= logging.ERROR]


async def die(bookie: Bookie) -> None:
    """Nothing is written from here on, as if it were killed."""
    bookie.state_manager.failure = BkctlError("killed")


def journals(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("journal/current/*.txn"))


@pytest.fixture(params=[SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def full(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, FullFiles]:
    """A storage class, and a disk with which its databases are full too."""
    files = FullFiles("")
    for kind in (LedgersDatabase, LocationsDatabase):
        serve = kind.serve

        def serve_where_there_is_space(*arguments: Any, serve: Any = serve) -> Any:
            if files.is_full:
                raise BkctlError("cannot be opened: IO error: No space left on device")
            return serve(*arguments)

        monkeypatch.setattr(kind, "serve", serve_where_there_is_space)
    return request.param, files


def test_bookie_starts_on_a_full_disk_read_only_until_there_is_space(
    tmp_path: Path, cluster: Cluster, full: tuple[str, FullFiles]
) -> None:
    storage_class, files = full

    async def write(bookie: Bookie, connection: BookieConnection) -> None:
        for ledger in (PLAIN, SCOPED):
            assert (await connection.send(add(ledger, 0))).status is Status.EOK
        await bookie.checkpoint()
        for ledger in (PLAIN, SCOPED, NEW):
            assert (await connection.send(add(ledger, 1))).status is Status.EOK
        await die(bookie)

    async def check_entries(connection: BookieConnection) -> None:
        for ledger, entry_id in ((PLAIN, 0), (SCOPED, 0), (PLAIN, 1), (SCOPED, 1), (NEW, 1)):
            answer: Any = await connection.send(ReadRequest(ledger, entry_id))
            assert answer.body == add(ledger, entry_id).body

    async def serve_full(bookie: Bookie, connection: BookieConnection) -> None:
        assert journals(tmp_path) == before
        assert bookie.storage.replayed[0] == 3
        assert registered(cluster) == ["ro"]
        await check_entries(connection)
        assert (await connection.send(add(PLAIN, 2))).status is Status.EREADONLY
        await bookie.checkpoint()
        assert bookie.failure is None
        await check_entries(connection)
        assert journals(tmp_path) == before
        await die(bookie)

    async def find_space(bookie: Bookie, connection: BookieConnection) -> None:
        files.is_full = False
        while await asyncio.to_thread(registered, cluster) != ["rw"]:
            await asyncio.sleep(0.01)
        await check_entries(connection)
        assert (await connection.send(add(PLAIN, 2))).status is Status.EOK

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.storage.replayed == (0, 0)
        await check_entries(connection)
        assert (await connection.send(ReadRequest(PLAIN, 2))).status is Status.EOK

    on_a_bookie(tmp_path, cluster, write, files, ledger_storage_class=storage_class)
    before = journals(tmp_path)
    files.is_full = True
    logs = sorted(tmp_path.rglob("*.log"))
    for _ in range(2):
        on_a_bookie(tmp_path, cluster, serve_full, files, ledger_storage_class=storage_class)
    assert sorted(tmp_path.rglob("*.log")) == logs
    on_a_bookie(tmp_path, cluster, find_space, files, ledger_storage_class=storage_class)
    on_a_bookie(tmp_path, cluster, read, files, ledger_storage_class=storage_class)


def test_bookie_starts_where_only_the_disk_of_its_journal_is_full(tmp_path: Path, cluster: Cluster) -> None:
    files = FullFiles("journal/current/")

    async def write(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(PLAIN, 0))).status is Status.EOK
        await die(bookie)

    async def serve_full(bookie: Bookie, connection: BookieConnection) -> None:
        assert journals(tmp_path) == before
        assert registered(cluster) == ["ro"]
        answer: Any = await connection.send(ReadRequest(PLAIN, 0))
        assert answer.body == add(PLAIN, 0).body
        fence = ReadRequest(PLAIN, 0, fence=True, master_key=by(PLAIN).master_key)
        assert (await connection.send(fence)).status is Status.EIO, "it cannot be kept"
        assert journals(tmp_path) == before
        await die(bookie)

    async def find_space(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.storage.replayed == (0, 0), "the ledger directories had space"
        files.is_full = False
        while await asyncio.to_thread(registered, cluster) != ["rw"]:
            await asyncio.sleep(0.01)
        assert (await connection.send(add(PLAIN, 1))).status is Status.EOK
        assert len(journals(tmp_path)) == len(before) + 1
        await die(bookie)

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        for entry_id in (0, 1):
            answer: Any = await connection.send(ReadRequest(PLAIN, entry_id))
            assert answer.body == add(PLAIN, entry_id).body

    on_a_bookie(tmp_path, cluster, write, files)
    before = journals(tmp_path)
    files.is_full = True
    on_a_bookie(tmp_path, cluster, serve_full, files)
    on_a_bookie(tmp_path, cluster, find_space, files)
    on_a_bookie(tmp_path, cluster, read, files)


def test_replay_beyond_the_memory_bound_needs_space(
    tmp_path: Path, cluster: Cluster, full: tuple[str, FullFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage_class, files = full

    payload = bytes(600_000)

    async def write(bookie: Bookie, connection: BookieConnection) -> None:
        for entry_id in range(5):
            body = by(PLAIN).seal(entry_id, -1, (entry_id + 1) * len(payload), payload) + payload
            request = AddRequest(PLAIN, entry_id, by(PLAIN).master_key, body)
            assert (await connection.send(request)).status is Status.EOK
        await die(bookie)

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.storage.replayed[0] == 5

    settings: dict[str, Any] = {
        "ledger_storage_class": storage_class,
        "skip_list_size_limit": 1 << 20,
        "db_storage_write_cache_max_size_mb": 1,
    }
    on_a_bookie(tmp_path, cluster, write, files, ledger_storage_class=storage_class)
    before = sorted(tmp_path.rglob("*.txn")) + sorted(tmp_path.rglob("*.log"))
    files.is_full = True
    with monkeypatch.context() as small:
        small.setattr("bkctl.storage.ledger.sorted_ledger_storage.UNWRITTEN_BYTES_MAX", 2 << 20)
        with pytest.raises(BkctlError, match="The journals hold more than") as refused:
            on_a_bookie(tmp_path, cluster, read, files, **settings)
    assert "make space" in str(refused.value.hint)
    assert sorted(tmp_path.rglob("*.txn")) + sorted(tmp_path.rglob("*.log")) == before
    files.is_full = False
    on_a_bookie(tmp_path, cluster, read, files, **settings)


def test_one_full_directory_may_miss_a_mark(tmp_path: Path, cluster: Cluster) -> None:
    files = FullFiles("a/current/lastMark")

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(PLAIN, 0))).status is Status.EOK
        files.is_full = True
        before = [read_last_mark([tmp_path / name / "current"]) for name in ("a", "b")]
        await bookie.checkpoint()
        after = [read_last_mark([tmp_path / name / "current"]) for name in ("a", "b")]
        assert (after[0], after[1] > before[1]) == (before[0], True)
        assert not bookie.read_only
        files.is_full = False

    on_a_bookie(tmp_path, cluster, body, files)


@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED])
def test_entry_log_leaves_a_disk_that_fills_up_under_it(tmp_path: Path, cluster: Cluster, storage_class: str) -> None:
    """The log that is written meets ENOSPC while another directory has room: no read-only, and nothing is lost."""
    files = FullFiles()

    async def body(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(PLAIN, 0))).status is Status.EOK
        await bookie.checkpoint()
        (log,) = tmp_path.rglob("0.log")
        files.names, files.is_full = (str(log),), True
        for entry_id in (1, 2):
            assert (await connection.send(add(PLAIN, entry_id))).status is Status.EOK
            await bookie.checkpoint()
            assert not bookie.read_only
        while bookie.storage.ledgers.unwritten_bytes:
            await bookie.checkpoint()
        assert {path.parent for path in tmp_path.rglob("*.log") if path.stat().st_size > 1024} == {
            tmp_path / name / "current" for name in ("a", "b")
        }
        for entry_id in range(3):
            answer: Any = await connection.send(ReadRequest(PLAIN, entry_id))
            assert answer.body == add(PLAIN, entry_id).body

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        assert bookie.storage.replayed == (0, 0)
        for entry_id in range(3):
            answer: Any = await connection.send(ReadRequest(PLAIN, entry_id))
            assert answer.body == add(PLAIN, entry_id).body

    on_a_bookie(tmp_path, cluster, body, files, ledger_storage_class=storage_class)
    on_a_bookie(tmp_path, cluster, read, ledger_storage_class=storage_class)


@pytest.mark.parametrize("name", ["journal", "a"])
@pytest.mark.parametrize("storage_class", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_bookie_that_lost_a_directory_stops_and_names_it(
    tmp_path: Path, cluster: Cluster, storage_class: str, name: str
) -> None:
    """An open journal still takes writes after its directory is gone, but no start would replay them."""
    lost, kept = tmp_path / name / "current", tmp_path / "kept"

    async def lose(bookie: Bookie, connection: BookieConnection) -> None:
        assert (await connection.send(add(PLAIN, 0))).status is Status.EOK
        lost.rename(kept)
        await asyncio.wait_for(bookie.stopped.wait(), LIMIT_S)
        assert str(lost) in str(bookie.failure)

    async def read(bookie: Bookie, connection: BookieConnection) -> None:
        answer: Any = await connection.send(ReadRequest(PLAIN, 0))
        assert answer.body == add(PLAIN, 0).body

    settings = {"disk_usage_threshold": 1.0, "disk_usage_warn_threshold": 1.0}
    on_a_bookie(tmp_path, cluster, lose, Files(), ledger_storage_class=storage_class, **settings)
    kept.rename(lost)
    on_a_bookie(tmp_path, cluster, read, ledger_storage_class=storage_class)
