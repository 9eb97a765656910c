"""Commands on a whole cluster's metadata while the store is away, hangs or comes back: exit code 6, or success."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from command_line import CommandLine

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import Cookie, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
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
    """Killed a moment after the body began, and up again."""

    def restart() -> None:
        server.kill()
        server.start()

    timer = threading.Timer(0.3, restart)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def check_exits(cli: CommandLine, directory: Path) -> None:
    for words in COMMANDS:
        answer = cli(*(word.format(directory=directory) for word in words), "--timeout", "0.5")
        assert answer.code == 6, (words, answer)
        assert len(answer.err.splitlines()) == 1


def test_a_store_that_is_down_or_hangs_ends_each_command(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
    server = metadata_server()
    with open_cluster(server.metadata_uri(), create=True) as cluster:
        cluster.cookies.write("b1:1", Cookie("b1:1", ("/j",), ("/l",)), NEW)
    cli = CommandLine(server.metadata_uri())
    for outage in (down, hung):
        with outage(server):
            check_exits(cli, tmp_path)
        assert cli("cluster", "id").code == 0


def test_what_a_restart_interrupts_is_done_whole(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
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


def test_a_target_that_is_down_or_hangs_ends_the_copy(metadata_server: Callable[[], Any], tmp_path: Path) -> None:
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


def test_a_sqlite_file_that_somebody_holds_ends_each_change(tmp_path: Path) -> None:
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


def test_what_was_killed_is_finished_by_doing_it_again(zookeeper: Any, tmp_path: Path) -> None:
    source, export = CommandLine(f"sqlite://{tmp_path}/m.db"), tmp_path / "export"
    with open_cluster(source.settings["METADATA_URI"], create=True) as cluster:
        value = METADATA.serialize()
        cluster.store.put_all([(cluster.ledgers.path(LedgerId(0, number * 99)), value) for number in range(5000)])
        instance_id = cluster.instance_id()
    assert source("metadata", "export", "-f", export).code == 0
    target = CommandLine(zookeeper.metadata_uri(zookeeper.new_root()))

    def count() -> int:
        answer = target("ledger", "list", "--count", "-o", "ndjson")
        return int(answer.rows[0]["count"]) if answer.code == 0 else -1

    def kill_when(words: tuple[object, ...], condition: Callable[[], bool]) -> None:
        with target.process(*words) as process:
            try:
                while process.poll() is None and not condition():
                    time.sleep(0.01)
            finally:
                process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL

    words: tuple[object, ...] = ("metadata", "import", "-f", export)
    kill_when(words, lambda: count() > 100)
    assert 0 < count() < 5000
    assert target(*words).code == 0
    assert target("metadata", "diff", export, "-o", "id").ids == []

    words = ("cluster", "nuke", "--instance-id", instance_id, "--yes")
    kill_when(words, lambda: 0 < count() < 4000)
    assert target("cluster", "id", "-o", "id").ids == [instance_id]
    assert target(*words).code == 0
    assert target("cluster", "id").code == 4
