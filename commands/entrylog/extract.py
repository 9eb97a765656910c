"""`bkctl entrylog extract`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from inspect import Parameter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, LedgerNotFound, NotFound, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import Output, PlainRow, fields
from ..kit.command import Run, command, group, object_of
from ..kit.ledger_options import ledger_option, scope_option
from ..kit.lines import Lines
from ..kit.options import Entries, EntryIdRange, LedgerPassword, combined, digest_type_option, flag
from ..kit.records import DirOption
from ..kit.texts import counted
from .listing import LogNames, find_logs

if TYPE_CHECKING:
    from bkctl.formats.entry import DigestType
    from bkctl.repair.extraction import LedgerExtraction

app = group()

ExtractFormat = StrEnum("ExtractFormat", "LOG NDJSON RAW")

LedgerToExtract = Annotated[
    LedgerId,
    combined(
        LedgerId.parse,
        ledger_option("The ledger", Parameter.empty),
        scope_option("Ledger scope id of a bare ledger id."),
    ),
]

GAPS_SHOWN_MAX = 1000
#: Entries that are turned into text at once: entries may have megabytes.
EXTRACT_BATCH_ROWS = 16


def _gap_text(gaps: list[tuple[int, int]]) -> str:
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in gaps[:10]]
    return ", ".join(shown) + (f", … ({len(gaps)} ranges)" if len(gaps) > 10 else "")


REPORT_COLUMNS = Columns(
    Column("LEDGER", "ledger", "extraction.ledger", Kind.LEDGER),
    Column("ENTRIES", "entryCount", "extraction.entries_count", Kind.INTEGER),
    Column("FIRST ENTRY", "firstEntryId", lambda row: next(row.extraction.entry_ids), Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "extraction.last_entry_id", Kind.INTEGER),
    Column("COPIES WRITTEN", "copiesCount", lambda row: len(row.extraction), Kind.INTEGER),
    Column("COPIES FOUND", "copiesFoundCount", "extraction.copies_count", Kind.INTEGER),
    Column("MISSING", "missingCount", "missing_count", Kind.INTEGER),
    Column(
        "MISSING ENTRIES", "missing",
        lambda row: [{"firstEntryId": first, "lastEntryId": last} for first, last in row.gaps] or None,
        Kind.NESTED,
        text=lambda value: _gap_text([(each["firstEntryId"], each["lastEntryId"]) for each in value]),
    ),
    Column("LEDGER ENDS AT", "endEntryId", "end_entry_id", Kind.INTEGER, optional=True),
    Column("DAMAGED", "damagedCount", lambda row: len(row.damaged) or None, Kind.INTEGER, optional=True),
    Column(
        "DAMAGED ENTRIES", "damaged", lambda row: row.damaged[:GAPS_SHOWN_MAX] or None,
        Kind.NESTED, optional=True,
        text=lambda ids: _gap_text([(each, each) for each in ids]),
    ),
    Column("DIGEST TYPE", "digestType", value_at("digest_type.name")),
    Column("LOGS", "logs", lambda row: list(map(str, row.extraction.log_paths)), Kind.NESTED),
    Column("FILE", "file", lambda row: str(row.file)),
    key="ledger",
)  # fmt: skip


@command(app, "extract", connects=True, asks=True, prints=object_of(REPORT_COLUMNS))
def extract(
    run: Run,
    entries: Entries,
    ledger: LedgerToExtract,
    digest_type: Annotated[
        Any, digest_type_option("Digest type of a ledger of scope 0 (default: from metadata, else found by trying).")
    ],
    password: LedgerPassword,
    file: Annotated[Path, flag("--file -f FILE", "The file to write; - is stdout.", show_default=False)],
    names: LogNames = None,
    directories: DirOption = None,
    form: Annotated[
        ExtractFormat,
        flag(
            "--format FORMAT",
            "log (an entry log, as bookies read it), ndjson (rows as 'entrylog read --body' prints "
            "them), or raw (the payloads, nothing between them).",
            show_default=True,
        ),
    ] = ExtractFormat.LOG,
    all_copies: Annotated[
        bool, flag("--all-copies", "Write each copy of an entry, oldest first (default: the last).")
    ] = False,
    scan: Annotated[bool, flag("--scan", "Read every log, even if its ledgers map does not name the ledger.")] = False,
) -> None:
    """Write the entries of one ledger to a file.

    Gathers the entries from all entry logs, in order, and shows which are missing. Only metadata (-u) or --to tells
    where a ledger ends. Entries that do not match their digests are written, unless another copy does, and listed as
    damaged. Exit code 3 if entries are missing or damaged, or a log ends within a record. Damaged logs are read behind
    the damage, too, which is reported (exit code 7) once the file is written. Without any entry nothing is written
    (exit code 4).

    $ bkctl entrylog extract --ledger 12 --file ledger-12.log --conf bk_server.conf
    """
    from bkctl.repair.extraction import LedgerExtraction

    if str(file) == "-" and form is not ExtractFormat.NDJSON and run.out.given_output is not Output.TABLE:
        raise UsageError("-o does not apply to bytes on stdout", hint="--format ndjson prints rows")
    if str(file) != "-" and not file.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
    paths = find_logs(run, names, directories)
    last = _last_entry_id(run, ledger) if entries.last is None else entries.last
    digests = run.digest_checker(digest_type, password, paths)
    with (
        run.job.working(f"Gathering ledger {ledger}"),
        LedgerExtraction(
            paths, ledger, entries.first or 0, last, all_copies=all_copies, trust_maps=not scan, digests=digests
        ) as extraction,
    ):
        if not len(extraction):
            _raise_nothing_found(run, extraction, entries, len(paths))
        digest_type = _digest_of(extraction, digest_type, form)
        with _target(run, file) as target:
            left = _write_entries(extraction, form, digest_type, target)
        gaps, missing = _find_gaps(extraction)
        damaged = extraction.damaged_ids
        if str(file) != "-":
            row = PlainRow(extraction=extraction, digest_type=digest_type, gaps=gaps, damaged=damaged, file=file)
            run.out.show(PlainRow(**vars(row), missing_count=missing, end_entry_id=last), REPORT_COLUMNS)
        else:
            lacks = ("missing", missing, gaps), ("damaged", len(damaged), [(each, each) for each in damaged])
            run.out.warn(*(f"{what} entries ({count:,}): {_gap_text(ids)}" for what, count, ids in lacks if count))
        if last is None and (str(file) == "-" or run.out.output in (Output.TABLE, Output.WIDE)):
            run.out.note(
                f"Missing entries are known up to {extraction.last_entry_id}; the end of ledger {ledger} is unknown: "
                "add -u URI to read it from metadata, or --to"
            )
        if hint := digests.hint():
            run.out.note(f"Digests of ledger {ledger} are not checked: {hint}")
        run.out.warn(
            *(f"{path} ends within a record: entries behind it are not there, or not yet" for path in extraction.cut)
        )
        problems, finding_count = list(extraction.problems), missing + len(damaged) + len(extraction.cut)
    if left is not None:
        full = BkctlError(
            f"{file} is full at 2 GiB: entries from {left} on are missing",
            hint=f"write them to another file with --from {left}",
        )
        problems.insert(0, full)
    run.out.raise_first(problems)
    run.out.finish_with(finding_count)


def _last_entry_id(run: Run, ledger: LedgerId) -> int | None:
    """Return the last entry of a closed ledger from metadata.

    None for an open or deleted one, and if no metadata store is named. Raises as `Ledgers.read`.
    """
    if not run.access.names_metadata:
        return None
    try:
        metadata = run.cluster.ledgers.read(ledger).metadata
    except LedgerNotFound:
        return None
    return metadata.last_entry_id if metadata.is_closed else None


def _raise_nothing_found(run: Run, extraction: LedgerExtraction, entries: EntryIdRange, log_count: int) -> NoReturn:
    """Raise the first problem of the logs, else NotFound."""
    run.out.raise_first(extraction.problems)
    wanted = ""
    if entries != (None, None):
        wanted = f"from {entries.first or 0} to {'the last' if entries.last is None else entries.last} "
    raise NotFound(
        f"No entry {wanted}of ledger {extraction.ledger} in {counted(log_count, 'log')}",
        hint="--scan also reads logs whose ledgers map does not name it" if extraction.logs_skipped else None,
    )


def _write_entries(
    extraction: LedgerExtraction, form: ExtractFormat, digest_type: DigestType | None, target: Callable[[bytes], object]
) -> int | None:
    """Write the entries in `form`; return the first entry for which an entry log had no room, None if all fit."""
    if form is ExtractFormat.LOG:
        return extraction.write_log(target)
    if form is ExtractFormat.NDJSON:
        lines = Lines(_extracted_columns(digest_type), Output.NDJSON)
        entries = extraction.entries()
        while rows := list(islice(entries, EXTRACT_BATCH_ROWS)):
            target(lines.text(rows).encode())
    else:
        for entry in extraction.entries():
            target(entry.record.payload(digest_type) or b"")
    return None


def _find_gaps(extraction: LedgerExtraction) -> tuple[list[tuple[int, int]], int]:
    """Return the first gaps between the entries, and the number of missing entries in all gaps."""
    gaps: list[tuple[int, int]] = []
    missing = 0
    for gap in extraction.gaps():
        missing += gap.last_entry_id - gap.first_entry_id + 1
        if len(gaps) < GAPS_SHOWN_MAX:
            gaps.append((gap.first_entry_id, gap.last_entry_id))
    return gaps, missing


def _digest_of(extraction: LedgerExtraction, given: DigestType | None, form: ExtractFormat) -> DigestType | None:
    """Return the digest type, which tells where payloads begin: as given, as in the records, else by trying."""
    record = next(extraction.entries()).record
    digest_type = given or record.digest_type or extraction.find_digest_type()
    if form is ExtractFormat.RAW and record.payload_offset(digest_type) is None:
        raise UsageError(
            f"Entries of ledger {extraction.ledger} do not show where their payload begins, and neither CRC32C nor "
            "CRC32 fits",
            hint="add --digest-type HMAC or DUMMY, or use --format ndjson",
        )
    return digest_type


def _extracted_columns(digest_type: DigestType | None) -> Columns:
    return Columns(
        Column("LEDGER", "ledger", "record.ledger", Kind.LEDGER),
        *fields(Kind.INTEGER, "record.", entryId="ENTRY", lastAddConfirmed="LAC", length="LENGTH"),
        Column("SIZE", "size", lambda row: row.record.payload_size(digest_type), Kind.INTEGER),
        Column(None, "formatVersion", "record.format_version", Kind.INTEGER),
        Column(None, "logId", "log_id", Kind.INTEGER),
        Column(None, "logIdHex", lambda row: None if row.log_id is None else f"{row.log_id:x}"),
        *fields(Kind.INTEGER, "record.", offset="OFFSET", recordSize="RECORD SIZE"),
        Column("TYPE", "type", "record.type"),
        Column("FILE", "file", lambda row: str(row.path)),
        Column(None, "damaged", lambda row: row.damaged or None, Kind.BOOLEAN, optional=True),
        Column("PAYLOAD", "payload", lambda row: row.record.payload(digest_type), Kind.BINARY),
    )


@contextmanager
def _target(run: Run, file: Path) -> Iterator[Callable[[bytes], object]]:
    """Yield a function that writes bytes to `file`, which appears whole or not at all; `-` is stdout."""
    from bkctl.disk import FILE_MODE, atomic_write

    if str(file) == "-":
        yield run.out.raw
        return
    if file.is_dir():
        raise UsageError(f"{file} is a directory, not a file")
    if file.exists():
        if not file.is_file():
            raise UsageError(f"{file} is not a regular file", hint="write to -, and redirect that")
        run.consent.confirm(f"{file} exists and would be replaced")

    try:
        with atomic_write(file, mode=FILE_MODE) as stream:
            yield stream.write
    except OSError as error:
        if error.filename is not None:
            raise
        raise BkctlError(f"{file} cannot be written: {error.strerror or error}") from error
