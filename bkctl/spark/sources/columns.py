"""Columns that sources have in common: their types in Spark, and how they are made of numbers, without a row in Python.

The names are those of the JSON objects of the commands. Ids of ledgers are strings: they may be 2^63 and more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError, CorruptRecord, TruncatedRecord, UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from pyspark.sql.types import StructType

#: The column that `mode` permissive adds: what is wrong where. Null in rows that hold data.
DAMAGE: Final = "damage"
TYPES: Final[Mapping[str, str]] = {
    "ledgerScopeId": "string",
    "ledgerId": "string",
    "ledgerQualifiedName": "string",
    "entryId": "bigint",
    "lastAddConfirmed": "bigint",
    "length": "bigint",
    "size": "bigint",
    "formatVersion": "int",
    "digestType": "string",
    "digest": "string",
    "journalId": "bigint",
    "journalIdHex": "string",
    "logId": "bigint",
    "logIdHex": "string",
    "offset": "bigint",
    "location": "bigint",
    "recordSize": "bigint",
    "type": "string",
    "file": "string",
    "scoped": "boolean",
    "bookieId": "string",
    "payload": "binary",
    "record": "binary",
    "masterKey": "binary",
    "fenced": "boolean",
    "explicitLac": "bigint",
    "entryCount": "bigint",
    "lastEntryId": "bigint",
    "metadataFormatVersion": "int",
    "state": "string",
    "ensembleSize": "int",
    "writeQuorumSize": "int",
    "ackQuorumSize": "int",
    "ctime": "timestamp",
    "customMetadata": "map<string,binary>",
    "ensembles": "array<struct<firstEntryId:bigint,bookies:array<string>>>",
    "pulsar": "map<string,string>",
    DAMAGE: "struct<file:string,offset:bigint,reason:string>",
}


def ddl(columns: Iterable[str]) -> str:
    """The schema of these columns, as a source's `schema()` returns it."""
    return ", ".join(f"`{name}` {TYPES[name]}" for name in columns)


def check_schema(source: str, schema: StructType, known: Collection[str]) -> None:
    """Raise UsageError where a schema that somebody gave has other columns than those of the source, or other types."""
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in known or kind != TYPES[field.name]:
            raise UsageError(f"{source} has no column {field.name} of type {kind}", hint=f"it has {ddl(known)}")


class LedgerColumns:
    """The three id columns of rows whose scope (None: all 0) and ledger ids are given; each made when asked for.

    What belongs to no ledger (2^64−1 in scope 0, with `no_ledger`) is null.
    """

    def __init__(
        self, scope_ids: npt.NDArray[np.uint64] | None, ledger_ids: npt.NDArray[np.uint64], *, no_ledger: bool = False
    ) -> None:
        self._scope_ids, self._ledger_ids, self._no_ledger = scope_ids, ledger_ids, no_ledger
        self._found: tuple[Any, Any, Any] | None = None

    def column(self, name: str) -> pa.Array:
        """The column `ledgerScopeId`, `ledgerId` or `ledgerQualifiedName`, as strings."""
        import numpy as np
        import pyarrow as pa

        if self._no_ledger:
            return pa.nulls(len(self._ledger_ids), pa.string())
        rows, scope_ids, ledger_ids = self.distinct()
        if name == "ledgerScopeId":
            texts = pa.array(scope_ids).cast(pa.string())
        elif name == "ledgerId":
            texts = pa.array(ledger_ids).cast(pa.string())
        else:
            halves = np.empty((len(ledger_ids), 2), ">u8")
            halves[:, 0], halves[:, 1] = scope_ids, ledger_ids
            texts = hex_texts(halves.view(np.uint8).reshape(-1, 16))
        return texts.take(rows)

    def distinct(self) -> tuple[pa.Array, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Where each row is among the distinct ledgers, and those: few, as a rule, of many rows."""
        import numpy as np
        import pyarrow as pa

        if self._found is None:
            if self._scope_ids is None:
                encoded = pa.array(self._ledger_ids).dictionary_encode()
                ledger_ids = encoded.dictionary.to_numpy()
                self._found = encoded.indices, np.zeros(len(ledger_ids), np.uint64), ledger_ids
            else:
                pairs = np.empty((len(self._ledger_ids), 2), np.uint64)
                pairs[:, 0], pairs[:, 1] = self._scope_ids, self._ledger_ids
                kind = pa.binary(16)
                keys = pa.FixedSizeBinaryArray.from_buffers(kind, len(pairs), [None, pa.py_buffer(pairs)])
                encoded = keys.dictionary_encode()
                data = encoded.dictionary.buffers()[1]
                distinct = np.frombuffer(data, np.uint64, 2 * len(encoded.dictionary)).reshape(-1, 2)
                self._found = encoded.indices, distinct[:, 0], distinct[:, 1]
        return self._found


def hex_texts(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Each row of bytes (of one width) as lower-case hex digits."""
    import numpy as np
    import pyarrow as pa

    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    count, width = rows.shape
    texts = np.empty((count, width, 2), np.uint8)
    texts[:, :, 0], texts[:, :, 1] = digits[rows >> 4], digits[rows & 15]
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(2 * width)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(texts))


def constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    """`count` times the same value, None for null."""
    import pyarrow as pa

    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)


def where_and_why(error: BkctlError, offset: int | None = None) -> tuple[int | None, str]:
    """The offset (the error's own, else `offset`) and the reason that the column `damage` says of an error."""
    if isinstance(error, CorruptRecord | TruncatedRecord):
        offset = error.offset
    return offset, str(error)


def damage_row(schema: pa.Schema, file: str, offset: int | None, reason: str, /, **known: Any) -> pa.RecordBatch:
    """One row that says what is wrong where: `damage`, `file` and what is `known`; all other columns are null."""
    import pyarrow as pa

    values = {**known, "file": file, DAMAGE: {"file": file, "offset": offset, "reason": reason}}
    arrays = [pa.array([values.get(field.name)], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
