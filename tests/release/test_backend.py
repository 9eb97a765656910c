"""Wheels hold the present sources, whatever earlier builds left behind."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest
from release.conftest import copy_checkout, run
from support import compiled


def build(root: Path, **variables: str) -> dict[str, bytes]:
    """Build a wheel as pip does, and return its files."""
    target = root.parent / "built"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target), "."]
    run(command, root, PIP_DISABLE_PIP_VERSION_CHECK="1", **variables)
    (wheel,) = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def edit_quietly(path: Path, old: str, new: str) -> None:
    """Replace text of a file that keeps its time, as archives and `git stash` leave files older than what was built."""
    times = path.stat()
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns - 10**12))


def extension(files: dict[str, bytes], name: str) -> bytes:
    """Return the bytes of a module in C."""
    (found,) = (data for path, data in files.items() if path.startswith(f"{name}.") and path.endswith(".so"))
    return found


def test_wheel_has_no_deleted_module_and_no_stale_extension(tmp_path: Path) -> None:
    compiled.require_compiled()
    root = copy_checkout(tmp_path / "checkout")
    (root / "bkctl/files/ghost.py").write_text('"""Deleted later."""\n')
    first = build(root)
    assert "bkctl/files/ghost.py" in first
    assert b"compiled anew" not in extension(first, "bkctl/files/_scan")

    (root / "bkctl/files/ghost.py").unlink()
    edit_quietly(root / "bkctl/files/_scan.c", "The inner loop of scan.py, compiled.", "compiled anew")
    edit_quietly(root / "bkctl/protocol/_wire.h", "V2_FRONT = 24,", "V2_FRONT = 25,")
    second = build(root)
    assert [name for name in second if "ghost" in name] == []
    assert b"compiled anew" in extension(second, "bkctl/files/_scan")
    assert extension(second, "bkctl/protocol/_runs") != extension(first, "bkctl/protocol/_runs")


def test_wheel_ignores_what_other_builds_left_in_the_checkout(tmp_path: Path) -> None:
    compiled.require_compiled()
    root = copy_checkout(tmp_path / "checkout")
    for stale in (
        "build/lib/bkctl/ghost.py",
        "build/bdist.linux-x86_64/wheel/bkctl/ghost.py",
        "bkctl/files/_scan.abi3.so",
    ):
        (root / stale).parent.mkdir(parents=True, exist_ok=True)
        (root / stale).write_text("stale")
    files = build(root)
    assert [name for name in files if "ghost" in name] == []
    assert extension(files, "bkctl/files/_scan").startswith(b"\x7fELF")


@pytest.mark.long
def test_a_wheel_without_its_extensions_is_refused_where_they_are_required(tmp_path: Path) -> None:
    compiled.require_compiled()
    root = copy_checkout(tmp_path / "checkout")
    (root / "bkctl/files/_scan.c").write_text("#error mistaken\n")
    with pytest.raises(AssertionError, match=r"not compiled: bkctl/files/_scan; a C compiler"):
        build(root, BKCTL_REQUIRE_COMPILED="1")
    files = build(root)
    assert extension(files, "bkctl/protocol/_runs")
    assert not [name for name in files if "_scan" in name and name.endswith(".so")]
