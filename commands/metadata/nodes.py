"""`bkctl metadata layout`, `get`, `tree` and `undo`."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import Conflict, Corrupt, EntryNotFound, LedgerNotFound, NotFound, Unsupported, UsageError

from ..kit.columns import Output, PlainRow, fields
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.next_steps import undoing
from ..kit.options import BinaryFormat, BinaryFormatOption, count_option, flag, word
from ..kit.texts import GREEN, RED, binary_text, counted, readable_text
from ..kit.values import tap

if TYPE_CHECKING:
    from bkctl.formats.metadata import LedgerMetadata
    from bkctl.ids import LedgerId
    from bkctl.metadata.admin.overview import Node
    from bkctl.metadata.admin.undo import LacksEntries

app = group()

LAYOUT_COLUMNS = Columns(
    Column("METADATA URI", "metadataUri", "uri"),
    Column("LAYOUT FORMAT", "layoutFormatVersion", "layout.format_version", Kind.INTEGER),
    Column("FACTORY CLASS", "managerFactoryClass", "layout.factory_class"),
    Column("VERSION", "managerVersion", "layout.manager_version", Kind.INTEGER),
    Column("STORED", "stored", "stored", Kind.BOOLEAN),
    Column("INSTANCE ID", "instanceId", "instance_id"),
    key="instanceId",
)


@command(app, "layout", connects=True, prints=object_of(LAYOUT_COLUMNS))
def layout(run: Run) -> None:
    """Show the cluster's ledger manager and instance id.

    Without a LAYOUT node, shows the defaults of the metadata URI.

    $ bkctl metadata layout
    """
    stored = run.cluster.store.get(run.cluster.places.layout) is not None
    row = PlainRow(
        uri=run.cluster.uri, layout=run.cluster.layout(), instance_id=run.cluster.instance_id(), stored=stored
    )
    run.out.show(row, LAYOUT_COLUMNS)
    if not stored:
        run.out.note(f"There is no {run.cluster.places.layout} node: the layout is the default of the metadata URI")


NODE_COLUMNS = Columns(
    Column("PATH", "path", "path"),
    Column("VERSION", "version", "found.version", Kind.INTEGER),
    Column("CREATED", "ctime", "found.ctime_ms", Kind.TIME),
    Column("SIZE", "size", lambda row: len(row.found.value), Kind.SIZE),
    Column("VALUE", "value", "value"),
    key="path",
)


@command(app, "get", connects=True, prints=object_of(NODE_COLUMNS))
def get(
    run: Run,
    path: Annotated[str, word("PATH", "Path below the cluster's root, such as cookies/BOOKIE.")],
    format: BinaryFormatOption = None,
    show_secrets: Annotated[bool, flag("--show-secrets", "Print values that hold a ledger password, too.")] = False,
) -> None:
    """Show one node: version, creation time, size and value.

    The value is base64; --format raw writes its bytes alone.

    $ bkctl metadata get LAYOUT --format utf8
    """
    place = path.strip("/")
    found = run.cluster.store.get(place)
    if found is None:
        raise NotFound(f"No node {place!r} in {run.cluster.store.name}", hint="'bkctl metadata tree' lists the nodes")
    if not show_secrets and _holds_password(found.value):
        raise UsageError(
            f"{place} is ledger metadata with a password", hint="use 'bkctl ledger show', or add --show-secrets"
        )
    if format is BinaryFormat.RAW:
        run.out.raw(found.value)
        return
    table = run.out.output is Output.TABLE and format is None
    value = readable_text(found.value) if table else binary_text(found.value, format)
    run.out.show(PlainRow(path=place, found=found, value=value), NODE_COLUMNS)


def _holds_password(value: bytes) -> bool:
    from bkctl.formats.metadata import LedgerMetadata

    if not value.startswith(b"BookieMetadataFormatVersion"):
        return False
    try:
        return bool(LedgerMetadata.parse(value).password)
    except (Corrupt, Unsupported):
        # An unreadable node may hold one.
        return True


def _branch(row: Any) -> str:
    node = getattr(row, "node", row)
    if not node.lasts:
        return node.path or "/"
    stems = "".join("   " if last else "│  " for last in node.lasts[:-1])
    return f"{stems}{'└─ ' if node.lasts[-1] else '├─ '}{node.name}"


TREE_COLUMNS = Columns(
    Column("NODE", "path", "path"),
    Column("VERSION", "version", value_at("found.version"), Kind.INTEGER),
    Column("SIZE", "size", lambda node: node.found and len(node.found.value), Kind.SIZE),
    Column("CREATED", "ctime", lambda node: (node.found and node.found.ctime_ms) or None, Kind.TIME),
    key="path",
)
TOTAL_COLUMNS = Columns(
    Column("NODE", "path", "path"),
    Column("NODES", "nodeCount", "node_count", Kind.INTEGER),
    Column("SIZE", "totalSize", "size_bytes", Kind.SIZE),
    key="path",
)


def _drawn(columns: Columns) -> Columns:
    """Return the columns with branches before the names of the nodes."""
    return Columns(Column("NODE", "path", _branch, flexible=True), *columns.columns[1:], key="path")


@command(app, "tree", connects=True, prints=rows_of(TREE_COLUMNS, TOTAL_COLUMNS))
def tree(
    run: Run,
    depth: Annotated[int | None, count_option("--depth", "List only N levels below the start.")],
    path: Annotated[str, word("PATH", "Where to start (default: the root).")] = "",
    match: Annotated[
        str | None,
        flag("--match PATTERN", "Only nodes whose name, or path, matches; * and ? stand for any characters."),
    ] = None,
    contains: Annotated[str | None, flag("--contains TEXT", "Only nodes whose value contains this text.")] = None,
    totals: Annotated[
        bool, flag("--totals", "Show the number of nodes and bytes of each subtree, at every depth.")
    ] = False,
) -> None:
    """List the nodes of the metadata store below a path.

    With --match or --contains, lists only the nodes that fit, by their whole paths; exit code 4 if none does. With
    --totals, shows which parts of the tree are large.

    $ bkctl metadata tree --depth 1
    $ bkctl metadata tree --totals --depth 1
    $ bkctl metadata tree cookies --contains 10.0.0.1
    """
    from bkctl.metadata.admin.overview import subtree_totals, walk

    filters = match is not None or contains is not None
    if totals and filters:
        raise UsageError("--totals counts all nodes", hint="drop --match and --contains")
    place = path.strip("/")
    draws = run.out.output in (Output.TABLE, Output.WIDE) and run.out.selection.order is None
    with run.job.working("Reading the tree", unit="nodes") as activity:
        if totals:
            columns = _drawn(TOTAL_COLUMNS) if draws else TOTAL_COLUMNS
            run.out.render(subtree_totals(run.cluster.store, place, depth=depth, progress=activity.update), columns)
            return
        nodes = walk(run.cluster.store, place, depth=depth)
        if not filters:
            run.out.render(nodes, _drawn(TREE_COLUMNS) if draws else TREE_COLUMNS)
            return

        fitting = filter(partial(_fits, match=match, contains=contains), tap(nodes, lambda _: activity.advance()))
        if not run.out.render(fitting, TREE_COLUMNS, findings=True):
            raise NotFound(f"No node of {activity.done:,} fits", hint="'bkctl metadata tree' lists all")


def _fits(node: Node, match: str | None, contains: str | None) -> bool:
    """Return True if the node's name (or path) matches, and its value contains the text."""
    if match is not None and not any(fnmatchcase(text, match) for text in (node.name, node.path)):
        return False
    return contains is None or (node.found is not None and os.fsencode(contains) in node.found.value)


