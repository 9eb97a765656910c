"""The databases of DbLedgerStorage for `bookkeeper.index`: entries and ledgers of a range of ledgers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bkctl.errors import Corrupt
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.index import SLOT_SIZE, location_key, read_location, read_location_key
from bkctl.ids import LedgerId
from bkctl.spark.sources.filters import Conditions
from bkctl.spark.sources.index_plan import DatabaseRange
from bkctl.spark.sources.index_rows import IndexedEntries, ledger_row
from bkctl.spark.sources.record_rows import BATCH_ROWS


class DatabaseReader:
    """Reads the accepted ledgers of a range from its databases, which are open as long as the caller keeps them so.

    Entries of ledgers that the database of ledgers lacks wait for garbage collection, and are left out.
    """

    def __init__(
        self, part: DatabaseRange, ledgers: LedgersDatabase, locations: LocationsDatabase, conditions: Conditions
    ) -> None:
        self._part, self._ledgers, self._locations, self._conditions = part, ledgers, locations, conditions
        self._ids = [ledger for ledger in _ledgers_of(part, ledgers) if conditions.accepts_ledger(ledger)]

    def entries(self) -> Iterator[IndexedEntries]:
        """Yield the entries of the range, batch by batch; entry ids outside the conditions may be among them."""
        part = self._part
        if self._conditions.about_ledgers:
            first, last = self._conditions.entry_range()
            if first > last:
                return
            for ledger in self._ids:
                begin, end = location_key(ledger, first), location_key(ledger, last) + b"\0"
                for items in self._locations.batches(begin, end, count=BATCH_ROWS):
                    yield _entries_of(items, part)
            return
        ids_by_scope = _ids_by_scope(self._ids)
        for items in self._locations.batches(part.first or b"", part.end, count=BATCH_ROWS):
            entries = _entries_of(items, part)
            mask = _mask_of_ledgers(ids_by_scope, entries)
            yield entries if mask.all() else entries.select(mask)

    def ledgers(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of the ledgers of the range, batch by batch."""
        rows: list[dict[str, Any]] = []
        for ledger in self._ids:
            data = self._ledgers.get(ledger)
            if data is None:
                continue
            count = sum(len(items) for items in self._locations.batches_of(ledger))
            last = self._locations.last_entry_id(ledger)
            rows.append(ledger_row(ledger, data, count, last))
            if len(rows) >= BATCH_ROWS:
                yield rows
                rows = []
        if rows:
            yield rows


def _ledgers_of(part: DatabaseRange, ledgers: LedgersDatabase) -> Iterator[LedgerId]:
    """Yield the ledgers of a range; one that a border cuts belongs to the ranges at both sides."""
    size = 16 if part.scoped else 8

    def ledger_at(key: bytes | None) -> LedgerId | None:
        return None if key is None else LedgerId.from_value(int.from_bytes(key[:size].ljust(size, b"\0"), "big"))

    first, end = ledger_at(part.first), ledger_at(part.end)
    is_cut = part.end is not None and len(part.end) > size
    for ledger in ledgers.ledger_ids(first if first is not None and first.is_scoped == part.scoped else None):
        if end is not None and (ledger > end or (ledger == end and not is_cut)):
            return
        yield ledger


def _entries_of(items: Sequence[tuple[bytes, bytes]], part: DatabaseRange) -> IndexedEntries:
    """Return items of a database of locations as columns. Raises Corrupt for a key or value that is not valid."""
    keys, values = zip(*items, strict=True)
    width = 24 if part.scoped else 16
    if set(map(len, keys)) != {width} or set(map(len, values)) != {SLOT_SIZE}:
        _raise_invalid(items, part)
    table = np.frombuffer(b"".join(keys), ">u8").reshape(len(keys), -1).astype(np.uint64)
    entry_ids = np.ascontiguousarray(table[:, -1]).view(np.int64)
    if int(entry_ids.min()) < 0:
        _raise_invalid(items, part)
    locations = np.frombuffer(b"".join(values), ">i8").astype(np.int64)
    ledger_ids = np.ascontiguousarray(table[:, -2])
    scope_ids = np.ascontiguousarray(table[:, 0]) if part.scoped else np.zeros(len(keys), np.uint64)
    return IndexedEntries(scope_ids, ledger_ids, entry_ids, locations)


def _raise_invalid(items: Iterable[tuple[bytes, bytes]], part: DatabaseRange) -> None:
    """Raise Corrupt for the first key or value that does not belong into a database of locations."""
    name = str(part.path("locations"))
    for key, value in items:
        read_location_key(key, name, scoped=part.scoped)
        read_location(value, name)
    raise Corrupt(f"{name}: a key or a value is of another size")


def _ids_by_scope(ledgers: Iterable[LedgerId]) -> dict[int, npt.NDArray[np.uint64]]:
    found: dict[int, list[int]] = {}
    for ledger in ledgers:
        found.setdefault(ledger.scope_id, []).append(ledger.ledger_id)
    return {scope_id: np.array(ids, np.uint64) for scope_id, ids in found.items()}


def _mask_of_ledgers(
    ids_by_scope: dict[int, npt.NDArray[np.uint64]], entries: IndexedEntries
) -> npt.NDArray[np.bool_]:  # fmt: skip
    """Return which entries belong to the ledgers of `ids_by_scope`."""
    mask = np.zeros(len(entries.ledger_ids), np.bool_)
    for scope_id in np.unique(entries.scope_ids).tolist():
        if scope_id in ids_by_scope:
            mask |= (entries.scope_ids == np.uint64(scope_id)) & np.isin(entries.ledger_ids, ids_by_scope[scope_id])
    return mask
