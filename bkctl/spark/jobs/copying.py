"""Copies of ledgers under other ids, verified and resumable, for the jobs `migrate-scope` (here) and `import`.

A copy has the payloads, shape and custom metadata of its source. Its custom metadata also names the source and, once
the copy was read back and compared, the hash of its entries. So a second run skips verified copies and resumes
unfinished ones: it adds the same entries under the same ids again, which does not change entries that exist. A copy
without the hash that was closed too early (when too few bookies were left, or by a recovery) is unfinished as well.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.client.ensemble import update_metadata
from bkctl.client.reader import read_entries
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import BkctlError, Conflict, Corrupt, LedgerNotFound, Unreachable, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.spark.jobs.bookie_records import frame_of, rows_in_tasks, task_slots
from bkctl.spark.sources.options import CONNECTION_OPTIONS, Client, ClusterOptions, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Custom metadata of a copy: the qualified name of its source; and the hash of its entries, once it is verified.
SOURCE_KEY: Final = "bkctl-copy-of"
HASH_KEY: Final = "bkctl-copy-sha256"
#: Sizes of the new ledgers, in place of their sources'.
SHAPE_OPTIONS: Final = ("ensembleSize", "writeQuorumSize", "ackQuorumSize")
#: States of a copy: by this run, by a run before, in a dry run, and the reasons for none.
COPIED: Final = "copied"
PRESENT: Final = "present"
PLANNED: Final = "planned"
OPEN: Final = "open"
FAILED: Final = "failed"
#: Columns of the jobs' results; `state` is one of the above.
RESULT_COLUMNS: Final = (
    "source", "ledgerScopeId", "ledgerId", "ledgerQualifiedName", "state", "entryCount", "length", "sha256", "message",
)  # fmt: skip
_NUMBERS: Final = ("entryCount", "length")
RESULT_SCHEMA: Final = ", ".join(f"`{name}` {'bigint' if name in _NUMBERS else 'string'}" for name in RESULT_COLUMNS)
#: Entries to read before they are written: bytes and number.
_HELD_BYTES_MAX: Final = 8 << 20
_HELD_COUNT_MAX: Final = 4096


class Shape(NamedTuple):
    """The settings of a new ledger."""

    ensemble_size: int
    write_quorum_size: int
    ack_quorum_size: int
    digest_type: DigestType
    custom_metadata: Mapping[str, bytes]

    def over(self, options: SourceOptions) -> Shape:
        """Return this shape with the sizes that the options set. Raises UsageError."""
        names = zip(self._fields, SHAPE_OPTIONS, self[:3], strict=False)
        sizes: dict[str, Any] = {field: options.integer(name, size, 1) for field, name, size in names}
        return self._replace(**sizes)

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> Shape:
        """Return the shape of a ledger, without the custom metadata that marks a copy."""
        custom = {key: value for key, value in metadata.custom_metadata.items() if key not in (SOURCE_KEY, HASH_KEY)}
        return cls(
            metadata.ensemble_size, metadata.write_quorum_size, max(metadata.ack_quorum_size, 1),
            metadata.digest_type or DigestType.CRC32, custom,
        )  # fmt: skip


class EntryHash:
    """SHA-256 of entries in order (of each its size, 8 bytes big-endian, and payload), and their number and bytes."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.entry_count = self.length = 0

    def add(self, payload: bytes) -> None:
        """Add the next entry's payload."""
        self._hash.update(len(payload).to_bytes(8, "big"))
        self._hash.update(payload)
        self.entry_count += 1
        self.length += len(payload)

    @property
    def hex(self) -> str:
        """Return the hash of the entries so far."""
        return self._hash.hexdigest()


class CopyResult(NamedTuple):
    """The result for one ledger; entry count, length and hash describe the copy, and are None without a copy."""

    source: LedgerId
    target: LedgerId
    state: str
    entry_count: int | None = None
    length: int | None = None
    sha256: str | None = None
    message: str | None = None

    def row(self) -> dict[str, Any]:
        """Return the values of RESULT_COLUMNS."""
        values = (self.source.qualified_name, *self.target.to_json().values(), *self[2:])
        return dict(zip(RESULT_COLUMNS, values, strict=True))


