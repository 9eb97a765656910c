"""The indexes of a bookie as rows of locations, sorted in bounded memory.

The rows come from index files, or from the databases of DbLedgerStorage. A check reads them beside the logs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack
from itertools import pairwise
from tempfile import TemporaryFile
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bkctl.checks.findings import Counts, Finding, FindingKind
from bkctl.checks.recheck import IndexedLogs
from bkctl.disk import Closing
from bkctl.errors import BkctlError
from bkctl.files.directories import BookieDirectories
from bkctl.files.index import BookieIndexes, IndexDatabases, LedgerIndexReader, first_files, still_without_ledger
from bkctl.files.rocksdb import LocationsDatabase
from bkctl.formats.index import SLOT_SIZE, read_location, read_location_key
from bkctl.ids import U64_MAX, LedgerId

Column = NDArray[np.uint64]
Columns = tuple[Column, Column, Column]

#: Rows that are sorted together in memory; a larger index is sorted run by run in a temporary file.
RUN_ROWS: Final = 1 << 20
#: Items of a database that are parsed together.
BATCH_ITEMS: Final = 1 << 17


# --- rows ---


class LedgerNumbers(dict[LedgerId, int]):
    """The number of each ledger in rows: its index in `ledgers`."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers: list[LedgerId] = []

    def number(self, ledger: LedgerId) -> int:
        """Return the ledger's number; assign the next number to a new ledger."""
        number = self.setdefault(ledger, len(self.ledgers))
        if number == len(self.ledgers):
            self.ledgers.append(ledger)
        return number


class LocationRows(Closing):
    """Rows (location, entry id, ledger number), added in any order and read in the order of their locations.

    Rows are sorted in memory, RUN_ROWS at a time. Full runs are stored in a temporary file. Use as a context manager.
    """

    def __init__(self) -> None:
        self.numbers = LedgerNumbers()
        self.count = 0
        self._chunks: list[Columns] = []
        self._chunked = 0
        self._runs: list[Columns] = []
        self._stack = ExitStack()
        self._file: Any = None

    def close(self) -> None:
        self._runs.clear()
        self._stack.close()

    def add(self, locations: Column, entries: Column, numbers: Column) -> None:
        """Add rows: three columns of one length."""
        self._chunks.append((locations, entries, numbers))
        self._chunked += len(locations)
        self.count += len(locations)
        if self._chunked >= RUN_ROWS:
            self._sort(to_file=True)

    def _sort(self, *, to_file: bool) -> None:
        if not self._chunks:
            return
        columns = [np.concatenate(column) for column in zip(*self._chunks, strict=True)]
        self._chunks, self._chunked = [], 0
        order = np.argsort(columns[0], kind="stable")
        columns = [column[order] for column in columns]
        if to_file:
            if self._file is None:
                self._file = self._stack.enter_context(TemporaryFile(prefix="bkctl-check-"))  # noqa: SIM115 (closed by the stack)
            columns = [self._write(column) for column in columns]
        self._runs.append((columns[0], columns[1], columns[2]))

    def _write(self, column: Column) -> Column:
        at = self._file.seek(0, 2)
        self._file.write(column.data)
        self._file.flush()
        return np.memmap(self._file, np.uint64, "r", at, column.shape)

    def windows(self, first: int, last: int) -> Iterator[Columns]:
        """Yield the rows with locations `first` to `last`, both included, in order: up to RUN_ROWS or so at a time."""
        if last < first:
            return
        self._sort(to_file=False)
        begins = [int(np.searchsorted(run[0], np.uint64(first))) for run in self._runs]
        ends = [int(np.searchsorted(run[0], np.uint64(last), "right")) for run in self._runs]
        share = max(1, RUN_ROWS // max(1, len(self._runs)))
        while any(begin < end for begin, end in zip(begins, ends, strict=True)):
            # Take the rows up to the lowest location at which the share of any run ends.
            spans = list(zip(self._runs, begins, ends, strict=True))
            share_ends = (int(run[0][begin + share - 1]) for run, begin, end in spans if begin + share < end)
            limit = np.uint64(min(share_ends, default=last))
            stops = [max(begin, min(end, int(np.searchsorted(run[0], limit, "right")))) for run, begin, end in spans]
            parts = [
                tuple(column[begin:stop] for column in run)
                for run, begin, stop in zip(self._runs, begins, stops, strict=True)
                if stop > begin
            ]
            begins = stops
            if len(parts) == 1:
                yield parts[0][0], parts[0][1], parts[0][2]
            elif parts:
                locations, entries, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
                order = np.argsort(locations, kind="stable")
                yield locations[order], entries[order], numbers[order]


def choose_sample(ledger: LedgerId, entries: Column, share: float, seed: int) -> Any:
    """Return a bool for each entry, True if it is in the sample. The same seed chooses the same entries."""
    mixed = (ledger.value ^ ledger.scope_id ^ seed * 0x9E3779B97F4A7C15) & U64_MAX
    with np.errstate(over="ignore"):
        # splitmix64 chooses neighbouring entries independently of each other.
        value = entries * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mixed)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        value = value ^ value >> np.uint64(31)
    return value < np.uint64(min(int(share * 2.0**64), U64_MAX))


# --- indexes ---


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
        for ledger, file, first in first_files(indexes):
            if ledger.is_scoped != scoped or ledger not in self._selection:
                continue
            if first != file.path:
                reason = f"the ledger also has the index {first}, which a bookie uses: this index was not checked"
                yield Finding(FindingKind.TWICE, file.path, reason, ledger)
                continue
            number = rows.numbers.number(ledger)
            with self._counts.noting(), LedgerIndexReader.open(file.path) as reader:
                for start, page in reader.pages():
                    locations = np.frombuffer(page, np.uint64)
                    (present,) = np.nonzero(locations)
                    if len(present):
                        entries = present.astype(np.uint64) + np.uint64(start)
                        self._add(rows, ledger, number, locations[present], entries)

    def _add(self, rows: LocationRows, ledger: LedgerId, number: int, locations: Column, entries: Column) -> None:
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
        counts: dict[LedgerId, int] = {}
        with self._counts.noting():
            for ledger, locations, entries in self._location_groups(pair.locations):
                number = rows.numbers.get(ledger)
                if number is not None:
                    self._add(rows, ledger, number, locations, entries)
                elif ledger in self._selection:
                    counts[ledger] = counts.get(ledger, 0) + len(entries)
        path = pair.locations.path
        for ledger in still_without_ledger(self._directories, path, counts) if counts else ():
            reason = f"{counts[ledger]:,} locations of a ledger that is not in the ledgers database: probably deleted"
            yield Finding(FindingKind.NO_LEDGER, path, reason, ledger)

    def _location_groups(self, database: LocationsDatabase) -> Iterator[tuple[LedgerId, Column, Column]]:
        """Yield (ledger, locations, entry ids), ledger by ledger; a large ledger in several parts."""
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
