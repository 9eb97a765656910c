"""`bkctl pipeline integrity`: promised entries against bookies' files."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind

from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScanFilter
from ..kit.texts import RED, YELLOW, counted
from .columns import BOOKIE, BOOKIES, FILE, LEDGER, RANGE, Sums
from .common import Job, JobOptions, JobResult, LedgersToScan, Places, SparkOptions, by_option, show_result
from .page import BARS_MAX, Bar, Plot, Section, table
from .saves import SaveOption

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame

app = group()

_PROBLEM_STYLE = {"missing": RED, "damaged": RED, "misplaced": RED, "unreadable": RED, "notIndexed": YELLOW}


class IntegrityBy(StrEnum):
    """The words of `integrity --by`."""

    ENTRY = "entry"
    LEDGER = "ledger"
    BOOKIE = "bookie"
    LOG = "log"


_PROBLEM = Column("PROBLEM", "problem", "problem", style=_PROBLEM_STYLE)
_QUORUM = (
    Column("INTACT", "intactCount", "intactCount", Kind.INTEGER),
    Column("OF", "writeQuorumSize", "writeQuorumSize", Kind.INTEGER),
    Column("STATE", "ledgerState", "ledgerState"),
)
_DETAILS = (Column(None, "offset", "offset", Kind.INTEGER), Column(None, "detail", "detail"), FILE)
_NONE = "No findings"

INTEGRITY_COLUMNS = {
    IntegrityBy.ENTRY: Columns(
        LEDGER, Column("ENTRY", "entryId", "entryId", Kind.INTEGER), BOOKIE, _PROBLEM, *_QUORUM, *_DETAILS,
        key="ledger", none=_NONE,
    ),
    IntegrityBy.LEDGER: Columns(LEDGER, *RANGE, BOOKIES, _PROBLEM, *_QUORUM, *_DETAILS, key="ledger", none=_NONE),
    IntegrityBy.BOOKIE: Columns(BOOKIE, LEDGER, *RANGE, _PROBLEM, *_QUORUM, *_DETAILS, key="bookieId", none=_NONE),
    IntegrityBy.LOG: Columns(BOOKIE, LEDGER, *RANGE, _PROBLEM, *_QUORUM, *_DETAILS, key="file", none=_NONE),
}  # fmt: skip


@command(app, "integrity", connects=True, examples=("bkctl pipeline integrity",), prints=rows_of(INTEGRITY_COLUMNS))
def integrity(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places,
    saves: SaveOption,
    no_indexes: Annotated[
        bool, typer.Option("--no-indexes", help="Read entry logs and journals only: for copies without indexes.")
    ] = False,
    by: Annotated[
        IntegrityBy, by_option("A row for each entry, or for each range of entries by ledger, bookie or log.")
    ] = IntegrityBy.ENTRY,
) -> None:
    """Check that each bookie has its entries, undamaged.

    Compares the files with the metadata, which says which bookie has which entry, and checks every digest. An entry is
    present if a bookie that starts on these files serves it: by its index from an entry log, or by a replay of the
    journal. Other entries are rows: missing, damaged, notIndexed or misplaced. So are files that are unreadable behind
    some byte. INTACT: the bookies that still serve the entry, OF its write quorum (0: lost; -: unknown, since a bookie
    that should have the entry was not checked). Exit code 3: there are findings. Bookies whose files are not given are
    not checked. --by ledger, bookie and log show ranges of entries with the same problem and INTACT: of all bookies, of
    one, or of one file (entry log or journal).
    """
    options = JobOptions(run, spark, places, saves)
    show_result(
        options, "integrity", by, INTEGRITY_COLUMNS, partial(IntegrityResult, ledgers=ledgers, indexes=not no_indexes)
    )


class IntegrityResult(JobResult):
    """The findings of one run."""

    def __init__(
        self, job: Job, *, ledgers: ScanFilter, indexes: bool = True, held: Frame | None = None
    ) -> None:  # fmt: skip
        from bkctl.spark.jobs.integrity import integrity

        assert job.connection is not None
        self._connection = job.connection
        self.result = integrity(
            job.session, job.bookies, job.connection, ledger=ledgers.ledger, scope_id=ledgers.scope_id,
            indexes=indexes, held=held,
        )  # fmt: skip

    def rows(self, by: IntegrityBy) -> Frame:
        """Return the rows of `--by`."""
        from bkctl.spark.jobs.entry_ranges import entry_ranges

        if by is IntegrityBy.ENTRY:
            return self.result.findings
        same = ("problem", "intactCount", "writeQuorumSize", "ledgerState")
        return entry_ranges(self.result.findings, by.value, same, self._connection)

    def finding_count(self, shown: Sums) -> int:
        return shown.get("findingCount", shown.count)

    def notes(self, shown: Sums) -> list[str]:
        """Return one line about the checked replicas, and one about the bookies that were not checked."""
        return self.lines

    @cached_property
    def lines(self) -> list[str]:
        """Return the lines of `notes`."""
        (checked,) = self.result.checked.collect()
        notes = [
            f"{checked.replicaCount:,} replicas of {checked.entryCount:,} entries in {checked.ledgerCount:,} "
            "ledgers were checked"
        ]
        absent = self.result.unchecked.collect()
        if absent:
            names = ", ".join(f"{row.bookieId} ({counted(row.ledgerCount, 'ledger', 'ledgers')})" for row in absent)
            notes.append(f"Not checked, since their files are not given: {names}")
        return notes

    def sections(self) -> list[Section]:
        """Return the sections of the page."""
        from bkctl.spark.engine import functions_of

        findings = self.result.findings
        counts = findings.groupBy("problem", "bookieId").agg(functions_of(findings).count("*").alias("found")).collect()
        by_bookie: dict[str, dict[str, int]] = {}
        for row in sorted(counts, key=lambda each: (each.bookieId, each.problem)):
            by_bookie.setdefault(row.bookieId, {})[row.problem] = row.found
        plot = Plot("Findings by bookie", [Bar(name, parts) for name, parts in by_bookie.items()][:BARS_MAX], unit="")
        found = table(findings, INTEGRITY_COLUMNS[IntegrityBy.ENTRY], none="No findings.")
        return [Section("Integrity", ". ".join(self.lines), [plot, found])]
