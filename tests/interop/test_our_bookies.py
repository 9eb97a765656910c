"""Our bookies as processes on a real ZooKeeper under Apache's client, Apache's shell, Apache's bookie, and SIGKILL.

BKCTL_TEST_KILLS sets how many times bookies are killed at random (8), BKCTL_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import apache_shell
from support.command_line import CommandLine
from support.entries import described, read_all
from support.own_bookies import OwnBookie
from support.own_cluster import STORAGES, OwnCluster, journal_version, start_all, stop_all
from support.servers import (
    DB,
    INTERLEAVED,
    SORTED,
    ApacheBookie,
    Java,
    ZooKeeperServer,
    format_cluster,
    offline_conf,
    read_ledgers,
    wait_for,
    write_ledgers,
)

from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import ReadHandle
from bkctl.client.verify import verify_entries
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import BkctlError, LedgerNotFound
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.messages import Protocol

COMPLAINTS = ("WARN", "ERROR", "Exception", "corrupt", "Corrupt", "not valid", "Unable")
ROUNDTRIP_STEPS = [
    *["write, close, read"] * 4, "chosen ledger id", "LAC of an open ledger", "explicit LAC", "long poll",
    "recovery", "fencing", "delete", "wrong password", "read behind the end", "deferred sync and force",
]  # fmt: skip
V3_ONLY = {"explicit LAC", "long poll", "deferred sync and force"}


def scenario(body: Coroutine[Any, Any, Any], timeout_s: float = 300) -> Any:
    return asyncio.run(asyncio.wait_for(body, timeout_s))


MakeCluster = Callable[..., OwnCluster]


@pytest.fixture(scope="module")
def _own(java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    directory = tmp_path_factory.mktemp("own")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, directory)
    cluster = OwnCluster(uri, directory, STORAGES)
    try:
        yield cluster
    finally:
        cluster.kill()


@pytest.fixture
def own(_own: OwnCluster) -> OwnCluster:
    """Three of our bookies, all up, on a root that Apache's shell formatted; shared by this module."""
    _own.ensure_up()
    return _own


@pytest.fixture(scope="module")
def known(_own: OwnCluster, java: Java) -> list[dict[str, Any]]:
    """The ledgers of WriteLedgers.java in v3 and v2; in each run one of the three was killed during the writes."""
    ledgers: list[dict[str, Any]] = []
    for protocol in ("v3", "v2"):
        _own.ensure_up()
        kill = lambda bookie_id: _own.by_id(bookie_id).kill()  # noqa: E731
        ledgers += write_ledgers(java, _own.metadata_uri, protocol, stop=kill)
    _own.ensure_up()
    return ledgers


@pytest.fixture
def cluster(own: OwnCluster) -> Iterator[Cluster]:
    with open_cluster(own.metadata_uri) as opened:
        yield opened


def payload_of(ledger: LedgerId | int | str, entry_id: int) -> bytes:
    """Return the payload that SteadyWriter.java writes, too."""
    word = f"{ledger} {entry_id} ".encode()
    size = 1 + entry_id * 37 % 1500
    return (word * (size // len(word) + 1))[:size]


async def check_replicas(reader: ReadHandle) -> int:
    """Every entry is whole on every bookie that should have it; how many were read."""
    checked = 0
    async for check in verify_entries(reader):
        assert check.ok, f"ledger {reader.ledger}: {check}"
        checked += 1
    return checked


def expected_entries(one: dict[str, Any], last: int) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in entry.items() if name != "lastAddConfirmed"}
        for entry in one["entries"][: last + 1]
    ]


# --- Java's client ---------------------------------------------------------------------------------------------------


@pytest.mark.releases
@pytest.mark.parametrize("protocol", ["v3", "v2"])
def test_the_java_program_passes_from_first_to_last_line(own: OwnCluster, java: Java, protocol: str) -> None:
    said = java.run_source("Roundtrip.java", own.metadata_uri, protocol).stdout
    answers = [json.loads(line) for line in said.splitlines()]
    steps = [answer["step"] for answer in answers]
    assert steps == [step for step in ROUNDTRIP_STEPS if protocol == "v3" or step not in V3_ONLY]
    batches = [answer["batch"] for answer in answers if "batch" in answer]
    if java.version >= "4.17":  # older clients have no batch read
        assert batches == [20] * 4


