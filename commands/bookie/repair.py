"""The commands of `bkctl bookie` and `bkctl bookie index` that change files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import BkctlError, UsageError

from ..kit.columns import fields
from ..kit.command import Run, command, group, object_of, rows_of
from ..kit.ledger_options import AnyLedgers
from ..kit.options import PASSWORD_FILE, YesReally, combined, flag, ledger_password, option
from ..kit.records import Directories, DirOption
from ..kit.texts import NULL, counted, size_text
from .files import index_app

if TYPE_CHECKING:
    from bkctl.metadata.liveness import StoredLedgers
    from bkctl.repair.index_contents import RepairFindings
    from bkctl.repair.layout import BookieLayout

app = group()


@contextmanager
def _repairing(
    run: Run, layout: BookieLayout, label: str, left: str, size: Callable[[], int] | None = None, unit: str = "bytes"
) -> Iterator[dict[str, Any]]:
    """Hold the bookie's directories for this process, and yield the arguments that say how to repair them.

    A dry run only reads, and holds nothing. Of `size` units the progress is shown.
    """
    if not run.dry_run:
        run.hold(layout.all)
        run.consent.start_audit(begun=True)
    try:
        with run.job.working(label, total=size and size(), unit=unit, left=left) as activity:
            yield {"dry_run": run.dry_run, "progress": activity.advance}
    except OSError as error:
        if run.dry_run or error.filename is not None:
            raise
        where = ", ".join(map(str, layout.index_dirs))
        raise BkctlError(
            f"Writing in {where} failed: {error.strerror or error}", hint="make room, then repeat the command"
        ) from error


def _layout(run: Run, directories: Sequence[Path] | None) -> BookieLayout:
    from bkctl.bookie.cookies import verify_directories
    from bkctl.repair.layout import find_layout

    layout = find_layout(run.access.directories(directories))
    if not directories:
        # A ledger's directory is its id modulo their number: in another order, a repair writes to the wrong one.
        verify_directories(run.access.config(), allow_copy=True)
    return layout


def _stored(run: Run, layout: BookieLayout) -> StoredLedgers | None:
    """Return the ledgers of the metadata store; None unless --metadata-uri or --context names one."""
    from bkctl.metadata.liveness import StoredLedgers

    return StoredLedgers(run.cluster, layout.all) if run.access.names_metadata else None


def _report(run: Run, findings: RepairFindings, stored: StoredLedgers | None) -> None:
    run.out.error(*(() if stored is None else stored.problems))
    run.out.note(*findings.notes)
    run.out.error(*(damage.error for damage in findings.damage))


REBUILT_COLUMNS = Columns(
    Column("DATABASE", "file", lambda row: str(row.path), flexible=True),
    *fields(Kind.INTEGER, logs="LOGS", ledgers="LEDGERS", ledgersBefore="BEFORE", entries="ENTRIES"),
    *fields(Kind.INTEGER, entriesBefore="BEFORE"),
    Column("LEFT OUT", "ledgersLeftOut", "left_out", Kind.INTEGER),
    Column(None, "entriesSaved", "entries_saved", Kind.INTEGER),
    Column(None, "fencesGuessed", "guessed_fences", Kind.INTEGER),
    Column(None, "withoutMasterKey", "without_key", Kind.INTEGER),
    Column("BACKUP", "backup", lambda row: None if row.backup is None else str(row.backup), flexible=True),
    key="file",
)

#: Notes on a rebuilt database, each with the count that it is about.
_GUESSES: Final = (
    ("guessed_fences", "ledger was", "ledgers were", "{} fenced, since the state is unknown"),
    (
        "without_key", "ledger", "ledgers",
        "the master key of {} is unknown; the bookie will accept that of the next writer",
    ),
    ("entries_saved", "entry", "entries", "{} outside the readable part of the logs taken over from the old database"),
)  # fmt: skip


@command(index_app, "rebuild", connects=True, dry_run=True, prints=rows_of(REBUILT_COLUMNS))
def rebuild_databases(
    run: Run,
    ledgers: Annotated[bool, flag("--ledgers", "Rebuild the databases of ledgers.")] = False,
    locations: Annotated[bool, flag("--locations", "Rebuild the databases of entry locations.")] = False,
    directories: Directories = (),
) -> None:
    """Rebuild DbLedgerStorage's databases.

    Reads entry logs and journals, and keeps the old databases as backups. The bookie must be down. Master keys, fences
    and explicit LACs are kept where the old database, the journals or, with --metadata-uri, the metadata have them;
    --metadata-uri also leaves out ledgers that the metadata does not have.

    $ bkctl bookie index rebuild --ledgers --conf bk_server.conf --dry-run
    """
    from bkctl.repair.rebuild import rebuild

    if not (ledgers or locations):
        raise UsageError("Neither --ledgers nor --locations is given", hint="give one of them, or both")
    layout = _layout(run, directories)
    size = partial(layout.size_to_read, log_passes=ledgers + locations, journals=ledgers)
    left = "a database is replaced as a whole or not at all: run the command again"
    with _repairing(run, layout, "Rebuilding", left, size) as how:
        stored = _stored(run, layout)
        done = rebuild(layout, ledgers=ledgers, locations=locations, metadata=stored, **how)
    run.out.render(done.databases, REBUILT_COLUMNS)
    _report(run, done.findings, stored)
    run.out.note(
        *(
            f"{row.path}: {text.format(counted(count, one, many))}"
            for row in done.databases
            for name, one, many, text in _GUESSES
            if (count := getattr(row, name))
        )
    )
    rest = "the records before the damage were used"
    run.out.finish_with(len(done.findings.damage), f"damaged file; {rest}", f"damaged files; {rest}")


REGENERATED_COLUMNS = Columns(
    Column("LEDGER", "ledger", "ledger", Kind.LEDGER),
    *fields(Kind.INTEGER, entries="ENTRIES", entriesBefore="BEFORE", lastEntryId="LAST ENTRY"),
    *fields(Kind.BOOLEAN, fenced="FENCED", fenceGuessed=None),
    Column(None, "entriesSaved", "entries_saved", Kind.INTEGER),
    Column("FILE", "file", lambda row: str(row.path), flexible=True),
    Column("BACKUP", "backup", lambda row: None if row.backup is None else str(row.backup), flexible=True),
    key="ledger",
)


def _password_if_given(text: str | None, file: Path | None) -> bytes | None:
    named = text, file, os.environ.get("BKCTL_LEDGER_PASSWORD")
    return None if all(each is None for each in named) else ledger_password(text, file)


_PASSWORD_HELP = "Password of all these ledgers (also BKCTL_LEDGER_PASSWORD). Visible to other users in ps."
GivenPassword = Annotated[
    bytes | None, combined(_password_if_given, option("--password TEXT", _PASSWORD_HELP), PASSWORD_FILE)
]


@command(index_app, "regenerate", connects=True, dry_run=True, prints=rows_of(REGENERATED_COLUMNS))
def regenerate_files(
    run: Run,
    which: AnyLedgers,
    password: GivenPassword,
    directories: DirOption = None,
    all_ledgers: Annotated[bool, flag("--all", "Every ledger that has an index file, or entries in a log.")] = False,
) -> None:
    """Rebuild index files from entry logs.

    For InterleavedLedgerStorage and SortedLedgerStorage; keeps the old files as backups. The bookie must be down. The
    master key is that of the password given for all ledgers, else each ledger's own, from its old index, the journals
    or, with --metadata-uri, its metadata. Fence and explicit LAC are kept where they are known.

    $ bkctl bookie index regenerate 12 --conf bk_server.conf --dry-run
    """
    from bkctl.files.rocksdb import REBUILD_HINT
    from bkctl.formats.entry import master_key
    from bkctl.repair.regenerate import regenerate

    if (which.ledgers is None) != all_ledgers:
        problem = "--all and ledgers are given" if all_ledgers else "No ledger is given"
        raise UsageError(problem, hint="name ledgers, or add --all")
    if run.access.names_databases:
        raise UsageError(f"{run.access.conf} names DbLedgerStorage, which has no index files", hint=REBUILD_HINT)
    layout = _layout(run, directories)
    key = None if password is None else master_key(password)
    size = partial(layout.size_to_read, log_passes=1 + all_ledgers)
    with _repairing(run, layout, "Regenerating", "run the command again: old files are backups", size) as how:
        stored = _stored(run, layout)
        done = regenerate(layout, which.ledgers, scope_id=which.scope_id, master_key=key, metadata=stored, **how)
    run.out.render(done.indexes, REGENERATED_COLUMNS)
    _report(run, done.findings, stored)
    guessed = sum(row.fence_guessed for row in done.indexes)
    counts = (guessed, "fenced, since the state is unknown"), (len(done.dead), "left unchanged, without metadata")
    run.out.note(*(f"{counted(count, 'ledger was', 'ledgers were')} {text}" for count, text in counts if count))
    if done.without_key:
        some = ", ".join(map(str, done.without_key[:10])) + (" …" if len(done.without_key) > 10 else "")
        run.out.error(f"The master key of {counted(len(done.without_key), 'ledger')} is unknown: {some}")
    run.out.finish_with(
        len(done.findings.damage) + len(done.without_key),
        "damaged file or ledger without a master key", "damaged files or ledgers without a master key",
    )  # fmt: skip


DOWNGRADED_COLUMNS = Columns(
    Column("JOURNAL DIRECTORY", "directory", lambda row: str(row.path.parent), flexible=True),
    Column("VERSION 7", "journalCount", lambda row: len(row.journal_ids), Kind.INTEGER),
    Column(None, "journalIds", "journal_ids", Kind.NESTED),
    Column("TO REPLAY", "recordCount", "record_count", Kind.INTEGER),
    Column("MARK", "lastMarkJournalId", value_at("mark.journal_id"), Kind.INTEGER),
    Column(None, "lastMarkOffset", value_at("mark.offset"), Kind.INTEGER),
    key="directory",
)


@command(app, "downgrade", dry_run=True, prints=rows_of(DOWNGRADED_COLUMNS))
def downgrade_bookie(run: Run, directories: Directories = ()) -> None:
    """Prepare a crashed bookie's files for Apache's bookie.

    The bookie must be down. Moves the entries of its journals into entry logs and indexes, as a clean stop does, and
    journals with scoped records, which Apache's bookie refuses, to `current/scoped`. Apache's bookie then serves the
    ledgers of scope 0 on these directories; ours still serves all scopes. Uses the settings of --conf, or defaults
    with DIR.

    $ bkctl bookie downgrade --conf bk_server.conf --dry-run
    """
    from bkctl.bookie.cookies import verify_directories
    from bkctl.repair.downgrade import config_of, downgrade

    is_given = directories or run.access.conf is None
    config = config_of(run.access.directories(directories)) if is_given else run.access.config()
    if not is_given:
        verify_directories(config)
    with run.job.working("Stopping the bookie cleanly"):
        rows = downgrade(config, dry_run=run.dry_run, note=run.out.note)
    run.out.render(rows, DOWNGRADED_COLUMNS)
    damaged = [row.error for row in rows if row.error is not None and row.mark is None]
    if not damaged and not any(row.journal_ids for row in rows):
        run.out.note("Nothing to do: no journal has scoped records, so Apache's bookie can start")
    if not config.skip_replay_journal_invalid_record:
        run.out.raise_first(damaged[:1])


CONVERTED_COLUMNS = Columns(
    Column("DIRECTORY", "directory", lambda row: str(row.path), flexible=True),
    *fields(Kind.INTEGER, ledgers="LEDGERS", entries="ENTRIES"),
    Column(
        "BACKUPS",
        "backups",
        lambda row: [str(each) for each in row.backups],
        Kind.NESTED,
        text=lambda names: ", ".join(Path(name).name for name in names) or NULL,
        flexible=True,
    ),
    key="directory",
)

IndexKind = StrEnum("IndexKind", "DB INTERLEAVED")


@command(app, "convert", asks=True, dry_run=True, prints=rows_of(CONVERTED_COLUMNS))
def convert_index(
    run: Run,
    to: Annotated[
        IndexKind, flag("--to KIND", "db: DbLedgerStorage; interleaved: index files (Sorted uses them too).")
    ],
    directories: Directories = (),
    discard_old: Annotated[bool, flag("--discard-old", "Remove the old index instead of keeping a backup.")] = False,
) -> None:
    """Convert a bookie's index to another storage class.

    Converts between index files and DbLedgerStorage's databases; entry logs stay unchanged. The bookie must be down.
    The new index is verified entry by entry before it replaces the old one. If the command is killed, run it again to
    continue. Change the bookie's ledgerStorageClass by hand afterwards.

    $ bkctl bookie convert --to db --conf bk_server.conf --dry-run
    """
    from bkctl.repair.convert import convert

    layout = _layout(run, directories)
    if discard_old and not run.dry_run:
        where = ", ".join(map(str, layout.index_dirs))
        run.consent.confirm(f"The old index in {where} would be removed once the new one is verified")
    with _repairing(run, layout, "Converting", "run the command again to continue", unit="entries") as how:
        done = convert(layout, to.value, discard_old=discard_old, **how)
    run.out.render(done.directories, CONVERTED_COLUMNS)
    if done.resumed and done.done:
        run.out.note("The conversion continued where it was killed")
    if done.done:
        name = (
            "storage.ldb.DbLedgerStorage" if to is IndexKind.DB else "SortedLedgerStorage (or InterleavedLedgerStorage)"
        )
        run.out.note(f"Set ledgerStorageClass=org.apache.bookkeeper.bookie.{name} before the bookie starts")


CONTENTS_COLUMNS = Columns(
    Column("DIRECTORY", "directory", lambda row: str(row.path), flexible=True),
    Column("FOR", "roles", lambda row: list(row.roles), Kind.NESTED, text=", ".join),
    Column("FILES", "files", "files", Kind.INTEGER),
    Column("SIZE", "size", "size_bytes", Kind.SIZE),
    *fields(Kind.INTEGER, ledgers="LEDGERS", scopedLedgers="SCOPED"),
    key="directory",
)


@command(app, "format", connects=True, dry_run=True, prints=rows_of(CONTENTS_COLUMNS))
def format_bookie(
    run: Run,
    delete_cookie: Annotated[
        bool, flag("--delete-cookie", "Finally delete the bookie's cookie in the metadata store, too.")
    ] = False,
    yes_really: YesReally = None,
) -> None:
    """Remove all data of a bookie that is down.

    Removes journals, entry logs, indexes and cookies, and prints what is lost. On a terminal, asks for the bookie's id;
    elsewhere --yes-really with that id is required. Ledgers without other replicas are lost for good: run 'bkctl
    bookies recover' first.

    $ bkctl bookie format --conf bk_server.conf --dry-run
    """
    from bkctl.bookie.format import bookie_to_wipe, contents, existing, roles_of, wipe
    from bkctl.disk import Files

    config = run.access.config()
    bookie_id = bookie_to_wipe(config)
    rows = list(contents(config))
    has_store = run.access.names_metadata or config.metadata_service_uri is not None or delete_cookie
    if not has_store:
        run.out.note("No metadata store is named, so the bookie's registration is not checked")
    cluster = run.cluster if has_store else None
    if cluster is not None:
        cluster.bookies.check_not_registered([bookie_id])
    run.hold(existing(roles_of(config)))
    if run.dry_run:
        run.out.render(rows, CONTENTS_COLUMNS)
        return
    loss = _loss(bookie_id, rows)
    if yes_really is None and sys.stderr.isatty():
        run.out.note(
            *(f"{row.path}: {row.files:,} files, {size_text(row.size_bytes)}{_ledgers_text(row)}" for row in rows)
        )
    run.consent.confirm_name(loss, bookie_id, yes_really)
    if cluster is None:
        run.consent.start_audit(begun=True)
    with run.job.working(
        f"Removing the files of bookie {bookie_id}",
        left="without its cookies the bookie cannot start: run the command again to finish",
    ):
        wipe(config, Files())
    if cluster is not None and delete_cookie:
        stored = cluster.cookies.read(bookie_id)
        if stored is not None:
            cluster.cookies.remove(bookie_id, stored.version)
    run.out.render(rows, CONTENTS_COLUMNS)


def _ledgers_text(row: Any) -> str:
    if row.ledgers is None:
        return ", an index that cannot be read"
    scoped = f" and {row.scoped_ledgers:,} scoped ones" if row.scoped_ledgers else ""
    return f", {row.ledgers:,} ledgers{scoped}" if "index" in row.roles else ""


def _loss(bookie_id: str, rows: list[Any]) -> str:
    size = size_text(sum(row.size_bytes for row in rows))
    ledgers = sum((row.ledgers or 0) + (row.scoped_ledgers or 0) for row in rows)
    return f"Bookie {bookie_id} would lose {size} in {counted(ledgers, 'ledger')}"


INIT_COLUMNS = Columns(
    Column("PLACE", "place", "place", flexible=True), Column("PROBLEM", "problem", "problem"), key="place"
)
NEW_BOOKIE_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("JOURNALS", "journalDirs", lambda cookie: list(cookie.journal_dirs), Kind.NESTED),
    Column("LEDGERS", "ledgerDirs", lambda cookie: list(cookie.ledger_dirs), Kind.NESTED),
    Column("INDEXES", "indexDirs", lambda cookie: list(cookie.index_dirs or ()), Kind.NESTED),
    Column("INSTANCE", "instanceId", "instance_id"),
    key="bookieId",
)


@command(
    app, "init", unless="check", undo=True, dry_run=True, prints=rows_of(INIT_COLUMNS) + object_of(NEW_BOOKIE_COLUMNS)
)
def init(
    run: Run,
    check: Annotated[
        bool, flag("--check", "Only report what prevents it: directories with files, a registration, a cookie.")
    ] = False,
) -> None:
    """Create a new bookie: empty directories and a cookie.

    Creates the directories of --conf, and the cookie in them and in the metadata store. The bookie's first start does
    the same. --check (and --dry-run) changes nothing; exit code 3 if something prevents it.

    $ bkctl bookie init --conf bk_server.conf --check
    """
    from bkctl.bookie.cookies import bookie_id_of, configured_cookie, configured_directories
    from bkctl.bookie.format import existing, init, problems_of_init
    from bkctl.disk import Files

    config = run.access.config()
    bookie_id = bookie_id_of(config)
    if check or run.dry_run:
        problems = problems_of_init(config, bookie_id, run.cluster)
        run.out.render(problems, INIT_COLUMNS)
        against = f"against creating bookie {bookie_id}"
        run.out.finish_with(len(problems), f"reason {against}", f"reasons {against}")
        return
    run.hold(existing(configured_directories(config)))
    init(config, bookie_id, run.cluster, Files(), run.undo_file)
    run.out.show(configured_cookie(config, bookie_id, run.cluster.instance_id()), NEW_BOOKIE_COLUMNS)
