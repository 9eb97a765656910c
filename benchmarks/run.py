"""Measure bkctl against Apache BookKeeper's own tools, both in the same run, and print the ratios.

    python benchmarks/run.py                     everything
    python benchmarks/run.py startup adds-v2     what is named
    python benchmarks/run.py --seconds 120 adds-v2 adds-v3
    python benchmarks/run.py --storage db --runs 3 --profile adds-v2
    python benchmarks/run.py --storage db --protocol v2 --size 100 1024 -- reads
    python benchmarks/run.py --mib 64 1024 -- files

Needs Java 17 and Maven, like the tests, whose servers it uses. A ratio above 1 means that bkctl is faster. The
machine's noise is part of every figure: compare ratios, not seconds. `--profile` needs py-spy (`pip install py-spy`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT / "tests"))

import client_loops  # noqa: E402
import compaction as compaction_cases  # noqa: E402
import reads as read_cases  # noqa: E402
from files import compare as compare_files  # noqa: E402
from measuring import BKCTL, SHELL, Run, measured, processor_seconds  # noqa: E402
from support import servers  # noqa: E402
from support.own_cluster import OwnCluster, start_all, stop_all  # noqa: E402

ENTRY_SIZE_BYTES = 1024
STORAGES = {"sorted": servers.SORTED, "interleaved": servers.INTERLEAVED, "db": servers.DB}
#: Functions that a profile names of each thread.
PROFILE_LINES = 12


class Figure(NamedTuple):
    """One comparison. `ours` and `peer` are seconds, or a rate a second where `rate`."""

    what: str
    ours: float
    peer: float
    peer_name: str
    rate: bool = False

    def line(self) -> str:
        ratio = self.ours / self.peer if self.rate else self.peer / self.ours
        shown = [f"{value:,.0f}/s" if self.rate else f"{value:.3f} s" for value in (self.ours, self.peer)]
        return f"{self.what:<58} {shown[0]:>12}  {shown[1]:>12}  {ratio:>6.2f}x  {self.peer_name}"


def timed(command: Sequence[str], runs: int = 5) -> float:
    """The median wall-clock seconds of a command, its output thrown away."""
    return statistics.median(measured(command).seconds for _ in range(runs))


class Bench:
    """The servers that the benchmarks share, started when first used."""

    def __init__(
        self,
        directory: Path,
        seconds: float,
        storage: str = "sorted",
        runs: int = 1,
        profile: bool = False,
        protocols: Sequence[str] = ("v2", "v3"),
        sizes: Sequence[int] = (ENTRY_SIZE_BYTES,),
        part: str = "",
    ) -> None:
        self.directory = directory
        self.seconds = seconds
        self.storage = storage
        self.runs = runs
        self.profiler = find_profiler() if profile else None
        #: The programs that measure the reads.
        self.protocols, self.sizes, self.part = protocols, sizes, part
        self.java = servers.Java()
        self._zookeeper: servers.ZooKeeperServer | None = None
        self._apache: dict[int, servers.ApacheCluster] = {}

    @property
    def zookeeper(self) -> servers.ZooKeeperServer:
        if self._zookeeper is None:
            self._zookeeper = servers.ZooKeeperServer(self.java, self.directory / "zookeeper")
            self._zookeeper.start()
        return self._zookeeper

    @contextlib.contextmanager
    def apache(
        self, count: int, storage: str = "sorted", settings: Mapping[str, object] | None = None
    ) -> Iterator[servers.ApacheCluster]:
        """Apache bookies of one storage class, with its default sizes and a fully optimising JVM."""
        cluster = servers.ApacheCluster(
            self.java, self.zookeeper, self.directory / f"apache-{time.time_ns()}", root=self.zookeeper.new_root(),
            storages=(STORAGES[storage],) * count, settings=server_settings(settings),
        )  # fmt: skip
        with full_speed_java(heap_mb=1024):
            cluster.start()
        with removed_afterwards(cluster.directory), self.logs_of(cluster.bookies):
            try:
                yield cluster
            finally:
                cluster.stop()

    @contextlib.contextmanager
    def ours(
        self, count: int, storage: str = "sorted", settings: Mapping[str, object] | None = None
    ) -> Iterator[OwnCluster]:
        """Our bookies as processes on the same ZooKeeper."""
        root = self.zookeeper.new_root()
        uri = self.zookeeper.metadata_uri(root)
        directory = self.directory / f"ours-{time.time_ns()}"
        servers.format_cluster(self.java, uri, directory)
        cluster = OwnCluster(uri, directory, (STORAGES[storage],) * count, server_settings(settings))
        with removed_afterwards(directory), self.logs_of(cluster.bookies):
            try:
                start_all(cluster.bookies)
                yield cluster
                stop_all(cluster.bookies)
            finally:
                cluster.kill()

    @contextlib.contextmanager
    def logs_of(self, bookies: Sequence[servers.Server]) -> Iterator[None]:
        """Print what the bookies said at last, and the space that was left, when a benchmark on them fails."""
        try:
            yield
        except BaseException:
            free = shutil.disk_usage(self.directory).free >> 20
            print(f"\n{free:,} MiB are free in {self.directory}", file=sys.stderr)
            for bookie in bookies:
                print(f"\n--- {bookie.name}, running: {bookie.running}\n{bookie.log_tail()}", file=sys.stderr)
            raise

    def java_rate(self, *arguments: object) -> dict[str, Any]:
        """Run Bench.java with a fully optimising JVM; what it prints, and its processor time (`spent`)."""
        before = os.times()
        with full_speed_java():
            done = self.java.run("Bench", *arguments, heap_mb=1024, timeout_s=1200)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        return {**json.loads(done.stdout.splitlines()[-1]), "spent": spent}

    def close(self) -> None:
        if self._zookeeper is not None:
            self._zookeeper.kill()


@contextlib.contextmanager
def removed_afterwards(directory: Path) -> Iterator[None]:
    """A long run leaves tens of GiB, which are gone from the disk, and from its queue, when the next one starts."""
    os.sync()
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.sync()


def server_settings(changes: Mapping[str, object] | None = None) -> dict[str, object]:
    """Both kinds of bookie run with these: Apache's own defaults where the tests' small ones would throttle.

    Garbage collection looks around several times a run, at ledgers that are all there.
    """
    return {
        "journalMaxSizeMB": 2048,
        "journalMaxBackups": 1,  # six journals of 2 GiB on each of six bookies fill a disk up to diskUsageThreshold
        "journalPreAllocSizeMB": 16,
        "logSizeLimit": 1024 * 1024 * 1024,
        "flushInterval": 10000,
        "skipListSizeLimit": 64 * 1024 * 1024,
        "numReadWorkerThreads": 8,
        "serverNumIOThreads": 4,
        "allocatorPoolingPolicy": "PooledDirect",
        "gcWaitTime": 15_000,
        "dbStorage_writeCacheMaxSizeMb": 256,
        "dbStorage_readAheadCacheMaxSizeMb": 256,
        "dbStorage_rocksDB_blockCacheSize": 64 * 1024 * 1024,
        "dbStorage_rocksDB_writeBufferSizeMB": 64,
        **(changes or {}),
    }


@contextlib.contextmanager
def full_speed_java(heap_mb: int = 1024) -> Iterator[None]:
    """Java as a server runs it. The tests cap its compiler for quick starts, which would flatter us."""
    before = servers.JVM_OPTIONS, servers.BOOKIE_OPTIONS
    kept = tuple(option for option in before[0] if option not in ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"))
    servers.JVM_OPTIONS = (*kept, f"-Xmx{heap_mb}m")  # type: ignore[misc]
    servers.BOOKIE_OPTIONS = ("-XX:MaxDirectMemorySize=2g",)  # type: ignore[misc]
    try:
        yield
    finally:
        servers.JVM_OPTIONS, servers.BOOKIE_OPTIONS = before  # type: ignore[misc]


def ledger_of(bench: Bench, uri: str, entries: int) -> str:
    """A closed ledger of 1 KiB entries that Java's client wrote; its id."""
    return str(bench.java_rate(uri, "v3", "add", entries, ENTRY_SIZE_BYTES, 1, 1, 1)["ledgerId"])


