"""PySpark finds the sources by itself, through the packages that pyproject.toml declares."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import golden
from support.servers import find_java
from support.source_rows import rows_of

from bkctl.spark.sources import SOURCES
from bkctl.spark.sources.records import EntryLogSource

ROOT = Path(__file__).resolve().parents[2]
#: A session that registers nothing.
READ = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.memory", "512m")
spark = builder.config("spark.local.dir", sys.argv[2]).getOrCreate()
count = spark.read.format("bookkeeper.entrylog").load(sys.argv[1]).where("entryId >= 3").count()
manager = spark._jsparkSession.sessionState().dataSourceManager()
names = [name for name in sys.argv[3:] if manager.dataSourceExists(name)]
print(json.dumps({"count": count, "names": names}))
"""


def installed(directory: Path) -> list[str]:
    """Put the packages into `directory` under the names that an installation gives them; return these names."""
    places = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    names = [name for name in places if name.startswith("pyspark_")]
    for name in names:
        (directory / name).symlink_to(ROOT / places[name])
    return names


def test_every_source_has_a_package(tmp_path: Path) -> None:
    names = installed(tmp_path)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(names) == {name for name in packages if name.startswith("pyspark_")}
    code = f"import {', '.join(names)}\nprint(*({'.DefaultSource.name(), '.join(names)}.DefaultSource.name(),))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert sorted(done.stdout.split()) == sorted(name.replace("pyspark_bkctl_", "bookkeeper.") for name in names)
    assert len(names) == len(SOURCES)


def test_releases_that_bkctl_does_not_support_find_nothing(tmp_path: Path) -> None:
    names = installed(tmp_path)
    # As an earlier PySpark: a name that the sources import is missing there.
    (tmp_path / "earlier.py").write_text("import sys\nsys.modules['pyspark.sql.datasource'] = sys\n")
    code = (
        f"import earlier, {', '.join(names)}\nprint([hasattr(each, 'DefaultSource') for each in ({', '.join(names)})])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str([False] * len(names))


@pytest.mark.long
def test_session_reads_sources_that_were_not_registered(tmp_path: Path) -> None:
    find_java()
    (tmp_path / "packages").mkdir()
    names = installed(tmp_path / "packages")
    formats = [name.replace("pyspark_bkctl_", "bookkeeper.") for name in names]
    directory = golden.GoldenBookie("4.18.0", "db").ledger_dir
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "packages"), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", READ, directory, tmp_path / "local", *formats], env=environment, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [row for row in rows_of(EntryLogSource, path=directory) if row["entryId"] >= 3]
    assert json.loads(done.stdout) == {"count": len(rows), "names": formats}
