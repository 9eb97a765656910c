"""`bkctl ledger list`, `show` and `locate`, and the ledger object as the commands of `bkctl ledger` print it."""

from __future__ import annotations

import os
import sys
from binascii import a2b_base64
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, base64_text, value_at
from bkctl.errors import UsageError
from bkctl.ids import LedgerId
from bkctl.metadata import ledger_columns
from bkctl.metadata.ledger_columns import APPLICATION_COLUMNS, LedgerRow, ledger_rows
from bkctl.metadata.pulsar_topics import TopicFilter

from ..kit.columns import ALL, COUNT_COLUMNS, Output, fields
from ..kit.command import Run, command, group, object_of, rows_of, union
from ..kit.ledger_options import ManyLedgers, ScopeToList
from ..kit.options import (
    ProtocolOption,
    WatchOption,
    combined,
    count_option,
    duration_option,
    flag,
    number_option,
    option,
    pairs_option,
    size_option,
)
from ..kit.output import RowWriter
from ..kit.texts import GREEN, RED, YELLOW, counted, readable_text
from ..kit.values import refuse_both

if TYPE_CHECKING:
    from bkctl.metadata.admin.overview import LedgerListing, LedgerQuery
    from bkctl.metadata.ledgers import ReadLedgers
    from bkctl.replication.checker import PlaceRow

    from ..kit.drawing import TreeWriter
    from ..kit.lines import Lines

app = group()

STATE_STYLE = {"OPEN": YELLOW, "IN_RECOVERY": RED, "CLOSED": GREEN}


def _password(row: LedgerRow) -> str | None:
    password = row.metadata.password
    return None if password is None else base64_text(password)


def _custom_text(custom_metadata: dict[str, str]) -> str:
    return "\n".join(f"{key} = {readable_text(a2b_base64(value))}" for key, value in custom_metadata.items()) or "-"


def _quorums(row: LedgerRow) -> str:
    metadata = row.metadata
    return f"{metadata.ensemble_size}/{metadata.write_quorum_size}/{metadata.ack_quorum_size}"


def _custom_line(row: LedgerRow) -> str | None:
    """Return custom metadata for the table of a list: Pulsar's in its own words, else keys and values."""
    if pulsar := row.pulsar:
        shown = dict(pulsar)
        managed_ledger = shown.pop("managedLedger", "")
        words = [shown.pop("application"), shown.pop("component", ""), shown.pop("topic", managed_ledger)]
        return " ".join([*filter(None, words), *(f"{name}={text}" for name, text in shown.items())])
    return ", ".join(f"{key}={readable_text(a2b_base64(value))}" for key, value in row.custom.items()) or None


#: The ledger object of every command that prints one.
LEDGER_COLUMNS = ledger_columns.LEDGER_COLUMNS.changed(
    state={"style": STATE_STYLE}, customMetadata={"text": _custom_text}
)
SECRET_COLUMNS = LEDGER_COLUMNS.and_also(Column("PASSWORD (base64)", "password", _password))
#: The columns of `ledger show`, with and without --show-secrets.
SHOWN_COLUMNS = union(LEDGER_COLUMNS, SECRET_COLUMNS)
#: The ids of a list alone, of rows that are LedgerIds.
ID_COLUMNS: Final = Columns(Column("LEDGER", "ledger", lambda ledger: ledger, Kind.LEDGER), key="ledger")
#: A list's table: one column for three sizes, and custom metadata in one line.
LEDGER_TABLE_COLUMNS = LEDGER_COLUMNS.listed(Column("E/W/A", "quorums", _quorums), after="state").changed(
    customMetadata={"source": _custom_line, "kind": Kind.TEXT, "text": None, "flexible": True}
)


def list_columns(run: Run) -> Columns:
    return run.out.table_columns(LEDGER_TABLE_COLUMNS, LEDGER_COLUMNS)


#: The fields by which `ledger list` sums ledgers.
SummedBy = StrEnum("SummedBy", "APPLICATION")

#: Ledgers and scopes that are counted to say how many there are beside scope 0.
OTHERS_COUNTED_MAX = 10_000


def _query(
    age_s_min: float | None,
    age_s_max: float | None,
    size_min: int | None,
    size_max: int | None,
    custom_metadata: dict[str, bytes | None],
    bookie: str | None,
    states: list[str] | None,
    topic: str | None,
    subscription: str | None,
) -> LedgerQuery:
    from bkctl.metadata.admin.overview import LedgerQuery

    if subscription is not None and topic is None:
        raise UsageError("--subscription is given without a topic", hint="add --topic")
    of_topic = None if topic is None else TopicFilter.parse(topic, subscription)
    names, custom = parse_states(states, "--state"), tuple(custom_metadata.items())
    return LedgerQuery(bookie, names, age_s_min, age_s_max, size_min, size_max, custom, of_topic)


