"""A check of a bookie's indexes against its entry logs, for every storage class.

It goes both ways. Each entry of an index must point at a record of that ledger and entry; and each record of
a log must be in the index of its ledger, if that has one. The index is read first, as rows (location, entry, ledger)
that are sorted by location in runs of a million, which go to a temporary file where there is more than one. Then the
logs are read front to back once, each window of records beside the rows that point there: memory is that of some runs
and of the ledgers' names, whatever the bookie holds, and each log is read sequentially.

A bookie may run meanwhile: it adds, compacts and deletes. So whatever does not fit is looked up again in the index as
it is then, and what a restart would replay from the journals (behind the last mark) counts as not flushed.

Source: InterleavedLedgerStorage.localConsistencyCheck; DbLedgerStorage has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.checks.digests import DigestChecker, DigestMismatchAt
from bkctl.checks.findings import Counts, Finding, FindingKind
from bkctl.errors import BkctlError, EntryNotFound, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import BookieIndexes, IndexDatabases, LedgerIndex, LedgerIndexReader
from bkctl.files.journal import JournalReader
from bkctl.files.journals import files_after_marks
from bkctl.files.rocksdb import LocationsDatabase
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry_log import file_name, log_id_of, pack_location, unpack_location
from bkctl.formats.index import (
    SLOT_SIZE,
    read_location,
    read_location_key,
)
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import U64_MAX, LedgerId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.uint64]

#: Rows of the index that are sorted in memory together; more of them go to a temporary file, run by run.
RUN_ROWS: Final = 1 << 20
#: Records of a log that are compared with the index together.
WINDOW_RECORDS: Final = 1 << 17
#: Entries that are looked up again together.
RETRY_ENTRIES: Final = 4096
_ROUNDS: Final = 3
_PAUSE_S: Final = 0.1
_UNKNOWN: Final = U64_MAX


class Rate(NamedTuple):
    """At most so much a second; None: without a limit."""

    bytes_per_s: float | None = None
    entries_per_s: float | None = None


NO_LIMIT: Final = Rate()


# --- index against entry logs ---------------------------------------------------------------------------------------


class IndexCheck:
    """One check of a bookie's indexes against its entry logs; `counts` tells what was seen.

    `ledgers` and `scope_id` choose what to check. `sample` is the share of the entries to look at, the same ones for
    the same `seed`; the logs are not searched for entries without an index then. `digests` checks each entry's body.
    `advance` hears of bytes read. Needs NumPy.
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
        rate: Rate = NO_LIMIT,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self.counts = Counts()
        self._directories = directories
        self._only = None if ledgers is None else frozenset(ledgers)
        self._scope_id = scope_id
        self._sample, self._seed = sample, seed
        self._digests = digests
        self._throttle = _Throttle(rate)
        self._advance = advance or (lambda _: None)
        self._unflushed = _Unflushed(directories)
        self._places: list[_Place] = []
        self._unindexed: dict[LedgerId, _Tally] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield what does not fit, log by log; notes come last. Once.

        An index that cannot be read is in `counts.errors`, and the others are checked. Raises NotFound (a missing
        directory), UsageError (directories of which nobody can tell which belong together).
        """
        return self.counts.watch(self._findings())

    def _findings(self) -> Iterator[Finding]:
        with BookieIndexes(self._directories) as indexes:
            self._places = _places(self._directories, indexes, self.counts)
            for place in self._places:
                with _Rows() as rows:
                    names = _Names()
                    yield from self._read_index(place, indexes, rows, names)
                    self.counts.ledgers += len(names.ledgers)
                    self.counts.entries += rows.count
                    yield from self._check_logs(place, rows, names)
            if self._digests is not None:
                yield from self._late_mismatches(self._digests)
        yield from self._unindexed_ledgers()

    def _late_mismatches(self, digests: DigestChecker) -> Iterator[Finding]:
        """Those of entries that stand before the one that told their ledger's digest type."""
        for each in digests.late_findings():
            path = Path(each.where)
            location = pack_location(log_id_of(path.name) or 0, each.offset + 4)
            if self._wants(each.ledger):
                yield Finding(FindingKind.DIGEST, each.ledger, each.entry_id, location, path, _digest_reason(each))

    def _wants(self, ledger: LedgerId) -> bool:
        return (self._only is None or ledger in self._only) and self._scope_id in (None, ledger.scope_id)

    # --- reading the index --------------------------------------------------------------------------------------

    def _read_index(self, place: _Place, indexes: BookieIndexes, rows: _Rows, names: _Names) -> Iterator[Finding]:
        if place.databases is not None:
            yield from self._read_databases(place.databases, rows, names)
            return
        seen: dict[LedgerId, Path] = {}
        for file in indexes.files():
            ledger = file.id
            if not isinstance(ledger, LedgerId) or ledger.is_scoped != place.scoped or not self._wants(ledger):
                continue
            first = seen.setdefault(ledger, file.path)
            if first != file.path:
                reason = f"the ledger's index is {first} too, which a bookie takes: this one was not looked at"
                yield Finding(FindingKind.TWICE, ledger, None, None, file.path, reason)
                continue
            try:
                self._read_index_file(ledger, file.path, rows, names)
            except NotFound:
                continue
            except BkctlError as error:
                self.counts.note_error(error)

    def _read_index_file(self, ledger: LedgerId, path: Path, rows: _Rows, names: _Names) -> None:
        import numpy as np

        number = names.number(ledger)
        with LedgerIndexReader.open(path) as reader:
            for first, page in reader.pages():
                locations = np.frombuffer(page, np.uint64)
                (present,) = np.nonzero(locations)
                if len(present):
                    entries = present.astype(np.uint64) + np.uint64(first)
                    self._add(rows, ledger, number, locations[present], entries)

    def _add(self, rows: _Rows, ledger: LedgerId, number: int, locations: Column, entries: Column) -> None:
        import numpy as np

        if self._sample is not None:
            chosen = _sampled(ledger, entries, self._sample, self._seed)
            locations, entries = locations[chosen], entries[chosen]
        rows.add(locations, entries, np.full(len(entries), number, np.uint64))

    def _read_databases(self, pair: IndexDatabases, rows: _Rows, names: _Names) -> Iterator[Finding]:
        try:
            for ledger, _ in pair.ledgers.ledgers():
                if self._wants(ledger):
                    names.number(ledger)
        except BkctlError as error:
            self.counts.note_error(error)
            return
        strangers: dict[LedgerId, int] = {}
        try:
            for ledger, locations, entries in self._location_groups(pair.locations, names):
                number = names.find(ledger)
                if number is not None:
                    self._add(rows, ledger, number, locations, entries)
                elif self._wants(ledger):
                    strangers[ledger] = strangers.get(ledger, 0) + len(entries)
        except BkctlError as error:
            self.counts.note_error(error)
        if strangers:
            yield from self._without_ledger(strangers, pair.locations.path)

    def _location_groups(self, database: LocationsDatabase, names: _Names) -> Iterator[tuple[LedgerId, Column, Column]]:
        """Yield (ledger, locations, entry ids), ledger by ledger, a big one in several parts."""
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
        if self._only is None:
            yield from database.batches(count=WINDOW_RECORDS)
            return
        for ledger in sorted(self._only):
            if ledger.is_scoped == database.scoped:
                yield from database.batches_of(ledger, count=WINDOW_RECORDS)

    def _without_ledger(self, strangers: dict[LedgerId, int], path: Path) -> Iterator[Finding]:
        """A running bookie writes locations before their ledger: where that is there by now, all is well."""
        with BookieIndexes(self._directories) as now:
            pairs = [pair for pair in now.databases() if pair.locations.path == path]
            left = {
                ledger: count
                for ledger, count in strangers.items()
                for pair in pairs
                if pair.ledgers.get(ledger) is None and pair.locations.last_entry_id(ledger) >= 0
            }
        for ledger, count in left.items():
            reason = f"{count:,} locations of a ledger that the ledgers database does not have: deleted, most likely"
            yield Finding(FindingKind.NO_LEDGER, ledger, None, None, path, reason)

    # --- reading the logs ---------------------------------------------------------------------------------------

    def _check_logs(self, place: _Place, rows: _Rows, names: _Names) -> Iterator[Finding]:
        searched = self._sample is None and place.searched
        at = 0
        for log_id, path in sorted(place.logs().items()):
            first, end = pack_location(log_id, 0), pack_location(log_id + 1, 0)
            # What points in between points at logs that are not here; damage makes up any number of them.
            yield from self._again(place, rows.windows(at, first - 1), names)
            at = end
            if not searched and not rows.has_any(first, end - 1):
                continue
            self.counts.logs += 1
            if self._sample is not None or not self._has_any(path):
                yield from self._check_points(place, log_id, rows, names)
            else:
                yield from self._check_whole(place, log_id, path, rows, names)
        yield from self._again(place, rows.windows(at, U64_MAX), names)

    def _has_any(self, path: Path) -> bool:
        """Whether the log may hold entries of the chosen ledgers: what its ledgers map says, if it has one."""
        if self._only is None and self._scope_id is None:
            return True
        try:
            with EntryLogReader.open(path) as reader:
                sizes = reader.ledgers_map()
        except BkctlError:
            return True
        return sizes is None or any(self._wants(ledger) for ledger in sizes)

    def _check_points(self, place: _Place, log_id: int, rows: _Rows, names: _Names) -> Iterator[Finding]:
        """Look at the places alone that the index names, in the order of the file."""
        doubtful: list[tuple[LedgerId, int]] = []
        with _Logs(place, self._digests) as logs:
            for locations, entries, numbers in rows.windows(pack_location(log_id, 0), pack_location(log_id + 1, 0) - 1):
                for location, entry_id, number in zip(
                    locations.tolist(), entries.tolist(), numbers.tolist(), strict=True
                ):
                    ledger = names.ledgers[number]
                    problem, size = logs.look(ledger, entry_id, location)
                    self._took(size, 1)
                    if problem is not None:
                        doubtful.append((ledger, entry_id))
                        if len(doubtful) == RETRY_ENTRIES:
                            yield from self._look_again(place, doubtful)
                            doubtful = []
        if doubtful:
            yield from self._look_again(place, doubtful)

    def _check_whole(self, place: _Place, log_id: int, path: Path, rows: _Rows, names: _Names) -> Iterator[Finding]:
        """Read the log once, window by window, beside the rows of the index that point into it."""
        at = pack_location(log_id, 0)
        window = _LogWindow(at, names)
        damage: BkctlError | None = None
        good_end = 0
        try:
            with EntryLogReader.open(path) as reader:
                try:
                    for batch in reader.batches():
                        window.add(batch, self._digests, str(path))
                        if window.is_full:
                            yield from self._compare(place, path, window, at, rows, names)
                            at = window.last_location + 1
                            window = _LogWindow(pack_location(log_id, 0), names)
                finally:
                    good_end = reader.position
        except NotFound:
            pass  # The bookie compacted it just now: what pointed there is looked up again.
        except BkctlError as error:
            damage = error
        if len(window):
            yield from self._compare(place, path, window, at, rows, names)
            at = window.last_location + 1
        rest = self._again(place, rows.windows(at, pack_location(log_id + 1, 0) - 1), names)
        if damage is not None and path.exists():
            rest = self._damaged(damage, path, good_end, rest)
        yield from rest

    def _damaged(self, damage: BkctlError, path: Path, good_end: int, rest: Iterator[Finding]) -> Iterator[Finding]:
        """One finding for the log, with the number of those of `rest` behind `good_end`; then the others of `rest`."""
        others: list[Finding] = []
        lost, ledgers = 0, set()
        for each in rest:
            if each.path == path and each.offset is not None and each.offset >= good_end:
                lost += 1
                ledgers.add(each.ledger)
            else:
                others.append(each)
        reason = str(damage)
        if lost:
            reason = f"{damage.message}; {lost:,} entries of {len(ledgers):,} ledgers that the index has there are lost"
        yield Finding(FindingKind.LOG_DAMAGED, None, None, None, path, reason)
        yield from others

    def _compare(
        self, place: _Place, path: Path, window: _LogWindow, first: int, rows: _Rows, names: _Names
    ) -> Iterator[Finding]:
        import numpy as np

        self._took(window.size_bytes, len(window))
        self.counts.records += len(window)
        locations, entries, numbers = window.columns()
        seen = np.zeros(len(locations), bool)
        for expected, expected_entries, expected_numbers in rows.windows(first, window.last_location):
            place_of = np.searchsorted(locations, expected)
            place_of[place_of == len(locations)] = 0
            fits = (
                (locations[place_of] == expected)
                & (entries[place_of] == expected_entries)
                & (numbers[place_of] == expected_numbers)
            )
            seen[place_of[fits]] = True
            if window.mismatched:
                fits &= ~np.isin(expected, np.array(window.mismatched, np.uint64))
            if not fits.all():
                wrong = ~fits
                part = expected[wrong], expected_entries[wrong], expected_numbers[wrong]
                yield from self._again(place, [part], names)
        if place.searched and not seen.all():
            yield from self._not_in_index(place, path, window, ~seen, names)

    def _took(self, size_bytes: int, entries: int) -> None:
        self.counts.bytes_read += size_bytes
        self._advance(size_bytes)
        self._throttle.take(size_bytes, entries)

    # --- second looks -------------------------------------------------------------------------------------------

    def _again(
        self, place: _Place, windows: Iterable[tuple[Column, Column, Column]], names: _Names
    ) -> Iterator[Finding]:
        """Look again at rows that did not fit: in the index as it is now, and in the log that it names now."""
        for locations, entries, numbers in windows:
            for begin in range(0, len(locations), RETRY_ENTRIES):
                part = slice(begin, begin + RETRY_ENTRIES)
                pairs = list(zip(numbers[part].tolist(), entries[part].tolist(), strict=True))
                yield from self._look_again(place, [(names.ledgers[number], entry) for number, entry in pairs])

    def _look_again(self, place: _Place, left: list[tuple[LedgerId, int]]) -> Iterator[Finding]:
        problems: dict[tuple[LedgerId, int], Finding] = {}
        for attempt in range(_ROUNDS):
            before, problems = problems, {}
            with BookieIndexes(self._directories) as now, _Logs(place, self._digests) as logs:
                for ledger, index, wanted in _by_ledger(now, left):
                    if index is None:
                        continue
                    for entry_id in wanted:
                        location = _location_of(index, entry_id)
                        if not location:
                            continue
                        problem, _ = logs.look(ledger, entry_id, location & _UNKNOWN)
                        if problem is not None:
                            kind, path, reason = problem
                            problems[ledger, entry_id] = Finding(kind, ledger, entry_id, location, path, reason)
            if not problems or (problems == before and not self._unflushed.is_running):
                break
            left = list(problems)
            if attempt < _ROUNDS - 1 and self._unflushed.is_running:
                time.sleep(_PAUSE_S)
        yield from self._unless_unflushed(problems)

    def _unless_unflushed(self, problems: dict[tuple[LedgerId, int], Finding]) -> Iterator[Finding]:
        excused = self._unflushed.those_of(problems) if problems else frozenset()
        self.counts.not_flushed += len(excused)
        for key, finding in problems.items():
            if key not in excused:
                yield finding

    def _not_in_index(
        self, place: _Place, path: Path, window: _LogWindow, missing: Any, names: _Names
    ) -> Iterator[Finding]:
        """What is in the log and not in the rows of the index: old copies, deleted ledgers, or entries nobody finds."""
        import numpy as np

        rest: dict[tuple[LedgerId, int], int] = {}
        for at in np.nonzero(missing)[0].tolist():
            ledger = window.ledger(at)
            if not self._wants(ledger):
                continue
            entry_id = int(window.entries[at])
            if names.find(ledger) is None:
                tally = self._unindexed.setdefault(ledger, _Tally(path))
                tally.entries += 1
                tally.size_bytes += int(window.sizes[at]) + 4
            else:
                rest[ledger, entry_id] = int(window.locations[at])
                if len(rest) == RETRY_ENTRIES:
                    yield from self._missing(rest, path)
                    rest = {}
        if rest:
            yield from self._missing(rest, path)

    def _missing(self, records: dict[tuple[LedgerId, int], int], path: Path) -> Iterator[Finding]:
        findings: dict[tuple[LedgerId, int], Finding] = {}
        # Twice: an entry that reaches the index between a look there and one at the journals is in neither.
        for _ in range(2):
            looked_at = list(findings) or list(records)
            findings = {}
            with BookieIndexes(self._directories) as now:
                for ledger, index, wanted in _by_ledger(now, looked_at):
                    if index is None:
                        continue
                    for entry_id in wanted:
                        found = _location_of(index, entry_id)
                        if found is None:
                            continue
                        if found:
                            self.counts.copies += 1
                            continue
                        location = records[ledger, entry_id]
                        findings[ledger, entry_id] = Finding(
                            FindingKind.NOT_INDEXED, ledger, entry_id, location, path, _NOT_INDEXED
                        )
            if not findings:
                return
            excused = self._unflushed.those_of(findings)
            self.counts.not_flushed += len(excused)
            findings = {key: finding for key, finding in findings.items() if key not in excused}
            if not findings:
                return
        reason = _NOT_INDEXED
        if _was_cut(path):
            # Nothing tells the two apart: the journal is gone, and neither index nor log says when it was written.
            reason += "; the bookie was killed while it wrote this log, so it may be one that it acknowledged to nobody"
        for finding in findings.values():
            yield finding._replace(reason=reason)

    def _unindexed_ledgers(self) -> Iterator[Finding]:
        if not self._unindexed:
            return
        with BookieIndexes(self._directories) as now:
            for ledger in sorted(self._unindexed):
                tally = self._unindexed[ledger]
                with suppress(BkctlError):
                    if now.find(ledger, first=True) is not None:
                        continue
                reason = f"{tally.entries:,} entries ({tally.size_bytes:,} bytes) of a ledger without an index"
                yield Finding(FindingKind.UNINDEXED, ledger, None, None, tally.path, reason)


