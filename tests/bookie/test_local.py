"""The local cluster: up, status, down, up again; what it refuses, and what it says when a bookie dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import eventually

from bkctl.bookie.local import LocalCluster, active_cluster
from bkctl.errors import BkctlError, DirectoryInUse, NotFound, UsageError
from bkctl.formats.metadata import BookieServiceInfo
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.underreplication import AuditorElection


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    local = LocalCluster(tmp_path / "cluster with space")
    yield local
    if local.exists():
        for bookie in local.bookies():
            if bookie.pid is not None:
                os.kill(bookie.pid, signal.SIGKILL)


def states(cluster: LocalCluster) -> list[str]:
    return [each.state for each in cluster.status()]


def test_cluster_comes_up_serves_goes_down_and_comes_back_on_the_same_ports(cluster: LocalCluster) -> None:
    told: list[str] = []
    first = cluster.up(2, progress=told.append)
    assert [bookie.bookie_id for bookie in first] == ["bookie-0", "bookie-1"]
    assert [bookie.directory.name for bookie in first] == ["bookie-0", "bookie-1"]
    assert states(cluster) == ["rw", "rw"]
    assert "bookie-1 serves" in told
    assert all(bookie.port < 32768 for bookie in first)  # No connection gets such a port while the cluster is down.
    with open_cluster(cluster.metadata_uri) as metadata:
        found = metadata.bookies.list()
        assert [bookie.bookie_id for bookie in found] == ["bookie-0", "bookie-1"]
        assert all(bookie.ledger_scopes for bookie in found)
        instance_id = metadata.instance_id()
    active = active_cluster()
    assert active is not None
    assert active.directory == cluster.directory

    stopped = cluster.down()
    assert [bookie.bookie_id for bookie in stopped] == ["bookie-0", "bookie-1"]
    assert states(cluster) == ["down", "down"]
    assert active_cluster() is None
    assert not (cluster.directory / "bookie-0" / "ledgers" / "current" / "DIRTY").exists()

    again = cluster.up()
    assert [bookie.port for bookie in again] == [bookie.port for bookie in first]
    cluster.down("bookie-1")
    with open_cluster(cluster.metadata_uri) as metadata:
        assert metadata.instance_id() == instance_id
        metadata.cookies.remove("bookie-1", None)
    shutil.rmtree(cluster.bookies()[1].directory)
    back = cluster.up()  # One that was decommissioned and removed comes back empty.
    assert [bookie.port for bookie in back] == [bookie.port for bookie in first]
    assert states(cluster) == ["rw", "rw"]
    cluster.down()


def test_up_starts_stopped_bookies_and_adds_new_ones(cluster: LocalCluster) -> None:
    cluster.up(1)
    cluster.up(2)
    assert states(cluster) == ["rw", "rw"]
    assert [bookie.bookie_id for bookie in cluster.down("bookie-0")] == ["bookie-0"]
    assert states(cluster) == ["down", "rw"]
    assert active_cluster() is not None
    killed = cluster.bookies()[1]
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    eventually(lambda: cluster.bookies()[1].pid is None)
    assert states(cluster) == ["down", "down"]
    cluster.up()
    assert states(cluster) == ["rw", "rw"]
    cluster.down()


def test_bookies_with_auto_recovery_stand_for_auditor_until_they_stop(cluster: LocalCluster) -> None:
    cluster.up(1, auto_recovery=True)
    with open_cluster(cluster.metadata_uri) as metadata:
        election = AuditorElection(metadata.store)
        eventually(lambda: {election.auditor(), election.auditor(scoped=True)} == {"bookie-0"})
        cluster.down()
        assert election.votes() == election.votes(scoped=True) == ()


def test_fewer_bookies_other_storage_and_unknown_storage_are_refused(cluster: LocalCluster) -> None:
    for count, storage in ((0, None), (65, None), (1, "paper")):
        with pytest.raises(UsageError):
            cluster.up(count, storage=storage)
    cluster.up(2, storage="db")
    for refused in ({"bookie_count": 1}, {"storage": "interleaved"}):
        with pytest.raises(UsageError):
            cluster.up(**refused)
    cluster.down()


@pytest.mark.parametrize("name", ["a,b", "a\\b", "${bookieId}", "a\nb"])
def test_directory_that_a_configuration_file_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="without commas"):
        LocalCluster(tmp_path / name).up(1)
    assert not list(tmp_path.iterdir())


def test_missing_cluster_is_reported(cluster: LocalCluster) -> None:
    for call in (cluster.bookies, cluster.status, cluster.down):
        with pytest.raises(NotFound, match="local up"):
            call()
    assert active_cluster() is None


def test_unknown_bookie_is_not_found(cluster: LocalCluster) -> None:
    cluster.up(1)
    with pytest.raises(NotFound, match="bookie-7"):
        cluster.down("bookie-7")
    cluster.down()


def make_unable_to_start(cluster: LocalCluster) -> None:
    """Leave the cluster with one bookie, stopped, whose configuration is refused."""
    cluster.up(1)
    cluster.down()
    conf = cluster.bookies()[0].conf
    conf.write_text(conf.read_text() + "journalMaxSizeMB=many\n")


def test_bookie_that_dies_at_start_is_reported_with_the_end_of_its_log(cluster: LocalCluster) -> None:
    make_unable_to_start(cluster)
    with pytest.raises(BkctlError, match="journalMaxSizeMB") as caught:
        cluster.up(2)
    assert f"keep running until \"bkctl local down --dir '{cluster.directory}'\"" in (caught.value.hint or "")
    assert [bookie.bookie_id for bookie in cluster.down()] == ["bookie-1"]


def test_damaged_description_is_refused_not_replaced(cluster: LocalCluster) -> None:
    cluster.directory.mkdir()
    for text in ("{", "[]", '{"ports": "all"}', json.dumps({"ports": ["1"]})):
        (cluster.directory / "cluster.json").write_text(text)
        with pytest.raises(BkctlError, match=r"cluster\.json"):
            cluster.bookies()
    (cluster.directory / "cluster.json").unlink()


def test_two_commands_at_once_do_not_start_a_bookie_twice(cluster: LocalCluster) -> None:
    cluster.directory.mkdir()
    with cluster._lock(), pytest.raises(DirectoryInUse):
        LocalCluster(cluster.directory).up(1)


def test_interrupt_at_the_start_of_a_process_leaves_its_pid_file(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*arguments, **options))
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        return processes[0]

    try:
        monkeypatch.setattr(subprocess, "Popen", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cluster.up(2)
        assert [bookie.pid for bookie in cluster.bookies()] == [processes[0].pid, None]
        assert [bookie.bookie_id for bookie in cluster.down()] == ["bookie-0"]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_registration_of_another_process_is_not_that_of_a_started_bookie(cluster: LocalCluster) -> None:
    make_unable_to_start(cluster)
    with open_cluster(cluster.metadata_uri) as metadata:
        metadata.bookies.register("bookie-0", BookieServiceInfo((), {}))
        with pytest.raises(BkctlError, match="bookie-0 stopped with exit code 2"):
            cluster.up()


def test_reused_process_id_is_not_taken_for_a_bookie(cluster: LocalCluster) -> None:
    cluster.up(1)
    cluster.down()
    pid_file = cluster.bookies()[0].directory / "bookie.pid"
    pid_file.write_text(f"{os.getpid()} 1\n")
    assert cluster.bookies()[0].pid is None
