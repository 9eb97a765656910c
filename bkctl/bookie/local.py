"""The local cluster: bookies of our own as background processes over one SQLite metadata store.

    DIR/cluster.json            the ports of the bookies, the metadata URI
    DIR/metadata.db             the metadata store
    DIR/bookie-I/bk_server.conf bookie I's configuration; its id is `bookie-I`
    DIR/bookie-I/journal, ledgers
    DIR/bookie-I/bookie.log     output of its process
    DIR/bookie-I/bookie.pid     process id and start time, while it runs

The cluster that is up is named by a pointer file in the user's data directory, so that every command finds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.disk import FILE_MODE, Files, atomic_write, make_private_directory
from bkctl.errors import BkctlError, Conflict, DirectoryInUse, NotFound, TimedOut, UsageError
from bkctl.formats.names import COOKIE_NAME
from bkctl.metadata.backends.sessions import may_live, process_start

if TYPE_CHECKING:
    import subprocess

    from bkctl.metadata.cluster import Cluster

BOOKIE_COUNT_DEFAULT: Final = 3
BOOKIE_COUNT_MAX: Final = 64
_POLL_S: Final = 0.05
_LOG_TAIL_BYTES: Final = 4096
#: Of the cluster's directories: the metadata store in them holds passwords.
_PRIVATE_MODE: Final = 0o700

#: `--storage` words → Java's ledgerStorageClass.
STORAGE_CLASSES: Final = {
    "sorted": "org.apache.bookkeeper.bookie.SortedLedgerStorage",
    "interleaved": "org.apache.bookkeeper.bookie.InterleavedLedgerStorage",
    "db": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
}


@dataclass(frozen=True, slots=True)
class ClusterBookie:
    """One bookie of the local cluster; `pid` is None when it does not run."""

    index: int
    bookie_id: str
    directory: Path
    port: int
    pid: int | None

    @property
    def conf(self) -> Path:
        """The path of its `bk_server.conf`."""
        return self.directory / "bk_server.conf"

    @property
    def http_url(self) -> str | None:
        """The URL of its HTTP server, or None; None too if its directory was removed."""
        from bkctl.config import BookieConfig

        try:
            config = BookieConfig.load(self.conf)
        except NotFound:
            return None
        return f"http://127.0.0.1:{config.http_server_port}" if config.http_server_enabled else None

    @property
    def pid_file(self) -> Path:
        """The path of the file with process id and start time, while the bookie runs."""
        return self.directory / "bookie.pid"

    @property
    def log(self) -> Path:
        """The path of the output of its process."""
        return self.directory / "bookie.log"


class ClusterBookieState(NamedTuple):
    """A local bookie and its state: `rw` or `ro` (serves), `starting` (runs, not registered), `down`."""

    bookie: ClusterBookie
    state: str


def data_directory() -> Path:
    """Return the user's data directory for bkctl: `$XDG_DATA_HOME/bkctl`, else `~/.local/share/bkctl`."""
    base = os.environ.get("XDG_DATA_HOME") or os.path.join(os.path.expanduser("~"), ".local", "share")
    return Path(base) / "bkctl"


