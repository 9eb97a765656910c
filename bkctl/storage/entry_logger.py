"""EntryLogger: the writer of the entry logs of one id space.

An entry has its location once it is added, and is written with those added before it, in order; checkpoints sync
them. Garbage collection removes logs and writes compacted ones. Scope 0 has one EntryLogger over the
ledger directories' `current/`, all other scopes share another over `current/scoped/`.
Source: DefaultEntryLogger, EntryLoggerAllocator; BP-35.
"""

from __future__ import annotations

import errno
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.disk import DISK_FULL, NO_SPACE, Files, StorageFile, names_in
from bkctl.errors import on_error
from bkctl.formats import entry_log as formats
from bkctl.formats.entry import read_ledger
from bkctl.formats.layout import Buffer
from bkctl.formats.names import LAST_ID_NAME
from bkctl.formats.record import RECORD_SIZE, body_of, record_of
from bkctl.ids import LedgerId
from bkctl.storage.location_reader import LocationReader

#: Bytes that a compaction's log gathers in memory before it writes them.
COMPACTION_CHUNK_BYTES: Final = 1 << 20


class Move(NamedTuple):
    """A second copy of an entry, at location `new`, while the index still points to `old`."""

    ledger: LedgerId
    entry_id: int
    old: int
    new: int


class OpenLog:
    """The entry log that is being written. `position` is its end, entries in memory included."""

    __slots__ = ("base", "file", "is_complete", "log_id", "path", "position", "totals")

    def __init__(self, log_id: int, path: Path) -> None:
        self.log_id = log_id
        self.base = log_id << 32
        self.path = path
        self.position = formats.HEADER_SIZE
        #: Bytes of each ledger in the log, size fields included.
        self.totals: dict[LedgerId, int] = {}
        self.file: StorageFile | None = None
        self.is_complete = False


@dataclass(slots=True, eq=False)
class Chunk:
    """Consecutive records of one log, on their way to the disk.

    `totals` is the ledgers map of a log that ends with the chunk, else None.
    """

    log: OpenLog
    start: int
    records: list[bytes]
    totals: dict[LedgerId, int] | None


