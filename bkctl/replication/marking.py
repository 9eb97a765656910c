"""Ledgers of lost bookies: when the auditor acts upon a loss, and the marks for the replication workers."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import compress, islice
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, Unauthorized, Unreachable, UsageError
from bkctl.ids import U64_MAX, LedgerId, check_bookie_id
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.underreplication import LedgerMarks

log: Final = logging.getLogger("bkctl.replication")

#: Ledgers that are examined in one step; an audit can be stopped between steps.
STEP_COUNT: Final = 1000
MARKS_AT_ONCE: Final = 16


class MarkedLedger(NamedTuple):
    """A marked ledger, and the lost bookies that have replicas of it."""

    ledger: LedgerId
    bookies: tuple[str, ...]


def ledgers_of(cluster: Cluster, *, scoped: bool) -> Iterator[LedgerId]:
    """Yield the ledgers of scope 0, or with `scoped` of all other scopes, in ascending order. Streams."""
    return cluster.ledgers.ledgers(None, LedgerId(0, U64_MAX)) if scoped else cluster.ledgers.ledgers(0)


def available_bookies(cluster: Cluster, *, scoped: bool) -> set[str]:
    """Return the ids of the registered bookies, writable or not; with `scoped` only those that serve ledger scopes."""
    return {bookie.bookie_id for bookie in cluster.bookies.list(False) if bookie.ledger_scopes or not scoped}


def mark_ledgers(cluster: Cluster, bookies: Collection[str], *, scope_id: int | None = None) -> Iterator[MarkedLedger]:
    """Mark every ledger of the scope (None: of every scope) that has replicas on `bookies`; yield them in order.

    The bookies may be registered. A ledger whose metadata or mark is unreadable is logged and skipped.
    Raise UsageError for an invalid bookie id, Unreachable. Source: Auditor, BookKeeperAdmin.triggerAudit.
    """
    wanted = set(map(check_bookie_id, bookies))
    yield from _mark(cluster, cluster.ledgers.ledgers(scope_id), lambda named: named & wanted)


def audit_bookies(cluster: Cluster, *, scoped: bool, may_continue: Callable[[], bool] = lambda: True) -> Counter[str]:
    """Mark every ledger of scope 0 (`scoped`: of all other scopes) that names an unregistered bookie.

    Return the number of ledgers of each such bookie. `may_continue` is asked before every step; False ends the audit.
    Raise Unreachable. Source: AuditorBookieCheckTask.auditBookies, BookieLedgerIndexer.
    """
    available: set[str] = set()

    def lost(named: set[str]) -> set[str]:
        nonlocal available
        if named <= available:
            return set()
        # Listed after the metadata was read: a ledger may be on a bookie that registered a moment ago.
        available = available_bookies(cluster, scoped=scoped)
        return named - available

    counts: Counter[str] = Counter()
    for marked in _mark(cluster, ledgers_of(cluster, scoped=scoped), lost, may_continue):
        counts.update(marked.bookies)
    return counts


def _mark(
    cluster: Cluster,
    ids: Iterable[LedgerId],
    lost: Callable[[set[str]], set[str]],
    may_continue: Callable[[], bool] = lambda: True,
) -> Iterator[MarkedLedger]:
    """Mark the ledgers with replicas on lost bookies; `lost` returns the lost ones of a set of bookies."""
    marks = LedgerMarks(cluster.store)

    def mark(marked: MarkedLedger) -> bool:
        """Return False if the ledger cannot be marked: damage, a refusal of the store, or an invalid bookie id."""
        try:
            marks.add(*marked)
        except (Corrupt, Unauthorized, UsageError) as error:
            log.error("Ledger %s cannot be marked: %s", marked.ledger, error)
            return False
        return True

    remaining = iter(cluster.ledgers.read_many(ids))
    with ThreadPoolExecutor(MARKS_AT_ONCE, thread_name_prefix="mark-ledgers") as executor:
        while may_continue() and (step := list(islice(remaining, STEP_COUNT))):
            named = list(_named_bookies(step))
            gone = lost(set().union(*(bookies for _, bookies in named)))
            affected = [
                MarkedLedger(ledger, tuple(sorted(bookies & gone))) for ledger, bookies in named if bookies & gone
            ]
            yield from compress(affected, executor.map(mark, affected))


def _named_bookies(
    step: Iterable[tuple[LedgerId, VersionedMetadata | BkctlError]],
) -> Iterator[tuple[LedgerId, set[str]]]:
    """Yield each ledger with the bookies that its metadata names. Raise Unreachable; log other errors."""
    for ledger, found in step:
        if isinstance(found, Unreachable):
            raise found
        if isinstance(found, LedgerNotFound):
            continue
        if isinstance(found, BkctlError):
            log.warning("Ledger %s is not audited: %s", ledger, found)
            continue
        yield ledger, {bookie_id for fragment in found.metadata.ensembles for bookie_id in fragment.bookies}


class LostBookies:
    """Tracks lost bookies and the delay. It has no clock: the caller gives the time, on the monotonic clock.

    A single lost bookie is given the delay to restart; if several are lost, the audit begins at once. Source:
    Auditor.submitAuditTask, submitLostBookieRecoveryDelayChangedEvent.
    """

    def __init__(self, known: Iterable[str], delay_s: int) -> None:
        self._known = set(known)
        self._delay_s = delay_s
        #: Lost bookies whose delay runs, and the time at which it is over; infinite without one.
        self.waiting: set[str] = set()
        self.due_s = math.inf
        #: The numbers of audits that were put off, and of those that were dropped.
        self.delayed_count = 0
        self.cancelled_count = 0

    def bookies_changed(self, available: Collection[str], delay_s: int, now_s: float) -> bool:
        """Return True if the bookies that are available now, with a delay of `delay_s`, need an audit at once."""
        was_pending = bool(self.waiting)
        gone = self._known.difference(available)
        self._known = set(available)
        self.waiting = (self.waiting - self._known) | gone
        if not self.waiting:
            self.cancelled_count += was_pending
            self.due_s = math.inf
        elif gone and (delay_s == 0 or len(self.waiting) > 1):
            self.cancelled_count += was_pending
            return self._audited()
        elif gone:
            self._put_off(delay_s, now_s)
        return False

    def delay_written(self, delay_s: int, now_s: float) -> bool:
        """Return True if the delay that an operator wrote, 0 or the previous value, requests an audit at once."""
        before, self._delay_s = self._delay_s, delay_s
        self.cancelled_count += bool(self.waiting)
        if delay_s in (0, before):
            return self._audited()
        if self.waiting:
            self._put_off(delay_s, now_s)
        return False

    def is_due(self, now_s: float) -> bool:
        """Return True once the delay is over: the audit that was put off begins."""
        return self.due_s <= now_s and self._audited()

    def _put_off(self, delay_s: int, now_s: float) -> None:
        self.delayed_count += 1
        self.due_s = now_s + delay_s
        log.info("Bookie %s is gone: audited in %d s, unless it returns", *self.waiting, delay_s)

    def _audited(self) -> bool:
        self.waiting.clear()
        self.due_s = math.inf
        return True
