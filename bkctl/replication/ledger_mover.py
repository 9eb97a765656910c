"""Moves one ledger from leaving bookies to others, under its auto-recovery lock."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from bkctl.errors import (
    BkctlError,
    BookieUnavailable,
    Conflict,
    Corrupt,
    LedgerLengthUnknown,
    LedgerNotFound,
    LedgerRecoveryFailed,
    MetadataVersionConflict,
    NotFound,
    TimedOut,
    Unreachable,
)
from bkctl.formats.metadata import LedgerState
from bkctl.metadata.underreplication import AutoRecoveryState
from bkctl.replication.fragments import EntrySpan, spans_text
from bkctl.replication.move_plan import LedgerMove, MoveOutcome
from bkctl.replication.replicator import LedgerFragmentReplicator, LedgerReplication, Outcome
from bkctl.replication.signals import BatchedCalls
from bkctl.tasks import run_to_end

if TYPE_CHECKING:
    from bkctl.ids import LedgerId
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim

#: Attempts to move a ledger whose ensembles other clients change meanwhile.
_ATTEMPT_COUNT_MAX: Final = 3


@dataclass(eq=False)
class LedgerMover:
    """Moves single ledgers off the bookies `leaving`; the options are BookieMover's."""

    cluster: Cluster
    replicator: LedgerFragmentReplicator
    leaving: frozenset[str]
    marked: Collection[LedgerId]
    skip_open: bool
    fence: bool

    def __post_init__(self) -> None:
        self._state = AutoRecoveryState(self.cluster.store)
        owner = f"{os.uname().nodename}:{os.getpid()}"
        self._lock: BatchedCalls[LedgerId, Claim] = BatchedCalls(lambda ids: self._state.locks.lock_many(ids, owner))
        self._unlock: BatchedCalls[LedgerId, None] = BatchedCalls(self._unlock_many)

    async def move(
        self, ledger: LedgerId, found: VersionedMetadata | None, *, copies_ahead: bool, is_last: bool
    ) -> LedgerMove | None:
        """Move the ledger under its lock. Return None if another worker has it locked.

        With `copies_ahead`, entries of a locked ledger are copied then, so that the move under the lock has little left
        to do: it lists the targets again, since only the lock keeps bookies from collecting the copies. With `is_last`,
        a locked ledger has failed. `found` is its metadata (None: read now). Raise errors of the store.
        """
        is_locked_by_another = False
        try:
            try:
                lock = await run_to_end(self._lock(ledger))
            except Conflict as error:
                is_locked_by_another = True
                if is_last:
                    problem = f"{error.message}, for too long; 'bkctl autorecovery status' shows the locks"
                    return LedgerMove(ledger, MoveOutcome.FAILED, problem=problem)
                if copies_ahead:
                    with contextlib.suppress(BkctlError):  # The move under the lock meets it again.
                        await self.replicator.copy_ahead(ledger, self.leaving, skip_open=self.skip_open)
                return None
            return await self._move(ledger, found, lock)
        finally:
            if not is_locked_by_another:
                await run_to_end(self._unlock(ledger))

    async def _move(self, ledger: LedgerId, found: VersionedMetadata | None, lock: Claim) -> LedgerMove:
        state = None
        try:
            for _ in range(_ATTEMPT_COUNT_MAX):
                if found is None:
                    found = await asyncio.to_thread(self.cluster.ledgers.read, ledger)
                state = state or found.metadata.state
                if self.skip_open and found.metadata.state is LedgerState.OPEN:
                    return LedgerMove(ledger, MoveOutcome.OPEN, state, problem="It is open")
                replication = await self.replicator.replicate_ledger(
                    ledger, found, bookies=self.leaving, fence=self.fence, lock=lock
                )
                found = None
                if not any(fragment.outcome is Outcome.SUPERSEDED for fragment in replication.fragments):
                    break
        except LedgerNotFound:
            return LedgerMove(ledger, MoveOutcome.GONE)
        except LedgerLengthUnknown as error:
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=str(error))
        except (LedgerRecoveryFailed, BookieUnavailable) as error:
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        except TimedOut as error:
            await asyncio.to_thread(self.cluster.instance_id)  # Raises if the silent server is the store.
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        except Unreachable:
            raise
        except BkctlError as error:
            return LedgerMove(ledger, MoveOutcome.FAILED, state, problem=error.message)
        moved = _result_of(ledger, state, replication)
        if moved.outcome is MoveOutcome.MOVED and ledger in self.marked:
            await asyncio.to_thread(self._unmark, ledger)
        return moved

    def _unlock_many(self, ledgers: list[LedgerId]) -> list[None]:
        self._state.locks.unlock_many(ledgers)
        return [None] * len(ledgers)

    def _unmark(self, ledger: LedgerId) -> None:
        """Delete the ledger's mark if it names leaving bookies only; otherwise a worker replicates the other ones."""
        with contextlib.suppress(NotFound, MetadataVersionConflict, Corrupt):
            mark = self._state.marks.get(ledger)
            if mark is not None and self.leaving.issuperset(mark.missing_replicas):
                self._state.marks.remove(ledger, mark.version)


def _result_of(ledger: LedgerId, before: LedgerState | None, replication: LedgerReplication) -> LedgerMove:
    """Return the result for a ledger that was in the state `before`, and was replicated as `replication` says."""
    check = replication.check
    counts = (
        check.metadata.state,
        sum(bool(fragment.replaced) for fragment in replication.fragments),
        sum(fragment.entry_count for fragment in replication.fragments),
        sum(fragment.size_bytes for fragment in replication.fragments),
    )
    if replication.unreadable:
        spans = tuple(EntrySpan(*entries[:3]) for entries in replication.unreadable)
        silent = [entries for entries in replication.unreadable if not entries.lost]
        outcome = MoveOutcome.FAILED if silent else MoveOutcome.UNRECOVERABLE
        now = " now" if silent else ""
        problem = f"No bookie gives {spans_text(spans)}{now} ({(silent or replication.unreadable)[0].answers})"
        return LedgerMove(ledger, outcome, *counts, spans, problem)
    if replication.errors:
        return LedgerMove(ledger, MoveOutcome.FAILED, *counts, problem=replication.errors[0][1].message)
    if replication.left_open:
        problem = "A writer may be adding to it; its last entries stay until it leaves the bookie, or is closed"
        if check.fragments[-1].first_entry_id < check.metadata.last_fragment.first_entry_id:
            problem = (
                f"Its writer left these bookies, so it is not fenced; entries {check.last_add_confirmed + 1} to "
                f"{check.fragments[-1].last_entry_id} stay until later ones are confirmed, or it is closed"
            )
        return LedgerMove(ledger, MoveOutcome.OPEN, *counts, problem=problem)
    if not check.fragments:
        # Closing a ledger moves its last entries to other bookies; these may have been all.
        closed = before in (LedgerState.OPEN, LedgerState.IN_RECOVERY) and check.metadata.is_closed
        return LedgerMove(ledger, MoveOutcome.MOVED if closed else MoveOutcome.GONE, *counts)
    if not replication.done:
        return LedgerMove(
            ledger, MoveOutcome.FAILED, *counts, problem="Other processes change its ensembles at the same time"
        )
    return LedgerMove(ledger, MoveOutcome.MOVED, *counts)
