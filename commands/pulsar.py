"""`bkctl pulsar`: Pulsar's topics, and the ledgers that they have, miss and left behind."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Conflict, NotFound
from bkctl.ids import LedgerId

from .kit.columns import object_of, rows_of
from .kit.command import Run, command, group
from .kit.options import duration_option, flag, word
from .kit.texts import YELLOW, counted, size_text, time_text
from .kit.values import tap

if TYPE_CHECKING:
    from bkctl.client.pulsar import End, Inventory, Named, PulsarFinding, TopicState
    from bkctl.metadata.cluster import Cluster

app = group()

RootOption = Annotated[
    str | None,
    flag(
        "--pulsar-root PATH",
        "Path of Pulsar's metadata in the store (default: the parent of the cluster's root, / of /ledgers).",
    ),
]
QuickOption = Annotated[bool, flag("--quick", "Ask no bookie: positions that only cursors' ledgers have stay unknown.")]


@contextmanager
def _inventory(run: Run, root: str | None, *, quick: bool = False) -> Iterator[Inventory]:
    from bkctl.client.pulsar import Inventory, read_ends

    def ends(ledger_ids: set[int]) -> Mapping[int, End | BkctlError]:
        return run.job.ask(run.access.bookkeeper(run.cluster), partial(read_ends, ledger_ids=ledger_ids))

    with (
        run.job.working("Reading topics", unit="ledgers") as activity,
        Inventory(run.cluster, root, ends=None if quick else ends, progress=activity.update) as inventory,
    ):
        if run.cluster.store.children(inventory.nodes.path("/managed-ledgers")) is None:
            raise NotFound(
                f"No topics at {inventory.nodes.path('/managed-ledgers')} in {run.cluster.store.name}",
                hint="give the path of Pulsar's metadata, its metadataStoreUrl, with --pulsar-root",
            )
        yield inventory


def _number_columns(path: str = "") -> tuple[Column, ...]:
    """Return the columns of the numbers of topics, which rows have at `path`."""
    return (
        Column("LEDGERS", "ledgerCount", f"{path}ledgers", Kind.INTEGER),
        Column("ENTRIES", "entryCount", f"{path}entries", Kind.INTEGER, detail=True),
        Column("SIZE", "size", f"{path}size_bytes", Kind.SIZE),
        Column("OFFLOADED", "offloadedSize", f"{path}offloaded_bytes", Kind.SIZE, detail=True),
        Column("CURSORS", "cursorCount", f"{path}cursors", Kind.INTEGER, spare=1),
        Column("BACKLOG", "backlogEntryCount", f"{path}backlog", Kind.INTEGER),
        Column("HELD BY", "heldBy", f"{path}held_by", flexible=True),
        Column("OLDEST", "oldestCtime", f"{path}oldest_ms", Kind.TIME, spare=2),
        Column("UNDER-REPLICATED", "underReplicatedCount", f"{path}underreplicated", Kind.INTEGER, spare=1),
        Column("UNAVAILABLE", "unavailableCount", f"{path}unavailable", Kind.INTEGER),
        Column("MISSING", "missingCount", f"{path}missing", Kind.INTEGER),
    )


TOPIC_COLUMNS = Columns(
    Column("TOPIC", "topic", "name", flexible=True), *_number_columns(), key="topic", none="No topics"
)
TOTAL_COLUMNS = Columns(
    Column("NAME", "name", "name"), Column("TOPICS", "topicCount", "topics", Kind.INTEGER), *_number_columns(),
    key="name", none="No topics",
)  # fmt: skip

#: The group of topics in a row of `pulsar topics`.
TopicsBy = StrEnum("TopicsBy", "TOPIC NAMESPACE TENANT")


@command(app, "topics", connects=True, prints=rows_of(TOPIC_COLUMNS, TOTAL_COLUMNS))
def list_topics(
    run: Run,
    place: Annotated[str | None, word("[TENANT[/NAMESPACE]]", "List only topics of this tenant or namespace.")] = None,
    by: Annotated[TopicsBy, flag("--by", "Print a row for each of these.")] = TopicsBy.TOPIC,
    quick: QuickOption = False,
    root: RootOption = None,
) -> None:
    """List Pulsar's topics with their ledgers and backlog.

    BACKLOG counts the entries behind the slowest cursor, which HELD BY names: until it acknowledges them, their ledgers
    stay. OLDEST is the creation of the oldest ledger. Topics that cannot be read are reported, with exit code 3.

    $ bkctl pulsar topics
    $ bkctl pulsar topics public/default --sort=-backlogEntryCount
    $ bkctl pulsar topics --by namespace --quick
    """
    from bkctl.client.pulsar import totals

    with _inventory(run, root, quick=quick) as inventory:
        inventory.list_ledgers()
        topics = inventory.topics((place or "").strip("/"))
        if by is TopicsBy.TOPIC:
            run.out.render((each.total for each in topics), TOPIC_COLUMNS)
        else:
            run.out.render(totals(topics, lambda node: getattr(node, by.value)), TOTAL_COLUMNS)
        _report(run, inventory)


def _report(run: Run, inventory: Inventory) -> None:
    problems = dict.fromkeys(map(str, inventory.errors))
    run.out.error(*problems)
    run.out.finish_with(len(problems), "node or ledger cannot be read", "nodes or ledgers cannot be read")


def _offload(ledger: Named) -> dict[str, Any]:
    found = ledger.offload
    if found is None:
        return dict.fromkeys(("offload", "offloaded", "offloadedTo", "offloadId", "bookkeeperCopy"))
    driver, half = found.driverMetadata, (1 << 64) - 1
    return {
        "offload": "complete" if found.complete else "started",
        "offloaded": driver.name or "offloaded" if found.complete else None,
        "offloadedTo": {each.key: each.value for each in driver.properties},
        "offloadId": str(UUID(int=(found.uidMsb & half) << 64 | found.uidLsb & half)),
        "bookkeeperCopy": ledger.bookkeeper_copy,
    }


def _ledgers(row: TopicState) -> list[dict[str, Any]]:
    return [
        {
            "ledgerId": str(each.ledger_id), "role": each.role, "part": each.part, "state": each.state,
            "entryCount": each.entry_count, "size": each.size_bytes, **_offload(each),
        }
        for each in row.ledgers
    ]  # fmt: skip


def _cursors(row: TopicState) -> list[dict[str, Any]]:
    return [
        {
            "cursor": each.name, "position": each.position_text, "backlogEntryCount": each.backlog,
            "ledgerId": None if each.node.ledger_id is None else str(each.node.ledger_id),
            "error": None if each.error is None else each.error.message,
        }
        for each in row.cursors
    ]  # fmt: skip


def _lines(values: list[dict[str, Any]]) -> str:
    def text(value: Any) -> str:
        return " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else str(value)

    return "\n".join("  ".join(f"{name} {text(value)}" for name, value in each.items() if value is not None)
                     for each in values) or "none"  # fmt: skip


def _terminated(row: TopicState) -> str | None:
    info = row.node.info
    end = info.terminatedPosition
    return f"{end.ledgerId}:{end.entryId}" if info.HasField("terminatedPosition") else None


_OBJECTS = {"type": "array", "items": {"type": "object"}}
SHOWN_COLUMNS = Columns(
    Column("TOPIC", "topic", "node.topic", flexible=True),
    *_number_columns("total."),
    Column("MANAGED LEDGER", "managedLedger", "node.name"),
    Column("CREATED", "ctime", "node.ctime_ms", Kind.TIME),
    Column("TERMINATED AT", "terminatedPosition", _terminated, optional=True),
    Column(
        "PROPERTIES", "properties", lambda row: {each.key: each.value for each in row.node.info.properties},
        Kind.NESTED, shape={"type": "object", "additionalProperties": {"type": "string"}},
    ),
    Column("SCHEMA", "schemaLedgerIds", lambda row: [str(each) for each in row.schema_ledger_ids], Kind.NESTED,
           shape={"type": "array", "items": {"type": "string"}}),
    Column("LEDGERS", "ledgers", _ledgers, Kind.NESTED, shape=_OBJECTS, text=_lines),
    Column("CURSORS", "cursors", _cursors, Kind.NESTED, shape=_OBJECTS, text=_lines),
    key="topic",
)  # fmt: skip


@command(app, "topic", connects=True, prints=object_of(SHOWN_COLUMNS))
def show_topic(
    run: Run,
    topic: Annotated[str, word("TOPIC", "persistent://TENANT/NAMESPACE/TOPIC, or a partition.")],
    quick: QuickOption = False,
    root: RootOption = None,
) -> None:
    """Show a topic: ledgers in order, cursors, schema.

    Each ledger has its role: managed-ledger (messages), cursor (positions of a subscription), compacted-ledger, or
    delayed-index-bucket; and its state: ok, under-replicated, one-copy, unavailable, missing, or offloaded. A ledger
    that was copied to tiered storage names its driver and place there, and what became of BookKeeper's copy: kept,
    deleted, left (its deletion was interrupted), or lost.

    $ bkctl pulsar topic persistent://public/default/orders
    """
    from bkctl.metadata.pulsar_nodes import schema_ledgers
    from bkctl.metadata.pulsar_topics import TopicFilter
    from bkctl.metadata.store import attempt

    name = TopicFilter.parse(topic).managed_ledger
    with _inventory(run, root, quick=quick) as inventory:
        found = inventory.look_up(name)
        if found is None:
            raise NotFound(
                f"No topic {topic} in {run.cluster.store.name}",
                hint="'bkctl pulsar topics' lists them; a partitioned topic has only its partitions: TOPIC-partition-0",
            )
        schema = None if found.schema is None else attempt(inventory.nodes.schema, found.schema)
        if isinstance(schema, BkctlError):
            inventory.errors.append(schema)
            schema = None
        run.out.show(
            found._replace(schema_ledger_ids=() if schema is None else tuple(schema_ledgers(schema))), SHOWN_COLUMNS
        )
        _report(run, inventory)


FINDING_COLUMNS = Columns(
    Column(
        "CODE", "code", "code", style={"topic-under-replicated": YELLOW, "topic-one-copy": YELLOW, "orphan": YELLOW}
    ),
    Column("TOPIC", "topic", "name", flexible=True),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    Column("WHAT", "message", "message", wraps=True),
    Column("ADVICE", "advice", "advice", wraps=True),
    key="ledger",
)
PauseOption = Annotated[float, duration_option("--pause", "Wait between the two looks at a finding.", default="2s")]


@command(app, "check", connects=True, prints=rows_of(FINDING_COLUMNS))
def check(run: Run, pause: PauseOption, root: RootOption = None) -> None:
    """Find lost ledgers, orphans and topics at risk.

    Lost: a topic, cursor or schema names a ledger that does not exist. An orphan is a ledger that says that it is
    Pulsar's, and that nothing names. At risk: too few replicas are up. All but the last is looked at twice, since
    brokers create and delete meanwhile. Exit code 3 if there are findings.

    $ bkctl pulsar check
    """
    from bkctl.client.pulsar import check_pulsar

    orphans = Counter[str]()
    with _inventory(run, root) as inventory:
        findings = tap(check_pulsar(inventory, pause_s=pause), partial(_count_orphan, orphans))
        count = run.out.render(findings, FINDING_COLUMNS, findings=True)
    if orphans:
        size = size_text(orphans["bytes"])
        run.out.note(f"{counted(orphans['ledgers'], 'orphan')} with {size} in closed ledgers")
    if not count:
        run.out.note("Each topic has its ledgers, and each of Pulsar's ledgers its topic")
    run.out.finish_with(count)


def _count_orphan(counts: Counter[str], finding: PulsarFinding) -> None:
    if finding.code == "orphan":
        counts.update(ledgers=1, bytes=finding.size_bytes or 0)


ORPHAN_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("KIND", "kind", "kind"),
    Column("TOPIC", "topic", "name", flexible=True),
    Column("PART", "part", "part"),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    Column("CREATED", "ctime", "ctime_ms", Kind.TIME),
    Column("AGE", "ageSeconds", "age_s", Kind.INTEGER, text=time_text, ages=True),
    key="ledger",
)


@command(app, "orphans", changes="delete", asks=True, undo=True, dry_run=True, prints=rows_of(ORPHAN_COLUMNS))
def list_orphans(
    run: Run,
    age_min: Annotated[float, duration_option("--min-age", "Only ledgers at least this old.", default="1d")],
    pause: PauseOption,
    delete: Annotated[bool, flag("--delete", "Delete them, after asking.")] = False,
    root: RootOption = None,
) -> None:
    """List or delete ledgers that no topic needs.

    Lists ledgers with Pulsar's metadata that no topic, cursor or schema names, in two passes over all of them. Ledgers
    of unknown age or kind are left out, and those whose topic cannot be read. With --delete each is read again, with
    its topic, just before its deletion; 'metadata undo' helps until bookies collect garbage. Exit code 3 if there are
    any.

    $ bkctl pulsar orphans
    $ bkctl pulsar orphans --delete --min-age 1w --dry-run
    """
    found, problems = _found_twice(run, root, pause, delete=delete)
    old = [each for each in found if each.age_s is not None and each.age_s >= age_min]
    run.out.error(*problems)
    run.out.render(old, ORPHAN_COLUMNS, findings=True)
    if len(found) > len(old):
        run.out.note(f"{counted(len(found) - len(old), 'orphan is', 'orphans are')} younger than --min-age")
    if not old:
        run.out.note("No orphans")
    if not delete or run.dry_run or not old:
        run.out.finish_with(len(old) + len(problems), "orphan or problem", "orphans or problems")
        return
    size_bytes = sum(each.size_bytes or 0 for each in old)
    run.consent.confirm(f"{counted(len(old), 'ledger')} with {size_text(size_bytes)} would be lost")
    with _inventory(run, root) as inventory:
        deleted = _delete_orphans(run, inventory, run.recorded, old)
    run.out.note(f"{deleted:,} of {counted(len(old), 'orphan was', 'orphans were')} deleted")
    problem_count = len(old) - deleted + len(problems)
    run.out.finish_with(problem_count, "ledger is left, or cannot be judged", "ledgers are left, or cannot be judged")


def _found_twice(run: Run, root: str | None, pause_s: float, *, delete: bool) -> tuple[list[PulsarFinding], list[str]]:
    """Return the orphans of two passes, the second confirmed one by one, and the problems of the last pass."""
    from bkctl.client.pulsar import find_orphans

    with _inventory(run, root) as inventory:
        first = {each.ledger_id for each in find_orphans(inventory)}
        problems = list(dict.fromkeys(map(str, inventory.errors)))
    if not first:
        return [], problems
    time.sleep(pause_s)
    with _inventory(run, root) as inventory:
        both = [each for each in find_orphans(inventory) if each.ledger_id in first]
        if delete:
            inventory.require_own_topics()
        return [each for each in both if inventory.confirm_orphan(each)], list(
            dict.fromkeys(map(str, inventory.errors))
        )


def _delete_orphans(run: Run, inventory: Inventory, cluster: Cluster, orphans: list[PulsarFinding]) -> int:
    """Delete orphans, each read again just before; return the number that is gone."""
    left, deleted = "deleted ledgers stay deleted: run the command again", 0
    with run.job.working("Deleting", total=len(orphans), unit="ledgers", left=left) as activity:
        for each in orphans:
            activity.advance()
            if (orphan := inventory.confirm_orphan(each)) is None:
                continue
            try:
                cluster.ledgers.remove(LedgerId(0, each.ledger_id or 0), orphan[0])
                deleted += 1
            except (Conflict, NotFound) as error:
                run.out.error(error)
    return deleted
