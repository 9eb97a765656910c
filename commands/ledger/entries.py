"""`bkctl ledger`: write, list, read, recover and verify ledgers."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import BkctlError, Conflict, EntryNotFound, FindingsError, UsageError
from bkctl.ids import LedgerId

from ..kit.command import Run, command, group
from ..kit.ledger_options import LedgersOrFile, LedgerToCreate, ManyLedgers, NewLedger, OneLedger, ScopeToList
from ..kit.options import (
    BinaryFormat,
    BinaryFormatOption,
    CustomMetadata,
    DryRun,
    Entries,
    KeepGoing,
    LedgerPassword,
    LedgerShape,
    ProtocolOption,
    Shape,
    UndoOption,
    WatchOption,
    count_option,
    duration_option,
    number_option,
    size_option,
)
from ..kit.output import (
    GREEN,
    RED,
    YELLOW,
    Column,
    Columns,
    Kind,
    Output,
    RowWriter,
    payload_column,
    readable_text,
)

if TYPE_CHECKING:
    from bkctl.client.ensemble import ReplicaPlace
    from bkctl.client.ledger import BookKeeper, ReadHandle, WriteHandle
    from bkctl.client.operations import ReplicaFinding, RoundTrip
    from bkctl.client.recovery import RecoveryLoss
    from bkctl.metadata.admin.removal import Removal, RemovalPlan
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.ledgers import VersionedMetadata
    from bkctl.replication.checker import ReplicaFault

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


def _custom_line(row: LedgerRow) -> str | None:
    """Custom metadata in a list's table: Pulsar's as what it says, else keys and values."""
    if pulsar := row.object.get("pulsar"):
        words = (pulsar.get(name) for name in ("application", "component", "managedLedger", "cursor"))
        return " ".join(word for word in words if word)
    from binascii import a2b_base64

    custom = row.object["customMetadata"]
    return ", ".join(f"{key}={readable_text(a2b_base64(value))}" for key, value in custom.items()) or None


LEDGER_TABLE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    _field("STATE", "state", style=_STATES),
    Column("E/W/A", "quorums", _quorums),
    _field("DIGEST", "digestType"),
    _field("LENGTH", "length", Kind.SIZE),
    _field("LAST ENTRY", "lastEntryId", Kind.INTEGER),
    _field("CREATED", "ctime", text=_short_time),
    Column("CUSTOM METADATA", "customMetadata", _custom_line, flexible=True),
    key="ledger",
)


def _list_columns(run: Run) -> Columns:
    return LEDGER_TABLE_COLUMNS if run.output is Output.TABLE else LEDGER_COLUMNS


# --- entries --------------------------------------------------------------------------------------------------------


def _entry_columns(ledger: LedgerId, body: bool, format: BinaryFormat | None) -> Columns:
    columns = [
        Column("LEDGER", "ledger", lambda _: ledger, Kind.LEDGER),
        Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
        Column("LAC", "lastAddConfirmed", "last_add_confirmed", Kind.INTEGER),
        Column("LENGTH", "length", "length", Kind.INTEGER),
        Column("SIZE", "size", lambda entry: len(entry.payload), Kind.INTEGER),
        Column(None, "formatVersion", "format_version", Kind.INTEGER),
    ]
    if body:
        columns.append(payload_column(attrgetter("payload"), format))
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


@command(app, "write", connects=True, changes=True)
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
    size_max: Annotated[int | None, size_option("--max-size", "Only ledgers of at most this length.")],
    custom_metadata: CustomMetadata,
    limit: Annotated[int | None, count_option("--limit", "At most so many.")],
    watch: WatchOption,
    bookie: Annotated[
        str | None, typer.Option("--bookie", metavar="BOOKIE", help="Only ledgers with entries there.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="OPEN, IN_RECOVERY or CLOSED; repeatable.")
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="LEDGER", help="Only ledgers behind this one.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only how many there are.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on past metadata that cannot be read (exit code 3 then).")
    ] = False,
) -> None:
    """List the ledgers of a scope in order of their ids, with their metadata (-o id: ids alone, much faster).

    --custom-metadata lists only the ledgers that have all that is given.
    """
    from itertools import islice
    from operator import itemgetter

    from bkctl.metadata.admin.overview import LedgerQuery
    from bkctl.metadata.admin.overview import list_ledgers as find_ledgers

    query = LedgerQuery(
        bookie_id=bookie,
        states=_states(state, "--state"),
        age_s_min=age_min,
        age_s_max=age_max,
        size_bytes_min=size_min,
        size_bytes_max=size_max,
        custom_metadata=tuple(custom_metadata.items()),
    )
    start = None if after is None else LedgerId.parse(after)
    if start is not None and scope_id is not None and start.scope_id != scope_id:
        if start.is_scoped:
            raise UsageError(
                f"--after {after!r} is in scope {start.scope_id}, and scope {scope_id} is listed",
                hint=f"add --ledger-scope-id {start.scope_id} or --all-scopes",
            )
        start = LedgerId(scope_id, start.ledger_id)
    unreadable: dict[LedgerId, str] = {}

    def skip(ledger: LedgerId, error: Exception) -> None:
        if unreadable.get(ledger) != str(error):
            unreadable[ledger] = str(error)
            run.note(f"bkctl: {error}")

    def look() -> Iterator[LedgerRow]:
        if (count or run.output is Output.ID) and not query.needs_metadata:
            ids = islice(cluster.ledgers.ledgers(scope_id, start), limit)
            return (LedgerRow(ledger, {}) for ledger in ids)
        found = find_ledgers(cluster, scope_id, after=start, query=query, unreadable=skip if keep_going else None)
        return (_ledger_row(ledger, metadata) for ledger, metadata in islice(found, limit))

    with run.cluster() as cluster, run.working("Listing ledgers", enabled=watch is None):
        if count:
            run.watch(watch, lambda: [sum(1 for _ in look())], COUNT_COLUMNS, single=True)
        elif run.output is Output.ID and watch is None and limit is None and not query.needs_metadata:
            # Hundreds of thousands of ids: a directory at a time, not a row each.
            for batch in cluster.ledgers.batches(scope_id, start):
                # In order, so that all are of scope 0 where the last is.
                names = batch if batch[-1].is_scoped else map(itemgetter(1), batch)
                run.text("\n".join(map(str, names)) + "\n")
        else:
            run.watch(watch, look, _list_columns(run))
    run.finish_with(len(unreadable), "ledgers have metadata that cannot be read")


def _states(texts: list[str] | None, flag: str) -> frozenset[str]:
    from bkctl.formats.metadata import LedgerState

    names = {text: text.upper().replace("-", "_") for text in texts or ()}
    for text, name in names.items():
        if name not in LedgerState.__members__:
            known = ", ".join(LedgerState.__members__)
            raise UsageError(f"{flag} {text!r}: not a ledger state", hint=f"one of {known}")
    return frozenset(names.values())


@command(app, "show", connects=True)
def show(
    run: Run,
    ledgers: ManyLedgers,
    watch: WatchOption,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Also the ledger's password.")] = False,
) -> None:
    """Show the metadata of one ledger, or of several."""
    single = len(ledgers) == 1

    def look() -> Iterator[LedgerRow]:
        for ledger, found in cluster.ledgers.read_many(ledgers):
            if isinstance(found, BkctlError):
                raise found
            yield _ledger_row(ledger, found, show_secrets)

    def subscribe(changed: Callable[[], None]) -> Callable[[], None]:
        cancels = [cluster.ledgers.watch(ledger, lambda _: changed()) for ledger in ledgers]

        def cancel() -> None:
            for each in cancels:
                each()

        return cancel

    with run.cluster() as cluster:
        columns = SECRET_COLUMNS if show_secrets else LEDGER_COLUMNS if single else _list_columns(run)
        run.watch(watch, look, columns, subscribe=subscribe, single=single)


# --- locate ---------------------------------------------------------------------------------------------------------


class PlaceRow(NamedTuple):
    """A replica's place and its ledger; `entry_id` is the one entry that was asked for, `fault` what a check found."""

    ledger: LedgerId
    entry_id: int | None
    place: ReplicaPlace
    fault: ReplicaFault | None = None

    @property
    def answer(self) -> str:
        """What the bookie's answers amount to."""
        return "ok" if self.fault is None else self.fault.reason.value

    @property
    def problem(self) -> str | None:
        """What it said, when it is not all right."""
        return None if self.fault is None or self.fault.error is None else self.fault.error.message

    @property
    def missing(self) -> list[dict[str, int]] | None:
        """The entries that it lacks or has damaged; None where they are not known one by one."""
        if self.fault is None:
            return []
        if self.fault.missing is None:
            return None
        return [
            {"firstEntryId": span.first_entry_id, "lastEntryId": span.last_entry_id, "entryCount": span.entry_count}
            for span in self.fault.missing
        ]


