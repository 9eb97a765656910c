"""Build backend: setuptools' own, but each build starts from nothing.

setuptools keeps `build/` and packs whatever an earlier build left there: modules deleted since, extensions of older
sources. Here a build has a temporary directory, and compiles every extension.

BKCTL_REQUIRE_COMPILED=1 refuses a wheel without its extensions, which are optional otherwise.
"""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def _from_nothing() -> Iterator[None]:
    """Let setuptools build in a temporary directory, every extension, for the stable ABI of CPython 3.11."""
    before = os.environ.get("DIST_EXTRA_CONFIG")
    with tempfile.TemporaryDirectory(prefix="bkctl-build-") as directory:
        config = Path(directory, "build.cfg")
        config.write_text(
            f"[build]\nbuild_base = {directory}/build\n[egg_info]\negg_base = {directory}\n"
            "[build_ext]\nforce = 1\n[bdist_wheel]\npy_limited_api = cp311\n"
        )
        os.environ["DIST_EXTRA_CONFIG"] = str(config)
        try:
            yield
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before


def _extensions() -> list[str]:
    """Return the extensions' paths below the root, without their suffixes."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    return [module["name"].replace(".", "/") for module in modules]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; see PEP 517. Warn of extensions that could not be compiled."""
    with _from_nothing():
        name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    with zipfile.ZipFile(Path(wheel_directory, name)) as wheel:
        built = [name.partition(".")[0] for name in wheel.namelist() if name.endswith(".so")]
    missing = [path for path in _extensions() if path not in built]
    if missing:
        problem = f"not compiled: {', '.join(missing)}; a C compiler and Python's headers are needed"
        if os.environ.get("BKCTL_REQUIRE_COMPILED") == "1":
            Path(wheel_directory, name).unlink()
            raise SystemExit(f"bkctl: {problem}")
        print(f"bkctl: warning: {problem}, Python does the same more slowly", file=sys.stderr)
    return name


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that leads to this directory; see PEP 660. Compile the extensions beside their sources."""
    for path in _extensions():
        for built in (ROOT / path).parent.glob(f"{Path(path).name}.*.so"):
            built.unlink()  # one for a single version of Python would come before that for all
    with _from_nothing():
        name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return name
