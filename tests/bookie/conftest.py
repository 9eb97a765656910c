"""Fixtures for tests of our bookie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import Java, ZooKeeperServer, format_cluster

from bkctl.metadata.cluster import Cluster, open_cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A new cluster in SQLite."""
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as opened:
        yield opened


@pytest.fixture
def zookeeper_uri(zookeeper: ZooKeeperServer, java: Java, tmp_path: Path) -> str:
    """The metadata URI of a new cluster that Apache's shell formatted."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    return uri
