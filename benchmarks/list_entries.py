"""Measure what clients that list a huge ledger cost others: adds beside LIST_ENTRIES, and the bookie's memory.

    python benchmarks/list_entries.py              every storage class, a ledger of 1,000,000 entries
    python benchmarks/list_entries.py --storage db --entries 200000 --connections 4

The ledger is sparse, every other entry, so that each entry is a group of its own in the answer. So many connections
ask for its entries all the time, while one client adds entries one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import statistics
import struct
import tempfile
import threading
import time
from pathlib import Path

from run import STORAGES
from support.own_bookies import OwnBookie

from bkctl.client.ledger import BookKeeper
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol import bookkeeper_protocol_pb2 as pb

HUGE = LedgerId(0, 1 << 40)
PASSWORD = b"password"
PAYLOAD = bytes(100)
BURST = 2000


def frame(message: bytes) -> bytes:
    return struct.pack(">i", len(message)) + message


def receive(connection: socket.socket, count: int) -> None:
    """Read so many frames, and throw them away."""
    file = connection.makefile("rb", 1 << 20)
    for _ in range(count):
        (size,) = struct.unpack(">i", file.read(4))
        while size:
            size -= len(file.read(min(size, 1 << 20)))


def request(operation: int, number: int) -> pb.Request:
    message = pb.Request()
    message.header.version, message.header.operation, message.header.txnId = 3, operation, number
    return message


def make(address: tuple[str, int], count: int) -> None:
    """Add every other entry of the huge ledger, in bursts."""
    digests, key = DigestManager(HUGE, DigestType.CRC32C, PASSWORD), master_key(PASSWORD)
    with socket.create_connection(address) as connection:
        for start in range(0, count, BURST):
            burst = b""
            for number in range(start, min(start + BURST, count)):
                message = request(2, number)
                message.addRequest.ledgerId, message.addRequest.entryId = HUGE.ledger_id, 2 * number
                message.addRequest.masterKey = key
                message.addRequest.body = digests.seal(2 * number, -1, 100, PAYLOAD) + PAYLOAD
                burst += frame(message.SerializeToString())
            connection.sendall(burst)
            receive(connection, min(BURST, count - start))


def list_until(stopped: threading.Event, address: tuple[str, int], listed: list[float]) -> None:
    message = request(11, 1)
    message.getListOfEntriesOfLedgerRequest.ledgerId = HUGE.ledger_id
    with socket.create_connection(address) as connection:
        while not stopped.is_set():
            began = time.perf_counter()
            connection.sendall(frame(message.SerializeToString()))
            receive(connection, 1)
            listed.append(time.perf_counter() - began)


async def add_for(uri: str, seconds: float) -> list[float]:
    """Return the latency of each of the adds that were made one after the other."""
    latencies = []
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as client:
            handle = await client.create_ledger(
                ensemble_size=1, write_quorum_size=1, ack_quorum_size=1, password=PASSWORD
            )
            async with handle:
                end = time.perf_counter() + seconds
                while (began := time.perf_counter()) < end:
                    await handle.add(PAYLOAD)
                    latencies.append(time.perf_counter() - began)
    return latencies


def measure(bookie: OwnBookie, uri: str, connections: int, seconds: float) -> str:
    stopped, listed = threading.Event(), list[float]()
    threads = [threading.Thread(target=list_until, args=(stopped, bookie.address, listed)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    latencies = asyncio.run(add_for(uri, seconds))
    stopped.set()
    for thread in threads:
        thread.join()
    assert bookie.process is not None
    status = Path(f"/proc/{bookie.process.pid}/status").read_text()
    rss, peak = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) // 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
    p99 = sorted(latencies)[len(latencies) * 99 // 100]
    p50 = statistics.median(latencies)
    return (
        f"{connections} connections list: add p50 {p50 * 1000:.1f} ms, p99 {p99 * 1000:.1f} ms, "
        f"{len(listed)} lists, memory {rss} MiB, at its peak {peak} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--storage", nargs="+", choices=sorted(STORAGES), default=sorted(STORAGES))
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--connections", type=int, nargs="+", default=[0, 4, 6])
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    for storage in options.storage:
        with tempfile.TemporaryDirectory() as text:
            uri = f"sqlite://{text}/metadata.db"
            with open_cluster(uri, create=True):
                pass
            bookie = OwnBookie(uri, Path(text) / "bookie", storage=STORAGES[storage])
            bookie.start()
            try:
                make(bookie.address, options.entries)
                for connections in options.connections:
                    print(f"{storage}: {measure(bookie, uri, connections, options.seconds)}", flush=True)
            finally:
                bookie.stop()


if __name__ == "__main__":
    main()
