"""Waiting in an event loop, and many tasks that ask a metadata store together."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import Conflict, Unreachable
from bkctl.replication.signals import BatchedCalls, Signal


@pytest.mark.parametrize("step_count", range(6))
async def test_wait_cancelled_with_its_signal_is_cancelled(step_count: int) -> None:
    """Whoever stops the task that waits would else wait for it for ever."""

    signal, ended = Signal(), asyncio.Event()

    async def work() -> None:
        await signal.wait(60)
        await ended.wait()

    task = asyncio.ensure_future(work())
    for _ in range(3):
        await asyncio.sleep(0)
    signal.set()
    for _ in range(step_count):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=LIMIT_S)
    ended.set()
    assert done
    assert task.cancelled()


async def test_waiting_items_share_one_call():
    calls: list[list[int]] = []
    go_on = threading.Event()

    def call(items):
        calls.append(items)
        assert go_on.wait(LIMIT_S)
        return [Conflict(f"{item} is taken") if item == 3 else item * 10 for item in items]

    batched: BatchedCalls[int, int] = BatchedCalls(call)
    first = batched(0)
    while not calls:
        await asyncio.sleep(0)
    others = [batched(item) for item in range(1, 6)]
    others[4].cancel()
    go_on.set()
    assert await first == 0
    answers = await asyncio.gather(*others, return_exceptions=True)
    assert answers[:2] == [10, 20]
    assert str(answers[2]) == "3 is taken"
    assert answers[3] == 40
    assert isinstance(answers[4], asyncio.CancelledError)
    assert calls == [[0], [1, 2, 3, 4, 5]]
    assert await batched(7) == 70


@pytest.mark.parametrize("error", [Unreachable("the store is away"), ValueError("a defect")], ids=repr)
async def test_failed_call_fails_its_own_items_only(error):
    failing = [error]

    def call(items):
        if failing:
            raise failing.pop()
        return items

    batched: BatchedCalls[int, int] = BatchedCalls(call)
    assert await asyncio.gather(batched(1), batched(2), return_exceptions=True) == [error, error]
    assert await batched(3) == 3
