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

    python benchmarks/spark.py --only plan --entries 1000000 10000000 100000000      (2 GiB on the disk for 10^8)

`plan` runs `integrity` over facts that are made, not extracted: so many entries on each of three bookies, in logs and
indexes, of which one index lacks a few. It prints what Spark's event log says (jobs, tasks, bytes of shuffles, how
even the rows are among the tasks of the longest stage), and the peaks of memory of the driver, an executor's JVM and a
Python worker, from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from files import write_entry_log
from measuring import BKCTL

from bkctl.files.entry_log import EntryLogReader
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAYLOAD_SIZE_BYTES = 1024
WARM_UP_MIB = 16
SCANS = ("records", "payloads", "sums")
#: The engines of `plan`; Spark has two executors.
MASTERS = {"local": "", "spark": "local-cluster[2,1,2048]"}
PARTS = ("speedup", "growth", "inventory", "plan")


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


# --- made facts -------------------------------------------------------------------------------------------------------

BOOKIES = ("bookie-0:3181", "bookie-1:3181", "bookie-2:3181")
#: Ledgers of the made facts, and entries of each that a log has, one after the other, as sorted storage writes them.
PLAN_LEDGERS, RUN_ENTRIES = 100, 10_000
#: One of so many places is not in the second bookie's index.
LOST_ONE_OF = 250_007
_LEDGER_SQL = (
    "printf('%032x', ledger) AS ledgerQualifiedName, 0::DECIMAL(20,0) AS ledgerScopeId, "
    "ledger::DECIMAL(20,0) AS ledgerId, entry AS entryId"
)


def make_facts(directory: Path, entries: int) -> tuple[str, str, int]:
    """Write facts and metadata of so many entries on each of three bookies; returns their URIs and the lost places."""
    import duckdb

    from bkctl.formats.metadata import Fragment, LedgerMetadata, LedgerState
    from bkctl.metadata.cluster import open_cluster
    from bkctl.spark.facts.facts_store import FactsStore, directory_name, list_path
    from bkctl.spark.facts.tables import ROW_GROUP_ROWS, TABLES

    store, root = FactsStore(str(directory / "facts")), directory / "facts" / "v1"
    of_ledger = entries // PLAN_LEDGERS
    logs = max(1, of_ledger // RUN_ENTRIES)
    run = of_ledger // logs
    database = duckdb.connect()
    types = {"bigint": "BIGINT", "int": "INTEGER", "string": "VARCHAR"}
    started_at = datetime.now(UTC)

    def write(table: str, part: str, query: str) -> None:
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        given = {row[0] for row in database.sql(query).description}
        shown = [f"'{part}' AS part" if name == "part" else f'"{name}"' if name in given else
                 f"NULL::{types[column.type]} AS {name}" for name, column in TABLES[table].items()]  # fmt: skip
        database.execute(
            f"COPY (SELECT {', '.join(shown)} FROM ({query})) TO '{root / part}' "
            f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {ROW_GROUP_ROWS})"
        )
        parts.append({"bookieId": bookie, "table": table, "part": part, "startedAt": started_at})

    for number, bookie in enumerate(BOOKIES):
        name = directory_name(bookie)
        parts: list[dict[str, Any]] = []
        for log in range(logs):
            # Records of 100 to 699 bytes, with gaps between them in which others may be.
            places = (
                f"SELECT '{bookie}' AS bookieId, '/bookies/{number}/current/{log:x}.log' AS file, {log} AS logId, "
                f"false AS scoped, range // {run} AS ledger, {log * run} + range % {run} AS entry, "
                f'(1024 + range * 704 + hash(range + {log}) % 100)::BIGINT AS "offset", '
                f"(100 + hash(range * 7 + {log}) % 500)::BIGINT AS recordSize FROM range({PLAN_LEDGERS * run})"
            )
            records = (
                f"SELECT bookieId, file, logId, scoped, {_LEDGER_SQL}, entry - 1 AS lastAddConfirmed, "
                f'500 * entry AS length, 1 AS formatVersion, "offset", recordSize, '
                f"'entry' AS type, 'CRC32C' AS digest FROM ({places})"
            )
            write("records", f"records/{name}/{log}.parquet", records)
            kept = f"entry % {LOST_ONE_OF} <> 7" if number == 1 else "true"
            index = (
                f"SELECT bookieId, '/bookies/{number}/current/locations' AS file, scoped, {_LEDGER_SQL}, logId, "
                f'"offset" FROM ({places}) WHERE {kept}'
            )
            write("index", f"index/{name}/{log}.parquet", index)
        with store.new_part("parts", list_path(name, 1)) as writer:
            writer.add_rows(parts)
    uri = f"sqlite://{directory / 'metadata.db'}"
    with open_cluster(uri, create=True) as cluster:
        for ledger in range(PLAN_LEDGERS):
            turns = ((first, first % 3) for first in range(0, run * logs, 250_000))
            fragments = tuple(Fragment(first, (*BOOKIES[at:], *BOOKIES[:at])) for first, at in turns)
            cluster.ledgers.create(
                LedgerId(0, ledger),
                LedgerMetadata(
                    3, 3, 2, DigestType.CRC32C, b"", fragments, LedgerState.CLOSED, 500 * run * logs, run * logs - 1
                ),
            )
    return str(directory / "facts"), uri, PLAN_LEDGERS * sum(1 for _ in range(7, run * logs, LOST_ONE_OF))


