"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import EntryNotFound, FindingsError, UsageError
from bkctl.ids import LedgerId

from ._command import Run, command, group
from ._options import (
    BinaryFormat,
    BinaryFormatOption,
    CustomMetadata,
    Entries,
    LedgerPassword,
    LedgerShape,
    LedgerToCreate,
    ManyLedgers,
    NewLedger,
    OneLedger,
    ProtocolOption,
    ScopeToList,
    Shape,
    count_option,
    duration_option,
    size_option,
)
from ._output import GREEN, RED, YELLOW, Column, Columns, Kind, Output, RowWriter, binary_text, readable_text

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper, ReadHandle, WriteHandle
    from bkctl.client.operations import ReplicaFinding, RoundTrip
    from bkctl.metadata.ledgers import VersionedMetadata

app = group()


# --- the ledger object ----------------------------------------------------------------------------------------------


class LedgerRow(NamedTuple):
    """A ledger and its JSON object."""

    ledger: LedgerId
    object: dict[str, Any]


def _ledger_row(ledger: LedgerId, found: VersionedMetadata, show_secrets: bool = False) -> LedgerRow:
    from bkctl.metadata.ledgers import ledger_object

    return LedgerRow(ledger, ledger_object(ledger, found, show_secrets))


def _field(title: str | None, name: str, kind: Kind = Kind.TEXT, **settings: Any) -> Column:
    return Column(title, name, lambda row: row.object.get(name), kind, **settings)


_STATES = {"OPEN": YELLOW, "IN_RECOVERY": RED, "CLOSED": GREEN}


def _custom_text(custom_metadata: dict[str, str]) -> str:
    from binascii import a2b_base64

    return "\n".join(f"{key} = {readable_text(a2b_base64(value))}" for key, value in custom_metadata.items()) or "-"


#: The ledger object of every command that prints one; a list's table leaves the long fields out.
LEDGER_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    _field("FORMAT", "metadataFormatVersion", Kind.INTEGER),
    _field("STATE", "state", style=_STATES),
    _field("ENSEMBLE SIZE", "ensembleSize", Kind.INTEGER),
    _field("WRITE QUORUM", "writeQuorumSize", Kind.INTEGER),
    _field("ACK QUORUM", "ackQuorumSize", Kind.INTEGER),
    _field("DIGEST TYPE", "digestType"),
    _field("LENGTH", "length", Kind.SIZE),
    _field("LAST ENTRY", "lastEntryId", Kind.INTEGER),
    _field("CREATED", "ctime"),
    _field("CUSTOM METADATA", "customMetadata", Kind.NESTED, text=_custom_text),
    _field("ENSEMBLES", "ensembles", Kind.NESTED),
    _field("PULSAR", "pulsar", Kind.NESTED, optional=True),
    key="ledger",
)
SECRET_COLUMNS = LEDGER_COLUMNS.and_also(_field("PASSWORD (base64)", "password"))


def _quorums(row: LedgerRow) -> str:
    return "/".join(str(row.object[name]) for name in ("ensembleSize", "writeQuorumSize", "ackQuorumSize"))


def _short_time(text: str | None) -> str:
    return "-" if text is None else f"{text[:19]}Z"


LEDGER_TABLE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    _field("STATE", "state", style=_STATES),
    Column("E/W/A", "quorums", _quorums),
    _field("DIGEST", "digestType"),
    _field("LENGTH", "length", Kind.SIZE),
    _field("LAST ENTRY", "lastEntryId", Kind.INTEGER),
    _field("CREATED", "ctime", text=_short_time),
    key="ledger",
)


def _list_columns(run: Run) -> Columns:
    return LEDGER_TABLE_COLUMNS if run.output is Output.TABLE else LEDGER_COLUMNS


# --- entries --------------------------------------------------------------------------------------------------------


