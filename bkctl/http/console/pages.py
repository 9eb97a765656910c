"""The pages of the console: templates, and what they show."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from bkctl.errors import BkctlError, LedgerNotFound, NotFound
from bkctl.formats.metadata import LedgerMetadata
from bkctl.http.bookie_client import BookieApi
from bkctl.http.bookie_load import BookieLoad, ClusterLoad, LoadWatch
from bkctl.http.gateway import Upstream
from bkctl.http.service import Service
from bkctl.ids import LedgerId, parse_scope_id
from bkctl.metadata.admin.health import health_findings
from bkctl.metadata.cluster import Cluster, RegisteredBookie
from bkctl.metadata.ledger_columns import pulsar_object
from bkctl.metadata.racks import read_racks
from bkctl.metadata.store import attempt
from bkctl.metadata.underreplication import AuditorElection, AutoRecoverySettings, LedgerMarks
from bkctl.tasks import cancel_and_wait

#: Ledgers on a page, and those that a page looks at for an application's.
LEDGERS_A_PAGE: Final = 100
LEDGERS_EXAMINED_MAX: Final = 10_000
MARKS_A_PAGE: Final = 1000
FRAGMENTS_DRAWN_MAX: Final = 200
SCOPES_MAX: Final = 200
#: Custom metadata is cut to this length, in characters.
CUSTOM_LENGTH_MAX: Final = 1000
CUSTOM_KEYS_MAX: Final = 100
#: The size of the drawing of a ledger.
WIDTH, ROW_HEIGHT = 1000, 28
#: The size of a chart.
CHART_WIDTH, CHART_HEIGHT = 240, 48

Values = Mapping[str, Any]


class Sources(NamedTuple):
    """The sources of a page, the subject that is named behind it, and its query."""

    cluster: Cluster
    history: LoadHistory
    subject: str
    query: Mapping[str, str]


class ConsolePage(NamedTuple):
    """A page: its template, and the function that reads what it shows, or returns the name of another page.

    `read` blocks, and is called in a thread. The cluster is there unless `is_of_loads`.
    """

    template: str
    read: Callable[[Sources], Values | str]
    takes_subject: bool = False
    is_of_loads: bool = False


class Chart(NamedTuple):
    """A line over the last hour: its path for SVG, the newest and the highest value, and what it shows."""

    title: str
    unit: str
    path: str
    last: float | None
    highest: float | None


class FragmentBar(NamedTuple):
    """A replica of a fragment in the drawing of a ledger."""

    x: float
    y: int
    width: float
    bookie: str
    colour: int
    text: str


def _p99(name: str) -> Callable[[BookieLoad], float | None]:
    return lambda load: None if load.reading is None else getattr(load.reading, name).p99_ms


#: The charts of a bookie.
_CHARTS: Final = (
    ("Adds", "a second", lambda load: load.per_second.adds),
    ("Reads", "a second", lambda load: load.per_second.reads),
    ("Add latency, p99", "ms", _p99("add")),
    ("Journal sync, p99", "ms", _p99("journal_sync")),
)


def chart(title: str, unit: str, numbers: Sequence[tuple[int, float | None]]) -> Chart:
    """Return the chart of numbers at times in milliseconds, the newest last; the line has gaps where none is known."""
    highest = max((number for _, number in numbers if number is not None), default=None)
    scale = (CHART_HEIGHT - 4) / (highest or 1.0)
    step = CHART_WIDTH / max(numbers[-1][0] - numbers[0][0], 1) if numbers else 0
    path, is_gap = "", True
    for at_ms, number in numbers:
        if number is not None:
            place = f"{(at_ms - numbers[0][0]) * step:.1f},{CHART_HEIGHT - 2 - number * scale:.1f}"
            path += f"M{place}h0" if is_gap else f"L{place}"  # A point alone is a dot.
        is_gap = number is None
    return Chart(title, unit, path, numbers[-1][1] if numbers else None, highest)


def _overview(of: Sources) -> Values:
    bookies = of.cluster.bookies.list()
    count = sum(1 for _ in islice(of.cluster.ledgers.ledgers(None), LEDGERS_EXAMINED_MAX + 1))
    more = "more than " if count > LEDGERS_EXAMINED_MAX else ""
    disks = [load.reading.disk for load in _loads(of) if load.reading is not None and load.reading.disk]
    return {
        "states": Counter(bookie.state for bookie in bookies),
        "bookie_ids": {each.bookie_id for each in bookies},
        "ledgers": f"{more}{min(count, LEDGERS_EXAMINED_MAX):,}",
        "findings": sorted(health_findings(of.cluster), key=lambda each: (each.severity, each.code, each.subject)),
        "answering": len(disks),
        "total": sum(disk.total for disk in disks),
        "used": sum(disk.used for disk in disks),
        "charts": [chart(title, unit, of.history.numbers(number)) for title, unit, number in _CHARTS[:2]],
    }


def _loads(of: Sources) -> Sequence[BookieLoad]:
    last = of.history.last
    return () if last is None else last.bookies


def _bookies(of: Sources) -> Values:
    racks = _racks(of.cluster)
    loads = {load.bookie.bookie_id: load for load in _loads(of)}
    bookies = of.cluster.bookies.list()
    return {"rows": [(each, racks.get(each.bookie_id), loads.get(each.bookie_id)) for each in bookies]}


def _racks(cluster: Cluster) -> dict[str, str]:
    return {each.bookie_id: each.rack for each in read_racks(cluster.store) if each.rack is not None}


def _bookie(of: Sources) -> Values:
    bookie = next((each for each in of.cluster.bookies.list() if each.bookie_id == of.subject), None)
    if bookie is None:
        raise NotFound(f"Bookie {of.subject!r} has neither a cookie nor a registration")
    load = next((each for each in _loads(of) if each.bookie.bookie_id == of.subject), None)
    charts = [chart(title, unit, of.history.numbers(number, of.subject)) for title, unit, number in _CHARTS]
    return {"bookie": bookie, "load": load, "charts": charts}


def _ledgers(of: Sources) -> Values | str:
    query, manager = of.query, of.cluster.ledgers
    if query.get("q", "").strip():
        return f"ledger/{LedgerId.parse(query['q'].strip())}"
    scope = parse_scope_id(query["scope"].strip()) if query.get("scope", "").strip() else None
    after = LedgerId.parse(query["after"]) if query.get("after") else None
    if after is not None and scope is not None and after.scope_id != scope:
        after = None
    wanted, bookie = query.get("application", "").strip(), query.get("bookie", "").strip()
    rows: list[tuple[LedgerId, Any]] = []
    last, examined = None, 0
    for ledger, found in manager.read_many(islice(manager.ledgers(scope, after), LEDGERS_EXAMINED_MAX)):
        last, examined = ledger, examined + 1
        if isinstance(found, LedgerNotFound):  # deleted meanwhile
            continue
        if isinstance(found, BkctlError):
            rows += [] if wanted or bookie else [(ledger, found)]
        elif wanted in ("", application_of(found.metadata)) and (
            not bookie or any(bookie in each.bookies for each in found.metadata.ensembles)
        ):
            rows.append((ledger, found))
        if len(rows) >= LEDGERS_A_PAGE:
            break
    has_more = len(rows) >= LEDGERS_A_PAGE or examined >= LEDGERS_EXAMINED_MAX
    kept = {"scope": query.get("scope", ""), "application": wanted, "bookie": bookie}
    return {
        **kept, "rows": rows, "examined": examined, "scopes": list(islice(manager.scopes(), SCOPES_MAX)),
        "next": urlencode({**kept, "after": str(last)}) if has_more else None, "described": _described,
    }  # fmt: skip


def application_of(metadata: LedgerMetadata) -> str:
    """Return what the ledger's custom metadata calls its application, empty without."""
    return metadata.custom_metadata.get("application", b"")[:100].decode("utf-8", "replace")


