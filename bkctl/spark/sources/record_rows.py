"""From records of entry logs and journals to Arrow batches: a row for each record, or for each ledger.

Records come as columns (`RecordBatch`) and leave as columns: what stands in their headers is never an object in Python.
Those few that are no plain entries are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bkctl.errors import Corrupt, Unsupported
from bkctl.files.listing import FILLER_TYPES
from bkctl.files.scan import RecordBatch
from bkctl.formats.entry import HEADER_SIZE_V1, HEADER_SIZE_V2, DigestType, digest_function, read_lac_header
from bkctl.formats.record import NO_LEDGER, RECORD_SIZE, Record, RecordType
from bkctl.ids import to_signed
from bkctl.spark.sources.columns import DAMAGE, LedgerColumns, constant
from bkctl.spark.sources.filters import LEDGER_COLUMNS, Conditions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

#: Rows of one Arrow batch, about; and records that are too few to be worth columns of their own.
BATCH_ROWS: Final = 32_768
_FEW: Final = 8

#: Columns that are made of the records themselves, not of their headers.
OF_CONTENT: Final = frozenset(("payload", "record", "digest"))
_TRIED: Final = (DigestType.CRC32C, DigestType.CRC32)


def fields_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    """The fields of plain entries, a row each."""
    import numpy as np

    width = 5 if batch.format_version == 1 else 7
    fields = batch.fields
    if isinstance(fields, memoryview):
        return np.frombuffer(fields, np.int64).reshape(-1, width)
    try:
        found = np.array(fields, np.int64)
    except OverflowError:
        # Python's own loop does not wrap ids of 2^63 and more.
        found = np.array([to_signed(value) for value in fields], np.int64)
    return found.reshape(-1, width)


class Selection(NamedTuple):
    """Which records are wanted: those that meet the `conditions`, of these `types` (None: all but fillers)."""

    conditions: Conditions
    types: Collection[str] | None

    def wants(self, record: Record) -> bool:
        """Whether this one is."""
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
        """Whether plain entries may be."""
        name = RecordType.ENTRY.value
        return (self.types is None or name in self.types) and self.conditions.accepts("type", name)

    def mask(self, batch: RecordBatch, fields: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Which plain entries are; None: all."""
        import numpy as np

        conditions = self.conditions
        if not (conditions.values or conditions.first or conditions.last or conditions.ledgers is not None):
            return None
        scope_ids, ledger_ids = ids_of(fields)
        masks = [
            conditions.ledger_mask(scope_ids, ledger_ids),
            conditions.number_mask("entryId", fields[:, -3]),
            conditions.number_mask("offset", _offsets_of(batch)),
        ]
        given = [mask for mask in masks if mask is not None]
        found: npt.NDArray[np.bool_] = np.logical_and.reduce(given) if given else np.ones(len(fields), np.bool_)
        return None if found.all() else found

    def count(self, batch: RecordBatch) -> int:
        """How many of these records are."""
        if batch.record is not None:
            return int(self.wants(batch.record))
        if not self.wants_entries():
            return 0
        mask = self.mask(batch, fields_of(batch))
        return len(batch) if mask is None else int(mask.sum())


