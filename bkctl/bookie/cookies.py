"""Cookies: the check that a bookie may start on its directories. Source: LegacyCookieValidation, Cookie.

Every journal, ledger and index directory has the bookie's cookie in `current/VERSION`, and so has the metadata store.
A bookie does not start with a directory missing or exchanged, under another id, or in another cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import AlreadyExists, BkctlError, Conflict, NotFound
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, CURRENT
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import NEW, attempt

if TYPE_CHECKING:
    from bkctl.metadata.admin.undo import UndoFile

_HINT: Final = "a bookie keeps the id, cluster and directories of its first start"
_DB_HINT: Final = "restore the directories: DbLedgerStorage takes new ones only while it has no ledgers"


class CookieMismatch(Conflict):
    """The directories are another bookie's, or some are missing."""


def stamp_or_verify(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files | None) -> bool:
    """Verify the cookies, or write them for a new bookie in new directories; return True for a new bookie.

    Without `files` nothing is written. Raises CookieMismatch saying what differs from what; Corrupt or Unsupported for
    a cookie that cannot be read; OSError.
    """
    cookie = configured_cookie(config, bookie_id, cluster.instance_id())
    found = {directory: read_directory(directory) for directory in configured_directories(config)}
    missing = [directory for directory, there in found.items() if there is None]
    for directory, there in found.items():
        if there is not None:
            _compare(config, cookie, there, f"Directory {directory}")
    stored = cluster.cookies.read(bookie_id)
    if stored is None:
        for directory, there in found.items():
            # A start that was interrupted between the directories and the store left cookies and no other files.
            if not _is_empty(directory):
                cause = "is not empty and has no cookie" if there is None else "has a cookie"
                file = next((version_file(each) for each, cookie in found.items() if cookie is not None), "FILE")
                raise CookieMismatch(
                    f"Directory {directory} {cause}, but the metadata store has no cookie of bookie {bookie_id}",
                    hint=restore_hint(bookie_id, file),
                )
        if files is not None:
            _write(cookie, list(found), files)
            cluster.cookies.write(bookie_id, cookie, NEW)
        return True
    _compare(config, cookie, stored.value, f"The metadata store's cookie of bookie {bookie_id}")
    known = {*stored.value.journal_dirs, *stored.value.ledger_dirs, *(stored.value.index_dirs or ())}
    for directory in missing:
        if not config.allow_storage_expansion or directory in known or not _is_empty(directory):
            raise CookieMismatch(
                f"Directory {directory} of bookie {bookie_id} has no cookie: its data is lost, or its disk not mounted",
                hint="if the data is lost, recover the bookie's ledgers from other bookies before its new start",
            )
    # None of them is missing if an earlier start ended before it wrote to the store.
    if files is not None and not known.issuperset(found):
        _write(cookie, list(found), files)
        cluster.cookies.write(bookie_id, cookie, stored.version)
    return False


def verify_directories(config: BookieConfig, *, allow_copy: bool = False) -> None:
    """Verify the cookies in the directories of `config` without a metadata store; missing ones do not count.

    With `allow_copy` damaged cookies do not count either, nor those that name none of the ledger and index directories:
    a copy's. Raises as `stamp_or_verify`.
    """
    first: Cookie | None = None
    for directory, there in read_local(configured_directories(config)).items():
        if isinstance(there, BkctlError) and not allow_copy:
            raise there
        if isinstance(there, Cookie):
            named = (*there.ledger_dirs, *(there.index_dirs or ()))
            if allow_copy and {*config.ledger_directories, *config.index_directories}.isdisjoint(named):
                continue
            first = first or there
            cookie = configured_cookie(config, config.bookie_id or first.bookie_id, first.instance_id or "")
            _compare(config, cookie, there, f"Directory {directory}")


def _compare(config: BookieConfig, cookie: Cookie, other: Cookie, what: str) -> None:
    changes = list(cookie.differences(other))
    allowed = config.allow_storage_expansion
    differences, hint = [str(change) for change in changes if not (allowed and change.is_expansion)], _HINT
    if changes and not differences and config.ledger_storage == "db":
        from bkctl.storage.bookie_storage import database_in_use

        database = database_in_use(Path(directory) / CURRENT for directory in config.index_or_ledger_directories)
        if database is not None:
            # A ledger's directory is its id modulo their number: Apache's bookie starts, and does not find its ledgers.
            differences, hint = [*map(str, changes), f"{database} has ledgers"], _DB_HINT
    if differences:
        raise CookieMismatch(f"{what} does not fit this bookie: {'; '.join(differences)}", hint=hint)


