"""The options --save, --save-table and --append: rows of a result in files and tables, and its page with plots."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, NamedTuple

from bkctl import __version__
from bkctl.columns import Columns, Kind
from bkctl.errors import AlreadyExists, NotFound, Unsupported, UsageError

from ..kit.columns import Output
from ..kit.command import Run
from ..kit.lines import Cells, Lines
from ..kit.options import Composite, combined, option
from ..kit.texts import size_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bkctl.spark.engine import Frame
    from bkctl.spark.jobs.bookies import Bookies

#: Rows of a result that are written to a Parquet file at once.
ROW_GROUP_ROWS = 50_000

#: Formats of a saved result, by the suffix of its file's name.
ROW_FORMS: Final = (".parquet", ".csv", ".json")
PAGE: Final = ".html"
#: The first column of appended rows: when their command began.
RUN_AT: Final = "runAt"


class Saves(NamedTuple):
    """The places that get the rows of a result: files and URIs, and tables of Spark's catalog."""

    paths: list[str]
    tables: list[str]
    append: bool
    run_at: datetime

    @property
    def uris(self) -> list[str]:
        """Return the paths that Spark writes."""
        return [path for path in self.paths if _is_remote(path)]

    @property
    def need_spark(self) -> bool:
        """Return whether Spark has to write some of them."""
        return bool(self.tables or self.uris)

    @property
    def pages(self) -> list[str]:
        """Return the paths of HTML pages."""
        return [path for path in self.paths if path.lower().endswith(PAGE)]

    @property
    def row_files(self) -> list[str]:
        """Return the paths of rows that this process writes."""
        return [path for path in self.paths if not _is_remote(path) and path not in self.pages]


def _saves(paths: list[str] | None, tables: list[str] | None, append: bool) -> Saves:
    return Saves(list(dict.fromkeys(paths or ())), list(dict.fromkeys(tables or ())), append, datetime.now(UTC))


#: For a command without these options.
NO_SAVES: Final = _saves(None, None, False)


def _save_options(save_help: str) -> Composite:
    """Return the options, with this help of --save."""
    return combined(
        _saves,
        option("--save PATH", f"{save_help} Repeatable.", list[str]),
        option(
            "--save-table NAME", "Also save the rows as a new table of Spark's catalog; runs on Spark. Repeatable.",
            list[str],
        ),
        option(
            "--append", f"Add the rows, dated by a column {RUN_AT}, to existing tables of --save-table, and to "
            "NAME.parquet of --save, a directory.", bool, False,
        ),
    )  # fmt: skip


SAVE_OPTIONS: Final = _save_options(
    "Also save the rows: NAME.parquet, NAME.csv or NAME.json; NAME.html: a page with plots."
)
#: For jobs without an HTML page.
SaveRows = Annotated[Saves, _save_options("Also save the rows: NAME.parquet, NAME.csv or NAME.json.")]


def check_saves(saves: Saves, columns: Columns, forms: Sequence[str] = (*ROW_FORMS, PAGE)) -> None:
    """Check the files of --save before any work, and `columns` against the rows to append to.

    Raises UsageError, AlreadyExists, NotFound (directory). `check_spark_saves` checks URIs and tables once Spark is up.
    """
    for path in saves.paths:
        check_save(path, forms, is_directory=saves.append)
        if saves.append and not _is_remote(path):
            _check_columns(path, _columns_of_files(Path(path)), columns)
    if saves.append and not (saves.paths or saves.tables):
        raise UsageError("--append: no place is given", hint="add --save NAME.parquet or --save-table NAME")


def check_save(path: str, forms: Sequence[str], *, is_directory: bool = False) -> None:
    """Check one path of --save: a new file, or with `is_directory` a directory of Parquet files to add one to.

    Raises UsageError, AlreadyExists, NotFound (directory).
    """
    ending = path.lower()
    if not ending.endswith(tuple(forms)):
        raise UsageError(f"--save {path}: not a name that ends in {' or '.join(forms)}")
    if is_directory and not ending.endswith(".parquet"):
        raise UsageError(f"--save {path}: rows cannot be appended to it", hint="give --append a NAME.parquet")
    if ending.endswith(PAGE) and find_spec("jinja2") is None:
        raise Unsupported(f"--save {path}: a page needs jinja2, which is not installed", hint="pip install jinja2")
    if _is_remote(path):
        if ending.endswith(PAGE):
            raise UsageError(f"--save {path}: a page is written on this machine", hint="give the path of a file")
        return
    if Path(path).exists() and not (is_directory and Path(path).is_dir()):
        raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save")
    if not Path(path).absolute().parent.is_dir():
        raise NotFound(f"--save {path}: the directory {Path(path).absolute().parent} does not exist")


def _is_remote(path: str) -> bool:
    """Return whether a path of --save is a URI, which Spark writes."""
    return "://" in path


