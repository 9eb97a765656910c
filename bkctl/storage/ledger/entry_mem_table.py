"""EntryMemTable: the newest entries, in memory until they are written. Source: EntryMemTable; BP-35."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bkctl.storage.ledger.index_persistence import IndexedHandle

#: Memory of an entry besides its bytes.
ENTRY_OVERHEAD_BYTES: Final = 256


@dataclass(slots=True, eq=False)
class Snapshot:
    """The entries of one memtable, current or being written: records by entry id, by ledger."""

    ledgers: dict[IndexedHandle, dict[int, bytes]] = field(default_factory=dict)
    #: Bytes of memory.
    size: int = 0
    is_sorted: bool = False
    #: Runs of entry ids of one ledger that are still to be written, in reverse order.
    todo: list[tuple[IndexedHandle, list[int]]] = field(default_factory=list)
    #: Runs that the entry loggers have, perhaps not in files yet.
    placed: list[tuple[IndexedHandle, list[int]]] = field(default_factory=list)
    #: Runs whose index page the disk refuses; the next write tries them again.
    unplaced: list[tuple[IndexedHandle, list[int]]] = field(default_factory=list)


class EntryMemTable:
    """The newest entries of a bookie. One thread adds and takes snapshots, one at a time drops them, any may read."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self.snapshots: tuple[Snapshot, ...] = ()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the bytes of memory of all entries."""
        return self.current.size + sum(snapshot.size for snapshot in self.snapshots)

    def add(self, handle: IndexedHandle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Add entries, `size` bytes in `records`; an entry replaces an older one of its id."""
        current = self.current
        if handle.table is not current:
            handle.table = current
            handle.entries = current.ledgers[handle] = {}
        if len(records) == 1:
            handle.entries[entry_ids[0]] = records[0]
            current.size += size + ENTRY_OVERHEAD_BYTES
        else:
            handle.entries.update(zip(entry_ids, records, strict=True))
            current.size += size + ENTRY_OVERHEAD_BYTES * len(records)

    def find(self, handle: IndexedHandle, entry_id: int) -> bytes | None:
        """Return the record of the newest copy of the entry, None if it is not here."""
        # In this order: `snapshot` adds the current one to `snapshots` before it replaces it.
        for snapshot in (self.current, *reversed(self.snapshots)):
            entries = snapshot.ledgers.get(handle)
            if entries is not None and (record := entries.get(entry_id)) is not None:
                return record
        return None

    def find_all(self, handle: IndexedHandle, entry_ids: Sequence[int]) -> list[bytes | None]:
        """Return what `find` returns of each entry."""
        # The newest first, and in the order of `find`.
        held = [snapshot.ledgers.get(handle) for snapshot in (self.current, *reversed(self.snapshots))]
        newest, *older = [entries for entries in held if entries is not None] or [{}]
        found = list(map(newest.get, entry_ids))
        for entries in older:
            if None in found:
                found = [
                    entries.get(entry_id) if record is None else record
                    for entry_id, record in zip(entry_ids, found, strict=True)
                ]
        return found

    def entry_ids(self, handle: IndexedHandle) -> set[int]:
        """Return the ids of the ledger's entries here."""
        found: set[int] = set()
        for snapshot in (self.current, *self.snapshots):
            found.update(list(snapshot.ledgers.get(handle, ())))
        return found

    def holds(self, handle: IndexedHandle) -> bool:
        """Return whether any entry of the ledger is here."""
        return any(handle in snapshot.ledgers for snapshot in (self.current, *self.snapshots))

    def snapshot(self) -> bool:
        """Freeze the entries added so far for writing, and start a new table; return False if there were none."""
        if not self.current.ledgers:
            return False
        with self._lock:
            self.snapshots = (*self.snapshots, self.current)
        self.current = Snapshot()
        return True

    @staticmethod
    def forget_placed(snapshot: Snapshot) -> None:
        """Drop the placed entries, which can be read from the logs now: soon, while CPU caches still have them."""
        for handle, entry_ids in snapshot.placed:
            entries = snapshot.ledgers[handle]
            # One page at a time, so that other threads get their turn.
            deque(map(entries.__delitem__, entry_ids), maxlen=0)
            if not entries:
                # Handles refer to the dictionary until their next entry.
                entries.clear()
                del snapshot.ledgers[handle]
        snapshot.placed = []

    def drop(self, snapshot: Snapshot) -> None:
        """Drop a snapshot, whose placed entries can be read from the logs now; it stays while any are `unplaced`."""
        if snapshot.unplaced:
            entries = snapshot.ledgers.values()
            snapshot.size = sum(len(record) + ENTRY_OVERHEAD_BYTES for each in entries for record in each.values())
            return
        with self._lock:
            self.snapshots = tuple(kept for kept in self.snapshots if kept is not snapshot)
