"""Entries brought back to bookies that lack them, and ledgers' metadata told so.

    choose who takes over → read each entry, by its digest → RECOVERY_ADD there → swap the bookies in the metadata

Until the swap, which is one compare-and-set, the ledger is as it was; what was copied before is found again, and not
copied twice, by who begins anew. Source: LedgerFragmentReplicator, BookKeeperAdmin.replicateLedgerFragment,
BookKeeperAdmin.recoverLedger, ReplicationWorker.

Other than Apache's: a bookie gets the entries that it should hold and no others, byte for byte as the other replicas
have them (Apache seals them again with its own last add confirmed); an entry that no replica gives is named, with what
each said; a bookie that is alive and cannot be replaced gets back what it lost, in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from bkctl.client.bookies import BookieChannel, failure, in_order, in_thread
from bkctl.client.ensemble import UPDATE_ATTEMPTS_MAX
from bkctl.client.ledger import BookKeeper
from bkctl.client.reader import SPECULATIVE_READ_S, WINDOW_BYTES, LedgerAccess, restate
from bkctl.errors import (
    BkctlError,
    Conflict,
    LedgerNotFound,
    MetadataVersionConflict,
    NotEnoughBookies,
    NotFound,
    ProtocolError,
    UnclosedFragment,
)
from bkctl.formats.availability import Availability
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.protocol.messages import AddRequest, BytesLike, ReadRequest, ReadResponse, Response
from bkctl.replication.checker import (
    ANSWERED,
    LedgerCheck,
    LedgerChecker,
    LedgerFragment,
    ReplicaFault,
    reason_of,
)
from bkctl.replication.placement import Topology, choose_replacements
from bkctl.replication.signals import Together

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim

#: Entries on their way at once. Apache's rereplicationEntryBatchSize (10) is for the same.
BATCH_SIZE: Final = 100
#: Fragments whose entries are on their way at once, and about how many bytes those are together.
COPIES_AT_ONCE: Final = 64
WINDOWS_BYTES: Final = 256 << 20
#: From so many entries on, the bookie that takes over is asked which of them it has already.
RESUME_COUNT_MIN: Final = 100
#: So many unreadable entries of a fragment are looked for and named: of one that is lost as a whole, or whose metadata
#: names entries that there never were, the rest would be asked for in vain, without an end.
UNREADABLE_NAMED_MAX: Final = 1_000_000
#: How many bookies are tried in the place of one, when they fail while they take over.
_TARGET_ATTEMPTS_MAX: Final = 3
#: How old the list of registered bookies may be from which targets are chosen; one that has gone is left for another.
REGISTERED_AGE_S: Final = 1.0


class Throttle:
    """Bounds what replication writes, in bytes and entries a second; share one between all that work at once.

    None: no limit. Source: LedgerFragmentReplicator.Throttler (replicationRateByBytes).
    """

    def __init__(self, *, bytes_per_s: float | None = None, entries_per_s: float | None = None) -> None:
        self._byte_s = 1 / bytes_per_s if bytes_per_s is not None and bytes_per_s > 0 else 0.0
        self._entry_s = 1 / entries_per_s if entries_per_s is not None and entries_per_s > 0 else 0.0
        self._free_at = 0.0

    async def acquire(self, size_bytes: int) -> None:
        """Wait until an entry of that size may be written; large ones make the next ones wait."""
        if not self._byte_s and not self._entry_s:
            return
        now = time.monotonic()
        starts_at = max(now, self._free_at)
        self._free_at = starts_at + max(size_bytes * self._byte_s, self._entry_s)
        if starts_at > now:
            await asyncio.sleep(starts_at - now)


class LockLost(Conflict):
    """The lock under which a ledger was replicated is gone: somebody else may have it by now."""


def lock_lost(ledger: LedgerId) -> LockLost:
    """What is raised when the ledger's lock is not held any more."""
    return LockLost(f"The lock of ledger {ledger} is lost", hint="the metadata store ended our session")


class Outcome(Enum):
    """How the replication of one fragment ended."""

    #: Other bookies have the entries, and the metadata says so.
    REPLICATED = "replicated"
    #: The bookies that lacked entries have them again; the metadata is as it was.
    REPAIRED = "repaired"
    #: Somebody else changed the ensemble meanwhile: what still stood there was replaced; another check tells the rest.
    SUPERSEDED = "superseded"
    #: Entries are unreadable: nothing was changed.
    UNRECOVERABLE = "unrecoverable"


