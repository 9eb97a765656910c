"""`bkctl bookie`: one bookie, and its files and indexes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bkctl.checks.findings import as_damage
from bkctl.columns import Column, Columns, Kind, iso_time
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.files.directories import BookieFile, FileKind
from bkctl.ids import LedgerId

from ..kit.columns import PlainRow, fields, with_hex
from ..kit.command import Run, command, group, object_of, rows_of, union
from ..kit.ledger_options import AnyLedgers
from ..kit.options import flag, number_option
from ..kit.records import Directories, DirOption, ShowSecretsOption
from ..kit.texts import words

if TYPE_CHECKING:
    from bkctl.files.index import BookieIndexes, EntryLocation, Gap, LedgerIndex

app = group()
index_app = group("Show, check and rebuild the ledger indexes of a bookie.")
app.add_typer(index_app, name="index")


STARTED_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("ADDRESS", "address", lambda bookie: "{}:{}".format(*bookie.address)),
    Column("PID", "pid", lambda _: os.getpid(), Kind.INTEGER),
    key="bookieId",
)


@command(app, "start", connects=True, prints=object_of(STARTED_COLUMNS))
def start(run: Run) -> None:
    """Run a bookie in the foreground.

    --conf names its configuration file. Prints the bookie once it serves; logs go to stderr. SIGTERM, SIGHUP or Ctrl-C
    stops it cleanly.

    $ bkctl bookie start --conf bk_server.conf
    """
    from bkctl.daemon import BookieDaemon, prepare_process

    config = run.access.config()
    connection = run.access.connection()
    config = config.with_changes(metadata_service_uri=connection.uri)
    security = run.access.security(connection)
    run.job.log()
    prepare_process()
    daemon = BookieDaemon(config, security)
    try:
        run.job.complete(daemon.run(started=lambda bookie: run.out.show(bookie, STARTED_COLUMNS)))
    finally:
        daemon.close()


def _detail_text(detail: dict[str, Any]) -> str:
    """Return a file's details for people: ids in hex, as in file names; directories are in JSON only."""
    parts = []
    for name, value in detail.items():
        if value is None or value is False or isinstance(value, list) or f"{name}Hex" in detail:
            continue
        if name.endswith("Hex"):
            name, value = name.removesuffix("Hex"), f"0x{value}"
        parts.append(name if value is True else f"{name} {value}")
    return ", ".join(parts)


FILE_COLUMNS = Columns(
    Column("KIND", "kind", lambda row: row.file.kind.value, Kind.WORD),
    *with_hex("ID", "id", lambda row: row.file.id if isinstance(row.file.id, int) else None),
    Column(None, "ledger", lambda row: row.file.id if isinstance(row.file.id, LedgerId) else None, Kind.LEDGER),
    Column("SCOPED", "scoped", "file.scoped", Kind.BOOLEAN),
    Column("SIZE", "size", "file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column("FILE", "file", lambda row: str(row.file.path)),
    Column("DETAIL", "detail", "detail", Kind.NESTED, flexible=True, spare=1, text=_detail_text),
    key="file",
)
# An index file's id is a ledger, which JSON has in its own fields and a table in the column of ids.
FILE_TABLE_COLUMNS = Columns(
    FILE_COLUMNS.columns[0],
    Column("ID", "id", lambda row: None if row.file.id is None else str(row.file.id)),
    *FILE_COLUMNS.columns[2:],
    key="file",
)


@command(app, "files", prints=rows_of(FILE_COLUMNS))
def files(
    run: Run,
    directories: Directories = (),
    kind: Annotated[
        list[str] | None, flag("--kind KIND", "journal, entryLog, index, rocksdb, cookie … or all; repeatable.")
    ] = None,
) -> None:
    """List the files of a bookie.

    Lists journals, entry logs, indexes, marks and cookies; files that are not the bookie's have the kind `unknown`.
    DETAIL shows what a file contains: format versions, a cookie's bookie, the position of a mark, the stored read-only
    state. Damaged files are reported after the list (exit code 7).

    $ bkctl bookie files /var/lib/bookkeeper
    $ bkctl bookie files --conf bk_server.conf
    """
    kinds = _kinds(kind or [])
    found = run.access.directories(directories).files()
    columns = run.out.table_columns(FILE_TABLE_COLUMNS, FILE_COLUMNS)
    run.out.render((_file_row(file, run.errors) for file in found if not kinds or file.kind in kinds), columns)


def _file_row(file: BookieFile, errors: list[BkctlError]) -> PlainRow:
    from bkctl.files.status import read_detail

    detail = None
    try:
        detail = read_detail(file)
    except NotFound:
        pass  # A running bookie deleted it meanwhile.
    except BkctlError as error:
        errors.append(error)
    if detail is not None and isinstance(updated := detail.get("updated"), int):
        detail = {**detail, "updated": iso_time(updated)}
    return PlainRow(file=file, detail=detail)


def _kinds(texts: list[str]) -> frozenset[Any]:
    known = {name: each for each in FileKind for name in (each.value.lower(), words(each.value))}
    chosen = set()
    for text in texts:
        if text.lower() == "all":
            return frozenset()
        if text.lower() not in known:
            raise UsageError(f"--kind {text!r}: no such kind", hint=f"one of {', '.join(FileKind)}, all")
        chosen.add(known[text.lower()])
    return frozenset(chosen)


class IndexRow(NamedTuple):
    """The place of an entry of a ledger in an index, or a run of entries that are not here."""

    ledger: LedgerId
    found: EntryLocation | Gap


LOCATION_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "found.entry_id", Kind.INTEGER),
    *with_hex("LOG", "logId", "found.log_id"),
    *fields(Kind.INTEGER, "found.", offset="OFFSET", location=None),
    key="entryId",
)
GAP_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.INTEGER, "found.", firstEntryId="FIRST ENTRY", lastEntryId="LAST ENTRY"),
    Column("ENTRIES", "entryCount", lambda row: row.found.last_entry_id - row.found.first_entry_id + 1, Kind.INTEGER),
    key="firstEntryId",
)


