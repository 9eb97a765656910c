"""The workflows for GitHub: checked by actionlint and zizmor, pinned, and made of scripts that are there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from release.conftest import BIN, ROOT
from support.go_programs import go_program

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def commands() -> Iterator[tuple[str, str]]:
    """Yield the names of workflow and job, and each command that a step runs."""
    for path in WORKFLOWS:
        jobs: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["jobs"]
        for name, job in jobs.items():
            for step in job.get("steps", []):
                for line in step.get("run", "").splitlines():
                    yield f"{path.name}: {name}", line


def test_workflows_pass_actionlint() -> None:
    actionlint = go_program("github.com/rhysd/actionlint", "/cmd/actionlint", "v1.7.12")
    done = subprocess.run([actionlint, *WORKFLOWS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_pass_zizmor() -> None:
    done = subprocess.run([BIN / "zizmor", "--offline", "-q", ROOT / ".github"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actions_are_pinned_by_a_commit_and_each_has_one_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, pin in re.findall(r"uses: ([^\s@]+)@(.*)", path.read_text()):
            assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), f"{path.name}: {name}@{pin}"
            pins.setdefault(name, set()).add(pin)
    assert "actions/checkout" in pins
    assert {name: found for name, found in pins.items() if len(found) > 1} == {}


def test_steps_run_scripts_and_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w./]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    checked = 0
    for where, line in commands():
        for name in re.findall(r"(?:^|[ &|])((?:\.ci|release|tests|demo)/[\w./]*\w)", line):
            checked += 1
            assert (ROOT / name).exists(), f"{where}: {name}"
        for words in re.findall(r"\bmake ([\w./ ]+)", line):
            checked += 1
            assert set(words.split()) <= targets, f"{where}: make {words}"
    assert checked > 20


def test_ci_run_and_the_workflows_share_their_scripts() -> None:
    run = [line for line in (ROOT / ".ci/run").read_text().splitlines() if re.match(r"make |\.ci/", line)]
    assert len(run) == 3
    everywhere = " ".join(line for _, line in commands())
    for line in run:
        assert " ".join(line.split()[: 2 if line.startswith("make") else 1]) in everywhere, line
    # `.ci/run` tests the oldest release of Apache BookKeeper, the workflow those that a release promises.
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    (releases,) = (line.split()[1:] for line in run if line.startswith(".ci/releases"))
    assert jobs["releases"]["strategy"]["matrix"]["bookkeeper"] == ["4.17.3", *releases]


def test_every_supported_python_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    supported = re.findall(r"Python :: (3\.\d+)", " ".join(project["project"]["classifiers"]))
    jobs = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
    assert jobs["fast"]["strategy"]["matrix"]["python"] == supported
    jobs = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
    assert jobs["onefile"]["strategy"]["matrix"]["python"] == supported
    tags = [f"cp{version.replace('.', '')}-*" for version in supported]
    assert project["tool"]["cibuildwheel"]["build"].split() == tags


@pytest.mark.parametrize(
    ("platform", "architecture", "systems"),
    [
        ("linux", "x86_64", ("manylinux", "musllinux")),
        ("linux", "aarch64", ("manylinux", "musllinux")),
        ("macos", "x86_64", ("macosx",)),
        ("macos", "arm64", ("macosx",)),
    ],
)
def test_cibuildwheel_builds_for_every_platform(platform: str, architecture: str, systems: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", platform]
    done = subprocess.run([*command, "--archs", architecture, ROOT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    versions = ("cp311", "cp312", "cp313", "cp314")
    expected = [f"{version}-{system}_{architecture}" for system in systems for version in versions]
    assert done.stdout.split() == expected
