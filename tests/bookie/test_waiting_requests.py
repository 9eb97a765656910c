"""Requests that wait for a ledger to be opened, without a bookie."""

from __future__ import annotations

import asyncio
import contextlib
import types
from typing import Any

from support.waiting import LIMIT_S

from bkctl.bookie.waiting_requests import WaitingRequests
from bkctl.ids import LedgerId
from bkctl.storage.ledger.ledger_storage import NeedsDisk


async def test_waiter_that_fails_keeps_no_other_from_its_turn() -> None:
    faults: list[str] = []
    called = []
    stubs: Any = (
        types.SimpleNamespace(supplied=contextlib.nullcontext),
        types.SimpleNamespace(is_stopping=False),
        types.SimpleNamespace(note_unexpected=lambda action, error: faults.append(f"{action}: {error}")),
    )
    requests = WaitingRequests(*stubs)
    ledger, all_called = LedgerId(0, 5), asyncio.Event()

    def waiter(number: int) -> None:
        called.append(number)
        if number == 1:
            raise RuntimeError("a defect")
        if number == 2:
            all_called.set()

    for number in range(3):
        requests.once_read(NeedsDisk(ledger, lambda: None), lambda _, number=number: waiter(number))
    await asyncio.wait_for(all_called.wait(), LIMIT_S)
    assert called == [0, 1, 2]
    assert faults == ["A request for ledger 5 that waited: a defect"]
    assert not requests.by_ledger
    await asyncio.to_thread(requests.stop)
