"""The bookie: requests from connections → ledger storage; group commit, checkpoints, fencing, read-only mode, stop.

Everything that changes a ledger happens in the event loop's thread, in memory. One thread a journal writes and syncs
what the loop gathered meanwhile (group commit), one writes entry logs, one checkpoints.
Source: BookieImpl, BookieRequestProcessor, Journal, SyncThread, LedgerDirsMonitor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Final

from bkctl.bookie.cookies import stamp_or_verify
from bkctl.config import BookieConfig
from bkctl.errors import (
    AlreadyExists,
    BadRequest,
    BkctlError,
    Corrupt,
    EntryNotFound,
    LedgerNotFound,
    ReadOnlyBookie,
    Unauthorized,
    Unsupported,
    UsageError,
)
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import BookieServiceInfo, Endpoint
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import BOOKIE_RPC_PROTOCOL, LEDGER_SCOPES_PROPERTY, Cluster, open_cluster
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.protocol.messages import (
    LAST_ENTRY,
    AddRequest,
    AddResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoFlags,
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Respond,
    Status,
    WriteLacRequest,
    WriteLacResponse,
    refusal,
)
from bkctl.protocol.server import BookieServer, ServerLimits
from bkctl.storage.bookie_storage import Batch, BookieStorage
from bkctl.storage.files import NO_SPACE, Files
from bkctl.storage.journal_writer import MEBIBYTE
from bkctl.storage.ledger_storage import CURRENT, LedgerHandle

log: Final = logging.getLogger("bkctl.bookie")

#: A batch read counts this much for the response itself, and 4 bytes an entry. Source: BatchedReadEntryProcessor.
BATCH_READ_OVERHEAD_BYTES: Final = 36
BATCH_READ_COUNT_MAX: Final = 10_000
LONG_POLL_MS_MAX: Final = 3_600_000
#: A stop waits so long for the answers to what was read before.
STOP_GRACE_S: Final = 5.0
#: Threads for reads that need the disk.
READ_THREADS: Final = 4
#: Threads of a busy bookie take turns this often: the default of 5 ms is longer than a sync.
SWITCH_INTERVAL_S: Final = 0.0005
DIRTY_FILE: Final = "DIRTY"
#: Entries in memory that the entry logs do not have yet, above which no more are acknowledged.
UNWRITTEN_BYTES_MAX: Final = 256 << 20

#: Requests that are not answered yet, of all clients, unless journalMaxMemorySizeMb says otherwise.
IN_FLIGHT_BYTES_MAX: Final = 256 << 20

_EOK: Final = Status.EOK


class _Worker:
    """One thread that runs what it is given, in order; the loop is told `died` when one of that is at fault."""

    def __init__(self, name: str, died: Callable[[BaseException], None]) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._died = died
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._queue.put(task)

    def _run(self) -> None:
        try:
            while (task := self._queue.get()) is not None:
                task()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._died, error)
            raise

    def stop(self) -> None:
        """Return when everything submitted is done."""
        self._queue.put(None)
        self._thread.join()


class _JournalThread:
    """Writes one journal: takes the batches that are there as one group, and reports them to the loop once on disk."""

    def __init__(self, bookie: Bookie, number: int) -> None:
        config = bookie.config
        self._bookie = bookie
        self._number = number
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._size_enough = config.journal_buffered_writes_threshold
        self._count_enough = config.journal_buffered_entries_threshold or sys.maxsize
        waits = config.journal_adaptive_group_writes and not config.journal_flush_when_queue_empty
        self._wait_s = config.journal_max_group_wait_msec / 1000 if waits else 0.0
        self._thread = threading.Thread(target=self._run, name=f"journal-{number}", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        self._queue.put(batch)

    def _run(self) -> None:
        try:
            self._write_groups()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._bookie.thread_died, error)
            raise

    def _write_groups(self) -> None:
        get = self._queue.get
        storage = self._bookie.storage
        running = True
        while running:
            first = get()
            if first is None:
                return
            group = [first]
            size, count = first.size, len(first.tokens)
            deadline = time.monotonic() + self._wait_s
            while size <= self._size_enough and count <= self._count_enough:
                try:
                    remaining = deadline - time.monotonic()
                    batch = get(timeout=remaining) if remaining > 0 else self._queue.get_nowait()
                except Empty:
                    break
                if batch is None:
                    running = False
                    break
                group.append(batch)
                size += batch.size
                count += len(batch.tokens)
            error = None
            try:
                storage.commit(self._number, *group)
            except OSError as failure:
                error = failure
            except BkctlError as failure:
                error = OSError(errno.EIO, str(failure))
            self._loop.call_soon_threadsafe(self._bookie.committed, self._number, group, error)

    def stop(self) -> None:
        """Return when everything put is on disk, or failed."""
        self._queue.put(None)
        self._thread.join()


class Bookie:
    """One bookie in this process: `start`, `stop`, and the requests in between.

    `cluster` None: the bookie opens `metadata_service_uri` itself with `security`, and closes it. After `start`:
    `bookie_id`, `address` (host, port) and `read_only`; `failure` is set, and `stopped` too, when it had to give up.
    """

    def __init__(
        self,
        config: BookieConfig,
        *,
        cluster: Cluster | None = None,
        security: StoreSecurity = NO_SECURITY,
        files: Files | None = None,
    ) -> None:
        self.config = config
        self._security = security
        self.files = files or Files()
        self.storage = BookieStorage(config, files=self.files)
        self.bookie_id = ""
        self.address = ("", 0)
        self.read_only = config.force_read_only_bookie
        self.failure: BkctlError | None = None
        self.stopped = asyncio.Event()
        self._cluster = cluster
        self._owns_cluster = cluster is None
        self._held = contextlib.ExitStack()
        self._server = BookieServer(self, tls=_tls_context(config), limits=_limits(config))
        self._journals: list[_JournalThread] = []
        self._entries: _Worker | None = None
        self._checkpoints: _Worker | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._polls: set[_LongPoll] = set()
        self._flush_due = False
        self._is_held = False
        self._stopping = False
        self._checkpoint_running: asyncio.Future[None] | None = None
        self._no_space = False
        self._allows_high_priority = True
        self._registered_read_only: bool | None = None
        self._registering = asyncio.Lock()
        self._released = False
        self._handlers: dict[type, Callable[[Any, Respond], None]] = {
            AddRequest: self._add,
            ReadRequest: self._read,
            BatchReadRequest: self._batch_read,
            WriteLacRequest: self._write_lac,
            ReadLacRequest: self._read_lac,
            ForceLedgerRequest: self._force,
            ListEntriesRequest: self._list_entries,
            BookieInfoRequest: self._info,
        }

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the cookies, replay the journals, listen and register.

        Raises UsageError, Unsupported (settings), CookieMismatch, DirectoryInUse, Corrupt, Unreachable, BkctlError (the
        address is taken). Nothing is left running or held then.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._start()
        except BaseException:
            await self._release()
            raise

    async def _start(self) -> None:
        config = self.config
        host = await asyncio.to_thread(advertised_host, config)
        if self._cluster is None:
            if config.metadata_service_uri is None:
                raise UsageError(f"{config.conf_path or 'The configuration'} has no metadataServiceUri")
            self._cluster = await asyncio.to_thread(
                open_cluster,
                config.metadata_service_uri,
                timeout_s=config.zk_timeout / 1000 * 3,
                session_timeout_s=config.zk_timeout / 1000,
                security=self._security,
            )
        port = config.bookie_port or _former_port(config, host) or _free_port(host)
        self.bookie_id = check_bookie_id(config.bookie_id or f"{host}:{port}")
        self.address = (host, port)
        try:
            await asyncio.to_thread(self._open_storage, self._cluster)
        except OSError as error:
            raise BkctlError(f"Bookie {self.bookie_id} cannot open its directories: {error}") from error
        self._journals = [_JournalThread(self, number) for number in range(len(self.storage.journals))]
        self._entries = _Worker("entries", self.thread_died)
        self._checkpoints = _Worker("checkpoints", self.thread_died)
        self._readers = ThreadPoolExecutor(READ_THREADS, "read")
        self._check_disks()
        try:
            await self._server.start(_listening_host(config, host), port)
        except OSError as error:
            raise BkctlError(
                f"Bookie {self.bookie_id} cannot listen on port {port}: {error.strerror}",
                hint="another server has the port, or the address is not this machine's",
            ) from error
        await self._register()
        for regular in (self._checkpoint_regularly(), self._watch_disks()):
            task = self._loop.create_task(regular)
            task.add_done_callback(self._task_over)
            self._tasks.add(task)
        log.info("Bookie %s serves on port %d%s", self.bookie_id, port, ", read-only" if self.read_only else "")

    def _open_storage(self, cluster: Cluster) -> None:
        storage = self.storage
        directories = {*storage.journal_directories, *storage.ledger_directories, *storage.index_directories}
        for directory in sorted(directories):
            self.files.make_directory(directory)
        self._held.enter_context(self.files.lock(sorted(directories)))
        is_new = stamp_or_verify(self.config, self.bookie_id, cluster, self.files)
        was_dirty = any((each / DIRTY_FILE).exists() for each in storage.ledger_directories)
        for directory in storage.ledger_directories:
            self.files.open(directory / DIRTY_FILE, create=True).close()
            self.files.sync_directory(directory)
        storage.open()
        entries, skipped = storage.replayed
        if not is_new and (was_dirty or entries or skipped):
            log.info(
                "%s stop before: replayed %d entries, skipped %d records of deleted ledgers",
                "Unclean" if was_dirty else "Clean", entries, skipped,
            )  # fmt: skip

    @property
    def service_info(self) -> BookieServiceInfo:
        """What the bookie registers: its address, and that it knows ledger scopes."""
        host, port = self.address
        return BookieServiceInfo((Endpoint("bookie", port, host, BOOKIE_RPC_PROTOCOL),), {LEDGER_SCOPES_PROPERTY: "1"})

    async def _register(self) -> None:
        """Register as read-only or writable; what was begun is finished although the caller is cancelled."""
        await asyncio.shield(self._loop.create_task(self._move()))

    async def _move(self) -> None:
        async with self._registering:  # two moves at once, there and back, could take the bookie off both lists
            wanted = self.read_only
            if wanted != self._registered_read_only and not self._released:
                assert self._cluster is not None
                await asyncio.to_thread(self._cluster.bookies.register, self.bookie_id, self.service_info, wanted)
                self._registered_read_only = wanted

    async def stop(self) -> None:
        """The clean stop: answer what was read, checkpoint everything, leave the directories fit for Apache's bookie.

        After a failure nothing more is written: the next start replays the journals. Source: BP-35's downgrade.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for poll in list(self._polls):
            poll.finish(updated=False)
        await self._server.close(STOP_GRACE_S if self.failure is None else 0)
        self._stopping = True
        if self._journals and self.failure is None:
            self._flush()
            if self._checkpoint_running is not None:
                await asyncio.wait([self._checkpoint_running])
            await asyncio.to_thread(self._stop_threads)
            await asyncio.sleep(0)  # what the threads reported last
            try:
                if self.failure is None:
                    await asyncio.to_thread(self._close_storage)
            except OSError as error:
                self._fail(BkctlError(f"The clean stop of bookie {self.bookie_id} failed: {error}"))
        await self._release()
        log.info("Bookie %s stopped", self.bookie_id)
        self.stopped.set()

    def _stop_threads(self) -> None:
        for journal in self._journals:
            journal.stop()
        self._journals = []
        for worker in (self._entries, self._checkpoints):
            if worker is not None:
                worker.stop()
        self._entries = self._checkpoints = None

    def _close_storage(self) -> None:
        self.storage.close()
        for directory in self.storage.ledger_directories:
            self.files.remove(directory / DIRTY_FILE)
            self.files.sync_directory(directory)

    async def _release(self) -> None:
        await self._server.close(0)
        await asyncio.to_thread(self._stop_threads)
        if self._readers is not None:
            self._readers.shutdown(wait=False)
        async with self._registering:  # a move under way would register again behind our back
            self._released = True
            if self._cluster is not None and self._registered_read_only is not None:
                with contextlib.suppress(BkctlError):
                    await asyncio.to_thread(self._cluster.bookies.unregister, self.bookie_id)
                self._registered_read_only = None
        if self._cluster is not None and self._owns_cluster:
            await asyncio.to_thread(self._cluster.close)
            self._cluster = None
        self._held.close()

    def _task_over(self, task: asyncio.Task[None]) -> None:
        """Without checkpoints journals grow for ever, and without a look at the disks they fill up: give up then."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(BkctlError(f"Bookie {self.bookie_id} cannot look after its disks: {error!r}"))

    def thread_died(self, error: BaseException) -> None:
        """Give up, since a thread is gone that others would wait for; in the event loop."""
        self._fail(BkctlError(f"A thread of bookie {self.bookie_id} died: {error!r}"))

    def _fail(self, failure: BkctlError) -> None:
        """Give up: what was acknowledged is in the journal, and only a new start can bring it together again."""
        if self.failure is None:
            log.error("%s", failure)
            self.failure = failure
            self.read_only = True
            self.stopped.set()
            # Behind the answers that are there, and instead of those that cannot come any more.
            self._loop.call_soon(self._server.abort)

    # --- the hot path ------------------------------------------------------------------------------------------------

    def handle(self, request: Request, respond: Respond) -> None:
        """Serve one request: `respond` is called once, now or later. Raises BkctlError for a refusal."""
        try:
            self._handlers[type(request)](request, respond)
        except OSError as error:
            log.warning("%s: %s", type(request).__name__, error)
            respond(refusal(request, Status.EIO))
        except Corrupt as error:
            log.warning("%s: %s", type(request).__name__, error)
            respond(refusal(request, Status.EIO))

    def _add(self, request: AddRequest, respond: Respond) -> None:
        ledger, entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
        if self.read_only and not (high_priority and self._allows_high_priority and not self._no_space):
            raise ReadOnlyBookie(f"Bookie {self.bookie_id} is read-only")
        assert not isinstance(body, tuple)
        token = None if deferred_sync else (respond, ledger, entry_id)
        self.storage.add(ledger, entry_id, master_key, body, token, recovery_add)
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)
        if deferred_sync:
            respond(AddResponse(_EOK, ledger, entry_id))

    def _flush(self) -> None:
        """Hand what this turn of the loop gathered to the journal threads."""
        self._flush_due = False
        storage = self.storage
        if storage.unwritten_bytes > UNWRITTEN_BYTES_MAX and not (self._stopping or self._no_space or self.failure):
            # The disk is behind: what is not acknowledged holds its connection back, until entries are written. The
            # writes under way may end before they see that, so there has to be one more.
            if not self._is_held and self._entries is not None:
                self._is_held = True
                storage.seal_entries(1)
                self._entries.submit(self._write_entries)
            return
        for number, journal in enumerate(self._journals):
            batch = storage.take_batch(number)
            if batch is not None:
                journal.put(batch)
        if storage.seal_entries() and self._entries is not None:
            self._entries.submit(self._write_entries)
        if storage.is_checkpoint_due and self._checkpoint_running is None:
            self._begin_checkpoint()

    def committed(self, number: int, group: list[Batch], error: OSError | None) -> None:
        """A journal's group is on disk, or failed: tell everybody; in the event loop."""
        for batch in group:
            doomed = self.storage.settle(number, batch, error)
            status = _EOK if error is None else Status.EIO
            for token in batch.tokens:
                if token is not None:
                    respond, ledger, entry_id = token
                    respond(AddResponse(status, ledger, entry_id))
            for token in doomed.tokens if doomed is not None else ():
                if token is not None:
                    respond, ledger, entry_id = token
                    respond(AddResponse(Status.EIO, ledger, entry_id))
        if error is not None:
            self._journal_failed(number, error)

    def _journal_failed(self, number: int, error: OSError) -> None:
        journal = self.storage.journals[number]
        if journal.failed is not None:
            self._fail(BkctlError(f"Journal {journal.directory} failed: {journal.failed}"))
        elif error.errno in NO_SPACE:
            self._run_out_of_space(f"Journal {journal.directory} is full")
        else:
            log.warning("Journal %s: %s", journal.directory, error)

    def _write_entries(self) -> None:
        try:
            self.storage.write_entries()
        except OSError as error:
            self._loop.call_soon_threadsafe(self._storage_failed, error)
        if self._is_held:
            self._loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self._flush_soon()

    def _storage_failed(self, error: OSError) -> None:
        if error.errno in NO_SPACE:
            self._run_out_of_space(f"Ledger storage is full ({error.filename or error})")
        else:
            self._fail(BkctlError(f"Ledger storage of bookie {self.bookie_id} failed: {error}"))

    # --- reads -------------------------------------------------------------------------------------------------------

    def _read(self, request: ReadRequest, respond: Respond) -> None:
        if request.fence:
            self._fenced(request, request.master_key, functools.partial(self._read_fenced, request, respond), respond)
        elif request.previous_lac is not None:
            self._read_after_wait(request, respond)
        else:
            handle = self._handle(request.ledger)
            max_lac = self.storage.last_add_confirmed(handle)
            entry_id = handle.last_entry if request.entry_id == LAST_ENTRY else request.entry_id
            self._with_entry(
                handle,
                entry_id,
                request,
                respond,
                lambda body: respond(ReadResponse(_EOK, request.ledger, request.entry_id, body, max_lac)),
            )

    def _handle(self, ledger: Any) -> LedgerHandle:
        handle = self.storage.get(ledger)
        if handle is None:
            raise LedgerNotFound(f"No ledger {ledger} on this bookie")
        return handle

    def _with_entry(
        self,
        handle: LedgerHandle,
        entry_id: int,
        request: Request,
        respond: Respond,
        take: Callable[[Buffer], None],
    ) -> None:
        """Give the entry to `take`, at once or once a thread has read it. Raises EntryNotFound, OSError, Corrupt."""
        body = self.storage.find(handle, entry_id)
        if body is not None and not self._server.is_congested(respond):
            take(body)
        else:
            self._in_reader(functools.partial(self.storage.read, handle, entry_id), request, respond, take)

    def _in_reader(
        self, read: Callable[[], Any], request: Request, respond: Respond, take: Callable[[Any], None]
    ) -> None:
        def done(future: asyncio.Future[Any]) -> None:
            error = future.exception()
            if error is None:
                take(future.result())
            elif isinstance(error, EntryNotFound):
                respond(refusal(request, Status.ENOENTRY))
            else:
                log.warning("%s: %s", type(request).__name__, error)
                respond(refusal(request, Status.EIO))

        def start() -> asyncio.Future[Any]:
            future = self._loop.run_in_executor(self._readers, read)
            future.add_done_callback(done)
            return future

        if not self._server.read(respond, start):
            respond(refusal(request, Status.ETOOMANYREQUESTS))

    def _fenced(
        self,
        request: ReadRequest | BatchReadRequest,
        master_key: bytes | None,
        then: Callable[[LedgerHandle], None],
        respond: Respond,
    ) -> None:
        """Fence the ledger, and go on once that is on disk."""
        if master_key is None:
            raise Unauthorized(f"Fencing ledger {request.ledger} needs its master key")

        def done(error: BaseException | None) -> None:
            if error is not None:
                respond(refusal(request, Status.EIO))
                return
            try:
                then(handle)
            except EntryNotFound:
                respond(refusal(request, Status.ENOENTRY))
            except (OSError, Corrupt) as failure:
                log.warning("%s: %s", type(request).__name__, failure)
                respond(refusal(request, Status.EIO))

        handle = self.storage.fence(request.ledger, master_key, done)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _read_fenced(self, request: ReadRequest, respond: Respond, handle: LedgerHandle) -> None:
        entry_id = handle.last_entry if request.entry_id == LAST_ENTRY else request.entry_id
        self._with_entry(
            handle,
            entry_id,
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, request.entry_id, body)),
        )

    def _read_after_wait(self, request: ReadRequest, respond: Respond) -> None:
        """Long poll. Source: LongPollReadEntryProcessorV3."""
        if request.piggyback and request.entry_id != LAST_ENTRY:
            raise BadRequest("A long poll with piggyback reads the last entry, entry id -1")
        handle = self._handle(request.ledger)
        previous = request.previous_lac
        assert previous is not None
        waits = request.timeout_ms is not None and request.timeout_ms > 0
        if waits and self.storage.last_add_confirmed(handle) <= previous and not handle.fenced:
            self._polls.add(_LongPoll(self, handle, request, respond))
        else:
            self.answer_poll(request, respond, updated=False)

    def answer_poll(self, request: ReadRequest, respond: Respond, *, updated: bool) -> None:
        """Answer a long poll whose wait is over, because the LAC was `updated` or not. Raises as reads do."""
        handle = self._handle(request.ledger)
        lac = self.storage.last_add_confirmed(handle)
        timestamp = time.time_ns() // 1_000_000 if updated else None
        previous = request.previous_lac
        assert previous is not None
        entry_id = request.entry_id
        if request.piggyback:
            if lac <= previous:
                respond(ReadResponse(_EOK, request.ledger, LAST_ENTRY, None, lac, timestamp))
                return
            entry_id = previous + 1
            if not self.storage.has(handle, entry_id):
                respond(ReadResponse(_EOK, request.ledger, LAST_ENTRY, None, lac, timestamp))
                return
            echoed = entry_id
        else:
            echoed = entry_id
            entry_id = handle.last_entry if entry_id == LAST_ENTRY else entry_id
        self._with_entry(
            handle,
            entry_id,
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, echoed, body, lac, timestamp)),
        )

    def poll_is_over(self, poll: _LongPoll) -> None:
        """Forget a long poll that is being answered."""
        self._polls.discard(poll)

    def _batch_read(self, request: BatchReadRequest, respond: Respond) -> None:
        if request.fence:
            then = functools.partial(self._read_batch, request, respond)
            self._fenced(request, request.master_key, then, respond)
        else:
            self._read_batch(request, respond, self._handle(request.ledger))

    def _read_batch(self, request: BatchReadRequest, respond: Respond, handle: LedgerHandle) -> None:
        """Consecutive entries up to a count and a size, at least one. Source: BatchedReadEntryProcessor."""
        storage = self.storage
        first = handle.last_entry if request.entry_id == LAST_ENTRY else request.entry_id
        size_max = min(request.max_size, self.config.max_batch_read_size)
        count_max = min(request.max_count, BATCH_READ_COUNT_MAX) if request.max_count > 0 else BATCH_READ_COUNT_MAX
        if not storage.has(handle, first):
            raise EntryNotFound(f"No entry {first} of ledger {handle.ledger} on this bookie")

        def gather() -> tuple[Buffer, ...]:
            bodies: list[Buffer] = []
            size = BATCH_READ_OVERHEAD_BYTES
            while len(bodies) < count_max:
                try:
                    body = storage.read(handle, first + len(bodies))
                except (OSError, Corrupt, EntryNotFound):
                    if not bodies:
                        raise
                    break
                size += len(body) + 4
                if bodies and size > size_max:
                    break
                bodies.append(body)
            return tuple(bodies)

        self._in_reader(
            gather,
            request,
            respond,
            lambda bodies: respond(
                BatchReadResponse(_EOK, request.ledger, request.entry_id, request.request_id, bodies)
            ),
        )

    # --- the other requests ------------------------------------------------------------------------------------------

    def _write_lac(self, request: WriteLacRequest, respond: Respond) -> None:
        if self.read_only:
            raise ReadOnlyBookie(f"Bookie {self.bookie_id} is read-only")
        ledger = request.ledger

        def done(error: BaseException | None) -> None:
            respond(WriteLacResponse(_EOK if error is None else Status.EIO, ledger))

        self.storage.write_lac(ledger, request.lac, request.master_key, request.body, done)
        self._flush_soon()

    def _read_lac(self, request: ReadLacRequest, respond: Respond) -> None:
        handle = self.storage.get(request.ledger)
        if handle is None:
            raise EntryNotFound(f"No ledger {request.ledger} on this bookie")
        lac_body = handle.explicit_lac or None
        if handle.last_entry < 0:
            # Apache's answer: an explicit LAC without any entry is an I/O error that carries the LAC.
            respond(ReadLacResponse(Status.ENOENTRY if lac_body is None else Status.EIO, request.ledger, lac_body))
            return
        self._with_entry(
            handle,
            handle.last_entry,
            request,
            respond,
            lambda body: respond(ReadLacResponse(_EOK, request.ledger, lac_body, body)),
        )

    def _force(self, request: ForceLedgerRequest, respond: Respond) -> None:
        def done(error: BaseException | None) -> None:
            respond(ForceLedgerResponse(_EOK if error is None else Status.EIO, request.ledger))

        self.storage.force(request.ledger, done)
        self._flush_soon()

    def _list_entries(self, request: ListEntriesRequest, respond: Respond) -> None:
        handle = self._handle(request.ledger)
        availability = self.storage.availability(handle)
        self._in_reader(
            lambda: availability().serialize(),
            request,
            respond,
            lambda data: respond(ListEntriesResponse(_EOK, request.ledger, data)),
        )

    def _info(self, request: BookieInfoRequest, respond: Respond) -> None:
        usages = {}
        for directory in self.storage.ledger_directories:
            usage = self.files.disk_usage(directory)
            usages[usage.device] = usage
        wanted = request.requested
        total = sum(usage.total for usage in usages.values()) if wanted & BookieInfoFlags.TOTAL_DISK_CAPACITY else None
        free = sum(usage.free for usage in usages.values()) if wanted & BookieInfoFlags.FREE_DISK_SPACE else None
        respond(BookieInfoResponse(_EOK, total, free))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    async def _checkpoint_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.config.flush_interval / 1000)
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Bring everything that is in the journal into ledger storage, and wait for it."""
        if self._checkpoint_running is None:
            self._begin_checkpoint()
        if self._checkpoint_running is not None:
            await asyncio.wait([self._checkpoint_running])

    def _begin_checkpoint(self) -> None:
        if self._checkpoints is None or self.failure is not None:
            return
        checkpoint = self.storage.begin_checkpoint()
        if checkpoint is None:
            self._no_space = False
            return
        running = self._checkpoint_running = self._loop.create_future()

        def over(error: OSError | None) -> None:
            self.storage.end_checkpoint(checkpoint, written=error is None)
            self._checkpoint_running = None
            if error is not None:
                self._storage_failed(error)
            else:
                self._no_space = False
            self._go_on()
            running.set_result(None)

        def task() -> None:
            error = None
            try:
                self.storage.checkpoint(checkpoint)
            except OSError as failure:
                error = failure
            except BkctlError as failure:
                error = OSError(errno.EIO, str(failure))
            self._loop.call_soon_threadsafe(over, error)

        self._checkpoints.submit(task)

    # --- disks -------------------------------------------------------------------------------------------------------

    async def _watch_disks(self) -> None:
        while True:
            await asyncio.sleep(self.config.disk_check_interval / 1000)
            if self._no_space and self._journals_have_space():
                await self.checkpoint()
            self._check_disks()
            try:
                await self._register()
            except AlreadyExists as error:
                self._fail(error)
            except BkctlError as error:
                log.warning("Cannot register as %s: %s", "read-only" if self.read_only else "writable", error)

    def _journals_have_space(self) -> bool:
        needed = 2 * self.config.journal_pre_alloc_size_mb * MEBIBYTE
        return all(self.files.disk_usage(each).free > needed for each in self.storage.journal_directories)

    def _run_out_of_space(self, problem: str) -> None:
        if not self._no_space:
            log.warning("%s: bookie %s takes no more entries until there is space", problem, self.bookie_id)
        self._no_space = True
        self._check_disks()
        self._register_soon()

    def _register_soon(self) -> None:
        async def register() -> None:
            try:
                await self._register()
            except BkctlError as error:
                log.warning("Cannot register as %s: %s", "read-only" if self.read_only else "writable", error)

        task = self._loop.create_task(register())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _check_disks(self) -> None:
        """Which ledger directories take new files, and whether the bookie takes entries. Source: LedgerDirsMonitor."""
        config = self.config
        storage = self.storage
        resume = config.disk_usage_lwm_threshold
        resume = config.disk_usage_threshold if resume is None else resume
        writable, free = [], 0
        for number, directory in enumerate(storage.ledger_directories):
            usage = self.files.disk_usage(directory)
            limit = config.disk_usage_threshold if number in storage.writable else resume
            if usage.ratio < limit:
                writable.append(number)
            free = max(free, usage.free)
        storage.set_writable(writable)
        least = config.min_usable_size_for_high_priority_writes
        self._allows_high_priority = free >= (config.log_size_limit if least is None else least)
        any_full = len(writable) < len(storage.ledger_directories)
        full = not writable or (any_full and config.read_only_mode_on_any_disk_full_enabled)
        if full and not config.read_only_mode_enabled:
            self._fail(BkctlError(f"The disks of bookie {self.bookie_id} are full, and read-only mode is not enabled"))
        wanted = config.force_read_only_bookie or full or self._no_space or self.failure is not None
        if wanted != self.read_only:
            log.info("Bookie %s is %s now", self.bookie_id, "read-only" if wanted else "writable")
            self.read_only = wanted


class _LongPoll:
    """A read that waits until the ledger's LAC passes the reader's, the ledger is fenced, or the time is over."""

    def __init__(self, bookie: Bookie, handle: LedgerHandle, request: ReadRequest, respond: Respond) -> None:
        self._bookie = bookie
        self._handle = handle
        self._request = request
        self._respond = respond
        self._loop = asyncio.get_running_loop()
        self._over = False
        timeout_s = min(request.timeout_ms or 0, LONG_POLL_MS_MAX) / 1000
        self._timer = self._loop.call_later(timeout_s, functools.partial(self.finish, updated=False))
        handle.watchers.append(self._woken)

    def _woken(self) -> None:
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        previous = self._request.previous_lac
        assert previous is not None
        if self._over:
            return
        storage = self._bookie.storage
        try:
            # Between the wake and now nobody watched the handle, so it may have been evicted.
            handle = storage.get(self._request.ledger)
            lac = -1 if handle is None else storage.last_add_confirmed(handle)
        except (OSError, BkctlError):
            handle = None  # `finish` meets it again, and answers it
        if handle is None:
            self.finish(updated=False)
        elif lac > previous:
            self.finish(updated=True)
        elif handle.fenced:
            self.finish(updated=False)
        else:
            self._handle = handle
            handle.watchers.append(self._woken)

    def finish(self, *, updated: bool) -> None:
        """Answer now."""
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        self._bookie.poll_is_over(self)
        with contextlib.suppress(ValueError):
            self._handle.watchers.remove(self._woken)
        request = self._request
        try:
            self._bookie.answer_poll(request, self._respond, updated=updated)
        except (OSError, Corrupt) as error:
            log.warning("Long poll: %s", error)
            self._respond(refusal(request, Status.EIO))
        except BkctlError as error:
            status = Status.EIO if error.v3_code is None else Status(error.v3_code)
            self._respond(refusal(request, status))


async def serve(
    config: BookieConfig,
    *,
    security: StoreSecurity = NO_SECURITY,
    started: Callable[[Bookie], None] = lambda _: None,
) -> None:
    """Run one bookie until SIGTERM or SIGINT, then stop it cleanly; `started` is called once it is registered.

    `security` is how it logs in to the metadata store. Raises what `Bookie.start` does, and the failure that made the
    bookie give up.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    bookie = Bookie(config, security=security)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, bookie.stopped.set)
    try:
        await bookie.start()
        started(bookie)
        await bookie.stopped.wait()
        await bookie.stop()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if bookie.failure is not None:
        raise bookie.failure


