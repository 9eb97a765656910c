"""Requests that wait for a ledger to be opened, without a bookie."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import types
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.bookie.waiting_requests import WaitingRequests
from bkctl.ids import LedgerId
from bkctl.storage.ledger.ledger_handle import NeedsDisk

LEDGER = LedgerId(0, 5)


def waiting_requests(faults: list[str]) -> WaitingRequests:
    stubs: Any = (
        types.SimpleNamespace(supplied=contextlib.nullcontext),
        types.SimpleNamespace(is_stopping=False),
        types.SimpleNamespace(note_unexpected=lambda action, error: faults.append(f"{action}: {error}")),
    )
    return WaitingRequests(*stubs)


async def test_waiter_that_fails_keeps_no_other_from_its_turn() -> None:
    faults: list[str] = []
    called = []
    requests = waiting_requests(faults)
    all_called = asyncio.Event()

    def waiter(number: int) -> None:
        called.append(number)
        if number == 1:
            raise RuntimeError("a defect")
        if number == 2:
            all_called.set()

    for number in range(3):
        requests.once_read(NeedsDisk(LEDGER, lambda: None), lambda _, number=number: waiter(number))
    await asyncio.wait_for(all_called.wait(), LIMIT_S)
    assert called == [0, 1, 2]
    assert faults == ["A request for ledger 5 that waited: a defect"]
    assert not requests.by_ledger
    await asyncio.to_thread(requests.stop)


async def test_thread_that_cannot_be_started_fails_its_waiters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    requests = waiting_requests([])
    outcomes: list[BaseException | None] = []
    once_called = asyncio.Event()

    def waiter(error: BaseException | None) -> None:
        outcomes.append(error)
        if len(outcomes) >= 2:
            once_called.set()

    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", start)
        for _ in range(2):
            requests.once_read(NeedsDisk(LEDGER, lambda: None), waiter)
    await asyncio.wait_for(once_called.wait(), LIMIT_S)
    assert [str(error) for error in outcomes] == ["can't start new thread"] * 2
    assert not requests.by_ledger, "later requests for the ledger begin again"
    once_called.clear()
    requests.once_read(NeedsDisk(LEDGER, lambda: None), waiter)
    await asyncio.wait_for(once_called.wait(), LIMIT_S)
    assert outcomes[2] is None
    await asyncio.to_thread(requests.stop)