def active_cluster() -> LocalCluster | None:
    """Return the local cluster that is up (last started and not stopped), or None."""
    try:
        directory = Path((data_directory() / "local-cluster").read_text().strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    cluster = LocalCluster(directory)
    return cluster if cluster.exists() else None


class LocalCluster:
    """The local cluster kept in one directory."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or data_directory() / "cluster").absolute()

    @property
    def metadata_uri(self) -> str:
        return f"sqlite://{self.directory / 'metadata.db'}"

    def exists(self) -> bool:
        """Return whether there is a cluster in the directory: `up` writes its description early."""
        return (self.directory / "cluster.json").is_file()

    def is_active(self) -> bool:
        """Return whether this is the cluster that is up, which commands use by default."""
        active = active_cluster()
        return active is not None and active.directory == self.directory

    def bookies(self) -> list[ClusterBookie]:
        """Return the cluster's bookies by index, running or not. Raises NotFound without a cluster here."""
        found = []
        for index, port in enumerate(self._ports()):
            directory = self.directory / f"bookie-{index}"
            found.append(ClusterBookie(index, directory.name, directory, port, _running_pid(directory / "bookie.pid")))
        return found

    def status(self, timeout_s: float = 30.0) -> list[ClusterBookieState]:
        """Return the state of each bookie, by index. Raises NotFound without a cluster here."""
        from bkctl.metadata.cluster import open_cluster

        bookies = self.bookies()
        with open_cluster(self.metadata_uri, timeout_s=timeout_s) as cluster:
            registered = {found.bookie_id: found.state for found in cluster.bookies.list(include_down=False)}
            departed = self._departed(cluster)

        def state_of(bookie: ClusterBookie) -> str:
            if bookie.bookie_id in departed:
                return "left"
            return "down" if bookie.pid is None else registered.get(bookie.bookie_id, "starting")

        return [ClusterBookieState(bookie, state_of(bookie)) for bookie in bookies]

    def _departed(self, cluster: Cluster) -> set[str]:
        """Return the stopped bookies that left the cluster: they have a cookie on disk, and none in the metadata."""
        known = set(cluster.cookies.list())
        return {
            bookie.bookie_id
            for bookie in self.bookies()
            if bookie.pid is None
            and bookie.bookie_id not in known
            and (bookie.directory / "journal" / "current" / COOKIE_NAME).exists()
        }

    def up(
        self,
        bookie_count: int | None = None,
        *,
        storage: str | None = None,
        http: bool = False,
        auto_recovery: bool = False,
        timeout_s: float = 30.0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> list[ClusterBookie]:
        """Start every bookie that does not run, in a new cluster if there is none; wait until all serve.

        Bookies that left the cluster (`bookies decommission`) stay stopped: without their directory they join again.
        `bookie_count` None keeps the number of bookies (3 for a new cluster); a larger one adds bookies. With `http`
        each new bookie has an HTTP server, with `auto_recovery` it takes part in auto-recovery. `progress` is called
        with each step. Return the bookies. Raises UsageError for a count or storage that does not fit the cluster,
        TimedOut when a bookie does not register within `timeout_s` of the last progress, BkctlError with the end of its
        log for a bookie whose process ended, Conflict if all bookies left the cluster. Started bookies keep running.
        """
        from bkctl.metadata.cluster import open_cluster
        from bkctl.tasks import uninterrupted

        if bookie_count is not None and not 1 <= bookie_count <= BOOKIE_COUNT_MAX:
            raise UsageError(f"A local cluster has 1 to {BOOKIE_COUNT_MAX} bookies, not {bookie_count}")
        if storage is not None and storage not in STORAGE_CLASSES:
            raise UsageError(f"Unknown ledger storage {storage!r}", hint=f"one of {', '.join(STORAGE_CLASSES)}")
        path = str(self.directory)
        if not self.exists() and (not path.isprintable() or any(part in path for part in (",", "\\", "${"))):
            raise UsageError(
                f"A local cluster cannot be in {path!r}: bk_server.conf cannot hold this path",
                hint="give a --dir without commas, backslashes and ${",
            )
        self._make_directory()
        with (
            self._lock(),
            open_cluster(self.metadata_uri, timeout_s=timeout_s, create=True) as cluster,
            contextlib.ExitStack() as reserved,
        ):
            self._describe(bookie_count, storage, http, auto_recovery, reserved)
            started: dict[str, subprocess.Popen[bytes]] = {}
            former: dict[str, int | None] = {}
            departed = self._departed(cluster)
            if len(departed) == len(self.bookies()):
                raise Conflict(
                    f"None of the bookies of the local cluster at {self.directory} has a cookie in its metadata store",
                    hint="restore metadata.db, or remove the directories of the bookies to begin with empty ones",
                )
            for bookie in self.bookies():
                if bookie.pid is None and bookie.bookie_id not in departed:
                    progress(f"starting {bookie.bookie_id}")
                    former[bookie.bookie_id] = _registered_ms(cluster, bookie)
                    # No command would find a process without pid file.
                    started[bookie.bookie_id] = uninterrupted(self._start, bookie)
            self._wait_until_serving(cluster, started, former, departed, timeout_s, progress)
        self._make_active()
        return self.bookies()

    def _wait_until_serving(
        self,
        cluster: Cluster,
        started: dict[str, subprocess.Popen[bytes]],
        former: dict[str, int | None],
        departed: set[str],
        timeout_s: float,
        progress: Callable[[str], None],
    ) -> None:
        waiting = {bookie.bookie_id: bookie for bookie in self.bookies() if bookie.bookie_id not in departed}
        deadline = time.monotonic() + timeout_s
        while waiting:
            for bookie_id, bookie in list(waiting.items()):
                registered_ms = _registered_ms(cluster, bookie)
                # A registration older than the bookie's process is that of another process, dead or alive.
                if registered_ms is None or registered_ms == former.get(bookie_id):
                    continue
                del waiting[bookie_id]
                deadline = time.monotonic() + timeout_s
                progress(f"{bookie_id} serves")
            for bookie_id, process in started.items():
                if bookie_id in waiting and process.poll() is not None:
                    raise self._died(waiting[bookie_id], process.returncode)
            if waiting and time.monotonic() > deadline:
                names = ", ".join(sorted(waiting))
                hint = self._hint(waiting[min(waiting)])
                raise TimedOut(f"{names} did not register within {timeout_s:g} s", hint=hint)
            if waiting:
                time.sleep(_POLL_S)

    def down(
        self,
        bookie_id: str | None = None,
        *,
        timeout_s: float = 30.0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> list[ClusterBookie]:
        """Stop the cluster's bookies (or one of them) cleanly and wait; the data stays. Returns the bookies stopped.

        Raises NotFound for a missing cluster or bookie; TimedOut when a bookie does not stop.
        """
        with self._lock():
            bookies = self.bookies()
            if bookie_id is not None:
                bookies = [bookie for bookie in bookies if bookie_id in (bookie.bookie_id, str(bookie.index))]
                if not bookies:
                    raise NotFound(
                        f"No bookie {bookie_id!r} in the local cluster at {self.directory}",
                        hint="'bkctl local status' lists them",
                    )
            stopping = [bookie for bookie in bookies if bookie.pid is not None]
            for bookie in stopping:
                assert bookie.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(bookie.pid, signal.SIGTERM)
            deadline = time.monotonic() + timeout_s
            for bookie in stopping:
                progress(f"stopping {bookie.bookie_id}")
                while _running_pid(bookie.pid_file) is not None:
                    if time.monotonic() > deadline:
                        raise TimedOut(
                            f"{bookie.bookie_id} (process {bookie.pid}) did not stop within {timeout_s:g} s",
                            hint=f"read {bookie.log}",
                        )
                    time.sleep(_POLL_S)
                bookie.pid_file.unlink(missing_ok=True)
            if bookie_id is None and self.is_active():
                (data_directory() / "local-cluster").unlink(missing_ok=True)
        return stopping

    def _make_directory(self) -> None:
        """Create the cluster's directory for this user only, or close an existing one to other users.

        A directory with other files in it keeps its mode; the cluster's files in it are closed to other users.
        """
        try:
            self.directory.mkdir(_PRIVATE_MODE, parents=True, exist_ok=True)
        except FileExistsError:
            raise UsageError(f"{self.directory} is a file, a directory is needed") from None
        if self.exists() or not any(self.directory.iterdir()):
            with contextlib.suppress(PermissionError):  # it belongs to another user, who lets us write there
                self.directory.chmod(_PRIVATE_MODE)

    def _ports(self) -> list[int]:
        path = self.directory / "cluster.json"
        try:
            ports: list[int] = json.loads(path.read_text())["ports"]
            if not isinstance(ports, list) or not all(isinstance(port, int) for port in ports):
                raise ValueError("ports")
        except FileNotFoundError:
            raise NotFound(f"No local cluster at {self.directory}", hint="'bkctl local up' starts one") from None
        except (ValueError, KeyError, TypeError) as error:
            raise BkctlError(f"{path} is not the description of a local cluster", hint="remove it") from error
        return ports

    def _describe(
        self,
        bookie_count: int | None,
        storage: str | None,
        http: bool,
        auto_recovery: bool,
        reserved: contextlib.ExitStack,
    ) -> None:
        """Write the settings of the bookies that are new. `reserved` keeps the ports that they got."""
        from bkctl.bookie.network import reserved_port

        ports = self._ports() if self.exists() else []
        if bookie_count is not None and bookie_count < len(ports):
            raise UsageError(
                f"The local cluster at {self.directory} has {len(ports)} bookies, not {bookie_count}",
                hint="leave --bookies out, or give another --dir",
            )
        count = bookie_count or len(ports) or BOOKIE_COUNT_DEFAULT
        for index in range(count):
            directory = self.directory / f"bookie-{index}"
            if index < len(ports) and (directory / "bk_server.conf").exists():
                self._check_storage(directory, storage)
            else:  # The bookie is new, or its directory was removed after it left the cluster.
                if index == len(ports):
                    ports.append(reserved.enter_context(reserved_port("127.0.0.1")))
                http_port = reserved.enter_context(reserved_port("127.0.0.1")) if http else None
                self._write_conf(index, ports[index], storage or "interleaved", http_port, auto_recovery)
        description = json.dumps({"metadataUri": self.metadata_uri, "ports": ports}, indent=2) + "\n"
        Files().replace(self.directory / "cluster.json", description.encode())

    def _check_storage(self, directory: Path, storage: str | None) -> None:
        if storage is None:
            return
        text = (directory / "bk_server.conf").read_text()
        if f"ledgerStorageClass={STORAGE_CLASSES[storage]}\n" not in text:
            raise UsageError(
                f"{directory.name} was created with another ledger storage than {storage!r}",
                hint="leave --storage out, or give another --dir",
            )

    def _write_conf(self, index: int, port: int, storage: str, http_port: int | None, auto_recovery: bool) -> None:
        directory = self.directory / f"bookie-{index}"
        directory.mkdir(_PRIVATE_MODE, parents=True, exist_ok=True)
        text = (
            f"# Bookie {index} of the local cluster at {self.directory}\n"
            f"metadataServiceUri={self.metadata_uri}\n"
            f"bookieId=bookie-{index}\n"
            f"bookiePort={port}\n"
            "allowLoopback=true\n"
            "advertisedAddress=127.0.0.1\n"
            f"journalDirectory={directory / 'journal'}\n"
            f"ledgerDirectories={directory / 'ledgers'}\n"
            f"ledgerStorageClass={STORAGE_CLASSES[storage]}\n"
            "journalPreAllocSizeMB=1\n"
            "diskUsageThreshold=0.99\n"
            "diskUsageWarnThreshold=0.98\n"
            + ("autoRecoveryDaemonEnabled=true\n" if auto_recovery else "")
            + (f"httpServerEnabled=true\nhttpServerHost=127.0.0.1\nhttpServerPort={http_port}\n" if http_port else "")
        )
        Files().replace(directory / "bk_server.conf", text.encode())

    def _start(self, bookie: ClusterBookie) -> subprocess.Popen[bytes]:
        import subprocess

        environment = {key: value for key, value in os.environ.items() if not key.startswith("BKCTL_")}
        with open(bookie.log, "ab", opener=_open_private) as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "bkctl", "bookie", "start", "--conf", str(bookie.conf)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=bookie.directory,
                env=environment,
                start_new_session=True,
            )
        with open(bookie.pid_file, "w", opener=_open_private) as file:
            # The start time tells whether another process got the id.
            file.write(f"{process.pid} {process_start(process.pid) or '-'}\n")
        return process

    def _died(self, bookie: ClusterBookie, code: int) -> BkctlError:
        path = bookie.log
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "no output"
        return BkctlError(f"{bookie.bookie_id} stopped with exit code {code}: {last}", hint=self._hint(bookie))

    def _hint(self, bookie: ClusterBookie) -> str:
        down = shlex.join(("bkctl", "local", "down", "--dir", str(self.directory)))
        return f"read {bookie.log}; started bookies keep running until {down!r}"

    def _make_active(self) -> None:
        pointer = data_directory() / "local-cluster"
        make_private_directory(pointer.parent)
        with atomic_write(pointer) as file:
            file.write(os.fsencode(self.directory) + b"\n")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        if not self.directory.is_dir():
            raise NotFound(f"No local cluster at {self.directory}", hint="'bkctl local up' starts one")
        with open(self.directory / "cluster.lock", "a", opener=_open_private) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryInUse(
                    f"Another command is starting or stopping the local cluster at {self.directory}",
                    hint="try again when it is done",
                ) from None
            yield


def _registered_ms(cluster: Cluster, bookie: ClusterBookie) -> int | None:
    """Return the creation time of a bookie's registration in ms since 1970, None for a bookie without one."""
    places = cluster.places.writable, cluster.places.read_only
    nodes = cluster.store.get_many(f"{place}/{bookie.bookie_id}" for place in places)
    return next((node.ctime_ms for node in nodes if node is not None), None)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def _running_pid(path: Path) -> int | None:
    try:
        pid_text, _, started = path.read_text().strip().partition(" ")
        pid = int(pid_text)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if os.path.isdir("/proc/self"):
        return pid if started and process_start(pid) == started else None
    return pid if may_live(pid) else None