class RecordRows:
    """Turns records into Arrow batches of the columns of `schema`; those that are not wanted are left out.

    `constants` are the columns that are the same for the whole file.
    """

    def __init__(
        self, schema: pa.Schema, constants: dict[str, Any], selection: Selection, digest_type: DigestType | None
    ) -> None:
        self.schema = schema
        self._constants, self._selection, self._digest_type = constants, selection, digest_type
        self._content = [name for name in schema.names if name in OF_CONTENT]
        self._fields: list[npt.NDArray[np.int64]] = []
        self._offsets: list[npt.NDArray[np.int64]] = []
        self._contents: list[list[pa.Array]] = []
        self._version = 1
        self._records: list[Record] = []
        self._count = 0

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these records, in order. The window of a batch is not needed once the next is asked for."""
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
        import numpy as np

        if not self._selection.wants_entries():
            return
        fields, offsets, begins = fields_of(batch), _offsets_of(batch), np.asarray(batch.begins, np.int64)
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
        import numpy as np
        import pyarrow as pa

        if self._records:
            records, self._records = self._records, []
            arrays = [
                constant(self._constants[field.name], len(records), field.type)
                if field.name in self._constants
                else pa.array(self._value_of(field.name, records), field.type)
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
        import numpy as np
        import pyarrow as pa

        name, count = field.name, len(fields)
        if name in self._constants:
            return constant(self._constants[name], count, field.type)
        if name in LEDGER_COLUMNS:
            return ids.column(name)
        if name in _NUMBERS:
            return pa.array(np.ascontiguousarray(fields[:, _NUMBERS[name]]))
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
        """Bytes before the payload of each entry; None where that is not known."""
        import numpy as np

        if self._version == 2:
            lengths = [0, *(each.code_length for each in DigestType)]
            return HEADER_SIZE_V2 + np.array(lengths, np.int64)[fields[:, 1] & 0x0F]
        return None if self._digest_type is None else HEADER_SIZE_V1 + self._digest_type.code_length

    def _content_of(
        self, name: str, window: bytes, fields: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> pa.Array:
        import numpy as np
        import pyarrow as pa

        count = len(fields)
        if name == "digest":
            rows = zip(begins.tolist(), fields[:, 0].tolist(), strict=True)
            check = _digest_of_v1 if self._version == 1 else _digest_of_v2
            return pa.array([check(window, begin + 4, size) for begin, size in rows], pa.string())
        overheads = 0 if name == "record" else self._overheads(fields)
        if overheads is None:
            return pa.nulls(count, pa.binary())
        # All between the wanted parts stands in the array too, and is left out when those are taken.
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

    def _value_of(self, name: str, records: Sequence[Record]) -> list[Any]:
        return [_VALUES[name](record, self._digest_type) for record in records]


class LedgerSums:
    """Counts records instead: one row for each ledger, with their number and their bytes, size fields included.

    Used as RecordRows is. Records that belong to no ledger do not count.
    """

    def __init__(self, schema: pa.Schema, constants: dict[str, Any], selection: Selection) -> None:
        self.schema = schema
        self._constants, self._selection = constants, selection
        self._sums: dict[tuple[int, int], list[int]] = {}

    def of(self, batches: Iterable[RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of all these records, by scope and ledger id."""
        import numpy as np
        import pyarrow as pa

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
            columns = LedgerColumns(halves[:, 0], halves[:, 1])
            arrays = []
            for field in self.schema:
                if field.name in LEDGER_COLUMNS:
                    arrays.append(columns.column(field.name))
                elif field.name in ("entryCount", "size"):
                    place = ("entryCount", "size").index(field.name)
                    arrays.append(pa.array([self._sums[each][place] for each in chosen], field.type))
                else:
                    arrays.append(constant(self._constants.get(field.name), len(chosen), field.type))
            yield pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _add_all(self, batch: RecordBatch) -> None:
        import numpy as np

        fields = fields_of(batch)
        mask = self._selection.mask(batch, fields)
        if mask is not None:
            fields = fields[mask]
        rows, scope_ids, ledger_ids = LedgerColumns(*ids_of(fields)).distinct()
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


#: Where the fields of a row are; negative: from its end.
_NUMBERS: Final = {"recordSize": 0, "entryId": -3, "lastAddConfirmed": -2, "length": -1}
_DIGEST_NAMES: Final = (None, *(each.name for each in DigestType))


def ids_of(
    fields: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.uint64] | None, npt.NDArray[np.uint64]]:
    """The scope ids (None: all 0) and ledger ids of plain entries."""
    import numpy as np

    ledger_ids = np.ascontiguousarray(fields[:, -4]).view(np.uint64)
    return (None if fields.shape[1] == 5 else np.ascontiguousarray(fields[:, 2]).view(np.uint64)), ledger_ids


def _is_read_singly(batch: RecordBatch) -> bool:
    """Return whether to handle the records of `batch` one by one; plain entries without their bodies never are."""
    return batch.record is not None or (len(batch) < _FEW and len(batch.window) > 0)


def _offsets_of(batch: RecordBatch) -> npt.NDArray[np.int64]:
    import numpy as np

    return np.asarray(batch.begins, np.int64) + batch.window_offset


def _digest_of_v1(window: bytes, body: int, size: int) -> str | None:
    """The name of the digest type that the entry matches; None where it is none of those that need no password."""
    payload = body + HEADER_SIZE_V1
    header = window[body:payload]
    end = body + size
    for digest_type in _TRIED:
        at = payload + digest_type.code_length
        if at <= end and digest_function(digest_type)(header, window[at:end]) == window[payload:at]:
            return digest_type.name
    return None


def _digest_of_v2(window: bytes, body: int, size: int) -> str | None:
    digest_type = _TYPES_BY_NUMBER.get(window[body] & 0x0F)
    if digest_type is None or digest_type is DigestType.HMAC:
        return None
    payload = body + HEADER_SIZE_V2
    at, end = payload + digest_type.code_length, body + size
    if at > end or digest_function(digest_type)(window[body:payload], window[at:end]) != window[payload:at]:
        return None
    return digest_type.name


_TYPES_BY_NUMBER: Final = {int(each): each for each in DigestType}


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
    check = _digest_of_v1 if record.format_version == 1 else _digest_of_v2
    return check(record.body, 0, record.record_size)


_VALUES: Final[dict[str, Callable[[Record, DigestType | None], Any]]] = {
    "ledgerScopeId": lambda record, _: None if record.ledger is NO_LEDGER else str(record.ledger.scope_id),
    "ledgerId": lambda record, _: None if record.ledger is NO_LEDGER else str(record.ledger.ledger_id),
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
