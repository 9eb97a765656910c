"""`bkctl entrylog list`, `show`, `read`, `verify`, `active` and `garbage`, and the logs that commands name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from bkctl.columns import TEXTS, Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.model import LedgerLiveness

from ..kit.columns import Output, PlainRow, RowOrder, fields, with_hex
from ..kit.command import Run, command, group, rows_of
from ..kit.next_steps import next_column
from ..kit.options import Composite, DigestToCheck, LedgerPassword, ReadPace, combined, flag, option, word
from ..kit.records import (
    CheckedFiles,
    DirOption,
    Records,
    collect_errors,
    directories_argument,
    named_files,
    note_digests,
    print_records,
    records_in,
    shown_record_columns,
)
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text
from ..kit.values import refuse_both, tap

if TYPE_CHECKING:
    from bkctl.checks.garbage import LogUse, Thresholds
    from bkctl.checks.log_check import LogCheck
    from bkctl.files.listing import EntryLogSummary
    from bkctl.metadata.liveness import Liveness

app = group()

R = TypeVar("R", "LogUse", "EntryLogSummary")

LogNames = Annotated[
    list[str] | None,
    word(
        "LOG", "Entry logs: decimal or 0x id, scoped/ID, file name, path, directory (default: all of --dir or --conf)."
    ),
]

LogOrder = StrEnum("LogOrder", "ID SIZE GARBAGE AGE")

SortOption = Annotated[
    str,
    flag(
        "--sort id|size|garbage|age|COLUMN",
        "By id, size (largest first), garbage (most first; asks the cluster), age, or a column as in other lists.",
    ),
]


def log_order(run: Run, text: str) -> LogOrder:
    """Return the order that --sort names; a column is left to the output, which sorts the rows by it."""
    if text.lower() in set(LogOrder):
        return LogOrder(text.lower())
    run.out.selection = run.out.selection._replace(order=RowOrder.parse(text))
    return LogOrder.ID


def is_scoped(path: Path) -> bool:
    return path.parent.name == "scoped"


def log_key(path: Path) -> str:
    """Return the name that a LOG argument accepts: a decimal id, `scoped/5`, else the path."""
    from bkctl.formats.entry_log import log_id_of

    log_id = log_id_of(path.name)
    if log_id is None:
        return str(path)
    return f"scoped/{log_id}" if is_scoped(path) else str(log_id)


def file_column(source: Callable[[Any], Path]) -> Column:
    return Column("FILE", "file", lambda row: str(source(row)), flexible=True, spare=2)


def ratio_text(value: float) -> str:
    return f"{value:.1%}"


def find_logs(run: Run, names: list[str] | None, directories: list[Path] | None, *, every: bool = False) -> list[Path]:
    """Return the logs that the arguments name, each once; all without a name, or with `every`."""
    refuse_both("--all", every, "LOG", names)
    given = run.access.directories(directories, needed=not names)
    return named_files(given, names, methodcaller("entry_logs"), given.resolve_entry_log)


AllOption = Annotated[bool, flag("--all", "Read all logs of --dir or --conf, as without LOG.")]


@contextmanager
def open_liveness(run: Run, paths: list[Path]) -> Iterator[Liveness]:
    """Yield the state of the cluster's ledgers; problems with reading it become errors of the run at the end."""
    from bkctl.metadata.liveness import Liveness, check_instance

    check_instance(run.cluster, paths)
    liveness = Liveness(run.cluster.ledgers)
    yield liveness
    run.errors.extend(liveness.problems)


