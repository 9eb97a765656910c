from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bkctl.commands.generate import generated_files, read_pages
from bkctl.errors import EXIT_CODES
from bkctl.ids import LedgerId

from .conftest import Cli
from .files import make

ROOT = Path(__file__).parents[2]
PAGES = list(read_pages().walk())
FILES = generated_files()


@pytest.mark.parametrize("name", FILES)
def test_generated_files_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name], "run python -m bkctl.commands.generate"


def test_no_generated_file_is_left_behind() -> None:
    there = {
        str(path.relative_to(ROOT)) for directory in ("man", "completions") for path in (ROOT / directory).iterdir()
    }
    assert there == {name for name in FILES if not name.startswith("docs/")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name or "bkctl")
def test_every_command_has_help_and_stands_in_the_documents(cli: Cli, page: object) -> None:
    assert page.help  # type: ignore[attr-defined]
    for option in (*page.options, *page.arguments):  # type: ignore[attr-defined]
        assert option.help, option
    result = cli(*page.path, "--help")  # type: ignore[attr-defined]
    assert result.code == 0
    assert result.err == ""
    shown = " ".join(result.out.split())
    assert page.usage in shown  # type: ignore[attr-defined]
    for option in page.options:  # type: ignore[attr-defined]
        for name in option.names:
            assert name in shown
    if page.path and not page.children:  # type: ignore[attr-defined]
        assert f"### bkctl {page.name}\n" in FILES["docs/commands.md"]  # type: ignore[attr-defined]


def test_exit_codes_come_from_the_error_tree() -> None:
    for code, meaning in EXIT_CODES.items():
        assert f"\\fB{code}\\fR\n{meaning}" in FILES["man/bkctl.1"]
        assert f"| {code} | {meaning} |" in FILES["docs/commands.md"]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("man/")])
def test_man_pages_are_good_troff(name: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(ROOT / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""


@pytest.fixture
def shell_environment(tmp_path: Path) -> dict[str, str]:
    """A PATH where `bkctl` is this one."""
    binary = tmp_path / "bin" / "bkctl"
    binary.parent.mkdir()
    binary.write_text(f'#!/bin/sh\nexec {sys.executable} -m bkctl "$@"\n')
    binary.chmod(0o755)
    return {**os.environ, "PATH": f"{binary.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def complete_bash(line: str, environment: dict[str, str]) -> list[str]:
    script = 'source "$1"; COMP_LINE=$2; COMP_POINT=${#2}; _bkctl; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "_", str(ROOT / "completions/bkctl.bash"), line],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def complete_fish(line: str, environment: dict[str, str]) -> list[str]:
    script = "source $argv[1]; complete -C $argv[2]"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script, str(ROOT / "completions/bkctl.fish"), line],
        capture_output=True, text=True, timeout=60, check=True, env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return [each.split("\t")[0] for each in done.stdout.splitlines()]


SHELLS = [
    pytest.param(complete, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name, complete in (("bash", complete_bash), ("fish", complete_fish))
]


@pytest.mark.parametrize("complete", SHELLS)
def test_shells_complete_commands_options_and_values(complete: object, shell_environment: dict[str, str]) -> None:
    def words(line: str) -> set[str]:
        return set(complete(line, shell_environment))  # type: ignore[operator]

    assert {"ledger", "journal", "cluster"} <= words("bkctl ")
    assert words("bkctl led") == {"ledger"}
    assert {"write", "read", "tail"} <= words("bkctl ledger ")
    assert "show" in words("bkctl bookie index ")
    assert {"table", "json", "ndjson", "csv", "id"} == words("bkctl ledger list -o ")
    assert words("bkctl -o json ledger read --protocol ") == {"v2", "v3"}
    assert words("bkctl ledger read --no-v") == {"--no-verify"}


@pytest.mark.parametrize("complete", SHELLS)
def test_shells_complete_ids_and_file_names(
    complete: object, shell_environment: dict[str, str], tmp_path: Path
) -> None:
    from bkctl.formats.entry import DigestType
    from bkctl.formats.metadata import Fragment, LedgerMetadata
    from bkctl.metadata.cluster import open_cluster

    make(tmp_path)
    uri = f"sqlite://{tmp_path}/m.db"
    with open_cluster(uri, create=True) as cluster:
        for ledger in (LedgerId(0, 12), LedgerId(0, 34), LedgerId(7, 1)):
            cluster.ledgers.create(ledger, LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b:1",)),)))

    def words(line: str) -> list[str]:
        # The limit of 300 ms may end a try on a busy machine: nothing is printed then.
        for _ in range(20):
            found = complete(line, shell_environment)  # type: ignore[operator]
            if found:
                return sorted(found)
        return []

    assert words(f"bkctl -u {uri} ledger show ") == ["00000000000000070000000000000001", "12", "34"]
    assert words(f"bkctl ledger read -u {uri} 1") == ["12"]
    assert words(f"bkctl journal read --dir {tmp_path}/journal ") == ["a.txn", "b.txn"]
    assert words(f"bkctl entrylog read --dir {tmp_path}/ledgers ") == ["1f.log", "scoped/1f.log"]


def test_completion_is_silent_and_ends_when_nothing_answers(tmp_path: Path) -> None:
    environment = {**os.environ, "_BKCTL_COMPLETE": "ledger"}
    for uri in ("zk://127.0.0.1:1/ledgers", "nonsense", f"sqlite://{tmp_path}/none"):
        done = subprocess.run(
            [sys.executable, "-m", "bkctl", "ledger", "show", "-u", uri, ""],
            capture_output=True, text=True, timeout=60, check=False, env=environment,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_zsh_function_parses() -> None:
    subprocess.run(["zsh", "-n", str(ROOT / "completions/_bkctl")], timeout=60, check=True)
