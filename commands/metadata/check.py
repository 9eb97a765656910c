"""`bkctl metadata check`, `orphans`, `scopes`, `idgen` and `replace-bookie`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Annotated

from bkctl.client.ledger_survey import misplacement
from bkctl.columns import Column, Columns, Kind
from bkctl.errors import Conflict, NotFound, UsageError
from bkctl.ids import LedgerId, check_bookie_id, random_u64
from bkctl.metadata.admin.check import check_metadata, orphans, remove_orphans
from bkctl.metadata.admin.ledger_changes import replace_bookie
from bkctl.metadata.admin.overview import scope_counts
from bkctl.pace import Pace

from ..kit.columns import fields, hex_column
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScopeOfAny, scope_option
from ..kit.next_steps import next_column
from ..kit.options import RecordPace, count_option, flag, pace_option
from ..kit.texts import RED, YELLOW, counted
from ..kit.values import tap

app = group()

FINDING_COLUMNS = Columns(
    Column(
        "CODE", "code", "code", style={"unparsable": RED, "impossible": RED, "dangling": YELLOW, "misplaced": YELLOW}
    ),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.TEXT, path="NODE", message="WHAT"),
    next_column("metadata check", lambda row: row.code, path=lambda row: row.path, ledger=lambda row: row.ledger),
    key="path",
)


@command(app, "check", connects=True, prints=rows_of(FINDING_COLUMNS))
def check(run: Run, scope: ScopeOfAny, pace: RecordPace) -> None:
    """Find metadata that is unreadable, dangling or impossible.

    Checks ledgers, also for bookies that do not exist; cookies, marks, layout and scopes. Where bookies have racks,
    finds ensembles that the placement policy of --conf does not accept. Exit code 3 if there are findings.

    $ bkctl metadata check
    """
    from ..bookies.members import find_placement

    placement = find_placement(run, run.cluster.bookies.list())
    with run.job.working("Checking metadata", unit="ledgers", pace=pace) as activity:
        found = check_metadata(run.cluster, scope, partial(misplacement, placement), progress=activity.step)
        count = run.out.render(found, FINDING_COLUMNS, findings=True)
    if not count:
        run.out.note("The metadata is sound")
    run.out.finish_with(count, "finding", "findings")


ORPHAN_COLUMNS = Columns(
    *fields(Kind.TEXT, code="CODE", path="NODE"),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODES", "nodeCount", "node_count", Kind.INTEGER),
    Column("REMOVABLE", "removable", "removable", Kind.BOOLEAN),
    Column("WHAT", "message", "message"),
    key="path",
)


@command(app, "orphans", asks=True, changes="delete", undo=True, dry_run=True, prints=rows_of(ORPHAN_COLUMNS))
def list_orphans(
    run: Run, delete: Annotated[bool, flag("--delete", "Remove the orphans that are REMOVABLE, after asking.")] = False
) -> None:
    """List nodes that belong to nothing, or remove them.

    Orphans are marks of deleted ledgers, scopes of a formatted cluster, and unused cookies. Exit code 3 if there are
    any.

    $ bkctl metadata orphans
    $ bkctl metadata orphans --delete --dry-run
    """
    with run.job.working("Looking for orphans"):
        found = list(orphans(run.cluster))
    run.out.render(found, ORPHAN_COLUMNS, findings=True)
    if not found:
        run.out.note("No orphans")
    removable = [each for each in found if each.removable]
    if not delete or run.dry_run or not removable:
        run.out.finish_with(len(found), "orphan", "orphans")
        return
    node_count = sum(each.node_count for each in removable)
    run.consent.confirm(f"{counted(node_count, 'node', 'nodes')} would be removed from {run.cluster.uri}")
    with (
        run.recorded() as recorded,
        run.job.working("Removing", left="removed nodes stay removed: run the command again to continue"),
    ):
        remove_orphans(recorded, removable)
    run.out.note(f"{len(removable):,} of {len(found):,} orphans were removed")
    run.out.finish_with(
        len(found) - len(removable), "orphan remains; check it first", "orphans remain; check them first"
    )


SCOPE_COLUMNS = Columns(
    Column("SCOPE", "ledgerScopeId", lambda row: str(row.scope_id)),
    hex_column("ledgerScopeIdHex", lambda row: f"{row.scope_id:016x}"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    key="ledgerScopeId",
)


@command(app, "scopes", connects=True, prints=rows_of(SCOPE_COLUMNS))
def scopes(run: Run) -> None:
    """List the ledger scopes, with the number of ledgers.

    Scope 0 is always listed.

    $ bkctl metadata scopes
    """
    with run.job.working("Counting ledgers"):
        if run.cluster.ledgers.scopes_state() == "foreign":
            run.out.note("The scopes tree of a formatted cluster is left out; 'metadata orphans' lists it")
        run.out.render(scope_counts(run.cluster), SCOPE_COLUMNS)


NEW_ID_COLUMNS = Columns(Column("LEDGER", "ledger", lambda ledger: ledger, Kind.LEDGER), key="ledger")


@command(app, "idgen", connects=True, changes="sequence", prints=rows_of(NEW_ID_COLUMNS))
def idgen(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Number of ids (default 1).", "--count")],
    scope: Annotated[int | None, scope_option("Random ids of this scope.")],
    sequence: Annotated[
        bool, flag("--sequence", "Take ids of scope 0 from the cluster's generator, which gives no id twice.")
    ] = False,
) -> None:
    """Print new ledger ids.

    Without options, prints UUIDs, whose high half is the scope. --ledger-scope-id prints random ids of one scope.
    --sequence takes ids from the cluster's generator; only that needs a cluster.

    $ bkctl metadata idgen --limit 3
    $ bkctl metadata idgen --ledger-scope-id 7
    """
    if sequence and scope:
        raise UsageError("--sequence applies to scope 0; ids of other scopes are random")
    if not sequence:
        if scope == 0:
            raise UsageError("Ids of scope 0 come from the cluster's generator", hint="add --sequence")
        ids = (LedgerId.random() if scope is None else LedgerId(scope, random_u64()) for _ in range(limit or 1))
        run.out.render(ids, NEW_ID_COLUMNS)
        return
    run.out.render((run.cluster.ledgers.new_ledger_id() for _ in range(limit or 1)), NEW_ID_COLUMNS)


REPLACEMENT_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
    Column("PROBLEM", "problem", "problem"),
    key="ledger",
)


@command(app, "replace-bookie", asks=True, undo=True, dry_run=True, prints=rows_of(REPLACEMENT_COLUMNS))
def replace_bookie_id(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Change at most N ledgers.")],
    pace: Annotated[Pace, pace_option("Change at most N ledgers per second.", has_bytes=False)],
    old: Annotated[str | None, flag("--from BOOKIE", "The bookie id to replace.")] = None,
    new: Annotated[str | None, flag("--to BOOKIE", "The new bookie id.")] = None,
) -> None:
    """Replace a bookie id in the metadata of every ledger.

    For a bookie that returns under another id with all its data; entries are not moved. Covers every scope. Refused
    while the old id is registered, or if the new id does not exist. Exit code 3 if ledgers keep the old id.

    $ bkctl metadata replace-bookie --from b1:3181 --to b2:3181 --dry-run
    """
    if old is None or new is None:
        raise UsageError("--from BOOKIE and --to BOOKIE are required")
    if check_bookie_id(old) == check_bookie_id(new):
        raise UsageError("--from and --to are the same bookie")
    kept = Counter[bool]()
    registered = run.cluster.bookies.get(old)
    if registered is not None and registered.state != "down":
        raise Conflict(f"Bookie {old} is registered: its clients still write to it", hint="stop it first")
    if run.cluster.bookies.get(new) is None:
        raise NotFound(f"No bookie {new} in {run.cluster.store.name}", hint="'bkctl bookies list' shows them")
    if not run.dry_run:
        run.consent.confirm(f"{old} would become {new} in the metadata of all ledgers of {run.cluster.uri}")
    left = "changed ledgers stay changed: run the command again to continue"
    with (
        run.recorded() as recorded,
        run.job.working("Replacing", unit="ledgers", pace=pace, left=left) as activity,
        run.out.rows(REPLACEMENT_COLUMNS) as writer,
    ):
        replaced = replace_bookie(
            recorded, old, new, pace=pace, limit=limit, dry_run=run.dry_run, progress=activity.update
        )
        writer.rows(tap(replaced, lambda row: kept.update((row.problem is not None,))))
    if registered is None and not kept:
        raise NotFound(f"No bookie {old}, and no ledger names it", hint="'bkctl bookies list' shows them")
    run.out.note(f"{kept[False]:,} ledgers {'would be' if run.dry_run else 'were'} changed")
    run.out.finish_with(kept[True], "ledger was left unchanged", "ledgers were left unchanged")
