"""Columns that sources share: types in Spark, in DDL and in Arrow; columns of ledger ids, rows of damage.

Names are the same as in the commands' JSON objects. Ids of scopes and ledgers can be 2^63 and more, so they are
`decimal(20,0)`: they compare and sort as numbers. Spark's own parser of DDL is in the JVM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from bkctl.columns import Kind
from bkctl.errors import BkctlError, CorruptRecord, TruncatedRecord
from bkctl.ids import LedgerId
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS

if TYPE_CHECKING:
    import numpy.typing as npt
    from pyspark.sql.types import StructType

with suppress(ImportError):  # Sessions and stores of facts say that they are not installed.
    import numpy as np
    import pyarrow as pa

#: The column that mode permissive adds: file, offset and reason of damage. Null in rows that hold data.
DAMAGE: Final = "damage"
#: An unsigned number of 64 bits.
ID_TYPE: Final = "decimal(20,0)"
TYPES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ledgerScopeId", "ledgerId"), ID_TYPE),
    **dict.fromkeys(("ledgerQualifiedName", "type", "digestType", "digest", "file", "bookieId"), "string"),
    **dict.fromkeys(("entryId", "lastAddConfirmed", "length", "size", "offset", "location", "recordSize"), "bigint"),
    **dict.fromkeys(("explicitLac", "entryCount", "lastEntryId"), "bigint"),
    **dict.fromkeys(("journalId", "logId"), "bigint"),
    **dict.fromkeys(("journalIdHex", "logIdHex"), "string"),
    **dict.fromkeys(("scoped", "fenced"), "boolean"),
    **dict.fromkeys(("payload", "record", "masterKey"), "binary"),
    "formatVersion": "int",
    **{column.name: column.spark_type for column in LEDGER_COLUMNS.columns if column.kind is not Kind.LEDGER},
    DAMAGE: "struct<file:string,offset:bigint,reason:string>",
}


def ddl(columns: Iterable[str]) -> str:
    """Return the schema of these columns, as Spark's DDL."""
    return ", ".join(f"`{name}` {TYPES[name]}" for name in columns)


class LedgerColumns:
    """The three id columns of rows with these scope ids (None: all 0) and ledger ids."""

    def __init__(self, scope_ids: npt.NDArray[np.uint64] | None, ledger_ids: npt.NDArray[np.uint64]) -> None:
        self._scope_ids, self._ledger_ids = scope_ids, ledger_ids

    def column(self, name: str) -> pa.Array:
        """Return the column `ledgerScopeId`, `ledgerId` or `ledgerQualifiedName`."""
        rows, scope_ids, ledger_ids = self.distinct
        if name == "ledgerQualifiedName":
            halves = np.empty((len(ledger_ids), 2), ">u8")
            halves[:, 0], halves[:, 1] = scope_ids, ledger_ids
            offsets = np.arange(len(halves) + 1, dtype=np.int32) * np.int32(32)
            texts = halves.tobytes().hex().encode()
            values = pa.StringArray.from_buffers(len(halves), pa.py_buffer(offsets), pa.py_buffer(texts))
        else:
            values = pa.array(scope_ids if name == "ledgerScopeId" else ledger_ids).cast(pa.decimal128(20, 0))
        return values.take(rows)

    def columns(self, schema: pa.Schema) -> dict[str, pa.Array]:
        """Return the id columns of `schema` by name."""
        names = ("ledgerScopeId", "ledgerId", "ledgerQualifiedName")
        return {name: self.column(name) for name in names if name in schema.names}

    @cached_property
    def distinct(self) -> tuple[pa.Array, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return the index of each row's ledger among the distinct ledgers, and their scope ids and ledger ids."""
        if self._scope_ids is None:
            encoded = pa.array(self._ledger_ids).dictionary_encode()
            ledger_ids = encoded.dictionary.to_numpy()
            return encoded.indices, np.zeros(len(ledger_ids), np.uint64), ledger_ids
        pairs = np.empty((len(self._ledger_ids), 2), np.uint64)
        pairs[:, 0], pairs[:, 1] = self._scope_ids, self._ledger_ids
        keys = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(pairs), [None, pa.py_buffer(pairs)])
        encoded = keys.dictionary_encode()
        data = encoded.dictionary.buffers()[1]
        distinct = np.frombuffer(data, np.uint64, 2 * len(encoded.dictionary)).reshape(-1, 2)
        return encoded.indices, distinct[:, 0], distinct[:, 1]


def ledger_values(ledger: LedgerId) -> dict[str, Any]:
    """Return the values of the three id columns of `ledger`."""
    return {
        "ledgerScopeId": ledger.scope_id, "ledgerId": ledger.ledger_id, "ledgerQualifiedName": ledger.qualified_name,
    }  # fmt: skip


def constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    """Return a column of `count` times `value`; None is null."""
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)


def table_of(
    schema: pa.Schema, columns: Mapping[str, Any], count: int, constants: Mapping[str, Any] | None = None
) -> pa.Table:
    """Return the columns of `schema`: from `columns`, else `count` times a constant, else null."""
    values = constants or {}
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else constant(values.get(field.name), count, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def damage_of(error: BkctlError, file: str | None, offset: int | None = None) -> dict[str, Any]:
    """Return the value of the column `damage`, with the error's own offset, else `offset`."""
    if isinstance(error, CorruptRecord | TruncatedRecord):
        offset = error.offset
    return {"file": file, "offset": offset, "reason": str(error)}


def damage_row(schema: pa.Schema, damage: Mapping[str, Any], /, **known: Any) -> pa.RecordBatch:
    """Return one row with `damage`, its `file` and the `known` columns; all other columns are null."""
    return pa.RecordBatch.from_pylist([{**known, "file": damage["file"], DAMAGE: damage}], schema=schema)


# --- schemas in Spark's DDL as Arrow schemas --------------------------------------------------------------------------


def arrow_schema(ddl: str) -> pa.Schema:
    """Return the columns of a DDL text as an Arrow schema; timestamps are UTC."""
    return pa.schema(list(_fields(ddl)))


def arrow_schema_of(schema: StructType | pa.Schema) -> pa.Schema:
    """Return a StructType of PySpark as an Arrow schema; an Arrow schema stays as it is."""
    return schema if isinstance(schema, pa.Schema) else pa.schema(list(arrow_type(schema.simpleString())))


def arrow_type(text: str) -> pa.DataType:
    """Return a type of Spark as Arrow's."""
    outer, bracket, inner = text.removesuffix(">").partition("<")
    if bracket:
        if outer == "array":
            return pa.list_(arrow_type(inner))
        return pa.map_(*map(arrow_type, _split(inner))) if outer == "map" else pa.struct(list(_fields(inner)))
    if decimal := re.fullmatch(r"decimal\((\d+),(\d+)\)", text):
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    types: dict[str, pa.DataType] = {
        "string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "boolean": pa.bool_(), "binary": pa.binary(),
        "double": pa.float64(), "timestamp": pa.timestamp("us", "UTC"),
    }  # fmt: skip
    return types[text]


def _fields(text: str) -> Iterator[tuple[str, pa.DataType]]:
    """Yield the names and types of columns, or of a struct's fields."""
    for part in _split(text):
        name, kind = re.split(r"[ :]+", part.strip(), maxsplit=1)
        yield name.strip("`"), arrow_type(kind)


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]
