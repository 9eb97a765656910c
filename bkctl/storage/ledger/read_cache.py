"""ReadCache: entries that DbLedgerStorage read ahead, and pages of locations, in bounded memory. Source: ReadCache."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence, Sized
from typing import Generic, TypeVar

from bkctl.ids import LedgerId
from bkctl.summaries import Summary

Item = TypeVar("Item", bound=Sized)


class ReadCache(Generic[Item]):
    """A cache of the entries (or other numbered items) added last, up to `capacity` bytes. For any thread."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        #: Bytes of the cached entries; entries that `discard` removed count until they would be the oldest.
        self.size = 0
        #: The number of calls of `discard`: a read that began before one must not be cached after it.
        self.discards = 0
        #: Entries that reads found here, or read from an entry log; and those that came from the write cache.
        self.hits = self.misses = self.write_cache_hits = 0
        #: Entries and bytes of each time that entries were read ahead.
        self.ahead_entries, self.ahead_bytes = Summary(), Summary()
        self._ledgers: dict[LedgerId, dict[int, Item]] = {}
        self._batches: deque[tuple[LedgerId, list[int], int]] = deque()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """The number of cached entries, those counted that `discard` removed."""
        return sum(len(entry_ids) for _, entry_ids, _ in tuple(self._batches))

    def note(self, hits: int = 0, misses: int = 0, write_cache_hits: int = 0) -> None:
        """Count reads."""
        with self._lock:
            self.hits += hits
            self.misses += misses
            self.write_cache_hits += write_cache_hits

    def put_ahead(self, ledger: LedgerId, entries: Sequence[tuple[int, Item]], discards: int) -> None:
        """Cache entries that were read ahead, as `put`, and count them."""
        with self._lock:
            self.ahead_entries.observe(len(entries))
            self.ahead_bytes.observe(sum(len(body) for _, body in entries))
        self.put(ledger, entries, discards)

    def get(self, ledger: LedgerId, entry_id: int) -> Item | None:
        """Return the entry, None if it is not cached."""
        entries = self._ledgers.get(ledger)
        return None if entries is None else entries.get(entry_id)

    def get_all(self, ledger: LedgerId, entry_ids: Sequence[int], size_max: int) -> list[Item | None]:
        """Return what `get` returns of each entry. The list ends early once its entries have `size_max` bytes."""
        entries = self._ledgers.get(ledger)
        if entries is None:
            return [None] * len(entry_ids)
        found: list[Item | None] = []
        size = 0
        for body in map(entries.get, entry_ids):
            found.append(body)
            if body is not None:
                size += len(body)
                if size >= size_max:
                    break
        return found

    def put(self, ledger: LedgerId, entries: Sequence[tuple[int, Item]], discards: int | None = None) -> None:
        """Cache entries of one ledger, and evict the oldest to make room.

        `discards`: the count before the entries were read; nothing is cached if it has changed.
        """
        with self._lock:
            if discards in (None, self.discards):
                self._put(ledger, entries)

    def replace(self, ledger: LedgerId, entries: Sequence[tuple[int, Item]], discards: int) -> None:
        """Cache entries of one ledger that have just changed: what was read from disk before is not cached any more.

        `discards`: the count before cached entries were read for them; the ledger's entries are removed if it has
        changed.
        """
        with self._lock:
            if discards == self.discards:
                self._put(ledger, entries)
            else:
                self._ledgers.pop(ledger, None)
            self.discards += 1

    def _put(self, ledger: LedgerId, entries: Sequence[tuple[int, Item]]) -> None:
        size = sum(len(body) for _, body in entries)
        if not entries or size > self.capacity:
            return
        self._ledgers.setdefault(ledger, {}).update(entries)
        self._batches.append((ledger, [entry_id for entry_id, _ in entries], size))
        self.size += size
        while self.size > self.capacity:
            oldest, entry_ids, size = self._batches.popleft()
            self.size -= size
            cached = self._ledgers.get(oldest, {})
            for entry_id in entry_ids:
                cached.pop(entry_id, None)
            if not cached:
                self._ledgers.pop(oldest, None)

    def discard(self, ledger: LedgerId) -> None:
        """Remove a ledger's entries."""
        with self._lock:
            self.discards += 1
            self._ledgers.pop(ledger, None)
