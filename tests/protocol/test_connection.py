from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.waiting import LIMIT_S

from bkctl.errors import (
    BookieUnavailable,
    IllegalOperation,
    LedgerFenced,
    ProtocolError,
    TimedOut,
    Unsupported,
    UsageError,
)
from bkctl.ids import LedgerId
from bkctl.protocol import backpressure, flow, v3
from bkctl.protocol.connection import SCOPE_PROBE, BookieConnection
from bkctl.protocol.handler import RequestHandler
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    AuthMessage,
    AuthResponse,
    BareResponse,
    BatchReadRequest,
    BatchReadResponse,
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
    Request,
    Respond,
    Response,
    Status,
    WriteLacRequest,
    WriteLacResponse,
    refusal,
)
from bkctl.protocol.server import BookieServer
from bkctl.tasks import cancel_and_wait

LEDGER = LedgerId(0, 5)
SCOPED = LedgerId(7, 5)
KEY = b"k" * 20
HOST = "127.0.0.1"

Runner = Callable[[Coroutine[Any, Any, None]], None]


async def turns() -> None:
    """Let the loop turn so often that all has come which was sent, however little of the processor we get."""
    for _ in range(100):
        await asyncio.sleep(0.0005)


class Handler:
    """A bookie that answers each request with what `answer` gives, at once."""

    def __init__(self, answer: Callable[[Request], Response]) -> None:
        self.answer = answer
        self.requests: list[Request] = []

    def handle(self, request: Request, respond: Respond) -> None:
        self.requests.append(request)
        respond(self.answer(request))


class Holding:
    """A bookie that answers when the test says so."""

    def __init__(self) -> None:
        self.held: list[tuple[Request, Respond]] = []

    def handle(self, request: Request, respond: Respond) -> None:
        self.held.append((request, respond))

    async def wait_for(self, count: int) -> list[tuple[Request, Respond]]:
        while len(self.held) < count:
            await asyncio.sleep(0.002)
        return self.held


def entry(request: Request) -> Response:
    """An answer of the request's own kind, and a body that tells entries apart."""
    match request:
        case ReadRequest():
            return ReadResponse(Status.EOK, request.ledger, request.entry_id, b"%d " % request.entry_id * 100)
        case AddRequest():
            return AddResponse(Status.EOK, request.ledger, request.entry_id)
        case BatchReadRequest():
            bodies = tuple(b"%d" % request.request_id for _ in range(request.max_count))
            return BatchReadResponse(Status.EOK, request.ledger, request.entry_id, request.request_id, bodies)
        case WriteLacRequest():
            return WriteLacResponse(Status.EOK, request.ledger)
        case ReadLacRequest():
            return ReadLacResponse(Status.EOK, request.ledger, b"lac", b"last")
        case ForceLedgerRequest():
            return ForceLedgerResponse(Status.EOK, request.ledger)
        case ListEntriesRequest():
            return ListEntriesResponse(Status.EOK, request.ledger, bytes(64))
        case BookieInfoRequest():
            return BookieInfoResponse(Status.EOK, 1 << 40, 1 << 39)
        case _:
            return refusal(request, Status.EBADREQ)


@contextlib.asynccontextmanager
async def serving(handler: RequestHandler, **options: Any) -> AsyncIterator[BookieServer]:
    server = BookieServer(handler, **options)
    await server.start(HOST)
    try:
        yield server
    finally:
        await server.close(grace_s=0.1)


