"""`bkctl top`: its rows for scripts, its screen and keys on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from support.bookie_load import api_of, metrics, register, replies
from support.command_line import CommandLine
from support.fake_http import FakeServer
from support.waiting import LIMIT_S

from bkctl.commands.top_screen import Screen, keys, spark
from bkctl.http.bookie_load import LoadWatch
from bkctl.metadata.cluster import open_cluster

from .conftest import Cli


@pytest.fixture(autouse=True)
def _answers_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bkctl.commands.kit.access.METRICS_WAIT_S", LIMIT_S)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    server.replies = replies(metrics(100, 10), metrics(400, 10))
    yield server
    server.close()


@pytest.fixture
def uri(tmp_path: Path, fake: FakeServer) -> Iterator[str]:
    """A cluster of a bookie with an HTTP server and one without."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        register(cluster, "b1", fake.url)
        register(cluster, "b2", None)
        yield uri


def test_the_help_says_which_ledgers_are_counted(cli: Cli) -> None:
    assert "ledgers in memory (LEDGERS: few after a start)" in " ".join(cli("top", "--help").out.split())


def test_once_prints_the_rates_of_one_interval(cli: Cli, uri: str) -> None:
    rows = cli("top", "--once", "--interval", "200ms", "-u", uri, "-o", "json").json
    assert [row["bookieId"] for row in rows] == ["b1", "b2"]
    assert 0 < rows[0]["addsPerSecond"] <= 1500
    assert (rows[0]["readsPerSecond"], rows[0]["addP99Ms"], rows[0]["journalSyncP99Ms"]) == (0, 7.5, 4.5)
    assert (rows[0]["usedPercent"], rows[0]["garbageCollection"], rows[0]["ledgerCount"]) == (75, "major", 17)
    assert rows[0]["problem"] is None
    assert (rows[1]["state"], rows[1]["addsPerSecond"]) == ("rw", None)
    assert "registered no HTTP server" in rows[1]["problem"]


def test_once_has_the_same_rows_in_every_form(cli: Cli, uri: str) -> None:
    (row,) = [row for row in cli("top", "--once", "-u", uri, "-o", "ndjson").rows if row["bookieId"] == "b1"]
    assert row["underreplicatedCount"] == row["clusterUnderreplicatedCount"] == 0
    assert "Replication was never audited" in cli("top", "--once", "-u", uri).err
    table = cli("top", "--once", "-u", uri).out
    assert table.split()[:3] == ["BOOKIE", "STATE", "ADDS/S"]
    assert "7.5 ms" in table
    assert cli("top", "--once", "-u", uri, "-o", "id").out == "b1\nb2\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "add --once"),
        (("-o", "json"), "-o json is for scripts"),
        (("--once", "--interval", "0"), "must be 0.1 s or more"),
    ],
)
def test_top_without_a_terminal_is_refused(cli: Cli, uri: str, words: tuple[str, ...], problem: str) -> None:
    answer = cli("top", *words, "-u", uri)
    assert answer.code == 2
    assert problem in answer.err


