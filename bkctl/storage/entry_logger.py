"""EntryLogger: writes entry logs of one id space, and reads entries back at their locations.

An entry is added to memory and has its location at once; chunks of entries are written later, in order, by one storage
thread, and are synced at checkpoints. Scope 0 has one EntryLogger over the ledger directories' `current/`, all other
scopes have another over `current/scoped/`. Source: DefaultEntryLogger, EntryLoggerAllocator; BP-35.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from bkctl.errors import CorruptRecord, TruncatedRecord
from bkctl.formats import entry_log as formats
from bkctl.formats.entry import read_ledger
from bkctl.formats.layout import Buffer
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.storage.files import NO_SPACE, Files, StorageFile

#: Entry logs that are kept open to read.
OPEN_LOGS_MAX: Final = 128
#: A point read refuses less: it could not hold a ledger and an entry id. Source: DefaultEntryLogger.
ENTRY_SIZE_BYTES_MIN: Final = 16
ENTRY_SIZE_BYTES_MAX: Final = 1 << 30
#: What a read of an entry of unknown size fetches at first.
_READ_GUESS_BYTES: Final = 4096


class LoggedLedger(Protocol):
    """What the entry logger keeps at a ledger: the log it was last added to, and its bytes in it."""

    ledger: LedgerId
    log: Any
    log_bytes: int


class OpenLog:
    """The entry log that is being written. `position` is its end, with what is still in memory."""

    __slots__ = ("base", "file", "is_complete", "ledgers", "log_id", "path", "position")

    def __init__(self, log_id: int, path: Path) -> None:
        self.log_id = log_id
        self.base = log_id << 32
        self.path = path
        self.position = formats.HEADER_SIZE
        self.ledgers: list[LoggedLedger] = []
        self.file: StorageFile | None = None
        self.is_complete = False


class Chunk:
    """Consecutive records of one log, on their way to the disk. `entries` are its bodies by location.

    `ledgers` is the closing log's map, None while it goes on.
    """

    __slots__ = ("entries", "ledgers", "log", "parts", "size", "start")

    def __init__(self, log: OpenLog, start: int, parts: list[Buffer], entries: dict[int, Buffer]) -> None:
        self.log = log
        self.start = start
        self.size = log.position - start
        self.parts = parts
        self.entries = entries
        self.ledgers: dict[LedgerId, int] | None = None


class EntryLogger:
    """Writer and random reader of the entry logs in `directories`, which share one id space.

    `add`, `seal` and `find` belong to one thread (the bookie's event loop); `write`, `sync` and `read` may be called
    from any thread, and `sync` while another one writes.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        files: Files,
        *,
        scoped: bool,
        size_limit: int,
        pick_directory: Callable[[], int],
    ) -> None:
        self.directories = tuple(directories)
        self._version = formats.VERSION_SCOPED if scoped else formats.VERSION_CURRENT
        self._files = files
        self._size_limit = size_limit
        self._pick_directory = pick_directory
        self._log: OpenLog | None = None
        self._chunk_start = 0
        self._parts: list[Buffer] = []
        self._recent: dict[int, Buffer] = {}
        self._unwritten: tuple[Chunk, ...] = ()
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._readers: OrderedDict[int, StorageFile] = OrderedDict()
        self._unsynced: dict[int, OpenLog] = {}
        self._failed: OSError | None = None
        self._read_guess = _READ_GUESS_BYTES
        for directory in self.directories:
            for log_id, path in _logs_in(directory):
                self._paths.setdefault(log_id, path)
        self._last_id = max([*self._paths, *map(_read_last_id, self.directories)], default=-1)

    @property
    def log_ids(self) -> list[int]:
        """Ids of all logs, ascending."""
        return sorted(self._paths)

    @property
    def buffered_bytes(self) -> int:
        """Bytes added that no chunk holds yet."""
        return 0 if self._log is None else self._log.position - self._chunk_start

    @property
    def unwritten_bytes(self) -> int:
        """Bytes added that are not in the file yet."""
        return self.buffered_bytes + sum(chunk.size for chunk in self._unwritten)

    def add(self, ledger: LoggedLedger, size_field: bytes, body: Buffer) -> int:
        """Append one entry (`size_field` is its length as an int32); returns its location. In memory only."""
        size = len(body)
        log = self._log
        if log is None or (log.position + size + 4 > self._size_limit and log.position > formats.HEADER_SIZE):
            log = self._roll()
        at = log.position + 4
        log.position = at + size
        location = log.base | at
        parts = self._parts
        parts.append(size_field)
        parts.append(body)
        self._recent[location] = body
        if ledger.log is not log:
            ledger.log = log
            ledger.log_bytes = 0
            log.ledgers.append(ledger)
        ledger.log_bytes += size + 4
        return location

    def _roll(self) -> OpenLog:
        if self._log is not None:
            self._close_log(self._log)
        log_id = self._last_id
        while True:
            log_id = 0 if log_id >= formats.LOG_ID_MAX else log_id + 1
            if log_id not in self._paths:
                break
        self._last_id = log_id
        path = self.directories[self._pick_directory()] / formats.file_name(log_id)
        self._log = OpenLog(log_id, path)
        self._chunk_start = formats.HEADER_SIZE
        self._paths[log_id] = path
        return self._log

    def stay_in(self, numbers: Sequence[int]) -> None:
        """Complete the log that is being written, unless its directory is among `numbers`; what it has stays there."""
        log = self._log
        if log is not None and log.path.parent not in [self.directories[number] for number in numbers]:
            self._close_log(log)

    def _close_log(self, log: OpenLog) -> None:
        """Seal the last chunk of `log` together with its ledgers map."""
        totals: dict[LedgerId, int] = {}
        for ledger in log.ledgers:
            if ledger.log is log:
                totals[ledger.ledger] = totals.get(ledger.ledger, 0) + ledger.log_bytes
        log.ledgers.clear()
        self.seal(ledgers=totals)
        self._log = None

    def seal(self, ledgers: dict[LedgerId, int] | None = None) -> None:
        """Let the storage thread's next `write` take everything added so far."""
        log = self._log
        if log is None or (not self._parts and ledgers is None):
            return
        chunk = Chunk(log, self._chunk_start, self._parts, self._recent)
        chunk.ledgers = ledgers
        with self._lock:
            self._unwritten = (*self._unwritten, chunk)
        self._parts, self._recent, self._chunk_start = [], {}, log.position

    def write(self) -> None:
        """Write the sealed chunks to their files, unsynced; a failure (OSError) leaves them to the next call."""
        with self._write_lock:
            while self._unwritten:
                self._write_chunk(self._unwritten[0])
                with self._lock:
                    self._unwritten = self._unwritten[1:]

    def _write_chunk(self, chunk: Chunk) -> None:
        log = chunk.log
        file = log.file or self._create(log)
        end = chunk.start + file.write(chunk.start, chunk.parts)
        if chunk.ledgers is not None:
            file.write(end, list(formats.write_ledgers_map(chunk.ledgers, self._version)))
            file.write(0, (formats.write_header(self._version, end, len(chunk.ledgers)),))
        with self._lock:
            self._unsynced[log.log_id] = log
            log.is_complete = chunk.ledgers is not None

    def _create(self, log: OpenLog) -> StorageFile:
        if not log.path.parent.is_dir():
            self._files.make_directory(log.path.parent)
        file = self._files.open(log.path, create=True)
        file.write(0, (formats.write_header(self._version),))
        for directory in self.directories:
            if directory.is_dir():
                try:
                    self._files.replace(directory / formats.LAST_ID_NAME, formats.write_last_id(log.log_id))
                except OSError as error:
                    # It is a hint, and another directory than the log's may be full. Source: setLastLogId.
                    if error.errno not in NO_SPACE:
                        raise
        self._files.sync_directory(log.path.parent)
        log.file = file
        return file

    def sync(self) -> None:
        """Return when everything written so far is on disk. Raises OSError, after that always: the bookie has to stop.

        The system may drop what it could not sync, and then call the next sync a success; even a full disk (a thinly
        provisioned one says so only now) is no reason to try again. So the error is never ENOSPC.
        """
        if self._failed is not None:
            raise OSError(errno.EIO, *self._failed.args[1:])
        with self._lock:
            unsynced, self._unsynced = self._unsynced, {}
        for log in unsynced.values():
            is_complete, file = log.is_complete, log.file
            if file is None:
                continue  # it was completed while an earlier sync was about to take it, and so synced whole
            try:
                file.sync()
            except OSError as error:
                self._failed = OSError(errno.EIO, f"cannot be synced ({error.strerror or error})", str(log.path))
                raise self._failed from error
            if is_complete:
                log.file = None

    # --- reading -----------------------------------------------------------------------------------------------------

    def find(self, location: int) -> Buffer | None:
        """The entry at `location` if it is still in memory."""
        body = self._recent.get(location)
        if body is None:
            for chunk in self._unwritten:
                body = chunk.entries.get(location)
                if body is not None:
                    break
        return body

    def read(self, location: int, ledger: LedgerId, entry_id: int, *, cached: bool = False) -> memoryview | None:
        """The entry at `location` from its file; with `cached`, None where that needs the disk.

        Raises OSError, and CorruptRecord or TruncatedRecord when no such entry stands there.
        """
        log_id, offset = formats.unpack_location(location)
        file = self._reader(log_id)
        where = f"Entry {entry_id} of ledger {ledger}: {file.path}"
        if offset < formats.HEADER_SIZE + 4:
            raise CorruptRecord("No entry can stand", offset=offset, where=where)
        read = file.read_cached if cached else file.read
        data = read(offset - 4, 4 + self._read_guess)
        if cached and (data is None or len(data) < 4):
            return None
        assert data is not None
        if len(data) < 4:
            raise TruncatedRecord("Entry size", offset=offset - 4, needed=4, present=len(data), where=where)
        (size,) = RECORD_SIZE.unpack_from(data)
        if not ENTRY_SIZE_BYTES_MIN <= size <= ENTRY_SIZE_BYTES_MAX:
            raise CorruptRecord(f"An entry of {size} bytes", offset=offset - 4, where=where)
        if len(data) >= 4 + size:
            body = memoryview(data)[4 : 4 + size]
        else:
            rest = read(offset, size)
            if cached and (rest is None or len(rest) < size):
                return None
            assert rest is not None
            if len(rest) < size:
                raise TruncatedRecord("Entry", offset=offset, needed=size, present=len(rest), where=where)
            body = memoryview(rest)
        self._read_guess = min(max(size, 64), 1 << 16)
        found, at = read_ledger(body, 0, where)
        if len(body) < at + 8:
            raise TruncatedRecord("Entry id", offset=offset + at, needed=8, present=len(body) - at, where=where)
        if found != ledger or int.from_bytes(body[at : at + 8], "big", signed=True) != entry_id:
            raise CorruptRecord("Another entry stands", offset=offset, where=where)
        return body

    def _reader(self, log_id: int) -> StorageFile:
        with self._lock:
            file = self._readers.get(log_id)
            if file is not None:
                self._readers.move_to_end(log_id)
                return file
            path = self._paths.get(log_id)
        if path is None:
            raise FileNotFoundError(f"No entry log {log_id:x} in {', '.join(map(str, self.directories))}")
        file = self._files.open_to_read(path)
        with self._lock:
            self._readers[log_id] = file
            if len(self._readers) > OPEN_LOGS_MAX:
                self._readers.popitem(last=False)
        return file


def _logs_in(directory: Path) -> list[tuple[int, Path]]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [(log_id, directory / name) for name in names if (log_id := formats.log_id_of(name)) is not None]


def _read_last_id(directory: Path) -> int:
    """The id in `lastId`; -1 when it is absent or unparsable, as Apache takes it."""
    try:
        found = formats.read_last_id((directory / formats.LAST_ID_NAME).read_bytes())
    except OSError:
        return -1
    return -1 if found is None else found
