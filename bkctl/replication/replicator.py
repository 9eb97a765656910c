"""Copies the entries of ledgers to bookies that lack them, and swaps the bookies in the metadata.

    choose targets → read each entry, by its digest → RECOVERY_ADD there → swap the bookies in the metadata

Until the swap, which is one compare-and-set, the ledger is unchanged.
Source: LedgerFragmentReplicator, BookKeeperAdmin.replicateLedgerFragment, BookKeeperAdmin.recoverLedger,
ReplicationWorker.

Differences from Apache's: a bookie gets exactly the entries that it should hold, byte for byte as the other replicas
have them (Apache seals them again with its own last add confirmed). An entry that no replica returns is named, with the
error of each bookie. A bookie that is alive and cannot be replaced gets back the entries that it lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple, TypeAlias

from bkctl.client.ensemble import UPDATE_ATTEMPTS_MAX
from bkctl.client.ledger import BookKeeper
from bkctl.client.placement import Placement, PlacementRules, choose_replacements, mend_placement
from bkctl.errors import (
    BkctlError,
    Conflict,
    LedgerNotFound,
    MetadataVersionConflict,
    NotEnoughBookies,
    UnclosedFragment,
)
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import Claim
from bkctl.pace import Pace
from bkctl.replication.checker import LedgerCheck, LedgerChecker
from bkctl.replication.fragment_copy import BATCH_SIZE, CopyTools, FragmentCopy, TargetFailed, UnreadableEntries
from bkctl.replication.fragments import ANSWERED, LedgerFragment, fragments_of
from bkctl.replication.signals import BatchedCalls
from bkctl.tasks import run_to_end

#: The number of targets that are tried in the place of one bad bookie.
_TARGET_ATTEMPTS_MAX: Final = 3
#: Ledgers that are recovered at once: each reads ahead, and holds the entries that it adds again.
RECOVERIES_AT_ONCE: Final = 64


class Outcome(Enum):
    """The outcome of replicating one fragment."""

    #: Other bookies have the entries, and the metadata names them.
    REPLICATED = "replicated"
    #: The bookies that lacked entries have them again; the metadata is unchanged.
    REPAIRED = "repaired"
    #: The ensemble changed meanwhile. Bookies that were still in it were replaced; another check finds the rest.
    SUPERSEDED = "superseded"
    #: Entries are unreadable: the metadata is unchanged.
    UNRECOVERABLE = "unrecoverable"


@dataclass(frozen=True)
class FragmentReplication:
    """The result of replicating one fragment.

    `versioned` is the ledger's metadata afterwards. `replaced` maps bookies that left the ensemble to their
    replacements, `repaired` are the bookies that got back what they lacked. `entry_count` and `size_bytes` (headers and
    digests included) were written.
    """

    outcome: Outcome
    versioned: VersionedMetadata
    replaced: Mapping[str, str]
    repaired: tuple[str, ...] = ()
    entry_count: int = 0
    size_bytes: int = 0
    unreadable: tuple[UnreadableEntries, ...] = ()


@dataclass(frozen=True)
class LedgerReplication:
    """The result of replicating one ledger. `errors` has the fragments that could not be replicated now, with reasons.

    `left_open`: bad fragments remain because the ledger is open, and the caller forbade fencing.
    """

    check: LedgerCheck
    fragments: tuple[FragmentReplication, ...] = ()
    errors: tuple[tuple[LedgerFragment, BkctlError], ...] = ()
    left_open: bool = False

    @property
    def unreadable(self) -> tuple[UnreadableEntries, ...]:
        """The entries that no replica returns, of all fragments."""
        return tuple(entries for fragment in self.fragments for entries in fragment.unreadable)

    @property
    def done(self) -> bool:
        """True if every bad fragment is replicated. After SUPERSEDED another check is needed."""
        successes = (Outcome.REPLICATED, Outcome.REPAIRED)
        return not (self.left_open or self.errors) and all(fragment.outcome in successes for fragment in self.fragments)


class LedgerFragmentReplicator:
    """Replicates fragments of ledgers, any number at once.

    `batch_size` bounds the entries of a fragment that are on their way at once (see CopyTools), `pace` the writes.
    `progress` gets the entries and bytes of each write, `was_read` the bytes of each entry read.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        *,
        batch_size: int = BATCH_SIZE,
        pace: Pace | None = None,
        progress: Callable[[int, int], None] = lambda entries, size: None,
        was_read: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self.checker = LedgerChecker(bookkeeper)
        self._tools = CopyTools(self.checker.replicas, batch_size, pace or Pace(), progress, was_read)
        #: Returns the target of each bad bookie of a fragment.
        self.targets = TargetChooser(bookkeeper).targets
        self._swapper = EnsembleSwapper(bookkeeper.cluster)
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)
        #: Copies without a swap, by ledger, creation time and first entry: targets, and the last of all entries copied.
        self._begun: dict[tuple[LedgerId, int | None, int], tuple[dict[int, str], int]] = {}

    async def replicate(
        self,
        check: LedgerCheck,
        fragment: LedgerFragment,
        *,
        targets: Mapping[int, str] | None = None,
        exclude: Collection[str] = (),
        lock: Claim | None = None,
    ) -> FragmentReplication:
        """Copy the entries of the fragment's bad bookies to `targets` (None: as `targets()` chooses), and swap them.

        A target that fails is replaced by another one, unless the caller gave it. Each entry is read from any bookie
        that should have it, from bad bookies last. Once an entry is unreadable, no more entries are written, and the
        rest is read to name all unreadable ones (at most UNREADABLE_NAMED_MAX). The metadata changes when every entry
        is at its target, and only while `lock` (if given) is held. Raise UnclosedFragment, NotEnoughBookies, LockLost,
        LedgerNotFound if the ledger is deleted meanwhile, and errors of targets and of the store.
        """
        if not fragment.closed:
            raise UnclosedFragment(
                f"The fragment of ledger {check.ledger} from entry {fragment.first_entry_id} may still grow",
                hint="recover the ledger first",
            )
        chosen, copy = await self._copy(check, fragment, targets, exclude)
        result = FragmentReplication(
            Outcome.UNRECOVERABLE, check.versioned, {}, (), copy.entry_count, copy.size_bytes, tuple(copy.unreadable)
        )
        if result.unreadable:
            # Entries of a deleted ledger, or of moved replicas, are unreadable too.
            found = await asyncio.to_thread(self.bookkeeper.cluster.ledgers.read, check.ledger)
            same = ensemble_at(found.metadata, fragment.first_entry_id) == fragment.ensemble
            return replace(result, outcome=result.outcome if same else Outcome.SUPERSEDED, versioned=found)
        moved = {index: target for index, target in chosen.items() if target != fragment.ensemble[index]}
        repaired = tuple(fragment.ensemble[index] for index in sorted(chosen) if index not in moved)
        if not moved:
            return replace(result, outcome=Outcome.REPAIRED, repaired=repaired)
        # A caller that is cancelled releases the lock: not before the swap is written.
        swap = self._swapper.swap(EnsembleSwap(check.versioned, fragment, moved, lock))
        versioned, replaced = await run_to_end(swap)
        outcome = Outcome.REPLICATED if len(replaced) == len(moved) else Outcome.SUPERSEDED
        return replace(result, outcome=outcome, versioned=versioned, replaced=replaced, repaired=repaired)

    async def _copy(
        self, check: LedgerCheck, fragment: LedgerFragment, targets: Mapping[int, str] | None, exclude: Collection[str]
    ) -> tuple[dict[int, str], FragmentCopy]:
        """Copy the fragment's entries; return the targets and the finished copy. Raise the error of the last target.

        A copy that was cancelled or made ahead continues where it was, if its targets still have what they got.
        """
        access = self.bookkeeper.access(check.ledger, check.versioned)
        failed: set[str] = set()
        key = check.ledger, check.versioned.ctime_ms, fragment.first_entry_id
        former, done_through = self._begun.pop(key, ({}, -1))
        while True:
            if targets is None:
                chosen = await self.targets(fragment, exclude={*exclude, *failed})
            else:
                chosen = dict(targets)
            copy = FragmentCopy(self._tools, access, fragment, chosen, done_through if chosen == former else -1)
            try:
                await copy.run()
            except asyncio.CancelledError:
                if copy.done_through >= 0:
                    self._begun[key] = chosen, copy.done_through
                raise
            except TargetFailed as failure:
                failed.add(failure.bookie_id)
                if targets is not None or len(failed) == _TARGET_ATTEMPTS_MAX:
                    raise failure.error from failure
            else:
                return chosen, copy

    async def copy_ahead(self, ledger: LedgerId, bookies: Collection[str], *, skip_open: bool) -> None:
        """Copy what `bookies` have of the closed fragments, and swap nothing: `replicate` lists the targets again.

        Raise as `replicate`.
        """
        check = await self.checker.on_bookies(ledger, bookies)
        for fragment in check.fragments:
            if fragment.closed and not (skip_open and check.metadata.state is LedgerState.OPEN):
                chosen, copy = await self._copy(check, fragment, None, bookies)
                self._begun[ledger, check.versioned.ctime_ms, fragment.first_entry_id] = chosen, copy.done_through

    async def recover(self, ledger: LedgerId) -> None:
        """Fence the ledger and close it, administratively: its writer can add no more.

        Raise LedgerRecoveryFailed if too few of its last bookies answer, and errors of opening the ledger.
        """
        async with self._recoveries:
            handle = await self.bookkeeper.open_ledger(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None, recovery=True
            )
        await handle.close()

    async def replicate_ledger(
        self,
        ledger: LedgerId,
        found: VersionedMetadata | None = None,
        *,
        bookies: Collection[str] | None = None,
        fence: bool = True,
        lock: Claim | None = None,
    ) -> LedgerReplication:
        """Check a ledger and replicate its bad fragments. With `bookies`, replicate all that it has on these instead.

        With `fence`, an open ledger whose last fragment is bad is fenced and closed first; without, that fragment
        remains. With `bookies`, so does an earlier fragment that is not confirmed to its end, as in Apache's
        recoverLedger: the writer left these bookies. Bookies in `bookies` are never targets. Unreadable
        entries, and fragments that cannot be replicated now, are in the result. Raise LedgerNotFound,
        LedgerRecoveryFailed, and errors of the store.
        """

        async def look(known: VersionedMetadata | None) -> LedgerCheck:
            if bookies is not None:
                return await self.checker.on_bookies(ledger, bookies, known)
            return await self.checker.check(ledger, known)

        check = await look(found)
        is_left = bookies is not None and set(bookies).isdisjoint(check.metadata.last_fragment.bookies)
        if check.needs_recovery and fence and not (is_left and check.metadata.state is LedgerState.OPEN):
            await self.recover(ledger)
            check = await look(None)
        results: list[FragmentReplication] = []
        errors: list[tuple[LedgerFragment, BkctlError]] = []
        left_open = check.needs_recovery
        for fragment in check.fragments:
            if not fragment.closed:
                left_open = True
                continue
            try:
                result = await self.replicate(check, fragment, exclude=bookies or (), lock=lock)
            except LedgerNotFound:
                raise
            except BkctlError as error:
                # Bookies that leave hold nothing of an empty fragment: it may name them on.
                if bookies is None or fragment.held_count or not isinstance(error, NotEnoughBookies):
                    errors.append((fragment, error))
            else:
                results.append(result)
                check = replace(check, versioned=result.versioned)
        return LedgerReplication(check, tuple(results), tuple(errors), left_open)

    async def unreadable(
        self, check: LedgerCheck, fragment: LedgerFragment, entry_ids: Collection[int]
    ) -> list[UnreadableEntries]:
        """Return the entries among `entry_ids` that no replica returns: a quick look before another attempt.

        Source: ReplicationWorker.tryReadingFaultyEntries.
        """
        access = self.bookkeeper.access(check.ledger, check.versioned)
        copy = FragmentCopy(self._tools, access, fragment, {})
        await copy.try_reading(sorted(entry_ids))
        return copy.unreadable


