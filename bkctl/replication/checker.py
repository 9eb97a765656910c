"""Which fragments of a ledger lack entries, on which bookies.

A fragment is judged bookie by bookie: one that is not registered is bad, even for a fragment without entries; one that
is must give its first and its last entry of the fragment, a sample between them, or every entry. Source: LedgerChecker,
LedgerFragment, ReplicationWorker.isLastSegmentOpenAndMissingBookies. Other than Apache's, this one also checks the
digests of what it reads, and says why a bookie is bad.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.client.bookies import BookieChannel, failure, in_order, in_thread
from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.client.ledger import BookKeeper
from bkctl.client.read_handle import entry_of
from bkctl.client.reader import LedgerAccess, read_last_confirmed
from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    Corrupt,
    EntryNotFound,
    LedgerNotFound,
    ProtocolError,
    TimedOut,
    Unauthorized,
    UsageError,
)
from bkctl.formats.availability import Availability
from bkctl.formats.entry import INVALID_ENTRY_ID
from bkctl.protocol.messages import ListEntriesRequest, ListEntriesResponse, Protocol, ReadRequest, Response

if TYPE_CHECKING:
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import VersionedMetadata

#: Reads in flight of one checker. Source: ServerConfiguration.getInFlightReadEntryNumInLedgerChecker.
IN_FLIGHT_COUNT_MAX: Final = 64
#: A bookie that does not say for so long which entries it has is not waited for, nor asked again for `MUTE_S`.
LIST_TIMEOUT_S: Final = 3.0
MUTE_S: Final = 600.0


class FaultReason(Enum):
    """Why a bookie is bad for a fragment."""

    #: It is not registered.
    GONE = "gone"
    #: It answers that it lacks entries.
    NO_ENTRY = "no-entry"
    #: It answers that it has nothing of the ledger.
    NO_LEDGER = "no-ledger"
    #: It gives entries that do not match their digests, or others than asked for.
    DAMAGED = "damaged"
    #: It does not answer in time.
    TIMED_OUT = "timed-out"
    #: It is registered, and cannot be reached or cannot serve the ledger.
    UNAVAILABLE = "unavailable"
    #: The caller named it: nothing was asked.
    GIVEN = "given"


#: The bookie is alive, and says of single entries that they are missing.
ANSWERED: Final = (FaultReason.NO_ENTRY, FaultReason.NO_LEDGER, FaultReason.DAMAGED)


class EntrySpan(NamedTuple):
    """Of the entries from `first_entry_id` to `last_entry_id`, all `entry_count` that one bookie should hold."""

    first_entry_id: int
    last_entry_id: int
    entry_count: int


class ReplicaFault(NamedTuple):
    """One bookie of a fragment that is bad.

    `entry_count` is how many entries of the fragment it should hold. `missing` are the entries that it lacks or has
    damaged, in order, where every entry was asked for; None where that is not known: take all. `error` is the first one
    it met.
    """

    ensemble_index: int
    bookie_id: str
    reason: FaultReason
    entry_count: int
    missing: tuple[EntrySpan, ...] | None = None
    error: BkctlError | None = None


@dataclass(frozen=True)
class LedgerFragment:
    """Consecutive entries of a ledger on one ensemble, and which of its bookies are bad. Source: LedgerFragment.

    `first_entry_id` is its key in the metadata. `last_entry_id` is the last one known to be there; one less than
    `first_entry_id` where it has none. `closed`: no client will change it any more.
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

    def entry_count(self, index: int) -> int:
        """How many of its entries the bookie at ensemble index `index` should hold."""
        return self.schedule.entry_count(index, self.first_entry_id, self.last_entry_id)

    def entries_of(self, index: int) -> Iterator[int]:
        """The entries that the bookie at ensemble index `index` should hold, ascending."""
        stored = self._stored(index)
        return (each for each in range(self.first_entry_id, self.last_entry_id + 1) if stored[each % len(stored)])

    def first_and_last_of(self, index: int) -> tuple[int, int] | None:
        """The first and the last entry that the bookie at ensemble index `index` should hold; None when there is none.

        Source: getFirstStoredEntryId, getLastStoredEntryId.
        """
        stored, size = self._stored(index), self.schedule.ensemble_size
        first, last = self.first_entry_id, self.last_entry_id
        from_start = (each for each in range(first, min(first + size - 1, last) + 1) if stored[each % size])
        from_end = (each for each in range(last, max(last - size + 1, first) - 1, -1) if stored[each % size])
        start, end = next(from_start, None), next(from_end, None)
        return None if start is None or end is None else (start, end)

    def has(self, entry_id: int, index: int) -> bool:
        """Whether the bookie at ensemble index `index` should hold that entry."""
        return index in self.schedule.write_set(entry_id)

    def next_of(self, entry_id: int, indexes: Collection[int]) -> int:
        """The next entry after `entry_id` that one of the bookies at `indexes` should hold."""
        following = range(entry_id + 1, entry_id + 1 + self.schedule.ensemble_size)
        return next(each for each in following if any(self.has(each, index) for index in indexes))

    def _stored(self, index: int) -> list[bool]:
        """By entry id modulo the ensemble size."""
        return [self.has(at, index) for at in range(self.schedule.ensemble_size)]


