"""`bkctl bookies`: the set of bookies of a cluster, and their racks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, NotFound, Unauthorized, Unreachable, UsageError
from bkctl.ids import check_bookie_id

from ..kit.columns import PlainRow, fields
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.options import WatchOption, flag, word
from ..kit.texts import GREEN, RED, YELLOW, size_text
from ..kit.values import percentage

if TYPE_CHECKING:
    from bkctl.client.disk_space import BookieSpace
    from bkctl.client.placement import Placement
    from bkctl.metadata.cluster import RegisteredBookie
    from bkctl.metadata.racks import BookieRack

app = group()

ManyBookies = Annotated[list[str], word("BOOKIE", "The bookies.")]
OneBookie = Annotated[str, word("BOOKIE", "The bookie.")]
racks_app = group("Show and change the racks of bookies.")
app.add_typer(racks_app, name="racks")


def bookie_ids(texts: Sequence[str]) -> list[str]:
    """Return the named bookies; commas separate several in one text, as in Apache's shell."""
    names = dict.fromkeys(name for text in texts for name in text.split(",") if name)
    if not names:
        raise UsageError("No bookie is named", hint="'bkctl bookies list' shows them")
    return [check_bookie_id(name) for name in names]


#: The rack of a bookie: `source` is "metadata", "script", or None where the bookie has no rack.
RACK_COLUMNS = Columns(
    *fields(Kind.TEXT, bookieId="BOOKIE", rack="RACK", group="GROUP", hostname="HOST NAME", source="SOURCE"),
    key="bookieId",
    none="No bookie has a rack",
)
CHANGE_COLUMNS = Columns(*RACK_COLUMNS.columns[:-1], key="bookieId")


def rack_rows(run: Run, bookies: list[RegisteredBookie]) -> list[PlainRow]:
    """Return the racks in the metadata store and of `bookies`; where --conf names a script, the script's count."""
    from bkctl.metadata.racks import BookieRacks, Topology, racks_of

    stored = BookieRacks(run.cluster).all()
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
        rows.append(PlainRow(bookie_id=bookie_id, rack=rack, group=group, hostname=hostname, source=source))
    return rows


def find_racks(run: Run, bookies: list[RegisteredBookie]) -> dict[str, str]:
    """Return the rack of each bookie that has one, by bookie id; see `rack_rows`. Racks that fail are warnings."""
    try:
        rows = rack_rows(run, bookies)
    except (Unreachable, NotFound):
        raise
    except BkctlError as error:
        # Some users may read the cluster's own nodes only.
        say = run.out.detail if isinstance(error, Unauthorized) else run.out.warn
        say(f"racks are unknown: {error.message}")
        return {}
    return {row.bookie_id: row.rack for row in rows if row.rack is not None}


def find_placement(run: Run, bookies: list[RegisteredBookie]) -> Placement:
    """Return the racks, as `find_racks`, and the policy that --conf names. An unsupported policy is a warning."""
    from bkctl.client.placement import Placement, PlacementRules

    try:
        rules = PlacementRules.of(run.access.client_config())
    except BkctlError as error:
        run.out.warn(f"placement is not judged: {error.message}")
        return Placement()
    return Placement(find_racks(run, bookies), rules)


@command(racks_app, "list", connects=True, prints=rows_of(RACK_COLUMNS))
def list_racks(run: Run) -> None:
    """List the racks of bookies.

    Racks come from Pulsar's node `/bookies` in the metadata store, or from the script that --conf names
    (networkTopologyScriptFileName), which takes precedence. Bookies without a rack are listed, too; clients treat them
    as one rack, /default-rack.

    $ bkctl bookies racks list
    """
    run.out.render(rack_rows(run, run.cluster.bookies.list()), RACK_COLUMNS)


