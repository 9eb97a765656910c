"""The jobs `export` and `import`: ledgers' payloads to Parquet, and back to ledgers.

An export is a directory, on any file system that Spark writes to:

    entries/ledgerScopeId=S/*.parquet     ledgerId, ledgerQualifiedName, entryId, size, payload
    ledgers/*.parquet                     each ledger's metadata, without its password and its bookies
    counts/*.parquet                      entryCount and size that each ledger has in `entries`; written last

With more scopes than SCOPES_MAX (one for each ledger, perhaps), or without `by_scope`, `entries` is one directory, and
`ledgerScopeId` a column of its files.

A ledger that is not closed is exported up to its last add confirmed. Without `counts/_SUCCESS` an export is incomplete.
So `counts` is the manifest that a later export reads, which leaves out ledgers that this one has as they are closed.
Ledgers that were deleted while the export ran may be in `ledgers` and, in part, in `entries`, but not in `counts`.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as F

from bkctl.errors import AlreadyExists, BkctlError, Corrupt, LedgerNotFound, NotFound
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.spark.internals import matching_uris, qualified_uri
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, frame_of, map_rows
from bkctl.spark.jobs.copying import (
    FAILED,
    PLANNED,
    RESULT_SCHEMA,
    SHAPE_OPTIONS,
    CopyResult,
    LedgerCopy,
    Shape,
    check_store,
    refuse_speculation,
)
from bkctl.spark.sources import ledgers as ledger_source
from bkctl.spark.sources import metadata as metadata_source
from bkctl.spark.sources.columns import ddl
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.options import CONNECTION_OPTIONS, Client, ClusterOptions, SourceOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ENTRY_COLUMNS: Final = (*LEDGER_COLUMNS, "entryId", "size", "payload")
METADATA_COLUMNS: Final = (
    *LEDGER_COLUMNS, "metadataFormatVersion", "state", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "digestType",
    "length", "lastEntryId", "ctime", "customMetadata",
)  # fmt: skip
#: The manifest of an export; `ctime` tells a ledger from one that was created under its id again.
COUNT_COLUMNS: Final = (*LEDGER_COLUMNS, "state", "lastEntryId", "entryCount", "size", "ctime")
#: Scopes that get a directory each; more directories would be many and small.
SCOPES_MAX: Final = 1000
#: The file that an export has once it is complete.
_COMPLETE: Final = "/counts/_SUCCESS"
_WILDCARDS: Final = "*?[{"
#: Entry id of the row that precedes a ledger's entries and describes the ledger.
_HEAD: Final = -1
#: Entries that are added before their acknowledgements are awaited.
_ENTRIES_AT_ONCE: Final = 4096
_HEAD_FIELDS: Final = (*SHAPE_OPTIONS, "digestType", "customMetadata", "entryCount")


# --- export ---------------------------------------------------------------------------------------------------------


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
    Corrupt if the number or length of entries differs from a closed ledger's metadata.
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
    return _counts(spark, path).sort(QUALIFIED_NAME)


def _changed_since(spark: SparkSession, metadata: DataFrame, since: Sequence[str]) -> DataFrame:
    """Return the ledgers of `metadata` that no export of `since` has as they are closed."""
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
    """Return the counts of written entries, without ledgers that were deleted meanwhile, unless they `are_named`.

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
                deleted.append({QUALIFIED_NAME: row[QUALIFIED_NAME]})
            elif row["wrong"]:
                raise Corrupt(
                    f"Ledger {ledger} was exported with {row['entryCount']} entries ({row['size']} bytes); its "
                    f"metadata says {row['lastEntryId'] + 1} ({row['length']} bytes)"
                )
    counts = counts.join(frame_of(spark, deleted, f"{QUALIFIED_NAME} string"), QUALIFIED_NAME, "left_anti")
    return counts.withColumn("lastEntryId", F.col("last")).select(*COUNT_COLUMNS)


