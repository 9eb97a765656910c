"""/metrics of a bookie: each metric declared once, under Apache's name and kind if one of Apache's means the same.

Source: BookKeeperServerStats, BookieStats, JournalStats, DbLedgerStorageStats, GarbageCollectorStats.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.bookie.collector_metadata import USAGE_BUCKETS
from bkctl.bookie.metrics import REQUESTS, Latency, PrometheusText, metric_name, process_metrics
from bkctl.bookie.waiting_requests import NAMED_MAX
from bkctl.protocol.messages import AddRequest, ReadRequest
from bkctl.storage.ledger.db_ledger_storage import DbLedgerStorage, SingleDirectoryDbLedgerStorage
from bkctl.summaries import Summary

if TYPE_CHECKING:
    from pathlib import Path

    from bkctl.bookie.bookie import Bookie
    from bkctl.bookie.group_commit import JournalThread
    from bkctl.http.service import BookieProxy

#: Names of metrics that `bookie_load` reads; METRICS says what they are.
SET_ASIDE_LEDGERS: Final = "bkctl_set_aside_ledgers"
REFUSED_LEDGERS: Final = "bkctl_refused_ledgers"
UNREADABLE_LEDGERS: Final = "bkctl_unreadable_ledgers"
UNREADABLE_LEDGER: Final = "bkctl_unreadable_ledger"
UNREGISTERED_SECONDS: Final = "bkctl_unregistered_seconds"
#: Negative once it has expired. Label `server`: bookie, http, or metadata (the bookie's as a client of the store).
CERTIFICATE_EXPIRY: Final = "bookie_certificate_expiry_seconds"
CLOCK_SECONDS: Final = "bkctl_clock_seconds"
RECENT_ADDS: Final = "bkctl_recent_adds"
RECENT_SYNCS: Final = "bkctl_recent_journal_syncs"
_USAGE_STEP: Final = 10
#: The start of a process without a bookie, about.
_LOADED_S: Final = time.time()

Value = float | Summary | Latency
#: One value, or values with their labels. An iterator is read in another thread than the bookie's.
Values = Value | list[tuple[Value, Mapping[str, str]]] | Iterator[tuple[Value, Mapping[str, str]]]

_NO_LABELS: Final[Mapping[str, str]] = {}
#: Labels that are a part of the name, as in Apache's.
_IN_NAMES: Final = frozenset({"dir", "gc"})


class Meter(NamedTuple):
    """A metric of a bookie. `name` may have {labels} of its samples; `read` is called in the bookie's event loop."""

    name: str
    kind: str
    help: str
    read: Callable[[Bookie], Values]


def _journals(read: Callable[[JournalThread], Value]) -> Callable[[Bookie], Values]:
    """Return a reader of one value for each journal."""
    return lambda bookie: [
        (read(journal), {"journalIndex": str(journal.commits.number)}) for journal in bookie.commits.journals
    ]


def _db(*names: str) -> Callable[[Bookie], Values]:
    """Return a reader of a value, or of the sum of some, of each directory of DbLedgerStorage; nothing for others."""
    found: Callable[[object], Any] = attrgetter(*names)

    def values(bookie: Bookie) -> Values:
        ledgers = bookie.storage.ledgers
        directories = ledgers.directories if isinstance(ledgers, DbLedgerStorage) else ()
        return ((sum(found(one)) if len(names) > 1 else found(one), _places(one)) for one in directories)

    return values


def _places(one: SingleDirectoryDbLedgerStorage) -> dict[str, str]:
    return {"ledgerDir": str(one.ledger_directory.parent), "indexDir": str(one.index_directory.parent)}


def _entries(bookie: Bookie) -> Iterator[tuple[Value, Mapping[str, str]]]:
    """Yield the entries of scope 0 by directory, and of other scopes with a label more."""
    ledgers = bookie.storage.ledgers
    for one in ledgers.directories if isinstance(ledgers, DbLedgerStorage) else ():
        for scoped, count in one.locations.estimated_counts().items():
            yield count, _places(one) | ({"scopes": "other"} if scoped else {})


def _usages(bookie: Bookie, directories: Iterable[Path]) -> Iterator[tuple[Value, Mapping[str, str]]]:
    for directory in directories:
        name = metric_name(str(directory.parent if directory.name == "current" else directory))
        with contextlib.suppress(OSError):
            yield round(100 * bookie.files.disk_usage(directory).ratio, 3), {"dir": name}


def _collected(name: str, convert: Callable[[Any], Value] = lambda value: value) -> Callable[[Bookie], Values]:
    """Return a reader of a number of the collector; without DbLedgerStorage its metric's name has `gc`."""

    def values(bookie: Bookie) -> Values:
        collector = bookie.garbage_collector
        gc = "bookie" if bookie.config.ledger_storage == "db" else "bookie_gc"
        return [] if collector is None else [(convert(getattr(collector.stats, name)), {"gc": gc})]

    return values


