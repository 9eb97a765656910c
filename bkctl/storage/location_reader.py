"""LocationReader: reads entries back at their locations, from the entry logs of one id space.

Source: DefaultEntryLogger.readEntry.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bkctl.disk import Files, StorageFile
from bkctl.errors import CorruptRecord, TruncatedRecord, Unsupported
from bkctl.formats import entry_log as formats
from bkctl.formats.entry import ENTRY_FLAGS_V2, read_ledger
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId

#: Entry logs that are kept open to read.
OPEN_LOGS_MAX: Final = 128
#: A point read refuses smaller entries: they could not hold a ledger and an entry id. Source: DefaultEntryLogger.
ENTRY_SIZE_BYTES_MIN: Final = 16
ENTRY_SIZE_BYTES_MAX: Final = 1 << 30
#: Bytes that the first read of an entry of unknown size fetches.
_READ_GUESS_BYTES: Final = 4096
#: Entries that begin at most this many bytes after one another are read together, with what is between them.
NEIGHBOURS_BYTES_MAX: Final = 1 << 15
#: Entries that keep more than this many times their size in memory are copied: a batch of small ones far apart would
#: keep whole reads, of which no limit counts more than the entries.
KEPT_FACTOR_MAX: Final = 2
#: A run leaves larger entries to `LocationReader.read`.
RUN_ENTRY_BYTES_MAX: Final = 1 << 24
_IDS_V1: Final = struct.Struct(">iQq")
_IDS_V2: Final = struct.Struct(">iBQQq")


class LocationReader:
    """Reader of the logs in `paths`, by log id, below `directories`. Any thread may use it."""

    def __init__(self, files: Files, directories: Sequence[Path], paths: Mapping[int, Path]) -> None:
        self._files = files
        self._directories = directories
        self._paths = paths
        self._open: OrderedDict[int, StorageFile] = OrderedDict()
        self._read_guess = _READ_GUESS_BYTES
        self._lock = threading.Lock()

    def path_of(self, log_id: int) -> Path:
        """Return the path of a log. Raises FileNotFoundError."""
        path = self._paths.get(log_id)
        if path is None:
            raise FileNotFoundError(f"No entry log {log_id:x} in {', '.join(map(str, self._directories))}")
        return path

    def read(self, location: int, ledger: LedgerId, entry_id: int) -> memoryview:
        """Return the entry at `location` from its file.

        Raises OSError; CorruptRecord or TruncatedRecord if `location` does not hold that entry.
        """
        log_id, offset = formats.unpack_location(location)
        file = self._file(log_id)
        where = f"Entry {entry_id} of ledger {ledger}: {file.path}"
        if offset < formats.HEADER_SIZE + 4:
            raise CorruptRecord("The index points into the file header", offset=offset, where=where)
        data = file.read(offset - 4, 4 + self._read_guess)
        if len(data) < 4:
            raise TruncatedRecord("Entry size", offset=offset - 4, needed=4, present=len(data), where=where)
        (size,) = RECORD_SIZE.unpack_from(data)
        if not ENTRY_SIZE_BYTES_MIN <= size <= ENTRY_SIZE_BYTES_MAX:
            raise CorruptRecord(f"An entry of {size} bytes", offset=offset - 4, where=where)
        if len(data) >= 4 + size:
            body = memoryview(data)[4 : 4 + size]
        else:
            rest = file.read(offset, size)
            if len(rest) < size:
                raise TruncatedRecord("Entry", offset=offset, needed=size, present=len(rest), where=where)
            body = memoryview(rest)
        self._read_guess = min(max(size, 64), 1 << 16)
        try:
            found, at = read_ledger(body, 0, where)
        except Unsupported as error:  # no bookie keeps such an entry in a log
            raise CorruptRecord(error.message, offset=offset) from error
        if len(body) < at + 8:
            raise TruncatedRecord("Entry id", offset=offset + at, needed=8, present=len(body) - at, where=where)
        if found != ledger or int.from_bytes(body[at : at + 8], "big", signed=True) != entry_id:
            raise CorruptRecord("The index points to another entry", offset=offset, where=where)
        return body

    def read_run(
        self,
        ledger: LedgerId,
        entry_ids: Sequence[int],
        locations: Sequence[int],
        size_max: int,
        *,
        cached: bool = False,
    ) -> list[memoryview | None]:
        """Return the entries at `locations`, each run of neighbours by one read; with `cached` without the disk.

        None for an entry without a location (0), and for one that `read` does not return, or with `cached` not yet. The
        list ends early, behind at least one entry, once it has `size_max` bytes. Raises nothing.
        """
        found: list[memoryview | None] = []
        size = 0
        while len(found) < len(locations) and size < size_max:
            first = len(found)
            begin = end = locations[first]
            last = first + 1
            gap = 0
            while begin and last < len(locations) and 0 < locations[last] - end <= NEIGHBOURS_BYTES_MAX:
                if locations[last] - begin > size_max - size:
                    break
                gap = locations[last] - end
                end = locations[last]
                last += 1
            data = self._run_of(begin, end, gap, cached=cached) if begin else None
            if data is None:
                found += [None] * (last - first)
            else:
                entries = entries_in(data, begin, ledger, entry_ids[first:last], locations[first:last])
                if len(data) > KEPT_FACTOR_MAX * sum(len(body) for body in entries if body is not None):
                    entries = [None if body is None else memoryview(bytes(body)) for body in entries]
                found += entries
                size += len(data)
        return found

    def _run_of(self, begin: int, end: int, size_guess: int, *, cached: bool) -> memoryview | None:
        """Return the records from the one at location `begin` to that at `end`, of about `size_guess` bytes."""
        log_id, offset = formats.unpack_location(begin)
        try:
            file = self._open.get(log_id) if cached else self._file(log_id)
            if file is None or offset < formats.HEADER_SIZE + RECORD_SIZE.size or end >> 32 != begin >> 32:
                return None
            read = file.read_cached if cached else file.read
            start, last = offset - RECORD_SIZE.size, end - begin
            data = read(start, last + RECORD_SIZE.size + max(self._read_guess, size_guess))
            if data is not None and len(data) >= last + RECORD_SIZE.size:
                (size,) = RECORD_SIZE.unpack_from(data, last)
                missing = last + RECORD_SIZE.size + size - len(data)
                if 0 < missing <= RUN_ENTRY_BYTES_MAX:
                    rest = read(start + len(data), missing)
                    data = b"".join((data, rest or b""))
                if ENTRY_SIZE_BYTES_MIN <= size <= RUN_ENTRY_BYTES_MAX:
                    self._read_guess = min(max(size, 64), 1 << 16)
        except OSError:
            return None
        return None if data is None else memoryview(data)

    def read_following(self, location: int, ledger: LedgerId, *, size_max: int) -> list[tuple[int, memoryview]]:
        """Return the entries (id, body) of `ledger` that follow each other from `location`, within `size_max` bytes.

        The list ends before the first record of another ledger; it may be empty. Raises OSError.
        """
        log_id, offset = formats.unpack_location(location)
        data = memoryview(self._file(log_id).read(offset - 4, size_max))
        ids = _IDS_V2 if ledger[0] else _IDS_V1
        entries: list[tuple[int, memoryview]] = []
        at = 0
        while at + ids.size <= len(data):
            size, *flags, ledger_id, entry_id = ids.unpack_from(data, at)
            end = at + RECORD_SIZE.size + size
            if ledger_id != ledger[1] or at + ids.size > end or end > len(data):
                break
            if flags and (flags[0] not in ENTRY_FLAGS_V2 or flags[1] != ledger[0]):
                break
            entries.append((entry_id, data[at + RECORD_SIZE.size : end]))
            at = end
        if at * KEPT_FACTOR_MAX < len(data):  # a cache of these entries must not keep the whole read in memory
            entries = [(entry_id, memoryview(bytes(body))) for entry_id, body in entries]
        return entries

    def _file(self, log_id: int) -> StorageFile:
        with self._lock:
            file = self._open.get(log_id)
            if file is not None:
                self._open.move_to_end(log_id)
                return file
        file = self._files.open_to_read(self.path_of(log_id))
        with self._lock:
            if log_id in self._paths:  # the space of a log removed meanwhile is freed
                self._open[log_id] = file
            if len(self._open) > OPEN_LOGS_MAX:
                self._open.popitem(last=False)
        return file

    def close(self, log_id: int) -> None:
        """Close a log; call it after the log left `paths`, so that it cannot be opened again."""
        with self._lock:
            self._open.pop(log_id, None)


def entries_in(
    data: memoryview, begin: int, ledger: LedgerId, entry_ids: Sequence[int], locations: Sequence[int]
) -> list[memoryview | None]:
    """Return entries of `ledger` from `data`, which begins with the record at location `begin`.

    None for an entry that is not whole, or not the one at its location.
    """
    found: list[memoryview | None] = []
    unpack = (_IDS_V2 if ledger[0] else _IDS_V1).unpack_from
    ledger_id = ledger[1]
    present = len(data)
    smallest = (_IDS_V2 if ledger[0] else _IDS_V1).size
    for entry_id, location in zip(entry_ids, locations, strict=True):
        at = location - begin
        body = None
        if 0 <= at <= present - smallest:
            size, *flags, found_ledger, found_id = unpack(data, at)
            end = at + RECORD_SIZE.size + size
            if (
                found_id == entry_id
                and found_ledger == ledger_id
                and smallest - RECORD_SIZE.size <= size
                and end <= present
                and (not flags or (flags[0] in ENTRY_FLAGS_V2 and flags[1] == ledger[0]))
            ):
                body = data[at + RECORD_SIZE.size : end]
        found.append(body)
    return found
