"""The session of the local engine, and its frames: the methods of PySpark's SparkSession and DataFrame that jobs use.

A frame writes its SQL anew for each query. A source is read by every query that has it, as a stream, so that its rows
are in memory only if a query keeps them; `persist` keeps a frame's rows in a table, which DuckDB moves to the disk when
memory is short.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self

from bkctl.errors import BkctlError
from bkctl.spark.failures import source_error
from bkctl.spark.local.functions import Expression, column, quoted
from bkctl.spark.sources import source_named
from bkctl.spark.sources.columns import arrow_schema

with suppress(ImportError):  # `local_session` says that it is not installed.
    import pyarrow as pa

#: Sources of files are streams. Stores belong to the thread that opens them, and streams are read in DuckDB's.
_STREAMS: Final = ("bookkeeper.entrylog", "bookkeeper.journal", "bookkeeper.index")
_HOWS: Final = {"inner": "INNER", "left": "LEFT", "full_outer": "FULL", "left_semi": "SEMI", "left_anti": "ANTI"}
#: Rows of a batch that leaves the database.
_BATCH_ROWS: Final = 50_000
#: The longest delay before an interrupt is seen.
_INTERRUPT_S: Final = 0.5
_numbers = count()


class Query:
    """One query, with the Arrow data that it reads; `only_columns`: a query of the columns alone, without rows."""

    def __init__(self, cursor: Any, *, only_columns: bool = False) -> None:
        self.cursor, self.only_columns = cursor, only_columns
        #: The error of a source; DuckDB passes on its text only.
        self.error: Exception | None = None
        self._numbers = count()

    def table(self, data: Any) -> str:
        """Return the SQL name of a dataset or a stream of Arrow in this query."""
        name = f"a{next(self._numbers)}"
        self.cursor.register(name, data)
        return name

    def stream(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> str:
        """Return the SQL name of batches, which are read while the query runs."""

        def noted() -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except Exception as error:
                self.error = error
                raise

        return self.table(pa.RecordBatchReader.from_batches(schema, noted()))


#: Writes the SQL of a frame for a query.
_Writer = Callable[[Query], str]


@contextmanager
def local_session(progress: Callable[[int], None] = lambda done: None) -> Iterator[LocalSession]:
    """Yield a session for jobs.

    `progress` gets the number of parts of sources that were read. Raises BkctlError if DuckDB or PyArrow is not
    installed.
    """
    try:
        import duckdb  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise BkctlError(
            f"The pipeline runs on DuckDB without --master, and {error.name} is not installed",
            hint="pip install 'bkctl[local]', or run it on Spark: add --master local[*]",
        ) from error
    with tempfile.TemporaryDirectory() as directory:
        session = LocalSession(Path(directory), progress)
        try:
            yield session
        finally:
            session.close()


class LocalSession:
    """Makes frames. One task runs at a time, so no file is cut. `directory` gets rows for which memory is short."""

    sparkContext = SimpleNamespace(defaultParallelism=1)

    def __init__(self, directory: Path, progress: Callable[[int], None]) -> None:
        import duckdb

        # A bookie may run on this machine, too.
        settings: dict[str, Any] = {"temp_directory": str(directory), "memory_limit": "50%"}
        self._connection = duckdb.connect(":memory:", config=settings)
        self._worker = ThreadPoolExecutor(1, "bkctl-duckdb")
        # An interrupt while a pool starts a thread makes it forget that thread: the pool would get a second one.
        self._worker.submit(int).result()
        self._progress = progress
        self._parts_read = 0

    def part_read(self) -> None:
        """Count a part of a source that was read."""
        self._parts_read += 1
        self._progress(self._parts_read)

    @property
    def read(self) -> LocalReader:
        return LocalReader(self)

    def createDataFrame(self, rows: Any, schema: str) -> LocalFrame:
        """Return an Arrow table, or no rows, as a frame."""
        wanted = arrow_schema(schema)
        table = rows.cast(wanted) if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, wanted)
        return self.of_dataset(table)

    def range(self, start: int, end: int, step: int = 1, partitions: int = 1) -> LocalFrame:
        """Return numbers as the column `id`."""
        return LocalFrame(self, lambda query: f"SELECT range AS id FROM RANGE({start}, {end}, {step})")

    def frame_of(
        self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]], *, is_stream: bool
    ) -> LocalFrame:
        """Return rows that `batches` yields: to each query anew as a stream, else once, in this thread."""
        if is_stream:
            return self._frame(schema, lambda query, _: query.stream(schema, batches()))
        is_filled = False

        def filled(query: Query, table: str) -> str:
            nonlocal is_filled
            if not is_filled:
                self.run(lambda query: f"DELETE FROM {table}")
                for batch in batches():
                    self._store(f"INSERT INTO {table}", pa.Table.from_batches([batch], schema))
                is_filled = True
            return table

        return self._frame(schema, filled, is_stored=True)

    def of_dataset(self, dataset: Any) -> LocalFrame:
        """Return the rows of an Arrow dataset or table, which queries read in parts."""
        return self._frame(dataset.schema, lambda query, _: query.table(dataset))

    def _frame(self, schema: pa.Schema, table: Callable[[Query, str], str], *, is_stored: bool = False) -> LocalFrame:
        """Return the rows of the `table` of a query, which gets the name of an empty table with these columns."""
        empty = f"m{next(_numbers)}"
        self._store(f"CREATE TABLE {empty} AS", schema.empty_table())
        return LocalFrame(
            self, lambda query: f"SELECT * FROM {empty if query.only_columns else table(query, empty)}",
            is_stored=is_stored,
        )  # fmt: skip

    def _store(self, into: str, rows: pa.Table) -> None:
        self.run(lambda query: f"{into} SELECT * FROM {query.table(rows)}")

    # --- queries ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything."""
        self._worker.shutdown()
        self._connection.close()

    def run(self, write: Callable[[Query], str]) -> None:
        with self._query() as query:
            sql = write(query)
            self._wait(query, lambda: query.cursor.execute(sql).fetchall())

    def batches(self, write: Callable[[Query], str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query."""
        with self._query() as query:
            rows = self._reader(query, write(query))
            while (batch := self._wait(query, lambda: next(rows, None))) is not None:
                yield batch

    def schema_of(self, write: Callable[[Query], str]) -> pa.Schema:
        """Return the columns of a query."""
        with self._query(only_columns=True) as query:
            return self._reader(query, write(query)).schema

    def _reader(self, query: Query, sql: str) -> Any:
        return self._wait(query, lambda: query.cursor.sql(sql).to_arrow_reader(_BATCH_ROWS))

    def _wait(self, query: Query, call_duckdb: Callable[[], Any]) -> Any:
        """Return the result of a call, which an interrupt ends: this thread, which gets interrupts, only waits.

        Python wakes no wait for an interrupt that comes just before it, or to another thread: so waits are short. And
        DuckDB forgets an interrupt that comes before the query, so it gets one until the worker has nothing to do.
        """
        try:
            call = self._worker.submit(call_duckdb)
            while not wait([call], _INTERRUPT_S).done:
                pass
            return call.result()
        except KeyboardInterrupt:
            end = self._worker.submit(int)
            query.cursor.interrupt()
            while not wait([end], _INTERRUPT_S).done:
                query.cursor.interrupt()
            raise

    @contextmanager
    def _query(self, *, only_columns: bool = False) -> Iterator[Query]:
        """Yield a query of its own. Raises the error of a source, or a BkctlError that says why DuckDB failed."""
        import duckdb

        query = Query(self._connection.cursor(), only_columns=only_columns)
        try:
            yield query
        except (duckdb.Error, pa.ArrowException) as error:
            if query.error is not None:
                raise query.error from None
            own = source_error(error)
            if own is not None:
                raise own from None
            line = str(error).strip().partition("\n")[0]
            raise BkctlError(f"DuckDB: {line}", hint="run the job on Spark: add --master local[*]") from error
        finally:
            query.cursor.close()


class LocalReader:
    """Reads one of bkctl's sources with options."""

    def __init__(self, session: LocalSession) -> None:
        self._session, self._name = session, ""
        self._options: dict[str, str] = {}

    def format(self, name: str) -> LocalReader:
        """Choose the source."""
        self._name = name
        return self

    def options(self, **options: str) -> LocalReader:
        self._options |= options
        return self

    def load(self, paths: Sequence[str] | None = None) -> LocalFrame:
        """Return the rows of the source. Queries plan and read it, in order of its partitions."""
        options = self._options if paths is None else {**self._options, "paths": json.dumps(list(paths))}
        source = source_named(self._name)(options)
        schema = arrow_schema(source.schema())

        def batches() -> Iterator[pa.RecordBatch]:
            reader = source.reader(schema)
            for part in reader.partitions():
                yield from reader.read(part)
                self._session.part_read()

        return self._session.frame_of(schema, batches, is_stream=self._name in _STREAMS)


# --- frames -----------------------------------------------------------------------------------------------------------


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


class LocalFrame:
    """The query of a frame and its rows, of which `persist` keeps a copy. `schema` and `columns` need no rows."""

    def __init__(self, session: LocalSession, write: _Writer, *, is_stored: bool = False) -> None:
        self.sparkSession, self._write = session, write
        #: The rows are in tables already.
        self._is_stored = is_stored
        self._is_persisted = False
        self._table: str | None = None

    def sql(self, query: Query) -> str:
        """Return the frame as SQL for `query`."""
        if query.only_columns or not self._is_persisted:
            return self._write(query)
        if self._table is None:
            table = f"t{next(_numbers)}"
            self.sparkSession.run(lambda query: f"CREATE TABLE {table} AS {self._write(query)}")
            self._table = table
        return f"SELECT * FROM {self._table}"

    @cached_property
    def schema(self) -> pa.Schema:
        """Return the columns as an Arrow schema."""
        return self.sparkSession.schema_of(self.sql)

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def persist(self) -> Self:
        """Keep the rows from the next query on."""
        self._is_persisted = not self._is_stored
        return self

    def unpersist(self) -> Self:
        """Free the kept rows."""
        if self._table is not None:
            table, self._table = self._table, None
            self.sparkSession.run(lambda query: f"DROP TABLE {table}")
        self._is_persisted = False
        return self

    def toLocalIterator(self, prefetchPartitions: bool = False) -> Iterator[Any]:
        kind = type("Row", (Row,), {"__slots__": (), "_names": tuple(self.columns)})
        for batch in self.sparkSession.batches(self.sql):
            yield from map(kind, zip(*(values.to_pylist() for values in batch.columns), strict=True))

    def collect(self) -> list[Any]:
        return list(self.toLocalIterator())

    def count(self) -> int:
        (batch,) = self.sparkSession.batches(lambda query: f"SELECT COUNT(*) FROM ({self.sql(query)})")
        return int(batch.column(0)[0].as_py())

    # Methods that give another frame.

    def select(self, *columns: str | Expression) -> LocalFrame:
        """Return these columns; `name.*` stands for the fields of a struct."""
        given = [
            f"UNNEST({quoted(each.removesuffix('.*'))})"
            if isinstance(each, str) and each.endswith(".*")
            else column(each).named()
            for each in columns
        ]
        return self._from(f"SELECT {', '.join(given)} FROM")

    def filter(self, condition: str | Expression) -> LocalFrame:
        """Return the rows that meet a condition, which may be SQL."""
        where = condition if isinstance(condition, str) else condition.sql
        return self._from("SELECT * FROM", f"WHERE {where}")

    def withColumn(self, name: str, value: Expression) -> LocalFrame:
        """Return the frame with a column added or replaced."""
        if name in self.columns:
            return self._from(f"SELECT * REPLACE ({value.sql} AS {quoted(name)}) FROM")
        return self._from(f"SELECT *, {value.sql} AS {quoted(name)} FROM")

    def drop(self, *names: str) -> LocalFrame:
        """Return the frame without these columns."""
        return self.select(*(name for name in self.columns if name not in names))

    def distinct(self) -> LocalFrame:
        """Return each row once."""
        return self._from("SELECT DISTINCT * FROM")

    def dropna(self) -> LocalFrame:
        """Return the rows without nulls."""
        tests = (f"{quoted(name)} IS NOT NULL" for name in self.columns)
        return self._from("SELECT * FROM", f"WHERE {' AND '.join(tests)}")

    def fillna(self, value: Any, names: Sequence[str]) -> LocalFrame:
        """Return the frame with `value` in place of nulls in these columns."""
        filled = ", ".join(f"COALESCE({quoted(name)}, {value}) AS {quoted(name)}" for name in names)
        return self._from(f"SELECT * REPLACE ({filled}) FROM")

    def orderBy(self, *columns: str | Expression) -> LocalFrame:
        """Return the rows in order."""
        return self._from("SELECT * FROM", f"ORDER BY {', '.join(column(each).order for each in columns)}")

    def repartition(self, *columns: str | Expression) -> LocalFrame:
        """Return the frame: all rows are in one process."""
        return self

    sortWithinPartitions = orderBy

    def limit(self, count: int) -> LocalFrame:
        """Return the first rows."""
        return self._from("SELECT * FROM", f"LIMIT {count}")

    def groupBy(self, *columns: str | Expression) -> Groups:
        """Return the groups of rows that agree in these columns."""
        return Groups(self, columns)

    def agg(self, *values: Expression) -> LocalFrame:
        """Return one row with these values of all rows."""
        return self.groupBy().agg(*values)

    def join(self, other: LocalFrame, on: str | list[str], how: str = "inner") -> LocalFrame:
        """Return the joined rows: the columns `on`, the others of this frame, then the others of `other`."""
        keys = [on] if isinstance(on, str) else on
        shown = [quoted(key) for key in keys]
        shown += [f"l.{quoted(name)}" for name in self.columns if name not in keys]
        if how not in ("left_semi", "left_anti"):
            shown += [f"r.{quoted(name)}" for name in other.columns if name not in keys]
        using = ", ".join(map(quoted, keys))

        def write(query: Query) -> str:
            sides = f"({self.sql(query)}) l {_HOWS[how]} JOIN ({other.sql(query)}) r"
            return f"SELECT {', '.join(shown)} FROM {sides} USING ({using})"

        return LocalFrame(self.sparkSession, write)

    def unionByName(self, other: LocalFrame, allowMissingColumns: bool = False) -> LocalFrame:
        """Return the rows of both; a column that one of them lacks is null there."""
        assert allowMissingColumns or sorted(self.columns) == sorted(other.columns)
        return LocalFrame(
            self.sparkSession, lambda query: f"({self.sql(query)}) UNION ALL BY NAME ({other.sql(query)})",
            is_stored=self._is_stored and other._is_stored,
        )  # fmt: skip

    def mapInArrow(
        self, function: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], schema: str
    ) -> LocalFrame:
        """Return the rows that `function` makes of batches of rows, when they are wanted first."""
        return self.sparkSession.frame_of(
            arrow_schema(schema), lambda: function(self.sparkSession.batches(self.sql)), is_stream=False
        )

    def _from(self, head: str, tail: str = "") -> LocalFrame:
        return LocalFrame(self.sparkSession, lambda query: f"{head} ({self.sql(query)}) t {tail}")


class Groups:
    """The groups of `groupBy`."""

    def __init__(self, frame: LocalFrame, columns: Sequence[str | Expression]) -> None:
        self._frame, self._columns = frame, columns

    def agg(self, *values: Expression) -> LocalFrame:
        """Return a row for each group: its columns, and these values."""
        shown = ", ".join(column(each).named() for each in (*self._columns, *values))
        keys = ", ".join(map(str, range(1, len(self._columns) + 1)))
        return self._frame._from(f"SELECT {shown} FROM", f"GROUP BY {keys}" if keys else "")
