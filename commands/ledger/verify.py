"""`bkctl ledger verify` and `bkctl ledger test`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import FindingsError
from bkctl.ids import LedgerId

from ..kit.access import Access
from ..kit.command import command, group
from ..kit.documents import object_of, rows_of
from ..kit.job import LongWork
from ..kit.ledger_options import LedgerToCreate, ManyLedgers
from ..kit.next_steps import next_column
from ..kit.options import (
    LedgerPassword,
    LedgerShape,
    ProtocolOption,
    ReadPace,
    count_option,
    size_option,
)
from ..kit.output import RowWriter
from ..kit.printer import Printer
from ..kit.texts import RED, YELLOW, counted
from .write import create_ledger

if TYPE_CHECKING:
    from bkctl.client.trials import RoundTrip
    from bkctl.client.verify import ReplicaFinding

app = group()


class FindingRow(NamedTuple):
    """One finding of `ledger verify`."""

    ledger: LedgerId
    finding: ReplicaFinding


FINDING_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("ENTRY", "entryId", "finding.entry_id", Kind.INTEGER),
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
def verify(
    out: Printer, access: Access, job: LongWork, ledgers: ManyLedgers, protocol: ProtocolOption, pace: ReadPace
) -> None:
    """Read every entry from every replica, and check it.

    Checks presence, ids, digests and the ledger's length at each entry. Prints the findings; exit code 3 if there are
    any. Needs no password.
    """
    from bkctl.client.verify import Verification

    async def work(writer: RowWriter) -> int:
        findings = 0
        async with access.bookkeeper(cluster, protocol) as bookkeeper:
            for ledger in ledgers:
                handle = await bookkeeper.open_ledger(ledger.ledger_id, ledger_scope_id=ledger.scope_id, password=None)
                async with handle:
                    activity.begin(f"Verifying ledger {ledger}", handle.last_add_confirmed + 1)
                    verification = Verification(handle, activity.update, pace=pace)
                    async for finding in verification.findings():
                        writer.row(FindingRow(ledger, finding))
                findings += verification.finding_count
                found = counted(verification.finding_count, "finding", "findings")
                out.note(
                    f"Ledger {ledger} {f'has {found}' if verification.finding_count else 'is sound'}: "
                    f"{counted(verification.entry_count, 'entry', 'entries')}, "
                    f"{counted(verification.replica_count, 'replica', 'replicas')} read"
                )
        return findings

    with (
        access.cluster() as cluster,
        job.working("Verifying", unit="entries", pace=pace) as activity,
        out.rows(FINDING_COLUMNS, findings=True) as rows,
    ):
        findings = job.complete(work(rows))
    if findings:
        where = counted(len(ledgers), "ledger", "ledgers")
        raise FindingsError(f"{counted(findings, 'finding', 'findings')} in {where}")


_ms = "{:,} ms".format


class TrialRow(NamedTuple):
    """The row that `ledger test` prints."""

    ledger: LedgerId
    result: RoundTrip
    deleted: bool


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


@command(
    app,
    "test",
    connects=True,
    changes=True,
    prints=object_of(TRIAL_COLUMNS),
    examples=(
        "bkctl ledger test",
        "bkctl ledger test --entries 10000 --size 1KiB",
    ),
)
def try_out(
    out: Printer,
    access: Access,
    job: LongWork,
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
    """
    from bkctl.client.streams import check_entry_size
    from bkctl.client.trials import round_trip, temporary

    check_entry_size(size, "--size")

    async def work() -> TrialRow:
        async with access.bookkeeper(cluster, protocol) as bookkeeper:
            handle = await create_ledger(bookkeeper, target, shape, password, {})
            ledger = handle.ledger
            out.note(f"Ledger {ledger}")
            deletion = temporary(bookkeeper, ledger, out.error)
            async with nullcontext() if keep else deletion, handle:
                result = await round_trip(
                    bookkeeper, handle, entry_count=count, entry_size_bytes=size, password=password,
                    progress=activity.update,
                )  # fmt: skip
            return TrialRow(ledger, result, not keep)

    with (
        access.cluster() as cluster,
        job.working("Writing and reading", total=count, unit="entries") as activity,
    ):
        row = job.complete(work())
        out.show(row, TRIAL_COLUMNS)
