"""The load and health of bookies by their HTTP servers: requests, latencies, journals, disks, collections, findings.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from statistics import median
from typing import Final, Generic, NamedTuple, TypeVar

from bkctl.columns import counted
from bkctl.errors import BkctlError, Corrupt, ProtocolError, TimedOut, Unreachable
from bkctl.http.bookie_client import BookieApi, DiskSpace, GarbageCollection
from bkctl.http.bookie_metrics import (
    CERTIFICATE_EXPIRY,
    CLOCK_SECONDS,
    RECENT_ADDS,
    RECENT_SYNCS,
    REFUSED_LEDGERS,
    SET_ASIDE_LEDGERS,
    UNREADABLE_LEDGER,
    UNREADABLE_LEDGERS,
    UNREGISTERED_SECONDS,
)
from bkctl.http.client import shortened
from bkctl.ids import LedgerId
from bkctl.metadata.admin.auto_recovery import why_not_audited
from bkctl.metadata.admin.health import HealthFinding, health_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.store import attempt
from bkctl.metadata.underreplication import LedgerMarks

T = TypeVar("T")

#: Marks of under-replicated ledgers that one look reads.
MARKS_MAX: Final = 1000
_VALUE_MAX: Final = 1e18


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
#: The metrics of LoadCounts, and of the percentiles of BookieReading, in their order.
_COUNTED: Final = (
    "bookkeeper_server_ADD_ENTRY_REQUEST_count", "bookkeeper_server_READ_ENTRY_REQUEST_count", "bookie_WRITE_BYTES",
    "bookie_READ_BYTES", "bookie_journal_JOURNAL_WRITE_BYTES",
)  # fmt: skip
_MEASURED: Final = (
    "bookkeeper_server_ADD_ENTRY_REQUEST", "bookkeeper_server_READ_ENTRY_REQUEST", "bookie_journal_JOURNAL_SYNC",
    "bookie_journal_JOURNAL_QUEUE_LATENCY",
)  # fmt: skip


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
        return f"{more}{counted(self.underreplicated_count, 'ledger is', 'ledgers are')} under-replicated"


class Samples:
    """The samples of one answer, by name. A value of several journals, threads or directories is summed up.

    Those of _VALUE_MAX and more are left out, as are NaN and infinity: no sum of the others is infinite.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._by_name: dict[str, list[Metric]] = defaultdict(list)
        for metric in metrics:
            if abs(metric.value) < _VALUE_MAX:
                self._by_name[metric.name].append(metric)

    def named(self, name: str) -> list[Metric]:
        """Return the samples of this name."""
        return self._by_name.get(name, [])

    def total(self, *names: str) -> float | None:
        """Return the sum of the samples of the first of `names` that has any."""
        found = next(filter(None, map(self.named, names)), None)
        return None if found is None else sum(metric.value for metric in found)

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
        for metric in self.named(name):
            quantile = metric.labels.get("quantile")
            if quantile is not None and metric.labels.get("success") != "false":
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
    counts = LoadCounts(*map(samples.total, _COUNTED))
    add, read, journal_sync, journal_queue = map(samples.percentiles, _MEASURED)
    return BookieReading(
        at_s, counts, add, read, journal_sync, journal_queue,
        samples.whole("bookie_journal_JOURNAL_QUEUE_SIZE"),
        samples.whole("bookie_ledgers_count"),
        samples.collected("MAJOR_COMPACTION_TOTAL"),
        samples.collected("MINOR_COMPACTION_TOTAL"),
        samples.collected("RECLAIMED_COMPACTION_SPACE_BYTES", "RECLAIMED_DELETION_SPACE_BYTES"),
        disk, collection, problems[0] if problems else None,
    )  # fmt: skip


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
        #: The problem without advice.
        self.message = ""
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._read()
        except (BkctlError, OSError, ArithmeticError, ValueError) as error:
            self.problem = str(error)
            self.message = getattr(error, "message", self.problem)


