"""Event loops for the tests of the wire protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from bkctl.protocol.connection import run

HOST = "127.0.0.1"
Runner = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
        return run
    return asyncio.run
