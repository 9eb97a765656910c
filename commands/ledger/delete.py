"""`bkctl ledger delete`."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, BkctlError
from bkctl.ids import LedgerId
from bkctl.pace import Pace

from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import LedgersOrFile
from ..kit.options import DryRun, KeepGoing, UndoOption, pace_option
from ..kit.texts import counted, size_text
from ..kit.values import tap
from .columns import STATE_STYLE
from .listing import parse_states

if TYPE_CHECKING:
    from bkctl.metadata.admin.ledger_changes import Removal, RemovalPlan
    from bkctl.metadata.cluster import Cluster

app = group()


DELETED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", value_at("metadata.state.name"), style=STATE_STYLE),
    Column("LENGTH", "length", value_at("metadata.length"), Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", value_at("metadata.last_entry_id"), Kind.INTEGER),
    Column("DELETED", "deleted", "removed", Kind.BOOLEAN),
    Column(None, "error", value_at("error.message"), optional=True),
    key="ledger",
)


@command(
    app,
    "delete",
    connects=True,
    asks=True,
    changes=True,
    prints=rows_of(DELETED_COLUMNS),
    examples=(
        "bkctl ledger delete 12 --dry-run",
        "bkctl ledger delete 12 13 --if-state CLOSED --yes",
    ),
)
def delete(
    run: Run,
    ledgers: LedgersOrFile,
    pace: Annotated[Pace, pace_option("Delete at most N ledgers per second.", has_bytes=False)],
    if_state: Annotated[
        list[str] | None,
        typer.Option(
            "--if-state", metavar="STATE", help="Delete only ledgers in this state (else exit code 5); repeatable."
        ),
    ] = None,
    ignore_missing: Annotated[bool, typer.Option("--ignore-missing", help="Skip ledgers that do not exist.")] = False,
    keep_going: KeepGoing = False,
    backup: Annotated[
        Path | None,
        typer.Option(
            "--backup",
            metavar="FILE",
            help="Export the metadata first, to a new file or directory, for 'metadata import'.",
        ),
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Delete ledgers.

    Deletes the metadata now; the bookies delete the entries when they collect garbage. Unless --keep-going is given,
    nothing is deleted if one of the ledgers is missing or in another state. 'metadata undo' restores the metadata,
    which helps as long as the bookies still have the entries.
    """
    from bkctl.metadata.admin.ledger_changes import plan_removal, remove_ledgers

    states = parse_states(if_state, "--if-state")
    errors: list[BkctlError] = []
    report = partial(_report, run, errors)
    with run.access.cluster() as cluster, run.out.rows(DELETED_COLUMNS) as writer:
        with run.job.working("Looking at the ledgers"):
            seen = {"seen": writer.row} if dry_run else {}
            plan = plan_removal(cluster, ledgers, states=states, keep_missing=ignore_missing, **seen)
        if not keep_going:
            plan.check()
        writer.rows(tap(plan.failures, report))
        if plan.ledgers and not dry_run:
            run.consent.confirm(_loss(plan))
            if backup is not None:
                _export(run, cluster, plan.ledgers, backup)
            total, left = len(plan.ledgers), "deleted ledgers stay deleted: run the command again for the rest"
            with (
                run.consent.recorded(cluster, undo) as recorded,
                run.job.working("Deleting", total=total, unit="ledgers", left=left, pace=pace) as activity,
            ):
                removed = remove_ledgers(
                    recorded, plan.ledgers, states=states, keep_missing=ignore_missing, keep_going=keep_going, pace=pace
                )
                writer.rows(tap(tap(removed, lambda _: activity.advance()), report))
    run.out.finish_with(len(errors), "ledger was not deleted", "ledgers were not deleted")


def _report(run: Run, errors: list[BkctlError], row: Removal) -> None:
    """Report the error of a removal, and keep it."""
    if row.error is not None:
        run.out.error(row.error)
        errors.append(row.error)


def _export(run: Run, cluster: Cluster, ledgers: list[LedgerId], target: Path) -> None:
    """Export the ledgers' metadata to a new file `target`, or one in that directory; it appears once it is complete."""
    from bkctl.disk import atomic_write
    from bkctl.metadata.admin.dump.sources import ClusterSource, write_export

    if target.is_dir():
        target /= f"ledgers-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.ndjson"
    if os.path.lexists(target):
        raise AlreadyExists(f"{target} exists", hint="choose another file for --backup")
    with run.job.working("Exporting"), atomic_write(target, overwrite=False) as stream:
        write_export(ClusterSource(cluster, ledgers), stream.write)
    run.out.note(f"Metadata exported to {target}")


def _loss(plan: RemovalPlan) -> str:
    first = plan.first
    if len(plan.ledgers) == 1:
        metadata = first[0].metadata
        assert metadata is not None
        known = "not closed"
        if metadata.state.name == "CLOSED":
            known = f"{counted(metadata.last_entry_id + 1, 'entry', 'entries')}, {size_text(metadata.length)}"
        return f"Ledger {first[0].ledger} ({metadata.state.name}, {known}) would be lost"
    names = ", ".join(str(row.ledger) for row in first)
    more = ", …" if len(plan.ledgers) > len(first) else ""
    return (
        f"{len(plan.ledgers):,} ledgers ({plan.closed_count:,} closed, with {size_text(plan.size_bytes)}) "
        f"would be lost: {names}{more}"
    )