UNDONE_COLUMNS = Columns(
    Column("NODE", "path", "path"),
    Column("OUTCOME", "outcome", "outcome", style={"restored": GREEN, "changed": RED, "moved": RED, "refused": RED}),
    Column("SIZE BEFORE", "sizeBefore", "size_bytes", Kind.SIZE),
    key="path",
)

UNDO_FILE_COLUMNS = Columns(
    # Its name begins with the time.
    Column("FILE", "file", lambda row: str(row.path), text=lambda path: Path(path).name),
    Column("CHANGES", "changeCount", "change_count", Kind.INTEGER),
    Column("COMMAND", "command", lambda row: shlex.join(row.command), flexible=True, wraps=True),
    Column("CLUSTER", "metadataUri", "metadata_uri", flexible=True, spare=1),
    *fields(Kind.TEXT, time=None, instanceId=None, host=None),
    key="file",
    none="No undo files",
)

_UNDONE: Final = rows_of(UNDONE_COLUMNS, UNDO_FILE_COLUMNS)


@command(app, "undo", asks=True, changes=("file", "last"), undo=True, dry_run=True, prints=_UNDONE)
def undo_command(
    run: Run,
    file: Annotated[
        Path | None,
        word("FILE", "The undo file that a command wrote: its name in --list, or a path.", show_default=False),
    ] = None,
    last: Annotated[bool, flag("--last", "Undo the last command that changed this store.")] = False,
    list_files: Annotated[bool, flag("--list", "List the undo files, oldest first.")] = False,
    store_moved: Annotated[
        bool,
        flag(
            "--store-moved",
            "The store of FILE has another URI since, as after an exchange of its hosts. Not for copies.",
        ),
    ] = False,
) -> None:
    """Undo a command, from the undo file that it wrote.

    Restores the nodes that the command changed, the last change first. A node that was changed since, or that the store
    refuses to change, is left unchanged, and the exit code is 3. Undoing leaves an undo file, too, so --last twice
    restores what the command changed, but not after an undo that did not end: undo FILE again continues that. Restored
    nodes have a new creation time: the age of a ledger (--min-age) begins again unless its metadata has the time.

    An undo file belongs to the store that was changed, not to a copy that 'metadata migrate' or import made; the order
    of the hosts in the URI does not matter. Another store is refused.

    Exit code 5 while a bookie is registered whose cookie would be taken away, and where a directory whose VERSION would
    be removed has entry logs or journals by now: nothing is changed.

    Moves are not undone, since the former bookies may have deleted their copies: a ledger that bookies recover,
    decommission or drain moved, or whose ensembles ledger recover changed, is "moved", stays as it is, and the exit
    code is 3. 'bkctl bookies drain' moves entries away from a bookie again. Undoing metadata replace-bookie, import or
    migrate restores the names of bookies; a ledger stays "moved", too, if a registered bookie that it would name again
    lacks its entries. Undoing ledger delete restores the metadata without asking: 'bkctl ledger verify' shows what
    bookies still have. Layouts and directories that the whole cluster uses are "shared", and stay.

    Every command that changes metadata leaves an undo file, with these exceptions: new ledgers (ledger write, copy and
    test, bench, pipeline import and migrate-scope), which 'ledger delete' removes; new clusters (cluster init, import
    and migrate into an empty store), which 'cluster nuke' removes; metadata idgen, since ledger ids are not used twice;
    autorecovery audit without --reset-clock, which starts an audit and changes no value; bookie start, autorecovery run
    and other servers; and cluster nuke and bookie format, whose data is gone as well: 'metadata export' before them is
    the way back.

    $ bkctl metadata undo --list
    $ bkctl metadata undo --last --dry-run
    """
    from bkctl.metadata.admin.undo import describe_undo_file, end_undos, list_undo_files, undo

    given = [name for name, is_given in (("FILE", file), ("--last", last), ("--list", list_files)) if is_given]
    if not given:
        raise UsageError("FILE, --last or --list is needed", hint="give one of them; --list shows the files")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are given", hint="give one of them")
    if store_moved and file is None:
        raise UsageError("--store-moved needs FILE", hint="--list shows the files")
    if list_files:
        run.out.render(list_undo_files(run.consent.undo_directory), UNDO_FILE_COLUMNS)
        return
    path = _last_undo_file(run) if file is None else file
    if not path.exists():
        # A path wins; a name alone is looked up where commands keep the files.
        path = run.consent.undo_directory / path
    if not path.exists():
        raise NotFound(f"No undo file {file}", hint="'bkctl metadata undo --list' lists them")
    if not run.dry_run:
        run.consent.confirm(f"The changes in {path} would be undone in {run.cluster.uri}")
    outcomes = Counter[str]()
    redo, asks = None if run.dry_run else run.undo_file, _asking_bookies(run)
    undone = undo(run.cluster, path, dry_run=run.dry_run, redo=redo, moved=store_moved, lacks_entries=asks)
    with run.job.working("Undoing", left=None if run.dry_run else f"'{undoing(path)}' continues"):
        run.out.render(tap(undone, lambda row: outcomes.update((row.outcome,))), UNDONE_COLUMNS)
    if not run.dry_run:
        end_undos(run.consent.undo_directory, path)
    if outcomes["moved"]:
        run.out.error(
            f"{counted(outcomes['moved'], 'ledger was', 'ledgers were')} moved to other bookies, and the former ones "
            "lack entries, or may; 'bkctl bookies drain' and a bookie's id moves entries away from it again"
        )
    described = describe_undo_file(path)
    is_cut = described is not None and described.is_cut
    if is_cut:
        run.out.error(f"The end of {path} is missing: its command was killed, or the file was cut and lacks changes")
    left = outcomes["changed"] + outcomes["moved"] + outcomes["refused"]
    run.out.finish_with(left, "node was left unchanged, see OUTCOME", "nodes were left unchanged, see OUTCOME")
    run.out.finish_with(is_cut, "undo file without its end")