def ask_all(
    bookies: Iterable[RegisteredBookie],
    read: Callable[[RegisteredBookie], T],
    wait_s: float,
    asked: Mapping[str, Question[T]] = {},
    is_over: Callable[[], bool] = lambda: False,
) -> dict[str, Question[T]]:
    """Ask bookies, all at once; return the questions by bookie id, answered within `wait_s` in all or not.

    Questions in `asked` that are still open are not asked again. Another thread ends the wait by `is_over`.
    """
    deadline_s = time.monotonic() + wait_s
    running = {bookie_id: each for bookie_id, each in asked.items() if each.is_alive()}
    questions = {
        each.bookie_id: running.get(each.bookie_id) or Question(each.bookie_id, partial(read, each)) for each in bookies
    }
    for question in questions.values():
        while question.is_alive() and not is_over() and (left_s := deadline_s - time.monotonic()) > 0:
            question.join(min(left_s, 0.1))
    return questions


@dataclass(eq=False)
class LoadWatch:
    """Reads the load of a cluster again and again, all bookies at once.

    `api_of` returns a bookie's HTTP server. A look waits `wait_s` for the bookies; the others have the problem "no
    answer", and are not asked again before they answered or failed.
    """

    cluster: Cluster
    api_of: Callable[[RegisteredBookie], BookieApi]
    wait_s: float
    _questions: dict[str, Question[BookieReading]] = field(default_factory=dict)
    _last: dict[str, BookieReading] = field(default_factory=dict)
    _is_cancelled: bool = False

    def cancel(self) -> None:
        """End the waiting of a look in another thread. Its bookies have no answer then."""
        self._is_cancelled = True

    def look(self) -> ClusterLoad:
        """Return the load now. Raise as `MetadataStore` if the metadata cannot be read."""
        bookies = self.cluster.bookies.list()
        #: Under-replicated ledgers by bookie, and in all, of MARKS_MAX marks at most.
        missing: Counter[str] = Counter()
        marked = 0
        for _, mark in islice(LedgerMarks(self.cluster.store).list(None), MARKS_MAX):
            marked += 1
            if not isinstance(mark, BkctlError):
                missing.update(set(mark.missing_replicas))
        self._questions = ask_all(
            (bookie for bookie in bookies if bookie.state != "down"), lambda bookie: read_bookie(self.api_of(bookie)),
            self.wait_s, self._questions, lambda: self._is_cancelled,
        )  # fmt: skip
        loads = tuple(self._load(bookie, missing[bookie.bookie_id]) for bookie in bookies)
        known = {bookie.bookie_id for bookie in bookies}
        self._last = {bookie_id: reading for bookie_id, reading in self._last.items() if bookie_id in known}
        self._last |= {load.bookie.bookie_id: load.reading for load in loads if load.reading is not None}
        try:
            not_audited = None if marked else why_not_audited(self.cluster)
        except Corrupt as error:
            not_audited = f"not known to be audited: {error}"
        return ClusterLoad(loads, marked, not_audited)

    def _load(self, bookie: RegisteredBookie, missing: int) -> BookieLoad:
        question = self._questions.get(bookie.bookie_id)
        if question is None:
            return BookieLoad(bookie, None, NO_COUNTS, missing, "has a cookie, but is not registered")
        if question.is_alive():
            return BookieLoad(bookie, None, NO_COUNTS, missing, f"no answer within {self.wait_s:g} s")
        reading = question.answer
        rates = _rates(self._last.get(bookie.bookie_id), reading)
        return BookieLoad(bookie, reading, rates, missing, reading.problem if reading else question.problem)


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


# --- Prometheus' text format -----------------------------------------------------------------------------------------

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


# --- health ----------------------------------------------------------------------------------------------------------

#: A certificate that expires sooner is a finding.
CERTIFICATE_DAYS_MIN: Final = 14
_DAY_S: Final = 86_400
#: A p99 is an outlier from this many times the median of the other bookies, and from this many milliseconds.
SLOW_FACTOR: Final = 5
SLOW_MS_MIN: Final = 50.0
#: Fewer adds or syncs of a bookie say nothing: recent ones of ours, of Apache's those since its start.
SLOW_COUNT_MIN: Final = 100
CLOCK_SKEW_S_MAX: Final = 5.0
_GAUGES: Final = (SET_ASIDE_LEDGERS, REFUSED_LEDGERS, UNREADABLE_LEDGERS, UNREGISTERED_SECONDS, CERTIFICATE_EXPIRY)


