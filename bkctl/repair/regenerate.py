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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from bkctl.disk import DIRECTORY_MODE, FILE_MODE, Files, StorageFile
from bkctl.errors import Corrupt, NotFound, TruncatedRecord, Unsupported, UsageError
from bkctl.files.conversion import check_conversion
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import RELOCATION_SUFFIX, BookieIndexes, LedgerIndexReader, first_files
from bkctl.files.rocksdb import REBUILD_HINT
from bkctl.formats.index import ENTRY_ID_MAX, PAGE_SIZE_DEFAULT, VERSION_CURRENT, LedgerData, index_path
from bkctl.formats.names import SCOPED_DIRECTORY, UNFINISHED_SUFFIX
from bkctl.ids import LedgerId
from bkctl.model import LedgerFactsLookup
from bkctl.repair import index_contents
from bkctl.repair.layout import BookieLayout, backup_name, replace_with_backup, sync_tree, time_stamp
from bkctl.storage.ledger.index_pages import IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexPersistenceMgr

#: Directory below `current` for unfinished index files and, with a time, for backups of old ones.
INDEX: Final = "index"
#: Ledgers and changed pages (usually 8 KiB each) in memory during a build.
_HANDLES_MAX: Final = 20_000
_CHANGED_PAGES_MAX: Final = 4096
_ENTRIES_AT_ONCE: Final = 1024


