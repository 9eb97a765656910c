"""Many ledgers at once: ranges that collection can rely on, servers that go and hang."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import servers
from support.waiting import LIMIT_S, eventually

from bkctl.errors import BkctlError, Conflict, TimedOut, Unreachable
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import U64_MAX, LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledgers import LedgerManager, LedgerRange
from bkctl.metadata.store import NEW, map_each, value_of

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("bookie-1",)),))
FIRST, LAST = LedgerId(0, 0), LedgerId(U64_MAX, U64_MAX)


def create_all(ledgers: LedgerManager, ids: list[LedgerId]) -> None:
    for found in map_each(lambda ledger: ledgers.create(ledger, METADATA), ids):
        value_of(found)


def assert_tiled(ranges: list[LedgerRange], first: LedgerId, last: LedgerId) -> None:
    """Return True if ranges cover `first` to `last` without a gap or an overlap, each with its ledgers in order."""
    assert ranges[0].first == first
    assert ranges[-1].last == last
    for one, following in pairwise(ranges):
        assert following.first.value == one.last.value + 1
    for one in ranges:
        assert one.ledgers == sorted(set(one.ledgers))
        assert all(one.first <= ledger <= one.last for ledger in one.ledgers)


@contextmanager
def running(*works: Callable[[threading.Event], None]) -> Iterator[None]:
    """Threads that work until the end of the block, which raises what any of them raised."""
    stop = threading.Event()
    problems: list[BaseException] = []

    def run(work: Callable[[threading.Event], None]) -> None:
        try:
            work(stop)
        except BaseException as error:  # noqa: BLE001 - raised below
            problems.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]


# --- ranges ---------------------------------------------------------------------------------------------------------


def test_ranges_hold_every_ledger_that_exists_throughout(cluster_uri: str) -> None:
    """As collection asks: the ids it has, then the ranges. An id that is in no range's ledgers is taken for deleted."""
    with open_cluster(cluster_uri, create=True) as cluster, open_cluster(cluster_uri) as other:
        bases = (0, 9_990, 70_000, (1 << 31) - 30, 1 << 33)
        stable = [LedgerId(scope, base + n) for scope in (0, 7, 1 << 40) for base in bases for n in range(0, 50, 5)]
        create_all(cluster.ledgers, stable)
        lock = threading.Lock()
        there = set(stable)

        def churn(seed: int) -> Callable[[threading.Event], None]:
            def work(stop: threading.Event) -> None:
                generator = random.Random(seed)
                mine: list[LedgerId] = []
                made: set[LedgerId] = set()
                while not stop.is_set():
                    scope = generator.choice((0, 7, 9, 1 << 40))
                    number = generator.choice((*bases, 200_000, 5 << 29)) + 5 * generator.randrange(12) + seed
                    ledger = LedgerId(scope, number)  # never one of `stable`, whose offsets are multiples of 5
                    if ledger not in made:  # What came back was not there throughout.
                        other.ledgers.create(ledger, METADATA)
                        made.add(ledger)
                        mine.append(ledger)
                        with lock:
                            there.add(ledger)
                    if len(mine) > 4:
                        ledger = mine.pop(generator.randrange(len(mine)))
                        with lock:
                            there.discard(ledger)
                        other.ledgers.remove(ledger)

            return work

        with running(*(churn(seed) for seed in (1, 2, 3, 4))):
            for size in (1, 7, 10_000) * 4:
                for scope_id, first, last in ((0, FIRST, LedgerId(0, U64_MAX)), (None, FIRST, LAST)):
                    with lock:
                        before = set(there)
                    ranges = list(cluster.ledgers.ranges(scope_id, size=size))
                    with lock:
                        throughout = {ledger for ledger in before & there if scope_id is None or not ledger.is_scoped}
                    assert_tiled(ranges, first, last)
                    assert throughout <= {ledger for one in ranges for ledger in one.ledgers}


def test_empty_scopes_are_one_range_and_unproven_ones_none(cluster: Cluster) -> None:
    ledgers = cluster.ledgers
    assert list(ledgers.ranges()) == [LedgerRange(FIRST, LedgerId(0, U64_MAX), [])]
    create_all(ledgers, [LedgerId(0, 3), LedgerId(7, 5)])
    assert list(ledgers.ranges(8)) == [LedgerRange(LedgerId(8, 0), LedgerId(8, U64_MAX), [])]
    assert list(ledgers.ranges(None, size=1)) == [
        LedgerRange(FIRST, LedgerId(0, 3), [LedgerId(0, 3)]),
        LedgerRange(LedgerId(0, 4), LedgerId(7, 5), [LedgerId(7, 5)]),
        LedgerRange(LedgerId(7, 6), LAST, []),
    ]


