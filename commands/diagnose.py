"""`bkctl diagnose`: what support asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from bkctl import __version__
from bkctl.columns import Column, Columns, Kind
from bkctl.disk import atomic_write
from bkctl.errors import AlreadyExists

from .cluster import Look, find_all
from .kit.columns import object_of
from .kit.command import Run, command, group
from .kit.options import duration_option, size_option, word
from .top import load_watch
from .why import explain_all

app = group()
SIZE_DEFAULT: Final = "50MiB"

BUNDLE_COLUMNS = Columns(
    Column("FILE", "file", lambda row: str(row[0])),
    Column("MEMBERS", "members", lambda row: row[1].members, Kind.NESTED, text=lambda names: f"{len(names):,}"),
    Column("SIZE", "size", lambda row: row[1].size_bytes, Kind.SIZE),
    Column("LEFT OUT", "leftOut", lambda row: row[1].left_out, Kind.NESTED),
    key="file",
)


@command(app, "bundle", connects=True, prints=object_of(BUNDLE_COLUMNS))
def bundle(
    run: Run,
    file: Annotated[Path, word("FILE", "The new tar.gz.")],
    pause_s: Annotated[float, duration_option("--pause", "The time between two readings of metrics.", default="10s")],
    size_max: Annotated[int, size_option("--size-max", "The size of all members at most.", default=SIZE_DEFAULT)],
) -> None:
    """Collect what support asks for, without secrets.

    Metadata of up to 20,000 ledgers, registrations, cookies, racks, health, load, metrics twice, configurations,
    garbage collection, versions; of a local cluster also the ends of logs. Passwords, keys and tokens are hidden,
    rather more than less: look at the files before they leave. Only the owner may read the bundle.

    $ bkctl diagnose bundle b.tar.gz
    """
    import tarfile

    from bkctl.http.bundle import Bundle, add_cluster
    from bkctl.metadata.admin.overview import cluster_info

    if file.exists():
        raise AlreadyExists(f"{file} exists", hint="choose another file")
    with run.job.working("Collecting"), atomic_write(file) as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
        found = Bundle(archive, size_max)
        found.json("cluster.json", {"bkctl": __version__, **cluster_info(run.cluster)._asdict()})
        findings = find_all(run, Look())
        found.json("health.json", findings)
        found.json("why.json", explain_all(run, (each.command for each in findings)))
        api_of, watch = run.access.metrics_api, load_watch(run)
        add_cluster(found, run.cluster, api_of, watch, pause_s=pause_s, wait_s=run.access.metrics_wait_s)
        found.json("left-out.json", found.left_out)
    run.out.show((file, found), BUNDLE_COLUMNS)
