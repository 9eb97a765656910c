"""A table whose widths come from its first rows, and that fits the terminal.

Columns that are too wide together shrink in this order: paths and payloads (`flexible`) are cut (commands wrap first),
texts wrap at words, titles wrap. Where that is not enough, columns are left out: first those without a value in any
row, then those that are declared `spare`, then the last ones, which `left_out` names; never the first column, and no
sentence.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Final, TextIO

from bkctl.columns import Column, Columns, Kind

from .terminal import has_links, linked, terminal_width
from .texts import BOLD, NULL, RESET, cut, width_of, wrapped

SAMPLE_ROWS: Final = 100
#: Rows that wait for a full batch or for the table's sample are printed after this long all the same.
PATIENCE_S: Final = 0.25
#: Cells that a cut or wrapped column keeps, while others can still be left out, and at the least.
_COMFORT: Final = 28
_NARROW: Final = 12
_GAP: Final = 2
_WRAPPING: Final = frozenset((Kind.TEXT, Kind.NESTED))


class _Shown:
    """A column of a table: where its cells are in a row, its width, and how far it shrinks."""

    def __init__(self, at: int, column: Column, *, is_link: bool) -> None:
        self.at, self.column, self.is_link = at, column, is_link
        self.title = column.title or ""
        self.right = column.kind in (Kind.INTEGER, Kind.SIZE)
        #: True if cells are cut where they do not fit: payloads, and paths.
        self.flexible = column.flexible
        #: True if cells cannot be cut or wrapped.
        self.rigid = self.is_empty = False
        self.width = self.least = self.comfort = 0

    def measure(self, cells: Sequence[str], room: int) -> None:
        """Find how narrow the column may become in a terminal of `room` columns; `cells` are a sample."""
        self.width = min(self.width, max(room, _NARROW))
        given = [cell for cell in cells if cell != NULL]
        self.is_empty = not given
        # A sentence may begin with a path.
        self.flexible |= bool(given) and all(cell.startswith("/") and ": " not in cell for cell in given)
        self.rigid = not self.flexible and (self.column.kind not in _WRAPPING or all(" " not in cell for cell in cells))
        # The whole title keeps room for cells that come later.
        is_whole = self.title != self.title.strip()
        title = len(self.title) if is_whole else max(map(len, self.title.split()), default=0)
        if self.rigid:
            self.least = self.comfort = max([title, *map(width_of, cells)])
            return
        words = (width_of(word) for cell in cells for word in cell.split() if not self.flexible)
        self.least = max(title, min(self.width, _NARROW), max(words, default=0))
        self.comfort = max(self.least, min(self.width, _COMFORT))

    def lines(self, cell: str, *, header: bool) -> list[str]:
        """Return the lines of one cell, cut or wrapped to the column's width."""
        if len(cell) <= self.width and cell.isascii():
            return [cell]
        if self.flexible and not header:
            return [cut(line, self.width) for line in (wrapped(cell, self.width) if self.column.wraps else [cell])]
        return wrapped(cell, self.width) if header or self.column.kind in _WRAPPING else [cell]


