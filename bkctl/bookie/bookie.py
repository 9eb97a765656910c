"""The bookie: its start, its stop, and the parts that it is made of.

Everything that changes a ledger happens in the event loop's thread, in memory. One thread a journal writes and syncs
the adds of a turn of the loop (`group_commit`), one writes entry logs, one checkpoints (`checkpoints`). The loop waits
for no disk: other threads open ledgers and read entries (`waiting_requests`, `reads`). Source: BookieImpl.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

from bkctl import __version__
from bkctl.bookie.cookies import read_directory, stamp_or_verify
from bkctl.bookie.disk_space import DiskSpaceMonitor
from bkctl.bookie.entry_log_collection import check_compaction_settings
from bkctl.bookie.garbage_collector import GarbageCollectorThread
from bkctl.bookie.group_commit import GroupCommit
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.network import (
    advertised_host,
    check_authentication,
    check_user,
    former_port,
    listening_host,
    reserved_port,
)
from bkctl.bookie.registration import RegistrationManager
from bkctl.bookie.request_processor import RequestProcessor
from bkctl.bookie.state_manager import BookieStateManager, StopDeadline
from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import BkctlError, TimedOut, UsageError
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.formats.names import DIRTY_NAME
from bkctl.ids import LedgerId, check_bookie_id
from bkctl.metadata.cluster import (
    BOOKIE_RPC_PROTOCOL,
    HTTP_ENDPOINT_ID,
    LEDGER_SCOPES_PROPERTY,
    VERSION_PROPERTY,
    Cluster,
    open_cluster,
)
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.repair.holding import refuse_writers
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.tasks import cancel_and_wait, run_to_end

log: Final = logging.getLogger("bkctl.bookie")

#: A stop waits this long for the answers to requests that were read before.
STOP_GRACE_S: Final = 5.0
#: A clean stop, which brings everything in memory to disk, ends after this long although a disk hangs.
STOP_S: Final = 300.0
#: A stop after a failure, which writes nothing more, ends after this long.
FAILED_STOP_S: Final = 30.0


class Bookie:
    """One bookie in this process: `start`, `stop`, and what operators change in between.

    `cluster` None: the bookie opens `metadata_service_uri` itself with `security`, and closes it. After `start`:
    `bookie_id`, `address` (host, port) and `read_only`. When the bookie has to give up, `failure` and `stopped` are
    set.
    """

    def __init__(
        self,
        config: BookieConfig,
        *,
        cluster: Cluster | None = None,
        security: StoreSecurity = NO_SECURITY,
        files: Files | None = None,
    ) -> None:
        self._security = security
        self._cluster = cluster
        self._owns_cluster = cluster is None
        self._held = contextlib.ExitStack()
        self.files = files or Files()
        self.address = ("", 0)
        self.started_ms = 0
        self.stopped = asyncio.Event()
        self._look_now = asyncio.Event()
        self.metrics = BookieMetrics()
        self.storage = BookieStorage(config, files=self.files)
        self.state_manager = BookieStateManager(config, self.files, self.storage, self._give_up)
        self.registration = RegistrationManager(self.state_manager)
        self.space = DiskSpaceMonitor(self.files, self.storage, self.state_manager, self.registration)
        self.commits = GroupCommit(self.storage, self.state_manager, self.metrics, self.space)
        self.processor = RequestProcessor(self.files, self.storage, self.state_manager, self.commits, self.metrics)
        self.garbage_collector: GarbageCollectorThread | None = None
        server = self.server = self.processor.server
        self.metrics.clients = lambda: (len(server.connections), server.unfinished.bytes)
        self.metrics.ended_connections["bookie"] = server.ended
        self._tasks: list[asyncio.Task[None]] = []
        self._deadline = StopDeadline(self.state_manager)
        self.storage_is_open = False
        self._is_released = False

    # --- state and changes by operators ------------------------------------------------------------------------------

    @property
    def config(self) -> BookieConfig:
        """The settings; `reconfigure` changes them."""
        return self.state_manager.config

    @property
    def bookie_id(self) -> str:
        """The id that the bookie registers."""
        return self.state_manager.bookie_id

    @property
    def read_only(self) -> bool:
        """True if the bookie refuses writes."""
        return self.state_manager.read_only

    @property
    def failure(self) -> BkctlError | None:
        """The error that made the bookie give up."""
        return self.state_manager.failure

    @property
    def is_stuck(self) -> bool:
        """True if a stop left hanging threads behind: the process has to end without them."""
        return self._deadline.is_stuck

    @property
    def service_info(self) -> BookieServiceInfo:
        """The addresses that the bookie registers, and that it knows ledger scopes."""
        host, port = self.address
        endpoints = [BookieEndpoint("bookie", port, host, BOOKIE_RPC_PROTOCOL)]
        config = self.config
        if config.http_server_enabled:
            protocol = "https" if config.http_server_tls_enable else "http"
            http = BookieEndpoint(
                HTTP_ENDPOINT_ID, config.http_server_port, config.http_server_host or "0.0.0.0", protocol
            )
            endpoints.insert(0, http)
        return BookieServiceInfo(
            tuple(endpoints), {LEDGER_SCOPES_PROPERTY: "1", VERSION_PROPERTY: f"bkctl {__version__}"}
        )

    def state(self) -> dict[str, bool]:
        """Return the bookie's state under the names of Apache's REST API. Source: BookieStateService."""
        state = self.state_manager
        return {
            "running": self.started_ms > 0 and state.failure is None and not self._is_released,
            "readOnly": state.read_only,
            "shuttingDown": state.is_stopping and not self._is_released,
            "availableForHighPriorityWrites": state.takes_high_priority_writes,
        }

    async def set_read_only(self, wanted: bool) -> None:
        """Become read-only, or writable where the disks allow it, and register so.

        Kept over a restart with persistBookieStatusEnabled. Raises UsageError when the configuration forbids it, and
        errors of the metadata store (Unreachable): the next look at the disks registers then. Source:
        BookieStateReadOnlyService, BookieStateManager.
        """
        self.state_manager.set_manual(wanted)
        await self.registration.update()

    def reconfigure(self, config: BookieConfig) -> None:
        """Take settings of disks, flushes, batch reads and compaction from `config`; the others need a restart.

        Raises UsageError, and changes nothing, for settings that the bookie would not start with.
        """
        check_compaction_settings(config)
        self.space.disks.use(config)
        self.state_manager.config = config
        if self.garbage_collector is not None:
            self.garbage_collector.use(config)
        self._look_now.set()

    async def checkpoint(self) -> None:
        """Bring everything that is in the journals into ledger storage, and wait for that."""
        await self.commits.checkpoints.run()

    # --- start -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Claim the port, check registration and cookies, replay the journals, listen and register.

        Raises UsageError, Unsupported (settings), BkctlError (the address is taken), AlreadyExists (another process has
        registered the bookie), CookieMismatch, DirectoryInUse, Corrupt, Unreachable. Nothing is left running or held
        then. A cancellation is raised once the threads that open the metadata store and the storage, and replay the
        journals, have ended.
        """
        self._loop = asyncio.get_running_loop()
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
        self.space.start()
        host = await asyncio.to_thread(advertised_host, config)
        if self._cluster is None:
            await run_to_end(asyncio.to_thread(self._open_cluster))
        cluster = self._cluster
        assert cluster is not None
        self.metrics.certificates["metadata"] = cluster.store.tls
        port = config.bookie_port or former_port(config, host) or self._held.enter_context(reserved_port(host))
        self.state_manager.bookie_id = check_bookie_id(config.bookie_id or f"{host}:{port}")
        self.address = (host, port)
        # Before anything on a disk changes: flock keeps out our own bookies only.
        try:
            await self.server.claim(listening_host(config, host), port)
        except OSError as error:
            raise _cannot_listen(self.bookie_id, port, error) from error
        await self.registration.wait_until_free(cluster)
        try:
            await run_to_end(asyncio.to_thread(self._open_storage, cluster))
        except OSError as error:
            raise BkctlError(f"Bookie {self.bookie_id} cannot open its directories: {error}") from error
        self.commits.start()
        self.storage.ledgers.waits_for_disk = False
        collector = self._create_collector(cluster)
        self._report_damage()
        self.space.check()
        try:
            await self.server.start(listening_host(config, host), port)
        except OSError as error:
            raise _cannot_listen(self.bookie_id, port, error) from error
        self.registration.start(cluster, self.service_info)
        await self.registration.update()
        self._keep_running(self.commits.checkpoints.run_regularly())
        self._keep_running(self._watch_disks())
        self._keep_running(self.registration.watch())
        collector.start()
        for warning in config.warnings:
            log.warning("%s", warning)
        if config.tls_client_authentication and not config.tls_required:
            log.warning("Clients without TLS are served too, as Apache's bookie does, unless tlsRequired=true")
        self.started_ms = time.time_ns() // 1_000_000
        log.info("Bookie %s serves on port %d%s", self.bookie_id, port, ", read-only" if self.read_only else "")

    def _open_cluster(self) -> None:
        config = self.config
        if config.metadata_service_uri is None:
            raise UsageError(f"{config.conf_path or 'The configuration'} has no metadataServiceUri")
        timeout_s = config.zk_timeout / 1000
        self._cluster = open_cluster(
            config.metadata_service_uri,
            timeout_s=timeout_s * 3,
            session_timeout_s=timeout_s,
            security=self._security,
        )

    def _open_storage(self, cluster: Cluster) -> None:
        storage = self.storage
        directories = {*storage.journal_directories, *storage.ledger_directories, *storage.index_directories}
        if not all(directory.is_dir() for directory in directories):  # Create nothing where a disk is not mounted.
            stamp_or_verify(self.config, self.bookie_id, cluster, None)
        for directory in sorted(directories):
            self.files.make_directory(directory)
        self._held.enter_context(self.files.lock(sorted(directories)))
        refuse_writers(storage.journal_directories)
        is_new = stamp_or_verify(self.config, self.bookie_id, cluster, self.files)
        was_dirty = _mark_dirty(storage.ledger_directories, self.files)
        self.state_manager.restore()
        storage.open()
        self.storage_is_open = True
        entries, skipped = storage.replayed
        if not is_new and (was_dirty or entries or skipped):
            log.info(
                "%s stop before: replayed %d entries, skipped %d records of deleted ledgers",
                "Unclean" if was_dirty else "Clean", entries, skipped,
            )  # fmt: skip

    def _create_collector(self, cluster: Cluster) -> GarbageCollectorThread:
        cookie = read_directory(self.config.ledger_directories[0])

        def delete(ledgers: Sequence[LedgerId]) -> int:
            return asyncio.run_coroutine_threadsafe(self.processor.requests.delete_all(ledgers), self._loop).result()

        self.garbage_collector = GarbageCollectorThread(
            self.config,
            self.storage.ledgers,
            cluster,
            bookie_id=self.bookie_id,
            instance_id=(cookie and cookie.instance_id) or "",
            delete=delete,
            checkpoint=self.commits.checkpoints.run_from_thread,
            files=self.files,
        )
        self.space.disks_are = self.garbage_collector.disks_are
        return self.garbage_collector

    def _report_damage(self) -> None:
        storage = self.storage
        if storage.no_space is not None:
            self.state_manager.lacks_space = True
            log.warning(
                "A disk accepts no more writes (%s): bookie %s accepts no entries until there is space, and keeps in "
                "memory the replayed records that it cannot write", storage.no_space, self.bookie_id,
            )  # fmt: skip
        if storage.ledgers.needs_integrity_check:
            log.warning(
                "A data integrity check of Apache's bookie is not finished, so entries and fences may be lost: bookie "
                "%s is read-only, and answers EUNKNOWNLEDGERSTATE for what it lacks. Start Apache's bookie with "
                "dataIntegrityChecking=true on its directories until the check is done", self.bookie_id,
            )  # fmt: skip

    # --- at work -----------------------------------------------------------------------------------------------------

    def _keep_running(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a loop in the background until the stop. Its end is a failure: journals and disks would fill up."""
        task = self._loop.create_task(coroutine)
        self._tasks.append(task)

        def end(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                reason = str(error) if isinstance(error, OSError) else repr(error)
                self.state_manager.fail(BkctlError(f"Bookie {self.bookie_id} cannot look after its disks: {reason}"))

        task.add_done_callback(end)

    async def _watch_disks(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), self.config.disk_check_interval / 1000)
            self._look_now.clear()
            if self.state_manager.lacks_space and await asyncio.to_thread(self.space.journals_have_space):
                await self.checkpoint()
            await self.space.check_in_thread()
            await self.registration.check()

    def _give_up(self) -> None:
        """Release everything that waits for this bookie, and ask for a stop; `failure` is set."""
        self.stopped.set()
        self.commits.checkpoints.abandon()
        if self.garbage_collector is not None:
            self.garbage_collector.cancel()
        # Behind the answers that are there, and instead of those that cannot come any more.
        self._loop.call_soon(self.server.abort)

    # --- stop --------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop cleanly: leave the lists of bookies, answer requests that were read, checkpoint everything.

        Apache's bookie can start on the directories then. After a failure nothing more is written: the next start
        replays the journals. The stop ends within STOP_S and some seconds, whatever failed: see `failure` and
        `is_stuck`. Source: BP-35's downgrade.
        """
        self._deadline.by_s = time.monotonic() + (STOP_S if self.failure is None else FAILED_STOP_S)
        await self.registration.leave(STOP_GRACE_S)
        await self._stop_collecting()
        await cancel_and_wait(*self._tasks, *self.registration.tasks)
        self._tasks.clear()
        self.processor.polls.finish()
        await self.server.close(STOP_GRACE_S if self.failure is None else 0)
        self.state_manager.is_stopping = True
        if self.commits.is_running and self.failure is None:
            try:
                await self._write_everything()
            except Exception as error:  # noqa: BLE001 - kept in `failure`
                if not isinstance(error, (OSError, BkctlError)):
                    self.metrics.note_unexpected("The clean stop", error)
                self.state_manager.fail(BkctlError(f"The clean stop of bookie {self.bookie_id} failed: {error}"))
        await self._release()
        log.info("Bookie %s stopped", self.bookie_id)
        self.stopped.set()

    async def _stop_collecting(self) -> None:
        """End garbage collection, which asks the loop and the checkpoint thread: it has to end before them."""
        if self.garbage_collector is not None:
            await self._deadline.run("its garbage collector", self.garbage_collector.stop)

    async def _write_everything(self) -> None:
        """Bring everything in memory to disk, in a form that Apache's bookie reads. Raises TimedOut."""
        self.commits.flush()
        await self.commits.checkpoints.wait(self._deadline.remaining_s)
        is_stopped = await self._deadline.run("its writing threads", self.commits.stop)
        await asyncio.sleep(0)  # the threads' last reports
        if self.failure is None and not (is_stopped and await self._deadline.run("a checkpoint", self._close_storage)):
            raise TimedOut("a disk hangs")

    def _close_storage(self) -> None:
        self.storage.close()
        self.storage_is_open = False
        for directory in self.storage.ledger_directories:
            self.files.remove(directory / DIRTY_NAME)
            self.files.sync_directory(directory)

    async def _release(self) -> None:
        """End every thread, and let go of directories and metadata store, as far as nothing hangs."""
        deadline = self._deadline
        if self.failure is not None or self.started_ms == 0:
            deadline.shorten(FAILED_STOP_S)
        await self._stop_collecting()
        await self.server.close(0)
        await deadline.run("its writing threads", self.commits.stop)
        await deadline.run("its readers", self.processor.stop_threads)
        if self.storage_is_open and not deadline.is_stuck:  # a thread that hangs may write yet
            self.storage_is_open = False
            try:
                await deadline.run("its ledger storage", self.storage.ledgers.close)
            except Exception as error:  # noqa: BLE001 - logged
                log.warning("Bookie %s cannot close its ledger storage: %r", self.bookie_id, error)
        await self.registration.leave(max(STOP_GRACE_S, deadline.remaining_s))
        self._is_released = True
        if self._cluster is not None and self._owns_cluster:
            await deadline.run("its metadata store", self._cluster.close)
            self._cluster = None
        if not deadline.is_stuck:
            self._held.close()


def _cannot_listen(bookie_id: str, port: int, error: OSError) -> BkctlError:
    return BkctlError(
        f"Bookie {bookie_id} cannot listen on port {port}: {error.strerror}",
        hint="another server has the port, or the address is not this machine's",
    )


def _mark_dirty(directories: Sequence[Path], files: Files) -> bool:
    """Mark the ledger `directories` as in use; return whether they were, because the last stop was not clean."""
    was_dirty = any((directory / DIRTY_NAME).exists() for directory in directories)
    for directory in directories:
        try:
            files.open(directory / DIRTY_NAME, create=True).close()
            files.sync_directory(directory)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            log.warning(
                "%s has no space for %s: the next start will take this stop for a clean one", directory, DIRTY_NAME
            )
    return was_dirty
