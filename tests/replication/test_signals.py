"""Many tasks that ask a metadata store together."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bkctl.errors import Conflict, Unreachable
from bkctl.replication.signals import Together


def test_what_waits_is_asked_for_in_one_call_and_each_gets_its_own_answer(run):
    calls: list[list[int]] = []
    go_on = threading.Event()

    def call(items):
        calls.append(items)
        assert go_on.wait(60)
        return [Conflict(f"{item} is taken") if item == 3 else item * 10 for item in items]

    async def scenario():
        together: Together[int, int] = Together(call)
        first = together(0)
        while not calls:
            await asyncio.sleep(0)
        others = [together(item) for item in range(1, 6)]
        others[4].cancel()
        go_on.set()
        assert await first == 0
        answers = await asyncio.gather(*others, return_exceptions=True)
        assert answers[:2] == [10, 20]
        assert str(answers[2]) == "3 is taken"
        assert answers[3] == 40
        assert isinstance(answers[4], asyncio.CancelledError)
        assert calls == [[0], [1, 2, 3, 4, 5]]
        assert await together(7) == 70

    run(scenario())


@pytest.mark.parametrize("error", [Unreachable("the store is away"), ValueError("a defect")], ids=repr)
def test_a_call_that_fails_fails_for_all_that_are_in_it_and_for_nobody_else(run, error):
    failing = [error]

    def call(items):
        if failing:
            raise failing.pop()
        return items

    async def scenario():
        together: Together[int, int] = Together(call)
        assert await asyncio.gather(together(1), together(2), return_exceptions=True) == [error, error]
        assert await together(3) == 3

    run(scenario())
