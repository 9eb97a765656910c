"""Long work: its line on the terminal, its state for other terminals, pauses and rates."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.waiting import LIMIT_S, eventually

from bkctl.bookie.local import LocalCluster
from bkctl.commands.kit import work as work_module
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.job import Activity
from bkctl.commands.kit.output import RowWriter
from bkctl.commands.kit.work import WorkFile, list_work
from bkctl.commands.progress import WORK_TABLE_COLUMNS
from bkctl.formats.metadata import DigestType, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.pace import Pace

from ..support.command_line import CommandLine
from .conftest import Cli
from .files import make
from .test_widths import Screen

LEDGER_COUNT = 600
BOOKIES = ("b1:1", "b2:1", "b3:1")


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of LEDGER_COUNT ledgers."""
    directory = tmp_path_factory.mktemp("export")
    closed = LedgerMetadata(
        3, 2, 2, DigestType.CRC32C, b"", (Fragment(0, BOOKIES),), LedgerState.CLOSED, 10, 3, 1755770000123, {}
    )
    uri = f"sqlite://{directory}/m.db"
    with open_cluster(uri, create=True) as cluster:
        for ledger_id in range(LEDGER_COUNT):
            cluster.ledgers.create(LedgerId(0, ledger_id), closed)
    file = directory / "export.ndjson"
    assert CommandLine(uri)("metadata", "export", "-f", file).code == 0
    return file


@pytest.fixture
def target(tmp_path: Path) -> CommandLine:
    """Commands on a store that is not there yet."""
    return CommandLine(f"sqlite://{tmp_path}/target.db")


@contextmanager
def importing(target: CommandLine, export: Path, rate: str) -> Iterator[subprocess.Popen[bytes]]:
    """Import in another process."""
    process = target.process("metadata", "import", export, "--rate", rate)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def work_of(cli: Cli, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("progress", *arguments, "-o", "json").out)
    return found


