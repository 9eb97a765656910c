"""`bkctl cluster`: the cluster as a whole; local clusters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bkctl.errors import AlreadyExists, Conflict, NotFound, UsageError

from .kit.columns import Column, Columns, Kind
from .kit.command import Run, command, group
from .kit.options import DryRun, UndoOption, WatchOption
from .kit.texts import GREEN, RED, YELLOW, counted

if TYPE_CHECKING:
    from bkctl.bookie.local import LocalCluster
    from bkctl.metadata.cluster import Cluster

app = group()
healthcheck_app = group("Allow or forbid clients to quarantine failing bookies.")
app.add_typer(healthcheck_app, name="healthcheck")

LOCAL_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie.bookie_id"),
    Column("STATE", "state", "state", style={"rw": GREEN, "ro": YELLOW, "starting": YELLOW, "down": RED}),
    Column("ADDRESS", "address", lambda row: f"127.0.0.1:{row.bookie.port}"),
    Column("PID", "pid", "bookie.pid", Kind.INTEGER),
    Column("DIRECTORY", "directory", lambda row: str(row.bookie.directory), flexible=True),
    Column(None, "httpUrl", "bookie.http_url"),
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


@command(app, "info", connects=True, examples=("bkctl cluster info",))
def info(run: Run) -> None:
    """Show the cluster: layout, bookies, auditor, replication."""
    from bkctl.metadata.admin.overview import cluster_info

    with run.cluster() as cluster:
        run.show(cluster_info(cluster), INFO_COLUMNS)


# --- health ---------------------------------------------------------------------------------------------------------

HEALTH_COLUMNS = Columns(
    Column("SEVERITY", "severity", lambda row: row.severity.value, style={"error": RED, "warning": YELLOW}),
    Column("CODE", "code", "code"),
    Column("SUBJECT", "subject", lambda row: row.subject or None),
    Column("WHAT", "message", "message"),
    Column("ADVICE", "advice", "advice"),
    Column(None, "details", "details", Kind.NESTED, optional=True),
    key="code",
)


@command(app, "health", connects=True, examples=("bkctl cluster health",))
def health(
    run: Run,
    watch: WatchOption,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="PERCENT", help="Percentage of used disk space that is too much.")
    ] = 90.0,
    no_bookies: Annotated[
        bool, typer.Option("--no-bookies", help="Read the metadata only, and ask no bookie.")
    ] = False,
) -> None:
    """Show what is wrong with the cluster, and what to do.

    Covers bookies that are down, read-only, full or silent; cookies; under-replicated ledgers by scope and age;
    auto-recovery; scopes. Exit code 3 if there are findings.
    """
    from bkctl.metadata.admin.health import HealthFinding, health_findings

    if not 0 <= threshold <= 100:
        raise UsageError(f"--threshold {threshold:g}: percent are 0 to 100")

    async def asked() -> list[HealthFinding]:
        from bkctl.client.disk_space import disk_findings

        async with run.bookkeeper(cluster) as bookkeeper:
            return await disk_findings(bookkeeper, cluster.bookies.list(include_down=False), threshold)

    def look() -> list[HealthFinding]:
        found = list(health_findings(cluster))
        if not no_bookies:
            found += run.complete(asked())
        return sorted(found, key=lambda each: (each.severity, each.code, each.subject))

    findings: list[HealthFinding] = []
    with run.cluster() as cluster:
        if watch is not None:
            run.watch(watch, look, HEALTH_COLUMNS)
            return
        with run.working("Asking the bookies"):
            findings = look()
    run.render(findings, HEALTH_COLUMNS)
    if not findings:
        run.note("The cluster is healthy")
    run.finish_with(len(findings), "finding", "findings")


class Check(NamedTuple):
    """The switch that allows clients to quarantine bookies; `changed` is None if no change was requested."""

    enabled: bool
    changed: bool | None = None


CHECK_COLUMNS = Columns(
    Column("ENABLED", "enabled", "enabled", Kind.BOOLEAN, style={"yes": GREEN, "no": YELLOW}),
    Column("CHANGED", "changed", "changed", Kind.BOOLEAN, optional=True),
    key=None,
)


@command(healthcheck_app, "status", connects=True, examples=("bkctl cluster healthcheck status",))
def healthcheck_status(run: Run) -> None:
    """Show whether clients may quarantine failing bookies."""
    from bkctl.metadata.admin.health import HealthCheckSwitch

    with run.cluster() as cluster:
        run.show(Check(HealthCheckSwitch(cluster).is_enabled()), CHECK_COLUMNS)


@command(healthcheck_app, "enable", connects=True, changes=True, examples=("bkctl cluster healthcheck enable",))
def healthcheck_enable(run: Run, undo: UndoOption = None) -> None:
    """Allow clients to quarantine failing bookies."""
    _switch_healthcheck(run, True, undo)


@command(healthcheck_app, "disable", connects=True, changes=True, examples=("bkctl cluster healthcheck disable",))
def healthcheck_disable(run: Run, undo: UndoOption = None) -> None:
    """Forbid every client to quarantine bookies."""
    _switch_healthcheck(run, False, undo)


def _switch_healthcheck(run: Run, enabled: bool, undo: Path | None) -> None:
    from bkctl.metadata.admin.health import HealthCheckSwitch

    with run.cluster() as cluster:
        with run.recorded(cluster, undo) as recorded:
            changed = HealthCheckSwitch(recorded).set(enabled)
        run.show(Check(enabled, changed), CHECK_COLUMNS)


# --- the whole cluster ----------------------------------------------------------------------------------------------


class Identity(NamedTuple):
    """The identity of a cluster."""

    metadata_uri: str
    instance_id: str
    factory_class: str


ID_COLUMNS = Columns(
    Column("METADATA URI", "metadataUri", "metadata_uri"),
    Column("INSTANCE ID", "instanceId", "instance_id"),
    Column("LAYOUT", "managerFactoryClass", "factory_class"),
    key="instanceId",
)


@command(app, "id", connects=True, examples=("bkctl cluster id",))
def show_id(run: Run) -> None:
    """Show the cluster's instance id."""
    with run.cluster() as cluster:
        factory_class, instance_id = cluster.layout().factory_class, cluster.instance_id()
        if not instance_id:
            raise NotFound(
                f"The cluster in {cluster.uri} has no instance id",
                hint="a bookie's cookie may name it: 'bkctl cookie show BOOKIE'",
            )
        run.show(Identity(cluster.uri, instance_id, factory_class), ID_COLUMNS)


