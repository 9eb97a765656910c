"""Cookies: whether a bookie may start on its directories. Source: LegacyCookieValidation, Cookie.

The same cookie stands in `current/VERSION` of every journal, ledger and index directory and in the metadata store. It
keeps a bookie from starting with a directory missing or exchanged, under another name, or in another cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import AlreadyExists, BkctlError, Conflict, NotFound, Unreachable
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME, CURRENT
from bkctl.ids import check_bookie_id
from bkctl.metadata.cluster import COOKIES, Cluster
from bkctl.metadata.store import NEW

if TYPE_CHECKING:
    from bkctl.metadata.admin.undo import UndoFile

_HINT: Final = "a bookie's id, cluster and directories stay as they were when it first started"


class CookieMismatch(Conflict):
    """The directories are not this bookie's, or not all of them."""


def stamp_or_verify(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files) -> bool:
    """Verify the cookies, or write them where bookie and directories are new; True when it is a new bookie.

    Raises CookieMismatch saying what differs from what; Corrupt or Unsupported for a cookie that cannot be read;
    OSError.
    """
    cookie = configured_cookie(config, bookie_id, cluster.instance_id())
    found = {each: read_directory(each) for each in configured_directories(config)}
    missing = [each for each, there in found.items() if there is None]
    for each, there in found.items():
        if there is not None:
            _compare(cookie, there, f"Directory {each}", config.allow_storage_expansion)
    stored = cluster.cookies.read(bookie_id)
    if stored is None:
        for each, there in found.items():
            # A start that died between the directories and the store left cookies, and nothing beside them.
            if not _is_empty(each):
                cause = "is not empty and has no cookie" if there is None else "has a cookie"
                raise CookieMismatch(
                    f"Directory {each} {cause}, but the metadata store has no cookie of bookie {bookie_id}",
                    hint="give it empty directories, or restore its cookie there",
                )
        _write(cookie, list(found), files)
        cluster.cookies.write(bookie_id, cookie, NEW)
        return True
    _compare(cookie, stored.value, f"The metadata store's cookie of bookie {bookie_id}", config.allow_storage_expansion)
    known = {*stored.value.journal_dirs, *stored.value.ledger_dirs, *(stored.value.index_dirs or ())}
    for each in missing:
        if not config.allow_storage_expansion or each in known or not _is_empty(each):
            raise CookieMismatch(
                f"Directory {each} of bookie {bookie_id} has no cookie: its data is gone, or the disk is not mounted",
                hint="if the data is lost, recover the bookie's ledgers from the others before it starts anew",
            )
    if missing:
        _write(cookie, list(found), files)
        cluster.cookies.write(bookie_id, cookie, stored.version)
    return False


def _compare(cookie: Cookie, other: Cookie, what: str, allow_expansion: bool) -> None:
    differences = cookie.differences(other, allow_expansion=allow_expansion)
    if differences:
        raise CookieMismatch(f"{what} does not fit this bookie: {'; '.join(differences)}", hint=_HINT)


def version_file(directory: str) -> Path:
    """Where a directory's cookie is."""
    return Path(directory) / CURRENT / COOKIE_NAME


def read_directory(directory: str) -> Cookie | None:
    """The cookie in a directory of a bookie; None where there is none. Raises Corrupt, Unsupported, OSError."""
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
    for each in directories:
        current = Path(each) / CURRENT
        files.make_directory(current)
        files.replace(current / COOKIE_NAME, cookie.serialize())


# --- what operators do with cookies ---------------------------------------------------------------------------------


def configured_cookie(config: BookieConfig, bookie_id: str, instance_id: str) -> Cookie:
    """The cookie of a bookie with these settings in the cluster `instance_id` ("": of none)."""
    return Cookie(
        bookie_id,
        config.journal_directories,
        config.ledger_directories,
        instance_id or None,
        config.index_directories or None,
    )


def configured_directories(config: BookieConfig) -> list[str]:
    """The directories that have a cookie each: journals, ledgers, indexes."""
    return list(dict.fromkeys([*config.journal_directories, *config.ledger_directories, *config.index_directories]))


