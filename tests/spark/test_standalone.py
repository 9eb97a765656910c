"""A Spark standalone cluster of several processes: the package is sent along, and a killed executor changes nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.command_line import CommandLine
from support.servers import Server, find_java, free_port

JOB = Path(__file__).parent / "standalone_job.py"


def daemon(name: str, directory: Path, main_class: str, arguments: list[str], sign: str) -> Server:
    """A daemon of Spark's, of the classes that PySpark ships."""
    import pyspark

    home = Path(pyspark.__file__).parent
    log = directory / f"{name}.log"
    (core,) = (home / "jars").glob("spark-core_*.jar")
    variables = [
        f"SPARK_HOME={home}", "SPARK_LOCAL_IP=127.0.0.1", f"SPARK_LOCAL_DIRS={directory / 'local'}",
        # Without it a worker looks for the builds of Spark's own source tree.
        f"SPARK_SCALA_VERSION={core.name.removeprefix('spark-core_').partition('-')[0]}",
    ]  # fmt: skip
    command = [
        "env", *variables, find_java(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m",
        "--add-opens=java.base/java.lang=ALL-UNNAMED", "--add-opens=java.base/java.nio=ALL-UNNAMED",
        "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/java.util=ALL-UNNAMED",
        "-cp", str(home / "jars" / "*"), f"org.apache.spark.deploy.{main_class}", "--host", "127.0.0.1",
        "--webui-port", "0", *arguments,
    ]  # fmt: skip
    return Server(name, log, lambda: command, lambda: log.exists() and sign in log.read_text(errors="replace"))


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """The URL of a cluster with two workers of one core each."""
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    head = daemon("spark-master", tmp_path, "master.Master", ["--port", str(port)], "New state: ALIVE")
    workers = [
        daemon(
            f"spark-worker-{number}", tmp_path, "worker.Worker",
            ["--cores", "1", "--memory", "600m", "--work-dir", str(tmp_path / f"work-{number}"), url],
            "Successfully registered with master",
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        head.start()
        for worker in workers:
            worker.launch()
        for worker in workers:
            worker.wait_ready()
        yield url
    finally:
        for server in (*workers, head):
            server.kill()


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_killed_executor_does_not_change_the_result(master: str, tmp_path: Path) -> None:
    files = bookie_files.make(tmp_path / "cluster")
    gate = tmp_path / "gate"
    gate.mkdir()
    # Where the executors' Python comes in an archive, it is nowhere but there.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as packed:
        packed.add(python, "bin/python")
    environment = {**os.environ, "PYSPARK_PYTHON": "./environment/bin/python", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, JOB, master, files.directory, gate, "packed.tar.gz#environment"], env=environment,
        cwd=tmp_path, capture_output=True, text=True, timeout=1000, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["again"], "no task ran twice"
    assert {Path(each).parent.parent.name for each in found["bkctl"]} == {"bkctl.zip"}
    assert found["sent"] == ["bkctl.zip"]
    entries: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in CommandLine(None)("entrylog", "read", *_logs(files.places()), "-o", "ndjson").rows:
        entries[row["ledgerQualifiedName"]] += 1
        sizes[row["ledgerQualifiedName"]] += row["recordSize"] + 4
    assert {row["ledgerQualifiedName"]: (row["entryCount"], row["size"]) for row in found["rows"]} == {
        name: (count, sizes[name]) for name, count in entries.items()
    }


def _logs(places: list[str]) -> list[Path]:
    return [log for place in places for log in sorted(Path(place, "ledgers").rglob("*.log"))]