class EntryLogger:
    """Writer of the entry logs in `directories`, which share one id space. Records are entries behind an int32 size.

    Creating one finishes or rolls back an interrupted compaction (Apache's or ours). `add_all`, `stay_in`, `write`
    and `relocate` belong to one thread at a time; any thread may call the other methods, and `sync` while another
    thread writes. `preallocates`: the file of the next log is created together with the one that begins.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        files: Files,
        *,
        scoped: bool,
        size_limit: int,
        pick_directory: Callable[[], int],
        preallocates: bool = False,
    ) -> None:
        self.directories = tuple(directories)
        self.version = formats.VERSION_SCOPED if scoped else formats.VERSION_CURRENT
        self._files, self._size_limit = files, size_limit
        self._pick_directory, self._preallocates = pick_directory, preallocates
        self._log: OpenLog | None = None
        self._next: OpenLog | None = None
        self._chunk_start = 0
        self._records: list[bytes] = []
        self._unwritten: deque[Chunk] = deque()
        self._lock, self._create_lock = threading.Lock(), threading.Lock()
        self._paths: dict[int, Path] = {}
        self._reader = LocationReader(files, self.directories, self._paths)
        self.path_of, self.read = self._reader.path_of, self._reader.read
        self.read_following, self.read_run = self._reader.read_following, self._reader.read_run
        self._unsynced: dict[int, OpenLog] = {}
        #: The directory that had no space for the last `write`; None if it succeeded, or failed for another reason.
        self.full_directory: Path | None = None
        self._failed: OSError | None = None
        for directory in self.directories:
            _settle_compactions(self._files, directory)
            for name in names_in(directory):
                if (log_id := formats.log_id_of(name)) is not None:
                    self._paths.setdefault(log_id, directory / name)
        self._flushed = set(self._paths)
        self._last_id = max([*self._paths, *map(_read_last_id, self.directories)], default=-1)

    @property
    def log_ids(self) -> list[int]:
        """Return the ids of all logs, ascending."""
        return sorted(self._paths)

    def flushed_log_ids(self) -> list[int]:
        """Return the ids of the logs that are complete and on disk, ascending."""
        with self._lock:
            return sorted(self._flushed)

    def remove_log(self, log_id: int) -> None:
        """Delete a flushed log, durably; a missing log is ignored. Raises OSError."""
        with self._lock:
            path = self._paths.get(log_id)
        if path is None:
            return
        self._files.remove(path)
        self._files.sync_directory(path.parent)
        with self._lock:
            self._flushed.discard(log_id)
            self._paths.pop(log_id, None)
        self._reader.close(log_id)

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes added since the last `write`, of the log that is being written."""
        return 0 if self._log is None else self._log.position - self._chunk_start

    def add_all(self, ledger: LedgerId, records: Sequence[bytes]) -> list[int]:
        """Append entries of one ledger; return their locations. Callers keep them readable until `write` is done."""
        locations: list[int] = []
        size = sum(map(len, records))
        while size:
            log, added, added_size = self._append(records, size)
            log.totals[ledger] = log.totals.get(ledger, 0) + added_size
            locations += added
            records, size = records[len(added) :], size - added_size
        return locations

    def _append(self, records: Sequence[bytes], size: int) -> tuple[OpenLog, list[int], int]:
        """Append as many of `records`, `size` bytes, as fit the log; return the log, their locations, their bytes."""
        log = self._log or self._roll()
        room = self._size_limit - log.position
        if size > room:
            ends = list(accumulate(map(len, records)))
            count = bisect_right(ends, room)
            if not count and log.position > formats.HEADER_SIZE:
                self._roll()
                return self._append(records, size)
            records = records[: max(count, 1)]
            size = ends[len(records) - 1]
        locations = list(accumulate(map(len, records), initial=log.base + log.position + RECORD_SIZE.size))
        locations.pop()
        log.position += size
        self._records += records
        return log, locations, size

    def _roll(self) -> OpenLog:
        if self._log is not None:
            self._close_log(self._log)
        number = self._pick_directory()
        with self._lock:
            log, self._next = self._next, None
        if log is None or log.path.parent != self.directories[number]:
            if log is not None:
                self._abandon(log)
            log_id = self._allocate_id()
            log = OpenLog(log_id, self.directories[number] / formats.file_name(log_id))
            self._paths[log_id] = log.path
        self._log = log
        self._chunk_start = formats.HEADER_SIZE
        return log

    def _allocate_id(self) -> int:
        with self._lock:
            log_id = self._last_id
            while True:
                log_id = 0 if log_id >= formats.LOG_ID_MAX else log_id + 1
                if log_id not in self._paths:
                    break
            self._last_id = log_id
            return log_id

    def _abandon(self, log: OpenLog) -> None:
        """Leave an empty log to garbage collection."""
        with self._lock:
            log.file = None
            self._flushed.add(log.log_id)

    def stay_in(self, numbers: Sequence[int]) -> None:
        """Complete the log that is being written, unless its directory is among `numbers`."""
        log = self._log
        if log is not None and log.path.parent not in [self.directories[number] for number in numbers]:
            self._close_log(log)

    def _close_log(self, log: OpenLog) -> None:
        """Seal the last chunk of `log` together with its ledgers map."""
        self._seal(totals=log.totals)
        self._log = None

    def _seal(self, totals: dict[LedgerId, int] | None = None) -> None:
        """Make a chunk of everything added since the last one; `totals` is the ledgers map if it ends the log."""
        log = self._log
        if log is not None and (self._records or totals is not None):
            self._unwritten.append(Chunk(log, self._chunk_start, self._records, totals))
            self._records, self._chunk_start = [], log.position

    def write(self) -> None:
        """Write everything added so far, unsynced. Raises OSError; the next call writes the rest."""
        self._seal()
        while self._unwritten:
            chunk = self._unwritten[0]
            try:
                self._write_chunk(chunk)
            except OSError as error:
                self.full_directory = chunk.log.path.parent if error.errno in DISK_FULL else None
                raise
            self._unwritten.popleft()
        self.full_directory = None

    def _write_chunk(self, chunk: Chunk) -> None:
        log = chunk.log
        file = log.file or self._create(log)
        end = chunk.start + file.write(chunk.start, chunk.records)
        if chunk.totals is not None:
            file.write(end, list(formats.write_ledgers_map(chunk.totals, self.version)))
            file.write(0, (formats.write_header(self.version, end, len(chunk.totals)),))
        with self._lock:
            self._unsynced[log.log_id] = log
            log.is_complete = chunk.totals is not None

    def _create(self, log: OpenLog) -> StorageFile:
        with self._create_lock:
            file = self._make_file(log.path)
            following = self._make_next(log.path.parent) if self._preallocates and self._next is None else None
            self._write_last_id()
            self._files.sync_directory(log.path.parent)
            with self._lock:
                self._next = following or self._next
        log.file = file
        return file

    def _make_next(self, directory: Path) -> OpenLog | None:
        """Return the next log, created ahead; None on a full disk: nothing needs it yet."""
        log_id = self._allocate_id()
        log = OpenLog(log_id, directory / formats.file_name(log_id))
        try:
            log.file = self._make_file(log.path)
        except OSError as error:
            self._files.remove(log.path)
            if error.errno not in NO_SPACE:
                raise
            return None
        self._paths[log_id] = log.path
        return log

    def _make_file(self, path: Path) -> StorageFile:
        if not path.parent.is_dir():
            self._files.make_directory(path.parent)
        file = self._files.open(path, create=True)
        # Else every start on a full disk would leave one more.
        with on_error(partial(self._files.remove, path), OSError), on_error(file.close):
            file.write(0, (formats.write_header(self.version),))
        return file

    def _write_last_id(self) -> None:
        for directory in self.directories:
            if directory.is_dir():
                try:
                    self._files.replace(directory / LAST_ID_NAME, formats.write_last_id(self._last_id))
                except OSError as error:
                    # `lastId` is a hint, and another directory than the log's may be full. Source: setLastLogId.
                    if error.errno not in NO_SPACE:
                        raise

    def relocate(self, moved: Callable[[list[Move]], None]) -> bool:
        """Move the entries that a full disk refused to a log in the directory that `pick_directory` returns now.

        Return False if that is the full directory. Call `moved` with the new locations, for the index; the old ones
        are on no disk. The log in the full directory ends where it is. Raises what `moved` raises.
        """
        full, self.full_directory = self.full_directory, None
        if full is None or self.directories[self._pick_directory()] == full:
            return False
        self._seal()
        stuck = [chunk for chunk in self._unwritten if chunk.log.path.parent == full]
        if self._log is not None and self._log.path.parent == full:
            self._log = None
        if self._next is not None and self._next.path.parent == full:
            following, self._next = self._next, None
            self._abandon(following)
        moves: list[Move] = []
        for chunk in stuck:
            at = chunk.start + RECORD_SIZE.size
            for record in chunk.records:
                ledger, entry_id = _ids_of(body_of(record))
                (new,) = self.add_all(ledger, (record,))
                moves.append(Move(ledger, entry_id, chunk.log.base | at, new))
                at += len(record)
        moved(moves)
        self._unwritten = deque(chunk for chunk in self._unwritten if chunk not in stuck)
        for log, start in {chunk.log: chunk.start for chunk in reversed(stuck)}.items():
            self._end_early(log, start)
        return True

    def _end_early(self, log: OpenLog, end: int) -> None:
        """End `log` at byte `end` without a ledgers map, as if the bookie had been killed then."""
        if log.file is not None:
            with suppress(OSError):  # what a write left there ends the log as well
                log.file.truncate(end)
            with self._lock:
                log.is_complete = True
                self._unsynced[log.log_id] = log
        else:
            with self._lock:
                del self._paths[log.log_id]
            with suppress(OSError):  # its directory may be missing too; a file that stays is empty
                self._files.remove(log.path)

    def close(self) -> None:
        """Remove the log that was created ahead, which is empty."""
        with self._lock:
            following, self._next = self._next, None
        if following is not None:
            with suppress(OSError):  # else garbage collection removes it
                self.remove_log(following.log_id)

    def open_compaction_log(self) -> CompactionLog:
        """Return a new log for the entries that compaction keeps; it counts once it is finished. Raises OSError."""
        directory = self.directories[self._pick_directory()]
        log_id = self._allocate_id()
        path = directory / f"{formats.file_name(log_id)}.compacting"
        with self._create_lock, on_error(partial(self._files.remove, path), OSError):
            file = self._make_file(path)
            self._write_last_id()
        return CompactionLog(self, self._files, log_id, file)

    def take_compacted(self, log_id: int, path: Path) -> None:
        """Give a finished log of a compaction its name, durably: it counts from now on. Raises OSError."""
        final = path.with_name(formats.file_name(log_id))
        self._files.rename(path, final)
        self._files.sync_directory(final.parent)
        with self._lock:
            self._paths[log_id] = final
            self._flushed.add(log_id)

    def sync(self) -> None:
        """Return when everything written so far is on disk. Raises OSError, then again on each call: stop the bookie.

        The system may drop the data that it could not sync, and report success for the next sync. So a retry is never
        safe, even on a full disk (a thinly provisioned one fails only here), and the error is never ENOSPC.
        """
        if self._failed is not None:
            raise OSError(errno.EIO, *self._failed.args[1:])
        with self._lock:
            unsynced, self._unsynced = self._unsynced, {}
        for log in unsynced.values():
            is_complete, file = log.is_complete, log.file
            if file is None:
                continue  # completed while an earlier sync was about to take it, and so synced whole
            try:
                file.sync()
            except Exception as error:
                reason = getattr(error, "strerror", None) or error
                self._failed = OSError(errno.EIO, f"cannot be synced ({reason})", str(log.path))
                raise self._failed from error
            if is_complete:
                log.file = None
                with self._lock:
                    self._flushed.add(log.log_id)


