"""Processes that share the work of a command, and the lines of a long list of ledgers that they make."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS
from bkctl.metadata.store import NEW

#: More than one process prints alone, and more than the others have at once.
LEDGERS = 8_000
#: A ledger of those that the other processes have.
LATE = 7_000
STEADY_NAMES = [column.name for column in LEDGER_COLUMNS.columns if not column.ages]
#: Two lists of the same ledgers are alike, but for columns of ages.
STEADY = ("--columns", ",".join(STEADY_NAMES)) if len(STEADY_NAMES) < len(LEDGER_COLUMNS.columns) else ()

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="processes are forked on Linux, on several CPUs"
)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"sqlite://{tmp_path_factory.mktemp('forks')}/metadata.db"
    metadata = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b0:1",)),), ctime_ms=1_755_770_000_123)
    with open_cluster(uri, create=True) as cluster:
        nodes = [
            (cluster.ledgers.path(ledger), metadata._replace(length=ledger.ledger_id % 3).serialize(), NEW)
            for ledger in (LedgerId(0, number) for number in range(LEDGERS))
        ]
        assert not [each for each in cluster.store.put_many(nodes) if isinstance(each, Exception)]
    return uri


def bkctl(uri: str, *words: str, cpus: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a command on that many CPUs; on one it forks nothing."""
    chosen = sorted(os.sched_getaffinity(0))[:cpus]
    command = [sys.executable, "-m", "bkctl", "-u", uri, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, preexec_fn=lambda: os.sched_setaffinity(0, chosen)
    )


@pytest.mark.parametrize(
    "words",
    [("-o", "ndjson", *STEADY), ("-o", "json", *STEADY), ("-o", "csv", *STEADY),
     ("-o", "ndjson", "--columns", "length,ledgerId"), ("-o", "csv", *STEADY, "--min-size", "2"),
     ("-o", "ndjson", *STEADY, "--after", "4000"), ("-o", "json", *STEADY, "--state", "CLOSED")],
)  # fmt: skip
def test_a_list_is_the_same_on_one_processor(uri: str, words: tuple[str, ...]) -> None:
    shared, alone = (bkctl(uri, "ledger", "list", *words, cpus=cpus) for cpus in (2, 1))
    assert (shared.returncode, shared.stderr) == (0, "")
    assert shared.stdout == alone.stdout


def test_damage_and_deletion_among_many_ledgers_touch_no_other(uri: str, tmp_path: Path) -> None:
    with open_cluster(uri) as cluster:
        store, path = cluster.store, cluster.ledgers.path
        kept = {number: store.get(path(LedgerId(0, number))) for number in (LATE, LATE + 1)}
        store.put(path(LedgerId(0, LATE)), b"damage", None)
        store.delete(path(LedgerId(0, LATE + 1)))
        try:
            ended = bkctl(uri, "ledger", "list", "-o", "ndjson")
            continued = bkctl(uri, "ledger", "list", "-o", "ndjson", "--keep-going")
        finally:
            for number, found in kept.items():
                assert found is not None
                store.put(path(LedgerId(0, number)), found.value, None)
    assert ended.returncode == 7
    assert f"ledger {LATE} at" in ended.stderr
    assert [int(json.loads(line)["ledgerId"]) for line in ended.stdout.splitlines()] == [*range(LATE)]
    assert continued.returncode == 3
    assert continued.stderr.count(f"ledger {LATE} at") == 1
    ids = [int(json.loads(line)["ledgerId"]) for line in continued.stdout.splitlines()]
    assert ids == [number for number in range(LEDGERS) if number not in (LATE, LATE + 1)]


def test_a_bookie_that_no_ledger_names_is_not_found(uri: str) -> None:
    missing = bkctl(uri, "ledger", "list", "-o", "json", "--bookie", "nowhere:1")
    assert (missing.returncode, missing.stdout) == (4, "")


PROGRAM = """
import os, sys, time
from bkctl.commands.kit.forks import Forks
from bkctl.errors import Corrupt

def work(item):
    if item == 3:
        raise Corrupt("three")
    if item == 5:
        os._exit(1)
    return item, os.getpid()

def items():
    yield from range(9)
    raise Corrupt("the end")

with Forks(work) as forks:
    try:
        for item, found in forks.map(items()):
            print(item, found and found[0], found is not None and found[1] != os.getpid())
    except Corrupt as error:
        print(error)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("none is left")
"""


def test_items_that_another_process_cannot_do_come_back_without_a_result() -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    lines = answer.stdout.splitlines()
    assert lines[:5] == ["0 0 True", "1 1 True", "2 2 True", "3 None False", "4 4 True"]
    # One of the three is gone from 5 on, and what it was given is left.
    assert lines[5:9] == ["5 None False", "6 6 True", "7 7 True", "8 None False"]
    assert lines[9:] == ["the end", "none is left"]
    assert answer.stderr == ""


WAITS = """
import os, sys, time
from bkctl.commands.kit.forks import Forks

with Forks(len) as forks:
    print(*(process for process, _ in forks._workers), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def waiting() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WAITS)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def is_alive(process: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_no_process_outlives_a_command_that_is_killed(waiting: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, others = waiting
    assert len(others) == 3
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(others[0], number)
    time.sleep(0.2)
    assert all(map(is_alive, others))  # These signals are for the command.
    process.kill()
    deadline = time.monotonic() + 30
    while any(map(is_alive, others)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, others))


def test_a_list_needs_no_news_of_its_processes(uri: str) -> None:
    command = f"trap '' CHLD; exec {sys.executable} -m bkctl -u {uri} ledger list -o ndjson"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.count("\n") == LEDGERS


def test_a_list_ends_with_its_reader(uri: str) -> None:
    command = f"{sys.executable} -m bkctl -u {uri} ledger list -o ndjson | head -n 1"
    answer = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert json.loads(answer.stdout)["ledgerId"] == "0"


def test_other_processes_make_the_lines_of_a_list(uri: str) -> None:
    process = subprocess.Popen([sys.executable, "-m", "bkctl", "-u", uri, "ledger", "list", "-o", "ndjson"], stdout=-1)
    assert process.stdout is not None
    with process:
        process.stdout.readline()  # The rest of the lines is more than a pipe holds.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert process.stdout.read().count(b"\n") == LEDGERS - 1
    assert len(children) == 3
    assert process.returncode == 0
