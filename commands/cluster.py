"""`bkctl cluster`: the cluster as a whole; local clusters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._command import Run, command, group
from ._output import GREEN, RED, YELLOW, Column, Columns, Kind

if TYPE_CHECKING:
    from bkctl.bookie.local import LocalCluster

app = group()

LOCAL_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie.bookie_id"),
    Column("STATE", "state", "state", style={"rw": GREEN, "ro": YELLOW, "starting": YELLOW, "down": RED}),
    Column("ADDRESS", "address", lambda row: f"127.0.0.1:{row.bookie.port}"),
    Column("PID", "pid", "bookie.pid", Kind.INTEGER),
    Column("DIRECTORY", "directory", lambda row: str(row.bookie.directory), flexible=True),
    Column(None, "conf", lambda row: str(row.bookie.conf)),
    Column(None, "log", lambda row: str(row.bookie.log)),
    key="bookieId",
)

LocalDirectory = Annotated[
    Path | None,
    typer.Option("--dir", metavar="DIR", help="The local cluster's directory (default: the one that is up)."),
]

INFO_COLUMNS = Columns(
    Column("METADATA URI", "metadataUri", "metadata_uri"),
    Column("INSTANCE ID", "instanceId", "instance_id"),
    Column("LAYOUT", "managerFactoryClass", "factory_class"),
    Column("BOOKIES", "totalBookiesCount", "bookie_count", Kind.INTEGER),
    Column("  WRITABLE", "writableBookiesCount", "writable_count", Kind.INTEGER),
    Column("  READ-ONLY", "readonlyBookiesCount", "read_only_count", Kind.INTEGER),
    Column("  DOWN", "unavailableBookiesCount", "down_count", Kind.INTEGER),
    Column("  WITH SCOPES", "ledgerScopesBookiesCount", "scopes_count", Kind.INTEGER),
    Column("AUDITOR ELECTED", "auditorElected", "auditor_elected", Kind.BOOLEAN),
    Column("AUDITOR", "auditorId", "auditor_id"),
    Column(
        "UNDERREPLICATED", "clusterUnderReplicated", "underreplicated", Kind.BOOLEAN, style={"yes": RED, "no": GREEN}
    ),
    Column("AUTO RECOVERY", "ledgerReplicationEnabled", "replication_enabled", Kind.BOOLEAN, style={"no": YELLOW}),
    key="instanceId",
)


@command(app, "info", connects=True)
def info(run: Run) -> None:
    """Show the cluster: instance id, layout, bookies counted by state, auditor, replication."""
    from bkctl.metadata.overview import cluster_info

    with run.cluster() as cluster:
        run.show(cluster_info(cluster), INFO_COLUMNS)


def _local(directory: Path | None) -> LocalCluster:
    from bkctl.bookie.local import LocalCluster, active_cluster

    if directory is not None:
        return LocalCluster(directory)
    return active_cluster() or LocalCluster()


@command(app, "up")
def up(
    run: Run,
    directory: LocalDirectory = None,
    bookies: Annotated[
        int | None, typer.Option("--bookies", metavar="N", help="How many bookies (default 3, or what is there).")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="CLASS", help="Ledger storage of new bookies: sorted, interleaved, db."),
    ] = None,
) -> None:
    """Start a local cluster of our own bookies, and use it until `cluster down`."""
    cluster = _local(directory)
    with run.working(f"Starting the local cluster at {cluster.directory}"):
        cluster.up(bookies, storage=storage, timeout_s=run.timeout_s, progress=run.detail)
    run.render(cluster.status(run.timeout_s), LOCAL_COLUMNS)
    run.note(f"Local cluster at {cluster.directory}; commands without --metadata-uri use it until 'bkctl cluster down'")


@command(app, "down")
def down(
    run: Run,
    directory: LocalDirectory = None,
    bookie: Annotated[
        str | None, typer.Option("--bookie", metavar="ID", help="Stop this bookie only; the cluster stays up.")
    ] = None,
) -> None:
    """Stop the local cluster cleanly; its data stays for the next `cluster up`."""
    cluster = _local(directory)
    with run.working(f"Stopping the local cluster at {cluster.directory}"):
        stopped = cluster.down(bookie, timeout_s=run.timeout_s, progress=run.detail)
    names = {one.bookie_id for one in stopped}
    run.render((row for row in cluster.status(run.timeout_s) if row.bookie.bookie_id in names), LOCAL_COLUMNS)
    if not stopped:
        run.note("Nothing was running")


@command(app, "status")
def status(run: Run, directory: LocalDirectory = None) -> None:
    """Show the local cluster's bookies: state, address, process, directory."""
    run.render(_local(directory).status(run.timeout_s), LOCAL_COLUMNS)