def _limits(config: BookieConfig) -> ServerLimits:
    memory_mb = config.journal_max_memory_size_mb
    return ServerLimits(
        frame_size_bytes=config.netty_max_frame_size_bytes,
        in_flight_bytes=IN_FLIGHT_BYTES_MAX if memory_mb is None else memory_mb * MEBIBYTE,
        adds_in_progress=config.max_adds_in_progress_limit,
        reads_in_progress=config.max_reads_in_progress_limit,
        reads_waiting=config.num_read_worker_threads * config.max_pending_read_requests_per_thread,
        backpressure_wait_ms=config.wait_timeout_on_response_backpressure_ms,
        closes_on_backpressure=config.close_channel_on_response_timeout,
        keepalive=config.server_sock_keepalive,
        keepalive_idle_s=config.server_tcp_keep_idle,
        keepalive_interval_s=config.server_tcp_keep_intvl,
        keepalive_count=config.server_tcp_keep_cnt,
    )


# --- addresses and TLS -----------------------------------------------------------------------------------------------


def advertised_host(config: BookieConfig) -> str:
    """The host that clients are told. Raises UsageError when there is none, or it is loopback and that is not allowed.

    Source: BookieImpl.getBookieAddress.
    """
    host = (config.advertised_address or "").strip()
    try:
        if not host:
            interface = config.listening_interface
            host = _interface_address(interface) if interface else socket.gethostbyname(socket.gethostname())
            if config.use_host_name_as_bookie_id:
                name = socket.getfqdn(host)
                if name == host:
                    raise UsageError(f"Cannot find the host name of {host}", hint="set advertisedAddress")
                host = name.split(".", 1)[0] if config.use_short_host_name else name
        is_loopback = socket.gethostbyname(host).startswith("127.")
    except OSError as error:
        problem = f"Cannot resolve the bookie's address {host!r}: {error}"
        raise UsageError(problem, hint="set advertisedAddress") from error
    if is_loopback and not config.allow_loopback:
        raise UsageError(
            f"This bookie's address {host} is a loopback address, where no other machine reaches it",
            hint="set advertisedAddress or listeningInterface, or allowLoopback=true",
        )
    return host