def bookie_id_of(config: BookieConfig) -> str:
    """The id of the bookie with these settings. Raises UsageError when its address cannot be told."""
    if config.bookie_id:
        return check_bookie_id(config.bookie_id)
    from bkctl.bookie.network import advertised_host

    return check_bookie_id(f"{advertised_host(config)}:{config.bookie_port}")


def cookie_path(bookie_id: str) -> str:
    """Where the store keeps a bookie's cookie."""
    return f"{COOKIES}/{check_bookie_id(bookie_id)}"


def check_not_registered(cluster: Cluster, bookie_ids: Iterable[str]) -> None:
    """Raises Conflict when one of the bookies is registered: it is running, and knows its cookie."""
    for bookie_id in bookie_ids:
        bookie = cluster.bookies.get(bookie_id)
        if bookie is not None and bookie.state != "down":
            raise Conflict(f"Bookie {bookie_id} is registered, so it is running", hint="stop it first")


class CookieFinding(NamedTuple):
    """One field of one cookie that is not as it should be, and what that means.

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
    "bookieId": "the cookie is another bookie's, or this one's id changed: set bookieId or advertisedAddress back, or "
    "use 'bkctl cookie rename'",
    "journalDirs": "a bookie keeps its journal directories: set them back, or move the files and write a new cookie "
    "with 'bkctl cookie generate' and 'update'",
    "instanceId": "the cookie is of another cluster, or this one was formatted since: check the metadata URI",
}


def verify(
    expected: Cookie, stored: Cookie | BkctlError | None, local: Mapping[str, Cookie | BkctlError | None]
) -> Iterator[CookieFinding]:
    """Yield how the store's cookie and those in the directories differ from `expected`, field by field.

    None stands for a cookie that is not there, an error for one that cannot be read. Source: Cookie.verify.
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
            yield from _differences(place, expected, found)


def _missing(place: str, stored: Cookie | BkctlError | None, known: set[str]) -> str:
    if place == STORE:
        return "the bookie never started in this cluster, or its cookie was deleted: 'bkctl cookie create' restores it"
    if stored is None:
        return "the bookie is new, or this directory is"
    if place in known:
        return "its data is gone, or its disk is not mounted"
    return "the directory is new: 'bkctl cookie expand' takes it in"


def _differences(place: str, expected: Cookie, found: Cookie) -> Iterator[CookieFinding]:
    for name, mine, theirs in (
        ("bookieId", expected.bookie_id, found.bookie_id),
        ("journalDirs", ",".join(expected.journal_dirs), ",".join(found.journal_dirs)),
    ):
        if mine != theirs:
            yield CookieFinding(place, name, mine, theirs, _MEANINGS[name])
    for name, dirs, there in (
        ("ledgerDirs", expected.ledger_dirs, found.ledger_dirs),
        ("indexDirs", expected.index_dirs or expected.ledger_dirs, found.index_dirs or found.ledger_dirs),
    ):
        if dirs != there:
            yield CookieFinding(place, name, ",".join(dirs), ",".join(there), _directories_meaning(dirs, there))
    if expected.instance_id != found.instance_id:
        yield CookieFinding(place, "instanceId", expected.instance_id, found.instance_id, _MEANINGS["instanceId"])


def _directories_meaning(dirs: Sequence[str], there: Sequence[str]) -> str:
    more, fewer = sorted(set(dirs) - set(there)), sorted(set(there) - set(dirs))
    if not more and not fewer:
        return "the same directories in another order: set the order back"
    if not fewer:
        return f"{', '.join(more)} came in: 'bkctl cookie expand' takes new empty directories in"
    if not more:
        return f"{', '.join(fewer)} is left out: set it back, its ledgers would be missing"
    return f"{', '.join(fewer)} is left out, {', '.join(more)} came in: set them back, or move the files"


