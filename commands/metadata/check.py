"""`bkctl metadata check` and `bkctl metadata orphans`."""

from __future__ import annotations

from typing import Annotated

import typer

from bkctl.columns import Column, Columns, Kind

from ..kit.access import Access
from ..kit.command import command, group
from ..kit.consent import Consent
from ..kit.documents import rows_of
from ..kit.job import LongWork
from ..kit.ledger_options import ScopeOfAny
from ..kit.next_steps import next_column
from ..kit.options import DryRun, RecordPace, UndoOption
from ..kit.printer import Printer
from ..kit.texts import RED, YELLOW, counted

app = group()


FINDING_COLUMNS = Columns(
    Column("CODE", "code", "code", style={"unparsable": RED, "impossible": RED, "dangling": YELLOW}),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODE", "path", "path"),
    Column("WHAT", "message", "message"),
    next_column("metadata check", lambda row: row.code, path=lambda row: row.path, ledger=lambda row: row.ledger),
    key="path",
)


@command(app, "check", connects=True, examples=("bkctl metadata check",), prints=rows_of(FINDING_COLUMNS))
def check(out: Printer, access: Access, job: LongWork, scope: ScopeOfAny, pace: RecordPace) -> None:
    """Find metadata that is unreadable, dangling or impossible.

    Checks ledgers, also for bookies that do not exist; cookies, marks, layout and scopes. Exit code 3 if there are
    findings.
    """
    from bkctl.metadata.admin.check import check_metadata

    with access.cluster() as cluster, job.working("Checking metadata", unit="ledgers", pace=pace) as activity:
        count = out.render(check_metadata(cluster, scope, progress=activity.step), FINDING_COLUMNS, findings=True)
    if not count:
        out.note("The metadata is sound")
    out.finish_with(count, "finding", "findings")


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
    from bkctl.metadata.admin.orphans import orphans, remove_orphan

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
            for each in removable:
                remove_orphan(recorded, each)
    out.note(f"{len(removable):,} of {len(found):,} orphans were removed")
    out.finish_with(len(found) - len(removable), "orphan remains; check it first", "orphans remain; check them first")