META_COLUMNS = Columns(
    Column("LEDGER", "ledger", "source.ledger", Kind.LEDGER),
    Column("FENCED", "fenced", "source.fenced", Kind.BOOLEAN),
    *fields(Kind.INTEGER, explicitLac="EXPLICIT LAC", entryCount="ENTRIES", lastEntryId="LAST ENTRY"),
    Column("FILE", "file", lambda row: str(row.source.path), flexible=True, spare=2),
    key="ledger",
)
MASTER_KEY = Column("MASTER KEY", "masterKey", "source.master_key", Kind.BINARY, text=bytes.hex)


@command(
    index_app,
    "show",
    prints=rows_of(LOCATION_COLUMNS, GAP_COLUMNS, union(META_COLUMNS, META_COLUMNS.and_also(MASTER_KEY))),
)
def show(
    run: Run,
    which: AnyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry id.")],
    directories: DirOption = None,
    meta: Annotated[bool, flag("--meta", "Show the ledger's record in the index instead of its entries.")] = False,
    gaps: Annotated[bool, flag("--gaps", "Show missing entries that have later ones.")] = False,
    show_secrets: ShowSecretsOption = False,
) -> None:
    """Show where a bookie has a ledger's entries.

    Reads index files and the databases of DbLedgerStorage. --meta without a ledger shows all ledgers that the bookie
    has.

    $ bkctl bookie index show 12 --conf bk_server.conf
    $ bkctl bookie index show --meta --conf bk_server.conf
    """
    from bkctl.files.index import BookieIndexes

    if meta and gaps:
        raise UsageError("--meta and --gaps are given", hint="give one of them")
    if which.ledgers is None and not meta:
        raise UsageError("No ledger is given", hint="name ledgers, or add --meta to see all that the bookie has")
    with BookieIndexes(run.access.directories(directories)) as indexes:
        if meta:
            ledgers = indexes.ledgers(which.scope_id) if which.ledgers is None else which.ledgers
            columns = META_COLUMNS.and_also(MASTER_KEY) if show_secrets else META_COLUMNS
            run.out.render(_metas(indexes, ledgers, run.errors, named=which.ledgers is not None), columns)
        elif gaps:
            run.out.render(_places(indexes, which.ledgers or [], methodcaller("gaps")), GAP_COLUMNS)
        else:
            find = methodcaller("locations") if entry is None else partial(_location, entry)
            run.out.render(_places(indexes, which.ledgers or [], find), LOCATION_COLUMNS)


def _places(
    indexes: BookieIndexes, ledgers: list[LedgerId], find: Callable[[LedgerIndex], Iterable[EntryLocation | Gap]]
) -> Iterator[IndexRow]:
    for ledger in ledgers:
        with indexes.open(ledger) as index:
            for place in find(index):
                yield IndexRow(ledger, place)


def _location(entry_id: int, index: LedgerIndex) -> list[EntryLocation]:
    from bkctl.files.index import EntryLocation

    location = index.location_of(entry_id)
    return [EntryLocation(entry_id, location)] if location else []


def _metas(
    indexes: BookieIndexes, ledgers: list[LedgerId], errors: list[BkctlError], *, named: bool
) -> Iterator[PlainRow]:
    for ledger in ledgers:
        try:
            found = indexes.open(ledger) if named else indexes.find(ledger)
            if found is None:
                continue
            with found as index:
                entry_count, last_entry_id = index.extent()
                lac = index.explicit_lac()
                row = PlainRow(source=index, explicit_lac=lac, entry_count=entry_count, last_entry_id=last_entry_id)
        except (Corrupt, Unsupported) as error:
            errors.append(error)
            continue
        except BkctlError as error:
            if named:
                raise
            errors.append(as_damage(error))
            continue
        yield row