@command(racks_app, "set", undo=True, dry_run=True, prints=rows_of(CHANGE_COLUMNS))
def set_racks(
    run: Run,
    bookies: ManyBookies,
    rack: Annotated[str, flag("--rack RACK", "The rack: /rack or /region/rack.")],
    bookie_group: Annotated[str, flag("--group NAME", "Isolation group, for Pulsar's namespaces.")] = "default",
    hostname: Annotated[str | None, flag("--hostname NAME", "Host name to note (default: as it is).")] = None,
) -> None:
    """Put bookies into a rack.

    Changes Pulsar's node `/bookies` beside the cluster's root in the metadata store. The bookies leave their former
    rack and group. Brokers place new ledgers by it at once, bkctl's own clients and auto-recovery within 10 seconds.
    Ledgers that exist are moved only by auto-recovery with repairedPlacementPolicyNotAdheringBookieEnabled=true.

    $ bkctl bookies racks set 10.0.0.1:3181 --rack /rack1 --dry-run
    """
    from bkctl.metadata.racks import BookieRacks

    names = bookie_ids(bookies)
    registered = {bookie.bookie_id for bookie in run.cluster.bookies.list()}
    racks = BookieRacks(run.recorded)
    before = racks.all()
    rows = racks.set(names, rack, group=bookie_group, hostname=hostname, dry_run=run.dry_run)
    run.out.note(*(f"Bookie {row.bookie_id} is in rack {row.rack} already" for row in rows if row in before))
    run.out.warn(
        *(f"bookie {name} has neither a registration nor a cookie" for name in names if name not in registered)
    )
    run.out.render(rows, CHANGE_COLUMNS)


@command(racks_app, "unset", undo=True, dry_run=True, prints=rows_of(CHANGE_COLUMNS))
def unset_racks(run: Run, bookies: ManyBookies) -> None:
    """Remove the racks of bookies.

    Changes Pulsar's node `/bookies`, as 'bookies racks set' does. The bookies are in /default-rack then.

    $ bkctl bookies racks unset 10.0.0.1:3181 --dry-run
    """
    from bkctl.metadata.racks import BookieRacks

    names = bookie_ids(bookies)
    rows = BookieRacks(run.recorded).unset(names, dry_run=run.dry_run)
    run.out.render(rows, CHANGE_COLUMNS, findings=True)
    run.out.note(*(f"Bookie {name} has no rack" for name in names if all(row.bookie_id != name for row in rows)))
    if rows and not run.dry_run:
        has = "has" if len(rows) == 1 else "have"
        run.out.note(f"{', '.join(row.bookie_id for row in rows)} {has} no rack now; the table shows the former one")


State = StrEnum("State", "RW RO DOWN ALL")


def _address(row: PlainRow) -> str | None:
    address = row.bookie.address
    if address is None:
        return None
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _endpoints(row: PlainRow) -> list[dict[str, Any]]:
    names = ("id", "protocol", "host", "port", "auth", "extensions")
    endpoints = () if row.bookie.info is None else row.bookie.info.endpoints
    return [{name: getattr(endpoint, name) for name in names} for endpoint in endpoints]


def _url(endpoint: dict[str, Any]) -> str:
    return f"{endpoint['protocol']}://{endpoint['host']}:{endpoint['port']}"


_BOOKIE: Final = (
    Column("BOOKIE", "bookieId", "bookie.bookie_id"),
    Column("STATE", "state", "bookie.state", style={"rw": GREEN, "ro": YELLOW, "down": RED}),
)
_ADDRESS: Final = Column("ADDRESS", "address", _address)
#: None for a bookie that is down: only a registration says so.
_SCOPES: Final = Column(
    "SCOPES", "ledgerScopes", lambda row: None if row.bookie.state == "down" else row.bookie.ledger_scopes, Kind.BOOLEAN
)
_ENDPOINTS: Final = Column("ENDPOINTS", "endpoints", _endpoints, Kind.NESTED, flexible=True)
BOOKIE_COLUMNS = Columns(
    *_BOOKIE,
    _ADDRESS,
    Column("RACK", "rack", "rack"),
    _SCOPES,
    _ENDPOINTS.replaced(wraps=True, text=lambda endpoints: ", ".join(map(_url, endpoints)) or "-"),
    key="bookieId",
    none="No bookies",
)