def _interface_address(name: str) -> str:
    """The IPv4 address of a network interface. Raises UsageError."""
    import fcntl
    import struct

    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise UsageError(f"listeningInterface {name!r} has no IPv4 address: {error.strerror}") from error
    return socket.inet_ntoa(answer[20:24])


def _listening_host(config: BookieConfig, host: str) -> str:
    """Every address, as Apache's, unless an interface is named or the bookie is for this machine only."""
    if config.listening_interface:
        return _interface_address(config.listening_interface)
    return host if socket.gethostbyname(host).startswith("127.") else "0.0.0.0"


def _former_port(config: BookieConfig, host: str) -> int | None:
    """The port in the bookie id of an earlier start, so that `bookiePort=0` keeps its id; None when there is none."""
    from pathlib import Path

    from bkctl.formats.metadata import Cookie

    if config.bookie_id:
        return None
    path = Path(config.journal_directories[0]) / CURRENT / "VERSION"
    try:
        bookie_id = Cookie.parse(path.read_bytes(), str(path)).bookie_id
    except FileNotFoundError:
        return None
    name, _, port = bookie_id.rpartition(":")
    return int(port) if name == host and port.isdecimal() else None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host if socket.gethostbyname(host).startswith("127.") else "", 0))
        port: int = probe.getsockname()[1]
        return port


