"""`bkctl entrylog`: entry log files of a bookie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from inspect import Parameter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import BkctlError, NotFound, UsageError

from .kit.command import Run, command, group
from .kit.ledger_options import LEDGER_FORMS
from .kit.options import Composite, DigestToCheck, Entries, EntryRange, LedgerPassword, digest_type_option, parameter
from .kit.output import GREEN, RED, YELLOW, Column, Columns, Kind, Lines, Output, size_text
from .kit.records import DirOption, Records, print_records, raise_first

if TYPE_CHECKING:
    from bkctl.checks.garbage import LedgerUse, LogUse, Thresholds
    from bkctl.checks.log_check import LogCheck
    from bkctl.files.directories import BookieDirectories
    from bkctl.files.listing import EntryLogSummary, LogContents, RecordFilter
    from bkctl.formats.entry import DigestType
    from bkctl.ids import LedgerId
    from bkctl.metadata.liveness import Liveness
    from bkctl.repair.extraction import LedgerExtraction

app = group()

#: Mismatches of one log that a table says one by one.
NOTES_MAX = 20

LogNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOG",
        help="Entry logs: decimal or 0x id, scoped/ID, file name, path, directory (default: all of --dir or --conf).",
    ),
]


class Sort(StrEnum):
    """The order of a list of logs."""

    ID = "id"
    SIZE = "size"
    GARBAGE = "garbage"
    AGE = "age"


SortOption = Annotated[
    Sort,
    typer.Option("--sort", metavar="ORDER", help="By id, size, garbage (most first; asks the cluster) or age."),
]


def _hex(number: int | None) -> str | None:
    return None if number is None else f"{number:x}"


def _is_scoped(path: Path) -> bool:
    return path.parent.name == "scoped"


def _key(path: Path) -> str:
    """What names the log again: a decimal id, `scoped/5`, else its path."""
    from bkctl.formats.entry_log import log_id_of

    log_id = log_id_of(path.name)
    if log_id is None:
        return str(path)
    return f"scoped/{log_id}" if _is_scoped(path) else str(log_id)


def _file_column(source: Callable[[Any], Path]) -> Column:
    return Column("FILE", "file", lambda row: str(source(row)), flexible=True)


def _ratio(value: float) -> str:
    return f"{value:.1%}"


# --- list -----------------------------------------------------------------------------------------------------------


class LogRow(NamedTuple):
    """A log of the list; `use` is there where the list is sorted by garbage."""

    summary: EntryLogSummary
    use: LogUse | None = None


LOG_COLUMNS = Columns(
    Column("LOG", "logId", "summary.file.id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: _hex(row.summary.file.id)),
    Column("SCOPED", "scoped", "summary.file.scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "summary.version", Kind.INTEGER),
    Column("STATE", "state", "summary.state", style={"compacting": YELLOW, "compacted": YELLOW}),
    Column(None, "sourceLogId", "summary.source_id", Kind.INTEGER),
    Column("LEDGERS", "ledgerCount", "summary.ledgers_count", Kind.INTEGER),
    Column(None, "ledgersMapOffset", "summary.ledgers_map_offset", Kind.INTEGER),
    Column("SIZE", "size", "summary.file.size", Kind.SIZE),
    Column("MODIFIED", "mtime", "summary.file.mtime_ms", Kind.TIME),
    _file_column(lambda row: row.summary.file.path),
    key=Column("LOG", "logId", lambda row: _key(row.summary.file.path)),
)


def _of_use(name: str) -> Callable[[Any], Any]:
    return lambda row: None if row.use is None else getattr(row.use, name)


LOG_GARBAGE_COLUMNS = LOG_COLUMNS.and_also(
    Column("REMAINING", "remainingSize", _of_use("remaining_size_bytes"), Kind.SIZE),
    Column("GARBAGE", "garbageSize", _of_use("garbage_size_bytes"), Kind.SIZE),
    Column("USAGE", "usage", _of_use("usage"), Kind.INTEGER, text=_ratio),
)


@command(app, "list", connects=True)
def list_logs(
    run: Run,
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Ledger directories (default: those of --conf).")
    ] = None,
    directories: DirOption = None,
    sort: SortOption = Sort.ID,
) -> None:
    """List the entry logs: id, header version, state, ledgers in its map (none while a log is open), size.

    What a compaction left unfinished is listed too (state compacting or compacted). With --sort garbage the cluster is
    asked which ledgers are alive, and what remains of each log is shown; else this needs no cluster.
    """
    from bkctl.files.listing import entry_log_summaries

    given = run.directories([*(places or ()), *(directories or ())])
    errors: list[BkctlError] = []

    def summaries() -> Iterator[EntryLogSummary]:
        for summary in entry_log_summaries(given):
            if summary.error is not None:
                errors.append(summary.error)
            yield summary

    if sort is Sort.GARBAGE:
        from bkctl.checks.garbage import log_uses

        found = {summary.file.path: summary for summary in summaries()}
        good = [path for path, summary in found.items() if summary.error is None]
        with _liveness(run, good, errors) as liveness, run.working("Reading entry logs"):
            uses = {use.path: use for use in _noting(log_uses(good, liveness.states), errors)}
        rows = [LogRow(summary, uses.get(path)) for path, summary in found.items()]
        rows.sort(key=lambda row: 0 if row.use is None else -row.use.garbage_size_bytes)
        run.render(rows, LOG_GARBAGE_COLUMNS)
    elif sort is Sort.ID:
        run.render(map(LogRow, summaries()), LOG_COLUMNS)
    else:
        ordered = sorted(summaries(), key=lambda each: -each.file.size if sort is Sort.SIZE else each.file.mtime_ms)
        run.render(map(LogRow, ordered), LOG_COLUMNS)
    raise_first(run, errors)


# --- show and read --------------------------------------------------------------------------------------------------


class ShareRow(NamedTuple):
    """A ledger's share of one log."""

    path: Path
    log_id: int | None
    ledger: LedgerId
    size_bytes: int
    contents: LogContents


