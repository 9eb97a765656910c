"""Wheels and the one-file program work on machines without a compiler or a checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from release.conftest import BIN, run
from support.servers import require

from bkctl import __version__

#: The symbols that the extensions need; all are in the stable ABI of CPython 3.11 (its Misc/stable_abi.toml).
STABLE_ABI = set(
    re.findall(
        r"\w+",
        """
    PyBuffer_Release PyBytes_AsString PyBytes_FromStringAndSize PyBytes_Size PyDict_GetItemWithError PyDict_New
    PyDict_SetItem PyErr_Clear PyErr_NoMemory PyErr_Occurred PyErr_SetString PyExc_TypeError PyExc_ValueError
    PyList_Append PyList_New PyList_SetItem PyLong_AsLongLong PyLong_AsUnsignedLongLong PyLong_FromLongLong
    PyLong_FromSsize_t PyLong_FromUnsignedLongLong PyMem_Calloc PyMem_Free PyMem_Malloc PyMem_Realloc
    PyModule_AddIntConstant PyModule_Create2 PyNumber_Add PyObject_GetBuffer PySequence_Tuple PyTuple_GetItem
    PyTuple_SetItem PyTuple_Size PyTuple_Type PyType_GetFlags PyType_GetSlot PyType_IsSubtype
    _PyArg_ParseTuple_SizeT _Py_BuildValue_SizeT _Py_Dealloc _Py_FalseStruct _Py_NoneStruct
    """,
    )
)
OFFLINE = re.compile(
    r"dns error|Failed to fetch|NewConnectionError|Name or service not known|ConnectTimeout|proxy", re.I
)


def without_compiler(tmp_path: Path, **variables: str) -> dict[str, str]:
    """Return an environment with no C compiler, and a home of its own."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    for name in ("sh", "bash", "env", "cat", "uname", "rm", "mkdir", "ls", "man", "git"):
        found = shutil.which(name)
        if found and not (programs / name).exists():
            (programs / name).symlink_to(found)
    kept = {
        name: value for name, value in os.environ.items() if re.match(r"(PIP_|UV_|SSL_|HTTPS?_|NO_PROXY|LANG)", name)
    }
    home = {"HOME": str(tmp_path / "home"), "PATH": str(programs), "CC": "/bin/false", "BKCTL_AUDIT_LOG": "none"}
    return kept | home | variables


def try_install(command: list[str], env: dict[str, str]) -> None:
    """Install with a registry; skip the test where there is none."""
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode and OFFLINE.search(done.stderr):
        require("registry", done.stderr[-300:])
    assert done.returncode == 0, done.stdout + done.stderr


def check_installed(program: Path, share: Path, env: dict[str, str]) -> None:
    """Check that an installed bkctl runs its loops in C, and came with completions, man pages, units and alerts."""
    ask = [str(program), "version", "-o", "json"]
    version = json.loads(subprocess.run(ask, env=env, capture_output=True, text=True, check=True).stdout)
    assert version["version"] == __version__
    assert version["uncompiledModules"] == []
    assert len(version["compiledModules"]) == 2
    for name in (
        "man/man1/bkctl.1", "man/man1/bkctl-ledger.1", "bash-completion/completions/bkctl.bash",
        "zsh/site-functions/_bkctl", "fish/vendor_completions.d/bkctl.fish",
        "bkctl/systemd/bkctl-bookie.service", "bkctl/prometheus/alerts.yml",
    ):  # fmt: skip
        assert (share / name).is_file(), name
    complete = [str(program), "completion", "bash"]
    assert "_bkctl()" in subprocess.run(complete, env=env, capture_output=True, text=True, check=True).stdout


def test_dist_has_an_sdist_and_a_wheel_for_every_python(dist: Path, wheel: Path) -> None:
    assert "-cp311-abi3-" in wheel.name
    assert "manylinux" in wheel.name or not sys.platform.startswith("linux")
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    assert {"bkctl/files/_scan.abi3.so", "bkctl/protocol/_runs.abi3.so"} <= set(names)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        assert f"bkctl-{__version__}/release/backend.py" in packed.getnames()
    sums = dict(reversed(line.split("  ")) for line in (dist / "SHA256SUMS").read_text().splitlines())
    assert sums == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (sdist, wheel)}


def test_extensions_use_nothing_but_the_stable_abi(dist: Path) -> None:
    """Symbols outside of it differ between versions of CPython; `abi3` wheels are for all from 3.11 on."""
    nm = shutil.which("nm")
    if nm is None:
        require("compiler", "no nm")
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as packed:
        packed.extractall(dist.parent / "unpacked")
    for module in (dist.parent / "unpacked").glob("bkctl/*/*.abi3.so"):
        used = set(re.findall(r" U (_?Py\w+)", run([nm, "-D", str(module)], dist)))
        assert used
        assert used - STABLE_ABI == set(), module.name


