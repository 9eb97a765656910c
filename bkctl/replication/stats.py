"""Counters of auditors and replication workers, and their samples for /metrics. Source: ReplicationStats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from bkctl.summaries import Summary


def _declared(kind: str, help_text: str) -> dict[str, str]:
    """Return the metadata of a field that is a metric."""
    return {"kind": kind, "help": help_text}


@dataclass
class AuditorStats:
    """Counters of an auditor since its start, under Apache's names in lower case. Source: AuditorStats."""

    num_under_replicated_ledgers: Summary = field(
        default_factory=Summary, metadata=_declared("summary", "Ledgers of each audit that found lost bookies.")
    )
    num_ledgers_checked: int = field(
        default=0, metadata=_declared("counter", "Ledgers that the check of all ledgers read.")
    )
    num_bookie_audits_delayed: int = field(
        default=0, metadata=_declared("counter", "Audits that waited for lost bookies to return.")
    )
    num_delayed_bookie_audits_cancelled: int = field(
        default=0, metadata=_declared("counter", "Delayed audits whose bookies returned.")
    )
    num_skipping_check_task_times: int = field(
        default=0, metadata=_declared("counter", "Checks left out while auto-recovery was disabled.")
    )
    num_underreplicated_ledgers_elapsed_recovery_grace_period: int = field(
        default=0,
        metadata=_declared("gauge", "Ledgers under-replicated for longer than the grace period, at the last look."),
    )
    num_ledgers_not_adhering_to_placement_policy: int = field(
        default=0, metadata=_declared("gauge", "Ledgers in too few racks, at the last look.")
    )
    num_ledgers_softly_adhering_to_placement_policy: int = field(
        default=0,
        metadata=_declared(
            "gauge", "Ledgers that adhere to the placement policy with the bookies there are, at the last look."
        ),
    )
    num_ledgers_having_no_replica_of_an_entry: int = field(
        default=0,
        metadata=_declared("gauge", "Ledgers with an entry that no bookie has, by the last check of replicas."),
    )
    num_ledgers_having_less_than_aq_replicas_of_an_entry: int = field(
        default=0,
        metadata=_declared(
            "gauge", "Ledgers with an entry on fewer bookies than the ack quorum, by the last check of replicas."
        ),
    )
    num_ledgers_having_less_than_wq_replicas_of_an_entry: int = field(
        default=0,
        metadata=_declared(
            "gauge", "Ledgers with an entry on fewer bookies than the write quorum, by the last check of replicas."
        ),
    )
    audit_count: int = field(default=0, metadata=_declared("counter", "Audits."))
    audit_failed_count: int = field(default=0, metadata=_declared("counter", "Audits that failed."))


@dataclass
class WorkerStats:
    """Counters of a worker since its start, under Apache's names in lower case. Source: ReplicationStats."""

    num_full_or_partial_ledgers_replicated: int = field(
        default=0, metadata=_declared("counter", "Ledgers that were replicated.")
    )
    num_not_adhering_placement_ledgers_replicated: int = field(
        default=0, metadata=_declared("counter", "Ledgers moved to other racks.")
    )
    num_entries_read: int = field(default=0, metadata=_declared("counter", "Entries read to copy them."))
    num_bytes_read: Summary = field(default_factory=Summary, metadata=_declared("summary", "Bytes of each entry read."))
    num_entries_written: int = field(
        default=0, metadata=_declared("counter", "Entries written to bookies that lacked them.")
    )
    num_bytes_written: Summary = field(default_factory=Summary, metadata=_declared("summary", "Bytes of each write."))
    num_defer_ledger_lock_release_of_failed_ledger: int = field(
        default=0, metadata=_declared("counter", "Failed ledgers that stay locked a while.")
    )
    num_entries_unable_to_read_for_replication: int = field(
        default=0, metadata=_declared("counter", "Entries that no bookie could give.")
    )
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
