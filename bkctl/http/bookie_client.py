"""The endpoints of a bookie's HTTP server as typed calls, for Apache's bookies and ours.

Apache's server (VertxHttpServer, HttpRouter) sends some booleans as strings, most texts as a JSON string without a
content type, and 404 for an unknown method. The calls return typed values; an answer of another shape raises
ProtocolError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, get_type_hints

from bkctl.bookie.collector_metadata import GarbageCollectionStatus
from bkctl.config import camel_case
from bkctl.errors import BkctlError, NotFound, ProtocolError, Unsupported
from bkctl.http.client import ApiClient, ApiResponse, server_message, shortened

T = TypeVar("T")
N = TypeVar("N", bound=tuple[Any, ...])

API_PREFIX: Final = "/api/v1"
#: The query parameter that names the bookie to a gateway of bkctl.
BOOKIE_PARAMETER: Final = "bookie"
#: The largest JSON answer: parsed, JSON takes many times its size, and the answers of these endpoints are small.
JSON_SIZE_BYTES_MAX: Final = 4 << 20
#: Numbers of a garbage collector that older releases do not send.
_LATER_NUMBERS: Final = {"lastEntryLocationCompactionTime": 0, "entryLocationCompactionCounter": 0}


class BookieState(NamedTuple):
    """The state of a bookie, as it reports it. Source: BookieStateService.BookieState."""

    running: bool
    read_only: bool
    shutting_down: bool
    available_for_high_priority_writes: bool


class DiskSpace(NamedTuple):
    """The space on a bookie's ledger disks in bytes. Source: BookieInfoService.BookieInfo."""

    free: int
    total: int

    @property
    def used(self) -> int:
        """Used bytes, of any program."""
        return self.total - self.free

    @property
    def used_percent(self) -> float:
        """The used part in percent."""
        return 100.0 * self.used / self.total if self.total > 0 else 0.0


class BookieSanity(NamedTuple):
    """The result of a bookie's test of itself. Source: BookieSanityService.BookieSanity."""

    passed: bool
    read_only: bool


class Readiness(NamedTuple):
    """The readiness of a bookie, and its message. Source: BookieIsReadyService."""

    ready: bool
    message: str


class GarbageCollection(NamedTuple):
    """The garbage collection of a bookie. Suspensions are None if the bookie's release cannot suspend.

    Its problems in words, "" without one, come from our bookies only: full disks suspend compaction, the last round
    failed.
    """

    in_force_gc: bool
    major_suspended: bool | None
    minor_suspended: bool | None
    collectors: tuple[GarbageCollectionStatus, ...]
    suspended_by_disks: str = ""
    last_round_problem: str = ""