@contextlib.asynccontextmanager
async def connected(port: int, protocol: Protocol = Protocol.V3, **options: Any) -> AsyncIterator[BookieConnection]:
    options = {"timeout_s": LIMIT_S, "connect_timeout_s": LIMIT_S, **options}
    connection = await BookieConnection.open(HOST, port, bookie_id="bookie-1", protocol=protocol, **options)
    try:
        yield connection
    finally:
        connection.close()
        await connection.wait_closed()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """A server that does with each connection what `script` says; gives its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def v3_request(txn_id: int, request: Request) -> bytes:
    out: list[BytesLike] = []
    v3.encode_request(txn_id, request, out)
    return b"".join(out)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


async def read_response(reader: asyncio.StreamReader) -> v3.Answer:
    body = await read_frame(reader)
    return v3.decode_response(memoryview(body), 0, len(body))


# The client's end.


@pytest.mark.parametrize("protocol", Protocol)
async def test_many_requests_in_flight_each_get_their_own_answer(protocol: Protocol) -> None:
    async with serving(Handler(entry)) as server, connected(server.port, protocol) as connection:
        reads = [connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(3000)]
        adds = [connection.send(AddRequest(LEDGER, entry_id, KEY, bytes(60))) for entry_id in range(100)]
        for entry_id, answer in enumerate(await asyncio.gather(*reads)):
            assert answer[:4] == (Status.EOK, LEDGER, entry_id, b"%d " % entry_id * 100)
        if protocol is Protocol.V3:
            assert await asyncio.gather(*adds) == [AddResponse(Status.EOK, LEDGER, n) for n in range(100)]
        else:
            # In v2 the ids are those in the body.
            assert not any(answer.done() for answer in adds[1:])


@pytest.mark.parametrize("protocol", Protocol)
async def test_answers_may_come_in_any_order(protocol: Protocol) -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, protocol) as connection:
        reads = [connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(50)]
        for request, respond in reversed(await bookie.wait_for(50)):
            respond(entry(request))
        for entry_id, answer in enumerate(await asyncio.gather(*reads)):
            assert answer[:3] == (Status.EOK, LEDGER, entry_id)


async def test_equal_v2_requests_are_answered_first_in_first_out() -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, Protocol.V2) as connection:
        reads = [connection.send(ReadRequest(LEDGER, 3)) for _ in range(4)]
        for number, (_, respond) in enumerate(await bookie.wait_for(4)):
            respond(ReadResponse(Status.EOK, LEDGER, 3, b"%d" % number))
        bodies = [cast_read(answer).body for answer in await asyncio.gather(*reads)]
        assert bodies == [b"0", b"1", b"2", b"3"]
        again = connection.send(ReadRequest(LEDGER, 3))
        (await bookie.wait_for(5))[4][1](ReadResponse(Status.ENOENTRY, LEDGER, 3))
        assert (await again).status is Status.ENOENTRY


@pytest.mark.parametrize("fence_first", [False, True])
async def test_v2_holds_fencing_read_behind_plain_read(fence_first: bool) -> None:
    plain, fence = ReadRequest(LEDGER, -1), ReadRequest(LEDGER, -1, KEY, fence=True)
    sent = [fence, plain, fence] if fence_first else [plain, plain, fence, plain]

    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, Protocol.V2) as connection:
        reads = [connection.send(request) for request in sent]
        other = connection.send(ReadRequest(LEDGER, 3))
        abandoned = connection.send(fence)
        abandoned.cancel()
        answered = 0
        while answered < len(sent) + 1:
            await bookie.wait_for(answered + 1)
            await asyncio.sleep(0.02)
            for request, respond in reversed(bookie.held[answered:]):  # a bookie answers in any order
                assert isinstance(request, ReadRequest)
                answered += 1
                body = b"fenced" if request.fence else b"plain"
                respond(ReadResponse(Status.EOK, LEDGER, request.entry_id, body))
        assert (await other).status is Status.EOK
        for request, answer in zip(sent, await asyncio.gather(*reads), strict=True):
            assert cast_read(answer).body == (b"fenced" if request.fence else b"plain")
        add, recovery_add = (
            connection.send(AddRequest(LEDGER, 7, KEY, LEDGER.ledger_id.to_bytes(8) + (7).to_bytes(8), recovery))
            for recovery in (False, True)
        )
        ((_, respond),) = (await bookie.wait_for(answered + 1))[answered:]
        respond(AddResponse(Status.EFENCED, LEDGER, 7))
        assert (await add).status is Status.EFENCED
        ((request, respond),) = (await bookie.wait_for(answered + 2))[answered + 1 :]
        assert isinstance(request, AddRequest)
        assert request.recovery_add
        respond(AddResponse(Status.EOK, LEDGER, 7))
        assert (await recovery_add).status is Status.EOK


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "never comes"])
async def test_v2_late_plain_answer_does_not_answer_fencing_read(comes: bool) -> None:
    plain, fence = ReadRequest(LEDGER, -1), ReadRequest(LEDGER, -1, KEY, fence=True)

    bookie = Holding()
    async with (
        serving(bookie) as server,
        connected(server.port, Protocol.V2, timeout_s=1.5) as connection,
    ):
        with pytest.raises(TimedOut):
            await connection.send(plain)
        fenced = connection.send(fence)
        await asyncio.sleep(0.05)
        assert [request for request, _ in bookie.held] == [plain]
        if comes:
            connection._tick_s = LIMIT_S
            bookie.held[0][1](ReadResponse(Status.EOK, LEDGER, -1, b"plain"))
            (await bookie.wait_for(2))[1][1](ReadResponse(Status.EOK, LEDGER, -1, b"fenced"))
            assert cast_read(await fenced).body == b"fenced"
        else:
            with pytest.raises(TimedOut):
                await fenced
            await connection.wait_closed()
            with pytest.raises(BookieUnavailable):
                await connection.send(fence)


def cast_read(response: Response) -> ReadResponse:
    assert isinstance(response, ReadResponse)
    return response


async def test_every_v3_operation_passes_through_with_and_without_scope() -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server, connected(server.port) as connection:
        assert await connection.supports_scopes()
        bookie.requests.clear()
        sent: list[Request] = []
        for ledger in (LEDGER, SCOPED, LedgerId((1 << 64) - 1, (1 << 64) - 1)):
            sent += [
                AddRequest(ledger, 3, KEY, b"entry", recovery_add=True, high_priority=True, deferred_sync=True),
                AddRequest(ledger, 3, KEY, b"entry"),
                ReadRequest(ledger, 3),
                ReadRequest(ledger, -1, KEY, fence=True),
                ReadRequest(ledger, -1, previous_lac=2, timeout_ms=50, piggyback=True),
                WriteLacRequest(ledger, 3, KEY, b"packet"),
                ReadLacRequest(ledger),
                ForceLedgerRequest(ledger),
                ListEntriesRequest(ledger),
            ]
        sent.append(BookieInfoRequest(3))
        answers = await asyncio.gather(*map(connection.send, sent))
        assert bookie.requests == sent
        assert answers == [entry(request) for request in sent]


async def test_batch_reads_are_matched_by_request_id() -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, Protocol.V2) as connection:
        reads = [connection.send(BatchReadRequest(LEDGER, 0, number, 3, 1000)) for number in range(5)]
        for request, respond in reversed(await bookie.wait_for(5)):
            respond(entry(request))
        for number, answer in enumerate(await asyncio.gather(*reads)):
            assert isinstance(answer, BatchReadResponse)
            assert answer.bodies == (b"%d" % number,) * 3


@pytest.mark.parametrize("protocol", Protocol)
async def test_bodies_stay_valid_while_they_are_held(protocol: Protocol) -> None:
    async with serving(Handler(entry)) as server, connected(server.port, protocol) as connection:
        held = []
        for first in range(0, 4000, 500):
            reads = [connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(first, first + 500)]
            held += [cast_read(answer).body for answer in await asyncio.gather(*reads)]
        for entry_id, body in enumerate(held):
            assert body == b"%d " % entry_id * 100


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize("size", [0, 1, 65_535, 262_144, 5 * 1024 * 1024 - 200])
async def test_entries_of_every_size_up_to_the_frame_limit(protocol: Protocol, size: int) -> None:
    payload = bytes(range(256)) * (size // 256 + 1)
    body = LEDGER.ledger_id.to_bytes(8, "big") + bytes(8) + payload[:size]

    bookie = Handler(lambda request: entry(request)._replace(body=body))  # type: ignore[call-arg]
    stored = Handler(entry)
    async with serving(bookie) as server, connected(server.port, protocol) as connection:
        for _ in range(3):
            read = cast_read(await connection.send(ReadRequest(LEDGER, 0)))
            assert read.body == body
    async with serving(stored) as server, connected(server.port, protocol) as connection:
        await connection.send(AddRequest(LEDGER, 0, KEY, (body[:30], body[30:])))
        (add,) = stored.requests
        assert isinstance(add, AddRequest)
        assert add.body == body


@pytest.mark.parametrize("protocol", Protocol)
async def test_a_request_larger_than_a_frame_is_refused_and_nothing_is_sent(protocol: Protocol) -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server, connected(server.port, protocol) as connection:
        with pytest.raises(UsageError, match="does not fit"):
            connection.send(AddRequest(LEDGER, 0, KEY, bytes(5 * 1024 * 1024)))
        await connection.send(ReadRequest(LEDGER, 1))
        assert bookie.requests == [ReadRequest(LEDGER, 1)]


@pytest.mark.parametrize("protocol", Protocol)
async def test_no_answer_in_time_is_an_error_of_that_request_alone(protocol: Protocol) -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, protocol, timeout_s=1.5) as connection:
        late = [connection.send(ReadRequest(LEDGER, 3)) for _ in range(2)]
        with pytest.raises(TimedOut, match=r"bookie-1 .* 1\.5 s to a request \(read\) of ledger 5, entry 3"):
            await late[0]
        with pytest.raises(TimedOut):
            await late[1]
        connection._tick_s = LIMIT_S
        for request, respond in bookie.held:
            respond(entry(request))
        fresh = connection.send(ReadRequest(LEDGER, 4))
        (await bookie.wait_for(3))[2][1](ReadResponse(Status.EOK, LEDGER, 4, b"fresh"))
        assert cast_read(await fresh).body == b"fresh"


@pytest.mark.parametrize("protocol", Protocol)
async def test_taker_that_fails_keeps_no_other_request_from_its_timeout(protocol: Protocol) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    problems: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(str(context["exception"])))
    async with serving(Holding()) as server, connected(server.port, protocol, timeout_s=0.2) as connection:
        connection.send_run([ReadRequest(LEDGER, 1)], fail)
        while not problems:
            await asyncio.sleep(0.01)
        with pytest.raises(TimedOut):
            await asyncio.wait_for(connection.send(ReadRequest(LEDGER, 2)), LIMIT_S)
    assert problems == ["a defect"]


async def test_a_long_poll_may_take_its_own_time_beside_the_timeout() -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port, timeout_s=0.5) as connection:
        poll = connection.send(ReadRequest(LEDGER, -1, previous_lac=3, timeout_ms=60_000, piggyback=True))
        plain = connection.send(ReadRequest(LEDGER, 1))
        with pytest.raises(TimedOut):
            await plain
        assert not poll.done()
        bookie.held[0][1](ReadResponse(Status.EOK, LEDGER, 4, b"four", 4, 99))
        assert await poll == ReadResponse(Status.EOK, LEDGER, 4, b"four", 4, 99)


async def test_a_cancelled_request_leaves_the_others_alone() -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port) as connection:
        first, second = (connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in (1, 2))
        held = await bookie.wait_for(2)
        first.cancel()
        for request, respond in held:
            respond(entry(request))
        assert (await second).status is Status.EOK


@pytest.mark.parametrize("protocol", Protocol)
async def test_lost_connection_fails_requests_in_flight_and_later_ones(protocol: Protocol) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(10)

    async with scripted(script) as port, connected(port, protocol) as connection:
        reads = [connection.send(ReadRequest(LEDGER, entry_id % 2)) for entry_id in range(4)]
        for read in reads:
            with pytest.raises(BookieUnavailable, match="bookie-1"):
                await read
        assert connection.closed
        with pytest.raises(BookieUnavailable, match="bookie-1"):
            await connection.send(ReadRequest(LEDGER, 1))
        with contextlib.suppress(BookieUnavailable):
            assert not await connection.supports_scopes()


async def test_close_fails_requests_in_flight() -> None:
    bookie = Holding()
    async with serving(bookie) as server, connected(server.port) as connection:
        read = connection.send(ReadRequest(LEDGER, 1))
        connection.close()
        with pytest.raises(BookieUnavailable, match="closed"):
            await read
        await connection.wait_closed()
        assert connection.closed


async def test_close_gives_up_on_a_bookie_that_reads_nothing() -> None:
    ended = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()

    async with scripted(script) as port, connected(port) as connection:
        while not connection.is_congested:
            connection.send(AddRequest(LEDGER, 1, KEY, bytes(4 << 20)))
            await turns()
        connection.close()
        try:
            await asyncio.wait_for(connection.wait_closed(), LIMIT_S)
        finally:
            ended.set()


async def test_refused_connection_is_unavailable_bookie() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

    with pytest.raises(BookieUnavailable, match=f"bookie-1 at {HOST}:{port}"):
        await BookieConnection.open(HOST, port, bookie_id="bookie-1")


@pytest.mark.parametrize("length", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x50\x00\x00"])
@pytest.mark.parametrize("protocol", Protocol)
async def test_a_frame_length_out_of_bounds_ends_the_connection(protocol: Protocol, length: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(10)
        writer.write(length + b"x" * 10)
        await reader.read()

    async with scripted(script) as port, connected(port, protocol) as connection:
        with pytest.raises(ProtocolError, match="bookie-1 sent a frame of"):
            await connection.send(ReadRequest(LEDGER, 1))
        await connection.wait_closed()


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        (Protocol.V2, b""),
        (Protocol.V2, bytes.fromhex("02020000 00000000 00")),
        (Protocol.V2, bytes.fromhex("02020000 0000002a 0000000000000005 0000000000000001")),
        (Protocol.V3, b""),
        (Protocol.V3, b"\xff" * 30),
        (Protocol.V3, b"\x10\x00"),
    ],
)
async def test_an_answer_that_does_not_parse_ends_the_connection(protocol: Protocol, answer: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_frame(reader)
        writer.write(frame(answer))
        await reader.read()

    async with scripted(script) as port, connected(port, protocol) as connection:
        with pytest.raises(ProtocolError, match="bookie-1 sent"):
            await connection.send(ReadRequest(LEDGER, 1))
        await connection.wait_closed()


def answering(make: Callable[[v3.Header, Request], bytes]) -> Script:
    """A v3 bookie that answers with the bytes that `make` gives."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = await read_frame(reader)
            call = v3.decode_request(memoryview(body), 0, len(body))
            assert call is not None
            assert call.request is not None
            writer.write(make(call.header, call.request))

    return script