SHARE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("BYTES", "size", "size_bytes", Kind.INTEGER),
    Column("LOG", "logId", "log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: _hex(row.log_id)),
    Column("FROM MAP", "fromLedgersMap", "contents.from_map", Kind.BOOLEAN),
    Column(None, "complete", "contents.complete", Kind.BOOLEAN),
    _file_column(lambda row: row.path),
    key="ledger",
)


@command(app, "show")
def show(run: Run, names: LogNames = None, directories: DirOption = None) -> None:
    """Show the ledgers of entry logs and their bytes, from the ledgers map, or by a scan where there is none.

    A damaged ledgers map is counted again by a scan, and reported (exit code 7). Where the records are damaged, those
    before are counted, and the rows are not complete.
    """
    from bkctl.files.entry_log import EntryLogReader
    from bkctl.files.listing import log_contents
    from bkctl.formats.entry_log import content_id_of

    errors: list[BkctlError] = []

    def rows() -> Iterator[ShareRow]:
        for path in _logs(run, names, directories):
            try:
                with EntryLogReader.open(path) as reader:
                    contents = log_contents(reader)
            except NotFound:
                continue  # A running bookie deleted it meanwhile.
            except BkctlError as error:
                errors.append(error)
                continue
            for ledger, size_bytes in contents.sizes.items():
                yield ShareRow(path, content_id_of(path.name), ledger, size_bytes, contents)
            if contents.error is not None:
                errors.append(contents.error)

    with run.working("Reading entry logs"):
        run.render(rows(), SHARE_COLUMNS)
    raise_first(run, errors)


@command(app, "read")
def read(run: Run, records: Records, names: LogNames = None, directories: DirOption = None) -> None:
    """Print the records of entry logs.

    What stands before damage is printed, then the damage is reported (exit code 7).
    """
    with run.working("Reading entry logs"):
        batches = not records.wants_payloads
        files = _files(_logs(run, names, directories), records.filter(), batches=batches)
        print_records(run, files, "logId", records, batches=batches)


