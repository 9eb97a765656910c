"""The Spark session of a job, on this machine or on a cluster, with the data sources registered; what it requires.

Callers with a session of their own pass that to the jobs instead, and call `sources.register` on it.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import bkctl
from bkctl.errors import BkctlError, NotFound, Unreachable, is_interrupt, on_error
from bkctl.spark.failures import java_causes, plain_errors
from bkctl.spark.internals import forget_context, gateway_to, silence_end, spark_home
from bkctl.tasks import signals_restored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN: Final = 17
#: The first release with filter pushdown, Arrow writers and admission control for Python data sources.
PYSPARK_VERSION_MIN: Final = (4, 2)
_JAVA_HINT: Final = "install a Java runtime (Debian: openjdk-17-jre-headless), or set JAVA_HOME"
_EXTRA_HINT: Final = "pip install 'bkctl[spark]'"
_JAVA_TIMEOUT_S: Final = 60.0


def require_spark() -> None:
    """Raise BkctlError, saying what to install, unless Spark can run here."""
    # PySpark warns about releases of its own dependencies; an operator cannot act on that.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError as error:
        name = (error.name or "pyspark").partition(".")[0]
        raise BkctlError(f"The pipeline runs on Spark, and {name} is not installed", hint=_EXTRA_HINT) from error
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < PYSPARK_VERSION_MIN:
        needed = ".".join(map(str, PYSPARK_VERSION_MIN))
        raise BkctlError(
            f"The pipeline needs PySpark {needed} or later, and {pyspark.__version__} is installed", hint=_EXTRA_HINT
        )
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise _java_error("java is not on PATH")
    try:
        command = [java, "-version"]
        version = subprocess.run(command, capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    except OSError as error:
        raise _java_error(f"{java} does not run: {error.strerror or error}") from error
    found = re.search(r'version "(\d+)', version.stderr + version.stdout)
    if version.returncode or found is None:
        raise _java_error(f"{java} does not work")
    if int(found[1]) < JAVA_VERSION_MIN:
        raise _java_error(f"{java} is {found[1]}")


def _java_error(reason: str) -> BkctlError:
    return BkctlError(f"Spark needs Java {JAVA_VERSION_MIN} or later, and {reason}", hint=_JAVA_HINT)


# --- the session ------------------------------------------------------------------------------------------------------

LOCAL_MASTER: Final = "local[*]"
_LOCAL: Final = re.compile(r"local(\[.*\])?")

#: Settings of every session; settings of the caller override these.
_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Kept results have as many partitions as their bytes need, not as many as shuffles have.
    "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true",
}
#: Masters under which Spark creates a secret for each application. Applications of a standalone cluster share one.
_AUTHENTICATION: Final = {"spark.authenticate": "true"}
_SECRET: Final = "spark.authenticate.secret"
#: On this machine alone: no look-up of its name, and no connection from elsewhere.
_LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # Shuffles begin with many small parts; Spark joins them by the bytes that they turn out to have.
    "spark.sql.shuffle.partitions": "16",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "64",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "8m",
}


#: Added to `bkctl.files` in the zip: the directory of the zip is searched for compiled modules, too.
_BESIDE_THE_ZIP: Final = "from pathlib import Path\n\n__path__.append(str(Path(__file__).parents[3]))\n"


def is_local(master: str) -> bool:
    """Return whether `master` means threads of this process alone."""
    return _LOCAL.fullmatch(master) is not None


@contextmanager
def spark_session(
    master: str = LOCAL_MASTER,
    *,
    settings: Mapping[str, str] = {},
    archives: Sequence[str] = (),
    ship: bool | None = None,
    app_name: str = "bkctl",
    verbose: bool = False,
) -> Iterator[SparkSession]:
    """Yield a Spark session with the data sources registered, stopped at the end; an active session is used and kept.

    `settings` are Spark's own (`spark.executor.memory` …). `ship` sends this package to the executors as a zip, and its
    compiled scanner beside it (None: unless `master` is local); `archives` are unpacked there
    (`venv.tar.gz#environment`). Spark's log is discarded, or goes to stderr with `verbose`. Spark's processes
    authenticate to each other, except on a standalone cluster without spark.authenticate.secret. Spark's files on this
    machine are in a directory that only this user can read. An interrupt ends Spark's processes before it reaches the
    caller. Where PYSPARK_PYTHON is a relative path into an archive, this Python stands in for it on this machine.
    Raises BkctlError if Spark cannot run or start, NotFound for a missing archive. Failures of Spark inside the block
    are raised as `plain_errors` says.
    """
    require_spark()
    from pyspark.sql import SparkSession

    from bkctl.spark.sources import register

    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)
        with plain_errors():
            yield active
        return
    chosen = _configuration(master, settings, archives, app_name)
    with tempfile.TemporaryDirectory() as directory, SparkRuntime(chosen, Path(directory), verbose=verbose) as session:
        if not is_local(master) if ship is None else ship:
            # Executors fetch the zip when they start, so it must stay. It takes precedence over a bkctl installed
            # there, for sources that are registered from here on.
            session.sparkContext.addPyFile(str(package_zip(Path(directory))))
            scanner = compiled_scanner()
            if scanner is not None:
                session.sparkContext.addFile(str(scanner))
        register(session)
        with plain_errors():
            yield session


def _configuration(
    master: str, settings: Mapping[str, str], archives: Sequence[str], app_name: str
) -> dict[str, str]:  # fmt: skip
    chosen = {**_SETTINGS, **(_LOCAL_SETTINGS if is_local(master) else {}), "spark.master": master}
    if is_local(master) or master.startswith(("yarn", "k8s://")) or _SECRET in settings:
        chosen |= _AUTHENTICATION
    chosen |= {"spark.app.name": app_name, **settings}
    if archives:
        chosen["spark.archives"] = ",".join([*filter(None, [chosen.get("spark.archives")]), *map(_archive, archives)])
    return chosen


def _archive(text: str) -> str:
    """Return `FILE[#NAME]` with an absolute path, since Spark runs elsewhere. Raises NotFound."""
    path, sign, name = text.partition("#")
    if "://" in path:
        return text
    if not Path(path).is_file():
        raise NotFound(f"The archive {path} does not exist")
    return f"{Path(path).absolute()}{sign}{name}"


def package_zip(directory: Path) -> Path:
    """Write this package to a zip in `directory` and return its path: for `--py-files`, to executors that lack bkctl.

    Compiled modules are left out, since Python cannot import them from a zip; Python code does the same instead. The
    scanner of `compiled_scanner` is found beside the zip, where Spark puts files that are sent.
    """
    root = Path(bkctl.__file__).parent
    path = directory / "bkctl.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted(root.rglob("*.py")):
            name = source.relative_to(root)
            if "commands" in name.parts:
                continue
            if name == Path("files/__init__.py"):
                archive.writestr(f"bkctl/{name}", f"{source.read_text()}\n{_BESIDE_THE_ZIP}")
            else:
                archive.write(source, f"bkctl/{name}")
    return path


def compiled_scanner() -> Path | None:
    """Return the compiled scanner of this installation, which reads entry logs about four times as fast; None without.

    Its file name says for which Python and platform it was made; others ignore it, and scan in Python.
    """
    spec = find_spec("bkctl.files._scan")
    return None if spec is None or spec.origin is None else Path(spec.origin)


# --- Spark's JVM ------------------------------------------------------------------------------------------------------

_STOP_WAIT_S: Final = 20.0
_START_POLL_S: Final = 0.05
#: Longest time that the JVM takes to end once it no longer answers.
_DEATH_WAIT_S: Final = 2.0
#: Lines of the JVM's log that name no failure.
_NO_CAUSE: Final = re.compile(r"WARNING|Using |Picked up |Setting default |To adjust |.* WARN ")


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

        # PySpark and py4j log what this module raises; py4j also uses the root logger.
        for name in ("py4j", "pyspark"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        logging.getLogger().addFilter(lambda record: Path(record.pathname).parent.name != "py4j")
        # Spark's default is whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        with on_error(self._end):
            try:
                self._connect()
            except Exception as error:
                if is_interrupt(error):
                    raise KeyboardInterrupt from None
                is_of_spark = isinstance(error, PySparkException) or type(error).__module__.startswith("py4j")
                if is_of_spark or self._has_ended():
                    raise self._failure(error) from error
                raise
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
        self._accumulators = silence_end(context)
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
        lines = (line for line in log.splitlines() if line.strip() and not _NO_CAUSE.match(line))
        cause = causes[-1] if causes else next(lines, "its JVM ended" if self._has_ended() else str(error))
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


@contextmanager
def _signals_restored(*, ignore: bool = False) -> Iterator[None]:
    """Restore the handlers of signals after the block, in the main thread; with `ignore`, ignore them in the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with signals_restored() as before:
        if ignore:
            for number in before:
                signal.signal(number, signal.SIG_IGN)
        yield


# --- progress ---------------------------------------------------------------------------------------------------------

_PERIOD_S: Final = 0.2


@contextmanager
def report_progress(session: SparkSession, report: Callable[[int, int], None]) -> Iterator[None]:
    """Call `report(finished tasks, known tasks)` from a thread, every 0.2 seconds, while the block runs."""
    tracker = session.sparkContext.statusTracker()
    done = threading.Event()
    #: Stage id → its finished tasks, all its tasks.
    stages: dict[int, tuple[int, int]] = {}

    def poll() -> None:
        while not done.wait(_PERIOD_S):
            with suppress(Exception):  # Spark may end between two questions; progress must not fail the job.
                active = set(tracker.getActiveStageIds())
                for stage_id in active:
                    if (info := tracker.getStageInfo(stage_id)) is not None:
                        stages[stage_id] = info.numCompletedTasks, info.numTasks
                # A stage that is no longer active is complete.
                for stage_id in stages.keys() - active:
                    stages[stage_id] = stages[stage_id][1], stages[stage_id][1]
            report(sum(finished for finished, _ in stages.values()), sum(known for _, known in stages.values()))

    thread = threading.Thread(target=poll, name="spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
