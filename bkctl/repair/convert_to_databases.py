"""Conversion of index files (Interleaved, Sorted) to DbLedgerStorage's databases. Source: ConvertToDBStorageCommand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

from bkctl.disk import Files
from bkctl.errors import Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.conversion import ConversionState
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry_log import log_id_of, unpack_location
from bkctl.formats.index import LedgerData
from bkctl.formats.names import ROCKSDB_CURRENT, UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.repair.conversion import (
    DATABASE_NAMES,
    LEVEL_NAME,
    CheckpointInterval,
    EntryPlace,
    IndexConverter,
    IndexedLedger,
    levels_in,
)
from bkctl.repair.index_contents import Progress
from bkctl.repair.layout import BookieLayout, backup_name, prepare_building, sync_tree
from bkctl.repair.regenerate import INDEX


class _DatabasePairs(ExitStack):
    """Pairs of (ledgers, locations) databases by directory number and scope, opened at first use."""

    def __init__(self, path_of: Callable[[int, str], Path], open_database: Callable[[Any, Path, bool], Any]) -> None:
        super().__init__()
        self._path_of, self._open = path_of, open_database
        self.pairs: dict[tuple[int, bool], tuple[LedgersDatabase, LocationsDatabase]] = {}

    def get(self, number: int, scoped: bool) -> tuple[LedgersDatabase, LocationsDatabase]:
        """Return the two databases of directory `number`; open them at the first call."""
        if (number, scoped) not in self.pairs:
            prefix = "scoped-" if scoped else ""
            self.pairs[number, scoped] = (
                self.enter_context(self._open(LedgersDatabase, self._path_of(number, f"{prefix}ledgers"), scoped)),
                self.enter_context(self._open(LocationsDatabase, self._path_of(number, f"{prefix}locations"), scoped)),
            )
        return self.pairs[number, scoped]

    def flush(self) -> None:
        """Sync every database to disk; locations before their ledgers."""
        for ledgers, locations in self.pairs.values():
            locations.flush()
            ledgers.flush()


class DatabaseConverter(IndexConverter):
    """Converts index files to databases."""

    def __init__(self, layout: BookieLayout, files: Files, progress: Progress) -> None:
        super().__init__(layout, files, progress)
        self._new = _DatabasePairs(self._building, lambda kind, path, scoped: kind.open(path, scoped=scoped))

    @cached_property
    def paths(self) -> dict[LedgerId, Path]:
        """Return the index file of every ledger, in id order. Raises Conflict if a ledger has two."""
        found: dict[LedgerId, Path] = {}
        for file in BookieIndexes(self._directories).files():
            if isinstance(file.id, LedgerId):
                first = found.setdefault(file.id, file.path)
                if first != file.path:
                    raise Conflict(
                        f"{first} and {file.path} are both the index of ledger {file.id}",
                        hint=f"'bkctl bookie index regenerate {file.id}' merges them",
                    )
        return dict(sorted(found.items()))

    def check(self) -> None:
        if not self.paths:
            where = ", ".join(str(storage.index_dir) for storage in self.storages)
            raise UsageError(f"No index files found in {where}", hint="is the bookie converted already?")
        for storage in self.storages:
            _refuse_links(storage.index_dir)
        for storage in self.storages:
            for name in ("ledgers", "scoped-ledgers"):
                _refuse_ledgers(storage.index_dir / name, f"{storage.index_dir} also has index files")
        if len(self.storages) > 1:
            self._check_log_directories()

    def _check_log_directories(self) -> None:
        """Refuse entries in a log where DbLedgerStorage would not look: it has one directory for each ledger id."""
        numbers: dict[tuple[bool, int], int] = {}
        for storage in self.storages:
            for scoped in (False, True):
                logs = storage.logs(scoped=scoped)
                numbers.update(((scoped, log_id_of(log.name) or 0), storage.number) for log in logs)
        for ledger, path in self.paths.items():
            home = self._number_of(ledger)
            with LedgerIndexReader.open(path) as reader:
                for entry_id, location in reader.locations():
                    log_id = unpack_location(location)[0]
                    number = numbers.get((ledger.is_scoped, log_id), home)
                    if number != home:
                        raise Unsupported(
                            f"Entry {entry_id} of ledger {ledger} is in log {log_id:x} of "
                            f"{self.storages[number].ledger_dir}; DbLedgerStorage would look for it only in "
                            f"{self.storages[home].ledger_dir}",
                            hint="start an empty bookie and let auto-recovery copy this bookie's ledgers to it instead",
                        )

    def _number_of(self, ledger: LedgerId) -> int:
        return ledger.value % len(self.storages)

    def read_old(self, state: ConversionState | None = None) -> Iterator[IndexedLedger]:
        for ledger, path in self.paths.items():
            number = self._number_of(ledger)
            if state is not None and state.has(ledger, number, by_directory=False):
                continue
            with LedgerIndexReader.open(path) as reader:
                header = reader.header
                data = LedgerData(True, header.fenced, header.master_key, header.explicit_lac)
                yield IndexedLedger(ledger, number, data, self.count(number, reader.locations()))

    def clear(self) -> None:
        for storage in self.storages:
            for name in DATABASE_NAMES:
                prepare_building(storage.index_dir / name)

    def _building(self, number: int, name: str) -> Path:
        return self.storages[number].index_dir / f"{name}{UNFINISHED_SUFFIX}"

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        with _DatabasePairs(self._building, _open_to_write) as databases:
            for storage in self.storages:  # Apache's bookie needs both databases, even without ledgers.
                databases.get(storage.number, False)
            interval = CheckpointInterval()
            for source in self.read_old(state):
                ledgers, locations = databases.get(source.number, source.ledger.is_scoped)
                count = locations.put_all((source.ledger, *place) for place in source.places)
                ledgers.put(source.ledger, source.data)
                self._progress(count)
                if interval.is_due(count):
                    databases.flush()
                    state = state._replace(after=source.ledger.qualified_name, number=source.number)
                    state.write(path, self._files)
        for storage in self.storages:
            for name in DATABASE_NAMES:
                building = self._building(storage.number, name)
                if building.is_dir():
                    sync_tree(building, self._files)
        return state

    def verify(self) -> None:
        with self._new:
            super().verify()
            for key, (ledgers, _) in self._new.pairs.items():
                expected = sum((self._number_of(ledger), ledger.is_scoped) == key for ledger in self.paths)
                if sum(1 for _ in ledgers.ledgers()) != expected:
                    raise Corrupt(f"{ledgers.path} and the index files differ in their ledgers: nothing was replaced")

    def read_new(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[EntryPlace]] | None:
        ledgers, locations = self._new.get(number, ledger.is_scoped)
        data = ledgers.get(ledger)
        if data is None:
            return None
        return data, ((entry_id, location) for _, entry_id, location in locations.locations(ledger))

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.result.directories, self.storages, strict=True):
            current = storage.index_dir
            for name in DATABASE_NAMES:
                building, target = self._building(storage.number, name), current / name
                if building.is_dir():
                    if target.is_dir():  # `check` found no ledger in it.
                        self.rename(target, backup_name(target, stamp))
                    self.rename(building, target)
            backup = current / f"{INDEX}.backup-{stamp}"
            self._files.make_directory(backup)
            for level in levels_in(current):
                self.rename(current / level, backup / level)
            row.backups.append(backup)


def _open_to_write(kind: Any, path: Path, scoped: bool) -> Any:
    if (path / ROCKSDB_CURRENT).exists():
        return kind.edit(path, scoped=scoped)
    return kind.create(path, scoped=scoped)


def _refuse_links(current: Path) -> None:
    for entry in os.scandir(current):
        if LEVEL_NAME.fullmatch(entry.name) and entry.is_symlink():
            raise Unsupported(
                f"{entry.path} is a symbolic link and cannot be renamed to a backup",
                hint="replace the link by the directory that it points to",
            )


def _refuse_ledgers(path: Path, problem: str) -> None:
    """Raise Conflict if a database has a ledger."""
    try:
        with LedgersDatabase.open(path) as database:
            count = sum(1 for _ in database.ledgers())
    except NotFound:
        return
    if count:
        raise Conflict(f"{path} has {count:,} ledgers, and {problem}", hint="keep one of the two, move the other away")
