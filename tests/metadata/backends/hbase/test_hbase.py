"""The metadata store on a real HBase: lost answers, clocks that differ, regions that are elsewhere, bookies on it."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.own_bookies import OwnBookie
from support.own_cluster import start_all, stop_all
from support.servers import HBaseServer, ZooKeeperServer
from support.waiting import LIMIT_S, eventually

from bkctl.client.ledger import BookKeeper
from bkctl.errors import (
    AlreadyExists,
    LedgerNotFound,
    MetadataVersionConflict,
    NotFound,
    TimedOut,
    Unreachable,
    Unsupported,
)
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata.admin.nuke import nuke, plan_nuke
from bkctl.metadata.backends.hbase import hbase_pb2 as pb
from bkctl.metadata.backends.hbase.hbase_store import HBaseStore
from bkctl.metadata.backends.hbase.rows import BUCKETS, row_key
from bkctl.metadata.backends.hbase.rpc import CLIENT_SERVICE, CallLost, RegionServer, Retries, Rpc
from bkctl.metadata.cluster import Cluster, init_cluster, open_cluster
from bkctl.metadata.store import NEW, StoreSecurity, map_each, value_of

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("127.0.0.1:3181",)),))
PATH = f"ledgers/{5:032x}"


@pytest.fixture
def cluster(hbase: HBaseServer) -> Iterator[Cluster]:
    with open_cluster(hbase.metadata_uri(hbase.new_root()), create=True) as opened:
        yield opened


@pytest.fixture
def store(cluster: Cluster) -> HBaseStore:
    assert isinstance(cluster.store, HBaseStore)
    return cluster.store


class LostAnswers:
    """Loses the answer to the next change, after it was applied, or with `applied` False the change itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, between: Callable[[], Any], *, applied: bool = True) -> None:
        self._call = Rpc.call
        self._between = between
        self._applied = applied
        self.lost = 0
        monkeypatch.setattr(Rpc, "call", lambda *arguments: self._lose(*arguments))

    def _lose(self, rpc: Rpc, server: RegionServer, service: str, method: str, request: Any, *rest: Any) -> Any:
        is_change = method == "Multi" and any(each.HasField("condition") for each in request.regionAction)
        if not is_change or self.lost:
            return self._call(rpc, server, service, method, request, *rest)
        self.lost += 1
        if self._applied:
            self._call(rpc, server, service, method, request, *rest)
        self._between()
        raise CallLost("lost by the test")


