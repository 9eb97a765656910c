"""InterleavedLedgerStorage: entries of all ledgers in the order they came in one entry log, and an index file a ledger.

Nothing in an index file ever points at what is not in a synced entry log. Entries of scoped ledgers have entry logs of
their own, below `current/scoped`. Source: InterleavedLedgerStorage; BP-35.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from bkctl.config import BookieConfig
from bkctl.errors import EntryNotFound
from bkctl.formats.entry_log import SCOPED_DIRECTORY
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.files import Files
from bkctl.storage.ledger_index import ENTRY_ID_MAX, IndexedHandle, IndexFlush, LedgerIndex
from bkctl.storage.ledger_storage import CHUNK_SIZE_BYTES, CURRENT, LedgerStorage

#: Changed index pages before a flush is due whatever the flush interval.
CHANGED_PAGES_MAX: Final = 4096


class InterleavedLedgerStorage(LedgerStorage[IndexedHandle]):
    """The ledgers in the ledger and index directories of `config`; `chance` picks directories."""

    entry_id_max = ENTRY_ID_MAX

    def __init__(self, config: BookieConfig, files: Files, *, chance: random.Random | None = None) -> None:
        self.config = config
        self.files = files
        self.ledger_directories = [Path(each) / CURRENT for each in config.ledger_directories]
        index_directories = config.index_directories or config.ledger_directories
        self.index_directories = [Path(each) / CURRENT for each in index_directories]
        self._writable = list(range(len(self.ledger_directories)))
        self._index_writable = list(range(len(self.index_directories)))
        self._chance = chance or random.Random()
        self.index = LedgerIndex(
            self.index_directories,
            self.files,
            page_size=config.page_size,
            page_limit=config.page_limit,
            handle_limit=config.open_file_limit,
            version=config.file_info_format_version_to_write,
            pick_directory=self._pick_index_directory,
        )
        self.handles = self.index.handles

    def _pick_index_directory(self) -> int:
        return self._chance.choice(self._index_writable or range(len(self.index_directories)))

    def _pick_ledger_directory(self) -> int:
        return self._chance.choice(self._writable or range(len(self.ledger_directories)))

    def set_writable(self, numbers: list[int]) -> None:
        """Let only these ledger directories take new files; an entry log in another one is completed as it is.

        While there are none, everything stays where it is. Source: EntryLogManagerForSingleEntryLog.
        """
        self._writable = numbers
        if numbers:
            for logger in self.entry_loggers:
                logger.stay_in(numbers)

    def set_index_writable(self, numbers: list[int]) -> None:
        self._index_writable = numbers

    def open(self) -> None:
        for directory in (*self.ledger_directories, *self.index_directories):
            self.files.make_directory(directory)
        self._logger = self._open_logger(self.ledger_directories, scoped=False)
        scoped_directories = [each / SCOPED_DIRECTORY for each in self.ledger_directories]
        self._scoped_logger = self._open_logger(scoped_directories, scoped=True)
        self.entry_loggers = (self._logger, self._scoped_logger)

    def _open_logger(self, directories: list[Path], *, scoped: bool) -> EntryLogger:
        return EntryLogger(
            directories,
            self.files,
            scoped=scoped,
            size_limit=self.config.log_size_limit,
            pick_directory=self._pick_ledger_directory,
        )

    def close(self) -> None:
        return

    # --- ledgers -----------------------------------------------------------------------------------------------------

    def get(self, ledger: LedgerId) -> IndexedHandle | None:
        return self.index.get(ledger)

    def create(self, ledger: LedgerId, master_key: bytes) -> IndexedHandle:
        return self.index.create(ledger, master_key)

    def change_header(self, handle: IndexedHandle) -> None:
        self.index.change_header(handle)

    def delete_ledger(self, handle: IndexedHandle) -> None:
        self.index.remove(handle)
        self.index.delete(handle)

    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        return iter(sorted(each for each in self.index.ledgers() if scope is None or each.scope_id == scope))

    def has_scoped_ledgers(self) -> bool:
        return bool(self._scoped_logger.log_ids) or self.index.has_scoped_ledgers()

    # --- entries -----------------------------------------------------------------------------------------------------

    def add(self, handle: IndexedHandle, entry_id: int, size_field: bytes, body: Buffer) -> None:
        logger = self._scoped_logger if handle.ledger[0] else self._logger
        self.index.put(handle, entry_id, logger.add(handle.ledger, size_field, body))

    def has(self, handle: IndexedHandle, entry_id: int) -> bool:
        return self.index.location(handle, entry_id) != 0

    def _location(self, handle: IndexedHandle, entry_id: int) -> int:
        location = self.index.location(handle, entry_id)
        if location == 0:
            raise EntryNotFound(f"No entry {entry_id} of ledger {handle.ledger} on this bookie")
        return location

    def find(self, handle: IndexedHandle, entry_id: int) -> Buffer | None:
        logger = self._scoped_logger if handle.ledger[0] else self._logger
        location = self._location(handle, entry_id)
        body = logger.find(location)
        return logger.read(location, handle.ledger, entry_id, cached=True) if body is None else body

    def read(self, handle: IndexedHandle, entry_id: int) -> Buffer:
        logger = self._scoped_logger if handle.ledger[0] else self._logger
        location = self._location(handle, entry_id)
        body: Buffer | None = logger.find(location)
        if body is None:
            body = logger.read(location, handle.ledger, entry_id)
        assert body is not None
        return body

    def entry_ids(self, handle: IndexedHandle) -> Callable[[], Iterator[int]]:
        in_memory = self.index.pages(handle)

        def entry_ids() -> Iterator[int]:
            for first, page in self.index.locations(handle, in_memory):
                if 0 not in page:
                    yield from range(first, first + len(page))
                else:
                    yield from (first + slot for slot, location in enumerate(page) if location)

        return entry_ids

    # --- garbage collection ------------------------------------------------------------------------------------------

    def update_locations(self, moves: Iterable[Move]) -> None:
        self.index.move(moves)

    def has_entry_at(self, ledger: LedgerId, entry_id: int, location: int) -> bool:
        return self.index.location_of(ledger, entry_id) == location

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        return self._logger.unwritten_bytes + self._scoped_logger.unwritten_bytes

    @property
    def is_flush_due(self) -> bool:
        return self.index.changed_pages >= CHANGED_PAGES_MAX

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
        changes = self.index.take_changes()
        if not changes.headers and not changes.pages:
            self.index.finish(changes, written=True)
            return None
        return changes

    def flush(self, flush: IndexFlush) -> None:
        self.write_entries()
        for logger in self.entry_loggers:
            logger.sync()
        self.index.write(flush)

    def end_flush(self, flush: IndexFlush, *, written: bool) -> None:
        self.index.finish(flush, written=written)
