"""The sources of files through Spark itself: one call registers them, filters reach them, errors come back as ours."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import golden
from support.source_rows import rows_of

from bkctl.errors import BkctlError, Conflict, CorruptRecord, NotFound, UsageError
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import write_header
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.spark.failures import source_error
from bkctl.spark.sources import PUSHDOWN
from bkctl.spark.sources.indexes import IndexSource
from bkctl.spark.sources.records import EntryLogSource, JournalSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The first one starts Spark, which takes long where much else runs.
GOLDEN = golden.GoldenBookie("4.18.0", "db")
HUGE = LedgerId(2**64 - 1, 2**63 + 9)


def log(path: Path, ledger: LedgerId, count: int) -> Path:
    data = write_header(2 if ledger.is_scoped else 1)
    for entry_id in range(count):
        payload = b"payload %d" % entry_id
        sealed = DigestManager(ledger, DigestType.CRC32C).seal(entry_id, entry_id - 1, 10**6, payload)
        data += RECORD_SIZE.pack(len(sealed) + len(payload)) + sealed + payload
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("source", "directory"),
    [(EntryLogSource, GOLDEN.ledger_dir), (JournalSource, GOLDEN.journal_dir), (IndexSource, GOLDEN.ledger_dir)],
    ids=["entrylog", "journal", "index"],
)
def test_rows_are_unchanged_through_spark(spark: SparkSession, source: type[EntryLogSource], directory: Path) -> None:
    assert spark.conf.get(PUSHDOWN) == "true"
    frame = spark.read.format(source.name()).load(str(directory))
    rows = rows_of(source, path=directory)
    assert sorted(row.asDict().items() for row in frame.collect()) == sorted(row.items() for row in rows)


def test_ids_payloads_and_filters(spark: SparkSession, tmp_path: Path) -> None:
    log(tmp_path / "current" / "0.log", LedgerId(0, 5), 3000)
    log(tmp_path / "current" / "scoped" / "0.log", HUGE, 3000)
    reader = spark.read.format("bookkeeper.entrylog")
    frame = reader.option("columns", "*,payload").load(str(tmp_path))
    assert frame.rdd.getNumPartitions() == 2
    wanted = frame.where(f"ledgerId = {HUGE.ledger_id} and ledgerScopeId = {HUGE.scope_id} and entryId in (7, 8)")
    assert [(row.entryId, row.payload) for row in wanted.collect()] == [(7, b"payload 7"), (8, b"payload 8")]
    assert frame.where("ledgerId = 99").collect() == []
    rows = frame.where("entryId >= 1000 and ledgerId > 5").groupBy("ledgerScopeId").count().collect()
    assert [tuple(row) for row in rows] == [(HUGE.scope_id, 2000)]
    sums = reader.option("rows", "ledgers").option("columns", "*").load(str(tmp_path))
    rows = sums.groupBy("ledgerQualifiedName").sum("entryCount").collect()
    assert sorted(tuple(row) for row in rows) == [
        (LedgerId(0, 5).qualified_name, 3000), (HUGE.qualified_name, 3000)
    ]  # fmt: skip


def test_ids_are_numbers_beside_a_uuid(spark: SparkSession, tmp_path: Path) -> None:
    uuid = LedgerId(0x0123456789ABCDEF, 0xFEDCBA9876543210)
    for number, ledger in enumerate((LedgerId(0, 2), LedgerId(0, 10), LedgerId(7, 2))):
        log(tmp_path / "current" / ("scoped" if ledger.is_scoped else "") / f"{number}.log", ledger, 20)
    log(tmp_path / "current" / "scoped" / "9.log", uuid, 20)
    reader = spark.read.format("bookkeeper.entrylog").options(columns="ledgerScopeId,ledgerId", pushdown="true")
    assert reader.load(str(tmp_path)).schema.simpleString() == (
        "struct<ledgerScopeId:decimal(20,0),ledgerId:decimal(20,0)>"
    )
    for condition, ledgers in (
        ("ledgerId = 2", [(0, 2), (7, 2)]),
        ("ledgerId in (2, 10) and ledgerScopeId = 0", [(0, 2), (0, 10)]),
        ("ledgerId > 2 and ledgerId <= 10", [(0, 10)]),
        (f"ledgerId = {uuid.ledger_id}", [(uuid.scope_id, uuid.ledger_id)]),
        (f"ledgerScopeId >= {2**63}", []),
        ("ledgerId < 0", []),
    ):
        found = reader.load(str(tmp_path)).where(condition).groupBy("ledgerScopeId", "ledgerId").count()
        assert sorted(tuple(row) for row in found.collect()) == [(*ids, 20) for ids in ledgers]
        # Spark has nothing left to filter.
        assert "Filter (" not in found._jdf.queryExecution().optimizedPlan().toString()
    ordered = reader.load(str(tmp_path)).select("ledgerId").distinct().orderBy("ledgerId").collect()
    assert [row.ledgerId for row in ordered] == [2, 10, uuid.ledger_id]


def test_plan_shows_pushed_filters_on_request(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    log(tmp_path / "current" / "0.log", LedgerId(0, 5), 20)
    reader = spark.read.format("bookkeeper.entrylog")

    def pushed() -> str:
        frame = reader.load(str(tmp_path)).where("ledgerId = 5 and entryId < 7 and recordSize > 9")
        assert frame.count() == 7
        frame.explain("formatted")
        return "".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("PushedFilters: [I"))

    assert pushed() == ""
    reader.option("pushdown", "true")
    line = pushed()
    assert "EqualTo(ledgerId,5)" in line
    assert "LessThan(entryId,7)" in line
    assert "GreaterThan(recordSize" not in line


def test_queries_of_one_frame_do_not_limit_each_other(spark: SparkSession, tmp_path: Path) -> None:
    for number in range(3):
        log(tmp_path / "current" / f"{number}.log", LedgerId(0, number), 10)
    frame = spark.read.format("bookkeeper.entrylog").load(str(tmp_path))
    frame.createOrReplaceTempView("same_records")
    assert frame.where("ledgerId = 1").count() == 10
    assert frame.count() == 30
    assert frame.where("ledgerId = 1").union(frame.where("ledgerId = 2")).count() == 20
    both = "select * from same_records where ledgerId = {} and entryId < {}"
    assert spark.sql(f"{both.format(0, 3)} union all {both.format(2, 9)}").count() == 12
    assert spark.table("same_records").count() == 30


def test_sessions_without_pushdown_read_all_sources(spark: SparkSession, tmp_path: Path) -> None:
    log(tmp_path / "current" / "0.log", LedgerId(0, 5), 20)
    spark.conf.set(PUSHDOWN, "false")
    try:
        assert spark.read.format("bookkeeper.entrylog").load(str(tmp_path)).where("entryId < 3").count() == 3
    finally:
        spark.conf.set(PUSHDOWN, "true")


def caught(frame: DataFrame) -> BkctlError | None:
    with pytest.raises(Exception) as found:  # noqa: PT011 (which class of Spark's it is, is Spark's business)
        frame.collect()
    return source_error(found.value)


def test_errors_come_back_as_errors_of_bkctl(spark: SparkSession, tmp_path: Path) -> None:
    path = log(tmp_path / "current" / "0.log", LedgerId(0, 5), 100)
    reader = spark.read.format("bookkeeper.entrylog")
    with pytest.raises(Exception) as found:  # noqa: PT011
        reader.option("colums", "entryId").load(str(path))
    error = source_error(found.value)
    assert isinstance(error, UsageError)
    assert "did you mean columns" in str(error)
    missing = caught(spark.read.format("bookkeeper.entrylog").load(str(tmp_path / "none")))
    assert isinstance(missing, NotFound)
    assert str(missing) == f"{tmp_path / 'none'} does not exist"

    with path.open("ab") as file:
        file.write(struct.pack(">i", -9) + bytes(60))
    damaged = caught(spark.read.format("bookkeeper.entrylog").load(str(path)))
    assert isinstance(damaged, CorruptRecord)
    assert "Record has length -9" in str(damaged)
    permissive = spark.read.format("bookkeeper.entrylog").option("mode", "permissive").load(str(path))
    assert permissive.where("damage is null").count() == 100
    (row,) = permissive.where("damage is not null").select("damage.*").collect()
    assert (row.file, row.offset) == (str(path), path.stat().st_size - 64)
    assert source_error(ValueError("something else")) is None


def test_file_changed_after_plan_fails_the_job(spark: SparkSession, tmp_path: Path) -> None:
    path = log(tmp_path / "0.log", LedgerId(0, 5), 100)
    frame = spark.read.format("bookkeeper.entrylog").load(str(path))
    frame.rdd.getNumPartitions()  # Now it is planned.
    log(path, LedgerId(0, 6), 100)
    assert isinstance(caught(frame), Conflict)


def test_empty_directory_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "0.log").touch()
    assert spark.read.format("bookkeeper.entrylog").load(str(tmp_path)).count() == 0