@command(app, "list", connects=True, prints=rows_of(BOOKIE_COLUMNS))
def list_bookies(
    run: Run,
    watch: WatchOption,
    state: Annotated[
        State, flag("--state", "rw, ro, down (it has a cookie, but is not registered) or all.")
    ] = State.ALL,
) -> None:
    """List the bookies: state, address, rack, scopes, endpoints.

    'bookies racks list' says where the racks come from.

    $ bkctl bookies list
    $ bkctl bookies list -o json
    """
    run.out.watch(watch, partial(_listed, run, state), BOOKIE_COLUMNS, subscribe=run.cluster.bookies.watch)


def _listed(run: Run, state: State) -> list[PlainRow]:
    bookies = run.cluster.bookies.list(include_down=state in (State.ALL, State.DOWN))
    racks = find_racks(run, bookies)
    return [
        PlainRow(bookie=each, rack=racks.get(each.bookie_id)) for each in bookies if state in (State.ALL, each.state)
    ]


def _cookie_object(row: PlainRow) -> dict[str, Any] | None:
    if row.cookie is None:
        return None
    return {name: value for name, value in row.cookie.to_json().items() if name != "bookieId"}


SHOW_COLUMNS = Columns(
    *_BOOKIE,
    _ADDRESS,
    _SCOPES,
    _ENDPOINTS.replaced(text=lambda endpoints: "\n".join(map(_endpoint_line, endpoints)) or "-"),
    Column(
        "PROPERTIES", "properties", lambda row: dict(row.bookie.info.properties if row.bookie.info else {}), Kind.NESTED
    ),
    Column("COOKIE", "cookie", _cookie_object, Kind.NESTED),
    Column("COOKIE PROBLEM", "cookieError", "cookie_error", optional=True),
    Column("LEDGERS", "ledgerCount", value_at("ledgers.ledger_count"), Kind.INTEGER, optional=True),
    Column("  NOT CLOSED", "openLedgerCount", value_at("ledgers.open_count"), Kind.INTEGER, optional=True),
    key="bookieId",
)
SHOW_TABLE_COLUMNS = Columns(
    *_BOOKIE,
    _ADDRESS,
    _SCOPES,
    Column("COOKIE", "cookie", lambda row: row.cookie is not None or None, Kind.BOOLEAN),
    Column("LEDGERS", "ledgerCount", value_at("ledgers.ledger_count"), Kind.INTEGER),
    key="bookieId",
)


def _endpoint_line(endpoint: dict[str, Any]) -> str:
    more = [*endpoint["auth"], *endpoint["extensions"]]
    return f"{endpoint['id']}: {_url(endpoint)}" + (f" ({', '.join(more)})" if more else "")


def _show_row(run: Run, bookie_id: str) -> PlainRow:
    """Return all that the metadata store knows of a bookie, but for its ledgers. Raises NotFound, Unreachable."""
    from bkctl.metadata.store import attempt

    bookie, found = run.bookie(bookie_id), attempt(run.cluster.cookies.read, bookie_id)
    error = str(found) if isinstance(found, BkctlError) else None
    cookie = None if found is None or isinstance(found, BkctlError) else found.value
    return PlainRow(bookie=bookie, cookie=cookie, cookie_error=error, ledgers=None)


