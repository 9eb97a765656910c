"""The option --save: rows of a result in files beside the output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from bkctl.errors import AlreadyExists, NotFound, UsageError

from ..kit.columns import Columns, Output
from ..kit.command import Run
from ..kit.lines import Lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Rows of a result that are written to a Parquet file at once.
ROW_GROUP_ROWS = 50_000
_REMOTE = "://"

#: Formats of a saved result, by the suffix of its file's name.
FORMS = (".parquet", ".csv", ".json", ".html")

SaveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--save", metavar="PATH",
        help="Also save the rows: NAME.parquet, NAME.csv or NAME.json; NAME.html: a page with plots. Repeatable.",
    ),
]  # fmt: skip


def check_saves(saves: Iterable[str] | None, forms: Sequence[str] = FORMS) -> list[str]:
    """Return the paths of --save, checked before any work. Raises UsageError, AlreadyExists, NotFound (directory).

    `check_remote_saves` checks URIs once Spark is up.
    """
    found = list(dict.fromkeys(saves or ()))
    for path in found:
        if not path.lower().endswith(tuple(forms)):
            raise UsageError(f"--save {path}: not a name that ends in {' or '.join(forms)}")
        if is_remote(path):
            if path.lower().endswith(".html"):
                raise UsageError(f"--save {path}: a page is written on this machine", hint="give the path of a file")
            continue
        if Path(path).exists():
            raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save")
        if not Path(path).absolute().parent.is_dir():
            raise NotFound(f"--save {path}: the directory {Path(path).absolute().parent} does not exist")
    return found


def is_remote(path: str) -> bool:
    """Return whether a path of --save is a URI, which Spark writes."""
    return _REMOTE in path


def check_remote_saves(session: SparkSession, saves: Iterable[str]) -> None:
    """Raise AlreadyExists for a URI of --save where something exists, before the job."""
    from bkctl.spark.internals import uri_exists

    for path in saves:
        if is_remote(path) and uri_exists(session, path):
            raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save")


def frame_rows(
    run: Run, frame: DataFrame, columns: Columns, saves: Iterable[str], seen: Callable[[Any], None] = lambda row: None
) -> None:
    """Print the rows of `frame`, save them to `saves` (except HTML pages), and call `seen` with each row.

    All have the same columns, and the plan of `frame` runs once. A file gets its name once it is complete. Spark itself
    writes a URI (`s3a://…`), as a directory.
    """
    from bkctl.spark.failures import plain_errors

    saves = list(saves)
    frame = frame.select(*columns.names())
    with ExitStack() as stack:
        if any(map(is_remote, saves)):
            stack.callback(frame.persist().unpersist)
        files: list[_RowFile] = []
        for path in saves:
            if path.lower().endswith(".html"):
                continue
            if is_remote(path):
                with plain_errors():
                    frame.write.format(path.rpartition(".")[2].lower()).option("header", "true").save(path)
                continue
            files.append(stack.enter_context(_new_row_file(Path(path), frame, columns)))

        def rows() -> Iterator[Any]:
            with plain_errors():
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    seen(row)
                    for file in files:
                        file.add(row)
                    yield row

        run.render(rows(), columns)


@contextmanager
def _new_row_file(path: Path, frame: DataFrame, columns: Columns) -> Iterator[_RowFile]:
    """Yield a file for rows that appears at `path` once the block ends. Raises AlreadyExists, OSError."""
    from bkctl.disk import atomic_write

    try:
        with atomic_write(path, mode=0o666, overwrite=False) as stream:
            file = _RowFile(stream, path.suffix.lower(), frame, columns)
            yield file
            file.finish()
    except FileExistsError as error:
        raise AlreadyExists(f"{path} exists", hint="it was created meanwhile; give another name") from error


class _RowFile:
    """Rows to write to a file, in the format that the suffix of its name says."""

    def __init__(self, stream: BinaryIO, form: str, frame: DataFrame, columns: Columns) -> None:
        self._file, self._form = stream, form
        self._rows: list[Any] = []
        self._count = 0
        self._writer: Any = None
        if self._form == ".parquet":
            import pyarrow.parquet

            from bkctl.spark.schemas import arrow_schema_of

            self._schema = arrow_schema_of(frame.schema)
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema)
        elif self._form == ".csv":
            self._lines = Lines(columns, Output.CSV)
            self._file.write((",".join(columns.names()) + "\n").encode())
        else:
            self._lines = Lines(columns, Output.JSON)

    def add(self, row: Any) -> None:
        """Add one row."""
        self._rows.append(row)
        if len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()

    def finish(self) -> None:
        """Write the remaining rows and the end of the format."""
        self._flush()
        if self._writer is not None:
            self._writer.close()
        elif self._form == ".json":
            self._file.write(b"\n]\n" if self._count else b"[]\n")

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        if self._writer is not None:
            import pyarrow

            self._writer.write_table(
                pyarrow.Table.from_pylist([row.asDict(recursive=True) for row in rows], self._schema)
            )
        else:
            text = self._lines.of_rows(rows)
            if self._form == ".json" and not self._count:
                text = "[\n" + text[2:]
            self._file.write(text.encode("utf-8", "backslashreplace"))
        self._count += len(rows)
