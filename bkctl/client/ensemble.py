"""Ensembles: the bookies of an entry, quorums of answers, usable bookies, writing metadata.

This module does not talk to bookies. Source: RoundRobinDistributionSchedule, MetadataUpdateLoop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from bkctl.columns import some_of
from bkctl.errors import EntryNotFound, MetadataVersionConflict, NotEnoughBookies, UsageError
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import RegisteredBookie
from bkctl.metadata.ledgers import LedgerManager, VersionedMetadata

#: Largest ensemble. Apache's formats allow far more, but more is a mistake in the request.
ENSEMBLE_SIZE_MAX: Final = 1000
UPDATE_ATTEMPTS_MAX: Final = 100


def check_quorums(ensemble_size: int, write_quorum_size: int, ack_quorum_size: int) -> None:
    """Raise UsageError unless ensemble ≥ write quorum ≥ ack quorum ≥ 1. Source: LedgerCreateOp.validate."""
    if not ENSEMBLE_SIZE_MAX >= ensemble_size >= write_quorum_size >= ack_quorum_size >= 1:
        raise UsageError(
            f"Ensemble size {ensemble_size}, write quorum {write_quorum_size}, ack quorum {ack_quorum_size} do not fit",
            hint=f"{ENSEMBLE_SIZE_MAX} ≥ ensemble ≥ write quorum ≥ ack quorum ≥ 1 is needed",
        )


class RoundRobinDistributionSchedule:
    """The write set of each entry: entry e is on the ensemble indexes (e + w) mod E, w = 0 … Wq−1, with absolute e.

    An ack quorum of 0, which Apache's old createLedger allows, counts as 1, because 0 cannot decide anything.
    """

    __slots__ = ("_write_sets", "ack_quorum_size", "ensemble_size", "write_quorum_size")

    def __init__(self, ensemble_size: int, write_quorum_size: int, ack_quorum_size: int) -> None:
        self.ensemble_size = ensemble_size
        self.write_quorum_size = write_quorum_size
        self.ack_quorum_size = max(ack_quorum_size, 1)
        self._write_sets = tuple(
            tuple((at + w) % ensemble_size for w in range(write_quorum_size)) for at in range(ensemble_size)
        )

    @staticmethod
    def of(metadata: LedgerMetadata) -> RoundRobinDistributionSchedule:
        """Return the schedule of a ledger; ledgers of the same shape share it."""
        return _schedule(metadata.ensemble_size, metadata.write_quorum_size, metadata.ack_quorum_size)

    @property
    def is_whole(self) -> bool:
        """True if each bookie of the ensemble has every entry."""
        return self.ensemble_size == self.write_quorum_size

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """Return the ensemble indexes that hold the entry, in the order of asking."""
        return self._write_sets[entry_id % self.ensemble_size]

    def entry_count(self, index: int, first: int, last: int) -> int:
        """Return the number of the entries `first` to `last` that are on ensemble index `index`."""
        size, quorum = self.ensemble_size, self.write_quorum_size
        rounds, rest = divmod(max(last - first + 1, 0), size)
        # The first `rest` entries are left over, of which the one `at` is the last of the first quorum there.
        at = (index - first) % size
        before, after = at + 1 - quorum, at + 1
        found = rounds * quorum + (rest if rest < after else after)
        if before > 0:
            return found - (rest if rest < before else before)
        return found + (rest - before - size if rest > before + size else 0)

    @property
    def missing_count_for_recovery(self) -> int:
        """Bookies of a write set that must lack an entry to prove that it was never acknowledged: Wq − Aq + 1."""
        return self.write_quorum_size - self.ack_quorum_size + 1

    def covered(self, answered: Collection[int]) -> bool:
        """Return True if bookies outside `answered` (ensemble indexes) cannot have acknowledged an entry alone.

        An index counts as answered when its bookie reported its entries, or that it has none.
        Source: RRQuorumCoverageSet.
        """
        return all(
            sum(index not in answered for index in write_set) < self.ack_quorum_size for write_set in self._write_sets
        )


_schedule = lru_cache(maxsize=64)(RoundRobinDistributionSchedule)


class ReplicaPlace(NamedTuple):
    """One bookie of a fragment, and the entries that it should have.

    `last_entry_id` and `entry_count` are None while the fragment still grows. `state` is "down" for unregistered
    bookies too; `ledger_scopes` is None then: unknown. `position` is the place in the write set of the one requested
    entry.
    """

    first_entry_id: int
    last_entry_id: int | None
    ensemble_index: int
    bookie_id: str
    state: str
    ledger_scopes: bool | None
    entry_count: int | None
    position: int | None


def locate(
    ledger: LedgerId, metadata: LedgerMetadata, bookies: Iterable[RegisteredBookie], entry_id: int | None = None
) -> Iterator[ReplicaPlace]:
    """Yield the places of a ledger's replicas: every bookie of every fragment in order, or the write set of one entry.

    Raises EntryNotFound for an entry after the end of a closed ledger.
    """
    by_id = {bookie.bookie_id: bookie for bookie in bookies}
    schedule = RoundRobinDistributionSchedule.of(metadata)
    end = metadata.last_entry_id
    if entry_id is not None and metadata.is_closed and entry_id > end:
        raise EntryNotFound(f"Ledger {ledger} {'ends at entry ' + str(end) if end >= 0 else 'has no entries'}")
    for first, last, bookie_ids in metadata.extents():
        if entry_id is not None and not (first <= entry_id and (last is None or entry_id <= last)):
            continue
        indexes = range(len(bookie_ids)) if entry_id is None else schedule.write_set(entry_id)
        for position, index in enumerate(indexes):
            bookie = by_id.get(bookie_ids[index])
            yield ReplicaPlace(
                first,
                last,
                index,
                bookie_ids[index],
                "down" if bookie is None else bookie.state,
                None if bookie is None or bookie.state == "down" else bookie.ledger_scopes,
                None if last is None else schedule.entry_count(index, first, last),
                None if entry_id is None else position,
            )


def usable_bookies(
    bookies: Iterable[RegisteredBookie],
    count: int,
    *,
    scoped: bool,
    exclude: Collection[str] = (),
    avoid: Collection[str] = (),
    rng: random.Random | None = None,
) -> list[str]:
    """Return the ids of the writable bookies that are not in `exclude`, at least `count`, in random order.

    `scoped` allows only bookies registered with `ledgerScopes` = 1: the registration lock of scopes. Bookies in `avoid`
    (they failed lately) come last. Raises NotEnoughBookies, which names the usable bookies and, with `scoped`, the ones
    that serve scope 0 only.
    """
    writable = [bookie for bookie in bookies if bookie.state == "rw"]
    candidates = [bookie.bookie_id for bookie in writable if not scoped or bookie.ledger_scopes]
    usable = [bookie_id for bookie_id in candidates if bookie_id not in exclude]
    if len(usable) < count:
        raise _not_enough(writable, candidates, usable, count, exclude)
    rng = rng or random.SystemRandom()
    rng.shuffle(usable)
    usable.sort(key=lambda bookie_id: bookie_id in avoid)
    return usable


def _not_enough(
    writable: Sequence[RegisteredBookie],
    candidates: Sequence[str],
    usable: Sequence[str],
    count: int,
    exclude: Collection[str],
) -> NotEnoughBookies:
    problem = f"{count} {'more ' if exclude else ''}writable {'bookie is' if count == 1 else 'bookies are'} needed, "
    problem += f"{len(usable)} {'is' if len(usable) == 1 else 'are'} there"
    notes = []
    if usable:
        notes.append(f"writable: {some_of(usable, 10)}")
    without = [bookie.bookie_id for bookie in writable if bookie.bookie_id not in candidates]
    if without:
        notes.append(f"without ledger scopes: {some_of(without, 10)}")
    excluded = [bookie_id for bookie_id in candidates if bookie_id in exclude]
    if excluded:
        notes.append(f"in use or failed: {some_of(excluded, 10)}")
    return NotEnoughBookies(
        f"{problem} ({'; '.join(notes)})" if notes else problem,
        hint="start bookies that serve ledger scopes" if without else "see 'bkctl bookies list'",
    )


def with_fragment(metadata: LedgerMetadata, first_entry_id: int, ensemble: tuple[str, ...]) -> LedgerMetadata:
    """Return `metadata` with the entries from `first_entry_id` on `ensemble`.

    The last fragment is replaced when it starts at that entry, else a new one is appended. Raises
    MetadataVersionConflict when another client wrote a later fragment. Source: LedgerHandle.ensembleChangeLoop.
    """
    last = metadata.last_fragment
    if first_entry_id < last.first_entry_id:
        raise MetadataVersionConflict(
            f"Another client wrote a fragment from entry {last.first_entry_id}, after our entry {first_entry_id}"
        )
    kept = metadata.ensembles[:-1] if first_entry_id == last.first_entry_id else metadata.ensembles
    return metadata._replace(ensembles=(*kept, Fragment(first_entry_id, ensemble)))


def closed(metadata: LedgerMetadata, last_entry_id: int, length: int) -> LedgerMetadata:
    """Return `metadata` in state CLOSED. Source: LedgerMetadataBuilder.withClosedState."""
    return metadata._replace(state=LedgerState.CLOSED, last_entry_id=last_entry_id, length=length)


def update_metadata(
    ledgers: LedgerManager,
    ledger: LedgerId,
    current: VersionedMetadata,
    change: Callable[[LedgerMetadata], LedgerMetadata | None],
) -> VersionedMetadata:
    """Write the result of `change` by compare-and-set; on a conflict, read the metadata again and repeat.

    `change` returns None when nothing is left to write, and may raise to give up. Blocks; run this in a thread. Returns
    the metadata as stored then. Raises the errors of the store and of `change`, and MetadataVersionConflict when other
    clients were faster UPDATE_ATTEMPTS_MAX times. Source: MetadataUpdateLoop.
    """
    for _ in range(UPDATE_ATTEMPTS_MAX):
        changed = change(current.metadata)
        if changed is None:
            return current
        try:
            version = ledgers.write(ledger, changed, current.version)
        except MetadataVersionConflict:
            current = ledgers.read(ledger)
        else:
            # The store writes 0 for the token of the creation, as Java's client does.
            token = None if changed.c_token is None else 0
            return current._replace(metadata=changed._replace(c_token=token), version=version)
    raise MetadataVersionConflict(
        f"Metadata of ledger {ledger} changed {UPDATE_ATTEMPTS_MAX} times while it was being written", hint="try again"
    )
