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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.waiting import LIMIT_S, eventually

from bkctl.bookie.local import LocalCluster
from bkctl.formats.metadata import LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster

PAYLOADS = [f"entry {number} of a drill" for number in range(40)]
TOPIC = {"application": "pulsar", "component": "managed-ledger", "pulsar/managed-ledger": "public/default/persistent/t"}


class Drill:
    """A local cluster with auto-recovery, a ledger on it, and the operator who follows what bkctl prints."""

    def __init__(self, directory: Path) -> None:
        self.shell = CommandLine(None)
        self.directory = directory
        self.options: tuple[str, ...] = ()
        self.transcript: list[str] = []
        self.tried: Counter[str] = Counter()

    @property
    def local(self) -> LocalCluster:
        return LocalCluster(self.directory)

    def up(self) -> None:
        assert self.shell("local", "up", "--dir", self.directory, "--bookies", 4, "--autorecovery").code == 0
        eventually(lambda: self.shell("cluster", "health").out == b"OK\n")

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
        self.transcript.append(line)
        print(line)
        words = shlex.split(line)
        if words[0] != "bkctl":
            subprocess.run(words, check=True, timeout=LIMIT_S)
            return None
        done = self.shell(*words[1:], *(() if "-o" in words else ("-o", "json")))
        with contextlib.suppress(ValueError):
            return json.loads(done.out)
        return None

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
            if not findings:
                break
            assert time.monotonic() < deadline, (findings, self.transcript)
            self.follow(findings[0]["nextCommand"])
            time.sleep(1)
        assert self.shell("cluster", "health", *self.options).out == b"OK\n"


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
def drill(cluster_directory: Path) -> Drill:
    drill = Drill(cluster_directory)
    drill.up()
    return drill


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
    drill.options = ("--stuck-after", "0s")
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
    assert drill.shell("local", "down", "--bookie", "bookie-3").code == 0
    for name in ("journal", "ledgers"):
        shutil.rmtree(drill.directory / "bookie-3" / name)
    refused = drill.shell("local", "up")
    assert refused.code != 0
    assert "bookie-down" in drill.codes()
    drill.recover()
    assert "bkctl bookies decommission bookie-3 --yes" in drill.transcript
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
