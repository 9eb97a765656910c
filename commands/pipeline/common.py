"""What the commands of `bkctl pipeline` share: Spark's options, whose files, the way to a cluster, saved results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple, Self

import typer

from bkctl.errors import AlreadyExists, NotFound, UsageError
from bkctl.ids import LedgerId

from ..kit.columns import Columns, Output
from ..kit.command import Run
from ..kit.ledger_options import SCAN_LEDGERS, ScanFilter
from ..kit.lines import Lines
from ..kit.options import Composite, parameter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from bkctl.spark.jobs.bookies import BookieFiles

#: Rows of a result that are written to a Parquet file at once.
ROW_GROUP_ROWS = 50_000
_REMOTE = "://"

Places = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PLACE",
        help="Bookies' files: directories, bk_server.conf files, or BOOKIE_ID=DIRECTORY where there is no cookie "
        "(default: --conf, else the local cluster that is up).",
    ),
]

LedgersToScan = Annotated[ScanFilter, SCAN_LEDGERS]


class SparkSettings(NamedTuple):
    """Where a job runs."""

    master: str
    settings: dict[str, str]
    archives: list[str]
    ship: bool | None


def _spark_settings(values: Mapping[str, Any]) -> SparkSettings:
    settings: dict[str, str] = {}
    for text in values["spark_settings"] or ():
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise UsageError(f"--spark-conf {text!r}: not NAME=VALUE", hint="as spark.executor.memory=4g")
        settings[name] = value
    return SparkSettings(values["master"], settings, list(values["archives"] or ()), values["ship"])


_PANEL = "Spark options"

SparkOptions = Annotated[
    SparkSettings,
    Composite(
        (
            parameter(
                "master",
                Annotated[
                    str,
                    typer.Option(
                        "--master", metavar="URL", rich_help_panel=_PANEL,
                        help="Where Spark runs: local[*] (this machine, all cores), local[N], "
                        "spark://HOST:PORT, yarn, k8s://…",
                    ),
                ],
                "local[*]",
            ),
            parameter(
                "spark_settings",
                Annotated[
                    list[str],
                    typer.Option(
                        "--spark-conf", metavar="NAME=VALUE", rich_help_panel=_PANEL,
                        help="A setting of Spark's, as spark.driver.memory=4g; repeatable.",
                    ),
                ],
            ),
            parameter(
                "archives",
                Annotated[
                    list[str],
                    typer.Option(
                        "--archive", metavar="FILE[#NAME]", rich_help_panel=_PANEL,
                        help="Unpacked on every executor, as venv.tar.gz#environment; repeatable.",
                    ),
                ],
            ),
            parameter(
                "ship",
                Annotated[
                    bool | None,
                    typer.Option(
                        "--ship/--no-ship", rich_help_panel=_PANEL,
                        help="Send this package to the executors (default: unless Spark runs on this machine alone).",
                    ),
                ],
            ),
        ),
        _spark_settings,
    ),
]  # fmt: skip


@contextmanager
def spark_job(run: Run, spark: SparkSettings, label: str) -> Iterator[SparkSession]:
    """A Spark session for the job `label`, with its progress on a terminal's stderr, until the end of the block."""
    from bkctl.spark.session import following, spark_session

    with run.working("Starting Spark") as activity, ExitStack() as stack:
        session = stack.enter_context(
            spark_session(
                spark.master, settings=spark.settings, archives=spark.archives, ship=spark.ship,
                app_name=f"bkctl {label}", verbose=run.verbose,
            )
        )  # fmt: skip
        activity.label, activity.unit = label.capitalize(), "tasks"
        stack.enter_context(following(session, activity.update))
        yield session


def bookies_at(run: Run, places: Sequence[str] | None) -> list[BookieFiles]:
    """The bookies whose files are at `places`, else at those of --conf, else of the local cluster that is up."""
    from bkctl.bookie.local import active_cluster
    from bkctl.spark.jobs.bookies import find_bookies

    given = list(places or ())
    if not given and run.conf is not None:
        given = [str(run.conf)]
    if not given and (local := active_cluster()) is not None:
        given = [str(each.directory) for each in local.bookies()]
    found = find_bookies(given)
    run.detail(f"files of {len(found)} bookies: {', '.join(each.bookie_id for each in found)}")
    return found


