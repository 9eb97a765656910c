"""The auditor's periodic checks of all ledgers.

Source: AuditorCheckAllLedgersTask, AuditorPlacementPolicyCheckTask, AuditorReplicasCheckTask.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Final

from bkctl.client.ledger_survey import LedgerSurvey
from bkctl.client.placement import Adherence
from bkctl.errors import BkctlError, LedgerNotFound, Unreachable
from bkctl.metadata.replication_failures import ReplicationFailures
from bkctl.metadata.underreplication import AuditorCheck, AutoRecoveryState
from bkctl.replication.checker import IN_FLIGHT_COUNT_MAX, LedgerChecker
from bkctl.replication.marking import STEP_COUNT, available_bookies, ledgers_of
from bkctl.replication.stats import AuditorStats
from bkctl.tasks import run_together

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.config import BookieConfig
    from bkctl.formats.availability import Availability
    from bkctl.ids import LedgerId
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.replication.fragments import LedgerFragment

log: Final = logging.getLogger("bkctl.replication")

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
