"""The modules in C: built from their present sources before any test imports them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from support.servers import require

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import setup; setup()"


def can_compile() -> bool:
    """Return True if this machine has a C compiler, and the headers of this Python."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return bool(shutil.which(compiler)) and Path(sysconfig.get_path("include"), "Python.h").exists()


def stale() -> list[str]:
    """Return the modules in C that are not built, or older than their sources."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    found = []
    for module in modules:
        built = ROOT / (module["name"].replace(".", "/") + ".abi3.so")
        sources = [ROOT / source for source in (*module["sources"], *module.get("depends", ()))]
        if not built.exists() or built.stat().st_mtime < max(source.stat().st_mtime for source in sources):
            found.append(module["name"])
    return found


def build() -> str:
    """Build stale modules beside their sources, where they can be compiled. Return the output of the compiler."""
    if "PYTEST_XDIST_WORKER" in os.environ or not can_compile() or not stale():
        return ""  # a worker's parent has built them
    for built in ROOT.glob("bkctl/*/_*.cpython-*.so"):
        built.unlink()  # from an earlier build for one version of Python, which would come before .abi3.so
    command = [sys.executable, "-c", BUILD, "-q", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def require_compiled() -> None:
    """Skip the test on a machine that cannot compile; fail it where modules in C could not be built."""
    names = ", ".join(stale())
    if names and can_compile():
        pytest.fail(f"{names}: not built from the present sources.\n{OUTPUT}\nTry: make -B .venv/.test", pytrace=False)
    if names:
        require("compiler", f"{names}: no C compiler, or no headers of Python")


OUTPUT = build()
