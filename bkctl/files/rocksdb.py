"""The RocksDBs of DbLedgerStorage: `ledgers` and `locations`, and `scoped-ledgers` and `scoped-locations`.

A database is opened to read, to change, or to serve from. It is read beside a running bookie without a trace in its
directory, and written so that Apache's bookie opens it. A bookie that serves from a database (`serve`) reads it from
any thread, and changes it by `write` alone. Files are checked where RocksDB does not: some damage makes it read
forever.

Source: KeyValueStorageRocksDB, LedgerMetadataIndex, EntryLocationIndex; BP-35.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Self

from bkctl.config import BookieConfig
from bkctl.disk import DIRECTORY_MODE
from bkctl.errors import AlreadyExists, BkctlError, Corrupt, CorruptRecord, DirectoryInUse, NotFound, on_error
from bkctl.files.windows import FileReader
from bkctl.formats.index import (
    STORAGE_FLAGS_KEY,
    LedgerData,
    ledger_key,
    location_key,
    read_ledger_key,
    read_location,
    read_location_key,
    read_storage_flags,
    write_location,
    write_storage_flags,
)
from bkctl.formats.names import ROCKSDB_CURRENT
from bkctl.formats.rocksdb import BLOCK_SIZE, check_block, manifest_name
from bkctl.ids import LedgerId

_FILE: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d+|OPTIONS-\d+|\d+\.(?:sst|log|blob)").fullmatch


def list_files(path: Path) -> list[str]:
    """Return the names of RocksDB's files in a directory. Raises NotFound, BkctlError."""
    try:
        return [entry.name for entry in os.scandir(path) if _FILE(entry.name)]
    except FileNotFoundError:
        raise NotFound(f"{path} has no database") from None
    except OSError as error:
        raise BkctlError(f"{path} cannot be listed: {error.strerror or error}") from error


def link_files(path: Path, view: Path) -> None:
    """Link the files of the database `path` into the directory `view`."""
    names = list_files(path)
    base = path.absolute()
    for name in names:
        os.symlink(base / name, view / name)
    # A large database has many files: raise the limit, up to the hard one.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(names) + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def check_manifest(path: Path) -> None:
    """Raise Corrupt if the MANIFEST is damaged: some damage makes RocksDB read forever."""
    try:
        with FileReader(path / ROCKSDB_CURRENT) as current:
            name = manifest_name(current.read(0, 256), current.name)
        _check_log(path / name)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _check_log(path: Path) -> None:
    with FileReader(path) as file:
        at = 0
        # Windows are whole blocks; only the last block of the file may be short.
        while window := file.window(at):
            for begin in range(0, len(window), BLOCK_SIZE):
                offset = at + begin
                block = window[begin : begin + BLOCK_SIZE]
                if not check_block(block, offset, last=offset + BLOCK_SIZE >= file.size(), where=file.name):
                    if data := file.next_data(offset + len(block)):
                        raise CorruptRecord("Zeros are followed by data", offset=data, where=file.name)
                    return
            at += len(window)


def check_write_ahead_logs(path: Path) -> Iterator[Corrupt]:
    """Yield the damage of the write-ahead logs in the directory `path`, log by log.

    RocksDB silently reads a log up to its damage. Raises NotFound if the directory is missing.
    """
    for name in sorted(list_files(path)):
        if name.endswith(".log"):
            try:
                _check_log(path / name)
            except NotFound:
                continue
            except Corrupt as error:
                yield error


#: Puts and deletes that reach the database together.
BATCH_OPERATIONS: Final = 10_000

_OPEN_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.05
#: rocksdict's refusal to close a database while another thread calls it.
_IN_USE: Final = "Already borrowed"
#: rocksdict leaves this file beside RocksDB's own files.
_BINDING_FILE: Final = "rocksdict-config.json"


def new_batch() -> Any:
    """Return an empty batch for `Database.write`."""
    from rocksdict import WriteBatch

    return WriteBatch(raw_mode=True)


