"""Mutated frames to a real port: they harm neither the bookie nor who is served beside them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.mutation import mutated
from support.waiting import LIMIT_S

from bkctl.bookie.bookie import Bookie
from bkctl.config import BookieConfig
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.protocol import v2, v3
from bkctl.protocol.connection import BookieConnection, run
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    AuthMessage,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    Protocol,
    ReadLacRequest,
    ReadRequest,
    Request,
    StartTlsRequest,
    Status,
    WriteLacRequest,
)

PLAIN, SCOPED, GOOD = LedgerId(0, 5), LedgerId(7, 5), LedgerId(7, 1)
#: The whole run, which ends earlier with CASES_MAX.
DURATION_S = 10.0
CASES_MAX = 4000
#: A buffer kept for each connection would pass this.
RSS_GROWTH_BYTES_MAX = 60 << 20


def by(ledger: LedgerId) -> DigestManager:
    return DigestManager(ledger, DigestType.CRC32C, b"secret")


def add(ledger: LedgerId, entry_id: int, **changes: Any) -> AddRequest:
    body = by(ledger).seal(entry_id, entry_id - 1, 100, bytes(100)) + bytes(100)
    return AddRequest(ledger, entry_id, by(ledger).master_key, body)._replace(**changes)


def requests(ledger: LedgerId) -> list[Request]:
    key = by(ledger).master_key
    return [
        add(ledger, 1),
        add(ledger, 2, recovery_add=True, high_priority=True),
        add(ledger, 3, deferred_sync=True),
        ReadRequest(ledger, 0),
        ReadRequest(ledger, LAST_ENTRY, key, fence=True),
        ReadRequest(ledger, LAST_ENTRY, previous_lac=0, timeout_ms=50, piggyback=True),
        WriteLacRequest(ledger, 1, key, by(ledger).seal_lac(1)),
        ReadLacRequest(ledger),
        ForceLedgerRequest(ledger),
        ListEntriesRequest(ledger),
        BookieInfoRequest(3),
        AuthMessage("AuthDisabledPlugin", b"token"),
        StartTlsRequest(),
    ]


def seeds() -> list[bytes]:
    """A frame of each kind, of both protocols."""
    frames = []
    for number, request in enumerate([*requests(PLAIN), *requests(SCOPED)]):
        out: list[Any] = []
        v3.encode_request(number, request, out)
        frames.append(b"".join(map(bytes, out)))
    key = by(PLAIN).master_key
    plain = [request for request in requests(PLAIN) if isinstance(request, AuthMessage)]
    plain += [add(PLAIN, 1), add(PLAIN, 2, recovery_add=True), ReadRequest(PLAIN, 0)]
    plain += [ReadRequest(PLAIN, LAST_ENTRY, key, fence=True), BatchReadRequest(PLAIN, 0, 1, 100, 1 << 20)]
    plain += [BatchReadRequest(PLAIN, 0, 1, -1, -1, key, fence=True)]
    for request in plain:
        out = []
        v2.encode_request(request, out)
        frames.append(b"".join(map(bytes, out)))
    return frames


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


async def attack(port: int, frames: list[bytes], chance: random.Random) -> None:
    """One client's connection: some frames, cut anywhere, and whatever comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = chance.choice((1, 1, 2, 5, 20))
    data = b"".join(mutated(chance.choice(frames), lambda: chance.choice(frames), chance) for _ in range(count))
    with contextlib.suppress(OSError, RuntimeError):  # uvloop says so when the bookie closed it
        while data:
            size = chance.choice((len(data), 1 + chance.randrange(len(data))))
            writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            async with asyncio.timeout(0.02):
                await reader.read(1 << 16)
    if chance.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(("seed", "has_tls"), [(1, False), (2, True)])
def test_mutated_frames_harm_no_ledger(
    tmp_path: Path, cluster: Cluster, pem: Path, seed: int, has_tls: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = BookieConfig(
        bookie_port=0,
        advertised_address="127.0.0.1",
        allow_loopback=True,
        journal_directories=(str(tmp_path / "journal"),),
        ledger_directories=(str(tmp_path / "ledgers"),),
        journal_pre_alloc_size_mb=1,
        disk_usage_threshold=1.0,
        tls_provider_factory_class="org.apache.bookkeeper.tls.TLSContextFactory" if has_tls else None,
        tls_key_store_type="PEM",
        tls_key_store=str(pem),
        tls_certificate_path=str(pem),
    )
    chance = random.Random(seed)
    frames = seeds()
    wrong: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        bookie = Bookie(config, cluster=cluster)
        await bookie.start()
        try:
            await under_attack(bookie)
        finally:
            await bookie.stop()
        assert bookie.failure is None

    async def under_attack(bookie: Bookie) -> None:
        port = bookie.address[1]
        v3_client = await BookieConnection.open(*bookie.address, bookie_id="b")
        v2_client = await BookieConnection.open(*bookie.address, bookie_id="b", protocol=Protocol.V2)
        assert await v3_client.supports_scopes()
        for ledger in (PLAIN, SCOPED):
            assert (await v3_client.send(add(ledger, 0))).status is Status.EOK
        end = time.monotonic() + DURATION_S / 2
        before = good = cases = 0
        while cases < CASES_MAX and time.monotonic() < end:
            attacks = [attack(port, frames, chance) for _ in range(16)]
            answers = await asyncio.gather(
                v3_client.send(add(GOOD, good)),
                v2_client.send(add(LedgerId(0, 99), good)),
                *attacks,
                return_exceptions=True,
            )
            assert [each.status for each in answers[:2]] == [Status.EOK] * 2, answers[:2]  # type: ignore[union-attr]
            unexpected = [each for each in answers[2:] if isinstance(each, Exception)]
            assert all(isinstance(each, TimeoutError | OSError) for each in unexpected), unexpected
            good += 1
            cases += len(attacks)
            if good == 30:
                gc.collect()
                before = resident_bytes()
        for entry_id in range(good):
            read = await v3_client.send(ReadRequest(GOOD, entry_id))
            assert read.body == add(GOOD, entry_id).body  # type: ignore[union-attr]
        gc.collect()
        assert not before or resident_bytes() - before < RSS_GROWTH_BYTES_MAX
        async with asyncio.timeout(LIMIT_S):
            while len(bookie.server.connections) > 2 or bookie.server.in_flight.bytes:
                await asyncio.sleep(0.01)  # long polls too are over
        v3_client.close()
        v2_client.close()
        await bookie.checkpoint()
        assert bookie.failure is None

    with caplog.at_level(logging.INFO):
        run(main())
    assert not wrong
    told = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert not told, [record.getMessage() for record in told]
