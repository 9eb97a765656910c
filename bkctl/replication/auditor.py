"""The auditor: finds ledgers that lack replicas, and marks them for the replication workers.

One auditor is elected for scope 0, by Apache's own votes, so that it is one of Apache's or one of ours; another one for
all scopes ≠ 0, which Apache's do not see. It marks what stands on bookies that are gone (after a delay, if one is set),
and from time to time looks at every ledger. Source: AuditorElector, Auditor, AuditorBookieCheckTask,
AuditorCheckAllLedgersTask, AuditorPlacementPolicyCheckTask, AuditorReplicasCheckTask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.client.ensemble import RoundRobinDistributionSchedule
from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, Unreachable, UsageError
from bkctl.ids import U64_MAX, LedgerId, check_bookie_id
from bkctl.metadata.underreplication import AuditorCheck, LedgerUnderreplicationManager
from bkctl.replication.checker import LedgerChecker
from bkctl.replication.signals import Signal, ended, finished, watching

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.config import BookieConfig
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.metadata.store import Claim
    from bkctl.replication.placement import Topology

log: Final = logging.getLogger("bkctl.replication")

#: Ledgers that are looked at in one step; between steps an audit can be stopped.
STEP_COUNT: Final = 1000
MARKS_AT_ONCE: Final = 16
#: Entries whose replicas are counted in one step.
PART_COUNT: Final = 65_536
#: Ledgers that a periodic check has open at once, whatever the configuration allows beyond.
CHECKS_AT_ONCE_MAX: Final = 32
#: Watches tell of every change; this is for what could keep one from being heard.
LOOK_AGAIN_S: Final = 30.0
BACK_OFF_S: Final = 2.0


# --- who is the auditor ---------------------------------------------------------------------------------------------


class AuditorElector:
    """Takes part in one election for as long as `run` runs, and is the auditor whenever it wins.

    `audit` is run while we are elected, and cancelled when our vote is gone: with the store's session, or because
    somebody deleted it. Then we vote again. `scoped`: the election of the scopes ≠ 0.
    """

    def __init__(
        self,
        manager: LedgerUnderreplicationManager,
        bookie_id: str,
        audit: Callable[[], Awaitable[None]],
        *,
        scoped: bool,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        self._manager = manager
        self._bookie_id = bookie_id
        self._audit = audit
        self._scoped = scoped
        self._back_off_s = back_off_s
        self._what = "the scopes" if scoped else "scope 0"
        #: Whether we are the auditor now.
        self.elected = False
        #: How often we voted.
        self.attempt_count = 0

    async def run(self) -> None:
        """Vote, wait, be the auditor, again and again; ends when it is cancelled, and takes the vote back then."""
        while True:
            try:
                await self._term()
            except BkctlError as error:
                log.warning("The election of the auditor of %s is interrupted: %s", self._what, error)
            await asyncio.sleep(self._back_off_s)

    async def _term(self) -> None:
        """From one vote of ours to its end."""
        self.attempt_count += 1
        voting = asyncio.ensure_future(asyncio.to_thread(self._manager.vote, self._bookie_id, scoped=self._scoped))
        try:
            vote = await asyncio.shield(voting)
            changed = Signal()
            election = vote.path.rpartition("/")[0]
            async with watching(self._manager.store.watch, election, changed.set, children=True):
                if await self._won(vote, changed):
                    await self._be_auditor(vote, changed)
        finally:
            await finished(_take_back(voting))

    async def _won(self, vote: Claim, changed: Signal) -> bool:
        """Wait until our vote is the first one; False when it is gone."""
        while True:
            changed.clear()
            paths = await asyncio.to_thread(self._manager.vote_paths, scoped=self._scoped)
            if vote.path not in paths:
                return False
            if paths[0] == vote.path:
                return True
            await changed.wait(LOOK_AGAIN_S)

    async def _be_auditor(self, vote: Claim, changed: Signal) -> None:
        await asyncio.to_thread(self._manager.note_auditor, self._bookie_id, scoped=self._scoped)
        log.info("%s is the auditor of %s", self._bookie_id, self._what)
        self.elected = True
        auditing = asyncio.ensure_future(self._audit())
        try:
            while True:
                changed.clear()
                try:
                    if not await asyncio.to_thread(vote.is_held):
                        log.warning("%s is no longer the auditor of %s: its vote is gone", self._bookie_id, self._what)
                        return
                except Unreachable as error:
                    # Nobody else is elected before our session is over; without the store nothing can be marked.
                    log.warning("The auditor of %s cannot reach the metadata store: %s", self._what, error)
                waiting = asyncio.ensure_future(changed.wait(LOOK_AGAIN_S))
                try:
                    await asyncio.wait([waiting, auditing], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    await ended(waiting)
                if auditing.done():
                    await auditing
                    return
        finally:
            self.elected = False
            await ended(auditing)


async def _take_back(voting: asyncio.Future[Claim]) -> None:
    await asyncio.wait([voting])
    if voting.exception() is None:
        with contextlib.suppress(BkctlError):  # the end of the session takes it back
            await asyncio.to_thread(voting.result().release)


# --- lost bookies ---------------------------------------------------------------------------------------------------


class Decision(Enum):
    """What follows from a change."""

    NOTHING = "nothing"
    #: Look for lost bookies now.
    AUDIT = "audit"
    #: Do so when the delay is over, counted from now.
    AUDIT_LATER = "audit later"
    #: What was to be done later is not needed any more.
    CANCEL = "cancel"


class LostBookies:
    """When the loss of bookies is acted upon, with the lost-bookie recovery delay. Knows no clock: the caller waits.

    One lost bookie is waited for, since it may come back from a restart; several at once are not. Source:
    Auditor.submitAuditTask, submitLostBookieRecoveryDelayChangedEvent.
    """

    def __init__(self, known: Iterable[str], delay_s: int) -> None:
        self._known = set(known)
        self._delay_s = delay_s
        #: Bookies that are gone, and for which the delay runs.
        self.waiting: set[str] = set()
        #: How often an audit was put off, and how often that was taken back.
        self.delayed_count = 0
        self.cancelled_count = 0

    @property
    def is_pending(self) -> bool:
        """Whether an audit waits for the delay."""
        return bool(self.waiting)

    def bookies_changed(self, available: Collection[str], delay_s: int) -> Decision:
        """These bookies are there now, and the delay is `delay_s`."""
        was_pending = self.is_pending
        back = self.waiting & set(available)
        self.waiting -= back
        self._known |= set(available)
        gone = self._known - set(available)
        self._known -= gone
        self.waiting |= gone
        if not self.waiting:
            if was_pending:
                self.cancelled_count += 1
            return Decision.CANCEL if was_pending else Decision.NOTHING
        if not gone:
            return Decision.NOTHING
        if delay_s == 0 or len(self.waiting) > 1:
            self.cancelled_count += was_pending
            self.waiting.clear()
            return Decision.AUDIT
        self.delayed_count += 1
        return Decision.AUDIT_LATER

    def delay_written(self, delay_s: int) -> Decision:
        """Somebody wrote the delay: 0, or what it was before, means that an audit is wanted now."""
        before, self._delay_s = self._delay_s, delay_s
        was_pending = self.is_pending
        self.cancelled_count += was_pending
        if delay_s in (0, before):
            self.waiting.clear()
            return Decision.AUDIT
        self.delayed_count += was_pending
        return Decision.AUDIT_LATER if was_pending else Decision.NOTHING

    def delay_over(self) -> None:
        """The audit that was put off begins."""
        self.waiting.clear()


class MarkedLedger(NamedTuple):
    """A ledger that has replicas on lost bookies: which of them, and whether its mark is new, or names more now."""

    ledger: LedgerId
    bookies: tuple[str, ...]
    changed: bool


class MarkProgress(NamedTuple):
    """How far it is: ledgers looked at, those that have replicas on such bookies, and those whose mark changed."""

    ledger_count: int
    affected_count: int
    changed_count: int


def ledgers_of(cluster: Cluster, *, scoped: bool) -> Iterator[LedgerId]:
    """The ledgers of scope 0, or with `scoped` of all others, in ascending order. Streams."""
    return cluster.ledgers.ledgers(None, LedgerId(0, U64_MAX)) if scoped else cluster.ledgers.ledgers(0)


def available_bookies(cluster: Cluster, *, scoped: bool) -> set[str]:
    """Ids of the bookies that serve, writable or not; `scoped`: those that know ledger scopes."""
    return {each.bookie_id for each in cluster.bookies.list(False) if each.ledger_scopes or not scoped}


def mark_ledgers(
    cluster: Cluster,
    bookies: Collection[str],
    *,
    scope_id: int | None = None,
    dry_run: bool = False,
    progress: Callable[[MarkProgress], None] = lambda _: None,
) -> Iterator[MarkedLedger]:
    """Mark every ledger of the scope (None: of every scope) that has replicas on `bookies`; yields them in order.

    Whether those bookies are there is not asked. With `dry_run` nothing is marked, and `changed` says what would.
    `progress` is told after every step. A ledger whose metadata or mark cannot be read is logged and passed over.
    Raises UsageError for what is no bookie id, Unreachable. Source: Auditor, BookKeeperAdmin.triggerAudit.
    """
    wanted = set(map(check_bookie_id, bookies))
    ids = cluster.ledgers.ledgers(scope_id)
    yield from _mark(cluster, ids, lambda named: named & wanted, lambda: True, dry_run=dry_run, progress=progress)


def audit_bookies(
    cluster: Cluster,
    *,
    scoped: bool,
    goes_on: Callable[[], bool] = lambda: True,
    progress: Callable[[MarkProgress], None] = lambda _: None,
) -> Counter[str]:
    """Mark every ledger of scope 0 (`scoped`: of all others) that names a bookie which is not there.

    Returns how many ledgers each such bookie has. `goes_on` is asked before every step: False ends it. Raises
    Unreachable. Source: AuditorBookieCheckTask.auditBookies, BookieLedgerIndexer.
    """
    available: set[str] = set()

    def lost(named: set[str]) -> set[str]:
        nonlocal available
        if named <= available:
            return set()
        # Asked after the metadata was read: a ledger may stand on a bookie that came a moment ago.
        available = available_bookies(cluster, scoped=scoped)
        return named - available

    counts: Counter[str] = Counter()
    for found in _mark(cluster, ledgers_of(cluster, scoped=scoped), lost, goes_on, progress=progress):
        counts.update(found.bookies)
    return counts


def _mark(
    cluster: Cluster,
    ids: Iterable[LedgerId],
    lost: Callable[[set[str]], set[str]],
    goes_on: Callable[[], bool],
    *,
    dry_run: bool = False,
    progress: Callable[[MarkProgress], None],
) -> Iterator[MarkedLedger]:
    """Mark what has replicas on bookies that are `lost`: it is given bookies, and says which of them are."""
    manager = LedgerUnderreplicationManager(cluster.store)

    def mark(ledger: LedgerId, missing: tuple[str, ...]) -> MarkedLedger | None:
        try:
            if not dry_run:
                return MarkedLedger(ledger, missing, manager.mark(ledger, missing))
            present = manager.get(ledger)
        except (Corrupt, UsageError) as error:
            # Its mark is damaged, or it names what is no bookie: the ledgers after it are not to wait for that.
            log.error("Ledger %s cannot be marked: %s", ledger, error)
            return None
        return MarkedLedger(ledger, missing, present is None or not set(missing) <= set(present.missing_replicas))

    ledger_count = affected_count = changed_count = 0
    remaining = iter(cluster.ledgers.read_many(ids))
    with ThreadPoolExecutor(MARKS_AT_ONCE, thread_name_prefix="mark-ledgers") as executor:
        while goes_on() and (step := list(islice(remaining, STEP_COUNT))):
            named = list(_named_bookies(step))
            gone = lost(set().union(*(bookies for _, bookies in named)))
            affected = [(ledger, tuple(sorted(bookies & gone))) for ledger, bookies in named if bookies & gone]
            for done in executor.map(lambda each: mark(*each), affected):
                if done is not None:
                    changed_count += done.changed
                    yield done
            ledger_count += len(step)
            affected_count += len(affected)
            progress(MarkProgress(ledger_count, affected_count, changed_count))


def _named_bookies(
    found: Iterable[tuple[LedgerId, VersionedMetadata | BkctlError]],
) -> Iterator[tuple[LedgerId, set[str]]]:
    for ledger, each in found:
        if isinstance(each, Unreachable):
            raise each
        if isinstance(each, LedgerNotFound):
            continue
        if isinstance(each, BkctlError):
            log.warning("Ledger %s is not audited: %s", ledger, each)
            continue
        yield ledger, {bookie_id for fragment in each.metadata.ensembles for bookie_id in fragment.bookies}


# --- the auditor ----------------------------------------------------------------------------------------------------


@dataclass
class AuditorStats:
    """What an auditor counted since it started, under Apache's names in small letters. Source: AuditorStats."""

    #: By the last audit that found lost bookies.
    num_under_replicated_ledgers: int = 0
    num_ledgers_checked: int = 0
    num_bookie_audits_delayed: int = 0
    num_delayed_bookie_audits_cancelled: int = 0
    num_skipping_check_task_times: int = 0
    #: By the last check of each kind.
    num_underreplicated_ledgers_elapsed_recovery_grace_period: int = 0
    num_ledgers_not_adhering_to_placement_policy: int = 0
    num_ledgers_having_no_replica_of_an_entry: int = 0
    num_ledgers_having_less_than_aq_replicas_of_an_entry: int = 0
    num_ledgers_having_less_than_wq_replicas_of_an_entry: int = 0
    audit_count: int = 0
    audit_failed_count: int = 0


