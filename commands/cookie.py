"""`bkctl cookie`: the bookies' cookies, in the metadata store and in their directories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from bkctl.columns import Column, Columns, Kind, value_at
from bkctl.errors import AlreadyExists, BkctlError, Conflict, NotFound, UsageError
from bkctl.ids import check_bookie_id

from .kit.columns import PlainRow, fields
from .kit.command import Access, Run, command, group, object_of, rows_of
from .kit.next_steps import next_column
from .kit.options import BinaryFormat, BinaryFormatOption, Composite, file_argument, flag, option, word
from .kit.records import DirOption
from .kit.texts import RED, counted
from .kit.values import read_bounded

if TYPE_CHECKING:
    from bkctl.formats.metadata import Cookie
    from bkctl.metadata.cluster import Cluster
    from bkctl.metadata.store import Versioned

app = group()

BookieArgument = Annotated[str, word("BOOKIE", "The bookie's id.")]
BookieOrConf = Annotated[str | None, word("BOOKIE", "The bookie's id (default: the one of --conf).")]
FileArgument = Annotated[Path, file_argument("The cookie, as 'cookie generate' writes it.")]


def _row(
    bookie_id: str | None, found: Cookie | BkctlError, *, place: str | None = None, version: int | None = None
) -> PlainRow:
    """Return a cookie, or the problem with it, and its place: a directory, or None for the metadata store."""
    error = str(found) if isinstance(found, BkctlError) else None
    return PlainRow(bookie_id=bookie_id, place=place, cookie=None if error else found, version=version, error=error)


COOKIE_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("DIRECTORY", "directory", "place", optional=True),
    Column("JOURNALS", "journalDirs", value_at("cookie.journal_dirs"), Kind.NESTED, flexible=True),
    Column("LEDGERS", "ledgerDirs", value_at("cookie.ledger_dirs"), Kind.NESTED, flexible=True),
    Column("INDEXES", "indexDirs", value_at("cookie.index_dirs"), Kind.NESTED, flexible=True),
    Column("INSTANCE ID", "instanceId", value_at("cookie.instance_id")),
    Column("LAYOUT", "layoutVersion", value_at("cookie.layout_version"), Kind.INTEGER),
    Column("VERSION", "version", "version", Kind.INTEGER, optional=True),
    Column("PROBLEM", "error", "error", optional=True),
    key="bookieId",
)
LIST_COLUMNS = Columns(
    COOKIE_COLUMNS.columns[0], *COOKIE_COLUMNS.columns[2:], key="bookieId", none="No bookie has a cookie"
)


@command(app, "list", connects=True, prints=rows_of(LIST_COLUMNS))
def list_cookies(run: Run) -> None:
    """List the cookies in the metadata store.

    A cookie that cannot be read is a row with the problem (exit code 3).

    $ bkctl cookie list
    """
    found = (_stored_row(run.cluster, bookie_id) for bookie_id in run.cluster.cookies.list())
    rows = [row for row in found if row is not None]
    run.out.render(rows, LIST_COLUMNS)
    run.out.finish_with(sum(row.error is not None for row in rows), "cookie cannot be read", "cookies cannot be read")


def _stored_row(cluster: Cluster, bookie_id: str) -> PlainRow | None:
    """Return a bookie's cookie in the store, or the problem with it; None without one. Raises Unreachable."""
    from bkctl.metadata.store import attempt

    found = attempt(cluster.cookies.read, bookie_id)
    if isinstance(found, BkctlError):
        return _row(bookie_id, found)
    return None if found is None else _row(bookie_id, found.value, version=found.version)


