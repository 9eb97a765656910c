"""LedgerStorage: the interface of a bookie's storage classes.

A storage class keeps entries, and the master key, fence and explicit LAC of each ledger. `BookieStorage` puts the
journals before it. Letters name the thread of a call: E the event loop, C the checkpoint thread, G garbage collection.
Source: LedgerStorage, CompactableLedgerStorage, LedgerDescriptorImpl.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from bkctl.config import BookieConfig
from bkctl.disk import NO_SPACE
from bkctl.errors import BkctlError
from bkctl.formats.layout import Buffer
from bkctl.formats.record import RECORD_SIZE, body_of
from bkctl.ids import I64_MAX, LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move

#: Entry log bytes in memory before they are written (unsynced).
CHUNK_SIZE_BYTES: Final = 1 << 20
#: Entry bytes in memory at which the bookie pauses its connections, unless the storage class sets another limit.
UNWRITTEN_BYTES_MAX: Final = 256 << 20
_BODY_AT: Final = RECORD_SIZE.size


#: The LAC that a watcher of a ledger knows, and a number of its own.
WatcherKey: TypeAlias = tuple[int, int]
_watcher_numbers: Final = itertools.count()
_KEY_OF: Final = itemgetter(0)

#: Polled by long operations, which end once it returns False.
IsWanted: TypeAlias = Callable[[], bool]


def always() -> bool:
    """Return True: the caller waits for the whole result."""
    return True


class NeedsDisk(Exception):
    """A request about `ledger` needs the disk, and changed nothing.

    Run `read` in any thread, pass its result to `BookieStorage.supplied`, and serve the request again.
    """

    def __init__(self, ledger: LedgerId, read: Callable[[], Any]) -> None:
        super().__init__(f"ledger {ledger} is not in memory")
        self.ledger = ledger
        self.read = read


@dataclass(slots=True, eq=False, repr=False)
class LedgerHandle:
    """The state of one ledger in memory. `last_entry` is the highest entry id here, −1 for none."""

    ledger: LedgerId
    master_key: bytes
    _: KW_ONLY
    #: The storage has the master key on disk, so that no key record need precede a fence in the journal.
    is_on_disk: bool = False
    #: The disk lacks a change of the master key, the fence or the explicit LAC: true from `change_header` until the
    #: flush that writes the change has ended.
    header_changed: bool = False
    fenced: bool = False
    #: The bookie may have lost entries or the fence, so that it must not deny having an entry.
    unknown: bool = False
    explicit_lac: bytes = b""
    #: The error of the ledger's index, which the disk refused or which lost its start: entries are refused until a
    #: flush has written the index.
    index_error: Exception | None = None
    last_entry: int = -1
    #: Highest LAC seen; unless `lac_is_known`, entries on disk may have a higher one.
    lac: int = -1
    lac_is_known: bool = True
    #: The journal got the master key, and the fence, since this bookie started.
    key_recorded: bool = False
    fence_recorded: bool = False
    journal: int = 0
    #: Callbacks that wait for a higher LAC, by ascending key. A handle with watchers is not evicted.
    watchers: list[tuple[WatcherKey, Callable[[], object]]] = field(default_factory=list)
    deleted: bool = False

    def watch(self, lac: int, call: Callable[[], object]) -> WatcherKey:
        """Have `wake` call `call`, once, when the ledger's LAC exceeds `lac`, or the ledger is fenced or deleted."""
        key = lac, next(_watcher_numbers)
        bisect.insort(self.watchers, (key, call), key=_KEY_OF)
        return key

    def unwatch(self, key: WatcherKey) -> None:
        """Forget a watcher, which may have been called."""
        at = bisect.bisect_left(self.watchers, key, key=_KEY_OF)
        if at < len(self.watchers) and self.watchers[at][0] == key:
            del self.watchers[at]

    def wake(self) -> None:
        """Call, and forget, the watchers of a lower LAC; all of them if the ledger is fenced or deleted."""
        count = len(self.watchers)
        if not (self.fenced or self.deleted):
            count = bisect.bisect_left(self.watchers, (self.lac, 0), key=_KEY_OF)
        called = self.watchers[:count]
        del self.watchers[:count]
        for _, call in called:
            call()