def v3_answer(header: v3.Header, response: Response, scope_id: int = 0) -> bytes:
    out: list[BytesLike] = []
    v3.encode_response(header, response, scope_id, out)
    return b"".join(out)


@pytest.mark.parametrize(
    "make",
    [
        lambda header, request: v3_answer(header, AddResponse(Status.EOK, LedgerId(0, 6), 1)),
        lambda header, request: v3_answer(header, AddResponse(Status.EOK, LEDGER, 1), 7),
        lambda header, request: v3_answer(header._replace(operation=1), ReadResponse(Status.EOK, LEDGER, 1, b"")),
        lambda header, request: frame(bytes.fromhex("0a060803100218") + bytes((header.txn_id,)) + b"\x10\xe7\x07"),
        lambda header, request: frame(bytes.fromhex("0a060803100218") + bytes((header.txn_id,)) + b"\x10\x00"),
    ],
    ids=["other ledger", "other scope", "other operation", "unknown status", "success without an answer"],
)
async def test_an_answer_that_makes_no_sense_fails_its_request_alone(
    make: Callable[[v3.Header, Request], bytes],
) -> None:
    def answer(header: v3.Header, request: Request) -> bytes:
        return make(header, request) if isinstance(request, AddRequest) else v3_answer(header, entry(request))

    async with scripted(answering(answer)) as port, connected(port) as connection:
        add, read = connection.send(AddRequest(LEDGER, 1, KEY, b"")), connection.send(ReadRequest(LEDGER, 1))
        with pytest.raises(ProtocolError, match="bookie-1 sent"):
            await add
        assert (await read).status is Status.EOK


