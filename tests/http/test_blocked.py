"""Look-ups, stores, disks and bookies that hang: the servers' loops go on, and probes are answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.raw_http import call
from support.served_bookies import config_for, serving
from support.servers import wait_for

from bkctl.disk import Files
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.http import bookie_endpoints
from bkctl.http.app import ENDPOINTS
from bkctl.http.endpoints import PREFIX
from bkctl.http.gateway import Upstream
from bkctl.http.server import HttpServer
from bkctl.http.server_settings import HttpSettings
from bkctl.http.service import BookieProxy, Service
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.cluster import Cluster, open_cluster

SLOW = "slow.example"
#: Required query parameters by endpoint.
QUERIES = {"ledger/metadata": "ledger_id=0", "ledger/read": "ledger_id=0", "ledger/delete": "ledger_id=0"}


class Hang:
    """Calls that wait until `release`, which the threads of event loops must not make."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.waiting = 0
        self.in_loops: list[str] = []

    def wait(self, what: str) -> None:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            self.waiting += 1
            self.released.wait()
        else:
            self.in_loops.append(what)  # it would hang here, too

    def before(self, original: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """The function that hangs where `when` says so, then does what the original does."""

        def hanging(*arguments: Any, **settings: Any) -> Any:
            if not self.released.is_set() and when(*arguments):
                self.wait(getattr(original, "__qualname__", str(original)))
            return original(*arguments, **settings)

        return hanging


@pytest.fixture
def hang() -> Iterator[Hang]:
    made = Hang()
    yield made
    made.released.set()


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """A cluster with two bookies whose name resolves late, and `mute:1` whose HTTP server answers nothing."""
    made = f"sqlite://{tmp_path / 'metadata.db'}"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as mute, open_cluster(made, create=True) as cluster:
        for name, host, http_host in (
            ("slow:1", SLOW, "0.0.0.0"),
            ("near:1", SLOW, "127.0.0.1"),
            ("mute:1", "127.0.0.1", "127.0.0.1"),
        ):
            endpoints = (
                BookieEndpoint("bookie", 1, host, "bookie-rpc"),
                BookieEndpoint("httpserver", mute.getsockname()[1], http_host, "http"),
            )
            cluster.bookies.register(name, BookieServiceInfo(endpoints))
        yield made


@contextlib.contextmanager
def gateway(uri: str, timeout_s: float = 5.0) -> Iterator[int]:
    server = HttpServer(HttpSettings("127.0.0.1", 0))
    port = server.bind()
    server.start(lambda: Service(uri), upstream=Upstream(timeout_s=timeout_s))
    try:
        yield port
    finally:
        server.stop()


@contextlib.contextmanager
def asked(port: int, requests: list[tuple[str, str]], hang: Hang) -> Iterator[None]:
    """All these requests under way, until the block ends; then their answers came, and no loop has waited."""
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = [threads.submit(call, port, method, path) for method, path in requests]
        try:
            wait_for(lambda: bool(hang.waiting or hang.in_loops), "they hang")
            yield
        finally:
            hang.released.set()
        assert all(answer.result().status < 600 for answer in answers)
    assert hang.in_loops == []


def paths_of(port: int, *, of_bookie: bool) -> list[tuple[str, str]]:
    """Every endpoint that only reads, and the deletion of a ledger."""
    return [
        (each.method, f"{each.path}?{QUERIES.get(each.path.removeprefix(f'{PREFIX}/'), '')}")
        for each in ENDPOINTS
        if each.of_bookie == of_bookie and each.method in ("GET", "DELETE") and not each.acts
    ]


@pytest.mark.parametrize("bookie_id", ["slow:1", "near:1"])
def test_gateway_answers_while_a_name_is_looked_up(
    uri: str, hang: Hang, monkeypatch: pytest.MonkeyPatch, bookie_id: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", hang.before(socket.getaddrinfo, lambda host, *_: host == SLOW))
    monkeypatch.setattr("bkctl.http.gateway.FORWARDS_PER_BOOKIE_MAX", 3)
    path = f"{PREFIX}/bookie/state?bookie={bookie_id}"
    with gateway(uri) as port, asked(port, [("GET", path)] * 3, hang):
        assert call(port, "GET", "/heartbeat").status == 200
        assert call(port, "GET", f"{PREFIX}/bookie/list_bookies").json.keys() == {"slow:1", "near:1", "mute:1"}
        wait_for(lambda: hang.waiting == 3, "all wait for the name")
        full = call(port, "GET", path)
        assert (full.status, bookie_id in full.error) == (503, True)


def test_gateway_answers_while_a_bookies_server_is_silent(uri: str) -> None:
    with gateway(uri, timeout_s=0.5) as port, ThreadPoolExecutor(4) as threads:
        paths = [f"{PREFIX}/bookie/{name}?bookie=mute:1" for name in ("state", "info", "gc", "is_ready")]
        answers = [threads.submit(call, port, "GET", path) for path in paths]
        assert call(port, "GET", "/heartbeat").status == 200
        assert {answer.result().status for answer in answers} == {504}


def test_gateway_answers_while_the_metadata_store_hangs(uri: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_rows", "_transaction"):
        monkeypatch.setattr(SqliteStore, name, hang.before(getattr(SqliteStore, name)))
    with gateway(uri) as port, asked(port, paths_of(port, of_bookie=False), hang):
        assert call(port, "GET", "/heartbeat").status == 200


def test_gateway_finds_bookies_outside_its_loop(uri: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    with gateway(uri, timeout_s=0.5) as port:
        assert call(port, "GET", f"{PREFIX}/bookie/list_bookies").status == 200, "the store is open now"
        for name in ("_rows", "_transaction"):
            monkeypatch.setattr(SqliteStore, name, hang.before(getattr(SqliteStore, name)))
        with asked(port, [("GET", f"{PREFIX}/bookie/state?bookie=mute:1")], hang):
            assert call(port, "GET", "/heartbeat").status == 200


def test_the_layout_is_never_read_in_the_loop(uri: str, hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqliteStore, "get", hang.before(SqliteStore.get, lambda _, path: path == "LAYOUT"))
    requests = [each for each in paths_of(0, of_bookie=False) if "/ledger/" in each[1]]
    assert len(requests) == 4
    for request in requests:
        hang.released.clear()
        hang.waiting = 0
        with gateway(uri) as port, asked(port, [request], hang):
            assert call(port, "GET", "/heartbeat").status == 200


@pytest.mark.parametrize("what", ["disks", "store"])
def test_bookie_answers_probes_while_disks_or_store_hang(
    tmp_path: Path, hang: Hang, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    conf = tmp_path / "bk_server.conf"
    conf.write_text("httpServerEnabled=true\n")
    server = HttpServer(HttpSettings("127.0.0.1", 0))
    port = server.bind()
    probes = ["/heartbeat", f"{PREFIX}/bookie/state", f"{PREFIX}/bookie/is_ready"]
    requests = paths_of(port, of_bookie=what == "disks")
    if what == "store":  # which /metrics needs not; more requests wait than asyncio has threads by default
        probes.append("/metrics")
        requests += requests[:1] * (os.cpu_count() or 1) * 3

    def ask() -> None:
        with asked(port, requests, hang):
            wait_for(lambda: hang.waiting >= 3 or bool(hang.in_loops), "many hang")
            for path in probes:
                assert call(port, "GET", path).status == 200, path

    def is_api(*_: Any) -> bool:
        return threading.current_thread().name.startswith(("http", "asyncio"))

    calls = {
        "store": [(SqliteStore, "_rows"), (SqliteStore, "_transaction")],
        "disks": [
            (Files, "disk_usage"), (os, "walk"), (Path, "read_bytes"), (bookie_endpoints, "read_properties"),
        ],
    }  # fmt: skip

    async def run(cluster: Cluster) -> None:
        config = config_for(tmp_path, metadata_service_uri=uri, conf_path=conf)
        async with serving(config, cluster) as bookie:
            local = BookieProxy(bookie, asyncio.get_running_loop())
            server.start(lambda: Service(uri, local_bookie=local))
            for where, name in calls[what]:
                monkeypatch.setattr(where, name, hang.before(getattr(where, name), is_api))
            try:
                await asyncio.to_thread(ask)
            finally:
                hang.released.set()
                await asyncio.to_thread(server.stop)

    with open_cluster(uri, create=True) as cluster:
        asyncio.run(run(cluster))
