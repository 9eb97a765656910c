"""The progress of a Spark job: finished and known tasks of its stages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
