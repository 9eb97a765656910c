"""Apache's servers for the tests: ZooKeeper, HBase, BookKeeper and Java programs, as child processes on loopback ports.

Every process has its own process group and is ended by its id: by `stop()` and `kill()`, when the interpreter exits,
and by a small reaper process when the test run itself is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

import pytest
from support.waiting import LIMIT_S

from bkctl.metadata.uri import parse_uri

if TYPE_CHECKING:
    from kazoo.client import KazooClient

REPOSITORY: Final = Path(__file__).resolve().parents[2]
JAVA_SOURCES: Final = REPOSITORY / "tests" / "java"
CACHE: Final = Path(os.environ.get("BKCTL_TEST_CACHE") or REPOSITORY / ".cache") / "java"
BOOKKEEPER_VERSION: Final = os.environ.get("BKCTL_TEST_BOOKKEEPER") or "4.18.0"
#: The one release whose etcd driver is published.
ETCD_DRIVER_VERSION: Final = "4.17.3"
HBASE_VERSION: Final = "2.6.4-hadoop3"
PULSAR_VERSION: Final = "4.0.7"

#: Cheap to start, small, and open where BookKeeper and Netty reflect.
JVM_OPTIONS: Final = (
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Xshare:auto",
    "-XX:-UsePerfData",
    "--add-opens=java.base/java.io=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-opens=java.base/java.util.zip=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dlog4j2.disableJmx=true",
)
BOOKIE_OPTIONS: Final = ("-XX:MaxDirectMemorySize=256m",)
#: The wait of Apache's clients for a bookie's answer; the default is 5 s, after which they choose another bookie.
PATIENCE: Final = {"addEntryTimeoutSec": 120, "readEntryTimeoutSec": 120}

SORTED: Final = "org.apache.bookkeeper.bookie.SortedLedgerStorage"
INTERLEAVED: Final = "org.apache.bookkeeper.bookie.InterleavedLedgerStorage"
DB: Final = "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage"
#: Parameters of tests: the bookies of `apache_cluster` by number. An InterleavedLedgerStorage has the index of a sorted
#: one and the journal of all, so with it they are among the long tests.
BOOKIE_NUMBERS: Final = [
    pytest.param(0, id="sorted"), pytest.param(1, id="interleaved", marks=pytest.mark.long), pytest.param(2, id="db"),
]  # fmt: skip


def require(what: str, reason: str, *, module: bool = False) -> NoReturn:
    """Skip the test because `what` cannot be had; fail it where BKCTL_TEST_REQUIRE is `all` or names `what`.

    With `module` that is for the whole module that imports the caller.
    """
    required = {name.strip() for name in os.environ.get("BKCTL_TEST_REQUIRE", "").split(",")}
    if required & {"all", what}:
        pytest.fail(f"BKCTL_TEST_REQUIRE asks for {what}: {reason}", pytrace=False)
    pytest.skip(f"{what}: {reason}", allow_module_level=module)


def ports() -> Iterator[int]:
    """Ports below those that the system gives to connections, each once; 0 for ever where there are too few.

    The workers of a parallel run have a range each: what one keeps for a server that is down, no other may take.
    """
    try:
        end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        end = 0
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    size = (end - 15_000) // workers
    if size < 2_500:
        yield from itertools.repeat(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % workers
    first = os.getpid() * 101 % size  # Another test run may be at work.
    for number in itertools.count(first):
        yield 15_000 + worker * size + number % size


_ports = ports()


def free_port() -> int:
    """A TCP port on 127.0.0.1 without a listener, and not handed out by chance: for a server that may come and go.

    One that the system chose it may choose again while no server is there, for anybody's listener or connection.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", next(_ports)))
            port: int = probe.getsockname()[1]
            return port


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = LIMIT_S) -> None:
    """Poll `condition` until it is true. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.05)


# --- processes ---------------------------------------------------------------------------------------------------

#: In the environment of all processes that this process starts, and of their own: bookies of `bkctl local up` too.
_MARK = f"{os.getpid()}.{time.time_ns()}"
os.environ["TEST_RUN_OF_BKCTL"] = _MARK
#: The environment of Java: a command in this process changes os.environ while another thread starts Java.
_ENVIRONMENT: Final = dict(os.environ)

_REAPER = """
import os, signal, sys, time
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for group in alive:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
mark = b"TEST_RUN_OF_BKCTL=" + sys.argv[1].encode()
for _ in range(100 if os.path.isdir("/proc/self") else 0):
    found = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment:
                if int(pid) != os.getpid() and mark in environment.read().split(bytes(1)):
                    os.kill(int(pid), signal.SIGKILL)
                    found = True
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.1)
"""


class _Reaper:
    """A process that outlives us and kills the processes we left, if we are killed before we could."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", _REAPER, _MARK], stdin=subprocess.PIPE, text=True, start_new_session=True
        )

    def tell(self, sign: str, group: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{sign}{group}\n")
            self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


_reaper = _Reaper()
_servers: list[Server] = []


@functools.cache
def _java_scratch() -> str:
    """Return the directory where JVMs unpack libraries: killed JVMs leave them."""
    return tempfile.mkdtemp(prefix="bkctl-java-")


@atexit.register
def _stop_all() -> None:
    for server in reversed(_servers):
        server.kill()
    if _java_scratch.cache_info().currsize:
        shutil.rmtree(_java_scratch(), ignore_errors=True)
    _reaper.close()


def running_servers() -> list[Server]:
    """The servers that are up now, in the order of their start."""
    return [server for server in _servers if server.running]


class Server:
    """One child process with a log file; may be started, stopped and killed again and again.

    `command` is called at each start and gives the argument list.
    """

    def __init__(self, name: str, log: Path, command: Callable[[], list[str]], ready: Callable[[], bool]) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._ready = ready
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def launch(self) -> None:
        """Start the process without waiting until it serves."""
        assert not self.running, f"{self.name} is up already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        _reaper.tell("+", self.process.pid)
        if self not in _servers:
            _servers.append(self)

    def wait_ready(self) -> None:
        """Wait until it serves. Raises RuntimeError with the end of its log if it ended or is not ready in time."""

        def ready() -> bool:
            if not self.running:
                raise RuntimeError(f"{self.name} ended:\n{self.log_tail()}")
            return self._ready()

        try:
            wait_for(ready, f"{self.name} ready")
        except TimeoutError as error:
            raise RuntimeError(f"{error}:\n{self.log_tail()}") from error

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone; nothing if it is down."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; nothing if it is down."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        _reaper.tell("-", self.process.pid)

    def log_tail(self, since: int = 0, size_max: int = 8000) -> str:
        """The end of the log, from byte `since` on."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(since, end - size_max))
            return log.read().decode(errors="replace")


# --- Java --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between test runs that share one cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def fetch_jars(version: str = BOOKKEEPER_VERSION) -> Path:
    """The directory that holds Apache BookKeeper `version` and all it needs; fetched by Maven if it is not there.

    Calls `require` (skips or fails) if there is no Maven, or it cannot fetch.
    """
    return _fetch(version, f"BookKeeper {version}", "pom.xml", f"-Dbookkeeper.version={version}")


def fetch_etcd_driver() -> Path:
    """The directory that holds Apache's etcd driver, of BookKeeper ETCD_DRIVER_VERSION, and jetcd. As `fetch_jars`."""
    name = f"etcd-{ETCD_DRIVER_VERSION}"
    return _fetch(name, "Apache's etcd driver", "etcd-pom.xml", "dependency:copy")


def fetch_prometheus_provider(version: str = BOOKKEEPER_VERSION) -> Path:
    """The directory that holds BookKeeper's metrics for Prometheus and what they need. As `fetch_jars`."""
    what = f"the metrics provider of BookKeeper {version}"
    return _fetch(f"prometheus-{version}", what, "prometheus-pom.xml", f"-Dbookkeeper.version={version}")


def fetch_hbase() -> Path:
    """The directory that holds Apache HBase HBASE_VERSION and all it needs. As `fetch_jars`."""
    return _fetch(f"hbase-{HBASE_VERSION}", "Apache HBase", "hbase-pom.xml", f"-Dhbase.version={HBASE_VERSION}")


def fetch_pulsar() -> Path:
    """The directory that holds a Pulsar broker PULSAR_VERSION and all it needs. As `fetch_jars`."""
    return _fetch(f"pulsar-{PULSAR_VERSION}", "Apache Pulsar", "pulsar-pom.xml", f"-Dpulsar.version={PULSAR_VERSION}")


def fetch_s3a(hadoop_version: str) -> Path:
    """The directory that holds Hadoop's file system for S3, and what Spark lacks for it. As `fetch_jars`."""
    name = f"s3a-{hadoop_version}"
    return _fetch(name, "Hadoop's file system for S3", "s3a-pom.xml", f"-Dhadoop.version={hadoop_version}")


def _fetch(name: str, what: str, pom: str, *arguments: str) -> Path:
    jars = CACHE / name
    with locked(CACHE / f"{name}.lock"):
        if jars.is_dir():
            return jars
        maven = shutil.which("mvn")
        if maven is None:
            require("java", f"mvn is not installed, and {jars} does not exist")
        partial = CACHE / f"{name}.partial"
        failure = ""
        for attempt in range(5):
            shutil.rmtree(partial, ignore_errors=True)
            done = subprocess.run(
                [maven, "-q", "-B", "-ntp", "-f", str(JAVA_SOURCES / pom), "dependency:copy-dependencies",
                 "-DincludeScope=runtime", f"-DoutputDirectory={partial}", *arguments],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                partial.rename(jars)
                return jars
            failure = done.stdout.strip()[-2000:]
            time.sleep(5 * attempt)
        require("java", f"Maven cannot fetch {what}: {failure}")


class JavaFailed(AssertionError):
    """A Java program ended with another exit code than 0."""


def _java_path() -> str | None:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home, "bin")) if home else None


