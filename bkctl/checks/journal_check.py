"""Checks of journal files and of the last marks that point into them. Source: Journal.scanJournal, Journal.replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, NotFound, Unsupported
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.files.journal import Behind, JournalReader, missing_journals
from bkctl.files.journals import JournalMark, LastMarks, journal_indexes, latest_marks
from bkctl.files.scan import ScanState
from bkctl.formats.journal import ALIGNMENT_DEFAULT, VERSION_PADDING, file_name, journal_id_of
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import I64_MAX
from bkctl.pace import Pace

if TYPE_CHECKING:
    from bkctl.checks.digests import DigestChecker, DigestMismatchAt

_REUSED_HINT: Final = "or the file was reused (journalReuseFiles), and the bytes behind are from its earlier use"


@dataclass
class JournalCheck:
    """The result of checking one journal file.

    The records are sound up to byte `good_end`, where they end because of `state`; `behind` describes the bytes after
    it. `mark` is the offset at which a last mark points into the file. `mismatch_count` entries, here or in files that
    were checked before, do not match their digests. `problem` describes every fault in words (None: sound); `error` is
    the damage.
    """

    path: Path
    journal_id: int | None
    scoped: bool = False
    version: int | None = None
    size_bytes: int | None = None
    state: ScanState = ScanState.MISSING
    good_end: int | None = None
    record_count: int = 0
    entry_count: int = 0
    behind: Behind = field(default_factory=Behind)
    mark: int | None = None
    mismatch_count: int = 0
    problem: str | None = None
    error: BkctlError | None = None

    @property
    def finding_count(self) -> int:
        """Return the number of digest mismatches, or 1 for another fault; damage does not count."""
        return self.mismatch_count or int(self.error is None and self.problem is not None)

    @property
    def is_sound(self) -> bool:
        """Return whether the file is whole, without faults."""
        return self.error is None and self.problem is None and self.state is not ScanState.TORN


def check_journals(
    directories: BookieDirectories,
    files: Iterable[Path] | None = None,
    digests: DigestChecker | None = None,
    *,
    pace: Pace | None = None,
) -> Iterator[JournalCheck]:
    """Yield the check of each journal file (`files`, else all in the directories) and of each missing file.

    Each last mark must name an existing journal, and a place between two of its records. Missing files are reported
    only without `files`. `digests` checks the entries. `pace` bounds the bytes and records read. Raises NotFound for a
    missing directory.
    """
    chosen = [file.path for file in directories.journals()] if files is None else list(files)
    latest = LastMarks([], [])
    with suppress(NotFound):
        latest = latest_marks(directories)
    for damaged, error in latest.damaged:
        yield JournalCheck(damaged, None, state=ScanState.UNREADABLE, problem=_problem(error), error=error)
    marked = [(path, mark) for mark in latest.marks if (path := _marked_file(directories, mark)) is not None]
    by_directory: dict[Path, list[Path]] = {}
    for path in [*chosen, *(path for path, _ in marked if files is None)]:
        by_directory.setdefault(path.parent, []).append(path)
    for parent, paths in by_directory.items():
        marks_here = [(path, mark) for path, mark in marked if path.parent.resolve() == parent.resolve()]
        ids = sorted({found for path in paths if (found := journal_id_of(path.name)) is not None})
        marked_id = min((mark.mark.journal_id for _, mark in marks_here), default=I64_MAX)
        if files is None:
            yield from _missing_in(marks_here)
            for journal_id, problem in missing_journals(ids, marked_id):
                yield JournalCheck(parent / file_name(journal_id), journal_id, problem=problem)
        for path in dict.fromkeys(paths):
            offsets = [mark.mark.offset for marked_path, mark in marks_here if marked_path.name == path.name]
            check = check_journal(path, offsets, digests, pace=pace)
            if check is not None:
                lacks_header = not 0 < (check.good_end or 0) <= (check.size_bytes or 0)
                if lacks_header and marked_id < (check.journal_id or 0) < ids[-1]:
                    check.problem = check.problem or "has no header, but later journals follow: its records may be lost"
                yield check


def _marked_file(directories: BookieDirectories, mark: JournalMark) -> Path | None:
    """Return the path of the journal that `mark` names; None if it names none, or its directory is unknown."""
    if mark.mark.journal_id == 0:
        return None
    name = file_name(mark.mark.journal_id)
    places = list(dict.fromkeys(current_of(directory) for directory in directories.journal_dirs))
    indexes = journal_indexes(directories)
    for current in places:
        if indexes.get(current.resolve()) == mark.journal_index:
            return current / name
    there = [current / name for current in places if (current / name).is_file()]
    if there:
        return there[0]
    # Ledger directories given without journal directories lack no journal.
    journals = list(dict.fromkeys(file.path.parent for file in directories.journals() if not file.scoped))
    return journals[0] / name if len(journals) == 1 else None


def _missing_in(marks: list[tuple[Path, JournalMark]]) -> Iterator[JournalCheck]:
    """Yield a check for each missing file that `marks` name."""
    for path, mark in marks:
        if not path.is_file():
            problem = f"missing, but {mark.file.path} points at its byte {mark.mark.offset}"
            yield JournalCheck(path, mark.mark.journal_id, mark=mark.mark.offset, problem=problem)


def check_journal(
    path: Path, marks: Iterable[int] = (), digests: DigestChecker | None = None, *, pace: Pace | None = None
) -> JournalCheck | None:
    """Check one journal file; last marks point at its bytes `marks`. Return None if the file was just deleted."""
    check = JournalCheck(path, journal_id_of(path.name), scoped=path.parent.name == SCOPED_DIRECTORY)
    wanted = set(marks)
    pace = pace or Pace()
    borders: set[int] = set()
    mismatch: DigestMismatchAt | None = None

    def note(found: Iterable[DigestMismatchAt]) -> None:
        nonlocal mismatch
        for each in found:
            if not _is_torn(each, reader):
                mismatch = mismatch or each
                check.mismatch_count += 1

    try:
        with JournalReader.open(path) as reader:
            check.version, check.size_bytes = reader.version, reader.size()
            borders.add(reader.header_size)
            try:
                position = 0
                for batch in reader.batches():
                    pace.take(reader.position - position, len(batch))
                    position = reader.position
                    check.record_count += len(batch)
                    if batch.type is RecordType.ENTRY:
                        check.entry_count += len(batch)
                    note(() if digests is None else digests.check_batch(batch, reader.name))
                    if wanted:
                        borders |= wanted.intersection(batch.offsets)
                        borders.add(reader.position)
            except (Corrupt, Unsupported) as error:
                check.error = error
            check.good_end, check.state = reader.position, reader.end
            borders.add(reader.position)
            if check.error is not None:
                check.problem = _problem(check.error)
                check.behind = reader.look_behind(reader.position)
                if reader.version >= VERSION_PADDING and reader.position % ALIGNMENT_DEFAULT == 0 < check.record_count:
                    check.problem += f"; {_REUSED_HINT}"
            elif reader.end is ScanState.TORN:
                check.behind = Behind(max(0, check.size_bytes - reader.position))
            note(() if digests is None else digests.late_findings())
            problems = [check.problem] if check.problem else []
            if mismatch is not None:
                more = f"; {check.mismatch_count - 1:,} more do not" if check.mismatch_count > 1 else ""
                problems.append(str(mismatch).removeprefix(f"{path}: ") + more)
            for offset in sorted(wanted):
                check.mark = offset
                problem = _mark_problem(reader, check, offset, borders)
                problems += [] if problem is None else [problem]
            check.problem = "; ".join(problems) or None
    except NotFound:
        return None
    except BkctlError as error:
        check.state, check.error, check.problem = ScanState.UNREADABLE, error, _problem(error)
        check.mark = next(iter(wanted), None)
    return check


def _is_torn(mismatch: DigestMismatchAt, reader: JournalReader) -> bool:
    """Return True if a crash explains the mismatch. `reader` is open on a journal that may be its own."""
    if mismatch.where == reader.name:
        return reader.may_be_torn(mismatch.offset)
    with suppress(BkctlError), JournalReader.open(mismatch.where) as other:
        return other.may_be_torn(mismatch.offset)
    return False


def _problem(error: BkctlError) -> str:
    """Return the message of an error without the file's name."""
    return f"{error.problem} at byte {error.offset}" if isinstance(error, CorruptRecord) else error.message


def _mark_problem(reader: JournalReader, check: JournalCheck, offset: int, borders: set[int]) -> str | None:
    """Return the problem of a mark at byte `offset`; None if a replay can begin there."""
    assert check.good_end is not None
    if (lost := reader.mark_problem(offset)) is not None:
        return lost
    if offset in borders or offset == 0:
        return None
    if offset > check.good_end:
        # Java's replay leaves the mark behind the zeros or the torn record at which it stopped.
        return None if check.error is None else f"the last mark points at byte {offset}, behind the damage"
    if _is_border(reader, offset):
        return None
    return f"the last mark points at byte {offset}, inside a record"


def _is_border(reader: JournalReader, offset: int) -> bool:
    """Return True if a record or padding begins or ends at byte `offset`."""
    with suppress(Corrupt, Unsupported):
        for record in reader.records(padding=True):
            if record.offset >= offset:
                return record.offset == offset
            if reader.position >= offset:
                return reader.position == offset
    return reader.position == offset
