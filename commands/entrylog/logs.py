"""The entry logs that `bkctl entrylog` works on, and the columns that name them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bkctl.columns import Column
from bkctl.errors import BkctlError, UsageError

from ..kit.columns import RowOrder
from ..kit.command import Run

if TYPE_CHECKING:
    from bkctl.checks.garbage import LogUse
    from bkctl.files.directories import BookieDirectories
    from bkctl.files.listing import EntryLogSummary
    from bkctl.metadata.liveness import Liveness

R = TypeVar("R", "LogUse", "EntryLogSummary")

LogNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOG",
        help="Entry logs: decimal or 0x id, scoped/ID, file name, path, directory (default: all of --dir or --conf).",
    ),
]


class LogOrder(StrEnum):
    """The order of a list of logs."""

    ID = "id"
    SIZE = "size"
    GARBAGE = "garbage"
    AGE = "age"


SortOption = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="id|size|garbage|age|COLUMN",
        help="By id, size (largest first), garbage (most first; asks the cluster), age, or a column as in other lists.",
    ),
]


def log_order(run: Run, text: str) -> LogOrder:
    """Return the order that --sort names; a column is left to the output, which sorts the rows by it."""
    if text.lower() in set(LogOrder):
        return LogOrder(text.lower())
    run.out.selection = run.out.selection._replace(order=RowOrder.parse(text))
    return LogOrder.ID


def is_scoped(path: Path) -> bool:
    return path.parent.name == "scoped"


def log_key(path: Path) -> str:
    """Return the name that a LOG argument accepts: a decimal id, `scoped/5`, else the path."""
    from bkctl.formats.entry_log import log_id_of

    log_id = log_id_of(path.name)
    if log_id is None:
        return str(path)
    return f"scoped/{log_id}" if is_scoped(path) else str(log_id)


def file_column(source: Callable[[Any], Path]) -> Column:
    return Column("FILE", "file", lambda row: str(source(row)), flexible=True, spare=2)


def ratio_text(value: float) -> str:
    return f"{value:.1%}"


def find_logs(run: Run, names: list[str] | None, directories: list[Path] | None) -> list[Path]:
    """Return the logs that the arguments name, each once."""
    given = run.access.directories(directories, needed=not names)
    if not names:
        return [file.path for file in given.entry_logs()]
    return list(dict.fromkeys(path for name in names for path in _logs_named(given, name)))


def _logs_named(given: BookieDirectories, name: str) -> list[Path]:
    from bkctl.files.directories import BookieDirectories

    if name and Path(name).is_dir():
        return [file.path for file in BookieDirectories.at(name).of_a_bookie().entry_logs()]
    return [given.resolve_entry_log(name)]


AllOption = Annotated[bool, typer.Option("--all", help="Read all logs of --dir or --conf, as without LOG.")]


def find_all_logs(run: Run, names: list[str] | None, directories: list[Path] | None, every: bool) -> list[Path]:
    if names and every:
        raise UsageError("--all and LOG are given", hint="give one of them")
    return find_logs(run, names, directories)


@contextmanager
def open_liveness(run: Run, paths: list[Path], errors: list[BkctlError]) -> Iterator[Liveness]:
    """Yield the state of the cluster's ledgers; problems with reading it are added to `errors` at the end."""
    from bkctl.metadata.liveness import Liveness, check_instance

    with run.access.cluster() as cluster:
        check_instance(cluster, paths)
        liveness = Liveness(cluster.ledgers)
        yield liveness
        errors.extend(liveness.problems)
