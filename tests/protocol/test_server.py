"""Limits of a bookie's server over all its clients: the bounds of ServerLimits."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import BookieUnavailable
from bkctl.ids import LedgerId
from bkctl.protocol import backpressure, v2, v3
from bkctl.protocol import server as server_module
from bkctl.protocol.backpressure import ServerLimits
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    Protocol,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
    refusal,
)
from bkctl.protocol.server import BookieServer

HOST = "127.0.0.1"
LEDGER = LedgerId(0, 5)
KEY = b"k" * 20
KIB = 1024

Runner = Callable[[Coroutine[Any, Any, None]], None]


class Holding:
    """A bookie that answers when the test says so."""

    def __init__(self) -> None:
        self.held: list[tuple[Request, Responder]] = []

    def handle(self, request: Request, respond: Responder) -> None:
        self.held.append((request, respond))

    def answer(self, count: int) -> None:
        for request, respond in self.held[:count]:
            respond(answer(request))
        del self.held[:count]


def answer(request: Request) -> Response:
    if isinstance(request, AddRequest):
        return AddResponse(Status.EOK, request.ledger, request.entry_id)
    assert isinstance(request, ReadRequest)
    return ReadResponse(Status.EOK, request.ledger, request.entry_id, b"body")


@contextlib.asynccontextmanager
async def serving(handler: Any, **limits: Any) -> AsyncIterator[BookieServer]:
    server = BookieServer(handler, limits=ServerLimits(**limits))
    await server.start(HOST)
    try:
        yield server
    finally:
        await server.close(grace_s=0.1)


@contextlib.asynccontextmanager
async def clients(server: BookieServer, count: int, protocol: Protocol = Protocol.V3) -> AsyncIterator[list[Any]]:
    opened = [
        await BookieConnection.open(HOST, server.port, bookie_id="bookie", protocol=protocol) for _ in range(count)
    ]
    try:
        yield opened
    finally:
        for each in opened:
            each.close()
            await each.wait_closed()


def adds(client: BookieConnection, count: int, size: int = 100) -> list[asyncio.Future[Response]]:
    bodies = [struct.pack(">qq", LEDGER.ledger_id, entry_id) + bytes(size - 16) for entry_id in range(count)]
    return [client.send(AddRequest(LEDGER, entry_id, KEY, body)) for entry_id, body in enumerate(bodies)]


async def settled(value: Callable[[], int]) -> int:
    """`value` once it no longer changes."""
    seen, unchanged = -1, 0
    while unchanged < 10:
        unchanged = unchanged + 1 if seen and seen == value() else 0
        seen = value()
        await asyncio.sleep(0.02)
    return seen


async def test_requests_in_flight_are_bounded_over_all_clients() -> None:
    bookie = Holding()
    limit = 2000 * KIB
    async with serving(bookie, in_flight_bytes=limit) as server, clients(server, 8) as opened:
        sent = [future for client in opened for future in adds(client, 60, 100 * KIB)]  # 48 MB
        # One buffer beyond the bound for each client, and no more.
        most = limit + 8 * (256 + 2 * 100) * KIB
        assert await settled(lambda: len(bookie.held)) * 100 * KIB < most
        while any(not future.done() for future in sent):
            assert server.in_flight.bytes < most
            bookie.answer(1 + len(bookie.held) // 2)
            await asyncio.sleep(0)
        assert {(await future).status for future in sent} == {Status.EOK}
        assert server.in_flight.bytes == 0


class HoldsReads(Holding):
    """A bookie that answers adds in the loop's next turn, and reads when the test says so."""

    def handle(self, request: Request, respond: Responder) -> None:
        if isinstance(request, ReadRequest):
            super().handle(request, respond)
        else:
            asyncio.get_running_loop().call_soon(respond, answer(request))


