"""The metadata store on real etcds: keys, outages, several endpoints, TLS, users, leases, and bookies on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.own_bookies import OwnBookie
from support.own_cluster import start_all, stop_all
from support.servers import EtcdServer, free_port
from support.waiting import LIMIT_S, eventually

from bkctl.client.ledger import BookKeeper
from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    MetadataVersionConflict,
    NotFound,
    TimedOut,
    Unauthorized,
    Unreachable,
    UsageError,
)
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.ids import LedgerId
from bkctl.metadata.backends.etcd import etcdrpc
from bkctl.metadata.backends.etcd.etcd_connection import EtcdConnection, etcd3
from bkctl.metadata.backends.etcd.etcd_store import TRANSACTION_SIZE_MAX, EtcdStore, put_key
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW, StoreSecurity

INFO = BookieServiceInfo((BookieEndpoint("bookie", 3181, "127.0.0.1", "bookie-rpc"),), {"ledgerScopes": "1"})


def open_store(*servers: EtcdServer, root: str = "/ledgers", **options: Any) -> EtcdStore:
    return EtcdStore([("127.0.0.1", server.port) for server in servers], root, **{"timeout_s": LIMIT_S, **options})


@pytest.fixture
def root(etcd: EtcdServer) -> str:
    return etcd.new_root()


@pytest.fixture
def store(etcd: EtcdServer, root: str) -> Iterator[EtcdStore]:
    with open_store(etcd, root=root, session_timeout_s=10) as opened:
        opened.put_all([("", b"")])
        yield opened


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    """Three etcds that are one cluster."""
    ports = {f"member-{index}": free_port() for index in range(3)}
    servers = [EtcdServer(tmp_path / name, name=name, members=ports) for name in ports]
    start_all(servers)
    yield servers
    for server in servers:
        server.kill()


# loading


def test_generated_protobuf_modules_are_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    directory = Path(etcdrpc.__file__).parent
    repository = directory.parents[4]
    output = tmp_path / "descriptor"
    proto = "bkctl/metadata/backends/etcd/etcdrpc/rpc.proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--descriptor_set_out={output}", proto]
    subprocess.run(command, cwd=repository, check=True)
    from google.protobuf import descriptor_pb2

    made = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]
    loaded = descriptor_pb2.FileDescriptorProto()
    etcdrpc.rpc_pb2.DESCRIPTOR.CopyToProto(loaded)
    for message in (message for file in (made, loaded) for message in file.message_type):
        for field in message.field:
            field.ClearField("json_name")
    assert loaded == made


def test_etcd3_works_with_the_regenerated_stubs(etcd: EtcdServer, root: str) -> None:
    assert sys.modules["etcd3.etcdrpc"] is etcdrpc
    with etcd3.client(port=etcd.port) as client:
        client.put(f"{root}/key", "value")
        assert client.get(f"{root}/key")[0] == b"value"
        done, _ = client.transaction(
            compare=[client.transactions.version(f"{root}/key") == 1],
            success=[client.transactions.put(f"{root}/key", "other")],
            failure=[],
        )
        assert done
        lease = client.lease(10)
        assert lease.remaining_ttl > 0
        lease.revoke()
        assert client.status().version
        assert len(list(client.members)) == 1


def test_only_etcd_uris_load_grpc() -> None:
    program = (
        "import sys\n"
        "from bkctl.metadata.cluster import open_cluster\n"
        "from bkctl.errors import NotFound\n"
        "try:\n"
        "    open_cluster('sqlite:///nowhere/file')\n"
        "except NotFound:\n"
        "    print([name for name in ('grpc', 'etcd3', 'google.protobuf', 'six') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# keys


def test_children_are_listed_across_pages_without_grandchildren(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:03d}" for number in range(60)]
    for name in names:
        store.put(f"directory/{name}", b"", NEW)
    for number in range(25):
        store.put(f"directory/007/below/{number}", b"", NEW)
        store.put(f"directory/007-x{number:02d}", b"", NEW)
    expected = sorted([*names, *(f"007-x{number:02d}" for number in range(25))])
    for size in (1, 2, 7, 1000):
        monkeypatch.setattr("bkctl.metadata.backends.etcd.etcd_store.PAGE_SIZE", size)
        assert store.children("directory") == expected
        assert store.children("directory", after="007", limit=3) == ["007-x00", "007-x01", "007-x02"]
        assert store.children("directory", after="007-x24", limit=2) == ["008", "009"]
        assert store.children("directory", limit=0) == []
        assert next(store.children_many(["directory/007/below"])) == sorted(map(str, range(25)))


def test_etcd_counts_each_key_of_a_listing_a_few_times_only(store: EtcdStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts all keys of a range, also those behind the limit."""
    random_numbers = random.Random(5)
    ledgers = [*map(LedgerId.from_value, range(4000)), *(LedgerId.random() for _ in range(2000))]
    ledgers += [LedgerId(7, random_numbers.getrandbits(40)) for _ in range(500)]
    names = sorted(str(uuid.UUID(ledger.qualified_name)) for ledger in ledgers)
    store.put("ledgers", b"", NEW)
    key = store._key("ledgers")
    for start in range(0, len(names), TRANSACTION_SIZE_MAX):
        keys = [key + f"/{name}".encode() for name in names[start : start + TRANSACTION_SIZE_MAX]]
        store._connection.transact((), [put_key(each, b"") for each in keys])
    monkeypatch.setattr("bkctl.metadata.backends.etcd.etcd_store.PAGE_SIZE", 20)
    send, counts = store._connection.send, []

    def counted(method: str, request: Any, *more: Any) -> Any:
        answer = send(method, request, *more)
        counts.append(sum(response.response_range.count for response in answer[0].responses))
        return answer

    monkeypatch.setattr(store._connection, "send", counted)
    assert store.children("ledgers") == names
    pages = len(names) / 20
    assert len(counts) < 2 * pages
    assert sum(counts) < 20 * len(names)  # half of pages x names, were each page's range to reach to the end
    counts.clear()
    found = store.children("ledgers", limit=20) or []
    while more := store.children("ledgers", after=found[-1], limit=20):
        found += more
    assert found == names
    assert len(counts) < 2 * pages
    assert sum(counts) < 20 * len(names)


