"""`bkctl ledger verify` and `bkctl ledger test`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import FindingsError
from bkctl.ids import LedgerId

from ..kit.command import Printer, Run, command, group, object_of, rows_of
from ..kit.ledger_options import LedgerToCreate, ManyLedgers
from ..kit.next_steps import next_column
from ..kit.options import LedgerPassword, LedgerShape, ProtocolOption, ReadPace, count_option, size_option
from ..kit.texts import RED, YELLOW, counted
from .write import create_ledger

if TYPE_CHECKING:
    from bkctl.client.verify import Verification

app = group()


FINDING_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column(None, "entryId", "finding.entry_id", Kind.INTEGER),
    Column(None, "lastEntryId", "finding.last_entry_id", Kind.INTEGER),
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


@command(app, "verify", connects=True, examples=("bkctl ledger verify 12",), prints=rows_of(FINDING_COLUMNS))
def verify(run: Run, ledgers: ManyLedgers, protocol: ProtocolOption, pace: ReadPace) -> None:
    """Read every entry from every replica, and check it.

    Checks presence, ids, digests and the ledger's length at each entry. Prints the findings, one for
    each range of a bookie's entries with one problem; exit code 3 if there are any. Needs no password.
    """
    from bkctl.client.ledger_series import verify_ledgers

    with (
        run.access.cluster() as cluster,
        run.job.working("Verifying", unit="entries", pace=pace) as activity,
        run.out.rows(FINDING_COLUMNS, findings=True) as writer,
    ):
        findings = partial(
            verify_ledgers, ledgers=ledgers, begin=activity.begin, end=partial(_note_verified, run.out),
            progress=activity.update, pace=pace,
        )  # fmt: skip
        run.job.take_each(run.access.bookkeeper(cluster, protocol), findings, writer.row)
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
    count: Annotated[int, count_option("--entries", "Entries to write.", default=1000, old="--count")],
    size: Annotated[int, size_option("--size", "Bytes of an entry.", default="100")],
    password: LedgerPassword,
    protocol: ProtocolOption,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the ledger.")] = False,
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
        run.access.cluster() as cluster,
        run.job.working("Writing and reading", total=count, unit="entries") as activity,
    ):
        create = partial(create_ledger, target=target, shape=shape, password=password, custom_metadata={})
        trial = partial(
            try_ledger, create=create, entry_count=count, entry_size_bytes=size, password=password, keep=keep,
            progress=activity.update, note=run.out.note, report=run.out.error,
        )  # fmt: skip
        run.out.show(run.job.ask(run.access.bookkeeper(cluster, protocol), trial), TRIAL_COLUMNS)
