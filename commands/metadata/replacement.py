"""`bkctl metadata replace-bookie`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import Conflict, NotFound, UsageError
from bkctl.pace import Pace

from ..kit.command import Access, Consent, LongWork, Printer, command, group, rows_of
from ..kit.options import DryRun, UndoOption, count_option, pace_option
from ..kit.values import tap

app = group()


REPLACEMENT_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
    Column("PROBLEM", "problem", "problem"),
    key="ledger",
)


@command(
    app,
    "replace-bookie",
    connects=True,
    changes=True,
    asks=True,
    prints=rows_of(REPLACEMENT_COLUMNS),
    examples=("bkctl metadata replace-bookie --from b1:3181 --to b2:3181 --dry-run",),
)
def replace_bookie_id(
    out: Printer,
    access: Access,
    consent: Consent,
    job: LongWork,
    limit: Annotated[int | None, count_option("--limit", "Change at most N ledgers.")],
    pace: Annotated[Pace, pace_option("Change at most N ledgers per second.", has_bytes=False)],
    old: Annotated[str | None, typer.Option("--from", metavar="BOOKIE", help="The bookie id to replace.")] = None,
    new: Annotated[str | None, typer.Option("--to", metavar="BOOKIE", help="The new bookie id.")] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Replace a bookie id in the metadata of every ledger.

    For a bookie that returns under another id with all its data; entries are not moved. Covers every scope. Refused
    while the old id is registered, or if the new id does not exist. Exit code 3 if ledgers keep the old id.
    """
    from bkctl.ids import check_bookie_id
    from bkctl.metadata.admin.ledger_changes import replace_bookie

    if old is None or new is None:
        raise UsageError("--from BOOKIE and --to BOOKIE are required")
    if check_bookie_id(old) == check_bookie_id(new):
        raise UsageError("--from and --to are the same bookie")
    kept = Counter[bool]()
    with access.cluster() as cluster:
        registered = cluster.bookies.get(old)
        if registered is not None and registered.state != "down":
            raise Conflict(f"Bookie {old} is registered: its clients still write to it", hint="stop it first")
        if cluster.bookies.get(new) is None:
            raise NotFound(f"No bookie {new} in {cluster.store.name}", hint="'bkctl bookies list' shows them")
        if not dry_run:
            consent.confirm(f"{old} would become {new} in the metadata of all ledgers of {cluster.uri}")
        with (
            consent.recorded(cluster, undo) as recorded,
            job.working(
                "Replacing",
                unit="ledgers",
                pace=pace,
                left="changed ledgers stay changed: run the command again to continue",
            ) as activity,
            out.rows(REPLACEMENT_COLUMNS) as writer,
        ):
            replaced = replace_bookie(
                recorded, old, new, pace=pace, limit=limit, dry_run=dry_run, progress=activity.update
            )
            writer.rows(tap(replaced, lambda row: kept.update((row.problem is not None,))))
        if registered is None and not kept:
            raise NotFound(f"No bookie {old}, and no ledger names it", hint="'bkctl bookies list' shows them")
    out.note(f"{kept[False]:,} ledgers {'would be' if dry_run else 'were'} changed")
    out.finish_with(kept[True], "ledger was left unchanged", "ledgers were left unchanged")
