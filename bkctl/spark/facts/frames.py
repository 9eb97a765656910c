"""Facts as DataFrames: the rows that jobs otherwise read from bookies' directories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bkctl.formats.index import ledger_of_index_path
from bkctl.formats.names import SCOPED_DIRECTORY
from bkctl.metadata.liveness import check_cookie
from bkctl.spark.engine import Frame, FrameColumn, Functions, JobSession, functions_of
from bkctl.spark.facts.facts_store import FactsStore, PartList
from bkctl.spark.facts.tables import REQUIRED, TABLES, spark_schema
from bkctl.spark.failures import ERROR_START
from bkctl.spark.local.session import LocalSession
from bkctl.spark.sources.columns import DAMAGE, TYPES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from bkctl.metadata.cluster import Cluster

_QUALIFIED_NAME: Final = "ledgerQualifiedName"
#: As Java's and RE2's expressions have it.
_HEX_NAME: Final = r"^[0-9a-f]{32}\z"
_DAMAGES: Final = f"file string, bookieId string, {DAMAGE} {TYPES[DAMAGE]}"


class Facts(list[PartList]):
    """The newest facts of all bookies at `uri`, as they are when this is created; the list of its bookies.

    Jobs take it instead of bookies' directories. Raises NotFound without facts at `uri`.
    """

    def __init__(self, uri: str) -> None:
        self._store = FactsStore(uri)
        super().__init__(self._store.part_lists())

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise Conflict if a bookie's cookie names another cluster, in which all its ledgers would look dead."""
        for each in self:
            for part in each.parts("cookies"):
                for row in self._store.read("cookies", part, ["file", "instanceId"]).to_pylist():
                    check_cookie(cluster, f"{row['file']} of {each.bookie_id}", row["instanceId"])

    def table(self, spark: JobSession, name: str) -> Frame:
        """Return the current rows of one of the TABLES; a query of rows that no extract writes raises BkctlError."""
        parts = [part for each in self for part in each.parts(name)]
        if not parts:
            return spark.createDataFrame([], spark_schema(name))
        if isinstance(spark, LocalSession):
            found: Frame = spark.of_dataset(self._store.dataset(name, parts))
        else:
            reader: Any = spark.read
            found = reader.schema(spark_schema(name)).parquet(*map(self._store.spark_path, parts))
        return self._checked(found, name)

    def _checked(self, rows: Frame, table: str) -> Frame:
        """Return `rows` with a filter that fails at a row that no extract writes: jobs rely on ids and names."""
        F = functions_of(rows)
        required = REQUIRED.get(table)
        if required is None:
            return rows
        sound = F.lit(True)
        for name in ("bookieId", "file", *required):
            sound &= F.col(name).isNotNull()
        if _QUALIFIED_NAME in TABLES[table]:
            ledger = F.col(_QUALIFIED_NAME)
            sound &= ledger.isNull() | ledger.rlike(_HEX_NAME)
        if table == "evidence":
            stands = F.col(_QUALIFIED_NAME).isNotNull() & F.col("entryId").isNotNull()
            sound &= F.when(F.col("problem").isNull(), stands).otherwise(F.col("problem").isin("missing", "damaged"))
        problem = (
            f"Facts at {self._store.uri}: table {table} has a row that no extract writes; "
            "run 'bkctl pipeline extract --full' again on bookie "
        )
        bookie = F.coalesce(F.col("bookieId"), F.lit("(unknown)"))
        failure = F.raise_error(F.concat(F.lit(f"{ERROR_START}{problem}"), bookie, F.lit("\n")))
        return rows.filter(F.when(sound, F.lit(True)).otherwise(failure.cast("boolean")))

    def create_views(self, spark: SparkSession) -> None:
        """Create a temporary view of each table, under its name."""
        for name in TABLES:
            if name != "parts":
                rows: Any = self.table(spark, name)
                rows.createOrReplaceTempView(name)

    # --- the rows of jobs -----------------------------------------------------------------------------------------

    # `wanted` are options of the source: the ledger or the scope.

    def log_records(
        self, spark: JobSession, columns: Sequence[str], *, rows: str = "records", **wanted: str
    ) -> Frame:  # fmt: skip
        """Return the rows of `bookie_records.log_records`."""
        F = functions_of(spark)
        found = self.table(spark, "records" if rows == "records" else "ledgers")
        if rows != "records":
            found = found.filter(F.col("entryCount").isNotNull())
        names = list(dict.fromkeys(["file", "bookieId", *columns]))
        chosen = _of_ledger(found, wanted).select(*names, _no_damage(F))
        return chosen.unionByName(self._damages(spark, "entryLog"), allowMissingColumns=True)

    def journal_entries(self, spark: JobSession, columns: Sequence[str], **wanted: str) -> Frame:
        """Return the rows of `bookie_records.journal_entries`."""
        place = ("file", "bookieId", "journalId", "offset", "recordSize", _QUALIFIED_NAME, "entryId")
        names = list(dict.fromkeys([*place, *columns, "replayed"]))
        return _of_ledger(self.table(spark, "journal_records"), wanted).select(*names)

    def index_entries(self, spark: JobSession, **wanted: str) -> Frame:
        """Return the rows of `bookie_records.index_entries`."""
        F = functions_of(spark)
        names = ("file", "bookieId", _QUALIFIED_NAME, "entryId", "logId", "offset")
        found = _of_ledger(self.table(spark, "index"), wanted).select(*names, _no_damage(F))
        damages = self._damages(spark, "index")
        if wanted:
            damages = damages.mapInArrow(partial(_of_wanted_files, _prefix(wanted)), _DAMAGES)
        return found.unionByName(damages, allowMissingColumns=True)

    def log_files(self, spark: JobSession) -> Frame:
        """Return the rows of `inventory.log_files`."""
        names = ("file", "bookieId", "logId", "logIdHex", "scoped", "fileSize")
        return self.table(spark, "ledgers").select(*names).distinct()

    def log_shares(self, spark: JobSession) -> Frame:
        """Return the rows of `garbage.log_shares`."""
        F = functions_of(spark)
        names = ("bookieId", "file", "logId", "scoped", _QUALIFIED_NAME)
        found = self.table(spark, "ledgers").filter(F.col("mapSize").isNotNull())
        return found.select(*names, F.col("mapSize").alias("size"), "fromLedgersMap", "complete", "reason")

    def with_evidence(self, spark: JobSession, looks: Frame) -> Frame:
        """Return the looks of `second_look` with `evidence`: the records that stand at their places."""
        F = functions_of(spark)

        def place(log_id: FrameColumn, scoped: FrameColumn) -> FrameColumn:
            log = F.concat_ws("/", scoped.cast("string"), log_id.cast("string"))
            return F.when(log_id.isNull(), F.col("file")).otherwise(log).alias("at")

        details = ("candidate", "file", _QUALIFIED_NAME, "entryId", "digest", "record", "problem", "detail")
        # An index and a scan may both have found a record in doubt.
        evidence = self.table(spark, "evidence").select(
            "bookieId", place(F.col("logId"), F.col("scoped")), "offset", F.struct(*details).alias("found")
        )
        evidence = evidence.groupBy("bookieId", "at", "offset").agg(F.collect_set("found").alias("evidence"))
        # An index that names a log means one for ledgers of its scope; a log of the others may be copied there.
        named = F.substring(_QUALIFIED_NAME, 1, 16) != "0" * 16
        scoped = F.when(F.col("file").isNull(), named).otherwise(F.col("file").rlike(f"/{SCOPED_DIRECTORY}/[^/]*$"))
        logs = self.log_files(spark).groupBy("bookieId", place(F.col("logId"), F.col("scoped")))
        found = looks.withColumn("at", place(F.col("logId"), scoped))
        found = found.join(evidence, ["bookieId", "at", "offset"], "left")
        return found.join(logs.agg(F.lit(True).alias("isLog")), ["bookieId", "at"], "left").drop("at")

    def _damages(self, spark: JobSession, source: str) -> Frame:
        F = functions_of(spark)
        damage = F.struct("file", "offset", "reason").alias(DAMAGE)
        return self.table(spark, "damages").filter(F.col("source") == source).select("file", "bookieId", damage)


def _of_wanted_files(prefix: str, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows without index files of other ledgers, which their paths name; databases have any ledger."""
    import pyarrow as pa

    for batch in batches:
        named = [ledger_of_index_path(file) for file in batch.column("file").to_pylist()]
        wanted = [found is None or found.qualified_name.startswith(prefix) for found in named]
        yield batch.filter(pa.array(wanted, pa.bool_()))


def _no_damage(F: Functions) -> FrameColumn:
    return F.lit(None).cast(TYPES[DAMAGE]).alias(DAMAGE)


def _of_ledger(rows: Frame, wanted: Mapping[str, str]) -> Frame:
    return rows.filter(functions_of(rows).col(_QUALIFIED_NAME).startswith(_prefix(wanted))) if wanted else rows


def _prefix(wanted: Mapping[str, str]) -> str:
    """Return the first digits of the names of wanted ledgers."""
    return wanted["ledger"] if "ledger" in wanted else f"{int(wanted['ledgerScopeId']):016x}"