async def test_answer_without_request_is_dropped() -> None:
    def answer(header: v3.Header, request: Request) -> bytes:
        return v3_answer(header._replace(txn_id=999), entry(request)) + v3_answer(header, entry(request))

    async with scripted(answering(answer)) as port, connected(port) as connection:
        assert (await connection.send(ReadRequest(LEDGER, 1))).status is Status.EOK


# Scopes.


async def test_v2_refuses_a_scope_before_a_byte_is_sent() -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server, connected(server.port, Protocol.V2) as connection:
        for request in (ReadRequest(SCOPED, 1), AddRequest(SCOPED, 1, KEY, b""), ReadLacRequest(LEDGER)):
            with pytest.raises(IllegalOperation):
                connection.send(request)
        assert not await connection.supports_scopes()
        await connection.send(ReadRequest(LEDGER, 1))
        assert bookie.requests == [ReadRequest(LEDGER, 1)]


SCOPED_REQUESTS: list[Request] = [
    AddRequest(SCOPED, 1, KEY, b""),
    ReadRequest(SCOPED, 1),
    WriteLacRequest(SCOPED, 1, KEY, b""),
    ReadLacRequest(SCOPED),
    ForceLedgerRequest(SCOPED),
    ListEntriesRequest(SCOPED),
    ReadLacRequest(SCOPE_PROBE),
]


