"""Conversion of the databases of DbLedgerStorage to index files (Interleaved, Sorted).

Source: ConvertToInterleavedStorageCommand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bkctl.disk import DIRECTORY_MODE
from bkctl.errors import Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.conversion import ConversionState
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.index import ENTRY_ID_MAX, LedgerData, index_path
from bkctl.formats.names import UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.repair.conversion import (
    DATABASE_NAMES,
    CheckpointInterval,
    EntryPlace,
    IndexConverter,
    IndexedLedger,
    levels_in,
)
from bkctl.repair.layout import prepare_building, sync_tree
from bkctl.repair.regenerate import INDEX, IndexFileBuilder

_BUILDING_NAME = f"{INDEX}{UNFINISHED_SUFFIX}"


class IndexFileConverter(IndexConverter):
    """Converts databases to index files."""

    def check(self) -> None:
        if not any((storage.index_dir / "ledgers").is_dir() for storage in self.storages):
            where = ", ".join(str(storage.index_dir) for storage in self.storages)
            raise UsageError(f"No databases of ledgers found in {where}", hint="is the bookie converted already?")
        file = next(BookieIndexes(self._directories).files(), None)
        if file is not None:
            raise Conflict(
                f"The bookie has the index file {file.path} and also databases",
                hint="keep one of the two indexes, move the other away",
            )
        self._check_log_ids()
        for storage in self.storages:
            for prefix in ("", "scoped-"):
                _check_databases(storage.index_dir / f"{prefix}ledgers", storage.index_dir / f"{prefix}locations")

    def _check_log_ids(self) -> None:
        """Refuse equal log ids in two directories: Interleaved storage has one id space of logs for all."""
        for scoped in (False, True):
            seen: dict[str, Path] = {}
            for storage in self.storages:
                for log in storage.logs(scoped=scoped):
                    first = seen.setdefault(log.name, log)
                    if first != log:
                        raise Unsupported(
                            f"{first} and {log} have the same id; Interleaved storage needs distinct ids",
                            hint="start an empty bookie and let auto-recovery copy this bookie's ledgers to it instead",
                        )

    def read_old(self, state: ConversionState | None = None) -> Iterator[IndexedLedger]:
        for prefix in ("", "scoped-"):
            for storage in self.storages:
                number = storage.number
                with ExitStack() as stack:
                    try:
                        ledgers = stack.enter_context(LedgersDatabase.open(storage.index_dir / f"{prefix}ledgers"))
                    except NotFound:
                        continue
                    path = storage.index_dir / f"{prefix}locations"
                    if not path.is_dir():
                        continue
                    locations = stack.enter_context(LocationsDatabase.open(path))
                    for ledger, data in ledgers.ledgers():
                        if state is None or not state.has(ledger, number, by_directory=True):
                            places = self.count(number, _places(locations, ledger))
                            yield IndexedLedger(ledger, number, data, places)

    def clear(self) -> None:
        for storage in self.storages:
            prepare_building(storage.index_dir / INDEX)

    def _building(self, number: int) -> Path:
        return self.storages[number].index_dir / _BUILDING_NAME

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        directories = [self._building(storage.number) for storage in self.storages]
        for directory in directories:
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        builder = IndexFileBuilder(directories)
        interval = CheckpointInterval()
        unsynced: list[Path] = []
        for source in self.read_old(state):
            builder.add(source.ledger, source.data, source.number)
            count = builder.put(source.ledger, source.places)
            self._progress(count)
            unsynced.append(directories[source.number] / index_path(source.ledger))
            if interval.is_due(count):
                builder.flush()
                self._sync(unsynced)
                unsynced = []
                state = state._replace(after=source.ledger.qualified_name, number=source.number)
                state.write(path, self._files)
        builder.flush()
        for directory in directories:
            sync_tree(directory, self._files)
        return state

    def _sync(self, paths: list[Path]) -> None:
        """Sync index files and the directories above them."""
        directories: dict[Path, None] = {}
        for path in paths:
            with self._files.open_to_read(path) as file:
                os.fsync(file.fd)
            while path.name != _BUILDING_NAME:
                path = path.parent
                directories[path] = None
        for directory in directories:
            self._files.sync_directory(directory)

    def verify(self) -> None:
        super().verify()
        for storage, row in zip(self.storages, self.result.directories, strict=True):
            building = self._building(storage.number)
            if sum(1 for _ in BookieDirectories(index_dirs=[building]).indexes()) != row.ledgers:
                raise Corrupt(f"{building} and the databases differ in their ledgers: nothing was replaced")

    def read_new(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[EntryPlace]] | None:
        try:
            reader = LedgerIndexReader.open(self._building(number) / index_path(ledger))
        except NotFound:
            return None
        header = reader.header
        data = LedgerData(True, header.fenced, header.master_key, header.explicit_lac)
        return data, reader.locations()

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.result.directories, self.storages, strict=True):
            current, building = storage.index_dir, self._building(storage.number)
            if building.is_dir():
                for level in levels_in(building):
                    _remove_empty(current / level)
                    self.rename(building / level, current / level)
                building.rmdir()
            for name in reversed(DATABASE_NAMES):
                backup = current / f"{name}.backup-{stamp}"
                if (current / name).is_dir():
                    self.rename(current / name, backup)
                if backup.is_dir():
                    row.backups.append(backup)


def _check_databases(path: Path, locations: Path) -> None:
    """Refuse a database of ledgers with facts that index files cannot hold, or without its locations."""
    try:
        with LedgersDatabase.open(path) as database:
            if not locations.is_dir() and next(database.ledgers(), None) is not None:
                raise Corrupt(
                    f"{path} has ledgers, but {locations} is missing",
                    hint="'bkctl bookie index rebuild --locations' rebuilds it",
                )
            if (database.storage_flags() or 0) & 1:
                raise Unsupported(
                    f"{path}: the bookie must check its data first, which index files cannot record",
                    hint="run the bookie until its data integrity check is done",
                )
            for ledger, data in database.ledgers():
                _check_ledger(ledger, data, path)
    except NotFound:
        return


def _check_ledger(ledger: LedgerId, data: LedgerData, path: Path) -> None:
    if data.limbo:
        raise Unsupported(
            f"Ledger {ledger} in {path} awaits a data integrity check (limbo), which index files cannot record",
            hint="run the bookie until its data integrity check is done",
        )
    if not any(data.master_key):
        raise Unsupported(
            f"Ledger {ledger} in {path} has no master key; an index file could never get one",
            hint="'bkctl bookie index rebuild --ledgers --metadata-uri URI' finds it",
        )


def _places(locations: LocationsDatabase, ledger: LedgerId) -> Iterator[EntryPlace]:
    for _, entry_id, location in locations.locations(ledger):
        if entry_id > ENTRY_ID_MAX:
            raise Unsupported(f"Ledger {ledger} has entry {entry_id}: index files end at entry {ENTRY_ID_MAX}")
        if location:
            yield entry_id, location


def _remove_empty(directory: Path) -> None:
    """Remove a tree that contains nothing but directories."""
    if directory.is_dir():
        for place, _, _ in os.walk(directory, topdown=False):
            os.rmdir(place)
