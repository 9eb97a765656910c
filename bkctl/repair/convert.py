"""From index files (Interleaved, Sorted) to the databases of DbLedgerStorage, and back; entry logs stay as they are.

The new index is built beside the old one, verified entry by entry, and put in place before the old one goes; a file
beside says how far that is, so that a conversion goes on where it was killed. Apache's deletes the old index ledger by
ledger. Source: ConvertToDBStorageCommand, ConvertToInterleavedStorageCommand; BP-35.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.disk import DIRECTORY_MODE, Files
from bkctl.errors import Conflict, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.conversion import DB, INTERLEAVED, ConversionState
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry_log import log_id_of, unpack_location
from bkctl.formats.index import ENTRY_ID_MAX, PAGE_SIZE_DEFAULT, VERSION_CURRENT, LedgerData, index_path
from bkctl.formats.names import CONVERSION_NAME, UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.repair.parts import BookieLayout, Progress, backup_name, sync_tree, time_stamp, unfinished
from bkctl.repair.regenerate import INDEX, IndexFileBuilder

#: Ledgers and entries between two places where a killed conversion goes on.
LEDGERS_PER_STEP: Final = 5_000
ENTRIES_PER_STEP: Final = 2_000_000
#: In the order in which they come into place: where there are ledgers, there are their locations.
_DATABASES: Final = ("locations", "ledgers", "scoped-locations", "scoped-ledgers")
_LEVEL: Final = re.compile(r"[0-9a-f]{1,2}|[0-9a-f]{8}", re.ASCII)


@dataclass(slots=True)
class ConvertedDirectory:
    """One index directory (its `current`): the ledgers and entries in its new index, and where the old one is kept."""

    path: Path
    ledgers: int = 0
    entries: int = 0
    backups: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class Conversion:
    """What was converted; `resumed` says that a killed conversion went on, `done` is False after a dry run."""

    to: str
    directories: list[ConvertedDirectory] = field(default_factory=list)
    resumed: bool = False
    done: bool = False


def convert(
    layout: BookieLayout,
    to: str,
    *,
    page_size: int = PAGE_SIZE_DEFAULT,
    version: int = VERSION_CURRENT,
    discard_old: bool = False,
    dry_run: bool = False,
    files: Files | None = None,
    progress: Progress = lambda _: None,
) -> Conversion:
    """Convert a bookie's index; `to` is DB or INTERLEAVED. The caller holds the directories.

    Killed at any point, it goes on when called again. `progress` is told entries, twice each (built, and verified).
    Raises UsageError where there is nothing to convert, Conflict where both indexes are there, Unsupported where the
    other storage class cannot have these logs or ledgers, Corrupt for an index that cannot be read, OSError.
    """
    files = files or Files()
    work = (_ToDb if to == DB else _ToInterleaved)(layout, files, progress, page_size, version)
    state_path = layout.index_dirs[0] / CONVERSION_NAME
    state = ConversionState.read(state_path)
    if state is not None and state.to != to:
        raise Conflict(
            f"A conversion to {state.to} is under way in {state_path.parent}", hint=f"finish it with --to {state.to}"
        )
    if state is not None and state.swapping and len(state.counts) != len(work.result.directories):
        raise Conflict(
            f"{state_path} tells of {len(state.counts)} index directories, {len(work.result.directories)} are given",
            hint="give those that the conversion was begun with",
        )
    fingerprint = _fingerprint(layout)
    if state is not None and state.swapping and state.fingerprint != fingerprint:
        raise Conflict(
            f"A bookie ran in {state_path.parent} while the last step of a conversion was under way: "
            f"its index is in part in index.backup-{state.stamp}",
            hint="put that back by hand, then remove the file " + CONVERSION_NAME,
        )
    work.result.resumed = state is not None and state.fingerprint == fingerprint
    if state is None or not state.swapping:
        work.check()
        if dry_run:
            for source in work.sources():
                progress(sum(1 for _ in source.places))
    if dry_run:
        return work.result
    if state is None or state.fingerprint != fingerprint:
        state = ConversionState(to, _free_stamp(layout), fingerprint)
        work.clear()
        state.write(state_path, files)
    if not state.swapping:
        state = work.build(state, state_path)
        work.verify()
        counts = tuple((row.ledgers, row.entries) for row in work.result.directories)
        state = state._replace(swapping=True, counts=counts)
        state.write(state_path, files)
    for row, (ledgers, entries) in zip(work.result.directories, state.counts, strict=True):
        row.ledgers, row.entries = ledgers, entries
    work.swap(state.stamp)
    files.remove(state_path)
    files.sync_directory(state_path.parent)
    work.result.done = True
    if discard_old:
        for row in work.result.directories:
            for backup in row.backups:
                shutil.rmtree(backup)
            row.backups = []
    return work.result


def _free_stamp(layout: BookieLayout) -> str:
    """The time for the names of backups; with a number where another repair has taken this second."""
    moment = stamp = time_stamp()
    number = 1
    names = (*_DATABASES, INDEX)
    while any((each / f"{name}.backup-{stamp}").exists() for each in layout.index_dirs for name in names):
        number += 1
        stamp = f"{moment}-{number}"
    return stamp


def _fingerprint(layout: BookieLayout) -> str:
    """What changes when a bookie starts: the names, sizes and times of journals, logs and marks."""
    found = []
    for directory in (*layout.journal_dirs, *layout.ledger_dirs):
        for place in (directory, directory / "scoped"):
            if place.is_dir():
                for entry in os.scandir(place):
                    if entry.name.endswith((".txn", ".log")) or entry.name.startswith("lastMark"):
                        status = entry.stat()
                        found.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


class _Source(NamedTuple):
    """One ledger of the old index: where its new one goes, what is said of it, its entries' places."""

    ledger: LedgerId
    number: int
    data: LedgerData
    places: Iterator[tuple[int, int]]


