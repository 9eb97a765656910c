"""From the contents of indexes to Arrow batches: a row for each entry, or for each ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.formats.entry import read_lac_header
from bkctl.formats.index import IndexHeader, LedgerData
from bkctl.ids import LedgerId
from bkctl.spark.sources.columns import LedgerColumns, ledger_values, table_of
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
