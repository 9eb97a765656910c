"""`bkctl metadata`: the metadata store as it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from bkctl.errors import Conflict, NotFound, UsageError
from bkctl.ids import LedgerId

from .kit.command import Run, command, group
from .kit.connection import LoginOfTarget
from .kit.ledger_options import LedgersOfExport, ScopeOfAny
from .kit.options import BinaryFormat, BinaryFormatOption, DryRun, UndoOption, count_option
from .kit.output import GREEN, RED, YELLOW, Column, Columns, Kind, Output, binary_text, readable_text

if TYPE_CHECKING:
    from bkctl.metadata.admin.dump import ClusterSource, Exported, Imported, MetadataSource
    from bkctl.metadata.cluster import Cluster

app = group()

LAYOUT_COLUMNS = Columns(
    Column("METADATA URI", "metadataUri", "uri"),
    Column("LAYOUT FORMAT", "layoutFormatVersion", "layout.format_version", Kind.INTEGER),
    Column("FACTORY CLASS", "managerFactoryClass", "layout.factory_class"),
    Column("VERSION", "managerVersion", "layout.manager_version", Kind.INTEGER),
    Column("INSTANCE ID", "instanceId", "instance_id"),
    key="instanceId",
)


class Layout(NamedTuple):
    """What `metadata layout` prints."""

    uri: str
    layout: Any
    instance_id: str


@command(app, "layout", connects=True)
def layout(run: Run) -> None:
    """Show which ledger manager lays out the cluster's metadata, and the cluster's instance id."""
    with run.cluster() as cluster:
        run.show(Layout(cluster.uri, cluster.layout(), cluster.instance_id()), LAYOUT_COLUMNS)


class NodeValue(NamedTuple):
    """What `metadata get` prints."""

    path: str
    version: int
    ctime_ms: int | None
    size_bytes: int
    value: str | None


NODE_COLUMNS = Columns(
    Column("PATH", "path", "path"),
    Column("VERSION", "version", "version", Kind.INTEGER),
    Column("CREATED", "ctime", "ctime_ms", Kind.TIME),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    Column("VALUE", "value", "value"),
    key="path",
)


@command(app, "get", connects=True)
def get(
    run: Run,
    path: Annotated[str, typer.Argument(help="Path below the cluster's root, such as cookies/BOOKIE.", metavar="PATH")],
    format: BinaryFormatOption = None,
    show_secrets: Annotated[
        bool, typer.Option("--show-secrets", help="Also values that hold a ledger password.")
    ] = False,
) -> None:
    """Show one node: version, time of creation, size and value (base64; --format raw writes its bytes alone)."""
    with run.cluster() as cluster:
        place = path.strip("/")
        found = cluster.store.get(place)
        if found is None:
            raise NotFound(f"No node {place!r} in {cluster.store.name}", hint="'bkctl metadata tree' lists the nodes")
        if not show_secrets and _holds_password(found.value):
            raise UsageError(
                f"{place} is ledger metadata with a password",
                hint="see it without by 'bkctl ledger show', or add --show-secrets",
            )
    if format is BinaryFormat.RAW:
        run.raw(found.value)
        return
    table = run.output is Output.TABLE and format is None
    value = readable_text(found.value) if table else binary_text(found.value, format)
    run.show(NodeValue(place, found.version, found.ctime_ms, len(found.value), value), NODE_COLUMNS)


def _holds_password(value: bytes) -> bool:
    from bkctl.errors import Corrupt, Unsupported
    from bkctl.formats.metadata import LedgerMetadata

    if not value.startswith(b"BookieMetadataFormatVersion"):
        return False
    try:
        return bool(LedgerMetadata.parse(value).password)
    except (Corrupt, Unsupported):
        # What cannot be read may hold one.
        return True


def _branch(node: Any) -> str:
    if not node.lasts:
        return node.path or "/"
    stems = "".join("   " if last else "│  " for last in node.lasts[:-1])
    return f"{stems}{'└─ ' if node.lasts[-1] else '├─ '}{node.name}"


TREE_COLUMNS = Columns(
    Column("NODE", "path", "path"),
    Column("VERSION", "version", lambda node: node.found and node.found.version, Kind.INTEGER),
    Column("SIZE", "size", lambda node: node.found and len(node.found.value), Kind.SIZE),
    Column("CREATED", "ctime", lambda node: (node.found and node.found.ctime_ms) or None, Kind.TIME),
    key="path",
)
TREE_TABLE_COLUMNS = Columns(Column("NODE", "path", _branch), *TREE_COLUMNS.columns[1:], key="path")


@command(app, "tree", connects=True)
def tree(
    run: Run,
    depth: Annotated[int | None, count_option("--depth", "Levels below the start.")],
    path: Annotated[str, typer.Argument(help="Where to start (default: the root).", metavar="PATH")] = "",
) -> None:
    """List the nodes of the metadata store below a path."""
    from bkctl.metadata.admin.overview import walk

    columns = TREE_TABLE_COLUMNS if run.output is Output.TABLE else TREE_COLUMNS
    with run.cluster() as cluster, run.working("Reading the tree"):
        run.render(walk(cluster.store, path.strip("/"), depth=depth), columns)


UNDONE_COLUMNS = Columns(
    Column("NODE", "path", "path"),
    Column("OUTCOME", "outcome", "outcome", style={"restored": GREEN, "changed": RED}),
    Column("SIZE BEFORE", "sizeBefore", "size_bytes", Kind.SIZE),
    key="path",
)


@command(app, "undo", connects=True, asks=True, changes=True)
def undo(
    run: Run,
    file: Annotated[Path, typer.Argument(help="The undo file that a command left.", metavar="FILE")],
    dry_run: DryRun = False,
) -> None:
    """Put back what a command changed, the last change first, as the undo file tells that it left.

    A node that somebody changed since is left alone, and the exit code is 3 then.
    """
    from bkctl.metadata.admin.undo import undo as put_back

    with run.cluster() as cluster:
        if not dry_run:
            run.confirm(f"What {file} tells of in {cluster.uri} would be put back as it was")
        changed = 0
        with run.rows(UNDONE_COLUMNS) as writer:
            for each in put_back(cluster, file, dry_run=dry_run):
                changed += each.outcome == "changed"
                writer.row(each)
    run.finish_with(changed, "nodes changed since, and are left as they are")


# --- export and import ----------------------------------------------------------------------------------------------

EXPORTED_COLUMNS = Columns(
    Column("FILE", "file", "file"),
    Column("INSTANCE ID", "instanceId", "instance_id"),
    Column("LEDGERS", "ledgerCount", lambda row: row.exported.counts["ledger"], Kind.INTEGER),
    Column("COOKIES", "cookieCount", lambda row: row.exported.counts["cookie"], Kind.INTEGER),
    Column("UNDERREPLICATED", "markCount", lambda row: row.exported.counts["mark"], Kind.INTEGER),
    Column("SIZE", "size", "exported.size_bytes", Kind.SIZE),
    Column("SHA-256", "sha256", "exported.sha256"),
    key="file",
)


class ExportRow(NamedTuple):
    """An export that was written."""

    file: str
    instance_id: str
    exported: Exported


@command(app, "export", connects=True)
def export(
    run: Run,
    ledgers: LedgersOfExport,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="Where to; - is stdout. Holds ledger passwords.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write a cluster's metadata to a file: ledgers of all scopes, cookies, under-replicated marks, switches.

    With ledgers named, their metadata only. The file is ndjson and ends with its SHA-256; 'metadata import' reads it.
    """
    import sys

    from bkctl.metadata.admin.dump import ClusterSource, export_to_file, write_export

    if file is None:
        raise UsageError("No file is named", hint="add -f FILE, or -f - for stdout")
    with run.cluster() as cluster, run.working("Exporting") as activity:
        source = ClusterSource(cluster, ledgers or None)
        if file == "-":
            if run.output is not Output.TABLE:
                raise UsageError("-o has no meaning for an export to stdout")
            write_export(source, sys.stdout.buffer, activity.update)
            sys.stdout.buffer.flush()
            return
        exported = export_to_file(source, Path(file), overwrite=overwrite, progress=activity.update)
    run.show(ExportRow(file, source.header.instance_id, exported), EXPORTED_COLUMNS)


