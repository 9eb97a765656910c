"""`bkctl metadata check` and `bkctl metadata orphans`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from bkctl.columns import Column, Columns, Kind

from ..kit.command import Access, Consent, LongWork, Printer, Run, command, group, rows_of
from ..kit.ledger_options import ScopeOfAny
from ..kit.next_steps import next_column
from ..kit.options import DryRun, RecordPace, UndoOption
from ..kit.texts import RED, YELLOW, counted

app = group()


FINDING_COLUMNS = Columns(
    Column(
        "CODE", "code", "code", style={"unparsable": RED, "impossible": RED, "dangling": YELLOW, "misplaced": YELLOW}
    ),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODE", "path", "path"),
    Column("WHAT", "message", "message"),
    next_column("metadata check", lambda row: row.code, path=lambda row: row.path, ledger=lambda row: row.ledger),
    key="path",
)


@command(app, "check", connects=True, examples=("bkctl metadata check",), prints=rows_of(FINDING_COLUMNS))
def check(run: Run, scope: ScopeOfAny, pace: RecordPace) -> None:
    """Find metadata that is unreadable, dangling or impossible.

    Checks ledgers, also for bookies that do not exist; cookies, marks, layout and scopes. Where bookies have racks,
    finds ensembles that the placement policy of --conf does not accept. Exit code 3 if there are findings.
    """
    from bkctl.client.ledger_survey import misplacement
    from bkctl.metadata.admin.check import check_metadata

    from ..bookies.racks import find_placement

    with run.access.cluster() as cluster:
        placement = find_placement(run, cluster, cluster.bookies.list())
        with run.job.working("Checking metadata", unit="ledgers", pace=pace) as activity:
            found = check_metadata(cluster, scope, partial(misplacement, placement), progress=activity.step)
            count = run.out.render(found, FINDING_COLUMNS, findings=True)
    if not count:
        run.out.note("The metadata is sound")
    run.out.finish_with(count, "finding", "findings")


ORPHAN_COLUMNS = Columns(
    Column("CODE", "code", "code"),
    Column("NODE", "path", "path"),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODES", "nodeCount", "node_count", Kind.INTEGER),
    Column("REMOVABLE", "removable", "removable", Kind.BOOLEAN),
    Column("WHAT", "message", "message"),
    key="path",
)


@command(
    app,
    "orphans",
    connects=True,
    changes="delete",
    asks=True,
    prints=rows_of(ORPHAN_COLUMNS),
    examples=(
        "bkctl metadata orphans",
        "bkctl metadata orphans --delete --dry-run",
    ),
)
def list_orphans(
    out: Printer,
    access: Access,
    consent: Consent,
    job: LongWork,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove the orphans that are REMOVABLE, after asking.")
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """List nodes that belong to nothing, or remove them.

    Orphans are marks of deleted ledgers, scopes of a formatted cluster, and unused cookies. Exit code 3 if there are
    any.
    """
    from bkctl.metadata.admin.check import orphans, remove_orphans

    with access.cluster() as cluster:
        with job.working("Looking for orphans"):
            found = list(orphans(cluster))
        out.render(found, ORPHAN_COLUMNS, findings=True)
        if not found:
            out.note("No orphans")
        removable = [each for each in found if each.removable]
        if not delete or dry_run or not removable:
            out.finish_with(len(found), "orphan", "orphans")
            return
        node_count = sum(each.node_count for each in removable)
        consent.confirm(f"{counted(node_count, 'node', 'nodes')} would be removed from {cluster.uri}")
        with (
            consent.recorded(cluster, undo) as recorded,
            job.working("Removing", left="removed nodes stay removed: run the command again to continue"),
        ):
            remove_orphans(recorded, removable)
    out.note(f"{len(removable):,} of {len(found):,} orphans were removed")
    out.finish_with(len(found) - len(removable), "orphan remains; check it first", "orphans remain; check them first")