def padded_reads() -> dict[str, bytes]:
    """Frames of 400 KB that ask for one entry."""
    padding = bytes(400_000)
    requests = {
        "v3, with a key that nothing needs": ReadRequest(LEDGER, -1, padding, previous_lac=0, timeout_ms=3_600_000),
        "v3, with a key of no ledger": ReadRequest(LEDGER, 0, padding, fence=True),
    }
    frames = {}
    for name, request in requests.items():
        out: list[Any] = []
        v3.encode_request(1, request, out)
        frames[name] = b"".join(out)
    plain: list[Any] = []
    v2.encode_request(ReadRequest(LEDGER, 0), plain)
    frames["v2"] = struct.pack(">i", 20 + len(padding)) + b"".join(plain)[4:] + padding
    return frames


@pytest.mark.parametrize("kind", padded_reads())
async def test_reads_count_what_is_kept_of_them_however_large_their_frames_are(kind: str) -> None:
    """Each counted its frame for as long as it waited, up to an hour: eleven of one client stopped the adds of all."""
    bookie = HoldsReads()
    async with serving(bookie, in_flight_bytes=4 << 20) as server, clients(server, 1) as (client,):
        _, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(padded_reads()[kind] * 11)
        while len(bookie.held) < 11:
            await asyncio.sleep(0.01)
        for request, _ in bookie.held:
            assert isinstance(request, ReadRequest)
            assert len(request.master_key or b"") <= 21
        assert server.in_flight.bytes < 1 * KIB
        for _ in range(3):
            assert {each.status for each in await asyncio.gather(*adds(client, 1))} == {Status.EOK}
        writer.close()
        bookie.answer(11)


class Prompt:
    """A bookie that answers at once."""

    def handle(self, request: Request, respond: Responder) -> None:
        respond(answer(request))


async def begin_requests(server: BookieServer, count: int, size: int, sent: int) -> list[asyncio.StreamWriter]:
    """Clients that send the first `sent` bytes of a request of `size` bytes, and no more."""
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(struct.pack(">i", size) + bytes(sent - 4))
        writers.append(writer)
    return writers


async def test_unfinished_requests_are_bounded_and_do_not_block_other_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, count = 4 << 20, 24
    most = limit + count * (2 << 20)
    clock = types.SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(backpressure, "time", clock)
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.01)

    async with serving(Prompt(), unfinished_bytes=limit) as server, clients(server, 1) as (client,):
        assert {each.status for each in await asyncio.gather(*adds(client, 1))} == {Status.EOK}
        (served,) = server.connections
        writers = await begin_requests(server, count, 5_000_000, 4_900_000)
        assert limit < await settled(lambda: server.unfinished.bytes) < most, "not 118 MB"
        assert len(server.connections) == count + 1, "nobody was ended yet"
        small = await asyncio.gather(*adds(client, 200))
        assert {each.status for each in small} == {Status.EOK}, "small requests go on in any case"
        large = asyncio.gather(*adds(client, 8, 1_000_000))
        while not large.done():
            if server.unfinished.is_halted(served):
                clock.now_s += 2 * backpressure.STALLED_FRAME_S
            assert server.unfinished.bytes < most
            await asyncio.sleep(0.01)
        assert {each.status for each in await large} == {Status.EOK}
        assert len(server.connections) < count + 1
        for writer in writers:
            writer.close()
        while len(server.connections) > 1:
            await asyncio.sleep(0.01)
        assert server.unfinished.bytes == 0


async def test_unfinished_requests_of_any_size_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """900 clients that each send 200 KiB of a request: none of it was counted while it was below 256 KiB."""
    limit, count, sent = 2 << 20, 60, 200 * KIB
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.01)
    monkeypatch.setattr(backpressure, "STALLED_FRAME_S", 3600.0)

    async with serving(Prompt(), unfinished_bytes=limit, request_ms=0, first_request_ms=0) as server:
        writers = await begin_requests(server, count, 250 * KIB, sent)
        while len(server.connections) < count or server.unfinished.bytes <= limit:
            await asyncio.sleep(0.01)
        await settled(lambda: server.unfinished.bytes)
        held = sum(len(each._buffer) for each in server.connections)
        assert held < limit + 2 * sent + count * 12 * KIB, f"{held} bytes of {count * sent}"
        for writer in writers:
            writer.close()
        while server.connections:
            await asyncio.sleep(0.01)
        assert server.unfinished.bytes == 0


