"""The RocksDBs of DbLedgerStorage: `ledgers` and `locations`, and `scoped-ledgers` and `scoped-locations`.

They are read beside a running bookie, without a trace in its directories, and written so that Apache's bookie opens
what we made: with the table format, compression and filter that its own settings have by default. A bookie that serves
from a database (`serve`) reads it from any thread, and changes it by `write` alone.

Source: KeyValueStorageRocksDB, LedgerMetadataIndex, EntryLocationIndex; BP-35.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from bkctl.config import BookieConfig
from bkctl.disk import DIRECTORY_MODE
from bkctl.errors import AlreadyExists, BkctlError, Corrupt, CorruptRecord, DirectoryInUse, NotFound
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
from bkctl.formats.rocksdb import BLOCK_SIZE, check_block, manifest_name
from bkctl.ids import LedgerId

#: Puts and deletes that reach the database together.
BATCH_OPERATIONS: Final = 10_000

_FILE: Final = re.compile(r"CURRENT|IDENTITY|MANIFEST-\d+|OPTIONS-\d+|\d+\.(?:sst|log|blob)").fullmatch
_OPEN_ATTEMPTS: Final = 5
_CACHE_BYTES: Final = 32 << 20
_WRITE_BUFFER_BYTES: Final = 64 << 20
#: What rocksdict leaves beside RocksDB's own files.
_BINDING_FILE: Final = "rocksdict-config.json"


class _Database:
    """A database: `path`, and whether its keys are those of scoped ledgers. A context manager."""

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
        """The database in the directory `path` as it is now, to read; a bookie may be running on it.

        Even a read-only RocksDB writes its log (and rocksdict its settings) into the directory it opens, so that is
        one of our own, with links to the files. `scoped` None: the directory's name says it.
        Raises NotFound, Corrupt.
        """
        from tempfile import TemporaryDirectory

        problem: BkctlError | None = None
        for _ in range(_OPEN_ATTEMPTS):
            view = TemporaryDirectory(prefix="bkctl-")
            try:
                _link_files(path, Path(view.name))
                _check_manifest(path)
                with _errors_of(path, "cannot be opened", view.name):
                    database = _open_read_only(view.name)
            except Corrupt as error:
                # A running bookie replaces files while we look: what is damaged stays so.
                view.cleanup()
                problem = error
            except BaseException:
                view.cleanup()
                raise
            else:
                return cls(path, database, view, scoped=_is_scoped(path, scoped), writes=False)
        assert problem is not None
        raise problem

    @classmethod
    def create(cls, path: Path, *, scoped: bool | None = None) -> Self:
        """A new database in the directory `path`, to write; complete and on disk once it is closed without an error.

        Raises AlreadyExists where there is one.
        """
        if (path / "CURRENT").exists():
            raise AlreadyExists(f"{path} already holds a database")
        path.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        return cls._open_to_write(path, scoped)

    @classmethod
    def edit(cls, path: Path, *, scoped: bool | None = None) -> Self:
        """The database in the directory `path`, to read and to change in place.

        Raises DirectoryInUse where a bookie (or another command) has it open, NotFound, Corrupt.
        """
        if not (path / "CURRENT").exists():
            raise NotFound(f"There is no database in {path}")
        return cls._open_to_write(path, scoped)

    @classmethod
    def serve(cls, path: Path, config: BookieConfig) -> Self:
        """The database in the directory `path`, made where there is none, as a bookie with these settings uses it.

        Raises DirectoryInUse where another process has it open, Corrupt.
        """
        if (path / "CURRENT").exists():
            # On a damaged MANIFEST RocksDB may never return.
            _check_manifest(path)
        database = cls._open_to_write(path, None, config)
        # A bookie that is killed leaves nothing that is not RocksDB's.
        (path / _BINDING_FILE).unlink(missing_ok=True)
        return database

    @classmethod
    def _open_to_write(cls, path: Path, scoped: bool | None, config: BookieConfig | None = None) -> Self:
        from rocksdict import DBRecoveryMode, Rdict

        with _errors_of(path, "cannot be opened"):
            options = _write_options(cls._is_for_locations, config or BookieConfig())
            if config is not None:
                # By default RocksDB would forget in silence what stands behind damage in its log, and was synced.
                options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
            database = Rdict(str(path), options=options)
        return cls(path, database, None, scoped=_is_scoped(path, scoped), writes=True)

    def close(self) -> None:
        """Close the database; what was written is on disk then. Safe to call again. Raises BkctlError."""
        if self._database is None:
            return
        try:
            if self._writes:
                self.flush()
        finally:
            database, self._database = self._database, None
            with _errors_of(self.path, "cannot be closed"):
                database.close()
            if self._view is not None:
                self._view.cleanup()
            else:
                (self.path / _BINDING_FILE).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Let go of the database, which failed, without another write; what `write` returned from is on disk."""
        database, self._database = self._database, None
        if database is not None:
            # It says again what it failed with.
            with suppress(BkctlError), _errors_of(self.path, "cannot be closed"):
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
        # Here and not around the loop: what the caller raises is the caller's.
        while valid():
            yield key(), value()
            step()
        with self._reading():
            items.status()

    def batches(
        self, first: bytes = b"", end: bytes | None = None, *, count: int = BATCH_OPERATIONS
    ) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the same items in lists of at most `count`."""
        items = self.items(first, end)
        while batch := list(islice(items, count)):
            yield batch

    def last_item(self, first: bytes, end: bytes) -> tuple[bytes, bytes] | None:
        """The item with the greatest key from `first` on and before `end`; None where there is none."""
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
        """The value of a key; None where there is none."""
        self._write_pending()
        with self._reading():
            value: bytes | None = self._database.get(key)
        return value

    def values_of(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of many keys, in their order; None where there is none."""
        self._write_pending()
        with self._reading():
            values: list[bytes | None] = self._database.get(list(keys))
        return values

    def stray_tables(self) -> list[Path]:
        """The tables in the directory that the MANIFEST did not name when the database was opened.

        A running RocksDB deletes those that it needs no more; what else there is, a damaged MANIFEST has lost.
        """
        live = {str(each["name"]).lstrip("/") for each in self._database.live_files()}
        directory = self.path if self._view is None else Path(self._view.name)
        names = (path.name for path in directory.iterdir() if path.name.endswith(".sst"))
        return [self.path / name for name in sorted(names) if name not in live]

    def _iterator(self, end: bytes | None) -> Any:
        from rocksdict import ReadOptions

        options = ReadOptions()
        options.set_verify_checksums(True)
        if end is not None:
            options.set_iterate_upper_bound(end)
        return self._database.iter(options)

    def _reading(self) -> Any:
        return _errors_of(self.path, "cannot be read to its end", None if self._view is None else self._view.name)

    # --- writing ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have all that was written on disk. Raises BkctlError."""
        self._write_pending()
        with _errors_of(self.path, "cannot be written"):
            self._database.flush(True)

    def write(self, batch: Any) -> None:
        """Write one batch (rocksdict's WriteBatch), all of it or nothing; it is on disk when this returns.

        Any thread may call it. Raises BkctlError.
        """
        from rocksdict import WriteOptions

        options = WriteOptions()
        options.sync = True
        with _errors_of(self.path, "cannot be written"):
            self._database.write(batch, options)

    def compact(self) -> None:
        """Let RocksDB merge all tables, and forget what was deleted; returns when that is done. Raises BkctlError."""
        with _errors_of(self.path, "cannot be compacted"):
            self._database.compact_range(None, None)

    def _batch(self) -> Any:
        if self._pending is None:
            from rocksdict import WriteBatch

            self._pending = WriteBatch(raw_mode=True)
        elif len(self._pending) >= BATCH_OPERATIONS:
            self._write_pending()
            return self._batch()
        return self._pending

    def _write_pending(self) -> None:
        if self._pending is not None:
            batch, self._pending = self._pending, None
            with _errors_of(self.path, "cannot be written"):
                self._database.write(batch)


