"""`bkctl pipeline`: jobs on Spark over all bookies' files, the metadata store and ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bkctl.errors import BkctlError, Corrupt, UsageError

from ..entrylog.garbage import ThresholdOptions, thresholds_of
from ..kit.columns import Column, Columns, Kind
from ..kit.command import Run, command, group
from ..kit.ledger_options import ScanFilter
from ..kit.texts import GREEN, RED, YELLOW, size_text
from .common import (
    LedgersToScan,
    Places,
    SaveOption,
    SparkOptions,
    bookies_at,
    check_cluster,
    check_saves,
    connection_options,
    frame_rows,
    ledger_of,
    spark_job,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles

    from .report import Section

app = group()


def _by_option(help: str) -> Any:
    return typer.Option("--by", metavar="WHAT", help=help)


def _ratio(value: float) -> str:
    return f"{value:.1%}"


_LEDGER = Column("LEDGER", "ledger", ledger_of, Kind.LEDGER)
_BOOKIE = Column("BOOKIE", "bookieId", "bookieId")
_FILE = Column("FILE", "file", "file", flexible=True)
_LEDGERS = Column("LEDGERS", "ledgerCount", "ledgerCount", Kind.INTEGER)
_BOOKIES = Column("BOOKIES", "bookieCount", "bookieCount", Kind.INTEGER)
_LOGS = Column("LOGS", "logCount", "logCount", Kind.INTEGER)
_ENTRIES = Column("ENTRIES", "entryCount", "entryCount", Kind.INTEGER)
_SIZE = Column("SIZE", "size", "size", Kind.SIZE)
_SUMS = (_ENTRIES, _SIZE)
_LOG = (
    Column("LOG", "logId", "logId", Kind.INTEGER),
    Column("HEX", "logIdHex", "logIdHex"),
    Column("SCOPED", "scoped", "scoped", Kind.BOOLEAN),
)


# --- inventory ------------------------------------------------------------------------------------------------------


class InventoryBy(StrEnum):
    """The words of `inventory --by`, as bkctl.spark.jobs.inventory has them (which is not imported to show help)."""

    BOOKIE = "bookie"
    ENTRY_LOG = "entrylog"
    SCOPE = "scope"
    LEDGER = "ledger"
    APPLICATION = "application"


INVENTORY_COLUMNS = {
    InventoryBy.BOOKIE: Columns(
        _BOOKIE, _LOGS, _LEDGERS, *_SUMS, Column("FILES", "fileSize", "fileSize", Kind.SIZE), key="bookieId"
    ),
    InventoryBy.ENTRY_LOG: Columns(
        _BOOKIE, *_LOG, _LEDGERS, *_SUMS, Column("FILE SIZE", "fileSize", "fileSize", Kind.SIZE), _FILE, key="file"
    ),
    InventoryBy.SCOPE: Columns(
        Column("SCOPE", "ledgerScopeId", "ledgerScopeId"), _LEDGERS, _BOOKIES, _LOGS, *_SUMS, key="ledgerScopeId"
    ),
    InventoryBy.LEDGER: Columns(_LEDGER, _BOOKIES, _LOGS, *_SUMS, key="ledger"),
    InventoryBy.APPLICATION: Columns(
        Column("APPLICATION", "application", "application"),
        Column("COMPONENT", "component", "component"),
        Column("MANAGED LEDGER", "managedLedger", "managedLedger", flexible=True),
        _LEDGERS,
        *_SUMS,
    ),
}


@command(app, "inventory", connects=True)
def inventory(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places = None,
    by: Annotated[
        InventoryBy, _by_option("A row for each bookie, entrylog, scope, ledger or application.")
    ] = InventoryBy.BOOKIE,
    save: SaveOption = None,
) -> None:
    """Count the bytes and entries of all bookies' entry logs, by bookie, log, scope, ledger or application.

    Every copy of an entry counts, with its size field, as in 'entrylog show'. Applications are what ledgers' custom
    metadata says (Pulsar's as 'ledger show' knows it), so they need the cluster; the rest needs files only. Exit code
    7: a log is damaged; what stands before the damage is counted.
    """
    saves = check_saves(save)
    connection = connection_options(run) if by is InventoryBy.APPLICATION else None
    bookies = bookies_at(run, places)
    if connection is not None:
        check_cluster(run)
    with spark_job(run, spark, "inventory") as session:
        found = _Inventory(session, bookies, ledgers, connection)
        sums = _Sums()
        frame_rows(run, found.totals(by), INVENTORY_COLUMNS[by], saves, sums.add)
        run.note(f"bkctl: {size_text(sums.of('size'))} in {sums.of('entryCount'):,} entries")
        _write_pages(run, saves, "Inventory", found.sections, bookies)
    _raise_damage(run, found.damages)


@dataclass
class _Sums:
    """Sums over the numbers of rows."""

    values: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, row: Any) -> None:
        """Count a row in."""
        self.count += 1
        for name, value in row.asDict().items():
            if isinstance(value, int) and not isinstance(value, bool):
                self.values[name] = self.values.get(name, 0) + value

    def of(self, name: str) -> int:
        """The sum of the column `name`."""
        return self.values.get(name, 0)


class _Inventory:
    """The inventory of some bookies, scanned once for all that is asked of it."""

    def __init__(
        self, session: SparkSession, bookies: Sequence[BookieFiles], ledgers: ScanFilter,
        connection: dict[str, str] | None,
    ) -> None:  # fmt: skip
        from bkctl.spark.jobs.inventory import damages, shares

        self._session, self._bookies, self._connection = session, bookies, connection
        self._shares = shares(session, bookies, ledger=ledgers.ledger, scope_id=ledgers.scope_id).persist()
        self.damages = damages(self._shares).collect()

    def totals(self, by: InventoryBy) -> DataFrame:
        """The rows for `by`."""
        from bkctl.spark.jobs.inventory import By, totals

        return totals(self._session, self._bookies, self._shares, By(by.value), self._connection)

    def sections(self) -> list[Section]:
        """What a page shows of it."""
        from .report import inventory_sections

        shown = [each for each in InventoryBy if each is not InventoryBy.APPLICATION or self._connection is not None]
        return inventory_sections({each.value: (self.totals(each), INVENTORY_COLUMNS[each]) for each in shown})


# --- integrity ------------------------------------------------------------------------------------------------------

_PROBLEM_STYLE = {"missing": RED, "damaged": RED, "misplaced": RED, "unreadable": RED, "notIndexed": YELLOW}

INTEGRITY_COLUMNS = Columns(
    _LEDGER,
    Column("ENTRY", "entryId", "entryId", Kind.INTEGER),
    _BOOKIE,
    Column("PROBLEM", "problem", "problem", style=_PROBLEM_STYLE),
    Column("INTACT", "intactCount", "intactCount", Kind.INTEGER),
    Column("OF", "writeQuorumSize", "writeQuorumSize", Kind.INTEGER),
    Column("STATE", "ledgerState", "ledgerState"),
    Column(None, "offset", "offset", Kind.INTEGER),
    Column(None, "detail", "detail"),
    _FILE,
    key="ledger",
)


@command(app, "integrity", connects=True)
def integrity(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places = None,
    no_indexes: Annotated[
        bool, typer.Option("--no-indexes", help="Look at entry logs and journals only: for copies without indexes.")
    ] = False,
    save: SaveOption = None,
) -> None:
    """Check that each bookie has every entry that metadata promises, and that each matches its digest.

    An entry is there if a bookie that starts on these files serves it: by its index from an entry log, or by a replay
    of the journal. Rows are what is not: missing, damaged, notIndexed, misplaced; or files that are unreadable from
    some byte on. INTACT: the bookies that still serve the entry, OF its write quorum (0: lost). Exit code 3: there are
    such rows. Bookies whose files are not given are not looked at.
    """
    saves = check_saves(save)
    connection = connection_options(run)
    bookies = bookies_at(run, places)
    check_cluster(run)
    with spark_job(run, spark, "integrity") as session:
        found = _Integrity(session, bookies, ledgers, connection, indexes=not no_indexes)
        sums = _Sums()
        frame_rows(run, found.result.findings, INTEGRITY_COLUMNS, saves, sums.add)
        for line in found.notes():
            run.note(f"bkctl: {line}")
        _write_pages(run, saves, "Integrity", found.sections, bookies)
    run.finish_with(sums.count, "findings")


class _Integrity:
    """The findings of one run."""

    def __init__(
        self, session: SparkSession, bookies: Sequence[BookieFiles], ledgers: ScanFilter, connection: dict[str, str],
        *, indexes: bool = True,
    ) -> None:  # fmt: skip
        from bkctl.spark.jobs.integrity import integrity

        self.result = integrity(
            session, bookies, connection, ledger=ledgers.ledger, scope_id=ledgers.scope_id, indexes=indexes
        )
        self._notes: list[str] | None = None

    def notes(self) -> list[str]:
        """What was checked, and what was not, in words."""
        if self._notes is None:
            (checked,) = self.result.checked.collect()
            self._notes = [
                f"{checked.replicaCount:,} replicas of {checked.entryCount:,} entries in {checked.ledgerCount:,} "
                "ledgers were checked"
            ]
            absent = self.result.unchecked.collect()
            if absent:
                names = ", ".join(f"{row.bookieId} ({row.ledgerCount:,} ledgers)" for row in absent)
                self._notes.append(f"Not looked at, since their files are not given: {names}")
        return self._notes

    def sections(self) -> list[Section]:
        """What a page shows of it."""
        from .report import integrity_sections

        return integrity_sections(self.result.findings, INTEGRITY_COLUMNS, self.notes())


# --- garbage --------------------------------------------------------------------------------------------------------


class GarbageBy(StrEnum):
    """The words of `garbage --by`."""

    ENTRY_LOG = "entrylog"
    BOOKIE = "bookie"
    LEDGER = "ledger"


_USE = (
    Column("TOTAL", "totalSize", "totalSize", Kind.SIZE),
    Column("REMAINING", "remainingSize", "remainingSize", Kind.SIZE),
    Column("GARBAGE", "garbageSize", "garbageSize", Kind.SIZE),
)
GARBAGE_COLUMNS = {
    GarbageBy.ENTRY_LOG: Columns(
        _BOOKIE,
        *_LOG,
        Column("ALIVE", "aliveCount", "aliveCount", Kind.INTEGER),
        Column("DEAD", "deadCount", "deadCount", Kind.INTEGER),
        Column("UNKNOWN", "unknownCount", "unknownCount", Kind.INTEGER),
        *_USE,
        Column("USAGE", "usage", "usage", Kind.INTEGER, text=_ratio),
        Column("COMPACTION", "compaction", "compaction", style={"delete": GREEN}),
        Column(None, "reclaimableSize", "reclaimableSize", Kind.INTEGER),
        Column(None, "rewrittenSize", "rewrittenSize", Kind.INTEGER),
        Column(None, "fromLedgersMap", "fromLedgersMap", Kind.BOOLEAN),
        Column(None, "complete", "complete", Kind.BOOLEAN),
        _FILE,
        key="file",
    ),
    GarbageBy.BOOKIE: Columns(
        _BOOKIE,
        _LOGS,
        Column("COMPACTED", "compactedCount", "compactedCount", Kind.INTEGER),
        *_USE,
        Column("FREED", "reclaimableSize", "reclaimableSize", Kind.SIZE),
        Column("REWRITTEN", "rewrittenSize", "rewrittenSize", Kind.SIZE),
        key="bookieId",
    ),
    GarbageBy.LEDGER: Columns(_LEDGER, _BOOKIES, _LOGS, _SIZE, key="ledger"),
}


@command(app, "garbage", connects=True)
def garbage(
    run: Run,
    thresholds: ThresholdOptions,
    spark: SparkOptions,
    places: Places = None,
    by: Annotated[GarbageBy, _by_option("A row for each entrylog, bookie, or orphaned ledger.")] = GarbageBy.ENTRY_LOG,
    save: SaveOption = None,
) -> None:
    """Show what of all bookies' entry logs is of use: dead bytes, what compaction would win, orphaned ledgers.

    Garbage are the bytes of ledgers that the metadata store says are not there, as for one bookie in 'entrylog
    garbage'; what it cannot say remains. With --by ledger the rows are those dead ledgers.
    """
    saves = check_saves(save)
    connection = connection_options(run)
    bookies = bookies_at(run, places)
    limits = thresholds_of(run, thresholds)
    check_cluster(run)
    with spark_job(run, spark, "garbage") as session:
        found = _Garbage(session, bookies, connection, limits)
        frame_rows(run, found.rows(by), GARBAGE_COLUMNS[by], saves)
        run.note(f"bkctl: {found.summary()}")
        _write_pages(run, saves, "Garbage", found.sections, bookies)
        problems = found.problems()
    _raise_problems(run, problems)


class _Garbage:
    """The garbage of some bookies, read once for all that is asked of it."""

    def __init__(
        self, session: SparkSession, bookies: Sequence[BookieFiles], connection: dict[str, str], thresholds: Any
    ) -> None:
        from bkctl.spark.jobs.garbage import garbage_shares, uses

        self._shares = garbage_shares(session, bookies, connection).persist()
        self._uses = uses(self._shares, thresholds).persist()

    def rows(self, by: GarbageBy) -> DataFrame:
        """The rows for `by`."""
        from bkctl.spark.jobs.garbage import by_bookie, orphans

        if by is GarbageBy.LEDGER:
            return orphans(self._shares)
        return by_bookie(self._uses) if by is GarbageBy.BOOKIE else self._uses

    def summary(self) -> str:
        """What the rows come to."""
        sums = _Sums()
        for row in self.rows(GarbageBy.BOOKIE).collect():
            sums.add(row)
        orphans = self.rows(GarbageBy.LEDGER).count()
        return (
            f"{size_text(sums.of('totalSize'))} of entries in {sums.of('logCount'):,} logs, "
            f"{size_text(sums.of('garbageSize'))} garbage of {orphans:,} orphaned ledgers; compaction of "
            f"{sums.of('compactedCount'):,} logs frees {size_text(sums.of('reclaimableSize'))}, rewriting "
            f"{size_text(sums.of('rewrittenSize'))}"
        )

    def problems(self) -> list[tuple[str, int]]:
        """Why logs are not complete, or ledgers of unknown state: what, and the exit code."""
        from pyspark.sql import functions as F

        damaged = self._shares.filter(F.col("reason").isNotNull()).select("reason").distinct().collect()
        unknown = (
            self._shares.filter(F.col("problem").isNotNull()).select("problem", "problemCode").distinct().collect()
        )
        found = [(row.reason, Corrupt.exit_code) for row in damaged]
        return found + [(row.problem, row.problemCode) for row in unknown]

    def sections(self) -> list[Section]:
        """What a page shows of it."""
        from .report import garbage_sections

        return garbage_sections(
            {each.value: (self.rows(each), GARBAGE_COLUMNS[each]) for each in GarbageBy}, self.summary()
        )


# --- journal-audit --------------------------------------------------------------------------------------------------


class AuditBy(StrEnum):
    """The words of `journal-audit --by`."""

    JOURNAL = "journal"
    ENTRY = "entry"


AUDIT_COLUMNS = {
    AuditBy.JOURNAL: Columns(
        _BOOKIE,
        Column("JOURNAL", "journalId", "journalId", Kind.INTEGER),
        Column("HEX", "journalIdHex", "journalIdHex"),
        Column("VERSION", "version", "version", Kind.INTEGER),
        Column("STATE", "state", "state", style={"damaged": RED, "unreadable": RED, "missing": RED, "torn": YELLOW}),
        _ENTRIES,
        Column("REPLAY FROM", "replayFrom", "replayFrom", Kind.INTEGER),
        Column("REPLAYED", "replayRecordCount", "replayRecordCount", Kind.INTEGER),
        Column(None, "replayEntryCount", "replayEntryCount", Kind.INTEGER),
        Column("REPLAY SIZE", "replaySize", "replaySize", Kind.SIZE),
        Column("UNLOGGED", "unloggedCount", "unloggedCount", Kind.INTEGER),
        Column("BEHIND", "recordsBehind", "recordsBehind", Kind.INTEGER),
        Column(None, "entriesBehind", "entriesBehind", Kind.INTEGER),
        Column(None, "sizeBehind", "sizeBehind", Kind.INTEGER),
        Column(None, "resumesAt", "resumesAt", Kind.INTEGER),
        Column(None, "recordCount", "recordCount", Kind.INTEGER),
        Column(None, "goodEnd", "goodEnd", Kind.INTEGER),
        Column(None, "size", "size", Kind.INTEGER),
        Column("PROBLEM", "problem", "problem", flexible=True),
        _FILE,
        key="file",
    ),
    AuditBy.ENTRY: Columns(
        _LEDGER,
        Column("ENTRY", "entryId", "entryId", Kind.INTEGER),
        _BOOKIE,
        Column("REPLAYED", "replayed", "replayed", Kind.BOOLEAN),
        Column("LEDGER STATE", "state", "state", style={"alive": GREEN, "dead": RED, "unknown": YELLOW}),
        Column("JOURNAL", "journalId", "journalId", Kind.INTEGER),
        Column("OFFSET", "offset", "offset", Kind.INTEGER),
        Column(None, "recordSize", "recordSize", Kind.INTEGER),
        _FILE,
        key="ledger",
    ),
}


@command(app, "journal-audit", connects=True)
def journal_audit(
    run: Run,
    ledgers: LedgersToScan,
    spark: SparkOptions,
    places: Places = None,
    by: Annotated[
        AuditBy, _by_option("A row for each journal, or each entry that no entry log holds.")
    ] = AuditBy.JOURNAL,
    save: SaveOption = None,
) -> None:
    """Show what all bookies' journals hold that nothing else does.

    REPLAYED: the records that a crash now would replay. UNLOGGED: entries that no entry log of the bookie holds; those
    before the place where a replay begins come back no more. BEHIND: records behind a torn or damaged end. Exit code
    7: a journal is damaged. 3: records lie behind a torn end, or (where the cluster is named) an entry that is in no
    log, and that no replay brings back, belongs to a ledger that is alive.
    """
    saves = check_saves(save)
    local = not places and run.conf is None
    connection = connection_options(run) if run.names_metadata or local else None
    bookies = bookies_at(run, places)
    if connection is not None:
        check_cluster(run)
    with spark_job(run, spark, "journal audit") as session:
        found = _JournalAudit(session, bookies, ledgers, connection)
        frame_rows(run, found.rows(by), AUDIT_COLUMNS[by], saves)
        run.note(f"bkctl: {found.summary()}")
        _write_pages(run, saves, "Journals", found.sections, bookies)
        damaged, findings = found.damaged(), found.finding_count()
    for line in damaged[1:]:
        run.note(f"bkctl: {line}")
    if damaged:
        raise Corrupt(damaged[0])
    run.finish_with(findings, "findings")


class _JournalAudit:
    """The journals of some bookies, read once for all that is asked of them."""

    def __init__(
        self, session: SparkSession, bookies: Sequence[BookieFiles], ledgers: ScanFilter,
        connection: dict[str, str] | None,
    ) -> None:  # fmt: skip
        from bkctl.spark.jobs.journal_audit import audit

        self._found = audit(session, bookies, connection, ledger=ledgers.ledger, scope_id=ledgers.scope_id)

    def rows(self, by: AuditBy) -> DataFrame:
        """The rows for `by`."""
        return self._found.journals if by is AuditBy.JOURNAL else self._found.unlogged

    def summary(self) -> str:
        """What the rows come to."""
        sums = _Sums()
        for row in self._found.journals.collect():
            sums.add(row)
        return (
            f"A crash now would replay {sums.of('replayRecordCount'):,} records "
            f"({size_text(sums.of('replaySize'))}) of {sums.count:,} journals; {sums.of('unloggedCount'):,} entries "
            f"are in no entry log; {sums.of('recordsBehind'):,} records lie behind an end"
        )

    def damaged(self) -> list[str]:
        """What is wrong with damaged journals, with their names."""
        rows = self._found.journals.filter("damaged").select("file", "problem").collect()
        return [f"{row.file}: {row.problem}" for row in rows]

    def finding_count(self) -> int:
        """How many journals go on behind their end or have another problem, and entries of living ledgers are lost."""
        journals = self._found.journals.filter("problem IS NOT NULL OR recordsBehind > 0").count()
        return journals + self._found.unlogged.filter("NOT replayed AND state = 'alive'").count()

    def sections(self) -> list[Section]:
        """What a page shows of it."""
        from .report import journal_sections

        return journal_sections(
            {each.value: (self.rows(each), AUDIT_COLUMNS[each]) for each in AuditBy}, self.summary()
        )


# --- report ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One job of a report, as it ended."""

    job: str
    findings: int
    summary: str


REPORT_COLUMNS = Columns(
    Column("JOB", "job", "job"),
    Column("FINDINGS", "findings", "findings", Kind.INTEGER),
    Column("SUMMARY", "summary", "summary"),
    key="job",
)


@command(app, "report", connects=True)
def report(
    run: Run,
    thresholds: ThresholdOptions,
    spark: SparkOptions,
    places: Places = None,
    save: SaveOption = None,
) -> None:
    """Write one HTML page with plots of inventory, integrity, garbage and journal-audit: --save NAME.html.

    It stands alone: no script, no picture and no style from elsewhere. What the jobs come to is printed too. Exit code
    3: there are findings.
    """
    from .report import write_page

    saves = check_saves(save, (".html",))
    if not saves:
        raise UsageError("Where to write the report is not said", hint="add --save report.html")
    connection = connection_options(run)
    bookies = bookies_at(run, places)
    limits = thresholds_of(run, thresholds)
    everything = ScanFilter(None, None)
    check_cluster(run)
    with spark_job(run, spark, "report") as session:
        counted = _Inventory(session, bookies, everything, connection)
        checked = _Integrity(session, bookies, everything, connection)
        wasted = _Garbage(session, bookies, connection, limits)
        audited = _JournalAudit(session, bookies, everything, connection)
        sums = _Sums()
        for row in counted.totals(InventoryBy.BOOKIE).collect():
            sums.add(row)
        sections = [*counted.sections(), *checked.sections(), *wasted.sections(), *audited.sections()]
        parts = [
            _Part(
                "inventory", len(counted.damages),
                f"{size_text(sums.of('size'))} in {sums.of('entryCount'):,} entries on {len(bookies):,} bookies",
            ),
            _Part("integrity", checked.result.findings.count(), "; ".join(checked.notes())),
            _Part("garbage", len(wasted.problems()), wasted.summary()),
            _Part("journal-audit", audited.finding_count(), audited.summary()),
        ]  # fmt: skip
    for path in saves:
        write_page(path, "Report", sections, [each.bookie_id for each in bookies])
    run.render(parts, REPORT_COLUMNS)
    run.finish_with(sum(each.findings for each in parts), "findings")


def _write_pages(
    run: Run, saves: Iterable[str], title: str, sections: Callable[[], list[Section]], bookies: Sequence[BookieFiles]
) -> None:
    pages = [path for path in saves if path.lower().endswith(".html")]
    if not pages:
        return
    from .report import write_page

    made = sections()
    for path in pages:
        write_page(path, title, made, [each.bookie_id for each in bookies])


def _raise_damage(run: Run, rows: Sequence[Any]) -> None:
    _raise_problems(run, [(row.reason, Corrupt.exit_code) for row in rows])


def _raise_problems(run: Run, problems: Sequence[tuple[str, int]]) -> None:
    """Say all problems, and end with the first of them and its exit code."""
    for text, _ in problems[1:]:
        run.note(f"bkctl: {text}")
    if problems:
        text, code = problems[0]
        kind = next((each for each in BkctlError.__subclasses__() if each.exit_code == code), BkctlError)
        raise kind(text)
