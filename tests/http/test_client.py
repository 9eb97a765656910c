"""The client of bookies' HTTP servers: what it makes of answers, and of servers that misbehave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from support.fake_http import HEAD, FakeServer, Reply, drips, is_silent, misbehaving, sends, sends_for_ever

from bkctl.errors import (
    BadRequest,
    BkctlError,
    BookieUnavailable,
    Conflict,
    NotFound,
    ProtocolError,
    TimedOut,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    Unsupported,
    UsageError,
)
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.http.bookie_client import JSON_SIZE_BYTES_MAX, BookieApi
from bkctl.http.bookie_load import Metric, parse_metrics
from bkctl.http.client import ANSWER_SIZE_BYTES_MAX, ApiAnswer, ApiClient
from bkctl.http.server_url import ServerUrl, bookie_url
from bkctl.metadata.cluster import RegisteredBookie

#: The bytes that the sockets on both sides may hold beside the bytes read.
IN_FLIGHT_BYTES_MAX = 16 << 20


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def api(fake: FakeServer) -> BookieApi:
    return BookieApi(ApiClient(fake.url))


# --- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://bookie:8080", "http://bookie:8080"),
        ("bookie:8080", "http://bookie:8080"),
        ("https://bookie", "https://bookie:443"),
        ("http://bookie/", "http://bookie:80"),
        ("http://[::1]:8080/some/where/", "http://[::1]:8080/some/where"),
    ],
)
def test_urls_have_a_host_a_port_and_maybe_a_prefix(text: str, url: str) -> None:
    assert str(ServerUrl.parse(text)) == url


@pytest.mark.parametrize(
    "text", ["", "ftp://x", "http://", "http://x:0", "http://x:70000", "http://a b", "http://x/?a=b", "http://u:p@x"]
)
def test_invalid_urls_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        ServerUrl.parse(text)
    assert "u:p" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "private"),
    [("https://far", True), ("http://127.0.0.1:1", True), ("http://[::1]:1", True), ("http://far", False)],
)
def test_tls_and_this_machine_are_private(url: str, private: bool) -> None:
    assert ServerUrl.parse(url).is_private is private


def registered(*endpoints: BookieEndpoint, state: str = "rw") -> RegisteredBookie:
    return RegisteredBookie("b-1", state, BookieServiceInfo(endpoints))


RPC = BookieEndpoint("bookie", 3181, "10.0.0.1", "bookie-rpc")


@pytest.mark.parametrize(
    ("endpoint", "host", "url"),
    [
        (BookieEndpoint("httpserver", 8080, "10.0.0.2", "http"), None, "http://10.0.0.2:8080"),
        (BookieEndpoint("httpserver", 8080, "0.0.0.0", "http"), None, "http://10.0.0.1:8080"),
        (BookieEndpoint("httpserver", 8080, "::", "https"), None, "https://10.0.0.1:8080"),
        (BookieEndpoint("httpserver", 8080, "10.0.0.2", "http"), "localhost", "http://localhost:8080"),
        (BookieEndpoint("other", 8081, "10.0.0.2", "https"), None, "https://10.0.0.2:8081"),
    ],
)
def test_bookie_url_is_the_registered_endpoint(endpoint: BookieEndpoint, host: str | None, url: str) -> None:
    assert bookie_url(registered(RPC, endpoint), host) == url


def test_bookie_url_distinguishes_down_from_no_server() -> None:
    with pytest.raises(NotFound, match=r"registered no HTTP server.*httpServerEnabled=true"):
        bookie_url(registered(RPC))
    with pytest.raises(NotFound, match="registered no HTTP server"):
        bookie_url(RegisteredBookie("b-1", "rw", None))
    with pytest.raises(NotFound, match="only port 8080"):
        bookie_url(registered(BookieEndpoint("httpserver", 8080, "0.0.0.0", "http")))
    with pytest.raises(BookieUnavailable, match="is down"):
        bookie_url(registered(RPC, state="down"))


# --- one exchange ---------------------------------------------------------------------------------------------------


def test_a_request_carries_method_path_query_body_and_token(fake: FakeServer) -> None:
    fake.replies["PUT /p/x"] = Reply(b"done", 418, "text/plain")
    client = ApiClient(f"{fake.url}/p", token="t-1")
    with client.exchange("PUT", "/x", {"a": "b c", "é": "&"}, b"{}") as exchange:
        answer = exchange.response()
    assert (answer.status, answer.content_type, answer.text) == (418, "text/plain", "done")
    (asked,) = fake.asked
    assert (asked.method, asked.path, asked.body) == ("PUT", "/p/x?a=b+c&%C3%A9=%26", b"{}")
    assert asked.headers["Authorization"] == "Bearer t-1"
    assert asked.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", ["x", "/a b", "/a\r\nX: y", "/a#b", "/\x00"])
def test_invalid_paths_are_refused_before_sending(fake: FakeServer, path: str) -> None:
    with pytest.raises(UsageError):
        ApiClient(fake.url).call("GET", path)
    assert fake.asked == []


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "é"])
def test_invalid_tokens_are_refused(token: str) -> None:
    with pytest.raises(UsageError):
        ApiClient("http://x", token=token)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, NotFound),
        (405, Unsupported),
        (409, Conflict),
        (429, TooManyRequests),
        (500, BkctlError),
        (501, Unsupported),
        (503, Unreachable),
        (504, Unreachable),
    ],
)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"Not so.", "Not so"),
        (b'"Not so"', "Not so"),
        (b'{"error": "Not so", "hint": "do that"}', "Not so"),
        (b"", ""),
    ],
)
def test_failures_have_class_and_server_message(
    fake: FakeServer, status: int, error: type[BkctlError], body: bytes, said: str
) -> None:
    fake.replies["GET /x"] = Reply(body, status)
    with pytest.raises(BkctlError) as raised:
        ApiClient(fake.url).call("GET", "/x")
    assert type(raised.value) is error
    assert said in str(raised.value)
    assert str(status) in str(raised.value)
    if status == 401 or (status == 403 and b"hint" not in body):
        assert "BKCTL_API_TOKEN" in (raised.value.hint or "")
    elif b"hint" in body:
        assert raised.value.hint == "do that"


def test_unknown_path_is_unsupported(fake: FakeServer) -> None:
    with pytest.raises(Unsupported, match="has no /nowhere"):
        ApiClient(fake.url).call("GET", "/nowhere")


def test_server_messages_are_shortened_without_tags(fake: FakeServer) -> None:
    fake.replies["GET /x"] = Reply(b"<h1>Bad</h1>\n" + b"x" * 5000, 500, "text/html")
    with pytest.raises(BkctlError) as raised:
        ApiClient(fake.url).call("GET", "/x")
    assert ": Bad xxx" in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_redirect_is_not_followed_and_gets_no_token(fake: FakeServer) -> None:
    other = FakeServer()
    try:
        fake.replies["GET /x"] = Reply(b"", 302, None, (("Location", f"{other.url}/x"),))
        with pytest.raises(BkctlError, match=f"is redirected to {other.url}"):
            ApiClient(fake.url, token="secret").call("GET", "/x")
        assert other.asked == []
    finally:
        other.close()


MISBEHAVIOUR: dict[str, tuple[Callable[..., None], type[BkctlError], str]] = {
    "no HTTP": (sends(b"\x00\x01garbage\r\n\r\n"), ProtocolError, "is not HTTP"),
    "closed": (sends(b""), Unreachable, "without an answer"),
    "cut": (sends(HEAD + b"Content-Length: 100\r\n\r\nshort"), Unreachable, "after 5 of 100 bytes"),
    "cut chunk": (
        sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\n10\r\nshort"),
        Unreachable,
        "before the answer was complete",
    ),
    "no chunk": (
        sends(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
        Unreachable,
        "before the answer was complete",
    ),
    "too many headers": (sends(HEAD + b"A: b\r\n" * 5000 + b"\r\n"), ProtocolError, "is not HTTP"),
    "a header without end": (sends(HEAD + b"A: " + b"b" * (1 << 20)), ProtocolError, "is not HTTP"),
    "said to be large": (sends(HEAD + b"Content-Length: 99999999999\r\n\r\n"), ProtocolError, "too large"),
    "silent": (is_silent, TimedOut, "no progress"),
    "silent after its head": (drips(HEAD + b"\r\n", b"", 60), TimedOut, "no progress"),
    "drips its head": (drips(HEAD, b"A: b\r\n", 0.05), TimedOut, "no progress"),
    "drips its body": (drips(HEAD + b"Content-Length: 100000\r\n\r\n", b"x", 0.02), TimedOut, "no progress"),
    "goes on and on": (drips(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", 0.02), TimedOut, "no"),
}


@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaving_server_is_one_error(name: str) -> None:
    behave, error, text = MISBEHAVIOUR[name]
    with misbehaving(behave) as server, pytest.raises(BkctlError) as raised:
        ApiClient(server.url, timeout_s=0.5 if error is TimedOut else 60).call("GET", "/x")
    assert type(raised.value) is error, raised.value
    assert text in str(raised.value)
    assert server.url in str(raised.value)


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n"])
def test_endless_answer_ends_at_its_limit(head: bytes) -> None:
    more = b"10000\r\n" + b"x" * 0x10000 + b"\r\n" if b"chunked" in head else b"x" * 0x10000
    sent = [0]
    with misbehaving(sends_for_ever(head, more, sent)) as server:
        with pytest.raises(ProtocolError, match="too large"):
            ApiClient(server.url).call("GET", "/x")
        assert sent[0] <= ANSWER_SIZE_BYTES_MAX + IN_FLIGHT_BYTES_MAX
    sent = [0]
    with misbehaving(sends_for_ever(head, more, sent)) as server:
        with pytest.raises(ProtocolError, match="too large"):
            BookieApi(ApiClient(server.url)).state()
        assert sent[0] <= JSON_SIZE_BYTES_MAX + IN_FLIGHT_BYTES_MAX


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def read_slowly(self, answer: ApiAnswer) -> None:
        """Take 100 seconds for each 64 KiB."""
        for piece in answer.chunks(1 << 30):
            self.now += len(piece) / 0x10000 * 100


def test_stream_may_take_longer_than_answer_in_memory(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("bkctl.http.client.time", clock)
    fake.replies["GET /x"] = Reply(b"x" * (40 << 16))
    client = ApiClient(fake.url)
    with client.exchange("GET", "/x", streams=True) as answer:
        clock.read_slowly(answer)
    assert clock.now == 4000
    with client.exchange("GET", "/x") as answer, pytest.raises(TimedOut):
        clock.read_slowly(answer)


def test_missing_server_is_unreachable() -> None:
    with misbehaving(is_silent) as server:
        url = server.url
    with pytest.raises(Unreachable, match=r"cannot be reached: Connection refused.*httpServerEnabled"):
        ApiClient(url).call("GET", "/x")
    with pytest.raises(Unreachable, match="cannot be reached"):
        ApiClient("http://no-such-host.invalid").call("GET", "/x")
    with pytest.raises(Unreachable, match="cannot be reached"):
        ApiClient(f"http://{'x' * 80}.invalid").call("GET", "/x")


# --- the endpoints --------------------------------------------------------------------------------------------------

STATE = {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage",
        b"",
        b"[" * 100_000,
        b"\xff\xfe",
        b"9" * 10_000,
        [],
        "text",
        None,
        {},
        {**STATE, "readOnly": 1},
        {**STATE, "readOnly": None},
        {**STATE, "running": "maybe"},
        {**STATE, "running": [True]},
    ],
)
def test_an_answer_of_another_shape_is_a_protocol_error(fake: FakeServer, api: BookieApi, answer: object) -> None:
    fake.replies["GET /api/v1/bookie/state"] = answer
    with pytest.raises(ProtocolError, match=r"api/v1/bookie/state.*is this a bookie's server"):
        api.state()


def test_numbers_are_whole_and_of_64_bits(fake: FakeServer, api: BookieApi) -> None:
    for wrong in ("1", 1.5, True, None, 1 << 63):
        fake.replies["GET /api/v1/bookie/info"] = {"freeSpace": wrong, "totalSpace": 2}
        with pytest.raises(ProtocolError, match="'freeSpace' is not a whole number"):
            api.space()


def test_booleans_as_strings_are_accepted(fake: FakeServer, api: BookieApi) -> None:
    fake.replies["GET /api/v1/bookie/gc"] = {"is_in_force_gc": "true"}
    fake.replies["GET /api/v1/bookie/gc/suspend_compaction"] = {
        "isMajorGcSuspended": "false", "isMinorGcSuspended": "true",
    }  # fmt: skip
    fake.replies["GET /api/v1/bookie/gc_details"] = []
    assert api.garbage_collection() == (True, False, True, (), "", "")


def test_suspensions_are_none_on_old_releases(fake: FakeServer, api: BookieApi) -> None:
    fake.replies["GET /api/v1/bookie/gc"] = {"is_in_force_gc": "false"}
    status = {"forceCompacting": False, "majorCompacting": True, "minorCompacting": False}
    times = {"lastMajorCompactionTime": 1, "lastMinorCompactionTime": 2}
    counters = {"majorCompactionCounter": 3, "minorCompactionCounter": 4}
    fake.replies["GET /api/v1/bookie/gc_details"] = [{**status, **times, **counters}]
    forced, major, minor, (collector,), *_ = api.garbage_collection()
    assert (forced, major, minor) == (False, None, None)
    assert collector == (False, True, False, 1, 2, 0, 3, 4, 0, None)


# --- metrics --------------------------------------------------------------------------------------------------------

TEXT = """\
# HELP a_total What it counts.
# TYPE a_total counter
a_total 12
a_total{x="1",y="a\\"b\\\\c\\nd,}"} 1.5e3 1700000000000

