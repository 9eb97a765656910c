"""The Spark session of a job, on this machine or on a cluster, with the data sources registered; what it requires.

Callers with a session of their own pass that to the jobs instead, and call `sources.register` on it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.errors import BkctlError, NotFound
from bkctl.spark.failures import plain_errors
from bkctl.spark.jvm import SparkRuntime, is_local

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
    import warnings

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
        version = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False
        )  # fmt: skip
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
    import zipfile

    import bkctl

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
    from importlib.util import find_spec

    spec = find_spec("bkctl.files._scan")
    return None if spec is None or spec.origin is None else Path(spec.origin)


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
                for stage_id in tracker.getActiveStageIds():
                    info = tracker.getStageInfo(stage_id)
                    if info is not None:
                        stages[stage_id] = info.numCompletedTasks, info.numTasks
                # A stage that is no longer active is complete.
                active = set(tracker.getActiveStageIds())
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
