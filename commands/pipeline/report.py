"""`bkctl pipeline report`: one HTML page of all jobs, and their totals for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.disk import atomic_write
from bkctl.errors import NotFound, UsageError

from ..entrylog.garbage import ThresholdOptions, thresholds_of
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScanFilter
from ..kit.options import flag
from ..kit.texts import counted, size_text
from .common import JobOptions, Places, SparkOptions, Sums, read_job, sums_of
from .jobs import GarbageBy, GarbageResult, IntegrityResult, InventoryBy, InventoryResult, JournalAuditResult
from .page import write_pages
from .saves import NO_SAVES, check_pages

app = group()

_SUFFIX: Final = ".prom"
#: Column of the rows by bookie → name of its metric.
_INVENTORY: Final = {"size": "bkctl_report_entry_bytes", "entryCount": "bkctl_report_entries"}
_GARBAGE: Final = {
    "remainingSize": "bkctl_report_remaining_bytes",
    "garbageSize": "bkctl_report_garbage_bytes",
    "reclaimableSize": "bkctl_report_reclaimable_bytes",
}


REPORT_COLUMNS = Columns(
    Column("JOB", "job", itemgetter(0)),
    Column("FINDINGS", "findings", itemgetter(1), Kind.INTEGER),
    Column("SUMMARY", "summary", itemgetter(2)),
    key="job",
)


@command(app, "report", connects=True, prints=rows_of(REPORT_COLUMNS))
def report(
    run: Run,
    thresholds: ThresholdOptions,
    spark: SparkOptions,
    places: Places,
    save: Annotated[list[str] | None, flag("--save PATH", "Write the page: NAME.html; repeatable.")] = None,
    textfile: Annotated[
        Path | None,
        flag(
            f"--textfile NAME{_SUFFIX}",
            "Write findings and totals for the textfile collector of Prometheus' node_exporter; replaces the file.",
        ),
    ] = None,
) -> None:
    """Write the results of the jobs as one HTML page.

    The page has plots of inventory, integrity, garbage and journal-audit, and loads nothing from elsewhere. --save
    names the file. --textfile writes findings and totals by bookie for Prometheus, and may be all that is wanted. The
    jobs' totals are printed too. Exit code 3: there are findings.

    $ bkctl pipeline report --save report.html
    $ bkctl pipeline report --textfile /var/lib/node_exporter/bkctl.prom
    """
    saves = list(dict.fromkeys(save or ()))
    check_pages(saves)
    _check_textfile(textfile)
    if not saves and textfile is None:
        raise UsageError("The report has no file", hint="add --save report.html")
    limits = thresholds_of(run, thresholds)
    everything = ScanFilter(None, None)
    with read_job(run, JobOptions(spark, places, NO_SAVES), "report") as job:
        from bkctl.spark.jobs.entries import held_entries

        # The files are read once, and after the metadata, which integrity reads first.
        held = held_entries(job.session, job.bookies, None, None).persist()
        checked = IntegrityResult(job, ledgers=everything, held=held)
        sized = InventoryResult(job, ledgers=everything, held=held)
        wasted = GarbageResult(job, thresholds=limits)
        audited = JournalAuditResult(job, ledgers=everything, held=held)
        inventory = sized.rows(InventoryBy.BOOKIE).collect()
        sums = sums_of(inventory)
        results = (sized, checked, wasted, audited)
        sections = [section for result in results for section in result.sections()] if saves else []
        parts = [
            (
                "inventory", len(sized.damages),
                f"{size_text(sums['size'])} in {sums['entryCount']:,} entries on "
                f"{counted(len(job.bookies), 'bookie', 'bookies')}",
            ),
            ("integrity", checked.result.findings.count(), "; ".join(checked.lines)),
            ("garbage", len(wasted.problems()), wasted.summary()),
            ("journal-audit", audited.finding_count(Sums()), audited.summary()),
        ]  # fmt: skip
        if textfile is not None:
            _write_textfile(
                textfile, {name: count for name, count, _ in parts}, inventory, wasted.rows(GarbageBy.BOOKIE).collect()
            )
    write_pages(saves, "Report", lambda: sections, job.bookies)
    run.out.render(parts, REPORT_COLUMNS)
    run.out.finish_with(sum(count for _, count, _ in parts), "finding", "findings")


def _check_textfile(path: Path | None) -> None:
    """Raise UsageError or NotFound (directory) for a file that the collector or this machine would not take."""
    if path is None:
        return
    if path.suffix != _SUFFIX:
        raise UsageError(f"--textfile {path}: not a name that ends in {_SUFFIX}", hint="the collector reads no others")
    if not path.absolute().parent.is_dir():
        raise NotFound(f"--textfile {path}: the directory {path.absolute().parent} does not exist")


def _write_textfile(path: Path, findings: Mapping[str, int], inventory: Iterable[Any], garbage: Iterable[Any]) -> None:
    """Write the findings of each job, rows of inventory and garbage by bookie, and the time. Raises OSError."""
    from bkctl.bookie.metrics import PrometheusText

    text = PrometheusText()
    text.sample("bkctl_report_timestamp_seconds", "gauge", int(time.time()))
    for job, count in findings.items():
        text.sample("bkctl_report_findings", "gauge", count, {"job": job})
    for rows, names in ((inventory, _INVENTORY), (garbage, _GARBAGE)):
        for row in rows:
            values = row.asDict()
            for column, name in names.items():
                text.sample(name, "gauge", values[column], {"bookie": values["bookieId"]})
    with atomic_write(path, mode=0o644) as file:
        file.write(text.text().encode())
