"""LedgerStorage: what a bookie's storage classes do for themselves, and what is the same in all of them.

A storage class keeps entries, and the master key, fence and explicit LAC of each ledger. `BookieStorage` puts the
journals before it. New entries are in `table`, those in entry logs are found by the `indexes`; `reader` reads both.
Source: LedgerStorage, CompactableLedgerStorage.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic

from bkctl.config import BookieConfig
from bkctl.disk import Files
from bkctl.formats.names import CURRENT, SCOPED_DIRECTORY
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.entry_logger import EntryLogger
from bkctl.storage.ledger.entry_reader import ENTRY_OVERHEAD_BYTES, EntryMemTable, StoredEntryReader
from bkctl.storage.ledger.ledger_handle import EntryIndex, Handle

if TYPE_CHECKING:
    from bkctl.storage.ledger.db_indexes import EntryLocationIndex

#: Entry log bytes in memory before they are written (unsynced).
CHUNK_SIZE_BYTES: Final = 1 << 20
#: Entry bytes in memory at which the bookie pauses its connections, unless the storage class sets another limit.
UNWRITTEN_BYTES_MAX: Final = 256 << 20


class LedgerStorage(ABC, Generic[Handle]):
    """The entries and the state of a bookie's ledgers. Without the journals, a crash loses what is in memory."""

    #: True: `write_entries` writes what `seal_entries` prepared. False: only a flush writes entries.
    writes_ahead: bool = True
    #: Larger entry ids are refused.
    entry_id_max: int = I64_MAX
    #: The `unwritten_bytes` above which the bookie refuses entries until a write or a flush is done.
    unwritten_bytes_max: int = UNWRITTEN_BYTES_MAX
    #: False: a ledger that is not in memory raises NeedsDisk in place of waiting for the disk.
    waits_for_disk: bool = True
    #: The bookie may have lost whole ledgers, until Apache's bookie has finished its data integrity check.
    needs_integrity_check: bool = False
    #: Ledgers that the last flush could not write: the journals must keep their records, and no entry log with entries
    #: of them may be removed, since their index on disk may point there.
    unwritten: frozenset[LedgerId] = frozenset()
    #: One for all ledger directories, or one a directory; after `open`.
    indexes: Sequence[EntryIndex[Handle]] = ()
    #: Databases of locations that can be compacted; `close` waits for the end of a compaction.
    location_indexes: Sequence[EntryLocationIndex] = ()

    def __init__(self, config: BookieConfig, files: Files, *, overhead_bytes: int = ENTRY_OVERHEAD_BYTES) -> None:
        self.config, self.files = config, files
        self.ledger_directories = [Path(directory) / CURRENT for directory in config.ledger_directories]
        self.index_directories = [Path(directory) / CURRENT for directory in config.index_or_ledger_directories]
        #: The handles in memory, for the hot path.
        self.handles: dict[LedgerId, Handle] = {}
        #: Handles whose master key, fence or explicit LAC the next flush writes.
        self._changed: dict[LedgerId, Handle] = {}
        self.table: EntryMemTable[Handle] = EntryMemTable(overhead_bytes)
        self.reader = StoredEntryReader(self.table)

    @abstractmethod
    def open(self) -> None:
        """Open the directories, created where missing. Raises OSError, Corrupt, Unsupported."""

    @abstractmethod
    def close(self) -> None:
        """Close the files, after the last flush."""

    # --- ledgers -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, ledger: LedgerId) -> Handle:
        """Return a new handle with the state on disk of a ledger that has none; `is_on_disk` False: it is not here.

        With `index_error` its index is here, without the start: only replay, which has the key, may create it.
        Any thread may call it, one at a time for each ledger. Raises OSError, Corrupt, Unsupported.
        """

    @abstractmethod
    def blank(self, ledger: LedgerId) -> Handle:
        """Return a new handle without any state, to delete a ledger whose index is damaged."""

    def create(self, handle: Handle, master_key: bytes) -> None:
        """Create a ledger that `load` did not find, with the handle it returned (E); the next flush writes it."""
        handle.master_key, handle.index_error = master_key, None
        self.handles[handle.ledger] = handle
        self.change_header(handle)

    def change_header(self, handle: Handle) -> None:
        """Set `header_changed` and let the next flush write master key, fence and explicit LAC (E)."""
        handle.header_changed = True
        self._changed[handle.ledger] = handle

    def delete_ledger(self, handle: Handle) -> None:
        """Delete the ledger (E), its index now or with the next flush, but no entry in a log. Raises OSError."""
        handle.deleted = True
        self.handles.pop(handle.ledger, None)
        self._changed.pop(handle.ledger, None)
        self.table.remove(handle)
        self._delete_index(handle)

    @abstractmethod
    def _delete_index(self, handle: Handle) -> None:
        """Delete a ledger's index now or with the next flush (E)."""

    def unused(self) -> list[LedgerId]:
        """Return the ledgers in memory that may leave it, oldest first (E).

        The others have changes that the disk lacks, or watchers that wait for a LAC.
        """
        holds = self.table.holds
        return [
            ledger
            for ledger, handle in self.handles.items()
            if not (handle.header_changed or handle.watchers or holds(handle))
        ]

    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        """Return the ledgers on disk and in memory, ascending, of one scope or of all; for any thread."""
        # In this order: a ledger that leaves memory meanwhile is in the index by then.
        new = sorted(
            ledger
            for ledger, handle in tuple(self.handles.items())
            if not handle.deleted and (scope is None or ledger[0] == scope)
        )
        return map(itemgetter(0), groupby(heapq.merge(new, self._indexed_ledgers(scope))))

    @abstractmethod
    def _indexed_ledgers(self, scope: int | None) -> Iterator[LedgerId]:
        """Return the ledgers in the index that are not deleted, ascending, of one scope or of all; for any thread."""

    def has_scoped_ledgers(self) -> bool:
        """Return whether there is an entry log or a ledger of a scope other than 0; after `open`. Raises OSError."""
        return any(index.loggers[1].log_ids or index.has_scoped for index in self.indexes)

    # --- entry logs --------------------------------------------------------------------------------------------------

    def _open_loggers(self, directories: Sequence[Path]) -> tuple[EntryLogger, EntryLogger]:
        """Return the writers of the entry logs of scope 0, and of all other scopes, in ledger directories."""
        plain, scoped = (
            EntryLogger(
                [directory / SCOPED_DIRECTORY if is_scoped else directory for directory in directories],
                self.files,
                scoped=is_scoped,
                size_limit=self.config.log_size_limit,
                pick_directory=self._pick_directory,
                preallocates=self.config.entry_log_file_preallocation_enabled,
            )
            for is_scoped in (False, True)
        )
        return plain, scoped

    def _pick_directory(self) -> int:
        """Return the number of the directory, of an entry logger's, that a new log goes to."""
        return 0

    @property
    def entry_loggers(self) -> list[EntryLogger]:
        """Return the writers of all id spaces of entry logs."""
        return [logger for index in self.indexes for logger in index.loggers]

    def index_of(self, logger: EntryLogger) -> EntryIndex[Handle]:
        """Return the index that points into the logs of `logger`."""
        return next(index for index in self.indexes if logger in index.loggers)

    def set_writable(self, ledger_numbers: list[int], index_numbers: list[int]) -> None:
        """Let only the ledger and index directories of these numbers take new files, while there are any (E).

        A storage class whose ledgers stay in their directories ignores it.
        """
        return

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    def unwritten_bytes(self) -> int:
        """Return the bytes of memory that wait for a write or a flush."""
        return self.table.size

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        """Prepare the entries in memory for `write_entries` if they are `least` bytes or more; return whether (E)."""
        return False

    def write_entries(self) -> None:
        """Write the sealed entries, unsynced. Raises OSError; nothing is lost then, the next call tries again."""
        return

    @property
    @abstractmethod
    def is_flush_due(self) -> bool:
        """Return whether memory fills up, so that a flush should not wait for its interval."""

    @abstractmethod
    def begin_flush(self) -> object | None:
        """Return the work of a flush of this moment, None when nothing changed (E). `end_flush` must follow."""

    @abstractmethod
    def flush(self, flush: Any) -> None:
        """Write and sync the entry logs, then the index (C). Raises OSError; then the next flush repeats everything.

        A ledger whose own files the disk refuses is `unwritten` afterwards; the next flush writes it again.
        """

    @abstractmethod
    def end_flush(self, flush: Any, *, written: bool) -> None:
        """Record that `flush` is on disk, or failed (E)."""


def run_whole(begin: Callable[[], Any], write: Callable[[Any], None], end: Callable[..., None]) -> None:
    """Run a whole flush or checkpoint in the calling thread: `begin`, `write`, `end`. Raises OSError."""
    work, written = begin(), False
    if work is not None:
        try:
            write(work)
            written = True
        finally:
            end(work, written=written)
