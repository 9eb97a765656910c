"""Streams of bytes into a ledger."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import Final, TypeVar

from bkctl.client.write_handle import WriteHandle
from bkctl.errors import LedgerNotFound, UsageError
from bkctl.ids import LedgerId
from bkctl.protocol.messages import FRAME_SIZE_BYTES_MAX

CHUNK_SIZE_BYTES: Final = 1 << 18
#: Payload bytes that fit in a frame with the longest header and digest, rounded down.
ENTRY_SIZE_BYTES_MAX: Final = FRAME_SIZE_BYTES_MAX - 256


C = TypeVar("C")


def check_entry_size(size_bytes: int, what: str) -> None:
    """Raise UsageError, naming `what`, for entries larger than a frame; call this before creating a ledger."""
    if size_bytes > ENTRY_SIZE_BYTES_MAX:
        raise UsageError(f"{what}: an entry holds at most {ENTRY_SIZE_BYTES_MAX} bytes, not {size_bytes}")


class LineSplitter:
    """Cuts one entry per line, without its LF. An empty line is an empty entry; the last line may lack its LF."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._rest_size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that end in `chunk`. Raises UsageError for a line larger than an entry."""
        head, newline, tail = chunk.partition(b"\n")
        if not newline:
            self._keep(chunk)
            return []
        lines = [b"".join([*self._rest, head]), *tail.split(b"\n")]
        self._rest, self._rest_size = [], 0
        self._keep(lines.pop())
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line, if it lacks its LF."""
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
    """Cuts entries of `size_bytes` each; the last one may be shorter."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < 1:
            raise UsageError(f"A record size of {size_bytes} bytes leaves no room for data")
        check_entry_size(size_bytes, "Record size")
        self._size = size_bytes
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the complete records so far."""
        data = self._rest + chunk if self._rest else chunk
        end = len(data) - len(data) % self._size
        self._rest = data[end:]
        return [data[at : at + self._size] for at in range(0, end, self._size)]

    def finish(self) -> list[bytes]:
        """Return the last, shorter record, if any."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


async def write_stream(
    handle: WriteHandle,
    file: int,
    splitter: LineSplitter | RecordSplitter,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Add the content of the open file descriptor `file`, pipelined, until its end.

    When no input waits, the function waits for all acknowledgements and writes an explicit LAC, so that a tail of the
    ledger sees the entries at once. `progress` gets the bytes of each chunk.
    Raises the errors of `WriteHandle.add_all`.
    """
    async for chunk, more_waits in _chunks(file):
        await handle.add_all(splitter.feed(chunk))
        progress(len(chunk))
        if not more_waits:
            await handle.flush()
            await handle.write_lac()
    await handle.add_all(splitter.finish())
    await handle.flush()


async def write_ledger(
    bookkeeper: C,
    create: Callable[[C], Awaitable[WriteHandle]],
    names: Iterable[str],
    splitter: Callable[[], LineSplitter | RecordSplitter],
    *,
    progress: Callable[[int], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
) -> LedgerId:
    """Write files (`-`: stdin), each cut by a splitter of its own, to the ledger that `create` returns, and close it.

    `note` gets a sentence that names the ledger; after an error `note` or `report` says whether the ledger is closed.
    """
    handle = await create(bookkeeper)
    try:
        async with handle:
            note(f"Ledger {handle.ledger}")
            for name in names:
                with nullcontext(0) if name == "-" else open(name, "rb") as file:
                    await write_stream(handle, file if isinstance(file, int) else file.fileno(), splitter(), progress)
    except BaseException as error:
        if handle.is_closed:
            note(f"Ledger {handle.ledger} is closed after its last acknowledged entry")
        elif not isinstance(error, LedgerNotFound):  # deleted meanwhile
            report(f"Ledger {handle.ledger} is not closed: 'bkctl ledger recover {handle.ledger}' closes it")
        raise
    return handle.ledger


async def _chunks(file: int) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield the content of `file` by chunks, each with True if more input waits."""
    while True:
        if not _is_readable(file):  # never for regular files and /dev/null, which epoll cannot watch
            await _readable(file)
        chunk = os.read(file, CHUNK_SIZE_BYTES)
        if not chunk:
            return
        yield chunk, _is_readable(file)
        await asyncio.sleep(0)


def _is_readable(file: int) -> bool:
    """Return whether `file` has input or is at its end."""
    poll = select.poll()  # select knows 1,024 open files
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


async def _readable(file: int) -> None:
    """Return once `file` has input or is at its end."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(file, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(file)