class CompactionLog:
    """A log that compaction writes, `<id>.log.compacting` until it is finished. For one thread.

    Source: DefaultEntryLogger.EntryLoggerCompactionEntryLog.
    """

    def __init__(self, logger: EntryLogger, files: Files, log_id: int, file: StorageFile) -> None:
        self.log_id = log_id
        self._logger, self._files, self._file = logger, files, file
        self._written = self._position = formats.HEADER_SIZE
        self._records: list[bytes] = []
        self._totals: dict[LedgerId, int] = {}

    @property
    def unwritten_bytes(self) -> int:
        return self._position - self._written

    def add(self, ledger: LedgerId, body: Buffer) -> int:
        """Append a copy of one entry; return its location once the log is finished. Raises OSError."""
        record = record_of(body)
        location = formats.pack_location(self.log_id, self._position + RECORD_SIZE.size)
        self._records.append(record)
        self._position += len(record)
        self._totals[ledger] = self._totals.get(ledger, 0) + len(record)
        if self._position - self._written >= COMPACTION_CHUNK_BYTES:
            self._write()
        return location

    def _write(self) -> None:
        self._file.write(self._written, self._records)
        self._records, self._written = [], self._position

    def finish(self) -> None:
        """Complete the log with its ledgers map, durably, as an entry log. Raises OSError: then `abort` it."""
        self._write()
        version = self._logger.version
        self._file.write(self._written, list(formats.write_ledgers_map(self._totals, version)))
        self._file.write(0, (formats.write_header(version, self._written, len(self._totals)),))
        self._file.sync()
        self._logger.take_compacted(self.log_id, self._file.path)

    def abort(self) -> None:
        """Remove the log; nothing may point into it. Raises OSError."""
        self._files.remove(self._file.path)
        self._files.sync_directory(self._file.path.parent)


def _settle_compactions(files: Files, directory: Path) -> None:
    """Remove the unfinished logs of compactions, and give the finished ones the name of an entry log.

    The index may point into a finished one and into its source log. Source: incompleteCompactionLogs.
    """
    changed = False
    for name in names_in(directory):
        compaction = formats.compaction_of(name)
        if compaction is None:
            continue
        final = directory / formats.file_name(compaction.log_id)
        if compaction.source_id is None or final.exists():
            files.remove(directory / name)
        else:
            files.rename(directory / name, final)
        changed = True
    if changed:
        files.sync_directory(directory)


def _ids_of(body: Buffer) -> tuple[LedgerId, int]:
    ledger, at = read_ledger(body)
    return ledger, int.from_bytes(body[at : at + 8], "big", signed=True)


def _read_last_id(directory: Path) -> int:
    """Return the id in `lastId`; -1 when it is absent or unparsable, as Apache reads it."""
    try:
        found = formats.read_last_id((directory / LAST_ID_NAME).read_bytes())
    except OSError:
        return -1
    return -1 if found is None else found
