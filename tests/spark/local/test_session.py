"""The local engine: PySpark's columns and frames on DuckDB, errors of sources, types."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import golden
from support.engines import Engine, on_both_engines
from support.source_rows import struct_of

from bkctl.errors import BkctlError, Corrupt, NotFound
from bkctl.spark.engine import functions_of
from bkctl.spark.facts import tables
from bkctl.spark.local.session import LocalSession, local_session
from bkctl.spark.sources.columns import TYPES, arrow_schema, arrow_schema_of, ddl
from bkctl.spark.sources.records import RecordSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOG = next(iter(golden.GoldenBookie("4.18.0", "sorted").entry_logs))


@pytest.fixture
def session() -> Iterator[LocalSession]:
    with local_session() as found:
        yield found


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A directory of a bookie with a copy of one log."""
    current = tmp_path / "ledgers" / "current"
    current.mkdir(parents=True)
    shutil.copy(LOG, current / "0.log")
    return current.parent


@on_both_engines
def test_expressions_give_the_same_values_on_both_engines(engine: Engine) -> None:
    import pyarrow as pa

    F = functions_of(engine.session)
    ddl_text = "k string, n bigint, m bigint, s struct<a:bigint,b:string>, l array<bigint>"
    rows = [
        {"k": "00000000000000ff", "n": 5, "m": None, "s": {"a": 1, "b": None}, "l": [3, 1, 2]},
        {"k": "00000000000000ff", "n": -7, "m": 2, "s": {"a": 1, "b": "x"}, "l": []},
        {"k": "ffffffffffffffff", "n": None, "m": 3, "s": None, "l": [9]},
        {"k": "it's", "n": 2**62, "m": 2**62, "s": {"a": 0, "b": "y"}, "l": [None, 4]},
    ]
    frame = engine.session.createDataFrame(pa.Table.from_pylist(rows, arrow_schema(ddl_text)), ddl_text)
    is_hex = F.col("k") != "it's"
    chosen = frame.select(
        "n",
        F.when(is_hex, F.conv(F.when(is_hex, F.col("k")), 16, 10)).alias("decimal"),
        F.coalesce("m", F.lit(0)).alias("filled"),
        F.least("n", F.col("m") - 1).alias("least"),
        F.pmod(F.col("n"), F.lit(3)).alias("rest"),
        F.floor(F.col("n") / 2).alias("half"),
        (F.col("n").isin(5, 6) | F.col("k").startswith("ff")).alias("chosen"),
        F.col("n").eqNullSafe(F.col("m")).alias("same"),
        F.col("s.b").alias("b"),
        F.col("s")["a"].alias("a"),
        F.size("l").cast("bigint").alias("size"),
        F.get("l", F.lit(1)).alias("second"),
        F.array_max("l").alias("largest"),
        F.transform(F.filter("l", lambda x: x > 1), lambda x, at: x * 10 + at).alias("moved"),
        F.concat("l", F.sequence(F.lit(1).cast("bigint"), F.lit(3).cast("bigint"))).alias("joined"),
        F.lpad(F.substring("k", 1, 2), 4, "0").alias("padded"),
        F.concat_ws("/", "k", F.col("s.b")).alias("path"),
    )  # fmt: skip
    assert [row.asDict() for row in chosen.orderBy("n").collect()] == [
        {"n": None, "decimal": str(2**64 - 1), "filled": 3, "least": 2, "rest": None, "half": None, "chosen": True,
         "same": False, "b": None, "a": None, "size": 1, "second": None, "largest": 9, "moved": [90],
         "joined": [9, 1, 2, 3], "padded": "00ff", "path": "ffffffffffffffff"},
        {"n": -7, "decimal": "255", "filled": 2, "least": -7, "rest": 2, "half": -4, "chosen": False, "same": False,
         "b": "x", "a": 1, "size": 0, "second": None, "largest": None, "moved": [], "joined": [1, 2, 3],
         "padded": "0000", "path": "00000000000000ff/x"},
        {"n": 5, "decimal": "255", "filled": 0, "least": 5, "rest": 2, "half": 2, "chosen": True, "same": False,
         "b": None, "a": 1, "size": 3, "second": 1, "largest": 3, "moved": [30, 21], "joined": [3, 1, 2, 1, 2, 3],
         "padded": "0000", "path": "00000000000000ff"},
        {"n": 2**62, "decimal": None, "filled": 2**62, "least": 2**62 - 1, "rest": 2**62 % 3, "half": 2**61,
         "chosen": False, "same": True, "b": "y", "a": 0, "size": 2, "second": 4, "largest": 4, "moved": [40],
         "joined": [None, 4, 1, 2, 3], "padded": "00it", "path": "it's/y"},
    ]  # fmt: skip
    grouped = frame.groupBy("k").agg(
        F.sum("n").alias("sum"), F.count("m").alias("count"), F.count_distinct("k", "n").alias("distinct"),
        F.size(F.collect_set("s")).cast("bigint").alias("structs"), F.max("s").alias("newest"),
        F.first("m", ignorenulls=True).alias("first"),
    )  # fmt: skip
    names = ("k", "sum", "count", "distinct", "structs", "first")
    values = [row.asDict() for row in grouped.orderBy(F.desc("sum")).collect()]
    assert [[row[name] for name in names] for row in values] == [
        ["it's", 2**62, 1, 1, 1, 2**62], ["00000000000000ff", -2, 1, 2, 2, 2], ["ffffffffffffffff", None, 1, 0, 0, 3],
    ]  # fmt: skip
    assert [row["newest"] and row["newest"]["b"] for row in values][::2] == ["y", None]
    joined = frame.select("k", "n").join(frame.groupBy("k").agg(F.count("*").alias("rows")), "k", "full_outer")
    assert joined.columns == ["k", "n", "rows"]
    assert joined.filter("rows = 2 AND n IS NOT NULL").count() == 2
    assert joined.join(frame.filter("n < 0"), ["k"], "left_anti").count() == 2


