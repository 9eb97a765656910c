"""Measure the data source of entry logs on Spark: what a second core brings, how time grows, and the inventory.

    python benchmarks/spark.py                        all of it: logs of 256 MiB to 2 GiB (6 GiB on the disk)
    python benchmarks/spark.py --mib 64 128           other sizes; the largest is the inventory's, half of it the scan's
    python benchmarks/spark.py --only speedup         or growth, inventory
    python benchmarks/spark.py --only speedup --profile    also what the Python workers do (py-spy)

Each measurement has a Spark of its own, on as many cores as it says: its processes, JVM and Python, are bound to them.
Times are wall-clock without Spark's start: the session is there, and has scanned a small log before. The scans are
`records` (every row with all columns that come without asking, thrown away: Spark's `noop`), `payloads` (the payloads
too) and `sums` (the number and bytes of the entries of each ledger, counted in the tasks). Best of --runs.
The inventory is measured as a command, too, with start-up and all: on one machine and on a local Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import HEADER_SIZE, write_header, write_ledgers_map
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BKCTL = str(Path(sys.executable).with_name("bkctl"))
LEDGERS = [LedgerId(0, number) for number in range(16)]
PAYLOAD_SIZE_BYTES = 1024
WARM_UP_MIB = 16
SCANS = ("records", "payloads", "sums")
PARTS = ("speedup", "growth", "inventory")


def write_log(path: Path, size_bytes: int) -> int:
    """An entry log of that size with entries of 1 KiB, closed with its map; returns how many they are."""
    managers = [DigestManager(ledger, DigestType.CRC32C) for ledger in LEDGERS]
    sizes = dict.fromkeys(LEDGERS, 0)
    payload = os.urandom(PAYLOAD_SIZE_BYTES)
    count = position = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb", buffering=1 << 20) as file:
        position = file.write(write_header())
        while position < size_bytes:
            manager = managers[count % len(managers)]
            entry_id = count // len(managers)
            sealed = manager.seal(entry_id, entry_id - 1, (entry_id + 1) * PAYLOAD_SIZE_BYTES, payload)
            size = len(sealed) + len(payload)
            position += file.write(RECORD_SIZE.pack(size) + sealed + payload)
            sizes[manager.ledger] += size + RECORD_SIZE.size
            count += 1
        file.write(b"".join(write_ledgers_map(sizes)))
        file.seek(0)
        file.write(write_header(1, position, len(LEDGERS)).ljust(HEADER_SIZE, b"\0"))
    return count


# --- in a process of its own: one Spark -------------------------------------------------------------------------------


@contextmanager
def session(cores: int, directory: Path) -> Iterator[SparkSession]:
    """A Spark with so many task slots, which knows the sources; quiet."""
    from pyspark.sql import SparkSession

    from bkctl.spark.sources import register

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.memory": "2g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName("bkctl benchmark")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    try:
        yield spark
    finally:
        spark.stop()


def scan(spark: SparkSession, kind: str, path: str) -> int | None:
    """Scan one log; returns the number of its entries where the scan counts them."""
    reader = spark.read.format("bookkeeper.entrylog")
    if kind == "sums":
        frame = reader.option("rows", "ledgers").option("columns", "entryCount").load(path)
        return sum(row.entryCount for row in frame.collect())
    if kind == "payloads":
        reader = reader.option("columns", "*,payload").option("digestType", "CRC32C")
    reader.load(path).write.format("noop").mode("overwrite").save()
    return None


def inventory(spark: SparkSession, directory: str) -> int:
    """The job over one bookie; returns the number of entries that it counts."""
    from bkctl.spark.jobs.bookies import BookieFiles
    from bkctl.spark.jobs.inventory import Grouping, shares, totals

    bookies = [BookieFiles("bookie", (), (f"{directory}/current",), ())]
    rows = totals(spark, bookies, shares(spark, bookies), Grouping.LEDGER).collect()
    return sum(row.entryCount for row in rows)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Run what `task` says in this process; returns seconds, for each of its scans and paths."""
    found: dict[str, Any] = {}
    directory = Path(task["directory"])
    with session(task["cores"], directory) as spark:
        for kind in task["scans"]:
            call: Callable[..., int | None]
            call = inventory if kind == "inventory" else lambda spark, path, kind=kind: scan(spark, kind, path)
            for _ in range(3):
                call(spark, task["warm_up"])
            for path, count in task["paths"]:
                seconds = []
                for _ in range(task["runs"]):
                    start = time.perf_counter()
                    counted = call(spark, path)
                    seconds.append(time.perf_counter() - start)
                    assert counted in (None, count), f"{counted} entries of {count}"
                found[f"{kind} {path}"] = min(seconds)
    return found


# --- the benchmarks ---------------------------------------------------------------------------------------------------


