"""The tasks of jobs on an executor that lacks the bookies' directories."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PySpark)

from bkctl.errors import UsageError
from bkctl.spark.jobs import garbage, journal_audit
from bkctl.spark.jobs.bookies import BookieFiles


def test_tasks_name_directories_that_the_executor_lacks(tmp_path: Path) -> None:
    words = "cannot be seen by the executor on .* does not exist there; mount"
    with pytest.raises(UsageError, match=words):
        list(garbage.log_rows(("b:3181", str(tmp_path / "gone" / "0.log"))))
    bookie = BookieFiles("b:3181", (str(tmp_path / "gone"),), (str(tmp_path),), (str(tmp_path),))
    with pytest.raises(UsageError, match=words):
        list(journal_audit.check_rows(bookie))
    # A log that a bookie deleted meanwhile is left out.
    assert list(garbage.log_rows(("b:3181", str(tmp_path / "0.log")))) == []
