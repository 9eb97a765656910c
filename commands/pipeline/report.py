"""`bkctl pipeline report`: one HTML page of all jobs, and their totals for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from bkctl.errors import UsageError

from ..entrylog.garbage import ThresholdOptions, thresholds_of
from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run, command, group
from ..kit.ledger_options import ScanFilter
from ..kit.texts import counted, size_text
from .common import (
    Places,
    SparkOptions,
    check_cluster,
    connection_options,
    read_bookies,
    read_job,
)
from .garbage import GarbageBy, GarbageResult
from .integrity import IntegrityResult
from .inventory import InventoryBy, InventoryResult
from .journals import JournalAuditResult
from .page import write_page
from .results import sums_of
from .saves import PAGE, check_save
from .textfile import TextfileOption, check_textfile, write_textfile

app = group()

PageOption = Annotated[
    list[str] | None,
    typer.Option("--save", metavar="PATH", help="Write the page: NAME.html; repeatable."),
]


@dataclass(frozen=True)
class _Part:
    """The result of one job of a report."""

    job: str
    findings: int
    summary: str


REPORT_COLUMNS = Columns(
    Column("JOB", "job", "job"),
    Column("FINDINGS", "findings", "findings", Kind.INTEGER),
    Column("SUMMARY", "summary", "summary"),
    key="job",
)


@command(
    app,
    "report",
    connects=True,
    examples=(
        "bkctl pipeline report --save report.html",
        "bkctl pipeline report --textfile /var/lib/node_exporter/bkctl.prom",
    ),
)
def report(
    run: Run,
    thresholds: ThresholdOptions,
    spark: SparkOptions,
    places: Places,
    save: PageOption = None,
    textfile: TextfileOption = None,
) -> None:
    """Write the results of the jobs as one HTML page.

    The page has plots of inventory, integrity, garbage and journal-audit, and loads nothing from elsewhere. --save
    names the file. --textfile writes findings and totals by bookie for Prometheus, and may be all that is wanted. The
    jobs' totals are printed too. Exit code 3: there are findings.
    """
    saves = list(dict.fromkeys(save or ()))
    for path in saves:
        check_save(path, (PAGE,))
    check_textfile(textfile)
    if not saves and textfile is None:
        raise UsageError("The report has no file", hint="add --save report.html")
    connection = connection_options(run)
    bookies = read_bookies(run, places)
    limits = thresholds_of(run, thresholds)
    everything = ScanFilter(None, None)
    check_cluster(run)
    with read_job(run, spark, "report") as session:
        from bkctl.spark.jobs.held_entries import held_entries

        # The files are read once, and after the metadata, which integrity reads first.
        held = held_entries(session, bookies, None, None).persist()
        checked = IntegrityResult(session, bookies, everything, connection, held=held)
        sized = InventoryResult(session, bookies, everything, connection, held=held)
        wasted = GarbageResult(session, bookies, connection, limits)
        audited = JournalAuditResult(session, bookies, everything, connection, held=held)
        inventory = sized.totals(InventoryBy.BOOKIE).collect()
        sums = sums_of(inventory)
        results = (sized, checked, wasted, audited)
        sections = [section for result in results for section in result.sections()] if saves else []
        parts = [
            _Part(
                "inventory", len(sized.damages),
                f"{size_text(sums.of('size'))} in {sums.of('entryCount'):,} entries on "
                f"{counted(len(bookies), 'bookie', 'bookies')}",
            ),
            _Part("integrity", checked.result.findings.count(), "; ".join(checked.notes())),
            _Part("garbage", len(wasted.problems()), wasted.summary()),
            _Part("journal-audit", audited.finding_count(), audited.summary()),
        ]  # fmt: skip
        if textfile is not None:
            findings = {part.job: part.findings for part in parts}
            write_textfile(textfile, findings, inventory, wasted.rows(GarbageBy.BOOKIE).collect())
    for path in saves:
        write_page(path, "Report", sections, [bookie.bookie_id for bookie in bookies])
    run.render(parts, REPORT_COLUMNS)
    run.finish_with(sum(part.findings for part in parts), "finding", "findings")
