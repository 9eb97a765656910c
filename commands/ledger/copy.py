"""`bkctl ledger copy`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from ..kit.access import LoginOfTarget
from ..kit.command import Access, Consent, LongWork, Printer, command, group, rows_of
from ..kit.ledger_options import LedgersOrFile, scope_option
from ..kit.options import CopyPace, KeepGoing, UndoOption, count_option, digest_type_option, number_option
from ..kit.output import RowWriter

if TYPE_CHECKING:
    from bkctl.replication.copy import CopiedLedger, CopyFailure

app = group()


def _copy_text(copy: dict[str, str]) -> str:
    return copy["ledgerId"] if copy["ledgerScopeId"] == "0" else copy["ledgerQualifiedName"]


COPY_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("COPY", "copy", lambda row: row.copy.to_json(), Kind.NESTED, text=_copy_text),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER),
    Column("LENGTH", "length", "length", Kind.SIZE),
    Column("SOURCE OPEN", "sourceOpen", "source_open", Kind.BOOLEAN),
    key=Column("COPY", "copy", lambda row: str(row.copy)),
)


@command(
    app,
    "copy",
    connects=True,
    changes=True,
    prints=rows_of(COPY_COLUMNS),
    examples=(
        "bkctl ledger copy 12 --to-scope 7",
        "bkctl ledger copy 12 --to context:backup --new-id",
    ),
)
def copy(
    out: Printer,
    access: Access,
    consent: Consent,
    job: LongWork,
    ledgers: LedgersOrFile,
    to_ledger_id: Annotated[int | None, number_option("--to-ledger-id", "Ledger id of the copy (default: unchanged).")],
    ensemble_size: Annotated[
        int | None, count_option("--ensemble-size", "Ensemble size of the copy (default: unchanged).")
    ],
    write_quorum: Annotated[
        int | None, count_option("--write-quorum", "Write quorum of the copy (default: unchanged).")
    ],
    ack_quorum: Annotated[int | None, count_option("--ack-quorum", "Ack quorum of the copy (default: unchanged).")],
    digest_type: Annotated[
        Any, digest_type_option("Digest type of the copy: CRC32C, CRC32, HMAC or DUMMY (default: unchanged).")
    ],
    pace: CopyPace,
    login: LoginOfTarget,
    to_scope_id: Annotated[int | None, scope_option("Ledger scope id of the copy (default: unchanged).", "--to-scope")],
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="URI", help="The cluster of the copy, by metadata URI or context:NAME (default: this one)."
        ),
    ] = None,
    new_id: Annotated[bool, typer.Option("--new-id", help="Generate a ledger id for the copy.")] = False,
    recover: Annotated[
        bool, typer.Option("--recover", help="Close an open ledger first; its writer can add no more.")
    ] = False,
    open_ledgers: Annotated[
        bool, typer.Option("--open", help="Copy an open ledger, too, up to its last confirmed entry.")
    ] = False,
    keep_going: KeepGoing = False,
    undo: UndoOption = None,
) -> None:
    """Copy ledgers to another scope, id or cluster.

    Prints the copies, which are closed. A copy has the password, custom metadata, sizes and digest type of its source,
    and is read back before it counts. An interrupted copy is removed; if that fails, a note names it, and the next run
    without --new-id removes it. Needs no password. The source stays; with --recover an undo file keeps its metadata.
    """
    from bkctl.replication.copy import CopyShape, copy_ledgers

    if to_ledger_id is not None:
        if len(ledgers) > 1:
            raise UsageError(
                f"--to-ledger-id names one copy, but {len(ledgers)} ledgers are given", hint="use --new-id"
            )
        if to_ledger_id < 0:
            raise UsageError(f"--to-ledger-id {to_ledger_id}: must be 0 or more")
    with ExitStack() as stack:
        connected = stack.enter_context(access.cluster())
        source = stack.enter_context(consent.recorded(connected, undo)) if recover else connected
        target = source if to is None else stack.enter_context(access.open_other_cluster(to, login=login))
        activity = stack.enter_context(
            job.working(
                "Copying and reading back",
                unit="entries",
                pace=pace,
                left="printed copies stay: run the command again for the other ledgers",
            )
        )
        writer = stack.enter_context(out.rows(COPY_COLUMNS))
        copies = partial(
            copy_ledgers, target=access.bookkeeper(target), ledgers=ledgers, keep_going=keep_going,
            ledger_scope_id=to_scope_id, ledger_id=to_ledger_id, new_id=new_id,
            shape=CopyShape(ensemble_size, write_quorum, ack_quorum, digest_type), recovery=recover,
            allow_open=open_ledgers, pace=pace, progress=activity.advance, note=out.note,
        )  # fmt: skip
        job.take_each(access.bookkeeper(source), copies, partial(_show, out, writer))
    out.finish_with(len(ledgers) - writer.count, "ledger was not copied", "ledgers were not copied")


def _show(out: Printer, writer: RowWriter, row: CopiedLedger | CopyFailure) -> None:
    from bkctl.replication.copy import CopyFailure

    if isinstance(row, CopyFailure):
        out.error(f"Ledger {row.ledger} was not copied: {row.error}")
        return
    if row.source_open:
        out.note(f"Ledger {row.ledger} is open: its copy ends at entry {row.entry_count - 1}")
    writer.row(row)
