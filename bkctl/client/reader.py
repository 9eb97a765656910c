"""Reads of one ledger: entries in order with fallback to other replicas, the last add confirmed, long polls.

Source: PendingReadOp, ReadLastConfirmedOp, PendingReadLacOp, ReadLastConfirmedAndEntryOp.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from bkctl.client.bookies import BookieChannel, BookiePool, error_of, failure
from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    DigestMismatch,
    EntryNotFound,
    LedgerNotFound,
    NotFound,
    ProtocolError,
    Unauthorized,
)
from bkctl.formats.entry import INVALID_ENTRY_ID, DigestManager, read_entry_header
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.protocol.connection import Answered, Outcome
from bkctl.protocol.messages import (
    FRAME_SIZE_BYTES_MAX,
    LAST_ENTRY,
    BatchReadRequest,
    BatchReadResponse,
    BytesLike,
    Protocol,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
)

#: Reads in flight of one range: at most this many, and about this many bytes.
WINDOW_COUNT_MAX: Final = 1024
WINDOW_COUNT_MIN: Final = 4
WINDOW_BYTES: Final = 16 << 20
#: Bytes of answers that may wait behind the first entry of a window. Only entries that are much larger than those
#: before them, or than the metadata says, need more.
WAITING_BYTES_MAX: Final = 16 * FRAME_SIZE_BYTES_MAX
#: Payload bytes above which a run of entries ends.
RUN_BYTES: Final = 1 << 20
#: Assumed size of an entry before the first one is read: the largest ones still fit in WAITING_BYTES_MAX then.
ENTRY_SIZE_BYTES_GUESS: Final = 1 << 20
#: Longest wait of one long poll. A tail is a sequence of long polls.
LONG_POLL_S_MAX: Final = 10.0
#: The largest last add confirmed that is possible. Beyond it, ids of the entries that follow would not fit in 64 bits.
LAST_CONFIRMED_MAX: Final = 1 << 62
#: Extra time for the answer to a long poll after its end.
LONG_POLL_GRACE_S: Final = 1.0
#: Pause before the next long poll when no bookie could wait (the ledger has no entry yet, or all are down).
LONG_POLL_PAUSE_S: Final = 0.2

_new = tuple.__new__


class LedgerEntry(NamedTuple):
    """One entry that was read. `length` is the ledger's payload bytes up to its end; `format_version` 1 or 2."""

    entry_id: int
    last_add_confirmed: int
    length: int
    payload: bytes
    format_version: int


class LedgerAccess:
    """The common needs of operations on one open ledger: its metadata as last seen, its digest, and its bookies."""

    __slots__ = ("_sticky_index", "digest", "ledger", "piggybacked", "pool", "schedule", "scoped", "versioned")

    def __init__(self, pool: BookiePool, ledger: LedgerId, digest: DigestManager, versioned: VersionedMetadata) -> None:
        self.pool = pool
        self.ledger = ledger
        self.digest = digest
        self.versioned = versioned
        self.scoped = ledger.is_scoped
        self.schedule = RoundRobinDistributionSchedule.of(versioned.metadata)
        is_sticky = pool.config.sticky_reads_enabled and self.schedule.is_whole
        #: The ensemble index that is asked first for each entry. Source: LedgerHandle.getWriteSetForReadOperation.
        self._sticky_index = random.randrange(self.schedule.ensemble_size) if is_sticky else None
        #: An intact entry that came with a long poll's answer.
        self.piggybacked: LedgerEntry | None = None

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read or written."""
        return self.versioned.metadata

    @property
    def format_version(self) -> int:
        """Format of the ledger's entries: 1 in scope 0, else 2."""
        return 2 if self.scoped else 1

    @property
    def entry_size_bytes(self) -> int:
        """Payload bytes of the average entry of a closed ledger, else a guess."""
        metadata = self.metadata
        if metadata.is_closed and metadata.last_entry_id >= 0:
            return metadata.length // (metadata.last_entry_id + 1)
        return ENTRY_SIZE_BYTES_GUESS

    def replicas(self, bookies: Sequence[str]) -> list[tuple[BookieChannel, ...]]:
        """Return the channels of each write set in the order of asking, by entry id modulo the ensemble size."""
        channels = [self.pool.channel(bookie_id) for bookie_id in bookies]
        order, schedule, sticky = self.pool.reading_order, self.schedule, self._sticky_index
        sets = [schedule.write_set(at if sticky is None else sticky) for at in range(schedule.ensemble_size)]
        return [tuple(channels[index] for index in order(bookies, write_set)) for write_set in sets]

    async def read_ensembles(self) -> None:
        """Read the metadata again and take over its ensembles; do nothing if the store does not return newer ones.

        The state stays: a tail must not see the end of the ledger before it knows the last entry.
        """
        with contextlib.suppress(BkctlError):
            found = await asyncio.to_thread(self.pool.cluster.ledgers.read, self.ledger)
            if found.version >= self.versioned.version:  # A writer may have changed them since that read.
                metadata = self.metadata._replace(ensembles=found.metadata.ensembles)
                self.versioned = self.versioned._replace(metadata=metadata)

    def open_entry(self, body: BytesLike | None, entry_id: int, verify: bool = True) -> LedgerEntry:
        """Return the entry in a bookie's answer. Raises DigestMismatch, ProtocolError, without `verify` Corrupt."""
        if body is None:
            raise ProtocolError(f"Entry {entry_id} of ledger {self.ledger} was answered without a body")
        if verify:
            found_id, last_add_confirmed, length, payload = self.digest.open(body, entry_id)
            return _new(LedgerEntry, (found_id, last_add_confirmed, length, bytes(payload), self.format_version))
        header = read_entry_header(body)
        if header.ledger != self.ledger or header.entry_id != entry_id:
            raise DigestMismatch(
                f"Got entry {header.entry_id} of ledger {header.ledger} instead of entry {entry_id} of ledger "
                f"{self.ledger}"
            )
        payload_bytes = bytes(memoryview(body)[self.digest.overhead_size :])
        return LedgerEntry(entry_id, header.last_add_confirmed, header.length, payload_bytes, header.format_version)


