"""LedgerHandle: the state of one ledger in memory, and EntryIndex, which knows where its entries are in entry logs.

Letters name the thread of a call: E the event loop, C the checkpoint thread, G garbage collection.
Source: LedgerDescriptorImpl, LedgerCache.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import Any, Final, Generic, TypeAlias, TypeVar

from bkctl.formats.layout import Buffer
from bkctl.ids import LedgerId
from bkctl.storage.entry_logger import EntryLogger, Move

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
    index: EntryIndex[Any] = field(init=False)
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


class EntryIndex(ABC, Generic[Handle]):
    """The index of entry logs: of scope 0, and of all other scopes. Any thread may call every method."""

    loggers: tuple[EntryLogger, EntryLogger]

    def logger_of(self, ledger: LedgerId) -> EntryLogger:
        """Return the writer of the entry logs that have the ledger."""
        return self.loggers[1 if ledger[0] else 0]

    @property
    @abstractmethod
    def has_scoped(self) -> bool:
        """Return whether there is a ledger of a scope other than 0. Raises OSError."""

    @abstractmethod
    def location(self, handle: Handle, entry_id: int) -> int:
        """Return the location of an entry, 0 if the index lacks it. Raises OSError, Corrupt."""

    @abstractmethod
    def find(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        """Return entries that need no disk, in order, None for others.

        The list ends early, behind at least one entry, once its entries have `size_max` bytes.
        """

    @abstractmethod
    def read(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | None]:
        """Return entries in order, read together as far as they are neighbours. Raises nothing.

        None for an entry that `read_at` must look for: missing, moved, damaged, or the disk failed. The list ends early
        as `find`'s.
        """

    def read_at(self, handle: Handle, entry_id: int, location: int) -> Buffer:
        """Return the entry at `location`. Raises OSError, Corrupt (something else is there)."""
        return self.logger_of(handle.ledger).read(location, handle.ledger, entry_id)

    @abstractmethod
    def entry_ids(self, handle: Handle, is_wanted: IsWanted) -> Callable[[], Iterator[int]]:
        """Return a function that yields the ids of entries in the index, ascending, while `is_wanted` (E)."""

    @abstractmethod
    def move(self, moves: Iterable[Move]) -> None:
        """Point the index to `new` where it still points to `old` (G), on disk with the next flush. Raises OSError."""

    @abstractmethod
    def live(self, entries: Sequence[tuple[LedgerId, int, int]]) -> list[bool]:
        """Return of each (ledger, entry id, location) if the index has it (G). Raises OSError, Corrupt."""

    def count_from_table(self, count: int) -> None:
        """Count entries that were read from the memtable."""
        return
