"""The counters of a bookie, and their Prometheus text (version 0.0.4) under the names of Apache's bookie.

Counters are plain integers that one thread increments, once a batch of adds, and any thread reads.
Source: BookKeeperServerStats, PrometheusMetricsProvider, PrometheusTextFormat.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bkctl.summaries import QUANTILES, Summary

if TYPE_CHECKING:
    from bkctl.metadata.refreshed_tls import RefreshedContext
    from bkctl.storage.journal_writer import JournalBatch

log: Final = logging.getLogger("bkctl.bookie")

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

#: Requests that are rare beside adds and reads. Source: RequestStats.
REQUESTS: Final = (
    "READ_ENTRY_FENCE",
    "READ_ENTRY_LONG_POLL",
    "WRITE_LAC",
    "READ_LAC",
    "FORCE_LEDGER",
    "GET_LIST_OF_ENTRIES_OF_LEDGER",
    "GET_BOOKIE_INFO",
)


class Latency:
    """Durations of successes and of failures, observed in microseconds and shown in milliseconds."""

    __slots__ = ("failure", "success")

    def __init__(self) -> None:
        self.success = Summary()
        self.failure = Summary()

    def observe(self, seconds: float, count: int = 1, *, ok: bool = True) -> None:
        """Add a duration that `count` operations took."""
        (self.success if ok else self.failure).observe(int(seconds * 1_000_000), count)


class JournalMetrics:
    """Counters of one journal: groups, their contents, and the time to write and sync them."""

    def __init__(self) -> None:
        self.sync = Latency()
        self.queue = Latency()
        #: From an entry's way into the journal's queue until it is on disk.
        self.add = Latency()
        self.group_entries = Summary()
        self.group_bytes = Summary()
        self.written_bytes = 0

    def group_settled(
        self, batches: Sequence[JournalBatch], began_s: float, took_s: float, now_s: float, *, ok: bool
    ) -> None:
        """Add batches that were written and synced as one group, or failed."""
        for batch in batches:
            self.add.observe(now_s - batch.put_s, batch.count, ok=ok)
        self.queue.observe(began_s - batches[0].put_s)
        self.sync.observe(took_s, ok=ok)
        self.group_entries.observe(sum(batch.count for batch in batches))
        size = sum(batch.size for batch in batches)
        self.group_bytes.observe(size)
        self.written_bytes += size if ok else 0


class BookieMetrics:
    """The counters of one bookie. Those of its event loop are incremented there, at most once a batch."""

    def __init__(self) -> None:
        #: From an entry's way into a batch until it is on disk and answered.
        self.add_entry = Latency()
        self.add_entry_bytes = Summary()
        self.read_entry = Latency()
        #: Reads that needed no disk, and that `settle_reads` has not added to `read_entry`.
        self.reads_from_memory = 0
        self.read_bytes = 0
        self.flush = Latency()
        #: From a request to its answer, by Apache's names; adds, and reads that neither fence nor wait, are above.
        self.requests = {name: Latency() for name in REQUESTS}
        #: Exceptions that neither a disk, a format nor a request explains: faults of this program, logged each.
        self.unexpected_errors = 0
        #: Connected clients, and the bytes of their unfinished requests.
        self.clients: Callable[[], tuple[int, int]] = lambda: (0, 0)
        #: Connections that a server ended or turned away, by server (`bookie`, `http`) and reason.
        self.ended_connections: dict[str, Mapping[str, int]] = {}
        #: The TLS of each server, and of connections to the metadata store; None without.
        self.certificates: dict[str, RefreshedContext | None] = {}
        #: Name, kind, value, labels and help of the counters of auto-recovery in the bookie's process.
        self.auto_recovery: Callable[[], Iterable[tuple[str, str, float | Summary, Mapping[str, str], str]]] = tuple

    def adds_settled(self, count: int, size: int, seconds: float, *, ok: bool) -> None:
        """Add a batch of adds that is on disk and answered, or failed."""
        self.add_entry.observe(seconds, count, ok=ok)
        if ok and count:
            self.add_entry_bytes.observe(size // count, count)

    def note_unexpected(self, action: str, error: BaseException) -> None:
        """Count and log a fault of this program: `action` failed with `error`."""
        self.unexpected_errors += 1
        log.error("%s failed with an unexpected error", action, exc_info=error)

    def settle_reads(self) -> None:
        """Add the reads from memory to `read_entry`, as reads that took no time."""
        count, self.reads_from_memory = self.reads_from_memory, 0
        if count:
            self.read_entry.observe(0.0, count)


# --- text ------------------------------------------------------------------------------------------------------------


class PrometheusText:
    """Builds the text: each metric once with its type, then its samples."""

    def __init__(self) -> None:
        self._metrics: dict[str, list[str]] = {}

    def sample(
        self,
        name: str,
        kind: str,
        value: float | Summary | Latency,
        labels: Mapping[str, str] = {},
        help_text: str = "",
    ) -> None:
        """Add a sample of a `counter` or `gauge`, or a `summary`: of successes and failures, a Summary of successes."""
        if name not in self._metrics:
            self._metrics[name] = [f"# HELP {name} {help_text}"] if help_text else []
            self._metrics[name].append(f"# TYPE {name} {kind}")
        lines = self._metrics[name]
        if isinstance(value, Latency):
            self._outcome(lines, name, "false", value.failure, 1000, labels)
            self._outcome(lines, name, "true", value.success, 1000, labels)
        elif isinstance(value, Summary):
            self._outcome(lines, name, "false", Summary(), 1, labels)
            self._outcome(lines, name, "true", value, 1, labels)
        else:
            lines.append(f"{name}{_labels(labels)} {_text(value)}")

    def _outcome(
        self, lines: list[str], name: str, success: str, summary: Summary, divisor: int, labels: Mapping[str, str]
    ) -> None:
        for quantile, value in zip(QUANTILES, summary.quantiles(), strict=True):
            own = _labels({"success": success, "quantile": str(quantile), **labels})
            lines.append(f"{name}{own} {_text(value / divisor)}")
        own = _labels({"success": success, **labels})
        lines.append(f"{name}_count{own} {summary.count}")
        lines.append(f"{name}_sum{own} {_text(summary.sum / divisor)}")

    def text(self) -> str:
        """Return the whole text."""
        return "".join(f"{line}\n" for lines in self._metrics.values() for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        '{}="{}"'.format(name, value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n"))
        for name, value in labels.items()
    )
    return f"{{{','.join(escaped)}}}" if labels else ""


def _text(value: float) -> str:
    return "NaN" if value != value else f"{value:.16g}"


def metric_name(text: str) -> str:
    """Return any text as a part of a metric's name. Source: PrometheusMetricsProvider."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_:") else "_" for char in text)


def process_metrics(started_s: float) -> Iterator[tuple[str, str, float]]:
    """Yield name, kind and value of the operating system's counters of this process; nothing without /proc."""
    try:
        with open("/proc/self/statm") as file:
            pages = file.read().split()
        open_fds = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    page_size = os.sysconf("SC_PAGE_SIZE")
    usage = os.times()
    yield "process_cpu_seconds_total", "counter", usage.user + usage.system
    yield "process_start_time_seconds", "gauge", started_s
    yield "process_open_fds", "gauge", open_fds
    yield "process_max_fds", "gauge", os.sysconf("SC_OPEN_MAX")
    yield "process_virtual_memory_bytes", "gauge", int(pages[0]) * page_size
    yield "process_resident_memory_bytes", "gauge", int(pages[1]) * page_size