@pytest.mark.releases
@pytest.mark.parametrize("protocol", [Protocol.V3, Protocol.V2])
def test_java_and_we_read_all_that_java_wrote_while_a_bookie_was_killed(
    own: OwnCluster, cluster: Cluster, known: list[dict[str, Any]], java: Java, protocol: Protocol
) -> None:
    there = [one for one in known if not one["deleted"]]
    answers = read_ledgers(java, own.metadata_uri, "v2" if protocol is Protocol.V2 else "v3", there)
    for one, found in zip(there, answers, strict=True):
        last = one["lastAddConfirmed"]
        if protocol is Protocol.V3 and one["explicitLac"] is not None:
            last = one["explicitLac"]
        assert found["lastAddConfirmed"] == last, one["name"]
        assert found["entries"] == expected_entries(one, last), one["name"]
        for name in ("state", "length", "ensembles", "customMetadata", "digestType"):
            assert found[name] == one[name], one["name"]

    async def body() -> None:
        async with BookKeeper(cluster, protocol=protocol) as client:
            for one in known:
                ledger_id, password = int(one["ledgerId"]), base64.b64decode(one["password"])
                if one["deleted"]:
                    with pytest.raises(LedgerNotFound):
                        await client.open_ledger(ledger_id, password=password)
                    continue
                reader = await client.open_ledger(ledger_id, password=password)
                assert await read_all(reader) == expected_entries(one, reader.last_add_confirmed), one["name"]
                assert await check_replicas(reader) == reader.last_add_confirmed + 1

    scenario(body())


@pytest.mark.releases
def test_each_replica_is_whole_after_the_killed_bookie_came_back(own: OwnCluster, known: list[dict[str, Any]]) -> None:
    changed = [one for one in known if one["name"] == "ensemble-change"]
    assert len(changed) == 2
    closed = [one["ledgerId"] for one in known if one["state"] == "CLOSED" and not one["deleted"]]
    done = CommandLine(own.metadata_uri)("ledger", "verify", *closed)
    assert (done.code, done.err.count(" is sound: ")) == (0, len(closed)), done


# --- Apache's shell on our files -------------------------------------------------------------------------------------


def rows(*arguments: object) -> list[dict[str, Any]]:
    return CommandLine(None)(*arguments, "-o", "ndjson").rows


def shell_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of our rows what Apache's shell tells too."""
    kept = []
    for row in found:
        assert row["ledgerScopeId"] == "0"
        assert row["ledgerQualifiedName"] == f"{int(row['ledgerId']):032x}"
        names = ["type", "ledgerId", "entryId", "offset", "recordSize"]
        names += {"entry": ["lastAddConfirmed"], "ledgerKey": ["masterKey"]}.get(row["type"], [])
        kept.append({name: row[name] for name in names})
        if row["type"] == "ledgerKey":
            kept[-1]["masterKey"] = base64.b64decode(row["masterKey"]).hex()
    return kept


@pytest.mark.releases
def test_apaches_shell_reads_the_files_of_our_bookie_without_complaint(
    own: OwnCluster, known: list[dict[str, Any]], java: Java, tmp_path: Path
) -> None:
    bookie = own.bookies[0]
    # The last journal of a killed or stopped bookie, and logs that are closed and not: all have to be read.
    bookie.stop()
    conf = offline_conf(tmp_path / "bk_server.conf", bookie.journal_dir, bookie.ledger_dir, SORTED)

    def shell(*arguments: object) -> str:
        done = java.shell(conf, *arguments)
        assert done.returncode == 0, done.stdout
        said = [line for line in (done.stdout + done.stderr).splitlines() if any(word in line for word in COMPLAINTS)]
        assert not said, said
        return done.stdout

    (mark,) = rows("journal", "lastmark", "--dir", bookie.ledger_dir)
    assert (mark["journalId"], mark["offset"]) == apache_shell.last_mark(shell("lastmark"))

    journals = sorted((bookie.journal_dir / "current").glob("*.txn"))
    assert journals
    assert {journal_version(path) for path in journals} == {6}
    journal = max(journals, key=lambda path: len(rows("journal", "read", path)))
    answer = shell("readjournal", journal)
    ours = rows("journal", "read", journal, "--show-secrets")
    assert shell_rows(ours) == apache_shell.records(answer)
    assert apache_shell.journal_version(answer) == 6
    assert {row["type"] for row in ours} >= {"entry", "ledgerKey"}

    log = max((bookie.ledger_dir / "current").glob("*.log"), key=lambda path: path.stat().st_size)
    ours = rows("entrylog", "read", log)
    assert len(ours) > 100
    assert shell_rows(ours) == apache_shell.records(shell("readlog", int(log.stem, 16)))
    sizes = {row["ledgerId"]: row["size"] for row in rows("entrylog", "show", log)}
    assert sizes == apache_shell.log_metadata(shell("readlogmetadata", log.name))
    assert len(sizes) > 5

    ids = {one["name"]: one["ledgerId"] for one in known if one["protocol"] == "v3"}
    for ledger_id in (ids["many-entries"], ids["id-near-2^63"]):
        answer = shell("ledger", "-m", ledger_id)
        ours = rows("bookie", "index", "show", ledger_id, "--dir", bookie.ledger_dir)
        found = {row["entryId"]: (row["logId"], row["offset"] + 4) for row in ours}
        assert found
        assert found == apache_shell.locations(answer)
        (meta,) = rows("bookie", "index", "show", ledger_id, "--meta", "--show-secrets", "--dir", bookie.ledger_dir)
        key = base64.b64decode(meta["masterKey"]).hex()
        assert {"masterKey": key, "fenced": meta["fenced"]} == apache_shell.index_header(answer)


