"""A real Spark Connect server: the sources and the jobs' functions give the rows of the local engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.command_line import CommandLine
from support.servers import Server, find_java, free_port, require

JOB = Path(__file__).parent / "connect_job.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The URL of a server with two cores, which `spark-submit` starts as `start-connect-server.sh` does."""
    import pyspark

    if any(find_spec(name) is None for name in ("grpc_status", "zstandard")):
        require("connect", "the client of Spark Connect is not installed: pip install 'pyspark[connect]'")
    find_java()
    home = Path(pyspark.__file__).parent
    port, log = free_port(), tmp_path / "connect.log"
    settings = {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "768m",
        "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dderby.system.home={tmp_path} "
        f"-Djava.io.tmpdir={tmp_path}",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    variables = [f"SPARK_HOME={home}", f"SPARK_LOCAL_DIRS={tmp_path / 'local'}", f"PYSPARK_PYTHON={sys.executable}"]
    command = ["env", *variables, str(home / "bin" / "spark-submit")]
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    running = Server(
        "spark-connect", log, lambda: command,
        lambda: log.exists() and "Spark Connect server started" in log.read_text(errors="replace"),
    )  # fmt: skip
    try:
        running.start()
        yield f"sc://127.0.0.1:{port}"
    finally:
        running.kill()


def job_rows(*arguments: str) -> dict[str, Any]:
    """Return the rows that the job prints."""
    done = subprocess.run(
        [sys.executable, JOB, *arguments], env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = json.loads(done.stdout)
    return rows


@pytest.mark.long
def test_connect_server_gives_the_rows_of_the_local_engine(server: str, tmp_path: Path) -> None:
    files = bookie_files.make(tmp_path / "cluster")
    first = files.places()[0]
    # One bookie's journals are gone, and with them what no log of it has.
    for journal in Path(first, "journal", "current").glob("*.txn"):
        journal.unlink()
    found, expected = (job_rows(url, files.uri, str(files.directory)) for url in (server, "local"))
    assert expected["integrity"]
    assert {name: found[name] for name in expected} == expected
    logs = [log for place in files.places() for log in Path(place, "ledgers").rglob("*.log")]
    records = CommandLine(None)("entrylog", "read", *logs, "-o", "ndjson").rows
    assert found["sql"] == [{"count": len(records)}]
    names = {each.ledger.qualified_name for each in files.written}
    assert {row["ledgerQualifiedName"] for row in found["metadata"]} == names
    assert {row["state"] for row in found["planned"]} == {"planned"}
