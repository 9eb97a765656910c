"""New index files for Interleaved and SortedLedgerStorage, from their entry logs.

Apache's command fences every ledger and needs the password of all of them; this one keeps the master key, fence and
explicit LAC that the old index file, the journals or the metadata store have. New files are built beside the old ones
and swapped ledger by ledger: each ledger always has its old or its new index. Source:
InterleavedStorageRegenerateIndexOp; BP-35.
"""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Final

from bkctl.checks.index_rows import first_files
from bkctl.disk import DIRECTORY_MODE, FILE_MODE, Files, StorageFile
from bkctl.errors import Corrupt, NotFound, TruncatedRecord, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader
from bkctl.formats.index import ENTRY_ID_MAX, PAGE_SIZE_DEFAULT, VERSION_CURRENT, LedgerData, index_path
from bkctl.formats.names import UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.model import LedgerFactsLookup, LedgerLiveness
from bkctl.repair.index_contents import (
    DamagedLogs,
    Progress,
    RepairFindings,
    decide_ledger_data,
    header_data,
    read_journals,
    read_log_entries,
    read_log_ledgers,
)
from bkctl.repair.layout import BookieLayout, backup_name, replace_with_backup, sync_tree, time_stamp
from bkctl.storage.ledger.index_pages import IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexPersistenceMgr

#: Directory below `current` for unfinished index files and, with a time, for backups of old ones.
INDEX: Final = "index"
#: Ledgers and changed pages (usually 8 KiB each) in memory during a build.
_HANDLES_MAX: Final = 20_000
_CHANGED_PAGES_MAX: Final = 4096
_PLACES_AT_ONCE: Final = 256


@dataclass(slots=True)
class RegeneratedIndex:
    """The index file of one ledger at `path`: the numbers of the new file, and the backup of the old one (None: none).

    `entries_before` is None without a readable old file. `entries_saved` of the entries are behind damage in a log:
    only the old index knows them. `fence_guessed`: the ledger is fenced because no source says otherwise.
    """

    ledger: LedgerId
    path: Path
    entries: int = 0
    last_entry_id: int = -1
    fenced: bool = False
    fence_guessed: bool = False
    entries_before: int | None = None
    entries_saved: int = 0
    backup: Path | None = None


@dataclass(slots=True)
class Regeneration:
    """The result of a regeneration; `swapped` is False after a dry run.

    `without_key` are ledgers left unchanged because their master key is unknown, `dead` are ledgers that are no longer
    in the metadata store.
    """

    indexes: list[RegeneratedIndex] = field(default_factory=list)
    without_key: list[LedgerId] = field(default_factory=list)
    dead: list[LedgerId] = field(default_factory=list)
    findings: RepairFindings = field(default_factory=RepairFindings)
    swapped: bool = False


def regenerate(
    layout: BookieLayout,
    ledgers: Collection[LedgerId] | None = None,
    *,
    scope_id: int | None = None,
    master_key: bytes | None = None,
    metadata: LedgerFactsLookup | None = None,
    dry_run: bool = False,
    files: Files | None = None,
    progress: Progress = lambda _: None,
) -> Regeneration:
    """Rebuild the index files of `ledgers` (None: every ledger with an index or entries, in `scope_id` if given).

    `master_key` is the key of all of them; None: it is looked up for each ledger. The caller holds the directories.
    Raises NotFound for a ledger without index and entries, UsageError if `ledgers` has one with an unknown key, OSError
    and BkctlError. After an error before the swap nothing has changed; in the swap each ledger has its old or new file.
    """
    for current in layout.index_dirs:
        if (current / "ledgers").is_dir() and (current / "locations").is_dir():
            raise UsageError(
                f"{current} has the databases of DbLedgerStorage, which has no index files",
                hint="'bkctl bookie index rebuild --ledgers --locations' rebuilds them",
            )
    run = _RegenerationRun(layout, files or Files(), metadata, progress)
    try:
        run.choose(ledgers, scope_id, master_key)
        run.build(dry_run=dry_run)
        if not dry_run:
            run.swap()
    finally:
        run.clean_up()
    return run.result


