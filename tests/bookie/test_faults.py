"""Faults in the middle, generated: each call that a bookie makes to its disks and its metadata store fails once.

A run without faults records the calls, by kind and kind of file; then one run a call lets that one fail, with each kind
of error. Whatever fails: every request is answered, other ledgers are served, nothing stays counted as in flight, the
bookie stops, and the next start has every acknowledged entry. Where the state of the disk is unknown after the fault
(`may_give_up`), the bookie may give up instead of serving on; it says so and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from bookie.test_bookie import add, config_for, connected, digests
from support.long_runs import IS_LONG
from support.servers import DB, INTERLEAVED, SORTED
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.config import BookieConfig
from bkctl.disk import DiskUsage, Files, StorageFile
from bkctl.errors import BkctlError, BookieUnavailable, TimedOut
from bkctl.formats.entry import DigestType
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import MetadataStore
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    AddRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Status,
    WriteLacRequest,
)

#: Faults of one kind of error with one storage class, where not all of them are asked for.
SAMPLE_SIZE = 5
TIMEOUT_S = LIMIT_S

ERRORS: dict[str, Callable[[], Exception]] = {
    "OSError": lambda: OSError(errno.EIO, "injected"),
    "BkctlError": lambda: BkctlError("injected"),
    "RuntimeError": lambda: RuntimeError("injected"),
}
STORAGES = {"sorted": SORTED, "interleaved": INTERLEAVED, "db": DB}


class Site(NamedTuple):
    """One call at a seam: the `number`-th of this operation on this kind of file, or of this method of the store."""

    operation: str
    target: str
    number: int


#: Calls that write one ledger's index.
INDEX_WRITES = {(operation, target) for operation in ("write", "sync") for target in (".idx", ".idx.new")}


def may_give_up(site: Site, error: Exception) -> bool:
    """Return True if the fault leaves unknown what the disk holds, so that the bookie may give up.

    It knows after a read, for what the metadata store does, and where the disk refuses the index of one ledger: the
    journal keeps that ledger's entries. A write to the journal that fails in another way than by the disk is cut again.
    """
    if site.target == "store" or (isinstance(error, OSError) and (site.operation, site.target) in INDEX_WRITES):
        return False
    if site.operation in ("read", "read_cached", "open_to_read"):
        return False
    return isinstance(error, OSError) or not (site.target == ".txn" and site.operation != "sync")


class Seams:
    """Counts the calls, and lets the one at `site` fail."""

    def __init__(self, site: Site | None = None, error: Callable[[], Exception] = RuntimeError) -> None:
        self.site = site
        self.error = error
        self.calls: Counter[tuple[str, str]] = Counter()
        self.is_armed = False
        self.has_failed = False
        self._lock = threading.Lock()

    def call(self, operation: str, target: str) -> None:
        if not self.is_armed:
            return
        with self._lock:
            self.calls[operation, target] += 1
            fails = self.site == (operation, target, self.calls[operation, target])
            self.has_failed = self.has_failed or fails
        if fails:
            raise self.error()

    def sites(self) -> list[Site]:
        return [Site(*key, number) for key, count in sorted(self.calls.items()) for number in range(1, count + 1)]


def kind_of(path: Path) -> str:
    return ".idx.new" if path.name.endswith(".idx.new") else path.suffix or path.name


class SeamFiles(Files):
    """Real files whose every call goes by `seams`."""

    def __init__(self, seams: Seams) -> None:
        self.seams = seams

    def _file(self, file: StorageFile) -> StorageFile:
        return _SeamFile(file, self.seams)

    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        self.seams.call("open", kind_of(path))
        return self._file(super().open(path, create=create))

    def open_to_read(self, path: Path) -> StorageFile:
        self.seams.call("open_to_read", kind_of(path))
        return self._file(super().open_to_read(path))

    def _mkdir(self, path: Path) -> None:
        self.seams.call("mkdir", "directory")
        super()._mkdir(path)

    def sync_directory(self, path: Path) -> None:
        self.seams.call("sync_directory", "directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.seams.call("rename", kind_of(target))
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.seams.call("remove", kind_of(path))
        super().remove(path)

    def note_written(self, directory: Path) -> None:
        self.seams.call("note_written", directory.name)
        super().note_written(directory)

    def disk_usage(self, path: Path) -> DiskUsage:
        self.seams.call("disk_usage", "directory")
        return super().disk_usage(path)


class _SeamFile(StorageFile):
    __slots__ = ("_seams",)

    def __init__(self, real: StorageFile, seams: Seams) -> None:
        super().__init__(real.path, real.fd)
        real.fd = -1
        self._seams = seams

    def _write_some(self, offset: int, buffers: Any) -> int:
        self._seams.call("write", kind_of(self.path))
        return super()._write_some(offset, buffers)

    def read(self, offset: int, size: int) -> Buffer:
        self._seams.call("read", kind_of(self.path))
        return super().read(offset, size)

    def read_cached(self, offset: int, size: int) -> Buffer | None:
        self._seams.call("read_cached", kind_of(self.path))
        return super().read_cached(offset, size)

    def sync(self) -> None:
        self._seams.call("sync", kind_of(self.path))
        super().sync()

    def allocate(self, end: int) -> None:
        self._seams.call("allocate", kind_of(self.path))
        super().allocate(end)

    def truncate(self, size: int) -> None:
        self._seams.call("truncate", kind_of(self.path))
        super().truncate(size)


def put_seams_in(store: MetadataStore, seams: Seams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each method of the store go by `seams`."""
    for name in ("get", "put", "delete", "children", "children_many", "get_many", "ephemeral", "claim"):
        method = getattr(store, name)

        def call(*arguments: Any, _name: str = name, _method: Any = method, **named: Any) -> Any:
            seams.call(_name, "store")
            return _method(*arguments, **named)

        monkeypatch.setattr(store, name, call)