_NOT_INDEXED: Final = "the entry is in the log, and not in the index of its ledger"


def _was_cut(path: Path) -> bool:
    """Whether the log was not completed: its bookie writes to it, or was killed then."""
    try:
        with EntryLogReader.open(path) as reader:
            return reader.header is not None and not reader.header.ledgers_map_offset
    except BkctlError:
        return False


def _digest_reason(mismatch: DigestMismatchAt) -> str:
    return f"the entry does not match its {mismatch.digest_type.name} digest"


class _Tally:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = 0
        self.size_bytes = 0


def _by_ledger(
    indexes: BookieIndexes, entries: Iterable[tuple[LedgerId, int]]
) -> Iterator[tuple[LedgerId, LedgerIndex | None, list[int]]]:
    """(ledger, its index as it is now or None, the entry ids asked for), each index open while it is looked at."""
    grouped: dict[LedgerId, list[int]] = {}
    for ledger, entry_id in entries:
        grouped.setdefault(ledger, []).append(entry_id)
    for ledger, entry_ids in grouped.items():
        index = None
        # An index that cannot be read is an error already; what it says of this ledger nobody knows.
        with suppress(BkctlError):
            index = indexes.find(ledger, first=True)
        try:
            yield ledger, index, entry_ids
        finally:
            if index is not None:
                index.close()


