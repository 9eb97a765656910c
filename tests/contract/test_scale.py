"""Requests grow at most as the number of ledgers, and memory does not grow, in what passes over a whole cluster."""

from __future__ import annotations

import gc
import os
import random
import re
import socket
import sqlite3
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.waiting import LIMIT_S

from bkctl.commands.kit.columns import Output, RowOrder, RowSelection
from bkctl.commands.kit.output import RowWriter, open_writer
from bkctl.commands.ledger.listing import LEDGER_COLUMNS
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.admin.check import check_metadata
from bkctl.metadata.admin.dump.importing import import_records
from bkctl.metadata.admin.dump.sources import ClusterSource, ExportFile, compare, export_to_file
from bkctl.metadata.admin.health import health_findings
from bkctl.metadata.admin.overview import LedgerQuery, count_ledgers_of_bookies, list_ledgers
from bkctl.metadata.backends.hbase.hbase_store import HBaseStore
from bkctl.metadata.backends.hbase.rpc import Rpc
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.cluster import LEDGER_SCOPES_PROPERTY, Cluster, open_cluster
from bkctl.metadata.ledger_columns import ledger_rows
from bkctl.metadata.store import NEW
from bkctl.replication.holdings import plan_move
from bkctl.replication.marking import audit_bookies

COUNTS = (4_000, 12_000)
#: One ledger in ten has a scope of its own.
SCOPED_SHARE = 10
BOOKIES = tuple(f"bookie-{number:02}:3181" for number in range(20))
REQUESTS_SLACK = 100
#: Passes that need a request a ledger: each mark is one.
SINGLE_REQUESTS = ("audit",)
#: Less than a few hundred bytes for each further ledger.
MEMORY_SLACK_BYTES = 3 << 20
CREATES_AT_ONCE = 500


class Cost(NamedTuple):
    """Requests to the store, and the growth of the resident memory at its peak."""

    requests: int
    memory_bytes: int