async def test_a_connection_that_is_quiet_keeps_no_large_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.05)

    async with serving(Prompt()) as server, clients(server, 4) as opened:
        for client in opened:
            assert {each.status for each in await asyncio.gather(*adds(client, 40, 60 * KIB))} == {Status.EOK}
        while sum(len(each._buffer) for each in server.connections) > 4 * 8 * KIB:
            await asyncio.sleep(0.01)
        for client in opened:
            assert {each.status for each in await asyncio.gather(*adds(client, 40, 60 * KIB))} == {Status.EOK}


def first_bytes_of_requests() -> dict[str, tuple[str, bytes]]:
    """By name: why the server ends a client that sends so much and no more, and the bytes."""
    (request,) = (b"".join(map(bytes, out)) for out in [[]] if v2.encode_request(ReadRequest(LEDGER, 0), out))
    return {
        "nothing": ("mute", b""),
        "a part of a length": ("mute", request[:2]),
        "a part of the first request": ("mute", request[:-1]),
        "a part of the second request": ("unfinished", request + request[:9]),
        "a part of a large request": ("unfinished", request + struct.pack(">i", 1 << 20) + bytes(300 * KIB)),
    }


@pytest.mark.parametrize("kind", first_bytes_of_requests())
async def test_clients_that_do_not_finish_a_request_are_disconnected(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.05)
    reason, sent = first_bytes_of_requests()[kind]

    async with serving(Prompt(), first_request_ms=200, request_ms=200) as server, clients(server, 1) as (client,):
        assert {each.status for each in await asyncio.gather(*adds(client, 1))} == {Status.EOK}
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(1 << 16):
                pass
        writer.close()
        assert server.ended == {reason: 1}
        assert {each.status for each in await asyncio.gather(*adds(client, 1))} == {Status.EOK}, "a quiet client"


@pytest.mark.parametrize("protocol", Protocol)
async def test_client_with_a_request_takes_the_place_of_a_mute_one(protocol: Protocol) -> None:
    sent = [sent for reason, sent in first_bytes_of_requests().values() if reason == "mute"]
    count = 6
    async with serving(Prompt(), connections=count) as server:
        mute = [await asyncio.open_connection(HOST, server.port) for _ in range(2 * count)]
        for number, (_, writer) in enumerate(mute):
            writer.write(sent[number % len(sent)])
        async with clients(server, count, protocol) as opened:
            for client in opened:
                assert {each.status for each in await asyncio.gather(*adds(client, 2))} == {Status.EOK}
            for reader, _ in mute:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert server.ended == {"connections": 2 * count}
            for client in opened:
                assert {each.status for each in await asyncio.gather(*adds(client, 2))} == {Status.EOK}
        for _, writer in mute:
            writer.close()


async def test_a_request_that_comes_by_the_byte_has_one_deadline_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.05)
    out: list[Any] = []
    v2.encode_request(ReadRequest(LEDGER, 0), out)
    request = b"".join(map(bytes, out))

    async with serving(Prompt(), request_ms=300) as server:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        writer.write(request)
        assert await reader.read(1 << 16)
        writer.write(struct.pack(">i", 1 << 20))
        with contextlib.suppress(OSError, RuntimeError):  # uvloop raises the latter
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        assert server.ended == {"unfinished": 1}


async def test_clients_that_wait_for_the_bookie_meet_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.02)

    bookie = Holding()
    limits = {"first_request_ms": 100, "request_ms": 100, "idle_ms": 100}
    async with serving(bookie, in_flight_bytes=300 * KIB, **limits) as server, clients(server, 1) as (client,):
        sent = adds(client, 20, 100 * KIB)  # most of it waits, partly in the middle of a request
        await settled(lambda: len(bookie.held))
        before = server.now_s
        while server.now_s < before + 1:
            await asyncio.sleep(0.01)
        assert not server.ended
        while any(not future.done() for future in sent):
            bookie.answer(len(bookie.held))
            await asyncio.sleep(0)
        while server.connections:  # no request and no answer is due any more
            await asyncio.sleep(0.01)
        assert server.ended == {"idle": 1}


