"""What operators do with ledgers beyond one call of the client: streams into a ledger, tails, checks of every replica.

Each takes open handles (see `ledger`) and yields or returns plain values; none prints.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import select
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from bkctl.client.bookies import in_order
from bkctl.client.ledger import BookKeeper, LedgerEntry, ReadHandle, WriteHandle
from bkctl.client.verify import Replica, ReplicaState, verify_entries
from bkctl.errors import BkctlError, Corrupt, ProtocolError, UsageError
from bkctl.formats.entry import DigestType
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    BookieInfoFlags,
    BookieInfoRequest,
    BookieInfoResponse,
    Status,
    error_for,
)
from bkctl.protocol.messages import Protocol as WireProtocol

if TYPE_CHECKING:
    from bkctl.metadata.admin.health import HealthFinding
    from bkctl.metadata.cluster import RegisteredBookie

CHUNK_SIZE_BYTES: Final = 1 << 15
#: Reads of one replica in flight.
REPLICA_WINDOW_COUNT: Final = 256
#: What an entry can hold in a frame with the longest header and digest, rounded down.
ENTRY_SIZE_BYTES_MAX: Final = FRAME_SIZE_BYTES_MAX - 256
#: A tail asks the metadata store and the bookies anew at least so often.
TAIL_POLL_S: Final = 30.0
#: Of the entries of `sanity_test`.
SANITY_ENTRY_SIZE_BYTES: Final = 100


# --- writing a stream -----------------------------------------------------------------------------------------------


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


# --- reading --------------------------------------------------------------------------------------------------------


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


async def read_replica(
    handle: ReadHandle, bookie_id: str, first: int, last: int, *, verify: bool = True
) -> AsyncIterator[LedgerEntry]:
    """Yield the entries `first` to `last` as this one bookie has them, those in its write sets only.

    Raises UsageError when it has none of them by the metadata, and what `read_from` raises.
    """
    wanted = _entries_at(handle, bookie_id, first, last)
    head = next(wanted, None)
    if head is None and first <= last:
        raise UsageError(
            f"Bookie {bookie_id} has no replica of the entries {first} to {last} of ledger {handle.ledger}",
            hint="its ensembles are in 'bkctl ledger show'",
        )
    entries = in_order(
        () if head is None else chain((head,), wanted),
        lambda entry_id: handle.read_from(bookie_id, entry_id, verify=verify),
        lambda: REPLICA_WINDOW_COUNT,
    )
    async with contextlib.aclosing(entries):
        async for _, entry in entries:
            yield entry


def _entries_at(handle: ReadHandle, bookie_id: str, first: int, last: int) -> Iterator[int]:
    """Yield the entries `first` to `last` whose write sets have the bookie, one by one."""
    fragments = handle.metadata.ensembles
    ends = [each.first_entry_id for each in fragments[1:]]
    for fragment, end in zip(fragments, (*ends, last + 1), strict=True):
        if bookie_id in fragment.bookies:
            for entry_id in range(max(first, fragment.first_entry_id), min(last + 1, end)):
                if bookie_id in replicas_of(handle, entry_id):
                    yield entry_id


def replicas_of(handle: ReadHandle, entry_id: int) -> tuple[str, ...]:
    """The bookies that the metadata says have the entry, in the order of the write set."""
    metadata = handle.metadata
    bookies = metadata.fragment_of(entry_id).bookies
    return tuple(bookies[(entry_id + index) % metadata.ensemble_size] for index in range(metadata.write_quorum_size))


# --- checking -------------------------------------------------------------------------------------------------------


class ReplicaFinding(NamedTuple):
    """Something wrong with one replica of an entry.

    `problem` is `missing`, `damaged`, `different` (see ReplicaState), `unavailable`, or `length`: the entries' sizes
    do not add up to the length in the metadata. `bookie_id` is None where the finding is the ledger's own.
    """

    entry_id: int
    bookie_id: str | None
    problem: str
    message: str


class Verification:
    """Reads every entry of a ledger from every replica.

    `entry_count`, `replica_count` and `finding_count` grow as it goes. A bookie that cannot be asked gives one finding,
    however many entries it should have. `progress` is told the number of entries checked so far.
    """

    def __init__(self, handle: ReadHandle, progress: Callable[[int], None] = lambda _: None) -> None:
        self._handle = handle
        self._progress = progress
        self.entry_count = 0
        self.replica_count = 0
        self.finding_count = 0

    async def findings(self) -> AsyncIterator[ReplicaFinding]:
        """Check the entries up to the last add confirmed, and yield what is wrong, in order of the entries."""
        unavailable: dict[str, tuple[int, int, str]] = {}
        length: int | None = 0
        async for check in verify_entries(self._handle):
            size = None
            for replica in check.replicas:
                if replica.state is ReplicaState.UNAVAILABLE:
                    first, count, message = unavailable.get(replica.bookie_id, (check.entry_id, 0, _text(replica)))
                    unavailable[replica.bookie_id] = first, count + 1, message
                    continue
                self.replica_count += 1
                if replica.state is ReplicaState.OK:
                    size = replica.size_bytes
                else:
                    self.finding_count += 1
                    yield ReplicaFinding(check.entry_id, replica.bookie_id, replica.state.value, _text(replica))
            length = None if length is None or size is None else length + size
            self.entry_count += 1
            self._progress(self.entry_count)
        for bookie_id, (first, count, message) in unavailable.items():
            self.finding_count += 1
            text = f"{count:,} {'entry' if count == 1 else 'entries'} not checked: {message}"
            yield ReplicaFinding(first, bookie_id, ReplicaState.UNAVAILABLE.value, text)
        metadata = self._handle.metadata
        if metadata.is_closed and length not in (None, metadata.length):
            self.finding_count += 1
            text = f"The entries have {length} bytes, the metadata says {metadata.length}"
            yield ReplicaFinding(metadata.last_entry_id, None, "length", text)


def _text(replica: Replica) -> str:
    return "Differs from the first intact replica" if replica.error is None else replica.error.message


# --- disks of the bookies -------------------------------------------------------------------------------------------


class BookieSpace(NamedTuple):
    """What a bookie said of its ledger directories' disks, in bytes; or the error that kept it from saying so."""

    bookie: RegisteredBookie
    total: int | None
    free: int | None
    error: BkctlError | None

    @property
    def used(self) -> int | None:
        """Bytes that are not free."""
        return None if self.total is None or self.free is None else self.total - self.free

    @property
    def used_percent(self) -> float | None:
        """The used part in percent, to one digit."""
        return round(100 * self.used / self.total, 1) if self.total and self.used is not None else None


