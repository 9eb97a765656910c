from __future__ import annotations

import asyncio
import contextlib
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
from bkctl.protocol import v3
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.limits import ServerLimits
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
