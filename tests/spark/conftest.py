"""Spark for tests: one session for the whole run, in this process's own JVM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from support import servers
from support.engines import Engine

from bkctl.bookie.local import LocalCluster
from bkctl.spark.local.session import local_session
from bkctl.tasks import signals_restored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A local Spark session with two cores that knows bkctl's sources; no UI, little memory, quiet."""
    servers.find_java()
    from pyspark.sql import SparkSession

    from bkctl.spark.sources import register

    directory = tmp_path_factory.mktemp("spark")
    # Workers must be this Python, whatever the PATH says.
    before = {name: os.environ.get(name) for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")}
    os.environ.update(dict.fromkeys(before, sys.executable))
    settings: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.memory": "1g",
        # Of a small table in a join a page stays in memory, of 8 MiB if Spark chooses its size.
        "spark.buffer.pageSize": "256k",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        # Without C2, Java has room for 48 MB of code: Spark fills it, and what is removed is compiled again.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m "
        f"-XX:MetaspaceSize=192m -Dderby.system.home={directory} -Djava.io.tmpdir={directory}",
    }
    builder = SparkSession.builder.master("local[2]").appName("bkctl tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    # Spark's handler of SIGINT would stay for the tests of other rooms: asyncio cancels work by its own only.
    with signals_restored():
        session = builder.getOrCreate()
    register(session)
    yield session
    session.stop()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="module")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.HBaseServer]:
    """One HBase for a module: no other test of the processes that have a Spark needs it, and it never rests."""
    server = servers.HBaseServer(tmp_path_factory.mktemp("hbase"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.long)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The engine of this process; among the long tests Spark as well. With `on_both_engines` both, always.

    That both give the same rows is a test of its own for each job (test_facts.py).
    """
    if request.param == "spark":
        session = request.getfixturevalue("spark")
        yield Engine(session, ("--master", "local[2]"))
        # Kept results of jobs fill the JVM, whose collections then take longer than the tests.
        session.catalog.clearCache()
        return
    with local_session() as session:
        yield Engine(session, ())


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Three bookies of our own over SQLite, and ledgers to be written there; tests keep to scopes of their own."""
    from support.live_ledgers import Live

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        local = LocalCluster(tmp_path_factory.mktemp("live"))
        local.up(3)
        made = Live(local.metadata_uri)
        try:
            yield made
        finally:
            made.close()
            local.down()