@dataclass(frozen=True)
class LedgerCheck:
    """What a check of one ledger found; `fragments` are the bad ones, in order.

    `last_add_confirmed` is of a closed ledger its last entry. Of an open one whose bookies do not tell it, it is −1 and
    `problem` says why: nothing is known of its last fragment then but which bookies are gone.
    `gone_at_end` are the bookies of an open ledger's last fragment that are not registered; a writer that is still
    there replaces them with its next entries.
    """

    ledger: LedgerId
    versioned: VersionedMetadata
    last_add_confirmed: int
    fragments: tuple[LedgerFragment, ...]
    gone_at_end: tuple[str, ...] = ()
    problem: BkctlError | None = None

    @property
    def metadata(self) -> LedgerMetadata:
        """The metadata that was checked against."""
        return self.versioned.metadata

    @property
    def needs_recovery(self) -> bool:
        """Whether the ledger must be fenced and closed before its bad fragments can be replicated.

        Apache's worker does so after a grace period in which the writer may replace the bookies by itself.
        """
        if self.metadata.is_closed:
            return False
        return bool(self.gone_at_end) or any(not fragment.closed for fragment in self.fragments)


class LedgerChecker:
    """Checks ledgers of one cluster, any number at once, with bounded reads in flight."""

    def __init__(
        self,
        bookkeeper: BookKeeper,
        *,
        in_flight_count_max: int = IN_FLIGHT_COUNT_MAX,
        rng: random.Random | None = None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self._in_flight_count_max = max(in_flight_count_max, 1)
        self._permits = asyncio.Semaphore(self._in_flight_count_max)
        self._rng = rng or random.Random()
        #: Bookies that did not answer which entries they have, and until when they are not asked again.
        self._mute_until: dict[str, float] = {}

    async def check(
        self,
        ledger: LedgerId,
        found: VersionedMetadata | None = None,
        *,
        bookies: Collection[str] | None = None,
        percentage: int = 0,
        every_entry: bool = False,
        up: Collection[str] | None = None,
    ) -> LedgerCheck:
        """Check the replicas of the ledger: those on `bookies`, or all.

        `found` is its metadata (None: read now), `up` the ids of the registered bookies (None: asked now). Of what each
        bookie should hold of a fragment, the first and the last entry are read, and `percentage` of those between, or
        with `every_entry` all of them; then each fault lists what is missing. Open ledgers are checked up to their last
        add confirmed; a last fragment that has none is checked for its first entry unless all bookies that should have
        that say they do not.
        Raises LedgerNotFound, Unauthorized (the bookies know another master key), UsageError, and what the store
        raises; what is wrong with bookies is in the result. Source: LedgerChecker.checkLedger.
        """
        if not 0 <= percentage <= 100:
            raise UsageError(f"{percentage} % of the entries cannot be checked")
        access, registered = await self._begin(ledger, found, up)
        confirmed, problem = await _last_add_confirmed(access)
        fragments = _fragments(access, confirmed)
        last = fragments[-1]
        # Apache asks so for the only entry of a closed ledger's last fragment too, and passes over its loss.
        if (
            not access.metadata.is_closed
            and last.first_entry_id == last.last_entry_id
            and not await self._may_exist(access, last, registered)
        ):
            fragments.pop()
        judge = _Judge(self, access, registered, 100 if every_entry else percentage, every_entry, self._rng)
        bad = []
        for fragment in fragments:
            faults = await judge.faults(fragment, bookies)
            if faults:
                bad.append(replace(fragment, faults=faults))
        gone = _gone_at_end(access.metadata, confirmed, registered) if bookies is None else ()
        return LedgerCheck(ledger, access.versioned, confirmed, tuple(bad), gone, problem)

    async def check_entry(
        self,
        ledger: LedgerId,
        entry_id: int,
        found: VersionedMetadata | None = None,
        *,
        up: Collection[str] | None = None,
    ) -> LedgerFragment:
        """Ask every bookie of one entry's write set for it: the entry as a fragment, with those as faults that fail.

        Its `first_entry_id` is that of the fragment that it belongs to. Raises as `check`.
        """
        access, registered = await self._begin(ledger, found, up)
        fragment = access.metadata.fragment_of(entry_id)
        alone = LedgerFragment(ledger, entry_id, entry_id, fragment.bookies, access.metadata.is_closed, access.schedule)
        write_set = [fragment.bookies[index] for index in access.schedule.write_set(entry_id)]
        faults = await _Judge(self, access, registered, 100, True, self._rng).faults(alone, write_set)
        return replace(alone, first_entry_id=fragment.first_entry_id, faults=faults)

    async def on_bookies(
        self, ledger: LedgerId, bookies: Collection[str], found: VersionedMetadata | None = None
    ) -> LedgerCheck:
        """Every fragment that has one of `bookies` in its ensemble, with those as its faults, and nothing probed.

        For bookies that are lost or leave, whatever they may still hold. Raises as `check`.
        Source: BookKeeperAdmin.recoverLedger.
        """
        access, _ = await self._begin(ledger, found, ())
        if not any(bookie_id in bookies for each in access.metadata.ensembles for bookie_id in each.bookies):
            last_entry_id = access.metadata.last_entry_id if access.metadata.is_closed else INVALID_ENTRY_ID
            return LedgerCheck(ledger, access.versioned, last_entry_id, ())
        confirmed, problem = await _last_add_confirmed(access)
        bad = []
        for fragment in _fragments(access, confirmed):
            faults = tuple(
                ReplicaFault(index, bookie_id, FaultReason.GIVEN, fragment.entry_count(index))
                for index, bookie_id in enumerate(fragment.ensemble)
                if bookie_id in bookies
            )
            if faults:
                bad.append(replace(fragment, faults=faults))
        return LedgerCheck(ledger, access.versioned, confirmed, tuple(bad), (), problem)

    async def _begin(
        self, ledger: LedgerId, found: VersionedMetadata | None, up: Collection[str] | None
    ) -> tuple[LedgerAccess, Collection[str]]:
        cluster = self.bookkeeper.cluster
        if found is None:
            found = await in_thread(cluster.ledgers.read, ledger)
        if up is None:
            up = {each.bookie_id for each in await in_thread(cluster.bookies.list, False)}
        return self.bookkeeper.access(ledger, found), up

    async def _may_exist(self, access: LedgerAccess, fragment: LedgerFragment, up: Collection[str]) -> bool:
        """Whether the first entry of an open ledger's last fragment may have been written: all bookies that should
        have it would have to say that they do not."""
        write_set = [fragment.ensemble[index] for index in access.schedule.write_set(fragment.first_entry_id)]
        if any(bookie_id not in up for bookie_id in write_set):
            return True
        asked = [self.read(access, access.pool.channel(each), fragment.first_entry_id) for each in write_set]
        return any(not isinstance(error, (EntryNotFound, LedgerNotFound)) for error in await asyncio.gather(*asked))

    async def read(self, access: LedgerAccess, channel: BookieChannel, entry_id: int) -> BkctlError | None:
        """Read one entry from one bookie; returns what is wrong with it, None when it is there and intact."""
        await self._permits.acquire()
        future = channel.send(ReadRequest(access.ledger, entry_id), access.scoped)
        future.add_done_callback(lambda _: self._permits.release())
        await asyncio.wait([future])
        return _error_of(future, access, entry_id, channel.bookie_id)

    async def listed(self, access: LedgerAccess, bookie_id: str) -> Availability:
        """Which entries of the ledger the bookie says that it has: an answer from its index, which proves nothing.

        Raises what keeps it from answering; one that has nothing of the ledger gives an empty set. Apache's bookies
        with DbLedgerStorage leave this request without an answer: so there is no long wait for one, and a bookie that
        gave none is not asked for the next minutes (TimedOut at once). Over v3.
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


class _Judge:
    """Decides about the bookies of fragments of one ledger."""

    def __init__(
        self,
        checker: LedgerChecker,
        access: LedgerAccess,
        up: Collection[str],
        percentage: int,
        every_entry: bool,
        rng: random.Random,
    ) -> None:
        self._checker = checker
        self._access = access
        self._up = up
        self._percentage = percentage
        self._every_entry = every_entry
        self._rng = rng

    async def faults(self, fragment: LedgerFragment, bookies: Collection[str] | None) -> tuple[ReplicaFault, ...]:
        found = await asyncio.gather(
            *(
                self._fault(fragment, index)
                for index, bookie_id in enumerate(fragment.ensemble)
                if bookies is None or bookie_id in bookies
            )
        )
        return tuple(fault for fault in found if fault is not None)

    async def _fault(self, fragment: LedgerFragment, index: int) -> ReplicaFault | None:
        bookie_id = fragment.ensemble[index]
        fault = ReplicaFault(index, bookie_id, FaultReason.GONE, fragment.entry_count(index))
        if bookie_id not in self._up:
            return fault._replace(error=BookieUnavailable(f"Bookie {bookie_id} is not registered"))
        channel = self._access.pool.channel(bookie_id)
        spans = SpanBuilder(fragment, index)
        first: BkctlError | None = None
        reads = in_order(
            self._chosen(fragment, index),
            lambda entry_id: self._checker.read(self._access, channel, entry_id),
            lambda: IN_FLIGHT_COUNT_MAX,
        )
        async with contextlib.aclosing(reads):
            async for entry_id, error in reads:
                if error is None:
                    continue
                reason = reason_of(error)
                if reason not in ANSWERED:
                    # What else it would say is not waited for: it counts as lacking everything.
                    return fault._replace(reason=reason, error=error)
                first = first or error
                spans.add(entry_id)
        if first is None:
            return None
        missing = spans.finish() if self._every_entry else None
        return fault._replace(reason=reason_of(first), missing=missing, error=first)

    def _chosen(self, fragment: LedgerFragment, index: int) -> Iterable[int]:
        """The entries to be read from that bookie. Source: LedgerChecker.verifyLedgerFragment."""
        ends = fragment.first_and_last_of(index)
        if ends is None:
            return ()
        first, last = ends
        count = last - first + 1
        sample_count = count * self._percentage // 100
        if sample_count >= count:
            return fragment.entries_of(index)
        return self._sampled(fragment, index, (first, last), count // sample_count if sample_count > 0 else 0)

    def _sampled(self, fragment: LedgerFragment, index: int, ends: tuple[int, int], bucket: int) -> Iterator[int]:
        """Yield the ends and an entry of every `bucket` entries between, where the bookie should have it."""
        first, last = ends
        yield first
        for at in range(first, last - bucket - 1, bucket) if bucket else ():
            picked = at + self._rng.randrange(bucket)
            if first < picked < last and fragment.has(picked, index):
                yield picked
        if last > first:
            yield last


class SpanBuilder:
    """Collects entries (ascending) that the bookie at ensemble index `index` of `fragment` should hold, as spans."""

    def __init__(self, fragment: LedgerFragment, index: int) -> None:
        self._fragment = fragment
        self._indexes = (index,)
        self._spans: list[EntrySpan] = []

    def add(self, entry_id: int) -> None:
        """One more; the ids ascend."""
        if self._spans:
            first, last, count = self._spans[-1]
            if self._fragment.next_of(last, self._indexes) == entry_id:
                self._spans[-1] = EntrySpan(first, entry_id, count + 1)
                return
        self._spans.append(EntrySpan(entry_id, entry_id, 1))

    def finish(self) -> tuple[EntrySpan, ...]:
        """All spans, in order."""
        return tuple(self._spans)


def _fragments(access: LedgerAccess, last_add_confirmed: int) -> list[LedgerFragment]:
    """All fragments of a ledger, each up to the last entry known of it.

    A fragment that another follows is closed when all its entries are confirmed; in protocol v2 the last add confirmed
    lags behind. Source: LedgerChecker.checkLedger, LedgerFragment.
    """
    metadata = access.metadata
    starts = [each.first_entry_id for each in metadata.ensembles]
    found = []
    for at, each in enumerate(metadata.ensembles):
        is_last = at + 1 == len(starts)
        if not is_last:
            last = starts[at + 1] - 1
        elif metadata.is_closed:
            last = metadata.last_entry_id
        else:
            last = max(last_add_confirmed, each.first_entry_id)
        closed = metadata.is_closed or (not is_last and last_add_confirmed >= starts[-1] - 1)
        found.append(LedgerFragment(access.ledger, each.first_entry_id, last, each.bookies, closed, access.schedule))
    return found


def _gone_at_end(metadata: LedgerMetadata, last_add_confirmed: int, up: Collection[str]) -> tuple[str, ...]:
    if metadata.is_closed:
        return ()
    bookies = list(metadata.last_fragment.bookies)
    if len(metadata.ensembles) > 1 and last_add_confirmed < metadata.last_fragment.first_entry_id - 1:
        bookies += metadata.ensembles[-2].bookies
    return tuple(dict.fromkeys(each for each in bookies if each not in up))


async def _last_add_confirmed(access: LedgerAccess) -> tuple[int, BkctlError | None]:
    """The last add confirmed, and why it is not known."""
    if access.metadata.is_closed:
        return access.metadata.last_entry_id, None
    try:
        return (await read_last_confirmed(access)).last_add_confirmed, None
    except Unauthorized:
        raise
    except BkctlError as error:
        return INVALID_ENTRY_ID, error


def _error_of(
    future: asyncio.Future[Response], access: LedgerAccess, entry_id: int, bookie_id: str
) -> BkctlError | None:
    try:
        entry_of(future, access, entry_id, bookie_id)
    except BkctlError as error:
        return error
    return None


def reason_of(error: BkctlError) -> FaultReason:
    """What the error of reading an entry from one bookie says of that bookie."""
    if isinstance(error, EntryNotFound):
        return FaultReason.NO_ENTRY
    if isinstance(error, LedgerNotFound):
        return FaultReason.NO_LEDGER
    if isinstance(error, Corrupt) and not isinstance(error, ProtocolError):
        return FaultReason.DAMAGED
    return FaultReason.TIMED_OUT if isinstance(error, TimedOut) else FaultReason.UNAVAILABLE
