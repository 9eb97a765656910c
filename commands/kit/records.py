"""The options and columns of records, for `journal read` and `entrylog read`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from bkctl.columns import Column, Columns, Constant, Kind
from bkctl.errors import BkctlError, Corrupt, NotFound, Unsupported, UsageError

from .columns import Output, payload_column, union
from .command import Run
from .ledger_options import SCAN_LEDGERS, ScanFilter
from .options import (
    BinaryFormat,
    BinaryFormatOption,
    Composite,
    argument,
    combined,
    count_option,
    digest_type_option,
    flag,
    number_option,
    parameter,
)
from .output import RowWriter
from .printer import Printer
from .texts import NULL, counted, words

if TYPE_CHECKING:
    from bkctl.checks.digests import DigestChecker
    from bkctl.files.directories import BookieDirectories, BookieFile
    from bkctl.files.listing import RecordFilter
    from bkctl.files.scan import RecordBatch
    from bkctl.formats.entry import DigestType
    from bkctl.formats.record import Record

R = TypeVar("R", bound=Any)


class TypeName(StrEnum):
    """The types of records, by the names in RecordType (which is not imported to show help)."""

    ENTRY = "entry"
    LEDGER_KEY = "ledgerKey"
    FENCE = "fence"
    FORCE_LEDGER = "forceLedger"
    EXPLICIT_LAC = "explicitLac"
    PADDING = "padding"
    LEDGERS_MAP = "ledgersMap"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> TypeName | None:
        """Return the type that tables name in words, such as `ledger key`."""
        return next((each for each in cls if words(each.value) == value), None)


class Records(NamedTuple):
    """The records to show, and their form."""

    ledgers: Annotated[ScanFilter, SCAN_LEDGERS] = ScanFilter(None, None)
    entry_id: Annotated[int | None, number_option("--entry", "Only this entry id.")] = None
    position_first: Annotated[
        int | None, number_option("--from-pos", "Begin at this byte of the file; a record must begin there (0: all).")
    ] = None
    position_last: Annotated[
        int | None, number_option("--to-pos", "The last byte that a shown record may begin at.")
    ] = None
    types: Annotated[
        list[TypeName] | None,
        flag(
            "--type TYPE",
            f"Only records of this type, repeatable: {', '.join(TypeName)} (default: all but padding and ledgersMap).",
        ),
    ] = None
    limit: Annotated[int | None, count_option("--limit", "Print at most N records.")] = None
    body: Annotated[bool, flag("--body", "Print the payloads, too.")] = False
    format: BinaryFormatOption = None
    digest_type: Annotated[
        Any,
        digest_type_option(
            "Digest type of the ledgers of scope 0; without it, the start of their payloads is unknown."
        ),
    ] = None

    def filter(self) -> RecordFilter:
        """Return the RecordFilter that these options ask for. Raises UsageError for a negative position."""
        from bkctl.files.listing import RecordFilter
        from bkctl.formats.record import RecordType

        for position, name in ((self.position_first, "--from-pos"), (self.position_last, "--to-pos")):
            if position is not None and position < 0:
                raise UsageError(f"{name} {position}: a position is 0 or more")
        types = None if not self.types else frozenset(RecordType(each.value) for each in self.types)
        return RecordFilter(*self.ledgers, self.entry_id, types, self.position_first or 0, self.position_last)


DirOption = Annotated[
    list[Path] | None, flag("--dir DIR", "A directory of the bookie, with or without its current; repeatable.")
]


def directories_argument(help: str) -> Composite:
    """Return the argument DIR, repeatable, and `--dir`, as one list of Paths."""
    return combined(
        lambda places, directories: [*(places or ()), *(directories or ())],
        argument("DIR", help, list[Path] | None),
        parameter("directories", DirOption),
    )


Directories = Annotated[Sequence[Path], directories_argument("The bookie's directories (default: as in --conf).")]
ShowSecretsOption = Annotated[bool, flag("--show-secrets", "Print the master keys, too.")]


def record_columns(
    path: Path, file_id: int | None, id_name: str, options: Records, *, secrets: bool = False
) -> Columns:
    """Return the columns of the records of the file `path`; `id_name` is `journalId` or `logId`."""
    from bkctl.formats.record import NO_LEDGER, RecordType

    digest_type = options.digest_type

    def master_key(record: Record) -> bytes | None:
        return record.special_payload if record.type is RecordType.LEDGER_KEY else None

    def size(record: Record) -> int | None:
        return None if digest_type is None and record.format_version == 1 else record.payload_size(digest_type)

    columns = [
        Column("LEDGER", "ledger", lambda row: None if row.ledger == NO_LEDGER else row.ledger, Kind.LEDGER),
        Column("ENTRY", "entryId", "entry_id", Kind.INTEGER, text=lambda each: NULL if each < 0 else str(each)),
        Column("LAC", "lastAddConfirmed", "lac", Kind.INTEGER),
        Column("LENGTH", "length", "length", Kind.INTEGER),
        Column("SIZE", "size", size, Kind.INTEGER),
        Column(None, "formatVersion", "format_version", Kind.INTEGER),
        Column(None, id_name, Constant(file_id), Kind.INTEGER),
        Column(None, f"{id_name}Hex", Constant(None if file_id is None else f"{file_id:x}")),
        Column("OFFSET", "offset", "offset", Kind.INTEGER),
        Column("RECORD SIZE", "recordSize", "record_size", Kind.INTEGER),
        Column("TYPE", "type", "type", Kind.WORD),
        Column("FILE", "file", Constant(str(path)), flexible=True, text=lambda path: Path(path).name),
    ]
    if secrets:
        columns.append(Column("MASTER KEY", "masterKey", master_key, Kind.BINARY, optional=True, text=bytes.hex))
    if options.body or options.format is not None:
        columns.append(payload_column(lambda record: record.payload(digest_type), options.format))
    return Columns(*columns, key="offset")


def shown_record_columns(id_name: str) -> Columns:
    """Return the columns of records with and without --body and --show-secrets."""
    variants = (Records(), False), (Records(body=True), True)
    return union(*(record_columns(Path(), None, id_name, options, secrets=secrets) for options, secrets in variants))


def print_records(
    run: Run,
    files: Iterable[tuple[Path, int | None, Iterator[RecordBatch]]],
    id_name: str,
    options: Records,
    *,
    secrets: bool = False,
) -> None:
    """Print the records of `files` (path, id, records), file by file; damage in one does not hide the next.

    Raises the error of the one damaged file, or Corrupt naming how many there are; NotFound if every file ends before
    the position to begin at.
    """
    is_raw, has_body = options.format is BinaryFormat.RAW, options.body or options.format is not None
    if is_raw and run.out.given_output is not Output.TABLE:
        raise UsageError("--format raw prints payloads and nothing else", hint=f"leave -o {run.out.given_output} out")
    if not is_raw:
        options = options._replace(limit=run.out.limit_sorted(options.limit))
    tally = _Tally(options)
    errors: list[BkctlError] = []
    sizes: dict[Path, int] = {}
    with ExitStack() as stack:
        writer: RowWriter | None = None
        for path, file_id, batches in files:
            with suppress(FileNotFoundError):  # A running bookie deleted it meanwhile.
                sizes[path] = path.stat().st_size
            columns = record_columns(path, file_id, id_name, options, secrets=secrets)
            try:
                if is_raw:
                    for record in tally.records(batches):
                        run.out.raw(record.payload(options.digest_type) or b"")
                else:
                    writer = writer or stack.enter_context(run.out.rows(columns))
                    writer.use(columns)
                    if has_body:
                        writer.rows(tally.records(batches))
                    for batch in () if has_body else tally.batches(batches):
                        _write_batch(writer, batch, options.digest_type)
            except (Corrupt, Unsupported) as error:
                errors.append(error)
            if tally.left == 0:
                break
        if writer is None and not is_raw:
            stack.enter_context(run.out.rows(record_columns(Path(), None, id_name, options, secrets=secrets)))
    if tally.unknown:
        run.out.note(
            f"{counted(tally.unknown, 'entry')} of scope 0 without a known start of the payload; add --digest-type"
        )
    run.out.raise_first(errors)
    first = options.position_first or 0
    if sizes and first > max(sizes.values()):
        path, size = max(sizes.items(), key=itemgetter(1))
        raise NotFound(f"{path} ends at byte {size}, before --from-pos {first}")


def _write_batch(writer: RowWriter, batch: RecordBatch, digest_type: DigestType | None) -> None:
    if batch.record is not None:
        writer.row(batch.record)
        return
    sizes = batch.payload_sizes(digest_type)
    writer.block(len(batch), {
            "ledger": batch.ledgers,
            "entryId": batch.numbers("entry_ids"),
            "lastAddConfirmed": batch.numbers("last_add_confirmed"),
            "length": batch.numbers("lengths"),
            "size": Constant(None) if sizes is None else sizes,
            "formatVersion": Constant(batch.format_version),
            "offset": batch.offsets,
            "recordSize": batch.numbers("sizes"),
            "type": Constant(TypeName.ENTRY),
            "masterKey": Constant(None),
    })  # fmt: skip


class _Tally:
    """Counts records against the limit, and those whose payload was wanted and cannot be told from the digest."""

    def __init__(self, options: Records) -> None:
        self._options = options
        self.left = options.limit
        self.unknown = 0

    def records(self, batches: Iterator[RecordBatch]) -> Iterator[Record]:
        """Yield the records one by one, as many as the limit leaves."""
        for batch in self.batches(batches):
            for record in batch.records():
                if record.length is not None and record.payload_offset(self._options.digest_type) is None:
                    self.unknown += 1
                yield record

    def batches(self, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        """Yield the batches, as many records as the limit leaves."""
        for batch in batches:
            if self.left is None:
                yield batch
                continue
            chosen = batch.first(self.left)
            self.left -= len(chosen)
            yield chosen
            if self.left == 0:
                return


def note_digests(run: Run, checker: DigestChecker, *, always: bool = False) -> None:
    """Print how many entries could not be checked against their digests, and why; with `always`, all numbers."""
    counts = checker.counts()
    if always:
        matched = counted(sum(counts.matched.values()), "entry matches its digest", "entries match their digests")
        run.out.note(f"{matched}; mismatched: {counts.mismatched:,}, without a digest: {counts.unprotected:,}")
    if (hint := checker.hint()) is not None:
        unchecked = counted(counts.unknown + counts.without_password, "entry")
        run.out.note(f"{unchecked} could not be checked: {hint}")


def records_in(
    run: Run, path: Path, kind: type[R], read: Callable[[R], Iterator[RecordBatch]]
) -> Iterator[RecordBatch]:
    """Yield the records that `read` finds in a file, and say on stderr if it ends within one.

    Yields none in a file that a running bookie deleted meanwhile.
    """
    try:
        reader = kind.open(path)
    except NotFound:
        return
    with reader as opened:
        yield from read(opened)
        if opened.end == "torn":
            run.out.note(f"{path} ends within a record at byte {opened.position}: its bookie died, or still writes")


def named_files(
    given: BookieDirectories,
    names: Iterable[str] | None,
    files: Callable[[BookieDirectories], Iterable[BookieFile]],
    resolve: Callable[[str], Path],
) -> list[Path]:
    """Return the files that arguments name, each once: `files` in a directory, or the file that `resolve` finds.

    Without arguments, these are all `files` in the given directories.
    """
    from bkctl.files.directories import BookieDirectories

    if not names:
        return [each.path for each in files(given)]
    found: list[Path] = []
    for name in names:
        is_dir = name and Path(name).is_dir()
        found += (each.path for each in files(BookieDirectories.at(name).of_a_bookie())) if is_dir else [resolve(name)]
    return list(dict.fromkeys(found))


def collect_errors(rows: Iterable[R], errors: list[BkctlError]) -> Iterator[R]:
    """Yield the rows, and add their errors to `errors`."""
    for row in rows:
        if row.error is not None:
            errors.append(row.error)
        yield row


class CheckedFiles:
    """The checks of files on their way to the output, where a sentence stands for the sound files on a terminal."""

    def __init__(self, out: Printer, records_of: Callable[[Any], int]) -> None:
        self._out, self._records_of = out, records_of
        self.finding_count = self._sound_count = self._record_count = self._row_count = 0
        self.errors: list[BkctlError] = []

    def render(self, checks: Iterable[Any], columns: Columns) -> None:
        """Print the checks."""
        self._row_count = self._out.render(self._rows(checks), columns, findings=self._out.draws)

    def _rows(self, checks: Iterable[Any]) -> Iterator[Any]:
        for check in checks:
            self.finding_count += check.finding_count
            if check.error is not None:
                self.errors.append(check.error)
            if check.is_sound:
                self._sound_count += 1
                self._record_count += self._records_of(check)
            if not (check.is_sound and self._out.draws):
                yield check

    def note_sound(self, one: str, many: str, *records: str) -> None:
        """Say on a terminal how many files are sound; `records` are the words for one and many of theirs."""
        if self._out.draws and (self._sound_count or not self._row_count):
            sound, count = counted(self._sound_count, one, many), counted(self._record_count, *records)
            self._out.note(f"{sound} sound: {count}; -o wide lists them")