def _logs(run: Run, names: list[str] | None, directories: list[Path] | None) -> list[Path]:
    """The logs that a command is about, each once."""
    given = run.directories(directories, needed=not names)
    if not names:
        return [file.path for file in given.entry_logs()]
    return list(dict.fromkeys(path for name in names for path in _logs_named(given, name)))


def _logs_named(given: BookieDirectories, name: str) -> list[Path]:
    from bkctl.files.directories import BookieDirectories

    if name and Path(name).is_dir():
        return [file.path for file in BookieDirectories.at(name).entry_logs()]
    return [given.resolve_entry_log(name)]


def _files(
    paths: list[Path], chosen: RecordFilter, *, batches: bool
) -> Iterator[tuple[Path, int | None, Iterator[Any]]]:
    from bkctl.formats.entry_log import content_id_of

    for path in paths:
        yield path, content_id_of(path.name), _records(path, chosen, batches=batches)


def _records(path: Path, chosen: RecordFilter, *, batches: bool) -> Iterator[Any]:
    from bkctl.files.entry_log import EntryLogReader

    try:
        reader = EntryLogReader.open(path)
    except NotFound:
        return  # A running bookie deleted it meanwhile.
    with reader:
        yield from chosen.batches_of_entry_log(reader) if batches else chosen.of_entry_log(reader)


# --- verify ---------------------------------------------------------------------------------------------------------

STATE_STYLE_OF_LOG = {"damaged": RED, "unreadable": RED, "torn": YELLOW}


def _matched(row: LogCheck) -> dict[str, int] | None:
    return None if row.digests is None else {each.name: count for each, count in row.digests.matched.items()}


def _of_digests(name: str) -> Callable[[LogCheck], int | None]:
    return lambda row: None if row.digests is None else getattr(row.digests, name)


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


