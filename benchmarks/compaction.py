"""Measure what compaction costs: a Java client adds at one rate without it and beside it, to ours and to Apache's.

See README.md for how it is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from reads import ADDS_S, LEDGERS, Side, Spent
from support import servers

ENTRIES: Final = 6000
#: One ledger of so many stays, so that each log is worth compacting and keeps a third.
KEPT_OF: Final = 3
#: Compaction begins with the next round of collection, so in the first half of these seconds.
SETTINGS: Final = {
    "logSizeLimit": 64 << 20,
    "minorCompactionInterval": 16,
    "majorCompactionInterval": 20,
    "compactionRateByEntries": 50_000,
}


def compare(ours: Side, theirs: Side, size: int, seconds: float) -> Iterator[str]:
    """Yield what was measured, a line for each case and side."""
    for side in (theirs, ours):
        side.ask("write", LEDGERS, ENTRIES, size)
    rate = theirs.ask("add", ADDS_S, size, 0)["addsPerSecond"] // 2
    for what in ("alone", "beside compaction"):
        for side in (theirs, ours):
            if what != "alone":
                side.ask("delete", KEPT_OF)
            logs = _logs(side.bookies)
            before = Spent.by(side.bookies)
            found = side.ask("add", int(seconds), size, rate)
            spent = Spent.by(side.bookies).processor_s - before.processor_s
            gone = len(logs - _logs(side.bookies))
            yield f"  {what}, {side.name}: {_figures(found, spent)}; {gone} of {len(logs)} logs gone"


def _figures(found: dict[str, Any], spent_s: float) -> str:
    return (
        f"{found['addsPerSecond']:,.0f} adds/s, {spent_s / found['added'] * 1e6:.1f} µs an add; "
        f"p50 {found['addP50Ms']:.1f} ms, p99 {found['addP99Ms']:.1f} ms, p99.9 {found['addP999Ms']:.1f} ms"
    )


def _logs(bookies: Sequence[servers.Server]) -> set[Path]:
    """Return the entry logs that the bookies have now."""
    # Not RocksDB's logs, which are one level below.
    directories = {bookie.log.parent for bookie in bookies}
    return {path for directory in directories for path in directory.rglob("current/*.log")}
