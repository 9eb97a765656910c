"""The RocksDBs of DbLedgerStorage: `ledgers` and `locations`, and `scoped-ledgers` and `scoped-locations`.

`rocksdb_database` has how they are opened, read and written.

Source: LedgerMetadataIndex, EntryLocationIndex; BP-35.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, Final

from bkctl.files.rocksdb_database import BATCH_OPERATIONS, Database, new_batch
from bkctl.formats.index import (
    STORAGE_FLAGS_KEY,
    LedgerData,
    ledger_key,
    location_key,
    read_ledger_key,
    read_location,
    read_location_key,
    read_storage_flags,
    write_location,
    write_storage_flags,
)
from bkctl.ids import LedgerId

__all__ = ["BATCH_OPERATIONS", "REBUILD_HINT", "LedgersDatabase", "LocationsDatabase"]

REBUILD_HINT: Final = "'bkctl bookie index rebuild --ledgers --locations' rebuilds the databases from the entry logs"


class LedgersDatabase(Database):
    """The ledgers that a bookie has: `ledgers`, or `scoped-ledgers`."""

    def ledgers(self, first: LedgerId | None = None) -> Iterator[tuple[LedgerId, LedgerData]]:
        """Yield the ledgers in order, from `first` on. Raises Corrupt.

        If a ledger has two keys (Apache's rebuild leaves keys of 16 bytes in scope 0), the later one counts, as in
        Apache's bookie.
        """
        for ledger, items in groupby(self._ledger_items(first), itemgetter(0)):
            ((_, value),) = deque(items, maxlen=1)
            yield ledger, self._parse(ledger, value)

    def ledger_ids(self, first: LedgerId | None = None, end: LedgerId | None = None) -> Iterator[LedgerId]:
        """Yield the ids of the ledgers from `first` on and before `end`, in order. Raises Corrupt."""
        for ledger, _ in groupby(self._ledger_items(first, end), itemgetter(0)):
            yield ledger

    def _ledger_items(self, first: LedgerId | None, end: LedgerId | None = None) -> Iterator[tuple[LedgerId, bytes]]:
        begin, stop = (None if ledger is None else ledger_key(ledger, scoped=self.scoped) for ledger in (first, end))
        for key, value in self.items(begin or b"", stop):
            ledger = read_ledger_key(key, self._name, scoped=self.scoped)
            if ledger is not None:
                yield ledger, value

    def get(self, ledger: LedgerId) -> LedgerData | None:
        """Return the data of a ledger; None if the database lacks the ledger. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return None
        key = ledger_key(ledger)
        found = self.last_item(key, _after(key))
        return None if found is None else self._parse(ledger, found[1])

    def storage_flags(self) -> int | None:
        """Return the storage flags (bit 1: the bookie must check its integrity); None if never written."""
        value = None if self.scoped else self.value_of(STORAGE_FLAGS_KEY)
        return None if value is None else read_storage_flags(value, self._name)

    @staticmethod
    def batch_of(changes: Mapping[LedgerId, LedgerData], deleted: Iterable[LedgerId]) -> Any:
        """Return a batch for `write` that removes the `deleted` ledgers, then puts the `changes`."""
        batch = new_batch()
        for ledger in deleted:
            key = ledger_key(ledger)
            batch.delete(key)
            if not ledger.is_scoped:
                batch.delete(key + bytes(8))
        for ledger, data in changes.items():
            _put_ledger(batch, ledger, data)
        return batch

    def put(self, ledger: LedgerId, data: LedgerData) -> None:
        """Add a ledger, or replace its data."""
        assert ledger.is_scoped == self.scoped, f"ledger {ledger} is kept elsewhere"
        _put_ledger(self._batch(), ledger, data)

    def put_storage_flags(self, flags: int) -> None:
        self._batch().put(STORAGE_FLAGS_KEY, write_storage_flags(flags))

    def _parse(self, ledger: LedgerId, value: bytes) -> LedgerData:
        return LedgerData.parse(value, f"ledger {ledger} in {self.path}")


class LocationsDatabase(Database):
    """The locations of a bookie's entries: `locations`, or `scoped-locations`. A ledger's entries are in order."""

    _is_for_locations = True

    def locations(self, ledger: LedgerId | None = None) -> Iterator[tuple[LedgerId, int, int]]:
        """Yield (ledger, entry id, location) in order, of all ledgers or of one. Raises Corrupt."""
        if ledger is not None and ledger.is_scoped != self.scoped:
            return
        items = self.items() if ledger is None else self.items(*_keys_of(ledger))
        name, scoped = self._name, self.scoped
        for key, value in items:
            found, entry_id = read_location_key(key, name, scoped=scoped)
            yield found, entry_id, read_location(value, name)

    def ledger_ids(self) -> Iterator[LedgerId]:
        """Yield the ledgers with entries, in order; skip from ledger to ledger. Raises Corrupt."""
        self._write_pending()
        with self._reading():
            items = self._iterator(None)
            items.seek(b"")
        while items.valid():
            ledger, _ = read_location_key(items.key(), self._name, scoped=self.scoped)
            yield ledger
            with self._reading():
                items.seek(_after(ledger_key(ledger)))
        with self._reading():
            items.status()

    def batches_of(self, ledger: LedgerId, *, count: int = BATCH_OPERATIONS) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield the items of one ledger, in lists of at most `count`."""
        return self.batches(*_keys_of(ledger), count=count)

    def get(self, ledger: LedgerId, entry_id: int, *, cached: bool = False) -> int:
        """Return the location of an entry; 0 if it is missing, or with `cached` not in memory. Raises Corrupt."""
        if ledger.is_scoped != self.scoped or not 0 <= entry_id < 1 << 63:
            return 0
        value = (self.cached_value_of if cached else self.value_of)(location_key(ledger, entry_id))
        return 0 if value is None else read_location(value, self._name)

    def last_entry_id(self, ledger: LedgerId) -> int:
        """Return the highest entry id of a ledger; -1 without entries. Raises Corrupt."""
        if ledger.is_scoped != self.scoped:
            return -1
        found = self.last_item(*_keys_of(ledger))
        return -1 if found is None else read_location_key(found[0], self._name, scoped=self.scoped)[1]

    @staticmethod
    def batch_without(deleted: Iterable[LedgerId]) -> Any:
        """Return a batch for `write` that removes all entries of the `deleted` ledgers; callers may add puts to it."""
        batch = new_batch()
        for ledger in deleted:
            batch.delete_range(*_keys_of(ledger))
        return batch

    def put(self, ledger: LedgerId, entry_id: int, location: int) -> None:
        """Set the location of an entry."""
        self._batch().put(location_key(ledger, entry_id, scoped=self.scoped), write_location(location))

    def put_all(self, locations: Iterable[tuple[LedgerId, int, int]]) -> int:
        """Set the locations of many entries (ledger, entry id, location); return their number."""
        count = 0
        scoped = self.scoped
        items = iter(locations)
        while batch := list(islice(items, BATCH_OPERATIONS)):
            pending = self._batch()
            for ledger, entry_id, location in batch:
                pending.put(location_key(ledger, entry_id, scoped=scoped), write_location(location))
            count += len(batch)
        return count


def _keys_of(ledger: LedgerId) -> tuple[bytes, bytes]:
    """Return the first key of a ledger's entries, and the first key behind them."""
    return location_key(ledger, 0), _after(ledger_key(ledger))


def _put_ledger(batch: Any, ledger: LedgerId, data: LedgerData) -> None:
    key = ledger_key(ledger)
    batch.put(key, data.serialize())
    if not ledger.is_scoped:
        batch.delete(key + bytes(8))  # Apache's rebuild leaves this key, which would win.


def _after(key: bytes) -> bytes:
    """Return the first key behind every key that begins with `key`."""
    value = int.from_bytes(key, "big") + 1
    return value.to_bytes(len(key), "big") if value < 1 << 8 * len(key) else b"\xff" * (len(key) + 32)
