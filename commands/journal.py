"""`bkctl journal`: journal files and last marks of a bookie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.errors import BkctlError, UsageError

from ._command import Run, command, group
from ._output import Column, Columns, Kind
from ._records import DirOption, Records, ShowSecretsOption, print_records, raise_first

if TYPE_CHECKING:
    from bkctl.formats.record import Record
    from bkctl.storage.directories import BookieDirectories, BookieFile
    from bkctl.storage.listing import JournalSummary, RecordFilter

app = group()


def file_key(file: BookieFile) -> str:
    """The id that names the file again: a decimal, `scoped/5` in the scoped id space."""
    return f"scoped/{file.id}" if file.scoped else str(file.id)


JOURNAL_COLUMNS = Columns(
    Column("JOURNAL", "journalId", "file.id", Kind.INTEGER),
    Column("HEX", "journalIdHex", lambda row: f"{row.file.id:x}"),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("SIZE", "size", "file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column(None, "scoped", "file.scoped", Kind.BOOLEAN),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True),
    key=Column("JOURNAL", "journalId", lambda row: file_key(row.file)),
)


@command(app, "list")
def list_journals(
    run: Run,
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Journal directories (default: those of --conf).")
    ] = None,
    directories: DirOption = None,
) -> None:
    """List the journal files: id, version, size, time of the last write."""
    from bkctl.storage.listing import journal_summaries

    errors: list[BkctlError] = []

    def rows() -> Iterator[JournalSummary]:
        for summary in journal_summaries(run.directories([*(places or ()), *(directories or ())])):
            if summary.error is not None:
                errors.append(summary.error)
            yield summary

    run.render(rows(), JOURNAL_COLUMNS)
    raise_first(run, errors)


@command(app, "read")
def read(
    run: Run,
    records: Records,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOURNAL",
            help="Journals: decimal or 0x id, file name, path, or a directory (default: all of --dir or --conf).",
        ),
    ] = None,
    directories: DirOption = None,
    after_lastmark: Annotated[
        bool, typer.Option("--after-lastmark", help="Only what is behind the last mark: what a restart replays.")
    ] = False,
    show_secrets: ShowSecretsOption = False,
) -> None:
    """Print the records of journal files: entries, ledger keys, fences, explicit LACs.

    What stands before damage is printed, then the damage is reported (exit code 7).
    """
    given = run.directories(directories, needed=not names)
    files = [path for name in names or () for path in _journals_named(given, name)]
    if not names:
        files = [file.path for file in given.journals()]
    starts = _starts(given, files) if after_lastmark else dict.fromkeys(files, 0)
    print_records(run, _files(starts, records.filter()), "journalId", records, secrets=show_secrets)


def _journals_named(given: BookieDirectories, name: str) -> list[Path]:
    from bkctl.storage.directories import BookieDirectories

    if Path(name).is_dir():
        return [file.path for file in BookieDirectories.at(name).journals()]
    return [given.resolve_journal(name)]


def _starts(given: BookieDirectories, files: list[Path]) -> dict[Path, int]:
    """The files from the marked one on, and where to begin in each."""
    from bkctl.storage.listing import files_after_marks

    if not given.ledger_dirs:
        raise UsageError("--after-lastmark needs the ledger directories", hint="add --conf, or --dir for each")
    return files_after_marks(given, files)


def _files(starts: dict[Path, int], chosen: RecordFilter) -> Iterator[tuple[Path, int | None, Iterator[Record]]]:
    from bkctl.formats.journal import journal_id_of

    for path, start in starts.items():
        yield path, journal_id_of(path.name), _records(path, start, chosen)


def _records(path: Path, start: int, chosen: RecordFilter) -> Iterator[Record]:
    from bkctl.storage.journal import JournalReader

    with JournalReader.open(path) as reader:
        yield from chosen.of_journal(reader, start)


MARK_COLUMNS = Columns(
    Column("INDEX", "journalIndex", "journal_index", Kind.INTEGER),
    Column("JOURNAL", "journalId", "mark.journal_id", Kind.INTEGER),
    Column("HEX", "journalIdHex", lambda row: f"{row.mark.journal_id:x}"),
    Column("OFFSET", "offset", "mark.offset", Kind.INTEGER),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True),
    key="journalId",
)


@command(app, "lastmark")
def lastmark(
    run: Run,
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Ledger directories (default: those of --conf).")
    ] = None,
    directories: DirOption = None,
) -> None:
    """Show the last mark of each journal: everything before it is in ledger storage."""
    from bkctl.storage.listing import latest_marks

    run.render(latest_marks(run.directories([*(places or ()), *(directories or ())])), MARK_COLUMNS)
