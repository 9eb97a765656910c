"""From a bookie's connections to the handlers of its requests: adds here, and those that are rare beside reads.

Source: BookieRequestProcessor, WriteEntryProcessor, WriteEntryProcessorV3, WriteLacProcessorV3, ReadLacProcessorV3,
ForceLedgerProcessorV3, GetListOfEntriesOfLedgerProcessorV3, GetBookieInfoProcessorV3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from bkctl.bookie.disk_space import total_usage
from bkctl.bookie.group_commit import GroupCommit
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.network import server_limits, tls_context
from bkctl.bookie.reads import EntryFetcher, ReadHandler
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import Handler, WaitingRequests
from bkctl.disk import DiskUsage, Files
from bkctl.errors import EntryNotFound, LedgerNotFound, TooManyRequests
from bkctl.ids import LedgerId
from bkctl.protocol.handler import ReadRunResponder, Responder
from bkctl.protocol.messages import (
    AddRequest,
    AddResponse,
    BatchReadRequest,
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
    Request,
    Response,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)
from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun
from bkctl.protocol.server import BookieServer
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_handle import NeedsDisk


class RequestProcessor:
    """Gives every request of the `server` to its handler, or queues it behind requests that wait for its ledger.

    The handlers of reads are in `reads`. Every handler raises BkctlError for a refusal. Creating a processor raises
    UsageError or Unsupported for the TLS settings.
    """

    def __init__(
        self,
        files: Files,
        storage: BookieStorage,
        state: BookieStateManager,
        commits: GroupCommit,
        metrics: BookieMetrics,
    ) -> None:
        self._files, self._storage, self._state, self._commits = files, storage, state, commits
        config = state.config
        metrics.certificates["bookie"] = tls = tls_context(config)
        self.server = BookieServer(self, tls=tls, requires_tls=config.tls_required, limits=server_limits(config))
        self.requests = WaitingRequests(storage, state, metrics)
        self.reader = EntryFetcher(storage, metrics, self.requests)
        reads = ReadHandler(storage, state, commits, self.requests, self.reader)
        self.polls = reads.polls
        timed = self.requests.serve_timed
        self._waiting = self.requests.by_ledger
        self._handlers: dict[type, Handler] = {
            AddRequest: self.add,
            ReadRequest: reads.read,
            BatchReadRequest: reads.read_batch,
            WriteLacRequest: functools.partial(timed, "WRITE_LAC", self.write_lac),
            ReadLacRequest: functools.partial(timed, "READ_LAC", self.read_lac),
            ForceLedgerRequest: functools.partial(timed, "FORCE_LEDGER", self.force),
            ListEntriesRequest: functools.partial(timed, "GET_LIST_OF_ENTRIES_OF_LEDGER", self.list_entries),
            BookieInfoRequest: functools.partial(timed, "GET_BOOKIE_INFO", self.bookie_info),
        }
        # RunHandler's other methods.
        self.adds_at_once: Callable[[], int] = commits.adds_at_once
        self.handle_reads: Callable[[ReadRun, ReadRunResponder], None] = reads.read_run

    def handle(self, request: Request, respond: Responder) -> None:
        """Serve one request: `respond` is called once, now or later."""
        handler = self._handlers[type(request)]
        if self._waiting and getattr(request, "ledger", None) in self._waiting:
            self.requests.serve_later(None, handler, request, respond)
            return
        # As WaitingRequests.serve, which would cost one more call for each request.
        try:
            handler(request, respond)
        except NeedsDisk as need:
            self.requests.serve_later(need, handler, request, respond)
        except Exception as error:  # noqa: BLE001 - answered, logged and counted
            self.requests.refuse(request, respond, error)

    def stop_threads(self) -> None:
        """Stop the threads that open ledgers and read, and wait for their ends. Blocks; not for the event loop."""
        self.requests.stop()
        self.reader.stop()

    # --- adds: into the storage's current batches; group commit answers them -----------------------------------------

    def add(self, request: AddRequest, respond: Responder) -> None:
        """Serve one add. Raises ReadOnlyBookie, TooManyRequests and the errors of `BookieStorage.add`."""
        ledger, entry_id, master_key, body, recovery_add, high_priority, deferred_sync = request
        state = self._state
        if state.read_only and not (high_priority and state.takes_high_priority_writes):
            raise state.refuse_writes()
        assert not isinstance(body, tuple)
        if self._commits.is_behind and not high_priority:
            self._commits.check_pending()
        answer = functools.partial(_answer, respond, AddResponse, (ledger, entry_id))
        if deferred_sync and not recovery_add:  # as Apache's recoveryAddEntry, which acknowledges nothing unsynced
            self._storage.add(ledger, entry_id, master_key, body, None, recovery_add)
            self._storage.when_written(ledger, answer)
        else:
            self._storage.add(ledger, entry_id, master_key, body, answer, recovery_add)
        self._commits.flush_soon()

    def handle_adds(self, runs: Sequence[AddRun], answer: AnswerAdds) -> None:
        """Serve runs of plain adds; each gets one answer, together with others where they share a journal.

        Raises ReadOnlyBookie and TooManyRequests.
        """
        if self._state.read_only:
            raise self._state.refuse_writes()
        if self._commits.is_behind:
            self._commits.check_pending()
        count = len(self._storage.journals)
        if count == 1 or len(runs) == 1:
            self._add_to_journal(runs, answer)
            return
        for journal in range(count):
            self._add_to_journal([run for run in runs if run.ledger.value % count == journal], answer)

    def _add_to_journal(self, runs: Sequence[AddRun], answer: AnswerAdds) -> None:
        """Add the entries of ledgers that share a journal, which have one answer in its batch."""
        add_records, waiting = self._storage.add_records, self._waiting
        added: list[AddRun] = []
        done = functools.partial(_answer_runs, answer, added)
        for run in runs:
            ledger, master_key, entry_ids, records, size, last_add_confirmed, _ = run
            if waiting and ledger in waiting:
                waiting[ledger].append(functools.partial(self._add_run_later, run, answer))
                continue
            try:
                add_records(ledger, master_key, entry_ids, records, size, last_add_confirmed, done)
            except NeedsDisk as need:
                self.requests.once_read(need, functools.partial(self._add_run_later, run, answer))
            except Exception as error:  # noqa: BLE001 - answered, logged and counted
                answer((run,), self.requests.status_after(AddRequest.__name__, error))
            else:
                added.append(run)
        if added:
            self._commits.flush_soon()

    def _add_run_later(self, run: AddRun, answer: AnswerAdds, error: BaseException | None) -> None:
        try:
            if error is not None:
                raise error
            self.handle_adds((run,), answer)
        except Exception as failure:  # noqa: BLE001 - answered, logged and counted
            answer((run,), self.requests.status_after(AddRequest.__name__, failure))

    # --- requests that are rare beside adds and reads ----------------------------------------------------------------

    def write_lac(self, request: WriteLacRequest, respond: Responder) -> None:
        """Keep the explicit LAC in the packet; answer once it is on disk.

        The request's own field may be older: Java's client sets it first and packs the LAC later.
        """
        if self._state.read_only:
            raise self._state.refuse_writes()
        done = functools.partial(_answer, respond, WriteLacResponse, (request.ledger,))
        self._storage.write_lac(request.ledger, request.master_key, request.body, done)
        self._commits.flush_soon()

    def read_lac(self, request: ReadLacRequest, respond: Responder) -> None:
        """Answer the explicit LAC and the last entry."""
        try:
            handle = self.reader.handle(request.ledger)
        except LedgerNotFound as error:
            raise EntryNotFound(error.message) from error
        lac_body = handle.explicit_lac or None
        last_entry = self._storage.last_entry(handle)
        if last_entry < 0:
            # Apache's answer: an explicit LAC without any entry is an I/O error that carries the LAC.
            respond(ReadLacResponse(Status.ENOENTRY if lac_body is None else Status.EIO, request.ledger, lac_body))
            return
        self.reader.read_entry(
            handle,
            last_entry,
            request,
            respond,
            lambda body: respond(ReadLacResponse(Status.EOK, request.ledger, lac_body, body)),
        )

    def force(self, request: ForceLedgerRequest, respond: Responder) -> None:
        """Answer once every earlier add of the ledger is on disk."""
        self._storage.force(request.ledger, functools.partial(_answer, respond, ForceLedgerResponse, (request.ledger,)))
        self._commits.flush_soon()

    def list_entries(self, request: ListEntriesRequest, respond: Responder) -> None:
        """Answer the ids of a ledger's entries; a client that is gone ends the search."""
        handle = self.reader.handle(request.ledger)

        def prepare() -> Callable[[], bytes]:
            listed = self._storage.availability(handle, lambda: not respond.is_lost)

            def serialized() -> bytes:
                if respond.is_congested:  # when its turn comes: answers that clients do not read hold the memory
                    raise TooManyRequests("Unread answers hold as much memory as they may")
                return listed()

            return serialized

        self.reader.in_thread(
            prepare,
            request,
            respond,
            lambda data: respond(ListEntriesResponse(Status.EOK, request.ledger, data)),
            threads=self.reader.list_thread,
        )

    def bookie_info(self, request: BookieInfoRequest, respond: Responder) -> None:
        """Answer the capacity and free space of the ledger directories' disks."""

        def take(disks: DiskUsage) -> None:
            requested = request.requested
            total = disks.total if requested & BookieInfoFlags.TOTAL_DISK_CAPACITY else None
            free = disks.free if requested & BookieInfoFlags.FREE_DISK_SPACE else None
            respond(BookieInfoResponse(Status.EOK, total, free))

        def usage() -> DiskUsage:
            return total_usage(map(self._files.disk_usage, self._storage.ledger_directories))

        self.reader.in_thread(lambda: usage, request, respond, take)


_EOK: Final = Status.EOK


def _answer(
    respond: Responder, kind: Callable[..., Response], ids: tuple[LedgerId | int, ...], error: OSError | None
) -> None:
    respond(kind(_EOK if error is None else Status.EIO, *ids))


def _answer_runs(answer: AnswerAdds, added: Sequence[AddRun], error: OSError | None) -> None:
    answer(added, _EOK if error is None else Status.EIO)