CHECK_COLUMNS = Columns(
    Column("LOG", "logId", "log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: _hex(row.log_id)),
    Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("STATE", "state", "state", style=STATE_STYLE_OF_LOG),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("GOOD END", "goodEnd", "good_end", Kind.INTEGER),
    Column(None, "size", "size_bytes", Kind.INTEGER),
    Column("BEHIND", "sizeBehind", "behind.size_bytes", Kind.SIZE),
    Column("SAVABLE", "entriesBehind", "behind.entry_count", Kind.INTEGER),
    Column(None, "entriesBehindSize", "behind.entries_size_bytes", Kind.INTEGER),
    Column("RESUMES AT", "resumesAt", "behind.resumes_at", Kind.INTEGER),
    Column("MATCHED", "digests", _matched, Kind.NESTED),
    Column("MISMATCHED", "mismatchedCount", _of_digests("mismatched"), Kind.INTEGER),
    Column("UNKNOWN", "unknownCount", _of_digests("unknown"), Kind.INTEGER),
    Column(None, "unprotectedCount", _of_digests("unprotected"), Kind.INTEGER),
    Column(None, "withoutPasswordCount", _of_digests("without_password"), Kind.INTEGER),
    Column("PROBLEM", "problem", "problem", flexible=True),
    Column(None, "findings", _log_findings, Kind.NESTED),
    _file_column(lambda row: row.path),
    key=Column("LOG", "logId", lambda row: _key(row.path)),
)


@command(app, "verify", connects=True)
def verify(
    run: Run,
    digest: DigestToCheck,
    password: LedgerPassword,
    names: LogNames = None,
    directories: DirOption = None,
    no_digests: Annotated[bool, typer.Option("--no-digests", help="Look at the structure only.")] = False,
) -> None:
    """Check entry logs: records, ledgers map, digests; where the good part ends, why, and what can be saved behind it.

    Exit code 7: a log is damaged. 3: entries do not match their digests, or a ledgers map contradicts the records.
    """
    from contextlib import nullcontext

    from bkctl.checks.log_check import check_entry_logs

    if no_digests and digest.wanted:
        raise UsageError("--no-digests and --digest are given", hint="give one of them")
    if not names:
        run.directories(directories).of_a_bookie()
    logs = _logs(run, names, directories)
    errors: list[BkctlError] = []
    findings = 0

    def rows() -> Iterator[LogCheck]:
        nonlocal findings
        for check in check_entry_logs(logs, checker):
            findings += check.finding_count
            if check.error is not None:
                errors.append(check.error)
            yield check

    digests = nullcontext() if no_digests else run.digest_checker(digest.digest_type, password, logs)
    with digests as checker, run.working("Reading entry logs"):
        run.render(_saying_more(run, rows()), CHECK_COLUMNS)
    if checker is not None and (hint := checker.hint()) is not None:
        counts = checker.counts()
        run.note(f"bkctl: {counts.unknown + counts.without_password:,} entries could not be checked: {hint}")
    raise_first(run, errors)
    run.finish_with(findings, "findings")


def _saying_more(run: Run, rows: Iterator[LogCheck]) -> Iterator[LogCheck]:
    """The rows; what a table has no room for is said on stderr once they are printed."""
    notes: list[str] = []
    for row in rows:
        if run.output is Output.TABLE:
            notes.extend(f"{row.path}: {each}" for each in row.contradictions[0 if row.error else 1 :])
            notes.extend(map(str, row.mismatches[:NOTES_MAX]))
            if len(row.mismatches) > NOTES_MAX:
                notes.append(f"{row.path}: more entries do not match; -o json lists them")
        yield row
    for note in notes:
        run.note(f"bkctl: {note}")


# --- active and garbage ---------------------------------------------------------------------------------------------

STATE_STYLE = {"alive": GREEN, "dead": RED, "unknown": YELLOW}


class StateName(StrEnum):
    """The words for ledgers, as LedgerState has them (which is not imported to show help)."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class ActiveRow(NamedTuple):
    """A ledger's share of one log, and whether it is alive."""

    log: LogUse
    ledger: LedgerUse


ACTIVE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger.ledger", Kind.LEDGER),
    Column("STATE", "state", "ledger.state", style=STATE_STYLE),
    Column("BYTES", "size", "ledger.size_bytes", Kind.INTEGER),
    Column("LOG", "logId", "log.log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: _hex(row.log.log_id)),
    Column("FROM MAP", "fromLedgersMap", "log.from_map", Kind.BOOLEAN),
    Column(None, "complete", "log.complete", Kind.BOOLEAN),
    _file_column(lambda row: row.log.path),
    key="ledger",
)

AllOption = Annotated[bool, typer.Option("--all", help="All logs of --dir or --conf (so too where no LOG is named).")]


@command(app, "active", connects=True)
def active(
    run: Run,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    states: Annotated[
        list[StateName] | None,
        typer.Option("--state", metavar="STATE", help="Only ledgers that are alive, dead or unknown; repeatable."),
    ] = None,
) -> None:
    """Show which ledgers of entry logs are alive, and their bytes.

    A ledger is dead when the metadata store says that it is not there; unknown when the store could not say it (exit
    code 6, or that of the error), or has no scopes tree of this cluster.
    """
    from bkctl.checks.garbage import log_uses

    paths = _all_logs(run, names, directories, every)
    wanted = set(states or StateName)
    errors: list[BkctlError] = []
    with _liveness(run, paths, errors) as liveness, run.working("Reading entry logs"):
        run.render(
            (
                ActiveRow(use, each)
                for use in _noting(log_uses(paths, liveness.states), errors)
                for each in use.ledgers
                if each.state.value in wanted
            ),
            ACTIVE_COLUMNS,
        )
    raise_first(run, errors)


class UseRow(NamedTuple):
    """What is left of a log, and what compaction does about it."""

    use: LogUse
    thresholds: Thresholds

    @property
    def compaction(self) -> str | None:
        """The word for it."""
        return self.use.compaction(self.thresholds)

    @property
    def reclaimable_size_bytes(self) -> int:
        """The bytes that this frees."""
        return self.use.reclaimable_size_bytes(self.thresholds)


def _count_column(state: str) -> Column:
    def count(row: UseRow) -> int:
        return sum(each.state.value == state for each in row.use.ledgers)

    return Column(state.upper(), f"{state}Count", count, Kind.INTEGER)


GARBAGE_COLUMNS = Columns(
    Column("LOG", "logId", "use.log_id", Kind.INTEGER),
    Column("HEX", "logIdHex", lambda row: _hex(row.use.log_id)),
    Column("SCOPED", "scoped", lambda row: _is_scoped(row.use.path), Kind.BOOLEAN),
    *map(_count_column, StateName),
    Column("TOTAL", "totalSize", "use.total_size_bytes", Kind.SIZE),
    Column("REMAINING", "remainingSize", "use.remaining_size_bytes", Kind.SIZE),
    Column("GARBAGE", "garbageSize", "use.garbage_size_bytes", Kind.SIZE),
    Column("USAGE", "usage", "use.usage", Kind.INTEGER, text=_ratio),
    Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
    Column(None, "reclaimableSize", "reclaimable_size_bytes", Kind.INTEGER),
    Column(None, "fromLedgersMap", "use.from_map", Kind.BOOLEAN),
    Column(None, "complete", "use.complete", Kind.BOOLEAN),
    _file_column(lambda row: row.use.path),
    key=Column("LOG", "logId", lambda row: _key(row.use.path)),
)


def _threshold(flag: str, what: str, default: float) -> Any:
    return parameter(
        flag.removeprefix("--").replace("-", "_"),
        Annotated[
            str,
            typer.Option(flag, metavar="RATIO", help=f"{what} (default: that of --conf, else {default})."),
        ],
    )


def _given_thresholds(values: Mapping[str, Any]) -> tuple[float | None, float | None]:
    found: list[float | None] = []
    for name in ("minor_threshold", "major_threshold"):
        text = values[name]
        value = None
        if text is not None:
            with suppress(ValueError):
                value = float(text)
            if value is None or not 0 <= value <= 1:
                raise UsageError(f"--{name.replace('_', '-')} {text}: not a ratio from 0 to 1")
        found.append(value)
    return found[0], found[1]


ThresholdOptions = Annotated[
    tuple[float | None, float | None],
    Composite(
        (
            _threshold("--minor-threshold", "Usage below which minor compaction rewrites a log", 0.2),
            _threshold("--major-threshold", "Usage below which major compaction does", 0.8),
        ),
        _given_thresholds,
    ),
]


@command(app, "garbage", connects=True)
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    names: LogNames = None,
    directories: DirOption = None,
    every: AllOption = False,
    sort: SortOption = Sort.GARBAGE,
) -> None:
    """Show how much of each entry log is of use: total and remaining bytes, garbage, and what compaction does about it.

    Garbage are the bytes of ledgers that the metadata store says are not there; ledgers of unknown state remain.
    COMPACTION: delete (nothing is alive), minor, major, or nothing. Sums follow on stderr.
    """
    from bkctl.checks.garbage import log_uses

    paths = _all_logs(run, names, directories, every)
    limits = thresholds_of(run, thresholds)
    errors: list[BkctlError] = []
    sums = _Sums()
    rows: Iterable[UseRow]
    with _liveness(run, paths, errors) as liveness, run.working("Reading entry logs"):
        rows = (UseRow(use, limits) for use in _noting(log_uses(paths, liveness.states), errors))
        rows = sums.watch(rows)
        if sort is not Sort.ID:
            rows = sorted(rows, key=_USE_KEYS[sort])
        run.render(rows, GARBAGE_COLUMNS)
    if sums.count:
        run.note(f"bkctl: {sums}")
    raise_first(run, errors)


