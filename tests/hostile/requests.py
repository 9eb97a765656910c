"""A seeded generator of HTTP requests as hostile clients send them. None of them may change anything: with the token
come only GETs, and whatever else comes without it.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Final
from urllib.parse import quote

from bkctl.http import app

#: By path: the method, and the names that a query may have.
ENDPOINTS: Final = [(each.method, each.path, [value.name for value in each.values]) for each in app.ENDPOINTS]
#: Requests that change nothing.
READS: Final = [each for each in ENDPOINTS if each[0] == "GET" and each[1] != "/api/v1/bookie/sanity"]
KINDS: Final = {"endpoint": 6, "mutated": 4, "absurd": 2, "truncated": 1, "large": 0.2}
VALUES: Final = (
    "", "0", "-1", "1", "x", "true", "4294967297", str(1 << 40), str((1 << 63) - 1), str(1 << 63), str(1 << 64),
    "9" * 400, "1e9", "\x00", "../../etc/passwd", "%", "😀", "a" * 3000, "7/5", "127.0.0.1:1", "NaN", "1,2,3", " 1 ",
)  # fmt: skip
METHODS: Final = ("GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "get", "X", "CONNECT")
BODIES: Final = (
    b"", b"{}", b"[]", b"null", b'{"a":' * 2000, b"[" * 30_000, b'{"forceMajor": "x"}', b"\xff\xfe", b"x" * 70_000,
    b'{"a": 1, "a": 2}', b"9" * 5000,
)  # fmt: skip
ABSURD: Final = (
    b"\x00" * 4000, b"\r\n" * 5000, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
    b"GET http://evil/heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"PUT /heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    b"PUT /heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
)  # fmt: skip


class HttpRequests:
    """Requests of one seed; `kinds` counts what it gave."""

    def __init__(self, seed: int, token: str) -> None:
        self.chance = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self._token = token
        self._is_trusted = False

    def stream(self, count: int) -> bytes:
        """Return `count` requests for one connection, where the token comes with GETs or not at all."""
        self._is_trusted = self.chance.random() < 0.6
        return b"".join(self._request() for _ in range(count))

    def _request(self) -> bytes:
        kind = self.chance.choices(list(KINDS), list(KINDS.values()))[0]
        self.kinds[kind] += 1
        made: bytes = getattr(self, f"_{kind}")()
        return made

    def _endpoint(self) -> bytes:
        chance = self.chance
        method, path, names = chance.choice(READS if self._is_trusted else ENDPOINTS)
        if chance.random() < 0.2 and not self._is_trusted:
            method = chance.choice(METHODS)
        query = "&".join(
            f"{name}={quote(self._value())}" for name in (*names, "bookie", "ledger_id") if chance.random() < 0.5
        )
        token = self._token if self._is_trusted else chance.choice(("", "x", "0" * 5000))
        body = b"" if method == "GET" else chance.choice(BODIES)
        headers = [
            f"{method} {path}{'?' if query else ''}{query} HTTP/1.1",
            f"Host: {chance.choice(('localhost', '127.0.0.1', 'evil', ''))}",
            f"Authorization: {chance.choice(('Bearer', 'Bearer', 'Bearer', 'Basic'))} {token}",
            f"Content-Length: {len(body)}",
            chance.choice(
                ("Accept: */*", "Origin: http://evil", "Connection: close", "Content-Type: application/json")
            ),
        ]
        return "\r\n".join(headers).encode() + b"\r\n\r\n" + body

    def _value(self) -> str:
        return self.chance.choice(VALUES)

    def _mutated(self) -> bytes:
        chance = self.chance
        data = bytearray(self._endpoint())
        for _ in range(chance.choice((1, 1, 2, 6))):
            at = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(1, 30)]
                case 2:
                    data[at:at] = data[max(0, at - 40) : at]
                case _:
                    data[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
            if not data:
                break
        return bytes(data)

    def _absurd(self) -> bytes:
        return self.chance.choice(ABSURD)

    def _truncated(self) -> bytes:
        data = self._endpoint()
        return data[: self.chance.randrange(len(data))]

    def _large(self) -> bytes:
        return b"PUT /api/v1/bookie/gc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n" + bytes(
            4_000_000
        )
