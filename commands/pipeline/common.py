"""Options, columns and sessions that commands of `bkctl pipeline` share, and the call that shows a job's result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, NamedTuple

from bkctl.columns import Columns
from bkctl.errors import BkctlError, UsageError
from bkctl.ids import LedgerId

from ..kit.command import Run
from ..kit.ledger_options import SCAN_LEDGERS, ScanFilter
from ..kit.options import combined, option, parameter, word
from ..kit.settings import SETTINGS
from ..kit.texts import counted
from ..kit.values import refuse_both
from .saves import SAVE_OPTIONS, Saves, Section, check_saves, check_spark_saves, frame_rows, write_pages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from bkctl.spark.engine import Frame, JobSession
    from bkctl.spark.jobs.bookies import BookieFiles, Bookies

    from .saves import PageTable, Plot


def ledger_of(row: Any) -> LedgerId | None:
    """Return the ledger of a row with a ledgerQualifiedName."""
    name = row.ledgerQualifiedName
    return None if name is None else LedgerId.from_value(int(name, 16))


class Sums(Counter[str]):
    """Sums of the integer columns of rows by name, and in `count` the number of rows."""

    def __init__(self, rows: Iterable[Any] = ()) -> None:
        super().__init__()
        self.count = 0
        for row in rows:
            self.add(row)

    def add(self, row: Any) -> None:
        """Add a row to the sums."""
        self.count += 1
        self.update({name: value for name, value in row.asDict().items() if type(value) is int})


PLACES = word(
    "PLACE",
    "Bookies' files: directories, bk_server.conf files, or BOOKIE_ID=DIRECTORY without a cookie "
    "(default: --conf, else the local cluster that is up).",
)


class GivenBookies(NamedTuple):
    """The bookies that a command line names: by the places of their files, or by the URI of their facts."""

    places: list[str]
    facts: str | None


def _given_bookies(places: list[str] | None, facts: str | None) -> GivenBookies:
    refuse_both("Bookies' files", places, "--facts", facts if facts is None else True)
    return GivenBookies(places or [], facts)


_BOOKIES: Final = combined(
    _given_bookies,
    parameter("places", Annotated[list[str] | None, PLACES]),
    option("--facts URI", "Read facts that 'pipeline extract' wrote, instead of bookies' files."),
)
Places = Annotated[GivenBookies, _BOOKIES]

LedgersToScan = Annotated[ScanFilter, SCAN_LEDGERS]


class SparkSettings(NamedTuple):
    """The options of Spark for one job."""

    master: str | None
    settings: dict[str, str]
    archives: list[str]
    ship: bool | None


def _spark_settings(
    master: str | None, texts: list[str] | None, archives: list[str] | None, ship: bool | None
) -> SparkSettings:
    settings: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise UsageError(f"--spark-conf {text!r}: not NAME=VALUE", hint="as spark.executor.memory=4g")
        settings[name] = value
    if (master or "").startswith("sc://"):
        raise UsageError(
            f"--master {master}: commands start Spark themselves, and a Spark Connect server runs already",
            hint="call the jobs in Python there, or name the master of its cluster",
        )
    return SparkSettings(master, settings, archives or [], ship)


NO_SPARK_OPTIONS: Final = _spark_settings(None, None, None, None)
_PANEL = "Spark options"

_SPARK: Final = combined(
    _spark_settings,
    option(
        "--master URL", "Where Spark runs: local[*] (this machine, all cores), local[N], spark://HOST:PORT, yarn, "
        "k8s://… (default: this machine, and no Spark for jobs that only read files).", rich_help_panel=_PANEL,
    ),
    option(
        "--spark-conf NAME=VALUE", "A setting of Spark, as spark.driver.memory=4g; repeatable.", list[str],
        rich_help_panel=_PANEL,
    ),
    option(
        "--archive FILE[#NAME]", "Archive to unpack on every executor, as venv.tar.gz#environment; repeatable.",
        list[str], rich_help_panel=_PANEL,
    ),
    option(
        "--ship/--no-ship", "Send this package and its compiled scanner to the executors (default: unless Spark runs "
        "on this machine alone). Executors of another platform scan in Python, 4 times slower.", bool | None,
        rich_help_panel=_PANEL,
    ),
)  # fmt: skip
SparkOptions = Annotated[SparkSettings, _SPARK]


class JobOptions(NamedTuple):
    """The options of a job over bookies' files."""

    spark: SparkSettings
    places: GivenBookies
    saves: Saves


ForJob = Annotated[JobOptions, combined(JobOptions, _SPARK, _BOOKIES, SAVE_OPTIONS)]


@contextmanager
def spark_job(
    run: Run, spark: SparkSettings, label: str, saves: Saves, columns: Columns | None
) -> Iterator[SparkSession]:
    """Yield a Spark session for the job `label`; its progress goes to stderr if that is a terminal.

    Raises the errors of `check_spark_saves` for rows of `columns`.
    """
    from bkctl.spark.session import LOCAL_MASTER, report_progress, spark_session

    with run.job.working("Starting Spark") as activity, ExitStack() as stack:
        session = stack.enter_context(
            spark_session(
                spark.master or LOCAL_MASTER, settings=spark.settings, archives=spark.archives, ship=spark.ship,
                app_name=f"bkctl {label}", verbose=run.out.verbose,
            )
        )  # fmt: skip
        if columns is not None:
            check_spark_saves(session, saves, columns)
        activity.label, activity.unit = label.capitalize(), "tasks"
        stack.enter_context(report_progress(session, activity.update))
        yield session


