"""Measure bkctl's commands and rounds on clusters of N ledgers: time, peak memory and requests, each against N.

    python benchmarks/scale.py                                         every store; 1,000 to 100,000
    python benchmarks/scale.py --stores sqlite --ledgers 100000 1000000
    python benchmarks/scale.py --stores zookeeper --shapes scope0 --jobs list-ndjson check

The last columns are exponents between the smallest and the largest N: 1 is linear, 0 does not grow. Memory is the peak
resident size of the command's process, start-up included. Requests are packets to ZooKeeper, messages to etcd, calls to
HBase's servers, statements of SQLite. On ZooKeeper, Apache's shell runs beside. ZooKeeper and HBase need Java 17 and
Maven, like the tests. For a bookie's own files see scale_files.py.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from measuring import SHELL, measured
from metadata import METADATA, create_all, server_counts
from run import full_speed_java, servers

from bkctl.formats.metadata import BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import LEDGER_SCOPES_PROPERTY, Cluster, open_cluster
from bkctl.metadata.store import NEW, map_each, value_of

#: Ports at which nothing listens; one bookie in ten is lost: it has a cookie, and is not registered.
BOOKIES = tuple(f"127.0.0.1:{port}" for port in range(2, 22))
LOST = BOOKIES[:2]
TOPICS = 500
CREATES_MEASURED = 1_000


class Result(NamedTuple):
    """One command: as `Run`, and its requests (None: not counted)."""

    seconds: float
    cpu_s: float
    rss_mib: float
    requests: int | None = None


class Job(NamedTuple):
    """A command line of bkctl, or a function of a cluster; `exit_codes` are those without a failure."""

    words: Sequence[str] = ()
    function: Callable[[Cluster], object] | None = None
    exit_codes: tuple[int, ...] = (0,)


# --- jobs -----------------------------------------------------------------------------------------------------------


def create(cluster: Cluster) -> None:
    """Create some ledgers one by one, as clients do."""
    ids = [LedgerId.random() for _ in range(CREATES_MEASURED)]
    for found in map_each(lambda ledger: cluster.ledgers.create(ledger, metadata_of(0)), ids):
        value_of(found)


def collect(cluster: Cluster) -> None:
    """List the ledgers in ranges, as a round of garbage collection does."""
    for _ in cluster.ledgers.ranges(None):
        pass


def audit(cluster: Cluster, *, scoped: bool) -> None:
    from bkctl.replication.marking import audit_bookies

    audit_bookies(cluster, scoped=scoped)


#: In this order: the export is compared with the store, and the audit marks the ledgers of the lost bookies.
JOBS: dict[str, Job] = {
    "start": Job(("cluster", "id")),
    "list-id": Job(("ledger", "list", "--all-scopes", "-o", "id")),
    "list-ndjson": Job(("ledger", "list", "--all-scopes", "-o", "ndjson")),
    "list-filter": Job(("ledger", "list", "--all-scopes", "--state", "OPEN", "--bookie", BOOKIES[5], "-o", "ndjson")),
    "list-sort": Job(("ledger", "list", "--all-scopes", "--sort=-length", "-o", "ndjson")),
    "check": Job(("metadata", "check")),
    "scopes": Job(("metadata", "scopes", "-o", "ndjson")),
    "export": Job(("metadata", "export", "-f", "{directory}/export", "--overwrite")),
    "diff": Job(("metadata", "diff", "{directory}/export")),
    "health": Job(("cluster", "health", "-o", "ndjson"), exit_codes=(0, 3)),
    "recover-query": Job(("bookies", "recover", *LOST, "--query", "-o", "ndjson")),
    "recover-dry-run": Job(("bookies", "recover", *LOST, "--dry-run", "-o", "ndjson"), exit_codes=(0, 3)),
    "collect": Job(function=collect),
    "audit-scope0": Job(function=partial(audit, scoped=False)),
    "audit-scopes": Job(function=partial(audit, scoped=True)),
    "marks": Job(("autorecovery", "list", "--all-scopes", "-o", "ndjson")),
    "health-marks": Job(("cluster", "health", "-o", "ndjson"), exit_codes=(0, 3)),
    "create-1000": Job(function=create),
}


def child(uri: str, name: str, directory: str, statements: str) -> None:
    """Run a job in this process, and write its count of SQLite's statements, or HBase's calls, to `statements`."""
    count = 0

    def trace(*_: object) -> None:
        nonlocal count
        count += 1

    if uri.startswith("hbase:"):
        from bkctl.metadata.backends.hbase.rpc import Rpc

        call = Rpc.call
        Rpc.call = lambda *arguments: trace() or call(*arguments)  # type: ignore[method-assign,misc,assignment]
    else:
        import sqlite3

        connect = sqlite3.connect

        def traced(*arguments: Any, **settings: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **settings)
            connection.set_trace_callback(trace)
            return connection

        sqlite3.connect = traced  # type: ignore[assignment]
    job = JOBS[name]
    try:
        if job.function is not None:
            with open_cluster(uri, timeout_s=600) as cluster:
                job.function(cluster)
        else:
            from bkctl.__main__ import main as bkctl

            sys.argv = ["bkctl", "-u", uri, *(word.format(directory=directory) for word in job.words)]
            bkctl()
    finally:
        Path(statements).write_text(str(count))


# --- stores ---------------------------------------------------------------------------------------------------------


class Store(ABC):
    """A metadata store with clusters to measure."""

    server: Any

    def __init__(self, directory: Path, java: servers.Java | None) -> None:
        self.directory = directory
        self.java = java
        self.start()

    @abstractmethod
    def start(self) -> None:
        """Start its server."""

    def new_uri(self) -> str:
        """Return the URI of a place without a cluster."""
        uri: str = self.server.metadata_uri(self.server.new_root())
        return uri

    def requests(self) -> int | None:
        """Return the number of requests until now, None if the server does not count them."""
        return None

    def fill(self, cluster: Cluster, ledgers: Iterator[LedgerId]) -> None:
        """Create many ledgers, fast."""
        while batch := list(islice(ledgers, 500)):
            nodes = [(cluster.ledgers.path(ledger), metadata_of(ledger.value).serialize(), NEW) for ledger in batch]
            for result in cluster.store.put_many(nodes):
                if isinstance(result, Exception):
                    raise result

    def shell(self, uri: str) -> Sequence[tuple[str, Sequence[str]]]:
        """Return the commands of Apache's shell to run beside ours, by name."""
        return ()

    def stop(self) -> None:
        """Stop its server."""
        self.server.kill()


