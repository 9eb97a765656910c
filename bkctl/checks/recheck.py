"""The entry logs that an index points into, and a second check of entries that did not fit.

The second check is in the current index, and in the journals that a restart would replay.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

from bkctl.checks.digests import DigestChecker, DigestMismatchAt
from bkctl.checks.findings import Counts, Finding, FindingKind
from bkctl.disk import Closing
from bkctl.errors import BkctlError, EntryNotFound, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes, IndexDatabases, LedgerIndex
from bkctl.files.journal import JournalReader
from bkctl.files.journals import files_after_marks
from bkctl.formats.entry_log import file_name, log_id_of, pack_location, unpack_location
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

#: Entries that are looked up together.
RETRY_ENTRIES: Final = 4096
_ROUNDS: Final = 3
_PAUSE_S: Final = 0.1
_NOT_INDEXED: Final = "the entry is in the log, but not in the index of its ledger"
_MAYBE_UNACKNOWLEDGED: Final = "; this log was not finished, so the entry may never have been acknowledged"
T = TypeVar("T")
EntryKey = tuple[LedgerId, int]


class IndexedLogs:
    """Entry logs that share one id space, and the index that points into them.

    `databases` is None for index files. The logs of the first `searched` directories (None: all) are searched for
    entries without an index; each log is searched once.
    """

    def __init__(
        self, currents: Iterable[Path], *, scoped: bool, databases: IndexDatabases | None, searched: int | None = None
    ) -> None:
        self.scoped, self.databases = scoped, databases
        self.directories = [current / SCOPED_DIRECTORY if scoped else current for current in currents]
        self.searched = self.directories[:searched]

    def paths(self) -> dict[int, Path]:
        """Return the present logs by id."""
        found: dict[int, Path] = {}
        for directory in self.directories:
            with suppress(OSError):
                for path in directory.iterdir():
                    if (log_id := log_id_of(path.name)) is not None:
                        found.setdefault(log_id, path)
        return found


def list_indexed_logs(directories: BookieDirectories, indexes: BookieIndexes, counts: Counts) -> list[IndexedLogs]:
    """Return the logs of each pair of databases, then the logs of the index files, scope 0 before scoped.

    Databases that cannot be opened are noted in `counts`. Raises UsageError if the logs of a database are ambiguous.
    """
    currents = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    pairs = indexes.databases()
    for error in indexes.problems:
        counts.note_error(error)
    found = [
        IndexedLogs([_log_directory(directories, pair, pairs)], scoped=pair.ledgers.scoped, databases=pair)
        for pair in pairs
    ]
    for scoped in (False, True):
        known = {_log_directory(directories, pair, pairs) for pair in pairs if pair.ledgers.scoped == scoped}
        ordered = sorted(currents, key=known.__contains__)
        lost = [] if indexes.problems else [current for current in ordered if current not in known]
        if pairs and len(lost) > 1:  # Beside databases, each directory has log ids of its own.
            found += (IndexedLogs([current], scoped=scoped, databases=None) for current in lost[1:])
            lost = lost[:1]
        found.append(IndexedLogs(ordered, scoped=scoped, databases=None, searched=len(lost)))
    return found


def _log_directory(directories: BookieDirectories, pair: IndexDatabases, pairs: list[IndexDatabases]) -> Path:
    """Return the directory of the logs that a database points into.

    A database beside logs points into them. With separate index directories, the ledger directory at the same position
    of the settings has the logs. Source: DbLedgerStorage.initialize.
    """
    own = pair.ledgers.path.parent
    ledger_dirs = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    index_dirs = list(dict.fromkeys(map(current_of, directories.index_dirs)))
    if directories.ledger_dirs != directories.index_dirs:
        if len(ledger_dirs) == len(index_dirs):
            return ledger_dirs[index_dirs.index(own)]
    elif _holds_logs(own) or len(ledger_dirs) == 1:
        return own
    databases = list(dict.fromkeys(other.ledgers.path.parent for other in pairs))
    candidates = [current for current in ledger_dirs if current not in databases and _holds_logs(current)]
    if not candidates:
        return own
    if len(candidates) == 1 == len(databases):
        return candidates[0]
    if len(candidates) == len(databases):
        return candidates[databases.index(own)]
    raise UsageError(
        f"The logs of {own} may be in any of {len(candidates)} directories", hint="use --conf bk_server.conf"
    )


def _holds_logs(current: Path) -> bool:
    return any(
        log_id_of(path.name) is not None
        for directory in (current, current / SCOPED_DIRECTORY)
        if directory.is_dir()
        for path in directory.iterdir()
    )


def digest_reason(mismatch: DigestMismatchAt) -> str:
    """Return the reason of a finding about a digest."""
    return f"the entry does not match its {mismatch.digest_type.name} digest"


class RecordLookup(Closing):
    """Reads single records of `logs`; the last log stays open. Use as a context manager."""

    def __init__(self, logs: IndexedLogs, digests: DigestChecker | None) -> None:
        self._logs, self._digests = logs, digests
        self._paths = logs.paths()
        # A reader that the cache drops closes its file.
        self._open = lru_cache(maxsize=1)(EntryLogReader.open)

    def close(self) -> None:
        self._open.cache_clear()

    def check(self, ledger: LedgerId, entry_id: int, location: int) -> tuple[Finding | None, int]:
        """Compare the record at `location` with the entry that the index has there.

        Returns the contradiction (None if the record is that entry) and the bytes read.
        """

        def finding(kind: FindingKind, path: Path, reason: str) -> Finding:
            return Finding(kind, path, reason, ledger, entry_id, location)

        log_id, offset = unpack_location(location)
        path = self._paths.get(log_id)
        missing = f"entry log {log_id} (0x{log_id:x}) does not exist"
        if path is None:
            return finding(FindingKind.LOG_MISSING, self._logs.directories[0] / file_name(log_id), missing), 0
        try:
            record = self._open(path).entry_at(offset)
        except EntryNotFound:
            return finding(FindingKind.NO_RECORD, path, "the log ends before"), 0
        except NotFound:
            return finding(FindingKind.LOG_MISSING, path, missing), 0
        except BkctlError as error:
            return finding(FindingKind.NO_RECORD, path, getattr(error, "problem", str(error))), 0
        found: Finding | None = None
        if record.type is not RecordType.ENTRY:
            found = finding(FindingKind.WRONG_ENTRY, path, f"a record of type {record.type} is there")
        elif (record.ledger, record.entry_id) != (ledger, entry_id):
            reason = f"entry {record.entry_id} of ledger {record.ledger} is there"
            found = finding(FindingKind.WRONG_ENTRY, path, reason)
        elif record.last_add_confirmed is None:
            found = finding(FindingKind.NO_RECORD, path, f"{record.record_size} bytes are too few for an entry")
        elif self._digests is not None and (mismatch := self._digests.check(record, str(path))) is not None:
            found = finding(FindingKind.DIGEST, path, digest_reason(mismatch))
        return found, record.record_size + 4


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
    except OSError:
        return False
    if status.st_mtime_ns // 1_000_000 >= marked_ms:
        return True
    is_behind = finding.offset is not None and finding.offset >= status.st_size
    return is_behind and _is_incomplete(finding.path, without_header=True)


class Recheck:
    """Confirms findings while the bookie may add, compact and delete.

    `counts` gets the entries that are not flushed, and the old copies.
    """

    def __init__(self, directories: BookieDirectories, counts: Counts, digests: DigestChecker | None) -> None:
        self._directories, self._counts, self._digests = directories, counts, digests
        self._unflushed = UnflushedEntries(directories)

    def entries(self, logs: IndexedLogs, entries: Iterable[EntryKey]) -> Iterator[Finding]:
        """Yield the findings about indexed `entries` that do not fit the log that the index names now."""
        for batch in _batches(entries):
            problems = self._lasting_problems(logs, batch)
            yield from self._flushed(problems).values()

    def _lasting_problems(self, logs: IndexedLogs, entries: list[EntryKey]) -> dict[EntryKey, Finding]:
        problems: dict[EntryKey, Finding] = {}
        for attempt in range(_ROUNDS):
            before, problems = problems, self._problems(logs, entries)
            if not problems or (problems == before and not self._unflushed.is_running):
                break
            entries = list(problems)
            if attempt < _ROUNDS - 1 and self._unflushed.is_running:
                time.sleep(_PAUSE_S)
        return problems

    def _problems(self, logs: IndexedLogs, entries: list[EntryKey]) -> dict[EntryKey, Finding]:
        problems: dict[EntryKey, Finding] = {}
        with BookieIndexes(self._directories) as indexes, RecordLookup(logs, self._digests) as records:
            for (ledger, entry_id), location in _current_locations(indexes, entries):
                if location:
                    problem, _ = records.check(ledger, entry_id, location)
                    if problem is not None:
                        problems[ledger, entry_id] = problem
        return problems

    def _flushed(self, findings: dict[EntryKey, Finding]) -> dict[EntryKey, Finding]:
        """Return the findings about entries that a restart would not replay; count the other entries."""
        if not findings:
            return findings
        unflushed = self._unflushed.find_in(findings)
        self._counts.not_flushed += len(unflushed)
        return {key: finding for key, finding in findings.items() if key not in unflushed}

    def unindexed_records(self, path: Path, records: Iterable[tuple[EntryKey, int]]) -> Iterator[Finding]:
        """Yield the findings about records (entry, location) of the log `path` that the index of now does not have."""
        for batch in _batches(records):
            findings = self._not_indexed(path, dict(batch))
            # A lost entry looks the same: the journal is gone, and neither index nor log has the time of a write.
            doubt = _MAYBE_UNACKNOWLEDGED if findings and _is_incomplete(path) else ""
            for finding in findings.values():
                yield finding._replace(reason=finding.reason + doubt)

    def _not_indexed(self, path: Path, records: dict[EntryKey, int]) -> dict[EntryKey, Finding]:
        # Two passes: an entry that reaches the index after the look there and before the look at the journals is in
        # neither.
        findings: dict[EntryKey, Finding] = {}
        for _ in range(2):
            entries = list(findings) or list(records)
            findings = {}
            with BookieIndexes(self._directories) as indexes:
                for (ledger, entry_id), location in _current_locations(indexes, entries):
                    if location:
                        self._counts.copies += 1
                    else:
                        location = records[ledger, entry_id]
                        finding = Finding(FindingKind.NOT_INDEXED, path, _NOT_INDEXED, ledger, entry_id, location)
                        findings[ledger, entry_id] = finding
            findings = self._flushed(findings)
            if not findings:
                break
        return findings

    def ledgers_without_index(self, logs: Mapping[LedgerId, Path]) -> Iterator[LedgerId]:
        """Yield the ledgers of which the index has no entry, in id order, except those that a restart replays.

        `logs` names a log that has entries of each ledger.
        """
        left = set(logs)
        for _ in range(2):  # For the reason that `_not_indexed` has.
            lacking: dict[Path, set[LedgerId]] = {}
            with BookieIndexes(self._directories) as indexes:
                for ledger in left:
                    with suppress(BkctlError):
                        index = indexes.find(ledger, first=True)
                        if index is not None and next(iter(index.locations()), None) is not None:
                            continue
                    lacking.setdefault(logs[ledger], set()).add(ledger)
            firsts = dict(first for path, ledgers in lacking.items() for first in _first_entries(path, ledgers))
            left = set().union(*lacking.values())
            left -= {ledger for ledger, _ in self._unflushed.find_in(firsts)} if firsts else set()
        yield from sorted(left)


def _first_entries(path: Path, ledgers: set[LedgerId]) -> Iterator[tuple[EntryKey, Finding]]:
    """Yield the first entry of each ledger in the log `path`; fewer if the log is damaged."""
    log_id, left = log_id_of(path.name) or 0, set(ledgers)
    with suppress(BkctlError), EntryLogReader.open(path) as reader:
        for record in reader.records():
            if record.ledger in left:
                location = pack_location(log_id, record.offset + 4)
                key = record.ledger, record.entry_id
                yield key, Finding(FindingKind.UNINDEXED, path, "", *key, location)
                left.remove(record.ledger)
                if not left:
                    return


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, RETRY_ENTRIES)):
        yield batch


def _current_locations(indexes: BookieIndexes, entries: Iterable[EntryKey]) -> Iterator[tuple[EntryKey, int]]:
    """Yield (entry, location) ledger by ledger; location 0: not indexed.

    Entries of ledgers without an index are left out, and so are entries of a damaged index, which is an error already.
    """
    grouped: dict[LedgerId, list[int]] = {}
    for ledger, entry_id in entries:
        grouped.setdefault(ledger, []).append(entry_id)
    for ledger, entry_ids in grouped.items():
        index: LedgerIndex | None = None
        with suppress(BkctlError):
            index = indexes.find(ledger, first=True)
        if index is None:
            continue
        with index:
            for entry_id in entry_ids:
                try:
                    location = index.location_of(entry_id)
                except BkctlError:
                    continue
                yield (ledger, entry_id), location


def _is_incomplete(path: Path, *, without_header: bool = False) -> bool:
    """Return True if the log was not completed: its bookie writes to it, or was killed."""
    try:
        with EntryLogReader.open(path) as reader:
            return without_header if reader.header is None else not reader.header.ledgers_map_offset
    except BkctlError:
        return False
