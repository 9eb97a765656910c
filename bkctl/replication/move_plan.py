"""Plans of a move: the ledgers that bookies hold by the metadata, the outcome of each, and the progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId, LedgerIdSet
from bkctl.metadata.underreplication import LedgerMarks
from bkctl.replication.fragments import EntrySpan, LedgerFragment
from bkctl.replication.holdings import HeldLedger, Replacements, ledgers_on

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster


class MoveOutcome(StrEnum):
    """The outcome of moving one ledger."""

    #: The leaving bookies hold nothing of it any more.
    MOVED = "moved"
    #: There was nothing to move: the ledger was deleted, or another worker moved it.
    GONE = "gone"
    #: A writer may be adding to it, and the caller forbade touching open ledgers.
    OPEN = "open"
    #: Some of its entries are lost: every bookie that should have them answers, and lacks them or has them damaged.
    UNRECOVERABLE = "unrecoverable"
    #: It could not be copied now, as when a bookie that may have its entries is away; another attempt may succeed.
    FAILED = "failed"


class LedgerMove(NamedTuple):
    """The result of moving one ledger.

    `problem` says why it was not moved, `unreadable` names the entries that no replica returns. `entry_count` and
    `size_bytes` were copied, `fragment_count` is the number of fragments whose bookies were replaced.
    """

    ledger: LedgerId
    outcome: MoveOutcome
    state: LedgerState | None = None
    fragment_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    unreadable: tuple[EntrySpan, ...] = ()
    problem: str | None = None


def left_open(held: HeldLedger) -> LedgerMove:
    """Return the result for a ledger that is not moved because it is open."""
    return LedgerMove(held.ledger, MoveOutcome.OPEN, held.metadata.state, problem="It is open")


class PlannedFragment(NamedTuple):
    """The dry run of moving one fragment.

    `targets` are the bookies that would take over, by ensemble index; empty if there are too few, as `problem` says.
    `closes`: the ledger would be fenced and closed first. `unreadable` are the entries that no registered bookie has;
    `lost`: all other bookies that should have them answered.
    """

    held: HeldLedger
    fragment: LedgerFragment
    targets: dict[int, str]
    closes: bool
    problem: str | None
    unreadable: tuple[EntrySpan, ...]
    lost: bool = False

    @property
    def new_ensemble(self) -> tuple[str, ...]:
        """The ensemble after the move."""
        return tuple(self.targets.get(index, bookie_id) for index, bookie_id in enumerate(self.fragment.ensemble))


@dataclass
class MovePlan:
    """The ledgers to move, by the metadata alone. Memory: 16 bytes for each id.

    `ledgers` include ledgers that name the bookies but hold nothing on them. Entries and
    bytes count each replica, of closed ledgers only. `crowded` are the ledgers with too few other bookies, `damaged`
    the ones whose metadata names the bookies but is unreadable, with the reason of each. `marked` are the ledgers that
    auto-recovery has marked for the bookies.
    """

    ledgers: LedgerIdSet = field(default_factory=LedgerIdSet)
    scope_count: int = 0
    open_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    crowded: LedgerIdSet = field(default_factory=LedgerIdSet)
    damaged: dict[LedgerId, str] = field(default_factory=dict)
    marked: LedgerIdSet = field(default_factory=LedgerIdSet)

    @property
    def kinds(self) -> set[bool]:
        """False if there are ledgers of scope 0, and True if there are ledgers of other scopes."""
        ledgers = self.ledgers
        return {ledgers[0].is_scoped, ledgers[-1].is_scoped} if ledgers else set()


def plan_move(cluster: Cluster, leaving: Collection[str], ids: Iterable[LedgerId] | None = None) -> MovePlan:
    """Return what `leaving` hold of the ledgers `ids` (None: of all ledgers), by the metadata. Blocks.

    Raise LedgerNotFound if one of `ids` does not exist, UsageError for an invalid bookie id, and errors of the store.
    """
    plan = MovePlan()
    leaving = frozenset(leaving)
    marks = LedgerMarks(cluster.store)
    mark_of = marks.cursor() if ids is None else marks.get
    replacements = Replacements(cluster.bookies.list(include_down=False), leaving)
    scope_id = None
    for ledger, held in ledgers_on(cluster, leaving, None if ids is None else sorted(set(ids))):
        if isinstance(held, BkctlError):
            if ids is not None and isinstance(held, LedgerNotFound):
                raise held
            plan.damaged[ledger] = held.message
            continue
        plan.ledgers.add(ledger)
        plan.scope_count += ledger.scope_id != scope_id
        scope_id = ledger.scope_id
        plan.open_count += not held.metadata.is_closed
        plan.entry_count += held.entry_count
        plan.size_bytes += held.size_bytes
        with contextlib.suppress(Corrupt):
            mark = mark_of(ledger)
            if mark is not None and not leaving.isdisjoint(mark.missing_replicas):
                plan.marked.add(ledger)
        if replacements.problem(held) is not None:
            plan.crowded.add(ledger)
    return plan


def check_scopes_known(cluster: Cluster) -> None:
    """Raise Conflict if the scoped ledgers belong to a cluster that was formatted. Blocks.

    No listing shows such ledgers, so any bookie may hold some, and needs its cookie.
    """
    if cluster.ledgers.scopes_state() == "foreign":
        raise Conflict(
            "The scoped ledgers belong to a cluster that was formatted: the bookies may hold unlisted entries",
            hint="'bkctl metadata orphans' shows them; remove them first, or keep the cookie",
        )


@dataclass
class MoveProgress:
    """The progress of a move, updated while it runs. Times in seconds."""

    plan: MovePlan
    ledger_count: int = 0
    entry_count: int = 0
    size_bytes: int = 0
    #: Ledgers that other workers have locked, and that are retried later.
    locked_count: int = 0
    _began: float = field(default_factory=time.monotonic)

    def copied(self, entry_count: int, size_bytes: int) -> None:
        self.entry_count += entry_count
        self.size_bytes += size_bytes

    def paused(self, duration_s: float) -> None:
        """Leave a pause out of the elapsed time."""
        self._began += duration_s

    @property
    def elapsed_s(self) -> float:
        """The time since the move began, without pauses."""
        return max(time.monotonic() - self._began, 1e-6)

    @property
    def bytes_per_s(self) -> float:
        """Bytes copied a second, since the move began."""
        return self.size_bytes / self.elapsed_s

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1; a ledger counts as much as one entry."""
        total = len(self.plan.ledgers) + self.plan.entry_count
        done = self.ledger_count + min(self.entry_count, self.plan.entry_count)
        return 1.0 if self.ledger_count >= len(self.plan.ledgers) else done / total

    @property
    def left_s(self) -> float | None:
        """The estimated remaining time; None before anything is known."""
        share = self.share
        if share < 1 and self.plan.entry_count and not self.entry_count:
            return None  # Ledgers that cannot be moved end at once, and tell nothing about the others.
        return self.elapsed_s * (1 - share) / share if share > 0 else None
