"""Cookies: whether a bookie may start on its directories. Source: LegacyCookieValidation, Cookie.

The same cookie stands in `current/VERSION` of every journal, ledger and index directory and in the metadata store. It
keeps a bookie from starting with a directory missing or exchanged, under another name, or in another cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.errors import Conflict
from bkctl.formats.metadata import Cookie
from bkctl.metadata.cluster import Cluster
from bkctl.metadata.store import NEW
from bkctl.storage.files import Files

VERSION_FILE: Final = "VERSION"
CURRENT: Final = "current"
_HINT: Final = "a bookie's id, cluster and directories stay as they were when it first started"


class CookieMismatch(Conflict):
    """The directories are not this bookie's, or not all of them."""


def stamp_or_verify(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files) -> bool:
    """Verify the cookies, or write them where bookie and directories are new; True when it is a new bookie.

    Raises CookieMismatch saying what differs from what; Corrupt or Unsupported for a cookie that cannot be read;
    OSError.
    """
    cookie = Cookie(
        bookie_id,
        config.journal_directories,
        config.ledger_directories,
        cluster.instance_id() or None,
        config.index_directories or None,
    )
    directories = [*config.journal_directories, *config.ledger_directories, *config.index_directories]
    found = {each: _read(each) for each in dict.fromkeys(directories)}
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


def _read(directory: str) -> Cookie | None:
    path = Path(directory) / CURRENT / VERSION_FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return Cookie.parse(data, str(path))


def _is_empty(directory: str) -> bool:
    current = Path(directory) / CURRENT
    return not current.is_dir() or all(entry.name == VERSION_FILE for entry in current.iterdir())


def _write(cookie: Cookie, directories: list[str], files: Files) -> None:
    for each in directories:
        current = Path(each) / CURRENT
        files.make_directory(current)
        files.replace(current / VERSION_FILE, cookie.serialize())