def test_directory_is_pruned_with_its_last_child_whatever_the_length_of_its_name(store: EtcdStore) -> None:
    for names in (("x", "y"), ("xy", "zz"), ("0001", "0002"), ("0001", "9999")):
        for name in names:
            store.put(f"top/of/{name}", b"", NEW)
        store.put("top/of-another", b"", NEW)
        for last, name in enumerate(reversed(names)):
            store.delete(f"top/of/{name}", prune=2)
            assert store.children("top") == (["of-another"] if last else ["of", "of-another"])
        store.delete("top/of-another", prune=2)
        assert store.children("") == []


def test_a_listing_survives_the_compaction_of_its_revision(
    store: EtcdStore, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:03d}" for number in range(20)]
    for name in names:
        store.put(f"directory/{name}", b"", NEW)
    monkeypatch.setattr("bkctl.metadata.backends.etcd.etcd_store.PAGE_SIZE", 4)
    send, asked = store._connection.send, []

    def compact(method: str, request: Any) -> Any:
        asked.append(request)
        if len(asked) == 3:
            revision = store.put("other", b"", NEW)
            with etcd3.client(port=etcd.port) as client:
                client.compact(revision)
        return send(method, request)

    monkeypatch.setattr(store._connection, "send", compact)
    assert store.children("directory") == names


def test_siblings_of_the_root_are_not_listed(etcd: EtcdServer, root: str, store: EtcdStore) -> None:
    with open_store(etcd, root=f"{root}-x") as other:
        other.put_all([("", b""), ("a", b"")])
        store.put("b", b"", NEW)
        assert store.children("") == ["b"]
        assert other.children("") == ["a"]


