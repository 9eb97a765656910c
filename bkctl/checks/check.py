"""A check of a bookie's indexes against its entry logs, both ways, for every storage class.

Each entry of an index must point at the record of that entry. Each record of a log must be in the index of its ledger,
if the ledger has one. The check reads the index first, as rows of locations sorted in bounded memory
(`index_rows`), then each log once, front to back, window by window beside the rows that point into it.

A running bookie adds, compacts and deletes meanwhile. So a contradiction is confirmed in the index as it is then, and
entries that a restart would replay from the journals do not count (`recheck`).

Source: InterleavedLedgerStorage.localConsistencyCheck; DbLedgerStorage has none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from bkctl.checks.digests import DigestChecker
from bkctl.checks.findings import Counts, FindDeleted, Finding, FindingKind, unindexed_findings
from bkctl.checks.index_rows import Columns, EntrySelection, IndexRowsReader, LedgerNumbers, LocationRows
from bkctl.checks.recheck import EntryKey, IndexedLogs, Recheck, RecordLookup, digest_reason, list_indexed_logs
from bkctl.columns import counted
from bkctl.errors import BkctlError, NotFound
from bkctl.files.conversion import check_conversion
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry_log import log_id_of, pack_location
from bkctl.formats.record import RecordType
from bkctl.ids import U64_MAX, LedgerId
from bkctl.pace import Pace

#: Records of a log that are compared with the index together.
WINDOW_RECORDS: Final = 1 << 17
#: The number of a ledger that the index does not have: it matches no row.
_UNKNOWN_LEDGER: Final = U64_MAX


class LogWindow:
    """Consecutive entries of a log, as columns; `mismatched` are the locations of entries that fail their digest."""

    def __init__(self, base: int, numbers: LedgerNumbers) -> None:
        self._base, self._numbers = base, numbers
        self.locations: list[int] = []
        self.entries: list[int] = []
        self.sizes: list[int] = []
        self.ledgers: list[LedgerId] = []
        self.mismatched: list[int] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self.locations)

    def add(self, batch: RecordBatch, digests: DigestChecker | None, where: str) -> None:
        """Add a batch of records of the file `where`; skip a record that is not a whole entry."""
        record = batch.record
        if record is not None and (record.type is not RecordType.ENTRY or record.last_add_confirmed is None):
            return
        start = self._base + 4
        self.locations.extend([start + offset for offset in batch.offsets])
        self.entries.extend(batch.entry_ids)
        self.sizes.extend(batch.sizes)
        self.ledgers.extend(batch.ledgers)
        self.size_bytes += sum(batch.sizes) + 4 * len(batch)
        if digests is not None:
            self.mismatched.extend(start + mismatch.offset for mismatch in digests.check_batch(batch, where))

    def columns(self) -> Columns:
        """Return locations, entry ids and ledger numbers."""
        numbers = {ledger: self._numbers.get(ledger, _UNKNOWN_LEDGER) for ledger in set(self.ledgers)}
        numbered = np.array([numbers[ledger] for ledger in self.ledgers], np.uint64)
        return np.array(self.locations, np.uint64), np.array(self.entries, np.uint64), numbered


@dataclass
class _UnindexedLedger:
    """The entries of a ledger without an index, and the first log that has some."""

    path: Path
    entries: int = 0
    size_bytes: int = 0


class IndexCheck:
    """One check of a bookie's indexes against its entry logs; `counts` has the numbers. Needs NumPy.

    `ledgers` and `scope_id` choose the ledgers. `sample` is a share of the entries from 0 to 1, the same entries for
    the same `seed`; with it the logs are not searched for entries without an index. `digests` checks each entry's body.
    `pace` bounds the bytes and entries read. `advance` is called with each number of bytes read.
    """

    def __init__(
        self,
        directories: BookieDirectories,
        *,
        ledgers: Collection[LedgerId] | None = None,
        scope_id: int | None = None,
        sample: float | None = None,
        seed: int = 0,
        digests: DigestChecker | None = None,
        pace: Pace | None = None,
        advance: Callable[[int], None] | None = None,
        find_deleted: FindDeleted | None = None,
    ) -> None:
        self.counts = Counts()
        #: The chosen ledgers that neither an index nor a searched log has, once all findings were yielded.
        self.missing: set[LedgerId] = set(ledgers or ())
        self._directories = directories
        self._selection = EntrySelection(ledgers, scope_id, sample, seed)
        self._digests = digests
        self._pace = pace or Pace()
        self._advance = advance or (lambda _: None)
        self._recheck = Recheck(directories, self.counts, digests)
        self._find_deleted = find_deleted
        self._unindexed: dict[LedgerId, _UnindexedLedger] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield the contradictions, log by log, then notes. Call it once.

        An index that cannot be read is noted in `counts.errors`; the check continues with the others. Raises NotFound
        for a missing directory, Conflict where a conversion stopped in its last step, Corrupt for its
        progress file, UsageError if it is unclear which directories belong together.
        """
        return self.counts.watch(self._findings())

    def _findings(self) -> Iterator[Finding]:
        for directory in self._directories.index_dirs:
            check_conversion(current_of(directory))
        with BookieIndexes(self._directories) as indexes:
            for logs in list_indexed_logs(self._directories, indexes, self.counts):
                with LocationRows() as rows:
                    reader = IndexRowsReader(self._directories, self._selection, self.counts)
                    yield from reader.read(indexes, logs, rows)
                    self.counts.ledgers += len(rows.numbers.ledgers)
                    self.counts.entries += rows.count
                    yield from self._check_logs(logs, rows)
                    self.missing.difference_update(rows.numbers.ledgers)
            # Of entries that precede the entry which revealed their ledger's digest type.
            for mismatch in () if self._digests is None else self._digests.late_findings():
                if mismatch.ledger in self._selection:
                    path = Path(mismatch.where)
                    location = pack_location(log_id_of(path.name) or 0, mismatch.offset + 4)
                    reason = digest_reason(mismatch)
                    yield Finding(FindingKind.DIGEST, path, reason, mismatch.ledger, mismatch.entry_id, location)
        yield from self._unindexed_ledgers()

    def _unindexed_ledgers(self) -> Iterator[Finding]:
        if not self._unindexed:
            return
        ledgers: dict[LedgerId, tuple[Path, str]] = {}
        for ledger in self._recheck.ledgers_without_index(
            {each: found.path for each, found in self._unindexed.items()}
        ):
            found = self._unindexed[ledger]
            ledgers[ledger] = found.path, f"{found.entries:,} entries ({found.size_bytes:,} bytes)"
        self.missing.difference_update(self._unindexed)
        yield from unindexed_findings(ledgers, self._find_deleted)

    def _check_logs(self, logs: IndexedLogs, rows: LocationRows) -> Iterator[Finding]:
        is_sample = self._selection.sample is not None
        at = 0
        for log_id, path in sorted(logs.paths().items()):
            searched = path.parent in logs.searched and not is_sample
            first, end = pack_location(log_id, 0), pack_location(log_id + 1, 0)
            # Rows between two logs point at a missing log; damage can make up any number of log ids.
            yield from self._recheck_rows(logs, rows.windows(at, first - 1), rows.numbers)
            at = end
            if not searched and next(rows.windows(first, end - 1), None) is None:
                continue
            self.counts.logs += 1
            if is_sample or not self._may_have_selected(path):
                doubtful = self._doubtful_entries(logs, rows.windows(first, end - 1), rows.numbers)
                yield from self._recheck.entries(logs, doubtful)
            else:
                yield from self._check_whole(logs, log_id, path, rows)
        yield from self._recheck_rows(logs, rows.windows(at, U64_MAX), rows.numbers)

    def _may_have_selected(self, path: Path) -> bool:
        """Return False if the ledgers map of the log shows that it has no selected ledger."""
        if self._selection.ledgers is None and self._selection.scope_id is None:
            return True
        try:
            with EntryLogReader.open(path) as reader:
                sizes = reader.ledgers_map()
        except BkctlError:
            return True
        return sizes is None or any(ledger in self._selection for ledger in sizes)

    def _doubtful_entries(
        self, logs: IndexedLogs, windows: Iterable[Columns], numbers: LedgerNumbers
    ) -> Iterator[EntryKey]:
        """Yield the entries whose record is wrong. Only the records of rows are read, in the order of the file."""
        with RecordLookup(logs, self._digests) as records:
            for columns in windows:
                for location, entry_id, number in zip(*(column.tolist() for column in columns), strict=True):
                    ledger = numbers.ledgers[number]
                    problem, size = records.check(ledger, entry_id, location)
                    self._count_read(size, 1)
                    if problem is not None:
                        yield ledger, entry_id

    def _check_whole(self, logs: IndexedLogs, log_id: int, path: Path, rows: LocationRows) -> Iterator[Finding]:
        """Read the log once, window by window, beside the rows of the index that point into it."""
        base = at = pack_location(log_id, 0)
        window = LogWindow(base, rows.numbers)
        damage: BkctlError | None = None
        good_end = 0
        try:
            with EntryLogReader.open(path) as reader, BookieIndexes(self._directories) as indexes:
                reader.is_indexed = partial(indexes.points_to, log_id)
                try:
                    for batch in reader.batches():
                        window.add(batch, self._digests, str(path))
                        if len(window) >= WINDOW_RECORDS:
                            yield from self._compare(logs, path, window, rows, at)
                            at = window.locations[-1] + 1
                            window = LogWindow(base, rows.numbers)
                finally:
                    good_end = reader.position
        except NotFound:
            pass  # The bookie has just compacted the log; rows that pointed there are looked up again.
        except BkctlError as error:
            damage = error
        if len(window):
            yield from self._compare(logs, path, window, rows, at)
            at = window.locations[-1] + 1
        rest = self._recheck_rows(logs, rows.windows(at, pack_location(log_id + 1, 0) - 1), rows.numbers)
        if damage is not None and os.path.lexists(path):
            rest = _merge_damage(damage, path, good_end, rest)
        yield from rest

    def _compare(
        self, logs: IndexedLogs, path: Path, window: LogWindow, rows: LocationRows, first: int
    ) -> Iterator[Finding]:
        """Compare a window with the rows from location `first` on, both ways."""
        self._count_read(window.size_bytes, len(window))
        self.counts.records += len(window)
        locations, entries, numbers = window.columns()
        is_indexed = np.zeros(len(locations), bool)
        for expected, expected_entries, expected_numbers in rows.windows(first, window.locations[-1]):
            places = np.searchsorted(locations, expected)
            places[places == len(locations)] = 0
            fits = (
                (locations[places] == expected)
                & (entries[places] == expected_entries)
                & (numbers[places] == expected_numbers)
            )
            is_indexed[places[fits]] = True
            if window.mismatched:
                fits &= ~np.isin(expected, np.array(window.mismatched, np.uint64))
            if not fits.all():
                wrong = ~fits
                part = expected[wrong], expected_entries[wrong], expected_numbers[wrong]
                yield from self._recheck_rows(logs, [part], rows.numbers)
        if path.parent in logs.searched and not is_indexed.all():
            records = self._unindexed_records(path, window, ~is_indexed, rows.numbers)
            yield from self._recheck.unindexed_records(path, records)

    def _unindexed_records(
        self, path: Path, window: LogWindow, missing: Any, numbers: LedgerNumbers
    ) -> Iterator[tuple[EntryKey, int]]:
        """Yield (entry, location) of the `missing` records: old copies, or entries that no read finds.

        Records of ledgers without an index are counted instead: their ledgers were probably deleted.
        """
        for at in np.nonzero(missing)[0].tolist():
            ledger = window.ledgers[at]
            if ledger not in self._selection:
                continue
            if ledger not in numbers:
                unindexed = self._unindexed.setdefault(ledger, _UnindexedLedger(path))
                unindexed.entries += 1
                unindexed.size_bytes += window.sizes[at] + 4
            else:
                yield (ledger, window.entries[at]), window.locations[at]

    def _recheck_rows(self, logs: IndexedLogs, windows: Iterable[Columns], numbers: LedgerNumbers) -> Iterator[Finding]:
        entries = (
            (numbers.ledgers[number], entry_id)
            for _, entry_ids, ledger_numbers in windows
            for number, entry_id in zip(ledger_numbers.tolist(), entry_ids.tolist(), strict=True)
        )
        return self._recheck.entries(logs, entries)

    def _count_read(self, size_bytes: int, entries: int) -> None:
        self.counts.bytes_read += size_bytes
        self._advance(size_bytes)
        self._pace.take(size_bytes, entries)


def _merge_damage(damage: BkctlError, path: Path, good_end: int, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield one finding for a damaged log, which counts the `findings` behind `good_end`, then the other findings."""
    kept: list[Finding] = []
    lost, ledgers = 0, set()
    for finding in findings:
        if finding.path == path and finding.offset is not None and finding.offset >= good_end:
            lost += 1
            ledgers.add(finding.ledger)
        else:
            kept.append(finding)
    reason = str(damage)
    if lost:
        known = f"{counted(lost, 'entry')} of {counted(len(ledgers), 'ledger')} that the index has there"
        reason = f"{damage.message}; {known} {'is' if lost == 1 else 'are'} lost"
    yield Finding(FindingKind.LOG_DAMAGED, path, reason)
    yield from kept
