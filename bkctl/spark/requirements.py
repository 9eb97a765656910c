"""The requirements of Spark on this machine: PySpark with its packages, and a Java runtime."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError

JAVA_VERSION_MIN: Final = 17
#: The first release with filter pushdown, Arrow writers and admission control for Python data sources.
PYSPARK_VERSION_MIN: Final = (4, 2)
_JAVA_HINT: Final = "install a Java runtime (Debian: openjdk-17-jre-headless), or set JAVA_HOME"
_EXTRA_HINT: Final = "pip install 'bkctl[spark]'"
_JAVA_TIMEOUT_S: Final = 60.0


def require_spark() -> None:
    """Raise BkctlError, saying what to install, unless Spark can run here."""
    _require_packages()
    _require_java()


def _require_packages() -> None:
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


def _require_java() -> None:
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