# --- what is measured -----------------------------------------------------------------------------------------------


def startup(bench: Bench) -> Iterator[Figure]:
    """Help, an offline command, one metadata read; against Python's own start and the Java shell."""
    python = timed([sys.executable, "-c", "pass"], 9)
    conf = bench.directory / "shell.conf"
    servers.write_conf(conf, {"journalDirectory": bench.directory, "ledgerDirectories": bench.directory})
    shell = bench.java.command(SHELL, "-conf", conf)
    shell_help = timed([*shell, "help"], 3)
    yield Figure("bkctl --help", timed([*BKCTL, "--help"], 9), python, "python -c pass")
    yield Figure("bkctl --help", timed([*BKCTL, "--help"], 9), shell_help, "shell help")
    yield Figure("bkctl journal read --help", timed([*BKCTL, "journal", "read", "--help"], 9), shell_help, "shell help")
    with bench.apache(1) as cluster:
        ledger = ledger_of(bench, cluster.metadata_uri, 100)
        bookie = cluster.bookies[0]
        journal = sorted((bookie.journal_dir / "current").glob("*.txn"))[0]
        shell = bench.java.command(SHELL, "-conf", bookie.conf)
        for output in ("ndjson", "table"):
            yield Figure(
                f"journal read FILE -o {output} (100 entries)",
                timed([*BKCTL, "journal", "read", str(journal), "-o", output], 9),
                timed([*shell, "readjournal", str(journal)], 3), "shell readjournal",
            )  # fmt: skip
        yield Figure(
            "ledger show (one metadata read)",
            timed([*BKCTL, "-u", cluster.metadata_uri, "ledger", "show", ledger], 9),
            timed([*shell, "ledgermetadata", "-l", ledger], 3), "shell ledgermetadata",
        )  # fmt: skip


