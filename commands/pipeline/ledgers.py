"""The commands of `bkctl pipeline` that write: facts of bookies, exports of ledgers, and ledgers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import AlreadyExists, NotFound, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import fields
from ..kit.command import Run, command, group, rows_of
from ..kit.ledger_options import AnyLedgers, scope_option
from ..kit.options import Composite, combined, duration_option, flag, option, word
from ..kit.texts import GREEN, RED, YELLOW, counted
from ..ledger.listing import parse_states
from .common import PLACES, SparkOptions, bookies_at, check_cluster, connection_options, ledger_of, spark_job
from .saves import ROW_FORMS, SaveRows, Saves, check_saves, frame_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from bkctl.metadata.cluster import Cluster
    from bkctl.spark.facts.extraction import ExtractCounts
    from bkctl.spark.facts.facts_store import FactsStore

app = group()

EXTRACT_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    *fields(Kind.INTEGER, logCount="LOGS", readLogCount="READ", recordCount="RECORDS", damageCount="DAMAGED"),
    key="bookieId",
)


@command(app, "extract", connects=True, prints=rows_of(EXTRACT_COLUMNS))
def extract(
    run: Run,
    *,
    places: Annotated[list[str] | None, PLACES] = None,
    uri: Annotated[str, word("URI", "Where facts go: a directory, file://, s3://, hdfs:// or gs://.")],
    full: Annotated[bool, flag("--full", "Read logs again that were extracted before.")] = False,
    keep: Annotated[
        float, duration_option("--keep", "Keep superseded files this long, for jobs that read them.", default="1h")
    ],
) -> None:
    """Write the contents of bookies' files as facts for jobs.

    Runs on each bookie's host, without Spark, and writes Parquet tables: records with their digests, indexes, journals
    and what a restart replays, ledgers by log, cookies and last marks. The other jobs read them with --facts. An entry
    log is read once; later runs read only logs that grew or are new, journals and indexes. Readers see a run's result
    once it is complete. HMAC digests need the cluster (--conf names it): without one, records with HMAC or DUMMY
    digests are copied whole.

    $ bkctl pipeline extract --conf bk_server.conf /mnt/facts
    $ bkctl pipeline extract /bookies/0 s3://bucket/facts
    """
    from bkctl.spark.facts.facts_store import FactsStore

    store = FactsStore(uri)  # It says what is not installed.
    bookies = bookies_at(run, places)
    is_named = run.access.names_metadata or run.access.conf is not None or not places
    cluster = run.cluster if is_named else None
    run.out.render(_extracted(run, bookies, store, cluster, full, timedelta(seconds=keep)), EXTRACT_COLUMNS)


def _extracted(
    run: Run, bookies: Iterable[Any], store: FactsStore, cluster: Cluster | None, full: bool, keep: timedelta
) -> Iterator[ExtractCounts]:
    from bkctl.spark.facts.extraction import extract

    for bookie in bookies:
        with run.job.working(f"Reading logs of {bookie.bookie_id}", unit="logs") as activity:
            yield extract(bookie, store, cluster, full=full, keep=keep, progress=activity.update)


def _sizes(*sizes: int | None) -> dict[str, str]:
    names = ("ensembleSize", "writeQuorumSize", "ackQuorumSize")
    return {name: str(size) for name, size in zip(names, sizes, strict=True) if size is not None}


def _size(flag: str, help: str) -> Composite:
    return option(f"{flag} N", f"{help} (default: as the source's).", int)


#: Sizes of new ledgers in place of their sources', as options of the jobs.
NewSizes = Annotated[
    dict[str, str],
    combined(
        _sizes,
        _size("--ensemble-size", "Bookies that a fragment is spread over"),
        _size("--write-quorum", "Bookies that get each entry"),
        _size("--ack-quorum", "Bookies that must have an entry before it counts"),
    ),
]

EXPORT_COLUMNS = Columns(
    Column("LEDGER", "ledger", ledger_of, Kind.LEDGER),
    Column("STATE", "state", "state", style={"CLOSED": GREEN, "OPEN": YELLOW, "IN_RECOVERY": RED}),
    Column("LAST ENTRY", "lastEntryId", "lastEntryId", Kind.INTEGER),
    Column("ENTRIES", "entryCount", "entryCount", Kind.INTEGER),
    Column("SIZE", "size", "size", Kind.SIZE),
    key="ledger",
)
COPY_COLUMNS = Columns(
    Column("LEDGER", "ledger", ledger_of, Kind.LEDGER),
    Column("SOURCE", "source", "source", text=lambda name: str(LedgerId.parse(name))),
    Column(
        "STATE", "state", "state",
        style={"copied": GREEN, "present": GREEN, "planned": YELLOW, "open": YELLOW, "failed": RED},
    ),
    Column("ENTRIES", "entryCount", "entryCount", Kind.INTEGER),
    Column("LENGTH", "length", "length", Kind.SIZE),
    *fields(Kind.TEXT, sha256=None, message="MESSAGE"),
    key="ledger",
)  # fmt: skip


@command(app, "export", connects=True, prints=rows_of(EXPORT_COLUMNS))
def export(
    run: Run,
    path: Annotated[str, word("PATH", "Directory to create: a local path, or a URI that Spark writes to.")],
    which: AnyLedgers,
    spark: SparkOptions,
    saves: SaveRows,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an existing export.")] = False,
    flat: Annotated[
        bool, flag("--flat", "Do not create a directory for each scope (default with more than 1,000 scopes).")
    ] = False,
    state: Annotated[list[str] | None, flag("--state STATE", "OPEN, IN_RECOVERY or CLOSED; repeatable.")] = None,
    since: Annotated[
        str | None,
        flag(
            "--since PATH",
            "Leave out closed ledgers that a former export has; 'PATH/*' stands for all complete ones there.",
        ),
    ] = None,
) -> None:
    """Export the payloads of ledgers to Parquet.

    Exports the named ledgers, the ledgers of --ledger-scope-id, or all, partitioned by scope. Entries are read from the
    bookies and checked. Ledgers are not fenced or recovered; one that is not closed is exported up to its last add
    confirmed. Passwords are neither needed nor exported. At the end the entries in the files are counted and compared
    with the metadata (exit code 7 if they differ). Ledgers that are deleted meanwhile are left out, unless they are
    named. --since exports what is new since former exports: ledgers that they lack, or have not closed, or that were
    created again.

    $ bkctl pipeline export ledgers.export 12 13
    $ bkctl pipeline export s3a://lake/day2 --since 's3a://lake/*' --state CLOSED
    """
    check_saves(saves, EXPORT_COLUMNS, ROW_FORMS)
    states = parse_states(state, "--state")
    options = connection_options(run)
    if which.ledgers:
        options["ledger"] = ",".join(ledger.qualified_name for ledger in which.ledgers)
    elif which.scope_id is not None:
        options["ledgerScopeId"] = str(which.scope_id)
    check_cluster(run)
    if not overwrite and "://" not in path and Path(path).exists():
        raise AlreadyExists(f"{path} exists", hint="choose another directory, or add --overwrite")
    with spark_job(run, spark, "export", saves, EXPORT_COLUMNS) as session:
        from bkctl.spark.jobs.copying import export_ledgers, former_exports

        former = [] if since is None else former_exports(session, _place(since), _place(path))
        if since is not None:
            run.out.note(f"Closed ledgers of {counted(len(former), 'former export')} are left out")
        rows = export_ledgers(
            session, _place(path), options, overwrite=overwrite, by_scope=not flat, states=states, since=former
        )
        frame_rows(run, rows, EXPORT_COLUMNS, saves)


@command(app, "import", connects=True, dry_run=True, prints=rows_of(COPY_COLUMNS))
def import_(
    run: Run,
    path: Annotated[str, word("PATH", "A directory that 'pipeline export' created.")],
    to_scope_id: Annotated[
        int | None,
        scope_option(
            "Create the ledgers in this scope, under their ledger ids (default: the scope of each).", "--to-scope"
        ),
    ],
    sizes: NewSizes,
    spark: SparkOptions,
    saves: SaveRows,
    password_file: Annotated[
        Path | None,
        flag(
            "--password-file FILE",
            "File with the password of the new ledgers (else BKCTL_LEDGER_PASSWORD, else empty).",
        ),
    ] = None,
) -> None:
    """Create the ledgers of an export.

    They keep their ids, or move to another scope. Each ledger is read back and compared. Run an interrupted import
    again to finish it: intact ledgers that this command created are skipped (present). Exit code 3: some ledgers were
    not created (failed).

    $ bkctl pipeline import ledgers.export --to-scope 7
    """
    check_saves(saves, COPY_COLUMNS, ROW_FORMS)
    options = {**connection_options(run), **sizes}
    if password_file is not None:
        options["ledgerPasswordFile"] = str(password_file.absolute())
    elif "BKCTL_LEDGER_PASSWORD" in os.environ:
        options["ledgerPasswordEnv"] = "BKCTL_LEDGER_PASSWORD"
    check_cluster(run)
    if "://" not in path and not Path(path, "counts", "_SUCCESS").exists():
        raise NotFound(f"{path} is not a complete export", hint="create one with 'bkctl pipeline export'")
    with spark_job(run, spark, "import", saves, COPY_COLUMNS) as session:
        from bkctl.spark.jobs.copying import import_ledgers

        rows = import_ledgers(session, _place(path), options, to_scope_id=to_scope_id, dry_run=run.dry_run)
        _show_copies(run, rows, saves)


@command(app, "migrate-scope", connects=True, dry_run=True, prints=rows_of(COPY_COLUMNS))
def migrate_scope(
    run: Run,
    which: AnyLedgers,
    to_scope_id: Annotated[int | None, scope_option("The scope to copy into; the ledger ids stay.", "--to-scope")],
    sizes: NewSizes,
    spark: SparkOptions,
    saves: SaveRows,
) -> None:
    """Copy ledgers to another scope, under the same ids.

    Copies the named ledgers, or all ledgers of --ledger-scope-id. Each copy has its source's password, shape and custom
    metadata, and is read back and compared. The sources stay. Run an interrupted migration again to finish it: verified
    copies are skipped (present). Exit code 3: some ledgers were not copied (failed), or are not closed (open; 'ledger
    recover' closes one).

    $ bkctl pipeline migrate-scope 12 --to-scope 7
    """
    check_saves(saves, COPY_COLUMNS, ROW_FORMS)
    if to_scope_id is None:
        raise UsageError("No scope to copy into is given", hint="add --to-scope SCOPE")
    if not which.ledgers and which.scope_id is None:
        raise UsageError("No ledgers to copy are given", hint="name ledgers, or add --ledger-scope-id SCOPE")
    options = {**connection_options(run), **sizes}
    check_cluster(run)
    with spark_job(run, spark, "migrate-scope", saves, COPY_COLUMNS) as session:
        from bkctl.spark.jobs.copying import migrate_scope as migrate

        ledgers, scope_id = which.ledgers or (), which.scope_id
        rows = migrate(session, options, to_scope_id, from_scope_id=scope_id, ledgers=ledgers, dry_run=run.dry_run)
        _show_copies(run, rows, saves)


def _show_copies(run: Run, rows: DataFrame, saves: Saves) -> None:
    states = Counter[str]()
    frame_rows(run, rows, COPY_COLUMNS, saves, lambda row: states.update((row.state,)))
    run.out.finish_with(states["open"] + states["failed"], "ledger was not copied", "ledgers were not copied")


def _place(path: str) -> str:
    """Return the path as a URI or absolute, since tasks run elsewhere."""
    return path if "://" in path else str(Path(path).absolute())