def test_changes_whose_answer_is_lost_are_recognised(store: HBaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose() -> LostAnswers:
        monkeypatch.undo()
        return LostAnswers(monkeypatch, lambda: None)

    lost = [lose()]
    version = store.put(PATH, b"0", NEW)
    lost.append(lose())
    version = store.put(PATH, b"1", version)
    assert store.get(PATH) == (b"1", version, None)
    lost.append(lose())
    store.delete(PATH, version)
    assert store.get(PATH) is None
    assert [each.lost for each in lost] == [1, 1, 1]


def test_write_of_another_client_is_not_taken_for_ours(
    store: HBaseStore, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cluster(cluster.uri) as other:
        version = store.put(PATH, b"0", NEW)

        def write_later() -> None:
            now_ms = time.time_ns() // 1_000_000
            eventually(lambda: time.time_ns() // 1_000_000 > now_ms)  # else its version shows that ours was not there
            other.store.put(PATH, b"1", version)

        LostAnswers(monkeypatch, write_later, applied=False)
        with pytest.raises(MetadataVersionConflict) as caught:
            store.put(PATH, b"1", version)
        assert caught.value.may_be_applied
        monkeypatch.undo()
        other.store.delete(PATH)
        LostAnswers(monkeypatch, lambda: other.store.put(PATH, b"0", NEW), applied=False)
        with pytest.raises(AlreadyExists):
            store.put(PATH, b"0", NEW)


def test_many_rows_are_written_by_few_requests(store: HBaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    call = Rpc.call

    def count(*arguments: Any) -> Any:
        calls.append(arguments[3])
        return call(*arguments)

    paths = [f"ledgers/{number:032x}" for number in range(1000)]
    store.get(paths[0])
    monkeypatch.setattr(Rpc, "call", count)
    versions = store.put_many([(path, b"0", NEW) for path in paths])
    assert {type(version) for version in versions} == {int}
    assert {type(each) for each in store.put_many([(path, b"1", NEW) for path in paths])} == {AlreadyExists}
    store.put_many([(path, b"2", version) for path, version in zip(paths, versions, strict=True)])  # type: ignore[misc]
    assert [found and found.value for found in store.get_many(paths)] == [b"2"] * len(paths)
    assert len(calls) <= 20


def test_many_rows_whose_answer_is_lost_are_recognised(store: HBaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [f"ledgers/{number:032x}" for number in range(10)]
    there = store.put(paths[3], b"there", NEW)
    lost = LostAnswers(monkeypatch, lambda: store.put(paths[4], b"later", None))
    written = store.put_many([(path, b"0", NEW) for path in paths])
    assert lost.lost == 1
    # Another client has changed one since, whose creation is unknown then.
    assert [type(each) for each in written] == [AlreadyExists if at in (3, 4) else int for at in range(10)]
    found = [each and each[:2] for each in store.get_many(paths)]
    assert found[3] == (b"there", there)
    assert [each for at, each in enumerate(found) if at not in (3, 4)] == [
        (b"0", version) for at, version in enumerate(written) if at not in (3, 4)
    ]


def test_deletion_by_a_clock_ahead_hides_no_later_row(store: HBaseStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion hides what has its timestamp or a lower one, also rows that are written after it."""
    now_ns = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now_ns() + 3_600_000_000_000)
        deleted = store.put(PATH, b"0", NEW)
        store.delete(PATH, deleted)
    version = store.put(PATH, b"1", NEW)
    assert version > deleted > now_ns() // 1_000_000
    assert store.get(PATH) == (b"1", version, None)
    later = store.put(PATH, b"2", version)
    assert store.get(PATH) == (b"2", later, None)
    with pytest.raises(AlreadyExists):
        store.put(PATH, b"3", NEW)
    store.delete(PATH, later)
    many = store.put_many([(PATH, b"4", NEW), (f"{PATH[:-1]}6", b"5", NEW)])
    assert [found and found[:2] for found in store.get_many([PATH, f"{PATH[:-1]}6"])] == [
        (b"4", many[0]),
        (b"5", many[1]),
    ]


def test_rows_of_consecutive_ledgers_fill_each_bucket_alike() -> None:
    for ledgers in (range(16_000), range(0, 16_000_000, 1000), range(7 << 64, (7 << 64) + 16_000)):
        counts = [0] * BUCKETS
        for ledger in ledgers:
            counts[row_key(ledger)[0]] += 1
        assert min(counts) > 800
        assert max(counts) < 1200


def test_listing_crosses_pages_buckets_and_the_last_id(cluster: Cluster) -> None:
    ids = [LedgerId(0, number) for number in range(3000)] + [LedgerId(9, 1), LedgerId(U64_MAX, U64_MAX)]
    for found in map_each(lambda ledger: cluster.ledgers.create(ledger, METADATA), ids):
        value_of(found)
    assert list(cluster.ledgers.ledgers(None)) == ids
    assert list(cluster.ledgers.ledgers(0, LedgerId(0, 2990))) == ids[2991:3000]
    assert list(cluster.ledgers.scopes()) == [0, 9, U64_MAX]
    names = [ledger.qualified_name for ledger in ids]
    assert cluster.store.children("ledgers", after=names[10], limit=20) == names[11:31]
    assert cluster.store.children("ledgers", after=f"{0:031x}", limit=2) == names[:2]
    assert cluster.store.children("ledgers", after="g") == []


def test_listing_crosses_regions_that_were_split(hbase: HBaseServer) -> None:
    uri = hbase.metadata_uri(hbase.new_root())
    with open_cluster(uri) as cluster:
        store: Any = cluster.store
        splits = [bytes((bucket,)) + ledger.to_bytes(16) for bucket in (0, 5, 15) for ledger in (100, 101, 7 << 64)]
        assert store._rows.create(b"m", splits)
        init_cluster(cluster)
        ids = [LedgerId(scope, number) for scope in (0, 7) for number in range(300)]
        for found in map_each(lambda ledger: cluster.ledgers.create(ledger, METADATA), ids):
            value_of(found)
        assert list(cluster.ledgers.ledgers(None)) == ids
        assert list(cluster.ledgers.ledgers(7)) == ids[300:]
        assert [ledger for ledger, found in cluster.ledgers.read_many(ids) if not isinstance(found, Exception)] == ids


def test_hbase_that_is_down_is_a_timeout_that_names_it(
    cluster: Cluster, store: HBaseStore, hbase: HBaseServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper answers all the same, and names the servers as they were."""
    cluster.ledgers.create(LedgerId(0, 5), METADATA)
    calls, before = [], 0

    def refuse(*arguments: Any) -> None:
        calls.append(arguments)
        raise CallLost("127.0.0.1:16020: connection refused")

    monkeypatch.setattr(Rpc, "call", refuse)
    monkeypatch.setattr(Retries, "pause", lambda _: len(calls) < before + 2)
    for call in (
        lambda: cluster.ledgers.read(LedgerId(0, 5)),
        lambda: list(cluster.ledgers.ledgers(None)),
        lambda: cluster.ledgers.create(LedgerId(0, 6), METADATA),
    ):
        before = len(calls)
        with pytest.raises(TimedOut, match=f"HBase at {hbase.connect_string} did not answer.*refused") as caught:
            call()
        assert caught.value.exit_code == 6
        assert len(calls) > before + 1


def test_nuke_removes_the_table(cluster: Cluster, store: HBaseStore) -> None:
    cluster.ledgers.create(LedgerId(7, 5), METADATA)
    assert plan_nuke(cluster).ledger_count == 1
    names = store.children("") or []
    assert [found is not None for found in store.get_many(names)] == [True] * len(names)
    nuke(cluster)
    assert not store._rows.exists()
    assert store.get("") is None
    assert init_cluster(cluster)
    assert list(cluster.ledgers.ledgers(None)) == []


def test_region_that_moved_is_found_again(cluster: Cluster, store: HBaseStore) -> None:
    cluster.ledgers.create(LedgerId(0, 5), METADATA)
    table = store._rows
    for stale in ({"name": b"test,,1.00000000000000000000000000000000."}, {"server": RegionServer("127.0.0.1", 1)}):
        table._regions = [region._replace(**stale) for region in table._regions]
        assert cluster.ledgers.read(LedgerId(0, 5)).metadata.ensemble_size == 1
        table._regions = [region._replace(**stale) for region in table._regions]
        assert list(cluster.ledgers.ledgers(None)) == [LedgerId(0, 5)]
        table._regions = [region._replace(**stale) for region in table._regions]
        found = cluster.ledgers.read(LedgerId(0, 5))
        cluster.ledgers.write(LedgerId(0, 5), found.metadata, found.version)


def test_missing_table_is_an_error_and_no_empty_cluster(cluster: Cluster, store: HBaseStore) -> None:
    """Bookies would delete every ledger, if a table that an operator dropped were taken for one without ledgers."""
    store._rows.drop()
    for call in (
        lambda: list(cluster.ledgers.ledgers(None)),
        lambda: list(cluster.ledgers.ranges(None)),
        lambda: cluster.ledgers.read(LedgerId(0, 5)),
        lambda: list(cluster.ledgers.read_many([LedgerId(0, 5)])),
        lambda: cluster.ledgers.create(LedgerId(0, 5), METADATA),
        lambda: cluster.ledgers.new_ledger_id(),
    ):
        with pytest.raises(NotFound, match="No table test-") as caught:
            call()
        assert not isinstance(caught.value, LedgerNotFound)
    assert store.get("ledgers") is None
    assert store.children("ledgers") is None


def test_zookeeper_without_hbase_is_named(zookeeper: ZooKeeperServer) -> None:
    uri = f"hbase://{zookeeper.connect_string}/test"
    with pytest.raises(NotFound, match=r"no node /hbase; .*znode=/PATH"):
        open_cluster(uri, create=True)
    with pytest.raises(NotFound, match="no node /other"):
        open_cluster(f"{uri}?znode=/other", create=True)


def test_tls_is_refused_where_hbase_would_be_reached_without(hbase: HBaseServer) -> None:
    with pytest.raises(Unsupported, match="without TLS"):
        open_cluster(hbase.metadata_uri(), security=StoreSecurity(tls=True))


def test_cluster_of_another_layout_is_not_read_as_one_on_hbase(cluster: Cluster) -> None:
    cluster.store.put("LAYOUT", b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1", None)
    with open_cluster(cluster.uri) as opened, pytest.raises(Unsupported, match="is laid out by"):
        list(opened.ledgers.ledgers())


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\xff",
        struct.pack(">I", 3) + b"\x7f\x00\x00",
        struct.pack(">I", 3) + b"\x02\x08\x63",
        struct.pack(">I", 4) + b"\x02\x08",
        b"",
    ],
    ids=["of 4 GiB", "no header", "to another call", "cut short", "none"],
)
def test_bad_answer_is_a_lost_call(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        rpc = Rpc()
        with pytest.raises(CallLost):
            rpc.call(
                RegionServer("127.0.0.1", listener.getsockname()[1]),
                CLIENT_SERVICE, "Multi", pb.MultiRequest(), pb.MultiResponse, 60,
            )  # fmt: skip
        thread.join()
        rpc.close()


def test_close_ends_the_calls_under_way(cluster: Cluster, store: HBaseStore, hbase: HBaseServer) -> None:
    cluster.ledgers.create(LedgerId(0, 5), METADATA)
    table = store._rows
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = RegionServer("127.0.0.1", silent.getsockname()[1])
        table._regions = [region._replace(server=server) for region in table._regions]
        errors: list[Exception] = []

        def read() -> None:
            try:
                cluster.ledgers.read(LedgerId(0, 5))
            except Unreachable as error:
                errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        connection, _ = silent.accept()
        with connection:
            cluster.close()
            reader.join(timeout=LIMIT_S / 2)  # below the store's timeout
        assert not reader.is_alive()
    assert len(errors) == 1
    assert not isinstance(errors[0], TimedOut)


def test_our_bookies_serve_ledgers_of_every_scope(hbase_server: Callable[[], HBaseServer], tmp_path: Path) -> None:
    server = hbase_server()
    uri = server.metadata_uri()
    open_cluster(uri, create=True).close()
    bookies = [OwnBookie(uri, tmp_path / f"bookie-{index}") for index in range(4)]
    payloads = [f"entry {number}".encode() for number in range(50)]
    try:
        start_all(bookies)
        with open_cluster(uri) as cluster:

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

            ledgers = [asyncio.run(write(scope_id)) for scope_id in (0, 7)]
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
