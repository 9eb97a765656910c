"""The session of the local engine: sources and rows of this process as frames, with the methods of a SparkSession."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from bkctl.errors import BkctlError
from bkctl.spark import functions
from bkctl.spark.local import functions as local_functions
from bkctl.spark.local.database import LocalDatabase
from bkctl.spark.local.frames import Frame
from bkctl.spark.schemas import DdlSchema, arrow_schema, arrow_schema_of
from bkctl.spark.sources import SOURCES

if TYPE_CHECKING:
    import pyarrow as pa

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
        schema = DdlSchema(source.schema())

        def batches() -> Iterator[pa.RecordBatch]:
            reader = source.reader(schema)
            for part in reader.partitions():
                yield from reader.read(part)
                self._session.part_read()

        return self._session.frame_of(arrow_schema_of(schema), batches, is_stream=self._name in _STREAMS)
