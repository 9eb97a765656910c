"""DuckDB in this process: queries over streams of Arrow, their interrupts, and the errors of sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError
from bkctl.spark.failures import source_error

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of a batch that leaves the database.
_BATCH_ROWS: Final = 50_000
#: The longest delay before an interrupt is seen.
_INTERRUPT_S: Final = 0.5


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
        import pyarrow as pa

        def noted() -> Iterator[pa.RecordBatch]:
            try:
                yield from batches
            except Exception as error:
                self.error = error
                raise

        return self.table(pa.RecordBatchReader.from_batches(schema, noted()))


class LocalDatabase:
    """A database in memory that lives as long as a session; `directory` gets the rows for which memory is short."""

    def __init__(self, directory: Path) -> None:
        import duckdb

        # A bookie may run on this machine, too.
        settings: dict[str, Any] = {"temp_directory": str(directory), "memory_limit": "50%"}
        self._connection = duckdb.connect(":memory:", config=settings)
        self._worker = ThreadPoolExecutor(1, "bkctl-duckdb")
        # An interrupt while a pool starts a thread makes it forget that thread: the pool would get a second one.
        self._worker.submit(int).result()

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
        import pyarrow as pa

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
