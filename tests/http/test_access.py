"""Tokens and access: attackers in the metadata store, other users of this machine, web pages."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.fake_http import FakeServer, Reply
from support.raw_http import Answer, call, local_authorization
from support.servers import free_port
from support.waiting import LIMIT_S

from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.errors import UsageError
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.http.gateway import Upstream
from bkctl.http.local_token import LocalToken, find_local_token, token_path
from bkctl.http.server import HttpServer
from bkctl.http.server_settings import HttpSettings
from bkctl.http.server_url import bookie_url, token_for_registered
from bkctl.http.service import Service
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import RegisteredBookie, open_cluster
from bkctl.protocol.connection import run

V1 = "/api/v1"
FRONT, UPSTREAM, READER = "front-token", "upstream-token", "reader-token"
ATTACKER = "attacker.example"
STATE = {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}
NONE = {"Authorization": ""}


@pytest.fixture
def attacker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server that keeps what it is sent, under a name of another machine."""
    server = FakeServer()
    server.replies = {f"GET {V1}/bookie/state": STATE}
    resolve = socket.getaddrinfo

    def misled(host: Any, *arguments: Any, **settings: Any) -> Any:
        return resolve("127.0.0.1" if host == ATTACKER else host, *arguments, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", misled)
    yield server
    server.close()


@pytest.fixture
def misled_uri(attacker: FakeServer, tmp_path: Path) -> Iterator[str]:
    """A cluster in which the attacker registered bookies: one elsewhere, one on loopback."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    port = int(attacker.address.rpartition(":")[2])
    with open_cluster(uri, create=True) as cluster:
        for name, host in (("far:1", ATTACKER), ("near:1", "127.0.0.1")):
            endpoints = (
                BookieEndpoint("bookie", 3181, host, "bookie-rpc"),
                BookieEndpoint("httpserver", port, host, "http"),
            )
            cluster.bookies.register(name, BookieServiceInfo(endpoints))
        yield uri


@contextlib.contextmanager
def serving_gateway(uri: str, settings: HttpSettings, upstream: Upstream) -> Iterator[int]:
    """A gateway in this process; its port."""
    server = HttpServer(settings)
    port = server.bind()
    server.start(lambda: Service(uri), upstream=upstream)
    try:
        yield port
    finally:
        server.stop()


# --- tokens and registered addresses ---------------------------------------------------------------------------------


def test_commands_send_no_token_to_an_address_that_the_metadata_store_names(
    attacker: FakeServer, misled_uri: str
) -> None:
    for command in (("state",), ("info",), ("config",), ("readonly", "on"), ("gc",)):
        answer = CommandLine(misled_uri)("bookie", *command, "--bookie", "far:1", API_TOKEN=FRONT)
        assert "the token does not go to http://attacker.example" in answer.err
    assert len(attacker.asked) >= 5
    assert not [each for each in attacker.asked if "Authorization" in each.headers]
    # An address that is given by hand gets it, and so does loopback.
    by_hand = f"http://{ATTACKER}:{attacker.address.rpartition(':')[2]}"
    CommandLine(misled_uri)("bookie", "state", "--bookie-url", by_hand, API_TOKEN=FRONT)
    assert attacker.asked[-1].headers["Authorization"] == f"Bearer {FRONT}"
    CommandLine(misled_uri)("bookie", "state", "--bookie", "near:1", API_TOKEN=UPSTREAM)
    assert attacker.asked[-1].headers["Authorization"] == f"Bearer {UPSTREAM}"


def test_a_drain_sends_no_token_to_an_address_that_the_metadata_store_names(
    attacker: FakeServer, misled_uri: str
) -> None:
    attacker.replies[f"PUT {V1}/bookie/state/readonly"] = {"readOnly": True}
    CommandLine(misled_uri)("bookies", "drain", "far:1", "--yes", "--timeout", "1s", API_TOKEN=FRONT)
    assert [each.method for each in attacker.asked] == ["PUT"]
    assert "Authorization" not in attacker.asked[0].headers


@pytest.mark.parametrize("bookie_token", [None, UPSTREAM])
def test_a_gateway_sends_no_token_to_an_address_that_the_metadata_store_names(
    attacker: FakeServer, misled_uri: str, bookie_token: str | None
) -> None:
    upstream = Upstream(bookie_token)
    with serving_gateway(misled_uri, HttpSettings("127.0.0.1", 0, FRONT), upstream) as port:
        front = {"Authorization": f"Bearer {FRONT}"}
        assert call(port, "GET", f"{V1}/bookie/state?bookie=far:1", headers=front).json == STATE
        assert "Authorization" not in attacker.asked[-1].headers
        assert call(port, "GET", f"{V1}/bookie/state?bookie=near:1", headers=front).json == STATE
        expected = None if bookie_token is None else f"Bearer {UPSTREAM}"
        assert attacker.asked[-1].headers.get("Authorization") == expected
    assert not [each for each in attacker.asked if FRONT in str(each.headers)]


def test_api_serve_does_not_forward_its_own_token(
    http_bookie: Callable[..., Any], gateway: Callable[..., Any], tmp_path: Path
) -> None:
    """A bookie with the same token as the gateway: without --bookie-token-file it is asked without one."""
    file = tmp_path / "token"
    file.write_text(FRONT)
    bookie = http_bookie(httpServerTokenFile=file)
    bookie.start()
    port = gateway(bookie.settings["metadataServiceUri"], "--token-file", file).http_port
    path = f"{V1}/bookie/info?bookie={bookie.bookie_id}"
    refused = call(port, "GET", path, headers={"Authorization": f"Bearer {FRONT}"})
    assert refused.status == 502
    assert "--bookie-token-file" in refused.json["hint"]


@pytest.mark.parametrize(
    ("url", "has_authorities", "goes"),
    [
        ("http://attacker.example:8080", True, False),
        ("http://10.0.0.1:8080", True, False),
        ("http://127.attacker.example:8080", True, False),
        ("http://127.0.0.1.attacker.example", True, False),
        ("http://localhost.attacker.example", True, False),
        ("https://attacker.example", False, False),  # the system's authorities sign for anyone
        ("https://bookie.example", True, True),
        ("http://127.0.0.1:8080", False, True),
        ("http://127.9.9.9:8080", False, True),
        ("http://[::1]:8080", False, True),
        ("http://localhost:8080", False, True),
    ],
)
def test_a_token_goes_to_loopback_and_to_checked_certificates(url: str, has_authorities: bool, goes: bool) -> None:
    assert token_for_registered(url, FRONT, has_authorities=has_authorities) == (FRONT if goes else None)


def test_gateway_sets_content_type_itself(attacker: FakeServer, misled_uri: str) -> None:
    script = b"<html><script>fetch('/api/v1/ledger/list')</script></html>"
    replies = {
        f"GET {V1}/bookie/state": Reply(script, 200, "text/html"),
        f"GET {V1}/bookie/info": Reply(script, 500, "text/html"),
        f"GET {V1}/bookie/is_ready": Reply(script, 200, "image/svg+xml"),
        f"GET {V1}/bookie/gc": Reply({"is_in_force_gc": "false"}, 200, "text/html"),
        f"GET {V1}/bookie/gc_details": Reply(b"", 302, "text/html", (("Location", "http://elsewhere.example"),)),
    }
    attacker.replies |= replies
    with serving_gateway(misled_uri, HttpSettings("127.0.0.1", 0, FRONT), Upstream()) as port:
        for name, status, kind in (
            ("state", 200, "text/plain; charset=utf-8"),
            ("info", 500, "text/plain; charset=utf-8"),
            ("is_ready", 200, "text/plain; charset=utf-8"),
            ("gc", 200, "application/json"),
            ("gc_details", 502, "application/json"),
        ):
            answer = call(port, "GET", f"{V1}/bookie/{name}?bookie=far:1", headers={"Authorization": f"Bearer {FRONT}"})
            assert (answer.status, answer.headers["content-type"]) == (status, kind), name
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "location" not in answer.headers


# --- loopback --------------------------------------------------------------------------------------------------------


def test_other_users_of_the_machine_get_probes_only(bookie: Any) -> None:
    port = bookie.http_port
    for path in ("/heartbeat", "/metrics", f"{V1}/bookie/state", f"{V1}/bookie/is_ready"):
        assert call(port, "GET", path, headers=NONE).status == 200, path
    for method, path, body in (
        ("GET", f"{V1}/ledger/list?print_metadata=true", None),
        ("GET", f"{V1}/ledger/metadata?ledger_id=0", None),
        ("GET", f"{V1}/ledger/read?ledger_id=0", None),
        ("GET", f"{V1}/config/server_config?show_secrets=true", None),
        ("GET", f"{V1}/config/server_config", None),
        ("GET", f"{V1}/bookie/sanity", None),
        ("HEAD", f"{V1}/bookie/sanity", None),
        ("GET", "/openapi.json", None),
        ("GET", "/nothing", None),
        ("PUT", f"{V1}/config/server_config", {"flushInterval": 1000}),
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": True}),
        ("PUT", f"{V1}/bookie/gc", None),
        ("DELETE", f"{V1}/ledger/delete?ledger_id=0", None),
    ):
        assert call(port, method, path, body, headers=NONE).status == 401, path
        assert call(port, method, path, body, headers={"Authorization": "Bearer guess"}).status == 401, path
    assert call(port, "GET", f"{V1}/config/server_config").status == 200  # with the token


def test_gateway_forwards_no_probes_of_other_users(attacker: FakeServer, misled_uri: str) -> None:
    with serving_gateway(misled_uri, HttpSettings("127.0.0.1", 0), Upstream(UPSTREAM)) as port:
        assert call(port, "GET", "/heartbeat", headers=NONE).status == 200
        for path in ("/metrics", f"{V1}/bookie/state", f"{V1}/bookie/is_ready"):
            assert call(port, "GET", f"{path}?bookie=near:1", headers=NONE).status == 401, path
    assert attacker.asked == []


def test_generated_token_is_private_and_removed_at_stop(http_bookie: Callable[..., Any]) -> None:
    bookie = http_bookie()
    bookie.start()
    path = token_path("127.0.0.1", bookie.http_port)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_text().strip() not in bookie.log_tail(size_max=1 << 20)
    # The documented call of curl.
    assert call(
        bookie.http_port, "GET", f"{V1}/bookie/info", headers={"Authorization": f"Bearer {path.read_text().strip()}"}
    ).status == 200  # fmt: skip
    os.kill(bookie.pid, signal.SIGTERM)
    assert bookie.process.wait(LIMIT_S) == 0
    assert not path.exists()


def test_commands_find_local_token(http_bookie: Callable[..., Any], gateway: Callable[..., Any]) -> None:
    bookie = http_bookie()
    bookie.start()
    cli = CommandLine(str(bookie.settings["metadataServiceUri"]))
    by_id, by_url = ("--bookie", bookie.bookie_id), ("--bookie-url", f"http://127.0.0.1:{bookie.http_port}")
    for which in (by_id, by_url, ("--bookie-url", f"http://localhost:{bookie.http_port}")):
        for command in (("info",), ("config",), ("sanity",), ("gc",), ("config", "--set", "flushInterval=2000")):
            answer = cli("bookie", *command, *which)
            assert (answer.code, b"" if answer.code == 0 else answer.err) == (0, b""), (command, which)
    # One of another server in the environment does not stand in the way.
    assert cli("bookie", "info", *by_id, API_TOKEN="of-a-gateway").code == 0
    through = gateway(bookie.settings["metadataServiceUri"])
    front = ("--bookie-url", f"http://127.0.0.1:{through.http_port}", "--bookie", bookie.bookie_id)
    assert cli("bookie", "config", *front).code == 0


def test_token_is_not_sent_to_next_server_on_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    fake = FakeServer()
    try:
        port = int(fake.address.rpartition(":")[2])
        path = token_path("127.0.0.1", port)
        path.parent.mkdir(parents=True)
        path.write_text("stale\n")  # as a server leaves it that is killed
        path.chmod(0o600)
        assert find_local_token("127.0.0.1", port) is None
        CommandLine(None)("bookie", "state", "--bookie-url", fake.url)
        assert "Authorization" not in fake.asked[-1].headers
        # The next server on that port makes a new one; another address has none of it.
        token = LocalToken("127.0.0.1", port)
        assert find_local_token("127.0.0.1", port) == token.text != "stale"
        assert find_local_token("127.0.0.2", port) is None
        path.chmod(0o644)
        assert find_local_token("127.0.0.1", port) is None
        token.close()
        assert not path.exists()
        # A link that somebody planted is not followed.
        (tmp_path / "elsewhere").write_text("untouched")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="symbolic links"):
            LocalToken("127.0.0.1", port)
        assert (tmp_path / "elsewhere").read_text() == "untouched"
    finally:
        fake.close()


def test_a_server_that_cannot_keep_its_token_answers_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with serving_gateway(f"sqlite://{tmp_path / 'nothing.db'}", HttpSettings("127.0.0.1", 0), Upstream()) as port:
        assert call(port, "GET", "/heartbeat").status == 200
        assert call(port, "GET", f"{V1}/ledger/list").status == 401


# --- web pages -------------------------------------------------------------------------------------------------------

BROWSER = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
def test_a_web_page_is_refused_even_with_the_token(bookie: Any, headers: dict[str, str]) -> None:
    port = bookie.http_port
    for method, path, body in (
        ("GET", "/heartbeat", None),
        ("POST", "/heartbeat", ""),
        ("GET", f"{V1}/bookie/sanity", None),
        ("GET", f"{V1}/ledger/list", None),
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": True}),
        ("OPTIONS", f"{V1}/bookie/state/readonly", None),
        ("DELETE", f"{V1}/ledger/delete?ledger_id=0", None),
    ):
        refused = call(port, method, path, body, headers=headers)
        assert (refused.status, refused.error) == (403, "Requests of web pages are refused")
    assert call(port, "GET", f"{V1}/bookie/state/readonly").json == {"readOnly": False}


def test_sanity_is_refused_to_browsers(bookie: Any) -> None:
    port, path = bookie.http_port, f"{V1}/bookie/sanity"
    for headers in (
        {"User-Agent": BROWSER},  # an old one, which sends no Sec-Fetch-Site with a picture
        {"Sec-Fetch-Site": "none"},  # a link in a mail
        {"Sec-Fetch-Dest": "image"},
        {"Referer": "https://evil.example/"},
    ):
        for method in ("GET", "HEAD"):
            assert call(port, method, path, headers=headers).status == 403, headers
    assert call(port, "GET", "/heartbeat", headers={"User-Agent": BROWSER}).status == 200
    for agent in ({}, {"User-Agent": "curl/8.5.0"}, {"User-Agent": "bkctl"}):
        assert call(port, "GET", path, headers=agent).json == {"passed": True, "readOnly": False}


# --- the read-only token ---------------------------------------------------------------------------------------------


def test_a_read_only_token_reads_and_gets_no_secrets(
    http_bookie: Callable[..., Any], gateway: Callable[..., Any], tmp_path: Path
) -> None:
    full, reads = tmp_path / "full", tmp_path / "reads"
    full.write_text(FRONT)
    reads.write_text(READER)
    bookie = http_bookie(httpServerTokenFile=full, httpServerReadOnlyTokenFile=reads)
    bookie.start()
    uri = str(bookie.settings["metadataServiceUri"])

    async def write() -> int:
        with open_cluster(uri) as cluster:
            async with BookKeeper(cluster) as bookkeeper:
                writer = await bookkeeper.create_ledger(
                    ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, password=b"hush"
                )
                async with writer:
                    await writer.add(b"entry")
                return writer.ledger_id

    ledger_id = run(write())
    with open_cluster(uri) as cluster:  # Metadata of version 1 has neither password nor digest type.
        old = cluster.ledgers.read(LedgerId(0, ledger_id)).metadata
        cluster.ledgers.create(LedgerId(0, 77), old._replace(format_version=1, digest_type=None, password=None))
    through = gateway(uri, "--token-file", full, "--read-only-token-file", reads, "--bookie-token-file", full)

    def asked(port: int, token: str, method: str, path: str, body: object = None) -> Answer:
        named = f"{'&' if '?' in path else '?'}bookie={bookie.bookie_id}" if port == through.http_port else ""
        return call(port, method, path + named, body, headers={"Authorization": f"Bearer {token}"})

    metadata = f"{V1}/ledger/metadata?ledger_id={ledger_id}"
    listed = f"{V1}/ledger/list?print_metadata=true"
    for port in (bookie.http_port, through.http_port):
        for path in ("/metrics", f"{V1}/bookie/info", f"{V1}/ledger/read?ledger_id={ledger_id}", metadata):
            assert asked(port, READER, "GET", path).status == 200, path
        for method, path, body in (
            ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": True}),
            ("PUT", f"{V1}/bookie/gc", None),
            ("DELETE", f"{V1}/ledger/delete?ledger_id={ledger_id}", None),
            ("GET", f"{V1}/bookie/sanity", None),
            ("HEAD", f"{V1}/bookie/sanity", None),
            ("GET", f"{V1}/config/server_config?show_secrets=TRUE", None),
        ):
            assert asked(port, READER, method, path, body).status == 403, path
        assert asked(port, READER, "GET", metadata).json[str(ledger_id)]["password"] == ""
        assert asked(port, FRONT, "GET", metadata).json[str(ledger_id)]["password"] == "aHVzaA=="
        for path in (listed, f"{listed}&decode_meta=true"):
            said = asked(port, READER, "GET", path)
            assert (said.status, set(said.json)) == (200, {str(ledger_id), "77"})
            assert b"hush" not in said.body
            assert b"aHVzaA==" not in said.body
        assert b"aHVzaA==" in asked(port, FRONT, "GET", f"{listed}&decode_meta=true").body
    assert asked(through.http_port, FRONT, "GET", f"{V1}/bookie/sanity").json["passed"]


@pytest.mark.parametrize("given", [{}, {"httpServerToken": READER}], ids=["alone", "the same"])
def test_read_only_token_needs_full_token(
    http_bookie: Callable[..., Any], tmp_path: Path, given: dict[str, str]
) -> None:
    (tmp_path / "reads").write_text(READER)
    bookie = http_bookie(httpServerReadOnlyTokenFile=tmp_path / "reads", **given)
    answer = CommandLine(None).run("bookie", "start", "--conf", bookie.conf)
    assert answer.code == 2
    assert "read-only token" in answer.err


# --- a configuration of Apache's -------------------------------------------------------------------------------------


#: Without a token, for every client; all else is for those who have one.
PROBES = ("/heartbeat", "/metrics", f"{V1}/bookie/state", f"{V1}/bookie/is_ready")
OTHERS = ("/openapi.json", f"{V1}/bookie/info", f"{V1}/ledger/list", f"{V1}/bookie/state/readonly", "/nothing")


def own_address() -> str:
    """An address of this machine beyond loopback, where a client of another machine would arrive."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


def own_ipv6_addresses() -> list[str]:
    """The addresses of IPv6 of this machine: ::1, and one beyond loopback; none without IPv6."""
    if not socket.has_dualstack_ipv6():
        return []
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("2001:db8::1", 9))  # nothing is sent
        return sorted({"::1", str(probe.getsockname()[0])} - {"::"})


