"""The files of each bookie for a job, from directories, configurations and copies.

Jobs read files in place, so each path must mean the same on every executor: a mount, or this machine alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.config import BookieConfig, read_properties
from bkctl.errors import NotFound, UsageError
from bkctl.files.conversion import check_conversion
from bkctl.files.directories import BookieDirectories, FileKind, cookie_at, current_of
from bkctl.formats.entry_log import HEADER_SIZE
from bkctl.formats.names import COOKIE_NAME
from bkctl.ids import check_bookie_id
from bkctl.metadata.liveness import check_instance
from bkctl.spark.facts.frames import Facts
from bkctl.spark.sources.options import CONNECTION_OPTIONS, ClusterOptions, SourceOptions
from bkctl.spark.sources.places import bookie_id_at

if TYPE_CHECKING:
    from bkctl.metadata.cluster import Cluster


_DIRECTORY_KEYS: Final = ("ledgerDirectories", "journalDirectory", "journalDirectories")
#: Bytes of a file that show whether it is text.
_TEXT_SIZE_BYTES: Final = 1024
#: Bytes at the start of a log's record with its size, ledger and entry id.
_RECORD_START_SIZE: Final = 28


class BookieFiles(NamedTuple):
    """One bookie's directories (the ones with files, `…/current`), as plain values."""

    bookie_id: str
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    index_dirs: tuple[str, ...]

    @property
    def directories(self) -> BookieDirectories:
        """Return the directories with methods that list their files."""
        return BookieDirectories(self.journal_dirs, self.ledger_dirs, self.index_dirs)

    def entry_logs(self) -> list[str]:
        """Return the paths of the entry logs, in order. Raises NotFound."""
        return [str(file.path) for file in self.directories.entry_logs()]

    def journals(self) -> list[str]:
        """Return the paths of the journals, in order, including those that a downgrade set aside. Raises NotFound."""
        return [str(file.path) for file in self.directories.journals()]

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise Conflict as `Facts.check_cluster`."""
        check_instance(cluster, [Path(path, COOKIE_NAME) for path in (*self.ledger_dirs, *self.journal_dirs)])


#: The input of jobs: bookies' directories, or their facts.
Bookies = Sequence[BookieFiles] | Facts


def find_bookies(places: Iterable[str | Path], left_out: list[Path] | None = None) -> list[BookieFiles]:
    """Return the bookies whose files are at `places`, in order of their ids.

    A place is a directory of a bookie, a directory above some (`bookie-0` with `journal` and `ledgers`, or a cluster's
    with `bookie-0`, `bookie-1` …), or a bookie's bk_server.conf. The bookie is the one in the directory's cookie
    (`VERSION`), else in another cookie of the same place, or the place names it: `BOOKIE_ID=PLACE`. Several places may
    belong to one bookie. Directories beside a bookie's that no cookie there names are copies, and go to `left_out`.
    Raises UsageError if nothing names a directory's bookie, if one of a bookie's directories is a copy of another, or
    for a file that is not a configuration; NotFound; Conflict and Corrupt as `check_conversion`.
    """
    found: dict[str, tuple[dict[str, None], dict[str, None], dict[str, None]]] = {}
    for place in places:
        for bookie_id, directories in _bookies_at(str(place), [] if left_out is None else left_out):
            bookie = found.setdefault(bookie_id, ({}, {}, {}))
            roles = (directories.journal_dirs, directories.ledger_dirs, directories.index_dirs)
            for into, paths in zip(bookie, roles, strict=True):
                into.update(dict.fromkeys(str(current_of(path).absolute()) for path in paths))
    if not found:
        raise UsageError("No files of bookies are given", hint="name their directories or bk_server.conf files")
    bookies = [BookieFiles(bookie_id, *map(tuple, found[bookie_id])) for bookie_id in sorted(found)]
    for each in bookies:
        _check_no_copies(each)
        for directory in each.index_dirs:
            check_conversion(Path(directory))
    return bookies


def open_store(connection: Mapping[str, str]) -> Cluster:
    """Return the open metadata store of the options of `bookkeeper.metadata`, which the caller closes."""
    return ClusterOptions(SourceOptions("The job", connection, CONNECTION_OPTIONS)).open()


def check_clusters(bookies: Bookies, connection: Mapping[str, str]) -> None:
    """Raise Conflict if a bookie's cookie names another cluster, in which all its ledgers would look dead."""
    with open_store(connection) as cluster:
        for each in [bookies] if isinstance(bookies, Facts) else bookies:
            each.check_cluster(cluster)


