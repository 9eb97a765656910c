"""An offline clean stop of our bookie: afterwards Apache's bookie starts on the directories and loses nothing.

Everything behind the last marks goes into ledger storage, an empty version-6 journal begins, LastLogMark points behind
its header, and the version-7 journals, which Apache's bookie refuses, move to `current/scoped`. Source: BP-35's
downgrade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories, FileKind, cookie_at
from bkctl.files.journal import JournalReader, read_last_mark
from bkctl.formats.journal import VERSION_SCOPED, LogMark
from bkctl.formats.names import COOKIE_NAME, CURRENT, DIRTY_NAME
from bkctl.repair.holding import hold, log
from bkctl.storage.bookie_storage import BookieStorage
from bkctl.storage.journal_writer import journal_ids
from bkctl.storage.replay import SKIP_HINT, lost_journals

_DB_CLASS: Final = "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage"


@dataclass(slots=True)
class Downgraded:
    """The result for one journal directory; `path` is its `current`.

    `journal_ids` are the version-7 files that were moved, or would be; `record_count` the records behind the last mark.
    `mark` is the new last mark; None if nothing was done. `error` is the damage behind the mark.
    """

    path: Path
    journal_ids: list[int]
    record_count: int
    mark: LogMark | None = None
    error: BkctlError | None = None


def config_of(directories: BookieDirectories) -> BookieConfig:
    """Return the settings of a bookie from its directories alone, with Java's defaults for all others.

    The storage class is DbLedgerStorage if the directories have databases. Raises UsageError if their order is unclear,
    or a journal directory is not given, NotFound for a missing directory.
    """
    from bkctl.repair.layout import find_layout

    layout = find_layout(directories)
    cookie = cookie_at(layout.ledger_dirs[0])
    named = () if cookie is None else cookie.journal_dirs
    if len(layout.journal_dirs) < max(1, len(named)):
        raise UsageError(
            f"The bookie's journal directories are not given: {', '.join(named) or 'its cookie does not name them'}",
            hint="name them, too, or use --conf bk_server.conf",
        )

    def configured(currents: tuple[Path, ...]) -> tuple[str, ...]:
        for current in currents:
            if current.name != CURRENT:
                raise UsageError(f"{current} is not a bookie's directory: it lacks {CURRENT}")
        return tuple(str(current.parent) for current in currents)

    index_dirs = configured(layout.index_dirs)
    ledger_dirs = configured(layout.ledger_dirs)
    config = BookieConfig(
        journal_directories=configured(layout.journal_dirs),
        ledger_directories=ledger_dirs,
        index_directories=() if index_dirs == ledger_dirs else index_dirs,
    )
    return config.with_changes(ledger_storage_class=_DB_CLASS) if _databases(directories) else config


def downgrade(
    config: BookieConfig, *, dry_run: bool = False, note: Callable[[str], object] = log.warning
) -> list[Downgraded]:
    """Make the clean stop in the directories of `config`; return a row for each of its journal directories.

    Without journals of version 7 nothing is done: Apache's bookie can replay the journals. An interrupted run loses
    nothing and can be repeated. `note` is that of `hold`. Raises NotFound for a missing directory or cookie,
    DirectoryInUse, Corrupt (damage that a start of the bookie would refuse), UsageError (another storage class).
    """
    directories = _checked(config)
    if dry_run:
        return list(_plan(directories))
    held = [*directories.journal_dirs, *directories.ledger_dirs, *directories.index_dirs]
    with hold(held, note=note):
        rows = list(_plan(directories))
        if any(row.journal_ids for row in rows):
            try:
                _stop_cleanly(config, rows)
            except OSError as error:
                raise BkctlError(
                    f"The clean stop failed, but nothing is lost: {error}", hint="free disk space and try again"
                ) from error
        return rows


def _checked(config: BookieConfig) -> BookieDirectories:
    directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
    for directory in (*directories.journal_dirs, *directories.ledger_dirs, *directories.index_dirs):
        if not (directory / CURRENT / COOKIE_NAME).is_file():
            raise NotFound(f"{directory / CURRENT / COOKIE_NAME} does not exist", hint="are all of its disks mounted?")
    databases = _databases(directories)
    if databases and config.ledger_storage != "db":
        raise UsageError(
            f"{databases[0]} belongs to DbLedgerStorage, but ledgerStorageClass is {config.ledger_storage_class}",
            hint="is it the bookie's configuration?",
        )
    return directories


def _databases(directories: BookieDirectories) -> list[Path]:
    return [file.path for file in directories.rocksdbs() if file.path.name != "metadata-cache"]


def _plan(directories: BookieDirectories) -> Iterator[Downgraded]:
    journals = [file for file in directories.journals() if not file.scoped]
    for index, directory in enumerate(directories.journal_dirs):
        row = Downgraded(directory / CURRENT, [], 0)
        mark = read_last_mark(directories.ledger_dirs, index, len(directories.journal_dirs))
        for problem in lost_journals(row.path, journal_ids(row.path), mark):
            row.error = row.error or Corrupt(problem, hint=SKIP_HINT)
        for file in journals:
            if file.path.parent != row.path or file.kind is not FileKind.JOURNAL:
                continue
            with JournalReader.open(file.path) as reader:
                assert isinstance(file.id, int)
                if reader.version == VERSION_SCOPED:
                    row.journal_ids.append(file.id)
                if file.id >= mark.journal_id:
                    start = mark.offset if file.id == mark.journal_id else 0
                    if (lost := reader.mark_problem(start)) is not None:
                        row.error = row.error or Corrupt(f"{reader.name}: {lost}", hint=SKIP_HINT)
                    try:
                        row.record_count += sum(map(len, reader.batches(start)))
                    except (Corrupt, Unsupported) as error:
                        row.error = row.error or error
        yield row


def _stop_cleanly(config: BookieConfig, rows: list[Downgraded]) -> None:
    files = Files()
    # Only an empty journal is written in each directory, so nothing is preallocated.
    storage = BookieStorage(config.with_changes(journal_pre_alloc_size_mb=0), files=files)
    storage.open()
    refused = dict.fromkeys(storage.ledgers.unwritten, BkctlError("the disk refuses its index"))
    for ledger, error in (refused | storage.set_aside).items():
        storage.ledgers.close()
        raise Corrupt(
            f"Ledger {ledger} has records to replay, but its state cannot be read: {error.message}",
            hint="repair its index with 'bkctl bookie index', or delete the ledger",
        )
    storage.close()
    for directory in storage.ledger_directories:
        files.remove(directory / DIRTY_NAME)
        files.sync_directory(directory)
    count = len(rows)
    for index, row in enumerate(rows):
        row.mark = read_last_mark(config.ledger_directories, index, count)
