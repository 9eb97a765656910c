"""A cluster of our bookies and clients in one world: what they do, what befalls them, what is looked at in the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from simulation.checker import Checker, Story
from simulation.disk import WorldFiles
from simulation.network import Network
from simulation.runtime import Process, World
from simulation.store import Session, Tree
from support.simulated_disk import Fault

from bkctl.bookie.bookie import Bookie
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.reader import LedgerEntry
from bkctl.config import BookieConfig
from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    BookieUnavailable,
    Corrupt,
    DigestMismatch,
    NotFound,
    TimedOut,
    Unreachable,
)
from bkctl.formats.entry import DigestType
from bkctl.formats.record import body_of
from bkctl.metadata.cluster import Cluster, init_cluster
from bkctl.metadata.uri import parse_uri
from bkctl.protocol.handler import ReadRunResponder
from bkctl.protocol.messages import AddRequest, AddResponse, Protocol, ReadRequest, ReadResponse, Status
from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun

URI = "zk+longlonghierarchical://store/ledgers"
PORT = 3181
CLIENT_TIMEOUT_S = 3.0
STORAGES = (
    "org.apache.bookkeeper.bookie.SortedLedgerStorage",
    "org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
    "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
)
#: Settings of every bookie.
SETTINGS: dict[str, Any] = {"minor_compaction_interval": 2, "major_compaction_interval": 4}
SCOPES = (0, 0, 7, 0xFFFF_0000_0000_0001)


@dataclass(frozen=True)
class Plan:
    """The amounts of a run. The rates are faults a second."""

    bookies: int = 4
    #: The time during which faults happen.
    duration_s: float = 15.0
    writers: int = 3
    fault_interval_s: float = 0.7
    #: The possible faults; see `Nemesis`.
    faults: tuple[str, ...] = (
        "kill", "crash", "torn", "stop", "cut", "cut-one-way", "isolate", "no-store", "session", "clock", "slow",
        "slow-disk", "full", "writer", "recoverer",
    )  # fmt: skip
    #: The most bookies that are down at once.
    down_max: int = 2
    #: Bookies whose disks lie about syncs, and how often.
    liars: int = 0
    lies: float = 0.0
    deletes: bool = True
    store_failure_rate: float = 0.01


class WatchedReads:
    """A ReadRunResponder that gives each read and its answer to the checker, too."""

    def __init__(self, requests: WatchedRequests, reads: ReadRun, respond: ReadRunResponder) -> None:
        self._respond = respond
        self._seen: dict[int, deque[Callable[[Any], None]]] = {}
        for entry_id in reads.entry_ids:
            seen = requests._watch(ReadRequest(reads.ledger, entry_id))
            self._seen.setdefault(entry_id, deque()).append(seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._respond, name)

    def answer(self, reads: ReadRun, bodies: Sequence[Any], max_lac: int | None) -> None:
        for entry_id, body in zip(reads.entry_ids, bodies, strict=True):
            self._seen[entry_id].popleft()(ReadResponse(Status.EOK, reads.ledger, entry_id, body, max_lac))
        self._respond.answer(reads, bodies, max_lac)

    def refuse(self, reads: ReadRun, status: Status) -> None:
        for entry_id in reads.entry_ids:
            self._seen[entry_id].popleft()(ReadResponse(status, reads.ledger, entry_id))
        self._respond.refuse(reads, status)


class WatchedRequests:
    """Serves a bookie's requests as they are; requests and answers are also given to the checker."""

    def __init__(self, bookie: Bookie, host: BookieHost) -> None:
        self.host = host
        self._processor = bookie.processor
        self.adds_at_once = bookie.processor.adds_at_once

    def handle(self, request: Any, respond: Any) -> None:
        self._processor.handle(request, respond.observed(self._watch(request)))

    def handle_adds(self, adds: Sequence[AddRun], answer: AnswerAdds) -> None:
        watching: dict[int, list[tuple[AddRequest, Callable[[Any], None]]]] = {}
        for run in adds:
            requests = [
                AddRequest(run.ledger, entry_id, run.master_key, body_of(record))
                for entry_id, record in zip(run.entry_ids, run.records, strict=True)
            ]
            watching[id(run)] = [(request, self._watch(request)) for request in requests]

        def answered(runs: Sequence[AddRun], status: Status) -> None:
            for run in runs:
                for request, seen in watching.pop(id(run)):
                    seen(AddResponse(status, request.ledger, request.entry_id))
            answer(runs, status)

        self._processor.handle_adds(adds, answered)

    def handle_reads(self, reads: ReadRun, respond: ReadRunResponder) -> None:
        self._processor.handle_reads(reads, cast("ReadRunResponder", WatchedReads(self, reads, respond)))

    def _watch(self, request: Any) -> Callable[[Any], None]:
        """Tell the checker of a request, and by what is returned of its answer."""
        host = self.host
        checker, world = host.cluster.checker, host.cluster.world
        state = checker.asked(host.name, request)

        def seen(response: Any) -> None:
            checker.answered(host.name, request, state, response)
            status = getattr(response, "status", None)
            body = getattr(response, "body", None)
            if body is not None and getattr(request, "entry_id", None) is not None:
                checker.body_read(host.name, request, body)
            what = type(request).__name__.removesuffix("Request")
            entry_id = getattr(request, "entry_id", "")
            flags = "".join(
                mark
                for mark, name in (("F", "fence"), ("R", "recovery_add"), ("P", "previous_lac"))
                if getattr(request, name, None) not in (None, False)
            )
            ledger = getattr(request, "ledger", "")
            world.note(f"{host.name} {what}{flags} {ledger} {entry_id}: {getattr(status, 'name', status)}")

        return seen