async def disk_space(bookkeeper: BookKeeper, bookies: Iterable[RegisteredBookie]) -> AsyncIterator[BookieSpace]:
    """Ask bookies for their disk space, all at once, and yield the answers in the order of `bookies`.

    Source: BookieInfoReader.
    """
    request = BookieInfoRequest(BookieInfoFlags.TOTAL_DISK_CAPACITY | BookieInfoFlags.FREE_DISK_SPACE)
    asked = [
        (bookie, bookkeeper.pool.channel(bookie.bookie_id, WireProtocol.V3).send(request)) for bookie in list(bookies)
    ]
    for bookie, answer in asked:
        try:
            response = await answer
        except BkctlError as error:
            yield BookieSpace(bookie, None, None, error)
            continue
        if response.status is not Status.EOK or not isinstance(response, BookieInfoResponse):
            text = f"Bookie {bookie.bookie_id} answered {response.status.name}"
            problem = ProtocolError(text) if response.status is Status.EOK else error_for(response.status, text)
            yield BookieSpace(bookie, None, None, problem)
            continue
        yield BookieSpace(bookie, response.total_disk_capacity, response.free_disk_space, None)


async def disk_findings(
    bookkeeper: BookKeeper, bookies: Iterable[RegisteredBookie], percent_max: float
) -> list[HealthFinding]:
    """What is wrong with bookies that are asked for their disk space: they are silent, or fuller than `percent_max`."""
    from bkctl.metadata.admin.health import HealthFinding, Severity

    findings = []
    async for space in disk_space(bookkeeper, bookies):
        bookie_id = space.bookie.bookie_id
        if space.error is not None:
            findings.append(
                HealthFinding(
                    "bookie-silent", Severity.ERROR, bookie_id, f"It is registered, and does not serve: {space.error}",
                    "look whether it hangs, or is behind a firewall",
                )
            )  # fmt: skip
        elif space.used_percent is not None and space.used_percent > percent_max:
            findings.append(
                HealthFinding(
                    "disk-full", Severity.WARNING, bookie_id, f"{space.used_percent}% of its ledger disks are used",
                    "add disks or bookies, or delete ledgers",
                )
            )  # fmt: skip
    return findings


