"""The load of bookies, from HTTP servers that answer as Apache's bookies and ours do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.bookie_load import api_of, metrics, register, replies
from support.command_line import CommandLine
from support.fake_http import FakeServer, Reply, is_silent, misbehaving
from support.servers import ApacheBookie, Java, ZooKeeperServer, format_cluster, free_port

from bkctl.formats.metadata import Cookie
from bkctl.http.bookie_load import LoadWatch
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW
from bkctl.metadata.underreplication import LedgerMarks


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
        yield cluster


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def watch(cluster: Cluster, wait_s: float = 60.0) -> LoadWatch:
    return LoadWatch(cluster, api_of, wait_s=wait_s)


@pytest.mark.parametrize("gc", ["bookie", "bookie_gc"])
def test_numbers_are_those_of_apaches_metrics_and_rest(cluster: Cluster, fake: FakeServer, gc: str) -> None:
    fake.replies = replies(metrics(100, 10, gc=gc), metrics(400, 10, gc=gc))
    register(cluster, "b1", fake.url)
    LedgerMarks(cluster.store).add(LedgerId(0, 5), ["b1", "b9"])
    loads = watch(cluster)
    first, second = loads.look(), loads.look()
    (load,) = first.bookies
    assert load.problem is None
    assert load.per_second.adds is None, "one look has no rate"
    reading = load.reading
    assert reading is not None
    assert reading.counts.adds == 100, "failures and successes"
    assert tuple(reading.add) == (1.25, 2.5, 7.5, None)
    assert reading.read.p99_ms is None
    assert reading.journal_sync.p99_ms == 4.5, "the slower journal"
    assert (reading.journal_waiting, reading.ledger_count) == (5, 17)
    assert (reading.major_compactions, reading.minor_compactions, reading.reclaimed_bytes) == (3, 4, 1024)
    assert (reading.disk, reading.collection) == ((250, 1000), "major")
    assert (load.underreplicated_count, first.underreplicated_count) == (1, 1)
    later = second.bookies[0].reading
    assert later is not None
    assert second.bookies[0].per_second.adds == pytest.approx(300 / (later.at_s - reading.at_s), rel=0.01)
    assert second.bookies[0].per_second.reads == 0


def test_a_restarted_bookie_has_no_rate(cluster: Cluster, fake: FakeServer) -> None:
    fake.replies = replies(metrics(100, 10), metrics(5, 20))
    register(cluster, "b1", fake.url)
    loads = watch(cluster)
    loads.look()
    rates = loads.look().bookies[0].per_second
    assert rates.adds is None
    assert rates.reads is not None


def test_a_bookie_without_metrics_says_why_and_keeps_its_disks(cluster: Cluster, fake: FakeServer) -> None:
    fake.replies = replies(Reply(b'"Stats provider is not enabled"', 500))
    register(cluster, "b1", fake.url)
    (load,) = watch(cluster).look().bookies
    assert "statsProviderClass=" in str(load.problem)
    assert load.reading is not None
    assert (load.reading.counts.adds, load.reading.disk) == (None, (250, 1000))


def test_numbers_that_no_bookie_has_are_left_out(cluster: Cluster, fake: FakeServer) -> None:
    name = "bookkeeper_server_ADD_ENTRY_REQUEST_count"
    huge = "".join(f'{each}{{a="{number}"}} 1e308\n' for each in (name, "bookie_ledgers_count") for number in range(3))
    fake.replies = replies(Reply(huge.encode()), Reply(huge.encode()))
    register(cluster, "b1", fake.url)
    loads = watch(cluster)
    loads.look()
    (load,) = loads.look().bookies
    assert (load.problem, load.per_second.adds) == (None, None)
    assert load.reading is not None
    assert load.reading.ledger_count is None


def test_bookies_without_http_or_registration_say_so(cluster: Cluster) -> None:
    register(cluster, "b1", None)
    cluster.cookies.write("b2", Cookie("b2", ("/j",), ("/l",)), NEW)
    one, two = watch(cluster).look().bookies
    assert (one.bookie.state, one.reading) == ("rw", None)
    assert "registered no HTTP server; start it with httpServerEnabled=true" in str(one.problem)
    assert (two.bookie.state, two.problem) == ("down", "has a cookie, but is not registered")


def test_a_silent_bookie_does_not_hold_up_the_others(cluster: Cluster, fake: FakeServer) -> None:
    fake.replies = replies(metrics(100, 10))
    with ExitStack() as stack:
        silent = stack.enter_context(misbehaving(is_silent))
        register(cluster, "a-silent", silent.url)
        register(cluster, "b1", fake.url)
        loads = watch(cluster, wait_s=2.0)
        stuck, answered = loads.look().bookies
        assert stuck.problem == "no answer within 2 s"
        # A client's own limit is 30 s: the first question still runs and is not asked twice.
        (question,) = [each for name, each in loads._questions.items() if name == "a-silent"]
        loads.cancel()
        loads.look()
        assert loads._questions["a-silent"] is question
    while answered.reading is None:  # on a machine too busy to answer within the wait
        loads = watch(cluster)
        answered = loads.look().bookies[1]
    assert answered.reading.counts.adds == 100


def test_an_unreachable_server_is_named(cluster: Cluster, fake: FakeServer) -> None:
    register(cluster, "b1", "http://127.0.0.1:1")
    (load,) = watch(cluster).look().bookies
    assert load.reading is None
    assert "http://127.0.0.1:1 cannot be reached" in str(load.problem)


def test_apaches_bookie_without_a_stats_provider_shows_disks_and_collection(
    java: Java, zookeeper: ZooKeeperServer, tmp_path: Path
) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    settings = {
        "httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": free_port(),
        "httpServerClass": "org.apache.bookkeeper.http.vertx.VertxHttpServer",
    }  # fmt: skip
    apache = ApacheBookie(java, uri, tmp_path / "apache", settings=settings)
    apache.launch()
    try:
        apache.wait_ready()
        with open_cluster(uri) as cluster:
            (load,) = watch(cluster).look().bookies
    finally:
        apache.kill()
    assert load.bookie.state == "rw"
    assert "PrometheusMetricsProvider" in str(load.problem)
    assert load.reading is not None
    assert load.reading.disk is not None
    assert load.reading.disk.total > load.reading.disk.free > 0
    assert load.reading.collection == "idle"


def test_bookies_whose_servers_give_no_vitals_are_named(cluster: Cluster, fake: FakeServer) -> None:
    fake.replies = {"GET /metrics": Reply(b"no", 401)}
    register(cluster, "b1", fake.url)
    register(cluster, "b2", None)
    shown = CommandLine(cluster.uri)("cluster", "health", "--timeout", "5s")
    assert "1 HTTP server of bookies gave no answer" in shown.err
    assert "(b1: " in shown.err
    assert "b2: " not in shown.err
