"""InterleavedLedgerStorage: entries of all ledgers in one entry log in order of arrival, and an index file a ledger.

An index file only ever points into synced entry logs. Entries of scoped ledgers have entry logs of their own, below
`current/scoped`. Source: InterleavedLedgerStorage, LedgerCacheImpl; BP-35.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.errors import Corrupt, EntryNotFound, Unsupported
from bkctl.formats.index import ENTRY_ID_MAX, index_path
from bkctl.formats.layout import Buffer
from bkctl.formats.names import CURRENT, SCOPED_DIRECTORY
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.ledger.index_pages import ChangedPages, IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexFileFailed, IndexPersistenceMgr
from bkctl.storage.ledger.ledger_storage import CHUNK_SIZE_BYTES, IsWanted, LedgerStorage, always, merge_found

log: Final = logging.getLogger("bkctl.bookie")

#: Changed index pages that make a flush due before the flush interval ends.
CHANGED_PAGES_MAX: Final = 4096
#: A flush that cannot write the index of more ledgers fails: the disk is damaged, not single files.
UNWRITTEN_LEDGERS_MAX: Final = 100


@dataclass(slots=True)
class IndexFlush:
    """Copies of the changed headers and pages of the index, for one flush."""

    headers: dict[IndexedHandle, bytes]
    pages: ChangedPages


class InterleavedLedgerStorage(LedgerStorage[IndexedHandle]):
    """The ledgers in the ledger and index directories of `config`; `chance` picks directories."""

    entry_id_max = ENTRY_ID_MAX

    def __init__(self, config: BookieConfig, files: Files, *, chance: random.Random | None = None) -> None:
        if config.entry_log_per_ledger_enabled:
            raise Unsupported(
                "An entry log for each ledger", hint="entryLogPerLedgerEnabled=false: all ledgers share entry logs"
            )
        self.config = config
        self.files = files
        self.ledger_directories = [Path(directory) / CURRENT for directory in config.ledger_directories]
        index_directories = config.index_or_ledger_directories
        self.index_directories = [Path(directory) / CURRENT for directory in index_directories]
        self._writable = list(range(len(self.ledger_directories)))
        self._index_writable = list(range(len(self.index_directories)))
        #: Ledger directories that refused a write for want of space, whatever free space they report.
        self._refused: set[int] = set()
        self._chance = chance or random.Random()
        self.persistence = IndexPersistenceMgr(
            self.index_directories,
            self.files,
            page_size=config.page_size,
            open_file_limit=config.open_file_limit,
            version=config.file_info_format_version_to_write,
            pick_directory=self._pick_index_directory,
            is_writable=lambda number: number in self._index_writable,
        )
        self.pages = IndexInMemPageMgr(self.persistence, page_size=config.page_size, page_limit=config.page_limit)
        self.handles = {}
        self.entry_loggers = ()
        self._changed_headers: dict[IndexedHandle, None] = {}
        #: Handles of ledgers that only the garbage collector's thread uses.
        self._borrowed: dict[LedgerId, IndexedHandle] = {}
        #: Ledgers whose index the disk refuses, and why.
        self._refused_ledgers: dict[LedgerId, Exception] = {}
        self._is_flushing = False
        self._must_leave = self._has_left = False

    def _pick_index_directory(self) -> int:
        return self._chance.choice(self._index_writable or range(len(self.index_directories)))

    def _pick_ledger_directory(self) -> int:
        writable = self._writable or range(len(self.ledger_directories))
        return self._chance.choice([number for number in writable if number not in self._refused] or writable)

    def set_writable(self, numbers: list[int]) -> None:
        self._writable = numbers
        self._refused.clear()
        if numbers:
            self._stay_in(numbers)

    def _stay_in(self, numbers: list[int]) -> None:
        for logger in self.entry_loggers:
            logger.stay_in(numbers)

    def set_index_writable(self, numbers: list[int]) -> None:
        self._index_writable = numbers

    def leave_full_disk(self) -> bool:
        if self._is_flushing:
            # The flush has a copy of the index with the old locations, so it has to end first.
            self._must_leave = True
            return True
        left, self._has_left = self._has_left, False
        return self._relocate() or left

    def _relocate(self) -> bool:
        """Move the entries that a full disk refused to logs in other directories; return whether any moved."""
        relocated = False
        for logger in self.entry_loggers:
            full = logger.full_directory
            if full is not None:
                self._refused.add(logger.directories.index(full))
                if not self._refused.issuperset(self._writable):
                    relocated = logger.relocate(functools.partial(self.update_locations, logger)) or relocated
        return relocated

    def open(self) -> None:
        for directory in (*self.ledger_directories, *self.index_directories):
            self.files.make_directory(directory)
        self.persistence.prune()
        self._logger = self._open_logger(self.ledger_directories, scoped=False)
        scoped_directories = [directory / SCOPED_DIRECTORY for directory in self.ledger_directories]
        self._scoped_logger = self._open_logger(scoped_directories, scoped=True)
        self.entry_loggers = (self._logger, self._scoped_logger)

    def _open_logger(self, directories: list[Path], *, scoped: bool) -> EntryLogger:
        return EntryLogger(
            directories,
            self.files,
            scoped=scoped,
            size_limit=self.config.log_size_limit,
            pick_directory=self._pick_ledger_directory,
            preallocates=self.config.entry_log_file_preallocation_enabled,
        )

    def close(self) -> None:
        for logger in self.entry_loggers:
            logger.close()

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def load(self, ledger: LedgerId) -> IndexedHandle:
        return self.persistence.load(ledger) or self.persistence.create(ledger)

    def blank(self, ledger: LedgerId) -> IndexedHandle:
        return IndexedHandle(ledger, b"", self.index_directories[0] / index_path(ledger))

    def change_header(self, handle: IndexedHandle) -> None:
        handle.header_changed = True
        self._changed_headers[handle] = None

    def delete_ledger(self, handle: IndexedHandle) -> None:
        ledger = handle.ledger
        handle.deleted = True
        self.handles.pop(ledger, None)
        self._changed_headers.pop(handle, None)
        borrowed = self._borrowed.pop(ledger, None)
        if borrowed is not None:
            borrowed.deleted = True
        self.persistence.doom(ledger)
        self.pages.forget(ledger)

    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        # In this order: a ledger that leaves memory meanwhile has its file by then.
        found = {ledger.value for ledger, handle in list(self.handles.items()) if not handle.deleted}
        found |= self.persistence.ledgers()
        if scope is not None:
            found = {value for value in found if value >> 64 == scope}
        return map(LedgerId.from_value, sorted(found))

    def has_scoped_ledgers(self) -> bool:
        return bool(self._scoped_logger.log_ids) or self.persistence.has_scoped_ledgers()

    def _evict_handles(self) -> None:
        surplus = len(self.handles) - self.config.open_file_limit
        unused: list[LedgerId] = []
        if surplus > 0:
            unused = [ledger for ledger, handle in self.handles.items() if not self._is_in_use(handle)]
        # In this order: entries that leave the memtable meanwhile are in changed pages before.
        changed = self.pages.changed_ledgers()
        for ledger in [ledger for ledger in unused if ledger not in changed][: max(surplus, 0)]:
            del self.handles[ledger]
        for ledger in list(self._borrowed):
            if ledger not in changed:
                self._borrowed.pop(ledger, None)

    # --- entries -----------------------------------------------------------------------------------------------------

    def add(self, handle: IndexedHandle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        logger = self._scoped_logger if handle.ledger[0] else self._logger
        if not self.waits_for_disk:
            self.pages.prepare(handle, entry_ids)
        self.pages.put(handle, entry_ids, logger.add(handle, records, size))
        handle.last_entry = max(handle.last_entry, max(entry_ids))

    def has(self, handle: IndexedHandle, entry_id: int) -> bool:
        return 0 <= entry_id <= handle.last_entry and self.pages.location(handle.ledger, entry_id) != 0

    def find(self, handle: IndexedHandle, entry_id: int) -> Buffer | None:
        ledger = handle.ledger
        location = 0
        if 0 <= entry_id <= handle.last_entry:
            cached = self.pages.cached_location(ledger, entry_id)
            if cached is None:
                return None
            location = cached
        if location == 0:
            raise _not_found(handle, entry_id)
        logger = self._scoped_logger if ledger[0] else self._logger
        body = logger.find(location)
        if body is None:
            try:
                body = logger.read(location, ledger, entry_id, cached=True)
            except (OSError, Corrupt):
                return None  # `read` gets the same error, or finds the entry moved
        return body

    def read(self, handle: IndexedHandle, entry_id: int) -> Buffer:
        ledger = handle.ledger
        logger = self._scoped_logger if ledger[0] else self._logger
        while True:
            location = self.pages.location(ledger, entry_id) if 0 <= entry_id <= handle.last_entry else 0
            if location == 0:
                raise _not_found(handle, entry_id)
            body: Buffer | None = logger.find(location)
            try:
                if body is None:
                    body = logger.read(location, ledger, entry_id)
            except (OSError, Corrupt):
                # Compaction, or a full disk, may just have moved the entry.
                if self.pages.location(ledger, entry_id) == location:
                    raise
                continue
            assert body is not None
            return body

    def find_all(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        locations = self.pages.cached_locations(handle.ledger, entry_ids)
        return self._read_run(handle, entry_ids, locations, size_max, cached=True)

    def read_most(self, handle: IndexedHandle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        try:
            locations = self.pages.locations(handle.ledger, entry_ids)
        except (OSError, Corrupt):
            return [None] * len(entry_ids)
        return self._read_run(handle, entry_ids, locations, size_max)

    def _read_run(
        self,
        handle: IndexedHandle,
        entry_ids: Sequence[int],
        locations: Sequence[int],
        size_max: int,
        *,
        cached: bool = False,
    ) -> list[Buffer | None]:
        logger = self._scoped_logger if handle.ledger[0] else self._logger
        records = logger.find_all(locations)
        if records is None:
            return [*logger.read_run(handle.ledger, entry_ids, locations, size_max, cached=cached)]

        def read(unread: Sequence[int], size_max: int) -> list[Buffer | None]:
            located = dict(zip(entry_ids, locations, strict=True))
            places = [located[entry_id] for entry_id in unread]
            return [*logger.read_run(handle.ledger, unread, places, size_max, cached=cached)]

        return merge_found(records, entry_ids, size_max, read)

    def entry_ids(self, handle: IndexedHandle, is_wanted: IsWanted = always) -> Callable[[], Iterator[int]]:
        in_memory = self.pages.copy_of(handle.ledger)
        return lambda: self.pages.entry_ids(handle.ledger, in_memory, is_wanted)

    # --- garbage collection ------------------------------------------------------------------------------------------

    def update_locations(self, logger: EntryLogger, moves: Iterable[Move]) -> None:
        by_ledger: dict[LedgerId, list[Move]] = {}
        for move in moves:
            by_ledger.setdefault(move.ledger, []).append(move)
        for ledger, ledger_moves in by_ledger.items():
            handle = self.handles.get(ledger) or self._borrowed.get(ledger)
            if handle is None:
                # Without its header and its other pages, which may be damaged: the log must still be compacted.
                handle = self.persistence.load_pages(ledger)
                if handle is None:
                    continue
                self._borrowed[ledger] = handle
            self.pages.move(handle, ledger_moves)

    def live(self, logger: EntryLogger, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        return self.pages.live(entries)

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        return self._logger.unwritten_bytes + self._scoped_logger.unwritten_bytes + self.pages.surplus_bytes

    @property
    def is_flush_due(self) -> bool:
        return self.pages.changed_count >= CHANGED_PAGES_MAX or self.pages.is_full

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        sealed = False
        for logger in self.entry_loggers:
            if logger.buffered_bytes >= least:
                logger.seal()
                sealed = True
        return sealed

    def write_entries(self) -> None:
        for logger in self.entry_loggers:
            logger.write()

    def begin_flush(self) -> IndexFlush | None:
        self.seal_entries(1)
        if not self._has_changes():
            return None
        self._is_flushing = True
        return IndexFlush(self._take_headers(), self.pages.take_changes())

    def _has_changes(self) -> bool:
        return bool(self._changed_headers) or not self.pages.is_clean or self.persistence.has_doomed

    def _take_headers(self) -> dict[IndexedHandle, bytes]:
        changed, self._changed_headers = self._changed_headers, {}
        return {handle: self.persistence.header_of(handle) for handle in changed}

    def flush(self, flush: IndexFlush) -> None:
        self.write_entries()
        self._sync_logs()
        self._note_unwritten(self._write_index(flush.headers, flush.pages))

    def _sync_logs(self) -> None:
        for logger in self.entry_loggers:
            logger.sync()

    def _write_index(self, headers: dict[IndexedHandle, bytes], pages: ChangedPages) -> dict[LedgerId, Exception]:
        """Write headers and pages; return the ledgers whose file the disk refuses, and why.

        Raises OSError, also where the disk refuses a new file beside such a file: then the whole disk fails.
        """
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
                self._refuse_entries(handle, error)
                kept += len(pages.get(handle, {}))
                if len(failed) > UNWRITTEN_LEDGERS_MAX or kept > max(1, self.pages.limit // 4):
                    raise
        self.persistence.remove_doomed()
        return failed

    def _refuse_entries(self, handle: IndexedHandle, error: Exception) -> None:
        """Let the ledger accept no entries, because the disk refuses its index: memory could not hold them for long."""
        ledger = handle.ledger
        (self.handles.get(ledger) or handle).index_error = error
        if ledger not in self._refused_ledgers:
            log.error(
                "Ledger %s accepts no entries: the disk refuses its index (%s). Other ledgers are served, and the "
                "journals with its records stay until the disk takes the index, or the ledger is deleted: replicate "
                "it to another bookie, and look at the disk", ledger, error,
            )  # fmt: skip
        self._refused_ledgers[ledger] = error

    def _note_unwritten(self, failed: Collection[LedgerId]) -> None:
        """Record that the disk refused these ledgers in a flush, and no others: those accept entries again."""
        self.unwritten = frozenset(failed)
        for ledger in [ledger for ledger in list(self._refused_ledgers) if ledger not in self.unwritten]:
            del self._refused_ledgers[ledger]
            handle = self.handles.get(ledger)
            if handle is not None:
                handle.index_error = None
                log.warning("Ledger %s accepts entries again: the disk took its index", ledger)

    def end_flush(self, flush: IndexFlush, *, written: bool) -> None:
        self._is_flushing = False
        self.pages.finish(written=written, failed=self.unwritten)
        self._finish_headers(flush, written=written)
        if self._must_leave:
            self._must_leave = False
            self._has_left = self._relocate()

    def _finish_headers(self, flush: IndexFlush, *, written: bool) -> None:
        for handle in flush.headers:
            if not handle.deleted and (not written or handle.ledger in self.unwritten):
                self.change_header(handle)
            else:
                handle.header_changed = handle in self._changed_headers
        if written:
            self._evict_handles()


def _not_found(handle: IndexedHandle, entry_id: int) -> EntryNotFound:
    return EntryNotFound(f"No entry {entry_id} of ledger {handle.ledger} on this bookie")
