"""What tests of auditors and workers have in common: ledgers on fake bookies, bookies that are lost, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from bkctl.config import BookieConfig
from bkctl.ids import LedgerId

LIMIT_S = 60.0
#: No pauses: what is tried again is tried at once, and what waits for long waits for ever.
CONFIG = BookieConfig(
    rw_rereplicate_backoff_ms=20,
    lock_release_of_failed_ledger_grace_period=0,
    open_ledger_rereplication_grace_period=0,
    auditor_periodic_check_interval=0,
)


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait for it; a limit that only a defect reaches."""
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """Work that goes on in the background for the time of a block; what it raises fails the test."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def write(client: Any, count: int, *, scope_id: int = 0, close: bool = True, **shape: Any) -> Any:
    """A ledger of `count` entries, 3/2/2 unless `shape` says otherwise."""
    sizes = {"ensemble_size": 3, "write_quorum_size": 2, "ack_quorum_size": 2, **shape}
    writer = await client.create_ledger_adv(ledger_scope_id=scope_id, password=b"secret", **sizes)
    for entry_id in range(count):
        writer.add(b"%d" % entry_id)
    await writer.flush()
    if close:
        await writer.close()
    return writer


def bookies_of(cluster: Any, ledger: LedgerId, at: int = 0) -> list[Any]:
    """The bookies of the ledger's fragment number `at`."""
    return [cluster.bookie(each) for each in cluster.metadata(ledger).ensembles[at].bookies]


async def lose(cluster: Any, bookie: Any) -> None:
    """The bookie is gone from one moment to the next."""
    await bookie.stop()
    cluster.unregister(bookie)


async def come_back(cluster: Any, bookie: Any) -> None:
    """It is there again, with what it had."""
    await bookie.start()
    cluster.register(bookie)