def test_ranges_leave_out_scopes_of_another_cluster(zookeeper: Any) -> None:
    with open_cluster(zookeeper.metadata_uri(zookeeper.new_root()), create=True) as cluster:
        assert list(cluster.ledgers.ranges(7)) == []
        assert list(cluster.ledgers.ranges(None))[-1].last == LedgerId(0, U64_MAX)
        cluster.ledgers.create(LedgerId(0, 1), METADATA)
        cluster.ledgers.create(LedgerId(7, 1), METADATA)
        cluster.store.put("INSTANCEID", b"another", None)
    with open_cluster(cluster.uri) as cluster:
        assert list(cluster.ledgers.ranges(None)) == [LedgerRange(FIRST, LedgerId(0, U64_MAX), [LedgerId(0, 1)])]
        with pytest.raises(Conflict):
            list(cluster.ledgers.ranges(7))


# --- servers that go away -------------------------------------------------------------------------------------------


def spread(count: int) -> list[LedgerId]:
    """Ledgers in many directories: a listing asks often."""
    return [LedgerId(scope, number * 700_001) for scope in (0, 7) for number in range(count)]


def is_stopped(pid: int) -> bool:
    """Return True if every thread of the process has ended."""
    states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def test_listing_and_removing_survive_a_killed_server(metadata_server: Callable[[], Any]) -> None:
    server = metadata_server()
    ids = spread(300)

    def restart() -> None:
        server.kill()
        time.sleep(0.3)
        server.start()

    with open_cluster(server.metadata_uri(), create=True) as cluster:
        create_all(cluster.ledgers, ids)
        outage = threading.Timer(0.05, restart)
        outage.start()
        ranged = (ledger for one in cluster.ledgers.ranges(None, size=10) for ledger in one.ledgers)
        assert [ledger for ledger, _ in cluster.ledgers.read_many(ranged)] == ids
        outage.join()
        removed: list[LedgerId] = []

        def remove(ledger: LedgerId) -> None:
            cluster.ledgers.remove(ledger)
            removed.append(ledger)

        outage = threading.Timer(0.1, restart)
        outage.start()
        # A removal whose answer was lost counts as done, and is not told as LedgerNotFound.
        assert map_each(remove, list(cluster.ledgers.ledgers(None))) == [None] * len(ids)
        outage.join()
        assert sorted(removed) == ids
        assert list(cluster.ledgers.ledgers(None)) == []


def test_hanging_server_is_a_timeout_and_serves_again(
    metadata_server: Callable[[], Any],
) -> None:
    server = metadata_server()
    ids = spread(100)
    with open_cluster(server.metadata_uri(), create=True) as cluster:
        create_all(cluster.ledgers, ids)
    # A connection that is open already keeps the first timeout.
    with open_cluster(server.metadata_uri(), timeout_s=6.0, session_timeout_s=30, connect_timeout_s=LIMIT_S) as cluster:

        def lists_all() -> bool:
            with suppress(Unreachable):
                return list(cluster.ledgers.ledgers(None)) == ids
            return False

        eventually(lists_all)
        cluster.store._connection.timeout_s = 1.0  # type: ignore[attr-defined]
        os.kill(server.pid, signal.SIGSTOP)
        servers.wait_for(lambda: is_stopped(server.pid), "the stop")
        try:
            calls: list[Callable[[], object]] = [
                lambda: cluster.ledgers.read(ids[0]),
                lambda: cluster.ledgers.create(LedgerId(0, 1), METADATA),
                lambda: list(cluster.ledgers.ledgers(None)),
                lambda: list(cluster.ledgers.read_many(ids)),
                lambda: list(cluster.ledgers.ranges(None)),
                lambda: map_each(cluster.ledgers.read, ids),
            ]
            for call in calls:
                with pytest.raises(TimedOut) as caught:
                    call()
                assert caught.value.exit_code == 6
            with pytest.raises(Unreachable):
                open_cluster(server.metadata_uri(), timeout_s=1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        cluster.store._connection.timeout_s = LIMIT_S  # type: ignore[attr-defined]
        assert list(cluster.ledgers.ledgers(None)) in (ids, [LedgerId(0, 0), LedgerId(0, 1), *ids[1:]])
        assert all(not isinstance(found, BkctlError) for _, found in cluster.ledgers.read_many(ids))


def test_many_reads_equal_single_reads(cluster: Cluster) -> None:
    """Names and values of every size: some in one request with hundreds of others."""
    store = cluster.store
    names = [*(f"name-{number:04d}" for number in range(300)), *("n" * length for length in (1, 2, 127, 128, 200, 255))]
    names += ["ä", "日本", "L0001", "with blank", "a.b:c"]
    values = {f"many/{name}/below": name.encode() * (index % 50) for index, name in enumerate(names)}
    for path, value in values.items():
        store.put(path, value, NEW)
    paths = [*values, "many/missing", *(f"many/{name}" for name in names), "many"]
    assert list(store.get_many(iter(paths))) == [store.get(path) for path in paths]
    assert list(store.children_many(iter(paths))) == [store.children(path) for path in paths]
    assert store.children("many") == sorted(names)
