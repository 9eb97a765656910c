"""Our client's end against Apache's bookies, one of each storage class."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from support.servers import DB, INTERLEAVED, SORTED, ApacheBookie, ApacheCluster, ZooKeeperServer, format_cluster

from bkctl.errors import BookieUnavailable, TimedOut
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId, random_u64
from bkctl.protocol import v3
from bkctl.protocol.connection import BookieConnection, run
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoFlags,
    BookieInfoRequest,
    BookieInfoResponse,
    BytesLike,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    Protocol,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)

pytestmark = pytest.mark.java

STORAGES = [SORTED, INTERLEAVED, DB]


class Ledger:
    """A ledger that only the bookie knows: the wire needs no metadata."""

    def __init__(self) -> None:
        self.id = LedgerId(0, 1 << 40 | random_u64() >> 26)
        self.digest = DigestManager(self.id, DigestType.CRC32C, b"secret")
        self.key = self.digest.master_key

    def entry(self, entry_id: int, size: int = 100) -> tuple[bytes, bytes]:
        payload = bytes((entry_id % 256,)) * size
        return self.digest.seal(entry_id, entry_id - 1, (entry_id + 1) * size, payload), payload

    def add(self, entry_id: int, size: int = 100, **flags: bool) -> AddRequest:
        return AddRequest(self.id, entry_id, self.key, self.entry(entry_id, size), **flags)

    def payload(self, body: BytesLike | None, entry_id: int | None) -> bytes:
        assert body is not None
        return bytes(self.digest.open(body, entry_id).payload)


async def opened(
    bookie: ApacheBookie, protocol: Protocol, tls: ssl.SSLContext | None = None, timeout_s: float = 60.0
) -> BookieConnection:
    return await BookieConnection.open(
        "127.0.0.1", bookie.port, bookie_id=bookie.bookie_id, protocol=protocol, tls=tls, timeout_s=timeout_s
    )


async def closed(connection: BookieConnection) -> None:
    connection.close()
    await connection.wait_closed()


async def write_and_read(connection: BookieConnection, ledger: Ledger) -> None:
    sizes = [0, 1, 100, 1024, 100_000, 1_000_000]
    adds = [connection.send(ledger.add(entry_id, size)) for entry_id, size in enumerate(sizes)]
    assert await asyncio.gather(*adds) == [AddResponse(Status.EOK, ledger.id, n) for n in range(len(sizes))]
    reads = [connection.send(ReadRequest(ledger.id, entry_id)) for entry_id in range(len(sizes))]
    for entry_id, answer in enumerate(await asyncio.gather(*reads)):
        assert isinstance(answer, ReadResponse)
        assert answer[:3] == (Status.EOK, ledger.id, entry_id)
        assert ledger.payload(answer.body, entry_id) == ledger.entry(entry_id, sizes[entry_id])[1]
    last = await connection.send(ReadRequest(ledger.id, -1))
    assert isinstance(last, ReadResponse)
    assert last.entry_id == -1
    assert ledger.payload(last.body, None) == ledger.entry(5, 1_000_000)[1]
    assert await connection.send(ReadRequest(ledger.id, 6)) == ReadResponse(Status.ENOENTRY, ledger.id, 6)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("protocol", Protocol)
def test_adds_and_reads(apache_cluster: ApacheCluster, storage: str, protocol: Protocol) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), protocol)
        await write_and_read(connection, Ledger())
        nowhere = await connection.send(ReadRequest(Ledger().id, 0))
        assert nowhere.status is Status.ENOLEDGER
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("protocol", Protocol)
def test_fencing(apache_cluster: ApacheCluster, storage: str, protocol: Protocol) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), protocol)
        ledger = Ledger()
        await connection.send(ledger.add(0))
        wrong = await connection.send(ReadRequest(ledger.id, -1, bytes(20), fence=True))
        assert wrong.status is Status.EUA
        fenced = await connection.send(ReadRequest(ledger.id, -1, ledger.key, fence=True))
        assert isinstance(fenced, ReadResponse)
        assert ledger.payload(fenced.body, 0) == ledger.entry(0)[1]
        assert await connection.send(ledger.add(1)) == AddResponse(Status.EFENCED, ledger.id, 1)
        recovered = await connection.send(ledger.add(1, recovery_add=True, high_priority=True))
        assert recovered == AddResponse(Status.EOK, ledger.id, 1)
        read = await connection.send(ReadRequest(ledger.id, 1, ledger.key, fence=True, high_priority=True))
        assert isinstance(read, ReadResponse)
        assert ledger.payload(read.body, 1) == ledger.entry(1)[1]
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_the_operations_of_v3_only(apache_cluster: ApacheCluster, storage: str) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), Protocol.V3)
        ledger = Ledger()
        nothing = await connection.send(ReadLacRequest(ledger.id))
        assert nothing == ReadLacResponse(Status.ENOENTRY, ledger.id)
        for entry_id in range(3):
            await connection.send(ledger.add(entry_id, deferred_sync=entry_id == 2))
        assert await connection.send(ForceLedgerRequest(ledger.id)) == ForceLedgerResponse(Status.EOK, ledger.id)
        packet = ledger.digest.seal_lac(2)
        written = await connection.send(WriteLacRequest(ledger.id, 2, ledger.key, packet))
        assert written == WriteLacResponse(Status.EOK, ledger.id)
        lac = await connection.send(ReadLacRequest(ledger.id))
        assert isinstance(lac, ReadLacResponse)
        assert (lac.status, lac.lac_body) == (Status.EOK, packet)
        assert ledger.payload(lac.last_entry_body, 2) == ledger.entry(2)[1]
        both = BookieInfoFlags.TOTAL_DISK_CAPACITY | BookieInfoFlags.FREE_DISK_SPACE
        info = await connection.send(BookieInfoRequest(both))
        assert isinstance(info, BookieInfoResponse)
        assert info.total_disk_capacity is not None
        assert info.free_disk_space is not None
        assert 0 < info.free_disk_space < info.total_disk_capacity
        free = await connection.send(BookieInfoRequest(BookieInfoFlags.FREE_DISK_SPACE))
        assert isinstance(free, BookieInfoResponse)
        assert free.total_disk_capacity is None
        disabled = AuthResponse(Status.EOK, "AuthDisabledPlugin", b"")
        assert await connection.send(AuthMessage("sasl", b"token")) == disabled
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_a_long_poll_ends_with_the_next_entry(apache_cluster: ApacheCluster, storage: str) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), Protocol.V3)
        ledger = Ledger()
        for entry_id in range(2):
            await connection.send(ledger.add(entry_id))
        poll = connection.send(ReadRequest(ledger.id, -1, previous_lac=0, timeout_ms=60_000, piggyback=True))
        await asyncio.sleep(0.2)
        assert not poll.done()
        await connection.send(ledger.add(2))
        answer = await poll
        assert isinstance(answer, ReadResponse)
        assert (answer.status, answer.entry_id, answer.max_lac) == (Status.EOK, 1, 1)
        assert answer.lac_update_timestamp_ms is not None
        assert ledger.payload(answer.body, 1) == ledger.entry(1)[1]
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_the_list_of_entries(apache_cluster: ApacheCluster, storage: str) -> None:
    async def main() -> None:
        bookie = apache_cluster.bookie(storage)
        connection = await opened(bookie, Protocol.V3)
        ledger = Ledger()
        for entry_id in (0, 1, 2, 5):
            await connection.send(ledger.add(entry_id))
        if storage == DB:  # it gives no answer at all
            asking = await opened(bookie, Protocol.V3, timeout_s=5)
            with pytest.raises(TimedOut):
                await asking.send(ListEntriesRequest(ledger.id))
            await closed(asking)
        else:
            asked = connection.send(ListEntriesRequest(ledger.id))
            listed = await asked
            assert isinstance(listed, ListEntriesResponse)
            assert listed.availability is not None
            assert bytes(listed.availability[:8]) == (2).to_bytes(8, "big")
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_batch_reads(apache_cluster: ApacheCluster, storage: str) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), Protocol.V2)
        ledger = Ledger()
        for entry_id in range(10):
            await connection.send(ledger.add(entry_id))
        try:
            answer = await connection.send(BatchReadRequest(ledger.id, 2, 77, 5, 1 << 20))
        except BookieUnavailable:
            pytest.skip("this release has no batch reads")
        assert isinstance(answer, BatchReadResponse)
        assert answer[:4] == (Status.EOK, ledger.id, 2, 77)
        assert [ledger.payload(body, 2 + n) for n, body in enumerate(answer.bodies)] == [
            ledger.entry(entry_id)[1] for entry_id in range(2, 7)
        ]
        beyond = await connection.send(BatchReadRequest(ledger.id, 99, 78, 5, 1 << 20))
        assert beyond == BatchReadResponse(Status.ENOENTRY, ledger.id, 99, 78)
        await closed(connection)

    run(main())


@pytest.mark.parametrize("storage", STORAGES)
def test_apaches_bookies_cannot_serve_scopes_and_hear_of_none(apache_cluster: ApacheCluster, storage: str) -> None:
    async def main() -> None:
        connection = await opened(apache_cluster.bookie(storage), Protocol.V3)
        ledger = Ledger()
        await connection.send(ledger.add(0))
        assert not await connection.supports_scopes()
        scoped = LedgerId(7, ledger.id.ledger_id)
        with pytest.raises(BookieUnavailable, match="cannot serve scopes"):
            await connection.send(ReadRequest(scoped, -1, ledger.key, fence=True))
        assert (await connection.send(ledger.add(1))).status is Status.EOK
        await closed(connection)

    run(main())


@pytest.mark.compiled
def test_apaches_plain_answers_are_taken_in_runs(
    apache_cluster: ApacheCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow: list[bytes] = []
    decode = v3.decode_response

    def counted(buffer: memoryview, at: int, end: int) -> object:
        slow.append(bytes(buffer[at:end]))
        return decode(buffer, at, end)

    monkeypatch.setattr(v3, "decode_response", counted)

    async def main() -> None:
        connection = await opened(apache_cluster.bookie(SORTED), Protocol.V3)
        ledger = Ledger()
        for entry_id in range(3):
            await connection.send(ledger.add(entry_id))
        for entry_id in range(1, 3):
            await connection.send(ReadRequest(ledger.id, entry_id))
        assert slow == []
        await connection.send(ReadRequest(ledger.id, 99))
        assert len(slow) == 1
        await closed(connection)

    run(main())


@pytest.mark.parametrize("protocol", Protocol)
def test_tls(
    apache_bookie: Callable[..., ApacheBookie],
    zookeeper: ZooKeeperServer,
    tmp_path: Path,
    pem: Path,
    protocol: Protocol,
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    settings = {
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
        "tlsProvider": "JDK",
        "tlsKeyStoreType": "PEM",
        "tlsKeyStore": pem,
        "tlsCertificatePath": pem,
    }
    bookie = apache_bookie(uri, SORTED, settings=settings)
    format_cluster(bookie.java, uri, tmp_path)
    bookie.start()

    async def main() -> None:
        connection = await opened(bookie, protocol, ssl.create_default_context(cafile=pem))
        await write_and_read(connection, Ledger())
        await closed(connection)
        with pytest.raises(BookieUnavailable, match="do not agree on TLS"):
            await opened(bookie, protocol, ssl.create_default_context())

    run(main())


def test_tls_is_refused_by_a_bookie_without(apache_cluster: ApacheCluster, pem: Path) -> None:
    async def main() -> None:
        with pytest.raises(BookieUnavailable, match="refuses TLS"):
            await opened(apache_cluster.bookies[0], Protocol.V3, ssl.create_default_context(cafile=pem))

    run(main())