def _modified(row: UseRow) -> float:
    with suppress(OSError):
        return row.use.path.stat().st_mtime
    return 0


_USE_KEYS: dict[Sort, Callable[[UseRow], float]] = {
    Sort.SIZE: lambda row: -row.use.total_size_bytes,
    Sort.GARBAGE: lambda row: -row.use.garbage_size_bytes,
    Sort.AGE: _modified,
}


def thresholds_of(run: Run, given: tuple[float | None, float | None]) -> Thresholds:
    """What ThresholdOptions say, where they say nothing --conf, else the usual."""
    from bkctl.checks.garbage import Thresholds

    minor, major = given
    usual = Thresholds()
    if run.conf is not None:
        config = run.config()
        usual = Thresholds(config.minor_compaction_threshold, config.major_compaction_threshold)
    return Thresholds(usual.minor if minor is None else minor, usual.major if major is None else major)


class _Sums:
    """What the rows of `garbage` come to."""

    def __init__(self) -> None:
        self.count = self.total = self.garbage = 0
        #: By compaction: logs, bytes freed, bytes rewritten.
        self.wins: dict[str, tuple[int, int, int]] = {}

    def watch(self, rows: Iterable[UseRow]) -> Iterator[UseRow]:
        """The rows, counted."""
        for row in rows:
            self.count += 1
            self.total += row.use.total_size_bytes
            self.garbage += row.use.garbage_size_bytes
            if row.compaction is not None:
                logs, freed, rewritten = self.wins.get(row.compaction, (0, 0, 0))
                self.wins[row.compaction] = (
                    logs + 1,
                    freed + row.reclaimable_size_bytes,
                    rewritten + row.use.remaining_size_bytes,
                )
            yield row

    def __str__(self) -> str:
        parts = [f"{size_text(self.total)} of entries in {_logs_text(self.count)}, {size_text(self.garbage)} garbage"]
        for name, verb in (("delete", "deletion"), ("minor", "minor compaction"), ("major", "major compaction alone")):
            if name in self.wins:
                logs, freed, rewritten = self.wins[name]
                rewriting = f", rewriting {size_text(rewritten)}" if rewritten else ""
                parts.append(f"{verb} of {_logs_text(logs)} frees {size_text(freed)}{rewriting}")
        return "; ".join(parts)


