"""WriteCache: the entries of a ledger directory that no entry log has yet, kept with their ledgers' handles.

Adds go to one half; a flush takes that half away, and it stays readable until the flush is done. So one is filled
while the other is written. Source: WriteCache, SingleDirectoryDbLedgerStorage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from bkctl.ids import LedgerId

#: What an entry takes in memory besides its bytes, about: small entries count for what they really cost.
ENTRY_OVERHEAD_BYTES: Final = 160


class CachedLedger(Protocol):
    """What the write cache keeps at a handle: records by entry id, those to be flushed and those being flushed."""

    ledger: LedgerId
    entries: dict[int, bytes]
    flushing: dict[int, bytes]


Ledger = TypeVar("Ledger", bound=CachedLedger)
#: A ledger and its entries, as one flush takes them.
Cached = tuple[Ledger, dict[int, bytes]]


class WriteCache(Generic[Ledger]):
    """Belongs to the event loop, but for `find`. Sizes are bytes of memory, about."""

    def __init__(self) -> None:
        #: Of the entries that no flush has taken; of those that a flush is writing.
        self.size = 0
        self.flushing_size = 0
        self._ledgers: list[Ledger] = []

    def add(self, ledger: Ledger, entry_ids: Sequence[int], records: Sequence[bytes], size: int) -> None:
        """Keep entries, `size` bytes in `records`; of two with one id the later counts."""
        entries = ledger.entries
        if not entries:
            self._ledgers.append(ledger)
        entries.update(zip(entry_ids, records, strict=True))
        self.size += size + ENTRY_OVERHEAD_BYTES * len(records)

    @staticmethod
    def find(ledger: CachedLedger, entry_id: int) -> bytes | None:
        """The entry's record, if it is here; any thread may call it."""
        record = ledger.entries.get(entry_id)
        return ledger.flushing.get(entry_id) if record is None else record

    def remove(self, ledger: Ledger) -> None:
        """Forget the entries of a ledger that no flush has taken."""
        self.size -= sum(len(record) + ENTRY_OVERHEAD_BYTES for record in ledger.entries.values())
        if ledger.entries:
            self._ledgers.remove(ledger)
            ledger.entries = {}

    def swap(self) -> list[Cached[Ledger]]:
        """Take what there is, for a flush: by ledger, ascending. It stays readable until `finish`."""
        taken: list[Cached[Ledger]] = []
        for ledger in self._ledgers:
            entries = ledger.entries
            taken.append((ledger, entries))
            # In this order: who looks into one after the other finds each entry.
            ledger.flushing = {**ledger.flushing, **entries} if ledger.flushing else entries
            ledger.entries = {}
        taken.sort(key=lambda each: each[0].ledger)
        self._ledgers = []
        self.flushing_size += self.size
        self.size = 0
        return taken

    def finish(self, *taken: list[Cached[Ledger]]) -> None:
        """All that was taken is written, and the index says where."""
        for ledgers in taken:
            for ledger, _ in ledgers:
                ledger.flushing = {}
        self.flushing_size = 0
