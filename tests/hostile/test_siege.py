"""Three bookies, one of each storage class, among hostile clients, while Apache's Java client writes to them.

They serve it to the end, in bounded memory and with a bounded log, and after SIGKILL have every acknowledged entry.
BKCTL_TEST_LONG=1: 200,000 frames and 50,000 HTTP requests for each storage class, in two runs (http, https), instead of
10,000 and 1,000; BKCTL_TEST_SEED repeats a run, `-s` shows its figures.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.clients import Siege, client_context
from support.long_runs import IS_LONG
from support.own_bookies import OwnBookie
from support.raw_http import http_port
from support.servers import DB, INTERLEAVED, SORTED, Java, ZooKeeperServer, format_cluster, wait_for
from support.waiting import LIMIT_S

from bkctl.formats.entry import DigestManager
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import ReadRequest, Status

#: For each storage class, in each of the two runs.
FRAMES, REQUESTS, SLOW = (100_000, 25_000, 2000) if IS_LONG else (5000, 500, 60)
STORAGES = (SORTED, INTERLEAVED, DB)
MEBIBYTE = 1 << 20
TOKEN = "only-for-friends"
CONNECTIONS_MAX = 150
SETTINGS: dict[str, object] = {
    "journalMaxMemorySizeMb": 16,
    "unfinishedRequestsMaxMemorySizeMb": 16,
    "skipListSizeLimit": 4 * MEBIBYTE,
    "dbStorage_writeCacheMaxSizeMb": 8,
    "dbStorage_readAheadCacheMaxSizeMb": 8,
    "journalMaxSizeMB": 16,
    "logSizeLimit": 16 * MEBIBYTE,
    "flushInterval": 200,
    "gcWaitTime": 3000,
    "serverMaxConnections": CONNECTIONS_MAX,
    "serverFirstRequestTimeoutMs": 3000,
    "serverRequestTimeoutMs": 3000,
    "serverTlsHandshakeTimeoutMs": 2000,
    "httpServerEnabled": "true",
    "httpServerHost": "127.0.0.1",
    "httpServerPort": 0,
    "httpServerToken": TOKEN,
}
#: More than it had before the first hostile client: requests in flight, twice over while they are written; unfinished
#: requests; caches; buffers of connections with TLS (two of 256 KiB each), of the clients that may be; databases.
GROWTH_BYTES_MAX = (2 * 16 + 16 + 2 * 16 + CONNECTIONS_MAX // 2 + 40) * MEBIBYTE
LOG_BYTES_MAX = (2048 if IS_LONG else 256) * 1024
READS_AT_ONCE = 200


def memory_bytes(bookie: OwnBookie, name: str) -> int:
    """`VmRSS`, what it has now, or `VmHWM`, the most that it had."""
    for line in Path(f"/proc/{bookie.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def payload_of(ledger_id: str, entry_id: int) -> bytes:
    """The entries that SteadyWriter.java writes."""
    word = f"{ledger_id} {entry_id} ".encode()
    size = 1 + entry_id * 37 % 1500
    return (word * (size // len(word) + 1))[:size]


class Writer:
    """SteadyWriter.java beside the test; `ledgers` are what it printed."""

    def __init__(self, java: Java, uri: str, protocol: str, log: Path) -> None:
        self._java, self._log = java, log
        with log.open("w") as errors:
            self._program = java.start("SteadyWriter", uri, protocol, 60, 10, 40, stderr=errors)
        self.ledgers: list[dict[str, Any]] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        for line in self._program.stdout or ():
            self.ledgers.append(json.loads(line))

    def end(self) -> None:
        assert self._program.stdin is not None
        self._program.stdin.close()
        self._listener.join(240)
        self._java.end(self._program)
        assert self._program.returncode == 0, self._log.read_text()[-4000:]


async def check_entries(cluster: Cluster, bookies: dict[str, OwnBookie], answers: list[dict[str, Any]]) -> int:
    """Each acknowledged entry is on each bookie of its ensemble; returns how many there are."""
    connections = {
        name: await BookieConnection.open(*bookie.address, bookie_id=name) for name, bookie in bookies.items()
    }
    checked = 0
    for answer in answers:
        ledger = LedgerId(0, int(answer["ledgerId"]))
        metadata = cluster.ledgers.read(ledger).metadata
        assert metadata.digest_type is not None
        assert metadata.password is not None
        by = DigestManager(ledger, metadata.digest_type, metadata.password)
        asked = [
            (name, entry_id)
            for entry_id in range(answer["acknowledged"])
            for name in [each for each in metadata.ensembles if each.first_entry_id <= entry_id][-1].bookies
        ]
        for start in range(0, len(asked), READS_AT_ONCE):
            part = asked[start : start + READS_AT_ONCE]
            read = await asyncio.gather(*(connections[name].send(ReadRequest(ledger, each)) for name, each in part))
            for (name, entry_id), response in zip(part, read, strict=True):
                where = f"ledger {ledger} entry {entry_id} on {name} ({bookies[name].settings['ledgerStorageClass']})"
                assert response.status is Status.EOK, f"{where}: {response.status.name}"
                found = bytes(by.open(bytes(response.body), entry_id).payload)  # type: ignore[union-attr]
                assert found == payload_of(answer["ledgerId"], entry_id), where
                checked += 1
    for connection in connections.values():
        connection.close()
    return checked


def status_over_http(scheme: str, port: int) -> int:
    """Return the status of a sound request with the token. Of the hostile requests, none may happen to get 200."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/api/v1/bookie/state", headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S, context=client_context()) as answer:
        return int(answer.status)


