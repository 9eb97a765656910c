"""Measure our bookie, and the jobs of `bkctl pipeline`, on the files of N ledgers: time and memory, each against N.

    python benchmarks/scale_files.py                                   each storage class; 1,000 to 100,000 ledgers
    python benchmarks/scale_files.py --storage db --ledgers 100000 1000000
    python benchmarks/scale_files.py --storage sorted --steps pipeline

A ledger has ENTRIES entries, each in another stretch of the entry logs, as on a bookie that serves many ledgers at
once. The metadata is in SQLite. A step is a row: the bookie's start until it serves, a round of garbage collection, and
reads of READ_LEDGERS ledgers one after the other; then the jobs on the stopped bookie's files. The bookie's processor
time is of each step, its memory is resident after the step, and at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import re
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from measuring import BKCTL, measured, processor_seconds
from run import STORAGES
from scale import ledgers_of
from support.own_bookies import OwnBookie
from support.servers import free_port

from bkctl.bookie.cookies import stamp_or_verify
from bkctl.client.ledger import BookKeeper
from bkctl.config import BookieConfig
from bkctl.disk import Files, StorageFile
from bkctl.formats.entry import DigestManager, DigestType, master_key
from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
from bkctl.formats.record import record_of
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.store import NEW
from bkctl.storage.bookie_storage import open_ledger_storage
from bkctl.storage.ledger.ledger_storage import run_whole

ENTRIES = 3
PAYLOAD = bytes(100)
PASSWORD = b"password"
READ_LEDGERS = 10_000
READS_AT_ONCE = 32
BATCH = 10_000
SETTINGS = {
    "logSizeLimit": 32 << 20,
    "skipListSizeLimit": 64 << 20,
    "dbStorage_writeCacheMaxSizeMb": 128,
    "dbStorage_rocksDB_writeBufferSizeMB": 32,
    "openFileLimit": 20_000,
    "httpServerEnabled": "true",
}
STEPS = ("bookie", "pipeline", "spark")
JOBS = {
    "`pipeline inventory`": ["inventory"],
    "`pipeline inventory --by ledger`": ["inventory", "--by", "ledger"],
    "`pipeline integrity`": ["integrity"],
}


class Row(NamedTuple):
    """One step: wall-clock and processor seconds; resident and peak memory."""

    seconds: float
    cpu_s: float
    rss_mib: float | None
    peak_mib: float

    def cell(self) -> str:
        rss = "" if self.rss_mib is None else f"{self.rss_mib:.0f} MiB, "
        return f"{self.seconds:.1f} s ({self.cpu_s:.1f}), {rss}peak {self.peak_mib:.0f} MiB"


# --- files ----------------------------------------------------------------------------------------------------------


def make(bookie: OwnBookie, uri: str, shape: str, count: int) -> None:
    """Fill the bookie's directories and the metadata store, without waiting for the disk."""
    StorageFile.sync = lambda self: None  # type: ignore[method-assign]
    Files.sync_directory = lambda self, path: None  # type: ignore[method-assign]
    config = BookieConfig.load(bookie.conf)
    metadata = LedgerMetadata(
        1, 1, 1, DigestType.CRC32C, PASSWORD, (Fragment(0, (bookie.bookie_id,)),),
        LedgerState.CLOSED, ENTRIES * len(PAYLOAD), ENTRIES - 1, 1_700_000_000_000,
    ).serialize()  # fmt: skip
    key = master_key(PASSWORD)
    with open_cluster(uri, create=True) as cluster:
        stamp_or_verify(config, bookie.bookie_id, cluster, Files())
        ledgers = sorted(ledgers_of(shape, count))
        waiting = iter(ledgers)
        while batch := list(islice(waiting, 1000)):
            nodes = [(cluster.ledgers.prepare_restore(ledger), metadata, NEW) for ledger in batch]
            assert all(isinstance(result, int) for result in cluster.store.put_many(nodes))
    storage = open_ledger_storage(config, Files())
    storage.open()
    for entry_id in range(ENTRIES):
        for number, ledger in enumerate(ledgers, 1):
            handle = storage.handles.get(ledger)
            if handle is None:
                handle = storage.load(ledger)
                storage.create(handle, key)
            digests = DigestManager(ledger, DigestType.CRC32C, PASSWORD)
            body = digests.seal(entry_id, entry_id - 1, (entry_id + 1) * len(PAYLOAD), PAYLOAD) + PAYLOAD
            record = record_of(body)
            storage.table.add(handle, [entry_id], [record], len(record))
            if number % BATCH == 0:
                run_whole(storage.begin_flush, storage.flush, storage.end_flush)
        run_whole(storage.begin_flush, storage.flush, storage.end_flush)
    storage.close()


