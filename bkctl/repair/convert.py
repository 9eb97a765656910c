"""Conversion of a bookie's index from index files (Interleaved, Sorted) to the databases of DbLedgerStorage, or back.

Entry logs do not change. The new index is built beside the old one, verified entry by entry, and swapped in while the
old one still exists as a backup. A progress file lets a killed conversion resume. (Apache's commands delete the old
index ledger by ledger.) The steps:

    none --start--> building --build, verify--> swapping --swap--> done

`building` and `swapping` are states of the progress file; a bookie refuses to start while it says `swapping`.
Source: ConvertToDBStorageCommand, ConvertToInterleavedStorageCommand; BP-35.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.disk import DIRECTORY_MODE, Files
from bkctl.errors import Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.conversion import DB, ConversionState
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, LedgerIndexReader, first_files
from bkctl.files.rocksdb import REBUILD_HINT, LedgersDatabase, LocationsDatabase
from bkctl.formats.entry_log import HEADER_SIZE, log_id_of, unpack_location
from bkctl.formats.index import ENTRY_ID_MAX, LedgerData, index_path
from bkctl.formats.names import CONVERSION_NAME, DATABASE_NAMES, ROCKSDB_CURRENT, UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.repair.index_contents import IndexedEntry, Progress, header_data
from bkctl.repair.layout import BookieLayout, Storage, backup_name, prepare_building, sync_tree, time_stamp
from bkctl.repair.regenerate import INDEX, IndexFileBuilder

#: Ledgers and entries between two checkpoints, from which a killed conversion resumes.
LEDGERS_PER_CHECKPOINT: Final = 5_000
ENTRIES_PER_CHECKPOINT: Final = 2_000_000
_LEVEL_NAME: Final = re.compile(r"[0-9a-f]{1,2}|[0-9a-f]{8}", re.ASCII)
_BUILDING_NAME: Final = f"{INDEX}{UNFINISHED_SUFFIX}"
_COPY_HINT: Final = "start an empty bookie and let auto-recovery copy this bookie's ledgers to it instead"
_LIMBO_HINT: Final = "run the bookie until its data integrity check is done"

#: (entry id, location)
EntryPlace = tuple[int, int]


@dataclass(slots=True)
class ConvertedDirectory:
    """One index directory (its `current`): ledgers and entries of its new index, and the backups of its old one."""

    path: Path
    ledgers: int = 0
    entries: int = 0
    backups: list[Path] = field(default_factory=list)


class IndexedLedger(NamedTuple):
    """One ledger of the old index. `number` is the directory of its new index; `places` are its entries, in order."""

    ledger: LedgerId
    number: int
    data: LedgerData
    places: Iterator[EntryPlace]


def convert(
    layout: BookieLayout,
    to: str,
    *,
    discard_old: bool = False,
    dry_run: bool = False,
    files: Files | None = None,
    progress: Progress = lambda _: None,
) -> IndexConverter:
    """Convert a bookie's index to DB or INTERLEAVED. The caller holds the directories.

    A conversion killed at any point resumes at the next call. `progress` gets every entry twice (built, verified).
    Raises UsageError without an index to convert, Conflict if both indexes exist or a bookie ran in between,
    Unsupported if the other storage class cannot have these logs or ledgers, Corrupt for a damaged index, OSError.
    """
    files = files or Files()
    converter = (DatabaseConverter if to == DB else IndexFileConverter)(layout, files, progress)
    path, fingerprint = layout.index_dirs[0] / CONVERSION_NAME, _fingerprint(layout)
    state = ConversionState.read(path)
    converter.resumed = state is not None and state.fingerprint == fingerprint
    if state is not None:
        _refuse_conflicts(state, path, to, len(converter.directories), fingerprint)
    is_built = state is not None and state.swapping
    if not is_built:
        converter.check()
    if dry_run and not is_built:
        for source in converter.read_old():
            converter.count(source.number, sum(1 for _ in source.places))
        return converter
    if state is None or not is_built:
        # Resume only if the files of the bookie are unchanged since the conversion began.
        if state is None or state.fingerprint != fingerprint:
            state = ConversionState(to, _free_stamp(layout), fingerprint)
            for target in converter.targets():
                prepare_building(target)
            state.write(path, files)
        try:
            state = converter.build(state, path)
            converter.verify()
        except (Corrupt, Unsupported):  # The next call would not get further, and a mended index is another one.
            for target in converter.targets():
                prepare_building(target)
            files.remove(path)
            files.sync_directory(path.parent)
            raise
        state = state._replace(swapping=True, counts=tuple((row.ledgers, row.entries) for row in converter.directories))
        state.write(path, files)
    for row, (ledgers, entries) in zip(converter.directories, state.counts, strict=True):
        row.ledgers, row.entries = ledgers, entries
    if dry_run:
        return converter
    converter.swap(state.stamp)
    if discard_old:  # While the progress file is there, another call continues the removal.
        for row in converter.directories:
            for backup in row.backups:
                shutil.rmtree(backup)
            row.backups = []
    files.remove(path)
    files.sync_directory(path.parent)
    converter.done = True
    return converter


def _refuse_conflicts(state: ConversionState, path: Path, to: str, directory_count: int, fingerprint: str) -> None:
    """Raise Conflict if the progress file belongs to another conversion, or a bookie ran during the swap."""
    current = path.parent
    if state.to != to:
        raise Conflict(f"A conversion to {state.to} is unfinished in {current}", hint=f"finish it with --to {state.to}")
    if not state.swapping:
        return
    if len(state.counts) != directory_count:
        raise Conflict(
            f"{path} names {len(state.counts)} index directories, but {directory_count} are given",
            hint="give the directories with which the conversion started",
        )
    if state.fingerprint != fingerprint:
        raise Conflict(
            f"A bookie ran in {current} during the last step of a conversion: "
            f"part of its index is in index.backup-{state.stamp}",
            hint=f"move that part back by hand, then remove the file {CONVERSION_NAME}",
        )


def _free_stamp(layout: BookieLayout) -> str:
    """Return the time for the names of backups, with a number if a backup of this second exists."""
    moment = stamp = time_stamp()
    number = 1
    names = (*DATABASE_NAMES, INDEX)
    while any((current / f"{name}.backup-{stamp}").exists() for current in layout.index_dirs for name in names):
        number += 1
        stamp = f"{moment}-{number}"
    return stamp


def _fingerprint(layout: BookieLayout) -> str:
    """Return a hash that changes when a bookie runs: names, sizes and times of journals, logs and marks."""
    found = []
    for directory in (*layout.journal_dirs, *layout.ledger_dirs):
        for place in (directory, directory / "scoped"):
            if place.is_dir():
                for entry in os.scandir(place):
                    if entry.name.endswith((".txn", ".log")) or entry.name.startswith("lastMark"):
                        status = entry.stat()
                        found.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


class IndexConverter(ABC):
    """One direction of a conversion, and its result: `directories` have the numbers of ledgers and entries.

    `resumed`: a killed conversion was continued. `done` stays False in a dry run.
    """

    resumed = done = False

    def __init__(self, layout: BookieLayout, files: Files, progress: Progress) -> None:
        self._files, self._progress = files, progress
        self.storages = layout.storages()
        self.directories = [ConvertedDirectory(storage.index_dir) for storage in self.storages]
        self._directories = BookieDirectories(index_dirs=layout.index_dirs)

    def check(self) -> None:
        """Refuse what cannot be converted, before anything is written: here symbolic links to a part of an index."""
        for entry in (entry for storage in self.storages for entry in os.scandir(storage.index_dir)):
            if entry.is_symlink() and (entry.name in DATABASE_NAMES or _LEVEL_NAME.fullmatch(entry.name)):
                raise Unsupported(
                    f"{entry.path} is a symbolic link and cannot become a backup",
                    hint="replace the link by the directory that it points to",
                )

    @abstractmethod
    def read_old(self) -> Iterator[IndexedLedger]:
        """Yield the ledgers of the old index, directory by directory, scoped ledgers last."""

    @abstractmethod
    def read_new(self) -> Iterator[IndexedLedger]:
        """Yield the ledgers of the new index, which is beside the old one, in the order of `read_old`."""

    @abstractmethod
    def writer(self) -> AbstractContextManager[_DatabasePairs | _FileWriter]:
        """Return the writer of the new index, beside the old one; a resumed conversion continues where it stopped."""

    @abstractmethod
    def targets(self) -> list[Path]:
        """Return the directories that the new index is built for, as `prepare_building` takes them."""

    @abstractmethod
    def swap(self, stamp: str) -> None:
        """Move the new index into place and the old one to its backup. Steps that are done already are skipped."""

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        """Build the new index beside the old one, from `state` on; write checkpoints to `path`, return the last."""
        ledger_count = entry_count = 0
        with self.writer() as writer:
            for source in self.read_old():
                if state.has(source.ledger, source.number):
                    continue
                writer.add(source.ledger, source.data, source.number)
                count = writer.put_all((source.ledger, *place) for place in source.places)
                self._progress(count)
                ledger_count, entry_count = ledger_count + 1, entry_count + count
                if ledger_count >= LEDGERS_PER_CHECKPOINT or entry_count >= ENTRIES_PER_CHECKPOINT:
                    ledger_count = entry_count = 0
                    writer.sync()
                    state = state._replace(after=source.ledger.qualified_name, number=source.number)
                    state.write(path, self._files)
            writer.sync()
        for target in self.targets():
            if (building := target.with_name(target.name + UNFINISHED_SUFFIX)).is_dir():
                sync_tree(building, self._files)
        return state

    def verify(self) -> None:
        """Compare every ledger and entry of the old and the new index. Raises Corrupt if they differ."""
        for row in self.directories:
            row.ledgers = row.entries = 0
        for old, new in zip_longest(self.read_old(), self.read_new()):
            if old is None or new is None or (old.number, old.ledger) != (new.number, new.ledger):
                raise _difference((old or new).ledger, "only one of them has it")
            if _shared_facts(old.data) != _shared_facts(new.data):
                raise _difference(old.ledger, "its header")
            count = 0
            for place, other in zip_longest(old.places, new.places):
                if place != other:
                    raise _difference(old.ledger, f"entry {(place or other)[0]}")
                count += 1
            self.count(old.number, count)

    def count(self, number: int, entry_count: int) -> None:
        """Count a ledger with its entries for directory `number`, and for the progress."""
        self.directories[number].ledgers += 1
        self.directories[number].entries += entry_count
        self._progress(entry_count)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or directory and sync both parents."""
        self._files.rename(source, target)
        self._files.sync_directory(target.parent)
        if source.parent != target.parent:
            self._files.sync_directory(source.parent)


