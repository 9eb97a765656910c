"""Counters of auditors and replication workers, and their samples for /metrics. Source: ReplicationStats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from bkctl.summaries import Summary


def _metric(kind: str, help_text: str) -> Any:
    """Return a field that is a metric, 0 at first."""
    return field(default_factory=Summary if kind == "summary" else int, metadata={"kind": kind, "help": help_text})


@dataclass
class AuditorStats:
    """Counters of an auditor since its start, under Apache's names in lower case. Source: AuditorStats."""

    num_under_replicated_ledgers: Summary = _metric("summary", "Ledgers of each audit that found lost bookies.")  # noqa: RUF009 - a field
    num_ledgers_checked: int = _metric("counter", "Ledgers that the check of all ledgers read.")
    num_bookie_audits_delayed: int = _metric("counter", "Audits that waited for lost bookies to return.")
    num_delayed_bookie_audits_cancelled: int = _metric("counter", "Delayed audits whose bookies returned.")
    num_skipping_check_task_times: int = _metric("counter", "Checks left out while a lost bookie's delay ran.")
    num_underreplicated_ledgers_elapsed_recovery_grace_period: int = _metric(
        "gauge", "Ledgers under-replicated for longer than the grace period, at the last look."
    )
    num_ledgers_not_adhering_to_placement_policy: int = _metric("gauge", "Ledgers in too few racks, at the last look.")
    num_ledgers_softly_adhering_to_placement_policy: int = _metric(
        "gauge", "Ledgers that adhere to the placement policy with the bookies there are, at the last look."
    )
    num_ledgers_having_no_replica_of_an_entry: int = _metric(
        "gauge", "Ledgers with an entry that no bookie has, by the last check of replicas."
    )
    num_ledgers_having_less_than_aq_replicas_of_an_entry: int = _metric(
        "gauge", "Ledgers with an entry on fewer bookies than the ack quorum, by the last check of replicas."
    )
    num_ledgers_having_less_than_wq_replicas_of_an_entry: int = _metric(
        "gauge", "Ledgers with an entry on fewer bookies than the write quorum, by the last check of replicas."
    )
    audit_count: int = _metric("counter", "Audits.")
    audit_failed_count: int = _metric("counter", "Audits that failed.")


@dataclass
class WorkerStats:
    """Counters of a worker since its start, under Apache's names in lower case. Source: ReplicationStats."""

    num_full_or_partial_ledgers_replicated: int = _metric("counter", "Ledgers that were replicated.")
    num_not_adhering_placement_ledgers_replicated: int = _metric("counter", "Ledgers moved to other racks.")
    num_entries_read: int = _metric("counter", "Entries read to copy them.")
    num_bytes_read: Summary = _metric("summary", "Bytes of each entry read.")  # noqa: RUF009 - a field
    num_entries_written: int = _metric("counter", "Entries written to bookies that lacked them.")
    num_bytes_written: Summary = _metric("summary", "Bytes of each write.")  # noqa: RUF009 - a field
    num_defer_ledger_lock_release_of_failed_ledger: int = _metric("counter", "Failed ledgers that stay locked a while.")
    num_entries_unable_to_read_for_replication: int = _metric("counter", "Entries that no bookie could give.")
    #: Ledgers that were locked and worked on, and the failed ones among them.
    rereplicate_count: int = 0
    rereplicate_failed_count: int = 0
    exceptions: Counter[str] = field(default_factory=Counter)

    def entry_read(self, size_bytes: int) -> None:
        self.num_entries_read += 1
        self.num_bytes_read.observe(size_bytes)

    def entries_written(self, entry_count: int, size_bytes: int) -> None:
        self.num_entries_written += entry_count
        self.num_bytes_written.observe(size_bytes)


class Sample(NamedTuple):
    """A value for /metrics: `kind` is `counter`, `gauge`, or `summary` with a Summary."""

    name: str
    kind: str
    value: float | Summary
    labels: Mapping[str, str]
    help_text: str = ""


def declared_samples(prefix: str, stats: AuditorStats | WorkerStats, labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of the fields that are declared as metrics."""
    for each in fields(stats):
        if each.metadata:
            value = getattr(stats, each.name)
            yield Sample(f"{prefix}_{each.name.upper()}", each.metadata["kind"], value, labels, each.metadata["help"])


def auditor_samples(stats: AuditorStats, *, scoped: bool, attempt_count: int, elected: bool) -> Iterator[Sample]:
    """Yield the samples of one auditor and its election; the auditor of other scopes than 0 has the label `scopes`."""
    labels = {"scopes": "other"} if scoped else {}
    yield from declared_samples("auditor", stats, labels)
    yield Sample("auditor_election_attempts", "counter", attempt_count, labels, "Times that a vote was cast.")
    yield Sample("auditor_elected", "gauge", int(elected), labels, "1 while this process is the auditor.")


def worker_samples(stats: WorkerStats) -> Iterator[Sample]:
    """Yield the samples of the worker."""
    yield from declared_samples("replication_worker", stats, {})
    failed = stats.rereplicate_failed_count
    for success, count in (("true", stats.rereplicate_count - failed), ("false", failed)):
        text = "Ledgers that were locked and worked on."
        yield Sample("replication_worker_rereplicate_count", "counter", count, {"success": success}, text)
    for name, count in sorted(stats.exceptions.items()):
        yield Sample(f"replication_worker_exceptions_{name}", "counter", count, {}, "Errors of this class.")
