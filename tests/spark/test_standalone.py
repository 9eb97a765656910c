"""A Spark standalone cluster of several processes: killed executors and absent directories change nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.command_line import CommandLine
from support.servers import Server, fetch_s3a, find_java, free_port, require

from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.spark.session import compiled_scanner

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
def test_killed_executor_does_not_change_the_result(master: str, tmp_path: Path) -> None:
    files = bookie_files.make(tmp_path / "cluster")
    gate = tmp_path / "gate"
    gate.mkdir()
    # Executors' Python from an archive is in the archive alone.
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
    scanner = compiled_scanner()
    if scanner is not None:
        assert {Path(each).name for each in found["scanners"]} == {scanner.name}
        assert str(scanner) not in found["scanners"]
    entries: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for row in CommandLine(None)("entrylog", "read", *_logs(files.places()), "-o", "ndjson").rows:
        entries[row["ledgerQualifiedName"]] += 1
        sizes[row["ledgerQualifiedName"]] += row["recordSize"] + 4
    assert {row["ledgerQualifiedName"]: (row["entryCount"], row["size"]) for row in found["rows"]} == {
        name: (count, sizes[name]) for name, count in entries.items()
    }


def _damage(log: Path, ledger: LedgerId) -> int:
    """Change the last byte of a record of `ledger` in a log, and return its entry id."""
    with EntryLogReader.open(log) as reader:
        record = next(each for each in reader.records() if each.ledger == ledger)
    with open(log, "r+b") as file:
        file.seek(record.offset + 3 + record.record_size)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    return record.entry_id


@pytest.fixture
def s3_port(tmp_path: Path) -> Iterator[int]:
    """The port of a store that speaks S3, and nothing else that executors could see."""
    if find_spec("moto") is None or find_spec("flask_cors") is None:
        require("s3", "moto and its server are not installed: pip install 'bkctl[test]'")
    port = free_port()
    log = tmp_path / "s3.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = Server("s3", log, lambda: command, lambda: "Running on" in log.read_text(errors="replace"))
    try:
        server.start()
        yield port
    finally:
        server.kill()


def _s3a_settings(port: int) -> dict[str, str]:
    """Settings with which Spark reads `s3a://` from the store at `port`."""
    import pyspark

    (hadoop,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    jars = fetch_s3a(hadoop.stem.removeprefix("hadoop-client-api-"))
    return {
        "spark.jars": ",".join(str(jar) for jar in sorted(jars.glob("*.jar"))),
        "spark.hadoop.fs.s3a.endpoint": f"http://127.0.0.1:{port}",
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.access.key": "key",
        "spark.hadoop.fs.s3a.secret.key": "secret",
    }


@pytest.mark.long
def test_integrity_from_facts_in_s3_needs_no_bookies_directories(
    master: str, s3_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("EC2_METADATA_DISABLED", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    files = bookie_files.make(tmp_path / "cluster")
    place = tmp_path / "bookie"
    query = f"scheme=http&endpoint_override=127.0.0.1:{s3_port}&region=us-east-1&allow_bucket_creation=true"
    facts = f"s3://facts/of/bookies?{query}"
    expected = set()
    for directory, bookie_id in zip(files.places(), files.bookies, strict=True):
        # Each bookie has the same path, as on hosts of their own, and the path is gone when the job runs.
        shutil.move(directory, place)
        for digest_type in (DigestType.CRC32C, DigestType.HMAC):
            ledger = next(each.ledger for each in files.flushed if each.digest_type is digest_type)
            entry_id = _damage(place / "ledgers" / "current" / "0.log", ledger)
            expected.add((ledger.qualified_name, entry_id, bookie_id, "damaged"))
        extracted = CommandLine(files.uri)("pipeline", "extract", place, facts, "-o", "ndjson")
        assert [row["bookieId"] for row in extracted.rows] == [bookie_id]
        shutil.rmtree(place)
    settings = {
        **_s3a_settings(s3_port),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.sql.shuffle.partitions": "2",
    }
    options = [word for name, value in settings.items() for word in ("--spark-conf", f"{name}={value}")]
    command = CommandLine(files.uri).process(
        "pipeline", "integrity", "--facts", facts, "--master", master, *options, "-o", "ndjson", cwd=tmp_path
    )
    with command as run:
        out, err = run.communicate(timeout=1000)
    assert run.returncode == 3, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert {(row["ledgerQualifiedName"], row["entryId"], row["bookieId"], row["problem"]) for row in rows} == expected
    assert len(rows) == len(expected)
    assert not place.exists()


def _logs(places: list[str]) -> list[Path]:
    return [log for place in places for log in sorted(Path(place, "ledgers").rglob("*.log"))]