def check_spark_saves(session: SparkSession, saves: Saves, columns: Columns) -> None:
    """Check URIs and tables before the job. Raises AlreadyExists where something exists that is not to be appended to.

    Raises UsageError for a table in a catalog that ends with the job, and for other columns than those to append.
    """
    from bkctl.spark.internals import uri_exists

    for uri in saves.uris:
        if not uri_exists(session, uri):
            continue
        if not saves.append:
            raise AlreadyExists(f"{uri} exists", hint="remove it, or give another name to --save")
        _check_columns(uri, session.read.parquet(uri).columns, columns)
    for table in saves.tables:
        if _catalog_is_temporary(session, table):
            raise UsageError(
                f"--save-table {table}: Spark's catalog is in memory, and ends with the job",
                hint="add --spark-conf spark.sql.catalogImplementation=hive, or settings of a catalog of your own",
            )
        if not session.catalog.tableExists(table):
            continue
        if not saves.append:
            raise AlreadyExists(f"The table {table} exists", hint="add --append, or give another name to --save-table")
        _check_columns(table, session.table(table).columns, columns)


def _catalog_is_temporary(session: SparkSession, table: str) -> bool:
    """Return whether the catalog of a table is Spark's own in memory."""
    first, dot, _ = table.replace("`", "").partition(".")
    named = first if dot and session.conf.get(f"spark.sql.catalog.{first}", None) else session.catalog.currentCatalog()
    own = session.conf.get(f"spark.sql.catalog.{named}", None)
    return own is None and session.conf.get("spark.sql.catalogImplementation", None) != "hive"


def _columns_of_files(directory: Path) -> list[str]:
    """Return the columns of the Parquet files in a directory; no columns without a file."""
    first = min(directory.glob("*.parquet"), default=None)
    if first is None:
        return []
    import pyarrow.parquet

    return list(pyarrow.parquet.read_schema(first).names)


def _check_columns(place: str, found: Sequence[str], columns: Columns) -> None:
    """Raise UsageError if the rows at a place to append to have other columns."""
    if found and set(found) != {RUN_AT, *columns.names()}:
        differing = ", ".join(sorted(set(found) ^ {RUN_AT, *columns.names()}))
        raise UsageError(
            f"The rows in {place} have other columns than those to append: {differing}", hint="append them elsewhere"
        )


def frame_rows(
    run: Run, frame: Frame, columns: Columns, saves: Saves, seen: Callable[[Any], None] = lambda row: None
) -> None:
    """Print the rows of `frame`, save them to `saves` (except HTML pages), and call `seen` with each row.

    All have the same columns (appended rows RUN_AT, too), and the plan of `frame` runs once. A file gets its name once
    it is complete. Spark itself writes tables, and URIs (`s3a://…`) as directories.
    """
    from bkctl.spark.failures import plain_errors

    frame = frame.select(*columns.names())
    if saves.paths or saves.tables:
        run.out.outlive_stdout()
    with ExitStack() as stack:
        if saves.need_spark:
            stack.callback(frame.persist().unpersist)
            with plain_errors():
                _write_with_spark(frame, saves)
        files = [stack.enter_context(_new_row_file(Path(path), frame, columns, saves)) for path in saves.row_files]

        def rows() -> Iterator[Any]:
            batch: list[Any] = []
            with plain_errors():
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    seen(row)
                    if files:
                        batch.append(row)
                    if len(batch) == ROW_GROUP_ROWS:
                        _write_batch(files, batch)
                    yield row
                _write_batch(files, batch)

        run.out.render(rows(), columns)


def _write_batch(files: Iterable[Callable[[list[Any]], None]], batch: list[Any]) -> None:
    for write in files if batch else ():
        write(batch)
    batch.clear()


def _write_with_spark(frame: Any, saves: Saves) -> None:
    """Write the URIs and tables of `saves`."""
    from pyspark.sql import functions as F

    mode = "errorifexists"
    if saves.append:
        mode = "append"
        frame = frame.select(F.lit(saves.run_at).alias(RUN_AT), *frame.columns)
    for uri in saves.uris:
        frame.write.mode(mode).format(uri.rpartition(".")[2].lower()).option("header", "true").save(uri)
    for table in saves.tables:
        frame.write.mode(mode).saveAsTable(table)


@contextmanager
def _new_file(path: Path, hint: str) -> Iterator[BinaryIO]:
    """Yield a file that appears at `path` once the block ends. Raises AlreadyExists with the hint, OSError."""
    from bkctl.disk import atomic_write

    try:
        with atomic_write(path, mode=0o666, overwrite=False) as stream:
            yield stream
    except FileExistsError as error:
        raise AlreadyExists(f"{path} exists", hint=hint) from error


