"""Jobs whose workers die, as a process: `dying_job.py METADATA-URI READ-SCOPE WRITE-SCOPE DIRECTORY`.

Exports a scope while a worker is killed in a partition, and writes ledgers while another one is killed when it has
written half of one. Spark logs all it can into DIRECTORY. Prints what came out as JSON, after the plans.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bkctl.metadata.cluster import open_cluster
from bkctl.spark.jobs.copying import export_ledgers
from bkctl.spark.session import spark_session
from bkctl.spark.sources.ledger_source import LedgerSource

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_S = 120.0
LOG4J = """
rootLogger.level = debug
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = %s
appender.file.layout.type = PatternLayout
"""


def die(directory: str, name: str) -> None:
    """Kill this process, unless that was done under this name before."""
    note = Path(directory, name)
    if not note.exists():
        note.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dying_source(directory: str) -> type[LedgerSource]:
    """The source, whose first task to have read something dies before it is through."""

    class Source(LedgerSource):
        def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
            yield from super().read(partition)
            die(directory, "died reading")

    return Source


def dying_rows(uri: str, scope_id: int, directory: str) -> Any:
    """A step that dies half way through its second partition, when ledgers for both are there."""

    def step(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for at, batch in enumerate(batches):
            yield batch
            # More bytes were handed over before than buffers on the way hold.
            if at == 5 and context.partitionId() == 1 and not Path(directory, "died writing").exists():
                until = time.monotonic() + WAIT_S
                with open_cluster(uri) as cluster:
                    while len(list(cluster.ledgers.ledgers(scope_id))) < 2:
                        assert time.monotonic() < until, "the ledgers were not created"
                        time.sleep(0.05)
                die(directory, "died writing")

    return step


def main(uri: str, read_scope: str, write_scope: str, directory: str) -> None:
    """Run the jobs and print what came out."""
    Path(directory, "log4j2.properties").write_text(LOG4J % f"{directory}/spark.log")
    Path(directory, "events").mkdir()
    options = {
        "metadataUri": uri, "metadataUser": "someone", "metadataPasswordFile": f"{directory}/metadata-password",
        "ensembleSize": "2", "ledgerPasswordEnv": "THE_LEDGER_PASSWORD",
    }  # fmt: skip
    reading = {name: options[name] for name in ("metadataUri", "metadataUser", "metadataPasswordFile")}
    settings = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{directory}/events",
        "spark.local.dir": f"{directory}/local",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        f"-Djava.io.tmpdir={directory} -Dlog4j2.configurationFile=file:{directory}/log4j2.properties",
    }
    with spark_session("local[2,4]", settings=settings) as spark:
        spark.sparkContext.setLogLevel("INFO")
        spark.dataSource.register(dying_source(directory))
        exported = export_ledgers(spark, f"{directory}/export", {**reading, "ledgerScopeId": read_scope}).collect()
        frame = spark.read.format("bookkeeper.ledger").options(**reading, ledgerScopeId=read_scope).load()
        frame.explain(True)
        rows = spark.range(0, 2000, 1, 2).selectExpr("lpad(cast(id as string), 1000, '.') as payload")
        rows = rows.mapInArrow(dying_rows(uri, int(write_scope), directory), rows.schema)
        names = Path(directory, "names")
        written = rows.write.format("bookkeeper.ledger").mode("append")
        written.options(**options, ledgerScopeId=write_scope, names=str(names)).save()
        rows.explain(True)
    counts = [[row.ledgerQualifiedName, row.entryCount] for row in exported]
    print(json.dumps({"exported": counts, "ledgers": names.read_text().split()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
