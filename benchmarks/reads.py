"""Reads under a Java client: three bookies of ours and three of Apache's, side by side, the same cases on both in turn.

See README.md for the cases and how they are measured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from measuring import processor_seconds
from support import servers
from support.own_cluster import OwnCluster, start_all, stop_all

LEDGERS = 200
#: Entries of each ledger: at most as many, and at most as many bytes.
ENTRIES_MAX = 2000
LEDGER_BYTES_MAX = 2 << 20
#: Readers of the catch-up and random cases.
READERS = 16
#: Seconds of the adds that show how many Apache's bookies take.
ADDS_S = 10

Ask: TypeAlias = Callable[..., dict[str, Any]]


class Spent(NamedTuple):
    """Resources that processes used so far."""

    processor_s: float
    disk_bytes: int
    read_calls: int

    @staticmethod
    def by(bookies: Sequence[servers.Server]) -> Spent:
        seconds, read, calls = 0.0, 0, 0
        for bookie in bookies:
            process = Path(f"/proc/{bookie.pid}")
            seconds += processor_seconds(process)
            counts = dict(line.split(": ") for line in (process / "io").read_text().splitlines())
            read, calls = read + int(counts["read_bytes"]), calls + int(counts["syscr"])
        return Spent(seconds, read, calls)


class Outcome(NamedTuple):
    """One case on one side: what the client printed, and what the bookies used meanwhile."""

    rate: float
    line: str


class Side:
    """Three bookies, ours or Apache's, and the Java client that reads from them."""

    def __init__(self, cluster: OwnCluster | servers.ApacheCluster, ask: Ask, name: str) -> None:
        self.bookies: Sequence[servers.Server] = cluster.bookies
        self._cluster = cluster
        self.ask = ask
        self.name = name

    def measure(self, *words: object, is_cold: bool = False) -> Outcome:
        if is_cold:
            self.drop_page_cache()
        before = Spent.by(self.bookies)
        found = self.ask(*words)
        after = Spent.by(self.bookies)
        entries = max(1, found["entries"] + found.get("added", 0))
        line = (
            f"{self.name}: {(after.processor_s - before.processor_s) / entries * 1e6:.1f} µs "
            f"(client {found['clientSeconds'] / entries * 1e6:.1f} µs), "
            f"{(after.read_calls - before.read_calls) / entries:.2f} read calls, "
            f"{(after.disk_bytes - before.disk_bytes) / entries:,.0f} bytes from disk an entry; "
            f"p50 {found['p50Ms']:.1f} ms, p99 {found['p99Ms']:.1f} ms"
        )
        if "addsPerSecond" in found:
            line += f"; beside {found['addsPerSecond']:,.0f} adds/s with p99 {found['addP99Ms']:.1f} ms"
        return Outcome(found["perSecond"], line)

    def restart(self) -> None:
        """Restart the bookies, so that nothing but files has the entries."""
        stop_all(self.bookies)
        start_all(self.bookies)

    def drop_page_cache(self) -> None:
        """Drop the bookies' files from the system's cache, and no others: the machine may have other work."""
        os.sync()
        for directory in {bookie.log.parent for bookie in self.bookies}:
            for path in directory.rglob("*"):
                with contextlib.suppress(OSError), path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(
    ours: Side, theirs: Side, protocol: str, size: int, seconds: float, part: str = ""
) -> Iterator[tuple[str, Outcome, Outcome]]:
    """Yield what was measured, ours and Apache's, in the cases whose name has `part`."""
    entries = max(1, min(ENTRIES_MAX, LEDGER_BYTES_MAX // size))
    sides = (theirs, ours)

    def case(what: str, *words: object, is_cold: bool = False) -> Iterator[tuple[str, Outcome, Outcome]]:
        if part in what:
            peer, own = (side.measure(*words, is_cold=is_cold) for side in sides)
            yield what, own, peer

    for side in sides:
        side.ask("write", LEDGERS, entries, size)
    yield from case(f"catch-up, {READERS} readers, just written", "read", "ledgers", READERS, 0, 0, size)
    for side in sides:
        side.restart()
    yield from case(f"catch-up, {READERS} readers, cold", "read", "ledgers", READERS, 0, 0, size, is_cold=True)
    yield from case(f"catch-up, {READERS} readers, warm", "read", "ledgers", READERS, seconds, 0, size)
    yield from case(f"catch-up, {LEDGERS} readers, warm", "read", "ledgers", LEDGERS, seconds, 0, size)
    yield from case(f"random entries, {READERS} readers", "read", "random", READERS, seconds, 0, size)
    if protocol == "v2":
        yield from case(f"batch read, {READERS} readers", "read", "batch", READERS, seconds, 0, size)
    rate = theirs.ask("add", ADDS_S, size, 0)["addsPerSecond"] // 2
    yield from case(f"catch-up, {READERS} readers, beside adds", "read", "ledgers", READERS, seconds, rate, size)
    yield from case(f"random entries, {READERS} readers, beside adds", "read", "random", READERS, seconds, rate, size)
    yield from case("1 ledger written and tailed", "tail", 1, seconds, size)
    yield from case(f"{LEDGERS} ledgers written and tailed", "tail", LEDGERS, seconds, size)


@contextlib.contextmanager
def both_sides(
    bench: Any, storage: str, protocol: str, settings: Mapping[str, object] | None = None
) -> Iterator[tuple[Side, Side]]:
    """Our bookies and Apache's, up at the same time, each with a client of its own."""
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(start(3, storage, settings)) for start in (bench.ours, bench.apache)]
        asks = [
            stack.enter_context(servers.conversation(bench.java, "ReadBench", cluster.metadata_uri, protocol))
            for cluster in clusters
        ]
        yield Side(clusters[0], asks[0], "ours"), Side(clusters[1], asks[1], "Apache's")
