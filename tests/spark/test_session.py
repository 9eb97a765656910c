"""The session that the pipeline makes: its processes know each other, and its data is this user's alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PySpark)
from support.servers import find_java

from bkctl.spark.session import compiled_scanner, package_zip

#: Prints the settings, the directories of Spark's data below a directory, and the modes two levels above each.
JOB = """
import json, sys
from pathlib import Path
from bkctl.spark.session import spark_session

with spark_session("local[1]", settings=json.loads(sys.argv[1])) as session:
    assert session.range(1000).repartition(2).count() == 1000
    found = Path(sys.argv[2]).rglob("blockmgr-*")
    places = {str(path): oct(path.parent.parent.stat().st_mode & 0o777) for path in found}
    print(json.dumps({"settings": dict(session.sparkContext.getConf().getAll()), "places": places}))
"""


def run_job(directory: Path, **settings: str) -> dict[str, dict[str, Any]]:
    """Return the output of JOB; `directory` is for temporary files of this process."""
    find_java()
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["TMPDIR"] = str(directory)
    environment.pop("SPARK_LOCAL_DIRS", None)
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={directory}"
    settings = {"spark.driver.extraJavaOptions": options, **settings}
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps(settings), directory],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


SCAN = """
import sys
sys.path.insert(0, sys.argv[1])
from bkctl.files import scan
print(scan.__file__, getattr(sys.modules.get("bkctl.files._scan"), "__file__", None))
"""


def test_shipped_package_uses_the_scanner_of_its_platform_beside_it(tmp_path: Path) -> None:
    scanner = compiled_scanner()
    if scanner is None:
        pytest.skip("this installation has no compiled scanner")

    def used(name: str) -> list[str]:
        directory = tmp_path / name
        directory.mkdir()
        shutil.copy(scanner, directory / name)
        path = package_zip(directory)
        done = subprocess.run(
            [sys.executable, "-c", SCAN, path], capture_output=True, text=True, check=True, cwd=tmp_path
        )  # fmt: skip
        module, found = done.stdout.split()
        assert module == f"{path}/bkctl/files/scan.py"
        return [found]

    assert used(scanner.name) == [str(tmp_path / scanner.name / scanner.name)]
    assert used("_scan.cpython-39-s390x-linux-gnu.so") == ["None"]


def test_spark_authenticates_and_keeps_files_private(tmp_path: Path) -> None:
    found = run_job(tmp_path)
    assert found["settings"]["spark.authenticate"] == "true"
    ((place, mode),) = found["places"].items()
    assert Path(place).is_relative_to(tmp_path)
    assert Path(place).parent.name == "local"
    assert mode == "0o700"
    assert not Path(place).parent.parent.exists()  # nothing is left


@pytest.mark.long
def test_user_settings_take_precedence(tmp_path: Path) -> None:
    wanted = tmp_path / "chosen"
    wanted.mkdir()
    found = run_job(tmp_path, **{"spark.authenticate": "false", "spark.local.dir": str(wanted)})
    assert found["settings"]["spark.authenticate"] == "false"
    assert found["places"]
    assert all(Path(place).is_relative_to(wanted) for place in found["places"])


#: Kills its JVM while rows are read, and prints the error.
DYING = """
import os, signal
from pathlib import Path
from bkctl.errors import BkctlError
from bkctl.spark.session import spark_session

try:
    with spark_session("local[1]", settings={"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}) as session:
        rows = session.range(1_000_000).toLocalIterator()
        next(rows)
        (java,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(java), signal.SIGKILL)
        for _ in rows:
            pass
except BkctlError as error:
    print(error)
"""


def test_killed_jvm_is_one_error_without_a_traceback() -> None:
    find_java()
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", DYING], env=environment, capture_output=True, text=True, check=False
    )  # fmt: skip
    message = "Spark failed on local[1]: its JVM ended; --verbose shows its log\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, message, "")
