"""SortedLedgerStorage: entries go through a memtable to the entry logs, sorted by ledger and entry; Java's default.

So the entries of one ledger are next to each other. The memtable is written, unsynced, when it reaches
`skipListSizeLimit`, and with each flush. As InterleavedLedgerStorage, the memtable is written as soon as it has one
chunk, in the order of arrival, as Apache's class does.
Source: SortedLedgerStorage, InterleavedLedgerStorage, EntryMemTable; BP-35.
"""

from __future__ import annotations

import logging
import random
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import BkctlError, BookieIOError, Unsupported
from bkctl.formats.index import ENTRY_ID_MAX, index_path
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger
from bkctl.storage.ledger.entry_reader import Snapshot
from bkctl.storage.ledger.index_files import LedgerIndexFiles
from bkctl.storage.ledger.index_pages import IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexPersistenceMgr
from bkctl.storage.ledger.ledger_storage import CHUNK_SIZE_BYTES, UNWRITTEN_BYTES_MAX, LedgerStorage

log: Final = logging.getLogger("bkctl.bookie")


class SortedLedgerStorage(LedgerStorage[IndexedHandle]):
    """The ledgers in the ledger and index directories of `config`; `chance` picks directories.

    `_place_lock` guards the entry loggers and the changes of pages, `_index_lock` the files of the index. A thread that
    needs both takes them in this order.
    """

    entry_id_max = ENTRY_ID_MAX

    def __init__(self, config: BookieConfig, files: Files, *, chance: random.Random | None = None) -> None:
        if config.entry_log_per_ledger_enabled:
            raise Unsupported(
                "An entry log for each ledger", hint="entryLogPerLedgerEnabled=false: all ledgers share entry logs"
            )
        super().__init__(config, files)
        self.table.keeps_order = config.ledger_storage != "sorted"
        self._size_limit = CHUNK_SIZE_BYTES if self.table.keeps_order else config.skip_list_size_limit
        self.unwritten_bytes_max = max(UNWRITTEN_BYTES_MAX, 2 * self._size_limit)
        self._writable = list(range(len(self.ledger_directories)))
        self._index_writable = list(range(len(self.index_directories)))
        #: Ledger directories that refused a write for want of space, whatever free space they report.
        self._refused: set[int] = set()
        self._stays_in: list[int] = []
        self._chance = chance or random.Random()
        self.persistence = IndexPersistenceMgr(
            self.index_directories,
            files,
            page_size=config.page_size,
            open_file_limit=config.open_file_limit,
            version=config.file_info_format_version_to_write,
            pick_directory=lambda: self._chance.choice(self._index_writable or range(len(self.index_directories))),
            is_writable=lambda number: number in self._index_writable,
        )
        self.pages = IndexInMemPageMgr(self.persistence, page_size=config.page_size, page_limit=config.page_limit)
        self._place_lock = threading.Lock()
        self._index_lock = threading.Lock()

    def open(self) -> None:
        for directory in (*self.ledger_directories, *self.index_directories):
            self.files.make_directory(directory)
        self.persistence.prune()
        loggers = self._open_loggers(self.ledger_directories)
        self.index = LedgerIndexFiles(self.persistence, self.pages, loggers, self.handles)
        self.indexes = [self.index]

    def close(self) -> None:
        for logger in self.entry_loggers:
            logger.close()

    def _pick_directory(self) -> int:
        writable = self._writable or range(len(self.ledger_directories))
        return self._chance.choice([number for number in writable if number not in self._refused] or writable)

    def set_writable(self, ledger_numbers: list[int], index_numbers: list[int]) -> None:
        self._index_writable = index_numbers
        if ledger_numbers != self._writable:
            self._writable = self._stays_in = ledger_numbers
            self._refused.clear()

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def load(self, ledger: LedgerId) -> IndexedHandle:
        return self._indexed(self.persistence.load(ledger) or self.persistence.create(ledger))

    def blank(self, ledger: LedgerId) -> IndexedHandle:
        return self._indexed(IndexedHandle(ledger, b"", self.index_directories[0] / index_path(ledger)))

    def _indexed(self, handle: IndexedHandle) -> IndexedHandle:
        handle.index = self.index
        return handle

    def _delete_index(self, handle: IndexedHandle) -> None:
        self.index.delete(handle.ledger)

    def unused(self) -> list[LedgerId]:
        unused = super().unused()
        # In this order: entries that leave the memtable meanwhile are in changed pages before.
        changed = self.pages.changed_ledgers()
        return [ledger for ledger in unused if ledger not in changed]

    def _indexed_ledgers(self, scope: int | None) -> Iterator[LedgerId]:
        found = self.persistence.ledgers()
        if scope is not None:
            found = {value for value in found if value >> 64 == scope}
        return map(LedgerId.from_value, sorted(found))

    # --- from memory to the logs -------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        return self.table.size + self.pages.surplus_bytes

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        # While earlier ones are not written, a snapshot is larger: reads look into each of them.
        enough = self._size_limit * (1 + len(self.table.snapshots)) if least >= CHUNK_SIZE_BYTES else least
        return self.table.current.size >= enough and self.table.snapshot()

    def write_entries(self) -> None:
        with self._place_lock:
            self._write_snapshots()

    def _write_snapshots(self) -> None:
        if self._stays_in:
            for logger in self.entry_loggers:
                logger.stay_in(self._stays_in)
            self._stays_in = []
        refused: set[IndexedHandle] = set()
        for snapshot in self.table.snapshots:
            if not snapshot.is_sorted:
                snapshot.todo = list(self._runs(snapshot))
                snapshot.todo.reverse()
                snapshot.arrivals.clear()
                snapshot.is_sorted = True
            snapshot.todo += snapshot.unplaced
            snapshot.unplaced = []
            while snapshot.todo:
                handle, entry_ids = snapshot.todo[-1]
                logger = self.index.logger_of(handle.ledger)
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

    def _runs(self, snapshot: Snapshot[IndexedHandle]) -> Iterator[tuple[IndexedHandle, list[int]]]:
        """Yield the snapshot's entries in order, one run a ledger and index page."""
        pages = self.pages
        if self.table.keeps_order:
            yield from self._arrived_runs(snapshot)
            return
        for handle in sorted(snapshot.ledgers, key=lambda handle: handle.ledger):
            entry_ids = sorted(snapshot.ledgers[handle])
            start = 0
            while start < len(entry_ids):
                end = bisect_left(entry_ids, pages.end_of_page(pages.page_number(entry_ids[start])), start)
                yield handle, entry_ids[start:end]
                start = end

    def _arrived_runs(self, snapshot: Snapshot[IndexedHandle]) -> Iterator[tuple[IndexedHandle, list[int]]]:
        pages = self.pages
        for handle, arrivals in groupby(snapshot.arrivals, itemgetter(0)):
            if handle not in snapshot.ledgers:
                continue  # deleted
            run: list[int] = []
            for entry_id in chain.from_iterable(ids for _, ids in arrivals):
                if run and not run[-1] < entry_id < pages.end_of_page(pages.page_number(run[0])):
                    yield handle, run
                    run = []
                run.append(entry_id)
            yield handle, run

    def _place_run(
        self, logger: EntryLogger, handle: IndexedHandle, entry_ids: list[int], entries: dict[int, bytes]
    ) -> bool:
        """Add entries of one page to the log and the index; return False if the disk refuses that page."""
        if self.pages.is_full:
            self._write_changed_pages()
        try:
            self.pages.prepare(handle, entry_ids[0])
        except (OSError, BkctlError) as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            self.index.refuse_entries(handle, error)
            return False
        records = list(map(entries.__getitem__, entry_ids))
        self.pages.put(handle, entry_ids, logger.add_all(handle.ledger, records))
        return True

    def _write_logs(self) -> None:
        for logger in self.entry_loggers:
            while True:
                try:
                    logger.write()  # entries that left a full directory, too: the memtable is about to forget them
                except OSError as error:
                    if error.errno not in NO_SPACE or not self._relocate():
                        raise
                    log.warning(
                        "%s accepts no more writes (%s): its entries go to another ledger directory",
                        error.filename or "A disk", error.strerror,
                    )  # fmt: skip
                else:
                    break

    def _relocate(self) -> bool:
        """Move the entries that a full disk refused to logs in other directories; return whether any moved."""
        relocated = False
        for logger in self.entry_loggers:
            full = logger.full_directory
            if full is not None:
                self._refused.add(logger.directories.index(full))
                if not self._refused.issuperset(self._writable):
                    relocated = logger.relocate(self.index.move) or relocated
        return relocated

    def _write_changed_pages(self) -> None:
        self._write_logs()
        with self._index_lock:
            self.index.write({}, self.pages.take_changes())

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def is_flush_due(self) -> bool:
        return self.pages.is_flush_due

    def begin_flush(self) -> dict[IndexedHandle, bytes] | None:
        """Return the changed headers."""
        self.table.snapshot()
        if not (self.table.snapshots or self._changed or not self.pages.is_clean or self.persistence.has_doomed):
            return None
        changed, self._changed = self._changed, {}
        return {handle: self.persistence.header_of(handle) for handle in changed.values()}

    def flush(self, flush: dict[IndexedHandle, bytes]) -> None:
        with self._place_lock:
            self._write_snapshots()
            unplaced = {handle.ledger for snapshot in self.table.snapshots for handle, _ in snapshot.unplaced}
            self._index_lock.acquire()
            pages = self.pages.take_changes()
        try:
            self.unwritten = frozenset(unplaced.union(self.index.write(flush, pages)))
        finally:
            self._index_lock.release()
        self.index.accept_entries(self.unwritten)

    def end_flush(self, flush: dict[IndexedHandle, bytes], *, written: bool) -> None:
        for handle in flush:
            if not handle.deleted and (not written or handle.ledger in self.unwritten):
                self.change_header(handle)
            else:
                handle.header_changed = self._changed.get(handle.ledger) is handle
        if written:
            self.index.return_borrowed()
