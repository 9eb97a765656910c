"""The running bookie that a command addresses, its HTTP server, and waiting for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from bkctl.columns import Column
from bkctl.errors import NotFound, TimedOut, UsageError

from ..kit.command import Run
from ..kit.options import Composite, combined, duration_option, option

if TYPE_CHECKING:
    from bkctl.http.bookie_client import BookieApi
    from bkctl.metadata.cluster import Cluster, RegisteredBookie


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
        option(
            "bookie_of_server",
            str,
            "--bookie",
            metavar="BOOKIE",
            help="The bookie, whose registered HTTP server is used.",
        ),
        option(
            "bookie_url",
            str,
            "--bookie-url",
            metavar="URL",
            help="The HTTP server, http[s]://HOST:PORT, also that of a gateway (then with --bookie); no cluster is "
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


@contextmanager
def server(run: Run, which: ServerChoice, *, changes: bool = False) -> Iterator[Server]:
    """Yield the HTTP server that the options name: --bookie-url, else that of --bookie, else that of --conf.

    `changes`: the audit log records the command. Raises UsageError if no option names a server.
    """
    with finder(run, which, changes=changes) as find:
        yield find()


@contextmanager
def finder(run: Run, which: ServerChoice, *, changes: bool = False) -> Iterator[Callable[[], Server]]:
    """Yield a function that returns the server that the bookie has registered at the time of the call.

    A call raises BookieUnavailable while the bookie is not registered.
    """
    from bkctl.http.bookie_client import BookieApi
    from bkctl.http.server_url import bookie_url

    url = which.url
    if url is None and which.bookie_id is None:
        url = _url_of_conf(run)
    if changes:
        run.consent.start_audit(begun=url is not None)
    if url is not None:
        only = Server(BookieApi(run.access.http_client(url), which.bookie_id), which.bookie_id, None)
        yield lambda: only
        return
    bookie_id = which.bookie_id
    assert bookie_id is not None
    found: dict[str, Server] = {}

    def find() -> Server:
        there = bookie_url(registered_bookie(cluster, bookie_id), run.access.bookie_host(bookie_id))
        if there not in found:
            found[there] = Server(BookieApi(run.access.http_client(there, is_registered=True)), bookie_id, cluster)
        return found[there]

    with run.access.cluster() as cluster:
        yield find


def registered_bookie(cluster: Cluster, bookie_id: str) -> RegisteredBookie:
    """Return the bookie as the cluster knows it. Raises NotFound."""
    bookie = cluster.bookies.get(bookie_id)
    if bookie is None:
        raise NotFound(f"No bookie {bookie_id} in {cluster.store.name}", hint="'bkctl bookies list' shows them")
    return bookie


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
