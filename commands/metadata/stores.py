"""`bkctl metadata diff` and `bkctl metadata migrate`."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import Conflict, NotFound, UsageError

from ..kit.access import LoginOfTarget
from ..kit.command import Access, LongWork, Printer, Run, command, group, rows_of
from ..kit.options import DryRun, RecordPace, UndoOption
from ..kit.texts import GREEN, RED, YELLOW, counted
from .export import IMPORTED_COLUMNS, NAMES_SHOWN_MAX, Overwrite, note_layout, show_imported

if TYPE_CHECKING:
    from bkctl.metadata.admin.dump.export_file import DumpSource
    from bkctl.metadata.admin.dump.sources import ClusterSource
    from bkctl.metadata.cluster import Cluster
    from bkctl.pace import Pace

app = group()


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
    app, "diff", connects=True, examples=("bkctl metadata diff cluster.ndjson",), prints=rows_of(DIFFERENCE_COLUMNS)
)
def diff(
    out: Printer,
    access: Access,
    job: LongWork,
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
        left, right = _open(access, stack, first), _open(access, stack, second)
        if left.header.instance_id != right.header.instance_id:
            out.note(f"Different clusters: {left.header.instance_id} and {right.header.instance_id}")
        with job.working("Comparing", unit="records", pace=pace) as activity:
            differences = compare(left.records(), right.records(), progress=activity.step)
            rows = chain(compare_headers(left.header, right.header), differences)
            count = out.render(rows, DIFFERENCE_COLUMNS, findings=True)
    if not count:
        out.note("No differences")
    out.finish_with(count, "difference", "differences")


def _open(access: Access, stack: ExitStack, text: str | None) -> DumpSource:
    """Return the store or export that `text` names (None: the connection's cluster); `stack` closes it."""
    from bkctl.metadata.admin.dump.sources import ClusterSource, open_source

    if text is None:
        return ClusterSource(stack.enter_context(access.cluster()))
    source, cluster = open_source(text, access.open_other_cluster)
    if cluster is not None:
        stack.enter_context(cluster)
    return stack.enter_context(source)


@command(
    app,
    "migrate",
    connects=True,
    changes=True,
    asks=True,
    prints=rows_of(IMPORTED_COLUMNS),
    examples=("bkctl metadata migrate --to sqlite:///metadata.db --dry-run",),
)
def migrate(
    run: Run,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URI",
            help="The store to copy to: zk+…://, etcd://, hbase://, sqlite:///FILE, or context:NAME.",
        ),
    ] = None,
    login: LoginOfTarget,
    pace: RecordPace,
    overwrite: Overwrite = False,
    live: Annotated[
        bool,
        typer.Option("--live", help="Copy even while bookies are registered; changes made meanwhile are reported."),
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
    """
    from bkctl.metadata.admin.dump.importing import import_records, prepare_target
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
        with (
            nullcontext(target) if plan.is_new else run.consent.recorded(target, undo, elsewhere=True) as recorded,
            run.job.working(
                "Copying",
                unit="records",
                pace=pace,
                left="copied metadata stays: run the command again to continue",
            ) as activity,
        ):
            imported = import_records(
                source.records(), recorded, overwrite=overwrite, dry_run=dry_run, pace=pace, progress=activity.update
            )
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
