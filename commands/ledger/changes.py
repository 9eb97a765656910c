"""`bkctl ledger delete` and `bkctl ledger recover`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.disk import atomic_write
from bkctl.errors import AlreadyExists, BkctlError
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row
from bkctl.pace import Pace

from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import LedgersOrFile, ManyLedgers
from ..kit.options import KeepGoing, flag, pace_option
from ..kit.texts import counted, size_text
from ..kit.values import tap
from .listing import LEDGER_COLUMNS, LEDGER_TABLE_COLUMNS, STATE_STYLE, list_columns, parse_states

if TYPE_CHECKING:
    from bkctl.client.recovery import RecoveryLoss, RecoveryPlan
    from bkctl.metadata.admin.ledger_changes import Removal, RemovalPlan

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


@command(app, "delete", asks=True, undo=True, dry_run=True, prints=rows_of(DELETED_COLUMNS))
def delete(
    run: Run,
    ledgers: LedgersOrFile,
    pace: Annotated[Pace, pace_option("Delete at most N ledgers per second.", has_bytes=False)],
    if_state: Annotated[
        list[str] | None, flag("--if-state STATE", "Delete only ledgers in this state (else exit code 5); repeatable.")
    ] = None,
    ignore_missing: Annotated[bool, flag("--ignore-missing", "Skip ledgers that do not exist.")] = False,
    keep_going: KeepGoing = False,
    backup: Annotated[
        Path | None,
        flag("--backup FILE", "Export the metadata first, to a new file or directory, for 'metadata import'."),
    ] = None,
) -> None:
    """Delete ledgers.

    Deletes the metadata now; the bookies delete the entries when they collect garbage. Unless --keep-going is given,
    nothing is deleted if one of the ledgers is missing or in another state. 'metadata undo' restores the metadata,
    which helps as long as the bookies still have the entries.

    $ bkctl ledger delete 12 --dry-run
    $ bkctl ledger delete 12 13 --if-state CLOSED --yes
    """
    from bkctl.metadata.admin.ledger_changes import plan_removal, remove_ledgers

    states = parse_states(if_state, "--if-state")
    errors: list[BkctlError] = []
    report = partial(_report, run, errors)
    with run.out.rows(DELETED_COLUMNS) as writer:
        with run.job.working("Looking at the ledgers"):
            seen = {"seen": writer.row} if run.dry_run else {}
            plan = plan_removal(run.cluster, ledgers, states=states, keep_missing=ignore_missing, **seen)
        if not keep_going:
            plan.check()
        writer.rows(tap(plan.failures, report))
        if plan.ledgers and not run.dry_run:
            run.consent.confirm(_loss(plan))
            if backup is not None:
                _export(run, plan.ledgers, backup)
            total, left = len(plan.ledgers), "deleted ledgers stay deleted: run the command again for the rest"
            with (
                run.recorded() as recorded,
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


def _export(run: Run, ledgers: list[LedgerId], target: Path) -> None:
    """Export the ledgers' metadata to a new file `target`, or one in that directory; it appears once it is complete."""
    from bkctl.metadata.admin.dump.sources import ClusterSource, write_export

    if target.is_dir():
        target /= f"ledgers-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.ndjson"
    if os.path.lexists(target):
        raise AlreadyExists(f"{target} exists", hint="choose another file for --backup")
    with run.job.working("Exporting"), atomic_write(target, overwrite=False) as stream:
        write_export(ClusterSource(run.cluster, ledgers), stream.write)
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


#: Ledgers that the question names.
_NAMED_MAX: Final = 5


RECOVERY_PLAN_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", "metadata.state.name", style=STATE_STYLE),
    Column("LOSS", "loss", lambda row: row.loss is not None, Kind.BOOLEAN),
    Column("LAST ENTRY", "lastEntryId", value_at("end.last_entry_id"), Kind.INTEGER),
    Column("LAST READABLE", "lastReadableEntryId", value_at("loss.readable_entry_id"), Kind.INTEGER),
    Column("LENGTH", "length", value_at("end.length"), Kind.SIZE),
    Column("CONFIRMED", "lastAddConfirmed", value_at("activity.later"), Kind.INTEGER),
    Column("WRITING", "writing", value_at("activity.is_writing"), Kind.BOOLEAN),
    Column("WHAT", "what", "effect"),
    key="ledger",
)