async def scopes_refused(connection: BookieConnection) -> None:
    for request in SCOPED_REQUESTS:
        with pytest.raises(BookieUnavailable, match="bookie-1 cannot serve scopes"):
            await connection.send(request)


async def test_connection_lock_opens_with_echo_before_scoped_requests() -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server, connected(server.port) as connection:
        await scopes_refused(connection)
        assert bookie.requests == []
        assert await asyncio.gather(*(connection.supports_scopes() for _ in range(3))) == [True] * 3
        assert bookie.requests == [ReadLacRequest(SCOPE_PROBE)]
        for request in SCOPED_REQUESTS:
            assert (await connection.send(request)).status is Status.EOK


def in_scope_0(header: v3.Header, request: Request) -> bytes:
    """A bookie without scopes: it does not see field 15."""
    assert isinstance(request, ReadLacRequest)
    ledger = LedgerId(0, request.ledger.ledger_id)
    return v3_answer(header, ReadLacResponse(Status.ENOENTRY, ledger))


@pytest.mark.parametrize(
    "make",
    [
        in_scope_0,
        lambda header, request: v3_answer(header, BareResponse(Status.EUA)),
        lambda header, request: v3_answer(header, ReadLacResponse(Status.ENOENTRY, SCOPE_PROBE), 2),
        lambda header, request: b"",
    ],
    ids=["no echo", "bare status", "other scope", "silence"],
)
async def test_connection_lock_stays_shut_without_echo(
    make: Callable[[v3.Header, Request], bytes],
) -> None:
    asked: list[Request] = []

    def answer(header: v3.Header, request: Request) -> bytes:
        asked.append(request)
        return make(header, request)

    async with scripted(answering(answer)) as port, connected(port, timeout_s=1) as connection:
        assert not await connection.supports_scopes()
        assert not await connection.supports_scopes()
        await scopes_refused(connection)
        assert asked == [ReadLacRequest(SCOPE_PROBE)]
        assert not connection.closed


@pytest.mark.parametrize("status", [Status.EOK, Status.ENOENTRY, Status.ENOLEDGER, Status.EIO])
async def test_connection_lock_opens_with_echo_of_any_status(status: Status) -> None:
    bookie = Handler(lambda request: refusal(request, status))
    async with serving(bookie) as server, connected(server.port) as connection:
        assert await connection.supports_scopes()


async def test_connection_lost_during_scope_probe_is_unavailable() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)

    async with scripted(script) as port, connected(port) as connection:
        for _ in range(2):
            with pytest.raises(BookieUnavailable, match="bookie-1"):
                await connection.supports_scopes()


async def test_answer_without_scope_shuts_connection_lock() -> None:
    def answer(header: v3.Header, request: Request) -> bytes:
        return v3_answer(header, entry(request), 1 if isinstance(request, ReadLacRequest) else 0)

    async with scripted(answering(answer)) as port, connected(port) as connection:
        assert await connection.supports_scopes()
        with pytest.raises(ProtocolError, match="ledger"):
            await connection.send(ReadRequest(SCOPED, 1))
        assert not await connection.supports_scopes()
        await scopes_refused(connection)


# The bookie's end, against bytes.


@contextlib.asynccontextmanager
async def raw(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.close()


V2_READ = bytes.fromhex("00000014 02020000 0000000000000005 0000000000000001")
V2_READ_ANSWER = bytes.fromhex("02020000 00000000 0000000000000005 0000000000000001") + b"1 " * 100


async def test_served_connection_switches_from_v3_to_v2_once() -> None:
    async with serving(Handler(entry)) as server, raw(server.port) as (reader, writer):
        writer.write(v3_request(1, ReadRequest(LEDGER, 1)))
        assert (await read_response(reader))[:2] == (1, v3.READ_ENTRY)
        writer.write(V2_READ)
        assert await read_frame(reader) == V2_READ_ANSWER
        writer.write(v3_request(2, ReadRequest(LEDGER, 1)))
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"\x00\x50\x00\x00" + bytes(100),
        bytes(4),
        frame(b"\x02\x04\x00\x00" + bytes(16)),
        frame(b"\x02\x09\x00\x00" + bytes(16)),
        frame(b"\x02\x01\x00\x00" + bytes(35)),
        frame(b"\x02\x02\x00\x00" + bytes(15)),
        frame(b"\x02\x02\x00\x01" + bytes(16)),
        frame(b"\x02\x03\x00\x00" + b"\xff" * 5),
        frame(b"\xff" * 40),
    ],
    ids=lambda data: data[:12].hex(),
)
async def test_invalid_request_closes_connection_without_answer(data: bytes) -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server:
        async with raw(server.port) as (reader, writer):
            writer.write(V2_READ + data)
            assert await reader.read() == frame(V2_READ_ANSWER)
        async with raw(server.port) as (reader, writer):
            writer.write(data)
            assert await reader.read() == b""
        assert len(bookie.requests) == 1


