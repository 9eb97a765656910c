"""`bkctl bookies ok-to-stop`."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

from bkctl.columns import TEXTS, Column, Columns, Kind
from bkctl.errors import UsageError
from bkctl.replication.holdings import StopCheck, StopSets

from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, rows_of
from ..kit.options import WatchOption, count_option, flag, word
from ..kit.texts import RED, YELLOW, counted
from .members import bookie_ids, find_racks

app = group()


RISK_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("STATE", "state", lambda row: row.state and row.state.name, spare=2),
    Column(
        "RISK", "risk", "risk",
        style={"lost": RED, "unreadable": RED, "unrecoverable": RED, "unwritable": YELLOW, "under-quorum": YELLOW},
    ),
    Column("FIRST ENTRY", "firstEntryId", "first_entry_id", Kind.INTEGER, spare=1),
    Column("LAST ENTRY", "lastEntryId", "last_entry_id", Kind.INTEGER, spare=1),
    Column("ENTRIES", "entryCount", "entry_count", Kind.INTEGER, spare=1),
    Column("REPLICAS LEFT", "replicasLeft", "replica_count", Kind.INTEGER),
    Column("NEEDED", "replicasNeeded", "replica_count_min", Kind.INTEGER),
    Column("ON", "bookies", lambda row: list(row.bookies), Kind.NESTED, shape=TEXTS, text=", ".join),
    Column("WHAT", "message", "message"),
    key="ledger",
)  # fmt: skip


#: Bookies of a set that may stop together; `given`: the user named it.
TOGETHER_COLUMNS = Columns(
    *fields(Kind.TEXT, bookieId="BOOKIE", rack="RACK"),
    Column("GIVEN", "given", "given", Kind.BOOLEAN),
    key="bookieId",
)


@command(app, "ok-to-stop", connects=True, prints=rows_of(RISK_COLUMNS, TOGETHER_COLUMNS))
def show_stop_risks(
    run: Run,
    watch: WatchOption,
    min_replicas: Annotated[
        int | None,
        count_option("--min-replicas", "Replicas of each entry that must remain (default 1; --for-good: ack quorum)."),
    ],
    bookies: Annotated[list[str] | None, word("BOOKIE", "The bookies; with --max also none.")] = None,
    for_good: Annotated[
        bool, flag("--for-good", "Ask about bookies that would not return, rather than a restart.")
    ] = False,
    largest: Annotated[
        bool, flag("--max", "List the most bookies that may stop together with these, one rack's first.")
    ] = False,
) -> None:
    """Show which ledgers would suffer if bookies stopped now.

    Answers for a restart: every ledger must stay readable and writable. With --for-good also the ack quorum of replicas
    of each entry must remain. Reads the metadata of every scope. The risks: `lost` (no replica of some entries would
    remain), `unrecoverable` (a ledger that is not closed could be neither opened nor recovered: of each write set of
    its last ensemble, write quorum - ack quorum + 1 bookies must answer), `unwritable` (the writer would find no
    replacement), `under-quorum` (fewer replicas than --min-replicas, or than the ledger's ack quorum with --for-good).
    Replicas on bookies that are down, or marked as missing by auto-recovery, do not count. Exit code 3 if there are any
    such ledgers.

    With --max, adds bookies as long as every ledger stays as required and one writable bookie remains: the steps of a
    rolling restart. If the given bookies may not stop, shows the risks.

    $ bkctl bookies ok-to-stop 10.0.0.1:3181
    $ bkctl bookies ok-to-stop 10.0.0.1:3181 --for-good
    $ bkctl bookies ok-to-stop --max -o id
    """
    if largest and watch is not None:
        raise UsageError("--max and --watch are given", hint="give one of them")
    names = bookie_ids(bookies or ()) if bookies or not largest else []
    restarts = not for_good and min_replicas is None
    check = StopCheck(run.cluster, names, replica_count_min=min_replicas, restarts=restarts)
    if largest and _show_together(run, names, 1 if restarts else min_replicas):
        return
    if watch is not None:
        run.out.watch(
            watch, check.problems, RISK_COLUMNS, subscribe=run.cluster.bookies.watch,
            key=attrgetter("ledger", "risk", "first_entry_id"),
        )  # fmt: skip
    with run.job.working("Looking at the ledgers"):
        count = run.out.render(check.problems(), RISK_COLUMNS, findings=True)
    staying = sum(
        each.state == "rw" and each.bookie_id not in names for each in run.cluster.bookies.list(include_down=False)
    )
    who = names[0] if len(names) == 1 else f"These {len(names)} bookies"
    if not count:
        left, how = counted(staying, "writable bookie", "writable bookies"), "restart" if restarts else "stop"
        run.out.note(f"{who} may {how}; {left} would remain, and ledgers with larger ensembles could not be created")
    if check.under_quorum:
        run.out.note(
            f"Not for good: {counted(len(check.under_quorum), 'ledger', 'ledgers')} would have fewer replicas than the "
            "ack quorum; --for-good lists them, and 'bkctl bookies drain' copies them first"
        )
    run.out.finish_with(count, f"finding: {who} may not stop now", f"findings: {who} may not stop now")


def _show_together(run: Run, names: list[str], replica_count_min: int | None) -> bool:
    """Print the largest set with `names` in it that may stop; False if they may not, which needs their risks.

    Raises FindingsError if no name is given, and no bookie may stop.
    """
    bookies = run.cluster.bookies.list()
    racks = find_racks(run, bookies)
    with run.job.working("Looking at the ledgers"):
        found = StopSets(run.cluster, replica_count_min=replica_count_min).largest(names, racks)
    if names and not found:
        return False
    run.out.render(
        [PlainRow(bookie_id=name, rack=racks.get(name), given=name in names) for name in found],
        TOGETHER_COLUMNS,
        findings=True,
    )
    run.out.finish_with(not found, "finding: no bookie may stop now", "")
    left = sum(each.state == "rw" and each.bookie_id not in found for each in bookies)
    run.out.note(
        f"{counted(len(found), 'bookie', 'bookies')} may stop together, and no other one with them; "
        f"{counted(left, 'writable bookie', 'writable bookies')} would remain, and ledgers with larger ensembles could "
        "not be created"
    )
    return True
