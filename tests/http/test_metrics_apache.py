"""/metrics of our bookie beside Apache's under the same load: equal kinds, and a text that Prometheus accepts."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from support.own_bookies import OwnBookie
from support.raw_http import call, http_port
from support.servers import DB, SORTED, ApacheBookie, Java, JavaWithMetrics, format_cluster, free_port
from support.waiting import eventually

from bkctl.client.ledger import BookKeeper
from bkctl.metadata.cluster import open_cluster

pytestmark = pytest.mark.java


class Exposed(NamedTuple):
    """A text of metrics, and the kind by name."""

    text: str
    kinds: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Exposed:
        return cls(text, dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)))


@pytest.fixture(scope="module", params=[DB, SORTED], ids=["db", "sorted"])
def exposed(
    request: pytest.FixtureRequest, java: Java, zookeeper: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Exposed, Exposed]]:
    directory = tmp_path_factory.mktemp("metrics")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, directory)
    port = free_port()
    common = {
        "httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "autoRecoveryDaemonEnabled": "true",
        "verifyMetadataOnGC": "true", "gcWaitTime": 1000, "auditorPeriodicBookieCheckInterval": 1,
    }  # fmt: skip
    of_java = {
        "httpServerClass": "org.apache.bookkeeper.http.vertx.VertxHttpServer", "httpServerPort": port,
        "statsProviderClass": "org.apache.bookkeeper.stats.prometheus.PrometheusMetricsProvider",
        "enableStatistics": "true", "prometheusStatsHttpEnable": "false",
    }  # fmt: skip
    apache = ApacheBookie(JavaWithMetrics(), uri, directory / "apache", request.param, settings=common | of_java)
    ours = OwnBookie(uri, directory / "ours", storage=request.param, settings={**common, "httpServerPort": 0})
    with ExitStack() as stack:
        for bookie in (apache, ours):
            stack.callback(bookie.kill)
            bookie.start()
        asyncio.run(load(uri))

        def parsed(at: int) -> Exposed:
            return Exposed.parse(call(at, "GET", "/metrics").body.decode())

        eventually(lambda: "bookie_SERVER_STATUS" in parsed(port).kinds)
        yield parsed(port), parsed(http_port(ours))


async def load(uri: str) -> None:
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as bookkeeper:
            writer = await bookkeeper.create_ledger(ensemble_size=2, write_quorum_size=2, ack_quorum_size=2)
            for number in range(50):
                await writer.add(b"%d" % number)
            await writer.close()
            async with await bookkeeper.open_ledger(writer.ledger_id) as reader:
                assert len([entry async for entry in reader.read(0, 49)]) == 50


def test_equal_names_have_equal_kinds(exposed: tuple[Exposed, Exposed]) -> None:
    apache, ours = exposed
    shared = apache.kinds.keys() & ours.kinds.keys()
    assert len(shared) > 50
    other = {name: (apache.kinds[name], ours.kinds[name]) for name in shared if apache.kinds[name] != ours.kinds[name]}
    assert other == {}


def test_text_has_each_series_once_with_its_kind_before_it(exposed: tuple[Exposed, Exposed]) -> None:
    text = exposed[1].text
    series = re.findall(r"^([^#\s]\S*(?:\{.*\})?) \S+$", text, re.MULTILINE)
    assert len(series) == len(set(series))
    # A summary without observations of late, as in Apache's.
    assert [line for line in text.splitlines() if "NaN" in line and "quantile=" not in line] == []
    kinds = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    promtool = shutil.which("promtool")
    if promtool:
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True)
        # 3: complaints about names, which are Apache's.
        assert checked.returncode in (0, 3), checked.stdout + checked.stderr
        assert "error" not in checked.stdout + checked.stderr
        assert "help text" not in checked.stdout + checked.stderr
