"""IndexPersistenceMgr: the index files of Interleaved and SortedLedgerStorage, one a ledger.

A file has the ledger's master key, fence and explicit LAC in its header, then 8 bytes an entry: its location. Files of
scope 0 are two levels deep below `current`, files of other scopes four. The callers choose which locations are written
and when. Source: IndexPersistenceMgr, FileInfo, FileInfoBackingCache; BP-35.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Final

from bkctl.disk import DISK_FULL, Files, StorageFile
from bkctl.errors import Corrupt
from bkctl.formats import index as formats
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.ledger.ledger_handle import LedgerHandle

SWAP: Final = sys.byteorder == "little"
#: Fingerprint, version, key length, master key, state bits.
_HEADER_SIZE_MIN: Final = 36
#: Bytes of a header besides master key and explicit LAC.
_HEADER_FIXED_SIZE: Final = 20
_HEX_DIGITS: Final = frozenset("0123456789abcdef")
_COPIED_BYTES: Final = 1 << 20
_RELOCATED: Final = ".rloc"
#: Directories of scoped ledgers that a start looks at to prune, and empty ones that are kept for the next checkpoint.
PRUNED_AT_START_MAX: Final = 20_000
_EMPTY_MAX: Final = 100_000

#: One file's own failures: damage below it, or a size beyond what the file system or RLIMIT_FSIZE allows.
_FILE_FAILED: Final = frozenset({errno.EIO, errno.EFBIG})


class IndexFileFailed(OSError):
    """The disk refuses the content of one index file (EIO, EFBIG); other files of its directory may be writable."""


@dataclass(slots=True, eq=False, repr=False)
class IndexedHandle(LedgerHandle):
    """A ledger whose index file is, or will be, at `index_path`. `indexed_last` is the highest entry id in its pages.

    `page` has the last added entry, `page_number` is its number, −1 when it may have left memory.
    """

    index_path: Path
    indexed_last: int = -1
    page: array[int] = field(default_factory=lambda: array("Q"))
    page_number: int = -1


class IndexPersistenceMgr:
    """The index files in `directories`, at most `open_file_limit` of them open.

    Any thread may call every method, but only one at a time may `write` a ledger. `pick_directory` returns the number
    of the directory for a new file, `is_writable` whether a directory takes files.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        files: Files,
        *,
        page_size: int,
        open_file_limit: int,
        version: int,
        pick_directory: Callable[[], int],
        is_writable: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.directories = tuple(directories)
        # With many small ledgers Path objects are costly: most lookups use text.
        self._prefixes = [f"{directory}/" for directory in self.directories]
        self._files = files
        self._page_size = page_size
        self._padding = memoryview(bytes(page_size))
        self._slots = page_size // 8
        # Entry logs, journals and connections need descriptors too.
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._open_file_limit = min(open_file_limit, allowed) if allowed > 0 else open_file_limit
        self._version, self._pick_directory, self._is_writable = version, pick_directory, is_writable
        self._lock, self._names_lock = threading.Lock(), threading.RLock()
        self._open: OrderedDict[LedgerId, StorageFile] = OrderedDict()
        #: A file opened before this counter changed may belong to a deleted ledger.
        self._generation = 0
        self._doomed: dict[LedgerId, None] = {}
        #: Empty directories of scoped ledgers that `ledgers` met.
        self._empty: list[Path] = []
        #: Directories with new names in them.
        self._unsynced: dict[Path, None] = {}

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def load(self, ledger: LedgerId) -> IndexedHandle | None:
        """Return a handle with the state in the ledger's file, None without. Raises OSError, Corrupt, Unsupported.

        A file without the start of its header gives a handle with `index_error`, for replay to write the header again:
        a crash of Apache's bookie may have come before its header was on disk.
        """
        generation = self._generation
        path = self._find(ledger)
        if path is None:
            return None
        file = self._file_at(ledger, path, generation)
        data = _read(file, 0, formats.HEADER_SIZE)
        handle = IndexedHandle(ledger, b"", path)
        if len(data) < _HEADER_SIZE_MIN or data[:4] == bytes(4):
            handle.index_error = Corrupt(f"{path}: the start of the ledger's index is missing")
        else:
            header = formats.read_header(data, where=str(path))
            handle.master_key, handle.fenced = header.master_key, header.fenced
            handle.explicit_lac = header.explicit_lac or b""
            handle.is_on_disk = True
        handle.lac_is_known = False
        handle.last_entry = handle.indexed_last = self._last_entry(file)
        return handle

    def load_pages(self, ledger: LedgerId) -> IndexedHandle | None:
        """Return a handle to move entries of a ledger, None without a file; reads none of it. Raises OSError.

        Only its pages may be written; the header stays unchanged.
        """
        path = self._find(ledger)
        return None if path is None else IndexedHandle(ledger, b"", path, is_on_disk=True)

    def create(self, ledger: LedgerId, master_key: bytes = b"") -> IndexedHandle:
        """Return a handle for a ledger that has no file.

        The first `write` creates the file. Raises OSError.
        """
        if ledger in self._doomed:  # most creations need not wait for the lock
            for directory in self._remove(ledger, prunes=False):
                self._files.sync_directory(directory)
        path = self._find(ledger) or Path(self._prefixes[self._pick_directory()] + formats.index_path(ledger))
        return IndexedHandle(ledger, master_key, path)

    def doom(self, ledger: LedgerId) -> None:
        """Ignore the ledger's file from now on; `remove_doomed` deletes it. Does not wait for the disk.

        The ledger's handles must be marked `deleted` before.
        """
        # Without the lock on names, which others hold while they wait for the disk: a file that gets its name just now
        # is deleted too, since deletion takes that lock.
        self._doomed[ledger] = None
        self._forget(ledger)

    @property
    def has_doomed(self) -> bool:
        """Return whether `remove_doomed` has files or directories to delete."""
        return bool(self._doomed or self._empty)

    def remove_doomed(self) -> None:
        """Delete the files of doomed ledgers, durably, and the empty directories found, while no `write` runs.

        Raises OSError; the next call deletes the rest.
        """
        changed: set[Path] = set()
        for ledger in list(self._doomed):
            changed |= self._remove(ledger)
        for directory in self._empty:
            self._prune(directory)
        self._empty = []
        for directory in changed:
            with suppress(FileNotFoundError):
                self._files.sync_directory(directory)

    def _remove(self, ledger: LedgerId, *, prunes: bool = True) -> set[Path]:
        """Delete the files of a ledger that is still doomed, and its empty directories; return those to sync."""
        changed = set()
        with self._names_lock:
            if ledger in self._doomed:
                self._forget(ledger)
                for directory in self.directories:
                    path = directory / formats.index_path(ledger)
                    found = [file for file in (path, path.with_name(f"{path.name}{_RELOCATED}")) if file.exists()]
                    for file in found:
                        self._files.remove(file)
                    if found:
                        changed.add(self._prune(path.parent) if ledger.is_scoped and prunes else path.parent)
                del self._doomed[ledger]
        return changed

    def _prune(self, directory: Path) -> Path:
        """Remove a scoped ledger's directory and its parents as far as they are empty; return the first that stays."""
        while directory not in self.directories:
            try:
                self._files.remove_directory(directory)
            except OSError:
                break
            directory = directory.parent
        return directory

    def prune(self) -> None:
        """Remove empty directories that scoped ledgers left, before any other use. Raises OSError.

        Looks at so many only that no start waits; `ledgers` finds the others.
        """
        directories = chain.from_iterable(_scoped_directories(root, depth=0) for root in self.directories)
        for directory in islice(directories, PRUNED_AT_START_MAX):
            self._prune(directory)

    def ledgers(self) -> set[int]:
        """Return the 128-bit number of every ledger with a file; reads the index directories.

        Raises OSError, also if a directory is missing: its ledgers may still exist.
        """
        found: set[int] = set()
        empty: list[Path] = []
        for directory in self.directories:
            found.update(ledger.value for ledger in _ledgers_in(directory, depth=0, empty=empty))
        self._empty = empty
        found.difference_update(ledger.value for ledger in list(self._doomed))
        return found

    def has_scoped_ledgers(self) -> bool:
        """Return whether any ledger of a scope other than 0 has an index file."""
        return any(
            next(_ledgers_in(Path(entry.path), depth=1), None) is not None
            for directory in self.directories
            if directory.is_dir()
            for entry in os.scandir(directory)
            if _is_scoped(entry)
        )

    def _find(self, ledger: LedgerId) -> Path | None:
        """Return the path of the ledger's file, None for none. Raises OSError, also if a directory is missing."""
        if ledger in self._doomed:
            return None
        path = self._look_for(ledger)
        if path is None:
            with self._names_lock:  # the file may just have moved to a directory searched before
                path = self._look_for(ledger)
        if path is None:
            for prefix in self._prefixes:
                os.stat(prefix)
        return path

    def _look_for(self, ledger: LedgerId) -> Path | None:
        paths = [prefix + formats.index_path(ledger) for prefix in self._prefixes]
        for path in paths:
            if _exists(path):
                return Path(path)
        for path in paths:
            # A file moves to another directory under this temporary name; a crash may have left it.
            if _exists(path + _RELOCATED):
                relocated, target = Path(path + _RELOCATED), Path(path)
                with self._names_lock, suppress(FileNotFoundError):
                    self._files.rename(relocated, target)
                    self._files.sync_directory(relocated.parent)
                return target
        return None

    # --- files -------------------------------------------------------------------------------------------------------

    def _file_of(self, ledger: LedgerId) -> StorageFile | None:
        with self._lock:
            file = self._open.get(ledger)
            if file is not None:
                self._open.move_to_end(ledger)
                return file
            generation = self._generation
        path = self._find(ledger)
        return None if path is None else self._file_at(ledger, path, generation)

    def _file_at(self, ledger: LedgerId, path: Path, generation: int) -> StorageFile:
        """Return the open file at `path`, which was found at that generation."""
        with self._lock:
            file = self._open.get(ledger)
        if file is None or file.path != path:
            file = self._keep(ledger, self._files.open(path), generation)
        return file

    def _keep(self, ledger: LedgerId, file: StorageFile, generation: int) -> StorageFile:
        with self._lock:
            if generation == self._generation and ledger not in self._doomed:
                self._open[ledger] = file
                self._open.move_to_end(ledger)
                if len(self._open) > self._open_file_limit:
                    self._open.popitem(last=False)
        return file

    def _forget(self, ledger: LedgerId) -> None:
        with self._lock:
            self._open.pop(ledger, None)
            self._generation += 1

    def _last_entry(self, file: StorageFile) -> int:
        """Return the highest entry id with a location, −1 for none."""
        number = (file.size() - formats.HEADER_SIZE - 1) // self._page_size
        last = self._last_in_page(file, number) if number >= 0 else -1
        if last >= 0:
            return last
        # The file may end with a large hole, after an entry with a high id: only pages with data are read.
        for begin, end in reversed(list(file.data(formats.HEADER_SIZE))):
            for number in reversed(self._pages_between(begin, end)):
                last = self._last_in_page(file, number)
                if last >= 0:
                    return last
        return -1

    def _last_in_page(self, file: StorageFile, number: int) -> int:
        page = self._page_in(file, number)
        slots = (slot for slot in range(len(page) - 1, -1, -1) if page[slot])
        return next((number * self._slots + slot for slot in slots), -1)

    def _pages_between(self, begin: int, end: int) -> range:
        """Return the numbers of the pages with bytes in `begin` … `end` of an index file."""
        first, last = ((at - formats.HEADER_SIZE) // self._page_size for at in (begin, end - 1))
        return range(first, last + 1)

    def read_page(self, ledger: LedgerId, number: int) -> array[int]:
        """Return one page of locations, up to its last one; empty without a file. Raises OSError, Corrupt."""
        # An entry log, or a client, may name entries that no index file can have.
        is_possible = 0 <= number * self._slots <= formats.ENTRY_ID_MAX
        file = self._file_of(ledger) if is_possible else None
        return array("Q") if file is None else self._page_in(file, number)

    def pages_on_disk(self, ledger: LedgerId) -> Iterator[int]:
        """Yield the numbers of the pages that the ledger's file has, ascending, without its holes. Raises OSError."""
        file = self._file_of(ledger)
        last = -1
        for begin, end in () if file is None else file.data(formats.HEADER_SIZE):
            for number in self._pages_between(begin, end):
                if number > last:
                    yield number
                    last = number

    def _page_in(self, file: StorageFile, number: int) -> array[int]:
        return _decode(_read(file, formats.HEADER_SIZE + number * self._page_size, self._page_size))

    def header_of(self, handle: IndexedHandle) -> bytes:
        """Return the ledger's current header in bytes, without the explicit LAC if a long master key leaves no room.

        Only an index file of another bookie has so long a key: ours refuses it.
        """
        lac = handle.explicit_lac
        room = formats.HEADER_SIZE - _HEADER_FIXED_SIZE - len(handle.master_key)
        return formats.write_header(
            handle.master_key,
            fenced=handle.fenced,
            explicit_lac=lac if lac and len(lac) <= room else None,
            version=self._version,
        )

    def make_directories(self, handles: Iterable[IndexedHandle]) -> None:
        """Create the directories for new files of these ledgers, durably, with one sync a directory. Raises OSError."""
        for handle in handles:
            if not handle.is_on_disk and not handle.deleted:
                with suppress(OSError):  # `write` gets the same error
                    self._check_directory(handle)
                    self._files.make_directory(handle.index_path.parent, unsynced=self._unsynced)
        for directory in list(self._unsynced):
            with suppress(FileNotFoundError):  # pruned since a flush that failed
                self._files.sync_directory(directory)
            del self._unsynced[directory]

    def _check_directory(self, handle: IndexedHandle) -> None:
        """Raise OSError if the index directory is missing: an unmounted disk must not pass for an empty one."""
        path = str(handle.index_path)
        os.stat(next(prefix for prefix in self._prefixes if path.startswith(prefix)))

    def write(self, handle: IndexedHandle, header: bytes | None, pages: Mapping[int, bytes]) -> None:
        """Write a header and pages by number, durably; create a missing file, with its header.

        Pages may lack zeros at their ends. A file in a full directory moves to another one. A deleted ledger is
        ignored. Raises OSError; IndexFileFailed if the disk fails within this file: then write all of them again.
        """
        try:
            self._write(handle, header, pages)
        except OSError as error:
            target = self._elsewhere(handle.index_path) if error.errno in DISK_FULL else None
            if target is None:
                raise
            self._leave(handle, target)
            self._write(handle, header, pages)

    def _write(self, handle: IndexedHandle, header: bytes | None, pages: Mapping[int, bytes]) -> None:
        ledger = handle.ledger
        self._check_directory(handle)
        # Without the lock, which the event loop may need: each created directory is synced.
        self._files.make_directory(handle.index_path.parent)
        with self._names_lock:
            if handle.deleted or ledger in self._doomed:
                return
            generation = self._generation
            known = self._file_of(ledger)
            if known is not None:
                file, path = known, known.path
                handle.index_path = path
            else:
                # Only a complete file gets the name.
                path = handle.index_path
                file = self._files.open(_new_name(path), create=True)
                file.truncate(0)
        if not handle.is_on_disk:
            header = header or self.header_of(handle)
        try:
            self._write_to(file, header, pages)
        except OSError as error:
            if error.errno not in _FILE_FAILED:
                raise
            raise IndexFileFailed(error.errno, error.strerror, str(file.path)) from error
        if known is None:
            with self._names_lock:
                if handle.deleted or ledger in self._doomed:
                    self._files.remove(file.path)
                    return
                self._files.rename(file.path, path)
            self._files.sync_directory(path.parent)
            file.path = path
            self._keep(ledger, file, generation)
        handle.is_on_disk = True

    def _write_to(self, file: StorageFile, header: bytes | None, pages: Mapping[int, bytes]) -> None:
        if header is not None:
            file.write(0, (header,))
        numbers = sorted(pages)
        start = 0
        for end in range(1, len(numbers) + 1):
            if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
                run: list[Buffer] = []
                for number in numbers[start:end]:
                    page = pages[number]
                    run.append(page)
                    if len(page) < self._page_size:
                        run.append(self._padding[len(page) :])
                file.write(formats.HEADER_SIZE + numbers[start] * self._page_size, run)
                start = end
        file.sync()

    def check_disk(self, handle: IndexedHandle) -> None:
        """Write, sync and remove a small file beside the ledger's. Raises OSError: the disk fails, not one file."""
        path = handle.index_path.with_name("disk.check")
        try:
            with self._files.open(path, create=True) as file:
                file.write(0, (self._padding,))
                file.sync()
        finally:
            self._files.remove(path)

    def _elsewhere(self, path: Path) -> Path | None:
        for number, directory in enumerate(self.directories):
            if directory not in path.parents and self._is_writable(number):
                return directory / path.relative_to(next(root for root in self.directories if root in path.parents))
        return None

    def _leave(self, handle: IndexedHandle, target: Path) -> None:
        """Move a ledger's file to another directory; a crash leaves the old file or `.rloc`, complete.

        Source: IndexPersistenceMgr.moveLedgerIndexFile, FileInfo.moveToNewLocation.
        """
        file = self._file_of(handle.ledger)
        if file is None:
            self._files.remove(_new_name(handle.index_path))
            handle.index_path = target
            return
        self._files.make_directory(target.parent)
        relocated = target.with_name(f"{target.name}{_RELOCATED}")
        with self._files.open(relocated, create=True) as copy:
            copy.truncate(0)
            # With its holes: a high entry id makes a file that no disk could hold without them.
            for begin, end in file.data(0):
                for offset in range(begin, end, _COPIED_BYTES):
                    copy.write(offset, (file.read(offset, min(_COPIED_BYTES, end - offset)),))
            copy.truncate(file.size())
            copy.sync()
        self._files.sync_directory(target.parent)
        with self._names_lock:
            if handle.deleted or handle.ledger in self._doomed:
                self._files.remove(relocated)
                return
            self._forget(handle.ledger)
            self._files.remove(handle.index_path)
            self._files.sync_directory(handle.index_path.parent)
            self._files.rename(relocated, target)
            self._files.sync_directory(target.parent)
            handle.index_path = target


def _read(file: StorageFile, offset: int, size: int) -> Buffer:
    """Return bytes of an index file. Raises OSError; Corrupt if the disk fails there: only this ledger is affected."""
    try:
        return file.read(offset, size)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Corrupt(f"{file.path}: the disk fails at byte {offset}: {error.strerror}") from error


def _new_name(path: Path) -> Path:
    return Path(f"{path}.new")


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _decode(data: Buffer) -> array[int]:
    """Return the locations in a page of a file, without the zeros at its end: many ledgers have few entries."""
    page = array("Q")
    used = len(bytes(data[: len(data) // 8 * 8]).rstrip(b"\0"))
    page.frombytes(data[: -(-used // 8) * 8])
    if SWAP:
        page.byteswap()
    return page


def _is_scoped(entry: os.DirEntry[str]) -> bool:
    return len(entry.name) == 8 and _HEX_DIGITS.issuperset(entry.name) and entry.is_dir()


def _scoped_directories(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the directories of scoped ledgers below one `current/` directory (depth 0), or in it, deepest first."""
    for entry in filter(_is_scoped, list(os.scandir(directory))):
        path = Path(entry.path)
        if depth < 2:
            yield from _scoped_directories(path, depth + 1)
        yield path


def _ledgers_in(directory: Path, depth: int, empty: list[Path] | None = None) -> Iterator[LedgerId]:
    """Yield the ledgers of the index files below one `current/` directory (depth 0) or a directory in it.

    `empty` gets some of the directories of scoped ledgers in which nothing is.
    """
    is_empty = True
    for entry in os.scandir(directory):
        is_empty = False
        if entry.is_dir():
            if len(entry.name) <= 8 and _HEX_DIGITS.issuperset(entry.name) and depth < 4:
                yield from _ledgers_in(Path(entry.path), depth + 1, empty)
        elif (ledger := formats.ledger_of_index_path(entry.path.removesuffix(_RELOCATED))) is not None:
            yield ledger
    if is_empty and depth and len(directory.name) == 8 and empty is not None and len(empty) < _EMPTY_MAX:
        empty.append(directory)
