"""Damaged files of the user's own state, and disks that fill up while they are written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bkctl.commands.kit import work as work_module
from bkctl.commands.kit.work import WorkFile, list_work
from bkctl.metadata.cluster import open_cluster

from . import files
from .conftest import Cli


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {each: value for each, value in state.items() if each != name}


def having(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state | values


@pytest.mark.parametrize(
    "damaged",
    [
        lambda state: {}, without("id"), without("began"), without("command"), without("pid"), without("host"),
        having(began="x"), having(command=[1]), having(command="x"), having(id="../../x"), having(pid="x"),
        having(done="x"), having(percent="\x1b]0;mine\x07"), having(rate=float("inf")), having(etaSeconds=10**400),
        having(rate=float("nan")), having(unit=[]), having(pid=10**30),
    ],
)  # fmt: skip
def test_damaged_state_of_work_is_left_out(cli: Cli, damaged: Callable[[dict[str, Any]], Any]) -> None:
    directory = work_module.progress_directory(os.environ)
    fields = {"state": "running", "stage": "Looking", "isSteerable": False, "hasBytes": False}
    for name in ("aaaaaa", "bbbbbb"):
        WorkFile(directory, name, ["bkctl"]).publish(**fields)
    path = directory / "aaaaaa.json"
    path.write_text(json.dumps(damaged(json.loads(path.read_text()))))
    for form in ("table", "json", "csv"):
        found = cli("progress", "-o", form)
        assert found.code == 0, found.err
        assert "aaaaaa" not in found.out
        assert "bbbbbb" in found.out


def test_nested_state_of_work_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "aaaaaa.json").write_text("[" * 100_000)
    assert list_work(tmp_path) == []


def test_full_disk_leaves_no_part_of_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkFile(tmp_path, "aaaaaa", ["bkctl"])
    work.publish(state="running", done=1)
    whole = (tmp_path / "aaaaaa.json").read_bytes()
    write = os.write
    monkeypatch.setattr(work_module.os, "write", lambda file, data: write(file, data[:10]))
    work.publish(state="running", done=2)
    assert [path.name for path in tmp_path.iterdir()] == ["aaaaaa.json"]
    assert (tmp_path / "aaaaaa.json").read_bytes() == whole


def test_line_of_the_audit_log_that_a_full_disk_cut_does_not_hide_the_next(cli: Cli, tmp_path: Path) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    open_cluster(uri, create=True).close()
    log = tmp_path / "state" / "bkctl" / "audit.ndjson"
    assert cli("bookies", "racks", "set", "b1", "--rack", "/r", "-u", uri).code == 0
    log.write_bytes(log.read_bytes() + b'{"time":"2026-')
    assert cli("bookies", "racks", "set", "b2", "--rack", "/r", "-u", uri).code == 0
    log.write_bytes(log.read_bytes() + b"[" * 100_000 + b"\n")
    found = cli("audit", "list", "-o", "json").json
    assert [(row["result"], "b2" in row["command"]) for row in found] == [("done", False), ("done", True)]


@pytest.mark.parametrize(
    "words",
    [
        ("metadata", "export", "-f"),
        ("cluster", "nuke", "--yes-really", "{instance_id}", "--backup"),
        ("cookie", "generate", "b1", "--journal-dirs", "/j", "--ledger-dirs", "/l", "-f"),
        ("bookies", "racks", "set", "b1", "--rack", "/r", "--undo"),
        ("entrylog", "extract", "--ledger", "5", "--dir", "{directory}/ledgers", "-f"),
    ],
    ids=lambda words: f"{words[0]} {words[1]}",
)
def test_output_into_a_missing_directory_has_one_answer(cli: Cli, tmp_path: Path, words: tuple[str, ...]) -> None:
    uri = f"sqlite://{tmp_path}/m.db"
    with open_cluster(uri, create=True) as cluster:
        instance_id, nodes = cluster.instance_id(), list(cluster.store.children(""))
    files.make(tmp_path / "bookie")
    target = tmp_path / "missing" / "file"
    given = (each.format(instance_id=instance_id, directory=tmp_path / "bookie") for each in words)
    assert cli(*given, target, "-u", uri) == (4, "", f"bkctl: {target}: No such file or directory\n")
    assert not target.parent.exists()
    with open_cluster(uri) as cluster:
        assert (cluster.instance_id(), list(cluster.store.children(""))) == (instance_id, nodes)
