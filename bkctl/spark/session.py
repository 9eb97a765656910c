"""The Spark session of a job: made quietly, on this machine or on a cluster; its progress; its errors in one line.

Whoever has a session of their own passes that to the jobs instead, and calls `sources.register` on it.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError, NotFound, Unreachable, is_interrupt

if TYPE_CHECKING:
    import logging

    from pyspark.sql import SparkSession

LOCAL_MASTER: Final = "local[*]"
JAVA_VERSION_MIN: Final = 17
#: The first release with filter pushdown, Arrow writers and admission control for Python data sources.
PYSPARK_VERSION_MIN: Final = (4, 2)
_JAVA_HINT: Final = "install a Java runtime (Debian: openjdk-17-jre-headless), or set JAVA_HOME"
_EXTRA_HINT: Final = "pip install 'bkctl[spark]'"
#: How often running stages are looked at.
_PROGRESS_PERIOD_S: Final = 0.2
_STOP_WAIT_S: Final = 20.0
_LOOK_PERIOD_S: Final = 0.05
#: What the JVM takes at most to end once it answers no more.
_DEATH_WAIT_S: Final = 2.0

#: What a job wants of any session; settings that the caller gives come after these.
_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
#: Where Spark makes up a secret for each application. The applications of a standalone cluster share its one secret.
_AUTHENTICATION: Final = {"spark.authenticate": "true"}
_SECRET: Final = "spark.authenticate.secret"
#: And of one on this machine alone: no name of it is looked up, and nobody else can connect.
_LOCAL_SETTINGS: Final = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "16",
}

#: A line of a log or a stack trace that names an error.
_CAUSE: Final = re.compile(
    r"\s*(?::|Caused by:|Exception in thread \"[^\"]*\")?\s*(?:\w+\.)+(\w*(?:Exception|Error): .{1,500})"
)
_LOCAL: Final = re.compile(r"local(\[.*\])?")


def require_spark() -> None:
    """Make sure that Spark can run here. Raises BkctlError with what to install: Python packages, or Java 17."""
    import warnings

    # What PySpark thinks of the releases of its own dependencies is nothing for an operator.
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
        raise BkctlError("Spark needs Java 17 or later, and there is no java on PATH", hint=_JAVA_HINT)
    try:
        said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        reason = f"{java} does not run: {error.strerror or error}"
        raise BkctlError(f"Spark needs Java {JAVA_VERSION_MIN} or later, and {reason}", hint=_JAVA_HINT) from error
    found = re.search(r'version "(\d+)', said.stderr + said.stdout)
    if said.returncode or found is None:
        raise BkctlError(f"Spark needs Java {JAVA_VERSION_MIN} or later, and {java} does not work", hint=_JAVA_HINT)
    if int(found[1]) < JAVA_VERSION_MIN:
        raise BkctlError(f"Spark needs Java {JAVA_VERSION_MIN} or later, and {java} is {found[1]}", hint=_JAVA_HINT)


def is_local(master: str) -> bool:
    """Whether `master` means threads of this process alone."""
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
    """A Spark session with the data sources registered, stopped at the end; one that is active is used, and left.

    `settings` are Spark's own (`spark.executor.memory` …). `ship` sends this package to the executors as a zip (None:
    unless `master` is local); `archives` are unpacked beside them (`venv.tar.gz#environment`). Spark's log goes
    nowhere, with `verbose` to stderr. Spark's processes authenticate to each other, except on a standalone cluster
    without spark.authenticate.secret; what it keeps on this machine's disk is in a directory of this user's alone. An
    interrupt ends Spark's processes before it goes on to the caller. Where PYSPARK_PYTHON is a relative path in an
    archive, this Python stands in for it on this machine.
    Raises BkctlError where Spark cannot run or start, NotFound for an archive that is not there; what fails inside
    comes as the BkctlError that it is.
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
    chosen = {**_SETTINGS, **(_LOCAL_SETTINGS if is_local(master) else {}), "spark.master": master}
    if is_local(master) or master.startswith(("yarn", "k8s://")) or _SECRET in settings:
        chosen |= _AUTHENTICATION
    chosen |= {"spark.app.name": app_name, **settings}
    if archives:
        chosen["spark.archives"] = ",".join([*filter(None, [chosen.get("spark.archives")]), *map(_archive, archives)])
    with tempfile.TemporaryDirectory() as directory, _Spark(chosen, Path(directory), verbose=verbose) as running:
        session = running.session
        if not is_local(master) if ship is None else ship:
            # Executors fetch it when they start, so it has to stay there; it comes before what they have installed, for
            # sources that are registered from here on.
            session.sparkContext.addPyFile(str(package_zip(Path(directory))))
        register(session)
        with plain_errors():
            yield session


def _archive(text: str) -> str:
    """The value of an archive with its path made absolute, for Spark runs elsewhere. Raises NotFound."""
    path, sign, name = text.partition("#")
    if "://" in path:
        return text
    if not Path(path).is_file():
        raise NotFound(f"The archive {path} does not exist")
    return f"{Path(path).absolute()}{sign}{name}"


