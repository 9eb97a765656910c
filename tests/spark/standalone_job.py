"""A job on a Spark standalone cluster, as a process: `standalone_job.py MASTER PLACE DIRECTORY ARCHIVE`.

Its tasks wait at a gate, one of their executors is killed there, and then the gate opens. Prints what came out as JSON:
the rows, which tasks ran twice, where the executors' bkctl is from, and what the sources are sent along with.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, log_records
from bkctl.spark.jobs.bookies import find_bookies
from bkctl.spark.session import spark_session

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_S = 600.0


def gate(directory: str) -> Any:
    """A step that says which process runs a task, and waits for the file `open`; from then on it only notes tasks."""

    def wait(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        import bkctl
        from bkctl.files import scan

        context = TaskContext.get()
        assert context is not None
        note = Path(directory, f"{context.partitionId()}-{context.attemptNumber()}")
        # The worker's parent is the daemon, and the daemon's the executor.
        parent = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
        unfinished = note.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"executor": parent, "bkctl": bkctl.__file__, "scanner": scanner_of(scan)}))
        unfinished.rename(note)
        until = time.monotonic() + WAIT_S
        while not Path(directory, "open").exists():
            assert time.monotonic() < until, "nobody opened the gate"
            time.sleep(0.05)
        yield from batches

    return wait


def scanner_of(scan: Any) -> str | None:
    """Return the file of the compiled scanner that the module `scan` uses."""
    return getattr(sys.modules.get(f"{scan.__package__}._scan"), "__file__", None)


def kill_one(directory: Path) -> None:
    """Kill the executor of the first task that waits at the gate, once tasks of two executors do; open it then."""
    until = time.monotonic() + WAIT_S
    executors: set[int] = set()
    while len(executors) < 2 and time.monotonic() < until:
        executors = {json.loads(note.read_text())["executor"] for note in directory.glob("*-0")}
        time.sleep(0.05)
    if len(executors) == 2:
        os.kill(min(executors), signal.SIGKILL)
    (directory / "open").touch()


def main(master: str, place: str, directory: Path, archive: str) -> None:
    """Run the job and print what came out."""
    bookies = find_bookies([place])
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Djava.io.tmpdir={directory}"
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.sql.shuffle.partitions": "2",
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.cores.max": "2",
        "spark.executor.extraJavaOptions": options,
        "spark.driver.extraJavaOptions": options,
    }
    with spark_session(master, settings=settings, archives=[archive]) as spark:
        from pyspark.sql import functions as F

        records = log_records(spark, bookies, [QUALIFIED_NAME, "recordSize"])
        gated = records.mapInArrow(gate(str(directory)), records.schema)
        sums = gated.groupBy(QUALIFIED_NAME).agg(
            F.count("*").alias("entryCount"), F.sum(F.col("recordSize") + 4).alias("size")
        )
        killer = threading.Thread(target=kill_one, args=(directory,), daemon=True)
        killer.start()
        rows = sums.collect()
        killer.join()
        state: Any = spark._jsparkSession.sessionState()
        registered = state.dataSourceManager()
        notes = sorted(note for note in directory.glob("*-*"))
        print(
            json.dumps(
                {
                    "rows": [row.asDict() for row in rows],
                    "again": sorted({note.name.partition("-")[0] for note in notes if not note.name.endswith("-0")}),
                    "bkctl": sorted({json.loads(note.read_text())["bkctl"] for note in notes}),
                    "scanners": sorted({str(json.loads(note.read_text())["scanner"]) for note in notes}),
                    "sent": list(registered.lookupDataSource("bookkeeper.entrylog").dataSourceCls().pythonIncludes()),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