LOG_COLUMNS = Columns(
    *with_hex("LOG", "logId", "summary.file.id"),
    Column("SCOPED", "scoped", "summary.file.scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "summary.version", Kind.INTEGER),
    Column("STATE", "state", "summary.state", style={"compacting": YELLOW, "compacted": YELLOW}),
    Column(None, "sourceLogId", "summary.source_id", Kind.INTEGER),
    Column("LEDGERS", "ledgerCount", "summary.ledgers_count", Kind.INTEGER),
    Column(None, "ledgersMapOffset", "summary.ledgers_map_offset", Kind.INTEGER),
    Column("SIZE", "size", "summary.file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "summary.file.mtime_ms", Kind.TIME),
    file_column(lambda row: row.summary.file.path),
    key=Column("LOG", "logId", lambda row: log_key(row.summary.file.path)),
)

LOG_GARBAGE_COLUMNS = LOG_COLUMNS.and_also(
    Column("REMAINING", "remainingSize", value_at("use.remaining_size_bytes"), Kind.SIZE),
    Column("GARBAGE", "garbageSize", value_at("use.garbage_size_bytes"), Kind.SIZE),
    Column("USAGE", "usage", value_at("use.usage"), Kind.INTEGER, text=ratio_text),
)


@command(app, "list", connects=True, prints=rows_of(LOG_COLUMNS, LOG_GARBAGE_COLUMNS))
def list_logs(
    run: Run,
    directories: Annotated[Sequence[Path], directories_argument("Ledger directories (default: as in --conf).")] = (),
    sort: SortOption = LogOrder.ID,
) -> None:
    """List the entry logs: id, version, state, ledgers, size.

    An open log has no ledgers map, and so no count of ledgers. Logs of an unfinished compaction have the state
    compacting or compacted. --sort garbage asks the cluster which ledgers are alive, and shows what remains of each
    log; otherwise no cluster is needed.

    $ bkctl entrylog list --conf bk_server.conf
    $ bkctl entrylog list --conf bk_server.conf --sort size
    """
    from bkctl.files.listing import entry_log_summaries

    order = log_order(run, sort)
    given = run.access.directories(directories)
    summaries = collect_errors(entry_log_summaries(given), run.errors)
    if order is LogOrder.GARBAGE:
        from bkctl.checks.garbage import log_uses

        found = {summary.file.path: summary for summary in summaries}
        good = [path for path, summary in found.items() if summary.error is None]
        with open_liveness(run, good) as liveness, run.job.working("Reading entry logs"):
            uses = {use.path: use for use in collect_errors(log_uses(good, liveness.states), run.errors)}
        rows = [PlainRow(summary=summary, use=uses.get(path)) for path, summary in found.items()]
        rows.sort(key=lambda row: 0 if row.use is None else -row.use.garbage_size_bytes)
        run.out.render(rows, LOG_GARBAGE_COLUMNS)
    else:
        if order is not LogOrder.ID:
            by_size = order is LogOrder.SIZE
            summaries = iter(sorted(summaries, key=lambda each: -each.file.size if by_size else each.file.mtime_ms))
        run.out.render((PlainRow(summary=each) for each in summaries), LOG_COLUMNS)


SHARE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("BYTES", "size", "size_bytes", Kind.INTEGER),
    *with_hex("LOG", "logId", "log_id"),
    Column("FROM MAP", "fromLedgersMap", "contents.from_map", Kind.BOOLEAN),
    Column(None, "complete", "contents.complete", Kind.BOOLEAN),
    file_column(lambda row: row.path),
    key="ledger",
)


@command(app, "show", prints=rows_of(SHARE_COLUMNS))
def show(run: Run, names: LogNames = None, directories: DirOption = None) -> None:
    """Show the ledgers in entry logs, and their bytes.

    Reads the ledgers map, or scans a log that has none. A damaged ledgers map is replaced by a scan, and reported (exit
    code 7). If records are damaged, the rows count those before the damage, and are not complete.

    $ bkctl entrylog show 0 --conf bk_server.conf
    """
    with run.job.working("Reading entry logs"):
        run.out.render(_shares(find_logs(run, names, directories), run.errors), SHARE_COLUMNS)


def _shares(paths: Iterable[Path], errors: list[BkctlError]) -> Iterator[PlainRow]:
    """Yield the ledgers' shares of each log; errors of logs go to `errors`."""
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.files.listing import log_contents
    from bkctl.formats.entry_log import content_id_of

    for path in paths:
        try:
            with EntryLogReader.open(path) as reader:
                contents = log_contents(reader)
        except NotFound:
            continue  # A running bookie deleted it meanwhile.
        except BkctlError as error:
            errors.append(error)
            continue
        for ledger, size_bytes in contents.sizes.items():
            yield PlainRow(
                path=path, log_id=content_id_of(path.name), ledger=ledger, size_bytes=size_bytes, contents=contents
            )
        if contents.error is not None:
            errors.append(contents.error)


@command(app, "read", prints=rows_of(lambda: shown_record_columns("logId")))
def read(run: Run, records: Records, names: LogNames = None, directories: DirOption = None) -> None:
    """Print the records of entry logs.

    The records before damage are printed, then the damage is reported (exit code 7).

    $ bkctl entrylog read 0 --conf bk_server.conf
    $ bkctl entrylog read 0 --conf bk_server.conf --ledger 12 --body
    """
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.formats.entry_log import content_id_of

    with run.job.working("Reading entry logs"):
        paths, found = find_logs(run, names, directories), records.filter().of_entry_log
        files = ((path, content_id_of(path.name), records_in(run, path, EntryLogReader, found)) for path in paths)
        print_records(run, files, "logId", records)


#: Mismatches of one log that are printed one by one below a table.
NOTES_MAX = 20
STATE_STYLE_OF_LOG = {"damaged": RED, "unreadable": RED, "torn": YELLOW}


def _matched(row: LogCheck) -> dict[str, int] | None:
    return None if row.digests is None else {each.name: count for each, count in row.digests.matched.items()}


def _log_findings(row: LogCheck) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"problem": problem} for problem in row.contradictions]
    found.extend(
        {
            **each.ledger.to_json(), "entryId": each.entry_id, "offset": each.offset,
            "digestType": each.digest_type.name, "file": each.where, "problem": str(each),
        }
        for each in row.mismatches
    )  # fmt: skip
    return found


