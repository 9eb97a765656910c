"""Directories with plain and scoped ledgers: Apache's bookie of the same class runs on them for a while, then ours."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.own_bookies import OwnBookie
from support.own_cluster import STORAGES, OwnCluster, start_all, stop_all
from support.servers import ApacheBookie, Java, free_port, read_ledgers, wait_for
from support.waiting import LIMIT_S

from bkctl.client.ledger import BookKeeper
from bkctl.client.verify import verify_entries
from bkctl.files.directories import BookieDirectories
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import DigestType
from bkctl.formats.journal import VERSION_SCOPED
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

COUNT = 50
SIZE_BYTES = 1500
PASSWORD = b"sleeping"
SETTINGS = {"zkTimeout": 4000, "logSizeLimit": 256 * 1024, "gcWaitTime": 3000}
COLLECTIONS = 3


def payload_of(ledger: LedgerId, entry_id: int) -> bytes:
    word = f"{ledger.qualified_name} {entry_id} ".encode()
    return (word * (SIZE_BYTES // len(word) + 1))[: SIZE_BYTES - entry_id]


@dataclass
class Ledgers:
    """Ledgers with all their replicas on every bookie of a cluster; what was acknowledged of each."""

    uri: str
    acknowledged: dict[LedgerId, int] = field(default_factory=dict)
    closed: set[LedgerId] = field(default_factory=set)

    def _with_client(self, body: Callable[[BookKeeper], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            with open_cluster(self.uri) as cluster:
                async with BookKeeper(cluster) as client:
                    await asyncio.wait_for(body(client), 300)

        asyncio.run(run())

    def write(self, *ledgers: LedgerId) -> None:
        """Write them side by side; every third one stays open."""

        async def one(client: BookKeeper, ledger: LedgerId) -> None:
            handle = await client.create_ledger_adv(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, digest_type=digest_type_of(ledger),
                password=PASSWORD, ensemble_size=3, write_quorum_size=3, ack_quorum_size=3,
            )  # fmt: skip
            for entry_id in range(COUNT):
                await handle.add(payload_of(ledger, entry_id))
                self.acknowledged[ledger] = entry_id + 1
            if ledger.ledger_id % 3:
                await handle.close()
                self.closed.add(ledger)

        async def body(client: BookKeeper) -> None:
            await asyncio.gather(*(one(client, ledger) for ledger in ledgers))

        self._with_client(body)

    def delete(self, *ledgers: LedgerId) -> None:
        with open_cluster(self.uri) as cluster:
            for ledger in ledgers:
                cluster.ledgers.remove(ledger)
                del self.acknowledged[ledger]

    def check(self, *, recover: bool = False) -> None:
        """Each bookie has every acknowledged entry of every ledger, whole and as it was written."""

        async def body(client: BookKeeper) -> None:
            for ledger, count in self.acknowledged.items():
                reader = await client.open_ledger(
                    ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=PASSWORD, recovery=recover
                )
                is_closed = recover or ledger in self.closed
                # An open ledger's last entry is confirmed by nothing but its recovery.
                assert reader.last_add_confirmed == (count - 1 if is_closed else count - 2), ledger
                async for check in verify_entries(reader):
                    assert check.ok, (ledger, check)
                async for entry in reader.read(0, reader.last_add_confirmed):
                    assert entry.payload == payload_of(ledger, entry.entry_id), (ledger, entry.entry_id)
                if recover:
                    self.closed.add(ledger)

        self._with_client(body)

    def check_by_java(self, java: Java) -> None:
        """Apache's client reads every entry of scope 0."""
        plain = {each: count for each, count in self.acknowledged.items() if not each.is_scoped}
        asked = [
            {
                "ledgerId": each.ledger_id,
                "digestType": digest_type_of(each).name,
                "password": base64.b64encode(PASSWORD).decode(),
            }
            for each in plain
        ]
        for (ledger, count), found in zip(plain.items(), read_ledgers(java, self.uri, "v3", asked), strict=True):
            expected = [hashlib.sha256(payload_of(ledger, entry_id)).hexdigest() for entry_id in range(count)]
            if ledger not in self.closed:
                expected.pop()
            assert [entry["sha256"] for entry in found["entries"]] == expected, ledger