def start_all(bookies: list[OwnBookie]) -> None:
    for each in bookies:
        each.launch()
    for each in bookies:
        each.wait_ready()


@pytest.mark.java
@pytest.mark.timeout(5400 if IS_LONG else 1800)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(("scheme", "protocol"), [("http", "v3"), ("https", "v2")], ids=["http", "https"])
def test_bookies_under_siege_serve_and_lose_nothing(
    own_bookie: Callable[..., OwnBookie], zookeeper: ZooKeeperServer, java: Java, pem: Path, tmp_path: Path,
    scheme: str, protocol: str,
) -> None:  # fmt: skip
    seed = int(os.environ.get("BKCTL_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
    print(f"BKCTL_TEST_SEED={seed}")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    tls = {
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory", "tlsKeyStoreType": "PEM",
        "tlsKeyStore": pem, "tlsCertificatePath": pem, "httpServerTlsEnable": str(scheme == "https").lower(),
        "httpServerKeyStorePath": pem,
    }  # fmt: skip
    started = [own_bookie(uri, storage=storage, settings=SETTINGS | tls) for storage in STORAGES]
    start_all(started)
    bookies = {each.bookie_id: each for each in started}
    processes = [each.pid for each in started]
    sieges = [
        Siege(seed + number, each.port, http_port(each), is_https=scheme == "https", token=TOKEN)
        for number, each in enumerate(started)
    ]
    writer = Writer(java, uri, protocol, tmp_path / "java.log")
    try:
        wait_for(lambda: len(writer.ledgers) >= 3, "the Java client's first ledgers")
        before = [memory_bytes(each, "VmRSS") for each in started]
        logged = [each.log.stat().st_size for each in started]

        async def besiege() -> None:
            await asyncio.gather(*(each.run(FRAMES, REQUESTS, SLOW) for each in sieges))

        asyncio.run(besiege())
        assert [status_over_http(scheme, http_port(each)) for each in started] == [200, 200, 200]
        count = len(writer.ledgers)
        wait_for(lambda: len(writer.ledgers) >= count + 3, "ledgers of the Java client after the siege")
        served = list(writer.ledgers)
        assert [each.pid for each in started if each.running] == processes
        grown = [memory_bytes(each, "VmHWM") - size for each, size in zip(started, before, strict=True)]
        for each in started:
            each.kill()
    finally:
        writer.end()
    kinds: Counter[str] = sum((each.made.kinds for each in sieges), Counter())
    print(f"{scheme}: {[(each.frames, each.requests, each.slow) for each in sieges]} {dict(kinds)}")
    print(f"answers: {[dict(each.heard) for each in sieges]}")
    assert all(each.heard["frames"] and each.heard["HTTP 401"] for each in sieges)
    print(f"memory +{[size // MEBIBYTE for size in grown]} MiB, at most {GROWTH_BYTES_MAX // MEBIBYTE}")
    for each, size in zip(started, logged, strict=True):
        text = each.log.read_text(errors="replace")
        print(f"{each.settings['ledgerStorageClass']}: {len(text) - size} bytes of log")
        assert "Traceback" not in text, text[max(0, text.index("Traceback") - 500) :][:3000]
        assert len(text) - size < LOG_BYTES_MAX, text[-3000:]
    assert max(grown) < GROWTH_BYTES_MAX, grown
    failed = [each for each in served if each["code"] != 0]
    assert not failed, failed

    start_all(started)
    with open_cluster(uri) as cluster:
        checked = asyncio.run(asyncio.wait_for(check_entries(cluster, bookies, writer.ledgers), 3600))
    print(f"{checked} replicas of {sum(each['acknowledged'] for each in writer.ledgers)} acknowledged entries checked")
    assert checked > 100