class _Conversion:
    """What both directions do: go through the old index in order, step by step, then compare."""

    to: str

    def __init__(self, layout: BookieLayout, files: Files, progress: Progress, page_size: int, version: int) -> None:
        self._layout, self._files, self._progress = layout, files, progress
        self._page_size, self._version = page_size, version
        self.storages = layout.storages()
        self.result = Conversion(self.to, [ConvertedDirectory(each.index_dir) for each in self.storages])
        self._indexes = BookieDirectories(index_dirs=layout.index_dirs)

    def check(self) -> None:
        """Make sure that it can be done at all, before anything is written."""
        raise AssertionError

    def sources(self, state: ConversionState | None = None) -> Iterator[_Source]:
        """Yield the old index, ledger by ledger in order, without what `state` has; counts what is taken."""
        raise AssertionError

    def clear(self) -> None:
        """Remove what an older conversion, that does not count any more, has built."""
        raise AssertionError

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        """Build the new index beside, from where `state` says it got to; the state at the end."""
        raise AssertionError

    def swap(self, stamp: str) -> None:
        """Put the new index in place, then the old one away; whatever is done already is left as it is."""
        raise AssertionError

    def new_index_of(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[tuple[int, int]]] | None:
        """What was built for a ledger; None where nothing was."""
        raise AssertionError

    def _count(self, number: int, places: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        row = self.result.directories[number]
        row.ledgers += 1
        for each in places:
            row.entries += 1
            yield each

    def verify(self) -> None:
        """Compare old and new, every ledger and entry. Raises Corrupt where they differ."""
        for row in self.result.directories:
            row.ledgers = row.entries = 0
        for source in self.sources():
            found = self.new_index_of(source.ledger, source.number)
            if found is None or not _is_equal(found[0], source.data):
                raise self._differs(source.ledger, "what is said of it")
            count = 0
            for old, new in zip_longest(source.places, found[1]):
                if old != new:
                    raise self._differs(source.ledger, f"entry {(old or new)[0]}")
                count += 1
            self._progress(count)

    def _differs(self, ledger: LedgerId, what: str) -> Corrupt:
        return Corrupt(
            f"The new index of ledger {ledger} is not the old one ({what}): nothing was replaced",
            hint="the old index may be damaged: 'bkctl bookie check' tells",
        )

    def _rename(self, source: Path, target: Path) -> None:
        self._files.rename(source, target)
        self._files.sync_directory(target.parent)
        if source.parent != target.parent:
            self._files.sync_directory(source.parent)


def _is_equal(one: LedgerData, other: LedgerData) -> bool:
    """Whether they say the same as far as both kinds of index can."""
    return (one.master_key, one.fenced, one.explicit_lac or None) == (
        other.master_key,
        other.fenced,
        other.explicit_lac or None,
    )


class _Steps:
    """Says after which ledger a killed conversion may go on."""

    def __init__(self) -> None:
        self.ledgers = self.entries = 0

    def is_due(self, entries: int) -> bool:
        """Count a ledger of that many entries; whether it is time to have all on disk."""
        self.ledgers += 1
        self.entries += entries
        if self.ledgers < LEDGERS_PER_STEP and self.entries < ENTRIES_PER_STEP:
            return False
        self.ledgers = self.entries = 0
        return True


# --- to DbLedgerStorage ---------------------------------------------------------------------------------------------


class _ToDb(_Conversion):
    to = DB

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._paths: dict[LedgerId, Path] | None = None
        self._built = ExitStack()
        self._readers: dict[tuple[int, bool], tuple[LedgersDatabase, LocationsDatabase]] = {}

    @property
    def paths(self) -> dict[LedgerId, Path]:
        """The index file of every ledger, in order."""
        if self._paths is None:
            found: dict[LedgerId, Path] = {}
            for file in BookieIndexes(self._indexes).files():
                if isinstance(file.id, LedgerId):
                    other = found.setdefault(file.id, file.path)
                    if other != file.path:
                        raise Conflict(
                            f"{other} and {file.path} are both the index of ledger {file.id}",
                            hint="'bkctl bookie index regenerate' makes one of both",
                        )
            self._paths = {ledger: found[ledger] for ledger in sorted(found)}
        return self._paths

    def check(self) -> None:
        if not self.paths:
            where = ", ".join(str(each.index_dir) for each in self.storages)
            raise UsageError(f"There are no index files in {where}", hint="is it converted already?")
        for storage in self.storages:
            for entry in os.scandir(storage.index_dir):
                if _LEVEL.fullmatch(entry.name) and entry.is_symlink():
                    raise Unsupported(
                        f"{entry.path} is a symbolic link, which could not be put away as a backup",
                        hint="move the directory that it leads to in its place",
                    )
        for storage in self.storages:
            for name in ("ledgers", "scoped-ledgers"):
                _refuse_ledgers(storage.index_dir / name, f"{storage.index_dir} has index files too")
        if len(self.storages) > 1:
            self._check_places()

    def _check_places(self) -> None:
        """DbLedgerStorage looks for a ledger's entries in the logs of one directory only, by the ledger's id."""
        numbers: dict[tuple[bool, int], int] = {}
        for storage in self.storages:
            for scoped in (False, True):
                numbers.update(
                    ((scoped, log_id_of(log.name) or 0), storage.number) for log in storage.logs(scoped=scoped)
                )
        for ledger, path in self.paths.items():
            home = ledger.value % len(self.storages)
            with LedgerIndexReader.open(path) as reader:
                for entry_id, location in reader.locations(skip_absent=True):
                    log_id = unpack_location(location)[0]
                    number = numbers.get((ledger.is_scoped, log_id), home)
                    if number != home:
                        raise Unsupported(
                            f"Entry {entry_id} of ledger {ledger} is in log {log_id:x} of "
                            f"{self.storages[number].ledger_dir}; DbLedgerStorage would look for it in "
                            f"{self.storages[home].ledger_dir} only",
                            hint="let the bookie's ledgers be recovered onto one that starts empty instead",
                        )

    def sources(self, state: ConversionState | None = None) -> Iterator[_Source]:
        for ledger, path in self.paths.items():
            number = ledger.value % len(self.storages)
            if state is not None and state.has(ledger, number, by_directory=False):
                continue
            with LedgerIndexReader.open(path) as reader:
                header = reader.header
                data = LedgerData(True, header.fenced, header.master_key, header.explicit_lac)
                yield _Source(ledger, number, data, self._count(number, reader.locations(skip_absent=True)))

    def clear(self) -> None:
        for storage in self.storages:
            for name in _DATABASES:
                unfinished(storage.index_dir / name)

    def _building(self, number: int, name: str) -> Path:
        path = self.storages[number].index_dir / name
        return path.with_name(name + UNFINISHED_SUFFIX)

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        with ExitStack() as stack:
            databases: dict[tuple[int, bool], tuple[LedgersDatabase, LocationsDatabase]] = {}

            def of(number: int, scoped: bool) -> tuple[LedgersDatabase, LocationsDatabase]:
                if (number, scoped) not in databases:
                    prefix = "scoped-" if scoped else ""
                    ledgers = _open_to_write(LedgersDatabase, self._building(number, f"{prefix}ledgers"), scoped)
                    locations = _open_to_write(LocationsDatabase, self._building(number, f"{prefix}locations"), scoped)
                    databases[number, scoped] = stack.enter_context(ledgers), stack.enter_context(locations)
                return databases[number, scoped]

            for storage in self.storages:  # Apache's bookie wants both, ledgers or none.
                of(storage.number, False)
            steps = _Steps()
            for source in self.sources(state):
                ledgers, locations = of(source.number, source.ledger.is_scoped)
                count = locations.put_all((source.ledger, *place) for place in source.places)
                ledgers.put(source.ledger, source.data)
                self._progress(count)
                if steps.is_due(count):
                    for pair in databases.values():
                        for each in reversed(pair):
                            each.flush()
                    state = state._replace(after=source.ledger.qualified_name, number=source.number)
                    state.write(path, self._files)
        for storage in self.storages:
            for name in _DATABASES:
                building = self._building(storage.number, name)
                if building.is_dir():
                    sync_tree(building, self._files)
        return state

    def verify(self) -> None:
        with self._built:
            super().verify()
            for (number, scoped), (ledgers, _) in self._readers.items():
                expected = sum(
                    1 for each in self.paths if (each.value % len(self.storages), each.is_scoped) == (number, scoped)
                )
                if sum(1 for _ in ledgers.ledgers()) != expected:
                    raise Corrupt(f"{ledgers.path} has other ledgers than the index files: nothing was replaced")

    def new_index_of(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[tuple[int, int]]] | None:
        key = number, ledger.is_scoped
        if key not in self._readers:
            prefix = "scoped-" if ledger.is_scoped else ""
            self._readers[key] = (
                self._built.enter_context(
                    LedgersDatabase.open(self._building(number, f"{prefix}ledgers"), scoped=ledger.is_scoped)
                ),
                self._built.enter_context(
                    LocationsDatabase.open(self._building(number, f"{prefix}locations"), scoped=ledger.is_scoped)
                ),
            )
        ledgers, locations = self._readers[key]
        data = ledgers.get(ledger)
        if data is None:
            return None
        return data, ((entry_id, location) for _, entry_id, location in locations.locations(ledger))

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.result.directories, self.storages, strict=True):
            current = storage.index_dir
            for name in _DATABASES:
                building, target = self._building(storage.number, name), current / name
                if building.is_dir():
                    if target.is_dir():  # without a ledger in it
                        self._rename(target, backup_name(target, stamp))
                    self._rename(building, target)
            backup = current / f"{INDEX}.backup-{stamp}"
            self._files.make_directory(backup)
            for level in _levels(current):
                self._rename(current / level, backup / level)
            row.backups.append(backup)


