"""`bkctl bookies racks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns
from bkctl.errors import BkctlError, NotFound, Unauthorized, Unreachable

from ..kit.columns import Row
from ..kit.command import Run, command, group, rows_of
from ..kit.options import DryRun, UndoOption
from .selection import ManyBookies, bookie_ids

if TYPE_CHECKING:
    from bkctl.client.placement import Placement
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.metadata.racks import BookieRack

app = group()
racks_app = group("Show and change the racks of bookies.")
app.add_typer(racks_app, name="racks")


#: The rack of a bookie: `source` is "metadata", "script", or None where the bookie has no rack.
RACK_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("RACK", "rack", "rack"),
    Column("GROUP", "group", "group"),
    Column("HOST NAME", "hostname", "hostname"),
    Column("SOURCE", "source", "source"),
    key="bookieId",
    none="No bookie has a rack",
)
CHANGE_COLUMNS = Columns(*RACK_COLUMNS.columns[:-1], key="bookieId")


def rack_rows(run: Run, cluster: Cluster, bookies: list[RegisteredBookie]) -> list[Row]:
    """Return the racks in the metadata store and of `bookies`; where --conf names a script, the script's count."""
    from bkctl.metadata.racks import BookieRacks, Topology, racks_of

    stored = BookieRacks(cluster).all()
    by_id = {each.bookie_id: each for each in stored}
    shared = racks_of(stored, bookies)
    script = run.access.client_config().network_topology_script_file_name
    printed = {} if script is None else Topology(script).racks(bookies)
    rows = []
    for bookie_id in sorted({*by_id, *(bookie.bookie_id for bookie in bookies)}):
        own: BookieRack | None = by_id.get(bookie_id)
        rack = printed.get(bookie_id) or shared.get(bookie_id) or (own and own.rack)
        source = None if rack is None else "script" if bookie_id in printed else "metadata"
        group, hostname = (None, None) if own is None else (own.group, own.hostname)
        rows.append(Row(bookie_id=bookie_id, rack=rack, group=group, hostname=hostname, source=source))
    return rows


def find_racks(run: Run, cluster: Cluster, bookies: list[RegisteredBookie]) -> dict[str, str]:
    """Return the rack of each bookie that has one, by bookie id; see `rack_rows`. Racks that fail are warnings."""
    try:
        rows = rack_rows(run, cluster, bookies)
    except (Unreachable, NotFound):
        raise
    except Unauthorized as error:  # A user of the cluster's own nodes only.
        run.out.detail(f"racks are unknown: {error.message}")
        return {}
    except BkctlError as error:
        run.out.warn(f"racks are unknown: {error.message}")
        return {}
    return {row.bookie_id: row.rack for row in rows if row.rack is not None}


def find_placement(run: Run, cluster: Cluster, bookies: list[RegisteredBookie]) -> Placement:
    """Return the racks, as `find_racks`, and the policy that --conf names. An unsupported policy is a warning."""
    from bkctl.client.placement import Placement, PlacementRules

    try:
        rules = PlacementRules.of(run.access.client_config())
    except BkctlError as error:
        run.out.warn(f"placement is not judged: {error.message}")
        return Placement()
    return Placement(find_racks(run, cluster, bookies), rules)


@command(racks_app, "list", connects=True, examples=("bkctl bookies racks list",), prints=rows_of(RACK_COLUMNS))
def list_racks(run: Run) -> None:
    """List the racks of bookies.

    Racks come from Pulsar's node `/bookies` in the metadata store, or from the script that --conf names
    (networkTopologyScriptFileName), which takes precedence. Bookies without a rack are listed, too; clients treat them
    as one rack, /default-rack.
    """
    with run.access.cluster() as cluster:
        run.out.render(rack_rows(run, cluster, cluster.bookies.list()), RACK_COLUMNS)


@command(racks_app, "set", connects=True, changes=True, prints=rows_of(CHANGE_COLUMNS))
def set_racks(
    run: Run,
    bookies: ManyBookies,
    rack: Annotated[str, typer.Option("--rack", metavar="RACK", help="The rack: /rack or /region/rack.")],
    bookie_group: Annotated[
        str, typer.Option("--group", metavar="NAME", help="Isolation group, for Pulsar's namespaces.")
    ] = "default",
    hostname: Annotated[
        str | None, typer.Option("--hostname", metavar="NAME", help="Host name to note (default: as it is).")
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Put bookies into a rack.

    Changes Pulsar's node `/bookies` beside the cluster's root in the metadata store. The bookies leave their former
    rack and group. Brokers place new ledgers by it at once, bkctl's own clients and auto-recovery within 10 seconds.
    Ledgers that exist are moved only by auto-recovery with repairedPlacementPolicyNotAdheringBookieEnabled=true.

    $ bkctl bookies racks set 10.0.0.1:3181 --rack /rack1 --dry-run
    """
    from bkctl.metadata.racks import BookieRacks

    names = bookie_ids(bookies)
    with run.access.cluster() as cluster:
        registered = {bookie.bookie_id for bookie in cluster.bookies.list()}
        with run.consent.recorded(cluster, undo) as recorded:
            before = BookieRacks(recorded).all()
            rows = BookieRacks(recorded).set(names, rack, group=bookie_group, hostname=hostname, dry_run=dry_run)
    run.out.note(*(f"Bookie {row.bookie_id} is in rack {row.rack} already" for row in rows if row in before))
    run.out.warn(
        *(f"bookie {name} has neither a registration nor a cookie" for name in names if name not in registered)
    )
    run.out.render(rows, CHANGE_COLUMNS)


@command(racks_app, "unset", connects=True, changes=True, prints=rows_of(CHANGE_COLUMNS))
def unset_racks(run: Run, bookies: ManyBookies, undo: UndoOption = None, dry_run: DryRun = False) -> None:
    """Remove the racks of bookies.

    Changes Pulsar's node `/bookies`, as 'bookies racks set' does. The bookies are in /default-rack then.

    $ bkctl bookies racks unset 10.0.0.1:3181 --dry-run
    """
    from bkctl.metadata.racks import BookieRacks

    names = bookie_ids(bookies)
    with run.access.cluster() as cluster, run.consent.recorded(cluster, undo) as recorded:
        rows = BookieRacks(recorded).unset(names, dry_run=dry_run)
    run.out.render(rows, CHANGE_COLUMNS, findings=True)
    run.out.note(*(f"Bookie {name} has no rack" for name in names if all(row.bookie_id != name for row in rows)))
    if rows and not dry_run:
        has = "has" if len(rows) == 1 else "have"
        run.out.note(f"{', '.join(row.bookie_id for row in rows)} {has} no rack now; the table shows the former one")