def connection_options(run: Run) -> dict[str, str]:
    """The connection as options of the data sources: no secret, but where the tasks find it. Raises UsageError."""
    connection, settings = run.connection(), run.connection_settings()
    chosen: dict[str, object] = {
        "metadataUri": connection.uri,
        "metadataUser": settings.metadata_user,
        "metadataPasswordFile": settings.metadata_password_file and settings.metadata_password_file.absolute(),
        "metadataTls": settings.metadata_tls,
        "metadataTlsCa": settings.metadata_tls_ca and settings.metadata_tls_ca.absolute(),
        "metadataTlsCert": settings.metadata_tls_certificate and settings.metadata_tls_certificate.absolute(),
        "metadataTlsKey": settings.metadata_tls_key and settings.metadata_tls_key.absolute(),
        "metadataSasl": settings.metadata_sasl,
        "bookieAddress": ",".join(settings.bookie_addresses),
        "tlsCa": settings.tls_ca and settings.tls_ca.absolute(),
        "tlsCert": settings.tls_certificate and settings.tls_certificate.absolute(),
        "tlsKey": settings.tls_key and settings.tls_key.absolute(),
        "timeoutSeconds": max(1, round(run.timeout_s)),
    }
    if settings.metadata_user is not None and settings.metadata_password_file is None:
        chosen["metadataPasswordEnv"] = "BKCTL_METADATA_PASSWORD"
    return {name: str(value).lower() if value is True else str(value) for name, value in chosen.items() if value}


def check_cluster(run: Run) -> None:
    """Say what is wrong with the connection before Spark starts."""
    with run.cluster() as cluster:
        cluster.layout()


def ledger_of(row: Any) -> LedgerId | None:
    """The ledger of a row with a ledgerQualifiedName."""
    name = row.ledgerQualifiedName
    return None if name is None else LedgerId.from_value(int(name, 16))


# --- results --------------------------------------------------------------------------------------------------------

#: What a result is saved as, by the end of its file's name.
FORMS = (".parquet", ".csv", ".json", ".html")

SaveOption = Annotated[
    list[str] | None,
    typer.Option(
        "--save", metavar="PATH",
        help="Also keep the rows: NAME.parquet, NAME.csv or NAME.json; NAME.html: a page with plots. Repeatable.",
    ),
]  # fmt: skip


def check_saves(saves: Iterable[str] | None, forms: Sequence[str] = FORMS) -> list[str]:
    """The paths of --save, before any work. Raises UsageError for another form, AlreadyExists, NotFound (directory)."""
    found = list(dict.fromkeys(saves or ()))
    for path in found:
        if not path.lower().endswith(tuple(forms)):
            raise UsageError(f"--save {path}: not a name that ends in {' or '.join(forms)}")
        if _REMOTE in path:
            continue
        if Path(path).exists():
            raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save")
        if not Path(path).absolute().parent.is_dir():
            raise NotFound(f"--save {path}: there is no directory {Path(path).absolute().parent}")
    return found


def frame_rows(
    run: Run, frame: DataFrame, columns: Columns, saves: Iterable[str], seen: Callable[[Any], None] = lambda row: None
) -> None:
    """Print the rows of `frame`, keep them where `saves` say (HTML pages are others' matter), and show each to `seen`.

    Files appear under their names once they are whole. A URI (`s3a://…`) is written by Spark itself, as a directory.
    """
    from bkctl.spark.session import plain_errors

    with ExitStack() as stack:
        files: list[_RowFile] = []
        for path in saves:
            if path.lower().endswith(".html"):
                continue
            if _REMOTE in path:
                frame.write.format(path.rpartition(".")[2].lower()).option("header", "true").save(path)
                continue
            files.append(stack.enter_context(_RowFile(Path(path), frame, columns)))

        def rows() -> Iterator[Any]:
            with plain_errors():
                for row in frame.toLocalIterator(prefetchPartitions=True):
                    seen(row)
                    for file in files:
                        file.add(row)
                    yield row

        run.render(rows(), columns)


class _RowFile:
    """A file that rows go to; a context manager that gives it its name at the end, or takes it away after an error."""

    def __init__(self, path: Path, frame: DataFrame, columns: Columns) -> None:
        self._path, self._frame, self._columns = path, frame, columns
        self._rows: list[Any] = []
        self._form = path.suffix.lower()
        self._count = 0

    def __enter__(self) -> Self:
        from bkctl.disk import create_unfinished

        self._unfinished, descriptor = create_unfinished(self._path, mode=0o666)
        self._file: BinaryIO = open(descriptor, "wb")
        self._writer: Any = None
        if self._form == ".parquet":
            import pyarrow.parquet
            from pyspark.sql.pandas.types import to_arrow_schema

            self._schema = to_arrow_schema(self._frame.schema)
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema)
        elif self._form == ".csv":
            self._lines = Lines(self._columns, Output.CSV)
            self._file.write((",".join(self._columns.names()) + "\n").encode())
        else:
            self._lines = Lines(self._columns, Output.JSON)
        return self

    def add(self, row: Any) -> None:
        """Take one row."""
        self._rows.append(row)
        if len(self._rows) >= ROW_GROUP_ROWS:
            self._flush()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._flush()
                if self._writer is not None:
                    self._writer.close()
                elif self._form == ".json":
                    self._file.write(b"\n]\n" if self._count else b"[]\n")
                self._file.flush()
                os.fsync(self._file.fileno())
                os.link(self._unfinished, self._path)
        except FileExistsError as error:
            raise AlreadyExists(f"{self._path} exists", hint="it was made meanwhile; give another name") from error
        finally:
            self._file.close()
            with suppress(FileNotFoundError):
                self._unfinished.unlink()

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
