"""The pace of long work: limits, their changes, pauses."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
from support.waiting import LIMIT_S

from bkctl import pace as pace_module
from bkctl.pace import Pace


class Clock:
    """A clock that only sleeping moves, with what happens at times."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[float, object]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.events and self.events[0][0] <= self.now:
            self.events.pop(0)[1]()  # type: ignore[operator]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    return clock


def test_limits_bound_bytes_and_steps(clock: Clock) -> None:
    pace = Pace(bytes_per_s=100, steps_per_s=2)
    for _ in range(10):
        pace.take(100)
    assert clock.now == pytest.approx(110)
    pace.take(0, steps=10)
    assert clock.now == pytest.approx(115)


def test_work_without_limit_never_sleeps(clock: Clock) -> None:
    pace = Pace()
    pace.take(1 << 40)
    assert clock.now == 100


def test_changed_limit_applies_to_work_that_waits(clock: Clock) -> None:
    pace = Pace(bytes_per_s=1)
    clock.events.append((101.0, lambda: pace.limit(bytes_per_s=1000)))
    pace.take(1_000_000)
    assert clock.now < 102
    pace.take(1000)
    assert clock.now < 103


def test_paused_work_waits_until_it_is_resumed(clock: Clock) -> None:
    pace = Pace()
    pace.pause()
    clock.events.append((500.0, pace.resume))
    pace.take()
    assert 500 <= clock.now < 501
    assert not pace.is_paused


async def test_concurrent_work_shares_the_limit_in_its_order() -> None:
    pace = Pace(bytes_per_s=100_000)
    order: list[int] = []

    async def work(number: int) -> None:
        await pace.acquire(2_000)
        order.append(number)

    began = time.monotonic()
    await asyncio.gather(*map(work, range(6)))
    assert time.monotonic() - began > 0.05
    assert order == list(range(6))


async def test_cancelled_work_leaves_its_turn_to_others() -> None:
    pace = Pace(bytes_per_s=1)
    await pace.acquire(1 << 40)
    waiting = asyncio.ensure_future(pace.acquire(1))
    await asyncio.sleep(0)
    waiting.cancel()
    other = asyncio.ensure_future(pace.acquire(1))
    await asyncio.sleep(0)
    pace.limit()
    await asyncio.wait_for(other, LIMIT_S)
    assert waiting.cancelled()


async def test_another_thread_pauses_asynchronous_work() -> None:
    pace = Pace()
    pace.pause()
    work = asyncio.ensure_future(pace.acquire())
    resumed = asyncio.ensure_future(pace.resumed())
    await asyncio.sleep(0.3)
    assert not work.done()
    assert not resumed.done()
    threading.Thread(target=pace.resume).start()
    await asyncio.wait_for(asyncio.gather(work, resumed), LIMIT_S)
