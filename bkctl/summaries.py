"""Summaries of observed numbers with quantiles, as Apache's OpStatsLogger has them for /metrics.

Numbers are kept in buckets (16 between a power of two and the next), so that a quantile is right to about 6%.
"""

from __future__ import annotations

import time
from typing import Final

#: The quantiles of Apache's summaries.
QUANTILES: Final = (0.5, 0.75, 0.95, 0.99, 0.999, 0.9999, 1.0)
#: Quantiles cover this last stretch of time, as Apache's (prometheusStatsLatencyRolloverSeconds).
ROLLOVER_S: Final = 60.0
_SUB_BITS: Final = 4
_BUCKETS: Final = 40 << _SUB_BITS


def _bucket(value: int) -> int:
    """Return the bucket of a value: its own below 16, above by the five highest bits."""
    shift = value.bit_length() - _SUB_BITS - 1
    if shift < 0:
        return value
    return min((shift << _SUB_BITS) + (value >> shift), _BUCKETS - 1)


def _upper(bucket: int) -> int:
    """Return the largest value in the bucket."""
    if bucket < 2 << _SUB_BITS:
        return bucket
    shift, rest = divmod(bucket, 1 << _SUB_BITS)
    return ((rest + (1 << _SUB_BITS) + 1) << (shift - 1)) - 1


class Summary:
    """Observed numbers: count, sum, and quantiles of the last minute or two. One thread observes."""

    __slots__ = ("_before", "_now", "_rolled_s", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self._now = [0] * _BUCKETS
        self._before = [0] * _BUCKETS
        self._rolled_s = time.monotonic()

    def observe(self, value: int, count: int = 1) -> None:
        """Add `value` (0 or more), `count` times."""
        self.count += count
        self.sum += value * count
        self._now[_bucket(value)] += count
        if time.monotonic() - self._rolled_s > ROLLOVER_S:
            self._roll()

    def _roll(self) -> None:
        now_s = time.monotonic()
        stale = now_s - self._rolled_s > 2 * ROLLOVER_S
        self._before = [0] * _BUCKETS if stale else self._now
        self._now = [0] * _BUCKETS
        self._rolled_s = now_s

    def _recent(self) -> list[int]:
        is_recent = time.monotonic() - self._rolled_s <= 2 * ROLLOVER_S
        return [one + other for one, other in zip(self._now, self._before, strict=True)] if is_recent else []

    def recent_count(self) -> int:
        """Return how many numbers `quantiles` are of."""
        return sum(self._recent())

    def quantiles(self) -> list[float]:
        """Return the values of QUANTILES in the last stretch; NaN where nothing was observed."""
        counts = self._recent()
        total = sum(counts)
        if not total:
            return [float("nan")] * len(QUANTILES)
        found = []
        bucket, passed = -1, 0
        for quantile in QUANTILES:
            while passed < quantile * total and bucket < _BUCKETS - 1:
                bucket += 1
                passed += counts[bucket]
            found.append(float(_upper(bucket)))
        return found
