"""New databases for DbLedgerStorage, from its entry logs and journals: `locations` and `ledgers`, scoped ones too.

Apache's rebuild leaves every ledger fenced and without its master key; this one keeps the facts in the old database,
the journals and the metadata store. All databases are built first, in all directories, then all are swapped.
Source: LocationsIndexRebuildOp, LedgersIndexRebuildOp; BP-35.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from bkctl.disk import Files
from bkctl.errors import Corrupt, NotFound, UsageError
from bkctl.files.conversion import check_conversion
from bkctl.files.directories import BookieDirectories
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.index import LedgerData
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.ids import LedgerId
from bkctl.model import LedgerFactsLookup, LedgerLiveness
from bkctl.repair import index_contents
from bkctl.repair.layout import BookieLayout, Storage, prepare_building, replace_directory, time_stamp

LEDGERS: Final = "ledgers"
LOCATIONS: Final = "locations"
SCOPED_PREFIX: Final = "scoped-"
_D = TypeVar("_D", LedgersDatabase, LocationsDatabase)


@dataclass(slots=True)
class RebuiltDatabase:
    """One database at `path`: the numbers of the new one, and the backup of the old one (None: none, or not yet).

    `ledgers_before` and `entries_before` are of the old database, None if it is missing or damaged. `entries_saved` of
    the entries are behind damage in a log, or in a missing part: only the old database knows them. `guessed_fences`
    counts ledgers that are fenced because no source says otherwise, `without_key` ledgers whose master key is unknown.
    `left_out` counts ledgers of logs or journals that are not in the new database.
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


def rebuild(
    layout: BookieLayout,
    *,
    ledgers: bool,
    locations: bool,
    metadata: LedgerFactsLookup | None = None,
    dry_run: bool = False,
    files: Files | None = None,
    progress: index_contents.Progress = lambda _: None,
) -> Rebuild:
    """Rebuild the chosen databases in every directory. The caller holds the directories.

    Ledgers that are dead in the metadata store are dropped. Without a store, `locations` has the ledgers that the
    `ledgers` database has (as in Apache's), and `ledgers` every ledger found in a log or journal. Raises UsageError for
    directories of another storage class, Conflict where a conversion stopped in its last step, OSError and BkctlError;
    after an error nothing has changed.
    """
    for current in layout.index_dirs:
        check_conversion(current)
    storages = layout.storages()
    has_database = any((storage.index_dir / name).is_dir() for storage in storages for name in (LEDGERS, LOCATIONS))
    if not has_database and next(BookieDirectories(index_dirs=layout.index_dirs).indexes(), None) is not None:
        raise UsageError(
            f"{layout.index_dirs[0]} has index files but no database: its bookie does not use DbLedgerStorage",
            hint="'bkctl bookie index regenerate --all' rebuilds index files",
        )
    run = Rebuild(files or Files(), metadata, progress, dry_run, storages)
    try:
        if ledgers:
            run.build_ledgers(layout.journal_dirs)
        if locations:
            run.build_locations()
        if not dry_run:
            run.swap()
    finally:
        run.clean_up()
    return run


