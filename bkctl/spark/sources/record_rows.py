"""From records of entry logs and journals to Arrow batches: a row for each selected record, or for each ledger.

Plain entries stay columns from `RecordBatch` to Arrow, without a Python object for each, and are selected by their
header fields. Other records, and batches of few entries, are handled one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bkctl.errors import Corrupt, Unsupported
from bkctl.files.listing import FILLER_TYPES
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType, digest_function, read_lac_header
from bkctl.formats.record import NO_LEDGER, RECORD_SIZE, Record, RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.columns import DAMAGE, LedgerColumns, constant, table_of
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions, all_of


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
        found = all_of(
            (
                conditions.ledger_mask(scope_ids, ledger_ids),
                conditions.mask("entryId", fields[:, -3]),
                conditions.mask("offset", offsets_of(batch)),
            )
        )
        return None if found is None or found.all() else found


# --- single records ---------------------------------------------------------------------------------------------------

#: Digest types that need no password, in the order in which entries of format version 1 are checked.
_CHECKED_TYPES: Final = (DigestType.CRC32C, DigestType.CRC32)
#: Number in an entry of format version 2 → its digest type, if that needs no password.
_NAMED_TYPES: Final = {int(each): (each,) for each in DigestType if each is not DigestType.HMAC}


def digest_of(window: bytes, body: int, size: int, version: int) -> str | None:
    """Return the name of the digest type without password that an entry matches: of version 2 the type in it."""
    payload, end = body + (HEADER_SIZE_V1 if version == 1 else HEADER_SIZE_V2), body + size
    for digest_type in _CHECKED_TYPES if version == 1 else _NAMED_TYPES.get(window[body] & 0x0F, ()):
        at = payload + digest_type.code_length
        if at <= end and digest_function(digest_type)(window[body:payload], window[at:end]) == window[payload:at]:
            return digest_type.name
    return None


def _last_add_confirmed(record: Record) -> int | None:
    if record.type is not RecordType.EXPLICIT_LAC:
        return record.last_add_confirmed
    try:
        return read_lac_header(record.special_payload).last_add_confirmed
    except (Corrupt, Unsupported):
        return None


def _record_digest(record: Record) -> str | None:
    if record.type is not RecordType.ENTRY or record.length is None:
        return None
    return digest_of(record.body, 0, record.record_size, record.format_version)


#: Column → its value of a record; the digest type of version 1, where given, tells the payload's size.
VALUES: Final[dict[str, Callable[[Record, DigestType | None], Any]]] = {
    "ledgerScopeId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.scope_id,
    "ledgerId": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.ledger_id,
    "ledgerQualifiedName": lambda record, _: None if record.ledger is NO_LEDGER else record.ledger.qualified_name,
    "entryId": lambda record, _: record.entry_id,
    "lastAddConfirmed": lambda record, _: _last_add_confirmed(record),
    "length": lambda record, _: record.length,
    "size": lambda record, digest_type: record.payload_size(digest_type),
    "formatVersion": lambda record, _: record.format_version,
    "offset": lambda record, _: record.offset,
    "recordSize": lambda record, _: record.record_size,
    "type": lambda record, _: record.type.value,
    "digestType": lambda record, _: None if record.digest_type is None else record.digest_type.name,
    "digest": lambda record, _: _record_digest(record),
    "payload": lambda record, digest_type: record.payload(digest_type),
    "record": lambda record, _: record.body,
    "masterKey": lambda record, _: record.special_payload if record.type is RecordType.LEDGER_KEY else None,
    DAMAGE: lambda record, _: None,
}

# --- rows -------------------------------------------------------------------------------------------------------------

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
            return pa.array([digest_of(window, begin + 4, size, self._version) for begin, size in rows], pa.string())
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
