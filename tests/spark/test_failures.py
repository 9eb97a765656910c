"""Failures of Spark in one line: the error of bkctl in its text, else the cause that a traceback or the JVM names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support import source_rows  # noqa: F401 (skips where there is no PySpark)

from bkctl.errors import BkctlError, CorruptRecord
from bkctl.spark.failures import java_causes, plain_error, plain_errors, source_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/opt/bkctl/job.py", line 7, in rows
    batch.column(3)
    ~~^^^
{error}
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("IndexError: list index out of range", "IndexError: list index out of range"),
        ("AssertionError", "AssertionError"),
        ("pyarrow.lib.ArrowInvalid: Invalid column\nmore lines", "ArrowInvalid: Invalid column"),
        (
            "KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File \"x.py\", line 1, in <module>\nValueError: not 'a'",
            "ValueError: not 'a'",
        ),
        (
            "ZeroDivisionError: division by zero\n\tat org.apache.spark.api.python.BasePythonRunner.read(P.scala:1)\n"
            "Caused by: java.io.EOFException: nothing left",
            "ZeroDivisionError: division by zero",
        ),
    ],
)
def test_worker_errors_name_their_cause(error: str, cause: str) -> None:
    found = plain_error(ValueError(WORKER.format(error=error)))
    assert type(found) is BkctlError
    assert str(found) == f"Spark: {cause}; --verbose shows its log"


def test_errors_of_bkctl_keep_their_class_and_message() -> None:
    text = WORKER.format(error="bkctl.errors.CorruptRecord: 0.log: Record has length -9 at byte 4")
    for found in (source_error(ValueError(text)), plain_error(ValueError(text))):
        assert isinstance(found, CorruptRecord)
        assert str(found) == "0.log: Record has length -9 at byte 4"
    assert source_error(ValueError("bkctl.errors.EXIT_CODES: is a dict")) is None


def test_java_errors_name_their_last_cause() -> None:
    text = (
        "Job aborted\n\tat org.apache.spark.Some.where(S.scala:1)\nCaused by: java.io.IOException: disk full\n"
        "Caused by: java.lang.IllegalStateException: no space on device"
    )
    assert java_causes(text) == ["IOException: disk full", "IllegalStateException: no space on device"]
    found = plain_error(ValueError(text))
    assert str(found) == "Spark: IllegalStateException: no space on device; --verbose shows its log"
    assert str(plain_error(ValueError("\n[ERROR] broken\nmore"))) == "Spark: [ERROR] broken; --verbose shows its log"
    assert str(plain_error(ValueError())) == "Spark: ValueError; --verbose shows its log"


def test_failing_task_names_its_cause(spark: SparkSession) -> None:
    def fail(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            [][batch.num_rows]
            yield batch

    with pytest.raises(BkctlError) as found, plain_errors():
        spark.range(0, 3, 1, 1).mapInArrow(fail, "id bigint").collect()
    assert str(found.value) == "Spark: IndexError: list index out of range; --verbose shows its log"


def test_end_of_the_jvm_while_rows_are_read_is_a_failure() -> None:
    with pytest.raises(BkctlError, match=r"^Spark: EOFError;"), plain_errors():
        raise EOFError
