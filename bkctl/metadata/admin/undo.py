"""Undo files: the values of nodes before a command changed them, and their restoration.

An undo file is ndjson. The first line describes it, each other line is one change, in the order they were made:

    {"format": "bkctl-undo", "version": 1, "time": …, "host": …, "command": […], "metadataUri": …, "store": …,
     "instanceId": …, "counted": true}
    {"path": "cookies/b:3181", "before": "<base64>", "after": null}
    {"file": "/data/current/VERSION", "before": null, "after": "<base64>"}
    {"changes": 2}

`path` is a node below the cluster's root, `file` the file of a cookie on this host; `before` and `after` are its value,
null where it does not exist. Each line is written before its change, so the last lines may describe changes that never
happened. `{"void": PATH}` says that the last change of that node was refused. The file of an undo names the file that
it undoes as `undoes` in its first line, and has `{"end":true}` behind its changes unless the undo did not end.

`changes` counts the changes without the refused ones, and is missing where the command was killed.

A file belongs to one store, named by `store` (`MetadataUri.identity`): a copy of a cluster has the same instance id.
Older files have no `store`, neither `counted` nor `changes`, and the creation of shared nodes among their changes.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise, tee
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, cast

from bkctl.disk import Closing, Files, make_private_directory
from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, Unauthorized, Unsupported, UsageError
from bkctl.formats.metadata import Cookie, LedgerMetadata
from bkctl.formats.names import COOKIE_NAME, CURRENT, SCOPED_DIRECTORY
from bkctl.ids import LedgerId, is_bookie_id
from bkctl.metadata.cluster import COOKIES, Cluster
from bkctl.metadata.store import NEW, VALUE_SIZE_BYTES_MAX, MetadataStore, StoredValue, Versioned, attempt, check_path
from bkctl.metadata.uri import parse_uri

V = TypeVar("V", bound=StoredValue)

FORMAT: Final = "bkctl-undo"
VERSION: Final = 1
#: Two values in base64 and a path.
LINE_SIZE_BYTES_MAX: Final = 3 * VALUE_SIZE_BYTES_MAX
#: A line of the file of an undo that has ended.
_END: Final = b'{"end":true}\n'
#: More nodes than commands read ahead of their changes.
_READ_COUNT_MAX: Final = 1024
#: Layouts and directories that whole clusters share: whichever command created them, undoing it leaves them.
_SHARED: Final = re.compile(
    "LAYOUT|layout|INSTANCEID|instanceid|available(/readonly)?|bookies(/(writable|readonly))?|cookies|ledgers|buckets"
    "|scopes|idgen(-long)?|underreplication((/scopes)?(/(LAYOUT|ledgers|locks|auditorelection))?)"
)
_COOKIES: Final = f"{COOKIES}/"
#: Commands of `metadata` that exchange the names of bookies, or whole values, and move no entries.
_BYTES_ONLY: Final = frozenset(("import", "migrate", "replace-bookie", "undo"))


#: Returns True if bookies that only the first of two values names say that they lack entries of the ledger.
LacksEntries = Callable[[LedgerId, LedgerMetadata, LedgerMetadata], bool]
#: Returns True if bookies that the value before of a path names may lack entries by now.
IsMoved = Callable[[str, bytes | None, bytes | None], bool]


class UndoFile(Closing):
    """Writes an undo file; a context manager. The first `record` creates the file.

    `path` None: nothing is written. `close` removes a file whose changes were all refused.
    """

    def __init__(self, path: Path | None, cluster: Cluster, command: Sequence[str]) -> None:
        self.path = path
        #: The file that these changes undo.
        self.undoes: Path | None = None
        #: Number of recorded changes, without the refused ones.
        self.count = 0
        self._cluster = cluster
        self._command = list(command)
        self._file: int | None = None
        self._lock = threading.Lock()

    def record(self, path: str, before: bytes | None, after: bytes | None) -> None:
        """Record a change of the node at `path` before it is made. After an OSError it must not be made.

        The line outlives this process at once, and is on disk after `close`. Any thread may call.
        """
        with self._lock:
            self._record("path", path, before, after)

    def record_file(self, file: Path, after: bytes | None) -> None:
        """Record a change of a cookie's file on this host, as `record`. Raises OSError."""
        before = _content(file)
        with self._lock:
            self._record("file", str(file.absolute()), before, after)

    def recorded(self) -> Cluster:
        """Return the cluster over the same connection, where each change of a node is recorded first.

        Not recorded: ephemeral nodes, sequences, the creation of shared nodes. The caller closes the given cluster.
        """
        return Cluster(self._cluster.location, cast(MetadataStore, _RecordedStore(self._cluster.store, self)))

    def void(self, path: str) -> None:
        """Record that the last change of the node at `path` was refused."""
        with self._lock:
            if self._file is not None:
                self._write({"void": path})
            self.count -= 1

    def _record(self, kind: str, path: str, before: bytes | None, after: bytes | None) -> None:
        if self.path is not None:
            if self._file is None:
                self._begin(self.path)
            self._write({kind: path, "before": _encode(before), "after": _encode(after)})
        self.count += 1

    def _begin(self, path: Path) -> None:
        """Create the file with its first line, whole or not at all."""
        header = {
            "format": FORMAT,
            "version": VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": os.uname().nodename,
            "command": self._command,
            "metadataUri": self._cluster.uri,
            "store": self._cluster.identity,
            "instanceId": self._cluster.instance_id(),
            "counted": True,
            **({} if self.undoes is None else {"undoes": str(self.undoes.absolute())}),
        }
        try:
            make_private_directory(path.parent)
            # Ledger metadata holds passwords.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            problem = f"No undo file: {error.strerror}; name another place with --undo FILE, or none with --undo none"
            raise OSError(error.errno, problem, str(path)) from error
        try:
            self._write(header)
        except OSError:
            os.close(self._file)
            self._file = None
            os.unlink(path)
            raise

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._file is not None
        data = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        start = os.lseek(self._file, 0, os.SEEK_END)  # `end_undos` may have written here.
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            # The next line must not join the part of this one that had room.
            os.ftruncate(self._file, start)
            os.lseek(self._file, start, os.SEEK_SET)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Write the number of changes, and sync the file to disk; a second call does nothing."""
        if self._file is not None:
            try:
                if self.count:
                    self._write({"changes": self.count})
                    os.fsync(self._file)
                else:
                    os.unlink(str(self.path))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            finally:
                os.close(self._file)
                self._file = None


class _RecordedStore:
    """A MetadataStore whose changes go to an undo file first; all else is passed on."""

    def __init__(self, store: MetadataStore, undo: UndoFile) -> None:
        self._store, self._undo = store, undo
        #: The last nodes read: a change in the version read, or of a new node, needs no read to be recorded.
        self._read: dict[str, Versioned[bytes]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, path: str) -> Versioned[bytes] | None:
        return self._note_read(path, self._store.get(path))

    def get_many(self, paths: Iterable[str]) -> Iterator[Versioned[bytes] | None]:
        asked, places = tee(paths)
        return map(self._note_read, places, self._store.get_many(asked))

    def get_batches(self, paths: Iterable[str]) -> Iterator[list[StoredValue]]:
        asked, places = tee(paths)
        for batch in self._store.get_batches(asked):
            yield [self._note_read(path, found) for found, path in zip(batch, places, strict=False)]

    def _note_read(self, path: str, found: V) -> V:
        if isinstance(found, Versioned):
            with self._lock:
                self._read[path] = found
                if len(self._read) > _READ_COUNT_MAX:
                    del self._read[next(iter(self._read))]
        return found

    def _record(self, changes: Iterable[tuple[str, int | None, bytes | None]]) -> None:
        """Record changes: of each its path, expected version, and new value."""
        given = [change for change in changes if not _is_shared(*change[:2])]
        before: dict[str, bytes | None] = {}
        for path, expected, _ in given:
            with self._lock:
                known = self._read.pop(path, None)
            if expected == NEW:
                before[path] = None
            elif known is not None and known.version == expected:
                before[path] = known.value
        unknown = [path for path, _, _ in given if path not in before]
        for path, found in zip(unknown, self._store.get_many(unknown), strict=True):
            before[path] = None if found is None else found.value
        for path, _, after in given:
            self._undo.record(path, before[path], after)

    @contextmanager
    def _recorded(self, path: str, expected: int | None, after: bytes | None) -> Iterator[None]:
        self._record([(path, expected, after)])
        try:
            yield
        except (Conflict, NotFound, Unauthorized) as error:
            self._refused(path, expected, error)
            raise

    def put(self, path: str, value: bytes, expected: int | None) -> int:
        with self._recorded(path, expected, value):
            return self._store.put(path, value, expected)

    def put_many(self, nodes: Sequence[tuple[str, bytes, int]]) -> list[int | BkctlError]:
        self._record((path, expected, value) for path, value, expected in nodes)
        results = self._store.put_many(nodes)
        for (path, _, expected), result in zip(nodes, results, strict=True):
            if isinstance(result, BkctlError):
                self._refused(path, expected, result)
        return results

    def delete(self, path: str, expected: int | None = None, *, prune: int = 0) -> None:
        with self._recorded(path, expected, None):
            self._store.delete(path, expected, prune=prune)

    def _refused(self, path: str, expected: int | None, error: BkctlError) -> None:
        if _is_shared(path, expected):
            return
        is_void = isinstance(error, NotFound | Conflict) and not getattr(error, "may_be_applied", False)
        if is_void or (isinstance(error, Unauthorized) and error.changed_nothing):
            self._undo.void(path)


class UndoneChange(NamedTuple):
    """One undone change of a node or a file.

    `outcome` is "restored", "already" (it has the former value), "changed" (it has another value since), "shared" (the
    node belongs to the whole cluster, and stays), "moved" (a ledger whose entries other bookies have now; it stays) or
    "refused" (this user may not change the node).
    """

    path: str
    outcome: str
    #: Size of the former value in bytes; None where the node did not exist.
    size_bytes: int | None


class UndoFileSummary(NamedTuple):
    """An undo file by its first line. `change_count` counts its changes.

    `continues` is the undo file to name to continue an undo that did not end, whose changes these are. `is_cut`: the
    end is missing, because the command was killed, or the file was cut.
    """

    path: Path
    time: str | None
    host: str | None
    command: tuple[str, ...]
    metadata_uri: str | None
    store: str | None
    instance_id: str | None
    change_count: int
    continues: str | None = None
    is_cut: bool = False

    def is_of(self, cluster: Cluster, *, moved: bool = False) -> bool:
        """Return whether the store of `cluster` is the one that was changed; with `moved`, at another URI now."""
        if self.instance_id != cluster.instance_id():
            return False
        if moved or (self.store is None and self.metadata_uri == cluster.uri):
            return True
        store = self.store or attempt(lambda: parse_uri(self.metadata_uri or "").identity())
        return store == cluster.identity


def list_undo_files(directory: Path) -> list[UndoFileSummary]:
    """Return the undo files of a directory, oldest first; other files are left out. Raises OSError."""
    try:
        paths = sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    found = (describe_undo_file(path) for path in paths if path.is_file())
    # The first line has whole seconds only.
    known = (each for each in found if each is not None)
    return sorted(known, key=lambda each: (each.time or "", each.path.stat().st_mtime_ns, each.path))


def end_undos(directory: Path, path: Path) -> None:
    """Record in the undo files of `directory` that the undos of the file at `path` are not to be continued any more."""
    with suppress(PermissionError):  # Where files are another user's, nothing looks for the last one either.
        for each in list_undo_files(directory):
            if each.continues == str(path.absolute()):
                with open(each.path, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    if file.read() == b"\n":  # else a killed command left half a line
                        file.write(_END)


def describe_undo_file(path: Path) -> UndoFileSummary | None:
    """Return the summary of an undo file, None for another file. Raises OSError."""
    with open(path, "rb") as file:
        try:
            header = _parse(file.readline(LINE_SIZE_BYTES_MAX), str(path))
        except Corrupt:
            return None
        if header.get("format") != FORMAT:
            return None
        count, is_ended, is_cut = 0, False, header.get("counted") is True
        for line in iter(lambda: file.readline(LINE_SIZE_BYTES_MAX), b""):
            if line == _END:  # A later undo may have ended that of a killed command.
                is_ended, is_cut = True, False
            elif line.startswith(b'{"changes"'):
                is_cut = False
            else:
                count += -1 if line.startswith(b'{"void"') else 1
    found = _described(path, header, count)._replace(is_cut=is_cut)
    return found._replace(continues=None) if is_ended else found


def _described(path: Path, header: dict[str, Any], count: int) -> UndoFileSummary:
    names = ("time", "host", "metadataUri", "store", "instanceId", "undoes")
    when, host, uri, store, instance_id, undoes = (
        value if isinstance(value := header.get(name), str) else None for name in names
    )
    command = header.get("command")
    words = tuple(map(str, command)) if isinstance(command, list) else ()
    return UndoFileSummary(path, when, host, words, uri, store, instance_id, count, undoes)


def undo(
    cluster: Cluster,
    path: Path,
    *,
    dry_run: bool = False,
    redo: UndoFile | None = None,
    moved: bool = False,
    lacks_entries: LacksEntries | None = None,
) -> Iterator[UndoneChange]:
    """Undo every change in the undo file at `path`, the last one first; with `dry_run` only report.

    `redo` records the changes that this makes. `moved`: the store of the file is at the URI of `cluster` now.
    `lacks_entries` asks the bookies that a ledger would name again.

    Nodes changed since stay unchanged ("changed"). So do ledgers whose entries a command moved, since the bookies of
    before may have deleted their copies, and those whose bookies of before say that they lack entries ("moved").
    Memory grows by 8 bytes a change, in a dry run by the values. Raises before the first change: Conflict for an undo
    file of another store, or with changes of files of another host, or that takes away the cookie of a registered
    bookie, or of a directory with entry logs or journals; Corrupt for another kind of file, and for damaged or missing
    lines; Unsupported for a later version. Raises OSError, and the store's errors.
    """
    with open(path, "rb") as file:
        header = _parse(file.readline(LINE_SIZE_BYTES_MAX), f"{path}: line 1")
        if header.get("format") != FORMAT:
            raise Corrupt(f"{path} is not an undo file")
        if header.get("version") != VERSION:
            raise Unsupported(
                f"{path} is an undo file of version {header.get('version')!r}; version {VERSION} is known"
            )
        described = _described(path, header, 0)
        if not described.is_of(cluster, moved=moved):
            raise _of_another_store(described, cluster)
        # Words in front of the group are options for all commands.
        names_only = any(pair[0] == "metadata" and pair[1] in _BYTES_ONLY for pair in pairwise(described.command))

        def is_moved(place: str, before: bytes | None, after: bytes | None) -> bool:
            changed = _changed_ensembles(before, after)
            if changed is None or not names_only:
                return changed is not None
            ledger = None if lacks_entries is None else _ledger_at(cluster, place)
            return ledger is not None and lacks_entries is not None and lacks_entries(ledger, *changed)

        starts = array("q")
        #: Of each node of a cookie whether its changes made it, so that their undoing takes it away.
        cookies: dict[str, list[bool]] = {}
        at, count = file.tell(), 0
        while line := file.readline(LINE_SIZE_BYTES_MAX):
            if not line.endswith(b"\n"):
                if len(line) == LINE_SIZE_BYTES_MAX:
                    raise Corrupt(f"{path}: the line at byte {at} is longer than {LINE_SIZE_BYTES_MAX} bytes")
                break  # An incomplete line of a killed command: its change was never made.
            where = f"{path}: the line at byte {at}"
            fields = _parse(line, where)
            if isinstance(voided := fields.get("void"), str):
                count -= 1
                if left := cookies.get(voided):
                    left.pop()
            elif "changes" in fields:
                if fields["changes"] != count:
                    raise Corrupt(f"{path} has {count} of {fields['changes']} changes: lines are missing or damaged")
            elif fields.get("end") is not True:
                name, before, after = _change_in(fields, where)
                count += 1
                if "file" in fields and described.host != os.uname().nodename:
                    raise Conflict(f"{where} changes a file of {described.host}", hint="run it on that host")
                if "file" in fields and before is None:
                    _check_unused(Path(name))
                elif "path" in fields and name.startswith(_COOKIES):
                    cookies.setdefault(name, []).append(before is None and after is not None)
            starts.append(at)
            at += len(line)
        lost = (place.removeprefix(_COOKIES) for place, left in cookies.items() if any(left))
        cluster.bookies.check_not_registered(filter(is_bookie_id, lost))
        store = cluster.store
        if redo is not None:
            redo.undoes, store = path, redo.recorded().store
        refused: Counter[str] = Counter()
        planned: dict[str, bytes | None] | None = {} if dry_run else None
        for start in reversed(starts):
            file.seek(start)
            fields = _parse(file.readline(LINE_SIZE_BYTES_MAX), f"{path}: the line at byte {start}")
            where = f"{path}: the line at byte {start}"
            if isinstance(voided := fields.get("void"), str):
                refused[voided] += 1
            elif refused.get(name := str(fields.get("path"))):
                refused[name] -= 1
            elif "path" in fields:
                yield _undo_node(store, fields, where, planned, is_moved)
            elif "file" in fields:
                yield _undo_file(fields, where, planned, redo)


def _of_another_store(file: UndoFileSummary, cluster: Cluster) -> Conflict:
    instance_id = cluster.instance_id()
    if file.instance_id != instance_id:
        return Conflict(
            f"{file.path} belongs to the cluster {file.instance_id!r}, but {cluster.uri} is {instance_id!r}",
            hint="name the cluster that the command ran on",
        )
    return Conflict(
        f"{file.path} has changes of {file.metadata_uri or 'a store that it does not name'}, but {cluster.uri} is "
        "another store: a copy of the cluster, or the same store at another address",
        hint="name the store of the file with -u; if it has moved since, with all its nodes, add --store-moved",
    )


def _check_unused(file: Path) -> None:
    """Raise Conflict if the cookie at `file` is that of a directory with entry logs or journals."""
    if file.parts[-2:] != (CURRENT, COOKIE_NAME) or not file.exists():
        return
    files = chain(file.parent.glob("*.*"), file.parent.glob(f"{SCOPED_DIRECTORY}/*.*"))
    if any(each.suffix in (".log", ".txn") for each in files):
        raise Conflict(
            f"{file.parent} has entry logs or journals beside the cookie that would be removed",
            hint="'bkctl bookie format' removes the data of a bookie that is no longer needed",
        )


def _is_shared(path: str, expected: int | None = NEW) -> bool:
    """Return whether a write in the version `expected` would create a node that commands share."""
    return expected == NEW and _SHARED.fullmatch(path) is not None


def _changed_ensembles(before: bytes | None, after: bytes | None) -> tuple[LedgerMetadata, LedgerMetadata] | None:
    """Return two values that are metadata of a ledger with other ensembles; None for others."""
    if before is None or after is None:
        return None
    old, new = (attempt(LedgerMetadata.parse, value) for value in (before, after))
    if isinstance(old, BkctlError) or isinstance(new, BkctlError) or old.ensembles == new.ensembles:
        return None
    return old, new


def _ledger_at(cluster: Cluster, place: str) -> LedgerId | None:
    """Return the ledger whose metadata is at `place`; None if that is not to be known."""
    digits = re.sub("^(ledgers|scopes)/|[^0-9a-f]", "", place)
    for base, scoped in ((10, False), (16, True)):
        with suppress(ValueError, BkctlError):
            value = int(digits, base)
            ledger = LedgerId.from_value(value) if scoped else LedgerId(0, value)
            if cluster.ledgers.path(ledger) == place:
                return ledger
    return None


def _undo_node(
    store: MetadataStore, fields: dict[str, Any], where: str, planned: dict[str, bytes | None] | None, is_moved: IsMoved
) -> UndoneChange:
    """Undo the change of a node; in a dry run, note its value in `planned` instead, for its earlier changes."""
    place, before, after = _change_in(fields, where)
    size = None if before is None else len(before)
    found = attempt(store.get, place)
    if isinstance(found, BkctlError):
        return UndoneChange(place, "refused", size)
    outcome = _outcome((planned or {}).get(place, None if found is None else found.value), before, after)
    if outcome == "restored" and before is None and _is_shared(place):
        outcome = "shared"
    elif outcome == "restored" and is_moved(place, before, after):
        outcome = "moved"
    elif outcome == "restored" and planned is not None:
        planned[place] = before
    elif outcome == "restored":
        try:
            if before is None:
                assert found is not None
                store.delete(place, found.version)
            else:
                store.put(place, before, NEW if found is None else found.version)
        except (Conflict, NotFound):  # Changed meanwhile, or has children since.
            outcome = "changed"
        except Unauthorized:
            outcome = "refused"
    return UndoneChange(place, outcome, size)


def _undo_file(
    fields: dict[str, Any], where: str, planned: dict[str, bytes | None] | None, redo: UndoFile | None
) -> UndoneChange:
    name, before, after = _change_in(fields, where)
    file = Path(name)
    outcome = _outcome((planned or {}).get(name, _content(file)), before, after)
    if outcome == "restored" and planned is not None:
        planned[name] = before
    elif outcome == "restored":
        if redo is not None:
            redo.record_file(file, before)
        if before is None:
            Files().remove(file)
        else:
            Files().replace(file, before)
    return UndoneChange(name, outcome, None if before is None else len(before))


def _change_in(fields: dict[str, Any], where: str) -> tuple[str, bytes | None, bytes | None]:
    """Return the name, the value before and the value after of a change of a "path" or a "file". Raises Corrupt."""
    kind = "file" if "file" in fields else "path"
    name, before, after = fields.get(kind), _decode(fields, "before", where), _decode(fields, "after", where)
    try:
        if not isinstance(name, str) or not name or (kind == "file" and not os.path.isabs(name)):
            raise ValueError(name)
        if kind == "path":
            check_path(name)
        elif b"\0" in os.fsencode(name):
            raise ValueError(name)
    except UsageError as error:
        raise Corrupt(f"{where}: {error.message}") from error
    except ValueError as error:
        raise Corrupt(f"{where} names no {'node' if kind == 'path' else 'file'}") from error
    if kind == "file" and Path(name).name != COOKIE_NAME:
        for value in (before, after):
            if value is not None:  # who edits an undo file must not have other files written
                Cookie.parse(value, f"{where}: {name}")
    return name, before, after


def _outcome(value: bytes | None, before: bytes | None, after: bytes | None) -> str:
    return "already" if value == before else "restored" if value == after else "changed"


def _content(file: Path) -> bytes | None:
    """Return the bytes of a small file, None for a missing one. Does not wait for a pipe's writer. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as stream:
        return stream.read(VALUE_SIZE_BYTES_MAX + 1) or b""


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError(value)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is not a JSON object") from error
    return value


def _encode(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


def _decode(fields: dict[str, Any], key: str, where: str) -> bytes | None:
    text = fields.get(key)
    if text is None:
        return None
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        raise Corrupt(f"{where}: {key!r} is not base64") from error