class ImportRow(NamedTuple):
    """What became of the records of one kind."""

    kind: str
    created: int
    replaced: int
    same: int


IMPORTED_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    Column("CREATED", "created", "created", Kind.INTEGER),
    Column("REPLACED", "replaced", "replaced", Kind.INTEGER),
    Column("THERE ALREADY", "same", "same", Kind.INTEGER),
    key="kind",
)

#: Kinds of records but how far the ids got, which is no node of its own.
_SHOWN_KINDS = ("node", "cookie", "mark", "ledger")

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what is there with another value; it goes to the undo file.")
]


def _show_planned(run: Run, counts: Counter[str]) -> None:
    run.render((ImportRow(kind, counts[kind], 0, 0) for kind in _SHOWN_KINDS), IMPORTED_COLUMNS)


def _show_imported(run: Run, imported: Imported) -> None:
    run.render(
        (
            ImportRow(kind, imported.created[kind], imported.replaced[kind], imported.same[kind])
            for kind in _SHOWN_KINDS
        ),
        IMPORTED_COLUMNS,
    )


def _say_conflicts(run: Run, imported: Imported) -> None:
    for name in imported.conflicts[:_NAMES_SHOWN_MAX]:
        run.note(f"{name} is there with another value, and was left so")


def _note_ids(run: Run, imported: Imported) -> None:
    if imported.unskipped_position is not None:
        run.note(
            f"Ids below {imported.unskipped_position:,} may be generated again there: ledgers that were deleted, and "
            "whose entries bookies still hold, could get a namesake"
        )


