"""LedgerIndex: where each ledger's entries are, its master key, fenced bit and explicit LAC; in memory and in files.

Locations are kept in pages of `pageSize` bytes, as the files are: changed pages stay in memory until a checkpoint
writes them, unchanged ones are a bounded cache. Source: IndexPersistenceMgr, IndexInMemPageMgr, FileInfo.
"""

from __future__ import annotations

import os
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bkctl.formats import index as formats
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import Move
from bkctl.storage.files import Files, StorageFile
from bkctl.storage.ledger_storage import LedgerHandle

#: Larger entry ids are refused: their slot would lie where file systems end.
ENTRY_ID_MAX: Final = (1 << 40) - 1
#: Unchanged pages kept in memory where `pageLimit` does not say.
CLEAN_PAGES_MAX: Final = 4096
_SWAP: Final = sys.byteorder == "little"
#: Fingerprint, version, key length, master key, state bits.
_HEADER_SIZE_MIN: Final = 36
_HEX_DIGITS: Final = frozenset("0123456789abcdef")


class IndexedHandle(LedgerHandle):
    """A ledger with an index file."""

    __slots__ = ("header_changed", "index_path", "page", "page_number")

    def __init__(self, ledger: LedgerId, master_key: bytes, index_path: Path) -> None:
        super().__init__(ledger, master_key)
        self.index_path = index_path
        self.header_changed = True
        #: The page that the last entry went to.
        self.page: array[int] = array("Q")
        self.page_number = -1


@dataclass(slots=True)
class IndexFlush:
    """Copies of what changed in the index, as a checkpoint writes it: headers, and pages by number."""

    headers: dict[LedgerId, tuple[IndexedHandle, bytes]]
    pages: dict[LedgerId, tuple[IndexedHandle, dict[int, bytes]]]


