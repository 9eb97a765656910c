"""The sink of streams: each batch counts once, whatever is repeated and whoever dies."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.source_rows import struct_of

from bkctl.client.write_handle import WriteHandle
from bkctl.errors import Conflict, NotEnoughBookies, UsageError
from bkctl.ids import LedgerId
from bkctl.spark.sources.ledger_sink import JOB_KEY, LedgerWriter, LedgerWritten
from bkctl.spark.sources.ledger_source import LedgerSource
from bkctl.spark.sources.ledger_stream_sink import LedgerStreamWriter, committed_ledgers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.live_ledgers import Live

import pyarrow as pa

SCOPE = 0x517EA


def options(live: Live, scope_id: int) -> dict[str, str]:
    return {**live.options, "ensembleSize": "2", "ledgerScopeId": str(scope_id)}


class Query:
    """A streaming query without Spark: its tasks, and commits by a writer of their own, as Spark makes it."""

    def __init__(self, live: Live, scope_id: int, name: str = "query") -> None:
        self._live, self._options, self._name, self.scope_id = live, options(live, scope_id), name, scope_id

    @property
    def writer(self) -> LedgerStreamWriter:
        made = LedgerSource(self._options).streamWriter(struct_of("`payload` binary"), False)
        return pickle.loads(pickle.dumps(made))

    def task(self, batch: int, partition: int, *payloads: bytes) -> LedgerWritten:
        source = LedgerSource(self._options)
        writer = LedgerWriter(source, struct_of("`payload` binary"), False, batch=batch)
        written = writer.write(rows(*payloads))
        written.partition = partition
        return pickle.loads(pickle.dumps(replace(written, query=self._name)))

    def contents(self) -> list[tuple[int, list[bytes]]]:
        found = committed_ledgers({**self._live.options, "ledgerScopeId": str(self.scope_id)})
        data = {each for each in self._live.ledgers(self.scope_id) if each.ledger_id >= 1 << 32}
        assert data == {each.ledger for each in found}
        return [(each.batch, self._live.read(each.ledger)) for each in found]


def rows(*payloads: bytes) -> Iterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pydict({"payload": pa.array(payloads, pa.binary())})


def test_repeated_batches_count_once(live: Live) -> None:
    query = Query(live, SCOPE)
    lost, first, second, empty = (
        query.task(0, 0, b"lost"), query.task(0, 1, b"b"), query.task(0, 0, b"a"), query.task(0, 2)
    )  # fmt: skip
    assert lost.ledger != second.ledger
    query.writer.commit([first, empty, second, None], 0)
    assert query.contents() == [(0, [b"a"]), (0, [b"b"])]
    # Spark did not learn of the commit, and repeats the batch with the same rows.
    query.writer.commit([query.task(0, 0, b"a", b"b")], 0)
    assert query.contents() == [(0, [b"a"]), (0, [b"b"])]
    query.writer.commit([query.task(1, 0, b"c")], 1)
    query.writer.commit([query.task(2, 0)], 2)
    query.writer.commit([query.task(3, 0, b"d")], 3)
    assert query.contents() == [(0, [b"a"]), (0, [b"b"]), (1, [b"c"]), (3, [b"d"])]


def test_batch_of_a_driver_that_ended_does_not_count(live: Live) -> None:
    query = Query(live, SCOPE + 1)
    query.task(0, 0, b"a")
    # The record was begun, and is open.
    mark = {JOB_KEY: b"record-of-query"}
    live.open(LedgerId(SCOPE + 1, 0), custom_metadata=mark).add([b"not a name"])
    query.writer.commit([query.task(0, 0, b"again")], 0)
    assert query.contents() == [(0, [b"again"])]
    query.task(1, 0, b"x")
    query.writer.abort([None], 1)
    query.task(0, 0, b"x")
    query.writer.abort([None], 0)
    assert query.contents() == [(0, [b"again"])]


def test_record_cut_by_a_failure_does_not_count(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    query = Query(live, SCOPE + 6)
    ready = WriteHandle.ready

    async def failing(handle: WriteHandle) -> None:
        if handle.pending_count:
            await handle.flush()
            handle._pipeline._end(NotEnoughBookies("no bookie is left"))
            assert handle._closing is not None
            await handle._closing
        await ready(handle)

    tasks = [query.task(0, 0, b"a"), query.task(0, 1, b"b")]
    with monkeypatch.context() as patch:
        patch.setattr(WriteHandle, "ready", failing)
        with pytest.raises(NotEnoughBookies):
            query.writer.commit([*tasks], 0)
    record = live.client().cluster.ledgers.read(LedgerId(SCOPE + 6, 0)).metadata
    assert (record.is_closed, record.last_entry_id) == (True, 0)
    assert committed_ledgers(options(live, SCOPE + 6)) == []
    query.writer.commit([query.task(0, 0, b"a"), query.task(0, 1, b"b")], 0)
    assert query.contents() == [(0, [b"a"]), (0, [b"b"])]


def test_record_without_a_count_counts(live: Live) -> None:
    """A record of an earlier release."""
    query = Query(live, SCOPE + 7)
    written = query.task(0, 0, b"a").ledger
    assert written is not None
    name = LedgerId.from_value(written).qualified_name.encode()
    live.write([name], LedgerId(SCOPE + 7, 0), custom_metadata={JOB_KEY: b"record-of-query"})
    query.writer.commit([query.task(0, 0, b"a")], 0)
    assert query.contents() == [(0, [b"a"])]


def test_scope_of_another_query_is_refused(live: Live) -> None:
    query = Query(live, SCOPE + 2)
    query.writer.commit([query.task(0, 0, b"a")], 0)
    other = Query(live, SCOPE + 2, "other")
    with pytest.raises(Conflict, match="not a record of this query"):
        other.writer.commit([other.task(0, 0, b"b")], 0)
    live.write([b"x"], LedgerId(SCOPE + 3, 0))
    with pytest.raises(Conflict):
        Query(live, SCOPE + 3).writer.commit([], 0)


def test_invalid_options_are_refused(live: Live) -> None:
    schema = struct_of("`payload` binary")
    with pytest.raises(UsageError, match="scope of its own"):
        LedgerSource(live.options).streamWriter(schema, False)
    with pytest.raises(UsageError, match="complete"):
        LedgerSource(options(live, SCOPE)).streamWriter(schema, True)
    with pytest.raises(UsageError, match="names"):
        LedgerSource({**options(live, SCOPE), "names": "x"}).streamWriter(schema, False)
    with pytest.raises(UsageError, match="no column payload"):
        LedgerSource(options(live, SCOPE)).streamWriter(struct_of("`a` binary"), False)


def test_stream_is_written_once_through_spark(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    source = live.open(scope_id=SCOPE + 4)
    source.add([b"%d" % number for number in range(25)])

    def run() -> None:
        entries = spark.readStream.format("bookkeeper.ledger").options(
            **live.options, ledgerScopeId=str(SCOPE + 4), maxEntriesPerTrigger="10", entriesPerPartition="4"
        )
        started = entries.load().select("payload").writeStream.format("bookkeeper.ledger")
        started = started.options(**options(live, SCOPE + 5), checkpointLocation=str(tmp_path / "checkpoint"))
        query = started.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(600)
        finally:
            query.stop()

    written = Query(live, SCOPE + 5)

    def numbers() -> list[tuple[int, int]]:
        return [(batch, int(payload)) for batch, payloads in written.contents() for payload in payloads]

    run()
    expected = [(number // 10, number) for number in range(25)]
    assert numbers() == expected
    # As if the driver had ended after the sink's commit and before Spark's own: the last batch is repeated.
    (tmp_path / "checkpoint" / "commits" / "2").unlink()
    (tmp_path / "checkpoint" / "commits" / ".2.crc").unlink(missing_ok=True)
    source.add([b"25"])
    run()
    assert numbers() == [*expected, (3, 25)]
