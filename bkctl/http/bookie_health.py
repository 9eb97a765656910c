"""Health findings of bookies, from the metrics that their HTTP servers publish."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import Samples, ask_all, parse_metrics
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
from bkctl.http.server_url import bookie_url
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import health_finding
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.store import attempt

if TYPE_CHECKING:
    from bkctl.http.client import ApiClient
    from bkctl.metadata.admin.health import HealthFinding
    from bkctl.metadata.cluster import Cluster, RegisteredBookie


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
    samples = list(parse_metrics(text))
    gauges: dict[str, int] = {}
    unreadable: list[str] = []
    skew_s = None
    for each in samples:
        if not math.isfinite(each.value):
            continue
        if each.name in _GAUGES:
            value = math.floor(each.value) if each.name == CERTIFICATE_EXPIRY else math.ceil(each.value)
            gauges[each.name] = min(value, gauges.get(each.name, value))
        elif each.name == UNREADABLE_LEDGER:
            unreadable.append(each.labels.get("ledger", ""))
        elif each.name == CLOCK_SECONDS:
            skew_s = each.value - min(max(each.value, began_s), ended_s)
    found = Samples(samples)
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
        p99_ms = None if count is not None and count < SLOW_COUNT_MIN else found.percentiles(name).p99_ms
        return p99_ms if p99_ms is not None and math.isfinite(p99_ms) else None

    return BookieVitals(
        gauges, p99_ms("bookkeeper_server_ADD_ENTRY_REQUEST", RECENT_ADDS),
        p99_ms("bookie_journal_JOURNAL_SYNC", RECENT_SYNCS), skew_s, suspended,
        found.total("bookie_ledger_writable_dirs"), tuple(unreadable),
    )  # fmt: skip


def cluster_vitals(
    bookies: Iterable[RegisteredBookie],
    client_of: Callable[[str], ApiClient],
    *,
    wait_s: float,
    host_of: Callable[[str], str | None] = lambda bookie_id: None,
) -> dict[str, BookieVitals]:
    """Ask the registered bookies, all at once; return the vitals of those that answer within `wait_s` in all.

    `client_of` and `host_of` as in LoadWatch.
    """

    def read(bookie: RegisteredBookie) -> BookieVitals:
        return read_vitals(BookieApi(client_of(bookie_url(bookie, host_of(bookie.bookie_id)))))

    questions = ask_all((each for each in bookies if each.state != "down" and each.http_endpoint), read, wait_s)
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
            problem = f"Its disks are full, and garbage on them is not collected: {each.suspended}"
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
        ledgers = "1 ledger is" if set_aside == 1 else f"{set_aside:,} ledgers are"
        problems.append(f"{ledgers} set aside and answered with EIO: their state on disk cannot be read")
    if refused:
        ledgers = "1 ledger accepts" if refused == 1 else f"{refused:,} ledgers accept"
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
        ledgers = "1 ledger" if unreadable == 1 else f"{unreadable:,} ledgers"
        yield health_finding(
            HealthCode.LEDGERS_UNREADABLE, bookie_id, f"Entries of {ledgers} could not be read within the last day",
            details={"unreadableLedgerCount": unreadable},
        )  # fmt: skip
    left_s = gauges.get(CERTIFICATE_EXPIRY)
    if left_s is not None and left_s < CERTIFICATE_DAYS_MIN * _DAY_S:
        days = left_s // _DAY_S
        when = "has expired" if left_s < 0 else f"expires in {days} {'day' if days == 1 else 'days'}"
        yield health_finding(
            HealthCode.CERTIFICATE_EXPIRES, bookie_id, f"A TLS certificate of its servers {when}",
            "error" if left_s < 0 else None, details={"certificateExpirySeconds": left_s},
        )  # fmt: skip
