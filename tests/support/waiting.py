"""Waiting for what other threads and servers do, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 300.0
"""More than anything takes that works: a killed HBase is back after 10 s on a quiet machine, minutes on a busy one."""


def eventually(condition: Callable[[], object]) -> None:
    """Wait until `condition` is true, at most LIMIT_S, which only a defect reaches."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)
