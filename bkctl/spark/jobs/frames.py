"""Helpers for DataFrames that jobs share: rows made in tasks, ledger ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from bkctl.spark import functions as F
from bkctl.spark.schemas import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUALIFIED_NAME: Final = "ledgerQualifiedName"
#: One entry on one bookie.
REPLICA: Final = ("bookieId", QUALIFIED_NAME, "entryId")
_SLOTS_MAX: Final = 10_000


def frame_of(spark: SparkSession, rows: Iterable[Sequence[Any]], schema: str) -> DataFrame:
    """Return rows of this process as a DataFrame; unlike `createDataFrame` of a list, it takes no job of tasks."""
    arrow = arrow_schema(schema)
    columns = list(zip(*rows, strict=True)) or [()] * len(arrow)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, arrow, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=arrow), schema)


def task_slots(spark: SparkSession) -> int:
    """Return how many tasks run at a time, Spark's default parallelism."""
    context = getattr(spark, "sparkContext", None)
    if context is not None:
        return int(context.defaultParallelism)
    # A client of Spark Connect has no context. By default a range has as many partitions.
    return spark.range(_SLOTS_MAX).select(F.spark_partition_id()).distinct().count()


def rows_in_tasks(spark: SparkSession, items: Sequence[Any], function: Any, schema: str) -> DataFrame:
    """Return the rows (dicts) that `function` yields for each item, one task an item; items are plain values."""
    count, arrow = len(items), arrow_schema(schema)

    def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield pa.RecordBatch.from_pylist(list(function(items[number])), schema=arrow)

    return spark.range(0, count, 1, max(count, 1)).mapInArrow(rows_of, schema)


def with_ledger_ids(frame: DataFrame) -> DataFrame:
    """Return `frame` with ledgerScopeId and ledgerId, computed from ledgerQualifiedName, as its first columns."""
    scope_id = F.conv(F.substring(QUALIFIED_NAME, 1, 16), 16, 10).alias("ledgerScopeId")
    ledger_id = F.conv(F.substring(QUALIFIED_NAME, 17, 16), 16, 10).alias("ledgerId")
    return frame.select(
        scope_id, ledger_id, QUALIFIED_NAME, *(name for name in frame.columns if name != QUALIFIED_NAME)
    )
