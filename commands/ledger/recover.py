"""`bkctl ledger recover`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row

from ..kit.command import Run, command, group
from ..kit.documents import rows_of
from ..kit.ledger_options import ManyLedgers
from ..kit.options import DryRun, UndoOption
from ..kit.output import RowWriter
from ..kit.texts import counted
from .columns import LEDGER_COLUMNS, LEDGER_TABLE_COLUMNS, STATE_STYLE, list_columns

if TYPE_CHECKING:
    from bkctl.client.recovery import RecoveryLoss
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.cluster import Cluster

app = group()


class RecoveryPlanRow(NamedTuple):
    """A ledger that a recovery would close, and what it would give up."""

    ledger: LedgerId
    metadata: LedgerMetadata
    loss: RecoveryLoss | None

    @property
    def end(self) -> RecoveryLoss | LedgerMetadata | None:
        """The last entry and length: of the metadata if the ledger is closed, else of the loss, None without one."""
        return self.metadata if self.metadata.is_closed else self.loss


RECOVERY_PLAN_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", "metadata.state.name", style=STATE_STYLE),
    Column("LOSS", "loss", lambda row: row.loss is not None, Kind.BOOLEAN),
    Column("LAST ENTRY", "lastEntryId", value_at("end.last_entry_id"), Kind.INTEGER),
    Column("LAST READABLE", "lastReadableEntryId", value_at("loss.readable_entry_id"), Kind.INTEGER),
    Column("LENGTH", "length", value_at("end.length"), Kind.SIZE),
    key="ledger",
)


@command(
    app,
    "recover",
    connects=True,
    asks=True,
    changes=True,
    prints=rows_of(LEDGER_COLUMNS, RECOVERY_PLAN_COLUMNS, table=LEDGER_TABLE_COLUMNS),
    examples=(
        "bkctl ledger recover 12",
        "bkctl ledger recover 12 --dry-run",
    ),
)
def recover(
    run: Run,
    ledgers: ManyLedgers,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Close a ledger even if no bookie has its last entry; asks first."),
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Close ledgers whose writer died.

    Fences each ledger, finds its last entry and copies that entry to enough bookies. A writer that is still running can
    add no more. Closed ledgers are left unchanged.

    If no bookie has a ledger's last entry, the length of the ledger is unknown and the ledger stays IN_RECOVERY. Start
    its bookies and recover it again. If they never return, --accept-loss closes the ledger: it keeps its last entry id,
    but its length is that of the last readable entry, which is too small. The entries behind that one are lost unless
    their bookies return. --accept-loss asks on a terminal and requires --yes elsewhere. It does not help if too few
    bookies of the last ensemble answer, because the last entry itself is then unknown.

    --dry-run fences nothing and shows what would be given up.
    """
    losses: dict[LedgerId, RecoveryLoss] = {}
    closed_already: list[LedgerId] = []

    async def close(writer: RowWriter) -> None:
        """Recover and close the ledgers, each with the loss that the operator accepted, and print them."""
        from asyncio import to_thread

        async with run.access.bookkeeper(recorded) as bookkeeper:
            for ledger in ledgers:
                scope_id, ledger_id = ledger
                if (await to_thread(recorded.ledgers.read, ledger)).metadata.is_closed:
                    closed_already.append(ledger)
                handle = await bookkeeper.open_ledger(
                    ledger_id, ledger_scope_id=scope_id, password=None, recovery=True, accept_loss=losses.get(ledger)
                )
                await handle.close()
                writer.row(ledger_row(ledger, await to_thread(recorded.ledgers.read, ledger)))

    with run.access.cluster() as cluster:
        if dry_run:
            with run.job.working("Looking at the ledgers"), run.out.rows(RECOVERY_PLAN_COLUMNS) as rows:
                run.job.complete(_find_losses(run, cluster, ledgers, rows))
            return
        if accept_loss:
            with run.job.working("Looking at the ledgers"):
                losses = run.job.complete(_find_losses(run, cluster, ledgers, None))
            if losses:
                run.consent.confirm("; ".join(_recovery_loss_text(*each) for each in losses.items()))
        with (
            run.consent.recorded(cluster, undo) as recorded,
            run.job.working("Recovering", left="fenced ledgers stay fenced: run the command again to close them"),
            run.out.rows(list_columns(run)) as rows,
        ):
            run.job.complete(close(rows))
        if closed_already:
            run.out.note(f"{counted(len(closed_already), 'ledger was', 'ledgers were')} closed already: unchanged")
        for ledger, loss in losses.items():
            run.out.note(f"Given up: {_recovery_loss_text(ledger, loss)}")


async def _find_losses(
    run: Run, cluster: Cluster, ledgers: Iterable[LedgerId], writer: RowWriter | None
) -> dict[LedgerId, RecoveryLoss]:
    """Return what a recovery of each ledger would give up, without ledgers that lose nothing; print a row for each."""
    losses: dict[LedgerId, RecoveryLoss] = {}
    async with run.access.bookkeeper(cluster) as bookkeeper:
        for ledger in ledgers:
            found, loss = await bookkeeper.find_recovery_loss(ledger)
            if loss is not None:
                losses[ledger] = loss
            if writer is not None:
                writer.row(RecoveryPlanRow(ledger, found.metadata, loss))
    return losses


def _recovery_loss_text(ledger: LedgerId, loss: RecoveryLoss) -> str:
    entries = counted(loss.last_entry_id - loss.readable_entry_id, "entry", "entries")
    known = "no entry" if loss.readable_entry_id < 0 else f"entry {loss.readable_entry_id}"
    return (
        f"Ledger {ledger}: {entries} up to its last entry {loss.last_entry_id} cannot be read, and its length stays "
        f"{loss.length:,} bytes for ever (the length at {known}, the last that can be read)"
    )