def test_error_of_a_source_keeps_its_class_and_message(session: LocalSession, logs: Path) -> None:
    log = logs / "current" / "0.log"
    data = bytearray(log.read_bytes())
    data[1024:1028] = b"\xff\xff\xff\x00"
    log.write_bytes(data)
    frame = session.read.format("bookkeeper.entrylog").load([str(logs)])
    with pytest.raises(Corrupt, match=r"0\.log: Record has length -256 at byte 1024"):
        frame.count()


@pytest.mark.parametrize("mode", ["failfast", "permissive"])
def test_log_deleted_after_the_plan_is_an_error_or_damage(
    session: LocalSession, logs: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    plan = RecordSource.partitions

    def planned(reader: RecordSource) -> Any:
        parts = plan(reader)
        (logs / "current" / "0.log").unlink()
        return parts

    monkeypatch.setattr(RecordSource, "partitions", planned)
    frame = session.read.format("bookkeeper.entrylog").options(mode=mode).load([str(logs)])
    words = "0.log was deleted after the plan was made"
    if mode == "failfast":
        with pytest.raises(NotFound, match=words):
            frame.collect()
    else:
        (row,) = frame.collect()
        assert words in row.damage["reason"]


def test_failure_of_the_engine_names_the_way_to_spark(session: LocalSession) -> None:
    F = functions_of(session)
    numbers = session.range(0, 3)
    with pytest.raises(BkctlError, match=r"DuckDB: .*; run the job on Spark: add --master local\[\*\]"):
        numbers.select(F.col("nothing")).collect()
    assert numbers.count() == 3


@pytest.mark.parametrize("reaches", ["the process", "the thread that reads"])
def test_interrupt_ends_a_query_that_reads(session: LocalSession, reaches: str) -> None:
    import pyarrow as pa

    def endless() -> Iterator[pa.RecordBatch]:
        if reaches == "the process":
            os.kill(os.getpid(), signal.SIGINT)
        else:  # the waiting thread is not woken, as for an interrupt that comes just before it waits
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        while True:
            yield pa.record_batch({"id": pa.array(range(1000), pa.int64())})

    frame = session.frame_of(arrow_schema("id bigint"), endless, is_stream=True)
    with pytest.raises(KeyboardInterrupt):
        frame.count()
    assert session.range(0, 3).count() == 3


def test_persisted_rows_are_read_once_and_freed(session: LocalSession) -> None:
    runs = 0

    def noted(batches: Any) -> Any:
        nonlocal runs
        runs += 1
        yield from batches

    F = functions_of(session)
    frame = session.range(0, 5).mapInArrow(noted, "id bigint")
    doubled = frame.withColumn("id", F.col("id") * 2).persist()
    assert (runs, doubled.columns) == (0, ["id"])
    assert [row.id for row in doubled.orderBy(F.desc("id")).collect()] == [8, 6, 4, 2, 0]
    assert doubled.count() == 5
    doubled.unpersist()
    assert [row[0] for row in doubled.limit(2).collect()] == [0, 2]
    assert runs == 1


def test_each_session_and_frame_has_the_functions_of_its_engine(spark: SparkSession, session: LocalSession) -> None:
    """Both engines may run jobs at the same time: no choice of functions is kept for the process."""
    from pyspark.sql import Column

    for of_spark, of_local in ((spark, session), (spark.range(3), session.range(0, 3))):
        assert isinstance(functions_of(of_spark).col("id"), Column)
        assert not isinstance(functions_of(of_local).col("id"), Column)
    sums = [
        frame.agg(functions_of(frame).sum("id").alias("sum")).collect()[0].sum
        for frame in (spark.range(3), session.range(0, 3), spark.range(4))
    ]
    assert sums == [3, 3, 6]


def test_types_of_sources_are_the_ones_of_spark() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    known = [name for name, kind in TYPES.items() if "<" not in kind or kind.startswith("struct")]
    plain = [name for name in known if TYPES[name] != "timestamp"]
    struct = struct_of(ddl(plain))
    assert arrow_schema_of(struct) == arrow_schema(ddl(plain)) == to_arrow_schema(struct)
    nested = arrow_schema("`a` array<struct<x:bigint,y:array<string>>>, `m` map<string,binary>, `d` decimal(20,0)")
    assert [str(kind).replace("item", "element") for kind in nested.types] == [
        "list<element: struct<x: int64, y: list<element: string>>>", "map<string, binary>", "decimal128(20, 0)",
    ]  # fmt: skip
    assert str(tables.arrow_schema("parts").field("startedAt").type) == "timestamp[us, tz=UTC]"


#: Runs the command where neither PySpark nor Java can be found.
WITHOUT_SPARK = """
import sys
class Missing:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("pyspark", "py4j", "pandas"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Missing())
from bkctl.__main__ import main
sys.argv[0] = "bkctl"
main()
"""


def test_jobs_need_neither_pyspark_nor_java(tmp_path: Path) -> None:
    from support.bookie_files import make

    files = make(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PATH")}
    environment["PATH"] = str(tmp_path)

    def run(*arguments: object) -> str:
        command = [sys.executable, "-c", WITHOUT_SPARK, "pipeline", *arguments, "-u", files.uri, "-o", "ndjson"]
        done = subprocess.run(
            [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    facts, page = tmp_path / "facts", tmp_path / "report.html"
    run("extract", files.directory, facts)
    for job in (
        ["inventory", "--by", "ledger"], ["inventory", "--by", "application"], ["integrity"], ["garbage"],
        ["journal-audit"],
    ):  # fmt: skip
        from_files = run(*job, files.directory)
        assert from_files or job == ["integrity"]
        assert run(*job, "--facts", facts) == from_files
    run("report", files.directory, "--save", page)
    assert "<h2>Integrity</h2>" in page.read_text()
