"""The stream of `bookkeeper.ledger`: offsets, ledgers that come and go, limits; no restart loses or repeats entries."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.servers import wait_for
from support.source_rows import struct_of

from bkctl.errors import LedgerNotFound, UsageError
from bkctl.ids import LedgerId
from bkctl.spark.sources.ledger_source import LedgerSource
from bkctl.spark.sources.ledger_stream import LedgerStreamReader, allot, latest_offsets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from support.live_ledgers import Live

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

SCOPE = 0x57EA3
COLUMNS = "ledgerQualifiedName,entryId,payload"
ALL = ReadAllAvailable()


class Stream:
    """A stream without Spark; each new instance continues at the last offset."""

    def __init__(self, live: Live, **options: object) -> None:
        self._options = {**live.options, "columns": COLUMNS, **{name: str(value) for name, value in options.items()}}
        self._stack = contextlib.ExitStack()
        self.restart()
        self.offset = self.reader.initialOffset()

    def restart(self) -> None:
        self._stack.close()
        source = LedgerSource(self._options)
        self.reader: LedgerStreamReader = source.streamReader(struct_of(source.schema()))
        self._stack.callback(self.reader.stop)

    def batch(self, limit: ReadLimit | None = None) -> list[tuple[LedgerId, int]]:
        """Return the rows of the next batch, read twice, like a batch that was not committed."""
        given = self.reader.getDefaultReadLimit() if limit is None else limit
        end = json.loads(json.dumps(self.reader.latestOffset(self.offset, given)))
        first, again = self._rows(end), self._rows(end)
        assert first == again
        self.offset = end
        return first

    def _rows(self, end: dict[str, Any]) -> list[tuple[LedgerId, int]]:
        source = LedgerSource(self._options)
        found = []
        for part in pickle.loads(pickle.dumps(self.reader.partitions(self.offset, end))):
            # Tasks get a reader of their own, which knows nothing of the batches.
            for batch in pickle.loads(pickle.dumps(source.streamReader(struct_of(source.schema())))).read(part):
                for row in batch.to_pylist():
                    ledger = LedgerId.parse(row["ledgerQualifiedName"])
                    assert row["payload"] == b"%d" % row["entryId"]
                    found.append((ledger, row["entryId"]))
        return found

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def stream(live: Live) -> Iterator[Any]:
    made: list[Stream] = []

    def make(**options: object) -> Stream:
        made.append(Stream(live, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


def test_stream_follows_ledgers_until_they_close(live: Live, stream: Any) -> None:
    scope = SCOPE + 1
    one = live.open(LedgerId(scope, 1))
    one.add(numbered(0, 2))
    followed = stream(ledgerScopeId=scope, entriesPerPartition=2)
    assert followed.batch() == [(one.ledger, 0), (one.ledger, 1), (one.ledger, 2)]
    before = followed.offset
    assert followed.batch() == []
    assert followed.offset == before

    two = live.open(LedgerId(scope, 2))  # New, and without an entry: nothing to write down.
    assert followed.batch() == []
    assert followed.offset == before
    two.add(numbered(0, 1))
    one.add(numbered(3, 3))
    followed.restart()
    assert followed.batch() == [(one.ledger, 3), (two.ledger, 0), (two.ledger, 1)]
    one.close()
    assert followed.batch() == []
    assert followed.offset == {
        "open": {two.ledger.qualified_name: 2}, "closed": {one.ledger.qualified_name: 4}
    }  # fmt: skip
    two.add(numbered(2, 2), confirm=False)  # Confirmed by being closed.
    two.close()
    three = live.write(numbered(0, 0), LedgerId(scope, 3))
    live.write([], LedgerId(scope, 4))
    assert followed.batch() == [(two.ledger, 2), (three, 0)]
    # A ledger that was read to its end may be deleted.
    live.client().cluster.ledgers.remove(one.ledger)
    before = followed.offset
    assert followed.batch() == []
    assert followed.offset == before
    live.write(numbered(0, 0), LedgerId(scope, 5))
    assert followed.batch() == [(LedgerId(scope, 5), 0)]
    assert one.ledger.qualified_name not in followed.offset["closed"]


def test_offsets_fold_finished_ledgers(live: Live, stream: Any) -> None:
    scope = SCOPE + 7
    names = [LedgerId(scope, number).qualified_name for number in range(40)]

    def write(first: int, last: int, **settings: Any) -> list[tuple[LedgerId, int]]:
        written = [live.write(numbered(0, 1), LedgerId(scope, each), **settings) for each in range(first, last + 1)]
        return [(ledger, number) for ledger in written for number in (0, 1)]

    topic = {"custom_metadata": {"topic": b"a"}}
    followed = stream(ledgerScopeId=scope, customMetadata="topic=a")
    wanted = write(10, 14, **topic)
    assert followed.batch() == wanted
    assert followed.offset == {"open": {}, "closed": dict.fromkeys(names[10:15], 2)}
    write(15, 15)  # Of another topic.
    for first in (16, 18, 20):
        followed.restart()
        wanted = write(first, first + 1, **topic)
        assert followed.batch() == wanted
        assert followed.batch() == []
    assert followed.offset["finished"] == [[names[10], names[19]]]
    assert list(followed.offset["closed"]) == names[20:22]
    # A gap stays open: its ids may be given yet.
    wanted = write(30, 31, **topic)
    assert followed.batch() == wanted
    wanted = write(8, 8, **topic) + write(25, 25, **topic)
    assert followed.batch() == wanted
    growing = live.open(LedgerId(scope, 32), **topic)
    growing.add(numbered(0, 2))
    assert followed.batch() == [(growing.ledger, number) for number in range(3)]
    assert followed.offset == {
        "open": {names[32]: 3}, "closed": {},
        "finished": [[names[8]] * 2, [names[10], names[21]], [names[25]] * 2, [names[30], names[31]]],
    }  # fmt: skip
    # Deleted ledgers leave the runs; nothing is read twice.
    for number in (8, 10, 15):
        live.client().cluster.ledgers.remove(LedgerId(scope, number))
    growing.add(numbered(3, 3))
    followed.restart()
    assert followed.batch() == [(growing.ledger, 3)]
    assert followed.offset["finished"][:2] == [[names[11], names[14]], [names[16], names[21]]]
    followed.reader.prepareForTriggerAvailableNow()
    assert followed.batch() == []


def test_batches_respect_limits(live: Live, stream: Any) -> None:
    scope = SCOPE + 2
    contents = {live.write(numbered(0, count - 1), LedgerId(scope, count)): count for count in (1, 20, 50)}
    wanted = {(ledger, number) for ledger, count in contents.items() for number in range(count)}
    for options, most in (({"maxEntriesPerTrigger": 9}, 9), ({"maxBytesPerTrigger": 30}, 30)):
        followed = stream(ledgerScopeId=scope, **options)
        found: list[tuple[LedgerId, int]] = []
        while batch := followed.batch():
            assert len(batch) <= most
            found += batch
        assert len(found) == len(wanted)
        assert set(found) == wanted
    both = stream(ledgerScopeId=scope, maxEntriesPerTrigger=9, maxBytesPerTrigger=4)
    assert [len(both.batch()), len(both.batch())] == [4, 4]
    unlimited = stream(ledgerScopeId=scope, maxEntriesPerTrigger=1)
    assert len(unlimited.batch(ALL)) == 71
    assert isinstance(unlimited.reader.getDefaultReadLimit(), ReadMaxRows)
    assert isinstance(stream(maxBytesPerTrigger="1k").reader.getDefaultReadLimit(), ReadMaxBytes)
    assert isinstance(stream().reader.getDefaultReadLimit(), ReadAllAvailable)


def test_available_now_ends_at_entries_of_its_start(live: Live, stream: Any) -> None:
    scope = SCOPE + 3
    growing = live.open(LedgerId(scope, 1))
    growing.add(numbered(0, 4))
    followed = stream(ledgerScopeId=scope, maxEntriesPerTrigger=2)
    followed.reader.prepareForTriggerAvailableNow()
    found = followed.batch()
    growing.add(numbered(5, 9))
    live.write(numbered(0, 3), LedgerId(scope, 2))
    while batch := followed.batch():
        found += batch
    assert found == [(growing.ledger, number) for number in range(5)]
    followed.restart()
    followed.reader.prepareForTriggerAvailableNow()
    while batch := followed.batch():
        found += batch
    assert len(found) == len(set(found)) == 14


def test_deleted_ledger_fails_or_is_skipped(live: Live, stream: Any) -> None:
    scope = SCOPE + 4
    gone, kept = live.write(numbered(0, 9), LedgerId(scope, 1)), live.write(numbered(0, 9), LedgerId(scope, 2))
    strict, lax = (
        stream(ledgerScopeId=scope, maxEntriesPerTrigger=4, failOnDataLoss=value) for value in ("true", "false")
    )
    assert strict.batch() == lax.batch() == [(gone, 0), (gone, 1), (kept, 0), (kept, 1)]
    planned = {each: each.reader.latestOffset(each.offset, ALL) for each in (strict, lax)}
    live.client().cluster.ledgers.remove(gone)
    for each, end in planned.items():  # The batch was planned before.
        reading = (row for part in each.reader.partitions(each.offset, end) for row in each.reader.read(part))
        if each is strict:
            with pytest.raises(LedgerNotFound):
                list(reading)
        else:
            assert sum(batch.num_rows for batch in reading) == 8
    with pytest.raises(LedgerNotFound, match="before it was read to its end; the next entry was 2"):
        strict.batch()
    assert lax.batch(ALL) == [(kept, number) for number in range(2, 10)]
    with pytest.raises(LedgerNotFound):
        stream(ledger=gone).batch()


def test_stream_starts_at_latest_offsets(live: Live, stream: Any) -> None:
    scope = SCOPE + 5
    growing = live.open(LedgerId(scope, 1), custom_metadata={"topic": b"a"})
    growing.add(numbered(0, 4))
    live.write(numbered(0, 3), LedgerId(scope, 2), custom_metadata={"topic": b"a"})
    start = latest_offsets({**live.options, "ledgerScopeId": str(scope)})
    growing.add(numbered(5, 6))
    live.write(numbered(0, 0), LedgerId(scope, 3), custom_metadata={"topic": b"b"})
    followed = stream(ledgerScopeId=scope, startingOffsets=start)
    assert followed.batch() == [(growing.ledger, 5), (growing.ledger, 6), (LedgerId(scope, 3), 0)]
    assert followed.reader.initialOffset() == json.loads(start)
    only = stream(ledgerScopeId=scope, customMetadata="topic=b")
    assert only.batch() == [(LedgerId(scope, 3), 0)]


@pytest.mark.parametrize(
    "text",
    ["latest", "[]", '{"finished": [["x", "y"]]}', '{"open": {"x": 1}}', '{"open": {}, "more": {}}', '{"open": 5}'],
)
def test_invalid_starting_offset_is_refused(live: Live, stream: Any, text: str) -> None:
    with pytest.raises(UsageError, match="offset"):
        stream(startingOffsets=text)


def test_allotted_shares_are_fair() -> None:
    waiting, sizes = {"a": 1, "b": 100, "c": 100}, {"a": 10, "b": 1, "c": 50}
    assert allot(waiting, sizes, None, None) == waiting
    assert allot(waiting, sizes, 21, None) == {"a": 1, "b": 10, "c": 10}
    assert allot(waiting, sizes, 2, None) == {"a": 0, "b": 1, "c": 1}
    assert allot(waiting, sizes, None, 210) == {"a": 1, "b": 100, "c": 2}
    assert allot(waiting, sizes, None, 1) == {"a": 0, "b": 0, "c": 1}
    assert allot({}, {}, 5, 5) == {}


# --- through Spark ----------------------------------------------------------------------------------------------------

#: Follows a scope into Parquet, and stops in the middle of the batch that has the entry `stop here`.
FOLLOW = """
import os, sys, time
from pathlib import Path
from pyspark.sql import SparkSession, functions as F
from bkctl.spark.sources import register