class Database:
    """A RocksDB in the directory `path`; `scoped` if its keys are of scoped ledgers. Use as a context manager."""

    path: Path
    scoped: bool
    _is_for_locations = False

    def __init__(self, path: Path, database: Any, view: Any, *, scoped: bool, writes: bool) -> None:
        self.path, self.scoped = path, scoped
        self._name = str(path)
        self._database, self._view, self._writes = database, view, writes
        self._pending: Any = None

    @classmethod
    def open(cls, path: Path, *, scoped: bool | None = None) -> Self:
        """Open the present state of the database in the directory `path` to read; a bookie may be running on it.

        Even a read-only RocksDB writes its log (and rocksdict its settings) into the directory it opens, so a temporary
        directory with links to the files is opened. `scoped` None: the directory's name decides.
        Raises NotFound, Corrupt.
        """
        from tempfile import TemporaryDirectory

        for attempt in range(1, _OPEN_ATTEMPTS + 1):
            view = TemporaryDirectory(prefix="bkctl-")
            try:
                with on_error(view.cleanup):
                    link_files(path, Path(view.name))
                    check_manifest(path)
                    with rocksdb_errors(path, "cannot be opened", view.name):
                        database = open_read_only(view.name)
            except (Corrupt, NotFound):
                # A running bookie may just create the database, or have replaced files meanwhile; real damage is
                # there at the next attempt too.
                if attempt == _OPEN_ATTEMPTS:
                    raise
                time.sleep(_PAUSE_S)
                continue
            return cls(path, database, view, scoped=_is_scoped(path, scoped), writes=False)
        raise AssertionError

    @classmethod
    def create(cls, path: Path, *, scoped: bool | None = None) -> Self:
        """Create a database in the directory `path`; it is complete and on disk once it is closed without an error.

        Raises AlreadyExists if the directory has a database.
        """
        if (path / ROCKSDB_CURRENT).exists():
            raise AlreadyExists(f"{path} already holds a database")
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        return cls._open_to_write(path, scoped)

    @classmethod
    def edit(cls, path: Path, *, scoped: bool | None = None) -> Self:
        """Open the database in the directory `path` to read and to change in place.

        Raises DirectoryInUse if a bookie or another command has it open, NotFound, Corrupt.
        """
        if not (path / ROCKSDB_CURRENT).exists():
            raise NotFound(f"{path} has no database")
        return cls._open_to_write(path, scoped)

    @classmethod
    def serve(cls, path: Path, config: BookieConfig) -> Self:
        """Open or create the database in the directory `path` as a bookie with these settings uses it.

        Raises DirectoryInUse if another process has it open, Corrupt.
        """
        if (path / ROCKSDB_CURRENT).exists():
            # RocksDB may never return from a damaged MANIFEST.
            check_manifest(path)
        database = cls._open_to_write(path, None, config)
        # A killed bookie must leave only RocksDB's own files.
        (path / _BINDING_FILE).unlink(missing_ok=True)
        return database

    @classmethod
    def _open_to_write(cls, path: Path, scoped: bool | None, config: BookieConfig | None = None) -> Self:
        from rocksdict import DBRecoveryMode, Rdict

        with rocksdb_errors(path, "cannot be opened"):
            options = write_options(cls._is_for_locations, config or BookieConfig())
            if config is not None:
                # RocksDB's default silently drops synced records behind damage in its log.
                options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
            families = location_families(path, config) if cls._is_for_locations and config is not None else None
            database = Rdict(str(path), options=options, column_families=families)
        return cls(path, database, None, scoped=_is_scoped(path, scoped), writes=True)

    def close(self) -> None:
        """Write everything to disk and close the database, once no thread uses it. Safe to call again.

        Raises BkctlError.
        """
        if self._database is None:
            return
        try:
            if self._writes:
                self.flush()
        finally:
            database, self._database = self._database, None
            with rocksdb_errors(self.path, "cannot be closed"):
                _close(database)
            if self._view is not None:
                self._view.cleanup()
            else:
                (self.path / _BINDING_FILE).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close a database that failed, without another write; batches that `write` returned from are on disk."""
        database, self._database = self._database, None
        if database is not None:
            # RocksDB repeats the error that it failed with.
            with suppress(BkctlError), rocksdb_errors(self.path, "cannot be closed"):
                database.close()
            if self._view is not None:
                self._view.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._pending = None
            self._writes = False
        self.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    def items(self, first: bytes = b"", end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in order, from key `first` on and before `end` (None: to the last). Raises Corrupt."""
        self._write_pending()
        with self._reading():
            items = self._iterator(end)
            items.seek(first)
        valid, key, value, step = items.valid, items.key, items.value, items.next
        # Not around the loop: an error of the caller is not RocksDB's.
        while valid():
            yield key(), value()
            step()
        with self._reading():
            items.status()

    def batches(
        self, first: bytes = b"", end: bytes | None = None, *, count: int = BATCH_OPERATIONS
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the items from key `first` on and before `end` in lists of at most `count`."""
        items = self.items(first, end)
        while batch := list(islice(items, count)):
            yield batch

    def last_item(self, first: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """Return the item with the greatest key from `first` on and before `end`; None if there is none."""
        self._write_pending()
        with self._reading():
            items = self._iterator(None)
            items.seek_for_prev(end)
            if items.valid() and items.key() == end:
                items.prev()
            found = (items.key(), items.value()) if items.valid() else None
            items.status()
        return found if found is not None and found[0] >= first else None

    def value_of(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the key is missing."""
        self._write_pending()
        with self._reading():
            value: bytes | None = self._database.get(key)
        return value

    def cached_value_of(self, key: bytes) -> bytes | None:
        """Return the value of a key if it is in memory, so without waiting for the disk; else None."""
        try:
            value: bytes | None = self._database.key_may_exist(key, fetch=True)[1]
        except Exception:  # noqa: BLE001 - `value_of` says what failed
            return None
        return value

    def values_of(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys in their order; None for a missing key."""
        self._write_pending()
        with self._reading():
            values: list[bytes | None] = self._database.get(list(keys))
        return values

    def stray_tables(self) -> list[Path]:
        """Return the tables in the directory that the MANIFEST did not name when the database was opened.

        A running RocksDB deletes obsolete tables; another stray table was lost by a damaged MANIFEST.
        """
        live = {str(table["name"]).lstrip("/") for table in self._database.live_files()}
        directory = self.path if self._view is None else Path(self._view.name)
        names = (path.name for path in directory.iterdir() if path.name.endswith(".sst"))
        return [self.path / name for name in sorted(names) if name not in live]

    def tables(self) -> list[tuple[bytes, int]]:
        """Return the first key and the number of items of each table, in order of the keys; reads no table."""
        return sorted((bytes(table["start_key"]), table["num_entries"]) for table in self._database.live_files())

    def _iterator(self, end: bytes | None) -> Any:
        from rocksdict import ReadOptions

        options = ReadOptions()
        options.set_verify_checksums(True)
        if end is not None:
            options.set_iterate_upper_bound(end)
        return self._database.iter(options)

    def _reading(self) -> Any:
        return rocksdb_errors(self.path, "cannot be read to its end", None if self._view is None else self._view.name)

    # --- writing ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write everything to disk. Raises BkctlError."""
        self._write_pending()
        with rocksdb_errors(self.path, "cannot be written"):
            self._database.flush(True)

    def write(self, batch: Any, *, sync: bool = True) -> None:
        """Write one batch (rocksdict's WriteBatch) atomically; `sync`: with all batches before it to the disk.

        Any thread may call it. Raises BkctlError.
        """
        from rocksdict import WriteOptions

        options = WriteOptions()
        options.sync = sync
        with rocksdb_errors(self.path, "cannot be written"):
            self._database.write(batch, options)

    def compact(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Merge all tables and drop deleted items; return when RocksDB is done. Raises BkctlError.

        The ranges of keys between the tables' first keys are compacted one by one, while `is_wanted`.
        """
        bounds = [None, *sorted({first for first, _ in self.tables()}), None]
        for first, end in pairwise(bounds):
            if not is_wanted():
                return
            with rocksdb_errors(self.path, "cannot be compacted"):
                self._database.compact_range(first, end)

    def _batch(self) -> Any:
        if self._pending is None:
            self._pending = new_batch()
        elif len(self._pending) >= BATCH_OPERATIONS:
            self._write_pending()
            return self._batch()
        return self._pending

    def _write_pending(self) -> None:
        if self._pending is not None:
            batch, self._pending = self._pending, None
            with rocksdb_errors(self.path, "cannot be written"):
                self._database.write(batch)


def estimated_count(database: Database) -> int:
    """Return about how many keys there are, without reading them."""
    with database._reading():
        return database._database.property_int_value("rocksdb.estimate-num-keys") or 0


def _close(database: Any) -> None:
    while True:
        try:
            database.close()
        except RuntimeError as error:
            if str(error) != _IN_USE:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _is_scoped(path: Path, scoped: bool | None) -> bool:
    return path.name.startswith("scoped-") if scoped is None else scoped


_CACHE_BYTES: Final = 32 << 20
_WRITE_BUFFER_BYTES: Final = 64 << 20
#: RocksDB's default, which `ledgers` has.
_BLOCK_BYTES_MIN: Final = 4 << 10


def open_read_only(directory: str) -> Any:
    """Open the database in `directory` to read, with a small cache."""
    from rocksdict import AccessType, BlockBasedOptions, Options, Rdict

    table = BlockBasedOptions()
    table.set_block_cache(_block_cache(_CACHE_BYTES, _BLOCK_BYTES_MIN))
    # Without this the filters of all tables stay in memory: 10 bits an entry.
    table.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    return Rdict(directory, options=options, access_type=AccessType.read_only(False))


def write_options(for_locations: bool, config: BookieConfig) -> Any:
    """Return RocksDB's options as Apache's bookie sets them. Source: KeyValueStorageRocksDB."""
    from rocksdict import BlockBasedOptions, ChecksumType, DBCompressionType, Options

    table = BlockBasedOptions()
    table.set_format_version(config.db_storage_rocksdb_format_version)
    table.set_checksum_type(ChecksumType.xxhash())
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    if for_locations:
        table.set_block_size(config.db_storage_rocksdb_block_size)
        if config.db_storage_rocksdb_bloom_filter_bits_per_key > 0:
            table.set_bloom_filter(config.db_storage_rocksdb_bloom_filter_bits_per_key, False)
        table.set_block_cache(_location_cache(config))
        table.set_cache_index_and_filter_blocks(True)
        _set_location_sizes(options, config)
    else:
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_compression_type(DBCompressionType.snappy())
    options.set_block_based_table_factory(table)
    if config.db_storage_rocksdb_log_path:
        options.set_db_log_dir(config.db_storage_rocksdb_log_path)
    options.set_keep_log_file_num(30)
    options.set_log_file_time_to_roll(24 * 3600)
    return options


def location_families(path: Path, config: BookieConfig) -> dict[str, Any] | None:
    """Return the column families of the location database in `path`, with the cache and sizes of `config`.

    Without them rocksdict opens an existing database with the options in its files, and a cache of 8 MiB. The format of
    tables and the number of levels stay, so that every bookie that read the database can open it again. None if no
    options can be read, as in a new database.
    """
    from rocksdict import Options

    try:
        _, families = Options.load_latest(str(path), ignore_unknown_options=True, cache=_location_cache(config))
    except Exception:  # noqa: BLE001 - rocksdict raises Exception itself; RocksDB does not need the options
        return None
    for options in families.values():
        _set_location_sizes(options, config)
    return families


def _set_location_sizes(options: Any, config: BookieConfig) -> None:
    from rocksdict import DBCompressionType

    options.set_write_buffer_size(config.db_storage_rocksdb_write_buffer_size_mb << 20)
    options.set_target_file_size_base(config.db_storage_rocksdb_sst_size_mb << 20)
    options.set_level_zero_file_num_compaction_trigger(config.db_storage_rocksdb_num_files_in_level0)
    options.set_max_bytes_for_level_base(config.db_storage_rocksdb_max_size_in_level1_mb << 20)
    is_lz4 = config.db_storage_rocksdb_lz4_compression_enabled
    options.set_compression_type(DBCompressionType.lz4() if is_lz4 else DBCompressionType.snappy())


def _location_cache(config: BookieConfig) -> Any:
    cache_bytes = config.db_storage_rocksdb_block_cache_size
    return _block_cache(_CACHE_BYTES if cache_bytes is None else cache_bytes, config.db_storage_rocksdb_block_size)


def _block_cache(capacity_bytes: int, block_bytes: int) -> Any:
    """Return a block cache that can keep the filter of a large table.

    RocksDB's LRUCache divides its capacity among up to 64 shards. A filter that fits none is never cached, so each
    look-up reads it from its file; of 64 MiB, that is the filter of a table with 800,000 entries. HyperClockCache has
    shards of 32 MiB or more, but allocates its index at once, by the capacity: too much for large ones.
    """
    from rocksdict import Cache

    if not 0 < capacity_bytes < 1 << 30:
        return Cache(capacity_bytes)
    return Cache.new_hyper_clock_cache(capacity_bytes, max(block_bytes, _BLOCK_BYTES_MIN))


#: RocksDB's errors are texts. ("block checksum mismatch" must not match.)
_LOCKED: Final = re.compile(r"\block\b", re.IGNORECASE)
_NOT_DAMAGE: Final = re.compile(
    "|".join(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE)))
)


@contextmanager
def rocksdb_errors(path: Path, problem: str, view: str | None = None) -> Iterator[None]:
    """Raise errors of RocksDB as DirectoryInUse, Corrupt or BkctlError about the database `path`.

    `problem` is the failed operation ("cannot be opened"). Texts name `path` instead of the linked directory `view`.
    """
    try:
        yield
    except BkctlError:
        raise
    except Exception as error:  # rocksdict raises Exception itself
        text = str(error) if view is None else str(error).replace(view, str(path))
        if view is None and _LOCKED.search(text):
            raise DirectoryInUse(f"{path} is in use: {text}", hint="stop the bookie first") from error
        if _NOT_DAMAGE.search(text):
            raise BkctlError(f"{path} {problem}: {text}") from error
        raise Corrupt(f"{path} {problem}: {text}") from error


REBUILD_HINT: Final = "'bkctl bookie index rebuild --ledgers --locations' rebuilds the databases from the entry logs"


class LedgersDatabase(Database):
    """The ledgers that a bookie has: `ledgers`, or `scoped-ledgers`."""

    def ledgers(self, first: LedgerId | None = None) -> Iterator[tuple[LedgerId, LedgerData]]:
        """Yield the ledgers in order, from `first` on. Raises Corrupt.

        If a ledger has two keys (Apache's rebuild leaves keys of 16 bytes in scope 0), the later one counts, as in
        Apache's bookie.
        """
        for ledger, items in groupby(self._ledger_items(first), itemgetter(0)):
            ((_, value),) = deque(items, maxlen=1)
            yield ledger, self._parse(ledger, value)

    def ledger_ids(self, first: LedgerId | None = None, end: LedgerId | None = None) -> Iterator[LedgerId]:
        """Yield the ids of the ledgers from `first` on and before `end`, in order. Raises Corrupt."""
        for ledger, _ in groupby(self._ledger_items(first, end), itemgetter(0)):
            yield ledger

    def _ledger_items(self, first: LedgerId | None, end: LedgerId | None = None) -> Iterator[tuple[LedgerId, bytes]]:
        begin, stop = (None if ledger is None else ledger_key(ledger, scoped=self.scoped) for ledger in (first, end))
        for key, value in self.items(begin or b"", stop):
            ledger = read_ledger_key(key, self._name, scoped=self.scoped)
            if ledger is not None:
                yield ledger, value

    def get(self, ledger: LedgerId) -> LedgerData | None:
        """Return the data of a ledger; None if the database lacks the ledger. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return None
        key = ledger_key(ledger)
        found = self.last_item(key, _after(key))
        return None if found is None else self._parse(ledger, found[1])

    def storage_flags(self) -> int | None:
        """Return the storage flags (bit 1: the bookie must check its integrity); None if never written."""
        value = None if self.scoped else self.value_of(STORAGE_FLAGS_KEY)
        return None if value is None else read_storage_flags(value, self._name)

    @staticmethod
    def batch_of(changes: Mapping[LedgerId, LedgerData], deleted: Iterable[LedgerId]) -> Any:
        """Return a batch for `write` that removes the `deleted` ledgers, then puts the `changes`."""
        batch = new_batch()
        for ledger in deleted:
            key = ledger_key(ledger)
            batch.delete(key)
            if not ledger.is_scoped:
                batch.delete(key + bytes(8))
        for ledger, data in changes.items():
            _put_ledger(batch, ledger, data)
        return batch

    def put(self, ledger: LedgerId, data: LedgerData) -> None:
        """Add a ledger, or replace its data."""
        assert ledger.is_scoped == self.scoped, f"ledger {ledger} is kept elsewhere"
        _put_ledger(self._batch(), ledger, data)

    def put_storage_flags(self, flags: int) -> None:
        self._batch().put(STORAGE_FLAGS_KEY, write_storage_flags(flags))

    def _parse(self, ledger: LedgerId, value: bytes) -> LedgerData:
        return LedgerData.parse(value, f"ledger {ledger} in {self.path}")


class LocationsDatabase(Database):
    """The locations of a bookie's entries: `locations`, or `scoped-locations`. A ledger's entries are in order."""

    _is_for_locations = True

    def locations(self, ledger: LedgerId | None = None) -> Iterator[tuple[LedgerId, int, int]]:
        """Yield (ledger, entry id, location) in order, of all ledgers or of one. Raises Corrupt."""
        if ledger is not None and ledger.is_scoped != self.scoped:
            return
        items = self.items() if ledger is None else self.items(*_keys_of(ledger))
        name, scoped = self._name, self.scoped
        for key, value in items:
            found, entry_id = read_location_key(key, name, scoped=scoped)
            yield found, entry_id, read_location(value, name)

    def ledger_ids(self) -> Iterator[LedgerId]:
        """Yield the ledgers with entries, in order; skip from ledger to ledger. Raises Corrupt."""
        self._write_pending()
        with self._reading():
            items = self._iterator(None)
            items.seek(b"")
        while items.valid():
            ledger, _ = read_location_key(items.key(), self._name, scoped=self.scoped)
            yield ledger
            with self._reading():
                items.seek(_after(ledger_key(ledger)))
        with self._reading():
            items.status()

    def batches_of(self, ledger: LedgerId, *, count: int = BATCH_OPERATIONS) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the items of one ledger, in lists of at most `count`."""
        return self.batches(*_keys_of(ledger), count=count)

    def get(self, ledger: LedgerId, entry_id: int, *, cached: bool = False) -> int:
        """Return the location of an entry; 0 if it is missing, or with `cached` not in memory. Raises Corrupt."""
        if ledger.is_scoped != self.scoped or not 0 <= entry_id < 1 << 63:
            return 0
        value = (self.cached_value_of if cached else self.value_of)(location_key(ledger, entry_id))
        return 0 if value is None else read_location(value, self._name)

    def last_entry_id(self, ledger: LedgerId) -> int:
        """Return the highest entry id of a ledger; -1 without entries. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return -1
        found = self.last_item(*_keys_of(ledger))
        return -1 if found is None else read_location_key(found[0], self._name, scoped=self.scoped)[1]

    @staticmethod
    def batch_without(deleted: Iterable[LedgerId]) -> Any:
        """Return a batch for `write` that removes all entries of the `deleted` ledgers; callers may add puts to it."""
        batch = new_batch()
        for ledger in deleted:
            batch.delete_range(*_keys_of(ledger))
        return batch

    def put(self, ledger: LedgerId, entry_id: int, location: int) -> None:
        """Set the location of an entry."""
        self._batch().put(location_key(ledger, entry_id, scoped=self.scoped), write_location(location))

    def put_all(self, locations: Iterable[tuple[LedgerId, int, int]]) -> int:
        """Set the locations of many entries (ledger, entry id, location); return their number."""
        count = 0
        scoped = self.scoped
        items = iter(locations)
        while batch := list(islice(items, BATCH_OPERATIONS)):
            pending = self._batch()
            for ledger, entry_id, location in batch:
                pending.put(location_key(ledger, entry_id, scoped=scoped), write_location(location))
            count += len(batch)
        return count


def _keys_of(ledger: LedgerId) -> tuple[bytes, bytes]:
    """Return the first key of a ledger's entries, and the first key behind them."""
    return location_key(ledger, 0), _after(ledger_key(ledger))


def _put_ledger(batch: Any, ledger: LedgerId, data: LedgerData) -> None:
    key = ledger_key(ledger)
    batch.put(key, data.serialize())
    if not ledger.is_scoped:
        batch.delete(key + bytes(8))  # Apache's rebuild leaves this key, which would win.


def _after(key: bytes) -> bytes:
    """Return the first key behind every key that begins with `key`."""
    value = int.from_bytes(key, "big") + 1
    return value.to_bytes(len(key), "big") if value < 1 << 8 * len(key) else b"\xff" * (len(key) + 32)
