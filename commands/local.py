"""`bkctl local`: clusters of our own bookies on this machine."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

from bkctl.bookie.local import ClusterBookie, LocalCluster, active_cluster
from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, UsageError
from bkctl.http import has_server, load_server

from .kit.audit import shown_uri
from .kit.command import Run, command, group, rows_of
from .kit.contexts import LOCAL_CONTEXT, Contexts
from .kit.options import flag
from .kit.texts import GREEN, RED, YELLOW

app = group()

LOCAL_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie.bookie_id"),
    Column(
        "STATE", "state", "state", style={"rw": GREEN, "ro": YELLOW, "starting": YELLOW, "left": YELLOW, "down": RED}
    ),
    Column("ADDRESS", "address", lambda row: f"127.0.0.1:{row.bookie.port}"),
    Column("PID", "pid", "bookie.pid", Kind.INTEGER),
    Column("DIRECTORY", "directory", lambda row: str(row.bookie.directory), flexible=True),
    Column(None, "httpUrl", "bookie.http_url"),
    Column(None, "conf", lambda row: str(row.bookie.conf)),
    Column(None, "log", lambda row: str(row.bookie.log)),
    key="bookieId",
)

LocalDirectory = Annotated[
    Path | None, flag("--dir DIR", "The local cluster's directory (default: the one that is up).")
]


def _local(run: Run, directory: Path | None) -> LocalCluster:
    """Return the local cluster in `directory`, else the one that is up. Raises UsageError for another named cluster."""
    given = run.given
    if given.metadata_uri is not None or given.conf is not None or given.context not in (None, LOCAL_CONTEXT):
        raise UsageError(
            "'bkctl local' works on the clusters of this machine, and an option names another cluster",
            hint="leave --metadata-uri, --conf and --context out; 'bkctl cluster status' shows other clusters",
        )
    if directory is not None:
        return LocalCluster(directory)
    return active_cluster() or LocalCluster()


@command(app, "up", changes=True, prints=rows_of(LOCAL_COLUMNS))
def up(
    run: Run,
    directory: LocalDirectory = None,
    bookies: Annotated[
        int | None, flag("--bookies N", "Number of bookies (default: 3, or as many as the cluster has).")
    ] = None,
    storage: Annotated[
        str | None, flag("--storage CLASS", "Ledger storage of new bookies: sorted, interleaved, db.")
    ] = None,
    http: Annotated[
        bool | None, flag("--http/--no-http", "Give new bookies an HTTP server (default: if bkctl[http] is installed).")
    ] = None,
    autorecovery: Annotated[
        bool, flag("--autorecovery", "Run auto-recovery in new bookies, which replicates the ledgers of lost ones.")
    ] = False,
) -> None:
    """Start a local cluster of our own bookies.

    Commands use it until 'local down', unless the environment or a context names another cluster: the last line says
    which cluster they use. '-x local' is this cluster in any case.

    $ bkctl local up
    """
    if http:
        load_server()
    wants_http = http is not False
    http = has_server() if http is None else http
    cluster = _local(run, directory)
    where = "" if directory is None else f" --dir {shlex.quote(str(directory))}"
    with run.job.working(
        f"Starting the local cluster at {cluster.directory}",
        left=f"started bookies keep running: 'bkctl local up{where}' starts the rest, 'bkctl local down{where}' stops "
        "all",
    ):
        cluster.up(
            bookies, storage=storage, http=http, auto_recovery=autorecovery, timeout_s=run.access.timeout_s,
            progress=run.out.detail,
        )  # fmt: skip
    rows = cluster.status(run.access.timeout_s)
    run.out.render(rows, LOCAL_COLUMNS)
    run.out.note(*(_left_text(row.bookie) for row in rows if row.state == "left"))
    if wants_http and any(row.bookie.http_url is None for row in rows if row.state != "left"):
        run.out.note(
            "'bkctl top', 'bookie info' and 'bookies drain' need bookies with an HTTP server: install bkctl[http], and "
            "start a new cluster with 'bkctl local up --http --dir DIR'"
        )
    _note_target(run, cluster)


def _left_text(bookie: ClusterBookie) -> str:
    from bkctl.bookie.cookies import restore_hint, version_file

    file = version_file(str(bookie.directory / "journal"))
    hint = restore_hint(bookie.bookie_id, file, f"remove {bookie.directory} to let it join again, empty")
    return f"{bookie.bookie_id} has no cookie in the metadata store and was not started: {hint}"


def _note_target(run: Run, cluster: LocalCluster) -> None:
    """Print which cluster the next commands use, and how to use this one if it is another."""
    where = f"Local cluster at {cluster.directory}"
    switch = "-x local" if LOCAL_CONTEXT not in Contexts.read(os.environ).names else f"-u {cluster.metadata_uri}"
    try:
        target = run.access.standing_connection()
    except BkctlError as error:
        run.out.note(f"{where}. Commands without {switch} fail: {error}")
        return
    if target.uri == cluster.metadata_uri:
        run.out.note(f"{where}; commands without --metadata-uri use it until 'bkctl local down'")
        return
    reason, way = f"{target.source} names {shown_uri(target.uri)}", f", or unset {target.source}"
    if target.source not in os.environ:
        reason = f"the current context is {target.context} ({shown_uri(target.uri)})"
        way = f", or run 'bkctl context use {LOCAL_CONTEXT}'" if switch == "-x local" else ""
    run.out.note(f"{where}. Commands do not use it, since {reason}: add {switch}{way}")


@command(app, "down", changes=True, prints=rows_of(LOCAL_COLUMNS))
def down(
    run: Run,
    directory: LocalDirectory = None,
    bookie: Annotated[str | None, flag("--bookie ID", "Stop this bookie only; the cluster stays up.")] = None,
) -> None:
    """Stop the local cluster cleanly.

    Its data stays for the next 'local up'.

    $ bkctl local down
    """
    cluster = _local(run, directory)
    with run.job.working(
        f"Stopping the local cluster at {cluster.directory}", left="run the command again to stop the rest"
    ):
        stopped = cluster.down(bookie, timeout_s=run.access.timeout_s, progress=run.out.detail)
    names = {one.bookie_id for one in stopped}
    run.out.render(
        (row for row in cluster.status(run.access.timeout_s) if row.bookie.bookie_id in names), LOCAL_COLUMNS
    )
    if not stopped:
        run.out.note("Nothing was running")


@command(app, "status", prints=rows_of(LOCAL_COLUMNS))
def status(run: Run, directory: LocalDirectory = None) -> None:
    """Show the bookies of the local cluster.

    Shows state, address, process and directory. 'cluster status' shows the members of any cluster.

    $ bkctl local status
    """
    cluster = _local(run, directory)
    run.out.render(cluster.status(run.access.timeout_s), LOCAL_COLUMNS)
    if cluster.is_active():
        _note_target(run, cluster)