def _shared_facts(data: LedgerData) -> tuple[bytes, bool, bytes | None]:
    """Return the fields that both kinds of index have."""
    return data.master_key, data.fenced, data.explicit_lac or None


def _difference(ledger: LedgerId, part: str) -> Corrupt:
    return Corrupt(
        f"The new index of ledger {ledger} differs from the old one ({part}): nothing was replaced",
        hint="the old index may be damaged: run 'bkctl bookie check'",
    )


def _read_files(files: Iterable[tuple[int, LedgerId, Path]]) -> Iterator[IndexedLedger]:
    """Yield the ledgers of index files: directory number, ledger and path."""
    for number, ledger, path in files:
        with LedgerIndexReader.open(path) as reader:
            yield IndexedLedger(ledger, number, header_data(reader), reader.locations())


def _read_databases(directory_count: int, path_of: Callable[[int, str], Path]) -> Iterator[IndexedLedger]:
    """Yield the ledgers of databases, whose paths come from directory number and name."""
    for prefix, number in product(("", "scoped-"), range(directory_count)):
        with ExitStack() as stack:
            try:
                ledgers = stack.enter_context(LedgersDatabase.open(path_of(number, f"{prefix}ledgers")))
            except NotFound:
                continue
            path = path_of(number, f"{prefix}locations")
            if path.is_dir():
                locations = stack.enter_context(LocationsDatabase.open(path))
                for ledger, data in ledgers.ledgers():
                    yield IndexedLedger(ledger, number, data, _places(locations, ledger))


