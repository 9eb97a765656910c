"""Deletion of ledgers from a bookie that no longer exist in the metadata store, or only on other bookies.

Source: ScanAndCompareGarbageCollector with verifyMetadataOnGC; BP-35 for scopes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bkctl.bookie.collector_metadata import CollectorMetadata, UnindexedLedgers, shown
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, Unsupported
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.underreplication import LedgerLocks
from bkctl.model import LedgerLiveness
from bkctl.storage.entry_log_metadata import SortedLedgers
from bkctl.storage.ledger.ledger_storage import LedgerStorage

log: Final = logging.getLogger("bkctl.bookie")


@dataclass(eq=False)
class ScanAndCompareGarbageCollector:
    """Deletes the ledgers of this bookie that the metadata store says do not exist, and never by guess.

    `_delete_from_storage` deletes ledgers from the bookie's storage and returns how many were there. For one thread.
    """

    _metadata: CollectorMetadata
    _storage: LedgerStorage[Any]
    _unindexed: UnindexedLedgers
    _delete_from_storage: Callable[[Sequence[LedgerId]], int]
    _clock_ms: Callable[[], int]

    def __post_init__(self) -> None:
        self._last_overreplicated_ms = self._clock_ms()
        self._locks = LedgerLocks(self._metadata.cluster.store)

    def collect(self, *, accept_scoped_deletes: bool = False) -> None:
        """Delete over-replicated ledgers where that is due, then the ledgers that no longer exist.

        The bookie's ledgers are listed before the metadata, and the metadata of a candidate is read again right before
        its deletion: a ledger that is created meanwhile is never deleted. Scoped ledgers are deleted after the whole
        listing succeeded, and not where so many would go that the metadata may be at fault, unless
        `accept_scoped_deletes`. Raises BkctlError, which ends the round.
        """
        metadata, stats = self._metadata, self._metadata.stats
        stats.scoped_held_back = "the round did not come so far"
        local = SortedLedgers(self._storage.ledger_ids())
        stats.active_ledgers = len(local)
        metadata.check_cluster()
        wait_ms = metadata.config.gc_overreplicated_ledger_wait_time
        if 0 < wait_ms < self._clock_ms() - self._last_overreplicated_ms:
            removed = self._collect_overreplicated(local)
            local = SortedLedgers(ledger for ledger in local if ledger not in removed)
            self._last_overreplicated_ms = self._clock_ms()
        scoped_count = len(local) - bisect_left(local, LedgerId(1, 0))
        scoped_listed = False
        scoped: list[LedgerId] = []
        for listed in metadata.cluster.ledgers.ranges(None):
            metadata.check_running()
            candidates = _missing(local, listed.first, listed.last, listed.ledgers)
            plain = [ledger for ledger in candidates if not ledger.is_scoped]
            scoped += candidates[len(plain) :]
            scoped_listed = listed.last.is_scoped
            self._collect(plain)
        stats.scoped_held_back = self._reason_to_hold_back(scoped, scoped_count, scoped_listed, accept_scoped_deletes)
        if not stats.scoped_held_back and scoped_listed:
            self._collect(scoped)
        elif scoped or stats.scoped_held_back:
            log.warning("No scoped ledger is collected: %s", stats.scoped_held_back)
        stats.active_ledgers = len(local)

    def _reason_to_hold_back(self, candidates: list[LedgerId], count: int, listed: bool, accepted: bool) -> str:
        """Return why none of `count` scoped ledgers may be deleted although metadata lacks `candidates`; "" if fine."""
        metadata, config = self._metadata, self._metadata.config
        if not listed:
            return f"{metadata.cluster.store.name} has no scopes tree of this cluster" if count else ""
        if metadata.cluster.instance_id() != metadata.instance_id:
            return "the bookie's cookie does not name this cluster"
        if accepted or len(candidates) < config.gc_scoped_delete_count_min:
            return ""
        if len(candidates) <= config.gc_scoped_delete_ratio_max * count:
            return ""
        reason = f"{len(candidates)} of {count} scoped ledgers would be deleted"
        log.error(
            "Garbage collection deletes no scoped ledger: %s. If all those were deleted on purpose, let one round "
            "pass with 'bkctl bookie gc --accept-scoped-deletes'",
            reason,
        )
        return reason

    def _collect(self, candidates: list[LedgerId]) -> None:
        """Delete the candidates that still do not exist when each is looked up."""
        for batch in self._metadata.batches(candidates):
            states = self._metadata.states(batch, "Garbage collection keeps ledgers")
            dead = [ledger for ledger in batch if states[ledger] is LedgerLiveness.DEAD]
            if dead:
                self._metadata.check_cluster()
                self._delete(dead)

    def _delete(self, ledgers: Sequence[LedgerId]) -> int:
        stats = self._metadata.stats
        count = self._delete_from_storage(ledgers)
        self._unindexed.add_deleted(ledgers)
        stats.deleted_ledgers += count
        stats.deleted_scoped_ledgers += sum(ledger.is_scoped for ledger in ledgers)
        log.info("Deleted %d ledgers whose metadata is gone or names other bookies: %s", count, shown(ledgers))
        return count

    def _collect_overreplicated(self, local: Sequence[LedgerId]) -> set[LedgerId]:
        """Delete the closed ledgers whose metadata names other bookies only; return them.

        Source: removeOverReplicatedledgers.
        """
        # Locks that an outage kept the last round from releasing.
        self._locks.unlock_all()
        removed: set[LedgerId] = set()
        for batch in self._metadata.batches(local):
            for ledger, found in list(self._metadata.cluster.ledgers.read_many(batch)):
                if not isinstance(found, BkctlError) and self._is_elsewhere(found.metadata):
                    removed.update(self._delete_overreplicated(ledger))
        return removed

    def _delete_overreplicated(self, ledger: LedgerId) -> list[LedgerId]:
        """Delete a ledger under its under-replication lock, so that no worker replicates it to this bookie meanwhile.

        Return it, or nothing where another has the lock or the metadata changed.
        """
        if self._locks.get(ledger) is not None:
            return []
        try:
            self._locks.lock(ledger, self._metadata.bookie_id)
        except Conflict:
            return []
        try:
            if self._is_elsewhere(self._metadata.cluster.ledgers.read(ledger).metadata):
                self._metadata.check_cluster()
                self._metadata.stats.deleted_overreplicated_ledgers += self._delete([ledger])
                return [ledger]
        except (LedgerNotFound, Corrupt, Unsupported) as error:
            log.warning("Ledger %s is not collected as over-replicated: %s", ledger, error)
        finally:
            self._locks.unlock(ledger)
        return []

    def _is_elsewhere(self, metadata: LedgerMetadata) -> bool:
        """Return whether the ledger is closed, so that its ensembles are final, and this bookie is in none."""
        return metadata.state is LedgerState.CLOSED and not self._metadata.names_bookie(metadata)


def _missing(local: SortedLedgers, first: LedgerId, last: LedgerId, present: Iterable[LedgerId]) -> list[LedgerId]:
    """Return the ledgers of `local` from `first` to `last` that are not `present`."""
    found = set(present)
    between = local[bisect_left(local, first) : bisect_right(local, last)]
    return [ledger for ledger in between if ledger not in found]
