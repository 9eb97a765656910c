"""Columns as SQL of DuckDB, and the functions of columns that jobs use, with PySpark's names and meanings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from inspect import signature
from itertools import count as counter
from typing import TYPE_CHECKING, Any

from bkctl.spark.sources.columns import arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

_numbers = counter()


class Expression:
    """An expression, and the name of its values."""

    def __init__(self, sql: str, name: str | None = None, order: str | None = None) -> None:
        self.sql, self.name = sql, name
        #: As in ORDER BY; Spark sorts nulls first unless it sorts in descending order.
        self.order = order or f"{sql} ASC NULLS FIRST"

    def alias(self, name: str) -> Expression:
        """Return the same values under another name."""
        return Expression(self.sql, name)

    def named(self) -> str:
        """Return the expression with its name, for a list of columns."""
        return self.sql if self.name is None else f"{self.sql} AS {quoted(self.name)}"

    def cast(self, kind: str) -> Expression:
        """Return the values as another type of Spark."""
        return Expression(f"CAST({self.sql} AS {duckdb_type(arrow_type(kind))})", self.name)

    def __getitem__(self, key: str | int) -> Expression:
        place = key + 1 if isinstance(key, int) else text(key)
        return Expression(f"({self.sql})[{place}]", None if isinstance(key, int) else key)

    def isNull(self) -> Expression:
        """Return whether values are null."""
        return Expression(f"({self.sql} IS NULL)")

    def isNotNull(self) -> Expression:
        """Return whether values are not null."""
        return Expression(f"({self.sql} IS NOT NULL)")

    def isin(self, *values: Any) -> Expression:
        """Return whether values are among `values`."""
        given = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        words = ", ".join(_value(value).sql for value in given)
        return Expression(f"({self.sql} IN ({words}))" if words else "FALSE")

    def eqNullSafe(self, other: Any) -> Expression:
        """Return whether values are equal; null equals null."""
        return self._with("IS NOT DISTINCT FROM", other)

    def startswith(self, other: Any) -> Expression:
        """Return whether texts start with another text."""
        return Expression(f"starts_with({self.sql}, {_value(other).sql})")

    def endswith(self, other: Any) -> Expression:
        """Return whether texts end with another text."""
        return Expression(f"ends_with({self.sql}, {_value(other).sql})")

    def rlike(self, pattern: str) -> Expression:
        """Return whether a part of texts matches a regular expression."""
        return Expression(f"regexp_matches({self.sql}, {text(pattern)})")

    def _with(self, operator: str, other: Any) -> Expression:
        return Expression(f"({self.sql} {operator} {_value(other).sql})")

    __eq__ = partialmethod(_with, "=")
    __ne__ = partialmethod(_with, "<>")
    __lt__ = partialmethod(_with, "<")
    __le__ = partialmethod(_with, "<=")
    __gt__ = partialmethod(_with, ">")
    __ge__ = partialmethod(_with, ">=")
    __add__ = partialmethod(_with, "+")
    __sub__ = partialmethod(_with, "-")
    __mul__ = partialmethod(_with, "*")
    __truediv__ = partialmethod(_with, "/")
    __and__ = partialmethod(_with, "AND")
    __or__ = partialmethod(_with, "OR")
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("A column has no truth value; use & | ~ instead of and, or, not")

    def __invert__(self) -> Expression:
        return Expression(f"(NOT {self.sql})")


class Case(Expression):
    """A CASE whose branches are added one by one."""

    def __init__(self, branches: str) -> None:
        self._branches = branches
        super().__init__(f"CASE{branches} END")

    def when(self, condition: Expression, value: Any) -> Case:
        """Return the CASE with another branch."""
        return Case(f"{self._branches} WHEN {condition.sql} THEN {_value(value).sql}")

    def otherwise(self, value: Any) -> Expression:
        """Return the CASE with a value where no condition is met."""
        return Expression(f"CASE{self._branches} ELSE {_value(value).sql} END")


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return a text as SQL has it."""
    return "'" + value.replace("'", "''") + "'"


def duckdb_type(kind: pa.DataType) -> str:
    """Return a type of Arrow as DuckDB's."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = ", ".join(f"{quoted(field.name)} {duckdb_type(field.type)}" for field in kind)
        return f"STRUCT({fields})"
    if pa.types.is_list(kind):
        return f"{duckdb_type(kind.value_type)}[]"
    if pa.types.is_map(kind):
        return f"MAP({duckdb_type(kind.key_type)}, {duckdb_type(kind.item_type)})"
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    names = {
        "string": "VARCHAR", "int64": "BIGINT", "int32": "INTEGER", "bool": "BOOLEAN", "binary": "BLOB",
        "double": "DOUBLE", "timestamp[us, tz=UTC]": "TIMESTAMPTZ",
    }  # fmt: skip
    return names[str(kind)]


def column(value: str | Expression) -> Expression:
    """Return the column of a name, or the column itself."""
    return value if isinstance(value, Expression) else col(value)


def _value(value: Any) -> Expression:
    return value if isinstance(value, Expression) else lit(value)


def _sql(*values: str | int | Expression) -> str:
    return ", ".join(str(value) if isinstance(value, int) else column(value).sql for value in values)


def _same(name: str) -> Callable[..., Expression]:
    """Return the function of DuckDB with this name, which does the same as Spark's."""
    return lambda *values: Expression(f"{name}({_sql(*values)})")


