"""Alarms of `cluster health`: real faults raise the code, and healthy clusters raise none."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.own_cluster import STORAGES, OwnCluster
from support.servers import EtcdServer, require
from support.waiting import eventually

from bkctl.client.ledger_survey import LedgerSurvey, survey_ledgers
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.http.bookie_load import read_vitals
from bkctl.ids import LedgerId
from bkctl.metadata.admin.health import FIRST_AUDIT_MS
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.underreplication import AuditorCheck, AutoRecoveryState, ReplicationFailures

SETTINGS = {"httpServerEnabled": "true", "httpServerPort": 0, "autoRecoveryDaemonEnabled": "true", "zkTimeout": 3000}
AHEAD_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {
    int code = syscall(SYS_clock_gettime, id, now);
    if (id == CLOCK_REALTIME) now->tv_sec += 60;
    return code;
}
"""


class Watched:
    """A cluster of three of our bookies with auto-recovery on an etcd, and the health that it has."""

    def __init__(self, store: EtcdServer, directory: Path) -> None:
        self.uri = store.metadata_uri(store.new_root())
        self.shell = CommandLine(self.uri)
        assert self.shell("cluster", "init").code == 0
        self.store, self.directory = store, directory
        self.bookies = OwnCluster(self.uri, directory, STORAGES, SETTINGS).bookies

    def add(self, *prefix: object) -> OwnBookie:
        directory = self.directory / f"more-{len(self.bookies)}"
        more = OwnBookie(self.uri, directory, settings=SETTINGS, prefix=[*map(str, prefix)])
        self.bookies.append(more)
        more.start()
        return more

    def health(self, *options: str) -> list[dict[str, Any]]:
        done = self.shell("cluster", "health", "--threshold", 100, "-o", "json", *options)
        assert done.code in (0, 3), done.err
        found: list[dict[str, Any]] = json.loads(done.out)
        return found

    def found(self, code: str, *options: str) -> list[dict[str, Any]]:
        return [row for row in self.health(*options) if row["code"] == code]

    def write(self, count: int = 10, *options: str) -> str:
        text = b"".join(b"entry %d\n" % number for number in range(count))
        done = self.shell.run("ledger", "write", *options, "-o", "ndjson", input=text)
        return str(done.rows[-1]["ledgerId"])


@pytest.fixture
def watched(etcd: EtcdServer, tmp_path: Path) -> Iterator[Watched]:
    cluster = Watched(etcd, tmp_path)
    try:
        for bookie in cluster.bookies:
            bookie.launch()
        for bookie in cluster.bookies:
            bookie.wait_ready()
        eventually(lambda: cluster.health() == [])
        yield cluster
    finally:
        for bookie in cluster.bookies:
            bookie.kill()


def library(directory: Path, source: str) -> Path:
    """Return a library to load before libc."""
    compiler = shutil.which("cc") or require("cc", "a C compiler is not installed")
    (directory / "fault.c").write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", directory / "fault.so", directory / "fault.c"], check=True)
    return directory / "fault.so"


def test_a_healthy_cluster_has_no_findings_while_it_is_idle_written_and_joined(watched: Watched) -> None:
    for _ in range(3):
        watched.write(300)
        assert watched.health() == []
    writer = watched.shell.process("ledger", "write")
    try:
        assert writer.stdin is not None
        writer.stdin.write(b"an open ledger\n")
        writer.stdin.flush()
        watched.add()
        for _ in range(5):
            assert watched.health("--stuck-after", "0s") == []
    finally:
        writer.communicate()


def test_one_slow_sync_of_an_idle_bookie_is_no_alarm(watched: Watched) -> None:
    """The p99 of a few recent syncs is the slowest sync, however many there were before."""
    api = Mock()
    api.garbage_collection.return_value = Mock(suspended_by_disks="", major_suspended=False, minor_suspended=False)
    name = "bookie_journal_JOURNAL_SYNC"
    for recent, p99_ms in ((2, None), (200, 400)):
        api.metrics.return_value = (
            f'{name}{{success="true",quantile="0.99"}} 400\n{name}_count{{success="true"}} 100000\n'
            f'bkctl_recent_journal_syncs{{journal="0"}} {recent}\n'
        )
        assert read_vitals(api).sync_p99_ms == p99_ms
    metrics = watched.shell("bookie", "metrics", "--bookie", watched.bookies[0].bookie_id).out.decode()
    assert "bkctl_recent_adds" in metrics
    assert "bkctl_recent_journal_syncs" in metrics


def test_a_clock_that_is_ahead_is_found_on_its_bookie(watched: Watched, tmp_path: Path) -> None:
    ahead = watched.add("env", f"LD_PRELOAD={library(tmp_path, AHEAD_CLOCK)}")
    (finding,) = watched.health()
    assert (finding["code"], finding["subject"]) == ("clock-skew", ahead.bookie_id)
    assert 55 < finding["details"]["skewSeconds"] < 61
    assert finding["nextCommand"] == f"bkctl why bookie {ahead.bookie_id}"
    assert "Its clock is 60 s ahead" in watched.shell("why", "bookie", ahead.bookie_id).out.decode()