def answer_at(host: str, port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and, for JSON, the answer of the server at any address of this machine; of no probe's text."""
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body) if body.startswith(b"{") else {}
    finally:
        connection.close()


@pytest.mark.parametrize("host", [None, "0.0.0.0", "::"])
def test_bookie_without_token_serves_probes_everywhere_and_the_rest_on_loopback(
    http_bookie: Callable[..., Any], host: str | None
) -> None:
    bookie = http_bookie(httpServerHost=host or "", httpServerPort=free_port())
    if host is None:
        text = bookie.conf.read_text()
        bookie.conf.write_text("".join(line for line in text.splitlines(True) if not line.startswith("httpServerHost")))
    bookie.start()
    port = bookie.http_port
    token = token_path("127.0.0.1", port)
    right = {"Authorization": f"Bearer {token.read_text().strip()}"}
    for address in ("127.0.0.1", "127.0.0.2", own_address(), *own_ipv6_addresses()):
        for path in PROBES:
            assert answer_at(address, port, path, "HEAD")[0] == 200, (address, path)
            for sent in (
                {},
                {"Host": "probe.example"},
                {"Host": f"{own_address()}:{port}"},
                {"Authorization": "Bearer x"},
            ):
                assert answer_at(address, port, path, **sent)[0] == 200, (address, path, sent)
        for path in OTHERS:
            for sent in ({}, {"Host": "probe.example"}, {"Authorization": "Bearer x"}):
                status, refused = answer_at(address, port, path, **sent)
                assert status == 401, (address, path, sent)
                assert str(token) in refused["hint"]
                assert "httpServerTokenFile" in refused["hint"]
        allowed = {answer_at(address, port, path, **right)[0] for path in OTHERS}
        is_loopback = address.startswith("127.") or address == "::1"
        assert allowed == ({200, 404} if is_loopback else {401}), address
        status, _ = answer_at(address, port, f"{V1}/bookie/gc", "PUT", **right)
        assert status == (200 if is_loopback else 401)
    assert answer_at("127.0.0.1", port, OTHERS[1], **right, Host="evil.example")[0] == 403
    said = [line for line in bookie.log_tail(size_max=1 << 20).splitlines() if "WARNING" in line]
    (warning,) = [line for line in said if "has no token" in line]
    assert "the rest on 127.0.0.1 only" in warning
    assert "httpServerTokenFile" in warning
    # Commands of this machine find the loopback address by themselves.
    cli = CommandLine(str(bookie.settings["metadataServiceUri"]))
    assert cli("bookie", "config", "--bookie", bookie.bookie_id).code == 0
    assert CommandLine(None)("bookie", "config", "--conf", bookie.conf).code == 0