def _ledgers(bookie: Bookie) -> Values:
    scoped = sum(1 for scope, _ in bookie.storage.ledgers.handles if scope)
    return [(len(bookie.storage.ledgers.handles) - scoped, {}), (scoped, {"scopes": "other"})]


def _waiting(bookie: Bookie, kind: type) -> int:
    slots = bookie.server.slots.get(kind)
    return 0 if slots is None else len(slots.waiting)


def _request(name: str, bookie: Bookie) -> Values:
    return bookie.metrics.requests[name]


def _ended_connections(bookie: Bookie) -> Values:
    ended = bookie.metrics.ended_connections.items()
    return [
        (count, {"server": server, "reason": reason})
        for server, reasons in ended
        for reason, count in sorted(dict(reasons).items())
    ]


def _expiries(bookie: Bookie) -> Values:
    return [
        (round(tls.expires_s - time.time()), {"server": server})
        for server, tls in bookie.metrics.certificates.items()
        if tls is not None and tls.expires_s is not None
    ]


# fmt: off
METRICS: Final = (
    Meter("bookie_SERVER_STATUS", "gauge", "1 while the bookie accepts entries, 0 while it is read-only.",
        lambda b: int(not b.read_only)),
    Meter("bookkeeper_server_ADD_ENTRY_REQUEST", "summary",
        "Milliseconds from an add until it is on disk and answered.", lambda b: b.metrics.add_entry),
    Meter("bookkeeper_server_ADD_ENTRY", "summary", "The same.", lambda b: b.metrics.add_entry),
    Meter(RECENT_ADDS, "gauge", "Adds that the quantiles of the last minute or two are of.",
        lambda b: b.metrics.add_entry.success.recent_count()),
    Meter("bookkeeper_server_READ_ENTRY_REQUEST", "summary", "Milliseconds of a read; those from memory take 0.",
        lambda b: b.metrics.read_entry),
    Meter("bookkeeper_server_READ_ENTRY", "summary", "The same.", lambda b: b.metrics.read_entry),
    *(
        Meter(f"bookkeeper_server_{name}{end}", "summary", f"Milliseconds of {name} requests.",
            partial(_request, name))
        for name in REQUESTS for end in ("_REQUEST", "") if end or not name.startswith("READ_ENTRY")
    ),
    Meter("bookkeeper_server_ADD_ENTRY_IN_PROGRESS", "gauge", "Adds that are not answered yet.",
        lambda b: b.commits.pending_adds + sum(each.waiting for each in b.commits.journals)),
    Meter("bookkeeper_server_ADD_ENTRY_BLOCKED", "gauge", "Connections whose adds wait for maxAddsInProgressLimit.",
        lambda b: _waiting(b, AddRequest)),
    Meter("bookkeeper_server_READ_ENTRY_IN_PROGRESS", "gauge", "Reads of disks that run or wait for their turn.",
        lambda b: b.server.reads.count + b.server.reads.in_progress_count),
    Meter("bookkeeper_server_READ_ENTRY_BLOCKED", "gauge", "Connections whose reads wait for maxReadsInProgressLimit.",
        lambda b: _waiting(b, ReadRequest)),
    Meter("bookie_BOOKIE_ADD_ENTRY_BYTES", "summary", "Bytes of an entry added.", lambda b: b.metrics.add_entry_bytes),
    Meter("bookie_WRITE_BYTES", "counter", "Bytes of entries added.", lambda b: b.metrics.add_entry_bytes.sum),
    Meter("bookie_READ_BYTES", "counter", "Bytes of entries read.", lambda b: b.metrics.read_bytes),
    Meter("bookie_ledgers_count", "gauge", "Ledgers in memory; of other scopes than 0 with the label scopes=other.",
        _ledgers),
    Meter("bookie_entries_count", "gauge", "About how many entries the index has; DbLedgerStorage only.", _entries),
    Meter(SET_ASIDE_LEDGERS, "gauge", "Ledgers whose state could not be read at the start: requests for them fail.",
        lambda b: len(b.storage.set_aside)),
    Meter(REFUSED_LEDGERS, "gauge", "Ledgers that accept no entries: the disk refused their index.",
        lambda b: len(b.storage.ledgers.unwritten)),
    Meter(UNREADABLE_LEDGERS, "gauge", "Ledgers of which a read failed within the last day; 1,000 at most.",
        lambda b: len(b.processor.requests.unreadable)),
    Meter(UNREADABLE_LEDGER, "gauge", "1 of a ledger whose read failed last; ten of them.",
        lambda b: [(1, {"ledger": str(each)}) for each in b.processor.requests.unreadable.newest(NAMED_MAX)]),
    Meter(UNREGISTERED_SECONDS, "gauge", "Seconds since the bookie last found its registration; 0 while it finds it.",
        lambda b: round(b.registration.lost_s, 3)),
    Meter(CLOCK_SECONDS, "gauge", "The bookie's clock, in seconds since 1970.", lambda b: round(time.time(), 3)),
    Meter("bookie_write_cache_size", "gauge", "Bytes of entries in memory that are in no entry log yet.",
        lambda b: b.storage.ledgers.unwritten_bytes),
    Meter("bookie_read_cache_size", "gauge", "Bytes of entries read ahead; DbLedgerStorage only.",
        _db("read_cache.size")),
    Meter("bookie_read_cache_count", "gauge", "Entries read ahead; DbLedgerStorage only.", _db("read_cache.count")),
    Meter("bookie_read_cache_hits", "counter", "Reads of entries that were read ahead.", _db("read_cache.hits")),
    Meter("bookie_read_cache_misses", "counter", "Reads of entries from an entry log.", _db("read_cache.misses")),
    Meter("bookie_write_cache_hits", "counter", "Reads of entries that were in no entry log yet.",
        _db("read_cache.write_cache_hits")),
    Meter("bookie_write_cache_misses", "counter", "Reads of other entries.",
        _db("read_cache.hits", "read_cache.misses")),
    Meter("bookie_readahead_batch_count", "summary", "Entries of each time that entries were read ahead.",
        _db("read_cache.ahead_entries")),
    Meter("bookie_readahead_batch_size", "summary", "Bytes of each time that entries were read ahead.",
        _db("read_cache.ahead_bytes")),
    Meter("bookie_read_entry", "summary",
        "Milliseconds that DbLedgerStorage took for a read; those from memory take 0.",
        lambda b: b.metrics.read_entry if isinstance(b.storage.ledgers, DbLedgerStorage) else []),
    Meter("bookie_flush", "summary", "Milliseconds of a checkpoint.", lambda b: b.metrics.flush),
    Meter("bkctl_unexpected_errors_total", "counter", "Faults of bkctl itself; the log has each.",
        lambda b: b.metrics.unexpected_errors),
    Meter("bkctl_server_connections", "gauge", "Connected clients.", lambda b: b.metrics.clients()[0]),
    Meter("bkctl_server_unfinished_request_bytes", "gauge", "Bytes of requests that have not arrived in full.",
        lambda b: b.metrics.clients()[1]),
    Meter("bkctl_server_ended_connections_total", "counter", "Connections that a server ended or turned away.",
        _ended_connections),
    Meter(CERTIFICATE_EXPIRY, "gauge", "Seconds until a certificate expires: of a server, or to the store.", _expiries),
    Meter("bookie_JOURNAL_DIRS", "gauge", "Journal directories.", lambda b: len(b.storage.journals)),
    # These two are gauges that Apache's bookie calls counters.
    Meter("bookie_journal_JOURNAL_QUEUE_SIZE", "counter", "Entries that are not on disk yet.",
        _journals(lambda journal: journal.waiting)),
    Meter("bookie_journal_JOURNAL_FORCE_WRITE_QUEUE_SIZE", "counter", "Groups that are written and synced now: 0 or 1.",
        _journals(lambda journal: int(journal.is_writing))),
    Meter("bookie_journal_JOURNAL_ADD_ENTRY", "summary",
        "Milliseconds from an entry's way into the queue until it is on disk.",
        _journals(lambda journal: journal.metrics.add)),
    Meter("bookie_journal_JOURNAL_SYNC", "summary", "Milliseconds to write and sync a group.",
        _journals(lambda journal: journal.metrics.sync)),
    Meter(RECENT_SYNCS, "gauge", "Syncs that the quantiles of the last minute or two are of.",
        _journals(lambda journal: journal.metrics.sync.success.recent_count())),
    Meter("bookie_journal_JOURNAL_QUEUE_LATENCY", "summary", "Milliseconds that a group's first entry waited.",
        _journals(lambda journal: journal.metrics.queue)),
    Meter("bookie_journal_JOURNAL_FORCE_WRITE_BATCH_ENTRIES", "summary", "Entries of a group.",
        _journals(lambda journal: journal.metrics.group_entries)),
    Meter("bookie_journal_JOURNAL_FORCE_WRITE_BATCH_BYTES", "summary", "Bytes of a group.",
        _journals(lambda journal: journal.metrics.group_bytes)),
    Meter("bookie_journal_JOURNAL_WRITE_BYTES", "counter", "Bytes written.",
        _journals(lambda journal: journal.metrics.written_bytes)),
    Meter("bookie_ledger_num_dirs", "gauge", "Ledger directories.", lambda b: len(b.storage.ledger_directories)),
    Meter("bookie_ledger_writable_dirs", "gauge", "Ledger directories that take new files.",
        lambda b: b.space.disks.not_full_count),
    Meter("bookie_ledger_dir_{dir}_usage", "gauge", "Percent of the disk of a ledger directory that is used.",
        lambda b: _usages(b, list(b.storage.ledger_directories))),
    Meter("{gc}_MAJOR_COMPACTION_TOTAL", "counter", "Major compactions.", _collected("major_compactions")),
    Meter("{gc}_MINOR_COMPACTION_TOTAL", "counter", "Minor compactions.", _collected("minor_compactions")),
    Meter("{gc}_ENTRY_LOCATION_COMPACTION_TOTAL", "counter", "Compactions of the index.",
        _collected("entry_location_compactions")),
    Meter("{gc}_DELETED_LEDGER_TOTAL", "counter", "Ledgers that were removed.", _collected("deleted_ledgers")),
    Meter("{gc}_RECLAIMED_DELETION_SPACE_BYTES", "counter", "Bytes of entry logs without a ledger that were deleted.",
        _collected("reclaimed_by_deletion_bytes")),
    Meter("{gc}_RECLAIMED_COMPACTION_SPACE_BYTES", "counter", "Bytes that compactions freed.",
        _collected("reclaimed_by_compaction_bytes")),
    Meter("{gc}_RECLAIM_FAILED_TO_DELETE", "counter", "Entry logs that could not be deleted.",
        _collected("failed_to_delete")),
    Meter("{gc}_ACTIVE_ENTRY_LOG_TOTAL", "gauge", "Entry logs, by the last round.", _collected("active_entry_logs")),
    Meter("{gc}_ACTIVE_ENTRY_LOG_SPACE_BYTES", "gauge", "Bytes of ledgers that exist, by the last round.",
        _collected("active_entry_log_bytes")),
    Meter("{gc}_ENTRY_LOG_SPACE_BYTES", "gauge", "Bytes of entry logs, by the last round.",
        _collected("entry_log_bytes")),
    Meter("{gc}_ACTIVE_LEDGER_TOTAL", "gauge", "Ledgers, by the last round.", _collected("active_ledgers")),
    Meter("{gc}_ENTRY_LOG_COMPACT_RATIO", "gauge", "The share of entry logs that the last compaction rewrote.",
        _collected("compact_ratio")),
    *(
        Meter(f"{{gc}}_entry_log_usage_buckets_le_{(index + 1) * _USAGE_STEP}", "gauge",
            "Entry logs by the percent of their bytes that ledgers use.",
            _collected("usage_buckets", itemgetter(index)))
        for index in range(USAGE_BUCKETS)
    ),
    Meter("bkctl_gc_deleted_scoped_ledgers_total", "counter", "Ledgers of other scopes than 0 that were removed.",
        _collected("deleted_scoped_ledgers")),
    Meter("bkctl_gc_unindexed_ledgers", "gauge", "Ledgers with entries here that are not in the index.",
        _collected("unindexed_ledgers")),
    Meter("bkctl_gc_scoped_held_back", "gauge", "1 while the collector keeps scoped ledgers that appear deleted.",
        _collected("scoped_held_back", lambda held: int(bool(held)))),
)
# fmt: on


