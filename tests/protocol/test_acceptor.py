"""Connections before they are served: bounds at accept, handshakes, and no descriptors left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.descriptors import descriptors_used_up
from support.waiting import LIMIT_S

from bkctl.protocol import acceptor as acceptor_module
from bkctl.protocol.acceptor import Acceptor, claim_port, share_of_descriptors

HOST = "127.0.0.1"
Runner = Callable[[Coroutine[Any, Any, None]], None]


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    is_mute = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.is_mute = False
        self.transport.write(data)  # type: ignore[attr-defined]

    def abort(self) -> None:
        self.transport.abort()  # type: ignore[attr-defined]


def tls_of(pem: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context


@contextlib.asynccontextmanager
async def accepting(connections_max: int, **options: Any) -> AsyncIterator[Acceptor]:
    listener = socket.create_server((HOST, 0), backlog=1024)
    acceptor = Acceptor([listener], Echo, connections_max=connections_max, ended=Counter(), **options)
    try:
        yield acceptor
    finally:
        acceptor.close()
        await acceptor.wait_closed()


async def connect(acceptor: Acceptor, tls: ssl.SSLContext | None = None) -> Any:
    return await asyncio.open_connection(HOST, acceptor.port, ssl=tls)


async def echoes(streams: Any) -> bool:
    """Return True if the server serves that connection, False if it closed it."""
    reader, writer = streams
    try:
        writer.write(b"x")
        return bool(await reader.read(1) == b"x")
    except OSError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_connections_beyond_the_bound_are_closed_and_leave_room_again(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with accepting(3) as acceptor:
            served = [await connect(acceptor) for _ in range(3)]
            assert [await echoes(each) for each in served] == [True] * 3
            refused = [await connect(acceptor) for _ in range(5)]
            assert [await echoes(each) for each in refused] == [False] * 5
            assert acceptor.open == 3
            assert acceptor.ended == {"connections": 5}
            for _, writer in served:
                writer.close()
            await until(lambda: acceptor.open == 0)
            again = await connect(acceptor)
            assert await echoes(again)
            for _, writer in (*refused, again):
                writer.close()
            await until(lambda: acceptor.open == 0)

    runner(main())
    assert len([each for each in caplog.records if "turned away" in each.getMessage()]) == 1


def test_mute_connections_leave_their_places_to_others_the_oldest_first(
    runner: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with accepting(4) as acceptor:
            spoke = await connect(acceptor)
            assert await echoes(spoke)
            mute = [await connect(acceptor) for _ in range(3)]
            await until(lambda: acceptor.open == 4)
            for count in (1, 2):
                other = await connect(acceptor)
                assert await echoes(other)
                assert await mute[count - 1][0].read() == b""
                other[1].close()
                await until(lambda: acceptor.open == 3)
                assert acceptor.ended == {"connections": count}
                spare = await connect(acceptor)
                assert await echoes(spare)
                mute.append(spare)
                await until(lambda: acceptor.open == 4)
            assert await echoes(spoke)
            assert await echoes(mute[2])
            refused = await connect(acceptor)
            assert not await echoes(refused), "none is mute"
            for _, writer in (spoke, refused, *mute):
                writer.close()
            await until(lambda: acceptor.open == 0)
            assert not acceptor._newcomers

    runner(main())


def test_handshakes_leave_their_places_to_others(runner: Runner, pem: Path) -> None:
    async def main() -> None:
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with accepting(3, tls=tls_of(pem), handshake_timeout_s=3600) as acceptor:
            mute = [await connect(acceptor) for _ in range(20)]
            await until(lambda: acceptor.ended["connections"] == 17)
            served = [await connect(acceptor, ssl.create_default_context(cafile=pem)) for _ in range(3)]
            assert [await echoes(each) for each in served] == [True] * 3
            assert [await each[0].read() for each in mute] == [b""] * 20
            assert acceptor.ended == {"connections": 20}
            for _, writer in (*mute, *served):
                writer.close()
            await until(lambda: acceptor.open == 0)
        assert not wrong

    runner(main())


def test_connections_in_a_handshake_count_and_end_soon(
    runner: Runner, pem: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with accepting(4, tls=tls_of(pem), handshake_timeout_s=0.5) as acceptor:
            mute = [await connect(acceptor) for _ in range(12)]
            await until(lambda: acceptor.ended["connections"] == 8)
            assert acceptor.open == 4
            for reader, _ in mute:
                with contextlib.suppress(OSError):
                    assert await reader.read() == b""
            await until(lambda: acceptor.open == 0)
            assert acceptor.ended["handshake"] == 4
            acceptor._tls["ssl_handshake_timeout"] = LIMIT_S
            streams = await connect(acceptor, ssl.create_default_context(cafile=pem))
            assert await echoes(streams)
            for _, writer in (*mute, streams):
                writer.close()
            await until(lambda: acceptor.open == 0)
        assert not wrong

    runner(main())
    assert not [each for each in caplog.records if each.exc_info]


def test_failed_handshakes_leave_no_garbage(runner: Runner, pem: Path) -> None:
    """256 KiB of buffer each, in cycles that the collector looks at seldom: 240 a second took 20 MB a second."""

    def left() -> int:
        return sum(type(each).__name__ == "SSLProtocol" for each in gc.get_objects())

    async def main() -> None:
        async with accepting(0, tls=tls_of(pem)) as acceptor:
            gc.collect()
            gc.disable()
            try:
                for _ in range(20):
                    reader, writer = await connect(acceptor)
                    writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 600)
                    with contextlib.suppress(OSError):
                        await reader.read()
                    writer.close()
                await until(lambda: acceptor.open == 0 and acceptor.ended["handshake"] == 20)
                assert left() <= 1
            finally:
                gc.enable()

    runner(main())


def test_without_descriptors_connections_wait_and_are_served_later(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor_module, "ACCEPT_PAUSE_S", 0.05)

    async def main() -> None:
        wrong: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with accepting(0) as acceptor:
            waiting = [socket.socket() for _ in range(5)]
            with descriptors_used_up():
                for each in waiting:
                    each.connect((HOST, acceptor.port))
                await until(lambda: acceptor.ended["descriptors"] >= 3)
                assert acceptor.open == 0
            await until(lambda: acceptor.open == 5)
            streams = await connect(acceptor)
            assert await echoes(streams)
            streams[1].close()
            for each in waiting:
                each.close()
            await until(lambda: acceptor.open == 0)
        assert not wrong

    runner(main())
    (said,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert "Too many open files" in said.getMessage()


def test_an_error_of_one_connection_does_not_end_accepting(runner: Runner) -> None:
    class Reset(socket.socket):
        """A listening socket whose first client is gone before it is accepted."""

        failures: ClassVar = [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN]

        def accept(self) -> Any:
            if self.failures:
                code = self.failures.pop()
                raise OSError(code, "accept")
            return super().accept()

    async def main() -> None:
        listener = Reset()
        listener.bind((HOST, 0))
        listener.listen()
        acceptor = Acceptor([listener], Echo, connections_max=0, ended=Counter())
        streams = await connect(acceptor)
        assert await echoes(streams)
        streams[1].close()
        await until(lambda: acceptor.open == 0)
        acceptor.close()
        assert not acceptor.ended

    runner(main())


def test_the_share_of_descriptors_follows_the_process_and_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {300: (150, 100), 1: (1, 1), resource.RLIM_INFINITY: (0, 100)}
    for limit, (unbounded, bounded) in limits.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert share_of_descriptors(2, 0) == unbounded
        assert share_of_descriptors(2, 100) == bounded


async def test_claimed_port_refuses_clients_and_servers_until_it_is_served() -> None:
    claimed = await claim_port(HOST, 0)
    port = claimed[0].getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, port)
    for reuse in (False, True):
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="in use"):
                other.bind((HOST, port))
    with pytest.raises(OSError, match="in use"):
        await claim_port(HOST, port)
    for _ in range(2):  # the second server finds connections of the first one in TIME_WAIT
        acceptor = await Acceptor.listen(HOST, port, Echo, connections_max=0, ended=Counter(), claimed=claimed)
        with pytest.raises(OSError, match="in use"):
            await claim_port(HOST, port)
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"
        acceptor.close()
        await acceptor.wait_closed()
        claimed = await claim_port(HOST, port)
        writer.close()
        await writer.wait_closed()
    for listener in claimed:
        listener.close()