def _location_of(index: LedgerIndex, entry_id: int) -> int | None:
    """The location of an entry, 0 for none; None where the index is damaged, which is an error already."""
    try:
        return index.location_of(entry_id)
    except BkctlError:
        return None


class _Throttle:
    """Holds work to a rate."""

    def __init__(self, rate: Rate) -> None:
        self._rate = rate
        self._began: float | None = None
        self._bytes = self._entries = 0

    def take(self, size_bytes: int, entries: int) -> None:
        """Wait until as much as this was allowed."""
        if self._rate == NO_LIMIT:
            return
        now = time.monotonic()
        began = self._began = now if self._began is None else self._began
        self._bytes += size_bytes
        self._entries += entries
        due = 0.0
        if self._rate.bytes_per_s:
            due = self._bytes / self._rate.bytes_per_s
        if self._rate.entries_per_s:
            due = max(due, self._entries / self._rate.entries_per_s)
        if began + due > now:
            time.sleep(began + due - now)


# --- rows -----------------------------------------------------------------------------------------------------------


class _Names:
    """Ledgers ↔ the numbers that stand for them in rows."""

    def __init__(self) -> None:
        self.ledgers: list[LedgerId] = []
        self._numbers: dict[LedgerId, int] = {}

    def number(self, ledger: LedgerId) -> int:
        """The ledger's number, a new one where it has none."""
        number = self._numbers.get(ledger)
        if number is None:
            number = self._numbers[ledger] = len(self.ledgers)
            self.ledgers.append(ledger)
        return number

    def find(self, ledger: LedgerId) -> int | None:
        """The ledger's number; None where it has none."""
        return self._numbers.get(ledger)