def test_undecodable_names_are_skipped(store: EtcdStore, etcd: EtcdServer, root: str) -> None:
    store.put("directory/a", b"", NEW)
    with etcd3.client(port=etcd.port) as client:
        client.put(f"{root}/directory/".encode() + b"\xff\xfe", b"")
    assert store.children("directory") == ["a"]


def test_transactions_above_etcds_limit_are_refused(store: EtcdStore) -> None:
    with pytest.raises(UsageError):
        store.put_all([(f"node-{number}", b"") for number in range(TRANSACTION_SIZE_MAX + 1)])
    assert store.children("") == []
    store.put_all([(f"node-{number}", b"") for number in range(TRANSACTION_SIZE_MAX)])
    assert len(store.children("") or []) == TRANSACTION_SIZE_MAX


def test_a_missing_cluster_is_named(etcd: EtcdServer) -> None:
    with open_cluster(etcd.metadata_uri("/nowhere")) as cluster:
        for call in (cluster.layout, lambda: cluster.ledgers, lambda: cluster.store.put("a/b", b"", NEW)):
            with pytest.raises(NotFound) as caught:
                call()
            assert "/nowhere of etcd at 127.0.0.1" in str(caught.value)


# answers that were lost


class Loser:
    """Loses the answers of a store's transactions that write, after etcd applied them: the store sends them again.

    Where not `applied`, the first request was lost itself.
    """

    def __init__(
        self, store: EtcdStore, monkeypatch: pytest.MonkeyPatch, between: Callable[[], None], applied: bool = True
    ) -> None:
        self._send = store._connection.send
        self._between = between
        self._applied = applied
        self.armed = True
        monkeypatch.setattr(store._connection, "send", self.send)

    def send(self, method: str, request: Any) -> tuple[Any, bool]:
        writes = method == "Txn" and any(op.WhichOneof("request") != "request_range" for op in request.success)
        if not self.armed or not writes:
            return self._send(method, request)
        self.armed = False
        if self._applied:
            self._send(method, request)
        self._between()
        return self._send(method, request)[0], True


