"""Clusters of our own bookies as child processes; what bookies store and receive, taken apart without our own code."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from support.own_bookies import OwnBookie
from support.servers import DB, INTERLEAVED, SORTED, Server
from support.waiting import LIMIT_S

#: Every storage class of ours, one for each of three bookies.
STORAGES: Final = (SORTED, INTERLEAVED, DB)


class OwnCluster:
    """Some of our bookies on one metadata root."""

    def __init__(
        self, metadata_uri: str, directory: Path, storages: Iterable[str] = (SORTED, SORTED, SORTED),
        settings: Mapping[str, object] = {},
    ) -> None:  # fmt: skip
        self.metadata_uri = metadata_uri
        self.bookies = [
            OwnBookie(metadata_uri, directory / f"own-{index}", storage=storage, settings=settings)
            for index, storage in enumerate(storages)
        ]

    def ensure_up(self) -> None:
        """Start whoever is down."""
        start_all([bookie for bookie in self.bookies if not bookie.running])

    def by_id(self, bookie_id: str) -> OwnBookie:
        return next(bookie for bookie in self.bookies if bookie.bookie_id == bookie_id)

    def kill(self) -> None:
        """End all by SIGKILL."""
        for bookie in self.bookies:
            bookie.kill()


def start_all(servers: Iterable[Server]) -> None:
    """Start servers side by side."""
    servers = list(servers)
    for server in servers:
        server.launch()
    for server in servers:
        server.wait_ready()


def stop_all(servers: Iterable[Server]) -> None:
    """End servers by SIGTERM, one after the other."""
    for server in servers:
        server.stop()


# --- files, read by nothing of ours ----------------------------------------------------------------------------------

JOURNAL_HEADER_SIZE: Final = 512
ENTRY_LOG_HEADER_SIZE: Final = 1024
_PADDING_MASK: Final = -0x100


def journal_version(path: Path) -> int:
    """The version in a journal's header."""
    magic, version = struct.unpack(">4si", path.read_bytes()[:8])
    assert magic == b"BKLG"
    return int(version)


def journal_bodies(path: Path) -> list[bytes]:
    """The records of a journal file of version 6 or 7."""
    data = path.read_bytes()
    at, found = JOURNAL_HEADER_SIZE, []
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, at)
        if size == 0:
            break
        if size == _PADDING_MASK:
            at += 8 + struct.unpack_from(">i", data, at + 4)[0]
        else:
            found.append(data[at + 4 : at + 4 + size])
            at += 4 + size
    return found


def entry_log_bodies(path: Path) -> list[bytes]:
    """The records of an entry log, the ledgers map among them."""
    data = path.read_bytes()
    assert data[:4] == b"BKLO"
    at, found = ENTRY_LOG_HEADER_SIZE, []
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, at)
        if size <= 0:
            break
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return found


def tree(*directories: Path) -> dict[str, bytes]:
    """Every file below the directories with its bytes."""
    return {str(path): path.read_bytes() for root in directories for path in sorted(root.rglob("*")) if path.is_file()}


# --- what goes over the wire -----------------------------------------------------------------------------------------


class WireTap:
    """A TCP proxy before a bookie that keeps what clients sent; `port` is where it listens."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._streams: list[bytearray] = []
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = bytearray()
        self._streams.append(stream)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except ConnectionError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, far_writer, stream), _pump(far_reader, writer, None))

    def frames(self) -> list[bytes]:
        """The frames that clients sent, of all connections, without their size fields."""
        found = []
        for stream in self._streams:
            data, at = bytes(stream), 0
            while at + 4 <= len(data):
                (size,) = struct.unpack_from(">I", data, at)
                assert at + 4 + size <= len(data), "a frame that was not sent in full"
                found.append(data[at + 4 : at + 4 + size])
                at += 4 + size
        return found

    def close(self) -> None:
        """Stop listening; connections end."""

        async def end() -> None:
            self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
    try:
        while data := await reader.read(1 << 16):
            if kept is not None:
                kept += data
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
