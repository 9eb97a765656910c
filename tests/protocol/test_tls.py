from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import BookieUnavailable
from bkctl.ids import LedgerId
from bkctl.protocol import server as server_module
from bkctl.protocol import v2, v3
from bkctl.protocol.backpressure import ServerLimits
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    BytesLike,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    Respond,
    StartTlsRequest,
    StartTlsResponse,
    Status,
)
from bkctl.protocol.server import BookieServer

HOST = "127.0.0.1"
LEDGER = LedgerId(0, 5)
BODY = bytes(range(256)) * 400
Runner = Callable[[Coroutine[Any, Any, None]], None]


def server_context(pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


def client_context(pem: Path, *, check_hostname: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pem)
    context.check_hostname = check_hostname
    return context


class Bookie:
    def handle(self, request: Request, respond: Respond) -> None:
        if isinstance(request, AddRequest):
            respond(AddResponse(Status.EBADREQ, request.ledger, request.entry_id))
            return
        assert isinstance(request, ReadRequest)
        respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, BODY))


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("check_hostname", [True, False])
async def test_requests_continue_in_tls(pem: Path, protocol: Protocol, check_hostname: bool) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    tls = client_context(pem, check_hostname=check_hostname)
    connection = await BookieConnection.open(HOST, server.port, bookie_id="b", protocol=protocol, tls=tls)
    answers = await asyncio.gather(*(connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(300)))
    for entry_id, answer in enumerate(answers):
        assert answer[:4] == (Status.EOK, LEDGER, entry_id, BODY)
    if protocol is Protocol.V3:
        assert (await connection.send(StartTlsRequest())).status is Status.EBADREQ
    connection.close()
    await connection.wait_closed()
    await server.close()


async def test_a_bookie_with_tls_serves_clients_without(pem: Path) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    connection = await BookieConnection.open(HOST, server.port, bookie_id="b")
    assert (await connection.send(ReadRequest(LEDGER, 1))).status is Status.EOK
    connection.close()
    await connection.wait_closed()
    await server.close()


@pytest.mark.parametrize("protocol", Protocol)
async def test_required_tls_refuses_clients_in_clear(pem: Path, protocol: Protocol) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem), requires_tls=True)
    await server.start(HOST)
    for tls, status in ((None, Status.EUA), (client_context(pem), Status.EOK)):
        connection = await BookieConnection.open(HOST, server.port, bookie_id="b", protocol=protocol, tls=tls)
        for entry_id in range(3):
            assert (await connection.send(ReadRequest(LEDGER, entry_id))).status is status
        connection.close()
        await connection.wait_closed()
    await server.close()


async def test_a_bookie_without_tls_refuses_it(pem: Path) -> None:
    server = BookieServer(Bookie())
    await server.start(HOST)
    with pytest.raises(BookieUnavailable, match="Bookie b refuses TLS"):
        await BookieConnection.open(HOST, server.port, bookie_id="b", tls=client_context(pem))
    await server.close()


async def test_an_unknown_certificate_is_refused(pem: Path) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    with pytest.raises(BookieUnavailable, match="do not agree on TLS"):
        await BookieConnection.open(HOST, server.port, bookie_id="b", tls=ssl.create_default_context())
    trusted = await BookieConnection.open(HOST, server.port, bookie_id="b", tls=client_context(pem))
    assert (await trusted.send(ReadRequest(LEDGER, 1))).status is Status.EOK
    trusted.close()
    await trusted.wait_closed()
    await server.close()


def start_tls_bytes() -> bytes:
    out: list[BytesLike] = []
    v3.encode_request(1, StartTlsRequest(), out)
    return b"".join(out)


def read_bytes() -> bytes:
    out: list[BytesLike] = []
    v3.encode_request(2, ReadRequest(LEDGER, 1), out)
    return b"".join(out)


async def test_requests_in_clear_behind_start_tls_are_not_served(pem: Path) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(start_tls_bytes() + read_bytes())
    received = b""
    try:
        async with asyncio.timeout(LIMIT_S):
            received = await reader.read()
    except ConnectionResetError:
        pass
    assert BODY not in received
    assert len(received) < 100
    writer.close()
    await server.close()