class UnreadableEntries(NamedTuple):
    """The `entry_count` entries from `first_entry_id` to `last_entry_id` that the fragment's bad bookies should hold,
    and that no replica gives.

    `problems` is what each bookie said, for the first of them. `lost`: every bookie that should have them is there, and
    lacks them or has them damaged.
    """

    first_entry_id: int
    last_entry_id: int
    entry_count: int
    problems: tuple[tuple[str, BkctlError], ...]
    lost: bool

    def __str__(self) -> str:
        several = self.first_entry_id != self.last_entry_id
        what = f"Entries {self.first_entry_id} to {self.last_entry_id}" if several else f"Entry {self.first_entry_id}"
        said = "; ".join(f"{bookie_id}: {error.message}" for bookie_id, error in self.problems)
        return f"{what} cannot be read from any bookie ({said})"


@dataclass(frozen=True)
class FragmentReplication:
    """What was done for one fragment.

    `versioned` is the ledger's metadata as it stands then, `replaced` maps bookies that left the ensemble to those in
    their place, `repaired` are the bookies that got back what they lacked. `entry_count` and `size_bytes` (with headers
    and digests) were written, `present_count` found where they should come to.
    """

    fragment: LedgerFragment
    outcome: Outcome
    versioned: VersionedMetadata
    replaced: Mapping[str, str]
    repaired: tuple[str, ...] = ()
    entry_count: int = 0
    size_bytes: int = 0
    present_count: int = 0
    unreadable: tuple[UnreadableEntries, ...] = ()


@dataclass(frozen=True)
class LedgerReplication:
    """What was done for one ledger. `errors` are fragments that could not be replicated now, and why.

    `left_open`: bad fragments were left because the ledger is open, and was not to be fenced.
    """

    check: LedgerCheck
    fragments: tuple[FragmentReplication, ...] = ()
    errors: tuple[tuple[LedgerFragment, BkctlError], ...] = ()
    left_open: bool = False

    @property
    def unreadable(self) -> tuple[UnreadableEntries, ...]:
        """The entries that no replica gives, of all fragments."""
        return tuple(each for fragment in self.fragments for each in fragment.unreadable)

    @property
    def done(self) -> bool:
        """Whether nothing of what the check found is left; after others changed the ensemble, one has to look again."""
        finished = (Outcome.REPLICATED, Outcome.REPAIRED)
        return not (self.left_open or self.errors) and all(each.outcome in finished for each in self.fragments)


#: A ledger's metadata as it stands now, and which bookies were replaced in it by which.
Swapped: TypeAlias = "tuple[VersionedMetadata, dict[str, str]]"


class _Swap(NamedTuple):
    """Bookies that are to come into a fragment's ensemble: `moved` has them by ensemble index."""

    check: LedgerCheck
    fragment: LedgerFragment
    moved: Mapping[int, str]
    lock: Claim | None

    def applied_to(self, found: VersionedMetadata) -> tuple[LedgerMetadata, dict[str, str]]:
        """The metadata with them, and whom they replace; nobody where they must not come in any more.

        Raises UnclosedFragment.
        """
        metadata, fragment = found.metadata, self.fragment
        replaced: dict[str, str] = {}
        present = _ensemble_at(metadata, fragment.first_entry_id)
        if present is None or not _is_same_ledger(found, self.check.versioned):
            return metadata, replaced
        if not metadata.is_closed and metadata.last_fragment.first_entry_id == fragment.first_entry_id:
            raise UnclosedFragment(f"Ledger {self.check.ledger} is open, and its last fragment may still grow")
        if _end_of(metadata, fragment.first_entry_id) > fragment.last_entry_id:
            return metadata, replaced  # It has entries by now that were not copied.
        bookies = list(present)
        for index, target in self.moved.items():
            if present[index] == fragment.ensemble[index] and target not in present:
                replaced[present[index]] = bookies[index] = target
        changed = Fragment(fragment.first_entry_id, tuple(bookies))
        ensembles = tuple(
            changed if each.first_entry_id == fragment.first_entry_id else each for each in metadata.ensembles
        )
        return replace(metadata, ensembles=ensembles), replaced


