"""The commands of `bkctl bookie` that ask a running bookie, most of them over its HTTP server."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from bkctl.errors import BkctlError, FindingsError, NotFound, TimedOut, Unreachable, Unsupported, UsageError
from bkctl.ids import parse_scope_id

from ..kit.audit import shown_uri
from ..kit.command import Run, command, group
from ..kit.options import BOTH_COMPACTIONS, Composite, DryRun, WatchOption, count_option, duration_option, parameter
from ..kit.output import GREEN, RED, YELLOW, Column, Columns, Kind, Output, iso_time

if TYPE_CHECKING:
    from bkctl.client.operations import RoundTrip
    from bkctl.http.client import BookieApi, BookieState, CollectorStatus, DiskSpace, GarbageCollection, Metric
    from bkctl.metadata.cluster import Cluster, RegisteredBookie

app = group()

#: Between two looks at work that a bookie does in the background: at first, and at most.
POLL_S_MIN: Final = 0.05
POLL_S_MAX: Final = 1.0
#: However near a deadline is, an answer may take so long.
ANSWER_S_MIN: Final = 5.0


# --- which bookie ---------------------------------------------------------------------------------------------------


class BookieServer(NamedTuple):
    """The bookie that a command is about: by its id, or by where its HTTP server is; with both, that is asked."""

    bookie_id: str | None
    url: str | None


def _bookie_server(values: Mapping[str, Any]) -> BookieServer:
    bookie_id, url = values["bookie_of_server"], values["bookie_url"]
    if bookie_id is None and url is None:
        url = os.environ.get("BKCTL_BOOKIE_URL") or None
    return BookieServer(bookie_id, url)


#: `--bookie` and `--bookie-url`; `server` turns them into a BookieApi.
BookieServerOption = Annotated[
    BookieServer,
    Composite(
        (
            parameter(
                "bookie_of_server",
                Annotated[
                    str,
                    typer.Option(
                        "--bookie", metavar="BOOKIE", help="The bookie; its HTTP server is where it registered one."
                    ),
                ],
            ),
            parameter(
                "bookie_url",
                Annotated[
                    str,
                    typer.Option(
                        "--bookie-url",
                        metavar="URL",
                        help="The HTTP server, http[s]://HOST:PORT, also that of a gateway (then with --bookie); no "
                        "cluster is needed. [BKCTL_BOOKIE_URL; its token: BKCTL_API_TOKEN]",
                    ),
                ],
            ),
        ),
        _bookie_server,
    ),
]


class Server(NamedTuple):
    """A bookie's HTTP server. `cluster` is open, where the bookie was looked up there."""

    api: BookieApi
    bookie_id: str | None
    cluster: Cluster | None

    @property
    def url(self) -> str:
        """Where it is."""
        return self.api.client.url

    @property
    def name(self) -> str:
        """The bookie for messages."""
        return f"Bookie {self.bookie_id}" if self.bookie_id else f"The bookie at {self.url}"


@contextmanager
def server(run: Run, which: BookieServer, *, changes: bool = False) -> Iterator[Server]:
    """The HTTP server that the options name: --bookie-url, else what --bookie registered, else that of --conf.

    `changes`: the command changes something, and goes to the audit log. Raises UsageError where nothing names one.
    """
    with finder(run, which, changes=changes) as find:
        yield find()


@contextmanager
def finder(run: Run, which: BookieServer, *, changes: bool = False) -> Iterator[Callable[[], Server]]:
    """As `server`, for who looks again: each call gives the server that the bookie has registered by then.

    A call raises BookieUnavailable while the bookie is not registered.
    """
    from bkctl.http.client import BookieApi, bookie_url

    url = which.url
    if url is None and which.bookie_id is None:
        url = _url_of_conf(run)
    if changes:
        run.start_audit(begun=url is not None)
    if url is not None:
        only = Server(BookieApi(run.http_client(url), which.bookie_id), which.bookie_id, None)
        yield lambda: only
        return
    bookie_id = which.bookie_id
    assert bookie_id is not None
    found: dict[str, Server] = {}

    def find() -> Server:
        there = bookie_url(registered_bookie(cluster, bookie_id), run.bookie_addresses().get(bookie_id, (None, 0))[0])
        if there not in found:
            found[there] = Server(BookieApi(run.http_client(there, is_registered=True)), bookie_id, cluster)
        return found[there]

    with run.cluster() as cluster:
        yield find