class Peaks(threading.Thread):
    """Notes the peaks of memory of this process and those below it, by kind of process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: Counter[str] = Counter()
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.3):
            for kind, size in self._sizes():
                self.peaks[kind] = max(self.peaks[kind], size)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        below = {os.getpid()}
        parents = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        for _ in range(6):
            below |= {each for each, parent in parents.items() if parent in below}
        for each in below:
            with suppress(OSError):
                words = Path(f"/proc/{each}/cmdline").read_bytes()
                kind = (
                    "driver, Python" if each == os.getpid()
                    else "executor, JVM" if b"CoarseGrainedExecutorBackend" in words
                    else "driver, JVM" if b"SparkSubmit" in words
                    else "Python worker" if b"pyspark" in words else None
                )  # fmt: skip
                if kind is not None:
                    yield kind, int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def events(directory: Path) -> dict[str, Any]:
    """Return the counts of Spark's event log in `directory`."""
    jobs = tasks = written = 0
    durations: Counter[int] = Counter()
    rows: dict[int, list[int]] = defaultdict(list)
    for path in directory.rglob("events_*"):
        with path.open() as file:
            for event in map(json.loads, file):
                if event["Event"] == "SparkListenerJobStart":
                    jobs += 1
                elif event["Event"] == "SparkListenerTaskEnd":
                    tasks += 1
                    metrics, info, stage = event["Task Metrics"], event["Task Info"], event["Stage ID"]
                    written += metrics["Shuffle Write Metrics"]["Shuffle Bytes Written"]
                    durations[stage] += info["Finish Time"] - info["Launch Time"]
                    read = (
                        metrics["Shuffle Read Metrics"]["Total Records Read"] + metrics["Input Metrics"]["Records Read"]
                    )
                    if read:
                        rows[stage].append(read)
    longest = rows[durations.most_common(1)[0][0]]
    return {
        "jobs": jobs, "tasks": tasks, "shuffled": written,
        "skew": max(longest) / statistics.mean(longest), "of": len(longest),
    }  # fmt: skip