def test_bookies_of_two_versions_are_found_until_one_is_left(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import bkctl\nbkctl.__version__ = '0.0.1'\n")
    old = watched.add("env", f"PYTHONPATH={tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (finding,) = watched.health()
    assert finding["code"] == "versions-mixed"
    assert finding["details"]["versions"]["bkctl 0.0.1"] == 1
    rows = watched.shell(*shlex.split(finding["nextCommand"])[1:], "--threshold", 100, "-o", "ndjson").rows
    assert {row["bookieId"] for row in rows if row["version"] == "bkctl 0.0.1"} == {old.bookie_id}
    old.stop()
    eventually(lambda: not watched.found("versions-mixed"))


class SlowWay:
    """A TCP proxy to a port that holds every answer back for `delay_s`."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._target, self._delay_s = port, delay_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._pump, args=(near, far, 0), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, self._delay_s), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, delay_s: float) -> None:
        try:
            while data := source.recv(65536):
                time.sleep(delay_s)
                target.sendall(data)
        except OSError:
            pass

    def close(self) -> None:
        self._server.close()


def test_a_slow_metadata_store_is_found(watched: Watched) -> None:
    way = SlowWay(watched.store.port, 0.3)
    try:
        slow = watched.uri.replace(f":{watched.store.port}", f":{way.port}")
        (finding,) = [row for row in watched.health("-u", slow, "--no-bookies") if row["code"] == "metadata-slow"]
        assert finding["details"]["readMs"] >= 250
    finally:
        way.close()
    assert watched.health() == []


def test_replication_that_finds_no_bookie_is_stuck_until_the_bookie_is_back(watched: Watched) -> None:
    ledger = watched.write(10, "--ensemble-size", "3", "--write-quorum", "2", "--ack-quorum", "2")
    lost = watched.bookies[2]
    lost.kill()
    eventually(lambda: watched.found("replication-stuck"))
    (finding,) = watched.found("replication-stuck")
    assert finding["nextCommand"] == f"bkctl why ledger {ledger}"
    assert finding["details"]["reason"]
    assert finding["details"]["reason"] in watched.shell("why", "ledger", ledger).out.decode()
    lost.start()
    eventually(lambda: watched.health() == [])
    with open_cluster(watched.uri) as cluster:
        assert list(ReplicationFailures(cluster.store).list()) == []


def test_ledgers_of_a_bookie_that_is_gone_with_its_cookie_dangle(watched: Watched) -> None:
    assert watched.shell("autorecovery", "disable").code == 0
    ledger = watched.write(10, "--ensemble-size", "3")
    gone = watched.bookies[1]
    gone.stop()
    done = watched.shell("cookie", "delete", gone.bookie_id, "--yes", "--force")
    if done.code:
        with open_cluster(watched.uri) as cluster:
            cluster.store.delete(f"cookies/{gone.bookie_id}")
    findings = watched.found("ledgers-dangling")
    assert [(each["severity"], each["nextCommand"]) for each in findings] == [("error", f"bkctl why ledger {ledger}")]
    assert "unknown: neither a cookie nor a registration" in watched.shell("why", "ledger", ledger).out.decode()


def age_check(cluster: Cluster, age_s: float | None) -> None:
    """Let the auditor's last check of all ledgers of scope 0 be so long ago."""
    settings = AutoRecoveryState(cluster.store).settings
    now_ms = time.time_ns() // 1_000_000
    if age_s is None:
        cluster.store.delete(f"underreplication/{AuditorCheck.ALL_LEDGERS.value}")
    else:
        settings.set_check_ctime_ms(AuditorCheck.ALL_LEDGERS, int(now_ms - 1000 * age_s))


def test_ledgers_that_no_auditor_checked_in_time_are_found(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.write()
    week_s = 604_800
    with open_cluster(watched.uri) as cluster:
        eventually(lambda: watched.health() == [])
        ensembles = (Fragment(0, tuple(each.bookie_id for each in watched.bookies)),)
        young = LedgerMetadata(3, 3, 3, DigestType.CRC32C, b"", ensembles, ctime_ms=time.time_ns() // 1_000_000)
        cluster.ledgers.create(LedgerId(0, 1), young)
        for age_s, text in ((week_s, None), (2 * week_s + 3600, "14 d 1 h ago"), (None, None)):
            age_check(cluster, age_s)
            found = watched.found("not-audited")
            assert len(found) == (text is not None), "the first check of a young cluster has its time"
            assert text is None or text in found[0]["message"]
    monkeypatch.setattr("bkctl.metadata.admin.health.FIRST_AUDIT_MS", 0)
    (finding,) = watched.found("not-audited")
    assert "were never audited" in finding["message"]
    assert FIRST_AUDIT_MS > 0


def test_a_published_survey_is_told_with_its_age_until_its_ledgers_are_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    shell = CommandLine(uri)
    monkeypatch.setattr("bkctl.commands.cluster.SURVEYED_MAX", 0)
    monkeypatch.setattr("bkctl.client.ledger_survey.RECOVERY_S", 0)
    ensembles = (Fragment(0, ("b0:1", "b1:1")),)
    for scope in (0, 7):
        with open_cluster(uri, create=True) as cluster:
            ledger = LedgerId(scope, 5)
            stuck = LedgerMetadata(
                2, 2, 2, DigestType.CRC32C, b"", ensembles, state=LedgerState.IN_RECOVERY, ctime_ms=1, format_version=3
            )
            cluster.ledgers.create(ledger, stuck)
            survey = LedgerSurvey(cluster.bookies.list())
            survey_ledgers(cluster, survey, [ledger])
            survey.at_ms -= 3_600_000
            survey.publish(cluster.store, scoped=scope != 0)

        def told() -> list[dict[str, Any]]:
            rows = json.loads(shell("cluster", "health", "--threshold", 100, "-o", "json").out)
            return [row for row in rows if row["code"] == "ledgers-in-recovery"]

        (finding,) = told()
        assert "(by the audit 1 h 0 min ago)" in finding["message"]
        assert finding["details"]["auditAgeSeconds"] >= 3600
        with open_cluster(uri) as cluster:
            found = cluster.ledgers.read(ledger)
            closed = found.metadata._replace(state=LedgerState.CLOSED, length=0, last_entry_id=-1)
            cluster.ledgers.write(ledger, closed, found.version)
        assert told() == []
