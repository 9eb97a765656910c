"""The schedule of compactions of a bookie's entry logs: intervals, thresholds, suspension and forced rounds.

Source: GarbageCollectorThread.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, NamedTuple

from bkctl.config import BookieConfig
from bkctl.errors import UsageError

MAJOR: Final = "major"
MINOR: Final = "minor"


class ForcedRound(NamedTuple):
    """A round of garbage collection that an operator asked for.

    `major` and `minor` None: with such a compaction unless it is suspended.
    """

    major: bool | None = None
    minor: bool | None = None
    accept_scoped_deletes: bool = False


class CompactionSettings(NamedTuple):
    """The settings of one kind of compaction. A threshold is a usage from 0 to 1, an interval is in seconds."""

    threshold: float
    interval: int
    time_max_ms: int

    @classmethod
    def of(cls, config: BookieConfig, kind: str) -> CompactionSettings:
        """Return the settings of major or minor compaction."""
        if kind == MAJOR:
            return cls(
                config.major_compaction_threshold,
                config.major_compaction_interval,
                config.major_compaction_max_time_millis,
            )
        return cls(
            config.minor_compaction_threshold, config.minor_compaction_interval, config.minor_compaction_max_time_millis
        )

    @property
    def is_enabled(self) -> bool:
        """True if compactions of this kind run by themselves."""
        return self.threshold > 0 and self.interval > 0


def check_compaction_settings(config: BookieConfig) -> None:
    """Raise UsageError for settings with which Apache's bookie does not start. Source: GarbageCollectorThread."""
    where = config.conf_path or "The configuration"
    too_short = f"is shorter than gcWaitTime, {config.gc_wait_time} ms"
    minor, major = CompactionSettings.of(config, MINOR), CompactionSettings.of(config, MAJOR)
    for name, settings in ((MINOR, minor), (MAJOR, major)):
        if settings.threshold > 0 and 0 < settings.interval * 1000 < config.gc_wait_time:
            raise UsageError(f"{where}: {name}CompactionInterval of {settings.interval} s {too_short}")
    interval = config.entry_location_compaction_interval
    if 0 < interval * 1000 < config.gc_wait_time:
        raise UsageError(f"{where}: entryLocationCompactionInterval of {interval} s {too_short}")
    if not minor.is_enabled or not major.is_enabled:
        return
    for name, low, high, unit in (
        ("Threshold", minor.threshold, major.threshold, ""),
        ("Interval", minor.interval, major.interval, " s"),
    ):
        if low >= high:
            raise UsageError(
                f"{where}: minorCompaction{name} {low}{unit} is not below majorCompaction{name} {high}{unit}"
            )


class CompactionSchedule:
    """Decides which compactions a round has. Any thread may suspend them; the collector's thread asks what is due.

    Times are in ms of `clock_ms`, which is never set back, and begin with the schedule's creation.
    """

    def __init__(self, config: BookieConfig, clock_ms: Callable[[], int]) -> None:
        self._config = config
        self._clock_ms = clock_ms
        self._suspended: set[str] = set()
        self._suspended_by_disks: set[str] = set()
        now_ms = clock_ms()
        self.last_ms = {MAJOR: now_ms, MINOR: now_ms}
        self.last_locations_ms = now_ms
        self._locations_delay_ms = self._new_locations_delay()

    def use(self, config: BookieConfig) -> None:
        """Take thresholds and intervals from `config` from now on."""
        self._config = config

    def suspend(self, kind: str) -> None:
        """Begin no compaction of a kind until `resume`."""
        self._suspended.add(kind)

    def resume(self, kind: str) -> None:
        """Allow compactions of a kind again."""
        self._suspended.discard(kind)

    def suspend_for_disks(self, *, full: bool, almost_full: bool) -> None:
        """Suspend compaction, major first, while ledger directories are full: it needs space before it frees some."""
        self._suspended_by_disks = {MAJOR, MINOR} if full else {MAJOR} if almost_full else set()

    def is_suspended(self, kind: str) -> bool:
        """Return whether an operator or full disks suspend compactions of a kind."""
        return kind in self._suspended or kind in self._suspended_by_disks

    def suspended_by_disks(self) -> str:
        """Return why and how full disks suspend compaction; "" if they do not."""
        if not self._suspended_by_disks:
            return ""
        kinds = " and ".join(kind for kind in (MAJOR, MINOR) if kind in self._suspended_by_disks)
        limit = "diskUsageThreshold" if MINOR in self._suspended_by_disks else "diskUsageWarnThreshold"
        return f"{kinds} compaction is suspended while ledger directories are above {limit}"

    def due(self, forced: ForcedRound | None) -> str | None:
        """Return the kind of compaction that is due now: MAJOR, MINOR or None."""
        now_ms = self._clock_ms()
        return next((kind for kind in (MAJOR, MINOR) if self._is_due(kind, forced, now_ms)), None)

    def _is_due(self, kind: str, forced: ForcedRound | None, now_ms: int) -> bool:
        settings = CompactionSettings.of(self._config, kind)
        wanted = None if forced is None else forced.major if kind == MAJOR else forced.minor
        if wanted is False or (wanted is None and self.is_suspended(kind)):
            return False
        if forced is not None:
            return settings.is_enabled or (self._config.force_allow_compaction and 0 < settings.threshold < 1)
        return settings.is_enabled and now_ms - self.last_ms[kind] > settings.interval * 1000

    def compacted(self, kind: str) -> None:
        """Count the intervals from now: a major compaction includes a minor one."""
        self.last_ms[MINOR] = self._clock_ms()
        if kind == MAJOR:
            self.last_ms[MAJOR] = self.last_ms[MINOR]

    @property
    def are_locations_due(self) -> bool:
        """True if the databases of entry locations are to be compacted now."""
        interval_ms = self._config.entry_location_compaction_interval * 1000
        passed_ms = self._clock_ms() - self.last_locations_ms
        return interval_ms > 0 and passed_ms > interval_ms + self._locations_delay_ms

    def locations_compacted(self) -> None:
        """Count the interval of entry locations from now."""
        self.last_locations_ms = self._clock_ms()
        self._locations_delay_ms = self._new_locations_delay()

    def _new_locations_delay(self) -> int:
        """Return a random delay: bookies that started together do not all compact their databases at once."""
        interval_ms = self._config.entry_location_compaction_interval * 1000
        return random.randrange(interval_ms) if interval_ms > 0 else 0
