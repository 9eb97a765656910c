"""The jobs `migrate-scope`, `export` and `import`: ledgers under other ids, to Parquet, and from it to ledgers again.

A copy has the payloads, shape and custom metadata of its source. Its custom metadata also names the source and, once
the copy was read back and compared, the hash of its entries. So a second run skips verified copies and resumes
unfinished ones: it adds the same entries under the same ids again, which does not change entries that exist. A copy
without the hash that was closed too early (when too few bookies were left, or by a recovery) is unfinished as well.

An export is a directory, on any file system that Spark writes to:

    entries/ledgerScopeId=S/*.parquet     ledgerId, ledgerQualifiedName, entryId, size, payload
    ledgers/*.parquet                     each ledger's metadata, without its password and its bookies
    counts/*.parquet                      entryCount and size that each ledger has in `entries`; written last

With more scopes than SCOPES_MAX (one for each ledger, perhaps), or without `by_scope`, `entries` is one directory, and
`ledgerScopeId` a column of its files.

A ledger that is not closed is exported up to its last add confirmed. Without `counts/_SUCCESS` an export is incomplete.
So `counts` is the manifest that a later export reads, which leaves out ledgers that this one has as they are closed.
Ledgers that were deleted while the export ran are DELETED in `counts`, and `entries` may have parts of them.
"""

from __future__ import annotations

import heapq
import json
from base64 import b64decode
from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice, tee
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F

from bkctl.client.ensemble import update_metadata
from bkctl.client.reader import read_entries, read_runs
from bkctl.client.write_handle import WriteHandle
from bkctl.errors import (
    AlreadyExists,
    BkctlError,
    Conflict,
    Corrupt,
    LedgerNotFound,
    NotFound,
    Unreachable,
    UsageError,
)  # fmt: skip
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import LedgerMetadata, LedgerState
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.ledgers import VersionedMetadata
from bkctl.metadata.store import attempt, value_of
from bkctl.replication.copy import EntryHash
from bkctl.spark.internals import matching_uris, qualified_uri
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, frame_of, map_rows, rows_in_tasks, task_slots
from bkctl.spark.sources import ledgers as ledger_source
from bkctl.spark.sources import metadata as metadata_source
from bkctl.spark.sources.columns import ddl
from bkctl.spark.sources.filters import LEDGER_COLUMNS
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
        found = _copy_of(attempt(ledgers.read, target), self.source, target)
        if found is None:
            marked = {**self._shape.custom_metadata, SOURCE_KEY: self.source.qualified_name.encode()}
            self._handle = await bookkeeper.create_ledger_adv(
                target.ledger_id, ledger_scope_id=target.scope_id, password=self._password,
                **self._shape._replace(custom_metadata=marked)._asdict(),
            )  # fmt: skip
            return
        metadata = found.metadata
        if metadata.is_closed and (
            HASH_KEY in metadata.custom_metadata or metadata.last_entry_id + 1 >= self.entry_count
        ):
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
        """Add the next entries, each once there is room for it on the way."""
        for payload in payloads:
            self.hash.add(payload)
            if self._handle is not None:
                await self._handle.ready()
                self._handle.add(payload)

    async def flush(self) -> None:
        """Wait until all entries are acknowledged."""
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


def _copy_of(found: VersionedMetadata | BkctlError, source: LedgerId, target: LedgerId) -> VersionedMetadata | None:
    """Return `found` at `target`, None for no ledger. Raises Conflict for another ledger than a copy of `source`."""
    if isinstance(found, LedgerNotFound):
        return None
    if value_of(found).metadata.custom_metadata.get(SOURCE_KEY) != source.qualified_name.encode():
        raise Conflict(f"Ledger {target} exists, and is not a copy of ledger {source}")
    return value_of(found)


