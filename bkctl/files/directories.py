"""The contents of a bookie's directories: journals, entry logs, indexes, marks and cookies, found and named.

    <journal dir>/current/  VERSION, <hex>.txn                        scoped/<hex>.txn, set aside by a downgrade
    <ledger dir>/current/   VERSION, <hex>.log, lastId, lastMark[.n]  scoped/<hex>.log, scoped/lastId
    <index dir>/current/    VERSION, index files in two levels of directories (four for scoped ledgers),
                            or the RocksDB directories of DbLedgerStorage

Source: LedgerDirsManager, Journal.listJournalIds, DefaultEntryLogger, IndexPersistenceMgr, DbLedgerStorage; BP-35.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bkctl.errors import BkctlError, NotFound, UsageError
from bkctl.formats import entry_log, index, journal
from bkctl.formats.names import CONVERSION_NAME, COOKIE_NAME, LAST_ID_NAME, ROCKSDB_NAMES, SCOPED_DIRECTORY, STATUS_NAME
from bkctl.ids import LedgerId

if TYPE_CHECKING:
    from bkctl.formats.metadata import Cookie

#: Backups of rebuilds: Apache's shell leaves them beside a database, ours beside any replaced file or directory.
_BACKUP = re.compile(
    r"(?:ledgers\.PREV|locations\.BACKUP)-[0-9TZ:.\-]+|.+\.backup-[0-9]{8}T[0-9]{6}Z(?:-[0-9]+)?", re.ASCII
)
#: Unfinished results of rebuilds and conversions.
_UNFINISHED = re.compile(rf"ledgers\.TEMP-[0-9TZ:.\-]+|.+\.(?:unfinished|new)|{re.escape(CONVERSION_NAME)}", re.ASCII)
_LAST_MARK = re.compile(r"lastMark(?:\.([0-9]{1,9}))?", re.ASCII)
_LEVEL = re.compile(r"[0-9a-f]{1,2}|[0-9a-f]{8}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,20}", re.ASCII)
#: Hexadecimal with 0x, or with a letter among its digits.
_HEX = re.compile(r"0[xX]([0-9a-fA-F]{1,16})|(?=[0-9]*[a-fA-F])([0-9a-fA-F]{1,16})", re.ASCII)


class FileKind(StrEnum):
    """The kind of a file or directory of a bookie; the values are the words of every output."""

    JOURNAL = "journal"
    ENTRY_LOG = "entryLog"
    INDEX = "index"
    ROCKSDB = "rocksdb"
    COOKIE = "cookie"
    LAST_MARK = "lastMark"
    LAST_ID = "lastId"
    STATUS = "status"
    DIRTY = "dirty"
    COMPACTION = "compaction"
    RELOCATION = "relocation"
    BACKUP = "backup"
    UNFINISHED = "unfinished"
    #: Not a file of a bookie.
    UNKNOWN = "unknown"


class BookieFile(NamedTuple):
    """One file of a bookie. `id` is a journal's or log's id, an index file's ledger, the journal index of a last mark.

    `size` is in bytes (of a directory: of the files in it), `mtime_ms` since the epoch. `scoped` files are for scoped
    ledgers and have an id space of their own.
    """

    kind: FileKind
    id: int | LedgerId | None
    path: Path
    size: int
    mtime_ms: int
    scoped: bool


class BookieDirectories:
    """The directories of one bookie, or any directories to look at; each with or without its `current`.

    The same directory may be given in several roles; its files are found once.
    """

    def __init__(
        self,
        journal_dirs: Iterable[Path | str] = (),
        ledger_dirs: Iterable[Path | str] = (),
        index_dirs: Iterable[Path | str] = (),
    ) -> None:
        self.journal_dirs = tuple(map(Path, journal_dirs))
        self.ledger_dirs = tuple(map(Path, ledger_dirs))
        self.index_dirs = tuple(map(Path, index_dirs)) or self.ledger_dirs

    @classmethod
    def at(cls, *directories: Path | str) -> BookieDirectories:
        """Return the directories of a command line, each in every role.

        A directory that only contains directories of a bookie (`bookie-0` with `journal` and `ledgers`) stands for
        those.
        """
        places = [place for directory in directories for place in bookie_directories(Path(directory))]
        return cls(places, places, places)

    def of_a_bookie(self) -> BookieDirectories:
        """Return self. Raises NotFound if no directory has a file of a bookie, or one has none and another a cookie."""
        places = list(dict.fromkeys(self.journal_dirs + self.ledger_dirs + self.index_dirs))
        empty = [each for each in places if all(file.kind is FileKind.UNKNOWN for file in type(self)([each]).files())]
        if empty == places or (empty and self.cookies()):  # A bookie writes its cookie in each of its directories.
            hint = None if empty == places else "are all of its disks mounted? --dir names only those that are"
            raise NotFound(f"No files of a bookie in {', '.join(map(str, empty))}", hint=hint)
        return self

    def with_ledgers(self) -> BookieDirectories:
        """Return self. Raises NotFound if every directory has journals, and none an index, entry log or last mark."""
        if all(map(_has_only_journals, self.ledger_dirs)):
            raise NotFound(
                f"No index and no entry log in {', '.join(map(str, self.ledger_dirs))}, but journals",
                hint="name the bookie's ledger directories, too",
            )
        return self

    def files(self) -> Iterator[BookieFile]:
        """Yield the bookie's files, directory by directory, in each by kind, then by id.

        Raises NotFound for a missing directory.
        """
        for directory in dict.fromkeys(map(current_of, self.journal_dirs + self.ledger_dirs + self.index_dirs)):
            yield from _sorted(_plain_files(directory))
            yield from _index_files(directory)

    def journals(self) -> list[BookieFile]:
        """Return the journal files in order of their ids, directory by directory. Raises NotFound."""
        return self._of_kind(self.journal_dirs, FileKind.JOURNAL)

    def entry_logs(self) -> list[BookieFile]:
        """Return the entry logs in order of their ids, directory by directory, scoped ones last. Raises NotFound."""
        return self._of_kind(self.ledger_dirs, FileKind.ENTRY_LOG)

    def compaction_logs(self) -> list[BookieFile]:
        """Return the files of unfinished transactional compactions, in the order of `entry_logs`. Raises NotFound.

        They hold copies of entries that are in a log too.
        """
        return self._of_kind(self.ledger_dirs, FileKind.COMPACTION)

    def last_marks(self) -> list[BookieFile]:
        """Return the last mark files of the ledger directories. Raises NotFound."""
        return self._of_kind(self.ledger_dirs, FileKind.LAST_MARK)

    def cookies(self) -> list[BookieFile]:
        """Return the `VERSION` files of all directories. Raises NotFound."""
        return self._of_kind(self.journal_dirs + self.ledger_dirs + self.index_dirs, FileKind.COOKIE)

    def rocksdbs(self) -> list[BookieFile]:
        """Return DbLedgerStorage's database directories. Raises NotFound."""
        return self._of_kind(self.index_dirs, FileKind.ROCKSDB)

    def indexes(self) -> Iterator[BookieFile]:
        """Yield the ledger index files, relocated ones too, sorted level by level. Raises NotFound."""
        for directory in dict.fromkeys(map(current_of, self.index_dirs)):
            for file in _index_files(directory):
                if file.kind in (FileKind.INDEX, FileKind.RELOCATION):
                    yield file

    def resolve_journal(self, text: str) -> Path:
        """Return the journal file that `text` names: decimal or hex id, `scoped/ID`, file name, or path.

        Digits alone are decimal; hex is marked by 0x or a letter.

        Raises NotFound; UsageError for another text, or one that fits several files.
        """
        return self._resolve(text, "journal", self.journal_dirs, journal.file_name, journal.journal_id_of)

    def resolve_entry_log(self, text: str) -> Path:
        """Return the entry log file that `text` names: decimal or hex id, `scoped/ID`, file name or path.

        Digits alone are decimal; hex is marked by 0x or a letter. File names of compactions count too. Raises NotFound;
        UsageError for another text, or one that fits several files.
        """
        return self._resolve(text, "entry log", self.ledger_dirs, entry_log.file_name, entry_log.content_id_of)

    def _of_kind(self, directories: Iterable[Path], kind: FileKind) -> list[BookieFile]:
        currents = dict.fromkeys(map(current_of, directories))
        return [file for directory in currents for file in _sorted(_plain_files(directory)) if file.kind is kind]

    def _resolve(
        self,
        text: str,
        what: str,
        directories: tuple[Path, ...],
        name_of: Callable[[int], str],
        id_of: Callable[[str], int | None],
    ) -> Path:
        currents = list(dict.fromkeys(map(current_of, directories)))
        subdirectory, slash, rest = text.rpartition("/")
        number = _parse_id(rest)
        if number is not None and subdirectory in ("", SCOPED_DIRECTORY) and (slash == "") == (not subdirectory):
            places = [current / subdirectory for current in currents]
            candidates = [place / name_of(number) for place in places]
            # Bare hex may be a file's name as well.
            is_decimal = _DECIMAL.fullmatch(rest) is not None
            candidates += [] if slash or is_decimal or rest[1] in "xX" else [Path(text)]
            in_hex = name_of(int(rest, 16))
            is_missing = not any(path.is_file() for path in candidates)
            if is_decimal and is_missing and any((place / in_hex).is_file() for place in places):
                raise NotFound(
                    f"There is no {what} {text} (decimal)", hint=f"{in_hex} is {subdirectory}{slash}0x{rest}"
                )
            scoped = [current / SCOPED_DIRECTORY / name_of(number) for current in currents]
            if not subdirectory and is_missing and any(path.is_file() for path in scoped):
                raise NotFound(f"There is no {what} {text} of scope 0", hint=f"give {SCOPED_DIRECTORY}/{text}")
        elif subdirectory in ("", SCOPED_DIRECTORY) and id_of(rest) is not None:
            places = [current / subdirectory for current in currents]
            if not subdirectory:
                places += [current / SCOPED_DIRECTORY for current in currents]
            candidates = [place / rest for place in places] + [Path(text)]
        elif "\0" in text or not text:
            raise UsageError(f"Not the name of any {what}: {text!r}", hint="give an id, a file name or a path")
        elif slash or Path(text).exists():
            candidates = [Path(text)]
        else:
            raise UsageError(
                f"Not the name of any {what}: {text!r}",
                hint=f"give an id, scoped/ID, a file name ({name_of(26)}) or a path",
            )
        found: dict[Path, Path] = {}
        for path in candidates:
            if path.is_file():
                found.setdefault(path.resolve(), path)
        return _only(list(found.values()), text, what, directories)