def restore_hint(bookie_id: str, file: Path | str, otherwise: str = "use empty directories") -> str:
    """Return the advice on a bookie with data whose cookie is not in the store; `file` has it, too."""
    asks, restores = f"'bkctl why bookie {bookie_id}'", f"'bkctl cookie create {bookie_id} {file}'"
    return f"if ledgers name the bookie ({asks}), restore the cookie: {restores}; else {otherwise}"


def version_file(directory: str) -> Path:
    """Return the path of a directory's cookie."""
    return Path(directory) / CURRENT / COOKIE_NAME


def read_directory(directory: str) -> Cookie | None:
    """Return the cookie in a directory of a bookie, or None. Raises Corrupt, Unsupported, OSError."""
    path = version_file(directory)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return Cookie.parse(data, str(path))


def _is_empty(directory: str) -> bool:
    current = Path(directory) / CURRENT
    return not current.is_dir() or all(entry.name == COOKIE_NAME for entry in current.iterdir())


def _write(cookie: Cookie, directories: list[str], files: Files) -> None:
    for directory in directories:
        current = Path(directory) / CURRENT
        files.make_directory(current)
        files.replace(current / COOKIE_NAME, cookie.serialize())


# --- changes by operators ---------------------------------------------------------------------------------------


def configured_cookie(config: BookieConfig, bookie_id: str, instance_id: str) -> Cookie:
    """Return the cookie of a bookie with these settings in the cluster `instance_id` ("": in none)."""
    return Cookie(
        bookie_id,
        config.journal_directories,
        config.ledger_directories,
        instance_id or None,
        config.index_directories or None,
    )


def configured_directories(config: BookieConfig) -> list[str]:
    """Return the directories that have a cookie: journals, ledgers, indexes."""
    return list(dict.fromkeys([*config.journal_directories, *config.ledger_directories, *config.index_directories]))


def bookie_id_of(config: BookieConfig) -> str:
    """Return the id of the bookie with these settings. Raises UsageError when its address is unknown."""
    if config.bookie_id:
        return check_bookie_id(config.bookie_id)
    from bkctl.bookie.network import advertised_host

    return check_bookie_id(f"{advertised_host(config)}:{config.bookie_port}")


class CookieFinding(NamedTuple):
    """One field of one cookie that differs from the expected value, and what that means.

    `place` is a directory or "metadata store"; `field` is a field of the cookie, or "cookie" where all of it is missing
    or unreadable. `expected` is of the configuration, or of the store where there is none.
    """

    place: str
    field: str
    expected: str | None
    found: str | None
    meaning: str


STORE: Final = "metadata store"
_MEANINGS: Final = {
    "bookieId": "the cookie is another bookie's, or the id of this bookie changed: restore bookieId or "
    "advertisedAddress, or use 'bkctl cookie rename'",
    "journalDirs": "a bookie keeps its journal directories: restore the setting, or move the files and write a "
    "new cookie with 'bkctl cookie generate' and 'update'",
    "instanceId": "the cookie is of another cluster, or this cluster was formatted since: check the metadata URI",
}


def verify(
    expected: Cookie, stored: Cookie | BkctlError | None, local: Mapping[str, Cookie | BkctlError | None]
) -> Iterator[CookieFinding]:
    """Yield the fields in which the cookies of store and directories differ from `expected`.

    None stands for a missing cookie, an error for one that cannot be read. Source: Cookie.verify.
    """
    known: set[str] = set()
    if isinstance(stored, Cookie):
        known.update(stored.journal_dirs, stored.ledger_dirs, stored.index_dirs or ())
    for place, found in ({STORE: stored} | dict(local)).items():
        if isinstance(found, BkctlError):
            yield CookieFinding(place, "cookie", None, None, str(found))
        elif found is None:
            yield CookieFinding(place, "cookie", "a cookie", None, _missing(place, stored, known))
        else:
            for name, _, mine, theirs in expected.differences(found):
                meaning = _MEANINGS.get(name) or _directories_meaning(mine, theirs)
                yield CookieFinding(place, name, ",".join(mine) or None, ",".join(theirs) or None, meaning)


def _missing(place: str, stored: Cookie | BkctlError | None, known: set[str]) -> str:
    if place == STORE:
        return "the bookie never started in this cluster, or its cookie was deleted: 'bkctl cookie create' restores it"
    if stored is None:
        return "the bookie or the directory is new"
    if place in known:
        return "its data is lost, or its disk is not mounted"
    return "not a directory of the bookie, or a new one: 'bkctl cookie expand' adds the new ones of --conf"


def _directories_meaning(dirs: Sequence[str], there: Sequence[str]) -> str:
    more, fewer = sorted(set(dirs) - set(there)), sorted(set(there) - set(dirs))
    if not more and not fewer:
        return "the same directories in another order: restore the order"
    news = f"{', '.join(more)} {'is' if len(more) == 1 else 'are'} new"
    if not fewer:
        return f"{news}: 'bkctl cookie expand' adds new empty directories"
    if not more:
        return f"the configuration lacks {', '.join(fewer)}: add them, or their ledgers are lost"
    return f"the configuration lacks {', '.join(fewer)}, and {news}: restore them, or move files"


