"""Facts of bookies: jobs give the same rows from them as from the bookies' directories, whatever is damaged there."""

from __future__ import annotations

import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import (
    bookie_files,
    source_rows,  # noqa: F401 (skips where there is no PySpark)
)
from support.bookie_files import Files
from support.command_line import CommandLine
from support.engines import Engine, on_both_engines

from bkctl.files.entry_log import EntryLogReader
from bkctl.files.index import LedgerIndexReader
from bkctl.formats.entry import DigestType
from bkctl.formats.index import HEADER_SIZE
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import open_cluster
from bkctl.spark.facts.extraction import ExtractCounts, extract
from bkctl.spark.facts.facts_store import FactsStore
from bkctl.spark.facts.frames import Facts
from bkctl.spark.jobs.bookies import Bookies, find_bookies
from bkctl.spark.jobs.garbage import by_bookie, garbage_shares, orphans, uses
from bkctl.spark.jobs.integrity import integrity
from bkctl.spark.jobs.inventory import Grouping, damages, shares, totals
from bkctl.spark.jobs.journal_audit import audit
from bkctl.spark.local.session import local_session
from bkctl.spark.sources.columns import arrow_schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.engine import JobSession

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Job = Callable[["JobSession", Bookies, str], list[list[str]]]

#: The bookie with a file for each ledger's index.
INTERLEAVED = 1


def copied(files: Files, directory: Path) -> Files:
    for place in files.places():
        shutil.copytree(place, directory / Path(place).name, ignore=shutil.ignore_patterns("*.log.lock"))
    with sqlite3.connect(files.directory / "metadata.db") as store, sqlite3.connect(directory / "metadata.db") as copy:
        store.backup(copy)
    return files._replace(directory=directory, uri=f"sqlite://{directory / 'metadata.db'}")


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a cluster; no test changes them."""
    return bookie_files.make(tmp_path_factory.mktemp("intact"))


@pytest.fixture(scope="module")
def damaged(intact: Files, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Copies with every kind of damage; no test changes them."""
    files = copied(intact, tmp_path_factory.mktemp("damaged"))
    _damage(files)
    return files


def _of(files: Files, digest_type: DigestType, scope_id: int) -> LedgerId:
    return next(
        each.ledger for each in files.flushed if each.digest_type is digest_type and each.ledger.scope_id == scope_id
    )


def _log(files: Files, bookie: int, *, scoped: bool = False) -> Path:
    return Path(files.places()[bookie], "ledgers", "current", *(["scoped"] if scoped else []), "0.log")


