"""Resume files: the ledgers that a recovery has finished, so that an interrupted recovery continues there.

A resume file is ndjson. The first line identifies the recovery, each other line names a finished ledger:

    {"format": "bkctl-recovery", "version": 1, "time": …, "host": …, "instanceId": …, "bookies": ["b:3181"]}
    {"ledger": "00000000000000000000000000000011", "entryCount": 3, "sizeBytes": 3072}

A line is appended after its ledger is finished. A killed process or machine loses lines at most. A ledger without a
line is recovered again, which changes nothing in a finished ledger.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from bkctl.disk import Closing, Files
from bkctl.errors import Conflict, Corrupt, Unsupported
from bkctl.ids import LedgerId, LedgerIdSet

FORMAT: Final = "bkctl-recovery"
VERSION: Final = 1
LINE_SIZE_BYTES_MAX: Final = 1 << 20
#: The longest time until lines are synced; a killed process loses no line, since the system has them.
SYNC_S: Final = 1.0
_NAME: Final = re.compile(r"[0-9a-f]{32}")


class ResumeFile(Closing):
    """The resume file of one recovery, read and then appended to; a context manager."""

    def __init__(self, path: Path, *, instance_id: str, bookies: Collection[str]) -> None:
        """Open the file at `path`, or create it.

        Raise Conflict if it belongs to another cluster or other bookies, or another process has it open; Corrupt for a
        file that is not a resume file, Unsupported for a later version, OSError.
        """
        self.path = path
        #: Ledgers that earlier runs finished, and the entries and bytes that those copied.
        self.done = LedgerIdSet()
        self.entry_count = 0
        self.size_bytes = 0
        self._synced = time.monotonic()
        self._dirty = False
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock()
            header = {
                "format": FORMAT,
                "version": VERSION,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "host": os.uname().nodename,
                "instanceId": instance_id,
                "bookies": sorted(bookies),
            }
            if not self._read(header):
                self._append(header)
                self._sync()
                Files().sync_directory(path.absolute().parent)
        except BaseException:
            os.close(self._file)
            raise

    def record(self, ledger: LedgerId, entry_count: int, size_bytes: int) -> None:
        """Record that the ledger is finished. Raise OSError."""
        self.done.add(ledger)
        self._append({"ledger": ledger.qualified_name, "entryCount": entry_count, "sizeBytes": size_bytes})
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        """Sync and close the file; a second call does nothing."""
        if self._file >= 0:
            file, self._file = self._file, -1
            try:
                if self._dirty:
                    os.fsync(file)
            finally:
                os.close(file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"{self.path}: another process is writing to it"
            raise Conflict(problem, hint="wait for that process, or stop it") from error

    def _read(self, expected: dict[str, Any]) -> bool:
        """Read the file, and truncate an incomplete last line; return False for an empty file."""
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            for number, line in enumerate(iter(lambda: file.readline(LINE_SIZE_BYTES_MAX), b""), 1):
                if not line.endswith(b"\n"):
                    if len(line) == LINE_SIZE_BYTES_MAX:
                        raise Corrupt(f"{self.path} line {number}: longer than {LINE_SIZE_BYTES_MAX} bytes")
                    break
                fields = self._parse(line, number)
                if number == 1:
                    self._check(fields, expected)
                else:
                    self._add(fields, number)
                end += len(line)
            size = os.fstat(self._file).st_size
        # An incomplete first line is truncated only if it is the beginning of our own header.
        if end == 0 and not json.dumps(expected).encode().startswith(os.pread(self._file, 20, 0)):
            raise Corrupt(f"{self.path} is not a resume file", hint="name a new file")
        if end < size:
            os.ftruncate(self._file, end)
        return end > 0

    def _check(self, header: dict[str, Any], expected: dict[str, Any]) -> None:
        if header.get("format") != FORMAT:
            raise Corrupt(f"{self.path} is not a resume file", hint="name a new file")
        if header.get("version") != VERSION:
            raise Unsupported(
                f"{self.path} is a resume file of version {header.get('version')!r}; version {VERSION} is known"
            )
        if header.get("instanceId") != expected["instanceId"]:
            raise Conflict(
                f"{self.path} belongs to cluster {header.get('instanceId')!r}; this one is {expected['instanceId']!r}",
                hint="connect to the cluster of the file, or name a new file",
            )
        if header.get("bookies") != expected["bookies"]:
            named = header.get("bookies")
            names = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
            raise Conflict(
                f"{self.path} belongs to a recovery of {names}, not of {', '.join(expected['bookies'])}",
                hint="name the same bookies, or a new file",
            )

    def _add(self, fields: dict[str, Any], number: int) -> None:
        name, entry_count, size_bytes = (fields.get(key) for key in ("ledger", "entryCount", "sizeBytes"))
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Corrupt(f"{self.path} line {number} does not name a ledger")
        if type(entry_count) is not int or type(size_bytes) is not int:
            raise Corrupt(f"{self.path} line {number} lacks entryCount or sizeBytes")
        self.done.add(LedgerId.from_value(int(name, 16)))
        self.entry_count += entry_count
        self.size_bytes += size_bytes

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            problem = "is not a resume file" if number == 1 else f"line {number} is not a JSON object"
            raise Corrupt(f"{self.path} {problem}", hint="name a new file")
        return fields

    def _append(self, fields: dict[str, Any]) -> None:
        data = json.dumps(fields).encode() + b"\n"
        self._dirty = True
        while data:
            data = data[os.write(self._file, data) :]

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced, self._dirty = time.monotonic(), False