async def test_answers_in_clear_behind_start_tls_are_ignored(pem: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        out: list[BytesLike] = []
        v3.encode_response(v3.Header(1, v3.START_TLS), StartTlsResponse(Status.EOK), 0, out)
        v3.encode_response(v3.Header(2, v3.READ_ENTRY), ReadResponse(Status.EOK, LEDGER, 1, b"forged"), 0, out)
        writer.write(b"".join(out))
        await reader.read(100)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(BookieUnavailable, match="in clear"):
        await BookieConnection.open(HOST, port, bookie_id="b", tls=client_context(pem))
    server.close()


async def test_garbage_instead_of_a_handshake_ends_that_connection(pem: Path) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(start_tls_bytes())
    assert await reader.readexactly(4)
    writer.write(b"\x00" * 600)
    async with asyncio.timeout(LIMIT_S):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    await server.close()
    assert not server.connections


@pytest.mark.parametrize("end", ["garbage", "leaves", "stop"])
async def test_a_handshake_that_fails_leaves_no_connection_behind(pem: Path, end: str) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    for _ in range(5):
        reader, writer = await asyncio.open_connection(HOST, server.port)
        out: list[BytesLike] = []
        v3.encode_request(1, StartTlsRequest(), out)
        writer.writelines(out)
        assert await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
        if end == "garbage":
            writer.write(b"\x00" * 100)
        elif end == "leaves":
            writer.transport.abort()
    if end != "stop":
        while server.connections:
            await asyncio.sleep(0.01)
    await asyncio.wait_for(server.close(0.1), LIMIT_S)
    assert not server.connections


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_handshake_that_does_not_come_ends_in_seconds(pem: Path, has_begun: bool) -> None:
    server = BookieServer(Bookie(), tls=server_context(pem), limits=ServerLimits(tls_handshake_ms=300))
    await server.start(HOST)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(start_tls_bytes())
    assert await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
    if has_begun:
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    while server.connections:
        await asyncio.sleep(0.01)
    assert server.ended == {"handshake": 1}
    await server.close()


async def test_required_tls_bounds_frames_in_clear(pem: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.05)

    limits = ServerLimits(first_request_ms=500)
    server = BookieServer(Bookie(), tls=server_context(pem), requires_tls=True, limits=limits)
    await server.start(HOST)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(struct.pack(">i", 5_000_000) + bytes(8000))
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b"", "closed before the rest comes"
    writer.close()
    assert server.ended == {"plaintext": 1}

    reader, writer = await asyncio.open_connection(HOST, server.port)
    with contextlib.suppress(OSError):
        while not reader.at_eof():  # requests that are refused do not keep the connection
            out: list[BytesLike] = []
            v3.encode_request(1, ReadRequest(LEDGER, 0), out)
            writer.writelines(out)
            await reader.read(1 << 16)
            await asyncio.sleep(0.02)
    writer.close()
    assert server.ended == {"plaintext": 1, "mute": 1}

    connection = await BookieConnection.open(HOST, server.port, bookie_id="bookie", tls=client_context(pem))
    large = await connection.send(ReadRequest(LEDGER, 0))
    assert isinstance(large, ReadResponse)
    body = bytes(100_000)
    refused = await connection.send(AddRequest(LEDGER, 0, b"k" * 20, body))
    assert refused.status is Status.EBADREQ, "the whole of it was taken"
    connection.close()
    await server.close()


class LargeEntries:
    """A bookie whose entry n is `size` bytes of n."""

    size = 16 << 20

    def handle(self, request: Request, respond: Respond) -> None:
        assert isinstance(request, ReadRequest)
        body = bytes([request.entry_id]) * self.size
        respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, body))


async def next_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))


