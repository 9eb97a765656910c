"""A ledger opened for reading: entries, the last add confirmed, and waiting for more.

Source: LedgerHandle, ReadOnlyLedgerHandle.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Self

from bkctl.client.bookies import failure, in_thread
from bkctl.client.reader import (
    LONG_POLL_S_MAX,
    LedgerAccess,
    LedgerEntry,
    long_poll,
    read_entries,
    read_last_confirmed,
)
from bkctl.client.writer import restated
from bkctl.errors import (
    BkctlError,
    ProtocolError,
    UsageError,
)
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import I64_MAX, LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.protocol.messages import (
    ReadRequest,
    ReadResponse,
    Response,
)


class LedgerHandleBase:
    """The common part of handles that read and handles that write a ledger."""

    def __init__(self, access: LedgerAccess) -> None:
        self._access = access

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
        """The metadata with the version that a compare-and-set needs."""
        return self._access.versioned

    @property
    def is_closed(self) -> bool:
        """Whether the metadata says that the ledger is closed."""
        return self._access.metadata.is_closed

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be acknowledged; -1: none."""
        raise AssertionError

    def read(self, first: int, last: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """Yield the entries `first` to `last` (both included) in order; memory does not grow with their number.

        Each comes from the first replica that gives it intact; `verify` False leaves the digest unchecked. Raises
        UsageError for a range that is none or goes beyond the last add confirmed; when no replica of an entry gives
        it: EntryNotFound, DigestMismatch, BookieUnavailable, … as the gravest of them said.
        """
        if last > self.last_add_confirmed:
            raise UsageError(
                f"Entry {last} of ledger {self.ledger} is beyond its last add confirmed, {self.last_add_confirmed}"
            )
        return self.read_unconfirmed(first, last, verify=verify)

    def read_unconfirmed(self, first: int, last: int, *, verify: bool = True) -> AsyncIterator[LedgerEntry]:
        """As `read`, but also beyond the last add confirmed: EntryNotFound is raised where the entries end.

        Such an entry may not be acknowledged, and gone after a recovery.
        """
        if not 0 <= first <= last <= I64_MAX:
            raise UsageError(f"Entries {first} to {last} are no range")
        return read_entries(self._access, first, last, verify=verify)

    async def read_from(self, bookie_id: str, entry_id: int, *, verify: bool = True) -> LedgerEntry:
        """The entry as this one bookie has it.

        Raises EntryNotFound or LedgerNotFound (it has none), DigestMismatch, BookieUnavailable, TimedOut, ….
        """
        channel = self._access.pool.channel(bookie_id)
        future = channel.send(ReadRequest(self.ledger, entry_id), self._access.scoped)
        await asyncio.wait([future])
        return entry_of(future, self._access, entry_id, bookie_id, verify=verify)


def entry_of(
    future: asyncio.Future[Response], access: LedgerAccess, entry_id: int, bookie_id: str, *, verify: bool = True
) -> LedgerEntry:
    """The entry that the done `future` of a read brought. Raises what is wrong with it."""
    error = failure(future, access.ledger, entry_id, bookie_id)
    if error is not None:
        raise error
    response = future.result()
    if not isinstance(response, ReadResponse):
        raise ProtocolError(f"Bookie {bookie_id} answered a read with something else")
    return access.open_entry(response.body, entry_id, verify)


class ReadHandle(LedgerHandleBase):
    """A ledger opened for reading (`BookKeeper.open_ledger`); its writer may still be at work (`is_closed` False)."""

    def __init__(self, access: LedgerAccess, last_add_confirmed: int, length: int) -> None:
        super().__init__(access)
        self._last_add_confirmed = last_add_confirmed
        self._length = length
        self._changed = asyncio.Event()
        self._told: VersionedMetadata | BkctlError | None = None
        self._cancel_watch: Callable[[], None] | None = None

    @property
    def last_add_confirmed(self) -> int:
        """The last entry known to be acknowledged; -1: none. Of a closed ledger its last entry."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """Payload bytes: of a closed ledger all, else about those up to the last add confirmed."""
        return self._length

    async def read_last_confirmed(self) -> int:
        """Read metadata and, while the ledger is not closed, ask its bookies anew; returns the last add confirmed.

        Raises LedgerNotFound when the ledger was deleted, BookieUnavailable, … when too few bookies answer.
        """
        self._use(await in_thread(self._access.pool.cluster.ledgers.read, self.ledger))
        if not self.is_closed:
            confirmed = await read_last_confirmed(self._access)
            self._advance(confirmed.last_add_confirmed, confirmed.length)
        return self._last_add_confirmed

    async def wait_for_lac(self, previous: int, timeout_s: float) -> int:
        """Wait until the last add confirmed is above `previous`, the ledger is closed, or `timeout_s` is over.

        Returns the last add confirmed as known then. The bookies tell it as it moves (long poll), the metadata store
        when the ledger is closed, its ensemble changes or it is deleted. Raises LedgerNotFound for a deleted ledger.
        """
        deadline = time.monotonic() + timeout_s
        await self._watch()
        while True:
            self._changed.clear()
            told, self._told = self._told, None
            if isinstance(told, BkctlError):
                raise restated(told)
            if told is not None:
                self._use(told)
            left_s = deadline - time.monotonic()
            if self.is_closed or self._last_add_confirmed > previous or left_s <= 0:
                return self._last_add_confirmed
            slice_s = min(left_s, LONG_POLL_S_MAX)
            confirmed = await long_poll(self._access, self._last_add_confirmed, slice_s, self._changed)
            if confirmed is not None:
                self._advance(confirmed, 0)

    async def close(self) -> None:
        """Stop watching the ledger. The ledger itself is untouched."""
        cancel, self._cancel_watch = self._cancel_watch, None
        if cancel is not None:
            await in_thread(cancel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _watch(self) -> None:
        if self._cancel_watch is not None:
            return
        loop = asyncio.get_running_loop()

        def told(found: VersionedMetadata | BkctlError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(self._tell, found)

        self._cancel_watch = await in_thread(self._access.pool.cluster.ledgers.watch, self.ledger, told)
        # The first call came from that thread before it returned: let it arrive.
        await asyncio.sleep(0)

    def _tell(self, found: VersionedMetadata | BkctlError) -> None:
        self._told = found
        self._changed.set()

    def _use(self, found: VersionedMetadata) -> None:
        self._access.versioned = found
        if found.metadata.is_closed:
            self._last_add_confirmed, self._length = found.metadata.last_entry_id, found.metadata.length

    def _advance(self, last_add_confirmed: int, length: int) -> None:
        self._last_add_confirmed = max(self._last_add_confirmed, last_add_confirmed)
        self._length = max(self._length, length)
