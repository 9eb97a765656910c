"""Access to an HTTP server of ours, its refusals, answers and changes, and hostile bytes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.lifetimes import Lifetimes, count_of, without_cycle_collector
from support.raw_http import Answer, call, exchange, local_authorization
from support.servers import DB, INTERLEAVED, free_port, wait_for, write_conf
from support.waiting import LIMIT_S

from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, UsageError
from bkctl.http import app
from bkctl.http.app import BODY_SIZE_BYTES_MAX, Api
from bkctl.http.bookie_endpoints import CHANGEABLE
from bkctl.http.gateway import Upstream
from bkctl.http.server import HEAD_SIZE_BYTES_MAX, BoundedProtocol, HttpServer
from bkctl.http.server_settings import HttpSettings, is_loopback, read_token, tls_context
from bkctl.http.service import Service

V1 = "/api/v1"
TOKEN = "open-sesame"


# --- who may ask -----------------------------------------------------------------------------------------------------


def settings(**changes: Any) -> HttpSettings:
    return HttpSettings.of(BookieConfig(http_server_enabled=True, **changes))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", ""])
def test_a_server_beyond_loopback_without_authentication_is_refused(host: str, pem: Path) -> None:
    closed = {} if host == "192.0.2.7" else {"http_server_open_probes": False}
    with pytest.raises(UsageError, match="open to everyone"):
        settings(http_server_host=host, **closed)
    with pytest.raises(UsageError, match="open to everyone"):  # TLS alone does not identify clients
        settings(http_server_host=host, http_server_tls_enable=True, http_server_key_store_path=str(pem), **closed)
    assert settings(http_server_host=host, http_server_token=TOKEN).authenticates
    with_certificates = settings(
        http_server_host=host, http_server_tls_enable=True, http_server_key_store_path=str(pem),
        http_server_trust_store_path=str(pem),
    )  # fmt: skip
    assert with_certificates.authenticates


def test_loopback_needs_no_authentication() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert is_loopback(host)
        assert not settings(http_server_host=host).authenticates
    assert not is_loopback("nowhere.invalid")


def test_bookie_without_authentication_does_not_start_on_public_host(http_bookie: Callable[..., Any]) -> None:
    bookie = http_bookie(httpServerHost="192.0.2.7")
    done = subprocess.run(bookie._arguments(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "open to everyone" in done.stderr
    assert "httpServerTokenFile" in done.stderr


def test_bookie_names_missing_packages(http_bookie: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bookie = http_bookie()
    monkeypatch.setattr("bkctl.http.find_spec", lambda name: None)
    answer = CommandLine(None)("bookie", "start", "--conf", bookie.conf)
    assert answer.code == 8
    assert "pip install 'bkctl[http]'" in answer.problem


def test_help_loads_no_web_server() -> None:
    program = (
        "import sys; from bkctl.commands.main import run; run(['api', 'serve', '--help']);"
        "assert not {'starlette', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_requests_need_the_token(http_bookie: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    bookie = http_bookie(httpServerTokenFile=file)
    bookie.start()
    port = bookie.http_port
    for path in (f"{V1}/bookie/info", f"{V1}/bookie/state/readonly", "/openapi.json", "/nothing"):
        for given in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": f"Basic {TOKEN}"},
                      {"Authorization": "Bearer"}, {"Authorization": f"Bearer \xe9{TOKEN}"}):  # fmt: skip
            refused = call(port, "GET", path, headers=given)
            assert refused.status == 401
            assert refused.error == "The token is missing or wrong"
            assert refused.headers["www-authenticate"] == "Bearer"
    right = {"Authorization": f"bearer {TOKEN}", "Host": "some.name.example"}
    assert call(port, "GET", "/heartbeat", headers=right).status == 200
    document = call(port, "GET", "/openapi.json", headers=right).json
    assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    shown = call(port, "GET", f"{V1}/config/server_config?show_secrets=true", headers=right)
    assert TOKEN not in shown.body.decode()


def test_connections_need_a_certificate(http_bookie: Callable[..., Any], pem: Path) -> None:
    bookie = http_bookie(
        httpServerTlsEnable="true", httpServerKeyStorePath=pem, httpServerTrustStorePath=pem, httpServerHost="127.0.0.1"
    )
    bookie.start()
    port = bookie.http_port
    with pytest.raises((http.client.HTTPException, OSError)):
        call(port, "GET", "/heartbeat")
    for certificate in (False, True):
        context = ssl.create_default_context(cafile=str(pem))
        if certificate:
            context.load_cert_chain(str(pem))
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=LIMIT_S)
        try:
            connection.request("GET", "/heartbeat")
            said = connection.getresponse().read()
        except OSError:
            said = b""
        assert said == (b"OK\n" if certificate else b"")
        connection.close()
    shown = CommandLine(str(bookie.settings["metadataServiceUri"]))("bookies", "show", bookie.bookie_id, "-o", "json")
    (found,) = [each for each in json.loads(shown.out)["endpoints"] if each["id"] == "httpserver"]
    assert (found["protocol"], found["port"]) == ("https", port)


def test_cross_site_requests_are_refused(bookie: Any) -> None:
    port = bookie.http_port
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example"):
        refused = call(port, "GET", f"{V1}/bookie/info", headers={"Host": host})
        assert refused.status == 403
        assert refused.error
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", f"{socket.gethostname()}:{port}"):
        assert call(port, "GET", f"{V1}/bookie/info", headers={"Host": host}).status == 200


def test_unusable_files_are_refused(tmp_path: Path, pem: Path) -> None:
    file = tmp_path / "token"
    for text in ("", "two words", "x" * 5000, "\xe9"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(UsageError, match="token"):
            read_token(file)
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "nothing")
    file.write_text(TOKEN)
    with pytest.raises(UsageError, match="both set"):
        settings(http_server_token="other", http_server_token_file=str(file))
    with pytest.raises(UsageError, match="httpServerKeyStorePath"):
        settings(http_server_tls_enable=True)
    with pytest.raises(UsageError, match="TLS files"):
        settings(http_server_tls_enable=True, http_server_key_store_path=str(file))
    assert settings(http_server_host="127.0.0.1", http_server_tls_enable=True, http_server_key_store_path=str(pem)).tls


def test_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BkctlError, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer(HttpSettings("127.0.0.1", port)).bind()


# --- settings and metrics --------------------------------------------------------------------------------------------


def test_secrets_are_masked_by_default(bookie: Any) -> None:
    port = bookie.http_port
    found = call(port, "GET", f"{V1}/config/server_config").json
    assert found["httpServerKeyStorePassword"] == "********"
    assert found["unknownKey"] == "kept"
    assert found["ledgerScopeIdDefault"] == "0"
    asked = call(port, "GET", f"{V1}/config/server_config?show_secrets=true").json
    assert asked["httpServerKeyStorePassword"] == "hush"
    assert asked.keys() == found.keys()


def test_changed_setting_takes_effect(http_bookie: Callable[..., Any]) -> None:
    bookie = http_bookie(diskCheckInterval=100)
    bookie.start()
    port = bookie.http_port

    def change(**values: Any) -> Answer:
        return call(port, "PUT", f"{V1}/config/server_config", values)

    def is_read_only() -> bool:
        return bool(call(port, "GET", f"{V1}/bookie/state").json["readOnly"])

    assert not is_read_only()
    assert change(diskUsageThreshold=0.0, diskUsageWarnThreshold="0.0").body == b"Success set server config."
    wait_for(is_read_only, "its disks are full now")
    assert call(port, "GET", f"{V1}/config/server_config").json["diskUsageThreshold"] == "0.0"
    assert change(diskUsageThreshold="0.99").status == 200
    wait_for(lambda: not is_read_only(), "its disks have space again")
    before = call(port, "GET", f"{V1}/config/server_config").json
    for refused in (
        change(diskUsageThreshold="much"), change(diskUsageThreshold=2), change(flushInterval=None),
        change(minorCompactionThreshold=0.9), change(flushInterval=5, bookiePort=1), change(unknown="x"),
    ):  # fmt: skip
        assert refused.status == 400
        assert refused.error
    assert call(port, "GET", f"{V1}/config/server_config").json == before
    assert set(before) >= CHANGEABLE - {"diskUsageLwmThreshold", *(each for each in CHANGEABLE if "minUsable" in each)}


def test_metrics_have_apaches_names(bookie: Any) -> None:
    port = bookie.http_port

    def samples() -> dict[str, float]:
        answer = call(port, "GET", "/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.body.decode().splitlines()
        types = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
        assert len(types) == len(set(types))
        lines = [line for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    before = samples()
    assert call(port, "GET", f"{V1}/bookie/sanity").json["passed"]
    after = samples()
    count = 'bookkeeper_server_ADD_ENTRY_REQUEST_count{success="true"}'
    assert after[count] - before[count] == 10
    assert after["bookie_WRITE_BYTES"] > before["bookie_WRITE_BYTES"]
    assert after["bookie_READ_BYTES"] > before["bookie_READ_BYTES"]
    reads = 'bookkeeper_server_READ_ENTRY_REQUEST_count{success="true"}'
    assert after[reads] - before[reads] >= 20
    assert after['bookie_journal_JOURNAL_SYNC_count{success="true",journalIndex="0"}'] > 0
    assert after['bookkeeper_server_ADD_ENTRY_REQUEST{success="true",quantile="0.5"}'] > 0
    assert after["bookie_SERVER_STATUS"] == 1
    assert after["process_resident_memory_bytes"] > 1 << 20
    names = {name.partition("{")[0] for name in after}
    assert names >= {
        "bookie_JOURNAL_DIRS", "bookie_ledgers_count", "bookie_ledger_num_dirs", "bookie_ledger_writable_dirs",
        "bookie_gc_MAJOR_COMPACTION_TOTAL", "bookie_gc_DELETED_LEDGER_TOTAL", "bookie_gc_ACTIVE_ENTRY_LOG_TOTAL",
        "bookie_gc_entry_log_usage_buckets_le_10", "bookie_journal_JOURNAL_WRITE_BYTES", "bookie_flush_count",
        "bookie_journal_JOURNAL_QUEUE_SIZE", "bkctl_gc_unindexed_ledgers", "bookkeeper_server_READ_LAC_count",
        "bookkeeper_server_WRITE_LAC_REQUEST_count", "bookkeeper_server_READ_ENTRY_LONG_POLL_REQUEST_count",
    }  # fmt: skip


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_large_requests_are_refused(bookie: Any) -> None:
    port = bookie.http_port
    large = b'{"forceMajor": "%s"}' % (b"x" * BODY_SIZE_BYTES_MAX)
    assert call(port, "PUT", f"{V1}/bookie/gc", large).status == 413
    for size in (HEAD_SIZE_BYTES_MAX + 2048, 2 * HEAD_SIZE_BYTES_MAX, 64 * HEAD_SIZE_BYTES_MAX):
        answer = exchange(port, f"GET /heartbeat?{'x' * size} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400"), size
    nested = b"[" * BODY_SIZE_BYTES_MAX
    assert call(port, "PUT", f"{V1}/bookie/gc", nested).status == 400
    number = b'{"delay_seconds": %s}' % (b"9" * 6000)
    assert call(port, "PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", number).status == 400
    half_a_pair = b'{"\\ud800": "\\udfff"}'
    assert call(port, "PUT", f"{V1}/bookie/gc", half_a_pair).status == 400
    assert call(port, "PUT", f"{V1}/config/server_config", half_a_pair).status == 400
    assert call(port, "PUT", f"{V1}/config/server_config", b'{"flushInterval": NaN}').status == 400


def test_files_of_scoped_ledgers_have_their_paths(bookie: Any) -> None:
    (journals,) = BookieConfig.load(bookie.conf).journal_directories
    scoped = Path(journals, "current", "scoped", "abc.txn")
    scoped.parent.mkdir(exist_ok=True)
    scoped.touch()
    try:
        answer = call(bookie.http_port, "GET", f"{V1}/bookie/list_disk_file?file_type=journal").json
    finally:
        scoped.unlink()
    names = answer["journal files"].split()
    assert "scoped/abc.txn" in names
    assert any("/" not in name for name in names)


def test_ambiguous_ledger_query_is_refused(bookie: Any) -> None:
    port = bookie.http_port
    for path in ("metadata", "read"):
        twice = call(port, "GET", f"{V1}/ledger/{path}?ledger_id=1&ledger_id=2")
        assert twice.status == 400
        assert twice.error == "ledger_id is given twice: '1' and '2'"
        assert call(port, "GET", f"{V1}/ledger/{path}?ledger_id=1&ledger_id=1&nothing=of+the+kind").status == 404
    assert call(port, "DELETE", f"{V1}/ledger/delete?ledger_id=1&ledger_id=2").status == 400
    misspelt = call(port, "DELETE", f"{V1}/ledger/delete?ledger_id=1&ledger_scope=7")
    assert misspelt.status == 400
    assert misspelt.error == "The query has an unknown value: ledger_scope"
    assert call(port, "DELETE", f"{V1}/ledger/delete?ledger_id=1&ledger_scope_id=7").status == 404


class Nothing:
    """A service of a bookie that is not there."""

    samples = None
    has_bookie = True


def test_paths_are_not_normalized(bookie: Any) -> None:
    for path in ("/heartbeat%3Fx", "//evil/heartbeat", "/heartbeat//", "/HEARTBEAT", "/heartbeat%0d%0aX:", "/heart%00"):
        refused = call(bookie.http_port, "PUT", path)
        assert refused.status == 404
        assert refused.error
    assert call(bookie.http_port, "GET", "/%68eartbeat?x").status == 200
    assert "heartbeat" not in bookie.log_tail(size_max=1 << 22)
    assert call(bookie.http_port, "PUT", f"{V1}/bookie/gc").status == 200
    assert f"PUT {V1}/bookie/gc from 127.0.0.1: 200" in bookie.log_tail(size_max=1 << 22)


@pytest.mark.parametrize("storage", [DB, INTERLEAVED], ids=["db", "interleaved"])
def test_running_bookie_takes_new_directories_unless_it_would_lose_its_ledgers(
    http_bookie: Callable[..., Any], storage: str
) -> None:
    bookie = http_bookie(ledgerStorageClass=storage, allowStorageExpansion="true")
    bookie.start()
    path = f"{V1}/bookie/expand_storage"
    assert call(bookie.http_port, "PUT", path).status == 200
    more = bookie.directory / "more"
    write_conf(bookie.conf, bookie.settings | {"ledgerDirectories": f"{bookie.ledger_dir},{more}"})
    answer = call(bookie.http_port, "PUT", path)
    assert (answer.status, more.exists()) == ((409, False) if storage == DB else (200, True))


async def test_missing_body_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr(app, "SEND_TIMEOUT_S", 0.01)
    scope = {
        "type": "http", "method": "PUT", "path": f"{V1}/bookie/gc", "query_string": b"", "headers": [], "root_path": "",
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) > 2:
            await never()  # nor is a client that does not take its answer

    api = Api(Nothing())  # type: ignore[arg-type]
    await api(scope, never, send)  # type: ignore[arg-type]
    assert [sent[0]["status"], sent[1]["type"]] == [408, "http.response.body"]
    await api(scope, never, send)  # type: ignore[arg-type]
    assert len(sent) == 3


def test_bodies_that_clients_hold_back_take_no_other_requests_place(bookie: Any) -> None:
    port = bookie.http_port
    token = local_authorization(port)["Authorization"]
    head = (
        f"PUT /api/v1/bookie/gc HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\nAuthorization: {token}\r\n\r\n{{"
    ).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(app.REQUESTS_MAX):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S))
            connection.sendall(head)
        assert [call(port, "GET", path).status for path in ("/heartbeat", f"{V1}/bookie/is_ready")] == [200, 200]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HttpServer]:
    """A server in this process with short time limits."""
    for name in ("IDLE_TIMEOUT_S", "STALL_TIMEOUT_S"):
        monkeypatch.setattr(f"bkctl.http.server.{name}", 0.3)
    monkeypatch.setattr("bkctl.http.server._LOOK_S", 0.05)
    monkeypatch.setattr("bkctl.http.server.CONNECTIONS_MAX", 20)
    server = HttpServer(HttpSettings("127.0.0.1", 0))
    server.bind()
    server.start(lambda: Service(f"sqlite://{tmp_path / 'nothing.db'}"), upstream=Upstream())
    yield server
    server.stop()


def answers_slow_clients(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if the server answers, without its short idle time, which a client on a busy machine needs."""
    monkeypatch.setattr("bkctl.http.server.IDLE_TIMEOUT_S", LIMIT_S)
    return call(server.address[1], "GET", "/heartbeat").status == 200