class Bench:
    """The logs, and measurements of them."""

    def __init__(self, directory: Path, sizes_mib: Sequence[int], runs: int, profile: bool) -> None:
        self.directory, self.sizes_mib, self.runs, self.profile = directory, sorted(sizes_mib), runs, profile
        self._counts: dict[Path, int] = {}

    def log(self, mib: int, name: str = "0") -> tuple[str, int]:
        """A log of that size, alone in the directory of a bookie, and how many entries it has; made once."""
        path = self.directory / f"{mib}-mib" / "current" / f"{name}.log"
        if path not in self._counts:
            self._counts[path] = write_log(path, mib << 20)
        # So that no measurement pays for the disk.
        with path.open("rb") as file:
            while file.read(1 << 22):
                pass
        return str(path), self._counts[path]

    def spark(self, cores: int, scans: Sequence[str], paths: Sequence[tuple[str, int]], warm_up: str) -> dict[str, Any]:
        """Seconds by `<scan> <path>` on a Spark of so many cores."""
        task = {"cores": cores, "scans": scans, "paths": paths, "warm_up": warm_up, "runs": self.runs,
                "directory": str(self.directory / "spark")}  # fmt: skip
        available = sorted(os.sched_getaffinity(0))
        if len(available) < cores:
            sys.exit(f"This needs {cores} cores, {len(available)} are there")
        command = [sys.executable, __file__, "--measure", json.dumps(task)]
        if self.profile:
            py_spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or "py-spy"
            report = f"spark-{cores}.profile"
            command = [py_spy, "record", "--subprocesses", "--format", "raw", "-o", report, "--native", "--", *command]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, available[:cores]),
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"The measurement failed with exit code {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def speedup(self) -> None:
        """The same log by one core and by two."""
        mib = max(1, self.sizes_mib[-1] // 2)
        log, (warm_up, _) = self.log(mib), self.log(WARM_UP_MIB)
        one, two = (self.spark(cores, SCANS, [log], warm_up) for cores in (1, 2))
        print(f"\nOne log of {mib:,} MiB, {log[1]:,} entries       one core   two cores   ratio      two cores")
        for key, seconds in one.items():
            kind = key.partition(" ")[0]
            rate = f"{(mib << 20) / two[key] / 1e9:6.2f} GB/s {log[1] / two[key] / 1e6:6.2f} M/s"
            print(f"{kind:<40} {seconds:9.2f} s {two[key]:9.2f} s  {seconds / two[key]:5.2f}x  {rate}")

    def growth(self) -> None:
        """Logs of all sizes by two cores."""
        logs = {mib: self.log(mib) for mib in self.sizes_mib}
        warm_up, _ = self.log(WARM_UP_MIB)
        seconds = self.spark(2, ("records", "sums"), list(logs.values()), warm_up)
        print(f"\nTwo cores{'':<24} {'records':>10} {'a GiB':>10}    {'sums':>10} {'a GiB':>10}")
        for mib, (path, _) in logs.items():
            of_size = [seconds[f"{kind} {path}"] for kind in ("records", "sums")]
            shown = "    ".join(f"{each:8.2f} s {each * 1024 / mib:8.2f} s" for each in of_size)
            print(f"{mib:>8,} MiB{'':<21} {shown}")

    def inventory(self) -> None:
        """Two logs that together are of the largest size: the job, beside one process that scans them."""
        mib = self.sizes_mib[-1] // 2
        logs = [self.log(mib), self.log(mib, "1")]
        count = sum(each[1] for each in logs)
        directory, warm_up = Path(logs[0][0]).parent.parent, Path(self.log(WARM_UP_MIB)[0]).parent.parent
        job = self.spark(2, ["inventory"], [(str(directory), count)], str(warm_up))
        single = []
        for _ in range(self.runs):
            start = time.perf_counter()
            for path, _ in logs:
                with EntryLogReader.open(path) as reader:
                    reader.scan_ledgers()
            single.append(time.perf_counter() - start)
        command = [BKCTL, "pipeline", "inventory", "--by", "ledger", "-o", "ndjson", f"bookie={directory}"]
        engines = {"on this machine": [], "on Spark (--master local[*])": ["--master", "local[*]"]}
        whole: dict[str, float] = {}
        for engine, words in engines.items():
            seconds = []
            for _ in range(self.runs):
                start = time.perf_counter()
                subprocess.run([*command, *words], stdout=subprocess.DEVNULL, check=True)
                seconds.append(time.perf_counter() - start)
            whole[engine] = min(seconds)
        print(f"\nInventory of {2 * mib:,} MiB in two logs, {count:,} entries")
        print(f"{'the job on two cores, Spark started':<58} {next(iter(job.values())):8.2f} s")
        print(f"{'one process: EntryLogReader.scan_ledgers':<58} {min(single):8.2f} s")
        local = whole["on this machine"]
        for engine, best in whole.items():
            print(f"{f'bkctl pipeline inventory {engine}, start-up and all':<70} {best:8.2f} s {best / local:6.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(json.loads(given.measure))))
        return
    with tempfile.TemporaryDirectory(prefix="bkctl-spark-") as directory:
        bench = Bench(Path(directory), given.mib, given.runs, given.profile)
        for part in given.only:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