def wait_for(cli: Cli, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the state of the first work that fits, once there is one."""
    fitting: list[dict[str, Any]] = []

    def fits() -> list[dict[str, Any]]:
        done = cli("progress", "-o", "ndjson")
        assert done.code == 0, done.err
        fitting[:] = [row for row in done.rows if condition(row)]
        return fitting

    eventually(fits)
    return fitting[0]


def test_import_is_listed_paused_and_given_another_rate(cli: Cli, target: CommandLine, export: Path) -> None:
    with importing(target, export, "2") as process:
        state = wait_for(cli, lambda work: work["stage"] == "Importing")
        assert (state["state"], state["total"], state["unit"]) == ("running", LEDGER_COUNT + 1, "records")
        assert state["command"].startswith(f"bkctl metadata import {export}")
        assert (state["stepsPerSecondMax"], state["bytesPerSecondMax"]) == (2.0, None)
        name = state["id"]
        directory = Path(os.environ["XDG_STATE_HOME"]) / "bkctl" / "progress"
        assert stat.S_IMODE((directory / f"{name}.json").stat().st_mode) == 0o600

        paused = work_of(cli, "pause", name[:4])
        assert paused["state"] == "paused"
        assert work_of(cli, name)["state"] == "paused"

        assert work_of(cli, "rate", name, "1000000")["stepsPerSecondMax"] == 1_000_000
        time.sleep(1.5)  # more than the work needs for the rest at this rate
        still = work_of(cli, name)
        assert (still["state"], still["done"]) == ("paused", paused["done"])
        assert still["done"] < LEDGER_COUNT
        assert process.poll() is None

        work_of(cli, "resume", name)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    ended = work_of(cli, name)
    assert ended["state"] == "done"
    assert ended["ended"] is not None
    assert sorted(path.name for path in directory.iterdir()) == [f"{name}.json"]
    refused = cli("progress", "pause", name)
    assert refused.code == 5
    assert "does not run: done" in refused.err


@pytest.mark.parametrize("words", [("copy", "--new-id"), ("verify",)])
def test_asynchronous_work_is_paused_and_given_another_rate(
    cli: Cli, cluster: LocalCluster, words: tuple[str, ...], tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number:01000}\n" for number in range(400)))
    line = CommandLine(cluster.metadata_uri)
    [ledger] = line("ledger", "write", lines, "-o", "id").ids
    with line.process("ledger", *words, ledger, "--rate", "2 entries") as process:
        try:
            state = wait_for(cli, lambda work: work["command"].startswith(f"bkctl ledger {words[0]}") and work["done"])
            paused = work_of(cli, "pause", state["id"])
            assert (paused["state"], paused["stepsPerSecondMax"]) == ("paused", 2)
            assert work_of(cli, "rate", state["id"], "none")["stepsPerSecondMax"] is None
            time.sleep(1.5)  # more than the work needs for the rest without a limit
            still = work_of(cli, state["id"])
            assert still["state"] == "paused"
            assert still["done"] <= paused["done"] + 1
            assert process.poll() is None
            work_of(cli, "resume", state["id"])
            _, err = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, err
        finally:
            if process.poll() is None:
                process.kill()
    assert work_of(cli, state["id"])["state"] == "done"


@pytest.mark.parametrize("words", [("journal", "verify"), ("entrylog", "verify", "--no-digests")])
def test_verification_of_files_is_paused_and_given_another_rate(
    cli: Cli, words: tuple[str, ...], tmp_path: Path
) -> None:
    make(tmp_path)
    place = tmp_path / ("journal" if words[0] == "journal" else "ledgers")
    expected = cli(*words, "--dir", place, "-o", "json")
    assert expected.json
    with CommandLine(None).process(*words, "--dir", place, "--rate", "0.01 entries", "-o", "json") as process:
        try:
            state = wait_for(cli, lambda work: f"{words[0]} verify" in work["command"])
            assert work_of(cli, "pause", state["id"])["state"] == "paused"
            assert work_of(cli, "rate", state["id"], "none")["stepsPerSecondMax"] is None
            assert process.poll() is None
            work_of(cli, "resume", state["id"])
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                process.kill()
    assert (process.returncode, json.loads(out)) == (expected.code, expected.json), err


def test_killed_work_is_recognised(cli: Cli, target: CommandLine, export: Path) -> None:
    with importing(target, export, "2") as process:
        name = wait_for(cli, lambda work: work["stage"] == "Importing")["id"]
        process.kill()
        process.wait()
    assert work_of(cli, name)["state"] == "killed"


def test_interrupted_work_says_so(cli: Cli, target: CommandLine, export: Path) -> None:
    with importing(target, export, "2") as process:
        name = wait_for(cli, lambda work: work["stage"] == "Importing")["id"]
        work_of(cli, "pause", name)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert b"Importing" in err
    assert work_of(cli, name)["state"] == "interrupted"


def test_work_without_a_directory_works_without_an_id(
    cli: Cli, target: CommandLine, export: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BKCTL_AUDIT_LOG", "none")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    with importing(target, export, "300") as process:
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert cli("progress", "-o", "json").out.strip() == "[]"


def test_short_commands_leave_no_file(cli: Cli, target: CommandLine, export: Path) -> None:
    assert cli("metadata", "import", export, "-u", target.settings["METADATA_URI"]).code == 0
    assert [row["stage"] for row in cli("progress", "-o", "ndjson").rows] in ([], ["Importing"])
    assert cli("context", "list").code == 0
    assert cli("progress", "rate", "ffffff", "20").code == 4


def test_terminal_shows_id_bar_rate_and_time_left(cli: Cli, target: CommandLine, export: Path) -> None:
    seen: list[str] = []
    plain_terminal = target.terminal("metadata", "import", export, "--rate", "150", columns=100, drawn=seen)
    assert plain_terminal[0] == 0
    [row] = cli("progress", "-o", "ndjson").rows
    lines = [line for line in seen if "Importing" in line]
    shown = re.compile(rf"^\S {row['id']} Importing +━.* ([0-9 ]+)%  [0-9,]+ of 601 records  .*left")
    percents = [int(match[1]) for line in lines if (match := shown.match(line))]
    assert percents, lines
    assert percents == sorted(percents)
    assert "Importing" not in plain_terminal[1]


@pytest.mark.parametrize(
    ("unit", "done", "total", "expected"),
    [
        ("parts", 1, None, "1 part"), ("entries", 1, None, "1 entry"), ("entries", 2, None, "2 entries"),
        ("parts", 1, 3, "1 of 3 parts"), ("bytes", 1, None, "1 B"), ("", 1, None, "1"), ("parts", 0, None, ""),
    ],
)  # fmt: skip
def test_amounts_agree_in_number(unit: str, done: int, total: int | None, expected: str) -> None:
    activity = Activity("Working", unit=unit, total=total)
    activity.advance(done)
    assert activity.amount() == expected


def test_percentage_of_a_stage_never_decreases() -> None:
    activity = Activity("Moving", total=10)
    shares = []
    for done, total in ((5, 10), (5, 20), (9, 20), (20, 20)):
        activity.update(done, total)
        shares.append(activity.share)
    assert shares == [0.5, 0.5, 0.5, 1.0]
    activity.begin("Verifying", 4)
    assert activity.share == 0


def test_works_of_other_machines_and_old_ones_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"state": "running", "isSteerable": True}
    for name in ("aaaaaa", "bbbbbb", "cccccc"):
        WorkFile(tmp_path, name, ["bkctl", "ledger", "copy", "--password", "secret"]).publish(**state)
    assert [each["id"] for each in list_work(tmp_path)] == ["aaaaaa", "bbbbbb", "cccccc"]
    assert "secret" not in (tmp_path / "aaaaaa.json").read_text()
    foreign = json.loads((tmp_path / "aaaaaa.json").read_text())
    (tmp_path / "aaaaaa.json").write_text(json.dumps(foreign | {"host": "elsewhere"}))
    reused = json.loads((tmp_path / "bbbbbb.json").read_text())
    (tmp_path / "bbbbbb.json").write_text(json.dumps(reused | {"start": "1"}))
    (tmp_path / "dddddd.json").write_text("{")
    (tmp_path / "eeeeee.json").write_text("[1]")
    assert [(each["id"], each["state"]) for each in list_work(tmp_path)] == [
        ("cccccc", "running"),
        ("bbbbbb", "killed"),
    ]
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    list_work(tmp_path)
    assert "bbbbbb.json" not in os.listdir(tmp_path)
    assert "cccccc.json" in os.listdir(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"bytesPerSecond":"x"}', b"\xff"])
def test_damaged_requests_change_nothing(tmp_path: Path, damage: bytes) -> None:
    work = WorkFile(tmp_path, "aaaaaa", ["bkctl"])
    work.publish(state="running")
    (tmp_path / "aaaaaa.rate").write_bytes(damage)
    pace = Pace(bytes_per_s=5)
    work.steer(pace)
    assert (pace.bytes_per_s, pace.is_paused) == (5, False)


def test_table_names_the_unit_of_what_is_done(cli: Cli) -> None:
    work = WorkFile(work_module.progress_directory(os.environ), "aaaaaa", ["bkctl"])
    for unit, expected in (("ledgers", "2,000 ledgers"), ("bytes", "2000 B"), (None, "2,000")):
        work.publish(state="running", stage="Looking", unit=unit, done=2000, isSteerable=False, hasBytes=False)
        assert f"  {expected} " in cli("progress").out


def test_work_that_cannot_be_paused_says_so(cli: Cli) -> None:
    work = WorkFile(work_module.progress_directory(os.environ), "aaaaaa", ["bkctl"])
    work.publish(state="running", stage="Looking", unit=None, isSteerable=False, hasBytes=False)
    refused = cli("progress", "pause", "aaaaaa")
    assert refused.code == 5
    assert "cannot be paused" in refused.err


def test_running_work_is_first_and_keeps_percent_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["bkctl", "bookies", "recover", "bookie-1.example.org:3181", "--rate", "50MB/s", "--resume", "x.ndjson"]
    for name, state in (("aaaaaa", "done"), ("bbbbbb", "running")):
        WorkFile(tmp_path, name, command).publish(
            state=state, stage="Copying entries", done=123_456_789, total=987_654_321, unit="entries", percent=12,
            etaSeconds=5400, rate=12_345.0,
        )  # fmt: skip
    rows = list_work(tmp_path)
    assert [row["id"] for row in rows] == ["bbbbbb", "aaaaaa"]
    monkeypatch.setenv("COLUMNS", "80")
    screen = Screen()
    with RowWriter(WORK_TABLE_COLUMNS, Output.TABLE, stream=screen) as writer:
        writer.rows(rows)
    header = screen.getvalue().splitlines()[0].split()
    assert {"PERCENT", "LEFT"} <= {*header} | {*screen.getvalue().split()}
    assert "12%" in screen.getvalue()
    assert "1 h 30 min" in screen.getvalue()
    assert max(map(len, screen.getvalue().splitlines())) <= 80
