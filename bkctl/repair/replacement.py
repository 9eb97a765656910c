"""Replacing an index: build beside the old one, sync, swap the names, keep the old one as a backup.

A crash leaves the old or the new index.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Final

from bkctl.disk import Files
from bkctl.formats.names import UNFINISHED_SUFFIX
from bkctl.tasks import uninterrupted

_NO_EXCHANGE: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM})


def time_stamp() -> str:
    """Return the time now as the names of backups have it: `20261121T064548Z`."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def backup_name(path: Path, stamp: str) -> Path:
    """Return a free name beside `path` for its backup: with the time, and a number if the name is taken."""
    backup = path.with_name(f"{path.name}.backup-{stamp}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.backup-{stamp}-{number}")
    return backup


def prepare_building(path: Path) -> Path:
    """Return the directory in which the new `path` is built, after removing what a crash left there."""
    building = path.with_name(path.name + UNFINISHED_SUFFIX)
    shutil.rmtree(building, ignore_errors=True)
    return building


def replace_directory(files: Files, target: Path, stamp: str) -> Path | None:
    """Move the new directory that was built for `target` into its place; return the old directory's backup.

    Returns None if `target` did not exist. `target` is always the old or the new directory; it is missing for an
    instant only if the file system cannot exchange two names. Raises OSError.
    """
    building = target.with_name(target.name + UNFINISHED_SUFFIX)
    sync_tree(building, files)
    if not target.exists():
        files.rename(building, target)
        files.sync_directory(target.parent)
        return None
    backup = backup_name(target, stamp)
    replace_with_backup(files, building, target, backup)
    files.sync_directory(target.parent)
    return backup


def replace_with_backup(files: Files, new: Path, target: Path, backup: Path) -> None:
    """Move the file or directory `new` to `target`, and the old `target` to `backup`; an interrupt waits for the end.

    The caller syncs the parent directories. Raises OSError.
    """
    uninterrupted(_replace_with_backup, files, new, target, backup)


def _replace_with_backup(files: Files, new: Path, target: Path, backup: Path) -> None:
    # Rename `new` to `backup` first: the name of the unfinished one must never stand for the old one.
    files.rename(new, backup)
    try:
        files.exchange(backup, target)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        files.rename(backup, new)
        files.rename(target, backup)
        files.rename(new, target)


def sync_tree(directory: Path, files: Files) -> None:
    """Sync all files below a directory, and their names, to disk."""
    for place, _, names in os.walk(directory):
        for name in names:
            with files.open_to_read(Path(place, name)) as file:
                os.fsync(file.fd)
        files.sync_directory(Path(place))
    files.sync_directory(directory.parent)
