"""The job `integrity`: all that metadata promises, on each bookie of its ensemble, against those bookies' files.

An entry counts as there where a bookie that starts on these files serves it: its index names a place in an entry log at
which that entry stands and matches its digest, or a replay of the journal brings it (what a running bookie has not
written to its logs yet). All digests are checked, of copies too that no index names.

Closed ledgers promise what their metadata says; of an open one only the entries up to the highest last add confirmed
that any of its entries carries are promised. Source: LedgerChecker, ScanAndCompareGarbageCollector; DigestManager.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError, NotFound
from bkctl.files.entry_log import EntryLogReader
from bkctl.files.journal import JournalReader
from bkctl.formats.entry import DigestManager, DigestType
from bkctl.formats.entry_log import log_id_of
from bkctl.ids import LedgerId
from bkctl.spark.jobs.bookies import check_clusters, open_store
from bkctl.spark.jobs.garbage import arrow_schema
from bkctl.spark.jobs.inventory import NAME, log_records, of_ledgers, with_bookie, with_ledger_ids
from bkctl.spark.jobs.journal_audit import journal_entries
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.jobs.bookies import BookieFiles


class Problem(StrEnum):
    """What is wrong; the values are the words of every output."""

    #: The bookie has the entry nowhere, although metadata says that it should.
    MISSING = "missing"
    #: What stands there does not match the entry's digest, or cannot be read.
    DAMAGED = "damaged"
    #: An entry log has it, but the bookie's index does not know where, so that it is not served.
    NOT_INDEXED = "notIndexed"
    #: The index names a place where something else stands.
    MISPLACED = "misplaced"
    #: A file ends in damage: what stands behind is known by its index alone, if at all.
    UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Integrity:
    """What was found, as DataFrames that are computed when they are asked for.

    `findings`: ledgerQualifiedName, ledgerScopeId, ledgerId, entryId, bookieId, problem, ledgerState, file, offset (of
    the size field), detail, intactCount (how many bookies of the write set serve it; 0: it is lost), writeQuorumSize.
    `unchecked`: bookies that ensembles name and whose files were not given: bookieId, ledgerCount.
    `checked`: one row: ledgerCount, replicaCount (entries times the bookies that should have them), entryCount.
    """

    findings: DataFrame
    unchecked: DataFrame
    checked: DataFrame
    _kept: tuple[DataFrame, ...]

    def release(self) -> None:
        """Give back what Spark keeps for these DataFrames."""
        for each in self._kept:
            each.unpersist()


_KEY: Final = ("bookieId", NAME, "entryId")
_LOOKED: Final = (
    "bookieId string, ledgerQualifiedName string, entryId bigint, promised boolean, problem string, file string, "
    "offset bigint, detail string"
)
#: Entry ids that one row of the plan unfolds into, so that no ledger makes a huge array.
_CHUNK: Final = 8192
_OPEN_LOGS_MAX: Final = 64


def integrity(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    connection: Mapping[str, str],
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
    indexes: bool = True,
) -> Integrity:
    """Compare what metadata promises with what the bookies' files hold. Without `indexes` only logs and journals count.

    `connection` are the options of `bookkeeper.metadata`. Metadata is read before the files, so that what is written
    meanwhile is not missed. Raises Conflict where a bookie belongs to another cluster.
    """
    from pyspark.sql import functions as F

    check_clusters(bookies, connection)
    metadata = _metadata(spark, connection, ledger, scope_id).persist()
    metadata.count()
    held = _held(spark, bookies, ledger, scope_id, indexes=indexes).persist()
    promised, unchecked = _promised(spark, bookies, metadata, held)
    described = metadata.select(NAME, "digestType", F.col("state").alias("ledgerState"), "writeQuorumSize")
    judged = _judged(promised, held, described, indexes=indexes)
    suspects = _suspects(judged, bookies, connection).persist()
    found = suspects.filter(F.col("problem").isNotNull())
    intact = judged.filter(F.col("promised") & (F.col("verdict") == "intact")).select(NAME, "entryId")
    intact = intact.unionByName(suspects.filter(F.col("promised") & F.col("problem").isNull()).select(NAME, "entryId"))
    keys = found.select(NAME, "entryId").distinct()
    counts = keys.join(intact, [NAME, "entryId"]).groupBy(NAME, "entryId").agg(F.count("*").alias("intactCount"))
    more = described.drop("digestType")
    findings = found.join(counts, [NAME, "entryId"], "left").fillna(0, ["intactCount"]).join(more, NAME)
    findings = with_ledger_ids(findings).unionByName(_unreadable(held), allowMissingColumns=True).drop("promised")
    checked = promised.agg(
        F.countDistinct(NAME).alias("ledgerCount"),
        F.countDistinct(NAME, "entryId").alias("entryCount"),
        F.count("*").alias("replicaCount"),
    )
    order = (NAME, "entryId", "bookieId", "file", "offset")
    return Integrity(findings.orderBy(*order), unchecked, checked, (metadata, held, suspects))


# --- what should be there -------------------------------------------------------------------------------------------


def _metadata(
    spark: SparkSession, connection: Mapping[str, str], ledger: LedgerId | None, scope_id: int | None
) -> DataFrame:
    columns = (NAME, "state", "ensembleSize", "writeQuorumSize", "digestType", "lastEntryId", "ensembles")
    chosen = {**of_ledgers(ledger, scope_id), **connection, "columns": ",".join(columns)}
    return spark.read.format("bookkeeper.metadata").options(**chosen).load()


def _promised(
    spark: SparkSession, bookies: Sequence[BookieFiles], metadata: DataFrame, held: DataFrame
) -> tuple[DataFrame, DataFrame]:
    """Every (bookie, ledger, entry) that metadata promises on the bookies given; the bookies that are not."""
    from pyspark.sql import functions as F

    is_open = F.col("state") != "CLOSED"
    of_open = held.join(metadata.filter(is_open).select(NAME), NAME, "left_semi")
    # A damaged entry must not say how far its ledger goes; without a digest that anybody can check it has to.
    confirmed = of_open.groupBy(NAME).agg(F.coalesce(F.max("sureLac"), F.max("anyLac")).alias("last"))
    open_ledgers = metadata.filter(is_open).join(confirmed, NAME)
    closed = metadata.filter(~is_open).withColumn("last", F.col("lastEntryId"))
    ledgers = closed.unionByName(open_ledgers)
    fragments = ledgers.select(
        NAME,
        "ensembleSize",
        "writeQuorumSize",
        F.explode(
            F.expr(
                "transform(ensembles, (each, i) -> struct(each.firstEntryId AS first, "
                "least(coalesce(get(ensembles, i + 1).firstEntryId - 1, last), last) AS last, each.bookies AS bookies))"
            )
        ).alias("fragment"),
    ).select(NAME, "ensembleSize", "writeQuorumSize", "fragment.*")
    given = spark.createDataFrame([(each.bookie_id, True) for each in bookies], "bookieId string, given boolean")
    entries = (
        fragments.filter("first <= last")
        .withColumn("chunk", F.explode(F.expr(f"sequence(first, last, {_CHUNK}L)")))
        .withColumn("entryId", F.explode(F.expr(f"sequence(chunk, least(chunk + {_CHUNK - 1}L, last))")))
        .withColumn("copy", F.explode(F.expr("sequence(0, writeQuorumSize - 1)")))
        .withColumn("bookieId", F.expr("get(bookies, cast(pmod(entryId + copy, ensembleSize) AS int))"))
        .select(*_KEY)
    )
    promised = entries.join(F.broadcast(given), "bookieId", "left_semi").withColumn("promised", F.lit(True))
    named = fragments.filter("first <= last").select(NAME, F.explode("bookies").alias("bookieId"))
    absent = named.join(F.broadcast(given), "bookieId", "left_anti")
    unchecked = absent.groupBy("bookieId").agg(F.countDistinct(NAME).alias("ledgerCount")).orderBy("bookieId")
    return promised, unchecked


# --- what is there --------------------------------------------------------------------------------------------------


def _held(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    ledger: LedgerId | None,
    scope_id: int | None,
    *,
    indexes: bool,
) -> DataFrame:
    """What each bookie's files say of each entry, a row each: copies in logs, place in the index, record in journals.

    Rows without a ledger hold the damages of one bookie's files.
    """
    from pyspark.sql import functions as F

    nothing = {
        "copy": "struct<file:string,logId:bigint,offset:bigint,digest:string>",
        "place": "struct<logId:bigint,offset:bigint>",
        "journaled": "struct<file:string,offset:bigint,digest:string>",
        "lac": "bigint",
        "sure": "boolean",
        DAMAGE: TYPES[DAMAGE],
    }

    def row(frame: DataFrame, **values: Column) -> DataFrame:
        rest = [F.lit(None).cast(kind).alias(name) for name, kind in nothing.items() if name not in values]
        return frame.select(*_KEY, *(column.alias(name) for name, column in values.items()), *rest)

    parts: list[DataFrame] = []
    # No entry confirms itself, so that a damaged one that nobody can tell (HMAC, DUMMY) promises nothing beyond it.
    lac, sure = F.least("lastAddConfirmed", F.col("entryId") - 1), F.col("digest").isNotNull()
    try:
        wanted = [NAME, "entryId", "logId", "offset", "digest", "lastAddConfirmed"]
        records = log_records(spark, bookies, wanted, ledger=ledger, scope_id=scope_id)
        is_data = F.col(DAMAGE).isNull()
        copy = F.when(is_data, F.struct("file", "logId", "offset", "digest"))
        parts.append(row(records, copy=copy, lac=lac, sure=sure, damage=F.col(DAMAGE)))
    except NotFound:
        pass  # Bookies that have written no entry log yet.
    if indexes:
        places = {each: bookie.bookie_id for bookie in bookies for each in bookie.index_dirs}
        chosen = {
            **of_ledgers(ledger, scope_id),
            "mode": "permissive",
            "columns": f"file,bookieId,{NAME},entryId,logId,offset",
        }
        known = spark.read.format("bookkeeper.index").options(**chosen).load(list(places))
        place = F.when(F.col(DAMAGE).isNull(), F.struct("logId", "offset"))
        parts.append(row(with_bookie(known, places), place=place, damage=F.col(DAMAGE)))
    journals = journal_entries(spark, bookies, ["digest", "lastAddConfirmed"], ledger=ledger, scope_id=scope_id)
    if journals is not None:
        journaled = F.struct("file", "offset", "digest")
        parts.append(row(journals.filter("replayed"), journaled=journaled, lac=lac, sure=sure))
    if not parts:
        raise NotFound("The bookies given have no files to look at")
    together = parts[0]
    for part in parts[1:]:
        together = together.unionByName(part)
    return together.groupBy(*_KEY).agg(
        F.collect_list("copy").alias("copies"),
        F.max("place").alias("place"),
        F.max("journaled").alias("journaled"),
        F.max(F.when(F.col("sure"), F.col("lac"))).alias("sureLac"),
        F.max("lac").alias("anyLac"),
        F.collect_set(DAMAGE).alias("damages"),
    )


def _unreadable(held: DataFrame) -> DataFrame:
    """The damages, as findings without a ledger."""
    from pyspark.sql import functions as F

    return held.select("bookieId", F.explode("damages").alias(DAMAGE)).select(
        "bookieId",
        F.lit(Problem.UNREADABLE.value).alias("problem"),
        F.col(f"{DAMAGE}.file").alias("file"),
        F.col(f"{DAMAGE}.offset").alias("offset"),
        F.col(f"{DAMAGE}.reason").alias("detail"),
    )


# --- the comparison -------------------------------------------------------------------------------------------------


def _judged(promised: DataFrame, held: DataFrame, described: DataFrame, *, indexes: bool) -> DataFrame:
    """Each entry that is promised or held, of ledgers that there are, with its `verdict` and what to `look` at again.

    `verdict` is of promised ones: intact, missing, notIndexed, or look (null: the first of the looks decides).
    """
    from pyspark.sql import functions as F

    rows = promised.join(held.filter(F.col(NAME).isNotNull()), list(_KEY), "full_outer")
    rows = rows.withColumn("promised", F.coalesce("promised", F.lit(False))).join(described, NAME, "inner")
    if indexes:
        at_place = "filter(copies, each -> each.logId = place.logId AND each.offset = place.offset)"
        rows = rows.withColumn("served", F.expr(f"get({at_place}, 0)"))
    else:
        # Whichever an index might name.
        rows = rows.withColumn("served", F.expr("array_max(copies)"))
        rows = rows.withColumn("place", F.struct("served.logId", "served.offset"))
        rows = rows.withColumn("place", F.when(F.col("served").isNotNull(), F.col("place")))

    def matches(copy: str) -> str:
        return f"(digestType IS NULL OR digestType = 'DUMMY' OR {copy}.digest <=> digestType)"

    def look(copy: str, kind: str, decides: bool) -> str:
        file = "cast(NULL AS string)" if kind == "place" else f"{copy}.file"
        log_id = "cast(NULL AS bigint)" if kind == "journal" else f"{copy}.logId"
        return (
            f"struct('{kind}' AS kind, {file} AS file, {log_id} AS logId, {copy}.offset AS offset, "
            f"{str(decides).lower()} AS decides)"
        )

    indexed, journaled = F.col("place").isNotNull(), F.col("journaled").isNotNull()
    verdict = (
        F.when(~F.col("promised"), None)
        .when(F.col("served").isNotNull() & F.expr(matches("served")), "intact")
        .when(indexed, "look")
        .when(journaled & F.expr(matches("journaled")), "intact")
        .when(journaled, "look")
        .when(F.size("copies") > 0, Problem.NOT_INDEXED.value)
        .otherwise(Problem.MISSING.value)
    )
    first = (
        F.when(F.col("verdict") != "look", F.expr("array()"))
        .when(F.col("served").isNotNull(), F.array(F.expr(look("served", "log", True))))
        .when(indexed, F.array(F.expr(look("place", "place", True))))
        .otherwise(F.array(F.expr(look("journaled", "journal", True))))
    )
    others = F.expr(
        f"transform(filter(copies, each -> NOT (promised AND each <=> served) AND NOT {matches('each')}), "
        f"each -> {look('each', 'log', False)})"
    )
    rows = rows.withColumn("verdict", verdict)
    return rows.withColumn("looks", F.concat(F.when(F.col("verdict") == "look", first), others))


def _suspects(judged: DataFrame, bookies: Sequence[BookieFiles], connection: Mapping[str, str]) -> DataFrame:
    """What is missing, and what a second look at the bytes says of all that columns could not decide.

    `problem` is null where an entry turned out to be intact (its digest may need the ledger's password).
    """
    from pyspark.sql import functions as F

    direct = judged.filter(F.col("verdict").isin(Problem.NOT_INDEXED.value, Problem.MISSING.value))
    copy = F.expr("get(copies, 0)")
    absent = direct.select(
        *_KEY, "promised", F.col("verdict").alias("problem"), copy["file"].alias("file"),
        copy["offset"].alias("offset"), F.lit(None).cast("string").alias("detail"),
    )  # fmt: skip
    looks = judged.select(*_KEY, "promised", "digestType", F.explode("looks").alias("look"))
    looks = looks.select(*_KEY, "digestType", "look.*")
    looks = looks.repartition("file", "bookieId", "logId").sortWithinPartitions("file", "bookieId", "logId", "offset")
    logs: dict[tuple[str, int, bool], list[str]] = {}
    for bookie in bookies:
        for log in bookie.directories.entry_logs():
            if (log_id := log_id_of(log.path.name)) is not None:
                logs.setdefault((bookie.bookie_id, log_id, log.scoped), []).append(str(log.path))

    arrow = arrow_schema(_LOOKED)

    def look_again(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        with _SecondLook(logs, connection) as second:
            for batch in batches:
                rows = [second.look(row) for row in batch.to_pylist()]
                yield pa.RecordBatch.from_pylist([row for row in rows if row is not None], schema=arrow)

    return absent.unionByName(looks.mapInArrow(look_again, _LOOKED))


class _Doubt(Exception):
    """What a second look found wrong."""

    def __init__(self, problem: Problem, detail: str) -> None:
        super().__init__(detail)
        self.problem, self.detail = problem, detail


class _SecondLook:
    """Reads single entries where they stand, and checks them with their ledgers' passwords; a context manager."""

    def __init__(self, logs: Mapping[tuple[str, int, bool], list[str]], connection: Mapping[str, str]) -> None:
        self._logs, self._connection = logs, connection
        self._cluster: Cluster | None = None
        self._managers: dict[LedgerId, DigestManager] = {}
        self._readers: dict[str, EntryLogReader] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _SecondLook:
        return self

    def __exit__(self, *exc: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._stack.close()

    def look(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """What to say of this row; None where a copy that nobody is served from is in order."""
        ledger = LedgerId.from_value(int(row[NAME], 16))
        found = {key: row[key] for key in _KEY} | {"promised": row["decides"], "offset": row["offset"]}
        found |= {"file": row["file"], "problem": None, "detail": None}
        try:
            if row["kind"] == "journal":
                self._check(ledger, row, _journal_record(row["file"], row["offset"]))
            else:
                found["file"] = self._look_at_log(ledger, row)
        except _Doubt as doubt:
            found["problem"], found["detail"] = doubt.problem.value, doubt.detail
        return found if row["decides"] or found["problem"] else None

    def _look_at_log(self, ledger: LedgerId, row: Mapping[str, Any]) -> str:
        """The file that has the entry. Raises _Doubt."""
        key = row["bookieId"], row["logId"], ledger.is_scoped
        # Log ids are those of one directory, and an index does not say of which.
        paths = [row["file"]] if row["file"] is not None else self._logs.get(key, [])
        doubt = _Doubt(Problem.MISSING, f"its index names log {row['logId']}, which is not there")
        for path in paths:
            try:
                record = self._reader(path).entry_at(row["offset"] + 4)
                if (record.ledger, record.entry_id) != (ledger, row["entryId"]):
                    found = (
                        f"entry {record.entry_id} of ledger {record.ledger} stands at byte {record.offset} of {path}"
                    )
                    raise _Doubt(Problem.MISPLACED, found)
                self._check(ledger, row, record.body)
                return path
            except _Doubt as error:
                doubt = error
            except NotFound as error:
                doubt = _Doubt(Problem.MISSING, str(error))
            except BkctlError as error:
                doubt = _Doubt(Problem.DAMAGED, str(error))
        raise doubt

    def _check(self, ledger: LedgerId, row: Mapping[str, Any], body: bytes) -> None:
        if row["digestType"] is None or row["digestType"] == DigestType.DUMMY.name:
            return
        manager = self._managers.get(ledger)
        if manager is None:
            digest_type = DigestType.parse(row["digestType"])
            password = self._password(ledger) if digest_type is DigestType.HMAC else b""
            manager = self._managers[ledger] = DigestManager(ledger, digest_type, password)
        try:
            manager.open(body, row["entryId"])
        except BkctlError as error:
            raise _Doubt(Problem.DAMAGED, str(error)) from error

    def _password(self, ledger: LedgerId) -> bytes:
        """The ledger's password, which is in the metadata store only. Raises BkctlError."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(open_store(self._connection))
        return self._cluster.ledgers.read(ledger).metadata.password or b""

    def _reader(self, path: str) -> EntryLogReader:
        reader = self._readers.get(path)
        if reader is None:
            if len(self._readers) >= _OPEN_LOGS_MAX:
                self._readers.pop(next(iter(self._readers))).close()
            reader = self._readers[path] = EntryLogReader.open(path)
        return reader


def _journal_record(path: str, offset: int) -> bytes:
    """The record of a journal at `offset`. Raises _Doubt."""
    try:
        with JournalReader.open(path) as reader:
            for record in reader.records(offset):
                return record.body
    except BkctlError as error:
        raise _Doubt(Problem.DAMAGED, str(error)) from error
    raise _Doubt(Problem.MISSING, f"{path} ends before byte {offset}")
