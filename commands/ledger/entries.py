"""`bkctl ledger write`, `read` and `tail`, and entries in a form that the user gives, in kcat's way: `%e %s\\n`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from operator import attrgetter
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from bkctl.columns import Column, Columns, Constant, Kind, base64_text
from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row

from ..kit.columns import ALL, Output, fields, payload_column
from ..kit.command import Run, command, group, object_of, rows_of, union
from ..kit.ledger_options import LedgerToCreate, NewLedger, OneLedger
from ..kit.options import (
    BinaryFormat,
    BinaryFormatOption,
    CustomMetadata,
    Entries,
    LedgerPassword,
    LedgerShape,
    ProtocolOption,
    count_option,
    flag,
    size_option,
    word,
)
from ..kit.terminal import flush
from ..kit.values import refuse_both
from .listing import LEDGER_COLUMNS

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper
    from bkctl.client.write_handle import WriteHandle
    from bkctl.metadata.cluster import Cluster

app = group()
write_app = group()

#: The bytes to write for an entry.
EntryBytes = Callable[[Any], bytes]

_FIELDS: Final[dict[str, EntryBytes]] = {
    "e": lambda entry: b"%d" % entry.entry_id,
    "s": lambda entry: bytes(entry.payload),
    "S": lambda entry: b"%d" % len(entry.payload),
    "x": lambda entry: entry.payload.hex().encode(),
    "b": lambda entry: base64_text(entry.payload).encode(),
    "c": lambda entry: b"%d" % entry.last_add_confirmed,
    "n": lambda entry: b"%d" % entry.length,
}
FIELDS_HELP: Final = (
    "%e entry id, %s payload, %S its bytes, %x payload in hex, %b in base64, %l ledger, %c last add confirmed, "
    "%n ledger length so far, %% a percent sign, \\n \\t \\0 \\xHH"
)
_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_PART: Final = re.compile(r"%(?P<field>.?)|\\x(?P<hex>[0-9a-fA-F]{2})|\\(?P<escape>.?)|[^%\\]+", re.DOTALL)


def template_form(template: str, ledger: LedgerId) -> EntryBytes:
    """Return the function that writes an entry of `ledger` as `template` says. Raises UsageError."""
    parts = _parts(template, "--template", ledger)
    return lambda entry: b"".join([part if isinstance(part, bytes) else part(entry) for part in parts])


def raw_form(delimiter: str | None) -> EntryBytes:
    """Return the function that writes an entry's payload, and `delimiter` behind it. Raises UsageError."""
    if not delimiter:
        return lambda entry: entry.payload
    end = b"".join(part for part in _parts(delimiter, "--delimiter", None) if isinstance(part, bytes))
    return lambda entry: b"%b%b" % (entry.payload, end)


def _parts(text: str, flag: str, ledger: LedgerId | None) -> list[bytes | EntryBytes]:
    """Return the parts of `text`: bytes, and fields where there is a ledger (else a percent sign is itself)."""
    parts: list[bytes | EntryBytes] = []
    for match in _PART.finditer(text):
        field, digits, escape = match["field"], match["hex"], match["escape"]
        if digits is not None:
            parts.append(bytes.fromhex(digits))
        elif escape is not None:
            if escape not in _ESCAPES:
                raise UsageError(
                    f"{flag} {text!r}: \\{escape} is not an escape", hint="use \\n, \\t, \\r, \\0, \\xHH or \\\\"
                )
            parts.append(_ESCAPES[escape])
        elif field is None or ledger is None:
            parts.append(match[0].encode("utf-8", "surrogateescape"))
        elif field == "%":
            parts.append(b"%")
        elif field == "l":
            parts.append(str(ledger).encode())
        elif field in _FIELDS:
            parts.append(_FIELDS[field])
        else:
            raise UsageError(f"{flag} {text!r}: %{field} is not a field", hint=FIELDS_HELP)
    return parts


def entry_columns(ledger: LedgerId, body: bool, format: BinaryFormat | None) -> Columns:
    """Return the columns of the entries of a ledger, with payloads in `format` if `body`."""
    columns = [
        Column("LEDGER", "ledger", Constant(ledger), Kind.LEDGER),
        *fields(Kind.INTEGER, entryId="ENTRY", lastAddConfirmed="LAC", length="LENGTH"),
        Column("SIZE", "size", lambda entry: len(entry.payload), Kind.INTEGER),
        Column(None, "formatVersion", "format_version", Kind.INTEGER),
    ]
    if body:
        columns.append(payload_column(attrgetter("payload"), format))
    return Columns(*columns, key="entryId")


def _shown_columns() -> Columns:
    """Return the columns with and without --body."""
    return union(*(entry_columns(LedgerId(0, 0), body, None) for body in (False, True)))


