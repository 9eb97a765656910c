"""Streams of bytes into a ledger, and a growing ledger as a stream of entries."""

from __future__ import annotations

import asyncio
import os
import select
import stat
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol

from bkctl.client.ledger import LedgerEntry, ReadHandle, WriteHandle
from bkctl.errors import UsageError
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
)

CHUNK_SIZE_BYTES: Final = 1 << 15
#: Payload bytes that fit in a frame with the longest header and digest, rounded down.
ENTRY_SIZE_BYTES_MAX: Final = FRAME_SIZE_BYTES_MAX - 256
#: A tail asks the metadata store and the bookies at least this often.
TAIL_POLL_S: Final = 30.0


class Splitter(Protocol):
    """Cuts a stream of bytes into the payloads of entries."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that are complete with `chunk`."""

    def finish(self) -> list[bytes]:
        """The payload that the end of the stream completes, if there is one."""


def check_entry_size(size_bytes: int, what: str) -> None:
    """Raises UsageError, naming `what`, for entries that no frame holds; said before a ledger is created."""
    if size_bytes > ENTRY_SIZE_BYTES_MAX:
        raise UsageError(f"{what}: an entry holds at most {ENTRY_SIZE_BYTES_MAX} bytes, not {size_bytes}")


class LineSplitter:
    """One entry a line. The LF is not part of it, an empty line is an empty entry, a last line without LF counts."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that end in `chunk`. Raises UsageError for a line that no entry can hold."""
        head, newline, tail = chunk.partition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        lines = [b"".join([*self._rest, head]), *tail.split(b"\n")]
        self._rest, self._rest_size = [], 0
        self._keep(lines.pop())
        return lines

    def finish(self) -> list[bytes]:
        """The last line, when it has no LF."""
        rest = b"".join(self._rest)
        self._rest, self._rest_size = [], 0
        return [rest] if rest else []

    def _keep(self, part: bytes) -> None:
        self._rest_size += len(part)
        if self._rest_size > ENTRY_SIZE_BYTES_MAX:
            raise UsageError(
                f"A line of more than {ENTRY_SIZE_BYTES_MAX} bytes fits no entry",
                hint="use --record-size for binary data",
            )
        if part:
            self._rest.append(part)


class RecordSplitter:
    """Entries of `size_bytes` each; the last one holds what is left."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise UsageError(f"A record size of {size_bytes} bytes leaves no room for data")
        check_entry_size(size_bytes, "Record size")
        self._size = size_bytes
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The whole records so far."""
        data = self._rest + chunk if self._rest else chunk
        end = len(data) - len(data) % self._size
        self._rest = data[end:]
        return [data[at : at + self._size] for at in range(0, end, self._size)]

    def finish(self) -> list[bytes]:
        """The last, shorter record, if there is one."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


async def write_stream(
    handle: WriteHandle, file: int, splitter: Splitter, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Add what the open file descriptor `file` gives until its end, pipelined.

    Whenever no more input waits, everything so far is acknowledged and an explicit LAC is sent, so that a reader that
    tails the ledger has it at once. `progress` is told how many bytes were read. Raises what `WriteHandle.add` does.
    """
    async for chunk, more_waits in _chunks(file):
        for payload in splitter.feed(chunk):
            await handle.ready()
            handle.add(payload)
        progress(len(chunk))
        if not more_waits:
            await handle.flush()
            await handle.write_lac()
    for payload in splitter.finish():
        await handle.ready()
        handle.add(payload)
    await handle.flush()


async def _chunks(file: int) -> AsyncIterator[tuple[bytes, bool]]:
    """What `file` gives, chunk by chunk, and whether more waits to be read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    watched = not stat.S_ISREG(os.fstat(file).st_mode)
    if watched:
        try:
            loop.add_reader(file, readable.set)
        except PermissionError:  # a device that never makes one wait, as /dev/null
            watched = False
    try:
        while True:
            if watched:
                await readable.wait()
                readable.clear()
            chunk = os.read(file, CHUNK_SIZE_BYTES)
            if not chunk:
                return
            yield chunk, not watched or bool(select.select([file], [], [], 0)[0])
            await asyncio.sleep(0)
    finally:
        if watched:
            loop.remove_reader(file)


async def tail(handle: ReadHandle, first: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
    """Yield the entries from `first` on, then each new one as it is confirmed, until the ledger is closed.

    Raises LedgerNotFound when the ledger is deleted meanwhile, and what `ReadHandle.read` raises.
    """
    next_id = max(first, 0)
    while True:
        last = handle.last_add_confirmed
        if next_id <= last:
            async for entry in handle.read(next_id, last, verify=verify):
                yield entry
            next_id = last + 1
        elif handle.is_closed:
            return
        else:
            await handle.wait_for_lac(next_id - 1, TAIL_POLL_S)