# TYPE lat summary
lat{success="true",quantile="0.5", thread="0"} NaN
lat_count{success="true"} 4
lat_sum{success="true",} 2.5
# a remark
bookie.dotted-name{a="b"} +Inf
down -Inf
"""


def test_metrics_are_read_with_labels_and_types() -> None:
    found = list(parse_metrics(TEXT))
    assert found[:2] == [
        Metric("a_total", {}, 12.0, "counter"),
        Metric("a_total", {"x": "1", "y": 'a"b\\c\nd,}'}, 1500.0, "counter"),
    ]
    assert [(each.name, each.type) for each in found[2:]] == [
        ("lat", "summary"),
        ("lat_count", "summary"),
        ("lat_sum", "summary"),
        ("bookie.dotted-name", "untyped"),
        ("down", "untyped"),
    ]
    assert math.isnan(found[2].value)
    assert [each.value for each in found[3:]] == [4.0, 2.5, math.inf, -math.inf]


@pytest.mark.parametrize(
    "line",
    [
        "<html>", "a", "a b", "a{x=1} 2", 'a{x="1" 2', 'a{x="1"} ', "1a 2", 'a{x="1"}{y="2"} 3', "a 1 2 3",
        "}" * 100_000, "a{" + "}" * 100_000, "a" + " " * 100_000 + "}", 'a{x="' + "\\" * 99_999 + '"} 1',
        "a{" + 'x="",' * 20_000 + "}",
    ],
)  # fmt: skip
def test_invalid_metric_fails_fast(line: str) -> None:
    with pytest.raises(ProtocolError, match="here: line 2 is not a metric"):
        list(parse_metrics(f"a 1\n{line}\n", "here"))
