"""The metadata stores that the contract tests run over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW, MetadataStore


class Backend:
    """One empty store: `open` gives store objects on it, each with a session of its own."""

    def __init__(self, make: Callable[[], MetadataStore]) -> None:
        self._make = make
        self._stores: list[MetadataStore] = []

    def open(self) -> MetadataStore:
        store = self._make()
        self._stores.append(store)
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()


@pytest.fixture
def one_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create tables of HBase with one region: 16 regions for each test are a second and a half of processor time."""
    from bkctl.metadata.backends.hbase.rows import FAMILY, Rows

    monkeypatch.setattr(Rows, "create_table", lambda self: self.create(FAMILY, []))


@pytest.fixture(params=["sqlite", "zookeeper", "etcd", "hbase"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "sqlite":
        from bkctl.metadata.backends.sqlite import SqliteStore

        made = Backend(lambda: SqliteStore(str(tmp_path / "metadata.db"), timeout_s=LIMIT_S, create=True))
    elif request.param == "etcd":
        from bkctl.metadata.backends.etcd.etcd_store import EtcdStore

        etcd = request.getfixturevalue("etcd")
        hosts, root = [("127.0.0.1", etcd.port)], etcd.new_root()
        made = Backend(lambda: EtcdStore(hosts, root, timeout_s=LIMIT_S, session_timeout_s=20))
        made.open().put_all([("", b"")])
    elif request.param == "hbase":
        from bkctl.metadata.backends.hbase.hbase_store import HBaseStore

        hbase = request.getfixturevalue("hbase")
        request.getfixturevalue("one_region")
        prefix = hbase.new_root()[1:]
        made = Backend(lambda: HBaseStore(hbase.connect_string, prefix, timeout_s=LIMIT_S, session_timeout_s=20))
        made.open().put_all([("", b"")])
        made.open().put("ledgers", b"", NEW)
    else:
        from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore

        zookeeper = request.getfixturevalue("zookeeper")
        root = zookeeper.new_root()
        made = Backend(lambda: ZooKeeperStore(zookeeper.connect_string, root, timeout_s=LIMIT_S, session_timeout_s=20))
        made.open().put_all([("", b"")])
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> MetadataStore:
    return backend.open()


LAYOUTS = [
    "sqlite", "etcd", "hbase",
    "hierarchical", "longhierarchical", "longlonghierarchical", "flat", "null", "legacy",
]  # fmt: skip


@pytest.fixture(params=LAYOUTS)
def cluster_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of a store without ledgers: SQLite, etcd, HBase, and each ZooKeeper layout."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'metadata.db'}"
    if request.param in ("etcd", "hbase"):
        if request.param == "hbase":
            request.getfixturevalue("one_region")
        server = request.getfixturevalue(request.param)
        return str(server.metadata_uri(server.new_root()))
    zookeeper = request.getfixturevalue("zookeeper")
    if request.param == "legacy":  # No URI names it: such clusters are no longer created.
        legacy: str = zookeeper.metadata_uri(zookeeper.new_root(), "null")
        with open_cluster(legacy, create=True) as made:
            layout = b"2\norg.apache.bookkeeper.meta.LegacyHierarchicalLedgerManagerFactory:1"
            made.store.put("LAYOUT", layout, None)
        return legacy
    uri: str = zookeeper.metadata_uri(zookeeper.new_root(), request.param)
    return uri


@pytest.fixture
def cluster(cluster_uri: str) -> Iterator[Cluster]:
    with open_cluster(cluster_uri, create=True) as opened:
        yield opened


@pytest.fixture(params=["zookeeper", "etcd", pytest.param("hbase", marks=pytest.mark.long)])
def metadata_server(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes servers that belong to the test alone, to be killed and started again; HBase starts for half a minute."""
    make: Callable[[], Any] = request.getfixturevalue(f"{request.param}_server")
    return make
