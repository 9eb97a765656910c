"""The job `migrate-scope`: copies of ledgers in another scope, under the same ledger ids."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from bkctl.errors import BkctlError, LedgerNotFound, UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.spark.jobs.copying import (
    FAILED,
    OPEN,
    PLANNED,
    RESULT_SCHEMA,
    SHAPE_OPTIONS,
    CopyResult,
    check_store,
    copy_ledger,
    refuse_speculation,
    result_batch,
)
from bkctl.spark.jobs.frames import frame_of, task_slots
from bkctl.spark.sources.connection import CONNECTION_OPTIONS, Client, ClusterOptions
from bkctl.spark.sources.options import SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Partitions for each core of the executors: more than one, so that the longest ledgers delay the job less.
_TASKS_PER_CORE: Final = 4
#: Cost of a ledger beside its entries.
_LEDGER_WEIGHT_BYTES: Final = 64 << 10

#: A ledger to copy: its weight in bytes, source and target.
_Work = tuple[int, LedgerId, LedgerId]


def migrate_scope(
    spark: SparkSession,
    options: Mapping[str, str],
    to_scope_id: int,
    *,
    from_scope_id: int | None = None,
    ledgers: Sequence[LedgerId] = (),
    dry_run: bool = False,
    task_count: int | None = None,
) -> DataFrame:
    """Copy `ledgers`, or all ledgers of a scope, to the scope `to_scope_id`, under the same ledger ids; one row each.

    `options` are the connection's and SHAPE_OPTIONS. The sources stay. A ledger that is not closed is not copied
    (`open`). If a copy fails otherwise (`failed`, with a `message`), the job continues with the next one; only an
    unreachable metadata store ends the job. Columns: RESULT_COLUMNS.
    Raises UsageError if two ledgers would get the same id, or one is in that scope already; and as refuse_speculation.
    """
    checked = SourceOptions("migrate-scope", options, (*CONNECTION_OPTIONS, *SHAPE_OPTIONS))
    connection = ClusterOptions(checked)
    if not ledgers and from_scope_id is None:
        raise UsageError("No ledgers to copy are given", hint="name ledgers, or the scope that they are in")
    if not dry_run:
        refuse_speculation(spark)
    with connection.open() as cluster:
        listed = ledgers or cluster.ledgers.ledgers(from_scope_id)
        results, work = _plan(cluster, listed, to_scope_id, named=bool(ledgers), dry_run=dry_run)
    rows = [result.row() for result in results]
    if work:
        bins = _even_bins(work, task_count or task_slots(spark) * _TASKS_PER_CORE)
        tasks = spark.range(0, len(bins), 1, len(bins))
        copied = tasks.mapInArrow(partial(_copy_bins, checked, bins), RESULT_SCHEMA)
        rows += [tuple(row) for row in copied.collect()]
    rows.sort(key=lambda row: row[0])
    return frame_of(spark, rows, RESULT_SCHEMA)


def _plan(
    cluster: Cluster, ledgers: Iterable[LedgerId], to_scope_id: int, *, named: bool, dry_run: bool
) -> tuple[list[CopyResult], list[_Work]]:
    """Return the results that need no copy, and the ledgers to copy. A `named` ledger must exist. Raises UsageError."""
    results: list[CopyResult] = []
    work: list[_Work] = []
    targets: dict[LedgerId, LedgerId] = {}
    for source, found in cluster.ledgers.read_many(ledgers):
        target = LedgerId(to_scope_id, source.ledger_id)
        if source == target:
            raise UsageError(f"Ledger {source} is in scope {to_scope_id} already")
        if (rival := targets.setdefault(target, source)) != source:
            raise UsageError(f"Ledgers {rival} and {source} would both become {target}", hint="copy them apart")
        if isinstance(found, LedgerNotFound) and not named:
            continue  # Deleted since it was listed.
        if isinstance(found, BkctlError):
            results.append(CopyResult(source, target, FAILED, message=str(found)))
        elif not found.metadata.is_closed:
            results.append(CopyResult(source, target, OPEN, message=f"Ledger {source} is not closed"))
        elif dry_run:
            metadata = found.metadata
            results.append(CopyResult(source, target, PLANNED, metadata.last_entry_id + 1, metadata.length))
        else:
            work.append((found.metadata.length + _LEDGER_WEIGHT_BYTES, source, target))
    return results, work


def _even_bins(work: Collection[_Work], count: int) -> list[list[tuple[LedgerId, LedgerId]]]:
    """Return at most `count` lists of about the same weight."""
    bins: list[list[tuple[LedgerId, LedgerId]]] = [[] for _ in range(min(count, len(work)))]
    weights = [(0, at) for at in range(len(bins))]
    for weight, source, target in sorted(work, reverse=True):
        total, at = heapq.heappop(weights)
        bins[at].append((source, target))
        heapq.heappush(weights, (total + weight, at))
    return bins


def _copy_bins(
    options: SourceOptions, bins: list[list[tuple[LedgerId, LedgerId]]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Copy the ledgers of the bins that `batches` number; one row a ledger.

    Raises Unreachable if the metadata store is unreachable. Unreachable bookies fail only the ledgers that need them.
    """
    for batch in batches:
        for at in batch.column(0).to_pylist():
            with Client(ClusterOptions(options)) as client:
                for source, target in bins[at]:
                    try:
                        result = client.run(copy_ledger(client, source, target, options))
                    except BkctlError as error:
                        check_store(client, error)
                        result = CopyResult(source, target, FAILED, message=str(error))
                    yield result_batch([result])
