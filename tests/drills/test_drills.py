"""Drills: each breaks a healthy cluster, and follows only the commands that bkctl prints until health says OK.

`recover` takes the next command of each finding of `cluster health detail`, runs it, and runs the first way that its
answer names; a way that was tried twice without an end gives place to the next one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.long_runs import IS_LONG
from support.own_cluster import STORAGES, OwnCluster
from support.servers import DB, INTERLEAVED, SORTED, ApacheCluster, EtcdServer, Java, ZooKeeperServer, require
from support.waiting import LIMIT_S, eventually

from bkctl.bookie.local import LocalCluster
from bkctl.client.ledger import BookKeeper
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import run as run_client

PAYLOADS = [f"entry {number} of a drill" for number in range(40)]
#: Longer than sessions last; the real 90 s where tests may be long.
OUTAGE_S = 90 if IS_LONG else 10
#: The disk of the machine may be nearly full.
HEALTH_OPTIONS = ("--threshold", "100")
SLOW_SYNC = """
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int fd) { usleep(300000); return syscall(SYS_fdatasync, fd); }
int fsync(int fd) { usleep(300000); return syscall(SYS_fsync, fd); }
"""
TOPIC = {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": "public/default/persistent/t"}


class Drill:
    """A local cluster with auto-recovery, a ledger on it, and the operator who follows what bkctl prints."""

    def __init__(self, directory: Path, metadata_uri: str | None = None) -> None:
        self.shell = CommandLine(metadata_uri)
        self.directory = directory
        self.options = HEALTH_OPTIONS
        self.transcript: list[str] = []
        self.tried: Counter[str] = Counter()

    @property
    def local(self) -> LocalCluster:
        return LocalCluster(self.directory)

    def up(self) -> None:
        assert self.shell("local", "up", "--dir", self.directory, "--bookies", 4, "--autorecovery").code == 0
        eventually(self.is_healthy)

    def is_healthy(self) -> bool:
        return bool(self.shell("cluster", "health", *self.options).out == b"OK\n")

    def pid(self, bookie_id: str) -> int:
        (pid,) = (each.pid for each in self.local.bookies() if each.bookie_id == bookie_id)
        assert pid is not None
        return pid

    def write(self, *options: str) -> str:
        text = "\n".join(PAYLOADS).encode() + b"\n"
        done = self.shell.run("ledger", "write", *options, "-o", "ndjson", input=text)
        assert done.code == 0, done.err
        return str(done.rows[-1]["ledgerId"])

    def read(self, ledger: str) -> list[str]:
        done = self.shell("ledger", "read", ledger, "--body", "--format", "utf8", "-o", "ndjson", "--timeout", "20s")
        return [] if done.code else [row["payload"] for row in done.rows]

    def codes(self) -> set[str]:
        done = self.shell("cluster", "health", *self.options, "-o", "json")
        assert done.code in (0, 3), done.err
        return {row["code"] for row in json.loads(done.out)}

    def run(self, line: str) -> Any:
        """Run a command that bkctl printed, and return the JSON that it prints, if it does."""
        first, then, second = line.partition(" && ")
        if then:
            self.run(first)
            return self.run(second)
        self.transcript.append(line)
        words = shlex.split(line)
        self.show(line, words)
        if words[0] != "bkctl":
            subprocess.run(words, check=True, timeout=LIMIT_S)
            return None
        done = self.shell(*words[1:], *(() if "-o" in words else ("-o", "json")))
        with contextlib.suppress(ValueError):
            return json.loads(done.out)
        return None

    def show(self, line: str, words: list[str]) -> None:
        """Append a command to the transcript that BKCTL_TEST_TRANSCRIPTS names, with the output of one that reads."""
        print(line)
        if (path := os.environ.get("BKCTL_TEST_TRANSCRIPTS")) is not None:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].partition(" ")[0]
            reads = (words[0] == "bkctl" and words[1] in ("why", "cluster")) or words[-1] in ("list", "status", "show")
            out = self.shell(*words[1:], COLUMNS="80").out.decode() if reads else ""
            with open(path, "a") as file:
                file.write(f"--- {test} {time.strftime('%H:%M:%S')}\n$ {line}\n{out}")

    def follow(self, line: str, depth: int = 3) -> None:
        """Run the next command of a finding, and then what its answer names."""
        answer = self.run(line)
        found = answer if isinstance(answer, list) else [answer or {}]
        ways = [way["command"] for each in found for way in each.get("ways", ())]
        ways += [each["nextCommand"] for each in found if each.get("nextCommand")]
        ways = [way for way in ways if not any(word.isupper() and word.isalpha() for word in way.split())]
        ways = [way for way in ways if self.tried[way] < 2] or ways
        if ways and depth:
            self.tried[ways[0]] += ways[0].startswith("bkctl why") is False
            self.follow(ways[0], depth - 1)

    def recover(self) -> None:
        """Follow the findings until health says OK."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            done = self.shell("cluster", "health", "detail", *self.options, "-o", "json")
            assert done.code in (0, 3), done.err
            findings = json.loads(done.out)
            self.show("bkctl cluster health", ["bkctl", "cluster", "health", *self.options])
            if not findings:
                break
            assert time.monotonic() < deadline, (findings, self.transcript)
            self.follow(findings[0]["nextCommand"])
            time.sleep(1)
        assert self.is_healthy()