class Job(NamedTuple):
    """A job over the files of `bookies`. `connection` has the options of their cluster, None if the job needs none."""

    session: JobSession
    bookies: Bookies
    connection: dict[str, str] | None


@contextmanager
def read_job(
    run: Run, given: JobOptions, label: str, columns: Columns | None = None, *, connects: bool = True
) -> Iterator[Job]:
    """Yield a job that reads bookies' files: on the local engine, or on Spark where an option needs Spark.

    Only Spark saves to URIs and tables. Raises the errors of `check_saves` and `check_spark_saves` for rows of
    `columns`, and errors of the connection to the cluster if the job `connects`.
    """
    spark, places, saves = given
    if columns is not None:
        run.out.selection.of(columns, run.out.output)
        check_saves(saves, columns)
    connection = connection_options(run) if connects else None
    bookies = read_bookies(run, places)
    if connects:
        check_cluster(run)
    if spark != NO_SPARK_OPTIONS or saves.need_spark:
        with spark_job(run, spark, label, saves, columns) as session:
            yield Job(session, bookies, connection)
        return
    from bkctl.spark.local.session import local_session

    with run.job.working(label.capitalize(), unit="parts") as activity, local_session(activity.update) as local:
        yield Job(local, bookies, connection)


def read_bookies(run: Run, given: GivenBookies) -> Bookies:
    """Return the facts that are named, else the bookies of `bookies_at`."""
    from bkctl.spark.facts.frames import Facts

    if given.facts is None:
        return bookies_at(run, given.places)
    facts = Facts(given.facts)
    first, last = (f"{each(bookie.started_at for bookie in facts):%Y-%m-%d %H:%M:%S} UTC" for each in (min, max))
    run.out.note(f"Facts of {counted(len(facts), 'bookie')}, extracted from {first} to {last}")
    return facts


def bookies_at(run: Run, places: Sequence[str] | None) -> list[BookieFiles]:
    """Return the bookies whose files are at `places`, else at --conf, else of the local cluster that is up."""
    from bkctl.bookie.local import active_cluster
    from bkctl.spark.jobs.bookies import find_bookies

    given = list(places or ())
    if not given and run.access.conf is not None:
        given = [str(run.access.conf)]
    if not given and (local := active_cluster()) is not None:
        given = [str(bookie.directory) for bookie in local.bookies()]
    left_out: list[Path] = []
    found = find_bookies(given, left_out)
    for path in left_out:
        run.out.note(f"{path} is left out: no cookie beside it names this directory; give its path to read it")
    run.out.detail(f"files of {len(found)} bookies: {', '.join(bookie.bookie_id for bookie in found)}")
    return found


def connection_options(run: Run) -> dict[str, str]:
    """Return the connection as options of data sources, which name the places of secrets. Raises UsageError."""
    from bkctl.spark.sources.options import CONNECTION_OPTIONS

    given = run.access.connection_settings()
    chosen: dict[str, str] = {}
    for setting in SETTINGS:
        first, *words = setting.key.split("-")
        name, value = first + "".join(map(str.capitalize, words)), getattr(given, setting.field)
        if name in CONNECTION_OPTIONS and value:
            chosen[name] = (
                "true" if value is True else ",".join(value) if isinstance(value, tuple) else setting.type.write(value)
            )
    chosen |= {"metadataUri": run.access.connection().uri, "timeoutSeconds": str(max(1, round(run.access.timeout_s)))}
    if given.metadata_user is not None and given.metadata_password_file is None:
        chosen["metadataPasswordEnv"] = "BKCTL_METADATA_PASSWORD"
    return chosen


def check_cluster(run: Run) -> None:
    """Raise the error of a connection that fails, before Spark starts."""
    with run.access.cluster() as cluster:
        cluster.layout()


# --- results ----------------------------------------------------------------------------------------------------------


class JobResult(ABC):
    """The result of one run of the job `label`, read once for the rows of each `--by` and for the page `title`."""

    label: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[Mapping[Any, Columns]]

    @abstractmethod
    def __init__(self, job: Job, **settings: Any) -> None:
        """Run the job."""

    @abstractmethod
    def rows(self, by: Any) -> Frame:
        """Return the rows of `--by`."""

    @property
    def lines(self) -> list[str]:
        """The lines above the plots of the page, and of `notes`."""
        return []

    def notes(self, shown: Sums) -> list[str]:
        """Return the lines below the rows, whose sums are `shown`."""
        return self.lines

    @abstractmethod
    def blocks(self) -> list[Plot | PageTable]:
        """Return the plots and tables of the page."""

    def section(self) -> Section:
        """Return the section of the page."""
        return Section(self.title, ". ".join(self.lines), self.blocks())

    def problems(self) -> list[BkctlError]:
        """Return the errors that the command ends with."""
        return []

    def finding_count(self, shown: Sums) -> int:
        """Return the number of findings, for rows whose sums are `shown`."""
        return 0


def show_result(
    run: Run, given: JobOptions, kind: type[JobResult], by: Any, *, connects: bool = True, **settings: Any
) -> None:
    """Run a job, print and save its rows `by` a word of `--by`, and end with its problems or findings.

    The job `connects` unless it needs no cluster; `settings` belong to its result.
    """
    shown, columns = Sums(), kind.columns[by]
    with read_job(run, given, kind.label, columns, connects=connects) as job:
        found = kind(job, **settings)
        frame_rows(run, found.rows(by), columns, given.saves, shown.add)
        run.out.note(*found.notes(shown))
        write_pages(given.saves.pages, kind.title, lambda: [found.section()], job.bookies)
        problems, findings = found.problems(), found.finding_count(shown)
    run.out.raise_first(problems)
    run.out.finish_with(findings)
