"""The shared work of both directions of a conversion of a bookie's index, and its result."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.disk import Files
from bkctl.errors import Corrupt
from bkctl.files.conversion import ConversionState
from bkctl.files.directories import BookieDirectories
from bkctl.formats.index import LedgerData
from bkctl.ids import LedgerId
from bkctl.repair.index_contents import Progress
from bkctl.repair.layout import BookieLayout

#: Ledgers and entries between two checkpoints, from which a killed conversion resumes.
LEDGERS_PER_CHECKPOINT: Final = 5_000
ENTRIES_PER_CHECKPOINT: Final = 2_000_000
#: In the order in which they get their names: a database of ledgers never stands without its locations.
DATABASE_NAMES: Final = ("locations", "ledgers", "scoped-locations", "scoped-ledgers")
LEVEL_NAME: Final = re.compile(r"[0-9a-f]{1,2}|[0-9a-f]{8}", re.ASCII)

#: (entry id, location)
EntryPlace = tuple[int, int]


@dataclass(slots=True)
class ConvertedDirectory:
    """One index directory (its `current`): ledgers and entries of its new index, and the backups of its old one."""

    path: Path
    ledgers: int = 0
    entries: int = 0
    backups: list[Path] = field(default_factory=list)


@dataclass(slots=True)
class Conversion:
    """The result of a conversion. `resumed`: a killed conversion was continued. `done` is False after a dry run."""

    directories: list[ConvertedDirectory]
    resumed: bool = False
    done: bool = False


class IndexedLedger(NamedTuple):
    """One ledger of the old index. `number` is the directory of its new index; `places` are its entries, in order."""

    ledger: LedgerId
    number: int
    data: LedgerData
    places: Iterator[EntryPlace]


class CheckpointInterval:
    """Counts ledgers and entries until the next checkpoint."""

    def __init__(self) -> None:
        self.ledgers = self.entries = 0

    def is_due(self, entries: int) -> bool:
        """Count a ledger with `entries`; return True, and start again, if a checkpoint is due."""
        self.ledgers += 1
        self.entries += entries
        if self.ledgers < LEDGERS_PER_CHECKPOINT and self.entries < ENTRIES_PER_CHECKPOINT:
            return False
        self.ledgers = self.entries = 0
        return True


class IndexConverter(ABC):
    """One direction of a conversion. `result` counts ledgers and entries while they are read."""

    def __init__(self, layout: BookieLayout, files: Files, progress: Progress) -> None:
        self._files, self._progress = files, progress
        self.storages = layout.storages()
        self.result = Conversion([ConvertedDirectory(storage.index_dir) for storage in self.storages])
        self._directories = BookieDirectories(index_dirs=layout.index_dirs)

    @abstractmethod
    def check(self) -> None:
        """Refuse what cannot be converted, before anything is written."""

    @abstractmethod
    def read_old(self, state: ConversionState | None = None) -> Iterator[IndexedLedger]:
        """Yield the ledgers of the old index in order, without the ledgers that `state` has."""

    @abstractmethod
    def clear(self) -> None:
        """Remove an unfinished index that an earlier conversion built."""

    @abstractmethod
    def build(self, state: ConversionState, path: Path) -> ConversionState:
        """Build the new index beside the old one, from `state` on; write checkpoints to `path`, return the last."""

    @abstractmethod
    def read_new(self, ledger: LedgerId, number: int) -> tuple[LedgerData, Iterator[EntryPlace]] | None:
        """Return the data and entries of a ledger in the new index; None if it is missing."""

    @abstractmethod
    def swap(self, stamp: str) -> None:
        """Move the new index into place and the old one to its backup. Steps that are done already are skipped."""

    def verify(self) -> None:
        """Compare every ledger and entry of the old and the new index. Raises Corrupt if they differ."""
        for row in self.result.directories:
            row.ledgers = row.entries = 0
        for source in self.read_old():
            found = self.read_new(source.ledger, source.number)
            if found is None or _shared_facts(found[0]) != _shared_facts(source.data):
                raise _difference(source.ledger, "its header")
            count = 0
            for old, new in zip_longest(source.places, found[1]):
                if old != new:
                    raise _difference(source.ledger, f"entry {(old or new)[0]}")
                count += 1
            self._progress(count)

    def count(self, number: int, places: Iterator[EntryPlace]) -> Iterator[EntryPlace]:
        """Yield `places`, and count a ledger and its entries for directory `number`."""
        row = self.result.directories[number]
        row.ledgers += 1
        for place in places:
            row.entries += 1
            yield place

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


def levels_in(current: Path) -> list[str]:
    """Return the names of the directories of index files in `current`, sorted."""
    return sorted(
        entry.name
        for entry in os.scandir(current)
        if LEVEL_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    )