def ledger_read(bench: Bench) -> Iterator[Figure]:
    """`ledger read` of 10,000 entries of 1 KiB against the shell's `readledger`."""
    with bench.apache(1) as cluster:
        ledger = ledger_of(bench, cluster.metadata_uri, 10_000)
        shell = bench.java.command(SHELL, "-conf", cluster.bookies[0].conf)
        peer = timed([*shell, "readledger", "-l", ledger, "-m"], 3)
        for protocol in ("v3", "v2"):
            command = [*BKCTL, "-u", cluster.metadata_uri, "ledger", "read", ledger, "-o", "ndjson", "--body"]
            ours = timed([*command, "--protocol", protocol])
            yield Figure(f"ledger read --protocol {protocol} (10,000 × 1 KiB)", ours, peer, "shell readledger")


def client(bench: Bench) -> Iterator[Figure | str]:
    """The Python client as programs use it against Java's with the same window, on the same Apache bookie."""
    with bench.apache(1) as cluster:
        for protocol in bench.protocols:
            for size in client_loops.SIZES_BYTES if bench.sizes == [ENTRY_SIZE_BYTES] else bench.sizes:
                yield from (
                    Figure(*figure, rate=True) if isinstance(figure, tuple) else figure
                    for figure in client_loops.compare(bench.java_rate, cluster.metadata_uri, protocol, size)
                )


def commands(bench: Bench) -> Iterator[Figure | str]:
    """`ledger write` and `ledger read` against loops of Java's client, on three Apache bookies, E3 Wq2 Aq2.

    Ours count from the start of the command to its end; Java's loop counts neither its JVM's start nor the creation of
    the client, and does not print what it reads.
    """
    entries = 200_000
    data = bench.directory / "entries"
    data.write_bytes(os.urandom(1 << 20) * (entries * ENTRY_SIZE_BYTES >> 20))
    count = data.stat().st_size // ENTRY_SIZE_BYTES
    with bench.apache(3) as cluster:
        uri = cluster.metadata_uri
        for protocol in ("v3", "v2"):
            words = f"-u {uri} ledger write --record-size {ENTRY_SIZE_BYTES} -o id".split()
            write = [*BKCTL, *words, str(data)]
            # Once to warm the bookies up; then in turn, and the median of all runs counts.
            bench.java_rate(uri, protocol, "add", count, ENTRY_SIZE_BYTES, 3, 2, 2)
            java, ours = [], []
            for _ in range(bench.runs):
                java.append(bench.java_rate(uri, protocol, "add", count, ENTRY_SIZE_BYTES, 3, 2, 2))
                ours.append(measured([*write, "--protocol", protocol]))
            yield from whole_command(f"ledger write, {protocol}", count, ours, java)
            ledger = java[-1]["ledgerId"]
            read = [*BKCTL, "-u", uri, "ledger", "read", ledger, "-o", "ndjson", "--protocol", protocol]
            java, ours = [], []
            for _ in range(bench.runs):
                java.append(bench.java_rate(uri, protocol, "read", ledger))
                ours.append(measured(read))
            yield from whole_command(f"ledger read -o ndjson, {protocol}", count, ours, java)
    data.unlink()