class ZooKeeper(Store):
    def start(self) -> None:
        assert self.java is not None
        with full_speed_java(heap_mb=8192):
            self.server = servers.ZooKeeperServer(self.java, self.directory / "zookeeper")
            self.server.start()

    def requests(self) -> int:
        return server_counts(self.server)["zk_packets_received"]

    def fill(self, cluster: Cluster, ledgers: Iterator[LedgerId]) -> None:
        create_all(cluster, ledgers, lambda ledger: metadata_of(ledger.value).serialize())

    def shell(self, uri: str) -> Sequence[tuple[str, Sequence[str]]]:
        assert self.java is not None
        conf = servers.write_conf(self.directory / "shell.conf", {"metadataServiceUri": uri})
        with full_speed_java():
            command = self.java.command(SHELL, "-conf", conf, "listledgers")
        return ("Apache: listledgers", command), ("Apache: listledgers -m", [*command, "-m"])


class Etcd(Store):
    def start(self) -> None:
        self.server = servers.EtcdServer(self.directory / "etcd", options=("--quota-backend-bytes", str(8 << 30)))
        self.server.start()

    def requests(self) -> int:
        with urllib.request.urlopen(f"http://{self.server.connect_string}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        counts = re.findall(r"^grpc_server_msg_received_total\{.*\} (\S+)$", text, re.MULTILINE)
        return int(sum(map(float, counts)))


class HBase(Store):
    def start(self) -> None:
        with full_speed_java(heap_mb=2048):
            self.server = servers.HBaseServer(self.directory / "hbase")
            self.server.start()


class Sqlite(Store):
    def start(self) -> None:
        self._count = 0

    def new_uri(self) -> str:
        self._count += 1
        return f"sqlite://{self.directory}/metadata-{self._count}.db"

    def stop(self) -> None:
        pass


STORES: dict[str, type[Store]] = {"zookeeper": ZooKeeper, "etcd": Etcd, "hbase": HBase, "sqlite": Sqlite}


# --- clusters -------------------------------------------------------------------------------------------------------


def metadata_of(seed: int) -> LedgerMetadata:
    """Return metadata as in a cluster of Pulsar's: sizes, times, ensembles and topics differ; one in 50 is open."""
    random_numbers = random.Random(seed)
    is_open = random_numbers.randrange(50) == 0
    return METADATA._replace(
        ensembles=(Fragment(0, tuple(random_numbers.sample(BOOKIES, 3))),),
        state=LedgerState.OPEN if is_open else LedgerState.CLOSED,
        length=0 if is_open else random_numbers.randrange(1 << 32),
        last_entry_id=-1 if is_open else random_numbers.randrange(1 << 10),
        ctime_ms=1_700_000_000_000 + random_numbers.randrange(10**10),
        custom_metadata={
            **METADATA.custom_metadata,
            "pulsar/managed-ledger": b"public/default/persistent/topic-%d" % random_numbers.randrange(TOPICS),
        },
    )


def ledgers_of(shape: str, count: int) -> Iterator[LedgerId]:
    """Yield the ledgers of a cluster: `scope0`, or `uuids`, one ledger a scope."""
    random_numbers = random.Random(count)
    for number in range(count):
        yield LedgerId(0, number) if shape == "scope0" else LedgerId.from_value(random_numbers.getrandbits(128))


def make(store: Store, uri: str, shape: str, count: int) -> None:
    with open_cluster(uri, create=True, timeout_s=600) as cluster:
        for bookie_id in BOOKIES:
            cookie = Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id())
            cluster.cookies.write(bookie_id, cookie, NEW)
        if shape != "scope0":  # the tree of the scopes
            cluster.ledgers.create(LedgerId(1, 1), metadata_of(1))
        store.fill(cluster, ledgers_of(shape, count))


