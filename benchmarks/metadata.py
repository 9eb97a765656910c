"""Measure bkctl's metadata commands on many ledgers in ZooKeeper, beside Apache's shell in the same run.

    python benchmarks/metadata.py                      200,000 ledgers in scope 0, then 200,000 of UUIDs
    python benchmarks/metadata.py --ledgers 20000      fewer
    python benchmarks/metadata.py listing              only scope 0; `uuids`: only the UUIDs

A ratio above 1 means that bkctl is faster. Needs Java 17 and Maven, like the tests, whose servers it uses.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from measuring import BKCTL, SHELL, Run, measured
from run import full_speed_java, servers

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import map_each, value_of

CREATES_AT_ONCE = 250
#: So many ledgers are made one by one, as a client makes them; the rest in transactions, to spare the time.
CREATES_MEASURED = 2_000
METADATA = LedgerMetadata(
    ensemble_size=3,
    write_quorum_size=2,
    ack_quorum_size=2,
    digest_type=DigestType.CRC32C,
    password=b"password",
    ensembles=(Fragment(0, ("10.0.0.1:3181", "10.0.0.2:3181", "10.0.0.3:3181")),),
    state=LedgerState.CLOSED,
    length=1 << 30,
    last_entry_id=1 << 20,
    ctime_ms=1_700_000_000_000,
    custom_metadata={"application": b"pulsar", "component": b"managed-ledger"},
    c_token=0,
)

VALUE = METADATA.serialize()


class Best(NamedTuple):
    """The fastest run of a command: what else happens on the machine only ever adds time. `lines` it printed."""

    run: Run
    lines: int

    def line(self, what: str, peer: Best | None = None) -> str:
        ratio = "" if peer is None else f"{peer.run.seconds / self.run.seconds:>8.2f}x"
        return f"{what:<52} {self.run.seconds:>8.2f} s {self.run.rss_mib:>8.0f} MiB {self.lines:>9} lines{ratio}"


def best(command: Sequence[str], directory: Path, runs: int) -> Best:
    """Run a command some times. Raises CalledProcessError."""
    run = min(measured(command, directory) for _ in range(runs))
    with (directory / "output").open("rb") as file:
        return Best(run, sum(1 for _ in file))


def create_all(
    cluster: Cluster,
    ids: Iterator[LedgerId],
    value_of: Callable[[LedgerId], bytes] = lambda _: VALUE,
) -> None:
    """Create ledgers quickly: many in one transaction, several under way."""
    store = cluster.store
    assert isinstance(store, ZooKeeperStore)
    made = set(_directories(store))
    under_way: list[object] = []
    while batch := list(islice(ids, CREATES_AT_ONCE)):
        transaction = store._connection.client.transaction()
        for ledger in batch:
            path = cluster.ledgers.path(ledger)
            parts = path.split("/")
            for count in range(1, len(parts)):
                parent = "/".join(parts[:count])
                if parent not in made:
                    made.add(parent)
                    transaction.create(store._connection.full(parent), b"")
            transaction.create(store._connection.full(path), value_of(ledger))
        under_way.append(transaction.commit_async())
        if len(under_way) > 4:
            _check(under_way.pop(0))
    for each in under_way:
        _check(each)


def fill(uri: str, first: int, count: int) -> None:
    """Make `count` ledgers: those from `first` on in scope 0, or of UUIDs where that is negative."""
    ids = (LedgerId.random() if first < 0 else LedgerId(0, first + number) for number in range(count))
    with open_cluster(uri) as cluster:
        create_all(cluster, ids)


def _directories(store: ZooKeeperStore) -> Iterator[str]:
    """The directories that ledgers of new scopes share with those that are there."""
    names = store.children("scopes")
    if names is not None:
        yield "scopes"
        yield from (f"scopes/{name}" for name in names)


def _check(result: object) -> None:
    problems = [each for each in result.get() if isinstance(each, Exception)]  # type: ignore[attr-defined]
    if problems:
        raise problems[0]


def server_counts(zookeeper: servers.ZooKeeperServer) -> dict[str, int]:
    """ZooKeeper's own counts, by their names in `mntr`."""
    import socket

    with socket.create_connection(("127.0.0.1", zookeeper.port), 5) as connection:
        connection.sendall(b"mntr")
        text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    pairs = (each.split("\t") for each in text.splitlines() if each.count("\t") == 1)
    return {name: int(value) for name, value in pairs if value.lstrip("-").isdigit()}