def graver(first: BkctlError | None, later: BkctlError) -> BkctlError:
    """Return the error of two replicas to report: the first, unless the later one means that the entry may exist.

    Source: ReadOpBase.logErrorAndReattemptRead (`firstError`).
    """
    if first is None or isinstance(first, (EntryNotFound, LedgerNotFound)):
        return later
    if isinstance(first, BookieUnavailable) and not isinstance(later, (EntryNotFound, LedgerNotFound)):
        return later
    return first


def restate(error: BkctlError, message: str, hint: str | None = None) -> BkctlError:
    """Return an error of the same class with another message, caused by `error`."""
    if type(error).__init__ is BkctlError.__init__:
        restated = type(error)(message, hint=hint or error.hint)
    else:
        restated = BkctlError(message, hint=hint or error.hint)
    restated.__cause__ = error
    return restated


class _Read:
    """One entry being read: the replica asked last, and the first answer that is not rejected yet."""

    __slots__ = ("asked_count", "channel", "entry_id", "error", "first_error", "is_kept", "problems", "replicas",
                 "response", "source", "spares", "untried")  # fmt: skip

    def __init__(self, entry_id: int, replicas: tuple[BookieChannel, ...], channel: BookieChannel) -> None:
        self.entry_id = entry_id
        self.replicas = replicas
        self.channel = channel
        #: Requests without an outcome.
        self.asked_count = 1
        #: True if an answer is kept beyond WAITING_BYTES_MAX, because one was dropped.
        self.is_kept = False
        self.response: ReadResponse | None = None
        #: The replica that sent `response`.
        self.source = channel
        #: Answers of further replicas.
        self.spares: list[tuple[BookieChannel, ReadResponse]] | None = None
        self.untried: list[BookieChannel] | None = None
        self.first_error: BkctlError | None = None
        self.problems: list[str] | None = None
        self.error: BkctlError | None = None


def _body_size(response: ReadResponse) -> int:
    return len(response.body or b"")