Handle = TypeVar("Handle", bound=LedgerHandle)


class LedgerStorage(ABC, Generic[Handle]):
    """The entries and the state of a bookie's ledgers. Without the journals, a crash loses what is in memory."""

    #: True: `write_entries` writes what `seal_entries` prepared. False: only a flush writes entries.
    writes_ahead: bool = True
    #: Larger entry ids are refused.
    entry_id_max: int = I64_MAX
    #: False: `add` raises NeedsDisk in place of waiting for the disk.
    waits_for_disk: bool = True
    #: The bookie may have lost whole ledgers, until Apache's bookie has finished its data integrity check.
    needs_integrity_check: bool = False
    #: Ledgers that the last flush could not write: the journals must keep their records, and no entry log with entries
    #: of them may be removed, since their index on disk may point there.
    unwritten: frozenset[LedgerId] = frozenset()
    #: The handles in memory, for the hot path.
    handles: dict[LedgerId, Handle]
    #: All id spaces of entry logs.
    entry_loggers: Sequence[EntryLogger]
    config: BookieConfig
    #: The handles that the last eviction by `make_room` left.
    _handles_left = 0

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

    def make_room(self) -> None:
        """Evict handles before another one comes, if many have come (E): a bookie that is only read has no flushes."""
        limit = self.config.open_file_limit
        if len(self.handles) > max(limit, self._handles_left) + limit // 4:
            self._evict_handles()
            self._handles_left = len(self.handles)

    @abstractmethod
    def _evict_handles(self) -> None:
        """Evict the oldest handles beyond `openFileLimit` that are not in use (E)."""

    def _is_in_use(self, handle: Handle) -> bool:
        """Return whether the handle must stay (E): the disk lacks a change of it, or watchers wait for its LAC."""
        return handle.header_changed or bool(handle.watchers)

    @abstractmethod
    def change_header(self, handle: Handle) -> None:
        """Set `header_changed` and let the next flush write master key, fence and explicit LAC (E)."""

    @abstractmethod
    def delete_ledger(self, handle: Handle) -> None:
        """Delete the ledger (E), its index now or with the next flush, but no entry in a log. Raises OSError."""

    @abstractmethod
    def ledger_ids(self, scope: int | None = None) -> Iterator[LedgerId]:
        """Return the ledgers on disk and in memory, ascending, of one scope or of all; for any thread."""

    @abstractmethod
    def has_scoped_ledgers(self) -> bool:
        """Return whether there is an entry log or a ledger of a scope other than 0; after `open`. Raises OSError."""

    # --- entries -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def add(self, handle: Handle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Keep entries in memory, readable at once: `size` bytes in `records`, each behind its size as an int32 (E).

        Raises OSError or Corrupt if the index cannot be read; part of the entries may be here then. Raises NeedsDisk in
        place of reading the index when `waits_for_disk` is False; no entry is added then.
        """

    @abstractmethod
    def has(self, handle: Handle, entry_id: int) -> bool:
        """Return whether the entry is here; for any thread. Raises OSError, Corrupt."""

    @abstractmethod
    def find(self, handle: Handle, entry_id: int) -> Buffer | None:
        """Return the entry if it is in memory, else None: then `read` it (E).

        Raises EntryNotFound or UnknownLedgerState for an entry that is certainly not here.
        """

    @abstractmethod
    def read(self, handle: Handle, entry_id: int) -> Buffer:
        """Return the entry; for any thread.

        Raises EntryNotFound, UnknownLedgerState, OSError, Corrupt (the index points to something else).
        """

    @abstractmethod
    def find_all(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        """Return entries that are in memory, in order, None for others: then `read_all` them (E).

        The list ends early, behind at least one entry, once its entries have `size_max` bytes.
        """

    def read_all(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | Exception]:
        """Return entries in order; for any thread. An entry that `read` refuses is replaced by the error it raises.

        The list ends early, behind at least one entry, once its entries have `size_max` bytes.
        """
        found: list[Buffer | Exception] = []
        size = 0
        for entry_id, body in zip(entry_ids, self.read_most(handle, entry_ids, size_max), strict=False):
            entry: Buffer | Exception
            try:
                entry = self.read(handle, entry_id) if body is None else body
            except (OSError, BkctlError) as error:
                entry = error.with_traceback(None)  # which holds this frame, and the entries with it
            else:
                size += len(entry)
            found.append(entry)
            if size >= size_max:
                break
        return found

    @abstractmethod
    def read_most(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        """Return entries in order, read together as far as they are neighbours; for any thread. Raises nothing.

        None for an entry that `read` must look for: missing, moved, damaged, or the disk failed. The list ends early as
        `find_all`'s.
        """

    @abstractmethod
    def entry_ids(self, handle: Handle, is_wanted: IsWanted = always) -> Callable[[], Iterator[int]]:
        """Return a function that yields the ids of the ledger's entries, ascending (E); any thread may call it.

        Its memory and time depend on the entries that are here. It ends early once `is_wanted` returns False.
        """

    # --- flushes -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def unwritten_bytes(self) -> int:
        """Return the bytes added that are in memory only."""

    @property
    def unwritten_bytes_max(self) -> int:
        """Return the `unwritten_bytes` above which the bookie refuses entries until a write or a flush is done."""
        return UNWRITTEN_BYTES_MAX

    @property
    @abstractmethod
    def is_flush_due(self) -> bool:
        """Return whether memory fills up, so that a flush should not wait for its interval."""

    def seal_entries(self, least: int = CHUNK_SIZE_BYTES) -> bool:
        """Prepare the entries in memory for `write_entries` if they are `least` bytes or more; return whether (E)."""
        return False

    def write_entries(self) -> None:
        """Write the sealed entries, unsynced. Raises OSError; nothing is lost then, the next call tries again."""
        return

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
        """Let only the index directories of these numbers take new files, if the storage has index files (E)."""
        return

    def leave_full_disk(self) -> bool:
        """Move the entries that a full disk refused to other directories, now or after the flush that is running (E).

        Return False if no directory has room. If True, `write_entries` may be called again, unless a flush is running.
        """
        return False

    @abstractmethod
    def update_locations(self, logger: EntryLogger, moves: Iterable[Move]) -> None:
        """Point the index to `new` where it still points to `old` (G), on disk with the next flush. Raises OSError.

        Both are locations in logs of `logger`.
        """

    @abstractmethod
    def live(self, logger: EntryLogger, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        """Return of each (ledger, entry id, location) of a log of `logger` if the index has it (G).

        Raises OSError, Corrupt.
        """

    def compact_locations(self, paths: Collection[str] = (), is_wanted: IsWanted = always) -> None:
        """Compact the location databases at `paths`, all without `paths`, while `is_wanted`; for any thread.

        `close` waits for its end.
        """
        return

    def location_compactions(self) -> dict[str, bool]:
        """Return the location databases by path, with True for one that is being compacted."""
        return {}


def merge_found(
    records: Sequence[bytes | None],
    entry_ids: Sequence[int],
    size_max: int,
    read: Callable[[Sequence[int], int], list[Buffer | None]],
) -> list[Buffer | None]:
    """Return the entries in `records`, and for None what `read` returns of these entries, up to `size_max` bytes."""
    if None not in records and sum(map(len, cast("Sequence[bytes]", records))) <= size_max:
        return [memoryview(record)[_BODY_AT:] for record in cast("Sequence[bytes]", records)]
    found: list[Buffer | None] = []
    size = 0
    for record in records:
        if size >= size_max:
            break
        found.append(None if record is None else body_of(record))
        size += 0 if record is None else len(record)
    missing = [number for number, body in enumerate(found) if body is None]
    if missing:
        fill(found, missing, read([entry_ids[number] for number in missing], size_max))
    return found


def fill(found: list[Buffer | None], missing: Sequence[int], read: Sequence[Buffer | None]) -> None:
    """Put what was read at the places `missing` of `found`, which ends before the first place that was not read."""
    for number, body in zip(missing, read, strict=False):
        found[number] = body
    if len(read) < len(missing):
        del found[missing[len(read)] :]