def current_of(directory: Path) -> Path:
    """Return the directory of a bookie's files: `directory/current`, or `directory` itself if that is missing.

    Raises NotFound if `directory` does not exist, UsageError if it is a file.
    """
    if _has_current(directory):
        return directory / "current"
    if directory.is_dir():
        return directory
    if directory.exists():
        raise UsageError(f"{directory} is a file, a directory is needed")
    hint = "a directory of a bookie is needed; commands about single ledgers have --ledger"
    raise NotFound(f"Directory {directory} does not exist", hint=hint if str(directory).isdecimal() else None)


def cookie_at(current: Path) -> Cookie | None:
    """Return the cookie in a directory of a bookie's files; None without a readable one."""
    from bkctl.formats.metadata import Cookie

    try:
        return Cookie.parse((current / COOKIE_NAME).read_bytes())
    except (OSError, BkctlError):
        return None


def bookie_directories(directory: Path) -> list[Path]:
    """Return the directories with a `current` in `directory`; `directory` itself if it has one, or none has.

    Raises BkctlError if `directory` cannot be listed.
    """
    if _has_current(directory) or not directory.is_dir():
        return [directory]
    found = [Path(entry.path) for entry in _list(directory) if _is_directory(entry) and _has_current(Path(entry.path))]
    return found or [directory]