def test_write_with_lost_answer_is_recognised(
    store: EtcdStore, etcd: EtcdServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(etcd, root=root) as other:
        loser = Loser(store, monkeypatch, lambda: None)
        version = store.put("a/created", b"1", NEW)
        assert other.get("a/created")[:2] == (b"1", version)  # type: ignore[index]
        loser.armed = True
        version = store.put("a/created", b"2", version)
        assert other.get("a/created")[:2] == (b"2", version)  # type: ignore[index]
        loser.armed = True
        version = store.put("a/created", b"3", None)
        assert other.get("a/created")[:2] == (b"3", version)  # type: ignore[index]
        loser.armed = True
        store.put_all([("b", b"1"), ("c", b"2")])
        loser.armed = True
        store.delete("c", (other.get("c") or (b"", 0))[1])
        assert other.get("c") is None
        loser.armed = True
        store.ephemeral("a/ephemeral", b"")
        loser.armed = True
        assert store.sequence("numbers") == 0 or store.sequence("numbers") > 1


def test_equal_write_of_another_client_is_not_taken_for_ours(
    store: EtcdStore, etcd: EtcdServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(etcd, root=root) as other:
        version = store.put("node", b"0", NEW)

        def write_twice() -> None:
            other.put("node", b"1", other.put("node", b"else", other.get("node")[1]))  # type: ignore[index]

        loser = Loser(store, monkeypatch, write_twice, applied=False)
        with pytest.raises(MetadataVersionConflict) as caught:
            store.put("node", b"1", version)
        assert not caught.value.may_be_applied
        loser._applied = True

        def create_anew() -> None:
            other.delete("node")
            other.put("node", b"else", NEW)

        store.delete("node")
        loser._between, loser.armed = create_anew, True
        with pytest.raises(AlreadyExists):
            store.put("node", b"0", NEW)
        assert other.get("node").value == b"else"  # type: ignore[union-attr]


@pytest.mark.parametrize("writes", [1, 2, 3, 50])
def test_write_with_lost_answer_is_recognised_behind_later_writes(
    store: EtcdStore, etcd: EtcdServer, root: str, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    with open_store(etcd, root=root) as other:
        version = store.put("node", b"0", NEW)

        def write() -> None:
            for number in range(writes):
                other.put("node", b"else %d" % number, None)
                other.put("another", b"", None)

        Loser(store, monkeypatch, write)
        ours = store.put("node", b"ours", version)
        assert version < ours < other.get("node").version  # type: ignore[union-attr]


def test_write_with_lost_answer_may_be_applied_after_compaction(
    store: EtcdStore, etcd: EtcdServer, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(etcd, root=root) as other:
        version = store.put("node", b"0", NEW)

        def write_and_compact() -> None:
            etcd3.client(port=etcd.port).compact(other.put("node", b"else", None))

        Loser(store, monkeypatch, write_and_compact)
        with pytest.raises(MetadataVersionConflict) as caught:
            store.put("node", b"ours", version)
        assert caught.value.may_be_applied


# outages


def test_hanging_server_times_out_or_resumes(etcd_server: Callable[..., EtcdServer]) -> None:
    server = etcd_server()
    with open_store(server) as store, open_store(server) as patient:
        store.put_all([("", b""), ("node", b"0")])
        version = store.get("node").version  # type: ignore[union-attr]
        store._connection.timeout_s = 1.5
        server.pause()
        calls: list[Callable[[], object]] = [
            lambda: store.get("node"),
            lambda: store.put("node", b"no", version),
            lambda: list(store.get_many(["node"])),
            lambda: list(store.children_many(["node"])),
            lambda: store.ephemeral("ephemeral", b""),
            lambda: store.watch("node", lambda: None),
        ]
        for call in calls:
            with pytest.raises(TimedOut) as caught:
                call()
            assert server.connect_string in str(caught.value)
        with pytest.raises(TimedOut):
            open_store(server, timeout_s=0.5)
        done: list[object] = []
        waiting = threading.Thread(target=lambda: done.append(patient.children("")))
        waiting.start()
        server.resume()
        waiting.join(LIMIT_S)
        assert done == [["node"]]
        found = patient.get("node")
        assert found is not None
        # The write that timed out may have been applied when the server went on, once.
        assert found.value in (b"0", b"no")


def test_absent_server_is_named_at_once() -> None:
    with pytest.raises(Unreachable) as caught:
        EtcdStore([("127.0.0.1", free_port()), ("no-such-host.invalid", 2379)], "/ledgers", timeout_s=60)
    assert not isinstance(caught.value, TimedOut)
    assert "no-such-host.invalid:2379" in str(caught.value)
    assert "refused" in str(caught.value)
    assert "does not resolve" in str(caught.value)


def test_requests_fail_over_when_a_member_is_killed_or_hangs(members: list[EtcdServer]) -> None:
    with open_store(*members, session_timeout_s=20) as store, open_store(members[1]) as observer:
        store.put_all([("", b"")])
        store.ephemeral("available/bookie-1", b"info")
        changes: list[int] = []
        store.watch("node", lambda: changes.append(store.get("node").version))  # type: ignore[union-attr]
        version = store.put("node", b"0", NEW)
        members[0].kill()
        version = store.put("node", b"1", version)
        eventually(lambda: changes and changes[-1] == version)
        assert observer.get("available/bookie-1") is not None
        members[0].start()
        members[1].pause()
        try:
            version = store.put("node", b"2", version)
            assert [found.value for found in store.get_many(["node"] * 100) if found] == [b"2"] * 100
            eventually(lambda: changes[-1] == version)
        finally:
            members[1].resume()
        eventually(lambda: observer.get("available/bookie-1") is not None)


def test_cluster_without_majority_times_out(members: list[EtcdServer]) -> None:
    with open_store(*members) as store:
        store.put_all([("", b"")])
        store._connection.timeout_s = 2
        members[1].kill()
        members[2].kill()
        for call in (lambda: store.get(""), lambda: store.put("node", b"", None)):
            with pytest.raises(TimedOut):
                call()
        members[1].start()
        store._connection.timeout_s = LIMIT_S
        eventually(lambda: _succeeds(lambda: store.put("node", b"1", None)))


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except TimedOut:
        return False
    return True


# leases


def test_registrations_and_watches_outlive_a_lease(etcd: EtcdServer, root: str) -> None:
    uri = etcd.metadata_uri(root)
    options: dict[str, Any] = {"session_timeout_s": 6}
    with open_cluster(uri, create=True, **options) as bookie, open_cluster(uri, **options) as observer:
        bookie.bookies.register("bookie-1", INFO)
        bookie.bookies.register("bookie-2", INFO, read_only=True)
        bookie.bookies.register("bookie-3", INFO)
        bookie.bookies.unregister("bookie-3")
        seen: list[set[str]] = []
        observer.bookies.watch(lambda: seen.append({one.bookie_id for one in observer.bookies.list()}))
        for _ in range(2):
            store: Any = bookie.store
            lease_id, before = store.lease_id, len(seen)
            with etcd3.client(port=etcd.port) as client:
                client.revoke_lease(lease_id)
            eventually(lambda before=before: len(seen) > before)
            eventually(lambda store=store, old=lease_id: store.lease_id not in (0, old))
            eventually(lambda: {one.bookie_id: one.state for one in observer.bookies.list()}
                       == {"bookie-1": "rw", "bookie-2": "ro"})  # fmt: skip
            eventually(lambda: seen[-1] == {"bookie-1", "bookie-2"})
            assert observer.bookies.get("bookie-1").info == INFO  # type: ignore[union-attr]
        bookie.bookies.register("bookie-1", INFO, True)
        assert {one.state for one in observer.bookies.list()} == {"ro"}
        with etcd3.client(port=etcd.port) as client:
            assert client.get(f"{root}/bookies/readonly/bookie-1")[0] == INFO.serialize()


def test_lost_lease_is_replaced_for_all_ephemerals(etcd: EtcdServer, root: str, store: EtcdStore) -> None:
    store.ephemeral("first", b"1")
    with etcd3.client(port=etcd.port) as client:
        client.revoke_lease(store.lease_id)
    store.ephemeral("second", b"2")
    eventually(lambda: store.get("first") is not None)
    assert [found.value for found in store.get_many(["first", "second"]) if found] == [b"1", b"2"]
    store.close()
    with open_store(etcd, root=root) as other:
        assert other.children("") == []


def test_successor_of_a_dead_bookie_registers_after_its_lease(etcd: EtcdServer, root: str) -> None:
    program = (
        "import sys, time\n"
        "from bkctl.metadata.backends.etcd.etcd_store import EtcdStore\n"
        "store = EtcdStore([('127.0.0.1', int(sys.argv[1]))], sys.argv[2], session_timeout_s=6)\n"
        "store.ephemeral('bookies/writable/bookie-1', b'first')\n"
        "print(store.lease_id, flush=True)\n"
        "time.sleep(600)\n"
    )
    with open_cluster(etcd.metadata_uri(root), create=True, session_timeout_s=1) as cluster:
        with subprocess.Popen([sys.executable, "-c", program, str(etcd.port), root], stdout=subprocess.PIPE) as dead:
            assert dead.stdout is not None
            lease_id = int(dead.stdout.readline())
            with etcd3.client(port=etcd.port) as client:  # It keeps its lease alive: the time to live grows again.
                lowest = client.get_lease_info(lease_id).TTL

                def is_refreshed() -> bool:
                    nonlocal lowest
                    remaining_s = client.get_lease_info(lease_id).TTL
                    lowest, before = min(lowest, remaining_s), lowest
                    return bool(remaining_s > before)

                eventually(is_refreshed)
            with pytest.raises(AlreadyExists):
                cluster.bookies.register("bookie-1", INFO, wait_s=0)
            dead.kill()
        cluster.bookies.register("bookie-1", INFO)
        # So short a lease may end on a busy machine; the registration comes back.
        eventually(lambda: (found := cluster.bookies.get("bookie-1")) is not None and found.info == INFO)


def test_replaced_ephemeral_keeps_its_lease(store: EtcdStore, etcd: EtcdServer, root: str) -> None:
    store.ephemeral("node", b"1")
    store.put("node", b"2", store.get("node").version)  # type: ignore[union-attr]
    store.close()
    with open_store(etcd, root=root) as other:
        assert other.get("node") is None


def test_close_does_not_wait_for_a_server_that_is_down(etcd_server: Callable[..., EtcdServer]) -> None:
    server = etcd_server()
    store = open_store(server)
    store.put_all([("", b"")])
    store.ephemeral("node", b"")
    store.watch("node", lambda: None)
    server.kill()
    ended: list[Exception] = []

    def read() -> None:
        try:
            store.get("node")
        except Unreachable as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    store.close()
    reader.join(timeout=LIMIT_S / 2)
    assert not reader.is_alive()
    assert len(ended) == 1
    eventually(lambda: not any(thread.name.startswith("metadata-store") for thread in store._connection.threads.values()
                               if thread.is_alive()))  # fmt: skip


# TLS and users


def test_tls_with_certificates_of_both_sides(etcd_server: Callable[..., EtcdServer], pem: Path) -> None:
    server = etcd_server(tls=pem)
    ours = {"tls": True, "ca": str(pem), "certificate": str(pem)}
    uri = server.metadata_uri()
    with open_cluster(uri, create=True, security=StoreSecurity(**ours)) as cluster:
        cluster.bookies.register("bookie-1", INFO)
        assert [one.bookie_id for one in cluster.bookies.list()] == ["bookie-1"]
    refused = [
        (StoreSecurity(), 1),
        (StoreSecurity(tls=True, ca=str(pem)), 1),  # no certificate of our own
        (StoreSecurity(tls=True), 20),  # not signed by the system's authorities
    ]
    for security, timeout_s in refused:
        with pytest.raises(Unreachable) as caught:
            open_cluster(uri, timeout_s=timeout_s, security=security)
        assert server.connect_string in str(caught.value)
    for security in (
        StoreSecurity(tls=True, ca=__file__),
        StoreSecurity(tls=True, ca="/nowhere.pem"),
        StoreSecurity(tls=True, ca=str(pem), verify_hostname=False),
        StoreSecurity(tls=True, ca=str(pem), certificate=str(pem), key_password="secret"),
        StoreSecurity(user="user", password="secret", sasl=True),
    ):
        with pytest.raises(UsageError) as wrong:
            open_cluster(uri, timeout_s=5, security=security)
        assert "secret" not in str(wrong.value)


_REFUSED = """
import sys
from bkctl.errors import Unreachable
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import StoreSecurity

try:
    open_cluster(sys.argv[1], timeout_s=1, security=StoreSecurity(tls=True, ca=sys.argv[2]))
except Unreachable as error:
    print(error)
"""


def test_refused_certificates_are_our_error_and_nothing_on_stderr(
    etcd_server: Callable[..., EtcdServer], pem: Path
) -> None:
    """In a process of its own: gRPC reads how much it logs when it is first used, in a run of tests by others."""
    command = [sys.executable, "-c", _REFUSED, etcd_server(tls=pem).metadata_uri(), str(pem)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert "127.0.0.1" in found.stdout
    assert found.stderr == ""


def test_a_late_plain_connection_is_asked_again() -> None:
    """gRPC says so of a connection that ended while it was made: the server may be busy, TLS is not at fault."""
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: tcp handshaker shutdown"
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = EtcdConnection([server.getsockname()], "/", timeout_s=20, security=StoreSecurity())
        connection._check_endpoints(details, time.monotonic() + 20)
        with pytest.raises(Unreachable, match="No TLS connection"):
            connection._check_endpoints(details.replace("tcp handshaker shutdown", "Ssl handshake failed"), 0)


def call_gateway(server: EtcdServer, path: str, **body: Any) -> None:
    """One call of etcd's JSON gateway."""
    url = f"http://{server.connect_string}/v3/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        json.load(answer)


def enable_users(server: EtcdServer) -> None:
    """`root` may do everything, `operator` what is below /ledgers, `guest` nothing."""
    for user in ("root", "operator", "guest"):
        call_gateway(server, "auth/user/add", name=user, password=f"{user}'s secret")
    for role in ("root", "keeper"):
        call_gateway(server, "auth/role/add", name=role)
    keys = {"key": b64encode(b"/ledgers").decode(), "range_end": b64encode(b"/ledgers1").decode()}
    call_gateway(server, "auth/role/grant", name="keeper", perm={"permType": "READWRITE", **keys})
    call_gateway(server, "auth/user/grant", user="root", role="root")
    call_gateway(server, "auth/user/grant", user="operator", role="keeper")
    call_gateway(server, "auth/enable")


def test_login_with_user_and_password(etcd_server: Callable[..., EtcdServer]) -> None:
    server = etcd_server(options=("--auth-token-ttl=2",))
    uri = server.metadata_uri()
    operator = StoreSecurity(user="operator", password="operator's secret")
    # A server without users accepts any user.
    with open_cluster(uri, create=True, security=operator) as early:
        enable_users(server)
        with open_cluster(uri, session_timeout_s=2, security=operator) as cluster:
            cluster.bookies.register("bookie-1", INFO)
            ledger = cluster.ledgers.new_ledger_id()
            told: list[object] = []
            cluster.bookies.watch(lambda: told.append([one.bookie_id for one in cluster.bookies.list()]))
            time.sleep(3)  # Its token is over.
            assert cluster.store.get("") is not None
            server.kill()
            server.start()
            assert cluster.store.get("layout") is not None
            assert cluster.ledgers.new_ledger_id() != ledger
            eventually(lambda: cluster.bookies.get("bookie-1") is not None)
            cluster.bookies.register("bookie-2", INFO)
            eventually(lambda: told and told[-1] == ["bookie-1", "bookie-2"])
        with contextlib.suppress(Unauthorized):
            early.store.get("")
    for user, password in (
        ("operator", "wrong secret"),
        ("nobody", "a secret"),
        ("guest", "guest's secret"),
        (None, None),
    ):
        with pytest.raises(Unauthorized) as caught:
            open_cluster(uri, security=StoreSecurity(user=user, password=password))
        assert "secret" not in str(caught.value)
        assert server.connect_string in str(caught.value)
    with pytest.raises(Unauthorized) as caught:
        open_cluster(server.metadata_uri("/elsewhere"), security=operator)
    assert caught.value.changed_nothing
    with_login = uri.replace("://", "://operator:operator%27s%20secret@")
    with open_cluster(with_login) as cluster:
        assert cluster.instance_id()
        assert "secret" not in cluster.uri


# bookies on it


def test_commands_accept_tls_and_login(etcd_server: Callable[..., EtcdServer], pem: Path, tmp_path: Path) -> None:
    def bkctl(server: EtcdServer, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bkctl", "cluster", "id", "-o", "json", "-u", server.metadata_uri()]
        return subprocess.run(
            [*command, "--connect-timeout", "5m", *map(str, options)],
            capture_output=True, text=True, check=False, env={**os.environ, **environment},
        )  # fmt: skip

    guarded, encrypted = etcd_server(), etcd_server(tls=pem)
    enable_users(guarded)
    tls = StoreSecurity(tls=True, ca=str(pem), certificate=str(pem))
    operator = StoreSecurity(user="operator", password="operator's secret")
    for server, security in ((guarded, operator), (encrypted, tls)):
        open_cluster(server.metadata_uri(), create=True, security=security).close()
    secret = tmp_path / "secret"
    secret.write_text("operator's secret\n")
    secret.chmod(0o600)
    for done in (
        bkctl(guarded, "--metadata-user", "operator", "--metadata-password-file", secret),
        bkctl(guarded, "--metadata-user", "operator", BKCTL_METADATA_PASSWORD="operator's secret"),
        bkctl(encrypted, "--metadata-tls-ca", pem, "--metadata-tls-cert", pem),
    ):
        assert (done.returncode, done.stderr) == (0, "")
        assert len(json.loads(done.stdout)["instanceId"]) == 36
    for done, code in (
        (bkctl(guarded), 1),
        (bkctl(guarded, "--metadata-user", "operator", BKCTL_METADATA_PASSWORD="a wrong secret"), 1),
        (bkctl(encrypted, "--connect-timeout", "1s", "--timeout", "1s"), 6),
    ):
        assert (done.returncode, done.stdout) == (code, "")
        assert "secret" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "etcd at 127.0.0.1" in done.stderr


def test_our_bookies_serve_ledgers_of_every_scope(etcd_server: Callable[..., EtcdServer], tmp_path: Path) -> None:
    server = etcd_server()
    uri = f"etcd+hierarchical://{server.connect_string}/ledgers"
    open_cluster(uri, create=True).close()
    bookies = [OwnBookie(uri, tmp_path / f"bookie-{index}") for index in range(4)]
    payloads = [f"entry {number}".encode() for number in range(50)]
    try:
        start_all(bookies)
        with open_cluster(uri) as cluster:
            assert {one.bookie_id for one in cluster.bookies.list() if one.ledger_scopes and one.state == "rw"} == {
                bookie.bookie_id for bookie in bookies
            }

            async def write(scope_id: int) -> LedgerId:
                async with BookKeeper(cluster) as client:
                    writer = await client.create_ledger_adv(ledger_scope_id=scope_id, password=b"pw")
                    for number, payload in enumerate(payloads):
                        if number == 20 and scope_id == 7:
                            victim = writer.metadata.last_fragment.bookies[0]
                            next(bookie for bookie in bookies if bookie.bookie_id == victim).kill()
                        if number == 30 and scope_id == 7:
                            server.kill()
                            server.start()
                        await writer.ready()
                        added = writer.add(payload)
                        if scope_id == 7:
                            await added
                    await writer.close()
                    return LedgerId(scope_id, writer.ledger_id)

            async def read(ledger: LedgerId) -> list[bytes]:
                async with BookKeeper(cluster) as client:
                    reader = await client.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=b"pw")
                    return [entry.payload async for entry in reader.read(0, reader.last_add_confirmed)]

            ledgers = [asyncio.run(write(scope_id)) for scope_id in (0, 7, (1 << 64) - 1)]
            assert list(cluster.ledgers.ledgers(None)) == ledgers
            for ledger in ledgers:
                assert asyncio.run(read(ledger)) == payloads
            assert len(cluster.ledgers.read(ledgers[1]).metadata.ensembles) > 1
            eventually(lambda: sorted(one.state for one in cluster.bookies.list()) == ["down", "rw", "rw", "rw"])
            stop_all(bookie for bookie in bookies if bookie.running)
            assert {one.state for one in cluster.bookies.list()} == {"down"}
    finally:
        for bookie in bookies:
            bookie.kill()


def test_failed_callback_is_called_again_later(store: EtcdStore) -> None:
    """One callback that fails does not end the watches of others."""
    calls: list[str] = []

    def fail() -> None:
        calls.append("called")
        if len(calls) < 3:
            raise BkctlError("not now")

    store.watch("node", fail)
    store.put("node", b"", NEW)
    eventually(lambda: len(calls) == 3)
