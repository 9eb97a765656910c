"""Measure `bkctl bookies recover` beside Apache's `recover`: many small ledgers on a bookie that is lost.

    python benchmarks/recover.py                       10,000 ledgers each
    python benchmarks/recover.py --ledgers 1000 --runs 2

Four bookies of Apache's on one ZooKeeper, with everything synced. For each tool as many ledgers are written, alike:
three entries of 100 bytes, ensemble 3, quorums 2, on three of the bookies. One of those is lost, and the tool recovers
it; the fourth bookie is the only one that can come in. Then every replica of some ledgers is read, all are deleted, and
the bookie comes back. The tools take turns at being first. Apache's writes what it does to its log as its shell does.
A ratio above 1 means that bkctl is faster. The processor time of the tools themselves is printed too, for a machine
that others use meanwhile. Needs Java 17 and Maven, like the tests, whose servers it uses.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import BKCTL, SHELL
from run import Bench, full_speed_java, servers

from bkctl.client.ledger import BookKeeper
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.protocol.connection import run

ENTRY_COUNT = 3
ENTRY_SIZE_BYTES = 100
WRITERS = 64
VERIFIED_COUNT = 50
ATTEMPTS = 5
#: Apache's tool begins with all ledgers of a node at once, and gives up on each that takes 5 seconds.
PATIENCE = {"addEntryTimeoutSec": 300, "readEntryTimeoutSec": 300}


def write(uri: str, bookies: Sequence[str], count: int) -> list[LedgerId]:
    """`count` closed ledgers on these three bookies."""
    ledgers: list[LedgerId] = []

    async def work() -> None:
        async with BookKeeper(cluster, only=bookies) as client:
            numbers = iter(range(count))

            async def writer() -> None:
                for _ in numbers:
                    handle = await client.create_ledger(password=b"secret")
                    for _ in range(ENTRY_COUNT):
                        handle.add(b"x" * ENTRY_SIZE_BYTES)
                    await handle.close()
                    ledgers.append(handle.ledger)

            await asyncio.gather(*(writer() for _ in range(WRITERS)))

    with open_cluster(uri) as cluster:
        run(work())
    return ledgers


def left_on(uri: str, bookie_id: str) -> int:
    """Return the number of ledgers that name the bookie."""
    command = [*BKCTL, "-q", "bookies", "recover", bookie_id, "--query", "-u", uri, "-o", "id"]
    return len(subprocess.run(command, capture_output=True, check=True).stdout.split())


def timed(command: Sequence[str]) -> float:
    """Wall-clock seconds of a command; raises when it fails."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    if done.returncode:
        print(done.stdout.decode()[-4000:], done.stderr.decode()[-4000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command)
    return seconds


def processor_s() -> float:
    """Processor seconds of the processes that we ran, and that are over."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def until_it_succeeds(command: Sequence[str]) -> float:
    """Wall-clock seconds of a command that is run again while it fails, as an operator has to."""
    start = time.perf_counter()
    for count in range(ATTEMPTS):
        done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
        if not done.returncode:
            return time.perf_counter() - start
        print(f"apache   ended with {done.returncode} after {time.perf_counter() - start:.1f} s", flush=True)
        if count == ATTEMPTS - 1:
            print(done.stdout.decode()[-2000:], done.stderr.decode()[-2000:], file=sys.stderr)
    raise subprocess.CalledProcessError(done.returncode, command)


def measured(bench: Bench, cluster: servers.ApacheCluster, tool: str, count: int) -> float:
    """Seconds that the tool takes to recover a bookie with so many ledgers; all is as before afterwards."""
    uri, (lost, up, *others) = cluster.metadata_uri, cluster.bookies
    ledgers = write(uri, [lost.bookie_id, *(each.bookie_id for each in others)], count)
    lost.stop()
    with open_cluster(uri) as opened:
        servers.wait_for(lambda: opened.bookies.get(lost.bookie_id).state == "down", "it is gone")  # type: ignore[union-attr]
    before_s = processor_s()
    if tool == "bkctl":
        seconds = timed([*BKCTL, "bookies", "recover", lost.bookie_id, "--yes", "-u", uri])
    else:
        conf = servers.write_conf(up.directory / "shell.conf", {**up.settings, **PATIENCE})
        with full_speed_java():
            command = bench.java.command(SHELL, "-conf", conf, "recover", "-force", lost.bookie_id)
        seconds = until_it_succeeds(command)
    used_s = processor_s() - before_s
    if left := left_on(uri, lost.bookie_id):
        sys.exit(f"{tool} left {left:,} of {count:,} ledgers on the lost bookie")
    rate = f"{count / seconds:>8,.0f} ledgers/s"
    print(f"{tool:<8} {count:>8,} ledgers {seconds:>8.1f} s  {rate} {used_s:>8.1f} s of processor", flush=True)
    some = [str(each) for each in ledgers[:: max(len(ledgers) // VERIFIED_COUNT, 1)]]
    timed([*BKCTL, "ledger", "verify", *some, "-u", uri])
    names = "".join(f"{each}\n" for each in ledgers).encode()
    delete = [*BKCTL, "ledger", "delete", "--from-file", "-", "--yes", "--undo", "none", "-u", uri]
    subprocess.run(delete, input=names, capture_output=True, check=True)
    lost.start()
    return seconds


def main() -> None:
    """Write, lose, recover, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ledgers", type=int, default=10_000, help="for each tool")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--storage", choices=("sorted", "interleaved", "db"), default="sorted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-recover-") as directory:
        bench = Bench(Path(directory), 0)
        try:
            with bench.apache(4, options.storage) as cluster:
                for number in range(options.runs):
                    tools = ("apache", "bkctl") if number % 2 == 0 else ("bkctl", "apache")
                    seconds = {tool: measured(bench, cluster, tool, options.ledgers) for tool in tools}
                    print(f"ratio {seconds['apache'] / seconds['bkctl']:.2f}x", flush=True)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
