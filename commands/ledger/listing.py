"""`bkctl ledger list` and `bkctl ledger show`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import ALL, Output
from ..kit.command import Run, command, group
from ..kit.documents import object_of, rows_of
from ..kit.ledger_options import ManyLedgers, ScopeToList
from ..kit.options import (
    CustomMetadataFilter,
    WatchOption,
    count_option,
    duration_option,
    size_option,
)
from ..kit.texts import counted
from .columns import (
    LEDGER_COLUMNS,
    LEDGER_TABLE_COLUMNS,
    SECRET_COLUMNS,
    SHOWN_COLUMNS,
    ListedLedger,
    list_columns,
)

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.ledger_columns import LedgerRow
    from bkctl.metadata.ledgers import VersionedMetadata

app = group()


#: Ledgers and scopes that are counted to say how many there are beside scope 0.
OTHERS_COUNTED_MAX = 10_000
COUNT_COLUMNS = Columns(Column("LEDGERS", "count", lambda count: count, Kind.INTEGER))


@command(
    app,
    "list",
    connects=True,
    prints=rows_of(LEDGER_COLUMNS, table=LEDGER_TABLE_COLUMNS) + object_of(COUNT_COLUMNS),
    examples=(
        "bkctl ledger list",
        "bkctl ledger list --state OPEN --min-age 1w --sort=-length",
        "bkctl ledger list --topic persistent://public/default/orders",
    ),
)
def print_ledgers(
    run: Run,
    scope_id: ScopeToList,
    age_min: Annotated[float | None, duration_option("--min-age", "List only ledgers at least this old.")],
    age_max: Annotated[float | None, duration_option("--max-age", "List only ledgers at most this old.")],
    size_min: Annotated[int | None, size_option("--min-size", "List only ledgers of at least this length.")],
    size_max: Annotated[int | None, size_option("--max-size", "List only ledgers of at most this length.")],
    custom_metadata: CustomMetadataFilter,
    limit: Annotated[int | None, count_option("--limit", "List at most N ledgers.")],
    watch: WatchOption,
    bookie: Annotated[
        str | None, typer.Option("--bookie", metavar="BOOKIE", help="List only ledgers with entries on this bookie.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="OPEN, IN_RECOVERY or CLOSED; repeatable.")
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option("--topic", metavar="TOPIC", help="List only ledgers of this Pulsar topic, partitions included."),
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", metavar="NAME", help="List only ledgers of this subscription of --topic."),
    ] = None,
    after: Annotated[
        str | None, typer.Option("--after", metavar="LEDGER", help="List only ledgers after this one.")
    ] = None,
    count: Annotated[bool, typer.Option("--count", help="Print only the number of ledgers.")] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Skip metadata that cannot be read (exit code 3 then).")
    ] = False,
) -> None:
    """List the ledgers of a scope, in order of their ids.

    Prints the metadata of each ledger; -o id prints the ids alone, which is much faster. --topic goes by the names that
    Pulsar writes into the metadata of ledgers: of a topic's messages, of its subscriptions, and of compacted messages.
    """
    from bkctl.metadata.admin.overview import NO_QUERY, LedgerQuery, list_ledgers
    from bkctl.metadata.ledger_columns import ledger_rows
    from bkctl.metadata.pulsar_topics import TopicFilter

    if subscription is not None and topic is None:
        raise UsageError("--subscription is given without a topic", hint="add --topic")
    query = LedgerQuery(
        bookie_id=bookie,
        states=parse_states(state, "--state"),
        age_s_min=age_min,
        age_s_max=age_max,
        size_bytes_min=size_min,
        size_bytes_max=size_max,
        custom_metadata=tuple(custom_metadata.items()),
        topic=None if topic is None else TopicFilter.parse(topic, subscription),
    )
    if not query.needs_metadata:
        query = NO_QUERY
    start = _first_ledger(after, scope_id)
    limit = run.out.limit_sorted(limit)
    prints_ids = run.out.output is Output.ID and run.out.selection == ALL
    is_plain = watch is None and limit is None and not query.needs_metadata
    unreadable: dict[LedgerId, str] = {}
    found_count = 0

    def skip(ledger: LedgerId, error: Exception) -> None:
        if unreadable.get(ledger) != str(error):
            unreadable[ledger] = str(error)
            run.out.error(error)

    def look() -> Iterator[LedgerRow] | Iterator[ListedLedger]:
        if (count or prints_ids) and not query.needs_metadata:
            ids = islice(cluster.ledgers.ledgers(scope_id, start), limit)
            return map(ListedLedger, ids)
        found = list_ledgers(
            cluster, scope_id, after=start, query=query, unreadable=skip if keep_going else None,
            progress=activity.update,
        )  # fmt: skip
        checked = _refuse_unknown_bookie(cluster, bookie, islice(found, limit))
        return ledger_rows(counting(checked) if query.needs_metadata else checked)

    def counting(found: Iterator[tuple[LedgerId, VersionedMetadata]]) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
        nonlocal found_count
        for each in found:
            found_count += 1
            activity.remark = f"{found_count:,} found"
            yield each

    with (
        run.access.cluster() as cluster,
        run.job.working("Listing ledgers", unit="ledgers", enabled=watch is None) as activity,
    ):
        if count:
            run.out.watch(watch, lambda: [sum(1 for _ in look())], COUNT_COLUMNS, single=True)
        elif prints_ids and is_plain:
            _print_ids(run, cluster, scope_id, start)
        elif watch is None:
            # A list without rows is a sentence on a terminal.
            run.out.render(look(), list_columns(run), findings=run.out.draws)
        else:
            run.out.watch(watch, look, list_columns(run))
        if query.needs_metadata and watch is None and limit is None and sys.stdout.isatty():
            run.out.note(f"{found_count:,} of {counted(activity.done, 'ledger', 'ledgers')}")
        if watch is None and next(cluster.ledgers.ledgers(scope_id), None) is None:
            _note_other_scopes(run, cluster, scope_id)
    run.out.finish_with(
        len(unreadable), "ledger has metadata that cannot be read", "ledgers have metadata that cannot be read"
    )


def _refuse_unknown_bookie(
    cluster: Cluster, bookie: str | None, found: Iterator[tuple[LedgerId, VersionedMetadata]]
) -> Iterator[tuple[LedgerId, VersionedMetadata]]:
    """Yield `found`. Raises NotFound if there is none, since the bookie does not exist."""
    first = next(found, None)
    if first is not None:
        yield first
        yield from found
    elif bookie is not None and cluster.bookies.get(bookie) is None:
        raise NotFound(f"No bookie {bookie}, and no such ledger names it", hint="'bkctl bookies list' shows them")


def _print_ids(run: Run, cluster: Cluster, scope_id: int | None, start: LedgerId | None) -> None:
    """Print hundreds of thousands of ids: a directory at a time, not a row each."""
    for batch in cluster.ledgers.batches(scope_id, start):
        # In order, so that all are of scope 0 where the last is.
        names = batch if batch[-1].is_scoped else map(itemgetter(1), batch)
        run.out.text("\n".join(map(str, names)) + "\n")


def _note_other_scopes(run: Run, cluster: Cluster, scope_id: int | None) -> None:
    """Say that a scope has no ledgers, and how many others have; None: that no scope has any."""
    scopes = sum(1 for scope in islice(cluster.ledgers.scopes(), OTHERS_COUNTED_MAX) if scope != scope_id)
    ledgers = sum(1 for _ in islice(cluster.ledgers.ledgers(None), OTHERS_COUNTED_MAX))
    if not ledgers:
        run.out.note("No ledgers")
    elif scope_id is not None:
        at_least = "at least " if ledgers == OTHERS_COUNTED_MAX else ""
        run.out.note(
            f"No ledgers in scope {scope_id}; {counted(scopes, 'other scope', 'other scopes')} with {at_least}"
            f"{counted(ledgers, 'ledger', 'ledgers')}: add --all-scopes, or --ledger-scope-id SCOPE"
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
    app,
    "show",
    connects=True,
    prints=object_of(SHOWN_COLUMNS) + rows_of(SHOWN_COLUMNS, table=LEDGER_TABLE_COLUMNS),
    examples=(
        "bkctl ledger show 12",
        "bkctl ledger show 7:12 -o json",
    ),
)
def show(
    run: Run,
    ledgers: ManyLedgers,
    watch: WatchOption,
    show_secrets: Annotated[bool, typer.Option("--show-secrets", help="Print the ledger's password, too.")] = False,
) -> None:
    """Show the metadata of one ledger, or of several."""
    from bkctl.metadata.ledger_columns import ledger_row

    single = len(ledgers) == 1

    def look() -> Iterator[LedgerRow]:
        for ledger, found in cluster.ledgers.read_many(ledgers):
            if isinstance(found, BkctlError):
                raise found
            yield ledger_row(ledger, found)

    def subscribe(changed: Callable[[], None]) -> Callable[[], None]:
        cancels = ExitStack()
        for ledger in ledgers:
            cancels.callback(cluster.ledgers.watch(ledger, lambda _: changed()))
        return cancels.close

    with run.access.cluster() as cluster:
        columns = SECRET_COLUMNS if show_secrets else LEDGER_COLUMNS if single else list_columns(run)
        run.out.watch(watch, look, columns, subscribe=subscribe, single=single)
