"""`bkctl ledger locate`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import UsageError

from ..bookies.members import find_placement
from ..kit.columns import fields
from ..kit.command import Run, command, group, rows_of, union
from ..kit.ledger_options import ManyLedgers
from ..kit.options import ProtocolOption, flag, number_option
from ..kit.output import RowWriter
from ..kit.texts import GREEN, RED, YELLOW

if TYPE_CHECKING:
    from bkctl.replication.checker import PlaceRow

    from ..kit.drawing import TreeWriter

app = group()


PLACE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.INTEGER, "place.", firstEntryId="FIRST ENTRY", lastEntryId="LAST ENTRY"),
    Column("INDEX", "index", "place.ensemble_index", Kind.INTEGER),
    Column("BOOKIE", "bookieId", "place.bookie_id"),
    Column("STATE", "state", "place.state", style={"rw": GREEN, "ro": YELLOW, "down": RED}),
    Column("SCOPES", "ledgerScopes", "place.ledger_scopes", Kind.BOOLEAN),
    Column("ENTRIES", "entryCount", "place.entry_count", Kind.INTEGER),
    key="bookieId",
)
ENTRY_PLACE_COLUMNS = Columns(
    PLACE_COLUMNS.columns[0],
    Column("ENTRY", "entryId", "entry_id", Kind.INTEGER),
    Column("POSITION", "position", "place.position", Kind.INTEGER),
    *PLACE_COLUMNS.columns[1:-1],
    key="bookieId",
)
PLACE_RACK_COLUMNS = (
    Column("RACK", "rack", "rack"),
    Column("TOO FEW RACKS", "inTooFewRacks", "in_few_racks", Kind.BOOLEAN),
)
ANSWER_COLUMNS = (
    Column("ANSWER", "answer", "answer", style={"ok": GREEN, "gone": RED, "no-entry": RED, "no-ledger": RED,
                                                "damaged": RED, "timed-out": YELLOW, "unavailable": YELLOW}),
    Column("PROBLEM", "problem", value_at("fault.error.message")),
)  # fmt: skip


def spans_text(spans: list[dict[str, int]]) -> str:
    """Return `3, 5-9 (4)`: ids, and spans with the number of missing entries."""
    texts = [
        f"{span['firstEntryId']}"
        if span["entryCount"] == 1
        else f"{span['firstEntryId']}-{span['lastEntryId']} ({span['entryCount']})"
        for span in spans
    ]
    return ", ".join(texts[:5]) + (f", {len(texts) - 5} more" if len(texts) > 5 else "") if texts else "-"


MISSING_COLUMN = Column("MISSING", "missing", "missing", Kind.NESTED, text=spans_text)
#: The columns with and without --entry, --check and --every-entry.
SHOWN_COLUMNS = union(
    PLACE_COLUMNS, PLACE_COLUMNS.and_also(*ANSWER_COLUMNS, MISSING_COLUMN, *PLACE_RACK_COLUMNS), ENTRY_PLACE_COLUMNS
)


#: The branches of the tree on a terminal: the ledger, its fragments.
LEVELS: Final = (("ledger", "entryId"), ("firstEntryId", "lastEntryId"))


@command(app, "locate", connects=True, prints=rows_of(SHOWN_COLUMNS))
def locate_ledgers(
    run: Run,
    ledgers: ManyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry.")],
    protocol: ProtocolOption,
    check: Annotated[
        bool, flag("--check", "Ask each bookie for the first and last entry that it should have.")
    ] = False,
    every_entry: Annotated[
        bool, flag("--every-entry", "Ask each bookie for every entry, and print the missing ones.")
    ] = False,
) -> None:
    """Show which bookies hold the entries of a ledger.

    Prints one row for each bookie of each fragment, with the number of entries that it should have; on a terminal, a
    tree. A bookie's state is rw, ro or down; SCOPES tells whether it serves ledgers of scopes other than 0. --entry
    prints the write set of one entry, in the order in which readers ask its bookies. Where bookies have racks, TOO FEW
    RACKS marks those with entries whose replicas share one (minNumRacksPerWriteQuorum of --conf, default 2). --check
    asks the bookies. ANSWER is then ok, gone (not registered), no-entry, no-ledger, damaged, timed-out or unavailable;
    exit code 3 unless all are ok.

    $ bkctl ledger locate 12
    $ bkctl ledger locate 12 --entry 0 --check
    """
    from bkctl.replication.checker import checked_places, places_of

    if entry is not None and not 0 <= entry < 1 << 63:
        raise UsageError(f"--entry {entry}: entry ids are 0 or more, below 2^63")
    if every_entry and entry is not None:
        raise UsageError("--every-entry and --entry are given", hint="use --check --entry for one entry")
    columns = PLACE_COLUMNS if entry is None else ENTRY_PLACE_COLUMNS
    asks = check or every_entry
    if asks:
        columns = columns.and_also(*ANSWER_COLUMNS, *((MISSING_COLUMN,) if every_entry else ()))
    findings: Counter[bool] = Counter()
    with run.job.working("Asking the bookies" if asks else "Looking at the ledgers"):
        bookies = run.cluster.bookies.list()
        placement = find_placement(run, bookies)
        columns = columns.and_also(*(PLACE_RACK_COLUMNS if placement.racks else ()))
        with run.out.tree(columns, LEVELS) as writer:
            if asks:
                places = partial(
                    checked_places, ledgers=ledgers, entry_id=entry, every_entry=every_entry, placement=placement
                )
                run.job.take_each(
                    run.access.bookkeeper(run.cluster, protocol), places, partial(_write, writer, findings)
                )
            else:
                writer.rows(places_of(run.cluster, ledgers, bookies, entry, placement))
    run.out.finish_with(findings[True], "replica is not ok", "replicas are not ok")


def _write(writer: RowWriter | TreeWriter, findings: Counter[bool], row: PlaceRow) -> None:
    writer.row(row)
    findings[row.fault is not None] += 1
