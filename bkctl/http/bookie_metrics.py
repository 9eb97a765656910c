"""Renders /metrics of a bookie: its counters, and values measured at the request, under Apache's names if any."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from bkctl.bookie.metrics import PrometheusText, metric_name, process_metrics

if TYPE_CHECKING:
    from bkctl.bookie.bookie import Bookie
    from bkctl.http.service import BookieProxy

#: Gauge of ledgers whose requests fail, because their own state could not be read at the start.
SET_ASIDE_LEDGERS: Final = "bkctl_set_aside_ledgers"
#: Gauge of ledgers that accept no entries, because the disk refused their index at the last checkpoint.
REFUSED_LEDGERS: Final = "bkctl_refused_ledgers"
#: Gauge of ledgers of which a read failed within the last day, for the disk or for damage; 1,000 at most.
UNREADABLE_LEDGERS: Final = "bkctl_unreadable_ledgers"
#: Gauge 1 of a ledger (label `ledger`) whose read failed last; ten of them.
UNREADABLE_LEDGER: Final = "bkctl_unreadable_ledger"
#: Gauge of seconds since the bookie last found its registration in the metadata store; 0 while it finds it.
UNREGISTERED_SECONDS: Final = "bkctl_unregistered_seconds"
#: Gauge of seconds until the certificate of a server (label `server`: bookie or http) expires; negative afterwards.
CERTIFICATE_EXPIRY: Final = "bookie_certificate_expiry_seconds"
#: Gauge of the bookie's clock, in seconds since 1970.
CLOCK_SECONDS: Final = "bkctl_clock_seconds"
#: Gauges of the adds and syncs that the quantiles of the last minute or two are of.
RECENT_ADDS: Final = "bkctl_recent_adds"
RECENT_SYNCS: Final = "bkctl_recent_journal_syncs"
_USAGE_STEP: Final = 10


async def metrics_text(local: BookieProxy) -> str:
    """Return all metrics of the bookie in Prometheus' text format."""
    measured = await local.ask(_measure)
    return await asyncio.to_thread(_render, local.bookie, measured)


def _measure(bookie: Bookie) -> dict[str, Any]:
    """Return the values that only the bookie's event loop may read."""
    bookie.metrics.settle_reads()
    return {
        "writable": not bookie.read_only,
        "ledgers": len(bookie.storage.ledgers.handles),
        "clients": bookie.metrics.clients(),
        "set_aside": len(bookie.storage.set_aside),
        "refused": len(bookie.storage.ledgers.unwritten),
        "unregistered_s": bookie.registration.lost_s,
        "unreadable": bookie.processor.requests.unreadable.count(),
        "unreadable_ledgers": bookie.processor.requests.unreadable.newest(),
        "unwritten": bookie.storage.ledgers.unwritten_bytes,
        "writable_directories": len(bookie.storage.writable),
        "directories": list(bookie.storage.ledger_directories),
        "journals": len(bookie.storage.journals),
        "collector": bookie.garbage_collector,
        "started_s": bookie.started_ms / 1000,
        "storage": bookie.config.ledger_storage,
    }


def _render(bookie: Bookie, measured: dict[str, Any]) -> str:
    text = PrometheusText()
    metrics = bookie.metrics  # plain numbers, which any thread may read
    text.gauge("bookie_SERVER_STATUS", int(measured["writable"]))
    text.latency("bookkeeper_server_ADD_ENTRY_REQUEST", metrics.add_entry)
    text.gauge(RECENT_ADDS, metrics.add_entry.success.recent_count())
    text.latency("bookkeeper_server_ADD_ENTRY", metrics.add_entry)
    text.latency("bookkeeper_server_READ_ENTRY_REQUEST", metrics.read_entry)
    text.latency("bookkeeper_server_READ_ENTRY", metrics.read_entry)
    for name, latency in metrics.requests.items():
        text.latency(f"bookkeeper_server_{name}_REQUEST", latency)
        if not name.startswith("READ_ENTRY"):  # Apache's divides these into steps
            text.latency(f"bookkeeper_server_{name}", latency)
    text.summary("bookie_BOOKIE_ADD_ENTRY_BYTES", metrics.add_entry_bytes)
    text.counter("bookie_WRITE_BYTES", metrics.add_entry_bytes.sum)
    text.counter("bookie_READ_BYTES", metrics.read_bytes)
    text.gauge("bookie_ledgers_count", measured["ledgers"])
    text.gauge(SET_ASIDE_LEDGERS, measured["set_aside"])
    text.gauge(REFUSED_LEDGERS, measured["refused"])
    text.gauge(UNREADABLE_LEDGERS, measured["unreadable"])
    for ledger in measured["unreadable_ledgers"]:
        text.gauge(UNREADABLE_LEDGER, 1, {"ledger": str(ledger)})
    text.gauge(UNREGISTERED_SECONDS, round(measured["unregistered_s"], 3))
    text.gauge(CLOCK_SECONDS, round(time.time(), 3))
    text.gauge("bookie_write_cache_size", measured["unwritten"])
    text.latency("bookie_flush", metrics.flush)
    text.counter("bkctl_unexpected_errors_total", metrics.unexpected_errors)
    connections, unfinished_bytes = measured["clients"]
    text.gauge("bkctl_server_connections", connections)
    text.gauge("bkctl_server_unfinished_request_bytes", unfinished_bytes)
    for server, reasons in metrics.ended_connections.items():
        for reason, count in sorted(dict(reasons).items()):
            text.counter("bkctl_server_ended_connections_total", count, {"server": server, "reason": reason})
    for server, tls in metrics.certificates.items():
        if tls is not None and tls.expires_s is not None:
            text.gauge(CERTIFICATE_EXPIRY, round(tls.expires_s - time.time()), {"server": server})
    _journals(text, bookie, measured)
    _directories(text, bookie, measured)
    _collector(text, measured)
    for recovery_sample in metrics.auto_recovery():
        text.sample(*recovery_sample)
    for name, kind, value in process_metrics(measured["started_s"]):
        text.number(name, kind, value)
    return text.text()


