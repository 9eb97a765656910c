"""What `journal read` and `entrylog read` have in common: the options and columns of records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import BkctlError, Corrupt, Unsupported, UsageError
from bkctl.ids import LedgerId

from ._command import Run
from ._options import (
    SCAN_LEDGERS,
    BinaryFormat,
    BinaryFormatOption,
    Composite,
    count_option,
    digest_type_option,
    number_option,
    parameter,
)
from ._output import NULL, Column, Columns, Kind, Output, base64_text, binary_text, readable_text

if TYPE_CHECKING:
    from bkctl.formats.entry import DigestType
    from bkctl.formats.record import Record
    from bkctl.storage.listing import RecordFilter


class TypeName(StrEnum):
    """The words for records, as RecordType has them (which is not imported to show help)."""

    ENTRY = "entry"
    LEDGER_KEY = "ledgerKey"
    FENCE = "fence"
    FORCE_LEDGER = "forceLedger"
    EXPLICIT_LAC = "explicitLac"
    PADDING = "padding"
    LEDGERS_MAP = "ledgersMap"
    UNKNOWN = "unknown"


class RecordOptions(NamedTuple):
    """Which records to show, and how."""

    ledger: LedgerId | None
    scope_id: int | None
    entry_id: int | None
    types: list[TypeName] | None
    position_first: int
    position_last: int | None
    limit: int | None
    body: bool
    format: BinaryFormat | None
    digest_type: DigestType | None

    def filter(self) -> RecordFilter:
        """The domain's filter."""
        from bkctl.formats.record import RecordType
        from bkctl.storage.listing import RecordFilter

        types = None if not self.types else frozenset(RecordType(name.value) for name in self.types)
        return RecordFilter(self.ledger, self.scope_id, self.entry_id, types, self.position_first, self.position_last)


_PARTS: dict[str, Composite] = {
    "ledgers": SCAN_LEDGERS,
    "entry": number_option("--entry", "Only this entry id."),
    "from": number_option("--from-pos", "Begin at this byte of the file; a record must begin there."),
    "to": number_option("--to-pos", "The last byte that a shown record may begin at."),
    "limit": count_option("--limit", "At most so many records."),
    "digest": digest_type_option(
        "Digest type of the ledgers of scope 0: their records do not say it, and so neither where their payload begins."
    ),
}


def _record_options(values: Mapping[str, Any]) -> RecordOptions:
    part = {name: composite.resolve(values) for name, composite in _PARTS.items()}
    for name, flag in (("from", "--from-pos"), ("to", "--to-pos")):
        if part[name] is not None and part[name] < 0:
            raise UsageError(f"{flag} {part[name]}: a position is 0 or more")
    return RecordOptions(
        part["ledgers"].ledger,
        part["ledgers"].scope_id,
        part["entry"],
        values["types"],
        part["from"] or 0,
        part["to"],
        part["limit"],
        values["body"] or values["format"] is not None,
        values["format"],
        part["digest"],
    )


Records = Annotated[
    RecordOptions,
    Composite(
        (
            *_PARTS["ledgers"].parameters,
            *_PARTS["entry"].parameters,
            *_PARTS["from"].parameters,
            *_PARTS["to"].parameters,
            parameter(
                "types",
                Annotated[
                    list[TypeName],
                    typer.Option(
                        "--type", metavar="TYPE",
                        help=f"Only records of this type, repeatable: {', '.join(TypeName)} (default: all but padding "
                        "and ledgersMap).",
                    ),
                ],
            ),
            *_PARTS["limit"].parameters,
            parameter("body", Annotated[bool, typer.Option("--body", help="Print the payloads too.")], False),
            parameter("format", BinaryFormatOption),
            *_PARTS["digest"].parameters,
        ),
        _record_options,
    ),
]  # fmt: skip

DirOption = Annotated[
    list[Path] | None,
    typer.Option("--dir", metavar="DIR", help="A directory of the bookie, with or without its current; repeatable."),
]
ShowSecretsOption = Annotated[bool, typer.Option("--show-secrets", help="Also the master keys.")]


class Place:
    """The file that rows come from now."""

    __slots__ = ("hex", "id", "path")

    def __init__(self) -> None:
        self.id: int | None = None
        self.hex: str | None = None
        self.path = ""

    def move_to(self, path: Path, file_id: int | None) -> None:
        """Rows come from `path` from now on."""
        self.id, self.path = file_id, str(path)
        self.hex = None if file_id is None else f"{file_id:x}"


