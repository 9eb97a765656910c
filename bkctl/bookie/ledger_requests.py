"""Requests about a ledger as a whole (LAC, force, list of entries), and about the bookie's disks.

Source: WriteLacProcessorV3, ReadLacProcessorV3, ForceLedgerProcessorV3, GetListOfEntriesOfLedgerProcessorV3,
GetBookieInfoProcessorV3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bkctl.bookie.commit_dispatcher import CommitDispatcher
from bkctl.bookie.disk_space import total_usage
from bkctl.bookie.reads import EntryFetcher
from bkctl.bookie.state_manager import BookieStateManager
from bkctl.disk import DiskUsage, Files
from bkctl.errors import EntryNotFound, LedgerNotFound, TooManyRequests
from bkctl.protocol.handler import Responder
from bkctl.protocol.messages import (
    BookieInfoFlags,
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadLacRequest,
    ReadLacResponse,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)
from bkctl.storage.bookie_storage import BookieStorage


@dataclass(eq=False)
class LedgerRequestHandler:
    """Serves the requests that are rare beside adds and reads. Every method raises BkctlError for a refusal."""

    _files: Files
    _storage: BookieStorage
    _state: BookieStateManager
    _commits: CommitDispatcher
    _reader: EntryFetcher

    def write_lac(self, request: WriteLacRequest, respond: Responder) -> None:
        """Keep the explicit LAC in the packet; answer once it is on disk.

        The request's own field may be older: Java's client sets it first and packs the LAC later.
        """
        if self._state.read_only:
            raise self._state.refuse_writes()
        ledger = request.ledger

        def done(error: BaseException | None) -> None:
            respond(WriteLacResponse(Status.EOK if error is None else Status.EIO, ledger))

        self._storage.write_lac(ledger, request.master_key, request.body, done)
        self._commits.flush_soon()

    def read_lac(self, request: ReadLacRequest, respond: Responder) -> None:
        """Answer the explicit LAC and the last entry."""
        try:
            handle = self._reader.handle(request.ledger)
        except LedgerNotFound as error:
            raise EntryNotFound(error.message) from error
        lac_body = handle.explicit_lac or None
        last_entry = self._storage.last_entry(handle)
        if last_entry < 0:
            # Apache's answer: an explicit LAC without any entry is an I/O error that carries the LAC.
            respond(ReadLacResponse(Status.ENOENTRY if lac_body is None else Status.EIO, request.ledger, lac_body))
            return
        self._reader.read_entry(
            handle,
            last_entry,
            request,
            respond,
            lambda body: respond(ReadLacResponse(Status.EOK, request.ledger, lac_body, body)),
        )

    def force(self, request: ForceLedgerRequest, respond: Responder) -> None:
        """Answer once every earlier add of the ledger is on disk."""

        def done(error: BaseException | None) -> None:
            respond(ForceLedgerResponse(Status.EOK if error is None else Status.EIO, request.ledger))

        self._storage.force(request.ledger, done)
        self._commits.flush_soon()

    def list_entries(self, request: ListEntriesRequest, respond: Responder) -> None:
        """Answer the ids of a ledger's entries; a client that is gone ends the search."""
        handle = self._reader.handle(request.ledger)

        def prepare() -> Callable[[], bytes]:
            listed = self._storage.availability(handle, lambda: not respond.is_lost)

            def serialized() -> bytes:
                if respond.is_congested:  # when its turn comes: answers that clients do not read hold the memory
                    raise TooManyRequests("Unread answers hold as much memory as they may")
                return listed()

            return serialized

        self._reader.prepared_in_thread(
            prepare,
            request,
            respond,
            lambda data: respond(ListEntriesResponse(Status.EOK, request.ledger, data)),
            threads=self._reader.list_thread,
        )

    def bookie_info(self, request: BookieInfoRequest, respond: Responder) -> None:
        """Answer the capacity and free space of the ledger directories' disks."""

        def take(disks: DiskUsage) -> None:
            requested = request.requested
            total = disks.total if requested & BookieInfoFlags.TOTAL_DISK_CAPACITY else None
            free = disks.free if requested & BookieInfoFlags.FREE_DISK_SPACE else None
            respond(BookieInfoResponse(Status.EOK, total, free))

        directories = self._storage.ledger_directories
        self._reader.in_thread(
            lambda: total_usage(self._files.disk_usage(directory) for directory in directories), request, respond, take
        )