class LedgerFragmentReplicator:
    """Replicates fragments of ledgers, any number at once.

    Of a fragment `batch_size` entries, and about 16 MiB, are on their way at once; of up to 64 fragments about 256 MiB,
    and two entries of each. `throttle` bounds what is written, `topology` tells racks (None: they are not known),
    `progress` is told the entries and bytes written since it was told last.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        *,
        checker: LedgerChecker | None = None,
        batch_size: int = BATCH_SIZE,
        throttle: Throttle | None = None,
        topology: Topology | None = None,
        progress: Callable[[int, int], None] = lambda entries, size: None,
    ) -> None:
        self.bookkeeper = bookkeeper
        self.checker = checker or LedgerChecker(bookkeeper)
        self.batch_size = max(batch_size, 1)
        self.throttle = throttle or Throttle()
        self.progress = progress
        #: Fragments whose entries are on their way now.
        self.copying_count = 0
        self._permits = asyncio.Semaphore(COPIES_AT_ONCE)
        self._topology = topology
        self._registered: list[RegisteredBookie] = []
        self._registered_s = -REGISTERED_AGE_S
        self._swap: Together[_Swap, Swapped] = Together(self._swap_many)
        self._ask_registered: Together[None, list[RegisteredBookie]] = Together(
            lambda asking: [bookkeeper.pool.registered()] * len(asking)
        )

    @contextlib.asynccontextmanager
    async def copying(self) -> AsyncIterator[None]:
        """For the time in which entries of a fragment are on their way; waits while too many others' are."""
        async with self._permits:
            self.copying_count += 1
            try:
                yield
            finally:
                self.copying_count -= 1

    async def targets(
        self,
        check: LedgerCheck,
        fragment: LedgerFragment,
        *,
        exclude: Collection[str] = (),
        in_place: bool | None = None,
    ) -> dict[int, str]:
        """Ensemble index → the bookie that is to hold the entries, for each bad bookie of the fragment.

        As Apache's, a bookie that lacks entries is replaced even when it is alive. Where none is left to replace it,
        and it said itself what it lacks, it is to get that back: then it is its own target. With `in_place` True that
        is so from the start, with False never. `exclude` get nothing. Raises NotEnoughBookies.
        """
        repairable = {fault.ensemble_index for fault in fragment.faults if fault.reason in ANSWERED}
        own = {index: fragment.ensemble[index] for index in repairable if fragment.ensemble[index] not in exclude}
        others = [index for index in fragment.bookie_indexes if not (in_place and index in own)]
        if time.monotonic() - self._registered_s < REGISTERED_AGE_S:
            with contextlib.suppress(NotEnoughBookies):
                return self._kept(own, others) | await self._chosen(check, fragment, others, self._registered, exclude)
        registered = await self._ask_registered(None)
        self._registered, self._registered_s = registered, time.monotonic()
        try:
            return self._kept(own, others) | await self._chosen(check, fragment, others, registered, exclude)
        except NotEnoughBookies:
            if in_place is False or not any(index in own for index in others):
                raise
        others = [index for index in others if index not in own]
        return self._kept(own, others) | await self._chosen(check, fragment, others, registered, exclude)

    def _kept(self, own: Mapping[int, str], others: Collection[int]) -> dict[int, str]:
        return {index: bookie_id for index, bookie_id in own.items() if index not in others}

    async def _chosen(
        self,
        check: LedgerCheck,
        fragment: LedgerFragment,
        indexes: Collection[int],
        registered: list[RegisteredBookie],
        exclude: Collection[str],
    ) -> dict[int, str]:
        racks: Mapping[str, str] = {}
        if self._topology is not None and indexes:
            racks = await in_thread(self._racks, self._topology, fragment, registered)
        return choose_replacements(
            check.ledger,
            fragment.first_entry_id,
            fragment.ensemble,
            indexes,
            registered,
            exclude=exclude,
            avoid=self.bookkeeper.pool.suspects(),
            racks=racks,
        )

    def _racks(
        self, topology: Topology, fragment: LedgerFragment, registered: list[RegisteredBookie]
    ) -> Mapping[str, str]:
        up = {each.bookie_id for each in registered}
        gone = [self.bookkeeper.cluster.bookies.get(each) for each in fragment.ensemble if each not in up]
        return topology.racks([*registered, *(each for each in gone if each is not None)])

    async def replicate(
        self,
        check: LedgerCheck,
        fragment: LedgerFragment,
        *,
        targets: Mapping[int, str] | None = None,
        exclude: Collection[str] = (),
        in_place: bool | None = None,
        lock: Claim | None = None,
    ) -> FragmentReplication:
        """Bring what the fragment's bad bookies should hold to `targets` (None: those that `targets()` gives).

        A target that fails is left for another one, if it was not given. Each entry is read from any bookie that should
        have it, those to be replaced included, as the last ones. As soon as one is unreadable nothing more is written,
        and the rest is read to name all that are (up to UNREADABLE_NAMED_MAX). The ledger's metadata changes when every
        entry is where it should be, and `lock`, if there is one, is held then. Raises UnclosedFragment,
        NotEnoughBookies, LockLost, LedgerNotFound when the ledger is deleted meanwhile, and what a target's failure or
        the store raises.
        """
        if not fragment.closed:
            raise UnclosedFragment(
                f"The fragment of ledger {check.ledger} from entry {fragment.first_entry_id} may still grow",
                hint="recover the ledger first",
            )
        access = self.bookkeeper.access(check.ledger, check.versioned)
        failed: set[str] = set()
        for attempts_left in reversed(range(_TARGET_ATTEMPTS_MAX)):
            if targets is None:
                chosen = await self.targets(check, fragment, exclude={*exclude, *failed}, in_place=in_place)
            else:
                chosen = dict(targets)
            copying = _Copying(self, access, fragment, chosen)
            try:
                await copying.run()
                break
            except _TargetFailed as failure_:
                if targets is not None or not attempts_left:
                    raise failure_.error from failure_
                failed.add(failure_.bookie_id)
        done = FragmentReplication(
            fragment,
            Outcome.UNRECOVERABLE,
            check.versioned,
            {},
            (),
            copying.entry_count,
            copying.size_bytes,
            copying.present_count,
            tuple(copying.unreadable),
        )
        if done.unreadable:
            # A ledger that was deleted, or replicas that somebody moved, look the same from here.
            found = await in_thread(self.bookkeeper.cluster.ledgers.read, check.ledger)
            same = _ensemble_at(found.metadata, fragment.first_entry_id) == fragment.ensemble
            return replace(done, outcome=done.outcome if same else Outcome.SUPERSEDED, versioned=found)
        moved = {index: target for index, target in chosen.items() if target != fragment.ensemble[index]}
        repaired = tuple(fragment.ensemble[index] for index in sorted(chosen) if index not in moved)
        if not moved:
            return replace(done, outcome=Outcome.REPAIRED, repaired=repaired)
        versioned, replaced = await self._swap(_Swap(check, fragment, moved, lock))
        outcome = Outcome.REPLICATED if len(replaced) == len(moved) else Outcome.SUPERSEDED
        return replace(done, outcome=outcome, versioned=versioned, replaced=replaced, repaired=repaired)

    def _swap_many(self, swaps: Sequence[_Swap]) -> list[Swapped | BkctlError]:
        """Put new bookies into the metadata of ledgers, in the place of those that still stand there.

        Each for itself, with what was replaced: nothing where the fragment is another one by now. Source:
        MetadataUpdateLoop.
        """
        results: dict[int, Swapped | BkctlError] = {}
        ledgers = self.bookkeeper.cluster.ledgers
        for _ in range(UPDATE_ATTEMPTS_MAX):
            waiting = [at for at in range(len(swaps)) if at not in results]
            if not waiting:
                break
            changes: list[tuple[int, VersionedMetadata, LedgerMetadata, dict[str, str]]] = []
            # Read now: copying may have taken hours, and the metadata of a ledger that was deleted and created again
            # since may have come to the version that was checked.
            present = ledgers.read_many([swaps[at].check.ledger for at in waiting])
            for at, (_, found) in zip(waiting, present, strict=True):
                if isinstance(found, BkctlError):
                    results[at] = found
                    continue
                try:
                    metadata, replaced = swaps[at].applied_to(found)
                except UnclosedFragment as error:
                    results[at] = error
                    continue
                if replaced:
                    changes.append((at, found, metadata, replaced))
                else:
                    results[at] = found, {}
            lost = self._lost([swaps[at] for at, *_ in changes])
            results.update((at, lost[swaps[at].check.ledger]) for at, *_ in changes if swaps[at].check.ledger in lost)
            changes = [each for each in changes if each[0] not in results]
            versions = ledgers.write_many(
                [(swaps[at].check.ledger, metadata, found.version) for at, found, metadata, _ in changes]
            )
            for (at, found, metadata, replaced), version in zip(changes, versions, strict=True):
                if isinstance(version, MetadataVersionConflict):
                    continue
                if isinstance(version, BkctlError):
                    results[at] = version
                    continue
                # The store writes 0 for the token of the creation, as Java's client does.
                token = None if metadata.c_token is None else 0
                results[at] = found._replace(metadata=replace(metadata, c_token=token), version=version), replaced
        return [results[at] if at in results else _always_changing(swaps[at].check.ledger) for at in range(len(swaps))]

    def _lost(self, swaps: Sequence[_Swap]) -> dict[LedgerId, LockLost]:
        """Those of the ledgers whose locks are not held any more."""
        locks = {each.check.ledger: each.lock for each in swaps if each.lock is not None}
        held = self.bookkeeper.cluster.store.held_many(list(locks.values()))
        return {ledger: lock_lost(ledger) for ledger, is_held in zip(locks, held, strict=True) if not is_held}

    async def recover(self, ledger: LedgerId) -> None:
        """Fence the ledger and close it, administratively: its writer can add no more.

        Raises LedgerRecoveryFailed when too few of its last bookies answer, and what opening raises.
        """
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
        percentage: int = 0,
        every_entry: bool = False,
        exclude: Collection[str] = (),
        in_place: bool | None = None,
        lock: Claim | None = None,
    ) -> LedgerReplication:
        """Check a ledger and replicate what is bad; or, for `bookies`, whatever it has on them.

        An open ledger whose last fragment is bad is fenced and closed first, with `fence`; without, that fragment is
        left. `bookies` and `exclude` take nothing over. Entries that no replica gives, and fragments that cannot be
        replicated now, are in the result. Raises LedgerNotFound, LedgerRecoveryFailed, and what the store raises.
        """

        async def look(known: VersionedMetadata | None) -> LedgerCheck:
            if bookies is not None:
                return await self.checker.on_bookies(ledger, bookies, known)
            return await self.checker.check(ledger, known, percentage=percentage, every_entry=every_entry)

        check = await look(found)
        if check.needs_recovery and fence:
            await self.recover(ledger)
            check = await look(None)
        results: list[FragmentReplication] = []
        errors: list[tuple[LedgerFragment, BkctlError]] = []
        left_open = check.needs_recovery
        latest = check
        for fragment in check.fragments:
            if not fragment.closed:
                left_open = True
                continue
            try:
                result = await self.replicate(
                    latest,
                    fragment,
                    exclude={*exclude, *(bookies or ())},
                    in_place=in_place,
                    lock=lock,
                )
            except LedgerNotFound:
                raise
            except BkctlError as error:
                errors.append((fragment, error))
            else:
                results.append(result)
                latest = replace(latest, versioned=result.versioned)
        return LedgerReplication(replace(check, versioned=latest.versioned), tuple(results), tuple(errors), left_open)

    async def unreadable(
        self, check: LedgerCheck, fragment: LedgerFragment, entry_ids: Collection[int] | None = None
    ) -> list[UnreadableEntries]:
        """Which of those entries of the fragment no replica gives: a quick look before it is tried again.

        None: of all that its bad bookies should hold, which takes as long as copying them.
        Source: ReplicationWorker.tryReadingFaultyEntries.
        """
        access = self.bookkeeper.access(check.ledger, check.versioned)
        targets = {index: fragment.ensemble[index] for index in fragment.bookie_indexes}
        copying = _Copying(self, access, fragment, targets)
        await copying.try_reading(None if entry_ids is None else sorted(entry_ids))
        return copying.unreadable