def first_delay_s(interval_s: int, ctime_ms: int | None, now_ms: int) -> float:
    """Seconds until a check that ran at `ctime_ms` (None: never) is due. Source: Auditor.start."""
    return 0.0 if ctime_ms is None else max(0.0, interval_s - max(0, now_ms - ctime_ms) / 1000)


@dataclass
class _Periodic:
    """A check, when it is due (by the auditor's clock) and how often it comes; `interval_s` 0: once."""

    run: Callable[[], Awaitable[None]]
    interval_s: int
    due_s: float

    def put_off(self, now_s: float) -> None:
        """To the next time that is not over."""
        if self.interval_s == 0:
            self.due_s = float("inf")
        while self.due_s <= now_s:
            self.due_s += self.interval_s


class Auditor:
    """What the elected auditor of scope 0 (`scoped`: of all other scopes) does, until `run` is cancelled.

    Errors of the store are logged, and what they kept from being done is tried again.
    """

    def __init__(
        self,
        bookkeeper: BookKeeper,
        config: BookieConfig,
        *,
        scoped: bool,
        stats: AuditorStats | None = None,
        checker: LedgerChecker | None = None,
        topology: Topology | None = None,
        back_off_s: float = BACK_OFF_S,
    ) -> None:
        self._bookkeeper = bookkeeper
        self._cluster = bookkeeper.cluster
        self._config = config
        self._scoped = scoped
        self.stats = stats or AuditorStats()
        count = config.in_flight_read_entry_num_in_ledger_checker
        self._checker = checker or (
            LedgerChecker(bookkeeper, in_flight_count_max=count) if count > 0 else LedgerChecker(bookkeeper)
        )
        self._topology = topology
        self._back_off_s = back_off_s
        self._manager = LedgerUnderreplicationManager(self._cluster.store)
        self._lost = LostBookies((), 0)
        self._delay_version: int | None = None
        self._audit_at_s: float | None = None
        self._audit_is_due = False
        self._periodic: list[_Periodic] = []
        self._check: asyncio.Task[None] | None = None
        self._is_over = False
        self._what = "the scopes" if scoped else "scope 0"

    async def run(self) -> None:
        """Audit until it is cancelled. Raises BkctlError when it cannot begin."""
        self._changed = changed = Signal()
        try:
            async with (
                watching(self._cluster.bookies.watch, changed.set),
                watching(self._manager.watch_auditing, changed.set),
            ):
                await self._begin()
                while True:
                    changed.clear()
                    try:
                        wait_s = await self._step()
                    except BkctlError as error:
                        log.warning("The auditor of %s is held up: %s", self._what, error)
                        wait_s = self._back_off_s
                    await changed.wait(min(wait_s, LOOK_AGAIN_S))
        finally:
            self._is_over = True
            if self._check is not None:
                await ended(self._check)

    async def _begin(self) -> None:
        def look() -> tuple[set[str], int, int | None]:
            delay_s = self._manager.initialize_lost_bookie_recovery_delay_s(self._config.lost_bookie_recovery_delay)
            return self._known_bookies(), delay_s, self._manager.delay_version()

        known, delay_s, self._delay_version = await asyncio.to_thread(look)
        self._lost = LostBookies(known, delay_s)
        config = self._config
        self._periodic = [_Periodic(self._check_bookies, config.auditor_periodic_bookie_check_interval, _now_s())]
        for check, interval_s, run in (
            (AuditorCheck.ALL_LEDGERS, config.auditor_periodic_check_interval, self.check_all_ledgers),
            (
                AuditorCheck.PLACEMENT_POLICY,
                config.auditor_periodic_placement_policy_check_interval,
                self.check_placement_policy,
            ),
            (AuditorCheck.REPLICAS, config.auditor_replicas_check_interval, self.check_replicas),
        ):
            if interval_s > 0:
                ctime_ms = await asyncio.to_thread(self._manager.check_ctime_ms, check, scoped=self._scoped)
                delay = first_delay_s(interval_s, ctime_ms, _now_ms())
                self._periodic.append(_Periodic(self._in_background(run), interval_s, _now_s() + delay))

    def _known_bookies(self) -> set[str]:
        """Who should be there: registered bookies, and those with a cookie. Source: BookKeeperAdmin.getAllBookies."""
        bookies = self._cluster.bookies.list()
        return {each.bookie_id for each in bookies if each.ledger_scopes or each.state == "down" or not self._scoped}

    async def _step(self) -> float:
        """Look at what changed and do what is due; returns after how many seconds something else may be."""
        if not await asyncio.to_thread(self._manager.is_enabled):
            return LOOK_AGAIN_S

        def look() -> tuple[set[str], int, int | None]:
            version = self._manager.delay_version()
            delay_s = self._manager.lost_bookie_recovery_delay_s() or 0
            return available_bookies(self._cluster, scoped=self._scoped), delay_s, version

        available, delay_s, version = await asyncio.to_thread(look)
        if version != self._delay_version:
            self._delay_version = version
            self._decide(self._lost.delay_written(delay_s), delay_s)
        self._decide(self._lost.bookies_changed(available, delay_s), delay_s)
        if self._audit_at_s is not None and self._audit_at_s <= _now_s():
            self._lost.delay_over()
            self._decide(Decision.AUDIT, delay_s)
        if self._audit_is_due:
            await self._audit()
            self._periodic[0].put_off(_now_s())
        for periodic in self._periodic:
            if periodic.due_s <= _now_s() and (self._check is None or self._check.done()):
                periodic.put_off(_now_s())
                if self._lost.is_pending:
                    # Whoever set a delay does not want ledgers of that bookie marked yet.
                    self.stats.num_skipping_check_task_times += 1
                else:
                    await periodic.run()
        dues = [periodic.due_s for periodic in self._periodic]
        if self._audit_at_s is not None:
            dues.append(self._audit_at_s)
        return max(0.0, min(dues) - _now_s()) if self._check is None or self._check.done() else LOOK_AGAIN_S

    def _decide(self, decision: Decision, delay_s: int) -> None:
        if decision is Decision.AUDIT:
            self._audit_is_due, self._audit_at_s = True, None
        elif decision is Decision.AUDIT_LATER:
            self._audit_at_s = _now_s() + delay_s
            log.info("Bookie %s is gone: audited in %d s, unless it returns", *self._lost.waiting, delay_s)
        elif decision is Decision.CANCEL:
            self._audit_at_s = None
        self.stats.num_bookie_audits_delayed = self._lost.delayed_count
        self.stats.num_delayed_bookie_audits_cancelled = self._lost.cancelled_count

    # lost bookies

    async def _check_bookies(self) -> None:
        self._audit_is_due = True
        await self._audit()

    async def _audit(self) -> None:
        """Mark what stands on bookies that are gone; where it cannot be done to the end, it stays due."""
        is_whole = True

        def goes_on() -> bool:
            nonlocal is_whole
            is_whole = not self._is_over and self._manager.is_enabled()
            return is_whole

        try:
            counts = await asyncio.to_thread(audit_bookies, self._cluster, scoped=self._scoped, goes_on=goes_on)
        except BkctlError:
            self.stats.audit_failed_count += 1
            raise
        for bookie_id, count in sorted(counts.items()):
            log.info("Bookie %s is gone: %d ledgers of %s are marked", bookie_id, count, self._what)
        if counts:
            self.stats.num_under_replicated_ledgers = counts.total()
        self.stats.audit_count += 1
        self._audit_is_due = not is_whole

    # checks of all ledgers

    def _in_background(self, check: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """They take long, and bookies may be lost meanwhile."""

        async def run() -> None:
            try:
                await check()
            except BkctlError as error:
                log.warning("%s of %s failed: %s", check.__name__, self._what, error)
            finally:
                self._changed.set()

        async def begin() -> None:
            self._check = asyncio.create_task(run())

        return begin

    async def check_all_ledgers(self) -> None:
        """Read some entries of every fragment of every ledger, and mark the ledgers that lack some.

        Nothing is noted as done when auto-recovery is switched off meanwhile. Source: AuditorCheckAllLedgersTask.
        """

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            percentage = self._config.auditor_ledger_verification_percentage
            result = await self._checker.check(ledger, found, percentage=percentage, up=up)
            bookies = sorted({bookie_id for fragment in result.fragments for bookie_id in fragment.bookies})
            if bookies:
                log.info("Ledger %s lacks entries on %s", ledger, ", ".join(bookies))
                await asyncio.to_thread(self._manager.mark, ledger, bookies)
            self.stats.num_ledgers_checked += 1

        if await self._for_each_ledger(check):
            await self._note(AuditorCheck.ALL_LEDGERS)

    async def check_replicas(self) -> None:
        """Ask bookies which entries they have of every closed ledger that is not marked, and count what lacks replicas.

        Nothing is marked. Source: AuditorReplicasCheckTask.
        """
        counts: Counter[str] = Counter()

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            metadata = found.metadata
            if not metadata.is_closed or metadata.last_entry_id < 0:
                return
            if await asyncio.to_thread(self._manager.get, ledger) is not None:
                return
            missing = await self._missing_replica_count(ledger, found)
            left = metadata.write_quorum_size - missing
            if left <= 0:
                counts["no"] += 1
            elif left < metadata.ack_quorum_size:
                counts["aq"] += 1
            elif missing:
                counts["wq"] += 1
            if missing:
                log.error("Ledger %s: an entry has %d replicas of %d", ledger, left, metadata.write_quorum_size)

        if await self._for_each_ledger(check):
            await self._note(AuditorCheck.REPLICAS)
        self.stats.num_ledgers_having_no_replica_of_an_entry = counts["no"]
        self.stats.num_ledgers_having_less_than_aq_replicas_of_an_entry = counts["aq"]
        self.stats.num_ledgers_having_less_than_wq_replicas_of_an_entry = counts["wq"]

    async def _missing_replica_count(self, ledger: LedgerId, found: VersionedMetadata) -> int:
        """The most replicas that bookies say they lack of one entry; what a bookie does not answer lacks nothing."""
        bookies = {bookie_id for fragment in found.metadata.ensembles for bookie_id in fragment.bookies}
        access = self._bookkeeper.access(ledger, found)
        fragments = (await self._checker.on_bookies(ledger, bookies, found)).fragments
        listed = {}
        for bookie_id in sorted(bookies):
            try:
                listed[bookie_id] = await self._checker.listed(access, bookie_id)
            except BkctlError as error:
                log.warning("Ledger %s: bookie %s does not tell what it has: %s", ledger, bookie_id, error)

        def count() -> int:
            worst = 0
            for fragment in fragments:
                asked = [(index, listed[each]) for index, each in enumerate(fragment.ensemble) if each in listed]
                limit = min(len(asked), found.metadata.write_quorum_size)
                # In parts: of a bookie that lost its disks all entries are missing.
                for first in range(fragment.first_entry_id, fragment.last_entry_id + 1, PART_COUNT):
                    if worst >= limit:
                        break
                    last = min(first + PART_COUNT - 1, fragment.last_entry_id)
                    part = replace(fragment, first_entry_id=first, last_entry_id=last)
                    lacking: Counter[int] = Counter()
                    for index, there in asked:
                        lacking.update(each for each in part.entries_of(index) if each not in there)
                    worst = max(worst, max(lacking.values(), default=0))
            return worst

        return await asyncio.to_thread(count)

    async def check_placement_policy(self) -> None:
        """Count the closed ledgers whose replicas share a rack, and the marks that nobody dealt with in time.

        Where no racks are known none is counted. Nothing is marked. Source: AuditorPlacementPolicyCheckTask.
        """
        grace_ms = self._config.underreplicated_ledger_recovery_grace_period * 1000
        if grace_ms > 0:
            self.stats.num_underreplicated_ledgers_elapsed_recovery_grace_period = await asyncio.to_thread(
                self._old_mark_count, _now_ms() - grace_ms
            )
        racks: dict[str, str] = {}
        if self._topology is not None:
            bookies = await asyncio.to_thread(self._cluster.bookies.list, False)
            racks = await asyncio.to_thread(self._topology.racks, bookies)
        count = 0

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            nonlocal count
            if racks and found.metadata.is_closed and _shares_racks(found.metadata, racks):
                log.warning("Ledger %s has replicas of an entry in one rack only", ledger)
                count += 1

        if await self._for_each_ledger(check):
            await self._note(AuditorCheck.PLACEMENT_POLICY)
        self.stats.num_ledgers_not_adhering_to_placement_policy = count

    def _old_mark_count(self, before_ms: int) -> int:
        count = 0
        for ledger, mark in self._manager.list(None if self._scoped else 0):
            if ledger.is_scoped == self._scoped and not isinstance(mark, BkctlError):
                count += mark.ctime_ms is not None and mark.ctime_ms < before_ms
        return count

    async def _for_each_ledger(self, work: Callable[[LedgerId, VersionedMetadata, set[str]], Awaitable[None]]) -> bool:
        """Call `work` with every ledger and the bookies that are up, some at once; False when it was switched off.

        What is wrong with a single ledger is logged. Raises Unreachable.
        """
        at_once = min(self._config.auditor_max_number_of_concurrent_open_ledger_operations, CHECKS_AT_ONCE_MAX)
        permits = asyncio.Semaphore(at_once)

        async def one(ledger: LedgerId, found: VersionedMetadata | BkctlError, up: set[str]) -> None:
            try:
                if isinstance(found, BkctlError):
                    raise found
                async with permits:
                    await work(ledger, found, up)
            except LedgerNotFound:
                return
            except Unreachable:
                raise
            except BkctlError as error:
                log.warning("Ledger %s is not checked: %s", ledger, error)

        remaining = iter(self._cluster.ledgers.read_many(ledgers_of(self._cluster, scoped=self._scoped)))
        while step := await asyncio.to_thread(lambda: list(islice(remaining, STEP_COUNT // 4))):
            if not await asyncio.to_thread(self._manager.is_enabled):
                return False
            up = await asyncio.to_thread(available_bookies, self._cluster, scoped=False)
            tasks = [asyncio.ensure_future(one(ledger, found, up)) for ledger, found in step]
            try:
                await asyncio.gather(*tasks)
            finally:
                await ended(*tasks)
        return await asyncio.to_thread(self._manager.is_enabled)

    async def _note(self, check: AuditorCheck) -> None:
        await asyncio.to_thread(self._manager.set_check_ctime_ms, check, _now_ms(), scoped=self._scoped)


def _shares_racks(metadata: LedgerMetadata, racks: dict[str, str]) -> bool:
    """Whether an entry has all its replicas in one rack. Source: isEnsembleAdheringToPlacementPolicy."""
    schedule = RoundRobinDistributionSchedule.of(metadata)
    if schedule.write_quorum_size < 2:
        return False
    for fragment in metadata.ensembles:
        for start in range(schedule.ensemble_size):
            used = [racks.get(fragment.bookies[index]) for index in schedule.write_set(start)]
            if None not in used and len(set(used)) == 1:
                return True
    return False


def _now_s() -> float:
    return time.monotonic()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
