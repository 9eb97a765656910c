"""Resume files: the ledgers that the runs of a recovery have finished.

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
from functools import partial
from pathlib import Path
from typing import Any, Final

from bkctl.disk import Closing, Files
from bkctl.errors import Conflict, Corrupt, Unsupported, on_error
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
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by close)
        with on_error(self._file.close):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                problem = f"{path}: another process is writing to it"
                raise Conflict(problem, hint="wait for that process, or stop it") from error
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

    def record(self, ledger: LedgerId, entry_count: int, size_bytes: int) -> None:
        """Record that the ledger is finished. Raise OSError."""
        self.done.add(ledger)
        self._append({"ledger": ledger.qualified_name, "entryCount": entry_count, "sizeBytes": size_bytes})
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        """Sync and close the file; a second call does nothing."""
        if not self._file.closed:
            with self._file:
                self._sync()

    def _read(self, expected: dict[str, Any]) -> bool:
        """Read the file, and truncate an incomplete last line; return False for an empty file."""
        self._file.seek(0)
        # An incomplete first line is truncated only if it is the beginning of our own header.
        is_ours = json.dumps(expected).encode().startswith(self._file.read(20))
        self._file.seek(end := 0)
        for number, line in enumerate(iter(partial(self._file.readline, LINE_SIZE_BYTES_MAX), b""), 1):
            if not line.endswith(b"\n") and len(line) < LINE_SIZE_BYTES_MAX and (end or is_ours):
                break
            try:
                self._take(json.loads(line), expected if number == 1 else None)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                problem = f"{self.path} line {number} is not that of a resume file"
                raise Corrupt(problem, hint="name a new file") from error
            end += len(line)
        self._file.truncate(end)
        return end > 0

    def _take(self, fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
        """Take the ledger of a line, or check the header. Raise what the parsing of JSON of another form leads to."""
        if expected is None:
            entry_count, size_bytes = fields["entryCount"], fields["sizeBytes"]
            if not _NAME.fullmatch(fields["ledger"]) or {type(entry_count), type(size_bytes)} != {int}:
                raise ValueError(fields)
            self.entry_count += entry_count
            self.size_bytes += size_bytes
            self.done.add(LedgerId.from_value(int(fields["ledger"], 16)))
            return
        if fields.get("format") != FORMAT:
            raise ValueError(fields)
        if fields.get("version") != VERSION:
            raise Unsupported(
                f"{self.path} is a resume file of version {fields.get('version')!r}; version {VERSION} is known"
            )
        if fields["instanceId"] != expected["instanceId"]:
            raise Conflict(
                f"{self.path} belongs to cluster {fields['instanceId']!r}; this one is {expected['instanceId']!r}",
                hint="connect to the cluster of the file, or name a new file",
            )
        if fields["bookies"] != expected["bookies"]:
            names = ", ".join(map(str, fields["bookies"]))
            raise Conflict(
                f"{self.path} belongs to a recovery of {names}, not of {', '.join(expected['bookies'])}",
                hint="name the same bookies, or a new file",
            )

    def _append(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields).encode() + b"\n")
        self._file.flush()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()