class BookieHost:
    """One bookie's machine: its disk, and the process that runs on it now."""

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.name = f"b{number}"
        self.host = f"10.0.0.{number}"
        self.root = cluster.root / self.name
        self.root.mkdir()
        self.process: Process | None = None
        self.files: WorldFiles | None = None
        self.bookie: Bookie | None = None
        self.session: Session | None = None
        self.incarnation = 0
        self.lies = 0.0
        random = self.world.random
        journals = random.choice((1, 1, 2))
        directories = random.choice((1, 2))
        self.config = BookieConfig(
            metadata_service_uri=URI,
            advertised_address=self.host,
            bookie_port=PORT,
            journal_directories=tuple(str(self.root / f"journal-{each}") for each in range(journals)),
            ledger_directories=tuple(str(self.root / f"ledgers-{each}") for each in range(directories)),
            ledger_storage_class=random.choice(STORAGES),
            journal_max_size_mb=random.choice((0, 0, 1)),
            journal_pre_alloc_size_mb=0,
            journal_max_backups=random.choice((0, 2)),
            log_size_limit=random.choice((6 * 1024, 30 * 1024)),
            page_size=random.choice((64, 512)),
            page_limit=4,
            open_file_limit=random.choice((3, 100)),
            flush_interval=random.choice((200, 1000, 5000)),
            disk_check_interval=500,
            **cluster.bookie_settings(),
        )

    @property
    def bookie_id(self) -> str:
        return f"{self.host}:{PORT}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        """Start the bookie on what its disk holds."""
        if self.is_up:
            return
        self.incarnation += 1
        process = self.process = Process(self.world, f"{self.name}.{self.incarnation}", self.host)
        if self.files is None:
            self.files = WorldFiles(self.root, process, seed=self.world.random.getrandbits(32))
        self.files.process = process
        self.files.lies = self.lies
        self.cluster.network.machine_is_back(self.host)
        self.world.note(f"{self.name} starts")
        process.start(self._main)

    async def _main(self) -> None:
        process = self.process
        assert process is not None
        session = self.session = Session(self.cluster.tree, process)
        cluster = Cluster(parse_uri(URI), session)
        while True:
            bookie = Bookie(self.config, cluster=cluster, files=self.files)
            bookie.server.handler = WatchedRequests(bookie, self)
            process.at_death.append(bookie._held.close)
            try:
                await bookie.start()
                break
            except (Unreachable, AlreadyExists) as error:
                self.world.note(f"{self.name} cannot start: {error}")
                await asyncio.sleep(0.5)
            except BkctlError as error:
                if self._may_fail():
                    self.world.note(f"{self.name} refuses to start: {error}")
                    await asyncio.sleep(1.0)
                else:
                    raise
        self.bookie = bookie
        self.world.note(f"{self.name} is up")
        await bookie.stopped.wait()
        self.world.note(f"{self.name} stops: {bookie.failure or 'as asked'}")
        if bookie.failure is not None and not self._may_fail():
            raise bookie.failure
        await bookie.stop()
        self.world.note(f"{self.name} stopped")
        self.bookie = None
        self.world.at(0.0, lambda: self.end(process))

    def _may_fail(self) -> bool:
        """Return True if its disk gives it reason to give up."""
        assert self.files is not None
        return self.files.has_failed or self.name in self.cluster.checker.liars

    def end(self, process: Process) -> None:
        """Its main program is over."""
        if process.is_alive:
            self.cluster.burials.append((self, process))

    def stop(self) -> None:
        """Ask for the clean stop."""
        if self.bookie is not None and self.process is not None:
            self.process.loop.call_soon_threadsafe(self.bookie.stopped.set)

    def kill(self, *, keep: float | None = None, tear: bool = False) -> None:
        """End the process; with `keep` its machine dies too: so much of what was not synced survives."""
        process = self.process
        if process is None or not process.is_alive:
            return
        machine = keep is not None
        self.world.note(f"{self.name} {'crashes' if machine else 'is killed'}{', torn' if tear else ''}")
        self.world.kill(process)
        self.bookie = None
        self.cluster.network.process_ended(process, silently=machine)
        if keep is not None:
            assert self.files is not None
            self.files.crash(self.root, keep=keep, tear=tear)
            lie_count, failed = self.files.lie_count, self.files.has_failed
            self.files = WorldFiles(self.root, process, seed=self.world.random.getrandbits(32))
            self.files.lie_count, self.files.has_failed = lie_count, failed


class Client:
    """One client's process."""

    def __init__(self, cluster: SimulatedCluster, name: str, number: int, *, protocol: Protocol = Protocol.V3) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.name = name
        self.process = Process(cluster.world, name, f"10.0.1.{number}")
        self.session = Session(cluster.tree, self.process)
        self.protocol = protocol
        self.metadata = Cluster(parse_uri(URI), self.session)

    def start(self, main: Callable[[BookKeeper], Awaitable[None]]) -> None:
        async def run() -> None:
            bookkeeper = BookKeeper(self.metadata, protocol=self.protocol, timeout_s=CLIENT_TIMEOUT_S)
            while True:
                try:
                    await asyncio.to_thread(lambda: self.metadata.ledgers)
                    break
                except Unreachable:
                    await asyncio.sleep(0.1)
            await main(bookkeeper)

        self.process.start(run)

    def kill(self) -> None:
        if self.process.is_alive:
            self.world.note(f"{self.name} is killed")
            self.world.kill(self.process)
            self.cluster.network.process_ended(self.process, silently=self.world.random.random() < 0.3)