def _foreseen(cluster: Cluster, planned: Iterable[CopyResult]) -> Iterator[CopyResult]:
    """Yield the results of a dry run: PRESENT for verified copies, FAILED where another ledger has the id."""
    results, asked = tee(planned)
    for each, (_, there) in zip(results, cluster.ledgers.read_many(each.target for each in asked), strict=True):
        found = attempt(_copy_of, there, each.source, each.target)
        if isinstance(found, BkctlError):
            yield CopyResult(each.source, each.target, FAILED, message=str(found))
        else:
            sha256 = found.metadata.custom_metadata.get(HASH_KEY) if found and found.metadata.is_closed else None
            yield each if sha256 is None else each._replace(state=PRESENT, sha256=sha256.decode("ascii", "replace"))


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


def _row_of(
    client: Client, source: LedgerId, target: LedgerId, copying: Coroutine[Any, Any, CopyResult]
) -> dict[str, Any]:
    """Return the row of a ledger's result, FAILED with the reason if its copy raises an error.

    Raises Unreachable if the metadata store is unreachable, so that Spark runs the task again. Unreachable bookies fail
    only the ledgers that need them.
    """
    try:
        return client.run(copying).row()
    except BkctlError as error:
        if isinstance(error, Unreachable):
            client.cluster.instance_id()
        return CopyResult(source, target, FAILED, message=str(error)).row()


def _results(spark: SparkSession, rows: Iterable[dict[str, Any]]) -> DataFrame:
    found: DataFrame = frame_of(spark, sorted(rows, key=itemgetter("source")), RESULT_SCHEMA)
    return found


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
    if metadata.last_entry_id >= 0:
        async for run in read_runs(client.bookkeeper.access(source, found), 0, metadata.last_entry_id):
            await copy.add(entry.payload for entry in run)
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
    return _results(spark, rows)


def _plan(
    cluster: Cluster, ledgers: Iterable[LedgerId], to_scope_id: int, *, named: bool, dry_run: bool
) -> tuple[list[CopyResult], list[_Work]]:
    """Return the results that need no copy, and the ledgers to copy. A `named` ledger must exist. Raises UsageError."""
    results: list[CopyResult] = []
    planned: list[CopyResult] = []
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
            planned.append(CopyResult(source, target, PLANNED, metadata.last_entry_id + 1, metadata.length))
        else:
            work.append((found.metadata.length + _LEDGER_WEIGHT_BYTES, source, target))
    return [*results, *_foreseen(cluster, planned)], work


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
    """Copy ledgers; one row a ledger. Raises as `_row_of`."""
    with Client(ClusterOptions(options)) as client:
        for source, target in work:
            yield _row_of(client, source, target, copy_ledger(client, source, target, options))


# --- the job export ---------------------------------------------------------------------------------------------------

ENTRY_COLUMNS: Final = (*LEDGER_COLUMNS, "entryId", "size", "payload")
METADATA_COLUMNS: Final = (
    *LEDGER_COLUMNS, "metadataFormatVersion", "state", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "digestType",
    "length", "lastEntryId", "ctime", "customMetadata",
)  # fmt: skip
#: The manifest of an export; `ctime` tells a ledger from one that was created under its id again.
COUNT_COLUMNS: Final = (*LEDGER_COLUMNS, "state", "lastEntryId", "entryCount", "size", "ctime")
#: State in `counts` of a ledger that was deleted while it was exported; an import leaves it out.
_DELETED: Final = "DELETED"
#: Scopes that get a directory each; more directories would be many and small.
SCOPES_MAX: Final = 1000
#: The file that an export has once it is complete.
_COMPLETE: Final = "/counts/_SUCCESS"
_WILDCARDS: Final = "*?[{"
#: Entry id of the row that precedes a ledger's entries and describes the ledger.
_HEAD: Final = -1
#: Rows that are taken from Spark at once.
_ENTRIES_AT_ONCE: Final = 4096
_HEAD_FIELDS: Final = (*SHAPE_OPTIONS, "digestType", "customMetadata", "entryCount", "size")