def digest_type_of(ledger: LedgerId) -> DigestType:
    return list(DigestType)[(ledger.ledger_id + ledger.ledger_id // 4) % len(DigestType)]


def scoped_files(bookie: OwnBookie) -> dict[str, str]:
    """Every file of scoped ledgers: entry logs, indexes and journals, with its hash."""
    found = {}
    for root in (bookie.journal_dir / "current", bookie.ledger_dir / "current"):
        for path in sorted(root.rglob("*")):
            parts = path.relative_to(root).parts
            is_scoped = parts[0] in ("scoped", "scoped-ledgers", "scoped-locations")
            is_scoped |= path.suffix == ".idx" and len(parts) == 4
            is_scoped |= path.suffix == ".txn" and version_of(path) == VERSION_SCOPED
            if is_scoped and path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def version_of(journal: Path) -> int:
    with JournalReader.open(journal) as reader:
        return reader.version


def plain_logs(bookie: OwnBookie) -> set[str]:
    return {path.name for path in (bookie.ledger_dir / "current").glob("*.log")}


class Collector:
    """Apache's REST API of one bookie: makes it collect and compact."""

    def __init__(self, bookie: ApacheBookie) -> None:
        self._url = f"http://127.0.0.1:{bookie.settings['httpServerPort']}/api/v1/bookie/gc"

    def _ask(self, method: str, body: bytes | None = None) -> str:
        request = urllib.request.Request(self._url, body, method=method)
        with contextlib.closing(urllib.request.urlopen(request, timeout=LIMIT_S)) as answer:
            return str(answer.read().decode())

    def begin(self) -> None:
        assert "Triggered GC" in self._ask("PUT", json.dumps({"forceMajor": True}).encode())

    def is_over(self) -> bool:
        answer = self._ask("GET")
        assert "is_in_force_gc" in answer
        return "false" in answer


@pytest.fixture
def ours(own_cluster: Callable[..., OwnCluster]) -> OwnCluster:
    """Three of our bookies, up."""
    cluster = own_cluster(STORAGES, SETTINGS)
    start_all(cluster.bookies)
    return cluster


@pytest.fixture
def theirs(ours: OwnCluster, apache_bookie: Callable[..., ApacheBookie]) -> list[ApacheBookie]:
    """Apache's bookies for the directories of ours, not started."""
    http = {
        "httpServerEnabled": "true",
        "httpServerHost": "127.0.0.1",
        "httpServerClass": "org.apache.bookkeeper.http.vertx.VertxHttpServer",
    }
    return [
        apache_bookie(
            ours.metadata_uri, str(bookie.settings["ledgerStorageClass"]), port=bookie.port,
            settings=bookie.settings | http | {"httpServerPort": free_port()},
        )
        for bookie in ours.bookies
    ]  # fmt: skip


def wait_for_nobody(uri: str) -> None:
    with open_cluster(uri) as cluster:
        wait_for(lambda: not cluster.bookies.list(include_down=False), "the sessions of all bookies over")


@pytest.mark.releases
def test_scoped_ledgers_sleep_through_apaches_collections_and_nothing_touches_them_after_a_crash(
    ours: OwnCluster, theirs: list[ApacheBookie], java: Java
) -> None:
    ledgers = Ledgers(ours.metadata_uri)
    plain = [LedgerId(0, each) for each in range(1, 25)]
    scoped = [LedgerId(scope_id, each) for scope_id in (1, (1 << 64) - 1) for each in (1, 3)]
    ledgers.write(*plain, *scoped)
    stop_all(ours.bookies)

    asleep = [scoped_files(bookie) for bookie in ours.bookies]
    written = [plain_logs(bookie) for bookie in ours.bookies]
    for files, logs, storage in zip(asleep, written, STORAGES, strict=True):
        assert len(logs) >= 4
        assert any("/scoped/" in name and name.endswith(".log") for name in files), storage
        assert any(name.endswith(".txn") for name in files), storage
        assert any("-locations/" in name or name.endswith(".idx") for name in files), storage

    start_all(theirs)
    collectors = [Collector(bookie) for bookie in theirs]
    for number in range(COLLECTIONS):
        # With entries in order and by ledger alike, each log loses some, and keeps some.
        ledgers.delete(*plain[number::4])
        for collector in collectors:
            collector.begin()
        for collector in collectors:
            wait_for(collector.is_over, "the end of a forced collection")
        ledgers.check_by_java(java)
        if not number:
            ledgers.write(LedgerId(0, 101))
    stop_all(theirs)
    # They did not just disappear, but were written anew.
    for bookie, logs in zip(ours.bookies, written, strict=True):
        assert len(logs & plain_logs(bookie)) <= 1, bookie.settings["ledgerStorageClass"]
    assert [scoped_files(bookie) for bookie in ours.bookies] == asleep

    start_all(ours.bookies)
    ledgers.check()
    ledgers.write(LedgerId(0, 102), LedgerId(0, 103), LedgerId(1, 102), LedgerId(1, 103))
    for bookie in ours.bookies:
        bookie.kill()

    crashed = [scoped_files(bookie) for bookie in ours.bookies]
    assert all(
        VERSION_SCOPED in {version_of(each.path) for each in BookieDirectories([bookie.journal_dir]).journals()}
        for bookie in ours.bookies
    )
    wait_for_nobody(ours.metadata_uri)
    sizes = [bookie.log.stat().st_size for bookie in theirs]
    for bookie in theirs:
        bookie.launch()
    for bookie, size in zip(theirs, sizes, strict=True):
        wait_for(
            lambda bookie=bookie, size=size: "Invalid journal version" in bookie.log_tail(size, 1 << 20),
            "Apache's bookie refuses the journal",
        )
    with open_cluster(ours.metadata_uri) as cluster:
        assert {each.state for each in cluster.bookies.list()} == {"down"}
    for bookie in theirs:
        bookie.kill()
    assert [scoped_files(bookie) for bookie in ours.bookies] == crashed

    start_all(ours.bookies)
    ledgers.check()
    ledgers.check(recover=True)
    ledgers.check_by_java(java)
