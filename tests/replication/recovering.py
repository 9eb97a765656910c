"""Helpers of tests of auditors and workers: ledgers on fake bookies, lost bookies, marks, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from support.waiting import LIMIT_S

from bkctl.config import BookieConfig
from bkctl.ids import LedgerId
from bkctl.metadata.underreplication import AutoRecoveryState

#: No pauses: retries begin at once, and periodic checks never.
CONFIG = BookieConfig(
    rw_rereplicate_backoff_ms=20,
    lock_release_of_failed_ledger_grace_period=0,
    open_ledger_rereplication_grace_period=0,
    auditor_periodic_check_interval=0,
)


async def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` is true, at most LIMIT_S, which only a defect reaches."""
    deadline = time.monotonic() + LIMIT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Future[Any]]:
    """Run `work` in the background during a block; its error fails the test."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def write(client: Any, count: int, *, scope_id: int = 0, close: bool = True, **shape: Any) -> Any:
    """Write a ledger of `count` entries, 3/2/2 unless `shape` gives other sizes."""
    sizes = {"ensemble_size": 3, "write_quorum_size": 2, "ack_quorum_size": 2, **shape}
    writer = await client.create_ledger_adv(ledger_scope_id=scope_id, password=b"secret", **sizes)
    for entry_id in range(count):
        writer.add(b"%d" % entry_id)
    await writer.flush()
    if close:
        await writer.close()
    return writer


def bookies_of(cluster: Any, ledger: LedgerId, at: int = 0) -> list[Any]:
    """Return the bookies of the ledger's fragment number `at`."""
    return [cluster.bookie(bookie_id) for bookie_id in cluster.metadata(ledger).ensembles[at].bookies]


async def lose(cluster: Any, bookie: Any) -> None:
    """Stop and unregister the bookie."""
    await bookie.stop()
    cluster.unregister(bookie)


async def come_back(cluster: Any, bookie: Any) -> None:
    """Start and register the bookie again, with its entries."""
    await bookie.start()
    cluster.register(bookie)


def state_of(cluster: Any) -> AutoRecoveryState:
    """Return the cluster's state of auto-recovery."""
    return AutoRecoveryState(cluster.cluster.store)


def marks(cluster: Any) -> dict[LedgerId, set[str]]:
    """Return the bookies that lack entries, by marked ledger."""
    return {ledger: set(mark.missing_replicas) for ledger, mark in state_of(cluster).marks.list(None)}