def measure_plan(task: dict[str, Any]) -> dict[str, Any]:
    """Run `integrity` over made facts in this process; returns what was counted."""
    from bkctl.spark.facts.frames import Facts
    from bkctl.spark.jobs.integrity import integrity
    from bkctl.spark.local.session import local_session
    from bkctl.spark.session import spark_session

    directory = Path(task["directory"])
    log = directory / "events"
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.eventLog.enabled": "true", "spark.eventLog.dir": f"file://{log}", "spark.eventLog.compress": "false",
        "spark.executor.memory": "2g", "spark.local.dir": str(directory / "local"),
        "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1",
    }  # fmt: skip
    peaks = Peaks()
    peaks.start()
    begin = time.perf_counter()
    chosen: Any = spark_session(task["master"], settings=settings, ship=False) if task["master"] else local_session()
    with chosen as spark:
        found = integrity(spark, Facts(task["facts"]), {"metadataUri": task["metadata"]})
        problems = Counter(row.problem for row in found.findings.collect())
        (checked,) = found.checked.collect()
        assert found.unchecked.collect() == []
        found.release()
    seconds = time.perf_counter() - begin
    peaks.done.set()
    assert problems == {"notIndexed": task["lost"]}, f"{problems}, {task['lost']} are lost"
    assert checked.replicaCount == task["replicas"], checked
    return {"seconds": seconds, "peaks": dict(peaks.peaks), **(events(log) if task["master"] else {})}


# --- the benchmarks ---------------------------------------------------------------------------------------------------


class Bench:
    """The logs, and measurements of them."""

    def __init__(
        self, directory: Path, sizes_mib: Sequence[int], runs: int, profile: bool, entries: Sequence[int],
        engines: Sequence[str],
    ) -> None:  # fmt: skip
        self.directory, self.sizes_mib, self.runs, self.profile = directory, sorted(sizes_mib), runs, profile
        self.entries, self.engines = entries, engines
        self._counts: dict[Path, int] = {}

    def log(self, mib: int, name: str = "0") -> tuple[str, int]:
        """A log of that size, alone in the directory of a bookie, and how many entries it has; made once."""
        path = self.directory / f"{mib}-mib" / "current" / f"{name}.log"
        if path not in self._counts:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._counts[path] = write_entry_log(path, mib << 20, lambda _: PAYLOAD_SIZE_BYTES)
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
        command = [*BKCTL, "pipeline", "inventory", "--by", "ledger", "-o", "ndjson", f"bookie={directory}"]
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

    def plan(self) -> None:
        """`integrity` over made facts of several sizes, on this machine and on a Spark of two executors."""
        for entries in self.entries:
            directory = self.directory / "plan"
            facts, metadata, lost = make_facts(directory, entries)
            for master in (MASTERS[engine] for engine in self.engines):
                task = {"master": master, "facts": facts, "metadata": metadata, "lost": lost, "replicas": 3 * entries,
                        "directory": str(directory)}  # fmt: skip
                done = subprocess.run(
                    [sys.executable, __file__, "--measure-plan", json.dumps(task)], stdout=subprocess.PIPE, text=True,
                    check=False,
                )  # fmt: skip
                if done.returncode:
                    sys.exit(f"The measurement failed with exit code {done.returncode}")
                found = json.loads(done.stdout.splitlines()[-1])
                engine = "Spark" if master else "this machine"
                print(f"\nintegrity, 3 x {entries:,} entries, {engine}: {found['seconds']:.1f} s")
                if master:
                    print(
                        f"  {found['jobs']} jobs, {found['tasks']} tasks, {found['shuffled'] / 1e6:,.1f} MB shuffled "
                        f"({found['shuffled'] / entries / 3:.2f} bytes a replica); of the {found['of']} tasks that "
                        f"read rows in the longest stage, one has {found['skew']:.2f} times the mean"
                    )
                shown = (f"{kind} {size / 1e6:,.0f} MB" for kind, size in sorted(found["peaks"].items()))
                print(f"  peaks: {', '.join(shown)}", flush=True)
            shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--engines", choices=list(MASTERS), nargs="+", default=list(MASTERS), help="of plan")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--measure-plan", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure_plan:
        print(json.dumps(measure_plan(json.loads(given.measure_plan))))
        return
    if given.measure:
        print(json.dumps(measure(json.loads(given.measure))))
        return
    with tempfile.TemporaryDirectory(prefix="bkctl-spark-") as directory:
        bench = Bench(Path(directory), given.mib, given.runs, given.profile, given.entries, given.engines)
        for part in given.only:
            getattr(bench, part)()


if __name__ == "__main__":
    main()
