"""A gateway: the cluster's endpoints from the metadata, a bookie's from that bookie's own server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.raw_http import call, exchange, local_authorization
from support.servers import DB, free_port
from support.waiting import LIMIT_S

from bkctl.client.ledger import BookKeeper
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.http import app
from bkctl.http.gateway import FORWARDS_PER_BOOKIE_MAX, Upstream
from bkctl.http.server import HttpServer
from bkctl.http.server_settings import HttpSettings
from bkctl.http.service import Service
from bkctl.metadata.cluster import open_cluster

V1 = "/api/v1"
TOKEN = "open-sesame"


def uri_of(bookie: Any) -> str:
    return str(bookie.settings["metadataServiceUri"])


def test_gateway_answers_cluster_endpoints_as_bookie(bookie: Any, gateway: Callable[..., Any]) -> None:
    port = gateway(uri_of(bookie)).http_port
    for path in (
        "/heartbeat", f"{V1}/ledger/list", f"{V1}/bookie/list_bookies", f"{V1}/bookie/cluster_info",
        f"{V1}/autorecovery/status", f"{V1}/autorecovery/who_is_auditor", f"{V1}/ledger/metadata?ledger_id=7",
        f"{V1}/ledger/metadata", f"{V1}/nothing",
    ):  # fmt: skip
        here, there = call(port, "GET", path), call(bookie.http_port, "GET", path)
        assert here.status == there.status
        assert here.body == there.body
    info = call(port, "GET", f"{V1}/bookie/list_bookie_info").json
    assert list(info) == [bookie.bookie_id, "ClusterInfo: "]
    assert call(port, "PUT", f"{V1}/autorecovery/bookie", {"bookie_src": ["b:1"]}).status == 200


def test_gateway_forwards_to_named_bookie(bookie: Any, gateway: Callable[..., Any]) -> None:
    port = gateway(uri_of(bookie)).http_port
    named = f"bookie={bookie.bookie_id}"
    for method, path, body in (
        ("GET", f"{V1}/bookie/state", None),
        ("GET", f"{V1}/bookie/is_ready", None),
        ("GET", f"{V1}/bookie/list_disk_file?file_type=journal", None),
        ("GET", f"{V1}/config/server_config", None),
        ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMajor": True}),
        ("GET", f"{V1}/bookie/gc/suspend_compaction", None),
        ("PUT", f"{V1}/bookie/gc/resume_compaction", {"resumeMajor": True}),
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": "no"}),
    ):
        here = call(port, method, f"{path}{'&' if '?' in path else '?'}{named}", body)
        there = call(bookie.http_port, method, path, body)
        assert (here.status, here.body) == (there.status, there.body)
        assert here.headers["content-type"] == there.headers["content-type"]
    metrics = call(port, "GET", f"/metrics?{named}")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b"bookie_SERVER_STATUS 1" in metrics.body


def test_gateway_refuses_missing_and_unknown_bookie(bookie: Any, gateway: Callable[..., Any]) -> None:
    port = gateway(uri_of(bookie)).http_port
    nobody = call(port, "GET", f"{V1}/bookie/state")
    assert nobody.status == 400
    assert "?bookie=ID" in nobody.json["hint"]
    assert call(port, "GET", f"{V1}/bookie/state?bookie=other:1").status == 404
    assert call(port, "GET", f"{V1}/bookie/state?bookie=%00").status == 400
    with open_cluster(uri_of(bookie)) as cluster:
        found = cluster.bookies.get(bookie.bookie_id)
        assert found is not None
        assert found.info is not None
        gone = tuple(each._replace(port=free_port()) for each in found.info.endpoints)
        cluster.bookies.register("gone", type(found.info)(gone, {}))
        cluster.bookies.register("without", type(found.info)(gone[1:], {}))
        assert call(port, "GET", f"{V1}/bookie/state?bookie=gone").status == 503
        assert call(port, "GET", f"{V1}/bookie/state?bookie=without").status == 404


def test_gateway_uses_bookies_token_not_its_own(
    http_bookie: Callable[..., Any], gateway: Callable[..., Any], tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text(TOKEN)
    theirs.write_text("another")
    bookie = http_bookie(httpServerTokenFile=theirs)
    bookie.start()
    port = gateway(uri_of(bookie), "--token-file", ours, "--bookie-token-file", theirs).http_port
    state = f"{V1}/bookie/state?bookie={bookie.bookie_id}"
    assert call(port, "GET", state).status == 401
    assert call(port, "GET", state, headers={"Authorization": "Bearer another"}).status == 401
    assert call(port, "GET", state, headers={"Authorization": f"Bearer {TOKEN}"}).json["running"]


def test_long_answer_streams(bookie: Any, gateway: Callable[..., Any]) -> None:
    server = gateway(uri_of(bookie))
    entry, count = b"x" * 16_384, 3000

    async def fill() -> int:
        with open_cluster(uri_of(bookie)) as cluster:
            async with BookKeeper(cluster) as bookkeeper:
                writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
                async with writer:
                    for _ in range(count):
                        await writer.ready()
                        writer.add(entry)
                return writer.ledger_id

    ledger_id = asyncio.run(fill())
    path = f"{V1}/ledger/read?encoding=base64&ledger_id={ledger_id}"
    assert len(call(server.http_port, "GET", f"{path}&end_entry_id=9").json) == 10
    before = peak_memory(server.pid)
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_S)
    connection.request("GET", path, headers=local_authorization(server.http_port))
    response = connection.getresponse()
    size = 0
    while part := response.read(1 << 16):
        size += len(part)
    connection.close()
    assert size > count * len(entry) * 4 // 3
    assert peak_memory(server.pid) - before < size // 2


def peak_memory(pid: int) -> int:
    """The most bytes of memory that a process had."""
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_gateway_without_authentication_does_not_start(bookie: Any, tmp_path: Path) -> None:
    from support.command_line import CommandLine

    answer = CommandLine(uri_of(bookie))("api", "serve", "--host", "0.0.0.0", "--port", "0")
    assert answer.code == 2
    assert "--token-file" in answer.problem
    for arguments in (("--port", "70000"), ("--port", "x"), ("--client-ca", tmp_path), ("--token-file", tmp_path)):
        assert CommandLine(uri_of(bookie))("api", "serve", *arguments).code == 2
    codes = [CommandLine(uri)("api", "serve", "--port", "0").code for uri in ("nonsense", "zkk://x/ledgers")]
    assert codes == [2, 8]


def test_gateway_stops_on_signal(bookie: Any, gateway: Callable[..., Any]) -> None:
    server = gateway(uri_of(bookie))
    port = server.http_port
    assert call(port, "GET", "/heartbeat").status == 200
    os.kill(server.pid, signal.SIGTERM)
    assert server.process.wait(LIMIT_S) == 0
    assert "Traceback" not in server.log_tail()


def test_gateway_survives_loss_of_metadata_store(tmp_path: Path, gateway: Callable[..., Any]) -> None:
    port = gateway(f"sqlite://{tmp_path / 'nothing.db'}").http_port
    for path in (f"{V1}/ledger/list", f"{V1}/bookie/cluster_info", f"{V1}/bookie/state?bookie=b:1"):
        assert call(port, "GET", path).status == 404
        assert call(port, "GET", path).error
    unreachable = gateway(f"zk://127.0.0.1:{free_port()}/ledgers", "--timeout", "1").http_port
    answer = call(unreachable, "GET", f"{V1}/ledger/list")
    assert answer.status in (503, 504)
    assert answer.error
    assert exchange(unreachable, b"GET /heartbeat HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def silent_bookies(directory: Path, count: int, upstream: Upstream) -> Iterator[tuple[HttpServer, socket.socket]]:
    """A gateway in this process to bookies `silent-N`, and the socket that listens for all of them."""
    uri = f"sqlite://{directory / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster, socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        listener.settimeout(LIMIT_S)
        port = listener.getsockname()[1]
        for number in range(count):
            endpoint = BookieEndpoint("httpserver", port, "127.0.0.1", "http")
            cluster.bookies.register(f"silent-{number}", BookieServiceInfo((endpoint,)))
        server = HttpServer(HttpSettings("127.0.0.1", 0))
        server.bind()
        server.start(lambda: Service(uri), upstream=upstream)
        try:
            yield server, listener
        finally:
            server.stop()


def asked(server: HttpServer, path: str) -> socket.socket:
    """Send a request, and return its connection."""
    connection = socket.create_connection(server.address, timeout=LIMIT_S)
    headers = {"Host": "localhost", "Connection": "close", **local_authorization(server.address[1])}
    lines = [f"GET {V1}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    connection.sendall("\r\n".join(lines).encode())
    return connection


def test_silent_bookies_leave_threads_and_room_for_other_requests(tmp_path: Path) -> None:
    with (
        silent_bookies(tmp_path, 5, Upstream(timeout_s=LIMIT_S)) as (server, listener),
        contextlib.ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(asked(server, f"/bookie/state?bookie=silent-{number % 5}"))
            for number in range(5 * FORWARDS_PER_BOOKIE_MAX)  # more than the 32 threads that an event loop may have
        ]
        accepted = [stack.enter_context(listener.accept()[0]) for _ in clients]
        port = server.address[1]
        assert call(port, "GET", f"{V1}/ledger/list").status == 200
        refused = call(port, "GET", f"{V1}/bookie/state?bookie=silent-0")
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert "8 requests to bookie silent-0" in refused.error
        for connection in accepted:
            connection.close()
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 503")
        stack.enter_context(asked(server, "/bookie/state?bookie=silent-0"))
        listener.accept()[0].close()


def test_forwards_that_cannot_begin_take_no_room(tmp_path: Path) -> None:
    class Threads(ThreadPoolExecutor):
        refusals_left = FORWARDS_PER_BOOKIE_MAX

        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            if self.refusals_left:
                self.refusals_left -= 1
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    path = "/bookie/state?bookie=silent-0"
    with silent_bookies(tmp_path, 1, Upstream(timeout_s=LIMIT_S, threads=Threads(1))) as (server, listener):
        for _ in range(FORWARDS_PER_BOOKIE_MAX):
            assert call(server.address[1], "GET", f"{V1}{path}").status == 500
        with asked(server, path):
            listener.accept()[0].close()


def test_gateway_waits_longer_than_the_bookie_for_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "FORWARD_TIMEOUT_S", LIMIT_S)
    for path, upstream, own_timeout_s in (
        ("/bookie/sanity", Upstream(timeout_s=0.2), 90.0),  # up to 40 s on the bookie
        ("/bookie/state", Upstream(timeout_s=LIMIT_S), 0.2),
    ):
        monkeypatch.setattr(app, "ANSWER_TIMEOUT_S", own_timeout_s)
        directory = tmp_path / path.replace("/", "-")
        directory.mkdir()
        with (
            silent_bookies(directory, 1, upstream) as (server, listener),
            asked(server, f"{path}?bookie=silent-0") as client,
            listener.accept()[0] as connection,
        ):
            time.sleep(1)
            connection.sendall(b'HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 16\r\n\r\n{"passed":false}')
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200"), path


def test_databases_of_locations_are_compacted(http_bookie: Callable[..., Any]) -> None:
    bookie = http_bookie(ledgerStorageClass=DB, entryLocationCompactionInterval=-1)
    bookie.start()
    port, path = bookie.http_port, f"{V1}/bookie/entry_location_compact"
    found = call(port, "GET", path).json
    assert set(found.values()) == {False}
    assert str(Path(bookie.settings["ledgerDirectories"]) / "current" / "locations") in found
    everything = call(port, "PUT", path, {"entryLocationRocksDBCompact": True})
    assert everything.json == f"Triggered entry Location RocksDB compact on bookie:{bookie.bookie_id}"
    wrong = call(port, "PUT", path, {"entryLocationRocksDBCompact": True, "entryLocations": "/other"})
    assert wrong.status == 400
    assert next(iter(found)) in json.dumps(wrong.json)
    names = re.findall(r"(?m)^bookie_\w+_TOTAL", call(port, "GET", "/metrics").body.decode())
    assert "bookie_MAJOR_COMPACTION_TOTAL" in names