uri, scope, directory = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.memory", "512m")
spark = builder.config("spark.local.dir", f"{directory}/local").getOrCreate()
register(spark)

@F.udf("string")
def shown(payload):
    if bytes(payload) == b"stop here":
        Path(directory, "reached").touch()
        time.sleep(600)
    return bytes(payload).decode()

rows = spark.readStream.format("bookkeeper.ledger").options(
    metadataUri=uri, ledgerScopeId=scope, maxEntriesPerTrigger="10", entriesPerPartition="5").load()
rows = rows.select("ledgerQualifiedName", "entryId", shown("payload").alias("payload"))
writer = rows.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
writer.start(f"{directory}/out").awaitTermination()
"""


@pytest.mark.long
def test_killed_query_neither_loses_nor_repeats_entries(spark: SparkSession, live: Live, tmp_path: Path) -> None:
    scope = SCOPE + 6
    growing = live.open(LedgerId(scope, 1))
    growing.add([*numbered(0, 11), b"stop here", *numbered(13, 24)])
    other = live.write(numbered(0, 9), LedgerId(scope, 2))
    script, log = tmp_path / "follow.py", tmp_path / "follow.log"
    script.write_text(FOLLOW)
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    arguments = [sys.executable, str(script), live.uri, str(scope), str(tmp_path)]
    with log.open("wb") as output:
        query = subprocess.Popen(
            arguments, stdout=output, stderr=output, env=environment, start_new_session=True, cwd=tmp_path
        )
    try:
        wait_for(
            lambda: (tmp_path / "reached").exists() or query.poll() is not None,
            "a batch to be under way",
            timeout_s=240,
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(query.pid, signal.SIGKILL)
        query.wait()
    assert (tmp_path / "reached").exists(), log.read_text(errors="replace")[-4000:]
    committed = spark.read.parquet(str(tmp_path / "out")).count()
    assert 0 < committed < 30

    def follow(**options: str) -> None:
        rows: DataFrame = (
            spark.readStream.format("bookkeeper.ledger")
            .options(**live.options, ledgerScopeId=str(scope), entriesPerPartition="5", **options)
            .load()
            .selectExpr("ledgerQualifiedName", "entryId", "cast(payload as string) as payload")
        )
        started = rows.writeStream.format("parquet").trigger(availableNow=True)
        started = started.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = started.start(str(tmp_path / "out"))
        try:
            assert query.awaitTermination(240)
        finally:
            query.stop()

    def written() -> list[tuple[int, int, str]]:
        rows = spark.read.parquet(str(tmp_path / "out")).collect()
        return sorted((LedgerId.parse(row[0]).ledger_id, row[1], row[2]) for row in rows)

    texts = {12: "stop here"}
    first = [(1, number, texts.get(number, str(number))) for number in range(25)]
    rest = [(other.ledger_id, number, str(number)) for number in range(10)]
    follow(maxEntriesPerTrigger="20")
    assert written() == first + rest
    growing.add(numbered(25, 29))
    live.write(numbered(0, 2), LedgerId(scope, 3))
    follow()
    first += [(1, number, str(number)) for number in range(25, 30)]
    rest += [(3, number, str(number)) for number in range(3)]
    assert written() == first + rest