class _Rows:
    """Rows (location, entry id, ledger's number), added in any order, read in that of their locations.

    Runs of RUN_ROWS are sorted in memory; where one does not do, they go to a temporary file. A context manager.
    """

    def __init__(self) -> None:
        self.count = 0
        self._chunks: list[tuple[Column, Column, Column]] = []
        self._chunked = 0
        self._runs: list[tuple[Column, Column, Column]] = []
        self._stack = ExitStack()
        self._file: Any = None

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self._runs.clear()
        self._stack.close()

    def add(self, locations: Column, entries: Column, numbers: Column) -> None:
        """Add rows."""
        self._chunks.append((locations, entries, numbers))
        self._chunked += len(locations)
        self.count += len(locations)
        if self._chunked >= RUN_ROWS:
            self._sort(to_file=True)

    def _sort(self, *, to_file: bool) -> None:
        import numpy as np

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
        import numpy as np

        at = self._file.seek(0, 2)
        self._file.write(column.data)
        self._file.flush()
        return np.memmap(self._file, np.uint64, "r", at, column.shape)

    def has_any(self, first: int, last: int) -> bool:
        """Whether there are rows with locations `first` to `last`."""
        return next(self.windows(first, last), None) is not None

    def windows(self, first: int, last: int) -> Iterator[tuple[Column, Column, Column]]:
        """Yield the rows with locations `first` to `last` in order, some at once."""
        import numpy as np

        if last < first:
            return
        self._sort(to_file=False)
        begins = [int(np.searchsorted(run[0], np.uint64(first))) for run in self._runs]
        ends = [int(np.searchsorted(run[0], np.uint64(last), "right")) for run in self._runs]
        share = max(1, RUN_ROWS // max(1, len(self._runs)))
        while any(begin < end for begin, end in zip(begins, ends, strict=True)):
            # All rows up to the nearest of the places where a run's share ends.
            limit = min(
                (
                    int(run[0][begin + share - 1])
                    for run, begin, end in zip(self._runs, begins, ends, strict=True)
                    if begin + share < end
                ),
                default=last,
            )
            stops = [
                max(begin, min(end, int(np.searchsorted(run[0], np.uint64(limit), "right"))))
                for run, begin, end in zip(self._runs, begins, ends, strict=True)
            ]
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


def _sampled(ledger: LedgerId, entries: Column, share: float, seed: int) -> Any:
    """Which entries are in the sample: the same ones in every check with this seed. A bool for each."""
    import numpy as np

    mixed = (ledger.value ^ ledger.scope_id ^ seed * 0x9E3779B97F4A7C15) & _UNKNOWN
    with np.errstate(over="ignore"):
        # splitmix64: neighbouring entries are in the sample, or not, independently of each other.
        value = entries * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mixed)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        value = value ^ value >> np.uint64(31)
    return value < np.uint64(min(int(share * 2.0**64), _UNKNOWN))


