"""New databases for DbLedgerStorage, from its entry logs and journals: `locations` and `ledgers`, scoped ones too.

Apache's rebuild leaves every ledger fenced and without its master key; this one keeps the facts in the old database,
the journals and the metadata store. All databases are built first, in all directories, then all are swapped.
Source: LocationsIndexRebuildOp, LedgersIndexRebuildOp; BP-35.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from bkctl.disk import Files
from bkctl.errors import Corrupt, NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.index import LedgerData
from bkctl.ids import LedgerId
from bkctl.model import LedgerFacts, LedgerFactsLookup, LedgerLiveness
from bkctl.repair.index_contents import (
    DamagedFile,
    DamagedLogs,
    JournalFacts,
    Progress,
    RepairFindings,
    decide_ledger_data,
    is_ledger,
    read_journals,
    read_log_entries,
    read_log_ledgers,
)
from bkctl.repair.layout import BookieLayout, Storage, prepare_building, replace_directory, time_stamp

LEDGERS: Final = "ledgers"
LOCATIONS: Final = "locations"
SCOPED_PREFIX: Final = "scoped-"
_SCOPES: Final = ((False, ""), (True, SCOPED_PREFIX))
_D = TypeVar("_D", LedgersDatabase, LocationsDatabase)


@dataclass(slots=True)
class RebuiltDatabase:
    """One database at `path`: the numbers of the new one, and the backup of the old one (None: none, or not yet).

    `ledgers_before` and `entries_before` are of the old database, None if it is missing or damaged. `entries_saved` of
    the entries are behind damage in a log: only the old database knows them. `guessed_fences` counts ledgers that are
    fenced because no source says otherwise, `without_key` ledgers whose master key is unknown. `left_out` counts
    ledgers of logs or journals that are not in the new database. In a dry run each copy of an entry counts.
    """

    path: Path
    logs: int = 0
    ledgers: int = 0
    entries: int | None = None
    ledgers_before: int | None = None
    entries_before: int | None = None
    left_out: int = 0
    entries_saved: int = 0
    guessed_fences: int = 0
    without_key: int = 0
    backup: Path | None = None


@dataclass(slots=True)
class Rebuild:
    """The result of a rebuild, and its findings; `swapped` is False after a dry run."""

    databases: list[RebuiltDatabase] = field(default_factory=list)
    findings: RepairFindings = field(default_factory=RepairFindings)
    swapped: bool = False


def rebuild(
    layout: BookieLayout,
    *,
    ledgers: bool,
    locations: bool,
    metadata: LedgerFactsLookup | None = None,
    dry_run: bool = False,
    files: Files | None = None,
    progress: Progress = lambda _: None,
) -> Rebuild:
    """Rebuild the chosen databases in every directory. The caller holds the directories.

    Ledgers that are dead in the metadata store are dropped. Without a store, `locations` has the ledgers that the
    `ledgers` database has (as in Apache's), and `ledgers` every ledger found in a log or journal. Raises UsageError for
    directories of another storage class, OSError and BkctlError; after an error nothing has changed.
    """
    storages = layout.storages()
    has_database = any((storage.index_dir / name).is_dir() for storage in storages for name in (LEDGERS, LOCATIONS))
    if not has_database and next(BookieDirectories(index_dirs=layout.index_dirs).indexes(), None) is not None:
        raise UsageError(
            f"{layout.index_dirs[0]} has index files but no database: its bookie does not use DbLedgerStorage",
            hint="'bkctl bookie index regenerate --all' rebuilds index files",
        )
    run = _RebuildRun(storages, files or Files(), metadata, progress, dry_run)
    try:
        if ledgers:
            run.build_ledgers(layout.journal_dirs)
        if locations:
            run.build_locations()
        if not dry_run:
            run.swap()
    finally:
        run.clean_up()
    return run.result


@dataclass
class _RebuildRun:
    """One rebuild: the databases built so far, and their sources."""

    _storages: list[Storage]
    _files: Files
    _metadata: LedgerFactsLookup | None
    _progress: Progress
    _dry_run: bool

    def __post_init__(self) -> None:
        self.result = Rebuild()
        self._known: dict[LedgerId, LedgerFacts] = {}
        #: The ledgers of the databases that were rebuilt, by path.
        self._ledgers: dict[Path, set[LedgerId]] = {}
        self._built: list[tuple[RebuiltDatabase, Path]] = []

    def build_ledgers(self, journal_dirs: Iterable[Path]) -> None:
        findings = self.result.findings
        facts = read_journals(journal_dirs, findings, self._progress)
        if not journal_dirs:
            findings.notes.append("No journal directory is given: facts that only journals have are missing")
        for storage in self._storages:
            for scoped, prefix in _SCOPES:
                target = storage.index_dir / f"{prefix}{LEDGERS}"
                logs = storage.logs(scoped=scoped)
                of_journals = {
                    ledger
                    for ledger in facts
                    if ledger.is_scoped == scoped and ledger.value % len(self._storages) == storage.number
                }
                if scoped and not (target.is_dir() or logs or of_journals):
                    continue
                row = RebuiltDatabase(target, logs=len(logs))
                found = set(of_journals)
                damaged_before = len(findings.damage)
                for log in logs:
                    found |= read_log_ledgers(log, findings)
                    self._progress(_size(log))
                self._build_ledgers(row, found, facts, scoped, findings.damage[damaged_before:])

    def _build_ledgers(
        self,
        row: RebuiltDatabase,
        found: set[LedgerId],
        facts: dict[LedgerId, JournalFacts],
        scoped: bool,
        damage: list[DamagedFile],
    ) -> None:
        old, is_complete, flags = self._old_ledgers(row)
        found |= old.keys()
        if damage and not is_complete:
            # A ledger behind damage is in the old locations only. The bookie deletes locations of unknown ledgers.
            locations = RebuiltDatabase(row.path.with_name(row.path.name.replace(LEDGERS, LOCATIONS)))
            with DamagedLogs(damage) as damaged:
                found.update(ledger for ledger, *_ in self._old_locations(locations, damaged))
        kept: set[LedgerId] = set()
        with self._create(LedgersDatabase, row, scoped) as database:
            for ledger in sorted(found):
                known = self._ask(ledger, found)
                if known is not None and known.liveness is LedgerLiveness.DEAD:
                    row.left_out += 1
                    continue
                data, guessed = decide_ledger_data(
                    old.get(ledger), facts.get(ledger), known, old_is_complete=is_complete
                )
                row.ledgers += 1
                row.guessed_fences += guessed
                row.without_key += not data.master_key
                kept.add(ledger)
                if database is not None:
                    database.put(ledger, data)
            if flags is not None and database is not None:
                database.put_storage_flags(flags)
        self._ledgers[row.path] = kept

    def _old_ledgers(self, row: RebuiltDatabase) -> tuple[dict[LedgerId, LedgerData], bool, int | None]:
        """Return the ledgers of the old database, True if it is complete, and its storage flags."""
        old: dict[LedgerId, LedgerData] = {}
        flags: int | None = None
        try:
            with LedgersDatabase.open(row.path) as database:
                old.update(database.ledgers())
                flags = database.storage_flags()
        except NotFound:
            return old, False, None
        except Corrupt as error:
            self.result.findings.notes.append(f"{error}; {len(old)} of its ledgers were read")
            return old, False, flags
        row.ledgers_before = len(old)
        return old, True, flags

    def build_locations(self) -> None:
        for storage in self._storages:
            for scoped, prefix in _SCOPES:
                target = storage.index_dir / f"{prefix}{LOCATIONS}"
                logs = storage.logs(scoped=scoped)
                if scoped and not (target.is_dir() or logs):
                    continue
                self._build_locations(RebuiltDatabase(target, logs=len(logs)), logs, scoped)

    def _build_locations(self, row: RebuiltDatabase, logs: list[Path], scoped: bool) -> None:
        findings = self.result.findings
        chosen = _LedgerChoice(self._ledgers_to_index(row.path, scoped), self._ask, scoped=scoped)
        damaged_before = len(findings.damage)
        entries = 0
        with self._create(LocationsDatabase, row, scoped) as database:
            for log in logs:
                if self._metadata is not None:
                    self._ask_many(read_log_ledgers(log, RepairFindings()))
                for batch in read_log_entries(log, findings):
                    wanted = chosen.of_batch(batch)
                    entries += sum(1 for _ in wanted) if database is None else database.put_all(wanted)
                self._progress(_size(log))
            with DamagedLogs(findings.damage[damaged_before:]) as damaged:
                for ledger, entry_id, place in self._old_locations(row, damaged):
                    if not chosen.takes(ledger):
                        continue
                    if database is None or not database.get(ledger, entry_id):
                        row.entries_saved += 1
                        if database is not None:
                            database.put(ledger, entry_id, place)
            # Count copies of an entry in several logs as one.
            row.entries = entries + row.entries_saved if database is None else sum(map(len, database.batches()))
        row.ledgers, row.left_out = len(chosen.taken), len(chosen.refused)
        if chosen.unlisted:
            findings.notes.append(
                f"{len(chosen.unlisted)} ledgers of the metadata store are in logs of {row.path.parent} but not in its "
                "ledgers database: rebuild it too (--ledgers)"
            )

    def _ledgers_to_index(self, path: Path, scoped: bool) -> set[LedgerId] | None:
        """Return the ledgers of the new or old database beside `path`; None if neither is readable."""
        beside = path.with_name(f"{SCOPED_PREFIX if scoped else ''}{LEDGERS}")
        if beside in self._ledgers:
            return self._ledgers[beside]
        try:
            with LedgersDatabase.open(beside) as database:
                return {ledger for ledger, _ in database.ledgers()}
        except (NotFound, Corrupt) as error:
            self.result.findings.notes.append(
                f"{error}: the entries of every ledger in the logs are indexed, of deleted ledgers too"
            )
            return None

    def _old_locations(self, row: RebuiltDatabase, damaged: DamagedLogs) -> Iterator[tuple[LedgerId, int, int]]:
        """Yield the entries of the old database in damaged logs; count all its entries in `row`."""
        count = 0
        try:
            with LocationsDatabase.open(row.path) as database:
                if not damaged:
                    for batch in database.batches():
                        count += len(batch)
                else:
                    for entry in database.locations():
                        count += 1
                        if damaged.has(*entry):
                            yield entry
        except NotFound:
            return
        except Corrupt as error:
            self.result.findings.notes.append(str(error))
            return
        row.entries_before = count

    def _ask(self, ledger: LedgerId, batch: Iterable[LedgerId] = ()) -> LedgerFacts | None:
        if self._metadata is None:
            return None
        if ledger not in self._known:
            self._ask_many([ledger, *batch])
        return self._known[ledger]

    def _ask_many(self, ledgers: Iterable[LedgerId]) -> None:
        assert self._metadata is not None
        self._known.update(self._metadata(sorted({ledger for ledger in ledgers if ledger not in self._known})))

    def _create(self, kind: type[_D], row: RebuiltDatabase, scoped: bool) -> AbstractContextManager[_D | None]:
        """Return the new database to fill; None in a dry run."""
        self.result.databases.append(row)
        if self._dry_run:
            return nullcontext()
        building = prepare_building(row.path)
        self._built.append((row, building))
        return kind.create(building, scoped=scoped)

    def swap(self) -> None:
        stamp = time_stamp()
        while self._built:
            row, _ = self._built[0]
            row.backup = replace_directory(self._files, row.path, stamp)
            del self._built[0]
        self.result.swapped = True

    def clean_up(self) -> None:
        for _, building in self._built:
            shutil.rmtree(building, ignore_errors=True)


class _LedgerChoice:
    """Chooses ledgers whose entries are indexed: `listed` (None: all) and not dead. Asks once for each ledger."""

    def __init__(
        self, listed: set[LedgerId] | None, ask: Callable[[LedgerId], LedgerFacts | None], *, scoped: bool
    ) -> None:
        self._listed, self._ask, self._scoped = listed, ask, scoped
        self.taken: set[LedgerId] = set()
        self.refused: set[LedgerId] = set()
        #: Refused ledgers that the metadata store has.
        self.unlisted: set[LedgerId] = set()

    def takes(self, ledger: LedgerId) -> bool:
        """Return True if the ledger's entries are indexed."""
        if ledger in self.taken:
            return True
        if ledger in self.refused or ledger.is_scoped != self._scoped or not is_ledger(ledger):
            return False
        known = self._ask(ledger)
        is_listed = self._listed is None or ledger in self._listed
        if is_listed and (known is None or known.liveness is not LedgerLiveness.DEAD):
            self.taken.add(ledger)
            return True
        self.refused.add(ledger)
        if not is_listed and known is not None and known.liveness is LedgerLiveness.ALIVE:
            self.unlisted.add(ledger)
        return False

    def of_batch(self, batch: tuple[list[LedgerId], list[int], list[int]]) -> Iterable[tuple[LedgerId, int, int]]:
        """Return the entries of a log's batch that are indexed."""
        ledgers = set(batch[0])
        wanted = {ledger for ledger in ledgers if self.takes(ledger)}
        rows = zip(*batch, strict=True)
        return rows if len(wanted) == len(ledgers) else (row for row in rows if row[0] in wanted)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
