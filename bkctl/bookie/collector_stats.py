"""Counters and states of garbage collection. Source: GarbageCollectorStats, GarbageCollectionStatus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

#: Classes of usage in which entry logs are counted. Source: ENTRY_LOG_USAGE_SEGMENT_COUNT.
USAGE_BUCKETS: Final = 10


class GarbageCollectionStatus(NamedTuple):
    """The state of one garbage collector of a bookie; DbLedgerStorage has one for each ledger directory.

    Times are milliseconds since 1970, of the last round; before the first round, of the bookie's start.
    Source: GarbageCollectionStatus.
    """

    force_compacting: bool
    major_compacting: bool
    minor_compacting: bool
    last_major_compaction_time: int
    last_minor_compaction_time: int
    last_entry_location_compaction_time: int
    major_compaction_counter: int
    minor_compaction_counter: int
    entry_location_compaction_counter: int
    #: The reason why the last round kept scoped ledgers that appear deleted; only our bookies report it.
    scoped_deletes_held_back: str | None = None


@dataclass(slots=True)
class GarbageCollectorStats:
    """Counters since the start, and gauges of the last round. The collector's thread writes, any thread reads."""

    rounds: int = 0
    failed_rounds: int = 0
    deleted_ledgers: int = 0
    deleted_scoped_ledgers: int = 0
    deleted_overreplicated_ledgers: int = 0
    major_compactions: int = 0
    minor_compactions: int = 0
    entry_location_compactions: int = 0
    reclaimed_by_deletion_bytes: int = 0
    reclaimed_by_compaction_bytes: int = 0
    failed_to_delete: int = 0
    compacted_entries: int = 0
    active_ledgers: int = 0
    active_entry_logs: int = 0
    active_entry_log_bytes: int = 0
    entry_log_bytes: int = 0
    #: Compacted logs / all logs, of the last compaction.
    compact_ratio: float = 0.0
    #: Logs by usage, in tenths.
    usage_buckets: list[int] = field(default_factory=lambda: [0] * USAGE_BUCKETS)
    #: The reason why the last round collected no scoped ledgers; "" when it did.
    scoped_held_back: str = ""
    #: The first thing that the last round could not do, and why; "" when it did all.
    problem: str = ""
    #: Ledgers that exist, name this bookie and have entries here, and are not in its index: their entry logs stay.
    #: Counted as far as the last round had to ask.
    unindexed_ledgers: int = 0

    @property
    def reclaimed_bytes(self) -> int:
        """The bytes of entry logs that were removed or compacted."""
        return self.reclaimed_by_deletion_bytes + self.reclaimed_by_compaction_bytes

    def note_problem(self, problem: str) -> None:
        """Keep the first problem of a round."""
        self.problem = self.problem or problem