class _RangeReader:
    """Pipelined reads of consecutive entries, taken in order and in runs.

    Answers beyond WAITING_BYTES_MAX are dropped, and asked for again when their turn comes.
    """

    def __init__(self, access: LedgerAccess, first: int, last: int, verify: bool) -> None:
        self._access = access
        self._verify = verify
        self._next_id = first
        self._last = last
        self._window: deque[_Read] = deque()
        #: The reads of the window by entry id.
        self._reads: dict[int, _Read] = {}
        self._refill_at = 0
        self._failures: deque[tuple[_Read, BookieChannel, Response | BkctlError]] = deque()
        self._takers: dict[BookieChannel, Answered] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._fragment_end = first  # the first entry after the fragment of `_replicas`
        self._replicas: list[tuple[BookieChannel, ...]] = []
        self._entry_size = access.entry_size_bytes
        self._size_seen = self._count_seen = 0
        self._waiting_bytes = 0

    async def next_run(self) -> list[LedgerEntry]:
        """Return the next entries, as many as are there (at least one, at most about RUN_BYTES); none at the end."""
        window, piggybacked = self._window, self._access.piggybacked
        if piggybacked is not None and not window and piggybacked.entry_id == self._next_id <= self._last:
            self._access.piggybacked = None
            self._next_id += 1
            return [piggybacked]
        while True:
            if len(window) <= self._refill_at and self._next_id <= self._last:
                self._refill_at = self._fill() // 2
                await asyncio.sleep(0)  # the requests leave before the caller works on the entries
            self._retry_failures()
            if not window:
                return []
            run = self._take_run()
            if run:
                return run
            head = window[0]
            if head.error is not None:
                await self._follow_ensembles(head)
            elif head.response is None and not self._failures:
                if head.asked_count:
                    await self._wait_for(head)
                else:
                    self._ask_for_dropped()

    def _fill(self) -> int:
        """Send reads until the window is full, and return the number of reads in it."""
        access, window = self._access, self._window
        if self._count_seen:
            self._entry_size = max(self._size_seen // self._count_seen, self._entry_size * 3 // 4)
            self._size_seen = self._count_seen = 0
        count_max = min(max(WINDOW_BYTES // (self._entry_size + 64), WINDOW_COUNT_MIN), WINDOW_COUNT_MAX)
        now = time.monotonic() if access.pool.config.reorder_read_sequence_enabled else float("inf")
        ensemble_size, ledger = access.schedule.ensemble_size, access.ledger
        entry_id, last = self._next_id, self._last
        runs: defaultdict[BookieChannel, list[ReadRequest]] = defaultdict(list)
        while entry_id <= last and len(window) < count_max:
            if entry_id >= self._fragment_end:
                self._enter_fragment(entry_id)
            replicas = self._replicas[entry_id % ensemble_size]
            channel = replicas[0]
            if channel.suspect_until > now:
                channel = next((replica for replica in replicas if replica.suspect_until <= now), channel)
            read = self._reads[entry_id] = _Read(entry_id, replicas, channel)
            window.append(read)
            request = _new(ReadRequest, (ledger, entry_id, None, False, False, None, None, False))
            runs[channel].append(request)
            entry_id += 1
        self._next_id = entry_id
        for channel, run in runs.items():
            channel.send_run(run, self._taker(channel), access.scoped)
        return len(window)

    def _enter_fragment(self, entry_id: int) -> None:
        fragment = self._access.metadata.fragment_of(entry_id)
        self._replicas = self._access.replicas(fragment.bookies)
        self._fragment_end = next(
            (later.first_entry_id for later in self._access.metadata.ensembles if later.first_entry_id > entry_id),
            self._last + 1,
        )

    def _taker(self, channel: BookieChannel) -> Answered:
        taker = self._takers.get(channel)
        if taker is None:
            taker = self._takers[channel] = partial(self._answered, channel)
        return taker

    def _answered(self, channel: BookieChannel, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> None:
        reads, head, is_awaited = self._reads, self._window[0] if self._window else None, False
        for request, outcome in zip(requests, outcomes, strict=True):
            read = reads.get(request[1])  # type: ignore[misc, arg-type]
            if read is None:
                continue  # another replica gave the entry
            is_awaited = is_awaited or read is head
            read.asked_count -= 1
            if type(outcome) is not ReadResponse or outcome[0] is not Status.EOK:
                self._failures.append((read, channel, outcome))
            elif not self._has_room(read, outcome):
                self._untried_of(read).insert(0, channel)
            elif read.response is None:
                read.response, read.source = outcome, channel
            else:
                if read.spares is None:
                    read.spares = []
                read.spares.append((channel, outcome))
        if self._waiter is not None and (self._failures or is_awaited) and not self._waiter.done():
            self._waiter.set_result(None)

    def _has_room(self, read: _Read, response: ReadResponse) -> bool:
        """Count the answer among those that wait; return False, with nothing counted, if it is to be dropped."""
        waiting_bytes = self._waiting_bytes + _body_size(response)
        if waiting_bytes > WAITING_BYTES_MAX and not read.is_kept and read is not self._window[0]:
            return False
        self._waiting_bytes = waiting_bytes
        return True

    def _ask_for_dropped(self) -> None:
        """Ask again for the first answers of the window that were dropped, and keep these."""
        dropped = (read for read in self._window if not (read.asked_count or read.response or read.error))
        for read in islice(dropped, WINDOW_COUNT_MIN):
            read.is_kept = True
            self._ask_another(read)

    async def _wait_for(self, read: _Read) -> None:
        """Wait until a replica answers for `read`, or another read fails.

        After speculativeReadTimeout without an answer, ask other replicas for all reads of that silent bookie.
        """
        can_ask = read.untried != [] and len(read.replicas) > 1
        asked_count = 0 if read.untried is None else max(len(read.replicas) - len(read.untried) - 1, 0)
        limit_s = self._access.pool.config.speculative_read_s(asked_count) if can_ask else None
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            done, _ = await asyncio.wait([self._waiter], timeout=limit_s)
        finally:
            self._waiter = None
        if not done:
            silent = read.channel
            silent.failed()
            for other in self._window:
                if other.channel is silent and other.asked_count and other.response is None:
                    self._ask_another(other)

    def _take_run(self) -> list[LedgerEntry]:
        """Take the entries at the start of the window that are there; ask another replica for a damaged one."""
        window, open_entry, verify = self._window, self._access.open_entry, self._verify
        run: list[LedgerEntry] = []
        size = 0
        while window and size < RUN_BYTES:
            read = window[0]
            response = read.response
            if response is None:
                break
            self._waiting_bytes -= _body_size(response)
            try:
                entry = open_entry(response.body, read.entry_id, verify)
            except BkctlError as error:
                read.response = None
                self._record(read, read.source, error)
                self._try_next(read)
                break
            window.popleft()
            del self._reads[read.entry_id]
            if read.spares:
                self._waiting_bytes -= sum(_body_size(spare) for _, spare in read.spares)
            run.append(entry)
            size += len(entry.payload)
        self._count_seen += len(run)
        self._size_seen += size
        return run

    def _retry_failures(self) -> None:
        """Ask other replicas for all reads that failed, wherever they are in the window."""
        while self._failures:
            read, channel, outcome = self._failures.popleft()
            error = error_of(outcome, self._access.ledger, read.entry_id, channel.bookie_id)
            if error is None:
                error = ProtocolError(f"Bookie {channel.bookie_id} answered a read with another kind of response")
            self._record(read, channel, error)
            if read.response is None:
                self._try_next(read)

    def _record(self, read: _Read, channel: BookieChannel, error: BkctlError) -> None:
        if not isinstance(error, NotFound):
            channel.failed()
        read.first_error = graver(read.first_error, error)
        if read.problems is None:
            read.problems = []
        read.problems.append(f"{channel.bookie_id}: {error.message}")

    def _ask_another(self, read: _Read) -> bool:
        """Ask the next replica, while others may still answer; return False when none is left."""
        untried = self._untried_of(read)
        if not untried:
            return False
        read.channel = untried.pop(0)
        read.asked_count += 1
        request = ReadRequest(self._access.ledger, read.entry_id)
        read.channel.send_run((request,), self._taker(read.channel), self._access.scoped)
        return True

    def _untried_of(self, read: _Read) -> list[BookieChannel]:
        """Return the replicas to ask next, in order."""
        if read.untried is None:
            now = time.monotonic()
            read.untried = [replica for replica in read.replicas if replica is not read.channel]
            read.untried.sort(key=lambda replica: replica.suspect_until > now)
        return read.untried

    def _try_next(self, read: _Read) -> None:
        """Use the answer of another replica, or ask one; with none left, give the entry up."""
        if read.spares:
            read.source, read.response = read.spares.pop()
            return
        if self._ask_another(read) or read.asked_count:
            return
        assert read.first_error is not None
        if len(read.problems or ()) < 2:
            read.error = read.first_error
            return
        read.error = restate(
            read.first_error,
            f"Entry {read.entry_id} of ledger {self._access.ledger} cannot be read from any of its bookies "
            f"({'; '.join(read.problems or ())})",
        )

    async def _follow_ensembles(self, failed: _Read) -> None:
        """Read failed entries from the bookies that hold them now. Raise the error of `failed` if its bookies stay."""
        assert failed.error is not None
        access = self._access
        await access.read_ensembles()
        self._fragment_end = failed.entry_id
        for read in self._window:
            if read.entry_id >= self._fragment_end:
                self._enter_fragment(read.entry_id)
            replicas = self._replicas[read.entry_id % access.schedule.ensemble_size]
            if read.error is not None and read.replicas != replicas:
                read.untried = sorted(replicas, key=read.replicas.__contains__)
                read.replicas = replicas
                read.error = read.first_error = read.problems = None
                self._ask_another(read)
        if failed.error is not None:
            raise failed.error


async def read_entries(
    access: LedgerAccess, first: int, last: int, *, verify: bool = True
) -> AsyncIterator[LedgerEntry]:
    """Yield the entries `first` to `last` (inclusive) in order, each from the first replica that gives it intact.

    Reads are pipelined within a bounded window, which advances as the caller takes entries. When no replica returns an
    entry, the metadata is read again. If the entry has the same bookies still, the entries before it are yielded, then
    the gravest error is raised.
    """
    reader = _RangeReader(access, first, last, verify)
    while run := await reader.next_run():
        for entry in run:
            yield entry


async def read_runs(
    access: LedgerAccess, first: int, last: int, *, verify: bool = True
) -> AsyncIterator[list[LedgerEntry]]:
    """Yield the entries of `read_entries` in runs: as many as have arrived, with about RUN_BYTES of payload at most."""
    reader = _RangeReader(access, first, last, verify)
    while run := await reader.next_run():
        yield run


async def read_batch(access: LedgerAccess, first: int, last: int, size_bytes: int) -> list[LedgerEntry]:
    """Return the entries from `first` up to `last` in one bookie's answer, at least one. v2 only.

    Entries after a damaged one are left out. Raises the gravest error if no replica returns the first entry.
    Source: BatchedReadOp.
    """
    gravest: BkctlError | None = None
    replicas = access.replicas(access.metadata.fragment_of(first).bookies)[first % access.schedule.ensemble_size]
    now = time.monotonic()
    for channel in sorted(replicas, key=lambda replica: replica.suspect_until > now):
        request = BatchReadRequest(access.ledger, first, next(access.pool.request_ids), last + 1 - first, size_bytes)
        future = channel.send(request, access.scoped)
        await asyncio.wait([future])
        error = failure(future, access.ledger, first, channel.bookie_id)
        entries: list[LedgerEntry] = []
        if error is None:
            response = future.result()
            bodies = response.bodies if isinstance(response, BatchReadResponse) else ()
            try:
                for entry_id, body in enumerate(bodies[: last + 1 - first], first):
                    entries.append(access.open_entry(body, entry_id))
            except BkctlError as damage:
                error = damage
        if entries:
            return entries
        gravest = graver(gravest, error or ProtocolError(f"Bookie {channel.bookie_id} answered a batch with nothing"))
        if not isinstance(gravest, NotFound):
            channel.failed()
    assert gravest is not None
    raise gravest


class LastConfirmed(NamedTuple):
    """The highest last add confirmed among bookies, and the `length` field of the entry that carried it.

    Source: DigestManager.RecoveryData.
    """

    last_add_confirmed: int
    length: int


async def read_last_confirmed(access: LedgerAccess, *, fence: bool = False) -> LastConfirmed:
    """Ask all bookies of the last fragment for the last add confirmed, until their answers cover the ensemble.

    With `fence` each bookie fences the ledger first. NoSuchEntry and NoSuchLedger are valid answers; a bookie that
    cannot serve the ledger's scope gives none. Raises Unauthorized at once, and the last error when too few answer.
    Source: ReadLastConfirmedOp, PendingReadLacOp.
    """
    ledger, digest = access.ledger, access.digest
    by_entry = fence or access.pool.protocol is Protocol.V2
    request: ReadRequest | ReadLacRequest
    if by_entry:
        request = ReadRequest(ledger, LAST_ENTRY, digest.master_key if fence else None, fence)
    else:
        request = ReadLacRequest(ledger)
    pending: dict[asyncio.Future[Response], int] = {}
    bookies = access.metadata.last_fragment.bookies
    for index, bookie_id in enumerate(bookies):
        pending[access.pool.channel(bookie_id).send(request, access.scoped)] = index
    found = LastConfirmed(INVALID_ENTRY_ID, 0)
    answered: set[int] = set()
    problems: list[str] = []
    last_error: BkctlError | None = None
    while pending:
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            index = pending.pop(future)
            try:
                said = _last_confirmed_of(future, access, bookies[index])
            except Unauthorized:
                raise
            except BkctlError as error:
                access.pool.channel(bookies[index]).failed()
                problems.append(f"{bookies[index]}: {error.message}")
                last_error = error
                continue
            answered.add(index)
            if said is not None and said.last_add_confirmed > found.last_add_confirmed:
                found = said
        if access.schedule.covered(answered):
            return found
    assert last_error is not None
    raise restate(
        last_error,
        f"Last add confirmed of ledger {ledger} is not known: too few of its bookies answer ({'; '.join(problems)})",
    )


def _last_confirmed_of(future: asyncio.Future[Response], access: LedgerAccess, bookie_id: str) -> LastConfirmed | None:
    """Return one bookie's last add confirmed; None if it has no entry.

    Raise the error that the response carries, or ProtocolError for an impossible last add confirmed.
    """
    error = failure(future, access.ledger, None, bookie_id)
    if isinstance(error, (EntryNotFound, LedgerNotFound)):
        return None
    response = None if future.cancelled() or future.exception() is not None else future.result()
    # For an explicit LAC without any entry, the bookie answers EIO with the LAC.
    if error is not None and not (isinstance(response, ReadLacResponse) and response.lac_body):
        raise error
    found = LastConfirmed(INVALID_ENTRY_ID, 0)
    if isinstance(response, ReadLacResponse):
        body, explicit = response.last_entry_body, response.lac_body
    elif isinstance(response, ReadResponse) and response.body is not None:
        body, explicit = response.body, None
    else:
        raise ProtocolError(f"Bookie {bookie_id} answered without the last entry")
    if body or isinstance(response, ReadResponse):
        entry = access.digest.open(body or b"", None)
        found = LastConfirmed(entry.last_add_confirmed, entry.length)
    if explicit:
        found = found._replace(last_add_confirmed=max(access.digest.open_lac(explicit), found.last_add_confirmed))
    if found.last_add_confirmed > LAST_CONFIRMED_MAX:
        raise ProtocolError(f"Bookie {bookie_id} answered with an impossible last add confirmed, {found[0]}")
    return found


async def long_poll(access: LedgerAccess, previous: int, timeout_s: float, changed: asyncio.Event) -> int | None:
    """Ask all bookies of the last fragment to answer when their last add confirmed exceeds `previous`.

    Returns the first such answer; None after about `timeout_s`, or as soon as `changed` is set. If entry `previous` + 1
    comes with it intact, the next read uses that entry. Always over v3. Source: ReadLastConfirmedAndEntryOp.
    """
    request = ReadRequest(
        access.ledger, LAST_ENTRY, previous_lac=previous, timeout_ms=max(int(timeout_s * 1000), 1), piggyback=True
    )
    pending = {
        access.pool.channel(bookie_id, Protocol.V3).send(request, access.scoped)
        for bookie_id in access.metadata.last_fragment.bookies
    }
    deadline = time.monotonic() + timeout_s
    wake = asyncio.create_task(changed.wait())
    waited = False
    try:
        while pending and not wake.done():  # another waiter may have cleared `changed`
            overdue_s = max(deadline + LONG_POLL_GRACE_S - time.monotonic(), 0)
            waiting: set[asyncio.Future[Any]] = {*pending, wake}
            done, _ = await asyncio.wait(waiting, timeout=overdue_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for future in done & pending:
                pending.discard(future)
                response = None if future.cancelled() or future.exception() is not None else future.result()
                if not isinstance(response, ReadResponse) or response.status is not Status.EOK:
                    continue
                waited = True
                if response.max_lac is not None and previous < response.max_lac <= LAST_CONFIRMED_MAX:
                    if response.entry_id == previous + 1:
                        # A damaged entry is dropped: any bookie of the ensemble may have sent it, and a read asks the
                        # bookies of its write set.
                        with contextlib.suppress(BkctlError):
                            access.piggybacked = access.open_entry(response.body, previous + 1)
                    return response.max_lac
        if not wake.done() and (not waited or time.monotonic() < deadline):
            pause_s = min(LONG_POLL_PAUSE_S, max(deadline - time.monotonic(), 0))
            await asyncio.wait({wake}, timeout=pause_s)
    finally:
        wake.cancel()
    return None
