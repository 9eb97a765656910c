"""A cluster of fake bookies in a SQLite store, and an event loop that hides nothing."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from client.fakes import FakeCluster

from bkctl.metadata.cluster import open_cluster


@pytest.fixture
async def nothing_left_behind() -> AsyncIterator[None]:
    """Fail an async test for what its event loop would only log: a lost exception, a task that was dropped."""
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert not problems, "left behind on the event loop"


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Give every async test of this directory `nothing_left_behind`."""
    if inspect.iscoroutinefunction(obj) and collector.istestfunction(obj, name):
        pytest.mark.usefixtures("nothing_left_behind")(obj)


@pytest.fixture
def fake_cluster(tmp_path: Path) -> Callable[..., Any]:
    """`async with fake_cluster(3) as cluster`: that many fake bookies; `scopes=False` for ones as Apache's."""

    @asynccontextmanager
    async def start(count: int, **options: Any) -> AsyncIterator[FakeCluster]:
        with open_cluster(f"sqlite://{tmp_path / 'metadata.db'}", create=True) as cluster:
            fakes = FakeCluster(cluster)
            try:
                for _ in range(count):
                    await fakes.add_bookie(**options)
                yield fakes
            finally:
                for bookie in fakes.bookies:
                    await bookie.stop()

    return start


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a scenario on an event loop; what the loop would only log (a lost exception) fails the test."""

    def run_scenario(scenario: Coroutine[Any, Any, Any]) -> Any:
        problems: list[str] = []

        async def watched() -> Any:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: problems.append(str(context)))
            result = await scenario
            gc.collect()
            await asyncio.sleep(0)
            return result

        result = asyncio.run(watched())
        assert not problems, "left behind on the event loop"
        return result

    return run_scenario
