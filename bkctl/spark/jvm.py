"""Spark's JVM as a child process: started for one session, diagnosed by its log, always ended with the session."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from bkctl.errors import BkctlError, Unreachable, is_interrupt
from bkctl.spark.failures import java_causes
from bkctl.spark.internals import forget_context, gateway_to, silence_accumulators, spark_home

_STOP_WAIT_S: Final = 20.0
_START_POLL_S: Final = 0.05
#: Longest time that the JVM takes to end once it no longer answers.
_DEATH_WAIT_S: Final = 2.0
_LOCAL: Final = re.compile(r"local(\[.*\])?")


def is_local(master: str) -> bool:
    """Return whether `master` means threads of this process alone."""
    return _LOCAL.fullmatch(master) is not None


class SparkRuntime:
    """A JVM with an empty `directory` of its own, and the Spark session on it; a context manager that ends both.

    The JVM has a process session of its own, so an interrupt at the terminal reaches only this process; the JVM ends
    when this process does.
    """

    def __init__(self, settings: Mapping[str, str], directory: Path, *, verbose: bool) -> None:
        self._settings, self._directory, self._verbose = settings, directory, verbose
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (`_end` closes it)
        self._process: subprocess.Popen[bytes] | None = None
        self._gateway: Any = None
        self._accumulators: Any = None
        self._session: Any = None

    def __enter__(self) -> Any:
        from pyspark.errors import PySparkException

        _silence_loggers()
        # Spark's default is whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with ExitStack() as stack:
            stack.callback(self._end)
            try:
                self._connect()
            except Exception as error:
                if is_interrupt(error):
                    raise KeyboardInterrupt from None
                is_of_spark = isinstance(error, PySparkException) or type(error).__module__.startswith("py4j")
                if is_of_spark or self._has_ended():
                    raise self._failure(error) from error
                raise
            stack.pop_all()
        return self._session

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # Once the JVM has ended, these errors only say that it does not answer; its log has the cause.
            may_follow = isinstance(error, OSError) or type(error) is BkctlError
            failure = self._failure(error) if error is not None and may_follow and self._has_ended() else None
            if kind is None or issubclass(kind, Exception):
                with suppress(Exception):
                    self._session.stop()
        finally:
            self._end()
        if failure is not None:
            raise failure from error

    def _connect(self) -> None:
        """Start the JVM and a session on it. Follows PySpark's launch_gateway, but keeps the process."""
        from pyspark import SparkConf, SparkContext
        from pyspark.sql import SparkSession

        connection = self._directory / "connection"
        self._process = self._start(connection)
        while not connection.is_file():
            if self._process.poll() is not None:
                raise BkctlError("The JVM ended before it could be used")
            time.sleep(_START_POLL_S)
        self._gateway = gateway_to(connection)
        conf = SparkConf(loadDefaults=False)
        for name, value in self._settings.items():
            conf.set(name, value)
        # Python's own handler: Spark's would talk to a JVM that the interrupted call still waits for.
        with _signals_restored():
            context: Any = SparkContext(conf=conf, gateway=self._gateway)
        self._accumulators = silence_accumulators(context)
        context.setLogLevel("WARN" if self._verbose else "ERROR")
        self._session = SparkSession(context)

    def _start(self, connection: Path) -> subprocess.Popen[bytes]:
        command = [str(spark_home() / "bin" / "spark-submit")]
        for name, value in self._settings.items():
            command += ["--conf", f"{name}={value}"]
        command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        output = None if self._verbose else self._log
        variables = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection)}
        if "SPARK_LOCAL_DIRS" not in os.environ and "spark.local.dir" not in self._settings:
            # A setting would also reach executors on other machines.
            variables["SPARK_LOCAL_DIRS"] = str(self._directory / "local")
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=os.environ | variables,
            cwd=self._working_directory(), start_new_session=True,
        )  # fmt: skip

    def _working_directory(self) -> Path | None:
        """Return the directory in which the JVM finds the tasks' Python; None: the current one. Raises BkctlError.

        A worker of this JVM plans sources with the Python that PYSPARK_PYTHON names for executors. Spark unpacks an
        archive only on executors, so a link to this Python stands in for a relative path into one.
        """
        python = os.environ["PYSPARK_PYTHON"]
        if shutil.which(python) is not None:
            return None
        path = Path(python)
        if is_local(self._settings["spark.master"]) or len(path.parts) < 2 or path.is_absolute() or ".." in python:
            raise BkctlError(
                f"PYSPARK_PYTHON is {python}, which is not a program on this machine",
                hint="Spark plans with that Python here; install it, or unset PYSPARK_PYTHON",
            )
        stand_in = self._directory / path
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        stand_in.chmod(0o755)
        return self._directory

    def _has_ended(self) -> bool:
        """Return whether the JVM ended by itself; waits up to 2 seconds for that."""
        if self._process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_WAIT_S)
        return self._process.poll() is not None

    def _failure(self, error: BaseException) -> BkctlError:
        """Return the error that the JVM's log and `error` stand for."""
        self._log.seek(0)
        master, log = self._settings["spark.master"], self._log.read().decode("utf-8", "replace")
        if "unresponsive" in log or "unresponsive" in str(error):
            return Unreachable(f"No Spark master answers at {master}", hint="check --master and that it is up")
        if "OutOfMemoryError" in log:
            return BkctlError("Spark has too little memory", hint="give it more: --spark-conf spark.driver.memory=4g")
        causes = java_causes(f"{error}\n{log}")
        lines = (line for line in log.splitlines() if line.strip() and not line.startswith(("WARNING", "Using ")))
        cause = causes[-1] if causes else next(lines, str(error))
        return BkctlError(f"Spark failed on {master}: {cause}", hint="--verbose shows its log")

    def _end(self) -> None:
        """End the JVM, whatever it is doing, and what this process has of it."""
        # A second interrupt must not leave the JVM behind.
        with _signals_restored(ignore=True):
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(_STOP_WAIT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                if self._process.stdin is not None:
                    self._process.stdin.close()
            if self._accumulators is not None and not self._accumulators.server_shutdown:
                self._accumulators.shutdown()
            if self._gateway is not None:
                with suppress(Exception):
                    self._gateway.shutdown()
                forget_context()
            self._log.close()


def _silence_loggers() -> None:
    """Keep PySpark and py4j from logging to stderr what this module raises; py4j also uses the root logger."""
    import logging

    for name in ("py4j", "pyspark"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    logging.getLogger().addFilter(lambda record: Path(record.pathname).parent.name != "py4j")


@contextmanager
def _signals_restored(*, ignore: bool = False) -> Iterator[None]:
    """Restore the handlers of signals after the block, in the main thread; with `ignore`, ignore them in the block."""
    import signal

    from bkctl.tasks import signals_restored

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with signals_restored() as before:
        if ignore:
            for number in before:
                signal.signal(number, signal.SIG_IGN)
        yield