@command(app, "show", connects=True, prints=object_of(COOKIE_COLUMNS) + rows_of(COOKIE_COLUMNS))
def show(
    run: Run,
    bookie: Annotated[str | None, word("BOOKIE", "The bookie's id.")] = None,
    dir: DirOption = None,
    format: BinaryFormatOption = None,
) -> None:
    """Show a bookie's cookie.

    Reads it from the metadata store, or with --dir from directories. --format raw writes the cookie's bytes and nothing
    else.

    $ bkctl cookie show 10.0.0.1:3181
    $ bkctl cookie show --dir /var/lib/bookkeeper
    """
    from bkctl.formats.metadata import Cookie

    if (bookie is None) == (not dir):
        given = "BOOKIE and --dir are given" if dir else "A bookie id or --dir is needed"
        raise UsageError(given, hint="give one of them")
    if format not in (None, BinaryFormat.RAW):
        raise UsageError(f"--format {format.value}: only raw is supported", hint="leave it out to print the fields")
    found: list[tuple[str | None, bytes, int | None, str]]
    if bookie is None:
        found = [(str(each), read_bounded(each, "a cookie"), None, str(each)) for each in _version_files(dir)]
    else:
        node = _stored_node(run.cluster, bookie)
        found = [(None, node.value, node.version, f"cookie of {bookie} in {run.cluster.store.name}")]
    if format is not None:
        run.out.raw(b"".join(data for _, data, _, _ in found))
        return
    cookies = [(place, Cookie.parse(data, where), version) for place, data, version, where in found]
    rows = [_row(bookie or each.bookie_id, each, place=place, version=version) for place, each, version in cookies]
    if len(rows) == 1:
        run.out.show(rows[0], COOKIE_COLUMNS)
    else:
        run.out.render(rows, COOKIE_COLUMNS)


def _stored_node(cluster: Cluster, bookie_id: str) -> Versioned[bytes]:
    """Return the node of a bookie's cookie. Raises NotFound."""
    from bkctl.metadata.cluster import cookie_path

    found = cluster.store.get(cookie_path(bookie_id))
    if found is None:
        raise NotFound(
            f"Bookie {bookie_id} has no cookie in {cluster.store.name}", hint="'bkctl cookie list' shows them"
        )
    return found


def _version_files(directories: list[Path] | None) -> list[Path]:
    """Return the cookies' files that `--dir` names: as files, or as BookieDirectories.at takes directories."""
    from bkctl.bookie.cookies import version_file
    from bkctl.files.directories import bookie_directories
    from bkctl.formats.names import COOKIE_NAME

    found: list[Path] = []
    for directory in directories or ():
        if directory.name == COOKIE_NAME or directory.is_file():
            found.append(directory)
        elif directory.name == "current":
            found.append(directory / COOKIE_NAME)
        else:
            found += (version_file(str(each)) for each in bookie_directories(directory))
    return found


#: For a cookie that is to be stored.
_RENAME: Final = "such a bookie could not start; 'bkctl cookie rename' changes an id"


def _cookie_in(path: Path, *bookies: str, hint: str = _RENAME) -> tuple[bytes, Cookie]:
    """Return bytes of a cookie file, and the cookie. Raises UsageError if it is of none of the bookies."""
    from bkctl.formats.metadata import Cookie

    data = read_bounded(path, "a cookie")
    cookie = Cookie.parse(data, str(path))
    if cookie.bookie_id not in bookies:
        raise UsageError(f"{path} is the cookie of bookie {cookie.bookie_id}, not of {', '.join(bookies)}", hint=hint)
    return data, cookie


@command(app, "create", undo=True, dry_run=True, prints=object_of(COOKIE_COLUMNS))
def create(run: Run, bookie: BookieArgument, file: FileArgument) -> None:
    """Add a cookie to the metadata store.

    The file's bytes are stored unchanged. Exit code 5 if the bookie has a cookie already.

    $ bkctl cookie create 10.0.0.1:3181 cookie --dry-run
    """
    from bkctl.metadata.cluster import cookie_path
    from bkctl.metadata.store import NEW

    data, cookie = _cookie_in(file, bookie)
    version: int | None = None
    path = cookie_path(bookie)
    if run.cluster.store.get(path) is not None:
        raise AlreadyExists(f"Bookie {bookie} has a cookie", hint="'bkctl cookie update' replaces it")
    if not run.dry_run:
        version = run.recorded.store.put(path, data, NEW)
    run.out.show(_row(bookie, cookie, version=version), COOKIE_COLUMNS)


CHANGE_COLUMNS = Columns(
    Column("FIELD", "field", "field"),
    Column("BEFORE", "before", "found"),
    Column("AFTER", "after", "expected"),
    key="field",
)


