"""`bkctl bookie state`, `ready`, `info` and `readonly`, and the server of the running bookie that commands address."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, FindingsError, NotFound, TimedOut, Unreachable, Unsupported, UsageError

from ..kit.columns import PlainRow
from ..kit.command import Run, command, group, object_of
from ..kit.options import Composite, WatchOption, combined, duration_option, flag, option, word
from ..kit.texts import GREEN, RED, YELLOW

if TYPE_CHECKING:
    from bkctl.http.bookie_client import BookieApi
    from bkctl.metadata.cluster import Cluster

app = group()


class ServerChoice(NamedTuple):
    """The bookie that a command addresses: by id, or by the URL of an HTTP server, which takes precedence."""

    bookie_id: str | None
    url: str | None


def _bookie_server(bookie_id: str | None, url: str | None) -> ServerChoice:
    if bookie_id is None and url is None:
        url = os.environ.get("BKCTL_BOOKIE_URL") or None
    return ServerChoice(bookie_id, url)


#: `--bookie` and `--bookie-url`; `server` turns them into a BookieApi.
BookieServerOption = Annotated[
    ServerChoice,
    combined(
        _bookie_server,
        option("--bookie BOOKIE", "The bookie, whose registered HTTP server is used."),
        option(
            "--bookie-url URL",
            "The HTTP server, http[s]://HOST:PORT, also that of a gateway (then with --bookie); no cluster is "
            "needed. [BKCTL_BOOKIE_URL; its token: BKCTL_API_TOKEN]",
        ),
    ),
]


class Server(NamedTuple):
    """A bookie's HTTP server. `cluster` is the open cluster that named it, if one did."""

    api: BookieApi
    bookie_id: str | None
    cluster: Cluster | None

    @property
    def url(self) -> str:
        """The server's URL."""
        return self.api.client.url

    @property
    def name(self) -> str:
        """The bookie for messages."""
        return f"Bookie {self.bookie_id}" if self.bookie_id else f"The bookie at {self.url}"


def server(run: Run, which: ServerChoice, *, changes: bool = False) -> Server:
    """Return the HTTP server that the options name: --bookie-url, else that of --bookie, else that of --conf.

    `changes`: the audit log records the command. Raises UsageError if no option names a server.
    """
    return finder(run, which, changes=changes)()


def finder(run: Run, which: ServerChoice, *, changes: bool = False) -> Callable[[], Server]:
    """Return a function that returns the server that the bookie has registered at the time of the call.

    A call raises BookieUnavailable while the bookie is not registered.
    """
    from bkctl.http.bookie_client import BookieApi

    url = which.url
    if url is None and which.bookie_id is None:
        url = _url_of_conf(run)
    if changes:
        run.consent.start_audit(begun=url is not None)
    if url is not None:
        only = Server(BookieApi(run.access.http_client(url), which.bookie_id), which.bookie_id, None)
        return lambda: only
    bookie_id = which.bookie_id
    assert bookie_id is not None
    cluster = run.cluster
    return lambda: Server(run.access.bookie_api(run.bookie(bookie_id)), bookie_id, cluster)


def _url_of_conf(run: Run) -> str:
    """Return the HTTP server of the bookie whose configuration --conf is."""
    from bkctl.config import read_properties
    from bkctl.http.server_url import LOOPBACK, WILDCARDS, is_of_this_machine

    if run.access.conf is None:
        raise UsageError(
            "No bookie is named", hint="add --bookie BOOKIE ('bkctl bookies list' shows them) or --bookie-url URL"
        )
    settings = read_properties(run.access.conf)
    if (settings.get("httpServerEnabled") or "false").lower() != "true":
        raise UsageError(
            f"{run.access.conf}: the bookie has no HTTP server (httpServerEnabled)",
            hint="name another with --bookie-url",
        )
    host = settings.get("httpServerHost") or "0.0.0.0"
    scheme = "https" if (settings.get("httpServerTlsEnable") or "").lower() == "true" else "http"
    if host in WILDCARDS:  # on every address; without a token, all but probes on loopback only
        advertised = settings.get("advertisedAddress")
        # A certificate is for the advertised host.
        is_named = advertised and (scheme == "https" or is_of_this_machine(advertised) is False)
        host = advertised if advertised and is_named else LOOPBACK
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.get('httpServerPort') or '8080'}"