class LedgersDatabase(_Database):
    """The ledgers that a bookie has: `ledgers`, or `scoped-ledgers`."""

    def ledgers(self, first: LedgerId | None = None) -> Iterator[tuple[LedgerId, LedgerData]]:
        """Yield the ledgers in order, from `first` on.

        Where a ledger has two keys (Apache's rebuild leaves keys of 16 bytes in scope 0) the later counts, as it does
        for Apache's bookie. Raises Corrupt.
        """
        pending: tuple[LedgerId, bytes] | None = None
        for key, value in self.items(b"" if first is None else ledger_key(first, scoped=self.scoped)):
            ledger = read_ledger_key(key, self._name, scoped=self.scoped)
            if ledger is None:
                continue
            if pending is not None and pending[0] != ledger:
                yield pending[0], self._parse(*pending)
            pending = ledger, value
        if pending is not None:
            yield pending[0], self._parse(*pending)

    def ledger_ids(self, first: LedgerId | None = None, end: LedgerId | None = None) -> Iterator[LedgerId]:
        """Yield the ids of the ledgers from `first` on and before `end`, in order. Raises Corrupt."""
        last: LedgerId | None = None
        begin = b"" if first is None else ledger_key(first, scoped=self.scoped)
        for key, _ in self.items(begin, None if end is None else ledger_key(end, scoped=self.scoped)):
            ledger = read_ledger_key(key, self._name, scoped=self.scoped)
            if ledger is not None and ledger != last:
                yield ledger
                last = ledger

    def get(self, ledger: LedgerId) -> LedgerData | None:
        """What the database says of a ledger; None where it does not have it. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return None
        key = ledger_key(ledger)
        found = self.last_item(key, _after(key))
        return None if found is None else self._parse(ledger, found[1])

    def storage_flags(self) -> int | None:
        """The storage flags (bit 1: the bookie must check its integrity); None where they were never written."""
        value = None if self.scoped else self.value_of(STORAGE_FLAGS_KEY)
        return None if value is None else read_storage_flags(value, self._name)

    @staticmethod
    def batch_of(changes: Mapping[LedgerId, LedgerData], deleted: Iterable[LedgerId]) -> Any:
        """A batch for `write` that removes ledgers, then adds others or replaces what is said of them."""
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for ledger in deleted:
            _delete_ledger(batch, ledger)
        for ledger, data in changes.items():
            _put_ledger(batch, ledger, data)
        return batch

    def put(self, ledger: LedgerId, data: LedgerData) -> None:
        """Add a ledger, or replace what is said of it."""
        assert ledger.is_scoped == self.scoped, f"ledger {ledger} is kept elsewhere"
        _put_ledger(self._batch(), ledger, data)

    def put_storage_flags(self, flags: int) -> None:
        """Write the storage flags."""
        self._batch().put(STORAGE_FLAGS_KEY, write_storage_flags(flags))

    def delete(self, ledger: LedgerId) -> None:
        """Remove a ledger."""
        assert ledger.is_scoped == self.scoped, f"ledger {ledger} is kept elsewhere"
        _delete_ledger(self._batch(), ledger)

    def _parse(self, ledger: LedgerId, value: bytes) -> LedgerData:
        return LedgerData.parse(value, f"ledger {ledger} in {self.path}")


class LocationsDatabase(_Database):
    """Where a bookie's entries are: `locations`, or `scoped-locations`. The entries of a ledger are in order."""

    _is_for_locations = True

    def locations(
        self, ledger: LedgerId | None = None, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[LedgerId, int, int]]:
        """Yield (ledger, entry id, location) in order: of all ledgers, or the entries `first` to `last` of one.

        Raises Corrupt.
        """
        if ledger is None:
            items = self.items()
        elif ledger.is_scoped != self.scoped:
            return
        else:
            items = self.items(location_key(ledger, max(first, 0)), self._end(ledger, last))
        name, scoped = self._name, self.scoped
        for key, value in items:
            found, entry_id = read_location_key(key, name, scoped=scoped)
            yield found, entry_id, read_location(value, name)

    def ledger_ids(self) -> Iterator[LedgerId]:
        """Yield the ledgers that have entries here, in order; goes from ledger to ledger. Raises Corrupt."""
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
        return self.batches(location_key(ledger, 0, scoped=self.scoped), self._end(ledger, None), count=count)

    def get(self, ledger: LedgerId, entry_id: int) -> int:
        """The location of an entry; 0 where it is not here. Raises Corrupt."""
        if ledger.is_scoped != self.scoped or not 0 <= entry_id < 1 << 63:
            return 0
        value = self.value_of(location_key(ledger, entry_id))
        return 0 if value is None else read_location(value, self._name)

    def last_entry_id(self, ledger: LedgerId) -> int:
        """The highest entry id that is here; -1 where there is none. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return -1
        found = self.last_item(location_key(ledger, 0), _after(ledger_key(ledger)))
        return -1 if found is None else read_location_key(found[0], self._name, scoped=self.scoped)[1]

    @staticmethod
    def batch_without(deleted: Iterable[LedgerId]) -> Any:
        """A batch for `write` that forgets all entries of some ledgers; to be gone on with."""
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for ledger in deleted:
            batch.delete_range(location_key(ledger, 0), _after(ledger_key(ledger)))
        return batch

    def put(self, ledger: LedgerId, entry_id: int, location: int) -> None:
        """Say where an entry is."""
        self._batch().put(location_key(ledger, entry_id, scoped=self.scoped), write_location(location))

    def put_all(self, locations: Iterable[tuple[LedgerId, int, int]]) -> int:
        """Say where many entries are: (ledger, entry id, location). How many there were."""
        count = 0
        scoped = self.scoped
        items = iter(locations)
        while batch := list(islice(items, BATCH_OPERATIONS)):
            pending = self._batch()
            for ledger, entry_id, location in batch:
                pending.put(location_key(ledger, entry_id, scoped=scoped), write_location(location))
            count += len(batch)
        return count

    def delete_entries(self, ledger: LedgerId, first: int = 0, last: int | None = None) -> None:
        """Forget the entries `first` to `last` (None: to the end) of a ledger."""
        self._batch().delete_range(location_key(ledger, first, scoped=self.scoped), self._end(ledger, last))

    def _end(self, ledger: LedgerId, last: int | None) -> bytes:
        if last is None or last + 1 >= 1 << 63:
            return _after(ledger_key(ledger, scoped=self.scoped))
        return location_key(ledger, last + 1, scoped=self.scoped)


def check_write_ahead_logs(path: Path) -> Iterator[Corrupt]:
    """Yield what is wrong with the write-ahead logs in the directory `path`, log by log.

    RocksDB reads such a log up to the damage and says nothing. Raises NotFound where the directory is missing.
    """
    for name in sorted(_names(path)):
        if name.endswith(".log"):
            try:
                _check_log(path / name)
            except NotFound:
                continue
            except Corrupt as error:
                yield error


def _put_ledger(batch: Any, ledger: LedgerId, data: LedgerData) -> None:
    key = ledger_key(ledger)
    batch.put(key, data.serialize())
    if not ledger.is_scoped:
        batch.delete(key + bytes(8))  # Apache's rebuild leaves it, and it would count.


def _delete_ledger(batch: Any, ledger: LedgerId) -> None:
    key = ledger_key(ledger)
    batch.delete(key)
    if not ledger.is_scoped:
        batch.delete(key + bytes(8))


def _is_scoped(path: Path, scoped: bool | None) -> bool:
    return path.name.startswith("scoped-") if scoped is None else scoped


def _after(key: bytes) -> bytes:
    """The first key behind all that begin with `key`."""
    value = int.from_bytes(key, "big") + 1
    return value.to_bytes(len(key), "big") if value < 1 << 8 * len(key) else b"\xff" * (len(key) + 32)


def _names(path: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path) if _FILE(entry.name)]
    except FileNotFoundError:
        raise NotFound(f"There is no database in {path}") from None
    except OSError as error:
        raise BkctlError(f"{path} cannot be listed: {error.strerror or error}") from error


def _link_files(path: Path, view: Path) -> None:
    names = _names(path)
    base = path.absolute()
    for name in names:
        os.symlink(base / name, view / name)
    _allow_open_files(len(names))


def _check_manifest(path: Path) -> None:
    """Raise Corrupt where the MANIFEST is damaged: there are bytes that RocksDB would never end to read."""
    try:
        with FileReader(path / "CURRENT") as current:
            name = manifest_name(current.read(0, 256), current.name)
        _check_log(path / name)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _check_log(path: Path) -> None:
    with FileReader(path) as file:
        at = 0
        # A window is whole blocks, so only the file's end cuts one.
        while window := file.window(at):
            for begin in range(0, len(window), BLOCK_SIZE):
                offset = at + begin
                block = window[begin : begin + BLOCK_SIZE]
                if not check_block(block, offset, last=offset + BLOCK_SIZE >= file.size(), where=file.name):
                    if data := file.next_data(offset + len(block)):
                        raise CorruptRecord("Zeros, and then data again", offset=data, where=file.name)
                    return
            at += len(window)


def _allow_open_files(count: int) -> None:
    """Let the process open all files of a large database at once, as far as its hard limit goes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _open_read_only(directory: str) -> Any:
    from rocksdict import AccessType, BlockBasedOptions, Cache, Options, Rdict

    table = BlockBasedOptions()
    table.set_block_cache(Cache(_CACHE_BYTES))
    # Else the filters of all tables stay in memory: 10 bits an entry.
    table.set_cache_index_and_filter_blocks(True)
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    return Rdict(directory, options=options, access_type=AccessType.read_only(False))