# --- measuring ------------------------------------------------------------------------------------------------------


def run_job(store: Store, uri: str, name: str) -> Result:
    statements = store.directory / "statements"
    before = store.requests()
    command = [sys.executable, __file__, "--child", uri, name, str(store.directory), str(statements)]
    run = measured(command, store.directory, JOBS[name].exit_codes)
    after = store.requests()
    requests = int(statements.read_text()) if before is None or after is None else after - before
    return Result(*run, requests)


def measure(store: Store, uri: str, shape: str, count: int, names: Sequence[str]) -> dict[str, Result]:
    """Make a cluster of `count` ledgers, and run the jobs on it."""
    start = time.perf_counter()
    make(store, uri, shape, count)
    print(f"# {count:,} ledgers made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    results = {}
    info = BookieServiceInfo((), {LEDGER_SCOPES_PROPERTY: "1"})
    with open_cluster(uri, session_timeout_s=30) as cluster:
        for bookie_id in BOOKIES[len(LOST) :]:
            cluster.bookies.register(bookie_id, info)
        for name in names:
            results[name] = run_job(store, uri, name)
            print(f"# {count:,} {name}: {results[name]}", file=sys.stderr)
    if shape == "scope0":
        for name, command in store.shell(uri):
            results[name] = Result(*measured(command, store.directory))
            print(f"# {count:,} {name}: {results[name]}", file=sys.stderr)
    return results


def exponent(first: float | None, last: float | None, factor: float) -> str:
    if not first or not last or factor <= 1:
        return "-"
    return f"{math.log(last / first) / math.log(factor):.2f}"


def print_table(title: str, results: dict[int, dict[str, Result]]) -> None:
    """Print the results as Markdown: a row a job; time (of processors), memory and requests for each N; exponents."""
    counts = sorted(results)
    factor = counts[-1] / counts[0]
    heads = [f"{count:,}" for count in counts]
    print(f"\n| {title} | {' | '.join(heads)} | processor time ~ N^ | requests ~ N^ |")
    print(f"| --- |{' --- |' * (len(counts) + 2)}")
    for name in results[counts[0]]:
        row = [results[count][name] for count in counts]
        cells = [
            f"{each.seconds:.1f} s ({each.cpu_s:.1f}), {each.rss_mib:.0f} MiB"
            + ("" if each.requests is None else f", {each.requests:,}")
            for each in row
        ]
        times = [each.cpu_s for each in row]
        slopes = exponent(times[0], times[-1], factor), exponent(row[0].requests, row[-1].requests, factor)
        print(f"| {name} | {' | '.join(cells)} | {' | '.join(slopes)} |")
    sys.stdout.flush()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stores", nargs="+", choices=list(STORES), default=list(STORES))
    parser.add_argument("--ledgers", nargs="+", type=int, default=[1_000, 10_000, 100_000], metavar="N")
    parser.add_argument("--shapes", nargs="+", choices=["scope0", "uuids"], default=["scope0", "uuids"])
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE, too")
    arguments = parser.parse_args()
    java = servers.Java() if "zookeeper" in arguments.stores else None
    kept: dict[str, Any] = {}
    for store_name in arguments.stores:
        with tempfile.TemporaryDirectory(prefix="bkctl-scale-") as directory:
            store = STORES[store_name](Path(directory), java)
            try:
                for shape in arguments.shapes:
                    results = {
                        count: measure(store, store.new_uri(), shape, count, arguments.jobs)
                        for count in arguments.ledgers
                    }
                    title = f"{store_name}, {'scope 0' if shape == 'scope0' else 'one ledger a scope'}"
                    print_table(title, results)
                    for count, found in results.items():
                        kept[f"{title}, {count}"] = {name: each._asdict() for name, each in found.items()}
            finally:
                store.stop()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
