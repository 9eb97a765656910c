from __future__ import annotations

import logging

from bkctl.bookie import log_limit
from bkctl.bookie.log_limit import RECORDS_MAX, STRETCH_S, RepeatLimit

WARNINGS, OTHERS = RECORDS_MAX.values()


def record(line: int, text: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("bkctl", level, log_limit.__file__, line, text, (), None)


def test_repeated_records_are_dropped_and_counted() -> None:
    now_s = 0.0
    limit = RepeatLimit(clock=lambda: now_s)
    passed = [limit.filter(record(1, f"client {number}")) for number in range(5 * WARNINGS)]
    assert passed.count(True) == WARNINGS
    assert limit.filter(record(2, "another place"))
    told = [limit.filter(record(3, "good news", logging.INFO)) for _ in range(2 * OTHERS)]
    assert told.count(True) == OTHERS
    now_s = STRETCH_S
    later = record(1, "client 9")
    assert limit.filter(later)
    assert later.getMessage() == f"client 9 ({4 * WARNINGS} more like this were not logged)"
    again = record(1, "client 10")
    assert limit.filter(again)
    assert again.getMessage() == "client 10"
