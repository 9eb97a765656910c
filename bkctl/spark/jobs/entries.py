"""The entries that bookies' files hold, and those that metadata promises on bookies of their ensembles, as blocks.

A block has the records of 1,024 adjacent entry ids of a ledger in a file, in one row. Tasks fold records to blocks
where they read them, so a shuffle moves blocks. The blocks of one bookie, ledger and range of entries meet in one task,
which compares them as arrays and unfolds the entries that a job chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, reduce
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bkctl.errors import NotFound
from bkctl.formats.record import RECORD_SIZE
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, FrameColumn, Functions, JobSession, functions_of
from bkctl.spark.jobs.bookie_records import (
    QUALIFIED_NAME,
    REPLICA,
    index_entries,
    journal_entries,
    ledger_options,
    log_records,
)
from bkctl.spark.sources.columns import DAMAGE, TYPES, arrow_schema, table_of

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import Bookies

    Numbers = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

#: A block has 2^BLOCK_BITS entry ids.
BLOCK_BITS: Final = 10
_BLOCK_SIZE: Final = 1 << BLOCK_BITS
#: Values of the column `source`.
LOG, INDEX, JOURNAL, PROMISE = "log", "index", "journal", "promise"

#: One bookie, ledger and range of entries: their blocks are compared with each other.
_PLACE: Final = ("bookieId", QUALIFIED_NAME, "block")
_RECORD: Final = {
    "file": "string", "fileId": "bigint", "offset": "bigint", "recordSize": "bigint", "lastAddConfirmed": "bigint",
    "digest": "string", "replayed": "boolean", DAMAGE: TYPES[DAMAGE],
}  # fmt: skip
#: Columns in which all records of a block agree. `fileId` is the id of a log or journal.
_SHARED: Final = {
    "bookieId": "string", QUALIFIED_NAME: "string", "block": "bigint", "source": "string", "file": "string",
    "fileId": "bigint", "digest": "string", "replayed": "boolean",
}  # fmt: skip
#: `size`: bytes of the records with their size fields. `lac`: the highest last add confirmed that a record vouches for.
#: `packed`: entry ids in the block, offsets and, for journals, sizes of the records.
BLOCKS: Final = {
    **_SHARED, "entryCount": "bigint", "size": "bigint", "lac": "bigint", "packed": "binary", DAMAGE: TYPES[DAMAGE],
}  # fmt: skip
_UNFOLDED: Final = (
    f"bookieId string, {QUALIFIED_NAME} string, entryId bigint, promised boolean, "
    "copies array<struct<logId:bigint,offset:bigint,file:string,digest:string>>, "
    "place struct<logId:bigint,offset:bigint>, "
    "journaled struct<journalId:bigint,offset:bigint,file:string,digest:string>, "
    "recorded struct<replayed:boolean,journalId:bigint,offset:bigint,file:string,recordSize:bigint>"
)
#: Blocks of so few entries are not compressed.
_PLAIN_ENTRIES_MAX: Final = 8
#: Records that are folded at once.
_FOLD_ROWS: Final = 1 << 18
#: Entries, and entry ids of blocks, that are compared at once, about.
_COMPARE_ENTRIES: Final = 1 << 20


def ddl_of(columns: dict[str, str]) -> str:
    """Return columns and their types as Spark's DDL."""
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


# --- records to blocks ------------------------------------------------------------------------------------------------


def fold(records: Frame, source: str, file_id: str, **values: FrameColumn) -> Frame:
    """Return records or places (bookieId, ledger, entryId, offset, `damage`) as BLOCKS; a row of damage stays a row.

    `file_id` is the column with the id of the log or journal; `values` are more columns of a record: file, recordSize,
    lastAddConfirmed, digest, replayed.
    """
    F = functions_of(records)
    given: dict[str, FrameColumn] = {name: F.col(name) for name in ("offset", DAMAGE) if name in records.columns}
    given |= {"fileId": F.col(file_id), **values}
    columns = [given.get(name, F.lit(None).cast(kind)).alias(name) for name, kind in _RECORD.items()]
    return records.select(*REPLICA, *columns).mapInArrow(partial(_fold_batches, source), ddl_of(BLOCKS))


