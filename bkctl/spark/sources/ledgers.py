"""Read the entries of ledgers from their bookies for `bookkeeper.ledger`: partitions, ranges, checked batches.

Reading does not fence, recover or close a ledger. A closed ledger is read to its end, any other up to the last add
confirmed that its bookies report when the query is planned. Tasks read ledger passwords from the metadata, and plans do
not contain them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from bkctl.client.reader import LedgerAccess, LedgerEntry, read_entries, read_last_confirmed
from bkctl.errors import BkctlError, LedgerNotFound, UsageError
from bkctl.ids import LedgerId
from bkctl.metadata.admin.overview import LedgerQuery
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import attempt
from bkctl.spark.sources.columns import constant, damage_row, ledger_values, table_of
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.options import CONNECTION_OPTIONS, Client, ClusterOptions
from bkctl.spark.sources.readers import QUERY_OPTIONS, TableSource

NAME: Final = "bookkeeper.ledger"
COLUMNS: Final = (*LEDGER_COLUMNS, "entryId", "lastAddConfirmed", "length", "size", "formatVersion", "payload")
OPTIONS: Final = (
    *CONNECTION_OPTIONS, *QUERY_OPTIONS, "ledgersFile", "customMetadata",
    "entriesPerPartition", "maxPartitionBytes", "failOnDataLoss",
    # of the stream
    "startingOffsets", "maxEntriesPerTrigger", "maxBytesPerTrigger",
    # of the sink
    "names", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "digestType", "ledgerPasswordFile",
    "ledgerPasswordEnv",
    # Spark's own, which a sink of a stream gets as well
    "checkpointLocation", "queryName",
)  # fmt: skip
PARTITION_SIZE_BYTES_DEFAULT: Final = 64 << 20
PARTITION_ENTRIES_DEFAULT: Final = 100_000
#: Column of each field of a LedgerEntry.
_ENTRY_COLUMNS: Final = ("entryId", "lastAddConfirmed", "length", "payload", "formatVersion")
#: Rows and bytes of one batch for Spark, about.
BATCH_ROWS: Final = 8192
BATCH_SIZE_BYTES: Final = 8 << 20
#: Ledgers whose last add confirmed is requested at once.
_ASKED_AT_ONCE: Final = 64
#: Cost of an entry beside its payload, for cutting ledgers into partitions.
_ENTRY_OVERHEAD_BYTES: Final = 64


class EntryRange(NamedTuple):
    """Entries `first` to `last`, both included, of the ledger with this unsigned 128-bit number."""

    ledger: int
    first: int
    last: int


@dataclass
class LedgerEntries(InputPartition):
    """Ranges of existing entries that one task reads; `problems` are unreadable ledgers, with the reasons."""

    ranges: Sequence[EntryRange]
    problems: Sequence[tuple[int, str]] = ()


class Extent(NamedTuple):
    """The extent of a ledger: its next entry id, whether it is closed there, and the average size of its entries."""

    next_entry_id: int
    closed: bool
    entry_size: int


def cut(spans: Iterable[tuple[EntryRange, int]], size_max: int, count_max: int) -> Iterator[list[EntryRange]]:
    """Yield partitions of about `size_max` bytes and at most `count_max` entries from ranges and average entry sizes.

    Each entry is in one partition, in the given order.
    """
    held: list[EntryRange] = []
    size = count = 0
    for (ledger, first, last), entry_size in spans:
        weight = entry_size + _ENTRY_OVERHEAD_BYTES
        while first <= last:
            room = min((size_max - size) // weight, count_max - count)
            if room < 1 and held:
                yield held
                held, size, count = [], 0, 0
                continue
            taken = min(last - first + 1, max(room, 1))
            held.append(EntryRange(ledger, first, first + taken - 1))
            first, size, count = first + taken, size + taken * weight, count + taken
    if held:
        yield held


class LedgerTable(TableSource):
    """The table of the data source, whose stream and sinks take cluster, ledgers and limits from it."""

    source = NAME
    known = OPTIONS
    columns = never_null = COLUMNS
    integers = ("entryId",)

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        checked = self.checked
        if checked.text("path") is not None or checked.text("paths") is not None:
            raise UsageError(f"{NAME} takes no path", hint="name the cluster by metadataUri")
        self.cluster = ClusterOptions(checked)
        self.fail_on_data_loss = checked.flag("failOnDataLoss", True)
        self.scope_id = checked.scope_id()
        self.custom_metadata = _key_values(checked.words("customMetadata"))
        self._query = LedgerQuery(custom_metadata=tuple(self.custom_metadata.items()))
        self.entries_per_partition = checked.integer("entriesPerPartition", PARTITION_ENTRIES_DEFAULT, 1)
        self._partition_size = checked.size_bytes("maxPartitionBytes", PARTITION_SIZE_BYTES_DEFAULT)
        self._file = checked.text("ledgersFile")
        #: The ledgers of the query must exist.
        self._are_needed = self.fail_on_data_loss and (self._file is not None or self._conditions.ledgers is not None)

    # --- planning -----------------------------------------------------------------------------------------------

    def partitions(self) -> list[InputPartition]:
        """Return ranges of entries. Raises the errors of reading metadata and last adds confirmed."""
        problems: list[tuple[int, str]] = []

        def spans() -> Iterator[tuple[EntryRange, int]]:
            for ledger, extent in self.extents(client, self.listed(client)):
                if isinstance(extent, BkctlError):
                    self._mode.check(extent)
                    problems.append((ledger.value, str(extent)))
                elif extent is not None:
                    for first, last in self._wanted(extent.next_entry_id - 1):
                        yield EntryRange(ledger.value, first, last), extent.entry_size

        with Client(self.cluster) as client:
            parts = cut(spans(), self._partition_size, self.entries_per_partition)
            found: list[InputPartition] = [LedgerEntries(ranges) for ranges in parts]
        return [*found, LedgerEntries((), problems)] if problems else found

    def listed(self, client: Client) -> Iterable[LedgerId]:
        """Return the ledgers that meet the conditions; named ones need not exist."""
        accepts = self._conditions.accepts_ledger
        if self._file is not None:
            # Read on the driver: there may be too many ledgers to send to every task.
            lines = Path(self._file).read_text("ascii", "replace").split()
            return filter(accepts, sorted({LedgerId.parse(line, self.scope_id) for line in lines}))
        wanted = self._conditions.wanted_ledgers()
        if wanted is not None:
            return wanted
        scopes = self._conditions.ids_of("ledgerScopeId")
        of_scopes = map(client.cluster.ledgers.ledgers, [None] if scopes is None else sorted(scopes))
        return filter(accepts, chain.from_iterable(of_scopes))

    def extents(
        self, client: Client, ledgers: Iterable[LedgerId]
    ) -> Iterator[tuple[LedgerId, Extent | BkctlError | None]]:
        """Yield the ledgers with their extents: from metadata of closed ones, from the bookies of all others.

        An error of a ledger takes the place of its extent, None stands for a ledger outside the query. Ledgers that do
        not exist are left out unless the options name the ledgers, and `failOnDataLoss` is true.
        """

        async def extent(ledger: LedgerId, found: VersionedMetadata | BkctlError) -> Extent | BkctlError:
            if isinstance(found, BkctlError):
                return found
            last, length = found.metadata.last_entry_id, found.metadata.length
            if not found.metadata.is_closed:
                try:
                    last, length = await read_last_confirmed(client.bookkeeper.access(ledger, found))
                except BkctlError as error:
                    return error
            return Extent(last + 1, found.metadata.is_closed, length // (last + 1) if last >= 0 else 0)

        async def asked() -> list[Extent | BkctlError]:
            return await asyncio.gather(*(extent(*each) for each in held))

        held: list[tuple[LedgerId, VersionedMetadata | BkctlError]] = []
        for ledger, found in client.cluster.ledgers.read_many(ledgers):
            if isinstance(found, LedgerNotFound) and not self._are_needed:
                continue  # Deleted since it was listed, or only a filter names it.
            if isinstance(found, VersionedMetadata) and not self._query.matches(found, 0):
                yield ledger, None
                continue
            held.append((ledger, found))
            if len(held) >= _ASKED_AT_ONCE:
                yield from zip([each for each, _ in held], client.run(asked()), strict=True)
                held.clear()
        yield from zip([each for each, _ in held], client.run(asked()), strict=True)

    def _wanted(self, end: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of entry ids up to `end` that meet the conditions."""
        first, last = self._conditions.entry_range()
        last = min(last, end)
        ids = self._conditions.values.get("entryId")
        if ids is None:
            if first <= last:
                yield first, last
            return
        wanted = enumerate(entry_id for entry_id in sorted(ids) if first <= entry_id <= last)
        # Adjacent entry ids have the same distance from their numbers.
        for _, run in groupby(wanted, key=lambda each: each[1] - each[0]):
            entry_ids = [entry_id for _, entry_id in run]
            yield entry_ids[0], entry_ids[-1]

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the planned rows of a partition; in mode permissive an entry that cannot be read is a row of damage.

        Raises its error in mode failfast. Unless `failOnDataLoss`, skips what is unread of deleted ledgers.
        """
        # Spark adds a partition of its own to an empty list.
        if not isinstance(partition, LedgerEntries):
            return
        for value, reason in partition.problems:
            yield self._damage(LedgerId.from_value(value), None, reason)
        if not partition.ranges:
            return
        with Client(self.cluster) as client:
            held: list[tuple[LedgerId, LedgerEntry]] = []
            room = BATCH_SIZE_BYTES
            ids = (LedgerId.from_value(part.ledger) for part in partition.ranges)
            for part, (ledger, found) in zip(partition.ranges, client.cluster.ledgers.read_many(ids), strict=True):
                if isinstance(found, BkctlError):
                    if isinstance(found, LedgerNotFound) and not self.fail_on_data_loss:
                        continue
                    self._mode.check(found)
                    yield self._damage(ledger, None, f"{found}; entries {part.first} to {part.last} are not here")
                    continue
                access, next_id = client.bookkeeper.access(ledger, found), part.first
                while next_id <= part.last:
                    metadata, count = access.metadata, BATCH_ROWS - len(held)
                    if metadata.is_closed and metadata.length:
                        # Request only the entries that are likely to fit.
                        count = min(count, room * (metadata.last_entry_id + 1) // metadata.length + 1)
                    entries, error = client.run(_take(access, next_id, min(part.last, next_id + count - 1), room))
                    held += ((ledger, entry) for entry in entries)
                    room -= sum(len(entry.payload) for entry in entries)
                    next_id += len(entries)
                    if error is not None:
                        if not self.fail_on_data_loss:
                            known = attempt(client.cluster.ledgers.read, ledger)
                            if isinstance(known, LedgerNotFound):
                                break
                        self._mode.check(error)
                    if error is not None or len(held) >= BATCH_ROWS or room <= 0:
                        yield from self._rows(held)
                        room = BATCH_SIZE_BYTES
                    if error is not None:
                        yield self._damage(ledger, next_id, str(error))
                        next_id += 1
            yield from self._rows(held)

    def _rows(self, held: list[tuple[LedgerId, LedgerEntry]]) -> Iterator[pa.RecordBatch]:
        """Yield the entries, if there are any, as one batch, and forget them."""
        if not held:
            return
        runs = [(ledger_values(ledger), len(list(run))) for ledger, run in groupby(held, itemgetter(0))]
        values = dict(zip(_ENTRY_COLUMNS, zip(*(entry for _, entry in held), strict=True), strict=True))
        values["size"] = tuple(map(len, values["payload"]))
        columns = {name: pa.array(values[name]) for name in self._schema.names if name in values}
        for field in self._schema:
            if field.name in LEDGER_COLUMNS:
                parts = [constant(ids[field.name], count, field.type) for ids, count in runs]
                columns[field.name] = pa.concat_arrays(parts)
        count = len(held)
        held.clear()
        yield from table_of(self._schema, columns, count).to_batches()

    def _damage(self, ledger: LedgerId, entry_id: int | None, reason: str) -> pa.RecordBatch:
        damage = {"file": None, "offset": None, "reason": reason}
        return damage_row(self._schema, damage, **ledger_values(ledger), entryId=entry_id)


async def _take(
    access: LedgerAccess, first: int, last: int, size_max: int
) -> tuple[list[LedgerEntry], BkctlError | None]:  # fmt: skip
    """Return the entries from `first` on, in order, until they have `size_max` bytes, and the error that ended them."""
    taken: list[LedgerEntry] = []
    reading: Any = read_entries(access, first, last)
    try:
        async with aclosing(reading):
            async for entry in reading:
                taken.append(entry)
                size_max -= len(entry.payload)
                if size_max <= 0:
                    break
    except BkctlError as error:
        return taken, error
    return taken, None


def _key_values(texts: Iterable[str]) -> dict[str, bytes]:
    """Return the keys and values of `KEY=VALUE` texts. Raises UsageError."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"{NAME}: option customMetadata {text!r}: not KEY=VALUE")
        found[key] = value.encode()
    return found
