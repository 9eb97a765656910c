"""`bkctl entrylog verify`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import UsageError

from ..kit.columns import Output, with_hex
from ..kit.command import Run, command, group, rows_of
from ..kit.next_steps import next_column
from ..kit.options import DigestToCheck, LedgerPassword, ReadPace
from ..kit.records import CheckedFiles, DirOption, note_digests
from ..kit.texts import RED, YELLOW
from ..kit.values import tap
from .logs import LogNames, file_column, find_logs, log_key

if TYPE_CHECKING:
    from bkctl.checks.log_check import LogCheck

app = group()


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
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("GOOD END", "goodEnd", "good_end", Kind.INTEGER),
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
    no_digests: Annotated[bool, typer.Option("--no-digests", help="Check the structure only.")] = False,
) -> None:
    """Check the records, maps and digests of entry logs.

    Shows where the intact part of a log ends, why, and what can be saved behind it. On a terminal a sentence counts the
    sound logs in place of their rows. Exit code 7 if a log is damaged; 3 if entries do not match their digests, or a
    ledgers map contradicts the records.

    $ bkctl entrylog verify --conf bk_server.conf
    $ bkctl entrylog verify 0 --conf bk_server.conf --no-digests
    """
    from bkctl.checks.log_check import check_entry_logs

    if no_digests and digest.wanted:
        raise UsageError("--no-digests and --digest are given", hint="give one of them")
    logs = find_logs(run, names, directories)
    index_dirs = run.access.directories(directories, needed=False).index_dirs
    checked = CheckedFiles(run.out, attrgetter("entry_count"))
    digests = nullcontext() if no_digests else run.access.digest_checker(digest.digest_type, password, logs)
    with (
        digests as checker,
        run.job.working("Reading entry logs", total=len(logs), unit="entry logs", pace=pace) as activity,
    ):
        checks = tap(check_entry_logs(logs, checker, index_dirs=index_dirs, pace=pace), lambda _: activity.advance())
        checked.render(_saying_more(run, checks), CHECK_COLUMNS)
    checked.note_sound("entry log is", "entry logs are", "entry", "entries")
    if checker is not None:
        note_digests(run, checker)
    run.out.raise_first(checked.errors)
    run.out.finish_with(checked.finding_count, "finding", "findings")


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
    for note in notes:
        run.out.note(note)