def whole_command(
    what: str, count: int, ours: Sequence[Run], java: Sequence[Mapping[str, Any]]
) -> Iterator[Figure | str]:
    """Compare the medians of a command's runs and a Java loop's, and say the processor time an entry of both."""
    rate = count / statistics.median(run.seconds for run in ours)
    peer = statistics.median(done["perSecond"] for done in java)
    yield Figure(f"{what}, {count:,} × 1 KiB", rate, peer, "Java client's loop", rate=True)
    spent = statistics.median(run.cpu_s for run in ours), statistics.median(done["spent"] for done in java)
    yield "  processor time an entry, start included: " + ", ".join(
        f"{name} {seconds / count * 1e6:.1f} µs" for name, seconds in zip(("ours", "Java's"), spent, strict=True)
    )


def adds(bench: Bench, protocol: str) -> Iterator[Figure | str]:
    """Three of our bookies against three of Apache's under the same Java client; journal synced, log, index on."""
    amount = f"{int(bench.seconds)}s"
    arguments = (protocol, "add", amount, ENTRY_SIZE_BYTES, 3, 2, 2)
    for _ in range(bench.runs):
        with bench.apache(3, bench.storage) as theirs:
            before = seconds_of(theirs.bookies)
            peer = bench.java_rate(theirs.metadata_uri, *arguments)
            peer_seconds = seconds_of(theirs.bookies) - before
        with bench.ours(3, bench.storage) as cluster, profile(bench, cluster.bookies[0]) as lines:
            before = seconds_of(cluster.bookies)
            ours = bench.java_rate(cluster.metadata_uri, *arguments)
            our_seconds = seconds_of(cluster.bookies) - before
        what = f"Java client adds to 3 bookies, {protocol}, E3 Wq2 Aq2, {amount}, {bench.storage}"
        yield Figure(what, ours["perSecond"], peer["perSecond"], "Apache bookies", rate=True)
        spent = [
            f"{name} {seconds:.1f} s, {seconds / done['entries'] * 1e6:.0f} µs an entry"
            for name, seconds, done in (("ours", our_seconds, ours), ("Apache's", peer_seconds, peer))
        ]
        yield f"  processor time of the 3 bookies: {'; '.join(spent)}"
        yield from lines


def reads(bench: Bench) -> Iterator[Figure | str]:
    """Every kind of read by a Java client from three of our bookies against three of Apache's."""
    for protocol in bench.protocols:
        for size in bench.sizes:
            with full_speed_java(), read_cases.both_sides(bench, bench.storage, protocol) as (ours, theirs):
                yield f"Java client reads from 3 bookies, {protocol}, E2 Wq2 Aq2, {size:,} bytes, {bench.storage}"
                for what, own, peer in read_cases.compare(ours, theirs, protocol, size, bench.seconds, bench.part):
                    yield Figure(f"  {what}", own.rate, peer.rate, "Apache bookies", rate=True)
                    yield f"    {own.line}"
                    yield f"    {peer.line}"


def compaction(bench: Bench) -> Iterator[Figure | str]:
    """The same adds by a Java client without compaction and with it; no ratio, since both sides get the same rate."""
    for protocol in bench.protocols:
        for size in bench.sizes:
            settings = compaction_cases.SETTINGS
            with full_speed_java(), read_cases.both_sides(bench, bench.storage, protocol, settings) as (ours, theirs):
                yield f"Java client adds to 3 bookies, {protocol}, E2 Wq2 Aq2, {size:,} bytes, {bench.storage}"
                yield from compaction_cases.compare(ours, theirs, size, bench.seconds)


def seconds_of(bookies: Sequence[servers.Server]) -> float:
    """User and system time of these processes so far."""
    return sum(processor_seconds(Path(f"/proc/{bookie.pid}")) for bookie in bookies)


# --- what bounds ours -----------------------------------------------------------------------------------------------