# --- the bookie -----------------------------------------------------------------------------------------------------


class Meter:
    """Measures the steps of a running bookie."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._at, self._cpu = time.perf_counter(), 0.0

    def row(self, began: float) -> Row:
        process = Path(f"/proc/{self._pid}")
        cpu = processor_seconds(process)
        status = (process / "status").read_text()
        rss, peak = (int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("VmRSS", "VmHWM"))  # type: ignore[index]
        spent, self._cpu = cpu - self._cpu, cpu
        return Row(time.perf_counter() - began, spent, rss, peak)


async def read_some(uri: str, ledgers: list[LedgerId]) -> None:
    with open_cluster(uri) as cluster:
        async with BookKeeper(cluster) as client:
            waiting = iter(ledgers)

            async def work() -> None:
                for ledger in waiting:
                    handle = await client.open_ledger(
                        ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=PASSWORD
                    )
                    async for _ in handle.read(0, ENTRIES - 1):
                        pass

            await asyncio.gather(*(work() for _ in range(READS_AT_ONCE)))


def measure_bookie(bookie: OwnBookie, uri: str, shape: str, count: int) -> dict[str, Row]:
    began = time.perf_counter()
    bookie.start()
    meter = Meter(bookie.pid)
    rows = {"start until it serves": meter.row(began)}
    began = time.perf_counter()
    subprocess.run(
        [*BKCTL, "--yes", "--conf", str(bookie.conf), "bookie", "gc", "--wait"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    rows["a round of garbage collection"] = meter.row(began)
    chosen = random.Random(1).sample(sorted(ledgers_of(shape, count)), min(READ_LEDGERS, count))
    began = time.perf_counter()
    asyncio.run(read_some(uri, chosen))
    rows[f"reads of {READ_LEDGERS:,} ledgers"] = meter.row(began)
    bookie.stop()
    return rows


def measure_pipeline(bookie: OwnBookie, uri: str, directory: Path, *, spark: bool) -> dict[str, Row]:
    rows = {}
    for name, words in JOBS.items():
        more = ["--master", "local[2]"] if spark else []
        command = [*BKCTL, "-u", uri, "pipeline", *words, str(bookie.directory), *more, "-o", "ndjson"]
        found = measured(command, directory)
        rows[f"{name}{' --master local[2]' if spark else ''}"] = Row(found.seconds, found.cpu_s, None, found.rss_mib)
    return rows


def measure(storage: str, shape: str, count: int, steps: list[str]) -> dict[str, Row]:
    with tempfile.TemporaryDirectory(prefix="bkctl-scale-") as text:
        directory = Path(text)
        uri = f"sqlite://{directory}/metadata.db"
        settings = {**SETTINGS, "httpServerPort": free_port()}
        bookie = OwnBookie(uri, directory / "bookie", storage=STORAGES[storage], settings=settings)
        start = time.perf_counter()
        maker = multiprocessing.get_context("fork").Process(target=make, args=(bookie, uri, shape, count))
        maker.start()
        maker.join()
        if maker.exitcode:
            sys.exit(f"{count} ledgers were not made")
        print(f"# {storage}: {count:,} ledgers made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        rows = {}
        try:
            if "bookie" in steps:
                rows |= measure_bookie(bookie, uri, shape, count)
            for step in ("pipeline", "spark"):
                if step in steps:
                    rows |= measure_pipeline(bookie, uri, directory, spark=step == "spark")
        finally:
            bookie.kill()
            for name, row in rows.items():
                print(f"# {storage}, {count:,}: {name}: {row.cell()}", file=sys.stderr, flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--storage", nargs="+", choices=list(STORAGES), default=list(STORAGES))
    parser.add_argument("--ledgers", nargs="+", type=int, default=[1_000, 10_000, 100_000], metavar="N")
    parser.add_argument("--shape", choices=["scope0", "uuids"], default="scope0")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=["bookie", "pipeline"])
    arguments = parser.parse_args()
    for storage in arguments.storage:
        found = {count: measure(storage, arguments.shape, count, arguments.steps) for count in arguments.ledgers}
        print(f"\n| {storage} | {' | '.join(f'{count:,}' for count in found)} |")
        print(f"| --- |{' --- |' * len(found)}")
        for name in next(iter(found.values())):
            print(f"| {name} | {' | '.join(rows[name].cell() for rows in found.values())} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
