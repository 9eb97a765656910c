"""A bookie's directories before its first start and after its last: `init` creates its cookies, `wipe` empties them.

Source: BookieImpl.format, BookKeeperAdmin.initBookie, LegacyCookieValidation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.bookie import cookies
from bkctl.columns import some_of
from bkctl.config import BookieConfig, read_properties
from bkctl.disk import Files
from bkctl.errors import BkctlError, Conflict, Corrupt, Unsupported, UsageError
from bkctl.files.directories import BookieDirectories, cookie_at
from bkctl.files.index import BookieIndexes
from bkctl.formats.names import COOKIE_NAME, CURRENT
from bkctl.metadata.cluster import Cluster

if TYPE_CHECKING:
    from bkctl.metadata.admin.undo import UndoFile

#: Directories that a file system, and not the bookie, creates.
_NOT_OURS: Final = frozenset({"lost+found"})
_METADATA_CACHE: Final = "gcEntryLogMetadataCachePath"


class DirectoryContents(NamedTuple):
    """The contents of one of a bookie's directories: `roles` of journal, ledger, index, metadataCache; sizes in bytes.

    `ledgers` and `scoped_ledgers` count those in its indexes, None where an index cannot be read.
    """

    path: Path
    roles: tuple[str, ...]
    files: int
    size_bytes: int
    ledgers: int | None
    scoped_ledgers: int | None


def roles_of(config: BookieConfig) -> dict[Path, tuple[str, ...]]:
    """Return the directories of a bookie, each with its roles."""
    roles: dict[Path, tuple[str, ...]] = {}
    cache = read_properties(config.conf_path).get(_METADATA_CACHE) if config.conf_path else None
    for name, directories in (
        ("journal", config.journal_directories),
        ("ledger", config.ledger_directories),
        ("index", config.index_or_ledger_directories),
        ("metadataCache", (cache,) if cache else ()),
    ):
        for directory in directories:
            roles[Path(directory)] = (*roles.get(Path(directory), ()), name)
    return roles


def contents(config: BookieConfig) -> Iterator[DirectoryContents]:
    """Yield the contents of each directory of a bookie; a missing one is empty.

    Raises Unsupported for a symbolic link to a directory below it, OSError.
    """
    for path, roles in roles_of(config).items():
        count = size = 0
        for place, directories, names in os.walk(path):
            for link in (link for name in directories if (link := Path(place, name)).is_symlink()):
                raise Unsupported(
                    f"{link} is a symbolic link and its data would stay", hint="remove both by hand, then try again"
                )
            for name in names:
                count += 1
                size += os.lstat(os.path.join(place, name)).st_size
        ledgers: int | None = 0
        scoped: int | None = 0
        if path.is_dir() and "index" in roles:
            ledgers, scoped = _count_ledgers(path)
        yield DirectoryContents(path, roles, count, size, ledgers, scoped)


def _count_ledgers(path: Path) -> tuple[int | None, int | None]:
    with BookieIndexes(BookieDirectories(index_dirs=[path])) as indexes:
        try:
            ledgers = indexes.ledgers()
        except (Corrupt, UsageError):
            return None, None
        if indexes.problems:
            return None, None
    scoped = sum(ledger.is_scoped for ledger in ledgers)
    return len(ledgers) - scoped, scoped


def bookie_to_wipe(config: BookieConfig) -> str:
    """Return the id of the bookie whose directories these are, by configuration and cookies.

    Raises CookieMismatch where a directory is another bookie's; UsageError where neither gives an id.
    """
    in_directories: dict[str, str] = {}
    for directory in cookies.configured_directories(config):
        if (cookie := cookie_at(Path(directory) / CURRENT)) is not None:
            in_directories.setdefault(cookie.bookie_id, directory)
    if len(in_directories) > 1:
        (one, first), (other, second) = list(in_directories.items())[:2]
        raise cookies.CookieMismatch(
            f"Directory {first} belongs to bookie {one}, but {second} to {other}", hint="check --conf"
        )
    found = next(iter(in_directories), None)
    if found is not None and config.bookie_port == 0 and not config.bookie_id:
        return found
    configured = cookies.bookie_id_of(config)
    if found is not None and found != configured:
        raise cookies.CookieMismatch(
            f"Directory {in_directories[found]} belongs to bookie {found}, not to {configured}", hint="check --conf"
        )
    return configured


def wipe(config: BookieConfig, files: Files) -> None:
    """Remove everything in a bookie's directories, which the caller holds; the directories stay. Raises OSError.

    The cookies go first: after a crash halfway, no bookie starts on the rest.
    """
    directories = [path for path in roles_of(config) if path.is_dir()]
    for path in directories:
        cookie = path / CURRENT / COOKIE_NAME
        if cookie.exists():
            files.remove(cookie)
            files.sync_directory(cookie.parent)
    for path in directories:
        for entry in _entries(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                files.remove(Path(entry.path))
        if path.is_dir():
            files.sync_directory(path)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        return [entry for entry in os.scandir(path) if entry.name not in _NOT_OURS]
    except FileNotFoundError:
        return []


class InitProblem(NamedTuple):
    """A reason why a new bookie may not have its directories: `place` is a directory or the metadata store."""

    place: str
    problem: str


def problems_of_init(config: BookieConfig, bookie_id: str, cluster: Cluster) -> list[InitProblem]:
    """Return the reasons why no new bookie of that id may be created with these directories.

    Directories have to be empty, or have no more than the cookie that is to be written. Raises NotFound where there is
    no cluster.
    """
    cluster.layout()
    cookie = cookies.configured_cookie(config, bookie_id, cluster.instance_id())
    found = []
    for directory in cookies.configured_directories(config):
        path = Path(directory)
        if path.exists() and not path.is_dir():
            found.append(InitProblem(directory, "is not a directory"))
            continue
        try:
            there = cookies.read_directory(directory)
        except BkctlError as error:
            found.append(InitProblem(directory, str(error)))
            continue
        names = [entry.name for entry in _entries(path) if entry.name != CURRENT]
        names += [f"{CURRENT}/{entry.name}" for entry in _entries(path / CURRENT) if entry.name != COOKIE_NAME]
        if names:
            found.append(InitProblem(directory, f"is not empty: {some_of(sorted(names), 3)}"))
        elif there is not None and there != cookie:
            found.append(
                InitProblem(directory, f"has the cookie of bookie {there.bookie_id}, not the one to be written")
            )
    bookie = cluster.bookies.get(bookie_id)
    if bookie is not None and bookie.state != "down":
        found.append(InitProblem(cluster.uri, f"bookie {bookie_id} is registered, so it is running"))
    if cluster.cookies.read(bookie_id) is not None:
        found.append(InitProblem(cluster.uri, f"bookie {bookie_id} has a cookie, so it is not new"))
    return found


def init(config: BookieConfig, bookie_id: str, cluster: Cluster, files: Files, undo: UndoFile) -> None:
    """Create a new bookie: missing directories, and its cookie in all of them and the metadata store.

    The first start of a bookie does the same. Raises Conflict, naming the first problem; NotFound where there is no
    cluster; OSError.
    """
    found = problems_of_init(config, bookie_id, cluster)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise Conflict(f"{first.place} {first.problem}{more}", hint="'bkctl bookie init --check' lists all problems")
    cookie = cookies.configured_cookie(config, bookie_id, cluster.instance_id())
    for directory in cookies.configured_directories(config):
        if cookies.read_directory(directory) is None:
            undo.record_file(cookies.version_file(directory), cookie.serialize())
    cookies.stamp_or_verify(config, bookie_id, undo.recorded(), files)


def existing(directories: Iterable[str | Path]) -> list[Path]:
    """Return the `directories` that exist."""
    return [path for path in map(Path, directories) if path.is_dir()]