@command(app, "import", connects=True, changes=True, asks=True)
def import_(
    run: Run,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE", help="What 'metadata export' wrote; - is stdin.")
    ] = None,
    overwrite: Overwrite = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Bring an export back: into an empty store, as the cluster it was, or what is missing into that cluster.

    The file's hash is checked first. What is there with the same value is passed over, so that a second run finishes
    what was stopped. Exit code 5 where something is there with another value, which --overwrite replaces.
    """
    from bkctl.metadata.admin.dump import ExportFile, import_records, prepare_target
    from bkctl.metadata.uri import parse_uri

    if file is None:
        raise UsageError("No file is named", hint="add -f FILE, or -f - for stdin")
    with _import_file(file) as path, ExportFile(path) as source:
        with run.working("Checking the export") as activity:
            counts = source.check(activity.update)
        if overwrite and not dry_run:
            place = parse_uri(run.connection().uri).text
            run.confirm(f"What is in {place} would be replaced by what {file} has")
        with ExitStack() as stack:
            try:
                target = stack.enter_context(run.open_cluster(create_store=not dry_run))
                is_new = prepare_target(target, source.header, dry_run=dry_run)
            except NotFound:
                if not dry_run:
                    raise
                is_new = True  # no SQLite file yet
            if is_new and dry_run:
                _show_planned(run, counts)
                return
            total = counts.total()
            with run.undo(target, undo) as record, run.working("Importing", total=total) as activity:
                imported = import_records(
                    source.records(), target, overwrite=overwrite, dry_run=dry_run,
                    record_change=record.record if overwrite else lambda *_: None, progress=activity.update,
                )  # fmt: skip
    _show_imported(run, imported)
    _note_ids(run, imported)
    if imported.conflicts:
        _say_conflicts(run, imported)
        raise Conflict(
            f"{len(imported.conflicts):,} records are there with another value", hint="--overwrite replaces them"
        )


@contextmanager
def _import_file(file: str) -> Iterator[Path]:
    """The file to read; stdin is kept in one, since it is read twice."""
    if file != "-":
        yield Path(file)
        return
    import shutil
    import sys
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(prefix="bkctl-import-") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield Path(kept.name)


# --- two stores -----------------------------------------------------------------------------------------------------

DIFFERENCE_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    Column("KEY", "key", lambda row: str(row.ledger) if row.ledger is not None else row.key),
    Column("WHAT", "what", "what", style={"differs": YELLOW, "onlyInFirst": RED, "onlyInSecond": GREEN}),
    Column("FIELDS", "fields", lambda row: list(row.fields), Kind.NESTED, text=", ".join),
    Column(None, "ledgerQualifiedName", lambda row: row.ledger and row.ledger.qualified_name),
    key="key",
)

_SOURCE_HELP = "A metadata URI, context:NAME, or a file that 'metadata export' wrote."


@command(app, "diff", connects=True)
def diff(
    run: Run,
    first: Annotated[str, typer.Argument(metavar="FIRST", help=_SOURCE_HELP)],
    second: Annotated[
        str | None, typer.Argument(metavar="SECOND", help=f"{_SOURCE_HELP} Default: the connection's cluster.")
    ] = None,
) -> None:
    """Compare the metadata of two stores or exports, byte for byte; exit code 3 when they differ.

    The login in --metadata-… options is that of the connection's servers, and goes to no others: name a store that
    wants another login as context:NAME.
    """
    from bkctl.metadata.admin.dump import ClusterSource, compare, compare_headers, open_source

    found: Counter[str] = Counter()
    with ExitStack() as stack:
        sources: list[MetadataSource] = []
        for text in (first, second):
            if text is None:
                sources.append(ClusterSource(stack.enter_context(run.cluster())))
                continue
            source, cluster = open_source(text, run.open_other_cluster)
            if cluster is not None:
                stack.enter_context(cluster)
            sources.append(stack.enter_context(source))
        left, right = sources
        if left.header.instance_id != right.header.instance_id:
            run.note(f"They are two clusters: {left.header.instance_id} and {right.header.instance_id}")
        with run.working("Comparing") as activity, run.rows(DIFFERENCE_COLUMNS) as writer:
            differences = compare(left.records(), right.records(), progress=activity.update)
            for difference in chain(compare_headers(left.header, right.header), differences):
                found[difference.what] += 1
                writer.row(difference)
    run.finish_with(found.total(), "differences" if found.total() > 1 else "difference")


@command(app, "migrate", connects=True, changes=True, asks=True)
def migrate(
    run: Run,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="URI", help="The store to copy to: zk+…://, etcd://, sqlite:///FILE, or context:NAME."
        ),
    ] = None,
    login: LoginOfTarget,
    overwrite: Overwrite = False,
    live: Annotated[
        bool, typer.Option("--live", help="Also while bookies are registered: what changes meanwhile is reported.")
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Copy a cluster's metadata into another store, as the same cluster, and compare both; the first stays as it is.

    A second run finishes what was stopped. Refused while bookies are registered on either side, since their clients
    would go on to change the first store. Exit code 3 when the two differ in the end.
    """
    from bkctl.metadata.admin.dump import ClusterSource, compare, import_records, prepare_target

    if to is None:
        raise UsageError("No target is named", hint="add --to URI")
    with run.cluster() as source_cluster, ExitStack() as stack:
        source = ClusterSource(source_cluster)
        try:
            target = stack.enter_context(run.open_other_cluster(to, login=login, create_store=not dry_run))
        except NotFound:
            if not dry_run:
                raise
            _refuse_registered(source_cluster, live)
            _show_planned(run, _counted(run, source))  # no SQLite file yet
            return
        if source_cluster.uri == target.uri:
            raise UsageError(f"{target.uri} is the store itself")
        is_new = prepare_target(target, source.header, dry_run=True)
        for cluster in (source_cluster,) if is_new else (source_cluster, target):
            _refuse_registered(cluster, live)
        if dry_run and is_new:
            _show_planned(run, _counted(run, source))
            return
        if overwrite and not dry_run and not is_new:
            run.confirm(f"What is in {target.uri} would be replaced by what {source_cluster.uri} has")
        prepare_target(target, source.header, dry_run=dry_run)
        with run.undo(target, undo, elsewhere=True) as record, run.working("Copying") as activity:
            imported = import_records(
                source.records(), target, overwrite=overwrite, dry_run=dry_run,
                record_change=record.record if overwrite else lambda *_: None, progress=activity.update,
            )  # fmt: skip
        differences = 0
        if not dry_run:
            with run.working("Comparing") as activity:
                for difference in compare(source.records(), ClusterSource(target).records(), progress=activity.update):
                    differences += 1
                    if differences <= _NAMES_SHOWN_MAX:
                        name = difference.key if difference.ledger is None else str(difference.ledger)
                        run.note(f"{difference.kind} {name}: {_WHERE[difference.what]}")
    _show_imported(run, imported)
    _note_ids(run, imported)
    run.finish_with(differences, f"differences between {source_cluster.uri} and {target.uri}")