def former_exports(spark: SparkSession, pattern: str, path: str) -> list[str]:
    """Return the complete exports that `pattern` matches (Hadoop's wildcards), without the one at `path`.

    Raises NotFound if `pattern` has no wildcard and an incomplete export, or nothing, is there.
    """
    found = [uri.removesuffix(_COMPLETE) for uri in matching_uris(spark, f"{pattern.rstrip('/')}{_COMPLETE}")]
    if not found and not any(sign in pattern for sign in _WILDCARDS):
        raise NotFound(f"{pattern} is not a complete export", hint="name one that 'bkctl pipeline export' created")
    return [uri for uri in found if uri != qualified_uri(spark, path)]


def export_ledgers(
    spark: SparkSession,
    path: str,
    options: Mapping[str, str],
    *,
    overwrite: bool = False,
    by_scope: bool = True,
    states: Collection[str] = (),
    since: Sequence[str] = (),
) -> DataFrame:
    """Export ledgers to the directory `path`; one row a ledger: its ids, state, lastEntryId, entryCount, size, ctime.

    `options` are the connection's, and `ledger` or `ledgerScopeId` (default: all), `states` the states of ledgers to
    export (default: any). `since` are paths of complete exports: closed ledgers that one of them has are left out; such
    as were not closed there, or were created again, are exported whole. With `by_scope` the entries of each scope get a
    directory, unless there are more than SCOPES_MAX. Ledgers that are deleted before they were read are left out,
    unless `ledger` names them.
    Raises AlreadyExists for an existing directory, unless `overwrite`; the error of an entry that cannot be read;
    Corrupt if the number or length of entries differs from a closed ledger's metadata, or `since` has lost entries.
    """
    if not overwrite and "://" not in path and Path(path).exists():
        raise AlreadyExists(f"{path} exists", hint="choose another directory, or add --overwrite")
    mode = "overwrite" if overwrite else "errorifexists"
    connection = {name: value for name, value in options.items() if name not in ("ledger", "ledgerScopeId")}
    metadata = spark.read.format(metadata_source.NAME).options(**options, columns=",".join(METADATA_COLUMNS)).load()
    if states:
        metadata = metadata.filter(F.col("state").isin(*states))
    if since:
        metadata = _changed_since(spark, metadata, since)
    if overwrite:
        # From here on the export in this directory is incomplete.
        frame_of(spark, [], "entryCount bigint").write.mode(mode).parquet(f"{path}/counts")
    metadata.write.mode(mode).parquet(f"{path}/ledgers")
    # The files do not change while the entries are read; the metadata store may.
    ledgers = spark.read.schema(ddl(METADATA_COLUMNS)).parquet(f"{path}/ledgers")
    filled = ledgers.filter((F.col("state") != "CLOSED") | (F.col("lastEntryId") >= 0)).select(QUALIFIED_NAME)
    are_named = "ledger" in options
    _write_entries(spark, path, filled, connection, mode=mode, by_scope=by_scope, are_named=are_named)
    counts = _checked_counts(spark, path, ledgers, connection, are_named=are_named)
    counts.write.mode("overwrite").parquet(f"{path}/counts")
    return _counts(spark, path).filter(F.col("state") != _DELETED).sort(QUALIFIED_NAME)


