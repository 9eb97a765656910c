"""Ledgers as rows of HBase's table, and numbers that count up.

    <bucket, 1 byte> <scope id, 8 bytes> <ledger id, 8 bytes>   m:d metadata, m:v version, m:w writer (8 bytes each)
    ff <name>                                                   m:c a counter

The bucket is one of 16, from a hash of the id: consecutive ids are spread over as many regions, and a scope is one
range of rows in each bucket; listings merge them. A version is the time of the write in ms since 1970, above that of
the write before, and the timestamp of its cells. A change is a check-and-mutate on the version and a read, in one
request; the writer is random, by which one whose answer was lost is recognised. A deletion covers just the version that
was deleted. Where another client's clock is ahead, it may hide a new row all the same: that is written again with a
later version.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from bkctl.errors import AlreadyExists, BkctlError, Corrupt, MetadataVersionConflict, NotFound, TimedOut
from bkctl.ids import I64_MAX, U64_MAX
from bkctl.metadata.backends.hbase import hbase_pb2 as pb
from bkctl.metadata.backends.hbase.regions import HBaseTable, Region, RegionLost
from bkctl.metadata.backends.hbase.rpc import CallLost, CallRefused, RegionServer, Retries
from bkctl.metadata.ledgers import LEDGERS
from bkctl.metadata.store import NEW, attempt, chunks, map_ahead, value_of

if TYPE_CHECKING:
    from bkctl.metadata.backends.zookeeper.zookeeper_connection import ZooKeeperConnection

T = TypeVar("T")

BUCKETS: Final = 16
FAMILY: Final = b"m"
_VERSION: Final = b"v"
_DATA: Final = b"d"
_WRITER: Final = b"w"
_COUNTER: Final = b"c"
_COUNTERS: Final = b"\xff"
#: Fibonacci hashing: neighbours and multiples of any number are spread alike.
_HASH_FACTOR: Final = 0x9E3779B97F4A7C15
_BUCKET_SHIFT: Final = 60
#: Attempts at a row that deletions by clocks ahead hide.
_HIDDEN_MAX: Final = 10
BATCH_SIZE: Final = 200
#: Values that one request writes.
_BATCH_SIZE_BYTES: Final = 4 << 20
_BATCHES_AHEAD: Final = 3
_PAGE_SIZE_FIRST: Final = 64
_PAGE_SIZE_MAX: Final = 1000
_VALUE_MAX: Final = (1 << 128) - 1
#: The cell type of a deletion of all that a family has up to its timestamp.
_DELETE_FAMILY: Final = 14


class HBaseRow(NamedTuple):
    """A ledger's row as read."""

    value: bytes
    version: int
    writer: bytes


def node_path(ledger: int) -> str:
    """Return the path of the node that the ledger's row is."""
    return f"{LEDGERS}/{ledger:032x}"


def row_key(ledger: int) -> bytes:
    """Return the row of the ledger whose 128-bit number is `ledger`."""
    bucket = ((ledger >> 64 ^ ledger) * _HASH_FACTOR & U64_MAX) >> _BUCKET_SHIFT
    return bytes((bucket,)) + ledger.to_bytes(16)


