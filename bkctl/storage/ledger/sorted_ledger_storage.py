"""SortedLedgerStorage: entries go through a memtable to the entry logs, sorted by ledger and entry; Java's default.

So the entries of one ledger are next to each other. The memtable is written, unsynced, when it reaches
`skipListSizeLimit`, and with each flush. Entry logs, index and flushes have InterleavedLedgerStorage's guarantees.
Source: SortedLedgerStorage, EntryMemTable; BP-35.
"""

from __future__ import annotations

import functools
import heapq
import random
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import BkctlError, BookieIOError
from bkctl.formats.layout import Buffer
from bkctl.formats.record import body_of
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.ledger.entry_mem_table import EntryMemTable, Snapshot
from bkctl.storage.ledger.index_pages import ChangedPages
from bkctl.storage.ledger.index_persistence import IndexedHandle
from bkctl.storage.ledger.interleaved_ledger_storage import IndexFlush, InterleavedLedgerStorage
from bkctl.storage.ledger.ledger_storage import (
    CHUNK_SIZE_BYTES,
    UNWRITTEN_BYTES_MAX,
    IsWanted,
    always,
    merge_found,
)


class SortedLedgerStorage(InterleavedLedgerStorage):
    """The ledgers in the ledger and index directories of `config`; `chance` picks directories.

    `_place_lock` guards the entry loggers and the changes of pages, `_index_lock` the files of the index. A thread that
    needs both takes them in this order.
    """

    def __init__(self, config: BookieConfig, files: Files, *, chance: random.Random | None = None) -> None:
        super().__init__(config, files, chance=chance)
        self.table = EntryMemTable()
        self._size_limit = config.skip_list_size_limit
        self._place_lock = threading.Lock()
        self._index_lock = threading.Lock()
        self._directories_to_stay_in: list[int] = []

    # --- entries -----------------------------------------------------------------------------------------------------

    def add(self, handle: IndexedHandle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        self.table.add(handle, entry_ids, records, size)
        last = entry_ids[0] if len(entry_ids) == 1 else max(entry_ids)
        if last > handle.last_entry:
            handle.last_entry = last

    def has(self, handle: IndexedHandle, entry_id: int) -> bool:
        return self.table.find(handle, entry_id) is not None or super().has(handle, entry_id)

    def find(self, handle: IndexedHandle, entry_id: int) -> Buffer | None:
        record = self.table.find(handle, entry_id)
        return super().find(handle, entry_id) if record is None else body_of(record)

    def read(self, handle: IndexedHandle, entry_id: int) -> Buffer:
        record = self.table.find(handle, entry_id)
        return super().read(handle, entry_id) if record is None else body_of(record)

    def find_all(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        return self._with_table(super().find_all, handle, entry_ids, size_max)

    def read_most(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        return self._with_table(super().read_most, handle, entry_ids, size_max)

    def _with_table(
        self,
        read: Callable[[IndexedHandle, Sequence[int], int], list[Buffer | None]],
        handle: IndexedHandle,
        entry_ids: Sequence[int],
        size_max: int,
    ) -> list[Buffer | None]:
        """Return entries from the memtable, and what `read` returns of the others."""
        if not self.table.holds(handle):
            return read(handle, entry_ids, size_max)
        records = self.table.find_all(handle, entry_ids)
        return merge_found(records, entry_ids, size_max, functools.partial(read, handle))

    def entry_ids(self, handle: IndexedHandle, is_wanted: IsWanted = always) -> Callable[[], Iterator[int]]:
        recent = self.table.entry_ids(handle)
        indexed = super().entry_ids(handle, is_wanted)
        return lambda: map(itemgetter(0), groupby(heapq.merge(sorted(recent), indexed())))

    def _is_in_use(self, handle: IndexedHandle) -> bool:
        return super()._is_in_use(handle) or self.table.holds(handle)

    # --- from memory to the logs -------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        return self.table.size + self.pages.surplus_bytes

    @property
    def unwritten_bytes_max(self) -> int:
        return max(UNWRITTEN_BYTES_MAX, 2 * self._size_limit)

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        enough = self._size_limit if least >= CHUNK_SIZE_BYTES else least
        return self.table.current.size >= enough and self.table.snapshot()

    def write_entries(self) -> None:
        with self._place_lock:
            self._write_snapshots()

    def _write_snapshots(self) -> None:
        if self._directories_to_stay_in:
            super()._stay_in(self._directories_to_stay_in)
            self._directories_to_stay_in = []
        refused: set[IndexedHandle] = set()
        for snapshot in self.table.snapshots:
            if not snapshot.is_sorted:
                snapshot.todo = list(self._runs(snapshot))
                snapshot.todo.reverse()
                snapshot.is_sorted = True
            snapshot.todo += snapshot.unplaced
            snapshot.unplaced = []
            while snapshot.todo:
                handle, entry_ids = snapshot.todo[-1]
                logger = self._scoped_logger if handle.ledger[0] else self._logger
                is_placed = handle.deleted or (
                    handle not in refused and self._place_run(logger, handle, entry_ids, snapshot.ledgers[handle])
                )
                if not is_placed:
                    refused.add(handle)  # its newer entries must not precede older ones
                (snapshot.placed if is_placed else snapshot.unplaced).append(snapshot.todo.pop())
                if logger.buffered_bytes >= CHUNK_SIZE_BYTES:
                    self._write_logs()
                    self.table.forget_placed(snapshot)
            self._write_logs()
            self.table.forget_placed(snapshot)
            self.table.drop(snapshot)
        self._write_logs()
        unplaced_bytes = sum(snapshot.size for snapshot in self.table.snapshots if snapshot.unplaced)
        if unplaced_bytes > self._size_limit:
            raise BookieIOError(f"The disk refuses the index of entries of {unplaced_bytes} bytes")

    def _runs(self, snapshot: Snapshot) -> Iterator[tuple[IndexedHandle, list[int]]]:
        """Yield the snapshot's entries in order, one run a ledger and index page."""
        pages = self.pages
        for handle in sorted(snapshot.ledgers, key=lambda handle: handle.ledger):
            entry_ids = sorted(snapshot.ledgers[handle])
            start = 0
            while start < len(entry_ids):
                end = bisect_left(entry_ids, pages.end_of_page(pages.page_number(entry_ids[start])), start)
                yield handle, entry_ids[start:end]
                start = end

    def _place_run(
        self, logger: EntryLogger, handle: IndexedHandle, entry_ids: list[int], entries: dict[int, bytes]
    ) -> bool:
        """Add entries of one page to the log and the index; return False if the disk refuses that page."""
        if self.pages.is_full:
            self._write_changed_pages()
        try:
            self.pages.prepare(handle, entry_ids, waits=True)
        except (OSError, BkctlError) as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            self._refuse_entries(handle, error)
            return False
        records = list(map(entries.__getitem__, entry_ids))
        self.pages.put(handle, entry_ids, logger.add_all(handle.ledger, records))
        return True

    def _write_logs(self) -> None:
        for logger in self.entry_loggers:
            logger.seal()
            self._write_log(logger)

    def _write_log(self, logger: EntryLogger) -> None:
        while True:
            try:
                logger.write()
            except OSError as error:
                if error.errno not in NO_SPACE or not self._relocate():
                    raise
            else:
                return

    def _write_changed_pages(self) -> None:
        self._write_logs()
        with self._index_lock:
            self._write_taken({}, self.pages.take_changes())

    def _write_taken(self, headers: dict[IndexedHandle, bytes], pages: ChangedPages) -> dict[LedgerId, Exception]:
        """Do what `_write_index` does once the entries of `pages`, which the logs have, are synced."""
        failed: dict[LedgerId, Exception] | None = None
        try:
            self._sync_logs()
            failed = self._write_index(headers, pages)
        finally:
            self.pages.finish(written=failed is not None, failed=failed or ())
        return failed

    def _stay_in(self, numbers: list[int]) -> None:
        self._directories_to_stay_in = numbers

    def leave_full_disk(self) -> bool:
        return False  # `_write_log` has left it already, where it could

    def update_locations(self, logger: EntryLogger, moves: Iterable[Move]) -> None:
        super().update_locations(logger, moves)
        if self.pages.is_full and self._place_lock.acquire(blocking=False):
            try:
                self._write_changed_pages()
            finally:
                self._place_lock.release()

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def is_flush_due(self) -> bool:
        return self.pages.is_flush_due

    def begin_flush(self) -> IndexFlush | None:
        self.table.snapshot()
        if not self.table.snapshots and not self._has_changes():
            return None
        return IndexFlush(self._take_headers(), {})

    def flush(self, flush: IndexFlush) -> None:
        with self._place_lock:
            self._write_snapshots()
            unplaced = {handle.ledger for snapshot in self.table.snapshots for handle, _ in snapshot.unplaced}
            self._index_lock.acquire()
            pages = self.pages.take_changes()
        try:
            self._note_unwritten(unplaced.union(self._write_taken(flush.headers, pages)))
        finally:
            self._index_lock.release()

    def end_flush(self, flush: IndexFlush, *, written: bool) -> None:
        self._finish_headers(flush, written=written)