def _open_to_write(kind: Any, path: Path, scoped: bool) -> Any:
    if (path / "CURRENT").exists():
        return kind.edit(path, scoped=scoped)
    return kind.create(path, scoped=scoped)


def _refuse_ledgers(path: Path, problem: str) -> None:
    """Raises Conflict where a database has a ledger."""
    try:
        with LedgersDatabase.open(path) as database:
            count = sum(1 for _ in database.ledgers())
    except NotFound:
        return
    if count:
        raise Conflict(f"{path} has {count:,} ledgers, and {problem}", hint="keep one of the two, move the other away")


def _levels(current: Path) -> list[str]:
    """The directories of index files in `current`."""
    return sorted(
        entry.name
        for entry in os.scandir(current)
        if _LEVEL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )


# --- to index files -------------------------------------------------------------------------------------------------


class _ToInterleaved(_Conversion):
    to = INTERLEAVED

    def check(self) -> None:
        file = next(BookieIndexes(self._indexes).files(), None)
        if file is not None:
            raise Conflict(
                f"{file.path} is there, and databases too", hint="keep one of the two indexes, move the other away"
            )
        if not any((storage.index_dir / "ledgers").is_dir() for storage in self.storages):
            where = ", ".join(str(each.index_dir) for each in self.storages)
            raise UsageError(f"There are no databases of ledgers in {where}", hint="is it converted already?")
        self._check_log_ids()
        for storage in self.storages:
            for prefix in ("", "scoped-"):
                self._check_ledgers(storage.index_dir / f"{prefix}ledgers", storage.index_dir / f"{prefix}locations")

    def _check_log_ids(self) -> None:
        """Interleaved storage has one id space of logs, DbLedgerStorage one for each directory."""
        for scoped in (False, True):
            seen: dict[str, Path] = {}
            for storage in self.storages:
                for log in storage.logs(scoped=scoped):
                    other = seen.setdefault(log.name, log)
                    if other != log:
                        raise Unsupported(
                            f"{other} and {log} have the same id, and Interleaved storage has one log of each",
                            hint="let the bookie's ledgers be recovered onto one that starts empty instead",
                        )

    def _check_ledgers(self, path: Path, locations: Path) -> None:
        try:
            with LedgersDatabase.open(path) as database:
                if not locations.is_dir() and next(database.ledgers(), None) is not None:
                    raise Corrupt(
                        f"{path} has ledgers, and {locations} is missing",
                        hint="'bkctl bookie index rebuild --locations' makes it anew",
                    )
                if (database.storage_flags() or 0) & 1:
                    raise Unsupported(
                        f"{path} says that the bookie has to check its data first, which index files cannot say",
                        hint="run the bookie until its data integrity check is done",
                    )
                for ledger, data in database.ledgers():
                    if data.limbo:
                        raise Unsupported(
                            f"Ledger {ledger} in {path} is in limbo, which index files cannot say",
                            hint="run the bookie until its data integrity check is done",
                        )
                    if not any(data.master_key):
                        raise Unsupported(
                            f"Ledger {ledger} in {path} has no master key; in an index file it never gets one",
                            hint="'bkctl bookie index rebuild --ledgers --metadata-uri URI' finds it",
                        )
        except NotFound:
            return

    def sources(self, state: ConversionState | None = None) -> Iterator[_Source]:
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
                            places = self._count(number, self._places(locations, ledger))
                            yield _Source(ledger, number, data, places)

    def _places(self, locations: LocationsDatabase, ledger: LedgerId) -> Iterator[tuple[int, int]]:
        for _, entry_id, location in locations.locations(ledger):
            if entry_id > ENTRY_ID_MAX:
                raise Unsupported(f"Ledger {ledger} has an entry {entry_id}: no index file has room for it")
            if location:
                yield entry_id, location

    def clear(self) -> None:
        for storage in self.storages:
            unfinished(storage.index_dir / INDEX)

    def _building(self, number: int) -> Path:
        return self.storages[number].index_dir / f"{INDEX}{UNFINISHED_SUFFIX}"

    def build(self, state: ConversionState, path: Path) -> ConversionState:
        places = [self._building(storage.number) for storage in self.storages]
        for place in places:
            place.mkdir(DIRECTORY_MODE, exist_ok=True)
        builder = IndexFileBuilder(places, self._page_size, self._version)
        steps = _Steps()
        written: list[Path] = []
        for source in self.sources(state):
            builder.add(source.ledger, source.data, source.number)
            count = 0

            def counted(found: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
                nonlocal count
                for each in found:
                    count += 1
                    yield each

            builder.put(source.ledger, counted(source.places))
            self._progress(count)
            written.append(places[source.number] / index_path(source.ledger))
            if steps.is_due(count):
                builder.flush()
                self._sync(written)
                written = []
                state = state._replace(after=source.ledger.qualified_name, number=source.number)
                state.write(path, self._files)
        builder.flush()
        for place in places:
            sync_tree(place, self._files)
        return state

    def _sync(self, paths: list[Path]) -> None:
        directories: dict[Path, None] = {}
        for path in paths:
            with self._files.open_to_read(path) as file:
                os.fsync(file.fd)
            while path.name != f"{INDEX}{UNFINISHED_SUFFIX}":
                path = path.parent
                directories[path] = None
        for directory in directories:
            self._files.sync_directory(directory)

    def verify(self) -> None:
        super().verify()
        for storage, row in zip(self.storages, self.result.directories, strict=True):
            building = self._building(storage.number)
            if sum(1 for _ in BookieDirectories(index_dirs=[building]).indexes()) != row.ledgers:
                raise Corrupt(f"{building} has other ledgers than the databases: nothing was replaced")

    def new_index_of(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[tuple[int, int]]] | None:
        try:
            reader = LedgerIndexReader.open(self._building(number) / index_path(ledger))
        except NotFound:
            return None
        header = reader.header
        data = LedgerData(True, header.fenced, header.master_key, header.explicit_lac)
        return data, reader.locations(skip_absent=True)

    def swap(self, stamp: str) -> None:
        for row, storage in zip(self.result.directories, self.storages, strict=True):
            current, building = storage.index_dir, self._building(storage.number)
            if building.is_dir():
                for level in _levels(building):
                    _remove_empty(current / level)
                    self._rename(building / level, current / level)
                building.rmdir()
            for name in reversed(_DATABASES):
                backup = current / f"{name}.backup-{stamp}"
                if (current / name).is_dir():
                    self._rename(current / name, backup)
                if backup.is_dir():
                    row.backups.append(backup)


def _remove_empty(directory: Path) -> None:
    """Remove directories that have nothing but directories in them."""
    if directory.is_dir():
        for place, _, _ in os.walk(directory, topdown=False):
            os.rmdir(place)