def _described(metadata: LedgerMetadata) -> str:
    """Return Pulsar's topic, or the application."""
    return pulsar_object(metadata.custom_metadata).get("topic") or application_of(metadata)


def _ledger(of: Sources) -> Values:
    ledger = LedgerId.parse(of.subject)
    found = of.cluster.ledgers.read(ledger)
    mark = attempt(LedgerMarks(of.cluster.store).get, ledger)
    custom = [
        (key[:CUSTOM_LENGTH_MAX] + "…" * (len(key) > CUSTOM_LENGTH_MAX),
         value[:CUSTOM_LENGTH_MAX].decode("utf-8", "backslashreplace"),
         len(value) if len(value) > CUSTOM_LENGTH_MAX else None)
        for key, value in islice(sorted(found.metadata.custom_metadata.items()), CUSTOM_KEYS_MAX)
    ]  # fmt: skip
    fragments = list(found.metadata.extents())
    return {
        "ledger": ledger, "metadata": found.metadata, "ctime_ms": found.ctime_ms, "mark": mark, "custom": custom,
        "custom_left_out": max(len(found.metadata.custom_metadata) - CUSTOM_KEYS_MAX, 0),
        "up": {each.bookie_id for each in of.cluster.bookies.list(include_down=False)},
        "pulsar": pulsar_object(found.metadata.custom_metadata), "fragments": fragments[:FRAGMENTS_DRAWN_MAX],
        "left_out": max(len(fragments) - FRAGMENTS_DRAWN_MAX, 0), "bars": list(_bars(fragments)),
        "width": WIDTH, "height": ROW_HEIGHT * max((len(each[2]) for each in fragments), default=0),
    }  # fmt: skip


