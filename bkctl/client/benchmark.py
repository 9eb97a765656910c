"""Load on a cluster: entries added to and read from ledgers in batches, with the latency of each batch."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from bkctl.client.read_handle import ReadHandle
from bkctl.client.write_handle import WriteHandle
from bkctl.tasks import run_together

#: Bytes of the random payloads that the entries of a benchmark share, and the number of payloads, at most.
_PAYLOADS_BYTES: Final = 16 << 20
_PAYLOADS: Final = 64
#: Latency buckets between a power of two and the next: percentiles are exact to about 3%.
_SUB_BITS: Final = 5

Progress = Callable[[int], None]


class Load(NamedTuple):
    """The amount and speed of work.

    The work ends after `duration_s` seconds if that is given, else after `entry_count` entries. Each ledger has
    `in_flight_count` batches of `batch_count` entries in flight. `entries_per_s` limits all ledgers together.
    """

    entry_count: int
    duration_s: float | None = None
    batch_count: int = 10
    in_flight_count: int = 10
    entries_per_s: float | None = None


class Latencies:
    """Durations in buckets of whole microseconds."""

    def __init__(self) -> None:
        self.count = 0
        self.max_s = 0.0
        self._counts: Counter[tuple[int, int]] = Counter()

    def observe(self, seconds: float) -> None:
        self.count += 1
        self.max_s = max(self.max_s, seconds)
        microseconds = max(int(seconds * 1e6), 0)
        shift = max(microseconds.bit_length() - _SUB_BITS - 1, 0)
        self._counts[shift, microseconds >> shift] += 1

    def buckets(self) -> list[tuple[int, int]]:
        """Return the largest duration of each bucket that has any, in microseconds, and their number, in order."""
        return [(((value + 1) << shift) - 1, count) for (shift, value), count in sorted(self._counts.items())]

    def percentile_s(self, percent: float) -> float:
        """Return the duration in seconds that `percent` of the durations do not exceed; 0 without any."""
        buckets = self.buckets()
        needed = percent / 100 * self.count
        for (upper, _), passed in zip(buckets, accumulate(count for _, count in buckets), strict=True):
            if passed >= needed:
                return min(upper / 1e6, self.max_s)
        return 0.0


class LoadResult(NamedTuple):
    """The outcome of a load: entries and payload bytes in `elapsed_s` seconds, and the latencies of its batches."""

    entry_count: int
    size_bytes: int
    elapsed_s: float
    latencies: Latencies

    @property
    def entries_per_s(self) -> float:
        """Entries a second; 0 if nothing was done."""
        return self.entry_count / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Payload bytes a second; 0 if nothing was done."""
        return self.size_bytes / self.elapsed_s if self.elapsed_s else 0.0


async def add_entries(
    handles: Sequence[WriteHandle], entry_size_bytes: int, load: Load, progress: Progress = lambda _: None
) -> LoadResult:
    """Add random entries to the ledgers; a batch lasts until its last entry is acknowledged.

    `progress` gets the number of entries of each finished batch. Raises the errors of `WriteHandle.add`.
    """
    count = max(min(_PAYLOADS_BYTES // max(entry_size_bytes, 1), _PAYLOADS), 1)
    payloads = [os.urandom(entry_size_bytes) for _ in range(count)]

    def adder(handle: WriteHandle) -> Callable[[int], Awaitable[int]]:
        async def add(count: int) -> int:
            await handle.add_all([payloads[at % len(payloads)] for at in range(count - 1)])
            await handle.add(payloads[-1])
            return count * entry_size_bytes

        return add

    return await _apply([adder(handle) for handle in handles], load, progress)


async def read_entries(
    handles: Sequence[ReadHandle], load: Load, progress: Progress = lambda _: None, *, in_random_order: bool = False
) -> LoadResult:
    """Read the confirmed entries of the ledgers, again from the start after the last; a batch is one range.

    `in_random_order`: ranges begin anywhere. Raises the errors of `ReadHandle.read_runs`. The ledgers have entries.
    """

    def reader(handle: ReadHandle) -> Callable[[int], Awaitable[int]]:
        last, position = handle.last_add_confirmed, 0

        async def read(count: int) -> int:
            nonlocal position
            first = random.randint(0, max(last + 1 - count, 0)) if in_random_order else position
            rest, size = count, 0
            while rest:
                final = min(first + rest - 1, last)
                position = 0 if final == last else final + 1
                async for entries in handle.read_runs(first, final):
                    size += sum(len(entry.payload) for entry in entries)
                rest -= final + 1 - first
                first = 0
            return size

        return read

    return await _apply([reader(handle) for handle in handles], load, progress)


async def _apply(actions: Sequence[Callable[[int], Awaitable[int]]], load: Load, progress: Progress) -> LoadResult:
    """Call `actions`, each of them `in_flight_count` times at once, with the size of a batch until the load is done.

    An action returns the payload bytes of its batch. The latency of a batch counts from when the rate made it due, so
    that a slow answer also counts for the batches that wait behind it.
    """
    began = time.perf_counter()
    latencies = Latencies()
    entry_count = size_bytes = 0
    turns = _turns(load, began)
    turn = asyncio.Lock()

    async def work(action: Callable[[int], Awaitable[int]]) -> None:
        nonlocal entry_count, size_bytes
        while True:
            async with turn:
                due = await anext(turns, None)
            if due is None:
                return
            count, due_at = due
            size = await action(count)
            latencies.observe(time.perf_counter() - due_at)
            entry_count += count
            size_bytes += size
            progress(count)

    await run_together(work(action) for _ in range(load.in_flight_count) for action in actions)
    return LoadResult(entry_count, size_bytes, time.perf_counter() - began, latencies)


async def _turns(load: Load, began: float) -> AsyncIterator[tuple[int, float]]:
    """Yield the size of each batch and when it is due (`time.perf_counter`), at that time."""
    taken = 0
    while load.duration_s is not None or taken < load.entry_count:
        count = load.batch_count
        if load.duration_s is None:
            count = min(count, load.entry_count - taken)
        due_at = now = time.perf_counter()
        if load.entries_per_s is not None:
            due_at = began + taken / load.entries_per_s
        if load.duration_s is not None and max(due_at, now) >= began + load.duration_s:
            return
        if due_at > now:
            await asyncio.sleep(due_at - now)
        taken += count
        yield count, due_at
