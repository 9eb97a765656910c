"""Reads of entries: plain, fencing, long polls and batches. An entry that is not in memory is read by a thread.

Source: ReadEntryProcessor, ReadEntryProcessorV3, LongPollReadEntryProcessorV3, BatchedReadEntryProcessor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bkctl.bookie.group_commit import GroupCommit
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import WaitingRequests, run_in_threads
from bkctl.errors import BadRequest, BkctlError, EntryNotFound, Unauthorized
from bkctl.formats.layout import Buffer
from bkctl.ids import I64_MAX, LedgerId
from bkctl.protocol.handler import ReadRunResponder, Responder
from bkctl.protocol.messages import (
    LAST_ENTRY,
    BatchReadRequest,
    BatchReadResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Status,
    refusal,
)
from bkctl.protocol.runs import ReadRun
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_handle import LedgerHandle, NeedsDisk

#: Threads that read entries.
READ_THREADS: Final = 4
#: A batch read counts this much for the response itself, and 4 bytes an entry. Source: BatchedReadEntryProcessor.
BATCH_READ_OVERHEAD_BYTES: Final = 36
BATCH_READ_COUNT_MAX: Final = 10_000
#: Entries of a batch read that are looked up together.
BATCH_PART_ENTRIES_MAX: Final = 256
#: A part of a run of reads ends with the entry that brings it to this size: then other requests have their turn.
RUN_BYTES_MAX: Final = 1 << 20
#: Reads that begin at most this many entries behind a run that a thread is reading wait for it, and find what it read
#: ahead: a client's requests for consecutive entries arrive in several pieces.
FOLLOWING_ENTRIES_MAX: Final = 256

T = TypeVar("T", ReadRequest, BatchReadRequest)

_EOK: Final = Status.EOK
_NONE: Final = ReadRun(LedgerId(0, 0), (), ())


class EntryFetcher:
    """Finds an entry in memory, or has a thread read it."""

    def __init__(self, storage: BookieStorage, metrics: BookieMetrics, requests: WaitingRequests) -> None:
        self._storage = storage
        self._metrics = metrics
        self._requests = requests
        self._threads = ThreadPoolExecutor(READ_THREADS, "read")
        #: Lists of entries, one at a time: a client sizes their work and memory.
        self.list_thread = ThreadPoolExecutor(1, "list")
        #: By ledger of which a thread reads a run: the run's last entry, and the runs that follow it closely.
        self._following: dict[LedgerHandle, tuple[int, list[tuple[ReadRun, ReadRunResponder]]]] = {}

    def stop(self) -> None:
        """Return when no thread reads, in another thread than the event loop's."""
        self._threads.shutdown()
        self.list_thread.shutdown()

    def handle(self, ledger: LedgerId) -> LedgerHandle:
        """Return the handle of a ledger. Raises NeedsDisk, LedgerNotFound or UnknownLedgerState."""
        handle = self._storage.get(ledger)
        if handle is None:
            raise self._storage.missing(ledger)
        return handle

    def read_entry(
        self,
        handle: LedgerHandle,
        entry_id: int,
        request: Request,
        respond: Responder,
        take: Callable[[Buffer], None],
        absent: Callable[[], None] | None = None,
    ) -> None:
        """Give the entry to `take`, at once or when a thread has read it.

        A missing entry: call `absent`, or without it answer ENOENTRY or raise EntryNotFound. Raises
        UnknownLedgerState.
        """
        try:
            body = self._storage.find(handle, entry_id)
        except EntryNotFound:
            if absent is None:
                raise
            absent()
            return
        if body is not None and not respond.is_congested:
            self.count_from_memory((body,))
            take(body)
        else:
            read = functools.partial(self._storage.read, handle, entry_id)
            self.in_thread(lambda: read, request, respond, take, absent)

    def read_run(self, handle: LedgerHandle, reads: ReadRun, respond: ReadRunResponder) -> None:
        """Answer a run of reads: entries in memory at once, the others when a thread has read them."""
        if respond.is_lost:
            respond.refuse(reads, Status.EIO)  # takes them out of flight
            return
        needs_lac = respond.carries_lac and not handle.lac_is_known and not handle.unknown
        storage = self._storage
        entry_ids = reads.entry_ids
        if (entry_ids[0] if len(entry_ids) == 1 else max(entry_ids)) > handle.last_entry:
            reads = self._refuse_absent(handle, reads, respond)
        while reads.entry_ids and not needs_lac and not respond.is_congested:
            found = storage.find_all(handle, reads.entry_ids, RUN_BYTES_MAX)
            part, reads = (reads, _NONE) if len(found) == len(reads.entry_ids) else reads.split(len(found))
            bodies = [body for body in found if body is not None]
            missing = []
            if len(bodies) < len(found):
                missing = [number for number, body in enumerate(found) if body is None]
                unread = part.part(missing)
                part = part.part([number for number, body in enumerate(found) if body is not None])
            if bodies:
                self.count_from_memory(bodies)
                respond.answer(part, bodies, handle.lac if handle.lac_is_known else None)
            if missing and not self._follows(handle, unread, respond):
                self._run_in_thread(handle, unread, respond)
        if reads.entry_ids:
            self._run_in_thread(handle, reads, respond)

    def count_from_memory(self, bodies: Sequence[Buffer]) -> None:
        """Count entries that were read without a thread."""
        self._metrics.reads_from_memory += len(bodies)
        self._metrics.read_bytes += sum(map(len, bodies))

    def _follows(self, handle: LedgerHandle, reads: ReadRun, respond: ReadRunResponder) -> bool:
        """Return whether a run that a thread is reading now may read these ahead: they wait for its end then."""
        read_to, waiting = self._following.get(handle, (I64_MAX, []))
        if not 0 < reads.entry_ids[0] - read_to <= FOLLOWING_ENTRIES_MAX:
            return False
        waiting.append((reads, respond))
        return True

    def _read_following(self, handle: LedgerHandle, waiting: Sequence[tuple[ReadRun, ReadRunResponder]]) -> None:
        """Serve the runs that waited for one that was read now."""
        if self._following.get(handle, (0, ()))[1] is waiting:
            del self._following[handle]
        for reads, respond in waiting:
            self.read_run(handle, reads, respond)

    def refuse(self, reads: ReadRun, respond: ReadRunResponder, error: BaseException) -> None:
        """Answer `reads` with the status of `error`."""
        respond.refuse(reads, self._requests.status_after(ReadRequest.__name__, error, reads.ledger))

    def _refuse_absent(self, handle: LedgerHandle, reads: ReadRun, respond: ReadRunResponder) -> ReadRun:
        """Refuse reads behind the ledger's last entry, without waiting for the disk; return the others."""
        others: list[int] = []
        for number, entry_id in enumerate(reads.entry_ids):
            if entry_id <= handle.last_entry:
                others.append(number)
                continue
            try:
                self._storage.find(handle, entry_id)
            except BkctlError as error:
                self.refuse(reads.part([number]), respond, error)
            else:
                others.append(number)
        return reads.part(others)

    def _run_in_thread(self, handle: LedgerHandle, reads: ReadRun, respond: ReadRunResponder) -> None:
        """Answer a run of reads by the entries that a thread reads, part by part."""
        while reads.entry_ids:
            part, reads = reads.split(respond.room)
            if not part.entry_ids:
                respond.refuse(reads, Status.ETOOMANYREQUESTS)
                return
            start = functools.partial(self._start_run, handle, part, respond)
            if not respond.read(len(part.entry_ids), start):
                respond.refuse(part, Status.ETOOMANYREQUESTS)

    def _start_run(self, handle: LedgerHandle, reads: ReadRun, respond: ReadRunResponder) -> asyncio.Future[Any]:
        began_s = time.monotonic()
        reads_lac = respond.carries_lac and not handle.lac_is_known and not handle.unknown
        waiting: list[tuple[ReadRun, ReadRunResponder]] = []
        self._following.setdefault(handle, (reads.entry_ids[-1], waiting))

        def done(future: asyncio.Future[tuple[list[Buffer | Exception], int | None]]) -> None:
            try:
                answer(future)
            finally:
                self._read_following(handle, waiting)

        def answer(future: asyncio.Future[tuple[list[Buffer | Exception], int | None]]) -> None:
            error = future.exception()
            if error is not None:
                self._metrics.read_entry.observe(time.monotonic() - began_s, len(reads.entry_ids), ok=False)
                self.refuse(reads, respond, error)
                return
            found, lac = future.result()
            if lac is not None:
                self._storage.learn_lac(handle, lac)
            part, rest = reads.split(len(found))
            failed = {number: body for number, body in enumerate(found) if isinstance(body, Exception)}
            bodies = [body for body in found if not isinstance(body, Exception)]
            if failed:
                self._metrics.read_entry.observe(time.monotonic() - began_s, len(failed), ok=False)
                for number, problem in failed.items():
                    self.refuse(part.part([number]), respond, problem)
                part = part.part([number for number in range(len(found)) if number not in failed])
            if bodies:
                self._metrics.read_entry.observe(time.monotonic() - began_s, len(bodies))
                respond.answer(part, bodies, handle.lac if handle.lac_is_known else None)
            if respond.is_lost:
                respond.refuse(rest, Status.EIO)  # takes them out of flight
            else:
                self._run_in_thread(handle, rest, respond)

        read = functools.partial(self._read_run, handle, reads.entry_ids, reads_lac)
        return run_in_threads(self._threads, lambda: read, done)

    def _read_run(
        self, handle: LedgerHandle, entry_ids: Sequence[int], reads_lac: bool
    ) -> tuple[list[Buffer | Exception], int | None]:
        """Return entries in order, or the error of each, and the LAC if `reads_lac`; None if it cannot be read."""
        found = self._storage.read_all(handle, entry_ids, RUN_BYTES_MAX)
        if reads_lac:
            with contextlib.suppress(OSError, BkctlError):
                return found, self._storage.read_lac(handle)
        return found, None

    def in_thread(
        self,
        prepare: Callable[[], Callable[[], Any]],
        request: Request,
        respond: Responder,
        take: Callable[[Any], None],
        absent: Callable[[], None] | None = None,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        """Give to `take` what the function that `prepare` returns returns in a thread; answer the error that it raises.

        `prepare` is called in the event loop when the read begins: nothing of what it copies waits for a turn. For
        EntryNotFound call `absent` where it is given. `threads` are those that read entries unless given.
        """
        began_s = time.monotonic()

        def done(future: asyncio.Future[Any]) -> None:
            error = future.exception()
            self._metrics.read_entry.observe(time.monotonic() - began_s, ok=error is None)
            if error is None:
                self._requests.resume(request, respond, take, future.result())
            elif absent is not None and isinstance(error, EntryNotFound):
                absent()
            else:
                self._requests.refuse(request, respond, error)

        if not respond.read(functools.partial(run_in_threads, threads or self._threads, prepare, done)):
            respond(refusal(request, Status.ETOOMANYREQUESTS))


@dataclass(eq=False)
class ReadHandler:
    """Serves reads; `polls` are the long polls that wait."""

    _storage: BookieStorage
    _state: BookieStateManager
    _commits: GroupCommit
    _requests: WaitingRequests
    _reader: EntryFetcher

    def __post_init__(self) -> None:
        self.polls = LongPolls(self._finish_poll)

    def read(self, request: ReadRequest, respond: Responder) -> None:
        """Serve one read. Raises BkctlError for a refusal, NeedsDisk."""
        if request.fence:
            fence = functools.partial(self._fence, self._read_fenced)
            self._requests.serve_timed("READ_ENTRY_FENCE", fence, request, respond)
        elif request.previous_lac is not None:
            self._requests.serve_timed("READ_ENTRY_LONG_POLL", self._long_poll, request, respond)
        else:
            self._read_plain(request, respond)

    def read_run(self, reads: ReadRun, respond: ReadRunResponder) -> None:
        """Serve a run of plain reads."""
        waiting = self._requests.by_ledger
        if waiting and reads.ledger in waiting:
            waiting[reads.ledger].append(functools.partial(self._read_run_later, reads, respond))
            return
        try:
            handle = self._reader.handle(reads.ledger)
        except NeedsDisk as need:
            self._requests.once_read(need, functools.partial(self._read_run_later, reads, respond))
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            self._reader.refuse(reads, respond, error)
        else:
            self._reader.read_run(handle, reads, respond)

    def _read_run_later(self, reads: ReadRun, respond: ReadRunResponder, error: BaseException | None) -> None:
        """Serve a run of reads that waited for its ledger."""
        if error is not None:
            self._reader.refuse(reads, respond, error)
        else:
            self.read_run(reads, respond)

    def _entry_id(self, handle: LedgerHandle, entry_id: int) -> int:
        """Return the entry that a request means. Raises UnknownLedgerState if the last entry may be lost."""
        return self._storage.last_entry(handle) if entry_id == LAST_ENTRY else entry_id

    # --- plain -------------------------------------------------------------------------------------------------------

    def _read_plain(self, request: ReadRequest, respond: Responder) -> None:
        reader = self._reader
        handle = reader.handle(request.ledger)
        entry_id = self._entry_id(handle, request.entry_id)

        def take(body: Buffer) -> None:
            max_lac = handle.lac if handle.lac_is_known else None
            respond(ReadResponse(_EOK, request.ledger, request.entry_id, body, max_lac))

        if handle.lac_is_known or handle.unknown or not respond.carries_lac:
            reader.read_entry(handle, entry_id, request, respond, take)
            return

        def take_both(found: tuple[Buffer, int | None]) -> None:
            body, lac = found
            if lac is not None:
                self._storage.learn_lac(handle, lac)
            take(body)

        read = functools.partial(self._read_with_lac, handle, entry_id)
        reader.in_thread(lambda: read, request, respond, take_both)

    def _read_with_lac(self, handle: LedgerHandle, entry_id: int) -> tuple[Buffer, int | None]:
        """Return an entry and the ledger's LAC; None for the LAC if the last entry cannot be read."""
        body = self._storage.read(handle, entry_id)
        try:
            return body, self._storage.read_lac(handle)
        except (OSError, BkctlError):
            return body, None

    # --- fencing -----------------------------------------------------------------------------------------------------

    def _fence(self, read: Callable[[T, Responder, LedgerHandle], None], request: T, respond: Responder) -> None:
        """Fence the ledger, and `read` what is asked for once that is on disk. Raises Unauthorized."""
        if request.master_key is None:
            raise Unauthorized(f"Fencing ledger {request.ledger} needs its master key")
        handle: LedgerHandle

        def done(error: BaseException | None) -> None:
            if error is not None:
                respond(refusal(request, Status.EIO))
            else:
                self._requests.resume(request, respond, functools.partial(read, request, respond), handle)

        handle = self._storage.fence(request.ledger, request.master_key, done)
        self._commits.flush_soon()

    def _read_fenced(self, request: ReadRequest, respond: Responder, handle: LedgerHandle) -> None:
        self._reader.read_entry(
            handle,
            self._entry_id(handle, request.entry_id),
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, request.entry_id, body)),
        )

    # --- long polls --------------------------------------------------------------------------------------------------

    def _long_poll(self, request: ReadRequest, respond: Responder) -> None:
        """Answer once the LAC passes the reader's, or the time is over. Source: LongPollReadEntryProcessorV3."""
        if request.piggyback and request.entry_id != LAST_ENTRY:
            raise BadRequest("A long poll with piggyback reads the last entry, entry id -1")
        handle = self._reader.handle(request.ledger)
        self._storage.last_entry(handle)  # raises UnknownLedgerState: the LAC is as unknown as the last entry
        if handle.lac_is_known:
            self._wait_for_lac(handle, request, respond)
            return

        def take(lac: int) -> None:
            self._storage.learn_lac(handle, lac)
            self._long_poll(request, respond)

        read = functools.partial(self._storage.read_lac, handle)
        self._reader.in_thread(lambda: read, request, respond, take)

    def _wait_for_lac(self, handle: LedgerHandle, request: ReadRequest, respond: Responder) -> None:
        previous = request.previous_lac
        assert previous is not None
        waits = request.timeout_ms is not None and request.timeout_ms > 0
        waits = waits and handle.lac <= previous and not handle.fenced
        if not (waits and self.polls.wait(handle, request, respond)):
            self._answer_poll(handle, request, respond, updated=False)

    def _finish_poll(self, handle: LedgerHandle, request: ReadRequest, respond: Responder, updated: bool) -> None:
        """Answer a long poll whose wait is over; `updated`: because the LAC advanced."""

        def answer(handle: LedgerHandle) -> None:
            if handle.deleted:
                raise self._storage.missing(request.ledger)
            self._answer_poll(handle, request, respond, updated=updated)

        self._requests.resume(request, respond, answer, handle)

    def _answer_poll(self, handle: LedgerHandle, request: ReadRequest, respond: Responder, *, updated: bool) -> None:
        lac = handle.lac
        timestamp = time.time_ns() // 1_000_000 if updated else None
        previous = request.previous_lac
        assert previous is not None
        echoed = request.entry_id
        entry_id = handle.last_entry if echoed == LAST_ENTRY else echoed
        absent: Callable[[], None] | None = None
        if request.piggyback:
            nothing = ReadResponse(_EOK, request.ledger, LAST_ENTRY, None, lac, timestamp)
            if lac <= previous:
                respond(nothing)
                return
            absent = functools.partial(respond, nothing)
            entry_id = echoed = previous + 1
        self._reader.read_entry(
            handle,
            entry_id,
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, echoed, body, lac, timestamp)),
            absent,
        )

    # --- batches -----------------------------------------------------------------------------------------------------

    def read_batch(self, request: BatchReadRequest, respond: Responder) -> None:
        """Serve a read of consecutive entries. Raises BkctlError for a refusal, NeedsDisk."""
        if request.fence:
            self._fence(self._read_batch, request, respond)
        else:
            self._read_batch(request, respond, self._reader.handle(request.ledger))

    def _read_batch(self, request: BatchReadRequest, respond: Responder, handle: LedgerHandle) -> None:
        first = self._entry_id(handle, request.entry_id)
        if not 0 <= first <= handle.last_entry:
            self._storage.find(handle, first)  # raises, without waiting for the disk
        size_max = min(request.max_size, self._state.config.max_batch_read_size)
        count_max = min(request.max_count, BATCH_READ_COUNT_MAX) if request.max_count > 0 else BATCH_READ_COUNT_MAX
        count_max = max(1, min(count_max, handle.last_entry - first + 1))

        def answer(bodies: tuple[Buffer, ...]) -> None:
            respond(BatchReadResponse(_EOK, request.ledger, request.entry_id, request.request_id, bodies))

        if not respond.is_congested:
            part = range(first, first + min(count_max, BATCH_PART_ENTRIES_MAX))
            batch = _Batch(size_max, count_max)
            if batch.take(self._storage.find_all(handle, part, min(batch.room, RUN_BYTES_MAX))) and batch.is_full:
                self._reader.count_from_memory(batch.bodies)
                answer(tuple(batch.bodies))
                return
        gather = functools.partial(self._gather, handle, first, _Batch(size_max, count_max))
        self._reader.in_thread(lambda: gather, request, respond, answer)

    def _gather(self, handle: LedgerHandle, first: int, batch: _Batch) -> tuple[Buffer, ...]:
        """Return the entries of `batch`, from `first` on and at least one; raise the first one's error."""
        while not batch.is_full:
            begin = first + len(batch.bodies)
            part = range(begin, begin + min(batch.count_max - len(batch.bodies), BATCH_PART_ENTRIES_MAX))
            found = self._storage.read_all(handle, part, min(batch.room, RUN_BYTES_MAX))
            if not batch.take([None if isinstance(body, Exception) else body for body in found]):
                if not batch.bodies and isinstance(found[0], Exception):
                    raise found[0]
                break
        return tuple(batch.bodies)


