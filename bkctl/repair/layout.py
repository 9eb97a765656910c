"""The directories of a bookie by role and in order, and the replacement of an index in them, with a backup."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.disk import Files, names_in
from bkctl.errors import UsageError
from bkctl.files.directories import BookieDirectories, cookie_at, current_of
from bkctl.formats.entry_log import log_id_of
from bkctl.formats.names import ROCKSDB_NAMES, SCOPED_DIRECTORY, UNFINISHED_SUFFIX
from bkctl.tasks import uninterrupted


class Storage(NamedTuple):
    """A ledger directory and its index directory, both `current`; `number` is the position in the settings, from 0."""

    number: int
    ledger_dir: Path
    index_dir: Path

    def logs(self, *, scoped: bool) -> list[Path]:
        """Return the entry logs of the directory in id order."""
        directory = self.ledger_dir / SCOPED_DIRECTORY if scoped else self.ledger_dir
        ids = {name: log_id for name in names_in(directory) if (log_id := log_id_of(name)) is not None}
        return [directory / name for name in sorted(ids, key=lambda name: ids[name])]


class BookieLayout(NamedTuple):
    """A bookie's directories (each `current`) in the order of its configuration."""

    journal_dirs: tuple[Path, ...]
    ledger_dirs: tuple[Path, ...]
    index_dirs: tuple[Path, ...]

    @property
    def all(self) -> list[Path]:
        """Return every directory once."""
        return list(dict.fromkeys((*self.journal_dirs, *self.ledger_dirs, *self.index_dirs)))

    def storages(self) -> list[Storage]:
        """Return the ledger directories with their index directories. Raises UsageError if their numbers differ."""
        if len(self.ledger_dirs) != len(self.index_dirs):
            raise UsageError(
                f"{len(self.ledger_dirs)} ledger directories and {len(self.index_dirs)} index directories: "
                "DbLedgerStorage has one for each"
            )
        pairs = zip(self.ledger_dirs, self.index_dirs, strict=True)
        return [Storage(number, *pair) for number, pair in enumerate(pairs)]

    def logs(self, *, scoped: bool) -> list[Path]:
        """Return all entry logs in id order; InterleavedLedgerStorage has one id space for all directories."""
        found = [path for current in self.ledger_dirs for path in Storage(0, current, current).logs(scoped=scoped)]
        return sorted(found, key=lambda path: log_id_of(path.name) or 0)

    def size_to_read(self, *, log_passes: int = 1, journals: bool = True) -> int:
        """Return about how many bytes a repair reads, for its progress."""
        logs = [path for scoped in (False, True) for path in self.logs(scoped=scoped)] * log_passes
        read = [path for directory in self.journal_dirs for path in directory.glob("**/*.txn")] if journals else []
        return sum(path.stat().st_size for path in (*logs, *read))


def find_layout(directories: BookieDirectories) -> BookieLayout:
    """Return the directories of a bookie by role: in the order of the configuration, else of the cookie.

    Raises NotFound for a missing directory, UsageError if the roles or the order are unclear.
    """
    journal_dirs = tuple(dict.fromkeys(map(current_of, directories.journal_dirs)))
    ledger_dirs = tuple(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    index_dirs = tuple(dict.fromkeys(map(current_of, directories.index_dirs)))
    for current in (*ledger_dirs, *index_dirs):
        for name in ROCKSDB_NAMES:
            # A directory named like a database, with `current` in it, holds all files of a bookie.
            if (current / name / "current").is_dir():
                raise UsageError(
                    f"{current} is not a bookie's directory, but contains one: {current / name}",
                    hint="name that directory",
                )
    if directories.journal_dirs != directories.ledger_dirs:
        return BookieLayout(journal_dirs, ledger_dirs, index_dirs)
    by_cookie = _layout_by_cookie(ledger_dirs)
    if by_cookie is not None:
        return by_cookie
    journals = tuple(current for current in ledger_dirs if any(name.endswith(".txn") for name in os.listdir(current)))
    rest = tuple(current for current in ledger_dirs if current not in journals) or ledger_dirs
    for current, cookie in ((each, cookie_at(each)) for each in ledger_dirs):
        named = () if cookie is None else dict.fromkeys((*cookie.ledger_dirs, *(cookie.index_dirs or ())))
        if len(named) > len(rest):
            raise UsageError(
                f"The bookie of {current} has more directories than are given: {', '.join(named)}",
                hint="name all of them, or use --conf bk_server.conf",
            )
    with_ledgers = tuple(current for current in ledger_dirs if _has_ledgers(current)) or rest
    if len(with_ledgers) > 1:
        listed = ", ".join(map(str, with_ledgers))
        raise UsageError(f"The order of {listed} is unknown: no cookie has it", hint="use --conf bk_server.conf")
    return BookieLayout(journals, with_ledgers, with_ledgers)


def _has_ledgers(current: Path) -> bool:
    """Return True if a directory has entry logs, a last mark, or an index."""
    for name in os.listdir(current):
        if log_id_of(name) is not None or name.startswith("lastMark") or name in ROCKSDB_NAMES:
            return True
    return next(BookieDirectories(index_dirs=[current]).indexes(), None) is not None


def _layout_by_cookie(given: tuple[Path, ...]) -> BookieLayout | None:
    for current in given:
        if (cookie := cookie_at(current)) is None:
            continue

        def find(named: tuple[str, ...]) -> tuple[Path, ...] | None:
            found = []
            for name in named:
                place = Path(name) / "current"
                same = [one for one in given if place.is_dir() and one.samefile(place)]
                if not same:
                    return None
                found.append(same[0])
            return tuple(found)

        journals = tuple(one for name in cookie.journal_dirs for one in find((name,)) or ())
        ledgers = find(cookie.ledger_dirs)
        indexes = find(cookie.index_dirs) if cookie.index_dirs else ledgers
        if ledgers and indexes:
            return BookieLayout(journals, ledgers, indexes)
    return None


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
