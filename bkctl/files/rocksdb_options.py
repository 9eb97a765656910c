"""RocksDB's options and errors, as a bookie's databases use them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bkctl.config import BookieConfig
from bkctl.errors import BkctlError, Corrupt, DirectoryInUse

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
        _set_location_options(options, table, config)
    else:
        options.set_write_buffer_size(_WRITE_BUFFER_BYTES)
        options.set_compression_type(DBCompressionType.snappy())
    options.set_block_based_table_factory(table)
    if config.db_storage_rocksdb_log_path:
        options.set_db_log_dir(config.db_storage_rocksdb_log_path)
    options.set_keep_log_file_num(30)
    options.set_log_file_time_to_roll(24 * 3600)
    return options


def _set_location_options(options: Any, table: Any, config: BookieConfig) -> None:
    table.set_block_size(config.db_storage_rocksdb_block_size)
    if config.db_storage_rocksdb_bloom_filter_bits_per_key > 0:
        table.set_bloom_filter(config.db_storage_rocksdb_bloom_filter_bits_per_key, False)
    table.set_block_cache(_location_cache(config))
    table.set_cache_index_and_filter_blocks(True)
    _set_location_sizes(options, config)


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