def _logs_text(count: int) -> str:
    return f"{count:,} log" + ("" if count == 1 else "s")


def _all_logs(run: Run, names: list[str] | None, directories: list[Path] | None, every: bool) -> list[Path]:
    if names and every:
        raise UsageError("--all and LOG are given", hint="give one of them")
    return _logs(run, names, directories)


@contextmanager
def _liveness(run: Run, paths: list[Path], errors: list[BkctlError]) -> Iterator[Liveness]:
    """Asks the cluster for ledgers; what it could not say is added to `errors` at the end."""
    from bkctl.metadata.liveness import Liveness, check_instance

    with run.cluster() as cluster:
        check_instance(cluster, paths)
        liveness = Liveness(cluster.ledgers)
        yield liveness
        errors.extend(liveness.problems)


def _noting(uses: Iterable[LogUse], errors: list[BkctlError]) -> Iterator[LogUse]:
    for use in uses:
        if use.error is not None:
            errors.append(use.error)
        yield use


# --- extract --------------------------------------------------------------------------------------------------------


class ExtractFormat(StrEnum):
    """What `extract` writes."""

    LOG = "log"
    NDJSON = "ndjson"
    RAW = "raw"


def _ledger_to_extract(values: Mapping[str, Any]) -> LedgerId:
    from bkctl.ids import LedgerId, parse_scope_id

    scope = values["ledger_scope_id"]
    return LedgerId.parse(values["ledger_filter"], None if scope is None else parse_scope_id(scope))


LedgerToExtract = Annotated[
    Any,
    Composite(
        (
            parameter(
                "ledger_filter",
                Annotated[str, typer.Option("--ledger", metavar="LEDGER", help=f"The ledger: {LEDGER_FORMS}.")],
                Parameter.empty,
            ),
            parameter(
                "ledger_scope_id",
                Annotated[
                    str,
                    typer.Option("--ledger-scope-id", metavar="SCOPE", help="Ledger scope id of a bare ledger id."),
                ],
            ),
        ),
        _ledger_to_extract,
    ),
]


class ExtractReport(NamedTuple):
    """What was written."""

    extraction: LedgerExtraction
    digest_type: DigestType | None
    gaps: list[tuple[int, int]]
    missing_count: int
    file: Path


