"""Waiting in an event loop, and many tasks that ask a metadata store together."""

from __future__ import annotations

import asyncio

import pytest
from support.waiting import LIMIT_S

from bkctl.replication.signals import Signal


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
