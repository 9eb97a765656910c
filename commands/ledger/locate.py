"""`bkctl ledger locate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, UsageError
from bkctl.ids import LedgerId

from ..kit.command import Run, command, group
from ..kit.documents import rows_of, union
from ..kit.ledger_options import ManyLedgers
from ..kit.options import (
    ProtocolOption,
    number_option,
)
from ..kit.texts import GREEN, RED, YELLOW

if TYPE_CHECKING:
    from bkctl.client.ensemble import ReplicaPlace
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.replication.fragments import ReplicaFault


app = group()


class PlaceRow(NamedTuple):
    """A replica's place and its ledger; `entry_id` is the requested entry, `fault` the finding of a check.

    `rack` is the bookie's, and `in_few_racks` says whether entries on it have too few; None without racks.
    """

    ledger: LedgerId
    entry_id: int | None
    place: ReplicaPlace
    fault: ReplicaFault | None = None
    rack: str | None = None
    in_few_racks: bool | None = None

    @property
    def answer(self) -> str:
        """The result of the bookie's answers, in a word."""
        return "ok" if self.fault is None else self.fault.reason.value

    @property
    def missing(self) -> list[dict[str, int]] | None:
        """The entries that the bookie lacks or has damaged; None if they are not known one by one."""
        if self.fault is None:
            return []
        if self.fault.missing is None:
            return None
        return [
            {"firstEntryId": span.first_entry_id, "lastEntryId": span.last_entry_id, "entryCount": span.entry_count}
            for span in self.fault.missing
        ]


PLACE_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FIRST ENTRY", "firstEntryId", "place.first_entry_id", Kind.INTEGER),
    Column("LAST ENTRY", "lastEntryId", "place.last_entry_id", Kind.INTEGER),
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


class PlacedRacks:
    """The racks of the places that `ledger locate` prints; `columns` is empty where no bookie has one."""

    def __init__(self, run: Run, cluster: Cluster, bookies: list[RegisteredBookie]) -> None:
        from ..bookies.racks import find_placement

        self._placement = find_placement(run, cluster, bookies)
        self.columns = PLACE_RACK_COLUMNS if self._placement.racks else ()

    def placed(self, row: PlaceRow, metadata: LedgerMetadata) -> PlaceRow:
        """Return the row with the rack of its bookie, and True if entries on it have too few racks."""
        from bkctl.client.ensemble import RoundRobinDistributionSchedule

        if not self._placement.racks:
            return row
        place = row.place
        fragment = next(each for each in metadata.ensembles if each.first_entry_id == place.first_entry_id)
        few = [each.write_set for each in self._placement.problems(metadata, fragment.bookies)]
        if row.entry_id is None:
            is_few = any(place.ensemble_index in each for each in few)
        else:
            write_set = RoundRobinDistributionSchedule.of(metadata).write_set(row.entry_id)
            is_few = any(set(each).issuperset(write_set) for each in few)
        return row._replace(rack=self._placement.racks.get(place.bookie_id), in_few_racks=is_few)


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
    PLACE_COLUMNS,
    PLACE_COLUMNS.and_also(*ANSWER_COLUMNS, MISSING_COLUMN, *PLACE_RACK_COLUMNS),
    ENTRY_PLACE_COLUMNS,
)


#: The branches of the tree on a terminal: the ledger, its fragments.
LEVELS: Final = (("ledger", "entryId"), ("firstEntryId", "lastEntryId"))


@command(
    app,
    "locate",
    connects=True,
    prints=rows_of(SHOWN_COLUMNS),
    examples=(
        "bkctl ledger locate 12",
        "bkctl ledger locate 12 --entry 0 --check",
    ),
)
def locate_ledgers(
    run: Run,
    ledgers: ManyLedgers,
    entry: Annotated[int | None, number_option("--entry", "Only this entry.")],
    protocol: ProtocolOption,
    check: Annotated[
        bool, typer.Option("--check", help="Ask each bookie for the first and last entry that it should have.")
    ] = False,
    every_entry: Annotated[
        bool, typer.Option("--every-entry", help="Ask each bookie for every entry, and print the missing ones.")
    ] = False,
) -> None:
    """Show which bookies hold the entries of a ledger.

    Prints one row for each bookie of each fragment, with the number of entries that it should have; on a terminal, a
    tree. A bookie's state is rw, ro or down; SCOPES tells whether it serves ledgers of scopes other than 0. --entry
    prints the write set of one entry, in the order in which readers ask its bookies. Where bookies have racks, TOO FEW
    RACKS marks those with entries whose replicas share one (minNumRacksPerWriteQuorum of --conf, default 2). --check
    asks the bookies. ANSWER is then ok, gone (not registered), no-entry, no-ledger, damaged, timed-out or unavailable;
    exit code 3 unless all are ok.
    """
    from bkctl.client.ensemble import locate

    if entry is not None and not 0 <= entry < 1 << 63:
        raise UsageError(f"--entry {entry}: entry ids are 0 or more, below 2^63")
    if every_entry and entry is not None:
        raise UsageError("--every-entry and --entry are given", hint="use --check --entry for one entry")
    columns = PLACE_COLUMNS if entry is None else ENTRY_PLACE_COLUMNS
    if not (check or every_entry):
        with run.access.cluster() as cluster:
            bookies = cluster.bookies.list()
            racks = PlacedRacks(run, cluster, bookies)
            with run.out.tree(columns.and_also(*racks.columns), LEVELS) as writer:
                for ledger, found in cluster.ledgers.read_many(ledgers):
                    if isinstance(found, BkctlError):
                        raise found
                    writer.rows(
                        racks.placed(PlaceRow(ledger, entry, place), found.metadata)
                        for place in locate(ledger, found.metadata, bookies, entry)
                    )
        return

    async def check_places() -> int:
        """Write the rows; return how many of them are not ok."""
        from asyncio import to_thread

        from bkctl.replication.checker import LedgerChecker

        findings = 0
        async with run.access.bookkeeper(cluster, protocol) as bookkeeper:
            checker = LedgerChecker(bookkeeper)
            for ledger in ledgers:
                bookies = await to_thread(cluster.bookies.list)
                up = {bookie.bookie_id for bookie in bookies if bookie.state != "down"}
                found = await to_thread(cluster.ledgers.read, ledger)
                places = list(locate(ledger, found.metadata, bookies, entry))
                if entry is None:
                    fragments = (await checker.check(ledger, found, every_entry=every_entry, up=up)).fragments
                else:
                    fragments = (await checker.check_entry(ledger, entry, found, up=up),)
                faults = {
                    (each.first_entry_id, fault.ensemble_index): fault for each in fragments for fault in each.faults
                }
                for place in places:
                    row = PlaceRow(ledger, entry, place, faults.get((place.first_entry_id, place.ensemble_index)))
                    findings += row.fault is not None
                    writer.row(racks.placed(row, found.metadata))
        return findings

    columns = columns.and_also(*ANSWER_COLUMNS, *((MISSING_COLUMN,) if every_entry else ()))
    with run.access.cluster() as cluster, run.job.working("Asking the bookies"):
        racks = PlacedRacks(run, cluster, cluster.bookies.list())
        with run.out.tree(columns.and_also(*racks.columns), LEVELS) as writer:
            findings = run.job.complete(check_places())
    run.out.finish_with(findings, "replica is not ok", "replicas are not ok")