def _entries(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.schema(ddl(ENTRY_COLUMNS)).parquet(f"{path}/entries")


def _counts(spark: SparkSession, *paths: str) -> DataFrame:
    return spark.read.schema(ddl(COUNT_COLUMNS)).parquet(*(f"{path}/counts" for path in paths))


# --- import ---------------------------------------------------------------------------------------------------------


def import_ledgers(
    spark: SparkSession, path: str, options: Mapping[str, str], *, to_scope_id: int | None = None, dry_run: bool = False
) -> DataFrame:
    """Create the ledgers of the export at `path`, under their ids or in the scope `to_scope_id`; one row a ledger.

    `options` are the connection's, SHAPE_OPTIONS, and `ledgerPasswordFile` or `ledgerPasswordEnv` for the new ledgers,
    since an export has no passwords. Ledgers that a run before completed are skipped, unfinished ones are resumed. If a
    ledger fails (`failed`, with a `message`), the job continues with the next one. Columns: copying.RESULT_COLUMNS.
    Raises NotFound without a complete export at `path`, and UsageError as refuse_speculation.
    """
    from pyspark.errors import AnalysisException

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
    ledgers = known.join(counts.select(QUALIFIED_NAME, "entryCount", "size"), QUALIFIED_NAME)
    if dry_run:
        return frame_of(spark, _planned(ledgers, to_scope_id), RESULT_SCHEMA)
    heads = ledgers.select(
        QUALIFIED_NAME,
        F.lit(_HEAD).cast("bigint").alias("entryId"),
        F.to_json(F.struct(*_HEAD_FIELDS)).cast("binary").alias("payload"),
    )
    count = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    rows = heads.unionByName(entries.select(QUALIFIED_NAME, "entryId", "payload"))
    rows = rows.repartition(count, QUALIFIED_NAME).sortWithinPartitions(QUALIFIED_NAME, "entryId")
    made = map_rows(rows, partial(_import_rows, checked, to_scope_id), RESULT_SCHEMA)
    return frame_of(spark, sorted((row.asDict() for row in made.collect()), key=itemgetter("source")), RESULT_SCHEMA)


def _planned(ledgers: DataFrame, to_scope_id: int | None) -> list[dict[str, Any]]:
    rows = []
    for row in ledgers.sort(QUALIFIED_NAME).select(QUALIFIED_NAME, "entryCount", "size").toLocalIterator():
        source = LedgerId.parse(row[QUALIFIED_NAME])
        rows.append(CopyResult(source, _target(source, to_scope_id), PLANNED, row["entryCount"], row["size"]).row())
    return rows


def _target(source: LedgerId, to_scope_id: int | None) -> LedgerId:
    return source if to_scope_id is None else LedgerId(to_scope_id, source.ledger_id)


def _import_rows(
    options: SourceOptions, to_scope_id: int | None, batches: Iterable[list[dict[str, Any]]]
) -> Iterator[list[dict[str, Any]]]:
    """Create the ledgers of ordered rows: of each its head, then its entries.

    An error of one ledger goes to its row; that of an unreachable metadata store is raised.
    """
    with Client(ClusterOptions(options)) as client:
        for name, of_ledger in groupby(chain.from_iterable(batches), itemgetter(QUALIFIED_NAME)):
            rows = iter(of_ledger)
            head = next(rows)
            if head["entryId"] != _HEAD:
                continue  # The ledger was deleted while the export ran.
            source = LedgerId.parse(name)
            target = _target(source, to_scope_id)
            try:
                result = client.run(_import_ledger(client, source, target, json.loads(head["payload"]), rows, options))
            except BkctlError as error:
                check_store(client, error)
                result = CopyResult(source, target, FAILED, message=str(error))
            yield [result.row()]


async def _import_ledger(
    client: Client, source: LedgerId, target: LedgerId, head: Mapping[str, Any], rows: Iterator[dict[str, Any]],
    options: SourceOptions,
) -> CopyResult:  # fmt: skip
    shape = Shape(
        head["ensembleSize"], head["writeQuorumSize"], head["ackQuorumSize"],
        DigestType[head.get("digestType") or "CRC32"],
        {key: b64decode(value) for key, value in head["customMetadata"].items()},
    )  # fmt: skip
    password = options.secret("ledgerPassword") or b""
    copy = LedgerCopy(client, source, target, shape.over(options), password, int(head["entryCount"]))
    await copy.begin()
    while some := list(islice(rows, _ENTRIES_AT_ONCE)):
        if some[0]["entryId"] != copy.hash.entry_count:
            raise Corrupt(f"Entry {copy.hash.entry_count} of ledger {source} is not in the export")
        await copy.add(row["payload"] for row in some)
    if copy.hash.entry_count != copy.entry_count:
        raise Corrupt(f"Ledger {source} has {copy.hash.entry_count} entries in the export, not {copy.entry_count}")
    return await copy.finish()