async def metrics_text(local: BookieProxy) -> str:
    """Return all metrics of the bookie in Prometheus' text format."""
    values = await local.ask(_measure)
    return await asyncio.to_thread(_render, local.bookie, values)


def _measure(bookie: Bookie) -> list[Values]:
    bookie.metrics.settle_reads()
    return [metric.read(bookie) for metric in METRICS]


def _render(bookie: Bookie, values: list[Values]) -> str:
    text = PrometheusText()
    for metric, found in zip(METRICS, values, strict=True):
        for value, labels in [(found, _NO_LABELS)] if isinstance(found, float | int | Summary | Latency) else found:
            own = {label: each for label, each in labels.items() if label not in _IN_NAMES}
            text.sample(metric.name.format_map(labels), metric.kind, value, own, metric.help)
    return process_text(bookie.metrics.auto_recovery(), bookie.started_ms / 1000, text)


def process_text(
    samples: Iterable[tuple[str, str, Value, Mapping[str, str], str]],
    started_s: float = _LOADED_S,
    text: PrometheusText | None = None,
) -> str:
    """Return the metrics of auto-recovery and of this process, behind those in `text`, in Prometheus' text format."""
    text = text or PrometheusText()
    for sample in samples:
        text.sample(*sample)
    for name, kind, number in process_metrics(started_s):
        text.sample(name, kind, number, help_text="Of the operating system.")
    return text.text()