class _Write:
    """A value for a row, to be written once the row is in version `expected`; see Rows.put."""

    def __init__(self, ledger: int, value: bytes, expected: int) -> None:
        self.ledger, self.key, self.value, self.expected = ledger, row_key(ledger), value, expected
        self.writer = os.urandom(8)
        self.version = max(time.time_ns() // 1_000_000, expected + 1)
        self.hidden = 0  # times that a later deletion hid it

    def mutation(self) -> pb.MutationProto:
        mutation = pb.MutationProto(row=self.key, mutate_type=pb.MutationProto.PUT, timestamp=self.version)
        column = mutation.column_value.add(family=FAMILY)
        column.qualifier_value.add(qualifier=_DATA, value=self.value)
        column.qualifier_value.add(qualifier=_VERSION, value=self.version.to_bytes(8))
        column.qualifier_value.add(qualifier=_WRITER, value=self.writer)
        return mutation


class _Change(NamedTuple):
    """The result of a change: if it was applied, the row after it, and if an earlier attempt may have been applied."""

    processed: bool
    found: HBaseRow | None
    repeated: bool


class Rows(HBaseTable):
    """The rows of the table `name`. `executor` has threads for requests beside the caller's; `store` names the store.

    Errors name a ledger by the node of the store that it is.
    """

    def __init__(self, zookeeper: ZooKeeperConnection, znode: str, name: str, executor: Executor, store: str) -> None:
        super().__init__(zookeeper, znode, name)
        self._executor, self._store = executor, store

    def create_table(self) -> bool:
        """Create the table, a region for each bucket; return False if it exists."""
        return self.create(FAMILY, [bytes((bucket,)) for bucket in range(1, BUCKETS)])

    # reads

    def get(self, ledgers: Sequence[int]) -> list[HBaseRow | None]:
        """Return the rows of these ledgers, None for each missing one. Raises Corrupt, TableMissing."""
        return [value_of(row) for row in self._get(ledgers)]

    def _get(self, ledgers: Sequence[int]) -> list[HBaseRow | BkctlError | None]:
        return self._read([row_key(ledger) for ledger in ledgers], _row)

    def _read(self, keys: Sequence[bytes], parse: Callable[[pb.Result], T]) -> list[T | BkctlError]:
        """Return the parsed result of each row, Corrupt in place of each malformed one. Raises TableMissing."""
        found: dict[int, T | BkctlError] = {}

        def work(retries: Retries, _: bool) -> None:
            pending = {at: key for at, key in enumerate(keys) if at not in found}
            problem: Exception | None = None
            for server, places in self._by_server(pending, retries).items():
                request = pb.MultiRequest()
                actions: dict[Region, pb.RegionAction] = {}
                for at, region in places:
                    if region not in actions:
                        actions[region] = request.regionAction.add(region=region.specifier)
                    actions[region].action.add(index=at, get=pb.Get(row=keys[at]))
                answer = self.call(server, "Multi", request, pb.MultiResponse, retries)
                for result in answer.regionActionResult:
                    if result.HasField("exception"):
                        problem = _refusal(result.exception)
                    for each in result.resultOrException:
                        if each.HasField("exception"):
                            problem = _refusal(each.exception)
                        elif each.index in pending:
                            found[each.index] = attempt(parse, each.result)
            if left := len(keys) - len(found):
                raise problem or RegionLost(f"table {self.name}: {left} rows were not answered")

        if keys:
            self.attempt(work)
        return [found[at] for at in range(len(keys))]

    def _by_server(self, keys: Mapping[int, bytes], retries: Retries) -> dict[RegionServer, list[tuple[int, Region]]]:
        """Return the places of rows, each with its region, by the server that has it."""
        found: dict[RegionServer, list[tuple[int, Region]]] = defaultdict(list)
        for at, key in keys.items():
            region = self.region(key, retries)
            found[region.server].append((at, region))
        return found

    def get_many(self, ledgers: Iterable[int]) -> Iterator[HBaseRow | BkctlError | None]:
        """`get` each ledger in the order given, some batches ahead; Corrupt comes in place of a malformed row.

        Raises TableMissing.
        """
        ledgers = iter(ledgers)
        batches = iter(lambda: list(islice(ledgers, BATCH_SIZE)), [])
        for rows in map_ahead(self._executor, self._get, batches, _BATCHES_AHEAD):
            yield from rows

    def ledgers(self, first: int, last: int = _VALUE_MAX, *, page_size: int = _PAGE_SIZE_FIRST) -> Iterator[int]:
        """Yield the ledgers from `first` to `last`, ascending: the buckets' rows merged, a page of each held.

        Raises TableMissing.
        """
        if first > last:
            return iter(())
        buckets = [self._bucket(bucket, first, last, page_size) for bucket in range(BUCKETS)]
        for pages in buckets:
            next(pages)  # sends the first request
        return heapq.merge(*buckets)

    def _bucket(self, bucket: int, first: int, last: int, page_size: int) -> Iterator[int]:
        """Yield 0 once the first page is asked for, then the ledgers of one bucket, the next page always under way."""
        future = self._executor.submit(self._page, bucket, first, last, page_size)
        yield 0
        while True:
            page, is_last = future.result()
            if not is_last:
                page_size = min(2 * page_size, _PAGE_SIZE_MAX)
                future = self._executor.submit(self._page, bucket, page[-1] + 1, last, page_size)
            yield from page
            if is_last:
                return

    def _page(self, bucket: int, first: int, last: int, count: int) -> tuple[list[int], bool]:
        """Return up to `count` ledgers of the bucket from `first` on, and whether no more follow; [] only with True."""
        start, end = bytes((bucket,)) + first.to_bytes(16), bytes((bucket,)) + last.to_bytes(16)
        columns = [pb.Column(family=FAMILY, qualifier=[_VERSION])]

        def work(retries: Retries, _: bool) -> tuple[list[int], bool]:
            row = start
            while True:
                region = self.region(row, retries)
                options = {"start_row": row, "stop_row": end, "include_stop_row": True, "caching": count}
                answer = self.scan(region.server, region.specifier, count, retries, **options, column=columns)
                rows = [result.cell[0].row for result in answer.results if result.cell]
                if rows and not (row <= rows[0] and rows[-1] <= end and rows == sorted(rows)):
                    raise CallLost(f"{region.server} gave rows that were not asked for")
                is_region_done = not rows or (
                    answer.HasField("more_results_in_region") and not answer.more_results_in_region
                )
                is_done = is_region_done and (not region.end or region.end > end)
                found = [int.from_bytes(row[1:]) for row in rows if len(row) == len(start)]
                if found or is_done:
                    return found, is_done or found[-1] == last
                row = rows[-1] + b"\0" if rows else region.end

        return self.attempt(work)

    # changes

    def put(self, ledger: int, value: bytes, expected: int) -> int:
        """Write the ledger's row, which must be missing (NEW) or in version `expected`; return its new version.

        Raises AlreadyExists, NotFound, MetadataVersionConflict, Corrupt, TableMissing.
        """
        return value_of(self.put_many([(ledger, value, expected)])[0])

    def put_many(self, rows: Sequence[tuple[int, bytes, int]]) -> list[int | BkctlError]:
        """`put` each row, independently, many in one request; a row's error comes in its place. Raises TableMissing."""
        results: dict[int, int | BkctlError] = {}
        waiting = {at: _Write(*row) for at, row in enumerate(rows)}
        while waiting:
            writes = list(waiting.items())
            for batch in chunks(writes, BATCH_SIZE, lambda each: len(each[1].value), _BATCH_SIZE_BYTES):
                changes = self._change([(write.mutation(), write.expected) for _, write in batch])
                for (at, write), change in zip(batch, changes, strict=True):
                    result = change if isinstance(change, Corrupt) else attempt(self._result_of, write, change)
                    if result is not None:
                        results[at] = result
                        del waiting[at]
        return [results[at] for at in range(len(rows))]

    def _result_of(self, write: _Write, change: _Change) -> int | BkctlError | None:
        """Return the new version or the error; None where a later deletion hides the row: `write` is changed then."""
        processed, found, repeated = change
        if found is not None and found.writer == write.writer:
            return found.version
        if processed and found is None and (hidden_by := self._hidden_by(write.key, write.version)) is not None:
            write.version, write.expected = max(write.version, hidden_by) + 1, NEW
            write.hidden += 1
            if write.hidden == _HIDDEN_MAX:
                return self._conflict(write.ledger, f"deletions hid {_HIDDEN_MAX} versions of it", may_be_applied=True)
            return None
        if processed:
            return write.version  # and another client has changed it since
        if write.expected == NEW:
            return AlreadyExists(f"{node_path(write.ledger)} exists in {self._store}")
        if found is None:
            return NotFound(f"No {node_path(write.ledger)} in {self._store}")
        # Each version is above the one before: ours was not between `expected` and a lower one.
        is_unsure = repeated and found.version > write.version
        problem = f"version {found.version}, expected {write.expected}"
        return self._conflict(write.ledger, problem, may_be_applied=is_unsure)

    def _conflict(self, ledger: int, problem: str, *, may_be_applied: bool) -> MetadataVersionConflict:
        return MetadataVersionConflict(
            f"{node_path(ledger)} changed meanwhile: {problem}", may_be_applied=may_be_applied
        )

    def delete(self, ledger: int, expected: int) -> None:
        """Delete the ledger's row in version `expected`. Raises NotFound, MetadataVersionConflict, TableMissing."""
        mutation = pb.MutationProto(
            row=row_key(ledger), mutate_type=pb.MutationProto.DELETE, timestamp=max(expected, 0)
        )
        mutation.column_value.add(family=FAMILY).qualifier_value.add(
            qualifier=b"", delete_type=pb.MutationProto.DELETE_FAMILY, timestamp=max(expected, 0)
        )
        (change,) = self._change([(mutation, max(expected, 0))])
        if isinstance(change, Corrupt):
            raise change
        processed, found, repeated = change
        if processed or (found is None and repeated):
            return
        if found is None:
            raise NotFound(f"No {node_path(ledger)} in {self._store}")
        raise self._conflict(ledger, f"version {found.version}, expected {expected}", may_be_applied=repeated)

    def _change(self, changes: Sequence[tuple[pb.MutationProto, int]]) -> list[_Change | Corrupt]:
        """Apply each mutation if its row is in the version beside it (NEW: missing), many in one request.

        Returns Corrupt in place of the result where the row is malformed.
        """
        done: dict[int, _Change | Corrupt] = {}

        def work(retries: Retries, repeated: bool) -> None:
            pending = {at: mutation.row for at, (mutation, _) in enumerate(changes) if at not in done}
            problem: CallRefused | None = None
            for server, places in self._by_server(pending, retries).items():
                request = pb.MultiRequest()
                for at, region in places:
                    mutation, version = changes[at]
                    condition = _holds(mutation.row, _VERSION, None if version == NEW else _version_bytes(version))
                    change = request.regionAction.add(region=region.specifier, condition=condition)
                    change.action.add(index=0, mutation=mutation)
                    read = request.regionAction.add(region=region.specifier)
                    read.action.add(index=0, get=pb.Get(row=mutation.row))
                answer = self.call(server, "Multi", request, pb.MultiResponse, retries)
                if len(answer.regionActionResult) != 2 * len(places):
                    raise RegionLost(f"{server} answered part of a request")
                results = iter(answer.regionActionResult)
                for (at, _), changed, after in zip(places, results, results, strict=True):
                    try:
                        _check((changed, after))
                        if not changed.HasField("processed"):
                            raise RegionLost(f"{server} does not say if it changed a row")
                        done[at] = _Change(changed.processed, _row(after.resultOrException[0].result), repeated)
                    except CallRefused as error:
                        problem = error
                    except Corrupt as error:
                        done[at] = error
            if problem is not None:
                raise problem

        self.attempt(work)
        return [done[at] for at in range(len(changes))]

    def _hidden_by(self, key: bytes, version: int) -> int | None:
        """Return the timestamp of the deletion that hides the cells that we wrote in `version`; None: there is none.

        One of that very version may also have come between our write and the read behind it, in the same request; far
        more likely it is of an earlier row, written and deleted in the ms of ours.
        """

        def work(retries: Retries, _: bool) -> int | None:
            region = self.region(key, retries)
            raw = {"max_versions": I64_MAX >> 32, "attribute": [pb.NameBytesPair(name="_raw_", value=b"\xff")]}
            row = {"start_row": key, "stop_row": key, "include_stop_row": True}
            answer = self.scan(region.server, region.specifier, 1, retries, **row, **raw)
            deletions = [
                cell.timestamp for result in answer.results for cell in result.cell if cell.cell_type == _DELETE_FAMILY
            ]
            latest = max(deletions, default=0)
            if latest >= I64_MAX:
                raise Corrupt(f"Row {key.hex()} is deleted for good, by a deletion at {latest} ms since 1970")
            return latest if latest >= version else None

        return self.attempt(work)

    def next_number(self, name: str) -> int:
        """Return the counter's value, 0 at first, and count on; a number whose answer is lost is passed over."""
        key = _COUNTERS + name.encode()
        mutation = pb.MutationProto(row=key, mutate_type=pb.MutationProto.INCREMENT)
        mutation.column_value.add(family=FAMILY).qualifier_value.add(qualifier=_COUNTER, value=(1).to_bytes(8))

        return self._mutate(mutation, None, lambda answer: _number(answer.result.cell[0]) - 1)

    def _mutate(
        self, mutation: pb.MutationProto, condition: pb.Condition | None, result: Callable[[pb.MutateResponse], T]
    ) -> T:
        """Apply a counter's mutation where the condition holds; return the `result` of the answer."""

        def work(retries: Retries, _: bool) -> T:
            region = self.region(mutation.row, retries)
            request = pb.MutateRequest(region=region.specifier, mutation=mutation, condition=condition)
            return result(self.call(region.server, "Mutate", request, pb.MutateResponse, retries))

        return self.attempt(work)

    def position(self, name: str) -> int:
        """Return the number that `next_number` gives next."""
        (found,) = self._read([_COUNTERS + name.encode()], lambda result: _number(result.cell[0]) if result.cell else 0)
        return value_of(found)

    def advance(self, name: str, position: int) -> None:
        """Make `next_number` give `position` or more from now on."""
        key = _COUNTERS + name.encode()
        retries: Retries | None = None
        while (found := self.position(name)) < position:
            if retries is None:
                retries = Retries(self.timeout_s)
            elif not retries.pause():
                raise TimedOut(
                    f"HBase left counter {name} of table {self.name} at {found} for {self.timeout_s:g} s, "
                    f"below {position}"
                )
            mutation = pb.MutationProto(row=key, mutate_type=pb.MutationProto.PUT)
            mutation.column_value.add(family=FAMILY).qualifier_value.add(qualifier=_COUNTER, value=position.to_bytes(8))
            self._mutate(mutation, _holds(key, _COUNTER, found.to_bytes(8) if found else None), lambda _: None)


def _version_bytes(version: int) -> bytes:
    return version.to_bytes(8) if 0 <= version <= I64_MAX else b"\xff" * 8  # no row has it


def _holds(row: bytes, qualifier: bytes, value: bytes | None) -> pb.Condition:
    """Return the condition that the row's cell has this value; None: that the cell is missing."""
    kind, data = "NullComparator", b""
    if value is not None:
        message = pb.BinaryComparator(comparable=pb.ByteArrayComparable(value=value))
        kind, data = "BinaryComparator", message.SerializeToString()
    comparator = pb.Comparator(name=f"org.apache.hadoop.hbase.filter.{kind}", serialized_comparator=data)
    return pb.Condition(row=row, family=FAMILY, qualifier=qualifier, compare_type=pb.EQUAL, comparator=comparator)


def _check(results: Iterable[pb.RegionActionResult]) -> None:
    """Raise CallRefused for the first exception among the results."""
    for result in results:
        if result.HasField("exception"):
            raise _refusal(result.exception)
        for each in result.resultOrException:
            if each.HasField("exception"):
                raise _refusal(each.exception)


def _refusal(exception: pb.NameBytesPair) -> CallRefused:
    """Return the exception of one action; HBase sends no flag with it, and its kind says if it is final."""
    kind = exception.name.rpartition(".")[2]
    is_final = kind.startswith(("DoNotRetry", "NoSuchColumnFamily", "AccessDenied", "UnsupportedOperation"))
    return CallRefused(exception.name, exception.value.decode("utf-8", "replace"), is_final)


def _row(result: pb.Result) -> HBaseRow | None:
    """Return the row that a server sent, None for a missing one. Raises Corrupt."""
    cells = {cell.qualifier: cell for cell in result.cell}
    version = cells.get(_VERSION)
    if version is None:
        return None
    data, writer = cells.get(_DATA), cells.get(_WRITER)
    return HBaseRow(b"" if data is None else data.value, _number(version), b"" if writer is None else writer.value)


def _number(cell: pb.Cell) -> int:
    """Return the number in a cell, from 0 to 2^63-2. Raises Corrupt for other values."""
    number = int.from_bytes(cell.value[:9])
    if len(cell.value) != 8 or number >= I64_MAX:
        raise Corrupt(f"Row {cell.row.hex()} of HBase's table has {cell.value[:16].hex()} where a number has 8 bytes")
    return number
