"""`bkctl pipeline journal-audit`: records of all bookies' journals that nothing else holds."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Corrupt

from ..kit.columns import hex_column
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScanFilter
from ..kit.texts import GREEN, RED, YELLOW, size_text
from .columns import BOOKIE, BOOKIES, ENTRIES, FILE, LEDGER, RANGE, Sums, sums_of
from .common import Job, JobOptions, JobResult, LedgersToScan, Places, SparkOptions, by_option, show_result
from .page import Bar, Plot, Section, Table, table, top_rows
from .saves import SaveOption

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame

app = group()


class AuditBy(StrEnum):
    """The words of `journal-audit --by`."""

    JOURNAL = "journal"
    ENTRY = "entry"
    LEDGER = "ledger"
    BOOKIE = "bookie"
    LOG = "log"


_STATES = (
    Column("LOGGED", "logged", "logged", style={"no": RED, "unknown": YELLOW}),
    Column("REPLAYED", "replayed", "replayed", Kind.BOOLEAN),
    Column("LEDGER STATE", "state", "state", style={"alive": GREEN, "dead": RED, "unknown": YELLOW}),
)

AUDIT_COLUMNS = {
    AuditBy.JOURNAL: Columns(
        BOOKIE,
        Column("JOURNAL", "journalId", "journalId", Kind.INTEGER),
        hex_column("journalIdHex", "journalIdHex"),
        Column("VERSION", "version", "version", Kind.INTEGER, spare=2),
        Column("STATE", "state", "state", style={"damaged": RED, "unreadable": RED, "missing": RED, "torn": YELLOW}),
        ENTRIES,
        Column("REPLAY FROM", "replayFrom", "replayFrom", Kind.INTEGER, spare=1),
        Column("REPLAYED", "replayRecordCount", "replayRecordCount", Kind.INTEGER),
        Column(None, "replayEntryCount", "replayEntryCount", Kind.INTEGER),
        Column("REPLAY SIZE", "replaySize", "replaySize", Kind.SIZE, spare=1),
        Column("UNLOGGED", "unloggedCount", "unloggedCount", Kind.INTEGER),
        Column("UNKNOWN", "unknownCount", "unknownCount", Kind.INTEGER),
        Column("BEHIND", "recordsBehind", "recordsBehind", Kind.INTEGER),
        Column(None, "entriesBehind", "entriesBehind", Kind.INTEGER),
        Column(None, "sizeBehind", "sizeBehind", Kind.INTEGER),
        Column(None, "resumesAt", "resumesAt", Kind.INTEGER),
        Column(None, "recordCount", "recordCount", Kind.INTEGER),
        Column(None, "goodEnd", "goodEnd", Kind.INTEGER),
        Column(None, "size", "size", Kind.INTEGER),
        Column("PROBLEM", "problem", "problem"),
        FILE,
        key="file",
    ),
    AuditBy.ENTRY: Columns(
        LEDGER,
        Column("ENTRY", "entryId", "entryId", Kind.INTEGER),
        BOOKIE,
        *_STATES,
        Column("JOURNAL", "journalId", "journalId", Kind.INTEGER),
        Column("OFFSET", "offset", "offset", Kind.INTEGER),
        Column(None, "recordSize", "recordSize", Kind.INTEGER),
        FILE,
        key="ledger",
    ),
    AuditBy.LEDGER: Columns(LEDGER, *RANGE, BOOKIES, *_STATES, key="ledger"),
    AuditBy.BOOKIE: Columns(BOOKIE, LEDGER, *RANGE, *_STATES, key="bookieId"),
    AuditBy.LOG: Columns(
        BOOKIE, LEDGER, *RANGE, *_STATES, Column(None, "offset", "offset", Kind.INTEGER), FILE, key="file"
    ),
}


@command(
    app,
    "journal-audit",
    connects=True,
    examples=("bkctl pipeline journal-audit",),
    prints=rows_of(AUDIT_COLUMNS),
)
def journal_audit(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places,
    saves: SaveOption,
    by: Annotated[
        AuditBy,
        by_option(
            "A row for each journal, each entry that no entry log holds, or their ranges by ledger, bookie or log."
        ),
    ] = AuditBy.JOURNAL,
) -> None:
    """Show records that only the bookies' journals hold.

    REPLAYED: records that a crash now would replay. UNLOGGED: entries that no entry log of the bookie holds; if they
    are before the byte where a replay begins, they are lost to the bookie. UNKNOWN: entries that may be in an entry log
    behind damage, where no index finds them. BEHIND: records behind a torn or damaged
    end. Exit code 7: a journal is damaged. 3: records are behind a torn end, or (if the cluster is named) an unlogged
    entry that is not replayed belongs to a live ledger. --by entry shows the unlogged entries; --by ledger, bookie and
    log show their ranges: of all bookies, of one, or of one journal.
    """
    connects = run.access.names_metadata or (places.are_default and run.access.conf is None)
    options = JobOptions(run, spark, places, saves, connects=connects)
    show_result(options, "journal audit", by, AUDIT_COLUMNS, partial(JournalAuditResult, ledgers=ledgers), "Journals")


class JournalAuditResult(JobResult):
    """The journals of some bookies, read once for rows and page."""

    def __init__(self, job: Job, *, ledgers: ScanFilter, held: Frame | None = None) -> None:
        from bkctl.spark.jobs.journal_audit import audit

        self._connection = job.connection
        self._found = audit(
            job.session, job.bookies, job.connection, ledger=ledgers.ledger, scope_id=ledgers.scope_id, held=held
        )

    def rows(self, by: AuditBy) -> Frame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.entry_ranges import entry_ranges

        if by is AuditBy.JOURNAL:
            return self._found.journals
        if by is AuditBy.ENTRY:
            return self._found.unlogged
        return entry_ranges(self._found.unlogged, by.value, ("logged", "replayed", "state"), self._connection)

    def notes(self, shown: Sums) -> list[str]:
        """Return the totals in one line."""
        return [self.summary()]

    def summary(self) -> str:
        sums = sums_of(self._found.journals.collect())
        return (
            f"A crash now would replay {sums['replayRecordCount']:,} records "
            f"({size_text(sums['replaySize'])}) of {sums.count:,} journals; {sums['unloggedCount']:,} entries "
            f"are in no entry log, {sums['unknownCount']:,} may be behind damage in a log; "
            f"{sums['recordsBehind']:,} records lie behind an end"
        )

    def problems(self) -> list[BkctlError]:
        """Return an error for each damaged journal: its file and the damage."""
        rows = self._found.journals.filter("damaged").select("file", "problem").collect()
        return [Corrupt(f"{row.file}: {row.problem}") for row in rows]

    def finding_count(self, shown: Sums) -> int:
        """Return the number of findings: journals with a problem or records behind their end, and lost live entries."""
        journals = self._found.journals.filter("problem IS NOT NULL OR recordsBehind > 0").count()
        return journals + self._found.unlogged.filter("NOT replayed AND state = 'alive' AND logged = 'no'").count()

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        from bkctl.spark.engine import functions_of

        journals = self._found.journals
        sizes = (
            journals.groupBy("bookieId").agg(functions_of(journals).sum("replaySize").alias("size")).orderBy("bookieId")
        )
        blocks: list[Plot | Table] = [
            Plot(
                "What a crash now would replay",
                [Bar(row.bookieId, {"bytes": row.size or 0}) for row in top_rows(sizes)],
            ),
            table(journals, AUDIT_COLUMNS[AuditBy.JOURNAL]),
            table(self._found.unlogged, AUDIT_COLUMNS[AuditBy.ENTRY], title="Entries that no entry log holds"),
        ]
        return [Section("Journals", self.summary(), blocks)]