# --- logs -----------------------------------------------------------------------------------------------------------


class _Place:
    """Entry logs that share one id space, and the index that points into them."""

    def __init__(
        self, currents: Iterable[Path], *, scoped: bool, databases: IndexDatabases | None, searched: bool = True
    ) -> None:
        self.scoped, self.databases = scoped, databases
        #: Whether the logs are searched for entries without an index; once is enough for each.
        self.searched = searched
        self._directories = [each / SCOPED_DIRECTORY if scoped else each for each in currents]

    def logs(self) -> dict[int, Path]:
        """The logs that are here now, by their ids."""
        found: dict[int, Path] = {}
        for directory in self._directories:
            with suppress(OSError):
                for path in directory.iterdir():
                    if (log_id := log_id_of(path.name)) is not None:
                        found.setdefault(log_id, path)
        return found

    def path_of(self, log_id: int) -> Path:
        """Where a log's file would be that is not here."""
        return self._directories[0] / file_name(log_id)


def _places(directories: BookieDirectories, indexes: BookieIndexes, counts: Counts) -> list[_Place]:
    currents = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    places = []
    pairs = indexes.databases()
    for error in indexes.problems:
        counts.note_error(error)
    for pair in pairs:
        own = _log_directory(directories, pair, pairs)
        places.append(_Place([own], scoped=pair.scoped, databases=pair))
    for scoped in (False, True):
        searched = not indexes.problems and not any(pair.scoped == scoped for pair in pairs)
        places.append(_Place(currents, scoped=scoped, databases=None, searched=searched))
    return places


