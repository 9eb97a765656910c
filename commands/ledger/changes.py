"""`bkctl ledger delete`, `recover`, `verify`, `test` and `copy`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, BkctlError, FindingsError, UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import ledger_row
from bkctl.pace import Pace

from ..kit.access import Login
from ..kit.columns import fields
from ..kit.command import Printer, Run, command, group, object_of, rows_of
from ..kit.ledger_options import LedgersOrFile, LedgerToCreate, ManyLedgers, scope_option
from ..kit.next_steps import next_column
from ..kit.options import (
    CopyPace,
    KeepGoing,
    LedgerPassword,
    LedgerShape,
    ProtocolOption,
    ReadPace,
    count_option,
    digest_type_option,
    flag,
    number_option,
    pace_option,
    size_option,
)
from ..kit.output import RowWriter
from ..kit.texts import RED, YELLOW, counted, size_text
from ..kit.values import tap
from .entries import create_ledger
from .listing import LEDGER_COLUMNS, LEDGER_TABLE_COLUMNS, STATE_STYLE, list_columns, parse_states

if TYPE_CHECKING:
    from bkctl.client.recovery import RecoveryLoss, RecoveryPlan
    from bkctl.client.verify import Verification
    from bkctl.metadata.admin.ledger_changes import Removal, RemovalPlan
    from bkctl.replication.copy import CopiedLedger, CopyFailure

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
            with run.job.working("Deleting", total=total, unit="ledgers", left=left, pace=pace) as activity:
                removed = remove_ledgers(
                    run.recorded,
                    plan.ledgers,
                    states=states,
                    keep_missing=ignore_missing,
                    keep_going=keep_going,
                    pace=pace,
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
    from bkctl.disk import atomic_write
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
            known = f"{counted(metadata.last_entry_id + 1, 'entry')}, {size_text(metadata.length)}"
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

_RECOVERED: Final = rows_of(LEDGER_COLUMNS, RECOVERY_PLAN_COLUMNS, table=LEDGER_TABLE_COLUMNS)


@command(app, "recover", asks=True, undo=True, dry_run=True, prints=_RECOVERED)
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
        run.job.working("Recovering", left="fenced ledgers stay fenced: run the command again to close them"),
        run.out.rows(list_columns(run)) as writer,
    ):
        recovered = partial(recover_ledgers, ledgers=ledgers, losses=losses)
        run.job.take_each(run.access.bookkeeper(run.recorded), recovered, lambda row: writer.row(ledger_row(*row)))
    if closed_count := len(plans) - len(opened):
        run.out.note(f"{counted(closed_count, 'ledger was', 'ledgers were')} closed already: unchanged")
    run.out.note(*(f"Given up: {_recovery_loss_text(*each)}" for each in losses.items()))


def _question(opened: list[str], losses: Mapping[LedgerId, RecoveryLoss]) -> str:
    more = [f"{len(opened) - _NAMED_MAX:,} more ledgers would be closed"] if len(opened) > _NAMED_MAX else []
    return "; ".join([*opened[:_NAMED_MAX], *more, *(_recovery_loss_text(*each) for each in losses.items())])


def _recovery_loss_text(ledger: LedgerId, loss: RecoveryLoss) -> str:
    entries = counted(loss.last_entry_id - loss.readable_entry_id, "entry")
    known = "no entry" if loss.readable_entry_id < 0 else f"entry {loss.readable_entry_id}"
    return (
        f"Ledger {ledger}: {entries} up to its last entry {loss.last_entry_id} cannot be read, and its length stays "
        f"{loss.length:,} bytes for ever (the length at {known}, the last that can be read)"
    )


FINDING_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.INTEGER, "finding.", entryId=None, lastEntryId=None),
    Column("ENTRIES", "entries", "finding.entries"),
    Column(None, "entryCount", "finding.entry_count", Kind.INTEGER),
    Column("BOOKIE", "bookieId", "finding.bookie_id"),
    Column(
        "PROBLEM",
        "problem",
        "finding.problem",
        style={"damaged": RED, "missing": RED, "different": RED, "unavailable": YELLOW},
    ),
    Column("MESSAGE", "message", "finding.message"),
    next_column(
        "ledger verify",
        lambda row: row.finding.problem,
        ledger=lambda row: row.ledger,
        bookie=lambda row: row.finding.bookie_id,
    ),
    key="entryId",
)


@command(app, "verify", connects=True, prints=rows_of(FINDING_COLUMNS))
def verify(run: Run, ledgers: ManyLedgers, protocol: ProtocolOption, pace: ReadPace) -> None:
    """Read every entry from every replica, and check it.

    Checks presence, ids, digests and the ledger's length at each entry. Prints the findings, one for
    each range of a bookie's entries with one problem; exit code 3 if there are any. Needs no password.

    $ bkctl ledger verify 12
    """
    from bkctl.client.ledger_series import verify_ledgers

    with (
        run.job.working("Verifying", unit="entries", pace=pace) as activity,
        run.out.rows(FINDING_COLUMNS, findings=True) as writer,
    ):
        findings = partial(
            verify_ledgers, ledgers=ledgers, begin=activity.begin, end=partial(_note_verified, run.out),
            progress=activity.update, pace=pace,
        )  # fmt: skip
        run.job.take_each(run.access.bookkeeper(run.cluster, protocol), findings, writer.row)
    if writer.count:
        where = counted(len(ledgers), "ledger")
        raise FindingsError(f"{counted(writer.count, 'finding')} in {where}")


def _note_verified(out: Printer, ledger: LedgerId, done: Verification) -> None:
    found = counted(done.finding_count, "finding")
    out.note(
        f"Ledger {ledger} {f'has {found}' if done.finding_count else 'is sound'}: "
        f"{counted(done.entry_count, 'entry')}, {counted(done.replica_count, 'replica')} read"
    )


_ms = "{:,} ms".format

TRIAL_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRIES", "entryCount", "result.entry_count", Kind.INTEGER),
    Column("ENTRY SIZE", "entrySize", "result.entry_size_bytes", Kind.SIZE),
    Column("LAST ENTRY", "lastEntryId", "result.last_entry_id", Kind.INTEGER),
    Column("WRITTEN IN", "writeMilliseconds", lambda row: round(row.result.write_s * 1000), Kind.INTEGER, text=_ms),
    Column("READ IN", "readMilliseconds", lambda row: round(row.result.read_s * 1000), Kind.INTEGER, text=_ms),
    Column("DELETED", "deleted", "deleted", Kind.BOOLEAN),
    key="ledger",
)


@command(app, "test", connects=True, changes=True, prints=object_of(TRIAL_COLUMNS))
def try_out(
    run: Run,
    target: LedgerToCreate,
    shape: LedgerShape,
    count: Annotated[int, count_option("--entries", "Entries to write.", "--count", default=1000)],
    size: Annotated[int, size_option("--size", "Bytes of an entry.", default="100")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    keep: Annotated[bool, flag("--keep", "Keep the ledger.")] = False,
) -> None:
    """Test the cluster with a temporary ledger.

    Creates a ledger, writes random entries, reads them before and after closing, and deletes the ledger, also after a
    failure or Ctrl-C.

    $ bkctl ledger test
    $ bkctl ledger test --entries 10000 --size 1KiB
    """
    from bkctl.client.streams import check_entry_size
    from bkctl.client.trials import try_ledger

    check_entry_size(size, "--size")

    with run.job.working("Writing and reading", total=count, unit="entries") as activity:
        create = partial(create_ledger, target=target, shape=shape, password=password, custom_metadata={})
        trial = partial(
            try_ledger, create=create, entry_count=count, entry_size_bytes=size, password=password, keep=keep,
            progress=activity.update, note=run.out.note, report=run.out.error,
        )  # fmt: skip
        run.out.show(run.job.ask(run.access.bookkeeper(run.cluster, protocol), trial), TRIAL_COLUMNS)


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


@command(app, "copy", undo=True, prints=rows_of(COPY_COLUMNS))
def copy(
    run: Run,
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
    login: Login,
    to_scope_id: Annotated[int | None, scope_option("Ledger scope id of the copy (default: unchanged).", "--to-scope")],
    to: Annotated[
        str | None, flag("--to URI", "The cluster of the copy, by metadata URI or context:NAME (default: this one).")
    ] = None,
    new_id: Annotated[bool, flag("--new-id", "Generate a ledger id for the copy.")] = False,
    recover: Annotated[bool, flag("--recover", "Close an open ledger first; its writer can add no more.")] = False,
    open_ledgers: Annotated[bool, flag("--open", "Copy an open ledger, too, up to its last confirmed entry.")] = False,
    keep_going: KeepGoing = False,
) -> None:
    """Copy ledgers to another scope, id or cluster.

    Prints the copies, which are closed. A copy has the password, custom metadata, sizes and digest type of its source,
    and is read back before it counts. An interrupted copy is removed; if that fails, a note names it, and the next run
    without --new-id removes it. Needs no password. The source stays; with --recover an undo file keeps its metadata.

    $ bkctl ledger copy 12 --to-scope 7
    $ bkctl ledger copy 12 --to context:backup --new-id
    """
    from bkctl.replication.copy import CopyShape, copy_ledgers

    if to_ledger_id is not None:
        if len(ledgers) > 1:
            raise UsageError(
                f"--to-ledger-id names one copy, but {len(ledgers)} ledgers are given", hint="use --new-id"
            )
        if to_ledger_id < 0:
            raise UsageError(f"--to-ledger-id {to_ledger_id}: must be 0 or more")
    source = run.recorded if recover else run.cluster
    target = source if to is None else run.opened.enter_context(run.access.open_other_cluster(to, login=login))
    left = "printed copies stay: run the command again for the other ledgers"
    with (
        run.job.working("Copying and reading back", unit="entries", pace=pace, left=left) as activity,
        run.out.rows(COPY_COLUMNS) as writer,
    ):
        copies = partial(
            copy_ledgers, target=run.access.bookkeeper(target), ledgers=ledgers, keep_going=keep_going,
            ledger_scope_id=to_scope_id, ledger_id=to_ledger_id, new_id=new_id,
            shape=CopyShape(ensemble_size, write_quorum, ack_quorum, digest_type), recovery=recover,
            allow_open=open_ledgers, pace=pace, progress=activity.advance, note=run.out.note,
        )  # fmt: skip
        run.job.take_each(run.access.bookkeeper(source), copies, partial(_show, run.out, writer))
    run.out.finish_with(len(ledgers) - writer.count, "ledger was not copied", "ledgers were not copied")


def _show(out: Printer, writer: RowWriter, row: CopiedLedger | CopyFailure) -> None:
    from bkctl.replication.copy import CopyFailure

    if isinstance(row, CopyFailure):
        out.error(f"Ledger {row.ledger} was not copied: {row.error}")
        return
    if row.source_open:
        out.note(f"Ledger {row.ledger} is open: its copy ends at entry {row.entry_count - 1}")
    writer.row(row)