def _levels_in(current: Path) -> list[str]:
    """Return the names of the directories of index files in `current`, sorted."""
    return sorted(
        entry.name
        for entry in os.scandir(current)
        if _LEVEL_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )


# --- index files to databases ---


class _DatabasePairs(ExitStack):
    """Pairs of (ledgers, locations) databases by directory number and scope, opened at first use."""

    def __init__(self, path_of: Callable[[int, str], Path]) -> None:
        super().__init__()
        self._path_of = path_of
        self.pairs: dict[tuple[int, bool], tuple[LedgersDatabase, LocationsDatabase]] = {}

    def get(self, number: int, scoped: bool) -> tuple[LedgersDatabase, LocationsDatabase]:
        """Return the two databases of directory `number`; open them at the first call."""
        if (number, scoped) not in self.pairs:
            prefix = "scoped-" if scoped else ""
            self.pairs[number, scoped] = (
                self.enter_context(_open_to_write(LedgersDatabase, self._path_of(number, f"{prefix}ledgers"), scoped)),
                self.enter_context(
                    _open_to_write(LocationsDatabase, self._path_of(number, f"{prefix}locations"), scoped)
                ),
            )
        return self.pairs[number, scoped]

    def add(self, ledger: LedgerId, data: LedgerData, number: int) -> None:
        """Begin a ledger in directory `number`."""
        self._databases = self.get(number, ledger.is_scoped)
        self._databases[0].put(ledger, data)

    def put_all(self, entries: Iterable[IndexedEntry]) -> int:
        """Set the locations of entries of the ledger that was added last; return their number."""
        return self._databases[1].put_all(entries)

    def sync(self) -> None:
        """Sync every database to disk; locations before their ledgers."""
        for ledgers, locations in self.pairs.values():
            locations.flush()
            ledgers.flush()