def test_the_form_in_the_environment_does_not_refuse_top(cli: Cli, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BKCTL_OUTPUT", "ndjson")
    assert "'bkctl top' draws on a terminal" in cli("top", "-u", uri).err


def test_once_loads_no_rich(uri: str) -> None:
    code = (
        f"import sys; sys.argv = ['bkctl', 'top', '--once', '--interval', '100ms', '-u', {uri!r}]\n"
        "from bkctl.commands.main import main\n"
        "try: main()\n"
        "except SystemExit as e: print('rich' in sys.modules, e.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "False 0"


# --- the screen -----------------------------------------------------------------------------------------------------


@pytest.fixture
def screen(uri: str, fake: FakeServer) -> Screen:
    """A screen after two looks."""
    screen = Screen()
    with open_cluster(uri) as cluster:
        loads = LoadWatch(cluster, api_of, wait_s=60)
        for _ in range(2):
            screen.take(loads.look(), None)
    return screen


def lines(screen: Screen, width: int = 80, height: int = 24) -> list[str]:
    """The lines that the screen draws, each within the terminal."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(screen, height=height)
    drawn = out.getvalue().removesuffix("\n").split("\n")
    assert len(drawn) == height
    assert max(map(len, drawn)) <= width
    return [line.rstrip() for line in drawn]


def test_the_table_fits_an_80_by_24_terminal(screen: Screen) -> None:
    drawn = lines(screen)
    assert drawn[1].startswith("2 bookies: 2 rw  adds ")
    assert drawn[3].split() == [
        "BOOKIE", "ST", "ADD/S", "READ/S", "ADD99", "READ99", "SYNC99", "DISK", "GC", "LEDGERS", "UNDER", "LOAD",
    ]  # fmt: skip
    row = drawn[4].split()
    assert (row[0], row[1], row[3], row[4], row[6:11]) == ("b1", "rw", "0", "7.5", ["4.5", "75%", "major", "17", "0"])
    assert row[11] == "█"
    assert drawn[5].split()[:5] == ["b2", "rw", "-", "-", "-"]
    assert drawn[-1].startswith("q quit")


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 10), (60, 24), (100, 30), (200, 60)])
def test_both_pages_fit_every_terminal(screen: Screen, width: int, height: int) -> None:
    assert lines(screen, width, height)
    screen.press("enter")
    assert lines(screen, width, height)


def test_the_selected_bookie_says_why_numbers_are_missing(screen: Screen) -> None:
    assert not any("registered no HTTP server" in line for line in lines(screen))
    screen.press("down")
    assert any(line.startswith("b2: Bookie b2 registered no HTTP server") for line in lines(screen))


def test_enter_opens_a_bookies_page_and_escape_leaves_it(screen: Screen) -> None:
    screen.press("enter")
    page = "\n".join(lines(screen))
    assert "journal sync" in page
    assert "750 B of 1000 B used (75.0%)" in page
    assert "major; compactions: 3 major, 4 minor; reclaimed: 1024 B" in page
    screen.press("down")
    assert "Bookie b2 registered no HTTP server" in "\n".join(lines(screen))
    screen.press("escape")
    assert lines(screen)[3].startswith("BOOKIE")


def test_keys_sort_reverse_and_filter(screen: Screen) -> None:
    screen.press("r")
    assert [line.split()[0] for line in lines(screen)[4:6]] == ["b2", "b1"]
    screen.press("r")
    screen.press("s")
    screen.press("s")
    drawn = lines(screen)
    assert "s sort (ADD/S)" in drawn[-1]
    assert [line.split()[0] for line in drawn[4:6]] == ["b1", "b2"], "a bookie without the number is last"
    for key in ("/", "B", "3", "backspace", "2", "enter"):
        screen.press(key)
    drawn = lines(screen)
    assert drawn[4].split()[0] == "b2"
    assert "1 shown" in drawn[1]
    assert "filter 'B2'" in drawn[-1]
    screen.press("escape")
    assert "shown" not in lines(screen)[1]
    assert not screen.press("q")


def test_a_problem_of_the_store_is_shown_above_the_last_numbers(screen: Screen) -> None:
    screen.take(None, "zk:2181 is down")
    drawn = lines(screen)
    assert drawn[1] == "zk:2181 is down"
    assert drawn[4].startswith("b1")


def test_bars_grow_with_the_values() -> None:
    assert spark([0, 1, 2, 4, 8], 4) == "▂▃▅█"
    assert spark([0, 0], 4) == "▁▁"
    assert spark([], 4) == ""


# --- the terminal ---------------------------------------------------------------------------------------------------


def test_keys_are_named_and_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(theirs)
        with suppress(ZeroDivisionError), keys() as pressed:
            assert not termios.tcgetattr(theirs)[3] & (termios.ECHO | termios.ICANON)
            os.write(ours, b"q\x1b[A\x1bOB\x1b[99~\x7f\r\x01\xc3\xa9\x1b")
            found: list[str] = []
            while "escape" not in found:
                found += pressed(60)
            assert found == ["q", "up", "down", "backspace", "enter", "é", "escape"]
            assert pressed(0) == []
            raise ZeroDivisionError
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


def test_top_draws_on_a_terminal_and_q_leaves_it_as_it_was(uri: str) -> None:
    code, seen = CommandLine(uri).terminal("top", "--interval", "100ms", type_in="\rq", asks="b1 ")
    assert code == 0
    assert "\x1b[?1049h" in seen
    assert "journal sync" in seen
    assert seen.rpartition("\x1b[?1049l")[2].replace("\x1b[?25h", "") == ""


def test_ctrl_c_leaves_top_as_an_interrupt(uri: str) -> None:
    code, seen = CommandLine(uri).terminal("top", type_in="\x03", asks="b1 ")
    assert code == 130
    assert seen.rpartition("\x1b[?1049l")[2].endswith("bkctl: Interrupted\n")


def test_an_error_before_the_first_look_draws_nothing(tmp_path: Path) -> None:
    code, seen = CommandLine(f"sqlite://{tmp_path / 'none.db'}").terminal("top")
    assert code == 4
    assert "\x1b[?1049h" not in seen
