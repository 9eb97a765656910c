"""From a bookie's connections to the handlers of its requests. Source: BookieRequestProcessor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from bkctl.bookie.group_commit import GroupCommit
from bkctl.bookie.ledger_requests import AddHandler, LedgerRequestHandler
from bkctl.bookie.metrics import BookieMetrics
from bkctl.bookie.network import server_limits, tls_context
from bkctl.bookie.reads import EntryFetcher, ReadHandler
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.bookie.waiting_requests import Handler, WaitingRequests
from bkctl.disk import Files
from bkctl.protocol.handler import ReadRunResponder, Responder
from bkctl.protocol.messages import (
    AddRequest,
    BatchReadRequest,
    BookieInfoRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadLacRequest,
    ReadRequest,
    Request,
    WriteLacRequest,
)
from bkctl.protocol.runs import AddRun, AnswerAdds, ReadRun
from bkctl.protocol.server import BookieServer
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.ledger.ledger_handle import NeedsDisk


class RequestProcessor:
    """Gives every request of the `server` to its handler, or queues it behind requests that wait for its ledger.

    Raises UsageError or Unsupported for the TLS settings.
    """

    def __init__(
        self,
        files: Files,
        storage: BookieStorage,
        state: BookieStateManager,
        commits: GroupCommit,
        metrics: BookieMetrics,
    ) -> None:
        config = state.config
        metrics.certificates["bookie"] = tls = tls_context(config)
        self.server = BookieServer(self, tls=tls, requires_tls=config.tls_required, limits=server_limits(config))
        self.requests = WaitingRequests(storage, state, metrics)
        self.reader = EntryFetcher(storage, metrics, self.requests)
        self._reads = ReadHandler(storage, state, commits, self.requests, self.reader)
        self.polls = self._reads.polls
        adds = AddHandler(storage, state, commits, self.requests)
        ledgers = LedgerRequestHandler(files, storage, state, commits, self.reader)
        timed = self.requests.serve_timed
        self._waiting = self.requests.by_ledger
        self._handlers: dict[type, Handler] = {
            AddRequest: adds.add,
            ReadRequest: self._reads.read,
            BatchReadRequest: self._reads.read_batch,
            WriteLacRequest: functools.partial(timed, "WRITE_LAC", ledgers.write_lac),
            ReadLacRequest: functools.partial(timed, "READ_LAC", ledgers.read_lac),
            ForceLedgerRequest: functools.partial(timed, "FORCE_LEDGER", ledgers.force),
            ListEntriesRequest: functools.partial(timed, "GET_LIST_OF_ENTRIES_OF_LEDGER", ledgers.list_entries),
            BookieInfoRequest: functools.partial(timed, "GET_BOOKIE_INFO", ledgers.bookie_info),
        }
        # RunHandler's methods.
        self.handle_adds: Callable[[Sequence[AddRun], AnswerAdds], None] = adds.add_runs
        self.adds_at_once: Callable[[], int] = commits.adds_at_once
        self.handle_reads: Callable[[ReadRun, ReadRunResponder], None] = self._reads.read_run

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