def _changed_since(spark: SparkSession, metadata: DataFrame, since: Sequence[str]) -> DataFrame:
    """Return the ledgers of `metadata` that no export of `since` has as they are closed."""
    for path in since:
        whole = _counts(spark, path).filter(F.col("state") != _DELETED)
        (count,) = whole.agg(F.sum("entryCount")).collect()[0]
        try:
            found = _entries(spark, path).join(whole.select(QUALIFIED_NAME), QUALIFIED_NAME, "left_semi").count()
        except AnalysisException:  # The directory is missing.
            found = 0
        if found < (count or 0):
            raise Corrupt(f"{path} has lost entries", hint="export without it, and do not rely on it")
    names = (QUALIFIED_NAME, "state", "lastEntryId", "size", "ctime")
    closed = _counts(spark, *since).filter(F.col("state") == "CLOSED")
    known = closed.select(*(F.col(name).alias(f"known_{name}") for name in names))
    # Exports of earlier releases have no ctime.
    created_then = F.col("known_ctime").isNull() | F.col("known_ctime").eqNullSafe(F.col("ctime"))
    is_same = (
        (F.col(QUALIFIED_NAME) == F.col(f"known_{QUALIFIED_NAME}")) & (F.col("state") == F.col("known_state"))
        & (F.col("lastEntryId") == F.col("known_lastEntryId")) & (F.col("length") == F.col("known_size"))
        & created_then
    )  # fmt: skip
    return metadata.join(known, is_same, "left_anti")


def _write_entries(
    spark: SparkSession, path: str, ledgers: DataFrame, connection: Mapping[str, str],
    *, mode: str, by_scope: bool, are_named: bool,
) -> None:  # fmt: skip
    with TemporaryDirectory(prefix="bkctl-") as directory:
        names = Path(directory, "ledgers")
        scope_count, scope = 0, ""
        with names.open("w") as file:
            for (name,) in ledgers.sort(QUALIFIED_NAME).toLocalIterator():
                file.write(f"{name}\n")
                if name[:16] != scope:
                    scope_count, scope = scope_count + 1, name[:16]
        entries = (
            spark.read.format(ledger_source.NAME)
            .options(**connection, ledgersFile=str(names), columns=",".join(ENTRY_COLUMNS), failOnDataLoss=are_named)
            .load()
        )
        writer = entries.write.mode(mode)
        if by_scope and scope_count <= SCOPES_MAX:
            writer = writer.partitionBy("ledgerScopeId")
        writer.parquet(f"{path}/entries")


def _checked_counts(
    spark: SparkSession, path: str, ledgers: DataFrame, connection: Mapping[str, str], *, are_named: bool
) -> DataFrame:
    """Return the counts of written entries; ledgers that were deleted meanwhile are _DELETED, unless they `are_named`.

    Raises Corrupt if a ledger's counts differ from its metadata.
    """
    written = _entries(spark, path).groupBy(QUALIFIED_NAME)
    counted = written.agg(F.count("*").alias("entryCount"), F.sum("size").alias("size"), F.max("entryId").alias("last"))
    counts = ledgers.select(*LEDGER_COLUMNS, "state", "lastEntryId", "length", "ctime").join(
        counted, QUALIFIED_NAME, "left"
    )
    counts = counts.withColumns(
        {"entryCount": F.coalesce("entryCount", F.lit(0)), "size": F.coalesce("size", F.lit(0)),
         "last": F.coalesce("last", F.lit(-1))}
    )  # fmt: skip
    closed = F.col("state") == "CLOSED"
    wrong = (F.col("entryCount") != F.col("last") + 1) | (
        closed & ((F.col("last") != F.col("lastEntryId")) | (F.col("size") != F.col("length")))
    )
    # Counts of a ledger that is not closed do not tell where its entries end.
    doubtful = counts.withColumn("wrong", wrong).filter(wrong | ~closed).sort(QUALIFIED_NAME)
    rows = {LedgerId.parse(row[QUALIFIED_NAME]): row for row in doubtful.toLocalIterator()}
    deleted = []
    with ClusterOptions(SourceOptions("export", connection, CONNECTION_OPTIONS)).open() as cluster:
        for ledger, found in cluster.ledgers.read_many(rows):
            row = rows[ledger]
            if isinstance(found, LedgerNotFound) and not are_named:
                deleted.append({QUALIFIED_NAME: row[QUALIFIED_NAME], "now": _DELETED})
            elif row["wrong"]:
                raise Corrupt(
                    f"Ledger {ledger} was exported with {row['entryCount']} entries ({row['size']} bytes); its "
                    f"metadata says {row['lastEntryId'] + 1} ({row['length']} bytes)"
                )
    counts = counts.join(frame_of(spark, deleted, f"{QUALIFIED_NAME} string, now string"), QUALIFIED_NAME, "left")
    counts = counts.withColumns({"state": F.coalesce("now", "state"), "lastEntryId": F.col("last")})
    return counts.select(*COUNT_COLUMNS)


