"""RocksDB's option files as Pulsar ships them: what a bookie takes from one, and what its image writes into one.

Source: KeyValueStorageRocksDB; Pulsar's update-rocksdb-conf-from-env.py.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import UsageError

PREFIX: Final = "PULSAR_PREFIX_"
_DB: Final = "DBOptions"
_FAMILY: Final = 'CFOptions "default"'
_TABLE: Final = 'TableOptions/BlockBasedTable "default"'
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _same(text: str) -> str:
    return text


def _bytes(text: str) -> str:
    """Return the number that RocksDB reads: 64M is 67108864."""
    unit = _UNITS.get(text[-1:].upper())
    return str(int(text[:-1]) * unit) if unit else text


def _megabytes(text: str) -> str:
    return str(-(-int(_bytes(text)) >> 20))


def _from_megabytes(text: str) -> str:
    return str(int(text) << 20)


def _bits(text: str) -> str:
    return "-1" if text in ("", "nullptr") else text.split(":")[1]


def _to_bits(text: str) -> str:
    return f"rocksdb.BloomFilter:{text}:false"


def _is_lz4(text: str) -> str:
    return str({"kLZ4Compression": True, "kSnappyCompression": False}[text]).lower()


def _to_compression(text: str) -> str:
    return "kLZ4Compression" if text.lower() in ("true", "1", "yes") else "kNoCompression"


class RocksdbOption(NamedTuple):
    """The place of a bookie's setting in an option file; `read` turns RocksDB's text into Java's, `write` back."""

    section: str
    name: str
    read: Callable[[str], str] | None = _same
    write: Callable[[str], str] = _same


#: A bookie's keys; those without `read` have no effect in our bookie.
OPTIONS: Final = {
    "dbStorage_rocksDB_logPath": RocksdbOption(_DB, "log_path"),
    "dbStorage_rocksDB_logLevel": RocksdbOption(_DB, "info_log_level", None),
    "dbStorage_rocksDB_lz4CompressionEnabled": RocksdbOption(_FAMILY, "compression", _is_lz4, _to_compression),
    "dbStorage_rocksDB_writeBufferSizeMB": RocksdbOption(_FAMILY, "write_buffer_size", _megabytes, _from_megabytes),
    "dbStorage_rocksDB_sstSizeInMB": RocksdbOption(_FAMILY, "target_file_size_base", _megabytes, _from_megabytes),
    "dbStorage_rocksDB_blockSize": RocksdbOption(_TABLE, "block_size", _bytes),
    "dbStorage_rocksDB_bloomFilterBitsPerKey": RocksdbOption(_TABLE, "filter_policy", _bits, _to_bits),
    "dbStorage_rocksDB_blockCacheSize": RocksdbOption(_TABLE, "block_cache", _bytes),
    "dbStorage_rocksDB_numLevels": RocksdbOption(_FAMILY, "num_levels", None),
    "dbStorage_rocksDB_numFilesInLevel0": RocksdbOption(_FAMILY, "level0_file_num_compaction_trigger"),
    "dbStorage_rocksDB_maxSizeInLevel1MB": RocksdbOption(
        _FAMILY, "max_bytes_for_level_base", _megabytes, _from_megabytes
    ),
    "dbStorage_rocksDB_format_version": RocksdbOption(_TABLE, "format_version"),
}
#: Values that a bookie uses anyway, by option; other values, and other options, have no effect.
_ALWAYS: Final = {
    "create_if_missing": "true", "info_log_level": "INFO_LEVEL", "keep_log_file_num": "30",
    "log_file_time_to_roll": "86400", "num_levels": "7", "checksum": "kxxHash", "cache_index_and_filter_blocks": "true",
}  # fmt: skip


def _parse(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except OSError as error:
        raise UsageError(f"Cannot read RocksDB's options in {path}: {error.strerror}") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a file of RocksDB's options: {error}") from error
    return parser


def read_options(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the settings in an option file by the bookie's keys, and the options that have no effect.

    Raises UsageError for a file that cannot be read.
    """
    parser = _parse(path)
    known = {(each.section, each.name): (key, each.read) for key, each in OPTIONS.items() if each.read}
    settings, without_effect = {}, []
    for section in parser.sections():
        for name, text in parser.items(section):
            key, read = known.get((section, name), ("", None))
            try:
                if read is not None:
                    settings[key] = read(text)
                    continue
            except (ValueError, LookupError):
                pass
            if _ALWAYS.get(name) != text:
                without_effect.append(f"{name}={text}")
    return settings, without_effect


def update_from_env(path: Path, env: Mapping[str, str] = os.environ) -> bool:
    """Write the keys of OPTIONS in `env`, with or without PREFIX, into an option file. Return True if it changed.

    Comments are lost then, as by Pulsar's program. Raises UsageError for a file or value that cannot be used.
    """
    parser = _parse(path)
    changed = False
    for variable, value in env.items():
        key = variable.removeprefix(PREFIX)
        if key not in OPTIONS:
            continue
        option = OPTIONS[key]
        try:
            text = option.write(value)
        except ValueError:
            raise UsageError(f"{variable} must be a whole number, not {value!r}") from None
        if not parser.has_section(option.section):
            parser.add_section(option.section)
        if parser.get(option.section, option.name, fallback=None) != text:
            parser.set(option.section, option.name, text)
            changed = True
    if changed:
        with open(path, "w", encoding="utf-8") as file:
            parser.write(file)
    return changed
