"""A copy of the checkout, and what `release/dist` makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import compiled

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def copy_checkout(target: Path) -> Path:
    """Copy the files of the checkout that git has or would add, but the tests; skip the test outside of a checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run(command: list[str], cwd: Path, **variables: str) -> str:
    """Run a program, and return what it prints on stdout; its output is the message where it fails."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory `dist` of a copy of the checkout, with the sdist and the wheel."""
    compiled.require_compiled()
    root = copy_checkout(tmp_path_factory.mktemp("release"))
    run(["release/dist"], root, BIN=str(BIN))
    return root / "dist"


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """The wheel of `dist`."""
    (found,) = dist.glob("*.whl")
    return found