def _secret(password: bytes, *, as_admin: bool) -> bytes | None:
    """Return the password to open a ledger with; None opens it as an administrator."""
    refuse_both("--as-admin", as_admin, "a password", bool(password), "drop one of them")
    return None if as_admin else password


def _print_entries(
    run: Run,
    cluster: Cluster,
    protocol: Any,
    runs: Callable[[BookKeeper], AsyncGenerator[Sequence[Any]]],
    columns: Columns,
    *,
    write: EntryBytes | None,
    live: bool = False,
) -> None:
    """Print the entries that `runs` yields for a client: as `write` does, or as rows; `live`: each at once."""
    run.out.end_with_stdout()  # What --recover changes is done: the reader ends the command again.
    bookkeeper = run.access.bookkeeper(cluster, protocol)
    if write is not None:
        run.job.take_each(bookkeeper, runs, partial(_write_raw, run, write, live))
        return
    with run.out.rows(columns, live=live) as writer:
        run.job.take_each(bookkeeper, runs, writer.rows)


def _write_raw(run: Run, write: EntryBytes, live: bool, entries: Sequence[Any]) -> None:
    run.out.raw(b"".join(map(write, entries)))
    if live:
        flush()


AsAdminOption = Annotated[
    bool, flag("--as-admin", "Read with the password in the metadata, as Apache's readledger does; in the audit log.")
]


class EntryForm(NamedTuple):
    """The entries that a command prints: their form, and whether their digests are checked."""

    no_verify: Annotated[bool, flag("--no-verify", "Do not check the entries' digests.")] = False
    body: Annotated[bool, flag("--body", "Print the payloads, too.")] = False
    format: BinaryFormatOption = None
    delimiter: Annotated[
        str | None, flag("--delimiter TEXT", "Write this after each payload of --format raw: '\\n', '\\0'.")
    ] = None
    template: Annotated[str | None, flag("--template -f TEMPLATE", f"Print entries in this form: {FIELDS_HELP}.")] = (
        None
    )

    def columns(self, ledger: LedgerId) -> Columns:
        """Return the columns of the entries of a ledger."""
        return entry_columns(ledger, self.body or self.format is not None, self.format)

    def writer(self, run: Run, ledger: LedgerId) -> EntryBytes | None:
        """Return the bytes to write for each entry, as a function of it; None: rows are printed. Raises UsageError."""
        if self.template is None and self.format is not BinaryFormat.RAW:
            if self.delimiter is not None:
                raise UsageError("--delimiter applies to --format raw", hint="add --format raw")
            return None
        name = "--format raw" if self.template is None else "--template"
        if run.out.given_output is not Output.TABLE or run.out.selection != ALL:
            raise UsageError(f"{name} prints entries and nothing else", hint="leave -o, --columns and --sort out")
        if self.template is None:
            return raw_form(self.delimiter)
        if self.format is not None or self.delimiter is not None:
            hint = "%x is hex, %b base64, \\n a line end"
            raise UsageError("--template excludes --format and --delimiter", hint=hint)
        return template_form(self.template, ledger)


