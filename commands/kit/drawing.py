"""Trees, panels and progress on a terminal, drawn by rich. Only a command that draws one imports this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from bkctl.columns import Column, Columns

from .lines import cell_text
from .terminal import emit, terminal_width
from .texts import plain

_BAR_MIN: Final = 8
_BAR_MAX: Final = 24
#: The columns of a panel's edge beside its title.
_EDGE_WIDTH: Final = 6


def _drawn(thing: Any, *, color: bool, width: int | None = None) -> str:
    """Return what rich draws, as wide as the terminal."""
    out = StringIO()
    console = Console(
        file=out, width=width or terminal_width(), force_terminal=color, color_system="standard" if color else None,
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    console.print(thing)
    return out.getvalue()


def panel_text(title: str, paragraphs: Iterable[str], *, style: str, color: bool) -> str:
    """Return a frame in the color `style` around paragraphs, with its title in the upper edge."""
    body = Text("\n".join(plain(paragraph) for paragraph in paragraphs))
    heading: Text | None = Text(plain(title), style="bold")
    if heading is not None and heading.cell_len > terminal_width() - _EDGE_WIDTH:  # an edge cuts its title
        body, heading = Text.assemble(heading, "\n", body), None
    return _drawn(Panel(body, title=heading, title_align="left", border_style=style), color=color)


def progress_line(
    spinner: str, work_id: str | None, label: str, share: float | None, parts: Sequence[str], *, color: bool
) -> str:
    """Return one line for the progress of work; it is cut, and its bar shrinks, where the terminal is narrow."""
    width = terminal_width() - 1
    head = Text.assemble(spinner, " ", (f"{work_id} " if work_id else "", "dim"), (plain(label), "bold"))
    rest = Text("  ".join(plain(part) for part in parts))
    line = Table.grid(padding=(0, 1))
    line.add_column(no_wrap=True)
    cells: list[Any] = [head]
    if share is not None:
        room = width - head.cell_len - rest.cell_len - 3
        line.add_column(no_wrap=True)
        cells.append(ProgressBar(total=1.0, completed=share, width=min(max(room, _BAR_MIN), _BAR_MAX)))
    line.add_column(no_wrap=True, overflow="ellipsis")
    line.add_row(*cells, rest)
    return _drawn(line, color=color, width=width).rstrip("\n")


class TreeWriter:
    """Prints rows as trees, one for each value of the first level: `run.rows` for rows that belong together.

    `levels` are the JSON names of the columns of each level; the leaves have the other columns of the table. A tree is
    printed when the next one begins, or at the end. A context manager, as RowWriter.
    """

    def __init__(
        self,
        columns: Columns,
        levels: Sequence[Sequence[str]],
        *,
        color: bool,
        before_write: Callable[[], None] = lambda: None,
    ) -> None:
        shown = {column.name: column for column in columns.columns if column.title is not None}
        self._levels = [[shown[name] for name in level if name in shown] for level in levels]
        above = {column.name for level in self._levels for column in level}
        self._leaf = [column for name, column in shown.items() if name not in above]
        self._color, self._before_write = color, before_write
        self._tree: Tree | None = None
        #: The labels and branches of the last row, from the root on.
        self._path: list[tuple[str, Tree]] = []

    def __enter__(self) -> TreeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._print()

    def rows(self, rows: Iterable[Any]) -> None:
        """Add rows; rows of one branch follow each other."""
        for row in rows:
            self.row(row)

    def row(self, row: Any) -> None:
        """Add one row."""
        labels = [self._text(level, row) for level in self._levels]
        for depth, label in enumerate(labels):
            if depth < len(self._path) and self._path[depth][0] == label.plain:
                continue
            del self._path[depth:]
            if depth == 0:
                self._print()
                self._tree = branch = Tree(label, guide_style="dim")
            else:
                branch = self._path[-1][1].add(label)
            self._path.append((label.plain, branch))
        self._path[-1][1].add(self._text(self._leaf, row))

    def _print(self) -> None:
        if self._tree is not None:
            self._before_write()
            emit(_drawn(self._tree, color=self._color))
            self._tree = None

    def _text(self, columns: Sequence[Column], row: Any) -> Text:
        """Return the names and values of columns, without those that have no value."""
        text = Text()
        for column in columns:
            value = column.getter()(row)
            if value is None:
                continue
            cell = cell_text(column, value)
            text.append("  " if text else "").append(f"{(column.title or '').lower()} ", "dim")
            text.append_text(Text.from_ansi(f"{(column.style or {}).get(cell, '')}{cell}"))
        return text
