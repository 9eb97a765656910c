"""`bkctl ledger recover`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row

from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ManyLedgers
from ..kit.options import DryRun, UndoOption
from ..kit.texts import counted
from .columns import LEDGER_COLUMNS, LEDGER_TABLE_COLUMNS, STATE_STYLE, list_columns

if TYPE_CHECKING:
    from bkctl.client.recovery import RecoveryLoss, RecoveryPlan

app = group()


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
    connects=True,
    asks=True,
    changes=True,
    prints=rows_of(LEDGER_COLUMNS, RECOVERY_PLAN_COLUMNS, table=LEDGER_TABLE_COLUMNS),
)
def recover(
    run: Run,
    ledgers: ManyLedgers,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Close a ledger even if no bookie has its last entry.")
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
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

    with run.access.cluster() as cluster:
        looks = partial(plan_recoveries, ledgers=ledgers, with_losses=accept_loss or dry_run)
        if dry_run:
            with run.job.working("Looking at the ledgers"), run.out.rows(RECOVERY_PLAN_COLUMNS) as writer:
                run.job.take_each(run.access.bookkeeper(cluster), looks, writer.row)
            return
        plans: list[RecoveryPlan] = []
        with run.job.working("Looking at the ledgers"):
            run.job.take_each(run.access.bookkeeper(cluster), looks, plans.append)
        losses = {plan.ledger: plan.loss for plan in plans if plan.loss is not None}
        opened = [f"Ledger {plan.ledger} is {plan.effect}" for plan in plans if plan.activity is not None]
        if opened:
            run.consent.confirm(_question(opened, losses))
        with (
            run.consent.recorded(cluster, undo) as recorded,
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