@command(app, "read", changes=("recover", "as_admin"), undo=True, prints=rows_of(_shown_columns))
def read(
    run: Run,
    *,
    ledger: OneLedger,
    entries: Entries,
    limit: Annotated[int | None, count_option("--limit", "Read at most N entries.", "--count")],
    last: Annotated[int | None, count_option("--last", "Read the last N entries.")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    bookie: Annotated[str | None, flag("--bookie BOOKIE", "Read from this bookie only.")] = None,
    recover: Annotated[bool, flag("--recover", "Fence and close the ledger first.")] = False,
    form: EntryForm,
    as_admin: AsAdminOption = False,
) -> None:
    """Read the entries of a ledger, up to the last confirmed.

    The ledger's password is checked. --format raw writes the payloads' bytes and nothing else, --template each entry in
    a form of your own, as kcat does.

    $ bkctl ledger read 12 --last 10 --body
    $ bkctl ledger read 12 --from 100 --limit 5
    $ bkctl ledger read 12 --format raw > ledger-12
    $ bkctl ledger read 12 -f '%e %s\\n'
    """
    from bkctl.client.ledger_series import EntriesToRead, read_ledger

    write = form.writer(run, ledger)
    secret = _secret(password, as_admin=as_admin)
    if last is not None and (entries.first is not None or limit is not None):
        raise UsageError("--last excludes --from and --limit")
    refuse_both("--to", entries.last, "--limit", limit)
    runs = partial(
        read_ledger, ledger=ledger, entries=EntriesToRead(entries.first, entries.last, limit, last), password=secret,
        recovery=recover, bookie_id=bookie, verify=not form.no_verify, note=run.out.detail,
    )  # fmt: skip
    cluster = run.recorded if recover else run.cluster
    with run.job.working(f"Reading ledger {ledger}"):
        _print_entries(run, cluster, protocol, runs, form.columns(ledger), write=write)


@command(app, "tail", connects=True, changes="as_admin", prints=rows_of(_shown_columns))
def tail_ledger(
    run: Run,
    *,
    ledger: OneLedger,
    last: Annotated[int | None, count_option("--last", "Begin with the last N entries (default 10).")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    start: Annotated[int | None, flag("--from ENTRY", "Begin with this entry.", min=0)] = None,
    form: EntryForm,
    as_admin: AsAdminOption = False,
) -> None:
    """Print the last entries of a ledger, then each new one.

    Ends when the ledger is closed, or with Ctrl-C.

    $ bkctl ledger tail 12 --body
    """
    from bkctl.client.ledger_series import follow_ledger

    write = form.writer(run, ledger)
    secret = _secret(password, as_admin=as_admin)
    refuse_both("--from", start, "--last", last)
    if start is not None and start < 0:
        raise UsageError(f"--from {start}: entry ids are 0 or more")
    runs = partial(
        follow_ledger, ledger=ledger, first=start, tail_count=last or 10, password=secret, verify=not form.no_verify
    )
    with run.job.working(f"Waiting for entries of ledger {ledger}"):
        _print_entries(run, run.cluster, protocol, runs, form.columns(ledger), write=write, live=True)


async def create_ledger(
    bookkeeper: BookKeeper, target: NewLedger, shape: LedgerShape, password: bytes, custom_metadata: dict[str, bytes]
) -> WriteHandle:
    settings: dict[str, Any] = {**shape._asdict(), "password": password, "custom_metadata": custom_metadata}
    if target.ledger is None and target.scope_id == 0:
        return await bookkeeper.create_ledger(**settings)
    ledger_id = None if target.ledger is None else target.ledger.ledger_id
    return await bookkeeper.create_ledger_adv(ledger_id, ledger_scope_id=target.scope_id, **settings)


@command(write_app, "write", connects=True, changes=True, prints=object_of(LEDGER_COLUMNS))
def write(
    run: Run,
    target: LedgerToCreate,
    shape: LedgerShape,
    custom_metadata: CustomMetadata,
    password: LedgerPassword,
    record_size: Annotated[int | None, size_option("--record-size", "Write entries of this size instead of lines.")],
    protocol: ProtocolOption,
    files: Annotated[list[str] | None, word("FILE", "Files to write (default and -: stdin), in this order.")] = None,
) -> None:
    """Write files or stdin into a new ledger, and close it.

    Each line becomes one entry, without its line end; an empty line becomes an empty entry. The ledger's id goes to
    stderr at once, the closed ledger to stdout. While stdin stays open, each line is acknowledged as it arrives and can
    be tailed.

    $ bkctl ledger write /etc/hosts
    $ seq 1000 | bkctl ledger write
    $ bkctl ledger write --uuid --record-size 64KiB /etc/services
    """
    from bkctl.client.streams import LineSplitter, RecordSplitter, write_ledger

    names = files or ["-"]
    if names.count("-") > 1:
        raise UsageError("- (stdin) is given twice")
    splitter: Callable[[], Any] = LineSplitter if record_size is None else partial(RecordSplitter, record_size)
    splitter()
    sizes = [None if name == "-" else _readable_size(name) for name in names]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    if "-" in names and sys.stdin is None:
        raise UsageError("stdin is closed, so there is nothing to write", hint="give files, or < /dev/null for none")

    create = partial(create_ledger, target=target, shape=shape, password=password, custom_metadata=custom_metadata)
    # A progress line would disturb a user who types.
    typed = "-" in names and sys.stdin.isatty()
    with run.job.working("Writing", total=total, unit="bytes", enabled=not typed) as activity:
        work = partial(
            write_ledger, create=create, names=names, splitter=splitter, progress=activity.advance,
            note=run.out.note, report=run.out.error,
        )  # fmt: skip
        ledger = run.job.ask(run.access.bookkeeper(run.cluster, protocol), work)
    run.out.show(ledger_row(ledger, run.cluster.ledgers.read(ledger)), LEDGER_COLUMNS)


def _readable_size(name: str) -> int | None:
    """Return the size of a readable file; problems with it are raised before a ledger is created."""
    try:
        status = os.stat(name)
    except FileNotFoundError as error:
        try:
            ledger = LedgerId.parse(name)
        except UsageError:
            raise error from None
        flag = "--ledger-qualified-name" if ledger.is_scoped else "--ledger-id"
        hint = f"{flag} {ledger if ':' in name or not ledger.is_scoped else name} writes stdin into a new ledger {name}"
        raise UsageError(f"No file {name} to write", hint=hint) from error
    if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)):
        return None  # a pipe is opened once only: its writer would not survive the first end
    with open(name, "rb"):
        return status.st_size
