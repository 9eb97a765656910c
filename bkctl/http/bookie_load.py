"""The load of a cluster's bookies, read from their HTTP servers: requests, latencies, journals, disks, collections.

Apache's bookies and ours publish the same metrics. Source: BookKeeperServerStats, BookieStats, JournalStats,
GarbageCollectorStats, PrometheusTextFormat.
"""

from __future__ import annotations

import io
import math
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from bkctl.errors import BkctlError, Corrupt, ProtocolError, TimedOut, Unreachable
from bkctl.http.bookie_client import BookieApi, DiskSpace, GarbageCollection
from bkctl.http.client import shortened
from bkctl.http.server_url import bookie_url

if TYPE_CHECKING:
    from bkctl.http.client import ApiClient
    from bkctl.metadata.cluster import Cluster, RegisteredBookie

T = TypeVar("T")

#: Marks of under-replicated ledgers that one look reads.
MARKS_MAX: Final = 1000


class Percentiles(NamedTuple):
    """Percentiles of durations in milliseconds, of the last minute or two; None where nothing was measured."""

    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    p999_ms: float | None


class LoadCounts(NamedTuple):
    """Numbers of a bookie that only grow while it runs; None where the bookie does not publish one."""

    adds: float | None
    reads: float | None
    added_bytes: float | None
    read_bytes: float | None
    journal_bytes: float | None


NO_COUNTS: Final = LoadCounts(None, None, None, None, None)


class BookieReading(NamedTuple):
    """A bookie's numbers at one moment, `at_s` on the monotonic clock; `problem` says why some are missing."""

    at_s: float
    counts: LoadCounts
    add: Percentiles
    read: Percentiles
    journal_sync: Percentiles
    journal_queue: Percentiles
    journal_waiting: int | None
    ledger_count: int | None
    major_compactions: int | None
    minor_compactions: int | None
    reclaimed_bytes: int | None
    disk: DiskSpace | None
    #: forced, major, minor, suspended or idle.
    collection: str | None
    problem: str | None


class BookieLoad(NamedTuple):
    """A bookie, its numbers, and their growth a second since the look before; `problem` says why some are missing."""

    bookie: RegisteredBookie
    reading: BookieReading | None
    per_second: LoadCounts
    #: Ledgers that lack replicas on this bookie, among the marks that were read.
    underreplicated_count: int
    problem: str | None


class ClusterLoad(NamedTuple):
    """All bookies of a cluster by id, and its under-replicated ledgers, counted to MARKS_MAX."""

    bookies: tuple[BookieLoad, ...]
    underreplicated_count: int
    #: Since when no auditor looks for ledgers that lack replicas, in words; None while one does.
    not_audited: str | None = None

    @property
    def underreplication(self) -> str | None:
        """The number of under-replicated ledgers in words; None if there are none while an auditor runs."""
        if not self.underreplicated_count:
            return self.not_audited
        more = "at least " if self.underreplicated_count >= MARKS_MAX else ""
        verb = "ledger is" if self.underreplicated_count == 1 else "ledgers are"
        return f"{more}{self.underreplicated_count:,} {verb} under-replicated"


class Samples:
    """The samples of one answer, by name. A value of several journals, threads or directories is summed up."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._by_name: dict[str, list[Metric]] = defaultdict(list)
        for metric in metrics:
            self._by_name[metric.name].append(metric)

    def total(self, *names: str) -> float | None:
        """Return the sum of the samples of the first of `names` that has any."""
        for name in names:
            values = [metric.value for metric in self._by_name.get(name, ()) if math.isfinite(metric.value)]
            if values:
                return sum(values)
        return None

    def whole(self, *names: str) -> int | None:
        """Return `total` as a whole number."""
        value = self.total(*names)
        return None if value is None else int(value)

    def collected(self, *names: str) -> int | None:
        """Return the sum of a garbage collector's metrics; only DbLedgerStorage leaves `gc` out of their names."""
        values = [self.whole(f"bookie_{name}", f"bookie_gc_{name}") for name in names]
        return None if None in values else sum(value for value in values if value is not None)

    def percentiles(self, name: str) -> Percentiles:
        """Return the percentiles of successes; of several series the slowest."""
        slowest: dict[str, float] = {}
        for metric in self._by_name.get(name, ()):
            quantile = metric.labels.get("quantile")
            if quantile is not None and metric.labels.get("success") != "false" and math.isfinite(metric.value):
                slowest[quantile] = max(metric.value, slowest.get(quantile, 0.0))
        return Percentiles(*(slowest.get(quantile) for quantile in ("0.5", "0.95", "0.99", "0.999")))


