"""A lost connection is freed at once: a bookie looks for cycles seldom, and clients come and go by the thousands."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from protocol.conftest import HOST, Runner
from protocol.test_tls import client_context, server_context
from support.lifetimes import Lifetimes, count_of, without_cycle_collector
from support.waiting import LIMIT_S

from bkctl.ids import LedgerId
from bkctl.protocol import v2, v3
from bkctl.protocol.backpressure import ServerLimits
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.handler import ReadRunResponder, Responder
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    Protocol,
    ReadRequest,
    ReadResponse,
    Request,
    StartTlsRequest,
    Status,
)
from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun
from bkctl.protocol.server import BookieServer

LEDGER = LedgerId(0, 5)
KEY = b"k" * 20
ENTRY = struct.pack(">qqqq", LEDGER.ledger_id, 0, -1, 0) + bytes(100)
#: The beginning of a TLS handshake, which does not continue.
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)
COUNT = 2


class Bookie:
    """Answers adds at once, and reads, each of which is a future of the disk, when the test says so."""

    def __init__(self) -> None:
        self.disk: list[asyncio.Future[None]] = []

    def handle(self, request: Request, respond: Responder) -> None:
        if isinstance(request, AddRequest):
            respond(AddResponse(Status.EOK, request.ledger, request.entry_id))
            return
        assert isinstance(request, ReadRequest)
        respond.on_lost[lambda: None] = None
        answer = ReadResponse(Status.EOK, request.ledger, request.entry_id, ENTRY)
        assert respond.read(functools.partial(self._begin, functools.partial(respond, answer)))

    def _begin(self, answer: Callable[[], object]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: answer())
        self.disk.append(future)
        return future

    def finish_reads(self) -> None:
        for future in self.disk:
            future.set_result(None)
        self.disk.clear()


class BookieOfRuns(Bookie):
    def adds_at_once(self) -> int:
        return 100

    def handle_adds(self, adds: Sequence[AddRun], answer: AnswerAdds) -> None:
        answer(adds, Status.EOK)

    def handle_reads(self, reads: ReadRun, respond: ReadRunResponder) -> None:
        answer = functools.partial(respond.answer, reads, [ENTRY] * len(reads.entry_ids), None)
        assert respond.read(len(reads.entry_ids), functools.partial(self._begin, answer))


def frame(request: Request, protocol: Protocol) -> bytes:
    out: list[Any] = []
    if protocol is Protocol.V2:
        v2.encode_request(request, out)
    else:
        v3.encode_request(1, request, out)
    return b"".join(map(bytes, out))


ADD = AddRequest(LEDGER, 0, KEY, ENTRY)
READ = ReadRequest(LEDGER, 0)
FENCE = ReadRequest(LEDGER, 0, KEY, fence=True)
#: The bytes that clients send before they leave; do they wait for an answer, or for the end?
SENT: dict[str, tuple[bytes, bool]] = {
    "nothing": (b"", False),
    "half a length": (b"\x00\x00", False),
    "no frame": (b"\xff" * 16, True),
    **{
        f"{what}, {protocol.name}": (data, waits)
        for protocol in Protocol
        for what, data, waits in [
            ("an add", frame(ADD, protocol), True),
            ("half an add", frame(ADD, protocol)[:-50], False),
            ("adds and half an add", frame(ADD, protocol) * 20 + frame(ADD, protocol)[:-50], True),
            ("a read", frame(READ, protocol), False),
            ("an add and reads", frame(ADD, protocol) + frame(READ, protocol) * 20, True),
            ("a fencing read", frame(FENCE, protocol), False),
        ]
    },
}


@contextlib.contextmanager
def connected(port: int, *, resets: bool) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=LIMIT_S) as client:
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        yield client


def begin_tls(client: socket.socket) -> None:
    client.sendall(frame(StartTlsRequest(), Protocol.V3))
    client.recv(struct.unpack(">i", client.recv(4, socket.MSG_WAITALL))[0], socket.MSG_WAITALL)


def come_and_go(port: int, tls: ssl.SSLContext | None, data: bytes, *, waits: bool) -> None:
    for number in range(COUNT):
        with contextlib.suppress(ConnectionError), connected(port, resets=number % 2 == 0) as plain:
            client = plain
            if tls is not None:
                begin_tls(plain)
                client = tls.wrap_socket(plain)
            with client:
                client.sendall(data)
                if waits:
                    client.recv(1 << 16)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def check_freed(server: BookieServer, bookie: Bookie, connections: Lifetimes) -> None:
    """Connections are freed once their reads have ended, their TLS with them."""
    acceptor = server._acceptor
    assert acceptor is not None

    def have_left() -> bool:
        if server.slots:  # a connection that waits for one is not read, and does not notice that its client left
            bookie.finish_reads()
        return len(connections.made) == COUNT and acceptor.open == 0 and not server.connections

    await until(have_left)
    bookie.finish_reads()
    await until(lambda: connections.alive == 0 and count_of("SSLProtocol") == 0)
    assert server.in_flight.bytes == server.reads.count == 0


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("sent", list(SENT))
@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (Bookie, ServerLimits()),
        (BookieOfRuns, ServerLimits()),
        (Bookie, ServerLimits(adds_in_progress=3, reads_in_progress=3)),
    ],
    ids=["single requests", "runs", "bounded requests"],
)
def test_lost_connections_are_freed_at_once(
    runner: Runner, pem: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Bookie], limits: ServerLimits,
    sent: str, has_tls: bool,
) -> None:  # fmt: skip
    async def main() -> None:
        bookie = make()
        server = BookieServer(bookie, tls=server_context(pem), limits=limits)
        await server.start(HOST)
        connections = watch(monkeypatch)
        data, waits = SENT[sent]
        tls = client_context(pem) if has_tls else None
        if tls is not None:
            tls.check_hostname = False
        with without_cycle_collector():
            await asyncio.to_thread(come_and_go, server.port, tls, data, waits=waits)
            await check_freed(server, bookie, connections)
        await server.close(0)

    runner(main())


@pytest.mark.parametrize("hello", [b"", CLIENT_HELLO, b"GET / HTTP/1.1\r\n\r\n", bytes(100)], ids=len)
def test_lost_connections_without_a_handshake_are_freed_at_once(
    runner: Runner, pem: Path, monkeypatch: pytest.MonkeyPatch, hello: bytes
) -> None:
    def come_and_go() -> None:
        for number in range(COUNT):
            with contextlib.suppress(ConnectionError), connected(server.port, resets=number % 2 == 0) as client:
                begin_tls(client)
                client.sendall(hello)

    async def main() -> None:
        nonlocal server
        bookie = Bookie()
        server = BookieServer(bookie, tls=server_context(pem))
        await server.start(HOST)
        connections = watch(monkeypatch)
        with without_cycle_collector():
            await asyncio.to_thread(come_and_go)
            await check_freed(server, bookie, connections)
        await server.close(0)

    server: Any = None
    runner(main())


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_ended_connections_are_freed_at_once(
    runner: Runner, pem: Path, monkeypatch: pytest.MonkeyPatch, has_tls: bool
) -> None:
    """The server ends what waits for it: mute clients, and those in a handshake."""

    async def main() -> None:
        bookie = Bookie()
        limits = ServerLimits(first_request_ms=1, tls_handshake_ms=100)
        server = BookieServer(bookie, tls=server_context(pem), limits=limits)
        await server.start(HOST)
        connections = watch(monkeypatch)
        with without_cycle_collector(), contextlib.ExitStack() as opened:
            for _ in range(COUNT):
                _, writer = await asyncio.open_connection(HOST, server.port)
                opened.callback(writer.close)
                writer.write(frame(StartTlsRequest(), Protocol.V3) if has_tls else b"\x00")
                await writer.drain()
            await check_freed(server, bookie, connections)
        await server.close(0)

    runner(main())


@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
def test_reads_behind_a_lost_connection_do_not_begin(runner: Runner, protocol: Protocol) -> None:
    """A request that waited for its ledger asks for the disk after its client has left."""

    class Late(Bookie):
        def handle(self, request: Request, respond: Responder) -> None:
            waiting.append(functools.partial(super().handle, request, respond))

    async def main() -> None:
        bookie = Late()
        server = BookieServer(bookie)
        await server.start(HOST)
        client = await BookieConnection.open(HOST, server.port, bookie_id="b", protocol=protocol)
        for entry_id in range(5):
            client.send(ReadRequest(LEDGER, entry_id)).add_done_callback(lambda done: done.exception())
        await until(lambda: len(waiting) == 5)
        client.close()
        await until(lambda: not server.connections)
        assert server.in_flight.bytes > 0
        for each in waiting:
            each()
        assert not bookie.disk
        assert server.in_flight.bytes == server.reads.count == 0
        await server.close(0)

    waiting: list[Callable[[], None]] = []
    runner(main())


def watch(monkeypatch: pytest.MonkeyPatch) -> Lifetimes:
    from bkctl.protocol.server import ServedConnection

    return Lifetimes(ServedConnection, monkeypatch)