# --- what the bookie is asked ----------------------------------------------------------------------------------------

KEPT, DELETED, FENCED, SCOPED, RECOVERED = (
    LedgerId(0, 1),
    LedgerId(0, 2),
    LedgerId(0, 3),
    LedgerId(7, 1),
    LedgerId(0, 4),
)
LEDGERS = (KEPT, DELETED, FENCED, SCOPED, RECOVERED)
#: A ledger that nothing was asked about when the fault came.
UNTOUCHED = LedgerId(0, 99)


class Client:
    """Asks, and notes what was acknowledged. Every request has to be answered, or its connection closed."""

    def __init__(self, connection: BookieConnection) -> None:
        self.connection = connection
        self.added: dict[tuple[LedgerId, int], bytes] = {}
        self.is_fenced = False

    async def ask(self, *requests: Any) -> list[Status]:
        found = await asyncio.gather(*(self._ask(request) for request in requests))
        for request, status in zip(requests, found, strict=True):
            if isinstance(request, AddRequest) and status is Status.EOK and not request.deferred_sync:
                self.added[request.ledger, request.entry_id] = bytes(request.body)  # type: ignore[arg-type]
        return found

    async def _ask(self, request: Any) -> Status:
        try:
            return (await asyncio.wait_for(self.connection.send(request), TIMEOUT_S)).status
        except (TimeoutError, TimedOut):
            raise AssertionError(f"{request} was not answered") from None
        except BookieUnavailable:
            return Status.EIO


async def work(bookie: Bookie, client: Client, cluster: Cluster) -> None:
    """An add, a read, a fence, a checkpoint, a roll, a compaction, and what goes with them."""
    keys = {ledger: digests(ledger).master_key for ledger in LEDGERS}
    collector = bookie.garbage_collector
    assert collector is not None
    await client.ask(*(add(ledger, entry_id) for entry_id in range(4) for ledger in LEDGERS))
    await client.ask(
        WriteLacRequest(KEPT, 0, keys[KEPT], digests(KEPT).seal_lac(0)),
        add(KEPT, 4, deferred_sync=True),
        ForceLedgerRequest(KEPT),
        add(RECOVERED, 4, recovery_add=True),
        ReadRequest(KEPT, 0),
        ReadLacRequest(KEPT),
        BookieInfoRequest(3),
    )
    await bookie.checkpoint()
    bookie.storage.ledgers.handles.clear()  # as after a start, so that indexes are read
    await client.ask(
        *(ReadRequest(ledger, entry_id) for ledger in LEDGERS for entry_id in (0, 3)),
        ListEntriesRequest(KEPT),
        ReadRequest(KEPT, 3, previous_lac=2, timeout_ms=10),
    )
    await client.ask(
        add(SCOPED, 4), ReadRequest(FENCED, -1, keys[FENCED], fence=True), *(add(KEPT, each) for each in range(5, 20))
    )
    await bookie.checkpoint()
    await rounds(bookie, 1)
    with contextlib.suppress(Exception):
        await asyncio.to_thread(cluster.ledgers.remove, DELETED)
    await rounds(bookie, 2)
    bookie.storage.ledgers.handles.clear()
    await client.ask(*(ReadRequest(KEPT, entry_id) for entry_id in (0, 5, 19)), add(KEPT, 20))
    for read_only in (True, False):
        with contextlib.suppress(Exception):
            await bookie.set_read_only(read_only)


