"""The files of a RocksDB directory, read without RocksDB: names, and checks that RocksDB does not make."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, NotFound
from bkctl.files.windows import FileReader
from bkctl.formats.names import ROCKSDB_CURRENT
from bkctl.formats.rocksdb import BLOCK_SIZE, check_block, manifest_name

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
    _allow_open_files(len(names))


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


def _allow_open_files(count: int) -> None:
    """Raise the limit of open files for a large database, up to the hard limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


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