def _entry_columns(ledger: LedgerId, body: bool, format: BinaryFormat | None, output: Output) -> Columns:
    columns = [
        Column("LEDGER", "ledger", lambda _: ledger, Kind.LEDGER),
        Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
        Column("LAC", "lastAddConfirmed", "last_add_confirmed", Kind.INTEGER),
        Column("LENGTH", "length", "length", Kind.INTEGER),
        Column("SIZE", "size", lambda entry: len(entry.payload), Kind.INTEGER),
        Column(None, "formatVersion", "format_version", Kind.INTEGER),
    ]
    if body:
        if format is None and output is Output.TABLE:
            columns.append(Column("PAYLOAD", "payload", lambda entry: readable_text(entry.payload), flexible=True))
        elif format is None or format is BinaryFormat.BASE64:
            columns.append(Column("PAYLOAD", "payload", "payload", Kind.BINARY, flexible=True))
        else:
            columns.append(
                Column("PAYLOAD", "payload", lambda entry: binary_text(entry.payload, format), flexible=True)
            )
    return Columns(*columns, key="entryId")


def _check_format(run: Run, format: BinaryFormat | None) -> None:
    if format is BinaryFormat.RAW and run.output is not Output.TABLE:
        raise UsageError("--format raw prints payloads and nothing else", hint=f"leave -o {run.output.value} out")


async def _print_entries(
    run: Run, entries: AsyncIterator[Any], columns: Columns, *, raw: bool, live: bool = False
) -> None:
    if raw:
        async for entry in entries:
            run.raw(entry.payload)
            if live:
                sys.stdout.flush()
        return
    with run.rows(columns, live=live) as writer:
        row = writer.row
        async for entry in entries:
            row(entry)


BodyOption = Annotated[bool, typer.Option("--body", help="Print the payloads too.")]
NoVerifyOption = Annotated[bool, typer.Option("--no-verify", help="Do not check the entries' digests.")]


# --- write ----------------------------------------------------------------------------------------------------------


async def _create(
    bookkeeper: BookKeeper, target: NewLedger, shape: Shape, password: bytes, custom_metadata: dict[str, bytes]
) -> WriteHandle:
    settings: dict[str, Any] = {**shape._asdict(), "password": password, "custom_metadata": custom_metadata}
    if target.ledger is None and target.scope_id == 0:
        return await bookkeeper.create_ledger(**settings)
    ledger_id = None if target.ledger is None else target.ledger.ledger_id
    return await bookkeeper.create_ledger_adv(ledger_id, ledger_scope_id=target.scope_id, **settings)


@command(app, "write", connects=True)
def write(
    run: Run,
    target: LedgerToCreate,
    shape: LedgerShape,
    custom_metadata: CustomMetadata,
    password: LedgerPassword,
    record_size: Annotated[int | None, size_option("--record-size", "Entries of this size instead of lines.")],
    protocol: ProtocolOption,
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Files to write (default and -: stdin), in this order.", metavar="FILE"),
    ] = None,
) -> None:
    """Create a ledger, write files or stdin into it, close it, and print it.

    One entry a line: the line's end is not part of it, an empty line is an empty entry. The ledger's id is on stderr
    from the start. While stdin stays open, each line is acknowledged as it comes and can be tailed at once.
    """
    from bkctl.client.operations import LineSplitter, RecordSplitter, write_stream

    names = files or ["-"]
    if names.count("-") > 1:
        raise UsageError("- (stdin) is given twice")
    splitter: Callable[[], Any] = LineSplitter if record_size is None else lambda: RecordSplitter(record_size)
    splitter()
    sizes = [None if name == "-" else _readable_size(name) for name in names]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    if "-" in names and sys.stdin is None:
        raise UsageError("stdin is closed, so there is nothing to write", hint="give files, or < /dev/null for none")

    async def work() -> LedgerId:
        # On a terminal that is typed into, a line of ours would stand in the way.
        typed = "-" in names and sys.stdin.isatty()
        with run.working("Writing", total=total, unit="bytes", enabled=not typed) as activity:
            async with run.bookkeeper(cluster, protocol) as bookkeeper:
                handle = await _create(bookkeeper, target, shape, password, custom_metadata)
                run.note(f"Ledger {handle.ledger}")
                async with handle:
                    for name in names:
                        with ExitStack() as stack:
                            file = 0 if name == "-" else stack.enter_context(open(name, "rb")).fileno()
                            await write_stream(handle, file, splitter(), activity.advance)
                return handle.ledger

    with run.cluster() as cluster:
        ledger = run.complete(work())
        run.show(_ledger_row(ledger, cluster.ledgers.read(ledger)), LEDGER_COLUMNS)


