"""Loops over the Python client, as programs write them, beside Java's with the same number of entries in flight.

Each runs in a process of its own, as Java's does: `client_loops.py URI v2|v3 LOOP SIZE COUNT [LEDGER]` prints the
entries a second, and the ledger. One bookie, E = Wq = Aq = 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from bkctl import BookKeeper, Protocol, WriteHandle, sync
from bkctl.protocol.connection import run

SIZES_BYTES = (100, 1024, 65536)
IN_FLIGHT = 1000
#: Entries, or as many as have this many bytes.
COUNT, BYTES = 100_000, 300 << 20
#: Entries of loops that wait for each one.
ONE_BY_ONE_COUNT = 3000
QUORUMS: Any = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}


def compare(
    java_rate: Callable[..., dict[str, Any]], uri: str, protocol: str, size: int
) -> Iterator[tuple[str, float, float, str] | str]:
    """Yield name, our rate, Java's rate and the name of Java's loop, or a line."""
    count = min(COUNT, BYTES // size)
    shape = f"{protocol}, {size:,} bytes"
    java_rate(uri, protocol, "add", count // 2, size, 1, 1, 1)  # warms the bookie up
    single = java_rate(uri, protocol, "add", ONE_BY_ONE_COUNT, size, 1, 1, 1, 1)["perSecond"]
    for loop in ("await add", "sync add"):
        yield f"{loop}, {shape}", rate(uri, protocol, loop, size, ONE_BY_ONE_COUNT)[0], single, "Java, 1 in flight"
    java = java_rate(uri, protocol, "add", count, size, 1, 1, 1, IN_FLIGHT)
    for loop in ("add", "sync add_async"):
        name = f"{loop}, {IN_FLIGHT:,} in flight, {shape}"
        yield name, rate(uri, protocol, loop, size, count)[0], java["perSecond"], "Java, 1,000 in flight"
    many = java_rate(uri, protocol, "add", count, size, 1, 1, 1, 5000)["perSecond"]
    for loop in ("add_all", "sync add_all"):
        yield f"{loop}, {shape}", rate(uri, protocol, loop, size, count)[0], many, "Java, 5,000 in flight"
    read = java_rate(uri, protocol, "read", java["ledgerId"])["perSecond"]
    for loop in ("read", "sync read"):
        yield f"{loop}, {shape}", rate(uri, protocol, loop, size, count, java["ledgerId"])[0], read, "Java readAsync"
    tailed = rate(uri, protocol, "tail", size, count)[0]
    yield f"tail of a writer that uses add_all, {shape}: {tailed:,.0f} entries a second"


def rate(uri: str, *arguments: object) -> tuple[float, str]:
    """Return the entries a second of a loop in a process of its own, and its ledger."""
    done = subprocess.run(
        [sys.executable, __file__, uri, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found, ledger = done.stdout.split()
    return float(found), ledger


async def add_loop(writer: WriteHandle, loop: str, payload: bytes, count: int) -> None:
    if loop == "await add":
        for _ in range(count):
            await writer.add(payload)
    elif loop == "add":
        pending: deque[asyncio.Future[int]] = deque()
        for _ in range(count):
            if len(pending) >= IN_FLIGHT:
                await pending.popleft()
            pending.append(writer.add(payload))
        await writer.flush()
    else:
        await writer.add_all([payload] * count)
        await writer.flush()


async def measure(uri: str, protocol: Protocol, loop: str, size: int, count: int, ledger: int | None) -> None:
    payload = bytes(size)
    async with BookKeeper(uri, protocol=protocol) as bookkeeper:
        if ledger is not None:
            reader = await bookkeeper.open_ledger(ledger)
            began = time.perf_counter()
            found = 0
            async for entry in reader.read():
                found += len(entry.payload)
            seconds = time.perf_counter() - began
            assert found == reader.length
        else:
            writer = await bookkeeper.create_ledger(**QUORUMS)
            reading = None
            if loop == "tail":
                reader = await bookkeeper.open_ledger(writer.ledger)

                async def follow() -> int:
                    return sum([len(entry.payload) async for entry in reader.tail()])

                reading = asyncio.create_task(follow())
            began = time.perf_counter()
            await add_loop(writer, loop, payload, count)
            if reading is not None:
                await writer.close()
                assert await reading == size * count
            seconds = time.perf_counter() - began
            await writer.close()
            ledger = writer.ledger_id
    print(count / seconds, ledger)


def measure_blocking(uri: str, protocol: Protocol, loop: str, size: int, count: int, ledger: int | None) -> None:
    payload = bytes(size)
    with sync.BookKeeper(uri, protocol=protocol) as bookkeeper, contextlib.ExitStack() as closing:
        if ledger is not None:
            reader = bookkeeper.open_ledger(ledger)
            began = time.perf_counter()
            found = sum(len(entry.payload) for entry in reader.read())
            seconds = time.perf_counter() - began
            assert found == reader.length
        else:
            writer = closing.enter_context(bookkeeper.create_ledger(**QUORUMS))
            ledger = writer.ledger_id
            began = time.perf_counter()
            if loop == "sync add":
                for _ in range(count):
                    writer.add(payload)
            elif loop == "sync add_async":
                pending: deque[Any] = deque()
                for _ in range(count):
                    if len(pending) >= IN_FLIGHT:
                        pending.popleft().result()
                    pending.append(writer.add_async(payload))
                writer.flush()
                pending[-1].result()
            else:
                writer.add_all([payload] * count)
                writer.flush()
            seconds = time.perf_counter() - began
    print(count / seconds, ledger)


if __name__ == "__main__":
    uri, protocol_name, loop, size, count, *ledger = sys.argv[1:]
    arguments = (uri, Protocol(int(protocol_name[1:])), loop, int(size), int(count), int(ledger[0]) if ledger else None)
    if loop.startswith("sync"):
        measure_blocking(*arguments)
    else:
        run(measure(*arguments))