BOOKIE: Final = Column("BOOKIE", "bookieId", "server.bookie_id")
URL: Final = Column("URL", "url", "server.url")

#: The first and the longest pause between two looks at background work of a bookie.
POLL_S_MIN: Final = 0.05
POLL_S_MAX: Final = 1.0
#: The shortest timeout of one answer, even if the deadline is nearer.
ANSWER_S_MIN: Final = 5.0
_DEADLINE: Final = duration_option("--deadline", "With --wait: give up after this long (default: never; exit code 6).")


def _deadline(values: Mapping[str, Any]) -> float | None:
    found: float | None = _DEADLINE.resolve(values)
    if found is not None and not values["wait"]:
        raise UsageError("--deadline requires --wait", hint="add --wait")
    return found


#: `--deadline` of a command with `--wait`, in seconds.
WaitDeadline = Annotated[float | None, Composite(_DEADLINE.parameters, _deadline)]


class Patience:
    """Grows the pauses between two attempts; raises TimedOut with the text `what` at the deadline."""

    def __init__(self, what: str, deadline_s: float | None) -> None:
        self._what, self._deadline_s = what, deadline_s
        self._pause_s = POLL_S_MIN
        self._end = None if deadline_s is None else time.monotonic() + deadline_s

    def shorten(self, found: Server) -> None:
        """Lower the timeout of the server's client to the deadline, but not below ANSWER_S_MIN."""
        if self._deadline_s is not None:
            client = found.api.client
            client.timeout_s = min(client.timeout_s, max(self._deadline_s, ANSWER_S_MIN))

    def wait(self) -> None:
        """Sleep until the next request is due. Raises TimedOut after the deadline."""
        pause = self._pause_s
        if self._end is not None:
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimedOut(f"{self._what} after {self._deadline_s:g} s", hint="--deadline allows longer waits")
            pause = min(pause, left)
        time.sleep(pause)
        self._pause_s = min(self._pause_s * 1.5, POLL_S_MAX)


STATE = (
    Column("RUNNING", "running", "answer.running", Kind.BOOLEAN, style={"no": RED}),
    Column("READ ONLY", "readOnly", "answer.read_only", Kind.BOOLEAN, style={"yes": YELLOW}),
    Column("SHUTTING DOWN", "shuttingDown", "answer.shutting_down", Kind.BOOLEAN, style={"yes": RED}),
    Column(
        "HIGH-PRIORITY WRITES", "availableForHighPriorityWrites", "answer.available_for_high_priority_writes",
        Kind.BOOLEAN,
    ),
)  # fmt: skip
STATE_COLUMNS = Columns(BOOKIE, URL, *STATE, key="url")


