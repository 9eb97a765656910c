"""Fixtures for tests of ours beside Apache's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from support.own_cluster import OwnCluster
from support.servers import Java, ZooKeeperServer, format_cluster


@pytest.fixture
def own_cluster(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[Callable[..., OwnCluster]]:
    """Makes a cluster of our bookies, not started, on a root that Apache's shell formatted: (storages, settings)."""
    made: list[OwnCluster] = []

    def make(storages: Iterable[str], settings: Mapping[str, object]) -> OwnCluster:
        uri = zookeeper.metadata_uri(zookeeper.new_root())
        format_cluster(java, uri, tmp_path)
        made.append(OwnCluster(uri, tmp_path, storages, settings))
        return made[-1]

    yield make
    for cluster in made:
        cluster.kill()
