"""Our client and Java's write ledgers on our bookies and Apache's while faults come by a schedule from a seed.

Each ledger's history is checked. Half a minute of it in each run of the tests; with BKCTL_TEST_LONG ten, or
BKCTL_TEST_SECONDS. BKCTL_TEST_SEED replays a schedule, which is printed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.history import History
from support.long_runs import IS_LONG
from support.mixed_clusters import CuttableLink, SomeCluster
from support.own_bookies import OwnBookie
from support.servers import Java, ZooKeeperServer, read_ledgers

from bkctl import BookKeeper, ReadHandle, WriteHandle
from bkctl.errors import BkctlError
from bkctl.ids import LedgerId

pytestmark = pytest.mark.java

SECONDS = float(os.environ.get("BKCTL_TEST_SECONDS") or (600 if IS_LONG else 30))
SESSION_MS = 2000
#: Our client's patience with one bookie.
TIMEOUT_S = 3.0
DISK_BYTES = 96 << 20


class Fault(NamedTuple):
    """A fault of a bookie (by its index): it begins after a pause, and lasts for a while."""

    pause_s: float
    kind: str
    victim: int
    duration_s: float


def schedule(chance: random.Random, kinds: list[str]) -> Iterator[Fault]:
    """Yield faults for ever. Most hit one bookie at a time; some begin while another one lasts."""
    while True:
        pause_s = chance.choice([chance.uniform(0.5, 2), chance.uniform(0.5, 2), 0])
        kind = chance.choice(kinds)
        duration_s = chance.uniform(4, 6) if kind == "lose session" else chance.uniform(0.2, 3)
        yield Fault(round(pause_s, 2), kind, chance.randrange(4), round(duration_s, 2))


class Faults:
    """Inflicts faults on the bookies of a cluster, and mends them."""

    def __init__(self, bookies: SomeCluster, links: dict[str, CuttableLink], disk: Path | None) -> None:
        self._bookies, self._links, self._disk = bookies, links, disk
        self._processes = asyncio.Lock()
        self.kinds = ["kill", "suspend", "lose session", "cut"]
        if disk is not None:
            self.kinds.append("fill disk")
        else:
            print("no full disks: mounting a small file system needs root")
        if shutil.which("faketime"):
            self.kinds.append("jump clock")
        else:
            print("no jumps of clocks: the program faketime is not installed")

    async def inflict(self, fault: Fault) -> None:
        bookie = self._bookies.bookies[fault.victim]
        link = self._links[bookie.bookie_id]
        if fault.kind == "cut":
            link.cut()
            await asyncio.sleep(fault.duration_s)
            link.mend()
        elif fault.kind in ("suspend", "lose session"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(bookie.pid, signal.SIGSTOP)
                await asyncio.sleep(fault.duration_s)
                os.kill(bookie.pid, signal.SIGCONT)
        elif fault.kind == "fill disk":
            await self._fill_disk(fault.duration_s)
        else:
            async with self._processes:
                await asyncio.to_thread(bookie.kill)
            await asyncio.sleep(fault.duration_s)
            if fault.kind == "jump clock" and isinstance(bookie, OwnBookie):
                bookie.prefix = ["faketime", "-f", "+2h" if fault.victim else "-2h"]
            await self._restart()

    async def _fill_disk(self, duration_s: float) -> None:
        assert self._disk is not None
        ballast = self._disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        await asyncio.sleep(duration_s)
        ballast.unlink(missing_ok=True)  # another fault may have filled it, too
        await self._restart()

    async def _restart(self) -> None:
        """Start what is down: a bookie that was killed, or that ended because its disk was full."""
        async with self._processes:
            for bookie in self._bookies.bookies:
                if not bookie.running:
                    with contextlib.suppress(RuntimeError):  # its disk is full yet
                        await asyncio.to_thread(bookie.start)


class Writers:
    """Ledgers of our client, one after the other in each task, with their histories."""

    def __init__(self, client: BookKeeper, openers: BookKeeper, seed: int) -> None:
        self.histories: dict[LedgerId, History] = {}
        self._client, self._openers, self._seed = client, openers, seed
        self.ending = False

    async def run(self, number: int) -> None:
        chance = random.Random(self._seed + number)
        while not self.ending:
            write_quorum_size = chance.choice([2, 3])
            try:
                writer = await self._client.create_ledger(
                    ensemble_size=3, write_quorum_size=write_quorum_size, ack_quorum_size=2
                )
            except BkctlError:
                await asyncio.sleep(0.2)
                continue
            history = self.histories[writer.ledger] = History(str(writer.ledger))
            tailing = asyncio.create_task(self._tail(writer.ledger, history))
            with contextlib.suppress(BkctlError):
                await self._write(writer, history, chance)
            await tailing

    async def _write(self, writer: WriteHandle, history: History, chance: random.Random) -> None:
        """Write until a random end: a close, another client's recovery in full flight, or one after a last entry."""
        fate, count = chance.choice(["close", "fence", "leave"]), chance.randrange(10, 300)
        fencing: asyncio.Task[ReadHandle] | None = None
        try:
            for entry_id in range(count):
                await writer.ready()
                data = b"%d of %d " % (entry_id, writer.ledger_id) * (1 + chance.randrange(100))
                history.add(entry_id, data)
                writer.add(data).add_done_callback(_acknowledges(history))
                if chance.random() < 0.1:
                    await asyncio.sleep(0.02)
                if fate == "fence" and entry_id == count // 2:
                    fencing = asyncio.create_task(self._openers.open_ledger(writer.ledger, recovery=True))
            if fate == "close":
                await writer.close()
                history.close(writer.metadata.last_entry_id)
        finally:
            if fencing is not None:
                await asyncio.gather(fencing, return_exceptions=True)
            await self._recover(writer.ledger, history)

    async def _recover(self, ledger: LedgerId, history: History) -> None:
        """Close the ledger as another client, and read it, as soon as faults let it."""
        while True:
            with contextlib.suppress(BkctlError):
                await read_closed(self._openers, ledger, history)
                return
            await asyncio.sleep(0.2)

    async def _tail(self, ledger: LedgerId, history: History) -> None:
        """Follow the ledger to its close; another reader begins anew after each error."""
        for attempt in itertools.count():
            started, entries = history.now(), []
            with contextlib.suppress(BkctlError):
                async with await self._openers.open_ledger(ledger) as reader:
                    async for entry in reader.tail():
                        entries.append((entry.entry_id, entry.payload))
                        history.confirm(f"tail {attempt}", reader.last_add_confirmed)
                    history.close(reader.last_add_confirmed)
                    history.read(started, len(entries) - 1, entries)
                    return
            history.read(started, len(entries) - 1, entries, partial=True)
            await asyncio.sleep(0.2)