@command(app, "show", connects=True, prints=object_of(SHOW_COLUMNS) + rows_of(SHOW_COLUMNS))
def show(
    run: Run,
    bookies: Annotated[list[str], word("BOOKIE", "The bookies.")],
    watch: WatchOption,
    ledgers: Annotated[
        bool, flag("--ledgers", "Count the ledgers on each bookie; reads the metadata of every ledger.")
    ] = False,
) -> None:
    """Show bookies with their endpoints, properties and cookie.

    $ bkctl bookies show 10.0.0.1:3181 --ledgers
    """
    single = len(bookies) == 1
    with run.job.working("Counting ledgers", enabled=ledgers and watch is None):
        columns = SHOW_COLUMNS if single else run.out.table_columns(SHOW_TABLE_COLUMNS, SHOW_COLUMNS)
        look = partial(_shown, run, bookies, counts=ledgers)
        run.out.watch(watch, look, columns, subscribe=run.cluster.bookies.watch, single=single)


def _shown(run: Run, bookies: list[str], *, counts: bool) -> list[PlainRow]:
    from bkctl.metadata.admin.overview import ledgers_of_bookies

    rows = [_show_row(run, bookie_id) for bookie_id in bookies]
    ledgers = ledgers_of_bookies(run.cluster, bookies) if counts else {}
    for row in rows:
        row.ledgers = ledgers.get(row.bookie.bookie_id)
    return rows


UsageOrder = StrEnum("UsageOrder", "BOOKIE USED FREE")

USAGE_COLUMNS = Columns(
    *_BOOKIE,
    Column("TOTAL", "totalSpace", "total", Kind.SIZE),
    Column("FREE", "freeSpace", "free", Kind.SIZE),
    Column("USED", "usedSpace", "used", Kind.SIZE),
    Column("USED %", "usedPercent", "used_percent", Kind.INTEGER, text=lambda value: f"{value:.1f}%"),
    Column("PROBLEM", "error", value_at("error.message")),
    key="bookieId",
)

_USAGE_KEYS: Final[dict[UsageOrder, Callable[[BookieSpace], Any]]] = {
    UsageOrder.BOOKIE: lambda _: 0,
    UsageOrder.USED: lambda row: -(row.used_percent or 0),
    UsageOrder.FREE: lambda row: row.free or 0,
}


@command(app, "usage", connects=True, prints=rows_of(USAGE_COLUMNS))
def usage(
    run: Run,
    sort: Annotated[UsageOrder, flag("--sort", "Order: bookie, used (fullest first) or free.")] = UsageOrder.BOOKIE,
    threshold: Annotated[
        float | None, flag("--threshold PERCENT", "Exit with 3 if a bookie has used more than this.")
    ] = None,
) -> None:
    """Show the space on the ledger disks of every bookie.

    Asks every registered bookie. A bookie that does not answer is a row with the problem: exit code 3 then, and 6 if
    none answers.

    $ bkctl bookies usage
    """
    from bkctl.client.disk_space import disk_space

    percentage(threshold)
    with run.job.working("Asking the bookies"):
        registered = run.cluster.bookies.list(include_down=False)
        rows: list[BookieSpace] = []
        run.job.take_each(run.access.bookkeeper(run.cluster), partial(disk_space, bookies=registered), rows.append)
    rows.sort(key=_USAGE_KEYS[sort])
    run.out.render(rows, USAGE_COLUMNS, findings=run.out.draws)
    total, free = (sum(getattr(row, name) or 0 for row in rows) for name in ("total", "free"))
    run.out.note(f"{size_text(free)} of {size_text(total)} free on {len(rows):,} bookies")
    silent_count = sum(row.error is not None for row in rows)
    if rows and silent_count == len(rows):
        raise Unreachable(f"None of {len(rows):,} bookies answered")
    full_count = sum(threshold is not None and (row.used_percent or 0) > threshold for row in rows)
    problems = ((full_count, f"are above {threshold or 0:g}%"), (silent_count, "did not answer"))
    text = ", ".join(f"{count:,} bookies {what}" for count, what in problems if count)
    run.out.finish_with(full_count + silent_count, f"finding: {text}", f"findings: {text}")