def test_idle_connection_is_closed(impatient: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for begun in (b"", b"GET /heartbeat HTTP/1.1\r\nHost: loc", REQUEST[:-5].replace(b"Content-Length", b"X")[:60]):
        with socket.create_connection(impatient.address, timeout=LIMIT_S) as connection:
            connection.sendall(begun)
            assert ended(connection)
    assert answers_slow_clients(impatient, monkeypatch)


def test_stalled_reader_is_closed(impatient: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(impatient.address)
        connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert answers_slow_clients(impatient, monkeypatch)
        wait_for(lambda: connection_count(impatient) == 0, "nobody is connected any more")
    assert answers_slow_clients(impatient, monkeypatch)


def test_too_many_requests_at_once_are_refused(impatient: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.http.server.IDLE_TIMEOUT_S", LIMIT_S)
    monkeypatch.setattr(app, "REQUESTS_MAX", 0)
    refused = call(impatient.address[1], "GET", "/heartbeat")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.error
    monkeypatch.setattr(app, "REQUESTS_MAX", 1)
    assert [call(impatient.address[1], "GET", "/heartbeat").status for _ in range(2)] == [200, 200]


def test_clients_that_wait_for_no_answer_make_room_for_others(
    impatient: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.http.server.IDLE_TIMEOUT_S", LIMIT_S)
    for begun in (b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n", REQUEST[:-5]):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                connection = stack.enter_context(socket.create_connection(impatient.address, timeout=LIMIT_S))
                connection.sendall(begun)
                if begun != REQUEST[:-5]:
                    assert connection.recv(12) == b"HTTP/1.1 200"
            assert call(impatient.address[1], "GET", "/heartbeat").status == 200


def test_excess_connections_are_refused(impatient: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(impatient.address, timeout=LIMIT_S)) for _ in range(60)]
        assert all(ended(connection) for connection in made)
    assert answers_slow_clients(impatient, monkeypatch)


def test_mute_tls_connections_count_and_time_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pem: Path) -> None:
    monkeypatch.setattr("bkctl.http.server.CONNECTIONS_MAX", 20)
    monkeypatch.setattr("bkctl.http.server.HANDSHAKE_TIMEOUT_S", 0.5)
    tls = tls_context(str(pem), None, None)
    server = HttpServer(HttpSettings("127.0.0.1", 0, tls=tls))
    server.bind()
    server.start(lambda: Service(f"sqlite://{tmp_path / 'nothing.db'}"), upstream=Upstream())
    try:
        with contextlib.ExitStack() as stack:
            made = [stack.enter_context(socket.create_connection(server.address, timeout=LIMIT_S)) for _ in range(60)]
            wait_for(lambda: server.ended["connections"] == 40, "those beyond the bound turned away")
            assert all(ended(connection) for connection in made)
        wait_for(lambda: server.ended["handshake"] == 20, "all handshakes ended")
        server._server.servers[0]._tls["ssl_handshake_timeout"] = LIMIT_S  # type: ignore[union-attr]
        with ssl.create_default_context(cafile=pem).wrap_socket(
            socket.create_connection(server.address, timeout=LIMIT_S), server_hostname="127.0.0.1"
        ) as client:
            client.sendall(b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    finally:
        server.stop()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_lost_connections_are_freed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pem: Path, scheme: str
) -> None:
    connections = Lifetimes(BoundedProtocol, monkeypatch)
    tls = tls_context(str(pem), None, None) if scheme == "https" else None
    client_tls = ssl.create_default_context(cafile=pem)
    server = HttpServer(HttpSettings("127.0.0.1", 0, tls=tls))
    server.bind()
    server.start(lambda: Service(f"sqlite://{tmp_path / 'nothing.db'}"), upstream=Upstream())
    heartbeat = b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n"
    sent_before = [
        b"", heartbeat[:20], heartbeat, heartbeat * 5, heartbeat[:-2] + b"Connection: close\r\n\r\n", REQUEST,
        REQUEST[:-5], CHUNKED, *HOSTILE[:12],
    ]  # fmt: skip
    try:
        with without_cycle_collector():
            for is_tls in {False, tls is not None}:
                for sent in sent_before:
                    for waits in (True, False):
                        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                            client = stack.enter_context(socket.create_connection(server.address, timeout=LIMIT_S))
                            if not waits:
                                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                            if is_tls:
                                client = stack.enter_context(
                                    client_tls.wrap_socket(client, server_hostname="127.0.0.1")
                                )
                            client.sendall(sent)
                            if waits and sent.startswith(heartbeat[:-2]):
                                client.recv(1 << 16)
            # A busy server accepts the last ones late.
            wait_for(lambda: len(connections.made) >= 40, "the connections made")
            wait_for(lambda: connections.alive == 0, "all connections freed")
            wait_for(lambda: count_of("SSLProtocol") == 0, "their TLS freed")
    finally:
        server.stop()


def connection_count(server: HttpServer) -> int:
    """Return the number of clients connected to a server of this process."""
    assert server._server is not None
    return len(server._server.server_state.connections)


def ended(connection: socket.socket) -> bool:
    """Wait for the server, and return True if it closes the connection without an answer."""
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


REQUEST = (
    b"PUT /api/v1/bookie/gc?bookie=x&y=%C3 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 21\r\nAuthorization: Bearer x\r\n\r\n{"forceMajor": false}'
)
CHUNKED = (
    b"PUT /api/v1/bookie/gc HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    b"Authorization: Bearer x\r\n\r\n"
    b'7\r\n{"force\r\ne\r\nMajor": false}\r\n0\r\n\r\n'
)
HOSTILE = [
    b"", b"\x00" * 4000, b"\xff" * 100, b"\r\n" * 5000, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n", b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
    b"GET /%00%ff/..%2f HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil/heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"PUT /heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    b"PUT /heartbeat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    b"GET /heartbeat HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
    b"GET /heartbeat HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,
]  # fmt: skip


def mutated(source: random.Random) -> bytes:
    """A request with some bytes changed, taken out, or put in twice."""
    data = bytearray(source.choice((REQUEST, CHUNKED)))
    for _ in range(source.randint(1, 6)):
        at = source.randrange(len(data))
        kind = source.randrange(4)
        if kind == 0:
            data[at] = source.randrange(256)
        elif kind == 1:
            del data[at : at + source.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at : at + source.randint(1, 40)]
        else:
            data[at:at] = source.choice((b"\r\n", b"\x00", b": ", b"%", b"&", b"\xed\xa0\x80", b" HTTP/1.1\r\n"))
        if not data:
            break
    return bytes(data)


def test_malformed_bytes_do_no_harm(bookie: Any) -> None:
    seed = 20_260
    source = random.Random(seed)
    port = bookie.http_port
    token = local_authorization(port)["Authorization"].encode()
    for number, data in enumerate([*HOSTILE, *(mutated(source) for _ in range(400))]):
        # Of strangers, and of clients with the token.
        answer = exchange(port, data.replace(b"Bearer x", token) if number % 2 else data)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), (seed, data)
        assert not answer.startswith(b"HTTP/1.1 5"), (seed, data, answer)
        assert b"Traceback" not in answer
    assert call(port, "GET", "/heartbeat").body == b"OK\n"
    assert call(port, "GET", f"{V1}/bookie/sanity").json == {"passed": True, "readOnly": False}
    assert "Traceback" not in bookie.log_tail(size_max=1 << 22)
    assert "Fatal" not in bookie.log_tail(size_max=1 << 22)


def test_every_endpoint_of_a_bookie_is_routed_once() -> None:
    api = Api(Nothing())  # type: ignore[arg-type]
    places = [(each.method, each.path) for each in api.endpoints]
    assert len(places) == len(set(places))


def test_a_server_that_stops_frees_its_port() -> None:
    port = free_port()
    for _ in range(2):
        server = HttpServer(HttpSettings("127.0.0.1", port))
        assert server.bind() == port
        server.stop()
