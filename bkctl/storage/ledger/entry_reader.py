"""StoredEntryReader: entries of ledgers, read from the memtable, else from entry logs by the index."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final, Generic, cast

from bkctl.errors import BkctlError, Corrupt, EntryNotFound, UnknownLedgerState
from bkctl.formats.layout import Buffer
from bkctl.formats.record import RECORD_SIZE, body_of
from bkctl.storage.ledger.entry_mem_table import EntryMemTable
from bkctl.storage.ledger.ledger_handle import Handle, IsWanted, always

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
