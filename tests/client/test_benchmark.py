from __future__ import annotations

import asyncio

import pytest

from bkctl.client.benchmark import Latencies, Load, _apply


def test_percentiles_are_exact_to_three_percent() -> None:
    latencies = Latencies()
    for milliseconds in range(1, 1001):
        latencies.observe(milliseconds / 1000)
    for percent in (50.0, 95.0, 99.0, 99.9):
        assert latencies.percentile_s(percent) == pytest.approx(percent / 100, rel=0.035)
    assert latencies.percentile_s(100) == latencies.max_s == 1.0
    assert sum(count for _, count in latencies.buckets()) == 1000
    uppers = [upper for upper, _ in latencies.buckets()]
    assert uppers == sorted(set(uppers))
    assert Latencies().percentile_s(50) == 0.0


def test_a_load_ends_after_its_entries_with_a_smaller_last_batch() -> None:
    sizes: list[int] = []

    async def action(count: int) -> int:
        sizes.append(count)
        await asyncio.sleep(0)
        return count * 2

    result = asyncio.run(_apply([action, action], Load(25, batch_count=10, in_flight_count=3), lambda _: None))
    assert sorted(sizes) == [5, 10, 10]
    assert (result.entry_count, result.size_bytes, result.latencies.count) == (25, 50, 3)


def test_a_failing_batch_ends_the_load_with_its_error() -> None:
    async def action(count: int) -> int:
        raise OSError("the bookie is away")

    with pytest.raises(OSError, match="away"):
        asyncio.run(_apply([action], Load(1, duration_s=3600), lambda _: None))


def test_latency_counts_from_when_a_batch_is_due() -> None:
    """While one slow answer holds everything up, the batches behind it wait, too."""
    held = 0.0

    async def action(count: int) -> int:
        nonlocal held
        if not held:
            held = 0.2
            await asyncio.sleep(held)
        return 0

    load = Load(21, batch_count=1, in_flight_count=1, entries_per_s=100)
    result = asyncio.run(_apply([action], load, lambda _: None))
    # 10 ms apart, so that the median of those that were due within the first 200 ms waited for about half of them.
    assert result.latencies.percentile_s(50) > 0.05
    assert result.elapsed_s >= 0.2