@dataclass
class Rebuild(index_contents.IndexRepair):
    """One rebuild, and its result: the databases, of which `_unswapped` are built and not yet swapped."""

    _storages: list[Storage]
    databases: list[RebuiltDatabase] = field(init=False, default_factory=list)
    _unswapped: list[RebuiltDatabase] = field(init=False, default_factory=list)
    #: The ledgers of the databases that were rebuilt, by path.
    _ledgers: dict[Path, set[LedgerId]] = field(init=False, default_factory=dict)

    def _targets(self, name: str) -> Iterator[tuple[Storage, bool, RebuiltDatabase, list[Path]]]:
        """Yield (storage, is scoped, database, logs) of every directory."""
        for storage in self._storages:
            for scoped, prefix in ((False, ""), (True, SCOPED_PREFIX)):
                logs = storage.logs(scoped=scoped)
                yield storage, scoped, RebuiltDatabase(storage.index_dir / f"{prefix}{name}", logs=len(logs)), logs

    def build_ledgers(self, journal_dirs: Collection[Path]) -> None:
        facts = index_contents.read_journals(journal_dirs, self.findings, self._progress)
        if not journal_dirs:
            self.findings.notes.append("No journal directory is given: facts that only journals have are missing")
        for storage, scoped, row, logs in self._targets(LEDGERS):
            found = {
                ledger
                for ledger in facts
                if ledger.is_scoped == scoped and ledger.value % len(self._storages) == storage.number
            }
            if scoped and not (row.path.is_dir() or logs or found):
                continue
            self._build_ledgers(row, found, facts, scoped, logs)

    def _build_ledgers(
        self,
        row: RebuiltDatabase,
        found: set[LedgerId],
        facts: dict[LedgerId, index_contents.JournalFacts],
        scoped: bool,
        logs: list[Path],
    ) -> None:
        old, is_complete, flags = self._old_ledgers(row)
        found |= old.keys()
        for log in logs:
            found |= index_contents.read_log_ledgers(log, self.findings, trusts_map=is_complete)
            self._progress(index_contents.size_of(log))
        if not is_complete:
            # A ledger in an unread part is in the old locations only. The bookie deletes locations of unknown ledgers.
            locations = RebuiltDatabase(row.path.with_name(row.path.name.replace(LEDGERS, LOCATIONS)))
            found.update(ledger for ledger, *_ in self.findings.unread(logs, self._old_locations(locations)))
        kept = self._ledgers[row.path] = set()
        self.ask(found)
        with self._create(LedgersDatabase, row, scoped) as database:
            for ledger in sorted(found):
                decided = index_contents.decide_ledger_data(
                    old.get(ledger), facts.get(ledger), self.known(ledger), old_is_complete=is_complete
                )
                if decided is None:
                    row.left_out += 1
                    continue
                data, guessed = decided
                row.ledgers += 1
                row.guessed_fences += guessed
                row.without_key += not data.master_key
                kept.add(ledger)
                if database is not None:
                    database.put(ledger, data)
            if flags is not None and database is not None:
                database.put_storage_flags(flags)

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
            self.findings.notes.append(f"{error}; {len(old)} of its ledgers were read")
            return old, False, flags
        row.ledgers_before = len(old)
        return old, True, flags

    def build_locations(self) -> None:
        for storage, scoped, row, logs in self._targets(LOCATIONS):
            if not scoped or row.path.is_dir() or logs:
                home = storage.ledger_dir / SCOPED_DIRECTORY if scoped else storage.ledger_dir
                self._build_locations(row, logs, home, scoped)

    def _build_locations(self, row: RebuiltDatabase, logs: list[Path], home: Path, scoped: bool) -> None:
        listed = self._ledgers_to_index(row.path, scoped)
        taken: dict[LedgerId, bool] = {}

        def is_(ledger: LedgerId, liveness: LedgerLiveness) -> bool:
            known = self.known(ledger)
            return known is not None and known.liveness is liveness

        def choose(ledgers: set[LedgerId]) -> set[LedgerId]:
            new = {
                ledger
                for ledger in ledgers - taken.keys()
                if ledger.is_scoped == scoped and index_contents.is_ledger(ledger)
            }
            self.ask(new)
            for ledger in new:
                taken[ledger] = (listed is None or ledger in listed) and not is_(ledger, LedgerLiveness.DEAD)
            return {ledger for ledger in ledgers if taken.get(ledger)}

        with self._create(LocationsDatabase, row, scoped) as database:
            target = index_contents.EntrySet() if database is None else database
            row.entries_saved = self.copy_entries(logs, home, target, choose, self._old_locations(row)).total()
            # Count copies of an entry in several logs as one.
            if isinstance(target, index_contents.EntrySet):
                row.entries = sum(count for count, _ in target.extents().values())
            else:
                row.entries = sum(map(len, target.batches()))
        row.ledgers = sum(taken.values())
        row.left_out = len(taken) - row.ledgers
        doubtful = set[LedgerId]() if listed is None else taken.keys() - listed
        unlisted = {ledger for ledger in doubtful if is_(ledger, LedgerLiveness.ALIVE)}
        if unlisted:
            self.findings.notes.append(
                f"{len(unlisted)} ledgers of the metadata store are in logs of {row.path.parent} but not in its "
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
            self.findings.notes.append(
                f"{error}: the entries of every ledger in the logs are indexed, of deleted ledgers too"
            )
            return None

    def _old_locations(self, row: RebuiltDatabase) -> Iterator[index_contents.IndexedEntry]:
        """Yield the entries of the old database; count them in `row`."""
        count = 0
        try:
            with LocationsDatabase.open(row.path) as database:
                for entry in database.locations():
                    count += 1
                    yield entry
        except NotFound:
            return
        except Corrupt as error:
            self.findings.notes.append(str(error))
            return
        row.entries_before = count

    def _create(self, kind: type[_D], row: RebuiltDatabase, scoped: bool) -> AbstractContextManager[_D | None]:
        """Return the new database to fill; None in a dry run."""
        self.databases.append(row)
        if self.dry_run:
            return nullcontext()
        self._unswapped.append(row)
        return kind.create(prepare_building(row.path), scoped=scoped)

    def swap(self) -> None:
        stamp = time_stamp()
        while self._unswapped:
            row = self._unswapped[0]
            row.backup = replace_directory(self._files, row.path, stamp)
            del self._unswapped[0]

    def clean_up(self) -> None:
        """Remove the databases that were not swapped."""
        for row in self._unswapped:
            prepare_building(row.path)