def _log_directory(directories: BookieDirectories, pair: IndexDatabases, pairs: list[IndexDatabases]) -> Path:
    """The directory with the logs that a database points into.

    Its own where it has logs; with index directories apart, the ledger directory of the same place in the settings.
    Source: DbLedgerStorage.initialize.
    """
    own = pair.ledgers.path.parent
    ledger_dirs = list(dict.fromkeys(map(current_of, directories.ledger_dirs)))
    index_dirs = list(dict.fromkeys(map(current_of, directories.index_dirs)))
    if directories.ledger_dirs != directories.index_dirs:
        if len(ledger_dirs) == len(index_dirs):
            return ledger_dirs[index_dirs.index(own)]
    elif _holds_logs(own) or len(ledger_dirs) == 1:
        return own
    databases = list(dict.fromkeys(each.ledgers.path.parent for each in pairs))
    others = [each for each in ledger_dirs if each not in databases and _holds_logs(each)]
    if not others:
        return own
    if len(others) == 1 == len(databases):
        return others[0]
    if len(others) == len(databases):
        return others[databases.index(own)]
    raise UsageError(f"The logs of {own} may be in any of {len(others)} directories", hint="use --conf bk_server.conf")


def _holds_logs(current: Path) -> bool:
    return any(
        log_id_of(path.name) is not None
        for directory in (current, current / SCOPED_DIRECTORY)
        if directory.is_dir()
        for path in directory.iterdir()
    )


