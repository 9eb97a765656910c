"""A bookie's journals as a whole: at a glance, the last marks, what a restart replays, checks and statistics.

Source: Journal, LastMarkCommand, BookieImpl.readJournal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from bkctl.errors import BkctlError, Corrupt, CorruptRecord, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, FileKind, current_of, describe
from bkctl.files.journal import Behind, JournalEnd, JournalReader
from bkctl.files.status import read_small
from bkctl.formats.journal import ALIGNMENT_DEFAULT, VERSION_PADDING, LogMark, file_name, journal_id_of
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId

#: Bookies of 4.1 and before named each journal by its time.
_GAP_MAX: Final = 1000
_REUSED_HINT: Final = "or the file was taken again (journalReuseFiles), and what follows is from its former life"


class JournalSummary(NamedTuple):
    """A journal file and its version; `error` says why the version is not known."""

    file: BookieFile
    version: int | None
    error: BkctlError | None = None


def journal_summaries(directories: BookieDirectories) -> Iterator[JournalSummary]:
    """Yield the journal files in order; one that a running bookie deletes meanwhile is left out.

    Raises NotFound for a missing directory.
    """
    for file in directories.journals():
        try:
            with JournalReader.open(file.path) as reader:
                yield JournalSummary(file, reader.version)
        except NotFound:
            continue
        except BkctlError as error:
            yield JournalSummary(file, None, error)


# --- last marks -----------------------------------------------------------------------------------------------------


class JournalMark(NamedTuple):
    """The last mark of one journal directory, and the file that says so: the highest of all ledger directories."""

    journal_index: int
    mark: LogMark
    file: BookieFile


class LastMarks(NamedTuple):
    """The last mark of each journal directory, by its index; the files that do not count, and why."""

    marks: list[JournalMark]
    damaged: list[tuple[Path, BkctlError]]


def latest_marks(directories: BookieDirectories) -> LastMarks:
    """The last mark of each journal directory; damaged files do not count, as in a bookie.

    Raises NotFound when there is no file of a mark at all.
    """
    latest: dict[int, JournalMark] = {}
    damaged: list[tuple[Path, BkctlError]] = []
    for file in directories.last_marks():
        assert isinstance(file.id, int)
        try:
            mark = read_small(file.path, LogMark.parse)
        except NotFound:
            continue
        except BkctlError as error:
            damaged.append((file.path, error))
            continue
        known = latest.get(file.id)
        if known is None or mark > known.mark:
            latest[file.id] = JournalMark(file.id, mark, file)
    if not latest and not damaged:
        where = ", ".join(map(str, directories.ledger_dirs))
        raise NotFound(f"There is no lastMark in {where}", hint="give the ledger directories")
    return LastMarks([latest[index] for index in sorted(latest)], damaged)


def files_after_marks(directories: BookieDirectories, files: Iterable[Path]) -> dict[Path, int]:
    """Those journal files that a restart would replay, each with the byte to begin at (0: the file's beginning).

    A file belongs to the mark of its own journal directory where the directories are known as such and there are
    several, else to the only mark. Raises NotFound without any mark, what is wrong with it where none can be read,
    UsageError where several marks might count.
    """
    latest = latest_marks(directories)
    if not latest.marks:
        raise latest.damaged[0][1]
    marks = {each.journal_index: each.mark for each in latest.marks}
    index_of = _journal_indexes(directories)
    starts: dict[Path, int] = {}
    for path in files:
        if path.parent.name == SCOPED_DIRECTORY:
            continue  # Set aside by a clean stop: all of it is in ledger storage.
        mark = next(iter(marks.values()))
        if len(marks) > 1:
            index = index_of.get(path.resolve().parent, -1)
            if index not in marks:
                raise UsageError(f"{len(marks)} last marks might count for {path}", hint="use --conf bk_server.conf")
            mark = marks[index]
        journal_id = journal_id_of(path.name)
        if journal_id is None or journal_id > mark.journal_id:
            starts[path] = 0
        elif journal_id == mark.journal_id:
            starts[path] = mark.offset
    return starts


def _journal_indexes(directories: BookieDirectories) -> dict[Path, int]:
    """Where each journal directory's files are → its index, as far as that is known.

    Directories given in all roles alike do not tell which journal is which; their cookie does, if they stand where it
    says. (Copies of them do not, and what stands there is another bookie's matter.)
    """
    currents = [current_of(each).resolve() for each in directories.journal_dirs]
    if directories.journal_dirs and directories.journal_dirs != directories.ledger_dirs:
        return {each: index for index, each in enumerate(currents) if currents.count(each) == 1}
    from bkctl.formats.metadata import Cookie

    found: dict[Path, int] = {}
    for file in directories.cookies():
        with suppress(BkctlError, OSError):
            for index, name in enumerate(Cookie.parse(file.path.read_bytes(), str(file.path)).journal_dirs):
                named = current_of(Path(name)).resolve()
                if named in currents:
                    found[named] = index
    return found


# --- verify ---------------------------------------------------------------------------------------------------------


class JournalState(StrEnum):
    """What `verify` says of a journal; the values are the words of every output. The first four as JournalEnd."""

    END_OF_FILE = "endOfFile"
    ZEROS = "zeros"
    TORN = "torn"
    DAMAGED = "damaged"
    #: Of a version that no reader knows, or the disk does not give its header.
    UNREADABLE = "unreadable"
    #: A file that should be there: a mark names it, or its neighbours do.
    MISSING = "missing"


@dataclass
class JournalCheck:
    """What is known of one journal file.

    Its records are good up to byte `good_end`, where they end because of `state`; `behind` is what follows. `mark` is
    the offset at which a last mark points in it. `problem` says in words what is wrong, None if nothing is; `error` is
    the damage among it.
    """

    path: Path
    journal_id: int | None
    scoped: bool = False
    version: int | None = None
    size_bytes: int | None = None
    state: JournalState = JournalState.MISSING
    good_end: int | None = None
    record_count: int = 0
    entry_count: int = 0
    behind: Behind = field(default_factory=Behind)
    mark: int | None = None
    problem: str | None = None
    error: BkctlError | None = None


def check_journals(directories: BookieDirectories, files: Iterable[Path] | None = None) -> Iterator[JournalCheck]:
    """Yield what is known of each journal file (`files`, else all of the directories), and of those that are missing.

    Last marks are checked where there are some: each must name a journal that is there, and a place between two of
    its records. Raises NotFound for a missing directory.
    """
    chosen = [each.path for each in directories.journals()] if files is None else list(files)
    latest = LastMarks([], [])
    with suppress(NotFound):
        latest = latest_marks(directories)
    for damaged, error in latest.damaged:
        yield JournalCheck(damaged, None, state=JournalState.UNREADABLE, problem=_problem(error), error=error)
    marked = [(path, each) for each in latest.marks if (path := _marked_file(directories, each)) is not None]
    by_directory: dict[Path, list[Path]] = {}
    for path in [*chosen, *(path for path, _ in marked if files is None)]:
        by_directory.setdefault(path.parent, []).append(path)
    for parent, paths in by_directory.items():
        marks_here = [(path, each) for path, each in marked if path.parent.resolve() == parent.resolve()]
        if files is None:
            yield from _missing_in(parent, paths, marks_here)
        for path in dict.fromkeys(paths):
            offsets = [each.mark.offset for marked_path, each in marks_here if marked_path.name == path.name]
            check = check_journal(path, offsets)
            if check is not None:
                yield check


def _marked_file(directories: BookieDirectories, mark: JournalMark) -> Path | None:
    """Where the journal that `mark` names is, or should be; None for a mark that names none, or nobody knows where."""
    if mark.mark.journal_id == 0:
        return None
    name = file_name(mark.mark.journal_id)
    places = list(dict.fromkeys(current_of(each) for each in directories.journal_dirs))
    indexes = _journal_indexes(directories)
    for current in places:
        if indexes.get(current.resolve()) == mark.journal_index:
            return current / name
    there = [each / name for each in places if (each / name).is_file()]
    if there:
        return there[0]
    # Ledger directories, given without those of the journals, have no journal to miss.
    journals = list(dict.fromkeys(each.path.parent for each in directories.journals() if not each.scoped))
    return journals[0] / name if len(journals) == 1 else None


def _missing_in(parent: Path, paths: list[Path], marks: list[tuple[Path, JournalMark]]) -> Iterator[JournalCheck]:
    """The files that `marks` name in `parent` and that are not there, and those that the others leave out."""
    for path, each in marks:
        if not path.is_file():
            problem = f"{each.file.path} points at it, byte {each.mark.offset}, and it is not there"
            yield JournalCheck(path, each.mark.journal_id, mark=each.mark.offset, problem=problem)
    if not marks:
        return
    marked_id = min(each.mark.journal_id for _, each in marks)
    ids = sorted({found for path in paths if (found := journal_id_of(path.name)) is not None})
    for before, after in pairwise(ids):
        # A bookie counts its journals on one by one, and deletes them from the oldest on, up to the mark.
        if before >= marked_id and 1 < after - before <= _GAP_MAX:
            names = [file_name(each) for each in range(before + 1, after)]
            missing = f"{names[0]} is" if len(names) == 1 else f"{names[0]} to {names[-1]} are"
            problem = f"{missing} not there, although {file_name(before)} and {file_name(after)} are"
            yield JournalCheck(parent / names[0], before + 1, problem=problem)


def check_journal(path: Path, marks: Iterable[int] = ()) -> JournalCheck | None:
    """What is known of one journal file, to whose bytes `marks` last marks point; None where it went away meanwhile."""
    check = JournalCheck(path, journal_id_of(path.name), scoped=path.parent.name == SCOPED_DIRECTORY)
    wanted = set(marks)
    borders: set[int] = set()
    try:
        with JournalReader.open(path) as reader:
            check.version, check.size_bytes = reader.version, reader.size()
            borders.add(reader.header_size)
            try:
                for batch in reader.batches():
                    check.record_count += len(batch)
                    if batch.types is None or batch.types[0] is RecordType.ENTRY:
                        check.entry_count += len(batch)
                    if wanted:
                        borders |= wanted.intersection(batch.offsets)
                        borders.add(reader.position)
            except (Corrupt, Unsupported) as error:
                check.error = error
            check.good_end, check.state = reader.position, JournalState(reader.end.value)
            borders.add(reader.position)
            if check.error is not None:
                check.problem = _problem(check.error)
                check.behind = reader.look_behind(reader.position)
                if reader.version >= VERSION_PADDING and reader.position % ALIGNMENT_DEFAULT == 0 < check.record_count:
                    check.problem += f"; {_REUSED_HINT}"
            elif reader.end is JournalEnd.TORN:
                check.behind = Behind(max(0, check.size_bytes - reader.position))
            for offset in sorted(wanted):
                check.mark = offset
                problem = _mark_problem(reader, check, offset, borders)
                if problem is not None:
                    check.problem = problem if check.problem is None else f"{check.problem}; {problem}"
    except NotFound:
        return None
    except BkctlError as error:
        check.state, check.error, check.problem = JournalState.UNREADABLE, error, _problem(error)
        check.mark = next(iter(wanted), None)
    return check


def _problem(error: BkctlError) -> str:
    """What is wrong, without the file's name."""
    return f"{error.problem} at byte {error.offset}" if isinstance(error, CorruptRecord) else error.message


def _mark_problem(reader: JournalReader, check: JournalCheck, offset: int, borders: set[int]) -> str | None:
    """What is wrong with a mark at `offset`; None where a replay begins there as it should."""
    assert check.good_end is not None
    assert check.size_bytes is not None
    if offset in borders or offset == 0:
        return None
    if offset > check.size_bytes:
        return f"the last mark points at byte {offset}, behind its end at byte {check.size_bytes}"
    if offset > check.good_end:
        # Java's replay leaves the mark behind the zeros, or the part of a record, that told it to stop.
        return None if check.error is None else f"the last mark points at byte {offset}, behind the damage"
    if _is_border(reader, offset):
        return None
    return f"the last mark points at byte {offset}, inside a record"


def _is_border(reader: JournalReader, offset: int) -> bool:
    """Whether a record or padding begins or ends at `offset`."""
    with suppress(Corrupt, Unsupported):
        for record in reader.records(padding=True):
            if record.offset >= offset:
                return record.offset == offset
            if reader.position >= offset:
                return reader.position == offset
    return reader.position == offset


# --- statistics -----------------------------------------------------------------------------------------------------


@dataclass
class JournalStatistics:
    """What a journal file is made of. Records count with their size fields; `padding_bytes` with both of theirs.

    `group_count` are the groups that were written and synced as one, as far as padding tells them apart (None before
    version 5): one that happens to end at the alignment counts with the next. `created_ms` is the time that the id
    means, in the first file of a directory; later ones count on from it.
    """

    file: BookieFile
    version: int | None = None
    record_count: int = 0
    record_bytes: int = 0
    padding_count: int = 0
    padding_bytes: int = 0
    group_count: int | None = None
    group_bytes_max: int | None = None
    good_end: int | None = None
    counts: Counter[RecordType] = field(default_factory=Counter)
    type_bytes: Counter[RecordType] = field(default_factory=Counter)
    ledgers: Counter[LedgerId] = field(default_factory=Counter)
    ledger_bytes: Counter[LedgerId] = field(default_factory=Counter)
    error: BkctlError | None = None

    @property
    def created_ms(self) -> int | None:
        """Milliseconds since the epoch; None where the id is no such time."""
        found = self.file.id
        return found if isinstance(found, int) and 1 << 40 <= found <= self.file.mtime_ms + 86_400_000 else None

    @property
    def padding_ratio(self) -> float | None:
        """Padding's part of all that was written behind the header; None where nothing was."""
        written = self.record_bytes + self.padding_bytes
        return self.padding_bytes / written if written else None

    @property
    def records_per_group(self) -> float | None:
        """How many records were synced together, on average."""
        return self.record_count / self.group_count if self.group_count else None


def journal_statistics(path: Path) -> JournalStatistics | None:
    """What a journal is made of, up to its damage if there is some: then `error` says so; None where it went away."""
    file = describe(FileKind.JOURNAL, journal_id_of(path.name), path, scoped=path.parent.name == SCOPED_DIRECTORY)
    if file is None:
        return None
    found = JournalStatistics(file)
    try:
        with JournalReader.open(path) as reader:
            found.version = reader.version
            _count(reader, found)
            found.good_end = reader.position
    except NotFound:
        return None
    except BkctlError as error:
        found.error = error
    return found


def _count(reader: JournalReader, found: JournalStatistics) -> None:
    groups = found.version is not None and found.version >= VERSION_PADDING
    expected = group_start = reader.header_size
    if groups:
        found.group_count = found.group_bytes_max = 0
    ledgers, ledger_bytes = found.ledgers, found.ledger_bytes

    def end_group(end: int) -> None:
        nonlocal group_start
        assert found.group_count is not None
        assert found.group_bytes_max is not None
        found.group_count += 1
        found.group_bytes_max = max(found.group_bytes_max, end - group_start)

    try:
        for batch in reader.batches():
            kind = RecordType.ENTRY if batch.types is None else batch.types[0]
            size_bytes = 4 * len(batch) + sum(batch.sizes)
            found.counts[kind] += len(batch)
            found.type_bytes[kind] += size_bytes
            found.record_count += len(batch)
            found.record_bytes += size_bytes
            ledgers.update(batch.ledgers)
            for (scope_id, ledger_id), size in batch.sizes_by_ledger().items():
                ledger_bytes[LedgerId(scope_id, ledger_id)] += size
            offsets = batch.offsets
            ends = [offset + 4 + size for offset, size in zip(offsets, batch.sizes, strict=True)]
            if groups:
                for previous_end, offset in zip([expected, *ends], offsets, strict=False):
                    if offset != previous_end:
                        end_group(offset)
                        found.padding_count += 1
                        found.padding_bytes += offset - previous_end
                        group_start = offset
            expected = ends[-1]
    except (Corrupt, Unsupported) as error:
        found.error = error
    if groups and reader.position > expected:
        end_group(reader.position)
        found.padding_count += 1
        found.padding_bytes += reader.position - expected
    elif groups and expected > group_start:
        end_group(expected)