@command(app, "state", connects=True, prints=object_of(STATE_COLUMNS))
def state(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show whether a bookie runs, is read-only or stops.

    A read-only bookie may still accept high-priority writes, which ledger recovery uses. A warning says why a bookie
    that runs is not ready: above all that it lost its registration in the metadata store.

    $ bkctl bookie state --bookie-url http://127.0.0.1:8080
    """
    found = server(run, which)
    with suppress(NotFound, Unsupported):  # an old bookie of Apache's has no such path
        readiness = found.api.readiness()
        if not readiness.ready:
            run.out.warn(f"{found.name} is not ready: {readiness.message}")
    run.out.watch(watch, lambda: iter([PlainRow(server=found, answer=found.api.state())]), STATE_COLUMNS, single=True)


READY_COLUMNS = Columns(
    BOOKIE,
    URL,
    Column("READY", "ready", "answer.ready", Kind.BOOLEAN, style={"yes": GREEN, "no": RED}),
    Column("ANSWER", "message", "answer.message"),
    key="url",
)


@command(app, "ready", connects=True, prints=object_of(READY_COLUMNS))
def ready(
    run: Run,
    which: BookieServerOption,
    deadline: WaitDeadline,
    wait: Annotated[bool, flag("--wait", "Wait until the bookie is ready, also while it is down.")] = False,
) -> None:
    """Show whether a bookie serves, for probes.

    Exit code 3 if the bookie is not ready.

    $ bkctl bookie ready --bookie-url http://127.0.0.1:8080 --wait --deadline 60s
    """
    find = finder(run, which)
    with run.job.working("Waiting for the bookie", enabled=wait):
        patience = Patience(f"Bookie {which.bookie_id or which.url or run.access.conf} is not ready", deadline)
        answer = _readiness(find, patience, wait=wait)
    run.out.show(answer, READY_COLUMNS)
    if not answer.answer.ready:
        raise FindingsError(f"{answer.server.name} is not ready: {answer.answer.message}")


def _readiness(find: Callable[[], Server], patience: Patience, *, wait: bool) -> PlainRow:
    """Return the bookie's answer, with `wait` once it is ready. Raises Unreachable, or TimedOut at the deadline."""
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
                return PlainRow(server=found, answer=readiness)
        patience.wait()


INFO_COLUMNS = Columns(
    BOOKIE,
    URL,
    *STATE,
    Column("TOTAL", "totalSpace", "space.total", Kind.SIZE),
    Column("FREE", "freeSpace", "space.free", Kind.SIZE),
    Column("USED", "usedSpace", "space.used", Kind.SIZE),
    Column(
        "USED %", "usedPercent", lambda row: round(row.space.used_percent, 2), Kind.INTEGER,
        text=lambda value: f"{value:.1f}%",
    ),
    key="url",
)  # fmt: skip


@command(app, "info", connects=True, prints=object_of(INFO_COLUMNS))
def info(run: Run, which: BookieServerOption, watch: WatchOption) -> None:
    """Show a bookie's state and the space on its disks.

    $ bkctl bookie info --bookie-url http://127.0.0.1:8080
    """
    found = server(run, which)
    run.out.watch(
        watch,
        lambda: [PlainRow(server=found, answer=found.api.state(), space=found.api.space())],
        INFO_COLUMNS,
        single=True,
    )


Switch = StrEnum("Switch", "ON OFF")

READ_ONLY_COLUMNS = Columns(
    BOOKIE, URL, Column("READ ONLY", "readOnly", "answer", Kind.BOOLEAN, style={"yes": YELLOW}), key="url"
)


@command(app, "readonly", connects=True, changes=None, dry_run=True, prints=object_of(READ_ONLY_COLUMNS))
def readonly(
    run: Run,
    which: BookieServerOption,
    wanted: Annotated[Switch | None, word("on|off", "The new state (default: show the state).")] = None,
) -> None:
    """Show or switch a bookie's read-only state.

    `on`: the bookie accepts no more entries, so writers replace it with other bookies; it continues to serve reads and
    keeps its entries. The state survives a restart only if the bookie has persistBookieStatusEnabled=true; it is
    refused if the bookie has readOnlyModeEnabled=false. `off`: the bookie accepts entries again, unless its disks are
    full.

    $ bkctl bookie readonly --bookie-url http://127.0.0.1:8080
    $ bkctl bookie readonly on --bookie-url http://127.0.0.1:8080 --dry-run
    """
    found = server(run, which, changes=wanted is not None and not run.dry_run)
    before = found.api.read_only()
    if wanted is None:
        run.out.show(PlainRow(server=found, answer=before), READ_ONLY_COLUMNS)
        return
    on = wanted is Switch.ON
    if before is on:
        run.out.note(f"{found.name} is {'read-only' if on else 'writable'} already")
    elif run.dry_run:
        run.out.note_dry_run(f"{found.name} would become {'read-only' if on else 'writable'}")
    after = before if run.dry_run else found.api.set_read_only(on)
    run.out.show(PlainRow(server=found, answer=after), READ_ONLY_COLUMNS)
    if run.dry_run:
        return
    if after is not on:
        raise BkctlError(f"{found.name} is still {'read-only' if after else 'writable'}")
    if before is not on:
        run.out.note(_meaning(found, on))


def _meaning(found: Server, on: bool) -> str:
    if not on:
        return f"{found.name} takes entries again, unless its disks are full"
    text = (
        f"{found.name} accepts no more entries and serves reads; the state is kept over a restart with "
        "persistBookieStatusEnabled=true only; 'bookie readonly off' ends it"
    )
    if found.cluster is not None:
        others = [each for each in found.cluster.bookies.list(include_down=False) if each.bookie_id != found.bookie_id]
        count = sum(each.state == "rw" for each in others)
        text += f". {count:,} other {'bookie is' if count == 1 else 'bookies are'} writable"
    return text
