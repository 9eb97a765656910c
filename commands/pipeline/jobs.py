"""`bkctl pipeline inventory`, `integrity`, `garbage`, `journal-audit`, `report`: jobs over the files of all bookies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Corrupt, NotFound, UsageError

from ..entrylog.listing import ThresholdOptions, ratio_text, thresholds_of
from ..kit.columns import fields, hex_column
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import ScanFilter
from ..kit.options import flag
from ..kit.texts import GREEN, RED, YELLOW, counted, size_text
from . import common
from .saves import BARS_MAX, NO_SAVES, PAGE, Bar, PageTable, Plot, check_saves, table, top_rows, write_pages

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame

app = group()
EVERY_LEDGER: Final = ScanFilter(None, None)


def _integers(spare: int = 0, kind: Kind = Kind.INTEGER, **titles: str | None) -> list[Column]:
    """Return columns of integers, which the rows have by their JSON names, by name and title."""
    return [Column(title, name, name, kind, spare=spare) for name, title in titles.items()]


LEDGER = Column("LEDGER", "ledger", common.ledger_of, Kind.LEDGER)
BOOKIE = Column("BOOKIE", "bookieId", "bookieId")
FILE = Column("FILE", "file", "file", flexible=True, spare=2)
LEDGERS, BOOKIES, LOGS, ENTRIES = _integers(
    ledgerCount="LEDGERS", bookieCount="BOOKIES", logCount="LOGS", entryCount="ENTRIES"
)
RANGE = _integers(firstEntryId="FIRST", lastEntryId="LAST", entryCount="ENTRIES", findingCount="FINDINGS")
SIZE = Column("SIZE", "size", "size", Kind.SIZE)
SUMS = (ENTRIES, SIZE)
LOG = (*_integers(logId="LOG"), hex_column("logIdHex", "logIdHex"), Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN))

#: The words of `inventory --by`, as in bkctl.spark.jobs.inventory, whose import would slow `--help` down.
InventoryBy = StrEnum("InventoryBy", "BOOKIE ENTRYLOG SCOPE LEDGER APPLICATION")

INVENTORY_COLUMNS = {
    InventoryBy.BOOKIE: Columns(
        BOOKIE, LOGS, LEDGERS, *SUMS, Column("FILES", "fileSize", "fileSize", Kind.SIZE), key="bookieId"
    ),
    InventoryBy.ENTRYLOG: Columns(
        BOOKIE, *LOG, LEDGERS, *SUMS, Column("FILE SIZE", "fileSize", "fileSize", Kind.SIZE), FILE, key="file"
    ),
    InventoryBy.SCOPE: Columns(
        Column("SCOPE", "ledgerScopeId", "ledgerScopeId"), LEDGERS, BOOKIES, LOGS, *SUMS, key="ledgerScopeId"
    ),
    InventoryBy.LEDGER: Columns(LEDGER, BOOKIES, LOGS, *SUMS, key="ledger"),
    InventoryBy.APPLICATION: Columns(
        *fields(Kind.TEXT, application="APPLICATION", component="COMPONENT"),
        Column("MANAGED LEDGER", "managedLedger", "managedLedger", flexible=True),
        LEDGERS,
        *SUMS,
    ),
}


@command(app, "inventory", connects=True, prints=rows_of(INVENTORY_COLUMNS))
def inventory(
    run: Run,
    ledgers: common.LedgersToScan,
    given: common.ForJob,
    by: Annotated[
        InventoryBy, flag("--by WHAT", "A row for each bookie, entrylog, scope, ledger or application.")
    ] = InventoryBy.BOOKIE,
) -> None:
    """Count bytes and entries in all bookies' entry logs.

    --by gives a row for each bookie, log, scope, ledger or application. Every copy of an entry counts, with its size
    field, as in 'entrylog show'. Applications come from ledgers' custom metadata (Pulsar's, as in 'ledger show'), so
    --by application needs the cluster; all others need files only. Exit code 7: a log is damaged; entries before the
    damage are counted.

    $ bkctl pipeline inventory
    $ bkctl pipeline inventory --conf bk_server.conf --by scope
    """
    common.show_result(run, given, InventoryResult, by, connects=by is InventoryBy.APPLICATION, ledgers=ledgers)


class InventoryResult(common.JobResult):
    """The inventory of some bookies, scanned once for rows and page."""

    label, title, columns = "inventory", "Inventory", INVENTORY_COLUMNS

    def __init__(self, job: common.Job, *, ledgers: ScanFilter = EVERY_LEDGER, held: Frame | None = None) -> None:
        from bkctl.spark.jobs.entries import shares_of
        from bkctl.spark.jobs.inventory import damages, shares

        self._job = job
        found = shares(job.session, job.bookies, **ledgers._asdict()) if held is None else shares_of(held)
        self._shares = found.persist()
        self.damages = damages(self._shares).collect()

    def rows(self, by: InventoryBy) -> Frame:
        from bkctl.spark.jobs.inventory import Grouping, totals

        job = self._job
        return totals(job.session, job.bookies, self._shares, Grouping(by.value), job.connection)

    @property
    def lines(self) -> list[str]:
        return ["Bytes and entries in the entry logs; every copy of an entry counts."]

    def notes(self, shown: common.Sums) -> list[str]:
        return [f"{size_text(shown['size'])} in {counted(shown['entryCount'], 'entry')}"]

    def problems(self) -> list[BkctlError]:
        return [Corrupt(row.reason) for row in self.damages]

    def blocks(self) -> list[Plot | PageTable]:
        blocks: list[Plot | PageTable] = []
        for title, by, name_of in _PLOTS:
            if by is not InventoryBy.APPLICATION or self._job.connection is not None:
                frame = self.rows(by)
                blocks.append(Plot(title, [Bar(name_of(row), {"bytes": row.size}) for row in top_rows(frame)]))
                blocks.append(table(frame, self.columns[by]))
        by = InventoryBy.ENTRYLOG
        return [*blocks, table(self.rows(by), self.columns[by])]


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

_PROBLEM_STYLE = dict.fromkeys(("missing", "damaged", "misplaced", "notCompared", "unreadable"), RED) | {
    "notIndexed": YELLOW
}

IntegrityBy = StrEnum("IntegrityBy", "ENTRY LEDGER BOOKIE LOG")

_PROBLEM = Column("PROBLEM", "problem", "problem", style=_PROBLEM_STYLE)
_QUORUM = (*_integers(intactCount="INTACT", writeQuorumSize="OF"), Column("STATE", "ledgerState", "ledgerState"))
_DETAILS = (*_integers(offset=None), Column(None, "detail", "detail"), FILE)
_NONE = "No findings"

INTEGRITY_COLUMNS = {
    IntegrityBy.ENTRY: Columns(
        LEDGER, *_integers(entryId="ENTRY"), BOOKIE, _PROBLEM, *_QUORUM, *_DETAILS, key="ledger", none=_NONE
    ),
    IntegrityBy.LEDGER: Columns(LEDGER, *RANGE, BOOKIES, _PROBLEM, *_QUORUM, *_DETAILS, key="ledger", none=_NONE),
    IntegrityBy.BOOKIE: Columns(BOOKIE, LEDGER, *RANGE, _PROBLEM, *_QUORUM, *_DETAILS, key="bookieId", none=_NONE),
    IntegrityBy.LOG: Columns(BOOKIE, LEDGER, *RANGE, _PROBLEM, *_QUORUM, *_DETAILS, key="file", none=_NONE),
}


@command(app, "integrity", connects=True, prints=rows_of(INTEGRITY_COLUMNS))
def integrity(
    run: Run,
    ledgers: common.LedgersToScan,
    given: common.ForJob,
    no_indexes: Annotated[
        bool, flag("--no-indexes", "Read entry logs and journals only: for copies without indexes.")
    ] = False,
    by: Annotated[
        IntegrityBy, flag("--by WHAT", "A row for each entry, or for each range of entries by ledger, bookie or log.")
    ] = IntegrityBy.ENTRY,
) -> None:
    """Check that each bookie has its entries, undamaged.

    Compares the files with the metadata, which says which bookie has which entry, and checks every digest. An entry is
    present if a bookie that starts on these files serves it: by its index from an entry log, or by a replay of the
    journal. Other entries are rows: missing, damaged, notIndexed or misplaced. So are files that are unreadable behind
    some byte, and fragments of more than 2^30 entries (notCompared). INTACT: the bookies that still serve the entry, OF
    its write quorum (0: lost; -: unknown, since a bookie that should have the entry was not checked). Exit code 3:
    there are findings. Bookies whose files are not given are not checked. --by ledger, bookie and log show ranges of
    entries with the same problem and INTACT: of all bookies, of one, or of one file (entry log or journal).

    $ bkctl pipeline integrity
    """
    common.show_result(run, given, IntegrityResult, by, ledgers=ledgers, indexes=not no_indexes)


class IntegrityResult(common.JobResult):
    """The findings of one run."""

    label, title, columns = "integrity", "Integrity", INTEGRITY_COLUMNS

    def __init__(
        self, job: common.Job, *, ledgers: ScanFilter = EVERY_LEDGER, indexes: bool = True, held: Frame | None = None
    ) -> None:
        from bkctl.spark.jobs.integrity import integrity

        assert job.connection is not None
        self._connection = job.connection
        self.result = integrity(
            job.session, job.bookies, job.connection, **ledgers._asdict(), indexes=indexes, held=held
        )

    def rows(self, by: IntegrityBy) -> Frame:
        from bkctl.spark.jobs.entry_ranges import entry_ranges

        if by is IntegrityBy.ENTRY:
            return self.result.findings
        same = ("problem", "intactCount", "writeQuorumSize", "ledgerState")
        return entry_ranges(self.result.findings, by.value, same, self._connection)

    def finding_count(self, shown: common.Sums) -> int:
        return shown.get("findingCount", shown.count)

    @cached_property
    def lines(self) -> list[str]:
        """The checked replicas, and the bookies that were not checked."""
        (checked,) = self.result.checked.collect()
        notes = [
            f"{checked.replicaCount:,} replicas of {checked.entryCount:,} entries in {checked.ledgerCount:,} "
            "ledgers were checked"
        ]
        absent = self.result.unchecked.collect()
        if absent:
            names = ", ".join(f"{row.bookieId} ({counted(row.ledgerCount, 'ledger')})" for row in absent)
            notes.append(f"Not checked, since their files are not given: {names}")
        return notes

    def blocks(self) -> list[Plot | PageTable]:
        from bkctl.spark.engine import functions_of

        findings = self.result.findings
        counts = findings.groupBy("problem", "bookieId").agg(functions_of(findings).count("*").alias("found")).collect()
        by_bookie: dict[str, dict[str, int]] = {}
        for row in sorted(counts, key=lambda each: (each.bookieId, each.problem)):
            by_bookie.setdefault(row.bookieId, {})[row.problem] = row.found
        plot = Plot("Findings by bookie", [Bar(name, parts) for name, parts in by_bookie.items()][:BARS_MAX], unit="")
        return [plot, table(findings, self.columns[IntegrityBy.ENTRY], none="No findings.")]


GarbageBy = StrEnum("GarbageBy", "ENTRYLOG BOOKIE LEDGER")

_USE = _integers(kind=Kind.SIZE, totalSize="TOTAL", remainingSize="REMAINING", garbageSize="GARBAGE")
GARBAGE_COLUMNS = {
    GarbageBy.ENTRYLOG: Columns(
        BOOKIE,
        *LOG,
        *_integers(1, aliveCount="ALIVE", deadCount="DEAD", unknownCount="UNKNOWN"),
        *_USE,
        Column("USAGE", "usage", "usage", Kind.INTEGER, text=ratio_text),
        Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
        *_integers(reclaimableSize=None, rewrittenSize=None),
        Column(None, "fromLedgersMap", "fromLedgersMap", Kind.BOOLEAN),
        Column(None, "complete", "complete", Kind.BOOLEAN),
        FILE,
        key="file",
    ),
    GarbageBy.BOOKIE: Columns(
        BOOKIE,
        LOGS,
        *_integers(compactedCount="COMPACTED"),
        *_USE,
        *_integers(kind=Kind.SIZE, reclaimableSize="FREED", rewrittenSize="REWRITTEN"),
        key="bookieId",
    ),
    GarbageBy.LEDGER: Columns(LEDGER, BOOKIES, LOGS, SIZE, key="ledger"),
}


@command(app, "garbage", connects=True, prints=rows_of(GARBAGE_COLUMNS))
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    given: common.ForJob,
    by: Annotated[
        GarbageBy, flag("--by WHAT", "A row for each entrylog, bookie, or orphaned ledger.")
    ] = GarbageBy.ENTRYLOG,
) -> None:
    """Show live and dead bytes in all bookies' entry logs.

    Also shows what compaction would free, and orphaned ledgers. Garbage: bytes of ledgers that no longer exist in the
    metadata store, as in 'entrylog garbage' for one bookie. Bytes of ledgers whose state is unknown remain. With --by
    ledger the rows are the dead ledgers.

    $ bkctl pipeline garbage --by bookie
    """
    common.show_result(run, given, GarbageResult, by, thresholds=thresholds_of(run, thresholds))


class GarbageResult(common.JobResult):
    """The garbage of some bookies, read once for rows and page."""

    label, title, columns = "garbage", "Garbage", GARBAGE_COLUMNS

    def __init__(self, job: common.Job, *, thresholds: Any) -> None:
        from bkctl.spark.jobs.garbage import garbage_shares, uses

        assert job.connection is not None
        self._shares = garbage_shares(job.session, job.bookies, job.connection).persist()
        self._uses = uses(self._shares, thresholds).persist()

    def rows(self, by: GarbageBy) -> Frame:
        from bkctl.spark.jobs.garbage import by_bookie, orphans

        if by is GarbageBy.LEDGER:
            return orphans(self._shares)
        return by_bookie(self._uses) if by is GarbageBy.BOOKIE else self._uses

    @cached_property
    def lines(self) -> list[str]:
        sums = common.Sums(self.rows(GarbageBy.BOOKIE).collect())
        orphans = counted(self.rows(GarbageBy.LEDGER).count(), "orphaned ledger")
        return [
            f"{size_text(sums['totalSize'])} of entries in {counted(sums['logCount'], 'log')}, "
            f"{size_text(sums['garbageSize'])} garbage of {orphans}; "
            f"compaction of {counted(sums['compactedCount'], 'log')} frees "
            f"{size_text(sums['reclaimableSize'])}, rewriting "
            f"{size_text(sums['rewrittenSize'])}"
        ]

    def problems(self) -> list[BkctlError]:
        """Return why logs are incomplete or ledgers of unknown state."""
        from bkctl.spark.failures import error_named

        damaged = self._shares.filter("reason IS NOT NULL").select("reason").distinct().collect()
        unknown = self._shares.filter("problem IS NOT NULL").select("problem", "problemType").distinct().collect()
        found: list[BkctlError] = [Corrupt(row.reason) for row in damaged]
        return found + [error_named(row.problemType, row.problem) or BkctlError(row.problem) for row in unknown]

    def blocks(self) -> list[Plot | PageTable]:
        tables = {by: (self.rows(by), self.columns[by]) for by in GarbageBy}
        bookies, logs = tables[GarbageBy.BOOKIE], tables[GarbageBy.ENTRYLOG]
        of_bookies = [Bar(row.bookieId, _parts(row)) for row in top_rows(bookies[0])]
        of_logs = [Bar(f"{row.bookieId} {_log_text(row)}", _parts(row)) for row in top_rows(logs[0])]
        return [
            Plot("Remaining and dead bytes by bookie", of_bookies),
            table(*bookies),
            Plot("Logs with the most garbage", [each for each in of_logs if each.parts["garbage"]]),
            table(*logs),
            table(*tables[GarbageBy.LEDGER], title="Orphaned ledgers"),
        ]


def _parts(row: Any) -> dict[str, int]:
    return {"remaining": row.remainingSize, "garbage": row.garbageSize}


def _log_text(row: Any) -> str:
    return ("scoped/" if row.scoped else "") + (Path(row.file).name if row.logIdHex is None else f"{row.logIdHex}.log")


AuditBy = StrEnum("AuditBy", "JOURNAL ENTRY LEDGER BOOKIE LOG")

_STATES = (
    Column("LOGGED", "logged", "logged", style={"no": RED, "unknown": YELLOW}),
    Column("REPLAYED", "replayed", "replayed", Kind.BOOLEAN),
    Column("LEDGER STATE", "state", "state", style={"alive": GREEN, "dead": RED, "unknown": YELLOW}),
)

AUDIT_COLUMNS = {
    AuditBy.JOURNAL: Columns(
        BOOKIE,
        *_integers(journalId="JOURNAL"),
        hex_column("journalIdHex", "journalIdHex"),
        *_integers(2, version="VERSION"),
        Column("STATE", "state", "state", style={"damaged": RED, "unreadable": RED, "missing": RED, "torn": YELLOW}),
        ENTRIES,
        *_integers(1, replayFrom="REPLAY FROM"),
        *_integers(replayRecordCount="REPLAYED", replayEntryCount=None),
        Column("REPLAY SIZE", "replaySize", "replaySize", Kind.SIZE, spare=1),
        *_integers(unloggedCount="UNLOGGED", unknownCount="UNKNOWN", recordsBehind="BEHIND"),
        *_integers(entriesBehind=None, sizeBehind=None, resumesAt=None, recordCount=None, goodEnd=None, size=None),
        Column("PROBLEM", "problem", "problem"),
        FILE,
        key="file",
    ),
    AuditBy.ENTRY: Columns(
        LEDGER,
        *_integers(entryId="ENTRY"),
        BOOKIE,
        *_STATES,
        *_integers(journalId="JOURNAL", offset="OFFSET", recordSize=None),
        FILE,
        key="ledger",
    ),
    AuditBy.LEDGER: Columns(LEDGER, *RANGE, BOOKIES, *_STATES, key="ledger"),
    AuditBy.BOOKIE: Columns(BOOKIE, LEDGER, *RANGE, *_STATES, key="bookieId"),
    AuditBy.LOG: Columns(BOOKIE, LEDGER, *RANGE, *_STATES, *_integers(offset=None), FILE, key="file"),
}


@command(app, "journal-audit", connects=True, prints=rows_of(AUDIT_COLUMNS))
def journal_audit(
    run: Run,
    ledgers: common.LedgersToScan,
    given: common.ForJob,
    by: Annotated[
        AuditBy,
        flag(
            "--by WHAT",
            "A row for each journal, each entry that no entry log holds, or their ranges by ledger, bookie or log.",
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

    $ bkctl pipeline journal-audit
    """
    connects = run.access.names_metadata or (given.places == ([], None) and run.access.conf is None)
    common.show_result(run, given, JournalAuditResult, by, connects=connects, ledgers=ledgers)


