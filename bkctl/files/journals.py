"""The journals of a bookie: summaries, last marks, and the files that a restart replays.

Source: Journal, LastMarkCommand, BookieImpl.readJournal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, BookieFile, current_of
from bkctl.files.journal import JournalReader
from bkctl.files.status import read_small
from bkctl.formats.journal import LogMark, journal_id_of
from bkctl.formats.names import SCOPED_DIRECTORY


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