def _entries(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.schema(ddl(ENTRY_COLUMNS)).parquet(f"{path}/entries")


def _counts(spark: SparkSession, *paths: str) -> DataFrame:
    return spark.read.schema(ddl(COUNT_COLUMNS)).parquet(*(f"{path}/counts" for path in paths))


# --- the job import ---------------------------------------------------------------------------------------------------


def import_ledgers(
    spark: SparkSession, path: str, options: Mapping[str, str], *, to_scope_id: int | None = None, dry_run: bool = False
) -> DataFrame:
    """Create the ledgers of the export at `path`, under their ids or in the scope `to_scope_id`; one row a ledger.

    `options` are the connection's, SHAPE_OPTIONS, and `ledgerPasswordFile` or `ledgerPasswordEnv` for the new ledgers,
    since an export has no passwords. Ledgers that a run before completed are skipped, unfinished ones are resumed. If a
    ledger fails (`failed`, with a `message`), the job continues with the next one. Columns: copying.RESULT_COLUMNS.
    Raises NotFound without a complete export at `path`, UsageError as refuse_speculation, or for two ledgers that would
    have one id in `to_scope_id`.
    """
    checked = SourceOptions(
        "import", options, (*CONNECTION_OPTIONS, *SHAPE_OPTIONS, "ledgerPasswordFile", "ledgerPasswordEnv")
    )
    ClusterOptions(checked)
    if not dry_run:
        refuse_speculation(spark)
    try:
        known = spark.read.schema(ddl(METADATA_COLUMNS)).parquet(f"{path}/ledgers")
        counts = _counts(spark, path)
        entries = _entries(spark, path)
    except AnalysisException as error:
        raise NotFound(f"{path} is not a complete export", hint="create one with 'bkctl pipeline export'") from error
    # An interrupted export with --overwrite leaves the counts empty.
    if counts.isEmpty() and not known.isEmpty():
        raise NotFound(f"{path} is not a complete export", hint="export again")
    exported = counts.select(QUALIFIED_NAME, "entryCount", "size", F.col("state").alias("exported"))
    ledgers = known.join(exported, QUALIFIED_NAME, "full").filter(~F.col("exported").eqNullSafe(_DELETED))
    is_whole = F.col("entryCount").isNotNull() & F.col("ensembleSize").isNotNull()
    message = (
        "the export has lost its metadata or its counts (or an earlier bkctl made it while the ledger was deleted): "
        "export the ledger again"
    )
    lost = [
        CopyResult(each.source, each.target, FAILED, message=message).row()
        for each in _planned(ledgers.filter(~is_whole), to_scope_id)
    ]
    ledgers = ledgers.filter(is_whole)
    if to_scope_id is not None:
        of_id = ledgers.groupBy(F.substring(QUALIFIED_NAME, 17, 16).alias("id"))
        found = of_id.agg(F.min(QUALIFIED_NAME).alias("one"), F.max(QUALIFIED_NAME).alias("other"))
        for row in found.filter(F.col("one") != F.col("other")).limit(1).collect():
            one, other = map(LedgerId.parse, (row["one"], row["other"]))
            raise UsageError(f"Ledgers {one} and {other} would both become {_target(one, to_scope_id)}")
    if dry_run:
        with ClusterOptions(checked).open() as cluster:
            foreseen = _foreseen(cluster, _planned(ledgers, to_scope_id))
            return _results(spark, chain(lost, (each.row() for each in foreseen)))
    heads = ledgers.select(
        QUALIFIED_NAME,
        F.lit(_HEAD).cast("bigint").alias("entryId"),
        F.to_json(F.struct(*_HEAD_FIELDS)).cast("binary").alias("payload"),
    )
    count = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    # A row with another id must not come before the head of its ledger, which lacks that entry then.
    rows = heads.unionByName(entries.filter("entryId >= 0").select(QUALIFIED_NAME, "entryId", "payload"))
    rows = rows.repartition(count, QUALIFIED_NAME).sortWithinPartitions(QUALIFIED_NAME, "entryId")
    made = map_rows(rows, partial(_import_rows, checked, to_scope_id), RESULT_SCHEMA)
    return _results(spark, chain(lost, (row.asDict() for row in made.collect())))


def _planned(ledgers: DataFrame, to_scope_id: int | None) -> Iterator[CopyResult]:
    for name, *counts in ledgers.select(QUALIFIED_NAME, "entryCount", "size").toLocalIterator():
        source = LedgerId.parse(name)
        yield CopyResult(source, _target(source, to_scope_id), PLANNED, *counts)


def _target(source: LedgerId, to_scope_id: int | None) -> LedgerId:
    return source if to_scope_id is None else LedgerId(to_scope_id, source.ledger_id)


def _import_rows(
    options: SourceOptions, to_scope_id: int | None, batches: Iterable[list[dict[str, Any]]]
) -> Iterator[list[dict[str, Any]]]:
    """Create the ledgers of ordered rows: of each its head, then its entries. Raises as `_row_of`."""
    with Client(ClusterOptions(options)) as client:
        for name, of_ledger in groupby(chain.from_iterable(batches), itemgetter(QUALIFIED_NAME)):
            rows = iter(of_ledger)
            head = next(rows)
            if head["entryId"] != _HEAD:
                continue  # The ledger was deleted while the export ran.
            source = LedgerId.parse(name)
            target = _target(source, to_scope_id)
            work = _import_ledger(client, source, target, json.loads(head["payload"]), rows, options)
            yield [_row_of(client, source, target, work)]


async def _import_ledger(
    client: Client, source: LedgerId, target: LedgerId, head: Mapping[str, Any], rows: Iterator[dict[str, Any]],
    options: SourceOptions,
) -> CopyResult:  # fmt: skip
    try:
        custom = {key: b64decode(value) for key, value in (head.get("customMetadata") or {}).items()}
        digest_type = DigestType[head.get("digestType") or "CRC32"]
        ensemble_size, write_size, ack_size = (int(head[name]) for name in SHAPE_OPTIONS)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(f"The export has damaged metadata of ledger {source}: {error!r}") from error
    metadata = LedgerMetadata(ensemble_size, write_size, ack_size, digest_type, None, (), custom_metadata=custom)
    shape = Shape.of(metadata).over(options)
    copy = LedgerCopy(client, source, target, shape, options.secret("ledgerPassword") or b"", int(head["entryCount"]))
    await copy.begin()
    while some := list(islice(rows, _ENTRIES_AT_ONCE)):
        for entry_id, row in enumerate(some, copy.hash.entry_count):
            if row["entryId"] != entry_id or row["payload"] is None:
                raise Corrupt(f"The export lacks entry {entry_id} of ledger {source}, or has an entry twice")
        await copy.add(row["payload"] for row in some)
        await copy.flush()  # Nothing moves until the next rows are there.
    if (copy.hash.entry_count, copy.hash.length) != (copy.entry_count, head.get("size")):
        raise Corrupt(
            f"Ledger {source} has {copy.hash.entry_count} entries in the export ({copy.hash.length} bytes), not "
            f"{copy.entry_count} ({head.get('size')} bytes)"
        )
    return await copy.finish()