class DatabaseConverter(IndexConverter):
    """Converts index files to databases."""

    @cached_property
    def paths(self) -> dict[LedgerId, Path]:
        """Return the index file of every ledger, in the order of `read_old`. Raises Conflict if a ledger has two."""
        found: dict[LedgerId, Path] = {}
        for ledger, file, first in first_files(BookieIndexes(self._directories)):
            if first != file.path:
                raise Conflict(
                    f"{first} and {file.path} are both the index of ledger {ledger}",
                    hint=f"'bkctl bookie index regenerate {ledger}' merges them",
                )
            found[ledger] = first
        return {
            each: found[each] for each in sorted(found, key=lambda each: (each.is_scoped, self._number_of(each), each))
        }

    def check(self) -> None:
        super().check()
        if not self.paths:
            where = ", ".join(str(storage.index_dir) for storage in self.storages)
            raise UsageError(f"No index files found in {where}", hint="is the bookie converted already?")
        for storage in self.storages:
            for path in (storage.index_dir / "ledgers", storage.index_dir / "scoped-ledgers"):
                with suppress(NotFound), LedgersDatabase.open(path) as database:
                    if count := sum(1 for _ in database.ledgers()):
                        raise Conflict(
                            f"{path} has {count:,} ledgers, and {next(iter(self.paths.values()))} is an index file",
                            hint="keep one of the two, move the other away",
                        )
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
                            hint=_COPY_HINT,
                        )

    def _number_of(self, ledger: LedgerId) -> int:
        return ledger.value % len(self.storages)

    def read_old(self) -> Iterator[IndexedLedger]:
        return _read_files((self._number_of(ledger), ledger, path) for ledger, path in self.paths.items())

    def read_new(self) -> Iterator[IndexedLedger]:
        return _read_databases(len(self.storages), self._building)

    def _building(self, number: int, name: str) -> Path:
        return self.storages[number].index_dir / f"{name}{UNFINISHED_SUFFIX}"

    def targets(self) -> list[Path]:
        return [storage.index_dir / name for storage in self.storages for name in DATABASE_NAMES]

    @contextmanager
    def writer(self) -> Iterator[_DatabasePairs]:
        with _DatabasePairs(self._building) as databases:
            for storage in self.storages:  # Apache's bookie needs both databases, even without ledgers.
                databases.get(storage.number, False)
            yield databases

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.directories, self.storages, strict=True):
            current = storage.index_dir
            for name in DATABASE_NAMES:
                building, target = self._building(storage.number, name), current / name
                if building.is_dir():
                    if target.is_dir():  # `check` found no ledger in it.
                        self.rename(target, backup_name(target, stamp))
                    self.rename(building, target)
            backup = current / f"{INDEX}.backup-{stamp}"
            self._files.make_directory(backup)
            for level in _levels_in(current):
                self.rename(current / level, backup / level)
            row.backups.append(backup)


def _open_to_write(kind: Any, path: Path, scoped: bool) -> Any:
    if (path / ROCKSDB_CURRENT).exists():
        return kind.edit(path, scoped=scoped)
    return kind.create(path, scoped=scoped)


# --- databases to index files ---