PLACE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FIRST ENTRY", "firstEntryId", "place.first_entry_id", Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "place.last_entry_id", Kind.INTEGER),
    Column("INDEX", "index", "place.ensemble_index", Kind.INTEGER),
    Column("BOOKIE", "bookieId", "place.bookie_id"),
    Column("STATE", "state", "place.state", style={"rw": GREEN, "ro": YELLOW, "down": RED}),
    Column("SCOPES", "ledgerScopes", "place.ledger_scopes", Kind.BOOLEAN),
    Column("ENTRIES", "entryCount", "place.entry_count", Kind.INTEGER),
    key="bookieId",
)
ENTRY_PLACE_COLUMNS = Columns(
    PLACE_COLUMNS.columns[0],
    Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
    Column("POSITION", "position", "place.position", Kind.INTEGER),
    *PLACE_COLUMNS.columns[1:-1],
    key="bookieId",
)
ANSWER_COLUMNS = (
    Column("ANSWER", "answer", "answer", style={"ok": GREEN, "gone": RED, "no-entry": RED, "no-ledger": RED,
                                                "damaged": RED, "timed-out": YELLOW, "unavailable": YELLOW}),
    Column("PROBLEM", "problem", "problem", flexible=True),
)  # fmt: skip


def _spans_text(spans: list[dict[str, int]]) -> str:
    """`3, 5-9 (4)`: the ids, and of spans how many of them."""
    texts = [
        f"{span['firstEntryId']}"
        if span["entryCount"] == 1
        else f"{span['firstEntryId']}-{span['lastEntryId']} ({span['entryCount']})"
        for span in spans
    ]
    return ", ".join(texts[:5]) + (f", {len(texts) - 5} more" if len(texts) > 5 else "") if texts else "-"