def find_profiler() -> str:
    """The path of py-spy, which looks at a running process from outside."""
    found = shutil.which("py-spy", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    if found is None:
        raise SystemExit("--profile needs py-spy: pip install py-spy")
    return found


@contextlib.contextmanager
def profile(bench: Bench, bookie: servers.Server) -> Iterator[list[str]]:
    """Sample one bookie meanwhile; the list has the lines to print afterwards, none where no profile is asked for."""
    lines: list[str] = []
    if bench.profiler is None:
        yield lines
        return
    raw = bench.directory / "profile.raw"
    command = [bench.profiler, "record", "--threads", "--nonblocking", "--function", "--format", "raw", "--rate", "100"]
    sampler = subprocess.Popen(
        [*command, "--duration", "100000", "--output", str(raw), "--pid", str(bookie.pid)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    before = thread_seconds(bookie)
    try:
        yield lines
        spent = Counter(thread_seconds(bookie)) - Counter(before)
    finally:
        sampler.send_signal(signal.SIGINT)
        _, said = sampler.communicate(timeout=60)
    if not raw.exists():
        raise SystemExit(f"py-spy: {said}")
    lines += profile_lines(raw.read_text(), spent)


def thread_seconds(bookie: servers.Server) -> dict[int, float]:
    """User and system time of each thread of a process so far, by its native id."""
    return {int(task.name): processor_seconds(task) for task in Path(f"/proc/{bookie.pid}/task").iterdir()}


def profile_lines(raw: str, spent: Mapping[int, float]) -> list[str]:
    """For each thread its processor seconds, and the functions in which it was seen most.

    Waiting for the disk or in the event loop (`Runner.run`, which is all that uvloop does itself) is seen, too.
    """
    names: dict[int, str] = {}
    functions: dict[int, Counter[str]] = {}
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        number, _, name = thread.removeprefix("thread (").partition("): ")
        names[int(number)] = name
        functions.setdefault(int(number), Counter())[frames[-1] if frames else "?"] += int(count)
    lines = ["  one of our bookies, processor time of its threads, and where they were seen:"]
    for number, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        if seconds < sum(spent.values()) / 50:
            continue
        lines.append(f"    {seconds:8.2f} s  {names.get(number, 'a thread without Python')}")
        seen = functions.get(number, Counter())
        for function, count in seen.most_common(PROFILE_LINES):
            lines.append(f"                {count / seen.total():6.1%}  {function}")
    return lines


BENCHMARKS: dict[str, Callable[[Bench], Iterator[Figure | str]]] = {
    "startup": startup,
    "ledger-read": ledger_read,
    "client": client,
    "commands": commands,
    "adds-v2": lambda bench: adds(bench, "v2"),
    "adds-v3": lambda bench: adds(bench, "v3"),
    "reads": reads,
    "compaction": compaction,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(("files", *BENCHMARKS)))
    parser.add_argument("--seconds", type=float, default=30, help="how long each run of adds or reads takes (30)")
    parser.add_argument("--storage", choices=STORAGES, default="sorted", help="of the bookies, on both sides (sorted)")
    parser.add_argument("--protocol", choices=("v2", "v3"), nargs="+", default=["v2", "v3"], help="of the reads (both)")
    parser.add_argument(
        "--size", type=int, nargs="+", default=[ENTRY_SIZE_BYTES], help="bytes of the entries read (1024)"
    )
    parser.add_argument("--cases", default="", metavar="PART", help="only the reads with PART in their names: tailed")
    parser.add_argument("--runs", type=int, default=1, help="how often adds and commands run (1)")
    parser.add_argument("--profile", action="store_true", help="show what one of our bookies does during the adds")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024], help="sizes of the files (64 1024)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - BENCHMARKS.keys() - {"files"}
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are files, {', '.join(BENCHMARKS)}")
    os.environ.setdefault("BKCTL_TEST_REQUIRE", "all")
    with tempfile.TemporaryDirectory(prefix="bkctl-bench-") as directory:
        bench = Bench(
            Path(directory), arguments.seconds, arguments.storage, arguments.runs, arguments.profile,
            arguments.protocol, arguments.size, arguments.cases,
        )  # fmt: skip
        try:
            if "files" in arguments.names or not arguments.names:
                for line in compare_files(bench, arguments.mib, full_speed_java):
                    print(line, flush=True)
            names = [name for name in arguments.names or BENCHMARKS if name != "files"]
            if names:
                print(f"{'':<58} {'bkctl':>12}  {'peer':>12}  {'ratio':>7}  peer", flush=True)
            for name in names:
                for figure in BENCHMARKS[name](bench):
                    print(figure if isinstance(figure, str) else figure.line(), flush=True)
        finally:
            bench.close()


if __name__ == "__main__":
    main()