def _bookies_at(place: str, left_out: list[Path]) -> Iterator[tuple[str, BookieDirectories]]:
    """Yield the bookies of one place; a cluster's directory has several."""
    given, equals, rest = place.partition("=")
    bookie_id: str | None = None
    if equals and not Path(place).exists():
        bookie_id, place = check_bookie_id(given), rest
    path = Path(place)
    if path.is_file():
        with open(path, "rb") as file:
            is_text = b"\0" not in file.read(_TEXT_SIZE_BYTES)
        properties = read_properties(path) if is_text else None
        if properties is None or not any(key in properties for key in _DIRECTORY_KEYS):
            problem = f"{path} is not a configuration of a bookie"
            raise UsageError(problem, hint="give its bk_server.conf, or its directory")
        config = BookieConfig.from_properties(properties)
        directories = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
        yield bookie_id or _only_owner(place, directories), directories
        return
    if not path.is_dir():
        raise NotFound(f"{place} does not exist")
    directories, others = _used_directories(path)
    left_out += others
    if bookie_id is not None:
        if not _holds_bookie(path):
            raise NotFound(f"{place} has no files of a bookie")
        yield bookie_id, directories
        return
    if not _holds_bookie(path):
        inside = [child for child in sorted(path.iterdir()) if child.is_dir() and _holds_bookie(child)]
        for child in inside:
            yield from _bookies_at(str(child), left_out)
        if inside:
            return
    owners = {directory: bookie_id_at(current_of(directory)) for directory in directories.ledger_dirs}
    if len({owner for owner in owners.values() if owner}) > 1:
        for directory, owner in owners.items():
            single = BookieDirectories.at(directory)
            yield owner or _only_owner(str(directory), single), single
        return
    yield _only_owner(place, directories), directories


def _used_directories(path: Path) -> tuple[BookieDirectories, list[Path]]:
    """Return the directories in `path` that a bookie would use, and the others: copies, of which no cookie knows.

    The cookies in them name the bookie's directories. Only names count, for files may have been moved as a whole. While
    a named directory is absent, each of the others may be that directory renamed, and all count.
    """
    given = BookieDirectories.at(path)
    named: set[Path] = set()
    for directory in given.ledger_dirs:
        if (cookie := cookie_at(current_of(directory))) is not None:
            named.update(map(Path, (*cookie.journal_dirs, *cookie.ledger_dirs, *(cookie.index_dirs or ()))))
    names = {each.name for each in named}
    # A directory that is at its own place beside `path` is not one in `path` renamed.
    absent = [each for each in named if each.parent == path.absolute() or not each.is_dir()]
    used = [directory for directory in given.ledger_dirs if directory.name in names]
    others = [directory for directory in given.ledger_dirs if directory not in used]
    if path in given.ledger_dirs or not used or len(used) < len(absent):
        return given, []
    return BookieDirectories(used, used, used), others


def _check_no_copies(bookie: BookieFiles) -> None:
    """Raise UsageError if two ledger directories have the same log, in which all entries would count twice.

    The id of a log is not enough: DbLedgerStorage has ids of its own in each directory.
    """
    if len(bookie.ledger_dirs) == 1:
        return
    by_id: defaultdict[tuple[bool, object], list[Path]] = defaultdict(list)
    for log in bookie.directories.entry_logs():
        by_id[log.scoped, log.id].append(log.path)
    for paths in by_id.values():
        seen: dict[bytes, Path] = {}
        for path in paths if len(paths) > 1 else ():
            with suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(HEADER_SIZE)
                first_record = file.read(_RECORD_START_SIZE)
                if first_record and seen.setdefault(first_record, path) != path:
                    raise UsageError(
                        f"{seen[first_record]} and {path} are the same entry log of bookie {bookie.bookie_id}",
                        hint="give the bookie's files or their copy, not both",
                    )


def _holds_bookie(directory: Path) -> bool:
    """Return whether `directory` or a directory in it has files of a bookie."""
    return any(file.kind is not FileKind.UNKNOWN for file in BookieDirectories.at(directory).files())


def _only_owner(place: str, directories: BookieDirectories) -> str:
    """Return the bookie that the cookies of `directories` name. Raises UsageError, NotFound."""
    currents = dict.fromkeys(
        map(current_of, (*directories.journal_dirs, *directories.ledger_dirs, *directories.index_dirs))
    )
    owners = sorted({owner for current in currents if (owner := bookie_id_at(current)) is not None})
    if len(owners) == 1:
        return owners[0]
    if owners:
        raise UsageError(
            f"{place} has directories of several bookies: {', '.join(owners)}", hint="name them one by one"
        )
    if all(file.kind is FileKind.UNKNOWN for file in directories.files()):
        raise NotFound(f"{place} has no files of a bookie")
    raise UsageError(f"{place} has no cookie ({COOKIE_NAME}) that names its bookie", hint=f"give BOOKIE_ID={place}")