async def test_large_requests_of_many_clients_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backpressure, "STALLED_FRAME_S", 3600.0)

    async with serving(Prompt(), unfinished_bytes=1 << 20) as server, clients(server, 12) as opened:
        sent = [future for client in opened for future in adds(client, 6, 1_500_000)]
        assert {(await future).status for future in sent} == {Status.EOK}
        assert server.unfinished.bytes == 0
        assert len(server.connections) == len(opened)


async def test_clients_beyond_the_limit_are_turned_away_until_others_leave() -> None:
    async with serving(Prompt(), connections=3) as server:
        async with clients(server, 3) as opened:
            for client in opened:
                assert {each.status for each in await asyncio.gather(*adds(client, 1))} == {Status.EOK}
            reader, writer = await asyncio.open_connection(HOST, server.port)
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
            assert len(server.connections) == 3
        while server.connections:
            await asyncio.sleep(0.01)
        bookie = server.handler = Holding()
        async with clients(server, 1) as (client,):
            (sent,) = adds(client, 1)
            while not bookie.held:
                await asyncio.sleep(0.01)
            bookie.answer(1)
            assert (await sent).status is Status.EOK


async def test_requests_of_clients_that_left_count_until_they_are_answered() -> None:
    bookie = Holding()
    async with serving(bookie, in_flight_bytes=1000 * KIB) as server:
        async with clients(server, 1) as (client,):
            for future in adds(client, 9, 100 * KIB):
                future.add_done_callback(lambda done: done.exception())
            while len(bookie.held) < 9:
                await asyncio.sleep(0.01)
        while server.connections:
            await asyncio.sleep(0.01)
        before = len(bookie.held)
        assert server.in_flight.bytes >= 900 * KIB
        async with clients(server, 1) as (client,):
            sent = adds(client, 20, 100 * KIB)
            first = await settled(lambda: len(bookie.held)) - before
            assert first < 6
            while any(not future.done() for future in sent):
                bookie.answer(len(bookie.held))
                await asyncio.sleep(0)
        assert server.in_flight.bytes == 0


class HoldingRuns(Holding):
    """A bookie that takes many requests at once, where a connection gives it many."""

    def adds_at_once(self) -> int:
        return 100

    def handle_adds(self, adds: Any, answer: Any) -> None:
        pytest.fail("a slot bounds single adds")

    handle_reads = handle_adds


@pytest.mark.parametrize("kind", [Holding, HoldingRuns])
@pytest.mark.parametrize("protocol", list(Protocol), ids=lambda each: each.name)
async def test_no_more_adds_are_in_progress_than_allowed_and_reads_have_a_bound_of_their_own(
    protocol: Protocol, kind: type[Holding]
) -> None:
    bookie = kind()
    async with (
        serving(bookie, adds_in_progress=3, reads_in_progress=2) as server,
        clients(server, 4, protocol) as opened,
    ):
        sent = [future for client in opened[:2] for future in adds(client, 20)]
        for client in opened[2:]:
            sent += [client.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(20)]
        while any(not future.done() for future in sent):
            kinds = [type(request) for request, _ in bookie.held]
            assert kinds.count(AddRequest) <= 3
            assert kinds.count(ReadRequest) <= 2
            bookie.answer(1)
            await asyncio.sleep(0)
        assert {(await future).status for future in sent} == {Status.EOK}


