"""Counters of auditors and replication workers, and their samples for /metrics. Source: ReplicationStats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bkctl.summaries import Summary


@dataclass
class AuditorStats:
    """Counters of an auditor since its start, under Apache's names in lower case. Source: AuditorStats."""

    #: Of each audit that found lost bookies.
    num_under_replicated_ledgers: Summary = field(default_factory=Summary)
    num_ledgers_checked: int = 0
    num_bookie_audits_delayed: int = 0
    num_delayed_bookie_audits_cancelled: int = 0
    num_skipping_check_task_times: int = 0
    #: By the last check of each kind.
    num_underreplicated_ledgers_elapsed_recovery_grace_period: int = 0
    num_ledgers_not_adhering_to_placement_policy: int = 0
    num_ledgers_softly_adhering_to_placement_policy: int = 0
    num_ledgers_having_no_replica_of_an_entry: int = 0
    num_ledgers_having_less_than_aq_replicas_of_an_entry: int = 0
    num_ledgers_having_less_than_wq_replicas_of_an_entry: int = 0
    audit_count: int = 0
    audit_failed_count: int = 0


_AUDITOR_GAUGES: Final = (
    "num_underreplicated_ledgers_elapsed_recovery_grace_period",
    "num_ledgers_not_adhering_to_placement_policy",
    "num_ledgers_softly_adhering_to_placement_policy",
    "num_ledgers_having_no_replica_of_an_entry",
    "num_ledgers_having_less_than_aq_replicas_of_an_entry",
    "num_ledgers_having_less_than_wq_replicas_of_an_entry",
)


@dataclass
class WorkerStats:
    """Counters of a worker since its start, under Apache's names in lower case. Source: ReplicationStats."""

    num_full_or_partial_ledgers_replicated: int = 0
    num_not_adhering_placement_ledgers_replicated: int = 0
    num_entries_written: int = 0
    num_bytes_written: Summary = field(default_factory=Summary)
    num_defer_ledger_lock_release_of_failed_ledger: int = 0
    num_entries_unable_to_read_for_replication: int = 0
    #: Ledgers that were locked and worked on, and the failed ones among them.
    rereplicate_count: int = 0
    rereplicate_failed_count: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)


class Sample(NamedTuple):
    """A value for /metrics: `kind` is `counter`, `gauge`, or `summary` with a Summary."""

    name: str
    kind: str
    value: float | Summary
    labels: Mapping[str, str]


def _kind(name: str, value: float | Summary) -> str:
    if isinstance(value, Summary):
        return "summary"
    return "gauge" if name in _AUDITOR_GAUGES else "counter"


def auditor_samples(stats: AuditorStats, *, scoped: bool, attempt_count: int, elected: bool) -> Iterator[Sample]:
    """Yield the samples of one auditor and its election; the label `scopes` distinguishes the two auditors."""
    labels = {"scopes": "other" if scoped else "0"}
    for name, value in vars(stats).items():
        yield Sample(f"auditor_{name.upper()}", _kind(name, value), value, labels)
    yield Sample("auditor_election_attempts", "counter", attempt_count, labels)
    yield Sample("auditor_elected", "gauge", int(elected), labels)


def worker_samples(stats: WorkerStats) -> Iterator[Sample]:
    for name, value in vars(stats).items():
        if name.startswith("num_"):
            yield Sample(f"replication_worker_{name.upper()}", _kind(name, value), value, {})
    failed = stats.rereplicate_failed_count
    for success, count in (("true", stats.rereplicate_count - failed), ("false", failed)):
        yield Sample("replication_worker_rereplicate_count", "counter", count, {"success": success})
    for name, count in sorted(stats.exceptions.items()):
        yield Sample(f"replication_worker_exceptions_{name}", "counter", count, {})