MISSING_COLUMN = Column("MISSING", "missing", "missing", Kind.NESTED, text=_spans_text)


@command(app, "locate", connects=True)
def locate(
    run: Run,
    ledgers: ManyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry.")],
    protocol: ProtocolOption,
    check: Annotated[
        bool, typer.Option("--check", help="Ask each bookie: for the first and the last entry it should have.")
    ] = False,
    every_entry: Annotated[
        bool, typer.Option("--every-entry", help="Ask each bookie for every entry, and name those that are missing.")
    ] = False,
) -> None:
    """Show which bookies hold a ledger: each fragment's ensemble, and how many of its entries each should have.

    --entry shows the write set of one entry, in the order in which its bookies are asked. A bookie's state is rw, ro or
    down; SCOPES says whether it serves ledgers of scopes other than 0. With --check its ANSWER is ok, gone (not
    registered), no-entry, no-ledger, damaged, timed-out or unavailable, and the exit code is 3 unless all are ok.
    """
    from bkctl.client.ensemble import locate as find

    if entry is not None and not 0 <= entry < 1 << 63:
        raise UsageError(f"--entry {entry}: entry ids are 0 or more, below 2^63")
    if every_entry and entry is not None:
        raise UsageError("--every-entry and --entry are given", hint="use --check --entry for one entry")
    columns = PLACE_COLUMNS if entry is None else ENTRY_PLACE_COLUMNS
    if not (check or every_entry):
        with run.cluster() as cluster, run.rows(columns) as writer:
            bookies = cluster.bookies.list()
            for ledger, found in cluster.ledgers.read_many(ledgers):
                if isinstance(found, BkctlError):
                    raise found
                writer.rows(PlaceRow(ledger, entry, place) for place in find(ledger, found.metadata, bookies, entry))
        return
    columns = columns.and_also(*ANSWER_COLUMNS, *((MISSING_COLUMN,) if every_entry else ()))
    with run.cluster() as cluster, run.working("Asking the bookies"), run.rows(columns) as writer:
        findings = run.complete(_check_places(run, cluster, ledgers, entry, every_entry, protocol, writer))
    run.finish_with(findings, "replicas are not all right" if findings > 1 else "replica is not all right")


