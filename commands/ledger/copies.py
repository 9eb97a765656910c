"""`bkctl ledger verify`, `bkctl ledger test` and `bkctl ledger copy`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import FindingsError, UsageError
from bkctl.ids import LedgerId

from ..kit.access import LoginOfTarget
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
    size_option,
)
from ..kit.output import RowWriter
from ..kit.texts import RED, YELLOW, counted
from .write import create_ledger

if TYPE_CHECKING:
    from bkctl.client.verify import Verification
    from bkctl.replication.copy import CopiedLedger, CopyFailure

app = group()

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
        where = counted(len(ledgers), "ledger", "ledgers")
        raise FindingsError(f"{counted(writer.count, 'finding', 'findings')} in {where}")


def _note_verified(out: Printer, ledger: LedgerId, done: Verification) -> None:
    found = counted(done.finding_count, "finding", "findings")
    out.note(
        f"Ledger {ledger} {f'has {found}' if done.finding_count else 'is sound'}: "
        f"{counted(done.entry_count, 'entry', 'entries')}, {counted(done.replica_count, 'replica', 'replicas')} read"
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

    with (
        run.job.working("Writing and reading", total=count, unit="entries") as activity,
    ):
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
    login: LoginOfTarget,
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
    with ExitStack() as stack:
        connected = stack.enter_context(run.access.cluster())
        source = stack.enter_context(run.consent.recorded(connected, run.undo)) if recover else connected
        target = source if to is None else stack.enter_context(run.access.open_other_cluster(to, login=login))
        activity = stack.enter_context(
            run.job.working(
                "Copying and reading back",
                unit="entries",
                pace=pace,
                left="printed copies stay: run the command again for the other ledgers",
            )
        )
        writer = stack.enter_context(run.out.rows(COPY_COLUMNS))
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