@pytest.fixture(scope="module")
def cluster_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("drills")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("BKCTL_METADATA_URI", raising=False)
        try:
            yield directory / "cluster"
        finally:
            LocalCluster(directory / "cluster").down()


@pytest.fixture
def drill(cluster_directory: Path, request: pytest.FixtureRequest) -> Iterator[Drill]:
    drill, failed_count, is_sound = Drill(cluster_directory), request.session.testsfailed, False
    try:
        drill.up()
        yield drill
        is_sound = request.session.testsfailed == failed_count
    finally:
        if not is_sound:  # The next drill begins with a cluster of its own.
            drill.local.down()
            shutil.rmtree(cluster_directory)


def test_a_bookie_that_is_down_is_started_again(drill: Drill) -> None:
    ledger = drill.write()
    assert drill.shell("local", "down", "--bookie", "bookie-1").code == 0
    assert "bookie-down" in drill.codes()
    drill.recover()
    assert "bkctl why bookie bookie-1" in drill.transcript
    assert drill.read(ledger) == PAYLOADS


def test_a_full_disk_gets_room(drill: Drill) -> None:
    ledger = drill.write()
    limits = ("--set", "diskUsageThreshold=0.00002", "--set", "diskUsageWarnThreshold=0.00001")
    assert drill.shell("bookie", "config", "--bookie", "bookie-2", *limits).code == 0
    eventually(lambda: "disk-full-no-way-out" in drill.codes())
    drill.recover()
    assert "bkctl why space bookie-2" in drill.transcript
    assert drill.read(ledger) == PAYLOADS


def test_a_stuck_recovery_is_ended(drill: Drill) -> None:
    ledger = drill.write()
    with open_cluster(drill.local.metadata_uri) as cluster:
        found = cluster.ledgers.read(LedgerId.parse(ledger))
        stuck = found.metadata._replace(state=LedgerState.IN_RECOVERY, length=0, last_entry_id=-1)
        cluster.ledgers.write(LedgerId.parse(ledger), stuck, found.version)
    drill.options = (*HEALTH_OPTIONS, "--stuck-after", "0s")
    assert "ledgers-in-recovery" in drill.codes()
    drill.recover()
    assert drill.transcript == [f"bkctl ledger recover {ledger} --yes"]
    assert drill.read(ledger) == PAYLOADS


def test_under_replication_that_does_not_fall_begins_to_fall(drill: Drill) -> None:
    ledger = drill.write()
    assert drill.shell("autorecovery", "disable").code == 0
    (row,) = drill.shell("ledger", "show", ledger, "-o", "ndjson").rows
    bookie = next(iter(row["ensembles"].values()))[0]
    assert drill.shell("autorecovery", "mark", ledger, "--missing", bookie).code == 0
    (marked,) = drill.shell("autorecovery", "list", "-o", "ndjson").rows
    assert marked["reason"] == "auto-recovery is disabled"
    assert {"underreplicated", "autorecovery-disabled"} <= drill.codes()
    drill.recover()
    assert "bkctl autorecovery enable" in drill.transcript
    assert drill.read(ledger) == PAYLOADS


def test_a_bookie_whose_disk_was_wiped_leaves_and_joins_empty(drill: Drill) -> None:
    ledger = drill.write()
    # A drill before this one may have emptied a slow bookie, which then left: it would join without a question.
    bookie = [each.bookie_id for each in drill.local.bookies() if each.pid is not None][-1]
    assert drill.shell("local", "down", "--bookie", bookie).code == 0
    for name in ("journal", "ledgers"):
        shutil.rmtree(drill.directory / bookie / name)
    refused = drill.shell("local", "up")
    assert refused.code != 0
    assert "bookie-down" in drill.codes()
    drill.recover()
    assert f"bkctl bookies decommission {bookie} --yes" in drill.transcript
    assert drill.read(ledger) == PAYLOADS


