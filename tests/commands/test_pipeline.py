"""`bkctl pipeline` as a process of its own: with Spark's JVM, without Java, without the extra, and interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support import (
    golden,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.command_line import CommandLine
from support.servers import find_java, wait_for
from support.waiting import LIMIT_S

from bkctl.commands.kit.command import Run
from bkctl.commands.kit.settings import GlobalOptions, Session
from bkctl.commands.pipeline.common import connection_options
from bkctl.spark.sources.options import CONNECTION_OPTIONS

GOLDEN = golden.GoldenBookie("4.18.0", "sorted")
SPARK = ("--master", "local[*]")
PLACE = f"bookie:3181={GOLDEN.ledger_dir}"


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    try:
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except OSError:
        return []


def runs_java(pid: int) -> bool:
    try:
        return b"org.apache.spark.deploy.SparkSubmit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.long
def test_inventory_on_spark_needs_only_java_and_prints_only_rows(tmp_path: Path) -> None:
    find_java()
    with CommandLine(None).process(
        "pipeline", "inventory", *SPARK, "--by", "entrylog", PLACE, "-o", "ndjson", cwd=tmp_path
    ) as run:
        out, err = run.communicate(timeout=800)
    assert run.returncode == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    listed = CommandLine(None)("entrylog", "list", GOLDEN.ledger_dir, "-o", "ndjson").rows
    assert {row["file"]: row["fileSize"] for row in rows} == {row["file"]: row["size"] for row in listed}
    assert {row["bookieId"] for row in rows} == {"bookie:3181"}
    (said,) = err.decode().splitlines()
    assert said.endswith(f"in {sum(row['entryCount'] for row in rows):,} entries")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_table_of_hive_gets_dated_rows_of_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    find_java()
    settings = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={tmp_path / 'metastore'};create=true",
        "spark.driver.extraJavaOptions": f"-Dderby.system.home={tmp_path} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))

    def saved(*words: str, code: int = 0) -> str:
        command = ("pipeline", "inventory", PLACE, "--save-table", "inventory", *words, "-o", "ndjson")
        with CommandLine(None).process(*command, cwd=tmp_path) as run:
            out, err = run.communicate(timeout=800)
        assert run.returncode == code, err
        return out.decode() if code == 0 else err.decode()

    printed = [json.loads(saved("--append")) for _ in range(2)]
    assert "The table inventory exists; add --append" in saved(code=5)
    rows = pyarrow.parquet.read_table(tmp_path / "warehouse" / "inventory").to_pylist()
    assert len({row.pop("runAt") for row in rows}) == 2
    assert rows == printed


@pytest.mark.long
def test_an_interrupt_ends_spark_with_its_exit_code(tmp_path: Path) -> None:
    find_java()
    with CommandLine(None).process("pipeline", "inventory", *SPARK, PLACE, cwd=tmp_path) as run:
        found: list[int] = []

        def java_is_up() -> bool:
            found[:] = [child for child in children(run.pid) if runs_java(child)]
            return bool(found)

        wait_for(java_is_up, "Spark does not start", 400)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=400)
    assert run.returncode == 130, err
    assert err.decode().splitlines() == ["bkctl: Interrupted"]
    wait_for(lambda: not runs_java(found[0]), "Spark works on")


@pytest.mark.parametrize(
    ("words", "python", "code", "problem"),
    [
        (["--archive", "nowhere.tar.gz#environment"], sys.executable, 4, "The archive nowhere.tar.gz does not exist"),
        (SPARK, "/nowhere/python", 1, "PYSPARK_PYTHON is /nowhere/python, which is not a program on this machine"),
    ],
)
def test_missing_archive_and_python_are_errors_before_spark_starts(
    tmp_path: Path, words: Sequence[str], python: str, code: int, problem: str
) -> None:
    find_java()
    command = [sys.executable, "-m", "bkctl", "pipeline", "inventory", PLACE, *words]
    done = subprocess.run(
        command, env={**os.environ, "PYSPARK_PYTHON": python}, cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"bkctl: {problem}")


def without_java(tmp_path: Path, **variables: str) -> str:
    """Return the command's output in an environment without Java, with `variables` added."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PATH")}
    environment |= {"PATH": str(tmp_path), **variables}
    command = [sys.executable, "-m", "bkctl", "pipeline", "inventory", *SPARK, PLACE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    return line


def test_missing_java_is_one_line_with_a_hint(tmp_path: Path) -> None:
    line = without_java(tmp_path)
    assert line.startswith("bkctl: Spark needs Java 17 or later, and java is not on PATH; install")
    assert "/nowhere/bin/java does not run" in without_java(tmp_path, JAVA_HOME="/nowhere")
    old = tmp_path / "java"
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    assert f"{old} is 11;" in without_java(tmp_path)


@pytest.mark.parametrize("package", ["pyspark", "pyarrow", "pandas"])
def test_missing_packages_are_one_line_with_a_hint(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    answer = CommandLine(None)("pipeline", "inventory", *SPARK, PLACE)
    assert (answer.code, answer.out) == (1, b"")
    assert answer.problem == f"The pipeline runs on Spark, and {package} is not installed; pip install 'bkctl[spark]'"


@pytest.mark.parametrize("package", ["duckdb", "pyarrow"])
def test_missing_packages_of_the_local_engine_are_one_line(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    answer = CommandLine(None)("pipeline", "inventory", PLACE)
    assert (answer.code, answer.out) == (1, b"")
    words = f"The pipeline runs on DuckDB without --master, and {package} is not installed; pip install 'bkctl[local]'"
    assert answer.problem.startswith(words)


@pytest.mark.parametrize("words", [SPARK, ("--spark-conf", "spark.driver.memory=1g"), ("--no-ship",)])
def test_options_of_spark_choose_spark(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    answer = CommandLine(None)("pipeline", "inventory", *words, PLACE)
    assert (answer.code, answer.problem.partition(",")[0]) == (1, "The pipeline runs on Spark")


def test_sources_get_every_connection_setting(tmp_path: Path) -> None:
    options = GlobalOptions(
        metadata_uri="zk://zk1:2181/ledgers", bookie_addresses=("b1:3181=127.0.0.1:1", "b2:3181=127.0.0.1:2"),
        tls_ca=Path("ca.pem"), tls_certificate=Path("cert.pem"), tls_key=Path("key.pem"), metadata_tls=True,
        metadata_tls_ca=Path("store.pem"), metadata_tls_certificate=Path("store-cert.pem"),
        metadata_tls_key=Path("store-key.pem"), metadata_user="admin", metadata_password_file=tmp_path / "password",
        metadata_sasl=True, metadata_creator_acl=True, timeout_s=7.6,
    )  # fmt: skip
    found = connection_options(Run(Session(), options))
    assert found == {
        "metadataUri": "zk://zk1:2181/ledgers", "bookieAddress": "b1:3181=127.0.0.1:1,b2:3181=127.0.0.1:2",
        "tlsCa": str(Path("ca.pem").absolute()), "tlsCert": str(Path("cert.pem").absolute()),
        "tlsKey": str(Path("key.pem").absolute()), "metadataTls": "true",
        "metadataTlsCa": str(Path("store.pem").absolute()), "metadataTlsCert": str(Path("store-cert.pem").absolute()),
        "metadataTlsKey": str(Path("store-key.pem").absolute()), "metadataUser": "admin",
        "metadataPasswordFile": str(tmp_path / "password"), "metadataSasl": "true", "metadataCreatorAcl": "true",
        "timeoutSeconds": "8",
    }  # fmt: skip
    assert set(found) == set(CONNECTION_OPTIONS) - {"metadataPasswordEnv"}
    without = connection_options(Run(Session(), replace(options, metadata_password_file=None)))
    assert without["metadataPasswordEnv"] == "BKCTL_METADATA_PASSWORD"
