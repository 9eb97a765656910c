"""Copies the entries of ledgers to bookies that lack them, and swaps the bookies in the metadata.

    choose targets → read each entry, by its digest → RECOVERY_ADD there → swap the bookies in the metadata

Until the swap, which is one compare-and-set, the ledger is unchanged. A second attempt finds the entries that the first
one copied. Source: LedgerFragmentReplicator, BookKeeperAdmin.replicateLedgerFragment, BookKeeperAdmin.recoverLedger,
ReplicationWorker.

Differences from Apache's: a bookie gets exactly the entries that it should hold, byte for byte as the other replicas
have them (Apache seals them again with its own last add confirmed). An entry that no replica returns is named, with the
error of each bookie. A bookie that is alive and cannot be replaced gets back the entries that it lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from bkctl.client.ledger import BookKeeper
from bkctl.errors import BkctlError, LedgerNotFound, UnclosedFragment
from bkctl.formats.metadata import LedgerState
from bkctl.pace import Pace
from bkctl.replication.checker import LedgerCheck, LedgerChecker
from bkctl.replication.ensemble_swap import EnsembleSwap, EnsembleSwapper, ensemble_at
from bkctl.replication.fragment_copy import (
    BATCH_SIZE,
    CopyTools,
    CopyWindow,
    FragmentCopy,
    TargetFailed,
    UnreadableEntries,
)
from bkctl.replication.fragments import LedgerFragment
from bkctl.replication.targets import TargetChooser
from bkctl.tasks import run_to_end

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim

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

    `batch_size` bounds the entries of a fragment that are on their way at once (see CopyWindow), `pace` the writes.
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
        self._tools = CopyTools(self.checker.replicas, CopyWindow(batch_size), pace or Pace(), progress, was_read)
        #: Returns the target of each bad bookie of a fragment.
        self.targets = TargetChooser(bookkeeper).targets
        self._swapper = EnsembleSwapper(bookkeeper.cluster)
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)
        #: Copies without a swap, by ledger and first entry: their targets, and the last entry of all before it.
        self._begun: dict[tuple[LedgerId, int], tuple[dict[int, str], int]] = {}

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
        self,
        check: LedgerCheck,
        fragment: LedgerFragment,
        targets: Mapping[int, str] | None,
        exclude: Collection[str],
    ) -> tuple[dict[int, str], FragmentCopy]:
        """Copy the fragment's entries; return the targets and the finished copy. Raise the error of the last target.

        A copy that was cancelled or made ahead continues where it was, if its targets still have what they got.
        """
        access = self.bookkeeper.access(check.ledger, check.versioned)
        failed: set[str] = set()
        key = (check.ledger, fragment.first_entry_id)
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
                self._begun[ledger, fragment.first_entry_id] = chosen, copy.done_through

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