def expand(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files, *, undo: UndoFile | None) -> list[str]:
    """Take the configuration's new, empty ledger and index directories into the cookies; returns those directories.

    With `undo` None nothing is changed. Raises NotFound when the bookie has no cookie, CookieMismatch when more differs
    than new directories, Conflict when the bookie is running. Source: LegacyCookieValidation with
    allowStorageExpansion.
    """
    check_not_registered(cluster, [bookie_id])
    stored = cluster.cookies.read(bookie_id)
    if stored is None:
        raise NotFound(f"Bookie {bookie_id} has no cookie", hint="'bkctl cookie list' shows those that are there")
    cookie = configured_cookie(config, bookie_id, cluster.instance_id())
    _compare(cookie, stored.value, f"The metadata store's cookie of bookie {bookie_id}", True)
    known = {*stored.value.journal_dirs, *stored.value.ledger_dirs, *(stored.value.index_dirs or ())}
    directories = configured_directories(config)
    for each in directories:
        there = read_directory(each)
        if there is not None:
            _compare(cookie, there, f"Directory {each}", True)
        elif each in known or not _is_empty(each):
            what = "has no cookie, and the bookie had it before" if each in known else "is not empty"
            raise CookieMismatch(f"Directory {each} {what}", hint="only new, empty directories can be taken in")
    new = [each for each in directories if each not in known]
    if undo is not None and new:
        raw = cluster.store.get(cookie_path(bookie_id))
        undo.record(cookie_path(bookie_id), None if raw is None else raw.value, cookie.serialize())
        for each in directories:
            undo.record_file(version_file(each), cookie.serialize())
        _write(cookie, directories, files)
        cluster.cookies.write(bookie_id, cookie, stored.version)
    return new


def rename(
    cluster: Cluster, old: str, new: str, directories: Iterable[str], files: Files, *, undo: UndoFile | None
) -> list[str]:
    """Give the bookie `old` the id `new` in the store and in the cookies of `directories`; returns those changed.

    What was begun and broken off is completed. With `undo` None nothing is changed. Raises NotFound when `old` has no
    cookie, AlreadyExists when `new` has another one, Conflict when one of them is running, CookieMismatch for a
    directory of another bookie. Ledger metadata still names `old`.
    """
    check_not_registered(cluster, [old, new])
    stored = cluster.cookies.read(old)
    there = cluster.cookies.read(new)
    if stored is None:
        raise NotFound(f"Bookie {old} has no cookie", hint="'bkctl cookie list' shows those that are there")
    cookie = replace(stored.value, bookie_id=new)
    if there is not None and there.value != cookie:
        raise AlreadyExists(f"Bookie {new} has a cookie of its own", hint="give another id")
    changed = []
    for each in dict.fromkeys(directories):
        local = read_directory(each)
        if local is None:
            raise CookieMismatch(f"Directory {each} has no cookie")
        if local.bookie_id not in (old, new):
            raise CookieMismatch(f"Directory {each} is bookie {local.bookie_id}'s, not {old}'s")
        if local.bookie_id == old:
            changed.append(each)
    if undo is None:
        return changed
    raw = cluster.store.get(cookie_path(old))
    if there is None:
        undo.record(cookie_path(new), None, cookie.serialize())
        cluster.cookies.write(new, cookie, NEW)
    for each in changed:
        local = read_directory(each)
        assert local is not None
        data = replace(local, bookie_id=new).serialize()
        undo.record_file(version_file(each), data)
        files.replace(version_file(each), data)
    undo.record(cookie_path(old), None if raw is None else raw.value, None)
    cluster.cookies.remove(old, stored.version)
    return changed


def read_local(directories: Iterable[str]) -> dict[str, Cookie | BkctlError | None]:
    """The cookie of each directory; an error where one cannot be read."""
    found: dict[str, Cookie | BkctlError | None] = {}
    for each in directories:
        try:
            found[each] = read_directory(each)
        except BkctlError as error:
            found[each] = error
    return found


def read_stored(cluster: Cluster, bookie_id: str) -> Cookie | BkctlError | None:
    """The bookie's cookie in the store; an error where it cannot be read. Raises Unreachable."""
    try:
        found = cluster.cookies.read(bookie_id)
    except Unreachable:
        raise
    except BkctlError as error:
        return error
    return None if found is None else found.value
