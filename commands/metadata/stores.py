"""`bkctl metadata export`, `import`, `diff`, `migrate`, `check` and others that concern all metadata of a cluster."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import BkctlError, Conflict, NotFound, UsageError
from bkctl.ids import LedgerId, check_bookie_id, random_u64
from bkctl.pace import Pace

from ..kit.access import Login
from ..kit.columns import Output, PlainRow, fields, hex_column
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.ledger_options import LedgersOfExport, ScopeOfAny, scope_option
from ..kit.next_steps import next_column
from ..kit.options import RecordPace, count_option, file_argument, flag, pace_option, word
from ..kit.terminal import ClosedOutput, flush
from ..kit.texts import GREEN, RED, YELLOW, counted
from ..kit.values import tap

if TYPE_CHECKING:
    from bkctl.metadata.admin.dump.importing import ImportSummary, TargetPlan
    from bkctl.metadata.admin.dump.sources import ClusterSource, DumpHeader, DumpSource
    from bkctl.metadata.cluster import Cluster

app = group()

EXPORTED_COLUMNS = Columns(
    *fields(Kind.TEXT, file="FILE", instanceId="INSTANCE ID"),
    Column("LEDGERS", "ledgerCount", lambda row: row.exported.counts["ledger"], Kind.INTEGER),
    Column("COOKIES", "cookieCount", lambda row: row.exported.counts["cookie"], Kind.INTEGER),
    Column("UNDERREPLICATED", "markCount", lambda row: row.exported.counts["mark"], Kind.INTEGER),
    Column("SIZE", "size", "exported.size_bytes", Kind.SIZE),
    Column("SHA-256", "sha256", "exported.sha256"),
    key="file",
)


@command(app, "export", connects=True, prints=object_of(EXPORTED_COLUMNS))
def export(
    run: Run,
    ledgers: LedgersOfExport,
    pace: RecordPace,
    file: Annotated[
        str | None, flag("--file -f FILE", "The file to write; - is stdout. It holds ledger passwords.")
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace FILE if it exists.")] = False,
) -> None:
    """Export a cluster's metadata to a file.

    The file has the ledgers of all scopes, cookies, under-replicated marks, switches, times of audits, mutes, and the
    racks of bookies (Pulsar's node `/bookies`); if ledgers are named, their metadata only. The file is ndjson and ends
    with its SHA-256; 'metadata import' reads it. It holds ledger passwords. Exit code 3 if ledgers are left out, as
    after a loss of INSTANCEID, or racks that the store refuses.

    $ bkctl metadata export -f cluster.ndjson
    """
    from bkctl.metadata.admin.dump.sources import ClusterSource, export_to_file, write_export

    if file is None:
        raise UsageError("No file is named", hint="add -f FILE, or -f - for stdout")
    with run.job.working("Exporting", unit="records", pace=pace) as activity:
        source = ClusterSource(run.cluster, ledgers or None)
        if file == "-":
            if run.out.given_output is not Output.TABLE:
                raise UsageError("-o does not apply to an export to stdout")
            run.out.end_with_stdout()
            try:
                write_export(source, run.out.raw, activity.step)
                flush()
            except ClosedOutput as error:
                raise BkctlError("The export is incomplete: the reader of stdout is gone") from error
        else:
            exported = export_to_file(source, Path(file), overwrite=overwrite, progress=activity.step)
    if file != "-":
        run.out.show(PlainRow(file=file, instance_id=source.header.instance_id, exported=exported), EXPORTED_COLUMNS)
    _finish_complete(run, source)


def _note_left_out(run: Run, source: ClusterSource) -> int:
    """Say what is not copied; return the number of parts."""
    left_out = source.left_out()
    run.out.error(*left_out)
    return len(left_out)


def _finish_complete(run: Run, source: ClusterSource) -> None:
    """End with exit code 3 if something was left out."""
    run.out.finish_with(_note_left_out(run, source), "part of the metadata is left out", "parts of it are left out")


IMPORTED_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    *fields(Kind.INTEGER, created="CREATED", replaced="REPLACED", same="THERE ALREADY"),
    key="kind",
)
NAMES_SHOWN_MAX = 10
#: Kinds of records but how far the ids got, which has no node of its own.
_SHOWN_KINDS = ("node", "cookie", "mark", "ledger")
Overwrite = Annotated[
    bool, flag("--overwrite", "Replace records that have another value; the undo file keeps the old ones.")
]


def show_imported(run: Run, imported: ImportSummary) -> None:
    """Print the counts of imported records by kind."""
    counts = {name: getattr(imported, name) for name in ("created", "replaced", "same")}
    rows = (PlainRow(kind=kind, **{name: count[kind] for name, count in counts.items()}) for kind in _SHOWN_KINDS)
    run.out.render(rows, IMPORTED_COLUMNS)
    if imported.unskipped_position is not None:
        run.out.note(
            f"Ids below {imported.unskipped_position:,} may be generated again there, also for deleted ledgers whose "
            "entries bookies still hold"
        )


def note_plan(run: Run, header: DumpHeader, plan: TargetPlan) -> None:
    """Say that the target has another ledger manager than the source, or no instance id."""
    from bkctl.formats.metadata import LedgerLayout

    if plan.lacks_id:
        written = "would be" if run.dry_run else "is"
        run.out.note(f"Its instance id is lost; {header.instance_id}, which its cookies name, {written} written")
    if header.layout is None:
        return
    names = [each.factory_class.rpartition(".")[2] for each in (LedgerLayout.parse(header.layout), plan.layout)]
    if names[0] != names[1]:
        run.out.note(f"The layout of ledgers changes from {names[0]} to {names[1]}")


@command(app, "import", asks=True, undo=True, dry_run=True, prints=rows_of(IMPORTED_COLUMNS))
def import_(
    run: Run,
    path: Annotated[Path, file_argument("The file that 'metadata export' wrote; - is stdin.")],
    pace: RecordPace,
    overwrite: Overwrite = False,
) -> None:
    """Import an export into an empty store or its own cluster.

    Creates the cluster in an empty store, with the ledger manager of the store's URI (zk://: that of the export), or
    adds what is missing in that cluster. Checks the file's hash first, and that the store can hold every ledger id.
    Records that exist with the same value are skipped, so a second run finishes an interrupted one. Exit code 5 if a
    record exists with another value; --overwrite replaces it. Created nodes have a new creation time: the age of a
    ledger (--min-age) begins again unless its metadata has the time.

    $ bkctl metadata import cluster.ndjson --dry-run
    """
    from bkctl.metadata.admin.dump.importing import ImportSummary, prepare_target
    from bkctl.metadata.admin.dump.sources import ExportFile
    from bkctl.metadata.uri import parse_uri

    with _import_file(path) as kept, ExportFile(kept) as source:
        with run.job.working("Checking the export", unit="records") as activity:
            counts = source.check(activity.update)
        if overwrite and not run.dry_run:
            place = parse_uri(run.access.connection().uri).text
            run.consent.confirm(f"Metadata in {place} would be replaced with that in {path}")
        try:
            target = run.opened.enter_context(run.access.cluster(create_store=not run.dry_run))
            plan = prepare_target(target, source, dry_run=run.dry_run)
            note_plan(run, source.header, plan)
            is_new = plan.is_new
        except NotFound:
            if not run.dry_run:
                raise
            is_new = True  # no SQLite file yet
        if is_new and run.dry_run:
            show_imported(run, ImportSummary(counts))
            return
        overwrite = overwrite and not is_new  # Racks beside a new root may be another cluster's.
        recorded = target if is_new else run.record(target).recorded()
        imported = _fill(
            run, "Importing", recorded, source, counts.total(), pace, overwrite=overwrite, dry_run=run.dry_run
        )
    show_imported(run, imported)
    if imported.conflicts:
        shown = imported.conflicts[:NAMES_SHOWN_MAX]
        run.out.error(*(f"{name} exists with another value, and was left unchanged" for name in shown))
        raise Conflict(
            f"{counted(len(imported.conflicts), 'record exists', 'records exist')} with another value",
            hint="--overwrite replaces them",
        )


def _fill(
    run: Run, label: str, target: Cluster, source: DumpSource, total: int | None, pace: Pace, **how: bool
) -> ImportSummary:
    """Import the records of `source`: `total`, if that is known."""
    from bkctl.metadata.admin.dump.importing import import_records

    left = "written metadata stays: run the command again to continue"
    with run.job.working(label, total=total, unit="records", pace=pace, left=left) as activity:
        return import_records(source.records(), target, pace=pace, progress=activity.update, **how)


@contextmanager
def _import_file(path: Path) -> Iterator[Path]:
    """Yield the file to read; stdin is kept in one, since it is read twice."""
    if str(path) != "-":
        yield path
        return
    import shutil
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(prefix="bkctl-import-") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield Path(kept.name)


DIFFERENCE_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    Column("KEY", "key", lambda row: str(row.ledger) if row.ledger is not None else row.key),
    Column("WHAT", "what", "what", style={"differs": YELLOW, "onlyInFirst": RED, "onlyInSecond": GREEN}),
    Column("FIELDS", "fields", lambda row: list(row.fields), Kind.NESTED, text=", ".join),
    Column(None, "ledgerQualifiedName", lambda row: row.ledger and row.ledger.qualified_name),
    key="key",
)
_SOURCE_HELP = "A metadata URI, context:NAME, or a file that 'metadata export' wrote."


@command(app, "diff", connects=True, prints=rows_of(DIFFERENCE_COLUMNS))
def diff(
    run: Run,
    first: Annotated[str, word("FIRST", _SOURCE_HELP)],
    pace: RecordPace,
    second: Annotated[str | None, word("SECOND", f"{_SOURCE_HELP} Default: the connection's cluster.")] = None,
) -> None:
    """Compare the metadata of two stores or exports.

    Compares byte for byte; exit code 3 if they differ. The login in --metadata-… options is sent only to the
    connection's servers: name a store with another login as context:NAME.

    $ bkctl metadata diff cluster.ndjson
    """
    from bkctl.metadata.admin.dump.sources import compare, compare_headers

    left, right = _open(run, first), _open(run, second)
    if left.header.instance_id != right.header.instance_id:
        run.out.note(f"Different clusters: {left.header.instance_id} and {right.header.instance_id}")
    with run.job.working("Comparing", unit="records", pace=pace) as activity:
        differences = compare(left.records(), right.records(), progress=activity.step)
        rows = chain(compare_headers(left.header, right.header), differences)
        count = run.out.render(rows, DIFFERENCE_COLUMNS, findings=True)
    if not count:
        run.out.note("No differences")
    run.out.finish_with(count, "difference")


def _open(run: Run, text: str | None) -> DumpSource:
    """Return the store or export that `text` names (None: the connection's cluster), open until the command ends."""
    from bkctl.metadata.admin.dump.sources import ClusterSource, open_source

    if text is None:
        return ClusterSource(run.cluster)
    source, cluster = open_source(text, run.access.open_other_cluster)
    if cluster is not None:
        run.opened.enter_context(cluster)
    return run.opened.enter_context(source)


@command(app, "migrate", asks=True, undo=True, dry_run=True, prints=rows_of(IMPORTED_COLUMNS))
def migrate(
    run: Run,
    *,
    to: Annotated[
        str | None,
        flag("--to URI", "The store to copy to: zk+…://, etcd://, hbase://, sqlite:///FILE, or context:NAME."),
    ] = None,
    login: Login,
    pace: RecordPace,
    overwrite: Overwrite = False,
    live: Annotated[
        bool, flag("--live", "Copy even while bookies are registered; changes made meanwhile are reported.")
    ] = False,
) -> None:
    """Copy a cluster's metadata into another store.

    The copy is the same cluster. Its ledger manager is the target URI's (zk+flat://, zk+hierarchical://,
    zk+longhierarchical://), or for zk:// the source's; refused if the target cannot hold every ledger id.
    Compares both stores at the end; exit code 3 if they differ. The first store stays unchanged. A second run finishes
    an interrupted one. Refused while bookies are registered on either side, since their clients would continue to
    change the first store. Copied nodes have a new creation time: the age of a ledger (--min-age) begins again unless
    its metadata has the time.

    $ bkctl metadata migrate --to sqlite:///metadata.db --dry-run
    """
    from bkctl.metadata.admin.dump.importing import prepare_target
    from bkctl.metadata.admin.dump.sources import ClusterSource

    if to is None:
        raise UsageError("No target is named", hint="add --to URI")
    source = ClusterSource(run.cluster)
    try:
        target = run.opened.enter_context(run.access.open_other_cluster(to, login=login, create_store=not run.dry_run))
    except NotFound:
        if not run.dry_run:
            raise
        _refuse_registered(live, run.cluster)
        _show_planned(run, source)  # no SQLite file yet
        return
    if run.cluster.identity == target.identity:
        raise UsageError(f"{target.uri} is the same store", hint="name another root: a layout changes by a copy")
    plan = prepare_target(target, source, dry_run=True)
    _refuse_registered(live, *((run.cluster,) if plan.is_new else (run.cluster, target)))
    note_plan(run, source.header, plan)
    if run.dry_run and plan.is_new:
        _show_planned(run, source)
        return
    if overwrite and not run.dry_run and not plan.is_new:
        run.consent.confirm(f"Metadata in {target.uri} would be replaced with that in {run.cluster.uri}")
    prepare_target(target, source, dry_run=run.dry_run)
    overwrite = overwrite and not plan.is_new
    recorded = target if plan.is_new else run.record(target, elsewhere=True).recorded()
    imported = _fill(run, "Copying", recorded, source, None, pace, overwrite=overwrite, dry_run=run.dry_run)
    differing = imported.conflicts if run.dry_run else []
    run.out.error(*(f"{name}: {_WHERE['differs']}" for name in differing[:NAMES_SHOWN_MAX]))
    differences = len(differing) if run.dry_run else _note_differences(run, source, ClusterSource(target), pace)
    show_imported(run, imported)
    differences += _note_left_out(run, source)
    between = f"between {run.cluster.uri} and {target.uri}"
    run.out.finish_with(differences, f"difference {between}", f"differences {between}")


def _note_differences(run: Run, source: ClusterSource, target: ClusterSource, pace: Pace) -> int:
    """Compare both stores and print the first differences; return the number of all."""
    from bkctl.metadata.admin.dump.sources import compare

    count = 0
    with run.job.working("Comparing", unit="records", pace=pace) as activity:
        for difference in compare(source.records(), target.records(), progress=activity.step):
            count += 1
            if count <= NAMES_SHOWN_MAX:
                name = difference.key if difference.ledger is None else str(difference.ledger)
                run.out.error(f"{difference.kind} {name}: {_WHERE[difference.what]}")
    return count


def _refuse_registered(live: bool, *clusters: Cluster) -> None:
    for cluster in () if live else clusters:
        if registered := cluster.bookies.list(include_down=False):
            raise Conflict(
                f"{counted(len(registered), 'bookie is', 'bookies are')} registered in {cluster.uri}",
                hint="stop them first, or copy with --live and run it again once they are stopped",
            )


def _show_planned(run: Run, source: ClusterSource) -> None:
    from bkctl.metadata.admin.dump.importing import ImportSummary

    with run.job.working("Counting"):
        counts = Counter(record.kind for record in source.records())
    show_imported(run, ImportSummary(counts))
    _finish_complete(run, source)


_WHERE = {
    "onlyInFirst": "is not in the target",
    "onlyInSecond": "is only in the target",
    "differs": "differs; --overwrite replaces it",
}

_CODE_STYLE = {"unparsable": RED, "refused": RED, "impossible": RED, "dangling": YELLOW, "misplaced": YELLOW}
FINDING_COLUMNS = Columns(
    Column("CODE", "code", "code", style=_CODE_STYLE),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.TEXT, path="NODE", message="WHAT"),
    next_column("metadata check", lambda row: row.code, path=lambda row: row.path, ledger=lambda row: row.ledger),
    key="path",
)


@command(app, "check", connects=True, prints=rows_of(FINDING_COLUMNS))
def check(run: Run, scope: ScopeOfAny, pace: RecordPace) -> None:
    """Find metadata that is unreadable, dangling or impossible.

    Checks ledgers, also for bookies that do not exist; cookies, marks, layout and scopes. Where bookies have racks,
    finds ensembles that the placement policy of --conf does not accept. Exit code 3 if there are findings.

    $ bkctl metadata check
    """
    from bkctl.client.ledger_survey import misplacement
    from bkctl.metadata.admin.check import check_metadata

    from ..bookies.members import find_placement

    placement = find_placement(run, run.cluster.bookies.list())
    with run.job.working("Checking metadata", unit="ledgers", pace=pace) as activity:
        found = check_metadata(run.cluster, scope, partial(misplacement, placement), progress=activity.step)
        count = run.out.render(found, FINDING_COLUMNS, findings=True)
    if not count:
        run.out.note("The metadata is sound")
    run.out.finish_with(count)


ORPHAN_COLUMNS = Columns(
    *fields(Kind.TEXT, code="CODE", path="NODE"),
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("NODES", "nodeCount", "node_count", Kind.INTEGER),
    Column("REMOVABLE", "removable", "removable", Kind.BOOLEAN),
    Column("WHAT", "message", "message"),
    key="path",
)


@command(app, "orphans", asks=True, changes="delete", undo=True, dry_run=True, prints=rows_of(ORPHAN_COLUMNS))
def list_orphans(
    run: Run, delete: Annotated[bool, flag("--delete", "Remove the orphans that are REMOVABLE, after asking.")] = False
) -> None:
    """List nodes that belong to nothing, or remove them.

    Orphans are marks of deleted ledgers, scopes of a formatted cluster, and unused cookies. Exit code 3 if there are
    any.

    $ bkctl metadata orphans
    $ bkctl metadata orphans --delete --dry-run
    """
    from bkctl.metadata.admin.check import orphans, remove_orphans

    with run.job.working("Looking for orphans"):
        found = list(orphans(run.cluster))
    run.out.render(found, ORPHAN_COLUMNS, findings=True)
    if not found:
        run.out.note("No orphans")
    removable = [each for each in found if each.removable]
    if not delete or run.dry_run or not removable:
        run.out.finish_with(len(found), "orphan")
        return
    node_count = sum(each.node_count for each in removable)
    run.consent.confirm(f"{counted(node_count, 'node')} would be removed from {run.cluster.uri}")
    with run.job.working("Removing", left="removed nodes stay removed: run the command again to continue"):
        count = remove_orphans(run.recorded, removable)
    run.out.note(f"{count:,} of {len(found):,} orphans were removed")
    run.out.finish_with(
        len(found) - len(removable), "orphan remains; check it first", "orphans remain; check them first"
    )


SCOPE_COLUMNS = Columns(
    Column("SCOPE", "ledgerScopeId", lambda row: str(row.scope_id)),
    hex_column("ledgerScopeIdHex", lambda row: f"{row.scope_id:016x}"),
    Column("LEDGERS", "ledgerCount", "ledger_count", Kind.INTEGER),
    key="ledgerScopeId",
)


@command(app, "scopes", connects=True, prints=rows_of(SCOPE_COLUMNS))
def scopes(run: Run) -> None:
    """List the ledger scopes, with the number of ledgers.

    Scope 0 is always listed.

    $ bkctl metadata scopes
    """
    from bkctl.metadata.admin.overview import scope_counts

    with run.job.working("Counting ledgers"):
        if run.cluster.ledgers.scopes_state() == "foreign":
            run.out.note("The scopes tree of a formatted cluster is left out; 'metadata orphans' lists it")
        run.out.render(scope_counts(run.cluster), SCOPE_COLUMNS)


NEW_ID_COLUMNS = Columns(Column("LEDGER", "ledger", lambda ledger: ledger, Kind.LEDGER), key="ledger")


@command(app, "idgen", connects=True, changes="sequence", prints=rows_of(NEW_ID_COLUMNS))
def idgen(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Number of ids (default 1).", "--count")],
    scope: Annotated[int | None, scope_option("Random ids of this scope.")],
    sequence: Annotated[
        bool, flag("--sequence", "Take ids of scope 0 from the cluster's generator, which gives no id twice.")
    ] = False,
) -> None:
    """Print new ledger ids.

    Without options, prints UUIDs, whose high half is the scope. --ledger-scope-id prints random ids of one scope.
    --sequence takes ids from the cluster's generator; only that needs a cluster.

    $ bkctl metadata idgen --limit 3
    $ bkctl metadata idgen --ledger-scope-id 7
    """
    if sequence and scope:
        raise UsageError("--sequence applies to scope 0; ids of other scopes are random")
    if not sequence:
        if scope == 0:
            raise UsageError("Ids of scope 0 come from the cluster's generator", hint="add --sequence")
        ids = (LedgerId.random() if scope is None else LedgerId(scope, random_u64()) for _ in range(limit or 1))
        run.out.render(ids, NEW_ID_COLUMNS)
        return
    run.out.render((run.cluster.ledgers.new_ledger_id() for _ in range(limit or 1)), NEW_ID_COLUMNS)


REPLACEMENT_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    Column("FRAGMENTS", "fragmentCount", "fragment_count", Kind.INTEGER),
    Column("PROBLEM", "problem", "problem"),
    key="ledger",
)


