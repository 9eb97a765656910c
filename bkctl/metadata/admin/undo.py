"""Undo files: what nodes of the metadata store were before a command changed them, and putting that back.

An undo file is ndjson. The first line describes it, each other line is one change, in the order they were made:

    {"format": "bkctl-undo", "version": 1, "time": …, "host": …, "command": […], "metadataUri": …, "instanceId": …}
    {"path": "cookies/b:3181", "before": "<base64>", "after": null}
    {"file": "/data/current/VERSION", "before": null, "after": "<base64>"}

`path` is a node below the cluster's root, `file` a small file of this host; `before` and `after` are its value, null
where it is not there. A line is written before its change is made, so that the last ones may tell of changes that never
happened.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from bkctl.errors import AlreadyExists, Conflict, Corrupt, MetadataVersionConflict, NotFound, Unsupported
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import NEW, VALUE_SIZE_BYTES_MAX, MetadataStore, check_path

FORMAT: Final = "bkctl-undo"
VERSION: Final = 1
#: Two values in base64 and a path.
LINE_SIZE_BYTES_MAX: Final = 3 * VALUE_SIZE_BYTES_MAX


class UndoFile:
    """Writes an undo file; a context manager. The file is made by the first `record`, so no change leaves no file.

    `path` None keeps nothing.
    """

    def __init__(self, path: Path | None, cluster: Cluster, command: Sequence[str]) -> None:
        self.path = path
        #: How many changes were recorded.
        self.count = 0
        self._cluster = cluster
        self._command = list(command)
        self._file: int | None = None
        self._lock = threading.Lock()

    def record(self, path: str, before: bytes | None, after: bytes | None) -> None:
        """Note a change of the node at `path` that is about to be made. Raises OSError: then it must not be made.

        The line is with the system when this returns: it outlives this process, and is on disk after `close`. May be
        called from any thread.
        """
        with self._lock:
            self._record("path", path, before, after)

    def record_file(self, file: Path, after: bytes | None) -> None:
        """Note a change of a file of this host that is about to be made, as `record`. Raises OSError."""
        try:
            before = file.read_bytes()
        except FileNotFoundError:
            before = None
        with self._lock:
            self._record("file", str(file.absolute()), before, after)

    def _record(self, kind: str, path: str, before: bytes | None, after: bytes | None) -> None:
        self.count += 1
        if self.path is None:
            return
        if self._file is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Ledger metadata holds passwords.
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._write(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "host": os.uname().nodename,
                    "command": self._command,
                    "metadataUri": self._cluster.uri,
                    "instanceId": self._cluster.instance_id(),
                }
            )
        self._write({kind: path, "before": _encode(before), "after": _encode(after)})

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._file is not None
        data = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Bring the file to disk; a second call does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Undone(NamedTuple):
    """One change put back, of a node or a file.

    `outcome` is "restored", "already" (it is as before) or "changed" (by somebody since).
    """

    path: str
    outcome: str
    #: Bytes of the value that was there before; None where there was no node.
    size_bytes: int | None


def undo(cluster: Cluster, path: Path, *, dry_run: bool = False) -> Iterator[Undone]:
    """Put back every change of the undo file at `path`, the last one first; with `dry_run` only say what would be done.

    What somebody changed since is left alone ("changed"). Memory grows by 8 bytes a change. Raises Conflict for an undo
    file of another cluster, or one that changes files of another host; Corrupt for one that is none, Unsupported for a
    later version, OSError, and what the store raises.
    """
    with open(path, "rb") as file:
        header = _parse(file.readline(LINE_SIZE_BYTES_MAX), f"{path}: line 1")
        if header.get("format") != FORMAT:
            raise Corrupt(f"{path} is no undo file")
        if header.get("version") != VERSION:
            raise Unsupported(
                f"{path} is an undo file of version {header.get('version')!r}; version {VERSION} is known"
            )
        instance_id = cluster.instance_id()
        if header.get("instanceId") != instance_id:
            raise Conflict(
                f"{path} is of the cluster {header.get('instanceId')!r}, and {cluster.uri} is {instance_id!r}",
                hint="name the cluster that the command ran on",
            )
        starts = array("q")
        at = file.tell()
        while line := file.readline(LINE_SIZE_BYTES_MAX):
            if not line.endswith(b"\n"):
                if len(line) == LINE_SIZE_BYTES_MAX:
                    raise Corrupt(f"{path}: the line at byte {at} is longer than {LINE_SIZE_BYTES_MAX} bytes")
                break  # Cut short with the command that wrote it: its change was not begun.
            starts.append(at)
            at += len(line)
        for start in reversed(starts):
            file.seek(start)
            fields = _parse(file.readline(LINE_SIZE_BYTES_MAX), f"{path}: the line at byte {start}")
            where = f"{path}: the line at byte {start}"
            if "file" not in fields:
                yield _put_back(cluster.store, fields, where, dry_run)
            elif header.get("host") != os.uname().nodename:
                raise Conflict(f"{where} changes a file of {header.get('host')}", hint="run it on that host")
            else:
                yield _put_back_file(fields, where, dry_run)


def _put_back(store: MetadataStore, fields: dict[str, Any], where: str, dry_run: bool) -> Undone:
    name = fields.get("path")
    if not isinstance(name, str) or not name:
        raise Corrupt(f"{where} names no node")
    before, after = (_decode(fields, key, where) for key in ("before", "after"))
    place, size = check_path(name), None if before is None else len(before)
    found = store.get(place)
    value = None if found is None else found.value
    if value == before:
        return Undone(place, "already", size)
    if value != after:
        return Undone(place, "changed", size)
    if not dry_run:
        try:
            if before is None:
                assert found is not None
                store.delete(place, found.version)
            else:
                store.put(place, before, NEW if found is None else found.version)
        except (AlreadyExists, MetadataVersionConflict, NotFound):
            return Undone(place, "changed", size)
    return Undone(place, "restored", size)


def _put_back_file(fields: dict[str, Any], where: str, dry_run: bool) -> Undone:
    name = fields.get("file")
    if not isinstance(name, str) or not os.path.isabs(name):
        raise Corrupt(f"{where} names no file")
    before, after = (_decode(fields, key, where) for key in ("before", "after"))
    file, size = Path(name), None if before is None else len(before)
    try:
        with open(file, "rb") as stream:
            value: bytes | None = stream.read(VALUE_SIZE_BYTES_MAX + 1)
    except FileNotFoundError:
        value = None
    if value == before:
        return Undone(name, "already", size)
    if value != after:
        return Undone(name, "changed", size)
    if not dry_run:
        from bkctl.disk import Files

        if before is None:
            Files().remove(file)
        else:
            Files().replace(file, before)
    return Undone(name, "restored", size)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where} is no JSON object") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{where} is no JSON object")
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
        raise Corrupt(f"{where}: {key!r} is no base64") from error