def read_bookie(api: BookieApi) -> BookieReading:
    """Ask a bookie for its metrics, disks and garbage collection.

    An endpoint that the bookie refuses or lacks leaves its numbers None. Raise Unreachable or TimedOut if the server
    does not answer at all.
    """
    problems: list[str] = []
    samples = Samples(())
    disk: DiskSpace | None = None
    collection: str | None = None
    try:
        samples = Samples(parse_metrics(api.metrics(), f"{api.client.url}/metrics"))
    except (Unreachable, TimedOut):
        raise
    except BkctlError as error:
        problems.append(str(error))
    at_s = time.monotonic()
    try:
        disk = api.space()
        collection = _collection(api.garbage_collection())
    except BkctlError as error:
        problems.append(str(error))
    counts = LoadCounts(
        samples.total("bookkeeper_server_ADD_ENTRY_REQUEST_count"),
        samples.total("bookkeeper_server_READ_ENTRY_REQUEST_count"),
        samples.total("bookie_WRITE_BYTES"),
        samples.total("bookie_READ_BYTES"),
        samples.total("bookie_journal_JOURNAL_WRITE_BYTES"),
    )
    return BookieReading(
        at_s,
        counts,
        samples.percentiles("bookkeeper_server_ADD_ENTRY_REQUEST"),
        samples.percentiles("bookkeeper_server_READ_ENTRY_REQUEST"),
        samples.percentiles("bookie_journal_JOURNAL_SYNC"),
        samples.percentiles("bookie_journal_JOURNAL_QUEUE_LATENCY"),
        samples.whole("bookie_journal_JOURNAL_QUEUE_SIZE"),
        samples.whole("bookie_ledgers_count"),
        samples.collected("MAJOR_COMPACTION_TOTAL"),
        samples.collected("MINOR_COMPACTION_TOTAL"),
        samples.collected("RECLAIMED_COMPACTION_SPACE_BYTES", "RECLAIMED_DELETION_SPACE_BYTES"),
        disk,
        collection,
        problems[0] if problems else None,
    )


def _collection(found: GarbageCollection) -> str:
    if any(collector.major_compacting for collector in found.collectors):
        return "major"
    if any(collector.minor_compacting for collector in found.collectors):
        return "minor"
    if found.in_force_gc:
        return "forced"
    return "suspended" if found.major_suspended and found.minor_suspended else "idle"


class Question(threading.Thread, Generic[T]):
    """Reads one bookie in a thread of its own; a thread that hangs is left behind at the end of the process."""

    def __init__(self, bookie_id: str, read: Callable[[], T]) -> None:
        super().__init__(name=f"load of {bookie_id}", daemon=True)
        self._read = read
        self.answer: T | None = None
        self.problem: str | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._read()
        except (BkctlError, OSError) as error:
            self.problem = str(error)


def ask_all(
    bookies: Iterable[RegisteredBookie], read: Callable[[RegisteredBookie], T], wait_s: float
) -> dict[str, Question[T]]:
    """Ask bookies, all at once; return the questions by bookie id, answered within `wait_s` in all or not."""
    deadline_s = time.monotonic() + wait_s
    questions = {each.bookie_id: Question(each.bookie_id, partial(read, each)) for each in bookies}
    for question in questions.values():
        question.join(max(0.0, deadline_s - time.monotonic()))
    return questions