class _RegenerationRun:
    """One regeneration: its ledgers, their facts, and the files built so far."""

    def __init__(
        self, layout: BookieLayout, files: Files, metadata: LedgerFactsLookup | None, progress: Progress
    ) -> None:
        self.result = Regeneration()
        self._layout, self._files, self._metadata, self._progress = layout, files, metadata, progress
        self._rows: dict[LedgerId, RegeneratedIndex] = {}
        self._data: dict[LedgerId, LedgerData] = {}
        self._builder: IndexFileBuilder | None = None
        #: Readable old index files; they differ from `path` after an interrupted relocation.
        self._old: dict[LedgerId, Path] = {}

    def choose(self, ledgers: Collection[LedgerId] | None, scope_id: int | None, master_key: bytes | None) -> None:
        """Choose the ledgers that get a new index, and their headers; leave out dead ones, and ones without a key."""
        result, directories = self.result, self._layout.index_dirs
        facts = read_journals(self._layout.journal_dirs, result.findings, self._progress)
        paths = self._index_files()
        in_logs = self._ledgers_in_logs() if ledgers is None or not paths.keys() >= set(ledgers) else set()
        if scope_id is not None:
            paths = {ledger: path for ledger, path in paths.items() if ledger.scope_id == scope_id}
            in_logs = {ledger for ledger in in_logs if ledger.scope_id == scope_id}
        chosen = sorted(paths.keys() | in_logs if ledgers is None else set(ledgers))
        if ledgers is None and self._metadata is None and (unlisted := in_logs - paths.keys()):
            result.findings.notes.append(
                f"{len(unlisted)} ledgers in the logs have no index file: some may be deleted "
                "(--metadata-uri leaves deleted ledgers out)"
            )
        stored = {} if self._metadata is None else self._metadata(chosen)
        for ledger in chosen:
            if ledger not in paths and ledger not in in_logs and ledger not in facts:
                raise NotFound(f"Ledger {ledger} has neither an index file nor entries in this bookie")
            known = stored.get(ledger)
            if known is not None and known.liveness is LedgerLiveness.DEAD:
                result.dead.append(ledger)
                continue
            old_path = paths.get(ledger)
            path = old_path or directories[ledger.value % len(directories)] / index_path(ledger)
            row = RegeneratedIndex(ledger, path.with_name(path.name.removesuffix(RELOCATION_SUFFIX)))
            old = None if old_path is None else self._old_header(row, path)
            data, row.fence_guessed = decide_ledger_data(old, facts.get(ledger), known, old_is_complete=False)
            row.fenced = data.fenced
            key = master_key if master_key is not None else data.master_key
            if not key:
                result.without_key.append(ledger)
                continue
            self._data[ledger] = LedgerData(True, data.fenced, key, data.explicit_lac)
            self._rows[ledger] = row
            result.indexes.append(row)
        if ledgers is not None and result.without_key:
            named = ", ".join(map(str, result.without_key))
            raise UsageError(
                f"The master key of ledger {named} is unknown",
                hint="give its password with --password-file, or --metadata-uri",
            )

    def _index_files(self) -> dict[LedgerId, Path]:
        with BookieIndexes(BookieDirectories(index_dirs=self._layout.index_dirs)) as indexes:
            return {ledger: first for ledger, _, first in first_files(indexes)}

    def _ledgers_in_logs(self) -> set[LedgerId]:
        logs = [log for scoped in (False, True) for log in self._layout.logs(scoped=scoped)]
        return set().union(*(read_log_ledgers(log, RepairFindings()) for log in logs))

    def _old_header(self, row: RegeneratedIndex, path: Path) -> LedgerData | None:
        try:
            with LedgerIndexReader.open(path) as reader:
                data = header_data(reader)
                row.entries_before = sum(1 for _ in reader.locations())
        except (Corrupt, TruncatedRecord, Unsupported) as error:
            self.result.findings.notes.append(str(error))
            return None
        self._old[row.ledger] = path
        return data

    def build(self, *, dry_run: bool) -> None:
        """Read the logs and build the index files beside the old ones; in a dry run only count."""
        findings = self.result.findings
        self.clean_up()
        if not dry_run:
            places = [self._building(current) for current in self._layout.index_dirs]
            for place in places:
                place.mkdir(DIRECTORY_MODE)
            self._builder = IndexFileBuilder(places)
            for ledger, data in self._data.items():
                self._builder.add(ledger, data, self._number_of(self._rows[ledger].path))
        for scoped in (False, True):
            wanted = {ledger for ledger in self._rows if ledger.is_scoped == scoped}
            damaged_before = len(findings.damage)
            for log in self._layout.logs(scoped=scoped):
                for batch in read_log_entries(log, findings) if wanted else ():
                    by_ledger: dict[LedgerId, list[tuple[int, int]]] = defaultdict(list)
                    for ledger, entry_id, location in zip(*batch, strict=True):
                        by_ledger[ledger].append((entry_id, location))
                    for ledger in wanted.intersection(by_ledger):
                        self._put(self._rows[ledger], by_ledger[ledger])
                self._progress(log.stat().st_size if log.exists() else 0)
            with DamagedLogs(findings.damage[damaged_before:]) as damaged:
                for ledger in sorted(wanted & self._old.keys()) if damaged else ():
                    self._save(self._rows[ledger], damaged)
        if self._builder is not None:
            self._builder.flush()
            for row in self._rows.values():
                self._count(row)
            if self._builder.refused:
                findings.notes.append(
                    f"{self._builder.refused} entries have ids above {ENTRY_ID_MAX}: index files cannot hold them"
                )

    def _put(self, row: RegeneratedIndex, places: list[tuple[int, int]]) -> None:
        if self._builder is not None:
            self._builder.put(row.ledger, places)
        else:
            row.entries += len(places)
            row.last_entry_id = max(row.last_entry_id, *(entry_id for entry_id, _ in places))

    def _count(self, row: RegeneratedIndex) -> None:
        current = self._layout.index_dirs[self._number_of(row.path)]
        with LedgerIndexReader.open(self._building(current) / index_path(row.ledger)) as reader:
            row.entries = sum(1 for _ in reader.locations())
            row.last_entry_id = reader.last_entry_id

    def _save(self, row: RegeneratedIndex, damaged: DamagedLogs) -> None:
        """Copy entries behind damage from the old index."""
        with LedgerIndexReader.open(self._old[row.ledger]) as old:
            for entry_id, location in old.locations():
                is_there = self._builder is not None and self._builder.location(row.ledger, entry_id)
                if not is_there and damaged.has(row.ledger, entry_id, location):
                    self._put(row, [(entry_id, location)])
                    row.entries_saved += 1

    def _number_of(self, path: Path) -> int:
        return next(number for number, current in enumerate(self._layout.index_dirs) if current in path.parents)

    def _building(self, current: Path) -> Path:
        return current / f"{INDEX}{UNFINISHED_SUFFIX}"

    def swap(self) -> None:
        """Move the new index files into place, and the old ones to the backups."""
        stamp = time_stamp()
        backups = {current: backup_name(current / INDEX, stamp) for current in self._layout.index_dirs}
        for current in self._layout.index_dirs:
            building = self._building(current)
            if building.is_dir():
                sync_tree(building, self._files)
        changed: dict[Path, None] = {}
        for row in self._rows.values():
            current = self._layout.index_dirs[self._number_of(row.path)]
            new = self._building(current) / index_path(row.ledger)
            self._files.make_directory(row.path.parent)
            if row.path.exists():
                backup = backups[current] / row.path.relative_to(current)
                self._files.make_directory(backup.parent)
                replace_with_backup(self._files, new, row.path, backup)
                row.backup = backup
                changed[backup.parent] = None
            else:
                self._files.rename(new, row.path)
            changed[row.path.parent] = None
        for directory in changed:
            self._files.sync_directory(directory)
        self.result.swapped = True

    def clean_up(self) -> None:
        """Remove unfinished index files."""
        for current in self._layout.index_dirs:
            shutil.rmtree(self._building(current), ignore_errors=True)


