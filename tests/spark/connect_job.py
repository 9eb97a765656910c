"""The jobs by a Spark Connect server, as a process: `connect_job.py URL METADATA_URI PLACE`. Prints their rows as JSON.

A process of its own, since one that has a classic session cannot have a session of Spark Connect. With `local` in place
of the URL, the local engine runs the jobs.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bkctl.spark.jobs.bookies import find_bookies
from bkctl.spark.jobs.copying import migrate_scope
from bkctl.spark.jobs.entry_ranges import entry_ranges
from bkctl.spark.jobs.garbage import by_bookie, garbage_shares, uses
from bkctl.spark.jobs.integrity import integrity
from bkctl.spark.jobs.inventory import Grouping, shares, totals
from bkctl.spark.jobs.journal_audit import audit
from bkctl.spark.local.session import local_session
from bkctl.spark.sources import register


def rows_of(spark: Any, metadata_uri: str, places: list[str]) -> dict[str, Any]:
    """The rows of each job."""
    bookies, connection = find_bookies(places), {"metadataUri": metadata_uri}
    found = integrity(spark, bookies, connection)
    audited = audit(spark, bookies, connection)
    frames = {
        "inventory": totals(spark, bookies, shares(spark, bookies), Grouping.LEDGER),
        "integrity": found.findings,
        "checked": found.checked,
        "ranges": entry_ranges(found.findings, "ledger", ("problem", "intactCount"), connection),
        "garbage": by_bookie(uses(garbage_shares(spark, bookies, connection))),
        "journals": audited.journals,
        "unlogged": audited.unlogged,
    }
    return {name: [row.asDict() for row in frame.collect()] for name, frame in frames.items()}


def main(url: str, metadata_uri: str, place: str) -> None:
    """Run the jobs; by a server also the sources with SQL."""
    if url == "local":
        with local_session() as session:
            print(json.dumps(rows_of(session, metadata_uri, [place]), default=str))
        return
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote(url).getOrCreate()
    register(spark)
    rows = rows_of(spark, metadata_uri, [place])
    logs = spark.read.format("bookkeeper.entrylog").option("pushdown", "true").load(f"{place}/*/")
    logs.createOrReplaceTempView("records")
    rows["sql"] = [row.asDict() for row in spark.sql("SELECT count(*) AS count FROM records").collect()]
    rows["metadata"] = [
        row.asDict()
        for row in spark.read.format("bookkeeper.metadata").option("metadataUri", metadata_uri).load()
        .select("ledgerQualifiedName").collect()
    ]  # fmt: skip
    planned = migrate_scope(spark, {"metadataUri": metadata_uri}, 99, from_scope_id=7, dry_run=True)
    rows["planned"] = [row.asDict() for row in planned.collect()]
    print(json.dumps(rows, default=str))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
