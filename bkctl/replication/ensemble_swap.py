"""Swaps bookies in ledgers' metadata, once the new bookies have the entries. Source: MetadataUpdateLoop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from bkctl.client.ensemble import UPDATE_ATTEMPTS_MAX
from bkctl.errors import BkctlError, Conflict, MetadataVersionConflict, UnclosedFragment
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.replication.signals import BatchedCalls

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim
    from bkctl.replication.fragments import LedgerFragment

#: A ledger's current metadata, and the bookies that a swap replaced in it, by bookie that left.
Swapped: TypeAlias = "tuple[VersionedMetadata, dict[str, str]]"


class LockLost(Conflict):
    """The lock under which a ledger was replicated is lost; another worker may hold it."""

    def __init__(self, ledger: LedgerId) -> None:
        super().__init__(f"The lock of ledger {ledger} is lost", hint="the metadata store ended our session")


class EnsembleSwap(NamedTuple):
    """New bookies for a fragment's ensemble, by ensemble index in `moved`.

    `checked` is the metadata that the fragment was found in. With a `lock`, the swap needs it to be held.
    """

    checked: VersionedMetadata
    fragment: LedgerFragment
    moved: Mapping[int, str]
    lock: Claim | None

    @property
    def ledger(self) -> LedgerId:
        return self.fragment.ledger

    def applied_to(self, found: VersionedMetadata) -> tuple[LedgerMetadata, dict[str, str]]:
        """Return the metadata with the new bookies, and the replaced bookies, each with its replacement.

        Replace none if the fragment is not the one that was copied any more. Raise UnclosedFragment.
        """
        metadata, fragment = found.metadata, self.fragment
        present = ensemble_at(metadata, fragment.first_entry_id)
        if present is None or not _is_same_ledger(found, self.checked):
            return metadata, {}
        if not metadata.is_closed and metadata.last_fragment.first_entry_id == fragment.first_entry_id:
            raise UnclosedFragment(f"Ledger {self.ledger} is open, and its last fragment may still grow")
        if _end_of(metadata, fragment.first_entry_id) > fragment.last_entry_id:
            return metadata, {}  # The fragment has entries now that were not copied.
        moved = {at: target for at, target in self.moved.items() if present[at] == fragment.ensemble[at]}
        # A target may be in the ensemble only at an index that it leaves in the same swap.
        while True:
            staying = {bookie_id for at, bookie_id in enumerate(present) if at not in moved}
            if staying.isdisjoint(moved.values()):
                break
            moved = {at: target for at, target in moved.items() if target not in staying}
        bookies = [moved.get(at, bookie_id) for at, bookie_id in enumerate(present)]
        replaced = {present[at]: target for at, target in moved.items()}
        changed = Fragment(fragment.first_entry_id, tuple(bookies))
        ensembles = tuple(
            changed if ensemble.first_entry_id == fragment.first_entry_id else ensemble
            for ensemble in metadata.ensembles
        )
        return metadata._replace(ensembles=ensembles), replaced


class _Change(NamedTuple):
    """The metadata to write for the swap with this number, and the bookies that it replaces."""

    number: int
    found: VersionedMetadata
    metadata: LedgerMetadata
    replaced: dict[str, str]


class EnsembleSwapper:
    """Swaps bookies in the metadata of many ledgers in few calls to the store."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Replaces the bookies that are still in the fragment, and none if the fragment has changed. Raises
        #: UnclosedFragment, LockLost, LedgerNotFound, MetadataVersionConflict, and errors of the store.
        self.swap: BatchedCalls[EnsembleSwap, Swapped] = BatchedCalls(self._swap_many)

    def _swap_many(self, swaps: Sequence[EnsembleSwap]) -> list[Swapped | BkctlError]:
        results: dict[int, Swapped | BkctlError] = {}
        for _ in range(UPDATE_ATTEMPTS_MAX):
            waiting = [number for number in range(len(swaps)) if number not in results]
            if not waiting:
                break
            changes = self._changes(swaps, waiting, results)
            self._write(swaps, changes, results)
        for number in range(len(swaps)):
            if number not in results:
                results[number] = MetadataVersionConflict(
                    f"Metadata of ledger {swaps[number].ledger} changed {UPDATE_ATTEMPTS_MAX} times while it was being "
                    "written",
                    hint="try again",
                )
        return [results[number] for number in range(len(swaps))]

    def _changes(
        self, swaps: Sequence[EnsembleSwap], waiting: Sequence[int], results: dict[int, Swapped | BkctlError]
    ) -> list[_Change]:
        """Read the metadata and return the changes to write; swaps without a change get their results."""
        changes = []
        # Read now: copying may have taken hours, and a ledger that was deleted and created again meanwhile may have
        # metadata of the version that was checked.
        present = self._cluster.ledgers.read_many([swaps[number].ledger for number in waiting])
        for number, (_, found) in zip(waiting, present, strict=True):
            try:
                if isinstance(found, BkctlError):
                    raise found
                metadata, replaced = swaps[number].applied_to(found)
            except BkctlError as error:
                results[number] = error
                continue
            if replaced:
                changes.append(_Change(number, found, metadata, replaced))
            else:
                results[number] = found, {}
        locks = {change.number: lock for change in changes if (lock := swaps[change.number].lock) is not None}
        for number, is_held in zip(locks, self._cluster.store.held_many(list(locks.values())), strict=True):
            if not is_held:
                results[number] = LockLost(swaps[number].ledger)
        return [change for change in changes if change.number not in results]

    def _write(
        self, swaps: Sequence[EnsembleSwap], changes: Sequence[_Change], results: dict[int, Swapped | BkctlError]
    ) -> None:
        """Write the changes; one whose metadata changed meanwhile gets no result."""
        versions = self._cluster.ledgers.write_many(
            [(swaps[change.number].ledger, change.metadata, change.found.version) for change in changes]
        )
        for (number, found, metadata, replaced), version in zip(changes, versions, strict=True):
            if isinstance(version, MetadataVersionConflict):
                continue
            if isinstance(version, BkctlError):
                results[number] = version
                continue
            # The store writes 0 for the token of the creation, as Java's client does.
            token = None if metadata.c_token is None else 0
            results[number] = found._replace(metadata=metadata._replace(c_token=token), version=version), replaced


def _is_same_ledger(found: VersionedMetadata, before: VersionedMetadata) -> bool:
    """Return False if the ledger was deleted, and another one created under its id."""
    now, then = found.metadata, before.metadata
    return (
        (None in (found.ctime_ms, before.ctime_ms) or found.ctime_ms == before.ctime_ms)
        and now.password == then.password
        and now.digest_type is then.digest_type
        and now.ensemble_size == then.ensemble_size
        and now.write_quorum_size == then.write_quorum_size
    )


def _end_of(metadata: LedgerMetadata, first_entry_id: int) -> int:
    """Return the last entry of the fragment that begins with that entry, which another follows or a close ended."""
    following = (fragment.first_entry_id for fragment in metadata.ensembles if fragment.first_entry_id > first_entry_id)
    return next(following, metadata.last_entry_id + 1) - 1


def ensemble_at(metadata: LedgerMetadata, first_entry_id: int) -> tuple[str, ...] | None:
    """Return the ensemble of the fragment that begins with that entry; None if no fragment does."""
    ensembles = (fragment.bookies for fragment in metadata.ensembles if fragment.first_entry_id == first_entry_id)
    return next(ensembles, None)