# --- index files, built ---------------------------------------------------------------------------------------------


class _UnsyncedFile(StorageFile):
    __slots__ = ()

    def sync(self) -> None:
        """Do nothing: the caller syncs the whole tree at the end."""


class _UnsyncedFiles(Files):
    def open(self, path: Path, *, create: bool = False) -> StorageFile:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), FILE_MODE)
        return _UnsyncedFile(path, fd)

    def sync_directory(self, path: Path) -> None:
        """Do nothing: the caller syncs the whole tree at the end."""


class IndexFileBuilder:
    """Builds index files below `directories`, with as much memory for changed pages as a bookie uses.

    The caller syncs the directories. `refused` counts entries with ids too high for an index file.
    """

    def __init__(self, directories: list[Path]) -> None:
        self.refused = 0
        self._directory = 0
        self._files = IndexPersistenceMgr(
            directories,
            _UnsyncedFiles(),
            page_size=PAGE_SIZE_DEFAULT,
            open_file_limit=_HANDLES_MAX,
            version=VERSION_CURRENT,
            pick_directory=lambda: self._directory,
        )
        self._pages = IndexInMemPageMgr(self._files, page_size=PAGE_SIZE_DEFAULT, page_limit=-1)
        self._handles: dict[LedgerId, IndexedHandle] = {}

    def add(self, ledger: LedgerId, data: LedgerData, directory: int) -> None:
        """Begin a ledger's file in the directory with that number."""
        self._directory = directory
        handle = self._files.create(ledger, data.master_key)
        handle.fenced, handle.explicit_lac = data.fenced, data.explicit_lac or b""
        self._handles[ledger] = handle
        if len(self._handles) >= _HANDLES_MAX:
            self.flush()

    def put(self, ledger: LedgerId, places: Iterable[tuple[int, int]]) -> int:
        """Set places (entry id, location) of entries of an added ledger; a later place wins. Return their number."""
        handle = self._handles.get(ledger)
        if handle is None:
            handle = self._files.load(ledger)
            assert handle is not None, f"ledger {ledger} was not added"
            self._handles[ledger] = handle
        count = 0
        waiting = iter(places)
        while batch := list(islice(waiting, _PLACES_AT_ONCE)):
            count += len(batch)
            fitting = [place for place in batch if place[0] <= ENTRY_ID_MAX]
            self.refused += len(batch) - len(fitting)
            for _, run in groupby(sorted(dict(fitting).items()), lambda place: self._pages.page_number(place[0])):
                self._pages.put(handle, *map(list, zip(*run, strict=True)))
            if self._pages.changed_count >= _CHANGED_PAGES_MAX:
                self.flush()
        return count

    def location(self, ledger: LedgerId, entry_id: int) -> int:
        """Return the location of an entry set so far; 0 without one."""
        return self._pages.location(ledger, entry_id)

    def flush(self) -> None:
        """Write the files in memory. Raises OSError."""
        pages = self._pages.take_changes()
        written = False
        try:
            for handle in {**dict.fromkeys(self._handles.values()), **pages}:
                if handle in pages or not handle.is_on_disk:
                    self._files.write(handle, None, pages.get(handle, {}))
            written = True
        finally:
            self._pages.finish(written=written)
        if len(self._handles) >= _HANDLES_MAX:
            self._handles.clear()