@functools.cache
def _java_version(java: str) -> str:
    return subprocess.run([java, "-version"], capture_output=True, text=True).stderr


def find_java() -> str:
    """Return the program `java`, 17 or newer. Without one, or with BKCTL_TEST_WITHOUT=java, `require` decides."""
    if "java" in os.environ.get("BKCTL_TEST_WITHOUT", "").split(","):
        require("java", "BKCTL_TEST_WITHOUT leaves it out")
    java = shutil.which("java", path=_java_path())
    if java is None:
        require("java", "no Java (17 or newer) is installed")
    found = re.search(r'version "(\d+)', _java_version(java))
    if found is None or int(found[1]) < 17:
        require("java", f"{java} is not Java 17 or newer")
    return java


def archive_of(java: str, jars: Path) -> Path:
    """The JVM's archive of the classes of a directory's jars: of this Java and of these very files, else refused."""
    files = [(jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in sorted(jars.glob("*.jar"))]
    of = f"{_java_version(java)} {jars} {files}"
    return CACHE / "archives" / f"{jars.name}-{hashlib.sha256(of.encode()).hexdigest()[:16]}.jsa"


def sharing(archive: Path) -> tuple[str, ...]:
    """The options of a JVM that takes classes from an archive; none if it does not exist."""
    # The JVM would complain on stdout, where answers are.
    return (f"-XX:SharedArchiveFile={archive}", "-Xlog:disable") if archive.exists() else ()


@contextlib.contextmanager
def _place_of(archive: Path) -> Iterator[Path | None]:
    """Provide a scratch directory to make an archive in, which replaces older ones; None if it exists."""
    with locked(CACHE / "archives.lock"):
        if archive.exists():
            yield None
            return
        archive.parent.mkdir(exist_ok=True)
        for old in archive.parent.glob(f"{archive.name.rpartition('-')[0]}-*"):
            old.unlink()
        with tempfile.TemporaryDirectory(dir=archive.parent) as scratch:
            yield Path(scratch)


def _dump_archive(java: str, names: Path, archive: Path, class_path: str) -> None:
    """Write an archive of the classes that the file `names` has, if Java can."""
    partial = archive.with_suffix(".partial")
    subprocess.run(
        [java, "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedClassListFile={names}",
         f"-XX:SharedArchiveFile={partial}", "-cp", class_path],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    if partial.exists():
        partial.rename(archive)


class Java:
    """Java with Apache BookKeeper of one version on its class path."""

    def __init__(self, version: str = BOOKKEEPER_VERSION) -> None:
        java = find_java()
        javac = shutil.which("javac", path=_java_path())
        if javac is None:
            require("java", "no Java development kit (java and javac, 17 or newer) is installed")
        self.java, self.javac = java, javac
        self.version = version
        self.jars = fetch_jars(version)
        self.class_path = f"{self.jars}/*"
        self.options: tuple[str, ...] = ()
        self.sources = JAVA_SOURCES
        self._programs: Path | None = None
        self._shared: tuple[str, ...] | None = None

    def programs(self) -> Path:
        """The jar of the compiled programs of tests/java; compiled anew when a source changed."""
        if self._programs is None:
            sources = sorted(self.sources.glob("*.java"))
            digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
            programs = CACHE / "programs" / f"{self.version}-{digest}.jar"
            with locked(CACHE / "programs.lock"):
                if not programs.exists():
                    programs.parent.mkdir(exist_ok=True)
                    with tempfile.TemporaryDirectory(dir=programs.parent) as scratch:
                        self._compile(sources, Path(scratch))
                        shutil.make_archive(f"{programs}.partial", "zip", scratch)
                    Path(f"{programs}.partial.zip").rename(programs)
            self._programs = programs
        return self._programs

    def _compile(self, sources: Iterable[Path], directory: Path) -> None:
        done = subprocess.run(
            [self.javac, "-nowarn", "-proc:none", "-cp", f"{self.jars}/*", "-d", str(directory), *map(str, sources)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise JavaFailed(done.stderr)

    @functools.cached_property
    def _libraries(self) -> Path:
        """The directory of RocksDB's library, which each JVM would unpack for itself else."""
        libraries = CACHE / "libraries" / self.version
        with locked(CACHE / "libraries.lock"):
            if not libraries.is_dir():
                libraries.parent.mkdir(exist_ok=True)
                with tempfile.TemporaryDirectory(dir=libraries.parent) as scratch:
                    for jar in self.jars.glob("rocksdbjni-*.jar"):
                        with zipfile.ZipFile(jar) as packed:
                            names = [name for name in packed.namelist() if re.search(r"linux(64|-aarch64)\.so$", name)]
                            packed.extractall(f"{scratch}/unpacked", names)
                    Path(scratch, "unpacked").rename(libraries)
        return libraries

    def _archive(self) -> Path:
        return archive_of(self.java, self.jars)

    def share_classes(self) -> None:
        """Have JVMs start in about half the time: from an archive of the classes that servers and clients load.

        Made once for each Java and release, from a short life of a small cluster; the list of classes from that life
        serves other releases, too, whose JVMs skip names that they lack. Without an archive all works as well.
        """
        archive = self._archive()
        with _place_of(archive) as directory:
            if directory is None:
                return
            names = archive.with_suffix(".classes")
            if others := sorted(archive.parent.glob("*.classes")):
                names = others[-1]
            else:
                self._shared = (f"-XX:DumpLoadedClassList={directory}/%p.classes",)
                self._live_shortly(directory)
                lists = [each.read_text().splitlines() for each in sorted(directory.glob("*.classes"))]
                names.write_text("\n".join(dict.fromkeys(itertools.chain(*lists))) + "\n")
            _dump_archive(self.java, names, archive, self.class_path)
            self._shared = None

    def _live_shortly(self, directory: Path) -> None:
        """Run what loads most of the classes that tests need: ZooKeeper, a bookie, a client, the shell."""
        zookeeper = ZooKeeperServer(self, directory / "zookeeper")
        cluster = ApacheCluster(self, zookeeper, directory)
        try:
            zookeeper.start()
            cluster.start()
            write_ledgers(self, cluster.metadata_uri, "v3", small=True)
            self.shell(cluster.bookies[0], "listbookies", "-rw")
        finally:
            for server in (*cluster.bookies, zookeeper):
                server.stop()

    def _sharing(self) -> tuple[str, ...]:
        if self._shared is None:
            self._shared = sharing(self._archive())
        return self._shared

    def command(
        self, main_class: str, *arguments: object, log4j: str = "shell", heap_mb: int = 256, own: bool = False,
        options: tuple[str, ...] = (),
    ) -> list[str]:  # fmt: skip
        """The argument list that runs `main_class`; `own` puts the programs of tests/java on the class path."""
        class_path = f"{self.class_path}:{self.programs()}" if own else self.class_path
        return [
            self.java, f"-Xmx{heap_mb}m", *JVM_OPTIONS, *self._sharing(),
            f"-Dlog4j2.configurationFile={JAVA_SOURCES}/log4j2-{log4j}.xml", f"-Djava.io.tmpdir={_java_scratch()}",
            f"-Djava.library.path={self._libraries}", *self.options, *options,
            "-cp", class_path, main_class, *map(str, arguments),
        ]  # fmt: skip

    def run(
        self, main_class: str, *arguments: object, check: bool = True, timeout_s: float = 480.0, own: bool = True,
        input: str | None = None, heap_mb: int = 256,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a program to its end. Raises JavaFailed (with its stderr) for another exit code than 0 if `check`."""
        process = subprocess.Popen(
            self.command(main_class, *arguments, own=own, heap_mb=heap_mb), start_new_session=True, text=True,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        _reaper.tell("+", process.pid)
        try:
            stdout, stderr = process.communicate(input, timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _reaper.tell("-", process.pid)
        if check and process.returncode != 0:
            shown = " ".join([main_class, *map(str, arguments)])
            raise JavaFailed(f"{shown}: exit {process.returncode}\n{stdout[-4000:]}\n{stderr[-6000:]}")
        return subprocess.CompletedProcess([main_class, *map(str, arguments)], process.returncode, stdout, stderr)

    def run_source(
        self, source: str | Path, *arguments: object, check: bool = True, timeout_s: float = 480.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of tests/java, named by its file (`WriteLedgers.java`) or class."""
        return self.run(Path(source).stem, *arguments, check=check, timeout_s=timeout_s)

    def shell(
        self, conf: Path | ApacheBookie, *arguments: object, check: bool = False, timeout_s: float = 480.0
    ) -> subprocess.CompletedProcess[str]:
        """Apache's shell (`bookkeeper shell …`): what it answers is on stdout, a message a line.

        Its exit code says little, so it is checked on request only.
        """
        path = conf.conf if isinstance(conf, ApacheBookie) else conf
        shell = "org.apache.bookkeeper.bookie.BookieShell"
        return self.run(shell, "-conf", path, *arguments, check=check, timeout_s=timeout_s, own=False)

    def start(self, main_class: str, *arguments: object, stderr: IO[str] | None = None) -> subprocess.Popen[str]:
        """Start a program of tests/java with pipes on stdin and stdout; its stderr is ours, or goes to the file given.

        The caller ends it with `end`; else it is killed when the test run ends.
        """
        process = subprocess.Popen(
            self.command(main_class, *arguments, own=True), start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        _reaper.tell("+", process.pid)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        """Wait a while for what `start` started, then kill it."""
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _reaper.tell("-", process.pid)


def _without_middle(text: str) -> str:
    """Return the beginning and the end of a long text: the cause comes first, and a stack trace last."""
    return text if len(text) <= 12_000 else f"{text[:6000]}\n...\n{text[-6000:]}"


@contextlib.contextmanager
def conversation(
    java: Java, main_class: str, *arguments: object, errors_raise: bool = False
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Run a program of tests/java that answers each line on its stdin by a JSON line: `ask("read", 5)`.

    Asking raises JavaFailed, with the program's stderr, when it ended; with `errors_raise` also for an answer `error`.
    """
    with tempfile.TemporaryFile("w+") as errors, java.start(main_class, *arguments, stderr=errors) as program:

        def ask(*words: object) -> dict[str, Any]:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(" ".join(map(str, words)) + "\n")
            program.stdin.flush()
            line = program.stdout.readline()
            if not line:
                errors.seek(0)
                raise JavaFailed(_without_middle(errors.read()))
            answer: dict[str, Any] = json.loads(line)
            if errors_raise and "error" in answer:
                raise JavaFailed(f"{words}: {answer['error']}")
            return answer

        try:
            yield ask
        finally:
            assert program.stdin is not None
            program.stdin.close()
            java.end(program)


def write_ledgers(
    java: Java, metadata_uri: str, protocol: str, salt: int = 0, stop: Callable[[str], None] | None = None,
    small: bool = False, timeout_s: float = 480.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run WriteLedgers.java: the ledgers it wrote through Apache's client, each as what a reader must find.

    With `stop` there is a ledger with an ensemble change among them: `stop(bookie_id)` ends that bookie. `small`: no
    entry above 1 KiB. Runs on one cluster need different `salt`s. Raises JavaFailed, with its stacks if it hung.
    """
    options = [name for name, wanted in (("ensemble-change", stop), ("small", small)) if wanted]
    arguments = [metadata_uri, protocol, salt, *options]
    ledgers: list[dict[str, Any]] = []
    stacks: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        java.start("WriteLedgers", *arguments, stderr=errors) as program,
    ):
        watchdog = threading.Timer(timeout_s, _dump_and_kill, [program])
        watchdog.start()
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            for line in program.stdout:
                if not line.startswith("{"):
                    stacks.append(line)
                    continue
                item = json.loads(line)
                if stop is not None and "stop" in item:
                    stop(item["stop"])
                    program.stdin.write("stopped\n")
                    program.stdin.flush()
                else:
                    ledgers.append(item)
        finally:
            watchdog.cancel()
            java.end(program)
        if program.returncode != 0:
            errors.seek(0)
            problem = f"exit {program.returncode} after {[ledger['name'] for ledger in ledgers]}"
            raise JavaFailed(f"WriteLedgers {protocol}: {problem}\n{errors.read()[-6000:]}{''.join(stacks)[-12000:]}")
    return ledgers


def _dump_and_kill(program: subprocess.Popen[str]) -> None:
    """Have a JVM that hangs print its stacks, and end it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGQUIT)
        time.sleep(2)
        os.killpg(program.pid, signal.SIGKILL)


def read_ledgers(
    java: Java, metadata_uri: str, protocol: str, ledgers: Iterable[Mapping[str, Any]], recover: bool = False
) -> list[dict[str, Any]]:
    """Run ReadLedgers.java over `ledgers` (ledgerId, digestType, password in base64 as WriteLedgers prints them)."""
    how = "recover" if recover else "no-recover"
    lines = "".join(f"{one['ledgerId']} {one['digestType']} {one['password'] or '-'} {how}\n" for one in ledgers)
    answers = java.run("ReadLedgers", metadata_uri, protocol, input=lines).stdout
    return [json.loads(line) for line in answers.splitlines()]


class JavaWithMetrics(Java):
    """Java with Apache BookKeeper and its metrics for Prometheus."""

    def __init__(self) -> None:
        super().__init__()
        self.class_path += f":{fetch_prometheus_provider()}/*"
        self._shared = ()  # An archive is for one class path.


class JavaOnEtcd(Java):
    """Java with Apache BookKeeper and Apache's etcd driver: `etcd:` URIs work in its programs, bookies and shell."""

    def __init__(self) -> None:
        super().__init__(ETCD_DRIVER_VERSION)
        self.class_path = f"{fetch_etcd_driver()}/*:{self.class_path}"
        self._shared = ()  # An archive is for one class path.
        package = "org.apache.bookkeeper.metadata.etcd"
        self.options = (
            f"-Dbookkeeper.metadata.client.drivers={package}.EtcdMetadataClientDriver",
            f"-Dbookkeeper.metadata.bookie.drivers={package}.EtcdMetadataBookieDriver",
        )


# --- ZooKeeper ---------------------------------------------------------------------------------------------------


class JavaOnPulsar(Java):
    """Java with a Pulsar broker and its BookKeeper client on the class path, and the program of tests/java/pulsar."""

    def __init__(self) -> None:
        super().__init__()
        self.jars = fetch_pulsar()
        self.class_path = f"{self.jars}/*"
        self.sources = JAVA_SOURCES / "pulsar"
        self._shared = ()  # An archive is for one class path.
        self.options = ("-XX:MaxDirectMemorySize=256m", "--add-opens=java.base/sun.net=ALL-UNNAMED")


class ZooKeeperServer(Server):
    """A standalone ZooKeeper on a free port; `start()` after `kill()` serves the same data on the same port."""

    _roots = itertools.count(1)

    def __init__(
        self, java: Java, directory: Path, *, heap_mb: int = 256, config: str = "", options: tuple[str, ...] = ()
    ) -> None:
        """`config` is added to zoo.cfg, `options` to the JVM's."""
        self.java = java
        self.directory = directory
        self.heap_mb = heap_mb
        self.config = config
        self.options = options
        self.port = free_port()
        super().__init__(f"zookeeper:{self.port}", directory / "zookeeper.log", self._arguments, self._serves)

    @property
    def connect_string(self) -> str:
        """`127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.port}"

    def metadata_uri(self, root: str = "/ledgers", manager: str = "hierarchical") -> str:
        """BookKeeper's metadata URI of a root path here; `manager` is flat, hierarchical, longhierarchical, …"""
        return f"zk+{manager}://{self.connect_string}{root}"

    def new_root(self) -> str:
        """A root path (`/test-7`) of the test's own; it does not exist yet."""
        return f"/test-{next(self._roots)}"

    def _arguments(self) -> list[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        config = self.directory / "zoo.cfg"
        config.write_text(
            f"tickTime=500\ndataDir={self.directory}/data\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            "maxClientCnxns=0\nadmin.enableServer=false\n4lw.commands.whitelist=*\nmaxSessionTimeout=60000\n"
            f"{self.config}"
        )
        options = (
            "-Dzookeeper.forceSync=no", "-Dzookeeper.preAllocSize=256", "-Dzookeeper.jmx.log4j.disable=true",
            *self.options,
        )  # fmt: skip
        return self.java.command(
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", config, log4j="server", heap_mb=self.heap_mb,
            options=options,
        )  # fmt: skip

    def _serves(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
                connection.sendall(b"srvr")
                return b"Mode:" in connection.recv(4096)
        except OSError:
            return False


# --- etcd --------------------------------------------------------------------------------------------------------


class EtcdServer(Server):
    """One etcd on a free port; `start()` after `kill()` serves the same data on the same port.

    `tls` is a PEM file with a key and a certificate that is its own authority: the server shows it, and asks clients
    for one that it signed. `members` makes it one of a cluster: the names and peer ports of all.
    """

    _roots = itertools.count(1)

    def __init__(
        self, directory: Path, *, tls: Path | None = None, name: str = "etcd", members: Mapping[str, int] = {},
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        etcd = shutil.which("etcd")
        if etcd is None:
            require("etcd", "etcd is not installed (Debian: etcd-server)")
        self.etcd = etcd
        self.directory = directory
        self.tls = tls
        self.member_name = name
        self.port = free_port()
        self.members = members or {name: free_port()}
        self.options = options
        super().__init__(f"etcd:{self.port}", directory / "etcd.log", self._arguments, self._serves)

    @property
    def connect_string(self) -> str:
        """`127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.port}"

    def metadata_uri(self, root: str = "/ledgers") -> str:
        """BookKeeper's metadata URI of a root key here."""
        return f"etcd://{self.connect_string}{root}"

    def new_root(self) -> str:
        """A root key (`/test-7`) of the test's own; it does not exist yet."""
        return f"/test-{next(self._roots)}"

    def pause(self) -> None:
        """SIGSTOP, and wait until each thread stands: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        wait_for(
            lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in tasks.glob("*/stat")),
            f"{self.name} stopped",
        )

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.running:
            self.resume()
        super().kill()

    def _arguments(self) -> list[str]:
        self.directory.mkdir(parents=True, exist_ok=True)
        url = f"{'http' if self.tls is None else 'https'}://{self.connect_string}"
        peers = {name: f"http://127.0.0.1:{port}" for name, port in self.members.items()}
        security: tuple[str, ...] = ()
        if self.tls is not None:
            authority = self.directory / "authority.pem"  # without the key, which etcd takes for a bad certificate
            authority.write_text(self.tls.read_text().partition("-----END PRIVATE KEY-----")[2])
            security = (
                f"--cert-file={self.tls}", f"--key-file={self.tls}", "--client-cert-auth",
                f"--trusted-ca-file={authority}",
            )  # fmt: skip
        return [
            self.etcd, f"--name={self.member_name}", f"--data-dir={self.directory}/data", "--unsafe-no-fsync",
            f"--listen-client-urls={url}", f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peers[self.member_name]}",
            f"--initial-advertise-peer-urls={peers[self.member_name]}",
            f"--initial-cluster={','.join(f'{name}={peer}' for name, peer in peers.items())}",
            # Alone, it becomes leader soon; with others, a busy one is not taken for dead.
            "--heartbeat-interval=50", f"--election-timeout={300 if len(peers) == 1 else 1500}",
            "--logger=zap", "--log-outputs=stderr", *security, *self.options,
        ]  # fmt: skip

    def _serves(self) -> bool:
        return "serving client traffic" in self.log_tail(self._log_size, 1 << 20)

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()


# --- HBase -------------------------------------------------------------------------------------------------------


class HBaseServer(Server):
    """HBase and its ZooKeeper in one JVM; `start()` after `kill()` serves the same data on the same ports.

    What it acknowledged is in the operating system's hands, so that killing it loses nothing.
    """

    _roots = itertools.count(1)

    def __init__(self, directory: Path, *, heap_mb: int = 512) -> None:
        self.java = find_java()
        self.jars = fetch_hbase()
        self.directory = directory
        self.heap_mb = heap_mb
        self.options: tuple[str, ...] = ()
        self.port = free_port()
        self._server_ports = free_port(), free_port()
        self._log_size = 0
        super().__init__(f"hbase:{self.port}", directory / "hbase.log", self._arguments, self._serves)

    @property
    def connect_string(self) -> str:
        """`127.0.0.1:PORT`, of its ZooKeeper."""
        return f"127.0.0.1:{self.port}"

    def metadata_uri(self, root: str = "/ledgers") -> str:
        """bkctl's metadata URI of a prefix of tables here."""
        return f"hbase://{self.connect_string}{root}"

    def new_root(self) -> str:
        """A prefix of tables (`/test-7`) of the test's own; no table of it exists yet."""
        return f"/test-{next(self._roots)}"

    def _arguments(self) -> list[str]:
        master, region_server = self._server_ports
        settings = {
            "hbase.rootdir": f"file://{self.directory}/root",
            "hbase.tmp.dir": f"{self.directory}/tmp",
            "hbase.cluster.distributed": "false",
            "hbase.zookeeper.quorum": "127.0.0.1",
            "hbase.zookeeper.property.clientPort": self.port,
            "hbase.zookeeper.property.dataDir": f"{self.directory}/zookeeper",
            "hbase.zookeeper.property.tickTime": 500,
            "hbase.zookeeper.property.maxSessionTimeout": 60_000,
            "hbase.zookeeper.property.maxClientCnxns": 0,
            "zookeeper.session.timeout": 60_000,
            "hbase.master.port": master,
            "hbase.regionserver.port": region_server,
            **{f"hbase.{role}.info.port": -1 for role in ("master", "regionserver")},
            **{f"hbase.{role}.{name}": "127.0.0.1" for role in ("master", "regionserver")
               for name in ("hostname", "ipc.address")},
            # The default needs HDFS; without Hadoop's checksums each flush reaches the operating system.
            "hbase.wal.provider": "filesystem",
            "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
            # Small: many tables of few rows.
            "hbase.hregion.memstore.mslab.enabled": "false",
            "hbase.regionserver.handler.count": 10,
            "hbase.master.start.timeout.localHBaseCluster": int(LIMIT_S * 1000),
            # The only region server reports at once, and the master waits for no other: else a start waits 5 s or more.
            "hbase.regionserver.msginterval": 1000,
            "hbase.regionserver.metrics.period": 3_600_000,
            "hbase.master.wait.on.regionservers.maxtostart": 1,
            "hbase.master.wait.on.regionservers.interval": 100,
        }  # fmt: skip
        configuration = self.directory / "configuration"
        configuration.mkdir(parents=True, exist_ok=True)
        properties = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>\n" for name, value in settings.items()
        )
        (configuration / "hbase-site.xml").write_text(f"<configuration>\n{properties}</configuration>\n")
        (configuration / "log4j.properties").write_text(
            "log4j.rootLogger=WARN,stderr\nlog4j.logger.org.apache.hadoop.hbase.master.HMaster=INFO\n"
            "log4j.appender.stderr=org.apache.log4j.ConsoleAppender\nlog4j.appender.stderr.target=System.err\n"
            "log4j.appender.stderr.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.stderr.layout.ConversionPattern=%d %p %c{1}: %m%n\n"
        )
        opened = ("java.nio", "java.lang", "jdk.internal.misc", "jdk.internal.ref", "sun.nio.ch")
        return [
            self.java, f"-Xmx{self.heap_mb}m", *JVM_OPTIONS, "-Djava.net.preferIPv4Stack=true",
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in opened),
            "-Dzookeeper.forceSync=no", "-Dzookeeper.preAllocSize=256", "-Dzookeeper.jmx.log4j.disable=true",
            f"-Djava.io.tmpdir={_java_scratch()}", *(self.options or sharing(archive_of(self.java, self.jars))),
            # The jars come first: an archive is for the beginning of a class path.
            "-cp", f"{self.jars}/*:{configuration}", "org.apache.hadoop.hbase.master.HMaster", "start",
        ]  # fmt: skip

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()

    def _serves(self) -> bool:
        return "Master has completed initialization" in self.log_tail(self._log_size, 1 << 20)


def share_hbase_classes() -> None:
    """Have HBase start with about half the processor time: as `Java.share_classes`, from one life of it."""
    java, jars = find_java(), fetch_hbase()
    archive = archive_of(java, jars)
    with _place_of(archive) as directory:
        if directory is None:
            return
        server, names = HBaseServer(directory), directory / "hbase.names"
        server.options = (f"-XX:DumpLoadedClassList={names}",)
        try:
            server.start()
        finally:
            server.kill()
        _dump_archive(java, names, archive, f"{jars}/*")


# --- BookKeeper --------------------------------------------------------------------------------------------------


def apache_settings(
    metadata_uri: str, port: int, directory: Path, storage: str, settings: Mapping[str, object] = {}
) -> dict[str, object]:
    """The settings of one small Apache bookie below `directory`; `settings` add and replace."""
    return {
        "metadataServiceUri": metadata_uri,
        "bookiePort": port,
        "advertisedAddress": "127.0.0.1",
        "allowLoopback": "true",
        "journalDirectory": directory / "journal",
        "ledgerDirectories": directory / "ledgers",
        "ledgerStorageClass": storage,
        "zkTimeout": 10_000,
        **PATIENCE,
        "journalMaxSizeMB": 16,
        "journalPreAllocSizeMB": 1,
        "logSizeLimit": 4 * 1024 * 1024,
        "flushInterval": 1000,
        # More than the tests write between two checkpoints: a memtable that is full is flushed by a thread of its own,
        # which may write the ledgers map of a log among the entries of the checkpoint's thread.
        "skipListSizeLimit": 32 * 1024 * 1024,
        "diskUsageThreshold": 0.99,
        "diskUsageWarnThreshold": 0.985,
        "dbStorage_writeCacheMaxSizeMb": 16,
        "dbStorage_readAheadCacheMaxSizeMb": 16,
        "dbStorage_rocksDB_blockCacheSize": 8 * 1024 * 1024,
        "dbStorage_rocksDB_writeBufferSizeMB": 4,
        "numReadWorkerThreads": 2,
        "serverNumIOThreads": 2,
        "allocatorPoolingPolicy": "UnpooledHeap",
        # Collections come where a test asks for them; on its own one would fall into some test or other.
        "gcWaitTime": 3_600_000,
        # Else garbage collection deletes every ledger: WriteLedgers makes one of the id 2^63 - 1,
        # and ScanAndCompareGarbageCollector continues behind it at 2^63 - 1 + 1, which is negative.
        "verifyMetadataOnGC": "true",
        **settings,
    }


def write_conf(path: Path, settings: Mapping[str, object]) -> Path:
    """Write a Java `bk_server.conf`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


def shell_conf(path: Path, metadata_uri: str, settings: Mapping[str, object] = {}) -> Path:
    """Write a configuration of Apache's shell, which gives up its session of ZooKeeper as soon as it is done."""
    return write_conf(path, {"metadataServiceUri": metadata_uri, "zkTimeout": 60_000, **PATIENCE, **settings})


def offline_conf(path: Path, journal_dir: Path, ledger_dir: Path, storage: str = SORTED) -> Path:
    """Write a configuration with which Apache's shell reads the files of a bookie that is down (whoever wrote them)."""
    settings = apache_settings("zk+null://127.0.0.1:1/ledgers", 3181, path.parent, storage)
    del settings["metadataServiceUri"]
    return write_conf(path, settings | {"journalDirectory": journal_dir, "ledgerDirectories": ledger_dir})


class ApacheBookie(Server):
    """One bookie of Apache BookKeeper.

    Below `directory`: `bk_server.conf` (`.conf`), `journal/` (`.journal_dir`), `ledgers/` (`.ledger_dir`; the files are
    in their `current/`). `.bookie_id` is `127.0.0.1:PORT`. The cluster's metadata must be there (`format_cluster`).
    """

    def __init__(
        self, java: Java, metadata_uri: str, directory: Path, storage: str = SORTED, *, port: int | None = None,
        settings: Mapping[str, object] = {},
    ) -> None:  # fmt: skip
        self.java = java
        self.directory = directory
        self.storage = storage
        self.port = port or free_port()
        self.settings = apache_settings(metadata_uri, self.port, directory, storage, settings)
        self.journal_dir = Path(str(self.settings["journalDirectory"]))
        self.ledger_dir = Path(str(self.settings["ledgerDirectories"]))
        self.conf = write_conf(directory / "bk_server.conf", self.settings)
        super().__init__(f"bookie:{self.port}", directory / "bookie.log", self._arguments, self._serves)

    @property
    def bookie_id(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _arguments(self) -> list[str]:
        return self.java.command(
            "org.apache.bookkeeper.server.Main", "--conf", self.conf, log4j="server", options=BOOKIE_OPTIONS
        )

    def launch(self) -> None:
        self._log_size = self.log.stat().st_size if self.log.exists() else 0
        super().launch()

    def _serves(self) -> bool:
        """Registered and serving: its port is open long before, while the journal is replayed."""
        return "Started component" in self.log_tail(self._log_size, 1 << 20)


#: Nodes below a root that Apache's shell formatted, with their values, by Java's release, servers and ledger manager.
_formatted: dict[tuple[str, str, str], dict[str, bytes]] = {}


def format_cluster(java: Java, metadata_uri: str, directory: Path) -> None:
    """Write the metadata of a new cluster (LAYOUT, INSTANCEID, available) as Apache's shell does.

    The shell does so once on each ZooKeeper. Further roots get copies of its nodes, with an instance id of their own.
    """
    uri = parse_uri(metadata_uri)
    if not metadata_uri.startswith("zk"):
        _format_by_shell(java, metadata_uri, directory)
        return
    from kazoo.client import KazooClient

    kind = java.version, uri.connect_string, metadata_uri.partition("://")[0]
    client = KazooClient(uri.connect_string, timeout=60)
    client.start(LIMIT_S)
    try:
        if kind not in _formatted:
            _format_by_shell(java, metadata_uri, directory)
            _formatted[kind] = _nodes(client, uri.path)
        else:
            for name, value in _formatted[kind].items():
                copy = str(uuid.uuid4()).encode() if name == "/INSTANCEID" else value
                client.create(f"{uri.path}{name}", copy, makepath=True)
    finally:
        client.stop()
        client.close()


def _nodes(client: KazooClient, root: str) -> dict[str, bytes]:
    """Return the values of the nodes from `root` on, parents first, by their paths below it."""
    found: dict[str, bytes] = {}
    waiting = [""]
    while waiting:
        name = waiting.pop()
        found[name] = client.get(f"{root}{name}")[0]
        waiting += [f"{name}/{child}" for child in client.get_children(f"{root}{name}")]
    return found


def _format_by_shell(java: Java, metadata_uri: str, directory: Path) -> None:
    conf = shell_conf(directory / "format.conf", metadata_uri)
    java.shell(conf, "metaformat", "-nonInteractive", check=True)


class ApacheCluster:
    """Apache bookies on one metadata root, each with another storage class."""

    def __init__(
        self, java: Java, zookeeper: ZooKeeperServer, directory: Path, *, root: str = "/ledgers",
        storages: tuple[str, ...] = (SORTED, INTERLEAVED, DB), settings: Mapping[str, object] = {},
    ) -> None:  # fmt: skip
        self.java = java
        self.zookeeper = zookeeper
        self.directory = directory
        self.root = root
        self.metadata_uri = zookeeper.metadata_uri(root)
        self.bookies = [
            ApacheBookie(java, self.metadata_uri, directory / f"bookie-{index}", storage, settings=settings)
            for index, storage in enumerate(storages)
        ]
        self._registry: KazooClient | None = None

    def start(self) -> None:
        format_cluster(self.java, self.metadata_uri, self.directory)
        for bookie in self.bookies:
            bookie.launch()
        for bookie in self.bookies:
            bookie.wait_ready()

    def stop(self) -> None:
        for bookie in self.bookies:
            bookie.kill()
        if self._registry is not None:
            self._registry.stop()
            self._registry.close()
            self._registry = None

    def ensure_up(self) -> None:
        """Start what a test left down, and wait for who lost its session."""
        down = [bookie for bookie in self.bookies if not bookie.running]
        for bookie in down:
            bookie.launch()
        for bookie in down:
            bookie.wait_ready()
        wait_for(lambda: {each.bookie_id for each in self.bookies} <= self._registered(), "each bookie registered")

    def _registered(self) -> set[str]:
        """The bookies that take entries, as ZooKeeper has them."""
        if self._registry is None:
            from kazoo.client import KazooClient

            self._registry = KazooClient(self.zookeeper.connect_string, timeout=60)
            self._registry.start(LIMIT_S)
        return set(self._registry.retry(self._registry.get_children, f"{self.root}/available"))

    def by_id(self, bookie_id: str) -> ApacheBookie:
        return next(bookie for bookie in self.bookies if bookie.bookie_id == bookie_id)

    def bookie(self, storage: str) -> ApacheBookie:
        """The bookie of one storage class (SORTED, INTERLEAVED or DB)."""
        return next(bookie for bookie in self.bookies if bookie.storage == storage)


def main() -> None:
    """Make what `java`, `java_on_etcd` and `hbase` need, ahead of the tests; say so if it cannot be had."""
    try:
        Java().share_classes()
        JavaOnEtcd()
        share_hbase_classes()
    except pytest.skip.Exception as reason:
        print(f"tests that need it are skipped: {reason}", file=sys.stderr)
    except pytest.fail.Exception as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    main()
