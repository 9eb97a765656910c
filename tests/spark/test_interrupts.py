"""An interrupt of a running job ends it without a word of PySpark's, and ends all of Spark."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from py4j.protocol import Py4JNetworkError
from support import source_rows  # noqa: F401 (skips where there is no PySpark)
from support.servers import find_java, wait_for

from bkctl.spark.failures import plain_errors

JOB = Path(__file__).parent / "interrupted_job.py"


def is_running(pid: int) -> bool:
    """Return True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_error_during_an_interrupt_is_the_interrupt() -> None:
    """As `collect`, whose context manager tells the JVM on its way out that the call is over."""

    @plain_errors()
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise Py4JNetworkError("Answer from Java side is empty")

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_interrupted_job_leaves_no_output_and_no_process(tmp_path: Path) -> None:
    find_java()
    note = tmp_path / "worker"
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with subprocess.Popen([sys.executable, JOB, note], env=environment, stdout=-1, stderr=-1, text=True) as run:
        try:
            wait_for(lambda: note.exists() or run.poll() is not None, "the job does not begin", 400)
            assert run.poll() is None, run.communicate()
            worker = int(note.read_text())
            # The worker's parent is the daemon, and the daemon's the JVM.
            java = parent(parent(worker))
            assert parent(java) == run.pid
            run.send_signal(signal.SIGINT)
            assert (*run.communicate(timeout=400), run.returncode) == ("", "", 130)
        finally:
            run.kill()
    for pid in (java, worker):
        wait_for(lambda pid=pid: not is_running(pid), "Spark works on", 400)