class JournalAuditResult(common.JobResult):
    """The journals of some bookies, read once for rows and page."""

    label, title, columns = "journal audit", "Journals", AUDIT_COLUMNS

    def __init__(self, job: common.Job, *, ledgers: ScanFilter = EVERY_LEDGER, held: Frame | None = None) -> None:
        from bkctl.spark.jobs.journal_audit import audit

        self._connection = job.connection
        self._found = audit(job.session, job.bookies, job.connection, **ledgers._asdict(), held=held)

    def rows(self, by: AuditBy) -> Frame:
        from bkctl.spark.jobs.entry_ranges import entry_ranges

        if by is AuditBy.JOURNAL:
            return self._found.journals
        if by is AuditBy.ENTRY:
            return self._found.unlogged
        return entry_ranges(self._found.unlogged, by.value, ("logged", "replayed", "state"), self._connection)

    @cached_property
    def lines(self) -> list[str]:
        sums = common.Sums(self._found.journals.collect())
        return [
            f"A crash now would replay {sums['replayRecordCount']:,} records "
            f"({size_text(sums['replaySize'])}) of {sums.count:,} journals; {sums['unloggedCount']:,} entries "
            f"are in no entry log, {sums['unknownCount']:,} may be behind damage in a log; "
            f"{sums['recordsBehind']:,} records lie behind an end"
        ]

    def problems(self) -> list[BkctlError]:
        """Return an error for each damaged journal: its file and the damage."""
        rows = self._found.journals.filter("damaged").select("file", "problem").collect()
        return [Corrupt(f"{row.file}: {row.problem}") for row in rows]

    def finding_count(self, shown: common.Sums) -> int:
        """Return the number of findings: journals with a problem or records behind their end, and lost live entries."""
        journals = self._found.journals.filter("problem IS NOT NULL OR recordsBehind > 0").count()
        return journals + self._found.unlogged.filter("NOT replayed AND state = 'alive' AND logged = 'no'").count()

    def blocks(self) -> list[Plot | PageTable]:
        from bkctl.spark.engine import functions_of

        journals = self._found.journals
        sizes = (
            journals.groupBy("bookieId").agg(functions_of(journals).sum("replaySize").alias("size")).orderBy("bookieId")
        )
        bars = [Bar(row.bookieId, {"bytes": row.size or 0}) for row in top_rows(sizes)]
        return [
            Plot("What a crash now would replay", bars),
            table(journals, self.columns[AuditBy.JOURNAL]),
            table(self._found.unlogged, self.columns[AuditBy.ENTRY], title="Entries that no entry log holds"),
        ]


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
    spark: common.SparkOptions,
    places: common.Places,
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
    saves = NO_SAVES._replace(paths=list(dict.fromkeys(save or ())))
    check_saves(saves, REPORT_COLUMNS, (PAGE,))
    _check_textfile(textfile)
    if not saves.paths and textfile is None:
        raise UsageError("The report has no file", hint="add --save report.html")
    limits = thresholds_of(run, thresholds)
    with common.read_job(run, common.JobOptions(spark, places, NO_SAVES), "report") as job:
        from bkctl.spark.jobs.entries import held_entries

        # The files are read once, and after the metadata, which integrity reads first.
        held = held_entries(job.session, job.bookies, None, None).persist()
        checked = IntegrityResult(job, held=held)
        sized = InventoryResult(job, held=held)
        wasted = GarbageResult(job, thresholds=limits)
        audited = JournalAuditResult(job, held=held)
        inventory = sized.rows(InventoryBy.BOOKIE).collect()
        sums = common.Sums(inventory)
        sections = [result.section() for result in (sized, checked, wasted, audited)] if saves.paths else []
        parts = [
            (
                "inventory", len(sized.damages),
                f"{size_text(sums['size'])} in {sums['entryCount']:,} entries on "
                f"{counted(len(job.bookies), 'bookie')}",
            ),
            ("integrity", checked.result.findings.count(), "; ".join(checked.lines)),
            ("garbage", len(wasted.problems()), wasted.lines[0]),
            ("journal-audit", audited.finding_count(common.Sums()), audited.lines[0]),
        ]  # fmt: skip
        if textfile is not None:
            _write_textfile(
                textfile, {name: count for name, count, _ in parts}, inventory, wasted.rows(GarbageBy.BOOKIE).collect()
            )
    write_pages(saves.paths, "Report", lambda: sections, job.bookies)
    run.out.render(parts, REPORT_COLUMNS)
    run.out.finish_with(sum(count for _, count, _ in parts))


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
    from bkctl.disk import atomic_write

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
