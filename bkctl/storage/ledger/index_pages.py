"""IndexInMemPageMgr: pages of index files in memory, each with the locations of consecutive entries of one ledger.

Changed pages stay until a flush has written them, unchanged ones are a cache; together they are `pageLimit` at most, if
flushes keep up. A page uses memory up to its last location only: many ledgers may have few entries each.
Source: IndexInMemPageMgr, LedgerEntryPage.
"""

from __future__ import annotations

import heapq
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import groupby
from operator import eq, itemgetter
from typing import Final

from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import Move
from bkctl.storage.ledger.index_persistence import SWAP, IndexedHandle, IndexPersistenceMgr
from bkctl.storage.ledger.ledger_handle import IsWanted, always

#: Pages in memory without a `pageLimit`.
PAGES_MAX: Final = 65_536
#: Unchanged pages among them: the cache.
UNCHANGED_PAGES_MAX: Final = 8192

_NO_PAGE: Final = array("Q")

PageKey = tuple[LedgerId, int]
#: Copies of changed pages by number, as a ledger's file has them, but without zeros at their ends.
ChangedPages = dict[IndexedHandle, dict[int, bytes]]


class IndexInMemPageMgr:
    """The pages of all ledgers of one bookie.

    Every method may be called from any thread, but no two flushes (`take_changes` to `finish`) may overlap.
    """

    def __init__(self, persistence: IndexPersistenceMgr, *, page_size: int, page_limit: int) -> None:
        self._persistence = persistence
        self._page_size = page_size
        self._slots = page_size // 8
        self.limit = page_limit if page_limit > 0 else PAGES_MAX
        self._pages: OrderedDict[PageKey, array[int]] = OrderedDict()
        self._changed: dict[PageKey, IndexedHandle] = {}
        self._flushing: dict[PageKey, IndexedHandle] = {}
        #: Pages that changed, or that a flush is writing, or both.
        self._waiting = 0
        #: Pages among them that the last flush could not write.
        self._kept: set[PageKey] = set()
        #: A page read from a file before this counter changed may be out of date.
        self._generation = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def changed_count(self) -> int:
        """Return the number of changed pages. Those that the last flush could not write make no flush due."""
        return len(self._changed) - len(self._kept)

    @property
    def is_clean(self) -> bool:
        """Return whether all changes are in files."""
        with self._lock:
            return not self._changed and not self._flushing

    @property
    def is_full(self) -> bool:
        """Return whether a flush must come before more pages change: three quarters of the limit wait for one."""
        return self._waiting - len(self._kept) >= max(1, self.limit * 3 // 4)

    @property
    def is_flush_due(self) -> bool:
        """Return whether a flush should begin, so that it ends before `is_full`."""
        return self.changed_count >= max(1, self.limit // 4)

    @property
    def surplus_bytes(self) -> int:
        """Return the bytes of the pages above the limit that wait for a flush."""
        return max(0, self._waiting - self.limit) * self._page_size

    # --- locations ---------------------------------------------------------------------------------------------------

    def prepare(self, handle: IndexedHandle, entry_id: int) -> None:
        """Mark the page of an entry as changed, read from the ledger's file if need be. Raises OSError, Corrupt."""
        number = entry_id // self._slots
        if number != handle.page_number:
            handle.page = self._page_to_change(handle, number)
            handle.page_number = number

    def put(self, handle: IndexedHandle, entry_ids: Sequence[int], locations: Sequence[int]) -> None:
        """Set the locations of entries of one page, ascending, in one thread at a time. Raises what `prepare` does."""
        self.prepare(handle, entry_ids[0])
        first, last, page = entry_ids[0], entry_ids[-1], handle.page
        start = handle.page_number * self._slots
        with self._lock:
            if first - start == len(page) and last - first + 1 == len(entry_ids):
                page.extend(locations)
            else:
                missing = last - start + 1 - len(page)
                if missing > 0:
                    page.frombytes(bytes(missing * 8))
                for entry_id, location in zip(entry_ids, locations, strict=True):
                    page[entry_id - start] = location
        if last > handle.indexed_last:
            handle.indexed_last = last

    def page_number(self, entry_id: int) -> int:
        """Return the number of the page with the entry's location."""
        return entry_id // self._slots

    def end_of_page(self, number: int) -> int:
        """Return the first entry id after page `number`."""
        return (number + 1) * self._slots

    def location(self, ledger: LedgerId, entry_id: int) -> int:
        """Return the entry's location, 0 for none. Raises OSError."""
        return self.locations(ledger, (entry_id,))[0]

    def cached_locations(self, ledger: LedgerId, entry_ids: Sequence[int]) -> list[int]:
        """Return the locations of entries of one ledger, 0 for none, and where that needs the disk."""
        return self._locations_in(lambda number: self._pages.get((ledger, number), _NO_PAGE), entry_ids)

    def locations(self, ledger: LedgerId, entry_ids: Sequence[int]) -> list[int]:
        """Return the locations of entries of one ledger, 0 for none. Raises OSError."""
        return self._locations_in(lambda number: self._load((ledger, number)), entry_ids)

    def _locations_in(self, page_of: Callable[[int], array[int]], entry_ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        slots, last = self._slots, -1
        page = _NO_PAGE
        for entry_id in entry_ids:
            number = entry_id // slots
            if number != last:
                page, last = page_of(number), number
            slot = entry_id - number * slots
            found.append(page[slot] if slot < len(page) else 0)
        return found

    def live(self, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        """Return of each (ledger, entry id, location) whether the index has it. Raises OSError."""
        found: list[bool] = []
        for ledger, run in groupby(entries, itemgetter(0)):
            _, entry_ids, locations = zip(*run, strict=True)
            found += map(eq, self.locations(ledger, entry_ids), locations)
        return found

    def move(self, handle: IndexedHandle, moves: Iterable[Move]) -> None:
        """Set the new locations of entries of one ledger whose location is the old one. Raises OSError.

        `handle` may differ from the one that `put` gets: it only names the file of the page.
        """
        for move in moves:
            number, slot = divmod(move.entry_id, self._slots)
            key = handle.ledger, number
            is_current = False
            while not is_current:
                page = self._load(key)
                with self._lock:
                    is_current = self._pages.get(key) is page
                    if is_current and slot < len(page) and page[slot] == move.old:
                        page[slot] = move.new
                        # The handle that put a location in the page must stay: the next flush resets its `page_number`.
                        self._note_changed(key, self._changed.get(key, handle))

    def _note_changed(self, key: PageKey, handle: IndexedHandle) -> None:
        if key not in self._changed and key not in self._flushing:
            self._waiting += 1
        self._changed[key] = handle

    def _load(self, key: PageKey) -> array[int]:
        """Return the page from memory, or from its file, which is read without the lock."""
        while True:
            with self._lock:
                page = self._pages.get(key)
                if page is not None:
                    self._pages.move_to_end(key)
                    return page
                generation = self._generation
            page = self._persistence.read_page(*key)
            with self._lock:
                if generation == self._generation:
                    page = self._pages.setdefault(key, page)
                    self._evict()
                    return page

    def _page_to_change(self, handle: IndexedHandle, number: int) -> array[int]:
        """Return the page in memory, marked as changed: the next flush writes it."""
        key = handle.ledger, number
        is_new = number * self._slots > handle.indexed_last
        page = array("Q") if is_new else None
        generation = self._generation
        while True:
            with self._lock:
                found = self._pages.get(key)
                if found is not None:
                    if not handle.deleted:
                        self._note_changed(key, handle)
                    return found
                if page is not None and handle.deleted:
                    return page
                if page is not None and generation == self._generation:
                    self._pages[key] = page
                    self._note_changed(key, handle)
                    self._evict()
                    return page
                generation = self._generation
            if not is_new:
                page = self._persistence.read_page(*key)

    def _evict(self) -> None:
        """Evict the oldest unchanged pages when there are too many."""
        allowed = max(min(self.limit, UNCHANGED_PAGES_MAX), self._waiting + max(self.limit // 4, 1))
        if len(self._pages) <= allowed:
            return
        surplus = len(self._pages) - allowed + min(self.limit, UNCHANGED_PAGES_MAX) // 8
        # The page just read stays for its caller.
        candidates = [key for key in self._pages if key not in self._changed and key not in self._flushing][:-1]
        for key in candidates[:surplus]:
            del self._pages[key]

    # --- a ledger's pages --------------------------------------------------------------------------------------------

    def forget(self, ledger: LedgerId) -> None:
        """Drop the pages of a deleted ledger."""
        with self._lock:
            for key in [key for key in self._pages if key[0] == ledger]:
                del self._pages[key]
                self._kept.discard(key)
                if self._changed.pop(key, None) is not None and key not in self._flushing:
                    self._waiting -= 1
            self._generation += 1

    def changed_ledgers(self) -> set[LedgerId]:
        """Return the ledgers with pages that no file has yet."""
        with self._lock:
            return {ledger for ledger, _ in (*self._changed, *self._flushing)}

    def copy_of(self, ledger: LedgerId) -> dict[int, array[int]]:
        """Return copies of the ledger's pages that no file has yet, by page number."""
        with self._lock:
            waiting = {*self._changed, *self._flushing}
            return {key[1]: self._pages[key][:] for key in waiting if key[0] == ledger and key in self._pages}

    def entry_ids(
        self, ledger: LedgerId, in_memory: dict[int, array[int]], is_wanted: IsWanted = always
    ) -> Iterator[int]:
        """Yield the ids of entries with a location, ascending, from `in_memory` and the file, while `is_wanted`.

        Raises OSError. Skips holes of the file: one entry with a high id makes it large.
        """
        numbers = heapq.merge(sorted(in_memory), self._persistence.pages_on_disk(ledger))
        for number, _ in groupby(numbers):
            if not is_wanted():
                return
            page = in_memory.get(number)
            if page is None:
                page = self._persistence.read_page(ledger, number)
            first = number * self._slots
            if 0 not in page:
                yield from range(first, first + len(page))
            else:
                yield from (first + slot for slot, location in enumerate(page) if location)

    # --- flushes -----------------------------------------------------------------------------------------------------

    def take_changes(self) -> ChangedPages:
        """Return copies of the pages that changed since the last call; `finish` must follow."""
        taken: ChangedPages = {}
        with self._lock:
            assert not self._flushing, "one flush at a time"
            for (ledger, number), handle in self._changed.items():
                copy = self._pages[ledger, number][:]
                if SWAP:
                    copy.byteswap()
                taken.setdefault(handle, {})[number] = copy.tobytes()
                handle.page_number = -1
            self._flushing, self._changed = self._changed, {}
            self._waiting = len(self._flushing)
        return taken

    def finish(self, *, written: bool, failed: Container[LedgerId] = ()) -> None:
        """Record that the taken pages are in files; unless `written`, mark them as changed again.

        Pages of the ledgers in `failed` stay changed in any case.
        """
        with self._lock:
            flushing, self._flushing = self._flushing, {}
            self._generation += 1
            kept = {key for key in flushing if key in self._pages and (not written or key[0] in failed)}
            for key in kept:
                self._changed.setdefault(key, flushing[key])
            if written:
                self._kept = kept
            self._waiting = len(self._changed)
            if written:
                self._evict()
