"""Whose files a job looks at: directories, configurations and copies, put together bookie by bookie.

Jobs read files where they are, so each path must mean the same on every executor: a mount, or this machine alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.config import BookieConfig, read_properties
from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.files.directories import BookieDirectories, FileKind, current_of
from bkctl.formats.metadata import Cookie
from bkctl.formats.names import COOKIE_NAME
from bkctl.ids import check_bookie_id
from bkctl.metadata.liveness import check_instance
from bkctl.spark.sources.connection import CONNECTION_OPTIONS, ClusterOptions
from bkctl.spark.sources.options import SourceOptions

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster


_DIRECTORY_KEYS: Final = ("ledgerDirectories", "journalDirectory", "journalDirectories")
#: As much of a file as tells whether it is a text.
_TEXT_SIZE_BYTES: Final = 1024


class BookieFiles(NamedTuple):
    """One bookie's directories (each that holds files itself, so `…/current`), as plain values."""

    bookie_id: str
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    index_dirs: tuple[str, ...]

    @property
    def directories(self) -> BookieDirectories:
        """The same, to look into."""
        return BookieDirectories(self.journal_dirs, self.ledger_dirs, self.index_dirs)

    def entry_logs(self) -> list[str]:
        """The paths of its entry logs, in order. Raises NotFound."""
        return [str(each.path) for each in self.directories.entry_logs()]

    def journals(self) -> list[str]:
        """The paths of its journals, in order, those set aside by a downgrade too. Raises NotFound."""
        return [str(each.path) for each in self.directories.journals()]


def find_bookies(places: Iterable[str | Path]) -> list[BookieFiles]:
    """The bookies whose files are at `places`, by id.

    A place is a directory of a bookie, a directory that holds some (`bookie-0` with `journal` and `ledgers`, or a
    cluster's with `bookie-0`, `bookie-1` …), or a bookie's bk_server.conf. Whose a directory is, its cookie says
    (`VERSION`), or that of another directory of the same place, or the place itself, given as `BOOKIE_ID=PLACE`.
    Places of one bookie may be given one by one.
    Raises UsageError where nothing says whose a directory is, or two bookies share one, and for a file that is no
    configuration; NotFound.
    """
    found: dict[str, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    for place in places:
        for bookie_id, directories in _bookies_at(str(place)):
            known = found.setdefault(bookie_id, ({}, {}, {}))
            roles = (directories.journal_dirs, directories.ledger_dirs, directories.index_dirs)
            for into, paths in zip(known, roles, strict=True):
                into.update(dict.fromkeys(str(current_of(each).absolute()) for each in paths))
    if not found:
        raise UsageError("No files of bookies are given", hint="name their directories or bk_server.conf files")
    return [BookieFiles(each, *map(tuple, found[each])) for each in sorted(found)]


def open_store(connection: Mapping[str, str]) -> Cluster:
    """The metadata store that the options of `bookkeeper.metadata` name, on the driver or in a task; to be closed."""
    return ClusterOptions(SourceOptions("The job", connection, CONNECTION_OPTIONS)).open()


def check_clusters(bookies: Iterable[BookieFiles], connection: Mapping[str, str]) -> None:
    """Make sure that the bookies belong to this cluster, as their cookies say: in another all ledgers look dead, or
    are somebody else's.

    Raises Conflict.
    """
    with open_store(connection) as cluster:
        places = [Path(each) for bookie in bookies for each in (*bookie.ledger_dirs, *bookie.journal_dirs)]
        check_instance(cluster, [each / COOKIE_NAME for each in places])


def _bookies_at(place: str) -> Iterator[tuple[str, BookieDirectories]]:
    """The bookies of one place; of a cluster's directory several."""
    given, equals, rest = place.partition("=")
    bookie_id: str | None = None
    if equals and not Path(place).exists():
        bookie_id, place = check_bookie_id(given), rest
    path = Path(place)
    if path.is_file():
        config = _configuration(path)
        directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
        yield bookie_id or _only_owner(place, directories), directories
        return
    if not path.is_dir():
        raise NotFound(f"{place} does not exist")
    directories = BookieDirectories.at(path)
    if bookie_id is not None:
        if not _holds_bookie(path):
            raise NotFound(f"There is nothing of a bookie in {place}")
        yield bookie_id, directories
        return
    if not _holds_bookie(path):
        inside = [each for each in sorted(path.iterdir()) if each.is_dir() and _holds_bookie(each)]
        for each in inside:
            yield from _bookies_at(str(each))
        if inside:
            return
    owners = {each: _cookie_of(current_of(each)) for each in directories.ledger_dirs}
    if len({owner for owner in owners.values() if owner}) > 1:
        for each, owner in owners.items():
            yield owner or _only_owner(str(each), BookieDirectories.at(each)), BookieDirectories.at(each)
        return
    yield _only_owner(place, directories), directories


def _configuration(path: Path) -> BookieConfig:
    """A bookie's configuration. Raises UsageError for any other file, whose defaults would be nobody's directories."""
    with open(path, "rb") as file:
        is_text = b"\0" not in file.read(_TEXT_SIZE_BYTES)
    properties = read_properties(path) if is_text else None
    if properties is None or not any(key in properties for key in _DIRECTORY_KEYS):
        raise UsageError(f"{path} is no configuration of a bookie", hint="give its bk_server.conf, or its directory")
    return BookieConfig.from_properties(properties)


def _holds_bookie(directory: Path) -> bool:
    """Whether some of `directory`, or of what lies in it, is a bookie's."""
    return any(file.kind is not FileKind.UNKNOWN for file in BookieDirectories.at(directory).files())


def _only_owner(place: str, directories: BookieDirectories) -> str:
    currents = dict.fromkeys(
        map(current_of, (*directories.journal_dirs, *directories.ledger_dirs, *directories.index_dirs))
    )
    owners = sorted({owner for each in currents if (owner := _cookie_of(each)) is not None})
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise UsageError(
            f"{place} has directories of several bookies: {', '.join(owners)}", hint="name them one by one"
        )
    if all(file.kind is FileKind.UNKNOWN for file in directories.files()):
        raise NotFound(f"There is nothing of a bookie in {place}")
    raise UsageError(
        f"Nothing says whose files are in {place}: there is no cookie ({COOKIE_NAME})", hint=f"give BOOKIE_ID={place}"
    )


def _cookie_of(current: Path) -> str | None:
    """The bookie that the cookie in this directory names; None where there is none that can be read."""
    path = current / COOKIE_NAME
    try:
        return Cookie.parse(path.read_bytes(), str(path)).bookie_id
    except (OSError, BkctlError):
        return None