def _as(form: str) -> Callable[..., Expression]:
    """Return a function that puts its values into the braces of `form`."""
    return lambda *values: Expression(form.format(*map(_sql, values)))


# --- as in pyspark.sql.functions: texts are names of columns ----------------------------------------------------------


def col(name: str) -> Expression:
    """Return a column, or with dots a field of a struct."""
    first, *fields = name.split(".")
    return Expression(quoted(first) + "".join(f"[{text(field)}]" for field in fields), name.rpartition(".")[2])


def lit(value: Any) -> Expression:
    """Return a constant."""
    if isinstance(value, str):
        return Expression(text(value))
    return Expression("NULL" if value is None else str(value))


def expr(sql: str) -> Expression:
    """Return a column of SQL that both engines take."""
    return Expression(f"({sql})")


def when(condition: Expression, value: Any) -> Case:
    """Return `value` where the condition is met."""
    return Case("").when(condition, value)


coalesce = _same("COALESCE")
least = _same("LEAST")
raise_error = _same("ERROR")
substring = _same("SUBSTRING")
floor = _as("CAST(FLOOR({}) AS BIGINT)")
shiftright = _as("({} >> {})")
#: The text of bytes in UTF-8; null for other bytes.
try_validate_utf8 = _as("TRY(DECODE({}))")
pmod = _as("((({0} % {1}) + {1}) % {1})")


def conv(value: str | Expression, from_base: int, to_base: int) -> Expression:
    """Return a hexadecimal text as a decimal one."""
    assert (from_base, to_base) == (16, 10)
    return Expression(f"CAST(CAST('0x' || {_sql(value)} AS UBIGINT) AS VARCHAR)")


def lpad(value: str | Expression, size: int, filler: str) -> Expression:
    return Expression(f"LPAD({_sql(value)}, {size}, {text(filler)})")


def concat_ws(separator: str, *values: str | Expression) -> Expression:
    return Expression(f"CONCAT_WS({text(separator)}, {_sql(*values)})")


def desc(value: str | Expression) -> Expression:
    return Expression(_sql(value), order=f"{_sql(value)} DESC NULLS LAST")


def struct(*values: str | Expression) -> Expression:
    fields = (column(value) for value in values)
    return Expression("{" + ", ".join(f"{text(str(field.name))}: {field.sql}" for field in fields) + "}")


# --- arrays and maps --------------------------------------------------------------------------------------------------


def array(*values: str | Expression) -> Expression:
    return Expression(f"[{_sql(*values)}]")


#: An item of an array, null behind its end; the value of a key of a map.
get = _as("({})[{} + 1]")
element_at = _as("{}[{}]")
size = _same("LEN")
array_max = _same("LIST_MAX")
sequence = _same("GENERATE_SERIES")
explode = _same("UNNEST")


def concat(*values: str | Expression) -> Expression:
    return Expression(f"({' || '.join(column(value).sql for value in values)})")


def filter(value: str | Expression, function: Callable[..., Expression]) -> Expression:
    return Expression(f"LIST_FILTER({_sql(value)}, {_lambda(function)})")


def transform(value: str | Expression, function: Callable[..., Expression]) -> Expression:
    return Expression(f"LIST_TRANSFORM({_sql(value)}, {_lambda(function)})")


def _lambda(function: Callable[..., Expression]) -> str:
    """Return a function of an item, or of an item and its index, which Spark counts from 0 and DuckDB from 1."""
    names = [f"x{next(_numbers)}" for _ in signature(function).parameters]
    given = [Expression(names[0]), *(Expression(f"({name} - 1)") for name in names[1:])]
    return f"LAMBDA {', '.join(names)}: {function(*given).sql}"


def create_map(*values: Expression) -> Expression:
    return Expression(f"MAP([{_sql(*values[::2])}], [{_sql(*values[1::2])}])")


# --- aggregates -------------------------------------------------------------------------------------------------------


def count(value: str | Expression) -> Expression:
    return Expression("COUNT(*)" if isinstance(value, str) and value == "*" else f"COUNT({_sql(value)})")


def count_distinct(*values: str | Expression) -> Expression:
    """Return the number of different values, or combinations of values without a null."""
    given = " AND ".join(f"{column(value).sql} IS NOT NULL" for value in values)
    return Expression(f"COUNT(DISTINCT {struct(*values).sql}) FILTER (WHERE {given})")


sum = _as("CAST(SUM({}) AS BIGINT)")
collect_set = _as("COALESCE(LIST(DISTINCT {0}) FILTER (WHERE {0} IS NOT NULL), [])")
# Nulls in structs sort last here and first in Spark: structs of jobs begin with fields that decide without these.
max = _same("MAX")
min = _same("MIN")


def first(value: str | Expression, ignorenulls: bool) -> Expression:
    """Return a value that is not null, if there is one."""
    assert ignorenulls
    return Expression(f"ANY_VALUE({_sql(value)})")


def broadcast(frame: Any) -> Any:
    return frame