def test_wheel_installs_with_pip_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "venv"], tmp_path)
    pip = [str(tmp_path / "venv/bin/python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    # Of the tests' environment, only what it depends on: the .pth file there that leads to the checkout is not read.
    env = without_compiler(tmp_path, PYTHONPATH=sysconfig.get_path("purelib"))
    subprocess.run(pip, env=env, check=True)
    check_installed(tmp_path / "venv/bin/bkctl", tmp_path / "venv/share", env)


@pytest.mark.long
def test_wheel_installs_with_uv_tool_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    env = without_compiler(tmp_path, UV_TOOL_DIR=str(tmp_path / "tools"), UV_TOOL_BIN_DIR=str(tmp_path / "bin"))
    env["UV_CACHE_DIR"] = os.environ.get("UV_CACHE_DIR", str(Path.home() / ".cache/uv"))
    try_install([str(BIN / "uv"), "tool", "install", "-q", "--python", sys.executable, str(wheel)], env)
    check_installed(tmp_path / "bin/bkctl", tmp_path / "tools/bkctl/share", env)


@pytest.mark.long
def test_wheel_installs_with_pipx_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    env = without_compiler(tmp_path, PIPX_HOME=str(tmp_path / "pipx"), PIPX_BIN_DIR=str(tmp_path / "bin"))
    env["PIPX_MAN_DIR"] = str(tmp_path / "man")
    env["PIP_CACHE_DIR"] = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    try_install([str(BIN / "pipx"), "install", "--python", sys.executable, str(wheel)], env)
    check_installed(tmp_path / "bin/bkctl", tmp_path / "pipx/venvs/bkctl/share", env)
    assert (tmp_path / "man/man1/bkctl.1").is_file()


@pytest.mark.long
def test_one_file_runs_with_nothing_but_python(dist: Path, tmp_path: Path) -> None:
    env = without_compiler(tmp_path, SHIV_ROOT=str(tmp_path / "unpacked"))
    try_install([str(dist.parent / "release/onefile")], dict(os.environ) | {"BIN": str(BIN)})
    (program,) = dist.glob("*.pyz")
    command = [getattr(sys, "_base_executable", sys.executable), "-I", str(program)]
    version = subprocess.run([*command, "version", "-o", "json"], env=env, capture_output=True, text=True, check=True)
    assert json.loads(version.stdout)["uncompiledModules"] == []
    up = subprocess.run(
        [*command, "local", "up", "--dir", str(tmp_path / "cluster")], env=env, capture_output=True, text=True
    )
    try:
        assert up.returncode == 0, up.stderr
        write = [*command, "ledger", "write", "--ledger-scope-id", "7", "-o", "id"]
        written = subprocess.run(write, env=env, capture_output=True, text=True, input="rescued\n")
        assert written.returncode == 0, written.stderr
        read = [*command, "ledger", "read", written.stdout.strip(), "--body", "--format", "utf8"]
        assert "rescued" in subprocess.run(read, env=env, capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run([*command, "local", "down", "--dir", str(tmp_path / "cluster")], env=env, check=True)


def test_one_file_finds_its_python_or_says_which_it_needs(tmp_path: Path) -> None:
    start = (Path(__file__).parents[2] / "release/onefile_start.py").read_text()
    assert 'VERSION = "3.11"' in start
    program = tmp_path / "bkctl.pyz"
    program.write_text(start.replace('VERSION = "3.11"', 'VERSION = "3.99"'))
    command, env = [sys.executable, str(program), "bookie", "check"], {"PATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"bkctl: {program} needs Python 3.99, and {sys.executable} is Python 3.")
    (tmp_path / "python3.99").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python3.99").chmod(0o755)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{program} bookie check\n")
    # A program of that name that is another Python does not start itself for ever.
    (tmp_path / "python3.99").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.99" in done.stderr


def test_sbom_names_the_version_and_what_it_needs_with_hashes(dist: Path) -> None:
    run(["release/sbom"], dist.parent, BIN=str(BIN))
    text = (dist / "bkctl.cdx.json").read_text()
    bom = json.loads(text)
    assert JsonStrictValidator(SchemaVersion.from_version(bom["specVersion"])).validate_str(text) is None
    assert bom["bomFormat"] == "CycloneDX"
    assert (bom["metadata"]["component"]["name"], bom["metadata"]["component"]["version"]) == ("bkctl", __version__)
    names = {component["name"] for component in bom["components"]}
    assert {"kazoo", "grpcio", "rocksdict", "starlette", "duckdb"} <= names
    assert [item["name"] for item in bom["components"] if not item["externalReferences"][0]["hashes"]] == []


@pytest.mark.parametrize("name", ["run", "onefile", "test", "lowest"])
def test_locked_requirements_have_hashes_and_fit_the_project(name: str) -> None:
    """Each names every direct requirement of what it is for; `make lock` writes them."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    root = Path(__file__).resolve().parents[2]
    text = (root / f"release/requirements/{name}.txt").read_text()
    pins = {
        canonicalize_name(key): version
        for key, version in re.findall(r"^([\w.\[\]-]+?)(?:\[[\w,]+\])?==([\w.]+)", text, re.M)
    }
    entries = re.split(r"^(?=[a-z])", text, flags=re.M)[1:]
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = {"run": ("http", "local"), "onefile": ("http",), "test": ("test",), "lowest": ("http", "spark")}
    wanted, seen = [*project["dependencies"]], set()
    left = list(extras[name])
    while left:
        extra = left.pop()
        if extra not in seen:
            seen.add(extra)
            for requirement in map(Requirement, project["optional-dependencies"][extra]):
                if requirement.name == "bkctl":
                    left.extend(requirement.extras)
                else:
                    wanted.append(str(requirement))
    for requirement in map(Requirement, wanted):
        pin = pins.get(canonicalize_name(requirement.name), "none")
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement}: {pin}"