def test_commands_ask_wildcard_servers_of_this_machine_on_loopback() -> None:
    def url(host: str, http_host: str = "0.0.0.0", protocol: str = "http") -> str:
        endpoints = (BookieEndpoint("b", 1, host, "bookie-rpc"), BookieEndpoint("httpserver", 8, http_host, protocol))
        return bookie_url(RegisteredBookie(f"{host}:1", "rw", BookieServiceInfo(endpoints)))

    assert url(own_address()) == url(own_address(), "::") == "http://127.0.0.1:8"
    assert url("127.0.0.3") == "http://127.0.0.3:8"
    assert url("192.0.2.77") == "http://192.0.2.77:8"
    assert url("no-such-host.invalid") == "http://no-such-host.invalid:8"
    assert url(own_address(), protocol="https") == f"https://{own_address()}:8"
    assert url(own_address(), own_address()) == f"http://{own_address()}:8"


def test_probes_need_no_token_where_one_is_given_and_the_refusal_names_its_file(
    http_bookie: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(FRONT)
    bookie = http_bookie(httpServerHost="0.0.0.0", httpServerTokenFile=file)
    bookie.start()
    for address in ("127.0.0.1", own_address()):
        for path in PROBES:
            for sent in ({}, {"Host": "probe.example"}, {"Authorization": "Bearer x"}):
                assert answer_at(address, bookie.http_port, path, **sent)[0] == 200
        for path in OTHERS:
            status, refused = answer_at(address, bookie.http_port, path, Host="probe.example")
            assert (status, str(file) in refused["hint"]) == (401, True)
            right = {"Authorization": f"Bearer {FRONT}", "Host": "probe.example"}
            assert answer_at(address, bookie.http_port, path, **right)[0] in (200, 404)
    paths = answer_at("127.0.0.1", bookie.http_port, "/openapi.json", **right)[1]["paths"]
    assert {path for path, methods in paths.items() if methods.get("get", {}).get("security") == []} == set(PROBES)
    (row,) = CommandLine(None)(
        "bookie", "info", "--bookie-url", f"http://127.0.0.1:{bookie.http_port}"
    ).err.splitlines()
    assert str(file) in row


def test_one_setting_closes_the_probes(http_bookie: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(FRONT)
    for given in ({"httpServerTokenFile": file}, {}):
        bookie = http_bookie(httpServerOpenProbes="false", **given)
        bookie.start()
        right = {"Authorization": f"Bearer {FRONT}"} if given else local_authorization(bookie.http_port)
        for path in PROBES:
            assert answer_at("127.0.0.1", bookie.http_port, path)[0] == 401
            assert answer_at("127.0.0.1", bookie.http_port, path, **right)[0] == 200


def test_gateway_serves_its_heartbeat_to_all(bookie: Any, gateway: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(FRONT)
    uri = str(bookie.settings["metadataServiceUri"])
    serves = gateway(uri, "--host", "0.0.0.0", "--token-file", file)
    for address in ("127.0.0.1", own_address()):
        assert answer_at(address, serves.http_port, "/heartbeat", Host="probe.example")[0] == 200
        status, refused = answer_at(address, serves.http_port, f"/metrics?bookie={bookie.bookie_id}")
        assert (status, str(file) in refused["hint"]) == (401, True)
    closed = gateway(uri, "--token-file", file, "--closed-probes")
    assert answer_at("127.0.0.1", closed.http_port, "/heartbeat")[0] == 401


def test_addresses_without_token_or_certificates_follow_the_probes() -> None:
    def host(**changes: Any) -> str:
        return HttpSettings.of(BookieConfig(http_server_enabled=True, **changes)).host

    assert host(http_server_token=FRONT) == host() == "0.0.0.0"
    assert host(http_server_open_probes=False) == "127.0.0.1"
    assert host(http_server_open_probes=False, http_server_token=FRONT) == "0.0.0.0"
    for refused in (
        {"http_server_host": "192.0.2.7"},
        {"http_server_host": "0.0.0.0", "http_server_open_probes": False},
    ):
        with pytest.raises(UsageError, match="open to everyone"):
            host(**refused)


def test_loopback_of_another_machine_is_refused(tmp_path: Path) -> None:
    """A bookie that serves HTTP on its own loopback, seen from another machine: port 8080 here is somebody else's."""
    fake = FakeServer()
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    try:
        endpoints = (
            BookieEndpoint("bookie", 3181, "192.0.2.7", "bookie-rpc"),
            BookieEndpoint("httpserver", int(fake.address.rpartition(":")[2]), "127.0.0.1", "http"),
        )
        with open_cluster(uri, create=True) as cluster:
            cluster.bookies.register("far:1", BookieServiceInfo(endpoints))
            answer = CommandLine(uri)("bookie", "readonly", "on", "--bookie", "far:1", API_TOKEN=FRONT)
        assert answer.code == 6
        assert "open to its own machine only" in answer.problem
        assert fake.asked == []
    finally:
        fake.close()


def test_local_authorization_is_empty_without_a_server() -> None:
    assert local_authorization(free_port()) == {}
