"""Commands on a whole cluster's metadata while the store is away, hangs or comes back: exit code 6, or success."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support.command_line import CommandLine
from support.servers import wait_for

from bkctl.errors import NotFound
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.backends.etcd.etcd_store import EtcdStore
from bkctl.metadata.backends.zookeeper.zookeeper_store import ZooKeeperStore
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("b0:1",)),))
LEDGERS = [LedgerId(scope, number * 5_000) for scope in (0, 7) for number in range(300)]
COMMANDS = [
    ("metadata", "export", "-f", "-"),
    ("metadata", "check"),
    ("metadata", "tree"),
    ("metadata", "migrate", "--to", "sqlite://{directory}/copy.db"),
    ("metadata", "idgen", "--sequence"),
    ("metadata", "replace-bookie", "--from", "b0:1", "--to", "b1:1", "--yes", "--undo", "none"),
    ("cluster", "id"),
    ("cluster", "init"),
    ("cluster", "health", "--no-bookies"),
    ("cluster", "nuke", "--instance-id", "any", "--yes"),
    ("autorecovery", "status"),
    ("autorecovery", "disable"),
    ("autorecovery", "list"),
]


def fill(cluster: Cluster) -> None:
    for ledger in LEDGERS:
        cluster.ledgers.create(ledger, METADATA)
    for bookie_id in ("b0:1", "b1:1"):
        cluster.cookies.write(bookie_id, Cookie(bookie_id, ("/j",), ("/l",)), NEW)


@contextlib.contextmanager
def hung(server: Any) -> Iterator[None]:
    os.killpg(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGCONT)


@contextlib.contextmanager
def down(server: Any) -> Iterator[None]:
    server.kill()
    yield
    server.start()


@contextlib.contextmanager
def restarted(server: Any) -> Iterator[None]:
    """Killed a moment after the body had its first answer, and up again."""
    outages: list[threading.Thread] = []

    def restart() -> None:
        server.kill()
        server.start()

    def then_restart(get: Callable[..., Any]) -> Callable[..., Any]:
        def answered(*arguments: Any) -> Any:
            found = get(*arguments)
            if not outages:
                outages.append(threading.Timer(0.05, restart))
                outages[0].start()
            return found

        return answered

    with contextlib.ExitStack() as stack:
        for store in (ZooKeeperStore, EtcdStore):
            stack.enter_context(mock.patch.object(store, "get", then_restart(store.get)))
        try:
            yield
        finally:
            for outage in outages:
                outage.join()
    assert outages
    assert server.running


def check_exits(cli: CommandLine, directory: Path) -> None:
    for words in COMMANDS:
        answer = cli(*(word.format(directory=directory) for word in words), "--timeout", "0.5")
        assert answer.code == 6, (words, answer)
        assert len(answer.err.splitlines()) == 1


def test_every_command_ends_when_the_store_is_down_or_hangs(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
    server = metadata_server()
    with open_cluster(server.metadata_uri(), create=True) as cluster:
        cluster.cookies.write("b1:1", Cookie("b1:1", ("/j",), ("/l",)), NEW)
    cli = CommandLine(server.metadata_uri())
    for outage in (down, hung):
        with outage(server):
            check_exits(cli, tmp_path)
        assert cli("cluster", "id").code == 0


def test_commands_complete_across_a_restart(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
    server = metadata_server()
    with open_cluster(server.metadata_uri(), create=True) as cluster:
        fill(cluster)
        instance_id = cluster.instance_id()
    cli = CommandLine(server.metadata_uri())
    export, target = tmp_path / "export", f"sqlite://{tmp_path}/copy.db"
    nuke = ("cluster", "nuke", "--instance-id", instance_id, "--yes")
    back = ("metadata", "import", "-f", export)
    for words in (("metadata", "export", "-f", export), ("metadata", "migrate", "--to", target), nuke, back):
        with restarted(server):
            answer = cli(*words)
        assert answer.code == 0, (words, answer)
        if words is nuke:
            assert cli("cluster", "id").code == 4
        else:
            assert len(cli("ledger", "list", "--all-scopes", "-o", "id").ids) == len(LEDGERS)
    for other in (export, target):
        assert cli("metadata", "diff", other, "-o", "id").ids == []


def test_copy_ends_when_the_target_is_down_or_hangs(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
    server = metadata_server()
    source = CommandLine(f"sqlite://{tmp_path}/m.db")
    with open_cluster(source.settings["METADATA_URI"], create=True) as cluster:
        fill(cluster)
    words = ("metadata", "migrate", "--to", server.metadata_uri())
    for outage in (down, hung):
        with outage(server):
            assert source(*words, "--timeout", "0.5").code == 6
            assert source("metadata", "diff", server.metadata_uri(), "--timeout", "0.5").code == 6
    assert source(*words).code == 0


def test_every_change_ends_when_the_sqlite_file_is_locked(tmp_path: Path) -> None:
    cli = CommandLine(f"sqlite://{tmp_path}/m.db")
    with open_cluster(cli.settings["METADATA_URI"], create=True) as cluster:
        fill(cluster)
    with contextlib.closing(sqlite3.connect(tmp_path / "m.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for words in (
            ("autorecovery", "disable"),
            ("cluster", "healthcheck", "disable"),
            ("metadata", "idgen", "--sequence"),
        ):
            answer = cli(*words, "--timeout", "0.5")
            assert answer.code == 6, answer
        other.execute("ROLLBACK")
    assert cli("autorecovery", "disable").code == 0


class Gate:
    """A port that leads to a server, and lets what clients send pass until `shuts()`, asked every 64 KiB."""

    def __init__(self, server_port: int, shuts: Callable[[], bool]) -> None:
        self._server_port = server_port
        self._shuts = shuts
        self._lock = threading.Lock()
        self._passed = 0
        self.shut, self._over = threading.Event(), threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours = self._listener.accept()[0]
                theirs = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += ours, theirs
                self._start(self._pass_on, ours, theirs, self._wait)
                self._start(self._pass_on, theirs, ours, lambda _: None)

    def _pass_on(self, source: socket.socket, target: socket.socket, wait: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                wait(len(data))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _wait(self, size: int) -> None:
        with self._lock:
            before, self._passed = self._passed, self._passed + size
            if before >> 16 != self._passed >> 16 and not self.shut.is_set() and self._shuts():
                self.shut.set()
        if self.shut.is_set():
            self._over.wait()

    def close(self) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for each in (self._listener, *self._sockets):
            each.close()


def test_second_run_finishes_a_killed_command(zookeeper: Any, tmp_path: Path) -> None:
    source, export = CommandLine(f"sqlite://{tmp_path}/m.db"), tmp_path / "export"
    with open_cluster(source.settings["METADATA_URI"], create=True) as cluster:
        value = METADATA.serialize()
        cluster.store.put_all([(cluster.ledgers.path(LedgerId(0, number * 99)), value) for number in range(5000)])
        instance_id = cluster.instance_id()
    assert source("metadata", "export", "-f", export).code == 0
    root = zookeeper.new_root()
    target = CommandLine(zookeeper.metadata_uri(root))

    def count() -> int:
        answer = target("ledger", "list", "--count", "-o", "ndjson")
        return int(answer.rows[0]["count"]) if answer.code == 0 else -1

    def look() -> int:
        """`count` from another thread."""
        try:
            with open_cluster(target.settings["METADATA_URI"]) as cluster:
                return sum(1 for _ in cluster.ledgers.ledgers())
        except NotFound:
            return -1

    def kill_when(words: tuple[object, ...], condition: Callable[[], bool]) -> None:
        """Kill the command when `condition()`, and before what it sends then gets to the server."""
        gate = Gate(zookeeper.port, condition)
        behind = CommandLine(f"zk+hierarchical://127.0.0.1:{gate.port}{root}")
        try:
            with behind.process(*words) as process:
                try:
                    wait_for(lambda: gate.shut.is_set() or process.poll() is not None, "the command half way")
                finally:
                    process.kill()
                told = process.communicate()
            assert process.returncode == -signal.SIGKILL, told
        finally:
            gate.close()

    words: tuple[object, ...] = ("metadata", "import", "-f", export)
    kill_when(words, lambda: look() > 100)
    assert 100 < count() < 5000
    assert target(*words).code == 0
    assert target("metadata", "diff", export, "-o", "id").ids == []

    words = ("cluster", "nuke", "--instance-id", instance_id, "--yes")
    kill_when(words, lambda: 0 < look() < 4500)
    assert 0 < count() < 5000
    assert target("cluster", "id", "-o", "id").ids == [instance_id]
    assert target(*words).code == 0
    assert target("cluster", "id").code == 4