async def test_client_that_reads_no_answers_does_not_hold_slots() -> None:
    body = bytes(1 << 20)

    class Bookie:
        def handle(self, request: Request, respond: Responder) -> None:
            assert isinstance(request, ReadRequest)
            respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, body))

    async with serving(Bookie(), reads_in_progress=1) as server:
        _, writer = await asyncio.open_connection(HOST, server.port)
        for entry_id in range(100):
            out: list[Any] = []
            v2.encode_request(ReadRequest(LEDGER, entry_id), out)
            writer.writelines(out)
        async with clients(server, 2) as opened:
            for client in opened * 3:
                assert (await client.send(ReadRequest(LEDGER, 1))).status is Status.EOK
        writer.transport.abort()


class SlowToOpen:
    """Answers LACs at once, with 1 MiB, and reads from the disk, once `opened` is set."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def handle(self, request: Request, respond: Responder) -> None:
        if isinstance(request, ReadLacRequest):
            respond(ReadLacResponse(Status.EOK, request.ledger, bytes(1 << 20)))
        else:
            self._tasks.append(asyncio.create_task(self._read(request, respond)))

    async def _read(self, request: Request, respond: Responder) -> None:
        def start() -> asyncio.Future[Any]:
            read = asyncio.get_running_loop().create_future()
            read.add_done_callback(lambda _: respond(answer(request)))
            read.set_result(None)
            return read

        await self.opened.wait()
        assert respond.read(start)


@pytest.mark.parametrize("leaves", [False, True])
async def test_reads_that_wait_for_their_client_hold_no_slots(leaves: bool) -> None:
    bookie = SlowToOpen()
    async with serving(bookie, reads_in_progress=3) as server:
        slots = server.slots[ReadRequest]
        reader, writer = await asyncio.open_connection(HOST, server.port)
        out: list[Any] = []
        for txn_id in range(3):
            v3.encode_request(txn_id, ReadRequest(LEDGER, txn_id), out)
        for txn_id in range(3, 40):
            v3.encode_request(txn_id, ReadLacRequest(LEDGER), out)
        writer.writelines(out)
        await settled(lambda: server.unread.bytes)
        bookie.opened.set()
        async with clients(server, 2) as opened, asyncio.timeout(LIMIT_S):
            for client in opened * 3:
                assert (await client.send(ReadRequest(LEDGER, 1))).status is Status.EOK
        assert slots.free == 3
        if not leaves:
            for _ in range(40):
                assert slots.free <= 3
                await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
        writer.transport.abort()
        while server.connections:
            await asyncio.sleep(0.01)
        assert slots.free == 3


@pytest.mark.parametrize("closes", [True, False])
async def test_client_that_reads_no_answers_in_time_loses_them(closes: bool) -> None:
    body = bytes(1 << 20)

    bookie = Holding()
    limits = {"backpressure_wait_ms": 20, "closes_on_backpressure": closes}
    async with serving(bookie, **limits) as server:
        reader, writer = await asyncio.open_connection(HOST, server.port)
        for entry_id in range(60):
            out: list[Any] = []
            v2.encode_request(ReadRequest(LEDGER, entry_id), out)
            writer.writelines(out)
        while len(bookie.held) < 60:
            await asyncio.sleep(0.01)
        for number, (request, respond) in enumerate(bookie.held):
            assert isinstance(request, ReadRequest)
            respond(ReadResponse(Status.EOK, request.ledger, request.entry_id, body))
            if number == 30:
                await asyncio.sleep(0.2)  # the wait is over, whatever the kernel took
        if closes:
            while server.connections:
                await asyncio.sleep(0.01)
        else:
            seen = []
            while not seen or seen[-1] != 1000:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
                seen.append(int.from_bytes(frame[16:24]))
                if len(seen) == 31:
                    # It reads again, so it gets answers again.
                    out = []
                    v2.encode_request(ReadRequest(LEDGER, 1000), out)
                    writer.writelines(out)
                    while len(bookie.held) == 60:
                        await asyncio.sleep(0.01)
                    bookie.held[-1][1](answer(bookie.held[-1][0]))
            assert seen == [*range(31), 1000]
        writer.transport.abort()


@pytest.mark.parametrize("from_memory", [False, True], ids=["disk", "memory"])
def test_unread_answers_to_all_clients_have_a_bound(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, from_memory: bool
) -> None:
    monkeypatch.setattr(backpressure, "STALLED_FRAME_S", 0.2)
    monkeypatch.setattr(server_module, "STALL_CHECK_S", 0.05)
    monkeypatch.setattr(backpressure, "READS_IN_PROGRESS_MAX", 4)
    body, bound = bytes(4 << 20), 4 << 20
    peak_max = bound + (backpressure.READS_IN_PROGRESS_MAX + 1) * (len(body) + 64)
    peak = 0

    class Disk:
        def handle(self, request: Request, respond: Responder) -> None:
            assert isinstance(request, ReadRequest)
            done = functools.partial(self.done, request.entry_id, respond)
            if from_memory and not respond.is_congested:
                done()
                return

            def start() -> asyncio.Future[bytes]:
                future = asyncio.get_running_loop().run_in_executor(None, lambda: body)
                future.add_done_callback(done)
                return future

            assert respond.read(start)

        def done(self, entry_id: int, respond: Responder, *_: object) -> None:
            nonlocal peak
            respond(ReadResponse(Status.EOK, LEDGER, entry_id, body))
            peak = max(peak, server.unread.bytes)

    async def main() -> None:
        nonlocal server
        async with serving(Disk(), unread_bytes=bound) as server, contextlib.AsyncExitStack() as stack:
            for _ in range(64):
                _, writer = await asyncio.open_connection(HOST, server.port, limit=1 << 12)
                stack.callback(writer.transport.abort)
                out: list[Any] = []
                for entry_id in range(40):
                    v2.encode_request(ReadRequest(LEDGER, entry_id), out)
                writer.writelines(out)
            # Clients that do not read are ended until the others have room.
            async with clients(server, 1) as (client,):
                for entry_id in range(8):
                    assert (await client.send(ReadRequest(LEDGER, entry_id))).status is Status.EOK
            while peak <= peak_max and (not server.ended["unread"] or server.unread.is_full):
                await asyncio.sleep(0.01)
            assert peak <= peak_max
        assert server.unread.bytes == server.reads.count == 0

    server: Any = None
    runner(main())


async def test_reads_of_clients_that_do_not_read_leave_room_for_reads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backpressure, "READS_IN_PROGRESS_MAX", 4)
    body, count = bytes(1 << 20), 100

    class Disk:
        def handle(self, request: Request, respond: Responder) -> None:
            assert isinstance(request, ReadRequest)
            entry = ReadResponse(Status.EOK, request.ledger, request.entry_id, body)

            def start() -> asyncio.Future[None]:
                future = asyncio.get_running_loop().create_future()
                future.add_done_callback(lambda _: respond(entry))
                asyncio.get_running_loop().call_soon(future.set_result, None)
                return future

            if not respond.read(start):
                respond(refusal(request, Status.ETOOMANYREQUESTS))

    out: list[Any] = []
    for entry_id in range(count):
        v2.encode_request(ReadRequest(LEDGER, entry_id), out)
    async with serving(Disk(), reads_waiting=count) as server, clients(server, 1) as (client,):
        behind = []
        for number in range(2):
            behind.append(await asyncio.open_connection(HOST, server.port, limit=1 << 12))
            behind[-1][1].writelines(out)
            while sum(each.is_congested for each in server.connections) <= number:
                await asyncio.sleep(0.01)
        await settled(lambda: server.unread.bytes)
        assert not server.unread.is_full
        for entry_id in range(8):
            assert (await client.send(ReadRequest(LEDGER, entry_id))).status is Status.EOK
        for reader, writer in behind:  # nor are their own reads lost
            for _ in range(count):
                assert (await reader.readexactly(28 + len(body)))[8:12] == bytes(4)
            writer.close()
        assert server.reads.count == 0


def test_reads_beyond_those_that_may_wait_are_refused(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.protocol.backpressure.READS_IN_PROGRESS_MAX", 2)

    class Disk:
        server: BookieServer
        futures: list[asyncio.Future[bytes]]

        def handle(self, request: Request, respond: Responder) -> None:
            def start() -> asyncio.Future[bytes]:
                future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                future.add_done_callback(lambda _: respond(answer(request)))
                self.futures.append(future)
                return future

            if not respond.read(start):
                respond(refusal(request, Status.ETOOMANYREQUESTS))

    async def main() -> None:
        disk = Disk()
        disk.futures = []
        async with serving(disk, reads_waiting=5) as server:
            disk.server = server
            async with clients(server, 1) as (leaves,):
                for entry_id in range(10):
                    leaves.send(ReadRequest(LEDGER, entry_id)).add_done_callback(lambda done: done.exception())
                await settled(lambda: server.reads.count)
                assert server.reads.count == 5
            while server.connections:
                await asyncio.sleep(0.01)
            assert server.reads.count == 0, "of clients that left"
            for future in disk.futures:  # the disk works on them all the same
                future.set_result(b"")
            disk.futures.clear()
            await asyncio.sleep(0)
            async with clients(server, 1) as (client,):
                sent = [client.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(10)]
                assert {(await future).status for future in sent[7:]} == {Status.ETOOMANYREQUESTS}
                done = 0
                while not all(future.done() for future in sent):
                    for future in disk.futures[done:]:
                        if not future.done():
                            future.set_result(b"")
                        done += 1
                    await asyncio.sleep(0)
                assert {(await future).status for future in sent[:7]} == {Status.EOK}
            for future in disk.futures:
                if not future.done():
                    future.set_result(b"")

    runner(main())


async def test_reads_that_cannot_begin_leave_their_turns_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bkctl.protocol.backpressure.READS_IN_PROGRESS_MAX", 1)

    class Disk:
        can_begin = False

        def handle(self, request: Request, respond: Responder) -> None:
            def start() -> asyncio.Future[bytes]:
                if not self.can_begin:
                    raise RuntimeError("can't start new thread")
                future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                future.add_done_callback(lambda _: respond(answer(request)))
                future.set_result(b"")
                return future

            respond.read(start)

    disk = Disk()
    async with serving(disk) as server:
        for _ in range(2):
            async with clients(server, 1) as (client,):
                sent = [client.send(ReadRequest(LEDGER, entry_id)) for entry_id in range(3)]
                done, _ = await asyncio.wait(sent, timeout=LIMIT_S)
                assert {type(future.exception()) for future in done} == {BookieUnavailable}, len(done)
        disk.can_begin = True
        async with clients(server, 1) as (client,):
            found = await asyncio.wait_for(client.send(ReadRequest(LEDGER, 0)), LIMIT_S)
            assert found.status is Status.EOK
        while server.in_flight.bytes:
            await asyncio.sleep(0.01)
        assert server.reads.count == server.reads.in_progress_count == 0
    assert [record.message for record in caplog.records if record.name.startswith("bkctl")] == [
        "Disconnected a client whose read could not begin"
    ] * 2


async def test_on_lost_callback_runs_when_client_is_lost() -> None:
    bookie = Holding()
    told = []
    async with serving(bookie) as server:
        async with clients(server, 1) as (client,):
            client.send(ReadRequest(LEDGER, 1)).add_done_callback(lambda done: done.exception())
            await settled(lambda: len(bookie.held))
            lost = bookie.held[0][1].on_lost
            lost[lambda: told.append("told")] = None
        while not told:
            await asyncio.sleep(0.01)
        assert told == ["told"]


async def test_keepalive_settings_are_applied_to_clients() -> None:
    async with serving(Holding(), keepalive_idle_s=77, keepalive_count=3) as server, clients(server, 1):
        while not server.connections:
            await asyncio.sleep(0.01)
        (connection,) = server.connections
        assert connection._transport is not None
        found = connection._transport.get_extra_info("socket")
        assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
