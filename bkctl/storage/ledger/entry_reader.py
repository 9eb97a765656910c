"""Entries of ledgers: the newest in EntryMemTable until they are in logs, the others read from logs by the index.

Source: EntryMemTable, WriteCache; BP-35.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Final, Generic, cast

from bkctl.errors import BkctlError, Corrupt, EntryNotFound, UnknownLedgerState
from bkctl.formats.layout import Buffer
from bkctl.formats.record import RECORD_SIZE, body_of
from bkctl.storage.ledger.ledger_handle import Handle, IsWanted, always

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
        if not self.current.ledgers:  # Replaced copies were counted, too, and no snapshot would end them.
            self.current.size = 0

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


_BODY_AT: Final = RECORD_SIZE.size


class StoredEntryReader(Generic[Handle]):
    """Reader of the entries in `table`, and of those that are indexed: looked for in this order, none is missed."""

    def __init__(self, table: EntryMemTable[Handle]) -> None:
        self._table = table

    def has(self, handle: Handle, entry_id: int) -> bool:
        """Return whether the entry is here; for any thread. Raises OSError, Corrupt."""
        if not 0 <= entry_id <= handle.last_entry:
            return False
        return self._table.find(handle, entry_id) is not None or handle.index.location(handle, entry_id) != 0

    def find(self, handle: Handle, entry_id: int) -> Buffer | None:
        """Return the entry if it needs no disk, else None: then `read` it; for any thread.

        Raises EntryNotFound or UnknownLedgerState for an id behind the last entry.
        """
        record = self._table.find(handle, entry_id)
        if record is not None:
            handle.index.count_from_table(1)
            return body_of(record)
        if not 0 <= entry_id <= handle.last_entry:
            raise _absent(handle, entry_id)
        return handle.index.find(handle, (entry_id,), 1)[0]

    def read(self, handle: Handle, entry_id: int) -> Buffer:
        """Return the entry; for any thread.

        Raises EntryNotFound, UnknownLedgerState, OSError, Corrupt (the index points to something else).
        """
        index = handle.index
        while True:
            body = self.find(handle, entry_id)
            if body is not None:
                return body
            location = index.location(handle, entry_id)
            if not location:
                raise _absent(handle, entry_id)
            try:
                return index.read_at(handle, entry_id, location)
            except (OSError, Corrupt):
                # Compaction, or a full disk, may just have moved the entry.
                if index.location(handle, entry_id) == location:
                    raise

    def find_all(
        self, handle: Handle, entry_ids: Sequence[int], size_max: int, *, waits: bool = False
    ) -> list[Buffer | None]:
        """Return entries that need no disk, in order, None for others: then `read_all` them; for any thread.

        With `waits`, None only for an entry that needs a closer look. The list ends early, behind at least one entry,
        once its entries have `size_max` bytes.
        """
        read = handle.index.read if waits else handle.index.find
        table = self._table
        if handle not in table.current.ledgers and not table.snapshots:  # in this order, as `EntryMemTable.find`
            return read(handle, entry_ids, size_max)
        records = table.find_all(handle, entry_ids)
        if records is None:
            return read(handle, entry_ids, size_max)
        absent = records.count(None)
        handle.index.count_from_table(len(records) - absent)
        if not absent and sum(map(len, cast("list[bytes]", records))) <= size_max:
            return [memoryview(record)[_BODY_AT:] for record in cast("list[bytes]", records)]
        found: list[Buffer | None] = []
        size = 0
        for record in records:
            if size >= size_max:
                break
            found.append(None if record is None else body_of(record))
            size += 0 if record is None else len(record)
        missing = [number for number, body in enumerate(found) if body is None]
        if missing:
            fill(found, missing, read(handle, [entry_ids[number] for number in missing], size_max))
        return found

    def read_all(self, handle: Handle, entry_ids: Sequence[int], size_max: int) -> list[Buffer | Exception]:
        """Return entries in order; for any thread. An entry that `read` refuses is replaced by the error it raises.

        The list ends early as `find_all`'s.
        """
        found: list[Buffer | Exception] = []
        size = 0
        for entry_id, body in zip(entry_ids, self.find_all(handle, entry_ids, size_max, waits=True), strict=False):
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

    def entry_ids(self, handle: Handle, is_wanted: IsWanted = always) -> Callable[[], Iterator[int]]:
        """Return a function that yields the ids of the ledger's entries, ascending (E); any thread may call it.

        Its memory and time depend on the entries that are here. It ends early once `is_wanted` returns False.
        """
        recent = self._table.entry_ids(handle)
        indexed = handle.index.entry_ids(handle, is_wanted)
        return lambda: map(itemgetter(0), groupby(heapq.merge(sorted(recent), indexed())))


def fill(found: list[Buffer | None], missing: Sequence[int], read: Sequence[Buffer | None]) -> None:
    """Put what was read at the places `missing` of `found`, which ends before the first place that was not read."""
    for number, body in zip(missing, read, strict=False):
        found[number] = body
    if len(read) < len(missing):
        del found[missing[len(read)] :]


def _absent(handle: Handle, entry_id: int) -> BkctlError:
    if handle.unknown:
        return UnknownLedgerState(f"Ledger {handle.ledger} awaits a data integrity check: entry {entry_id} may be lost")
    return EntryNotFound(f"No entry {entry_id} of ledger {handle.ledger} on this bookie")
