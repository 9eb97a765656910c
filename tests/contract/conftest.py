"""The metadata stores that the contract tests run over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import MetadataStore


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


@pytest.fixture(params=["sqlite", "zookeeper"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "sqlite":
        from bkctl.metadata.sqlite import SqliteStore

        made = Backend(lambda: SqliteStore(str(tmp_path / "metadata.db"), timeout_s=20, create=True))
    else:
        from bkctl.metadata.zookeeper import ZooKeeperStore

        zookeeper = request.getfixturevalue("zookeeper")
        root = zookeeper.new_root()
        made = Backend(lambda: ZooKeeperStore(zookeeper.connect_string, root, timeout_s=20, session_timeout_s=4))
        made.open().put_all([("", b"")])
    yield made
    made.close()


@pytest.fixture
def store(backend: Backend) -> MetadataStore:
    return backend.open()


@pytest.fixture(params=["sqlite", "hierarchical", "longhierarchical", "longlonghierarchical", "flat", "null"])
def cluster_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of a store without a cluster: SQLite, and each ZooKeeper layout."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'metadata.db'}"
    zookeeper = request.getfixturevalue("zookeeper")
    uri: str = zookeeper.metadata_uri(zookeeper.new_root(), request.param)
    return uri


@pytest.fixture
def cluster(cluster_uri: str) -> Iterator[Cluster]:
    with open_cluster(cluster_uri, timeout_s=20, create=True) as opened:
        yield opened