GAPS_SHOWN_MAX = 1000
#: Entries that are turned into text at once: entries may have megabytes.
EXTRACT_BATCH_ROWS = 16


def _gap_text(gaps: list[tuple[int, int]]) -> str:
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in gaps[:10]]
    return ", ".join(shown) + (f", … ({len(gaps)} ranges)" if len(gaps) > 10 else "")


def _first_id(row: ExtractReport) -> int:
    return next(row.extraction.entry_ids)


def _last_id(row: ExtractReport) -> int:
    return row.extraction.last_entry_id


REPORT_COLUMNS = Columns(
    Column("Ledger", "ledger", "extraction.ledger", Kind.LEDGER),
    Column("Entries", "entryCount", "extraction.entries_count", Kind.INTEGER),
    Column("First entry", "firstEntryId", _first_id, Kind.INTEGER),
    Column("Last entry", "lastEntryId", _last_id, Kind.INTEGER),
    Column("Copies written", "copiesCount", lambda row: len(row.extraction), Kind.INTEGER),
    Column("Copies found", "copiesFoundCount", "extraction.copies_count", Kind.INTEGER),
    Column("Missing", "missingCount", "missing_count", Kind.INTEGER),
    Column(
        "Missing entries", "missing",
        lambda row: [{"firstEntryId": first, "lastEntryId": last} for first, last in row.gaps] or None,
        Kind.NESTED,
        text=lambda value: _gap_text([(each["firstEntryId"], each["lastEntryId"]) for each in value]),
    ),
    Column("Digest type", "digestType", lambda row: None if row.digest_type is None else row.digest_type.name),
    Column("Logs", "logs", lambda row: list(map(str, row.extraction.log_paths)), Kind.NESTED),
    Column("File", "file", lambda row: str(row.file)),
    key="ledger",
)  # fmt: skip


@command(app, "extract", asks=True)
def extract(
    run: Run,
    entries: Entries,
    ledger: LedgerToExtract,
    digest_type: Annotated[
        Any,
        digest_type_option("Digest type of a ledger of scope 0, for ndjson and raw (default: found by trying)."),
    ],
    file: Annotated[
        Path, typer.Option("--file", "-f", metavar="FILE", help="The file to write; - is stdout.", show_default=False)
    ],
    names: LogNames = None,
    directories: DirOption = None,
    form: Annotated[
        ExtractFormat,
        typer.Option(
            "--format", metavar="FORMAT", show_default=True,
            help="log (an entry log, as bookies read it), ndjson (rows as 'entrylog read --body' prints them), or raw "
            "(the payloads, nothing between them).",
        ),
    ] = ExtractFormat.LOG,
    all_copies: Annotated[
        bool, typer.Option("--all-copies", help="Each copy of an entry, the oldest log first (default: the last one).")
    ] = False,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Look into every log, also where the ledgers map does not name the ledger."),
    ] = False,
) -> None:  # fmt: skip
    """Write the entries of one ledger to a file, gathered from all entry logs, in order, and say which are missing.

    Damaged logs are taken up to the damage, which is reported (exit code 7) when the file is written. Without any entry
    nothing is written (exit code 4).
    """
    from bkctl.repair.extraction import LedgerExtraction

    paths = _logs(run, names, directories)
    with (
        run.working(f"Gathering ledger {ledger}"),
        LedgerExtraction(
            paths, ledger, entries.first or 0, entries.last, all_copies=all_copies, trust_maps=not scan
        ) as extraction,
    ):
        if not len(extraction):
            raise_first(run, extraction.problems)
            raise NotFound(
                f"No entry {_range_text(entries)}of ledger {ledger} in {_logs_text(len(paths))}",
                hint="--scan looks into those whose ledgers map does not name it" if extraction.logs_skipped else None,
            )
        digest_type = _digest_of(extraction, digest_type, form)
        left: int | None = None
        with _target(run, file) as target:
            if form is ExtractFormat.LOG:
                left = extraction.write_log(target)
            elif form is ExtractFormat.NDJSON:
                lines = Lines(_extracted_columns(digest_type), Output.NDJSON)
                found = extraction.entries()
                while rows := list(islice(found, EXTRACT_BATCH_ROWS)):
                    target(lines.of_rows(rows).encode())
            else:
                for each in extraction.entries():
                    target(each.record.payload(digest_type) or b"")
        gaps: list[tuple[int, int]] = []
        missing = 0
        for gap in extraction.gaps():
            missing += gap.last_entry_id - gap.first_entry_id + 1
            if len(gaps) < GAPS_SHOWN_MAX:
                gaps.append((gap.first_entry_id, gap.last_entry_id))
        if str(file) != "-":
            run.show(ExtractReport(extraction, digest_type, gaps, missing, file), REPORT_COLUMNS)
        elif missing:
            run.note(f"bkctl: Missing entries ({missing:,}): {_gap_text(gaps)}")
        problems = list(extraction.problems)
    if left is not None:
        problems.insert(
            0,
            BkctlError(
                f"{file} is full at 2 GiB: entry {left} and those behind it are not in it",
                hint=f"write them to another file with --from {left}",
            ),
        )
    raise_first(run, problems)


