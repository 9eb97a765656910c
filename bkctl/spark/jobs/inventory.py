"""The job `inventory`: bytes and entries of all bookies' entry logs per scope, ledger, application, bookie or log.

Bytes are those of entries with their size fields, as a bookie counts them (and `bkctl entrylog show`); every copy of an
entry counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bkctl.errors import NotFound, UsageError
from bkctl.files.directories import BookieDirectories
from bkctl.formats.entry_log import log_id_of
from bkctl.ids import LedgerId
from bkctl.spark.jobs.bookies import check_clusters
from bkctl.spark.sources.columns import DAMAGE
from bkctl.spark.sources.places import bookie_id_at

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles

NAME: Final = "ledgerQualifiedName"


class By(StrEnum):
    """What the rows of an inventory are about; the values are the words of the command's option."""

    BOOKIE = "bookie"
    ENTRY_LOG = "entrylog"
    SCOPE = "scope"
    LEDGER = "ledger"
    APPLICATION = "application"


def log_files(spark: SparkSession, bookies: Sequence[BookieFiles]) -> DataFrame:
    """Every entry log of the bookies: file, bookieId, logId, logIdHex, scoped, fileSize (bytes)."""
    rows = []
    for bookie in bookies:
        for file in bookie.directories.entry_logs():
            log_id = log_id_of(file.path.name)
            hexadecimal = None if log_id is None else f"{log_id:x}"
            rows.append((str(file.path), bookie.bookie_id, log_id, hexadecimal, file.scoped, file.size))
    schema = "file string, bookieId string, logId bigint, logIdHex string, scoped boolean, fileSize bigint"
    return spark.createDataFrame(rows, schema)


def log_records(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    columns: Sequence[str],
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
    **options: str,
) -> DataFrame:
    """The rows of `bookkeeper.entrylog` of all entry logs: `columns`, file, bookieId, `damage`; `options` are its own.

    Where a log is damaged, one row says so (its ledger is null), behind the good ones. Raises NotFound where the
    bookies have no entry log.
    """
    owners = {each: bookie.bookie_id for bookie in bookies for each in bookie.ledger_dirs}
    directories = [each for each in owners if BookieDirectories((), [each]).entry_logs()]
    if not directories:
        raise NotFound("The bookies given have no entry logs")
    wanted = ",".join(dict.fromkeys(["file", "bookieId", *columns]))
    chosen = {**of_ledgers(ledger, scope_id), **options, "columns": wanted, "mode": "permissive"}
    # Directories, and not files: a running bookie may delete some.
    records = spark.read.format("bookkeeper.entrylog").options(**chosen).load(directories)
    return with_bookie(records, owners)


def of_ledgers(ledger: LedgerId | None, scope_id: int | None) -> dict[str, str]:
    """The options of a source that say which ledgers are wanted; filters on the rows would lose the damage."""
    if ledger is not None:
        return {"ledger": ledger.qualified_name}
    return {} if scope_id is None else {"ledgerScopeId": str(scope_id)}


def with_bookie(records: DataFrame, owners: Mapping[str, str]) -> DataFrame:
    """`records`, their bookieId being that of the directory which `file` is in, as `owners` say.

    Most cookies say the same; where they do not, or are not there, it is put right.
    """
    from pyspark.sql import functions as F

    owner = F.col("bookieId")
    for directory, bookie_id in owners.items():
        if bookie_id_at(Path(directory)) != bookie_id:
            owner = F.when(F.col("file").startswith(f"{directory}/"), F.lit(bookie_id)).otherwise(owner)
    return records.withColumn("bookieId", owner)


def with_ledger_ids(frame: DataFrame) -> DataFrame:
    """`frame` with ledgerScopeId and ledgerId before the rest, made of its ledgerQualifiedName."""
    from pyspark.sql import functions as F

    scope_id = F.conv(F.substring(NAME, 1, 16), 16, 10).alias("ledgerScopeId")
    ledger_id = F.conv(F.substring(NAME, 17, 16), 16, 10).alias("ledgerId")
    return frame.select(scope_id, ledger_id, NAME, *(name for name in frame.columns if name != NAME))


