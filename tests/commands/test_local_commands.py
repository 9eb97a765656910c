"""`bkctl local`, and the cluster that commands use: options, environment, contexts, the local cluster that is up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from .conftest import Cli

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def shell() -> Iterator[CommandLine]:
    """The command line without a named cluster; its local cluster is stopped at the end."""
    shell = CommandLine(None)
    yield shell
    shell("local", "down")


def test_up_says_which_cluster_commands_use_and_how_to_switch(shell: CommandLine, tmp_path: Path) -> None:
    other = f"sqlite://{tmp_path}/other.db"
    assert shell("cluster", "init", "-u", other).code == 0
    code, seen = shell.terminal("local", "up", "--bookies", 1)
    assert code == 0
    assert "commands without --metadata-uri use it until 'bkctl local down'" in seen
    ours = json.loads(shell("cluster", "id", "-o", "json").out)["metadataUri"]
    assert ours != other

    named = CommandLine(other)
    code, seen = named.terminal("local", "status", columns=200)
    assert code == 0
    assert f"Commands do not use it, since BKCTL_METADATA_URI names {other}: add -x local" in seen
    assert json.loads(named("cluster", "id", "-o", "json").out)["metadataUri"] == other
    assert json.loads(named("cluster", "id", "-o", "json", "-x", "local").out)["metadataUri"] == ours

    assert shell("context", "add", "prod", "-u", other, "--use").code == 0
    code, seen = shell.terminal("cluster", "up", columns=200)
    assert code == 0
    assert f"Commands do not use it, since the current context is prod ({other})" in seen
    assert "'bkctl context use local'" in seen
    assert json.loads(shell("cluster", "id", "-o", "json").out)["metadataUri"] == other
    assert shell("context", "use", "local").code == 0
    assert json.loads(shell("cluster", "id", "-o", "json").out)["metadataUri"] == ours
    assert [row["name"] for row in shell("context", "list", "-o", "ndjson").rows] == ["prod", "local"]

    assert shell("cluster", "down").code == 0
    stopped = shell("cluster", "id")
    assert stopped.code == 4
    assert "'bkctl local up'" in stopped.problem


def test_local_commands_refuse_options_that_name_another_cluster(cli: Cli, tmp_path: Path) -> None:
    for option in (["-u", "zk://127.0.0.1:1/ledgers"], ["-x", "prod"], ["-c", tmp_path / "bk.conf"]):
        for words in (["local", "status", *option], [*option, "local", "status"], ["cluster", "up", *option]):
            refused = cli(*words)
            assert refused.code == 2, words
            assert "an option names another cluster" in refused.err


def test_the_local_context_needs_a_local_cluster_or_an_entry_in_the_file(cli: Cli, tmp_path: Path) -> None:
    missing = cli("cluster", "id", "-x", "local")
    assert missing.code == 4
    assert "no local cluster is up" in missing.err
    assert cli("context", "use", "local").code == 4
    assert cli("context", "delete", "local", "--yes").code == 4
    file = tmp_path / "config" / "bkctl" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[contexts.local]\nmetadata-uri = "sqlite:///x.db"\n')
    assert cli("context", "use", "local").code == 0
    assert cli("context", "show", "-o", "json").json["metadataUri"] == "sqlite:///x.db"


def test_a_given_file_without_a_cluster_hides_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    assert cli("cluster", "init", "-u", uri).code == 0
    conf = tmp_path / "bk_server.conf"
    conf.write_text(f"journalDirectory={tmp_path}/j\nledgerDirectories={tmp_path}/l\n")
    monkeypatch.setenv("BKCTL_METADATA_URI", uri)
    assert cli("cluster", "id").code == 0
    assert cli("context", "add", "prod", "-u", uri, "--use").code == 0
    for words in (["cluster", "id", "--conf", conf], ["-c", conf, "cluster", "id"]):
        refused = cli(*words)
        assert refused.code == 2, words
        assert f"{conf} names no cluster" in refused.err
    assert cli("cluster", "id", "--conf", conf, "-u", uri).code == 0
    # The files of that bookie are judged without another cluster's metadata.
    (tmp_path / "l" / "current").mkdir(parents=True)
    assert "names no cluster" not in cli("entrylog", "verify", "--conf", conf).err


def test_an_interrupted_drain_says_what_is_left_and_how_to_go_back(shell: CommandLine, tmp_path: Path) -> None:
    assert shell("local", "up", "--bookies", 3, "--http").code == 0
    (tmp_path / "lines").write_text(f"{'x' * 1000}\n" * 2000)
    (ledger,) = shell("ledger", "write", tmp_path / "lines", "--ensemble-size", 2, "-o", "id").ids
    (ensemble,) = json.loads(shell("ledger", "show", ledger, "-o", "json").out)["ensembles"].values()
    bookie = ensemble[0]
    words = ("bookies", "drain", bookie, "--rate", "20KB")
    code, seen = shell.terminal(*words, "--yes", type_in="\x03", asks="accepts no more entries", columns=400)
    assert code == 130, seen
    assert "Interrupted: Draining, " in seen
    assert f"{bookie} stays read-only, and moved ledgers stay moved: run the command again to continue" in seen
    assert f"'bkctl bookie readonly off --bookie {bookie}' to go back" in seen

    def state() -> str:
        (row,) = [row for row in shell("bookies", "list", "-o", "ndjson").rows if row["bookieId"] == bookie]
        return str(row["state"])

    assert state() == "ro"
    findings = shell("cluster", "health", "--threshold", 100, "-o", "ndjson")
    (finding,) = [row for row in map(json.loads, findings.out.splitlines()) if row["subject"] == bookie]
    assert "by request" in finding["message"]
    assert shell("bookie", "readonly", "off", "--bookie", bookie).code == 0


def test_up_says_that_bookies_without_an_http_server_limit_commands(shell: CommandLine) -> None:
    hint = "'bkctl top', 'bookie info' and 'bookies drain' need bookies with an HTTP server"
    assert hint not in shell("local", "up", "--bookies", 1, "--no-http").err
    assert hint in shell("local", "up").err


def test_up_leaves_decommissioned_bookies_out(shell: CommandLine) -> None:
    (_, gone) = shell("local", "up", "--bookies", 2, "-o", "ndjson").rows
    assert shell("local", "down", "--bookie", 1).code == 0
    assert shell("bookies", "decommission", gone["bookieId"], "--yes").code == 0
    again = shell("local", "up", "-o", "ndjson")
    assert [(row["bookieId"], row["state"]) for row in again.rows] == [("bookie-0", "rw"), ("bookie-1", "left")]
    assert f"remove {gone['directory']} to let it join again" in again.err
    assert f"'bkctl cookie create bookie-1 {gone['directory']}/journal/current/VERSION'; else" in again.err
    shutil.rmtree(gone["directory"])
    removed = shell("local", "status", "-o", "ndjson")
    assert (removed.code, removed.rows[1]["state"], removed.rows[1]["httpUrl"]) == (0, "down", None)
    assert [row["state"] for row in shell("local", "up", "-o", "ndjson").rows] == ["rw", "rw"]


def test_an_interrupted_start_says_how_to_continue(shell: CommandLine, tmp_path: Path) -> None:
    words = ("local", "up", "--bookies", 3, "--dir", tmp_path / "mine")
    code, seen = shell.terminal("-v", *words, type_in="\x03", asks="starting bookie-0", columns=400)
    assert code == 130, seen
    assert "Interrupted: Starting the local cluster" in seen
    assert f"'bkctl local down --dir {tmp_path}/mine' stops all" in seen
    assert shell("local", "down", "--dir", tmp_path / "mine").code == 0


def test_up_refuses_a_file_as_its_directory(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = cli("local", "up", "--dir", tmp_path / "file")
    assert (refused.code, refused.err) == (2, f"bkctl: {tmp_path}/file is a file, a directory is needed\n")


def test_the_demo_uses_no_cluster_and_no_files_of_its_user(shell: CommandLine, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/production.db"
    assert shell("cluster", "init", "-u", uri).code == 0
    program = tmp_path / "bkctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bkctl "$@"\n')
    program.chmod(0o755)
    (home := tmp_path / "home").mkdir()
    named = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")} | {
        "HOME": str(home), "BKCTL": str(program), "BKCTL_METADATA_URI": uri,
    }  # fmt: skip
    demo = subprocess.run([ROOT / "demo" / "run.sh"], env=named, capture_output=True, text=True, timeout=LIMIT_S)
    assert demo.returncode == 0, demo.stderr
    assert shell("ledger", "list", "--all-scopes", "-o", "id", "-u", uri).out == b""
    assert list(home.iterdir()) == []
