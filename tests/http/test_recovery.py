"""Recovery and decommission over the REST API: in the background, for every scope, told in the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.raw_http import call
from support.servers import wait_for

from bkctl.bookie.local import LocalCluster
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.replication.holdings import ledgers_on

V1 = "/api/v1/autorecovery"


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    cluster = LocalCluster(tmp_path / "cluster")
    cluster.up(5, http=True)
    yield cluster
    cluster.down()


def left(cluster: Cluster, bookie_id: str) -> list[object]:
    return list(ledgers_on(cluster, [bookie_id]))


def test_recovery_empties_lost_bookies_in_every_scope(local: LocalCluster, tmp_path: Path) -> None:
    bkctl = CommandLine(local.metadata_uri)
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    sizes = ("--ensemble-size", 3, "--write-quorum", 3, "--ack-quorum", 3)
    for scope in (0, 7):
        for _ in range(4):
            assert bkctl("ledger", "write", tmp_path / "lines", "--ledger-scope-id", scope, *sizes).code == 0
    ids = bkctl("ledger", "list", "--all-scopes", "-o", "id").ids
    [url] = [row["httpUrl"] for row in bkctl("local", "status", "--dir", local.directory, "-o", "ndjson").rows][4:]
    port = int(url.rpartition(":")[2])
    log = local.directory / "bookie-4" / "bookie.log"
    with open_cluster(local.metadata_uri) as cluster:
        assert (
            call(port, "PUT", f"{V1}/decommission", {"bookie_src": "bookie-0", "delete_cookie": "true"}).status == 409
        )
        local.down("bookie-0")
        answer = call(port, "PUT", f"{V1}/decommission", {"bookie_src": "bookie-0", "delete_cookie": "true"})
        assert (answer.status, answer.body) == (200, b"Success send decommission Bookie command bookie-0")
        wait_for(lambda: "bookie-0" not in cluster.cookies.list(), "the cookie is deleted")
        assert left(cluster, "bookie-0") == []
        wait_for(lambda: "Decommissioning bookie-0 has ended" in log.read_text(), "it is told")
        for body in ({"bookie_src": ["bookie-1"]}, {"bookie_src": ["nobody", "bookie-1"], "delete_cookie": True}):
            answer = call(port, "PUT", f"{V1}/bookie", body)
            assert (answer.status, "Bookie bookie-1 is registered (rw)" in answer.error) == (409, True)
        local.down("bookie-1")
        answer = call(port, "PUT", f"{V1}/bookie", {"bookie_src": ["bookie-1"]})
        assert (answer.status, answer.body) == (200, b"Success send recovery request command.")
        wait_for(lambda: left(cluster, "bookie-1") == [], "nothing is left")
        assert "bookie-1" in cluster.cookies.list()
    assert bkctl("ledger", "verify", *ids).code == 0
