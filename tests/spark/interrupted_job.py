"""A job to interrupt, as a process: `interrupted_job.py NOTE`. Its task writes its process id to NOTE, and waits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bkctl.spark.session import spark_session

if TYPE_CHECKING:
    import pyarrow as pa

WAIT_S = 900.0
SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def main(note: Path) -> None:
    """Run it. Exits with 130 where it is interrupted, as the command line does, and says nothing of its own."""

    def wait(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        unfinished = note.with_suffix(".unfinished")
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(note)
        time.sleep(WAIT_S)
        yield from batches

    with spark_session("local[1]", settings=SETTINGS) as spark:
        spark.range(1).mapInArrow(wait, "id bigint").collect()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
