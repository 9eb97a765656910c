"""Schemas in Spark's DDL as Arrow schemas, without Spark, whose parser is in the JVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa


class DdlType(str):
    """The text of a type, with the method of PySpark's types."""

    __slots__ = ()

    def simpleString(self) -> str:
        return str(self)


class DdlField(NamedTuple):
    """A column, with the attributes of PySpark's StructField."""

    name: str
    dataType: DdlType


class DdlSchema:
    """The columns of a DDL text, with the attributes of PySpark's StructType that sources use."""

    def __init__(self, text: str) -> None:
        pairs = (column.strip().partition(" ") for column in _split(text))
        self.fields = [DdlField(name.strip("`"), DdlType(kind.strip())) for name, _, kind in pairs]

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]


def arrow_schema(ddl: str) -> pa.Schema:
    """Return the columns of a DDL text as an Arrow schema."""
    return arrow_schema_of(DdlSchema(ddl))


def arrow_schema_of(schema: Any) -> pa.Schema:
    """Return a StructType of PySpark or a DdlSchema as an Arrow schema; timestamps are UTC."""
    import pyarrow as pa

    if isinstance(schema, pa.Schema):
        return schema
    return pa.schema([pa.field(field.name, arrow_type(field.dataType.simpleString())) for field in schema.fields])


def arrow_type(text: str) -> pa.DataType:
    """Return a type of Spark as Arrow's."""
    import pyarrow as pa

    outer, bracket, inner = text.removesuffix(">").partition("<")
    if bracket:
        parts = list(_split(inner))
        if outer == "array":
            return pa.list_(arrow_type(inner))
        if outer == "map":
            key, value = map(arrow_type, parts)
            return pa.map_(key, value)
        return pa.struct([(name, arrow_type(kind)) for name, _, kind in (part.partition(":") for part in parts)])
    if text.startswith("decimal"):
        precision, scale = text.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    types: dict[str, pa.DataType] = {
        "string": pa.string(), "bigint": pa.int64(), "int": pa.int32(), "boolean": pa.bool_(), "binary": pa.binary(),
        "double": pa.float64(), "timestamp": pa.timestamp("us", "UTC"),
    }  # fmt: skip
    return types[text]


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas that are outside of brackets."""
    depth = start = 0
    for at, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            yield text[start:at]
            start = at + 1
    yield text[start:]
