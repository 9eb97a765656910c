"""The places of ledgers' replicas: their racks, and what the bookies answer there."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from bkctl.client.ensemble import ReplicaPlace, RoundRobinDistributionSchedule, locate
from bkctl.ids import LedgerId
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.fragments import ReplicaFault

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.placement import Placement
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.cluster import Cluster, RegisteredBookie


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
    place = row.place
    fragment = next(each for each in metadata.ensembles if each.first_entry_id == place.first_entry_id)
    few = [each.write_set for each in placement.problems(metadata, fragment.bookies)]
    if row.entry_id is None:
        is_few = any(place.ensemble_index in each for each in few)
    else:
        write_set = RoundRobinDistributionSchedule.of(metadata).write_set(row.entry_id)
        is_few = any(set(each).issuperset(write_set) for each in few)
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
