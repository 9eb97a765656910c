"""Trees and panels: on a terminal only, within its width, and rich is loaded for nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bookie_load import register
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW

from . import files
from .conftest import Cli


@pytest.fixture
def uri(tmp_path: Path) -> Iterator[str]:
    """A cluster of a bookie that is up and one that is down, with a ledger of two fragments."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        register(cluster, "b1", None)
        cluster.cookies.write("b2", Cookie("b2", ("/j",), ("/l",)), NEW)
        fragments = (Fragment(0, ("b1", "b2")), Fragment(10, ("b1", "b3")))
        cluster.ledgers.create(
            LedgerId(0, 7),
            LedgerMetadata(2, 2, 2, DigestType.CRC32C, b"", fragments, LedgerState.CLOSED, 100, 14),
        )
        yield uri


def test_locate_draws_a_tree_of_fragments_and_bookies(uri: str) -> None:
    code, seen = CommandLine(uri).terminal("--no-color", "ledger", "locate", 7)
    assert code == 0
    assert seen.splitlines() == [
        "ledger 7",
        "├── first entry 0  last entry 9",
        "│   ├── index 0  bookie b1  state rw  scopes no  entries 10",
        "│   └── index 1  bookie b2  state down  entries 10",
        "└── first entry 10  last entry 14",
        "    ├── index 0  bookie b1  state rw  scopes no  entries 5",
        "    └── index 1  bookie b3  state down  entries 5",
    ]


def test_states_have_their_colors_in_a_tree(uri: str) -> None:
    _, seen = CommandLine(uri).terminal("ledger", "locate", 7)
    assert "\x1b[32mrw\x1b[0m" in seen
    assert "\x1b[31mdown\x1b[0m" in seen


def test_health_draws_a_panel_for_each_finding(uri: str) -> None:
    code, seen = CommandLine(uri).terminal("--no-color", "cluster", "health", "--no-bookies", columns=60)
    lines = seen.splitlines()
    assert code == 3
    assert lines[0].startswith("╭─ error bookie-down b2 ─")
    assert "│ It has a cookie, but is not registered" in lines[1]
    assert "bkctl bookies decommission b2" in seen
    assert all(len(line) == 60 for line in lines if line[:1] in "╭│╰")


def test_a_panel_keeps_a_title_wider_than_its_edge(uri: str) -> None:
    _, seen = CommandLine(uri).terminal("--no-color", "cluster", "health", "--no-bookies", columns=24)
    lines = seen.splitlines()
    assert lines[:2] == [f"╭{'─' * 22}╮", "│ error bookie-down b2 │"]


@pytest.mark.parametrize("option", [["--columns", "code"], ["--sort", "code"], ["-o", "wide"]])
def test_chosen_columns_and_forms_keep_the_table(uri: str, option: list[str]) -> None:
    _, seen = CommandLine(uri).terminal("--no-color", "cluster", "health", "--no-bookies", *option)
    assert "╭" not in seen
    assert "CODE" in seen


def test_pipes_have_tables(cli: Cli, uri: str) -> None:
    assert cli("ledger", "locate", 7, "-u", uri).out.split()[:3] == ["LEDGER", "FIRST", "ENTRY"]
    assert cli("cluster", "health", "--no-bookies", "-u", uri).out.split()[:2] == ["SEVERITY", "CODE"]


@pytest.mark.parametrize("words", [["ledger", "locate", "7"], ["cluster", "health", "--no-bookies"]])
def test_pipes_load_no_rich(uri: str, words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['bkctl', *{words!r}, '-u', {uri!r}]\n"
        "from bkctl.commands.main import main\n"
        "try: main()\n"
        "except SystemExit: print('rich' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("settings", "is_linked"),
    [
        ({"VTE_VERSION": "7006"}, True),
        ({"VTE_VERSION": "4800"}, False),
        ({"TERM_PROGRAM": "WezTerm"}, True),
        ({"TERM_PROGRAM": "Apple_Terminal"}, False),
        ({"FORCE_HYPERLINK": "1"}, True),
        ({"FORCE_HYPERLINK": "0", "VTE_VERSION": "7006"}, False),
        ({}, False),
    ],
)
def test_files_are_links_on_terminals_that_show_links(
    settings: dict[str, str], is_linked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("VTE_VERSION", "TERM_PROGRAM", "KONSOLE_VERSION", "WT_SESSION", "DOMTERM", "FORCE_HYPERLINK", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    directory = tmp_path / "a b"
    files.make(directory)
    log = next(directory.glob("ledgers/current/*.log"))
    code, seen = CommandLine(None).terminal("entrylog", "list", "--dir", directory / "ledgers", columns=200)
    assert code == 0, seen
    start = f"\x1b]8;;file://{os.uname().nodename}{str(log).replace(' ', '%20')}\x1b\\"
    assert (start in seen) is is_linked, repr(seen)
    assert ("\x1b]8;;" in seen) is is_linked
    _, plain = CommandLine(None).terminal("--no-color", "entrylog", "list", "--dir", directory / "ledgers")
    assert "\x1b]8;;" not in plain
    piped = CommandLine(None)("entrylog", "list", "--dir", directory / "ledgers")
    assert b"\x1b" not in piped.out
