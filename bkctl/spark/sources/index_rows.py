"""From the contents of indexes (index files, and databases of DbLedgerStorage) to Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.errors import Corrupt
from bkctl.files.rocksdb import LedgersDatabase, LocationsDatabase
from bkctl.formats.entry import read_lac_header
from bkctl.formats.index import SLOT_SIZE, IndexHeader, LedgerData, location_key, read_location, read_location_key
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import LedgerColumns, ledger_values, table_of
from bkctl.spark.sources.filters import Conditions, all_of
from bkctl.spark.sources.index_plan import DatabaseRange
from bkctl.spark.sources.record_rows import BATCH_ROWS


class IndexedEntries(NamedTuple):
    """Columns of entries in an index: scope ids, ledger ids, entry ids and locations of one length."""

    scope_ids: npt.NDArray[np.uint64]
    ledger_ids: npt.NDArray[np.uint64]
    entry_ids: npt.NDArray[np.int64]
    locations: npt.NDArray[np.int64]

    def select(self, mask: npt.NDArray[np.bool_]) -> IndexedEntries:
        """Return the entries where `mask` is true."""
        scope_ids, ledger_ids, entry_ids, locations = self
        return IndexedEntries(scope_ids[mask], ledger_ids[mask], entry_ids[mask], locations[mask])


def entry_rows(
    schema: pa.Schema,
    entries: IndexedEntries,
    conditions: Conditions,
    constants: Mapping[str, Any],
    files: npt.NDArray[np.int64] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the entries that meet the `conditions`, if any.

    `constants` are columns of the whole file; with `files`, the number of each entry's file, lists of a value a file.
    """
    log_ids = entries.locations >> 32 & 0xFFFFFFFF
    wanted = all_of((conditions.mask("entryId", entries.entry_ids), conditions.mask("logId", log_ids)))
    if wanted is not None:
        entries, log_ids = entries.select(wanted), log_ids[wanted]
        files = None if files is None else files[wanted]
    count = len(entries.entry_ids)
    if not count:
        return
    numbers = {
        "entryId": entries.entry_ids,
        "logId": log_ids,
        "offset": (entries.locations & 0xFFFFFFFF) - 4,
        "location": entries.locations,
    }
    columns = LedgerColumns(entries.scope_ids, entries.ledger_ids).columns(schema)
    columns |= {name: pa.array(np.ascontiguousarray(column)) for name, column in numbers.items()}
    if "logIdHex" in schema.names:
        logs = columns["logId"].dictionary_encode()
        columns["logIdHex"] = pa.array([f"{log_id:x}" for log_id in logs.dictionary.to_pylist()]).take(logs.indices)
    if files is not None:
        of_files = [field for field in schema if field.name in constants]
        columns |= {each.name: pa.array(constants[each.name], each.type).take(pa.array(files)) for each in of_files}
    yield from table_of(schema, columns, count, constants).to_batches()


def ledger_row(
    ledger: LedgerId, header: IndexHeader | LedgerData, entry_count: int, last_entry_id: int
) -> dict[str, Any]:
    """Return the columns of one ledger in an index."""
    lac = header.explicit_lac
    return {
        **ledger_values(ledger),
        "fenced": header.fenced,
        "explicitLac": None if lac is None else read_lac_header(lac).last_add_confirmed,
        "entryCount": entry_count,
        "lastEntryId": last_entry_id,
        "masterKey": header.master_key,
    }


def ledger_rows(schema: pa.Schema, rows: Iterable[dict[str, Any]], constants: Mapping[str, Any]) -> pa.RecordBatch:
    """Return a batch of rows of `ledger_row`; `constants` are columns of the whole file."""
    return pa.RecordBatch.from_pylist([{**constants, **row} for row in rows], schema=schema)


# --- the databases of DbLedgerStorage ---------------------------------------------------------------------------------


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
