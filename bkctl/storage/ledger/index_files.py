"""LedgerIndexFiles: one index file a ledger, for the entry logs of all directories of Sorted and Interleaved.

An index file only ever points into synced entry logs. Entries of scoped ledgers have entry logs of their own, below
`current/scoped`. Source: LedgerCacheImpl; BP-35.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from bkctl.errors import Corrupt
from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move
from bkctl.storage.ledger.index_pages import ChangedPages, IndexInMemPageMgr
from bkctl.storage.ledger.index_persistence import IndexedHandle, IndexFileFailed, IndexPersistenceMgr
from bkctl.storage.ledger.ledger_handle import EntryIndex, IsWanted

log: Final = logging.getLogger("bkctl.bookie")

#: A flush that cannot write the index of more ledgers fails: the disk is damaged, not single files.
UNWRITTEN_LEDGERS_MAX: Final = 100


class LedgerIndexFiles(EntryIndex[IndexedHandle]):
    """The index of the logs that `loggers` write. `handles` are the ledgers in memory."""

    def __init__(
        self,
        persistence: IndexPersistenceMgr,
        pages: IndexInMemPageMgr,
        loggers: tuple[EntryLogger, EntryLogger],
        handles: Mapping[LedgerId, IndexedHandle],
    ) -> None:
        self.persistence, self.pages, self.loggers = persistence, pages, loggers
        self._handles = handles
        #: Handles of ledgers that only the garbage collector's thread uses.
        self._borrowed: dict[LedgerId, IndexedHandle] = {}
        #: Ledgers whose index the disk refuses, and why.
        self._refused: dict[LedgerId, Exception] = {}

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