@command(
    app,
    "recover",
    asks=True,
    undo=True,
    dry_run=True,
    prints=rows_of(LEDGER_COLUMNS, RECOVERY_PLAN_COLUMNS, table=LEDGER_TABLE_COLUMNS),
)
def recover(
    run: Run,
    ledgers: ManyLedgers,
    accept_loss: Annotated[bool, flag("--accept-loss", "Close a ledger even if no bookie has its last entry.")] = False,
) -> None:
    """Close ledgers whose writer died.

    Fences each ledger, finds its last entry and copies that entry to enough bookies. A writer that is still running can
    add no more. Looks at each ledger for up to a second first: says whether a writer is adding entries, and asks on a
    terminal; elsewhere --yes is required. Closed ledgers are left unchanged, without a question.

    If no bookie has a ledger's last entry, the length of the ledger is unknown and the ledger stays IN_RECOVERY. Start
    its bookies and recover it again. If they never return, --accept-loss closes the ledger: it keeps its last entry id,
    but its length is that of the last readable entry, which is too small. The entries behind that one are lost unless
    their bookies return. It does not help if too few
    bookies of the last ensemble answer, because the last entry itself is then unknown.

    --dry-run fences nothing. It shows what a recovery would do, whether a writer is adding entries, and what would be
    given up.

    $ bkctl ledger recover 12
    $ bkctl ledger recover 12 --dry-run
    """
    from bkctl.client.ledger_series import plan_recoveries, recover_ledgers

    looks = partial(plan_recoveries, ledgers=ledgers, with_losses=accept_loss or run.dry_run)
    if run.dry_run:
        with run.job.working("Looking at the ledgers"), run.out.rows(RECOVERY_PLAN_COLUMNS) as writer:
            run.job.take_each(run.access.bookkeeper(run.cluster), looks, writer.row)
        return
    plans: list[RecoveryPlan] = []
    with run.job.working("Looking at the ledgers"):
        run.job.take_each(run.access.bookkeeper(run.cluster), looks, plans.append)
    losses = {plan.ledger: plan.loss for plan in plans if plan.loss is not None}
    opened = [f"Ledger {plan.ledger} is {plan.effect}" for plan in plans if plan.activity is not None]
    if opened:
        run.consent.confirm(_question(opened, losses))
    with (
        run.recorded() as recorded,
        run.job.working("Recovering", left="fenced ledgers stay fenced: run the command again to close them"),
        run.out.rows(list_columns(run)) as writer,
    ):
        recovered = partial(recover_ledgers, ledgers=ledgers, losses=losses)
        run.job.take_each(run.access.bookkeeper(recorded), recovered, lambda row: writer.row(ledger_row(*row)))
    if closed_count := len(plans) - len(opened):
        run.out.note(f"{counted(closed_count, 'ledger was', 'ledgers were')} closed already: unchanged")
    run.out.note(*(f"Given up: {_recovery_loss_text(*each)}" for each in losses.items()))


def _question(opened: list[str], losses: Mapping[LedgerId, RecoveryLoss]) -> str:
    more = [f"{len(opened) - _NAMED_MAX:,} more ledgers would be closed"] if len(opened) > _NAMED_MAX else []
    return "; ".join([*opened[:_NAMED_MAX], *more, *(_recovery_loss_text(*each) for each in losses.items())])


def _recovery_loss_text(ledger: LedgerId, loss: RecoveryLoss) -> str:
    entries = counted(loss.last_entry_id - loss.readable_entry_id, "entry", "entries")
    known = "no entry" if loss.readable_entry_id < 0 else f"entry {loss.readable_entry_id}"
    return (
        f"Ledger {ledger}: {entries} up to its last entry {loss.last_entry_id} cannot be read, and its length stays "
        f"{loss.length:,} bytes for ever (the length at {known}, the last that can be read)"
    )
