"""A check of a bookie's indexes alone: every key, value, header and slot must have a form that a bookie writes.

Source: LedgersIndexCheckOp (which reads the ledgers database alone).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final

from bkctl.checks.findings import Counts, FindDeleted, Finding, FindingKind, unindexed_findings
from bkctl.checks.recheck import Recheck
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported
from bkctl.files.conversion import check_conversion
from bkctl.files.directories import BookieDirectories, FileKind, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes, IndexDatabases, LedgerIndexReader, first_files, still_without_ledger
from bkctl.files.listing import log_contents
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase, check_write_ahead_logs
from bkctl.formats.entry import read_lac_header
from bkctl.formats.entry_log import HEADER_SIZE as LOG_HEADER_SIZE
from bkctl.formats.index import (
    NEEDS_INTEGRITY_CHECK,
    STORAGE_FLAGS_KEY,
    LedgerData,
    read_ledger_key,
    read_location,
    read_location_key,
    read_storage_flags,
)
from bkctl.ids import U64_MAX, LedgerId

#: No entry begins before this byte of a log.
FIRST_OFFSET: Final = LOG_HEADER_SIZE + 4
#: Yields findings; returns the ledgers of a pair of databases, None if they are unknown.
Scan = Generator[Finding, None, set[LedgerId] | None]


@dataclass(eq=False)
class IndexScan:
    """Reads every key, value, header and slot of a bookie's indexes; `counts` has the numbers.

    RocksDB verifies the checksum of each block that is read. `ledgers` and `locations` choose the halves to read.
    `is_complete`: `directories` are all of the bookie, in the order of its settings, which tells each ledger's place.
    """

    directories: BookieDirectories
    _: KW_ONLY
    ledgers: bool = True
    locations: bool = True
    is_complete: bool = False
    find_deleted: FindDeleted | None = None
    counts: Counts = field(init=False, default_factory=Counts)

    def findings(self) -> Iterator[Finding]:
        """Yield the invalid items, index by index. Call it once. An unreadable index is noted in `counts.errors`.

        Raises NotFound for a missing directory, Conflict where a conversion stopped in its last step, Corrupt for its
        progress file.
        """
        return self.counts.watch(self._findings())

    def _findings(self) -> Iterator[Finding]:
        for directory in self.directories.index_dirs:
            check_conversion(current_of(directory))
        with BookieIndexes(self.directories) as indexes:
            yield from self._scan_files(indexes)
            pairs = indexes.databases()
            for error in indexes.problems:
                self.counts.note_error(error)
            for pair in pairs:
                yield from self._scan_pair(pair)
            if self.find_deleted is not None and self.ledgers and not indexes.problems:
                yield from self._ledgers_without_index(self.find_deleted)

    def _ledgers_without_index(self, find_deleted: FindDeleted) -> Iterator[Finding]:
        """Yield the ledgers in entry logs (by their maps, else their records) of which no index has an entry."""
        found: dict[LedgerId, tuple[Path, str]] = {}
        for file in self.directories.entry_logs():
            sizes: dict[LedgerId, int] = {}
            try:
                with EntryLogReader.open(file.path) as reader:
                    sizes, _, is_complete, error = log_contents(reader)
            except NotFound:
                continue
            except BkctlError as failure:
                is_complete, error = False, failure
            if not is_complete:
                reason = f"ledgers that are only behind the damage were not looked for: {error}"
                yield Finding(FindingKind.LOG_DAMAGED, file.path, reason)
            for ledger, size in sizes.items():
                if ledger not in found:
                    found[ledger] = file.path, f"{size:,} bytes"
        recheck = Recheck(self.directories, self.counts, None)
        logs = {ledger: path for ledger, (path, _) in found.items()}
        unindexed = {ledger: found[ledger] for ledger in recheck.ledgers_without_index(logs)}
        yield from unindexed_findings(unindexed, find_deleted)

    # --- index files --------------------------------------------------------------------------------------------

    def _scan_files(self, indexes: BookieIndexes) -> Iterator[Finding]:
        for ledger, file, first in first_files(indexes):
            if file.kind is FileKind.RELOCATION:
                reason = "a relocation was not finished; a bookie's start renames the file"
                yield Finding(FindingKind.RELOCATION, file.path, reason, ledger)
            if first != file.path:
                yield Finding(FindingKind.TWICE, file.path, f"the ledger also has the index {first}", ledger)
            with self.counts.noting():
                yield from self._scan_file(ledger, file.path)

    def _scan_file(self, ledger: LedgerId, path: Path) -> Iterator[Finding]:
        with LedgerIndexReader.open(path) as reader:
            self.counts.ledgers += 1
            header = reader.header
            self.counts.fenced_ledgers += header.fenced
            if self.ledgers:
                yield from _check_ledger_facts(ledger, path, header.master_key, header.explicit_lac)
            if not self.locations:
                return
            entries = 0
            for first, page in reader.pages():
                entries += len(page) - page.count(0)
                for entry_id, location in enumerate(page, first):
                    if location and (location < 0 or location & 0xFFFFFFFF < FIRST_OFFSET):
                        yield _bad_location(ledger, entry_id, location, path)
            self.counts.entries += entries
            self.counts.empty_ledgers += not entries

    # --- databases ----------------------------------------------------------------------------------------------

    def _scan_pair(self, pair: IndexDatabases) -> Iterator[Finding]:
        known: set[LedgerId] | None = None
        if self.ledgers:
            known = yield from self._scan_database(pair.ledgers, self._scan_ledgers(pair.ledgers))
        if self.locations:
            yield from self._scan_database(pair.locations, self._scan_locations(pair.locations, known))

    def _scan_database(self, database: LedgersDatabase | LocationsDatabase, items: Scan) -> Scan:
        """Yield the findings of `items` and then stray tables; return what `items` returns, None if damaged."""
        known: set[LedgerId] | None = None
        with self.counts.noting():
            known = yield from items
        for damage in check_write_ahead_logs(database.path):
            self.counts.note_error(damage)
        for path in database.stray_tables():
            reason = "a table that the MANIFEST does not name: a running bookie deletes it, or the MANIFEST lost it"
            yield Finding(FindingKind.STRAY_TABLE, path, reason)
        return known

    def _scan_ledgers(self, database: LedgersDatabase) -> Scan:
        """Return the ledgers."""
        path, name = database.path, str(database.path)
        known: set[LedgerId] = set()
        last: LedgerId | None = None
        homes = [*map(current_of, self.directories.index_dirs)] if self.is_complete else [path.parent]
        misplaced, count = None, 0
        for key, value in database.items():
            try:
                ledger = read_ledger_key(key, name, scoped=database.scoped)
                data = None if ledger is None else LedgerData.parse(value, f"ledger {ledger} in {path}")
                if key == STORAGE_FLAGS_KEY and read_storage_flags(value, name) & NEEDS_INTEGRITY_CHECK:
                    reason = "the bookie must check its integrity before it says that it lacks something"
                    yield Finding(FindingKind.NEEDS_CHECK, path, reason)
            except Corrupt as error:
                yield Finding(FindingKind.BAD_ITEM, path, str(error))
                continue
            if ledger is None or data is None:
                if key != STORAGE_FLAGS_KEY:
                    reason = f"not the key of a ledger: {key.hex()}"
                    yield Finding(FindingKind.BAD_ITEM, path, reason)
                continue
            if ledger == last:
                reason = "the ledger has a key of 8 and one of 16 bytes; a bookie takes the second"
                yield Finding(FindingKind.TWICE, path, reason, ledger)
            else:
                self.counts.ledgers += 1
                self.counts.fenced_ledgers += data.fenced
                if homes[ledger.value % len(homes)] != path.parent:
                    misplaced, count = ledger, count + 1
            last = ledger
            known.add(ledger)
            yield from _check_ledger_facts(ledger, path, data.master_key, data.explicit_lac)
        if misplaced is not None:
            home = homes[misplaced.value % len(homes)]
            reason = f"the bookie looks for the ledger in {home}; ledgers here that it does not find: {count:,}"
            yield Finding(FindingKind.WRONG_DIRECTORY, path, reason, misplaced)
        return known

    def _scan_locations(self, database: LocationsDatabase, known: set[LedgerId] | None) -> Scan:
        path, name = database.path, str(database.path)
        last: LedgerId | None = None
        with_entries = 0
        for key, value in database.items():
            try:
                ledger, entry_id = read_location_key(key, name, scoped=database.scoped)
                location = read_location(value, name)
            except Corrupt as error:
                yield Finding(FindingKind.BAD_ITEM, path, str(error))
                continue
            self.counts.entries += 1
            if location <= 0 or location & 0xFFFFFFFF < FIRST_OFFSET:
                yield _bad_location(ledger, entry_id, location, path)
            if ledger != last:
                last = ledger
                if known is None or ledger in known:
                    with_entries += 1
                elif still_without_ledger(self.directories, path, [ledger]):
                    reason = "locations of a ledger that is not in the ledgers database: probably deleted"
                    yield Finding(FindingKind.NO_LEDGER, path, reason, ledger)
        if known is not None:
            self.counts.empty_ledgers += len(known) - with_entries
        return known


def _check_ledger_facts(
    ledger: LedgerId, path: Path, master_key: bytes, explicit_lac: bytes | None
) -> Iterator[Finding]:
    if not master_key.strip(b"\0"):
        reason = "the ledger has no master key: the bookie accepts the key of the next writer"
        yield Finding(FindingKind.NO_MASTER_KEY, path, reason, ledger)
    if explicit_lac is not None:
        try:
            header = read_lac_header(explicit_lac)
        except (Corrupt, Unsupported) as error:
            yield Finding(FindingKind.BAD_ITEM, path, f"explicit LAC: {error}", ledger)
        else:
            if header.ledger != ledger:
                reason = f"the explicit LAC is that of ledger {header.ledger}"
                yield Finding(FindingKind.BAD_ITEM, path, reason, ledger)


def _bad_location(ledger: LedgerId, entry_id: int, location: int, path: Path) -> Finding:
    reason = f"no entry can be at location {location:#x}"
    return Finding(FindingKind.BAD_ITEM, path, reason, ledger, entry_id, location & U64_MAX)