class BookieApi:
    """The endpoints of one bookie's HTTP server.

    Every call raises as `ApiClient.call`, and ProtocolError for an answer of another shape. `bookie_id` names the
    bookie to a gateway; a bookie's own server refuses another's, and Apache's ignores it.
    Source: org.apache.bookkeeper.server.http.service.
    """

    def __init__(self, client: ApiClient, bookie_id: str | None = None) -> None:
        self.client = client
        #: The query of every request.
        self.query: Mapping[str, str] = {} if bookie_id is None else {BOOKIE_PARAMETER: bookie_id}

    def state(self) -> BookieState:
        """Return the bookie's state."""
        return self._object("GET", "/bookie/state").tuple_of(BookieState)

    def readiness(self) -> Readiness:
        """Return True and a message if the bookie serves; False while it starts or stops, without raising an error."""
        path = f"{API_PREFIX}/bookie/is_ready"
        with self.client.exchange("GET", path, self.query) as answer:
            if answer.status not in (200, 503):
                raise self.client.error_of(answer, "GET", path)
            message, _ = server_message(answer.response())
            if answer.status == 200 and message != "OK":
                raise _unexpected(f"{self.client.url}{path}", "not OK", message)
            return Readiness(answer.status == 200, message)

    def read_only(self) -> bool:
        """Return True if the bookie is read-only."""
        return self._object("GET", "/bookie/state/readonly").boolean("readOnly")

    def set_read_only(self, wanted: bool) -> bool:
        """Make the bookie read-only or writable; return True if it is read-only then.

        Raise BadRequest if its configuration makes it read-only, or forbids it.
        """
        return self._object("PUT", "/bookie/state/readonly", {"readOnly": wanted}).boolean("readOnly")

    def space(self) -> DiskSpace:
        """Return the space on the bookie's ledger disks."""
        fields = self._object("GET", "/bookie/info")
        free, total = fields.integer("freeSpace"), fields.integer("totalSpace")
        if not 0 <= free <= total:
            raise _unexpected(f"{self.client.url}{API_PREFIX}/bookie/info", "not space on disks", fields.values)
        return DiskSpace(free, total)

    def sanity(self) -> BookieSanity:
        """Let the bookie write, read and delete a ledger on itself; return the result."""
        return self._object("GET", "/bookie/sanity").tuple_of(BookieSanity)

    def garbage_collection(self) -> GarbageCollection:
        """Return the state of the bookie's garbage collection."""
        forced = self._object("GET", "/bookie/gc").boolean("is_in_force_gc")
        try:
            found = self._object("GET", "/bookie/gc/suspend_compaction")
        except (NotFound, Unsupported):
            return GarbageCollection(forced, None, None, tuple(self._collectors()))
        return GarbageCollection(
            forced, found.boolean("isMajorGcSuspended"), found.boolean("isMinorGcSuspended"),
            tuple(self._collectors()), found.text("suspendedByDisks"), found.text("lastRoundProblem"),
        )  # fmt: skip

    def _collectors(self) -> Iterator[GarbageCollectionStatus]:
        document, what = self._json("GET", "/bookie/gc_details")
        if not isinstance(document, list):
            raise _unexpected(what, "not a list", document)
        for item in document:
            fields = _Fields(item, what)
            fields.values = _LATER_NUMBERS | fields.values
            yield fields.tuple_of(GarbageCollectionStatus)

    def force_garbage_collection(
        self, *, major: bool | None = None, minor: bool | None = None, accept_scoped_deletes: bool = False
    ) -> str:
        """Start a garbage collection with major and minor compaction (None: unless suspended); return the message.

        While a forced round runs, no other one is queued. `accept_scoped_deletes` permits the round to delete any
        number of scoped ledgers that it finds deleted; otherwise our bookies hold a suspicious number back.
        """
        wanted = {"forceMajor": major, "forceMinor": minor, "acceptScopedDeletes": accept_scoped_deletes or None}
        given = {name: value for name, value in wanted.items() if value is not None}
        return self._text("PUT", "/bookie/gc", given or None)

    def switch_compaction(self, verb: str, *, major: bool, minor: bool) -> str:
        """Let the bookie `suspend` or `resume` (`verb`) major or minor compactions; return its message."""
        body = {f"{verb}Major": major, f"{verb}Minor": minor}
        return self._text("PUT", f"/bookie/gc/{verb}_compaction", body)

    def location_compactions(self) -> dict[str, bool]:
        """Return the paths of the entry location databases, with True for each that is being compacted."""
        fields = self._object("GET", "/bookie/entry_location_compact")
        return {name: fields.boolean(name) for name in fields.values}

    def compact_locations(self, paths: Sequence[str] = ()) -> str:
        """Compact entry location databases (no path: all of them); return the bookie's message.

        Raise BadRequest for an unknown path.
        """
        body = {"entryLocationRocksDBCompact": True, "entryLocations": ",".join(paths)}
        return self._text("PUT", "/bookie/entry_location_compact", body)

    def config(self) -> dict[str, Any]:
        """Return the current settings by name. Apache's bookies return only explicit settings, all as strings."""
        return self._object("GET", "/config/server_config").values

    def set_config(self, settings: Mapping[str, Any]) -> str:
        """Change settings until the bookie stops; return the bookie's message."""
        return self._text("PUT", "/config/server_config", dict(settings))

    def metrics(self) -> str:
        """Return the metrics in Prometheus' text format. Raise BkctlError if the bookie has no stats provider."""
        try:
            return self.client.call("GET", "/metrics", self.query).text
        except BkctlError as error:
            if "stats provider" in error.message.lower():
                provider = "statsProviderClass=org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider"
                raise BkctlError(error.message, hint=f"start the bookie with {provider}") from error
            raise

    def _object(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> _Fields:
        document, what = self._json(method, path, body)
        return _Fields(document, what)

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[Any, str]:
        """Return the JSON document of the answer, and its name for messages."""
        response = self._call(method, path, body)
        what = f"{self.client.url}{API_PREFIX}{path}"
        try:
            return json.loads(response.body), what
        except (ValueError, RecursionError) as error:
            raise ProtocolError(
                f"{what}: the answer is not JSON: {shortened(response.text)[:60]!r}", hint="is this a bookie's server?"
            ) from error

    def _text(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        return server_message(self._call(method, path, body))[0]

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> ApiResponse:
        data = None if body is None else json.dumps(body).encode("ascii")
        return self.client.call(method, API_PREFIX + path, self.query, data, size_max=JSON_SIZE_BYTES_MAX)


class _Fields:
    """A JSON object of an answer, with typed access to its values; `what` names it in messages."""

    def __init__(self, document: Any, what: str) -> None:
        if not isinstance(document, dict):
            raise _unexpected(what, "not an object", document)
        self.values: dict[str, Any] = document
        self._what = what

    def tuple_of(self, kind: type[N]) -> N:
        """Return the tuple whose fields the object has, under their names in camel case."""
        readers: dict[Any, Callable[[str], Any]] = {
            bool: self.boolean, int: self.integer, str | None: lambda name: self.text(name) or None,
        }  # fmt: skip
        return kind(*(readers[hint](camel_case(name)) for name, hint in get_type_hints(kind).items()))

    def boolean(self, name: str) -> bool:
        """Return a boolean, which Apache's server sends as a string in some answers."""
        return self._typed(name, "boolean", lambda value: {"True": True, "False": False}[str(value).capitalize()])

    def integer(self, name: str) -> int:
        return self._typed(name, "whole number", _whole)

    def text(self, name: str) -> str:
        """Return a string, "" if it is missing."""
        value = self.values.get(name, "")
        if not isinstance(value, str):
            raise _unexpected(f"{self._what}: {name!r}", "not a text", value)
        return value

    def _typed(self, name: str, kind: str, convert: Callable[[Any], T]) -> T:
        if name not in self.values:
            raise ProtocolError(f"{self._what} answered without {name!r}", hint="is this a bookie's server?")
        try:
            return convert(self.values[name])
        except (KeyError, ValueError) as error:
            raise _unexpected(f"{self._what}: {name!r}", f"not a {kind}", self.values[name]) from error


def _whole(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value


def _unexpected(what: str, problem: str, value: Any) -> ProtocolError:
    return ProtocolError(f"{what} is {problem}: {shortened(repr(value))[:60]}", hint="is this a bookie's server?")
