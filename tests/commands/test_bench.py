from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine

from bkctl.bookie.local import LocalCluster
from bkctl.client.ledger import BookKeeper

from .conftest import Cli


@pytest.fixture(autouse=True)
def _connected(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_METADATA_URI", cluster.metadata_uri)


def ledgers(cli: Cli) -> set[str]:
    return set(cli("ledger", "list", "--all-scopes", "-o", "id").out.split())


@pytest.mark.parametrize("protocol", ["v2", "v3"])
def test_bench_measures_adds_and_reads_and_deletes_its_ledgers(cli: Cli, protocol: str) -> None:
    before = ledgers(cli)
    done = cli(
        "bench", "mixed", "--entries", "105", "--size", "2KiB", "--ledgers", "2", "--batch", "10",
        "--protocol", protocol, "-o", "json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["operation"] for row in done.json] == ["adds", "reads"]
    for row in done.json:
        assert (row["entryCount"], row["batches"], row["entrySize"], row["ledgerCount"]) == (105, 11, 2048, 2)
        assert sum(step["count"] for step in row["histogram"]) == 11
        times = [row[f"p{percent}Milliseconds"] for percent in ("50", "95", "99", "999")] + [row["maxMilliseconds"]]
        assert times == sorted(times)
        assert row["entriesPerSecond"] > 0
        assert row["mebibytesPerSecond"] > 0
    assert done.err == "Deleted 4 temporary ledgers\n"
    assert ledgers(cli) == before


def test_bench_reads_more_than_its_ledgers_hold(cli: Cli) -> None:
    for order in ((), ("--random",)):
        done = cli(
            "bench", "reads", "--entries", "5", "--batch", "12", "--duration", "1ms", "--ledger-scope-id", "7",
            *order, "-o", "json",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert done.json[0]["entryCount"] % 12 == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--ensemble-size", "9"), 6),
        (("--write-quorum", "4"), 2),
        (("--size", "1GiB"), 2),
        (("--entries", "0"), 2),
        (("--batch", "0"), 2),
        (("--entries", "5", "--duration", "1s"), 2),
    ],
)
def test_bench_that_cannot_run_leaves_no_ledger(cli: Cli, words: tuple[str, ...], code: int) -> None:
    before = ledgers(cli)
    done = cli("bench", "adds", *words)
    assert (done.code, done.err.count("\n")) == (code, 1)
    assert ledgers(cli) == before


def test_an_interrupt_while_bench_deletes_its_ledgers_leaves_none(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    before, delete = ledgers(cli), BookKeeper.delete_ledger
    deleted = []

    async def interrupted(self: BookKeeper, *arguments: int, **settings: int) -> None:
        deleted.append(arguments)
        if len(deleted) == 1:
            signal.raise_signal(signal.SIGINT)
        await delete(self, *arguments, **settings)

    monkeypatch.setattr(BookKeeper, "delete_ledger", interrupted)
    done = cli("bench", "adds", "--entries", "3", "--ledgers", "3")
    assert (done.code, len(deleted)) == (130, 3)
    assert done.err == "Deleted 3 temporary ledgers\nbkctl: Interrupted: Measuring, 3 of 3 entries\n"
    assert ledgers(cli) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_bench_deletes_its_ledgers_and_says_so(cli: Cli, number: signal.Signals) -> None:
    before = ledgers(cli)
    command = [sys.executable, "-m", "bkctl", "bench", "adds", "--duration", "1h", "--ledgers", "3", "--rate", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(ledgers(cli) - before) < 3:
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out) == (128 + number, "")
    assert "Deleted 3 temporary ledgers\n" in err
    assert err.splitlines()[-1].startswith("bkctl: Interrupted: Measuring")
    assert ledgers(cli) == before


def test_ledgers_of_a_killed_bench_can_be_found(cli: Cli) -> None:
    command = [sys.executable, "-m", "bkctl", "bench", "adds", "--duration", "1h"]
    find = ("ledger", "list", "--custom-metadata", "application=bkctl-bench", "-o", "id")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not cli(*find).out:
            assert process.poll() is None
        process.kill()
    (ledger,) = cli(*find).out.split()
    assert cli("ledger", "delete", ledger, "--yes").code == 0


def test_bench_draws_a_histogram_on_a_terminal_only(cli: Cli, cluster: LocalCluster) -> None:
    words = ("bench", "adds", "--entries", "200")
    assert "█" not in cli(*words).out
    line = CommandLine(cluster.metadata_uri)
    for columns in (60, 80):
        code, seen = line.terminal(*words, columns=columns)
        assert code == 0, seen
        assert "Latency of adds, in batches:" in seen
        assert "  up to" in seen
        lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()
        assert max(len(each) for each in lines if not each.startswith("Left out")) <= columns
    assert "█" not in line.terminal(*words, "-o", "ndjson")[1]


def test_bench_is_in_the_audit_log(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", str(tmp_path / "audit"))
    assert cli("bench", "adds", "--entries", "10").code == 0
    (line, *_) = cli("audit", "list", "-o", "ndjson").rows
    assert "bench adds" in str(line)