async def connect_in_tls(port: int, pem: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect as a client that takes little unless it is read from."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    client.connect((HOST, port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 12)
    writer.write(start_tls_bytes())
    assert await next_frame(reader)
    await writer.start_tls(client_context(pem), server_hostname=HOST)
    return reader, writer


def read_of(entry_id: int) -> bytes:
    out: list[BytesLike] = []
    v2.encode_request(ReadRequest(LEDGER, entry_id), out)
    return b"".join(out)


async def check_entry(reader: asyncio.StreamReader, entry_id: int) -> None:
    head = await reader.readexactly(28)
    assert (int.from_bytes(head[:4]), int.from_bytes(head[20:28])) == (24 + LargeEntries.size, entry_id)
    assert await reader.readexactly(LargeEntries.size) == bytes([entry_id]) * LargeEntries.size


async def test_answers_that_a_client_does_not_read_count_in_tls(pem: Path) -> None:
    """TLS moved each write to the socket's buffer, which it does not count: the first answer was never seen."""
    server = BookieServer(LargeEntries(), tls=server_context(pem))
    await server.start(HOST)
    reader, writer = await connect_in_tls(server.port, pem)
    (served,) = server.connections
    for entry_id in (1, 2):
        writer.write(read_of(entry_id))
        while not served.is_congested:
            await asyncio.sleep(0.01)
        assert LargeEntries.size // 2 < server.unread.bytes <= LargeEntries.size + 4096, "the system has some"
        before = served.unsent_bytes
        head = await reader.readexactly(28 + LargeEntries.size // 4)
        while served.unsent_bytes > before - LargeEntries.size // 8:
            await asyncio.sleep(0.01)
        rest = await reader.readexactly(LargeEntries.size - len(head) + 28)
        assert head[20:28] == entry_id.to_bytes(8)
        assert (head + rest)[28:] == bytes([entry_id]) * LargeEntries.size
        while server.unread.bytes:
            await asyncio.sleep(0.01)
    writer.close()
    await server.close()


@pytest.mark.parametrize("end", ["stop", "patience"])
async def test_answers_that_wait_for_tls_come_whole_or_not_at_all(pem: Path, end: str) -> None:
    limits = ServerLimits(backpressure_wait_ms=20 if end == "patience" else -1)
    bookie = LargeEntries()
    server = BookieServer(bookie, tls=server_context(pem), limits=limits)
    await server.start(HOST)
    reader, writer = await connect_in_tls(server.port, pem)
    (served,) = server.connections
    writer.write(read_of(1))
    while not served.is_congested:
        await asyncio.sleep(0.01)
    if end == "stop":
        closing = asyncio.create_task(server.close(LIMIT_S))
        await asyncio.sleep(0.05)
        await check_entry(reader, 1)
        assert await reader.read() == b""
        await closing
    else:
        while not served._drops_answers:
            await asyncio.sleep(0.01)
        await check_entry(reader, 1)
        writer.write(read_of(2))
        await check_entry(reader, 2)
        writer.close()
        await server.close()


async def test_tls_does_not_begin_behind_answers_that_are_not_read(pem: Path) -> None:
    """Their transport told TLS that it had room again, and the connection stayed paused for ever."""
    server = BookieServer(Bookie(), tls=server_context(pem))
    await server.start(HOST)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    client.connect((HOST, server.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 12)
    while not server.connections:
        await asyncio.sleep(0.01)
    (served,) = server.connections
    assert served._transport is not None
    count = 9
    while served._transport.get_write_buffer_size() < 200_000:  # the system has some megabytes
        count += 1
        writer.write(read_bytes())
        await asyncio.sleep(0.01)
    writer.write(read_bytes() * 9 + start_tls_bytes())
    for _ in range(count):
        assert BODY in await next_frame(reader)
    refused = await next_frame(reader)
    answer = v3.decode_response(memoryview(refused), 0, len(refused))
    assert answer.response is not None
    assert answer.response.status is Status.EBADREQ
    writer.write(start_tls_bytes())
    assert await next_frame(reader)
    await writer.start_tls(client_context(pem), server_hostname=HOST)
    writer.write(read_bytes())
    assert BODY in await next_frame(reader)
    writer.close()
    await server.close()