class BookieVitals(NamedTuple):
    """The health of a bookie by its HTTP server: our gauges (the lowest), latencies in ms, clock, compaction."""

    gauges: Mapping[str, int] = {}
    add_p99_ms: float | None = None
    sync_p99_ms: float | None = None
    #: The most that the bookie's clock is ahead of ours, in seconds; None without one.
    skew_s: float | None = None
    #: The reason for which the disks suspend compaction, "" if they do not.
    suspended: str = ""
    #: Ledger directories that take new files; None if it does not say.
    writable_directories: float | None = None
    #: Some of the ledgers whose reads failed.
    unreadable: tuple[str, ...] = ()


def read_vitals(api: BookieApi) -> BookieVitals:
    """Ask a bookie, Apache's or ours, for its vitals. Raise BkctlError, as `BookieApi`."""
    began_s = time.time()
    text = api.metrics()
    ended_s = time.time()
    found = Samples(parse_metrics(text))
    lowest = {name: min(each.value for each in samples) for name in _GAUGES if (samples := found.named(name))}
    gauges = {name: (math.floor if name == CERTIFICATE_EXPIRY else math.ceil)(value) for name, value in lowest.items()}
    unreadable = tuple(each.labels.get("ledger", "") for each in found.named(UNREADABLE_LEDGER))
    skew_s = None
    for each in found.named(CLOCK_SECONDS):
        skew_s = each.value - min(max(each.value, began_s), ended_s)
    suspended = ""
    try:
        collection = api.garbage_collection()
        suspended = collection.suspended_by_disks
        if not suspended and collection.major_suspended and collection.minor_suspended:
            suspended = "all compaction is suspended"
    except BkctlError:
        pass

    def p99_ms(name: str, recent: str) -> float | None:
        count = found.total(recent, f"{name}_count")
        return None if count is not None and count < SLOW_COUNT_MIN else found.percentiles(name).p99_ms

    return BookieVitals(
        gauges, p99_ms("bookkeeper_server_ADD_ENTRY_REQUEST", RECENT_ADDS),
        p99_ms("bookie_journal_JOURNAL_SYNC", RECENT_SYNCS), skew_s, suspended,
        found.total("bookie_ledger_writable_dirs"), unreadable,
    )  # fmt: skip


def cluster_vitals(
    bookies: Iterable[RegisteredBookie],
    api_of: Callable[[RegisteredBookie], BookieApi],
    *,
    wait_s: float,
    silent: Callable[[Mapping[str, str]], object] = lambda _: None,
) -> dict[str, BookieVitals]:
    """Ask the registered bookies, all at once; return the vitals of those that answer within `wait_s` in all.

    The ids of the others go to `silent`, with the problem of each.
    """
    serving = (each for each in bookies if each.state != "down" and each.http_endpoint)
    questions = ask_all(serving, lambda bookie: read_vitals(api_of(bookie)), wait_s)
    silent(
        {
            bookie_id: each.message or f"no answer within {wait_s:g} s"
            for bookie_id, each in questions.items()
            if each.answer is None
        }
    )
    return {bookie_id: each.answer for bookie_id, each in questions.items() if each.answer is not None}


def without_moved(cluster: Cluster, vitals: Mapping[str, BookieVitals]) -> dict[str, BookieVitals]:
    """Return the vitals without unreadable ledgers that have no replica on the bookie any more."""
    kept = {}
    for bookie_id, each in vitals.items():
        left = []
        named = [ledger for text in each.unreadable if isinstance(ledger := attempt(LedgerId.parse, text), LedgerId)]
        for ledger, found in cluster.ledgers.read_many(named):
            if isinstance(found, BkctlError) or any(
                bookie_id in fragment.bookies for fragment in found.metadata.ensembles
            ):
                left.append(str(ledger))
        count = each.gauges.get(UNREADABLE_LEDGERS, 0) - len(named) + len(left)
        kept[bookie_id] = each._replace(gauges={**each.gauges, UNREADABLE_LEDGERS: count}, unreadable=tuple(left))
    return kept