#: The options that choose ledgers by their metadata, as a LedgerQuery.
QueryOptions = Annotated[
    Any,
    combined(
        _query,
        duration_option("--min-age", "List only ledgers at least this old."),
        duration_option("--max-age", "List only ledgers at most this old."),
        size_option("--min-size", "List only ledgers of at least this length."),
        size_option("--max-size", "List only ledgers of at most this length."),
        pairs_option(
            "--custom-metadata KEY[=VALUE]",
            "List only ledgers with this custom metadata, or with this key; repeatable.",
            os.fsencode,
        ),
        option("--bookie BOOKIE", "List only ledgers with entries on this bookie."),
        option("--state STATE", "OPEN, IN_RECOVERY or CLOSED; repeatable.", list[str]),
        option("--topic TOPIC", "List only ledgers of this Pulsar topic, partitions included."),
        option("--subscription NAME", "List only ledgers of this subscription of --topic."),
    ),
]


@command(
    app,
    "list",
    connects=True,
    prints=rows_of(LEDGER_COLUMNS, table=LEDGER_TABLE_COLUMNS)
    + object_of(COUNT_COLUMNS)
    + rows_of(APPLICATION_COLUMNS),
)
def list_ledgers(
    run: Run,
    scope_id: ScopeToList,
    query: QueryOptions,
    limit: Annotated[int | None, count_option("--limit", "List at most N ledgers.")],
    watch: WatchOption,
    after: Annotated[str | None, flag("--after LEDGER", "List only ledgers after this one.")] = None,
    count: Annotated[bool, flag("--count", "Print only the number of ledgers.")] = False,
    by: Annotated[
        SummedBy | None, flag("--by", "Print one row an application: its ledgers, bytes and biggest ledger.")
    ] = None,
    keep_going: Annotated[bool, flag("--keep-going", "Skip metadata that cannot be read (exit code 3 then).")] = False,
) -> None:
    """List the ledgers of a scope, in order of their ids.

    Prints the metadata of each ledger; -o id prints the ids alone, which is much faster. --topic goes by the names that
    Pulsar writes into the metadata of ledgers: of a topic's messages, of its subscriptions, and of compacted messages.

    $ bkctl ledger list
    $ bkctl ledger list --state OPEN --min-age 1w --sort=-length
    $ bkctl ledger list --topic persistent://public/default/orders
    $ bkctl ledger list --all-scopes --by application
    """
    from bkctl.metadata.admin.overview import LedgerListing, ledgers_by_application

    refuse_both("--by", by, "--count", count, "drop one of them")
    start, limit = _first_ledger(after, scope_id), run.out.limit_sorted(limit)
    prints_ids = run.out.output is Output.ID and run.out.selection == ALL
    needs_rows = by is not None or query.needs_metadata or not (count or prints_ids)
    is_whole = needs_rows and by is None and watch is None and limit is None and not count
    lines = LinesOfList.start(run, query) if is_whole else None
    cluster = run.cluster
    with run.job.working("Listing ledgers", unit="ledgers", enabled=watch is None) as activity:
        listing = LedgerListing(
            cluster, scope_id, query, after=start, limit=limit, skip=run.out.error if keep_going else None,
            progress=activity.update, found=activity.note_found,
        )  # fmt: skip
        if lines is not None:
            lines.print(listing)
        elif needs_rows or count or watch is not None or limit is not None:
            look: Callable[[], Iterable[Any]] = listing.rows if needs_rows else listing.ids
            columns = list_columns(run) if needs_rows else ID_COLUMNS
            if by is not None:
                look, columns = partial(ledgers_by_application, listing), APPLICATION_COLUMNS
            run.out.watch(watch, look, columns, count=count, findings=run.out.draws)
        else:
            _print_ids(run, cluster.ledgers.batches(scope_id, start))
        if watch is None:
            if query.needs_metadata and limit is None and sys.stdout.isatty():
                run.out.note(f"{listing.found_count:,} of {counted(activity.done, 'ledger')}")
            _note_other_scopes(run, scope_id)
    run.out.finish_with(
        len(listing.unreadable), "ledger has metadata that cannot be read", "ledgers have metadata that cannot be read"
    )


#: Batches of a list, the first ones small, that take longer in other processes than in this one.
ALONE_COUNT: Final = 10