async def _check_places(
    run: Run,
    cluster: Cluster,
    ledgers: list[LedgerId],
    entry: int | None,
    every_entry: bool,
    protocol: Any,
    writer: RowWriter,
) -> int:
    """Write the rows of `locate --check`; returns how many of them are not ok."""
    from asyncio import to_thread

    from bkctl.client.ensemble import locate as find
    from bkctl.replication.checker import LedgerChecker

    findings = 0
    async with run.bookkeeper(cluster, protocol) as bookkeeper:
        checker = LedgerChecker(bookkeeper)
        for ledger in ledgers:
            bookies = await to_thread(cluster.bookies.list)
            up = {bookie.bookie_id for bookie in bookies if bookie.state != "down"}
            found = await to_thread(cluster.ledgers.read, ledger)
            places = list(find(ledger, found.metadata, bookies, entry))
            if entry is None:
                checked = await checker.check(ledger, found, every_entry=every_entry, up=up)
                faults = {
                    (fragment.first_entry_id, fault.ensemble_index): fault
                    for fragment in checked.fragments
                    for fault in fragment.faults
                }
            else:
                fragment = await checker.check_entry(ledger, entry, found, up=up)
                faults = {(fragment.first_entry_id, fault.ensemble_index): fault for fault in fragment.faults}
            for place in places:
                row = PlaceRow(ledger, entry, place, faults.get((place.first_entry_id, place.ensemble_index)))
                findings += row.fault is not None
                writer.row(row)
    return findings


# --- read, tail -----------------------------------------------------------------------------------------------------


@command(app, "read", connects=True, changes="recover")
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
    columns = _entry_columns(ledger, body or format is not None, format)

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
    columns = _entry_columns(ledger, body or format is not None, format)

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


def _known(name: str) -> Callable[[Removal], Any]:
    return lambda row: None if row.metadata is None else getattr(row.metadata, name)


DELETED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", lambda row: row.metadata and row.metadata.state.name, style=_STATES),
    Column("LENGTH", "length", _known("length"), Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", _known("last_entry_id"), Kind.INTEGER),
    Column("DELETED", "deleted", "removed", Kind.BOOLEAN),
    Column(None, "error", lambda row: row.error and row.error.message, optional=True),
    key="ledger",
)