@dataclass(eq=False)
class LoadWatch:
    """Reads the load of a cluster again and again, all bookies at once.

    `client_of` returns the client of a registered URL, `host_of` a host in place of a bookie's own, or None. A look
    waits `wait_s` for the bookies; the others have the problem "no answer", and are not asked again before they
    answered or failed.
    """

    cluster: Cluster
    client_of: Callable[[str], ApiClient]
    wait_s: float
    host_of: Callable[[str], str | None] = lambda bookie_id: None
    _clients: dict[str, ApiClient] = field(default_factory=dict)
    _questions: dict[str, Question[BookieReading]] = field(default_factory=dict)
    _last: dict[str, BookieReading] = field(default_factory=dict)
    _is_cancelled: bool = False

    def cancel(self) -> None:
        """End the waiting of a look in another thread. Its bookies have no answer then."""
        self._is_cancelled = True

    def look(self) -> ClusterLoad:
        """Return the load now. Raise as `MetadataStore` if the metadata cannot be read."""
        bookies = self.cluster.bookies.list()
        deadline_s = time.monotonic() + self.wait_s
        running = {bookie_id: each for bookie_id, each in self._questions.items() if each.is_alive()}
        self._questions = {
            bookie.bookie_id: running.get(bookie.bookie_id) or self._ask(bookie)
            for bookie in bookies
            if bookie.state != "down"
        }
        missing, marked = self._missing_replicas()
        loads = tuple(self._load(bookie, missing[bookie.bookie_id], deadline_s) for bookie in bookies)
        known = {bookie.bookie_id for bookie in bookies}
        self._last = {bookie_id: reading for bookie_id, reading in self._last.items() if bookie_id in known}
        self._last |= {load.bookie.bookie_id: load.reading for load in loads if load.reading is not None}
        return ClusterLoad(loads, marked, None if marked else self._why_not_audited())

    def _why_not_audited(self) -> str | None:
        from bkctl.metadata.underreplication import AutoRecoveryState

        try:
            return AutoRecoveryState(self.cluster.store).why_not_audited()
        except Corrupt as error:
            return f"not known to be audited: {error}"

    def _ask(self, bookie: RegisteredBookie) -> Question[BookieReading]:
        def read() -> BookieReading:
            url = bookie_url(bookie, self.host_of(bookie.bookie_id))
            if url not in self._clients:
                self._clients[url] = self.client_of(url)
            return read_bookie(BookieApi(self._clients[url]))

        return Question(bookie.bookie_id, read)

    def _load(self, bookie: RegisteredBookie, missing: int, deadline_s: float) -> BookieLoad:
        question = self._questions.get(bookie.bookie_id)
        if question is None:
            return BookieLoad(bookie, None, NO_COUNTS, missing, "has a cookie, but is not registered")
        while question.is_alive() and not self._is_cancelled and (left_s := deadline_s - time.monotonic()) > 0:
            question.join(min(left_s, 0.1))
        if question.is_alive():
            return BookieLoad(bookie, None, NO_COUNTS, missing, f"no answer within {self.wait_s:g} s")
        reading = question.answer
        rates = _rates(self._last.get(bookie.bookie_id), reading)
        return BookieLoad(bookie, reading, rates, missing, reading.problem if reading else question.problem)

    def _missing_replicas(self) -> tuple[Counter[str], int]:
        """Return the number of under-replicated ledgers by bookie, and in all, of MARKS_MAX marks at most."""
        from bkctl.metadata.underreplication import LedgerMarks

        by_bookie: Counter[str] = Counter()
        count = 0
        for _, mark in islice(LedgerMarks(self.cluster.store).list(None), MARKS_MAX):
            count += 1
            if not isinstance(mark, BkctlError):
                by_bookie.update(set(mark.missing_replicas))
        return by_bookie, count


def _rates(before: BookieReading | None, now: BookieReading | None) -> LoadCounts:
    """Return the growth of counts a second; None for a count that shrank, as at a restart of the bookie."""
    if before is None or now is None or now.at_s <= before.at_s:
        return NO_COUNTS
    seconds = now.at_s - before.at_s
    pairs = zip(before.counts, now.counts, strict=True)
    return LoadCounts(
        *(
            None if one is None or two is None or two < one else round((two - one) / seconds, 3)
            for one, two in pairs
        )
    )  # fmt: skip


_SAMPLE: Final = re.compile(
    r"([a-zA-Z_:][\w:.-]*)[ \t]*(?:\{(.*)\}[ \t]*|[ \t])([^\s{}]+)(?:[ \t]+-?\d+)?[ \t]*", re.ASCII
)
_LABEL: Final = re.compile(r'[ \t]*([a-zA-Z_][\w.-]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)', re.ASCII)
_ESCAPE: Final = re.compile(r"\\(.)")


class Metric(NamedTuple):
    """One sample. `type` is counter, gauge, summary, histogram or untyped."""

    name: str
    labels: Mapping[str, str]
    value: float
    type: str


def parse_metrics(text: str, where: str = "") -> Iterator[Metric]:
    """Yield the samples of a text in Prometheus' format 0.0.4, in order. Raise ProtocolError for an invalid line.

    Names and labels may have dots and dashes, which Apache's provider produces. `where` names the text in messages.
    """
    at = f"{where}: " if where else ""
    types: dict[str, str] = {}
    for number, line in enumerate(io.StringIO(text), 1):
        line = line.strip()
        if not line:
            continue
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                types[words[2]] = words[3]
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError(line)
            value = float(match[3])
            labels = _labels(match[2] or "")
        except ValueError as error:
            raise ProtocolError(f"{at}line {number} is not a metric: {shortened(line)[:60]!r}") from error
        name = match[1]
        family = name if name in types else re.sub(r"_(?:bucket|count|sum)$", "", name)
        yield Metric(name, labels, value, types.get(family, "untyped"))


def _labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise ValueError(text)
        labels[match[1]] = _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], match[2])
        at = match.end()
    return labels
