"""Clusters of our bookies, Apache's, or both mixed, with the faults that tests give them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
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


class CuttableLink:
    """A TCP proxy before a bookie that a test cuts and mends: what is sent meanwhile waits, as in a partition."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._whole = asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> tuple[str, int]:
        """Listen; return the address for clients."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self.mend()
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.sleep(0.1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._whole.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


class Namespace:
    """A network namespace with one address, whose link is cut and mended; needs root."""

    def __init__(self, number: int) -> None:
        self.name = f"bkctl{os.getpid() % 10_000}-{number}"
        network = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.address = f"{network}.{4 * number + 2}"
        self.prefix = ["ip", "netns", "exec", self.name]
        _ip("netns", "add", self.name)
        self._link = f"v{self.name[5:]}"
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        _ip("addr", "add", f"{network}.{4 * number + 1}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/30", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", self.name, "link", "set", device, "up")

    def cut(self) -> None:
        """Drop all packets, without an answer to their senders."""
        _ip("-n", self.name, "link", "set", "eth0", "down")

    def mend(self) -> None:
        _ip("-n", self.name, "link", "set", "eth0", "up")

    def close(self) -> None:
        """Remove the namespace, and its link."""
        _ip("link", "del", self._link)
        _ip("netns", "del", self.name)


def why_no_namespaces() -> str:
    """Return why this machine gives us no network namespace; empty if it does."""
    if os.geteuid() != 0:
        return "partitions by network namespaces need root"
    if shutil.which("ip") is None:
        return "partitions by network namespaces need the program ip"
    name = f"bkctl{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
