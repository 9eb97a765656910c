"""A table whose widths come from its first rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from .columns import Columns, Kind
from .terminal import Terminal, terminal_width
from .texts import BOLD, RESET, cut, width_of

SAMPLE_ROWS: Final = 100
#: Rows that wait for a full batch or for the table's sample are printed after this long all the same.
PATIENCE_S: Final = 0.25


class Table:
    """A table whose widths come from its first rows; later rows stream into them."""

    def __init__(self, columns: Columns, stream: Terminal, color: bool) -> None:
        self._columns = [column for column in columns.columns if column.title is not None]
        self._right = [column.kind in (Kind.INTEGER, Kind.SIZE) for column in self._columns]
        self._sample: list[tuple[str, ...]] | None = []
        self._sample_started = 0.0
        self._color = color
        self._room = terminal_width() if stream.isatty() else None
        self._widths: list[int] = []
        #: Plain rows are laid out by one % operation; colours, wide characters and cutting take the slower way.
        self._template: str | None = None

    def add(self, rows: Iterable[tuple[str, ...]], *, now: bool) -> list[str]:
        """Add `rows`, and return the lines that can be printed now."""
        lines: list[str] = []
        for cells in rows:
            if self._sample is None:
                line = self._template % cells if self._template else ""
                lines.append(line.rstrip() + "\n" if line.isascii() and line else self._format(cells))
                continue
            self._sample.append(cells)
            moment = time.monotonic()
            self._sample_started = self._sample_started or moment
            if now or len(self._sample) >= SAMPLE_ROWS or moment - self._sample_started > PATIENCE_S:
                lines += self._settle(live=now)
        return lines

    @property
    def is_sampling(self) -> bool:
        """Return True while the widths wait for more rows."""
        return self._sample is not None

    @property
    def is_empty(self) -> bool:
        """True before the first row."""
        return self._sample == []

    def finish(self) -> list[str]:
        """Return the lines that still wait for more rows."""
        return self._settle() if self._sample is not None else []

    def _settle(self, *, live: bool = False) -> list[str]:
        assert self._sample is not None
        titles = [column.title or "" for column in self._columns]
        self._widths = [
            max([len(title), *(width_of(row[index]) for row in self._sample)]) for index, title in enumerate(titles)
        ]
        if live:
            # Rows that come later have larger numbers.
            self._widths = [
                max(width, 7) if right else width for width, right in zip(self._widths, self._right, strict=True)
            ]
        self._fit()
        if not self._color and not (self._room is not None and any(column.flexible for column in self._columns)):
            cells = [
                f"%{width}s" if right else f"%-{width}s" for width, right in zip(self._widths, self._right, strict=True)
            ]
            self._template = "  ".join([*cells[:-1], cells[-1] if self._right[-1] else "%s"])
        header = self._format(titles, header=True)
        lines = [header, *(self._format(row) for row in self._sample)]
        self._sample = None
        return lines

    def _fit(self) -> None:
        """Shrink flexible columns to the terminal's width, the widest first, never below 12 cells."""
        if self._room is None:
            return
        excess = sum(self._widths) + 2 * (len(self._widths) - 1) - self._room
        flexible = [index for index, column in enumerate(self._columns) if column.flexible]
        while excess > 0 and flexible:
            widest = max(flexible, key=lambda index: self._widths[index])
            if self._widths[widest] <= 12:
                return
            self._widths[widest] -= 1
            excess -= 1

    def _format(self, cells: Sequence[str], *, header: bool = False) -> str:
        parts: list[str] = []
        last = len(cells) - 1
        for index, (cell, width) in enumerate(zip(cells, self._widths, strict=True)):
            column = self._columns[index]
            if self._room is not None and column.flexible:
                cell = cut(cell, width)
            space = " " * (width - (len(cell) if cell.isascii() else width_of(cell)))
            style = None
            if self._color:
                style = BOLD if header else (column.style or {}).get(cell)
            shown = f"{style}{cell}{RESET}" if style else cell
            parts.append(space + shown if self._right[index] else shown if index == last else shown + space)
        return "  ".join(parts).rstrip() + "\n"
