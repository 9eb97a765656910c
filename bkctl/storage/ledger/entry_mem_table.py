"""EntryMemTable: entries in memory, sorted when they are written. Source: EntryMemTable, EntryKey; BP-35."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from bkctl.storage.ledger.index_persistence import IndexedHandle

#: What an entry takes in memory besides its bytes.
ENTRY_OVERHEAD_BYTES: Final = 256


class EntryKey(NamedTuple):
    """What entries are sorted by."""

    scope_id: int
    ledger_id: int
    entry_id: int


class Snapshot:
    """Entries that belong together: those that are added now, or that are being written; their records by id."""

    __slots__ = ("is_sorted", "ledgers", "placed", "size", "todo")

    def __init__(self) -> None:
        self.ledgers: dict[IndexedHandle, dict[int, bytes]] = {}
        #: Bytes that it takes in memory.
        self.size = 0
        self.is_sorted = False
        #: What is still to be written, last first: runs of entry ids of one ledger.
        self.todo: list[tuple[IndexedHandle, list[int]]] = []
        #: What went to the entry loggers, and may not be in the files.
        self.placed: list[tuple[IndexedHandle, list[int]]] = []

    def keys(self) -> Iterator[EntryKey]:
        """Every entry, in order."""
        for handle in sorted(self.ledgers, key=lambda handle: handle.ledger):
            for entry_id in sorted(self.ledgers[handle]):
                yield EntryKey(*handle.ledger, entry_id)


class EntryMemTable:
    """The newest entries of a bookie. One thread adds and takes snapshots, any may look, one at a time drops them."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self.snapshots: tuple[Snapshot, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that all entries take in memory."""
        return self.current.size + sum(snapshot.size for snapshot in self.snapshots)

    def add(self, handle: IndexedHandle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Keep entries, `size` bytes in `records`, each instead of the one that may be here."""
        current = self.current
        if handle.table is not current:
            handle.table = current
            handle.entries = current.ledgers[handle] = {}
        handle.entries.update(zip(entry_ids, records, strict=True))
        current.size += size + ENTRY_OVERHEAD_BYTES * len(records)

    def find(self, handle: IndexedHandle, entry_id: int) -> bytes | None:
        """The record of the newest copy of the entry, None when it is not here."""
        # In this order: a snapshot is among the others before it stops being the current one.
        for snapshot in (self.current, *reversed(self.snapshots)):
            entries = snapshot.ledgers.get(handle)
            if entries is not None and (record := entries.get(entry_id)) is not None:
                return record
        return None

    def entry_ids(self, handle: IndexedHandle) -> set[int]:
        """The ids of the ledger's entries here."""
        found: set[int] = set()
        for snapshot in (self.current, *self.snapshots):
            found.update(list(snapshot.ledgers.get(handle, ())))
        return found

    def holds(self, handle: IndexedHandle) -> bool:
        """Whether any entry of the ledger is here."""
        return any(handle in snapshot.ledgers for snapshot in (self.current, *self.snapshots))

    def snapshot(self) -> bool:
        """Let what was added so far be written, and add to a new table from now on; whether there was anything."""
        if not self.current.ledgers:
            return False
        self.snapshots = (*self.snapshots, self.current)
        self.current = Snapshot()
        return True

    @staticmethod
    def forget_placed(snapshot: Snapshot) -> None:
        """Forget what the snapshot has placed, which can be read elsewhere now: soon, while caches still have it."""
        for handle, entry_ids in snapshot.placed:
            entries = snapshot.ledgers[handle]
            # By pages, so that other threads get their turn.
            deque(map(entries.__delitem__, entry_ids), maxlen=0)
            if not entries:
                # Handles hold it until their next entry.
                entries.clear()
                del snapshot.ledgers[handle]
        snapshot.placed = []

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot of which all can be read elsewhere now."""
        self.snapshots = tuple(each for each in self.snapshots if each is not snapshot)
