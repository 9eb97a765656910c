"""The names of PySpark that are not part of its public interface: all of them, and only here.

pyproject bounds PySpark's version for this module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


def spark_home() -> Path:
    """Return the directory of Spark: SPARK_HOME, else the one in PySpark's package."""
    from pyspark.find_spark_home import _find_spark_home

    found: Any = _find_spark_home()
    return Path(found)


def gateway_to(connection: Path) -> Any:
    """Return py4j's gateway to the JVM that wrote its port and secret to the file `connection`."""
    from pyspark import java_gateway
    from pyspark.serializers import UTF8Deserializer, read_int

    read_port: Any = read_int
    read_secret: Any = UTF8Deserializer
    launch: Any = java_gateway.launch_gateway
    with open(connection, "rb") as file:
        port, secret = read_port(file), read_secret().loads(file)
    address = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    os.environ.update(address)
    try:
        return launch()
    finally:
        for name in address:
            del os.environ[name]


def silence_end(context: SparkContext) -> Any:
    """Return the server of accumulators; neither it nor iterators over rows print a traceback when the JVM ends."""
    internal: Any = context
    server = internal._accumulatorServer
    server.handle_error = lambda *request: None
    hook = sys.unraisablehook
    sys.unraisablehook = lambda each: None if "PyLocalIterable" in repr(each.object) else hook(each)
    return server


def forget_context() -> None:
    """Make PySpark start anew, since its JVM ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    SparkContext._gateway = SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None


def uri_exists(session: SparkSession, uri: str) -> bool:
    """Return whether something exists at a URI of Hadoop's file systems."""
    system, path = _of_hadoop(session, uri)
    return bool(system.exists(path))


def qualified_uri(session: SparkSession, uri: str) -> str:
    """Return a URI or an absolute path as Hadoop's file systems write it."""
    system, path = _of_hadoop(session, uri)
    return str(system.makeQualified(path).toString())


def matching_uris(session: SparkSession, pattern: str) -> list[str]:
    """Return what exists at a URI with Hadoop's wildcards (`*`, `?`, `[…]`, `{…}`), in order."""
    system, path = _of_hadoop(session, pattern)
    # Null without wildcards, where nothing exists.
    return sorted(str(status.getPath().toString()) for status in system.globStatus(path) or ())


def _of_hadoop(session: SparkSession, uri: str) -> tuple[Any, Any]:
    """Return the file system and path of a URI. Needs a session with a JVM of its own."""
    internal: Any = session
    path = internal._jvm.org.apache.hadoop.fs.Path(uri)
    return path.getFileSystem(internal._jsparkSession.sessionState().newHadoopConf()), path