def _asking_bookies(run: Run) -> LacksEntries:
    """Return a function that asks registered bookies for the entries of a ledger whose ensembles are to be restored."""
    from bkctl.metadata.ledgers import VersionedMetadata

    def lacks_entries(ledger: LedgerId, before: LedgerMetadata, after: LedgerMetadata) -> bool:
        from bkctl.replication.checker import LedgerChecker

        named, names = ({each for part in value.ensembles for each in part.bookies} for value in (before, after))
        up = {bookie.bookie_id for bookie in run.cluster.bookies.list() if bookie.state != "down"} & (named - names)

        async def check() -> bool:
            async with run.access.bookkeeper(run.cluster) as bookkeeper:
                found = VersionedMetadata(before, 0, None)
                fragments = (await LedgerChecker(bookkeeper).check(ledger, found, up=up)).fragments
            faults = [fault for fragment in fragments for fault in fragment.faults]
            return any(isinstance(each.error, EntryNotFound | LedgerNotFound) for each in faults)

        return bool(up) and run.job.complete(check())

    return lacks_entries


def _last_undo_file(run: Run) -> Path:
    """Return the newest undo file of the cluster that has changes. Raises NotFound; Conflict if an undo did not end."""
    from bkctl.metadata.admin.undo import list_undo_files

    files = reversed(list_undo_files(run.consent.undo_directory))
    last = next((each for each in files if each.change_count and each.is_of(run.cluster)), None)
    if last is None:
        raise NotFound(f"No undo file of {run.cluster.uri} in {run.consent.undo_directory}", hint="name one as FILE")
    if last.continues is not None:
        raise Conflict(
            f"The undo of {last.continues} did not end",
            hint=f"'{undoing(last.continues)}' continues it; '{undoing(last.path)}' takes back what it did",
        )
    command = shlex.join(last.command)
    run.out.note(f"{counted(last.change_count, 'change')} of {last.time}: {command}")
    return last.path