class Table:
    """A table whose widths come from its first rows; later rows stream into them."""

    def __init__(self, columns: Columns, stream: TextIO, color: bool, *, fits: bool = True) -> None:
        """A table on a terminal fits its width, unless `fits` is False."""
        links = color and has_links(os.environ)
        titled = (column for column in columns.columns if column.title is not None)
        self._columns = [_Shown(at, each, is_link=links and each.is_file) for at, each in enumerate(titled)]
        #: The rows that the widths wait for, None once they are known.
        self.sample: list[tuple[str, ...]] | None = []
        self._sample_started = 0.0
        self._color = color
        self._room = terminal_width() if fits and stream.isatty() else None
        #: The columns that are printed, and those that may have a value in some row.
        self._kept = self._full = self._columns
        #: Plain rows are laid out by one % operation; terminals, colours and wide characters take the slower way.
        self._template: str | None = None

    @property
    def left_out(self) -> list[str]:
        """The titles of the columns that did not fit and have a value in some row."""
        return [each.title.strip() for each in self._full if each not in self._kept]

    def add(self, rows: Iterable[tuple[str, ...]], *, now: bool) -> list[str]:
        """Add `rows`, and return the lines that can be printed now."""
        lines: list[str] = []
        for cells in rows:
            if self.sample is None:
                line = self._template % cells if self._template else ""
                lines.append(line.rstrip() + "\n" if line.isascii() and line else self._format(cells))
                continue
            self.sample.append(cells)
            moment = time.monotonic()
            self._sample_started = self._sample_started or moment
            if now or len(self.sample) >= SAMPLE_ROWS or moment - self._sample_started > PATIENCE_S:
                lines += self._settle(live=now)
        return lines

    def finish(self) -> list[str]:
        """Return the lines that still wait for more rows."""
        return self._settle(complete=True) if self.sample is not None else []

    def _settle(self, *, live: bool = False, complete: bool = False) -> list[str]:
        sample, self.sample = self.sample or [], None
        for each in self._columns:
            # With `live`, rows that come later have larger numbers.
            least = 7 if live and each.right else 0
            each.width = max([least, len(each.title), *(width_of(row[each.at]) for row in sample)])
        if self._room is not None:
            self._fit(sample, self._room, complete=complete)
        elif not self._color:
            cells = [f"%{each.width if each.right else -each.width}s" for each in self._columns]
            self._template = "  ".join([*cells[:-1], cells[-1] if self._columns[-1].right else "%s"])
        return [self._format([each.title for each in self._columns], header=True), *map(self._format, sample)]

    def _fit(self, sample: Sequence[tuple[str, ...]], room: int, *, complete: bool) -> None:
        """Shrink columns to the terminal's width, and leave columns out where that is not enough."""
        for each in self._columns:
            each.measure([row[each.at] for row in sample], room)
        # More rows may come with values, unless the table is complete.
        full = self._full = [each for each in self._columns if each.at == 0 or not each.is_empty or not complete]
        leaving = [each for each in full[1:] if each.column.spare or (each.rigid and not each.column.style)]
        leaving.sort(key=lambda each: (each.column.spare, each.at), reverse=True)
        tries = [(self._columns, "comfort"), (full, "comfort")]
        tries += [([each for each in full if each not in leaving[:out]], "least") for out in range(len(leaving) + 1)]
        for kept, limit in tries:
            widths = {each: each.width for each in kept}
            excess = sum(widths.values()) + _GAP * (len(kept) - 1) - room
            while excess > 0 and (wide := [each for each in kept if widths[each] > getattr(each, limit)]):
                widths[max(wide, key=lambda each: (each.flexible, widths[each]))] -= 1
                excess -= 1
            if excess <= 0:
                break
        else:
            widths = {each: each.least for each in kept}
        self._kept, last = kept, kept[-1]
        for each, width in widths.items():
            each.width = width
        if not last.right:
            # Later rows may be longer than the sample.
            last.width = max(last.width, room - sum(each.width + _GAP for each in kept[:-1]))

    def _format(self, cells: Sequence[str], *, header: bool = False) -> str:
        fits = self._room is not None
        texts = [each.lines(cells[each.at], header=header) if fits else [cells[each.at]] for each in self._kept]
        return "".join(self._line(parts, cells, header) for parts in zip_longest(*texts, fillvalue=""))

    def _line(self, parts: Sequence[str], cells: Sequence[str], header: bool) -> str:
        shown: list[str] = []
        for each, part in zip(self._kept, parts, strict=True):
            space, cell = " " * (each.width - (len(part) if part.isascii() else width_of(part))), cells[each.at]
            style = None
            if self._color and part:
                style = BOLD if header else (each.column.style or {}).get(cell)
            text = f"{style}{part}{RESET}" if style else part
            if each.is_link and part and not header and cell.startswith("/"):
                text = linked(cell, text)
            shown.append(space + text if each.right else text if each is self._kept[-1] else text + space)
        return "  ".join(shown).rstrip() + "\n"
