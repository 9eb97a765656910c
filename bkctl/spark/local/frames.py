"""Frames of the local engine: queries of DuckDB that run when their rows are wanted, with the methods of a DataFrame.

A frame writes its SQL anew for each query. A source is read by every query that has it, as a stream, so that its rows
are in memory only if a query keeps them; `persist` keeps a frame's rows in a table, which DuckDB moves to the disk when
memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from bkctl.spark.local.functions import Expression, column, duckdb_type, quoted
from bkctl.spark.local.functions import sum as sum_of
from bkctl.spark.sources.columns import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from bkctl.spark.local.session import LocalDatabase, Query

_HOWS = {"inner": "INNER", "left": "LEFT", "full_outer": "FULL", "left_semi": "SEMI", "left_anti": "ANTI"}
#: Writes the SQL of a frame for a query; None: for a query of the columns alone, without rows.
_Writer = Callable[["Query | None"], str]
_numbers = count()


class Row(tuple[Any, ...]):
    """A row with its values as items and attributes, as PySpark's."""

    __slots__ = ()
    _names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        with suppress(ValueError):
            return self[self._names.index(name)]
        raise AttributeError(name)

    def asDict(self, recursive: bool = False) -> dict[str, Any]:
        return dict(zip(self._names, self, strict=True))


