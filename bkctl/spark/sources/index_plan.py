"""The plan of `bookkeeper.index`: which parts of which index files and databases each task reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LocationsDatabase
from bkctl.files.windows import FileReader
from bkctl.formats.index import HEADER_SIZE, SLOT_SIZE, ledger_of_index_path
from bkctl.formats.names import DATABASE_NAMES, ROCKSDB_NAMES
from bkctl.ids import LedgerId
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.options import Mode
from bkctl.spark.sources.places import bookie_id_at, local_paths
from bkctl.spark.sources.readers import InputPartition

#: Index files of one partition at most.
_FILES_MAX: Final = 1000


class Slots(NamedTuple):
    """The slots `first` to `end` (excluded) of an index file that had `size_bytes` when the plan was made."""

    path: str
    ledger: LedgerId
    bookie_id: str | None
    first: int
    end: int
    size_bytes: int


@dataclass
class IndexFiles(InputPartition):
    """Some index files, or a part of one."""

    slots: list[Slots]


@dataclass
class DatabaseRange(InputPartition):
    """The locations with keys from `first` (None: the lowest) to `end` (excluded; None: all) in a pair of databases."""

    directory: str
    scoped: bool
    bookie_id: str | None
    first: bytes | None = None
    end: bytes | None = None

    def path(self, name: str) -> Path:
        """Return the path of the database `ledgers` or `locations`."""
        return Path(self.directory) / (f"scoped-{name}" if self.scoped else name)


@dataclass
class DamagedIndex(InputPartition):
    """A file or database that cannot be planned, and why."""

    path: str
    reason: str
    bookie_id: str | None


def group_files(
    parts: Iterable[Slots | DatabaseRange | DamagedIndex], size_bytes: int
) -> list[InputPartition]:  # fmt: skip
    """Return `parts` as partitions: files in groups of at most `size_bytes`, behind all others."""
    found: list[InputPartition] = []
    group: list[Slots] = []
    group_size = 0
    for part in parts:
        if not isinstance(part, Slots):
            found.append(part)
            continue
        size = HEADER_SIZE + (part.end - part.first) * SLOT_SIZE
        if group and (group_size + size > size_bytes or len(group) >= _FILES_MAX):
            found.append(IndexFiles(group))
            group, group_size = [], 0
        group.append(part)
        group_size += size
    return [*found, IndexFiles(group)] if group else found


class IndexPlanner:
    """Finds the index files and databases at paths, and cuts them into parts of at most `size_bytes`.

    Without `cuts_files` each index file is one part, whatever its size.
    """

    def __init__(self, conditions: Conditions, mode: Mode, size_bytes: int, *, cuts_files: bool) -> None:
        self._conditions, self._mode = conditions, mode
        self._size_bytes, self._cuts_files = size_bytes, cuts_files
        self._planned: set[Path] = set()
        self._bookie_id_at = cache(bookie_id_at)

    def parts(self, paths: Iterable[str]) -> Iterator[Slots | DatabaseRange | DamagedIndex]:
        """Yield the parts at files, directories and patterns, each file and database once."""
        for text in paths:
            for path, exact in local_paths(text):
                if path.is_dir():
                    yield from self._directory(path)
                elif exact or path.name.endswith((".idx", f".idx{RELOCATION_SUFFIX}")):
                    yield from self._named_file(path)

    def _directory(self, path: Path) -> Iterator[Slots | DatabaseRange | DamagedIndex]:
        if path.name in ROCKSDB_NAMES and (path / "CURRENT").is_file():
            yield from self._database(path.parent, path.name.startswith("scoped-"))
            return
        directories = BookieDirectories.at(path).of_a_bookie()
        with BookieIndexes(directories) as indexes:
            for file in indexes.files():
                assert isinstance(file.id, LedgerId)
                yield from self._file(file.path, file.id, file.size)
        for file in directories.rocksdbs():
            if file.path.name in DATABASE_NAMES:
                yield from self._database(file.path.parent, file.scoped)

    def _named_file(self, path: Path) -> Iterator[Slots | DamagedIndex]:
        with FileReader(path) as reader:
            size = reader.size()
        ledger = ledger_of_index_path(str(path.absolute()).removesuffix(RELOCATION_SUFFIX))
        if ledger is None:
            raise UsageError(
                f"{path} does not name its ledger", hint="the path of an index file contains its ledger's id"
            )
        yield from self._file(path, ledger, size)

    def _file(self, path: Path, ledger: LedgerId, size: int) -> Iterator[Slots | DamagedIndex]:
        """Yield the parts of one file; only a file of more than one part is opened, and no slot is read."""
        if self._is_planned(path):
            return
        bookie_id = next((found for home in list(path.parents)[2:5] if (found := self._bookie_id_at(home))), None)
        if not (self._conditions.accepts_ledger(ledger) and self._accepts(path, bookie_id)):
            return
        count = max(0, size - HEADER_SIZE) // SLOT_SIZE
        if not self._cuts_files or size - HEADER_SIZE <= self._size_bytes:
            yield Slots(str(path), ledger, bookie_id, 0, count, size)
            return
        try:
            with LedgerIndexReader.open(path) as reader:
                starts = list(_part_starts(reader.data(HEADER_SIZE), max(1, self._size_bytes // SLOT_SIZE)))
        except (NotFound, UsageError):
            raise
        except BkctlError as error:
            yield self._damage(path, error, bookie_id)
            return
        for first, end in pairwise([0, *starts, count]):
            yield Slots(str(path), ledger, bookie_id, first, end, size)

    def _database(self, directory: Path, scoped: bool) -> Iterator[DatabaseRange | DamagedIndex]:
        bookie_id = self._bookie_id_at(directory)
        whole = DatabaseRange(str(directory), scoped, bookie_id)
        locations = whole.path("locations")
        if self._is_planned(locations) or not self._accepts(locations, bookie_id):
            return
        if self._conditions.about_ledgers:
            yield whole
            return
        try:
            with LocationsDatabase.open(locations, scoped=scoped) as database:
                borders = list(self._key_borders(database.tables(), ledger_size=16 if scoped else 8))
        except BkctlError as error:
            yield self._damage(locations, error, bookie_id)
            return
        for first, end in pairwise([None, *borders, None]):
            yield DatabaseRange(str(directory), scoped, bookie_id, first, end)

    def _key_borders(self, tables: Iterable[tuple[bytes, int]], ledger_size: int) -> Iterator[bytes]:
        """Yield keys between parts of about `size_bytes`, from the first keys of tables; of ledgers if none is cut."""
        count, last = 0, b""
        for key, item_count in tables:
            border = key if self._cuts_files else key[:ledger_size]
            if count * SLOT_SIZE >= self._size_bytes and border > last:
                yield border
                count, last = 0, border
            count += item_count

    def _is_planned(self, path: Path) -> bool:
        resolved = path.resolve()
        if resolved in self._planned:
            return True
        self._planned.add(resolved)
        return False

    def _accepts(self, path: Path, bookie_id: str | None) -> bool:
        return self._conditions.accepts("file", str(path)) and self._conditions.accepts("bookieId", bookie_id)

    def _damage(self, path: Path, error: BkctlError, bookie_id: str | None) -> DamagedIndex:
        self._mode.check(error)
        return DamagedIndex(str(path), str(error), bookie_id)


def _part_starts(extents: Iterable[tuple[int, int]], step: int) -> Iterator[int]:
    """Yield the first slots of all parts but the first: each has `step` slots outside of the file's holes, or fewer."""
    filled = 0
    for begin, end in extents:
        slot, slot_end = (begin - HEADER_SIZE) // SLOT_SIZE, -(-(end - HEADER_SIZE) // SLOT_SIZE)
        while slot < slot_end:
            if filled == step:
                yield slot
                filled = 0
            taken = min(step - filled, slot_end - slot)
            slot, filled = slot + taken, filled + taken