def _write_options(for_locations: bool, config: BookieConfig) -> Any:
    from rocksdict import BlockBasedOptions, Cache, ChecksumType, DBCompressionType, Options

    table = BlockBasedOptions()
    table.set_format_version(config.db_storage_rocksdb_format_version)
    table.set_checksum_type(ChecksumType.xxhash())
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    if for_locations:
        table.set_block_size(config.db_storage_rocksdb_block_size)
        if config.db_storage_rocksdb_bloom_filter_bits_per_key > 0:
            table.set_bloom_filter(config.db_storage_rocksdb_bloom_filter_bits_per_key, False)
        cache_bytes = config.db_storage_rocksdb_block_cache_size
        table.set_block_cache(Cache(_CACHE_BYTES if cache_bytes is None else cache_bytes))
        table.set_cache_index_and_filter_blocks(True)
        if config.db_storage_rocksdb_lz4_compression_enabled:
            options.set_compression_type(DBCompressionType.lz4())
        else:
            options.set_compression_type(DBCompressionType.snappy())
        options.set_write_buffer_size(config.db_storage_rocksdb_write_buffer_size_mb << 20)
        if config.db_storage_rocksdb_num_levels > 0:
            options.set_num_levels(config.db_storage_rocksdb_num_levels)
        options.set_level_zero_file_num_compaction_trigger(config.db_storage_rocksdb_num_files_in_level0)
        options.set_max_bytes_for_level_base(config.db_storage_rocksdb_max_size_in_level1_mb << 20)
        options.set_target_file_size_base(config.db_storage_rocksdb_sst_size_mb << 20)
        options.set_level_compaction_dynamic_level_bytes(True)
    else:
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_compression_type(DBCompressionType.snappy())
    options.set_block_based_table_factory(table)
    if config.db_storage_rocksdb_log_path:
        options.set_db_log_dir(config.db_storage_rocksdb_log_path)
    options.set_keep_log_file_num(30)
    options.set_log_file_time_to_roll(24 * 3600)
    return options


#: RocksDB's errors are texts. ("block checksum mismatch" is about no lock.)
_LOCKED: Final = re.compile(r"\block\b", re.IGNORECASE)
_NOT_DAMAGE: Final = re.compile(
    "|".join(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EMFILE)))
)


@contextmanager
def _errors_of(path: Path, problem: str, view: str | None = None) -> Iterator[None]:
    try:
        yield
    except BkctlError:
        raise
    except Exception as error:  # rocksdict raises nothing narrower
        text = str(error) if view is None else str(error).replace(view, str(path))
        if view is None and _LOCKED.search(text):
            raise DirectoryInUse(f"{path} is in use: {text}", hint="stop the bookie first") from error
        if _NOT_DAMAGE.search(text):
            raise BkctlError(f"{path} {problem}: {text}") from error
        raise Corrupt(f"{path} {problem}: {text}") from error
