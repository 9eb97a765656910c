"""The stream of `bookkeeper.ledger`: follows ledgers as they grow, and adds new ones of its scope or query.

    spark.readStream.format("bookkeeper.ledger").options(metadataUri="zk://host:2181/ledgers", ledgerScopeId="7").load()

An offset is a position in the data: the next entry of each ledger. Ledgers that are closed and read to their end are
folded with the next batch: into runs of adjacent ids, in which every ledger was read or is outside the query. Entries
between two offsets are confirmed, so they never change: a query that restarts from its checkpoint neither loses nor
repeats an entry.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from bkctl.errors import BkctlError, LedgerNotFound, UsageError
from bkctl.ids import LedgerId
from bkctl.spark.sources.ledgers import NAME, EntryRange, Extent, LedgerEntries, LedgerTable, cut
from bkctl.spark.sources.options import Client

#: Ledgers in an offset, which Spark saves at each batch.
LEDGERS_MAX: Final = 100_000
EARLIEST: Final = "earliest"


class Offset(NamedTuple):
    """The next entry of each ledger, by qualified name.

    Ledgers in `closed` are read to their end by the batch that ends here, those in the runs of `finished` (first and
    last name, in order) by batches before.
    """

    open: dict[str, int]
    closed: dict[str, int]
    finished: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Offset:
        """Return the offset that Spark saved. Raises UsageError if `value` is not an offset."""
        positions = [value.get(key, {}) for key in ("open", "closed")]
        runs = value.get("finished", [])
        is_valid = (
            not value.keys() - {"open", "closed", "finished"}
            and all(isinstance(part, dict) and all(map(_is_name, part)) for part in positions)
            and all(type(at) is int and 0 <= at <= 1 << 63 for part in positions for at in part.values())
            and isinstance(runs, list)
            and all(isinstance(run, list) and len(run) == 2 and all(map(_is_name, run)) for run in runs)
        )
        if not is_valid:
            raise UsageError(f"{NAME}: not an offset: {json.dumps(value)[:200]}")
        return cls(positions[0], positions[1], tuple((first, last) for first, last in runs))

    def to_json(self) -> dict[str, Any]:
        """Return the form that Spark saves."""
        found: dict[str, Any] = {
            "open": dict(sorted(self.open.items())), "closed": dict(sorted(self.closed.items())),
        }  # fmt: skip
        return {**found, "finished": [list(run) for run in self.finished]} if self.finished else found

    def is_done(self, name: str) -> bool:
        """Return whether the ledger is read to its end."""
        at = bisect_right(self.finished, name, key=lambda run: run[0]) - 1
        return name in self.closed or (at >= 0 and name <= self.finished[at][1])

    @property
    def next_entry_ids(self) -> dict[str, int]:
        """Return the next entry ids of all ledgers."""
        return {**self.open, **self.closed}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and len(name) == 32 and not name.strip("0123456789abcdef")


class LedgerStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads batches of a stream; no method needs Spark.

    Options beside the table's: `startingOffsets` (`earliest`, or the result of `latest_offsets`),
    `maxEntriesPerTrigger` and `maxBytesPerTrigger` (about).
    """

    def __init__(self, source: LedgerTable) -> None:
        self._source, options = source, source.checked
        self._entries_max = options.integer("maxEntriesPerTrigger", 0, 1) or None
        given = options.text("maxBytesPerTrigger")
        self._bytes_max = None if given is None else options.size_bytes("maxBytesPerTrigger", 1)
        self._start = _starting_offset(options.text("startingOffsets") or EARLIEST)
        self._client: Client | None = None
        #: Ledgers outside the query, and closed ones without entries; all ledgers of the last look, in order.
        self._passed_over: set[LedgerId] = set()
        self._listed: list[LedgerId] = []
        self._target: dict[str, Extent] | None = None
        self._seen: Offset | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query; always the same, since Spark may call again before it saves the offset."""
        return self._start.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of one batch that the options set."""
        if self._entries_max is not None:
            return ReadMaxRows(self._entries_max)
        return ReadAllAvailable() if self._bytes_max is None else ReadMaxBytes(self._bytes_max)

    def prepareForTriggerAvailableNow(self) -> None:
        """End the stream at the entries that exist now."""
        self._target = self.look(Offset({}, {}))

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch; `start` itself without new entries.

        Raises LedgerNotFound for a ledger that was deleted before it was read to its end, unless `failOnDataLoss` is
        false.
        """
        known = Offset.read(start)
        extents = self._target if self._target is not None else self.look(known)
        extents = {name: extent for name, extent in extents.items() if not known.is_done(name)}
        gone = sorted(known.open.keys() - extents.keys())
        if gone and self._source.fail_on_data_loss:
            ledger = LedgerId.from_value(int(gone[0], 16))
            more = f", and {len(gone) - 1} more ledgers," if len(gone) > 1 else ""
            raise LedgerNotFound(
                f"Ledger {ledger}{more} was deleted before it was read to its end; the next entry was "
                f"{known.open[gone[0]]}",
                hint="set failOnDataLoss to false to skip it",
            )
        at = known.open
        waiting = {name: each.next_entry_id - at.get(name, 0) for name, each in extents.items()}
        sizes = {name: each.entry_size for name, each in extents.items()}
        taken = allot({name: count for name, count in waiting.items() if count > 0}, sizes, *self._limits(limit))
        new = Offset({}, {})
        for name, extent in extents.items():
            next_id = at.get(name, 0) + taken.get(name, 0)
            done = extent.closed and next_id >= extent.next_entry_id
            if next_id:
                (new.closed if done else new.open)[name] = next_id
        self._seen = Offset({name: each.next_entry_id for name, each in extents.items()}, {})
        if not new.closed and new.open == {name: each for name, each in known.open.items() if name in extents}:
            return start
        new = new._replace(finished=self._finished(known))
        if len(new.open) + len(new.closed) + len(new.finished) > LEDGERS_MAX:
            raise UsageError(
                f"{NAME}: a stream follows at most {LEDGERS_MAX:,} ledgers, or runs of finished ones",
                hint="narrow it with ledger, ledgerScopeId or customMetadata",
            )
        return new.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the ledgers as `latestOffset` last found them."""
        return None if self._seen is None else self._seen.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the entries between two offsets, cut by `entriesPerPartition`."""
        at = Offset.read(start).next_entry_ids
        spans = (
            (EntryRange(int(name, 16), at.get(name, 0), next_id - 1), 0)
            for name, next_id in sorted(Offset.read(end).next_entry_ids.items())
        )
        return [LedgerEntries(ranges) for ranges in cut(spans, 1 << 62, self._source.entries_per_partition)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the planned rows of a partition. Raises the error of an entry that cannot be read."""
        return self._source.read(partition)

    def stop(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def look(self, known: Offset) -> dict[str, Extent]:
        """Return the extents of the ledgers of the query by name, without those that are done in `known`.

        Ledgers without entries are left out. Raises the error of a ledger that cannot be read.
        """
        client = self._client = self._client or Client(self._source.cluster)
        found: dict[str, Extent] = {}
        self._listed = []

        def asked() -> Iterator[LedgerId]:
            for ledger in self._source.listed(client):
                self._listed.append(ledger)
                if not known.is_done(ledger.qualified_name) and ledger not in self._passed_over:
                    yield ledger

        for ledger, extent in self._source.extents(client, asked()):
            if isinstance(extent, BkctlError):
                raise extent
            if extent is None or (extent.closed and not extent.next_entry_id):
                self._passed_over.add(ledger)
            elif extent.next_entry_id:
                found[ledger.qualified_name] = extent
        return found

    def _finished(self, known: Offset) -> tuple[tuple[str, str], ...]:
        """Return the runs of adjacent ids of existing ledgers that are done in `known`, or outside the query."""
        runs: list[tuple[LedgerId, LedgerId, bool]] = []
        for ledger in self._listed:
            is_done = known.is_done(ledger.qualified_name)
            if not is_done and ledger not in self._passed_over:
                continue
            if runs and runs[-1][1].value + 1 == ledger.value:
                runs[-1] = (runs[-1][0], ledger, runs[-1][2] or is_done)
            else:
                runs.append((ledger, ledger, is_done))
        return tuple((first.qualified_name, last.qualified_name) for first, last, has_done in runs if has_done)

    def _limits(self, limit: ReadLimit) -> tuple[int | None, int | None]:
        """Return the maximum entries and bytes of a batch; None: no limit."""
        if isinstance(limit, ReadAllAvailable):
            return None, None
        return (
            limit.max_rows if isinstance(limit, ReadMaxRows) else self._entries_max,
            limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._bytes_max,
        )


def latest_offsets(options: Mapping[str, str]) -> str:
    """Return the current ends of the ledgers in a query with `options`, for `startingOffsets` of a new stream."""
    reader = LedgerStreamReader(LedgerTable(dict(options)))
    try:
        offset = Offset({}, {})
        for name, each in reader.look(offset).items():
            (offset.closed if each.closed else offset.open)[name] = each.next_entry_id
    finally:
        reader.stop()
    return json.dumps(offset.to_json())


def allot(
    waiting: Mapping[str, int], sizes: Mapping[str, int], count_max: int | None, size_max: int | None
) -> dict[str, int]:
    """Return the number of `waiting` entries to take from each ledger, in fair shares of both limits.

    `sizes`: the average bytes of an entry. Shares that a ledger does not use go to ledgers with more waiting entries.
    At least one entry is taken, whatever its size.
    """
    taken: dict[str, int] = {}
    count_left, size_left = count_max, size_max
    names = sorted(waiting, key=lambda name: (waiting[name], name))
    for at, name in enumerate(names):
        count, left = waiting[name], len(names) - at
        if count_left is not None:
            count = min(count, count_left // left)
        if size_left is not None:
            count = min(count, size_left // left // max(sizes[name], 1))
        if count_left is not None:
            count_left -= count
        if size_left is not None:
            size_left -= count * sizes[name]
        taken[name] = count
    if names and not any(taken.values()):
        taken[names[-1]] = 1
    return taken


def _starting_offset(text: str) -> Offset:
    if text.lower() == EARLIEST:
        return Offset({}, {})
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(
            f"{NAME}: option startingOffsets {text[:80]!r}: neither earliest nor an offset",
            hint="for new entries only, pass the result of bkctl.spark.sources.ledger_stream.latest_offsets(options)",
        )
    return Offset.read(value)
