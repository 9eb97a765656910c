"""The indexes of a bookie, read as rows of locations: from index files, or from the databases of DbLedgerStorage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.checks.findings import Counts, Finding, FindingKind
from bkctl.checks.indexed_logs import IndexedLogs
from bkctl.checks.location_rows import LocationRows, choose_sample
from bkctl.errors import BkctlError, NotFound
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, IndexDatabases, LedgerIndexReader
from bkctl.files.rocksdb import LocationsDatabase
from bkctl.formats.index import SLOT_SIZE, read_location, read_location_key
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from bkctl.checks.location_rows import Column

#: Items of a database that are parsed together.
BATCH_ITEMS: Final = 1 << 17


class EntrySelection:
    """The ledgers and the share of their entries that a check looks at.

    `ledgers` None: all; `scope_id` None: every scope; `sample` None: every entry, else a share from 0 to 1.
    """

    def __init__(
        self, ledgers: Collection[LedgerId] | None, scope_id: int | None, sample: float | None, seed: int
    ) -> None:
        self.ledgers = None if ledgers is None else frozenset(ledgers)
        self.scope_id, self.sample, self.seed = scope_id, sample, seed

    def __contains__(self, ledger: LedgerId) -> bool:
        return (self.ledgers is None or ledger in self.ledgers) and self.scope_id in (None, ledger.scope_id)

    @property
    def has_all_ledgers(self) -> bool:
        """Return True if no ledger is left out."""
        return self.ledgers is None and self.scope_id is None


class IndexRowsReader:
    """Reads indexes into rows. Errors of single indexes are noted in `counts`."""

    def __init__(self, directories: BookieDirectories, selection: EntrySelection, counts: Counts) -> None:
        self._directories, self._selection, self._counts = directories, selection, counts

    def read(self, indexes: BookieIndexes, logs: IndexedLogs, rows: LocationRows) -> Iterator[Finding]:
        """Add the locations of the index of `logs` to `rows`; yield the contradictions within the index."""
        if logs.databases is not None:
            return self._read_databases(logs.databases, rows)
        return self._read_index_files(indexes, rows, scoped=logs.scoped)

    def _read_index_files(self, indexes: BookieIndexes, rows: LocationRows, *, scoped: bool) -> Iterator[Finding]:
        seen: dict[LedgerId, Path] = {}
        for file in indexes.files():
            ledger = file.id
            if not isinstance(ledger, LedgerId) or ledger.is_scoped != scoped:
                continue
            if ledger not in self._selection:
                continue
            first = seen.setdefault(ledger, file.path)
            if first != file.path:
                reason = f"the ledger also has the index {first}, which a bookie uses: this index was not checked"
                yield Finding(FindingKind.TWICE, ledger, None, None, file.path, reason)
                continue
            try:
                self._read_index_file(ledger, file.path, rows)
            except NotFound:
                continue
            except BkctlError as error:
                self._counts.note_error(error)

    def _read_index_file(self, ledger: LedgerId, path: Path, rows: LocationRows) -> None:
        import numpy as np

        number = rows.numbers.number(ledger)
        with LedgerIndexReader.open(path) as reader:
            for first, page in reader.pages():
                locations = np.frombuffer(page, np.uint64)
                (present,) = np.nonzero(locations)
                if len(present):
                    entries = present.astype(np.uint64) + np.uint64(first)
                    self._add(rows, ledger, number, locations[present], entries)

    def _add(self, rows: LocationRows, ledger: LedgerId, number: int, locations: Column, entries: Column) -> None:
        import numpy as np

        selection = self._selection
        if selection.sample is not None:
            chosen = choose_sample(ledger, entries, selection.sample, selection.seed)
            locations, entries = locations[chosen], entries[chosen]
        rows.add(locations, entries, np.full(len(entries), number, np.uint64))

    def _read_databases(self, pair: IndexDatabases, rows: LocationRows) -> Iterator[Finding]:
        try:
            for ledger, _ in pair.ledgers.ledgers():
                if ledger in self._selection:
                    rows.numbers.number(ledger)
        except BkctlError as error:
            self._counts.note_error(error)
            return
        without_ledger: dict[LedgerId, int] = {}
        try:
            for ledger, locations, entries in self._location_groups(pair.locations):
                number = rows.numbers.find(ledger)
                if number is not None:
                    self._add(rows, ledger, number, locations, entries)
                elif ledger in self._selection:
                    without_ledger[ledger] = without_ledger.get(ledger, 0) + len(entries)
        except BkctlError as error:
            self._counts.note_error(error)
        if without_ledger:
            yield from self._without_ledger(without_ledger, pair.locations.path)

    def _location_groups(self, database: LocationsDatabase) -> Iterator[tuple[LedgerId, Column, Column]]:
        """Yield (ledger, locations, entry ids), ledger by ledger; a large ledger in several parts."""
        import numpy as np

        width = 3 if database.scoped else 2
        for batch in self._location_batches(database):
            keys, values = zip(*batch, strict=True)
            if set(map(len, keys)) != {8 * width} or set(map(len, values)) != {SLOT_SIZE}:
                for key, value in batch:
                    read_location_key(key, str(database.path), scoped=database.scoped)
                    read_location(value, str(database.path))
            table = np.frombuffer(b"".join(keys), ">u8").reshape(-1, width).astype(np.uint64)
            locations = np.frombuffer(b"".join(values), ">u8").astype(np.uint64)
            changes = np.any(table[1:, :-1] != table[:-1, :-1], axis=1)
            starts = [0, *(np.nonzero(changes)[0] + 1).tolist(), len(table)]
            for begin, end in pairwise(starts):
                ledger = LedgerId(int(table[begin, 0]) if width == 3 else 0, int(table[begin, -2]))
                yield ledger, locations[begin:end], table[begin:end, -1]

    def _location_batches(self, database: LocationsDatabase) -> Iterator[list[tuple[bytes, bytes]]]:
        if self._selection.ledgers is None:
            yield from database.batches(count=BATCH_ITEMS)
            return
        for ledger in sorted(self._selection.ledgers):
            if ledger.is_scoped == database.scoped:
                yield from database.batches_of(ledger, count=BATCH_ITEMS)

    def _without_ledger(self, counts: dict[LedgerId, int], path: Path) -> Iterator[Finding]:
        """Yield a note for each ledger whose locations still have no ledger.

        A running bookie writes locations before their ledger, so the databases are opened once more.
        """
        with BookieIndexes(self._directories) as now:
            pairs = [pair for pair in now.databases() if pair.locations.path == path]
            left = {
                ledger: count
                for ledger, count in counts.items()
                for pair in pairs
                if pair.ledgers.get(ledger) is None and pair.locations.last_entry_id(ledger) >= 0
            }
        for ledger, count in left.items():
            reason = f"{count:,} locations of a ledger that is not in the ledgers database: probably deleted"
            yield Finding(FindingKind.NO_LEDGER, ledger, None, None, path, reason)