def _tls_context(config: BookieConfig) -> ssl.SSLContext | None:
    """The server's TLS settings, None without tlsProviderFactoryClass. Raises Unsupported for Java's own key stores."""
    if not config.tls_provider_factory_class:
        return None
    for kind in (config.tls_key_store_type, config.tls_trust_store_type if config.tls_trust_store else "PEM"):
        if kind.upper() != "PEM":
            raise Unsupported(
                f"TLS with a {kind} key store", hint="use tlsKeyStoreType=PEM and tlsTrustStoreType=PEM with PEM files"
            )
    password = None
    try:
        if config.tls_key_store_password_path:
            with open(config.tls_key_store_password_path) as file:
                password = file.read().strip()
        if not config.tls_certificate_path or not config.tls_key_store:
            raise UsageError("TLS needs tlsCertificatePath (certificate) and tlsKeyStore (private key)")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_certificate_path, config.tls_key_store, password)
        if config.tls_trust_store:
            context.load_verify_locations(config.tls_trust_store)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"The TLS files cannot be used: {error}") from error
    if config.tls_client_authentication:
        if not config.tls_trust_store:
            raise UsageError("tlsClientAuthentication needs tlsTrustStore, the certificates of who may connect")
        context.verify_mode = ssl.CERT_REQUIRED
    return context