class LedgerIndex:
    """All ledgers of one bookie.

    Any thread may ask for a `location`; everything else but `write` belongs to one (the bookie's event loop).
    """

    def __init__(
        self,
        directories: Sequence[Path],
        files: Files,
        *,
        page_size: int,
        page_limit: int,
        handle_limit: int,
        version: int,
        pick_directory: Callable[[], int],
    ) -> None:
        self.directories = tuple(directories)
        self._files = files
        self._page_size = page_size
        self._slots = page_size // 8
        self._page_limit = page_limit if page_limit > 0 else CLEAN_PAGES_MAX
        self._handle_limit = handle_limit
        self._version = version
        self._pick_directory = pick_directory
        self.handles: dict[LedgerId, IndexedHandle] = {}
        self._pages: OrderedDict[tuple[LedgerId, int], array[int]] = OrderedDict()
        self._changed: dict[tuple[LedgerId, int], IndexedHandle] = {}
        self._changed_headers: dict[LedgerId, IndexedHandle] = {}
        self._in_flush: IndexFlush | None = None
        self._flushing_count = 0
        self._lock = threading.RLock()

    @property
    def changed_pages(self) -> int:
        """Pages that the next checkpoint has to write."""
        return len(self._changed)

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def get(self, ledger: LedgerId) -> IndexedHandle | None:
        """The ledger's handle, None when this bookie does not have it.

        Raises OSError, and Corrupt or Unsupported when its index file cannot be read.
        """
        handle = self.handles.get(ledger)
        if handle is None:
            path = self._find(ledger)
            handle = None if path is None else self._load(ledger, path)
            if handle is not None:
                self.handles[ledger] = handle
        return handle

    def create(self, ledger: LedgerId, master_key: bytes) -> IndexedHandle:
        """A handle for a ledger that this bookie does not have; its file is written at the next checkpoint."""
        path = self._find(ledger) or self.directories[self._pick_directory()] / formats.index_path(ledger)
        handle = IndexedHandle(ledger, master_key, path)
        self.handles[ledger] = handle
        self._changed_headers[ledger] = handle
        return handle

    def change_header(self, handle: IndexedHandle) -> None:
        """Let the next checkpoint write the header, which changed."""
        handle.header_changed = True
        self._changed_headers[handle.ledger] = handle

    def remove(self, handle: IndexedHandle) -> None:
        """Forget the ledger; the caller then lets the storage thread remove its file (`delete`)."""
        ledger = handle.ledger
        handle.deleted = True
        self.handles.pop(ledger, None)
        self._changed_headers.pop(ledger, None)
        for key in [key for key in self._pages if key[0] == ledger]:
            del self._pages[key]
            self._changed.pop(key, None)

    def delete(self, handle: IndexedHandle) -> None:
        """Remove the ledger's index file; no `write` may be under way."""
        for directory in self.directories:
            path = directory / formats.index_path(handle.ledger)
            if path.exists():
                self._files.remove(path)
                self._files.sync_directory(path.parent)

    def ledgers(self) -> set[LedgerId]:
        """Every ledger that this bookie has; reads the index directories."""
        found = {ledger for ledger, handle in self.handles.items() if not handle.deleted}
        for directory in self.directories:
            found.update(_ledgers_in(directory, depth=0))
        return found

    def has_scoped_ledgers(self) -> bool:
        """Whether any ledger of a scope other than 0 has an index file."""
        return any(
            next(_ledgers_in(Path(entry.path), depth=1), None) is not None
            for directory in self.directories
            if directory.is_dir()
            for entry in os.scandir(directory)
            if len(entry.name) == 8 and _HEX_DIGITS.issuperset(entry.name) and entry.is_dir()
        )

    def _find(self, ledger: LedgerId) -> Path | None:
        name = formats.index_path(ledger)
        for directory in self.directories:
            path = directory / name
            if path.exists():
                return path
        for directory in self.directories:
            # Apache moves an index file by way of this name; a crash may have left it.
            relocated = directory / f"{name}.rloc"
            if relocated.exists():
                self._files.rename(relocated, directory / name)
                self._files.sync_directory(relocated.parent)
                return directory / name
        return None

    def _load(self, ledger: LedgerId, path: Path) -> IndexedHandle | None:
        with self._files.open_to_read(path) as file:
            data = file.read(0, formats.HEADER_SIZE)
            if len(data) < _HEADER_SIZE_MIN or data[:4] == bytes(4):
                return None  # a crash came before the first header was on disk: whoever has the key writes it again
            header = formats.read_header(data, where=str(path))
            handle = IndexedHandle(ledger, header.master_key, path)
            handle.is_on_disk = True
            handle.header_changed = False
            handle.fenced = header.fenced
            handle.explicit_lac = header.explicit_lac or b""
            handle.lac_is_known = False
            handle.last_entry = self._last_entry(file)
        return handle

    def _last_entry(self, file: StorageFile) -> int:
        """The highest entry id with a location, −1 for none; sparse pages before the last ones are skipped over."""
        count = max(0, file.size() - formats.HEADER_SIZE) // 8
        while count > 0:
            start = (count - 1) // self._slots * self._slots
            page = self._decode(file.read(formats.HEADER_SIZE + start * 8, (count - start) * 8))
            for slot in range(len(page) - 1, -1, -1):
                if page[slot]:
                    return start + slot
            count = start
        return -1

    # --- locations ---------------------------------------------------------------------------------------------------

    def put(self, handle: IndexedHandle, entry_id: int, location: int) -> None:
        """Set the location of one entry (0 … ENTRY_ID_MAX)."""
        number, slot = divmod(entry_id, self._slots)
        if number != handle.page_number:
            with self._lock:
                handle.page = self._page(handle, number)
                handle.page_number = number
                self._changed[handle.ledger, number] = handle
        handle.page[slot] = location
        if entry_id > handle.last_entry:
            handle.last_entry = entry_id

    def location(self, handle: IndexedHandle, entry_id: int) -> int:
        """The entry's location, 0 when this bookie does not have it."""
        if not 0 <= entry_id <= handle.last_entry:
            return 0
        number, slot = divmod(entry_id, self._slots)
        with self._lock:
            return handle.page[slot] if number == handle.page_number else self._page(handle, number)[slot]

    def location_of(self, ledger: LedgerId, entry_id: int) -> int:
        """The entry's location, 0 when it or the ledger is not here; any thread. Raises OSError, Corrupt."""
        with self._lock:
            handle = self.handles.get(ledger)
            path = self._find(ledger) if handle is None else None
            if handle is None and path is not None:
                handle = self._load(ledger, path)
            return 0 if handle is None else self.location(handle, entry_id)

    def move(self, moves: Iterable[Move]) -> None:
        """Change locations that still are the old ones; durable on return. Raises OSError, Corrupt."""
        by_ledger: dict[LedgerId, list[Move]] = {}
        for move in moves:
            by_ledger.setdefault(move.ledger, []).append(move)
        for ledger, theirs in by_ledger.items():
            with self._lock:
                handle = self.handles.get(ledger)
                path = self._find(ledger) if handle is None else handle.index_path
                if handle is None and path is not None:
                    handle = self._load(ledger, path)
                if handle is None or path is None:
                    continue
                places = []
                for move in theirs:
                    if self.location(handle, move.entry_id) == move.old:
                        number, slot = divmod(move.entry_id, self._slots)
                        self._page(handle, number)[slot] = move.new
                        places.append(move)
                if not places or not handle.is_on_disk:
                    continue
                with self._files.open(path) as file:
                    for move in places:
                        file.write(formats.HEADER_SIZE + move.entry_id * 8, (move.new.to_bytes(8, "big"),))
                    file.sync()

    def pages(self, handle: IndexedHandle) -> dict[int, array[int]]:
        """Copies of the ledger's pages that are in memory, by page number."""
        with self._lock:
            return {number: page[:] for (ledger, number), page in self._pages.items() if ledger == handle.ledger}

    def locations(self, handle: IndexedHandle, in_memory: dict[int, array[int]]) -> Iterator[tuple[int, array[int]]]:
        """(first entry id, locations) page by page, from `in_memory` and the file; any thread may go through it."""
        count = handle.last_entry // self._slots + 1
        if not handle.is_on_disk:
            for number in sorted(in_memory):
                yield number * self._slots, in_memory[number]
            return
        with self._files.open_to_read(handle.index_path) as file:
            for number in range(count):
                page = in_memory.get(number)
                yield number * self._slots, self._read_page(file, number) if page is None else page

    def _page(self, handle: IndexedHandle, number: int) -> array[int]:
        key = (handle.ledger, number)
        page = self._pages.get(key)
        if page is None:
            page = self._read(handle, number)
            self._pages[key] = page
            if len(self._pages) > self._page_limit + self._pinned_count:
                self._evict_pages(key)
        else:
            self._pages.move_to_end(key)
        return page

    def _read(self, handle: IndexedHandle, number: int) -> array[int]:
        if not handle.is_on_disk or number * self._slots > handle.last_entry:
            return array("Q", bytes(self._page_size))
        with self._files.open_to_read(handle.index_path) as file:
            return self._read_page(file, number)

    def _read_page(self, file: StorageFile, number: int) -> array[int]:
        data = file.read(formats.HEADER_SIZE + number * self._page_size, self._page_size)
        page = self._decode(data)
        page.frombytes(bytes(self._page_size - len(page) * 8))
        return page

    def _decode(self, data: Any) -> array[int]:
        page = array("Q")
        page.frombytes(data[: len(data) // 8 * 8])
        if _SWAP:
            page.byteswap()
        return page

    @property
    def _pinned_count(self) -> int:
        """At least as many pages as have to stay in memory, besides the limit."""
        return len(self._changed) + self._flushing_count

    def _evict_pages(self, newest: tuple[LedgerId, int]) -> None:
        """Forget unchanged pages down to half the limit; `newest` is about to be changed by whoever asked for it."""
        flushing = self._in_flush.pages if self._in_flush is not None else {}
        for key in list(self._pages):
            if len(self._pages) <= self._page_limit // 2 + self._pinned_count:
                break
            # A page that is being written must not be read back from its file before it is there.
            if key == newest or key in self._changed or (key[0] in flushing and key[1] in flushing[key[0]][1]):
                continue
            handle = self.handles.get(key[0])
            if handle is not None and handle.page_number == key[1]:
                handle.page_number = -1
            del self._pages[key]

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def take_changes(self) -> IndexFlush:
        """Copy what changed since the last call, for `write`; then `finish` must be called."""
        assert self._in_flush is None, "one checkpoint at a time"
        headers = {ledger: (handle, self._header(handle)) for ledger, handle in self._changed_headers.items()}
        pages: dict[LedgerId, tuple[IndexedHandle, dict[int, bytes]]] = {}
        for (ledger, number), handle in self._changed.items():
            copy = self._pages[ledger, number][:]
            if _SWAP:
                copy.byteswap()
            pages.setdefault(ledger, (handle, {}))[1][number] = copy.tobytes()
            handle.page_number = -1
        for handle in self._changed_headers.values():
            handle.header_changed = False
        self._flushing_count = len(self._changed)
        self._changed = {}
        self._changed_headers = {}
        self._in_flush = IndexFlush(headers, pages)
        return self._in_flush

    def _header(self, handle: IndexedHandle) -> bytes:
        return formats.write_header(
            handle.master_key,
            fenced=handle.fenced,
            explicit_lac=handle.explicit_lac or None,
            version=self._version,
        )

    def write(self, flush: IndexFlush) -> None:
        """Write and sync the copies; in the checkpoint thread, after the entry logs were synced."""
        for ledger in flush.headers.keys() | flush.pages.keys():
            header = flush.headers.get(ledger)
            handle, pages = flush.pages.get(ledger) or (header[0], {}) if header else flush.pages[ledger]
            if handle.deleted:
                continue
            path = handle.index_path
            is_new = not path.exists()
            if is_new:
                self._files.make_directory(path.parent)
            target = path.with_name(f"{path.name}.new") if is_new else path
            with self._files.open(target, create=is_new) as file:
                if is_new:
                    file.truncate(0)
                if header is not None:
                    file.write(0, (header[1],))
                for number in sorted(pages):
                    file.write(formats.HEADER_SIZE + number * self._page_size, (pages[number],))
                file.sync()
            if is_new:
                self._files.rename(target, path)
                self._files.sync_directory(path.parent)

    def finish(self, flush: IndexFlush, *, written: bool) -> None:
        """Take note that `write` is done, or that it failed: then the next checkpoint writes everything again."""
        self._in_flush = None
        self._flushing_count = 0
        for ledger, (handle, _) in flush.headers.items():
            if written:
                handle.is_on_disk = True
            elif not handle.deleted:
                handle.header_changed = True
                self._changed_headers.setdefault(ledger, handle)
        for ledger, (handle, pages) in flush.pages.items():
            if written:
                handle.is_on_disk = True
            elif not handle.deleted:
                for number in pages:
                    self._changed.setdefault((ledger, number), handle)
        if written:
            self._evict_handles()

    def _evict_handles(self) -> None:
        surplus = len(self.handles) - self._handle_limit
        if surplus <= 0:
            return
        busy = {ledger for ledger, _ in self._changed}
        for ledger in list(self.handles):
            handle = self.handles[ledger]
            if handle.is_on_disk and not handle.header_changed and ledger not in busy and not handle.watchers:
                del self.handles[ledger]
                surplus -= 1
                if surplus == 0:
                    break


def _ledgers_in(directory: Path, depth: int) -> Iterator[LedgerId]:
    """The ledgers of the index files below one `current/` directory (depth 0) or a directory in it."""
    if not directory.is_dir():
        return
    for entry in os.scandir(directory):
        if entry.is_dir():
            if len(entry.name) <= 8 and _HEX_DIGITS.issuperset(entry.name) and depth < 4:
                yield from _ledgers_in(Path(entry.path), depth + 1)
        elif (ledger := formats.ledger_of_index_path(entry.path)) is not None:
            yield ledger
