"""`bkctl journal`: journal files and last marks of a bookie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from .kit.columns import fields, with_hex
from .kit.command import Run, command, group, rows_of
from .kit.next_steps import next_column
from .kit.options import DigestToCheck, LedgerPassword, ReadPace, count_option, flag, word
from .kit.records import (
    CheckedFiles,
    DirOption,
    Records,
    ShowSecretsOption,
    collect_errors,
    directories_argument,
    named_files,
    note_digests,
    print_records,
    records_in,
    shown_record_columns,
)
from .kit.texts import GREEN, RED, YELLOW, counted
from .kit.values import tap

if TYPE_CHECKING:
    from bkctl.files.directories import BookieDirectories, BookieFile
    from bkctl.files.journals import JournalStatistics

app = group()


def file_key(file: BookieFile) -> str:
    """Return the id that names the file again: a decimal, `scoped/5` in the scoped id space."""
    return _key(file.id, file)


def _key(file_id: object, row: Any) -> str:
    return f"scoped/{file_id}" if row.scoped else str(file_id)


JournalNames = Annotated[
    list[str] | None,
    word("JOURNAL", "Journals: decimal or 0x id, file name, path, or a directory (default: all of --dir or --conf)."),
]

JOURNAL_COLUMNS = Columns(
    *with_hex("JOURNAL", "journalId", "file.id"),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("SIZE", "size", "file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column(None, "scoped", "file.scoped", Kind.BOOLEAN),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True, spare=2),
    key=Column("JOURNAL", "journalId", lambda row: file_key(row.file)),
)


@command(app, "list", prints=rows_of(JOURNAL_COLUMNS))
def list_journals(
    run: Run,
    directories: Annotated[Sequence[Path], directories_argument("Journal directories (default: as in --conf).")] = (),
) -> None:
    """List the journal files: id, version, size, last write.

    $ bkctl journal list --conf bk_server.conf
    """
    from bkctl.files.journals import journal_summaries

    run.out.render(collect_errors(journal_summaries(run.access.directories(directories)), run.errors), JOURNAL_COLUMNS)


@command(app, "read", prints=rows_of(lambda: shown_record_columns("journalId")))
def read(
    run: Run,
    records: Records,
    names: JournalNames = None,
    directories: DirOption = None,
    after_lastmark: Annotated[
        bool, flag("--after-lastmark", "Print only records after the last mark, which a restart replays.")
    ] = False,
    show_secrets: ShowSecretsOption = False,
) -> None:
    """Print the records of journal files.

    Records are entries, ledger keys, fences and explicit LACs. The records before damage are printed, then the damage
    is reported (exit code 7).

    $ bkctl journal read --conf bk_server.conf --limit 20
    $ bkctl journal read --conf bk_server.conf --ledger 12 --after-lastmark
    """
    from bkctl.files.journal import JournalReader
    from bkctl.files.journals import files_after_marks
    from bkctl.formats.journal import journal_id_of

    given, _, files = _journals(run, names, directories)
    if after_lastmark and not given.ledger_dirs:
        raise UsageError("--after-lastmark needs the ledger directories", hint="add --conf, or --dir for each")
    starts = files_after_marks(given, files) if after_lastmark else dict.fromkeys(files, 0)
    chosen = records.filter()
    found = (
        (path, journal_id_of(path.name), records_in(run, path, JournalReader, partial(chosen.of_journal, start=start)))
        for path, start in starts.items()
    )
    print_records(run, found, "journalId", records, secrets=show_secrets)


def _journals(
    run: Run, names: list[str] | None, directories: list[Path] | None
) -> tuple[BookieDirectories, list[Path] | None, list[Path]]:
    """Return the given directories, the journals that were named, each once (None: none), and those to read."""
    if names and all(Path(name).is_dir() for name in names):
        directories, names = [*map(Path, names), *(directories or ())], None
    given = run.access.directories(directories, needed=not names)
    found = named_files(given, names, methodcaller("journals"), given.resolve_journal)
    return given, found if names else None, found


MARK_COLUMNS = Columns(
    Column("INDEX", "journalIndex", "journal_index", Kind.INTEGER),
    *with_hex("JOURNAL", "journalId", "mark.journal_id"),
    Column("OFFSET", "offset", "mark.offset", Kind.INTEGER),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True, spare=2),
    key="journalId",
)


@command(app, "lastmark", prints=rows_of(MARK_COLUMNS))
def lastmark(
    run: Run,
    directories: Annotated[Sequence[Path], directories_argument("Ledger directories (default: as in --conf).")] = (),
) -> None:
    """Show the last mark of each journal.

    Ledger storage holds everything before the mark. The mark is the highest of those that the ledger directories keep;
    damaged marks are reported (exit code 7).

    $ bkctl journal lastmark --conf bk_server.conf
    """
    from bkctl.files.journals import latest_marks

    latest = latest_marks(run.access.directories(directories))
    run.out.render(latest.marks, MARK_COLUMNS)
    run.out.raise_first([error for _, error in latest.damaged])


STATE_STYLE = {"end of file": GREEN, "zeros": GREEN, "torn": YELLOW, "damaged": RED, "unreadable": RED, "missing": RED}
_SOUND = ("endOfFile", "zeros", "empty")

VERIFY_COLUMNS = Columns(
    *with_hex("JOURNAL", "journalId", "journal_id"),
    Column("VERSION", "version", "version", Kind.INTEGER, spare=2),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    Column("STATE", "state", lambda row: row.state.value, Kind.WORD, style=STATE_STYLE),
    *fields(Kind.INTEGER, recordCount="RECORDS", entryCount=None, goodEnd="GOOD END"),
    Column("BEHIND", "sizeBehind", "behind.size_bytes", Kind.SIZE),
    Column("ENTRIES BEHIND", "entriesBehind", "behind.entry_count", Kind.INTEGER),
    Column(None, "recordsBehind", "behind.record_count", Kind.INTEGER),
    Column("RESUMES", "resumesAt", "behind.resumes_at", Kind.INTEGER),
    Column("MARK", "lastMark", "mark", Kind.INTEGER),
    Column(None, "scoped", "scoped", Kind.BOOLEAN),
    Column("FILE", "file", lambda row: str(row.path), spare=2, text=lambda path: Path(path).name),
    Column("PROBLEM", "problem", "problem"),
    next_column(
        "journal verify",
        lambda row: "" if row.problem is None else "mismatch" if row.state.value in _SOUND else row.state.value,
        file=lambda row: row.path,
    ),
    key=Column(
        "JOURNAL", "journalId", lambda row: str(row.path) if row.journal_id is None else _key(row.journal_id, row)
    ),
)


@command(app, "verify", connects=True, prints=rows_of(VERIFY_COLUMNS))
def verify(
    run: Run,
    digest: DigestToCheck,
    password: LedgerPassword,
    pace: ReadPace,
    names: JournalNames = None,
    directories: DirOption = None,
) -> None:
    """Check journal files, digests and last marks.

    Shows where the intact part of each file ends, why, and what lies behind it. A bookie leaves the states `endOfFile`,
    `zeros` (allocated ahead) and `torn` (the last write was cut). With `damaged`, RESUMES is where plausible records
    begin again: 'journal read --from-pos' prints them. Entries are checked against their digests where the type is in
    the record, in metadata, given, or found by trying; a note counts the rest. Nothing else in a journal has a digest:
    damage of keys and fences shows only where sizes contradict. On a terminal a sentence counts the sound files in
    place of their rows. Exit code 7 for damage; 3 if entries do not match their digests, or a journal is missing that a
    last mark names, or whose id lies between those that are there.

    $ bkctl journal verify --conf bk_server.conf
    $ bkctl journal verify journal --digest CRC32C
    """
    from bkctl.checks.journal_check import check_journals

    given, named, files = _journals(run, names, directories)
    checked = CheckedFiles(run.out, attrgetter("record_count"))
    checker = run.digest_checker(digest.digest_type, password, files)
    with run.job.working("Reading journals", unit="journals", pace=pace) as activity:
        checked.render(
            tap(check_journals(given, named, checker, pace=pace), lambda _: activity.advance()), VERIFY_COLUMNS
        )
    checked.note_sound("journal is", "journals are", "record")
    if digest.wanted or not checked.errors:
        note_digests(run, checker, always=digest.wanted)
    if checked.errors and checked.finding_count:
        run.out.error(counted(checked.finding_count, "finding"))
    run.out.raise_first(checked.errors)
    run.out.finish_with(checked.finding_count)


JournalGrouping = StrEnum("JournalGrouping", "FILE TYPE LEDGER SCOPE")


def _decimal(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


STATS_COLUMNS = Columns(
    *with_hex("JOURNAL", "journalId", "file.id"),
    Column("VERSION", "version", "version", Kind.INTEGER, spare=2),
    Column("SIZE", "size", "file.size", Kind.SIZE, spare=1),
    Column("WRITTEN", "writtenSize", "good_end", Kind.SIZE),
    Column("RECORDS", "recordCount", "record_count", Kind.INTEGER),
    Column("RECORD BYTES", "recordSize", "record_bytes", Kind.SIZE),
    Column("ENTRIES", "entryCount", lambda row: row.counts["entry"], Kind.INTEGER),
    Column("KEYS", "ledgerKeyCount", lambda row: row.counts["ledgerKey"], Kind.INTEGER),
    Column("FENCES", "fenceCount", lambda row: row.counts["fence"], Kind.INTEGER),
    Column("LACS", "explicitLacCount", lambda row: row.counts["explicitLac"], Kind.INTEGER, spare=1),
    Column("LEDGERS", "ledgerCount", lambda row: len(row.ledgers), Kind.INTEGER, spare=1),
    Column(None, "paddingSize", "padding_bytes", Kind.SIZE),
    Column("PADDING", "paddingRatio", lambda row: _decimal(row.padding_ratio), Kind.NESTED, text="{:.1%}".format),
    Column("GROUPS", "groupCount", "group_count", Kind.INTEGER, spare=1),
    Column("PER GROUP", "recordsPerGroup", lambda row: _decimal(row.records_per_group), Kind.NESTED),
    Column(None, "groupSizeMax", "group_bytes_max", Kind.SIZE),
    Column(None, "created", "created_ms", Kind.TIME),
    Column("MODIFIED", "mtime", "file.mtime_ms", Kind.TIME, spare=2),
    Column(None, "scoped", "file.scoped", Kind.BOOLEAN),
    Column("FILE", "file", lambda row: str(row.file.path), flexible=True, spare=2, text=lambda path: Path(path).name),
    key=Column("JOURNAL", "journalId", lambda row: file_key(row.file)),
)


class Sum(NamedTuple):
    """The records of one kind, ledger or scope; `size_bytes` with their size fields."""

    key: Any
    record_count: int
    size_bytes: int
    ledger_count: int = 1


_SUMS = (
    Column("RECORDS", "recordCount", "record_count", Kind.INTEGER),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
)
SUM_COLUMNS = {
    JournalGrouping.TYPE: Columns(Column("TYPE", "type", lambda row: str(row.key), Kind.WORD), *_SUMS, key="type"),
    JournalGrouping.LEDGER: Columns(Column("LEDGER", "ledger", "key", Kind.LEDGER), *_SUMS, key="ledger"),
    JournalGrouping.SCOPE: Columns(
        Column("SCOPE", "ledgerScopeId", lambda row: str(row.key)),
        Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
        *_SUMS,
        key="ledgerScopeId",
    ),
}


@command(app, "stats", prints=rows_of(STATS_COLUMNS, SUM_COLUMNS))
def stats(
    run: Run,
    top: Annotated[int | None, count_option("--top", "Print only the N rows with the most bytes.")],
    names: JournalNames = None,
    directories: DirOption = None,
    by: Annotated[
        JournalGrouping, flag("--by WHAT", "A row for each file, type, ledger or scope.")
    ] = JournalGrouping.FILE,
) -> None:
    """Count the records of journals by type, ledger or scope.

    Also shows padding and groups: records that were written and synced together, as far as padding tells (from version
    5 on). `created` is the time in a directory's first journal id; later ids count up from it. Records before damage
    count, then the damage is reported (exit code 7).

    $ bkctl journal stats --conf bk_server.conf
    """
    from bkctl.files.journals import journal_statistics

    _, _, files = _journals(run, names, directories)
    rows = collect_errors(filter(None, map(journal_statistics, files)), run.errors)
    with run.job.working("Reading journals"):
        if by is not JournalGrouping.FILE:
            sums = sorted(_sums(rows, by), key=itemgetter(2), reverse=True)
            run.out.render(sums[:top], SUM_COLUMNS[by])
        elif top is not None:
            run.out.render(sorted(rows, key=attrgetter("record_bytes"), reverse=True)[:top], STATS_COLUMNS)
        else:
            run.out.render(rows, STATS_COLUMNS)


def _sums(files: Iterable[JournalStatistics], by: JournalGrouping) -> list[Sum]:
    records: Counter[Any] = Counter()
    sizes: Counter[Any] = Counter()
    for found in files:
        records.update(found.counts if by is JournalGrouping.TYPE else found.ledgers)
        sizes.update(found.type_bytes if by is JournalGrouping.TYPE else found.ledger_bytes)
        if by is JournalGrouping.TYPE and found.padding_bytes:
            records["padding"] += found.padding_count
            sizes["padding"] += found.padding_bytes
    sums = [Sum(key, records[key], sizes[key]) for key in sorted(sizes)]
    if by is not JournalGrouping.SCOPE:
        return sums
    scopes = [
        (scope_id, list(zip(*found, strict=True))) for scope_id, found in groupby(sums, lambda each: each.key.scope_id)
    ]
    return [Sum(scope_id, sum(counts), sum(sizes), len(keys)) for scope_id, (keys, counts, sizes, _) in scopes]