def shares(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    *,
    ledger: LedgerId | None = None,
    scope_id: int | None = None,
) -> DataFrame:
    """What each ledger has in each log: bookieId, file, ledgerQualifiedName, damage, entryCount, size.

    Rows of damage have no ledger and no entries. Counted where the logs are read; a few rows for each log, whatever is
    in it: what all inventories are made of, and worth keeping (`persist`). Raises NotFound where there is no log.
    """
    from pyspark.sql import functions as F

    counts = ("entryCount", "size")
    found = log_records(
        spark, bookies, [NAME, *counts], ledger=ledger, scope_id=scope_id, rows="ledgers"
    )  # fmt: skip
    sums = [F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in counts]
    return found.groupBy("bookieId", "file", NAME, DAMAGE).agg(*sums)


def damages(shares: DataFrame) -> DataFrame:
    """What was damaged: bookieId, file, offset, reason."""
    from pyspark.sql import functions as F

    found = shares.filter(F.col(DAMAGE).isNotNull())
    return found.select("bookieId", f"{DAMAGE}.file", f"{DAMAGE}.offset", f"{DAMAGE}.reason").distinct()


def totals(
    spark: SparkSession,
    bookies: Sequence[BookieFiles],
    shares: DataFrame,
    by: By,
    connection: Mapping[str, str] | None = None,
) -> DataFrame:
    """The sums of `shares`, a row for each bookie, log, scope, ledger or application, most bytes first.

    Applications come from the metadata store (`connection`): Pulsar's `application`, `component` and `managedLedger`,
    where a ledger's custom metadata says them. Raises UsageError where it is needed and not given, Conflict where it
    is another cluster's.
    """
    from pyspark.sql import functions as F

    found = shares.filter(F.col(DAMAGE).isNull())
    sums = (F.sum("entryCount").alias("entryCount"), F.sum("size").alias("size"))
    ledgers = F.countDistinct(NAME).alias("ledgerCount")
    logs = F.countDistinct("file").alias("logCount")
    holders = F.countDistinct("bookieId").alias("bookieCount")
    match by:
        case By.BOOKIE:
            counted = found.groupBy("bookieId").agg(ledgers, *sums)
            there = log_files(spark, bookies).groupBy("bookieId").agg(
                F.count("*").alias("logCount"), F.sum("fileSize").alias("fileSize")
            )  # fmt: skip
            totals = there.join(counted, "bookieId", "left").fillna(0, ["ledgerCount", "entryCount", "size"])
        case By.ENTRY_LOG:
            counted = found.groupBy("file").agg(ledgers, *sums)
            totals = log_files(spark, bookies).join(counted, "file", "left")
            totals = totals.fillna(0, ["ledgerCount", "entryCount", "size"])
        case By.LEDGER:
            totals = with_ledger_ids(found.groupBy(NAME).agg(holders, logs, *sums))
        case By.SCOPE:
            counted = found.groupBy(F.substring(NAME, 1, 16).alias("scope")).agg(ledgers, holders, logs, *sums)
            totals = counted.select(F.conv("scope", 16, 10).alias("ledgerScopeId"), *counted.columns[1:])
        case By.APPLICATION:
            if connection is None:
                raise UsageError("Applications are in the metadata store, and none is named", hint="add --metadata-uri")
            check_clusters(bookies, connection)
            ledger_sums = found.groupBy(NAME).agg(*sums)
            said = applications(spark, connection)
            keys = ("application", "component", "managedLedger")
            totals = ledger_sums.join(said, NAME, "left").groupBy(*keys).agg(F.count("*").alias("ledgerCount"), *sums)
    # Ids of scopes are decimal texts of any width; a ledger's qualified name sorts as its ids do.
    ties = {By.LEDGER: [F.col(NAME)], By.SCOPE: [F.lpad("ledgerScopeId", 20, "0")]}
    names = ("bookieId", "file", "application", "component", "managedLedger")
    return totals.orderBy(F.desc("size"), *ties.get(by, [name for name in names if name in totals.columns]))


def applications(spark: SparkSession, connection: Mapping[str, str]) -> DataFrame:
    """Whose each ledger is, as its custom metadata says: ledgerQualifiedName, application, component, managedLedger."""
    from pyspark.sql import functions as F

    read = spark.read.format("bookkeeper.metadata").options(**connection)
    metadata = read.option("columns", f"{NAME},pulsar,customMetadata").load()
    own = F.decode(F.col("customMetadata")["application"], "UTF-8")
    return metadata.select(
        NAME,
        F.coalesce(F.col("pulsar")["application"], own).alias("application"),
        F.col("pulsar")["component"].alias("component"),
        F.col("pulsar")["managedLedger"].alias("managedLedger"),
    )
