"""Sums, pages and problems of the results of `bkctl pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bkctl.errors import BkctlError

from ..kit.command import Run
from .page import Section, write_page
from .saves import Saves

if TYPE_CHECKING:
    from bkctl.spark.jobs.bookies import Bookies


@dataclass
class Sums:
    """Sums of the integer columns of rows."""

    values: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def add(self, row: Any) -> None:
        """Add a row to the sums."""
        self.count += 1
        for name, value in row.asDict().items():
            if isinstance(value, int) and not isinstance(value, bool):
                self.values[name] = self.values.get(name, 0) + value

    def of(self, name: str) -> int:
        """Return the sum of the column `name`."""
        return self.values.get(name, 0)


def sums_of(rows: Iterable[Any]) -> Sums:
    """Return the sums of `rows`."""
    sums = Sums()
    for row in rows:
        sums.add(row)
    return sums


def write_pages(
    run: Run, saves: Saves, title: str, sections: Callable[[], list[Section]], bookies: Bookies
) -> None:  # fmt: skip
    """Write `sections` to each HTML file among `saves`; without one, `sections` is not called."""
    if not saves.pages:
        return
    content = sections()
    for path in saves.pages:
        write_page(path, title, content, [bookie.bookie_id for bookie in bookies])


def raise_problems(run: Run, problems: Sequence[BkctlError]) -> None:
    """Raise the first problem; print the others to stderr first."""
    for problem in problems[1:]:
        run.note(f"bkctl: {problem}")
    if problems:
        raise problems[0]
