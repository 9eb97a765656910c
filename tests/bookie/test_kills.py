"""One bookie under load that is killed again and again, with garbage collection and compaction at work.

BKCTL_TEST_KILLS sets how often each storage class is killed (6), BKCTL_TEST_SEED repeats a run; `-s` shows its figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.servers import DB, INTERLEAVED, SORTED, wait_for, write_conf

from bkctl.errors import BkctlError, Unreachable
from bkctl.formats.availability import Availability
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    Response,
    Status,
    WriteLacRequest,
)

KILLS = int(os.environ.get("BKCTL_TEST_KILLS", "6"))
#: Every so many kills the dead bookie's files are checked.
CHECK_EVERY = 5 if KILLS <= 10 else 25
PASSWORD = b"secret"
SCOPES = (0, 7, (1 << 64) - 1)
#: Ledgers that are written to at a time, that are there at a time, and entries that one gets at most.
OPEN_LEDGERS = 9
LEDGERS_MAX = 24
ENTRIES_MAX = 1500
IN_FLIGHT_MAX = 300
#: Small files, quick checkpoints and collection all the time, so that the kills meet everything that a bookie does.
SETTINGS = {
    "journalMaxSizeMB": 1,
    "journalPreAllocSizeMB": 1,
    "logSizeLimit": 200_000,
    "flushInterval": 20,
    "skipListSizeLimit": 400_000,
    "gcWaitTime": 50,
    "minorCompactionInterval": 1,
    "minorCompactionThreshold": 0.8,
    "majorCompactionInterval": 2,
    "majorCompactionThreshold": 0.95,
}
#: Each start takes one of these.
SETTINGS_THAT_CHANGE = ("useTransactionalCompaction", "gcEntryLogMetadataCacheEnabled")
#: Seconds that the bookie lives: short, or until it compacts.
LIVES = ((0.05, 0.6), (0.05, 0.6), (1.0, 1.5))
GONE = (Status.ENOENTRY, Status.ENOLEDGER)
NOISE = random.Random(1).randbytes(1 << 14)


def payload_of(entry_id: int) -> bytes:
    """Of up to 3 KB, different for each entry."""
    start = entry_id * 131 % (1 << 13)
    return entry_id.to_bytes(4, "big") + NOISE[start : start + entry_id * 977 % 3000]


@dataclass(eq=False)
class Ledger:
    """The requests about one ledger, and the bookie's answers."""

    by: DigestManager
    given: int = 0
    acknowledged: set[int] = field(default_factory=set)
    #: Not answered: may be there or not.
    unknown: set[int] = field(default_factory=set)
    #: Acknowledged by this process, but only on disk for sure after the next force.
    deferred: set[int] = field(default_factory=set)
    lac_given: int = -1
    lac_acknowledged: int = -1
    fenced: bool = False
    deleted: bool = False

    @property
    def ledger(self) -> LedgerId:
        return self.by.ledger

    def body(self, entry_id: int) -> bytes:
        payload = payload_of(entry_id)
        return self.by.seal(entry_id, entry_id - 1, len(payload) * (entry_id + 1), payload) + payload

    def is_cut(self, entry_id: int, body: bytes) -> bool:
        """Return whether zeros follow a part of the entry: a kill can cut a write to a preallocated journal short.

        A journal has no checksums, so a bookie replays such a record, as Apache's does; it never acknowledged it.
        """
        whole = self.body(entry_id)
        return len(body) == len(whole) and whole.startswith(body.rstrip(b"\0"))

    def add(self, *, recovery: bool = False, deferred: bool = False) -> AddRequest:
        entry_id, self.given = self.given, self.given + 1
        self.unknown.add(entry_id)
        return AddRequest(
            self.ledger, entry_id, self.by.master_key, self.body(entry_id), recovery_add=recovery,
            deferred_sync=deferred,
        )  # fmt: skip


