"""`bkctl metadata export`, `import`, `diff` and `migrate`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import Conflict, NotFound, UsageError

from ..kit.access import LoginOfTarget
from ..kit.columns import Output, PlainRow
from ..kit.command import Access, Run, command, group, object_of, rows_of
from ..kit.ledger_options import LedgersOfExport
from ..kit.options import DryRun, RecordPace, UndoOption, file_argument, flag
from ..kit.texts import GREEN, RED, YELLOW, counted

if TYPE_CHECKING:
    from bkctl.metadata.admin.dump.importing import ImportSummary, TargetPlan
    from bkctl.metadata.admin.dump.sources import ClusterSource, DumpHeader, DumpSource
    from bkctl.metadata.cluster import Cluster
    from bkctl.pace import Pace

app = group()

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


@command(app, "export", connects=True, prints=object_of(EXPORTED_COLUMNS))
def export(
    run: Run,
    ledgers: LedgersOfExport,
    pace: RecordPace,
    file: Annotated[
        str | None, flag("--file FILE", "The file to write; - is stdout. It holds ledger passwords.", "-f")
    ] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace FILE if it exists.")] = False,
) -> None:
    """Export a cluster's metadata to a file.

    The file has the ledgers of all scopes, cookies, under-replicated marks and switches; if ledgers are named, their
    metadata only. The file is ndjson and ends with its SHA-256; 'metadata import' reads it. It holds ledger passwords.

    $ bkctl metadata export -f cluster.ndjson
    """
    from bkctl.metadata.admin.dump.sources import ClusterSource, export_to_file, write_export

    if file is None:
        raise UsageError("No file is named", hint="add -f FILE, or -f - for stdout")
    with run.access.cluster() as cluster, run.job.working("Exporting", unit="records", pace=pace) as activity:
        source = ClusterSource(cluster, ledgers or None)
        if file == "-":
            if run.out.given_output is not Output.TABLE:
                raise UsageError("-o does not apply to an export to stdout")
            write_export(source, run.out.raw, activity.step)
            return
        exported = export_to_file(source, Path(file), overwrite=overwrite, progress=activity.step)
    run.out.show(PlainRow(file=file, instance_id=source.header.instance_id, exported=exported), EXPORTED_COLUMNS)


IMPORTED_COLUMNS = Columns(
    Column("KIND", "kind", "kind"),
    Column("CREATED", "created", "created", Kind.INTEGER),
    Column("REPLACED", "replaced", "replaced", Kind.INTEGER),
    Column("THERE ALREADY", "same", "same", Kind.INTEGER),
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


def note_layout(run: Run, header: DumpHeader, plan: TargetPlan) -> None:
    """Say that the target has another ledger manager than the source."""
    from bkctl.formats.metadata import LedgerLayout

    if header.layout is None:
        return
    names = [each.factory_class.rpartition(".")[2] for each in (LedgerLayout.parse(header.layout), plan.layout)]
    if names[0] != names[1]:
        run.out.note(f"The layout of ledgers changes from {names[0]} to {names[1]}")


@command(app, "import", connects=True, asks=True, changes=True, prints=rows_of(IMPORTED_COLUMNS))
def import_(
    run: Run,
    path: Annotated[Path, file_argument("The file that 'metadata export' wrote; - is stdin.")],
    pace: RecordPace,
    overwrite: Overwrite = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
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
        if overwrite and not dry_run:
            place = parse_uri(run.access.connection().uri).text
            run.consent.confirm(f"Metadata in {place} would be replaced with that in {path}")
        with ExitStack() as stack:
            try:
                target = stack.enter_context(run.access.cluster(create_store=not dry_run))
                plan = prepare_target(target, source, dry_run=dry_run)
                note_layout(run, source.header, plan)
                is_new = plan.is_new
            except NotFound:
                if not dry_run:
                    raise
                is_new = True  # no SQLite file yet
            if is_new and dry_run:
                show_imported(run, ImportSummary(counts))
                return
            recorded = nullcontext(target) if is_new else run.consent.recorded(target, undo)
            imported = _fill(
                run, "Importing", recorded, source, counts.total(), pace, overwrite=overwrite, dry_run=dry_run
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
    run: Run, label: str, recorded: AbstractContextManager[Cluster], source: DumpSource, total: int | None, pace: Pace,
    **how: bool,
) -> ImportSummary:  # fmt: skip
    """Import the records of `source`: `total`, if that is known."""
    from bkctl.metadata.admin.dump.importing import import_records

    left = "written metadata stays: run the command again to continue"
    with recorded as target, run.job.working(label, total=total, unit="records", pace=pace, left=left) as activity:
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


@command(
    app, "diff", connects=True, prints=rows_of(DIFFERENCE_COLUMNS), examples=("bkctl metadata diff cluster.ndjson",)
)
def diff(
    run: Run,
    first: Annotated[str, typer.Argument(metavar="FIRST", help=_SOURCE_HELP)],
    pace: RecordPace,
    second: Annotated[
        str | None, typer.Argument(metavar="SECOND", help=f"{_SOURCE_HELP} Default: the connection's cluster.")
    ] = None,
) -> None:
    """Compare the metadata of two stores or exports.

    Compares byte for byte; exit code 3 if they differ. The login in --metadata-… options is sent only to the
    connection's servers: name a store with another login as context:NAME.
    """
    from bkctl.metadata.admin.dump.sources import compare, compare_headers

    with ExitStack() as stack:
        left, right = _open(run.access, stack, first), _open(run.access, stack, second)
        if left.header.instance_id != right.header.instance_id:
            run.out.note(f"Different clusters: {left.header.instance_id} and {right.header.instance_id}")
        with run.job.working("Comparing", unit="records", pace=pace) as activity:
            differences = compare(left.records(), right.records(), progress=activity.step)
            rows = chain(compare_headers(left.header, right.header), differences)
            count = run.out.render(rows, DIFFERENCE_COLUMNS, findings=True)
    if not count:
        run.out.note("No differences")
    run.out.finish_with(count, "difference", "differences")


def _open(access: Access, stack: ExitStack, text: str | None) -> DumpSource:
    """Return the store or export that `text` names (None: the connection's cluster); `stack` closes it."""
    from bkctl.metadata.admin.dump.sources import ClusterSource, open_source

    if text is None:
        return ClusterSource(stack.enter_context(access.cluster()))
    source, cluster = open_source(text, access.open_other_cluster)
    if cluster is not None:
        stack.enter_context(cluster)
    return stack.enter_context(source)


@command(app, "migrate", connects=True, asks=True, changes=True, prints=rows_of(IMPORTED_COLUMNS))
def migrate(
    run: Run,
    *,
    to: Annotated[
        str | None,
        flag("--to URI", "The store to copy to: zk+…://, etcd://, hbase://, sqlite:///FILE, or context:NAME."),
    ] = None,
    login: LoginOfTarget,
    pace: RecordPace,
    overwrite: Overwrite = False,
    live: Annotated[
        bool, flag("--live", "Copy even while bookies are registered; changes made meanwhile are reported.")
    ] = False,
    undo: UndoOption = None,
    dry_run: DryRun = False,
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
    with run.access.cluster() as source_cluster, ExitStack() as stack:
        source = ClusterSource(source_cluster)
        try:
            target = stack.enter_context(run.access.open_other_cluster(to, login=login, create_store=not dry_run))
        except NotFound:
            if not dry_run:
                raise
            _refuse_registered(live, source_cluster)
            _show_planned(run, source)  # no SQLite file yet
            return
        if source_cluster.identity == target.identity:
            raise UsageError(f"{target.uri} is the same store", hint="name another root: a layout changes by a copy")
        plan = prepare_target(target, source, dry_run=True)
        _refuse_registered(live, *((source_cluster,) if plan.is_new else (source_cluster, target)))
        note_layout(run, source.header, plan)
        if dry_run and plan.is_new:
            _show_planned(run, source)
            return
        if overwrite and not dry_run and not plan.is_new:
            run.consent.confirm(f"Metadata in {target.uri} would be replaced with that in {source_cluster.uri}")
        prepare_target(target, source, dry_run=dry_run)
        recorded = nullcontext(target) if plan.is_new else run.consent.recorded(target, undo, elsewhere=True)
        imported = _fill(run, "Copying", recorded, source, None, pace, overwrite=overwrite, dry_run=dry_run)
        differences = 0 if dry_run else _note_differences(run, source, ClusterSource(target), pace)
    show_imported(run, imported)
    between = f"between {source_cluster.uri} and {target.uri}"
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


_WHERE = {
    "onlyInFirst": "is not in the target",
    "onlyInSecond": "is only in the target",
    "differs": "differs; --overwrite replaces it",
}