def _kind(row: LogCheck) -> str:
    if row.error is None and row.finding_count:
        return "mismatch"
    return "" if row.problem is None else row.state


CHECK_COLUMNS = Columns(
    *with_hex("LOG", "logId", "log_id"),
    Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("STATE", "state", "state", Kind.WORD, style=STATE_STYLE_OF_LOG),
    *fields(Kind.INTEGER, entryCount="ENTRIES", goodEnd="GOOD END"),
    Column(None, "size", "size_bytes", Kind.INTEGER),
    Column("BEHIND", "sizeBehind", "behind.size_bytes", Kind.SIZE),
    Column("SAVABLE", "entriesBehind", "behind.entry_count", Kind.INTEGER),
    Column(None, "entriesBehindSize", "behind.entries_size_bytes", Kind.INTEGER),
    Column("RESUMES AT", "resumesAt", "behind.resumes_at", Kind.INTEGER),
    Column("MATCHED", "digests", _matched, Kind.NESTED),
    Column("MISMATCHED", "mismatchedCount", value_at("digests.mismatched"), Kind.INTEGER),
    Column("UNKNOWN", "unknownCount", value_at("digests.unknown"), Kind.INTEGER),
    Column(None, "unprotectedCount", value_at("digests.unprotected"), Kind.INTEGER),
    Column(None, "withoutPasswordCount", value_at("digests.without_password"), Kind.INTEGER),
    Column("PROBLEM", "problem", "problem"),
    Column(None, "findings", _log_findings, Kind.NESTED),
    next_column("entrylog verify", _kind, file=lambda row: row.path),
    file_column(lambda row: row.path),
    key=Column("LOG", "logId", lambda row: log_key(row.path)),
)


@command(app, "verify", connects=True, prints=rows_of(CHECK_COLUMNS))
def verify(
    run: Run,
    digest: DigestToCheck,
    password: LedgerPassword,
    pace: ReadPace,
    names: LogNames = None,
    directories: DirOption = None,
    no_digests: Annotated[bool, flag("--no-digests", "Check the structure only.")] = False,
) -> None:
    """Check the records, maps and digests of entry logs.

    Shows where the intact part of a log ends, why, and what can be saved behind it. On a terminal a sentence counts the
    sound logs in place of their rows. Exit code 7 if a log is damaged; 3 if entries do not match their digests, or a
    ledgers map contradicts the records.

    $ bkctl entrylog verify --conf bk_server.conf
    $ bkctl entrylog verify 0 --conf bk_server.conf --no-digests
    """
    from bkctl.checks.log_check import check_entry_logs

    refuse_both("--no-digests", no_digests, "--digest", digest.wanted)
    logs = find_logs(run, names, directories)
    index_dirs = run.access.directories(directories, needed=False).index_dirs
    checked = CheckedFiles(run.out, attrgetter("entry_count"))
    checker = None if no_digests else run.digest_checker(digest.digest_type, password, logs)
    with run.job.working("Reading entry logs", total=len(logs), unit="entry logs", pace=pace) as activity:
        checks = tap(check_entry_logs(logs, checker, index_dirs=index_dirs, pace=pace), lambda _: activity.advance())
        checked.render(_saying_more(run, checks), CHECK_COLUMNS)
    checked.note_sound("entry log is", "entry logs are", "entry")
    if checker is not None:
        note_digests(run, checker)
    run.out.raise_first(checked.errors)
    run.out.finish_with(checked.finding_count)


