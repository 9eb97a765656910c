"""Reads of single replicas: an entry from one bookie, or a bookie's own list of the entries it has."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from bkctl.client.bookies import BookieChannel, failure
from bkctl.client.read_handle import entry_of
from bkctl.errors import BkctlError, EntryNotFound, LedgerNotFound, ProtocolError, TimedOut
from bkctl.formats.availability import Availability
from bkctl.protocol.messages import ListEntriesRequest, ListEntriesResponse, Protocol, ReadRequest

if TYPE_CHECKING:
    from bkctl.client.reader import LedgerAccess

#: The longest wait for a bookie's list of entries; a bookie that exceeds it is not asked again for `MUTE_S`.
LIST_TIMEOUT_S: Final = 3.0
MUTE_S: Final = 600.0


class ReplicaReader:
    """Reads from single bookies, with at most `in_flight_count_max` reads in flight."""

    def __init__(self, in_flight_count_max: int) -> None:
        self._permits = asyncio.Semaphore(in_flight_count_max)
        #: Bookies that did not list their entries, and the monotonic time from which they are asked again.
        self._mute_until: dict[str, float] = {}

    async def read(self, access: LedgerAccess, channel: BookieChannel, entry_id: int) -> BkctlError | None:
        """Read one entry from one bookie; return its error, or None for an intact entry."""
        await self._permits.acquire()
        future = channel.send(ReadRequest(access.ledger, entry_id), access.scoped)
        future.add_done_callback(lambda _: self._permits.release())
        await asyncio.wait([future])
        try:
            entry_of(future, access, entry_id, channel.bookie_id)
        except BkctlError as error:
            return error
        return None

    async def listed(self, access: LedgerAccess, bookie_id: str) -> Availability:
        """Return the entries of the ledger that the bookie lists from its index, which does not prove their presence.

        Return an empty set for a bookie that has nothing of the ledger. Raise the bookie's error. Apache's bookies with
        DbLedgerStorage leave this request without an answer. The wait is therefore short, and a bookie that did not
        answer raises TimedOut at once for the next minutes. Uses protocol v3.
        """
        silent = TimedOut(f"Bookie {bookie_id} does not list the entries that it has")
        if self._mute_until.get(bookie_id, 0.0) > time.monotonic():
            raise silent
        channel = access.pool.channel(bookie_id, Protocol.V3)
        future = channel.send(ListEntriesRequest(access.ledger), access.scoped)
        done, _ = await asyncio.wait([future], timeout=LIST_TIMEOUT_S)
        if not done:
            self._mute_until[bookie_id] = time.monotonic() + MUTE_S
            raise silent
        error = failure(future, access.ledger, None, bookie_id)
        if isinstance(error, (LedgerNotFound, EntryNotFound)):
            return Availability(())
        if error is not None:
            raise error
        response = future.result()
        if not isinstance(response, ListEntriesResponse) or response.availability is None:
            raise ProtocolError(f"Bookie {bookie_id} answered without a list of entries")
        return Availability.parse(response.availability, f"bookie {bookie_id}")
