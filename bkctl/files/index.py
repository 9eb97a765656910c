"""The ledger indexes of a bookie, read offline or beside the bookie: of one ledger or all, for every storage class.

The index of a ledger is a file of its own (Interleaved, Sorted), or in the RocksDBs of DbLedgerStorage.

Source: FileInfo, LedgerEntryPage, IndexPersistenceMgr, LedgerCommand.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from bkctl.disk import Closing
from bkctl.errors import BkctlError, Corrupt, LedgerNotFound, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, FileKind, current_of
from bkctl.files.rocksdb import REBUILD_HINT, LedgersDatabase, LocationsDatabase
from bkctl.files.windows import WINDOW_SIZE_BYTES, FileReader
from bkctl.formats.entry import read_lac_header
from bkctl.formats.entry_log import pack_location, unpack_location
from bkctl.formats.index import (
    HEADER_SIZE,
    SLOT_SIZE,
    IndexHeader,
    LedgerData,
    index_path,
    ledger_of_index_path,
    read_header,
    slot_offset,
)
from bkctl.formats.names import COOKIE_NAME
from bkctl.formats.record import RECORD_SIZE, Record
from bkctl.ids import LedgerId

#: Suffix of the leftover of a relocation; it is the index itself if the ledger has no other index file.
RELOCATION_SUFFIX: Final = ".rloc"

_NEW_FILE_S: Final = 2.0
_NEW_FILE_PAUSE_S: Final = 0.02
_SLOT: Final = Struct(">q")


class LedgerIndexReader(FileReader):
    """The index file of one ledger: `header` (master key, fenced, explicit LAC packet) and the locations of entries.

    `ledger` is the ledger of the file's place below `current`; None for a file elsewhere.
    Raises NotFound, UsageError (a directory), CorruptRecord and TruncatedRecord (the header), Unsupported.
    """

    def _begin(self) -> None:
        self.header = read_header(self.read(0, HEADER_SIZE) or self._header_of_new_file(), self.name)
        self.ledger = ledger_of_index_path(str(self.path.absolute()).removesuffix(RELOCATION_SUFFIX))

    def _header_of_new_file(self) -> bytes:
        """Return the header of a file that was empty, as soon as its bookie has written it; empty without one.

        A running bookie creates the file before it writes the header; nothing waits for an older file.
        """
        start = b""
        deadline_s = time.monotonic() + _NEW_FILE_S
        is_new = abs(time.time() - self.stat().st_mtime) < _NEW_FILE_S
        while not start and is_new and time.monotonic() < deadline_s:
            time.sleep(_NEW_FILE_PAUSE_S)
            start = self.read(0, HEADER_SIZE)
        return start

    @property
    def slot_count(self) -> int:
        """Return the number of whole slots in the file, one for each entry id."""
        return max(0, self.size() - HEADER_SIZE) // SLOT_SIZE

    def locations(self) -> Iterator[tuple[int, int]]:
        """Yield (entry id, location) of the present entries in order.

        A location is the log id and the offset of the entry (`entry_log.unpack_location`).
        """
        for first, page in self.pages():
            for entry_id, location in enumerate(page, first):
                if location:
                    yield entry_id, location

    def pages(self, first: int = 0, end: int | None = None) -> Iterator[tuple[int, array[int]]]:
        """Yield (first entry id, locations) in order, a window of slots at a time; skip holes of the file.

        From entry `first` on, and before entry `end` (None: to the file's end).
        """
        entry_id = first
        while end is None or entry_id < end:
            data = self.skip_hole(slot_offset(entry_id))
            if data is None:
                return
            entry_id = max(entry_id, (data - HEADER_SIZE) // SLOT_SIZE)
            window = self.window(slot_offset(entry_id))
            count = len(window) // SLOT_SIZE
            if end is not None:
                count = min(count, end - entry_id)
            if count <= 0:
                return
            slots = array("q", window[: count * SLOT_SIZE])
            if sys.byteorder == "little":
                slots.byteswap()
            yield entry_id, slots
            entry_id += count

    def location_of(self, entry_id: int) -> int:
        """Return the location of an entry; 0 if the entry is missing."""
        if not 0 <= entry_id < self.slot_count:
            return 0
        data = self.read(slot_offset(entry_id), SLOT_SIZE)
        return int(_SLOT.unpack(data)[0]) if len(data) == SLOT_SIZE else 0

    @property
    def last_entry_id(self) -> int:
        """Return the highest entry id with a location; -1 without entries. Source: LedgerEntryPage.getLastEntry."""
        for begin, data_end in reversed(self.data(HEADER_SIZE)):
            first = (begin - HEADER_SIZE) // SLOT_SIZE
            end = min(self.slot_count, -(-(data_end - HEADER_SIZE) // SLOT_SIZE))
            while end > first:
                start = max(first, end - WINDOW_SIZE_BYTES // SLOT_SIZE)
                filled = self.read(slot_offset(start), (end - start) * SLOT_SIZE).rstrip(b"\0")
                if filled:
                    return start + (len(filled) - 1) // SLOT_SIZE
                end = start
        return -1


class EntryLocation(NamedTuple):
    """The location of an entry as stored: its record is in log `log_id`, the size field at byte `offset`."""

    entry_id: int
    location: int

    @property
    def log_id(self) -> int:
        """Return the entry log's id."""
        return unpack_location(self.location)[0]

    @property
    def offset(self) -> int:
        """Return the byte offset of the record in the log: 4 before the entry that the location points at."""
        return unpack_location(self.location)[1] - 4


class Gap(NamedTuple):
    """The missing entries `first_entry_id` to `last_entry_id`, both included, with later entries behind them."""

    first_entry_id: int
    last_entry_id: int


class LedgerIndex(Closing):
    """The index of one ledger. Use as a context manager. Created by `BookieIndexes`."""

    def __init__(self, ledger: LedgerId, path: Path, facts: IndexHeader | LedgerData) -> None:
        self.ledger = ledger
        #: The index file, or the directory of the locations database.
        self.path = path
        self.fenced, self.master_key, self._explicit_lac_packet = facts.fenced, facts.master_key, facts.explicit_lac

    def close(self) -> None:
        """Close the index file; databases belong to BookieIndexes."""

    def locations(self) -> Iterator[EntryLocation]:
        """Yield the present entries, in order. Raises Corrupt."""
        raise AssertionError

    def location_of(self, entry_id: int) -> int:
        """Return the location of an entry; 0 if the entry is missing. Raises Corrupt."""
        raise AssertionError

    def gaps(self) -> Iterator[Gap]:
        """Yield the runs of missing entries before the last entry, in order."""
        expected = 0
        for entry_id, _ in self.locations():
            if entry_id > expected:
                yield Gap(expected, entry_id - 1)
            expected = entry_id + 1

    def extent(self) -> tuple[int, int]:
        """Return the number of entries and the last entry's id (-1: none)."""
        count, last = 0, -1
        for entry_id, _ in self.locations():
            count, last = count + 1, entry_id
        return count, last

    def explicit_lac(self) -> int | None:
        """Return the last add confirmed that the writer sent explicitly; None without one. Raises Corrupt."""
        packet = self._explicit_lac_packet
        return None if packet is None else read_lac_header(packet).last_add_confirmed


class _FileIndex(LedgerIndex):
    def __init__(self, ledger: LedgerId, path: Path) -> None:
        self._reader = LedgerIndexReader.open(path)
        super().__init__(ledger, path, self._reader.header)

    def locations(self) -> Iterator[EntryLocation]:
        return map(EntryLocation._make, self._reader.locations())

    def location_of(self, entry_id: int) -> int:
        return self._reader.location_of(entry_id)

    def extent(self) -> tuple[int, int]:
        absent = slots = 0
        for _, page in self._reader.pages():
            slots += len(page)
            absent += page.count(0)
        return slots - absent, self._reader.last_entry_id

    def close(self) -> None:
        self._reader.close()


class _DatabaseIndex(LedgerIndex):
    def __init__(self, ledger: LedgerId, data: LedgerData, locations: LocationsDatabase) -> None:
        super().__init__(ledger, locations.path, data)
        self._locations = locations

    def locations(self) -> Iterator[EntryLocation]:
        for _, entry_id, location in self._locations.locations(self.ledger):
            yield EntryLocation(entry_id, location)

    def location_of(self, entry_id: int) -> int:
        return self._locations.get(self.ledger, entry_id)


class IndexDatabases(NamedTuple):
    """The two databases of one directory, for ledgers of scope 0 or for scoped ledgers, as they were when opened."""

    ledgers: LedgersDatabase
    locations: LocationsDatabase


class BookieIndexes(Closing):
    """All ledger indexes in a bookie's index directories, as they are now. Use as a context manager.

    Databases are opened at first use, and keep the content of that moment.
    """

    def __init__(self, directories: BookieDirectories) -> None:
        self._directories = directories
        self._stack = ExitStack()
        self._databases: list[IndexDatabases] | None = None
        #: Errors of databases that could not be opened, filled by `databases`.
        self.problems: list[BkctlError] = []

    def close(self) -> None:
        self._databases = None
        self._stack.close()

    def files(self) -> Iterator[BookieFile]:
        """Yield the ledger index files, directory by directory. Raises NotFound for a missing directory.

        `.idx.rloc`, a leftover of a relocation, counts if the ledger has no other index file: a bookie's start renames
        it.
        """
        for file in self._directories.indexes():
            if file.kind is FileKind.INDEX:
                yield file
                continue
            ledger = ledger_of_index_path(str(file.path).removesuffix(RELOCATION_SUFFIX))
            if ledger is not None and not self._paths(ledger):
                yield file._replace(id=ledger)

    def databases(self) -> list[IndexDatabases]:
        """Return the pairs of databases that can be opened; `problems` has the errors of the others.

        Raises NotFound for a missing directory.
        """
        if self._databases is None:
            self._databases, self.problems = [], []
            files = [file for file in self._directories.rocksdbs() if file.path.name.endswith(("ledgers", "locations"))]
            for current, scoped in dict.fromkeys((file.path.parent, file.scoped) for file in files):
                prefix = "scoped-" if scoped else ""
                try:
                    ledgers = self._stack.enter_context(LedgersDatabase.open(current / f"{prefix}ledgers"))
                    locations = self._stack.enter_context(LocationsDatabase.open(current / f"{prefix}locations"))
                except NotFound as error:  # one of the two is there
                    self.problems.append(Corrupt(error.message, hint=REBUILD_HINT))
                except BkctlError as error:
                    self.problems.append(error)
                else:
                    self._databases.append(IndexDatabases(ledgers, locations))
        return self._databases

    def open(self, ledger: LedgerId) -> LedgerIndex:
        """Return the index of `ledger` in any of the directories; valid until these indexes are closed.

        Raises LedgerNotFound; UsageError if several directories have one; the errors of reading its header.
        """
        found = self.find(ledger)
        if found is None:
            where = ", ".join(str(directory) for directory in self._directories.index_dirs)
            raise LedgerNotFound(f"Ledger {ledger} has no index in {where}", hint=f"looked for {index_path(ledger)}")
        return found

    def find(self, ledger: LedgerId, *, first: bool = False) -> LedgerIndex | None:
        """Return the index of `ledger`; None if the bookie has none. Raises as `open` does.

        With `first`, return the first of several indexes, which a bookie uses too.
        """
        paths = self._paths(ledger) or self._paths(ledger, RELOCATION_SUFFIX)[:1]
        if len(paths) > 1 and not first:
            listed = ", ".join(map(str, paths))
            raise UsageError(f"{len(paths)} index files are ledger {ledger}'s: {listed}", hint="give one directory")
        if paths:
            try:
                return _FileIndex(ledger, paths[0])
            except NotFound:  # The bookie has just deleted the ledger.
                return None
            except UsageError as error:  # A directory or a pipe has the name of the index; the user did not name it.
                raise Corrupt(error.message) from error
        found: list[LedgerIndex] = []
        for pair in self.databases():
            data = pair.ledgers.get(ledger)
            if data is not None:
                found.append(_DatabaseIndex(ledger, data, pair.locations))
        if not found and self.problems:
            raise self.problems[0]
        if len(found) > 1 and not first:
            listed = ", ".join(str(index.path) for index in found)
            raise UsageError(f"{len(found)} databases have ledger {ledger}: {listed}", hint="give one directory")
        return found[0] if found else None

    def points_to(self, log_id: int, record: Record) -> bool | None:
        """Return whether the index points to `record` of an entry log; None if it cannot be read, or is a part."""
        try:
            index = self.find(record.ledger, first=True)
            if index is None:
                return False if self._is_complete else None
            with index:
                return index.location_of(record.entry_id) == pack_location(log_id, record.offset + RECORD_SIZE.size)
        except (BkctlError, OSError):
            return None

    def ledgers(self, scope_id: int | None = None) -> list[LedgerId]:
        """Return the ledgers of the bookie in order; with `scope_id` only of that scope.

        Raises NotFound for a missing directory, Corrupt.
        """
        found = {file.id for file in self.files() if isinstance(file.id, LedgerId)}
        for pair in self.databases():
            found.update(ledger for ledger, _ in pair.ledgers.ledgers())
        if self.problems:
            raise self.problems[0]
        return sorted(ledger for ledger in found if scope_id is None or ledger.scope_id == scope_id)

    @cached_property
    def _is_complete(self) -> bool:
        """True if a ledger not found has no index: others have one, and every directory of the cookie is here."""
        from bkctl.formats.metadata import Cookie

        currents = [current.resolve() for current in map(current_of, self._directories.index_dirs)]
        for current in currents:
            with suppress(FileNotFoundError):
                cookie = Cookie.parse((current / COOKIE_NAME).read_bytes())
                named = [current_of(Path(name)).resolve() for name in cookie.index_dirs or cookie.ledger_dirs]
                if not set(named) <= set(currents):
                    return False
        pairs = self.databases()
        return next(self.files(), None) is not None or any(next(iter(each.ledgers.ledgers()), None) for each in pairs)

    def _paths(self, ledger: LedgerId, suffix: str = "") -> list[Path]:
        name = index_path(ledger) + suffix
        currents = dict.fromkeys(map(current_of, self._directories.index_dirs))
        return [path for current in currents if (path := current / name).exists()]


def still_without_ledger(directories: BookieDirectories, path: Path, ledgers: Collection[LedgerId]) -> list[LedgerId]:
    """Return the ledgers of which the database of locations `path` has locations, and that still have no ledger.

    A running bookie writes locations before their ledger, so the databases are opened once more.
    """
    with BookieIndexes(directories) as now:
        pairs = [pair for pair in now.databases() if pair.locations.path == path]
        return [
            ledger
            for ledger in ledgers
            for pair in pairs
            if pair.ledgers.get(ledger) is None and pair.locations.last_entry_id(ledger) >= 0
        ]


def first_files(indexes: BookieIndexes) -> Iterator[tuple[LedgerId, BookieFile, Path]]:
    """Yield the index files, each with the path of its ledger's first one, which a bookie uses."""
    firsts: dict[LedgerId, Path] = {}
    for file in indexes.files():
        if isinstance(file.id, LedgerId):
            yield file.id, file, firsts.setdefault(file.id, file.path)