async def test_requests_that_come_byte_by_byte() -> None:
    async with serving(Handler(entry)) as server, raw(server.port) as (reader, writer):
        for byte in v3_request(1, ReadRequest(LEDGER, 1)) + V2_READ:
            writer.write(bytes((byte,)))
            await asyncio.sleep(0)
        assert (await read_response(reader)).response == entry(ReadRequest(LEDGER, 1))
        assert await read_frame(reader) == V2_READ_ANSWER


async def test_other_versions_are_answered_ebadversion() -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server:
        async with raw(server.port) as (reader, writer):
            body = bytes.fromhex("0a 06 08 02 10 01 18 05 a2 06 06 08 05 10 02 78 07")
            writer.write(frame(body))
            answer = await read_response(reader)
            assert answer.response == ReadResponse(Status.EBADVERSION, SCOPED, 2)
        async with raw(server.port) as (reader, writer):
            writer.write(bytes.fromhex("00000014 03020000 0000000000000005 0000000000000001"))
            answer_bytes = await read_frame(reader)
            assert answer_bytes == bytes.fromhex("03020000 00000067 0000000000000005 0000000000000001")
        assert bookie.requests == []


@pytest.mark.parametrize("operation", [1, 3, 4, 9, 12, 13, 127])
async def test_an_operation_that_does_not_exist_is_a_bad_request(operation: int) -> None:
    bookie = Handler(entry)
    async with serving(bookie) as server, raw(server.port) as (reader, writer):
        writer.write(frame(bytes((0x0A, 8, 8, 3, 0x10, operation, 0x18, 5, 0x20, 100))))
        assert (await read_frame(reader)).hex(" ") == f"0a 08 08 03 10 {operation:02x} 18 05 20 64 10 94 03"
        assert bookie.requests == []


async def test_authentication_is_answered_as_disabled() -> None:
    disabled = AuthResponse(Status.EOK, "AuthDisabledPlugin", b"")

    async with serving(Handler(entry)) as server:
        for protocol in Protocol:
            async with connected(server.port, protocol) as connection:
                assert await connection.send(AuthMessage("sasl", b"token")) == disabled
        async with raw(server.port) as (reader, writer):
            writer.write(frame(bytes.fromhex("02030000 0a047361736c 1200")))
            expected = bytes.fromhex("02030000 0a12") + b"AuthDisabledPlugin" + b"\x12\x00"
            assert await read_frame(reader) == expected


@pytest.mark.parametrize("protocol", Protocol)
async def test_an_error_that_the_bookie_raises_is_its_answer(protocol: Protocol) -> None:
    def fail(request: Request) -> Response:
        if isinstance(request, ReadRequest) and request.entry_id == 1:
            raise LedgerFenced("Ledger 5 is fenced")
        raise Unsupported("no code of its own")

    async with serving(Handler(fail)) as server, connected(server.port, protocol) as connection:
        assert await connection.send(ReadRequest(LEDGER, 1)) == ReadResponse(Status.EFENCED, LEDGER, 1)
        assert await connection.send(ReadRequest(LEDGER, 2)) == ReadResponse(Status.EIO, LEDGER, 2)


@pytest.mark.parametrize("protocol", Protocol)
async def test_handler_bug_ends_connection_and_is_reported(protocol: Protocol) -> None:
    def fail(request: Request) -> Response:
        raise ZeroDivisionError("a bug")

    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context.get("exception")))
    async with serving(Handler(fail)) as server, connected(server.port, protocol) as connection:
        with pytest.raises(BookieUnavailable):
            await connection.send(ReadRequest(LEDGER, 1))
    assert [type(error) for error in told] == [ZeroDivisionError]


async def test_a_bare_status_closes_a_v2_connection() -> None:
    handler = Handler(lambda request: BareResponse(Status.EUA))
    async with serving(handler) as server, raw(server.port) as (reader, writer):
        writer.write(V2_READ)
        assert await reader.read() == b""


async def test_a_v2_add_of_a_scoped_entry_reaches_the_bookie_as_scope_0() -> None:
    body = bytes.fromhex("a3 0000000000000007 0000000000000001 0000000000000000") + bytes(40)

    bookie = Handler(lambda request: refusal(request, Status.EBADREQ))
    async with serving(bookie) as server, raw(server.port) as (reader, writer):
        writer.write(frame(bytes.fromhex("02010000") + KEY + body))
        answer = await read_frame(reader)
        assert answer[:8] == bytes.fromhex("02010000 00000064")
        assert answer[8:] == body[:16]
        (add,) = bookie.requests
        assert isinstance(add, AddRequest)
        assert (add.ledger.scope_id, add.body[0]) == (0, 0xA3)


# Back-pressure and limits.


