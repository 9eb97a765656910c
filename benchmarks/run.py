"""Measure bkctl against Apache BookKeeper's own tools, both in the same run, and print the ratios.

    python benchmarks/run.py                     everything
    python benchmarks/run.py startup adds-v2     what is named
    python benchmarks/run.py --seconds 120 adds-v2 adds-v3
    python benchmarks/run.py --mib 64 1024 -- files

Needs Java 17 and Maven, like the tests, whose servers it uses. A ratio above 1 means that bkctl is faster. The
machine's noise is part of every figure: compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "tests"))

import servers  # noqa: E402
from files import compare as compare_files  # noqa: E402
from own_bookies import OwnBookie  # noqa: E402

BKCTL = [str(Path(sys.executable).with_name("bkctl"))]
ENTRY_SIZE_BYTES = 1024


class Figure(NamedTuple):
    """One comparison. `ours` and `peer` are seconds, or a rate a second where `rate`."""

    what: str
    ours: float
    peer: float
    peer_name: str
    rate: bool = False

    def line(self) -> str:
        ratio = self.ours / self.peer if self.rate else self.peer / self.ours
        shown = [f"{value:,.0f}/s" if self.rate else f"{value:.3f} s" for value in (self.ours, self.peer)]
        return f"{self.what:<58} {shown[0]:>12}  {shown[1]:>12}  {ratio:>6.2f}x  {self.peer_name}"


def timed(command: Sequence[str], runs: int = 5) -> float:
    """The median wall-clock seconds of a command, its output thrown away."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True
        )
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Bench:
    """The servers that the benchmarks share, started when first used."""

    def __init__(self, directory: Path, seconds: float) -> None:
        self.directory = directory
        self.seconds = seconds
        self.java = servers.Java()
        self._zookeeper: servers.ZooKeeperServer | None = None
        self._apache: dict[int, servers.ApacheCluster] = {}

    @property
    def zookeeper(self) -> servers.ZooKeeperServer:
        if self._zookeeper is None:
            self._zookeeper = servers.ZooKeeperServer(self.java, self.directory / "zookeeper")
            self._zookeeper.start()
        return self._zookeeper

    @contextlib.contextmanager
    def apache(self, count: int) -> Iterator[servers.ApacheCluster]:
        """Apache bookies with their default storage (Sorted), sizes and a fully optimising JVM."""
        cluster = servers.ApacheCluster(
            self.java, self.zookeeper, self.directory / f"apache-{time.time_ns()}", root=self.zookeeper.new_root(),
            storages=(servers.SORTED,) * count, settings=server_settings(),
        )  # fmt: skip
        with full_speed_java(heap_mb=1024):
            cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()

    @contextlib.contextmanager
    def ours(self, count: int) -> Iterator[str]:
        """Our bookies as processes on the same ZooKeeper; gives the metadata URI."""
        root = self.zookeeper.new_root()
        uri = self.zookeeper.metadata_uri(root)
        directory = self.directory / f"ours-{time.time_ns()}"
        servers.format_cluster(self.java, uri, directory)
        bookies = [OwnBookie(uri, directory / f"bookie-{index}", settings=server_settings()) for index in range(count)]
        for bookie in bookies:
            bookie.launch()
        for bookie in bookies:
            bookie.wait_ready()
        try:
            yield uri
        finally:
            for bookie in bookies:
                bookie.stop()

    def java_rate(self, *arguments: object) -> dict[str, Any]:
        """Run Bench.java with a fully optimising JVM; what it prints."""
        with full_speed_java():
            done = self.java.run("Bench", *arguments, heap_mb=1024, timeout_s=1200)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def close(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.kill()


def server_settings() -> dict[str, object]:
    """Both kinds of bookie run with these: Apache's own defaults where the tests' small ones would throttle."""
    return {
        "journalMaxSizeMB": 2048,
        "journalPreAllocSizeMB": 16,
        "logSizeLimit": 1024 * 1024 * 1024,
        "flushInterval": 10000,
        "skipListSizeLimit": 64 * 1024 * 1024,
        "numReadWorkerThreads": 8,
        "serverNumIOThreads": 4,
        "allocatorPoolingPolicy": "PooledDirect",
    }


@contextlib.contextmanager
def full_speed_java(heap_mb: int = 1024) -> Iterator[None]:
    """Java as a server runs it. The tests cap its compiler for quick starts, which would flatter us."""
    before = servers.JVM_OPTIONS, servers.BOOKIE_OPTIONS
    kept = tuple(option for option in before[0] if option not in ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"))
    servers.JVM_OPTIONS = (*kept, f"-Xmx{heap_mb}m")  # type: ignore[misc]
    servers.BOOKIE_OPTIONS = ("-XX:MaxDirectMemorySize=2g",)  # type: ignore[misc]
    try:
        yield
    finally:
        servers.JVM_OPTIONS, servers.BOOKIE_OPTIONS = before  # type: ignore[misc]


def ledger_of(bench: Bench, uri: str, entries: int) -> str:
    """A closed ledger of 1 KiB entries that Java's client wrote; its id."""
    return str(bench.java_rate(uri, "v3", "add", entries, ENTRY_SIZE_BYTES, 1, 1, 1)["ledgerId"])


# --- what is measured -----------------------------------------------------------------------------------------------


def startup(bench: Bench) -> Iterator[Figure]:
    """Help, an offline command, one metadata read; against Python's own start and the Java shell."""
    python = timed([sys.executable, "-c", "pass"], 9)
    conf = bench.directory / "shell.conf"
    servers.write_conf(conf, {"journalDirectory": bench.directory, "ledgerDirectories": bench.directory})
    shell = [*bench.java.command("org.apache.bookkeeper.bookie.BookieShell"), "-conf", str(conf)]
    shell_help = timed([*shell, "help"], 3)
    yield Figure("bkctl --help", timed([*BKCTL, "--help"], 9), python, "python -c pass")
    yield Figure("bkctl --help", timed([*BKCTL, "--help"], 9), shell_help, "shell help")
    yield Figure("bkctl journal read --help", timed([*BKCTL, "journal", "read", "--help"], 9), shell_help, "shell help")
    with bench.apache(1) as cluster:
        ledger = ledger_of(bench, cluster.metadata_uri, 100)
        bookie = cluster.bookies[0]
        journal = sorted((bookie.journal_dir / "current").glob("*.txn"))[0]
        shell = [*bench.java.command("org.apache.bookkeeper.bookie.BookieShell"), "-conf", str(bookie.conf)]
        for output in ("ndjson", "table"):
            yield Figure(
                f"journal read FILE -o {output} (100 entries)",
                timed([*BKCTL, "journal", "read", str(journal), "-o", output], 9),
                timed([*shell, "readjournal", str(journal)], 3), "shell readjournal",
            )  # fmt: skip
        yield Figure(
            "ledger show (one metadata read)",
            timed([*BKCTL, "-u", cluster.metadata_uri, "ledger", "show", ledger], 9),
            timed([*shell, "ledgermetadata", "-l", ledger], 3), "shell ledgermetadata",
        )  # fmt: skip


def ledger_read(bench: Bench) -> Iterator[Figure]:
    """`ledger read` of 10,000 entries of 1 KiB against the shell's `readledger`."""
    with bench.apache(1) as cluster:
        ledger = ledger_of(bench, cluster.metadata_uri, 10_000)
        shell = [*bench.java.command("org.apache.bookkeeper.bookie.BookieShell"), "-conf", str(cluster.bookies[0].conf)]
        peer = timed([*shell, "readledger", "-l", ledger, "-m"], 3)
        for protocol in ("v3", "v2"):
            command = [*BKCTL, "-u", cluster.metadata_uri, "ledger", "read", ledger, "-o", "ndjson", "--body"]
            ours = timed([*command, "--protocol", protocol])
            yield Figure(f"ledger read --protocol {protocol} (10,000 × 1 KiB)", ours, peer, "shell readledger")


def client(bench: Bench) -> Iterator[Figure]:
    """The client library against Java's: adds to and reads from one Apache bookie, 1 KiB entries, E = Wq = Aq = 1."""
    entries = 200_000
    with bench.apache(1) as cluster:
        for protocol in ("v2", "v3"):
            # Java first and ours second, both into the same warmed-up bookie.
            bench.java_rate(cluster.metadata_uri, protocol, "add", entries // 2, ENTRY_SIZE_BYTES, 1, 1, 1)
            java = bench.java_rate(cluster.metadata_uri, protocol, "add", entries, ENTRY_SIZE_BYTES, 1, 1, 1)
            ours = our_rate(cluster.metadata_uri, protocol, "add", str(entries))
            yield Figure(f"client adds, {protocol}", ours, java["perSecond"], "Java client", rate=True)
            read = bench.java_rate(cluster.metadata_uri, protocol, "read", java["ledgerId"])
            ours = our_rate(cluster.metadata_uri, protocol, "read", java["ledgerId"])
            yield Figure(f"client reads, {protocol}", ours, read["perSecond"], "Java client", rate=True)


def our_rate(uri: str, protocol: str, what: str, argument: str) -> float:
    """The rate a second of our client, in a process of its own, as Java's has."""
    command = [sys.executable, __file__, "--client", uri, protocol, what, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return float(done.stdout)


def adds(bench: Bench, protocol: str) -> Iterator[Figure]:
    """Three of our bookies against three of Apache's under the same Java client; journal synced, log, index on."""
    amount = f"{int(bench.seconds)}s"
    arguments = (protocol, "add", amount, ENTRY_SIZE_BYTES, 3, 2, 2)
    with bench.apache(3) as cluster:
        peer = bench.java_rate(cluster.metadata_uri, *arguments)["perSecond"]
    with bench.ours(3) as uri:
        ours = bench.java_rate(uri, *arguments)["perSecond"]
    what = f"Java client adds to 3 bookies, {protocol}, E3 Wq2 Aq2, {amount}"
    yield Figure(what, ours, peer, "Apache bookies", rate=True)


BENCHMARKS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "startup": startup,
    "ledger-read": ledger_read,
    "client": client,
    "adds-v2": lambda bench: adds(bench, "v2"),
    "adds-v3": lambda bench: adds(bench, "v3"),
}


# --- our client as a peer of Bench.java -----------------------------------------------------------------------------


async def run_client(uri: str, protocol_name: str, what: str, argument: str) -> float:
    from bkctl.client.ledger import BookKeeper
    from bkctl.metadata.cluster import open_cluster
    from bkctl.protocol.messages import Protocol

    protocol = Protocol.V2 if protocol_name == "v2" else Protocol.V3
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster, protocol=protocol) as bookkeeper:
            if what == "add":
                count, payload = int(argument), bytes(ENTRY_SIZE_BYTES)
                writer = await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
                start = time.perf_counter()
                last = None
                for _ in range(count):
                    await writer.ready()
                    last = writer.add(payload)
                if last is not None:
                    await last
                seconds = time.perf_counter() - start
                await writer.close()
                return count / seconds
            reader = await bookkeeper.open_ledger(int(argument))
            start = time.perf_counter()
            found = size = 0
            async for entry in reader.read(0, reader.last_add_confirmed):
                found += 1
                size += len(entry.payload)
            seconds = time.perf_counter() - start
            if found != reader.last_add_confirmed + 1 or size != reader.length:
                raise SystemExit(f"Read {found} entries of {size} bytes")
            return found / seconds


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        from bkctl.protocol.connection import run

        print(run(run_client(*sys.argv[2:6])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(("files", *BENCHMARKS)))
    parser.add_argument("--seconds", type=float, default=30, help="how long each adds run takes (30)")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024], help="sizes of the files (64 1024)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHMARKS.keys() - {"files"}
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are files, {', '.join(BENCHMARKS)}")
    os.environ.setdefault("BKCTL_TEST_REQUIRE", "all")
    with tempfile.TemporaryDirectory(prefix="bkctl-bench-") as directory:
        bench = Bench(Path(directory), arguments.seconds)
        try:
            if "files" in arguments.names or not arguments.names:
                for line in compare_files(bench, arguments.mib, full_speed_java):
                    print(line, flush=True)
            names = [name for name in arguments.names or BENCHMARKS if name != "files"]
            if names:
                print(f"{'':<58} {'bkctl':>12}  {'peer':>12}  {'ratio':>7}  peer", flush=True)
            for name in names:
                for figure in BENCHMARKS[name](bench):
                    print(figure.line(), flush=True)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
