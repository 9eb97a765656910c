"""LedgerStorage: the interface that a bookie's storage classes share.

A storage class keeps entries, and of each ledger the master key, the fence and the explicit LAC. `BookieStorage` puts
the journals before it. E is the bookie's event loop, C its flush thread, G the garbage collector's.
Source: LedgerStorage, CompactableLedgerStorage, LedgerDescriptorImpl.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

from bkctl.disk import NO_SPACE
from bkctl.formats.layout import Buffer
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move

#: Entry log bytes in memory before they are written (unsynced).
CHUNK_SIZE_BYTES: Final = 1 << 20
#: Entry bytes in memory for which the bookie holds its connections back, where the storage does not say.
UNWRITTEN_BYTES_MAX: Final = 256 << 20


#: Asked now and then by what takes long: False, and it ends.
IsWanted: TypeAlias = Callable[[], bool]


def always() -> bool:
    """Return True: whoever asked for it waits for all of it."""
    return True


class NeedsDisk(Exception):
    """A request about `ledger` cannot be served from memory, and changed nothing.

    Run `read` in any thread, hand what it returns to `BookieStorage.supplied`, and serve the request again.
    """

    def __init__(self, ledger: LedgerId, read: Callable[[], Any]) -> None:
        super().__init__(f"ledger {ledger} is not in memory")
        self.ledger = ledger
        self.read = read


class LedgerHandle:
    """What a bookie knows of one ledger while it is in use. `last_entry` is the highest entry id here, −1 for none."""

    __slots__ = (
        "deleted",
        "explicit_lac",
        "fence_recorded",
        "fenced",
        "is_on_disk",
        "journal",
        "key_recorded",
        "lac",
        "lac_is_known",
        "lac_time_ms",
        "last_entry",
        "ledger",
        "master_key",
        "unknown",
        "watchers",
    )

    def __init__(self, ledger: LedgerId, master_key: bytes) -> None:
        self.ledger = ledger
        self.master_key = master_key
        #: The storage has the master key on disk, so that the journal need not say it before a fence.
        self.is_on_disk = False
        self.fenced = False
        #: The bookie may have lost entries or the fence, so that it gives no negative answers.
        self.unknown = False
        self.explicit_lac = b""
        self.last_entry = -1
        #: Highest LAC seen; what older entries say is added once it is asked for.
        self.lac = -1
        self.lac_is_known = True
        self.lac_time_ms = 0
        #: Since this bookie started: the master key, and the fence, went to the journal.
        self.key_recorded = False
        self.fence_recorded = False
        self.journal = 0
        self.watchers: dict[Callable[[], None], None] = {}
        self.deleted = False

    def wake(self) -> None:
        """Call, once, each watcher of the ledger's LAC."""
        watchers, self.watchers = self.watchers, {}
        for watcher in watchers:
            watcher()


Handle = TypeVar("Handle", bound=LedgerHandle)