class Frame:
    """Rows of a query. `schema` and `columns` are known without reading rows."""

    def __init__(self, database: LocalDatabase, write: _Writer, *, is_stored: bool = False) -> None:
        self._database, self._write = database, write
        #: The rows are in tables already.
        self._is_stored = is_stored
        self._is_persisted = False
        self._table: str | None = None

    def sql(self, query: Query | None) -> str:
        """Return the frame as SQL for `query`."""
        if query is None or not self._is_persisted:
            return self._write(query)
        if self._table is None:
            table = f"t{next(_numbers)}"
            self._database.run(lambda query: f"CREATE TABLE {table} AS {self._write(query)}")
            self._table = table
        return f"SELECT * FROM {self._table}"

    @property
    def sparkSession(self) -> LocalDatabase:
        return self._database

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the columns as an Arrow schema."""
        return self._database.schema_of(self.sql(None))

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def persist(self) -> Frame:
        """Keep the rows from the next query on."""
        self._is_persisted = not self._is_stored
        return self

    def unpersist(self) -> Frame:
        """Free the kept rows."""
        if self._table is not None:
            table, self._table = self._table, None
            self._database.run(lambda query: f"DROP TABLE {table}")
        self._is_persisted = False
        return self

    # --- other frames -------------------------------------------------------------------------------------------

    def select(self, *columns: str | Expression) -> Frame:
        """Return these columns; `name.*` stands for the fields of a struct."""
        given = [
            f"UNNEST({quoted(each.removesuffix('.*'))})"
            if isinstance(each, str) and each.endswith(".*")
            else column(each).named()
            for each in columns
        ]
        return self._from(f"SELECT {', '.join(given)} FROM")

    def filter(self, condition: str | Expression) -> Frame:
        """Return the rows that meet a condition, which may be SQL."""
        where = condition if isinstance(condition, str) else condition.sql
        return self._from("SELECT * FROM", f"WHERE {where}")

    def withColumn(self, name: str, value: Expression) -> Frame:
        """Return the frame with a column added or replaced."""
        if name in self.columns:
            return self._from(f"SELECT * REPLACE ({value.sql} AS {quoted(name)}) FROM")
        return self._from(f"SELECT *, {value.sql} AS {quoted(name)} FROM")

    def drop(self, *names: str) -> Frame:
        """Return the frame without these columns."""
        return self.select(*(name for name in self.columns if name not in names))

    def distinct(self) -> Frame:
        """Return each row once."""
        return self._from("SELECT DISTINCT * FROM")

    def dropna(self) -> Frame:
        """Return the rows without nulls."""
        tests = (f"{quoted(name)} IS NOT NULL" for name in self.columns)
        return self._from("SELECT * FROM", f"WHERE {' AND '.join(tests)}")

    def fillna(self, value: Any, names: Sequence[str]) -> Frame:
        """Return the frame with `value` in place of nulls in these columns."""
        filled = ", ".join(f"COALESCE({quoted(name)}, {value}) AS {quoted(name)}" for name in names)
        return self._from(f"SELECT * REPLACE ({filled}) FROM")

    def orderBy(self, *columns: str | Expression) -> Frame:
        """Return the rows in order."""
        return self._from("SELECT * FROM", f"ORDER BY {', '.join(column(each).order for each in columns)}")

    def repartition(self, *columns: str | Expression) -> Frame:
        """Return the frame: all rows are in one process."""
        return self

    sortWithinPartitions = orderBy

    def limit(self, count: int) -> Frame:
        """Return the first rows."""
        return self._from("SELECT * FROM", f"LIMIT {count}")

    def groupBy(self, *columns: str | Expression) -> Groups:
        """Return the groups of rows that agree in these columns."""
        return Groups(self, columns)

    def agg(self, *values: Expression) -> Frame:
        """Return one row with these values of all rows."""
        return self.groupBy().agg(*values)

    def join(self, other: Frame, on: str | list[str], how: str = "inner") -> Frame:
        """Return the joined rows: the columns `on`, the others of this frame, then the others of `other`."""
        keys = [on] if isinstance(on, str) else on
        shown = [quoted(key) for key in keys]
        shown += [f"l.{quoted(name)}" for name in self.columns if name not in keys]
        if how not in ("left_semi", "left_anti"):
            shown += [f"r.{quoted(name)}" for name in other.columns if name not in keys]
        using = ", ".join(map(quoted, keys))

        def write(query: Query | None) -> str:
            sides = f"({self.sql(query)}) l {_HOWS[how]} JOIN ({other.sql(query)}) r"
            return f"SELECT {', '.join(shown)} FROM {sides} USING ({using})"

        return Frame(self._database, write)

    def unionByName(self, other: Frame, allowMissingColumns: bool = False) -> Frame:
        """Return the rows of both; a column that one of them lacks is null there."""
        assert allowMissingColumns or sorted(self.columns) == sorted(other.columns)
        return Frame(
            self._database, lambda query: f"({self.sql(query)}) UNION ALL BY NAME ({other.sql(query)})",
            is_stored=self._is_stored and other._is_stored,
        )  # fmt: skip

    def mapInArrow(
        self, function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
    ) -> Frame:
        """Return the rows that `function` makes of batches of rows, when they are wanted first."""
        return self._database.frame_of(
            arrow_schema(schema), lambda: function(self._database.batches(self.sql)), is_stream=False
        )

    def _from(self, head: str, tail: str = "") -> Frame:
        return Frame(self._database, lambda query: f"{head} ({self.sql(query)}) t {tail}")

    # --- rows ---------------------------------------------------------------------------------------------------

    def toLocalIterator(self, prefetchPartitions: bool = False) -> Iterator[Any]:
        kind = type("Row", (Row,), {"__slots__": (), "_names": tuple(self.columns)})
        for batch in self._database.batches(self.sql):
            yield from map(kind, zip(*(values.to_pylist() for values in batch.columns), strict=True))

    def collect(self) -> list[Any]:
        return list(self.toLocalIterator())

    def first(self) -> Any:
        """Return the first row; None without one."""
        return next(iter(self.limit(1).collect()), None)

    def count(self) -> int:
        return int(self._from("SELECT COUNT(*) FROM").collect()[0][0])


class Groups:
    """The groups of `groupBy`."""

    def __init__(self, frame: Frame, columns: Sequence[str | Expression]) -> None:
        self._frame, self._columns = frame, columns

    def agg(self, *values: Expression) -> Frame:
        """Return a row for each group: its columns, and these values."""
        shown = ", ".join(column(each).named() for each in (*self._columns, *values))
        keys = ", ".join(map(str, range(1, len(self._columns) + 1)))
        return self._frame._from(f"SELECT {shown} FROM", f"GROUP BY {keys}" if keys else "")

    def sum(self, *names: str) -> Frame:
        """Return the sums of these columns."""
        return self.agg(*(sum_of(name).alias(f"sum({name})") for name in names))


def empty(schema: pa.Schema) -> str:
    """Return a query of these columns without rows."""
    columns = ", ".join(f"CAST(NULL AS {duckdb_type(field.type)}) AS {quoted(field.name)}" for field in schema)
    return f"SELECT {columns} WHERE FALSE"
