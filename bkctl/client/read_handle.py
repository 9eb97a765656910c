"""A ledger opened for reading: entries, the last add confirmed, and waiting for more.

Source: LedgerHandle, ReadOnlyLedgerHandle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Final, Self

from bkctl.client.bookies import failure
from bkctl.client.reader import (
    LONG_POLL_S_MAX,
    LedgerAccess,
    LedgerEntry,
    long_poll,
    read_batch,
    read_entries,
    read_last_confirmed,
    read_runs,
)
from bkctl.errors import BkctlError, ProtocolError, UsageError, restated
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.protocol.messages import FRAME_SIZE_BYTES_MAX, Protocol, ReadRequest, ReadResponse, Response
from bkctl.tasks import run_to_end

#: A tail asks the metadata store and the bookies at least this often.
TAIL_POLL_S: Final = 30.0


class Handle:
    """The common part of ReadHandle and WriteHandle: the ledger, and reads of its entries. Java: Handle."""

    def __init__(self, access: LedgerAccess) -> None:
        self._access = access

    async def __aenter__(self) -> Self:
        return self

    @property
    def ledger(self) -> LedgerId:
        """The 128-bit id."""
        return self._access.ledger

    @property
    def scope_id(self) -> int:
        """The most significant 64 bits of the id (`getScopeId`)."""
        return self._access.ledger.scope_id

    @property
    def ledger_id(self) -> int:
        """The least significant 64 bits of the id (`getId`)."""
        return self._access.ledger.ledger_id

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as last read or written."""
        return self._access.metadata

    @property
    def versioned_metadata(self) -> VersionedMetadata:
        """The metadata with its version for a compare-and-set."""
        return self._access.versioned

    @property
    def is_closed(self) -> bool:
        """True if the ledger is closed by its metadata as last read or written."""
        return self._access.metadata.is_closed

    @property
    def last_add_confirmed(self) -> int:
        """Id of the last entry known to be acknowledged; -1: none."""
        raise AssertionError

    def read(self, first: int = 0, last: int | None = None, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """Yield the entries `first` to `last` (both included) in order; memory does not grow with their number.

        `last` None is the last add confirmed; from the entry after it, nothing is read.
        Each entry comes from the first replica that returns it intact; `verify` False leaves the digest unchecked.
        Raises UsageError for an invalid range or one beyond the last add confirmed, and when no replica returns an
        entry the gravest error: EntryNotFound, DigestMismatch, BookieUnavailable, ….
        """
        return read_entries(self._access, first, self._confirmed(first, last), verify=verify)

    def read_runs(
        self, first: int = 0, last: int | None = None, *, verify: bool = True
    ) -> AsyncIterator[list[LedgerEntry]]:
        """Yield the entries of `read` in runs, which costs less an entry: as many as have arrived, up to about 1 MiB.

        Raises as `read` does, after a run of the entries before.
        """
        return read_runs(self._access, first, self._confirmed(first, last), verify=verify)

    def _confirmed(self, first: int, last: int | None) -> int:
        """Return `last`. Raises UsageError unless the entries from `first` on are confirmed ones."""
        if last is None and first == self.last_add_confirmed + 1:
            return first - 1
        last = self.last_add_confirmed if last is None else last
        if max(first, last) > self.last_add_confirmed:
            raise UsageError(
                f"Entry {max(first, last)} of ledger {self.ledger} is beyond its last add confirmed, "
                f"{self.last_add_confirmed}"
            )
        _check_range(first, last)
        return last

    async def batch_read(self, first: int, max_count: int, max_size_bytes: int = 0) -> list[LedgerEntry]:
        """Return confirmed entries from `first` on, at least one, at most `max_count` and about `max_size_bytes`.

        `max_size_bytes` 0 is a frame's size. In v2 one bookie sends them in one answer, where it holds all entries of
        the ledger (ensemble size = write quorum size); otherwise they are read as by `read`. Raises as `read` does.
        Source: LedgerHandle.batchReadAsync, BatchedReadOp.
        """
        if max_count < 1:
            raise UsageError(f"A batch of {max_count} entries cannot be read")
        last = min(self._confirmed(first, first) + max_count - 1, self.last_add_confirmed)
        size = min(max_size_bytes if max_size_bytes > 0 else FRAME_SIZE_BYTES_MAX, FRAME_SIZE_BYTES_MAX)
        access = self._access
        if access.pool.protocol is Protocol.V2 and access.schedule.is_whole:
            with contextlib.suppress(BkctlError):  # reads of single entries decide
                return await read_batch(access, first, last, size)
        entries: list[LedgerEntry] = []
        async for entry in read_entries(access, first, last):
            size -= len(entry.payload)
            if entries and size < 0:
                break
            entries.append(entry)
        return entries

    async def read_last_add_confirmed(self) -> int:
        """Ask the bookies for the last add confirmed, which may be ahead of `last_add_confirmed`. Fences nothing.

        Java: readLastAddConfirmedAsync. Raises the errors of `bkctl.client.reader.read_last_confirmed`.
        """
        if self.is_closed:
            return self.metadata.last_entry_id
        return max((await read_last_confirmed(self._access)).last_add_confirmed, self.last_add_confirmed)

    def read_unconfirmed(self, first: int, last: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """Yield entries as `read` does, also beyond the last add confirmed. Raises EntryNotFound after the last entry.

        Entries beyond the last add confirmed may be unacknowledged, and lost in a recovery.
        """
        _check_range(first, last)
        return read_entries(self._access, first, last, verify=verify)

    async def read_from(self, bookie_id: str, entry_id: int, *, verify: bool = True) -> LedgerEntry:
        """Return the replica of an entry that one bookie has.

        Raises EntryNotFound or LedgerNotFound if it has none, DigestMismatch, BookieUnavailable, TimedOut, ….
        """
        channel = self._access.pool.channel(bookie_id)
        future = channel.send(ReadRequest(self.ledger, entry_id), self._access.scoped)
        await asyncio.wait([future])
        return entry_of(future, self._access, entry_id, bookie_id, verify=verify)


def _check_range(first: int, last: int) -> None:
    if not 0 <= first <= last <= I64_MAX:
        raise UsageError(f"Entries {first} to {last} are not a range")


def entry_of(
    future: asyncio.Future[Response], access: LedgerAccess, entry_id: int, bookie_id: str, *, verify: bool = True
) -> LedgerEntry:
    """Return the entry in the response of the done `future`. Raise the error that the response carries."""
    error = failure(future, access.ledger, entry_id, bookie_id)
    if error is not None:
        raise error
    response = future.result()
    if not isinstance(response, ReadResponse):
        raise ProtocolError(f"Bookie {bookie_id} answered a read with another kind of response")
    return access.open_entry(response.body, entry_id, verify)


class ReadHandle(Handle):
    """A ledger opened for reading (`BookKeeper.open_ledger`); its writer may still be writing (`is_closed` False)."""

    def __init__(self, access: LedgerAccess, last_add_confirmed: int, length: int) -> None:
        super().__init__(access)
        self._last_add_confirmed = last_add_confirmed
        self._length = length
        self._changed = asyncio.Event()
        self._reported: VersionedMetadata | BkctlError | None = None
        self._cancel_watch: Callable[[], None] | None = None
        self._watching = asyncio.Lock()

    @property
    def last_add_confirmed(self) -> int:
        """Id of the last entry known to be acknowledged; -1: none. The last entry of a closed ledger."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """Payload bytes: all bytes of a closed ledger, else about the bytes up to the last add confirmed."""
        return self._length

    async def read_last_add_confirmed(self) -> int:
        self._last_add_confirmed = await super().read_last_add_confirmed()
        return self._last_add_confirmed

    async def tail(self, first: int = 0, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """Yield the entries from `first` on, then each new one as it is confirmed, until the ledger is closed.

        Raises LedgerNotFound if the ledger is deleted meanwhile, and the errors of `read`.
        """
        next_id = max(first, 0)
        while True:
            last = self.last_add_confirmed
            if next_id <= last:
                async for entry in self.read(next_id, last, verify=verify):
                    yield entry
                next_id = last + 1
            elif self.is_closed:
                return
            else:
                await self.wait_for_lac(next_id - 1, TAIL_POLL_S)

    async def wait_for_lac(self, previous: int, timeout_s: float) -> int:
        """Wait until the last add confirmed exceeds `previous`, the ledger is closed, or `timeout_s` is over.

        Returns the last add confirmed as known then. Bookies report its progress (long poll), the metadata store
        reports closing, ensemble changes and deletion. Raises LedgerNotFound for a deleted ledger.
        """
        deadline = time.monotonic() + timeout_s
        await self._watch()
        while True:
            self._changed.clear()
            reported = self._reported
            if isinstance(reported, BkctlError):  # it stays, for all that wait
                raise restated(reported)
            if reported is not None:
                self._reported = None
                self._access.versioned = reported
                if self.is_closed:
                    self._last_add_confirmed, self._length = self.metadata.last_entry_id, self.metadata.length
            left_s = deadline - time.monotonic()
            if self.is_closed or self._last_add_confirmed > previous or left_s <= 0:
                return self._last_add_confirmed
            slice_s = min(left_s, LONG_POLL_S_MAX)
            confirmed = await long_poll(self._access, self._last_add_confirmed, slice_s, self._changed)
            if confirmed is not None:
                self._last_add_confirmed = max(self._last_add_confirmed, confirmed)

    async def close(self) -> None:
        """Stop watching the ledger. The ledger itself is untouched."""
        async with self._watching:
            cancel, self._cancel_watch = self._cancel_watch, None
            if cancel is not None:
                await asyncio.to_thread(cancel)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()

        def report(found: VersionedMetadata | BkctlError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._report, found)

        def watch() -> None:
            self._cancel_watch = self._access.pool.cluster.ledgers.watch(self.ledger, report)

        async with self._watching:
            if self._cancel_watch is None:
                await run_to_end(asyncio.to_thread(watch))
        # Let the first report arrive, which that thread scheduled before it returned.
        await asyncio.sleep(0)

    def _report(self, found: VersionedMetadata | BkctlError) -> None:
        self._reported = found
        self._changed.set()
