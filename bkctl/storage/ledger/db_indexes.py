"""LedgerMetadataIndex and EntryLocationIndex: the indexes of one ledger directory of DbLedgerStorage, in RocksDBs.

`ledgers` and `locations` hold scope 0, as Apache's bookie has them. The first scoped ledger creates `scoped-ledgers`
and `scoped-locations`. Every change is one batch, synced; the locations of a flush are several, synced together.
Source: LedgerMetadataIndex, EntryLocationIndex; BP-35.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import BkctlError, DirectoryInUse
from bkctl.files.rocksdb import BATCH_OPERATIONS, LedgersDatabase, LocationsDatabase, estimated_count
from bkctl.formats.index import (
    NEEDS_INTEGRITY_CHECK,
    LedgerData,
    location_key,
    location_keys,
    location_values,
    read_location,
    write_location,
)
from bkctl.formats.names import ROCKSDB_CURRENT
from bkctl.ids import U64_MAX, LedgerId
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.ledger_handle import IsWanted, LedgerHandle, always
from bkctl.storage.ledger.read_cache import ReadCache

Database = TypeVar("Database", LedgersDatabase, LocationsDatabase)
Result = TypeVar("Result")
#: Locations are cached in pages of 1 << PAGE_BITS entries: look-ups of neighbours cost little more than of one.
PAGE_BITS: Final = 4
_IN_PAGE: Final = (1 << PAGE_BITS) - 1
_NO_LOCATIONS: Final = array("q", bytes(8 << PAGE_BITS))
#: Locations that the cache of a directory holds.
CACHED_LOCATIONS_MAX: Final = 1 << 20
#: Free space beyond the size of its logs at which a database that ran out of space is reopened.
_REOPEN_BYTES: Final = 8 << 20

_NO_SPACE: Final = {os.strerror(code): code for code in NO_SPACE}


class _Index(Generic[Database]):
    """The database of scope 0, and the one of all other scopes once it exists."""

    def __init__(self, kind: type[Database], name: str, directory: Path, config: BookieConfig, files: Files) -> None:
        self.directory = directory
        self._kind: type[Database] = kind
        self._name, self._config, self._files = name, config, files
        self._databases: dict[bool, Database] = {}
        #: Databases that refused a write: RocksDB refuses all further ones until it is reopened.
        self._failed: set[bool] = set()
        self._reopening = threading.Lock()

    def open(self) -> None:
        """Open the databases, and create the one of scope 0; on a full disk they can only be read.

        Raises OSError, DirectoryInUse, Corrupt.
        """
        self._files.make_directory(self.directory)
        self._open(scoped=False)
        if (self._path(scoped=True) / ROCKSDB_CURRENT).exists():
            self._open(scoped=True)

    def close(self) -> None:
        """Close the databases; all data is in tables then, without a log to replay. Raises OSError."""
        databases, self._databases = self._databases, {}
        with ExitStack() as closing:  # closes every database even if one fails
            for database in databases.values():
                closing.callback(self._close, database)

    def _close(self, database: Database) -> None:
        with _as_os_errors():
            database.close()
        self._files.note_written(database.path)

    @property
    def has_scoped(self) -> bool:
        """Return whether there is a database for scoped ledgers."""
        return True in self._databases

    def _path(self, *, scoped: bool) -> Path:
        return self.directory / (f"scoped-{self._name}" if scoped else self._name)

    def _open(self, *, scoped: bool) -> None:
        path = self._path(scoped=scoped)
        self._files.make_directory(path)
        try:
            with _as_os_errors(also_damage=False):
                database: Database = self._kind.serve(path, self._config)
        except OSError as error:
            if error.errno not in NO_SPACE or not (path / ROCKSDB_CURRENT).exists():
                raise
            # Readable now, writable once there is space.
            database = self._kind.open(path)
            self._failed.add(scoped)
        self._databases[scoped] = database
        self._files.note_written(path)

    def _read(self, ledger: LedgerId, read: Callable[[Database], Result], absent: Result) -> Result:
        """Return the result of `read` on the ledger's database, `absent` without one; for any thread."""
        database = self._databases.get(ledger.is_scoped)
        if database is None:
            return absent
        try:
            return read(database)
        except BkctlError:
            with self._reopening:
                reopened = self._databases.get(ledger.is_scoped)
                if reopened is None or reopened is database:
                    raise
                return read(reopened)

    def open_scoped(self) -> None:
        """Create the database for scoped ledgers if it is missing. Raises OSError."""
        if not self.has_scoped:
            with _as_os_errors():
                self._open(scoped=True)

    def _write(self, scoped: bool, batch: Any, *, sync: bool = True) -> None:
        if scoped in self._failed:
            self._reopen(scoped=scoped)
        database = self._databases[scoped]
        try:
            with _as_os_errors():
                database.write(batch, sync=sync)
        except OSError:
            self._failed.add(scoped)
            raise
        self._files.note_written(database.path)

    def _reopen(self, *, scoped: bool) -> None:
        """Reopen a database that ran out of space: RocksDB refuses writes until then. Raises OSError."""
        database = self._databases[scoped]
        # Opening turns its logs into a table. Without space for that it would fail, and reads would fail too.
        needed = _REOPEN_BYTES + sum(path.stat().st_size for path in database.path.glob("*.log"))
        if self._files.disk_usage(database.path).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(database.path))
        with self._reopening:
            database.abandon()
            try:
                with _as_os_errors(also_damage=False):
                    self._databases[scoped] = self._kind.serve(database.path, self._config)
            except (BkctlError, OSError) as error:
                self._databases[scoped] = self._kind.open(database.path)  # readable until the next flush tries again
                if isinstance(error, DirectoryInUse):  # An iteration keeps the database open until it ends.
                    raise OSError(errno.ENOSPC, error.message) from error
                raise
            self._failed.discard(scoped)


