"""Findings of a check of a bookie's files, and the numbers that it counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Conflict, Corrupt, NotFound, Unreachable, Unsupported
from bkctl.formats.entry_log import unpack_location
from bkctl.ids import LedgerId

#: Errors that are kept; all are counted.
ERRORS_MAX: Final = 100


class FindingKind(StrEnum):
    """The kind of a finding; the values are the words of every output."""

    #: The index points at a record of another ledger or entry.
    WRONG_ENTRY = "wrongEntry"
    #: The index points at a byte where no record begins.
    NO_RECORD = "noRecord"
    #: The index points into a missing log.
    LOG_MISSING = "logMissing"
    #: The entry does not match its digest.
    DIGEST = "digest"
    #: An entry is in a log and missing in the index of its ledger. In the log of a killed bookie the entry may never
    #: have reached a journal, and so was never acknowledged; the files that are left cannot prove that.
    NOT_INDEXED = "notIndexed"
    #: A log cannot be read to its end.
    LOG_DAMAGED = "logDamaged"
    #: The locations database has locations of a ledger that the ledgers database lacks. DbLedgerStorage deletes a
    #: ledger at once and its locations at a later flush: a bookie killed in between, or without a flush, keeps them.
    NO_LEDGER = "noLedger"
    #: A ledger has no master key: the bookie accepts the key of the next writer, whoever it is.
    NO_MASTER_KEY = "noMasterKey"
    #: A ledger has two indexes, or two keys in the ledgers database.
    TWICE = "twice"
    #: A key, value or slot is not in a form that a bookie writes.
    BAD_ITEM = "badItem"
    #: Ledgers are in another directory than DbLedgerStorage looks for them in: its reads do not find them.
    WRONG_DIRECTORY = "wrongDirectory"
    #: A table is missing in the MANIFEST: left over, or lost by the MANIFEST.
    STRAY_TABLE = "strayTable"
    #: A ledger in a log has no index: its index is lost, or it was deleted.
    UNINDEXED = "unindexed"
    #: A file is left over from a relocation.
    RELOCATION = "relocation"
    #: The storage flags say that the bookie must check its integrity.
    NEEDS_CHECK = "needsIntegrityCheck"


#: Kinds that are reported as notes and do not count as findings: a healthy bookie has them too.
NOTES: Final = frozenset(
    (
        FindingKind.NO_LEDGER,
        FindingKind.RELOCATION,
        FindingKind.STRAY_TABLE,
        FindingKind.NO_MASTER_KEY,
        FindingKind.NEEDS_CHECK,
    )
)


class Finding(NamedTuple):
    """A contradiction in an index or a log; `path` is the file or database that has it."""

    kind: FindingKind
    path: Path
    reason: str
    ledger: LedgerId | None = None
    entry_id: int | None = None
    location: int | None = None
    #: The ledger was deleted, so that the finding is a note.
    is_deleted: bool = False

    @property
    def is_problem(self) -> bool:
        """Return True for a finding, False for a note."""
        return self.kind not in NOTES and not self.is_deleted

    @property
    def log_id(self) -> int | None:
        """Return the id of the entry log that the location names; None without a location."""
        return None if self.location is None else unpack_location(self.location)[0]

    @property
    def offset(self) -> int | None:
        """Return the byte offset of the record (its size field) in that log; None without a location."""
        return None if self.location is None else unpack_location(self.location)[1] - 4


#: Returns which of some ledgers the metadata store knows to be deleted.
FindDeleted = Callable[[Collection[LedgerId]], Collection[LedgerId]]


def unindexed_findings(
    ledgers: Mapping[LedgerId, tuple[Path, str]], find_deleted: FindDeleted | None
) -> Iterator[Finding]:
    """Yield a finding for each ledger that a log (its path and size in words) has and no index; a note if deleted.

    Without `find_deleted` all are notes.
    """
    deleted = find_deleted(ledgers) if find_deleted is not None and ledgers else ()
    for ledger, (path, size) in ledgers.items():
        is_deleted = find_deleted is None or ledger in deleted
        state = "it was deleted" if ledger in deleted else "its index is lost, unless the ledger was deleted"
        reason = f"{size} of a ledger without an index: {state}"
        yield Finding(FindingKind.UNINDEXED, path, reason, ledger, is_deleted=is_deleted)


def as_damage(error: BkctlError) -> BkctlError:
    """Return the error of a file that a walk found: Corrupt if the file is unreadable or not a regular file."""
    if isinstance(error, Corrupt | Unsupported | NotFound | Conflict | Unreachable):
        return error
    return Corrupt(error.message, hint=error.hint)


@dataclass(eq=False)
class Counts:
    """The numbers of a check. `errors` are the indexes that could not be read; the check continued with the others."""

    ledgers: int = 0
    entries: int = 0
    logs: int = 0
    #: Records of logs that were compared with the index.
    records: int = 0
    bytes_read: int = 0
    #: Entries that may be in the journals only: the bookie runs, or was killed.
    not_flushed: int = 0
    #: Ledgers without entries, and fenced ledgers (counted by a check of the indexes alone).
    empty_ledgers: int = 0
    fenced_ledgers: int = 0
    #: Records whose entry is indexed at another copy, after a compaction or a journal replay.
    copies: int = 0
    findings: int = 0
    notes: int = 0
    errors: list[BkctlError] = field(default_factory=list)
    error_count: int = 0

    def note_error(self, error: BkctlError) -> None:
        """Count an error, and keep it while there are fewer than ERRORS_MAX."""
        self.error_count += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(as_damage(error))

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of an index as `note_error` does, and continue; skip an index that was just deleted."""
        try:
            yield
        except NotFound:
            pass
        except BkctlError as error:
            self.note_error(error)

    def watch(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield `findings`, and count each as a finding or a note."""
        for finding in findings:
            if finding.is_problem:
                self.findings += 1
            else:
                self.notes += 1
            yield finding