class _Logs:
    """The logs of a place, to look at single entries; the last one is kept open. A context manager."""

    def __init__(self, place: _Place, digests: DigestChecker | None) -> None:
        self._place, self._digests = place, digests
        self._paths = place.logs()
        self._reader: EntryLogReader | None = None
        self._log_id = -1

    def __enter__(self) -> _Logs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def look(self, ledger: LedgerId, entry_id: int, location: int) -> tuple[tuple[FindingKind, Path, str] | None, int]:
        """What is wrong with the record at `location` if it is to be that entry (None: nothing), and its bytes."""
        log_id, offset = unpack_location(location)
        path = self._paths.get(log_id)
        if path is None:
            reason = f"there is no entry log {log_id} (0x{log_id:x})"
            return (FindingKind.LOG_MISSING, self._place.path_of(log_id), reason), 0
        try:
            record = self._open(log_id, path).entry_at(offset)
        except NotFound as error:
            if isinstance(error, EntryNotFound):
                return (FindingKind.NO_RECORD, path, "the log ends before"), 0
            return (FindingKind.LOG_MISSING, path, f"there is no entry log {log_id} (0x{log_id:x})"), 0
        except BkctlError as error:
            return (FindingKind.NO_RECORD, path, getattr(error, "problem", str(error))), 0
        size = record.record_size + 4
        if record.type is not RecordType.ENTRY or (record.ledger, record.entry_id) != (ledger, entry_id):
            what = f"entry {record.entry_id} of ledger {record.ledger}"
            if record.type is not RecordType.ENTRY:
                what = f"a record of type {record.type}"
            return (FindingKind.WRONG_ENTRY, path, f"{what} is there"), size
        if record.length is None:
            return (FindingKind.NO_RECORD, path, f"{record.record_size} bytes are too few for an entry"), size
        if self._digests is not None and (mismatch := self._digests.check(record, str(path))) is not None:
            return (FindingKind.DIGEST, path, _digest_reason(mismatch)), size
        return None, size

    def _open(self, log_id: int, path: Path) -> EntryLogReader:
        if self._reader is None or self._log_id != log_id:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            self._reader = EntryLogReader.open(path)
            self._log_id = log_id
        return self._reader


