"""Records of entry logs as a check compares them with an index: one by one, or in windows of columns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.checks.digests import DigestChecker, DigestMismatchAt
from bkctl.checks.findings import Finding, FindingKind
from bkctl.checks.index_rows import IndexedLogs, LedgerNumbers
from bkctl.errors import BkctlError, EntryNotFound, NotFound
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry_log import unpack_location
from bkctl.formats.record import RecordType
from bkctl.ids import U64_MAX, LedgerId

if TYPE_CHECKING:
    from bkctl.checks.index_rows import Columns

#: Records of a log that are compared with the index together.
WINDOW_RECORDS: Final = 1 << 17
#: The number of a ledger that the index does not have: it matches no row.
_UNKNOWN_LEDGER: Final = U64_MAX


def digest_reason(mismatch: DigestMismatchAt) -> str:
    """Return the reason of a finding about a digest."""
    return f"the entry does not match its {mismatch.digest_type.name} digest"


class RecordLookup:
    """Reads single records of `logs`; the last log stays open. Use as a context manager."""

    def __init__(self, logs: IndexedLogs, digests: DigestChecker | None) -> None:
        self._logs, self._digests = logs, digests
        self._paths = logs.paths()
        self._reader: EntryLogReader | None = None
        self._log_id = -1

    def __enter__(self) -> RecordLookup:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.close()

    def check(self, ledger: LedgerId, entry_id: int, location: int) -> tuple[Finding | None, int]:
        """Compare the record at `location` with the entry that the index has there.

        Returns the contradiction (None if the record is that entry) and the bytes read.
        """

        def finding(kind: FindingKind, path: Path, reason: str) -> Finding:
            return Finding(kind, path, reason, ledger, entry_id, location)

        log_id, offset = unpack_location(location)
        path = self._paths.get(log_id)
        missing = f"entry log {log_id} (0x{log_id:x}) does not exist"
        if path is None:
            return finding(FindingKind.LOG_MISSING, self._logs.missing_path(log_id), missing), 0
        try:
            record = self._open(log_id, path).entry_at(offset)
        except EntryNotFound:
            return finding(FindingKind.NO_RECORD, path, "the log ends before"), 0
        except NotFound:
            return finding(FindingKind.LOG_MISSING, path, missing), 0
        except BkctlError as error:
            return finding(FindingKind.NO_RECORD, path, getattr(error, "problem", str(error))), 0
        found: Finding | None = None
        if record.type is not RecordType.ENTRY:
            found = finding(FindingKind.WRONG_ENTRY, path, f"a record of type {record.type} is there")
        elif (record.ledger, record.entry_id) != (ledger, entry_id):
            reason = f"entry {record.entry_id} of ledger {record.ledger} is there"
            found = finding(FindingKind.WRONG_ENTRY, path, reason)
        elif record.last_add_confirmed is None:
            found = finding(FindingKind.NO_RECORD, path, f"{record.record_size} bytes are too few for an entry")
        elif self._digests is not None and (mismatch := self._digests.check(record, str(path))) is not None:
            found = finding(FindingKind.DIGEST, path, digest_reason(mismatch))
        return found, record.record_size + 4

    def _open(self, log_id: int, path: Path) -> EntryLogReader:
        if self._reader is None or self._log_id != log_id:
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            self._reader = EntryLogReader.open(path)
            self._log_id = log_id
        return self._reader


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

    @property
    def is_full(self) -> bool:
        """Return True if the window should be compared before more records are added."""
        return len(self.locations) >= WINDOW_RECORDS

    @property
    def last_location(self) -> int:
        """Return the location of the last record."""
        return self.locations[-1]

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
        import numpy as np

        find = self._numbers.find
        found = {ledger: find(ledger) for ledger in set(self.ledgers)}
        numbers = {ledger: _UNKNOWN_LEDGER if number is None else number for ledger, number in found.items()}
        numbered = np.array([numbers[ledger] for ledger in self.ledgers], np.uint64)
        return np.array(self.locations, np.uint64), np.array(self.entries, np.uint64), numbered
