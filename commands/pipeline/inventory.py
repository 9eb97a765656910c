"""`bkctl pipeline inventory`: bytes and entries of all bookies' entry logs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.errors import Corrupt

from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run, command, group
from ..kit.ledger_options import ScanFilter
from ..kit.texts import counted, size_text
from .columns import BOOKIE, BOOKIES, FILE, LEDGER, LEDGERS, LOG, LOGS, SUMS
from .common import (
    LedgersToScan,
    Places,
    SparkOptions,
    by_option,
    check_cluster,
    connection_options,
    read_bookies,
    read_job,
)
from .page import Bar, Section, Tables, bars, table, top_rows
from .results import Sums, raise_problems, write_pages
from .saves import SaveOption, check_saves, frame_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import Bookies

app = group()


class InventoryBy(StrEnum):
    """The words of `inventory --by`, as in bkctl.spark.jobs.inventory, whose import would slow `--help` down."""

    BOOKIE = "bookie"
    ENTRY_LOG = "entrylog"
    SCOPE = "scope"
    LEDGER = "ledger"
    APPLICATION = "application"


INVENTORY_COLUMNS = {
    InventoryBy.BOOKIE: Columns(
        BOOKIE, LOGS, LEDGERS, *SUMS, Column("FILES", "fileSize", "fileSize", Kind.SIZE), key="bookieId"
    ),
    InventoryBy.ENTRY_LOG: Columns(
        BOOKIE, *LOG, LEDGERS, *SUMS, Column("FILE SIZE", "fileSize", "fileSize", Kind.SIZE), FILE, key="file"
    ),
    InventoryBy.SCOPE: Columns(
        Column("SCOPE", "ledgerScopeId", "ledgerScopeId"), LEDGERS, BOOKIES, LOGS, *SUMS, key="ledgerScopeId"
    ),
    InventoryBy.LEDGER: Columns(LEDGER, BOOKIES, LOGS, *SUMS, key="ledger"),
    InventoryBy.APPLICATION: Columns(
        Column("APPLICATION", "application", "application"),
        Column("COMPONENT", "component", "component"),
        Column("MANAGED LEDGER", "managedLedger", "managedLedger", flexible=True),
        LEDGERS,
        *SUMS,
    ),
}


@command(
    app,
    "inventory",
    connects=True,
    examples=(
        "bkctl pipeline inventory",
        "bkctl pipeline inventory --conf bk_server.conf --by scope",
    ),
)
def inventory(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places,
    saves: SaveOption,
    by: Annotated[
        InventoryBy, by_option("A row for each bookie, entrylog, scope, ledger or application.")
    ] = InventoryBy.BOOKIE,
) -> None:
    """Count bytes and entries in all bookies' entry logs.

    --by gives a row for each bookie, log, scope, ledger or application. Every copy of an entry counts, with its size
    field, as in 'entrylog show'. Applications come from ledgers' custom metadata (Pulsar's, as in 'ledger show'), so
    --by application needs the cluster; all others need files only. Exit code 7: a log is damaged; entries before the
    damage are counted.
    """
    check_saves(saves, INVENTORY_COLUMNS[by])
    connection = connection_options(run) if by is InventoryBy.APPLICATION else None
    bookies = read_bookies(run, places)
    if connection is not None:
        check_cluster(run)
    with read_job(run, spark, "inventory", saves, INVENTORY_COLUMNS[by]) as session:
        found = InventoryResult(session, bookies, ledgers, connection)
        sums = Sums()
        frame_rows(run, found.totals(by), INVENTORY_COLUMNS[by], saves, sums.add)
        run.note(f"bkctl: {size_text(sums.of('size'))} in {counted(sums.of('entryCount'), 'entry', 'entries')}")
        write_pages(run, saves, "Inventory", found.sections, bookies)
    raise_problems(run, [Corrupt(row.reason) for row in found.damages])


class InventoryResult:
    """The inventory of some bookies, scanned once for rows and page."""

    def __init__(
        self, session: SparkSession, bookies: Bookies, ledgers: ScanFilter,
        connection: dict[str, str] | None, *, held: DataFrame | None = None,
    ) -> None:  # fmt: skip
        from bkctl.spark.jobs.held_entries import shares_of
        from bkctl.spark.jobs.inventory import damages, shares

        self._session, self._bookies, self._connection = session, bookies, connection
        if held is None:
            found = shares(session, bookies, ledger=ledgers.ledger, scope_id=ledgers.scope_id)
        else:
            found = shares_of(held)
        self._shares = found.persist()
        self.damages = damages(self._shares).collect()

    def totals(self, by: InventoryBy) -> DataFrame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.inventory import Grouping, totals

        return totals(self._session, self._bookies, self._shares, Grouping(by.value), self._connection)

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        shown = [by for by in InventoryBy if by is not InventoryBy.APPLICATION or self._connection is not None]
        return _sections({by.value: (self.totals(by), INVENTORY_COLUMNS[by]) for by in shown})


def _sections(tables: Tables) -> list[Section]:
    """Return the sections for `tables`, which the words of --by name."""
    bookies = top_rows(tables["bookie"][0])
    scopes = top_rows(tables["scope"][0])
    blocks = [
        bars("Bytes of entries by bookie", [Bar(row.bookieId, {"bytes": row.size}) for row in bookies]),
        table(*tables["bookie"]),
        bars("Bytes by ledger scope", [Bar(f"scope {row.ledgerScopeId}", {"bytes": row.size}) for row in scopes]),
        table(*tables["scope"]),
    ]
    if "application" in tables:
        frame, columns = tables["application"]
        named = [
            Bar(row.managedLedger or row.component or row.application or "(none)", {"bytes": row.size})
            for row in top_rows(frame)
        ]
        blocks += [bars("Bytes by application", named), table(frame, columns)]
    ledgers = [Bar(_ledger_text(row), {"bytes": row.size}) for row in top_rows(tables["ledger"][0])]
    blocks += [bars("The largest ledgers", ledgers), table(*tables["ledger"]), table(*tables["entrylog"])]
    return [Section("Inventory", "Bytes and entries in the entry logs; every copy of an entry counts.", blocks)]


def _ledger_text(row: Any) -> str:
    return str(row.ledgerId if row.ledgerScopeId == "0" else row.ledgerQualifiedName)
