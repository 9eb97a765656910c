"""The metadata store in one SQLite file, for the local cluster: several processes on one machine at once.

    node(parent, name, value, version, ctime_ms, changed, children_changed, owner)   the tree; owner: of an ephemeral
    session(id, …, beat_ms, wall_ms)                                                 owners, with their last heartbeat
    counter(name, value)                                                             `change`, and one per sequence

Every change is one transaction (write-ahead log, synced) that moves the `change` counter, which watches poll. A session
ends when its heartbeat stops, or at once when its process is gone on this boot of this machine.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final

from bkctl import errors
from bkctl.disk import FILE_MODE
from bkctl.metadata.backends import sessions
from bkctl.metadata.store import NEW, RACKS, Claim, Versioned, attempt, check_path, check_size

HEARTBEAT_MS: Final = 2_000
SESSION_EXPIRY_MS: Final = 6_000
WATCH_POLL_MS: Final = 200
#: Nodes that one statement reads: the first one, the largest, and the size of values from which it shrinks.
_READS_MIN: Final = 16
_READS_MAX: Final = 256
_READ_SIZE_BYTES: Final = 1 << 21
#: Nodes whose children one statement reads.
DIRECTORY_BATCH_SIZE: Final = 16
_APPLICATION_ID: Final = 0x424B6374  # "BKct", marks our files among other programs' databases
_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = (
    """CREATE TABLE node(
        parent TEXT NOT NULL, name TEXT NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL,
        ctime_ms INTEGER NOT NULL, changed INTEGER NOT NULL, children_changed INTEGER NOT NULL, owner INTEGER,
        PRIMARY KEY(parent, name)
    ) WITHOUT ROWID""",
    "CREATE INDEX node_by_owner ON node(owner) WHERE owner IS NOT NULL",
    """CREATE TABLE session(
        id INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL, pid_start TEXT NOT NULL,
        pid_namespace TEXT NOT NULL, boot_id TEXT NOT NULL, beat_ms INTEGER NOT NULL, wall_ms INTEGER NOT NULL
    )""",
    "CREATE TABLE counter(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counter VALUES('change', 0)",
    "INSERT INTO node VALUES('', '', x'', 0, 0, 0, 0, NULL)",
)
_NODE: Final = "SELECT {} FROM node WHERE parent = ? AND name = ?"


class _SqliteFile:
    """The database in `file`: one connection for all threads, its transactions, and SQLite's errors as ours."""

    def __init__(self, file: str, timeout_s: float, *, create: bool) -> None:
        self.file = file
        self.name = f"metadata store {file}"
        self.timeout_s = timeout_s
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if create:
            directory = os.path.dirname(file)
            if not os.path.isdir(directory):
                raise errors.NotFound(f"No directory {directory} for the metadata store")
        elif not os.path.isfile(file):
            raise errors.NotFound(f"No metadata store at {file}", hint="start a local cluster with 'bkctl local up'")
        self._connection = self._connect(create)
        with errors.on_error(self._connection.close), self._errors():
            self._open_schema(create)

    def _connect(self, create: bool) -> sqlite3.Connection:
        from urllib.parse import quote

        if create:
            # SQLite would apply the umask; its files beside this one get the mode of this one.
            with contextlib.suppress(OSError):  # SQLite reports the problem below.
                os.close(os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        with self._errors():
            connection = sqlite3.connect(
                f"file:{quote(self.file)}?mode=rw",
                uri=True,
                timeout=self.timeout_s,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.execute("PRAGMA synchronous = FULL")
        self._identity = _identity(self.file)
        return connection

    def _open_schema(self, create: bool) -> None:
        if self._pragma("application_id") == 0 and self._pragma("user_version") == 0:
            with self._transaction():
                empty = not self._connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
                if empty and create:
                    for statement in _SCHEMA:
                        self._connection.execute(statement)
                    self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                    self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
                elif empty:
                    raise errors.NotFound(
                        f"{self.file} is empty, not a metadata store",
                        hint="start a local cluster with 'bkctl local up'",
                    )
        if self._pragma("application_id") != _APPLICATION_ID:
            raise errors.Corrupt(f"{self.file} is a database of another program, not a metadata store")
        if (version := self._pragma("user_version")) != _SCHEMA_VERSION:
            raise errors.Unsupported(
                f"{self.file} has store version {version}; this release knows {_SCHEMA_VERSION}", hint="update bkctl"
            )
        deadline = time.monotonic() + self.timeout_s
        while self._connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            try:  # SQLite refuses the switch at once, without waiting, while another process makes it.
                self._connection.execute("PRAGMA journal_mode = WAL")
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error

    def _translate(self, error: sqlite3.Error) -> errors.BkctlError:
        code = getattr(error, "sqlite_errorname", "")
        if _is_busy(error):
            return errors.TimedOut(f"{self.file} is locked by another process for more than {self.timeout_s:g} s")
        if code.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_FORMAT")):
            return errors.Corrupt(f"{self.file} is damaged, or not a metadata store: {error}")
        if code.startswith("SQLITE_CANTOPEN") or isinstance(error, sqlite3.ProgrammingError):
            return errors.Unreachable(f"{self.file} cannot be opened: {error}")
        return errors.BkctlError(f"{self.file}: {error}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            self._check_open()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise errors.Unreachable(f"{self.name} is closed")
        if _identity(self.file) != self._identity:  # SQLite would go on with the file that is gone.
            raise errors.Unreachable(f"{self.file} was removed or replaced", hint="start this process again")

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock, self._errors():
            self._check_open()
            return self._connection.execute(query, values).fetchall()

    def _node(self, columns: str, path: str) -> Any:
        """Return these columns of a node, None for a missing node."""
        return next(iter(self._rows(_NODE.format(columns), _split(path))), None)

    def _states(self, watches: list[sessions.PolledWatch]) -> Iterator[int | None]:
        for watch in watches:
            row = self._node("children_changed" if watch.children else "changed", watch.path)
            yield None if row is None else row[0]


def _identity(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SqliteStore(_SqliteFile, sessions.SessionStore):
    """`MetadataStore` on the SQLite file `file`.

    With `create`, a missing file and its tables are created. Raises NotFound for a missing file (with `create`: a
    missing directory), Corrupt for another kind of file, Unsupported for the file of a later release.
    """

    def __init__(self, file: str, *, timeout_s: float = 30.0, create: bool = False) -> None:
        sessions.SessionStore.__init__(self)
        self._session: int | None = None
        #: Some ephemerals were lost, and must be created again.
        self._has_lost = False
        self._watches = sessions.PolledWatches(self._states)
        self._sessions_checked_at = float("-inf")
        self._thread: threading.Thread | None = None
        _SqliteFile.__init__(self, file, timeout_s, create=create)

    def get(self, path: str) -> Versioned[bytes] | None:
        return next(self.get_many((path,)))

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        """See MetadataStore.get_many. One statement reads many nodes, fewer where their values are large."""
        remaining, size = iter(paths), _READS_MIN
        while batch := list(map(_split, islice(remaining, size))):
            self._end_dead_sessions()
            size_bytes = 0
            for parent, group in groupby(batch, key=itemgetter(0)):
                names = [name for _, name in group]
                marks = ("?," * len(names))[:-1]
                query = f"SELECT name, value, version, ctime_ms FROM node WHERE parent = ? AND name IN ({marks})"
                rows = self._rows(query, (parent, *names))
                found = {name: Versioned(bytes(value), version, ctime_ms) for name, value, version, ctime_ms in rows}
                size_bytes += sum(len(each.value) for each in found.values())
                yield from map(found.get, names)
            size = max(size // 2, 1) if size_bytes > _READ_SIZE_BYTES else min(2 * size, _READS_MAX)

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        self._end_dead_sessions()
        with self._transaction() as connection:
            return self._put(connection, path, value, expected)

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | errors.BkctlError]:
        """See MetadataStore.put_many: one transaction."""
        self._end_dead_sessions()
        with self._transaction() as connection:
            return [attempt(self._put, connection, *node) for node in nodes]

    def _put(self, connection: sqlite3.Connection, path: str, value: bytes, expected: int | None) -> int:
        """`put` within a transaction; what raises a BkctlError has changed nothing."""
        check_size(path, value)
        row = _row(connection, "version", path)
        if row is None and expected not in (NEW, None):
            raise errors.NotFound(f"No {path} in {self.name}")
        if row is not None and expected == NEW:
            raise errors.AlreadyExists(f"{path or 'The root'} exists in {self.name}")
        if row is not None and expected not in (None, row[0]):
            raise errors.MetadataVersionConflict(f"{path} changed meanwhile: version {row[0]}, expected {expected}")
        change = _next_change(connection)
        if row is None:
            _insert(connection, path, value, None, change)
            return 0
        _update(connection, path, value, change)
        return int(row[0]) + 1

    def put_all(self, nodes: Sequence[tuple[str, bytes]]) -> None:
        with self._transaction() as connection:
            for path, value in nodes:
                self._put(connection, path, value, NEW)

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        if not path:
            raise errors.UsageError("The root of the metadata store cannot be deleted")
        with self._transaction() as connection:
            self._held.pop(path, None)
            row = _row(connection, "version", path)
            if row is None:
                raise errors.NotFound(f"No {path} in {self.name}")
            if expected is not None and row[0] != expected:
                raise errors.MetadataVersionConflict(f"{path} changed meanwhile: version {row[0]}, expected {expected}")
            if _has_children(connection, path):
                raise errors.Conflict(f"{path} has children in {self.name}")
            change = _next_change(connection)
            _remove(connection, path, change)
            for _ in range(prune):
                path = _split(path)[0]
                if not path or _has_children(connection, path):
                    break
                _remove(connection, path, change)

    def children(self, path: str, *, after: str = "", limit: int | None = None) -> list[str] | None:
        self._end_dead_sessions()
        names: list[str] = []
        while True:
            wanted = -1 if limit is None else limit - len(names)
            query = "SELECT name FROM node WHERE parent = ? AND name > ? ORDER BY name LIMIT ?"
            rows = [row[0] for row in self._rows(query, (check_path(path), after, wanted))]
            names += self._valid_names(path, rows)
            if len(rows) != wanted or len(names) == limit:
                break
            after = rows[-1]  # Some names were left out.
        if not names and self._node("1", path) is None:
            return None
        return names

    def children_many(self, paths: Iterable[str]) -> Iterator[list[str] | None]:
        """See MetadataStore.children_many: a statement reads DIRECTORY_BATCH_SIZE nodes that have children."""
        remaining = iter(paths)
        while batch := [check_path(path) for path in islice(remaining, DIRECTORY_BATCH_SIZE)]:
            self._end_dead_sessions()
            rows = self._rows(
                "SELECT parent, name FROM node "
                f"WHERE parent IN ({', '.join('?' * len(batch))}) AND name > '' ORDER BY parent, name",
                batch,
            )
            names: dict[str, list[str]] = {}
            for parent, name in rows:
                names.setdefault(parent, []).append(name)
            for path in batch:
                yield list(self._valid_names(path, names[path])) if path in names else self.children(path)

    def sequence(self, path: str) -> int:
        with self._transaction() as connection:
            return _next_number(connection, path)

    def sequence_position(self, path: str) -> int:
        rows = self._rows("SELECT value FROM counter WHERE name = ?", (f"sequence {check_path(path)}",))
        return int(rows[0][0]) + 1 if rows else 0

    def advance_sequence(self, path: str, position: int) -> bool:
        if position > 0:
            with self._transaction() as connection:
                connection.execute(
                    "INSERT INTO counter VALUES(?, ?) "
                    "ON CONFLICT(name) DO UPDATE SET value = max(value, excluded.value)",
                    (f"sequence {check_path(path)}", position - 1),
                )
        return True

    def claim(self, path: str, value: bytes, *, numbered: bool = False) -> Claim:
        check_size(path, value)
        self._end_dead_sessions(at_once=True)
        with self._session_transaction() as connection:
            if numbered:
                path += f"{_next_number(connection, path):010d}"
            if _row(connection, "1", path) is not None:
                raise errors.AlreadyExists(f"{path} exists in {self.name}")
            change = _next_change(connection)
            _insert(connection, path, value, self._session, change)
        self._keep_session()
        return Claim(self, path, change)  # no other node has this change

    def held_many(self, claims: Sequence[Claim]) -> list[bool]:
        return [self._node("changed", claim.path) == (claim.mark,) for claim in claims]

    def release_many(self, claims: Sequence[Claim]) -> None:
        with self._transaction() as connection:
            for claim in claims:
                if _row(connection, "changed", claim.path) == (claim.mark,):
                    _remove(connection, claim.path, _next_change(connection))

    @contextlib.contextmanager
    def _session_transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction in a session that is alive: a new one if the last one expired."""
        with self._lock:
            before = self._session
            try:
                with self._transaction() as connection:
                    alive = connection.execute("SELECT 1 FROM session WHERE id = ?", (before,)).fetchone()
                    if not alive:
                        self._has_lost = self._has_lost or before is not None
                        identity = (*sessions.process_identity(), _monotonic_ms(), _wall_ms())
                        added = connection.execute("INSERT INTO session VALUES(NULL, ?, ?, ?, ?, ?, ?)", identity)
                        self._session = added.lastrowid
                    yield connection
            except BaseException:
                # A session that was rolled back does not exist, and its id may become another process's.
                self._session = before
                raise

    def _expiry_s(self, path: str) -> float:
        return SESSION_EXPIRY_MS / 1000

    def _put_ephemeral(self, path: str, value: bytes | None) -> bool:
        self._end_dead_sessions(at_once=True)
        with self._session_transaction() as connection:
            row = _row(connection, "owner, value", path)
            if row is not None and row[0] != self._session:
                return False
            if value is None:
                return True
            if row is None:
                _insert(connection, path, value, self._session, _next_change(connection))
            elif bytes(row[1]) != value:
                _update(connection, path, value, _next_change(connection))
            return True

    def _beat(self) -> None:
        """Renew the session's heartbeat; after it expired, start a new session and create its nodes again."""
        with self._transaction() as connection:
            alive = connection.execute(
                "UPDATE session SET beat_ms = ?, wall_ms = ? WHERE id = ?", (_monotonic_ms(), _wall_ms(), self._session)
            ).rowcount
        if alive and not self._has_lost:
            return
        self._has_lost = True
        self._has_lost = not self._restore_ephemerals()

    def _end_dead_sessions(self, *, at_once: bool = False) -> None:
        """Delete the ephemerals of dead sessions; without `at_once` at most once every poll interval."""
        now = time.monotonic()
        if not at_once and now - self._sessions_checked_at < WATCH_POLL_MS / 1000:
            return
        self._sessions_checked_at = now
        dead = [row for row in self._rows("SELECT * FROM session") if row[0] != self._session and _is_dead(row)]
        if not dead:
            return
        with self._transaction() as connection:
            for session_id, *_ in dead:
                row = connection.execute("SELECT * FROM session WHERE id = ?", (session_id,)).fetchone()
                if row is not None and _is_dead(row):
                    _end_session(connection, session_id)

    def watch(self, path: str, callback: Callable[[], None], *, children: bool = False) -> Callable[[], None]:
        cancel = self._watches.add(check_path(path), callback, children)
        self._keep_session()
        return cancel

    def _keep_session(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="metadata-store", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        beat_at = time.monotonic() + HEARTBEAT_MS / 1000
        last_change = -1
        while not self._closed.wait(WATCH_POLL_MS / 1000):
            # The file may be locked, or missing for a moment: the next round tries again.
            with contextlib.suppress(errors.BkctlError):
                if self._session is not None and time.monotonic() >= beat_at:
                    self._beat()
                    beat_at = time.monotonic() + HEARTBEAT_MS / 1000
                if self._watches:
                    self._end_dead_sessions()
                    change = self._rows("SELECT value FROM counter WHERE name = 'change'")[0][0]
                    if change != last_change and self._watches.poll():
                        last_change = change

    def close(self) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._watches.clear()
            if self._session is not None:
                with contextlib.suppress(errors.BkctlError), self._transaction() as connection:
                    _end_session(connection, self._session)
            self._closed.set()
            self._connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1)


@lru_cache(maxsize=1024)  # A change asks several times for the parent of one path.
def _split(path: str) -> tuple[str, str]:
    parent, _, name = "bookies".rpartition("/") if path == RACKS else check_path(path).rpartition("/")
    return parent, name


def _is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))


def _next_change(connection: sqlite3.Connection) -> int:
    rows = connection.execute("UPDATE counter SET value = value + 1 WHERE name = 'change' RETURNING value").fetchall()
    return int(rows[0][0])


def _next_number(connection: sqlite3.Connection, path: str) -> int:
    rows = connection.execute(
        "INSERT INTO counter VALUES(?, 0) ON CONFLICT(name) DO UPDATE SET value = value + 1 RETURNING value",
        (f"sequence {check_path(path)}",),
    ).fetchall()
    return int(rows[0][0])


def _row(connection: sqlite3.Connection, columns: str, path: str) -> Any:
    """Return these columns of a node, None for a missing node."""
    return connection.execute(_NODE.format(columns), _split(path)).fetchone()


def _has_children(connection: sqlite3.Connection, path: str) -> bool:
    row = connection.execute("SELECT 1 FROM node WHERE parent = ? AND name > '' LIMIT 1", (path,)).fetchone()
    return row is not None


def _insert(connection: sqlite3.Connection, path: str, value: bytes, owner: int | None, change: int) -> None:
    """Create the node and its missing parents, all with the same time."""
    nodes = [(path, value, owner)]
    while parent := _split(nodes[-1][0])[0]:
        row = _row(connection, "owner", parent)
        if row is None:
            nodes.append((parent, b"", None))
        elif row[0] is None:
            break
        else:
            raise errors.Conflict(f"{parent} is ephemeral and cannot have children")
    ctime_ms = _wall_ms()
    for path, value, owner in reversed(nodes):
        connection.execute(
            "INSERT INTO node VALUES(?, ?, ?, 0, ?, ?, ?, ?)", (*_split(path), value, ctime_ms, change, change, owner)
        )
        _mark_children_changed(connection, _split(path)[0], change)


def _update(connection: sqlite3.Connection, path: str, value: bytes, change: int) -> None:
    connection.execute(
        "UPDATE node SET value = ?, version = version + 1, changed = ? WHERE parent = ? AND name = ?",
        (value, change, *_split(path)),
    )


def _remove(connection: sqlite3.Connection, path: str, change: int) -> None:
    connection.execute("DELETE FROM node WHERE parent = ? AND name = ?", _split(path))
    _mark_children_changed(connection, _split(path)[0], change)


def _mark_children_changed(connection: sqlite3.Connection, path: str, change: int) -> None:
    connection.execute("UPDATE node SET children_changed = ? WHERE parent = ? AND name = ?", (change, *_split(path)))


def _end_session(connection: sqlite3.Connection, session_id: int) -> None:
    owned = connection.execute("SELECT parent, name FROM node WHERE owner = ?", (session_id,)).fetchall()
    change = _next_change(connection)
    for parent, name in owned:
        _remove(connection, f"{parent}/{name}" if parent else name, change)
    connection.execute("DELETE FROM session WHERE id = ?", (session_id,))


def _is_dead(session: Sequence[Any]) -> bool:
    _, pid, pid_start, pid_namespace, boot_id, beat_ms, wall_ms = session
    _, _, our_namespace, our_boot_id = sessions.process_identity()
    if not boot_id or boot_id != our_boot_id:
        return abs(_wall_ms() - int(wall_ms)) > SESSION_EXPIRY_MS
    if pid_namespace and pid_namespace == our_namespace:
        start = sessions.process_start(pid)
        if start != pid_start and not (start is None and sessions.may_live(pid)):
            return True
    return _monotonic_ms() - int(beat_ms) > SESSION_EXPIRY_MS


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000
