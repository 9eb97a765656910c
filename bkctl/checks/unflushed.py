"""Entries that a restart would replay: they may be missing in an index without a fault."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from bkctl.checks.findings import Finding
from bkctl.errors import BkctlError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.files.journals import files_after_marks
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

EntryKey = tuple[LedgerId, int]


class UnflushedEntries:
    """The entries in the journals behind the last marks.

    Without journals, everything written to a log since the last mark counts, if the bookie runs or was killed.
    """

    def __init__(self, directories: BookieDirectories) -> None:
        self._directories = directories
        self._runs: dict[LedgerId, list[list[int]]] = {}
        self._read_to: dict[Path, int] = {}

    @property
    def is_running(self) -> bool:
        """Return True if the bookie runs or was killed. Source: DirtyFile, which a clean stop removes."""
        return any((current_of(directory) / "DIRTY").exists() for directory in self._directories.ledger_dirs)

    def find_in(self, findings: dict[EntryKey, Finding]) -> Collection[EntryKey]:
        """Return the entries of `findings` that are not flushed, after reading what the journals got meanwhile."""
        journals = [file.path for file in self._directories.journals()]
        if not journals:
            if not self.is_running:
                return ()
            marked_ms = max((file.mtime_ms for file in self._directories.last_marks()), default=0)
            return [key for key, finding in findings.items() if _may_be_unflushed(finding, marked_ms)]
        try:
            starts = files_after_marks(self._directories, journals)
        except BkctlError:
            starts = dict.fromkeys(journals, 0)
        for path, start in starts.items():
            self._read(path, max(start, self._read_to.get(path, 0)))
        return [key for key in findings if self._holds(*key)]

    def _read(self, path: Path, start: int) -> None:
        with suppress(BkctlError), JournalReader.open(path) as reader:
            for record in reader.records(start):
                self._read_to[path] = record.offset
                if record.type is RecordType.ENTRY:
                    runs = self._runs.setdefault(record.ledger, [])
                    if runs and runs[-1][1] + 1 == record.entry_id:
                        runs[-1][1] += 1
                    elif not runs or not runs[-1][0] <= record.entry_id <= runs[-1][1]:
                        runs.append([record.entry_id, record.entry_id])

    def _holds(self, ledger: LedgerId, entry_id: int) -> bool:
        return any(first <= entry_id <= last for first, last in self._runs.get(ledger, ()))


def _may_be_unflushed(finding: Finding, marked_ms: int) -> bool:
    """Return True if the log was written after the last mark, or is open and ends before the record (in memory)."""
    try:
        status = finding.path.stat()
        if status.st_mtime_ns // 1_000_000 >= marked_ms:
            return True
        with EntryLogReader.open(finding.path) as reader:
            is_open = reader.header is None or not reader.header.ledgers_map_offset
    except (OSError, BkctlError):
        return False
    return is_open and finding.offset is not None and finding.offset >= status.st_size
