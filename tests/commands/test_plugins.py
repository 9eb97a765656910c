"""Programs `bkctl-NAME` on the PATH, as commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine

from .conftest import Cli

SCRIPT = """#!/bin/sh
echo "words: $*"
env | grep '^BKCTL_' | grep -v SECRET | sort
exit 7
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the PATH with the plugin `hello`."""
    directory = tmp_path / "bin"
    directory.mkdir()
    add(directory, "bkctl-hello", SCRIPT)
    monkeypatch.setenv("PATH", f"relative:{directory}:{os.environ['PATH']}")
    return directory


def add(directory: Path, name: str, text: str = "#!/bin/sh\n", mode: int = 0o755) -> None:
    (directory / name).write_text(text)
    (directory / name).chmod(mode)


def test_a_plugin_gets_the_words_and_the_options_before_it(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BKCTL_TIMEOUT")
    monkeypatch.setattr(sys.modules[CommandLine.__module__], "_patience", lambda _: {})
    line = CommandLine(None)
    answer = line.run("hello", "--help", "-o", "json", "-v", "x y")
    assert (answer.code, answer.err) == (7, "")
    assert answer.out.decode() == "words: --help -o json -v x y\n"
    conf = tmp_path / "bk.conf"
    options = ("-u", "zk://h:1/l", "-c", conf, "--timeout", "90s", "--tls-ca", "ca.pem", "-o", "json", "-q")
    answer = line.run(*options, "--bookie-address", "a=h:1", "--bookie-address", "b=h:2", "hello")
    assert answer.out.decode().splitlines() == [
        "words: ",
        "BKCTL_BOOKIE_ADDRESS=a=h:1 b=h:2",
        f"BKCTL_CONF={conf}",
        "BKCTL_METADATA_URI=zk://h:1/l",
        "BKCTL_OUTPUT=json",
        "BKCTL_QUIET=1",
        "BKCTL_TIMEOUT=90.0",
        f"BKCTL_TLS_CA={Path('ca.pem').absolute()}",
    ]
    code, seen = line.terminal("hello", "there")
    assert (code, seen) == (7, "words: there\n")


def test_help_lists_plugins_and_own_commands_come_first(
    directory: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(directory, "bkctl-ledger")
    add(directory, "bkctl-notes", mode=0o644)
    add(directory, "bkctl-Odd Name")
    (directory / "bkctl-place").mkdir()
    later = directory.parent / "later"
    later.mkdir()
    add(later, "bkctl-hello")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{later}")
    shown = cli("--help").out.partition("Plugins:\n")[2].partition("\n\n")[0]
    assert [line.split() for line in shown.splitlines()] == [["hello", str(directory / "bkctl-hello")]]
    assert cli("ledger", "--help").out.startswith("Usage: bkctl ledger ")
    for name in ("notes", "place", "../hello"):
        refused = cli(name)
        assert refused.code == 2, name
        assert f"No such command '{name}'" in refused.err


def test_a_plugin_that_cannot_run_is_one_line(directory: Path) -> None:
    add(directory, "bkctl-broken", "#!/nonexistent/interpreter\n")
    answer = CommandLine(None).run("broken")
    assert answer.code == 4
    assert str(directory / "bkctl-broken") in answer.problem
