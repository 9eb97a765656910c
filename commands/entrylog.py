"""`bkctl entrylog`: entry log files of a bookie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import BkctlError, Corrupt, Unsupported

from ._command import Run, command, group
from ._output import Column, Columns, Kind
from ._records import DirOption, Records, print_records, raise_first
from .journal import file_key

if TYPE_CHECKING:
    from bkctl.formats.record import Record
    from bkctl.storage.directories import BookieDirectories
    from bkctl.storage.listing import EntryLogSummary, LedgerInLog, RecordFilter

app = group()


class Sort(StrEnum):
    """The order of a list of logs."""

    ID = "id"
    SIZE = "size"
    AGE = "age"


_SORT_KEYS: dict[Sort, Callable[[Any], int]] = {
    Sort.SIZE: lambda summary: -summary.file.size,
    Sort.AGE: lambda summary: summary.file.mtime_ms,
}

LOG_COLUMNS = Columns(
    Column("LOG", "logId", "file.id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: f"{row.file.id:x}"),
    Column("SCOPED", "scoped", "file.scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("LEDGERS", "ledgersCount", "ledgers_count", Kind.INTEGER),
    Column(None, "ledgersMapOffset", "ledgers_map_offset", Kind.INTEGER),
    Column("SIZE", "size", "file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True),
    key=Column("LOG", "logId", lambda row: file_key(row.file)),
)


@command(app, "list")
def list_logs(
    run: Run,
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Ledger directories (default: those of --conf).")
    ] = None,
    directories: DirOption = None,
    sort: Annotated[Sort, typer.Option("--sort", metavar="ORDER", help="By id, size or age.")] = Sort.ID,
) -> None:
    """List the entry logs: id, header version, ledgers in its map (none while a log is open), size."""
    from bkctl.storage.listing import entry_log_summaries

    errors: list[BkctlError] = []

    def rows() -> Iterator[EntryLogSummary]:
        found = entry_log_summaries(run.directories([*(places or ()), *(directories or ())]))
        for summary in found if sort is Sort.ID else sorted(found, key=_SORT_KEYS[sort]):
            if summary.error is not None:
                errors.append(summary.error)
            yield summary

    run.render(rows(), LOG_COLUMNS)
    raise_first(run, errors)


class ShareRow(NamedTuple):
    """A ledger's share of one log."""

    path: Path
    log_id: int | None
    share: LedgerInLog


SHARE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "share.ledger", Kind.LEDGER),
    Column("BYTES", "size", "share.size_bytes", Kind.INTEGER),
    Column("LOG", "logId", "log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: None if row.log_id is None else f"{row.log_id:x}"),
    Column("FROM MAP", "fromLedgersMap", "share.from_map", Kind.BOOLEAN),
    Column("FILE", "file", lambda row: str(row.path), flexible=True),
    key="ledger",
)

LogNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOG",
        help="Entry logs: decimal or 0x id, scoped/ID, file name, path, directory (default: all of --dir or --conf).",
    ),
]


@command(app, "show")
def show(run: Run, names: LogNames = None, directories: DirOption = None) -> None:
    """Show the ledgers of entry logs and their bytes, from the ledgers map, or by a scan where there is none."""
    from bkctl.storage.entry_log import EntryLogReader
    from bkctl.storage.listing import ledgers_in_log

    errors: list[BkctlError] = []

    def rows() -> Iterator[ShareRow]:
        for path in _logs(run, names, directories):
            try:
                with EntryLogReader.open(path) as reader:
                    for share in ledgers_in_log(reader):
                        yield ShareRow(path, reader.log_id, share)
            except (Corrupt, Unsupported) as error:
                errors.append(error)

    with run.working("Reading entry logs"):
        run.render(rows(), SHARE_COLUMNS)
    raise_first(run, errors)


@command(app, "read")
def read(run: Run, records: Records, names: LogNames = None, directories: DirOption = None) -> None:
    """Print the records of entry logs.

    What stands before damage is printed, then the damage is reported (exit code 7).
    """
    with run.working("Reading entry logs"):
        print_records(run, _files(_logs(run, names, directories), records.filter()), "logId", records)


def _logs(run: Run, names: list[str] | None, directories: list[Path] | None) -> list[Path]:
    given = run.directories(directories, needed=not names)
    if not names:
        return [file.path for file in given.entry_logs()]
    return [path for name in names for path in _logs_named(given, name)]


def _logs_named(given: BookieDirectories, name: str) -> list[Path]:
    from bkctl.storage.directories import BookieDirectories

    if Path(name).is_dir():
        return [file.path for file in BookieDirectories.at(name).entry_logs()]
    return [given.resolve_entry_log(name)]


def _files(paths: list[Path], chosen: RecordFilter) -> Iterator[tuple[Path, int | None, Iterator[Record]]]:
    from bkctl.formats.entry_log import log_id_of

    for path in paths:
        yield path, log_id_of(path.name), _records(path, chosen)


def _records(path: Path, chosen: RecordFilter) -> Iterator[Record]:
    from bkctl.storage.entry_log import EntryLogReader

    with EntryLogReader.open(path) as reader:
        yield from chosen.of_entry_log(reader)
