"""A bookie's counters, and their text for Prometheus."""

from __future__ import annotations

import math

import pytest

from bkctl import summaries
from bkctl.bookie.metrics import BookieMetrics, Latency, PrometheusText
from bkctl.replication.stats import AuditorStats, WorkerStats, auditor_samples, worker_samples
from bkctl.summaries import QUANTILES, Summary


def test_quantiles_are_right_to_seven_percent() -> None:
    summary = Summary()
    for value in range(100_000):
        summary.observe(value)
    assert (summary.count, summary.sum) == (100_000, sum(range(100_000)))
    for quantile, found in zip(QUANTILES, summary.quantiles(), strict=True):
        assert found == pytest.approx(quantile * 100_000, rel=0.07)


@pytest.mark.parametrize("value", [0, 1, 15, 16, 17, 31, 32, 1000, 1 << 30, 1 << 60])
def test_one_value_is_every_quantile(value: int) -> None:
    summary = Summary()
    summary.observe(value, 3)
    (found,) = set(summary.quantiles())
    assert found == value or value < found <= value * 1.07 or value > 1 << 40  # longer than anything lasts
    assert (summary.count, summary.sum) == (3, 3 * value)


def test_quantiles_are_of_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(summaries.time, "monotonic", lambda: now)
    summary = Summary()
    assert all(math.isnan(each) for each in summary.quantiles())
    summary.observe(5)
    now = 61.0
    summary.observe(7)  # the minute of the 5 ends
    assert summary.quantiles()[-1] == 7
    now = 125.0
    summary.observe(9)
    assert summary.quantiles()[0] == 9  # neither 5 nor 7 are recent
    now = 1000.0
    assert all(math.isnan(each) for each in summary.quantiles())
    assert summary.count == 3


def test_reads_from_memory_count_with_no_duration() -> None:
    counted = BookieMetrics()
    counted.reads_from_memory = 3
    counted.read_entry.observe(0.002)
    counted.settle_reads()
    counted.settle_reads()
    assert counted.read_entry.success.count == 4
    assert counted.read_entry.success.quantiles()[0] == 0
    assert counted.read_entry.success.quantiles()[-1] == pytest.approx(2000, rel=0.07)


def test_text_parses_as_prometheus_text() -> None:
    latency = Latency()
    latency.observe(0.004, 2)
    latency.observe(1.5, ok=False)
    text = PrometheusText()
    text.sample("bookie_usage", "gauge", 12.5, {"dir": 'a"b\\c\nd'})
    text.sample("bookie_usage", "gauge", 7)
    text.sample("bookie_flush", "summary", latency, {"index": "0"})
    lines = text.text().splitlines()
    assert lines[:3] == ["# TYPE bookie_usage gauge", r'bookie_usage{dir="a\"b\\c\nd"} 12.5', "bookie_usage 7"]
    assert lines.count("# TYPE bookie_usage gauge") == 1
    assert 'bookie_flush_count{success="true",index="0"} 2' in lines
    assert 'bookie_flush_sum{success="true",index="0"} 8' in lines
    assert 'bookie_flush_sum{success="false",index="0"} 1500' in lines
    assert 'bookie_flush{success="true",quantile="0.5",index="0"} 4.095' in lines


def test_auto_recovery_has_the_kinds_of_apaches_metrics() -> None:
    """Dashboards of Apache's metrics query these as summaries with quantiles."""
    auditor, worker = AuditorStats(), WorkerStats()
    auditor.num_under_replicated_ledgers.observe(7)
    worker.num_bytes_written.observe(1000)
    worker.num_bytes_written.observe(3000)
    text = PrometheusText()
    samples = [
        *auditor_samples(auditor, scoped=False, attempt_count=1, elected=True),
        *auditor_samples(AuditorStats(), scoped=True, attempt_count=1, elected=False),
        *worker_samples(worker),
    ]
    for sample in samples:
        text.sample(*sample)
    lines = text.text().splitlines()
    assert "# TYPE auditor_NUM_UNDER_REPLICATED_LEDGERS summary" in lines
    assert "# TYPE replication_worker_NUM_BYTES_WRITTEN summary" in lines
    assert 'auditor_NUM_UNDER_REPLICATED_LEDGERS{success="true",quantile="0.99"} 7' in lines
    assert 'auditor_NUM_UNDER_REPLICATED_LEDGERS_count{success="true",scopes="other"} 0' in lines
    assert 'replication_worker_NUM_BYTES_WRITTEN_sum{success="true"} 4000' in lines
    assert 'replication_worker_NUM_BYTES_WRITTEN_count{success="true"} 2' in lines
    assert "# TYPE replication_worker_NUM_ENTRIES_WRITTEN counter" in lines
    assert "# TYPE auditor_NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY gauge" in lines
