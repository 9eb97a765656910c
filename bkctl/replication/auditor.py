"""The auditor: finds ledgers that lack replicas, and marks them for the replication workers.

One auditor is elected for scope 0, by Apache's own votes, so it is one of Apache's or of ours; another one for all
scopes ≠ 0, which Apache's auditors do not see. An auditor marks ledgers of lost bookies (after the lost-bookie recovery
delay), and checks every ledger periodically. Source: Auditor, AuditorBookieCheckTask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from bkctl.errors import BkctlError
from bkctl.metadata.underreplication import AuditorCheck, AutoRecoverySettings
from bkctl.replication.election import BACK_OFF_S, LOOK_AGAIN_S
from bkctl.replication.ledger_checks import LedgerChecks, now_ms
from bkctl.replication.marking import LostBookies, audit_bookies, available_bookies
from bkctl.replication.signals import Signal, watching
from bkctl.replication.stats import AuditorStats
from bkctl.tasks import cancel_and_wait

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.config import BookieConfig

log: Final = logging.getLogger("bkctl.replication")


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
        """Move the next time past `now_s`."""
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
            async with (
                watching(self._cluster.bookies.watch, changed.set),
                watching(self._settings.watch, changed.set),
            ):
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
        self._periodic = [_PeriodicCheck(self._check_bookies, interval_s, time.monotonic())]
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
        await self._run_due_checks()
        due_s = min(lost.due_s, *(check.due_s for check in self._periodic))
        return LOOK_AGAIN_S if self._is_checking else max(0.0, due_s - time.monotonic())

    @property
    def _is_checking(self) -> bool:
        """True while a check of all ledgers runs."""
        return self._check is not None and not self._check.done()

    async def _run_due_checks(self) -> None:
        for check in self._periodic:
            if check.due_s <= time.monotonic() and not self._is_checking:
                check.schedule_next(time.monotonic())
                if self._lost.waiting:
                    # The delay says that ledgers of the lost bookie must not be marked yet.
                    self.stats.num_skipping_check_task_times += 1
                else:
                    await check.run()

    async def _check_bookies(self) -> None:
        self._audit_is_due = True
        await self._audit()

    async def _audit(self) -> None:
        """Mark the ledgers of lost bookies; an interrupted audit stays due."""
        is_whole = True

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