def _bars(fragments: Sequence[tuple[int, int | None, Sequence[str]]]) -> Iterator[FragmentBar]:
    """Yield a bar for each bookie of each fragment, as wide as its share of the entries, and at least visible."""
    drawn = fragments[:FRAGMENTS_DRAWN_MAX]
    sizes = [None if last is None else max(last - first + 1, 0) for first, last, _ in drawn]
    known = sum(size for size in sizes if size is not None)
    shares = [0.1 + (size / known if size is not None and known else 0.2) for size in sizes]
    colours: dict[str, int] = {}
    x = 0.0
    for share, (first, last, bookies) in zip(shares, drawn, strict=True):
        width = WIDTH * share / sum(shares)
        for row, bookie in enumerate(bookies):
            colour = colours.setdefault(bookie, len(colours) % 8)
            text = f"{bookie}: entries {first} to {'the end' if last is None else last}"
            yield FragmentBar(round(x, 2), row * ROW_HEIGHT, round(width, 2), bookie, colour, text)
        x += width


def _replication(of: Sources) -> Values:
    store = of.cluster.store
    marks = list(islice(LedgerMarks(store).list(None), MARKS_A_PAGE + 1))
    bookies = Counter(
        bookie for _, mark in marks if not isinstance(mark, BkctlError) for bookie in set(mark.missing_replicas)
    )
    return {
        "marks": marks[:MARKS_A_PAGE], "has_more": len(marks) > MARKS_A_PAGE, "bookies": bookies.most_common(),
        "auditor": attempt(AuditorElection(store).auditor), "is_enabled": AutoRecoverySettings(store).is_enabled(),
    }  # fmt: skip


def _rack_page(of: Sources) -> Values:
    racks = _racks(of.cluster)
    groups: dict[str, list[Any]] = defaultdict(list)
    for bookie in of.cluster.bookies.list():
        groups[racks.get(bookie.bookie_id, "")].append(bookie)
    return {"groups": sorted(groups.items())}


#: The first part of a path → its page.
PAGES: Final[Mapping[str, ConsolePage]] = {
    "": ConsolePage("overview.html", _overview),
    "bookies": ConsolePage("bookies.html", _bookies),
    "bookie": ConsolePage("bookie.html", _bookie, takes_subject=True),
    "ledgers": ConsolePage("ledgers.html", _ledgers),
    "ledger": ConsolePage("ledger.html", _ledger, takes_subject=True),
    "replication": ConsolePage("replication.html", _replication),
    "garbage": ConsolePage("garbage.html", lambda of: {"loads": _loads(of)}, is_of_loads=True),
    "racks": ConsolePage("racks.html", _rack_page),
}


# --- the load of the last hour ---------------------------------------------------------------------------------------

INTERVAL_S: Final = 30.0
LOOKS_MAX: Final = 120
#: Without a page view for so long, the bookies are not asked any more.
IDLE_S: Final = 3600.0
WAIT_S: Final = 5.0


class LoadHistory:
    """The loads of the last hour, read while pages are viewed, the oldest first; `problem` is that of the last one."""

    def __init__(self, service: Service, upstream: Upstream) -> None:
        #: Times in milliseconds since 1970, and the load then.
        self.looks: deque[tuple[int, ClusterLoad]] = deque(maxlen=LOOKS_MAX)
        self.problem: str | None = None
        self._service = service
        self._upstream = upstream
        self._viewed_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Read the load from now on, for as long as pages are viewed."""
        self._viewed_s = time.monotonic()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End the reading."""
        if self._task is not None:
            await cancel_and_wait(self._task)

    @property
    def last(self) -> ClusterLoad | None:
        """The newest load, None before the first."""
        return self.looks[-1][1] if self.looks else None

    def numbers(
        self, number: Callable[[BookieLoad], float | None], bookie_id: str | None = None
    ) -> list[tuple[int, float | None]]:
        """Return times, and a number of one bookie then, or the sum of all; None where no bookie has it."""
        found = []
        for at_ms, load in list(self.looks):
            numbers = [number(each) for each in load.bookies if bookie_id in (None, each.bookie.bookie_id)]
            known = [each for each in numbers if each is not None]
            found.append((at_ms, sum(known) if known else None))
        return found

    async def _run(self) -> None:
        def api_of(bookie: RegisteredBookie) -> BookieApi:
            return BookieApi(self._upstream.client(self._service.url_of(bookie), timeout_s=WAIT_S))

        watch: LoadWatch | None = None
        while time.monotonic() - self._viewed_s < IDLE_S:
            try:
                if watch is None:
                    watch = LoadWatch(await self._service.cluster(), api_of, WAIT_S)
                load = await asyncio.to_thread(watch.look)
                self.looks.append((int(time.time() * 1000), load))
                self.problem = None
            except BkctlError as error:
                self.problem = error.message
            # The first rates need a second look.
            await asyncio.sleep(INTERVAL_S if len(self.looks) > 1 else 2.0)
        self.looks.clear()
