"""Checks ledgers for fragments that lack entries on some bookies.

A fragment is checked bookie by bookie. A bookie that is not registered is bad, even in a fragment without entries. A
registered bookie must return its first and its last entry of the fragment, a sample between them, or every entry.
Source: LedgerChecker, LedgerFragment, ReplicationWorker.isLastSegmentOpenAndMissingBookies. Unlike Apache's, this
checker verifies the digests of the entries, and reports the reason of each fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from asyncio import to_thread
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from bkctl.client.ensemble import ReplicaPlace, RoundRobinDistributionSchedule, locate
from bkctl.client.ledger import BookKeeper
from bkctl.client.placement import Placement
from bkctl.client.reader import LedgerAccess, read_last_confirmed
from bkctl.errors import BkctlError, BookieUnavailable, EntryNotFound, LedgerNotFound, Unauthorized, UsageError
from bkctl.formats.entry import INVALID_ENTRY_ID
from bkctl.formats.metadata import LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.replication.fragments import (
    ANSWERED,
    UNREADABLE_NAMED_MAX,
    EntrySpan,
    FaultReason,
    LedgerFragment,
    ReplicaFault,
    add_to_spans,
    fragments_of,
    reason_of,
)
from bkctl.replication.replica_reads import ReplicaReader
from bkctl.tasks import in_order

#: Reads in flight of one checker. Source: ServerConfiguration.getInFlightReadEntryNumInLedgerChecker.
IN_FLIGHT_COUNT_MAX: Final = 64


@dataclass(frozen=True)
class LedgerCheck:
    """The result of checking one ledger; `fragments` are the bad ones, in order.

    `last_add_confirmed` of a closed ledger is its last entry. If no bookie of an open ledger reports it, it is −1 and
    `problem` is the reason: of the last fragment only the unregistered bookies are known then. `gone_at_end` are the
    unregistered bookies of an open ledger's last fragment; an active writer replaces them with its next entries.
    """

    ledger: LedgerId
    versioned: VersionedMetadata
    last_add_confirmed: int
    fragments: tuple[LedgerFragment, ...]
    gone_at_end: tuple[str, ...] = ()
    problem: BkctlError | None = None

    @property
    def metadata(self) -> LedgerMetadata:
        """The metadata that the check used."""
        return self.versioned.metadata

    @property
    def needs_recovery(self) -> bool:
        """True if the ledger must be fenced and closed before its bad fragments can be replicated.

        Apache's worker does so after a grace period in which the writer may replace the bookies by itself.
        """
        if self.metadata.is_closed:
            return False
        return bool(self.gone_at_end) or any(not fragment.closed for fragment in self.fragments)


class LedgerChecker:
    """Checks ledgers of one cluster, any number at once, with bounded reads in flight.

    `replicas` reads single replicas.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        *,
        in_flight_count_max: int = IN_FLIGHT_COUNT_MAX,
        rng: random.Random | None = None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self.replicas = ReplicaReader(max(in_flight_count_max, 1))
        self._rng = rng or random.Random()

    async def check(
        self,
        ledger: LedgerId,
        found: VersionedMetadata | None = None,
        *,
        percentage: int = 0,
        every_entry: bool = False,
        suspects: Collection[str] = (),
        up: Collection[str] | None = None,
    ) -> LedgerCheck:
        """Check the replicas of the ledger.

        `found` is the ledger's metadata (None: read now), `up` the ids of the registered bookies (None: read now). Of
        the entries that a bookie should hold of a fragment, the first and the last one are read, and `percentage` of
        the entries between. With `every_entry` all are read, and each fault lists the missing entries; of the bookies
        `suspects` all are read. An open ledger
        is checked up to its last add confirmed. If its last fragment has no confirmed entry, the fragment's first entry
        is checked unless all bookies that should hold it report that they do not.
        Raise LedgerNotFound, Unauthorized (the bookies know another master key), UsageError, and errors of the store;
        errors of bookies are in the result. Source: LedgerChecker.checkLedger.
        """
        if not 0 <= percentage <= 100:
            raise UsageError(f"Cannot check {percentage} % of the entries", hint="give a percentage from 0 to 100")
        access, registered = await self._open(ledger, found, up)
        confirmed, problem = await _last_add_confirmed(access)
        fragments = fragments_of(access, confirmed)
        last = fragments[-1]
        # Apache applies this to the only entry of a closed ledger's last fragment too, and misses its loss.
        if (
            not access.metadata.is_closed
            and last.first_entry_id == last.last_entry_id
            and not await self._may_exist(access, last, registered)
        ):
            fragments.pop()
        percentage = 100 if every_entry else percentage
        checker = _FragmentChecker(self.replicas, access, registered, percentage, every_entry, self._rng, suspects)
        bad = []
        for fragment in fragments:
            faults = await checker.faults(fragment, fragment.ensemble)
            if faults:
                bad.append(fragment._replace(faults=faults))
        gone = _gone_at_end(access.metadata, confirmed, registered)
        return LedgerCheck(ledger, access.versioned, confirmed, tuple(bad), gone, problem)

    async def check_entry(
        self,
        ledger: LedgerId,
        entry_id: int,
        found: VersionedMetadata | None = None,
        *,
        up: Collection[str] | None = None,
    ) -> LedgerFragment:
        """Read one entry from every bookie of its write set; return it as a fragment whose faults are the bad bookies.

        The result's `first_entry_id` is that of the fragment in the metadata. Raise as `check`.
        """
        access, registered = await self._open(ledger, found, up)
        fragment = access.metadata.fragment_of(entry_id)
        alone = LedgerFragment(ledger, entry_id, entry_id, fragment.bookies, access.metadata.is_closed, access.schedule)
        write_set = [fragment.bookies[index] for index in access.schedule.write_set(entry_id)]
        checker = _FragmentChecker(self.replicas, access, registered, 100, True, self._rng)
        faults = await checker.faults(alone, write_set)
        return alone._replace(first_entry_id=fragment.first_entry_id, faults=faults)

    async def on_bookies(
        self, ledger: LedgerId, bookies: Collection[str], found: VersionedMetadata | None = None
    ) -> LedgerCheck:
        """Return every fragment that has one of `bookies` in its ensemble, with these as its faults; read no entry.

        This serves bookies that are lost or leave, whatever they still hold. Raise as `check`.
        Source: BookKeeperAdmin.recoverLedger.
        """
        access, _ = await self._open(ledger, found, ())
        if not any(bookie_id in bookies for fragment in access.metadata.ensembles for bookie_id in fragment.bookies):
            last_entry_id = access.metadata.last_entry_id if access.metadata.is_closed else INVALID_ENTRY_ID
            return LedgerCheck(ledger, access.versioned, last_entry_id, ())
        confirmed, problem = await _last_add_confirmed(access)
        bad = []
        for fragment in fragments_of(access, confirmed):
            indexes = [index for index, bookie_id in enumerate(fragment.ensemble) if bookie_id in bookies]
            if indexes:
                bad.append(fragment.given(indexes))
        return LedgerCheck(ledger, access.versioned, confirmed, tuple(bad), (), problem)

    async def _open(
        self, ledger: LedgerId, found: VersionedMetadata | None, up: Collection[str] | None
    ) -> tuple[LedgerAccess, Collection[str]]:
        """Return access to the ledger and the ids of the registered bookies; None stands for `read it now`."""
        cluster = self.bookkeeper.cluster
        if found is None:
            found = await asyncio.to_thread(cluster.ledgers.read, ledger)
        if up is None:
            up = {bookie.bookie_id for bookie in await asyncio.to_thread(cluster.bookies.list, False)}
        return self.bookkeeper.access(ledger, found), up

    async def _may_exist(self, access: LedgerAccess, fragment: LedgerFragment, up: Collection[str]) -> bool:
        """Return False if every bookie that should hold the fragment's first entry reports that it does not."""
        entry_id = fragment.first_entry_id
        write_set = [fragment.ensemble[index] for index in access.schedule.write_set(entry_id)]
        if any(bookie_id not in up for bookie_id in write_set):
            return True
        reads = [self.replicas.read(access, access.pool.channel(bookie_id), entry_id) for bookie_id in write_set]
        return any(not isinstance(error, (EntryNotFound, LedgerNotFound)) for error in await asyncio.gather(*reads))