def memory_bytes(name: str) -> int:
    """Return a size in /proc/self/status: VmRSS, or its peak VmHWM."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def drain(rows: Iterable[object]) -> None:
    deque(rows, maxlen=0)


def print_rows(cluster: Cluster, directory: Path) -> None:
    with (
        open(os.devnull, "w") as stream,
        RowWriter(LEDGER_COLUMNS, Output.NDJSON, stream=stream) as writer,
    ):
        writer.rows(ledger_rows(list_ledgers(cluster, None)))


def print_sorted(cluster: Cluster, directory: Path) -> None:
    selection = RowSelection(None, RowOrder.parse("-length"))
    with (
        open(os.devnull, "w") as stream,
        open_writer(LEDGER_COLUMNS, Output.NDJSON, selection, stream=stream) as writer,
    ):
        writer.rows(ledger_rows(list_ledgers(cluster, None)))


def compare_export(cluster: Cluster, directory: Path) -> None:
    with ExportFile(directory / "export") as file:
        assert list(compare(file.records(), ClusterSource(cluster).records())) == []


def import_again(cluster: Cluster, directory: Path) -> None:
    with ExportFile(directory / "export") as file:
        file.check()
        assert import_records(file.records(), cluster, dry_run=True).created.total() == 0


PASSES: dict[str, Callable[[Cluster, Path], object]] = {
    "ids": lambda cluster, _: drain(cluster.ledgers.ledgers(None)),
    "scopes": lambda cluster, _: drain(cluster.ledgers.scopes()),
    "rows": print_rows,
    "sorted": print_sorted,
    "filter": lambda cluster, _: drain(list_ledgers(cluster, None, query=LedgerQuery(bookie_id=BOOKIES[0]))),
    "check": lambda cluster, _: drain(check_metadata(cluster)),
    "export": lambda cluster, directory: export_to_file(ClusterSource(cluster), directory / "export", overwrite=True),
    "diff": compare_export,
    "import": import_again,
    "collection": lambda cluster, _: drain(cluster.ledgers.ranges(None, size=1000)),
    "audit": lambda cluster, _: [audit_bookies(cluster, scoped=scoped) for scoped in (False, True)],
    "health": lambda cluster, _: drain(health_findings(cluster)),
    "plan": lambda cluster, _: plan_move(cluster, BOOKIES),
    "counts": lambda cluster, _: count_ledgers_of_bookies(cluster, None),
}


def ledgers_of(count: int) -> list[LedgerId]:
    numbers = random.Random(count)
    scoped = count // SCOPED_SHARE
    ids = [LedgerId(0, number) for number in range(count - scoped)]
    return ids + sorted(LedgerId.from_value(numbers.getrandbits(128) | 1 << 64) for _ in range(scoped))


def fill(cluster: Cluster, count: int) -> None:
    numbers = random.Random(count)
    scopes = LedgerId(1, 1)
    metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, BOOKIES[:1]),))
    cluster.ledgers.create(scopes, metadata)  # the tree of the scopes
    cluster.ledgers.remove(scopes)
    info = BookieServiceInfo((), {LEDGER_SCOPES_PROPERTY: "1"})
    for bookie_id in BOOKIES:
        cluster.cookies.write(bookie_id, Cookie(bookie_id, ("/j",), ("/l",), instance_id=cluster.instance_id()), NEW)
        cluster.bookies.register(bookie_id, info)
    directories: set[str] = {"ledgers", "scopes"}

    def nodes() -> Iterator[tuple[str, bytes]]:
        for ledger in ledgers_of(count):
            path = cluster.ledgers.path(ledger)
            for end in (at for at, letter in enumerate(path) if letter == "/"):
                if path[:end] not in directories:
                    directories.add(path[:end])
                    yield path[:end], b""
            value = LedgerMetadata(
                3, 2, 2, DigestType.CRC32C, b"password", (Fragment(0, tuple(numbers.sample(BOOKIES, 3))),),
                LedgerState.CLOSED, numbers.randrange(1 << 32), numbers.randrange(1 << 20), numbers.randrange(1 << 40),
                {"application": b"pulsar", "pulsar/managed-ledger": b"a/b/persistent/%d" % numbers.randrange(9999)},
            )  # fmt: skip
            yield path, value.serialize()

    waiting = nodes()
    while batch := list(islice(waiting, CREATES_AT_ONCE)):
        if isinstance(cluster.store, ZooKeeperStore) and not isinstance(cluster.store, HBaseStore):
            cluster.store.put_all(batch)  # of ledgers of new scopes it creates the directories one by one
        else:
            created = cluster.store.put_many([(path, value, NEW) for path, value in batch if value])
            assert {type(each) for each in created} == {int}


@pytest.fixture(params=["sqlite", "zookeeper", "etcd", pytest.param("hbase", marks=pytest.mark.long)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Callable[[], str], Callable[[], int]]:
    """Functions that return the URI of a new place, and the number of requests until now."""
    if request.param == "sqlite":
        statements = 0

        def trace(_: str) -> None:
            nonlocal statements
            statements += 1

        connect = sqlite3.connect

        def traced(*arguments: Any, **settings: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **settings)
            connection.set_trace_callback(trace)
            return connection

        monkeypatch.setattr(sqlite3, "connect", traced)
        files = iter(range(len(COUNTS)))
        return lambda: f"sqlite://{tmp_path}/{next(files)}.db", lambda: statements
    server = request.getfixturevalue(request.param)
    if request.param == "hbase":
        calls = 0
        call = Rpc.call

        def counted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            return call(*arguments)

        monkeypatch.setattr(Rpc, "call", counted)
        return lambda: str(server.metadata_uri(server.new_root())), lambda: calls

    def messages() -> int:
        with urllib.request.urlopen(f"http://{server.connect_string}/metrics", timeout=LIMIT_S) as answer:
            text = answer.read().decode()
        return int(sum(map(float, re.findall(r"^grpc_server_msg_received_total\{.*\} (\S+)$", text, re.MULTILINE))))

    if request.param == "etcd":
        return lambda: str(server.metadata_uri(server.new_root())), messages

    def packets() -> int:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"mntr")
            text = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("zk_packets_received"))

    return lambda: str(server.metadata_uri(server.new_root())), packets


def cost_of(work: Callable[[], object], requests: Callable[[], int]) -> Cost:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins again. Source: proc(5).
    before, resident = requests(), memory_bytes("VmRSS")
    work()
    return Cost(requests() - before, memory_bytes("VmHWM") - resident)


def test_requests_are_linear_and_memory_is_flat_in_the_number_of_ledgers(
    place: tuple[Callable[[], str], Callable[[], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bkctl.commands.kit.output.SORTED_ROWS", 2_000)
    new_uri, requests = place
    costs: dict[str, list[Cost]] = {name: [] for name in PASSES}
    for count in COUNTS:
        with open_cluster(new_uri(), create=True) as cluster:
            fill(cluster, count)
            assert sum(1 for _ in cluster.ledgers.ledgers(None)) == count
            for name, work in PASSES.items():
                cost = cost_of(partial(work, cluster, tmp_path), requests)
                if costs[name] and cost.memory_bytes > costs[name][0].memory_bytes + MEMORY_SLACK_BYTES:
                    # Earlier tests may have left free memory in pieces that are too small.
                    cost = cost_of(partial(work, cluster, tmp_path), requests)
                costs[name].append(cost)
    factor = COUNTS[1] / COUNTS[0]
    for name, (few, many) in costs.items():
        assert many.requests <= factor * few.requests + REQUESTS_SLACK, (name, few, many)
        assert name in SINGLE_REQUESTS or many.requests <= COUNTS[1] / 10, (name, few, many)
        assert many.memory_bytes <= few.memory_bytes + MEMORY_SLACK_BYTES, (name, few, many)
