"""Properties of the SQLite store alone: one file, several processes, owners that die."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import LIMIT_S, eventually

from bkctl.errors import AlreadyExists, Corrupt, NotFound, TimedOut, Unreachable, Unsupported
from bkctl.metadata.backends import sessions, sqlite
from bkctl.metadata.backends.sqlite import SqliteStore
from bkctl.metadata.store import NEW

COUNT = """
import sys
from bkctl.errors import MetadataVersionConflict
from bkctl.metadata.backends.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
while True:
    found = store.get("counter")
    number = int(found.value) + 1
    try:
        store.put("counter", b"%d" % number, found.version)
    except MetadataVersionConflict:
        continue
    print(number, flush=True)
"""
HOLD = """
import sys, time
from bkctl.metadata.backends.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.ephemeral("available/bookie-1", b"child")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.db")


@pytest.fixture(autouse=True)
def _expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions end as soon as for users."""
    monkeypatch.setattr(sqlite, "SESSION_EXPIRY_MS", 6_000)


@pytest.fixture
def store(file: str) -> Iterator[SqliteStore]:
    with SqliteStore(file, timeout_s=120, create=True) as opened:
        yield opened


def child(program: str, file: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, file], stdout=subprocess.PIPE, text=True)


def test_values_survive_reopening_the_file(file: str) -> None:
    with SqliteStore(file, create=True) as store:
        store.put("node", b"value", NEW)
        store.put("node", b"newer", 0)
        assert store.sequence("idgen") == 0
    with SqliteStore(file) as store:
        assert store.get("node")[:2] == (b"newer", 1)  # type: ignore[index]
        assert store.sequence("idgen") == 1


def test_no_acknowledged_write_is_lost_when_writers_are_killed(store: SqliteStore, file: str) -> None:
    store.put("counter", b"0", NEW)
    acknowledged = 0
    writers = [child(COUNT, file) for _ in range(3)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(30):
                assert writer.stdout.readline()
        for writer in writers:
            writer.kill()
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    for writer in writers:
        assert writer.stdout is not None
        acknowledged += 30 + sum(line.endswith("\n") for line in writer.stdout)
        writer.stdout.close()
    found = store.get("counter")
    assert found is not None
    assert int(found.value) == found.version
    assert acknowledged <= found.version <= acknowledged + len(writers)


def test_many_processes_may_create_the_store_at_once(file: str) -> None:
    program = (
        "import sys; from bkctl.metadata.cluster import open_cluster\n"
        "with open_cluster('sqlite://' + sys.argv[1], create=True) as cluster: print(cluster.instance_id())"
    )
    processes = [child(program, file) for _ in range(5)]
    answers = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 5
    assert len(set(answers)) == 1
    assert len(answers[0].strip()) == 36


def test_ephemerals_of_a_killed_process_vanish_at_once(
    store: SqliteStore, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process id tells; no heartbeat is waited for."""
    monkeypatch.setattr(sqlite, "SESSION_EXPIRY_MS", 3_600_000)
    with child(HOLD, file) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert store.children("available") == ["bookie-1"]
        gone = threading.Event()
        store.watch("available", gone.set, children=True)
        holder.kill()
        holder.wait()
        assert gone.wait(LIMIT_S)
    store.ephemeral("available/bookie-1", b"successor", wait_s=0)
    assert store.get("available/bookie-1").value == b"successor"  # type: ignore[union-attr]