@command(app, "update", asks=True, undo=True, dry_run=True, prints=rows_of(CHANGE_COLUMNS))
def update(run: Run, bookie: BookieArgument, file: FileArgument) -> None:
    """Replace a bookie's cookie in the metadata store.

    Prints the fields that change.

    $ bkctl cookie update 10.0.0.1:3181 cookie --dry-run
    """
    from bkctl.bookie.cookies import CookieFinding, verify
    from bkctl.formats.metadata import Cookie
    from bkctl.metadata.cluster import cookie_path

    data, cookie = _cookie_in(file, bookie)
    path = cookie_path(bookie)
    found = run.cluster.store.get(path)
    if found is None:
        raise NotFound(f"Bookie {bookie} has no cookie", hint="'bkctl cookie create' creates one")
    try:
        changes = list(verify(cookie, Cookie.parse(found.value), {}))
    except BkctlError:
        changes = [CookieFinding("", "cookie", "readable", "unreadable", "")]
    if not changes and found.value != data:
        changes = [CookieFinding("", "bytes", f"{len(data)} bytes", f"{len(found.value)} bytes", "")]
    if changes and not run.dry_run:
        names = ", ".join(change.field for change in changes)
        run.consent.confirm(f"The cookie of bookie {bookie} would be replaced, where {names} differ")
        run.recorded.store.put(path, data, found.version)
    run.out.render(changes, CHANGE_COLUMNS)


@command(app, "delete", asks=True, undo=True, dry_run=True, prints=rows_of(COOKIE_COLUMNS))
def delete(run: Run, bookies: Annotated[list[str], word("BOOKIE", "The bookies.")], dir: DirOption = None) -> None:
    """Delete the cookies of stopped bookies.

    Deletes them from the metadata store, and with --dir also from directories. Reads the metadata of every scope, and
    refuses while a ledger names one of the bookies: its replicas would be forgotten. 'bookies decommission' copies them
    first.

    $ bkctl cookie delete 10.0.0.1:3181 --dry-run
    """
    from bkctl.bookie.cookies import remove_cookies
    from bkctl.formats.metadata import Cookie
    from bkctl.metadata.store import attempt

    nodes = {bookie: _stored_node(run.cluster, bookie) for bookie in bookies}
    run.cluster.bookies.check_not_registered(bookies)
    with run.job.working("Looking at the ledgers"):
        _check_not_named(run.cluster, bookies)
    hint = "name that bookie, or drop it"
    files = [(path, _cookie_in(path, *bookies, hint=hint)[1]) for path in _version_files(dir)]
    if not run.dry_run:
        places = f" and {len(files)} directories" if files else ""
        run.consent.confirm(
            f"The cookie of bookie {', '.join(nodes)} in {run.cluster.store.name}{places} would be lost: "
            "it does not start on its directories without. No ledger names it"
        )
        paths = [path for path, _ in files]
        run.hold(path.parent for path in paths)
        remove_cookies(paths, {bookie: found.version for bookie, found in nodes.items()}, run.undo_file)
    read = (_row(name, attempt(Cookie.parse, node.value), version=node.version) for name, node in nodes.items())
    stored, local = list(read), [_row(cookie.bookie_id, cookie, place=str(path)) for path, cookie in files]
    run.out.render([*stored, *local], COOKIE_COLUMNS)


def _check_not_named(cluster: Cluster, bookies: list[str]) -> None:
    """Raise Conflict while metadata names one of the bookies, or may: what is cut off may have named it."""
    from bkctl.replication.holdings import Risk, check_scopes_known, ledgers_on, ok_to_stop

    check_scopes_known(cluster)
    unreadable = ledgers = entries = 0
    scopes = set()
    for ledger, held in ledgers_on(cluster, bookies, doubtful=True):
        scopes.add(ledger.scope_id)
        if isinstance(held, BkctlError):
            unreadable += 1
        else:
            ledgers += 1
            entries += held.entry_count
    if not ledgers and not unreadable:
        return
    problem = f"{', '.join(bookies)} would be forgotten"
    if ledgers:
        lost = {each.ledger for each in ok_to_stop(cluster, bookies) if each.risk is Risk.LOST}
        problem += (
            f", but {counted(ledgers, 'ledger')} in {counted(len(scopes), 'scope')} would lose "
            f"{counted(entries, 'replica')} of entries in closed fragments; {len(lost):,} of them have "
            "entries without another replica"
        )
    if unreadable:
        problem += f"; the metadata of {counted(unreadable, 'ledger')} that may name it is unreadable"
    raise Conflict(problem, hint="'bkctl bookies decommission' copies them to other bookies, and deletes the cookie")