@command(
    app, "init", connects=True, changes=True, examples=("bkctl cluster init --metadata-uri sqlite:///metadata.db",)
)
def init(
    run: Run,
    long_long_layout: Annotated[
        bool,
        typer.Option(
            "--long-long-layout",
            help="Write BP-35's own class into LAYOUT; Apache's processes then refuse the cluster.",
        ),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Create a new cluster in the metadata store.

    Creates the layout, the instance id, and the places of bookies and cookies. If there is a cluster, nothing is
    changed, and the exit code is 5.
    """
    from bkctl.metadata.cluster import init_cluster, new_layout
    from bkctl.metadata.uri import parse_uri

    def refuse(cluster: Cluster) -> None:
        raise AlreadyExists(
            f"There is a cluster in {cluster.uri}: {cluster.instance_id()}", hint="'bkctl cluster info' shows it"
        )

    location = parse_uri(run.connection().uri)
    layout = new_layout(location, long_long=long_long_layout)
    if not dry_run:
        with run.open_cluster(create_store=True) as cluster:
            if not init_cluster(cluster, layout=layout):
                refuse(cluster)
            run.show(Identity(cluster.uri, cluster.instance_id(), cluster.layout().factory_class), ID_COLUMNS)
        return
    try:
        with run.cluster() as cluster:
            if cluster.store.get(cluster.places.layout) is not None:
                refuse(cluster)
    except NotFound:
        pass  # No file yet.
    run.show(Identity(location.text, "", layout.factory_class), ID_COLUMNS)


NUKE_COLUMNS = Columns(
    Column("INSTANCE ID", "instanceId", "instance_id"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    Column("SCOPES", "scopeCount", "scope_count", Kind.INTEGER),
    Column("COOKIES", "cookieCount", "cookie_count", Kind.INTEGER),
    key="instanceId",
)


@command(
    app,
    "nuke",
    connects=True,
    changes=True,
    asks=True,
    examples=('bkctl cluster nuke --instance-id "$(bkctl cluster id -o id)" --dry-run',),
)
def nuke_cluster(
    run: Run,
    instance_id: Annotated[
        str | None,
        typer.Option("--instance-id", metavar="ID", help="The cluster's instance id, as a confirmation."),
    ] = None,
    backup: Annotated[
        Path | None, typer.Option("--backup", metavar="FILE", help="Export all metadata to this new file first.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Remove all metadata of a cluster, for good.

    Refused while bookies are registered. The bookies' own files stay, but no bookie starts on them again. With
    --backup, 'metadata import' restores the metadata.
    """
    from bkctl.metadata.admin.dump import ClusterSource, export_to_file
    from bkctl.metadata.admin.nuke import nuke, plan_nuke

    if instance_id is None:
        raise UsageError("--instance-id is required", hint="'bkctl cluster id' shows it")
    with run.cluster() as cluster:
        with run.working("Counting ledgers"):
            plan = plan_nuke(cluster)
        if instance_id != plan.instance_id:
            raise Conflict(
                f"The cluster in {cluster.uri} has another instance id: {plan.instance_id}",
                hint="check the metadata URI",
            )
        if dry_run:
            run.show(plan, NUKE_COLUMNS)
            return
        if plan.foreign_scopes:
            run.note("The scoped ledgers of a formatted cluster would be lost, too: no backup holds them")
        kept = f"; {backup} will hold a copy" if backup is not None else ", without a backup"
        run.confirm(
            f"All metadata of the cluster {plan.instance_id} in {cluster.uri} would be lost: "
            f"{counted(plan.ledger_count, 'ledger', 'ledgers')}, "
            f"{counted(plan.cookie_count, 'cookie', 'cookies')}{kept}"
        )
        if backup is not None:
            with run.working(f"Exporting to {backup}") as activity:
                export_to_file(ClusterSource(cluster), backup, progress=activity.update)
        with run.working("Removing nodes") as activity:
            count = nuke(cluster, progress=activity.update)
    run.show(plan, NUKE_COLUMNS)
    run.note(f"Removed {counted(count, 'node', 'nodes')}")


# --- local clusters -------------------------------------------------------------------------------------------------


def _local(directory: Path | None) -> LocalCluster:
    from bkctl.bookie.local import LocalCluster, active_cluster

    if directory is not None:
        return LocalCluster(directory)
    return active_cluster() or LocalCluster()


@command(app, "up", changes=True, examples=("bkctl cluster up",))
def up(
    run: Run,
    directory: LocalDirectory = None,
    bookies: Annotated[
        int | None,
        typer.Option("--bookies", metavar="N", help="Number of bookies (default: 3, or as many as the cluster has)."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="CLASS", help="Ledger storage of new bookies: sorted, interleaved, db."),
    ] = None,
    http: Annotated[
        bool | None,
        typer.Option(
            "--http/--no-http", help="Give new bookies an HTTP server (default: if bkctl[http] is installed)."
        ),
    ] = None,
    autorecovery: Annotated[
        bool,
        typer.Option(
            "--autorecovery", help="Run auto-recovery in new bookies, which replicates the ledgers of lost ones."
        ),
    ] = False,
) -> None:
    """Start a local cluster of our own bookies.

    Commands use it until 'cluster down'.
    """
    from bkctl.http import has_server, load_server

    if http:
        load_server()
    http = has_server() if http is None else http
    cluster = _local(directory)
    with run.working(f"Starting the local cluster at {cluster.directory}"):
        cluster.up(
            bookies, storage=storage, http=http, auto_recovery=autorecovery, timeout_s=run.timeout_s,
            progress=run.detail,
        )  # fmt: skip
    run.render(cluster.status(run.timeout_s), LOCAL_COLUMNS)
    run.note(f"Local cluster at {cluster.directory}; commands without --metadata-uri use it until 'bkctl cluster down'")


@command(app, "down", changes=True, examples=("bkctl cluster down",))
def down(
    run: Run,
    directory: LocalDirectory = None,
    bookie: Annotated[
        str | None, typer.Option("--bookie", metavar="ID", help="Stop this bookie only; the cluster stays up.")
    ] = None,
) -> None:
    """Stop the local cluster cleanly.

    Its data stays for the next 'cluster up'.
    """
    cluster = _local(directory)
    with run.working(f"Stopping the local cluster at {cluster.directory}"):
        stopped = cluster.down(bookie, timeout_s=run.timeout_s, progress=run.detail)
    names = {one.bookie_id for one in stopped}
    run.render((row for row in cluster.status(run.timeout_s) if row.bookie.bookie_id in names), LOCAL_COLUMNS)
    if not stopped:
        run.note("Nothing was running")


@command(app, "status", examples=("bkctl cluster status",))
def status(run: Run, directory: LocalDirectory = None) -> None:
    """Show the bookies of the local cluster.

    Shows state, address, process and directory.
    """
    run.render(_local(directory).status(run.timeout_s), LOCAL_COLUMNS)