def _acknowledges(history: History) -> Callable[[asyncio.Future[int]], None]:
    def note(future: asyncio.Future[int]) -> None:
        if not future.cancelled() and future.exception() is None:
            history.acknowledge(future.result())

    return note


async def read_closed(client: BookKeeper, ledger: LedgerId, history: History, password: bytes = b"") -> None:
    """Open with recovery, which closes the ledger if it is open, and read all of it."""
    started = history.now()
    async with await client.open_ledger(ledger, recovery=True, password=password) as reader:
        history.close(reader.last_add_confirmed)
        entries = [(entry.entry_id, entry.payload) async for entry in reader.read()]
        history.read(started, reader.last_add_confirmed, entries, closed=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of DISK_BYTES at the first bookie's directory; None where it cannot be mounted."""
    home = tmp_path / "o-0"
    home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(home)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    yield home
    subprocess.run(["umount", "-l", str(home)], check=True)


@pytest.fixture
def bookies(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path, small_disk: Path | None) -> Iterator[SomeCluster]:
    cluster = SomeCluster("mixed", java, zookeeper, tmp_path, {"zkTimeout": SESSION_MS, "flushInterval": 200})
    cluster.ensure_up()
    yield cluster
    cluster.kill()


class JavaWriter:
    """Java's client in a process of its own, which writes ledgers on the same bookies."""

    def __init__(self, java: Java, uri: str, directory: Path) -> None:
        self._java, self._log = java, directory / "java.log"
        with self._log.open("w") as errors:
            self._program = java.start("SteadyWriter", uri, "v3", 200, 10, 40, stderr=errors)
        self._answers: list[dict[str, Any]] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        self._answers.extend(map(json.loads, self._program.stdout or ()))

    def end(self) -> dict[LedgerId, History]:
        """Have it finish; return its histories."""
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._listener.join(240)
        self._java.end(self._program)
        assert self._program.returncode == 0, self._log.read_text()[-4000:]
        histories = {}
        for answer in self._answers:
            ledger = LedgerId(0, int(answer["ledgerId"]))
            history = histories[ledger] = History(f"Java's {ledger}")
            for entry_id in range(200):
                word = b"%d %d " % (ledger.ledger_id, entry_id)
                size = 1 + entry_id * 37 % 1500
                history.add(entry_id, (word * (size // len(word) + 1))[:size])
            for entry_id in range(answer["acknowledged"]):
                history.acknowledge(entry_id)
            if answer["closed"]:
                history.close(answer["acknowledged"] - 1)
        return histories


async def test_histories_under_random_faults_keep_all_promises(
    java: Java, bookies: SomeCluster, small_disk: Path | None, tmp_path: Path
) -> None:
    seed = int(os.environ.get("BKCTL_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"BKCTL_TEST_SEED={seed} BKCTL_TEST_SECONDS={SECONDS:g}")
    links = {bookie.bookie_id: CuttableLink(bookie.port) for bookie in bookies.bookies}
    addresses = {bookie_id: await link.start() for bookie_id, link in links.items()}
    faults = Faults(bookies, links, small_disk)
    their_writer = JavaWriter(java, bookies.metadata_uri, tmp_path)
    loop = asyncio.get_running_loop()
    async with (
        BookKeeper(bookies.metadata_uri, addresses=addresses, timeout_s=TIMEOUT_S) as client,
        BookKeeper(bookies.metadata_uri, timeout_s=TIMEOUT_S) as openers,
    ):
        writers = Writers(client, openers, seed)
        writing = [asyncio.create_task(writers.run(number)) for number in range(2)]
        end, lasting = loop.time() + SECONDS, set[asyncio.Task[None]]()
        busy: set[int] = set()
        for fault in schedule(random.Random(seed), faults.kinds):
            if loop.time() > end:
                break
            print(*fault)
            await asyncio.sleep(fault.pause_s)
            if lasting and (fault.pause_s > 0 or fault.victim in busy):
                await asyncio.wait(lasting)
                busy.clear()
            task = asyncio.create_task(faults.inflict(fault))
            busy.add(fault.victim)
            lasting.add(task)
            task.add_done_callback(lasting.discard)
        if lasting:
            await asyncio.wait(lasting)
        await asyncio.to_thread(bookies.ensure_up)
        writers.ending = True
        await asyncio.wait_for(asyncio.gather(*writing), 300)
    for link in links.values():
        await link.close()
    their_histories = await asyncio.to_thread(their_writer.end)
    histories = {**writers.histories, **their_histories}
    async with BookKeeper(bookies.metadata_uri) as client:
        some = asyncio.Semaphore(16)

        async def read(ledger: LedgerId, history: History) -> None:
            async with some:
                await read_closed(client, ledger, history, b"steady" if ledger in their_histories else b"")

        await asyncio.gather(*itertools.starmap(read, histories.items()))
    assert [problem for history in histories.values() for problem in history.problems()] == []
    for group in (writers.histories, their_histories):
        assert sum(len(history.acknowledged) for history in group.values()) > 100
    print(len(writers.histories), "ledgers of ours,", len(their_histories), "of Java's, entries acknowledged:",
          sum(len(history.acknowledged) for history in histories.values()))  # fmt: skip
    await asyncio.to_thread(compare_with_java, java, bookies.metadata_uri, writers.histories)


def compare_with_java(java: Java, uri: str, histories: dict[LedgerId, History]) -> None:
    """Java's client reads what ours read."""
    last = dict(itertools.islice(reversed(histories.items()), 20))
    empty = base64.b64encode(b"").decode()
    asked = [{"ledgerId": str(each.ledger_id), "digestType": "CRC32C", "password": empty} for each in last]
    for history, found in zip(last.values(), read_ledgers(java, uri, "v3", asked), strict=True):
        assert found["state"] == "CLOSED"
        assert [entry["entryId"] for entry in found["entries"]] == [each for each, _ in history.reads[-1].entries]
