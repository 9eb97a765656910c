"""Facts about single replicas: an entry read from one bookie, a bookie's list of entries, and entries lost on all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Container, Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple

from bkctl.client.bookies import BookieChannel, failure
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import entry_of
from bkctl.client.reader import LedgerAccess
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    EntryNotFound,
    LedgerNotFound,
    ProtocolError,
    TimedOut,
    Unreachable,
)
from bkctl.formats.availability import Availability
from bkctl.protocol.messages import ListEntriesRequest, ListEntriesResponse, Protocol, ReadRequest
from bkctl.replication.fragments import (
    ANSWERED,
    UNREADABLE_NAMED_MAX,
    EntrySpan,
    LedgerFragment,
    add_to_spans,
    reason_of,
)
from bkctl.replication.holdings import HeldLedger

#: The longest wait for a bookie's list of entries; a bookie that exceeds it is not asked again for `MUTE_S`.
LIST_TIMEOUT_S: Final = 3.0
MUTE_S: Final = 600.0
#: Entries that are read at once.
_READ_COUNT: Final = 500


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


class UnreadableSpans(NamedTuple):
    """Entries that no bookie has. `lost`: all other bookies that should have them answered; else not now."""

    spans: tuple[EntrySpan, ...] = ()
    lost: bool = True


class LostEntryFinder:
    """Asks bookies which entries of a ledger they have.

    A bookie that leaves all reads of a ledger without an answer counts as one without entries for the next minutes, so
    that its other ledgers do not wait for it, too; `silent` names such bookies.
    """

    def __init__(self, bookkeeper: BookKeeper, replicas: ReplicaReader) -> None:
        self._bookkeeper = bookkeeper
        self._replicas = replicas
        #: Bookies that gave no answer, and the monotonic time from which they are asked again.
        self._silent_until: dict[str, float] = {}

    def silent(self, bookie_ids: Iterable[str]) -> list[str]:
        """Return the bookies of `bookie_ids` that are not asked at present, because they gave no answer."""
        now = time.monotonic()
        return [bookie_id for bookie_id in bookie_ids if self._silent_until.get(bookie_id, 0.0) > now]

    def silent_text(self, bookie_ids: Iterable[str]) -> str:
        """Return `; BOOKIE gives no answer` for the silent bookies of `bookie_ids`, "" for none."""
        silent = self.silent(bookie_ids)
        return f"; {', '.join(silent)} {'gives' if len(silent) == 1 else 'give'} no answer" if silent else ""

    async def find(self, held: HeldLedger, up: Collection[str]) -> dict[int, UnreadableSpans]:
        """Return the entries that the leaving bookies should hold and no bookie of `up` has, by fragment's first entry.

        The bookies list their entries. A bookie that cannot list must return the first and the last entry that it
        should hold; if it does not, all of its entries are read. A fragment that may still grow is left out.
        """
        access = self._bookkeeper.access(held.ledger, held.found)
        bookies = sorted({bookie for fragment in held.fragments for bookie in fragment.ensemble if bookie in up})
        for bookie_id in self.silent(bookies):
            bookies.remove(bookie_id)
        lists = await asyncio.gather(*(self._listed(access, bookie_id) for bookie_id in bookies))
        listed = dict(zip(bookies, lists, strict=True))
        found = {}
        for fragment in held.fragments:
            if not fragment.closed:
                continue
            present: dict[str, Container[int]] = {}
            answered = set(fragment.bookies)
            for index, bookie_id in enumerate(fragment.ensemble):
                if bookie_id in listed:
                    entries = listed[bookie_id]
                    has_answered = True
                    if isinstance(entries, BookieUnavailable):
                        entries, has_answered = (), False
                    elif entries is None:
                        entries, has_answered = await self._read(access, fragment, index)
                    present[bookie_id] = entries
                    if has_answered:
                        answered.add(bookie_id)
            unreadable = await asyncio.to_thread(_unreadable, fragment, present, answered)
            if unreadable.spans:
                found[fragment.first_entry_id] = unreadable
        return found

    async def _listed(self, access: LedgerAccess, bookie_id: str) -> Container[int] | BookieUnavailable | None:
        """Return the entries of the ledger that the bookie lists, or why it is away; None if it cannot list.

        Apache's bookies with DbLedgerStorage leave that request without an answer.
        """
        try:
            return await self._replicas.listed(access, bookie_id)
        except BookieUnavailable as error:
            return error
        except BkctlError:
            return None

    async def _read(self, access: LedgerAccess, fragment: LedgerFragment, index: int) -> tuple[Container[int], bool]:
        """Return the entries of the fragment that the bookie at `index` returns, and whether it answered every read.

        If it returns its first and its last entry, the entries between are taken as present.
        """
        ends = fragment.first_and_last_of(index)
        if ends is None:
            return (), True
        bookie_id = fragment.ensemble[index]
        if not any(await self._errors(access, bookie_id, set(ends))):
            return range(ends[0], ends[1] + 1), True
        present: set[int] = set()
        has_answered = not self.silent([bookie_id])
        entries = fragment.entries_of(index)
        while not self.silent([bookie_id]) and (batch := list(islice(entries, _READ_COUNT))):
            errors = await self._errors(access, bookie_id, batch)
            present.update(entry_id for entry_id, error in zip(batch, errors, strict=True) if error is None)
            has_answered &= all(error is None or reason_of(error) in ANSWERED for error in errors)
            if any(isinstance(error, BookieUnavailable) for error in errors):
                break
        return present, has_answered

    async def _errors(
        self, access: LedgerAccess, bookie_id: str, entry_ids: Collection[int]
    ) -> list[BkctlError | None]:
        """Read entries from the bookie; return the error of each, or None. Note whether the bookie gives no answer."""
        channel = access.pool.channel(bookie_id)
        suspect_until = channel.suspect_until
        errors = await asyncio.gather(*(self._replicas.read(access, channel, entry_id) for entry_id in entry_ids))
        if all(isinstance(error, Unreachable) for error in errors):
            # A bookie that only lacks ledger scopes is connected, and answers for other ledgers.
            has_failed_to_connect = channel.suspect_until > suspect_until
            if has_failed_to_connect or any(isinstance(error, TimedOut) for error in errors):
                self._silent_until[bookie_id] = time.monotonic() + MUTE_S
        return errors


def _unreadable(
    fragment: LedgerFragment, present: Mapping[str, Container[int]], answered: Collection[str]
) -> UnreadableSpans:
    """Return the entries of the leaving bookies that no bookie has `present`, at most UNREADABLE_NAMED_MAX."""
    size, wanted = fragment.schedule.ensemble_size, fragment.bookie_indexes
    write_sets = [fragment.schedule.write_set(remainder) for remainder in range(size)]
    concerned = [any(index in wanted for index in write_set) for write_set in write_sets]
    spans: list[EntrySpan] = []
    is_adjoining, count, lost = False, 0, True
    for entry_id in range(fragment.first_entry_id, fragment.last_entry_id + 1):
        if not concerned[entry_id % size]:
            continue
        bookies = [fragment.ensemble[index] for index in write_sets[entry_id % size]]
        is_present = any(entry_id in present[bookie_id] for bookie_id in bookies if bookie_id in present)
        count += not is_present
        if count > UNREADABLE_NAMED_MAX:
            break
        if not is_present:
            lost = lost and all(bookie_id in answered for bookie_id in bookies)
            add_to_spans(spans, entry_id, adjoins=is_adjoining)
        is_adjoining = not is_present
    return UnreadableSpans(tuple(spans), lost)