def _range_text(entries: EntryRange) -> str:
    if entries.first is None and entries.last is None:
        return ""
    last = "the last" if entries.last is None else entries.last
    return f"from {entries.first or 0} to {last} "


def _digest_of(extraction: LedgerExtraction, given: DigestType | None, form: ExtractFormat) -> DigestType | None:
    """The digest type that tells where payloads begin: the one given, that in the records, else one that fits."""
    record = next(extraction.entries()).record
    digest_type = given or record.digest_type or extraction.find_digest_type()
    if form is ExtractFormat.RAW and record.payload_offset(digest_type) is None:
        raise UsageError(
            f"Entries of ledger {extraction.ledger} do not say where their payload begins, and neither CRC32C nor "
            "CRC32 fits",
            hint="add --digest-type HMAC or DUMMY, or use --format ndjson",
        )
    return digest_type


def _extracted_columns(digest_type: DigestType | None) -> Columns:
    return Columns(
        Column("LEDGER", "ledger", "record.ledger", Kind.LEDGER),
        Column("ENTRY", "entryId", "record.entry_id", Kind.INTEGER),
        Column("LAC", "lastAddConfirmed", "record.last_add_confirmed", Kind.INTEGER),
        Column("LENGTH", "length", "record.length", Kind.INTEGER),
        Column("SIZE", "size", lambda row: row.record.payload_size(digest_type), Kind.INTEGER),
        Column(None, "formatVersion", "record.format_version", Kind.INTEGER),
        Column(None, "logId", "log_id", Kind.INTEGER),
        Column(None, "logIdHex", lambda row: _hex(row.log_id)),
        Column("OFFSET", "offset", "record.offset", Kind.INTEGER),
        Column("RECORD SIZE", "recordSize", "record.record_size", Kind.INTEGER),
        Column("TYPE", "type", "record.type"),
        Column("FILE", "file", lambda row: str(row.path)),
        Column("PAYLOAD", "payload", lambda row: row.record.payload(digest_type), Kind.BINARY),
    )


@contextmanager
def _target(run: Run, file: Path) -> Iterator[Callable[[bytes], object]]:
    """A function that writes bytes to `file`, which appears whole or not at all; `-` is stdout."""
    if str(file) == "-":
        yield run.raw
        return
    if file.is_dir():
        raise UsageError(f"{file} is a directory, a file is needed")
    if file.exists():
        if not file.is_file():
            raise UsageError(f"{file} is no file, and would be replaced by one", hint="write to -, and redirect that")
        run.confirm(f"{file} exists and would be replaced")
    from bkctl.disk import create_unfinished

    try:
        partial, descriptor = create_unfinished(file, mode=0o666)  # as the umask says, like any file of the user
    except OSError as error:
        raise BkctlError(f"{file} cannot be written: {error.strerror or error}") from error
    try:
        try:
            with open(descriptor, "wb") as stream:
                yield stream.write
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, file)
        except OSError as error:
            raise BkctlError(f"{file} cannot be written: {error.strerror or error}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
