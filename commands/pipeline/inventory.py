"""`bkctl pipeline inventory`: bytes and entries of all bookies' entry logs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Corrupt

from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScanFilter
from ..kit.texts import counted, size_text
from .columns import BOOKIE, BOOKIES, FILE, LEDGER, LEDGERS, LOG, LOGS, SUMS, Sums
from .common import Job, JobOptions, JobResult, LedgersToScan, Places, SparkOptions, by_option, show_result
from .page import Bar, Plot, Section, Table, table, top_rows
from .saves import SaveOption

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame

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
    prints=rows_of(INVENTORY_COLUMNS),
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
    options = JobOptions(run, spark, places, saves, connects=by is InventoryBy.APPLICATION)
    show_result(options, "inventory", by, INVENTORY_COLUMNS, partial(InventoryResult, ledgers=ledgers))


class InventoryResult(JobResult):
    """The inventory of some bookies, scanned once for rows and page."""

    def __init__(self, job: Job, *, ledgers: ScanFilter, held: Frame | None = None) -> None:
        from bkctl.spark.jobs.entries import shares_of
        from bkctl.spark.jobs.inventory import damages, shares

        self._job = job
        if held is None:
            found = shares(job.session, job.bookies, ledger=ledgers.ledger, scope_id=ledgers.scope_id)
        else:
            found = shares_of(held)
        self._shares = found.persist()
        self.damages = damages(self._shares).collect()

    def rows(self, by: InventoryBy) -> Frame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.inventory import Grouping, totals

        job = self._job
        return totals(job.session, job.bookies, self._shares, Grouping(by.value), job.connection)

    def notes(self, shown: Sums) -> list[str]:
        return [f"{size_text(shown['size'])} in {counted(shown['entryCount'], 'entry', 'entries')}"]

    def problems(self) -> list[BkctlError]:
        return [Corrupt(row.reason) for row in self.damages]

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        blocks: list[Plot | Table] = []
        for title, by, name_of in _PLOTS:
            if by is InventoryBy.APPLICATION and self._job.connection is None:
                continue
            frame = self.rows(by)
            blocks.append(Plot(title, [Bar(name_of(row), {"bytes": row.size}) for row in top_rows(frame)]))
            blocks.append(table(frame, INVENTORY_COLUMNS[by]))
        by = InventoryBy.ENTRY_LOG
        blocks.append(table(self.rows(by), INVENTORY_COLUMNS[by]))
        return [Section("Inventory", "Bytes and entries in the entry logs; every copy of an entry counts.", blocks)]


def _application_name(row: Any) -> str:
    return str(row.managedLedger or row.component or row.application or "(none)")


def _ledger_name(row: Any) -> str:
    return str(row.ledgerId if row.ledgerScopeId == "0" else row.ledgerQualifiedName)


#: The plots of the page, each above its table: title, rows, name of a row.
_PLOTS: Final[tuple[tuple[str, InventoryBy, Callable[[Any], str]], ...]] = (
    ("Bytes of entries by bookie", InventoryBy.BOOKIE, lambda row: row.bookieId),
    ("Bytes by ledger scope", InventoryBy.SCOPE, lambda row: f"scope {row.ledgerScopeId}"),
    ("Bytes by application", InventoryBy.APPLICATION, _application_name),
    ("The largest ledgers", InventoryBy.LEDGER, _ledger_name),
)