class LedgerCopy:
    """A copy of `source` at `target` in progress: `begin`, then `add` every payload, then `finish`.

    `entry_count` is the number of payloads. If `begin` finds the copy `closed`, `add` and `finish` compare it and write
    nothing.
    """

    def __init__(
        self, client: Client, source: LedgerId, target: LedgerId, shape: Shape, password: bytes, entry_count: int
    ) -> None:
        self._client, self.source, self.target = client, source, target
        self._shape, self._password, self.entry_count = shape, password, entry_count
        self._handle: WriteHandle | None = None
        #: The metadata of a copy that was closed already.
        self.closed: VersionedMetadata | None = None
        self.hash = EntryHash()

    async def begin(self) -> None:
        """Create the copy, or resume an unfinished one, unless it is closed already.

        Raises Conflict if another ledger has the id, or the copy is in recovery; NotEnoughBookies, ….
        """
        bookkeeper, ledgers, target = self._client.bookkeeper, self._client.cluster.ledgers, self.target
        marked = {**self._shape.custom_metadata, SOURCE_KEY: self.source.qualified_name.encode()}
        try:
            found = ledgers.read(target)
        except LedgerNotFound:
            self._handle = await bookkeeper.create_ledger_adv(
                target.ledger_id, ledger_scope_id=target.scope_id, password=self._password,
                **self._shape._replace(custom_metadata=marked)._asdict(),
            )  # fmt: skip
            return
        custom = found.metadata.custom_metadata
        if custom.get(SOURCE_KEY) != marked[SOURCE_KEY]:
            raise Conflict(f"Ledger {target} exists, and is not a copy of ledger {self.source}")
        metadata = found.metadata
        if metadata.is_closed and (HASH_KEY in custom or metadata.last_entry_id + 1 >= self.entry_count):
            self.closed = found
            return
        if metadata.state is LedgerState.IN_RECOVERY:
            raise Conflict(f"Ledger {target}, an unfinished copy, is being recovered", hint="try again later")
        if metadata.is_closed or len(metadata.ensembles) > 1:
            # The handle begins before the first entry, and can only add fragments behind those that exist.
            metadata = metadata._replace(
                state=LedgerState.OPEN, last_entry_id=-1, length=0, ensembles=metadata.ensembles[:1]
            )
            found = found._replace(metadata=metadata, version=ledgers.write(target, metadata, found.version))
        # The run before wrote the same entries, so adding them again is safe, also to bookies that a recovery fenced.
        self._handle = WriteHandle(bookkeeper.access(target, found), own_entry_ids=False, recovery=True)

    async def add(self, payloads: Iterable[bytes]) -> None:
        """Add the next entries; all are acknowledged when this returns."""
        for payload in payloads:
            self.hash.add(payload)
            if self._handle is not None:
                await self._handle.ready()
                self._handle.add(payload)
        if self._handle is not None:
            await self._handle.flush()

    async def finish(self) -> CopyResult:
        """Close the copy, read it back, compare it, and record the hash in its custom metadata.

        Raises Corrupt if the copy differs, Conflict if it was closed at another entry.
        """
        if self._handle is not None:
            await self._handle.close()
            found = self._handle.versioned_metadata
        else:
            assert self.closed is not None
            found = self.closed
        metadata, hash = found.metadata, self.hash
        if (metadata.last_entry_id, metadata.length) != (hash.entry_count - 1, hash.length):
            raise Conflict(
                f"Ledger {self.target} was closed after {metadata.last_entry_id + 1} entries "
                f"({metadata.length} bytes), but its source has {hash.entry_count} ({hash.length} bytes)",
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
            raise Corrupt(f"Ledger {self.target} differs from its source, ledger {self.source}")

        def marked(metadata: LedgerMetadata) -> LedgerMetadata | None:
            if metadata.custom_metadata.get(HASH_KEY) == known:
                return None
            return metadata._replace(custom_metadata={**metadata.custom_metadata, HASH_KEY: known})

        update_metadata(self._client.cluster.ledgers, self.target, found, marked)
        state = COPIED if self._handle is not None else PRESENT
        return CopyResult(self.source, self.target, state, hash.entry_count, hash.length, hash.hex)


def refuse_speculation(spark: SparkSession) -> None:
    """Raise UsageError if Spark may run two attempts of a task at once.

    They would write one copy. If one changes the ensemble, the other still adds to the bookies before, so that the
    metadata names bookies without these entries.
    """
    if (spark.conf.get("spark.speculation", "false") or "").lower() == "true":
        raise UsageError(
            "spark.speculation is on: Spark may run a task twice at once, and both would write the same ledgers",
            hint="start Spark with spark.speculation=false ('bkctl pipeline': --spark-conf spark.speculation=false)",
        )


def check_store(client: Client, error: BkctlError) -> None:
    """Raise Unreachable if `error` comes from an unreachable metadata store, so that Spark runs the task again.

    Unreachable bookies fail only the ledgers that need them.
    """
    if isinstance(error, Unreachable):
        client.cluster.instance_id()


async def copy_ledger(client: Client, source: LedgerId, target: LedgerId, options: SourceOptions) -> CopyResult:
    """Copy a closed ledger with its own password, unless a verified copy exists. Raises as LedgerCopy.

    `options`: SHAPE_OPTIONS.
    """
    found = client.cluster.ledgers.read(source)
    metadata = found.metadata
    if not metadata.is_closed:
        return CopyResult(source, target, OPEN, message=f"Ledger {source} is not closed")
    shape, entry_count = Shape.of(metadata).over(options), metadata.last_entry_id + 1
    copy = LedgerCopy(client, source, target, shape, metadata.password or b"", entry_count)
    await copy.begin()
    if copy.closed is not None and HASH_KEY in copy.closed.metadata.custom_metadata:
        present = copy.closed.metadata
        if (present.last_entry_id, present.length) == (metadata.last_entry_id, metadata.length):
            sha256 = present.custom_metadata[HASH_KEY].decode("ascii", "replace")
            return CopyResult(source, target, PRESENT, present.last_entry_id + 1, present.length, sha256)
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


# --- the job migrate-scope --------------------------------------------------------------------------------------------

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
        bins = _even_bins(work, task_slots(spark) * _TASKS_PER_CORE)
        copied = rows_in_tasks(spark, bins, partial(_copy_ledgers, checked), RESULT_SCHEMA)
        rows += [row.asDict() for row in copied.collect()]
    rows.sort(key=itemgetter("source"))
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


def _copy_ledgers(options: SourceOptions, work: list[tuple[LedgerId, LedgerId]]) -> Iterator[dict[str, Any]]:
    """Copy ledgers; one row a ledger.

    Raises Unreachable if the metadata store is unreachable. Unreachable bookies fail only the ledgers that need them.
    """
    with Client(ClusterOptions(options)) as client:
        for source, target in work:
            try:
                result = client.run(copy_ledger(client, source, target, options))
            except BkctlError as error:
                check_store(client, error)
                result = CopyResult(source, target, FAILED, message=str(error))
            yield result.row()