def _journals(text: PrometheusText, bookie: Bookie, measured: dict[str, Any]) -> None:
    text.gauge("bookie_JOURNAL_DIRS", measured["journals"])
    for commits, journal in zip(bookie.storage.commits, bookie.metrics.journals, strict=False):
        labels = {"journalIndex": str(commits.number)}
        text.gauge("bookie_journal_JOURNAL_QUEUE_SIZE", commits.waiting, labels)
        text.latency("bookie_journal_JOURNAL_SYNC", journal.sync, labels)
        text.gauge(RECENT_SYNCS, journal.sync.success.recent_count(), labels)
        text.latency("bookie_journal_JOURNAL_QUEUE_LATENCY", journal.queue, labels)
        text.summary("bookie_journal_JOURNAL_FORCE_WRITE_BATCH_ENTRIES", journal.group_entries, labels)
        text.summary("bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES", journal.group_bytes, labels)
        text.counter("bookie_journal_JOURNAL_WRITE_BYTES", journal.written_bytes, labels)


def _directories(text: PrometheusText, bookie: Bookie, measured: dict[str, Any]) -> None:
    directories = measured["directories"]
    text.gauge("bookie_ledger_num_dirs", len(directories))
    text.gauge("bookie_ledger_writable_dirs", measured["writable_directories"])
    for directory in directories:
        name = metric_name(str(directory.parent if directory.name == "current" else directory))
        try:
            usage = bookie.files.disk_usage(directory)
        except OSError:
            continue
        text.gauge(f"bookie_ledger_dir_{name}_usage", round(100 * usage.ratio, 3))


def _collector(text: PrometheusText, measured: dict[str, Any]) -> None:
    """Add the collector's metrics; with DbLedgerStorage the names lack `gc`. Source: GarbageCollectorStats."""
    collector = measured["collector"]
    if collector is None:
        return
    stats = collector.stats
    scope = "bookie" if measured["storage"] == "db" else "bookie_gc"
    text.counter(f"{scope}_MAJOR_COMPACTION_TOTAL", stats.major_compactions)
    text.counter(f"{scope}_MINOR_COMPACTION_TOTAL", stats.minor_compactions)
    text.counter(f"{scope}_ENTRY_LOCATION_COMPACTION_TOTAL", stats.entry_location_compactions)
    text.counter(f"{scope}_DELETED_LEDGER_TOTAL", stats.deleted_ledgers)
    text.counter(f"{scope}_RECLAIMED_DELETION_SPACE_BYTES", stats.reclaimed_by_deletion_bytes)
    text.counter(f"{scope}_RECLAIMED_COMPACTION_SPACE_BYTES", stats.reclaimed_by_compaction_bytes)
    text.counter(f"{scope}_RECLAIM_FAILED_TO_DELETE", stats.failed_to_delete)
    text.gauge(f"{scope}_ACTIVE_ENTRY_LOG_TOTAL", stats.active_entry_logs)
    text.gauge(f"{scope}_ACTIVE_ENTRY_LOG_SPACE_BYTES", stats.active_entry_log_bytes)
    text.gauge(f"{scope}_ENTRY_LOG_SPACE_BYTES", stats.entry_log_bytes)
    text.gauge(f"{scope}_ACTIVE_LEDGER_TOTAL", stats.active_ledgers)
    text.gauge(f"{scope}_ENTRY_LOG_COMPACT_RATIO", stats.compact_ratio)
    for index, count in enumerate(stats.usage_buckets):
        text.gauge(f"{scope}_entry_log_usage_buckets_le_{(index + 1) * _USAGE_STEP}", count)
    text.counter("bkctl_gc_deleted_scoped_ledgers_total", stats.deleted_scoped_ledgers)
    text.gauge("bkctl_gc_unindexed_ledgers", stats.unindexed_ledgers)
    text.gauge("bkctl_gc_scoped_held_back", int(bool(stats.scoped_held_back)))