class _TargetFailed(Exception):
    """A bookie did not take an entry."""

    def __init__(self, bookie_id: str, error: BkctlError) -> None:
        super().__init__(error.message)
        self.bookie_id = bookie_id
        self.error = error


class _Copying:
    """Entries of one fragment on their way to the bookies at `targets` (ensemble index → bookie)."""

    def __init__(
        self,
        replicator: LedgerFragmentReplicator,
        access: LedgerAccess,
        fragment: LedgerFragment,
        targets: Mapping[int, str],
    ) -> None:
        self._replicator = replicator
        self._access = access
        self._fragment = fragment
        self._targets = targets
        #: Each bookie of the fragment, and whether it is a bad one.
        self._bookies = [
            (index in fragment.bookie_indexes, access.pool.channel(bookie_id))
            for index, bookie_id in enumerate(fragment.ensemble)
        ]
        self._present: dict[str, Availability] = {}
        self._size_bytes_largest = 0
        self.entry_count = self.size_bytes = self.present_count = 0
        self.unreadable: list[UnreadableEntries] = []

    async def run(self) -> None:
        """Copy all. Raises _TargetFailed; entries that no replica gives are in `unreadable`."""
        for index, target in self._targets.items():
            if target == self._fragment.ensemble[index] or self._fragment.entry_count(index) >= RESUME_COUNT_MIN:
                self._present[target] = await self._listed(target)
        await self._each(self._wanted())

    async def try_reading(self, entry_ids: list[int] | None) -> None:
        """Read entries (None: all), and write nothing; those that no replica gives are in `unreadable`."""
        wanted = (entry_id for entry_id, _ in self._wanted()) if entry_ids is None else iter(entry_ids)
        await self._each((entry_id, []) for entry_id in wanted)

    def _wanted(self) -> Iterator[tuple[int, list[int]]]:
        """Each entry, ascending, with the ensemble indexes that should get it."""
        merged = heapq.merge(*(self._wanted_of(index) for index in self._targets))
        return ((entry_id, [index for _, index in some]) for entry_id, some in groupby(merged, key=itemgetter(0)))

    async def _each(self, wanted: Iterator[tuple[int, list[int]]]) -> None:
        unreadable_count = 0
        copies = in_order(wanted, lambda each: self._copy(*each), self._at_once)
        async with self._replicator.copying(), contextlib.aclosing(copies):
            async for (entry_id, _), problems in copies:
                if problems:
                    self._note_unreadable(entry_id, problems)
                    unreadable_count += 1
                    if unreadable_count >= UNREADABLE_NAMED_MAX:
                        return

    def _at_once(self) -> int:
        """How many entries may be on their way, by how large they are."""
        window_bytes = min(WINDOW_BYTES, WINDOWS_BYTES // self._replicator.copying_count)
        size_bytes = self._size_bytes_largest or WINDOW_BYTES // 16
        return min(max(window_bytes // size_bytes, 2), self._replicator.batch_size)

    def _wanted_of(self, index: int) -> Iterator[tuple[int, int]]:
        """The entries for one target, ascending, each with `index`."""
        fragment = self._fragment
        fault = next((each for each in fragment.faults if each.ensemble_index == index), None)
        if fault is None or fault.missing is None or self._targets[index] != fragment.ensemble[index]:
            return ((entry_id, index) for entry_id in fragment.entries_of(index))
        return ((entry_id, index) for entry_id in _missing(fragment, fault))

    async def _listed(self, target: str) -> Availability:
        """What the target has already; each entry is read there before it counts."""
        try:
            return await self._replicator.checker.listed(self._access, target)
        except BkctlError:  # an old bookie cannot say: all is copied
            return Availability(())

    async def _copy(self, entry_id: int, indexes: list[int]) -> list[tuple[str, BkctlError]]:
        """Bring one entry to the targets at `indexes`; returns what each bookie said when none gives it."""
        access = self._access
        body: BytesLike | None = None
        lacking = []
        for index in indexes:
            target = self._targets[index]
            if target in self._present and entry_id in self._present[target]:
                found, _ = await self._read(entry_id, [access.pool.channel(target)])
                if found is not None:
                    body = found
                    self.present_count += 1
                    continue
            lacking.append(target)
        if indexes and not lacking:
            return []
        if body is None:
            body, problems = await self._read(entry_id, self._sources(entry_id))
            if body is None:
                return problems
        size = len(body)
        self._size_bytes_largest = max(self._size_bytes_largest * 15 // 16, size)
        await self._replicator.throttle.acquire(size * max(len(lacking), 1))
        if lacking and not self.unreadable:
            await self._write(entry_id, body, lacking)
        return []

    def _sources(self, entry_id: int) -> list[BookieChannel]:
        """The bookies that should have the entry, those that are all right first."""
        now = time.monotonic()
        bookies = [self._bookies[index] for index in self._access.schedule.write_set(entry_id)]
        bookies.sort(key=lambda each: (each[0], each[1].suspect_until > now))
        return [channel for _, channel in bookies]

    async def _read(
        self, entry_id: int, channels: list[BookieChannel]
    ) -> tuple[BytesLike | None, list[tuple[str, BkctlError]]]:
        """The entry as the first of `channels` gives it intact; or what each said.

        One that is silent for a while is not waited for alone.
        """
        access = self._access
        untried = deque(channels)
        pending: dict[asyncio.Future[Response], BookieChannel] = {}
        problems: list[tuple[str, BkctlError]] = []
        ask = True
        while untried or pending:
            if untried and (ask or not pending):
                channel = untried.popleft()
                pending[channel.send(ReadRequest(access.ledger, entry_id), access.scoped)] = channel
            done, _ = await asyncio.wait(
                pending, timeout=SPECULATIVE_READ_S if untried else None, return_when=asyncio.FIRST_COMPLETED
            )
            ask = not done
            if not done:
                for channel in pending.values():
                    channel.failed()
            for future in done:
                channel = pending.pop(future)
                try:
                    return self._body(future, entry_id, channel.bookie_id), []
                except BkctlError as error:
                    if not isinstance(error, NotFound):
                        channel.failed()
                    problems.append((channel.bookie_id, error))
        return None, problems

    def _body(self, future: asyncio.Future[Response], entry_id: int, bookie_id: str) -> BytesLike:
        error = failure(future, self._access.ledger, entry_id, bookie_id)
        if error is not None:
            raise error
        response = future.result()
        if not isinstance(response, ReadResponse) or response.body is None:
            raise ProtocolError(f"Bookie {bookie_id} answered a read with something else")
        self._access.digest.open(response.body, entry_id)
        return response.body

    async def _write(self, entry_id: int, body: BytesLike, targets: list[str]) -> None:
        access = self._access
        request = AddRequest(access.ledger, entry_id, access.digest.master_key, body, True, True)
        sent = {access.pool.channel(target).send(request, access.scoped): target for target in targets}
        await asyncio.wait(sent)
        for future, target in sent.items():
            error = failure(future, access.ledger, entry_id, target)
            if error is not None:
                access.pool.channel(target).failed()
                message = f"Bookie {target} does not take entry {entry_id} of ledger {access.ledger}: {error.message}"
                raise _TargetFailed(target, restate(error, message))
            self.entry_count += 1
            self.size_bytes += len(body)
            self._replicator.progress(1, len(body))

    def _note_unreadable(self, entry_id: int, problems: list[tuple[str, BkctlError]]) -> None:
        lost = all(reason_of(error) in ANSWERED for _, error in problems)
        last = self.unreadable[-1] if self.unreadable else None
        adjoins = last and self._fragment.next_of(last.last_entry_id, self._fragment.bookie_indexes) == entry_id
        if last and adjoins and last.lost == lost:
            self.unreadable[-1] = last._replace(last_entry_id=entry_id, entry_count=last.entry_count + 1)
        else:
            self.unreadable.append(UnreadableEntries(entry_id, entry_id, 1, tuple(problems), lost))


def _missing(fragment: LedgerFragment, fault: ReplicaFault) -> Iterator[int]:
    for span in fault.missing or ():
        for entry_id in range(span.first_entry_id, span.last_entry_id + 1):
            if fragment.has(entry_id, fault.ensemble_index):
                yield entry_id


def _is_same_ledger(found: VersionedMetadata, before: VersionedMetadata) -> bool:
    """Whether both are of one ledger, and not of one that was deleted and another that was created under its id."""
    now, then = found.metadata, before.metadata
    return (
        (None in (found.ctime_ms, before.ctime_ms) or found.ctime_ms == before.ctime_ms)
        and now.password == then.password
        and now.digest_type is then.digest_type
        and now.ensemble_size == then.ensemble_size
        and now.write_quorum_size == then.write_quorum_size
    )


def _always_changing(ledger: LedgerId) -> MetadataVersionConflict:
    return MetadataVersionConflict(
        f"Metadata of ledger {ledger} changed {UPDATE_ATTEMPTS_MAX} times while it was being written", hint="try again"
    )


def _end_of(metadata: LedgerMetadata, first_entry_id: int) -> int:
    """The last entry of the fragment that begins with that entry, in a ledger that is closed or goes on after it."""
    following = (each.first_entry_id for each in metadata.ensembles if each.first_entry_id > first_entry_id)
    return next(following, metadata.last_entry_id + 1) - 1


def _ensemble_at(metadata: LedgerMetadata, first_entry_id: int) -> tuple[str, ...] | None:
    """The ensemble of the fragment that begins with that entry; None when there is none by now."""
    return next((each.bookies for each in metadata.ensembles if each.first_entry_id == first_entry_id), None)