def record_columns(
    place: Place, id_name: str, options: RecordOptions, output: Output, *, secrets: bool = False
) -> Columns:
    """The columns of records; `id_name` is `journalId` or `logId`."""
    from bkctl.formats.record import NO_LEDGER, RecordType

    entry = RecordType.ENTRY
    digest_type = options.digest_type

    def ledger(record: Record) -> LedgerId | None:
        return None if record[3] is NO_LEDGER else record[3]

    def last_add_confirmed(record: Record) -> int | None:
        return record[5] if record[2] is not RecordType.EXPLICIT_LAC else _explicit_lac(record)

    columns = [
        Column("LEDGER", "ledger", ledger, Kind.LEDGER),
        Column(
            "ENTRY", "entryId", "entry_id", Kind.INTEGER,
            text=lambda entry_id: NULL if entry_id < 0 else str(entry_id),
        ),
        Column("LAC", "lastAddConfirmed", last_add_confirmed, Kind.INTEGER),
        Column("LENGTH", "length", "length", Kind.INTEGER),
        Column("SIZE", "size", lambda record: record.payload_size(digest_type), Kind.INTEGER),
        Column(None, "formatVersion", "format_version", Kind.INTEGER),
        Column(None, id_name, lambda _: place.id, Kind.INTEGER),
        Column(None, f"{id_name}Hex", lambda _: place.hex),
        Column("OFFSET", "offset", "offset", Kind.INTEGER),
        Column("RECORD SIZE", "recordSize", "record_size", Kind.INTEGER),
        Column("TYPE", "type", lambda record: record[2].value),
        Column("FILE", "file", lambda _: place.path, flexible=True, text=lambda path: Path(path).name),
    ]  # fmt: skip
    if secrets:
        columns.append(
            Column("MASTER KEY", "masterKey", lambda record: (
                record.special_payload.hex() if record[2] is RecordType.LEDGER_KEY else None
            ), optional=True)
        )  # fmt: skip
    if options.body:
        form = options.format

        def payload(record: Record) -> str | None:
            data = record.payload(digest_type) if record[2] is entry else None
            if data is None:
                return None
            if form is None:
                return readable_text(data) if output is Output.TABLE else base64_text(data)
            return binary_text(data, form)

        columns.append(Column("PAYLOAD", "payload", payload, flexible=True))
    return Columns(*columns, key="offset")


def _explicit_lac(record: Record) -> int | None:
    from bkctl.formats.entry import read_lac_header

    try:
        return read_lac_header(record.special_payload).last_add_confirmed
    except (Corrupt, Unsupported):
        return None


def print_records(
    run: Run,
    files: Iterable[tuple[Path, int | None, Iterator[Record]]],
    id_name: str,
    options: RecordOptions,
    *,
    secrets: bool = False,
) -> None:
    """Print the records of `files` (path, id, records), file by file; damage in one does not hide the next.

    Raises the error of the one damaged file, or Corrupt naming how many there are.
    """
    if options.format is BinaryFormat.RAW and run.output is not Output.TABLE:
        raise UsageError("--format raw prints payloads and nothing else", hint=f"leave -o {run.output.value} out")
    place = Place()
    columns = record_columns(place, id_name, options, run.output, secrets=secrets)
    errors: list[BkctlError] = []
    left = options.limit
    count = 0
    unknown = 0
    with run.rows(columns) as writer:
        row = writer.row
        for path, file_id, records in files:
            place.move_to(path, file_id)
            try:
                for record in records if left is None else islice(records, left - count):
                    count += 1
                    if options.format is BinaryFormat.RAW:
                        run.raw(record.payload(options.digest_type) or b"")
                    else:
                        row(record)
                    if (
                        options.body
                        and record.payload_offset(options.digest_type) is None
                        and record.length is not None
                    ):
                        unknown += 1
            except (Corrupt, Unsupported) as error:
                errors.append(error)
            if left is not None and count >= left:
                break
    if unknown:
        run.note(f"bkctl: {unknown:,} entries of scope 0 do not say where their payload begins; add --digest-type")
    raise_first(run, errors)


def raise_first(run: Run, errors: list[BkctlError]) -> None:
    """Raise the first error; the others are said before."""
    for error in errors[1:]:
        run.note(f"bkctl: {error}")
    if errors:
        raise errors[0]