def expand(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files, *, undo: UndoFile | None) -> list[str]:
    """Add the configuration's new, empty ledger and index directories to the cookies; return these directories.

    With `undo` None nothing is changed. Raises NotFound when the bookie has no cookie, CookieMismatch when more differs
    than new directories, or DbLedgerStorage has ledgers, Conflict when the bookie is running. Source:
    LegacyCookieValidation with allowStorageExpansion.
    """
    config = config.with_changes(allow_storage_expansion=True)
    cluster.bookies.check_not_registered([bookie_id])
    stored = cluster.cookies.read(bookie_id)
    if stored is None:
        raise NotFound(f"Bookie {bookie_id} has no cookie", hint="'bkctl cookie list' shows all cookies")
    cookie = configured_cookie(config, bookie_id, cluster.instance_id())
    _compare(config, cookie, stored.value, f"The metadata store's cookie of bookie {bookie_id}")
    known = {*stored.value.journal_dirs, *stored.value.ledger_dirs, *(stored.value.index_dirs or ())}
    directories = configured_directories(config)
    for directory in directories:
        there = read_directory(directory)
        if there is not None:
            _compare(config, cookie, there, f"Directory {directory}")
        elif directory in known or not _is_empty(directory):
            what = "has no cookie, and the bookie had it before" if directory in known else "is not empty"
            raise CookieMismatch(f"Directory {directory} {what}", hint="only new, empty directories can be added")
    new = [directory for directory in directories if directory not in known]
    if undo is not None and new:
        for directory in directories:
            undo.record_file(version_file(directory), cookie.serialize())
        _write(cookie, directories, files)
        undo.recorded().cookies.write(bookie_id, cookie, stored.version)
    return new


def make_directories(directories: Iterable[str], files: Files) -> None:
    """Create directories that do not exist."""
    for each in directories:
        files.make_directory(Path(each))


def remove_cookies(paths: Iterable[Path], versions: Mapping[str, int], undo: UndoFile) -> None:
    """Remove cookie files, then the cookies of bookies (id → version) in the store; `undo` keeps both."""
    for path in paths:
        undo.record_file(path, None)
        path.unlink()
    for bookie_id, version in versions.items():
        undo.recorded().cookies.remove(bookie_id, version)


def rename(
    cluster: Cluster, old: str, new: str, directories: Iterable[str], files: Files, *, undo: UndoFile | None
) -> list[str]:
    """Give the bookie `old` the id `new` in the store and in the cookies of `directories`; return the changed ones.

    An interrupted rename is completed. With `undo` None nothing is changed. Raises NotFound when `old` has no
    cookie, AlreadyExists when `new` has another one, Conflict when one of them is running, CookieMismatch for a
    directory of another bookie. Ledger metadata still names `old`.
    """
    cluster.bookies.check_not_registered([old, new])
    stored = cluster.cookies.read(old)
    there = cluster.cookies.read(new)
    if stored is None:
        raise NotFound(f"Bookie {old} has no cookie", hint="'bkctl cookie list' shows all cookies")
    cookie = replace(stored.value, bookie_id=new)
    if there is not None and there.value != cookie:
        raise AlreadyExists(f"Bookie {new} already has a cookie", hint="choose another id")
    changed: dict[str, Cookie] = {}
    for directory in dict.fromkeys(directories):
        local = read_directory(directory)
        if local is None:
            raise CookieMismatch(f"Directory {directory} has no cookie")
        if local.bookie_id not in (old, new):
            raise CookieMismatch(f"Directory {directory} is bookie {local.bookie_id}'s, not {old}'s")
        if local.bookie_id == old:
            changed[directory] = local
    if undo is None:
        return list(changed)
    recorded = undo.recorded()
    if there is None:
        recorded.cookies.write(new, cookie, NEW)
    for directory, local in changed.items():
        data = replace(local, bookie_id=new).serialize()
        undo.record_file(version_file(directory), data)
        files.replace(version_file(directory), data)
    recorded.cookies.remove(old, stored.version)
    return list(changed)


def read_local(directories: Iterable[str]) -> dict[str, Cookie | BkctlError | None]:
    """Return the cookie of each directory; an error for one that cannot be read."""
    return {directory: attempt(read_directory, directory) for directory in directories}


def read_stored(cluster: Cluster, bookie_id: str) -> Cookie | BkctlError | None:
    """Return the bookie's cookie in the store, an error if it cannot be read, or None. Raises Unreachable."""
    found = attempt(cluster.cookies.read, bookie_id)
    return found if found is None or isinstance(found, BkctlError) else found.value