class _LogWindow:
    """Consecutive records of a log, as columns; `mismatched` are the locations of those that fail their digest."""

    def __init__(self, base: int, names: _Names) -> None:
        self._base, self._names = base, names
        self.locations: list[int] = []
        self.entries: list[int] = []
        self.sizes: list[int] = []
        self.mismatched: list[int] = []
        self._ledgers: list[LedgerId] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self.locations)

    @property
    def is_full(self) -> bool:
        """Whether the records should be compared before there are more."""
        return len(self.locations) >= WINDOW_RECORDS

    @property
    def last_location(self) -> int:
        """The location of the last record."""
        return self.locations[-1]

    def add(self, batch: RecordBatch, digests: DigestChecker | None, where: str) -> None:
        """Add a batch of records; what is no whole entry is left out, and so fits no row."""
        record = batch.record
        if record is not None and (record.type is not RecordType.ENTRY or record.length is None):
            return
        start = self._base + 4
        self.locations.extend([start + offset for offset in batch.offsets])
        self.entries.extend(batch.entry_ids)
        self.sizes.extend(batch.sizes)
        self._ledgers.extend(batch.ledgers)
        self.size_bytes += sum(batch.sizes) + 4 * len(batch)
        if digests is not None:
            self.mismatched.extend(start + each.offset for each in digests.check_batch(batch, where))

    def ledger(self, at: int) -> LedgerId:
        """The ledger of a record."""
        return self._ledgers[at]

    def columns(self) -> tuple[Column, Column, Column]:
        """Locations, entry ids and ledgers' numbers (one that fits no row where the ledger has none)."""
        import numpy as np

        find = self._names.find
        known = {ledger: find(ledger) for ledger in set(self._ledgers)}
        numbers = {ledger: _UNKNOWN if number is None else number for ledger, number in known.items()}
        numbered = np.array([numbers[ledger] for ledger in self._ledgers], np.uint64)
        return np.array(self.locations, np.uint64), np.array(self.entries, np.uint64), numbered


# --- what is not flushed --------------------------------------------------------------------------------------------


class _Unflushed:
    """The entries that a restart would replay: those in the journals behind the last marks.

    Where no journal is known, whatever was written to a log since the last mark counts, if the bookie runs or did not
    stop cleanly.
    """

    def __init__(self, directories: BookieDirectories) -> None:
        self._directories = directories
        self._entries: dict[LedgerId, list[list[int]]] = {}
        self._read_to: dict[Path, int] = {}

    @property
    def is_running(self) -> bool:
        """Whether the bookie runs, or did not stop cleanly. Source: DirtyFile, which is there meanwhile."""
        return any((current_of(each) / "DIRTY").exists() for each in self._directories.ledger_dirs)

    def those_of(self, findings: dict[tuple[LedgerId, int], Finding]) -> Collection[tuple[LedgerId, int]]:
        """Those entries that are not flushed."""
        journals = [file.path for file in self._directories.journals()]
        if not journals:
            if not self.is_running:
                return ()
            marked_ms = max((file.mtime_ms for file in self._directories.last_marks()), default=0)
            return [key for key, each in findings.items() if _may_be_unflushed(each, marked_ms)]
        try:
            starts = files_after_marks(self._directories, journals)
        except BkctlError:
            starts = dict.fromkeys(journals, 0)
        for path, start in starts.items():
            self._read(path, max(start, self._read_to.get(path, 0)))
        return [key for key in findings if self._holds(*key)]

    def _read(self, path: Path, start: int) -> None:
        with suppress(BkctlError), JournalReader.open(path) as reader:
            for record in reader.records(start):
                self._read_to[path] = record.offset
                if record.type is RecordType.ENTRY:
                    runs = self._entries.setdefault(record.ledger, [])
                    if runs and runs[-1][1] + 1 == record.entry_id:
                        runs[-1][1] += 1
                    elif not runs or not runs[-1][0] <= record.entry_id <= runs[-1][1]:
                        runs.append([record.entry_id, record.entry_id])

    def _holds(self, ledger: LedgerId, entry_id: int) -> bool:
        return any(first <= entry_id <= last for first, last in self._entries.get(ledger, ()))


def _may_be_unflushed(finding: Finding, marked_ms: int) -> bool:
    """Whether the log was written to since the last mark, or is open and ends before: the rest is in memory."""
    try:
        status = finding.path.stat()
        if status.st_mtime_ns // 1_000_000 >= marked_ms:
            return True
        with EntryLogReader.open(finding.path) as reader:
            is_open = reader.header is None or not reader.header.ledgers_map_offset
    except (OSError, BkctlError):
        return False
    return is_open and finding.offset is not None and finding.offset >= status.st_size