class Load:
    """Ledgers of one bookie: writes them until it dies, and checks afterwards that it kept its word."""

    def __init__(self, cluster: Cluster, bookie: OwnBookie, chance: random.Random) -> None:
        self.cluster = cluster
        self.bookie = bookie
        self.chance = chance
        self.ledgers: list[Ledger] = []
        self.broken: list[str] = []
        self.seen: Counter[str] = Counter()

    @property
    def alive(self) -> list[Ledger]:
        return [each for each in self.ledgers if not each.deleted]

    @property
    def acknowledged(self) -> int:
        return sum(len(each.acknowledged) for each in self.ledgers)

    # --- metadata ---

    def create(self) -> None:
        number = len(self.ledgers)
        ledger = LedgerId(SCOPES[number % len(SCOPES)], 1 + number // len(SCOPES))
        digest_type = (DigestType.CRC32C, DigestType.HMAC)[number % 3 == 2]
        fragment = Fragment(0, (self.bookie.bookie_id,))
        self.cluster.ledgers.create(ledger, LedgerMetadata(1, 1, 1, digest_type, PASSWORD, (fragment,)))
        self.ledgers.append(Ledger(DigestManager(ledger, digest_type, PASSWORD)))

    def delete(self, ledger: Ledger) -> None:
        self.cluster.ledgers.remove(ledger.ledger)
        ledger.deleted = True

    # --- load ---

    async def run(self, until: Callable[[], bool]) -> None:
        """Write, fence and delete by three connections until the bookie is gone, or `until`."""
        for ledger in self.alive:
            ledger.unknown |= ledger.deferred
            ledger.deferred.clear()
        open_ones = [each for each in self.alive if not each.fenced and each.given < ENTRIES_MAX]
        for _ in range(OPEN_LEDGERS - len(open_ones)):
            self.create()
        for ledger in self.alive[:-LEDGERS_MAX]:
            self.delete(ledger)
        plain = [each for each in self.alive if not each.ledger.is_scoped]
        await asyncio.gather(
            self._write(Protocol.V2, plain[::2], until),
            self._write(Protocol.V3, plain[1::2], until),
            self._write(Protocol.V3, [each for each in self.alive if each.ledger.is_scoped], until),
        )

    async def _write(self, protocol: Protocol, ledgers: list[Ledger], until: Callable[[], bool]) -> None:
        chance = self.chance
        waiting: set[asyncio.Future[Response]] = set()

        def send(request: Any, note: Callable[[Response], None]) -> None:
            def answered(future: asyncio.Future[Response]) -> None:
                waiting.discard(future)
                if not future.cancelled() and future.exception() is None:
                    note(future.result())

            waiting.add(future := connection.send(request))
            future.add_done_callback(answered)

        with contextlib.suppress(Unreachable):
            connection = await self.connect(protocol)
            while ledgers and self.bookie.running and not connection.closed and not until():
                ledger = chance.choice(ledgers)
                if ledger.deleted:
                    ledgers.remove(ledger)
                    continue
                what = chance.random()
                if ledger.given < ENTRIES_MAX:
                    for _ in range(1 if ledger.fenced else chance.randint(1, 8)):
                        self._add(send, ledger, deferred=protocol is Protocol.V3 and what < 0.05)
                if what < 0.1 and protocol is Protocol.V3:
                    self._force_and_confirm(send, ledger)
                elif what > 0.997:
                    self._fence(send, ledger)
                elif what > 0.99 and len(self.alive) > OPEN_LEDGERS // 2:
                    self.delete(ledger)
                if len(waiting) > IN_FLIGHT_MAX:
                    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0.002)
            await asyncio.gather(*waiting, return_exceptions=True)
            connection.close()

    def _add(self, send: Callable[..., None], ledger: Ledger, *, deferred: bool) -> None:
        may_not = ledger.fenced
        request = ledger.add(recovery=may_not and self.chance.random() < 0.5, deferred=deferred)
        may_not = may_not and not request.recovery_add

        def note(response: Response) -> None:
            self.seen[response.status.name] += 1
            ledger.unknown.discard(request.entry_id)
            if response.status is Status.EOK:
                (ledger.deferred if deferred else ledger.acknowledged).add(request.entry_id)
                if may_not:
                    self.broken.append(f"{ledger.ledger}: entry {request.entry_id} was added after the fence")
            elif response.status is not Status.EFENCED:
                self.broken.append(f"{ledger.ledger}: add of {request.entry_id} answered {response.status.name}")

        send(request, note)

    def _force_and_confirm(self, send: Callable[..., None], ledger: Ledger) -> None:
        there = set(ledger.deferred)

        def forced(response: Response) -> None:
            if response.status is Status.EOK:
                self.seen["forced"] += len(there)
                ledger.acknowledged |= there
                ledger.deferred -= there

        send(ForceLedgerRequest(ledger.ledger), forced)
        if not ledger.given:
            return
        lac = ledger.lac_given = max(ledger.lac_given, ledger.given - 1)

        def confirmed(response: Response) -> None:
            if response.status is Status.EOK:
                self.seen["explicit LAC"] += 1
                ledger.lac_acknowledged = max(ledger.lac_acknowledged, lac)

        send(WriteLacRequest(ledger.ledger, lac, ledger.by.master_key, ledger.by.seal_lac(lac)), confirmed)

    def _fence(self, send: Callable[..., None], ledger: Ledger) -> None:
        def fenced(response: Response) -> None:
            if response.status in (Status.EOK, Status.ENOENTRY):
                self.seen["fenced"] += 1
                ledger.fenced = True

        send(ReadRequest(ledger.ledger, LAST_ENTRY, ledger.by.master_key, fence=True), fenced)

    # --- check ---

    async def connect(self, protocol: Protocol) -> BookieConnection:
        connection = await BookieConnection.open(
            *self.bookie.address, bookie_id=self.bookie.bookie_id, protocol=protocol
        )
        if protocol is Protocol.V3:
            assert await connection.supports_scopes()
        return connection

    async def check(self) -> None:
        """Everything that was acknowledged is there, and whole; nothing else is there than what was given."""
        assert not self.broken, self.broken
        connection = await self.connect(Protocol.V3)
        for ledger in self.ledgers:
            await self._check_entries(connection, ledger)
            if not ledger.deleted:
                await self._check_state(connection, ledger)
        connection.close()

    async def _check_entries(self, connection: BookieConnection, ledger: Ledger) -> None:
        if ledger.deleted and (await connection.send(ReadRequest(ledger.ledger, LAST_ENTRY))).status in GONE:
            return
        ids = sorted(ledger.acknowledged | ledger.deferred | ledger.unknown)
        answers = await asyncio.gather(*(connection.send(ReadRequest(ledger.ledger, each)) for each in ids))
        for entry_id, response in zip(ids, answers, strict=True):
            where = f"{ledger.ledger} entry {entry_id}"
            if response.status is Status.EOK:
                if entry_id in ledger.unknown and ledger.is_cut(entry_id, bytes(response.body)):
                    continue
                assert bytes(ledger.by.open(bytes(response.body), entry_id).payload) == payload_of(entry_id), where
            else:
                # A deleted ledger may be collected, and its entry logs removed, while it is read.
                assert response.status in GONE or ledger.deleted, (where, response.status)
                assert ledger.deleted or entry_id not in ledger.acknowledged, f"{where} is lost"

    async def _check_state(self, connection: BookieConnection, ledger: Ledger) -> None:
        if ledger.acknowledged:
            listed = await connection.send(ListEntriesRequest(ledger.ledger))
            assert listed.status is Status.EOK, ledger.ledger
            there = set(Availability.parse(bytes(listed.availability)))
            assert ledger.acknowledged <= there, ledger.ledger
            assert not there or max(there) < ledger.given
        if ledger.lac_acknowledged >= 0:
            found = await connection.send(ReadLacRequest(ledger.ledger))
            assert found.lac_body is not None, ledger.ledger
            assert ledger.lac_acknowledged <= ledger.by.open_lac(found.lac_body) <= ledger.lac_given, ledger.ledger
        if ledger.fenced:
            response = await connection.send(ledger.add())
            assert response.status is Status.EFENCED, (ledger.ledger, response)

    async def deleted_are_gone(self) -> bool:
        """Return True if the bookie has none of the deleted ledgers."""
        connection = await self.connect(Protocol.V3)
        deleted = [each for each in self.ledgers if each.deleted]
        answers = await asyncio.gather(*(connection.send(ReadRequest(each.ledger, LAST_ENTRY)) for each in deleted))
        connection.close()
        return all(answer.status is Status.ENOLEDGER for answer in answers)