class LinesOfList:
    """Prints all ledgers of a list as lines, which other processes make while this one reads the metadata store."""

    def __init__(self, run: Run, writer: RowWriter, lines: Lines, query: LedgerQuery) -> None:
        from ..kit.forks import Forks

        self._writer = writer
        self._forks = run.opened.enter_context(Forks(partial(_made, lines, query)))

    @classmethod
    def start(cls, run: Run, query: LedgerQuery) -> LinesOfList | None:
        """Start the processes, before the cluster is open; None for a table, and for rows that are sorted."""
        writer = run.out.rows(list_columns(run))
        return None if writer.lines is None else cls(run, writer, writer.lines, query)

    def print(self, listing: LedgerListing) -> None:
        """Print the rows of the listing, the first ones without the others' help."""
        batches = listing.batches()
        with self._writer:
            for batch in islice(batches, ALONE_COUNT):
                self._writer.rows(listing.rows_of(batch))
            for batch, made in self._forks.map(batches):
                if made is None:
                    self._writer.rows(listing.rows_of(batch))
                else:
                    count, text = made
                    self._writer.made(count, (text,))
                    listing.count(count)
            listing.check_bookie()


def _made(lines: Lines, query: LedgerQuery, batch: ReadLedgers) -> tuple[int, str]:
    """Return the lines of the ledgers in `batch` that the query finds, and their number before them."""
    from bkctl.metadata.admin.overview import chosen

    rows = list(ledger_rows(chosen(zip(batch.ledgers, batch.parse(), strict=True), query)))
    return len(rows), lines.text(rows)


def _print_ids(run: Run, batches: Iterable[Sequence[LedgerId]]) -> None:
    """Print hundreds of thousands of ids: a directory at a time, not a row each."""
    for batch in batches:
        # In order, so that all are of scope 0 where the last is.
        names = batch if batch[-1].is_scoped else map(itemgetter(1), batch)
        run.out.text("\n".join(map(str, names)) + "\n")


def _note_other_scopes(run: Run, scope_id: int | None) -> None:
    """Say that a scope without ledgers has none, and how many others have; None: that no scope has any."""
    from bkctl.metadata.admin.overview import count_scopes

    if next(run.cluster.ledgers.ledgers(scope_id), None) is not None:
        return
    scopes, ledgers = count_scopes(run.cluster, scope_id, OTHERS_COUNTED_MAX)
    if not ledgers:
        run.out.note("No ledgers")
    elif scope_id is not None:
        at_least = "at least " if ledgers == OTHERS_COUNTED_MAX else ""
        run.out.note(
            f"No ledgers in scope {scope_id}; {counted(scopes, 'other scope')} with {at_least}"
            f"{counted(ledgers, 'ledger')}: add --all-scopes, or --ledger-scope-id SCOPE"
        )


def _first_ledger(after: str | None, scope_id: int | None) -> LedgerId | None:
    """Return the ledger of --after, whose bare id is in `scope_id`. Raises UsageError for a ledger of another scope."""
    start = None if after is None else LedgerId.parse(after)
    if start is None or scope_id is None or start.scope_id == scope_id:
        return start
    if start.is_scoped:
        raise UsageError(
            f"--after {after!r} is in scope {start.scope_id}, and scope {scope_id} is listed",
            hint=f"add --ledger-scope-id {start.scope_id} or --all-scopes",
        )
    return LedgerId(scope_id, start.ledger_id)


def parse_states(texts: list[str] | None, flag: str) -> frozenset[str]:
    from bkctl.formats.metadata import LedgerState

    names = {text: text.upper().replace("-", "_") for text in texts or ()}
    for text, name in names.items():
        if name not in LedgerState.__members__:
            known = ", ".join(LedgerState.__members__)
            raise UsageError(f"{flag} {text!r}: not a ledger state", hint=f"one of {known}")
    return frozenset(names.values())


@command(
    app, "show", connects=True, prints=object_of(SHOWN_COLUMNS) + rows_of(SHOWN_COLUMNS, table=LEDGER_TABLE_COLUMNS)
)
def show(
    run: Run,
    ledgers: ManyLedgers,
    watch: WatchOption,
    show_secrets: Annotated[bool, flag("--show-secrets", "Print the ledger's password, too.")] = False,
) -> None:
    """Show the metadata of one ledger, or of several.

    $ bkctl ledger show 12
    $ bkctl ledger show 7:12 -o json
    """
    single = len(ledgers) == 1
    columns = SECRET_COLUMNS if show_secrets else LEDGER_COLUMNS if single else list_columns(run)
    run.out.watch(
        watch, lambda: ledger_rows(run.cluster.ledgers.read_each(ledgers)), columns,
        subscribe=partial(run.cluster.ledgers.watch_each, ledgers), single=single,
    )  # fmt: skip