def test_hidden_process_is_judged_by_its_heartbeat(
    store: SqliteStore, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted with hidepid, /proc shows nothing of another user's bookie; a signal tells only that it is there."""
    monkeypatch.setattr(sqlite, "SESSION_EXPIRY_MS", 3_600_000)
    plain_start = sessions.process_start

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    with child(HOLD, file) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            holder.send_signal(signal.SIGSTOP)
            monkeypatch.setattr(sessions, "process_start", lambda pid: None if pid == holder.pid else plain_start(pid))
            with monkeypatch.context() as foreign:
                foreign.setattr(os, "kill", refuse)
                with pytest.raises(AlreadyExists):
                    store.ephemeral("available/bookie-1", b"ours", wait_s=0)
                with sqlite3.connect(file) as raw:
                    raw.execute("UPDATE session SET beat_ms = -3600001")
                raw.close()
                store.ephemeral("available/bookie-1", b"successor", wait_s=0)
            store.delete("available/bookie-1")
            holder.send_signal(signal.SIGCONT)
            eventually(lambda: store.get("available/bookie-1") is not None)  # its holder takes it again
            holder.kill()
            holder.wait()
            store.ephemeral("available/bookie-1", b"successor", wait_s=0)
        finally:
            holder.kill()


def test_suspended_process_loses_its_session_and_renews_it(store: SqliteStore, file: str) -> None:
    with child(HOLD, file) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            os.kill(holder.pid, signal.SIGSTOP)
            with pytest.raises(AlreadyExists):
                store.ephemeral("available/bookie-1", b"ours", wait_s=0)
            eventually(lambda: store.children("available") == [])
            os.kill(holder.pid, signal.SIGCONT)
            eventually(lambda: store.children("available") == ["bookie-1"])
            assert store.get("available/bookie-1").value == b"child"  # type: ignore[union-attr]
        finally:
            holder.kill()


def test_registration_returns_after_a_claim_began_the_next_session(
    store: SqliteStore, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "HEARTBEAT_MS", 3_600_000)
    store.ephemeral("available/bookie-1", b"ours")
    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE session SET beat_ms = 0")
    raw.close()
    with SqliteStore(file) as other:
        assert other.children("available") == []
    claim = store.claim("locks/1", b"")
    store._beat()
    assert store.children("available") == ["bookie-1"]
    assert claim.is_held()


def test_refused_claim_leaves_the_session_of_another_process(store: SqliteStore, file: str) -> None:
    """The refused claim's session was rolled back, so that the next process gets the same id."""
    store.put("locks/1", b"", NEW)
    with SqliteStore(file) as refused:
        with pytest.raises(AlreadyExists):
            refused.claim("locks/1", b"")
        store.ephemeral("available/bookie-1", b"")
    assert store.children("available") == ["bookie-1"]


def test_a_session_of_another_boot_is_judged_by_its_last_heartbeat(
    store: SqliteStore, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "HEARTBEAT_MS", 3_600_000)
    with SqliteStore(file) as other:
        other.ephemeral("available/bookie-1", b"")
        with sqlite3.connect(file) as raw:
            raw.execute("UPDATE session SET boot_id = 'another boot', beat_ms = 0")
        raw.close()
        with SqliteStore(file) as fresh:
            assert fresh.children("available") == ["bookie-1"]
        with sqlite3.connect(file) as raw:
            raw.execute("UPDATE session SET wall_ms = wall_ms - 60000")
        raw.close()
        with SqliteStore(file) as fresh:
            assert fresh.children("available") == []


def test_locked_database_times_out(file: str) -> None:
    with SqliteStore(file, timeout_s=0.3, create=True) as store:
        store.put("node", b"value", NEW)
        raw = sqlite3.connect(file, isolation_level=None)
        raw.execute("BEGIN IMMEDIATE")
        with pytest.raises(TimedOut) as caught:
            store.put("node", b"newer", None)
        assert file in str(caught.value)
        assert store.get("node").value == b"value"  # type: ignore[union-attr]
        raw.execute("ROLLBACK")
        raw.close()
        assert store.put("node", b"newer", 0) == 1


def test_files_of_other_kinds_are_refused(file: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound) as missing:
        SqliteStore(file)
    assert missing.value.exit_code == 4
    assert not os.path.exists(file)
    with pytest.raises(NotFound):
        SqliteStore(str(tmp_path / "nowhere" / "metadata.db"), create=True)
    with pytest.raises(NotFound):
        SqliteStore(str(tmp_path))
    Path(file).touch()
    with pytest.raises(NotFound):
        SqliteStore(file)
    Path(file).write_bytes(b"This is a text that somebody wrote. " * 100)
    for create in (False, True):
        with pytest.raises(Corrupt):
            SqliteStore(file, create=create)
    other = str(tmp_path / "other.db")
    with sqlite3.connect(other) as raw:
        raw.execute("CREATE TABLE t(x)")
    raw.close()
    for create in (False, True):
        with pytest.raises(Corrupt):
            SqliteStore(other, create=create)
    with sqlite3.connect(other) as raw:
        assert raw.execute("SELECT name FROM sqlite_schema").fetchall() == [("t",)]
    raw.close()


def test_a_store_of_a_later_release_is_unsupported(store: SqliteStore, file: str) -> None:
    store.close()
    with sqlite3.connect(file) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(Unsupported) as caught:
        SqliteStore(file)
    assert "99" in str(caught.value)


def test_a_damaged_page_is_an_error_and_no_traceback(store: SqliteStore, file: str) -> None:
    for number in range(500):
        store.put(f"node-{number}", bytes(500), NEW)
    store.close()
    data = bytearray(Path(file).read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    Path(file).write_bytes(data)
    with pytest.raises(Corrupt) as caught, SqliteStore(file) as damaged:
        damaged.children("")
    assert file in str(caught.value)


def test_names_with_sql_wildcards_are_plain_names(store: SqliteStore) -> None:
    for name in ("%", "_", "'; DROP TABLE node; --", '"', "*", "?"):
        store.put(f"odd/{name}", name.encode(), NEW)
        assert store.get(f"odd/{name}").value == name.encode()  # type: ignore[union-attr]
    assert len(store.children("odd") or ()) == 6


def test_a_closed_store_leaves_nothing_open(store: SqliteStore, file: str) -> None:
    store.ephemeral("available/bookie-1", b"")
    store.watch("available", lambda: None, children=True)
    thread = store._thread
    assert thread is not None
    store.close()
    with pytest.raises(Unreachable):
        store.watch("node", lambda: None)
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [name for name in open_files if name.startswith(file)]
    assert not thread.is_alive()


def test_a_file_that_was_removed_or_replaced_is_not_served_on(store: SqliteStore, file: str, tmp_path: Path) -> None:
    store.put("node", b"1", NEW)
    os.rename(file, tmp_path / "aside")
    for use in (lambda: store.get("node"), lambda: store.put("node", b"2", None)):
        with pytest.raises(Unreachable, match="was removed or replaced"):
            use()
    SqliteStore(file, create=True).close()
    with pytest.raises(Unreachable, match="was removed or replaced"):
        store.put("node", b"2", None)


def test_many_nodes_are_read_by_few_statements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SqliteStore(str(tmp_path / "m.db"), create=True) as store:
        store.put_all([("a", b""), ("b", b""), *((f"{'ab'[at % 2]}/{at}", b"%d" % at) for at in range(2000))])
        paths = [f"{'ab'[at // 1000]}/{at % 1000 * 2 + at // 1000}" for at in range(2000)]
        statements: list[str] = []
        store._connection.set_trace_callback(statements.append)
        found = list(store.get_many([*paths, "a/missing", "", paths[0]]))
        store._connection.set_trace_callback(None)
    assert [each and each.value for each in found] == [*(path[2:].encode() for path in paths), None, b"", b"0"]
    assert len(statements) < 40


def test_few_nodes_are_read_at_once_where_they_are_large(tmp_path: Path) -> None:
    size_bytes = 1 << 18
    with SqliteStore(str(tmp_path / "m.db"), create=True) as store:
        for at in range(0, 120, 20):
            store.put_all([(f"{number:03}", bytes(size_bytes)) for number in range(at, at + 20)])
        tracemalloc.start()
        try:
            for found in store.get_many(f"{number:03}" for number in range(120)):
                assert found is not None
                assert len(found.value) == size_bytes
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 60 * size_bytes