def _refuse_registered(cluster: Cluster, live: bool) -> None:
    registered = cluster.bookies.list(include_down=False)
    if registered and not live:
        raise Conflict(
            f"{len(registered):,} bookies are registered in {cluster.uri}",
            hint="stop them first, or copy with --live and run it again once they are stopped",
        )


def _counted(run: Run, source: ClusterSource) -> Counter[str]:
    with run.working("Counting"):
        return Counter(record.kind for record in source.records())


_WHERE = {
    "onlyInFirst": "is not in the target",
    "onlyInSecond": "is only in the target",
    "differs": "differs; --overwrite replaces it",
}
_NAMES_SHOWN_MAX = 10


# --- check ----------------------------------------------------------------------------------------------------------

FINDING_COLUMNS = Columns(
    Column("CODE", "code", "code", style={"unparsable": RED, "impossible": RED, "dangling": YELLOW}),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODE", "path", "path"),
    Column("WHAT", "message", "message", flexible=True),
    key="path",
)


@command(app, "check", connects=True)
def check(run: Run, scope: ScopeOfAny) -> None:
    """Look at all metadata for what cannot be read, points to nothing or cannot be; exit code 3 with findings.

    Ledgers with damaged or impossible metadata, or on bookies that nobody knows; cookies, marks, layout, scopes.
    """
    from bkctl.metadata.admin.check import check_metadata

    count = 0
    with (
        run.cluster() as cluster,
        run.working("Checking metadata") as activity,
        run.rows(FINDING_COLUMNS) as writer,
    ):
        for finding in check_metadata(cluster, scope, progress=activity.update):
            count += 1
            writer.row(finding)
    if not count:
        run.note("Nothing is wrong with the metadata")
    run.finish_with(count, "findings" if count > 1 else "finding")


