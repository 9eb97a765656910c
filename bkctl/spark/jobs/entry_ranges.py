"""Findings of entries as ranges: first and last entry, and counts, in place of a row for each entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from bkctl.errors import BkctlError
from bkctl.ids import LedgerId
from bkctl.spark.engine import Frame, functions_of
from bkctl.spark.jobs.bookie_records import QUALIFIED_NAME, map_rows
from bkctl.spark.jobs.bookies import open_store

#: The fields that the entries of a range share beside their ledger, by the words of `--by`.
_PLACES: Final[Mapping[str, tuple[str, ...]]] = {"ledger": (), "bookie": ("bookieId",), "log": ("bookieId", "file")}
_LEDGER: Final = (QUALIFIED_NAME, "ledgerScopeId", "ledgerId")
_STEPS: Final = f"{QUALIFIED_NAME} string, step bigint"


def entry_ranges(findings: Frame, by: str, same: Sequence[str], connection: Mapping[str, str] | None = None) -> Frame:
    """Return one row for each range of entries of a ledger that agree in the columns `same`.

    With `by` = `ledger` a range is of all bookies, with `bookie` of one, with `log` of one file of a bookie. Columns:
    the ledger's ids, the columns of `by` and `same`, firstEntryId, lastEntryId, entryCount, findingCount (rows of
    `findings`), bookieCount, offset (the lowest). A row without an entry stays a row of its own.

    Entries of a range follow each other on a bookie: at most ensembleSize - writeQuorumSize + 1 apart, by the metadata
    at `connection`. Without `connection`, and for ledgers without metadata, their ids are consecutive.
    """
    F = functions_of(findings)
    keys = [*_PLACES[by], *_LEDGER, *same]
    window = f"(PARTITION BY {', '.join(keys)} ORDER BY entryId)"
    entries = findings.filter("entryId IS NOT NULL")
    if connection is None:
        entries = entries.withColumn("step", F.lit(1))
    else:
        entries = entries.join(_steps(entries, connection), QUALIFIED_NAME, "left")
    follows = f"entryId - lag(entryId) OVER {window} <= coalesce(step, 1)"
    entries = entries.withColumn("starts", F.expr(f"CASE WHEN {follows} THEN 0 ELSE 1 END"))
    entries = entries.withColumn("rangeNumber", F.expr(f"sum(starts) OVER {window}"))
    ranges = entries.groupBy(*keys, "rangeNumber").agg(
        F.min("entryId").alias("firstEntryId"),
        F.max("entryId").alias("lastEntryId"),
        F.count_distinct("entryId").alias("entryCount"),
        F.count("*").alias("findingCount"),
        F.count_distinct("bookieId").alias("bookieCount"),
        F.min("offset").alias("offset"),
    )
    one = F.lit(1).cast("bigint")
    rest = findings.filter("entryId IS NULL").drop("entryId")
    rest = rest.withColumn("findingCount", one).withColumn("bookieCount", one)
    found = ranges.drop("rangeNumber").unionByName(rest, allowMissingColumns=True)
    places = _PLACES[by] or (QUALIFIED_NAME,)
    return found.orderBy(*places, QUALIFIED_NAME, "firstEntryId", "lastEntryId", *same, "file", "offset")


def _steps(entries: Frame, connection: Mapping[str, str]) -> Frame:
    """Return the ledgers of `entries` with `step`: how far apart entries are that follow each other on a bookie."""

    def steps_of(batches: Iterator[list[dict[str, Any]]]) -> Iterator[list[dict[str, Any]]]:
        with open_store(connection) as cluster:
            for rows in batches:
                names = [row[QUALIFIED_NAME] for row in rows]
                found = cluster.ledgers.read_many(LedgerId.from_value(int(name, 16)) for name in names)
                yield [
                    {QUALIFIED_NAME: name, "step": each.metadata.ensemble_size - each.metadata.write_quorum_size + 1}
                    for name, (_, each) in zip(names, found, strict=True)
                    if not isinstance(each, BkctlError)
                ]

    return map_rows(entries.select(QUALIFIED_NAME).distinct(), steps_of, _STEPS)