class LedgerMetadataIndex(_Index[LedgersDatabase]):
    """The index of ledgers: their master keys, fences and explicit LACs."""

    def __init__(self, directory: Path, config: BookieConfig, files: Files) -> None:
        super().__init__(LedgersDatabase, "ledgers", directory, config, files)

    def get(self, ledger: LedgerId) -> LedgerData | None:
        """Return the data of a ledger, None if it is not here. Raises Corrupt."""
        return self._read(ledger, lambda database: database.get(ledger), None)

    @property
    def needs_integrity_check(self) -> bool:
        """Return whether Apache's bookie began a data integrity check and did not finish it. Raises Corrupt."""
        database = self._databases.get(False)
        return database is not None and bool((database.storage_flags() or 0) & NEEDS_INTEGRITY_CHECK)

    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        """Yield the ledgers here, ascending: of one scope, or all. Raises Corrupt."""
        plain, scoped = self._databases.get(False), self._databases.get(True)
        if plain is not None and not scope:
            yield from plain.ledger_ids()
        if scoped is not None and scope != 0:
            if scope is None:
                yield from scoped.ledger_ids()
            else:
                end = None if scope == U64_MAX else LedgerId(scope + 1, 0)
                yield from scoped.ledger_ids(LedgerId(scope, 0), end)

    def write(self, changes: Mapping[LedgerId, LedgerData], deleted: Collection[LedgerId]) -> None:
        """Delete the ledgers in `deleted`, then write `changes`; on disk on return. Raises OSError."""
        for scoped in (False, True):
            gone = [ledger for ledger in deleted if ledger.is_scoped == scoped]
            put = {ledger: data for ledger, data in changes.items() if ledger.is_scoped == scoped}
            if put or (gone and scoped in self._databases):
                self._write(scoped, LedgersDatabase.batch_of(put, gone))