def test_a_hung_bookie_continues(drill: Drill) -> None:
    ledger = drill.write()
    pid = drill.pid("bookie-0")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert drill.codes() & {"bookie-hung", "bookie-down"}
        drill.recover()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert f"kill -CONT {pid}" in drill.transcript
    assert drill.read(ledger) == PAYLOADS


def test_a_damaged_log_is_replaced_from_other_bookies(drill: Drill) -> None:
    ledger = drill.write("--ensemble-size", "2")
    (row,) = drill.shell("ledger", "show", ledger, "-o", "ndjson").rows
    bookie = next(iter(row["ensembles"].values()))[0]
    assert drill.shell("autorecovery", "delay", "1h").code == 0
    assert drill.shell("local", "down", "--bookie", bookie).code == 0
    entry = int(ledger).to_bytes(8, "big") + (3).to_bytes(8, "big")
    for path in (drill.directory / bookie / "ledgers").rglob("*.log"):
        data = bytearray(path.read_bytes())
        if (at := data.find(entry)) >= 0:
            data[at] = 0xFF
        path.write_bytes(data)
    assert drill.shell("local", "up").code == 0
    assert drill.shell("autorecovery", "delay", "0").code == 0
    assert drill.shell("ledger", "verify", ledger).code == 3
    assert "ledgers-unreadable" in drill.codes()
    drill.recover()
    assert f"bkctl autorecovery mark {ledger} --missing {bookie}" in drill.transcript
    assert drill.shell("ledger", "verify", ledger).code == 0
    assert drill.read(ledger) == PAYLOADS
    # The damaged copy stays on its disk, and a read of it would raise the alarm in a later drill.
    drill.local.down()
    shutil.rmtree(drill.directory)


def test_a_topic_that_cannot_be_loaded_is_loaded_again(drill: Drill) -> None:
    options = [word for name, value in TOPIC.items() for word in ("--custom-metadata", f"{name}={value}")]
    ledger = drill.write("--ensemble-size", "2", *options)
    (row,) = drill.shell("ledger", "show", ledger, "-o", "ndjson").rows
    for bookie in next(iter(row["ensembles"].values())):
        os.kill(drill.pid(bookie), signal.SIGKILL)
    eventually(lambda: "ledgers-unavailable" in drill.codes())
    assert drill.read(ledger) == []
    drill.recover()
    assert drill.read(ledger) == PAYLOADS


@pytest.fixture
def slow_sync(tmp_path: Path) -> Path:
    """A library before libc, with which each sync of a process takes 300 ms longer."""
    compiler = shutil.which("cc") or require("cc", "a C compiler is not installed")
    (tmp_path / "slow.c").write_text(SLOW_SYNC)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "slow.so", tmp_path / "slow.c"], check=True)
    return tmp_path / "slow.so"


def write_one_by_one(uri: str, bookies: list[str], count: int) -> str:
    """Write entries that each wait for a sync of their own on all of `bookies`."""

    async def work() -> str:
        with open_cluster(uri) as cluster:
            async with BookKeeper(cluster, only=bookies) as client:
                size = len(bookies)
                writer = await client.create_ledger(ensemble_size=size, write_quorum_size=size, ack_quorum_size=size)
                for number in range(count):
                    await writer.add(b"%d" % number)
                await writer.close()
                return str(writer.ledger_id)

    return run_client(work())