async def test_client_that_reads_no_answers_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(100_000)

    bookie = Handler(lambda request: entry(request)._replace(body=body))  # type: ignore[call-arg]
    async with serving(bookie) as server, raw(server.port) as (reader, writer):
        count = 2000
        writer.write(V2_READ * count)
        seen = -1
        while seen != len(bookie.requests) or not seen:
            seen = len(bookie.requests)
            await asyncio.sleep(0.05)
        # Kernel buffers, the stream's limit and our own 1 MiB: far from the 200 MB asked for.
        assert 0 < seen < count // 2
        for _ in range(count):
            assert len(await read_frame(reader)) == 24 + len(body)
        assert len(bookie.requests) == count


@pytest.mark.parametrize("leaves", [False, True])
def test_reads_of_the_disk_wait_for_a_client_that_is_behind(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    monkeypatch.setattr(backpressure, "READS_IN_PROGRESS_MAX", 8)
    body, count = bytes(100_000), 2000
    begun: list[int] = []
    in_progress: set[asyncio.Future[bytes]] = set()
    most = 0

    class Disk:
        server: BookieServer

        def handle(self, request: Request, respond: Respond) -> None:
            def start() -> asyncio.Future[bytes]:
                nonlocal most
                begun.append(1)
                future = asyncio.get_running_loop().run_in_executor(None, lambda: body)
                in_progress.add(future)
                most = max(most, len(in_progress))
                future.add_done_callback(in_progress.discard)
                future.add_done_callback(lambda read: respond(ReadResponse(Status.EOK, LEDGER, 1, read.result())))
                return future

            respond.read(start)

    async def main() -> None:
        disk = Disk()
        async with serving(disk) as server, raw(server.port) as (reader, writer):
            disk.server = server
            writer.write(V2_READ * count)
            seen, unchanged = -1, 0
            while unchanged < 10:
                unchanged = unchanged + 1 if begun and seen == len(begun) else 0
                seen = len(begun)
                await asyncio.sleep(0.05)
            assert seen < count // 2
            assert most == 8
            if leaves:
                writer.transport.abort()
                while server.connections:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                assert len(begun) <= seen + 8
                return
            for _ in range(count):
                assert len(await read_frame(reader)) == 24 + len(body)
            assert len(begun) == count

    runner(main())


async def test_a_bookie_that_answers_late_gets_a_bounded_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "IN_FLIGHT_REQUESTS_MAX", 100)

    bookie = Holding()
    async with serving(bookie) as server, connected(server.port) as connection:
        reads = [connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(1000)]
        await bookie.wait_for(100)
        await asyncio.sleep(0.05)
        answered = 0
        while answered < 1000:
            assert len(bookie.held) - answered <= 100
            request, respond = (await bookie.wait_for(answered + 1))[answered]
            respond(entry(request))
            answered += 1
        assert [cast_read(answer).entry_id for answer in await asyncio.gather(*reads)] == list(range(1000))


async def test_bytes_in_flight_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "IN_FLIGHT_BYTES_MAX", 1_000_000)

    bookie = Holding()
    async with serving(bookie) as server, connected(server.port) as connection:
        adds = [connection.send(AddRequest(LEDGER, n, KEY, bytes(100_000))) for n in range(50)]
        await bookie.wait_for(10)
        await asyncio.sleep(0.05)
        assert len(bookie.held) == 10
        for number in range(50):
            request, respond = (await bookie.wait_for(number + 1))[number]
            respond(entry(request))
        assert len(await asyncio.gather(*adds)) == 50


async def test_partial_frame_holds_only_received_bytes() -> None:
    """A length of 5 MB costs nothing before its bytes come."""

    async with serving(Handler(entry)) as server:
        writers = []
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(40):
            _, writer = await asyncio.open_connection(HOST, server.port)
            writer.write((5_000_000).to_bytes(4, "big") + b"x" * 100)
            writers.append(writer)
        while len(server.connections) < 40:
            await asyncio.sleep(0.01)
        await turns()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(server.connections) == 40
        assert after - before < 40 * 500_000
        for writer in writers:
            writer.close()


async def test_unknown_fields_hold_only_their_bytes() -> None:
    """A 5 MB request of empty logging contexts and unknown fields is answered as any other."""
    request = v3_request(1, ReadRequest(LEDGER, 1))[4:]

    async with serving(Handler(entry)) as server, raw(server.port) as (reader, writer):
        for filler in (b"\xc2\x0c\x00", b"\xf8\x07\x01"):
            writer.write(frame(request + filler * 1_500_000))
            assert (await read_response(reader)).response == entry(ReadRequest(LEDGER, 1))


# Closing.


@pytest.mark.parametrize("protocol", Protocol)
async def test_close_answers_requests_in_flight_and_reads_no_more(protocol: Protocol) -> None:
    async def free_port() -> int:
        with socket.create_server((HOST, 0)) as listener:
            return int(listener.getsockname()[1])

    bookie = Holding()
    server = BookieServer(bookie)
    await server.start(HOST)
    async with connected(server.port, protocol) as connection:
        reads = [connection.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(3)]
        held = list(await bookie.wait_for(3))
        closing = asyncio.create_task(server.close(grace_s=60))
        await turns()
        late = connection.send(ReadRequest(LEDGER, 9))
        for request, respond in held:
            respond(entry(request))
        for entry_id, answer in enumerate(await asyncio.gather(*reads)):
            assert cast_read(answer).entry_id == entry_id
        with pytest.raises(BookieUnavailable):
            await late
        await closing
        assert len(bookie.held) == 3
        with pytest.raises(BookieUnavailable):
            await BookieConnection.open(HOST, await free_port(), bookie_id="b")


