"""The entry logs that each index of a bookie points into."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bkctl.checks.findings import Counts
from bkctl.errors import UsageError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.index import BookieIndexes, IndexDatabases
from bkctl.formats.entry_log import file_name, log_id_of
from bkctl.formats.names import SCOPED_DIRECTORY


class IndexedLogs:
    """Entry logs that share one id space, and the index that points into them.

    `databases` is None for index files. `searched` is True if the logs are searched for entries without an index; each
    log is searched once.
    """

    def __init__(
        self, currents: Iterable[Path], *, scoped: bool, databases: IndexDatabases | None, searched: bool = True
    ) -> None:
        self.scoped, self.databases = scoped, databases
        self.searched = searched
        self._directories = [current / SCOPED_DIRECTORY if scoped else current for current in currents]

    def paths(self) -> dict[int, Path]:
        """Return the present logs by id."""
        found: dict[int, Path] = {}
        for directory in self._directories:
            with suppress(OSError):
                for path in directory.iterdir():
                    if (log_id := log_id_of(path.name)) is not None:
                        found.setdefault(log_id, path)
        return found

    def missing_path(self, log_id: int) -> Path:
        """Return the path that a missing log would have."""
        return self._directories[0] / file_name(log_id)


def list_indexed_logs(directories: BookieDirectories, indexes: BookieIndexes, counts: Counts) -> list[IndexedLogs]:
    """Return the logs of each pair of databases, then the logs of the index files, scope 0 before scoped.

    Databases that cannot be opened are noted in `counts`. Raises UsageError if the logs of a database are ambiguous.
    """
    currents = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    pairs = indexes.databases()
    for error in indexes.problems:
        counts.note_error(error)
    found = [
        IndexedLogs([_log_directory(directories, pair, pairs)], scoped=pair.ledgers.scoped, databases=pair)
        for pair in pairs
    ]
    for scoped in (False, True):
        searched = not indexes.problems and not any(pair.ledgers.scoped == scoped for pair in pairs)
        found.append(IndexedLogs(currents, scoped=scoped, databases=None, searched=searched))
    return found


def _log_directory(directories: BookieDirectories, pair: IndexDatabases, pairs: list[IndexDatabases]) -> Path:
    """Return the directory of the logs that a database points into.

    A database beside logs points into them. With separate index directories, the ledger directory at the same position
    of the settings has the logs. Source: DbLedgerStorage.initialize.
    """
    own = pair.ledgers.path.parent
    ledger_dirs = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    index_dirs = list(dict.fromkeys(map(current_of, directories.index_dirs)))
    if directories.ledger_dirs != directories.index_dirs:
        if len(ledger_dirs) == len(index_dirs):
            return ledger_dirs[index_dirs.index(own)]
    elif _holds_logs(own) or len(ledger_dirs) == 1:
        return own
    databases = list(dict.fromkeys(other.ledgers.path.parent for other in pairs))
    candidates = [current for current in ledger_dirs if current not in databases and _holds_logs(current)]
    if not candidates:
        return own
    if len(candidates) == 1 == len(databases):
        return candidates[0]
    if len(candidates) == len(databases):
        return candidates[databases.index(own)]
    raise UsageError(
        f"The logs of {own} may be in any of {len(candidates)} directories", hint="use --conf bk_server.conf"
    )


def _holds_logs(current: Path) -> bool:
    return any(
        log_id_of(path.name) is not None
        for directory in (current, current / SCOPED_DIRECTORY)
        if directory.is_dir()
        for path in directory.iterdir()
    )