def test_a_bookie_with_a_slow_disk_is_emptied_and_leaves(
    drill: Drill, slow_sync: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, *others = sorted(each.bookie_id for each in drill.local.bookies())[-3:]
    assert drill.shell("local", "down", "--bookie", slow).code == 0
    monkeypatch.setenv("LD_PRELOAD", str(slow_sync))
    assert drill.shell("local", "up").code == 0
    monkeypatch.delenv("LD_PRELOAD")
    for _ in range(4):  # On a busy machine, a sync of the others may take long, too.
        ledger = write_one_by_one(drill.local.metadata_uri, [slow, *others], 60)
        if found := "bookie-slow" in drill.codes():
            break
    assert found
    drill.recover()
    assert f"bkctl bookies drain {slow} --yes" in drill.transcript
    assert f"bkctl bookies decommission {slow} --yes" in drill.transcript
    assert drill.shell("ledger", "verify", ledger).code == 0
    assert drill.read(ledger) == [str(number) for number in range(60)]


def test_a_lost_metadata_store_is_waited_for_and_loses_nothing(
    etcd_server: Callable[[], EtcdServer], tmp_path: Path
) -> None:
    store = etcd_server()
    drill = Drill(tmp_path, store.metadata_uri())
    assert drill.shell("cluster", "init").code == 0
    settings = {
        "httpServerEnabled": "true",
        "httpServerPort": 0,
        "autoRecoveryDaemonEnabled": "true",
        "zkTimeout": 3000,
    }
    bookies = OwnCluster(store.metadata_uri(), tmp_path, STORAGES, settings)
    writers = []
    try:
        bookies.ensure_up()
        eventually(drill.is_healthy)
        ledger = drill.write()
        writers.append(writer := drill.shell.process("ledger", "write", "-o", "ndjson"))
        assert writer.stdin is not None
        writer.stdin.write("\n".join(PAYLOADS[:10]).encode() + b"\n")
        writer.stdin.flush()
        eventually(
            lambda: {"OPEN", "CLOSED"} == {row["state"] for row in drill.shell("ledger", "list", "-o", "ndjson").rows}
        )
        store.kill()
        for number in range(10, 20):
            time.sleep(OUTAGE_S / 10)
            writer.stdin.write(f"{PAYLOADS[number]}\n".encode())
            writer.stdin.flush()
        during = drill.shell("cluster", "health", "detail", "--timeout", "3s")
        drill.show(f"(the store is down) {during.err}", ["", "x"])
        assert during.code == 6
        store.start()
        drill.recover()
        out, err = writer.communicate("\n".join(PAYLOADS[20:]).encode() + b"\n")
        assert writer.returncode == 0, err
        during_outage = str(json.loads(out.splitlines()[-1])["ledgerId"])
        assert drill.read(ledger) == drill.read(during_outage) == PAYLOADS
        assert {row["state"] for row in drill.shell("bookies", "list", "-o", "ndjson").rows} == {"rw"}
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
        bookies.kill()


@pytest.fixture
def apache(java: Java, zookeeper: ZooKeeperServer, tmp_path: Path) -> Iterator[ApacheCluster]:
    """Four bookies of Apache's with auto-recovery."""
    storages, settings = (SORTED, INTERLEAVED, DB, SORTED), {"autoRecoveryDaemonEnabled": "true"}
    cluster = ApacheCluster(
        java, zookeeper, tmp_path / "apache", root=zookeeper.new_root(), storages=storages, settings=settings
    )
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.java
def test_a_bookie_of_apaches_that_is_down_is_replaced(apache: ApacheCluster) -> None:
    drill = Drill(apache.directory, apache.metadata_uri)
    eventually(drill.is_healthy)
    ledger = drill.write("--ensemble-size", "3")
    (row,) = drill.shell("ledger", "show", ledger, "-o", "ndjson").rows
    lost = next(iter(row["ensembles"].values()))[0]
    apache.by_id(lost).kill()
    eventually(lambda: "bookie-down" in drill.codes())
    drill.recover()
    assert f"bkctl why bookie {lost}" in drill.transcript
    assert drill.shell("ledger", "verify", ledger).code == 0
    assert drill.read(ledger) == PAYLOADS


@pytest.mark.java
def test_a_bookie_of_apaches_whose_disk_was_wiped_leaves_and_joins_empty(apache: ApacheCluster) -> None:
    drill = Drill(apache.directory, apache.metadata_uri)
    eventually(drill.is_healthy)
    ledger = drill.write("--ensemble-size", "3")
    (row,) = drill.shell("ledger", "show", ledger, "-o", "ndjson").rows
    wiped = apache.by_id(next(iter(row["ensembles"].values()))[0])
    wiped.stop()
    for directory in (wiped.journal_dir, wiped.ledger_dir):
        shutil.rmtree(directory)
    wiped.launch()
    eventually(lambda: not wiped.running and "InvalidCookieException" in wiped.log_tail(0, 1 << 20))
    eventually(lambda: "bookie-down" in drill.codes())
    drill.recover()
    assert f"bkctl bookies decommission {wiped.bookie_id} --yes" in drill.transcript
    wiped.start()
    drill.recover()
    assert drill.shell("ledger", "verify", ledger).code == 0
    assert drill.read(ledger) == PAYLOADS
