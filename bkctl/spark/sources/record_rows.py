"""From records of entry logs and journals to Arrow batches: a row for each record, or for each ledger.

Plain entries stay columns from `RecordBatch` to Arrow, without a Python object for each. Other records, and batches of
few entries, are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType
from bkctl.formats.record import NO_LEDGER, RECORD_SIZE, Record, RecordType
from bkctl.spark.sources.columns import LedgerColumns, constant, table_of
from bkctl.spark.sources.filters import LEDGER_COLUMNS
from bkctl.spark.sources.record_values import VALUES, digest_of_v1, digest_of_v2
from bkctl.spark.sources.selection import Selection, fields_of, ids_of, offsets_of

#: Rows of one Arrow batch, about.
BATCH_ROWS: Final = 32_768
#: Batches of fewer records are handled record by record.
_COLUMN_RECORDS_MIN: Final = 8

#: Columns that need the bodies of records; all others need the headers only.
BODY_COLUMNS: Final = frozenset(("payload", "record", "digest"))

#: Index of a column in a row of header fields; negative: from its end.
_FIELD_PLACES: Final = {"recordSize": 0, "entryId": -3, "lastAddConfirmed": -2, "length": -1}
_DIGEST_NAMES: Final = (None, *(digest_type.name for digest_type in DigestType))


class RecordRows:
    """Turns selected records into Arrow batches of `schema`; `constants` are the columns that a whole file shares."""

    def __init__(
        self, schema: pa.Schema, constants: dict[str, Any], selection: Selection, digest_type: DigestType | None
    ) -> None:
        self.schema = schema
        self._constants, self._selection, self._digest_type = constants, selection, digest_type
        self._content = [name for name in schema.names if name in BODY_COLUMNS]
        self._fields: list[npt.NDArray[np.int64]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._contents: list[list[pa.Array]] = []
        self._version = 1
        self._records: list[Record] = []
        self._count = 0

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these records, in order; keeps no window of a batch once it asks for the next batch."""
        for batch in batches:
            if _is_read_singly(batch):
                if self._fields:
                    yield self._flush()
                wanted = [record for record in batch.records() if self._selection.wants(record)]
                self._records += wanted
                self._count += len(wanted)
            else:
                if self._records or (self._fields and self._version != batch.format_version):
                    yield self._flush()
                self._add(batch)
            if self._count >= BATCH_ROWS or (self._content and self._count):
                yield self._flush()
        if self._count:
            yield self._flush()

    def _add(self, batch: RecordBatch) -> None:
        if not self._selection.wants_entries():
            return
        fields, offsets, begins = fields_of(batch), offsets_of(batch), np.asarray(batch.begins, np.int64)
        mask = self._selection.mask(batch, fields)
        if mask is not None:
            fields, offsets, begins = fields[mask], offsets[mask], begins[mask]
        if not len(fields):
            return
        self._fields.append(fields)
        self._offsets.append(offsets)
        self._version = batch.format_version
        self._count += len(fields)
        if self._content:
            self._contents.append([self._content_of(name, batch.window, fields, begins) for name in self._content])

    def _flush(self) -> pa.RecordBatch:
        if self._records:
            records, self._records = self._records, []
            arrays = [
                constant(self._constants[field.name], len(records), field.type)
                if field.name in self._constants
                else pa.array([VALUES[field.name](record, self._digest_type) for record in records], field.type)
                for field in self.schema
            ]
        else:
            fields = self._fields[0] if len(self._fields) == 1 else np.concatenate(self._fields)
            offsets = self._offsets[0] if len(self._offsets) == 1 else np.concatenate(self._offsets)
            contents = {name: pa.concat_arrays(each) for name, each in zip(
                self._content, zip(*self._contents, strict=True), strict=False)}  # fmt: skip
            ids = LedgerColumns(*ids_of(fields))
            arrays = [
                contents[field.name] if field.name in contents else self._column(field, fields, offsets, ids)
                for field in self.schema
            ]
        self._fields, self._offsets, self._contents, self._count = [], [], [], 0
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _column(
        self, field: pa.Field, fields: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], ids: LedgerColumns
    ) -> pa.Array:
        name, count = field.name, len(fields)
        if name in self._constants:
            return constant(self._constants[name], count, field.type)
        if name in LEDGER_COLUMNS:
            return ids.column(name)
        if name in _FIELD_PLACES:
            return pa.array(np.ascontiguousarray(fields[:, _FIELD_PLACES[name]]))
        if name == "offset":
            return pa.array(offsets)
        if name == "size":
            overheads = self._overheads(fields)
            if overheads is None:
                return pa.nulls(count, field.type)
            sizes = fields[:, 0] - overheads
            return pa.array(sizes, mask=sizes < 0)
        if name == "digestType" and self._version == 2:
            return pa.array(_DIGEST_NAMES).take(pa.array(fields[:, 1] & 0x0F))
        value = {"formatVersion": self._version, "type": RecordType.ENTRY.value}.get(name)
        return constant(value, count, field.type)

    def _overheads(self, fields: npt.NDArray[np.int64]) -> Any:
        """Return the bytes before the payload of each entry; None if unknown (version 1 without a digest type)."""
        if self._version == 2:
            lengths = [0, *(each.code_length for each in DigestType)]
            return HEADER_SIZE_V2 + np.array(lengths, np.int64)[fields[:, 1] & 0x0F]
        return None if self._digest_type is None else HEADER_SIZE_V1 + self._digest_type.code_length

    def _content_of(
        self, name: str, window: bytes, fields: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> pa.Array:
        count = len(fields)
        if name == "digest":
            rows = zip(begins.tolist(), fields[:, 0].tolist(), strict=True)
            check = digest_of_v1 if self._version == 1 else digest_of_v2
            return pa.array([check(window, begin + 4, size) for begin, size in rows], pa.string())
        overheads = 0 if name == "record" else self._overheads(fields)
        if overheads is None:
            return pa.nulls(count, pa.binary())
        # The array holds the bytes between the wanted parts as well: every second item, which `take` leaves out.
        borders = np.empty((count, 2), np.int32)
        ends = begins + 4 + fields[:, 0]
        starts = np.minimum(begins + 4 + overheads, ends)
        borders[:, 0], borders[:, 1] = starts, ends
        parts = pa.BinaryArray.from_buffers(
            pa.binary(), 2 * count - 1, [None, pa.py_buffer(borders), pa.py_buffer(window)]
        )
        missing = fields[:, 0] < overheads
        chosen = pa.array(np.arange(0, 2 * count, 2, dtype=np.int64), mask=missing if missing.any() else None)
        return parts.take(chosen)


class LedgerSums:
    """Counts selected records, with the interface of RecordRows: one row a ledger, with its entries and their bytes.

    Bytes include size fields. Records without a ledger do not count.
    """

    def __init__(self, schema: pa.Schema, constants: dict[str, Any], selection: Selection) -> None:
        self.schema = schema
        self._constants, self._selection = constants, selection
        self._sums: dict[tuple[int, int], list[int]] = {}

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield one row a ledger of all these records, in order of scope and ledger id."""
        for batch in batches:
            if _is_read_singly(batch):
                for record in filter(self._selection.wants, batch.records()):
                    if record.ledger is not NO_LEDGER:
                        self._add(record.ledger, 1, record.record_size)
            elif self._selection.wants_entries():
                self._add_all(batch)
        ids = sorted(self._sums)
        for first in range(0, len(ids), BATCH_ROWS):
            chosen = ids[first : first + BATCH_ROWS]
            halves = np.array(chosen, np.uint64)
            columns = LedgerColumns(halves[:, 0], halves[:, 1]).columns(self.schema)
            sums = zip(*(self._sums[each] for each in chosen), strict=True)
            columns |= {name: pa.array(values) for name, values in zip(("entryCount", "size"), sums, strict=True)}
            yield from table_of(self.schema, columns, len(chosen), self._constants).to_batches()

    def _add_all(self, batch: RecordBatch) -> None:
        fields = fields_of(batch)
        mask = self._selection.mask(batch, fields)
        if mask is not None:
            fields = fields[mask]
        rows, scope_ids, ledger_ids = LedgerColumns(*ids_of(fields)).distinct
        places = rows.to_numpy()
        counts = np.bincount(places, minlength=len(ledger_ids)).tolist()
        sizes = np.zeros(len(ledger_ids), np.int64)
        np.add.at(sizes, places, fields[:, 0])
        keys = zip(scope_ids.tolist(), ledger_ids.tolist(), strict=True)
        for ledger, count, size in zip(keys, counts, sizes.tolist(), strict=True):
            self._add(ledger, count, size)

    def _add(self, ledger: tuple[int, int], count: int, record_size: int) -> None:
        sums = self._sums.setdefault((ledger[0], ledger[1]), [0, 0])
        sums[0] += count
        sums[1] += record_size + count * RECORD_SIZE.size


def _is_read_singly(batch: RecordBatch) -> bool:
    """Return whether to handle the records of `batch` one by one, which plain entries without bodies do not allow."""
    return batch.record is not None or (len(batch) < _COLUMN_RECORDS_MIN and len(batch.window) > 0)