def _has_only_journals(directory: Path) -> bool:
    place = BookieDirectories([directory], [directory])
    if not place.journals() or place.entry_logs() or place.rocksdbs() or place.last_marks():
        return False
    return next(place.indexes(), None) is None


def _has_current(directory: Path) -> bool:
    return (directory / "current").is_dir()


def _only(paths: list[Path], name: str, what: str, directories: Iterable[Path]) -> Path:
    if len(paths) == 1:
        return paths[0]
    if paths:
        listed = ", ".join(map(str, paths))
        raise UsageError(f"{len(paths)} files fit {what} {name}: {listed}", hint="give the path of one of them")
    where = ", ".join(map(str, directories))
    raise NotFound(
        f"There is no {what} {name}" + (f" in {where}" if where else ""),
        hint="'bkctl bookie files' lists the existing ones",
    )


def _parse_id(text: str) -> int | None:
    if match := _HEX.fullmatch(text):
        return int(match[1] or match[2], 16)
    return int(text) if _DECIMAL.fullmatch(text) else None


def _sorted(files: Iterable[BookieFile]) -> list[BookieFile]:
    def key(file: BookieFile) -> tuple[str, bool, int, str]:
        return file.kind.value, file.scoped, file.id if isinstance(file.id, int) else -1, file.path.name

    return sorted(files, key=key)


