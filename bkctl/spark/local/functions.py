"""Columns as SQL of DuckDB, and the functions of columns that jobs use, with PySpark's names and meanings."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import signature
from itertools import count
from typing import Any

_numbers = count()


def _form(form: str) -> Callable[..., Expression]:
    """Return a method that puts the column and its arguments, columns or constants, into the braces of `form`."""
    return lambda *values: Expression(form.format(*(_value(value).sql for value in values)))


class Expression:
    """An expression, and the name of its values, with the methods of PySpark's Column that jobs use."""

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
        """Return the values as another type of Spark; DuckDB has the same names, and brackets for fields of structs."""
        fields = re.sub(r"(\w+):", r'"\1" ', kind).replace("<", "(").replace(">", ")")
        return Expression(f"CAST({self.sql} AS {fields})", self.name)

    def isin(self, *values: Any) -> Expression:
        """Return whether values are among `values`."""
        given = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        words = ", ".join(_value(value).sql for value in given)
        return Expression(f"({self.sql} IN ({words}))" if words else "FALSE")

    def __getitem__(self, key: str | int) -> Expression:
        place = key + 1 if isinstance(key, int) else text(key)
        return Expression(f"({self.sql})[{place}]", None if isinstance(key, int) else key)

    isNull = _form("({} IS NULL)")
    isNotNull = _form("({} IS NOT NULL)")
    eqNullSafe = _form("({} IS NOT DISTINCT FROM {})")
    startswith = _form("starts_with({}, {})")
    endswith = _form("ends_with({}, {})")
    rlike = _form("regexp_matches({}, {})")
    __eq__ = _form("({} = {})")  # type: ignore[assignment]
    __ne__ = _form("({} <> {})")  # type: ignore[assignment]
    __lt__ = _form("({} < {})")
    __le__ = _form("({} <= {})")
    __gt__ = _form("({} > {})")
    __ge__ = _form("({} >= {})")
    __add__ = _form("({} + {})")
    __sub__ = _form("({} - {})")
    __mul__ = _form("({} * {})")
    __truediv__ = _form("({} / {})")
    __and__ = _form("({} AND {})")
    __or__ = _form("({} OR {})")
    __invert__ = _form("(NOT {})")
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("A column has no truth value; use & | ~ instead of and, or, not")


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


def column(value: str | Expression) -> Expression:
    """Return a column by its name, with dots a field of a struct, or the column itself."""
    if isinstance(value, Expression):
        return value
    first, *fields = value.split(".")
    return Expression(quoted(first) + "".join(f"[{text(field)}]" for field in fields), value.rpartition(".")[2])


def _value(value: Any) -> Expression:
    """Return a constant as a column, or the column itself."""
    if isinstance(value, Expression):
        return value
    return Expression(text(value) if isinstance(value, str) else "NULL" if value is None else str(value))


def _sql(*values: str | int | Expression) -> str:
    return ", ".join(str(value) if isinstance(value, int) else column(value).sql for value in values)


def _list(form: str) -> Callable[..., Expression]:
    """Return a function that puts any number of values into the one pair of braces of `form`, between commas."""
    return lambda *values: Expression(form.format(_sql(*values)))


def _same(name: str) -> Callable[..., Expression]:
    """Return the function of DuckDB with this name, which does the same as Spark's."""
    return _list(f"{name}({{}})")


def _as(form: str) -> Callable[..., Expression]:
    """Return a function that puts its values into the braces of `form`."""
    return lambda *values: Expression(form.format(*map(_sql, values)))


def _of_items(name: str) -> Callable[[str | Expression, Callable[..., Expression]], Expression]:
    """Return the function of DuckDB with this name, which applies a function to the items of an array."""
    return lambda value, function: Expression(f"{name}({_sql(value)}, {_lambda(function)})")


def _lambda(function: Callable[..., Expression]) -> str:
    """Return a function of an item, or of an item and its index, which Spark counts from 0 and DuckDB from 1."""
    names = [f"x{next(_numbers)}" for _ in signature(function).parameters]
    given = [Expression(names[0]), *(Expression(f"({name} - 1)") for name in names[1:])]
    return f"LAMBDA {', '.join(names)}: {function(*given).sql}"