class _Batch:
    """Entries for the answer to one batch read, up to a count and a size in bytes, and at least one.

    The size of the first one stands for the others'. Source: BatchedReadEntryProcessor.
    """

    def __init__(self, size_max: int, count_max: int) -> None:
        self.bodies: list[Buffer] = []
        self.count_max = count_max
        self._size_max = size_max
        self._size = BATCH_READ_OVERHEAD_BYTES
        self._is_over = False

    @property
    def is_full(self) -> bool:
        """True if the next entry has no place."""
        return self._is_over or len(self.bodies) >= self.count_max

    @property
    def room(self) -> int:
        """The bytes that are left, at least 1."""
        return max(1, self._size_max - self._size)

    def take(self, found: Sequence[Buffer | None]) -> bool:
        """Append entries until the batch is full; return False at the first None."""
        for body in found:
            if self.is_full:
                return True
            if body is None:
                return False
            self._size += len(body) + 4
            if not self.bodies:
                self.count_max = min(self.count_max, 1 + max(0, self._size_max - self._size) // (len(body) + 4))
            elif self._size > self._size_max:
                self._is_over = True
                return True
            self.bodies.append(body)
        return True


LONG_POLL_MS_MAX: Final = 3_600_000
#: Long polls of all clients that wait at once; the next ones are answered as if their time was over.
LONG_POLLS_MAX: Final = 50_000


class LongPolls:
    """The long polls of a bookie that wait. `finish` answers one whose wait is over; True: because the LAC advanced."""

    def __init__(self, finish: Callable[[LedgerHandle, ReadRequest, Responder, bool], None]) -> None:
        self.answer = finish
        self.waiting: dict[LongPoll, None] = {}

    def __len__(self) -> int:
        return len(self.waiting)

    def wait(self, handle: LedgerHandle, request: ReadRequest, respond: Responder) -> bool:
        """Answer `request` once the LAC of `handle` passes the reader's, the ledger is fenced, or the time is over.

        A poll ends with its client's connection. Return False, and do nothing, when the client is lost or
        LONG_POLLS_MAX wait already.
        """
        if respond.is_lost or len(self.waiting) >= LONG_POLLS_MAX:
            return False
        self.waiting[LongPoll(self, handle, request, respond)] = None
        return True

    def finish(self) -> None:
        """Answer all of them now."""
        for poll in list(self.waiting):
            poll.finish(updated=False)


class LongPoll:
    """One long poll, from its creation until it is answered."""

    def __init__(self, polls: LongPolls, handle: LedgerHandle, request: ReadRequest, respond: Responder) -> None:
        self._polls = polls
        self._handle = handle
        self._request = request
        self._respond = respond
        self._loop = asyncio.get_running_loop()
        self._is_over = False
        self._on_lost = respond.on_lost
        self._on_lost[self._abandon] = None
        timeout_s = min(request.timeout_ms or 0, LONG_POLL_MS_MAX) / 1000
        self._timer = self._loop.call_later(timeout_s, functools.partial(self.finish, updated=False))
        assert request.previous_lac is not None
        self._previous = request.previous_lac
        self._watcher = handle.watch(self._previous, functools.partial(self._loop.call_soon, self._look))

    def _look(self) -> None:
        handle = self._handle
        self.finish(updated=handle.lac > self._previous and not handle.deleted)

    def _abandon(self) -> None:
        if self._end():
            self._respond(refusal(self._request, Status.EIO))

    def _end(self) -> bool:
        if self._is_over:
            return False
        self._is_over = True
        self._timer.cancel()
        self._on_lost.pop(self._abandon, None)
        self._polls.waiting.pop(self)
        self._handle.unwatch(self._watcher)
        return True

    def finish(self, *, updated: bool) -> None:
        """Answer now, unless it is answered; `updated`: because the LAC advanced."""
        if self._end():
            self._polls.answer(self._handle, self._request, self._respond, updated)