PLACE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.INTEGER, "place.", firstEntryId="FIRST ENTRY", lastEntryId="LAST ENTRY"),
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
PLACE_RACK_COLUMNS = (
    Column("RACK", "rack", "rack"),
    Column("TOO FEW RACKS", "inTooFewRacks", "in_few_racks", Kind.BOOLEAN),
)
ANSWER_COLUMNS = (
    Column("ANSWER", "answer", "answer", style={"ok": GREEN, "gone": RED, "no-entry": RED, "no-ledger": RED,
                                                "damaged": RED, "timed-out": YELLOW, "unavailable": YELLOW}),
    Column("PROBLEM", "problem", value_at("fault.error.message")),
)  # fmt: skip


def spans_text(spans: list[dict[str, int]]) -> str:
    """Return `3, 5-9 (4)`: ids, and spans with the number of missing entries."""
    texts = [
        f"{span['firstEntryId']}"
        if span["entryCount"] == 1
        else f"{span['firstEntryId']}-{span['lastEntryId']} ({span['entryCount']})"
        for span in spans
    ]
    return ", ".join(texts[:5]) + (f", {len(texts) - 5} more" if len(texts) > 5 else "") if texts else "-"


MISSING_COLUMN = Column("MISSING", "missing", "missing", Kind.NESTED, text=spans_text)
#: The columns with and without --entry, --check and --every-entry.
SHOWN_COLUMNS = union(
    PLACE_COLUMNS, PLACE_COLUMNS.and_also(*ANSWER_COLUMNS, MISSING_COLUMN, *PLACE_RACK_COLUMNS), ENTRY_PLACE_COLUMNS
)

#: The branches of the tree on a terminal: the ledger, its fragments.
LEVELS: Final = (("ledger", "entryId"), ("firstEntryId", "lastEntryId"))


@command(app, "locate", connects=True, prints=rows_of(SHOWN_COLUMNS))
def locate_ledgers(
    run: Run,
    ledgers: ManyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry.")],
    protocol: ProtocolOption,
    check: Annotated[
        bool, flag("--check", "Ask each bookie for the first and last entry that it should have.")
    ] = False,
    every_entry: Annotated[
        bool, flag("--every-entry", "Ask each bookie for every entry, and print the missing ones.")
    ] = False,
) -> None:
    """Show which bookies hold the entries of a ledger.

    Prints one row for each bookie of each fragment, with the number of entries that it should have; on a terminal, a
    tree. A bookie's state is rw, ro or down; SCOPES tells whether it serves ledgers of scopes other than 0. --entry
    prints the write set of one entry, in the order in which readers ask its bookies. Where bookies have racks, TOO FEW
    RACKS marks those with entries whose replicas share one (minNumRacksPerWriteQuorum of --conf, default 2). --check
    asks the bookies. ANSWER is then ok, gone (not registered), no-entry, no-ledger, damaged, timed-out or unavailable;
    exit code 3 unless all are ok.

    $ bkctl ledger locate 12
    $ bkctl ledger locate 12 --entry 0 --check
    """
    from bkctl.replication.checker import checked_places, places_of

    from ..bookies.members import find_placement

    if entry is not None and not 0 <= entry < 1 << 63:
        raise UsageError(f"--entry {entry}: entry ids are 0 or more, below 2^63")
    refuse_both("--every-entry", every_entry, "--entry", entry, "use --check --entry for one entry")
    columns = PLACE_COLUMNS if entry is None else ENTRY_PLACE_COLUMNS
    asks = check or every_entry
    if asks:
        columns = columns.and_also(*ANSWER_COLUMNS, *((MISSING_COLUMN,) if every_entry else ()))
    findings: Counter[bool] = Counter()
    with run.job.working("Asking the bookies" if asks else "Looking at the ledgers"):
        bookies = run.cluster.bookies.list()
        placement = find_placement(run, bookies)
        columns = columns.and_also(*(PLACE_RACK_COLUMNS if placement.racks else ()))
        with run.out.tree(columns, LEVELS) as writer:
            if asks:
                places = partial(
                    checked_places, ledgers=ledgers, entry_id=entry, every_entry=every_entry, placement=placement
                )
                run.job.take_each(
                    run.access.bookkeeper(run.cluster, protocol), places, partial(_write, writer, findings)
                )
            else:
                writer.rows(places_of(run.cluster, ledgers, bookies, entry, placement))
    run.out.finish_with(findings[True], "replica is not ok", "replicas are not ok")


def _write(writer: RowWriter | TreeWriter, findings: Counter[bool], row: PlaceRow) -> None:
    writer.row(row)
    findings[row.fault is not None] += 1