@command(app, "delete", connects=True, asks=True, changes=True)
def delete(
    run: Run,
    ledgers: LedgersOrFile,
    rate: Annotated[int | None, count_option("--rate", "At most so many a second.")],
    if_state: Annotated[
        list[str] | None,
        typer.Option("--if-state", metavar="STATE", help="Only while it is in this state (else exit 5); repeatable."),
    ] = None,
    ignore_missing: Annotated[
        bool, typer.Option("--ignore-missing", help="Pass over ledgers that are not there, as when run again.")
    ] = False,
    keep_going: KeepGoing = False,
    backup: Annotated[
        Path | None,
        typer.Option(
            "--backup",
            metavar="FILE",
            help="Export their metadata first, into a new file (or into one in this directory), for 'metadata import'.",
        ),
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Delete ledgers: their metadata now, their entries when the bookies collect garbage.

    Asks on a terminal; elsewhere --yes is needed. Nothing is deleted when one of the ledgers is not there or in another
    state, unless --keep-going is given. 'metadata undo' restores the metadata; that helps as long as the bookies still
    have the entries.
    """
    from bkctl.metadata.admin.removal import plan_removal, remove_ledgers

    states = _states(if_state, "--if-state")
    some: list[Removal] = []
    with run.cluster() as cluster, ExitStack() as stack:
        writer = stack.enter_context(run.rows(DELETED_COLUMNS))

        def seen(row: Removal) -> None:
            if len(some) < 5:
                some.append(row)
            if dry_run:
                writer.row(row)

        with run.working("Looking at the ledgers"):
            plan = plan_removal(cluster, ledgers, states=states, keep_missing=ignore_missing, seen=seen)
        if plan.failures and not keep_going:
            error = plan.failures[0].error
            assert error is not None
            raise Conflict(f"{error.message}; nothing was deleted") if isinstance(error, Conflict) else error
        failures = 0

        def failed(row: Removal) -> None:
            nonlocal failures
            failures += 1
            writer.row(row)
            run.note(f"bkctl: {row.error}")

        for each in plan.failures:
            failed(each)
        if plan.ledgers and not dry_run:
            run.confirm(_loss(plan, some))
            if backup is not None:
                _export(run, cluster, plan.ledgers, backup)
            kept = stack.enter_context(run.undo(cluster, undo))
            with run.working("Deleting", total=len(plan.ledgers), unit="ledgers") as activity:
                for row in remove_ledgers(
                    cluster,
                    plan.ledgers,
                    states=states,
                    record=lambda _, path, value: kept.record(path, value, None),
                    keep_missing=ignore_missing,
                    keep_going=keep_going,
                    per_second=rate,
                ):
                    activity.advance()
                    if row.error is None:
                        writer.row(row)
                    elif keep_going:
                        failed(row)
    run.finish_with(failures, "ledgers were not deleted")


def _export(run: Run, cluster: Cluster, ledgers: list[LedgerId], target: Path) -> None:
    """Export the ledgers' metadata into a new file `target`, or one in that directory; on disk when this returns."""
    from bkctl.metadata.admin.dump import ClusterSource, write_export

    if target.is_dir():
        import time

        target /= f"ledgers-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.ndjson"
    # Ledger metadata holds passwords.
    file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as stream, run.working("Exporting"):
        write_export(ClusterSource(cluster, ledgers), stream)
        stream.flush()
        os.fsync(file)
    run.note(f"Metadata exported to {target}")


def _loss(plan: RemovalPlan, some: list[Removal]) -> str:
    from ..kit.output import size_text

    if len(plan.ledgers) == 1:
        metadata = some[0].metadata
        assert metadata is not None
        known = "not closed"
        if metadata.state.name == "CLOSED":
            known = f"{_counted(metadata.last_entry_id + 1, 'entry', 'entries')}, {size_text(metadata.length)}"
        return f"Ledger {some[0].ledger} ({metadata.state.name}, {known}) would be lost"
    names = ", ".join(str(row.ledger) for row in some)
    more = ", …" if len(plan.ledgers) > len(some) else ""
    return (
        f"{len(plan.ledgers):,} ledgers ({plan.closed_count:,} closed, with {size_text(plan.size_bytes)}) "
        f"would be lost: {names}{more}"
    )


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


class RecoveryPlanRow(NamedTuple):
    """A ledger that a recovery would close, and what it would give up."""

    ledger: LedgerId
    state: str
    loss: RecoveryLoss | None


def _given_up(name: str) -> Callable[[RecoveryPlanRow], Any]:
    return lambda row: None if row.loss is None else getattr(row.loss, name)


RECOVERY_PLAN_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", "state", style=_STATES),
    Column("LOSS", "loss", lambda row: row.loss is not None, Kind.BOOLEAN),
    Column("LAST ENTRY", "lastEntryId", _given_up("last_entry_id"), Kind.INTEGER),
    Column("LAST READABLE", "lastReadableEntryId", _given_up("readable_entry_id"), Kind.INTEGER),
    Column("LENGTH", "length", _given_up("length"), Kind.SIZE),
    key="ledger",
)


@command(app, "recover", connects=True, asks=True, changes=True)
def recover(
    run: Run,
    ledgers: ManyLedgers,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Close a ledger whose last entry no bookie gives; asks first."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Close ledgers whose writer died: fence them, find their last entry, bring it to enough bookies.

    A writer that is still at work can add no more. Ledgers that are closed stay as they are.

    If no bookie gives a ledger's last entry, the ledger's length is unknown and it stays IN_RECOVERY. Start its bookies
    and recover it again. If they never return, --accept-loss closes it: it keeps its last entry id, but the length in
    its metadata stays that of the last entry that can be read, which is too small. The entries behind that one are lost
    unless their bookies return. --accept-loss asks on a terminal and needs --yes elsewhere. It does not help where too
    few bookies of the last ensemble answer: then the last entry itself is unknown.

    --dry-run fences nothing and shows what would be given up.
    """
    losses: dict[LedgerId, RecoveryLoss] = {}

    async def plan(writer: RowWriter | None) -> None:
        async with run.bookkeeper(cluster) as bookkeeper:
            for ledger in ledgers:
                found, loss = await bookkeeper.find_recovery_loss(ledger)
                if loss is not None:
                    losses[ledger] = loss
                if writer is not None:
                    writer.row(RecoveryPlanRow(ledger, found.metadata.state.name, loss))

    async def work(writer: RowWriter) -> None:
        from asyncio import to_thread

        async with run.bookkeeper(cluster) as bookkeeper:
            for ledger in ledgers:
                handle = await bookkeeper.open_ledger(
                    ledger.ledger_id,
                    ledger_scope_id=ledger.scope_id,
                    password=None,
                    recovery=True,
                    accept_loss=losses.get(ledger),
                )
                await handle.close()
                writer.row(_ledger_row(ledger, await to_thread(cluster.ledgers.read, ledger)))

    with run.cluster() as cluster:
        if dry_run:
            with run.working("Looking at the ledgers"), run.rows(RECOVERY_PLAN_COLUMNS) as rows:
                run.complete(plan(rows))
            return
        if accept_loss:
            with run.working("Looking at the ledgers"):
                run.complete(plan(None))
            if losses:
                run.confirm("; ".join(_recovery_loss_text(*each) for each in losses.items()))
        with run.working("Recovering"), run.rows(_list_columns(run)) as rows:
            run.complete(work(rows))
        for ledger, loss in losses.items():
            run.note(f"Given up: {_recovery_loss_text(ledger, loss)}")


def _recovery_loss_text(ledger: LedgerId, loss: RecoveryLoss) -> str:
    entries = _counted(loss.last_entry_id - loss.readable_entry_id, "entry", "entries")
    known = "no entry" if loss.readable_entry_id < 0 else f"entry {loss.readable_entry_id}"
    return (
        f"Ledger {ledger}: {entries} up to its last entry {loss.last_entry_id} cannot be read, and its length stays "
        f"{loss.length:,} bytes for ever (the length at {known}, the last that can be read)"
    )


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


@command(app, "test", connects=True, changes=True)
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