def _directories_option(kind: str) -> Composite:
    return option(
        f"--{kind}-dirs DIRS",
        f"The bookie's {kind} directories, separated by commas.",
        parse=lambda text: tuple(filter(None, text.split(","))),
    )


@command(app, "generate", connects=True, prints=object_of(COOKIE_COLUMNS))
def generate(
    run: Run,
    journals: Annotated[tuple[str, ...] | None, _directories_option("journal")],
    ledgers: Annotated[tuple[str, ...] | None, _directories_option("ledger")],
    indexes: Annotated[tuple[str, ...] | None, _directories_option("index")],
    bookie: BookieOrConf = None,
    instance_id: Annotated[
        str | None, flag("--instance-id ID", "The cluster's instance id (default: read from the cluster).")
    ] = None,
    file: Annotated[Path | None, flag("--file -f FILE", "The file to write (default: stdout).")] = None,
) -> None:
    """Write the cookie that a bookie would have.

    Uses the settings of --conf, or the directories given.

    $ bkctl cookie generate --conf bk_server.conf --file cookie
    """
    from bkctl.bookie.cookies import bookie_id_of
    from bkctl.config import BookieConfig
    from bkctl.formats.metadata import Cookie

    config = BookieConfig() if run.access.conf is None else run.access.config()
    if run.access.conf is None and (bookie is None or journals is None or ledgers is None):
        raise UsageError("A cookie needs the bookie, --journal-dirs and --ledger-dirs", hint="or --conf bk_server.conf")
    if instance_id is None:
        instance_id = run.cluster.instance_id()
    if not ledgers:
        ledgers, indexes = config.ledger_directories, indexes or config.index_directories
    bookie_id = check_bookie_id(bookie or bookie_id_of(config))
    cookie = Cookie(bookie_id, journals or config.journal_directories, ledgers, instance_id or None, indexes or None)
    data = cookie.serialize()
    if file is None:
        run.out.raw(data)
        return
    with open(file, "xb") as stream:
        stream.write(data)
    run.out.show(_row(bookie_id, cookie, place=str(file)), COOKIE_COLUMNS)


EXPANDED_COLUMNS = Columns(
    Column("DIRECTORY", "directory", "directory"), Column("BOOKIE", "bookieId", "bookie_id"), key="directory"
)


@command(app, "expand", asks=True, undo=True, dry_run=True, prints=rows_of(EXPANDED_COLUMNS))
def expand_cookies(run: Run) -> None:
    """Add new, empty directories to a bookie's cookies.

    Adds the new ledger and index directories of --conf. The bookie must be stopped, and with DbLedgerStorage it must
    have no ledgers: it would not find them among more directories.

    $ bkctl cookie expand --conf bk_server.conf --dry-run
    """
    from bkctl.bookie.cookies import bookie_id_of, configured_directories, expand, make_directories
    from bkctl.disk import Files

    config = run.access.config()
    bookie_id = bookie_id_of(config)
    new = expand(config, bookie_id, run.cluster, Files(), undo=None)
    if not run.dry_run and new:
        run.consent.confirm(
            f"Bookie {bookie_id} would be given {', '.join(new)}, and could not start without them again"
        )
        make_directories(new, Files())
        run.hold(map(Path, configured_directories(config)))
        expand(config, bookie_id, run.cluster, Files(), undo=run.undo_file)
    run.out.render((PlainRow(directory=each, bookie_id=bookie_id) for each in new), EXPANDED_COLUMNS)
    if not new:
        run.out.note("No directory is new")


RENAMED_COLUMNS = Columns(
    Column("PLACE", "place", "place"), Column("BEFORE", "before", "before"), Column("AFTER", "after", "after"),
    key="place",
)  # fmt: skip


