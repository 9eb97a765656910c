"""The HTML page of a pipeline's results, by the console's templates: tables as the commands print them, and plots."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bkctl import __version__
from bkctl.columns import Columns, Kind
from bkctl.errors import AlreadyExists

from ..kit.lines import Cells
from ..kit.texts import size_text

if TYPE_CHECKING:
    from bkctl.spark.engine import Frame
    from bkctl.spark.jobs.bookies import Bookies

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
        try:
            with open(path, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError as error:
            raise AlreadyExists(f"{path} exists", hint="remove it, or give another name to --save") from error