def full_bookies(vitals: Mapping[str, BookieVitals]) -> set[str]:
    """Return the bookies whose disks are full by limits of their own."""
    return {
        bookie_id
        for bookie_id, each in vitals.items()
        if each.writable_directories == 0 or "diskUsageThreshold" in each.suspended
    }


def vitals_findings(vitals: Mapping[str, BookieVitals], full: Collection[str] = ()) -> Iterator[HealthFinding]:
    """Yield the findings of bookies by their vitals; `full` are those with full disks.

    A bookie without HTTP server or answer has none: `disk_findings` reports bookies that do not answer.
    """
    for bookie_id, each in vitals.items():
        yield from _gauge_findings(bookie_id, each.gauges)
        if each.suspended and bookie_id in full:
            problem = f"Its disks are full, and garbage on them is not compacted: {each.suspended}"
            yield health_finding(HealthCode.DISK_FULL_NO_WAY_OUT, bookie_id, problem)
        if each.skew_s is not None and abs(each.skew_s) > CLOCK_SKEW_S_MAX:
            problem = (
                f"Its clock is {abs(each.skew_s):,.0f} s {'ahead of' if each.skew_s > 0 else 'behind'} the one here"
            )
            yield health_finding(
                HealthCode.CLOCK_SKEW, bookie_id, problem, details={"skewSeconds": round(each.skew_s, 1)}
            )
    for name, what in (("add_p99_ms", "adds"), ("sync_p99_ms", "journal syncs")):
        values = {bookie_id: value for bookie_id, each in vitals.items() if (value := getattr(each, name)) is not None}
        for bookie_id, value in values.items():
            others = [values[other] for other in values if other != bookie_id]
            if len(others) > 1 and value >= max(SLOW_MS_MIN, SLOW_FACTOR * median(others)):
                yield health_finding(
                    HealthCode.BOOKIE_SLOW, bookie_id,
                    f"The p99 of its {what} is {value:,.1f} ms, the median of {len(others):,} others "
                    f"{median(others):,.1f} ms",
                    details={"what": what, "p99Ms": round(value, 3), "othersP99Ms": round(median(others), 3)},
                )  # fmt: skip


def _gauge_findings(bookie_id: str, gauges: Mapping[str, int]) -> Iterator[HealthFinding]:
    set_aside, refused = gauges.get(SET_ASIDE_LEDGERS, 0), gauges.get(REFUSED_LEDGERS, 0)
    problems = []
    if set_aside:
        ledgers = counted(set_aside, "ledger is", "ledgers are")
        problems.append(f"{ledgers} set aside and answered with EIO: their state on disk cannot be read")
    if refused:
        ledgers = counted(refused, "ledger accepts", "ledgers accept")
        problems.append(f"{ledgers} no entries: the disk refuses their index")
    if problems:
        yield health_finding(
            HealthCode.LEDGERS_SET_ASIDE, bookie_id, "; ".join(problems),
            details={"setAsideLedgerCount": set_aside, "refusedLedgerCount": refused},
        )  # fmt: skip
    if lost_s := gauges.get(UNREGISTERED_SECONDS, 0):
        yield health_finding(
            HealthCode.BOOKIE_UNREGISTERED, bookie_id,
            f"It has not found its registration in the metadata store for {lost_s:,} s",
            details={"unregisteredSeconds": lost_s},
        )  # fmt: skip
    if unreadable := gauges.get(UNREADABLE_LEDGERS, 0):
        yield health_finding(
            HealthCode.LEDGERS_UNREADABLE, bookie_id,
            f"Entries of {counted(unreadable, 'ledger')} could not be read within the last day",
            details={"unreadableLedgerCount": unreadable},
        )  # fmt: skip
    left_s = gauges.get(CERTIFICATE_EXPIRY)
    if left_s is not None and left_s < CERTIFICATE_DAYS_MIN * _DAY_S:
        when = "has expired" if left_s < 0 else f"expires in {counted(left_s // _DAY_S, 'day')}"
        yield health_finding(
            HealthCode.CERTIFICATE_EXPIRES, bookie_id, f"A TLS certificate of the bookie {when}",
            "error" if left_s < 0 else None, details={"certificateExpirySeconds": left_s},
        )  # fmt: skip
