"""The auditor, and its election: finds ledgers that lack replicas, and marks them for the replication workers.

One auditor is elected for scope 0, by Apache's own votes, so it is one of Apache's or of ours; another one for all
scopes ≠ 0, which Apache's auditors do not see. An auditor marks ledgers of lost bookies (after the lost-bookie recovery
delay), and checks every ledger periodically. Source: Auditor, AuditorElector, AuditorBookieCheckTask,
AuditorCheckAllLedgersTask, AuditorPlacementPolicyCheckTask, AuditorReplicasCheckTask.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from typing import Final

from bkctl.client.ledger import BookKeeper
from bkctl.client.ledger_survey import LedgerSurvey
from bkctl.client.placement import Adherence
from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, LedgerNotFound, Unreachable
from bkctl.formats.availability import Availability
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import Claim
from bkctl.metadata.underreplication import (
    AuditorCheck,
    AuditorElection,
    AutoRecoverySettings,
    AutoRecoveryState,
    ReplicationFailures,
)
from bkctl.replication.checker import IN_FLIGHT_COUNT_MAX, LedgerChecker
from bkctl.replication.fragments import LedgerFragment
from bkctl.replication.marking import STEP_COUNT, LostBookies, audit_bookies, available_bookies, ledgers_of
from bkctl.replication.signals import Signal, opened, watching
from bkctl.replication.stats import AuditorStats
from bkctl.tasks import cancel_and_wait, run_together

log: Final = logging.getLogger("bkctl.replication")

BACK_OFF_S: Final = 2.0
#: Watches report every change; this bounds the delay if a report is lost.
LOOK_AGAIN_S: Final = 30.0


def first_delay_s(interval_s: int, ctime_ms: int | None, now_ms: int) -> float:
    """Return the seconds until a check that ran at `ctime_ms` (None: never) is due. Source: Auditor.start."""
    return 0.0 if ctime_ms is None else max(0.0, interval_s - max(0, now_ms - ctime_ms) / 1000)


@dataclass
class _PeriodicCheck:
    """A check, its interval (0: it runs once) and its next time by the monotonic clock."""

    run: Callable[[], Awaitable[None]]
    interval_s: int
    due_s: float

    def schedule_next(self, now_s: float) -> None:
        if self.interval_s == 0:
            self.due_s = float("inf")
        while self.due_s <= now_s:
            self.due_s += self.interval_s


@dataclass(eq=False)
class Auditor:
    """The elected auditor of scope 0 (`scoped`: of all other scopes), working until `run` is cancelled.

    Errors of the store are logged, and the interrupted work is retried.
    """

    bookkeeper: BookKeeper
    config: BookieConfig
    scoped: bool
    stats: AuditorStats = field(default_factory=AuditorStats)
    _delay_version: int | None = None
    _audit_is_due: bool = False
    _periodic: list[_PeriodicCheck] = field(default_factory=list)
    _check: asyncio.Task[None] | None = None
    _is_over: bool = False

    def __post_init__(self) -> None:
        self._cluster = self.bookkeeper.cluster
        self._settings = AutoRecoverySettings(self._cluster.store)
        self.checks = LedgerChecks(self.bookkeeper, self.config, self.scoped, self.stats)
        self._lost = LostBookies((), 0)
        self._what = "the scopes" if self.scoped else "scope 0"

    async def run(self) -> None:
        """Audit until cancelled. Raise BkctlError if the auditor cannot begin."""
        self._changed = changed = Signal()
        try:
            async with watching(self._cluster.bookies.watch, changed.set), watching(self._settings.watch, changed.set):
                await self._begin()
                while True:
                    changed.clear()
                    try:
                        wait_s = await self._step()
                    except BkctlError as error:
                        log.warning("The auditor of %s retries in %g s: %s", self._what, BACK_OFF_S, error)
                        wait_s = BACK_OFF_S
                    await changed.wait(min(wait_s, LOOK_AGAIN_S))
        finally:
            self._is_over = True
            if self._check is not None:
                await cancel_and_wait(self._check)

    async def _begin(self) -> None:
        """Read the state that the first step needs, and schedule the periodic checks."""

        def look() -> tuple[set[str], int, int | None]:
            """Return the registered bookies and the ones with a cookie, as BookKeeperAdmin.getAllBookies."""
            delay_s = self._settings.initialize_lost_bookie_recovery_delay_s(self.config.lost_bookie_recovery_delay)
            known = {
                bookie.bookie_id
                for bookie in self._cluster.bookies.list()
                if bookie.ledger_scopes or bookie.state == "down" or not self.scoped
            }
            return known, delay_s, self._settings.delay_version()

        known, delay_s, self._delay_version = await asyncio.to_thread(look)
        self._lost = LostBookies(known, delay_s)
        config, checks = self.config, self.checks
        interval_s = config.auditor_periodic_bookie_check_interval
        self._periodic = [_PeriodicCheck(self._audit, interval_s, time.monotonic())]
        placement_interval_s = config.auditor_periodic_placement_policy_check_interval
        for check, interval_s, run in (
            (AuditorCheck.ALL_LEDGERS, config.auditor_periodic_check_interval, checks.check_all_ledgers),
            (AuditorCheck.PLACEMENT_POLICY, placement_interval_s, checks.check_placement_policy),
            (AuditorCheck.REPLICAS, config.auditor_replicas_check_interval, checks.check_replicas),
        ):
            if interval_s > 0:
                ctime_ms = await asyncio.to_thread(self._settings.check_ctime_ms, check, scoped=self.scoped)
                delay = first_delay_s(interval_s, ctime_ms, now_ms())
                self._periodic.append(_PeriodicCheck(partial(self._start, run), interval_s, time.monotonic() + delay))

    async def _step(self) -> float:
        """Handle changes and run due work; return the seconds until more work may be due."""
        if not await asyncio.to_thread(self._settings.is_enabled):
            return LOOK_AGAIN_S

        def look() -> tuple[set[str], int, int | None]:
            version = self._settings.delay_version()
            delay_s = self._settings.lost_bookie_recovery_delay_s() or 0
            return available_bookies(self._cluster, scoped=self.scoped), delay_s, version

        available, delay_s, version = await asyncio.to_thread(look)
        lost, now_s = self._lost, time.monotonic()
        if version != self._delay_version:
            self._delay_version = version
            self._audit_is_due |= lost.delay_written(delay_s, now_s)
        self._audit_is_due |= lost.bookies_changed(available, delay_s, now_s)
        self._audit_is_due |= lost.is_due(now_s)
        self.stats.num_bookie_audits_delayed = lost.delayed_count
        self.stats.num_delayed_bookie_audits_cancelled = lost.cancelled_count
        if self._audit_is_due:
            await self._audit()
            self._periodic[0].schedule_next(time.monotonic())
        for check in self._periodic:
            if check.due_s <= time.monotonic() and not self._is_checking:
                check.schedule_next(time.monotonic())
                if lost.waiting:
                    # The delay says that ledgers of the lost bookie must not be marked yet.
                    self.stats.num_skipping_check_task_times += 1
                else:
                    await check.run()
        due_s = min(lost.due_s, *(check.due_s for check in self._periodic))
        return LOOK_AGAIN_S if self._is_checking else max(0.0, due_s - time.monotonic())

    @property
    def _is_checking(self) -> bool:
        return self._check is not None and not self._check.done()

    async def _audit(self) -> None:
        """Mark the ledgers of lost bookies; an interrupted audit stays due."""
        self._audit_is_due = is_whole = True

        def may_continue() -> bool:
            nonlocal is_whole
            is_whole = not self._is_over and self._settings.is_enabled()
            return is_whole

        try:
            counts = await asyncio.to_thread(
                audit_bookies, self._cluster, scoped=self.scoped, may_continue=may_continue
            )
        except BkctlError:
            self.stats.audit_failed_count += 1
            raise
        for bookie_id, count in sorted(counts.items()):
            log.info("Bookie %s is gone; ledgers of %s marked: %d", bookie_id, self._what, count)
        if counts:
            self.stats.num_under_replicated_ledgers.observe(counts.total())
        self.stats.audit_count += 1
        self._audit_is_due = not is_whole

    async def _start(self, check: Callable[[], Awaitable[None]]) -> None:
        """Start `check` as a task: checks take long, and bookies may be lost meanwhile."""

        async def run() -> None:
            try:
                await check()
            except BkctlError as error:
                log.warning("%s of %s failed: %s", check.__name__, self._what, error)
            finally:
                self._changed.set()

        self._check = asyncio.create_task(run())


@dataclass(eq=False)
class AuditorElector:
    """Takes part in one election while `run` runs, and runs `audit` whenever it wins.

    `audit` is cancelled when our vote is gone, because the store's session ended or it was deleted; then the
    elector votes again. `scoped` selects the election for the scopes ≠ 0.
    """

    election: AuditorElection
    bookie_id: str
    audit: Callable[[], Awaitable[None]]
    scoped: bool
    back_off_s: float = BACK_OFF_S
    #: True while we are the auditor.
    elected: bool = False
    #: The number of our votes.
    attempt_count: int = 0

    def __post_init__(self) -> None:
        self._what = "the scopes" if self.scoped else "scope 0"

    async def run(self) -> None:
        """Vote, wait and audit in turns until cancelled, and withdraw the vote then."""
        while True:
            try:
                await self._term()
            except BkctlError as error:
                log.warning("The election of the auditor of %s is interrupted: %s", self._what, error)
            await asyncio.sleep(self.back_off_s)

    async def _term(self) -> None:
        """Run from one vote of ours to its end."""
        self.attempt_count += 1
        cast = partial(self.election.vote, self.bookie_id, scoped=self.scoped)
        async with opened(cast, lambda vote: vote.release()) as vote:
            changed = Signal()
            directory = vote.path.rpartition("/")[0]
            async with watching(self.election.store.watch, directory, changed.set, children=True):
                if await self._won(vote, changed):
                    await self._be_auditor(vote, changed)

    async def _won(self, vote: Claim, changed: Signal) -> bool:
        """Wait until our vote is the first one; return False if it is gone."""
        while True:
            changed.clear()
            paths = await asyncio.to_thread(self.election.vote_paths, scoped=self.scoped)
            if vote.path not in paths:
                return False
            if paths[0] == vote.path:
                return True
            await changed.wait(LOOK_AGAIN_S)

    async def _be_auditor(self, vote: Claim, changed: Signal) -> None:
        await asyncio.to_thread(self.election.announce, self.bookie_id, scoped=self.scoped)
        log.info("%s is the auditor of %s", self.bookie_id, self._what)
        self.elected = True
        auditing = asyncio.ensure_future(self.audit())
        try:
            while await self._holds(vote, changed):
                await changed.wait(LOOK_AGAIN_S, auditing)
                if auditing.done():
                    await auditing
                    return
        finally:
            self.elected = False
            await cancel_and_wait(auditing)

    async def _holds(self, vote: Claim, changed: Signal) -> bool:
        """Return False if our vote is gone. While the store is unreachable, the vote counts as held."""
        changed.clear()
        try:
            if await asyncio.to_thread(vote.is_held):
                return True
        except Unreachable as error:
            # No other auditor is elected before our session ends, and nothing can be marked without the store.
            log.warning("The auditor of %s cannot reach the metadata store: %s", self._what, error)
            return True
        log.warning("%s is no longer the auditor of %s: its vote is gone", self.bookie_id, self._what)
        return False


# --- the periodic checks of all ledgers --------------------------------------------------------------------------

#: Entries of one ledger that are compared, beyond one of each write set between borders of the bookies' lists.
STEPS_MAX: Final = 1 << 22
#: The largest number of ledgers that a check has open at once, whatever the configuration allows.
CHECKS_AT_ONCE_MAX: Final = 32


@dataclass(eq=False)
class LedgerChecks:
    """Checks all ledgers of scope 0 (`scoped`: of all other scopes), and counts the results in `stats`.

    The checks stop while auto-recovery is disabled.
    """

    bookkeeper: BookKeeper
    config: BookieConfig
    scoped: bool
    stats: AuditorStats

    def __post_init__(self) -> None:
        self._cluster = self.bookkeeper.cluster
        state = AutoRecoveryState(self._cluster.store)
        self._marks, self._settings = state.marks, state.settings
        count = self.config.in_flight_read_entry_num_in_ledger_checker
        self._checker = LedgerChecker(self.bookkeeper, in_flight_count_max=count if count > 0 else IN_FLIGHT_COUNT_MAX)

    async def check_all_ledgers(self) -> None:
        """Read some entries of every fragment of every ledger, and mark ledgers that lack entries.

        The check is not recorded as done if auto-recovery is disabled meanwhile. Source: AuditorCheckAllLedgersTask.
        """

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            percentage = self.config.auditor_ledger_verification_percentage
            result = await self._checker.check(ledger, found, percentage=percentage, up=up)
            bookies = sorted({bookie_id for fragment in result.fragments for bookie_id in fragment.bookies})
            if bookies:
                log.info("Ledger %s lacks entries on %s", ledger, ", ".join(bookies))
                await asyncio.to_thread(self._marks.add, ledger, bookies)
            self.stats.num_ledgers_checked += 1
            survey.add(ledger, found, await asyncio.to_thread(self._marks.get, ledger))

        survey = await asyncio.to_thread(lambda: LedgerSurvey(self._cluster.bookies.list()))
        if await self._for_each_ledger(AuditorCheck.ALL_LEDGERS, check):
            await asyncio.to_thread(self._publish, survey)

    def _publish(self, survey: LedgerSurvey) -> None:
        """Publish the survey for `cluster health`, and drop failures of ledgers that are not marked any more."""
        survey.end(self._cluster)
        survey.publish(self._cluster.store, scoped=self.scoped)
        ReplicationFailures(self._cluster.store).prune()

    async def check_replicas(self) -> None:
        """Ask the bookies which entries they have of every closed, unmarked ledger; count ledgers that lack replicas.

        Nothing is marked. Source: AuditorReplicasCheckTask.
        """
        counts: Counter[str] = Counter()

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            metadata = found.metadata
            if not metadata.is_closed or metadata.last_entry_id < 0:
                return
            if await asyncio.to_thread(self._marks.get, ledger) is not None:
                return
            if missing := await self._missing_replica_count(ledger, found):
                left = metadata.write_quorum_size - missing
                counts["no" if left <= 0 else "aq" if left < metadata.ack_quorum_size else "wq"] += 1
                log.error("Ledger %s: an entry has %d replicas of %d", ledger, left, metadata.write_quorum_size)

        await self._for_each_ledger(AuditorCheck.REPLICAS, check)
        self.stats.num_ledgers_having_no_replica_of_an_entry = counts["no"]
        self.stats.num_ledgers_having_less_than_aq_replicas_of_an_entry = counts["aq"]
        self.stats.num_ledgers_having_less_than_wq_replicas_of_an_entry = counts["wq"]

    async def _missing_replica_count(self, ledger: LedgerId, found: VersionedMetadata) -> int:
        """Return the largest number of missing replicas of one entry; a silent bookie counts as complete."""
        bookies = {bookie_id for fragment in found.metadata.ensembles for bookie_id in fragment.bookies}
        access = self.bookkeeper.access(ledger, found)
        fragments = (await self._checker.on_bookies(ledger, bookies, found)).fragments
        listed: dict[str, Availability] = {}
        for bookie_id in sorted(bookies):
            try:
                listed[bookie_id] = await self._checker.replicas.listed(access, bookie_id)
            except BkctlError as error:
                log.warning("Ledger %s: bookie %s does not list its entries: %s", ledger, bookie_id, error)
        return await asyncio.to_thread(_worst_count, fragments, listed, found.metadata.write_quorum_size)

    async def check_placement_policy(self) -> None:
        """Count the closed ledgers that the placement policy does not accept, or only softly, and old marks.

        Marks are old after their grace period. Without known racks no ledger is counted. With
        repairedPlacementPolicyNotAdheringBookieEnabled, the ledgers are marked: a replication worker moves replicas to
        other racks. Source: AuditorPlacementPolicyCheckTask.
        """
        grace_ms = self.config.underreplicated_ledger_recovery_grace_period * 1000
        if grace_ms > 0:
            self.stats.num_underreplicated_ledgers_elapsed_recovery_grace_period = await asyncio.to_thread(
                self._old_mark_count, now_ms() - grace_ms
            )
        pool = self.bookkeeper.pool
        placement = await asyncio.to_thread(lambda: pool.placement(self._cluster.bookies.list()))
        counts = Counter[Adherence]()

        async def check(ledger: LedgerId, found: VersionedMetadata, up: set[str]) -> None:
            metadata = found.metadata
            if not metadata.is_closed:
                return
            adherence = min(placement.adherence(metadata, fragment.bookies) for fragment in metadata.ensembles)
            counts[adherence] += 1
            if adherence is not Adherence.FAIL:
                return
            log.warning("Ledger %s is misplaced: %s", ledger, placement.ledger_problem(metadata))
            if self.config.repaired_placement_policy_not_adhering_bookie_enabled:
                await asyncio.to_thread(self._marks.add, ledger, ())

        await self._for_each_ledger(AuditorCheck.PLACEMENT_POLICY, check)
        self.stats.num_ledgers_not_adhering_to_placement_policy = counts[Adherence.FAIL]
        self.stats.num_ledgers_softly_adhering_to_placement_policy = counts[Adherence.SOFT]

    def _old_mark_count(self, before_ms: int) -> int:
        count = 0
        for ledger, mark in self._marks.list(None if self.scoped else 0):
            if ledger.is_scoped == self.scoped and not isinstance(mark, BkctlError):
                count += mark.ctime_ms is not None and mark.ctime_ms < before_ms
        return count

    async def _for_each_ledger(
        self, check: AuditorCheck, work: Callable[[LedgerId, VersionedMetadata, set[str]], Awaitable[None]]
    ) -> bool:
        """Call `work` with every ledger and the registered bookies, several at once, and record the check as done.

        Return False, without a record, if auto-recovery is disabled meanwhile. Log errors of single ledgers. Raise
        Unreachable.
        """
        at_once = min(self.config.auditor_max_number_of_concurrent_open_ledger_operations, CHECKS_AT_ONCE_MAX)
        permits = asyncio.Semaphore(at_once)

        async def check_one(ledger: LedgerId, found: VersionedMetadata | BkctlError, up: set[str]) -> None:
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

        remaining = iter(self._cluster.ledgers.read_many(ledgers_of(self._cluster, scoped=self.scoped)))
        while step := await asyncio.to_thread(lambda: list(islice(remaining, STEP_COUNT // 4))):
            if not await asyncio.to_thread(self._settings.is_enabled):
                return False
            up = await asyncio.to_thread(available_bookies, self._cluster, scoped=False)
            await run_together(check_one(ledger, found, up) for ledger, found in step)
        if is_done := await asyncio.to_thread(self._settings.is_enabled):
            await asyncio.to_thread(self._settings.set_check_ctime_ms, check, now_ms(), scoped=self.scoped)
        return is_done


def _worst_count(
    fragments: Sequence[LedgerFragment], listed: Mapping[str, Availability], write_quorum_size: int
) -> int:
    """Return the largest number of bookies that lack one entry, by the lists of their entries.

    Between the borders of the lists' groups, presence repeats itself: one period is compared. Raises BkctlError for
    lists whose periods have too large a common multiple.
    """
    worst, left = 0, STEPS_MAX
    for fragment in fragments:
        lists = {index: listed[bookie_id] for index, bookie_id in enumerate(fragment.ensemble) if bookie_id in listed}
        first, end = fragment.first_entry_id, fragment.last_entry_id + 1
        limit = min(len(lists), write_quorum_size)
        if first >= end or worst >= limit:
            continue
        borders = {border for present in lists.values() for border in present.borders() if first < border < end}
        size = fragment.schedule.ensemble_size
        for start, stop in pairwise([first, *sorted(borders), end]):
            period = math.lcm(size, *(present.period_at(start) for present in lists.values()))
            count = min(period, stop - start)
            left -= max(count - size, 0)
            if left < 0:
                raise BkctlError(
                    f"The bookies' lists of entries {start} to {stop - 1} have periods that cannot be compared"
                )
            for entry_id in range(start, start + count):
                write_set = fragment.schedule.write_set(entry_id)
                lacking = sum(index in lists and entry_id not in lists[index] for index in write_set)
                worst = max(worst, lacking)
            if worst >= limit:
                break
    return worst


def now_ms() -> int:
    return time.time_ns() // 1_000_000