async def test_close_gives_up_after_its_grace() -> None:
    bookie = Holding()
    server = BookieServer(bookie)
    await server.start(HOST)
    async with connected(server.port) as connection:
        read = connection.send(ReadRequest(LEDGER, 1))
        ((request, respond),) = await bookie.wait_for(1)
        await server.close(grace_s=0.05)
        with pytest.raises(BookieUnavailable):
            await read
        respond(entry(request))  # too late, and harmless
        assert not server.connections


async def test_an_answer_to_a_client_that_left_is_dropped() -> None:
    bookie = Holding()
    async with serving(bookie) as server:
        async with connected(server.port) as connection:
            read = connection.send(ReadRequest(LEDGER, 1))
            held = await bookie.wait_for(1)
        with pytest.raises(BookieUnavailable):
            await read
        while server.connections:
            await asyncio.sleep(0.002)
        held[0][1](entry(held[0][0]))
        async with connected(server.port) as connection:
            read = connection.send(ReadRequest(LEDGER, 1))
            request, respond = (await bookie.wait_for(2))[1]
            respond(entry(request))
            assert (await read).status is Status.EOK


# Hostile bytes: the connection closes or gives an answer, and the next one is served as ever.

CHUNKS = st.lists(
    st.one_of(
        st.binary(max_size=64),
        st.binary(max_size=64).map(frame),
        st.integers(-3, 1 << 31).map(lambda size: (size & 0xFFFFFFFF).to_bytes(4, "big")),
        st.just(V2_READ),
        st.just(v3_request(1, ReadRequest(LEDGER, 1))),
        st.tuples(
            st.sampled_from([V2_READ, v3_request(1, AddRequest(LEDGER, 1, KEY, bytes(50)))]), st.integers(1, 20)
        ).map(lambda pair: pair[0][: -pair[1]]),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(chunks=CHUNKS)
def test_no_bytes_harm_the_bookie(chunks: list[bytes]) -> None:
    async def main() -> None:
        async with serving(Handler(entry)) as server:
            async with raw(server.port) as (reader, writer):
                for chunk in chunks:
                    writer.write(chunk)
                    await asyncio.sleep(0)
                with contextlib.suppress(OSError):
                    writer.write_eof()
                async with asyncio.timeout(LIMIT_S):
                    with contextlib.suppress(ConnectionError):
                        await reader.read()
            async with connected(server.port) as connection:
                assert (await connection.send(ReadRequest(LEDGER, 1))).status is Status.EOK

    asyncio.run(main())


@settings(deadline=None, max_examples=60)
@given(chunks=CHUNKS, protocol=st.sampled_from(Protocol))
def test_no_bytes_harm_the_client(chunks: list[bytes], protocol: Protocol) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(10)
        for chunk in chunks:
            writer.write(chunk)
            await asyncio.sleep(0)

    async def main() -> None:
        async with scripted(script) as port, connected(port, protocol) as connection:
            with pytest.raises((ProtocolError, BookieUnavailable)):
                await asyncio.wait_for(connection.send(ReadRequest(LEDGER, 7)), LIMIT_S)

    asyncio.run(main())


def test_names_that_do_not_resolve_delay_neither_other_names_nor_the_end_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released = threading.Event()
    resolve = socket.getaddrinfo

    def slow(host: Any, *args: Any, **options: Any) -> Any:
        if str(host).startswith("slow"):
            released.wait(60)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **options)

    async def connect() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        waiting = [
            asyncio.create_task(BookieConnection.open(f"slow{at}", port, bookie_id=f"b{at}", timeout_s=LIMIT_S))
            for at in range(50)
        ]
        await asyncio.sleep(0)
        connection = await BookieConnection.open("localhost", port, bookie_id="b", timeout_s=30)
        connection.close()
        await connection.wait_closed()
        with pytest.raises(BookieUnavailable, match="no answer within"):
            await BookieConnection.open("slow", port, bookie_id="s", timeout_s=0.05)
        await cancel_and_wait(*waiting)
        server.close()

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        began = time.monotonic()
        asyncio.run(connect())
        assert time.monotonic() - began < 45
    finally:
        released.set()


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_connection_to_a_bookie_that_reads_nothing_is_given_up(protocol: Protocol) -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def mute(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(mute, "127.0.0.1", 0, limit=1)
    port = server.sockets[0].getsockname()[1]
    connection = await BookieConnection.open("127.0.0.1", port, bookie_id="b", protocol=protocol, timeout_s=0.1)
    body = bytes(4 << 20)
    for _ in range(1000):
        adds = [connection.send(AddRequest(LEDGER, entry_id, bytes(20), body)) for entry_id in range(4)]
        await asyncio.wait(adds)
        if connection.closed:
            break
    assert connection.closed
    await connection.wait_closed()
    with pytest.raises(BookieUnavailable, match="did not read its requests"):
        await connection.send(ReadRequest(LEDGER, 0))
    for writer in accepted:
        writer.transport.abort()
    server.close()