def _readable_size(name: str) -> int | None:
    """Size of a file that can be read; whatever is wrong with it is said before a ledger is created."""
    status = os.stat(name)
    if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)):
        return None  # a pipe is opened once only: its writer would not survive the first end
    with open(name, "rb"):
        return status.st_size


# --- list, show -----------------------------------------------------------------------------------------------------

COUNT_COLUMNS = Columns(Column("COUNT", "count", lambda count: count, Kind.INTEGER))


@command(app, "list", connects=True)
def list_ledgers(
    run: Run,
    scope_id: ScopeToList,
    age_min: Annotated[float | None, duration_option("--min-age", "Only ledgers at least this old.")],
    age_max: Annotated[float | None, duration_option("--max-age", "Only ledgers at most this old.")],
    size_min: Annotated[int | None, size_option("--min-size", "Only ledgers of at least this length.")],
    limit: Annotated[int | None, count_option("--limit", "At most so many.")],
    bookie: Annotated[
        str | None, typer.Option("--bookie", metavar="BOOKIE", help="Only ledgers with entries there.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="OPEN, IN_RECOVERY or CLOSED; repeatable.")
    ] = None,
    meta_key: Annotated[
        list[str] | None,
        typer.Option("--meta-key", metavar="KEY=VALUE", help="Only with this custom metadata; repeatable."),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="LEDGER", help="Only ledgers behind this one.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many there are.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on past metadata that cannot be read (exit code 3 then).")
    ] = False,
) -> None:
    """List the ledgers of a scope in order of their ids, with their metadata (-o id: ids alone, much faster)."""
    from itertools import islice

    from bkctl.metadata.overview import LedgerQuery
    from bkctl.metadata.overview import list_ledgers as find_ledgers

    query = LedgerQuery(
        bookie_id=bookie,
        states=frozenset(_state(text, "--state") for text in state or ()),
        age_s_min=age_min,
        age_s_max=age_max,
        size_bytes_min=size_min,
        custom_metadata=tuple(_meta_key(text) for text in meta_key or ()),
    )
    start = None if after is None else LedgerId.parse(after)
    if start is not None and scope_id is not None and start.scope_id != scope_id:
        if start.is_scoped:
            raise UsageError(
                f"--after {after!r} is in scope {start.scope_id}, and scope {scope_id} is listed",
                hint=f"add --ledger-scope-id {start.scope_id} or --all-scopes",
            )
        start = LedgerId(scope_id, start.ledger_id)
    unreadable: list[LedgerId] = []

    def skip(ledger: LedgerId, error: Exception) -> None:
        unreadable.append(ledger)
        run.note(f"bkctl: {error}")

    with run.cluster() as cluster, run.working("Listing ledgers"):
        if (count or run.output is Output.ID) and not query.needs_metadata:
            ids = islice(cluster.ledgers.ledgers(scope_id, start), limit)
            rows = (LedgerRow(ledger, {}) for ledger in ids)
        else:
            found = find_ledgers(cluster, scope_id, after=start, query=query, unreadable=skip if keep_going else None)
            rows = (_ledger_row(ledger, metadata) for ledger, metadata in islice(found, limit))
        if count:
            run.show(sum(1 for _ in rows), COUNT_COLUMNS)
        else:
            run.render(rows, _list_columns(run))
    if unreadable:
        raise FindingsError(f"The metadata of {len(unreadable):,} ledgers cannot be read")


def _state(text: str, flag: str) -> str:
    from bkctl.formats.metadata import LedgerState

    name = text.upper().replace("-", "_")
    if name not in LedgerState.__members__:
        raise UsageError(f"{flag} {text!r}: not a ledger state", hint=f"one of {', '.join(LedgerState.__members__)}")
    return name


def _meta_key(text: str) -> tuple[str, bytes]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--meta-key {text!r}: not KEY=VALUE")
    return key, os.fsencode(value)