@command(app, "rename", asks=True, undo=True, dry_run=True, prints=rows_of(RENAMED_COLUMNS))
def rename_bookie(
    run: Run,
    old: Annotated[str, word("OLD", "The bookie's present id.")],
    new: Annotated[str, word("NEW", "The bookie's new id.")],
    dir: DirOption = None,
) -> None:
    """Change a bookie's id in its cookies.

    Changes the cookie in the metadata store, and those in the directories of --dir or --conf. The bookie must be
    stopped. Ledgers still name the old id: 'metadata replace-bookie' changes that.

    $ bkctl cookie rename 10.0.0.1:3181 10.0.0.2:3181 --dry-run
    """
    from bkctl.bookie.cookies import STORE, rename
    from bkctl.disk import Files

    if check_bookie_id(old) == check_bookie_id(new):
        raise UsageError(f"{old} and {new} are the same id")
    directories = _directories(run.access, dir)
    changed = rename(run.cluster, old, new, directories, Files(), undo=None)
    if not run.dry_run:
        run.consent.confirm(
            f"Bookie {old} would be {new} in {run.cluster.store.name} and {counted(len(changed), 'directory')}"
        )
        run.hold(map(Path, directories))
        changed = rename(run.cluster, old, new, directories, Files(), undo=run.undo_file)
    run.out.render((PlainRow(place=place, before=old, after=new) for place in (STORE, *changed)), RENAMED_COLUMNS)
    follow = f"'bkctl metadata replace-bookie --from {old} --to {new}' changes that"
    run.out.note(f"Ledgers that name {old} still do: {follow}")
    if not directories:
        run.out.note("The cookies in the bookie's directories stay as they are; name them with --dir or --conf")


FINDING_COLUMNS = Columns(
    Column("PLACE", "place", "place"),
    Column("FIELD", "field", "field", style={"cookie": RED}),
    *fields(Kind.TEXT, expected="EXPECTED", found="FOUND", meaning="MEANING"),
    next_column("cookie verify", lambda row: row.field, bookie=lambda row: None),
    key="place",
)


@command(app, "verify", connects=True, prints=rows_of(FINDING_COLUMNS))
def verify_cookies(run: Run, bookie: BookieOrConf = None, dir: DirOption = None) -> None:
    """Compare a bookie's cookies.

    Compares the configuration (--conf), the metadata store and the directories of --dir, else of --conf. Prints each
    field that differs and what that means; exit code 3 then. Without --conf, the directories are compared with the
    store's cookie.

    $ bkctl cookie verify --conf bk_server.conf
    """
    from bkctl.bookie.cookies import bookie_id_of, configured_cookie, read_local, read_stored, verify
    from bkctl.metadata.store import value_of

    config = run.access.config() if run.access.conf is not None else None
    directories = _directories(run.access, dir)
    if bookie is None:
        if config is None:
            raise UsageError("No bookie is given", hint="name it, or add --conf bk_server.conf")
        bookie = bookie_id_of(config)
    stored, local = read_stored(run.cluster, bookie), read_local(directories)
    expected = stored if config is None else configured_cookie(config, bookie, run.cluster.instance_id())
    if expected is None:
        raise NotFound(f"Bookie {bookie} has no cookie", hint="'bkctl cookie list' shows the cookies")
    findings = list(verify(value_of(expected), stored, local))
    run.out.render(findings, FINDING_COLUMNS, findings=True)
    if not findings:
        run.out.note(
            f"The {len(local) + 1} cookies of bookie {bookie} are equal"
            if local or config is not None
            else f"Only the metadata store's cookie of bookie {bookie} was read: add --dir or --conf to compare it"
        )
    where = f"in the cookies of bookie {bookie}"
    run.out.finish_with(len(findings), f"difference {where}", f"differences {where}")


def _directories(access: Access, given: list[Path] | None) -> list[str]:
    """Return the directories of --dir, else of --conf, else none."""
    from bkctl.bookie.cookies import configured_directories

    directories = [str(each.parent.parent) for each in _version_files(given)]
    return directories or ([] if access.conf is None else configured_directories(access.config()))