def listing(zookeeper: servers.ZooKeeperServer, java: servers.Java, directory: Path, count: int, runs: int) -> None:
    """`ledger list` and `metadata export` against `listledgers`."""
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    start = time.perf_counter()
    open_cluster(uri, create=True).close()
    fill(uri, 0, count)
    print(f"{count} ledgers made in {time.perf_counter() - start:.1f} s\n")
    conf = servers.write_conf(directory / "shell.conf", {"metadataServiceUri": uri})
    with full_speed_java():
        shell = java.command(SHELL, "-conf", conf, "listledgers")
    ids = best(shell, directory, runs)
    print(ids.line("Apache: listledgers"))
    # The shell prints by its logger; the tests give it plain settings, its own jars say more of each line.
    own_log = [word for word in shell if not word.startswith("-Dlog4j2.configurationFile=")]
    logged = best(own_log, directory, runs)
    print(logged.line("Apache: listledgers, log settings of its jars"))
    ours = [*BKCTL, "-u", uri]
    listed = best([*ours, "ledger", "list", "-o", "id"], directory, runs)
    print(listed.line("ledger list -o id", ids))
    print(listed.line("ledger list -o id, beside the second", logged))
    full = best([*shell, "-m"], directory, runs)
    print(full.line("Apache: listledgers -m"))
    print(best([*ours, "ledger", "list", "-o", "ndjson"], directory, runs).line("ledger list -o ndjson", full))
    print(best([*ours, "ledger", "list", "--count"], directory, runs).line("ledger list --count", ids))
    export = [*ours, "metadata", "export", "-f", str(directory / "export")]
    try:
        print(best(export, directory, 1).line("metadata export", full))
    except subprocess.CalledProcessError as error:
        print(f"metadata export: exit {error.returncode}: {error.stderr.strip()}")
    show = [*ours, "ledger", "show", "7"]
    with full_speed_java():
        shell = java.command(SHELL, "-conf", conf, "ledgermetadata", "-ledgerid", 7)
    peer = best(shell, directory, 3)
    print(peer.line("Apache: ledgermetadata"))
    print(best(show, directory, 5).line("ledger show", peer))


def uuids(zookeeper: servers.ZooKeeperServer, directory: Path, count: int) -> None:
    """As many ledgers, one a scope: made one by one, listed, and one round of what garbage collection asks."""
    root = zookeeper.new_root()
    uri = zookeeper.metadata_uri(root)
    with open_cluster(uri, create=True) as cluster:
        before = server_counts(zookeeper)

        def counted(what: str, work: Callable[[], int]) -> None:
            start = time.perf_counter()
            done = work()
            seconds = time.perf_counter() - start
            now = server_counts(zookeeper)
            requests = now["zk_packets_received"] - before["zk_packets_received"]
            print(
                f"{what:<52} {seconds:>8.2f} s {done / seconds:>9,.0f} ledgers/s "
                f"{requests / done:>7.2f} requests a ledger"
            )
            before.update(now)

        def create() -> int:
            metadata = METADATA._replace(c_token=None)
            made = min(count, CREATES_MEASURED)
            ids = [LedgerId.random() for _ in range(made)]
            for found in map_each(lambda ledger: cluster.ledgers.create(ledger, metadata), ids):
                value_of(found)
            return made

        nodes = before["zk_znode_count"]
        counted(f"create, 8 at once, the first {min(count, CREATES_MEASURED)}", create)
        fill(uri, -1, max(count - CREATES_MEASURED, 0))
        before.update(server_counts(zookeeper))
        print(f"{'znodes a ledger':<52} {(before['zk_znode_count'] - nodes) / count:>8.2f}")
        run = best([*BKCTL, "-u", uri, "ledger", "list", "--all-scopes", "-o", "id"], directory, 1)
        print(run.line("ledger list --all-scopes -o id"))
        before.update(server_counts(zookeeper))
        counted("collection round: ranges of all scopes",
                lambda: sum(len(each.ledgers) for each in cluster.ledgers.ranges(None)))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Metadata commands on many ledgers, beside Apache's shell.")
    parser.add_argument("what", nargs="*", choices=["listing", "uuids", []], help="default: both")
    parser.add_argument("--ledgers", type=int, default=200_000, help="how many (default 200,000)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command, the best counts (default 3)")
    arguments = parser.parse_args()
    java = servers.Java()
    with tempfile.TemporaryDirectory(prefix="bkctl-metadata-") as name:
        directory = Path(name)
        with full_speed_java():
            zookeeper = servers.ZooKeeperServer(java, directory / "zookeeper", heap_mb=3072)
            zookeeper.start()
        try:
            if not arguments.what or "listing" in arguments.what:
                listing(zookeeper, java, directory, arguments.ledgers, arguments.runs)
            if not arguments.what or "uuids" in arguments.what:
                uuids(zookeeper, directory, arguments.ledgers)
        finally:
            zookeeper.kill()


if __name__ == "__main__":
    sys.exit(main())