class LedgerStorage(ABC, Generic[Handle]):
    """The entries and the state of a bookie's ledgers. Not the journals, so what it has in memory may be lost."""

    #: Whether `write_entries` writes what `seal_entries` prepared; else only a flush writes entries.
    writes_ahead: bool = True
    #: Larger entry ids are refused.
    entry_id_max: int = I64_MAX
    #: False: `add` raises NeedsDisk where it would have to wait for the disk.
    waits_for_disk: bool = True
    #: The bookie may have lost ledgers that it does not know, until Apache's bookie has checked its data.
    needs_integrity_check: bool = False
    #: The handles in memory, for the hot path.
    handles: dict[LedgerId, Handle]
    #: All id spaces of entry logs.
    entry_loggers: Sequence[EntryLogger]

    @abstractmethod
    def open(self) -> None:
        """Open the directories, made where missing. Raises OSError, Corrupt, Unsupported."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files, after the last flush."""

    # --- ledgers -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, ledger: LedgerId) -> Handle:
        """Return a new handle with what the disk says of a ledger without one; `is_on_disk` False: it is not here.

        Any thread may call it, one at a time for each ledger. Raises OSError, Corrupt, Unsupported.
        """

    @abstractmethod
    def blank(self, ledger: LedgerId) -> Handle:
        """Return a new handle that knows nothing of the ledger, to delete one whose index is damaged."""

    def get(self, ledger: LedgerId) -> Handle | None:
        """Return the ledger's handle, None when it is not here (E). Raises OSError, Corrupt, Unsupported."""
        handle = self.handles.get(ledger)
        if handle is None:
            loaded = self.load(ledger)
            if loaded.is_on_disk:
                handle = self.handles[ledger] = loaded
        return handle

    def create(self, handle: Handle, master_key: bytes) -> None:
        """Take in a ledger that `load` did not find, with the handle it returned (E); the next flush writes it."""
        handle.master_key = master_key
        self.handles[handle.ledger] = handle
        self.change_header(handle)

    @abstractmethod
    def change_header(self, handle: Handle) -> None:
        """Let the next flush write the ledger's master key, fence and explicit LAC, one of which changed (E)."""

    @abstractmethod
    def delete_ledger(self, handle: Handle) -> None:
        """Forget the ledger (E): its index goes now or with the next flush, its entries stay in the entry logs.

        Raises OSError.
        """

    @abstractmethod
    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        """The ledgers on disk and in memory, ascending, of one scope or of all; any thread may go through them."""

    @abstractmethod
    def has_scoped_ledgers(self) -> bool:
        """Whether there is an entry log or a ledger of a scope other than 0; after `open`. Raises OSError."""

    # --- entries -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def add(self, handle: Handle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Keep entries, `size` bytes in `records` (each behind its size as an int32), readable at once, in memory (E).

        Raises OSError or Corrupt where the index has to be read first, and cannot; some of them may be here then.
        Raises NeedsDisk in place of reading the index when `waits_for_disk` is False; none of them is here then.
        """

    @abstractmethod
    def has(self, handle: Handle, entry_id: int) -> bool:
        """Whether the entry is here; in any thread. Raises OSError, Corrupt."""

    @abstractmethod
    def find(self, handle: Handle, entry_id: int) -> Buffer | None:
        """The entry if that needs no disk, else None: then `read` it (E).

        Raises EntryNotFound or UnknownLedgerState when it is known not to be here.
        """

    @abstractmethod
    def read(self, handle: Handle, entry_id: int) -> Buffer:
        """The entry; in any thread.

        Raises EntryNotFound, UnknownLedgerState, OSError, Corrupt (it does not stand where the index says).
        """

    @abstractmethod
    def entry_ids(self, handle: Handle, is_wanted: IsWanted = always) -> Callable[[], Iterator[int]]:
        """A function that lists the ids of the ledger's entries, ascending (E); any thread may call it.

        It takes memory and time for entries that are here, and ends early when it is not wanted any more.
        """

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def unwritten_bytes(self) -> int:
        """Bytes added that are in memory only."""

    @property
    def unwritten_bytes_max(self) -> int:
        """With more of those the bookie takes no entries until a write or a flush is done."""
        return UNWRITTEN_BYTES_MAX

    @property
    @abstractmethod
    def is_flush_due(self) -> bool:
        """Whether a flush should not wait for its time, because memory fills up."""

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        """Prepare entries for `write_entries`, where they are `least` bytes or more; whether there are such (E)."""
        return False

    def write_entries(self) -> None:
        """Write what was sealed, unsynced. Raises OSError; nothing is lost then, the next call tries again."""
        return

    @abstractmethod
    def begin_flush(self) -> object | None:
        """What a flush of this moment writes, None when nothing changed (E). `end_flush` must follow, in time."""

    @abstractmethod
    def flush(self, flush: Any) -> None:
        """Write and sync the entry logs, then the index (C). Raises OSError; then the next flush does it all again."""

    @abstractmethod
    def end_flush(self, flush: Any, *, written: bool) -> None:
        """Take note that `flush` is done, or failed (E)."""

    def run_flush(self) -> None:
        """Run a whole flush in the calling thread. Raises OSError."""
        flush = self.begin_flush()
        if flush is not None:
            written = False
            try:
                self.flush(flush)
                written = True
            finally:
                self.end_flush(flush, written=written)

    def write_where_space(self, write: Callable[[], object]) -> OSError | None:
        """Call `write`, again for each full directory that can be left; return the error if none has space.

        Raises OSError for any other error.
        """
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                if not self.leave_full_disk():
                    return error
            else:
                return None

    # --- garbage collection ------------------------------------------------------------------------------------------

    @abstractmethod
    def set_writable(self, numbers: list[int]) -> None:
        """Let only the ledger directories of these numbers take new files, while there are any (E)."""

    def set_index_writable(self, numbers: list[int]) -> None:
        """The same for index directories, where the storage has files of its own in them (E)."""
        return

    def leave_full_disk(self) -> bool:
        """Give what a full disk refused to other directories, now or when a flush is done; False: there is no room (E).

        True: `write_entries` may be called again, unless a flush is under way.
        """
        return False

    @abstractmethod
    def update_locations(self, moves: Iterable[Move]) -> None:
        """Let the index say `new` where it still says `old` (G), on disk with the next flush. Raises OSError."""

    @abstractmethod
    def has_entry_at(self, ledger: LedgerId, entry_id: int, location: int) -> bool:
        """Whether the index says that the entry is at `location` (G). Raises OSError, Corrupt."""

    def live(self, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        """Whether the index says so, of each (ledger, entry id, location) of one log (G). Raises OSError, Corrupt."""
        return [self.has_entry_at(*each) for each in entries]

    def compact_locations(self, paths: Collection[str] = ()) -> None:
        """Compact the databases of locations at `paths`, all where none is named, if there are any (any thread)."""
        return

    def location_compactions(self) -> dict[str, bool]:
        """The databases of locations by path, and whether each is being compacted."""
        return {}