def registered_bookie(cluster: Cluster, bookie_id: str) -> RegisteredBookie:
    """The bookie as the cluster knows it. Raises NotFound."""
    bookie = cluster.bookies.get(bookie_id)
    if bookie is None:
        raise NotFound(f"No bookie {bookie_id} in {cluster.store.name}", hint="'bkctl bookies list' shows them")
    return bookie


def _url_of_conf(run: Run) -> str:
    """The HTTP server of the bookie whose configuration --conf is."""
    from bkctl.config import read_properties
    from bkctl.http.client import is_of_another_machine

    if run.conf is None:
        raise UsageError(
            "No bookie is named", hint="add --bookie BOOKIE ('bkctl bookies list' shows them) or --bookie-url URL"
        )
    settings = read_properties(run.conf)
    if (settings.get("httpServerEnabled") or "false").lower() != "true":
        raise UsageError(
            f"{run.conf}: the bookie has no HTTP server (httpServerEnabled)", hint="name another with --bookie-url"
        )
    host = settings.get("httpServerHost")
    if not host:
        # Apache's listens on every address then; ours too where it asks for a proof, else on loopback.
        advertised = settings.get("advertisedAddress")
        host = advertised if advertised and is_of_another_machine(advertised) else "127.0.0.1"
    elif host in ("0.0.0.0", "::"):
        host = settings.get("advertisedAddress") or "127.0.0.1"
    scheme = "https" if (settings.get("httpServerTlsEnable") or "").lower() == "true" else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.get('httpServerPort') or '8080'}"


class Asked(NamedTuple):
    """What a bookie answered."""

    server: Server
    answer: Any


BOOKIE: Final = Column("BOOKIE", "bookieId", "server.bookie_id")
URL: Final = Column("URL", "url", "server.url")


# --- state, ready, info ---------------------------------------------------------------------------------------------