# --- swaps of bookies in the metadata ----------------------------------------------------------------------------

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
        firsts = [each.first_entry_id for each in metadata.ensembles if each.first_entry_id > fragment.first_entry_id]
        if (firsts[0] - 1 if firsts else metadata.last_entry_id) > fragment.last_entry_id:
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


class EnsembleSwapper:
    """Swaps bookies in the metadata of many ledgers in few calls to the store. Source: MetadataUpdateLoop."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Replaces the bookies that are still in the fragment, and none if the fragment has changed. Raises
        #: UnclosedFragment, LockLost, LedgerNotFound, MetadataVersionConflict, and errors of the store.
        self.swap: BatchedCalls[EnsembleSwap, Swapped] = BatchedCalls(self._swap_many)

    def _swap_many(self, swaps: Sequence[EnsembleSwap]) -> list[Swapped | BkctlError]:
        results: list[Swapped | BkctlError | None] = [None] * len(swaps)
        for _ in range(UPDATE_ATTEMPTS_MAX):
            if waiting := {number: swap for number, swap in enumerate(swaps) if results[number] is None}:
                self._try(waiting, results)
        return [
            result
            or MetadataVersionConflict(
                f"Metadata of ledger {swap.ledger} changed {UPDATE_ATTEMPTS_MAX} times while it was being written",
                hint="try again",
            )
            for swap, result in zip(swaps, results, strict=True)
        ]

    def _try(self, swaps: Mapping[int, EnsembleSwap], results: list[Swapped | BkctlError | None]) -> None:
        """Set the results, by number, of swaps whose metadata does not change meanwhile."""
        ledgers, changes = self._cluster.ledgers, {}
        # Read now: copying may have taken hours, and a ledger that was deleted and created again meanwhile may have
        # metadata of the version that was checked.
        present = ledgers.read_many([swap.ledger for swap in swaps.values()])
        for (number, swap), (_, found) in zip(swaps.items(), present, strict=True):
            try:
                if isinstance(found, BkctlError):
                    raise found
                metadata, replaced = swap.applied_to(found)
            except BkctlError as error:
                results[number] = error
                continue
            if replaced:
                changes[number] = found, metadata, replaced
            else:
                results[number] = found, {}
        locks = {number: lock for number in changes if (lock := swaps[number].lock) is not None}
        for number, is_held in zip(locks, self._cluster.store.held_many(list(locks.values())), strict=True):
            if not is_held:
                results[number] = LockLost(swaps[number].ledger)
                del changes[number]
        versions = ledgers.write_many(
            [(swaps[number].ledger, metadata, found.version) for number, (found, metadata, _) in changes.items()]
        )
        for (number, (found, metadata, replaced)), version in zip(changes.items(), versions, strict=True):
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


def ensemble_at(metadata: LedgerMetadata, first_entry_id: int) -> tuple[str, ...] | None:
    """Return the ensemble of the fragment that begins with that entry; None if no fragment does."""
    ensembles = (fragment.bookies for fragment in metadata.ensembles if fragment.first_entry_id == first_entry_id)
    return next(ensembles, None)


# --- targets -----------------------------------------------------------------------------------------------------

#: The largest age of the list of registered bookies; a target that is gone by then fails, and another one is chosen.
REGISTERED_AGE_S: Final = 1.0


async def misplaced_fragments(
    bookkeeper: BookKeeper, check: LedgerCheck
) -> list[tuple[LedgerFragment, dict[int, str]]]:
    """Return the fragments of a closed ledger that the placement policy does not accept, each with targets.

    The faults of a fragment are the bookies that should leave; the targets, by ensemble index, are empty if no usable
    bookies can mend it.
    """
    pool, metadata = bookkeeper.pool, check.metadata
    await pool.weigh()
    registered = await asyncio.to_thread(pool.registered)
    placement = await asyncio.to_thread(
        pool.placement, registered, *(fragment.bookies for fragment in metadata.ensembles)
    )
    found = []
    for fragment in fragments_of(bookkeeper.access(check.ledger, check.versioned), check.last_add_confirmed):
        if not placement.problems(metadata, fragment.ensemble):
            continue
        targets = mend_placement(
            fragment.ensemble, metadata.write_quorum_size, registered, placement,
            scoped=check.ledger.is_scoped, ack_quorum_size=metadata.ack_quorum_size, avoid=pool.suspects(),
            rng=_rng(fragment),
        )  # fmt: skip
        found.append((fragment.given(sorted(targets)), targets))
    return found


def _rng(fragment: LedgerFragment) -> random.Random:
    """Return a random choice that is the same after a crash: the bookie that has part of the entries."""
    return random.Random(f"{fragment.ledger} {fragment.first_entry_id}")


class TargetChooser:
    """Chooses targets among the registered bookies, by the client's placement policy."""

    def __init__(self, bookkeeper: BookKeeper) -> None:
        """Raise as `PlacementRules.of`, before anything is copied."""
        PlacementRules.of(bookkeeper.pool.config)
        self._bookkeeper = bookkeeper
        self._registered: list[RegisteredBookie] = []
        self._registered_s = -REGISTERED_AGE_S
        #: The racks of these bookies, registered or gone.
        self._placement, self._placed = Placement(), frozenset[str]()
        self._read_registered: BatchedCalls[None, list[RegisteredBookie]] = BatchedCalls(
            lambda asking: [bookkeeper.pool.registered()] * len(asking)
        )

    async def targets(self, fragment: LedgerFragment, *, exclude: Collection[str] = ()) -> dict[int, str]:
        """Return the target of each bad bookie of the fragment, by ensemble index.

        As in Apache's, a bookie that lacks entries is replaced even if it is alive. If no bookie can replace it, and it
        reported itself what it lacks, it is its own target and gets the missing entries back. Bookies in `exclude` are
        never targets. Raise NotEnoughBookies.
        """
        repairable = {fault.ensemble_index for fault in fragment.faults if fault.reason in ANSWERED}
        own = {index: fragment.ensemble[index] for index in repairable if fragment.ensemble[index] not in exclude}
        moving = fragment.bookie_indexes
        if time.monotonic() - self._registered_s < REGISTERED_AGE_S:
            with contextlib.suppress(NotEnoughBookies):
                return await self._targets(fragment, own, moving, exclude)
        await self._bookkeeper.pool.weigh()
        self._registered = await self._read_registered(None)
        self._registered_s, self._placed = time.monotonic(), frozenset()
        try:
            return await self._targets(fragment, own, moving, exclude)
        except NotEnoughBookies:
            if not own:
                raise
        return await self._targets(fragment, own, [index for index in moving if index not in own], exclude)

    async def _targets(
        self, fragment: LedgerFragment, own: Mapping[int, str], moving: Collection[int], exclude: Collection[str]
    ) -> dict[int, str]:
        """Return replacements of the bookies at `moving`, and the `own` ones of the others."""
        registered, placement, pool = self._registered, self._placement, self._bookkeeper.pool
        if moving and not self._placed.issuperset(fragment.ensemble):
            placed = self._placed.union(fragment.ensemble)
            placement = await asyncio.to_thread(pool.placement, registered, placed)
            if registered is self._registered:  # Not read again meanwhile.
                self._placement, self._placed = placement, placed
        chosen = choose_replacements(
            fragment.ensemble,
            moving,
            fragment.schedule.write_quorum_size,
            registered,
            placement,
            scoped=fragment.ledger.is_scoped,
            ack_quorum_size=fragment.schedule.ack_quorum_size,
            exclude=exclude,
            avoid=pool.suspects(),
            rng=_rng(fragment),
        )
        return {index: bookie_id for index, bookie_id in own.items() if index not in moving} | chosen