@command(app, "show", connects=True)
def show(
    run: Run,
    ledger: OneLedger,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Also the ledger's password.")] = False,
) -> None:
    """Show one ledger's metadata."""
    with run.cluster() as cluster:
        row = _ledger_row(ledger, cluster.ledgers.read(ledger), show_secrets)
        run.show(row, SECRET_COLUMNS if show_secrets else LEDGER_COLUMNS)


# --- read, tail -----------------------------------------------------------------------------------------------------


@command(app, "read", connects=True)
def read(
    run: Run,
    ledger: OneLedger,
    entries: Entries,
    count: Annotated[int | None, count_option("--count", "At most so many entries.")],
    last: Annotated[int | None, count_option("--last", "The last so many entries.")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    bookie: Annotated[str | None, typer.Option("--bookie", metavar="BOOKIE", help="Only what this bookie has.")] = None,
    recover: Annotated[bool, typer.Option("--recover", help="Fence and close the ledger first.")] = False,
    no_verify: NoVerifyOption = False,
    body: BodyOption = False,
    format: BinaryFormatOption = None,
) -> None:
    """Read the entries of a ledger, up to the last one confirmed.

    The password is checked. --format raw writes the payloads' bytes and nothing else.
    """
    _check_format(run, format)
    if last is not None and (entries.first is not None or count is not None):
        raise UsageError("--last goes neither with --from nor with --count")
    if entries.last is not None and count is not None:
        raise UsageError("--to and --count are given", hint="give one of them")
    columns = _entry_columns(ledger, body or format is not None, format, run.output)

    async def work() -> None:
        from bkctl.client.operations import read_replica

        async with run.bookkeeper(cluster, protocol) as bookkeeper:
            handle = await bookkeeper.open_ledger(
                ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=password, recovery=recover
            )
            async with handle:
                first, final = _range(handle, entries.first, entries.last, count, last)
                run.detail(f"ledger {ledger}: entries {first} to {final}")
                if final < first:
                    found = _no_entries()
                elif bookie is not None:
                    found = read_replica(handle, bookie, first, final, verify=not no_verify)
                else:
                    found = handle.read(first, final, verify=not no_verify)
                await _print_entries(run, found, columns, raw=format is BinaryFormat.RAW)

    with run.cluster() as cluster, run.working(f"Reading ledger {ledger}"):
        run.complete(work())


def _range(
    handle: ReadHandle, first: int | None, to: int | None, count: int | None, last: int | None
) -> tuple[int, int]:
    """First and last entry to read; an empty range for an empty ledger."""
    end = handle.last_add_confirmed
    for flag, bound in (("--from", first), ("--to", to)):
        if bound is not None and bound > end:
            raise EntryNotFound(
                f"Ledger {handle.ledger} {_extent(handle)}, and {flag} is {bound}", hint=f"drop {flag}, or give less"
            )
    final = end if to is None else to
    if last is not None:
        return max(0, final - last + 1), final
    start = first or 0
    return start, final if count is None else min(final, start + count - 1)


def _extent(handle: ReadHandle) -> str:
    end = handle.last_add_confirmed
    if handle.is_closed:
        return "has no entries" if end < 0 else f"ends at entry {end}"
    return "is open and has no confirmed entries yet" if end < 0 else f"is open and confirmed up to entry {end}"


async def _no_entries() -> AsyncIterator[Any]:
    nothing: tuple[Any, ...] = ()
    for entry in nothing:
        yield entry


@command(app, "tail", connects=True)
def tail(
    run: Run,
    ledger: OneLedger,
    last: Annotated[int | None, count_option("--last", "Begin with the last so many entries (default 10).")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    start: Annotated[int | None, typer.Option("--from", metavar="ENTRY", help="Begin with this entry.", min=0)] = None,
    no_verify: NoVerifyOption = False,
    body: BodyOption = False,
    format: BinaryFormatOption = None,
) -> None:
    """Print the last entries of a ledger, and each new one as it is confirmed, until the ledger is closed."""
    _check_format(run, format)
    if start is not None and last is not None:
        raise UsageError("--from and --last are given", hint="give one of them")
    if start is not None and start < 0:
        raise UsageError(f"--from {start}: entry ids are 0 or more")
    columns = _entry_columns(ledger, body or format is not None, format, run.output)

    async def work() -> None:
        from bkctl.client.operations import tail as follow

        async with run.bookkeeper(cluster, protocol) as bookkeeper:
            handle = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=password)
            async with handle:
                first = start if start is not None else max(0, handle.last_add_confirmed + 1 - (last or 10))
                found = follow(handle, first, verify=not no_verify)
                await _print_entries(run, found, columns, raw=format is BinaryFormat.RAW, live=True)

    with run.cluster() as cluster, run.working(f"Waiting for entries of ledger {ledger}"):
        run.complete(work())


# --- delete, recover ------------------------------------------------------------------------------------------------

DELETED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", lambda row: row.object["state"], style=_STATES),
    Column("LENGTH", "length", lambda row: row.object["length"], Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", lambda row: row.object["lastEntryId"], Kind.INTEGER),
    Column("DELETED", "deleted", lambda row: row.object["deleted"], Kind.BOOLEAN),
    key="ledger",
)


@command(app, "delete", connects=True, asks=True)
def delete(
    run: Run,
    ledgers: ManyLedgers,
    if_state: Annotated[
        str | None, typer.Option("--if-state", metavar="STATE", help="Only while it is in this state (else exit 5).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")] = False,
) -> None:
    """Delete ledgers: their metadata now, their entries when the bookies collect garbage.

    Asks on a terminal; elsewhere --yes is needed.
    """
    from bkctl.errors import Conflict

    wanted = None if if_state is None else _state(if_state, "--if-state")
    with run.cluster() as cluster:
        found = [(ledger, cluster.ledgers.read(ledger)) for ledger in dict.fromkeys(ledgers)]
        for ledger, each in found:
            if wanted is not None and each.metadata.state.name != wanted:
                raise Conflict(f"Ledger {ledger} is {each.metadata.state.name}, not {wanted}; nothing was deleted")
        rows = [_ledger_row(ledger, each) for ledger, each in found]
        if not dry_run:
            run.confirm(_loss(rows))
        with run.rows(DELETED_COLUMNS) as writer:
            for row, (ledger, each) in zip(rows, found, strict=True):
                if not dry_run:
                    # With a wanted state, only the version that was seen in it may go.
                    cluster.ledgers.remove(ledger, each.version if wanted is not None else None)
                row.object["deleted"] = not dry_run
                writer.row(row)


def _loss(rows: list[LedgerRow]) -> str:
    from ._output import size_text

    size = size_text(sum(row.object["length"] for row in rows))
    if len(rows) == 1:
        row = rows[0]
        known = "not closed"
        if row.object["state"] == "CLOSED":
            known = f"{_counted(row.object['lastEntryId'] + 1, 'entry', 'entries')}, {size}"
        return f"Ledger {row.ledger} ({row.object['state']}, {known}) would be lost"
    return f"{len(rows):,} ledgers ({size} in the closed ones) would be lost: {_some(rows)}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


def _some(rows: list[LedgerRow]) -> str:
    names = ", ".join(str(row.ledger) for row in rows[:5])
    return names if len(rows) <= 5 else f"{names}, …"


@command(app, "recover", connects=True)
def recover(run: Run, ledgers: ManyLedgers) -> None:
    """Close ledgers whose writer died: fence them, find their last entry, bring it to enough bookies.

    A writer that is still at work can add no more. Ledgers that are closed stay as they are.
    """

    async def work(writer: RowWriter) -> None:
        from asyncio import to_thread

        async with run.bookkeeper(cluster) as bookkeeper:
            for ledger in ledgers:
                handle = await bookkeeper.open_ledger(
                    ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None, recovery=True
                )
                await handle.close()
                writer.row(_ledger_row(ledger, await to_thread(cluster.ledgers.read, ledger)))

    with run.cluster() as cluster, run.working("Recovering"), run.rows(_list_columns(run)) as rows:
        run.complete(work(rows))


# --- verify, test ---------------------------------------------------------------------------------------------------


class FindingRow(NamedTuple):
    """One finding of `ledger verify`."""

    ledger: LedgerId
    finding: ReplicaFinding


FINDING_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "finding.entry_id", Kind.INTEGER),
    Column("BOOKIE", "bookieId", "finding.bookie_id"),
    Column(
        "PROBLEM",
        "problem",
        "finding.problem",
        style={"damaged": RED, "missing": RED, "different": RED, "unavailable": YELLOW},
    ),
    Column("MESSAGE", "message", "finding.message"),
    key="entryId",
)