def _place_of(log: Path, ledger: LedgerId) -> tuple[int, int]:
    """Offset of the size field, and size, of a record of the ledger in the middle of a log."""
    with EntryLogReader.open(log) as reader:
        found = [each for each in reader.records() if each.ledger == ledger]
    return found[len(found) // 2].offset, found[len(found) // 2].record_size


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def _damage(files: Files) -> None:
    for digest_type in (DigestType.CRC32, DigestType.CRC32C, DigestType.HMAC):
        for scope_id in (0, 7):
            log = _log(files, 0, scoped=bool(scope_id))
            offset, size = _place_of(log, _of(files, digest_type, scope_id))
            _overwrite(log, offset + 3 + size, b"\xff")
    # The scan of a log ends here; its index finds what stands behind.
    log = _log(files, 2, scoped=True)
    _overwrite(log, _place_of(log, _of(files, DigestType.HMAC, 7))[0], struct.pack(">i", -7))
    indexes = Path(files.places()[INTERLEAVED], "ledgers", "current")
    (gone,) = indexes.rglob(f"{_of(files, DigestType.DUMMY, 0).ledger_id:x}.idx")
    gone.unlink()
    # The first places name another entry, no entry, and a log that is not there.
    (index,) = indexes.rglob(f"{_of(files, DigestType.CRC32, 0).ledger_id:x}.idx")
    with LedgerIndexReader.open(index) as reader:
        places = list(reader.locations())
    wrong = [places[1][1], places[1][1] + 3, 77 << 32 | 2000]
    for (entry_id, _), location in zip(places, wrong, strict=False):
        _overwrite(index, HEADER_SIZE + 8 * entry_id, struct.pack(">q", location))
    (broken,) = indexes.rglob(f"{_of(files, DigestType.CRC32C, 0).ledger_id:x}.idx")
    broken.write_bytes(b"not an index")
    for journal in Path(files.places()[0], "journal", "current").glob("*.txn"):
        journal.unlink()
    journal = max(Path(files.places()[INTERLEAVED], "journal", "current").glob("*.txn"))
    rows = CommandLine(None)("journal", "read", journal, "-o", "ndjson").rows
    entries = [row for row in rows if row["type"] == "entry"]
    _overwrite(journal, entries[1]["offset"] + 3 + entries[1]["recordSize"], b"\xfe")
    _overwrite(journal, entries[-1]["offset"], struct.pack(">i", -7))
    with open_cluster(files.uri) as cluster:
        cluster.ledgers.remove(files.flushed[-1].ledger)


def extracted(files: Files, uri: str, *, named: bool = True, full: bool = False) -> list[ExtractCounts]:
    """The result of an extract of all bookies."""
    store = FactsStore(uri)
    with open_cluster(files.uri) as cluster:
        found = find_bookies([files.directory])
        return [extract(bookie, store, cluster if named else None, full=full) for bookie in found]


def rows_of(frame: DataFrame) -> list[str]:
    """The columns with their types, and the rows in order."""
    columns = sorted((field.name, str(field.type)) for field in arrow_schema_of(frame.schema))
    return [repr(columns), *(repr(sorted(row.asDict(recursive=True).items())) for row in frame.collect())]


def _inventory(spark: JobSession, bookies: Bookies, uri: str) -> list[list[str]]:
    found = shares(spark, bookies)
    connection = {"metadataUri": uri}
    by = [rows_of(totals(spark, bookies, found, grouping, connection)) for grouping in Grouping]
    return [sorted(rows_of(damages(found))), *by]


def _integrity(spark: JobSession, bookies: Bookies, uri: str, **options: Any) -> list[list[str]]:
    found = integrity(spark, bookies, {"metadataUri": uri}, **options)
    parts = [rows_of(found.findings), rows_of(found.unchecked), rows_of(found.checked)]
    found.release()
    return parts


def _integrity_of_copies(spark: JobSession, bookies: Bookies, uri: str) -> list[list[str]]:
    return _integrity(spark, bookies, uri, indexes=False)


def _integrity_of_scope(spark: JobSession, bookies: Bookies, uri: str) -> list[list[str]]:
    return _integrity(spark, bookies, uri, scope_id=7)


def _garbage(spark: JobSession, bookies: Bookies, uri: str) -> list[list[str]]:
    found = garbage_shares(spark, bookies, {"metadataUri": uri})
    used = uses(found)
    return [rows_of(used), rows_of(by_bookie(used)), rows_of(orphans(found))]


def _journal_audit(spark: JobSession, bookies: Bookies, uri: str) -> list[list[str]]:
    found = audit(spark, bookies, {"metadataUri": uri})
    parts = [rows_of(found.journals), rows_of(found.unlogged)]
    found.release()
    return parts


#: Each job, and whether the extract may ask the metadata store.
CASES: list[tuple[Job, bool]] = [
    (_inventory, True),
    (_integrity, True),
    (_integrity, False),
    (_integrity_of_copies, True),
    (_integrity_of_scope, True),
    (_garbage, True),
    (_journal_audit, True),
]


@pytest.fixture(scope="module")
def facts(damaged: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Facts]:
    """The facts of the damaged files, extracted with and without the metadata store."""
    uris = {named: str(tmp_path_factory.mktemp("facts")) for named in (True, False)}
    for named, uri in uris.items():
        extracted(damaged, uri, named=named)
    return {named: Facts(uri) for named, uri in uris.items()}


def test_evidence_is_found_in_a_scoped_log_that_was_copied_among_the_others(
    engine: Engine, intact: Files, tmp_path: Path
) -> None:
    files = copied(intact, tmp_path / "files")
    shutil.copy(_log(files, 0, scoped=True), _log(files, 0).with_name("77.log"))
    extracted(files, str(tmp_path / "facts"), named=False)
    from_files = _integrity(engine.session, find_bookies([files.directory]), files.uri)
    assert _integrity(engine.session, Facts(str(tmp_path / "facts")), files.uri) == from_files


@pytest.mark.long
@pytest.mark.parametrize(("job", "named"), CASES, ids=lambda each: getattr(each, "__name__", str(each)).strip("_"))
def test_jobs_give_the_same_rows_from_facts(
    engine: Engine, damaged: Files, facts: dict[bool, Facts], job: Job, named: bool
) -> None:
    from_files = job(engine.session, find_bookies([damaged.directory]), damaged.uri)
    assert sum(map(len, from_files)) > len(from_files)
    assert job(engine.session, facts[named], damaged.uri) == from_files


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=pytest.mark.long) if job in (_integrity_of_copies, _integrity_of_scope) else job
        for job in dict.fromkeys(job for job, _ in CASES)
    ],
    ids=lambda job: job.__name__.strip("_"),
)
def test_engines_give_the_same_rows_in_the_same_order(spark: SparkSession, damaged: Files, job: Job) -> None:
    bookies = find_bookies([damaged.directory])
    expected = job(spark, bookies, damaged.uri)
    with local_session() as session:
        assert job(session, bookies, damaged.uri) == expected


