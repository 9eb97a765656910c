"""The steps of a stop."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.bookie.state_manager import StopDeadline


async def test_error_of_a_step_whose_caller_was_cancelled_is_dropped() -> None:
    is_running, may_fail = threading.Event(), threading.Event()
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    stub: Any = None

    def step() -> None:
        is_running.set()
        assert may_fail.wait(LIMIT_S)
        raise OSError("a disk fails")

    stopping = asyncio.ensure_future(StopDeadline(stub).run("x", step))
    try:
        assert await asyncio.to_thread(is_running.wait, LIMIT_S)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
    finally:
        may_fail.set()
    while any(thread.name == "stop-x" for thread in threading.enumerate()):
        await asyncio.sleep(0.01)
    del stopping
    await asyncio.sleep(0)
    gc.collect()
    assert not problems