class EntryLocationIndex(_Index[LocationsDatabase]):
    """The index of entry locations; `cache` has some of them by ledger and page number, for any thread."""

    def __init__(self, directory: Path, config: BookieConfig, files: Files) -> None:
        super().__init__(LocationsDatabase, "locations", directory, config, files)
        self.cache: ReadCache[array[int]] = ReadCache(CACHED_LOCATIONS_MAX)
        # Keeps a flush from writing between the two halves of a compare-and-set.
        self._lock = threading.Lock()
        # Held by a compaction, so that RocksDB is not closed during one.
        self._compaction = threading.Lock()
        self._compacting = ""

    def close(self) -> None:
        """Close the databases as the base does, once no compaction is under way."""
        with self._compaction:
            super().close()

    def location(self, ledger: LedgerId, entry_id: int) -> int:
        """Return the location of an entry, 0 if it is not here. Raises Corrupt."""
        return self._read(ledger, lambda database: database.get(ledger, entry_id), 0)

    def estimated_counts(self) -> dict[bool, int]:
        """Return about how many entries of scope 0 (False) and of other scopes (True) are here."""
        return {scoped: estimated_count(database) for scoped, database in tuple(self._databases.items())}

    def cached_location(self, ledger: LedgerId, entry_id: int) -> int:
        """Return the location of an entry if RocksDB has it in memory, else 0; never wait. Raises Corrupt."""
        database = self._databases.get(ledger.is_scoped)
        return 0 if database is None else database.get(ledger, entry_id, cached=True)

    def locations(self, entries: Sequence[tuple[LedgerId, int]]) -> list[int]:
        """Return the locations of many entries, in their order; 0 for an entry that is not here. Raises Corrupt."""
        found = [0] * len(entries)
        for scoped, database in tuple(self._databases.items()):
            numbers = [number for number, (ledger, _) in enumerate(entries) if ledger.is_scoped == scoped]
            keys = [location_key(*entries[number]) for number in numbers]
            for number, value in zip(numbers, database.values_of(keys), strict=True):
                found[number] = 0 if value is None else read_location(value, str(database.path))
        return found

    def locations_of(self, ledger: LedgerId, entry_ids: array[int]) -> array[int]:
        """Return the locations of entries of one ledger; 0 for an entry that is not here. Raises Corrupt."""
        keys = location_keys([(ledger, len(entry_ids))], entry_ids, scoped=ledger.is_scoped)
        absent: list[bytes | None] = [None] * len(keys)
        values = self._read(ledger, lambda database: database.values_of(keys), absent)
        return array("q", (0 if value is None else read_location(value) for value in values))

    def cached(self, handle: LedgerHandle, entry_ids: Sequence[int]) -> list[int]:
        """Return the locations of entries; 0 for an entry whose location is not in memory."""
        if not handle.is_on_disk:
            return [0] * len(entry_ids)
        locations: list[int] = []
        ledger, get = handle.ledger, self.cache.get
        page, last = None, -1
        for entry_id in entry_ids:
            number = entry_id >> PAGE_BITS
            if number != last:
                page, last = get(ledger, number), number
            locations.append(0 if page is None else page[entry_id & _IN_PAGE])
        return locations

    def look_up(self, handle: LedgerHandle, entry_ids: Sequence[int], ahead: int) -> list[int]:
        """Return what `cached` returns, once missing pages, and `ahead` entries more, are cached. Raises Corrupt."""
        locations = self.cached(handle, entry_ids)
        if 0 not in locations or not handle.is_on_disk:
            return locations
        cache = self.cache
        discards = cache.discards
        end = min(max(entry_ids) + ahead, handle.last_entry)
        numbers = {entry_id >> PAGE_BITS for entry_id in entry_ids}
        numbers |= set(range(max(numbers) + 1, (end >> PAGE_BITS) + 1))
        missing = sorted(number for number in numbers if cache.get(handle.ledger, number) is None)
        if not missing:
            return locations
        wanted = array("q")
        for number in missing:
            wanted.extend(range(number << PAGE_BITS, number + 1 << PAGE_BITS))
        found = self.locations_of(handle.ledger, wanted)
        pages = {number: found[at << PAGE_BITS : at + 1 << PAGE_BITS] for at, number in enumerate(missing)}
        if not handle.deleted:
            cache.put(handle.ledger, list(pages.items()), discards)
        for at, entry_id in enumerate(entry_ids):
            page = pages.get(entry_id >> PAGE_BITS)
            if page is not None:
                locations[at] = page[entry_id & _IN_PAGE]
        return locations

    def _cache_written(self, ledger: LedgerId, entry_ids: array[int], locations: array[int]) -> None:
        """Cache the new locations of entries, ascending: who tails the ledger asks for them next."""
        cache = self.cache
        discards = cache.discards
        first, last = entry_ids[0], entry_ids[-1]
        begin, end = first >> PAGE_BITS, (last >> PAGE_BITS) + 1
        if last - first + 1 != len(entry_ids) or len(entry_ids) > CACHED_LOCATIONS_MAX // 2:
            cache.discard(ledger)
            return
        before, after = cache.get(ledger, begin), cache.get(ledger, end - 1) or _NO_LOCATIONS
        located = (before or _NO_LOCATIONS)[: first & _IN_PAGE] + locations + after[(last & _IN_PAGE) + 1 :]
        pages = [
            (number, located[at : at + _IN_PAGE + 1])
            for number, at in zip(range(begin, end), range(0, len(located), _IN_PAGE + 1), strict=True)
        ]
        if before is None and first & _IN_PAGE:
            del pages[0]  # the database has more of it
        cache.replace(ledger, pages, discards)

    def last_entry_id(self, ledger: LedgerId) -> int:
        """Return the highest entry id here, -1 for none. Raises Corrupt."""
        return self._read(ledger, lambda database: database.last_entry_id(ledger), -1)

    def entry_ids(self, ledger: LedgerId) -> Iterator[int]:
        """Yield the ids of the ledger's entries, ascending. Raises Corrupt."""
        database = self._databases.get(ledger.is_scoped)
        if database is not None:
            for _, entry_id, _ in database.locations(ledger):
                yield entry_id

    def ledger_ids(self) -> Iterator[LedgerId]:
        """Yield the ledgers that have entries here, ascending. Raises Corrupt."""
        return heapq.merge(*(database.ledger_ids() for database in self._databases.values()))

    def write(
        self,
        runs: Sequence[tuple[LedgerId, int]],
        entry_ids: array[int],
        locations: array[int],
        deleted: Collection[LedgerId],
        *,
        scoped: bool,
    ) -> None:
        """Delete the ledgers in `deleted`, then write the locations of entries; on disk on return. Raises OSError.

        `runs` has the number of `entry_ids` and `locations` of each ledger, one ledger after the other.
        """
        if not runs and not (deleted and scoped in self._databases):
            return
        items = zip(location_keys(runs, entry_ids, scoped=scoped), location_values(locations), strict=True)
        with self._lock:
            batch = LocationsDatabase.batch_without(deleted)
            # rocksdict keeps other threads waiting while it writes a batch: 0.4 µs an item.
            for left in range(len(entry_ids), 0, -BATCH_OPERATIONS):
                deque(starmap(batch.put, islice(items, BATCH_OPERATIONS)), maxlen=0)
                if left > BATCH_OPERATIONS:
                    self._write(scoped, batch, sync=False)
                    batch = LocationsDatabase.batch_without(())
            self._write(scoped, batch)
        for ledger in deleted:
            self.cache.discard(ledger)
        end = 0
        for ledger, count in runs:
            begin, end = end, end + count
            self._cache_written(ledger, entry_ids[begin:end], locations[begin:end])

    def move(self, moves: Iterable[Move]) -> None:
        """Point the index to `new` where it still points to `old`; on disk on return. Raises OSError, Corrupt."""
        from rocksdict import WriteBatch

        pending: dict[bool, list[Move]] = {False: [], True: []}
        for move in moves:
            pending[move.ledger.is_scoped].append(move)
        for scoped, group in pending.items():
            database = self._databases.get(scoped)
            for start in range(0, len(group) if database is not None else 0, BATCH_OPERATIONS):
                assert database is not None
                batch_moves = group[start : start + BATCH_OPERATIONS]
                keys = [location_key(move.ledger, move.entry_id) for move in batch_moves]
                with self._lock:
                    batch = WriteBatch(raw_mode=True)
                    for key, value, move in zip(keys, database.values_of(keys), batch_moves, strict=True):
                        if value is not None and read_location(value) == move.old:
                            batch.put(key, write_location(move.new))
                    if len(batch):
                        self._write(scoped, batch)

    def compact(self, paths: Collection[str] = (), is_wanted: IsWanted = always) -> None:
        """Compact the databases at `paths`, all without `paths`, after a compaction under way, while `is_wanted`.

        Raises OSError.
        """
        with self._compaction:
            for database in tuple(self._databases.values()):
                path = str(database.path)
                if not paths or path in paths:
                    self._compacting = path
                    try:
                        with _as_os_errors():
                            database.compact(is_wanted)
                    finally:
                        self._compacting = ""

    def compactions(self) -> list[tuple[str, bool]]:
        """Return the paths of the databases, with True for one that is being compacted."""
        paths = [str(database.path) for database in tuple(self._databases.values())]
        return [(path, path == self._compacting) for path in paths]


@contextmanager
def _as_os_errors(*, also_damage: bool = True) -> Iterator[None]:
    """Raise RocksDB's errors of a full disk as OSError; with `also_damage` all its errors."""
    try:
        yield
    except BkctlError as error:
        for text, code in _NO_SPACE.items():
            if text in error.message:
                raise OSError(code, error.message) from error
        if also_damage:
            raise OSError(errno.EIO, error.message) from error
        raise