async def rounds(bookie: Bookie, count: int) -> None:
    """Let garbage collection do rounds with compaction."""
    collector = bookie.garbage_collector
    assert collector is not None
    for _ in range(count):
        collector.force(major=True)
        deadline = time.monotonic() + TIMEOUT_S
        while collector.is_in_force_gc and bookie.failure is None:
            assert time.monotonic() < deadline, "garbage collection hangs"
            await asyncio.sleep(0.002)
        await bookie.checkpoint()


def bookie_config(root: Path, storage: str) -> BookieConfig:
    return config_for(
        root,
        ledger_storage_class=storage,
        log_size_limit=2_000,
        flush_interval=3_600_000,
        disk_check_interval=3_600_000,
        major_compaction_threshold=0.99,
        force_allow_compaction=True,
        gc_scoped_delete_count_min=1_000_000,
        db_storage_write_cache_max_size_mb=1,
        zk_timeout=10_000,
    )


def metadata_of(bookie_id: str) -> LedgerMetadata:
    return LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"secret", (Fragment(0, (bookie_id,)),))


def counts(bookie: Bookie) -> dict[str, int]:
    """Return the counts of requests under way, by name."""
    server = bookie.server
    return {
        "bytes in flight": server.in_flight.bytes,
        "reads waiting": server.reads.count,
        "requests in flight": sum(each._in_flight for each in server.connections),
        "reads in progress": server.reads.in_progress_count,
        "entries of journals": sum(each.waiting for each in bookie.commits.journals),
        "long polls": len(bookie.processor.polls),
    }


async def run(root: Path, storage: str, seams: Seams, patch: pytest.MonkeyPatch) -> str:
    """One run, and the next start; what was wrong, "" where nothing was."""
    with open_cluster(f"sqlite://{root / 'metadata.db'}", create=True) as cluster:
        bookie = Bookie(bookie_config(root, storage), cluster=cluster, files=SeamFiles(seams))
        await bookie.start()
        for ledger in (*LEDGERS, UNTOUCHED):
            cluster.ledgers.create(ledger, metadata_of(bookie.bookie_id))
        client: Client | None = None
        with patch.context() as within:
            put_seams_in(cluster.store, seams, within)
            async with connected(bookie) as connection:
                client = Client(connection)
                seams.is_armed = True
                await work(bookie, client, cluster)
                requests = add(UNTOUCHED, 0), ReadRequest(UNTOUCHED, 0)
                served = [*await client.ask(requests[0]), *await client.ask(requests[1])]
                if served != [Status.EOK] * 2 and bookie.failure is None:  # the fault may just have come
                    served = [*await client.ask(requests[0]), *await client.ask(requests[1])]
                if bookie.failure is None:
                    if served != [Status.EOK] * 2:
                        return f"another ledger is not served: {served}"
                    left = {name: count for name, count in counts(bookie).items() if count}
                    if left:
                        return f"still counted: {left}"
                elif seams.site is not None and not may_give_up(seams.site, seams.error()):
                    return f"the bookie gave up: {bookie.failure}"
            try:
                await asyncio.wait_for(bookie.stop(), TIMEOUT_S)
            except TimeoutError:
                return "the stop hangs"
            seams.is_armed = False
            if bookie.is_stuck:
                return "the stop left a thread behind"
        if bookie.server.in_flight.bytes:
            return f"{bookie.server.in_flight.bytes} bytes are in flight behind the stop"
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if tasks:
            return f"tasks are left: {tasks}"
        return await next_start(root, storage, cluster, client)


async def run_start(root: Path, storage: str, seams: Seams, patch: pytest.MonkeyPatch) -> str:
    """A start after a kill, with what is behind the last mark to replay, and the next one."""
    with open_cluster(f"sqlite://{root / 'metadata.db'}", create=True) as cluster:
        killed = Bookie(bookie_config(root, storage), cluster=cluster)
        await killed.start()
        for ledger in LEDGERS:
            cluster.ledgers.create(ledger, metadata_of(killed.bookie_id))
        async with connected(killed) as connection:
            client = Client(connection)
            await client.ask(*(add(ledger, entry_id) for entry_id in range(5) for ledger in LEDGERS))
            await killed.checkpoint()
            fence = ReadRequest(FENCED, -1, digests(FENCED).master_key, fence=True)
            await client.ask(*(add(ledger, entry_id) for entry_id in range(5, 20) for ledger in LEDGERS), fence)
        killed.state_manager.fail(BkctlError("killed"))
        await killed.stop()
        bookie = Bookie(bookie_config(root, storage), cluster=cluster, files=SeamFiles(seams))
        with patch.context() as within:
            put_seams_in(cluster.store, seams, within)
            seams.is_armed = True
            try:
                await asyncio.wait_for(bookie.start(), TIMEOUT_S)
            except TimeoutError:
                return "the start hangs"
            except Exception:
                if not seams.has_failed:
                    raise
            else:
                seams.is_armed = False
                await asyncio.wait_for(bookie.stop(), TIMEOUT_S)
            seams.is_armed = False
        if bookie.is_stuck:
            return "a thread is left behind"
        return await next_start(root, storage, cluster, client)


