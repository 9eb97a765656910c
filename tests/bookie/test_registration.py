"""A bookie that loses its registration in the metadata store, and finds it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support.bookie_load import api_of
from support.own_bookies import OwnBookie
from support.raw_http import call
from support.served_bookies import config_for, serving
from support.servers import EtcdServer, ZooKeeperServer, free_port, wait_for
from support.waiting import LIMIT_S

from bkctl.http.bookie_load import cluster_vitals, vitals_findings
from bkctl.metadata.cluster import Cluster, open_cluster

LOST, BACK = "does not find its registration", "is registered again"


def unregistered_s(port: int) -> float:
    text = call(port, "GET", "/metrics").body.decode()
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith("bkctl_unregistered_seconds ")))


@pytest.mark.parametrize(
    "store", [pytest.param("zookeeper_server", marks=pytest.mark.java), pytest.param("etcd_server")]
)
def test_outage_of_the_metadata_store_is_logged_measured_and_makes_a_bookie_unready(
    request: pytest.FixtureRequest, own_bookie: Callable[..., OwnBookie], store: str
) -> None:
    server: ZooKeeperServer | EtcdServer = request.getfixturevalue(store)()
    uri = server.metadata_uri(server.new_root())
    with open_cluster(uri, create=True):
        pass
    port = free_port()
    http = {"httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": port}
    bookie = own_bookie(uri, settings={"zkTimeout": 3000, **http})
    bookie.start()

    def is_ready() -> tuple[int, bytes]:
        answer = call(port, "GET", "/api/v1/bookie/is_ready")
        return answer.status, answer.body

    with open_cluster(uri) as cluster:
        bookies = cluster.bookies.list()

    def codes() -> list[str]:
        found = vitals_findings(cluster_vitals(bookies, api_of, wait_s=LIMIT_S))
        return [f"{each.code} {each.subject}" for each in found]

    assert (is_ready()[0], unregistered_s(port), codes()) == (200, 0, [])
    assert LOST not in bookie.log_tail()
    server.kill()
    wait_for(lambda: LOST in bookie.log_tail(), "the loss in the log")
    wait_for(lambda: is_ready()[0] == 503, "not ready")
    assert b"lost its registration" in is_ready()[1]
    assert unregistered_s(port) > 3
    assert codes() == [f"bookie-unregistered {bookie.bookie_id}"]
    server.start()
    wait_for(lambda: BACK in bookie.log_tail(), "the return in the log")
    wait_for(lambda: is_ready()[0] == 200, "ready")
    assert unregistered_s(port) == 0
    assert bookie.log_tail().count(LOST) == 1


async def test_registration_that_vanishes_is_missed_and_its_return_is_noticed(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(LIMIT_S), serving(config_for(tmp_path, zk_timeout=200), cluster) as bookie:
        registration = bookie.registration
        assert (registration.lost_s, registration.is_over) == (0, False)
        await asyncio.to_thread(cluster.bookies.unregister, bookie.bookie_id)
        while not registration.is_over:
            await asyncio.sleep(0.01)
        assert registration.lost_s > 0
        assert LOST in caplog.text
        await asyncio.to_thread(cluster.bookies.register, bookie.bookie_id, bookie.service_info)
        while registration.lost_s or registration.is_over:
            await asyncio.sleep(0.01)
        assert BACK in caplog.text
