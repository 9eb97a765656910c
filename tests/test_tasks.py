"""Many asyncio tasks at once, their ends, and errors without a receiver; work that an interrupt does not split."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import BookieUnavailable
from bkctl.tasks import ended_by_signals, in_order, run_to_end, run_together, uninterrupted


async def test_in_order_works_ahead_within_bound() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> int:
        begun.append(item)
        assert len(begun) - len(ended) <= 3
        try:
            await asyncio.sleep(0.001 * (5 - item % 5))
            if item == 17:
                raise BookieUnavailable("gone")
        finally:
            ended.append(item)
        return item * 10

    async def numbers() -> AsyncIterator[int]:
        for item in range(10):
            yield item

    assert [each async for each in in_order(numbers(), work, lambda: 3)] == [(each, each * 10) for each in range(10)]
    with pytest.raises(BookieUnavailable):
        assert [each async for each in in_order(range(10, 30), work, lambda: 3)]
    some = in_order(range(30, 60), work, lambda: 3)
    assert await anext(some) == (30, 300)
    await some.aclose()
    # Tasks under way have ended, and no other began.
    assert sorted(begun) == sorted(ended)
    assert max(begun) < 35


@pytest.mark.parametrize("cancellation_count", [1, 2])
async def test_cancelled_caller_ends_after_the_work_and_drops_its_error(cancellation_count: int) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[dict[str, Any]] = []
    former = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    began, may_fail, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        began.set()
        await may_fail.wait()
        ended.set()
        raise OSError("The store is closed")

    try:
        caller = asyncio.ensure_future(run_to_end(work()))
        await began.wait()
        for _ in range(cancellation_count):
            caller.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert not caller.done()
        may_fail.set()
        await asyncio.wait([caller], timeout=LIMIT_S)
        assert (caller.cancelled(), ended.is_set()) == (True, True)
        gc.collect()
        await asyncio.sleep(0)
        assert complaints == []
    finally:
        loop.set_exception_handler(former)


class Cleaned:
    """A work that waits to be cancelled, and cleans up in several steps then, which another cancellation interrupts."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_clean = False
        self.error = error

    async def work(self) -> None:
        try:
            self.began.set()
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
            self.is_clean = True


async def turns() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_run_together_cancels_each_work_once() -> None:
    """Works that end at once do not have the clean-ups of the others interrupted."""
    slow = Cleaned()
    caller = asyncio.ensure_future(run_together([slow.work(), asyncio.Event().wait()]))
    await slow.began.wait()
    caller.cancel()
    await turns()
    assert not caller.done()
    slow.may_end.set()
    await asyncio.wait([caller], timeout=LIMIT_S)
    assert (caller.cancelled(), slow.is_clean) == (True, True)


async def test_run_together_raises_cancellation_rather_than_error_of_clean_up() -> None:
    failing = Cleaned(BookieUnavailable("gone"))
    failing.may_end.set()
    caller = asyncio.ensure_future(run_together([failing.work(), asyncio.Event().wait()]))
    await failing.began.wait()
    caller.cancel()
    await asyncio.wait([caller], timeout=LIMIT_S)
    assert caller.cancelled()


async def test_run_together_raises_first_error_after_the_others_ended() -> None:
    slow = Cleaned(OSError("of the clean-up"))

    async def fail() -> None:
        await slow.began.wait()
        raise BookieUnavailable("gone")

    caller = asyncio.ensure_future(run_together([slow.work(), fail()]))
    await slow.began.wait()
    await turns()
    assert not caller.done()
    slow.may_end.set()
    with pytest.raises(BookieUnavailable):
        await caller


async def test_run_together_returns_results_in_order() -> None:
    async def work(number: int) -> int:
        for _ in range(5 - number):
            await asyncio.sleep(0)
        return number

    assert await run_together(work(number) for number in range(5)) == [0, 1, 2, 3, 4]
    assert await run_together(work(number) for number in range(0)) == []


def test_signals_end_a_server_unless_they_are_ignored() -> None:
    ended: list[int] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for count in (2, 5):
            with ended_by_signals(lambda: ended.append(1)):
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.raise_signal(number)
            assert len(ended) == count
            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
            signal.signal(signal.SIGHUP, hangup)
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_an_interrupt_is_raised_once_uninterrupted_work_has_ended() -> None:
    done: list[str] = []

    def work(first: str, second: str) -> str:
        done.append(first)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        done.append(second)
        return second

    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work, "a", "b")
    assert done == ["a", "b"]
    with pytest.raises(BookieUnavailable):
        uninterrupted(fail_with, BookieUnavailable("gone"))
    assert uninterrupted(int, "7") == 7


def fail_with(error: Exception) -> None:
    raise error
