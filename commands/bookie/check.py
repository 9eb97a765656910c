"""`bkctl bookie check` and `bkctl bookie index check`."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, current_of
from bkctl.ids import LedgerId
from bkctl.metadata.liveness import StoredLedgers
from bkctl.model import LedgerLiveness

from ..kit.columns import fields, with_hex
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import LEDGERS_BY_OPTION, LedgersOrAll, scope_option
from ..kit.next_steps import next_column
from ..kit.options import DigestToCheck, LedgerPassword, ReadPace, combined, flag, number_option, option
from ..kit.records import Directories
from ..kit.texts import counted, size_text
from .files import index_app

if TYPE_CHECKING:
    from bkctl.checks.digests import DigestChecker
    from bkctl.checks.findings import Counts, FindDeleted

app = group()

FINDING_COLUMNS = Columns(
    Column("KIND", "kind", lambda row: row.kind.value, Kind.WORD),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
    *with_hex("LOG", "logId", "log_id"),
    *fields(Kind.INTEGER, offset="OFFSET", location=None),
    Column("REASON", "reason", "reason"),
    Column("FILE", "file", lambda row: str(row.path), flexible=True, spare=2),
    Column(None, "finding", "is_problem", Kind.BOOLEAN),
    next_column("bookie check", lambda row: row.kind.value, ledger=lambda row: row.ledger),
    key="ledger",
)


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
    checker = run.access.digest_checker(digest.digest_type, password, logs) if digest.wanted else nullcontext()
    with checker as digests, run.job.working("Checking", unit="bytes", pace=pace) as activity:
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
        run.out.render(job.findings(), FINDING_COLUMNS, findings=True)
    counts = job.counts
    if job.missing and not (counts.findings or counts.error_count):
        names = ", ".join(map(str, sorted(job.missing)))
        raise NotFound(
            f"No index and no entry log has ledger {names}", hint="'bkctl bookie index show --meta' lists the ledgers"
        )
    run.out.note(
        f"{_verdict(counts)}{counted(counts.ledgers, 'ledger', 'ledgers')}, "
        f"{counted(counts.entries, 'entry', 'entries')} in the index, "
        f"{counted(counts.records, 'record', 'records')} in {counted(counts.logs, 'log', 'logs')}, "
        f"{size_text(counts.bytes_read)} read{_remarks(counts)}"
    )
    if digests is not None:
        _note_digests(run, digests)
    _finish(run, counts)


def _verdict(counts: Counts) -> str:
    """Return the beginning of the sentence that sums up a check."""
    return "" if counts.findings or counts.error_count else "The index is sound: "


def _remarks(counts: Counts) -> str:
    parts = []
    for count, one, many in (
        (counts.findings, "finding", "findings"),
        (counts.notes, "note", "notes"),
        (counts.not_flushed, "entry not flushed", "entries not flushed"),
        (counts.copies, "old copy", "old copies"),
        (counts.error_count, "index damaged", "indexes damaged"),
    ):
        if count:
            parts.append(counted(count, one, many))
    return f"; {', '.join(parts)}" if parts else ""


def _note_digests(run: Run, digests: DigestChecker) -> None:
    counts = digests.counts()
    matched = ", ".join(f"{count:,} {each.name}" for each, count in counts.matched.items()) or "none"
    unknown = counts.unknown + counts.without_password
    run.out.note(
        f"Digests: {matched} matched, {unknown:,} not known, "
        f"{counted(counts.unprotected, 'entry', 'entries')} without one"
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
    run.out.finish_with(counts.findings, "finding", "findings")


def _deleted_finder(run: Run, given: BookieDirectories) -> FindDeleted:
    """Return a function that asks the cluster which ledgers were deleted.

    Where none is named, none answers, or it is another one, no ledger counts as deleted, and the reason is printed.
    """

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
        run.out.render(job.findings(), FINDING_COLUMNS, findings=True)
    counts = job.counts
    parts = []
    if ledgers or both:
        parts.append(f"{counted(counts.ledgers, 'ledger', 'ledgers')}, {counts.fenced_ledgers:,} of them fenced")
    if both:
        parts.append(f"{counts.empty_ledgers:,} without entries")
    if locations or both:
        parts.append(counted(counts.entries, "entry", "entries"))
    run.out.note(f"{_verdict(counts)}{', '.join(parts)}{_remarks(counts)}")
    _finish(run, counts)
