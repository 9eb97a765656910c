"""DbLedgerStorage: entries in entry logs, ledger by ledger, and their locations in RocksDBs, apart in each directory.

    add      to the write cache, readable at once
    flush    write cache → entry log, synced → locations, in batches synced together → ledgers, one synced batch
    read     write cache → read-ahead cache → locations → entry log, with read-ahead for sequential readers

The event loop answers reads from both caches, and from the page cache where it knows the location, or RocksDB has it
in memory (single reads only). Another look-up may wait for the disk: a thread does it, and caches neighbours as well.

The databases only point into synced entry logs, so that the journals restore everything that a crash loses. A ledger's
directory is its 128-bit number modulo the number of directories. The next flush removes deleted ledgers from both
databases; the next start removes what a deletion of Apache's bookie left behind.
Source: DbLedgerStorage, SingleDirectoryDbLedgerStorage; BP-35.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import heapq
import logging
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, UsageError, on_error
from bkctl.files.rocksdb import REBUILD_HINT, LedgersDatabase, LocationsDatabase
from bkctl.formats.entry_log import HEADER_SIZE
from bkctl.formats.index import LedgerData
from bkctl.formats.layout import Buffer
from bkctl.formats.names import ROCKSDB_CURRENT
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.ledger.db_indexes import EntryLocationIndex, LedgerMetadataIndex
from bkctl.storage.ledger.entry_reader import fill
from bkctl.storage.ledger.ledger_handle import EntryIndex, IsWanted, LedgerHandle
from bkctl.storage.ledger.ledger_storage import CHUNK_SIZE_BYTES, LedgerStorage
from bkctl.storage.ledger.read_cache import ReadCache

#: Memory of an entry besides its bytes, about, so that small entries count at their real cost.
ENTRY_OVERHEAD_BYTES: Final = 160
#: A read that skips at most this many entries counts as sequential: with striping a bookie has only part of them.
READ_ON_ENTRIES_MAX: Final = 16
#: Entries behind a run whose locations are looked up with it.
LOOK_AHEAD_ENTRIES: Final = 256
#: A list of entries polls `is_wanted` at multiples of this entry id.
_ASKED_AT_ENTRIES: Final = 1024

log: Final = logging.getLogger("bkctl.bookie")


class DbLedgerHandle(LedgerHandle):
    """A ledger in memory, whose entries are in the logs of one directory, `index`."""

    __slots__ = ("limbo", "read_to")
    index: SingleDirectoryDbLedgerStorage

    def __init__(self, directory: SingleDirectoryDbLedgerStorage, ledger: LedgerId) -> None:
        super().__init__(ledger, b"")
        self.index = directory
        #: LedgerData.limbo as Apache's bookie left it: entries may be lost until its check has restored them.
        self.limbo: bool | None = None
        #: The last entry read, or read ahead, from the entry log.
        self.read_to = -1


@dataclass(slots=True)
class _Locations:
    """Locations of the entries of one flush: `runs` counts them by ledger."""

    runs: list[tuple[LedgerId, int]] = field(default_factory=list)
    entry_ids: array[int] = field(default_factory=lambda: array("q"))
    locations: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class _Changes:
    """The changes of one directory that a flush takes. `located` is set once the entry loggers have the entries."""

    #: Ledgers, ascending, each with its records by entry id.
    entries: list[tuple[DbLedgerHandle, dict[int, bytes]]]
    headers: dict[LedgerId, tuple[DbLedgerHandle, LedgerData]]
    deleted: set[LedgerId]
    located: dict[bool, _Locations] | None = None
    is_written: bool = False


@dataclass(eq=False, repr=False)
class SingleDirectoryDbLedgerStorage(EntryIndex[DbLedgerHandle]):
    """The logs of one ledger directory, with their databases in `index_directory`; both paths end in `current`."""

    ledger_directory: Path
    index_directory: Path
    config: BookieConfig
    files: Files
    _open_loggers: Callable[[], tuple[EntryLogger, EntryLogger]]
    needs_integrity_check: bool = field(init=False, default=False)
    #: Ledgers that had entries here when the storage was opened but belong to another directory, and one of them.
    misplaced_count: int = field(init=False, default=0)
    misplaced: LedgerId | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.metadata = LedgerMetadataIndex(self.index_directory, self.config, self.files)
        self.locations = EntryLocationIndex(self.index_directory, self.config, self.files)
        cached_bytes = self.config.db_storage_read_ahead_cache_max_size_mb << 20
        self.read_cache: ReadCache[Buffer] = ReadCache(cached_bytes // len(self.config.ledger_directories))
        self._deleted: set[LedgerId] = set()
        #: Changes that no flush has written yet; several after a failed flush.
        self._unfinished: list[_Changes] = []
        self._flush_lock = threading.Lock()

    def open(self, number: int, count: int) -> None:
        """Open logs and databases of directory `number` of `count`. Raises OSError, DirectoryInUse, Corrupt."""
        for directory in (self.ledger_directory, self.index_directory):
            self.files.make_directory(directory)
        self.loggers = self._open_loggers()
        with on_error(self.close):
            try:
                for prefix in ("", "scoped-"):
                    _check_pair(self.index_directory / f"{prefix}ledgers", self.index_directory / f"{prefix}locations")
                self.metadata.open()
                self.locations.open()
                self._compare_databases(number, count)
            except Corrupt as error:
                if error.hint is None:
                    raise Corrupt(error.message, hint=REBUILD_HINT) from error
                raise

    def _compare_databases(self, number: int, count: int) -> None:
        """Let the first flush delete entries of ledgers that are not here: leftovers of a deletion by Apache's bookie.

        A crash between the two batches of a flush leaves such entries too; the journals restore them. Counts ledgers
        with entries that belong to another one of `count` directories.
        """
        known = self.metadata.ledger_ids()
        known_ledger = next(known, None)
        if known_ledger is None:
            return
        for ledger in self.locations.ledger_ids():
            while known_ledger is not None and known_ledger < ledger:
                known_ledger = next(known, None)
            if ledger != known_ledger:
                self._deleted.add(ledger)
            elif (ledger.value if ledger[0] else ledger[1]) % count != number:
                self.misplaced_count += 1
                self.misplaced = ledger

    def close(self) -> None:
        """Close the databases. Raises OSError."""
        try:
            self.locations.close()
        finally:
            self.metadata.close()

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def load(self, ledger: LedgerId) -> DbLedgerHandle:
        """Return a new handle; `is_on_disk` False: the ledger is not here, or is to be deleted. Raises Corrupt."""
        handle = DbLedgerHandle(self, ledger)
        handle.unknown = self.needs_integrity_check
        if self.is_deleted(ledger):
            handle.unknown = False
            return handle
        data = self.metadata.get(ledger)
        if data is None or not data.exists:
            return handle
        # A key of zeros stands for none; the next writer's key replaces it. Source: LedgerMetadataIndex.
        handle.master_key = data.master_key if any(data.master_key) else b""
        handle.is_on_disk = True
        handle.fenced, handle.limbo = data.fenced, data.limbo
        handle.unknown = handle.unknown or bool(data.limbo)
        handle.explicit_lac = data.explicit_lac or b""
        handle.lac_is_known = False
        handle.last_entry = self.locations.last_entry_id(ledger)
        return handle

    def is_deleted(self, ledger: LedgerId) -> bool:
        """Return whether the next or running flush deletes the ledger; a new ledger of that id may exist again."""
        return ledger in self._deleted or any(ledger in changes.deleted for changes in self._unfinished)

    def delete(self, ledger: LedgerId) -> None:
        """Delete the ledger with the next flush."""
        self._deleted.add(ledger)
        self.discard_cached(ledger)

    @property
    def has_scoped(self) -> bool:
        return self.metadata.has_scoped

    # --- entries -----------------------------------------------------------------------------------------------------

    def location(self, handle: DbLedgerHandle, entry_id: int) -> int:
        # A ledger that was deleted and recreated may find entries of the old one on disk until a flush writes it.
        if not handle.is_on_disk:
            return 0
        with contextlib.suppress(BkctlError):  # damage of a neighbour's location is none of this entry
            if found := self.locations.look_up(handle, (entry_id,), 0)[0]:
                return found  # A cached page may lack entries that were written before it.
        return self.locations.location(handle.ledger, entry_id)

    def discard_cached(self, ledger: LedgerId) -> None:
        """Forget what reads of the ledger found, after a change of its locations."""
        self.read_cache.discard(ledger)
        self.locations.cache.discard(ledger)

    def find(self, handle: DbLedgerHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        ledger = handle.ledger
        found = self.read_cache.get_all(ledger, entry_ids, size_max)
        missing = [number for number, body in enumerate(found) if body is None]
        if len(missing) < len(found):
            self.read_cache.note(hits=len(found) - len(missing))
        if not missing:
            return found
        unread = entry_ids if len(missing) == len(entry_ids) else [entry_ids[number] for number in missing]
        locations = self.locations.cached(handle, unread)
        if len(unread) == 1 and not locations[0] and handle.is_on_disk:
            with contextlib.suppress(BkctlError):  # the thread that looks it up raises it
                locations = [self.locations.cached_location(ledger, unread[0])]
        if any(locations):
            read = self.logger_of(ledger).read_run(ledger, unread, locations, size_max, cached=True)
            self.read_cache.note(misses=len(read) - read.count(None))
            fill(found, missing, read)
        return found

    def read(self, handle: DbLedgerHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        found = self.find(handle, entry_ids, size_max)
        missing = [number for number, body in enumerate(found) if body is None]
        if len(missing) > 1 and handle.is_on_disk:
            fill(found, missing, self._read_run(handle, [entry_ids[number] for number in missing], size_max))
        return found

    def count_from_table(self, count: int) -> None:
        self.read_cache.note(write_cache_hits=count)

    def _read_run(self, handle: DbLedgerHandle, entry_ids: Sequence[int], size_max: int) -> list[memoryview | None]:
        ledger = handle.ledger
        logger = self.logger_of(ledger)
        try:
            locations = self.locations.look_up(handle, entry_ids, LOOK_AHEAD_ENTRIES)
        except BkctlError:
            return [None] * len(entry_ids)
        read = logger.read_run(ledger, entry_ids, locations, size_max)
        self.read_cache.note(misses=len(read) - read.count(None))
        last = read[-1]
        if last is not None:
            at = len(read) - 1
            end = locations[at] + len(last) + RECORD_SIZE.size
            self._read_ahead(handle, entry_ids[0], entry_ids[at], end, max(end - locations[0], 0), len(last))
        return read

    def read_at(self, handle: DbLedgerHandle, entry_id: int, location: int) -> Buffer:
        body = super().read_at(handle, entry_id, location)
        self.read_cache.note(misses=1)
        self._read_ahead(handle, entry_id, entry_id, location + len(body) + RECORD_SIZE.size, 0, len(body))
        return body

    def _read_ahead(
        self, handle: DbLedgerHandle, first: int, last: int, location: int, asked_bytes: int, entry_bytes: int
    ) -> None:
        """Cache what follows at `location` once a client has read entries `first` to `last`, if it reads on.

        As much as it asked for, and at least dbStorage_readAheadCacheBatchSize entries as large as the last one.
        """
        ledger = handle.ledger
        reads_on = 0 <= first - handle.read_to <= READ_ON_ENTRIES_MAX
        handle.read_to = last
        if not reads_on:
            return
        count, limit = self.config.db_storage_read_ahead_cache_batch_size, self.read_cache.capacity // 2
        if self.config.db_storage_read_ahead_cache_batch_bytes_size > 0:
            limit = min(limit, self.config.db_storage_read_ahead_cache_batch_bytes_size)
        wanted = max(asked_bytes, count * (entry_bytes + RECORD_SIZE.size))
        discards = self.read_cache.discards
        with contextlib.suppress(OSError, Corrupt):
            ahead = self.logger_of(ledger).read_following(location, ledger, size_max=min(limit, wanted))
            if ahead and not handle.deleted:
                self.read_cache.put_ahead(ledger, ahead, discards)
                handle.read_to = ahead[-1][0]

    def entry_ids(self, handle: DbLedgerHandle, is_wanted: IsWanted) -> Callable[[], Iterator[int]]:
        if not handle.is_on_disk:
            return lambda: iter(())
        found = self.locations.entry_ids
        return lambda: takewhile(lambda entry_id: entry_id % _ASKED_AT_ENTRIES or is_wanted(), found(handle.ledger))

    def move(self, moves: Iterable[Move]) -> None:
        moves = list(moves)
        self.locations.move(moves)
        for ledger in {move.ledger for move in moves}:
            self.discard_cached(ledger)

    def live(self, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        # A flush writes entry logs before the index, so an entry that is missing is looked up again after the flush.
        wanted = [location for _, _, location in entries]
        keys = [(ledger, entry_id) for ledger, entry_id, _ in entries]
        found = self.locations.locations(keys)
        if found != wanted:
            with self._flush_lock:
                if any(changes.located is not None and not changes.is_written for changes in self._unfinished):
                    raise OSError(errno.EBUSY, "A flush failed, so entries in the logs are not in the index yet")
                found = self.locations.locations(keys)
        return [location == expected for location, expected in zip(found, wanted, strict=True)]

    # --- flushes -----------------------------------------------------------------------------------------------------

    def begin_flush(
        self,
        entries: list[tuple[DbLedgerHandle, dict[int, bytes]]],
        headers: dict[LedgerId, tuple[DbLedgerHandle, LedgerData]],
    ) -> bool:
        """Take the changes to write; return whether there are any."""
        if entries or headers or self._deleted:
            self._unfinished.append(_Changes(entries, headers, self._deleted))
            self._deleted = set()
        return bool(self._unfinished)

    def flush(self) -> None:
        """Write the taken changes, in the order that a crash at any moment needs. Raises OSError."""
        with self._flush_lock:
            for changes in self._unfinished:
                if changes.located is None:
                    changes.located = self._append(changes)
            for logger in self.loggers:
                logger.write()
                logger.sync()
            for changes in self._unfinished:
                if not changes.is_written:
                    self._write_indexes(changes)
                    changes.is_written = True

    def _append(self, changes: _Changes) -> dict[bool, _Locations]:
        """Add the entries to the entry loggers, ledger by ledger, and write most of them while caches have them."""
        located = {False: _Locations(), True: _Locations()}
        writes = True
        for handle, entries in changes.entries:
            if handle.deleted:
                continue
            ledger = handle.ledger
            logger, into = self.logger_of(ledger), located[ledger.is_scoped]
            entry_ids = sorted(entries)
            into.locations.extend(logger.add_all(ledger, list(map(entries.__getitem__, entry_ids))))
            into.entry_ids.extend(entry_ids)
            into.runs.append((ledger, len(entry_ids)))
            if writes and logger.buffered_bytes >= CHUNK_SIZE_BYTES:
                try:
                    logger.write()
                except OSError:
                    writes = False  # all entries get locations first: the caller's `write` tries again
        return located

    def _write_indexes(self, changes: _Changes) -> None:
        assert changes.located is not None
        if changes.located[True].runs or any(ledger.is_scoped for ledger in changes.headers):
            # Both exist before one is used; see _check_pair.
            self.metadata.open_scoped()
            self.locations.open_scoped()
        for scoped, located in changes.located.items():
            deleted = [ledger for ledger in changes.deleted if ledger.is_scoped == scoped]
            self.locations.write(located.runs, located.entry_ids, located.locations, deleted, scoped=scoped)
            for ledger in deleted:
                self.discard_cached(ledger)
            for ledger, _ in located.runs:
                self.read_cache.discard(ledger)
        headers = {ledger: data for ledger, (handle, data) in changes.headers.items() if not handle.deleted}
        self.metadata.write(headers, changes.deleted)

    def end_flush(self) -> list[DbLedgerHandle]:
        """Record that the taken changes are on disk; return the handles of which state was written."""
        handles = [handle for changes in self._unfinished for handle, _ in changes.headers.values()]
        self._unfinished = []
        return handles


class DbLedgerStorage(LedgerStorage[DbLedgerHandle]):
    """The ledgers in the ledger and index directories of `config`, in which they stay."""

    writes_ahead = False

    def __init__(self, config: BookieConfig, files: Files) -> None:
        super().__init__(config, files, overhead_bytes=ENTRY_OVERHEAD_BYTES)
        count = self._count = len(self.ledger_directories)
        if len(self.index_directories) != count:
            raise UsageError(
                f"DbLedgerStorage needs an index directory for each of {count} ledger directories, not "
                f"{len(self.index_directories)}"
            )
        self.directories = [
            SingleDirectoryDbLedgerStorage(
                ledgers, index, config, files, functools.partial(self._open_loggers, [ledgers])
            )
            for ledgers, index in zip(self.ledger_directories, self.index_directories, strict=True)
        ]
        # Of both halves of the write cache: one is filled while the other is flushed.
        self.unwritten_bytes_max = config.db_storage_write_cache_max_size_mb << 20

    def open(self) -> None:
        self._check_databases()
        with contextlib.ExitStack() as opened:
            for number, directory in enumerate(self.directories):
                directory.open(number, self._count)
                opened.callback(directory.close)
            # Ledgers of any directory may be lost, whichever directory has the flag.
            self.needs_integrity_check = any(directory.metadata.needs_integrity_check for directory in self.directories)
            opened.pop_all()
        for directory in self.directories:
            directory.needs_integrity_check = self.needs_integrity_check
        self.indexes = self.directories
        self.location_indexes = [directory.locations for directory in self.directories]
        self._warn_of_misplaced()

    def _check_databases(self) -> None:
        """Raise Corrupt for a directory with entries and no databases, if others have theirs: a start creates all."""
        without = [
            each
            for each in self.directories
            if not any((each.index_directory / name / ROCKSDB_CURRENT).exists() for name in ("ledgers", "locations"))
        ]
        for each in without if len(without) < self._count else ():
            if any(path.stat().st_size > HEADER_SIZE for path in each.ledger_directory.glob("*.log")):
                problem = f"{each.ledger_directory} has entries, but no databases are in {each.index_directory}"
                raise Corrupt(problem, hint=REBUILD_HINT)

    def _warn_of_misplaced(self) -> None:
        count = sum(directory.misplaced_count for directory in self.directories)
        for directory in self.directories:
            if directory.misplaced is not None:
                log.warning(
                    "Ledgers that this bookie has but does not find: %d. Its directories were added, removed or "
                    "reordered while it had ledgers: ledger %s is in %s, and DbLedgerStorage looks for it in %s. Stop "
                    "the bookie, run 'bkctl bookies decommission', which copies its ledgers from other bookies, then "
                    "'bkctl bookie format'. Or, if no ledger was written since, restore the directories, their order "
                    "and their cookies ('bkctl cookie generate'). 'bkctl entrylog extract' reads ledgers that no other "
                    "bookie has",
                    count, directory.misplaced, directory.index_directory,
                    self._directory(directory.misplaced).index_directory,
                )  # fmt: skip
                return

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for directory in self.directories:
                stack.callback(directory.close)

    def _directory(self, ledger: LedgerId) -> SingleDirectoryDbLedgerStorage:
        return self.directories[ledger.value % self._count]

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def load(self, ledger: LedgerId) -> DbLedgerHandle:
        return self._directory(ledger).load(ledger)

    def blank(self, ledger: LedgerId) -> DbLedgerHandle:
        return DbLedgerHandle(self._directory(ledger), ledger)

    def _delete_index(self, handle: DbLedgerHandle) -> None:
        handle.index.delete(handle.ledger)

    def _indexed_ledgers(self, scope: int | None) -> Iterator[LedgerId]:
        ledgers = heapq.merge(*(directory.metadata.ledger_ids(scope) for directory in self.directories))
        return (ledger for ledger in ledgers if not self._directory(ledger).is_deleted(ledger))

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def is_flush_due(self) -> bool:
        return self.table.current.size >= self.unwritten_bytes_max // 2

    def begin_flush(self) -> list[SingleDirectoryDbLedgerStorage] | None:
        entries: dict[EntryIndex[DbLedgerHandle], list[tuple[DbLedgerHandle, dict[int, bytes]]]] = defaultdict(list)
        headers: dict[EntryIndex[DbLedgerHandle], dict[LedgerId, tuple[DbLedgerHandle, LedgerData]]] = defaultdict(dict)
        taken = self.table.current.ledgers
        if self.table.snapshot():
            for handle in sorted(taken, key=lambda handle: handle.ledger):
                entries[handle.index].append((handle, taken[handle]))
        changed, self._changed = self._changed, {}
        for ledger, handle in changed.items():
            lac = handle.explicit_lac or None
            headers[handle.index][ledger] = (
                handle, LedgerData(True, handle.fenced, handle.master_key, lac, handle.limbo)
            )  # fmt: skip
        return [each for each in self.directories if each.begin_flush(entries[each], headers[each])] or None

    def flush(self, flush: list[SingleDirectoryDbLedgerStorage]) -> None:
        for directory in flush:
            directory.flush()

    def end_flush(self, flush: list[SingleDirectoryDbLedgerStorage], *, written: bool) -> None:
        if written:
            for directory in flush:
                for handle in directory.end_flush():
                    handle.is_on_disk = True
                    handle.header_changed = self._changed.get(handle.ledger) is handle
            for snapshot in self.table.snapshots:
                self.table.drop(snapshot)


def _check_pair(ledgers: Path, locations: Path) -> None:
    """Raise Corrupt if one database is missing and the other has ledgers: both exist before one is used."""
    has_ledgers, has_locations = ((path / ROCKSDB_CURRENT).exists() for path in (ledgers, locations))
    if has_ledgers != has_locations:
        missing, kind = (locations, LedgersDatabase) if has_ledgers else (ledgers, LocationsDatabase)
        with kind.open(ledgers if has_ledgers else locations) as database:
            if next(database.ledger_ids(), None) is not None:
                raise Corrupt(f"The database {missing} is missing, and {database.path.name} beside it is in use")