# --- trying a cluster out -------------------------------------------------------------------------------------------


class RoundTrip(NamedTuple):
    """How a trial ledger was written and read; times in seconds."""

    entry_count: int
    entry_size_bytes: int
    last_entry_id: int
    write_s: float
    read_s: float


async def round_trip(
    bookkeeper: BookKeeper,
    handle: WriteHandle,
    *,
    entry_count: int,
    entry_size_bytes: int,
    password: bytes = b"",
    progress: Callable[[int], None] = lambda _: None,
) -> RoundTrip:
    """Write `entry_count` random entries with `handle`, read them before and after closing, compare.

    Raises Corrupt where what was read is not what was written, and what writing and reading raise. The ledger stays.
    """
    payloads = [os.urandom(entry_size_bytes) for _ in range(min(entry_count, 64))]
    began = time.perf_counter()
    for entry_id in range(entry_count):
        await handle.ready()
        handle.add(payloads[entry_id % len(payloads)])
        progress(entry_id + 1)
    await handle.flush()
    wrote = time.perf_counter()
    ledger = handle.ledger
    reads = 0.0
    for closed in (False, True):
        if closed:
            await handle.close()
        elif bookkeeper.protocol is WireProtocol.V3:
            await handle.write_lac()
        reader = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=password)
        # A v2 reader is told no explicit LAC, so it does not see the last entries of an open ledger as confirmed.
        told = closed or bookkeeper.protocol is WireProtocol.V3
        known = reader.last_add_confirmed if told else handle.last_add_confirmed
        async with reader, contextlib.aclosing(_compared(reader, payloads, known)) as entries:
            started = time.perf_counter()
            count = 0
            async for _ in entries:
                count += 1
            reads = time.perf_counter() - started
        if count != entry_count:
            state = "closed" if closed else "open"
            raise Corrupt(f"Ledger {ledger}: {entry_count} entries were written, {count} were read from it {state}")
    return RoundTrip(entry_count, entry_size_bytes, handle.last_add_confirmed, wrote - began, reads)


async def sanity_test(
    bookkeeper: BookKeeper, *, ledger_scope_id: int, entry_count: int, progress: Callable[[int], None] = lambda _: None
) -> RoundTrip:
    """`round_trip` on a new ledger of one bookie, which is deleted at the end, however that goes.

    `bookkeeper` is made for `only` that bookie. Raises what creating, writing and reading raise: NotEnoughBookies for a
    bookie that takes no entries. Source: SanityTestCommand.
    """
    shape: dict[str, Any] = {
        "ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1, "digest_type": DigestType.HMAC,
    }  # fmt: skip
    if ledger_scope_id == 0:
        handle = await bookkeeper.create_ledger(**shape)
    else:
        handle = await bookkeeper.create_ledger_adv(ledger_scope_id=ledger_scope_id, **shape)
    ledger = handle.ledger
    delete = functools.partial(bookkeeper.delete_ledger, ledger.ledger_id, ledger_scope_id=ledger.scope_id)
    try:
        async with handle:
            result = await round_trip(
                bookkeeper, handle, entry_count=entry_count, entry_size_bytes=SANITY_ENTRY_SIZE_BYTES, progress=progress
            )
    except BaseException:
        with contextlib.suppress(BkctlError):  # What went wrong first is what counts.
            await delete()
        raise
    await delete()
    return result


async def _compared(reader: ReadHandle, payloads: Sequence[bytes], last: int) -> AsyncGenerator[LedgerEntry, None]:
    if last < 0:
        return
    async for entry in reader.read_unconfirmed(0, last):
        if entry.payload != payloads[entry.entry_id % len(payloads)]:
            raise Corrupt(f"Ledger {reader.ledger}: entry {entry.entry_id} is not what was written")
        yield entry