@command(app, "verify", connects=True)
def verify(run: Run, ledgers: ManyLedgers, protocol: ProtocolOption) -> None:
    """Read every entry from every replica and check it; print what is wrong (exit code 3 when something is).

    Checked are presence, ids, digest and the ledger's length at each entry. Needs no password.
    """
    from bkctl.client.operations import Verification

    async def work(writer: RowWriter) -> int:
        findings = 0
        async with run.bookkeeper(cluster, protocol) as bookkeeper:
            for ledger in ledgers:
                handle = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None)
                async with handle:
                    activity.update(0, handle.last_add_confirmed + 1)
                    verification = Verification(handle, activity.update)
                    async for finding in verification.findings():
                        writer.row(FindingRow(ledger, finding))
                findings += verification.finding_count
                run.note(
                    f"Ledger {ledger}: {_counted(verification.entry_count, 'entry', 'entries')}, "
                    f"{_counted(verification.replica_count, 'replica', 'replicas')} read, "
                    f"{_counted(verification.finding_count, 'finding', 'findings')}"
                )
        return findings

    with (
        run.cluster() as cluster,
        run.working("Verifying", unit="entries") as activity,
        run.rows(FINDING_COLUMNS) as rows,
    ):
        findings = run.complete(work(rows))
    if findings:
        where = _counted(len(ledgers), "ledger", "ledgers")
        raise FindingsError(f"{_counted(findings, 'finding', 'findings')} in {where}")


