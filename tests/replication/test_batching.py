"""Calls that batch the requests of many tasks."""

from __future__ import annotations

import asyncio
import threading

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import Conflict, Unreachable
from bkctl.replication.batching import BatchedCalls


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