def _plain_files(current: Path) -> Iterator[BookieFile]:
    """Yield the files in `current` and `current/scoped`, without the index files."""
    for entry in _list(current):
        if entry.name == SCOPED_DIRECTORY and _is_directory(entry):
            for inner in _list(Path(entry.path)):
                if file := _plain_file(inner, scoped=True):
                    yield file
        elif not (_LEVEL.fullmatch(entry.name) and _is_directory(entry)) and (file := _plain_file(entry, scoped=False)):
            yield file


def _plain_file(entry: os.DirEntry[str], *, scoped: bool) -> BookieFile | None:
    name = entry.name
    kind, number = FileKind.UNKNOWN, None
    if _BACKUP.fullmatch(name):
        kind = FileKind.BACKUP
    elif _UNFINISHED.fullmatch(name):
        kind = FileKind.UNFINISHED
    elif not _is_directory(entry):
        kind, number = _classify(name)
    elif name in ROCKSDB_NAMES and not _has_current(Path(entry.path)):
        kind, scoped = FileKind.ROCKSDB, name.startswith("scoped")
    return describe(kind, number, Path(entry.path), scoped=scoped)


def _classify(name: str) -> tuple[FileKind, int | None]:
    if (number := journal.journal_id_of(name)) is not None:
        return FileKind.JOURNAL, number
    if (number := entry_log.log_id_of(name)) is not None:
        return FileKind.ENTRY_LOG, number
    if match := _LAST_MARK.fullmatch(name):
        return FileKind.LAST_MARK, int(match[1] or 0)
    if (compaction := entry_log.compaction_of(name)) is not None:
        return FileKind.COMPACTION, compaction.log_id
    return _NAMES.get(name, FileKind.UNKNOWN), None


_NAMES: Final = {
    COOKIE_NAME: FileKind.COOKIE,
    LAST_ID_NAME: FileKind.LAST_ID,
    STATUS_NAME: FileKind.STATUS,
    "DIRTY": FileKind.DIRTY,
}


def _index_files(current: Path) -> Iterator[BookieFile]:
    for entry in _list(current):
        if _LEVEL.fullmatch(entry.name) and _is_directory(entry):
            yield from _index_level(Path(entry.path), current, 4 if len(entry.name) == 8 else 3, 2)


def _index_level(directory: Path, current: Path, depth: int, level: int) -> Iterator[BookieFile]:
    for entry in _list(directory):
        path = Path(entry.path)
        if level < depth and _LEVEL.fullmatch(entry.name) and _is_directory(entry):
            yield from _index_level(path, current, depth, level + 1)
            continue
        ledger = index.ledger_of_index_path(path.relative_to(current)) if entry.name.endswith(".idx") else None
        if ledger is not None:
            found = describe(FileKind.INDEX, ledger, path, scoped=ledger.is_scoped)
        elif entry.name.endswith(".idx.rloc"):
            found = describe(FileKind.RELOCATION, None, path, scoped=depth == 4)
        else:
            found = _plain_file(entry, scoped=depth == 4)
            if found and found.kind not in (FileKind.BACKUP, FileKind.UNFINISHED):
                found = found._replace(kind=FileKind.UNKNOWN, id=None)
        if found:
            yield found


def _list(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        # A running bookie may remove the directory meanwhile.
        return []
    except OSError as error:
        raise BkctlError(f"{directory} cannot be listed: {error.strerror or error}") from error


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def describe(kind: FileKind, number: int | LedgerId | None, path: Path, *, scoped: bool) -> BookieFile | None:
    """Return a file (or a directory that counts as one) as it is now; None if it was just deleted.

    A directory's size is the size of the files in it; 0 for an unknown directory, which may be a whole file system.
    A link to a missing file counts: reading it fails. Raises BkctlError if the path cannot be looked up.
    """
    try:
        try:
            status = path.stat()
        except OSError:
            status = path.lstat()
        is_directory = stat.S_ISDIR(status.st_mode)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BkctlError(f"{path} cannot be read: {error.strerror or error}") from error
    size = status.st_size
    if is_directory:
        size = 0 if kind is FileKind.UNKNOWN else _directory_size(path)
    return BookieFile(kind, number, path, size, status.st_mtime_ns // 1_000_000, scoped)


def _directory_size(directory: Path) -> int:
    size = 0
    for entry in _list(directory):
        try:
            if entry.is_dir(follow_symlinks=False):
                size += _directory_size(Path(entry.path))
            elif entry.is_file():
                size += entry.stat().st_size
        except OSError:
            continue
    return size
