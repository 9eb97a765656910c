"""From the contents of indexes to Arrow batches: a row for each entry, or for each ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.formats.entry import read_lac_header
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import LedgerColumns, table_of
from bkctl.spark.sources.filters import Conditions


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


class IndexRowsLedger(NamedTuple):
    """One ledger in an index; `explicit_lac` is a packet as bookies store it."""

    ledger: LedgerId
    fenced: bool
    explicit_lac: bytes | None
    entry_count: int
    last_entry_id: int
    master_key: bytes


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
    given = (conditions.number_mask("entryId", entries.entry_ids), conditions.number_mask("logId", log_ids))
    masks = [mask for mask in given if mask is not None]
    if masks:
        wanted = np.logical_and.reduce(masks)
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


def ledger_rows(
    schema: pa.Schema, ledgers: Sequence[IndexRowsLedger], constants: Mapping[str, Any]
) -> pa.RecordBatch:  # fmt: skip
    """Return one row a ledger; `constants` are columns of the whole file."""
    lac_packets = [row.explicit_lac for row in ledgers]
    values: dict[str, list[Any]] = {
        "ledgerScopeId": [row.ledger.scope_id for row in ledgers],
        "ledgerId": [row.ledger.ledger_id for row in ledgers],
        "ledgerQualifiedName": [row.ledger.qualified_name for row in ledgers],
        "fenced": [row.fenced for row in ledgers],
        "explicitLac": [None if lac is None else read_lac_header(lac).last_add_confirmed for lac in lac_packets],
        "entryCount": [row.entry_count for row in ledgers],
        "lastEntryId": [row.last_entry_id for row in ledgers],
        "masterKey": [row.master_key for row in ledgers],
    }
    columns = {field.name: pa.array(values[field.name], field.type) for field in schema if field.name in values}
    return table_of(schema, columns, len(ledgers), constants).to_batches()[0]