class _FragmentChecker(NamedTuple):
    """Checks the bookies of fragments of one ledger; the options are those that LedgerChecker.check has."""

    replicas: ReplicaReader
    access: LedgerAccess
    up: Collection[str]
    percentage: int
    every_entry: bool
    rng: random.Random
    suspects: Collection[str] = ()

    async def faults(self, fragment: LedgerFragment, bookies: Collection[str]) -> tuple[ReplicaFault, ...]:
        """Return the faults of the fragment's replicas on `bookies`, by ensemble index."""
        found = await asyncio.gather(
            *(self._fault(fragment, index) for index, name in enumerate(fragment.ensemble) if name in bookies)
        )
        return tuple(fault for fault in found if fault is not None)

    async def _fault(self, fragment: LedgerFragment, index: int) -> ReplicaFault | None:
        bookie_id = fragment.ensemble[index]
        fault = ReplicaFault(index, bookie_id, FaultReason.GONE, fragment.entry_count(index))
        if bookie_id not in self.up:
            return fault._replace(error=BookieUnavailable(f"Bookie {bookie_id} is not registered"))
        channel = self.access.pool.channel(bookie_id)
        spans: list[EntrySpan] = []
        first: BkctlError | None = None
        missing_count, is_adjoining = 0, False
        reads = in_order(
            self._entries_to_read(fragment, index),
            lambda entry_id: self.replicas.read(self.access, channel, entry_id),
            lambda: IN_FLIGHT_COUNT_MAX,
        )
        async with contextlib.aclosing(reads):
            async for entry_id, error in reads:
                if error is None:
                    is_adjoining = False
                    continue
                reason = reason_of(error)
                if reason not in ANSWERED:
                    # The other answers are not awaited: the bookie counts as lacking everything.
                    return fault._replace(reason=reason, error=error)
                first = first or error
                if not (self.every_entry or bookie_id in self.suspects) or missing_count == UNREADABLE_NAMED_MAX:
                    # No need to know the others, and damaged metadata may name more than can ever be read.
                    return fault._replace(reason=reason_of(first), error=first)
                add_to_spans(spans, entry_id, adjoins=is_adjoining)
                missing_count, is_adjoining = missing_count + 1, True
        return None if first is None else fault._replace(reason=reason_of(first), missing=tuple(spans), error=first)

    def _entries_to_read(self, fragment: LedgerFragment, index: int) -> Iterable[int]:
        """Return the entries to read from the bookie at `index`. Source: LedgerChecker.verifyLedgerFragment."""
        ends = fragment.first_and_last_of(index)
        if ends is None:
            return ()
        first, last = ends
        count = last - first + 1
        percentage = 100 if fragment.ensemble[index] in self.suspects else self.percentage
        sample_count = count * percentage // 100
        if sample_count >= count:
            return fragment.entries_of(index)
        return self._sampled(fragment, index, (first, last), count // sample_count if sample_count > 0 else 0)

    def _sampled(self, fragment: LedgerFragment, index: int, ends: tuple[int, int], bucket: int) -> Iterator[int]:
        """Yield the ends and a random entry of every `bucket` entries between, if the bookie should hold it."""
        first, last = ends
        yield first
        for start in range(first, last - bucket - 1, bucket) if bucket else ():
            picked = start + self.rng.randrange(bucket)
            if first < picked < last and fragment.has(picked, index):
                yield picked
        if last > first:
            yield last


def _gone_at_end(metadata: LedgerMetadata, last_add_confirmed: int, up: Collection[str]) -> tuple[str, ...]:
    """Return the unregistered bookies of an open ledger's last fragment, and of the one before if it may still grow."""
    if metadata.is_closed:
        return ()
    bookies = list(metadata.last_fragment.bookies)
    if len(metadata.ensembles) > 1 and last_add_confirmed < metadata.last_fragment.first_entry_id - 1:
        bookies += metadata.ensembles[-2].bookies
    return tuple(dict.fromkeys(bookie_id for bookie_id in bookies if bookie_id not in up))


async def _last_add_confirmed(access: LedgerAccess) -> tuple[int, BkctlError | None]:
    """Return the last add confirmed and None, or −1 and the error that hides it. Raise Unauthorized."""
    if access.metadata.is_closed:
        return access.metadata.last_entry_id, None
    try:
        return (await read_last_confirmed(access)).last_add_confirmed, None
    except Unauthorized:
        raise
    except BkctlError as error:
        return INVALID_ENTRY_ID, error


# --- places of replicas ----------------------------------------------------------------------------------------------


class PlaceRow(NamedTuple):
    """A replica's place and its ledger; `entry_id` is the requested entry, `fault` the finding of a check.

    `rack` is the bookie's, and `in_few_racks` says whether entries on it have too few; None without racks.
    """

    ledger: LedgerId
    entry_id: int | None
    place: ReplicaPlace
    fault: ReplicaFault | None = None
    rack: str | None = None
    in_few_racks: bool | None = None

    @property
    def answer(self) -> str:
        """The result of the bookie's answers, in a word."""
        return "ok" if self.fault is None else self.fault.reason.value

    @property
    def missing(self) -> list[dict[str, int]] | None:
        """The entries that the bookie lacks or has damaged; None if they are not known one by one."""
        if self.fault is None:
            return []
        if self.fault.missing is None:
            return None
        return [
            {"firstEntryId": span.first_entry_id, "lastEntryId": span.last_entry_id, "entryCount": span.entry_count}
            for span in self.fault.missing
        ]


def placed(row: PlaceRow, metadata: LedgerMetadata, placement: Placement) -> PlaceRow:
    """Return the row with the rack of its bookie, and True if entries on it have too few racks."""
    if not placement.racks:
        return row
    place, wanted = row.place, {row.place.ensemble_index}
    if row.entry_id is not None:
        wanted = set(RoundRobinDistributionSchedule.of(metadata).write_set(row.entry_id))
    problems = placement.problems(metadata, metadata.fragment_of(place.first_entry_id).bookies)
    is_few = any(wanted.issubset(each.write_set) for each in problems)
    return row._replace(rack=placement.racks.get(place.bookie_id), in_few_racks=is_few)


def places_of(
    cluster: Cluster,
    ledgers: Iterable[LedgerId],
    bookies: Sequence[RegisteredBookie],
    entry_id: int | None,
    placement: Placement,
) -> Iterator[PlaceRow]:
    """Yield the places of all replicas, or of one entry's, by the metadata. Raises as `locate`."""
    for ledger, found in cluster.ledgers.read_each(ledgers):
        for place in locate(ledger, found.metadata, bookies, entry_id):
            yield placed(PlaceRow(ledger, entry_id, place), found.metadata, placement)


async def checked_places(
    bookkeeper: BookKeeper,
    ledgers: Iterable[LedgerId],
    entry_id: int | None,
    placement: Placement,
    *,
    every_entry: bool = False,
) -> AsyncGenerator[PlaceRow]:
    """Yield the places as `places_of`, each with the fault that its bookie answers; see `LedgerChecker`."""
    checker, cluster = LedgerChecker(bookkeeper), bookkeeper.cluster
    for ledger in ledgers:
        bookies = await to_thread(cluster.bookies.list)
        up = {bookie.bookie_id for bookie in bookies if bookie.state != "down"}
        found = await to_thread(cluster.ledgers.read, ledger)
        places = list(locate(ledger, found.metadata, bookies, entry_id))
        if entry_id is None:
            fragments = (await checker.check(ledger, found, every_entry=every_entry, up=up)).fragments
        else:
            fragments = (await checker.check_entry(ledger, entry_id, found, up=up),)
        faults = {(each.first_entry_id, fault.ensemble_index): fault for each in fragments for fault in each.faults}
        for place in places:
            fault = faults.get((place.first_entry_id, place.ensemble_index))
            yield placed(PlaceRow(ledger, entry_id, place, fault), found.metadata, placement)