def _ms(milliseconds: int) -> str:
    return f"{milliseconds:,} ms"


class TrialRow(NamedTuple):
    """What `ledger test` prints."""

    ledger: LedgerId
    result: RoundTrip
    deleted: bool


TRIAL_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRIES", "entryCount", "result.entry_count", Kind.INTEGER),
    Column("ENTRY SIZE", "entrySize", "result.entry_size_bytes", Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", "result.last_entry_id", Kind.INTEGER),
    Column("WRITTEN IN", "writeMilliseconds", lambda row: round(row.result.write_s * 1000), Kind.INTEGER, text=_ms),
    Column("READ IN", "readMilliseconds", lambda row: round(row.result.read_s * 1000), Kind.INTEGER, text=_ms),
    Column("DELETED", "deleted", "deleted", Kind.BOOLEAN),
    key="ledger",
)


@command(app, "test", connects=True)
def try_out(
    run: Run,
    target: LedgerToCreate,
    shape: LedgerShape,
    count: Annotated[int, count_option("--count", "Entries to write.", default=1000)],
    size: Annotated[int, size_option("--size", "Bytes of an entry.", default="100")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    keep: Annotated[bool, typer.Option("--keep", help="Do not delete the ledger at the end.")] = False,
) -> None:
    """Try the cluster out: create a ledger, write random entries, read them before and after closing, delete it."""
    from bkctl.client.operations import check_entry_size, round_trip

    check_entry_size(size, "--size")

    async def work() -> TrialRow:
        async with run.bookkeeper(cluster, protocol) as bookkeeper:
            handle = await _create(bookkeeper, target, shape, password, {})
            ledger = handle.ledger
            run.note(f"Ledger {ledger}")
            async with handle:
                result = await round_trip(
                    bookkeeper, handle, entry_count=count, entry_size_bytes=size, password=password,
                    progress=activity.update,
                )  # fmt: skip
            if not keep:
                await bookkeeper.delete_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id)
            return TrialRow(ledger, result, not keep)

    with run.cluster() as cluster, run.working("Writing and reading", total=count, unit="entries") as activity:
        row = run.complete(work())
        run.show(row, TRIAL_COLUMNS)