class SimulatedCluster:
    """Bookies, clients, their store and their network."""

    def __init__(self, world: World, plan: Plan, root: Path) -> None:
        self.world = world
        self.plan = plan
        self.root = root
        self.network = world.network = Network(world)
        self.tree = Tree(world)
        self.checker = Checker(world)
        self.tree.observers.append(self.checker.stored_metadata)
        self.burials: list[tuple[BookieHost, Process]] = []
        self.hosts = [BookieHost(self, number + 1) for number in range(plan.bookies)]
        for host in world.random.sample(self.hosts, plan.liars):
            host.lies = plan.lies
            self.checker.liars.add(host.bookie_id)
            self.checker.liars.add(host.name)
        self.clients: list[Client] = []
        #: Names of things that were done, and how often: a simulation that does nothing proves nothing.
        self.counts: dict[str, int] = {}

    def bookie_settings(self) -> dict[str, Any]:
        """Settings of one bookie that have nothing to do with its directories."""
        return {
            "gc_wait_time": self.world.random.choice((500, 1500)),
            **SETTINGS,
            "gc_overreplicated_ledger_wait_time": 3000,
            "gc_scoped_delete_count_min": self.world.random.choice((2, 100)),
            "verify_metadata_on_gc": self.world.random.random() < 0.5,
            "use_transactional_compaction": self.world.random.random() < 0.5,
            "gc_entry_log_metadata_cache_enabled": self.world.random.random() < 0.3,
        }

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def client(self, name: str, protocol: Protocol = Protocol.V3) -> Client:
        client = Client(self, f"{name}{len(self.clients)}", len(self.clients) + 1, protocol=protocol)
        self.clients.append(client)
        return client

    def bury(self) -> None:
        """End processes whose programs are over."""
        burials, self.burials = self.burials, []
        for host, process in burials:
            self.world.kill(process)
            self.network.process_ended(process, silently=False)
            host.world.note(f"{host.name} ended")

    # --- a run -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, work under faults, heal, look at everything. Raises Violation, or what a process died of."""
        world, plan = self.world, self.plan
        operator = Session(self.tree, world.outside)
        init_cluster(Cluster(parse_uri(URI), operator), instance_id="simulated")
        for host in self.hosts:
            host.start()
        self._wait(lambda: all(host.bookie is not None for host in self.hosts), 60, "the bookies start")
        self.tree.failure_rate = plan.store_failure_rate
        self._start_clients()
        nemesis = Nemesis(self)
        end = world.now + plan.duration_s
        while world.now < end:
            world.sleep(world.random.expovariate(1 / plan.fault_interval_s))
            self.bury()
            nemesis.act()
        nemesis.heal()
        self._look_at_everything()

    def _wait(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = self.world.now + limit_s
        while not condition():
            self.bury()
            if self.world.now > deadline:
                raise self.checker.violated(f"not within {limit_s} s: {what}")
            self.world.sleep(0.1)

    def _start_clients(self) -> None:
        for _ in range(self.plan.writers):
            self.start_writer()
        self.start_recoverer()
        for _ in range(2):
            reader = self.client("reader")
            reader.start(functools.partial(tail_now_and_then, self, reader))
        if self.plan.deletes:
            deleter = self.client("deleter")
            deleter.start(functools.partial(delete_now_and_then, self, deleter))

    def start_recoverer(self) -> Client:
        client = self.client("recoverer", self.world.random.choice((Protocol.V3, Protocol.V3, Protocol.V2)))
        client.start(functools.partial(recover_now_and_then, self, client))
        return client

    def start_writer(self) -> Client:
        client = self.client("writer", self.world.random.choice((Protocol.V3, Protocol.V3, Protocol.V2)))
        client.start(functools.partial(write_ledgers, self, client))
        return client

    def _look_at_everything(self) -> None:
        for client in self.clients:
            client.kill()
        for host in self.hosts:
            host.lies = 0.0
            if host.files is not None:
                host.files.lies = 0.0

        def all_up() -> bool:
            self._start_bookies()
            up = {name for name in self.tree.children["available"] if name != "readonly"}
            return all(
                (host.bookie is not None and host.bookie_id in up) or host.name in self.checker.liars
                for host in self.hosts
            )

        self._wait(all_up, 60, "all bookies are up again")
        done: list[bool] = []

        async def look(bookkeeper: BookKeeper) -> None:
            await look_at_ledgers(self, bookkeeper)
            done.append(True)

        for _ in range(2):  # by two clients: they have to see the same
            done.clear()
            self.client("auditor").start(look)
            self._wait(lambda: self._start_bookies() or bool(done), 300, "everything can be read again")
        self._wait(self._garbage_is_gone, 60, "what was deleted is collected")
        for host in self.hosts:
            if host.bookie is not None and host.bookie.garbage_collector is not None:
                stats = host.bookie.garbage_collector.stats
                self.counts["collected"] = self.counts.get("collected", 0) + stats.deleted_ledgers
                self.counts["compacted"] = self.counts.get("compacted", 0) + stats.compacted_entries

    def _garbage_is_gone(self) -> bool:
        """Return True if no honest bookie has a deleted ledger; the brake may hold back scoped ones."""
        self._start_bookies()
        there = {story.ledger for story in self.checker.stories.values() if story.path in self.tree.nodes}
        for host in self.hosts:
            if host.name in self.checker.liars:
                continue
            if host.bookie is None:
                return False
            kept = [ledger for ledger in host.bookie.storage.ledgers.ledger_ids(0) if ledger not in there]
            if kept:
                return False
        return True

    def _start_bookies(self) -> None:
        for host in self.hosts:
            if not host.is_up:
                host.start()


# --- what clients do -------------------------------------------------------------------------------------------------


def payload_of(name: str, entry_id: int, size: int) -> bytes:
    """Return the payload of an entry: its own name, and filling."""
    text = f"{name}/{entry_id} ".encode()
    return (text * (size // len(text) + 1))[: max(size, len(text))]


async def write_ledgers(cluster: SimulatedCluster, client: Client, bookkeeper: BookKeeper) -> None:
    """Write one ledger after the other, until the process dies."""
    world, random, number = cluster.world, cluster.world.random, 0
    while True:
        number += 1
        scope = 0 if client.protocol is Protocol.V2 else random.choice(SCOPES)
        ensemble = random.randint(1, min(4, cluster.plan.bookies))
        write_quorum = random.randint(1, ensemble)
        ack_quorum = random.randint(1, write_quorum)
        if random.random() < 0.7:
            ensemble, write_quorum, ack_quorum = random.choice(((3, 3, 2), (3, 2, 2), (2, 2, 2), (3, 3, 3)))
        options: dict[str, Any] = {
            "ensemble_size": ensemble, "write_quorum_size": write_quorum, "ack_quorum_size": ack_quorum,
            "digest_type": random.choice(list(DigestType)), "password": b"secret",
        }  # fmt: skip
        try:
            if scope == 0 and random.random() < 0.5:
                writer = await bookkeeper.create_ledger(**options)
            else:
                writer = await bookkeeper.create_ledger_adv(ledger_scope_id=scope, **options)
        except BkctlError as error:
            world.note(f"{client.name} cannot create: {error}")
            await asyncio.sleep(0.3)
            continue
        ledger = writer.ledger
        path = client.metadata.ledgers.path(ledger)
        story = cluster.checker.created(ledger, path, writer.metadata)
        cluster.count("ledgers")
        world.note(f"{client.name} writes {ledger!r} on {writer.metadata.last_fragment.bookies}, {options}")
        size_max = random.choice((10, 300, 2000))

        def told(entry_id: int, story: Story, future: asyncio.Future[int]) -> None:
            if not future.cancelled() and future.exception() is None:
                assert future.result() == entry_id
                cluster.checker.acknowledged(story, entry_id)

        try:
            for entry_id in range(random.choice((0, 3, 20, 60))):
                payload = payload_of(f"{client.name}.{number}", entry_id, random.randint(0, size_max))
                cluster.checker.adding(story, entry_id, payload)
                await writer.ready()
                added = writer.add(payload)
                added.add_done_callback(functools.partial(told, entry_id, story))
                choice = random.random()
                if choice < 0.3:
                    await added
                elif choice < 0.5:
                    await asyncio.sleep(random.random() * 0.2)
                elif choice < 0.51:
                    await asyncio.sleep(random.random() * 5)
                elif choice < 0.54 and client.protocol is Protocol.V3:
                    await writer.write_lac()
                elif choice < 0.56 and client.protocol is Protocol.V3:
                    await writer.force()
            choice = random.random()
            if choice < 0.6:
                await writer.close()
                cluster.count("closes")
                cluster.checker.opened(story, True, writer.metadata.last_entry_id, writer.metadata.length)
            elif choice < 0.8:
                await writer.flush()
        except BkctlError as error:
            world.note(f"{client.name} ends with {ledger!r}: {type(error).__name__}: {error}")
            cluster.count(f"writer: {type(error).__name__}")
        await asyncio.sleep(random.random() * 0.5)


def _pick(cluster: SimulatedCluster) -> Story | None:
    stories = [story for story in cluster.checker.stories.values() if not story.is_deleted]
    if not stories:
        return None
    recent = stories[-5:]
    return cluster.world.random.choice(recent if cluster.world.random.random() < 0.7 else stories)


async def recover_now_and_then(cluster: SimulatedCluster, client: Client, bookkeeper: BookKeeper) -> None:
    """Open ledgers with recovery, whether their writers are at work or not."""
    world, random = cluster.world, cluster.world.random
    while True:
        await asyncio.sleep(random.random() * 1.2)
        story = _pick(cluster)
        if story is None or (story.ledger.is_scoped and client.protocol is Protocol.V2):
            continue
        world.note(f"{client.name} recovers {story.ledger!r}")
        try:
            reader = await bookkeeper.open_ledger(
                story.ledger.ledger_id, ledger_scope_id=story.ledger.scope_id, password=b"secret", recovery=True
            )
            cluster.count("recoveries")
            cluster.checker.opened(story, True, reader.last_add_confirmed, reader.length)
            await read_all(cluster, story, reader)
        except BkctlError as error:
            _tolerate(cluster, client, story, error)


async def tail_now_and_then(cluster: SimulatedCluster, client: Client, bookkeeper: BookKeeper) -> None:
    """Follow ledgers as they grow, and read what is confirmed."""
    random = cluster.world.random
    while True:
        await asyncio.sleep(random.random() * 0.5)
        story = _pick(cluster)
        if story is None:
            continue
        try:
            async with await bookkeeper.open_ledger(
                story.ledger.ledger_id, ledger_scope_id=story.ledger.scope_id, password=b"secret"
            ) as reader:
                last = reader.last_add_confirmed
                cluster.checker.opened(story, reader.is_closed, last, reader.length)
                at = max(0, last - random.randint(0, 20))
                for _ in range(random.randint(1, 6)):
                    if at <= last:
                        async for entry in reader.read(at, last):
                            cluster.checker.read(story, entry)
                    at = max(at, last + 1)
                    before = last
                    last = await reader.wait_for_lac(before, random.random() * 2)
                    if last < before and not cluster.checker.liars:
                        raise cluster.checker.violated(f"{story.ledger!r}: LAC went back from {before} to {last}")
                    cluster.checker.opened(story, reader.is_closed, last, reader.length)
                    cluster.count("tails")
        except BkctlError as error:
            _tolerate(cluster, client, story, error)


async def delete_now_and_then(cluster: SimulatedCluster, client: Client, bookkeeper: BookKeeper) -> None:
    """Delete ledgers, most of them closed."""
    world, random = cluster.world, cluster.world.random
    while True:
        await asyncio.sleep(random.random() * 1.5)
        stories = [story for story in cluster.checker.stories.values() if not story.is_deleted]
        if not stories:
            continue
        story = random.choice(stories)
        if story.end is None and random.random() < 0.8:
            continue
        story.is_deleted = True
        world.note(f"{client.name} deletes {story.ledger!r}")
        try:
            await bookkeeper.delete_ledger(story.ledger.ledger_id, ledger_scope_id=story.ledger.scope_id)
            cluster.count("deletes")
        except BkctlError as error:
            world.note(f"{client.name}: {error}")


def _tolerate(cluster: SimulatedCluster, client: Client, story: Story, error: BkctlError) -> None:
    """Take an error for what faults do to clients, or not."""
    cluster.world.note(f"{client.name}, {story.ledger!r}: {type(error).__name__}: {error}")
    cluster.count(f"client: {type(error).__name__}")
    if isinstance(error, (DigestMismatch, Corrupt)):
        raise cluster.checker.violated(f"{story.ledger!r}: {error}")


async def read_all(cluster: SimulatedCluster, story: Story, reader: ReadHandle) -> None:
    """Read a ledger from its first entry to its last."""
    last = reader.last_add_confirmed
    count = 0
    if last >= 0:
        async for entry in reader.read(0, last):
            cluster.checker.read(story, entry)
            count += 1
    if count != last + 1:
        raise cluster.checker.violated(f"{story.ledger!r}: {count} of {last + 1} entries were read")


async def look_at_ledgers(cluster: SimulatedCluster, bookkeeper: BookKeeper) -> None:
    """Now that everything works again: each ledger opens, ends where it should, and gives every entry."""
    checker = cluster.checker
    for story in list(checker.stories.values()):
        if story.is_deleted:
            continue
        reader: ReadHandle | None = None
        for attempt in range(20):
            try:
                reader = await bookkeeper.open_ledger(
                    story.ledger.ledger_id, ledger_scope_id=story.ledger.scope_id, password=b"secret", recovery=True
                )
                checker.opened(story, True, reader.last_add_confirmed, reader.length)
                await read_all(cluster, story, reader)
                break
            except BkctlError as error:
                cluster.world.note(f"{story.ledger!r}, attempt {attempt}: {type(error).__name__}: {error}")
                if checker.is_excused(story):
                    cluster.count("excused")
                    reader = None
                    break
                if attempt == 19 or isinstance(error, (NotFound, DigestMismatch, Corrupt)):
                    raise checker.violated(f"{story.ledger!r} cannot be read: {error}") from error
                await asyncio.sleep(1)
        if reader is not None:
            await _look_at_replicas(cluster, story, reader)


async def _look_at_replicas(cluster: SimulatedCluster, story: Story, reader: ReadHandle) -> None:
    checker = cluster.checker
    named = {bookie for fragment in reader.metadata.ensembles for bookie in fragment.bookies}
    for host in cluster.hosts:
        if host.bookie_id not in named or host.name in checker.liars:
            continue
        for entry_id in sorted(checker.stored.get(host.name, {}).get(story.ledger, ())):
            checker.read(story, await _read_replica(cluster, story, reader, host, entry_id))
        if checker.is_fenced(host.name, story.ledger):
            await _try_to_add(reader, host)


async def _try_to_add(reader: ReadHandle, host: BookieHost) -> None:
    """Ask a bookie that fenced the ledger for what it must not do; the checker sees its answer."""
    access = reader._access
    entry_id = 1_000_000
    body = access.digest.seal(entry_id, -1, 0, b"")
    channel = access.pool.channel(host.bookie_id)
    with contextlib.suppress(BkctlError):
        await channel.send(AddRequest(reader.ledger, entry_id, access.digest.master_key, body), access.scoped)


async def _read_replica(
    cluster: SimulatedCluster, story: Story, reader: ReadHandle, host: BookieHost, entry_id: int
) -> LedgerEntry:
    for _ in range(100):
        try:
            return await reader.read_from(host.bookie_id, entry_id)
        except (BookieUnavailable, TimedOut):  # a stop that was asked for before everything was healed
            await asyncio.sleep(0.5)
        except BkctlError as error:
            problem = f"{story.ledger!r}: {host.name} stored entry {entry_id}: {error}"
            raise cluster.checker.violated(problem) from error
    raise cluster.checker.violated(f"{story.ledger!r}: {host.name} does not answer")


# --- what befalls them -----------------------------------------------------------------------------------------------


class Nemesis:
    """Faults of a plan, one at a time and several at once."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world

    def act(self) -> None:
        """Let one thing happen."""
        random = self.world.random
        fault = random.choice(self.cluster.plan.faults)
        self.cluster.count(fault)
        getattr(self, "_" + fault.replace("-", "_"))(random.choice(self.cluster.hosts))

    def _may_go_down(self, host: BookieHost) -> bool:
        down = sum(each.bookie is None for each in self.cluster.hosts)
        return host.is_up and (down < self.cluster.plan.down_max or host.bookie is None)

    def _start_later(self, host: BookieHost) -> None:
        self.world.at(0.05 + self.world.random.random() * 3, host.start)

    def _kill(self, host: BookieHost) -> None:
        if self._may_go_down(host):
            host.kill()
            self._start_later(host)

    def _crash(self, host: BookieHost, *, tear: bool = False) -> None:
        if self._may_go_down(host):
            host.kill(keep=self.world.random.choice((0.0, 0.0, 0.5, 0.9)), tear=tear)
            self._start_later(host)

    def _torn(self, host: BookieHost) -> None:
        self._crash(host, tear=True)

    def _stop(self, host: BookieHost) -> None:
        if self._may_go_down(host):
            self.world.note(f"{host.name} is asked to stop")
            host.stop()
            self._start_later(host)

    def _until(self, least_s: float, most_s: float, undo: Callable[[], None]) -> None:
        self.world.at(least_s + self.world.random.random() * (most_s - least_s), undo)

    def _hosts(self) -> list[str]:
        clients = [client.process.host for client in self.cluster.clients if client.process.is_alive]
        return [host.host for host in self.cluster.hosts] + clients

    def _cut(self, host: BookieHost) -> None:
        other = self.world.random.choice(self._hosts())
        self.world.note(f"{host.name} and {other} are cut off from each other")
        self.cluster.network.part(host.host, other)
        self.cluster.network.part(other, host.host)
        self._until(0.1, 6, self.cluster.network.heal)

    def _cut_one_way(self, host: BookieHost) -> None:
        pair = [host.host, self.world.random.choice(self._hosts())]
        self.world.random.shuffle(pair)
        self.world.note(f"nothing passes from {pair[0]} to {pair[1]}")
        self.cluster.network.part(*pair)
        self._until(0.1, 6, self.cluster.network.heal)

    def _isolate(self, host: BookieHost) -> None:
        self.world.note(f"{host.name} is cut off from everybody")
        for other in self._hosts():
            self.cluster.network.part(host.host, other)
            self.cluster.network.part(other, host.host)
        self._until(0.1, 6, self.cluster.network.heal)

    def _no_store(self, host: BookieHost) -> None:
        name = self.world.random.choice(self._hosts())
        self.world.note(f"{name} is cut off from the metadata store")
        self.cluster.tree.cut.add(name)
        self._until(0.1, 5, lambda: self.cluster.tree.cut.discard(name))

    def _session(self, host: BookieHost) -> None:
        if host.session is not None and host.is_up and not host.session.is_closed:
            self.world.note(f"{host.name} loses its session")
            host.session.lose()

    def _clock(self, host: BookieHost) -> None:
        if host.process is not None:
            host.process.clock_error_s = self.world.random.choice((-3600.0, -5.0, 5.0, 86_400.0))
            self.world.note(f"the clock of {host.name} is {host.process.clock_error_s:+} s wrong")

    def _slow(self, host: BookieHost) -> None:
        self.world.note(f"messages of {host.name} are slow")
        slow = self.cluster.network.slow
        slow[host.host] = self.world.random.random()
        self._until(0.5, 4, lambda: slow.pop(host.host, None) and None)

    def _slow_disk(self, host: BookieHost) -> None:
        files = host.files
        if files is not None:
            self.world.note(f"the disk of {host.name} is slow")
            files.sync_s = 0.3 * self.world.random.random()

            def undo() -> None:
                files.sync_s = 0.001

            self._until(0.5, 4, undo)

    def _full(self, host: BookieHost) -> None:
        files = host.files
        if files is not None and files.capacity_bytes is None:
            self.world.note(f"the disk of {host.name} fills")
            files.capacity_bytes = self.world.random.randrange(20_000)
            files.has_failed = True

            def undo() -> None:
                files.capacity_bytes = None

            self._until(0.5, 4, undo)

    def _bad_disk(self, host: BookieHost) -> None:
        if host.files is not None:
            self.world.note(f"the disk of {host.name} fails")
            host.files.has_failed = True
            kind, path = self.world.random.choice((("sync", ".txn"), ("sync", ".log"), ("write", ".txn"), ("sync", "")))
            host.files.faults.append(Fault(kind, path, errno.EIO))
            self._start_later(host)

    def _writer(self, host: BookieHost) -> None:
        self._kill_one_of("writer")
        self.cluster.start_writer()

    def _recoverer(self, host: BookieHost) -> None:
        self._kill_one_of("recoverer")
        self.cluster.start_recoverer()

    def _kill_one_of(self, name: str) -> None:
        alive = [each for each in self.cluster.clients if each.name.startswith(name) and each.process.is_alive]
        if alive:
            self.world.random.choice(alive).kill()

    def heal(self) -> None:
        """Let everything work again."""
        self.world.note("everything is healed")
        cluster = self.cluster
        cluster.network.heal()
        cluster.network.slow.clear()
        cluster.tree.cut.clear()
        cluster.tree.failure_rate = 0.0
        for host in cluster.hosts:
            if host.files is not None:
                host.files.capacity_bytes = None
                host.files.sync_s = 0.001
                host.files.faults.clear()


def simulate(seed: int, plan: Plan, root: Path) -> tuple[World, SimulatedCluster]:
    """One run below `root`, which is emptied. Raises what went wrong, with the seed and the end of the trace.

    The whole trace of a failure goes to the directory that BKCTL_TEST_TRACES names, if it does.
    """
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with World(seed) as world:
        world.hidden_path = str(root)
        cluster = SimulatedCluster(world, plan, root)
        try:
            cluster.run()
        except Exception as error:
            error.add_note(f"seed {seed}, {plan}; the end of the trace:")
            for line in world.trace[-60:]:
                error.add_note(line)
            if kept := os.environ.get("BKCTL_TEST_TRACES"):
                Path(kept, f"seed-{seed}.txt").write_text("\n".join(world.trace))
            raise
        world.note(f"{world.event_count} events, checksum {world.digest:08x}, {cluster.counts}")
        return world, cluster