@dataclass(slots=True)
class RegeneratedIndex:
    """The index file of one ledger at `path`: the numbers of the new file, and the backup of the old one (None: none).

    `entries_before` is a sum over all old files, None without a readable one. `entries_saved` of the entries are
    behind damage in a log, or in a missing part: only the old index knows them. `fence_guessed`: the ledger is fenced
    because no source says otherwise.
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


def regenerate(
    layout: BookieLayout,
    ledgers: Collection[LedgerId] | None = None,
    *,
    scope_id: int | None = None,
    master_key: bytes | None = None,
    metadata: LedgerFactsLookup | None = None,
    dry_run: bool = False,
    files: Files | None = None,
    progress: index_contents.Progress = lambda _: None,
) -> Regeneration:
    """Rebuild the index files of `ledgers` (None: every ledger with an index or entries, in `scope_id` if given).

    `master_key` is the key of all of them; None: it is looked up for each ledger. The caller holds the directories.
    Raises NotFound for a ledger without index and entries, UsageError if `ledgers` has one with an unknown key, OSError
    and BkctlError. After an error before the swap nothing has changed; in the swap each ledger has its old or new file.
    """
    for current in layout.index_dirs:
        check_conversion(current)
        if (current / "ledgers").is_dir() and (current / "locations").is_dir():
            raise UsageError(
                f"{current} has the databases of DbLedgerStorage, which has no index files",
                hint=REBUILD_HINT,
            )
    run = Regeneration(files or Files(), metadata, progress, dry_run, layout)
    try:
        run.choose(ledgers, scope_id, master_key)
        run.build()
        if not dry_run:
            run.swap()
    finally:
        run.clean_up()
    return run


@dataclass
class Regeneration(index_contents.IndexRepair):
    """One regeneration, and its result.

    `without_key` are ledgers left unchanged because their master key is unknown, `dead` are ledgers that are no longer
    in the metadata store.
    """

    _layout: BookieLayout
    without_key: list[LedgerId] = field(init=False, default_factory=list)
    dead: list[LedgerId] = field(init=False, default_factory=list)
    _rows: dict[LedgerId, RegeneratedIndex] = field(init=False, default_factory=dict)
    _data: dict[LedgerId, LedgerData] = field(init=False, default_factory=dict)
    #: Old index files besides the first, which a bookie uses.
    _further: dict[LedgerId, list[Path]] = field(init=False, default_factory=dict)
    #: Readable old index files.
    _old: defaultdict[LedgerId, list[Path]] = field(init=False, default_factory=partial(defaultdict, list))

    def __post_init__(self) -> None:
        self._buildings = {current: current / f"{INDEX}{UNFINISHED_SUFFIX}" for current in self._layout.index_dirs}

    @property
    def indexes(self) -> list[RegeneratedIndex]:
        """Return the index files, in order of their ledgers."""
        return list(self._rows.values())

    def choose(self, ledgers: Collection[LedgerId] | None, scope_id: int | None, master_key: bytes | None) -> None:
        """Choose the ledgers that get a new index, and their headers; leave out dead ones, and ones without a key."""
        directories = self._layout.index_dirs
        facts = index_contents.read_journals(self._layout.journal_dirs, self.findings, self._progress)
        with BookieIndexes(BookieDirectories(index_dirs=directories)) as indexes:
            paths: defaultdict[LedgerId, list[Path]] = defaultdict(list)
            for ledger, file, _ in first_files(indexes):
                paths[ledger].append(file.path)
        in_logs = self._ledgers_in_logs() if ledgers is None or not paths.keys() >= set(ledgers) else set()
        if scope_id is not None:
            paths = defaultdict(list, {ledger: each for ledger, each in paths.items() if ledger.scope_id == scope_id})
            in_logs = {ledger for ledger in in_logs if ledger.scope_id == scope_id}
        chosen = sorted(paths.keys() | in_logs if ledgers is None else set(ledgers))
        if ledgers is None and self._metadata is None and (unlisted := in_logs - paths.keys()):
            self.findings.notes.append(
                f"{len(unlisted)} ledgers in the logs have no index file: some may be deleted "
                "(--metadata-uri leaves deleted ledgers out)"
            )
        self.ask(chosen)
        for ledger in chosen:
            if ledger not in paths and ledger not in in_logs and ledger not in facts:
                raise NotFound(f"Ledger {ledger} has neither an index file nor entries in this bookie")
            new_path = directories[ledger.value % len(directories)] / index_path(ledger)
            path, *further = paths.get(ledger, [new_path])
            row = RegeneratedIndex(ledger, path.with_name(path.name.removesuffix(RELOCATION_SUFFIX)))
            old = self._old_header(row, paths.get(ledger, []))
            decided = index_contents.decide_ledger_data(
                old, facts.get(ledger), self.known(ledger), old_is_complete=False
            )
            if decided is None:
                self.dead.append(ledger)
                continue
            data, row.fence_guessed = decided
            row.fenced = data.fenced
            key = master_key if master_key is not None else data.master_key
            if not key:
                self.without_key.append(ledger)
                continue
            self._further[ledger] = further
            self._data[ledger] = LedgerData(True, data.fenced, key, data.explicit_lac)
            self._rows[ledger] = row
        if ledgers is not None and self.without_key:
            named = ", ".join(map(str, self.without_key))
            raise UsageError(
                f"The master key of ledger {named} is unknown",
                hint="give its password with --password-file, or --metadata-uri",
            )

    def _ledgers_in_logs(self) -> set[LedgerId]:
        logs = [log for scoped in (False, True) for log in self._layout.logs(scoped=scoped)]
        found: set[LedgerId] = set()
        for log in logs:
            found |= index_contents.read_log_ledgers(log, index_contents.RepairFindings())
            self._progress(index_contents.size_of(log))
        return found

    def _old_header(self, row: RegeneratedIndex, paths: Iterable[Path]) -> LedgerData | None:
        """Return what the headers of a ledger's old files say together; None without a readable one."""
        merged = None
        for path in paths:
            try:
                with LedgerIndexReader.open(path) as reader:
                    data = index_contents.header_data(reader)
                    row.entries_before = (row.entries_before or 0) + sum(1 for _ in reader.locations())
            except (Corrupt, TruncatedRecord, Unsupported) as error:
                self.findings.notes.append(str(error))
                continue
            self._old[row.ledger].append(path)
            if merged is not None:
                packet = (
                    index_contents.later_lac(merged.explicit_lac or None, data.explicit_lac)
                    if data.explicit_lac
                    else merged.explicit_lac
                )
                key = merged.master_key if any(merged.master_key) else data.master_key
                data = LedgerData(True, merged.fenced or data.fenced, key, packet)
            merged = data
        return merged

    def build(self) -> None:
        """Read the logs and build the index files beside the old ones; in a dry run only count."""
        self.clean_up()
        target: IndexFileBuilder | index_contents.EntrySet = index_contents.EntrySet()
        if not self.dry_run:
            for place in self._buildings.values():
                place.mkdir(DIRECTORY_MODE)
            target = IndexFileBuilder(list(self._buildings.values()))
            for ledger, data in self._data.items():
                target.add(ledger, data, self._layout.index_dirs.index(self._current_of(self._rows[ledger].path)))
        homes = self._layout.ledger_dirs
        for scoped in (False, True):
            wanted = {ledger for ledger in self._rows if ledger.is_scoped == scoped}
            logs = self._layout.logs(scoped=scoped)
            if not wanted:
                self._progress(sum(map(index_contents.size_of, logs)))
                continue
            home = (homes[0] if len(homes) == 1 else Path()) / (SCOPED_DIRECTORY if scoped else "")
            old = self._old_entries(sorted(wanted & self._old.keys()))
            for ledger, count in self.copy_entries(logs, home, target, wanted.intersection, old).items():
                self._rows[ledger].entries_saved = count
        if isinstance(target, index_contents.EntrySet):
            for ledger, extent in target.extents().items():
                self._rows[ledger].entries, self._rows[ledger].last_entry_id = extent
            return
        target.flush()
        for row in self._rows.values():
            with LedgerIndexReader.open(self._built(row)) as reader:
                row.entries, row.last_entry_id = sum(1 for _ in reader.locations()), reader.last_entry_id
        if target.refused:
            self.findings.notes.append(
                f"{target.refused} entries have ids above {ENTRY_ID_MAX}: index files cannot hold them"
            )

    def _old_entries(self, ledgers: list[LedgerId]) -> Iterator[index_contents.IndexedEntry]:
        """Yield the entries of the old index."""
        for ledger in ledgers:
            for path in self._old[ledger]:
                with LedgerIndexReader.open(path) as old:
                    for entry_id, location in old.locations():
                        yield ledger, entry_id, location

    def _current_of(self, path: Path) -> Path:
        return next(current for current in self._layout.index_dirs if current in path.parents)

    def _built(self, row: RegeneratedIndex) -> Path:
        return self._buildings[self._current_of(row.path)] / index_path(row.ledger)

    def swap(self) -> None:
        """Move the new index files into place, and the old ones to the backups."""
        stamp = time_stamp()
        backups = {current: backup_name(current / INDEX, stamp) for current in self._layout.index_dirs}
        for building in self._buildings.values():
            sync_tree(building, self._files)
        changed: dict[Path, None] = {}
        for row in self._rows.values():
            current, new = self._current_of(row.path), self._built(row)
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
            for path in self._further[row.ledger]:
                current = self._current_of(path)
                backup = backups[current] / path.relative_to(current)
                self._files.make_directory(backup.parent)
                self._files.rename(path, backup)
                changed.update(dict.fromkeys((path.parent, backup.parent)))
        for directory in changed:
            self._files.sync_directory(directory)

    def clean_up(self) -> None:
        """Remove unfinished index files."""
        for building in self._buildings.values():
            shutil.rmtree(building, ignore_errors=True)


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

    def put_all(self, entries: Iterable[index_contents.IndexedEntry]) -> int:
        """Set the locations of entries of added ledgers; a later one wins. Return the number of entries."""
        count = 0
        waiting = iter(entries)
        while batch := list(islice(waiting, _ENTRIES_AT_ONCE)):
            count += len(batch)
            # Of each page at once, in order of the entries.
            pages: dict[tuple[LedgerId, int], dict[int, int]] = defaultdict(dict)
            for ledger, entry_id, location in batch:
                if entry_id <= ENTRY_ID_MAX:
                    pages[ledger, self._pages.page_number(entry_id)][entry_id] = location
                else:
                    self.refused += 1
            for (ledger, _), locations in sorted(pages.items()):
                self._pages.put(self._handle(ledger), *map(list, zip(*sorted(locations.items()), strict=True)))
            if self._pages.changed_count >= _CHANGED_PAGES_MAX:
                self.flush()
        return count

    def _handle(self, ledger: LedgerId) -> IndexedHandle:
        handle = self._handles.get(ledger) or self._files.load(ledger)
        assert handle is not None, f"ledger {ledger} was not added"
        return self._handles.setdefault(ledger, handle)

    def get(self, ledger: LedgerId, entry_id: int) -> int:
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
