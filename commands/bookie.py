"""`bkctl bookie`: one bookie, and its files and indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import UsageError
from bkctl.ids import LedgerId

from ._command import Run, command, group
from ._options import ManyLedgers, number_option
from ._output import Column, Columns, Kind, Output
from ._records import DirOption, ShowSecretsOption

if TYPE_CHECKING:
    from bkctl.storage.directories import BookieDirectories, BookieFile
    from bkctl.storage.listing import EntryLocation, Gap, LedgerIndex

app = group()
index_app = group("Ledger indexes of a bookie: which entries are here, and where.")
app.add_typer(index_app, name="index")


# --- start ----------------------------------------------------------------------------------------------------------

STARTED_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("ADDRESS", "address", lambda bookie: "{}:{}".format(*bookie.address)),
    Column("PID", "pid", lambda _: os.getpid(), Kind.INTEGER),
    key="bookieId",
)


@command(app, "start", connects=True)
def start(run: Run) -> None:
    """Run a bookie in the foreground, as `--conf bk_server.conf` says; SIGTERM or Ctrl-C stops it cleanly.

    It is printed once it serves; what happens to it is on stderr.
    """
    from bkctl.bookie.server import Bookie, serve

    config = run.config().with_changes(metadata_service_uri=run.connection().uri)
    run.log()

    def started(bookie: Bookie) -> None:
        run.show(bookie, STARTED_COLUMNS)

    run.complete(serve(config, started=started))


# --- files ----------------------------------------------------------------------------------------------------------


def _number(file: BookieFile) -> int | None:
    return file.id if isinstance(file.id, int) else None


def _ledger(file: BookieFile) -> LedgerId | None:
    return file.id if isinstance(file.id, LedgerId) else None


def _id_text(file: BookieFile) -> str | None:
    return None if file.id is None else str(file.id)


def _hex(file: BookieFile) -> str | None:
    number = _number(file)
    return None if number is None else f"{number:x}"


FILE_COLUMNS = Columns(
    Column("KIND", "kind", lambda file: file.kind.value),
    Column("ID", "id", _number, Kind.INTEGER),
    Column("HEX", "idHex", _hex),
    Column(None, "ledger", _ledger, Kind.LEDGER),
    Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN),
    Column("SIZE", "size", "size", Kind.SIZE),
    Column("MODIFIED", "mtime", "mtime_ms", Kind.TIME),
    Column("FILE", "file", lambda file: str(file.path), flexible=True),
    key="file",
)
# An index file's id is a ledger, which JSON has in its own fields and a table in the column of ids.
FILE_TABLE_COLUMNS = Columns(
    FILE_COLUMNS.columns[0], Column("ID", "id", _id_text), *FILE_COLUMNS.columns[2:], key="file"
)


@command(app, "files")
def files(
    run: Run,
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="The bookie's directories (default: those of --conf).")
    ] = None,
    directories: DirOption = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", metavar="KIND", help="journal, entryLog, index, rocksdb, cookie … or all; repeatable."),
    ] = None,
) -> None:
    """List a bookie's files: journals, entry logs, indexes, marks, cookies."""
    kinds = _kinds(kind or [])
    found = run.directories([*(places or ()), *(directories or ())]).files()
    columns = FILE_TABLE_COLUMNS if run.output is Output.TABLE else FILE_COLUMNS
    run.render((file for file in found if not kinds or file.kind in kinds), columns)


def _kinds(texts: list[str]) -> frozenset[Any]:
    from bkctl.storage.directories import FileKind

    known = {each.value.lower(): each for each in FileKind}
    chosen = set()
    for text in texts:
        if text.lower() == "all":
            return frozenset()
        if text.lower() not in known:
            raise UsageError(f"--kind {text!r}: no such kind", hint=f"one of {', '.join(FileKind)}, all")
        chosen.add(known[text.lower()])
    return frozenset(chosen)


# --- index show -----------------------------------------------------------------------------------------------------


class LocationRow(NamedTuple):
    """An entry's place."""

    ledger: LedgerId
    entry: EntryLocation


LOCATION_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "entry.entry_id", Kind.INTEGER),
    Column("LOG", "logId", "entry.log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: f"{row.entry.log_id:x}"),
    Column("OFFSET", "offset", "entry.offset", Kind.INTEGER),
    Column(None, "location", "entry.location", Kind.INTEGER),
    key="entryId",
)


class GapRow(NamedTuple):
    """A run of entries that are not here."""

    ledger: LedgerId
    gap: Gap


GAP_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FIRST ENTRY", "firstEntryId", "gap.first_entry_id", Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "gap.last_entry_id", Kind.INTEGER),
    Column("ENTRIES", "entryCount", lambda row: row.gap.last_entry_id - row.gap.first_entry_id + 1, Kind.INTEGER),
    key="firstEntryId",
)


class MetaRow(NamedTuple):
    """What an index says about its ledger."""

    source: LedgerIndex
    explicit_lac: int | None
    entry_count: int
    last_entry_id: int


META_COLUMNS = Columns(
    Column("LEDGER", "ledger", "source.ledger", Kind.LEDGER),
    Column("FENCED", "fenced", "source.fenced", Kind.BOOLEAN),
    Column("EXPLICIT LAC", "explicitLac", "explicit_lac", Kind.INTEGER),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER),
    Column("FILE", "file", lambda row: str(row.source.path), flexible=True),
    key="ledger",
)
MASTER_KEY = Column("MASTER KEY", "masterKey", lambda row: row.source.master_key.hex())


@command(index_app, "show")
def show(
    run: Run,
    ledgers: ManyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry id.")],
    directories: DirOption = None,
    meta: Annotated[
        bool, typer.Option("--meta", help="Show what the index says of the ledger instead of its entries.")
    ] = False,
    gaps: Annotated[
        bool, typer.Option("--gaps", help="Show the entries that are not here although later ones are.")
    ] = False,
    show_secrets: ShowSecretsOption = False,
) -> None:
    """Show where a bookie has a ledger's entries: index files and the databases of DbLedgerStorage."""
    if meta and gaps:
        raise UsageError("--meta and --gaps are given", hint="give one of them")
    given = run.directories(directories)
    if meta:
        columns = META_COLUMNS.and_also(MASTER_KEY) if show_secrets else META_COLUMNS
        run.render(_metas(given, ledgers), columns)
    elif gaps:
        run.render(_gaps(given, ledgers), GAP_COLUMNS)
    else:
        run.render(_locations(given, ledgers, entry), LOCATION_COLUMNS)


def _locations(given: BookieDirectories, ledgers: list[LedgerId], entry_id: int | None) -> Iterator[LocationRow]:
    from bkctl.storage.listing import open_ledger_index

    for ledger in ledgers:
        with open_ledger_index(given, ledger) as index:
            for each in index.locations():
                if entry_id is None or each.entry_id == entry_id:
                    yield LocationRow(ledger, each)


def _gaps(given: BookieDirectories, ledgers: list[LedgerId]) -> Iterator[GapRow]:
    from bkctl.storage.listing import open_ledger_index

    for ledger in ledgers:
        with open_ledger_index(given, ledger) as index:
            for gap in index.gaps():
                yield GapRow(ledger, gap)


def _metas(given: BookieDirectories, ledgers: list[LedgerId]) -> Iterator[MetaRow]:
    from bkctl.storage.listing import open_ledger_index

    for ledger in ledgers:
        with open_ledger_index(given, ledger) as index:
            yield MetaRow(index, index.explicit_lac(), *index.extent())