# --- directories that change hands -----------------------------------------------------------------------------------


@pytest.mark.releases
def test_directories_go_from_ours_to_apaches_bookie_and_back_and_the_reverse(
    java: Java, own_cluster: MakeCluster, apache_bookie: Callable[..., ApacheBookie]
) -> None:
    storages = (SORTED, DB, INTERLEAVED)
    own = own_cluster(storages, {"zkTimeout": 4000, "logSizeLimit": 256 * 1024})
    ours, uri = own.bookies, own.metadata_uri
    theirs = [
        apache_bookie(uri, storage, port=one.port, settings=one.settings)
        for one, storage in zip(ours, storages, strict=True)
    ]
    written: dict[LedgerId, list[dict[str, Any]]] = {}
    asked: list[dict[str, Any]] = []

    async def write(client: BookKeeper, ledger: LedgerId, digest_type: DigestType, size: int) -> None:
        writer = await client.create_ledger_adv(
            ledger.ledger_id, ledger_scope_id=ledger.scope_id, digest_type=digest_type, password=b"steady",
            ensemble_size=size, write_quorum_size=size, ack_quorum_size=size,
        )  # fmt: skip
        length, found = 0, []
        for entry_id in range(600):
            data = payload_of(ledger.qualified_name, entry_id)
            length += len(data)
            found.append(described(entry_id, data, length))
            await writer.ready()
            writer.add(data)
            if entry_id == 598:  # so that the last entry confirms all before it
                await writer.flush()
        await writer.flush()
        if ledger.ledger_id % 2:
            await writer.close()
        written[ledger] = found
        if not ledger.is_scoped:
            password = base64.b64encode(b"steady").decode()
            asked.append({"ledgerId": str(ledger.ledger_id), "digestType": digest_type.name, "password": password})

    async def check(client: BookKeeper, *, scoped: bool) -> None:
        for ledger, entries in written.items():
            if ledger.is_scoped and not scoped:
                with pytest.raises(BkctlError):
                    await read_all(
                        await client.open_ledger(
                            ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"steady", recovery=True
                        )
                    )
                continue
            reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"steady")
            confirmed = len(entries) if reader.is_closed else len(entries) - 1
            assert await read_all(reader) == entries[:confirmed]
            await check_replicas(reader)

    async def first(client: BookKeeper) -> None:
        for digest_type in DigestType:
            await write(client, LedgerId(0, 100 + digest_type), digest_type, 3)
        await write(client, LedgerId(0, (1 << 63) - 5), DigestType.CRC32C, 3)
        await write(client, LedgerId(7, 101), DigestType.CRC32C, 1)
        await write(client, LedgerId((1 << 64) - 1, 102), DigestType.HMAC, 1)

    async def second(client: BookKeeper) -> None:
        await check(client, scoped=False)
        # The first bookie is Apache's now, the others ours: a scoped ledger of two has to be on those.
        await write(client, LedgerId(0, 201), DigestType.CRC32C, 3)
        await write(client, LedgerId(0, 202), DigestType.HMAC, 3)

    def with_client(body: Callable[[BookKeeper], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            async with BookKeeper(cluster) as client:
                await body(client)

        scenario(run())

    # First the left one is ours, the others Apache's (Sorted and Interleaved).
    mixed = [ours[0], theirs[1], theirs[2]]
    start_all(mixed)
    with open_cluster(uri) as cluster:
        known = write_ledgers(java, uri, "v3", small=True)
        with_client(first)
        ours[0].stop()
        for bookie in theirs[1:]:
            bookie.kill()

        # Then the reverse, on the same directories and ports. Java reads everything from Apache's bookie alone. Ours
        # have to replay the journals of Apache's, whose entries are in memory until then.
        theirs[0].start()
        alone = [one for one in asked if int(one["ledgerId"]) % 2]
        for one, found in zip(alone, read_ledgers(java, uri, "v3", alone), strict=True):
            assert found["entries"] == written[LedgerId(0, int(one["ledgerId"]))]
        start_all(ours[1:])
        with_client(second)
        there = [one for one in known if not one["deleted"]]
        for one, found in zip(there, read_ledgers(java, uri, "v2", there), strict=True):
            assert found["entries"] == expected_entries(one, found["lastAddConfirmed"]), one["name"]
            assert found["lastAddConfirmed"] >= one["lastAddConfirmed"]

        # And ours on the first again.
        theirs[0].kill()
        ours[0].start()

        async def third(client: BookKeeper) -> None:
            await check(client, scoped=True)
            await write(client, LedgerId(7, 201), DigestType.CRC32C, 1)
            recovered = next(one for one in known if one["name"] == "recovered")
            reader = await client.open_ledger(int(recovered["ledgerId"]), password=b"pw")
            assert await read_all(reader) == expected_entries(recovered, reader.last_add_confirmed)
            for ledger in [each for each in written if not each.ledger_id % 2]:
                reader = await client.open_ledger(
                    ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None, recovery=True
                )
                assert reader.metadata.state is LedgerState.CLOSED
                assert await read_all(reader) == written[ledger]
                assert await check_replicas(reader) == 600

        with_client(third)


# --- SIGKILL ---------------------------------------------------------------------------------------------------------


@dataclass
class Written:
    """A ledger that one of our writers made: how many of its entries were acknowledged."""

    ledger: LedgerId
    acknowledged: int = 0
    closed: bool = False


@dataclass
class SteadyWriter:
    """Writes one ledger after the other with our client until told to end, whatever happens to the bookies."""

    client: BookKeeper
    scope_id: int
    digest_type: DigestType
    entry_count: int = 200
    ledgers: list[Written] = field(default_factory=list)
    ending: bool = False

    async def run(self) -> None:
        next_id = 1_000_000_000
        while not self.ending:
            next_id += 1
            try:
                # The same ids in each scope.
                handle = await self.client.create_ledger_adv(
                    next_id, ledger_scope_id=self.scope_id, digest_type=self.digest_type, password=b"steady",
                    ensemble_size=2, write_quorum_size=2, ack_quorum_size=2,
                )  # fmt: skip
            except BkctlError:
                await asyncio.sleep(0.05)
                continue
            written = Written(handle.ledger)
            self.ledgers.append(written)
            try:
                await self._write(handle, written)
                await handle.close()
                written.closed = True
            except BkctlError:
                pass

    async def _write(self, handle: WriteHandle, written: Written) -> None:
        def added(future: asyncio.Future[int]) -> None:
            if not future.cancelled() and future.exception() is None:
                assert future.result() == written.acknowledged
                written.acknowledged += 1

        for entry_id in range(self.entry_count):
            if self.ending:
                break
            await handle.ready()
            handle.add(payload_of(handle.ledger.qualified_name, entry_id)).add_done_callback(added)
            if entry_id % 10 == 9:
                await asyncio.sleep(0.04)
        await handle.flush()


class OurWriters:
    """Several SteadyWriters in a thread with an event loop."""

    def __init__(self, cluster: Cluster, scopes: dict[int, DigestType]) -> None:
        self.writers: list[SteadyWriter] = []
        self._cluster = cluster
        self._scopes = scopes
        self._failure: list[BaseException] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(120)

    def _run(self) -> None:
        async def body() -> None:
            async with BookKeeper(self._cluster, timeout_s=5) as client:
                self.writers += [SteadyWriter(client, scope, digest) for scope, digest in self._scopes.items()]
                self._ready.set()
                await asyncio.gather(*(writer.run() for writer in self.writers))

        try:
            asyncio.run(body())
        except BaseException as error:  # noqa: BLE001 (handed to the test's thread)
            self._failure.append(error)

    def end(self) -> list[Written]:
        for writer in self.writers:
            writer.ending = True
        self._thread.join(240)
        assert not self._thread.is_alive(), "a writer hangs"
        if self._failure:
            raise self._failure[0]
        return self.ledgers

    @property
    def ledgers(self) -> list[Written]:
        """All that were made so far."""
        return [one for writer in self.writers for one in list(writer.ledgers)]


def kill_at_random(bookies: list[OwnBookie], chance: random.Random) -> str:
    """End bookies by SIGKILL at some point of their life, and start them again; says what was done."""
    victim = chance.choice(bookies)
    what = chance.choice(["running", "running", "stopping", "starting", "all"])
    if what == "all":
        for bookie in bookies:
            bookie.kill()
        start_all(bookies)
        return what
    if what == "stopping":
        os.kill(victim.pid, signal.SIGTERM)
        time.sleep(chance.uniform(0, 0.25))
    victim.kill()
    if what == "starting":
        for _ in range(2):
            victim.launch()
            time.sleep(chance.uniform(0.2, 1.0))
            victim.kill()
    victim.start()
    return f"{what} {bookies.index(victim)}"


def test_bookies_killed_at_random_points_lose_nothing_acknowledged(
    java: Java, own_cluster: MakeCluster, tmp_path: Path
) -> None:
    kills = int(os.environ.get("BKCTL_TEST_KILLS", "8"))
    seed = int(os.environ.get("BKCTL_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"BKCTL_TEST_SEED={seed} BKCTL_TEST_KILLS={kills}")
    chance = random.Random(seed)
    # Small files and quick checkpoints, so that kills fall into all that a bookie does.
    settings = {"zkTimeout": 1000, "journalMaxSizeMB": 1, "logSizeLimit": 512 * 1024, "flushInterval": 150}
    own = own_cluster(STORAGES, settings)
    uri = own.metadata_uri
    start_all(own.bookies)
    with open_cluster(uri) as cluster:
        with (tmp_path / "java.log").open("w") as errors:
            program = java.start("SteadyWriter", uri, chance.choice(["v2", "v3"]), 200, 10, 40, stderr=errors)
        answers: list[dict[str, Any]] = []
        listener = threading.Thread(target=lambda: answers.extend(map(json.loads, program.stdout or ())))
        listener.start()
        writers = OurWriters(cluster, {0: DigestType.HMAC, 7: DigestType.CRC32C, (1 << 64) - 1: DigestType.CRC32})
        try:
            wait_for(lambda: answers, "the Java writer's first ledger")
            for _ in range(kills):
                time.sleep(chance.uniform(0.05, 0.6))
                print(kill_at_random(own.bookies, chance))
            wait_for(lambda: all(each > 100 for each in acknowledged(writers.ledgers, answers)), "enough entries")
        finally:
            written = writers.end()
            assert program.stdin is not None
            program.stdin.close()
            listener.join(240)
            java.end(program)
        assert program.returncode == 0, (tmp_path / "java.log").read_text()[-4000:]
        check_everything(cluster, written, answers)
        stop_all(own.bookies)
        start_all(own.bookies)
        check_everything(cluster, written, answers)
    asked = [answer for answer in answers if answer["acknowledged"]][-20:]
    for answer, found in zip(asked, read_ledgers(java, uri, "v3", asked), strict=True):
        assert found["state"] == "CLOSED"
        assert len(found["entries"]) >= answer["acknowledged"]
        for entry in found["entries"]:
            data = payload_of(answer["ledgerId"], entry["entryId"])
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()


def acknowledged(written: list[Written], answers: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Return the number of acknowledged entries: to us in scopes, to us in scope 0, to Java."""
    return (
        sum(one.acknowledged for one in written if one.ledger.is_scoped),
        sum(one.acknowledged for one in written if not one.ledger.is_scoped),
        sum(answer["acknowledged"] for answer in answers),
    )


def check_everything(cluster: Cluster, written: list[Written], answers: list[dict[str, Any]]) -> None:
    """Every acknowledged entry is on each of its bookies, whole and as written; recovery ends no ledger before it."""
    assert min(acknowledged(written, answers)) > 100
    theirs = [
        Written(LedgerId(0, int(answer["ledgerId"])), answer["acknowledged"], answer["closed"]) for answer in answers
    ]

    async def body() -> None:
        async with BookKeeper(cluster) as client:
            for one in written + theirs:
                ledger = one.ledger
                plain = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"steady")
                if one.closed:
                    assert plain.last_add_confirmed + 1 == one.acknowledged
                reader = await client.open_ledger(
                    ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"steady", recovery=True
                )
                assert reader.last_add_confirmed + 1 >= one.acknowledged, f"{one} lost entries"
                if reader.last_add_confirmed < 0:
                    continue
                await check_replicas(reader)
                name = ledger.ledger_id if one in theirs else ledger.qualified_name
                async for entry in reader.read(0, reader.last_add_confirmed):
                    assert entry.payload == payload_of(name, entry.entry_id), f"{ledger} entry {entry.entry_id}"

    scenario(body(), 600)
