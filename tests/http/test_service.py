"""The objects that endpoints use, without a server."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import LIMIT_S

from bkctl.errors import Unreachable
from bkctl.http.service import Service


class Store:
    """Opens clusters when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = 0
        self.is_away = False
        self.is_asked, self.may_open = threading.Event(), threading.Event()
        monkeypatch.setattr("bkctl.http.service.open_cluster", self.open)

    def open(self, *_: object, **__: object) -> Any:
        self.is_asked.set()
        assert self.may_open.wait(LIMIT_S)
        if self.is_away:
            raise Unreachable("the store is away")
        self.opened += 1
        return SimpleNamespace(close=self.close)

    def close(self) -> None:
        self.closed += 1


async def test_requests_that_end_while_the_cluster_is_opened_leave_one_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, service = Store(monkeypatch), Service("x")
    try:
        for _ in range(3):
            request = asyncio.ensure_future(service.cluster())
            assert await asyncio.to_thread(store.is_asked.wait, LIMIT_S)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        closing = asyncio.ensure_future(service.close())
    finally:
        store.may_open.set()
    await closing
    assert (store.opened, store.closed) == (1, 1)


async def test_cluster_that_could_not_be_opened_is_opened_at_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    store, service = Store(monkeypatch), Service("x")
    store.may_open.set()
    store.is_away = True
    for _ in range(2):
        with pytest.raises(Unreachable):
            await service.cluster()
    store.is_away = False
    assert await service.cluster() is await service.cluster()
    await service.close()
    assert (store.opened, store.closed) == (1, 1)


async def test_unexpected_error_of_background_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    is_running = asyncio.Event()

    async def work() -> None:
        is_running.set()
        raise KeyError("a defect")

    service = Service("x")
    service.in_background(work)
    await asyncio.wait_for(is_running.wait(), LIMIT_S)
    await service.close()
    (record,) = caplog.records
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
