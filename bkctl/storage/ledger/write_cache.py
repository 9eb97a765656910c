"""WriteCache: the entries of a ledger directory that no entry log has yet, kept at the handles of their ledgers.

Adds fill one half. A flush takes that half and writes it while adds fill the other; the taken half stays readable
until the flush is done. Source: WriteCache, SingleDirectoryDbLedgerStorage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from bkctl.ids import LedgerId

#: Memory of an entry besides its bytes, about, so that small entries count at their real cost.
ENTRY_OVERHEAD_BYTES: Final = 160


class CachedLedger(Protocol):
    """The fields that the write cache uses of a handle: records by entry id, not yet taken and being flushed."""

    ledger: LedgerId
    entries: dict[int, bytes]
    flushing: dict[int, bytes]


Ledger = TypeVar("Ledger", bound=CachedLedger)
#: A ledger and its entries, as taken by one flush.
Cached = tuple[Ledger, dict[int, bytes]]


class WriteCache(Generic[Ledger]):
    """The write cache. Belongs to the event loop, except `find`. Sizes are bytes of memory, about."""

    def __init__(self) -> None:
        #: Size of the entries that no flush has taken, and of the entries that a flush is writing.
        self.size = 0
        self.flushing_size = 0
        self._ledgers: list[Ledger] = []

    def add(self, ledger: Ledger, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Cache entries, `size` bytes in `records`; a later entry replaces an earlier one of the same id."""
        entries = ledger.entries
        if not entries:
            self._ledgers.append(ledger)
        if len(records) == 1:
            entries[entry_ids[0]] = records[0]
            self.size += size + ENTRY_OVERHEAD_BYTES
        else:
            entries.update(zip(entry_ids, records, strict=True))
            self.size += size + ENTRY_OVERHEAD_BYTES * len(records)

    @staticmethod
    def find(ledger: CachedLedger, entry_id: int) -> bytes | None:
        """Return the entry's record, None if it is not cached; for any thread."""
        record = ledger.entries.get(entry_id)
        return ledger.flushing.get(entry_id) if record is None else record

    @staticmethod
    def find_all(ledger: CachedLedger, entry_ids: Sequence[int]) -> list[bytes | None]:
        """Return what `find` returns of each entry."""
        newest, flushing = ledger.entries, ledger.flushing  # in this order, as `find`
        found = list(map(newest.get, entry_ids))
        if flushing and None in found:
            return [
                flushing.get(entry_id) if record is None else record
                for entry_id, record in zip(entry_ids, found, strict=True)
            ]
        return found

    def remove(self, ledger: Ledger) -> None:
        """Remove the entries of a ledger that no flush has taken."""
        self.size -= sum(len(record) + ENTRY_OVERHEAD_BYTES for record in ledger.entries.values())
        if ledger.entries:
            self._ledgers.remove(ledger)
            ledger.entries = {}

    def swap(self) -> list[Cached[Ledger]]:
        """Return all entries for a flush, by ledger, ascending. They stay readable until `finish`."""
        taken: list[Cached[Ledger]] = []
        for ledger in self._ledgers:
            entries = ledger.entries
            taken.append((ledger, entries))
            # In this order: `find`, which looks into one after the other, then misses no entry.
            ledger.flushing = {**ledger.flushing, **entries} if ledger.flushing else entries
            ledger.entries = {}
        taken.sort(key=lambda cached: cached[0].ledger)
        self._ledgers = []
        self.flushing_size += self.size
        self.size = 0
        return taken

    def finish(self, *taken: list[Cached[Ledger]]) -> None:
        """Drop the taken entries, which are written and indexed."""
        for ledgers in taken:
            for ledger, _ in ledgers:
                ledger.flushing = {}
        self.flushing_size = 0
