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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE, Files
from bkctl.errors import BkctlError, BookieIOError, Corrupt, Unsupported
from bkctl.formats.index import ENTRY_ID_MAX, index_path
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.ledger.entry_reader import Snapshot
from bkctl.storage.ledger.index_pages import ChangedPages, IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexFileFailed, IndexPersistenceMgr
from bkctl.storage.ledger.ledger_handle import EntryIndex, IsWanted
from bkctl.storage.ledger.ledger_storage import CHUNK_SIZE_BYTES, UNWRITTEN_BYTES_MAX, LedgerStorage

log: Final = logging.getLogger("bkctl.bookie")

#: A flush that cannot write the index of more ledgers fails: the disk is damaged, not single files.
UNWRITTEN_LEDGERS_MAX: Final = 100


@dataclass(eq=False, repr=False)
class LedgerIndexFiles(EntryIndex[IndexedHandle]):
    """The index of the logs that `loggers` write. `_handles` are the ledgers in memory."""

    persistence: IndexPersistenceMgr
    pages: IndexInMemPageMgr
    loggers: tuple[EntryLogger, EntryLogger]
    _handles: Mapping[LedgerId, IndexedHandle]
    #: Handles of ledgers that only the garbage collector's thread uses.
    _borrowed: dict[LedgerId, IndexedHandle] = field(init=False, default_factory=dict)
    #: Ledgers whose index the disk refuses, and why.
    _refused: dict[LedgerId, Exception] = field(init=False, default_factory=dict)

    @property
    def has_scoped(self) -> bool:
        return self.persistence.has_scoped_ledgers()

    def location(self, handle: IndexedHandle, entry_id: int) -> int:
        return self.pages.location(handle.ledger, entry_id)

    def find(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        ledger = handle.ledger
        locations = self.pages.cached_locations(ledger, entry_ids)
        return [*self.logger_of(ledger).read_run(ledger, entry_ids, locations, size_max, cached=True)]

    def read(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        ledger = handle.ledger
        try:
            locations = self.pages.locations(ledger, entry_ids)
        except (OSError, Corrupt):
            return [None] * len(entry_ids)
        return [*self.logger_of(ledger).read_run(ledger, entry_ids, locations, size_max)]

    def entry_ids(self, handle: IndexedHandle, is_wanted: IsWanted) -> Callable[[], Iterator[int]]:
        in_memory = self.pages.copy_of(handle.ledger)
        return lambda: self.pages.entry_ids(handle.ledger, in_memory, is_wanted)

    def move(self, moves: Iterable[Move]) -> None:
        by_ledger: dict[LedgerId, list[Move]] = {}
        for move in moves:
            by_ledger.setdefault(move.ledger, []).append(move)
        for ledger, ledger_moves in by_ledger.items():
            handle = self._handles.get(ledger) or self._borrowed.get(ledger)
            if handle is None:
                # Without its header and its other pages, which may be damaged: the log must still be compacted.
                handle = self.persistence.load_pages(ledger)
                if handle is None:
                    continue
                self._borrowed[ledger] = handle
            self.pages.move(handle, ledger_moves)

    def live(self, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        return self.pages.live(entries)

    def delete(self, ledger: LedgerId) -> None:
        """Delete the index of a ledger with the next `write` (E)."""
        borrowed = self._borrowed.pop(ledger, None)
        if borrowed is not None:
            borrowed.deleted = True
        self.persistence.doom(ledger)
        self.pages.forget(ledger)

    def return_borrowed(self) -> None:
        """Forget the handles of ledgers whose moved entries are in files (E)."""
        changed = self.pages.changed_ledgers()
        for ledger in [ledger for ledger in list(self._borrowed) if ledger not in changed]:
            self._borrowed.pop(ledger, None)

    # --- writes ------------------------------------------------------------------------------------------------------

    def write(self, headers: Mapping[IndexedHandle, bytes], pages: ChangedPages) -> dict[LedgerId, Exception]:
        """Write headers and taken pages, whose entries the logs have; return the ledgers whose file the disk refuses.

        Raises OSError, also where the disk refuses a new file beside such a file: then the whole disk fails.
        """
        failed: dict[LedgerId, Exception] | None = None
        try:
            for logger in self.loggers:
                logger.sync()
            failed = self._write(headers, pages)
        finally:
            self.pages.finish(written=failed is not None, failed=failed or ())
        return failed

    def _write(self, headers: Mapping[IndexedHandle, bytes], pages: ChangedPages) -> dict[LedgerId, Exception]:
        handles = {**headers, **pages}
        self.persistence.make_directories(handles)
        failed: dict[LedgerId, Exception] = {}
        kept = 0
        for handle in handles:
            try:
                self.persistence.write(handle, headers.get(handle), pages.get(handle, {}))
            except IndexFileFailed as error:
                self.persistence.check_disk(handle)
                failed[handle.ledger] = error
                self.refuse_entries(handle, error)
                kept += len(pages.get(handle, {}))
                if len(failed) > UNWRITTEN_LEDGERS_MAX or kept > max(1, self.pages.limit // 4):
                    raise
        self.persistence.remove_doomed()
        return failed

    def refuse_entries(self, handle: IndexedHandle, error: Exception) -> None:
        """Let the ledger accept no entries, because the disk refuses its index: memory could not hold them for long."""
        ledger = handle.ledger
        (self._handles.get(ledger) or handle).index_error = error
        if ledger not in self._refused:
            log.error(
                "Ledger %s accepts no entries: the disk refuses its index (%s). Other ledgers are served, and the "
                "journals with its records stay until the disk takes the index, or the ledger is deleted: replicate "
                "it to another bookie, and look at the disk", ledger, error,
            )  # fmt: skip
        self._refused[ledger] = error

    def accept_entries(self, unwritten: Collection[LedgerId]) -> None:
        """Let ledgers accept entries again that are not among the `unwritten` ones of a flush."""
        for ledger in [ledger for ledger in list(self._refused) if ledger not in unwritten]:
            del self._refused[ledger]
            handle = self._handles.get(ledger)
            if handle is not None:
                handle.index_error = None
                log.warning("Ledger %s accepts entries again: the disk took its index", ledger)


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
            self._write_logs()
            with self._index_lock:
                self.index.write({}, self.pages.take_changes())
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
