"""Fragments of a ledger, and the faults of their replicas. Source: LedgerFragment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.client.reader import LedgerAccess
from bkctl.errors import BkctlError, Corrupt, EntryNotFound, LedgerNotFound, ProtocolError, TimedOut
from bkctl.ids import LedgerId

#: The largest number of unreadable entries of one fragment that are searched for and named. A fragment may be lost as a
#: whole, and damaged metadata may name entries that never existed: without a bound the search would not end.
UNREADABLE_NAMED_MAX: Final = 1_000_000


class FaultReason(Enum):
    """The reason why a bookie is bad for a fragment."""

    #: The bookie is not registered.
    GONE = "gone"
    #: The bookie answers that it lacks entries.
    NO_ENTRY = "no-entry"
    #: The bookie answers that it has nothing of the ledger.
    NO_LEDGER = "no-ledger"
    #: The bookie returns entries that do not match their digests, or other entries than requested.
    DAMAGED = "damaged"
    #: The bookie does not answer in time.
    TIMED_OUT = "timed-out"
    #: The bookie is registered, but cannot be reached or cannot serve the ledger.
    UNAVAILABLE = "unavailable"
    #: The caller named the bookie; nothing was read.
    GIVEN = "given"


#: The bookie is alive, and reports single entries as missing.
ANSWERED: Final = (FaultReason.NO_ENTRY, FaultReason.NO_LEDGER, FaultReason.DAMAGED)


def reason_of(error: BkctlError) -> FaultReason:
    """Return the fault of a bookie whose read of an entry failed with `error`."""
    if isinstance(error, EntryNotFound):
        return FaultReason.NO_ENTRY
    if isinstance(error, LedgerNotFound):
        return FaultReason.NO_LEDGER
    if isinstance(error, Corrupt) and not isinstance(error, ProtocolError):
        return FaultReason.DAMAGED
    return FaultReason.TIMED_OUT if isinstance(error, TimedOut) else FaultReason.UNAVAILABLE


class EntrySpan(NamedTuple):
    """The `entry_count` entries from `first_entry_id` to `last_entry_id` that one bookie should hold."""

    first_entry_id: int
    last_entry_id: int
    entry_count: int


def spans_text(spans: Collection[EntrySpan], count_max: int = 5) -> str:
    """Return the spans for a message: `entries 0-9 (4), 12`. A span with entries of other bookies in it has a count."""
    texts = []
    for first, last, count in islice(spans, count_max):
        text = str(first) if first == last else f"{first}-{last}"
        texts.append(text if count == last - first + 1 else f"{text} ({count:,})")
    total = sum(span.entry_count for span in spans)
    more = f" and {len(spans) - count_max:,} more ranges" if len(spans) > count_max else ""
    return f"{'entry' if total == 1 else 'entries'} {', '.join(texts)}{more}"


class ReplicaFault(NamedTuple):
    """A bad bookie of a fragment.

    `entry_count` is the number of entries of the fragment that the bookie should hold. `missing` are the entries that
    it lacks or has damaged, in order; None if they are unknown because not every entry was read. `error` is the first
    error of the bookie.
    """

    ensemble_index: int
    bookie_id: str
    reason: FaultReason
    entry_count: int
    missing: tuple[EntrySpan, ...] | None = None
    error: BkctlError | None = None


class LedgerFragment(NamedTuple):
    """Consecutive entries of a ledger on one ensemble, and the faults of its bookies. Source: LedgerFragment.

    `first_entry_id` is the key of the fragment in the metadata. `last_entry_id` is the last entry known to exist, and
    `first_entry_id - 1` in a fragment without entries. `closed`: no client will change the fragment any more.
    """

    ledger: LedgerId
    first_entry_id: int
    last_entry_id: int
    ensemble: tuple[str, ...]
    closed: bool
    schedule: RoundRobinDistributionSchedule
    faults: tuple[ReplicaFault, ...] = ()

    @property
    def bookie_indexes(self) -> tuple[int, ...]:
        """The ensemble indexes of the bad bookies, ascending."""
        return tuple(fault.ensemble_index for fault in self.faults)

    @property
    def bookies(self) -> tuple[str, ...]:
        """The ids of the bad bookies."""
        return tuple(fault.bookie_id for fault in self.faults)

    @property
    def held_count(self) -> int | None:
        """The number of replicas of its entries on the bad bookies; None while it may still grow."""
        return sum(fault.entry_count for fault in self.faults) if self.closed else None

    def given(self, indexes: Iterable[int]) -> LedgerFragment:
        """Return the fragment with the bookies at these ensemble indexes as bad ones, whatever they hold."""
        faults = [
            ReplicaFault(index, self.ensemble[index], FaultReason.GIVEN, self.entry_count(index)) for index in indexes
        ]
        return self._replace(faults=tuple(faults))

    def entry_count(self, index: int) -> int:
        """Return the number of entries that the bookie at ensemble index `index` should hold."""
        return self.schedule.entry_count(index, self.first_entry_id, self.last_entry_id)

    def entries_of(self, index: int) -> Iterator[int]:
        """Return the entries that the bookie at ensemble index `index` should hold, ascending."""
        stored = self._stored(index)
        entry_ids = range(self.first_entry_id, self.last_entry_id + 1)
        return (entry_id for entry_id in entry_ids if stored[entry_id % len(stored)])

    def first_and_last_of(self, index: int) -> tuple[int, int] | None:
        """Return the first and the last entry that the bookie at ensemble index `index` should hold; None without any.

        Source: getFirstStoredEntryId, getLastStoredEntryId.
        """
        stored, size = self._stored(index), self.schedule.ensemble_size
        first, last = self.first_entry_id, self.last_entry_id
        start = next((at for at in range(first, min(first + size, last + 1)) if stored[at % size]), None)
        end = next((at for at in range(last, max(last - size, first - 1), -1) if stored[at % size]), None)
        return None if start is None or end is None else (start, end)

    def has(self, entry_id: int, index: int) -> bool:
        """Return True if the bookie at ensemble index `index` should hold the entry."""
        return index in self.schedule.write_set(entry_id)

    def next_of(self, entry_id: int, indexes: Collection[int]) -> int:
        """Return the next entry after `entry_id` that one of the bookies at `indexes` should hold."""
        following = range(entry_id + 1, entry_id + 1 + self.schedule.ensemble_size)
        return next(later for later in following if any(self.has(later, index) for index in indexes))

    def _stored(self, index: int) -> list[bool]:
        """Return, by entry id modulo the ensemble size, which entries the bookie at `index` should hold."""
        return [self.has(remainder, index) for remainder in range(self.schedule.ensemble_size)]


def add_to_spans(spans: list[EntrySpan], entry_id: int, *, adjoins: bool) -> None:
    """Add an entry to the last span if it `adjoins` the entries there, else as a new span."""
    if adjoins:
        last = spans[-1]
        spans[-1] = EntrySpan(last.first_entry_id, entry_id, last.entry_count + 1)
    else:
        spans.append(EntrySpan(entry_id, entry_id, 1))


def fragments_of(access: LedgerAccess, last_add_confirmed: int) -> list[LedgerFragment]:
    """Return all fragments of a ledger, each up to its last known entry, without faults.

    A fragment before the last one is closed once all its entries are confirmed; in protocol v2 the last add confirmed
    lags behind. Source: LedgerChecker.checkLedger, LedgerFragment.
    """
    metadata, found = access.metadata, []
    closed = metadata.is_closed or last_add_confirmed >= metadata.last_fragment.first_entry_id - 1
    for first, last, bookies in metadata.extents():
        if last is None:
            last, closed = max(last_add_confirmed, first), False
        found.append(LedgerFragment(access.ledger, first, last, bookies, closed, access.schedule))
    return found