def _fold_batches(source: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        waiting.append(batch)
        count += batch.num_rows
        if count >= _FOLD_ROWS:
            yield from _fold(source, pa.Table.from_batches(waiting))
            waiting, count = [], 0
    if count:
        yield from _fold(source, pa.Table.from_batches(waiting))


def _fold(source: str, records: pa.Table) -> Iterator[pa.RecordBatch]:
    schema = arrow_schema(ddl_of(BLOCKS))
    is_data = pc.is_null(records.column(DAMAGE))
    if records.num_rows > pc.sum(is_data).as_py():
        damaged = records.filter(pc.invert(is_data))
        columns = {name: damaged.column(name) for name in ("bookieId", DAMAGE)}
        yield from table_of(schema, columns, damaged.num_rows).to_batches()
        records = records.filter(is_data)
    if not records.num_rows:
        return
    entry_ids = records.column("entryId").to_numpy()
    # No entry confirms itself, so a damaged one with a digest that cannot be checked here (HMAC, DUMMY) promises
    # nothing beyond itself.
    before = pa.array(np.maximum(entry_ids, np.iinfo(np.int64).min + 1) - 1)
    confirmed = records.column("lastAddConfirmed")
    lac = pc.if_else(pc.is_valid(confirmed), pc.min_element_wise(confirmed, before), pa.scalar(None, pa.int64()))
    sizes = pc.fill_null(records.column("recordSize"), 0)
    packed_sizes = sizes if source == JOURNAL else pa.array(np.zeros(len(sizes), np.int64))
    keys = [name for name in _SHARED if name != "source"]
    columns = {name: records.column(name) for name in keys if name != "block"}
    columns |= {
        "block": pa.array(entry_ids >> BLOCK_BITS), "low": pa.array(entry_ids & (_BLOCK_SIZE - 1)),
        "offset": records.column("offset"), "packedSize": packed_sizes, "size": sizes, "lac": lac,
    }  # fmt: skip
    lists = ("low", "offset", "packedSize")
    grouped = pa.table(columns).group_by(keys, use_threads=False)
    found = grouped.aggregate([*((name, "list") for name in lists), ("size", "sum"), ("lac", "max")])
    arrays = [found.column(f"{name}_list").combine_chunks() for name in lists]
    borders = arrays[0].offsets.to_numpy()
    counts = np.diff(borders)
    packed = _pack(np.stack([array.values.to_numpy() for array in arrays]), borders)
    blocks = {name: found.column(name) for name in keys}
    blocks |= {
        "entryCount": pa.array(counts, pa.int64()), "packed": pa.array(packed, pa.binary()),
        "size": pc.add(found.column("size_sum"), pa.array(counts * RECORD_SIZE.size, pa.int64())),
        "lac": found.column("lac_max"), "source": pa.repeat(source, found.num_rows),
    }  # fmt: skip
    yield from table_of(schema, blocks, found.num_rows).to_batches()


def _pack(rows: Numbers, borders: Numbers) -> list[bytes]:
    """Return the three rows of numbers of each block, which end at `borders`: the differences from one to the next.

    Compressed, they are few bytes for a run of records.
    """
    differences = np.diff(rows, prepend=0)
    differences[:, borders[:-1]] = rows[:, borders[:-1]]
    codec = _codec()
    packed = []
    for first, last in pairwise(borders.tolist()):
        data = differences[:, first:last].tobytes()
        packed.append(data if last - first <= _PLAIN_ENTRIES_MAX else bytes(codec.compress(data, asbytes=True)))
    return packed


def _unpack(packed: Iterable[bytes], counts: Numbers) -> Numbers:
    """Return the three rows of numbers of `_pack`, one block after the other, which have `counts` numbers."""
    codec = _codec()
    data = [
        each if count <= _PLAIN_ENTRIES_MAX else codec.decompress(each, 3 * count * 8)
        for each, count in zip(packed, counts.tolist(), strict=True)
    ]
    if not data:
        return np.zeros((3, 0), np.int64)
    blocks = [np.frombuffer(each, np.int64).reshape(3, -1) for each in data]
    sums: Numbers = np.concatenate(blocks, axis=1).cumsum(axis=1)
    before = np.append(0, counts.cumsum()[:-1])
    sums -= np.repeat(np.where(before > 0, sums[:, before - 1], 0), counts, axis=1)
    return sums


def _codec() -> pa.Codec:
    return pa.Codec("zstd", compression_level=1)


# --- blocks to entries ------------------------------------------------------------------------------------------------


class Ids(NamedTuple):
    """Masks of one length: facts about each entry id of some blocks."""

    #: Metadata promises the entry on the bookie.
    promised: Mask
    #: An entry log has a copy.
    logged: Mask
    #: An entry log has a copy that does not match its ledger's digest type.
    mismatched: Mask
    #: The index names a copy.
    served: Mask
    #: The last record that a start replays matches its ledger's digest type.
    replayed: Mask
    #: A journal has a record.
    recorded: Mask


def unfold(blocks: Frame, choose: Callable[[Ids], Mask]) -> Frame:
    """Return the entries that `choose` chooses, one row for each entry and bookie.

    Columns: REPLICA, `promised`; `copies` in entry logs, from the oldest; `place`, the location in the index;
    `journaled`, the last record that a start replays from a journal; `recorded`, the last record in any journal.
    `blocks` have `matches` (their records match the digest type of their ledgers), and blocks of promises the `first`
    and `last` entry of a fragment, the bookie's `position` in its ensemble, ensembleSize and writeQuorumSize.
    """
    together = blocks.repartition(*_PLACE).sortWithinPartitions(*_PLACE, "file")

    def unfolded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return chain.from_iterable(_Compared(table).rows(choose) for table in _together(batches))

    return together.mapInArrow(unfolded, _UNFOLDED)


def _together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows in tables of a bounded number of entries; no table ends between blocks of one place."""
    waiting: list[pa.RecordBatch] = []
    total = 0
    for batch in batches:
        for at in range(0, batch.num_rows, _COMPARE_ENTRIES >> BLOCK_BITS):
            part = batch.slice(at, _COMPARE_ENTRIES >> BLOCK_BITS)
            begins = _begins(part, waiting[-1] if waiting else None)
            if total >= _COMPARE_ENTRIES and begins.any():
                cut = int(begins.argmax())
                yield pa.Table.from_batches([*waiting, part.slice(0, cut)])
                part, begins, waiting, total = part.slice(cut), begins[cut:], [], 0
            waiting.append(part)
            total += pc.sum(part.column("entryCount")).as_py() + _BLOCK_SIZE * int(begins.sum())
    if waiting:
        yield pa.Table.from_batches(waiting)


def _begins(rows: pa.RecordBatch | pa.Table, previous: pa.RecordBatch | None = None) -> Mask:
    """Return which rows are of another place than the row before; the first one is, without `previous` rows."""
    begins = np.zeros(rows.num_rows, np.bool_)
    for name in _PLACE:
        column: Any = rows.column(name)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        if name != "block":
            column = column.dictionary_encode().indices
        values = column.to_numpy()
        begins[1:] |= values[1:] != values[:-1]
    begins[0] = previous is None or any(rows.column(name)[0] != previous.column(name)[-1] for name in _PLACE)
    return begins


class _Records(NamedTuple):
    """Records or places: the row of the block that has each, its slot (at first its id in the block), offset, size."""

    rows: Numbers
    slots: Numbers
    offsets: Numbers
    sizes: Numbers

    def of(self, wanted: Any) -> _Records:
        return _Records(*(values[wanted] for values in self))


class _Compared:
    """The blocks of a table. Each entry id of each of its places, up to the last that any block has, has a slot."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table = table.combine_chunks()
        starts = _begins(table)
        self._firsts = np.flatnonzero(starts)
        places = np.cumsum(starts) - 1
        self._source = np.array(table.column("source").to_pylist())
        self._file_ids = self._numbers("fileId")
        matches, replays = (self._numbers(name, False) for name in ("matches", "replayed"))
        found = [self._promises(), *(self._records(source) for source in (LOG, INDEX, JOURNAL))]
        widths = np.zeros(len(self._firsts), np.int64)
        for each in found:
            np.maximum.at(widths, places[each.rows], each.slots + 1)
        #: The first slot of each place.
        self._begins = np.cumsum(widths) - widths
        found = [each._replace(slots=self._begins[places[each.rows]] + each.slots) for each in found]
        promises, copies, indexed, records = found
        self._copies = copies
        count = int(widths.sum())
        promised, logged, mismatched, served, replayed, recorded = (np.zeros(count, np.bool_) for _ in range(6))
        promised[promises.slots] = True
        logged[copies.slots] = True
        mismatched[copies.slots[~matches[copies.rows]]] = True
        self._places = self._newest(count, indexed)
        at = self._places.of(copies.slots)
        is_served = (self._file_ids[at.rows] == self._file_ids[copies.rows]) & (at.offsets == copies.offsets)
        served[copies.slots[is_served & (at.rows >= 0)]] = True
        self._journaled = self._newest(count, records.of(replays[records.rows]))
        replayed = (self._journaled.rows >= 0) & matches[self._journaled.rows]
        self._recorded = self._newest(count, records, replays)
        recorded[records.slots] = True
        self._ids = Ids(promised, logged, mismatched, served, replayed, recorded)

    def rows(self, choose: Callable[[Ids], Mask]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of `unfold`."""
        mask = choose(self._ids)
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return
        copies = self._copies.of(mask[self._copies.slots])
        copies = copies.of(np.lexsort((copies.offsets, self._file_ids[copies.rows], copies.slots)))
        borders = np.append(np.searchsorted(copies.slots, chosen), len(copies.slots)).astype(np.int32)
        places = np.searchsorted(self._begins, chosen, side="right") - 1
        firsts = self._firsts[places]
        entry_ids = (self._numbers("block")[firsts] << BLOCK_BITS) | (chosen - self._begins[places])
        copy_structs = self._structs(copies, "logId", "offset", "file", "digest")
        columns = {
            "bookieId": self._take("bookieId", firsts),
            QUALIFIED_NAME: self._take(QUALIFIED_NAME, firsts),
            "entryId": pa.array(entry_ids),
            "promised": pa.array(self._ids.promised[chosen]),
            "copies": pa.ListArray.from_arrays(pa.array(borders), copy_structs),
            "place": self._structs(self._places.of(chosen), "logId", "offset"),
            "journaled": self._structs(self._journaled.of(chosen), "journalId", "offset", "file", "digest"),
            "recorded": self._structs(
                self._recorded.of(chosen), "replayed", "journalId", "offset", "file", "recordSize"
            ),
        }
        yield from table_of(arrow_schema(_UNFOLDED), columns, len(chosen)).to_batches()

    def _numbers(self, name: str, missing: Any = 0) -> Any:
        return pc.fill_null(self._table.column(name), missing).to_numpy()

    def _take(self, name: str, rows: Numbers) -> pa.Array:
        return self._table.column(name).take(pa.array(rows, mask=rows < 0)).combine_chunks()

    def _promises(self) -> _Records:
        """Return the entries that metadata promises on the bookies, without offsets and sizes."""
        rows = np.flatnonzero(self._source == PROMISE)
        if not len(rows):
            return _Records(rows, rows, rows, rows)
        names = ("first", "last", "block", "position", "ensembleSize", "writeQuorumSize")
        first, last, block, position, size, quorum = (self._numbers(name)[rows] for name in names)
        begin = block << BLOCK_BITS
        first = np.maximum(first, begin)
        counts = np.minimum(last, begin + (_BLOCK_SIZE - 1)) - first + 1
        each = np.repeat(np.arange(len(rows)), counts)
        entry_ids = first[each] + np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
        # RoundRobinDistributionSchedule: the write set begins at the bookie `entry id % ensemble size`.
        is_member = (position[each] - entry_ids % size[each]) % size[each] < quorum[each]
        ids = entry_ids[is_member]
        return _Records(rows[each[is_member]], ids & (_BLOCK_SIZE - 1), ids, ids)

    def _records(self, source: str) -> _Records:
        rows = np.flatnonzero(self._source == source)
        counts = self._numbers("entryCount")[rows]
        packed = self._table.column("packed").take(rows).to_pylist()
        return _Records(np.repeat(rows, counts), *_unpack(packed, counts))

    def _newest(self, count: int, records: _Records, before: Any = None) -> _Records:
        """Return each slot's last record by `before`, file id and offset; row -1 for a slot without one."""
        found = np.full(count, -1)
        found[records.slots] = np.arange(len(records.slots))
        if np.count_nonzero(found >= 0) < len(records.slots):
            keys = [records.rows, records.offsets, self._file_ids[records.rows]]
            order = np.lexsort(keys if before is None else [*keys, before[records.rows]])
            found[records.slots[order]] = order
        return _Records(*(np.append(values, -1)[found] for values in records))

    def _structs(self, records: _Records, *names: str) -> pa.StructArray:
        """Return a struct for each record, of the columns of its block and its own; null for row -1."""
        fields = {
            "offset": lambda: pa.array(records.offsets),
            "recordSize": lambda: pa.array(records.sizes),
            "logId": lambda: self._take("fileId", records.rows),
            "journalId": lambda: self._take("fileId", records.rows),
        }
        arrays = [fields[name]() if name in fields else self._take(name, records.rows) for name in names]
        return pa.StructArray.from_arrays(arrays, list(names), mask=pa.array(np.asarray(records.rows < 0)))


# --- held: copies in entry logs, places in indexes, records in journals -----------------------------------------------


def held_entries(
    spark: JobSession,
    bookies: Bookies,
    ledger: LedgerId | None,
    scope_id: int | None,
    *,
    indexes: bool = True,
    journaled: Frame | None = None,
) -> Frame:
    """Return the entries in the files of each bookie as `BLOCKS`, and a row for each damage.

    With `journaled`, a result of `journaled_entries` without digests, these entries and the ones of their ledgers in
    logs and indexes, without digests. Raises NotFound if the bookies have no files.
    """
    F = functions_of(spark)
    options = ledger_options(ledger, scope_id)
    of, digest = None, ["digest"]
    if journaled is None:
        journaled = journaled_entries(spark, bookies, ledger, scope_id)
    else:
        of, digest = journaled.select("bookieId", QUALIFIED_NAME).dropna().distinct(), []
    found = [journaled]
    with suppress(NotFound):  # These bookies have not written an entry log yet.
        names = ["recordSize", "lastAddConfirmed", *digest]
        wanted = [QUALIFIED_NAME, "entryId", "logId", "offset", *names]
        records = log_records(spark, bookies, wanted, **options)
        given = {name: F.col(name) for name in ("file", *names)}
        found.append(fold(_of_ledgers(records, of), LOG, "logId", **given))
    places = index_entries(spark, bookies, **options) if indexes else None
    if places is not None:
        found.append(fold(_of_ledgers(places, of), INDEX, "logId"))
    blocks = [each for each in found if each is not None]
    if not blocks:
        raise NotFound("The bookies given have no files to look at")
    return reduce(lambda left, right: left.unionByName(right), blocks)


def journaled_entries(
    spark: JobSession, bookies: Bookies, ledger: LedgerId | None, scope_id: int | None, *, digests: bool = True
) -> Frame | None:
    """Return the entries in the journals of each bookie as `BLOCKS`; None without a journal."""
    F = functions_of(spark)
    wanted = ["lastAddConfirmed", "digest"] if digests else ["lastAddConfirmed"]
    entries = journal_entries(spark, bookies, wanted, **ledger_options(ledger, scope_id))
    if entries is None:
        return None
    given = {name: F.col(name) for name in ("file", "recordSize", "replayed", "digest") if name in entries.columns}
    lac = F.when(F.col("replayed"), F.col("lastAddConfirmed"))
    return fold(entries, JOURNAL, "journalId", **given, lastAddConfirmed=lac)


def shares_of(held: Frame) -> Frame:
    """Return the share of each ledger in each log of `held_entries`, as `inventory.shares` does."""
    F = functions_of(held)
    sums = [F.sum(name).alias(name) for name in ("entryCount", "size")]
    counted = held.filter(F.col("source") == LOG).groupBy("bookieId", "file", QUALIFIED_NAME).agg(*sums)
    counted = counted.withColumn(DAMAGE, F.lit(None).cast(TYPES[DAMAGE]))
    return counted.unionByName(log_damages(held), allowMissingColumns=True).fillna(0, ["entryCount", "size"])


def log_damages(held: Frame) -> Frame:
    """Return the damages of entry logs in `held_entries`: bookieId, file, damage."""
    F = functions_of(held)
    file = F.col(DAMAGE)["file"]
    return damages(held).withColumn("file", file).filter(file.endswith(".log"))


def damages(held: Frame) -> Frame:
    """Return the damages of files in `held_entries`: bookieId, damage."""
    F = functions_of(held)
    return held.filter(F.col(DAMAGE).isNotNull()).select("bookieId", DAMAGE).distinct()


def _of_ledgers(rows: Frame, ledgers: Frame | None) -> Frame:
    """Return the rows of `ledgers` (bookieId, ledger), and the rows of damage."""
    F = functions_of(rows)
    if ledgers is None:
        return rows
    wanted = F.broadcast(ledgers.withColumn("isWanted", F.lit(True)))
    found = rows.join(wanted, ["bookieId", QUALIFIED_NAME], "left")
    return found.filter(F.col("isWanted").isNotNull() | F.col(DAMAGE).isNotNull()).drop("isWanted")


# --- promised ---------------------------------------------------------------------------------------------------------


def read_metadata(
    spark: JobSession, connection: Mapping[str, str], ledger: LedgerId | None, scope_id: int | None
) -> Frame:
    """Return the metadata of a ledger, of a scope, or of all ledgers."""
    columns = (
        QUALIFIED_NAME, "state", "ensembleSize", "writeQuorumSize", "digestType", "lastEntryId", "ensembles",
    )  # fmt: skip
    chosen = {**ledger_options(ledger, scope_id), **connection, "columns": ",".join(columns)}
    return spark.read.format("bookkeeper.metadata").options(**chosen).load()


def fragments_of(metadata: Frame, held: Frame) -> Frame:
    """Return one row a fragment with entries: `first` and `last` entry, `bookies`, and the ledger's sizes.

    `held` gives the last entries of ledgers that are not closed; such a ledger without entries has no row.
    """
    F = functions_of(metadata)

    def fragment(ensemble: FrameColumn, index: FrameColumn) -> FrameColumn:
        next_first = F.get("ensembles", index + 1)["firstEntryId"]
        return F.struct(
            ensemble["firstEntryId"].alias("first"),
            F.least(F.coalesce(next_first - 1, "last"), "last").alias("last"),
            ensemble["bookies"].alias("bookies"),
        )

    sizes = (QUALIFIED_NAME, "ensembleSize", "writeQuorumSize")
    fragments = F.explode(F.transform("ensembles", fragment)).alias("fragment")
    is_open = F.col("state") != "CLOSED"
    of_open = held.join(metadata.filter(is_open).select(QUALIFIED_NAME), QUALIFIED_NAME, "left_semi")
    # A damaged entry must not decide how far its ledger goes; entries whose digest cannot be checked here have to.
    checked = F.max(F.when(F.col("digest").isNotNull(), F.col("lac")))
    confirmed = of_open.groupBy(QUALIFIED_NAME).agg(F.coalesce(checked, F.max("lac")).alias("last"))
    open_ledgers = metadata.filter(is_open).join(confirmed, QUALIFIED_NAME)
    ledgers = metadata.filter(~is_open).withColumn("last", F.col("lastEntryId")).unionByName(open_ledgers)
    return ledgers.select(*sizes, fragments).select(*sizes, "fragment.*").filter("first <= last")


def promised_blocks(fragments: Frame, bookies: Bookies) -> Frame:
    """Return the blocks of entries that each of `bookies` should have, as `unfold` takes them."""
    F = functions_of(fragments)
    given = [bookie.bookie_id for bookie in bookies]
    members = F.transform("bookies", lambda bookie, at: F.struct(bookie.alias("bookieId"), at.alias("position")))
    named = fragments.withColumn("member", F.explode(members))
    named = named.filter(F.col("member.bookieId").isin(given) & (F.col("member.position") < F.col("ensembleSize")))
    blocks = F.sequence(F.shiftright("first", BLOCK_BITS), F.shiftright("last", BLOCK_BITS))
    return named.withColumn("block", F.explode(blocks)).select(
        F.col("member.bookieId").alias("bookieId"), QUALIFIED_NAME, "block", F.lit(PROMISE).alias("source"),
        F.lit(0).cast("bigint").alias("entryCount"), "first", "last",
        *(F.col(name).cast("bigint").alias(name.rpartition(".")[2]) for name in
          ("member.position", "ensembleSize", "writeQuorumSize")),
    )  # fmt: skip


def absent_bookies(fragments: Frame, bookies: Bookies) -> Frame:
    """Return the bookies that ensembles name and that are not among `bookies`, with their ledger counts."""
    F = functions_of(fragments)
    given = [bookie.bookie_id for bookie in bookies]
    named = fragments.select(QUALIFIED_NAME, F.explode("bookies").alias("bookieId"))
    ledger_count = F.count_distinct(QUALIFIED_NAME).alias("ledgerCount")
    return named.filter(~F.col("bookieId").isin(given)).groupBy("bookieId").agg(ledger_count).orderBy("bookieId")


def promise_counts(fragments: Frame, bookies: Bookies) -> Frame:
    """Return one row with ledgerCount, entryCount and replicaCount of the replicas on `bookies`; unfolds no entry.

    Entries of a fragment whose ids have the same remainder by the ensemble's size are on the same bookies.
    """
    F = functions_of(fragments)
    remainder = F.explode(F.sequence(F.lit(0), F.col("ensembleSize") - 1))
    by_remainder = fragments.withColumn("remainder", remainder)
    up_to_last = F.floor((F.col("last") - F.col("remainder")) / F.col("ensembleSize"))
    before_first = F.floor((F.col("first") - 1 - F.col("remainder")) / F.col("ensembleSize"))
    counted = by_remainder.select(
        QUALIFIED_NAME,
        (up_to_last - before_first).alias("entries"),
        _holder_count(F, F.col("remainder"), bookies).alias("holders"),
    ).filter("entries > 0 AND holders > 0")
    replicas = F.sum(F.col("entries") * F.col("holders"))
    return counted.agg(
        F.count_distinct(QUALIFIED_NAME).alias("ledgerCount"),
        F.coalesce(F.sum("entries"), F.lit(0)).alias("entryCount"),
        F.coalesce(replicas, F.lit(0)).alias("replicaCount"),
    )


def with_holder_count(entries: Frame, fragments: Frame, bookies: Bookies) -> Frame:
    """Return distinct promised `entries` (ledger, entry id) with two counts of the bookies that should have the entry.

    holderCount: those among `bookies`; writeQuorumSize: all.
    """
    F = functions_of(entries)
    found = entries.join(fragments, QUALIFIED_NAME).filter("entryId BETWEEN first AND last")
    holder_count = _holder_count(F, F.col("entryId"), bookies).alias("holderCount")
    return found.select(QUALIFIED_NAME, "entryId", holder_count, "writeQuorumSize")


def _holder_count(F: Functions, entry_id: FrameColumn, bookies: Bookies) -> FrameColumn:
    """Return the number of `bookies` in the write set (RoundRobinDistributionSchedule) of an entry of a fragment."""
    given = [bookie.bookie_id for bookie in bookies]
    copies = F.sequence(F.lit(0), F.col("writeQuorumSize") - 1)
    write_set = F.transform(copies, lambda copy: F.get("bookies", F.pmod(entry_id + copy, "ensembleSize").cast("int")))
    return F.size(F.filter(write_set, lambda bookie_id: bookie_id.isin(given)))