ORPHAN_COLUMNS = Columns(
    Column("CODE", "code", "code"),
    Column("NODE", "path", "path"),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODES", "nodeCount", "node_count", Kind.INTEGER),
    Column("REMOVABLE", "removable", "removable", Kind.BOOLEAN),
    Column("WHAT", "message", "message", flexible=True),
    key="path",
)


@command(app, "orphans", connects=True, changes="delete", asks=True)
def orphans(
    run: Run,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove those that nobody misses (REMOVABLE), after asking.")
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """List nodes that belong to nothing: marks of deleted ledgers, scopes of a formatted cluster, unused cookies.

    Exit code 3 when there are any.
    """
    from bkctl.metadata.admin.check import orphans as find
    from bkctl.metadata.admin.check import remove_orphan

    with run.cluster() as cluster:
        with run.working("Looking for orphans"):
            found = list(find(cluster))
        run.render(found, ORPHAN_COLUMNS)
        if not found:
            run.note("Nothing is orphaned")
        removable = [each for each in found if each.removable]
        if not delete or dry_run or not removable:
            run.finish_with(len(found), "orphans" if len(found) > 1 else "orphan")
            return
        node_count = sum(each.node_count for each in removable)
        run.confirm(f"{node_count:,} nodes would be removed from {cluster.uri}")
        with run.undo(cluster, undo) as record, run.working("Removing"):
            for each in removable:
                remove_orphan(cluster, each, record.record)
    run.note(f"{len(removable):,} of {len(found):,} orphans were removed")
    run.finish_with(len(found) - len(removable), "orphans are left, to be looked at first")


# --- scopes and ids -------------------------------------------------------------------------------------------------


class ScopeRow(NamedTuple):
    """A scope and its ledgers."""

    scope_id: int
    ledger_count: int


SCOPE_COLUMNS = Columns(
    Column("SCOPE", "ledgerScopeId", lambda row: str(row.scope_id)),
    Column("HEX", "ledgerScopeIdHex", lambda row: f"{row.scope_id:016x}"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    key="ledgerScopeId",
)


@command(app, "scopes", connects=True)
def scopes(run: Run) -> None:
    """List the ledger scopes and how many ledgers each has; scope 0 is there always."""

    def rows() -> Iterator[ScopeRow]:
        scope_id = count = 0
        for ledger in cluster.ledgers.ledgers(None):
            if ledger.scope_id != scope_id:
                yield ScopeRow(scope_id, count)
                scope_id, count = ledger.scope_id, 0
            count += 1
        yield ScopeRow(scope_id, count)

    with run.cluster() as cluster, run.working("Counting ledgers"):
        if cluster.ledgers.scopes_state() == "foreign":
            run.note(
                "The scopes tree belongs to a cluster that was formatted away, and is left out; 'metadata orphans'"
            )
        run.render(rows(), SCOPE_COLUMNS)


class NewId(NamedTuple):
    """An id that was generated."""

    ledger: LedgerId


NEW_ID_COLUMNS = Columns(Column("LEDGER", "ledger", "ledger", Kind.LEDGER), key="ledger")


@command(app, "idgen", connects=True, changes="sequence")
def idgen(
    run: Run,
    count: Annotated[int | None, count_option("--count", "How many ids (default 1).")],
    scope_id: Annotated[
        str | None, typer.Option("--ledger-scope-id", metavar="SCOPE", help="Random ids of this scope.")
    ] = None,
    sequence: Annotated[
        bool,
        typer.Option("--sequence", help="Take them from the cluster's own generator of scope 0; they are used up."),
    ] = False,
) -> None:
    """Print new ledger ids: UUIDs (the high half is the scope), random ones of a scope, or the cluster's next.

    Only --sequence needs a cluster.
    """
    from bkctl.ids import parse_scope_id, random_u64

    if sequence and scope_id is not None and parse_scope_id(scope_id) != 0:
        raise UsageError("--sequence is for scope 0; in other scopes ids are random")
    if not sequence:
        import uuid

        scope = None if scope_id is None else parse_scope_id(scope_id)
        if scope == 0:
            raise UsageError("Ids of scope 0 come from the cluster's generator", hint="add --sequence")

        def random_ids() -> Iterator[NewId]:
            for _ in range(count or 1):
                value = uuid.uuid4().int if scope is None else scope << 64 | random_u64()
                yield NewId(LedgerId.from_value(value))

        run.render(random_ids(), NEW_ID_COLUMNS)
        return
    with run.cluster() as cluster:
        run.render((NewId(cluster.ledgers.new_ledger_id()) for _ in range(count or 1)), NEW_ID_COLUMNS)


# --- another bookie -------------------------------------------------------------------------------------------------

REPLACEMENT_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
    Column("PROBLEM", "problem", "problem", flexible=True),
    key="ledger",
)


@command(app, "replace-bookie", connects=True, changes=True, asks=True)
def replace_bookie(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Change at most so many ledgers.")],
    old: Annotated[str | None, typer.Option("--from", metavar="BOOKIE", help="The bookie id to replace.")] = None,
    new: Annotated[
        str | None, typer.Option("--to", metavar="BOOKIE", help="The bookie id to put in its place.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Change at most so many ledgers a second.")
    ] = None,
    undo: UndoOption = None,
    dry_run: DryRun = False,
) -> None:
    """Replace a bookie id in the metadata of every ledger of every scope; the entries themselves are not moved.

    For a bookie that comes back under another id with all its data. Refused while the old id is registered, or where
    nobody knows the new one. Exit code 3 when ledgers are left.
    """
    from bkctl.ids import check_bookie_id
    from bkctl.metadata.admin.check import replace_bookie as replace

    if old is None or new is None:
        raise UsageError("--from BOOKIE and --to BOOKIE are needed")
    if check_bookie_id(old) == check_bookie_id(new):
        raise UsageError("--from and --to are the same bookie")
    if rate is not None and rate <= 0:
        raise UsageError(f"--rate {rate:g}: must be more than 0")
    problems = changed = 0
    with run.cluster() as cluster:
        registered = cluster.bookies.get(old)
        if registered is not None and registered.state != "down":
            raise Conflict(f"Bookie {old} is registered: its clients go on to write to it", hint="stop it first")
        if cluster.bookies.get(new) is None:
            raise NotFound(f"No bookie {new} in {cluster.store.name}", hint="'bkctl bookies list' shows them")
        if not dry_run:
            run.confirm(f"{old} would become {new} in the metadata of all ledgers of {cluster.uri}")
        with (
            run.undo(cluster, undo) as record,
            run.working("Replacing") as activity,
            run.rows(REPLACEMENT_COLUMNS) as writer,
        ):
            for each in replace(
                cluster, old, new, record=record.record, per_second=rate, limit=limit, dry_run=dry_run,
                progress=activity.update,
            ):  # fmt: skip
                problems += each.problem is not None
                changed += each.problem is None
                writer.row(each)
    run.note(f"{changed:,} ledgers {'would be' if dry_run else 'were'} changed")
    run.finish_with(problems, "ledgers are left as they were")
