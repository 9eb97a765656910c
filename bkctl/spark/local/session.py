"""The session of the local engine: sources and rows of this process as frames, with the methods of a SparkSession.

Its database is DuckDB in memory, which moves to the disk what memory does not hold.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError
from bkctl.spark import functions
from bkctl.spark.failures import source_error
from bkctl.spark.local import functions as local_functions
from bkctl.spark.local.frames import Frame, empty
from bkctl.spark.local.functions import quoted
from bkctl.spark.sources import SOURCES
from bkctl.spark.sources.columns import arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows of a batch that leaves the database.
_BATCH_ROWS: Final = 50_000
#: The longest delay before an interrupt is seen.
_INTERRUPT_S: Final = 0.5


class Query:
    """One query, with the Arrow data that it reads."""

    def __init__(self, cursor: Any) -> None:
        self.cursor = cursor
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
    """A database that lives as long as a session; `directory` gets the rows for which memory is short."""

    def __init__(self, directory: Path) -> None:
        import duckdb

        # A bookie may run on this machine, too.
        settings: dict[str, Any] = {"temp_directory": str(directory), "memory_limit": "50%"}
        self._connection = duckdb.connect(":memory:", config=settings)
        self._numbers = count()
        self._worker = ThreadPoolExecutor(1, "bkctl-duckdb")

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

    def schema_of(self, sql: str) -> pa.Schema:
        """Return the columns of a query."""
        with self._query() as query:
            return self._reader(query, sql).schema

    def frame_of(self, schema: pa.Schema, batches: Callable[[], Iterator[pa.RecordBatch]], *, is_stream: bool) -> Frame:
        """Return rows that `batches` yields: to each query anew as a stream, else once, in this thread."""
        if is_stream:
            return Frame(
                self,
                lambda query: empty(schema) if query is None else f"SELECT * FROM {query.stream(schema, batches())}",
            )
        table = f"m{next(self._numbers)}"
        exists = False

        def write(query: Query | None) -> str:
            nonlocal exists
            if query is None:
                return empty(schema)
            if not exists:
                self.run(lambda query: f"CREATE OR REPLACE TABLE {table} AS {empty(schema)}")
                for batch in batches():
                    self._insert(table, schema, batch)
                exists = True
            return f"SELECT * FROM {table}"

        return Frame(self, write, is_stored=True)

    def of_dataset(self, dataset: Any) -> Frame:
        """Return the rows of an Arrow dataset or table, which queries read in parts."""
        names = ", ".join(map(quoted, dataset.schema.names))
        return Frame(
            self,
            lambda query: empty(dataset.schema) if query is None else f"SELECT {names} FROM {query.table(dataset)}",
        )

    def _insert(self, table: str, schema: pa.Schema, batch: pa.RecordBatch) -> None:
        import pyarrow as pa

        rows = pa.Table.from_batches([batch], schema)
        self.run(lambda query: f"INSERT INTO {table} SELECT * FROM {query.table(rows)}")

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
    def _query(self) -> Iterator[Query]:
        """Yield a query of its own. Raises the error of a source, or a BkctlError that says why DuckDB failed."""
        import duckdb
        import pyarrow as pa

        query = Query(self._connection.cursor())
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


# --- the session ------------------------------------------------------------------------------------------------------

#: Sources of files are streams. Stores belong to the thread that opens them, and streams are read in DuckDB's.
_STREAMS: Final = ("bookkeeper.entrylog", "bookkeeper.journal", "bookkeeper.index")


@contextmanager
def local_session(progress: Callable[[int], None] = lambda done: None) -> Iterator[LocalSession]:
    """Yield a session for jobs, which use its functions of columns inside the block.

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
            with functions.chosen(local_functions):
                yield session
        finally:
            session.close()


class LocalSession(LocalDatabase):
    """Makes frames. One task runs at a time, so no file is cut."""

    sparkContext = SimpleNamespace(defaultParallelism=1)

    def __init__(self, directory: Path, progress: Callable[[int], None]) -> None:
        super().__init__(directory)
        self._progress = progress
        self._parts_read = 0

    def part_read(self) -> None:
        """Count a part of a source that was read."""
        self._parts_read += 1
        self._progress(self._parts_read)

    @property
    def read(self) -> LocalReader:
        return LocalReader(self)

    def createDataFrame(self, rows: Any, schema: str) -> Frame:
        """Return an Arrow table, or no rows, as a frame."""
        import pyarrow as pa

        wanted = arrow_schema(schema)
        table = rows.cast(wanted) if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows, wanted)
        return self.of_dataset(table)

    def range(self, start: int, end: int, step: int = 1, partitions: int = 1) -> Frame:
        """Return numbers as the column `id`."""
        return Frame(self, lambda query: f"SELECT range AS id FROM RANGE({start}, {end}, {step})")


class LocalReader:
    """Reads one of bkctl's sources with options."""

    def __init__(self, session: LocalSession) -> None:
        self._session = session
        self._name = ""
        self._options: dict[str, str] = {}

    def format(self, name: str) -> LocalReader:
        """Choose the source."""
        self._name = name
        return self

    def option(self, name: str, value: str) -> LocalReader:
        return self.options(**{name: value})

    def options(self, **options: str) -> LocalReader:
        self._options |= options
        return self

    def load(self, paths: Sequence[str] | None = None) -> Frame:
        """Return the rows of the source. Queries plan and read it, in order of its partitions."""
        options = self._options if paths is None else {**self._options, "paths": json.dumps(list(paths))}
        module, kind = SOURCES[self._name]
        source = getattr(import_module(f"bkctl.spark.sources.{module}"), kind)(options)
        schema = arrow_schema(source.schema())

        def batches() -> Iterator[pa.RecordBatch]:
            reader = source.reader(schema)
            for part in reader.partitions():
                yield from reader.read(part)
                self._session.part_read()

        return self._session.frame_of(schema, batches, is_stream=self._name in _STREAMS)
