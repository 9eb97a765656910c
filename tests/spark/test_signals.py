"""The session of the tests leaves signals alone: tests of other rooms in the same process interrupt commands."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_session_of_the_tests_keeps_pythons_handler_of_interrupts(spark: SparkSession) -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