@on_both_engines
def test_commands_read_facts_of_bookies_whose_paths_are_the_same(engine: Engine, intact: Files, tmp_path: Path) -> None:
    uri, place = tmp_path / "facts", tmp_path / "bookie"
    for directory, bookie_id in zip(intact.places(), intact.bookies, strict=True):
        shutil.copytree(directory, place, ignore=shutil.ignore_patterns("*.log.lock"))
        (row,) = CommandLine(intact.uri)("pipeline", "extract", place, uri, "-o", "ndjson").rows
        assert row["bookieId"] == bookie_id
        shutil.rmtree(place)
    by_log = engine.rows(None, "inventory", "--by", "entrylog", "--facts", uri)
    expected = engine.rows(None, "inventory", "--by", "entrylog", intact.directory)
    names = ("bookieId", "logId", "scoped", "ledgerCount", "entryCount", "size", "fileSize")
    assert [[row[name] for name in names] for row in by_log] == [[row[name] for name in names] for row in expected]
    both = engine.run(None, "inventory", intact.directory, "--facts", uri)
    assert (both.code, both.out) == (2, b"")
    assert "Bookies' files and --facts are given" in both.problem
    none = engine.run(None, "inventory", "--facts", tmp_path / "nothing")
    assert (none.code, none.out) == (4, b"")
    assert "has no facts of version 1" in none.problem


def _without_values(rows: pa.Table) -> pa.Table:
    return pa.table({field.name: pa.nulls(rows.num_rows, field.type) for field in rows.schema})


def _without_columns(rows: pa.Table) -> pa.Table:
    return rows.select(["part"])


def _with_text(name: str, value: str) -> Callable[[pa.Table], pa.Table]:
    def change(rows: pa.Table) -> pa.Table:
        return rows.drop([name]).append_column(name, pa.array([value] * rows.num_rows))

    return change


_long_names = _with_text("ledgerQualifiedName", "0" * 32 + "\n")
_other_names = _with_text("ledgerQualifiedName", "zz")

#: A table, a change of its files, and a job that reads them: for both engines, one of each table.
FOREIGN: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
    ("records", _without_values, "integrity"),
    ("ledgers", _long_names, "garbage"),
    ("index", _other_names, "integrity"),
    ("journal_records", _without_columns, "journal-audit"),
    ("evidence", _with_text("problem", "unknown"), "integrity"),
]
#: More, for the engine of this process: both have the check of rows in common.
MORE_FOREIGN: list[tuple[str, Callable[[pa.Table], pa.Table], str]] = [
    ("records", _without_columns, "integrity"),
    ("ledgers", _other_names, "inventory"),
    ("index", _without_values, "integrity"),
    ("journal_records", _other_names, "integrity"),
    ("evidence", _other_names, "integrity"),
]


def test_rows_that_no_extract_writes_are_refused_with_their_table(
    engine: Engine, intact: Files, tmp_path: Path
) -> None:
    uri = tmp_path / "facts"
    extracted(intact, str(uri), named=False)  # the records of HMAC and DUMMY are evidence
    cases = FOREIGN if engine.options else FOREIGN + MORE_FOREIGN
    for number, (table, change, job) in enumerate(cases):
        foreign = tmp_path / f"foreign{number}"  # the session may keep rows of a path whose job failed
        shutil.copytree(uri, foreign)
        for file in (foreign / "v1" / table).rglob("*.parquet"):
            pq.write_table(change(pq.read_table(file)), file)
        answer = engine.run(intact.uri, job, "--facts", foreign)
        line = answer.err.splitlines()[-1]
        assert answer.code == 1, (table, change, answer)
        assert f"Facts at {foreign}: table {table} has a row that no extract writes" in line, answer
        assert "bkctl pipeline extract --full" in line
