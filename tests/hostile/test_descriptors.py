"""A bookie that may open few files, among clients that connect and stay mute."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile.clients import CLIENT_HELLO
from support.own_bookies import OwnBookie
from support.raw_http import call, http_port
from support.servers import DB, INTERLEAVED, SORTED, wait_for
from support.waiting import LIMIT_S

from bkctl.formats.entry import DigestManager, DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import BookieConnection
from bkctl.protocol.messages import AddRequest, ReadRequest, Status

LEDGER = LedgerId(0, 5)
#: Open files of the bookie, and connections that clients try to hold to each of its ports.
DESCRIPTORS, MUTE = 300, 500
LOG_BYTES_MAX = 64 * 1024
SETTINGS: dict[str, object] = {
    "httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": 0, "flushInterval": 50,
    "journalMaxSizeMB": 1, "logSizeLimit": 1 << 20, "serverFirstRequestTimeoutMs": 2000,
}  # fmt: skip


def add(entry_id: int) -> AddRequest:
    by, payload = DigestManager(LEDGER, DigestType.CRC32C, b"secret"), entry_id.to_bytes(4, "big") * 5000
    return AddRequest(LEDGER, entry_id, by.master_key, by.seal(entry_id, entry_id - 1, 0, payload) + payload)


def connect_and_stay_mute(stack: contextlib.ExitStack, port: int, count: int, sent: bytes = b"") -> None:
    """Open `count` connections, and again those that the bookie ends."""
    for _ in range(count):
        client = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            client.settimeout(5)
            client.connect(("127.0.0.1", port))
            client.sendall(sent)


@pytest.mark.parametrize(
    ("storage", "scheme"),
    [(SORTED, "https"), (INTERLEAVED, "http"), (DB, "https")],
    ids=["sorted", "interleaved", "db"],
)
def test_mute_connections_take_no_descriptors_from_the_bookies_files(
    own_bookie: Callable[..., OwnBookie], tmp_path: Path, pem: Path, storage: str, scheme: str
) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    tls = {"httpServerTlsEnable": "true", "httpServerKeyStorePath": pem} if scheme == "https" else {}
    limited = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh"]
    bookie = own_bookie(uri, storage=storage, settings=SETTINGS | tls, prefix=limited)
    bookie.start()
    web = http_port(bookie)

    def has_ended(server: str, reason: str) -> bool:
        with contextlib.suppress(OSError):
            text = call(web, "GET", "/metrics").body.decode()
            name = f'bkctl_server_ended_connections_total{{server="{server}",reason="{reason}"}} [1-9]'
            return re.search(name, text) is not None
        return False

    async def body() -> None:
        connection = await BookieConnection.open(*bookie.address, bookie_id="bookie")
        assert (await connection.send(add(0))).status is Status.EOK
        with contextlib.ExitStack() as stack:
            for round_, hello in enumerate((b"", CLIENT_HELLO)):
                await asyncio.to_thread(connect_and_stay_mute, stack, bookie.port, MUTE)
                await asyncio.to_thread(connect_and_stay_mute, stack, web, MUTE, hello)
                used = len(list(Path(f"/proc/{bookie.pid}/fd").iterdir()))
                assert used < DESCRIPTORS * 0.8, f"{used} of {DESCRIPTORS} descriptors are in use"
                for entry_id in range(1 + 100 * round_, 101 + 100 * round_):  # journals and entry logs roll
                    assert (await connection.send(add(entry_id))).status is Status.EOK
            # The mute ones still hold their ends, and lose their places.
            other = await until_served(bookie)
            for entry_id in range(201):
                answer: Any = await other.send(ReadRequest(LEDGER, entry_id))
                assert answer.body == add(entry_id).body
            other.close()
            if scheme == "http":
                ended = "the end of a connection without a request"
                await asyncio.to_thread(wait_for, lambda: has_ended("bookie", "mute"), ended)
        connection.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_S))
    log = bookie.log.read_text()
    assert "Traceback" not in log
    assert len(log) < LOG_BYTES_MAX
    assert len(re.findall("turned away", log)) in range(2, 20), "each port says so, and not for each client"
    if scheme == "http":
        wait_for(lambda: answers(web), "the HTTP server")
        assert has_ended("bookie", "connections")
        assert has_ended("http", "connections")


async def until_served(bookie: OwnBookie) -> BookieConnection:
    """A connection that the bookie serves, as soon as it has a place for one."""
    while True:
        connection = await BookieConnection.open(*bookie.address, bookie_id="bookie")
        with contextlib.suppress(Exception):
            await connection.send(ReadRequest(LEDGER, 0))
            return connection
        await asyncio.sleep(0.1)


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        return call(port, "GET", "/heartbeat").status == 200
    return False