class _Spark:
    """Spark's JVM and the session on it, with an empty `directory` of its own; a context manager."""

    def __init__(self, settings: Mapping[str, str], directory: Path, *, verbose: bool) -> None:
        self._settings, self._directory, self._verbose = settings, directory, verbose
        self._log: Any = None
        self._gateway: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        self._accumulators: Any = None
        self.session: Any = None

    def __enter__(self) -> _Spark:
        import logging

        from pyspark import SparkConf, SparkContext
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        # They log to stderr what is told as an error anyway; py4j an interrupt, too, and that to the root logger.
        logging.getLogger("py4j").setLevel(logging.CRITICAL + 1)
        logging.getLogger("pyspark").setLevel(logging.CRITICAL + 1)
        logging.getLogger().addFilter(_is_not_of_py4j)
        # Spark's default is whatever `python3` is on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        self._log = tempfile.TemporaryFile("a+b")
        conf = SparkConf(loadDefaults=False)
        for name, value in self._settings.items():
            conf.set(name, value)
        started = False
        try:
            self._gateway = self._launch()
            # Python's own handler: Spark's would talk to a JVM that the interrupted call still waits for.
            with _interrupts():
                context: Any = SparkContext(conf=conf, gateway=self._gateway)
            # A thread of PySpark's that would tell by a traceback of the JVM's end, whoever ends it.
            self._accumulators = context._accumulatorServer
            self._accumulators.handle_error = lambda *request: None
            context.setLogLevel("WARN" if self._verbose else "ERROR")
            self.session = SparkSession(context)
            started = True
        except Exception as error:
            if is_interrupt(error):
                raise KeyboardInterrupt from None
            is_of_spark = isinstance(error, PySparkException) or type(error).__module__.startswith("py4j")
            if is_of_spark or self._is_dead():
                raise self._failure(error) from error
            raise
        finally:
            if not started:
                self._kill()
        return self

    def _launch(self) -> Any:
        """Start the JVM as PySpark's launch_gateway does, but as a process that is ours to end, and connect to it.

        It has a session of its own, so that an interrupt at the terminal reaches us alone; it ends when we do.
        """
        from pyspark import java_gateway
        from pyspark.find_spark_home import _find_spark_home
        from pyspark.serializers import UTF8Deserializer, read_int

        read_port: Any = read_int
        read_secret: Any = UTF8Deserializer
        launch: Any = java_gateway.launch_gateway
        home: Any = _find_spark_home()
        command = [str(Path(home, "bin", "spark-submit"))]
        for name, value in self._settings.items():
            command += ["--conf", f"{name}={value}"]
        command += shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
        output = None if self._verbose else self._log
        connection = self._directory / "connection"
        variables = {"SPARK_CONNECT_MODE": "0", "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection)}
        if "SPARK_LOCAL_DIRS" not in os.environ and "spark.local.dir" not in self._settings:
            # Not as a setting: executors elsewhere would get it, too.
            variables["SPARK_LOCAL_DIRS"] = str(self._directory / "local")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=os.environ | variables,
            cwd=self._planning_directory(), start_new_session=True,
        )  # fmt: skip
        while not connection.is_file():
            if self._process.poll() is not None:
                raise BkctlError("The JVM ended before it could be used")
            time.sleep(_LOOK_PERIOD_S)
        with open(connection, "rb") as file:
            port, secret = read_port(file), read_secret().loads(file)
        address = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
        os.environ.update(address)
        try:
            return launch()
        finally:
            for name in address:
                del os.environ[name]

    def _planning_directory(self) -> Path | None:
        """Where the JVM has to run so that it finds the Python that tasks run in; None: where we do.

        Sources are planned by a worker of this JVM, under the name that executors know Python by; and what an archive
        brings is unpacked there alone. Raises BkctlError where that Python is not there, and cannot be.
        """
        python = os.environ["PYSPARK_PYTHON"]
        if shutil.which(python) is not None:
            return None
        named = Path(python)
        if is_local(self._settings["spark.master"]) or len(named.parts) < 2 or named.is_absolute() or ".." in python:
            raise BkctlError(
                f"PYSPARK_PYTHON is {python}, and there is no such program on this machine",
                hint="Spark needs it here, too",
            )
        stand_in = self._directory / named
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        stand_in.chmod(0o755)
        return self._directory

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # Where Spark itself went away, what fails here is only that nobody answers.
            doubtful = isinstance(error, OSError) or type(error) is BkctlError
            failure = self._failure(error) if error is not None and doubtful and self._is_dead() else None
            if kind is None or issubclass(kind, Exception):
                with suppress(Exception):
                    self.session.stop()
        finally:
            self._kill()
        if failure is not None:
            raise failure from error

    def _is_dead(self) -> bool:
        """Whether the JVM ended by itself."""
        if self._process is None:
            return False
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_DEATH_WAIT_S)
        return self._process.poll() is not None

    def _kill(self) -> None:
        """End the JVM, whatever it is at, and forget it."""
        process, self._process = self._process, None
        # Who is interrupted again meanwhile would leave it behind.
        with _interrupts(ignored=True):
            if process is not None:
                process.terminate()
                try:
                    process.wait(_STOP_WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                if process.stdin is not None:
                    process.stdin.close()
            self._forget()

    def _forget(self) -> None:
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        accumulators, self._accumulators = self._accumulators, None
        if accumulators is not None and not accumulators.server_shutdown:
            accumulators.shutdown()
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            with suppress(Exception):
                gateway.shutdown()
            SparkContext._gateway = SparkContext._jvm = None
            SparkContext._active_spark_context = None
            SparkSession._instantiatedSession = SparkSession._activeSession = None
        if self._log is not None:
            self._log.close()

    def _failure(self, error: BaseException) -> BkctlError:
        """What Spark's log says of its end."""
        master, logged = self._settings["spark.master"], self._logged()
        if "unresponsive" in logged or "unresponsive" in str(error):
            return Unreachable(f"No Spark master answers at {master}", hint="check --master and that it is up")
        if "OutOfMemoryError" in logged:
            return BkctlError("Spark has too little memory", hint="give it more: --spark-conf spark.driver.memory=4g")
        causes = _causes(f"{error}\n{logged}")
        lines = (line for line in logged.splitlines() if line.strip() and not line.startswith(("WARNING", "Using ")))
        cause = causes[-1] if causes else next(lines, str(error))
        return BkctlError(f"Spark failed on {master}: {cause}", hint="--verbose shows its log")

    def _logged(self) -> str:
        if self._log is None or self._log.closed:
            return ""
        self._log.seek(0)
        return str(self._log.read().decode("utf-8", "replace"))


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


@contextmanager
def _interrupts(*, ignored: bool = False) -> Iterator[None]:
    """At the end SIGINT is handled as it was before; until then, if asked for, it is ignored."""
    import signal

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def package_zip(directory: Path) -> Path:
    """This package as a zip in `directory`, which executors that lack it can import: for `--py-files`.

    Its compiled parts stay behind, since nothing imports them from a zip; the rest does the same in Python.
    """
    import zipfile

    import bkctl

    root = Path(bkctl.__file__).parent
    path = directory / "bkctl.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source in sorted(root.rglob("*.py")):
            if "commands" not in source.relative_to(root).parts:
                archive.write(source, f"bkctl/{source.relative_to(root)}")
    return path


# --- progress -------------------------------------------------------------------------------------------------------


@contextmanager
def following(session: SparkSession, report: Callable[[int, int], None]) -> Iterator[None]:
    """While the block runs, call `report(tasks done, tasks known)` from a thread, as stages begin and go on."""
    tracker = session.sparkContext.statusTracker()
    done = threading.Event()
    seen: dict[int, tuple[int, int]] = {}

    def look() -> None:
        while not done.wait(_PROGRESS_PERIOD_S):
            with suppress(Exception):  # Spark ends while we ask; progress is no reason to fail.
                for stage_id in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage_id)
                    if info is not None:
                        seen[stage_id] = info.numCompletedTasks, info.numTasks
                # What is no longer active is complete.
                active = set(tracker.getActiveStageIds())
                for stage_id in seen.keys() - active:
                    seen[stage_id] = seen[stage_id][1], seen[stage_id][1]
            report(sum(each[0] for each in seen.values()), sum(each[1] for each in seen.values()))

    thread = threading.Thread(target=look, name="spark-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- errors ---------------------------------------------------------------------------------------------------------


@contextmanager
def plain_errors() -> Iterator[None]:
    """What fails in Spark, as one BkctlError: the one that a task or a planner raised, else what Spark says.

    An interrupted call ends with a last word of PySpark's to the JVM, which may fail: that is the interrupt still.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except Exception as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from None
        if isinstance(error, (PySparkException, Py4JError)):
            raise plain_error(error) from error
        raise


def plain_error(error: BaseException) -> BkctlError:
    """The BkctlError that an error of Spark stands for."""
    from bkctl.spark.sources import source_error

    own = source_error(error)
    if own is not None:
        return own
    said = str(error)
    causes = _causes(said) or [line.strip() for line in said.splitlines() if line.strip()][:1]
    return BkctlError(f"Spark: {causes[-1] if causes else type(error).__name__}", hint="--verbose shows its log")


def _causes(text: str) -> list[str]:
    """What the lines of a log or a stack trace name as errors, without their packages."""
    found: list[str] = []
    for line in text.splitlines():
        match = _CAUSE.match(line)
        # A cause that is told with what it is the cause of says less.
        if match is not None and not (found and match[1].partition(": ")[2] in found[-1]):
            found.append(match[1])
    return found