def _saying_more(run: Run, rows: Iterator[LogCheck]) -> Iterator[LogCheck]:
    """Yield the rows, then print on stderr the details for which a table has no room."""
    notes: list[str] = []
    for row in rows:
        if run.out.output is Output.TABLE:
            notes.extend(f"{row.path}: {each}" for each in row.contradictions[0 if row.error else 1 :])
            notes.extend(map(str, row.mismatches[:NOTES_MAX]))
            if len(row.mismatches) > NOTES_MAX:
                notes.append(f"{row.path}: more entries do not match; -o json lists all")
        yield row
    run.out.note(*notes)


#: Live ledgers of a log whose topics are named.
TOPICS_MAX = 5
STATE_STYLE = {"alive": GREEN, "dead": RED, "unknown": YELLOW}

ACTIVE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger.ledger", Kind.LEDGER),
    Column("STATE", "state", "ledger.state", style=STATE_STYLE),
    Column("BYTES", "size", "ledger.size_bytes", Kind.INTEGER),
    Column("TOPIC", "topic", "topic", flexible=True, spare=1),
    *with_hex("LOG", "logId", "log.log_id"),
    Column("FROM MAP", "fromLedgersMap", "log.from_map", Kind.BOOLEAN),
    Column(None, "complete", "log.complete", Kind.BOOLEAN),
    file_column(lambda row: row.log.path),
    key="ledger",
)


@command(app, "active", connects=True, prints=rows_of(ACTIVE_COLUMNS))
def active(
    run: Run,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    states: Annotated[
        list[LedgerLiveness] | None, flag("--state STATE", "Only ledgers that are alive, dead or unknown; repeatable.")
    ] = None,
) -> None:
    """Show which ledgers in entry logs are alive.

    A ledger is dead if it does not exist in the metadata store. It is unknown if the store could not be read (exit code
    6, or that of the error), or has no scopes tree of this cluster.

    $ bkctl entrylog active --conf bk_server.conf --state dead
    """
    from bkctl.checks.garbage import log_uses

    paths = find_logs(run, names, directories, every=every)
    wanted = set(states or LedgerLiveness)
    with open_liveness(run, paths) as liveness, run.job.working("Reading entry logs"):
        rows = (
            (use, each)
            for use in collect_errors(log_uses(paths, liveness.states), run.errors)
            for each in use.ledgers
            if each.state in wanted
        )
        named = liveness.with_topics(rows, lambda row: row[1].ledger)
        run.out.render(
            (PlainRow(log=log, ledger=ledger, topic=topic) for (log, ledger), topic in named), ACTIVE_COLUMNS
        )


def _use_row(use: LogUse, limits: Thresholds, liveness: Liveness) -> PlainRow:
    """Return the live and dead bytes of a log, the compaction that it needs, if one, and the bytes that this frees.

    The topics are those that keep the log: of its largest live ledgers; None where no ledger is Pulsar's.
    """
    alive = [each for each in use.ledgers if each.state is LedgerLiveness.ALIVE]
    largest = sorted(alive, key=lambda each: -each.size_bytes)[:TOPICS_MAX]
    topics = dict.fromkeys(topic for _, topic in liveness.with_topics(largest, lambda each: each.ledger) if topic)
    compaction, freed = use.compaction(limits), use.reclaimable_size_bytes(limits)
    return PlainRow(use=use, compaction=compaction, reclaimable_size_bytes=freed, topics=list(topics) or None)


def _count_column(state: LedgerLiveness) -> Column:
    def count(row: PlainRow) -> int:
        return sum(each.state is state for each in row.use.ledgers)

    return Column(state.upper(), f"{state}Count", count, Kind.INTEGER, spare=1)


GARBAGE_COLUMNS = Columns(
    *with_hex("LOG", "logId", "use.log_id"),
    Column("SCOPED", "scoped", lambda row: is_scoped(row.use.path), Kind.BOOLEAN),
    *map(_count_column, LedgerLiveness),
    Column("TOTAL", "totalSize", "use.total_size_bytes", Kind.SIZE),
    Column("REMAINING", "remainingSize", "use.remaining_size_bytes", Kind.SIZE),
    Column("GARBAGE", "garbageSize", "use.garbage_size_bytes", Kind.SIZE),
    Column("USAGE", "usage", "use.usage", Kind.INTEGER, text=ratio_text),
    Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
    Column("TOPICS", "topics", "topics", Kind.NESTED, detail=True, shape=TEXTS, text=", ".join),
    Column(None, "reclaimableSize", "reclaimable_size_bytes", Kind.INTEGER),
    Column(None, "fromLedgersMap", "use.from_map", Kind.BOOLEAN),
    Column(None, "complete", "use.complete", Kind.BOOLEAN),
    file_column(lambda row: row.use.path),
    key=Column("LOG", "logId", lambda row: log_key(row.use.path)),
)