class _FileWriter(IndexFileBuilder):
    """Writes index files, and syncs the files of ledgers added since the last flush."""

    def __init__(self, directories: list[Path], files: Files) -> None:
        super().__init__(directories)
        self._directories, self._synced_files = directories, files
        self._unsynced: list[Path] = []

    def add(self, ledger: LedgerId, data: LedgerData, directory: int) -> None:
        super().add(ledger, data, directory)
        self._unsynced.append(self._directories[directory] / index_path(ledger))

    def sync(self) -> None:
        """Write the files in memory, and sync them and the directories above them."""
        self.flush()
        directories: dict[Path, None] = {}
        for path in self._unsynced:
            with self._synced_files.open_to_read(path) as file:
                os.fsync(file.fd)
            while path.name != _BUILDING_NAME:
                path = path.parent
                directories[path] = None
        self._unsynced = []
        for directory in directories:
            self._synced_files.sync_directory(directory)


class IndexFileConverter(IndexConverter):
    """Converts databases to index files."""

    def check(self) -> None:
        super().check()
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
                _check_databases(storage, prefix)

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
                            hint=_COPY_HINT,
                        )

    def read_old(self) -> Iterator[IndexedLedger]:
        return _read_databases(len(self.storages), lambda number, name: self.storages[number].index_dir / name)

    def read_new(self) -> Iterator[IndexedLedger]:
        found = [
            (number, file.id, file.path)
            for number in range(len(self.storages))
            for file in BookieDirectories(index_dirs=[self._building(number)]).indexes()
            if isinstance(file.id, LedgerId)
        ]
        return _read_files(sorted(found, key=lambda each: (each[1].is_scoped, *each)))

    def _building(self, number: int) -> Path:
        return self.storages[number].index_dir / _BUILDING_NAME

    def targets(self) -> list[Path]:
        return [storage.index_dir / INDEX for storage in self.storages]

    def writer(self) -> AbstractContextManager[_FileWriter]:
        directories = [self._building(storage.number) for storage in self.storages]
        for directory in directories:
            directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        return nullcontext(_FileWriter(directories, self._files))

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.directories, self.storages, strict=True):
            current, building = storage.index_dir, self._building(storage.number)
            if building.is_dir():
                for level in _levels_in(building):
                    for place, _, _ in os.walk(current / level, topdown=False):
                        os.rmdir(place)  # nothing but directories: an empty tree may be left
                    self.rename(building / level, current / level)
                building.rmdir()
            for name in reversed(DATABASE_NAMES):
                backup = current / f"{name}.backup-{stamp}"
                if (current / name).is_dir():
                    self.rename(current / name, backup)
                if backup.is_dir():
                    row.backups.append(backup)


def _check_databases(storage: Storage, prefix: str) -> None:
    """Refuse a database of ledgers that is lost, has facts that index files cannot hold, or lost its locations."""
    path, locations = (storage.index_dir / f"{prefix}{name}" for name in ("ledgers", "locations"))
    try:
        with LedgersDatabase.open(path) as database:
            if not locations.is_dir() and next(database.ledgers(), None) is not None:
                raise Corrupt(
                    f"{path} has ledgers, but {locations} is missing",
                    hint="'bkctl bookie index rebuild --locations' rebuilds it",
                )
            if (database.storage_flags() or 0) & 1:
                raise Unsupported(
                    f"{path}: the bookie must check its data first, which index files cannot record", hint=_LIMBO_HINT
                )
            for ledger, data in database.ledgers():
                if data.limbo:
                    raise Unsupported(
                        f"Ledger {ledger} in {path} awaits a data integrity check (limbo), which index files cannot "
                        "record",
                        hint=_LIMBO_HINT,
                    )
                if not any(data.master_key):
                    raise Unsupported(
                        f"Ledger {ledger} in {path} has no master key; an index file could never get one",
                        hint="'bkctl bookie index rebuild --ledgers --metadata-uri URI' finds it",
                    )
    except NotFound as error:
        if locations.is_dir() or any(log.stat().st_size > HEADER_SIZE for log in storage.logs(scoped=bool(prefix))):
            raise Corrupt(error.message, hint=REBUILD_HINT) from error


def _places(locations: LocationsDatabase, ledger: LedgerId) -> Iterator[EntryPlace]:
    for _, entry_id, location in locations.locations(ledger):
        if entry_id > ENTRY_ID_MAX:
            raise Unsupported(f"Ledger {ledger} has entry {entry_id}: index files end at entry {ENTRY_ID_MAX}")
        if location:
            yield entry_id, location
