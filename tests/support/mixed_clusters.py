"""Clusters of our bookies, Apache's, or both mixed, with the faults that tests give them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from support.own_bookies import OwnBookie
from support.own_cluster import start_all
from support.servers import DB, INTERLEAVED, SORTED, ApacheBookie, Java, ZooKeeperServer, format_cluster, wait_for

from bkctl.metadata.cluster import Cluster, open_cluster

#: Of each kind of cluster, whose bookies it has.
KINDS = {"own": "oooo", "apache": "aaaa", "mixed": "oaoa"}
STORAGES = (SORTED, INTERLEAVED, DB, SORTED)


class SomeCluster:
    """Four bookies on one ZooKeeper root; `bookies` are up unless a test took them down."""

    def __init__(
        self, kind: str, java: Java, zookeeper: ZooKeeperServer, directory: Path,
        settings: Mapping[str, object] = {},
    ) -> None:  # fmt: skip
        self.kind = kind
        self.metadata_uri = zookeeper.metadata_uri(zookeeper.new_root())
        format_cluster(java, self.metadata_uri, directory)
        self.bookies: list[OwnBookie | ApacheBookie] = []
        for index, (owner, storage) in enumerate(zip(KINDS[kind], STORAGES, strict=True)):
            home = directory / f"{owner}-{index}"
            self.bookies.append(
                OwnBookie(self.metadata_uri, home, storage=storage, settings=settings)
                if owner == "o"
                else ApacheBookie(java, self.metadata_uri, home, storage, settings=settings)
            )

    def by_id(self, bookie_id: str) -> OwnBookie | ApacheBookie:
        return next(bookie for bookie in self.bookies if bookie.bookie_id == bookie_id)

    def ensure_up(self) -> None:
        """Start what is down, and wait until all take entries."""
        start_all([bookie for bookie in self.bookies if not bookie.running])
        with open_cluster(self.metadata_uri) as cluster:
            wait_for(lambda: self._writable(cluster), f"bookies of the {self.kind} cluster registered")

    def _writable(self, cluster: Cluster) -> bool:
        registered = {found.bookie_id for found in cluster.bookies.list(include_down=False) if found.state == "rw"}
        return {bookie.bookie_id for bookie in self.bookies} <= registered

    @contextlib.contextmanager
    def suspended(self, *bookie_ids: str) -> Iterator[None]:
        """Have bookies stand still (SIGSTOP): they keep their connections and answer nothing."""
        pids = [self.by_id(bookie_id).pid for bookie_id in bookie_ids]
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        for bookie in self.bookies:
            bookie.kill()