def _threshold(kind: str, default: float) -> Composite:
    flag = f"--{kind}-threshold"

    def ratio(text: str) -> float:
        with suppress(ValueError):
            if 0 <= (value := float(text)) <= 1:
                return value
        raise UsageError(f"{flag} {text}: not a ratio from 0 to 1")

    help = f"Usage below which {kind} compaction rewrites a log (default: that of --conf, else {default})."
    return option(f"{flag} RATIO", help, parse=ratio)


ThresholdOptions = Annotated[
    tuple[float | None, float | None],
    combined(lambda *thresholds: thresholds, _threshold("minor", 0.2), _threshold("major", 0.8)),
]


@command(app, "garbage", connects=True, prints=rows_of(GARBAGE_COLUMNS))
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    sort: SortOption = LogOrder.GARBAGE,
) -> None:
    """Show the garbage in entry logs, and what compaction does.

    Garbage: bytes of ledgers that no longer exist in the metadata store; ledgers of unknown state count as remaining.
    COMPACTION: delete (no live entries), minor, major, or none. Totals follow on stderr.

    $ bkctl entrylog garbage --conf bk_server.conf
    """
    from bkctl.checks.garbage import log_uses

    order = log_order(run, sort)
    paths = find_logs(run, names, directories, every=every)
    limits = thresholds_of(run, thresholds)
    sums = Counter[str]()
    rows: Iterable[PlainRow]
    with open_liveness(run, paths) as liveness, run.job.working("Reading entry logs"):
        uses = collect_errors(log_uses(paths, liveness.states), run.errors)
        rows = tap((_use_row(use, limits, liveness) for use in uses), partial(_add_use, sums))
        if order is not LogOrder.ID:
            rows = sorted(rows, key=_USE_KEYS[order])
        run.out.render(rows, GARBAGE_COLUMNS)
    if sums:
        run.out.note(_sums_text(sums))


def _modified(row: PlainRow) -> float:
    path: Path = row.use.path
    with suppress(OSError):
        return path.stat().st_mtime
    return 0


_USE_KEYS: dict[LogOrder, Callable[[PlainRow], float]] = {
    LogOrder.SIZE: lambda row: -row.use.total_size_bytes,
    LogOrder.GARBAGE: lambda row: -row.use.garbage_size_bytes,
    LogOrder.AGE: _modified,
}


def thresholds_of(run: Run, given: tuple[float | None, float | None]) -> Thresholds:
    """Return the thresholds given as options, else the thresholds of --conf, else Apache's defaults."""
    from bkctl.checks.garbage import Thresholds

    minor, major = given
    usual = Thresholds()
    if run.access.conf is not None:
        config = run.access.config()
        usual = Thresholds(config.minor_compaction_threshold, config.major_compaction_threshold)
    return Thresholds(usual.minor if minor is None else minor, usual.major if major is None else major)


def _add_use(sums: Counter[str], row: PlainRow) -> None:
    """Add a row of `garbage` to the sums, which are by compaction but for the first three."""
    sums.update({"count": 1, "total": row.use.total_size_bytes, "garbage": row.use.garbage_size_bytes})
    if (name := row.compaction) is not None:
        freed, left = row.reclaimable_size_bytes, row.use.remaining_size_bytes
        sums.update({name: 1, f"{name} freed": freed, f"{name} rewritten": left})


def _sums_text(sums: Counter[str]) -> str:
    logs = counted(sums["count"], "log")
    parts = [f"{size_text(sums['total'])} of entries in {logs}, {size_text(sums['garbage'])} garbage"]
    for name, verb in (("delete", "deletion"), ("minor", "minor compaction"), ("major", "major compaction alone")):
        if sums[name]:
            left = sums[f"{name} rewritten"]
            rewriting = f", rewriting {size_text(left)}" if left else ""
            parts.append(f"{verb} of {counted(sums[name], 'log')} frees {size_text(sums[f'{name} freed'])}{rewriting}")
    return "; ".join(parts)
