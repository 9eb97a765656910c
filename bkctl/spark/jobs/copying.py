"""Copies of ledgers under other ids, verified and resumable: the job `migrate-scope`, and what `import` shares with it.

A copy has the payloads of its source, its shape and its custom metadata, and says in the latter whose copy it is; once
it was read back and found to be the same, also the hash of its entries. So a second run passes over what is done, and
goes on where a task died: it writes the same entries under the same ids again, which changes nothing where they are.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.client.ensemble import update_metadata
from bkctl.client.ledger import WriteHandle
from bkctl.client.reader import read_entries
from bkctl.client.writer import THROTTLE_COUNT
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, Unreachable, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.spark.sources.columns import TYPES
from bkctl.spark.sources.connection import CONNECTION_OPTIONS, Client, ClusterOptions
from bkctl.spark.sources.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

#: Custom metadata of a copy: the qualified name of its source; and the hash of its entries, once it is verified.
SOURCE_KEY: Final = "bkctl-copy-of"
HASH_KEY: Final = "bkctl-copy-sha256"
#: Sizes of the new ledgers, in place of their sources'.
SHAPE_OPTIONS: Final = ("ensembleSize", "writeQuorumSize", "ackQuorumSize")
#: What a job says of a ledger: it copied it; a run before did; it would; and why it did not.
COPIED: Final = "copied"
PRESENT: Final = "present"
PLANNED: Final = "planned"
OPEN: Final = "open"
FAILED: Final = "failed"
#: What the jobs return; `state` is one of the above.
RESULT_COLUMNS: Final = (
    "source", "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "state", "entryCount", "length", "sha256", "message",
)  # fmt: skip
RESULT_SCHEMA: Final = ", ".join(f"`{name}` {TYPES.get(name, 'string')}" for name in RESULT_COLUMNS)
#: Partitions of a job for each of the executors' cores, so that one that has the longest ledgers holds up little.
_TASKS_PER_CORE: Final = 4


class Shape(NamedTuple):
    """What a ledger is made with."""

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    digest_type: DigestType
    custom_metadata: Mapping[str, bytes]

    def over(self, options: SourceOptions) -> Shape:
        """This shape with the sizes that the options give. Raises UsageError."""
        return self._replace(
            ensemble_size=options.integer("ensembleSize", self.ensemble_size, 1),
            write_quorum_size=options.integer("writeQuorumSize", self.write_quorum_size, 1),
            ack_quorum_size=options.integer("ackQuorumSize", self.ack_quorum_size, 1),
        )

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Shape:
        """The shape of another ledger, without what makes that a copy."""
        custom = {key: value for key, value in metadata.custom_metadata.items() if key not in (SOURCE_KEY, HASH_KEY)}
        return cls(
            metadata.ensemble_size, metadata.write_quorum_size, max(metadata.ack_quorum_size, 1),
            metadata.digest_type or DigestType.CRC32, custom,
        )  # fmt: skip


class EntryHash:
    """SHA-256 of entries in order: of each its size (8 bytes, big-endian) and its payload. Counts them, too."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.entry_count = self.length = 0

    def add(self, payload: bytes) -> None:
        """The next entry's."""
        self._hash.update(len(payload).to_bytes(8, "big"))
        self._hash.update(payload)
        self.entry_count += 1
        self.length += len(payload)

    @property
    def hex(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()


class Copied(NamedTuple):
    """What became of one ledger; numbers and hash are those of the copy, None where there is none."""

    source: LedgerId
    target: LedgerId
    state: str
    entry_count: int | None = None
    length: int | None = None
    sha256: str | None = None
    message: str | None = None

    def row(self) -> tuple[Any, ...]:
        """The values of RESULT_COLUMNS."""
        return (self.source.qualified_name, *self.target.to_json().values(), *self[2:])


class LedgerCopy:
    """A copy of `source` at `target` on its way: `begin`, then every payload by `add`, then `finish`.

    `add` and `finish` come also after a `begin` that returned False: they compare then, and write nothing.
    """

    def __init__(self, client: Client, source: LedgerId, target: LedgerId, shape: Shape, password: bytes) -> None:
        self._client, self.source, self.target = client, source, target
        self._shape, self._password = shape, password
        self._handle: WriteHandle | None = None
        #: The metadata of the copy where it is closed already.
        self.there: VersionedMetadata | None = None
        self.hash = EntryHash()

    async def begin(self) -> bool:
        """Create the copy, or go on with one that was left half way; False where it is closed already.

        Raises Conflict where another ledger has the id, or the copy was closed half way; NotEnoughBookies, ….
        """
        bookkeeper, target, shape = self._client.bookkeeper, self.target, self._shape
        try:
            found = self._client.cluster.ledgers.read(target)
        except LedgerNotFound:
            self._handle = await bookkeeper.create_ledger_adv(
                target.ledger_id, ledger_scope_id=target.scope_id, password=self._password,
                **{
                    **shape._asdict(),
                    "custom_metadata": {**shape.custom_metadata, SOURCE_KEY: self.source.qualified_name.encode()},
                },
            )  # fmt: skip
            return True
        custom = found.metadata.custom_metadata
        if custom.get(SOURCE_KEY) != self.source.qualified_name.encode():
            raise Conflict(f"Ledger {target} exists, and is no copy of ledger {self.source}")
        if found.metadata.is_closed:
            self.there = found
            return False
        if found.metadata.state is not LedgerState.OPEN:
            raise Conflict(f"Ledger {target}, a copy left half way, is being recovered", hint="try again later")
        # Whoever wrote it wrote the same: what is there already is only written again.
        access = bookkeeper.access(target, found)
        self._handle = WriteHandle(access, throttle_count=THROTTLE_COUNT, own_entry_ids=False)
        return True

    async def add(self, payloads: Iterable[bytes]) -> None:
        """The next entries; all are acknowledged when this returns."""
        for payload in payloads:
            self.hash.add(payload)
            if self._handle is not None:
                await self._handle.ready()
                self._handle.add(payload)
        if self._handle is not None:
            await self._handle.flush()

    async def finish(self) -> Copied:
        """Close the copy, read it back, compare, and write down that it is the same.

        Raises Corrupt where it is not, Conflict where somebody closed it half way.
        """
        if self._handle is not None:
            await self._handle.close()
            found = self._handle.versioned_metadata
        else:
            assert self.there is not None
            found = self.there
        metadata, hash = found.metadata, self.hash
        if (metadata.last_entry_id, metadata.length) != (hash.entry_count - 1, hash.length):
            raise Conflict(
                f"Ledger {self.target} was closed after {metadata.last_entry_id + 1} entries "
                f"({metadata.length} bytes), and is to have {hash.entry_count} ({hash.length} bytes)",
                hint="delete it, and run this again",
            )
        known = metadata.custom_metadata.get(HASH_KEY)
        if known is None:
            read = EntryHash()
            access = self._client.bookkeeper.access(self.target, found)
            if hash.entry_count:
                async for entry in read_entries(access, 0, hash.entry_count - 1):
                    read.add(entry.payload)
            known = read.hex.encode()
        if known != hash.hex.encode():
            raise Corrupt(f"Ledger {self.target} is not what ledger {self.source} is: its entries differ")
        marked = partial(_with_hash, value=known)
        update_metadata(self._client.cluster.ledgers, self.target, found, marked)
        state = COPIED if self._handle is not None else PRESENT
        return Copied(self.source, self.target, state, hash.entry_count, hash.length, hash.hex)


def _with_hash(metadata: LedgerMetadata, value: bytes) -> LedgerMetadata | None:
    if metadata.custom_metadata.get(HASH_KEY) == value:
        return None
    return replace(metadata, custom_metadata={**metadata.custom_metadata, HASH_KEY: value})


async def copy_ledger(client: Client, source: LedgerId, target: LedgerId, options: SourceOptions) -> Copied:
    """Copy a closed ledger, with its own password, or pass over a copy that is verified. Raises as LedgerCopy.

    `options`: SHAPE_OPTIONS.
    """
    found = client.cluster.ledgers.read(source)
    metadata = found.metadata
    if not metadata.is_closed:
        return Copied(source, target, OPEN, message=f"Ledger {source} is not closed")
    copy = LedgerCopy(client, source, target, Shape.of(metadata).over(options), metadata.password or b"")
    begun = await copy.begin()
    if not begun and copy.there is not None and HASH_KEY in copy.there.metadata.custom_metadata:
        there = copy.there.metadata
        if (there.last_entry_id, there.length) == (metadata.last_entry_id, metadata.length):
            sha256 = there.custom_metadata[HASH_KEY].decode("ascii", "replace")
            return Copied(source, target, PRESENT, there.last_entry_id + 1, there.length, sha256)
    access = client.bookkeeper.access(source, found)
    held: list[bytes] = []
    size = 0
    if metadata.last_entry_id >= 0:
        async for entry in read_entries(access, 0, metadata.last_entry_id):
            held.append(entry.payload)
            size += len(entry.payload)
            if size >= _HELD_BYTES_MAX or len(held) >= _HELD_COUNT_MAX:
                await copy.add(held)
                held, size = [], 0
    await copy.add(held)
    if copy.hash.length != metadata.length:
        raise Corrupt(
            f"The entries of ledger {source} have {copy.hash.length} bytes, its metadata says {metadata.length}"
        )
    return await copy.finish()


#: Entries that are read before they are written.
_HELD_BYTES_MAX: Final = 8 << 20
_HELD_COUNT_MAX: Final = 4096


# --- migrate-scope --------------------------------------------------------------------------------------------------


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
    """Copy the ledgers of a scope, or these, into the scope `to_scope_id`, under the same ledger ids; one row a ledger.

    `options` are those of the connection, and SHAPE_OPTIONS. The sources stay. A ledger that is not closed is not
    copied (`open`); where one fails otherwise (`failed`, with a `message`), the others are copied still. Only a cluster
    that cannot be reached ends the job. Columns: RESULT_COLUMNS.
    Raises UsageError where two of the ledgers would get the same id, or one stands in that scope already.
    """
    checked = SourceOptions("migrate-scope", options, (*CONNECTION_OPTIONS, *SHAPE_OPTIONS))
    connection = ClusterOptions(checked)
    if not ledgers and from_scope_id is None:
        raise UsageError("Nothing says which ledgers to copy", hint="name ledgers, or the scope that they are in")
    rows: list[Copied] = []
    work: list[tuple[int, LedgerId, LedgerId]] = []
    targets: dict[LedgerId, LedgerId] = {}
    with connection.open() as cluster:
        listed = ledgers or cluster.ledgers.ledgers(from_scope_id)
        for source, found in cluster.ledgers.read_many(listed):
            target = LedgerId(to_scope_id, source.ledger_id)
            if source == target:
                raise UsageError(f"Ledger {source} is in scope {to_scope_id} already")
            if (other := targets.setdefault(target, source)) != source:
                raise UsageError(f"Ledgers {other} and {source} would both become {target}", hint="copy them apart")
            if isinstance(found, LedgerNotFound) and not ledgers:
                continue  # It was deleted since it was listed.
            if isinstance(found, BkctlError):
                rows.append(Copied(source, target, FAILED, message=str(found)))
            elif not found.metadata.is_closed:
                rows.append(Copied(source, target, OPEN, message=f"Ledger {source} is not closed"))
            elif dry_run:
                metadata = found.metadata
                rows.append(Copied(source, target, PLANNED, metadata.last_entry_id + 1, metadata.length))
            else:
                work.append((found.metadata.length + _LEDGER_WEIGHT_BYTES, source, target))
    results = [each.row() for each in rows]
    if work:
        bins = _even(work, task_count or spark.sparkContext.defaultParallelism * _TASKS_PER_CORE)
        tasks = spark.range(0, len(bins), 1, len(bins))
        copied = tasks.mapInArrow(partial(_copy_bins, checked, bins), RESULT_SCHEMA)
        results += [tuple(row) for row in copied.collect()]
    results.sort(key=lambda row: row[0])
    return spark.createDataFrame(results, RESULT_SCHEMA)


#: What a ledger costs beside its entries.
_LEDGER_WEIGHT_BYTES: Final = 64 << 10


def _even(work: Collection[tuple[int, LedgerId, LedgerId]], count: int) -> list[list[tuple[LedgerId, LedgerId]]]:
    """At most `count` lists of about the same weight."""
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
    for batch in batches:
        for at in batch.column(0).to_pylist():
            with Client(ClusterOptions(options)) as client:
                for source, target in bins[at]:
                    try:
                        result = client.run(copy_ledger(client, source, target, options))
                    except Unreachable:
                        raise  # Spark tries the task again.
                    except BkctlError as error:
                        result = Copied(source, target, FAILED, message=str(error))
                    yield result_batch([result])


def result_batch(results: Sequence[Copied]) -> pa.RecordBatch:
    """Rows of RESULT_SCHEMA."""
    import pyarrow as pa

    numbers = ("entryCount", "length")
    schema = pa.schema([(name, pa.int64() if name in numbers else pa.string()) for name in RESULT_COLUMNS])
    columns = zip(*(each.row() for each in results), strict=True)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, schema, strict=True)], schema=schema
    )
