"""EntryMemTable: the newest entries, in memory until they are in logs. Source: EntryMemTable, WriteCache; BP-35."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

from bkctl.storage.ledger.ledger_handle import Handle

#: Memory of an entry besides its bytes.
ENTRY_OVERHEAD_BYTES: Final = 256


@dataclass(slots=True, eq=False)
class Snapshot(Generic[Handle]):
    """The entries of one memtable, current or being written: records by entry id, by ledger."""

    ledgers: dict[Handle, dict[int, bytes]] = field(default_factory=dict)
    #: Bytes of memory.
    size: int = 0
    is_sorted: bool = False
    #: Entry ids in the order of their first arrival, if the table keeps it.
    arrivals: list[tuple[Handle, list[int]]] = field(default_factory=list)
    #: Runs of entry ids of one ledger that are still to be written, in reverse order.
    todo: list[tuple[Handle, list[int]]] = field(default_factory=list)
    #: Runs that the entry loggers have, perhaps not in files yet.
    placed: list[tuple[Handle, list[int]]] = field(default_factory=list)
    #: Runs whose index page the disk refuses; the next write tries them again.
    unplaced: list[tuple[Handle, list[int]]] = field(default_factory=list)


class EntryMemTable(Generic[Handle]):
    """The newest entries of a bookie. One thread adds and takes snapshots, one at a time drops them, any may read.

    An entry counts `overhead_bytes` of memory more than its record has. `keeps_order` says whether
    snapshots have `arrivals`.
    """

    def __init__(self, overhead_bytes: int = ENTRY_OVERHEAD_BYTES) -> None:
        self.keeps_order = False
        self.current: Snapshot[Handle] = Snapshot()
        self.snapshots: tuple[Snapshot[Handle], ...] = ()
        self._overhead_bytes = overhead_bytes
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the bytes of memory of all entries."""
        return self.current.size + sum(snapshot.size for snapshot in self.snapshots)

    def add(self, handle: Handle, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Add entries, readable at once: `size` bytes in `records`; an entry replaces an older one of its id."""
        current = self.current
        entries = current.ledgers.get(handle)
        if entries is None:
            entries = current.ledgers[handle] = {}
        if self.keeps_order and (arrived := [each for each in dict.fromkeys(entry_ids) if each not in entries]):
            current.arrivals.append((handle, arrived))
        if len(records) == 1:
            last = entry_ids[0]
            entries[last] = records[0]
            current.size += size + self._overhead_bytes
        else:
            last = max(entry_ids)
            entries.update(zip(entry_ids, records, strict=True))
            current.size += size + self._overhead_bytes * len(records)
        if last > handle.last_entry:
            handle.last_entry = last

    def find(self, handle: Handle, entry_id: int) -> bytes | None:
        """Return the record of the newest copy of the entry, None if it is not here."""
        # In this order: `snapshot` adds the current one to `snapshots` before it replaces it.
        for snapshot in (self.current, *reversed(self.snapshots)):
            entries = snapshot.ledgers.get(handle)
            if entries is not None and (record := entries.get(entry_id)) is not None:
                return record
        return None

    def find_all(self, handle: Handle, entry_ids: Sequence[int]) -> list[bytes | None] | None:
        """Return what `find` returns of each entry; None if no entry of the ledger is here."""
        newest = self.current.ledgers.get(handle)
        found = None if newest is None else list(map(newest.get, entry_ids))
        for snapshot in reversed(self.snapshots):  # in the order of `find`
            entries = snapshot.ledgers.get(handle)
            if entries is None:
                continue
            if found is None:
                found = list(map(entries.get, entry_ids))
            elif None in found:
                found = [
                    entries.get(entry_id) if record is None else record
                    for entry_id, record in zip(entry_ids, found, strict=True)
                ]
        return found

    def entry_ids(self, handle: Handle) -> set[int]:
        """Return the ids of the ledger's entries here."""
        found: set[int] = set()
        for snapshot in (self.current, *self.snapshots):
            found.update(list(snapshot.ledgers.get(handle, ())))
        return found

    def holds(self, handle: Handle) -> bool:
        """Return whether any entry of the ledger is here."""
        return handle in self.current.ledgers or any(handle in snapshot.ledgers for snapshot in self.snapshots)

    def remove(self, handle: Handle) -> None:
        """Remove the entries of a deleted ledger that no snapshot has; the writer of a snapshot skips its others."""
        self.current.size -= self._size_of(self.current.ledgers.pop(handle, {}))

    def _size_of(self, entries: dict[int, bytes]) -> int:
        return sum(map(len, entries.values())) + self._overhead_bytes * len(entries)

    def snapshot(self) -> bool:
        """Freeze the entries added so far for writing, and start a new table; return False if there were none."""
        if not self.current.ledgers:
            return False
        with self._lock:
            self.snapshots = (*self.snapshots, self.current)
        self.current = Snapshot()
        return True

    @staticmethod
    def forget_placed(snapshot: Snapshot[Handle]) -> None:
        """Drop the placed entries, which can be read from the logs now: soon, while CPU caches still have them."""
        for handle, entry_ids in snapshot.placed:
            entries = snapshot.ledgers[handle]
            # One page at a time, so that other threads get their turn.
            deque(map(entries.__delitem__, entry_ids), maxlen=0)
            if not entries:
                del snapshot.ledgers[handle]
        snapshot.placed = []

    def drop(self, snapshot: Snapshot[Handle]) -> None:
        """Drop a snapshot, whose placed entries can be read from the logs now; it stays while any are `unplaced`."""
        if snapshot.unplaced:
            snapshot.size = sum(map(self._size_of, snapshot.ledgers.values()))
            return
        with self._lock:
            self.snapshots = tuple(kept for kept in self.snapshots if kept is not snapshot)