async def next_start(root: Path, storage: str, cluster: Cluster, client: Client) -> str:
    bookie = Bookie(bookie_config(root, storage), cluster=cluster)
    await bookie.start()
    try:
        async with connected(bookie) as connection:
            is_removed = DELETED not in set(cluster.ledgers.ledgers())
            for (ledger, entry_id), body in client.added.items():
                response = await connection.send(ReadRequest(ledger, entry_id))
                if ledger == DELETED and is_removed and response.status in (Status.ENOLEDGER, Status.ENOENTRY):
                    continue
                if response.status is not Status.EOK or bytes(response.body) != body:
                    return f"entry {entry_id} of ledger {ledger} was acknowledged: {response.status.name}"
        return "" if bookie.failure is None else f"the next start fails: {bookie.failure}"
    finally:
        await bookie.stop()


def chosen(sites: list[Site], seed: str) -> list[Site]:
    """All of them; or one of each kind of call, and more by chance."""
    if IS_LONG:
        return sites
    chance = random.Random(seed)
    kinds: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        kinds.setdefault((site.operation, site.target), []).append(site)
    picked = [chance.choice(some) for some in kinds.values()]
    return chance.sample(picked, min(len(picked), SAMPLE_SIZE))


Run = Callable[[Path, str, Seams, pytest.MonkeyPatch], Coroutine[Any, Any, str]]


@functools.cache
def recorded(root: Path, storage: str, of: Run = run) -> tuple[Site, ...]:
    """The calls of a run without a fault."""
    seams = Seams()
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        assert asyncio.run(of(root, storage, seams, patch)) == ""
    return tuple(seams.sites())


@pytest.fixture(scope="module")
def sites_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Site]]:
    root = tmp_path_factory.mktemp("recorded")
    return lambda name, of=run: list(recorded(root / f"{name}-{of.__name__}", STORAGES[name], of))


@pytest.mark.parametrize("of", [run, run_start], ids=["at work", "at the start"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("storage", ["sorted", pytest.param("interleaved", marks=pytest.mark.long), "db"])
def test_single_fault_harms_only_its_own_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sites_of: Callable[..., list[Site]],
    storage: str,
    error: str,
    of: Run,
) -> None:
    sites = sites_of(storage, of)
    problems = []
    fired = 0
    picked = chosen(sites, f"{storage} {error}")
    for number, site in enumerate(picked):
        root = tmp_path / str(number)
        root.mkdir()
        seams = Seams(site, ERRORS[error])
        problem = asyncio.run(of(root, STORAGES[storage], seams, monkeypatch))
        fired += seams.has_failed
        if problem:
            problems.append(f"{site}: {problem}")
    assert not problems, "\n".join(problems)
    assert fired * 2 > len(picked)


@pytest.mark.parametrize("storage", ["sorted", "interleaved"])
def test_bookie_serves_on_where_the_disk_refuses_one_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites_of: Callable[..., list[Site]], storage: str
) -> None:
    chance = random.Random(storage)
    for operation, target in sorted(INDEX_WRITES):
        sites = [site for site in sites_of(storage) if (site.operation, site.target) == (operation, target)]
        for number, site in enumerate(sites if IS_LONG else [chance.choice(sites)]):
            root = tmp_path / f"{operation}{target}{number}"
            root.mkdir()
            seams = Seams(site, ERRORS["OSError"])
            assert asyncio.run(run(root, STORAGES[storage], seams, monkeypatch)) == "", site


def test_recorded_run_passes_every_seam(sites_of: Callable[[str], list[Site]]) -> None:
    for storage in STORAGES:
        kinds = {(site.operation, site.target) for site in sites_of(storage)}
        assert {
            ("write", ".txn"), ("sync", ".txn"), ("write", ".log"), ("sync", ".log"), ("open_to_read", ".log"),
            ("sync", "lastMark"), ("write", ".compacting"), ("rename", ".log"), ("remove", ".log"),
            ("get", "store"), ("ephemeral", "store"), ("delete", "store"), ("disk_usage", "directory"),
        } <= kinds  # fmt: skip
        if storage != "db":
            assert {("write", ".idx.new"), ("read", ".idx"), ("write", ".idx"), ("sync", ".idx")} <= kinds
