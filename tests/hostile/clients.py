"""Hostile clients of a bookie: what they send comes from `frames` and `requests`; how they send it is here."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
import struct
from collections import Counter
from typing import Any, Final

from hostile.frames import HUGE_BYTES, Frames
from hostile.requests import HttpRequests

from bkctl.protocol import v3
from bkctl.protocol.messages import StartTlsRequest

HOST: Final = "127.0.0.1"
#: Connections at a time, to one port.
WIDTH: Final = 12
SLOW_WIDTH: Final = 40
#: The beginning of a TLS handshake.
CLIENT_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)
#: A client that cannot send leaves.
PATIENCE_S: Final = 60.0
#: A client that sends nothing more stays, unless it is disconnected.
LINGER_S: Final = 8.0


def start_tls() -> bytes:
    out: list[Any] = []
    v3.encode_request(1, StartTlsRequest(), out)
    return b"".join(map(bytes, out))


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Siege:
    """Hostile clients of one bookie, as many as it is asked for; `frames` and `requests` count what was sent."""

    def __init__(self, seed: int, bookie_port: int, http_port: int, *, is_https: bool, token: str) -> None:
        self.chance = random.Random(seed)
        self.made = Frames(seed)
        self.made_http = HttpRequests(seed, token)
        self.frames = self.requests = self.slow = 0
        #: Answers that were read: bytes of the bookie's answers, and HTTP answers by status.
        self.heard: Counter[str] = Counter()
        self._ports = (bookie_port, http_port)
        self._tls = client_context()
        self._is_https = is_https

    async def run(self, frames: int, requests: int, slow: int) -> None:
        """Send that many frames and HTTP requests, with `slow` connections beside them that finish nothing."""
        await asyncio.gather(
            *(self._send_frames(frames) for _ in range(WIDTH)),
            *(self._send_requests(requests) for _ in range(WIDTH // 2)),
            self._stay(slow),
        )

    async def _send_frames(self, most: int) -> None:
        while self.frames < most:
            count = min(self.chance.choice((1, 2, 5, 10)), most - self.frames)
            self.frames += count
            data = self.made.stream(count)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                is_tls = self.chance.random() < 0.25
                heard = await self._exchange(*await self._connect_to_bookie(is_tls=is_tls), data)
                self.heard["frames"] += len(heard)

    async def _connect_to_bookie(self, *, is_tls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(HOST, self._ports[0])
        if is_tls:
            try:
                writer.write(start_tls())
                await reader.readexactly(struct.unpack(">i", await reader.readexactly(4))[0])
                await writer.start_tls(self._tls, ssl_handshake_timeout=PATIENCE_S)
            except BaseException:
                writer.transport.abort()
                raise
        return reader, writer

    async def _send_requests(self, most: int) -> None:
        while self.requests < most:
            count = min(self.chance.choice((1, 3, 8)), most - self.requests)
            self.requests += count
            data = self.made_http.stream(count)
            with contextlib.suppress(OSError):
                is_tls = self._is_https and self.chance.random() < 0.95
                opened = await asyncio.open_connection(HOST, self._ports[1], ssl=self._tls if is_tls else None)
                for status in re.findall(rb"HTTP/1.1 (\d{3})", await self._exchange(*opened, data)):
                    self.heard[f"HTTP {status.decode()}"] += 1

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bytes:
        """Send `data`, cut anywhere; return what was read, for a while, for a moment, or not at all."""
        chance = self.chance
        heard = b""
        try:
            while data:
                size = chance.choice((len(data), 1 + chance.randrange(len(data))))
                writer.write(data[:size])
                data = data[size:]
                await asyncio.wait_for(writer.drain(), PATIENCE_S)
            for _ in range(chance.choice((0, 0, 1, 3))):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        heard += await reader.read(1 << 16)
        except (TimeoutError, OSError):
            pass
        finally:
            if chance.random() < 0.5:
                writer.transport.abort()
            else:
                writer.close()
        return heard

    async def _stay(self, count: int) -> None:
        """Hold `count` connections, SLOW_WIDTH at a time: mute, stopped in a request or a handshake, or trickling."""
        numbers = iter(range(count))

        async def stay() -> None:
            for number in numbers:
                await self._linger(number)

        await asyncio.gather(*(stay() for _ in range(SLOW_WIDTH)))

    async def _linger(self, number: int) -> None:
        """Send a part of something and wait until the bookie ends the connection."""
        chance = self.chance
        begun = (
            b"",
            b"\x00",
            self.made.stream(1)[:-1],
            struct.pack(">i", 250_000) + bytes(200_000),
            struct.pack(">i", HUGE_BYTES) + bytes(1_000_000),
            start_tls() + CLIENT_HELLO,
        )
        for_http = (
            b"",
            CLIENT_HELLO,
            b"GET /heartbeat HTTP/1.1\r\nHost: loc",
            b"PUT / HTTP/1.1\r\nContent-Length: 9\r\n",
        )
        is_http = number % 4 == 0
        port, data = self._ports[is_http], chance.choice(for_http if is_http else begun)
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(HOST, port)
            self.slow += 1
            try:
                writer.write(data)
                async with asyncio.timeout(LINGER_S):
                    while not reader.at_eof():
                        if number % 3 == 0:
                            writer.write(b"\x00")
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.3):
                                await reader.read(1 << 16)
            finally:
                writer.transport.abort()