@command(app, "replace-bookie", asks=True, undo=True, dry_run=True, prints=rows_of(REPLACEMENT_COLUMNS))
def replace_bookie_id(
    run: Run,
    limit: Annotated[int | None, count_option("--limit", "Change at most N ledgers.")],
    pace: Annotated[Pace, pace_option("Change at most N ledgers per second.", has_bytes=False)],
    old: Annotated[str | None, flag("--from BOOKIE", "The bookie id to replace.")] = None,
    new: Annotated[str | None, flag("--to BOOKIE", "The new bookie id.")] = None,
) -> None:
    """Replace a bookie id in the metadata of every ledger.

    For a bookie that returns under another id with all its data; entries are not moved. Covers every scope. Refused
    while the old id is registered, or if the new id does not exist. Exit code 3 if ledgers keep the old id, also for
    --limit.

    $ bkctl metadata replace-bookie --from b1:3181 --to b2:3181 --dry-run
    """
    from bkctl.metadata.admin.ledger_changes import replace_bookie

    if old is None or new is None:
        raise UsageError("--from BOOKIE and --to BOOKIE are required")
    if check_bookie_id(old) == check_bookie_id(new):
        raise UsageError("--from and --to are the same bookie")
    kept = Counter[bool]()
    registered = run.cluster.bookies.get(old)
    if registered is not None and registered.state != "down":
        raise Conflict(f"Bookie {old} is registered: its clients still write to it", hint="stop it first")
    run.bookie(new)  # It must exist.
    if not run.dry_run:
        run.consent.confirm(f"{old} would become {new} in the metadata of all ledgers of {run.cluster.uri}")
    left = "changed ledgers stay changed: run the command again to continue"
    with (
        run.job.working("Replacing", unit="ledgers", pace=pace, left=left) as activity,
        run.out.rows(REPLACEMENT_COLUMNS) as writer,
    ):
        replaced = replace_bookie(
            run.recorded, old, new, pace=pace, limit=limit, dry_run=run.dry_run, progress=activity.update
        )
        writer.rows(tap(replaced, lambda row: kept.update((row.problem is not None,))))
    if registered is None and not kept:
        raise NotFound(f"No bookie {old}, and no ledger names it", hint="'bkctl bookies list' shows them")
    run.out.note(f"{kept[False]:,} ledgers {'would be' if run.dry_run else 'were'} changed")
    run.out.finish_with(kept[True], "ledger was left unchanged", "ledgers were left unchanged")
