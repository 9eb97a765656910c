"""`bkctl ledger recover`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

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
    from bkctl.client.recovery import RecoveryLoss, WriterActivity
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.cluster import Cluster

app = group()


#: Ledgers that are looked at at once, and that the question names.
_LOOKS_AT_ONCE: Final = 64
_NAMED_MAX: Final = 5


class RecoveryPlanRow(NamedTuple):
    """A ledger that a recovery would close, and what it would give up."""

    ledger: LedgerId
    metadata: LedgerMetadata
    loss: RecoveryLoss | None
    activity: WriterActivity | None

    @property
    def effect(self) -> str:
        """The effect of a recovery, in words."""
        if self.activity is None:
            return "closed already: unchanged"
        last, later = self.activity
        known = "without a confirmed entry" if last < 0 else f"confirmed up to entry {last}"
        if self.metadata.state.name != "OPEN":
            return f"IN_RECOVERY, {known}: it would be closed"
        if self.activity.is_writing:
            return f"OPEN, {known} and moments later up to {later}: a writer is adding entries, and would be fenced"
        return f"OPEN, {known}, unchanged for the last second: a writer that still runs would be fenced"

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
        typer.Option("--accept-loss", help="Close a ledger even if no bookie has its last entry."),
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
                run.job.complete(_plan(run, cluster, ledgers, rows, with_losses=True))
            return
        with run.job.working("Looking at the ledgers"):
            plan = run.job.complete(_plan(run, cluster, ledgers, None, with_losses=accept_loss))
        opened = [f"Ledger {row.ledger} is {row.effect}" for row in plan if row.activity is not None]
        losses = {row.ledger: row.loss for row in plan if row.loss is not None}
        if opened:
            more = [f"{len(opened) - _NAMED_MAX:,} more ledgers would be closed"] if len(opened) > _NAMED_MAX else []
            lost = (_recovery_loss_text(*each) for each in losses.items())
            run.consent.confirm("; ".join([*opened[:_NAMED_MAX], *more, *lost]))
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


async def _plan(
    run: Run, cluster: Cluster, ledgers: Iterable[LedgerId], writer: RowWriter | None, *, with_losses: bool
) -> list[RecoveryPlanRow]:
    """Return what a recovery of each ledger would do, and `with_losses` what it would give up; print the rows."""
    from bkctl.tasks import in_order

    rows = []
    async with run.access.bookkeeper(cluster) as bookkeeper:

        async def look(ledger: LedgerId) -> RecoveryPlanRow:
            found, activity = await bookkeeper.watch_writer(ledger)
            loss = (await bookkeeper.find_recovery_loss(ledger))[1] if with_losses else None
            return RecoveryPlanRow(ledger, found.metadata, loss, activity)

        async with aclosing(in_order(ledgers, look, lambda: _LOOKS_AT_ONCE)) as looks:
            async for _, row in looks:
                rows.append(row)
                if writer is not None:
                    writer.row(row)
    return rows


def _recovery_loss_text(ledger: LedgerId, loss: RecoveryLoss) -> str:
    entries = counted(loss.last_entry_id - loss.readable_entry_id, "entry", "entries")
    known = "no entry" if loss.readable_entry_id < 0 else f"entry {loss.readable_entry_id}"
    return (
        f"Ledger {ledger}: {entries} up to its last entry {loss.last_entry_id} cannot be read, and its length stays "
        f"{loss.length:,} bytes for ever (the length at {known}, the last that can be read)"
    )
