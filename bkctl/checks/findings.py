"""What checks of a bookie's files find, and what they count on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt
from bkctl.formats.entry_log import unpack_location
from bkctl.ids import LedgerId

#: Errors that are kept one by one.
ERRORS_MAX: Final = 100


class FindingKind(StrEnum):
    """What a finding is; the values are the words of every output."""

    #: The index points at a record of another ledger or entry.
    WRONG_ENTRY = "wrongEntry"
    #: The index points at a place where no record is.
    NO_RECORD = "noRecord"
    #: The index points into a log that is not here.
    LOG_MISSING = "logMissing"
    #: The entry does not match its digest.
    DIGEST = "digest"
    #: An entry is in a log, its ledger has an index, and that does not have it. In a log that a killed bookie wrote it
    #: may be one that reached no journal, and so was acknowledged to nobody: nothing that is left proves that.
    NOT_INDEXED = "notIndexed"
    #: A log cannot be read to its end.
    LOG_DAMAGED = "logDamaged"
    #: There are locations of a ledger that the ledgers database does not have: DbLedgerStorage deletes the ledger at
    #: once and its locations at a later flush, and one that is killed in between, or has nothing to flush, keeps them.
    NO_LEDGER = "noLedger"
    #: A ledger without a master key takes that of the next writer, whoever it is.
    NO_MASTER_KEY = "noMasterKey"
    #: A ledger has two indexes, or two keys in the ledgers database.
    TWICE = "twice"
    #: A key, value or slot that no bookie writes.
    BAD_ITEM = "badItem"
    #: A table that the MANIFEST does not name: left over, or the MANIFEST lost it.
    STRAY_TABLE = "strayTable"
    #: A ledger that is in a log and has no index: deleted, most likely.
    UNINDEXED = "unindexed"
    #: What a relocation left behind.
    RELOCATION = "relocation"
    #: The bookie itself says that it must check its integrity.
    NEEDS_CHECK = "needsIntegrityCheck"


#: What is told, and is no finding: a healthy bookie has them too.
NOTES: Final = frozenset(
    (
        FindingKind.UNINDEXED,
        FindingKind.NO_LEDGER,
        FindingKind.RELOCATION,
        FindingKind.STRAY_TABLE,
        FindingKind.NO_MASTER_KEY,
        FindingKind.NEEDS_CHECK,
    )
)


class Finding(NamedTuple):
    """Something in an index or a log that does not fit; `path` is the file or database that it is in."""

    kind: FindingKind
    ledger: LedgerId | None
    entry_id: int | None
    location: int | None
    path: Path
    reason: str

    @property
    def is_problem(self) -> bool:
        """Whether it is a finding; else it is a note."""
        return self.kind not in NOTES

    @property
    def log_id(self) -> int | None:
        """The entry log that the location names."""
        return None if self.location is None else unpack_location(self.location)[0]

    @property
    def offset(self) -> int | None:
        """The byte offset of the record (its size field) in that log."""
        return None if self.location is None else unpack_location(self.location)[1] - 4


def as_damage(error: BkctlError) -> BkctlError:
    """The error of a file that a walk came upon: Corrupt also for one that is no file, or not ours to read."""
    return Corrupt(error.message, hint=error.hint) if error.exit_code in (1, 2) else error


class Counts:
    """What a check saw. `errors` says which indexes could not be read; the rest was checked all the same."""

    def __init__(self) -> None:
        self.ledgers = 0
        self.entries = 0
        self.logs = 0
        #: Records of logs that were compared with the index.
        self.records = 0
        self.bytes_read = 0
        #: Entries that only the journals hold for certain: the bookie runs, or was killed.
        self.not_flushed = 0
        #: Ledgers of which no entry is here, and those that are fenced (in a check of the indexes alone).
        self.empty_ledgers = 0
        self.fenced_ledgers = 0
        #: Records of entries whose index points at another copy: a compaction, or a replayed journal.
        self.copies = 0
        self.findings = 0
        self.notes = 0
        self.errors: list[BkctlError] = []
        self.error_count = 0

    def note_error(self, error: BkctlError) -> None:
        """Keep an error, as long as there are not too many."""
        self.error_count += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(as_damage(error))

    def watch(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """The findings, counted."""
        for each in findings:
            if each.is_problem:
                self.findings += 1
            else:
                self.notes += 1
            yield each
