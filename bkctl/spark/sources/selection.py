"""The records that a query selects, decided on the header fields of whole batches; these fields as arrays."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bkctl.files.record_filter import FILLER_TYPES
from bkctl.files.scan import RecordBatch
from bkctl.formats.record import NO_LEDGER, Record, RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.filters import Conditions


def fields_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """Return the header fields of the plain entries in `batch`, one row an entry."""
    width = 5 if batch.format_version == 1 else 7
    fields = batch.fields
    if isinstance(fields, memoryview):
        return np.frombuffer(fields, np.int64).reshape(-1, width)
    try:
        found = np.array(fields, np.int64)
    except OverflowError:
        # Without the compiled loop, ids of 2^63 and more are not wrapped yet.
        found = np.array([to_signed(value) for value in fields], np.int64)
    return found.reshape(-1, width)


def ids_of(
    fields: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint64] | None, npt.NDArray[np.uint64]]:
    """Return the scope ids (None: all 0) and ledger ids in the rows of `fields_of`."""
    ledger_ids = np.ascontiguousarray(fields[:, -4]).view(np.uint64)
    return (None if fields.shape[1] == 5 else np.ascontiguousarray(fields[:, 2]).view(np.uint64)), ledger_ids


def offsets_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """Return the offset of each record in its file."""
    return np.asarray(batch.begins, np.int64) + batch.window_offset


class Selection(NamedTuple):
    """Records that meet the `conditions`, of these `types` (None: all but padding and ledgers maps)."""

    conditions: Conditions
    types: Collection[str] | None

    def wants(self, record: Record) -> bool:
        """Return whether this record is selected."""
        conditions, types = self
        if record.type in FILLER_TYPES if types is None else record.type.value not in types:
            return False
        if conditions.about_ledgers and (record.ledger is NO_LEDGER or not conditions.accepts_ledger(record.ledger)):
            return False
        return (
            conditions.accepts("type", record.type.value)
            and conditions.accepts("entryId", record.entry_id)
            and conditions.accepts("offset", record.offset)
        )

    def wants_entries(self) -> bool:
        """Return whether plain entries can be selected."""
        name = RecordType.ENTRY.value
        return (self.types is None or name in self.types) and self.conditions.accepts("type", name)

    def mask(self, batch: RecordBatch, fields: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return which plain entries of `batch`, whose header fields are `fields`, are selected; None: all."""
        conditions = self.conditions
        if not (conditions.values or conditions.first or conditions.last or conditions.ledgers is not None):
            return None
        scope_ids, ledger_ids = ids_of(fields)
        masks = [
            conditions.ledger_mask(scope_ids, ledger_ids),
            conditions.number_mask("entryId", fields[:, -3]),
            conditions.number_mask("offset", offsets_of(batch)),
        ]
        given = [mask for mask in masks if mask is not None]
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(given) if given else np.ones(len(fields), np.bool_)
        return None if found.all() else found