_STATE = (
    Column("RUNNING", "running", "answer.running", Kind.BOOLEAN, style={"no": RED}),
    Column("READ ONLY", "readOnly", "answer.read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column("SHUTTING DOWN", "shuttingDown", "answer.shutting_down", Kind.BOOLEAN, style={"yes": RED}),
    Column(
        "HIGH-PRIORITY WRITES", "availableForHighPriorityWrites", "answer.available_for_high_priority_writes",
        Kind.BOOLEAN,
    ),
)  # fmt: skip
STATE_COLUMNS = Columns(BOOKIE, URL, *_STATE, key="url")


@command(app, "state", connects=True)
def state(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show whether a bookie runs, takes writes, or shuts down.

    A read-only bookie may still take writes of high priority (those of ledger recovery).
    """
    with server(run, which) as found:
        run.watch(watch, lambda: iter([Asked(found, found.api.state())]), STATE_COLUMNS, single=True)


READY_COLUMNS = Columns(
    BOOKIE,
    URL,
    Column("READY", "ready", "answer.ready", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("ANSWER", "message", "answer.message"),
    key="url",
)
WaitDeadline = Annotated[
    float | None, duration_option("--deadline", "With --wait: give up after this long (default: never; exit code 6).")
]


@command(app, "ready", connects=True)
def ready(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it is, also while it is not registered, or not up.")
    ] = False,
) -> None:
    """Show whether a bookie is past its start and serves; for probes. Exit code 3: it is not."""
    if deadline is not None and not wait:
        raise UsageError("--deadline goes with --wait", hint="add --wait")
    with finder(run, which) as find:
        with run.working("Waiting for the bookie", enabled=wait):
            patience = Patience(f"Bookie {which.bookie_id or which.url or run.conf} is not ready", deadline)
            while True:
                try:
                    found = find()
                    patience.shorten(found)
                    readiness = found.api.readiness()
                except Unreachable:
                    if not wait:
                        raise
                else:
                    if readiness.ready or not wait:
                        break
                patience.wait()
        run.show(Asked(found, readiness), READY_COLUMNS)
        if not readiness.ready:
            raise FindingsError(f"{found.name} is not ready: {readiness.message}")


class Patience:
    """Waits between looks, ever longer, until the deadline: TimedOut then, saying `what`."""

    def __init__(self, what: str, deadline_s: float | None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._pause_s = POLL_S_MIN
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    def shorten(self, found: Server) -> None:
        """Wait for one answer no longer than for all of them, and some seconds."""
        if self._deadline_s is not None:
            client = found.api.client
            client.timeout_s = min(client.timeout_s, max(self._deadline_s, ANSWER_S_MIN))

    def wait(self) -> None:
        """Sleep until the next look is due. Raises TimedOut."""
        pause = self._pause_s
        if self._end is not None:
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{self._what} after {self._deadline_s:g} s", hint="--deadline allows longer waits")
            pause = min(pause, left)
        time.sleep(pause)
        self._pause_s = min(self._pause_s * 1.5, POLL_S_MAX)


class InfoRow(NamedTuple):
    """A bookie at a glance."""

    server: Server
    answer: BookieState
    space: DiskSpace


INFO_COLUMNS = Columns(
    BOOKIE,
    URL,
    *_STATE,
    Column("TOTAL", "totalSpace", "space.total", Kind.SIZE),
    Column("FREE", "freeSpace", "space.free", Kind.SIZE),
    Column("USED", "usedSpace", "space.used", Kind.SIZE),
    Column(
        "USED %", "usedPercent", lambda row: round(row.space.used_percent, 2), Kind.INTEGER,
        text=lambda value: f"{value:.1f}%",
    ),
    key="url",
)  # fmt: skip


@command(app, "info", connects=True)
def info(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show a bookie at a glance: its state, and the space on its ledger disks."""
    with server(run, which) as found:

        def look() -> Iterator[InfoRow]:
            yield InfoRow(found, found.api.state(), found.api.space())

        run.watch(watch, look, INFO_COLUMNS, single=True)


# --- readonly -------------------------------------------------------------------------------------------------------


class Switch(StrEnum):
    """On or off."""

    ON = "on"
    OFF = "off"


READ_ONLY_COLUMNS = Columns(
    BOOKIE, URL, Column("READ ONLY", "readOnly", "answer", Kind.BOOLEAN, style={"yes": YELLOW}), key="url"
)


@command(app, "readonly", connects=True)
def readonly(
    run: Run,
    which: BookieServerOption,
    wanted: Annotated[
        Switch | None, typer.Argument(metavar="on|off", help="What it shall be (default: only shown).")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Show whether a bookie is read-only, or switch that on or off.

    `on`: it takes no more entries, so writers put other bookies in its place; it goes on to serve reads, and its
    entries stay. It is kept over a restart only where the bookie has persistBookieStatusEnabled=true, and refused where
    it has readOnlyModeEnabled=false. `off`: it takes entries again, unless its disks are full.
    """
    with server(run, which, changes=wanted is not None and not dry_run) as found:
        before = found.api.read_only()
        if wanted is None:
            run.show(Asked(found, before), READ_ONLY_COLUMNS)
            return
        on = wanted is Switch.ON
        if before is on:
            run.note(f"bkctl: {found.name} is {'read-only' if on else 'writable'} already")
        elif dry_run:
            run.note(f"bkctl: Dry run: {found.name} would become {'read-only' if on else 'writable'}")
        after = before if dry_run else found.api.set_read_only(on)
        run.show(Asked(found, after), READ_ONLY_COLUMNS)
        if dry_run:
            return
        if after is not on:
            raise BkctlError(f"{found.name} is {'read-only' if after else 'writable'} all the same")
        if before is not on:
            run.note(f"bkctl: {_meaning(found, on)}")


def _meaning(found: Server, on: bool) -> str:
    if not on:
        return f"{found.name} takes entries again, unless its disks are full"
    text = (
        f"{found.name} takes no more entries and serves reads; that is kept over a restart with "
        "persistBookieStatusEnabled=true only; 'bookie readonly off' ends it"
    )
    if found.cluster is not None:
        others = [each for each in found.cluster.bookies.list(include_down=False) if each.bookie_id != found.bookie_id]
        count = sum(each.state == "rw" for each in others)
        text += f". {count:,} other {'bookie is' if count == 1 else 'bookies are'} writable"
    return text


# --- gc -------------------------------------------------------------------------------------------------------------


class Compactions(StrEnum):
    """Which compactions to suspend or resume."""

    MAJOR = "major"
    MINOR = "minor"
    BOTH = BOTH_COMPACTIONS


class CollectorRow(NamedTuple):
    """One garbage collector of a bookie."""

    number: int
    collection: GarbageCollection
    status: CollectorStatus


def _doing(running: str, suspended: str) -> Callable[[CollectorRow], str]:
    def text(row: CollectorRow) -> str:
        if getattr(row.status, running):
            return "running"
        return "suspended" if getattr(row.collection, suspended) else "idle"

    return text


def _seconds(milliseconds: int) -> str:
    return iso_time(milliseconds - milliseconds % 1000).replace(".000Z", "Z")


_DOING_STYLE = {"running": GREEN, "suspended": YELLOW}
COLLECTOR_COLUMNS = Columns(
    Column("#", "collector", "number", Kind.INTEGER),
    Column(None, "isInForceGc", "collection.in_force_gc", Kind.BOOLEAN),
    Column(None, "isMajorGcSuspended", "collection.major_suspended", Kind.BOOLEAN),
    Column(None, "isMinorGcSuspended", "collection.minor_suspended", Kind.BOOLEAN),
    Column(None, "forceCompacting", "status.force_compacting", Kind.BOOLEAN),
    Column(None, "majorCompacting", "status.major_compacting", Kind.BOOLEAN),
    Column(None, "minorCompacting", "status.minor_compacting", Kind.BOOLEAN),
    Column(None, "lastMajorCompactionTime", "status.last_major_compaction_time", Kind.TIME),
    Column(None, "lastMinorCompactionTime", "status.last_minor_compaction_time", Kind.TIME),
    Column(None, "lastEntryLocationCompactionTime", "status.last_entry_location_compaction_time", Kind.TIME),
    Column(None, "majorCompactionCounter", "status.major_compaction_counter", Kind.INTEGER),
    Column(None, "minorCompactionCounter", "status.minor_compaction_counter", Kind.INTEGER),
    Column(None, "entryLocationCompactionCounter", "status.entry_location_compaction_counter", Kind.INTEGER),
    Column(None, "scopedDeletesHeldBack", "status.scoped_deletes_held_back", optional=True),
    key="collector",
)
COLLECTOR_TABLE_COLUMNS = Columns(
    Column("#", "collector", "number", Kind.INTEGER),
    Column("FORCED", "forceCompacting", "status.force_compacting", Kind.BOOLEAN, style={"yes": GREEN}),
    Column("MAJOR", "major", _doing("major_compacting", "major_suspended"), style=_DOING_STYLE),
    Column("MINOR", "minor", _doing("minor_compacting", "minor_suspended"), style=_DOING_STYLE),
    Column("MAJORS", "majorCompactionCounter", "status.major_compaction_counter", Kind.INTEGER),
    Column("LAST MAJOR", "lastMajorCompactionTime", "status.last_major_compaction_time", Kind.INTEGER, text=_seconds),
    Column("MINORS", "minorCompactionCounter", "status.minor_compaction_counter", Kind.INTEGER),
    Column("LAST MINOR", "lastMinorCompactionTime", "status.last_minor_compaction_time", Kind.INTEGER, text=_seconds),
    key="collector",
)


def _collector_columns(output: Output) -> Columns:
    return COLLECTOR_TABLE_COLUMNS if output is Output.TABLE else COLLECTOR_COLUMNS


@command(app, "gc", connects=True, asks=True)
def gc(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    watch: WatchOption,
    major: Annotated[
        bool, typer.Option("--major", help="Force a round with major compaction, minor not unless asked.")
    ] = False,
    minor: Annotated[
        bool, typer.Option("--minor", help="Force a round with minor compaction, major not unless asked.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the forced round is over.")] = False,
    accept_scoped_deletes: Annotated[
        bool,
        typer.Option(
            "--accept-scoped-deletes",
            help="Let this one round delete as many ledgers of scopes as it finds deleted; a bookie of bkctl stops at "
            "more than half of them otherwise. Asks.",
        ),
    ] = False,
    suspend: Annotated[
        Compactions | None,
        typer.Option(
            "--suspend", metavar="[major|minor]", help="Start no such compaction from now on (default: both)."
        ),
    ] = None,
    resume: Annotated[
        Compactions | None,
        typer.Option("--resume", metavar="[major|minor]", help="Start such compactions again (default: both)."),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Only show how it stands.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Have a bookie collect garbage now, suspend or resume its compactions, or show how that stands.

    A round drops the ledgers that the metadata store no longer has, deletes entry logs with nothing of use in them, and
    compacts those with little. Without --major and --minor it does both, as far as they are not suspended. There is a
    collector for each ledger directory with DbLedgerStorage, else one. Suspended compactions go on where they run, and
    are resumed by a restart.
    """  # fmt: skip
    switches = suspend is not None or resume is not None
    forces = not (switches or status)
    _check_gc_options(forces=forces, switches=switches, status=status, wait=wait, deadline=deadline, watch=watch,
                      others=major or minor or wait or accept_scoped_deletes)  # fmt: skip
    with server(run, which, changes=not status and not dry_run) as found:
        api = found.api
        if accept_scoped_deletes and not dry_run:
            run.confirm(
                f"{found.name} would delete all that it has of every ledger of a scope that the metadata store does "
                "not name, however many those are"
            )
        if status:
            shown: list[GarbageCollection] = []

            def look() -> Iterator[CollectorRow]:
                shown[:] = [api.garbage_collection()]
                return _collector_rows(shown[0])

            run.watch(watch, look, _collector_columns(run.output))
            for reason in _held_back(shown[0]):
                run.note(f"bkctl: {found.name} keeps ledgers of scopes that seem deleted: {reason}")
            return
        if dry_run:
            run.note(f"bkctl: Dry run: {found.name} would {_gc_plan(major, minor, suspend, resume)}")
        elif switches:
            for which_ones, change in ((suspend, api.suspend_compaction), (resume, api.resume_compaction)):
                if which_ones is not None:
                    both = which_ones is Compactions.BOTH
                    change(major=both or which_ones is Compactions.MAJOR, minor=both or which_ones is Compactions.MINOR)
        else:
            _force_gc(run, found, major, minor, accept_scoped_deletes, wait, deadline)
        after = api.garbage_collection()
        run.render(_collector_rows(after), _collector_columns(run.output))
        held_back = _held_back(after)
        if held_back and forces and wait:
            raise FindingsError(
                f"{found.name} kept ledgers of scopes that seem deleted: {held_back[0]}",
                hint="check that; 'bookie gc --accept-scoped-deletes' lets one round delete them",
            )


def _check_gc_options(
    *, forces: bool, switches: bool, status: bool, wait: bool, others: bool, deadline: float | None, watch: float | None
) -> None:
    if status and switches:
        raise UsageError("--status and --suspend or --resume are given", hint="give one of them")
    if not forces and others:
        raise UsageError("--major, --minor, --wait and --accept-scoped-deletes are for a round to be forced")
    if deadline is not None and not wait:
        raise UsageError("--deadline goes with --wait", hint="add --wait")
    if watch is not None and not status:
        raise UsageError("--watch goes with --status", hint="add --status")


def _gc_plan(major: bool, minor: bool, suspend: Compactions | None, resume: Compactions | None) -> str:
    if suspend is None and resume is None:
        kinds = [name for name, wanted in (("major", major), ("minor", minor)) if wanted]
        return f"collect garbage now, with {' and '.join(kinds)} compaction" if kinds else "collect garbage now"
    return " and ".join(
        f"{what} {'major and minor' if chosen is Compactions.BOTH else chosen} compactions"
        for what, chosen in (("suspend", suspend), ("resume", resume))
        if chosen is not None
    )


def _force_gc(
    run: Run, found: Server, major: bool, minor: bool, accept: bool, wait: bool, deadline: float | None
) -> None:
    api = found.api
    patience = Patience(f"{found.name} still collects garbage", deadline)
    patience.shorten(found)
    busy = api.garbage_collection().in_force_gc
    if busy and not wait:
        run.note(f"bkctl: {found.name} is in a forced round already, and starts no other; --wait does afterwards")
    with run.working("Collecting garbage", enabled=wait):
        while busy and wait:
            patience.wait()
            busy = api.garbage_collection().in_force_gc
        chosen: tuple[bool | None, bool | None] = (major, minor) if major or minor else (None, None)
        run.detail(api.force_garbage_collection(major=chosen[0], minor=chosen[1], accept_scoped_deletes=accept))
        while wait:
            now = api.garbage_collection()
            if not (now.in_force_gc or any(each.force_compacting for each in now.collectors)):
                break
            patience.wait()


def _held_back(collection: GarbageCollection) -> list[str]:
    """Why collectors deleted no scoped ledgers in their last round."""
    return [each.scoped_deletes_held_back for each in collection.collectors if each.scoped_deletes_held_back]


def _collector_rows(collection: GarbageCollection) -> Iterator[CollectorRow]:
    for number, status in enumerate(collection.collectors):
        yield CollectorRow(number, collection, status)


# --- compact-locations ----------------------------------------------------------------------------------------------


class LocationsRow(NamedTuple):
    """A database of entry locations."""

    path: str
    compacting: bool


LOCATIONS_COLUMNS = Columns(
    Column("DATABASE", "path", "path"),
    Column("COMPACTING", "compacting", "compacting", Kind.BOOLEAN, style={"yes": GREEN}),
    key="path",
)
#: A bookie that was told to compact begins a moment later.
BEGIN_S: Final = 1.0


@command(app, "compact-locations", connects=True)
def compact_locations(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    databases: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATABASE", help="Only these, by their paths on the bookie, as --status shows them."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Only show whether it is under way.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Have a bookie with DbLedgerStorage compact its RocksDBs of entry locations, which makes reads fast again.

    It is worth it after many ledgers were deleted; it reads and writes the whole database.
    """
    if status and (wait or databases):
        raise UsageError("--status shows all databases, and changes nothing", hint="drop what else is given")
    if deadline is not None and not wait:
        raise UsageError("--deadline goes with --wait", hint="add --wait")
    with server(run, which, changes=not status and not dry_run) as found:
        known = found.api.location_compactions()
        if not known:
            raise Unsupported(
                f"{found.name} has no databases of entry locations", hint="only DbLedgerStorage keeps them in RocksDB"
            )
        unknown = [path for path in databases or () if path not in known]
        if unknown:
            raise NotFound(f"{found.name} has no database {unknown[0]}", hint=f"it has {', '.join(known)}")
        chosen = databases or list(known)
        if dry_run:
            run.note(f"bkctl: Dry run: {found.name} would compact {', '.join(chosen)}")
        elif not status:
            run.detail(found.api.compact_locations(databases or ()))
            known = found.api.location_compactions()
            if wait:
                known = _wait_for_locations(run, found, chosen, deadline)
        run.render((LocationsRow(path, known[path]) for path in chosen if path in known), LOCATIONS_COLUMNS)


def _wait_for_locations(run: Run, found: Server, chosen: list[str], deadline: float | None) -> dict[str, bool]:
    patience, began = Patience(f"{found.name} still compacts", deadline), time.monotonic()
    patience.shorten(found)
    seen = False
    with run.working("Compacting"):
        while True:
            now = found.api.location_compactions()
            busy = any(now.get(path) for path in chosen)
            seen = seen or busy
            if not busy and (seen or time.monotonic() - began > BEGIN_S):
                return now
            patience.wait()


# --- sanity ---------------------------------------------------------------------------------------------------------


class SanityRow(NamedTuple):
    """How a bookie's test went; `result` where we made it ourselves."""

    bookie_id: str | None
    url: str | None
    passed: bool
    read_only: bool
    result: RoundTrip | None


def _ms(milliseconds: int) -> str:
    return f"{milliseconds:,} ms"


SANITY_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("URL", "url", "url"),
    Column("PASSED", "passed", "passed", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("READ ONLY", "readOnly", "read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column(
        "ENTRIES", "entryCount", lambda row: row.result and row.result.entry_count, Kind.INTEGER, optional=True
    ),
    Column(
        "WRITTEN IN", "writeMilliseconds", lambda row: row.result and round(row.result.write_s * 1000), Kind.INTEGER,
        optional=True, text=_ms,
    ),
    Column(
        "READ IN", "readMilliseconds", lambda row: row.result and round(row.result.read_s * 1000), Kind.INTEGER,
        optional=True, text=_ms,
    ),
)  # fmt: skip


@command(app, "sanity", connects=True, changes=True)
def sanity(
    run: Run,
    which: BookieServerOption,
    count: Annotated[int, count_option("--entries", "Entries to write.", default=10, short="-e")],
    deadline: Annotated[
        float | None, duration_option("--deadline", "Give up after this long (exit code 6).", short="-t")
    ],
    scope: Annotated[
        str | None,
        typer.Option("--ledger-scope-id", metavar="SCOPE", help="Scope of the ledger (default 0)."),
    ] = None,
) -> None:
    """Test a bookie: write a ledger on it alone, read it open and closed, compare, delete it.

    The bookie named by --bookie is tested over the wire, wherever it is. With --bookie-url alone it is asked to test
    itself, as Apache's bookies can too. Exit code 3: it did not pass, or takes no entries since it is read-only.
    """
    if which.bookie_id is None:
        if scope is not None:
            raise UsageError("--ledger-scope-id goes with --bookie", hint="a bookie tests itself in scope 0")
        with server(run, which) as found, run.working("The bookie tests itself"):
            answer = found.api.sanity()
        row = SanityRow(None, found.url, answer.passed, answer.read_only, None)
    else:
        row = _sanity_over_the_wire(
            run, which.bookie_id, count, 0 if scope is None else parse_scope_id(scope), deadline
        )
    run.show(row, SANITY_COLUMNS)
    if not row.passed:
        name = f"Bookie {row.bookie_id}" if row.bookie_id else f"The bookie at {row.url}"
        if row.read_only:
            raise FindingsError(f"{name} is read-only, so no entry was written")
        raise FindingsError(f"{name} did not pass its test", hint="its log says why")


def _sanity_over_the_wire(run: Run, bookie_id: str, count: int, scope_id: int, deadline: float | None) -> SanityRow:
    async def work() -> RoundTrip:
        import asyncio

        from bkctl.client.operations import sanity_test

        try:
            async with asyncio.timeout(deadline), run.bookkeeper(cluster, only={bookie_id}) as bookkeeper:
                return await sanity_test(
                    bookkeeper, ledger_scope_id=scope_id, entry_count=count, progress=activity.update
                )
        except TimeoutError as error:
            raise TimedOut(f"The test of bookie {bookie_id} was not over after {deadline:g} s") from error

    with run.cluster() as cluster, run.working("Writing and reading", total=count, unit="entries") as activity:
        bookie = registered_bookie(cluster, bookie_id)
        if bookie.state == "down":
            raise Unreachable(f"Bookie {bookie_id} is down", hint="'bkctl bookies list' shows who is up")
        if bookie.state == "ro":
            return SanityRow(bookie_id, None, False, True, None)
        return SanityRow(bookie_id, None, True, False, run.complete(work()))


# --- config ---------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting of a bookie."""

    name: str
    value: Any


SETTING_COLUMNS = Columns(
    Column("NAME", "name", "name"), Column("VALUE", "value", "value", Kind.NESTED, text=str), key="name"
)
HIDDEN: Final = "***"


def _settings(values: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in values["settings_to_set"] or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r}: not NAME=VALUE")
        if name in found:
            raise UsageError(f"--set {name!r} is given twice")
        found[name] = value
    return found


SettingsToSet = Annotated[
    dict[str, str],
    Composite(
        (
            parameter(
                "settings_to_set",
                Annotated[
                    list[str],
                    typer.Option(
                        "--set", metavar="NAME=VALUE", help="Change this setting in the bookie's memory; repeatable."
                    ),
                ],
            ),
        ),
        _settings,
    ),
]


@command(app, "config", connects=True)
def config(
    run: Run,
    which: BookieServerOption,
    changed: SettingsToSet,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Only these settings; * and ? stand for any characters."),
    ] = None,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Also passwords and tokens.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Show the settings that a running bookie has, or change some in its memory.

    Apache's bookies show what their file sets, and no defaults. What --set changes is forgotten at the next start, and
    most settings are read at the start only: change the bookie's file too.
    """
    if changed and names:
        raise UsageError("Names and --set are given", hint="--set shows what it changed")
    with server(run, which, changes=bool(changed) and not dry_run) as found:
        settings = found.api.config()
        if changed:
            rows = [Setting(name, settings.get(name)) for name in changed]
            if dry_run:
                run.note(f"bkctl: Dry run: {found.name} would set {', '.join(changed)}; now it has")
            else:
                run.detail(found.api.set_config(changed))
                settings = found.api.config()
                rows = [Setting(name, settings.get(name)) for name in changed]
        else:
            rows = [Setting(name, settings[name]) for name in sorted(settings) if _is_asked_for(name, names)]
        run.render((each if show_secrets else _without_secret(each) for each in rows), SETTING_COLUMNS)
        missing = [name for name in names or () if not any(_is_asked_for(each, [name]) for each in settings)]
        if missing:
            raise NotFound(
                f"{found.name} shows no setting {missing[0]}", hint="Apache's bookies show only what was set"
            )
        if changed and not dry_run:
            run.note(f"bkctl: {found.name} forgets this when it stops, and reads most settings at its start only")


def _is_asked_for(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _without_secret(setting: Setting) -> Setting:
    """The setting as it may be printed: a password as `***`, and one within a URI."""
    from bkctl.redaction import is_secret_name

    if isinstance(setting.value, str):
        if is_secret_name(setting.name) and setting.value:
            return setting._replace(value=HIDDEN)
        return setting._replace(value=shown_uri(setting.value))
    return setting


# --- metrics --------------------------------------------------------------------------------------------------------


def _number(metric: Metric) -> int | float | str:
    """The value as JSON has it; what is no number there is text, as Prometheus writes it."""
    value = metric.value
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


def _labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


def _sample_id(metric: Metric) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in metric.labels.items())
    return f"{metric.name}{{{labels}}}" if labels else metric.name


METRIC_COLUMNS = Columns(
    Column("METRIC", "name", "name"),
    Column("LABELS", "labels", "labels", Kind.NESTED, flexible=True, text=_labels_text),
    Column("VALUE", "value", _number, Kind.NESTED, text=str),
    Column("TYPE", "type", "type"),
    key=Column(None, "sample", _sample_id),
)


@command(app, "metrics", connects=True)
def metrics(
    run: Run,
    which: BookieServerOption,
    watch: WatchOption,
    match: Annotated[
        str | None,
        typer.Option(
            "--match", metavar="PATTERN", help="Only metrics with this in their name; with * and ? it is all of it."
        ),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print Prometheus' text as the bookie sent it.")] = False,
) -> None:
    """Show a bookie's metrics: one row for each sample.

    Apache's bookies have them with statsProviderClass=…PrometheusMetricsProvider only.
    """
    if raw and (match is not None or watch is not None):
        raise UsageError("--raw prints all, once", hint="drop --match and --watch")
    with server(run, which) as found:
        if raw:
            run.text(found.api.metrics())
            return

        def look() -> Iterator[Metric]:
            from bkctl.http.client import parse_metrics

            for metric in parse_metrics(found.api.metrics(), f"{found.url}/metrics"):
                if match is None or _matches(metric.name, match):
                    yield metric

        run.watch(watch, look, METRIC_COLUMNS)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if any(char in pattern for char in "*?[") else pattern in name
