"""`bkctl bookie start`, `files` and `check`, and `bkctl bookie index show` and `check`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.columns import Column, Columns, Kind, iso_time
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import PlainRow, fields, with_hex
from ..kit.command import Run, command, group, object_of, rows_of, union
from ..kit.ledger_options import LEDGERS_BY_OPTION, AnyLedgers, LedgersOrAll, scope_option
from ..kit.next_steps import next_column
from ..kit.options import DigestToCheck, LedgerPassword, ReadPace, combined, flag, number_option, option
from ..kit.records import Directories, DirOption, ShowSecretsOption
from ..kit.texts import counted, size_text, words
from ..kit.values import refuse_both

if TYPE_CHECKING:
    from bkctl.checks.digests import DigestChecker
    from bkctl.checks.findings import Counts, FindDeleted
    from bkctl.files.directories import BookieDirectories, BookieFile
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
    from bkctl.files.directories import FileKind

    known = {name: each for each in FileKind for name in (each.value.lower(), words(each.value))}
    chosen = set()
    for text in texts:
        if text.lower() == "all":
            return frozenset()
        if text.lower() not in known:
            raise UsageError(f"--kind {text!r}: no such kind", hint=f"one of {', '.join(FileKind)}, all")
        chosen.add(known[text.lower()])
    return frozenset(chosen)


#: The place of an entry of a ledger in an index; GAP_COLUMNS: a run of entries that are not here.
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
SECRET_META_COLUMNS = META_COLUMNS.and_also(
    Column("MASTER KEY", "masterKey", "source.master_key", Kind.BINARY, text=bytes.hex)
)
_SHOWN = rows_of(LOCATION_COLUMNS, GAP_COLUMNS, union(META_COLUMNS, SECRET_META_COLUMNS))


@command(index_app, "show", prints=_SHOWN)
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

    refuse_both("--meta", meta, "--gaps", gaps)
    if which.ledgers is None and not meta:
        raise UsageError("No ledger is given", hint="name ledgers, or add --meta to see all that the bookie has")
    with BookieIndexes(run.access.directories(directories)) as indexes:
        if meta:
            ledgers = indexes.ledgers(which.scope_id) if which.ledgers is None else which.ledgers
            columns = SECRET_META_COLUMNS if show_secrets else META_COLUMNS
            run.out.render(_metas(indexes, ledgers, run.errors, named=which.ledgers is not None), columns)
        elif gaps:
            run.out.render(_places(indexes, which.ledgers or [], methodcaller("gaps")), GAP_COLUMNS)
        else:
            find = methodcaller("locations") if entry is None else partial(_location, entry)
            run.out.render(_places(indexes, which.ledgers or [], find), LOCATION_COLUMNS)


def _places(
    indexes: BookieIndexes, ledgers: list[LedgerId], find: Callable[[LedgerIndex], Iterable[EntryLocation | Gap]]
) -> Iterator[PlainRow]:
    for ledger in ledgers:
        with indexes.open(ledger) as index:
            for place in find(index):
                yield PlainRow(ledger=ledger, found=place)


def _location(entry_id: int, index: LedgerIndex) -> list[EntryLocation]:
    from bkctl.files.index import EntryLocation

    location = index.location_of(entry_id)
    return [EntryLocation(entry_id, location)] if location else []


def _metas(
    indexes: BookieIndexes, ledgers: list[LedgerId], errors: list[BkctlError], *, named: bool
) -> Iterator[PlainRow]:
    from bkctl.checks.findings import as_damage

    for ledger in ledgers:
        try:
            found = indexes.open(ledger) if named else indexes.find(ledger)
            if found is None:
                continue
            with found as index:
                entry_count, last_entry_id = index.extent()
                lac = index.explicit_lac()
                row = PlainRow(source=index, explicit_lac=lac, entry_count=entry_count, last_entry_id=last_entry_id)
        except BkctlError as error:
            if named and not isinstance(error, Corrupt | Unsupported):
                raise
            errors.append(as_damage(error))
            continue
        yield row


_next_command = partial(next_column, "bookie check", lambda row: row.kind.value, ledger=lambda row: row.ledger)
FINDING_COLUMNS = Columns(
    Column("KIND", "kind", lambda row: row.kind.value, Kind.WORD),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
    *with_hex("LOG", "logId", "log_id"),
    *fields(Kind.INTEGER, offset="OFFSET", location=None),
    Column("REASON", "reason", "reason"),
    Column("FILE", "file", lambda row: str(row.path), flexible=True, spare=2),
    Column(None, "finding", "is_problem", Kind.BOOLEAN),
    _next_command(),
    key="ledger",
)


def _finding_columns(run: Run, given: BookieDirectories) -> Columns:
    """Return FINDING_COLUMNS, with the next commands for databases where the bookie has or should have them."""
    databases = run.access.names_databases or bool(given.rocksdbs())
    return FINDING_COLUMNS.changed(nextCommand={"source": _next_command(databases=databases).source})


LedgersToCheck = Annotated[
    LedgersOrAll,
    combined(
        lambda texts, scope: LedgersOrAll([LedgerId.parse(text, scope) for text in texts or ()] or None, scope),
        LEDGERS_BY_OPTION,
        scope_option("Only ledgers of this scope; the scope of bare ids."),
    ),
]


def _share(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)%|(0?\.[0-9]{1,9}|1)", text, re.ASCII)
    share = 0.0 if match is None else float(match[1]) / 100 if match[1] else float(match[2])
    if not 0 < share <= 1:
        raise UsageError(f"--sample {text!r}: not a share", hint="give 1%, 0.5% or 0.01")
    return share


Sample = Annotated[
    float | None,
    option(
        "--sample SHARE",
        "Check only this share of the index's entries (1%, 0.01), without a search of the logs.",
        parse=_share,
    ),
]


@command(app, "check", connects=True, prints=rows_of(FINDING_COLUMNS))
def check(
    run: Run,
    which: LedgersToCheck,
    digest: DigestToCheck,
    password: LedgerPassword,
    sample: Sample,
    seed: Annotated[int | None, number_option("--seed", "Seed of the choice of entries for --sample (default 0).")],
    pace: ReadPace,
    directories: Directories = (),
) -> None:
    """Check a bookie's indexes against its entry logs.

    Compares both ways, for every storage class; the bookie may run. Exit code 3 if there are findings, 7 if an index is
    damaged. Ledgers in the logs without an index (`unindexed`) are findings, unless the cluster of --conf or -u says
    that they were deleted; exit code 4 if a ledger of --ledger is in neither. A killed bookie may leave entries in its
    log that are in no index and were never acknowledged; they are findings (`notIndexed`), since lost entries look the
    same.

    $ bkctl bookie check --conf bk_server.conf
    $ bkctl bookie check --conf bk_server.conf --sample 1%
    """
    from bkctl.checks.check import IndexCheck

    if seed is not None and sample is None:
        raise UsageError("--seed needs --sample", hint="add --sample 1%")
    given = run.access.directories(directories).with_ledgers()
    logs = [file.path for file in given.entry_logs()] if digest.wanted else []
    digests = run.digest_checker(digest.digest_type, password, logs) if digest.wanted else None
    with run.job.working("Checking", unit="bytes", pace=pace) as activity:
        job = IndexCheck(
            given,
            ledgers=which.ledgers,
            scope_id=which.scope_id,
            sample=sample,
            seed=seed or 0,
            digests=digests,
            pace=pace,
            advance=activity.advance,
            find_deleted=_deleted_finder(run, given),
        )
        run.out.render(job.findings(), _finding_columns(run, given), findings=True)
    counts = job.counts
    if job.missing and not (counts.findings or counts.error_count):
        names = ", ".join(map(str, sorted(job.missing)))
        raise NotFound(
            f"No index and no entry log has ledger {names}", hint="'bkctl bookie index show --meta' lists the ledgers"
        )
    run.out.note(
        f"{_verdict(counts)}{counted(counts.ledgers, 'ledger')}, "
        f"{counted(counts.entries, 'entry')} in the index, "
        f"{counted(counts.records, 'record')} in {counted(counts.logs, 'log')}, "
        f"{size_text(counts.bytes_read)} read{_remarks(counts)}"
    )
    if digests is not None:
        _note_digests(run, digests)
    _finish(run, counts)


def _verdict(counts: Counts) -> str:
    """Return the beginning of the sentence that sums up a check."""
    return "" if counts.findings or counts.error_count else "The index is sound: "


def _remarks(counts: Counts) -> str:
    named = (
        (counts.findings, "finding"),
        (counts.notes, "note"),
        (counts.not_flushed, "entry not flushed", "entries not flushed"),
        (counts.copies, "old copy"),
        (counts.error_count, "index damaged", "indexes damaged"),
    )
    parts = [counted(count, *words) for count, *words in named if count]
    return f"; {', '.join(parts)}" if parts else ""


def _note_digests(run: Run, digests: DigestChecker) -> None:
    counts = digests.counts()
    matched = ", ".join(f"{count:,} {each.name}" for each, count in counts.matched.items()) or "none"
    unknown = counts.unknown + counts.without_password
    run.out.note(
        f"Digests: {matched} matched, {unknown:,} not known, {counted(counts.unprotected, 'entry')} without one"
    )
    if unknown and (hint := digests.hint()):
        run.out.note(hint)


def _finish(run: Run, counts: Counts) -> None:
    """End with exit code 7 if an index could not be read, else with 3 if there are findings."""
    if counts.error_count > len(counts.errors):
        run.out.error(
            f"{counted(counts.error_count - len(counts.errors), 'more index is', 'more indexes are')} damaged"
        )
    run.out.raise_first(counts.errors)
    run.out.finish_with(counts.findings)


def _deleted_finder(run: Run, given: BookieDirectories) -> FindDeleted:
    """Return a function that asks the cluster which ledgers were deleted.

    Where none is named, none answers, or it is another one, no ledger counts as deleted, and the reason is printed.
    """
    from bkctl.files.directories import current_of
    from bkctl.metadata.liveness import StoredLedgers
    from bkctl.model import LedgerLiveness

    def find_deleted(ledgers: Collection[LedgerId]) -> Collection[LedgerId]:
        try:
            facts = StoredLedgers(run.cluster, map(current_of, given.ledger_dirs))(ledgers)
        except BkctlError as error:
            run.out.warn(f"it is not known which ledgers were deleted: {error}")
            return ()
        return {ledger for ledger, each in facts.items() if each.liveness is LedgerLiveness.DEAD}

    return find_deleted


@command(index_app, "check", connects=True, prints=rows_of(FINDING_COLUMNS))
def check_index(
    run: Run,
    ledgers: Annotated[bool, flag("--ledgers", "Check only the records of ledgers.")] = False,
    locations: Annotated[bool, flag("--locations", "Check only the locations of entries.")] = False,
    directories: Directories = (),
) -> None:
    """Check that a bookie's indexes are well-formed.

    Reads every key, value, header and slot, and RocksDB's own checksums; the bookie may run. 'bookie check' compares
    the indexes with the entry logs; here the ledgers of the logs must have an index (else `unindexed`), unless the
    cluster of --conf or -u says that they were deleted. With --conf, ledgers that DbLedgerStorage does not find since
    the directories changed are findings (`wrongDirectory`). Exit code 3 if there are findings, 7 if an index is
    damaged.

    $ bkctl bookie index check --conf bk_server.conf
    """
    from bkctl.checks.index_scan import IndexScan

    both = ledgers == locations
    given = run.access.directories(directories).with_ledgers()
    job = IndexScan(
        given,
        ledgers=ledgers or both,
        locations=locations or both,
        is_complete=not directories,
        find_deleted=_deleted_finder(run, given),
    )
    with run.job.working("Reading indexes"):
        run.out.render(job.findings(), _finding_columns(run, given), findings=True)
    counts = job.counts
    parts = (
        (not locations or both, f"{counted(counts.ledgers, 'ledger')}, {counts.fenced_ledgers:,} of them fenced"),
        (both, f"{counts.empty_ledgers:,} without entries"),
        (not ledgers or both, counted(counts.entries, "entry")),
    )
    run.out.note(f"{_verdict(counts)}{', '.join(text for shown, text in parts if shown)}{_remarks(counts)}")
    _finish(run, counts)
