"""The journals of a bookie: summaries, last marks, and the files that a restart replays.

Source: Journal, LastMarkCommand, BookieImpl.readJournal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, FileKind, current_of, describe
from bkctl.files.journal import JournalReader
from bkctl.files.status import read_small
from bkctl.formats.journal import VERSION_PADDING, LogMark, journal_id_of
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.formats.record import RecordType
from bkctl.ids import LedgerId


class JournalSummary(NamedTuple):
    """A journal file and its version; `error` is the reason if the version is unknown."""

    file: BookieFile
    version: int | None
    error: BkctlError | None = None


def journal_summaries(directories: BookieDirectories) -> Iterator[JournalSummary]:
    """Yield the journal files in order; skip a file that a running bookie deletes meanwhile.

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
    """The last mark of one journal directory, the highest of all ledger directories, and the file that has it."""

    journal_index: int
    mark: LogMark
    file: BookieFile


class LastMarks(NamedTuple):
    """The last mark of each journal directory in the order of their indexes, and damaged files with their errors."""

    marks: list[JournalMark]
    damaged: list[tuple[Path, BkctlError]]


def latest_marks(directories: BookieDirectories) -> LastMarks:
    """Return the last mark of each journal directory; a bookie ignores damaged files, and so do these marks.

    Raises NotFound if no directory has a last mark file.
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
        raise NotFound(f"No lastMark found in {where}", hint="give the ledger directories")
    return LastMarks([latest[index] for index in sorted(latest)], damaged)


def files_after_marks(directories: BookieDirectories, files: Iterable[Path]) -> dict[Path, int]:
    """Return the journal files that a restart would replay, each with the byte to begin at (0: the file's beginning).

    A file belongs to the mark of its own journal directory, or to the only mark. Raises NotFound without a mark, the
    error of the first damaged mark if no mark is readable, UsageError if several marks might count.
    """
    latest = latest_marks(directories)
    if not latest.marks:
        raise latest.damaged[0][1]
    marks = {mark.journal_index: mark.mark for mark in latest.marks}
    index_of = journal_indexes(directories)
    starts: dict[Path, int] = {}
    for path in files:
        if path.parent.name == SCOPED_DIRECTORY:
            continue  # A clean stop set it aside: ledger storage has all of its entries.
        mark = next(iter(marks.values()))
        if len(marks) > 1:
            index = index_of.get(path.resolve().parent, -1)
            if index not in marks:
                raise UsageError(f"{len(marks)} last marks may apply to {path}", hint="use --conf bk_server.conf")
            mark = marks[index]
        journal_id = journal_id_of(path.name)
        if journal_id is None or journal_id > mark.journal_id:
            starts[path] = 0
        elif journal_id == mark.journal_id:
            starts[path] = mark.offset
    return starts


def journal_indexes(directories: BookieDirectories) -> dict[Path, int]:
    """Return the known journal directories (each `current`) with their indexes.

    Directories that are given in all roles get their index from the bookie's cookie, if they stand at the paths that
    it names. (A copy of the directories stands elsewhere; the named paths may be another bookie's.)
    """
    currents = [current_of(directory).resolve() for directory in directories.journal_dirs]
    if directories.journal_dirs and directories.journal_dirs != directories.ledger_dirs:
        return {current: index for index, current in enumerate(currents) if currents.count(current) == 1}
    from bkctl.formats.metadata import Cookie

    found: dict[Path, int] = {}
    for file in directories.cookies():
        with suppress(BkctlError, OSError):
            for index, name in enumerate(Cookie.parse(file.path.read_bytes(), str(file.path)).journal_dirs):
                named = current_of(Path(name)).resolve()
                if named in currents:
                    found[named] = index
    return found


@dataclass
class JournalStatistics:
    """The composition of a journal file. Sizes include the size fields of records and both fields of padding.

    `group_count` is the number of groups that were written and synced together, as far as padding separates them (None
    before version 5): a group that happens to end at the alignment counts with the next. `good_end` is the end of the
    last sound record; `error` is the damage behind it.
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
        """Return the creation time that the id encodes, in ms since the epoch; None if the id is not a time.

        Exact for the first file of a directory; later ids count up from it.
        """
        found = self.file.id
        return found if isinstance(found, int) and 1 << 40 <= found <= self.file.mtime_ms + 86_400_000 else None

    @property
    def padding_ratio(self) -> float | None:
        """Return the share of padding in the bytes behind the header; None if the file ends there."""
        written = self.record_bytes + self.padding_bytes
        return self.padding_bytes / written if written else None

    @property
    def records_per_group(self) -> float | None:
        """Return the mean number of records in a group; None without groups."""
        return self.record_count / self.group_count if self.group_count else None


def journal_statistics(path: Path) -> JournalStatistics | None:
    """Read a journal up to its end or damage and return its composition; None if the file was just deleted."""
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
    has_groups = reader.version >= VERSION_PADDING
    if has_groups:
        found.group_count = found.group_bytes_max = 0
    #: The beginning of the group, and of its next record.
    start = expected = reader.header_size

    def end_group(end: int) -> None:
        """Count the group whose records were counted; its padding ends at byte `end`."""
        nonlocal start
        if end > start:
            found.group_count = (found.group_count or 0) + 1
            found.group_bytes_max = max(found.group_bytes_max or 0, end - start)
            found.padding_count += end > expected
            found.padding_bytes += end - expected
            start = end

    try:
        for batch in reader.batches():
            size_bytes = 4 * len(batch) + sum(batch.sizes)
            found.counts[batch.type] += len(batch)
            found.type_bytes[batch.type] += size_bytes
            found.record_count += len(batch)
            found.record_bytes += size_bytes
            found.ledgers.update(batch.ledgers)
            for (scope_id, ledger_id), size in batch.sizes_by_ledger().items():
                found.ledger_bytes[LedgerId(scope_id, ledger_id)] += size
            for offset, size in zip(batch.offsets, batch.sizes, strict=True) if has_groups else ():
                if offset != expected:
                    end_group(offset)
                expected = offset + 4 + size
    except (Corrupt, Unsupported) as error:
        found.error = error
    if has_groups:
        end_group(reader.position)
