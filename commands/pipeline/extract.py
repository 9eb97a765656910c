"""`bkctl pipeline extract`: a bookie's facts for the other jobs, written on the bookie's host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bkctl.columns import Column, Columns, Kind

from ..kit.command import Run, command, group, rows_of
from ..kit.options import duration_option
from .common import PLACES, bookies_at

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.facts.extraction import ExtractCounts
    from bkctl.spark.facts.facts_store import FactsStore

app = group()

EXTRACT_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("LOGS", "logCount", "log_count", Kind.INTEGER),
    Column("READ", "readLogCount", "read_log_count", Kind.INTEGER),
    Column("RECORDS", "recordCount", "record_count", Kind.INTEGER),
    Column("DAMAGED", "damageCount", "damage_count", Kind.INTEGER),
    key="bookieId",
)


@command(app, "extract", connects=True, prints=rows_of(EXTRACT_COLUMNS))
def extract(
    run: Run,
    *,
    places: Annotated[list[str] | None, PLACES] = None,
    uri: Annotated[
        str, typer.Argument(metavar="URI", help="Where facts go: a directory, file://, s3://, hdfs:// or gs://.")
    ],
    full: Annotated[bool, typer.Option("--full", help="Read logs again that were extracted before.")] = False,
    keep: Annotated[
        float, duration_option("--keep", "Keep superseded files this long, for jobs that read them.", default="1h")
    ],
) -> None:
    """Write the contents of bookies' files as facts for jobs.

    Runs on each bookie's host, without Spark, and writes Parquet tables: records with their digests, indexes, journals
    and what a restart replays, ledgers by log, cookies and last marks. The other jobs read them with --facts. An entry
    log is read once; later runs read only logs that grew or are new, journals and indexes. Readers see a run's result
    once it is complete. HMAC digests need the cluster (--conf names it): without one, records with HMAC or DUMMY
    digests are copied whole.

    $ bkctl pipeline extract --conf bk_server.conf /mnt/facts
    $ bkctl pipeline extract /bookies/0 s3://bucket/facts
    """
    from bkctl.spark.facts.facts_store import FactsStore

    store = FactsStore(uri)  # It says what is not installed.
    bookies = bookies_at(run, places)
    is_named = run.access.names_metadata or run.access.conf is not None or not places
    with run.access.cluster() if is_named else nullcontext() as cluster:
        run.out.render(_extracted(run, bookies, store, cluster, full, timedelta(seconds=keep)), EXTRACT_COLUMNS)


def _extracted(
    run: Run, bookies: Iterable[Any], store: FactsStore, cluster: Cluster | None, full: bool, keep: timedelta
) -> Iterator[ExtractCounts]:
    from bkctl.spark.facts.extraction import extract

    for bookie in bookies:
        with run.job.working(f"Reading logs of {bookie.bookie_id}", unit="logs") as activity:
            yield extract(bookie, store, cluster, full=full, keep=keep, progress=activity.update)