def kill_at_random(bookie: OwnBookie, chance: random.Random) -> str:
    """End the bookie by SIGKILL while it runs, stops or starts; says which."""
    what = chance.choice(["running", "running", "running", "stopping", "starting"])
    if what == "stopping":
        with contextlib.suppress(ProcessLookupError):
            os.kill(bookie.pid, signal.SIGTERM)
        time.sleep(chance.uniform(0, 0.2))
    bookie.kill()
    if what == "starting":
        bookie.launch()
        time.sleep(chance.uniform(0.2, 0.7))
        bookie.kill()
    return what


def scenario(body: Awaitable[Any]) -> Any:
    async def run() -> Any:
        return await asyncio.wait_for(body, 480)

    return asyncio.run(run())


@pytest.mark.timeout(1800 + 10 * KILLS)
@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_bookie_killed_at_random_points_loses_nothing_acknowledged(
    own_bookie: Callable[..., OwnBookie], cluster: Cluster, storage: str
) -> None:
    seed = int(os.environ.get("BKCTL_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    chance = random.Random(seed)
    bookie = own_bookie(cluster.uri, storage=storage, settings=SETTINGS)
    load = Load(cluster, bookie, chance)
    bkctl = CommandLine(None)
    spent: Counter[str] = Counter()
    kinds: Counter[str] = Counter()

    def timed(what: str, work: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            return work()
        finally:
            spent[what] += time.monotonic() - start

    async def live(seconds: float) -> None:
        async def end() -> str:
            await asyncio.sleep(seconds)
            return await asyncio.to_thread(kill_at_random, bookie, chance)

        ending = asyncio.create_task(end())
        await load.run(ending.done)
        kinds[await ending] += 1

    def check_files() -> None:
        done = bkctl(
            "bookie", "check", "--conf", bookie.conf, "--digest", "--password", PASSWORD.decode(), "-o", "ndjson"
        )
        acknowledged = {each.ledger.qualified_name: each.acknowledged for each in load.alive}
        for row in map(json.loads, done.out.splitlines()):
            # Entries not yet in the journal may have reached the entry log, in part too: see `is_cut`.
            is_left_over = row["kind"] in ("notIndexed", "digest") and row["entryId"] not in acknowledged.get(
                row["ledgerQualifiedName"], ()
            )
            assert row["kind"] == "unindexed" or is_left_over, row
        assert done.code in (0, 3), done.err

    def start() -> None:
        changed = {name: chance.choice(("true", "false")) for name in SETTINGS_THAT_CHANGE}
        write_conf(bookie.conf, bookie.settings | changed)
        bookie.start()

    def compactions() -> int:
        return bookie.log.read_text(errors="replace").count("Compacted ")

    try:
        for kill in range(KILLS):
            timed("start", start)
            timed("check", lambda: scenario(load.check()))
            timed("load", lambda: scenario(live(chance.uniform(*chance.choice(LIVES)))))
            if kill % CHECK_EVERY == CHECK_EVERY - 1:
                timed("files", check_files)
        before = compactions()
        start()
        # However little it got done while it was killed: enough for some logs.
        scenario(load.run(lambda: load.acknowledged > 1000 and load.seen["explicit LAC"] > 0))
        for ledger in load.alive[::2]:
            load.delete(ledger)
        wait_for(lambda: scenario(load.deleted_are_gone()), "the deleted ledgers gone")
        wait_for(lambda: compactions() > before, "a compaction")
        scenario(load.check())
        bookie.kill()
        start()
        scenario(load.check())
        bookie.stop()
        check_files()
        bookie.start()
        scenario(load.check())
    except (AssertionError, BkctlError, RuntimeError, TimeoutError) as error:
        error.add_note(f"BKCTL_TEST_SEED={seed}")
        raise
    replayed = [line for line in bookie.log.read_text(errors="replace").splitlines() if "replayed" in line]
    a_kill = {what: round(seconds / KILLS, 2) for what, seconds in spent.items()}
    print(
        f"{storage.rpartition('.')[2]}, seed {seed}: {KILLS} kills {dict(kinds)}, {a_kill} s each,"
        f" {len(replayed)} replays;"
        f" {load.acknowledged} entries in {len(load.ledgers)} ledgers ({len(load.alive)} alive), {dict(load.seen)};"
        f" {compactions()} compactions, {before} of them before the last kill"
    )
    assert load.acknowledged
    assert load.seen["explicit LAC"]


@pytest.mark.parametrize("storage", [SORTED, INTERLEAVED, DB], ids=["sorted", "interleaved", "db"])
def test_killed_bookie_serves_entries_whose_lengths_and_lacs_are_lies(
    own_bookie: Callable[..., OwnBookie], cluster: Cluster, storage: str
) -> None:
    """A client chooses length and LAC: no start may fail for them, nor lose what an honest client wrote behind."""
    bookie = own_bookie(cluster.uri, storage=storage)
    lying, honest = (DigestManager(LedgerId(0, number), DigestType.CRC32C, PASSWORD) for number in (8, 9))
    large, small = NOISE * 75, b"honest"
    entries = [
        (lying, 0, lying.seal(0, -1, 0, large) + large),
        (lying, 1, lying.seal(1, 1 << 60, 0, b"") + b""),
        (lying, 2, lying.seal(2, 1 << 60, -1, bytes(2000)) + bytes(2000)),
        (honest, 0, honest.seal(0, -1, len(small), small) + small),
    ]

    async def write() -> None:
        opened = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, protocol=Protocol.V2)
        with contextlib.closing(opened) as connection:
            adds = [connection.send(AddRequest(by.ledger, number, by.master_key, body)) for by, number, body in entries]
            assert [(await each).status for each in adds] == [Status.EOK] * len(entries)

    async def read() -> None:
        opened = await BookieConnection.open(*bookie.address, bookie_id=bookie.bookie_id, protocol=Protocol.V2)
        with contextlib.closing(opened) as connection:
            for by, number, body in entries:
                response = await connection.send(ReadRequest(by.ledger, number))
                assert (response.status, bytes(response.body)) == (Status.EOK, body)

    bookie.start()
    scenario(write())
    bookie.kill()
    bookie.start()
    scenario(read())
