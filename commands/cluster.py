"""`bkctl cluster`: the cluster as a whole; local clusters."""

from __future__ import annotations

from ._command import Run, command, group
from ._output import GREEN, RED, YELLOW, Column, Columns, Kind

app = group()

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