class LocalFunctions:
    """The functions of pyspark.sql.functions that jobs use, called without an instance; texts are names of columns."""

    col = staticmethod(column)
    lit = staticmethod(_value)
    #: A value where a condition is met.
    when = staticmethod(lambda condition, value: Case("").when(condition, value))
    #: SQL that both engines take.
    expr = staticmethod(lambda sql: Expression(f"({sql})"))
    coalesce = _same("COALESCE")
    least = _same("LEAST")
    raise_error = _same("ERROR")
    substring = _same("SUBSTRING")
    floor = _as("CAST(FLOOR({}) AS BIGINT)")
    shiftright = _as("({} >> {})")
    #: The text of bytes in UTF-8; null for other bytes.
    try_validate_utf8 = _as("TRY(DECODE({}))")
    pmod = _as("((({0} % {1}) + {1}) % {1})")
    #: A number as a text: from base 16 to base 10, as jobs call it.
    conv = _as("CAST(CAST('0x' || {} AS UBIGINT) AS VARCHAR)")

    @staticmethod
    def lpad(value: str | Expression, size: int, filler: str) -> Expression:
        return Expression(f"LPAD({_sql(value)}, {size}, {text(filler)})")

    @staticmethod
    def concat_ws(separator: str, *values: str | Expression) -> Expression:
        return Expression(f"CONCAT_WS({text(separator)}, {_sql(*values)})")

    @staticmethod
    def desc(value: str | Expression) -> Expression:
        return Expression(_sql(value), order=f"{_sql(value)} DESC NULLS LAST")

    @staticmethod
    def struct(*values: str | Expression) -> Expression:
        fields = (column(value) for value in values)
        return Expression("{" + ", ".join(f"{text(str(field.name))}: {field.sql}" for field in fields) + "}")

    # Arrays and maps.

    #: An item of an array, null behind its end; the value of a key of a map.
    get = _as("({})[{} + 1]")
    element_at = _as("{}[{}]")
    size = _same("LEN")
    array_max = _same("LIST_MAX")
    sequence = _same("GENERATE_SERIES")
    explode = _same("UNNEST")
    filter = _of_items("LIST_FILTER")
    transform = _of_items("LIST_TRANSFORM")

    array = _list("[{}]")

    @staticmethod
    def concat(*values: str | Expression) -> Expression:
        return Expression(f"({' || '.join(map(_sql, values))})")

    @staticmethod
    def create_map(*values: Expression) -> Expression:
        return Expression(f"MAP([{_sql(*values[::2])}], [{_sql(*values[1::2])}])")

    # Aggregates.

    sum = _as("CAST(SUM({}) AS BIGINT)")
    collect_set = _as("COALESCE(LIST(DISTINCT {0}) FILTER (WHERE {0} IS NOT NULL), [])")
    # Nulls in structs sort last here and first in Spark: structs of jobs begin with fields that decide without these.
    max = _same("MAX")
    min = _same("MIN")

    @staticmethod
    def count(value: str | Expression) -> Expression:
        return Expression("COUNT(*)" if isinstance(value, str) and value == "*" else f"COUNT({_sql(value)})")

    @staticmethod
    def count_distinct(*values: str | Expression) -> Expression:
        """Return the number of different values, or combinations of values without a null."""
        given = " AND ".join(f"{column(value).sql} IS NOT NULL" for value in values)
        return Expression(f"COUNT(DISTINCT {LocalFunctions.struct(*values).sql}) FILTER (WHERE {given})")

    @staticmethod
    def first(value: str | Expression, ignorenulls: bool) -> Expression:
        """Return a value that is not null, if there is one."""
        assert ignorenulls
        return Expression(f"ANY_VALUE({_sql(value)})")

    #: All rows are in one process.
    broadcast = staticmethod(lambda frame: frame)