@contextmanager
def _new_row_file(path: Path, frame: Frame, columns: Columns, saves: Saves) -> Iterator[Callable[[list[Any]], None]]:
    """Yield a function that writes rows to a file at `path`, or to append to one in that directory.

    The suffix says the format. The file appears once the block ends. Raises AlreadyExists, OSError.
    """
    #: Values that each row begins with.
    head: dict[str, Any] = {}
    if saves.append:
        head = {RUN_AT: saves.run_at}
        path.mkdir(exist_ok=True)
        path /= f"{saves.run_at:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}.parquet"
    with _new_file(path, "it was created meanwhile; give another name") as stream:
        if path.suffix.lower() == ".parquet":
            import pyarrow.parquet

            from bkctl.spark.sources.columns import arrow_schema_of

            times = [pyarrow.field(name, pyarrow.timestamp("us", "UTC")) for name in head]
            schema = pyarrow.schema([*times, *arrow_schema_of(frame.schema)])
            with pyarrow.parquet.ParquetWriter(stream, schema) as writer:
                yield lambda rows: writer.write_table(
                    pyarrow.Table.from_pylist([head | row.asDict(recursive=True) for row in rows], schema)
                )
            return
        is_json = path.suffix.lower() == ".json"
        lines = Lines(columns, Output.JSON if is_json else Output.CSV)
        if not is_json:
            stream.write((",".join(columns.names()) + "\n").encode())

        def write(rows: list[Any]) -> None:
            text = lines.text(rows)
            text = f"[{text[1:]}" if is_json and not stream.tell() else text
            stream.write(text.encode("utf-8", "backslashreplace"))

        yield write
        if is_json:
            stream.write(b"\n]\n" if stream.tell() else b"[]\n")


#: Limits of a table and of a plot; the page shows the number of all rows.
TABLE_ROWS_MAX = 200
BARS_MAX = 25


class Bar(NamedTuple):
    """One bar of a plot: its label, and its parts by name."""

    label: str
    parts: Mapping[str, int]


class Plot(NamedTuple):
    """Horizontal bars, each of parts side by side; nothing without bars."""

    title: str
    bars: Sequence[Bar]
    unit: str = "bytes"

    @property
    def names(self) -> list[str]:
        """The names of all parts."""
        return list(dict.fromkeys(name for bar in self.bars for name in bar.parts))

    @property
    def largest(self) -> int:
        """The length of the longest bar, at least 1."""
        return max([1, *(sum(bar.parts.values()) for bar in self.bars)])

    def text(self, value: int) -> str:
        """Return a value with its unit."""
        return size_text(value) if self.unit == "bytes" else f"{value:,}"


class PageTable(NamedTuple):
    """The first rows of a table, with the terminal's cells; `more` says how many rows there are, `none` is for none."""

    title: str | None
    columns: Sequence[str]
    are_numbers: Sequence[bool]
    rows: Sequence[Sequence[str]]
    more: str | None
    none: str


class Section(NamedTuple):
    """A part of the page."""

    title: str
    text: str
    blocks: Sequence[Plot | PageTable]


def top_rows(frame: Frame) -> list[Any]:
    """Return the first rows of `frame`, as many as a plot has bars."""
    return list(frame.limit(BARS_MAX).collect())


def table(frame: Frame, columns: Columns, *, title: str | None = None, none: str = "None.") -> PageTable:
    """Return the first rows of `frame`."""
    shown = [column for column in columns.columns if column.title is not None]
    rows = frame.limit(TABLE_ROWS_MAX + 1).collect()
    return PageTable(
        title,
        [str(column.title) for column in shown],
        [column.kind in (Kind.INTEGER, Kind.SIZE) for column in shown],
        list(Cells(columns).of_rows(rows[:TABLE_ROWS_MAX])) if rows else [],
        f"The first {TABLE_ROWS_MAX} of {frame.count():,} rows." if len(rows) > TABLE_ROWS_MAX else None,
        none,
    )


def page(title: str, sections: Sequence[Section], bookies: Sequence[str]) -> str:
    """Return the whole page as HTML."""
    from bkctl.http.console.templates import style, templates

    moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    about = f"{len(bookies)} bookies: {', '.join(bookies)}. Made at {moment} by bkctl {__version__}."
    values = {"title": f"BookKeeper: {title.lower()}", "about": about, "sections": sections, "here": None}
    return templates().get_template("report.html").render(values, style=style())


def write_pages(paths: Sequence[str], title: str, sections: Callable[[], Sequence[Section]], bookies: Bookies) -> None:
    """Write the page to a new file at each of `paths`; without one, `sections` is not called.

    Raises AlreadyExists, OSError.
    """
    if not paths:
        return
    text = page(title, sections(), [bookie.bookie_id for bookie in bookies])
    for path in paths:
        with _new_file(Path(path), "remove it, or give another name to --save") as file:
            file.write(text.encode("utf-8", "backslashreplace"))
