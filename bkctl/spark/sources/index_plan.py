"""The plan of `bookkeeper.index`: which parts of which index files and databases each task reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from bkctl.errors import BkctlError, Corrupt, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader
from bkctl.files.rocksdb import LedgersDatabase
from bkctl.formats.index import HEADER_SIZE, SLOT_SIZE
from bkctl.formats.names import ROCKSDB_NAMES
from bkctl.ids import LedgerId
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.options import Mode
from bkctl.spark.sources.places import bookie_id_at, local_paths

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
    """The ledgers `first` (None: from the lowest) to `end` (excluded; None: all) of a pair of databases."""

    directory: str
    scoped: bool
    bookie_id: str | None
    first: LedgerId | None
    end: LedgerId | None

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

    def parts(self, paths: Iterable[str]) -> Iterator[Slots | DatabaseRange | DamagedIndex]:
        """Yield the parts at files, directories and patterns, each file and database once."""
        for text in paths:
            for path, exact in local_paths(text):
                if path.is_dir():
                    yield from self._directory(path)
                elif exact or path.name.endswith((".idx", f".idx{RELOCATION_SUFFIX}")):
                    yield from self._file(path)

    def _directory(self, path: Path) -> Iterator[Slots | DatabaseRange | DamagedIndex]:
        if path.name in ROCKSDB_NAMES and (path / "CURRENT").is_file():
            yield from self._database(path.parent, path.name.startswith("scoped-"))
            return
        directories = BookieDirectories.at(path).of_a_bookie()
        with BookieIndexes(directories) as indexes:
            for file in indexes.files():
                yield from self._file(file.path)
        for file in directories.rocksdbs():
            if file.path.name in ("ledgers", "scoped-ledgers"):
                yield from self._database(file.path.parent, file.scoped)

    def _file(self, path: Path) -> Iterator[Slots | DamagedIndex]:
        if self._is_planned(path):
            return
        bookie_id = next((found for home in list(path.parents)[2:5] if (found := bookie_id_at(home))), None)
        try:
            with LedgerIndexReader.open(path) as reader:
                ledger, count, size = reader.ledger, reader.slot_count, reader.size()
        except (NotFound, UsageError):
            raise
        except BkctlError as error:
            yield self._damage(path, error, bookie_id)
            return
        if ledger is None:
            raise UsageError(
                f"{path} does not name its ledger", hint="the path of an index file contains its ledger's id"
            )
        if not (self._conditions.accepts_ledger(ledger) and self._accepts(path, bookie_id)):
            return
        step = max(1, self._size_bytes // SLOT_SIZE) if self._cuts_files else count
        for first in range(0, max(count, 1), max(step, 1)):
            yield Slots(str(path), ledger, bookie_id, first, min(first + step, count), size)

    def _database(self, directory: Path, scoped: bool) -> Iterator[DatabaseRange | DamagedIndex]:
        bookie_id = bookie_id_at(directory)
        whole = DatabaseRange(str(directory), scoped, bookie_id, None, None)
        ledgers, locations = whole.path("ledgers"), whole.path("locations")
        if self._is_planned(locations) or not self._accepts(locations, bookie_id):
            return
        try:
            with LedgersDatabase.open(ledgers, scoped=scoped) as database:
                ids = [ledger for ledger in database.ledger_ids() if self._conditions.accepts_ledger(ledger)]
            size = sum(file.stat().st_size for file in locations.iterdir() if file.suffix == ".sst")
        except OSError as error:
            failure = Corrupt(f"{locations} cannot be read: {error.strerror or error}")
            yield self._damage(locations, failure, bookie_id)
            return
        except BkctlError as error:
            yield self._damage(ledgers, error, bookie_id)
            return
        if self._conditions.about_ledgers and not ids:
            return
        count = max(1, min(len(ids), -(-size // self._size_bytes)))
        borders = [None, *(ids[len(ids) * at // count] for at in range(1, count)), None]
        for first, end in pairwise(borders):
            yield DatabaseRange(str(directory), scoped, bookie_id, first, end)

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
