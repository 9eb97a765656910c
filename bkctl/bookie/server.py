"""The bookie: requests from connections → ledger storage; group commit, checkpoints, fencing, read-only mode, stop.

Everything that changes a ledger happens in the event loop's thread, in memory. One thread a journal writes and syncs
what the loop gathered meanwhile (group commit), one writes entry logs, one checkpoints. The loop waits for no disk:
others open ledgers and read entries, and requests about a ledger that is being opened wait in order (`NeedsDisk`).
Source: BookieImpl, BookieRequestProcessor, Journal, SyncThread, LedgerDirsMonitor.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

from bkctl.bookie.cookies import read_directory, stamp_or_verify
from bkctl.bookie.disk_watch import DiskState, DiskWatch, total_usage
from bkctl.bookie.garbage_collector import GarbageCollectorThread, NoSpaceForCheckpoint, check_compaction_settings
from bkctl.bookie.long_polls import LongPolls
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.network import (
    advertised_host,
    allow_open_files,
    check_authentication,
    check_user,
    former_port,
    free_port,
    listening_host,
    server_limits,
    tls_context,
)
from bkctl.bookie.workers import JournalThread, Worker, disk_failure
from bkctl.config import MEBIBYTE, BookieConfig
from bkctl.disk import NO_SPACE, DiskUsage, Files
from bkctl.errors import (
    AlreadyExists,
    BadRequest,
    BkctlError,
    Corrupt,
    EntryNotFound,
    LedgerNotFound,
    ReadOnlyBookie,
    TimedOut,
    TooManyRequests,
    Unauthorized,
    Unsupported,
    UsageError,
)
from bkctl.formats.layout import Buffer
from bkctl.formats.metadata import BookieServiceInfo, Endpoint
from bkctl.formats.names import DIRTY_NAME, STATUS_NAME
from bkctl.formats.status import BookieMode, BookieStatus
from bkctl.ids import LedgerId, check_bookie_id
from bkctl.metadata.cluster import (
    BOOKIE_RPC_PROTOCOL,
    HTTP_ENDPOINT_ID,
    LEDGER_SCOPES_PROPERTY,
    Cluster,
    open_cluster,
)
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.protocol.add_runs import AddRun, AnswerAdds
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
    status_of,
)
from bkctl.protocol.server import BookieServer
from bkctl.storage.bookie_storage import Batch, BookieStorage
from bkctl.storage.ledger.ledger_storage import LedgerHandle, NeedsDisk

log: Final = logging.getLogger("bkctl.bookie")

#: A batch read counts this much for the response itself, and 4 bytes an entry. Source: BatchedReadEntryProcessor.
BATCH_READ_OVERHEAD_BYTES: Final = 36
BATCH_READ_COUNT_MAX: Final = 10_000
#: A stop waits so long for the answers to what was read before.
STOP_GRACE_S: Final = 5.0
#: A stop ends after so long, whatever hangs: a clean one, which brings all that is in memory to disk; and one that gave
#: up, which writes nothing more.
STOP_S: Final = 300.0
FAILED_STOP_S: Final = 30.0
#: A bookie whose registration another process holds gives up after so many times zkTimeout.
USURPED_ZK_TIMEOUTS: Final = 2
#: Threads for reads that need the disk, and others that open ledgers: a disk of entries that hangs keeps no ledger
#: from being opened on another one.
READ_THREADS: Final = 4
OPEN_THREADS: Final = 4
#: Threads of a busy bookie take turns this often: the default of 5 ms is longer than a sync.
SWITCH_INTERVAL_S: Final = 0.0005
#: Python looks for cycles this seldom: entries wait in memory by the ten thousands, and are part of none.
GC_THRESHOLDS: Final = (20_000, 20, 50)

_EOK: Final = Status.EOK

#: Called with None once what it waits for is in memory, or with the error of reading that.
Waiter: TypeAlias = Callable[[BaseException | None], None]


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
        self._server = BookieServer(
            self, tls=tls_context(config), requires_tls=config.tls_required, limits=server_limits(config)
        )
        self.garbage_collector: GarbageCollectorThread | None = None
        self.started_ms = 0
        self.metrics = BookieMetrics()
        self.metrics.clients = lambda: (len(self._server.connections), self._server.unfinished_bytes)
        self.metrics.ended_connections["bookie"] = self._server.ended
        self._journals: list[JournalThread] = []
        self._entries: Worker | None = None
        self._checkpoints: Worker | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._openers: ThreadPoolExecutor | None = None
        #: What waits, in order, for a ledger to be opened, or for a page of its index.
        self._waiting: dict[LedgerId, list[Waiter]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._polls = LongPolls(self)
        self._flush_due = False
        self._is_held = False
        self._storage_is_open = False
        self._waits_for_journals = False
        self._pending_adds_max = (
            config.num_add_worker_threads * config.max_pending_add_requests_per_thread or sys.maxsize
        )
        self._stopping = False
        self._checkpoint_running: asyncio.Future[bool] | None = None
        self._no_space = False
        self._disks_full = False
        self._manual = False
        self._status = BookieStatus(BookieMode.READ_WRITE, -1, False)
        self._allows_high_priority = True
        self._registered_read_only: bool | None = None
        self._is_move_unsure = False
        self._is_usurped = False
        self._registering = asyncio.Lock()
        self._released = False
        self._leaving: asyncio.Task[None] | None = None
        self._stop_by_s = float("inf")
        #: Threads that hang are left behind: the process has to end without them.
        self.is_stuck = False
        self._handlers: dict[type, Callable[[Any, Respond], None]] = {
            AddRequest: self._add,
            ReadRequest: self._read,
            BatchReadRequest: self._batch_read,
            WriteLacRequest: functools.partial(self._timed, "WRITE_LAC", self._write_lac),
            ReadLacRequest: functools.partial(self._timed, "READ_LAC", self._read_lac),
            ForceLedgerRequest: functools.partial(self._timed, "FORCE_LEDGER", self._force),
            ListEntriesRequest: functools.partial(self._timed, "GET_LIST_OF_ENTRIES_OF_LEDGER", self._list_entries),
            BookieInfoRequest: functools.partial(self._timed, "GET_BOOKIE_INFO", self._info),
        }

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Check the cookies, replay the journals, listen and register.

        Raises UsageError, Unsupported (settings), CookieMismatch, DirectoryInUse, Corrupt, Unreachable, BkctlError (the
        address is taken). Nothing is left running or held then.
        """
        self._loop = asyncio.get_running_loop()
        self._gave_up = self._loop.create_future()
        try:
            await self._start()
        except BaseException:
            await self._release()
            raise

    async def _start(self) -> None:
        config = self.config
        check_user(config)
        check_authentication(config)
        check_compaction_settings(config)
        storage = self.storage
        self._disks = DiskWatch(config, self.files, storage.ledger_directories, storage.index_directories)
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
        port = config.bookie_port or former_port(config, host) or free_port(host)
        self.bookie_id = check_bookie_id(config.bookie_id or f"{host}:{port}")
        self.address = (host, port)
        try:
            await asyncio.to_thread(self._open_storage, self._cluster)
        except OSError as error:
            raise BkctlError(f"Bookie {self.bookie_id} cannot open its directories: {error}") from error
        self._journals = [JournalThread(storage, number, config, self) for number in range(len(storage.journals))]
        self.metrics.journals = [each.metrics for each in self._journals]
        self._entries = Worker("entries", self.thread_died)
        self._checkpoints = Worker("checkpoints", self.thread_died)
        self._readers = ThreadPoolExecutor(READ_THREADS, "read")
        self._openers = ThreadPoolExecutor(OPEN_THREADS, "open")
        storage.serve_from_memory()
        cookie = read_directory(config.ledger_directories[0])
        self.garbage_collector = GarbageCollectorThread(
            config,
            storage.ledgers,
            self._cluster,
            bookie_id=self.bookie_id,
            instance_id=(cookie and cookie.instance_id) or "",
            delete=self._delete_ledgers,
            checkpoint=self._whole_checkpoint,
            files=self.files,
        )
        if storage.no_space is not None:
            self._no_space = True
            log.warning(
                "A disk takes no more (%s): bookie %s takes no entries until there is space, and keeps in memory what "
                "it replayed and cannot write", storage.no_space, self.bookie_id,
            )  # fmt: skip
        if storage.ledgers.needs_integrity_check:
            log.warning(
                "A data integrity check of Apache's bookie is not finished, so entries and fences may be lost: bookie "
                "%s is read-only, and answers EUNKNOWNLEDGERSTATE for what it lacks. Start Apache's bookie with "
                "dataIntegrityChecking=true on its directories until the check is done", self.bookie_id,
            )  # fmt: skip
        self._check_disks()
        try:
            await self._server.start(listening_host(config, host), port)
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
        self.garbage_collector.start()
        for warning in config.warnings:
            log.warning("%s", warning)
        if config.tls_client_authentication and not config.tls_required:
            log.warning("Clients without TLS are served too, as Apache's bookie does, unless tlsRequired=true")
        self.started_ms = time.time_ns() // 1_000_000
        log.info("Bookie %s serves on port %d%s", self.bookie_id, port, ", read-only" if self.read_only else "")

    def _open_storage(self, cluster: Cluster) -> None:
        config, storage = self.config, self.storage
        directories = {*storage.journal_directories, *storage.ledger_directories, *storage.index_directories}
        for directory in sorted(directories):
            self.files.make_directory(directory)
        self._held.enter_context(self.files.lock(sorted(directories)))
        is_new = stamp_or_verify(self.config, self.bookie_id, cluster, self.files)
        was_dirty = any((each / DIRTY_NAME).exists() for each in storage.ledger_directories)
        for directory in storage.ledger_directories:
            try:
                self.files.open(directory / DIRTY_NAME, create=True).close()
                self.files.sync_directory(directory)
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                log.warning("%s has no space for %s: its next start takes this one for clean", directory, DIRTY_NAME)
        if config.persist_bookie_status_enabled and not config.force_read_only_bookie:
            self._status = self._read_status()
            self._manual = self._status.mode is BookieMode.READ_ONLY and self._status.manual is not False
        storage.open()
        self._storage_is_open = True
        entries, skipped = storage.replayed
        if not is_new and (was_dirty or entries or skipped):
            log.info(
                "%s stop before: replayed %d entries, skipped %d records of deleted ledgers",
                "Unclean" if was_dirty else "Clean", entries, skipped,
            )  # fmt: skip

    @property
    def service_info(self) -> BookieServiceInfo:
        """What the bookie registers: its addresses, and that it knows ledger scopes."""
        host, port = self.address
        endpoints = [Endpoint("bookie", port, host, BOOKIE_RPC_PROTOCOL)]
        config = self.config
        if config.http_server_enabled:
            protocol = "https" if config.http_server_tls_enable else "http"
            http = Endpoint(HTTP_ENDPOINT_ID, config.http_server_port, config.http_server_host or "0.0.0.0", protocol)
            endpoints.insert(0, http)
        return BookieServiceInfo(tuple(endpoints), {LEDGER_SCOPES_PROPERTY: "1"})

    async def _register(self) -> None:
        """Register as read-only or writable; what was begun is finished although the caller is cancelled."""
        move = self._loop.create_task(self._move())
        # Where the caller is gone nobody else takes note of how it ended, and asyncio would complain.
        move.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(move)

    async def _move(self) -> None:
        async with self._registering:  # two moves at once, there and back, could take the bookie off both lists
            wanted = self.read_only
            if (wanted != self._registered_read_only or self._is_move_unsure) and self._leaving is None:
                assert self._cluster is not None
                self._is_move_unsure = True  # what fails may have been done, or half of it: the next move does it all
                await asyncio.to_thread(self._cluster.bookies.register, self.bookie_id, self.service_info, wanted)
                self._registered_read_only = wanted
                self._is_move_unsure = False

    async def _leave(self) -> None:
        """Take the bookie off the lists, after a move under way, which would register it again."""
        async with self._registering:
            is_listed = self._registered_read_only is not None or self._is_move_unsure
            if self._cluster is not None and is_listed and not self._is_usurped:  # what others hold is theirs
                with contextlib.suppress(BkctlError):
                    await asyncio.to_thread(self._cluster.bookies.unregister, self.bookie_id)
                self._registered_read_only = None
                self._is_move_unsure = False

    async def _left(self, timeout_s: float) -> None:
        """Wait until the bookie is off the lists, or for `timeout_s`."""
        if self._leaving is None:
            self._leaving = self._loop.create_task(self._leave())
            self._leaving.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([self._leaving], timeout=timeout_s)

    async def _in_time(self, what: str, work: Callable[[], object]) -> bool:
        """Run `work` in a thread until the stop has to end; False, and said, where it hangs longer. Raises as it does.

        The thread is left behind then: a disk that hangs keeps it, and nobody can end it.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def tell(error: BaseException | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except Exception as failure:  # noqa: BLE001 - raised where it is waited for
                error = failure
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(tell, error)

        threading.Thread(target=run, name=f"stop-{what}", daemon=True).start()
        most_s = max(1.0, self._stop_by_s - time.monotonic())
        await asyncio.wait([done], timeout=most_s)
        if done.done():
            done.result()
            return True
        self.is_stuck = True
        done.add_done_callback(lambda late: late.cancelled() or late.exception())
        log.error("Bookie %s stops without %s, which hangs", self.bookie_id, what)
        return False

    async def stop(self) -> None:
        """The clean stop: leave the lists of bookies, answer what was read, checkpoint everything, and leave the
        directories fit for Apache's bookie.

        After a failure nothing more is written: the next start replays the journals. It ends within STOP_S and some
        seconds, whatever failed: `failure` and `is_stuck` tell. Source: BP-35's downgrade.
        """
        self._stop_by_s = time.monotonic() + (STOP_S if self.failure is None else FAILED_STOP_S)
        await self._left(STOP_GRACE_S)
        await self._stop_collecting()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        self._polls.finish()
        await self._server.close(STOP_GRACE_S if self.failure is None else 0)
        self._stopping = True
        if self._journals and self.failure is None:
            try:
                self._flush()
                await self._checkpoint_over(timeout_s=self._stop_by_s - time.monotonic())
                stopped = await self._in_time("its writing threads", self._stop_threads)
                await asyncio.sleep(0)  # what the threads reported last
                if self.failure is None and not (stopped and await self._in_time("a checkpoint", self._close_storage)):
                    raise TimedOut("a disk hangs")
            except Exception as error:  # noqa: BLE001 - kept in `failure`
                if not isinstance(error, (OSError, BkctlError)):
                    self._note_unexpected("The clean stop", error)
                self._fail(BkctlError(f"The clean stop of bookie {self.bookie_id} failed: {error}"))
        await self._release()
        log.info("Bookie %s stopped", self.bookie_id)
        self.stopped.set()

    async def _stop_collecting(self) -> None:
        """Garbage collection asks the loop and the checkpoint thread, so it ends before them."""
        if self.garbage_collector is not None:
            await self._in_time("its garbage collector", self.garbage_collector.stop)

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
        self._storage_is_open = False
        for directory in self.storage.ledger_directories:
            self.files.remove(directory / DIRTY_NAME)
            self.files.sync_directory(directory)

    async def _release(self) -> None:
        if self.failure is not None or self.started_ms == 0:
            self._stop_by_s = min(self._stop_by_s, time.monotonic() + FAILED_STOP_S)
        await self._stop_collecting()
        await self._server.close(0)
        await self._in_time("its writing threads", self._stop_threads)
        for pool in (self._openers, self._readers):
            if pool is not None:
                await self._in_time("its readers", pool.shutdown)
        if self._storage_is_open and not self.is_stuck:  # whoever hangs may write yet
            self._storage_is_open = False
            try:
                await self._in_time("its ledger storage", self.storage.ledgers.close)
            except Exception as error:  # noqa: BLE001 - told
                log.warning("Bookie %s cannot close its ledger storage: %r", self.bookie_id, error)
        await self._left(max(STOP_GRACE_S, self._stop_by_s - time.monotonic()))
        self._released = True
        if self._cluster is not None and self._owns_cluster:
            await self._in_time("its metadata store", self._cluster.close)
            self._cluster = None
        if not self.is_stuck:
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
            self._gave_up.set_result(None)
            if self.garbage_collector is not None:
                self.garbage_collector.cancel()
            # Behind the answers that are there, and instead of those that cannot come any more.
            self._loop.call_soon(self._server.abort)

    # --- the hot path ------------------------------------------------------------------------------------------------

    def handle(self, request: Request, respond: Respond) -> None:
        """Serve one request: `respond` is called once, now or later."""
        handler = self._handlers[type(request)]
        if self._waiting and getattr(request, "ledger", None) in self._waiting:
            self._serve_later(None, handler, request, respond)
            return
        try:
            handler(request, respond)
        except NeedsDisk as need:
            self._serve_later(need, handler, request, respond)
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            self.refuse(request, respond, error)

    def refuse(self, request: Request, respond: Respond, error: BaseException) -> None:
        """Answer `request` with the status of `error`; log an error that is not a plain refusal."""
        respond(refusal(request, self._status_after(type(request).__name__, error)))

    def _status_after(self, what: str, error: BaseException) -> Status:
        status = status_of(error)
        if not isinstance(error, (OSError, BkctlError)):
            self._note_unexpected(what, error)
        elif status is Status.EIO:
            log.warning("%s: %s", what, error)
        return status

    def _continue(self, request: Request, respond: Respond, then: Callable[[Any], None], found: Any) -> None:
        """Go on with `request` after a wait: whatever is raised there is answered, and stays with this request."""
        try:
            then(found)
        except NeedsDisk as need:
            self._serve_later(need, lambda *_: then(found), request, respond)
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            self.refuse(request, respond, error)

    def _note_unexpected(self, what: str, error: BaseException) -> None:
        self.metrics.unexpected_errors += 1
        log.error("%s failed with an unexpected error", what, exc_info=error)

    def _timed(self, name: str, handler: Callable[[Any, Respond], None], request: Request, respond: Respond) -> None:
        """Let `handler` take a request, and note how long it takes to be answered."""
        latency = self.metrics.requests[name]
        began_s = time.monotonic()
        timed = self._server.timed(respond, latency.answered)
        try:
            handler(request, timed)
        except NeedsDisk as need:
            self._serve_later(need, handler, request, timed)
        except Exception:
            latency.observe(time.monotonic() - began_s, ok=False)
            raise

    def _add(self, request: AddRequest, respond: Respond) -> None:
        ledger, entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
        if self.read_only and not (high_priority and self._allows_high_priority and not self._no_space):
            raise ReadOnlyBookie(f"Bookie {self.bookie_id} is read-only")
        assert not isinstance(body, tuple)
        if self._is_behind and not high_priority:
            self._check_pending()
        answer = functools.partial(self._answer_add, respond, ledger, entry_id)
        if deferred_sync and not recovery_add:  # as Apache's recoveryAddEntry, which acknowledges nothing unsynced
            self.storage.add(ledger, entry_id, master_key, body, None, recovery_add)
            self.storage.when_written(ledger, lambda error: answer(_EOK if error is None else Status.EIO))
        else:
            self.storage.add(ledger, entry_id, master_key, body, answer, recovery_add)
        self._flush_soon()

    def handle_adds(self, adds: AddRun, answer: AnswerAdds) -> None:
        """Serve a run of plain adds: `answer` is called once for all of them. Raises BkctlError for a refusal."""
        if self.read_only:
            raise ReadOnlyBookie(f"Bookie {self.bookie_id} is read-only")
        if self._is_behind:
            self._check_pending()
        ledger, master_key, entry_ids, records, size, last_add_confirmed, _ = adds
        if self._waiting and ledger in self._waiting:
            self._waiting[ledger].append(functools.partial(self._add_later, adds, answer))
            return
        try:
            self.storage.add_records(ledger, master_key, entry_ids, records, size, last_add_confirmed, answer)
        except NeedsDisk as need:
            self._once_read(need, functools.partial(self._add_later, adds, answer))
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            answer(self._status_after(AddRequest.__name__, error))
        else:
            self._flush_soon()

    def _add_later(self, adds: AddRun, answer: AnswerAdds, error: BaseException | None) -> None:
        """Serve a run of adds that waited for its ledger."""
        try:
            if error is not None:
                raise error
            self.handle_adds(adds, answer)
        except Exception as failure:  # noqa: BLE001 - answered, logged and counted
            answer(self._status_after(AddRequest.__name__, failure))

    # --- what waits for the disk -------------------------------------------------------------------------------------

    def _once_read(self, need: NeedsDisk, waiter: Waiter) -> None:
        """Call `waiter` once a thread has read what `need` says, behind all that wait for the same ledger.

        Everything about that ledger waits here meanwhile, so its requests keep their order.
        """
        waiting = self._waiting.get(need.ledger)
        if waiting is not None:
            waiting.append(waiter)
            return
        self._waiting[need.ledger] = [waiter]
        future = self._loop.run_in_executor(self._openers, need.read)
        future.add_done_callback(functools.partial(self._serve_waiting, need.ledger))

    def _serve_waiting(self, ledger: LedgerId, future: asyncio.Future[Any]) -> None:
        """Serve, in order, what waited for `ledger`; one of it may wait again, and then so do those behind it."""
        waiting = self._waiting.pop(ledger)
        error = future.exception()
        if self._stopping:  # storage is being closed, and these were not answered in time
            error = BkctlError(f"Bookie {self.bookie_id} stops")
        with contextlib.nullcontext() if error is not None else self.storage.supplied(future.result()):
            for waiter in waiting:
                if ledger in self._waiting:
                    self._waiting[ledger].append(waiter)
                else:
                    waiter(error)

    def _serve_later(
        self, need: NeedsDisk | None, handler: Callable[[Any, Respond], None], request: Any, respond: Respond
    ) -> None:
        """Have `handler` take the request again once what it needs is in memory; None: what its ledger waits for."""
        if isinstance(request, AddRequest) and isinstance(request.body, memoryview):
            request = request._replace(body=bytes(request.body))  # it is in the connection's buffer

        def serve(error: BaseException | None) -> None:
            if error is not None:
                self.refuse(request, respond, error)
                return
            try:
                handler(request, respond)
            except NeedsDisk as again:
                self._serve_later(again, handler, request, respond)
            except Exception as failure:  # noqa: BLE001 - answered, logged and counted
                self.refuse(request, respond, failure)

        if need is None:
            self._waiting[request.ledger].append(serve)
        else:
            self._once_read(need, serve)

    def adds_at_once(self) -> int:
        """How many adds may come in one run: what may wait while the disks are behind."""
        if self._is_behind:
            return max(1, self._pending_adds_max - self._pending_adds)
        return sys.maxsize

    @property
    def _is_behind(self) -> bool:
        return self._is_held or self._waits_for_journals

    @property
    def _pending_adds(self) -> int:
        return sum(batch.count for batch in self.storage.batches)

    def _check_pending(self) -> None:
        """Raises TooManyRequests when the disks are behind and as many adds wait as maxPendingAddRequestsPerThread."""
        if self._pending_adds >= self._pending_adds_max:
            raise TooManyRequests(f"Bookie {self.bookie_id} is behind with its disks")

    @staticmethod
    def _answer_add(respond: Respond, ledger: LedgerId, entry_id: int, status: Status) -> None:
        respond(AddResponse(status, ledger, entry_id))

    def _flush(self) -> None:
        """Hand what this turn of the loop gathered to the journal threads."""
        self._flush_due = False
        storage = self.storage
        is_full = storage.unwritten_bytes > storage.ledgers.unwritten_bytes_max
        if is_full and not (self._stopping or self._no_space or self.failure):
            # The disk is behind: what is not acknowledged holds its connection back, until entries are written. The
            # writes under way may end before they see that, so there has to be one more.
            if not self._is_held and self._entries is not None:
                self._is_held = True
                if storage.ledgers.writes_ahead:
                    storage.seal_entries(1)
                    self._entries.submit(self._write_entries)
                elif self._checkpoint_running is None:
                    self._begin_checkpoint()
            return
        self._waits_for_journals = False
        for number, journal in enumerate(self._journals):
            if journal.is_full and not self._stopping:
                self._waits_for_journals = True
                continue
            batch = storage.take_batch(number)
            if batch is not None:
                journal.put(batch)
        if storage.seal_entries() and self._entries is not None:
            self._entries.submit(self._write_entries)
        if storage.is_checkpoint_due and self._checkpoint_running is None:
            self._begin_checkpoint()

    def written(self, group: list[Batch]) -> None:
        """The system has a journal's group: tell those who wait for no more (deferred sync); in the event loop."""
        for batch in group:
            batch.tell_written(None)

    def committed(self, number: int, group: list[Batch], error: OSError | None) -> None:
        """A journal's group is on disk, or failed: tell everybody; in the event loop."""
        now_s = time.monotonic()
        for batch in group:
            if self._journals:
                self._journals[number].taken(batch)
            self.metrics.adds_settled(batch.count, batch.size, now_s - batch.put_s, ok=error is None)
            doomed = self.storage.settle(number, batch, error)
            self._answer_all(batch.tokens, _EOK if error is None else Status.EIO)
            if doomed is not None:
                self._answer_all(doomed.tokens, Status.EIO)
        if error is not None:
            self._journal_failed(number, error)
        if self._waits_for_journals:
            self._flush_soon()

    def _answer_all(self, answers: Iterable[AnswerAdds | None], status: Status) -> None:
        """Tell all who added something what became of it; the failure of one keeps nothing from the others."""
        for answer in answers:
            if answer is not None:
                try:
                    answer(status)
                except Exception as error:  # noqa: BLE001 - logged and counted
                    self._note_unexpected("An answer", error)

    def _journal_failed(self, number: int, error: OSError) -> None:
        journal = self.storage.journals[number]
        if journal.failed is not None:
            self._fail(BkctlError(f"Journal {journal.directory} failed: {journal.failed}"))
        elif error.errno in NO_SPACE:
            self._run_out_of_space(f"Journal {journal.directory} cannot grow ({error.strerror})")
        else:
            log.warning("Journal %s: %s", journal.directory, error)

    def _write_entries(self) -> None:
        try:
            self.storage.write_entries()
        except Exception as error:  # noqa: BLE001 - the bookie gives up, or has no space
            self._loop.call_soon_threadsafe(self._storage_failed, disk_failure(error))
        if self._is_held:
            self._loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        if self._is_held:
            self._is_held = False
            self._flush_soon()

    def _storage_failed(self, error: OSError) -> None:
        if error.errno in NO_SPACE and self.storage.leave_full_disk():
            log.warning(
                "%s takes no more (%s): its entries go to another ledger directory", error.filename or "A disk",
                error.strerror,
            )  # fmt: skip
            if self._checkpoint_running is None and self._entries is not None:
                self._entries.submit(self._write_entries)
        elif error.errno in NO_SPACE:
            self._run_out_of_space(f"Ledger storage cannot grow ({error})")
        else:
            self._fail(BkctlError(f"Ledger storage of bookie {self.bookie_id} failed: {error}"))

    # --- reads -------------------------------------------------------------------------------------------------------

    def _read(self, request: ReadRequest, respond: Respond) -> None:
        if request.fence:
            self._timed("READ_ENTRY_FENCE", self._fence_and_read, request, respond)
        elif request.previous_lac is not None:
            self._timed("READ_ENTRY_LONG_POLL", self._read_after_wait, request, respond)
        else:
            self._read_plain(request, respond)

    def _read_plain(self, request: ReadRequest, respond: Respond) -> None:
        handle = self._handle(request.ledger)
        entry_id = self._entry_id(handle, request.entry_id)

        def take(body: Buffer) -> None:
            max_lac = handle.lac if handle.lac_is_known else None
            respond(ReadResponse(_EOK, request.ledger, request.entry_id, body, max_lac))

        def take_both(found: tuple[Buffer, int | None]) -> None:
            body, lac = found
            if lac is not None:
                self.storage.learn_lac(handle, lac)
            take(body)

        if handle.lac_is_known or handle.unknown or not self._server.carries_lac(respond):
            self._with_entry(handle, entry_id, request, respond, take)
        else:
            self._in_reader(functools.partial(self._read_with_lac, handle, entry_id), request, respond, take_both)

    def _read_with_lac(self, handle: LedgerHandle, entry_id: int) -> tuple[Buffer, int | None]:
        """An entry, and what `learn_lac` takes: None where the last entry, another one maybe, cannot be read."""
        body = self.storage.read(handle, entry_id)
        try:
            return body, self.storage.read_lac(handle)
        except (OSError, BkctlError):
            return body, None

    def _entry_id(self, handle: LedgerHandle, entry_id: int) -> int:
        """The entry that a request means. Raises UnknownLedgerState where the last one may be lost."""
        return self.storage.last_entry(handle) if entry_id == LAST_ENTRY else entry_id

    def _handle(self, ledger: Any) -> LedgerHandle:
        handle = self.storage.get(ledger)
        if handle is None:
            raise self.storage.missing(ledger)
        return handle

    def _with_entry(
        self,
        handle: LedgerHandle,
        entry_id: int,
        request: Request,
        respond: Respond,
        take: Callable[[Buffer], None],
        absent: Callable[[], None] | None = None,
    ) -> None:
        """Give the entry to `take`, at once or once a thread has read it.

        Where it is not here: call `absent`, without one answer ENOENTRY or raise EntryNotFound. Raises
        UnknownLedgerState.
        """
        try:
            body = self.storage.find(handle, entry_id)
        except EntryNotFound:
            if absent is None:
                raise
            absent()
            return
        if body is not None and not self._server.is_congested(respond):
            self.metrics.reads_from_memory += 1
            self.metrics.read_bytes += len(body)
            take(body)
        else:
            self._in_reader(functools.partial(self.storage.read, handle, entry_id), request, respond, take, absent)

    def _in_reader(
        self,
        read: Callable[[], Any],
        request: Request,
        respond: Respond,
        take: Callable[[Any], None],
        absent: Callable[[], None] | None = None,
    ) -> None:
        """Give to `take` what a thread has read; what it raises is the answer, or `absent` for EntryNotFound."""
        began_s = time.monotonic()

        def done(future: asyncio.Future[Any]) -> None:
            error = future.exception()
            self.metrics.read_entry.observe(time.monotonic() - began_s, ok=error is None)
            if error is None:
                self._continue(request, respond, take, future.result())
            elif absent is not None and isinstance(error, EntryNotFound):
                absent()
            else:
                self.refuse(request, respond, error)

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
            else:
                self._continue(request, respond, then, handle)

        handle = self.storage.fence(request.ledger, master_key, done)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _fence_and_read(self, request: ReadRequest, respond: Respond) -> None:
        self._fenced(request, request.master_key, functools.partial(self._read_fenced, request, respond), respond)

    def _read_fenced(self, request: ReadRequest, respond: Respond, handle: LedgerHandle) -> None:
        self._with_entry(
            handle,
            self._entry_id(handle, request.entry_id),
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, request.entry_id, body)),
        )

    def _read_after_wait(self, request: ReadRequest, respond: Respond) -> None:
        """Long poll. Source: LongPollReadEntryProcessorV3."""
        if request.piggyback and request.entry_id != LAST_ENTRY:
            raise BadRequest("A long poll with piggyback reads the last entry, entry id -1")
        handle = self._handle(request.ledger)
        self.storage.last_entry(handle)  # where it is unknown, so is the LAC
        if handle.lac_is_known:
            self._wait(handle, request, respond)
            return

        def take(lac: int) -> None:
            self.storage.learn_lac(handle, lac)
            self._read_after_wait(request, respond)

        self._in_reader(functools.partial(self.storage.read_lac, handle), request, respond, take)

    def _wait(self, handle: LedgerHandle, request: ReadRequest, respond: Respond) -> None:
        previous = request.previous_lac
        assert previous is not None
        waits = request.timeout_ms is not None and request.timeout_ms > 0
        waits = waits and handle.lac <= previous and not handle.fenced
        if not (waits and self._polls.wait(handle, request, respond)):
            self._answer_poll(handle, request, respond, updated=False)

    def finish_poll(self, handle: LedgerHandle, request: ReadRequest, respond: Respond, *, updated: bool) -> None:
        """Answer a long poll whose wait is over, because the LAC of `handle` was `updated` or not."""

        def answer(handle: LedgerHandle) -> None:
            if handle.deleted:
                raise self.storage.missing(request.ledger)
            self._answer_poll(handle, request, respond, updated=updated)

        self._continue(request, respond, answer, handle)

    def _answer_poll(self, handle: LedgerHandle, request: ReadRequest, respond: Respond, *, updated: bool) -> None:
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
        self._with_entry(
            handle,
            entry_id,
            request,
            respond,
            lambda body: respond(ReadResponse(_EOK, request.ledger, echoed, body, lac, timestamp)),
            absent,
        )

    def on_lost(self, respond: Respond) -> dict[Callable[[], None], None]:
        """What is called (the keys) once the client is gone that `respond` answers."""
        return self._server.on_lost(respond)

    def _batch_read(self, request: BatchReadRequest, respond: Respond) -> None:
        if request.fence:
            then = functools.partial(self._read_batch, request, respond)
            self._fenced(request, request.master_key, then, respond)
        else:
            self._read_batch(request, respond, self._handle(request.ledger))

    def _read_batch(self, request: BatchReadRequest, respond: Respond, handle: LedgerHandle) -> None:
        """Consecutive entries up to a count and a size, at least one; the first one's size stands for the others'.

        Source: BatchedReadEntryProcessor.
        """
        storage = self.storage
        first = self._entry_id(handle, request.entry_id)
        size_max = min(request.max_size, self.config.max_batch_read_size)
        count_max = min(request.max_count, BATCH_READ_COUNT_MAX) if request.max_count > 0 else BATCH_READ_COUNT_MAX

        def gather() -> tuple[Buffer, ...]:
            bodies: list[Buffer] = []
            size = BATCH_READ_OVERHEAD_BYTES
            most = count_max
            while len(bodies) < most:
                try:
                    body = storage.read(handle, first + len(bodies))
                except (OSError, BkctlError):
                    if not bodies:
                        raise
                    break
                size += len(body) + 4
                if not bodies:
                    most = min(most, 1 + max(0, size_max - size) // (len(body) + 4))
                elif size > size_max:
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
        try:
            handle = self._handle(request.ledger)
        except LedgerNotFound as error:
            raise EntryNotFound(error.message) from error
        lac_body = handle.explicit_lac or None
        last_entry = self.storage.last_entry(handle)
        if last_entry < 0:
            # Apache's answer: an explicit LAC without any entry is an I/O error that carries the LAC.
            respond(ReadLacResponse(Status.ENOENTRY if lac_body is None else Status.EIO, request.ledger, lac_body))
            return
        self._with_entry(
            handle,
            last_entry,
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
        availability = self.storage.availability(handle, lambda: not self._server.is_lost(respond))
        self._in_reader(
            lambda: availability().serialize(),
            request,
            respond,
            lambda data: respond(ListEntriesResponse(_EOK, request.ledger, data)),
        )

    def _info(self, request: BookieInfoRequest, respond: Respond) -> None:
        def take(disks: DiskUsage) -> None:
            wanted = request.requested
            total = disks.total if wanted & BookieInfoFlags.TOTAL_DISK_CAPACITY else None
            free = disks.free if wanted & BookieInfoFlags.FREE_DISK_SPACE else None
            respond(BookieInfoResponse(_EOK, total, free))

        directories = self.storage.ledger_directories
        self._in_reader(
            lambda: total_usage(self.files.disk_usage(each) for each in directories), request, respond, take
        )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    async def _checkpoint_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.config.flush_interval / 1000)
            await self.checkpoint()

    async def checkpoint(self) -> None:
        """Bring everything that is in the journal into ledger storage, and wait for it."""
        if self._checkpoint_running is None:
            self._begin_checkpoint()
        await self._checkpoint_over()

    async def _checkpoint_over(self, timeout_s: float | None = None) -> bool:
        """Wait until the checkpoint under way ends, the bookie gives up, or `timeout_s` are over; True if written."""
        running = self._checkpoint_running
        if running is None:
            return True
        await asyncio.wait([running, self._gave_up], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return running.done() and running.result()

    async def _checkpoint_from_now(self) -> None:
        """A checkpoint of at least what is in memory now. Raises NoSpaceForCheckpoint, and what ended the bookie."""
        await self._checkpoint_over()
        if self._checkpoint_running is None:
            self._begin_checkpoint()
        written = await self._checkpoint_over()
        if self.failure is not None:
            raise self.failure
        if not written:
            raise NoSpaceForCheckpoint(f"Bookie {self.bookie_id} has no space for a checkpoint")

    def _begin_checkpoint(self) -> None:
        if self._checkpoints is None or self.failure is not None:
            return
        try:
            checkpoint = self.storage.begin_checkpoint()
        except Exception as error:  # noqa: BLE001 - nobody knows what it took
            self._storage_failed(disk_failure(error))
            return
        if checkpoint is None:
            self._look_for_space()
            return
        running: asyncio.Future[bool] = self._loop.create_future()
        self._checkpoint_running = running
        began_s = time.monotonic()

        def over(error: OSError | None) -> None:
            self.metrics.flush.observe(time.monotonic() - began_s, ok=error is None)
            self._checkpoint_running = None
            try:
                self.storage.end_checkpoint(checkpoint, written=error is None)
                if error is not None:
                    self._storage_failed(error)
                else:
                    self._look_for_space()
                self._go_on()
            except Exception as failure:  # noqa: BLE001 - logged and counted
                self._note_unexpected("The end of a checkpoint", failure)
                self._fail(BkctlError(f"Bookie {self.bookie_id} cannot end a checkpoint: {failure!r}"))
            running.set_result(error is None and self.failure is None)

        def task() -> None:
            error = None
            try:
                self.storage.checkpoint(checkpoint)
            except Exception as failure:  # noqa: BLE001 - the bookie gives up, or has no space
                error = disk_failure(failure)
            self._loop.call_soon_threadsafe(over, error)

        self._checkpoints.submit(task)

    # --- garbage collection: its thread asks, the loop acts ----------------------------------------------------------

    def _whole_checkpoint(self) -> None:
        asyncio.run_coroutine_threadsafe(self._checkpoint_from_now(), self._loop).result()

    def _delete_ledgers(self, ledgers: Sequence[LedgerId]) -> int:
        return asyncio.run_coroutine_threadsafe(self._delete_in_turn(ledgers), self._loop).result()

    async def _delete_in_turn(self, ledgers: Sequence[LedgerId]) -> int:
        """Delete ledgers, one a turn of the loop; how many there were.

        A checkpoint may be under way: on a busy bookie one begins with the end of another.
        """
        count = 0
        for ledger in ledgers:
            if self.failure is not None:
                raise self.failure
            try:
                await self._delete(ledger)
                count += 1
            except LedgerNotFound:
                pass
            except (OSError, BkctlError) as error:
                log.warning("Ledger %s cannot be deleted: %s", ledger, error)
            await asyncio.sleep(0)
        return count

    def _delete(self, ledger: LedgerId) -> asyncio.Future[None]:
        """Delete a ledger, behind the requests that wait for it."""
        deleted: asyncio.Future[None] = self._loop.create_future()

        def delete(error: BaseException | None = None) -> None:
            is_damaged = isinstance(error, Corrupt | Unsupported)
            try:
                if error is not None and not is_damaged:
                    raise error
                self.storage.delete_ledger(ledger, is_damaged=is_damaged)
            except NeedsDisk as need:
                self._once_read(need, delete)
            except Exception as failure:  # noqa: BLE001 - raised where it is waited for
                deleted.set_exception(failure)
            else:
                deleted.set_result(None)

        if ledger in self._waiting:
            self._waiting[ledger].append(delete)
        else:
            delete()
        return deleted

    # --- disks -------------------------------------------------------------------------------------------------------

    async def _watch_disks(self) -> None:
        while True:
            await asyncio.sleep(self.config.disk_check_interval / 1000)
            if self._no_space and await asyncio.to_thread(self._journals_have_space):
                await self.checkpoint()
            self._take_disks(await asyncio.to_thread(self._disks.look))
            try:
                await self._register()
            except AlreadyExists as error:
                self._fail(error)
            except BkctlError as error:
                log.warning("Cannot register as %s: %s", "read-only" if self.read_only else "writable", error)
            self._check_registration()

    def _check_registration(self) -> None:
        """Give up where another process holds our registration for longer than a session that is left behind lives.

        Source: ZKRegistrationManager.registerBookie, which waits for zkTimeout and then shuts the bookie down.
        """
        if self._cluster is None or self._registered_read_only is None:
            return
        usurped_s = self._cluster.bookies.usurped_s(self.bookie_id, self._registered_read_only)
        most_s = USURPED_ZK_TIMEOUTS * self.config.zk_timeout / 1000
        if usurped_s > most_s:
            self._fail(
                AlreadyExists(
                    f"Bookie {self.bookie_id} lost its session, and another process holds its registration for more "
                    f"than {most_s:g} s",
                    hint="stop that bookie, or give this one another id",
                )
            )
        elif usurped_s and not self._is_usurped:
            log.error(
                "Bookie %s lost its session, and another process holds its registration: this bookie stops in %g s",
                self.bookie_id, most_s - usurped_s,
            )  # fmt: skip
        self._is_usurped = usurped_s > 0

    def _journals_have_space(self) -> bool:
        needed = 2 * self.config.journal_pre_alloc_size_mb * MEBIBYTE
        has_space = all(self.files.disk_usage(each).free > needed for each in self.storage.journal_directories)
        return has_space and self.files.has_descriptors()

    def _look_for_space(self) -> None:
        """After a checkpoint went well, so ledger storage has space: so may the journals."""
        if self._no_space:
            with contextlib.suppress(OSError):
                self._no_space = not self._journals_have_space()

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
        """Which directories take new files, and whether the bookie takes entries."""
        self._take_disks(self._disks.look())

    def _take_disks(self, state: DiskState) -> None:
        self.storage.set_writable(state.writable)
        self.storage.set_index_writable(state.index_writable)
        self._allows_high_priority = state.allows_high_priority
        self._disks_full = state.full
        if self.garbage_collector is not None:
            self.garbage_collector.disks_are(full=state.any_full, almost_full=state.almost_full)
        if state.full and not self.config.read_only_mode_enabled:
            self._fail(BkctlError(f"The disks of bookie {self.bookie_id} are full, and read-only mode is not enabled"))
        self._update_mode()

    # --- read-only and writable --------------------------------------------------------------------------------------

    async def set_read_only(self, wanted: bool) -> None:
        """Refuse writes because an operator says so, or no longer; registered so when this returns.

        Without the operator's word the bookie may be read-only still, for its disks. Kept over a restart with
        persistBookieStatusEnabled. Raises UsageError when the configuration forbids it; Unreachable and other errors of
        the metadata store: it is registered later then. Source: BookieStateReadOnlyService, BookieStateManager.
        """
        if wanted and not self.config.read_only_mode_enabled:
            raise UsageError(f"Bookie {self.bookie_id} cannot become read-only: readOnlyModeEnabled is false")
        if not wanted and self.config.force_read_only_bookie:
            raise UsageError(f"Bookie {self.bookie_id} cannot become writable: forceReadOnlyBookie is true")
        self._manual = wanted
        self._update_mode()
        await self._register()

    def reconfigure(self, config: BookieConfig) -> None:
        """Go on with the settings in `config` that are looked at time and again; the others hold from the next start.

        They are those of disks, flushes, batch reads and compaction. Raises UsageError, and changes nothing, for such
        as the bookie would not start with.
        """
        check_compaction_settings(config)
        self._disks.use(config)
        self.config = config
        if self.garbage_collector is not None:
            self.garbage_collector.use(config)

    def state(self) -> dict[str, bool]:
        """What the bookie does, under the names of Apache's REST API. Source: BookieStateService."""
        return {
            "running": self.started_ms > 0 and self.failure is None and not self._released,
            "readOnly": self.read_only,
            "shuttingDown": self._stopping and not self._released,
            "availableForHighPriorityWrites": self._allows_high_priority and not self._no_space,
        }

    def _update_mode(self) -> None:
        forced = self.config.force_read_only_bookie or self._manual or self.storage.ledgers.needs_integrity_check
        wanted = forced or self._disks_full or self._no_space or self.failure is not None
        if wanted != self.read_only:
            log.info("Bookie %s is %s now", self.bookie_id, "read-only" if wanted else "writable")
            self.read_only = wanted
        if self.config.persist_bookie_status_enabled and not self.config.force_read_only_bookie:
            mode = BookieMode.READ_ONLY if wanted else BookieMode.READ_WRITE
            if (mode, self._manual) != (self._status.mode, bool(self._status.manual)):
                self._status = BookieStatus(mode, time.time_ns() // 1_000_000, self._manual)
                self._write_status(self._status)

    def _read_status(self) -> BookieStatus:
        """The latest BOOKIE_STATUS of the ledger directories. Source: BookieStatus.readFromDirectories."""
        found = BookieStatus(BookieMode.READ_WRITE, -1, False)
        for directory in self.storage.ledger_directories:
            path = directory / STATUS_NAME
            try:
                status = BookieStatus.parse(path.read_bytes(), str(path))
            except FileNotFoundError:
                continue
            except (OSError, BkctlError) as error:
                log.warning("The bookie's mode cannot be read: %s", error)
                continue
            if status.updated_ms > found.updated_ms:
                found = status
        return found

    def _write_status(self, status: BookieStatus) -> None:
        """Write BOOKIE_STATUS wherever that is possible. Source: BookieStatus.writeToDirectories."""
        for directory in self.storage.ledger_directories:
            try:
                self.files.replace(directory / STATUS_NAME, status.serialize())
            except OSError as error:
                log.warning("The bookie's mode cannot be kept in %s: %s", directory, error)


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
    gc.set_threshold(*GC_THRESHOLDS)
    allow_open_files()
    bookie = Bookie(config, security=security)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, bookie.stopped.set)
    try:
        await bookie.start()
        gc.freeze()
        started(bookie)
        await bookie.stopped.wait()
        await bookie.stop()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if bookie.is_stuck:
        # Python would wait at its exit for threads that a disk holds.
        logging.shutdown()
        os._exit(1)
    if bookie.failure is not None:
        raise bookie.failure
